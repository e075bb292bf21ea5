"""Bundles: agents' histories in one file.

Owns the file's frames and their proof (format.md section 10). What parcels mean is the business of whoever sends and
receives them. What always holds: a file that was cut, altered or put together anew anywhere is refused; sizes are
compared with limits and with the file before memory is taken; data is read, never executed, and no path in it leads
anywhere; nothing of a bundle is seen in a store before all of it was read and proven elsewhere; what leaves an
encrypted store is encrypted, unless somebody asks for it plain.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from holdfast.agent.parcels import About, End, Head, Last, Parcel, Point
from holdfast.agent.receiving import Receiver
from holdfast.agent.scratch import Scratch, scratch
from holdfast.agent.sending import Said, Sending, Share
from holdfast.agent.store import Store, find_store, open_as, say_created
from holdfast.agent.transfer import TransferReport, transfer
from holdfast.errors import (
    BadOption,
    Damaged,
    HoldfastError,
    KeyNeeded,
    NotABundle,
    NotAuthentic,
    NotEncrypted,
    UnknownAgent,
)
from holdfast.store import bundlekeys, files, keysources
from holdfast.store.catalog import AgentRow, Progress, digest, quietly
from holdfast.store.cipher import PLAIN, Cipher
from holdfast.store.files import fsync_directory, in_store, unavailable
from holdfast.store.keys import Secret, secret_of
from holdfast.store.keysources import Key, find_secret

MAGIC = b"HFBUND01"
KEYED_MAGIC = b"HFBUND02"
VERSION = 1
CHECK_BYTES = 16
# What is compressed, stored length, length.
_HEADER = struct.Struct(">BII")
_RAW, _ZSTD = 0, 1
# A frame that is compressed may become this much, and this many times itself: what a small file can grow to is bounded.
EXPANDED_MAX_BYTES = 16 * 2**20
RATIO_MAX = 256
# Below this, compressing saves nothing.
_COMPRESS_FROM_BYTES = 256

_decoder: msgspec.msgpack.Decoder[Parcel | Head | End] = msgspec.msgpack.Decoder(Parcel | Head | End)


# -- frames ---------------------------------------------------------------------------------------------------------


class Writing:
    """The frames of a new file."""

    def __init__(self, file: BinaryIO, head: bytes = MAGIC, cipher: Cipher = PLAIN) -> None:
        self._file = file
        self._cipher = cipher
        self._check = b""
        self._encoder = msgspec.msgpack.Encoder()
        self._compressor = zstandard.ZstdCompressor(level=3)
        self.parcels = 0
        self.bytes = file.write(head)

    def put(self, parcel: Parcel | Head | End) -> None:
        data = self._encoder.encode(parcel)
        stored, how = data, _RAW
        if _COMPRESS_FROM_BYTES <= len(data) <= EXPANDED_MAX_BYTES:
            small = self._compressor.compress(data)
            if len(small) < len(data) <= RATIO_MAX * len(small):
                stored, how = small, _ZSTD
        stored = bytes(self._cipher.box("bundle", (self.parcels, how, len(data)), stored))
        if len(stored) >= 2**32:
            raise BadOption("a checkpoint of more than 4 GiB cannot go into a bundle", hint="Push it to a store.")
        header = _HEADER.pack(how, len(stored), len(data))
        self._check = digest(b"holdfast.bundle", self._check + header + stored)[:CHECK_BYTES]
        self.bytes += self._file.write(header) + self._file.write(stored) + self._file.write(self._check)
        self.parcels += 1


def cipher_of(file: BinaryIO, path: Path, key: Key) -> Cipher:
    """What the frames of a file are encrypted with. Reads up to the first of them."""
    magic = file.read(len(MAGIC))
    if magic == MAGIC:
        if key is not None and key is not False:
            raise NotEncrypted(f"{path} is not encrypted, and a key was given for it; nothing was imported")
        return PLAIN
    if magic != KEYED_MAGIC:
        raise NotABundle("the file is not a bundle", hint="`holdfast export` writes them.")
    head = file.read(bundlekeys.HEAD_BYTES)
    if len(head) != bundlekeys.HEAD_BYTES:
        raise _damaged("it ends too early")
    try:
        return bundlekeys.opened(head, find_secret(key))
    except KeyNeeded:
        if key is False or keysources.ask is None:
            raise
        return bundlekeys.opened(head, keysources.ask(path))
    except Damaged as error:
        raise _damaged("its list of keys is not what was written") from error


def frames(file: BinaryIO, size: int, cipher: Cipher = PLAIN) -> Iterator[Parcel | Head | End]:
    """The parcels of a file of that size. That it ends where it should shows at the end: act on none before."""
    left = size - file.tell()
    check = b""
    for number in count():
        header = file.read(_HEADER.size)
        if len(header) != _HEADER.size:
            raise _damaged("it ends too early")
        how, stored, length = _HEADER.unpack(header)
        left -= _HEADER.size + stored + CHECK_BYTES
        if left < 0:
            raise _damaged("it ends too early, or a length in it is wrong")
        if how == _RAW and stored != length + cipher.overhead:
            raise _damaged("a length in it is wrong")
        if how == _ZSTD and not 0 < length <= min(EXPANDED_MAX_BYTES, RATIO_MAX * stored):
            raise _damaged("a part of it would become too large")
        if how not in {_RAW, _ZSTD}:
            raise _damaged("a part of it has an unknown form")
        data = file.read(stored)
        check = digest(b"holdfast.bundle", check + header + data)[:CHECK_BYTES]
        if file.read(CHECK_BYTES) != check:
            raise _damaged("a part of it is not what was written")
        try:
            data = cipher.unbox("bundle", (number, how, length), data)
        except NotAuthentic as error:
            raise _damaged("a part of it was not written with its key") from error
        parcel = _parcel(data if how == _RAW else _expanded(data, length))
        yield parcel
        if isinstance(parcel, End):
            if left or file.read(1):
                raise _damaged("something follows its end")
            return


def _expanded(data: bytes, length: int) -> bytes:
    try:
        if zstandard.frame_content_size(data) != length:
            raise _damaged("a length in it is wrong")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _damaged("a part of it cannot be expanded") from error


def _parcel(data: bytes) -> Parcel | Head | End:
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged("a part of it does not follow the format") from error


def _damaged(why: str) -> Damaged:
    return Damaged(
        f"the bundle is damaged: {why}; nothing was imported", what=("bundle",), hint="Export it again at its source."
    )


# -- writing --------------------------------------------------------------------------------------------------------


class _Everything:
    """The other side of an export: a file has what was written to it before, and nothing else."""

    def __init__(self) -> None:
        self._sent: set[bytes] = set()

    def _new(self, digests: Sequence[bytes]) -> set[bytes]:
        new = {one for one in digests if one not in self._sent}
        self._sent |= new
        return new

    def nodes(self, digests: Sequence[bytes]) -> set[bytes]:
        return self._new(digests)

    def chunks(self, digests: Sequence[bytes]) -> set[bytes]:
        return self._new(digests)

    def metadata(self, digest: bytes) -> bool:
        return bool(self._new([digest]))

    def events(self, events: Sequence[Said]) -> list[Said]:
        return list(events)


def write_bundle(
    store: Store,
    path: Path,
    agents: Sequence[str],
    *,
    key: Key = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write agents to one file, which appears whole or not at all. Returns its size.

    With a ``key`` it is encrypted with that; without one it opens with the keys of its store, if that is encrypted;
    with False it is plain in any case.
    """
    rows = [store._agent_row(name) for name in dict.fromkeys(agents)]
    if not rows:
        raise BadOption("no agent is named", hint="Name those that are to go into the file.")
    if in_store(Path(os.path.realpath(path))):
        raise BadOption(f"{path} is inside a store", hint="Name a file elsewhere.")
    head, cipher = _beginning(store, key)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    report = progress or quietly
    try:
        if path.exists() and not replace:
            hint = "Choose another name, or replace it (replace=True, --force)."
            raise BadOption(f"{path} exists already", hint=hint)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=2**20) as file:
                size = _write(store, Writing(file, head, cipher), rows, report)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            fsync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise unavailable(error, f"writing {path}") from error
    return size


