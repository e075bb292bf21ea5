"""What a document is made of: its sections, and what goes in and out of it as data.

Owns the records that the other modules of the document share. Knows nothing of how values are encoded or changed.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

from holdfast.codec.operations import Operation
from holdfast.codec.trails import Trail


class _Missing:
    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


class Source(Protocol):
    """Where a document's sections come from."""

    base: dict[str, bytes]  # section digests of the sealed state below
    sections: list[tuple[str, bytes]]  # section digests of the state itself, in order

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        """Verified raw nodes."""

    def bulk(self, digests: list[bytes]) -> bytes:
        """The joined content of verified chunks."""

    def operations(self, section: str) -> list[Operation]:
        """What happened to a section between the base and the state, in order."""


class OneSection:
    """A source that has one section of another."""

    def __init__(self, source: Source, name: str) -> None:
        self.base = {key: digest for key, digest in source.base.items() if key == name}
        self.sections = [pair for pair in source.sections if pair[0] == name]
        self.nodes, self.bulk, self.operations = source.nodes, source.bulk, source.operations


class Capture(NamedTuple):
    """What one checkpoint has to write."""

    sections: list[tuple[str, bytes]]
    operations: list[Operation]
    nodes: dict[bytes, bytes]
    chunks: dict[bytes, bytes]


class Captured(Protocol):
    """What checkpoints are made of: a document of live values, or one of values that are given whole."""

    lock: threading.RLock

    def capture(self) -> Capture:
        """Everything since the last capture, and the digests of the state as it is now."""

    def restore(self, captured: Capture) -> None:
        """A capture could not be written: everything in it is still to be written."""

    def unstored(self) -> tuple[dict[bytes, bytes], dict[bytes, tuple[bytes, int]]]:
        """All nodes that the catalog does not have, and where each item sits; they count as stored from now on."""

    def stands(self, captured: Capture, nodes: dict[bytes, bytes]) -> bool:
        """Whether nodes that were found after a capture are those of its state; if not, they go with the next one."""

    def unstored_bytes(self) -> int:
        """About how much ``unstored`` would have to write."""


class Encoded:
    """A value that comes as its encoding: replayed, or taken from another document."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Section:
    """One top-level key. ``digest`` is None while it is to be computed; ``stored``: its nodes are in the catalog."""

    __slots__ = ("digest", "dirty", "loaded", "name", "stored", "trail", "value")

    def __init__(self, name: str, digest: bytes | None = None) -> None:
        self.name = name
        self.digest = digest
        self.stored = False
        self.loaded = digest is None
        self.dirty = False  # changed since the last capture
        self.value: Any = MISSING
        self.trail: Trail | None = None  # of a value that has no tree yet, from how it was put in

    def changed(self) -> Trail | None:
        """Something inside is about to be different."""
        self.digest = None
        self.stored = False
        self.dirty = True
        return self.trail
