"""What an import reads: the databases of LangGraph's own savers, SQLite and PostgreSQL.

Owns how they are opened, so that they stay untouched, and the queries, which are the same for both. Decoding is
``revival``'s business. What always holds: nothing is written to a source, no table of it is made or migrated; a thread
is read from one snapshot, a checkpoint at a time. How PostgresSaver's tables make a checkpoint is known to LangGraph's
own package, which is asked for it.
"""

from __future__ import annotations

import json
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from langgraph.checkpoint.base import writes_sort_key
from langgraph.checkpoint.serde.base import SerializerProtocol

from holdfast.errors import BadOption, SourceUnreadable

_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")


@dataclass(frozen=True, slots=True)
class Write:
    """One thing that a task wrote. A task has one write at each index."""

    task: str
    path: str
    index: int
    channel: str
    value: Any


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint as the source has it, and its writes in LangGraph's order."""

    id: str
    parent: str | None
    checkpoint: dict[str, Any]
    metadata: dict[str, Any]
    writes: list[Write]


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
    """A database of one of LangGraph's savers. Queries are written as for SQLite."""

    _begin = "BEGIN"
    _written = "task_id, task_path, idx, channel, type, value"  # the columns of a write
    _hint: str
    _connection: Any
    _error: type[Exception]  # what the driver raises

    def __init__(self, name: str, serde: SerializerProtocol) -> None:
        self.name = name  # for people: without passwords
        self._serde = serde

    @abstractmethod
    def _checkpoint(self, thread: str, ns: str, checkpoint_id: str) -> tuple[Any, Any, Any]:
        """The parent's id, the checkpoint and the metadata of one that must be there."""

    def _in_its_words(self, query: str) -> str:
        return query

    def check_unchanged(self) -> None:  # noqa: B027 - a database server takes care of that
        """Raise when the source was written in a way that makes what was read doubtful."""

    def close(self) -> None:
        self._connection.close()

    @property
    def lost(self) -> bool:
        """Whether nothing more can be read."""
        return bool(getattr(self._connection, "closed", False))

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Inside, everything is read from the same moment."""
        self._connection.execute(self._begin)
        try:
            yield
        finally:
            with suppress(self._error):
                self._connection.execute("ROLLBACK")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise SourceUnreadable(f"{self.name} cannot be read: {error}", hint=self._hint) from error

    def _rows(self, query: str, *parameters: str) -> list[Any]:
        with self._explained():
            found: list[Any] = self._connection.execute(self._in_its_words(query), parameters).fetchall()
            return found

    def threads(self) -> list[str]:
        """Every thread's id, in order."""
        found = self._rows("SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM writes")
        return sorted(str(name) for (name,) in found)

    def counts(self, thread: str) -> tuple[int, int, int]:
        """How many namespaces, checkpoints and writes a thread has."""
        ((checkpoints,),) = self._rows("SELECT count(*) FROM checkpoints WHERE thread_id = ?", thread)
        ((writes,),) = self._rows("SELECT count(*) FROM writes WHERE thread_id = ?", thread)
        return len(self.namespaces(thread)), int(checkpoints), int(writes)

    def namespaces(self, thread: str) -> list[str]:
        """The thread's namespaces; the root graph's first."""
        found = self._rows(
            "SELECT checkpoint_ns FROM checkpoints WHERE thread_id = ? UNION "
            "SELECT checkpoint_ns FROM writes WHERE thread_id = ?",
            thread,
            thread,
        )
        return sorted(str(ns) for (ns,) in found)

    def lineage(self, thread: str, ns: str) -> dict[str, str | None]:
        """Ids and parents of a namespace's checkpoints, oldest first; the last is where the thread stands."""
        found = self._rows(
            "SELECT checkpoint_id, parent_checkpoint_id FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = ?",
            thread,
            ns,
        )
        return {str(name): parent or None for name, parent in sorted(found, key=lambda row: str(row[0]))}

    def early(self, thread: str, ns: str) -> Iterator[tuple[str, list[Write]]]:
        """Writes that came before their checkpoint, which never did: its id and what was written."""
        found = self._rows(
            "SELECT checkpoint_id FROM writes WHERE thread_id = ? AND checkpoint_ns = ? EXCEPT "
            "SELECT checkpoint_id FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = ?",
            *(thread, ns, thread, ns),
        )
        for name in sorted(str(name) for (name,) in found):
            yield name, self._writes(thread, ns, name)

    def entry(self, thread: str, ns: str, name: str) -> Entry:
        """One checkpoint, which must be there, whose parts are what everything after this takes them for."""
        with self._explained():
            parent, checkpoint, metadata = self._checkpoint(thread, ns, name)
        whole = isinstance(checkpoint, dict) and isinstance(checkpoint.get("channel_values"), dict)
        if not whole or checkpoint.get("id") != name or not isinstance(metadata, dict):
            raise SourceUnreadable(f"checkpoint {name} is not a checkpoint of LangGraph's")
        return Entry(name, parent or None, checkpoint, metadata, self._writes(thread, ns, name))

    def _writes(self, thread: str, ns: str, checkpoint_id: str) -> list[Write]:
        """What was written under a checkpoint, in the order in which LangGraph applies it."""
        found = self._rows(
            f"SELECT {self._written} FROM writes "  # noqa: S608 - names of columns
            "WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?",
            *(thread, ns, checkpoint_id),
        )
        found.sort(key=lambda row: writes_sort_key(row[1], row[0], row[2]))
        return [
            Write(task, path, index, channel, self._serde.loads_typed((str(kind), value)))
            for task, path, index, channel, kind, value in found
        ]


