"""Retention: which checkpoints of which agents stay, and letting the others go.

Owns the choice (a policy's rules and what must stay whatever they say) and the report. How checkpoints are forgotten is
the business of ``removal``. What always holds: a dry run changes nothing and names exactly what the real one would take
at that moment; nobody needs to stop writing; a checkpoint that something came to stand on meanwhile stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from holdfast.agent import history, removal
from holdfast.agent.collecting import Collection
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.policy import Moment, Policy
from holdfast.agent.removal import Family
from holdfast.agent.sparing import ROW_BYTES, spared
from holdfast.codec.values import decode
from holdfast.errors import Damaged
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, TagRow
from holdfast.store.cipher import PLAIN
from holdfast.store.forgetting import Forgetting, Pace, Retained
from holdfast.store.locks import BUSY_WAIT_S
from holdfast.store.opening import now_us
from holdfast.store.ranges import Ranges
from holdfast.store.reading import Reading
from holdfast.store.writing import packed_nodes

if TYPE_CHECKING:
    from holdfast.agent.store import Store


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint of a report; ``why`` it stays, empty when it goes."""

    id: str
    label: str
    time: datetime
    depth: int
    why: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = {"id": self.id, "label": self.label, "time": self.time.isoformat(), "depth": self.depth}
        return {**found, "why": list(self.why)} if self.why else found


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What stays and what goes of one agent.

    ``freed_bytes``: what a dry run expects to be freed on its account; afterwards what was, and None where several
    agents were cleared together.
    """

    agent: str
    policy: Policy
    kept: list[Entry]
    removed: list[Entry]
    freed_bytes: int | None
    skipped: str = ""
    """Why nothing of it was looked at."""

    def to_json(self) -> dict[str, Any]:
        return {
            "agent": self.agent, "policy": self.policy.to_json(), "kept": [one.to_json() for one in self.kept],
            "removed": [one.to_json() for one in self.removed], "freed_bytes": self.freed_bytes,
            "skipped": self.skipped,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What a policy keeps and removes. ``freed_bytes``: by how much the store got smaller, or would, roughly."""

    agents: list[AgentReport]
    freed_bytes: int
    done: bool

    @property
    def kept(self) -> int:
        return sum(len(one.kept) for one in self.agents)

    @property
    def removed(self) -> int:
        return sum(len(one.removed) for one in self.agents)

    def to_json(self) -> dict[str, Any]:
        return {
            "agents": [one.to_json() for one in self.agents], "kept": self.kept, "removed": self.removed,
            "freed_bytes": self.freed_bytes, "done": self.done,
        }  # fmt: skip

    def __repr__(self) -> str:
        word = "removed" if self.done else "to be removed"
        return f"<RetentionReport {self.kept} kept, {self.removed} {word}, {self.freed_bytes:,} bytes>"


