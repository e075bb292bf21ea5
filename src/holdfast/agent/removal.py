"""Forgetting: whole agents, or some checkpoints of one.

Owns the decision what goes and what must be made to stand alone first; the store does it, one short transaction at a
time. What always holds: an event says first, durably, what is forgotten; whatever somebody else sees is only hidden
from the agent that forgot it; a checkpoint that stays keeps its id, its digest and its changes; and a process that
dies half way leaves a sound store, which the next removal finishes clearing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.agent import history
from holdfast.agent.collecting import Collection, Reached
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode
from holdfast.errors import Damaged
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, clone_key
from holdfast.store.catalog import effect_chain as chain
from holdfast.store.forgetting import ROWS_AT_ONCE, Forgetting, Guard
from holdfast.store.opening import now_us
from holdfast.store.ranges import Ranges

if TYPE_CHECKING:
    from holdfast.agent.store import Store


@dataclass(frozen=True, slots=True)
class Removal:
    """What was forgotten, or would be."""

    name: str
    checkpoints: int
    events: int
    kept_for: list[str]
    """Agents that still see some of it: clones, or what this one is a clone of."""
    freed_bytes: int
    """By how much the store got smaller; for a dry run, what the records take that would go."""
    done: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "agent": self.name, "checkpoints": self.checkpoints, "events": self.events, "kept_for": self.kept_for,
            "freed_bytes": self.freed_bytes, "done": self.done,
        }  # fmt: skip


class Family:
    """The agents that share rows with one, directly or through others, and all rows of theirs."""

    def __init__(self, store: Store, forgetting: Forgetting, a: int) -> None:
        self.living: dict[int, Line] = {}
        self.agents: set[int] = set()
        branches: set[int] = set()
        waiting = [a]
        while waiting:
            one = waiting.pop()
            if one in self.agents:
                continue
            self.agents.add(one)
            row = forgetting.reading.agent_row(one)
            if row is not None:
                line = self.living[one] = Line(store, row)
                branches.update(b for b, _ in line.streams)
                waiting.extend(line.origins)
            for _, body in forgetting.reading.forgotten(one) if row is None else ():
                branches.update(body.get("branches", ()))
                waiting.extend(body.get("origins", ()))
            waiting.extend(event.a for event in forgetting.reading.events_named([clone_key(one)]))
        self.branches = sorted(branches)
        self._reading = forgetting.reading
        # One that is damaged could belong to anybody. Where there is nobody else, it goes with the rest.
        alone = not set(self.living) - {a}
        self.rows: dict[int, CheckpointRow] = {}
        for b in self.branches:
            for found in self._reading.rows_as_they_are(b) if alone else self._reading.checkpoints(b=b):
                self.rows[found.n] = found

    def seen(self, n: int, but: int | None = None) -> list[Line]:
        """Who sees a checkpoint."""
        row = self.rows[n]
        return [line for a, line in self.living.items() if a != but and line.sees(row)]

    def dead(self, doomed: Iterable[int] = (), by: int | None = None) -> set[int]:
        """Checkpoints that nobody sees, once agent ``by`` has forgotten the doomed ones."""
        going = set(doomed)
        return {n for n in self.rows if not self.seen(n, by if n in going else None)}

    def orphans(self, dead: set[int]) -> list[CheckpointRow]:
        """Checkpoints that stay although the one before them goes, oldest first."""
        return [row for n, row in sorted(self.rows.items()) if n not in dead and row.parent in dead]

    def dead_events(self) -> list[int]:
        """Events that nobody sees. Of an agent that is gone, the last word stays: it says so."""
        found: list[int] = []
        for a in self.agents:
            events = list(self._reading.events(a=a))
            if a not in self.living and events:
                events.pop()
            lines = self.living.values()
            found += [event.e for event in events if not any(line.sees_event(event) for line in lines)]
        return found


def remove(store: Store, agent: AgentRow, *, dry_run: bool = False) -> Removal:
    """Remove an agent with everything that nobody else sees."""
    name = decode(agent.body)["name"]
    with ExitStack() as stack:
        forgetting = stack.enter_context(store._catalog.forgetting())
        _finish(store, forgetting)
        guards = [] if dry_run else stack.enter_context(_alone(store, agent))
        family = Family(store, forgetting, agent.a)
        line = family.living[agent.a]
        going = [n for n, row in family.rows.items() if line.sees(row)]
        dead = family.dead(going, agent.a)
        shared = _shared(family, going, agent.a)
        events = [e for e in _named_elsewhere(forgetting, line) if line.sees_event(e)]
        if dry_run:
            own = sum(1 for event in forgetting.reading.events(a=agent.a))
            size = _size(store, family, dead)
            if not shared:
                size += sum(forgetting.reading.effect_bytes(b) for b, _ in line.streams)
            return Removal(name, len(going), own + len(events), shared, size, done=False)
        before = _bytes(store)
        body = {
            "name": name,
            "n": (Ranges.of(going) | line.forgotten).pairs,
            "e": (Ranges.of(event.e for event in events) | line.forgotten_events).pairs,
            "cut": _cut(family, dead) + _cut_before(forgetting, agent.a),
            "branches": sorted(b for b, _ in line.streams),
            "origins": sorted(line.origins),
        }
        forgetting.remove(agent, body, guards, now_us())
        cleared = _clear(store, forgetting, agent.a)
        forgetting.finish()
        forgetting.give_back()
    store._catalog.shrink()
    return Removal(name, len(going), cleared, shared, max(0, before - _bytes(store)), done=True)


def forget(store: Store, agent: AgentRow, numbers: set[int], *, guard: Guard | None = None) -> Removal:
    """Forget some checkpoints of an agent, and the events that were found by their keys."""
    name = decode(agent.body)["name"]
    with ExitStack() as stack:
        forgetting = stack.enter_context(store._catalog.forgetting())
        _finish(store, forgetting)
        guards = [guard] if guard is not None else stack.enter_context(_alone(store, agent))
        family = Family(store, forgetting, agent.a)
        line = family.living[agent.a]
        going = {n for n in numbers if n in family.rows and line.sees(family.rows[n])}
        if not going:
            return Removal(name, 0, 0, [], 0, done=True)
        dead = family.dead(going, agent.a)
        keys = {family.rows[n].key for n in going}
        keys -= {row.key for n, row in family.rows.items() if n not in going and line.sees(row)}
        events = line.events_named(key for key in keys if key is not None)
        before = _bytes(store)
        body = {
            "n": Ranges.of(going).pairs,
            "e": Ranges.of(event.e for event in events).pairs,
            "cut": _cut(family, dead),
        }
        forgetting.forget(agent, Ranges.of(going), body, _nearest(family, line, going), guards, now_us())
        _clear(store, forgetting, agent.a)
        forgetting.finish()
        forgetting.give_back()
    shared = _shared(family, going, agent.a)
    return Removal(name, len(going), len(events), shared, max(0, before - _bytes(store)), done=True)


@contextmanager
def _alone(store: Store, agent: AgentRow) -> Iterator[list[Guard]]:
    """This process as the only writer of an agent. Handles on it are closed: their states may name what goes."""
    guards = []
    with ExitStack() as stack:
        for row in store._catalog.branches(agent.a):
            handle = store._handles.get(row.b)
            if handle is not None:
                handle.close()
            held = store._catalog.held_lease(row.b)
            if held is None and row.generation:  # a branch that nobody ever opened has no writer
                who = {"agent": decode(agent.body)["name"], "branch": decode(row.body)["name"]}
                held = store._catalog.lease(row.b, who=who)
                stack.callback(held.release)
            if held is not None:
                guards.append((row.b, held.generation))
        yield guards


def _finish(store: Store, forgetting: Forgetting) -> None:
    """What a process that died left to be cleared."""
    agents, packs = forgetting.unfinished()
    for a in agents:
        _clear(store, forgetting, a)
    if agents or packs:
        forgetting.finish()


def _named_elsewhere(forgetting: Forgetting, line: Line) -> Iterator[Any]:
    for a, (_, most) in line.origins.items():
        for event in forgetting.reading.events(a=a):
            if event.e > most:
                break
            yield event


def _cut(family: Family, dead: set[int]) -> list[bytes]:
    """The ids of forgotten checkpoints whose children stay: the children still name them."""
    return sorted({Manifest.decode(row.manifest).parent for row in family.orphans(dead)})


def _cut_before(forgetting: Forgetting, a: int) -> list[bytes]:
    return [identity for _, body in forgetting.reading.forgotten(a) for identity in body["cut"]]


def _nearest(family: Family, line: Line, going: set[int]) -> Callable[[BranchRow], tuple[int, bytes]]:
    """Where a branch whose head goes stands then: at the nearest ancestor that stays.

    Where the line was cut before, that is the newest checkpoint before the head that was made on the branch.
    """
    staying = {n: row for n, row in sorted(family.rows.items()) if n not in going and line.sees(row)}

    def find(branch: BranchRow) -> tuple[int, bytes]:
        n = branch.head
        while n in going:
            below = family.rows[n]
            n = below.parent
        if n in staying:
            return n, staying[n].id
        if not Manifest.decode(below.manifest).parent:
            return 0, b""
        made_on = {branch.b, *(b for b, _ in decode(branch.body).get("origins", ()))}
        older = [row for row in staying.values() if row.b in made_on and row.n < branch.head]
        return (older[-1].n, older[-1].id) if older else (0, b"")

    return find


def _shared(family: Family, going: Iterable[int], a: int) -> list[str]:
    return sorted({str(line.body["name"]) for n in going for line in family.seen(n, a)})


def _clear(store: Store, forgetting: Forgetting, a: int) -> int:
    """Everything of an agent's family that nobody sees goes. Can be done again from any point at which it stopped."""
    family = Family(store, forgetting, a)
    dead = family.dead()
    for orphan in family.orphans(dead):
        row = store._catalog.checkpoint(orphan.n)  # one before it may have become its base
        if not row.sealed:
            document = history.load(store._catalog, row, Registry(), readonly=False, inert=True)
            nodes, _ = document.unstored()
            forgetting.write_nodes(nodes)
        forgetting.stand_alone(row.n, family.branches, sorted(family.living))
    ends = _cut_lines(forgetting, family, dead)
    records = _collect(forgetting, family, dead, ends) if dead or ends else set()
    events = family.dead_events()
    forgetting.delete(sorted(dead), events, sorted(records))
    return len(events)


