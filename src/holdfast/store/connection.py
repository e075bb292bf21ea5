"""A connection to PostgreSQL: where it leads, what is sent and what is answered, and when it may be used again.

Owns addresses with their passwords, and libpq's pipeline mode, which a connection never leaves: statements whose rows
nobody asks for wait for nothing. Knows no table. What always holds: a connection whose answers were not read to the end
is never ``fit`` again; in a forked child it does nothing that its parent could notice; no text that leaves this module
has the password in it.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import select
import socket
import struct
import threading
import urllib.parse
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from operator import call
from typing import Any, TypeVar

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from holdfast.errors import BadOption, StoreFailed
from holdfast.store.cipher import digest
from holdfast.store.engine import Args, Row

ANSWER_S = 600
"""How long a statement may take before its connection is given up."""

CANCEL_S = 5.0
"""How long it may take to tell the server that a statement is not wanted any more."""

PREPARED = 256
"""Statements that a connection prepares. Those with lists come in too many lengths to be worth it."""

SEND_BYTES = 2**18
"""What is queued at most before it is sent."""

KEEPALIVES = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
GONE_MS = 25_000
"""A machine that vanished is found out by the other side within so long, whether it owes an answer or not."""

LEASE_S, LEASE_MIN_S, LEASE_MAX_S = 10.0, 0.1, 3600.0
"""For how long a lease counts once the server has confirmed it: as given in the address, or so long."""

_USUAL: dict[str, Any] = {
    "connect_timeout": 10,
    "application_name": "holdfast",
    "tcp_user_timeout": GONE_MS,
    **KEEPALIVES,
}

Statement = tuple[str, Args]
C = TypeVar("C", bound="psycopg.Connection[Any] | psycopg.AsyncConnection[Any]")


class _Connection(psycopg.Connection[Any]):
    """One that may be dropped, by an interrupt: then its libpq part closes it, unless it is a parent's."""

    def __del__(self, _warn: object = None, /) -> None:
        pass


class Address:
    """A URL, taken apart. ``place`` says it without what is secret, which nothing but this object has."""

    def __init__(self, url: str) -> None:
        ours = dict(re.findall(r"[?&](schema|shared|lease_s)=([^&]*)", url))
        rest = re.sub(r"(?<=[?&])(schema|shared|lease_s)=[^&]*&?", "", url).rstrip("?&")
        info: dict[str, Any] = {}
        with suppress(psycopg.Error):  # its words would have the whole URL in them
            info = conninfo_to_dict(rest)
        self.schema = urllib.parse.unquote(ours.get("schema", "")) or "holdfast"
        user, host, port, database = (str(info.get(part) or "") for part in ("user", "host", "port", "dbname"))
        # A special character in the password may have cut it in two: the rest would be taken for a host, and shown.
        odd = not info or "@" in host + database or not re.fullmatch(r"[0-9,]*", port)
        if odd or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,62}", self.schema):
            raise BadOption(
                "this is not the address of a store on PostgreSQL",
                hint="postgresql://USER:PASSWORD@HOST:PORT/DATABASE?schema=NAME, with %-codes for special characters."
                " The name of a schema has letters, digits, _ and -.",
            )
        self.lease_s = _seconds(ours.get("lease_s", ""))
        name = urllib.parse.unquote(ours.get("shared", ""))
        self.store = _store_id(name) if name else ""
        self._info = info
        shown = f"schema={self.schema}" + (f"&shared={name}" if name else "")
        if host.startswith("/"):
            host, shown = "", f"host={host}&{shown}"
        at = f"{user}@" * bool(user) + host + f":{port}" * bool(port)
        self.place = f"postgresql://{at}/{database}?{shown}"

    def dial(self) -> _Connection:
        several = {"target_session_attrs": "read-write"} if "," in str(self._info.get("host")) else {}
        try:
            given = _USUAL | several | self._info | {"client_encoding": "UTF8"}
            return _Connection.connect(**given, autocommit=True)
        except psycopg.Error as error:
            said = " ".join(str(error).split())  # libpq says one thing in several lines
        # Outside of the handler: nothing of psycopg's, which knows the password, hangs on this error.
        raise StoreFailed(
            f"{self.place} cannot be reached: {said}", hint="See that the server runs, and that the address is right."
        )


def _seconds(text: str) -> float:
    """How long a lease counts."""
    try:
        seconds = float(text or LEASE_S)
    except ValueError:
        seconds = 0.0
    if not LEASE_MIN_S <= seconds <= LEASE_MAX_S:
        raise BadOption(
            f"a lease of lease_s={text}", hint=f"Use a number of seconds from {LEASE_MIN_S:g} to {LEASE_MAX_S:g}."
        )
    return seconds


