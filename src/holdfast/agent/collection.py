"""What something still leads to, and deleting the rest: nodes, chunks, packs, records.

Owns the two walks: over all checkpoints by their links alone, and from what is left of them to every object that they
name; and the sweep after the second. Knows no policy, and deletes no checkpoint (removal.py does). References inside
values are found by their bytes, wherever they stand, so that something may be taken for needed that is not, but never
the other way round. What always holds: whatever certainly should be there and cannot be read ends the walk with
``Damaged``, and nothing is deleted; what is named while the sweep goes on stays; what names a node goes before it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeVar

from holdfast.agent.graph import left_by
from holdfast.agent.history import children, named_in
from holdfast.errors import ColdPlaceMissing, Damaged, DiskFull, StoreBusy
from holdfast.store.catalog import View, listed, slices
from holdfast.store.changes import Change, Work
from holdfast.store.cipher import HINT
from holdfast.store.database import Database
from holdfast.store.engine import Refused
from holdfast.store.manifest import mark_of
from holdfast.store.packs import ALIGN_BYTES, file_name, round_up
from holdfast.store.rows import Body, Branch, Point, Row, Tag, read_body
from holdfast.store.tables import CHECKPOINTS

WASTE = "waste"
"""The fact that something was deleted, and what it named may still be there. A hint only: it saves a useless walk."""

AT_ONCE = 256
"""Rows that one transaction deletes: others wait for milliseconds."""

REWRITE_BELOW = 0.5
"""A pack of which less than this share is needed is written anew: below it, more is won than is copied."""

ALONE_TRIES = 40
FILES_TRIES = 4
ALONE_WAIT_S = 0.05
"""How often, and how long, somebody is waited for who is just naming something, or reads the store as it was."""

Pace = Callable[[], None]
"""Called between any two steps. It may sleep, and what it raises ends the work there."""

T = TypeVar("T")


def at_once() -> None:
    """The pace of whoever is waited for."""


def alone(db: Database, work: Work[T]) -> T:
    """Make a change that deletes what nothing names, while nobody is about to name it."""
    if db.engine.dialect == "sqlite":  # a transaction is alone
        return db.change(work)

    def sweep() -> tuple[T] | None:
        with db.engine.sweeping() as free:
            return (db.engine.transaction(lambda tx: work(Change(tx, db.cipher))),) if free else None

    for _ in range(ALONE_TRIES):
        # In the writer's thread: from here, the change might wait behind one that waits for us.
        found = db.writers.apart(sweep)
        if found is not None:
            return found[0]
        time.sleep(ALONE_WAIT_S)
    raise StoreBusy(
        "nothing was deleted, because others use the store without a pause",
        hint="Try again later: the store is whole, and what is left goes the next time.",
    )


def _lost(what: str) -> Damaged:
    return Damaged(
        f"{what} is missing or damaged, so it is not known what can be deleted; nothing was", what=(what,), hint=HINT
    )


# -- checkpoints by their links ------------------------------------------------------------------------------------


class Links:
    """Every checkpoint of one moment, as its row is stored, and every ref that leads to some. No payload is read."""

    def __init__(self, view: View, pace: Pace = at_once) -> None:
        self.view = view
        self.rows: dict[int, Row] = {}
        self.damaged: set[int] = set()  # what these are linked to is not known; they can only go
        made_on: set[int] = set()
        for table in CHECKPOINTS:
            bad: list[tuple[Any, ...]] = []
            for at, head in enumerate(view.heads(table, bad)):
                row = self.rows[head[0]] = Row(*head)
                made_on.add(row.b)
                if not at % AT_ONCE:
                    pace()
            for n, *_, s, _ in bad:
                self.damaged.add(n)
                self.rows[n] = Row(n, 0, b"", 0, 0, 0, 0, 0, s if table == "checkpoint" else 0)
        self.shallow = view.shallow()
        self.agents = {agent.a: agent for agent in view.agents()}
        self.branches: dict[int, list[Branch]] = {a: [] for a in (0, *self.agents)}
        self.tags: dict[int, list[Tag]] = {a: [] for a in (0, *self.agents)}
        self._seen: dict[int, set[int]] = {}
        try:
            for branch in view.branches():
                self.branches[branch.a].append(branch)
                made_on.discard(branch.b)
            for tag in view.tags():
                self.tags[tag.a].append(tag)
        except KeyError as error:
            raise _lost(f"agent {error.args[0]}") from error
        for b in made_on - {0}:
            raise _lost(f"branch {b}")  # one whose agent was removed leaves a row

    @cached_property
    def marked(self) -> dict[int, list[int]]:
        """Checkpoints by their marks. Whoever looks for one takes all: should there ever be two, both stay."""
        found: dict[int, list[int]] = {}
        for n, link in self.rows.items():
            found.setdefault(link.mark, []).append(n)
        return found

    @cached_property
    def _left(self) -> dict[int, set[int]]:
        """By agent, where branches stood before they moved, and ends of lines that its log names for other reasons."""
        found: dict[int, set[int]] = {}
        for e, a, _, _, data in self.view.rows("log", "WHERE length(key) = 0"):
            found.setdefault(a, set()).update(self._ends(read_body(data, f"log {e}", "log")))
        return found

    def _ends(self, body: Body) -> Iterator[int]:
        for id in left_by(body):
            yield from self.marked.get(mark_of(id), ())

    def left_by(self, view: View, a: int) -> set[int]:
        """Those of these checkpoints that an agent's log names in another view."""
        return {n for entry in view.log(a, kept=False) for n in self._ends(entry.body)}

    def named(self, a: int) -> set[int]:
        """Where an agent's branches and tags stand."""
        return {branch.head for branch in self.branches[a] if branch.head} | {tag.n for tag in self.tags[a]}

    def before(self, n: int) -> int:
        """The nearest ancestor of a checkpoint that is there, or 0."""
        link = self.rows.get(n)
        return (link.parent if link is not None else 0) or self.shallow.get(n, 0)

    def above(self, starts: Iterable[int], *, damaged: bool = False) -> set[int]:
        """Checkpoints and all their ancestors, over what was forgotten, too. ``damaged``: as far as they are there."""
        found: set[int] = set()
        for start in starts:
            n = start
            while n and n not in found:
                if n not in self.rows or n in self.damaged:
                    if damaged:
                        break
                    raise _lost(f"checkpoint {n}")
                found.add(n)
                n = self.before(n)
        return found

    def seen(self, a: int, *, damaged: bool = False) -> set[int]:
        """All that an agent sees."""
        if a not in self._seen:
            self._seen[a] = self.above(self.named(a) | self._left.get(a, set()), damaged=damaged)
        return self._seen[a]

    @cached_property
    def held(self) -> set[int]:
        """What is just arriving from elsewhere, and nobody sees yet."""
        return self.above(tag.n for tag in self.tags[0])