def _beginning(store: Store, key: Key) -> tuple[bytes, Cipher]:
    """What the file begins with, and what its frames are encrypted with."""
    if key is False or (key is None and not store._catalog.encrypted):
        return MAGIC, PLAIN
    if key is None:
        head, cipher = bundlekeys.keys_of_store(store._catalog)
    else:
        head, cipher = bundlekeys.own_key(key if isinstance(key, Secret) else secret_of(key))
    return KEYED_MAGIC + head, cipher


def _write(store: Store, out: Writing, rows: Sequence[AgentRow], progress: Progress) -> int:
    out.put(Head(VERSION, store._catalog.uuid, len(rows)))
    needs = _Everything()
    for row in rows:
        sending = Sending(store, row)
        out.put(sending.about)
        shares = [Share(records=branch.start) for branch in sending.about.branches]
        total = sending.line.count()
        done = 0
        for parcel in sending.parcels(shares, needs):
            out.put(parcel)
            if isinstance(parcel, Point):
                done += 1
                progress(f"checkpoints of {sending.about.name}", done, max(done, total))
        out.put(sending.last())
    out.put(End(out.parcels + 1))
    return out.bytes


# -- reading --------------------------------------------------------------------------------------------------------


def read_bundle(
    store: Store,
    path: Path,
    agents: Sequence[str] = (),
    *,
    key: Key = None,
    beside: bool = False,
    new_name: str | None = None,
    progress: Progress | None = None,
) -> TransferReport:
    """Take in the agents of a file, or some of them. ``key`` is the file's.

    They are first put together and proven in a scratch store. Only when all of the file was read, and all of the
    scratch store is as it should be, do they come to this one, as from any other.
    """
    with (
        opened(path, key) as (parcels, _),
        scratch(store.path.parent, encrypted=store._catalog.encrypted) as place,
        _proven(place, parcels, agents, type(store), progress) as (made, origin),
    ):
        moved = transfer(made, store, agents, beside=beside, new_name=new_name, progress=progress, origin=origin)
    return TransferReport(str(path), moved.dest, moved.agents)