def _store_id(name: str) -> str:
    """What tells a store from others in its schema: a UUID, or a name that stands for one."""
    try:
        return str(uuid.UUID(name))
    except ValueError:
        return str(uuid.UUID(bytes=digest(b"shared", name.encode())[:16]))


class Said(Exception):
    """What the server said instead of an answer. ``state`` is its code, empty when the connection is gone."""

    def __init__(self, state: str, text: str) -> None:
        super().__init__(text)
        self.state = state
        self.text = text

    @classmethod
    def in_result(cls, result: pq.abc.PGresult) -> Said:
        if result.status == pq.ExecStatus.PIPELINE_ABORTED:
            return cls("25P02", "an earlier statement of the transaction has failed")
        state, severity, text = (
            (result.error_field(field) or b"").decode(errors="replace")
            for field in (
                pq.DiagnosticField.SQLSTATE,
                pq.DiagnosticField.SEVERITY_NONLOCALIZED,
                pq.DiagnosticField.MESSAGE_PRIMARY,  # the details may have values in them
            )
        )
        if severity != "ERROR":  # FATAL, PANIC, or a word of libpq's own
            return cls("", text or result.error_message.decode(errors="replace").strip())
        return cls(state, text)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


_DECODERS: dict[int, Callable[[bytes], Any]] = dict.fromkeys((20, 21, 23), _number)
_DECODERS |= dict.fromkeys((19, 25, 1043), bytes.decode) | {16: any}
_IGNORED: list[Row] = []


def _decoded(result: pq.abc.PGresult) -> Iterator[Row]:
    columns = [(at, _DECODERS.get(result.ftype(at), bytes)) for at in range(result.nfields)]
    get = result.get_value
    for row in range(result.ntuples):
        yield tuple([None if (data := get(row, at)) is None else decode(data) for at, decode in columns])


_encode_int = struct.Struct(">q").pack
_ENCODERS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    int: (20, _encode_int),
    bool: (20, _encode_int),
    str: (25, str.encode),
    bytes: (17, bytes),
    bytearray: (17, bytes),
    memoryview: (17, bytes),
}


@lru_cache(PREPARED)
def _forms(kinds: tuple[type, ...]) -> tuple[list[int], list[Callable[[Any], bytes]], list[pq.Format]]:
    """How arguments of these types are sent."""
    known = [_ENCODERS[kind] for kind in kinds]
    return [number for number, _ in known], [encode for _, encode in known], [pq.Format.BINARY] * len(known)


