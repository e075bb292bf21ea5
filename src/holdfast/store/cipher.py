"""What rows, nodes and chunks look like at rest: as they are, or encrypted and signed when the store has a key.

Owns the one boundary between records in memory and bytes on disk (format.md section 9): everything that is written to
the catalog, to packs and to lock files passes through an object of this module, and so does everything that is read.
Must not know where keys come from. Always true: what does not bear the mark of this store's key, of its kind and of
its very place never becomes a record; a store without a key has exactly the bytes that were given.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from blake3 import blake3
from msgspec import Struct
from ormsgpack import packb

from holdfast.errors import Damaged, HoldfastError, NotAuthentic
from holdfast.store.catalog import HINT, Buffer, row_sum
from holdfast.store.schema import ROWS

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SALT_BYTES = 12
NONCE_BYTES = 12
TAG_BYTES = 16
BOX_BYTES = SALT_BYTES + NONCE_BYTES + TAG_BYTES
"""What a box is longer than its content."""

KEYED_SUM_BYTES = 16

BOXES_PER_SALT = 2**20
"""Boxes under one derived key before a new salt is drawn: their random nonces then never meet (design 008)."""

SALTS_KEPT = 64
"""Derived keys that are kept for reading. Each handle that writes draws its own, so neighbours share one."""

Row = tuple[Any, ...]
R = TypeVar("R")


def damaged_row(table: str, key: object) -> Damaged:
    name = key.hex() if isinstance(key, bytes) else key
    return Damaged(
        f"table {table}, row {name}: its content does not match its sum",
        what=(f"{table} {name}",),
        hint=HINT,
    )


def row_key(table: str, row: Row) -> object:
    """What people are told a row by."""
    return row[1] if table in {"tag", "validity"} else row[0]


class Cipher:
    """A store without a key: every call gives back what it got, sums aside."""

    keyed = False
    overhead = 0
    """How many bytes longer a chunk is in its pack."""

    state = b""
    """The value of the row ``cipher`` in table ``store`` while this key is the store's."""

    def bundle(self, uuid: bytes) -> Cipher:  # noqa: ARG002  the keyed one needs it
        return self

    # Rows that have sums

    def stored(self, table: str, *columns: object) -> Row:
        """A row as it is written, its sum included."""
        return (*columns, row_sum(table, *columns))

    def record(self, table: str, make: Callable[..., R], row: Row) -> R:
        """The record of a row as it was read, if its last column is the sum of the others."""
        columns = row[:-1]
        if row_sum(table, *columns) != row[-1] or tuple(map(type, columns)) not in ROWS[table]:
            raise damaged_row(table, row_key(table, row))
        return make(*columns)

    def loose(self, table: str, row: Row) -> tuple[Row, bool]:
        """The columns of a row whether or not its sum fits, and whether it does."""
        try:
            return row[:-1], row_sum(table, *row[:-1]) == row[-1] and tuple(map(type, row[:-1])) in ROWS[table]
        except HoldfastError:  # a column holds what no row can hold
            return row[:-1], False

    # Columns that are looked up

    def lookup(self, table: str, value: bytes, scope: int = 0) -> bytes:  # noqa: ARG002  the keyed one needs them
        """What a key or digest is stored as. ``scope`` is the agent, where names are the agent's."""
        return value

    def found(self, table: str, stored: bytes) -> bytes:  # noqa: ARG002
        """The digest that is stored so."""
        return stored

    # Bytes without a sum

    def box(self, kind: str, place: object, data: Buffer) -> Buffer:  # noqa: ARG002
        """Bytes as they are written. ``place`` is what they are found by: a number or a digest."""
        return data

    def unbox(self, kind: str, place: object, data: bytes) -> bytes:  # noqa: ARG002
        """The bytes in a box that was made for this very place."""
        return data


PLAIN = Cipher()


class _Secret(Struct, frozen=True):
    """Which columns of a table are hidden: the boxes, the one that is looked up, and whose names those are.

    The first ``width`` columns say which row it is.
    """

    boxes: tuple[int, ...] = ()
    key: int | None = None
    scope: int | None = None
    width: int = 1