def _cut_lines(forgetting: Forgetting, family: Family, dead: set[int]) -> dict[int, int]:
    """Let the lines of branches that are gone end where nobody needs them any more; where that is, for each of these.

    A line is needed as far as a checkpoint that stays speaks of it, and as far as a line that stays inherits from it.
    """
    reading = forgetting.reading
    own = {branch.b for a in family.living for branch in reading.branches(a)}
    lines = {b: reading.line(b) for b in family.branches}
    needed = {b: line.count if b in own else 0 for b, line in lines.items()}
    for n, row in family.rows.items():
        if n not in dead and row.b not in own and lines[row.b].count > needed[row.b]:
            needed[row.b] = max(needed[row.b], _position(row, lines[row.b].count))
    for b in sorted(lines, reverse=True):
        if lines[b].origin in needed:
            needed[lines[b].origin] = max(needed[lines[b].origin], min(lines[b].start, needed[b]))
    gone = {b: needed[b] for b in lines if b not in own}
    for b, count in gone.items():
        if count < lines[b].count:
            try:
                end = b""
                for record in reading.effects(b, before=count + 1):
                    end = chain(end, record.body)
                forgetting.cut_line(lines[b], count, end)
            except Damaged:
                gone[b] = lines[b].count
    return gone


def _position(row: CheckpointRow, most: int) -> int:
    """Of how many records a checkpoint speaks; of all, where that cannot be read."""
    try:
        return Manifest.decode(row.manifest).effects[0]
    except Damaged:
        return most


