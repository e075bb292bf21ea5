"""Queues: how many runs that were handed over may be executed at a time, and begun within a time, over all workers.

Owns what programs declare, what a store remembers of it, and the claims by which a worker may begin a run. Must not
know how a run goes. What always holds: a claim is made in one transaction, with the database's clock, in which nobody
else claims in the same queue; it counts claims, and never keeps a counter; a claim counts as long as its holder has the
branch (lease and generation) that it was made for, so that nobody has to give one back; for a rate, a claim counts
from when it is made until the time has passed since the function was entered, or since its holder was found gone; the
store's numbers count, whatever a program declares.

    queue("mail", concurrency=4, rate=(10, 60))    declare one
    declare(db, *queues)                           let a store know them; raises where it knows other numbers
    Turns(db)                                      which runs a worker may begin now
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from msgspec import Struct
from msgspec.structs import asdict, replace

from holdfast.errors import AgentBusy, BadOption, Damaged, QueueDiffers, command
from holdfast.store.catalog import View, slices
from holdfast.store.changes import Change, now_us
from holdfast.store.database import Database
from holdfast.store.rows import Open, body_bytes, malformed, read_body

if TYPE_CHECKING:
    from holdfast.run.records import Begin

log = logging.getLogger("holdfast.run")

DEFAULT = "default"
"""Where runs wait whose function names no queue. It has no limits unless somebody declares it."""

FACT = "queues"
"""What a store remembers: a map of names to numbers."""

NAME_MAX, PARTITION_MAX = 100, 200
CONCURRENCY_MAX = 10_000
RATE_MAX, PERIOD_MAX_S = 10_000, 31 * 86_400.0
"""A claim is kept as long as it counts: this bounds how many there are."""

PRIORITY_MAX = 500
FRESH = 2**52
"""More than any time in microseconds for a century. Below it, turns are those of runs that were begun before."""

PAGE = 64
"""Runs of a queue that are looked at at once: a few more than most workers can begin."""

LANES = 16
"""Queues and partitions that take turns with each other: of very many, all of them would be read before any begins."""

ROOM_S = 0.1
"""How often a worker looks whether others have left room in a queue that was full."""

ENTERING = 2**61
"""When a run began that was claimed, and of which nobody has said yet that its function was entered."""

ENTERED_S = 0.1
"""How long after that this is said: by then it has been, however busy the machine is with other threads."""

RATE_WAIT_S = 1.0
"""How long a worker believes that the rate leaves no room: somebody may change it."""

DUE_NOW = 1
"""``due`` of a run that waits for nothing but its turn, and of one that is executed."""

TURN_MAX = 2**62
_WOKEN = "due > ? AND due <= ? ORDER BY due"
_NEXT = "due = ? AND (turn, b) > (?, ?) AND turn < ? ORDER BY turn, b LIMIT ?"


class Queue(Struct, frozen=True):
    """What is declared about a queue; None is no limit. A rate is how many runs may begin within how many seconds."""

    name: str
    concurrency: int | None = None
    rate: tuple[int, float] | None = None
    partition_concurrency: int | None = None
    partition_rate: tuple[int, float] | None = None

    @property
    def limited(self) -> bool:
        """Whether it has any limit."""
        limits = (self.concurrency, self.rate, self.partition_concurrency, self.partition_rate)
        return any(one is not None for one in limits)

    @property
    def period_us(self) -> int:
        """For how long a start counts."""
        return max((_us(rate) for rate in (self.rate, self.partition_rate) if rate is not None), default=0)

    def __str__(self) -> str:
        return ", ".join(_said(self)) or "no limits"


class Limits(TypedDict, total=False):
    """The same numbers, as far as they are given. None lifts a limit."""

    concurrency: int | None
    rate: tuple[int, float] | None
    partition_concurrency: int | None
    partition_rate: tuple[int, float] | None


def _us(rate: tuple[int, float]) -> int:
    return round(rate[1] * 1e6)


def _said(queue: Queue) -> Iterator[str]:
    for value, rate, where in (
        (queue.concurrency, queue.rate, ""),
        (queue.partition_concurrency, queue.partition_rate, " in each partition"),
    ):
        if value is not None:
            yield f"{value} at a time{where}"
        if rate is not None:
            yield f"{rate[0]} within {rate[1]:g} s{where}"


QUEUES: dict[str, Queue] = {}
"""What this program declares, by name."""


def queue(
    name: str,
    *,
    concurrency: int | None = None,
    rate: tuple[int, float] | None = None,
    partition_concurrency: int | None = None,
    partition_rate: tuple[int, float] | None = None,
) -> Queue:
    """Declare a queue for ``@holdfast.durable(queue=...)``: how much of what is submitted is executed at a time.

    ``concurrency``: so many of its runs at once, over all workers. ``rate=(10, 60)``: at most 10 begin within 60
    seconds. ``partition_concurrency`` and ``partition_rate`` limit those of each
    ``.options(partition=...)`` besides. Declaring it again with other numbers raises.
    """
    made = checked(Queue(name, concurrency, rate, partition_concurrency, partition_rate))
    known = QUEUES.setdefault(name, made)
    if known != made:
        raise BadOption(f"the queue {name!r} was declared with {known}, and now with {made}", hint="Declare it once.")
    return made


def checked(queue: Queue) -> Queue:
    """The same queue, if it can be one."""
    check_text("a queue's name", queue.name, NAME_MAX)
    for count in (queue.concurrency, queue.partition_concurrency):
        if count is not None and (type(count) is not int or not 0 < count <= CONCURRENCY_MAX):
            raise BadOption(f"a concurrency of {count!r:.60}", hint=f"Use a number from 1 to {CONCURRENCY_MAX:,}.")
    for rate in (queue.rate, queue.partition_rate):
        if rate is not None and not _is_rate(rate):
            raise BadOption(
                f"a rate of {rate!r:.60}",
                hint=f"Say how many and within how many seconds: rate=(10, 60). At most {RATE_MAX:,} within 31 days.",
            )
    return queue


def _is_rate(rate: Any) -> bool:
    if type(rate) not in {tuple, list} or len(rate) != 2 or type(rate[0]) is not int:
        return False
    seconds = rate[1]
    return 0 < rate[0] <= RATE_MAX and type(seconds) in {int, float} and 1e-3 <= seconds <= PERIOD_MAX_S


def check_text(what: str, text: Any, most: int) -> None:
    """Raise unless it can stand in a row: some text, without a zero, that UTF-8 can have."""
    good = type(text) is str and 0 < len(text) <= most and "\0" not in text
    try:
        good = good and bool(text.encode())
    except UnicodeEncodeError:
        good = False
    if not good:
        raise BadOption(f"{what} is a text of 1 to {most} characters, not {text!r:.60}")


def name_of(queue: Queue | str | None) -> str:
    """The name in ``@holdfast.durable(queue=...)``; empty where there is none."""
    name = queue.name if isinstance(queue, Queue) else queue
    if name is not None:
        check_text("a queue's name", name, NAME_MAX)
    return name or ""


# -- what is known of a run's place --------------------------------------------------------------------------


def place(begin: Begin, queue: str, partition: str | None, priority: int) -> None:
    """Say in the record of a run that is handed over where it waits for its turn."""
    if type(priority) is not int or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise BadOption(f"a priority of {priority!r:.60}", hint=f"Use a number from {-PRIORITY_MAX} to {PRIORITY_MAX}.")
    if partition is not None:
        check_text("a partition", partition, PARTITION_MAX)
    begin.queue, begin.part, begin.priority = queue, partition or "", priority


def lane_of(begin: Begin) -> bytes:
    """Queue and partition of a run, as rows have them; empty where it waits in none."""
    return "\0".join(filter(None, (begin.queue, begin.part))).encode() if begin.queue else b""


def turn_of(begin: Begin) -> int:
    """Its place there, the lowest first: runs that were begun before, then by priority, then by age."""
    return (PRIORITY_MAX + 1 - begin.priority) * FRESH + begin.at % FRESH if begin.queue else 0


def resumed(row: Open) -> Open:
    """A run's row after it was resumed: it has had its turn."""
    return row._replace(turn=row.turn % FRESH)


