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
from holdfast.errors import Damaged
from holdfast.store import rescue
from holdfast.store.catalog import Progress, lost_metadata
from holdfast.store.cipher import Cipher
from holdfast.store.embedded import Embedded
from holdfast.store.searching import Place, find_chunks

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

    Chunks without a place are looked for in the pack files. One that only cannot be reached is not lost: that ends the
    repair.
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
            problems.append(f"packs/{_name(pack)}: {gone} of {count} chunk(s) are lost")
    if found:
        problems.append(f"tables pack and chunk: {len(found)} chunk(s) had no place; they were found in the packs")
    if wanted.keys() - found and catalog.tiers.packs:
        away = ", ".join(sorted(set(catalog.tiers.packs.values())))
        problems.append(f"some chunks have no place, and packs in {away} were not searched: bring them back first")
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
            except Damaged:
                unreadable.setdefault(pack.uuid, set()).add(row.digest)
        rescue.drop_chunks(catalog, unreadable.get(pack.uuid, ()))
    rescue.drop_homeless_chunks(catalog)
    return taken, unreadable


def _search(
    catalog: Embedded, packs: Path, cipher: Cipher, wanted: Mapping[bytes, int], taken: _Taken, progress: Progress
) -> set[bytes]:
    """Give rows to those of the chunks that are in some pack; returns their digests."""
    numbers = {pack.uuid: pack.p for pack in catalog.pack_rows()}
    files = {name: file for file in sorted(packs.iterdir()) if (name := _uuid(file)) is not None}
    sizes = {pack: file.stat().st_size for pack, file in files.items()}
    total, before = sum(sizes.values()), 0
    placed: set[bytes] = set()
    for pack, file in files.items():

        def done(at: int, before: int = before) -> None:
            progress("looking for chunks", min(before + at, total), total)

        left = {digest: length for digest, length in wanted.items() if digest not in placed}
        found = dict(find_chunks(file, left, cipher, taken.get(pack, {}).values(), done))
        before += sizes[pack]
        if found and pack not in numbers:
            numbers[pack] = max(numbers.values(), default=0) + 1
            rescue.add_rows(catalog, "pack", [(numbers[pack], pack, sizes[pack])])
        rows = [(digest, numbers[pack], at, wanted[digest], wanted[digest]) for digest, at in found.items()]
        rescue.add_rows(catalog, "chunk", rows)
        placed |= found.keys()
    return placed


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


def _name(pack: bytes) -> str:
    return f"{uuid.UUID(bytes=bytes(pack))}.pack"


def _uuid(file: Path) -> bytes | None:
    try:
        found = uuid.UUID(file.stem).bytes
    except ValueError:
        return None
    return found if file.name == _name(found) else None
