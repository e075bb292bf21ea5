"""What a frame waits for and what it holds, read from the instruction at which it stands.

Owns the reading of `with` blocks and of calls of `acquire` and `release` in bytecode (3.11 to 3.14). Must not know
locks. Holds always: an expression is followed only through names, plain attributes and items; anything else is unknown;
no code of the program runs.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.crash import shapes

_ENTERING = frozenset(("BEFORE_WITH", "BEFORE_ASYNC_WITH"))
_NAMES = frozenset(("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF",
                    "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_CLOSURE"))  # fmt: skip
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_CALLS = frozenset(("CALL", "PRECALL"))
_MISSING = object()
KNOWN = sys.version_info < (3, 15)  # of later versions nobody has looked at the instructions
_MOST_BLOCKS = 100  # enclosing blocks of one instruction
_MOST_CODE = 60_000  # bytes of a function that is looked at

Expression = tuple[Any, ...]


class Step(NamedTuple):
    """One instruction."""

    offset: int
    name: str
    value: Any
    line: int


class Reading(NamedTuple):
    """What matters of one function."""

    entering: dict[int, Expression]  # offset of a BEFORE_WITH -> what is entered
    blocks: dict[int, tuple[Expression, int]]  # handler of a with block -> what it holds, and the line
    table: list[tuple[int, int, int]]  # exception table: start, end, handler
    calls: list[tuple[int, str, Expression, int]]  # offset, acquire or release, of what, line


def waits_on(frame: types.FrameType) -> Any:
    """The object that the frame's instruction enters or acquires, without a time limit; None if it does not."""
    reading = _read(frame.f_code)
    expression = reading.entering.get(frame.f_lasti)
    if expression is None:
        expression = next((of for at, name, of, _ in reading.calls if at == frame.f_lasti and name == "acquire"), None)
    value = _value(frame, expression) if expression is not None else _MISSING
    return None if value is _MISSING else value


def holds(frame: types.FrameType) -> Iterator[tuple[Any, int, bool]]:
    """What the frame has entered by `with` (surely) or acquired by a call (probably): value, line, whether surely."""
    reading = _read(frame.f_code)
    at = frame.f_lasti
    for _ in range(_MOST_BLOCKS):
        handler = next((target for start, end, target in reading.table if start <= at < end), None)
        if handler is None:
            break
        if handler in reading.blocks:
            expression, line = reading.blocks[handler]
            value = _value(frame, expression)
            if value is not _MISSING:
                yield value, line, True
        at = handler
    newest: dict[int, tuple[Any, int, str]] = {}
    for offset, name, expression, line in reading.calls:
        if offset < frame.f_lasti:
            value = _value(frame, expression)
            if value is not _MISSING:
                newest[id(value)] = (value, line, name)
    for value, line, name in newest.values():
        if name == "acquire":
            yield value, line, False


@lru_cache(maxsize=512)
def _read_cached(code: types.CodeType) -> Reading:
    steps = list(_steps(code))
    table = list(_table(code.co_exceptiontable))
    entering: dict[int, Expression] = {}
    blocks: dict[int, tuple[Expression, int]] = {}
    calls: list[tuple[int, str, Expression, int]] = []
    for index, step in enumerate(steps):
        if step.name in _ENTERING:
            found = _expression(steps, index - 1)
            if found is None:
                continue
            if step.name == "BEFORE_WITH":
                entering[step.offset] = found[0]
            body = _first_of_body(steps, index)
            handler = next((target for start, end, target in table if body is not None and start <= body < end), None)
            if handler is not None:
                blocks.setdefault(handler, (found[0], step.line))
        elif step.name == "CALL":
            called = _method_call(steps, index)
            if called is not None:
                calls.append((step.offset, *called, step.line))
    return Reading(entering, blocks, table, calls)


_NOTHING = Reading({}, {}, [], [])


def _read(code: types.CodeType) -> Reading:
    return _read_cached(code) if len(code.co_code) <= _MOST_CODE else _NOTHING


def _steps(code: types.CodeType) -> Iterator[Step]:
    return _plain_steps(dis.get_instructions(code), code.co_firstlineno)


