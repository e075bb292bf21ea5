"""The transactions of cloning and forgetting.

Owns the changes that take rows away or let another agent see them, and the note in table ``store`` that says which
agents' rows are still being cleared. Knows numbers, not histories: what may go is decided by the caller. Always true:
one object at a time exists for a store, in whatever process; first a durable event says what is forgotten, then what
stays is made to stand alone, and only then are rows deleted, so that a process may die between any two calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.codec.values import decode, encode
from holdfast.errors import UnknownAgent
from holdfast.store.bodies import body_of
from holdfast.store.catalog import (
    AgentRow,
    BranchRow,
    Buffer,
    CheckpointRow,
    ChunkRow,
    Event,
    LineRow,
    LineStart,
    NewPack,
    PackRow,
    SealRow,
    TagRow,
    ValidityRow,
    forgotten_key,
)
from holdfast.store.ends import stored_line
from holdfast.store.packs import Packs
from holdfast.store.ranges import Ranges
from holdfast.store.reading import CHECKPOINT, Reading
from holdfast.store.tiering import (
    STRAYS,
    TIERS,
    ColdCopy,
    Place,
    Tiers,
    copy_back,
    copy_out,
    holds,
    recorded,
    remove_copies,
    unreachable,
)
from holdfast.store.writing import Writer, packed_nodes

ROWS_AT_ONCE = 64
"""Rows that the first transaction deletes. How many the next ones delete follows from how long it took."""

ROWS_AT_MOST = 512
STEP_S = 0.002
"""What one transaction should take before its flush: other writers wait for milliseconds."""

COURTESY_S = 0.001
"""A pause before each transaction: asking again at once for the lock that was just let go overtakes whoever waits."""

NODE_BYTES_AT_ONCE = 512 * 2**10
"""Nodes that one transaction writes, when a state is sealed so that it can do without what was before it."""

PAGES_AT_ONCE = 64
"""Free pages (4 KiB each) that one transaction gives back."""

REWRITE_BELOW = 0.5
"""A pack of which less than this share is needed is written anew: below it, more is won than is copied."""

PACK_BYTES_AT_ONCE = 64 * 2**20
"""The most that a new pack takes over from an old one, and so the memory that it costs."""

STRAY_AFTER_S = 3_600.0
"""The grace period. A pack is named in the catalog after it was written, so a file that no row names may be about to
be named; one that is older than this belonged to a process that died before it could."""

_NOTE = "forgetting"

Guard = tuple[int, int]
Pace = Callable[[], None]
Unless = Callable[[Sequence[BranchRow], Sequence[TagRow]], bool]
T = TypeVar("T")


def _no_pace() -> None: ...


class Copy(Struct, frozen=True):
    """What a clone adds. The rows' own numbers are given when they are written.

    ``lines`` are what its branches inherit of others' records, None where that is nothing.
    """

    agent: AgentRow
    branches: Sequence[BranchRow]
    lines: Sequence[LineStart | None]
    tags: Sequence[TagRow]
    validities: Sequence[ValidityRow]
    events: Sequence[Event]


class Source(Struct, frozen=True):
    """An agent at the moment of cloning."""

    branches: list[BranchRow]
    tags: list[TagRow]
    validities: list[ValidityRow]
    n: int
    e: int


class Unfinished(Struct, frozen=True):
    """Agents whose rows are still to be cleared, packs whose files are still to go, nodes that may be waste.

    ``spare``: a policy let these rows go, so that one may stay, unseen, where deleting it would take room.
    """

    agents: Sequence[int] = ()
    packs: Sequence[bytes] = ()
    nodes: Sequence[bytes] = ()
    spare: bool = False


class Waste(Struct, frozen=True):
    """Digests of what nothing needs."""

    nodes: Sequence[bytes] = ()
    chunks: Sequence[bytes] = ()
    metadata: Sequence[bytes] = ()


class Retained(Struct, frozen=True):
    """What an agent forgets by a policy: the checkpoints' numbers, and what the event says."""

    numbers: Ranges
    body: Mapping[str, Any]


