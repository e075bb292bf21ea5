"""Bundles: agents' histories in one file.

Owns the file and its proof (format.md section 10). What frames mean is the business of whoever sends and receives them.
What always holds: a file that was cut, altered or put together anew anywhere is refused; sizes are compared with limits
and with the file before memory is taken; data is read, never executed, and no path in it leads anywhere; refs move when
all of the file was read, so one that is damaged changes nothing; what leaves an encrypted store is encrypted, unless
somebody asks for it plain.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, TypeVar

import zstandard

from holdfast.agent.arrival import Arrival
from holdfast.agent.frames import VERSION, End, Frame, Head, Payload, Refs, decoded, encoded, size_of
from holdfast.agent.places import place_of, say_created
from holdfast.agent.refs import Past, read_refs
from holdfast.agent.store import Store, open_unseen
from holdfast.agent.transfer import HoldsImage, Sending, TransferReport, family, kept_by
from holdfast.errors import (
    BadOption,
    CorruptValue,
    Damaged,
    HoldfastError,
    KeyNeeded,
    NotABundle,
    NotAStore,
    NotAuthentic,
    NotEncrypted,
    UnknownAgent,
)
from holdfast.store import files, keys
from holdfast.store.catalog import Progress, quietly
from holdfast.store.changes import now_us
from holdfast.store.cipher import PLAIN, Cipher, Keyed, digest
from holdfast.store.database import Contents, shown
from holdfast.store.keys import BundleKeys, Key, Secret, find_secret
from holdfast.text import is_url

MAGIC = b"HFBUND03"
KEYED_MAGIC = b"HFBUND04"
CHECK_BYTES = 16

PART_BYTES = 2**20
"""Frames go together into parts of about this size: small ones compress badly alone."""

PART_MAX_BYTES = 2**31
EXPANDED_MAX_BYTES = 2**24
RATIO_MAX = 256
"""A part that is compressed may become this much, and this many times itself: what a small file grows to is bounded."""

_HEADER = struct.Struct(">BII")  # how it is stored, stored length, length
_RAW, _ZSTD = 0, 1

T = TypeVar("T")


# -- parts ----------------------------------------------------------------------------------------------------------


class Writing:
    """The parts of a new file."""

    def __init__(self, file: BinaryIO, head: bytes = MAGIC, cipher: Cipher = PLAIN) -> None:
        self._file = file
        self._cipher = cipher
        self._check = b""
        self._compressor = zstandard.ZstdCompressor(level=3)
        self._parts = 0
        self._waiting: list[Frame] = []
        self._size = 0
        self.frames = 0
        self.bytes = file.write(head)

    def put(self, frame: Frame) -> None:
        self._waiting.append(frame)
        self._size += size_of(frame)
        self.frames += 1
        if self._size >= PART_BYTES or isinstance(frame, Head | End):
            self._write()

    def _write(self) -> None:
        data = encoded(self._waiting)
        self._waiting, self._size = [], 0
        stored, how = data, _RAW
        if len(data) <= EXPANDED_MAX_BYTES:
            small = self._compressor.compress(data)
            if len(small) < len(data) <= RATIO_MAX * len(small):
                stored, how = small, _ZSTD
        stored = bytes(self._cipher.box("bundle", (self._parts, how, len(data)), stored))
        if len(stored) > PART_MAX_BYTES:
            raise BadOption("a checkpoint of more than 2 GiB cannot go into a bundle", hint="Push it to a store.")
        header = _HEADER.pack(how, len(stored), len(data))
        self._check = digest(b"bundle", self._check, header, stored)[:CHECK_BYTES]
        self.bytes += self._file.write(header) + self._file.write(stored) + self._file.write(self._check)
        self._parts += 1


def frames(file: BinaryIO, size: int, cipher: Cipher = PLAIN) -> Iterator[Frame]:
    """The frames of a file of that size. That it ends where it should shows at the end: act on none before."""
    left = size - file.tell()
    check = b""
    for number in count():
        header = file.read(_HEADER.size)
        if len(header) != _HEADER.size:
            raise _damaged("it ends too early")
        how, stored, length = _HEADER.unpack(header)
        left -= _HEADER.size + stored + CHECK_BYTES
        if left < 0 or stored > PART_MAX_BYTES:
            raise _damaged("it ends too early, or a length in it is wrong")
        if how == _RAW and stored != length + cipher.overhead:
            raise _damaged("a length in it is wrong")
        if how == _ZSTD and not 0 < length <= min(EXPANDED_MAX_BYTES, RATIO_MAX * stored):
            raise _damaged("a part of it would become too large")
        if how not in {_RAW, _ZSTD}:
            raise _damaged("a part of it has an unknown form")
        data = file.read(stored)
        check = digest(b"bundle", check, header, data)[:CHECK_BYTES]
        if file.read(CHECK_BYTES) != check:
            raise _damaged("a part of it is not what was written")
        for frame in _opened(cipher, data, number, how, length):
            yield frame
            if isinstance(frame, End):
                if left or file.read(1):
                    raise _damaged("something follows its end")
                return


def _opened(cipher: Cipher, data: bytes, number: int, how: int, length: int) -> list[Frame]:
    try:
        data = cipher.unbox("bundle", (number, how, length), data)
        if how == _ZSTD:
            if zstandard.frame_content_size(data) != length:
                raise _damaged("a length in it is wrong")
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=length, allow_extra_data=False)
        return decoded(data)
    except NotAuthentic as error:
        raise _damaged("a part of it was not written with its key") from error
    except zstandard.ZstdError as error:
        raise _damaged("a part of it cannot be expanded") from error
    except CorruptValue as error:
        raise _damaged("a part of it does not follow the format") from error


def _damaged(why: str) -> Damaged:
    return Damaged(
        f"the bundle is damaged: {why}; nothing was imported", what=("bundle",), hint="Export it again at its source."
    )


# -- writing --------------------------------------------------------------------------------------------------------


def write_bundle(
    store: Store,
    path: Path,
    agents: Sequence[str],
    key: Key,
    progress: Progress | None,
    *,
    replace: bool,
) -> int:
    """Write agents to one file, which appears whole or not at all. Returns its size."""
    numbers = [store._agent_row(name).a for name in dict.fromkeys(agents)]
    if not numbers:
        raise BadOption("no agent is named", hint="Name those that are to go into the file.")
    if files.in_store(Path(os.path.realpath(path))):
        raise BadOption(f"{path} is inside a store", hint="Name a file elsewhere.")
    head, cipher = _beginning(store, key)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    store.flush()
    try:
        if path.exists() and not replace:
            hint = "Choose another name, or replace it (replace=True, --force)."
            raise BadOption(f"{path} exists already", hint=hint)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=2**20) as file, store._db.moment() as contents:
                out = Writing(file, head, cipher)
                chosen = family(contents.view, numbers)
                _write(out, store._db.uuid, contents, chosen, progress or quietly, images=cipher.keyed)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            files.fsync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise files.unavailable(error, f"writing {path}") from error
    return out.bytes


def _beginning(store: Store, key: Key) -> tuple[bytes, Cipher]:
    """What the file begins with, and what its parts are encrypted with."""
    cipher = store._db.cipher
    secret = find_secret(key) if key is not None else None
    if secret is not None:
        made, own = BundleKeys.of_secret(secret, now_us())
    elif key is None and isinstance(cipher, Keyed):
        made, own = BundleKeys.of_store(store._db.view, cipher)
    else:
        return MAGIC, PLAIN
    return KEYED_MAGIC + made.encode(), own


def _write(
    out: Writing, store: bytes, contents: Contents, numbers: Sequence[int], progress: Progress, *, images: bool
) -> None:
    view = contents.view
    rows = [view.agent_at(a) for a in numbers]
    out.put(Head(VERSION, store, [row.name for row in rows]))
    sending = Sending(contents, None, images=images)
    for row in rows:
        past = Past(view.log(row.a))
        refs = read_refs(view, row, store, past, (0, 0))
        try:
            for frame in sending.frames(row, refs, kept_by(view, row, past), (), progress):
                out.put(frame)
        except HoldsImage:
            raise NotEncrypted(
                f"{row.name} holds everything that a process has in memory, and the file would not be encrypted",
                hint="Give a key for the file, or name other agents.",
            ) from None
    out.put(End(out.frames + 1))


# -- reading --------------------------------------------------------------------------------------------------------


def read_bundle(
    store: Store,
    path: Path,
    found: Iterator[Frame],
    agents: Sequence[str],
    *,
    beside: bool = False,
    new_name: str | None,
    progress: Progress | None,
) -> TransferReport:
    """Take in the agents of a file that was opened, or some of them.

    Everything is proven as it arrives; refs move when all of the file was read.
    """
    head = next(found)
    if not isinstance(head, Head):
        raise _damaged("it has no beginning")
    if head.version != VERSION:
        raise NotABundle(f"the bundle has format {head.version}", hint="A newer Holdfast can read it.")
    for one in agents:
        if one not in head.agents:
            raise UnknownAgent(f"there is no agent {one!r} in the bundle", hint=f"It has: {', '.join(head.agents)}.")
    if new_name is not None and len(agents or head.agents) != 1:
        raise BadOption("another name can be given to one agent at a time", hint="Name that agent.")
    with Arrival(store, str(path), images=store.encrypted) as into:
        try:
            _all(into, head, found, progress or quietly)
            above = tuple(f"{one}/" for one in agents if new_name is None)
            only = [*agents, *(one for one in head.agents if above and one.startswith(above))]
            return TransferReport(str(path), store.place, into.finish(only=only, aside=beside, name=new_name))
        except BaseException:
            with suppress(HoldfastError):  # what has arrived is held a while longer then
                into.give_up()
            raise


def _all(into: Arrival, head: Head, found: Iterator[Frame], progress: Progress) -> None:
    """Every frame, to the end of the file."""
    seen, done = 1, 0
    names: list[str] = []
    for frame in found:
        seen += 1
        if isinstance(frame, End):
            if (frame.frames, names) != (seen, head.agents):
                raise _damaged("its parts are not all there")
            continue
        if isinstance(frame, Refs):
            names.append(frame.name)
            if frame.store != head.store or len(names) > len(head.agents):
                raise _damaged("it has another agent than it says")
        try:
            into.take(frame)
        except Damaged as error:
            raise _damaged(f"what it holds cannot be proven ({error.message})") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            if isinstance(error, HoldfastError):
                raise
            raise _damaged(f"it does not follow the format ({type(error).__name__})") from error
        if isinstance(frame, Payload):
            done += 1
            progress("reading the bundle", done, 0)


@contextmanager
def opened(path: Path, key: Key) -> Iterator[tuple[Iterator[Frame], bool]]:
    """The frames of a file, and whether they are encrypted there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotABundle(f"{path} cannot be read ({error.strerror})") from error
    try:
        with os.fdopen(fd, "rb", buffering=2**20) as file:
            cipher = _cipher_of(file, path, key)
            yield frames(file, os.fstat(fd).st_size, cipher), cipher.keyed
    except OSError as error:
        raise files.unavailable(error, f"reading {path}") from error


