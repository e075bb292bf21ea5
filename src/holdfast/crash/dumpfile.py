"""The dump file: its bytes, the gate through which everything that is written goes, and how a dump is built of parts.

Owns the layout (docs/dump-format.md), the head, how each part ended, and the source text of files that stacks name.
Must not know where the rest of the content comes from: inside.py and outside.py have it. Holds always: a chunk is on
the disk whole or is recognised as broken; nothing is written that the redactor still suspects; nothing that a file
declares is believed before it was compared with the bounds; a part that fails, finds no time or no room is named with
its reason and costs the others nothing; sources are regular files, opened without blocking.

    file  = magic chunk*
    magic = 89 "HOLDFAST-DUMP" 0D 0A                      16 bytes
    chunk = mark "HFck", kind 4 ASCII, number u32, version u16, 0 u16, stored u64, raw u64,
            sum of payload 16, sum of header 16, payload  64 bytes of header, big-endian
    sum   = the first 16 bytes of BLAKE3("holdfast.dump" 00 data)
    payload = zstd of one MessagePack value
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import ormsgpack
import zstandard
from blake3 import blake3

from holdfast.crash import kinds
from holdfast.crash.kinds import MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_FILE_BYTES, Limits
from holdfast.crash.redaction import Redactor
from holdfast.errors import CorruptValue, DiskFull, DumpFailed, HoldfastError, NewerFormat, NotADump

MAGIC = b"\x89HOLDFAST-DUMP\r\n"
MARK = b"HFck"
HEADER = struct.Struct(">4s4sIHHQQ16s16s")
_FRONT = HEADER.size - 16  # what the header's own sum covers
_SCAN_BYTES = 1 << 20

# Foreign types must never be packed by the library's own ideas: a dataclass's fields could be properties.
OPTION = (
    ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_UUID
)


def _sum(data: bytes) -> bytes:
    return blake3(b"holdfast.dump\0" + data).digest()[:16]


@dataclass(frozen=True)
class Chunk:
    """Where one chunk lies. ``problem`` says what is wrong with it, if anything is."""

    kind: str
    number: int
    offset: int
    stored: int
    raw: int
    sum: bytes
    problem: str = ""


class Writer:
    """Appends chunks to a new file that only its owner may read, or to one that was read (``append``)."""

    def __init__(
        self, path: Path, redactor: Redactor, *, limit_bytes: int = MAX_FILE_BYTES, behind: Reader | None = None
    ) -> None:
        self.path = path
        before = behind.chunks if behind else []
        self.chunks = [[item.kind, item.number, item.offset, item.stored, item.raw, item.sum] for item in before]
        self.size = behind.size if behind else 0
        self._redactor = redactor
        self._limit = limit_bytes
        how = os.O_NOFOLLOW if behind else os.O_CREAT | os.O_EXCL
        try:
            self._file = os.open(path, how | os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND, 0o600)
        except OSError as error:
            raise _failed(f"the dump {path} cannot be {'added to' if behind else 'created'}", error) from error
        self._nothing = not behind  # it holds no chunk yet
        if not behind:
            try:
                self._put(MAGIC)
            except HoldfastError:
                self.close()
                raise

    def add(self, kind: str, payload: Any, *, nodes: str = "", source: bool = False) -> bool:
        """Write one chunk. False, and nothing written, when it would not fit the file's limit.

        ``nodes`` names a list in the payload whose members may be replaced one by one when they are not clean, and
        which may be spread over several chunks, with ``first`` counting on.
        """
        packed = self._gate(payload, nodes, source)
        if len(packed) > MAX_CHUNK_BYTES:
            many = payload[nodes] if nodes else ()
            if not many:
                return False
            if len(many) == 1:
                cut = [[kinds.CUT, many[0][1], kinds.BUDGET]]
                return many != cut and self.add(kind, {**payload, nodes: cut}, nodes=nodes)
            half = len(many) // 2
            rest = {**payload, nodes: many[half:], "first": payload["first"] + half}
            return self.add(kind, {**payload, nodes: many[:half]}, nodes=nodes) and self.add(kind, rest, nodes=nodes)
        if len(self.chunks) >= MAX_CHUNKS - 1:
            return False
        body = zstandard.ZstdCompressor(level=3).compress(packed)
        if self.size + len(body) + HEADER.size > self._limit and kind != kinds.INDEX:
            return False
        summed = _sum(body)
        front = HEADER.pack(
            MARK, kind.encode(), len(self.chunks), kinds.VERSION, 0, len(body), len(packed), summed, b""
        )[:_FRONT]
        self.chunks.append([kind, len(self.chunks), self.size, len(body), len(packed), summed])
        self._put(front + _sum(front) + body)
        self._nothing = False
        return True

    def finish(self, parts: dict[str, list[str]]) -> None:
        """Write the index and let the disk have everything. ``parts``: kind -> [state, reason]."""
        self.add(kinds.INDEX, {"chunks": [*self.chunks], "parts": parts, "redacted": self._redactor.hits})
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _failed(f"the dump {self.path} could not be flushed", error) from error

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if self._nothing:  # it would look like a dump
                self.path.unlink(missing_ok=True)

    def _gate(self, payload: Any, nodes: str, source: bool) -> bytes:
        suspicious = self._redactor.suspicious
        try:
            packed = ormsgpack.packb(payload, option=OPTION)
        except (TypeError, ValueError, RecursionError):  # lone surrogates, a huge integer: scrub makes them plain
            packed = b""
        if packed and not suspicious(packed, source=source):
            return packed
        payload = self._redactor.scrub(payload, source=source)
        packed = ormsgpack.packb(payload, option=OPTION)
        if not suspicious(packed, source=source, strict=True):
            return packed
        # Texts are clean now. What is left is made of other things: a list of small numbers can spell a key.
        if nodes:
            payload[nodes] = [
                [kinds.CUT, node[1], kinds.REDACTED] if self._dirty(node, source) else node for node in payload[nodes]
            ]
            packed = ormsgpack.packb(payload, option=OPTION)
            if not suspicious(packed, source=source, strict=True):
                return packed
        return ormsgpack.packb(self._purged(payload, source), option=OPTION)

    def _dirty(self, value: Any, source: bool) -> bool:
        return self._redactor.suspicious(ormsgpack.packb(value, option=OPTION), source=source, strict=True)

    def _purged(self, value: Any, source: bool) -> Any:
        """The value without the smallest containers that are not clean."""
        if not self._dirty(value, source):
            return value
        inside: Any = None
        if type(value) is list:
            inside = [self._purged(item, source) for item in value]
        elif type(value) is dict:
            inside = {key: self._purged(item, source) for key, item in value.items()}
        return inside if inside and not self._dirty(inside, source) else "[redacted]"

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise _failed(f"the dump {self.path} could not be written", error) from error
        self.size += len(data)


def append(path: Path, redactor: Redactor) -> tuple[Writer, dict[str, list[str]]]:
    """Go on writing a dump that is whole: a writer behind its end, and the states of the parts so far.

    A damaged one is left alone (CorruptValue): what is added behind a chunk that was cut would be taken for its rest.
    """
    reader = Reader(path)
    try:
        if reader.gaps or not reader.chunks or any(chunk.problem for chunk in reader.chunks):
            raise CorruptValue(f"{path} is damaged, so nothing is added to it")
        newest: Any = None
        for chunk in reader.of(kinds.INDEX):
            newest = reader.payload(chunk)
        writer = Writer(path, redactor, behind=reader)
    finally:
        reader.close()
    told = newest.get("parts") if isinstance(newest, dict) else None
    parts = {
        kind: state
        for kind, state in (told if isinstance(told, dict) else {}).items()
        if isinstance(state, list) and len(state) == 2 and all(isinstance(item, str) for item in state)
    }
    hits = newest.get("redacted") if isinstance(newest, dict) else None
    for kind, count in hits.items() if isinstance(hits, dict) else ():
        if isinstance(count, int):
            redactor.hits[kind] = redactor.hits.get(kind, 0) + count
    return writer, parts


def _failed(what: str, error: OSError) -> DumpFailed | DiskFull:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{what}: no room on the disk")
    return DumpFailed(f"{what}: {error.strerror}")


class Reader:
    """Reads chunks of a file that may be cut, damaged or hostile. Opens nothing else, keeps one descriptor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotADump(f"{path} cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(self._file)
            self.size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise NotADump(f"{path} is not a file")
            if self._at(0, len(MAGIC)) != MAGIC:
                raise NotADump(f"{path} is not a Holdfast dump")
            if self.size > MAX_FILE_BYTES:
                raise CorruptValue(f"{path} is larger than a dump can be ({self.size:,} bytes)")
            self.gaps: list[str] = []
            self.chunks = list(self._headers())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def body(self, chunk: Chunk) -> bytes:
        """The chunk's stored bytes, proven by their sum. CorruptValue when they are not what was written."""
        if chunk.problem:
            raise CorruptValue(f"{self._where(chunk)} {chunk.problem}", what=(chunk.kind,))
        body = self._at(chunk.offset + HEADER.size, chunk.stored)
        if len(body) != chunk.stored or _sum(body) != chunk.sum:
            raise CorruptValue(f"{self._where(chunk)} is damaged: its sum does not fit", what=(chunk.kind,))
        return body

    def payload(self, chunk: Chunk) -> Any:
        """The chunk's content. CorruptValue when it is not what was written."""
        body = self.body(chunk)
        try:
            # The frame's own size is what the library allocates, so it is compared first.
            if zstandard.frame_content_size(body) != chunk.raw:
                raise CorruptValue(f"{self._where(chunk)} has another length than it says", what=(chunk.kind,))
            packed = zstandard.ZstdDecompressor(max_window_size=1 << 23).decompress(body, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError) as error:
            raise CorruptValue(f"{self._where(chunk)} cannot be decompressed", what=(chunk.kind,)) from error
        if len(packed) != chunk.raw:
            raise CorruptValue(f"{self._where(chunk)} has another length than it says", what=(chunk.kind,))
        try:
            return ormsgpack.unpackb(packed)
        except (ValueError, RecursionError, MemoryError) as error:
            raise CorruptValue(f"{self._where(chunk)} is not MessagePack: {error}", what=(chunk.kind,)) from error

    def of(self, kind: str) -> Iterator[Chunk]:
        return (chunk for chunk in self.chunks if chunk.kind == kind)

    def _where(self, chunk: Chunk) -> str:
        return f"{self.path}: chunk {chunk.number} ({kinds.PARTS.get(chunk.kind, chunk.kind)}) at byte {chunk.offset:,}"

    def _at(self, offset: int, count: int) -> bytes:
        pieces = []
        while count > 0:
            piece = os.pread(self._file, min(count, _SCAN_BYTES), offset)
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            count -= len(piece)
        return b"".join(pieces)

    def _headers(self) -> Iterator[Chunk]:
        offset = len(MAGIC)
        found = 0
        while offset < self.size and found < MAX_CHUNKS:
            chunk, problem = self._header(offset)
            if chunk is None:
                after = self._next_mark(offset + 1)
                self.gaps.append(f"bytes {offset:,} to {after:,}: {problem}")
                offset = after
                continue
            found += 1
            yield chunk
            offset += HEADER.size + chunk.stored
        if offset < self.size:
            self.gaps.append(f"bytes {offset:,} to {self.size:,}: more chunks than a dump can have")

    def _header(self, offset: int) -> tuple[Chunk | None, str]:
        data = self._at(offset, HEADER.size)
        if len(data) < HEADER.size:
            return None, "the file ends inside a header"
        mark, kind, number, version, _zero, stored, raw, summed, own = HEADER.unpack(data)
        if mark != MARK or own != _sum(data[:_FRONT]):
            return None, "damaged header"
        if version > kinds.VERSION:
            raise NewerFormat(f"{self.path} was written by a newer Holdfast (dump version {version})")
        if raw > MAX_CHUNK_BYTES or stored > MAX_CHUNK_BYTES + 65_536:
            return None, "a chunk larger than a chunk can be"
        problem = "" if offset + HEADER.size + stored <= self.size else "is cut: the file ends inside it"
        return Chunk(kind.decode("latin-1"), number, offset, stored, raw, summed, problem), ""

    def _next_mark(self, offset: int) -> int:
        """The next place that may be a chunk. Linear, so that a hostile file gains nothing."""
        while offset < self.size:
            block = self._at(offset, _SCAN_BYTES + len(MARK) - 1)
            at = block.find(MARK)
            if at >= 0:
                return offset + at
            offset += max(1, len(block) - len(MARK) + 1)
        return self.size


# -- source text -----------------------------------------------------------------------------------------------------


_WHOLE_BYTES = 200_000  # a larger file is embedded around the lines that matter
_AROUND = 60  # lines
_READ_BYTES = 4 << 20


def embed(files: dict[str, list[int]], mine: Any, budget: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of sources, the program's own files first, and the names of those that are not there."""
    found = []
    missing = []
    named = [name for name in files if not name.startswith("<frozen ")]
    for name in sorted(named, key=lambda file: (not mine(file), file)):
        text, changed = _read(name)
        if text is None:
            missing.append(name)
            continue
        first, whole = 1, True
        if len(text) > _WHOLE_BYTES or len(text) > budget:
            first, text = _window(text, files[name])
            whole = False
        if len(text) > budget:
            missing.append(name)
            continue
        budget -= len(text)
        found.append({"file": name, "first": first, "text": text, "whole": whole, "changed": changed})
    return found, missing


def _read(name: str) -> tuple[str | None, bool]:
    """The file's text, and whether it was changed after this process began."""
    cached = _from_linecache(name)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):
        return cached, False
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _READ_BYTES:
            return cached, False
        data = b""
        while len(data) <= _READ_BYTES and (piece := os.read(handle, _READ_BYTES)):
            data += piece
    except OSError:
        return cached, False
    finally:
        os.close(handle)
    changed = status.st_mtime > _began()
    if changed and cached is not None:
        return cached, False  # what the interpreter showed last is older, and more likely what runs
    return data.decode("utf-8", "replace"), changed


def _from_linecache(name: str) -> str | None:
    """What notebooks and `python -c` leave there for tracebacks."""
    module = sys.modules.get("linecache")
    entry = module.__dict__["cache"].get(name) if module is not None else None
    if type(entry) is tuple and len(entry) == 4 and type(entry[2]) is list:
        return "".join(line for line in entry[2] if type(line) is str)
    return None


def _window(text: str, lines: list[int]) -> tuple[int, str]:
    every = text.splitlines(keepends=True)
    first = max(1, min(lines) - _AROUND)
    last = min(len(every), max(lines) + _AROUND, first + 4000)
    return first, "".join(every[first - 1 : last])


def _began() -> float:
    try:
        return Path("/proc/self").stat().st_ctime
    except OSError:
        return float("inf")


# -- the dump --------------------------------------------------------------------------------------------------------


_NO_ROOM = "no room left in the file"


class PartFailed(Exception):
    """A part could not be had; the message is safe to write."""


def in_time(work: Callable[[], Any], seconds: float) -> Any:
    """Run what may wait for a lock in a thread of its own, and wait for it only so long; PartFailed otherwise."""
    answer: list[tuple[Any, str]] = []

    def run() -> None:
        try:
            answer.append((work(), ""))
        except BaseException as error:  # noqa: BLE001 (whatever it was is the answer)
            answer.append((None, f"{type(error).__name__} while it was collected"))

    thread = threading.Thread(target=run, name="holdfast-dump-part", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # memory is short, or the interpreter ends
        raise PartFailed("no thread could be started") from None
    thread.join(seconds)
    value, problem = answer[0] if answer else (None, f"no answer in {seconds:g} s")
    if problem:
        raise PartFailed(problem)
    return value


class Builder:
    """One dump. ``until``: when the time for further parts is over."""

    def __init__(self, path: Path, redactor: Redactor, limits: Limits, until: float = float("inf")) -> None:
        self.limits = limits
        self.redactor = redactor
        self.until = until
        self.parts: dict[str, list[str]] = {}  # kind -> how it ended, and why
        self.writer = Writer(path, redactor, limit_bytes=limits.file_bytes)

    def head(
        self, *, why: str, trigger: str, pid: int, began: float, program: list[str], python: str, plan: list[str]
    ) -> None:
        found = {
            "format": kinds.VERSION,
            "id": os.urandom(16).hex(),
            "why": why[:4000],
            "trigger": trigger[:100],
            "at": time.time(),
            "pid": pid,
            "began": began,
            "host": socket.gethostname()[:200],
            "program": program[:50],
            "python": python,
            "deadline_s": self.limits.deadline_s,
            "plan": plan,
        }
        self.writer.add(kinds.HEAD, found if pid == os.getpid() else {**found, "taken_by": os.getpid()})

    def part(self, kind: str, make: Callable[[], Any], *, write: bool = True) -> None:
        """One part: made, written, and its end noted. ``write=False``: ``make`` writes, and may say how it ended."""
        if monotonic() > self.until:
            self.lost(kind, "out of time")
            return
        before = self.parts.get(kind)
        try:
            payload = make()
            if not write and self.parts.get(kind) is not before:
                return  # it has said itself how it ended
            if write and payload is None:
                self.parts[kind] = [kinds.ABSENT, "nothing was kept"]
            elif write and not self.writer.add(kind, payload):
                self.lost(kind, _NO_ROOM)
            else:
                state, reason = self.parts.get(kind, [kinds.WHOLE, ""])
                self.parts[kind] = [kinds.PARTIAL if state == kinds.ABSENT else state, reason]
        except PartFailed as failure:
            self.lost(kind, str(failure))
        except HoldfastError:
            raise
        except Exception as failure:  # noqa: BLE001 (a broken part must not cost the others)
            where = failure.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = f" at {Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where else ""
            self.lost(kind, f"{type(failure).__name__} while it was collected{line}")

    def lost(self, kind: str, reason: str) -> None:
        """Note why some of a part, or all of it, is not there."""
        some = self.parts.get(kind, [kinds.ABSENT])[0] != kinds.ABSENT
        self.parts[kind] = [kinds.PARTIAL if some else kinds.ABSENT, reason]

    def stack(self, thread: dict[str, Any]) -> None:
        """One thread with its frames; without their values where those have no room."""
        if self.writer.add(kinds.STACK, thread):
            return
        bare = [{key: frame[key] for key in frame if key != "locals"} for frame in thread["frames"]]
        bare = [{**frame, "hidden": frame.get("hidden") or _NO_ROOM} for frame in bare]
        if not self.writer.add(kinds.STACK, {**thread, "frames": bare, "locals_cut": True}):
            raise PartFailed(_NO_ROOM)

    def sources(self, files: dict[str, list[int]], is_mine: Callable[[str], bool]) -> None:
        """Sources of the files that stacks name, with the lines they stand at."""
        found, missing = embed(files, is_mine, self.limits.source_bytes)
        for record in found:
            self.writer.add(kinds.SOURCE, record, source=True)
        told = "not found: " + ", ".join(missing)[:2000] if missing else ""
        self.parts[kinds.SOURCE] = [kinds.PARTIAL if missing else kinds.WHOLE, told]

    def extra(self, kind: str, name: str, data: Any) -> None:
        """What somebody gave for a part, under its name; a ``problem`` in it is one of the part."""
        problem = data.get("problem") if isinstance(data, dict) else None
        state = [kinds.PARTIAL, f"{name}: {problem}"[:2000]] if problem else [kinds.WHOLE, ""]
        if not add_extra(self.writer, kind, name, data):
            state = [kinds.PARTIAL, f"{name}: more than there is room for"]
        if self.parts.get(kind, [kinds.WHOLE])[0] in (kinds.WHOLE, kinds.ABSENT):
            self.parts[kind] = state


def add_extra(writer: Writer, kind: str, name: str, data: Any) -> bool:
    """Write one extra; when it is too large, with fewer of its threads. Whether all of it is there."""
    if writer.add(kind, {"name": name, "data": data}):
        return True
    threads = data.get("threads") if isinstance(data, dict) else None
    while isinstance(threads, dict | list) and len(threads) > 1:
        half = len(threads) // 2
        threads = dict(list(threads.items())[:half]) if isinstance(threads, dict) else threads[:half]
        if writer.add(kind, {"name": name, "data": {**data, "threads": threads}}):
            return False
    return False
