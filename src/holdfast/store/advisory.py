"""Who may write a branch of a store on a server: advisory locks, confirmed leases, and what is known of former holders.

Owns table ``lease`` and the connection whose locks these are. Knows of other tables only a branch's generation. What
always holds: a lock is a courtesy and a sign of life, the generation is the proof. A lease is *fresh* for ``lease_s``
after a moment at which the server still had its generation, by a clock of the holder that nobody sets. So when a
generation has risen, whoever held the one before has a fresh lease for no longer than that; who cannot reach the
server, was stopped, or has vanished, has none at all. Others may pass over a holder whose row was not renewed in time,
though its lock is there. That a holder has ended is believed only where the machine says so, the same for both.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from holdfast.errors import Fenced, HoldfastError, StoreBusy, Unavailable
from holdfast.store import engine as interfaces
from holdfast.store.cipher import PLAIN, Cipher
from holdfast.store.connection import Link, Seat, Statement
from holdfast.store.engine import Row
from holdfast.store.leases import busy, describe_self, had, once
from holdfast.store.postgres import CLOCK, KEY
from holdfast.store.processes import apart, has_ended, identity

if TYPE_CHECKING:
    from holdfast.store.postgres import Postgres

POLL_MAX_S = 0.25
"""How often a waiting opener asks the server whether a branch is free, after a while."""

END_S = 0.5
"""How long a program that ends waits for whoever is just asking the server about leases."""

BEATS = 3
"""How often a lease is confirmed before it would run out."""

PASSED_OVER = 2
"""After so many times ``lease_s`` without a beat others may take a branch: long after its lease has run out."""

SLACK = 1.2
"""How much longer than a former holder's lease others wait: clocks do not run alike, and threads do not start at once.
"""

_LOCKED = (
    f"SELECT {KEY} FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_LIVING = f"{_LOCKED} AND {KEY} NOT IN (SELECT key FROM lease WHERE until < {CLOCK})"
_LOCK = (
    "WITH got AS MATERIALIZED (SELECT pg_try_advisory_lock(?) AS ok)"
    f" INSERT INTO lease (key, b, generation, until, body) SELECT ?, ?, ?, {CLOCK} + ?, ? FROM got WHERE ok"
    " ON CONFLICT ON CONSTRAINT lease_pkey DO UPDATE SET until = excluded.until, body = excluded.body"
    " RETURNING xmax <> 0"  # whether the row was there
)
_CONFIRM = (
    f"UPDATE lease SET until = {CLOCK} + ? WHERE key = ANY(string_to_array(?, ',')::bigint[]) AND (b = 0 OR EXISTS"
    " (SELECT 1 FROM branch WHERE branch.b = lease.b AND branch.generation = lease.generation)) RETURNING key"
)


def elapsed_s() -> float:
    """A clock that nobody sets, and that counts while the machine is asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


# -- leases --------------------------------------------------------------------------------------------------------


def _nothing() -> None:
    """A reference to nothing."""


class AdvisoryLease:
    """The lock of one generation of a branch. If its connection is lost, it is taken again on the next one."""

    unclean = False  # whoever had the branch before has left its row: its process was killed, or failed

    def __init__(
        self, leases: AdvisoryLeases, branch: bytes, b: int, generation: int, who: Mapping[str, object]
    ) -> None:
        self.branch = branch
        self.b = b
        self.generation = generation
        self.who = who
        self.key = leases.key(branch, generation)
        self.until_s = 0.0  # by elapsed_s(): when it is no longer fresh
        self.held = False
        self._leases = leases

    @property
    def fresh(self) -> bool:
        """Whether the server has confirmed it lately: until then nobody else believes that we have ended."""
        return elapsed_s() < self.until_s

    def confirm(self) -> None:
        """Return when it is fresh; raises ``Fenced`` if somebody else is the writer by now."""
        if not self.fresh:
            apart(lambda: self._leases.confirm(self))

    def rest(self) -> None:
        """Nothing of it is worth keeping."""
        self.release()

    def release(self) -> None:
        """Give the branch back. Can be repeated."""
        self.held, self.until_s = False, 0.0
        with suppress(HoldfastError):  # then the connection is gone, and the lock with it
            apart(lambda: self._leases.free(self))


