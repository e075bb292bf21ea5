"""The one description of every table. The DDL of both engines, column lists, sums and what is encrypted follow from it.

A column is an ``int``, ``text`` or ``blob``; a ``name`` is bytes that rows are looked up by, a ``box`` bytes that only
a reader of the row needs. With a key, names become deterministic ciphertexts and boxes random ones (cipher.py).
Every table but ``node`` has a sum over the columns before the bar ``|``. What stands behind the bar proves itself: its
digest is known from the columns before it. What always holds: a table that is not described here does not exist.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple

from holdfast.errors import Damaged, NewerFormat

FORMAT_VERSION = 1
APPLICATION_ID, FORMER_APPLICATION_ID = 0x48464F52, 0x486F6C64
"""Of the SQLite database; and of one in a layout before this one."""

NUMBER_MAX = 2**62
"""No number in a row is higher, or below 0, so that one more has room in every engine. Marks are any."""

Dialect = Literal["sqlite", "postgres"]

OWNER = "current_setting('holdfast.store')::uuid"
"""Whose the rows of a transaction are, where several stores share the tables of a PostgreSQL schema."""

# a: agent, b: branch, n: checkpoint, s: segment, k: node, r: record, e: entry of the log, p: pack. These numbers are
# handles of one store: they are neither dense nor ordered, and mean nothing elsewhere.
_DESCRIPTION = """
store      : name text key, value box
slot       : name text key, body blob
floor      : name text key, number int
agent      : a int key, uuid blob unique, name name unique, body box
branch     : b int key, a int, name name, uuid blob, body box, head int, id box, depth int, epoch int, line int, \
back int, count int, chain box, generation int, at int : unique a name
tag        : a int key, name name key, n int index, id box, body box
validity   : a int key, n int key, body box
loose      : n int key, mark int index, key name lookup, parent int, line int, b int, epoch int, sealed int | data box
checkpoint : n int key, mark int index, key name lookup, parent int, line int, b int, epoch int, sealed int, s int
shallow    : n int key, over int
segment    : s int key, members box, refs box | manifests box, operations box
node       : k int key, digest name unique, data box
record     : r int key, prev int, back int, i int, b int, mark int, key name lookup, about box | body box
open       : b int key, run name key, signal name key, due int, queue name, turn int, body box : index queue due turn
claim      : b int key, run name key, queue name, part name, generation int, first int \
: index queue generation : index queue first
log        : e int key, a int index, key name lookup, at int, body packed
pack       : p int key, uuid blob unique, size int
chunk      : digest name key, p int index, start int, length int, stored int
"""

_TYPES: dict[Dialect, dict[str, str]] = {
    "sqlite": {"int": "INTEGER", "text": "TEXT", "blob": "BLOB", "name": "BLOB", "box": "BLOB", "packed": "BLOB"},
    "postgres": {"int": "bigint", "text": "text", "blob": "bytea", "name": "bytea", "box": "bytea", "packed": "bytea"},
}
_PYTHON = {"int": int, "text": str}


class Column(NamedTuple):
    """``option``: unique, index, or lookup (an index over the rows where it is not empty)."""

    name: str
    kind: str
    key: bool
    option: str


class Table:
    """A table. ``columns`` are those that rows are made of; the sum, where there is one, comes behind them."""

    def __init__(self, name: str, columns: list[Column], covered: int, together: list[list[str]]) -> None:
        self.name = name
        self.columns = columns
        self.covered = covered  # how many columns the sum covers
        self.together = together  # columns that are unique together, or have an index: that word stands in front
        self.summed = name != "node"
        self.names = [column.name for column in columns] + (["sum"] if self.summed else [])
        self.keys = [at for at, column in enumerate(columns) if column.key]
        self.packed = [at for at, column in enumerate(columns) if column.kind == "packed"]
        self.boxes = [at for at, column in enumerate(columns) if column.kind in {"box", "packed"}]
        self.looked_up = [at for at, column in enumerate(columns) if column.kind == "name"]
        self.numbers = [at for at, column in enumerate(columns) if column.kind == "int" and column.name != "mark"]
        self.types = [_PYTHON.get(column.kind, bytes) for column in columns]
        # Names of branches and tags are their agent's: equal ones of two agents must not look equal.
        self.scope = next((at for at, column in enumerate(columns) if column.name == "a"), None)
        if name in {"agent", "log"}:
            self.scope = None

    @cached_property
    def listed(self) -> str:
        return ", ".join(self.names)

    @cached_property
    def insert(self) -> str:
        return f"INSERT INTO {self.name} ({self.listed}) VALUES ({', '.join('?' * len(self.names))})"

    def select(self, alias: str = "") -> str:
        return ", ".join(f"{alias}.{name}" for name in self.names) if alias else self.listed

    def ddl(self, dialect: Dialect, *, shared: bool = False) -> list[str]:
        """``shared``: several stores have their rows in the table, so whose it is stands in front of every key."""
        types = _TYPES[dialect]
        whose = "store, " if shared else ""
        alone = len(self.keys) == 1 and not shared
        parts = [f"store uuid NOT NULL DEFAULT {OWNER}"] if shared else []
        for column in self.columns:
            key = " PRIMARY KEY" if column.key and alone else ""
            parts.append(f"{column.name} {types[column.kind]} NOT NULL{key}")
        if self.summed:
            parts.append(f"sum {types['blob']} NOT NULL")
        if not alone:
            parts.append(f"PRIMARY KEY ({whose}{', '.join(self.columns[at].name for at in self.keys)})")
        parts += [f"UNIQUE ({whose}{column.name})" for column in self.columns if column.option == "unique"]
        for kind, *names in self.together:
            if kind == "unique":
                parts.append(f"UNIQUE ({whose}{', '.join(names)})")
        numbered = alone and self.columns[0].kind == "int"
        made = [f"CREATE TABLE {self.name} ({', '.join(parts)})"]
        if dialect == "sqlite" and not numbered:
            made[0] += " WITHOUT ROWID"
        for column in self.columns:
            if column.option in {"index", "lookup"}:
                where = f" WHERE length({column.name}) > 0" if column.option == "lookup" else ""
                made.append(f"CREATE INDEX {self.name}_{column.name} ON {self.name} ({whose}{column.name}){where}")
        for kind, *names in self.together:
            if kind == "index":
                made.append(f"CREATE INDEX {'_'.join((self.name, *names))} ON {self.name} ({whose}{', '.join(names)})")
        return made


def _described() -> dict[str, Table]:
    found = {}
    for line in _DESCRIPTION.strip().splitlines():
        name, rest, *more = (part.strip() for part in line.split(":"))
        before, _, after = rest.partition("|")
        columns = [
            Column(words[0], words[1], "key" in words[2:], next((w for w in words[2:] if w != "key"), ""))
            for part in (before, after)
            for text in part.split(",")
            if (words := text.split())
        ]
        found[name] = Table(name, columns, before.count(",") + 1, [words.split() for words in more])
    return found


TABLES = _described()

CHECKPOINTS = ("loose", "checkpoint")
"""The two tables in which a checkpoint's row may be. Their handles are one sequence."""

