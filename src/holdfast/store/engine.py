"""What a store stands on: three small interfaces, each with two implementations.

``Engine`` keeps rows (sqlite.py, postgres.py), ``Leases`` say who may write a branch (leases.py, postgres.py),
``Objects`` keep whole files (objects.py). What always holds: when ``transaction`` or ``direct`` returns, what was
written is durable; when they raise ``Refused`` or anything else but ``Unsure``, nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from holdfast.errors import Contention, StorePoisoned, Unavailable
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

    def erasing(self) -> None:
        """What is deleted from here on is not to be found in the engine's own files, if it has any."""


class Engine(Protocol):
    """Keeps rows. ``transaction`` is called by writers' threads only, where no signal handler runs."""

    dialect: Dialect
    place: str  # for messages; without passwords
    writers: int  # how many threads may be in ``transaction`` at once
    busy: bool  # whether a writer has something to do: then ``direct`` hands over
    poison: StorePoisoned | None  # why nothing is written any more

    def run(self, sql: str, args: Args = ()) -> list[Row]: ...

    def moment(self) -> AbstractContextManager[Reader]:
        """One snapshot, on a connection of its own. While it is open no pack is deleted that it can see."""

    def transaction(self, work: Callable[[Tx], T], begun: Callable[[], None] | None = None) -> T:
        """Do ``work`` whole or not at all. ``begun`` is called when nobody else can write any more."""

    def check_place(self) -> None:
        """Raise unless what is written now can be found again by whoever opens the store."""

    def handles(self) -> Callable[[], int] | None:
        """What gives handles that nobody else is given; None where those of a call have to be guessed."""

    def direct(self, statements: Sequence[str], args: Sequence[Args]) -> bool:
        """A whole transaction in one call from any thread; False: not done, hand it over.

        What comes out of it other than a result says nothing: ask the store.
        """

    def acknowledge(self, b: int, generation: int, head: int) -> None:
        """Somebody is being told that a branch stands there: a store that knows less, later, has gone back."""

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


class Lease(Protocol):
    """The right to write one branch, until it is released, its process ends, or somebody takes it over."""

    b: int
    generation: int

    @property
    def held(self) -> bool: ...
    def release(self) -> None: ...


class Leases(Protocol):
    """Who may write a branch. A lease is a courtesy and a sign of life; the generation in the branch is the proof."""

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
        """One that was released, taken up again; None when somebody else has had the branch since."""

    def alive(self, branch: bytes, generation: int) -> bool: ...
    def holders(self) -> list[dict[str, object]]: ...
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
