"""Rows out of the pages of an SQLite database whose trees cannot be trusted.

Owns as much of SQLite's file format as it takes to find records: pages that hold some, their cells, overflow chains and
the write-ahead log's frames. Knows nothing of tables' meaning: it gives whatever looks like a record, old versions and
deleted rows among them, and leaves it to the caller to prove each one. Reads only. Always ends: each page is looked at
once, and a chain visits no page twice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.store.files import Layout

DEFAULT_PAGE_BYTES = 4096
ROW_MAX_BYTES = 1 << 30
COLUMNS_MAX = 32

Cell = None | int | float | str | bytes

_LEAF_TABLE, _LEAF_INDEX, _INNER_INDEX = 0x0D, 0x0A, 0x02
_HEADER_BYTES = 100
_WAL_HEADER_BYTES, _FRAME_BYTES = 32, 24
_WAL_MAGIC = (0x377F0682, 0x377F0683)
_INT_BYTES = (0, 1, 2, 3, 4, 6, 8)


class _NoRecord(Exception):
    """These bytes are not a record."""


@dataclass(frozen=True, slots=True)
class Found:
    """One record: its columns, and the row number where it stood in a table that has them."""

    rowid: int | None
    columns: tuple[Cell, ...]


def read_all(layout: Layout) -> Iterator[Found]:
    """Every record in the database file and its log. Of a row's versions, the one written later comes later."""
    images = _Images(layout.catalog, layout.wal)
    try:
        for age, page in images.pages():
            yield from _records(images, age, page)
    finally:
        images.close()


class _Images:
    """The pages' versions: those of the file (age 0), then those of the log's frames in their order."""

    def __init__(self, catalog: Path, log: Path) -> None:
        self._file = catalog.open("rb")
        header = self._file.read(_HEADER_BYTES)
        size = int.from_bytes(header[16:18], "big") if len(header) == _HEADER_BYTES else 0
        size = 65536 if size == 1 else size
        sound = 512 <= size <= 65536 and not size & (size - 1)
        self.page_bytes = size if sound else DEFAULT_PAGE_BYTES
        reserved = header[20] if sound and len(header) > 20 else 0
        self.usable = self.page_bytes - (reserved if reserved <= 64 else 0)
        self._log = log.read_bytes() if log.exists() else b""
        self._frames: dict[int, list[int]] = {}  # page number -> ages of its versions in the log
        self._find_frames()

    def close(self) -> None:
        self._file.close()

    def _find_frames(self) -> None:
        """All frames of the log's present life, also those behind a wrong sum, where SQLite stops."""
        log = self._log
        if len(log) < _WAL_HEADER_BYTES or struct.unpack_from(">I", log)[0] not in _WAL_MAGIC:
            return
        salt = log[16:24]
        step = _FRAME_BYTES + self.page_bytes
        for age, at in enumerate(range(_WAL_HEADER_BYTES, len(log) - step + 1, step), 1):
            if log[at + 8 : at + 16] == salt:
                self._frames.setdefault(int.from_bytes(log[at : at + 4], "big"), []).append(age)

    def pages(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        while page := self._in_file(number := number + 1):
            yield 0, page
        for age in sorted(age for ages in self._frames.values() for age in ages):
            yield age, self._in_log(age)

    def versions(self, number: int, age: int) -> Iterator[bytes]:
        """A page as it may have been when something of that age was written, the likeliest version first."""
        ages = self._frames.get(number, [])
        yield from (self._in_log(other) for other in reversed(ages) if other <= age)
        page = self._in_file(number)
        if page:
            yield page
        yield from (self._in_log(other) for other in ages if other > age)

    def _in_file(self, number: int) -> bytes:
        self._file.seek((number - 1) * self.page_bytes)
        page = self._file.read(self.page_bytes)
        return page if len(page) == self.page_bytes else b""

    def _in_log(self, age: int) -> bytes:
        at = _WAL_HEADER_BYTES + (age - 1) * (_FRAME_BYTES + self.page_bytes) + _FRAME_BYTES
        return self._log[at : at + self.page_bytes]


def _records(images: _Images, age: int, page: bytes) -> Iterator[Found]:
    """The records of one page, if it is of a kind that has some."""
    start = _HEADER_BYTES if page.startswith(b"SQLite format 3\0") else 0
    kind = page[start]
    if kind not in {_LEAF_TABLE, _LEAF_INDEX, _INNER_INDEX}:
        return
    pointers = start + (12 if kind == _INNER_INDEX else 8)
    count = int.from_bytes(page[start + 3 : start + 5], "big")
    for index in range(min(count, (images.usable - pointers) // 2)):
        at = int.from_bytes(page[pointers + 2 * index : pointers + 2 * index + 2], "big")
        try:
            yield _cell(images, age, page, kind, at)
        except (_NoRecord, IndexError, struct.error):
            continue


def _cell(images: _Images, age: int, page: bytes, kind: int, at: int) -> Found:
    if kind == _INNER_INDEX:
        at += 4
    size, at = _varint(page, at)
    rowid = None
    if kind == _LEAF_TABLE:
        rowid, at = _varint(page, at)
        rowid -= (rowid >> 63) << 64
    if not 2 <= size <= ROW_MAX_BYTES:
        raise _NoRecord
    usable = images.usable
    most = usable - 35 if kind == _LEAF_TABLE else (usable - 12) * 64 // 255 - 23
    local = size
    if size > most:
        least = (usable - 12) * 32 // 255 - 23
        local = least + (size - least) % (usable - 4)
        local = local if local <= most else least
    payload = page[at : at + local]
    if len(payload) != local:
        raise _NoRecord
    if size > local:
        payload += _overflow(images, age, int.from_bytes(page[at + local : at + local + 4], "big"), size - local)
    return Found(rowid, tuple(_columns(payload)))


def _overflow(images: _Images, age: int, number: int, left: int) -> bytes:
    """The rest of a record. Of a page's versions the likeliest is taken; whether it was, the caller's proof tells."""
    parts: list[bytes] = []
    seen: set[int] = set()
    while left:
        page = next(images.versions(number, age), b"")
        if not number or number in seen or not page:
            raise _NoRecord
        seen.add(number)
        piece = page[4 : 4 + min(left, images.usable - 4)]
        parts.append(piece)
        left -= len(piece)
        number = int.from_bytes(page[:4], "big")
    return b"".join(parts)


def _columns(payload: bytes) -> Iterator[Cell]:
    header_bytes, at = _varint(payload, 0)
    if header_bytes > min(len(payload), 9 * (COLUMNS_MAX + 1)):
        raise _NoRecord
    body = header_bytes
    while at < header_bytes:
        kind, at = _varint(payload, at)
        value, body = _value(payload, kind, body)
        yield value
    if at != header_bytes or body != len(payload):
        raise _NoRecord


def _value(payload: bytes, kind: int, at: int) -> tuple[Cell, int]:
    if kind == 0:
        return None, at
    if kind in {8, 9}:
        return kind - 8, at
    if kind <= 7:
        size = 8 if kind == 7 else _INT_BYTES[kind]
    elif kind >= 12:
        size = (kind - 12) // 2
    else:
        raise _NoRecord
    data = payload[at : at + size]
    if len(data) != size:
        raise _NoRecord
    if kind < 7:
        return int.from_bytes(data, "big", signed=True), at + size
    if kind == 7:
        return struct.unpack(">d", data)[0], at + size
    if kind % 2:
        try:
            return data.decode(), at + size
        except UnicodeDecodeError:
            raise _NoRecord from None
    return data, at + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(8):
        byte = data[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    return value << 8 | data[at + 8], at + 9
