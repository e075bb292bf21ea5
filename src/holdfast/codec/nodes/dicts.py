"""The tracked dict.

Owns every way in which a dict changes, and which leaf of its tree holds which key.
What always holds: a mutator takes in all its values before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Self

from holdfast.codec import operations as op
from holdfast.codec.blocks import DICT
from holdfast.codec.nodes.base import ABSENT, Node, Path, put_back, release
from holdfast.codec.trails import Trail
from holdfast.codec.trees import Leaf, Tree
from holdfast.errors import Stale

_get = dict.__getitem__


class TrackedDict(dict[Any, Any], Node):
    """A dict inside a state."""

    __slots__ = ("_doc", "_key", "_leaf", "_parent", "_reads", "_tree", "_where")
    _kind = DICT
    _plain = dict

    # -- its place in the tree ------------------------------------------------------------------------

    def _key_of(self, child: Node) -> Any:
        if dict.get(self, child._key) is not child:
            raise Stale("a dict's value is no longer where it was", hint="read it again from agent.state")
        return child._key

    def _told(self) -> int:
        if self._where is not None:
            return len(self._where)
        return self._tree.leaves[0].count  # type: ignore[union-attr] # only asked where there is one

    def _leaf_at(self, key: Any) -> Leaf:
        if self._where is not None:
            leaf: Leaf = self._where[key]
            return leaf
        return self._tree.leaves[0]  # type: ignore[union-attr]

    def _check_keys(self, keys: Iterable[Any]) -> None:
        """Before items come, go or change: C code may have put other keys in the place of those that the tree knows."""
        tree = self._tree
        if tree is None or self._doc.replaying:
            return
        if self._where is None:
            # The keys of a single leaf are those of the dict, once it is proved that the leaf holds just these.
            leaf = tree.leaves[0]
            self._know(leaf)
            leaf.keys = dict.fromkeys(dict.keys(self))
            self._where = dict.fromkeys(leaf.keys, leaf)
        if any((key in self) != (key in self._where) for key in keys):
            self._doc.distrust(self)
            tree.reset(len(self))
            self._forget_leaves()
            self._check_keys(())

    def _edited(self, key: Any, depth: int) -> Trail | None:
        self._check_keys((key,))
        leaf = self._leaf_at(key)
        self._know(leaf)
        self._tree.spoil(leaf, key)  # type: ignore[union-attr]
        if leaf.now is None:
            return None
        trail = leaf.now[key]
        if type(trail) is bytes:
            trail = leaf.now[key] = Trail(trail[len(self._doc.pack_key(key)) :], depth)
        return trail  # type: ignore[no-any-return]

    def _given(self, key: Any, data: bytes) -> None:
        leaf = self._leaf_at(key)
        self._know(leaf)
        self._tree.spoil(leaf, key)  # type: ignore[union-attr]
        if leaf.now is not None:
            key_data = self._doc.pack_key(key)
            if type(key) is not str:
                # Of equal keys that are encoded in different ways a dict keeps the first, and so does this one.
                old = leaf.now[key]
                if type(old) is Trail or not old.startswith(key_data):
                    key_data = self._doc.pack_key(next(own for own in leaf.now if own == key))
            leaf.now[key] = key_data + data

    def _keys_of(self, leaf: Leaf) -> list[Any]:
        return list(dict.keys(self) if leaf.keys is None else leaf.keys)

    def _now(self, leaf: Leaf, items: list[bytes]) -> dict[Any, Any]:
        return dict(zip(self._keys_of(leaf), items, strict=True))

    def _run(self, leaf: Leaf) -> list[bytes]:
        doc, now = self._doc, leaf.now
        if now is not None:
            for key, item in now.items():
                if type(item) is Trail:
                    child = dict.get(self, key)
                    now[key] = doc.pack_key(key) + doc.resolved(item, self, child)
            return list(now.values())
        if leaf.items is not None and leaf.digest is not None:
            return leaf.items
        keys = self._keys_of(leaf)[: leaf.count - len(leaf.pending)]
        # A key that C code took away is encoded as if its value were None; the proof fails then, or it does not matter.
        items = [doc.pack_key(key) + doc.pack(dict.get(self, key)) for key in keys]
        if not self._tree.proves(leaf, items):  # type: ignore[union-attr]
            doc.unproven(self)
        return items + leaf.pending

    def _regrouped(self, leaves: list[Leaf]) -> None:
        tree: Tree = self._tree  # type: ignore[assignment]
        keys: Iterable[Any]
        if self._where is None:
            if len(tree.leaves) == 1:
                return
            self._where = {}
            keys = dict.keys(self).__iter__()
            leaves = tree.leaves
        else:
            keys = iter([key for leaf in leaves for key in leaf.keys or ()])
        for leaf in leaves:
            leaf.keys = dict.fromkeys(islice(keys, leaf.count))
            self._where.update(dict.fromkeys(leaf.keys, leaf))

    def _forget_leaves(self) -> None:
        self._where = None

    def _peek(self) -> dict[Any, Any]:
        return dict.copy(self)

    def _items(self) -> Sequence[tuple[Any, Any]]:
        return list(dict.items(self))

    def _swap(self, key: Any, child: Any) -> None:
        dict.__setitem__(self, key, child)

    def _child(self, key: Any) -> Any:
        """The child under ``key``, wrapped, without wrapping its siblings."""
        value = _get(self, key)
        fresh = self._doc.child(value, self, key, None)
        if fresh is not value:
            dict.__setitem__(self, key, fresh)
        return fresh

    def _touch(self) -> None:
        """Its children are wrapped. A method of the lazy class may still be on its way here."""

    # -- changing ---------------------------------------------------------------------------------------

    def _place(self, key: Any, value: Any) -> None:
        """Set one item; the caller holds the lock."""
        doc = self._doc
        old = dict.get(self, key, ABSENT)
        if put_back(value, old):
            return
        path = self._writable()
        doc.begin()
        key_data = doc.take_key(key, path) if old is ABSENT else b""
        taken, data = doc.take(value, self, key, path, (old,))
        self._changed(path)
        doc.commit()
        self._check_keys((key,))
        release(old, self)
        self._store(key, key_data, taken, data, path)
        doc.busy = doc.changing = None

    def _store(self, key: Any, key_data: bytes, taken: Any, data: bytes, path: Path | None) -> None:
        """Write down one item that was taken in; an empty ``key_data`` means that the key is there already."""
        if self._tree is not None:
            if key_data:
                self._tree_added(key, key_data + data)
            else:
                self._given(key, data)
        dict.__setitem__(self, key, self._doc.settle(taken, self, key, None))
        if path is not None:
            self._doc.record(op.SET, [*path, key], data)

    def _tree_added(self, key: Any, item: bytes) -> None:
        tree: Tree = self._tree  # type: ignore[assignment]
        last = tree.leaves[-1]
        if last.hasher is None and last.count and not last.closed:
            self._know(last)
        leaf = tree.appended(item)
        if leaf.now is not None:
            leaf.now[key] = item
        if self._where is None:
            if len(tree.leaves) > 1:
                self._regrouped(tree.leaves)
                leaf.keys = {key: None}
                self._where[key] = leaf  # type: ignore[index]
            return
        if leaf.keys is None:
            leaf.keys = {}
        leaf.keys[key] = None
        self._where[key] = leaf

    def _drop(self, key: Any) -> Any:
        """Remove one item and return its value; the caller holds the lock."""
        doc = self._doc
        path = self._writable()
        self._changed(path)
        if self._tree is not None:
            self._check_keys((key,))
            leaf = self._leaf_at(key)
            self._know(leaf)
            self._tree.spoil(leaf)
            leaf.count -= 1
            if leaf.now is not None:
                del leaf.now[key]
            if self._where is not None:
                del self._where[key]
                leaf.keys.pop(key, None)  # type: ignore[union-attr]
        value = dict.pop(self, key)
        release(value, self)
        if path is not None:
            doc.record(op.DELETE, [*path, key])
        doc.busy = doc.changing = None
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._doc.lock:
            self._place(key, value)

    def __delitem__(self, key: Any) -> None:
        with self._doc.lock:
            if key not in self:
                raise KeyError(key)
            self._drop(key)

    def pop(self, key: Any, *default: Any) -> Any:
        with self._doc.lock:
            if key not in self:
                return dict.pop(self, key, *default)
            self._child(key)
            return self._drop(key)

    def popitem(self) -> tuple[Any, Any]:
        with self._doc.lock:
            if not self:
                return dict.popitem(self)
            key = next(dict.__reversed__(self))
            return key, self.pop(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        with self._doc.lock:
            if key not in self:
                self._place(key, default)
            return self._child(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        incoming = dict(*args, **kwargs)
        doc = self._doc
        with doc.lock:
            old = {key: dict.get(self, key, ABSENT) for key in incoming}
            for key in [key for key, value in incoming.items() if put_back(value, old[key])]:
                del incoming[key], old[key]
            if not incoming:
                return
            path = self._writable()
            doc.begin()
            leaving = tuple(old.values())
            plan = []
            for key, value in incoming.items():
                key_data = doc.take_key(key, path) if old[key] is ABSENT else b""
                plan.append((key, key_data, *doc.take(value, self, key, path, leaving)))
            self._changed(path)
            doc.commit()
            self._check_keys(incoming)
            for value in leaving:
                release(value, self)
            for key, key_data, taken, data in plan:
                self._store(key, key_data, taken, data, path)
            doc.busy = doc.changing = None

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        with self._doc.lock:
            if not self:
                return
            path = self._writable()
            self._changed(path)
            for value in dict.values(self):
                release(value, self)
            dict.clear(self)
            if self._tree is not None:
                self._tree.reset(0)
                self._tree.leaves[0].now = {}
                self._forget_leaves()
            if path is not None:
                self._doc.record(op.CLEAR, path)
            self._doc.busy = self._doc.changing = None

    def __copy__(self) -> dict[Any, Any]:
        return self.copy()

    @classmethod
    def fromkeys(cls, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)
