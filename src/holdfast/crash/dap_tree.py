"""The tree of variables that an editor unfolds: frames, objects of the dump, plain parts, each behind a number.

Must not know messages. Holds always: a number, once given, keeps its meaning for the session; an answer holds at most a
page, whatever the dump holds; a number that was never given is NotInDump.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from holdfast.crash import places, telling
from holdfast.crash.dump import Dump
from holdfast.crash.inert import Gone, Inert, Ref, Value
from holdfast.crash.places import Stack
from holdfast.crash.records import Frame
from holdfast.crash.render import clean, text_of
from holdfast.errors import NotInDump

PAGE = 2_000  # variables of one answer
_HANDLES = 1_000_000  # numbers of one session: below what the protocol allows, above what a person unfolds
_VALUE_CHARS = 300
_NAME_CHARS = 200

Row = dict[str, Any]


class Tree:
    """Numbers for frames and for everything that can be unfolded."""

    def __init__(self, dump: Dump, stacks: list[Stack]) -> None:
        self.dump = dump
        self.stacks = stacks
        self._places: dict[tuple[Any, ...], int] = {}
        self._targets: list[tuple[Any, ...]] = []

    # Numbers.

    def frame_id(self, stack: int, at: int) -> int:
        return self._handle(("frame", stack, at), ("frame", stack, at))

    def frame(self, number: Any) -> Frame:
        kind, *rest = self._target(number)
        if kind != "frame":
            raise NotInDump(f"{number} is no frame")
        found: Frame = self.stacks[rest[0]].frames[rest[1]]
        return found

    def reference(self, value: Value) -> int:
        """A number for unfolding the value; 0 when there is nothing below it."""
        if not isinstance(value, Ref):
            return 0
        inert = self.dump.object(value)
        if not (inert.items or inert.pairs or inert.attributes):
            return 0
        return self._handle(("object", value.number), ("object", value))

    def parts(self) -> int:
        """The number of what holds all plain parts."""
        if ("parts",) not in self._places:
            self._handle(("parts",), ("plain", places.plain_parts(self.dump)))
        return self._places["parts",]

    # Content.

    def children(self, number: Any, *, which: str = "", start: int = 0, count: int = 0) -> list[Row]:
        """The variables below a number: ``which`` is "named", "indexed" or empty for both."""
        below = self._below(number, which)
        most = min(count or PAGE, PAGE)
        page = [make() for make in islice(below, start, start + most)]
        if not count and next(below, None) is not None:
            told = f"more than {PAGE}; ask with start and count"
            page.append({"name": "...", "value": told, "variablesReference": 0})
        return page

    def row(self, name: str, value: Value, path: str = "") -> Row:
        """One variable: its name, its value as text, and how to unfold it."""
        shown: Row = {
            "name": clean(name[:_NAME_CHARS]),
            "presentationHint": {"attributes": ["readOnly"]},
            **self.shown(value, _VALUE_CHARS),
        }
        if path:
            shown["evaluateName"] = path
        return shown

    def shown(self, value: Value, width: int) -> Row:
        """A value as an answer has it, without a name."""
        found: Row = {
            "value": text_of(self.dump, value, width=width, depth=2),
            "type": self.type_name(value),
            "variablesReference": self.reference(value),
        }
        if isinstance(value, Ref) and found["variablesReference"]:
            inert = self.dump.object(value)
            found["namedVariables"] = len(inert.pairs) + len(inert.attributes)
            found["indexedVariables"] = len(inert.items)
        return found

    def type_name(self, value: Value) -> str:
        if isinstance(value, Ref):
            return clean(self.dump.object(value).type_name[:_NAME_CHARS])
        if isinstance(value, Gone):
            return clean(value.type_name[:_NAME_CHARS])
        return type(value).__name__

    # Inside.

    def _below(self, number: Any, which: str) -> Iterator[Callable[[], Row]]:
        """What makes each row. A page deep in a long list makes only its own."""
        kind, *rest = self._target(number)
        if kind == "object":
            yield from self._below_object(self.dump.object(rest[0]), which)
        elif which == "indexed":
            return
        elif kind == "frame":
            for name, value in self.frame(number).locals:
                yield partial(self.row, name, value, name)
        else:
            for place, (name, data) in enumerate(places.plain_children(rest[0])):
                yield partial(self._plain_row, (number, place), name, data)

    def _below_object(self, inert: Inert, which: str) -> Iterator[Callable[[], Row]]:
        base = f"#{inert.number}"
        if which != "named":
            for index, item in enumerate(inert.items):
                yield partial(self.row, f"[{index}]", item, f"{base}[{index}]")
        if which != "indexed":
            for key, item in inert.pairs:
                yield partial(self._pair_row, base, key, item)
            for name, item in inert.attributes:
                yield partial(self.row, name, item, f"{base}.{name}")

    def _pair_row(self, base: str, key: Value, item: Value) -> Row:
        path = f"{base}[{key!r}]" if key is None or isinstance(key, int | str | bytes) else ""
        return self.row(f"[{text_of(self.dump, key, width=100, depth=1)}]", item, path)

    def _plain_row(self, place: tuple[int, int], name: str, data: Any) -> Row:
        below = isinstance(data, dict | list) and bool(data)
        return {
            "name": clean(name[:_NAME_CHARS]),
            "value": clean(telling.plain_text(data, _VALUE_CHARS)),
            "variablesReference": self._handle(("plain", *place), ("plain", data)) if below else 0,
        }

    def _handle(self, key: tuple[Any, ...], target: tuple[Any, ...]) -> int:
        known = self._places.get(key)
        if known is not None:
            return known
        if len(self._targets) >= _HANDLES:
            return 0
        self._targets.append(target)
        self._places[key] = len(self._targets)
        return len(self._targets)

    def _target(self, number: Any) -> tuple[Any, ...]:
        if type(number) is not int or not 0 < number <= len(self._targets):
            raise NotInDump(f"no frame or variable {telling.plain_text(number, 40)}")
        return self._targets[number - 1]
