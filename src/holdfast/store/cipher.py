"""What rows, chunks and lock files look like at rest: packed, and encrypted and signed when the store has a key.

Owns the one boundary between values in memory and bytes on disk (format.md section 8), driven by the description of the
tables. Must not know where keys come from. What always holds: a row whose sum does not fit never becomes a value; with
a key, neither does anything that was not written with it, for its very kind and place; without one, the bytes are
exactly those that were given, but for what is packed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import zstandard
from blake3 import blake3
from ormsgpack import packb

from holdfast.errors import Damaged, NotAuthentic
from holdfast.store.engine import Row
from holdfast.store.tables import NUMBER_MAX, TABLES, Table

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Buffer = bytes | bytearray | memoryview

HINT = "`holdfast verify` says what is affected, `holdfast repair` what can be saved."
"""For damage. Right wherever that is met, while verifying as well."""

SUM_BYTES = 8
KEYED_SUM_BYTES = 16
SALT_BYTES = NONCE_BYTES = 12
TAG_BYTES = 16
BOX_BYTES = SALT_BYTES + NONCE_BYTES + TAG_BYTES
"""What a box is longer than its content."""

BOXES_PER_SALT = 2**20
"""Boxes under one derived key before a new salt is drawn: their random nonces then never meet (design 008)."""

SALTS_KEPT = 64
"""Derived keys that are kept for reading. Each handle that writes draws its own, so neighbours share one."""

OPEN_FACTS = frozenset({"format", "uuid", "created"})
"""Rows of table ``store`` that are read before the key is known. Their sums are keyed all the same."""

OPEN_TABLES = frozenset({"slot"})
"""Tables that are read before the key is known: their rows are the same with a key and without."""


COMPRESS_FROM_BYTES = 1024
"""Of a packed column. Below, a frame's header and the time cost more than they save."""

UNCOMPRESSED_MAX_BYTES = 2**31
RAW, ZSTD = b"\0", b"\1"

T = TypeVar("T")


def digest(tag: bytes, *parts: Buffer) -> bytes:
    """``H(tag, data)`` of the format: BLAKE3-256 over ``holdfast.``, the tag, one zero byte and the data."""
    hasher = blake3(b"holdfast." + tag + b"\0")
    for part in parts:
        hasher.update(part)
    return hasher.digest()


# -- packed bytes (format.md section 3) --------------------------------------------------------------------------------

# Contexts that are free. They are dear to make, and not for several threads at once: whoever needs one takes it out and
# puts it back, which are single steps. No thread has one of its own, since many live for one checkpoint.
_packers: list[zstandard.ZstdCompressor] = []
_unpackers: list[zstandard.ZstdDecompressor] = []
_FREE_MOST = 8
"""As many are kept: each has about a megabyte."""


def _taken(free: list[T]) -> T | None:
    try:
        return free.pop()
    except IndexError:
        return None


def _put_back(free: list[T], context: T) -> None:
    if len(free) < _FREE_MOST:
        free.append(context)


def compressed(data: bytes, from_bytes: int = COMPRESS_FROM_BYTES) -> bytes:
    """Bytes as they are stored: a mark, then the bytes, or one zstd frame where that is shorter."""
    if len(data) >= from_bytes:
        packer = _taken(_packers) or zstandard.ZstdCompressor(level=1)
        packed = packer.compress(data)
        _put_back(_packers, packer)
        if len(packed) < len(data):
            return ZSTD + packed
    return RAW + data


def uncompressed(data: bytes, most: int = UNCOMPRESSED_MAX_BYTES) -> bytes:
    """What ``compressed`` was given. A frame must say its length, and that is bounded before it is believed."""
    mark, data = data[:1], data[1:]
    if mark == RAW:
        return data
    try:
        size = zstandard.frame_content_size(data) if mark == ZSTD else -1
        if 0 <= size <= most:
            unpacker = _taken(_unpackers) or zstandard.ZstdDecompressor()
            found = unpacker.decompress(data, max_output_size=size, allow_extra_data=False)
            _put_back(_unpackers, unpacker)
            return found
    except zstandard.ZstdError as error:
        raise Damaged("a compressed object cannot be read", hint=HINT) from error
    raise Damaged("a stored object does not follow the format", hint=HINT)