def _collect(forgetting: Forgetting, family: Family, dead: set[int], ends: dict[int, int]) -> set[int]:
    """Delete the nodes and chunks that only the dead checkpoints needed, and the records after these ends.

    Returns the numbers of these records.
    """
    reading = forgetting.reading
    doomed = Reached(reading, tolerant=True)
    for n in dead:
        doomed.checkpoint(family.rows[n], reading.tail(n))
    records = set()
    for b, count in ends.items():
        for record, _ in reading.records_as_they_are(b, count):
            doomed.effect(record)
            records.add(record.r)
    for b in family.branches:
        for seal in reading.seals(b):
            nodes, entries = decode(seal.places)
            kept = [[n, places] for n, places in entries if (n or seal.n) in family.rows and (n or seal.n) not in dead]
            needed = bool(kept) or (seal.n in family.rows and seal.n not in dead)
            if needed and len(kept) == len(entries):
                continue
            doomed.add(nodes)
            forgetting.replace_seal(seal, _places(nodes, kept) if needed else None)
    collection = Collection(reading, doomed, dead, records)
    try:
        if not collection.empty:
            collection.mark()
            while forgetting.sweep(lambda: collection.take(ROWS_AT_ONCE)):
                pass
    except Damaged:
        pass  # what cannot be read might name anything: then nothing is known to be waste
    return records


def _places(nodes: list[bytes], entries: list[Any]) -> bytes:
    """The places of a seal, with the nodes that these entries still need."""
    used: dict[int, int] = {}
    for _, places in entries:
        for place in places:
            place[0] = used.setdefault(place[0], len(used))
    return encode([[nodes[index] for index in used], entries])


def _size(store: Store, family: Family, dead: set[int]) -> int:
    """What the records of these checkpoints take. Nodes that others may share are not counted."""
    rows = [family.rows[n] for n in dead]
    return sum(len(row.manifest) + len(row.operations) for row in rows) + store._catalog.tail_bytes(dead)


def _bytes(store: Store) -> int:
    sizes = store._catalog.sizes()
    return sizes["catalog"] + sizes["log"] + sizes["packs"]
