"""Mutable values that were handed out: instances, bytearrays, deques, tuples with lists in them, values kept whole.

Owns the snapshots and their comparison with the live values at every checkpoint. Must not know how values came in.
What always holds: whatever user code may hold and change has a snapshot; a difference becomes an operation, a new
snapshot and a new digest together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from holdfast.codec import operations as op
from holdfast.codec.blocks import INLINE_MAX_BYTES
from holdfast.codec.document.packing import Packing, Snapshot
from holdfast.codec.document.sections import Section
from holdfast.codec.nodes import Node, Path
from holdfast.codec.values import fields_of, is_immutable
from holdfast.errors import Unencodable

# References to a value that sits nowhere any more: its snapshot's, and the argument of getrefcount.
_OWN_REFERENCES = 2
# Snapshots of what left the state together with its container are looked for when there are so many.
_PURGE_FROM = 256


class Handouts:
    """The handed-out values of one document."""

    def __init__(
        self,
        packing: Packing,
        attached: Callable[[Section], bool],
        record: Callable[..., None],
        fixed: Callable[[], bool],
    ) -> None:
        self._packing = packing
        self._fixed = fixed  # whether the state is read-only: what user code does to its copies never counts
        self._snapshots = packing.snapshots
        self._attached = attached
        self._record = record
        self._purge_at = _PURGE_FROM

    def hand_out(self, value: Any, holder: Node | Section) -> None:
        """User code may hold ``value`` from now on."""
        known = self._snapshots.get(id(value))
        if known is not None:
            known.holder = holder
        elif not is_immutable(value):
            self._snapshots[id(value)] = self._snapshot(value, holder)

    def _snapshot(self, value: Any, holder: Node | Section) -> Snapshot:
        fields = None if self._fixed() else fields_of(value)
        if fields is not None and all(map(is_immutable, fields)):
            return Snapshot(value, holder, fields, None)
        return Snapshot(value, holder, None, self._packing.encode(value))

    def orphaned(self, value: Any) -> Snapshot | None:
        """The snapshot of a value that was handed out and has lost its place."""
        snapshot = self._snapshots.get(id(value))
        return snapshot if snapshot is not None and self.place(value, snapshot.holder) is None else None

    def check(self, *, all_encoded: bool = False) -> None:
        """Find what was changed in place and record it. With ``all_encoded`` no snapshot is left to its fields."""
        if self._fixed() or not self._snapshots:
            return
        if len(self._snapshots) >= self._purge_at:
            self._purge()
        places = _Places(self._attached)
        for key, snapshot in list(self._snapshots.items()):
            if sys.getrefcount(snapshot.value) <= _OWN_REFERENCES:
                del self._snapshots[key]
                continue
            if snapshot.unchanged():
                if all_encoded and snapshot.data is None:
                    self._encode(snapshot)
                continue
            path = places.of(snapshot.value, snapshot.holder)
            if path is None:
                del self._snapshots[key]
                continue
            self._compare(snapshot, path)

    def _purge(self) -> None:
        places = _Places(self._attached)
        for key, snapshot in list(self._snapshots.items()):
            if places.of(snapshot.value, snapshot.holder) is None:
                del self._snapshots[key]
        self._purge_at = max(_PURGE_FROM, 2 * len(self._snapshots))

    def _encode(self, snapshot: Snapshot) -> None:
        data = self._packing.encode(snapshot.value)
        if snapshot.unchanged():
            snapshot.data = data

    def _compare(self, snapshot: Snapshot, path: Path) -> None:
        value, holder = snapshot.value, snapshot.holder
        packing = self._packing
        try:
            data = packing.encode(value, len(path))
        except Unencodable as error:
            raise error.within(*path) from None
        if data == snapshot.data:
            return
        fields = fields_of(value)
        if fields is not None and not all(map(is_immutable, fields)):
            fields = None
        # The fields may have changed again since they were encoded; then they are no evidence.
        fresh = Snapshot(value, holder, None, data)
        if len(data) > INLINE_MAX_BYTES:
            fresh.packed = packing.leaf_data(value, data)
        self._spoil(holder, path, fresh.packed or data)
        packing.snapshots[id(value)] = fresh
        try:
            if fields is not None and packing.encode(value) == data:
                fresh.fields = fields
            self._record(op.SET, path, fresh.packed or data)
            packing.done()
        except BaseException:
            packing.snapshots[id(value)] = snapshot  # the next look finds the difference again
            raise

    def _spoil(self, holder: Node | Section, path: Path, data: bytes) -> None:
        self._packing.start(holder)
        if isinstance(holder, Section):
            holder.changed()
            return
        holder._changed(path[:-1])
        if holder._tree is not None:
            holder._given(path[-1], data)

    def place(self, value: Any, holder: Node | Section) -> Path | None:
        """Where a value sits now."""
        return _Places(self._attached).of(value, holder)


class _Places:
    """Finds values by identity; a holder is looked through once."""

    def __init__(self, attached: Callable[[Section], bool]) -> None:
        self._attached = attached
        self._known: dict[int, tuple[Path | None, dict[int, Any]]] = {}

    def of(self, value: Any, holder: Node | Section) -> Path | None:
        if isinstance(holder, Section):
            return [holder.name] if holder.value is value and self._attached(holder) else None
        known = self._known.get(id(holder))
        if known is None:
            path = holder._home()
            keys = {id(item): key for key, item in holder._items()} if path is not None else {}
            known = self._known[id(holder)] = (path, keys)
        path, keys = known
        if path is None or id(value) not in keys:
            return None
        return [*path, keys[id(value)]]
