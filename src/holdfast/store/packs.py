"""Bulk chunks: packs are written once, named by a row afterwards, and never changed.

Owns what is in a pack (format.md section 5) and where packs lie: here, and perhaps in a colder place. Knows no state.
What always holds: a pack is durable before a row can name it; what is read is proven by its digest; what is written is
what the digest was computed over; a copy of a pack is deleted only while another one is there, and one that a row names
only by whoever moves it. No row says where a pack is: the two places do.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, TypeVar
from uuid import UUID, uuid4

import zstandard
from msgspec import Meta, convert
from ormsgpack import packb, unpackb

from holdfast.errors import (
    BadOption,
    ColdPlaceMissing,
    Damaged,
    HoldfastError,
    InputError,
    StoreBusy,
    StoreFailed,
    Unavailable,
)
from holdfast.store.catalog import View
from holdfast.store.changes import NewPack
from holdfast.store.cipher import HINT, Buffer, Cipher
from holdfast.store.cipher import digest as digest_of
from holdfast.store.engine import Engine, Objects
from holdfast.store.objects import TEMPORARY, Missing, missing
from holdfast.store.rows import Place, chunk_digest
from holdfast.store.tables import NUMBER_MAX

MAGIC = b"HFPACK03"
INDEX = b"HFINDEX1"
_TAIL = struct.Struct(">32sQ8s")
"""The end of a pack: a digest of the index before it, and how long that is."""

ALIGN_BYTES = 4096
CHUNK_MAX_BYTES = 64 * 2**20
"""The most that one chunk may hold, and so claim to hold when it is read. Bulk values are cut every 8 MiB."""

RUN_BYTES = 8 * 2**20
"""How much of a pack is read in one request: some chunks that lie one behind the other, or a piece of a copy."""

SAMPLE_BYTES, SAMPLED_BYTES = 2**16, 2**15
"""Three samples, of this size or a sixteenth each, say whether compressing is worth its time, of chunks above that."""

GRACE_S = 3600.0
"""A pack is named by a row after it was put, so one that no row names may be about to be. So long nobody deletes it."""

_Size = Annotated[int, Meta(ge=0, lt=NUMBER_MAX)]
_ROWS = list[tuple[Annotated[bytes, Meta(min_length=32, max_length=32)], _Size, _Size, _Size]]
T = TypeVar("T")
Chunk = tuple[bytes, Place]
"""A chunk's digest, and where it is."""

Whereabouts = tuple[float | None, float | None]
"""How many seconds ago a pack was put here, and in the colder place; None: it is not there."""


def file_name(pack: bytes) -> str:
    if len(pack) != 16:
        raise Damaged(f"pack {pack.hex()[:40]}: that is no name of one", what=("table pack",), hint=HINT)
    return f"{UUID(bytes=pack)}.pack"


def _pack_of(name: str) -> bytes | None:
    with suppress(ValueError):
        pack = UUID(name.removesuffix(".pack")).bytes
        return pack if file_name(pack) == name else None
    return None


