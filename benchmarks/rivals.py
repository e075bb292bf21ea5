"""The rivals: each keeps one list of items durably, in its own way, behind the same three verbs.

Owns how each one is driven, and its flush policy. What always holds: when `append` or `edit` returns, the change is on
the disk, unless a rival's own default is weaker; then it runs twice, as it is and made to flush, and that is said.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver

import holdfast

FLOOR_BYTES = 4_096
IN_PLACE_BLOCKS = 256
SYNCHRONOUS = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}

Item = dict[str, Any]
Edit = tuple[int, str, Any]
"""Position of an item, the key inside it, the new value."""


class Rival(Protocol):
    """One way to keep a list. A fresh folder is given to each."""

    def fill(self, items: list[Item]) -> None:
        """The starting state, in one go; not measured."""

    def append(self, item: Item) -> None:
        """Add one item, durably."""

    def edit(self, edits: list[Edit]) -> None:
        """Change fields of several items, then make that durable once."""

    def close(self) -> None:
        """Finish, so that the files can be measured."""


def open_quietly(path: Path) -> holdfast.Store:
    """A new store is announced on stderr; here that would only disturb the table."""
    with contextlib.redirect_stderr(io.StringIO()):
        return holdfast.open(path)


class Floor:
    """The least that durability can cost: 4 KB appended to a file and fdatasync. It knows nothing of any state."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "floor", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._block = os.urandom(FLOOR_BYTES)

    def fill(self, items: list[Item]) -> None:
        pass

    def append(self, item: Item) -> None:
        del item
        os.write(self._file, self._block)
        os.fdatasync(self._file)

    def edit(self, edits: list[Edit]) -> None:
        del edits
        self.append({})

    def close(self) -> None:
        os.close(self._file)


class InPlace(Floor):
    """The same 4 KB written over what is there, in a file made beforehand: no block to allocate, so less to flush.

    SQLite's log is such a file most of the time. The file comes round again after IN_PLACE_BLOCKS writes.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "in-place", os.O_WRONLY | os.O_CREAT, 0o600)
        self._block = os.urandom(FLOOR_BYTES)
        for _ in range(IN_PLACE_BLOCKS):
            os.write(self._file, self._block)
        os.fsync(self._file)
        self._next = 0

    def append(self, item: Item) -> None:
        del item
        os.pwrite(self._file, self._block, self._next * FLOOR_BYTES)
        os.fdatasync(self._file)
        self._next = (self._next + 1) % IN_PLACE_BLOCKS


class Holdfast:
    """Only public calls, durability as it is by default: flushed before checkpoint() returns."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "store"
        self._store = open_quietly(self._path)
        self._agent = self._store.agent("bench")

    def fill(self, items: list[Item]) -> None:
        self._agent.state["messages"] = items
        self._agent.checkpoint()

    def append(self, item: Item) -> None:
        self._agent.state["messages"].append(item)
        self._agent.checkpoint()

    def edit(self, edits: list[Edit]) -> None:
        messages = self._agent.state["messages"]
        for at, key, value in edits:
            messages[at][key] = value
        self._agent.checkpoint()

    def close(self) -> None:
        self._store.close()


class Saver:
    """LangGraph's SqliteSaver: every checkpoint holds the whole state. Opened as its documentation shows."""

    def __init__(self, folder: Path) -> None:
        self._context = SqliteSaver.from_conn_string(str(folder / "saver.db"))
        self._saver = self._context.__enter__()
        self._saver.setup()
        self._config: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
        self._items: list[Item] = []

    @property
    def policy(self) -> str:
        """Its flush policy, asked of its own connection."""
        (mode,) = self._saver.conn.execute("PRAGMA journal_mode").fetchone()
        (level,) = self._saver.conn.execute("PRAGMA synchronous").fetchone()
        return f"journal_mode={mode}, synchronous={SYNCHRONOUS.get(level, level)}"

    def fill(self, items: list[Item]) -> None:
        self._items = list(items)
        self._put()

    def append(self, item: Item) -> None:
        self._items.append(item)
        self._put()

    def edit(self, edits: list[Edit]) -> None:
        for at, key, value in edits:
            self._items[at][key] = value
        self._put()

    def _put(self) -> None:
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": self._items}
        self._config = self._saver.put(self._config, checkpoint, {"source": "loop", "step": 1}, {})

    def close(self) -> None:
        self._context.__exit__(None, None, None)


