"""A line that is kept in memory, for tests of everything that does not depend on a disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from holdfast.errors import Damaged
from holdfast.run.records import Record, decode_record


class Memory:
    """A line in memory, as bytes. ``durable`` is what a crash would leave; ``crashed()`` is the line after one."""

    def __init__(self, bodies: Sequence[bytes] = (), blocks: Mapping[bytes, bytes] | None = None) -> None:
        self._bodies = list(bodies)
        self._blocks = dict(blocks or {})
        self._lock = threading.Lock()
        self.durable = len(self._bodies)
        self.flushes = 0

    @property
    def count(self) -> int:
        return len(self._bodies)

    @property
    def size_bytes(self) -> int:
        """What it would take on disk, roughly."""
        return sum(map(len, self._bodies)) + sum(map(len, self._blocks.values()))

    def append(
        self,
        *records: Record,
        nodes: Mapping[bytes, bytes] | None = None,
        chunks: Mapping[bytes, bytes] | None = None,
        flush: bool = False,
    ) -> int:
        bodies = [record.encode() for record in records]
        with self._lock:
            self._bodies += bodies
            self._blocks.update({**(nodes or {}), **(chunks or {})})
            number = len(self._bodies)
        if flush:
            self.flush()
        return number

    def flush(self) -> None:
        with self._lock:
            if self.durable < len(self._bodies):
                self.durable = len(self._bodies)
                self.flushes += 1

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        for number in range(after, len(self._bodies)):
            yield number + 1, decode_record(self._bodies[number])

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        missing = [digest for digest in digests if digest not in self._blocks]
        if missing:
            raise Damaged(f"node {missing[0].hex()[:16]} is missing", what=(f"node {missing[0].hex()[:16]}",))
        return {digest: self._blocks[digest] for digest in digests}

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join(self.nodes(digests).values())

    def crashed(self, keep: int | None = None) -> Memory:
        """The line as a crash leaves it: what was durable, or the first ``keep`` records."""
        return Memory(self._bodies[: self.durable if keep is None else keep], self._blocks)