class Forgetting:
    """Made by ``Embedded.forgetting()``, which holds the lock. ``reading`` sees what is committed, nothing else."""

    def __init__(self, writer: Writer, reading: Reading, packs: Packs, pace: Pace | None = None) -> None:
        """``pace`` is called between any two transactions: it may sleep, and what it raises ends the work there."""
        self.reading = reading
        self.pace: Pace = pace if pace is not None else _no_pace
        self._writer = writer
        self._packs = packs
        self._cipher = writer.cipher
        self._run = writer.connection.cursor().execute
        self._rows = ROWS_AT_ONCE

    def _transaction(self, change: Callable[[], T]) -> T:
        self.pace()
        time.sleep(COURTESY_S)
        return self._writer.transaction(change)

    def _in_steps(self, items: Sequence[T], change: Callable[[Sequence[T]], object]) -> None:
        """Do something for all items, as many at a time as take a few milliseconds."""
        at = 0
        while at < len(items):
            some = items[at : at + self._rows]
            self._timed(lambda some=some: change(some))  # type: ignore[misc]
            at += len(some)

    def _timed(self, change: Callable[[], T]) -> T:
        """One transaction; how many rows the next one takes follows from how long this one held the others up."""

        def timed() -> T:
            began = time.perf_counter()
            result = change()
            took = time.perf_counter() - began
            if took > STEP_S:
                self._rows = max(ROWS_AT_ONCE // 4, self._rows // 2)
            elif took < STEP_S / 2:
                self._rows = min(ROWS_AT_MOST, self._rows * 2)
            return result

        return self._transaction(timed)

    # -- saying it ----------------------------------------------------------------------------------------

    def clone(self, source: AgentRow, make: Callable[[Source], Copy]) -> AgentRow:
        """Add an agent that sees what ``source`` sees. ``make`` is called inside the transaction."""

        def change() -> AgentRow:
            a = source.a
            if self.reading.agent_row(a) != source:
                raise UnknownAgent("the agent was removed; nothing was changed")
            n, e = self._given("checkpoint"), self._given("event")
            read = self.reading
            made = make(Source(read.branches(a), read.tags(a), read.validities(a), n, e))
            agent = self._writer.insert_agent(made.agent)
            for branch, start in zip(made.branches, made.lines, strict=True):
                b = self._writer.insert_branch(replace(branch, a=agent.a)).b
                if start is not None:
                    self._writer.ends.begin(b, start)
            for tag in made.tags:
                self._writer.insert_tag(replace(tag, a=agent.a))
            for validity in made.validities:
                self._writer.insert_validity(replace(validity, a=agent.a))
            for event in made.events:
                self._writer.insert_event(agent.a, event)
            return agent

        return self._transaction(change)

    def forget(
        self,
        agent: AgentRow,
        numbers: Ranges,
        body: Mapping[str, Any],
        nearest: Callable[[BranchRow], tuple[int, bytes]],
        guards: Iterable[Guard],
        at: int,
        unless: Unless | None = None,
    ) -> bool:
        """Say that an agent forgets checkpoints: branches and tags that stood on them move or go.

        ``nearest`` gives the number and id of where such a branch stands then, 0 and empty when it is nowhere.
        ``unless`` is asked inside the transaction, with the branches and tags as they are then; where it says yes,
        nothing is changed, and False returned.
        """

        def change() -> bool:
            self._check(agent, guards)
            branches, tags = self.reading.branches(agent.a), self.reading.tags(agent.a)
            if unless is not None and unless(branches, tags):
                return False
            heads = []
            for row in branches:
                moved = row
                if row.head in numbers:
                    head, head_id = nearest(row)
                    moved = self._writer.update_branch(replace(row, head=head, head_id=head_id))
                heads.append([body_of(row)["name"], moved.head_id])
            untagged = [tag for tag in tags if tag.n in numbers]
            self._say_forgotten(agent.a, numbers, body, untagged, heads, at, spare=False)
            return True

        return self._transaction(change)

    def retain(
        self, agent: AgentRow, choose: Callable[[Sequence[BranchRow], Sequence[TagRow]], Retained | None], at: int
    ) -> Retained | None:
        """Say that an agent forgets checkpoints while others may be writing it.

        ``choose`` is called inside the transaction with the branches and tags as they are then: a checkpoint that a
        branch came to stand on meanwhile stays. None where nothing is left to forget.
        """

        def change() -> Retained | None:
            if self.reading.agent_row(agent.a) is None:
                raise UnknownAgent("the agent was removed meanwhile; nothing was changed")
            branches, tags = self.reading.branches(agent.a), self.reading.tags(agent.a)
            chosen = choose(branches, tags)
            if chosen is None:
                return None
            gone = [tag for tag in tags if tag.n in chosen.numbers]
            heads = [[body_of(row)["name"], row.head_id] for row in branches]
            self._say_forgotten(agent.a, chosen.numbers, chosen.body, gone, heads, at, spare=True)
            return chosen

        return self._transaction(change)

    def _say_forgotten(
        self,
        a: int,
        numbers: Ranges,
        body: Mapping[str, Any],
        untagged: Sequence[TagRow],
        heads: list[Any],
        at: int,
        *,
        spare: bool,
    ) -> None:
        """The event, and what goes with it at once: tags of what is forgotten, and judgements on it.

        The event says what earlier ones of the agent said, too, so that those can go: an agent that forgets a little
        every hour has one event of this kind and not thousands.
        """
        for tag in untagged:
            self._writer.delete_tag(tag.a, tag.key)
        for validity in self.reading.validities(a):
            if validity.n in numbers:
                self._run("DELETE FROM validity WHERE a = ? AND n = ?", (a, validity.n))
        n, e, cut = Ranges(body["n"]), Ranges(body["e"]), set(body["cut"])
        names = {str(body_of(tag)["name"]) for tag in untagged}
        earlier = []
        for event, said in self.reading.forgotten(a):
            n, e = n | Ranges(said["n"]), e | Ranges(said["e"])
            cut.update(said["cut"])
            names.update(said["untag"])
            earlier.append(event.e)
        gone = {tag.key for tag in untagged}
        there = {str(body_of(tag)["name"]) for tag in self.reading.tags(a) if tag.key not in gone}
        said = {
            "what": "forget",
            **body,
            "n": n.pairs,
            "e": (e | Ranges.of(earlier)).pairs,
            "cut": sorted(cut),
            "untag": sorted(names - there),
            "heads": heads,
            "newest": self._given("checkpoint"),
        }
        self._writer.insert_event(a, Event(at, encode(said), forgotten_key(a)))
        self._note(a, spare=spare)

    def remove(self, agent: AgentRow, body: Mapping[str, Any], guards: Iterable[Guard], at: int) -> None:
        """Say that an agent is gone, with all its names. ``body`` lists what it saw of others, and forgot before."""

        def change() -> None:
            self._check(agent, guards)
            a = agent.a
            own = self._numbers("SELECT b FROM branch WHERE a = ?", a)
            rows = self._numbers("SELECT n FROM checkpoint WHERE b IN (SELECT b FROM branch WHERE a = ?)", a)
            events = self._numbers("SELECT e FROM event WHERE a = ?", a)
            records = self._numbers("SELECT r FROM effect WHERE b IN (SELECT b FROM branch WHERE a = ?)", a)
            said = {
                "what": "remove",
                **body,
                "n": (Ranges(body["n"]) | Ranges.of(rows)).pairs,
                "e": (Ranges(body["e"]) | Ranges.of(events)).pairs,
                "r": Ranges.of(records).pairs,
                "branches": sorted({*body["branches"], *own}),
            }
            for table in ("agent", "branch", "tag", "validity"):
                self._run(f"DELETE FROM {table} WHERE a = ?", (a,))  # noqa: S608  constants only
            self._writer.forget_heads()
            self._writer.insert_event(a, Event(at, encode(said), forgotten_key(a)))
            self._note(a, spare=False)

        self._transaction(change)

    def _check(self, agent: AgentRow, guards: Iterable[Guard]) -> None:
        for guard in guards:
            self._writer.check_guard(guard)
        if self.reading.agent_row(agent.a) is None:
            raise UnknownAgent("the agent was removed meanwhile; nothing was changed")

    def _numbers(self, sql: str, binding: int | bytes) -> list[int]:
        found: list[tuple[Any, ...]] = self._run(sql, (binding,)).fetchall()
        return [number for (number,) in found]

    def _given(self, table: str) -> int:
        """The highest number that was ever given in a table."""
        return self._writer.next_number(table) - 1

    # -- the note -------------------------------------------------------------------------------------------

    def unfinished(self) -> Unfinished:
        note = self.reading.fact(_NOTE)
        return Unfinished(*decode(note)) if note is not None else Unfinished()

    def _note(self, a: int, *, spare: bool) -> None:
        note = self.unfinished()
        spare = spare and (note.spare or not note.agents)
        self._write_note(replace(note, agents=sorted({*note.agents, a}), spare=spare))

    def _write_note(self, note: Unfinished) -> None:
        self._writer.set_fact(_NOTE, encode([list(note.agents), list(note.packs), list(note.nodes), note.spare]))

    def finish(self) -> None:
        """Everything that was noted is done; files go now.

        All are tried again the next time while somebody still reads the store as it was before.
        """
        packs = self.unfinished().packs
        with self._packs.removing() as free:
            for pack in packs if free else ():
                self._packs.remove(pack)

        def change() -> None:
            if free:
                self._writer.drop_fact(_NOTE)
                cold = self._tiers.packs
                self._lie(away=[(pack, cold[pack]) for pack in packs if pack in cold])
            else:
                self._write_note(Unfinished(packs=packs))

        self._transaction(change)
        self.clear_strays()

    @property
    def _tiers(self) -> Tiers:
        return Tiers(self.reading.fact)

    def _lie(
        self, there: Iterable[ColdCopy] = (), away: Iterable[ColdCopy] = (), gone: Iterable[ColdCopy] = ()
    ) -> None:
        """Record copies of packs that lie at a place, or need not lie there any more, or have gone from it."""
        packs, strays = recorded(self._tiers, there, away, gone)
        for name, value in ((TIERS, packs), (STRAYS, strays)):
            if value == self.reading.fact(name):
                continue
            if value is not None:
                self._writer.set_fact(name, value)
            else:
                self._writer.drop_fact(name)

    def clear_strays(self) -> None:
        """Delete what lies at colder places and is not needed. What is in one that does not answer is tried again.

        Not in the background: whoever closes the store would wait for a place that does not answer.
        """
        strays = self._tiers.strays if self.pace is _no_pace else set()
        if gone := strays - remove_copies(strays)[0]:
            self._transaction(lambda: self._lie(gone=gone))

    # -- making what stays stand alone ------------------------------------------------------------------------

    def write_nodes(self, nodes: Mapping[bytes, bytes]) -> None:
        """Nodes of a state that is about to be sealed, a bounded number of bytes at a time."""
        batch: list[tuple[bytes, Buffer]] = []
        size = 0
        left = len(nodes)
        for digest, node in nodes.items():
            batch += packed_nodes(self._cipher, [(digest, node)])
            size += len(node)
            left -= 1
            if size >= NODE_BYTES_AT_ONCE or not left:
                self._transaction(lambda some=tuple(batch): self._writer.insert_nodes(some))  # type: ignore[misc]
                batch, size = [], 0

    def stand_alone(
        self, n: int, resting: Sequence[int], branches: Sequence[int], newest: int, agents: Sequence[int]
    ) -> set[int]:
        """Make a checkpoint the first of its line, sealed: its nodes are written already.

        ``resting`` are checkpoints after it, oldest first, that rested on the same base through it: they rest on it
        from now on, and so do those that others made on these ``branches`` after number ``newest``. ``agents`` are
        those whose branches may stand at one of them. Returns the numbers of all that changed.
        """
        # Rows change nowhere else, and not without the right to forget: most of the work is done before others wait.
        row = self.reading.checkpoint(n)
        known = {n: self._rebased(replace(row, parent=0, base=n))}
        for number in resting:
            known[number] = self._rebased(replace(self.reading.checkpoint(number), base=n))

        def change() -> set[int]:
            changed = dict(known)
            if not row.sealed:
                links = [link for b in branches for link in self.reading.links(b, after=newest)]
                for number, parent, base in sorted(links):
                    if parent in changed and base == row.base and number not in changed:
                        changed[number] = self._rebased(replace(self._row(number), base=n))
            for columns in changed.values():
                self._run(
                    "UPDATE checkpoint SET parent = ?, base = ?, manifest = ?, operations = ?, sum = ? WHERE n = ?",
                    columns,
                )
            # Writers remember the base of the head; a branch row that differs makes them look again.
            for branch in (branch for a in agents for branch in self.reading.branches(a)):
                if branch.head in changed:
                    body = {**body_of(branch), "base": n}
                    self._writer.update_branch(replace(branch, body=encode(body)))
            self._writer.forget_heads()
            return set(changed)

        return self._transaction(change)

    def _rebased(self, row: CheckpointRow) -> tuple[Any, ...]:
        """What is written to a row that rests on another one now."""
        columns = (row.n, row.a, row.b, row.parent, row.depth, row.base, row.manifest, row.operations, row.key)
        *_, manifest, operations, _, total = self._cipher.stored("checkpoint", *columns)
        return row.parent, row.base, manifest, operations, total, row.n

    def _row(self, n: int) -> CheckpointRow:
        found = self._run(f"{CHECKPOINT} WHERE n = ?", (n,)).fetchall()[0]
        return self._cipher.record("checkpoint", CheckpointRow, found)

    def replace_seal(
        self, seal: SealRow, places: bytes | None, nodes: Mapping[bytes, bytes], named: Sequence[bytes]
    ) -> None:
        """Other places, with new nodes that they name; or none: then the seal goes.

        ``named`` are the nodes that it named until now: whoever goes on with this must know them.
        """
        packed = packed_nodes(self._cipher, list(nodes.items()))

        def change() -> None:
            self._writer.insert_nodes(packed)
            note = self.unfinished()
            self._write_note(replace(note, nodes=sorted({*note.nodes, *named})))
            if places is None:
                self._run("DELETE FROM seal WHERE n = ?", (seal.n,))
            else:
                *_, stored, total = self._cipher.stored("seal", seal.n, seal.b, places)
                self._run("UPDATE seal SET places = ?, sum = ? WHERE n = ?", (stored, total, seal.n))

        self._transaction(change)

    def cut_line(self, row: LineRow, count: int, end: bytes) -> None:
        """Let the line of a branch that is gone end earlier, or, with ``count`` 0, go as well. Its records stay."""

        def change() -> None:
            if count:
                new = LineRow(row.b, row.origin, min(row.start, count), count, end)
                *_, start, _, chain, total = stored_line(self._cipher, new)
                self._run(
                    "UPDATE line SET start = ?, count = ?, chain = ?, sum = ? WHERE b = ?",
                    (start, count, chain, total, new.b),
                )
            else:
                self._run("DELETE FROM line WHERE b = ?", (row.b,))
            self._writer.forget_heads()

        self._transaction(change)

    # -- deleting -------------------------------------------------------------------------------------------

    def sweep(self, choose: Callable[[int], Waste]) -> bool:
        """Delete what ``choose`` names, which is called inside the transaction with the most that it may name."""

        def change() -> bool:
            waste = choose(self._rows)
            for digest in waste.nodes:
                self._run("DELETE FROM node WHERE digest = ?", (self._cipher.lookup("node", digest),))
            for digest in waste.metadata:
                self._run("DELETE FROM metadata WHERE digest = ?", (self._cipher.lookup("metadata", digest),))
            packs: set[int] = set()
            for digest in waste.chunks:
                stored = self._cipher.lookup("chunk", digest)
                packs.update(self._numbers("SELECT p FROM chunk WHERE digest = ?", stored))
                self._run("DELETE FROM chunk WHERE digest = ?", (stored,))
            self._drop_packs([p for p in packs if not self._numbers("SELECT 1 FROM chunk WHERE p = ? LIMIT 1", p)])
            return bool(waste.nodes or waste.metadata or waste.chunks)

        return self._timed(change)

    def _drop_packs(self, numbers: Sequence[int]) -> None:
        """Packs that no chunk is in any more; their files go when all else is done."""
        if not numbers:
            return
        note = self.unfinished()
        rows = [row for p in numbers if (row := self.reading.pack_row(p)) is not None]
        for p in numbers:
            self._run("DELETE FROM pack WHERE p = ?", (p,))
        self._write_note(replace(note, packs=[*note.packs, *(row.uuid for row in rows)]))

    def delete(self, numbers: Sequence[int], events: Sequence[int], effects: Sequence[int]) -> None:
        """Delete checkpoints with their tails, events, and records, a few at a time."""
        both = "DELETE FROM tail WHERE n = ?", "DELETE FROM checkpoint WHERE n = ?"
        self._in_steps(numbers, lambda some: self._delete(some, *both))
        self._in_steps(events, lambda some: self._delete(some, "DELETE FROM event WHERE e = ?"))
        self._in_steps(effects, lambda some: self._delete(some, "DELETE FROM effect WHERE r = ?"))

    def _delete(self, keys: Sequence[int], *statements: str) -> None:
        for statement in statements:
            for key in keys:
                self._run(statement, (key,))

    # -- packs ----------------------------------------------------------------------------------------------

    def rewrite_packs(self) -> None:
        """Packs of which only a small part is needed give way to new ones with that part."""
        for pack in self.reading.pack_rows():
            chunks = self.reading.chunk_rows(pack.p)
            needed = sum(chunk.stored for chunk in chunks)
            if chunks and needed < pack.size * REWRITE_BELOW and self._packs.is_here(pack.uuid):
                self._rewrite(pack, chunks)

    def _rewrite(self, pack: PackRow, chunks: Sequence[ChunkRow]) -> None:
        while chunks:
            some: dict[bytes, bytes] = {}
            size = 0
            for chunk in chunks:
                if some and size + chunk.length > PACK_BYTES_AT_ONCE:
                    break
                some[chunk.digest] = self._packs.read(pack.uuid, chunk)
                size += chunk.length
            chunks = chunks[len(some) :]
            with self._packs.named(some.items()) as new:
                self._transaction(lambda new=new, last=not chunks: self._move_chunks(pack, new, last=last))  # type: ignore[misc]

    def _move_chunks(self, old: PackRow, new: NewPack, *, last: bool) -> None:
        p = self._writer.insert_pack(new)
        for chunk in new.chunks:
            row = self.reading.chunk_row(chunk.digest)
            if row is not None and row.p == old.p:
                self._writer.move_chunk(replace(chunk, p=p))
        if last:
            self._drop_packs([old.p])

    def move_out(self, pack: PackRow, place: Place) -> None:
        """Move a pack to a colder place: noted, copied, read back and compared, then recorded, then deleted here."""
        path = self._packs.path(pack.uuid)
        known = self._tiers.of(pack.uuid)
        if known is None:
            copy = bytes(pack.uuid), place.url
            if copy in self._tiers.strays:  # a deletion that was given up may still be carried out, on the new copy
                raise unreachable(place.url, "what was left there before cannot be deleted")
            self._transaction(lambda: self._lie(away=[copy]))
            copy_out(place, path)
            self._transaction(lambda: self._lie(there=[copy]))
        elif not holds(known, path):  # whoever moved it died before it was deleted here, and it has changed there
            copy_out(known, path)
        self._packs.remove(pack.uuid)

    def bring_back(self, pack: PackRow) -> None:
        """Bring a pack back from its colder place. What lies there is to be cleared then."""
        place = self._tiers.of(pack.uuid)
        if place is None:
            return
        if not self._packs.is_here(pack.uuid):
            chunks = self.reading.chunk_rows(pack.p)
            copy_back(place, self._packs.path(pack.uuid), lambda path: self._packs.prove(path, pack, chunks))
        self._transaction(lambda: self._lie(away=[(bytes(pack.uuid), place.url)]))

    def remove_strays(self) -> int:
        """Files below ``packs/`` that no row names, of processes that died before they could; how many bytes."""
        named = {row.uuid for row in self.reading.pack_rows()}
        with self._packs.removing() as free:
            return self._packs.remove_strays(named, time.time() - STRAY_AFTER_S) if free else 0

    def give_back(self) -> None:
        """Return free pages to the file system, a bounded number at a time."""
        free = -1
        while (now := self.reading.free_pages()) and now != free:
            free = now
            self._transaction(lambda: self._run(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall())
