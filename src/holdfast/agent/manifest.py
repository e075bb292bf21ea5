"""The manifest: the logical content of a checkpoint, whose digest is its id (format.md section 3)."""

from __future__ import annotations

import os

from msgspec import Struct, field
from ormsgpack import packb

from holdfast.codec.values import decode, encode
from holdfast.errors import CorruptValue
from holdfast.store.catalog import checkpoint_id

VERSION = 1
_TYPES = [int, bytes, bytes, list, bytes, list, bytes, str, int, bytes, str, bytes]
"""Of what a manifest is a list of. One that has a right id was still written by somebody, perhaps with intent."""


class Manifest(Struct, frozen=True):
    """What a checkpoint says. Nothing about how it is stored."""

    parent: bytes
    agent: bytes
    sections: list[tuple[str, bytes]]
    operations: bytes
    metadata: bytes
    label: str
    time_us: int
    kind: str = "checkpoint"
    target: bytes = b""
    effects: tuple[int, bytes] = (0, b"")
    nonce: bytes = field(default_factory=lambda: os.urandom(16))

    def encode(self) -> bytes:
        """The manifest as bytes. The bare library writes them as the codec would, unless a name has lone surrogates."""
        flat = [part for pair in self.sections for part in pair]
        parts = [
            VERSION, self.parent, self.agent, flat, self.operations, list(self.effects), self.metadata,
            self.label, self.time_us, self.nonce, self.kind, self.target,
        ]  # fmt: skip
        try:
            return packb(parts)
        except TypeError:
            return encode(parts)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        parts = decode(data)
        if type(parts) is not list or list(map(type, parts)) != _TYPES or parts[0] != VERSION:
            raise _malformed(data)
        _, parent, agent, flat, operations, effects, metadata, label, time_us, nonce, kind, target = parts
        names, digests = flat[::2], flat[1::2]
        if len(names) != len(digests) or not (set(map(type, names)) <= {str} and set(map(type, digests)) <= {bytes}):
            raise _malformed(data)
        if list(map(type, effects)) != [int, bytes]:
            raise _malformed(data)
        sections = list(zip(names, digests, strict=True))
        count, chain = effects
        return cls(parent, agent, sections, operations, metadata, label, time_us, kind, target, (count, chain), nonce)


def _malformed(data: bytes) -> CorruptValue:
    return CorruptValue("a manifest does not follow the format", what=(f"checkpoint {checkpoint_id(data).hex()}",))
