"""Retention: which checkpoints of which agents stay, and letting the others go; then values of their runs' records.

Owns the choice (a policy's rules and what must stay whatever they say) and the report. How checkpoints go is the
business of removal.py, how values go that of letting.py. What always holds: a dry run changes nothing and names exactly
what the real one would take at that moment; nobody needs to stop writing; a checkpoint that something came to stand on
meanwhile stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from holdfast.agent import letting
from holdfast.agent.collection import Links, Pace, at_once, points
from holdfast.agent.policy import Moment, Policy
from holdfast.agent.removal import Plan, clear, everything, expected_bytes, stored_bytes
from holdfast.store.catalog import View
from holdfast.store.changes import now_us
from holdfast.store.database import Contents, Database
from holdfast.store.manifest import mark_of
from holdfast.store.rows import Agent, Branch, Point

if TYPE_CHECKING:
    from holdfast.agent.store import Store

LANGGRAPH = "its checkpoints belong to LangGraph: use HoldfastSaver.prune"
"""Somebody else finds these by their keys, and knows what hangs on them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint of a report; ``why`` it stays, empty when it goes."""

    id: str
    label: str
    time: datetime
    depth: int
    why: tuple[str, ...] = ()

    @classmethod
    def of(cls, point: Point, why: Iterable[str] = ()) -> Entry:
        at = datetime.fromtimestamp(point.manifest.time_us / 1e6, UTC)
        return cls(point.id.hex(), point.manifest.label, at, point.manifest.depth, tuple(why))

    def to_json(self) -> dict[str, Any]:
        found = {"id": self.id, "label": self.label, "time": self.time.isoformat(), "depth": self.depth}
        return {**found, "why": list(self.why)} if self.why else found


def _sorted(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.time, entry.depth), reverse=True)


class Entries(Sequence[Entry]):
    """The entries of what stays, newest first. They are read when somebody looks: where nothing goes, nobody may."""

    def __init__(self, db: Database, numbers: set[int], why: Callable[[int], Iterable[str]]) -> None:
        self._db = db
        self._numbers = numbers
        self._why = why
        self._all: list[Entry] | None = None

    def read(self, view: View) -> list[Entry]:
        self._all = _sorted(Entry.of(point, self._why(point.n)) for point in points(view, self._numbers))
        return self._all

    def _entries(self) -> list[Entry]:
        if self._all is None:
            with self._db.moment() as (view, _):
                return self.read(view)
        return self._all

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> list[Entry]: ...
    def __getitem__(self, at: int | slice) -> Entry | list[Entry]:
        return self._entries()[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._entries() == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What stays and what goes of one agent. ``values``: of how many records of its runs the values go.

    ``freed_bytes``: what is freed, or would be; None where several agents are cleared together.
    """

    agent: str
    policy: Policy
    kept: Sequence[Entry]
    removed: Sequence[Entry]
    freed_bytes: int | None
    skipped: str = ""
    """Why nothing of it was looked at."""
    values: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "agent": self.agent, "policy": self.policy.to_json(), "kept": [one.to_json() for one in self.kept],
            "removed": [one.to_json() for one in self.removed], "freed_bytes": self.freed_bytes,
            "skipped": self.skipped, "values": self.values,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What a policy keeps and removes. ``freed_bytes``: by how much the store got smaller, or would, roughly.

    Each of ``agents`` has ``kept`` and ``removed``: entries with ``id``, ``label``, ``time``, ``depth``, and ``why``.
    """

    agents: list[AgentReport]
    freed_bytes: int
    done: bool

    @property
    def kept(self) -> int:
        """How many checkpoints stay."""
        return sum(len(one.kept) for one in self.agents)

    @property
    def removed(self) -> int:
        """How many checkpoints go."""
        return sum(len(one.removed) for one in self.agents)

    @property
    def values(self) -> int:
        """Of how many records the values go."""
        return sum(one.values for one in self.agents)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "agents": [one.to_json() for one in self.agents], "kept": self.kept, "removed": self.removed,
            "values": self.values, "freed_bytes": self.freed_bytes, "done": self.done,
        }  # fmt: skip

    def __repr__(self) -> str:
        word = "removed" if self.done else "to be removed"
        return f"<RetentionReport {self.kept} kept, {self.removed} {word}, {self.freed_bytes:,} bytes>"


Needs = Callable[[Sequence[Branch], Iterable[Point]], Iterable[tuple[bytes, str]]]
"""Which checkpoints of an agent must stay whatever a policy says, by their ids, and why."""


class Choice:
    """What a policy keeps of one agent, and why."""

    def __init__(self, store: Store, links: Links, needs: Needs, agent: Agent, policy: Policy, now: int) -> None:
        self.agent = agent
        self.policy = policy
        self._needs = needs
        self._store = store
        self._links = links
        self._branches = links.branches[agent.a]
        self.seen = links.seen(agent.a)
        self.why: dict[int, dict[str, None]] = {}
        self.skipped = LANGGRAPH if any(links.rows[n].key for n in self.seen) else ""
        for n, why in () if self.skipped else self._stays(now):
            if n in self.seen:
                self.why.setdefault(n, {})[why] = None

    @property
    def kept(self) -> set[int]:
        return self.seen if self.skipped else set(self.why)

    def _stays(self, now: int) -> Iterator[tuple[int, str]]:
        lines = {branch.name: list(self._line(branch.head)) for branch in self._branches}
        yield from ((branch.head, f"head of {branch.name}") for branch in self._branches)
        bad = self._links.view.validities(self.agent.a)
        for name, line in lines.items():
            if line and line[0] in bad:
                yield from ((n, f"newest good one of {name}") for n in [n for n in line if n not in bad][:1])
        if self.policy.tags:
            yield from ((tag.n, f"tag {tag.name}") for tag in self._links.tags[self.agent.a])
        for id, why in self._needs(self._branches, points(self._links.view, self.seen)):
            yield from ((n, why) for n in self._marked(id))
        for id in self._left_by_writers():
            yield from ((n, "left by a rollback of the present writer") for n in self._marked(id))
        moments = {n: Moment(n, 0, "") for n in self.seen}
        if self.policy.reads:
            for point in points(self._links.view, self.seen):
                moments[point.n] = Moment(point.n, point.manifest.time_us, point.manifest.label)
        chosen = {name: [moments[n] for n in line] for name, line in lines.items()}
        yield from self.policy.keeps(chosen, moments.values(), now)

    def _line(self, n: int) -> Iterator[int]:
        while n:
            yield n
            n = self._links.before(n)

    def _marked(self, id: bytes) -> list[int]:
        return self._links.marked.get(mark_of(id), [])

    def _left_by_writers(self) -> Iterator[bytes]:
        """Heads that somebody who writes now has rolled back from.

        Its live state may count nodes of theirs as stored, until it is opened again.
        """
        held = {branch.name for branch in self._branches if self._is_held(branch)}
        for entry in reversed(self._links.view.log(self.agent.a)) if held else ():
            body = entry.body
            if body.get("what") == "open":
                held.discard(body.get("branch"))
            elif body.get("branch") in held and body.get("from"):
                yield body["from"]

    def _is_held(self, branch: Branch) -> bool:
        db = self._store._db
        return bool(branch.generation) and db.leases.alive(branch.uuid, branch.generation)


class _Round:
    """What several choices come to together: what one agent does not keep may be another's."""

    def __init__(self, store: Store, agents: Chosen, *, telling: bool = True) -> None:
        self._store = store
        self._agents = agents
        self._telling = telling
        self._choices: list[tuple[Choice, Entries]] = []
        self.letting = letting.NOTHING
        self._going: dict[int, dict[int, Entry]] = {}  # by agent, of all attempts: what is deleted cannot be read again

    def plan(self, contents: Contents, links: Links) -> Plan:
        now = now_us()
        there = [(agent, policy) for agent, policy in self._agents if agent.a in links.agents]
        needs = self._store._needs()
        choices = [Choice(self._store, links, needs, agent, policy, now) for agent, policy in there]
        chosen = {choice.agent.a: choice.kept for choice in choices}
        plan = Plan(links, everything(links, chosen).union(*chosen.values()))
        self._choices = [(choice, self._kept(choice, plan, chosen)) for choice in choices]
        for choice, kept in self._choices:
            plan.forget(choice.agent)
            if not choice.policy.tags:
                plan.untag.add(choice.agent.a)
            going = self._going.setdefault(choice.agent.a, {})
            fresh = choice.seen & plan.dead - going.keys()
            if self._telling and fresh:
                going.update((point.n, Entry.of(point)) for point in points(contents.view, fresh))
            if self._telling and going:
                kept.read(contents.view)  # it may not be there any more when somebody looks
        return plan

    def _kept(self, choice: Choice, plan: Plan, chosen: Mapping[int, set[int]]) -> Entries:
        links = plan.links
        numbers = set() if choice.skipped else choice.seen & plan.keep
        others: list[tuple[str, set[int]]] = []
        if not numbers <= choice.why.keys():
            agents = [agent for agent in links.agents.values() if agent.a != choice.agent.a]
            others = [(one.name, chosen[one.a] if one.a in chosen else links.seen(one.a)) for one in agents]

        def why(n: int) -> Iterable[str]:
            return choice.why.get(n) or [f"seen by {name}" for name, seen in others if n in seen]

        return Entries(self._store._db, numbers, why)

    def choose_values(self, links: Links, keep: set[int] | None = None, pace: Pace = at_once) -> None:
        """What goes of records, once only the checkpoints ``keep`` are there."""
        looked_at = [(choice.agent, choice.policy) for choice, _ in self._choices if not choice.skipped]
        chosen = [(agent, policy) for agent, policy in looked_at if agent.a in links.agents]

        def there(a: int) -> set[int]:
            return links.seen(a) if keep is None else links.seen(a) & keep

        self.letting = letting.choose(self._store, links, chosen, there, pace)

    def let_values_go(self, pace: Pace = at_once) -> None:
        """For what comes after the checkpoints have gone: as long as one is there, it may be gone back to."""
        if any(policy.runs is not None for _, policy in self._agents):
            with self._store._db.moment() as contents:
                self.choose_values(Links(contents.view, pace), pace=pace)
            letting.let_go(self._store._db, self.letting, pace)

    def report(self, plan: Plan, freed: int, *, done: bool) -> RetentionReport:
        gone = {a: [entry for n, entry in some.items() if n not in plan.keep] for a, some in self._going.items()}
        alone = freed if sum(bool(some) or bool(self.letting.count(a)) for a, some in gone.items()) == 1 else None
        found = []
        for choice, kept in self._choices:
            removed = _sorted(gone[choice.agent.a])
            values = self.letting.count(choice.agent.a)
            size = alone if removed or values else 0
            found.append(AgentReport(choice.agent.name, choice.policy, kept, removed, size, choice.skipped, values))
        return RetentionReport(found, freed, done=done)


Chosen = Sequence[tuple[Agent, Policy]]


def preview(store: Store, agents: Chosen) -> RetentionReport:
    """What would go, and about how many bytes. Changes nothing, and works on a store that can only be read."""
    attempt = _Round(store, agents)
    with store._db.moment() as contents:
        plan = attempt.plan(contents, links := Links(contents.view))
        attempt.choose_values(links, plan.keep)
        bare = attempt.letting.rows
        return attempt.report(plan, expected_bytes(contents, plan, bare) if plan.dead or bare else 0, done=False)


def retain(store: Store, agents: Chosen) -> RetentionReport:
    """Let go what no rule keeps."""
    store.flush()
    db = store._db
    before = stored_bytes(db)
    attempt = _Round(store, agents)
    plan = clear(db, attempt.plan, then=attempt.let_values_go)
    return attempt.report(plan, max(0, before - stored_bytes(db)), done=True)


def follow(store: Store, agents: Chosen, pace: Pace) -> None:
    """As ``retain``, for nobody. ``pace`` is called between any two steps; what it raises stops the work there."""
    if agents:
        attempt = _Round(store, agents, telling=False)
        clear(store._db, attempt.plan, pace, partial(attempt.let_values_go, pace))
