"""A transaction that code of the user shares with a record: both are committed, or neither is.

Owns the connection as user code has it, and what is asked of the server before its part of the transaction counts.
Knows no table. What always holds: without the record nothing is committed, unless the code said COMMIT in SQL, which is
noticed (``Escaped``); user code has the settings of its database and role, the record those of the store; from the end
of its part on, and when it is given up, nothing more is sent through the connection that user code had; what it left
in the session is gone before the next one has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never, TypeVar

import psycopg
from psycopg import errors as said_by_server

from holdfast.errors import BadOption, StoreClosed
from holdfast.store.connection import Link, Said, Statement
from holdfast.store.engine import Escaped, Tx

if TYPE_CHECKING:
    from holdfast.store.postgres import Postgres

T = TypeVar("T")

PASSING = frozenset({"40001", "40P01", "26000"})
"""What the server says to a transaction that it ended in favour of another; and that a pooler forgot statements."""

_MARK = "holdfast.shared"
_CHECK = (("SET CONSTRAINTS ALL IMMEDIATE", ()), (f"SELECT current_setting('{_MARK}', true)", ()))


# As DISCARD ALL, but the statements that the store has prepared stay; if there are others the session is not kept.
_TIDY: list[Statement] = [
    (sql, ())
    for sql in (
        "SET SESSION AUTHORIZATION DEFAULT", "RESET ALL", "CLOSE ALL", "UNLISTEN *", "SELECT pg_advisory_unlock_all()",
        "DISCARD TEMP", "DISCARD SEQUENCES",
    )
]  # fmt: skip
_LEFT: Statement = ("SELECT count(*) FROM pg_prepared_statements WHERE from_sql", ())


def _refusal(what: str) -> BadOption:
    return BadOption(
        f"{what}: the transaction of a tool is committed with its record, or rolled back when the tool raises",
        hint="For a part that may fail alone, use `with connection.transaction():`, which makes a savepoint.",
    )


class _Lent:
    """What tools do not get of a connection: where its transaction ends is not theirs to say."""

    over = False

    def commit(self) -> Never:
        raise _refusal("commit()")

    def rollback(self) -> Never:
        raise _refusal("rollback()")

    def close(self) -> Never:
        raise _refusal("close()")

    def __del__(self, _warn: object = None, /) -> None:
        """The session is not its own."""

    def _require_lent(self) -> None:
        if self.over:
            raise StoreClosed(
                "the transaction of this connection has ended",
                hint="Use effect().connection only while its tool runs.",
            )


class Lent(_Lent, psycopg.Connection[Any]):
    """The connection as a plain tool has it."""

    def wait(self, *args: Any, **options: Any) -> Any:
        self._require_lent()
        return super().wait(*args, **options)


class LentLater(_Lent, psycopg.AsyncConnection[Any]):
    """The connection as an async tool has it."""

    async def wait(self, *args: Any, **options: Any) -> Any:
        self._require_lent()
        return await super().wait(*args, **options)


class SharedTransaction:
    """A transaction that has begun. It ends by ``commit`` or by ``abandon``; one of them has to be called."""

    def __init__(self, engine: Postgres, link: Link, settings: dict[str, str], *, later: bool) -> None:
        self._engine, self._link = engine, link
        self._ended = False
        # Statements that read nothing: the code may still choose another isolation level.
        own = [(f"SET LOCAL {name} TO DEFAULT", ()) for name in settings]
        link.ask(("BEGIN ISOLATION LEVEL READ COMMITTED", ()), *own, (f"SET LOCAL {_MARK} TO 'yes'", ()))
        self.connection: Lent | LentLater = link.lend(LentLater) if later else link.lend(Lent)
        self.connection.prepare_threshold = None  # what it prepared would be discarded

    def check(self) -> None:
        """The code has done its part: raise what its constraints say, ``Escaped`` if it has ended the transaction."""
        self.connection.over = True
        try:
            if not self._link.take_back():
                if self.connection.closed:
                    raise Said("", "the connection was lost")
                raise _refusal("something is still going on on the connection (a pipeline, a copy, a thread)")
            ((mark,),) = self._link.ask(*_CHECK)
        except Said as said:
            if not said.state:
                raise psycopg.OperationalError(said.text) from None
            raise said_by_server.lookup(said.state)(said.text) from None
        if mark != "yes":
            raise Escaped("it ended the transaction itself, so what it wrote may be committed without its record")

    def commit(self, work: Callable[[Tx], T]) -> T:
        """Do ``work``, which writes the record, and commit all of it. As ``Engine.transaction``."""
        try:
            with self._engine.explained("writing"):
                return self._engine.finish(self._link, work)
        finally:
            self._end()

    def abandon(self, error: BaseException) -> bool:
        """The code has failed: roll back. Whether that may be different when it is called again at once.

        Nothing if it has ended.
        """
        if self._ended:
            return False
        self.connection.over = True
        states = {getattr(one, "sqlstate", None) for one in (error, error.__cause__)}
        # A call that took too long may go on in a thread, and what was interrupted is in the middle of something.
        if isinstance(error, TimeoutError) or not isinstance(error, Exception) or not self._link.take_back():
            self._link.cut()
        else:
            self._link.roll_back()
        lost = isinstance(error, psycopg.OperationalError) and not self._link.fit
        self._end()
        return lost or not PASSING.isdisjoint(states)

    def _end(self) -> None:
        self._ended = True
        self._engine.give_back(self._link)


def tidied(link: Link, settings: Statement) -> bool:
    """Whether the session is as it was: nothing that user code left there is there any more."""
    try:
        return link.fit and link.ask(*_TIDY, settings, _LEFT) == [(0,)]
    except Said:
        return False
