"""Forgetting: whole agents, or some checkpoints of one, also while somebody writes it.

Owns the decision what goes and what must be made to stand alone first; the store does it, one short transaction at a
time. What always holds: an event says first, durably, what is forgotten; whatever somebody else sees is only hidden
from the agent that forgot it; a checkpoint that stays keeps its id, its digest and its changes; and a process that
dies half way leaves a sound store, which the next removal finishes clearing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.agent import history
from holdfast.agent.collecting import Collection, Reached
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.sparing import spared
from holdfast.codec.values import decode
from holdfast.errors import Damaged
from holdfast.store import sealing
from holdfast.store.bodies import body_of, places_of
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, SealRow, clone_key
from holdfast.store.catalog import effect_chain as chain
from holdfast.store.forgetting import Forgetting, Guard, Pace, Unless
from holdfast.store.opening import now_us
from holdfast.store.ranges import Ranges
from holdfast.store.reading import Reading

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

    def __init__(self, store: Store, reading: Reading, a: int, pace: Pace = lambda: None) -> None:
        self.living: dict[int, Line] = {}
        self.agents: set[int] = set()
        branches: set[int] = set()
        waiting = [a]
        while waiting:
            one = waiting.pop()
            if one in self.agents:
                continue
            self.agents.add(one)
            row = reading.agent_row(one)
            if row is not None:
                line = self.living[one] = Line(store, row)
                branches.update(b for b, _ in line.streams)
                waiting.extend(line.origins)
            for _, body in reading.forgotten(one) if row is None else ():
                branches.update(body.get("branches", ()))
                waiting.extend(body.get("origins", ()))
            waiting.extend(event.a for event in reading.events_named([clone_key(one)]))
        self.branches = sorted(branches)
        self.reading = reading
        self.newest = reading.newest()[0]  # before its rows: those above may be missing from them, no others
        # One that is damaged could belong to anybody. Where there is nobody else, it goes with the rest.
        alone = not set(self.living) - {a}
        self.rows: dict[int, CheckpointRow] = {}
        for b in self.branches:
            for found in reading.rows_as_they_are(b) if alone else reading.checkpoints(b=b):
                self.rows[found.n] = found
                pace()

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

    def cut(self, dead: set[int]) -> list[bytes]:
        """The ids of forgotten checkpoints whose children stay: the children still name them."""
        stay = (row for n, row in self.rows.items() if n not in dead and (not row.parent or row.parent in dead))
        return sorted({parent for row in stay if (parent := Manifest.decode(row.manifest).parent)})

    def over(self, line: Line, going: Container[int]) -> list[list[int]]:
        """For each checkpoint whose parent an agent does not see any more: the nearest ancestor that it does see.

        0 where there is none.
        """
        left = {n: row for n, row in self.rows.items() if n not in going and line.sees(row)}
        found = []
        for n, row in sorted(left.items()):
            if row.parent in left or not (row.parent or n in line.over):
                continue
            above = row.parent or line.over.get(n, 0)
            while above and above not in left:
                known = self.rows.get(above)
                parent = known.parent if known is not None else 0
                above = parent if parent in self.rows else line.over.get(above, 0)
            found.append([n, above])
        return found

    def dead_events(self) -> list[int]:
        """Events that nobody sees. Of an agent that is gone, the last word stays: it says so."""
        found: list[int] = []
        for a in self.agents:
            events = list(self.reading.events(a=a))
            if a not in self.living and events:
                events.pop()
            lines = self.living.values()
            found += [event.e for event in events if not any(line.sees_event(event) for line in lines)]
        return found


def remove(store: Store, agent: AgentRow, *, dry_run: bool = False) -> Removal:
    """Remove an agent with everything that nobody else sees."""
    name = body_of(agent)["name"]
    with ExitStack() as stack:
        forgetting = stack.enter_context(store._catalog.forgetting())
        finish(store, forgetting)
        guards = [] if dry_run else stack.enter_context(_alone(store, agent))
        family = Family(store, forgetting.reading, agent.a)
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
        before = stored_bytes(store)
        body = {
            "name": name,
            "n": (Ranges.of(going) | line.forgotten).pairs,
            "e": (Ranges.of(event.e for event in events) | line.forgotten_events).pairs,
            "cut": family.cut(dead),
            "branches": sorted(b for b, _ in line.streams),
            "origins": sorted(line.origins),
        }
        forgetting.remove(agent, body, guards, now_us())
        cleared = clear(store, forgetting, [agent.a])
    store._catalog.shrink()
    return Removal(name, len(going), cleared, shared, max(0, before - stored_bytes(store)), done=True)


def forget(
    store: Store, agent: AgentRow, numbers: set[int], *, guard: Guard | None = None, unless: Unless | None = None
) -> Removal:
    """Forget some checkpoints of an agent, and the events that were found by their keys."""
    name = body_of(agent)["name"]
    with ExitStack() as stack:
        forgetting = stack.enter_context(store._catalog.forgetting())
        finish(store, forgetting)
        guards = [guard] if guard is not None else stack.enter_context(_alone(store, agent))
        family = Family(store, forgetting.reading, agent.a)
        line = family.living[agent.a]
        going = {n for n in numbers if n in family.rows and line.sees(family.rows[n])}
        if not going:
            return Removal(name, 0, 0, [], 0, done=True)
        dead = family.dead(going, agent.a)
        before = stored_bytes(store)
        body = said(family, line, going, dead)
        nearest = _nearest(family, line, going)
        if not forgetting.forget(agent, Ranges.of(going), body, nearest, guards, now_us(), unless):
            return Removal(name, 0, 0, [], 0, done=False)
        clear(store, forgetting, [agent.a])
    shared = _shared(family, going, agent.a)
    return Removal(name, len(going), len(Ranges(body["e"])), shared, max(0, before - stored_bytes(store)), done=True)


def said(family: Family, line: Line, going: set[int], dead: set[int]) -> dict[str, Any]:
    """What the event says when an agent forgets checkpoints, and the events that were found by their keys."""
    keys = {family.rows[n].key for n in going}
    keys -= {row.key for n, row in family.rows.items() if n not in going and line.sees(row)}
    events = line.events_named(key for key in keys if key is not None)
    return {
        "n": Ranges.of(going).pairs,
        "e": Ranges.of(event.e for event in events).pairs,
        "cut": family.cut(dead),
        "over": family.over(line, going),
    }


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
                who = {"agent": body_of(agent)["name"], "branch": body_of(row)["name"]}
                held = store._catalog.lease(row.b, who=who)
                stack.callback(held.release)
            if held is not None:
                guards.append((row.b, held.generation))
        yield guards


def finish(store: Store, forgetting: Forgetting) -> None:
    """What a process that died, or stopped, left to be cleared."""
    note = forgetting.unfinished()
    if note.agents or note.packs or note.nodes:
        clear(store, forgetting, note.agents, spare=note.spare)
    else:
        forgetting.clear_strays()


def _named_elsewhere(forgetting: Forgetting, line: Line) -> Iterator[Any]:
    for a, (_, most) in line.origins.items():
        for event in forgetting.reading.events(a=a):
            if event.e > most:
                break
            yield event


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
        made_on = {branch.b, *(b for b, _ in body_of(branch).get("origins", ()))}
        older = [row for row in staying.values() if row.b in made_on and row.n < branch.head]
        return (older[-1].n, older[-1].id) if older else (0, b"")

    return find


def _shared(family: Family, going: Iterable[int], a: int) -> list[str]:
    return sorted({str(line.body["name"]) for n in going for line in family.seen(n, a)})


def clear(store: Store, forgetting: Forgetting, agents: Sequence[int], *, spare: bool = False) -> int:
    """Everything of some agents' families that nobody sees goes, and the space that it took.

    ``spare``: what takes less than sealing what rests on it stays, unseen. Not where something was to be deleted.
    Can be done again from any point at which it stopped. Returns how many events went.
    """
    families: list[Family] = []
    for a in agents:
        if not any(a in family.agents for family in families):
            families.append(Family(store, forgetting.reading, a, forgetting.pace))
    dead: set[int] = set()
    ends: dict[int, int] = {}
    for family in families:
        going = family.dead()
        if spare:
            going -= spared(store, family, going)
        _stand_alone(store, forgetting, family, going)
        ends.update(_cut_lines(forgetting, family, going))
        dead |= going
    left = forgetting.unfinished().nodes
    records = _collect(forgetting, families, dead, ends) if dead or ends or left else set()
    events = [e for family in families for e in family.dead_events()]
    forgetting.delete(sorted(dead), events, sorted(records))
    forgetting.rewrite_packs()
    forgetting.finish()
    forgetting.remove_strays()
    forgetting.give_back()
    return len(events)


def _stand_alone(store: Store, forgetting: Forgetting, family: Family, dead: set[int]) -> None:
    """Seal what stays although the one before it goes, and let those after it that stay rest on it.

    The newest first: an older one that stands alone cuts the way on which a newer one is still to be read.
    """
    children: dict[int, list[int]] = {}
    for n, row in sorted(family.rows.items()):
        if n not in dead:
            children.setdefault(row.parent, []).append(n)
    living, newest = sorted(family.living), family.newest
    for row in reversed(family.orphans(dead)):
        resting: list[int] = []
        if not row.sealed:
            forgetting.write_nodes(history.state_of(store._catalog, row).unstored())
            waiting = list(children.get(row.n, ()))
            while waiting:
                n = waiting.pop()
                if family.rows[n].base == row.base:
                    resting.append(n)
                    waiting.extend(children.get(n, ()))
        for n in forgetting.stand_alone(row.n, sorted(resting), family.branches, newest, living):
            if n in family.rows:
                known = family.rows[n]
                family.rows[n] = replace(known, base=row.n, parent=0 if n == row.n else known.parent)


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
    # Those that inherit come first: whoever is interrupted leaves no line that rests on one that is gone.
    for b, count in sorted(gone.items(), reverse=True):
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


def _collect(forgetting: Forgetting, families: list[Family], dead: set[int], ends: dict[int, int]) -> set[int]:
    """Delete what only the dead checkpoints needed, and the records after these ends.

    Returns the numbers of these records.
    """
    reading = forgetting.reading
    waste, altered, records = doomed_by(reading, families, dead, ends, forgetting.unfinished().nodes)
    collection = Collection(reading, waste, dead, records, seals={seal.n for seal, _ in altered}, pace=forgetting.pace)
    try:
        # What cannot be read might name anything: then nothing is known to be waste.
        collection.mark()
    except Damaged:
        return records
    for seal, entries in altered:
        places, nodes = refolded(reading, seal, entries, collection.live) if entries is not None else (None, {})
        forgetting.replace_seal(seal, places, nodes, places_of(seal)[0])
        if places is not None:
            collection.live.add(decode(places)[0])
    try:
        while not collection.empty and forgetting.sweep(collection.take):
            pass
    except Damaged:
        pass
    return records


Altered = list[tuple[SealRow, list[Any] | None]]
"""Seals that lose entries, and what is left of these; None where the seal goes with them."""


def doomed_by(
    reading: Reading, families: Sequence[Family], dead: set[int], ends: Mapping[int, int], left: Sequence[bytes] = ()
) -> tuple[Reached, Altered, set[int]]:
    """What the dead checkpoints name, the seals that lose entries with them, and the records after these ends.

    ``left`` are nodes that were named by seals which have changed since.
    """
    doomed = Reached(reading, tolerant=True)
    doomed.add(left)
    altered: Altered = []
    for family in families:
        for n in dead & family.rows.keys():
            doomed.checkpoint(family.rows[n], reading.tail(n))
        for b in family.branches:
            for seal in reading.seals(b):
                nodes, entries = places_of(seal)
                kept = [[n, places] for n, places in entries if _stays(n or seal.n, family, dead)]
                needed = bool(kept) or _stays(seal.n, family, dead)
                if not needed or len(kept) < len(entries):
                    doomed.add(nodes)
                    altered.append((seal, kept if needed else None))
    records = set()
    for b, count in ends.items():
        for record, _ in reading.records_as_they_are(b, count):
            doomed.effect(record)
            records.add(record.r)
    return doomed, altered, records


def _stays(n: int, family: Family, dead: set[int]) -> bool:
    return n not in dead and (n in family.rows or n > family.newest)


def refolded(reading: Reading, seal: SealRow, entries: list[Any], live: Reached) -> tuple[bytes, dict[bytes, bytes]]:
    """The places of a seal with only these entries, and the nodes that must be written for it.

    A value stays in its node when that is needed anyway; the others move together, so that a node of many values does
    not stay for the sake of one.
    """
    nodes = places_of(seal)[0]
    used = {nodes[place[0]] for _, places in entries for place in places}
    return sealing.moved(nodes, entries, reading.nodes(used - live.nodes))


def _size(store: Store, family: Family, dead: set[int]) -> int:
    """What the records of these checkpoints take. Nodes that others may share are not counted."""
    rows = [family.rows[n] for n in dead]
    return sum(len(row.manifest) + len(row.operations) for row in rows) + store._catalog.tail_bytes(dead)


def stored_bytes(store: Store) -> int:
    sizes = store._catalog.sizes()
    return sizes["catalog"] + sizes["log"] + sizes["packs"]