class Lane(NamedTuple):
    """A queue, or one partition of it."""

    queue: str
    part: str

    @classmethod
    def of(cls, row: bytes) -> Lane:
        name, _, part = row.decode("utf-8", "replace").partition("\0")
        return cls(name, part)


def ahead(view: View, row: Open) -> int:
    """How many runs that have not ended and do not wait for anything else stand before one in its queue."""
    sql = "SELECT count(*) FROM open WHERE queue = ? AND due = ? AND (turn, b) < (?, ?)"
    return int(view.reader.run(sql, (view.cipher.name("open", row.queue), DUE_NOW, row.turn, row.b))[0][0])


# -- what a store remembers ---------------------------------------------------------------------------------


def remembered(view: View) -> dict[str, Queue]:
    """The queues that a store knows, by name."""
    found = view.rows("store", "WHERE name = ?", (FACT,))
    body = read_body(found[0][1], FACT) if found else {}
    try:
        return {name: checked(Queue(name, *(_pair(value) for value in numbers))) for name, numbers in body.items()}
    except (TypeError, BadOption) as error:
        raise malformed("table store, row queues") from error


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def remember(change: Change, queues: Iterable[Queue]) -> None:
    """Let the store know these, whatever it knew of them."""
    known = remembered(change) | {one.name: one for one in queues}
    body = {name: list(asdict(one).values())[1:] for name, one in known.items()}
    change.set_fact(FACT, body_bytes(body))


