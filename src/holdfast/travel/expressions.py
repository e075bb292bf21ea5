"""The expression language, and the paths in it: ``budget < 0 and len(messages) > 3``.

Bisect, invariants, watchpoints and the command line ask their questions in it. Owns the grammar of paths and of
expressions, and what a path finds in a state; what the parts of an expression come to is in ``crash.probe``, which asks
the same of a function's arguments. Must not know who asks. What always holds: nothing in an expression is executed: it
is parsed, each part of it is one of a short list, and it works on data that were read without the program's classes;
text, depth and time have limits; a mistake is a ``BadExpression`` that names its place.

A name is a section of the state: ``budget`` is ``state.budget``. A path that leads nowhere is None, ``exists(path)``
tells the two apart. Comparing None by order is false, and so is ``in`` None; its length is 0.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from time import thread_time
from typing import Any

from holdfast.codec.blocks import LIST, Opened, open_inline, opened
from holdfast.codec.classes import Record
from holdfast.codec.document import Document
from holdfast.codec.state import KINDS, Reader, Shallow, State, is_apart
from holdfast.codec.tracked import GONE
from holdfast.codec.tree import Tree
from holdfast.codec.types import Registry
from holdfast.crash.probe import ARITHMETIC, COMPARISONS, FUNCTIONS, LIMIT_S, Find, Wrong, evaluate
from holdfast.errors import BadExpression, BadOption, format_path

TEXT_MAX = 2_000
"""Characters of an expression. What needs more is a function."""
DEPTH_MAX = 40
"""Parts inside parts."""

Path = tuple[Any, ...]
MISSING = GONE
"""What a path finds that leads nowhere."""


# -- paths: state.messages[3].content, as errors and diffs write them --------------------------------------------------

_WORD = re.compile(r"\.?([^\W\d]\w*)")
_SHOWN = 40
# Names that an error lists to choose from.
_CHOICES = 12


def parse_path(text: str) -> Path:
    """The parts of a path. A leading ``state`` stands for the root and may be left out."""
    parts: list[Any] = []
    at = 0
    while at < len(text):
        if text[at] == "[":
            end, part = _bracket(text, at)
        elif (match := _WORD.match(text, at)) and (at == 0 or text[at] == "."):
            end, part = match.end(), match[1]
        else:
            raise BadOption(f"{text!r} is not a path", hint="Write it like state.messages[3] or state.rooms['a b'].")
        parts.append(part)
        at = end
    if parts and parts[0] == "state" and not text.startswith("["):
        del parts[0]
    return tuple(parts)


def _bracket(text: str, start: int) -> tuple[int, Any]:
    end = text.find("]", start)
    while end != -1:
        try:
            key = ast.literal_eval(text[start + 1 : end])
            hash(key)  # what cannot be a key leads nowhere
            return end + 1, key
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # perhaps a `]` inside a key's text
            end = text.find("]", end + 1)
    rest = text[start:]
    raise BadOption(
        f"{rest if len(rest) <= _SHOWN else rest[: _SHOWN - 1] + '…'!r} has no closing bracket or no key in it",
        hint="Text keys need quotes: ['a b'].",
    )


def follow(value: Any, parts: Path, walked: Path = ()) -> Any:
    """The value at the end of the path; ``BadOption``, with what is there instead, when it leads nowhere."""
    for at, part in enumerate(parts):
        found = inside(value, part)
        if found is MISSING:
            here = format_path((*walked, *parts[:at]))
            raise BadOption(f"{here} has no {part!r}", hint=_choices(here, _opened(value)))
        value = found
    return value


def inside(value: Any, part: Any) -> Any:
    """One step into a plain value; ``MISSING`` where there is none."""
    try:
        return _opened(value)[part] if not isinstance(value, str | bytes | bytearray) else MISSING
    except (KeyError, IndexError, TypeError):
        return MISSING


def _opened(value: Any) -> Any:
    if isinstance(value, Record):
        return value.fields if value.fields is not None else value.data
    return value


def _choices(here: str, value: Any) -> str:
    if isinstance(value, dict):
        names = [repr(key) for key in list(value)[:_CHOICES]]
        return (
            f"{here} has: {', '.join(names)}{', …' if len(value) > _CHOICES else ''}." if names else f"{here} is empty."
        )
    if isinstance(value, list | tuple):
        return f"{here} has indexes 0 to {len(value) - 1}." if value else f"{here} is empty."
    return f"{here} is a {type(value).__name__}; nothing is inside it."


# -- what paths find ---------------------------------------------------------------------------------------------------


class Look:
    """Reads places of one state. Only what is asked for is read, as inert data: no class of a program is needed."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._reader = Reader(state, Registry(), inert=True)

    @classmethod
    def of(cls, document: Document) -> Look:
        """At a document as it is now: of a live one, what differs from what was told is told first."""
        if not document.readonly:
            document.digests()
        return cls(document.told)

    def at(self, path: Path) -> Any:
        """The value at a path; ``MISSING`` when it leads nowhere."""
        path = self.counted(path)
        if not path:
            return self._reader.everything()
        for end in range(len(path), 0, -1):
            found = self._reader.at(path[:end])
            if found is not GONE:
                for part in path[end:]:  # inside an instance, which is one value
                    found = inside(found, part)
                    if found is MISSING:
                        break
                return found
        return MISSING

    def items(self, path: Path, start: int, stop: int) -> Items:
        """What stands in a container from one place to another; ``BadOption`` when the path leads nowhere.

        Costs as much as these, and what is near them: values that are large themselves are ``Held``.
        """
        shallow = Shallow(self.state, Registry(), inert=True)
        path = self.counted(path)
        if not path:
            names = [name for name in self.state.sections if not is_apart(name)]
            some = [(name, shallow.content(self.state.section(name))) for name in names[start:stop]]
            return Items("dict", len(names), some)
        found = self.state.at(path)
        if isinstance(found, Tree):
            stop = min(stop, found.count)
            kind, count = found.kind, found.count
            parts = opened(kind, found.part(start, stop, self.state.fetch))
        elif found is None or (inner := open_inline(found)) is None:
            value = shallow.value(found) if found is not None else self.at(path)
            if value is MISSING:
                raise BadOption(f"{format_path(path)} is not there", hint="Another checkpoint may have it.")
            return _items_of(value, start, stop)
        else:
            kind, count = inner.kind, len(inner.items)
            parts = Opened(kind, inner.items[start:stop], inner.keys[start:stop] if inner.keys is not None else None)
        values = [shallow.value(item) for item in parts.items]
        keys: Iterable[Any] = [None] * len(values)
        if parts.keys is not None:
            keys = map(shallow.value, parts.keys)
        elif kind == LIST:
            keys = range(start, start + len(values))
        return Items(KINDS[kind], count, list(zip(keys, values, strict=True)))

    def raw(self, path: Path) -> bytes:
        """Bytes that are equal exactly when what the path finds is; empty where that is nothing.

        Costs as much as the way there, however large the container is.
        """
        path = self.counted(path)
        if not path:
            return b"".join(part for _, part in self.state.digests())
        found = self.state.at(path)
        if found is not None:
            return found.root if isinstance(found, Tree) else found
        value = self.at(path)
        if value is MISSING:
            return b""
        from holdfast.codec.values import encode

        return encode(value, Registry())

    def counted(self, path: Path) -> Path:
        """Indexes from the end as those that they mean."""
        for at, part in enumerate(path):
            if type(part) is int and part < 0 and at:
                found = self.state.at(path[:at])
                inner = open_inline(found) if isinstance(found, bytes) else None
                count = found.count if isinstance(found, Tree) else len(inner.items) if inner is not None else 0
                path = (*path[:at], part + count if part + count >= 0 else part, *path[at + 1 :])
        return path


