"""Verify: read everything and prove it.

Owns the proof that a store is what was written: the engine's structure, every row's sum, every node and chunk, that the
operations of each checkpoint lead from its parent's state to the digests that it recorded, that every branch stands
where the log and its checkpoints say, and that the records of what happened outside are those that were written.
Changes nothing. What always holds: everything is read as it was at one moment, so that what others write or forget
meanwhile is never taken for damage; one damaged thing does not keep the rest from being checked; only what branches,
tags and the log reach has to be whole; what cannot be read now is neither proven nor called damaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.agent import history, metadata
from holdfast.agent.graph import left_by
from holdfast.codec.state import State
from holdfast.errors import Damaged, ForkedHandle, InputError, StoreClosed, Unavailable
from holdfast.store import keys, witness
from holdfast.store.catalog import (
    BEGINNING,
    NODE_MAX_BYTES,
    ROWS_AT_ONCE,
    SHAPES,
    Agent,
    Body,
    Branch,
    End,
    Entry,
    Point,
    Progress,
    Record,
    Row,
    Tag,
    View,
    link,
    node_digest,
    quietly,
    read_body,
)
from holdfast.store.database import Contents
from holdfast.store.manifest import STATE, Position, mark_of, uncompressed
from holdfast.store.segments import members_of
from holdfast.store.tables import TABLES

if TYPE_CHECKING:
    from holdfast.agent.store import Store

_AT_ONCE = {"segment": 4, "node": 64, "loose": 64, "record": 64}
"""Rows that are read at once where they may be long."""


# -- what is said of it ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. ``affected`` are the ids of checkpoints whose state can no longer be proven."""

    what: str
    detail: str
    agent: str = ""
    affected: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Unreachable:
    """A place that did not answer, or failed. What lies there, and the ``checkpoints`` that need it, was not proven.

    Nothing is known to be wrong with any of it.
    """

    place: str
    detail: str
    hint: str
    packs: int = 0
    checkpoints: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"place": self.place, "detail": self.detail, "packs": self.packs, "checkpoints": self.checkpoints}


