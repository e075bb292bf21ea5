"""What travels between stores: agents' histories as a sequence of frames.

Owns their shapes and limits, which a bundle has too (format.md section 10). Knows nothing of stores. What always holds:
a frame has no number that means something in one store only; nodes and chunks come without a digest, because whoever
gets them computes it; whatever a frame needs has come before it; what decodes is within the limits.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from holdfast.agent.names import check_name
from holdfast.errors import BadName, CorruptValue, HoldfastError
from holdfast.store.cipher import digest
from holdfast.store.manifest import TIME_MAX
from holdfast.store.rows import Body, read_body
from holdfast.store.tables import NUMBER_MAX

VERSION = 1
"""Of the frames. Whoever does not know it reads no further than the first one."""

MANY = 100_000
"""Branches, tags or judgements of one agent."""

TOGETHER = 256
"""Nodes, records or entries in one frame."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Identity = Annotated[bytes, Meta(max_length=32)]
"""A checkpoint's id, or nothing."""
Uuid = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Time = Annotated[int, Meta(ge=0, lt=TIME_MAX)]
"""Microseconds since 1970."""
Key = Annotated[bytes, Meta(max_length=64)]
Ids = Annotated[list[Identity], Meta(max_length=MANY)]


class Head(Struct, array_like=True, frozen=True, tag=0):
    """What a bundle begins with: its version, the store that it was made from, the names of its agents."""

    version: Count
    store: Uuid
    agents: Annotated[list[Name], Meta(max_length=MANY)]


class About(Struct, array_like=True, frozen=True, tag=1):
    """An agent begins."""

    uuid: Uuid


class Nodes(Struct, array_like=True, frozen=True, tag=2):
    """Nodes of states, of values and of records, each with those below it; a frame that names one comes after all."""

    nodes: Annotated[list[bytes], Meta(max_length=TOGETHER)]


class Chunk(Struct, array_like=True, frozen=True, tag=3):
    """A part of a bulk value."""

    data: bytes


class Records(Struct, array_like=True, frozen=True, tag=4):
    """Records of a line behind its first ``count``, which have the digest ``chain``: mark, key, refs, digest, body.

    ``at`` is a checkpoint that has that position, where the receiver knows one.
    """

    count: Count
    chain: Identity
    at: Identity
    records: Annotated[
        list[tuple[Annotated[int, Meta(ge=0, le=3)], Key, bytes, Digest, bytes]], Meta(max_length=TOGETHER)
    ]


class Payload(Struct, array_like=True, frozen=True, tag=5):
    """A checkpoint. ``cut``: its parent was forgotten, ``over`` is then the nearest ancestor that is left.

    ``lost``: a repair could not save its metadata.
    """

    manifest: bytes
    operations: bytes
    key: Key
    cut: bool
    over: Identity
    lost: bool = False


class Entries(Struct, array_like=True, frozen=True, tag=6):
    """What an agent's log keeps under keys: time, key, body. A clone brings those of its origin, too."""

    owner: Uuid
    entries: Annotated[list[tuple[Time, Key, bytes]], Meta(max_length=TOGETHER)]


class BranchRef(Struct, array_like=True, frozen=True):
    """A branch as it stands, its line's end, and how it got there.

    ``moves`` are the times at which it went elsewhere than forward, each with what it left and where it went;
    ``stood`` is where transfers have put it.
    """

    uuid: Uuid
    name: Name
    body: bytes
    head: Identity
    depth: Count
    count: Count
    chain: Identity
    moves: Annotated[list[tuple[Time, Identity, Identity]], Meta(max_length=MANY)]
    stood: Ids


class Refs(Struct, array_like=True, frozen=True, tag=7):
    """An agent ends: all of its refs.

    ``said`` is the last word on each tag and each checkpoint's validity, and when it was said; ``left``: where its
    branches have been. ``upto`` says how far its log went, so that the same one need not be read again.
    """

    store: Uuid
    uuid: Uuid
    name: Name
    body: bytes
    branches: Annotated[list[BranchRef], Meta(max_length=MANY)]
    said: Annotated[list[tuple[Time, bytes]], Meta(max_length=MANY)]
    left: Ids
    upto: tuple[Count, Count]


class End(Struct, array_like=True, frozen=True, tag=8):
    """What a bundle ends with: how many frames it has, this one included."""

    frames: Count


Frame = Head | About | Nodes | Chunk | Records | Payload | Entries | Refs | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Frame]] = msgspec.msgpack.Decoder(list[Frame])


def encoded(frames: list[Frame]) -> bytes:
    return _encoder.encode(frames)


def decoded(data: bytes) -> list[Frame]:
    """Frames out of bytes that anybody may have written."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptValue("frames that do not follow the format") from error


def size_of(part: object) -> int:
    """About how many bytes a frame, or a part of one, has."""
    match part:
        case bytes() | str():
            return len(part)
        case list() | tuple():
            return sum(map(size_of, part))
        case Struct():
            return sum(size_of(getattr(part, name)) for name in part.__struct_fields__)
    return 1


def beside(branch: bytes, store: bytes) -> bytes:
    """The uuid under which a branch of another store arrives beside one with which it has parted."""
    return digest(b"beside", branch, store)[:16]


def body_in(data: bytes, table: str = "") -> Body:
    """The body of an agent, a branch or an entry; with the fields that a ``table`` has in its bodies."""
    try:
        return read_body(data, "a frame", table)
    except HoldfastError as error:
        raise _malformed() from error


def check_refs(refs: Refs) -> None:
    """What can be said of them alone."""
    for kept in ([one.name for one in refs.branches], [one.uuid for one in refs.branches]):
        if len(set(kept)) != len(kept):
            raise CorruptValue("two branches have one name")
    try:
        check_name(refs.name, "an agent")
        body_in(refs.body, "agent")
        for branch in refs.branches:
            check_name(branch.name, "a branch", but="@")
            body_in(branch.body, "branch")
        for _, data in refs.said:
            _check_said(body_in(data))
    except BadName as error:
        raise CorruptValue(f"a name that cannot be one: {error.message}") from error


def _check_said(said: Body) -> None:
    match said:
        case {"what": "untag", "name": name, **rest}:
            check_name(name, "a tag", but="@")
        case {"what": "tag", "name": name, "at": bytes(), **rest}:
            check_name(name, "a tag", but="@")
        case {"what": "validity", "at": bytes(), "validity": "good" | "suspect" | "corrupt", "reason": str(), **rest}:
            pass
        case _:
            raise _malformed()
    if rest:
        raise _malformed()


def _malformed() -> CorruptValue:
    return CorruptValue("refs that do not follow the format")