def round_up(size: int) -> int:
    """Where the next block begins."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class Packs:
    """The packs of one store. Threads may share it.

    ``cold_now`` gives the colder place as the store has it now: another process may have chosen one since.
    ``impatient``: for somebody who reads all of them; a place that has not answered once is not asked again.
    """

    def __init__(
        self,
        cipher: Cipher,
        here: Objects,
        cold: Objects | None = None,
        cold_now: Callable[[], Objects | None] = lambda: None,
        *,
        impatient: bool = False,
    ) -> None:
        self.cipher = cipher
        self.here = here
        self.cold = cold
        self._cold_now = cold_now
        self._found_cold: set[bytes] = set()
        self._silent: dict[str, ColdPlaceMissing] | None = {} if impatient else None
        self._apart = False

    def impatient(self) -> Packs:
        return Packs(self.cipher, self.here, self.cold, self._cold_now, impatient=True)

    def move(self, other: Packs) -> None:
        """Read and write as another one of the same store does."""
        self.here, self.cold, self._cold_now = other.here, other.cold, other._cold_now

    def look_again(self) -> bool:
        """Whether packs go to another colder place than was known here. From now on it is."""
        now = self._cold_now()
        if now is None or (self.cold is not None and self.cold.place == now.place):
            return False
        self.cold, self._apart = now, False
        return True

    # -- writing --------------------------------------------------------------------------------------------

    def write(self, chunks: Iterable[tuple[bytes, Buffer]], *, proven: bool = False) -> NewPack:
        """Write one pack with these chunks. When this returns it is durable, and nobody refers to it yet.

        ``proven``: the digests were just made of these very bytes, which nobody can change.
        """
        pack = uuid4().bytes
        rows: list[tuple[bytes, int, int, int]] = []
        size = self.here.put(file_name(pack), self._pieces(pack, chunks, rows, proven=proven))
        return self.made(pack, size, rows)

    def made(self, pack: bytes, size: int, rows: Sequence[tuple[bytes, int, int, int]]) -> NewPack:
        """A pack that lies here, for the transaction that names it."""
        return NewPack(pack, size, rows, lambda: self.here.size(file_name(pack)) == size)

    def _pieces(
        self,
        pack: bytes,
        chunks: Iterable[tuple[bytes, Buffer]],
        rows: list[tuple[bytes, int, int, int]],
        *,
        proven: bool,
    ) -> Iterator[bytes]:
        yield MAGIC.ljust(ALIGN_BYTES, b"\0")
        at = ALIGN_BYTES
        for digest, data in chunks:
            raw = bytes(data)  # a copy, unless nobody can change it: what is hashed is what is written
            if len(raw) > CHUNK_MAX_BYTES:
                raise InputError(f"a chunk of {len(raw)} bytes; the format allows {CHUNK_MAX_BYTES}")
            if not (proven and raw is data) and chunk_digest(raw) != digest:
                raise InputError("bulk data was changed while it was being saved; nothing was written")
            stored = _shorter(raw)
            box = bytes(self.cipher.box("chunk", digest, stored))
            rows.append((digest, at, len(raw), len(stored)))
            yield box
            yield bytes(-len(box) % ALIGN_BYTES)
            at += round_up(len(box))
        index = bytes(self.cipher.box("index", pack, packb(rows)))
        yield index
        yield bytes(-(len(index) + _TAIL.size) % ALIGN_BYTES)
        yield _TAIL.pack(digest_of(b"index", index), len(index), INDEX)

    def discard(self, pack: bytes) -> None:
        """Let a pack go whose rows were refused. One that stays is waste, not harm."""
        with suppress(HoldfastError):
            self.here.delete(file_name(pack))

    # -- reading --------------------------------------------------------------------------------------------

    def read(self, view: View, digests: Iterable[bytes]) -> Iterator[bytes]:
        """The bytes of chunks, in this order, each proven by its digest. Few of them are in memory at once."""
        wanted = list(digests)
        places = view.chunks(wanted)
        for digest in wanted:
            if digest not in places:
                raise _damaged(digest, "is missing")
        for run in self._runs([(digest, places[digest]) for digest in wanted]):
            try:
                found = self._from(run[0][1].pack, partial(self._opened, run))
            except Missing:
                names = [digest for digest, _ in run]
                if view.chunks(names) == dict(run):
                    raise
                found = list(self.read(view, names))  # they have got into another pack meanwhile
            yield from found

    def _runs(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Chunks as they can be read at once: those that follow each other in one pack."""
        run: list[Chunk] = []
        for digest, place in chunks:
            pack, start, length, stored = place
            # Looked at before anything of the size that a row claims is asked for.
            if not 0 <= stored <= length <= CHUNK_MAX_BYTES or start < ALIGN_BYTES or start % ALIGN_BYTES:
                raise _damaged(digest, "has an impossible size or place")
            if run:
                first, last = run[0][1], run[-1][1]
                if pack != first.pack or start != self._end(last) or self._end(place) - first.start > RUN_BYTES:
                    yield run
                    run = []
            run.append((digest, place))
        if run:
            yield run

    def _end(self, place: Place) -> int:
        return place.start + round_up(place.stored + self.cipher.overhead)

    def _opened(self, run: Sequence[Chunk], objects: Objects) -> list[bytes]:
        return [self._unpacked(digest, place, box) for digest, place, box, _ in self._boxes(run, objects)]

    def _boxes(self, run: Sequence[Chunk], objects: Objects) -> Iterator[tuple[bytes, Place, bytes, bytes]]:
        """What is stored of each chunk of a run, and what is behind it up to the next block."""
        first = run[0][1].start
        data = objects.read(file_name(run[0][1].pack), first, self._end(run[-1][1]) - first)
        for digest, place in run:
            start = place.start - first
            end = start + place.stored + self.cipher.overhead
            yield digest, place, data[start:end], data[end : self._end(place) - first]

    def _unpacked(self, digest: bytes, place: Place, box: bytes) -> bytes:
        """A chunk's bytes out of its box, proven by its digest."""
        data = b""
        if len(box) == place.stored + self.cipher.overhead:
            data = self.cipher.unbox("chunk", digest, box)
        if place.stored != place.length:
            with suppress(zstandard.ZstdError):
                # What a frame declares is allocated before anything is read, whatever the limit says.
                if zstandard.frame_content_size(data) == place.length:
                    reader = zstandard.ZstdDecompressor()
                    data = reader.decompress(data, max_output_size=place.length, allow_extra_data=False)
        if len(data) != place.length or chunk_digest(data) != digest:
            name = f"packs/{file_name(place.pack)}"
            raise _damaged(digest, f"is not what was written, in {name}", name)
        return data

    def _from(self, pack: bytes, ask: Callable[[Objects], T]) -> T:
        """Ask the place where a pack lies. It may move meanwhile: looked for in both, and once more in the first."""
        places = [place for place in (self.here, self.cold) if place is not None]
        if pack in self._found_cold:
            places.reverse()
        silent = self._silent if self._silent is not None else {}
        failures: list[HoldfastError] = []
        for place in (*places, places[0]):
            try:
                if place.place in silent:
                    raise silent[place.place].with_traceback(None)
                found = ask(place)
            except (Damaged, Unavailable) as error:
                failures.append(error)
                if isinstance(error, ColdPlaceMissing):
                    silent[place.place] = error
            else:
                (self._found_cold.add if place is self.cold else self._found_cold.discard)(pack)
                return found
        if self.look_again():
            return self._from(pack, ask)
        # What is damaged is there; what cannot be reached may be there.
        raise min(failures, key=lambda error: (isinstance(error, Missing), isinstance(error, Unavailable)))

    def index(self, pack: bytes) -> dict[bytes, Place]:
        """What a pack says that it holds: for those who have lost the rows that say so."""
        return self._from(pack, lambda place: self._index(pack, place, self._size(pack, place)))

    @staticmethod
    def _size(pack: bytes, place: Objects) -> int:
        size = place.size(file_name(pack))
        if size is None:
            raise missing(file_name(pack))  # it was moved meanwhile
        return size

    def _index(self, pack: bytes, place: Objects, size: int) -> dict[bytes, Place]:
        name = file_name(pack)
        wrong = Damaged(f"packs/{name}: its index is not what was written", what=(f"packs/{name}",), hint=HINT)
        tail = place.read(name, max(0, size - _TAIL.size), _TAIL.size)
        if len(tail) < _TAIL.size:
            raise wrong
        proof, length, magic = _TAIL.unpack(tail)
        start = size - round_up(length + _TAIL.size)
        if magic != INDEX or start < ALIGN_BYTES:
            raise wrong
        data = place.read(name, start, size - start - _TAIL.size)
        if digest_of(b"index", data[:length]) != proof or any(data[length:]):
            raise wrong
        try:
            return {
                digest: Place(pack, *rest)
                for digest, *rest in convert(unpackb(self.cipher.unbox("index", pack, data[:length])), _ROWS)
            }
        except ValueError:
            raise wrong from None

    # -- proof ----------------------------------------------------------------------------------------------

    def check(self, view: View, pack: bytes) -> dict[bytes, Damaged]:
        """Read a whole pack, wherever it lies: what is wrong, by the digests of its chunks; of the pack itself, b""."""
        found = self._rows(view, pack)
        return self._from(pack, lambda place: self._flaws(place, pack, *found)) if found is not None else {}

    def _rows(self, view: View, pack: bytes) -> tuple[int, list[Chunk]] | None:
        """A pack's size, and its chunks as they lie in it."""
        for p, _, size in view.rows("pack", "WHERE uuid = ?", (pack,)):
            rows = view.rows("chunk", "WHERE p = ? ORDER BY start", (p,))
            return size, [(digest, Place(pack, *rest)) for digest, _, *rest in rows]
        return None

    def _flaws(self, place: Objects, pack: bytes, size: int, chunks: Sequence[Chunk]) -> dict[bytes, Damaged]:
        name = f"packs/{file_name(pack)}"
        wrong = Damaged(f"{name}: bytes beside its chunks are not what was written", what=(name,), hint=HINT)
        found: dict[bytes, Damaged] = {}
        if place.read(file_name(pack), 0, ALIGN_BYTES) != MAGIC.ljust(ALIGN_BYTES, b"\0"):
            found[b""] = wrong
        for run in self._runs(chunks):
            for digest, where, box, padding in self._boxes(run, place):
                try:
                    self._unpacked(digest, where, box)
                except Damaged as error:
                    found[digest] = error
                if any(padding):
                    found[b""] = wrong
        known = self._size(pack, place)
        try:
            if not dict(chunks).items() <= self._index(pack, place, known).items():
                found[b""] = wrong
        except Missing:
            raise
        except Damaged as error:
            found[b""] = error
        if known != size:
            found[b""] = Damaged(f"{name}: its size is not what was written", what=(name,), hint=HINT)
        return found

    # -- moving ---------------------------------------------------------------------------------------------

    def whereabouts(self) -> dict[bytes, Whereabouts]:
        """Every pack that lies somewhere, and since when. Raises if the colder place cannot be reached."""
        here, cold = (
            {pack: age for name, age in place.names() if (pack := _pack_of(name))} if place is not None else {}
            for place in (self.here, self.cold)
        )
        return {pack: (here.get(pack), cold.get(pack)) for pack in here | cold}

    def places(self, view: View) -> list[dict[str, object]]:
        """Where packs lie, the colder place last: how many, and whether it can be reached now."""
        self.look_again()
        found: list[dict[str, object]] = []
        left = {file_name(pack) for pack in view.packs()}
        for place in filter(None, (self.here, self.cold)):
            there, reachable = left, False  # of a place that does not answer, what is not in the other one is said
            with suppress(ColdPlaceMissing):
                there, reachable = left & {name for name, _ in place.names()}, True
            left = left - there if reachable else left
            found.append({"place": place.place, "packs": len(there), "reachable": reachable})
        return found

    def chill(self, view: View, engine: Engine, pack: bytes, known: Callable[[], bool]) -> bool:
        """Move a pack to the colder place. False: not yet: somebody has a moment open, or moves it too; try later.

        ``known``: whether the store knows of the place. It may be given up meanwhile: then nobody would look there.
        """
        return self._move(view, engine, pack, self.here, self._cold(), known)

    def warm(self, view: View, engine: Engine, pack: bytes) -> bool:
        """Bring a pack back. False: as for ``chill``."""
        return self._move(view, engine, pack, self._cold(), self.here, lambda: True)

    def give_up(self, view: View, engine: Engine, forget: Callable[[], object]) -> bool:
        """Let the store forget the colder place, and leave nothing there. False: a pack that it needs is there.

        What no row names is deleted however young it is: packs get there only while a row names them. While a pack is
        nowhere the place stays known: it may be found again there.
        """
        place = self._cold()
        with engine.sweeping() as free:
            if not free:
                raise StoreBusy(
                    f"{place.place} is not given up yet: somebody reads the store just now",
                    hint="Nothing is lost. Run `holdfast tier --back` again.",
                )
            there = {name for name, _ in place.names() if _pack_of(name)}
            needed = {file_name(pack) for pack in view.packs()}
            if there & needed:
                return False
            if lost := needed - {name for name, _ in self.here.names()}:
                raise missing(min(lost), f" here and in {place.place}, which stays known")
            for name in there:
                place.delete(name)
            forget()
        self.cold = None
        return True

    def _cold(self) -> Objects:
        if self.cold is None:
            raise BadOption("this store has no colder place", hint="`holdfast tier --to PLACE` gives it one.")
        if not self._apart:
            # However it was named: what is copied to where it is already would be deleted then.
            probe = f"{TEMPORARY}{uuid4().hex}"
            self.here.put(probe, [b"?"])
            same = self.cold.size(probe) is not None
            self.here.delete(probe)
            if same:
                raise BadOption(
                    "a cold place cannot be where the packs are", hint="Name a directory elsewhere, or a URL."
                )
            self._apart = True
        return self.cold

    def _move(
        self, view: View, engine: Engine, pack: bytes, source: Objects, target: Objects, known: Callable[[], bool]
    ) -> bool:
        """Copied, read back and proven, then deleted. Killed anywhere, it is in one of the two places, or in both."""
        name = file_name(pack)
        found = self._rows(view, pack)
        if found is None or (source.size(name) is None and target.size(name) is not None):
            return True  # nobody needs it any more, or it is there
        whole = (pack, *found)
        try:
            if target.size(name) is not None:
                # Left by whoever was stopped. Not taken as it is: a deletion that got no answer may still meet it.
                self._require_whole(source, *whole)
                if not _drop(engine, name, found[0], target, other=source):
                    return False
            if source.size(name) != found[0]:
                self._require_whole(source, *whole)  # it is not: and a copy of it would stay, for want of a good one
            target.put(name, _copied(source, name, found[0]))
            if self._flaws(target, *whole):
                _drop(engine, name, found[0], target, other=source)
                self._require_whole(source, *whole)
                raise StoreFailed(f"{target.place}: the copy of {name} is not what was written; it stays where it is")
        except Missing:
            if all(place.size(name) is None for place in (source, target, source)):
                raise
            return False  # somebody else is moving it
        return _drop(engine, name, found[0], source, other=target, known=known)

    def _require_whole(self, place: Objects, pack: bytes, size: int, chunks: Sequence[Chunk]) -> None:
        for flaw in self._flaws(place, pack, size, chunks).values():
            raise Damaged(
                f"{file_name(pack)} in {place.place} is not what was"
                f" {'moved there' if place is self.cold else 'written'} ({flaw.message}); nothing was changed",
                what=flaw.what,
                hint=HINT,
            )

    # -- what nothing names ---------------------------------------------------------------------------------

    def sweep_strays(
        self, view: View, engine: Engine, alone: Callable[[Callable[[View], bool]], bool], grace_s: float
    ) -> int:
        """Delete what processes that died have left behind in both places, and packs whose rows are gone.

        Nothing while somebody has a moment open that may still see their rows. Returns how many went. ``alone`` does
        something while nobody names anything.
        """
        gone = 0
        old = self._old(grace_s)
        with engine.sweeping() as free:
            named = {file_name(pack) for pack in view.packs()}
            for place, name in old if free else ():
                if name not in named:
                    with suppress(ColdPlaceMissing, StoreBusy):  # there is no hurry: the next time
                        gone += alone(partial(_delete_stray, place, name))
        return gone

    def _old(self, grace_s: float) -> list[tuple[Objects, str]]:
        """All that has lain somewhere for so long. In a place that cannot be reached, it is found the next time."""
        found: list[tuple[Objects, str]] = []
        for place in filter(None, (self.here, self.cold)):
            with suppress(ColdPlaceMissing):
                names = [name for name, age in place.names() if age > grace_s]
                found += [(place, name) for name in names if name.startswith(TEMPORARY) or _pack_of(name)]
        return found


