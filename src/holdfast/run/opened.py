"""The table of open runs: what its rows say, how records change them, and which runs somebody should look at.

A run that has not ended has one row, from the record with which it began, or was resumed, on its branch. A signal has
one, too, from when it was sent until it is taken, dropped, or of no use; and so have a write outside of runs, from its
intent until it is known what became of it, and a rollback. Owns the step from a record to the rows after
it, and the same from a whole line. Must not know who executes runs. What always holds: the rows of a run are written by
the writer of its branch, in the transaction of the record that changes them, and a signal's by whoever sends it, in the
transaction of the signal: neither writes over what the other says, so that no signal is missed whenever it comes; what
the rows say, the lines and the log say, too, and execution goes by these alone.

    follow(record)                       what a record changes in the rows, for the writer of its branch
    rows_of(view, branch, log)           the rows that a branch should have
    candidates(view, at_us)              rows of runs that may be due then, by branch
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.agent import opened as below
from holdfast.errors import CorruptValue, Damaged
from holdfast.run import queues
from holdfast.run import records as rec
from holdfast.run.past import OPEN, ROLLED_BACK, Past, RunPast, filled
from holdfast.run.records import STOP, Record, decode_record
from holdfast.store.catalog import View, slices
from holdfast.store.changes import UNCHANGED, Opens
from holdfast.store.rows import Branch, Entry, Open
from holdfast.store.rows import Record as Stored

if TYPE_CHECKING:
    from holdfast.run.waiting import Signal

NOW, NEVER = 1, 2**61
"""``due`` of what can be looked at at once, and of what waits for a signal without a limit."""
ATTENTION, UNSETTLED = NEVER + 1, NEVER + 2
"""``due`` of a run that needs attention, and of an effect outside of runs whose outcome is not known."""

PAGE = 64
"""Branches whose rows are read at once: a few more than most workers can go on with."""

REFUSING = frozenset({"finished", "cancelled", ROLLED_BACK})
"""Runs that take no signal any more. One that failed can be executed again, and may."""

GOING_BACK = Open(0, b"", b"\0rollback", ATTENTION, {"name": "", "begun": 0})
"""The row of a rollback that has not ended. No signal's id begins so."""

Rows = Mapping[bytes, Open]
Wait = tuple[str, str, int]


def key(id: str) -> bytes:
    """A run's id, as rows have it."""
    return id.encode("utf-8", "surrogatepass")


def id_of(row: Open) -> str:
    """The id of the run that a row is about."""
    return row.run.decode("utf-8", "surrogatepass")


# -- one record ---------------------------------------------------------------------------------------------------


def follow(record: Record) -> Callable[[Rows, int], Opens] | None:
    """What a record changes, as a function of the rows before it and its number; None: nothing."""
    made = _FOLLOWS.get(type(record))
    if made is None or (isinstance(record, rec.Done) and not record.event and (record.run or not record.of)):
        return None
    if isinstance(record, rec.Intent) and not _is_tracked(record):
        return None
    return partial(made, record)


def _begun(record: rec.Begin, _rows: Rows, number: int) -> Opens:
    if record.kind == "rollback":
        return Opens((), [GOING_BACK])
    return Opens([(key(record.run), None)], [_row(record, number, "")])  # signals to one of that id before are over


def _resumed(record: rec.Note, rows: Rows, _number: int) -> Opens:
    return _changed(rows, record.run, "", had_turn=True) if record.what == "resume" else UNCHANGED


def _waits(record: rec.Wait, rows: Rows, _number: int) -> Opens:
    """Another flow of it may have put the run off just before."""
    row = rows.get(key(record.run))
    return _changed(rows, record.run, "") if row is not None and row.body["status"] else UNCHANGED


def _ended(record: rec.End, rows: Rows, _number: int) -> Opens:
    if record.how in OPEN:
        return _changed(rows, record.run, record.how, record.waits)
    if key(record.run) not in rows:
        return Opens([(key(record.run), None if record.how in REFUSING else b""), (b"", GOING_BACK.signal)])
    return Opens([(key(record.run), None if record.how in REFUSING else b"")])


def _intended(_record: rec.Intent, _rows: Rows, number: int) -> Opens:
    return Opens((), [_effect(number)])


def _doubted(record: rec.Doubt, _rows: Rows, _number: int) -> Opens:
    return Opens((), [_effect(record.of)]) if not record.run else UNCHANGED


def _decided(record: rec.Decision, rows: Rows, _number: int) -> Opens:
    row, settled = rows.get(key(record.run)), (b"", _effect(record.of).signal)
    if row is None or row.body["status"] != "attention":
        return Opens([settled])
    return Opens([settled, (row.run, b"")], [row._replace(due=NOW)])


def _done(record: rec.Done, _rows: Rows, _number: int) -> Opens:
    taken = [(None, record.event)] if record.event and isinstance(record.event, bytes) else []
    settled = [(b"", _effect(record.of).signal)] if record.of and not record.run else []
    return Opens([*taken, *settled])


