"""The proof of what comes from elsewhere, before it gets a row.

Owns replaying, and reading whatever something names. Must not know where it comes from, or where rows go. What always
holds: a checkpoint is proven when its operations lead from its parent's state to the digests that it recorded, and when
every value that they put there, and every tree that it names, can be read to the end; nodes and chunks that wait to be
written count as stored; memory is bounded by a few states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.agent.branch import SEAL_BYTES, SEAL_CHECKPOINTS
from holdfast.agent.history import Blank, Stored, children
from holdfast.codec import wire
from holdfast.codec.blocks import DICT, LEAF_MAX_BYTES, leaf_items
from holdfast.codec.diff import values_of
from holdfast.codec.operations import decode_operations
from holdfast.codec.state import State
from holdfast.codec.tree import read
from holdfast.codec.types import Registry
from holdfast.codec.values import decode
from holdfast.errors import Damaged
from holdfast.store.catalog import Point
from holdfast.store.database import Contents
from holdfast.store.engine import Refused
from holdfast.store.manifest import Manifest

_STATES_KEPT = 4
_PROVEN_MAX = 200_000
_ROW_BYTES = 256
_NO_TYPES = Registry()


class Brought:
    """Nodes and chunks that have come, and those that must be in the store when they are written."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, bytes] = {}
        self.chunks: dict[bytes, bytes] = {}
        self.needs_nodes: set[bytes] = set()
        self.needs_chunks: set[bytes] = set()
        self.size = 0

    def add(self, other: Brought) -> None:
        self.nodes.update(other.nodes)
        self.chunks.update(other.chunks)
        self.needs_nodes |= other.needs_nodes
        self.needs_chunks |= other.needs_chunks


class _Held(NamedTuple):
    """A state at hand; how many checkpoints and bytes were since its base, and from how many bytes on it is sealed."""

    state: State
    steps: int = 0
    size: int = 0
    due: int = 0


class Proof:
    """Proves checkpoints, parents before children, and what they name."""

    def __init__(self, now: Contents, write: Callable[[], None]) -> None:
        """``write`` writes the rows that wait: a state that is not at hand any more is read from the store."""
        self._now = now
        self._write = write
        self.come = Brought()  # what nothing names yet
        self.named = Brought()  # what rows name that wait to be written
        self._states: OrderedDict[bytes, _Held] = OrderedDict()
        self._state = State(_Empty(self, now))
        self._proven: set[bytes] = set()
        self._waiting: list[tuple[int, bytes]] = []

    def object(self, name: bytes) -> bytes | None:
        """A node or chunk that waits to be written."""
        for kept in (self.come, self.named):
            found = kept.nodes.get(name) or kept.chunks.get(name)
            if found is not None:
                return found
        return None

    def accept(self) -> None:
        """What has come is named by a row that waits, and is written with it."""
        self.named.add(self.come)
        self.come = Brought()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def replay(self, id: bytes, manifest: Manifest, data: bytes) -> bool:
        """Do a checkpoint's operations on its parent's state.

        True: it is due to be sealed, as when it was made, and the nodes of its state have been added to what comes.
        """
        operations = decode_operations(data, manifest.time_us)
        held = self._of(manifest.parent)
        held.state.do(operations)
        if held.state.digests() != manifest.sections:
            raise unlike(id, "has operations that do not lead to its state")
        for operation in operations:
            for value in values_of(operation.code, operation.args):
                self._read(value)
        self._follow()
        held = held._replace(steps=held.steps + 1, size=held.size + _ROW_BYTES + len(data))
        if held.steps >= SEAL_CHECKPOINTS or held.size >= max(SEAL_BYTES, held.due):
            nodes = held.state.unstored()
            size = sum(map(len, nodes.values()))
            if held.steps >= SEAL_CHECKPOINTS or size <= held.size + LEAF_MAX_BYTES:
                self.come.nodes.update(nodes)
                self.come.needs_nodes.update(root for _, root in manifest.sections)
                self.come.needs_nodes.update(child for raw in nodes.values() for child in children(raw))
                return True  # the next one reads the state as it is stored then
            held = held._replace(due=size)  # the nodes that changed are more than what changed them
        self._states[id] = held
        while len(self._states) > _STATES_KEPT:
            self._states.popitem(last=False)
        return False

    def _of(self, id: bytes) -> _Held:
        """A state, to be changed: whoever else grows from it loads it again."""
        if not id:
            return _Held(State(_Empty(self, self._now)))
        held = self._states.pop(id, None)
        if held is None:
            self._write()
            view = self._now.view
            point = view.find(id)
            if point is None:
                raise Refused(f"checkpoint {id.hex()[:12]} was forgotten meanwhile")
            source = _Parent(self, self._now, point)
            since = source.since_base()
            held = _Held(State(source), len(since), sum(len(view.operations(one)) + _ROW_BYTES for one in since))
        return held

    # -- values and trees ---------------------------------------------------------------------------------------

    def trees(self, roots: Sequence[bytes]) -> None:
        """Read trees that something names. What was read before is not read again."""
        for root in roots:
            self._name(wire.BIG, root)
        self._follow()

    def _read(self, data: bytes) -> None:
        decode(data, _NO_TYPES, inert=True, big=self._name)

    def _name(self, code: int, payload: bytes) -> None:
        payload = bytes(payload)
        if code == wire.BIG:
            self.come.needs_nodes.add(payload)
        if payload not in self._proven:
            self._waiting.append((code, payload))

    def _follow(self) -> None:
        if len(self._proven) > _PROVEN_MAX:
            self._proven.clear()
        while self._waiting:
            code, payload = self._waiting.pop()
            if payload in self._proven:
                continue
            if code == wire.BIG:
                self._tree(payload)
            else:
                self._read(self._state.bulk(payload))
                self.come.needs_chunks.update(decode(payload)[2])
            self._proven.add(payload)

    def _tree(self, root: bytes) -> None:
        tree, leaves = read(root, self._state.fetch)
        for leaf, raw in zip(tree.leaves, leaves, strict=True):
            if leaf.digest not in self._proven:
                count, items = leaf_items(raw)
                parts = 2 * count if tree.kind == DICT else count
                self._read(b"\xdd" + parts.to_bytes(4, "big") + items)
                self._proven.add(leaf.digest)


class _Empty(Blank):
    """The source of the empty state."""

    _proof: Proof

    def __init__(self, proof: Proof, now: Contents) -> None:
        super().__init__(now)
        self._proof = proof

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        found = {one: raw for one in digests if (raw := self._proof.object(one)) is not None}
        return {**super().nodes([one for one in digests if one not in found]), **found}

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join([self._proof.object(one) or super(_Empty, self).bulk([one]) for one in digests])


class _Parent(_Empty, Stored):
    """The source of a state that operations which have come are done on."""

    def __init__(self, proof: Proof, now: Contents, point: Point) -> None:
        Stored.__init__(self, now, point)
        self._proof = proof


def unlike(id: bytes, why: str) -> Damaged:
    """A checkpoint that is not what it says."""
    short = id.hex()[:12]
    return Damaged(f"checkpoint {short} {why}", what=(f"checkpoint {short}",))
