"""Forgetting: letting checkpoints go, whole agents, or some checkpoints of one, also while somebody writes it.

Owns the way in which checkpoints go: those that stay although the one before them goes are made to stand alone, what
lies in a segment with others is taken out of it, and rows are deleted, children first, in small transactions. There is
no note of what is under way: after each of them the store is whole, and whoever is killed starts over. What always
holds: inside each transaction it is asked again whether something has come to stand on what goes; a checkpoint that
stays keeps its id, its state and its changes; what another agent sees stays for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.agent import history
from holdfast.agent.background import fold_below
from holdfast.agent.collection import AT_ONCE, WASTE, Links, Pace, Reached, alone, at_once, collect, note_waste
from holdfast.errors import AgentBusy, Damaged, Forgotten, StoreBusy, UnknownAgent
from holdfast.store.catalog import View, listed, slices
from holdfast.store.changes import Change, Objects, Work, moved_body, pack_node
from holdfast.store.database import Contents, Database
from holdfast.store.engine import Refused
from holdfast.store.manifest import pack_payload
from holdfast.store.rows import Agent, Branch
from holdfast.store.tables import CHECKPOINTS, TABLES

if TYPE_CHECKING:
    from holdfast.agent.store import Store

log = logging.getLogger("holdfast.store")

TRIES = 16
"""How often others may come between before it is given up. What was deleted until then stays deleted."""

STANDING_BYTES = 2**20
"""Nodes that one transaction writes when checkpoints are made to stand alone; those of one state it writes whole."""

ROW_BYTES = 96
"""What a row takes besides its content: numbers, its sum, its place in indexes."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What was forgotten, or would be."""

    name: str
    checkpoints: int
    events: int
    kept_for: list[str]
    """Agents that still see some of it: copies, or what this one is a copy of."""
    freed_bytes: int
    """By how much the store got smaller, or would, roughly."""
    done: bool
    copies: list[str]
    """Agents that went with it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "agent": self.name, "checkpoints": self.checkpoints, "events": self.events, "kept_for": self.kept_for,
            "copies": self.copies, "freed_bytes": self.freed_bytes, "done": self.done,
        }  # fmt: skip


class Plan:
    """What is to stay, of everything that was there at one moment. All else goes, seen by somebody or not."""

    def __init__(self, links: Links, keep: set[int]) -> None:
        self.links = links
        self.keep = keep
        self.dead = links.rows.keys() - keep
        self.forgets: dict[int, tuple[int, list[bytes]]] = {}
        """By agent: how many of its checkpoints go, and the ends of lines that nothing else leads to any more."""
        self.untag: set[int] = set()
        """Agents whose tags go with their checkpoints."""
        self.entries = 0
        """How many entries of the log went with what has gone."""

    def over(self, n: int) -> int:
        """The nearest ancestor of a checkpoint that stays, or 0."""
        above = self.links.before(n)
        while above and above not in self.keep:
            above = self.links.before(above)
        return above

    @property
    def orphans(self) -> list[int]:
        """Checkpoints that stay although the one before them goes."""
        return [n for n in self.keep if self.links.rows[n].parent in self.dead]

    @property
    def broken(self) -> dict[int, list[int]]:
        """The segments that lose checkpoints, each with all of its own."""
        rows = self.links.rows
        found: dict[int, list[int]] = {s: [] for n in self.dead if (s := rows[n].s)}
        for n, link in rows.items():
            if link.s in found:
                found[link.s].append(n)
        return found

    def forget(self, agent: Agent) -> None:
        """Let an agent's log say that it forgets what goes of its checkpoints, and name the ends that stay.

        Of lines, that is, which no branch and no tag leads to: where the end of such a line goes, nothing else would
        lead to what stays of it, and from now on whatever is missing besides was lost.
        """
        links = self.links
        seen = links.seen(agent.a)
        if seen <= self.keep:
            return
        kept = seen & self.keep
        led_to: set[int] = set()
        for start in links.named(agent.a) & kept:
            n = start
            while n and n not in led_to:
                led_to.add(n)
                n = self.over(n)
        ends = kept - led_to - {self.over(n) for n in kept}
        self.forgets[agent.a] = len(seen) - len(kept), [links.view.point(n).id for n in ends]


Choose = Callable[[Contents, Links], Plan]


def let_go(db: Database, choose: Choose, pace: Pace = at_once) -> Plan:
    """Delete every checkpoint that a plan does not keep. ``choose`` is asked again when something came between."""
    for left in reversed(range(TRIES)):
        try:
            with db.moment() as contents:
                plan = choose(contents, Links(contents.view, pace))
                if plan.dead:
                    _stand_alone(db, contents, plan, pace)
            if plan.dead:
                _delete(db, plan, pace)
            return plan
        except (Refused, Forgotten, UnknownAgent):
            if not left:
                raise StoreBusy(
                    "others kept changing what was to be let go; the store is whole, and some of it is gone",
                    hint="Try again: what is left goes then.",
                ) from None
    raise StoreBusy("nothing was tried")


# -- what stays ----------------------------------------------------------------------------------------------------


class _Standing(NamedTuple):
    """A checkpoint that is to stand alone. ``parent`` goes; where it is 0, what was before it does."""

    n: int
    parent: int
    over: int


def fresh_nodes(contents: Contents, n: int) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The roots of a checkpoint's state, and those nodes of it that are not stored."""
    point = contents.view.point(n)
    roots = [root for _, root in point.manifest.sections]
    return roots, {} if point.row.sealed else history.state_of(contents, point).unstored()