def declare(db: Database, *queues: Queue) -> None:
    """Let a store know what a program declares. Where it knows other numbers, these count, and this raises."""

    def missing(view: View) -> list[Queue]:
        known = remembered(view)
        for one in queues:
            if one.name in known and known[one.name] != one:
                raise differs(one, known[one.name])
        return [one for one in queues if one.name not in known]

    def put(change: Change) -> None:
        change.tx.alone(FACT.encode())
        remember(change, missing(change))

    if missing(db.view):
        db.change(put)


def change(db: Database, name: str, limits: Limits) -> None:
    """Let other numbers count from now on. Those that are not given stay."""
    checked(replace(Queue(name), **limits))

    def put(change: Change) -> None:
        change.tx.alone(FACT.encode())
        remember(change, [replace(remembered(change).get(name, Queue(name)), **limits)])

    db.change(put)


def differs(declared: Queue, known: Queue) -> QueueDiffers:
    words = [
        f"--{name.replace('_', '-')}={_word(value)}"
        for name, value in asdict(declared).items()
        if name != "name" and value != getattr(known, name)
    ]
    return QueueDiffers(
        f"this program declares the queue {declared.name!r} with {declared}; the store has it with {known}",
        queue=declared.name,
        hint="The store's numbers count for all workers. Declare these, or change them for all: "
        f"`{command('queues', 'set', declared.name, *words)}`.",
    )


def _word(limit: int | tuple[int, float] | None) -> str:
    """A limit as the command line takes it."""
    if limit is None:
        return "none"
    return str(limit) if isinstance(limit, int) else f"{limit[0]}/{limit[1]:g}"


def check_declared(db: Database, name: str) -> None:
    """Before a run is handed over: somebody has declared its queue, and the store knows it from now on."""
    if name == DEFAULT and name not in QUEUES:
        return
    if name in remembered(db.view):  # its numbers are the workers' business
        return
    if name not in QUEUES:
        raise BadOption(
            f"nobody has declared the queue {name!r}; nothing was submitted",
            hint=f"Declare it where its functions are: holdfast.queue({name!r}, concurrency=4).",
        )
    declare(db, QUEUES[name])


class QueueInfo(Queue, frozen=True):
    """A queue: its limits, how many of its runs are executed now, and how many could be if it were their turn."""

    running: int = 0
    waiting: int = 0

    @property
    def limits(self) -> str:
        """The limits in words."""
        return str(self)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return asdict(self)