class Cipher:
    """A store without a key."""

    keyed = False
    overhead = 0
    """How many bytes longer a box is than its content."""

    def stored(self, table: str, *values: Any) -> Row:
        """A row as it is written, its sum included."""
        spec = TABLES[table]
        if spec.packed:
            values = _each_packed(spec, values, compressed)
        return (*values, self._sum(spec, values[: spec.covered])) if spec.summed else values

    def head(self, table: str, *values: Any) -> Row:
        """The columns that a sum covers, as they are written, and the sum: where only they change."""
        return (*values, self._sum(TABLES[table], values))

    def loaded(self, table: str, row: Row) -> Row:
        """The values of a row as it was read, if its sum is right and they are of the right types."""
        spec = TABLES[table]
        values = self._proven(spec, row)
        return _each_packed(spec, values, uncompressed) if spec.packed else values

    def _proven(self, spec: Table, row: Row) -> Row:
        values = row[:-1] if spec.summed else row
        if spec.summed and self._sum(spec, values[: spec.covered]) != row[-1]:
            raise damaged(spec, row)
        if list(map(type, values)) != spec.types:
            raise damaged(spec, row)
        for at in spec.numbers:
            if not 0 <= values[at] <= NUMBER_MAX:
                raise Damaged(
                    f"{_called(spec, row)}: it holds an impossible number", what=(_called(spec, row),), hint=HINT
                )
        return values

    def covered(self, table: str, row: Row) -> Row:
        """The columns that a sum covers, as they are stored, of a row that was read without the others."""
        spec = TABLES[table]
        if self._sum(spec, row[:-1]) != row[-1]:
            raise damaged(spec, row)
        return row[:-1]

    def _sum(self, spec: Table, covered: Sequence[Any]) -> bytes:
        try:
            return blake3(b"holdfast.row\0" + packb((spec.name, *covered))).digest(SUM_BYTES)
        except TypeError as error:  # a damaged row holds something else
            raise damaged(spec, covered) from error

    def name(self, table: str, value: bytes, scope: int = 0) -> bytes:  # noqa: ARG002  the keyed one needs them
        """What a name is stored as. ``scope`` is the agent, where names are the agent's."""
        return value

    def unname(self, table: str, stored: bytes, scope: int = 0) -> bytes:  # noqa: ARG002
        return stored

    def box(self, kind: str, place: object, data: Buffer) -> Buffer:  # noqa: ARG002
        """Bytes as they are written. ``place`` is what they are found by."""
        return data

    def unbox(self, kind: str, place: object, data: bytes) -> bytes:  # noqa: ARG002
        """The bytes in a box that was made for this very place."""
        return data


def _each_packed(spec: Table, values: Row, how: Callable[[bytes], bytes]) -> Row:
    """A row with its packed columns done so: packed, or as they were before."""
    return tuple(how(value) if value and at in spec.packed else value for at, value in enumerate(values))


PLAIN = Cipher()