def _rolled_back(_record: rec.RolledBack, _rows: Rows, _number: int) -> Opens:
    """Every run that was open is rolled back. What that means for signals takes the whole line to know."""
    return Opens([(None, b"")])


_FOLLOWS: dict[type[Record], Callable[[Any, Rows, int], Opens]] = {
    rec.Begin: _begun, rec.Note: _resumed, rec.Wait: _waits, rec.End: _ended, rec.Decision: _decided, rec.Done: _done,
    rec.RolledBack: _rolled_back, rec.Intent: _intended, rec.Doubt: _doubted,
}  # fmt: skip


def _changed(rows: Rows, run: str, status: str, waits: Sequence[Wait] = (), *, had_turn: bool = False) -> Opens:
    """The row of a run with another status. What has none is of no concern here: nobody has begun it on this branch."""
    row = rows.get(key(run))
    if row is None:
        return UNCHANGED
    body = {**row.body, "status": status, "waits": [list(wait) for wait in waits]}
    changed = (queues.resumed(row) if had_turn else row)._replace(due=_due(status, waits), body=body)
    return Opens([(row.run, b"")], [changed]) if changed != row else UNCHANGED


def _row(begin: rec.Begin, number: int, status: str, waits: Sequence[Wait] = ()) -> Open:
    body = {
        "function": begin.function, "code": begin.code, "kind": begin.kind, "status": status, "number": number,
        "waits": [list(wait) for wait in waits],
    }  # fmt: skip
    return Open(0, key(begin.run), b"", _due(status, waits), body, queues.lane_of(begin), queues.turn_of(begin))


def _is_tracked(record: rec.Intent) -> bool:
    """Whether a call has a row of its own: a write outside of runs. In a run, the run's row says where to look."""
    return not record.run and record.kind == "write"


def _effect(number: int) -> Open:
    """The row of an effect by the number of its intent."""
    return Open(0, b"", b"\0%d" % number, UNSETTLED, {"name": "", "begun": number})


def _due(status: str, waits: Sequence[Wait]) -> int:
    """What is being executed, or was interrupted, can be looked at now; so can what waits for a child."""
    if status == "attention":
        return ATTENTION
    if not waits or any(what == "child" for what, _, _ in waits):
        return NOW
    return max(NOW, min((until for _, _, until in waits if until), default=NEVER))


def sent(body: Mapping[str, Any]) -> Opens:
    """What the body of an entry that is a signal adds."""
    about = {"name": body["name"], "begun": body.get("begun", 0)}
    return Opens((), [Open(0, key(body.get("run", "")), body["id"], NOW, about)])


def dropped(signal: Signal) -> Opens:
    return Opens([(None, signal.id)])


# -- a whole line -------------------------------------------------------------------------------------------------


def decoded(found: Sequence[Stored], b: int) -> Iterator[tuple[int, Record]]:
    """Records with their numbers, those that are lost filled in."""
    there = ((one.i, decode(one, b)) for one in found if one.body)
    if all(one.body for one in found):
        return there
    return filled(dict(there), [one.i for one in found if not one.body], b)


def decode(stored: Stored, b: int) -> Record:
    """One record of the line of a branch."""
    try:
        return decode_record(stored.body, let_go=stored.let_go)
    except CorruptValue as error:
        raise CorruptValue(error.message, what=(f"effect {b}/{stored.i}",)) from error


def rows_of(view: View, branch: Branch, log: Sequence[Entry], *more: Record) -> list[Open]:
    """The rows that a branch should have; ``log`` is its agent's, and ``more`` are records still to be written."""
    from holdfast.run.waiting import sorted_entries  # which needs lines

    known, gone = sorted_entries((entry.at, entry.body) for entry in log)
    mine = [one for one in known if one.branch in {None, branch.uuid} and one.id not in gone]
    if not mine and not more and not below.is_own(view, branch):
        return []
    found = view.line(branch.line)
    records = list(decoded(found, branch.b))
    records += enumerate(more, branch.records + 1)
    past = Past(records)
    start = below.since(branch, found)
    own, decided, resumed = _own(records, start)
    rows = [
        _of_run(run, decided=decided[run.id] > run.ended, resumed=run.id in resumed)
        for run in past.runs.values()
        if run.id in own and run.begin.kind != "rollback" and run.status in OPEN
    ]
    back = (run for run in past.runs.values() if run.begin.kind == "rollback" and run.status in OPEN)
    rows += [GOING_BACK] if any(run.number > start for run in back) else []
    rows += [_effect(number) for number in _unsettled(records, start)]
    for one in mine:
        if one.id not in past.taken and not is_over(one, past):
            whose: dict[str, Any] = {"run": one.run, "begun": one.begun} if one.run else {}
            rows += sent({"name": one.name, "id": one.id, **whose}).put
    return [row._replace(b=branch.b) for row in rows]


def is_over(signal: Signal, past: Past) -> bool:
    """Whether a signal is for a run that takes none any more."""
    run = past.runs.get(signal.run)
    return bool(signal.run) and (run is None or run.number != signal.begun or run.status in REFUSING)


