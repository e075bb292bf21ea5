"""From objects to nodes: a breadth-first walk with budgets, by `type(obj)`, dictionaries and slots.

Owns which object gets which number, and every cut with its reason. Must not know files, frames or parts. Holds always:
nothing of the program runs (see shapes.py); an object is numbered once, and held until the capture ends, so that its
`id` stays its own; each step of the walk asks for time and room first.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any

from holdfast.crash import kinds
from holdfast.crash.kinds import CHUNK_TARGET_BYTES, ENTRY_COST, INLINE_TEXT, MAX_NAME, Limits
from holdfast.crash.redaction import Redactor, is_field
from holdfast.crash.shapes import (
    BASES,
    BY_TYPE,
    EXACT,
    Layout,
    first_items,
    is_genuine,
    is_subtype,
    layout_of,
    read_collection,
    read_dict,
    read_enum,
    read_exception,
    read_number,
    read_sequence,
    read_text,
    text_of_leaf,
    type_name,
)

Entry = Any  # None, bool, int, float, str, bytes; (number,); (reason, type name)

BASES.append(deque)
# The estimate of a node's bytes is rough, because it is made for every value: a text's characters count one each, and
# may take four. A node, and a chunk, stays within a chunk's bound all the same, or is split by the writer.
_NODE_COST = 8
_SHAPED = 64  # names of a shape at most
_SHAPES = 4_000  # shapes of a chunk
_NODE_BYTES = 480_000  # of one node; more of its items are left out
_INT_MAX = 2**63


class Share:
    """What one frame may use of the walk: nodes, bytes, and a time by which it ends."""

    __slots__ = ("bytes", "items", "objects", "until")

    def __init__(self, objects: int, size: int, until: float, items: int) -> None:
        self.objects = objects
        self.bytes = size
        self.until = until
        self.items = items


class Walker:
    """One capture's table of objects. ``emit(first, types, shapes, nodes)`` takes each full piece of it.

    ``first``: numbers below are those of objects that were walked before.
    """

    def __init__(
        self,
        redactor: Redactor,
        limits: Limits,
        until: float,
        emit: Callable[[int, list[str], list[Any], list[Any]], bool],
        first: int = 0,
    ) -> None:
        self.redactor = redactor
        self.limits = limits
        self.until = until
        self.objects_left = limits.objects
        self.bytes_left = limits.object_bytes
        self.cuts: dict[int, int] = {}  # reason -> how often
        self._emit = emit
        self._full = False  # the file takes no more objects
        self._numbers: dict[int, tuple[int]] = {}
        self._held: list[Any] = [None] * first  # by number
        self._done = first  # numbers below have a node
        self._first = first  # number of the first node in this piece
        self._nodes: list[Any] = []
        self._types: dict[str, int] = {}
        self._piece_bytes = 0
        self._secret: set[int] = set()  # numbers of containers that stood under a secret name: no text of theirs
        self.hide = False
        self._shapes: list[list[str]] = []  # of this piece: names that many objects have, in their order
        self._known_shapes: dict[tuple[int, ...], int] = {}  # by the names' identities; -1 for those that are no shape
        self._flat = self._make_flat()
        self._entries = self._make_entries()
        self._budget = 0  # numbers may be given up to here
        self.items = limits.items
        self._readers: dict[int, Callable[[Any], list[Any]]] = {
            id(kind): reader for kind, reader in self._plain_readers()
        }
        self._kept_types: list[type] = []
        self._kept_names: list[list[Any]] = []
        self._modules = {id(module): name for name, module in list(sys.modules.items()) if type(name) is str}

    # What callers use.

    def share(self, *, items: int | None = None, part: float = 0.5, until: float | None = None) -> Share:
        """What the next frame may use: a part of everything that is left."""
        now = monotonic()
        end = now + (self.until - now) * part
        return Share(
            int(self.objects_left * part) + 1,
            int(self.bytes_left * part) + 1,
            end if until is None else min(end, until),
            items or self.limits.items,
        )

    def set_aside(self, part: float) -> Callable[[], None]:
        """Keep a part of everything that is left for later. Call the result when later has come."""
        objects, size = int(self.objects_left * part), int(self.bytes_left * part)
        seconds = max(0.0, (self.until - monotonic()) * part)

        def give_back() -> None:
            self.objects_left += objects
            self.bytes_left += size
            self.until += seconds

        self.objects_left -= objects
        self.bytes_left -= size
        self.until -= seconds
        return give_back

    def exhausted(self) -> bool:
        """Whether nothing more would be stored."""
        return self._full or self.objects_left <= 0 or self.bytes_left <= 0 or monotonic() > self.until

    def roots(self, named: Iterable[tuple[str, Any]], share: Share) -> list[Entry]:
        """Entries for names and values (flat: name, entry, name, entry), with everything below them walked."""
        self.items = share.items
        self._budget = len(self._held) + max(0, min(share.objects, self.objects_left))
        self.hide = False
        out = self.pairs(named)
        self._walk(share)
        return out

    @property
    def count(self) -> int:
        """How many numbers were given."""
        return len(self._held)

    def flush(self) -> None:
        """Give the last, unfinished piece away."""
        if self._nodes and not self._full:
            self._full = not self._emit(self._first, list(self._types), [*self._shapes], self._nodes)
        self._first = self._done
        self.bytes_left -= self._piece_bytes
        self._nodes = []
        self._types.clear()
        self._shapes.clear()
        self._known_shapes.clear()
        self._piece_bytes = 0

    def release(self) -> None:
        """Let go of everything that was held."""
        self._held.clear()
        self._numbers.clear()
        self._readers.clear()
        self._kept_types.clear()
        self._kept_names.clear()

    # The walk.

    def _walk(self, share: Share) -> None:
        start = number = self._done
        held, secret, known_reader = self._held, self._secret, self._readers.get
        until = share.until
        bytes_end = self.bytes_left - share.bytes
        level_end = len(held)
        depth = 1
        stopped = 0
        add = self._nodes.append
        size = self._piece_bytes
        while True:
            if number >= level_end:
                level_end = len(held)
                if number >= level_end:
                    break
                depth += 1
                if depth > self.limits.depth and not stopped:
                    stopped = self._stop(kinds.DEPTH)
            value = held[number]
            number += 1
            if monotonic() > until and not stopped:
                stopped = self._stop(kinds.DEADLINE)
            if stopped:
                node = self.cut(value, stopped)
            else:
                if secret:
                    self.hide = number - 1 in secret
                kind = type(value)
                reader = known_reader(id(kind)) or self._reader(kind)
                try:
                    node = reader(value)
                except Exception:  # noqa: BLE001 (an object in any state may be met; the walk goes on)
                    node = self.cut(value, kinds.FAILED)
            add(node)
            before = size
            size = self._piece_bytes = self._piece_bytes + _NODE_COST
            if size - before > _NODE_BYTES:
                self._trim(node, size - before)
            if size >= CHUNK_TARGET_BYTES:
                self._done = number
                self.flush()
                add = self._nodes.append
                size = 0
                if not stopped and (self._full or self.bytes_left <= bytes_end):
                    stopped = self._stop(kinds.BUDGET)
        self._done = number
        self.objects_left -= number - start

    def _stop(self, reason: int) -> int:
        self._budget = 0  # no new numbers; those that were given get a node that says why
        return reason

    def _trim(self, node: list[Any], size: int) -> None:
        """Leave out items of a node that would not fit a chunk."""
        if node[0] in (kinds.LIST, kinds.DICT):
            step = 1 if node[0] == kinds.LIST else 2
            keep = int(len(node[2]) * _NODE_BYTES / size / 2) // step * step
            total = (node[3] if len(node) > 3 else None) or len(node[2]) // step
            node[2:4] = [node[2][:keep], total]
        else:
            node[:] = [kinds.CUT, node[1], kinds.BUDGET]
        self.cuts[kinds.BUDGET] = self.cuts.get(kinds.BUDGET, 0) + 1

    def cut(self, value: Any, reason: int) -> list[Any]:
        self.cuts[reason] = self.cuts.get(reason, 0) + 1
        return [kinds.CUT, self.type_number(layout_of(type(value)).name), reason]

    def type_number(self, name: str) -> int:
        number = self._types.get(name)
        if number is None:
            number = self._types[name] = len(self._types)
            self.spend(len(name))
        return number

    def spend(self, size: int) -> None:
        """Count bytes of the piece in the making."""
        self._piece_bytes += size

    # Entries.

    def entry(self, value: Any) -> Entry:
        """How a parent names this child; numbers the child when it is new."""
        kind = type(value)
        if kind is str:
            if self.hide and value:
                return self._hidden(value)
            size = len(value)
            if size <= INLINE_TEXT:
                self._piece_bytes += size
                return value
        elif kind is int or kind is float:
            if self.hide:
                return self._hidden(value)
            if kind is float or -_INT_MAX < value < _INT_MAX:
                return value
        elif value is None or kind is bool:
            return value
        elif kind is bytes:
            if self.hide and value:
                return self._hidden(value)
            if len(value) <= INLINE_TEXT:
                self.spend(len(value))
                return value
        key = id(value)
        known = self._numbers.get(key)
        if known is not None:
            return known
        number = len(self._held)
        if number >= self._budget:
            self.cuts[kinds.BUDGET] = self.cuts.get(kinds.BUDGET, 0) + 1
            return kinds.BUDGET, layout_of(kind).name
        self._held.append(value)
        reference = self._numbers[key] = (number,)
        if self.hide:
            self._secret.add(number)
        return reference

    def _hidden(self, value: Any) -> Entry:
        """A text or number under a secret name: remembered as secret, and named by its type only."""
        self.redactor.learn(text_of_leaf(value))
        self.cuts[kinds.REDACTED] = self.cuts.get(kinds.REDACTED, 0) + 1
        return kinds.REDACTED, layout_of(type(value)).name

    def pairs(self, named: Iterable[tuple[str, Any]]) -> list[Entry]:
        """Name, entry, name, entry. A secret-looking name hides what is below it."""
        return self._flat(named, True)

    def _make_flat(self) -> Callable[[Iterable[tuple[Any, Any]], bool], list[Entry]]:
        """The loop over keys and values, in which a capture spends its time: no call that can be avoided."""
        entry, hidden, names_secret, secret_name = (
            self.entry,
            self._hidden,
            self._names_secret,
            self.redactor.secret_name,
        )
        names, numbers, held = self.redactor.names, self._numbers, self._held
        known_name, known_number, hold, low, high = names.get, numbers.get, held.append, -_INT_MAX, _INT_MAX

        def flat(items: Iterable[tuple[Any, Any]], attributes: bool) -> list[Entry]:
            out: list[Entry] = []
            add = out.append
            outer = self.hide
            size = 0
            for key, value in items:
                if type(key) is str:
                    secret = known_name(key)
                    if secret is None:
                        secret = secret_name(key)
                    length = len(key)
                    if outer and not attributes and not is_field(key):
                        add(hidden(key))  # a key of a container that is secret, which may be what is secret
                    elif length <= INLINE_TEXT:
                        size += length
                        add(key)
                    else:
                        add(key[:MAX_NAME] if attributes else entry(key))
                elif attributes:
                    continue
                else:
                    secret = names_secret(key)
                    self.hide = outer and not is_field(key)
                    add(entry(key))
                    self.hide = outer
                kind = type(value)
                if secret or outer:
                    self.hide = True
                    add(entry(value))
                    self.hide = outer
                elif kind is str:
                    length = len(value)
                    if length <= INLINE_TEXT:
                        size += length
                        add(value)
                    else:
                        add(entry(value))
                elif value is None or kind is float or kind is bool or (kind is int and low < value < high):
                    add(value)
                elif kind is int or kind is bytes:
                    add(entry(value))
                else:
                    place = id(value)
                    reference = known_number(place)
                    if reference is None:
                        number = len(held)
                        if number < self._budget:
                            hold(value)
                            reference = numbers[place] = (number,)
                        else:
                            reference = entry(value)
                    add(reference)
            self.spend(size + ENTRY_COST * len(out))
            return out

        return flat

    def _make_entries(self) -> Callable[[Iterable[Any]], list[Entry]]:
        """As ``_make_flat``, for values without names."""
        entry, numbers, held = self.entry, self._numbers, self._held
        known_number, hold, low, high = numbers.get, held.append, -_INT_MAX, _INT_MAX

        def entries(values: Iterable[Any]) -> list[Entry]:
            out: list[Entry] = []
            add = out.append
            size = 0
            for value in values:
                kind = type(value)
                if kind is str:
                    length = len(value)
                    if length <= INLINE_TEXT:
                        size += length
                        add(value)
                    else:
                        add(entry(value))
                elif value is None or kind is float or kind is bool or (kind is int and low < value < high):
                    add(value)
                elif kind is int or kind is bytes:
                    add(entry(value))
                else:
                    place = id(value)
                    reference = known_number(place)
                    if reference is None:
                        number = len(held)
                        if number < self._budget:
                            hold(value)
                            reference = numbers[place] = (number,)
                        else:
                            reference = entry(value)
                    add(reference)
            self._piece_bytes += size + ENTRY_COST * len(out)
            return out

        return entries

    def _new_shape(self, names: list[Any], key: tuple[int, ...]) -> int:
        """Remember the names if they can be a shape: short texts, none of them secret."""
        shape = -1
        short = all(type(name) is str and len(name) <= INLINE_TEXT for name in names)
        if short and len(self._shapes) < _SHAPES and not any(map(self.redactor.secret_name, names)):
            shape = len(self._shapes)
            self._shapes.append(names)
            self.spend(sum(map(len, names)) + 2 * len(names))
        self._kept_names.append(names)  # so that their identities stay theirs
        self._known_shapes[key] = shape
        return shape

    # Nodes.

    def _reader(self, cls: type) -> Callable[[Any], list[Any]]:
        """The reader for a type that was not met before."""
        layout = layout_of(cls)
        self._kept_types.append(cls)
        reader = self._make_reader(cls, layout)
        self._readers[id(cls)] = reader
        return reader

    def _make_reader(self, cls: type, layout: Layout) -> Callable[[Any], list[Any]]:
        known = EXACT.get(layout.name)
        if known is not None and is_genuine(cls, layout.name):
            return lambda value: known(self, value)
        base = layout.base
        if layout.enum:
            return lambda value: read_enum(self, value, layout)
        if base is dict:
            return lambda value: read_dict(self, value, layout)
        if base is str or base is bytes or base is bytearray:
            return lambda value: read_text(self, value, base, layout)
        if base is int or base is float or base is complex:
            return lambda value: read_number(self, value, base, layout)
        if base is list or base is tuple:
            return lambda value: read_sequence(self, value, base, layout)
        if base is set or base is frozenset or base is deque:
            return lambda value: read_collection(self, value, base, layout)
        if base is BaseException:
            return lambda value: read_exception(self, value, layout)
        if is_subtype(cls, type):
            return lambda value: [kinds.NAMED, self.type_number(layout.name), type_name(value)]
        if is_subtype(cls, types.ModuleType):
            return lambda value: [
                kinds.NAMED,
                self.type_number(layout.name),
                self._modules.get(id(value), "?")[:MAX_NAME],
            ]
        if layout.dictionary is not None and not layout.slots:
            return self._instance_reader(layout)
        return lambda value: self.as_object(value, layout)

    def _instance_reader(self, layout: Layout) -> Callable[[Any], list[Any]]:
        """For the commonest objects: a dictionary and nothing else."""
        own_dict, name, known_type, known_shape = (
            layout.dictionary.__get__,
            layout.name,
            self._types.get,
            self._known_shapes.get,
        )
        entries = self._entries

        def read(value: Any) -> list[Any]:
            own = own_dict(value)
            if type(own) is not dict or not 0 < len(own) <= _SHAPED or self.hide:
                return self.as_object(value, layout)
            number = known_type(name)
            if number is None:
                number = self.type_number(name)
            key = tuple(map(id, own))
            shape = known_shape(key)
            if shape is None:
                shape = self._new_shape([*own], key)
            if shape >= 0:
                try:
                    found = entries(own.values())
                except RuntimeError:  # another thread changed it
                    found = []
                if len(found) == len(key):
                    return [kinds.SHAPED_OBJECT, number, shape, found]
            return self.as_object(value, layout)

        return read

    def _plain_readers(self) -> Iterable[tuple[type, Callable[[Any], list[Any]]]]:
        yield dict, self._plain_dict
        yield list, self._plain_list
        yield tuple, self._plain_list
        for kind, reader in BY_TYPE:
            yield kind, partial(reader, self)

    def _plain_list(self, value: Any) -> list[Any]:
        total = len(value)
        shown = value[: self.items]
        number = self.type_number("list" if type(value) is list else "tuple")
        if self.hide:
            items = [self.entry(item) for item in shown]
        elif total == 2 and _is_text(shown[1]) and self._names_secret(shown[0]):
            items = [self.entry(shown[0]), self._hidden(shown[1])]  # a header: ("authorization", "...")
        else:
            items = self._entries(shown)
        return [kinds.LIST, number, items] if total <= len(items) else [kinds.LIST, number, items, total]

    def _plain_dict(self, value: Any) -> list[Any]:
        total = len(value)
        number = self.type_number("dict")
        if 0 < total <= _SHAPED and not self.hide:
            key = tuple(map(id, value))
            shape = self._known_shapes.get(key)
            if shape is None:
                shape = self._new_shape([*value], key)
            if shape >= 0:
                try:
                    found = self._entries(value.values())
                except RuntimeError:  # another thread changed it
                    found = []
                if len(found) == len(key):
                    return [kinds.SHAPED_DICT, number, shape, found]
        out = self.dict_items(value)
        return [kinds.DICT, number, out] if total * 2 <= len(out) else [kinds.DICT, number, out, total]

    def dict_items(self, value: Any) -> list[Entry]:
        return self._flat(first_items(value, self.items), False)

    def _names_secret(self, key: Any) -> bool:
        if type(key) is str:
            return self.redactor.secret_name(key)
        return type(key) is bytes and len(key) < 100 and self.redactor.secret_name(key.decode("latin-1"))

    def as_object(self, value: Any, layout: Layout) -> list[Any]:
        return [kinds.OBJECT, self.type_number(layout.name), self.attributes(value, layout)]

    def attributes(self, value: Any, layout: Layout) -> list[Entry]:
        if not layout.slots:
            own = layout.instance_dict(value)
            return self._flat(first_items(own, self.items), True) if own else []
        named, _total = layout.attributes(value, self.items)
        return self._flat(named, True)


def _is_text(value: Any) -> bool:
    kind = type(value)
    return kind is str or kind is bytes
