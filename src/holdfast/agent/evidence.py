"""What the rows of a store say together, and the proof of each checkpoint: what verify, repair and recovery judge by.

Owns the collection of sound rows, what the log tells of refs, how lines of records link, and the replay of every
checkpoint on its parent's state. Says nothing to people and changes nothing. What always holds: a row that is damaged
is told of and keeps no other from being taken in; a checkpoint counts as proven when its operations lead from its
parent's state to the digests that it recorded, or its own nodes do; what cannot be read now is neither proven nor bad.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.agent import history, metadata
from holdfast.agent.graph import left_by
from holdfast.codec.state import State
from holdfast.errors import Damaged, ForkedHandle, InputError, StoreClosed, Unavailable
from holdfast.store.catalog import ROWS_AT_ONCE, View
from holdfast.store.database import Contents
from holdfast.store.manifest import Position, is_bare, mark_of
from holdfast.store.rows import (
    BEGINNING,
    SHAPES,
    Agent,
    Body,
    Branch,
    End,
    Entry,
    Open,
    Point,
    Record,
    Row,
    Tag,
    link,
    read_body,
)
from holdfast.store.tables import TABLES

_AT_ONCE = {"segment": 4, "node": 64, "loose": 64, "record": 64}
"""Rows that are read at once where they may be long."""


# -- rows --------------------------------------------------------------------------------------------------------


def scan(view: View, table: str) -> Iterator[tuple[Any, ...]]:
    """All rows of a table as they are stored, a few at a time."""
    spec = TABLES[table]
    key = ", ".join(spec.columns[at].name for at in spec.keys)
    size = _AT_ONCE.get(table, ROWS_AT_ONCE)
    left = view.reader.run(f"SELECT count(*) FROM {table}")[0][0]
    where, args = "", ()
    while True:
        some = view.reader.run(f"SELECT {spec.listed} FROM {table} {where} ORDER BY {key} LIMIT {size}", args)
        yield from some
        left -= len(some)
        if len(some) < size:
            return
        if left < 0:  # a tree that is out of order may have no end
            raise Damaged(f"table {table}: its rows are not in order", what=(f"table {table}",))
        args = tuple(some[-1][at] for at in spec.keys)
        where = f"WHERE ({key}) > ({', '.join('?' * len(args))})"


class Refs(NamedTuple):
    """What an agent has."""

    branches: list[Branch]
    tags: list[Tag]
    log: list[Entry]  # oldest first


class Found:
    """The rows of a store that are sound, without what is long in them."""

    def __init__(self) -> None:
        self.agents: dict[int, Agent] = {}
        self.branches: dict[int, Branch] = {}  # without those of removed agents
        self.retired: set[int] = set()
        self.tags: list[Tag] = []
        self.validity: dict[tuple[int, int], Body] = {}
        self.shallow: dict[int, int] = {}
        self.log: list[Entry] = []
        self.open: dict[int, list[Open]] = defaultdict(list)  # by branch
        self.rows: dict[int, Row] = {}
        self.records: dict[int, Record] = {}
        self.hollow: set[int] = set()  # records of which nothing is left but that there was one
        self.bare: set[int] = set()  # records whose values are lost
        self.stretches: dict[tuple[int, int], set[int]] = defaultdict(set)  # branch, epoch -> checkpoints
        self._marked: dict[int, int] = {}

    def take(self, table: str, values: tuple[Any, ...]) -> None:
        """Take a row's values in; raises ``Damaged`` where they mean nothing."""
        made = SHAPES[table](values) if table in SHAPES else values
        match made:
            case Agent():
                self.agents[made.a] = made
            case Branch() if made.a:
                self.branches[made.b] = made
            case Branch():
                self.retired.add(made.b)
            case Tag():
                self.tags.append(made)
            case Entry():
                self.log.append(made)
            case Record():
                if not made.body:
                    self.hollow.add(made.r)
                if is_bare(made.body) and not made.let_go:
                    self.bare.add(made.r)
                self.records[made.r] = made._replace(body=b"")
            case Row():
                self.add_row(made)
            case Open():
                self.open[made.b].append(made)
            case (a, n, body) if table == "validity":
                self.validity[a, n] = read_body(body, f"validity {n}", "validity")
            case (n, over) if table == "shallow":
                self.shallow[n] = over

    def read(self, view: View, tables: Iterable[str], flaw: Callable[[str, Damaged], None]) -> None:
        """Take in all rows of some tables; those that are damaged are told of."""
        for table in tables:
            try:
                for row in scan(view, table):
                    try:
                        self.take(table, view.cipher.loaded(table, row))
                    except Damaged as error:
                        flaw(table, error)
            except Damaged as error:
                flaw(table, error)
        self.log.sort()

    def clear_rows(self) -> None:
        for known in (self.rows, self.stretches, self._marked):
            known.clear()

    def add_row(self, row: Row) -> None:
        if row.n in self.rows:
            raise Damaged(f"checkpoint {row.n} is there twice, loose and in a segment", what=(f"checkpoint {row.n}",))
        self.rows[row.n] = row._replace(data=b"" if row.data is not None else None)
        self.stretches[row.b, row.epoch].add(row.n)
        self._marked[row.mark] = row.n

    def find(self, id: object) -> int:
        """The checkpoint with that id, 0 when it is not there."""
        return self._marked.get(mark_of(id), 0) if isinstance(id, bytes) and id else 0

    def above(self, starts: Iterable[int]) -> set[int]:
        """Checkpoints and all their ancestors, over what was forgotten, too; also those that are missing."""
        found: set[int] = set()
        waiting = list(starts)
        while waiting:
            n = waiting.pop()
            if n and n not in found:
                found.add(n)
                row = self.rows.get(n)
                if row is not None:
                    waiting.append(row.parent or self.shallow.get(n, 0))
        return found

    def refs(self) -> dict[int, Refs]:
        """What each agent has."""
        found: dict[int, Refs] = defaultdict(lambda: Refs([], [], []))
        for branch in self.branches.values():
            found[branch.a].branches.append(branch)
        for tag in self.tags:
            found[tag.a].tags.append(tag)
        for entry in self.log:
            if not entry.key:
                found[entry.a].log.append(entry)
        return found

    def reached(self, refs: Refs) -> set[int]:
        """What an agent's branches, tags and log lead to."""
        starts = [branch.head for branch in refs.branches] + [tag.n for tag in refs.tags]
        return self.above(starts + [self.find(id) for entry in refs.log for id in left_by(entry.body)])

    def astray(self, refs: Refs) -> list[bytes]:
        """Where the log says that branches stood, and that is gone although nothing was forgotten since."""
        found: list[bytes] = []
        for entry in refs.log:
            if entry.body.get("what") == "forget":  # it names what stays of lines that were left
                found.clear()
            elif entry.body.get("what") == "moved":  # it was elsewhere before it came
                continue
            found += [id for id in left_by(entry.body) if not self.find(id)]
        return found

    def tip(self, b: int, epoch: int, depth: Callable[[int], int]) -> int:
        """The newest checkpoint of a stretch of a branch, 0 when it has none."""
        here = self.stretches.get((b, epoch), set())
        return max(here - {self.rows[n].parent for n in here}, key=depth, default=0)

    def before(
        self, told: Told, b: int, epoch: int, below: int, depth: Callable[[int], int], at: Callable[[bytes], int]
    ) -> int:
        """What was made last on a branch, up to an epoch, and is not as deep as that. ``at`` finds where one began."""
        epochs = {one for other, one in (*self.stretches, *told.begun) if other == b and one <= epoch}
        for one in sorted(epochs, reverse=True):
            here = [n for n in self.stretches.get((b, one), ()) if 0 < depth(n) < below]
            n = max(here, key=depth, default=0) or at(told.begun.get((b, one), b""))
            if n and depth(n) < below:
                return n
        return 0