def _stand_alone(db: Database, contents: Contents, plan: Plan, pace: Pace) -> None:
    """Before a checkpoint goes, each child of it that stays is sealed, has no parent, and is listed as shallow."""
    shallow = plan.links.shallow
    group = [_Standing(n, 0, plan.over(n)) for n, over in shallow.items() if n in plan.keep and over in plan.dead]
    roots: set[bytes] = set()
    nodes: dict[bytes, bytes] = {}
    for n in plan.orphans:
        pace()
        group.append(_Standing(n, plan.links.rows[n].parent, plan.over(n)))
        sections, fresh = fresh_nodes(contents, n)
        roots.update(sections)
        nodes |= fresh
        if len(group) >= AT_ONCE or sum(map(len, nodes.values())) > STANDING_BYTES:
            db.change(_standing(group, roots, nodes))
            group, roots, nodes = [], set(), {}
    if group:
        db.change(_standing(group, roots, nodes))


def _standing(group: Sequence[_Standing], roots: set[bytes], nodes: dict[bytes, bytes]) -> Work[None]:
    needs = roots.union(*map(history.children, nodes.values())) - nodes.keys()
    objects = Objects({name: pack_node(raw) for name, raw in nodes.items()}, needs_nodes=frozenset(needs))

    def stand(change: Change) -> None:
        change.put_objects(objects)
        for over in {one.over for one in group if one.over}:
            change.hold(over)  # another policy may not keep it
        for n, parent, over in group:
            row = change.row(n)
            if row.parent:
                if row.parent != parent:
                    raise Refused("the history changed during the removal")
                change.set_row(row, row._replace(sealed=1, parent=0))
            change.delete("shallow", "n", [n])
            change.put("shallow", n, over)

    return stand


# -- what goes -----------------------------------------------------------------------------------------------------