def infos(db: Database) -> list[QueueInfo]:
    """The queues that a store knows, and those that runs are in, by name."""
    view = db.view
    sql = "SELECT o.queue, x.uuid, x.generation FROM open o JOIN branch x ON x.b = o.b WHERE o.queue > ? AND o.due <= ?"
    rows = view.reader.run(sql, (b"", now_us()))
    alive = db.leases.living({(uuid, generation) for _, uuid, generation in rows})
    names = {row[0]: Lane.of(view.cipher.unname("open", row[0])).queue for row in rows}
    running = Counter(names[lane] for lane, *held in rows if tuple(held) in alive)
    every = Counter(names[lane] for lane, *_ in rows)
    known = {Lane.of(one).queue: Queue(Lane.of(one).queue) for one in view.queues()} | remembered(view)
    return [
        QueueInfo(**asdict(one), running=running[name], waiting=every[name] - running[name])
        for name, one in sorted(known.items())
    ]


# -- claims -------------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """How many more runs may begin, and how many be resumed. Where none may begin: from when on, if that is known."""

    fresh: float = math.inf
    begun: float = math.inf
    until_us: int = 0


_LIVING = (
    "SELECT c.b, c.run, c.part, c.generation, c.first, x.uuid, x.generation FROM claim c"
    " JOIN branch x ON x.b = c.b WHERE c.queue = ? AND c.generation > 0"
)
_ANY = Room()
_STARTED = "FROM claim WHERE queue = ? AND first > ?"
Living = Callable[[Collection[tuple[bytes, int]]], Collection[tuple[bytes, int]]]