class Keyed(Cipher):
    """A store with a key. ``master`` are 32 bytes; the store's uuid goes into every key that is derived from them."""

    keyed = True
    overhead = BOX_BYTES

    def __init__(self, master: bytes, uuid: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV

        self._aead = AESGCM
        self._content = derive("content", master, uuid)
        self._sums = derive("sums", master, uuid)
        self._bundles = derive("bundles", master, uuid)
        self._names = AESSIV(derive("names", master, uuid, 64))
        self._known: OrderedDict[bytes, AESGCM] = OrderedDict()
        self._salt = b""
        self._left = 0

    def bundle(self, uuid: bytes) -> Keyed:
        """What a bundle out of this store is encrypted with. Each has a random uuid."""
        return Keyed(self._bundles, uuid)

    def stored(self, table: str, *values: Any) -> Row:
        if table in OPEN_TABLES:
            return PLAIN.stored(table, *values)
        spec = TABLES[table]
        row = self._named(spec, _each_packed(spec, values, compressed) if spec.packed else values)
        if not (table == "store" and row[0] in OPEN_FACTS):
            place = [row[at] for at in spec.keys]
            for at in spec.boxes:
                if row[at]:  # nothing has nothing to hide, and the sum covers that it is nothing
                    row[at] = self.box(f"{table}.{spec.columns[at].name}", place, row[at])
        return (*row, self._sum(spec, row[: spec.covered])) if spec.summed else tuple(row)

    def head(self, table: str, *values: Any) -> Row:
        spec = TABLES[table]
        if any(at < spec.covered for at in spec.boxes):
            raise TypeError(f"rows of {table} are written whole")
        row = self._named(spec, values)
        return (*row, self._sum(spec, row))

    def _named(self, spec: Table, values: Sequence[Any]) -> list[Any]:
        row = list(values)
        scope = row[spec.scope] if spec.scope is not None else 0
        for at in spec.looked_up:
            if row[at]:
                row[at] = self.name(spec.name, row[at], scope)
        return row

    def loaded(self, table: str, row: Row) -> Row:
        if table in OPEN_TABLES:
            return PLAIN.loaded(table, row)
        spec = TABLES[table]
        try:
            values = list(self._proven(spec, row))
        except Damaged as error:
            raise NotAuthentic(
                f"{_called(spec, row)}: it is damaged, or was not written with this store's key",
                what=(_called(spec, row),),
                hint=HINT,
            ) from error
        if table == "store" and values[0] in OPEN_FACTS:
            return tuple(values)
        place = [values[at] for at in spec.keys]
        scope = values[spec.scope] if spec.scope is not None else 0
        for at in spec.boxes:
            if values[at]:
                values[at] = self.unbox(f"{table}.{spec.columns[at].name}", place, values[at])
        for at in spec.looked_up:
            if values[at]:
                values[at] = self.unname(table, values[at], scope)
        return _each_packed(spec, tuple(values), uncompressed) if spec.packed else tuple(values)

    def _sum(self, spec: Table, covered: Sequence[Any]) -> bytes:
        try:
            return blake3(packb((spec.name, *covered)), key=self._sums).digest(KEYED_SUM_BYTES)
        except TypeError as error:
            raise damaged(spec, covered) from error

    def name(self, table: str, value: bytes, scope: int = 0) -> bytes:
        return self._names.encrypt(value, [table.encode(), scope.to_bytes(8, "big")])

    def unname(self, table: str, stored: bytes, scope: int = 0) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._names.decrypt(stored, [table.encode(), scope.to_bytes(8, "big")])
        except (InvalidTag, ValueError, TypeError, OverflowError) as error:
            raise _not_ours(f"table {table}: a name", f"table {table}") from error

    def box(self, kind: str, place: object, data: Buffer) -> bytes:
        salt, aead = self._writing()
        nonce = os.urandom(NONCE_BYTES)
        return salt + nonce + aead.encrypt(nonce, data, packb((kind, place)))

    def unbox(self, kind: str, place: object, data: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        body = SALT_BYTES + NONCE_BYTES
        try:
            return self._for(data[:SALT_BYTES]).decrypt(data[SALT_BYTES:body], data[body:], packb((kind, place)))
        except (InvalidTag, ValueError, TypeError) as error:
            shown = place.hex() if isinstance(place, bytes) else place
            raise _not_ours(f"{kind} {shown}", f"{kind} {shown}") from error

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
            known = self._known[salt] = self._aead(blake3(salt, key=self._content).digest())
            while len(self._known) > SALTS_KEPT:
                self._known.popitem(last=False)
        return known


def derive(purpose: str, master: bytes, uuid: bytes, length: int = 32) -> bytes:
    """A key for one purpose in one store."""
    return blake3(master + uuid, derive_key_context=f"holdfast 2026 store {purpose}").digest(length)


def damaged(spec: Table, row: Sequence[Any]) -> Damaged:
    called = _called(spec, row)
    return Damaged(f"{called}: its content does not match its sum", what=(called,), hint=HINT)


def _called(spec: Table, row: Sequence[Any]) -> str:
    """What people are told a row by."""
    key = [row[at] for at in spec.keys][-1] if len(row) > spec.keys[-1] else "?"
    return f"{spec.name} {key.hex() if isinstance(key, bytes) else key}"


def _not_ours(name: str, what: str) -> NotAuthentic:
    return NotAuthentic(
        f"{name}: damaged, moved here from elsewhere, or not written with this store's key", what=(what,), hint=HINT
    )
