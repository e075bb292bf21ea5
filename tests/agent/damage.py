"""A small store with every kind of row, all that can be read of it, and ways to damage it while nobody has it open."""

from __future__ import annotations

import random
from contextlib import contextmanager

import apsw

import holdfast
from holdfast.agent.background import fold_below
from holdfast.agent.store import Store
from holdfast.store.changes import NewRecord
from holdfast.store.tables import TABLES
from tests.faults import rich
from tests.limits import limits

KEY = "5e" * 32


def small_limits():
    return limits({**rich.SMALL, "SEAL_CHECKPOINTS": 9})


@contextmanager
def opened(path, *, readonly=True, key=False, **options):
    """The store without the room of runs, so that records may say anything."""
    store = Store.opened(path, readonly=readonly, key=key, **options)
    try:
        yield store
    finally:
        store.close()


# -- a store ----------------------------------------------------------------------------------------------------------


def write(agent, *records):
    """Records of what happened outside, at the end of an agent's line."""
    agent._writer.append([NewRecord(mark, b"", body) for mark, body in records], flush=True)


def fill(store):
    """Loose checkpoints and segments, records, bulk values, tags, judgements, a rollback, a branch, a copy."""
    made = random.Random(3)
    agent = store.agent("a")
    agent.state["log"] = []
    for number in range(24):
        agent.state["log"].append(f"{number}: hello " * 15)
        if number % 5 == 0:
            write(agent, (1, b"began %d" % number), (0, b"did %d" % number))
        if number == 7:
            agent.state["bulk"] = made.randbytes(4000)
        if number == 15:
            agent.state["bulk"] = b"x" * 9000
        agent.checkpoint(f"c{number}")
    agent.tag("early", "c3")
    agent.tag("late", "c9")
    agent.mark("c5", "suspect", "a test said so")
    agent.rollback("c12")  # leaves a line that no branch reaches
    agent.state["log"].append("another line")
    agent.checkpoint("d1")
    side = agent.branch("side", at="c4")
    side.state["x"] = 1
    side.checkpoint("side")
    write(side, (1, b"on the side"))
    store.copy("a", "twin")
    twin = store.agent("twin")
    twin.state["y"] = {"deep": ["z" * 90] * 9}
    twin.checkpoint("twin")
    store.agent("empty")
    store.flush()


def build(path, key=False, page_size=4096):
    with small_limits(), opened(path, readonly=False, key=key) as store:
        fill(store)
        store._tending.stop()
        fold_below(store._db, 9)
        fold_below(store._db, 18)
    if page_size != 4096:  # smaller pages leave less unused room between rows
        connection = apsw.Connection(str(path / "store.db"))
        connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        connection.execute(f"PRAGMA page_size={page_size}; VACUUM")
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.close()
    for name in ("store.db-wal", "store.db-shm"):
        (path / name).unlink(missing_ok=True)


def picture(store):
    """Everything that can be read of each agent, by what identifies it."""
    view = store._db.view
    found = {}
    for row in store._agents():
        agent = store.agent(row.name, readonly=True)
        states, about, branches = {}, {}, {}
        for one in agent.log(all=True):
            states[one.id] = (one.digest, repr(holdfast.plain(one.state)), one.label, one.depth)
            about[one.id] = (one.previous_id, one.validity, one.metadata.get("caller"))
        for one in view.branches(row.a):
            records = [(record.i, record.mark, record.digest, record.body) for record in view.line(one.line)]
            branches[one.name] = (one.id.hex(), one.depth, one.end.position, records)
        tags = {name: one.id for name, one in agent.tags().items()}
        found[row.name] = {"states": states, "about": about, "branches": branches, "tags": tags}
    return found


def pictured(path, key=False):
    with opened(path, key=key) as store:
        return picture(store)


# -- damage -----------------------------------------------------------------------------------------------------------


def rows(path, statement, *values):
    """What one statement finds in the database of a store that nobody has open."""
    connection = apsw.Connection(str(path / "store.db"))
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.close()


def spoil(path, statement, *values):
    """Run one statement there; returns how many rows it changed."""
    connection = apsw.Connection(str(path / "store.db"))
    try:
        connection.execute(statement, values)
        return connection.changes()
    finally:
        connection.close()


def every_row(path):
    """Every row: its table, its key columns, its values."""
    for table, spec in TABLES.items():
        keys = [spec.columns[at].name for at in spec.keys]
        for row in rows(path, f"SELECT {spec.listed} FROM {table}"):
            yield table, keys, row


def delete(path, table, keys, row):
    where = " AND ".join(f"{name} = ?" for name in keys)
    return spoil(path, f"DELETE FROM {table} WHERE {where}", *(row[at] for at in TABLES[table].keys))


def put(path, table, row):
    listed = TABLES[table].listed
    spoil(path, f"INSERT OR REPLACE INTO {table} ({listed}) VALUES ({', '.join('?' * len(row))})", *row)


def flipped(data, at=-1):
    changed = bytearray(data)
    changed[at] ^= 0x40
    return bytes(changed)


def spoil_payload(path, n, at=-1):
    """Flip a bit of a checkpoint that lies alone: the last bytes are operations, the first the manifest."""
    ((data,),) = rows(path, "SELECT data FROM loose WHERE n = ?", n)
    spoil(path, "UPDATE loose SET data = ? WHERE n = ?", flipped(data, at), n)
