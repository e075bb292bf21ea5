"""What an import reads: the databases of LangGraph's own savers, SQLite and PostgreSQL.

Owns how they are opened, so that they stay untouched, and the order in which they are read. Decoding is ``revival``'s
business. What always holds: nothing is written to a source, no table of it is made or migrated; a thread is read from
one snapshot; rows are streamed, a checkpoint's writes along with it. How PostgresSaver's tables make a checkpoint is
known to LangGraph's own package, whose query and decoding are used.
"""

from __future__ import annotations

import json
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from langgraph.checkpoint.base import writes_sort_key
from langgraph.checkpoint.serde.base import SerializerProtocol

from holdfast.errors import BadOption, SourceUnreadable

_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")
_SQLITE_MAGIC = b"SQLite format 3\0"
_WAL_FORMAT = 2  # the header's bytes 18 and 19 in a database with a write-ahead log

# Checkpoints that are fetched together; their whole states are in memory.
BATCH = 16
# From this version of LangGraph's format on, what was sent to nodes is a channel; before, it was a parent's writes.
_SENDS_ARE_A_CHANNEL = 4

_CHECKPOINT_COLUMNS = {"thread_id", "checkpoint_ns", "checkpoint_id", "parent_checkpoint_id", "type", "checkpoint"}
_WRITE_COLUMNS = {"thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", "channel", "type", "value"}


@dataclass(frozen=True, slots=True)
class Write:
    """One thing that a task wrote."""

    task: str
    path: str
    index: int
    channel: str
    value: Any

    @property
    def place(self) -> tuple[str, int]:
        """A task has one write at each index."""
        return self.task, self.index


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint as the source has it, and its writes in LangGraph's order."""

    id: str
    parent: str | None
    checkpoint: dict[str, Any]
    metadata: dict[str, Any]
    writes: list[Write]


@dataclass(frozen=True, slots=True)
class Counts:
    """How much a thread is."""

    namespaces: int
    checkpoints: int
    writes: int


def open_source(url: str, serde: SerializerProtocol) -> Source:
    """The source that a URL names. Values are decoded with ``serde``."""
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return SqliteSource(Path(url.removeprefix(_SQLITE)), serde)
    if url.startswith(_POSTGRES):
        return PostgresSource(url, serde)
    raise BadOption(
        f"{url.partition('://')[0]!r} is not a kind of source that can be imported",
        hint="Use sqlite:///old.db (sqlite:////home/me/old.db from the root) or postgresql://user@host/database.",
    )


class Source(ABC):
    """A database of one of LangGraph's savers."""

    name: str  # for people: without passwords
    writes_table: str
    mark: str  # of a parameter in SQL

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """Inside, everything is read from the same moment."""

    @abstractmethod
    def _rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]: ...

    @abstractmethod
    def entries(self, thread: str, ns: str, *, skip: Collection[str] = ()) -> Iterator[Entry]:
        """The checkpoints of a namespace, oldest id first, but those in ``skip``."""

    @abstractmethod
    def entry(self, thread: str, ns: str, checkpoint_id: str) -> Entry:
        """One checkpoint, which must be there."""

    @abstractmethod
    def early_writes(self, thread: str, ns: str) -> Iterator[tuple[str, list[Write]]]:
        """Writes that came before their checkpoint, which never did: its id and what was written."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    def lost(self) -> bool:
        """Whether nothing more can be read."""
        return False

    def check_unchanged(self) -> None:  # noqa: B027 - a database server takes care of that
        """Raise when the source was written in a way that makes what was read doubtful."""

    def threads(self) -> Iterator[str]:
        """Every thread's id, one at a time."""
        newest = f"SELECT min(t) FROM (SELECT min(thread_id) AS t FROM checkpoints UNION ALL SELECT min(thread_id) FROM {self.writes_table}) AS found"  # noqa: E501, S608
        after = newest.replace("checkpoints", f"checkpoints WHERE thread_id > {self.mark}").replace(
            self.writes_table, f"{self.writes_table} WHERE thread_id > {self.mark}"
        )
        (thread,) = self._rows(newest)[0]
        while thread is not None:
            yield str(thread)
            (thread,) = self._rows(after, (thread, thread))[0]

    def totals(self, threads: Sequence[str] = ()) -> tuple[int, int]:
        """How many threads and checkpoints there are, of these threads or of all."""
        if threads:
            counts = [self.counts(thread) for thread in threads]
            return len(counts), sum(count.checkpoints for count in counts)
        ((checkpoints,),) = self._rows("SELECT count(*) FROM checkpoints")
        ids = f"SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM {self.writes_table}"  # noqa: S608
        ((number,),) = self._rows(f"SELECT count(*) FROM ({ids}) AS found")  # noqa: S608
        return int(number), int(checkpoints)

    def counts(self, thread: str) -> Counts:
        ((checkpoints,),) = self._rows(f"SELECT count(*) FROM checkpoints WHERE thread_id = {self.mark}", (thread,))  # noqa: S608
        ((writes,),) = self._rows(
            f"SELECT count(*) FROM {self.writes_table} WHERE thread_id = {self.mark}",  # noqa: S608
            (thread,),
        )
        return Counts(len(self.namespaces(thread)), int(checkpoints), int(writes))

    def namespaces(self, thread: str) -> list[str]:
        """The thread's namespaces; the root graph's first."""
        found = self._rows(
            f"SELECT checkpoint_ns FROM checkpoints WHERE thread_id = {self.mark} UNION "  # noqa: S608
            f"SELECT checkpoint_ns FROM {self.writes_table} WHERE thread_id = {self.mark}",
            (thread, thread),
        )
        return sorted(str(ns) for (ns,) in found)

    def lineage(self, thread: str, ns: str) -> dict[str, str | None]:
        """Ids and parents of a namespace's checkpoints, oldest first; the last is where the thread stands."""
        found = self._rows(
            "SELECT checkpoint_id, parent_checkpoint_id FROM checkpoints "  # noqa: S608
            f"WHERE thread_id = {self.mark} AND checkpoint_ns = {self.mark} ORDER BY checkpoint_id",
            (thread, ns),
        )
        return {str(name): parent or None for name, parent in found}