class Made(NamedTuple):
    """What the log says of a branch: whose it is, and where its newest epoch began."""

    a: int
    name: str
    uuid: bytes
    epoch: int
    to: bytes


class Told:
    """What the log says that refs should be."""

    def __init__(self, log: Iterable[Entry]) -> None:
        self.agents: dict[int, tuple[str, int]] = {}  # name, and when it was made
        self.branches: dict[int, Made] = {}
        self.begun: dict[tuple[int, int], bytes] = {}  # branch, epoch -> where it began
        self.epochs: dict[int, set[int]] = defaultdict(set)  # branch -> those that the log has an entry of
        self._first: dict[int, int] = {}  # branch -> the epoch in which it was made, or made anew by a repair
        self.generations: dict[int, int] = {}
        self.tags: dict[int, dict[str, bytes]] = defaultdict(dict)
        self.validity: dict[int, dict[bytes, Body]] = defaultdict(dict)
        for entry in log:
            if not entry.key:
                self._take(entry, entry.body)

    def whole(self, b: int) -> bool:
        """Whether the log has an entry for each epoch of a branch."""
        made, first = self.branches.get(b), self._first.get(b, 0)
        # Counted: how high a number is, anybody may have written.
        return made is not None and len({one for one in self.epochs[b] if one >= first}) == made.epoch - first + 1

    def _take(self, entry: Entry, body: Body) -> None:
        a = entry.a
        match body:
            case {"what": "agent", "name": str(name)}:
                self.agents[a] = (name, entry.at)
            case {"what": "branch", "name": str(name), "uuid": bytes(uuid), "b": int(b), "epoch": int(epoch)}:
                self.branches[b] = Made(a, name, uuid, epoch, body.get("to", b""))
                self.begun[b, epoch] = body.get("to", b"")
                self.epochs[b].add(epoch)
                self._first[b] = max(epoch, self._first.get(b, 0))
            case {"b": int(b), "epoch": int(epoch), "to": bytes(to)}:  # however it was moved
                was = self.branches.get(b, Made(a, str(body.get("branch", "")), b"", -1, b""))
                if epoch > was.epoch:
                    self.branches[b] = was._replace(epoch=epoch, to=to)
                self.begun[b, epoch] = to
                self.epochs[b].add(epoch)
            case {"b": int(b), "generation": int(generation)}:
                self.generations[b] = max(generation, self.generations.get(b, 0))
            case {"what": "tag", "name": str(name), "at": bytes(id)}:
                self.tags[a][name] = id
            case {"what": "untag", "name": str(name)}:
                self.tags[a][name] = b""
            case {"what": "validity", "at": bytes(id)}:
                self.validity[a][id] = body