class Choice:
    """What goes of one agent, and why the rest stays."""

    def __init__(self, store: Store, family: Family, agent: AgentRow, policy: Policy, now: int) -> None:
        self.line: Line = family.living[agent.a]
        self.family = family
        self.policy = policy
        self._store = store
        self._reading = family.reading
        self._agent = agent
        self.branches = self._reading.branches(agent.a)
        self.rows = {n: row for n, row in sorted(family.rows.items()) if self.line.sees(row)}
        self.manifests = {n: Manifest.decode(row.manifest) for n, row in self.rows.items()}
        self.why: dict[int, dict[str, None]] = {}
        self.skipped = "its checkpoints belong to LangGraph: use HoldfastSaver.prune" if self._keyed() else ""
        if not self.skipped:
            for n, why in self._stays(now):
                if n in self.rows:
                    self.why.setdefault(n, {})[why] = None
        self.going = set() if self.skipped else self.rows.keys() - self.why.keys()
        self.dead = family.dead(self.going, agent.a) if self.going else set()  # with what was spared before

    def _keyed(self) -> bool:
        """Whether somebody else finds these checkpoints by keys, and knows what hangs on them."""
        return any(row.key is not None for row in self.rows.values())

    def _stays(self, now: int) -> Iterable[tuple[int, str]]:
        lines = {str(body_of(branch)["name"]): self._line_of(branch) for branch in self.branches}
        moments = {n: Moment(n, one.time_us, one.label) for n, one in self.manifests.items()}
        chosen = {name: [moments[n] for n in line] for name, line in lines.items()}
        yield from ((branch.head, f"head of {body_of(branch)['name']}") for branch in self.branches)
        bad = {row.n for row in self._reading.validities(self._agent.a)}
        for name, line in lines.items():
            if line and line[0] in bad:
                yield from ((n, f"newest good one of {name}") for n in [n for n in line if n not in bad][:1])
        if self.policy.tags:
            yield from ((tag.n, f"tag {body_of(tag)['name']}") for tag in self._reading.tags(self._agent.a))
        by_id = {row.id: n for n, row in self.rows.items()}
        for identity, why in self._store._needed(self.branches, self.rows.values()):
            if identity in by_id:
                yield by_id[identity], why
        for identity in self._left_by_writers():
            if identity in by_id:
                yield by_id[identity], "left by a rollback of the present writer"
        yield from self.policy.keeps(chosen, moments.values(), now)

    def _line_of(self, branch: BranchRow) -> list[int]:
        """The numbers of a branch's history, newest first, over what was forgotten before."""
        found: list[int] = []
        n = branch.head
        while n in self.rows:
            found.append(n)
            parent = self.rows[n].parent
            n = parent if parent in self.rows else self.line.over.get(n, 0)
        return found

    def _left_by_writers(self) -> Iterable[bytes]:
        """Heads that somebody who writes now has rolled back from.

        Its live state may count nodes of theirs as stored, until it is opened again (design 010).
        """
        held = {
            str(body_of(branch)["name"])
            for branch in self.branches
            if branch.generation and self._store._catalog.holder_alive(branch.b, branch.generation)
        }
        for event in self._reading.events(a=self._agent.a, newest_first=True) if held else ():
            body = body_of(event)
            if body.get("what") == "open":
                held.discard(body["branch"])
                if not held:
                    return
            elif body.get("what") == "rollback" and body["branch"] in held:
                yield body["from"]

    # -- saying it --------------------------------------------------------------------------------------

    def confirmed(self, branches: Sequence[BranchRow], tags: Sequence[TagRow]) -> Retained | None:
        """What the event says; None when a branch or tag has come to stand on something that was to go."""
        if any(row.head in self.going for row in branches):
            return None
        if self.policy.tags and any(tag.n in self.going for tag in tags):
            return None
        return self._said

    def prepare(self) -> None:
        body = removal.said(self.family, self.line, self.going, self.family.dead(self.going, self._agent.a))
        self._said = Retained(Ranges.of(self.going), body)

    def report(self, freed_bytes: int | None) -> AgentReport:
        kept = [self._entry(n, tuple(self.why.get(n, ()))) for n in sorted(self.rows, reverse=True) if n in self.why]
        removed = [self._entry(n) for n in sorted(self.going, reverse=True)]
        return AgentReport(str(self.line.body["name"]), self.policy, kept, removed, freed_bytes, self.skipped)

    def _entry(self, n: int, why: tuple[str, ...] = ()) -> Entry:
        row, manifest = self.rows[n], self.manifests[n]
        at = datetime.fromtimestamp(manifest.time_us / 1e6, UTC)
        return Entry(row.id.hex(), manifest.label, at, row.depth, why)


Chosen = Sequence[tuple[AgentRow, Policy]]


