"""What an import reads from PostgreSQL: the tables of LangGraph's PostgresSaver and AsyncPostgresSaver.

How a checkpoint is put together from them is known to LangGraph's own package, whose query and decoding are used.
What always holds: every transaction is read-only, and reads one snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

from langgraph.checkpoint.serde.base import SerializerProtocol

from holdfast.contrib.langgraph.sources import Entry, Source, Write, decode_writes, make_entry, without_secrets
from holdfast.errors import SourceUnreadable

# Checkpoints that are fetched together; their whole states are in memory.
BATCH = 16
# From this version of LangGraph's format on, what was sent to nodes is a channel; before, it was a parent's writes.
_SENDS_ARE_A_CHANNEL = 4


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
        self.name = without_secrets(url)
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

    def entries(self, thread: str, ns: str, *, newest_first: bool, skip: Collection[str] = ()) -> Iterator[Entry]:
        order = "DESC" if newest_first else "ASC"
        # Skipped rows are left out by the server, which would otherwise collect their values.
        where = (
            f"WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id <> ALL(%s) ORDER BY checkpoint_id {order}"
        )
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
        return make_entry(
            row["checkpoint_id"],
            row["parent_checkpoint_id"],
            checkpoint,
            row["metadata"],
            decode_writes(self._serde, writes),
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
            yield str(name), decode_writes(self._serde, (row[1:] for row in rows))