def points(view: View, numbers: Iterable[int]) -> Iterator[Point]:
    """Checkpoints by their numbers, read and proven: first the loose ones, then those of each segment together."""
    folded: list[Row] = []
    for part in slices(list(numbers)):
        for row in view.checkpoints(f"WHERE n IN {listed(len(part))}", part):
            if row.data is not None:
                yield view.point(row)
            else:
                folded.append(row)
    for row in sorted(folded, key=lambda row: row.s):
        yield view.point(row)


# -- from checkpoints to objects -----------------------------------------------------------------------------------


class Reached:
    """All objects that some rows lead to."""

    def __init__(self, pace: Pace = at_once) -> None:
        self.nodes: set[bytes] = set()
        self.chunks: set[bytes] = set()
        self._pace = pace
        self._seen: dict[str, set[int]] = {"n": set(), "s": set(), "r": set(), "shallow": set()}

    def mark(
        self, view: View, dead: Collection[int] = (), broken: Collection[int] = (), bare: Collection[int] = ()
    ) -> None:
        """Walk from every row that was not looked at before. Numbers say nothing of time, so all are compared.

        ``dead``: checkpoints that are to go, ``broken``: the segments that lose some of theirs, ``bare``: the records
        that lose their values.
        """
        segments = set(self._new(view, "s", "segment", "s")) - set(broken)
        numbers = [n for n in self._new(view, "n", "loose", "n", "checkpoint") if n not in dead]
        sealed = set(dead)
        for point in points(view, numbers):
            if point.row.sealed:
                sealed.add(point.n)
                self.add(view, point.manifest.roots)
            else:  # its state is in its operations, and those of checkpoints before it
                self.add(view, [point.manifest.metadata])
            if point.row.data is not None or point.row.s in broken:
                self._value(view, view.operations(point))
            elif point.row.s in segments:
                segments.discard(point.row.s)
                self._segment(view, point.row.s)
            self._pace()
        for s in segments:
            self._segment(view, s)
        # Whoever lets a checkpoint stand alone does not make a row of it, but seals one that was there.
        shallow = self._new(view, "shallow", "shallow", "n")
        for point in points(view, (n for n in shallow if n not in sealed)):
            self.add(view, point.manifest.roots)
        for part in slices(self._new(view, "r", "record", "r")):
            for record in view.records(part):
                if record.r not in bare:
                    self.add(view, record.refs)
                    self._value(view, record.body)
            self._pace()

    def _new(self, view: View, kind: str, table: str, column: str, *more: str) -> list[int]:
        seen = self._seen[kind]
        rows = [row for name in (table, *more) for row in view.reader.run(f"SELECT {column} FROM {name}")]
        found = [number for (number,) in rows if number not in seen]
        seen.update(found)
        return found

    def _segment(self, view: View, s: int) -> None:
        dictionary, named = view.segment(s).refs
        self.add(view, dictionary)
        self.chunks.update(named)
        self.add(view, named, certain=False)

    def _value(self, view: View, data: bytes) -> None:
        nodes, chunks = named_in(data)
        self.chunks |= chunks
        self.add(view, nodes, certain=False)

    def add(
        self, view: View, roots: Iterable[bytes], *, certain: bool = True, more: dict[bytes, bytes] | None = None
    ) -> None:
        """Walk down from nodes. What is not ``certain`` was found by its bytes: a text may look like a name.

        ``more`` are nodes that would be written.
        """
        waiting = dict.fromkeys((root for root in roots if root not in self.nodes), certain)
        while waiting:
            self.nodes |= waiting.keys()
            found = view.nodes(waiting)
            below: dict[bytes, bool] = {}
            for name, sure in waiting.items():
                raw = found.get(name) or (more or {}).get(name)
                if raw is not None:
                    index, named, chunks = names_of(raw)
                    self.chunks |= chunks
                    below.update((one, True) for one in index if one not in self.nodes)
                    below.update((one, below.get(one, False)) for one in named if one not in self.nodes)
                elif sure:
                    raise _lost(f"node {name.hex()[:16]}")
            waiting = below
            self._pace()