class AdvisoryLeases:
    """Leases are advisory locks of one connection, each with a row of table ``lease``: whose it is, and until when.

    A row without its lock says only that its holder did not end well. Behind a pooler that gives each transaction
    another session, locks are found free that are not, and nobody is told that a branch is busy; its generation still
    lets only one write.
    """

    def __init__(self, engine: Postgres, cipher: Cipher = PLAIN) -> None:
        self._engine = engine
        self._cipher = cipher
        self._lease_s = engine.lease_s
        self._seat = Seat()
        # The keys on the connection, which would get them a second time. One whose lease is gone was cut off by an
        # interrupt from who should have had it.
        self._locked: dict[int, weakref.ref[AdvisoryLease]] = {}
        self._held: dict[int, weakref.ref[AdvisoryLease]] = {}  # what is to be confirmed, locked at this moment or not
        self._closing = threading.Event()
        self._beating = False

    @property
    def said(self) -> Mapping[str, object]:
        """What a holder says about itself for good, in the log: who it is, and how long its leases count (in µs)."""
        return {"holder": [*identity(), round(self._lease_s * 1e6)]}

    def key(self, branch: bytes, generation: int) -> int:
        return self._engine.key(branch + generation.to_bytes(8, "big"))

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
    ) -> AdvisoryLease:
        about = {**describe_self(), **who}

        def attempt() -> AdvisoryLease | None:
            generation = read()
            left = False
            with ExitStack() as held, ExitStack() as undo:
                if generation and not takeover:
                    current = self._lock(branch, b, generation, about, over=True)
                    left = current is None or current.unclean
                    if current is not None:  # else its holder was not heard of in time
                        held.callback(current.release)
                # The next generation's lock comes before its number: whoever sees the number finds it locked.
                lease = self._taken(branch, b, generation + 1, about)
                undo.callback(lease.release)
                since_s = elapsed_s()
                if not rise(generation):
                    return None
                self._keep(lease, since_s)
                undo.pop_all()
            lease.unclean = left
            return lease

        lease = had(lambda: once(attempt), wait_s, POLL_MAX_S)
        if lease is None:
            raise StoreBusy("other processes kept taking this branch", hint="Try again.")
        return lease

    def again(self, lease: interfaces.Lease, read: Callable[[], int]) -> AdvisoryLease | None:
        if not isinstance(lease, AdvisoryLease):
            raise TypeError("a lease of another kind of store")

        def attempt() -> AdvisoryLease | None:
            with ExitStack() as undo:
                taken = self._taken(lease.branch, lease.b, lease.generation, {**lease.who, **describe_self()})
                undo.callback(taken.release)
                since_s = elapsed_s()
                if read() != lease.generation:
                    return None
                self._keep(taken, since_s)
                undo.pop_all()
            return taken

        return once(attempt)

    def alive(self, branch: bytes, generation: int) -> bool:
        return bool(self._engine.run(f"{_LIVING} AND {KEY} = ?", (self.key(branch, generation),)))

    def living(self, some: Collection[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
        living = {key for (key,) in self._engine.run(_LIVING)} if some else set()
        return {one for one in some if self.key(*one) in living}

    def holders(self) -> list[dict[str, object]]:
        rows = self._engine.run(f"SELECT key, body FROM lease WHERE key IN ({_LIVING})")
        return [holder for row in rows if (holder := self._described(row))]

    def outlives_s(self, branch: bytes, generation: int, said: Mapping[str, object]) -> float | None:  # noqa: ARG002
        """How long the holder of a generation that has passed may still begin calls; 0: it has ended.

        None: nobody knows. ``said`` is what it said about itself in the log.
        """
        holder = said.get("holder")
        if not isinstance(holder, list) or len(holder) != 4 or not isinstance(holder[3], int):
            return None
        return 0.0 if has_ended(holder) else holder[3] / 1e6 * SLACK

    def _described(self, row: Row) -> dict[str, object]:
        """What a holder wrote about itself; empty when it cannot be read."""
        try:
            found = json.loads(self._cipher.unbox("lease", row[0], row[1]))
        except (ValueError, HoldfastError):
            return {}
        return found if isinstance(found, dict) else {}

    # -- locks ----------------------------------------------------------------------------------------------

    def _taken(self, branch: bytes, b: int, generation: int, who: Mapping[str, object]) -> AdvisoryLease:
        """Lock a generation of a branch and say who has it; raises ``AgentBusy``."""
        lease = self._lock(branch, b, generation, who)
        if lease is None:
            raise busy({})
        return lease

    def _lock(
        self, branch: bytes, b: int, generation: int, who: Mapping[str, object], *, over: bool = False
    ) -> AdvisoryLease | None:
        """As _taken(). None where it is to be passed ``over`` that somebody has it who was not heard of in time."""
        lease = AdvisoryLease(self, branch, b, generation, who)
        with self._seat.lock:
            link = self._seat.ready(self._connect)
            for left in [one for one, owner in self._locked.items() if owner() is None]:
                self._unlock(link, left)
            if lease.key not in self._locked and self._try(link, lease):
                return lease
            sql = f"SELECT key, body, until < {CLOCK} FROM lease WHERE key = ?"
            rows = self._ask(link, (sql, (lease.key,)))
        if over and rows and rows[0][2]:
            return None
        raise busy(self._described(rows[0]) if rows else {})

    def _try(self, link: Link, lease: AdvisoryLease) -> bool:
        """Lock it, and write its row."""
        key = lease.key
        body = self._cipher.box("lease", key, json.dumps(dict(lease.who), default=str).encode())
        self._locked[key] = weakref.ref(lease)  # first: if the answer is an error, it may be locked all the same
        rows = self._ask(link, (_LOCK, (key, key, lease.b, lease.generation, self._late_us, body)))
        if rows:
            ((lease.unclean,),) = rows
            return True
        del self._locked[key]
        return False

    def free(self, lease: AdvisoryLease) -> None:
        with self._seat.lock:
            if self._held.get(lease.key, _nothing)() is lease:
                del self._held[lease.key]
            if self._locked.get(lease.key, _nothing)() is lease and self._seat.link is not None:
                self._unlock(self._seat.link, lease.key)

    def _unlock(self, link: Link, key: int) -> None:
        del self._locked[key]
        self._ask(link, ("DELETE FROM lease WHERE key = ?", (key,)), ("SELECT pg_advisory_unlock(?)", (key,)))

    def _connect(self) -> Link:
        self._locked.clear()
        return self._engine.connect()

    def _ask(self, link: Link, *statements: Statement) -> list[Row]:
        with self._engine.explained("asking for a lease"):
            return link.ask(*self._engine.owner, *((self._engine.translated(sql), args) for sql, args in statements))

    # -- the beat -------------------------------------------------------------------------------------------

    @property
    def _late_us(self) -> int:
        return round(PASSED_OVER * self._lease_s * 1e6)

    def _keep(self, lease: AdvisoryLease, since_s: float) -> None:
        """It is ours: it was at a moment after ``since_s``. From now on it is confirmed again and again."""
        with self._seat.lock:
            lease.held, lease.until_s = True, since_s + self._lease_s
            self._held[lease.key] = weakref.ref(lease)
            if not self._beating:
                self._beating = True
                args = weakref.ref(self), self._closing, self._lease_s / BEATS
                threading.Thread(target=_beat, args=args, name="holdfast-beat", daemon=True).start()

    def confirm(self, lease: AdvisoryLease) -> None:
        """Confirm a lease at once, and all others with it."""
        with self._seat.lock:
            if lease.held and not lease.fresh:  # somebody else may have done it meanwhile
                self._confirm_all()
            if not lease.fresh:
                with suppress(Unavailable), self._engine.explained("asking for a lease"):
                    self._engine.compare(self._seat.ready(self._connect))  # raises where the store has gone back
        if not lease.fresh:
            raise Fenced(
                "the lease of this branch could not be confirmed: another process may be its writer by now, so"
                " nothing was called",
                hint="Whoever opened the branch since goes on with it.",
            )

    def beat(self) -> bool:
        """Confirm what is held. False when there is nothing."""
        with self._seat.lock:
            self._beating = not self._closing.is_set() and any(one() is not None for one in self._held.values())
            if self._beating:
                with suppress(HoldfastError):  # it will be tried again; meanwhile leases run out
                    self._confirm_all()
            return self._beating

    def _confirm_all(self) -> None:
        leases = {key: lease for key, one in self._held.items() if (lease := one()) is not None}
        self._held = {key: self._held[key] for key in leases}
        link = self._seat.ready(self._connect)
        for key, lease in leases.items():
            if key not in self._locked:  # the connection that it was taken on is lost
                self._try(link, lease)
        since_s = elapsed_s()
        confirmed = {key for (key,) in self._ask(link, (_CONFIRM, (self._late_us, ",".join(map(str, leases)))))}
        for key, lease in leases.items():
            if key in confirmed:
                lease.until_s = since_s + self._lease_s
            else:
                self._look_after(link, lease)

    def _look_after(self, link: Link, lease: AdvisoryLease) -> None:
        """One that was not confirmed: somebody else is the writer now, or has its lock and may become it."""
        since_s = elapsed_s()
        rows = self._ask(link, ("SELECT generation FROM branch WHERE b = ?", (lease.b,)))
        if rows == [(lease.generation,)]:  # without a lock the row may be missing, which is no more than a courtesy
            lease.until_s = since_s + self._lease_s
            return
        lease.held, lease.until_s = False, 0.0
        self._held.pop(lease.key, None)
        if lease.key in self._locked:
            self._unlock(link, lease.key)

    # -- its end, and forks ---------------------------------------------------------------------------------

    def abandon(self) -> None:
        """After a fork, in the child: the engine lets go of the connection, and the beat is the parent's."""
        self._seat, self._locked, self._held = Seat(), {}, {}
        self._closing, self._beating = threading.Event(), False

    def end_well(self) -> None:
        """Nobody waits for the answer of a server at the end. It does what it is told before it frees the locks."""
        self._closing.set()
        if not self._seat.lock.acquire(timeout=END_S):
            return
        try:
            keys, link = ",".join(map(str, self._locked)), self._seat.link
            if keys and link is not None and link.fit:
                sql = "DELETE FROM lease WHERE key = ANY(string_to_array(?, ',')::bigint[])"
                with self._engine.explained("giving leases back"):
                    link.tell(*self._engine.owner, (self._engine.translated(sql), (keys,)))
        finally:
            self._seat.lock.release()

    def close(self) -> None:
        self._closing.set()
        with self._seat.lock:
            self._held.clear()
            self._seat.empty()


def _beat(leases: weakref.ref[AdvisoryLeases], closing: threading.Event, pause_s: float) -> None:
    """Confirm leases until nothing is held. It does not keep alive what nobody uses."""
    while not closing.wait(pause_s):
        there = leases()
        if there is None or not there.beat():
            return
        del there