def _delete_stray(place: Objects, name: str, view: View) -> bool:
    """Unless it has been named meanwhile. Whoever is about to name it will find that it is gone."""
    pack = _pack_of(name)
    if pack is not None and view.rows("pack", "WHERE uuid = ?", (pack,)):
        return False
    place.delete(name)
    return True


def _drop(
    engine: Engine, name: str, size: int, at: Objects, *, other: Objects, known: Callable[[], bool] | None = None
) -> bool:
    """Delete a copy, if the other one is still there. Nobody else deletes that one meanwhile, for the same reason.

    Where that is no longer ``known``, it goes instead.
    """
    with engine.sweeping() as free:
        if not free or other.size(name) != size:
            return False
        if known is not None and not known():
            if at.size(name) == size:
                other.delete(name)
            raise StoreBusy(f"somebody else brings the packs back from {other.place}", hint="Nothing is lost.")
        at.delete(name)
        return True


def _copied(source: Objects, name: str, size: int) -> Iterator[bytes]:
    for at in range(0, size, RUN_BYTES):
        yield source.read(name, at, min(RUN_BYTES, size - at))


_own = threading.local()  # making a compressor takes as long as compressing a small chunk, and none serves two threads


def _shorter(raw: bytes) -> bytes:
    """A chunk as it is, or compressed."""
    if (compressor := getattr(_own, "compressor", None)) is None:
        compressor = _own.compressor = zstandard.ZstdCompressor(level=1)
    if len(raw) > SAMPLED_BYTES:
        middle, part = len(raw) // 2, min(SAMPLE_BYTES, len(raw) // 16)
        sample = raw[:part] + raw[middle : middle + part] + raw[-part:]
        if len(compressor.compress(sample)) > len(sample) * 15 // 16:
            return raw
    packed = compressor.compress(raw)
    return packed if len(packed) < len(raw) else raw


def _damaged(digest: bytes, how: str, *what: str) -> Damaged:
    name = f"chunk {digest.hex()}"
    return Damaged(f"{name} {how}", what=(*what, name), hint=HINT)
