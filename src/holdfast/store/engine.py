"""What a store stands on: three small interfaces, each with two implementations.

``Engine`` keeps rows (sqlite.py, postgres.py), ``Leases`` say who may write a branch (leases.py, advisory.py),
``Objects`` keep whole files (objects.py). What always holds: when ``transaction`` or ``direct`` returns, what was
written is durable; when they raise ``Refused`` or anything else but ``Unsure``, nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from holdfast.errors import Contention, StoreBusy, StorePoisoned, StoreWentBack, Unavailable
from holdfast.store.tables import Dialect

T = TypeVar("T")
Row = tuple[Any, ...]
Args = Sequence[Any]


class Refused(Contention):
    """A comparison did not hold: what is there is not what the writer believes. Nothing was written."""

    kind = "refused"


class Unsure(Unavailable):
    """Whether the last change is there is not known: the connection broke while it was being committed. Ask."""

    kind = "unsure"


class Again(StoreBusy):
    """A transaction lost against another one. Nothing was written, and it may be made once more."""


class Escaped(Exception):
    """User code has ended the transaction that it was to share: what it wrote may be there without its record."""


class Reader(Protocol):
    """Reads rows: of the store as it is now, of one moment, or inside a transaction. Statements have ``?``."""

    def run(self, sql: str, args: Args = ()) -> list[Row]: ...


class Tx(Reader, Protocol):
    """A transaction. ``do`` and ``many`` want no rows, so that an engine may send them together with others."""

    def do(self, sql: str, args: Args = ()) -> None: ...
    def many(self, sql: str, args: Sequence[Args]) -> None: ...

    def number(self, *tables: str) -> int:
        """A fresh handle for a row, in tables that share their numbers."""

    def naming(self) -> None:
        """From here to the end nobody sweeps: what is found to be there, and is named, stays."""

    def alone(self, name: bytes) -> None:
        """From here to the end nobody else is in a transaction that has asked for the same."""

    def clock(self) -> int:
        """Microseconds since 1970, UTC, as the database has it: one clock for all who use the store."""

    def erasing(self) -> None:
        """What is deleted from here on is not to be found in the engine's own files, if it has any."""


class Shared(Protocol):
    """A transaction in which user code writes, and then its record is written (sharing.py)."""

    @property
    def connection(self) -> Any:
        """What user code writes with."""

    def check(self) -> None: ...
    def commit(self, work: Callable[[Tx], T]) -> T: ...
    def abandon(self, error: BaseException) -> bool: ...


class Engine(Protocol):
    """Keeps rows. ``transaction`` is called by writers' threads only, where no signal handler runs."""

    dialect: Dialect
    place: str  # for messages; without passwords
    writers: int  # how many threads may be in ``transaction`` at once
    busy: bool  # whether a writer has something to do: then ``direct`` hands over
    poison: StorePoisoned | None  # why nothing is written any more

    def run(self, sql: str, args: Args = ()) -> list[Row]: ...

    def stamp(self) -> int | None:
        """Another number after each commit of anybody; None where only reading tells. Costs microseconds."""

    def moment(self) -> AbstractContextManager[Reader]:
        """One snapshot, on a connection of its own. While it is open no pack is deleted that it can see."""

    def transaction(self, work: Callable[[Tx], T], begun: Callable[[], None] | None = None) -> T:
        """Do ``work`` whole or not at all. ``begun`` is called when nobody else can write any more."""

    def share(self, *, later: bool) -> Shared:
        """Begin a transaction for user code; ``later``: for async code. Raises where the engine has none."""

    def clock(self) -> int:
        """As in a transaction."""

    def identity(self) -> bytes:
        """What a copy of the store's files or tables does not have in common with them; empty where nobody can tell."""

    def check_place(self) -> None:
        """Raise unless what is written now can be found again by whoever opens the store."""

    def handles(self) -> Callable[[], int] | None:
        """What gives handles that nobody else is given; None where those of a call have to be guessed."""

    def direct(self, statements: Sequence[str], args: Sequence[Args]) -> bool:
        """A whole transaction in one call from any thread; False: not done, hand it over.

        What comes out of it other than a result says nothing: ask the store.
        """

    def acknowledge(self, moved: Mapping[int, tuple[int, int]]) -> None:
        """Somebody is being told that branches stand there: a store that knows less, later, has gone back.

        Of each its generation and its head.
        """

    def sweeping(self) -> AbstractContextManager[bool]:
        """True: nobody seals or has a moment open meanwhile, so that objects which nothing names may go."""

    def sizes(self) -> dict[str, int]: ...
    def check(self) -> list[str]: ...
    def reclaim(self, *, log: bool) -> bool:
        """Give some unused room back to the disk, at last that of the log; whether there is more.

        Called by a writer's thread.
        """

    def rest(self, deadline: float) -> bool: ...
    def resume(self) -> None: ...
    def abandon(self, rested: bool) -> None: ...
    def close(self) -> None: ...


