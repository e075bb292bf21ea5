"""What rows of a damaged catalog still name although its own row is lost: chunks of bulk values, and metadata.

Owns how these are made good, for repair alone. What always holds: a chunk gets a row only where its bytes were found
and proven; metadata of which only the digest is left gets a record that says so and stands in for nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.agent.collecting import sized_chunks
from holdfast.agent.manifest import Manifest
from holdfast.errors import Damaged, StoreFailed
from holdfast.store import rescue
from holdfast.store.catalog import Progress, lost_metadata
from holdfast.store.cipher import Cipher
from holdfast.store.embedded import Embedded
from holdfast.store.files import failed_disk
from holdfast.store.searching import Place, find_chunks
from holdfast.store.tiering import copy_back, file_name

_Taken = dict[bytes, dict[bytes, Place]]
"""Pack, chunk in it, where."""


def mark_lost_metadata(catalog: Embedded) -> set[bytes]:
    """Write down of metadata that checkpoints name that it is lost; returns the digests of all that is."""
    there = set(catalog.metadata_digests())
    named = {Manifest.decode(row.manifest).metadata for row in catalog.checkpoints()}
    rescue.add_metadata(catalog, {digest: lost_metadata(digest) for digest in named - there})
    return {digest for digest in named if catalog.metadata(digest) == lost_metadata(digest)}


def place_chunks(catalog: Embedded, packs: Path, cipher: Cipher, progress: Progress) -> list[str]:
    """See to it that exactly the chunks that can be read have rows. Returns what was wrong, for people.

    Chunks without a place are looked for in the pack files, those in colder places last. One that only cannot be
    reached is not lost: that ends the repair.
    """
    taken, unreadable = _places(catalog, cipher)
    placed = {digest for places in taken.values() for digest in places}
    wanted = {digest: length for digest, length in _named(catalog) if digest not in placed}
    found = _search(catalog, packs, cipher, wanted, taken, progress) if wanted else set()
    problems = []
    for pack, lost in unreadable.items():
        gone = len(lost - found)
        if gone:
            count = len(lost) + len(taken[pack])
            problems.append(f"packs/{file_name(pack)}: {gone} of {count} chunk(s) are lost")
    if found:
        problems.append(f"tables pack and chunk: {len(found)} chunk(s) had no place; they were found in the packs")
    return problems


def _places(catalog: Embedded, cipher: Cipher) -> tuple[_Taken, dict[bytes, set[bytes]]]:
    """For each pack the places of its chunks that can be read, and those that cannot, which lose their rows."""
    taken: _Taken = {}
    unreadable: dict[bytes, set[bytes]] = {}
    for pack in catalog.pack_rows():
        here = taken.setdefault(pack.uuid, {})
        for row in catalog.chunk_rows(pack.p):
            try:
                for _ in catalog.chunks([row.digest]):
                    pass
                here[row.digest] = row.offset, row.offset + row.stored + cipher.overhead
            except (Damaged, StoreFailed) as error:
                if isinstance(error, StoreFailed) and not failed_disk(error):
                    raise
                unreadable.setdefault(pack.uuid, set()).add(row.digest)
        rescue.drop_chunks(catalog, unreadable.get(pack.uuid, ()))
    rescue.drop_homeless_chunks(catalog)
    return taken, unreadable


def _search(
    catalog: Embedded, packs: Path, cipher: Cipher, wanted: Mapping[bytes, int], taken: _Taken, progress: Progress
) -> set[bytes]:
    """Give rows to those of the chunks that are in some pack; returns their digests."""
    numbers = {pack.uuid: pack.p for pack in catalog.pack_rows()}
    placed: set[bytes] = set()
    before = 0
    for pack, file, more in _files(catalog, packs):
        left = {digest: length for digest, length in wanted.items() if digest not in placed}
        if not left:
            break
        size = file.stat().st_size
        total = before + size + more

        def done(at: int, before: int = before, total: int = total) -> None:
            progress("looking for chunks", min(before + at, total), total)

        found = dict(find_chunks(file, left, cipher, taken.get(pack, {}).values(), done))
        before += size
        if found and pack not in numbers:
            numbers[pack] = max(numbers.values(), default=0) + 1
            rescue.add_rows(catalog, "pack", [(numbers[pack], pack, size)])
        rows = [(digest, numbers[pack], at, wanted[digest], wanted[digest]) for digest, at in found.items()]
        rescue.add_rows(catalog, "chunk", rows)
        placed |= found.keys()
    return placed


def _files(catalog: Embedded, packs: Path) -> Iterator[tuple[bytes, Path, int]]:
    """Each pack's name and file, and how many bytes are still to come as far as that is known.

    First those that are here. One in a colder place is copied, and is here only until the next is asked for.
    """
    here = {name: file for file in sorted(packs.iterdir()) if (name := _uuid(file)) is not None}
    more = sum(file.stat().st_size for file in here.values())
    for pack, file in here.items():
        more -= file.stat().st_size
        yield pack, file, more
    for pack in sorted(catalog.tiers.packs.keys() - here.keys()):
        place, file = catalog.tiers.of(pack), packs / file_name(pack)
        try:
            if place is not None:
                copy_back(place, file, lambda _file: None)  # each chunk that is found in it is proven
                yield pack, file, 0
        except Damaged:
            pass  # it is missing there
        finally:
            file.unlink(missing_ok=True)


def _named(catalog: Embedded) -> Iterator[tuple[bytes, int]]:
    """Every chunk that something names, and its length."""
    for digest in catalog.node_digests():
        for node in catalog.nodes([digest]).values():
            yield from sized_chunks(node)
    for row in catalog.checkpoints():
        yield from sized_chunks(row.operations)
        yield from sized_chunks(catalog.tail(row.n) or b"")
    for b in catalog.branches_with_records():
        for record, _ in catalog.records_as_they_are(b, 0):
            yield from sized_chunks(record.body)


def _uuid(file: Path) -> bytes | None:
    try:
        found = uuid.UUID(file.stem).bytes
    except ValueError:
        return None
    return found if file.name == file_name(found) else None
