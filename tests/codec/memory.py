"""What a catalog does for one line of history, in memory: nodes, chunks, and operations since the last seal."""

from __future__ import annotations

from typing import Any

from holdfast.codec.document import Document
from holdfast.codec.operations import Operation, decode_operations, encode_operations
from holdfast.codec.told import Captured, Saved
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from tests.codec.kinds import registry

TYPES = registry()


class Memory:
    """A store of one line."""

    def __init__(self, types: Registry = TYPES) -> None:
        self.types = types
        self.kept_nodes: dict[bytes, bytes] = {}
        self.kept_chunks: dict[bytes, bytes] = {}
        self.newest: list[Operation] = []  # of the last commit
        self.head = self.step = Revision(self, [], {}, [])

    def commit(self, document: Saved, *, seal: bool) -> Revision:
        captured = document.capture()
        if seal:
            document.seal(captured)
        return self.write(document, captured, seal=seal)

    def write(self, document: Saved, captured: Captured, *, seal: bool = False) -> Revision:
        self.kept_nodes.update(captured.nodes)
        self.kept_chunks.update(captured.chunks)
        self.newest = decode_operations(encode_operations(captured.operations, 10**15, self.types), 10**15)
        # The operations lead from the parent to this state, too, also when it is sealed.
        self.step = Revision(self, captured.sections, self.head.base, [*self.head.done, *self.newest])
        self.head = Revision(self, captured.sections, dict(captured.sections), []) if seal else self.step
        try:
            document.written(captured, sealed=seal)
        except BaseException:
            document.written(captured, sealed=seal)  # it is: an interrupt changes nothing about that
            raise
        return self.head


class Revision:
    """One saved state; the source of documents."""

    def __init__(
        self, memory: Memory, sections: list[tuple[str, bytes]], base: dict[str, bytes], done: list[Operation]
    ) -> None:
        self._memory = memory
        self.sections = sections
        self.base = base
        self.done = done

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        return {digest: self._memory.kept_nodes[digest] for digest in digests}

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join(self._memory.kept_chunks[digest] for digest in digests)

    def operations(self, section: str) -> list[Operation]:
        return [operation for operation in self.done if operation.path[0] == section]

    def again(self) -> bool:
        return False

    def load(self, **options: Any) -> Document:
        return Document(self._memory.types, self, **options)


def same(one: Any, two: Any) -> bool:
    """Equal with types and order: the encoding says it all, and fast."""
    return encode(one, TYPES) == encode(two, TYPES)
