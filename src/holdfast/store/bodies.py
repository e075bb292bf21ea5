"""The body of a record: what it says, and apart from that the values that it holds.

A record is proven by its digest, and the digest covers what it says and a digest of the values, not the values. So they
can go, and what is left is proven as before. A body without values is what it says and nothing else. Must not know what
a record says. What always holds: bytes that are not what was written are told apart from values that are not there.

    body with values     C1, digest of the values (32), length of what it says (4), what it says, the values
"""

from __future__ import annotations

from blake3 import blake3

_APART = 0xC1
"""The first byte of a body with values: no MessagePack object begins with it."""
_SAID_AT = 37

MARKED, LET_GO = 1, 2
"""Bits of a record's ``mark``: summaries need it; its values were let go on purpose."""


def joined(said: bytes, values: bytes) -> bytes:
    """The body of a record that says this and holds these values, one after another."""
    return b"".join((b"\xc1", _digest_of_values(values), len(said).to_bytes(4, "big"), said, values))


def proof(body: bytes) -> bytes:
    """What the digest of a record covers: all of its body but the values."""
    return body[: _end(body)] if body[:1] == b"\xc1" else body


def split(body: bytes) -> tuple[bytes, bytes | None]:
    """What a record says, and its values; None where it has some, and they are not there."""
    if not body or body[0] != _APART:
        return body, b""
    end = _end(body)
    return body[_SAID_AT:end], body[end:] or None


def body_digest(body: bytes) -> bytes:
    """What the chain of a line covers of a record."""
    return blake3(b"holdfast.record\0" + proof(body)).digest()


def is_written(body: bytes, known: bytes) -> bool:
    """Whether a body is the one with this digest, whole or without its values."""
    if body[0] != _APART:
        return bool(blake3(b"holdfast.record\0" + body).digest() == known)
    end = _end(body)
    if blake3(b"holdfast.record\0" + body[:end]).digest() != known:
        return False
    return len(body) <= end or bool(blake3(b"holdfast.values\0" + body[end:]).digest() == body[1:33])


def values_bytes(body: bytes) -> int:
    """How many bytes of values there are."""
    return len(split(body)[1] or b"")


def is_bare(body: bytes) -> bool:
    """Whether the values that a body should have are not there."""
    return split(body)[1] is None


def _digest_of_values(values: bytes) -> bytes:
    return blake3(b"holdfast.values\0" + values).digest()


def _end(body: bytes) -> int:
    """Where the values begin. What is shorter than it says has none, and is no body that was written."""
    return _SAID_AT + int.from_bytes(body[33:_SAID_AT], "big")