def _cipher_of(file: BinaryIO, path: Path, key: Key) -> Cipher:
    """What the parts of a file are encrypted with. Reads up to the first of them."""
    magic = file.read(len(MAGIC))
    if magic == MAGIC:
        if key is not None and key is not False:
            raise NotEncrypted(f"{path} is not encrypted, and a key was given for it; nothing was imported")
        return PLAIN
    if magic != KEYED_MAGIC:
        raise NotABundle("the file is not a bundle", hint="`holdfast export` writes them.")
    try:
        found = BundleKeys.read(file.read)
    except Damaged as error:
        raise _damaged("its list of keys is not what was written") from error
    try:
        return found.open(find_secret(key))
    except KeyNeeded:
        if key is False or keys.ask is None:
            raise
        return found.open(keys.ask(str(path)))
    except NotAuthentic as error:
        raise _damaged("its list of keys is not what was written") from error


# -- into a place where nothing is ------------------------------------------------------------------------------------


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

    A store that is not there yet is made with all of them in it, or not at all; on a server one without them may be
    left, and the next import goes on with it. ``key`` is the store's, ``file_key`` the file's; the other options are
    those of ``Store.import_bundle``.
    """
    path, named = Path(file), place_of(store)
    if is_url(named):
        there = _on_server(named, path, key, file_key)
    else:
        place = Path(named)
        if not files.classify(place):
            secret = find_secret(key)
            with opened(path, file_key) as (found, encrypted):
                _refuse_plain(path, place, secret, key, encrypted=encrypted)
                fill = partial(read_bundle, path=path, found=found, agents=agents, new_name=new_name, progress=progress)
                moved = made_at(place, secret, fill)
            if moved is not None:
                say_created(str(place))
                return TransferReport(str(path), str(place), moved.agents)
        there = Store.opened(place, create=False, inert=True, key=key)
    with there:
        return there.import_bundle(path, agents, key=file_key, beside=beside, new_name=new_name, progress=progress)


def _on_server(place: str, path: Path, key: Key, file_key: Key) -> Store:
    """The store of a URL; made, if it is not there and the file can be opened."""
    try:
        return Store.opened(place, create=False, inert=True, key=key)
    except NotAStore:
        with opened(path, file_key) as (_, encrypted):
            _refuse_plain(path, shown(place), find_secret(key), key, encrypted=encrypted)
        return Store.opened(place, inert=True, key=key)


def _refuse_plain(path: Path, place: Path | str, secret: Secret | None, key: Key, *, encrypted: bool) -> None:
    """What was encrypted becomes plain only when somebody says so."""
    if encrypted and secret is None and key is not False:
        raise BadOption(
            f"{path} is encrypted, and the new store at {place} would not be",
            hint="Give the store a key (HOLDFAST_KEY_FILE, key=), or say that it has none (key=False).",
        )


def made_at(place: Path, secret: Secret | None, fill: Callable[[Store], T]) -> T | None:
    """Make a store, filled where nobody sees it, and put where it belongs; None if somebody else made one meanwhile."""
    folder = next(one for one in place.parents if one.is_dir())
    try:
        with files.scratch(folder) as room:
            with open_unseen(room / "new", secret, create=True) as made:
                result = fill(made)
            return result if files.put_in_place(room / "new", place) else None
    except OSError as error:
        raise files.unavailable(error, f"making a store at {place}") from error