_SECRETS = {
    "agent": _Secret((3,), 2),
    "branch": _Secret((4, 6), 3, 1),
    "tag": _Secret((2,), 1, 0, width=2),
    "checkpoint": _Secret((6, 7), 8),
    "validity": _Secret((2,), width=2),
    "seal": _Secret((2,)),
    "event": _Secret((3,), 4),
    "line": _Secret((4,)),
    "effect": _Secret((4, 5)),
    "pack": _Secret(),
    "chunk": _Secret((), 0),
}

OPEN_FACTS = frozenset({"format", "uuid", "created", "cipher"})
"""Rows of table ``store`` that must be read before the key is known. Their sums are keyed all the same."""

_OPEN = _Secret()
_FACT = _Secret((1,))


def _secret(table: str, columns: Row) -> _Secret:
    if table == "store":
        return _OPEN if columns[0] in OPEN_FACTS else _FACT
    return _SECRETS[table]


class Keyed(Cipher):
    """A store with a key. ``master`` are 32 bytes; the store's uuid goes into every key that is derived from them."""

    keyed = True
    overhead = BOX_BYTES

    def __init__(self, master: bytes, uuid: bytes, state: bytes) -> None:
        from hmac import compare_digest

        from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV

        self.state = state
        self._aead = AESGCM
        self._equal = compare_digest
        self._content = derive("content", master, uuid)
        self._sums = derive("sums", master, uuid)
        self._names = AESSIV(derive("names", master, uuid, 64))
        self._bundles = derive("bundles", master, uuid)
        self._known: OrderedDict[bytes, AESGCM] = OrderedDict()
        self._salt = b""
        self._left = 0

    def bundle(self, uuid: bytes) -> Cipher:
        """What a bundle out of this store is encrypted with. Each has a random uuid."""
        return Keyed(self._bundles, uuid, b"")

    # Rows that have sums

    def stored(self, table: str, *columns: object) -> Row:
        row: list[Any] = list(columns)
        secret = _secret(table, columns)
        if secret.key is not None and row[secret.key] is not None:
            row[secret.key] = self._name(table, row[secret.key], row[secret.scope] if secret.scope is not None else 0)
        place = tuple(row[: secret.width])
        for index in secret.boxes:
            if row[index]:  # nothing has nothing to hide, and the sum covers that it is nothing
                row[index] = self._shut(_about(table, index, *place), row[index])
        return (*row, self._sum(table, row))

    def record(self, table: str, make: Callable[..., R], row: Row) -> R:
        columns, fits = row[:-1], False
        try:
            fits = type(row[-1]) is bytes and self._equal(self._sum(table, columns), row[-1])
            if fits and tuple(map(type, columns)) in ROWS[table]:
                return make(*self._opened(table, columns))
        except (HoldfastError, TypeError, ValueError) as error:
            raise self._refused(table, row) from error
        raise self._refused(table, row)

    def loose(self, table: str, row: Row) -> tuple[Row, bool]:
        columns = row[:-1]
        try:
            fits = type(row[-1]) is bytes and self._equal(self._sum(table, columns), row[-1])
        except HoldfastError:
            fits = False
        return self._opened(table, columns, tolerant=True), fits and tuple(map(type, columns)) in ROWS[table]

    def _sum(self, table: str, columns: Any) -> bytes:
        try:
            data = packb((table, *columns))
        except TypeError as error:
            raise damaged_row(table, "?") from error
        return blake3(data, key=self._sums).digest(KEYED_SUM_BYTES)

    def _opened(self, table: str, columns: Row, *, tolerant: bool = False) -> Row:
        """The columns as they were given to ``stored``. Where tolerant, what cannot be opened is empty."""
        row = list(columns)
        secret = _secret(table, columns)
        place = columns[: secret.width]
        for index in secret.boxes:
            if row[index]:
                try:
                    row[index] = self._open(_about(table, index, *place), row[index])
                except (HoldfastError, TypeError, ValueError):
                    if not tolerant:
                        raise
                    row[index] = b""
        if secret.key is not None and row[secret.key] is not None:
            try:
                scope = row[secret.scope] if secret.scope is not None else 0
                row[secret.key] = self._named(table, row[secret.key], scope)
            except (HoldfastError, TypeError, ValueError, OverflowError):
                if not tolerant:
                    raise
                row[secret.key] = b""
        return tuple(row)

    def _refused(self, table: str, row: Row) -> NotAuthentic:
        key = row_key(table, row)
        name = key.hex() if isinstance(key, bytes) else key
        try:
            plain = row_sum(table, *row[:-1]) == row[-1]
        except HoldfastError:
            plain = False
        why = "is not encrypted, and this store is" if plain else "is damaged, or was not written with this store's key"
        return NotAuthentic(f"table {table}, row {name}: it {why}", what=(f"{table} {name}",), hint=HINT)

    # Columns that are looked up

    def lookup(self, table: str, value: bytes, scope: int = 0) -> bytes:
        return self._name(table, value, scope)

    def found(self, table: str, stored: bytes) -> bytes:
        return self._named(table, stored, 0)

    def _name(self, table: str, value: bytes, scope: int) -> bytes:
        return self._names.encrypt(value, [table.encode(), scope.to_bytes(8, "big")])

    def _named(self, table: str, stored: bytes, scope: int) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._names.decrypt(stored, [table.encode(), scope.to_bytes(8, "big")])
        except (InvalidTag, ValueError, TypeError, OverflowError) as error:
            raise _not_ours(f"table {table}: a key", (f"table {table}",)) from error

    # Bytes without a sum

    def box(self, kind: str, place: object, data: Buffer) -> Buffer:
        return self._shut(_about(kind, 0, place), data)

    def unbox(self, kind: str, place: object, data: bytes) -> bytes:
        try:
            return self._open(_about(kind, 0, place), data)
        except Damaged as error:
            name = f"{kind} {place.hex() if isinstance(place, bytes) else place}"
            raise _not_ours(name, (name,)) from error

    def _shut(self, about: bytes, data: Buffer) -> bytes:
        salt, aead = self._writing()
        nonce = os.urandom(NONCE_BYTES)
        return salt + nonce + aead.encrypt(nonce, data, about)

    def _open(self, about: bytes, box: object) -> bytes:
        from cryptography.exceptions import InvalidTag

        if not isinstance(box, bytes) or len(box) < BOX_BYTES:
            raise _not_ours("a box", ())
        nonce_end = SALT_BYTES + NONCE_BYTES
        try:
            return self._for(box[:SALT_BYTES]).decrypt(box[SALT_BYTES:nonce_end], box[nonce_end:], about)
        except InvalidTag as error:
            raise _not_ours("a box", ()) from error

    def _writing(self) -> tuple[bytes, AESGCM]:
        """The salt of this handle's boxes, and the key that it gives. Threads that meet here at worst draw two."""
        self._left -= 1
        if self._left <= 0:
            self._salt, self._left = os.urandom(SALT_BYTES), BOXES_PER_SALT
        salt = self._salt
        return salt, self._for(salt)

    def _for(self, salt: bytes) -> AESGCM:
        known = self._known.get(salt)
        if known is None:
            known = self._aead(blake3(salt, key=self._content).digest())
            self._known[salt] = known
            while len(self._known) > SALTS_KEPT:
                self._known.popitem(last=False)
        return known


def _not_ours(name: str, what: tuple[str, ...]) -> NotAuthentic:
    return NotAuthentic(
        f"{name}: damaged, moved here from elsewhere, or not written with this store's key", what=what, hint=HINT
    )


def _about(kind: str, column: int, *place: object) -> bytes:
    """What a box is bound to besides its key: the kind, the column, and the row or digest that it belongs to."""
    return packb((kind, column, *place))


def derive(purpose: str, master: bytes, uuid: bytes, length: int = 32) -> bytes:
    """A key for one purpose in one store."""
    return blake3(master + uuid, derive_key_context=f"holdfast 2026 store {purpose}").digest(length)