def names_of(raw: bytes) -> tuple[list[bytes], set[bytes], set[bytes]]:
    """What a node names: nodes for certain, and nodes and chunks that its bytes look like."""
    index = children(raw)
    return (index, set(), set()) if index else ([], *named_in(raw))


# -- sweeping ------------------------------------------------------------------------------------------------------


def collect(db: Database, pace: Pace = at_once) -> None:
    """Delete all that nothing leads to. Can be done again from any point at which it stopped."""
    reached = Reached(pace)
    with db.moment() as (view, _):
        hint = view.facts().get(WASTE)
        records = _lost_records(view)
    for part in slices(records, AT_ONCE):  # first: what only they name goes with them
        pace()
        alone(db, partial(Change.delete, table="record", column="r", values=part))
    with db.moment() as (view, _):
        reached.mark(view)
        nodes = _from_above(view, _unreached(view, "node", "k", reached.nodes), pace)
        chunks = [name for _, name in _unreached(view, "chunk", "p", reached.chunks)]
    for part in slices(nodes, AT_ONCE):
        pace()
        alone(db, partial(_sweep_nodes, reached=reached, some=part))
    for part in slices(chunks, AT_ONCE):
        pace()
        alone(db, partial(_sweep_chunks, reached=reached, some=part))
    alone(db, _drop_orphans)
    _delete_files(db, alone(db, _drop_packs))
    _delete_files(db, _rewrite_packs(db, pace))
    if pace is at_once:  # whoever works in the background leaves a slow or distant place alone
        db.sweep_strays()
    db.change(partial(_forget_hint, hint=hint))
    while db.writers.apart(lambda: db.engine.reclaim(log=pace is at_once)):
        pace()


def note_waste(change: Change) -> None:
    """Say that something was deleted, so that whoever comes after a process that died looks for what it left."""
    change.set_fact(WASTE, os.urandom(8))


def _forget_hint(change: Change, hint: bytes | None) -> None:
    if change.facts().get(WASTE) == hint:
        change.set_fact(WASTE, None)


def _unreached(view: View, table: str, column: str, reached: set[bytes]) -> list[tuple[int, bytes]]:
    rows = view.reader.run(f"SELECT {column}, digest FROM {table}")
    named = ((number, view.cipher.unname(table, bytes(name))) for number, name in rows)
    return [(number, name) for number, name in named if name not in reached]


def _from_above(view: View, nodes: Sequence[tuple[int, bytes]], pace: Pace) -> list[tuple[int, bytes]]:
    """Nodes in an order in which each comes before all that it names.

    A damaged one names nothing that is known, and comes first: nobody shall find it there and count on it.
    """
    number = {name: k for k, name in nodes}
    below: dict[bytes, list[bytes]] = {}
    above = dict.fromkeys(number, 0)
    for part in slices(list(number), 64):
        for name, raw in _readable(view, part):
            index, named, _ = names_of(raw)
            below[name] = [one for one in {*index, *named} if one in number]
            for one in below[name]:
                above[one] += 1
        pace()
    for name in number.keys() - below.keys():
        above[name] = 0
    order = [name for name, count in above.items() if not count]
    for name in order:  # it grows meanwhile
        for one in below.get(name, ()):
            above[one] -= 1
            if not above[one]:
                order.append(one)
    return [(number[name], name) for name in order]


