"""What travels between stores: an agent's history as a sequence of parcels.

Owns their shapes, which are also the frames of a bundle (format.md section 10). Knows nothing of stores. What always
holds: a parcel has no number that means something in one store only; nodes, chunks and metadata come without a digest,
because whoever gets them computes it; whatever a parcel needs has come before it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.agent.names import check_name
from holdfast.codec.values import decode
from holdfast.errors import CorruptValue, HoldfastError

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Identity = Annotated[bytes, Meta(max_length=32)]
"""A checkpoint's id, or nothing."""
Uuid = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=1024)]
MANY = 100_000
"""Branches, tags or judgements of one agent."""
TOGETHER = 256
"""Nodes, records or events in one parcel."""
Count = Annotated[int, Meta(ge=0, le=2**62)]


class Head(Struct, array_like=True, frozen=True, tag=0):
    """What a bundle begins with: its format, the store that it was made from, how many agents it has."""

    version: Count
    store: Uuid
    agents: Count


class End(Struct, array_like=True, frozen=True, tag=9):
    """What a bundle ends with: how many parcels it has, this one included."""

    parcels: Count


class BranchAbout(Struct, array_like=True, frozen=True):
    """A branch as it stands. ``more`` is an encoded map: what else its body holds.

    It inherits the first ``start`` records of the branch ``origin`` (its place in the list; -1 where it inherits
    nothing), and has ``count`` in all, with this chain digest after them.
    """

    uuid: Uuid
    name: Name
    more: bytes
    head: Identity
    origin: Annotated[int, Meta(ge=-1, le=2**31)]
    start: Count
    count: Count
    chain: Identity


class About(Struct, array_like=True, frozen=True, tag=1):
    """The first parcel: whose history it is. ``origins`` are the agents that manifests may name as well."""

    store: Uuid
    uuid: Uuid
    name: Name
    created: Annotated[int, Meta(ge=-(2**62), le=2**62)]
    origins: Annotated[list[Uuid], Meta(max_length=MANY)]
    branches: Annotated[list[BranchAbout], Meta(max_length=MANY)]


class Nodes(Struct, array_like=True, frozen=True, tag=2):
    """Nodes of states, of values and of records; those below come before."""

    nodes: Annotated[list[bytes], Meta(max_length=TOGETHER)]


class Chunk(Struct, array_like=True, frozen=True, tag=3):
    """A part of a bulk value."""

    data: bytes


class Metadata(Struct, array_like=True, frozen=True, tag=4):
    """What ran."""

    data: bytes


class Records(Struct, array_like=True, frozen=True, tag=5):
    """Records of a branch's line from number ``first`` on: mark, refs, body."""

    branch: Count
    first: Count
    records: Annotated[list[tuple[Annotated[int, Meta(ge=0, le=1)], bytes, bytes]], Meta(max_length=TOGETHER)]


class Point(Struct, array_like=True, frozen=True, tag=6):
    """A checkpoint. Its values are in ``tail``, or in nodes that came before: digest, offset, length."""

    branch: Count
    depth: Annotated[int, Meta(ge=1, le=2**62)]
    sealed: bool
    cut: bool
    manifest: bytes
    operations: bytes
    key: bytes | None
    tail: bytes | None
    places: list[tuple[Digest, Count, Count]]
    over: Identity = b""
    """Where its parent is gone (``cut``): the nearest ancestor that is left."""


class Events(Struct, array_like=True, frozen=True, tag=7):
    """Events that have a key: time, body, key."""

    events: Annotated[list[tuple[int, bytes, bytes]], Meta(max_length=TOGETHER)]


class Last(Struct, array_like=True, frozen=True, tag=8):
    """The last parcel: names for checkpoints and judgements on them. Times in microseconds, 0 where not known.

    ``tags``: name, id (empty: it is gone), since when; ``validity``: id, what, why, since when. ``upto`` is how far the
    events went in the store that they come from, and what proves that it is the same one.
    """

    tags: Annotated[list[tuple[Name, Identity, int]], Meta(max_length=MANY)]
    validity: Annotated[list[tuple[Digest, str, str, int]], Meta(max_length=MANY)]
    upto: tuple[Count, bytes]


Parcel = About | Nodes | Chunk | Metadata | Records | Point | Events | Last


def check_about(about: About) -> None:
    """What can be said of the first parcel alone."""
    names = [branch.name for branch in about.branches]
    if len(set(names)) != len(names) or len({branch.uuid for branch in about.branches}) != len(names):
        raise CorruptValue("two branches have one name")
    for at, branch in enumerate(about.branches):
        check_name(branch.name, "a branch", but="@")
        try:
            more = decode(branch.more, inert=True)
        except HoldfastError as error:
            raise CorruptValue("a branch does not follow the format") from error
        if (
            not isinstance(more, dict)
            or type(more.get("created")) is not int
            or type(more.get("from")) is not bytes
            or not more.keys().isdisjoint({"name", "origins", "base", "received", "recovered", "arriving"})
            or not branch.origin < at
            or branch.start > branch.count
        ):
            raise CorruptValue("a branch does not follow the format")