class Claims:
    """The claims of a queue, as a view has them. No sum is looked at: a claim that is damaged stops nobody."""

    def __init__(self, view: View, queue: Queue, living: Living, now: int, own: int = 0) -> None:
        """``own`` is a branch that the caller has, so that nobody else is at work there."""
        self._view, self.queue, self.now = view, queue, now
        self._name = view.cipher.name("claim", queue.name.encode())
        rows = view.reader.run(_LIVING, (self._name,))
        current = [row for row in rows if row[3] == row[6] and row[0] != own]  # its branch still has that generation
        alive = living({(row[5], row[3]) for row in current})
        self._living = [row for row in current if (row[5], row[3]) in alive]
        self._gone = [row for row in rows if row not in self._living]

    def room(self, part: str, coming: Sequence[str] = ()) -> Room:
        """How many more there may be: in the whole queue, and in a partition. ``coming``: the partitions of others."""
        queue, mine = self.queue, self._stored(part)
        begun = math.inf
        if queue.concurrency is not None:
            begun = queue.concurrency - len(self._living) - len(coming)
        if part and queue.partition_concurrency is not None:
            mates = sum(row[2] == mine for row in self._living) + coming.count(part)
            begun = min(begun, queue.partition_concurrency - mates)
        fresh, until = begun, 0
        for rate, where, args, more in (
            (queue.rate, "", (), len(coming)),
            (queue.partition_rate if part else None, " AND part = ?", (mine,), coming.count(part)),
        ):
            if rate is None or begun <= 0:
                continue
            given = (self._name, self.now - _us(rate), *args)
            left = rate[0] - self._view.reader.run(f"SELECT count(*) {_STARTED}{where}", given)[0][0]
            if left <= 0:  # when the oldest of those that fill it does not count any more
                sql = f"SELECT first {_STARTED}{where} ORDER BY first DESC LIMIT 1 OFFSET {rate[0] - 1}"
                last = self._view.reader.run(sql, given)[0][0]
                until = max(until, last + _us(rate) if last != ENTERING else 0)
            fresh = min(fresh, left - more)
        return Room(max(0, fresh), max(0, begun), until)

    def put(self, change: Change, b: int, run: bytes, part: str, generation: int, *, fresh: bool) -> None:
        """Claim."""
        before = change.tx.run("SELECT first FROM claim WHERE b = ? AND run = ?", self._key(b, run))
        self._drop(change, b, run)
        first = (ENTERING if self.queue.period_us else self.now) if fresh else before[0][0] if before else 0
        change.put("claim", b, run, self.queue.name.encode(), part.encode(), generation, first)

    def forget(self, change: Change, b: int, run: bytes) -> None:
        """It was claimed, and has never begun: that did not count."""
        self._drop(change, b, run)
        self._gone = [row for row in self._gone if (row[0], row[1]) != self._key(b, run)]

    def sweep(self, change: Change) -> None:
        """Forget what does not count any more. A start in the future is one of now: the clock was set back."""
        since = self.now - self.queue.period_us
        sql = "SELECT b, run, part, generation, first FROM claim WHERE queue = ? AND first > ? AND first < ?"
        late = change.tx.run(sql, (self._name, self.now, ENTERING))
        gone = {tuple(row[:5]) for row in self._gone if row[4] != ENTERING or not self._is_next(row[0], row[1])}
        for b, run, part, generation, first in gone | set(map(tuple, late)):
            change.tx.do("DELETE FROM claim WHERE b = ? AND run = ?", (b, run))
            ended = (b, run, part, generation, first) in gone
            if not ended or first > since:
                texts = (self._text(one) for one in (run, self._name, part))
                change.put("claim", b, *texts, 0 if ended else generation, min(first, self.now))
        change.tx.do("DELETE FROM claim WHERE queue = ? AND generation = 0 AND first <= ?", (self._name, since))

    @property
    def left(self) -> bool:
        """Whether somebody has gone without saying that what he had claimed was entered."""
        return any(row[4] == ENTERING and not self._is_next(row[0], row[1]) for row in self._gone)

    def entered(self, change: Change, b: int, run: bytes) -> None:
        """Its function was entered: from now on it counts as long as any start does."""
        found = change.tx.run("SELECT part, generation, first FROM claim WHERE b = ? AND run = ?", self._key(b, run))
        if found and found[0][2] == ENTERING:
            self._drop(change, b, run)
            change.put("claim", b, run, self.queue.name.encode(), self._text(found[0][0]), found[0][1], self.now)

    def _is_next(self, b: int, run: bytes) -> bool:
        """Whether somebody is about to go on with a run whose worker is gone: then it has not begun for the last time.

        It keeps its place among those that begin, as it does not wait for one.
        """
        named = b, self._view.cipher.name("open", self._text(run)), self.now
        sql = "SELECT b FROM open WHERE b = ? AND run = ? AND length(signal) = 0 AND due <= ?"
        return bool(self._view.reader.run(sql, named))

    def _drop(self, change: Change, b: int, run: bytes) -> None:
        change.tx.do("DELETE FROM claim WHERE b = ? AND run = ?", self._key(b, run))

    def _key(self, b: int, run: bytes) -> tuple[int, bytes]:
        return b, self._view.cipher.name("claim", run)

    def _stored(self, part: str) -> bytes:
        return self._view.cipher.name("claim", part.encode()) if part else b""

    def _text(self, stored: bytes) -> bytes:
        return self._view.cipher.unname("claim", stored) if stored else b""


class Claim:
    """Claims a place for one run; raises ``AgentBusy`` where there is none. Used as ``with claim.alone:``."""

    def __init__(self, b: int, run: bytes, lane: Lane, living: Living, lock: threading.Lock | None) -> None:
        self._b, self._run, self._lane, self._living = b, run, lane, living
        self._limited = lock is not None
        # Of two claims in one transaction, each could wait for one of another process.
        self.alone: AbstractContextManager[Any] = lock if lock is not None else nullcontext()

    def __call__(self, change: Change, generation: int) -> None:
        if not self._limited:
            return
        name, part = self._lane
        change.tx.alone(b"queue " + name.encode())
        queue = remembered(change).get(name, Queue(name))
        # Whether this begins it is read here: others may have executed it since it was found.
        named = self._b, change.cipher.name("open", self._run)
        turns = change.tx.run("SELECT turn FROM open WHERE b = ? AND run = ? AND length(signal) = 0", named)
        if not turns:
            raise AgentBusy("the run has ended", hint="Look again.")
        fresh = turns[0][0] >= FRESH
        claims = Claims(change, queue, self._living, change.tx.clock(), self._b)
        if fresh:
            claims.forget(change, self._b, self._run)
        claims.sweep(change)
        room = claims.room(part)
        if (room.fresh if fresh else room.begun) <= 0:
            raise AgentBusy(f"the queue {name!r} has no room", hint="Wait for the turn of the run.")
        claims.put(change, self._b, self._run, part, generation, fresh=fresh)