class Lines:
    """How each line of records looks at each of its records, so far as it is whole below."""

    def __init__(self, records: Mapping[int, Record]) -> None:
        self._records = records
        self._ends: dict[int, End | None] = {0: BEGINNING}
        self.wrong: dict[int, str] = {}  # the records at which lines break

    def end(self, r: int) -> End | None:
        """The end of a line whose newest record is ``r``; None when it is not whole."""
        above: list[Record] = []
        while r not in self._ends:
            record = self._records.get(r)
            if record is None or (above and record.i >= above[-1].i):
                self.wrong[r] = "it is missing" if record is None else "it is not the one before"
                self._ends[r] = None
                break
            above.append(record)
            r = record.prev
        below = self._ends[r]
        for record in reversed(above):
            if below is not None and (record.i, record.back) != (below.records + 1, below.back):
                self.wrong[record.r] = "it does not follow the one before it"
                below = None
            elif below is not None:
                back = record.r if record.marked else below.back
                below = End(record.r, back, record.i, link(below.chain, record.digest))
            self._ends[record.r] = below
        return below

    def break_below(self, r: int) -> str:
        """Where a line that is not whole breaks."""
        while r and r not in self.wrong and r in self._records:
            r = self._records[r].prev
        number = self._records[r].i if r in self._records else 0
        return f"record {number or r}: {self.wrong.get(r, 'it is missing')}"


# -- histories ---------------------------------------------------------------------------------------------------


class Flaw(NamedTuple):
    """Why the state of a checkpoint cannot be proven. ``what`` is empty where that is only because of another one."""

    what: str
    detail: str


class Known(NamedTuple):
    """What is known of a checkpoint whose manifest could be read."""

    id: bytes
    depth: int
    at: int
    parent: bytes
    label: str
    effects: Position
    metadata: bytes


class _Rests(Damaged):
    """It is the child of one that cannot be proven, and does not stand alone."""