class VerifyReport:
    """What was checked and what was found. ``problems`` are damage, ``unreachable`` is what could not be looked at."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.unreachable: list[Unreachable] = []
        counted = ("rows", "agents", "checkpoints", "operations", "nodes", "chunks", "bytes", "effects")
        self.checked: dict[str, int] = dict.fromkeys(counted, 0)

    @property
    def ok(self) -> bool:
        """Whether everything was looked at and is as it was written."""
        return not self.problems and not self.unreachable

    @property
    def affected(self) -> list[str]:
        """Ids of all checkpoints that some problem touches."""
        return list(dict.fromkeys(name for problem in self.problems for name in problem.affected))

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "checked": self.checked,
            "problems": [problem.to_json() for problem in self.problems],
            "affected": self.affected,
            "unreachable": [one.to_json() for one in self.unreachable],
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.checked.items())
        if self.ok:
            return f"all is well: {counts}"
        away = [
            f"- not looked at: {one.packs} pack(s), {len(one.checkpoints)} checkpoint(s): {one.detail}"
            for one in self.unreachable
        ]
        found = [f"- {problem.what}: {problem.detail}" for problem in self.problems]
        return "\n".join([f"{len(self.problems)} problem(s): {counts}", *found, *away])

    def __repr__(self) -> str:
        away = f", {len(self.unreachable)} places unreachable" if self.unreachable else ""
        return f"<VerifyReport {'ok' if self.ok else f'{len(self.problems)} problems{away}'}>"


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
        self.rows: dict[int, Row] = {}
        self.records: dict[int, Record] = {}
        self.hollow: set[int] = set()  # records of which nothing is left but that there was one
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
                self.records[made.r] = made._replace(body=b"")
            case Row():
                self.add_row(made)
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
        self.made_on: dict[bytes, tuple[int, int]] = {}  # what a branch has left -> branch, epoch on which it was made
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
                if self.begun.get((b, epoch - 1)) != body.get("from"):
                    self.made_on[body.get("from", b"")] = (b, epoch - 1)
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
                back = record.r if record.mark else below.back
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
    parent: bytes
    depth: int
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
        self.known[point.n] = Known(point.id, one.parent, one.depth, one.label, one.effects, one.metadata)

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
            history.read_values(state, operations)
            if row.sealed:
                history.read_all(self.contents, point)
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
        return history.read_all(self.contents, point)

    def _describe(self, point: Point) -> None:
        """Read its metadata, and what it has beside its state, once for all that have the same."""
        manifest = point.manifest
        layers = [(name, root) for name, sections in manifest.layers if name != STATE for _, root in sections]
        for called, root in (("metadata", manifest.metadata), *layers):
            if root not in self.described:
                self.described[root] = ""
                read = metadata.read if root == manifest.metadata else history.read_tree
                try:
                    read(history.state_of(self.contents, None), root)
                except Damaged as error:
                    if root not in self.lost:
                        self.described[root] = error.message
            if self.described[root]:
                self.odd[point.n].append(f"its {called} cannot be read: {self.described[root]}")

    def _wrong(self, point: Point, detail: str) -> Damaged:
        short = point.id.hex()[:12]
        return Damaged(f"checkpoint {short}: {detail}", what=(f"checkpoint {short}",))


# -- the whole store ---------------------------------------------------------------------------------------------


def verify(store: Store, progress: Progress | None, agents: Sequence[str]) -> VerifyReport:
    """Prove the whole store, or the histories of some agents and everything that they share with others."""
    db, report = store._db, VerifyReport()
    told = witness.witness_report(Path(db.place)) if db.witness is not None else None
    noted = told.newest if told is not None else None  # read before the moment, which can then only be newer
    run = _Verification(store, report, progress or quietly)
    with run.finding("catalog"):
        db.flush()
    with run.finding("store.db"), db.moment() as contents:
        run.contents, run.view = Contents(contents.view, contents.packs.impatient()), contents.view
        run.structure(told.problems if told is not None else (), noted)
        run.rows()
        run.packs()
        run.histories(agents)
    return report


class _Verification:
    contents: Contents
    view: View

    def __init__(self, store: Store, report: VerifyReport, progress: Progress) -> None:
        self.store = store
        self.progress = progress
        self.report = report
        self.found = Found()
        self._packs: list[bytes] = []
        self._members: dict[int, list[int]] = {}

    @contextmanager
    def finding(self, what: str, *, packs: int = 0) -> Iterator[None]:
        """Turn damage into a problem, and what cannot be read now into something unreachable."""
        try:
            yield
        except (StoreClosed, ForkedHandle):
            raise
        except Unavailable as error:
            self.unreachable(error, [], packs)
        except Damaged as error:
            self.problem(", ".join(error.what) or what, error.message)

    def unreachable(self, error: Unavailable, checkpoints: Sequence[str], packs: int = 0) -> None:
        """Each place is told of once, however much lies there."""
        place = getattr(error, "place", "") or self.store.place
        known = next((one for one in self.report.unreachable if one.place == place), None)
        if known is None:
            known = Unreachable(place, error.message, error.hint)
            self.report.unreachable.append(known)
        known.checkpoints += [one for one in checkpoints if one not in known.checkpoints]
        known.packs += packs

    def problem(self, what: str, detail: str, agent: str = "", affected: Sequence[str] = ()) -> None:
        self.report.problems.append(Problem(what, detail, agent, list(affected)))

    def structure(self, problems: Sequence[str], noted: witness.Noted | None) -> None:
        self.progress("database structure", 0, 1)
        with self.finding("store.db"):
            for text in self.store._db.engine.check():
                self.problem("store.db", text)
        for text in problems:
            self.problem("witness", text)
        if self.store._db.encrypted:
            for text in keys.problems(self.view):
                self.problem("keys", text)
        with self.finding("witness"):
            if witness.lost(self.view, noted):
                self.problem("witness", "the catalog is older than the newest commit that was acknowledged")
        self.progress("database structure", 1, 1)

    def rows(self) -> None:
        total = 0
        with self.finding("store.db"):
            total = sum(self.view.counts().values())
        done = 0
        for table in TABLES:
            with self.finding(f"table {table}"):
                for row in scan(self.view, table):
                    done += 1
                    with self.finding(f"table {table}"):
                        self._row(table, self.view.cipher.loaded(table, row))
                    if done % ROWS_AT_ONCE == 0:
                        self.progress("rows", done, max(done, total))
        for s, members in self._members.items():
            gone = [n for n in members if n not in self.found.rows or self.found.rows[n].s != s]
            if gone:
                self.problem(f"segment {s}", f"the rows of {len(gone)} checkpoint(s) in it are missing")
        self.report.checked["rows"] = done
        self.progress("rows", done, done)

    def _row(self, table: str, values: tuple[Any, ...]) -> None:
        if table == "node":
            _, name, data = values
            raw = uncompressed(data, NODE_MAX_BYTES)
            if node_digest(raw) != name:
                short = name.hex()[:16]
                raise Damaged(f"node {short} is not what was written", what=(f"node {short}",))
            self.report.checked["nodes"] += 1
            self.report.checked["bytes"] += len(raw)
        elif table == "pack":
            self._packs.append(values[1])
        elif table == "chunk":
            self.report.checked["chunks"] += 1
            self.report.checked["bytes"] += values[3]
        elif table == "segment":
            self._members[values[0]] = members_of(values[1])
        self.found.take(table, values)

    def packs(self) -> None:
        for done, pack in enumerate(self._packs, 1):
            with self.finding("packs", packs=1):
                for flaw in self.contents.packs.check(self.view, pack).values():
                    self.problem(", ".join(flaw.what), flaw.message)
            self.progress("packs", done, len(self._packs))

    # -- histories ------------------------------------------------------------------------------------------

    def histories(self, agents: Sequence[str]) -> None:
        found = self.found
        found.log.sort()
        told, refs = Told(found.log), found.refs()
        proof = Histories(self.contents, found, Lines(found.records))
        with self.finding("table store"):
            proof.lost = metadata.lost(self.view)
        for a, (name, _) in told.agents.items():
            if a not in found.agents:
                self.problem("table agent", f"the row of agent {name!r} is missing", name)
        for b, made in told.branches.items():
            if made.a in found.agents and b not in found.branches:
                self.problem(f"branch {made.name}", "its row is missing", found.agents[made.a].name)
        chosen = [agent for agent in sorted(found.agents.values()) if not agents or agent.name in agents]
        seen = {agent.a: found.reached(refs[agent.a]) for agent in chosen}
        for agent in chosen:
            todo, done = len(seen[agent.a] - proof.done), len(proof.done)

            def step(name: str = agent.name, todo: int = todo, done: int = done) -> None:
                self.progress(f"checkpoints of {name}", len(proof.done) - done, todo)

            proof.prove(seen[agent.a], step)
        ids = proof.ids()
        for agent in chosen:
            self._agent(agent, proof, seen[agent.a], ids)
            self._names(agent, proof, told, refs[agent.a])
        self._lines(proof)
        counts = self.report.checked
        counts["agents"], counts["checkpoints"], counts["operations"] = len(chosen), len(proof.done), proof.operations
        if proof.lost:
            counts["lost_metadata_records"] = len(proof.lost)

    def _agent(self, agent: Agent, proof: Histories, numbers: set[int], known: Mapping[int, bytes]) -> None:
        """Say what was found wrong with the checkpoints that an agent reaches."""
        name = agent.name
        resting: list[str] = []
        for n in sorted(numbers):
            ids = [known[n].hex()] if known.get(n) else []
            flaw = proof.bad.get(n)
            if flaw is not None and not flaw.what:
                resting += ids
            elif flaw is not None:
                self.problem(flaw.what, flaw.detail, name, ids)
            for text in proof.odd.get(n, ()):
                self.problem(f"checkpoint {proof.short(n)}", text, name, ids)
            if n in proof.away:
                self.unreachable(proof.away[n], ids)
        if resting:
            detail = f"{len(resting)} later checkpoint(s) rest on ones that cannot be proven"
            self.problem("history", detail, name, resting)

    def _names(self, agent: Agent, proof: Histories, told: Told, refs: Refs) -> None:
        """Branches, tags and judgements are those that the log tells of."""
        name = agent.name
        if agent.a not in told.agents:
            self.problem(f"agent {name}", "the log does not tell of it", name)
        for id in self.found.astray(refs):
            self.problem(f"checkpoint {id.hex()[:12]}", "it is missing, and was not forgotten", name, [id.hex()])
        for branch in refs.branches:
            self._branch(branch, name, proof, told)
        for tag in refs.tags:
            if tag.n in proof.known and proof.known[tag.n].id != tag.id:
                self.problem(f"tag {tag.name}", "it does not lead to the checkpoint it names", name)
        if {tag.name: tag.id for tag in refs.tags} != {name: id for name, id in told.tags[agent.a].items() if id}:
            self.problem("table tag", "tags are missing or were moved behind the history's back", name)
        for id, said in told.validity[agent.a].items():
            n = self.found.find(id)
            judged = self.found.validity.get((agent.a, n), {}).get("validity", "good")
            if n and judged != said.get("validity"):
                detail = f"checkpoint {id.hex()[:12]}: what was said of it is missing, or is not what was said"
                self.problem("table validity", detail, name, [id.hex()])

    def _branch(self, branch: Branch, agent: str, proof: Histories, told: Told) -> None:
        """A branch stands where the log says that its epoch began, or on the newest that was made there since."""
        found, what = self.found, f"branch {branch.name}"
        made = told.branches.get(branch.b)
        if made is None or (made.a, made.uuid) != (branch.a, branch.uuid):
            self.problem(what, "the log does not tell of it", agent)
            return
        n = found.tip(branch.b, made.epoch, proof.depth)
        id = proof.known[n].id if n in proof.known else b"" if n else made.to
        if not told.whole(branch.b):
            self.problem(what, "entries of its moves are missing in the log", agent)
        if branch.epoch != made.epoch:
            self.problem(what, "it was moved without an entry in the log, or is older than that", agent)
        elif branch.id != id or branch.head != (n or found.find(id)):
            self.problem(what, "its head is not where its history left it", agent)
        elif branch.head and branch.depth != proof.depth(branch.head):
            self.problem(what, "its head is not as deep as it says", agent)
        if branch.generation < told.generations.get(branch.b, 0):
            self.problem(what, "it is older than its last writer", agent)

    def _lines(self, proof: Histories) -> None:
        """Each branch's records lead to what it says of them, and none that was written on it is left out."""
        found, lines = self.found, proof.lines
        written: dict[int, int] = defaultdict(int)
        for record in found.records.values():
            written[record.b] += 1
        reached: set[int] = set()
        for branch in found.branches.values():
            what = f"line of {branch.name}"
            name = found.agents[branch.a].name if branch.a in found.agents else ""
            end = lines.end(branch.line)
            if end is None:
                self.problem(what, lines.break_below(branch.line), name)
            elif end != branch.end:
                self.problem(what, "its records do not lead to what it says of them", name)
            left, r = written[branch.b], branch.line
            while r in found.records and (left or r not in reached):
                left -= found.records[r].b == branch.b
                reached.add(r)
                r = found.records[r].prev
            if left and end is not None:
                self.problem(what, f"{left} record(s) written on it are not part of it", name)
        self._values(reached)

    def _values(self, records: set[int]) -> None:
        """The long values of records are there, down to their last node."""
        state = history.state_of(self.contents, None)
        known: set[bytes] = set()
        for done, r in enumerate(records, 1):
            for root in self.found.records[r].refs:
                if root not in known:
                    known.add(root)
                    with self.finding(f"record {r}"):
                        history.read_tree(state, root)
            self.progress("effects", done, len(records))
        self.report.checked["effects"] = len(records)
        hollow = len(records & self.found.hollow)
        if hollow:
            self.report.checked["lost_effects"] = hollow  # a repair said so