HANDLES = dict(agent="a", branch="b", loose="n", segment="s", node="k", record="r", log="e", pack="p")  # noqa: C408
"""The tables whose rows have handles, and the column. ``floor`` says which ones were given whose rows are gone."""

LOG_GONE = "log gone"
"""The row of ``floor`` that says how many entries of the log were deleted on purpose: no other may be missing."""


def ddl(dialect: Dialect, *, shared: bool = False) -> list[str]:
    """The statements that make an empty store, or the tables that several stores share."""
    return [statement for table in TABLES.values() for statement in table.ddl(dialect, shared=shared)]


def columns_of(dialect: Dialect) -> set[tuple[str, str, str]]:
    """Every (table, column, type) that a store of this format has; to be compared with what is there."""
    found = set()
    for table in TABLES.values():
        types = _TYPES[dialect]
        found |= {(table.name, column.name, types[column.kind]) for column in table.columns}
        if table.summed:
            found.add((table.name, "sum", types["blob"]))
    return found


def check_version(place: str, version: int) -> None:
    if version > FORMAT_VERSION:
        raise NewerFormat(
            f"{place} has format {version}; this program knows up to {FORMAT_VERSION}",
            hint="Use a newer Holdfast. Nothing was changed.",
        )
    if version < 1:
        raise Damaged(f"{place}: there is no format {version}", what=("format",))
