"""The format version and the steps from each older one.

Owns the number that a store carries and the functions that raise it, one version and one transaction at a time.
A step gets a connection inside a transaction, with the writers' lock held, and must leave the catalog as the next
version describes it; the caller then writes the new number in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import apsw

from holdfast.codec.values import encode
from holdfast.store.cipher import Cipher

FORMAT_VERSION = 1

Step = Callable[[apsw.Connection], None]

STEPS: Mapping[int, Step] = {}
"""``STEPS[v]`` takes a store of version ``v`` to version ``v + 1``. Version 1 is the first."""


def step_up(connection: apsw.Connection, cipher: Cipher) -> bool:
    """One step, inside a transaction, if the store needs one. A step that is missing is a mistake of this program."""
    version = connection.execute("PRAGMA user_version").get
    if version >= FORMAT_VERSION:
        return False
    STEPS[version](connection)
    _, value, total = cipher.stored("store", "format", encode(version + 1))
    connection.execute("UPDATE store SET value = ?, sum = ? WHERE name = 'format'", (value, total))
    connection.execute(f"PRAGMA user_version={version + 1}")
    return True