class SqliteSource(Source):
    """A file of SqliteSaver or AsyncSqliteSaver."""

    writes_table = "writes"
    mark = "?"

    def __init__(self, path: Path, serde: SerializerProtocol) -> None:
        self.name = f"{_SQLITE}{path}"
        self._path = path
        self._serde = serde
        self._still: tuple[int, int] | None = None
        uri = f"file:{quote(os.fspath(path.absolute()))}?mode=ro"
        if self._is_at_rest():
            # Otherwise SQLite would put a new, empty log next to the file.
            self._still = self._stamp()
            uri += "&immutable=1"
        with self._explained():
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
            self._task_path = "task_path" if "task_path" in self._check_tables() else "''"

    def _is_at_rest(self) -> bool:
        """Whether the file is all there is: kept with a write-ahead log, and none is there."""
        try:
            with self._path.open("rb") as file:
                header = file.read(20)
        except OSError as error:
            raise SourceUnreadable(
                f"{self._path}: {error.strerror}", hint="Check the path: sqlite:///old.db is in this directory."
            ) from error
        if not header.startswith(_SQLITE_MAGIC):
            raise SourceUnreadable(f"{self._path} is not a SQLite database")
        return header[18] == _WAL_FORMAT and not self._log().exists()

    def _log(self) -> Path:
        return self._path.with_name(f"{self._path.name}-wal")

    def _stamp(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_size, status.st_mtime_ns

    def _check_tables(self) -> set[str]:
        columns = {table: self._columns(table) for table in ("checkpoints", "writes")}
        for table, needed in (("checkpoints", _CHECKPOINT_COLUMNS), ("writes", _WRITE_COLUMNS)):
            if needed - columns[table]:
                self._connection.close()
                raise SourceUnreadable(
                    f"{self._path} has no table {table!r} as LangGraph's SQLite saver makes it",
                    hint="Name the file that SqliteSaver or AsyncSqliteSaver wrote.",
                )
        return columns["writes"]

    def _columns(self, table: str) -> set[str]:
        return {str(row[1]) for row in self._connection.execute(f"PRAGMA table_info({table})")}

    def close(self) -> None:
        self._connection.close()

    def check_unchanged(self) -> None:
        if self._still is not None and (self._still != self._stamp() or self._log().exists()):
            raise SourceUnreadable(
                f"{self._path} was written while it was read", hint="Run the import again; it goes on where it was."
            )

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise SourceUnreadable(f"{self._path} cannot be read: {error}") from error

    def _rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._explained():
            return self._connection.execute(query, parameters).fetchall()

    def entries(self, thread: str, ns: str, *, skip: Collection[str] = ()) -> Iterator[Entry]:
        with self._explained():
            for row in self._checkpoints("ORDER BY checkpoint_id", thread, ns):
                if row[0] not in skip:
                    yield self._entry(row, self._writes("AND checkpoint_id = ?", thread, ns, row[0]))

    def entry(self, thread: str, ns: str, checkpoint_id: str) -> Entry:
        only = "AND checkpoint_id = ?"
        with self._explained():
            (row,) = self._checkpoints(only, thread, ns, checkpoint_id)
            return self._entry(row, self._writes(only, thread, ns, checkpoint_id))

    def early_writes(self, thread: str, ns: str) -> Iterator[tuple[str, list[Write]]]:
        alone = (
            "AND NOT EXISTS (SELECT 1 FROM checkpoints AS c WHERE c.thread_id = writes.thread_id AND "
            "c.checkpoint_ns = writes.checkpoint_ns AND c.checkpoint_id = writes.checkpoint_id) ORDER BY checkpoint_id"
        )
        with self._explained():
            for name, rows in groupby(self._writes(alone, thread, ns), key=itemgetter(0)):
                yield str(name), _decode_writes(self._serde, (row[1:] for row in rows))

    def _checkpoints(self, which: str, *parameters: str) -> sqlite3.Cursor:
        return self._connection.execute(
            "SELECT checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints "  # noqa: S608
            f"WHERE thread_id = ? AND checkpoint_ns = ? {which}",
            parameters,
        )

    def _writes(self, which: str, *parameters: str) -> sqlite3.Cursor:
        return self._connection.execute(
            f"SELECT checkpoint_id, task_id, {self._task_path}, idx, channel, type, value FROM writes "  # noqa: S608
            f"WHERE thread_id = ? AND checkpoint_ns = ? {which}",
            parameters,
        )

    def _entry(self, row: Any, writes: Iterable[Any]) -> Entry:
        name, parent, kind, content, metadata = row
        try:
            described = json.loads(metadata) if metadata is not None else {}
        except ValueError as error:
            raise SourceUnreadable(f"the metadata of checkpoint {name} cannot be decoded: {error}") from error
        checkpoint = self._serde.loads_typed((str(kind), content))
        return _make_entry(
            name, parent, checkpoint, described, _decode_writes(self._serde, (row[1:] for row in writes))
        )


class PostgresSource(Source):
    """A database of PostgresSaver or AsyncPostgresSaver."""

    writes_table = "checkpoint_writes"
    mark = "%s"

    def __init__(self, url: str, serde: SerializerProtocol) -> None:
        try:
            import psycopg
            from langgraph.checkpoint.postgres import PostgresSaver
        except ImportError as error:
            raise SourceUnreadable(
                f"reading PostgreSQL needs a package that is not installed: {error.name}",
                hint="Install it: pip install langgraph-checkpoint-postgres 'psycopg[binary]'",
            ) from error
        self.name = _without_secrets(url)
        self._serde = serde
        self._psycopg = psycopg
        self._cursors = 0
        with self._explained():
            self._connection = psycopg.connect(url)
            self._connection.read_only = True
            self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        # Never used to reach the database: it knows the query, and how its rows become checkpoints.
        self._saver: Any = PostgresSaver(self._connection, serde=serde)  # type: ignore[arg-type]

    def close(self) -> None:
        self._connection.close()

    @property
    def lost(self) -> bool:
        return bool(self._connection.closed)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        self._connection.rollback()
        try:
            yield
        finally:
            if not self._connection.broken:
                self._connection.rollback()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        errors = self._psycopg.errors
        try:
            yield
        except (errors.UndefinedTable, errors.UndefinedColumn) as error:
            raise SourceUnreadable(
                f"{self.name} does not have the tables of LangGraph's PostgresSaver: {error.diag.message_primary}",
                hint="Bring a copy of the database up to date with PostgresSaver.setup(), and import the copy. "
                "ShallowPostgresSaver keeps no history that could be imported.",
            ) from error
        except self._psycopg.Error as error:
            raise SourceUnreadable(f"{self.name} cannot be read: {error}") from error

    def _rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._explained():
            return self._connection.execute(query, parameters or None).fetchall()

    def threads(self) -> Iterator[str]:
        for thread in super().threads():
            self._connection.rollback()  # threads that come meanwhile are found too, as long as they sort behind
            yield thread

    def entries(self, thread: str, ns: str, *, skip: Collection[str] = ()) -> Iterator[Entry]:
        # Skipped rows are left out by the server, which would otherwise collect their values.
        where = "WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id <> ALL(%s) ORDER BY checkpoint_id"
        return self._entries(where, (thread, ns, list(skip)), thread)

    def entry(self, thread: str, ns: str, checkpoint_id: str) -> Entry:
        where = "WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s"
        (found,) = self._entries(where, (thread, ns, checkpoint_id), thread)
        return found

    def _entries(self, where: str, parameters: Sequence[Any], thread: str) -> Iterator[Entry]:
        self._cursors += 1
        factory = self._psycopg.rows.dict_row
        with (
            self._explained(),
            self._connection.cursor(f"holdfast_{self._cursors}", row_factory=factory) as cursor,
        ):
            cursor.execute(self._saver.SELECT_SQL + where, parameters)
            while batch := cursor.fetchmany(BATCH):
                self._add_sends(thread, batch)
                for row in batch:
                    yield self._entry(row)

    def _add_sends(self, thread: str, batch: list[dict[str, Any]]) -> None:
        """Older checkpoints read as the current saver reads them: what was sent is a channel."""
        old = [row for row in batch if row["checkpoint"]["v"] < _SENDS_ARE_A_CHANNEL and row["parent_checkpoint_id"]]
        if not old:
            return
        parents = list({row["parent_checkpoint_id"] for row in old})
        sent = dict(self._rows(self._saver.SELECT_PENDING_SENDS_SQL, (thread, parents)))
        for row in old:
            if row["channel_values"] is None:
                row["channel_values"] = []
            sends = sent.get(row["parent_checkpoint_id"])
            self._saver._migrate_pending_sends(sends, row["checkpoint"], row["channel_values"])

    def _entry(self, row: dict[str, Any]) -> Entry:
        # (task, channel, kind, value, path, index), all as bytes
        writes = (
            (task.decode(), path.decode(), int(index), channel.decode(), kind.decode(), value)
            for task, channel, kind, value, path, index in row["pending_writes"] or ()
        )
        checkpoint = {
            **row["checkpoint"],
            "channel_values": {
                **(row["checkpoint"].get("channel_values") or {}),
                **self._saver._load_blobs(row["channel_values"]),
            },
        }
        return _make_entry(
            row["checkpoint_id"],
            row["parent_checkpoint_id"],
            checkpoint,
            row["metadata"],
            _decode_writes(self._serde, writes),
        )

    def early_writes(self, thread: str, ns: str) -> Iterator[tuple[str, list[Write]]]:
        found = self._rows(
            "SELECT checkpoint_id, task_id, task_path, idx, channel, type, blob FROM checkpoint_writes AS w "
            "WHERE thread_id = %s AND checkpoint_ns = %s AND NOT EXISTS (SELECT 1 FROM checkpoints AS c WHERE "
            "c.thread_id = w.thread_id AND c.checkpoint_ns = w.checkpoint_ns AND c.checkpoint_id = w.checkpoint_id) "
            "ORDER BY checkpoint_id",
            (thread, ns),
        )
        for name, rows in groupby(found, key=itemgetter(0)):
            yield str(name), _decode_writes(self._serde, (row[1:] for row in rows))


def _decode_writes(serde: SerializerProtocol, rows: Iterator[Any]) -> list[Write]:
    """Rows of (task, path, index, channel, kind, value) as writes, in the order in which LangGraph applies them."""
    ordered = sorted(rows, key=lambda row: writes_sort_key(row[1], row[0], row[2]))
    return [
        Write(task, path, index, channel, serde.loads_typed((str(kind), value)))
        for task, path, index, channel, kind, value in ordered
    ]


def _make_entry(name: str, parent: str | None, checkpoint: Any, metadata: Any, writes: list[Write]) -> Entry:
    """An entry whose parts are what everything after this takes them for."""
    whole = isinstance(checkpoint, dict) and isinstance(checkpoint.get("channel_values"), dict)
    if not whole or checkpoint.get("id") != name or not isinstance(metadata, dict):
        raise SourceUnreadable(f"checkpoint {name} is not a checkpoint of LangGraph's")
    return Entry(name, parent or None, checkpoint, metadata, writes)


def _without_secrets(url: str) -> str:
    """A database's URL for people: no user, no password, no options."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"postgresql://{parts.hostname or ''}{port}{parts.path}"