def _items_of(value: Any, start: int, stop: int) -> Items:
    """Of a value that is not stored by its parts: an instance, and what is inside one."""
    inner = _opened(value)
    if isinstance(inner, dict):
        return Items("dict", len(inner), list(islice(inner.items(), start, stop)))
    if isinstance(inner, list | tuple):
        return Items("list", len(inner), list(enumerate(inner))[start:stop])
    if isinstance(inner, set | frozenset):
        return Items("set", len(inner), [(None, item) for item in islice(inner, start, stop)])
    return Items("", 1, [(None, value)])


@dataclass(frozen=True)
class Items:
    """Some of what is inside a container: ``kind`` as of ``Held``, ``count`` of all, pairs of (key, value).

    Items of a set have no key. Of anything else, ``kind`` is empty, and the only pair is (None, the value).
    """

    kind: str
    count: int
    pairs: list[tuple[Any, Any]]


# -- expressions -------------------------------------------------------------------------------------------------------

Node = tuple[Any, ...]
"""A part of an expression: its kind, its place in the text, and what it consists of."""


class Expression:
    """A question about a state. ``paths`` are those that it reads, ``names`` what it may speak of besides sections.

    Without ``names``, as None, every name in it is one that whoever asks gives a value. ``tree`` is what was parsed.
    """

    def __init__(self, text: str, names: tuple[str, ...] | None = ()) -> None:
        if not text.strip():
            raise BadExpression("an expression is empty", hint=_HINT)
        if len(text) > TEXT_MAX:
            raise BadExpression(
                f"an expression of {len(text):,} characters", text=text[:_SHOWN], hint="Write a function instead."
            )
        self.text = text.strip()
        self.names = names
        self.paths: set[Path] = set()
        try:
            tree = ast.parse(self.text, mode="eval")
        except SyntaxError as error:
            at = min(error.offset - 1, len(self.text)) if error.offset else len(self.text)
            raise self._wrong("it cannot be read", max(0, at)) from None
        except (ValueError, MemoryError, RecursionError):
            raise self._wrong("it cannot be read", 0) from None
        self.tree = self._node(tree.body, 0)

    def value(self, look: Look, **names: Any) -> Any:
        """What it comes to."""
        try:
            return evaluate(self.tree, _finder(look, names), thread_time() + LIMIT_S)
        except Wrong as error:
            raise self._wrong(str(error), error.at) from None

    def broken(self, look: Look) -> bool:
        """Whether it is false as a rule: of what ``and`` joins, each part with a place that is not there holds.

        A part that asks whether a place is there, by ``exists`` or a comparison with None, is as true as its value.
        """
        end_s, find = thread_time() + LIMIT_S, _finder(look, {})
        for part in self.tree[2] if self.tree[0] == "all" else [self.tree]:
            try:
                if evaluate(part, find, end_s) or _speaks_of_nothing(part, look):
                    continue
            except Wrong as error:
                if thread_time() <= end_s and _speaks_of_nothing(part, look):
                    continue
                raise self._wrong(str(error), error.at) from None
            return True
        return False

    def holds(self, look: Look, **names: Any) -> bool:
        """Whether it is true."""
        return bool(self.value(look, **names))

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    # -- parsing --------------------------------------------------------------------------------------------

    def _wrong(self, why: str, at: int, hint: str = "") -> BadExpression:
        return BadExpression(
            f"{why}, at character {at + 1} of {self.text!r}", text=self.text, at=at, hint=hint or _HINT
        )

    def _node(self, node: ast.expr, depth: int) -> Node:
        if depth > DEPTH_MAX:
            raise self._wrong("its parts are too deep inside each other", node.col_offset)
        at, depth = node.col_offset, depth + 1
        match node:
            case ast.Constant(value=value) if value is not ... and not isinstance(value, complex):
                return "value", at, value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return "list", at, self._nodes(items, depth)
            case ast.BoolOp(op=kind, values=values):
                return "all" if isinstance(kind, ast.And) else "any", at, self._nodes(values, depth)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return "not", at, self._nodes([inner], depth)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return "negative", at, self._nodes([inner], depth)
            case ast.BinOp(left=left, op=kind, right=right) if type(kind).__name__ in ARITHMETIC:
                return type(kind).__name__, at, self._nodes([left, right], depth)
            case ast.Compare(left=left, ops=kinds, comparators=others):
                names = [type(kind).__name__ for kind in kinds]
                if all(name in COMPARISONS for name in names):
                    return "compare", at, names, self._nodes([left, *others], depth)
            case ast.Call(func=ast.Name(id="exists"), args=[inner], keywords=[]):
                kind, _, path = self._path(inner, depth)
                return "exists", at, kind, path
            case ast.Call(func=ast.Name(id=name), args=values, keywords=[]) if name in FUNCTIONS and values:
                return name, at, self._nodes(values, depth)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return self._path(node, depth)
        raise self._wrong(f"{_WORDS.get(type(node), 'this')} is not part of the language", at)

    def _nodes(self, nodes: list[ast.expr], depth: int) -> list[Node]:
        return [self._node(node, depth) for node in nodes]

    def _path(self, node: ast.expr, depth: int) -> Node:
        """A path: of the state, or of one of the names that the one who asks gives a value."""
        parts: list[Any] = []
        start = node
        while not isinstance(node, ast.Name):
            match node:
                case ast.Attribute(value=inner, attr=name):
                    parts.append(name)
                case ast.Subscript(value=inner, slice=key):
                    parts.append(self._key(key))
                case _:
                    raise self._wrong("a path begins with a name", start.col_offset)
            node = inner
            if len(parts) > DEPTH_MAX - depth:
                raise self._wrong("the path is too long", start.col_offset)
            if isinstance(node, ast.Name | ast.Attribute):
                self._check_spelled(node)
        if isinstance(start, ast.Name | ast.Attribute):
            self._check_spelled(start)
        path = (node.id, *reversed(parts))
        if self.names is None or node.id in self.names:
            return "name", start.col_offset, path
        path = path[1:] if node.id == "state" else path
        self.paths.add(path)
        return "path", start.col_offset, path

    def _check_spelled(self, node: ast.Name | ast.Attribute) -> None:
        """Python reads some letters of a name as others (NFKC), and keys of a state are as they are."""
        name = node.id if isinstance(node, ast.Name) else node.attr
        if self.names is None:  # of a program's own, which Python reads in the same way
            return
        if not (ast.get_source_segment(self.text, node) or name).endswith(name):
            raise self._wrong(
                "a name is not what it looks like", node.col_offset, "Write it as a quoted key: state['…'] finds it."
            )

    def _key(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value) if not isinstance(value, complex | float) and value is not ...:
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
                return -number
        raise self._wrong("a key is a number or a text", node.col_offset)


