"""How tests in this folder damage a store that is closed: rows changed through plain SQLite."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def spoil(path: Path, sql: str, *bindings: object) -> int:
    """Run one statement on the catalog of a store that nobody has open; returns how many rows it changed."""
    with closing(sqlite3.connect(path / "store.db")) as connection, connection:
        return connection.execute(sql, bindings).rowcount


def rows(path: Path, sql: str, *bindings: object) -> list[tuple]:
    with closing(sqlite3.connect(path / "store.db")) as connection:
        return connection.execute(sql, bindings).fetchall()


def flipped(data: bytes, place: int = -1) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 0x40
    return bytes(changed)


def everything(
    path: Path, tables=("loose", "checkpoint", "segment", "node", "record", "tag", "validity")
) -> dict[str, list]:
    return {table: rows(path, f"SELECT * FROM {table} ORDER BY 1") for table in tables}
