"""One branch whose lease several processes want: what the tests of leases, and the processes that they start, share."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.store.cipher import PLAIN
from holdfast.store.leases import FileLeases
from tests.lives import ask, start

BRANCH = bytes(range(16))


class Row:
    """The one row of a branch that leases look at: its generation, in a database that processes share."""

    def __init__(self, folder):
        self.path = folder / "row.db"
        with self.connect() as made:
            made.execute("CREATE TABLE IF NOT EXISTS row (one PRIMARY KEY, generation)")
            made.execute("INSERT OR IGNORE INTO row VALUES (1, 0)")  # others may come at the same time

    def connect(self):
        return sqlite3.connect(self.path, isolation_level=None, timeout=180)

    def run(self, sql, *args):
        connection = self.connect()
        connection.execute("PRAGMA synchronous = OFF")
        try:
            cursor = connection.execute(sql, args)
            return cursor.fetchone(), cursor.rowcount
        finally:
            connection.close()

    def read(self):
        return self.run("SELECT generation FROM row")[0][0]

    def rise(self, generation):
        return self.run("UPDATE row SET generation = ? WHERE generation = ?", generation + 1, generation)[1] == 1


class Place:
    """One handle on the locks of a store."""

    def __init__(self, folder, cipher=PLAIN):
        self.folder = folder
        (folder / "locks").mkdir(exist_ok=True)
        self.row = Row(folder)
        self.leases = FileLeases(folder / "locks", cipher)

    def take(self, wait_s=0.0, takeover=False, **who):
        return self.leases.take(BRANCH, self.row.read, self.row.rise, who, b=7, wait_s=wait_s, takeover=takeover)

    def again(self, lease):
        return self.leases.again(lease, self.row.read)

    def files(self):
        return sorted(path.name.partition("-")[2] for path in (self.folder / "locks").iterdir())


class Child:
    """Another process with a handle on the same locks."""

    def __init__(self, folder):
        self.process = start("tests.store.lease_place", folder)

    def say(self, word):
        return ask(self.process, word)

    def kill(self):
        self.process.kill()
        self.process.communicate()


def main():
    place = Place(Path(sys.argv[1]))
    for line in sys.stdin:
        try:
            if line == "take\n":
                lease = place.take(program="child")
                print("taken", lease.generation, flush=True)
            elif line == "rest\n":
                lease.rest()
                print("rests", flush=True)
            elif line == "release\n":
                lease.release()
                print("released", flush=True)
            else:
                place.take().release()
                print("free", flush=True)
        except HoldfastError as error:
            print(error.kind, flush=True)


if __name__ == "__main__":
    main()
