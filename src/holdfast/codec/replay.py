"""Doing operations again, on bytes: whatever classes the program knows.

Owns the one way in which operations are done. Whoever walks through history (loading, verify, transfer, the mutation
log, undo) needs no other. What always holds: operations that do not fit raise ``Damaged`` and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from holdfast.codec import operations as op
from holdfast.codec.blocks import DICT, LIST, SET, VALUE, key_of, open_inline, root_of
from holdfast.codec.classes import is_key
from holdfast.codec.operations import Operation, key_bytes, part_of
from holdfast.codec.tree import Hunk, Tree, build, set_hunks
from holdfast.codec.wire import is_text
from holdfast.errors import Damaged, format_path

if TYPE_CHECKING:
    from holdfast.codec.state import State


class _Unfit(Exception):
    """An operation does not fit what it is to be done on."""


class Replay:
    """The sections of a state while operations are done on them. The state itself stays as it is."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.sections: dict[str, Tree | bytes | _Draft] = {}
        self.made: list[Tree] = []  # trees inside items: held until the leaves that name them are there

    def do(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            try:
                self._do(operation)
            except _Unfit as error:
                where = format_path(tuple(operation.path))
                raise Damaged(f"an operation on {where} does not fit the state it belongs to", what=(where,)) from error

    def _do(self, operation: Operation) -> None:
        _, code, path, args = operation
        if not path or type(path[0]) is not str:
            raise _Unfit
        name = path[0]
        if len(path) == 1 and code == op.SET:
            tree = self.content(args[0], self.state.other(name))
            self.sections[name] = tree or self.state.settle(build(VALUE, [args[0]]))
            return
        if name not in self.sections:
            raise _Unfit
        if len(path) == 1 and code == op.DELETE:
            del self.sections[name]
            return
        draft = self.sections[name]
        if not isinstance(draft, _Draft):
            tree = self.state.load(name, draft)[0] if isinstance(draft, bytes) else draft
            draft = self.sections[name] = _Draft(self, tree)
        last = len(path) - 1 if code in (op.SET, op.DELETE) else len(path)
        for part in path[1:last]:
            draft = draft.child(part)
        draft.change(code, path[-1], args)

    def content(self, data: bytes, beside: Tree | None = None) -> Tree | None:
        """The tree of a container, from how it stands in an operation or in its parent; None for anything else."""
        root = root_of(data)
        if root is not None:
            return self.state.tree(root, beside)
        inner = open_inline(data)
        return self.state.settle(build(inner.kind, inner.pairs)) if inner is not None else None

    def finish(self) -> dict[str, Tree]:
        """The sections after all operations."""
        for name, section in self.sections.items():
            if isinstance(section, _Draft):
                self.sections[name] = section.flush()
        return self.sections  # type: ignore[return-value]


class _Draft:
    """A container that is being changed; one that is written out in its parent is a small tree meanwhile.

    What is set, and what comes at the end, is gathered until something else comes.
    """

    def __init__(self, sections: Replay, tree: Tree) -> None:
        if tree.kind == VALUE:
            raise _Unfit
        self.sections, self.kind, self.tree = sections, tree.kind, tree
        self._edits: dict[int, bytes | _Draft] = {}  # by index: an item, or a dict's value
        self._tail: dict[bytes, bytes | _Draft] | list[bytes | _Draft] = {} if tree.kind == DICT else []

    def size(self) -> int:
        return self.tree.count + len(self._tail)

    # -- operations -------------------------------------------------------------------------------------------

    def change(self, code: int, part: Any, args: tuple[Any, ...]) -> None:
        """Do an operation here; ``part`` is the last of its path."""
        if code == op.SET and self.kind != SET:
            self._put(part, args[0])
        elif code == op.DELETE and self.kind == DICT:
            self._drop(part)
        elif code == op.CLEAR:
            self._splice(0, self.size(), [])
        elif code == op.SPLICE and self.kind == LIST:
            start, count, values = args
            if type(start) is not int or type(count) is not int or not 0 <= start <= start + count <= self.size():
                raise _Unfit
            self._splice(start, start + count, values)
        elif code == op.ARRANGE and self.kind == LIST:
            items = self.flush().all(self.sections.state.fetch)
            self._splice(0, len(items), _arrange(items, args[0]))
        elif code in (op.ADD, op.REMOVE) and self.kind == SET:
            if len(set(args[0])) != len(args[0]) or not all(map(_is_item, args[0])):
                raise _Unfit
            gone, come = (args[0], []) if code == op.REMOVE else ([], args[0])
            hunks = set_hunks(self.tree, gone, come, self.sections.state.fetch)
            if hunks is None:
                raise _Unfit
            self._apply(hunks)
        else:
            raise _Unfit

    def child(self, part: Any) -> _Draft:
        """The container at a key or index, to be changed."""
        holder, at = self._slot(part)
        if holder is None:
            raise _Unfit
        if holder is self._edits and at not in self._edits:
            (item,) = self.tree.part(at, at + 1, self.sections.state.fetch)
            holder[at] = item[len(key_of(item)) :] if self.kind == DICT else item
        if type(holder[at]) is bytes:
            tree = self.sections.content(holder[at])
            if tree is None:
                raise _Unfit
            holder[at] = _Draft(self.sections, tree)
        return holder[at]  # type: ignore[no-any-return]

    def _slot(self, part: Any) -> tuple[Any, Any]:
        """Where the item at a key or index is, or is to be, gathered; (None, key) when a dict lacks the key."""
        count = self.tree.count
        if self.kind == DICT:
            if type(part) is not str and not is_key(part):
                raise _Unfit
            key = key_bytes(part)
            if key in self._tail:
                return self._tail, key
            at = self.tree.place(key, self.sections.state.fetch)
            return (self._edits, at) if at >= 0 else (None, key)
        if self.kind != LIST or type(part) is not int or not 0 <= part < self.size():
            raise _Unfit
        return (self._edits, part) if part < count else (self._tail, part - count)

    def _put(self, part: Any, data: bytes) -> None:
        holder, at = self._slot(part)
        if holder is None:
            holder = self._tail
        holder[at] = data

    def _drop(self, part: Any) -> None:
        holder, at = self._slot(part)
        if holder is None:
            raise _Unfit
        if holder is self._tail:
            del holder[at]
            return
        self._edits.pop(at, None)
        self._splice(at, at + 1, [])

    def _splice(self, start: int, stop: int, items: list[bytes]) -> None:
        """Let items give way to others."""
        if start == stop == self.size() and isinstance(self._tail, list):
            self._tail += items
            return
        old = self.flush().part(start, stop, self.sections.state.fetch)
        if old or items:
            self._apply([Hunk(start, stop, items, old)])

    # -- the tree ---------------------------------------------------------------------------------------------

    def flush(self) -> Tree:
        """Apply what was gathered."""
        hunks: list[Hunk] = []
        for at in sorted(self._edits):
            data, (old,) = _closed(self._edits[at]), self.tree.part(at, at + 1, self.sections.state.fetch)
            if self.kind == DICT:
                data = key_of(old) + data
            if data != old:
                hunks.append(Hunk(at, at + 1, [data], [old]))
        if isinstance(self._tail, dict):
            new = [key + _closed(item) for key, item in self._tail.items()]
        else:
            new = list(map(_closed, self._tail))
        if new:
            hunks.append(Hunk(self.tree.count, self.tree.count, new))
        self._edits = {}
        self._tail = {} if self.kind == DICT else []
        return self._apply(hunks)

    def _apply(self, hunks: list[Hunk]) -> Tree:
        state = self.sections.state
        self.tree = state.settle(self.tree.apply(hunks, state.fetch))
        return self.tree

    def close(self) -> bytes:
        """How it stands in its parent afterwards."""
        tree = self.flush()
        self.sections.made.append(tree)
        return tree.named(self.sections.state.fetch)


def _is_item(data: bytes) -> bool:
    """Whether an encoding can be in a set."""
    return is_text(data) or is_key(part_of(data))


def _closed(item: bytes | _Draft) -> bytes:
    return item if type(item) is bytes else item.close()  # type: ignore[union-attr]


def _arrange(items: list[bytes], pieces: list[Any]) -> list[bytes]:
    made: list[bytes] = []
    used: set[int] = set()
    for piece in pieces:
        if len(piece) == 1:
            made.append(piece[0])
            continue
        if len(piece) != 3:
            raise _Unfit
        start, count, step = piece
        if not (type(start) is type(count) is type(step) is int) or step not in (1, -1) or count < 1:
            raise _Unfit
        places = range(start, start + count * step, step)
        if not (0 <= places[0] < len(items) and 0 <= places[-1] < len(items)) or not used.isdisjoint(places):
            raise _Unfit
        used.update(places)
        made += [items[at] for at in places]
    return made
