"""A line as the rest of this room sees it: append, flush, read.

Owns the interface between what is recorded and where. Must not know what records mean. What always holds: numbers are
dense and in the order of ``append``; what ``flush`` or ``append(flush=True)`` returned from is durable together with
everything before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from holdfast.run.records import Record


class Ledger(Protocol):
    """The line of one branch, open for writing."""

    @property
    def count(self) -> int:
        """How many records there are, those on their way to disk included."""

    def append(
        self,
        *records: Record,
        nodes: Mapping[bytes, bytes] | None = None,
        chunks: Mapping[bytes, bytes] | None = None,
        flush: bool = False,
    ) -> int:
        """Write records at the end; returns the last one's number. Thread-safe."""

    def flush(self) -> None:
        """Return when everything appended so far is durable."""

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """Records with their numbers, in order, inherited ones first."""

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]: ...

    def bulk(self, digests: list[bytes]) -> bytes: ...