def check_poison(engine: Engine) -> None:
    """Raise if nothing is written any more. A new error each time: one that is kept would collect tracebacks."""
    if (poison := engine.poison) is not None:
        raise StorePoisoned(poison.message, hint=poison.hint)


def went_back(where: str) -> StoreWentBack:
    """What is said of an open store that lacks what was acknowledged through it."""
    return StoreWentBack(
        f"{where} has gone back: it has lost what it had acknowledged; nothing was written",
        lost="the newest checkpoints",
        hint="A backup was put back, or on a server a replica that lagged behind was promoted. Close the store and open"
        " it again to go on with what is there.",
    )


class Lease(Protocol):
    """The right to write one branch, until it is released, its process ends, or somebody takes it over."""

    b: int
    generation: int
    unclean: bool
    """Whether whoever had the branch before has not given it back, as far as that can be told."""

    @property
    def held(self) -> bool: ...

    @property
    def fresh(self) -> bool:
        """Whether what changes something outside may be called: nobody who passed us over goes by its absence yet."""

    def confirm(self) -> None:
        """Return when it is fresh; raises where it is not ours any more, or nobody can tell."""

    def rest(self) -> None:
        """As release(), for whoever will take it up again soon."""

    def release(self) -> None: ...


class Leases(Protocol):
    """Who may write a branch. A lease is a courtesy and a sign of life; the generation in the branch is the proof.

    ``said`` is what a holder says about itself in the log, as it becomes the writer.
    """

    @property
    def said(self) -> Mapping[str, object]: ...

    def take(
        self,
        branch: bytes,
        read: Callable[[], int],
        rise: Callable[[int], bool],
        who: Mapping[str, object],
        *,
        b: int,
        wait_s: float,
        takeover: bool,
    ) -> Lease:
        """Become the writer of the branch with that uuid; raises ``AgentBusy``.

        ``read()`` gives its generation; ``rise(g)`` commits generation g + 1 and says whether it was still g.
        """

    def again(self, lease: Lease, read: Callable[[], int]) -> Lease | None:
        """One that was released, or rests, taken up again; None when somebody else has had the branch since."""

    def alive(self, branch: bytes, generation: int) -> bool: ...
    def living(self, some: Collection[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
        """Which of these generations of branches somebody holds."""

    def outlives_s(self, branch: bytes, generation: int, said: Mapping[str, object]) -> float | None:
        """How long the holder of a generation that has passed may still begin calls; 0: it has ended.

        None: nobody knows. ``said`` is what it said about itself in the log.
        """

    def holders(self) -> list[dict[str, object]]: ...
    def end_well(self) -> None:
        """The program ends, and nothing failed: whoever takes a branch next is not to think so. Locks stay."""

    def abandon(self) -> None: ...
    def close(self) -> None: ...


class Objects(Protocol):
    """Whole, immutable files. ``put`` is durable when it returns, and ``names`` is the truth about what is there."""

    place: str

    def prepare(self) -> None:
        """Make the place, if there is none yet. Not for one that has files: it may only not be mounted."""

    def require(self) -> None:
        """Raise ``ColdPlaceMissing`` unless it is there, as it was made."""

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> int: ...
    def read(self, name: str, start: int, length: int) -> bytes: ...
    def size(self, name: str) -> int | None: ...
    def delete(self, name: str) -> None: ...
    def names(self) -> Iterator[tuple[str, float]]:
        """Each name with its age in seconds."""