class Histories:
    """Proves checkpoints: each is replayed once, on the state of its parent."""

    def __init__(self, contents: Contents, found: Found, lines: Lines) -> None:
        self.contents = contents
        self.view = contents.view
        self.found = found
        self.lines = lines
        self.known: dict[int, Known] = {}
        self.bad: dict[int, Flaw] = {}
        self.odd: dict[int, list[str]] = defaultdict(list)  # what is wrong although the state can be proven
        self.away: dict[int, Unavailable] = {}  # could not be read; nothing is known to be wrong
        self.done: set[int] = set()
        self.operations = 0
        self.lost: set[bytes] = set()  # metadata of which a repair said that it is lost
        self.reading = history.Reading(history.Blank(contents))
        self.described: dict[bytes, str] = {}  # metadata that was read, and what was wrong with it

    def prove(self, numbers: Iterable[int], step: Callable[[], None]) -> None:
        """Prove checkpoints; their ancestors are among them, or were proven before."""
        wanted = set(numbers) - self.done
        below: dict[int, list[int]] = defaultdict(list)
        waiting: list[tuple[int, State | None]] = []
        for n in sorted(wanted):
            row = self.found.rows.get(n)
            if row is None:
                self.bad[n] = Flaw(f"checkpoint {n}", "it is missing")
            elif row.parent in wanted and row.parent in self.found.rows:
                below[row.parent].append(n)
            else:
                waiting.append((n, None))
        while waiting:
            n, state = waiting.pop()
            state = self._tried(n, state)
            self.done.add(n)
            step()
            # The state goes on to one child, whose line is walked to its end first; others load it again.
            children = below[n]
            waiting += [(child, None) for child in children[:-1]]
            waiting += [(child, state) for child in children[-1:]]
        for n in wanted - self.done - self.bad.keys():
            self.bad[n] = Flaw(f"checkpoint {n}", "it is its own ancestor")
        self.done |= wanted

    def _tried(self, n: int, state: State | None) -> State | None:
        try:
            return self._proven(self.view.point(n), state)
        except (StoreClosed, ForkedHandle):
            raise
        except Unavailable as error:
            self.away[n] = error
        except _Rests as error:
            above = self.found.rows[n].parent
            if above in self.away:
                self.away[n] = self.away[above]
            else:
                self.bad[n] = Flaw("", error.message)
        except (Damaged, InputError) as error:
            named = ", ".join(getattr(error, "what", ())) or f"checkpoint {self.short(n)}"
            self.bad[n] = Flaw(named, error.message)
        return None

    def short(self, n: int) -> str:
        return self.known[n].id.hex()[:12] if n in self.known else str(n)

    def ids(self) -> dict[int, bytes]:
        """The ids of checkpoints; of those that cannot be read, as far as others name them."""
        found, known = self.found, self.known
        named = {found.rows[n].parent: one.parent for n, one in known.items() if n in found.rows}
        named |= {branch.head: branch.id for branch in found.branches.values()} | {tag.n: tag.id for tag in found.tags}
        return named | {n: one.id for n, one in known.items()}

    def depth(self, n: int) -> int:
        """How deep a checkpoint is; 0 when nobody can tell."""
        if n not in self.known:
            try:
                self._know(self.view.point(n))
            except (Damaged, InputError):
                return 0
        return self.known[n].depth

    def _know(self, point: Point) -> None:
        one = point.manifest
        self.known[point.n] = Known(point.id, one.depth, one.time_us, one.parent, one.label, one.effects, one.metadata)

    def _proven(self, point: Point, state: State | None) -> State:
        """Its place, its operations, and the state that they lead to."""
        row, manifest = point.row, point.manifest
        self._know(point)
        replayed = self._in_place(point)
        end = self.lines.end(row.line)
        if end is None or end.position != manifest.effects:
            self.odd[point.n].append("it speaks of records that are not there or are others")
        operations = history.operations_of(self.view, point)
        self.operations += len(operations)
        if not replayed:
            state = self.alone(point)
        else:
            if state is None:
                state = history.state_of(self.contents, self.view.point(row.parent) if row.parent else None)
            state.do(operations)
            if state.digests() != manifest.sections:
                raise self._wrong(point, "its operations do not lead to the state that it recorded")
            self.reading.operations(operations)
            if row.sealed:
                self.reading.trees(digest for _, digest in manifest.sections)
        self._describe(point)
        return state

    def _in_place(self, point: Point) -> bool:
        """Whether it can be replayed on its parent; raises if it is not where it belongs."""
        row, manifest = point.row, point.manifest
        if not row.parent and not manifest.parent:
            if manifest.depth != 1:
                raise self._wrong(point, "its depth is not that of a root")
            return True
        if row.parent:
            if point.n in self.found.shallow:
                self.odd[point.n].append("its parent is there, and its history is said to begin with it")
            parent = self.known.get(row.parent)
            if parent is not None and (parent.id, parent.depth) != (manifest.parent, manifest.depth - 1):
                raise self._wrong(point, "its parent is not the checkpoint that it names")
            if row.parent in self.found.rows:
                return row.parent not in self.bad and row.parent not in self.away
            if row.sealed:
                self.odd[point.n].append("its parent is missing")
            return False
        over = self.found.shallow.get(point.n)
        if over is None:
            self.odd[point.n].append("its parent is missing, and nothing says that it was forgotten")
        elif over and not 0 < self.depth(over) < manifest.depth:
            self.odd[point.n].append("the ancestor that it names is not one, or is missing")
        return False

    def alone(self, point: Point) -> State:
        """The state of a checkpoint that cannot be replayed on its parent's."""
        if not point.row.sealed:
            if point.row.parent:
                raise _Rests("it rests on one that cannot be proven")
            raise self._wrong(point, "its parent was forgotten, and it does not stand alone")
        self.reading.trees(digest for _, digest in point.manifest.sections)
        return history.state_of(self.contents, point)

    def _describe(self, point: Point) -> None:
        """Read its metadata, once for all that have the same."""
        root = point.manifest.metadata
        if root not in self.described:
            self.described[root] = ""
            try:
                metadata.read(history.state_of(self.contents, None), root)
            except Damaged as error:
                if root not in self.lost:
                    self.described[root] = error.message
        if self.described[root]:
            self.odd[point.n].append(f"its metadata cannot be read: {self.described[root]}")

    def _wrong(self, point: Point, detail: str) -> Damaged:
        short = point.id.hex()[:12]
        return Damaged(f"checkpoint {short}: {detail}", what=(f"checkpoint {short}",))