def _readable(view: View, names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    try:
        yield from view.nodes(names).items()
    except Damaged:
        for name in names:
            with suppress(Damaged):
                yield from view.nodes([name]).items()


def _sweep_nodes(change: Change, reached: Reached, some: Sequence[tuple[int, bytes]]) -> None:
    reached.mark(change)
    gone = [(k, name) for k, name in some if name not in reached.nodes]
    if gone:
        change.remember("node", max(k for k, _ in gone))
        # Not by their numbers: somebody else may have deleted one since, and another node have got its number.
        change.delete("node", "digest", [change.cipher.name("node", name) for _, name in gone])


def _sweep_chunks(change: Change, reached: Reached, some: Sequence[bytes]) -> None:
    reached.mark(change)
    names = [change.cipher.name("chunk", name) for name in some if name not in reached.chunks]
    change.delete("chunk", "digest", names)


def _drop_orphans(change: Change) -> None:
    """What somebody said of an agent while somebody else removed it."""
    gone = "a <> 0 AND a NOT IN (SELECT a FROM agent)"
    rows = change.tx.run(f"SELECT e FROM log WHERE length(key) = 0 AND {gone}")
    change.delete("log", "e", [e for (e,) in rows])
    change.tx.do(f"DELETE FROM validity WHERE {gone}")


def _drop_packs(change: Change) -> list[bytes]:
    """Packs that no chunk is in any more."""
    rows = change.rows("pack", "WHERE p NOT IN (SELECT p FROM chunk)")
    change.delete("pack", "p", [p for p, _, _ in rows])
    return [uuid for _, uuid, _ in rows]


def _delete_files(db: Database, packs: Sequence[bytes]) -> None:
    """Of packs whose rows are gone, unless somebody reads the store as it was: then they are strays one day."""
    for _ in range(FILES_TRIES if packs else 0):
        with db.engine.sweeping() as free:
            if free:
                for pack in packs:
                    db.packs.discard(pack)
                return
        time.sleep(ALONE_WAIT_S)


def _rewrite_packs(db: Database, pace: Pace) -> list[bytes]:
    """Packs of which only a small part is needed give way to new ones with that part. Returns which went."""
    needed: dict[int, int] = {}
    for p, stored in db.view.reader.run("SELECT p, stored FROM chunk"):
        needed[p] = needed.get(p, ALIGN_BYTES) + round_up(stored + db.cipher.overhead)
    gone = []
    for p, uuid, size in db.view.rows("pack"):
        if needed.get(p, size) < size * REWRITE_BELOW:
            pace()
            with suppress(Damaged, Refused, DiskFull, ColdPlaceMissing):  # then it stays as it is
                if db.packs.here.size(file_name(uuid)) is not None:  # fetching it from elsewhere costs more than room
                    _rewrite(db, p)
                    gone.append(uuid)
    return gone


def _rewrite(db: Database, p: int) -> None:
    names = [name for name, *_ in db.view.rows("chunk", "WHERE p = ? ORDER BY start", (p,))]
    made = db.packs.write(zip(names, db.packs.read(db.view, names), strict=True))

    def move(change: Change) -> None:
        change.tx.naming()  # before any row is locked: others wait for these with that right
        there = {name for name, *_ in change.rows("chunk", "WHERE p = ?", (p,))}
        if not there:
            raise Refused("nothing of the pack is needed any more")
        change.delete("chunk", "p", [p])
        change.put_pack(made._replace(chunks=[chunk for chunk in made.chunks if chunk[0] in there]))
        change.delete("pack", "p", [p])

    try:
        db.change(move)
    except Refused:
        db.packs.discard(made.uuid)
        raise


def _lost_records(view: View) -> list[int]:
    """Records that no line of a branch leads to, and none of a checkpoint. Those of a running transfer stay."""
    found = {r: (prev, b) for r, prev, _, _, b, *_ in view.heads("record")}
    if not found:
        return []
    reached: set[int] = set()
    for end in {branch.line for branch in view.branches()} | {link.line for link in Links(view).rows.values()}:
        r = end
        while r and r not in reached:
            if r not in found:
                raise _lost(f"record {r}")
            reached.add(r)
            r = found[r][0]
    arriving = any(not tag.a for tag in view.tags())
    return [r for r, (_, b) in found.items() if r not in reached and (b or not arriving)]
