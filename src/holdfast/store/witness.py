"""The witness: what the newest acknowledged commit was, kept beside the catalog.

Owns the file ``witness`` (format.md section 5). It is written under the writers' lock after a commit's flush returned,
so it is never ahead of the catalog; a catalog that is behind it has lost commits that somebody was told are safe.
It is not flushed itself: after a power cut it may be older than the catalog, which proves nothing and is no damage.
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import suppress
from pathlib import Path

from blake3 import blake3
from msgspec import Struct

SLOT_BYTES = 64
WITNESS_BYTES = 2 * SLOT_BYTES
ID_PREFIX_BYTES = 16

_SLOT = struct.Struct(">4s4xQQQQ16s")
_MAGIC = b"HFWT"


class Witness(Struct, frozen=True):
    """What one slot says: the newest numbers of checkpoints, events and effects ever given, the checkpoint's id."""

    sequence: int
    n: int
    e: int
    r: int
    id_prefix: bytes


class WitnessReport(Struct, frozen=True):
    """``newest`` is what counts, None when no slot says anything; ``problems`` are for people, one line each."""

    newest: Witness | None
    problems: tuple[str, ...]


EMPTY = Witness(0, 0, 0, 0, bytes(ID_PREFIX_BYTES))


def pack_slot(witness: Witness) -> bytes:
    body = _SLOT.pack(_MAGIC, witness.sequence, witness.n, witness.e, witness.r, witness.id_prefix)
    return body + blake3(b"holdfast.witness\0" + body).digest(8)


def unpack_slot(slot: bytes) -> Witness | None:
    """The slot's content, or None when these are not 64 bytes that were written as one slot."""
    body = slot[:-8]
    if len(slot) != SLOT_BYTES or blake3(b"holdfast.witness\0" + body).digest(8) != slot[-8:]:
        return None
    magic, sequence, n, e, r, id_prefix = _SLOT.unpack(body)
    return Witness(sequence, n, e, r, id_prefix) if magic == _MAGIC and body[4:8] == bytes(4) else None


def initial() -> bytes:
    """The content of a new store's witness. Both slots are valid, so that an unreadable one is always damage."""
    return pack_slot(EMPTY) * 2


def newest(content: bytes) -> Witness | None:
    slots = [unpack_slot(content[:SLOT_BYTES]), unpack_slot(content[SLOT_BYTES:WITNESS_BYTES])]
    return max((slot for slot in slots if slot is not None), key=lambda slot: slot.sequence, default=None)


def witness_report(path: Path) -> WitnessReport:
    """Read the witness of the store in directory ``path``, and say what is wrong with it."""
    try:
        content = (path / "witness").read_bytes()
    except FileNotFoundError:
        return WitnessReport(None, ("witness: the file is missing",))
    except OSError as error:
        return WitnessReport(None, (f"witness: cannot be read ({error.strerror})",))
    problems = []
    if len(content) != WITNESS_BYTES:
        problems.append(f"witness: {len(content)} bytes instead of {WITNESS_BYTES}")
    for number, start in enumerate((0, SLOT_BYTES)):
        if unpack_slot(content[start : start + SLOT_BYTES]) is None:
            problems.append(f"witness: slot {number} is unreadable")
    return WitnessReport(newest(content), tuple(problems))


class WitnessFile:
    """The open witness of a writer. Every call happens under the writers' lock of the store.

    ``also`` is a second one in another place that is told the same.
    """

    def __init__(self, path: Path, also: WitnessFile | None = None) -> None:
        self._also = also
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._content = b""
        self._newest = EMPTY
        self._slot = 0
        self.failure: OSError | None = None

    def record(self, n: int, e: int, r: int, checkpoint_id: bytes) -> None:
        """Note a commit that is durable. 0 and empty stand for "nothing new of this kind".

        A failure is kept for the report and not raised: the commit itself is safe, only this proof of it is missing.
        """
        try:
            self._note(n, e, r, checkpoint_id)
        except OSError as error:
            self.failure = error
        if self._also is not None:
            self._also.record(n, e, r, checkpoint_id)

    def _note(self, n: int, e: int, r: int, checkpoint_id: bytes) -> None:
        self._catch_up()
        last = self._newest
        newer = checkpoint_id and n >= last.n
        prefix = checkpoint_id[:ID_PREFIX_BYTES] if newer else last.id_prefix
        self._write(Witness(last.sequence + 1, max(n, last.n), max(e, last.e), max(r, last.r), prefix))

    def replace(self, n: int, e: int, r: int, checkpoint_id: bytes) -> None:
        """Make the witness agree with the catalog after somebody accepted a loss; raises OSError."""
        self._catch_up()
        prefix = checkpoint_id[:ID_PREFIX_BYTES] or EMPTY.id_prefix
        for _ in range(2):  # both slots, or the old one would count again as soon as the new one were torn
            self._write(Witness(self._newest.sequence + 1, n, e, r, prefix))
        os.fsync(self._fd)
        if self._also is not None:
            self._also.replace(n, e, r, checkpoint_id)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # it is not flushed either: what it lacks it may lack
                os.close(fd)

    def _catch_up(self) -> None:
        content = os.pread(self._fd, WITNESS_BYTES, 0)
        if content == self._content:
            return
        # Another process wrote since. The slot that does not count is the one to write next.
        found = newest(content)
        self._newest = found or EMPTY
        self._slot = 1 if found is not None and unpack_slot(content[:SLOT_BYTES]) == found else 0
        self._content = content

    def _write(self, witness: Witness) -> None:
        slot = pack_slot(witness)
        start = self._slot * SLOT_BYTES
        old = self._content.ljust(WITNESS_BYTES, b"\0")
        done = 0
        while done < SLOT_BYTES:
            written = os.pwrite(self._fd, slot[done:], start + done)
            if not written:
                raise OSError(errno.EIO, "nothing was written")
            self._content = b""  # until all of it is there, it is not known what is
            done += written
        self._content = old[:start] + slot + old[start + SLOT_BYTES :]
        self._newest = witness
        self._slot = 1 - self._slot