def _say_entered(some: Iterable[tuple[int, bytes]], change: Change, claims: Claims) -> None:
    for b, run in some:
        claims.entered(change, b, run)


class Turns:
    """Which runs a worker may begin now, and its claims. Used by the thread that looks, and by those that execute."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._state = threading.Lock()
        self._claiming = threading.Lock()  # of two in one transaction, each could wait for another process
        self._known: dict[str, Queue] | None = None  # as of the last look
        self._begun: dict[int, Lane] = {}  # runs that are about to be claimed, by branch
        self._claims: dict[str, tuple[Claims, float]] = {}  # of queues, and until when they are believed
        self._rooms: dict[bytes, tuple[Room, float]] = {}  # the same of lanes that are full
        self._entered: dict[tuple[int, bytes], tuple[str, float]] = {}  # runs whose functions were, and since when
        self._unknown: set[str] = set()

    def check(self) -> None:
        """Let the store know what this program declares; raises where it knows other numbers."""
        declare(self._db, *QUEUES.values())

    def pages(self, view: View, at_us: int, damaged: list[Damaged], *, full: bool = False) -> Iterator[list[Open]]:
        """Rows of runs in queues that have room, in their order, the queues by turns; with ``full`` in all queues.

        Those whose time has come are before all others. Damaged rows are passed over, and told in ``damaged``.
        """
        from random import randrange  # slow to load, and only workers need it

        lanes = view.queues(damaged)
        self._known = remembered(view) if lanes else None
        first = randrange(len(lanes) or 1)  # noqa: S311 - so that of many, each is the first one some time
        some = slices([*lanes[first:], *lanes[:first]], LANES)
        return chain.from_iterable(self._pages(view, part, at_us, damaged, full=full) for part in some)

    def _pages(
        self, view: View, lanes: Sequence[bytes], at_us: int, damaged: list[Damaged], *, full: bool
    ) -> Iterator[list[Open]]:
        places: dict[bytes, tuple[int, int] | None] = dict.fromkeys(lanes)
        while places:
            pages: list[list[Open]] = []
            for lane, after in list(places.items()):
                room = _ANY if full else self._room(lane)
                if room.begun <= 0:
                    del places[lane]
                elif after is None:
                    pages.append(view.opened_in(lane, _WOKEN, DUE_NOW, at_us, damaged=damaged))
                    places[lane] = 0, 0
                else:
                    below, passed = TURN_MAX if room.fresh > 0 else FRESH, len(damaged)
                    rows = view.opened_in(lane, _NEXT, DUE_NOW, *after, below, PAGE, damaged=damaged)
                    pages.append(rows)
                    if rows and len(rows) + len(damaged) - passed == PAGE:
                        places[lane] = rows[-1].turn, rows[-1].b
                    else:
                        del places[lane]
            yield [row for row in chain.from_iterable(zip_longest(*pages)) if row is not None]

    def begin(self, b: int, lane: bytes, turn: int) -> bool:
        """Whether a run may be begun. If so it is about to be claimed, until ``done``."""
        if not lane:
            return True
        room = self._room(lane)
        if (room.fresh if turn >= FRESH else room.begun) <= 0:
            return False
        with self._state:
            self._begun[b] = Lane.of(lane)
        return True

    def claim(self, b: int, run: bytes, lane: bytes) -> Claim:
        """What claims a place for a run, in the transaction in which this worker takes its branch."""
        where = Lane.of(lane)
        queue = self._queue(where.queue) if lane else None
        limited = queue is not None and queue.limited
        return Claim(b, run, where, self._db.leases.living, self._claiming if limited else None)

    def claimed(self, b: int) -> None:
        """It was."""
        with self._state:
            lane = self._begun.pop(b, None)
            if lane is not None:
                self._claims.pop(lane.queue, None)

    def enter(self, b: int, run: bytes, lane: bytes) -> None:
        """Its function is entered at this moment."""
        name = Lane.of(lane).queue
        queue = self._queue(name) if lane else None
        if queue is not None and queue.period_us:
            with self._state:
                self._entered[b, run] = name, time.monotonic() + ENTERED_S

    def say_entered(self) -> None:
        """Let the store know which functions were entered. For whoever looks for work, all the time."""
        now_s = time.monotonic()
        with self._state:
            some = {one: name for one, (name, at_s) in self._entered.items() if at_s <= now_s}
        if not some:
            return
        known = remembered(self._db.view)
        for name in set(some.values()):
            mine = [one for one, its in some.items() if its == name]
            self._change(known.get(name, Queue(name)), partial(_say_entered, mine))
        with self._state:
            self._entered = {one: its for one, its in self._entered.items() if one not in some}
            for name in some.values():
                self._claims.pop(name, None)

    def _change(self, queue: Queue, work: Callable[[Change, Claims], None]) -> None:
        """Change the claims of a queue, alone."""

        def do(change: Change) -> None:
            change.tx.alone(b"queue " + queue.name.encode())
            work(change, Claims(change, queue, self._db.leases.living, change.tx.clock()))

        with self._claiming:
            self._db.change(do)

    def done(self, b: int, lane: bytes) -> None:
        """A run is not executed any more: there may be room for another one."""
        if lane:
            with self._state:
                self._entered = {
                    one: (name, 0.0 if one[0] == b else at_s) for one, (name, at_s) in self._entered.items()
                }
                self._begun.pop(b, None)
                queue = Lane.of(lane).queue
                self._claims.pop(queue, None)
                self._rooms = {one: room for one, room in self._rooms.items() if Lane.of(one).queue != queue}

    def _room(self, lane: bytes) -> Room:
        """What room there is, as far as can be told without claiming."""
        where, now_s = Lane.of(lane), time.monotonic()
        queue = self._queue(where.queue)
        if queue is None or not queue.limited:
            return _ANY if queue is not None or where.queue == DEFAULT else self._left_alone(where.queue)
        with self._state:
            room, until_s = self._rooms.get(lane, (_ANY, 0.0))
            claims, believed_s = self._claims.get(where.queue, (None, 0.0))
            coming = [one.part for one in self._begun.values() if one.queue == where.queue]
        if until_s > now_s:
            return room
        living = self._db.leases.living
        if claims is None or believed_s <= now_s or claims.queue != queue:
            claims, believed_s = Claims(self._db.view, queue, living, self._db.engine.clock()), now_s + ROOM_S
        room = claims.room(where.part, coming)
        left_us = room.until_us - claims.now
        # The clock was set back, or somebody is gone.
        if left_us > queue.period_us or (room.fresh <= 0 and claims.left):
            self._change(queue, lambda change, claims: claims.sweep(change))
        with self._state:
            self._claims[where.queue] = claims, believed_s
            if room.fresh <= 0:
                wait_s = min(RATE_WAIT_S, left_us / 1e6) if room.begun > 0 and left_us > 0 else ROOM_S
                self._rooms[lane] = room, now_s + wait_s
        return room

    def _queue(self, name: str) -> Queue | None:
        known = self._known
        if known is None:
            known = self._known = remembered(self._db.view)
        return known.get(name)

    def _left_alone(self, queue: str) -> Room:
        if queue not in self._unknown:
            self._unknown.add(queue)
            log.warning(
                "nobody has declared the queue %r: its runs are left alone until somebody does, here or with `%s`",
                queue, command("queues", "set", queue),
            )  # fmt: skip
        return Room(0, 0)
