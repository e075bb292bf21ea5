"""The savers: how each is opened, what it says of its own flushing, how its bytes are counted. Measures no time.

What always holds: each is opened as its documentation shows, and then made to flush every commit if its own default
would not; what it said before and after that is reported.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver

THREAD = "thread"
SYNCHRONOUS = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}
FULL = 2

Saver = BaseCheckpointSaver[Any]


@dataclass(frozen=True)
class Rival:
    """One saver with one kind of channel. ``whole`` ones write the whole state each time: slow, and large."""

    name: str
    saver: str
    label: str
    delta: bool = False
    whole: bool = False

    @property
    def durable(self) -> bool:
        return self.saver not in {"none", "memory"}

    @property
    def floor(self) -> str:
        """The same graph without any saver: reducers cost time of their own, and not the same for both channels."""
        return "none delta" if self.delta else "none"


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("none", "none", "no saver"),
        Rival("none delta", "none", "no saver, DeltaChannel(50)", delta=True),
        Rival("memory", "memory", "InMemorySaver", whole=True),
        Rival("holdfast", "holdfast", "HoldfastSaver"),
        Rival("holdfast delta", "holdfast", "HoldfastSaver, DeltaChannel(50)", delta=True),
        Rival("sqlite", "sqlite", "SqliteSaver", whole=True),
        Rival("sqlite delta", "sqlite", "SqliteSaver, DeltaChannel(50)", delta=True),
        Rival("postgres", "postgres", "PostgresSaver", whole=True),
        Rival("postgres delta", "postgres", "PostgresSaver, DeltaChannel(50)", delta=True),
    )
}


def missing() -> str:
    """Why HoldfastSaver cannot be measured; empty when it can."""
    try:
        from holdfast.contrib.langgraph import HoldfastSaver
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return "" if issubclass(HoldfastSaver, BaseCheckpointSaver) else "HoldfastSaver is not a saver"


@contextmanager
def opened(rival: Rival, place: str, *, fresh: bool = False) -> Iterator[Saver | None]:
    """The saver, closed at the end. ``place`` is a folder, or for PostgreSQL the connection string."""
    if rival.saver == "none":
        yield None
    elif rival.saver == "memory":
        yield InMemorySaver()
    elif rival.saver == "sqlite":
        with SqliteSaver.from_conn_string(str(Path(place) / "saver.db")) as sqlite:
            if fresh:
                sqlite.setup()
            if sqlite.conn.execute("PRAGMA synchronous").fetchone()[0] < FULL:
                sqlite.conn.execute("PRAGMA synchronous=FULL")
            yield sqlite
    elif rival.saver == "postgres":
        with PostgresSaver.from_conn_string(place) as postgres:
            if fresh:
                postgres.setup()
            yield postgres
    else:
        from holdfast.contrib.langgraph import HoldfastSaver

        with HoldfastSaver(Path(place) / "store") as ours:
            yield ours


def policy(rival: Rival, place: str) -> str:
    """What each says of its own flushing, asked of a connection of its own making."""
    if rival.saver == "sqlite":
        with SqliteSaver.from_conn_string(str(Path(place) / "saver.db")) as saver:
            saver.setup()
            (mode,) = saver.conn.execute("PRAGMA journal_mode").fetchone()
            (level,) = saver.conn.execute("PRAGMA synchronous").fetchone()
        said = f"journal_mode={mode}, synchronous={SYNCHRONOUS.get(level, level)}"
        return said if level >= FULL else f"{said}; made FULL for this run"
    if rival.saver == "postgres":
        names = ("server_version", "fsync", "synchronous_commit", "wal_sync_method", "full_page_writes")
        with psycopg.connect(place) as connection:
            return ", ".join(f"{name}={connection.execute(f'SHOW {name}').fetchone()[0]}" for name in names)  # type: ignore[index]
    if rival.saver == "holdfast":
        return "put and put_writes return when it is flushed; one flush carries all that wait for it"
    return "flushes nothing"


def bytes_on_disk(rival: Rival, place: str) -> int:
    """After the saver was closed and every write-ahead log was folded into what it belongs to."""
    if rival.saver == "sqlite":
        connection = sqlite3.connect(Path(place) / "saver.db")
        (busy, left, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.close()
        if busy or left:
            raise RuntimeError(f"SQLite did not fold its log: busy={busy}, {left} frames left")
    if rival.saver == "postgres":
        with psycopg.connect(place, autocommit=True) as client:
            client.execute("CHECKPOINT")
            row = client.execute("SELECT pg_database_size(current_database())").fetchone()
            return int(row[0]) if row else 0
    return sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file())