class Link:
    """A connection. It is ``clean`` when all that was sent has been answered to the end."""

    def __init__(self, address: Address) -> None:
        self._pid = os.getpid()
        self._connection = address.dial()
        self._pg = self._connection.pgconn
        self._pg.nonblocking = 1
        self._pg.enter_pipeline_mode()
        self._socket = self._pg.socket
        self._inode = os.fstat(self._socket).st_ino
        self._readable, self._either = select.poll(), select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._either.register(self._socket, select.POLLIN | select.POLLOUT)
        self._due: deque[list[Row] | None] = deque()  # the answers that will come; None: the end of a round
        self._queued = 0
        self._prepared: dict[tuple[str, tuple[type, ...]], bytes] = {}
        self._preparing: list[tuple[str, tuple[type, ...]]] = []
        series = secrets.token_hex(8)  # behind a pooler, a statement of somebody else's must not answer to our name
        self._names = (f"{series}-{number}".encode() for number in itertools.count())
        self.version = self._pg.server_version
        self.done = b""  # what the server says that it did last
        self.clean = True

    def send(self, sql: str, args: Args = (), *, wanted: bool = False) -> list[Row]:
        """Queue a statement. Its rows, if they are wanted, are in the list after ``receive``."""
        self.clean = False
        key = sql, tuple(map(type, args))
        types, encoders, formats = _forms(key[1])
        values = list(map(call, encoders, args))
        try:
            name = self._prepared.get(key)
            if name is None and len(self._prepared) < PREPARED and " IN ($" not in sql:
                name = self._prepared[key] = next(self._names)
                self._preparing.append(key)
                self._pg.send_prepare(name, sql.encode(), types)
                self._due.append(_IGNORED)
            if name is not None:
                self._pg.send_query_prepared(name, values, formats, pq.Format.BINARY)
            else:
                self._pg.send_query_params(sql.encode(), values, types, formats, pq.Format.BINARY)
            self._due.append(rows := [] if wanted else _IGNORED)
            self._queued += sum(map(len, values))
            if self._queued > SEND_BYTES:
                self._flush()
        except psycopg.Error as error:
            raise Said("", str(error)) from None
        return rows

    def receive(self, *, end: bool = True) -> None:
        """Read the answers to all that was sent; raises the first that is an error.

        ``end``: of a round. Behind an error the server heeds nothing before the next round.
        """
        failed: Said | None = None
        try:
            if end:
                self._pg.pipeline_sync()
                self._due.append(None)
            else:
                self._pg.send_flush_request()
            self._flush()
            while self._due:
                result = self._result()
                if result is None:
                    raise Said("", "the connection is closed")
                rows = self._due.popleft()
                if rows is None:
                    if result.status == pq.ExecStatus.PIPELINE_SYNC:
                        continue
                    if result.status != pq.ExecStatus.FATAL_ERROR:
                        raise Said("", "an answer is out of place")
                    self._due.appendleft(None)  # the round is one transaction, whose commit failed: its end follows
                if result.status not in {pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK}:
                    failed = failed or Said.in_result(result)
                elif rows is not None and rows is not _IGNORED:
                    rows.extend(_decoded(result))
                self.done = result.command_status or b""
                self._result()  # the end of this answer
        except psycopg.Error as error:
            raise failed or Said("", str(error).strip()) from None
        except UnicodeDecodeError:
            raise Said("XX001", "a text is not text") from None
        if failed is not None:
            for key in list(self._prepared) if failed.state == "26000" else self._preparing:
                del self._prepared[key]  # it may be there or not: the next one has another name
        self._preparing.clear()
        self.clean = end
        if failed is not None:
            raise failed

    def ask(self, *statements: Statement) -> list[Row]:
        """Statements in one round, and the rows of the last."""
        answers = [self.send(sql, args, wanted=True) for sql, args in statements]
        self.receive()
        return answers[-1]

    def tell(self, *statements: Statement) -> None:
        """Statements in one round whose answers nobody reads: nothing is asked on this connection any more."""
        for sql, args in statements:
            self.send(sql, args)
        try:
            self._pg.pipeline_sync()
            self._pg.flush()
        except psycopg.Error as error:
            raise Said("", str(error)) from None

    def roll_back(self) -> None:
        """Out of a transaction that has failed; else the connection is not used again."""
        if not self.clean:
            with suppress(Said):
                self.receive()
        with suppress(Said):
            self.ask(("ROLLBACK", ()))

    def _flush(self) -> None:
        self._queued = 0
        while self._pg.flush():
            for _, event in self._wait(self._either):
                if event != select.POLLOUT:
                    self._pg.consume_input()

    def _result(self) -> pq.abc.PGresult | None:
        while self._pg.is_busy():
            self._wait(self._readable)
            self._pg.consume_input()
        return self._pg.get_result()

    def _wait(self, poll: select.poll) -> list[tuple[int, int]]:
        found = poll.poll(ANSWER_S * 1000)
        if not found:
            self.close()
            raise Said("", f"no answer for {ANSWER_S} s")
        return found

    @property
    def fit(self) -> bool:
        """Whether it may be used, as far as can be seen from here: a server that went away has closed it."""
        if not self.clean or self._pg.transaction_status != pq.TransactionStatus.IDLE:
            return False
        try:
            if not self._readable.poll(0):
                return True
            self._pg.consume_input()  # a notice, or the end
            return not self._readable.poll(0)
        except psycopg.Error:
            return False

    def lend(self, kind: type[C]) -> C:
        """The connection for code that uses psycopg, until ``take_back``."""
        self.clean = False
        self._pg.exit_pipeline_mode()
        return kind(self._pg)

    def take_back(self) -> bool:
        """Whether what was lent can be used here again: nothing is under way on it."""
        idle = (pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)
        if self._pg.pipeline_status != pq.PipelineStatus.OFF:  # it is here already, or was left in the middle
            return self.clean
        self.clean = self._pg.transaction_status in idle
        if self.clean:
            self._pg.enter_pipeline_mode()
        return self.clean

    def cut(self) -> None:
        """End it, whatever another thread does with it: the server rolls back. It is closed when nobody has it."""
        self.clean = False
        with suppress(psycopg.Error):
            if self._pg.transaction_status == pq.TransactionStatus.ACTIVE:
                self._connection.cancel_safe(timeout=CANCEL_S)
        with suppress(OSError), socket.socket(fileno=os.dup(self._socket)) as same:
            same.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.clean = False
        if self._pid == os.getpid():
            self._connection.close()

    def forget(self) -> None:
        """After a fork, in the child: close the descriptor alone. Anything more would end the parent's session."""
        self.clean = False
        with suppress(OSError):
            if os.fstat(self._socket).st_ino == self._inode:
                os.close(self._socket)


class Seat:
    """A place for a connection, which one thread at a time may use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.link: Link | None = None

    def ready(self, connect: Callable[[], Link]) -> Link:
        if self.link is None or not self.link.fit:
            self.empty()
            self.link = connect()
        return self.link

    def empty(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()


def free_seat(seats: list[Seat]) -> Seat:
    """One that nobody uses, if there is any; the first, so that few connections are made."""
    return next((seat for seat in seats if not seat.lock.locked()), seats[threading.get_ident() // 64 % len(seats)])
