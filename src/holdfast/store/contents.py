"""Reading everything that a store holds, chunks included: as it is now, or as it was at one moment.

Owns the way from a chunk's digest to its bytes, and the read transaction of whoever reads all of a store. Changes
nothing. What always holds: a chunk that leaves this module has the digest that was asked for; at a ``Moment`` nothing
moves, whatever others write, forget or clear meanwhile, and the packs that it may need stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apsw

from holdfast.errors import Damaged
from holdfast.store.catalog import ChunkRow, PackRow
from holdfast.store.cipher import Cipher
from holdfast.store.packs import Packs
from holdfast.store.reading import Reading
from holdfast.store.sqlite import reading_error


class Contents(Reading):
    """Rows, and the chunks that some of them name."""

    _packs: Packs

    def chunks(self, digests: Iterable[bytes]) -> Iterator[bytes]:
        """The chunks' bytes in the order asked for, each proven by its digest."""
        for digest in digests:
            pack, row = self._place_of(digest)
            while True:
                try:
                    data = self._packs.read(pack.uuid, row)
                    break
                except Damaged:
                    # A pack of which little was needed has been written anew since its row was read.
                    now = self._place_of(digest)
                    if now == (pack, row):
                        raise
                    pack, row = now
            yield data

    def _place_of(self, digest: bytes) -> tuple[PackRow, ChunkRow]:
        with self.snapshot():  # a pack that is removed gives its number to the next one
            row = self.chunk_row(digest)
            if row is None:
                raise Damaged(f"chunk {digest.hex()} is not in the catalog", what=(f"chunk {digest.hex()}",))
            pack = self.pack_row(row.p)
        if pack is None:
            raise Damaged(f"table pack, row {row.p}: missing", what=(f"pack {row.p}",))
        return pack, row

    def check_pack(self, pack: PackRow) -> None:
        """Prove the parts of a pack that no chunk covers."""
        self._usable()
        self._packs.check(pack, self.chunk_rows(pack.p))


class Moment(Contents):
    """The store as it was when this was made. Made by ``Embedded.moment()``, which keeps the packs in their place."""

    def __init__(self, connection: apsw.Connection, cipher: Cipher, packs: Packs) -> None:
        super().__init__(connection, cipher)
        self._packs = packs
        try:
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # it begins with the first read
        except apsw.Error as error:
            raise reading_error(error, "reading the catalog") from error