def _own(records: Iterable[tuple[int, Record]], start: int) -> tuple[set[str], Mapping[str, int], set[str]]:
    """The runs that were begun or resumed after a record, where each was decided about, and all that were resumed."""
    own: set[str] = set()
    resumed: set[str] = set()
    decided: dict[str, int] = defaultdict(int)
    for number, record in records:
        if isinstance(record, rec.Begin):
            (own.add if number > start else own.discard)(record.run)
            resumed.discard(record.run)
        elif isinstance(record, rec.Note) and record.what == "resume":
            resumed.add(record.run)
            if number > start:
                own.add(record.run)
        elif isinstance(record, rec.Decision):
            decided[record.run] = number
    return own, decided, resumed


def _unsettled(records: Iterable[tuple[int, Record]], start: int) -> set[int]:
    """The numbers of intents of writes outside of runs, after a record, whose outcome is not known."""
    found: set[int] = set()
    for number, record in records:
        if number <= start:
            continue
        if isinstance(record, rec.Intent) and _is_tracked(record):
            found.add(number)
        elif isinstance(record, rec.Doubt) and not record.run:
            found.add(record.of)
        elif isinstance(record, rec.Decision) or (isinstance(record, rec.Done) and not record.run):
            found.discard(record.of)
    return found


def _of_run(run: RunPast, *, decided: bool, resumed: bool) -> Open:
    row = _row(run.begin, run.number, run.status, run.end.waits if run.end is not None else ())
    row = queues.resumed(row) if resumed else row
    return row._replace(due=NOW) if decided and run.status == "attention" else row


# -- what is due --------------------------------------------------------------------------------------------------


def candidates(
    view: View,
    at_us: int,
    held: Callable[[Branch], bool] = lambda _: False,
    damaged: list[Damaged] | None = None,
    *,
    queued: bool = True,
) -> Iterator[tuple[int, list[Open]]]:
    """The rows of runs that wait for what may have come, by branch. Whether it has, their lines tell.

    Read as far as somebody asks for more. Without ``queued``, those that wait in a queue are among them only where a
    signal has woken them. ``held`` answers whether somebody writes a branch: what goes on there, goes on without a
    parent that waits for it. Damaged rows are passed over and told in ``damaged``, if that is given.
    """
    places: set[int] = set()
    for lane in (b"", *(view.queues(damaged) if queued else ())):  # one by one: the table has an index by these
        name = view.cipher.name("open", lane) if lane else lane
        places |= view.open_branches("queue = ? AND due <= ?", name, at_us)
    for part in slices(sorted(places), PAGE):
        rows: dict[int, list[Open]] = defaultdict(list)
        for row in view.opened_on(part, damaged):
            rows[row.b].append(row)
        for b, some in rows.items():
            woken = _woken(some)
            chosen = some if queued else [row for row in some if not row.queue or row in woken]
            if found := come(view, chosen, at_us, held, damaged, woken):
                yield b, found


def come(
    view: View,
    rows: Iterable[Open],
    at_us: int,
    held: Callable[[Branch], bool],
    damaged: list[Damaged] | None = None,
    woken: Sequence[Open] = (),
) -> list[Open]:
    """Those of some rows that are of runs which may go on; ``woken``: a signal has come for these."""

    def is_due(row: Open, woken: Sequence[Open]) -> bool:
        waits = row.body["waits"]
        if row in woken or (row.due <= at_us and (not waits or any(0 < until <= at_us for _, _, until in waits))):
            return True
        if row.due > at_us:
            return False
        branch = view.branch_at(row.b)
        return any(what == "child" and moves(branch, name) for what, name, _ in waits)

    def moves(parent: Branch, name: str) -> bool:
        """Whether a child that was waited for has ended, was interrupted, or can go on."""
        agent = view.agent(name)
        child = view.branch(agent.a, parent.name) if agent is not None else None
        if child is None:
            return True  # removed: the parent has to be told
        if held(child):
            return False
        every = view.opened(child.b, damaged)
        its, stirred = [row for row in every if not row.signal], _woken(every)
        return not its or any(row.body["status"] != "waiting" or is_due(row, stirred) for row in its)

    found = []
    for row in rows:
        try:
            if not row.signal and row.body["kind"] != "map" and is_due(row, woken):
                found.append(row)
        except Damaged as error:  # the row of a branch, or of an agent
            if damaged is None:
                raise
            damaged.append(error)
    return found


def _woken(rows: Sequence[Open]) -> list[Open]:
    """Of the rows of a branch, those of runs for which a signal has come."""
    signals = [row for row in rows if row.signal]
    return [row for row in rows if not row.signal and any(_wakes(one, row) for one in signals)] if signals else []


def _wakes(signal: Open, row: Open) -> bool:
    """Whether a run waits for this signal, or is told by it to stop. One that needs attention waits for a decision."""
    if row.body["status"] == "attention":
        return False
    if signal.run and (signal.run, signal.body["begun"]) != (row.run, row.body["number"]):
        return False
    wanted = signal.body["name"]
    return wanted == STOP or any(what == "signal" and name == wanted for what, name, _ in row.body["waits"])