class SaverFull(Saver):
    """The same, made to flush at every commit. Used only where its own default is weaker."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._saver.conn.execute("PRAGMA synchronous=FULL")


class Pickle:
    """The whole state by pickle into a new file: fsync, rename over the old one, fsync of the directory. No history."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._items: list[Item] = []

    def fill(self, items: list[Item]) -> None:
        self._items = list(items)
        self._save()

    def append(self, item: Item) -> None:
        self._items.append(item)
        self._save()

    def edit(self, edits: list[Edit]) -> None:
        for at, key, value in edits:
            self._items[at][key] = value
        self._save()

    def _save(self) -> None:
        fresh = self._folder / "state.tmp"
        with fresh.open("wb") as file:
            pickle.dump({"messages": self._items}, file, protocol=pickle.HIGHEST_PROTOCOL)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._folder / "state.pickle")
        directory = os.open(self._folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def close(self) -> None:
        pass


class Rows:
    """What one writes by hand: a row per item, WAL, synchronous=FULL. Knows only the newest state, no history."""

    def __init__(self, folder: Path) -> None:
        self.connection = connect_rows(folder / "rows.db")
        self._items: list[Item] = []

    def fill(self, items: list[Item]) -> None:
        self._items = items
        rows = enumerate(map(msgspec.msgpack.encode, items))
        self.connection.executemany("INSERT INTO item VALUES (?, ?)", rows)
        self.connection.commit()
        self._count = len(items)

    def append(self, item: Item) -> None:
        self.connection.execute("INSERT INTO item VALUES (?, ?)", (self._count, msgspec.msgpack.encode(item)))
        self.connection.commit()
        self._count += 1

    def edit(self, edits: list[Edit]) -> None:
        changed = []
        for at, key, value in edits:
            self._items[at][key] = value
            changed.append((msgspec.msgpack.encode(self._items[at]), at))
        self.connection.executemany("UPDATE item SET body = ? WHERE id = ?", changed)
        self.connection.commit()

    def close(self) -> None:
        self.connection.close()


class OnServer(Holdfast):
    """The same, with the store on a PostgreSQL server."""

    def __init__(self, url: str) -> None:
        self._store = holdfast.open(url)
        self._agent = self._store.agent("bench")


class BareInsert:
    """As many bytes as a commit of ``ours`` stores, in one INSERT with its own transaction, and nothing else."""

    def __init__(self, url: str, ours: OnServer) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute("CREATE TABLE item (id bigserial PRIMARY KEY, body bytea NOT NULL)")
        self._ours = ours
        self._body = b""

    def fill(self, items: list[Item]) -> None:
        """Looks how much the last checkpoint of the other one takes."""
        self._ours.append(dict(items[-1]))
        found = self._connection.execute("SELECT l.* FROM holdfast.loose l ORDER BY n DESC LIMIT 1").fetchone()
        self._body = os.urandom(sum(len(part) if isinstance(part, bytes) else 8 for part in found or ()))

    def append(self, item: Item) -> None:
        del item
        self._connection.execute("INSERT INTO item (body) VALUES (%s)", (self._body,), prepare=True, binary=True)

    def edit(self, edits: list[Edit]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._connection.close()


class PostgresPut(Saver):
    """LangGraph's PostgresSaver: the messages are written anew with each checkpoint."""

    def __init__(self, url: str) -> None:
        from langgraph.checkpoint.postgres import PostgresSaver

        self._context: Any = PostgresSaver.from_conn_string(url)
        self._saver: Any = self._context.__enter__()
        self._saver.setup()
        self._config: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
        self._items: list[Item] = []

    def _put(self) -> None:
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": self._items}
        checkpoint["channel_versions"] = {"messages": f"{len(self._items):032}"}
        metadata: Any = {"source": "loop", "step": 1}
        self._config = self._saver.put(self._config, checkpoint, metadata, checkpoint["channel_versions"])


def connect_rows(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS item (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
    return connection


MAKERS: dict[str, Callable[[Path], Rival]] = {
    "floor": Floor,
    "in place": InPlace,
    "holdfast": Holdfast,
    "sqlite rows": Rows,
    "pickle": Pickle,
    "langgraph": Saver,
    "langgraph FULL": SaverFull,
}
WHOLE_STATE = frozenset({"pickle", "langgraph", "langgraph FULL"})
"""Those whose cost grows with the state: they get fewer repetitions, because they would take the whole run."""


def saver_policy(folder: Path) -> str:
    """What SqliteSaver does by default on this machine."""
    saver = Saver(folder)
    try:
        return saver.policy
    finally:
        saver.close()