def _plain_steps(instructions: Iterable[Any], line: int) -> Iterator[Step]:
    """Instructions as 3.12 has them: those that load or store two names are taken apart, newer names are the old ones.

    Since 3.14 a context is entered by five instructions, of which the last is a call: it stands for all of them.
    """
    exits = enters = ""
    for found in instructions:
        position = found.positions
        line = (position.lineno if position is not None else None) or line
        name, value = found.opname.replace("_BORROW", ""), found.argval
        if name == "LOAD_SPECIAL":
            if found.argrepr in ("__exit__", "__aexit__"):
                exits = found.argrepr
            elif exits:
                enters, exits = ("BEFORE_ASYNC_WITH" if exits == "__aexit__" else "BEFORE_WITH"), ""
        elif enters:
            yield Step(found.offset, enters, None, line)
            enters = ""
        elif name in ("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST") and type(value) is tuple:
            yield Step(found.offset, "LOAD_FAST" if name.startswith("LOAD") else "STORE_FAST", value[0], line)
            yield Step(found.offset, "LOAD_FAST", value[1], line)
        elif name == "LOAD_SMALL_INT":
            yield Step(found.offset, "LOAD_CONST", value, line)
        elif name == "BINARY_OP" and found.argrepr == "[]":
            yield Step(found.offset, "BINARY_SUBSCR", None, line)
        elif not exits and not (name == "COPY" and value == 1):
            yield Step(found.offset, name, value, line)


def _first_of_body(steps: list[Step], index: int) -> int | None:
    """The first instruction after the context was entered; for `async with` that is after it was awaited."""
    asynchronous = steps[index].name == "BEFORE_ASYNC_WITH"
    for step in steps[index + 1 : index + 12]:
        if asynchronous and step.name not in ("POP_TOP", "STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL"):
            continue
        return step.offset
    return None


def _expression(steps: list[Step], index: int) -> tuple[Expression, int] | None:
    """The expression whose value the instruction leaves behind, and the instruction before it."""
    while index >= 0 and steps[index].name in ("PUSH_NULL", "NOP", "COPY_FREE_VARS"):
        index -= 1
    if index < 0:
        return None
    step = steps[index]
    if step.name in _NAMES:
        return ("name", step.value), index - 1
    if step.name == "LOAD_CONST":
        return ("constant", step.value), index - 1
    if step.name in _ATTRIBUTES:
        base = _expression(steps, index - 1)
        return (("attribute", base[0], step.value), base[1]) if base is not None else None
    if step.name == "BINARY_SUBSCR":
        key = _expression(steps, index - 1)
        base = _expression(steps, key[1]) if key is not None else None
        return (("item", base[0], key[0]), base[1]) if base is not None and key is not None else None
    return None


def _method_call(steps: list[Step], index: int) -> tuple[str, Expression] | None:
    """`x.acquire()`, `x.__enter__()` or `x.release()`, without arguments: with any, it may have a time limit."""
    before = index - 1
    while before >= 0 and steps[before].name in (*_CALLS, "PUSH_NULL"):
        before -= 1
    if before < 0 or steps[before].name not in _ATTRIBUTES:
        return None
    name = {"acquire": "acquire", "__enter__": "acquire", "release": "release", "__exit__": "release"}.get(
        steps[before].value
    )
    base = _expression(steps, before - 1) if name is not None else None
    return (name, base[0]) if name is not None and base is not None else None


def _table(data: bytes) -> Iterator[tuple[int, int, int]]:
    """The exception table: numbers of six bits to a byte, the most significant first, in units of two bytes."""
    numbers: list[int] = []
    current = 0
    for byte in data:
        current = current << 6 | byte & 0x3F
        if not byte & 0x40:
            numbers.append(current)
            current = 0
    for at in range(0, len(numbers) - 3, 4):
        start, length, target, _depth = numbers[at : at + 4]
        yield start * 2, (start + length) * 2, target * 2


# -- values ----------------------------------------------------------------------------------------------------


def _value(frame: types.FrameType, expression: Expression) -> Any:
    kind = expression[0]
    if kind == "constant":
        return expression[1]
    if kind == "name":
        return _named(frame, expression[1])
    base = _value(frame, expression[1])
    if base is _MISSING:
        return _MISSING
    if kind == "attribute":
        return _attribute(base, expression[2])
    key = _value(frame, expression[2])
    if type(base) in (list, tuple) and type(key) is int and -len(base) <= key < len(base):
        return base[key]
    if type(base) is dict and type(key) in (str, int):
        return next((item for other, item in shapes.first_items(base, 10_000)
                     if type(other) is type(key) and other == key), _MISSING)  # fmt: skip
    return _MISSING


def _named(frame: types.FrameType, name: Any) -> Any:
    found = shapes.frame_locals(frame, 10_000)
    for other, value in found[0] if found is not None else ():
        if other == name:
            return value
    return dict.get(frame.f_globals, name, _MISSING) if type(frame.f_globals) is dict else _MISSING


def _attribute(base: Any, name: Any) -> Any:
    """An attribute that is simply there: in the instance, a slot, or the class."""
    attributes, _total = shapes.layout_of(type(base)).attributes(base, 10_000)
    for other, value in attributes:
        if other == name:
            return value
    owner = base if type(base) is type else type(base)
    return shapes.in_class(owner, name, _MISSING)