class _Watch:
    """Whether a ref has come to stand on what goes since the plan was made. Asked where nobody else can write.

    A branch that is still in the epoch of the plan can only have gone on from its head, which stays. One that has moved
    once since, or is new, has nothing but what its head leads to.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._epochs = {branch.b: branch.epoch for some in plan.links.branches.values() for branch in some}
        self._tags = {tag.n for some in plan.links.tags.values() for tag in some}

    def check(self, change: Change) -> None:
        dead = self._plan.dead
        for b, a, head, epoch in change.tx.run("SELECT b, a, head, epoch FROM branch"):
            known = self._epochs.get(b, -1)
            if a and epoch != known:
                if epoch > known + 1:
                    raise Refused("a branch has moved more than once")
                self._land(change, head)
                if a not in self._plan.links.agents and not self._plan.links.left_by(change, a).isdisjoint(dead):
                    raise Refused("a copy was made of what is to go")
                self._epochs[b] = epoch
        for (n,) in change.tx.run("SELECT n FROM tag"):
            if n not in self._tags:
                self._land(change, n)
                self._tags.add(n)
        for n, over in change.tx.run("SELECT n, over FROM shallow"):
            if over in dead and n not in dead:
                raise Refused("something goes on from what is to go")

    def _land(self, change: Change, n: int) -> None:
        """Follow a checkpoint up to one that the plan knows."""
        while n and n not in self._plan.links.rows:
            rows = change.up(n, 64)
            n = next((row.n for row in rows if row.n in self._plan.links.rows), rows[-1].parent)
        if n in self._plan.dead:
            raise Refused("something new depends on what was to be removed")


def _delete(db: Database, plan: Plan, pace: Pace) -> None:
    watch = _Watch(plan)
    broken = plan.broken

    def say(change: Change) -> None:
        watch.check(change)
        for a, (count, left) in plan.forgets.items():
            change.agent_at(a)
            earlier = [entry.e for entry in change.log(a) if entry.body.get("what") == "forget"]
            change.delete("log", "e", earlier)  # one that forgets a little every hour has one entry and not thousands
            change.say(a, {"what": "forget", "checkpoints": count, "left": left})

    if plan.forgets:
        alone(db, say)
    for loose, segments in _steps(plan, broken):
        pace()
        unfolded = _unfolded(db, plan, segments, broken)
        plan.entries += alone(db, partial(_drop, watch=watch, plan=plan, loose=loose, segments=unfolded))
    rows = plan.links.rows
    for n in plan.keep:
        parent = rows[n].parent
        if rows[n].sealed and parent in plan.keep and (not rows[parent].s or rows[parent].s in broken):
            pace()
            with suppress(Forgotten):
                fold_below(db, n)  # also what whoever made it had no time for


def _steps(plan: Plan, broken: dict[int, list[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """What one transaction after the other deletes: loose checkpoints and segments, children always before parents.

    A segment is a run of checkpoints, so nothing can be between two of its own: what goes is a forest of loose ones and
    of segments.
    """
    rows, dead = plan.links.rows, plan.dead
    unit = {n: -rows[n].s or n for n in dead}  # segments as negative numbers
    above: dict[int, int] = {}
    for n in dead:
        parent = rows[n].parent
        if parent in dead and unit[parent] != unit[n]:
            above[unit[n]] = unit[parent]
    depth: dict[int, int] = {}
    for one in unit.values():
        way = []
        while one and one not in depth:
            way.append(one)
            one = above.get(one, 0)  # noqa: PLW2901  the walk up
        deep = depth.get(one, 0)
        for at, other in enumerate(reversed(way), 1):
            depth[other] = deep + at
    loose: list[int] = []
    segments: list[int] = []
    size = 0
    for one in sorted(depth, key=depth.__getitem__, reverse=True):
        (loose if one > 0 else segments).append(abs(one))
        size += 1 if one > 0 else len(broken[-one])
        if size >= AT_ONCE:
            yield loose, segments
            loose, segments, size = [], [], 0
    if size:
        yield loose, segments


_Unfolded = dict[int, tuple[list[int], dict[int, bytes]]]
"""By segment: all that lie in it, and the payloads of those that stay."""


def _unfolded(db: Database, plan: Plan, segments: Sequence[int], broken: dict[int, list[int]]) -> _Unfolded:
    """Of segments that go, the payloads of those that stay: they become loose again."""
    found: _Unfolded = {}
    for s in segments:
        staying = {}
        for n in broken[s]:
            if n in plan.keep:
                try:
                    segment = db.view.segment(s)
                    at = segment.place[n]
                    staying[n] = pack_payload(segment.manifests[at], segment.operations(at))
                except (Damaged, KeyError):
                    if db.view.rows("segment", "WHERE s = ?", (s,)):
                        raise
                    raise Refused("the segment has gone meanwhile") from None
        found[s] = broken[s], staying
    return found


def _drop(change: Change, watch: _Watch, plan: Plan, loose: Sequence[int], segments: _Unfolded) -> int:
    """Delete some checkpoints, and what was said of them. Returns how many entries of the log went with them."""
    watch.check(change)
    gone = [("loose", row) for row in _taken(change, "loose", loose)]
    for s, (members, staying) in segments.items():
        for row in _taken(change, "checkpoint", members):
            if row[8] != s:
                raise Refused("the checkpoint was stored elsewhere during the removal")
            data = staying.get(row[0])
            if data is None:
                gone.append(("checkpoint", row))
            else:
                *columns, _ = change.cipher.loaded("checkpoint", row)
                change.put("loose", *columns, data)
    change.delete("segment", "s", list(segments))
    numbers = [row[0] for _, row in gone]
    for a, name, *_ in list(change.some("tag", "n", numbers)):
        if a not in plan.untag:
            raise Refused("a tag was set on what is to go")
        untag(change, a, name.decode())
    for table in ("shallow", "validity"):
        change.delete(table, "n", numbers)
    note_waste(change)
    return drop_under(change, {change.cipher.unname(table, row[2]) for table, row in gone if row[2]})


def untag(change: Change, a: int, name: str) -> None:
    change.drop_tag(a, name)
    change.say(a, {"what": "untag", "name": name})


def _taken(change: Change, table: str, numbers: Sequence[int]) -> list[tuple[Any, ...]]:
    """Delete rows of checkpoints; gives them as they were stored. ``Refused`` unless all of them are there."""
    columns = TABLES[table].listed if table == "checkpoint" else "n, mark, key"
    found = []
    for part in slices(numbers):
        found += change.tx.run(f"DELETE FROM {table} WHERE n IN {listed(len(part))} RETURNING {columns}", part)
    if len(found) != len(numbers):
        raise Refused("some of it is gone already, or lies elsewhere")
    if numbers:
        change.remember("loose", max(numbers))
    return found


def drop_under(change: Change, keys: Iterable[bytes]) -> int:
    """Delete what the log keeps under keys that no checkpoint has any more. Returns how much that was."""
    gone = [key for key in keys if not has_key(change, key)]
    entries = [entry.e for entry in change.log_under(gone)]
    change.delete("log", "e", entries)
    return len(entries)


def has_key(change: Change, key: bytes) -> bool:
    """Whether a checkpoint has that key."""
    sql = "SELECT n FROM {} WHERE length(key) > 0 AND key = ? LIMIT 1"
    return any(change.tx.run(sql.format(table), (change.cipher.name(table, key),)) for table in CHECKPOINTS)


# -- agents, and some checkpoints of one ---------------------------------------------------------------------------


def clear(db: Database, choose: Choose, pace: Pace = at_once, then: Callable[[], None] | None = None) -> Plan:
    """Let go what a plan does not keep, and all that only this needed. ``then`` lets go what can go after that."""
    plan = let_go(db, choose, pace)
    if then is not None:
        then()
    if plan.dead or WASTE in db.view.facts():
        try:
            collect(db, pace)
        except Damaged as error:  # what cannot be read might name anything: so nothing is known to be waste
            log.warning("the room of what was let go in %s cannot be used again: %s", db.place, error)
    elif pace is at_once:
        db.sweep_strays()  # those of a place that was away the last time
    return plan


def everything(links: Links, but: Collection[int] = ()) -> set[int]:
    """What somebody sees, some agents aside."""
    return links.held.union(*(links.seen(a) for a in links.agents if a not in but))


def remove(store: Store, agent: Agent, *, dry_run: bool = False, with_copies: bool = False) -> Removal:
    """Remove an agent with everything that nobody else sees; ``with_copies``: and whoever sees some of it."""
    db = store._db
    with db.moment() as contents:
        links = Links(contents.view)
        going = links.seen(agent.a, damaged=True)
        others = [one for one in links.agents.values() if one.a != agent.a]
        copies = [one for one in others if not going.isdisjoint(links.seen(one.a, damaged=True))]
        names = sorted(one.name for one in copies)
        removed = [agent, *copies] if with_copies else [agent]
        events = sum(len(contents.view.log(one.a)) for one in removed)
        size = 0
        if dry_run:
            size = expected_bytes(contents, Plan(links, everything(links, {one.a for one in removed})), {})
    if not dry_run:
        for branch in (one for other in removed for one in db.view.branches(other.a)):
            if (handle := store._handles.get(branch.b)) is not None and not handle.closed:
                handle._check_idle()
        before = stored_bytes(db)
        for one in removed:
            _remove_refs(store, one)
        try:
            clear(db, lambda _, links: Plan(links, everything(links)))
        except Damaged as error:
            log.warning("agents were removed from %s, but their room cannot be used again: %s", db.place, error)
        size = max(0, before - stored_bytes(db))
    kept_for, went = ([], names) if with_copies else (names, [])
    return Removal(agent.name, len(going), events, kept_for, size, done=not dry_run, copies=went)


def _remove_refs(store: Store, agent: Agent) -> None:
    """Take away an agent with its branches, tags, judgements and log. Handles of this process on it are closed."""
    for _ in range(TRIES):
        with ExitStack() as stack, suppress(Refused):
            held: dict[int, int] = {}
            for branch in store._db.view.branches(agent.a):
                held[branch.b] = _become_writer(store, agent, branch, stack)
            alone(store._db, partial(_drop_refs, agent=agent, held=held))
            return
    raise AgentBusy(f"others keep opening branches of {agent.name!r}; nothing was removed", hint="Try again.")


def _become_writer(store: Store, agent: Agent, branch: Branch, stack: ExitStack) -> int:
    """Keep others from writing a branch; returns its generation then."""
    handle = store._handles.get(branch.b)
    if handle is not None:
        handle._shut()  # its state may name what goes
    if branch.generation:  # otherwise nobody has ever opened it
        try:
            lease = store._lease(agent.name, branch, wait_s=0.0)
        except AgentBusy as error:
            if not error.holder.get("this_process"):
                raise
        else:
            stack.callback(lease.release)
            return lease.generation
    return store._db.view.branch_at(branch.b).generation


def _drop_refs(change: Change, agent: Agent, held: dict[int, int]) -> None:
    change.agent_at(agent.a)
    for branch in change.branches(agent.a):
        if held.get(branch.b) != branch.generation:
            raise Refused("somebody has begun to write a branch")
        change.retire(branch)
    for table in ("tag", "validity"):
        change.delete(table, "a", [agent.a])
    # A copy sees what was kept under the keys of checkpoints that it sees: that goes with these.
    entries = change.log(agent.a)
    change.delete("log", "e", [one.e for one in entries if not one.key or not has_key(change, one.key)])
    change.delete("agent", "a", [agent.a])
    for tag in change.tags(0):
        if tag.body.get("agent") == agent.uuid:  # held what was arriving for it
            change.drop_tag(0, tag.name)
    change.say(0, {"what": "remove"})
    note_waste(change)


def forget(
    store: Store, chosen: Sequence[tuple[Agent, set[int]]], *, unless: Callable[[Change], bool] | None = None
) -> Removal:
    """Forget some checkpoints of each of some agents, and what the log kept under their keys.

    What several of them see goes if all of these forget it.
    """
    db = store._db
    before = stored_bytes(db)

    def move(change: Change) -> bool:
        for agent, _ in chosen:
            change.agent_at(agent.a)
        if unless is not None and unless(change):
            return False
        shallow = change.shallow()
        for agent, numbers in chosen:
            for branch in change.branches(agent.a):
                n = branch.head
                while n in numbers:
                    n = change.row(n).parent or shallow.get(n, 0)
                if n != branch.head:
                    _stand_at(change, branch, n)
            for tag in change.tags(agent.a):
                if tag.n in numbers:
                    untag(change, agent.a, tag.name)
        return True

    gone: dict[int, None] = {}
    kept_for: set[str] = set()

    def choose(_now: Contents, links: Links) -> Plan:
        there = [(agent, numbers) for agent, numbers in chosen if agent.a in links.agents]
        names = {agent.a for agent, _ in there}
        # What somebody has named since stays.
        going = {agent.a: (numbers & links.seen(agent.a)) - links.named(agent.a) for agent, numbers in there}
        keep = everything(links, names).union(*(links.seen(a) - some for a, some in going.items()))
        plan = Plan(links, keep)
        for agent, _ in there:
            plan.forget(agent)
        every = set[int]().union(*going.values())
        gone.update(dict.fromkeys(every - keep))
        kept_for.update(one.name for a, one in links.agents.items() if a not in names and links.seen(a) & every)
        return plan

    called = ", ".join(agent.name for agent, _ in chosen)
    if not db.change(move):
        return Removal(called, 0, 0, [], 0, done=False, copies=[])
    plan = clear(db, choose)
    count = len(gone.keys() - plan.keep)
    size = max(0, before - stored_bytes(db))
    return Removal(called, count, plan.entries, sorted(kept_for), size, done=True, copies=[])


def _stand_at(change: Change, branch: Branch, n: int) -> None:
    """Let a branch stand at an ancestor, or at nothing."""
    if n:
        change.move_to(branch, change.point(n))
    else:
        moved = branch._replace(head=0, id=b"", depth=0, epoch=branch.epoch + 1)
        change.move(branch, moved)
        change.say(branch.a, moved_body(branch, moved, b""))


# -- room ----------------------------------------------------------------------------------------------------------


def stored_bytes(db: Database) -> int:
    """What the store takes, its log aside: that is as long as the last changes were many."""
    sizes = db.engine.sizes()
    return sizes["catalog"] - sizes["free"] + sum(db.view.packs().values())


def expected_bytes(contents: Contents, plan: Plan, bare: Mapping[int, int]) -> int:
    """By how many bytes the store would get smaller, as far as rows, nodes and chunks tell.

    ``bare`` are the records that lose their values, and how long these are.
    """
    view, rows = contents.view, plan.links.rows
    broken = plan.broken
    reached = Reached()
    added: dict[bytes, bytes] = {}
    try:
        reached.mark(view, plan.dead, broken, bare)
        for n in plan.orphans:
            roots, fresh = fresh_nodes(contents, n)
            reached.add(view, roots, more=fresh)
            added |= fresh
    except Damaged:
        return 0  # nothing would be collected
    freed = sum(ROW_BYTES for _ in plan.dead) + sum(bare.values())
    loose = [n for n in plan.dead if not rows[n].s]
    for part in slices(loose):
        freed += _sum(view, f"SELECT sum(length(data)) FROM loose WHERE n IN {listed(len(part))}", part)
    for s, members in broken.items():
        size = _sum(view, "SELECT length(manifests) + length(operations) FROM segment WHERE s = ?", (s,))
        freed += size * len(plan.dead.intersection(members)) // len(members)
    for table, column, alive in (("node", "length(data)", reached.nodes), ("chunk", "stored", reached.chunks)):
        for name, size in view.reader.run(f"SELECT digest, {column} FROM {table}"):
            freed += 0 if view.cipher.unname(table, bytes(name)) in alive else size + ROW_BYTES
    there = view.has_nodes(added)
    freed -= sum(len(pack_node(raw)) + ROW_BYTES for name, raw in added.items() if name not in there)
    return max(0, freed)


def _sum(view: View, sql: str, args: Sequence[int]) -> int:
    return int(view.reader.run(sql, args)[0][0] or 0)
