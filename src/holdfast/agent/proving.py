"""The proof of checkpoints that are on their way from elsewhere.

Owns replaying: a checkpoint's operations on its parent's state must lead to the digests that it recorded, and a sealed
one must be readable from its nodes alone. Must not know where checkpoints come from or where their rows go. What always
holds: nothing is taken on trust, and memory is bounded by a few states and nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ormsgpack import packb

from holdfast.agent import history
from holdfast.agent.manifest import Manifest
from holdfast.agent.parcels import Point
from holdfast.codec.state import State
from holdfast.codec.values import decode
from holdfast.errors import CorruptValue, Damaged
from holdfast.store.catalog import CheckpointRow, States

# States kept at hand; others are loaded again, which is bounded work.
_STATES_KEPT = 4
# Nodes that are kept because the values of neighbours lie in them.
_PLACED_MAX = 64


class _Given:
    """The values of one checkpoint, as they came."""

    def __init__(self, values: list[bytes]) -> None:
        self._values = values

    def of(self, row: CheckpointRow) -> list[bytes]:  # noqa: ARG002 - there is one
        return self._values


class Proving:
    """Proves the checkpoints of one agent, parents before children. Their nodes and chunks are stored already."""

    def __init__(self, catalog: States, row_of: Callable[[bytes], CheckpointRow]) -> None:
        """``row_of`` gives the row of a checkpoint that was proven before, by its id."""
        self._catalog = catalog
        self._row_of = row_of
        self._states: OrderedDict[bytes, State] = OrderedDict()
        self._placed: dict[bytes, bytes] = {}  # nodes that hold values of the last checkpoints

    def prove(self, point: Point, identity: bytes, manifest: Manifest, *, cut: bool) -> None:
        """Raise unless a checkpoint is what it says. ``cut``: its parent is nowhere, so its state stands alone."""
        row = CheckpointRow(1, 0, 0, 0, point.depth, 1, point.manifest, point.operations)
        operations = history.operations_of(row, manifest, _Given(self._values(point)))  # type: ignore[arg-type]
        state = None
        if not cut:
            state = self._state(manifest.parent)
            state.do(operations)
            if state.digests() != manifest.sections:
                short = identity.hex()[:12]
                raise Damaged(
                    f"the operations of checkpoint {short} do not lead to its state", what=(f"checkpoint {short}",)
                )
            history.read_values(state, operations)
        if point.sealed:
            stored = history.read_all(self._catalog, row, arriving=True)
            state = stored if state is None else state
        if state is None:
            raise Damaged("a checkpoint that rests on nothing")
        self._states[identity] = state
        while len(self._states) > _STATES_KEPT:
            self._states.popitem(last=False)

    def _values(self, point: Point) -> list[bytes]:
        if point.tail is not None:
            values = decode(point.tail)
            if point.places or not isinstance(values, list) or not all(type(value) is bytes for value in values):
                raise CorruptValue("the values of a checkpoint do not follow the format")
            if packb(values) != point.tail:
                raise CorruptValue("the values of a checkpoint are not written as the format says")
            return values
        if len(self._placed) > _PLACED_MAX:
            self._placed.clear()
        self._placed.update(self._catalog.nodes({one for one, _, _ in point.places if one not in self._placed}))
        found = []
        for digest, offset, length in point.places:
            node = self._placed.get(digest, b"")
            if offset < 2 or offset + length > len(node):
                raise Damaged(f"a value lies outside of node {digest.hex()[:16]}", what=(f"node {digest.hex()[:16]}",))
            found.append(node[offset : offset + length])
        return found

    def _state(self, parent: bytes) -> State:
        """The parent's state, to be changed: whoever else grows from it loads it again."""
        if not parent:
            return history.state_of(self._catalog, None)
        state = self._states.pop(parent, None)
        if state is not None:
            return state
        return history.state_of(self._catalog, self._row_of(parent))