_HINT = "Write it like: budget < 0 and len(messages) > 3. The guide, Find the change, has all of the language."
_WORDS: dict[type[ast.expr], str] = {
    ast.Call: "this call",
    ast.Lambda: "lambda",
    ast.ListComp: "a comprehension",
    ast.GeneratorExp: "a comprehension",
    ast.IfExp: "if ... else",
    ast.JoinedStr: "an f-string",
    ast.NamedExpr: "an assignment",
    ast.BinOp: "this operator",
    ast.Dict: "a dict",
    ast.Await: "await",
}


def _speaks_of_nothing(part: Node, look: Look) -> bool:
    return any(path and not look.raw(path) for path in set(_needed(part)))


def _needed(node: Node) -> Iterator[Path]:
    """The places that a part of an expression takes to be there."""
    kind, _, *parts = node
    if kind == "path":
        yield parts[0]
    elif kind not in {"value", "name", "exists"} and not any(one[0] == "value" and one[2] is None for one in parts[-1]):
        for one in parts[-1]:
            yield from _needed(one)


def _finder(look: Look, names: Mapping[str, Any]) -> Find:
    def find(kind: str, path: Path) -> tuple[Any, ...]:
        if kind == "path":
            value = look.at(path)
        else:
            value = names.get(path[0], MISSING)
            for part in path[1:]:
                value = inside(value, part) if value is not MISSING else MISSING
        return () if value is MISSING else (value,)

    return find