def import_bundle(
    file: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    agents: Sequence[str] = (),
    *,
    key: Key = None,
    file_key: Key = None,
    beside: bool = False,
    new_name: str | None = None,
    progress: Progress | None = None,
) -> TransferReport:
    """Take in the agents of a file that ``export`` wrote, or some of them, into the store at ``store``.

    A store that is not there yet is made with all of them in it, or not at all. ``key`` is the store's, ``file_key``
    the file's; the other options are those of ``Store.import_bundle``.
    """
    path, place = Path(file), Path(os.path.realpath(store if store is not None else find_store()))

    def into(there: Store) -> TransferReport:
        return read_bundle(
            there, path, agents, key=file_key, beside=beside, new_name=new_name, progress=progress
        )  # fmt: skip

    if files.classify(place):
        with open_as(Store, place, create=False, inert=True, key=key) as there:
            return into(there)
    secret = find_secret(key)
    with opened(path, file_key) as (parcels, encrypted):
        if encrypted and secret is None and key is not False:
            raise BadOption(
                f"{path} is encrypted, and the new store at {place} would not be",
                hint="Give the store a key (HOLDFAST_KEY_FILE, key=), or say that it has none (key=False).",
            )
        with (
            scratch(_there(place.parent), encrypted=secret is not None, strict=True) as room,
            _proven(room, parcels, agents, Store, progress) as (made, origin),
        ):
            with room.new(Store, secret) as new:
                moved = transfer(made, new, agents, new_name=new_name, progress=progress, origin=origin)
            if room.put(place):
                say_created(place)
                return TransferReport(str(path), str(place), moved.agents)
    with open_as(Store, place, create=False, inert=True, key=key) as there:  # somebody else has made it meanwhile
        return into(there)


def _there(folder: Path) -> Path:
    """The nearest folder that exists."""
    return next(one for one in (folder, *folder.parents) if one.is_dir())


@contextmanager
def opened(path: Path, key: Key) -> Iterator[tuple[Iterator[Parcel | Head | End], bool]]:
    """The parcels of a file, and whether they are encrypted there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotABundle(f"{path} cannot be read ({error.strerror})") from error
    try:
        with os.fdopen(fd, "rb", buffering=2**20) as file:
            cipher = cipher_of(file, path, key)
            yield frames(file, os.fstat(fd).st_size, cipher), cipher.keyed
    except OSError as error:
        raise unavailable(error, f"reading {path}") from error


@contextmanager
def _proven(
    place: Scratch,
    parcels: Iterator[Parcel | Head | End],
    agents: Sequence[str],
    kind: type[Store],
    progress: Progress | None,
) -> Iterator[tuple[Store, bytes]]:
    """A scratch store with all of a bundle in it, proven, and the uuid of the store that the bundle is from.

    ``agents`` are those that somebody wants out of it.
    """
    with place.open(kind) as made:
        origin = _unpack(made, parcels, progress)
        report = made.verify(progress)
        if not report.ok:
            raise Damaged(
                f"what the bundle holds cannot be proven: {report.problems[0].what}: {report.problems[0].detail}",
                what=tuple(problem.what for problem in report.problems),
                hint="Nothing was imported. Export it again at its source.",
            )
        there = [info.name for info in made.agents()]
        for name in agents:
            if name not in there:
                raise UnknownAgent(f"there is no agent {name!r} in the bundle", hint=f"It has: {', '.join(there)}.")
        yield made, origin


def _unpack(made: Store, parcels: Iterator[Parcel | Head | End], progress: Progress | None) -> bytes:
    """Fill the scratch store; returns the uuid of the store that the bundle was made from."""
    head = next(parcels)
    if not isinstance(head, Head):
        raise _damaged("it has no beginning")
    if head.version != VERSION:
        raise NotABundle(f"the bundle has format {head.version}", hint="A newer Holdfast can read it.")
    report = progress or quietly
    seen, agents = 1, 0
    receiver: Receiver | None = None
    try:
        for parcel in parcels:
            seen += 1
            match parcel:
                case About():
                    if receiver is not None or parcel.store != head.store:
                        raise _damaged("an agent begins inside another")
                    receiver = Receiver(made, parcel)
                    if receiver.agent is not None:
                        raise _damaged("it has one agent twice")
                    receiver.begin()
                case Last():
                    if receiver is None:
                        raise _damaged("an agent ends that never began")
                    receiver.finish(parcel)
                    receiver.close()
                    receiver, agents = None, agents + 1
                case End():
                    if receiver is not None or (parcel.parcels, agents) != (seen, head.agents):
                        raise _damaged("its parts are not all there")
                case Head():
                    raise _damaged("it begins twice")
                case _:
                    if receiver is None:
                        raise _damaged("a part of it belongs to no agent")
                    receiver.take(parcel)
                    report("reading the bundle", receiver.arrived.checkpoints, 0)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise _damaged(f"it does not follow the format ({type(error).__name__})") from error
    finally:
        if receiver is not None:
            with suppress(HoldfastError):
                receiver.close()
    return head.store