def preview(store: Store, agents: Chosen) -> RetentionReport:
    """What would go, and about how many bytes. Changes nothing, and works on a store that can only be read."""
    store._catalog.check_usable()
    reading: Reading = store._catalog
    choices = [_choose(store, reading, agent, policy, lambda: None) for agent, policy in agents]
    weights = [_weight(store, reading, [choice]) if choice.going else 0 for choice in choices]
    found = [choice.report(weight) for choice, weight in zip(choices, weights, strict=True)]
    going = [choice for choice in choices if choice.going]
    total = _weight(store, reading, going) if len(going) > 1 else sum(weights)
    # Pages that are free already are given back along with it.
    return RetentionReport(found, total + (store._catalog.sizes()["free"] if going else 0), done=False)


def retain(store: Store, agents: Chosen, pace: Pace | None = None) -> RetentionReport:
    """Let go what no rule keeps. ``pace`` is called between any two steps; what it raises stops the work there."""
    catalog = store._catalog
    # Whoever is in no hurry lets others that forget go first.
    with catalog.forgetting(BUSY_WAIT_S if pace is None else 0.0, pace) as forgetting:
        removal.finish(store, forgetting)
        before = _bytes(store)
        choices = []
        touched = []
        for agent, policy in agents:
            choice = _forget(store, forgetting, agent, policy)
            choices.append(choice)
            if choice.going:
                touched.append(agent.a)
        if touched:
            removal.clear(store, forgetting, touched, spare=True)
    if touched and pace is None:
        catalog.shrink()
    freed = max(0, before - _bytes(store))
    alone = freed if len(touched) == 1 else None
    found = [choice.report(alone if choice.going else 0) for choice in choices]
    return RetentionReport(found, freed, done=True)


def _bytes(store: Store) -> int:
    """What the store takes, its log aside: that is as long as the last changes were many, and is cut at the end."""
    sizes = store._catalog.sizes()
    return sizes["catalog"] + sizes["packs"]


def _forget(store: Store, forgetting: Forgetting, agent: AgentRow, policy: Policy) -> Choice:
    while True:
        choice = _choose(store, forgetting.reading, agent, policy, forgetting.pace)
        if not choice.going:
            return choice
        choice.prepare()
        if forgetting.retain(agent, choice.confirmed, now_us()) is not None:
            return choice


def _choose(store: Store, reading: Reading, agent: AgentRow, policy: Policy, pace: Pace) -> Choice:
    return Choice(store, Family(store, reading, agent.a, pace), agent, policy, now_us())


def _weight(store: Store, reading: Reading, choices: Sequence[Choice]) -> int:
    """By how many bytes the store would get smaller, as far as rows, nodes and chunks tell."""
    families: dict[frozenset[int], Family] = {}
    dead: set[int] = set()
    for choice in choices:
        families.setdefault(frozenset(choice.family.agents), choice.family)
        dead |= choice.dead - spared(store, choice.family, choice.dead)
    doomed, altered, _ = removal.doomed_by(reading, list(families.values()), dead, {})
    collection = Collection(reading, doomed, dead, seals={seal.n for seal, _ in altered})
    added: dict[bytes, bytes] = {}
    try:
        for family in families.values():
            for row in family.orphans(dead):
                if not row.sealed:
                    nodes = history.state_of(store._catalog, row).unstored()
                    added.update(nodes)
                    collection.live.state(Manifest.decode(row.manifest).sections, nodes)
        collection.mark()
        for seal, entries in altered:
            if entries is not None:
                places, nodes = removal.refolded(reading, seal, entries, collection.live)
                added.update(nodes)
                collection.live.state([("", digest) for digest in decode(places)[0]], nodes)
        waste = collection.settled()
    except Damaged:
        return 0  # what cannot be read might name anything: nothing would be collected
    rows = [row for family in families.values() for n, row in family.rows.items() if n in dead]
    freed = sum(len(row.manifest) + len(row.operations) + ROW_BYTES for row in rows)
    freed += reading.tail_bytes(row.n for row in rows)
    freed += reading.stored_bytes("node", waste.nodes) + reading.stored_bytes("chunk", waste.chunks)
    freed += reading.stored_bytes("metadata", waste.metadata)
    new = packed_nodes(PLAIN, list(added.items()))
    return max(0, freed - sum(len(data) for _, data in new))