class SqliteSource(Source):
    """A file of SqliteSaver or AsyncSqliteSaver."""

    _error = sqlite3.Error
    _hint = "Name the file that SqliteSaver or AsyncSqliteSaver wrote."

    def __init__(self, path: Path, serde: SerializerProtocol) -> None:
        super().__init__(f"{_SQLITE}{path}", serde)
        self._path = path
        uri = f"file:{quote(os.fspath(path.absolute()))}?mode=ro"
        try:
            self._still = self._stamp()
        except OSError as error:
            raise SourceUnreadable(
                f"{path}: {error.strerror}", hint="Check the path: sqlite:///old.db is in this directory."
            ) from error
        if self._still is not None:
            uri += "&immutable=1"  # otherwise SQLite would put a new, empty log next to the file
        with self._explained():
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        if not any(column == "task_path" for _, column, *_ in self._rows("PRAGMA table_info(writes)")):
            self._written = self._written.replace("task_path", "''")

    def _stamp(self) -> tuple[int, int] | None:
        """What tells whether the file was written, where it is all there is; None while there is a log beside it."""
        status = self._path.stat()
        beside = any(self._path.with_name(self._path.name + end).exists() for end in ("-wal", "-journal"))
        return None if beside else (status.st_size, status.st_mtime_ns)

    def check_unchanged(self) -> None:
        if self._still is not None and self._still != self._stamp():
            raise SourceUnreadable(
                f"{self._path} was written while it was read", hint="Run the import again; it resumes where it stopped."
            )

    def _checkpoint(self, thread: str, ns: str, checkpoint_id: str) -> tuple[Any, Any, Any]:
        ((parent, kind, content, metadata),) = self._rows(
            "SELECT parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints "
            "WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?",
            *(thread, ns, checkpoint_id),
        )
        try:
            described = json.loads(metadata) if metadata is not None else {}
        except ValueError as error:
            raise SourceUnreadable(f"the metadata of checkpoint {checkpoint_id} cannot be decoded: {error}") from error
        return parent, self._serde.loads_typed((str(kind), content)), described


class PostgresSource(Source):
    """A database of PostgresSaver or AsyncPostgresSaver."""

    _begin = "BEGIN ISOLATION LEVEL REPEATABLE READ"
    _written = "task_id, task_path, idx, channel, type, blob"
    _hint = (
        "Name a database of PostgresSaver's, or a copy that PostgresSaver.setup() has brought up to date. "
        "ShallowPostgresSaver keeps no history that could be imported."
    )

    def __init__(self, url: str, serde: SerializerProtocol) -> None:
        try:
            import psycopg
            from langgraph.checkpoint.postgres import PostgresSaver
        except ImportError as error:
            raise SourceUnreadable(
                f"reading PostgreSQL needs a package that is not installed: {error.name}",
                hint="Install it: pip install langgraph-checkpoint-postgres 'psycopg[binary]'",
            ) from error
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        super().__init__(f"postgresql://{parts.hostname or ''}{port}{parts.path}", serde)
        self._error = psycopg.Error
        with self._explained():
            self._connection = psycopg.connect(url, autocommit=True)
            self._connection.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        self._saver = PostgresSaver(self._connection, serde=serde)

    def _in_its_words(self, query: str) -> str:
        return query.replace("FROM writes", "FROM checkpoint_writes").replace("?", "%s")

    def _checkpoint(self, thread: str, ns: str, checkpoint_id: str) -> tuple[Any, Any, Any]:
        where = {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}
        found: Any = self._saver.get_tuple({"configurable": where})
        parent = found.parent_config["configurable"]["checkpoint_id"] if found.parent_config else None
        return parent, found.checkpoint, found.metadata
