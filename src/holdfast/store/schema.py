"""The catalog's tables, and the proof that a database has these and nothing else.

Owns the SQL of ``docs/format.md`` section 4. A store from elsewhere could carry triggers or views that act when it is
written to, so an open store's schema is compared text by text and any difference is damage.
"""

from __future__ import annotations

import apsw

from holdfast.errors import Damaged

APPLICATION_ID = 0x486F6C64

TABLES = (
    "CREATE TABLE store (name TEXT PRIMARY KEY, value BLOB NOT NULL, sum BLOB NOT NULL) WITHOUT ROWID",
    (
        "CREATE TABLE agent (a INTEGER PRIMARY KEY AUTOINCREMENT, uuid BLOB NOT NULL, key BLOB NOT NULL UNIQUE,"
        " body BLOB NOT NULL, sum BLOB NOT NULL)"
    ),
    (
        "CREATE TABLE branch (b INTEGER PRIMARY KEY AUTOINCREMENT, a INTEGER NOT NULL, uuid BLOB NOT NULL,"
        " key BLOB NOT NULL, body BLOB NOT NULL, head INTEGER NOT NULL, head_id BLOB NOT NULL,"
        " generation INTEGER NOT NULL, sum BLOB NOT NULL, UNIQUE (a, key))"
    ),
    (
        "CREATE TABLE tag (a INTEGER NOT NULL, key BLOB NOT NULL, body BLOB NOT NULL, n INTEGER NOT NULL,"
        " sum BLOB NOT NULL, PRIMARY KEY (a, key)) WITHOUT ROWID"
    ),
    (
        "CREATE TABLE checkpoint (n INTEGER PRIMARY KEY AUTOINCREMENT, a INTEGER NOT NULL, b INTEGER NOT NULL,"
        " parent INTEGER NOT NULL, depth INTEGER NOT NULL, base INTEGER NOT NULL, manifest BLOB NOT NULL,"
        " operations BLOB NOT NULL, key BLOB, sum BLOB NOT NULL)"
    ),
    "CREATE INDEX checkpoint_branch ON checkpoint (b, n)",
    "CREATE INDEX checkpoint_key ON checkpoint (key) WHERE key IS NOT NULL",
    (
        "CREATE TABLE validity (a INTEGER NOT NULL, n INTEGER NOT NULL, body BLOB NOT NULL, sum BLOB NOT NULL,"
        " PRIMARY KEY (a, n)) WITHOUT ROWID"
    ),
    "CREATE TABLE tail (n INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE seal (n INTEGER PRIMARY KEY, b INTEGER NOT NULL, places BLOB NOT NULL, sum BLOB NOT NULL)",
    "CREATE INDEX seal_branch ON seal (b, n)",
    "CREATE TABLE node (k INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, data BLOB NOT NULL)",
    "CREATE TABLE metadata (digest BLOB PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID",
    (
        "CREATE TABLE event (e INTEGER PRIMARY KEY AUTOINCREMENT, a INTEGER NOT NULL, at INTEGER NOT NULL,"
        " body BLOB NOT NULL, key BLOB, sum BLOB NOT NULL)"
    ),
    "CREATE INDEX event_agent ON event (a)",
    "CREATE INDEX event_key ON event (key) WHERE key IS NOT NULL",
    (
        "CREATE TABLE line (b INTEGER PRIMARY KEY, origin INTEGER NOT NULL, start INTEGER NOT NULL,"
        " count INTEGER NOT NULL, chain BLOB NOT NULL, sum BLOB NOT NULL)"
    ),
    (
        "CREATE TABLE effect (r INTEGER PRIMARY KEY AUTOINCREMENT, b INTEGER NOT NULL, i INTEGER NOT NULL,"
        " mark INTEGER NOT NULL, refs BLOB NOT NULL, body BLOB NOT NULL, sum BLOB NOT NULL)"
    ),
    "CREATE UNIQUE INDEX effect_line ON effect (b, i)",
    "CREATE INDEX effect_mark ON effect (b, i) WHERE mark = 1",
    "CREATE TABLE pack (p INTEGER PRIMARY KEY, uuid BLOB NOT NULL UNIQUE, size INTEGER NOT NULL, sum BLOB NOT NULL)",
    (
        "CREATE TABLE chunk (digest BLOB PRIMARY KEY, p INTEGER NOT NULL, offset INTEGER NOT NULL, "
        "length INTEGER NOT NULL, stored INTEGER NOT NULL, sum BLOB NOT NULL) WITHOUT ROWID"
    ),
)

TABLE_NAMES = tuple(sql.split()[2] for sql in TABLES if sql.startswith("CREATE TABLE"))

_TYPES = {"INTEGER": int, "BLOB": bytes, "TEXT": str}


def _rows_of(sql: str) -> tuple[str, frozenset[tuple[type, ...]]]:
    """The types that the columns of a table's rows have, the sum aside."""
    front, _, rest = sql.partition(" (")
    rows: list[tuple[type, ...]] = [()]
    for column in rest.rpartition(")")[0].split(", "):
        name, kind, *more = column.split()
        if name in {"UNIQUE", "PRIMARY"}:
            break
        if name != "sum":
            kinds = (_TYPES[kind],) if more else (_TYPES[kind], type(None))
            rows = [(*row, one) for row in rows for one in kinds]
    return front.split()[2], frozenset(rows)


ROWS = dict(_rows_of(sql) for sql in TABLES if sql.startswith("CREATE TABLE"))
"""SQLite takes any type in any column, and whoever writes rows can write sums, too: so both are looked at."""

NUMBERED = {"agent": "a", "branch": "b", "checkpoint": "n", "event": "e", "effect": "r"}
"""Tables whose numbers are never given twice, with their columns: a row that outlives its agent must stay its own."""


def next_number(table: str) -> str:
    """The statement that gives the number of a numbered table's next row."""
    column = NUMBERED[table]
    return (
        f"SELECT max(coalesce((SELECT max({column}) FROM {table}), 0),"  # noqa: S608  constants only
        f" coalesce((SELECT seq FROM sqlite_sequence WHERE name = '{table}'), 0)) + 1"
    )


SUMMED_TABLES = frozenset(TABLE_NAMES) - {"tail", "node", "metadata"}

# SQLite makes this one itself, for AUTOINCREMENT, and stores its text without our hand in it.
_SQLITE_OWN = {"CREATE TABLE sqlite_sequence(name,seq)"}


def create(connection: apsw.Connection) -> None:
    for sql in TABLES:
        connection.execute(sql)


def check(connection: apsw.Connection) -> None:
    """Raise ``Damaged`` unless the database says that it is ours and has exactly the tables of this version."""
    if connection.execute("PRAGMA application_id").get != APPLICATION_ID:
        raise Damaged("store.db: its header does not say that it is a store", what=("store.db header",))
    found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
    expected = set(TABLES) | _SQLITE_OWN
    if found != expected:
        odd = sorted(str(sql).split("(")[0].strip() for sql in found ^ expected)
        raise Damaged(
            f"store.db: its tables are not those of this format: {', '.join(odd)}",
            what=tuple(f"schema: {name}" for name in odd),
        )
