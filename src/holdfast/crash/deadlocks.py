"""Who waits for whom: threads for locks and for each other, tasks for tasks.

Owns the reading of `with` blocks and of calls of `acquire` and `release` in bytecode (3.11 to 3.14), the waits that
follow from it, and the cycles in them. Must not know what becomes of a deadlock. Holds always: nothing is wrapped or
patched; an expression is followed only through names, plain attributes and items; no code of the program runs.
"""

from __future__ import annotations

import _thread
import dis
import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.crash import shapes, stacks

# -- what a frame waits for and holds --------------------------------------------------------------------------------


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


# -- who waits for whom ----------------------------------------------------------------------------------------------


_LOCK = type(_thread.allocate_lock())
_RLOCK = _thread.RLock
_OWNER = re.compile(r"owner=(\d+)")
_MOST = 1_000  # threads or tasks that are looked at
_DEPTH = 60  # frames of each, innermost first
_JOIN = threading.Thread.join.__code__
_NOTIFIED = threading.Condition.wait.__code__


Holder = tuple[Any, str, bool]  # a thread's ident or a task, where it took the lock, whether surely


@dataclass
class Wait:
    """One that waits: for what, for whom, and where it stands."""

    who: Any  # the thread's ident, or the task
    name: str
    at: str
    what: str
    lock: int = 0  # id of the lock, 0 when it waits for a thread or task itself
    holders: list[Any] = field(default_factory=list)
    held_at: str = ""
    sure: bool = True


@dataclass(frozen=True)
class Cycle:
    """Some that wait for each other, and so for ever."""

    kind: str  # threads, tasks
    text: list[str]
    members: tuple[int, ...]
    threads: tuple[int, ...]
    sure: bool


_UNKNOWN = f"which locks frames hold is not known on Python {sys.version_info.major}.{sys.version_info.minor}"


def parts() -> list[tuple[str, Any]]:
    """For a dump of a program in which somebody could wait for somebody."""
    own = [thread for thread in stacks.threads() if not thread["name"].startswith("holdfast-")]
    others = [thread for thread in own if not thread["current"]]
    return [("waiting", lambda: _record(_all_waits()))] if others or stacks.live_tasks() else []


def find_cycles() -> list[Cycle]:
    """The deadlocks of this moment. Threads move while they are looked at: look twice before believing it."""
    return [
        cycle for kind, waits in zip(("threads", "tasks"), _all_waits(), strict=True) for cycle in _cycles(kind, waits)
    ]


def _record(found: tuple[list[Wait], list[Wait]]) -> dict[str, Any]:
    cycles = [cycle for kind, waits in zip(("threads", "tasks"), found, strict=True) for cycle in _cycles(kind, waits)]
    names = {wait.who: wait.name for waits in found for wait in waits if type(wait.who) is int}
    return {
        "cycles": [{"kind": cycle.kind, "text": cycle.text, "sure": cycle.sure} for cycle in cycles],
        "problems": [f"deadlock: {'; '.join(cycle.text)}" for cycle in cycles] + ([] if KNOWN else [_UNKNOWN]),
        "waits": [
            {
                "who": wait.name, "at": wait.at, "for": wait.what, "held_at": wait.held_at, "sure": wait.sure,
                "holders": [names.get(holder, str(holder)) if type(holder) is int else stacks.task_name(holder)
                            for holder in wait.holders[:20]],
            }
            for waits in found
            for wait in waits[:500]
        ],
    }  # fmt: skip


def _all_waits() -> tuple[list[Wait], list[Wait]]:
    return _threads(), _tasks()


# -- threads ---------------------------------------------------------------------------------------------------


def _threads() -> list[Wait]:
    every = [thread for thread in stacks.threads()[:_MOST] if not thread["current"]]
    waits = []
    for thread in every:
        wait = _thread_waits(thread)
        if wait is not None:
            waits.append(wait)
    wanted = {wait.lock for wait in waits if wait.lock}
    frames = ((one["id"], [frame for frame, _ in stacks.steps_of_frame(one["frame"])[-_DEPTH:]]) for one in every)
    held = _holders(frames, wanted) if wanted else {}
    names = {thread["id"]: thread["name"] or f"thread {thread['id']}" for thread in every}
    alone = sum(not thread["name"].startswith("holdfast-") for thread in every) == 1
    for wait in waits:
        # A lock that its own thread has acquired before is one by which others wake it, unless it stands in `with`, or
        # there are no others.
        known = [holder for holder in held.get(wait.lock, ()) if holder[0] != wait.who or holder[2] or alone]
        if known and not wait.holders:
            ident, wait.held_at, wait.sure = known[0]
            wait.sure = wait.sure or alone
            wait.holders.append(ident)
        elif known and known[0][0] == wait.holders[0]:
            wait.held_at = known[0][1]
        if wait.holders and wait.lock:
            name = names.get(wait.holders[0], "a thread that is gone")
            wait.what += _held(name, wait.held_at, wait.sure)
    return waits


def _thread_waits(thread: dict[str, Any]) -> Wait | None:
    """What the innermost frames of a thread say: a lock that is taken, or a thread that has not ended."""
    frame: types.FrameType | None = thread["frame"]
    name = thread["name"] or f"thread {thread['id']}"
    for inner in (frame, frame.f_back if frame is not None else None):
        if inner is not None and inner.f_code is _JOIN:
            return _joins(thread["id"], name, inner)
    if frame is None or frame.f_code is _NOTIFIED:  # whoever is to be notified waits for no lock that somebody holds
        return None
    lock = _lock_of(waits_on(frame))
    if lock is None:
        return None
    wait = Wait(
        thread["id"], name, _user_place(frame), f"a {shapes.type_name(type(lock)).rpartition('.')[2]}", id(lock)
    )
    if type(lock) is _RLOCK:
        owner = _OWNER.search(_RLOCK.__repr__(lock))
        if owner is None or int(owner[1]) in (0, thread["id"]):
            return None  # it is free, or on its way to its owner
        wait.holders.append(int(owner[1]))
    elif not lock.locked():
        return None
    return wait


def _joins(ident: int, name: str, frame: types.FrameType) -> Wait | None:
    found = shapes.frame_locals(frame, 10)
    values = dict(found[0]) if found is not None else {}
    other = values.get("self")
    if values.get("timeout") is not None or other is None or not shapes.is_subtype(type(other), threading.Thread):
        return None
    fields = shapes.layout_of(type(other)).instance_dict(other) or {}
    target = shapes.find(fields, "_ident")
    if type(target) is not int:
        return None
    called = shapes.exact_text(shapes.find(fields, "_name"), 200)
    return Wait(ident, name, _user_place(frame), f"the end of thread {called}", holders=[target])


def _holders(stacks_of: Iterable[tuple[Any, list[types.FrameType]]], wanted: set[int]) -> dict[int, list[Holder]]:
    """For each lock that somebody wants: who holds it by these frames, those that surely do first."""
    found: dict[int, list[Holder]] = {}
    for who, frames in stacks_of:
        for frame in frames:
            for value, line, sure in holds(frame):
                lock = value if id(value) in wanted else _lock_of(value)
                if id(lock) in wanted:
                    found.setdefault(id(lock), []).append((who, _place(frame, line), sure))
    for holders in found.values():
        holders.sort(key=lambda holder: not holder[2])
    return found


def _lock_of(value: Any) -> Any:
    """The lock that a value is, or that a condition is about."""
    if type(value) is threading.Condition:
        value = shapes.find(shapes.layout_of(type(value)).instance_dict(value) or {}, "_lock")
    return value if type(value) is _LOCK or type(value) is _RLOCK else None


# -- tasks -----------------------------------------------------------------------------------------------------


def _tasks() -> list[Wait]:
    live = stacks.live_tasks()[:_MOST]
    places = {id(task): task for task in live}
    waits = []
    wanted: dict[int, Any] = {}
    for task in live:
        steps, waiter = stacks.steps_of_task(task)
        if waiter is None:
            continue
        children = stacks.task_field(waiter, "_children")
        targets = [waiter, *(children if type(children) is list else ())]
        holders = [places[id(target)] for target in targets if id(target) in places]
        lock = _async_lock(steps)
        if lock is not None:
            wanted[id(lock)] = lock
            waits.append(Wait(task, stacks.task_name(task), _task_place(steps), "an asyncio.Lock", id(lock)))
        elif holders:
            named = ", ".join(stacks.task_name(holder) for holder in holders[:5])
            waits.append(Wait(task, stacks.task_name(task), _task_place(steps), f"task {named}", holders=holders))
    if wanted:
        frames = ((task, [frame for frame, _ in stacks.steps_of_task(task)[0][-_DEPTH:]]) for task in live)
        held = _holders(frames, set(wanted))
        for wait in waits:
            for holder, where, sure in held.get(wait.lock, ())[:1]:
                wait.holders, wait.held_at, wait.sure = [holder], where, sure
                wait.what += _held(stacks.task_name(holder), where, sure)
    return waits


def _async_lock(steps: list[stacks.Step]) -> Any:
    """The asyncio.Lock that a task is in the middle of acquiring."""
    module = sys.modules.get("asyncio.locks")
    if module is None or not steps:
        return None
    code = module.Lock.acquire.__code__
    for frame, _instruction in steps[-2:]:
        if frame.f_code is code:
            found = shapes.frame_locals(frame, 10)
            lock = dict(found[0]).get("self") if found is not None else None
            return lock if type(lock) is module.Lock else None
    return None


def _held(name: str, where: str, sure: bool) -> str:
    return f" {'' if sure else 'probably '}held by {name}{f', taken at {where}' if where else ''}"


# -- cycles ----------------------------------------------------------------------------------------------------


def _cycles(kind: str, waits: list[Wait]) -> list[Cycle]:
    """Each cycle once. Whoever waits for several waits for all of them, so one way round is enough."""
    by_who = {_key(wait.who): wait for wait in waits}
    done: set[int] = set()
    found = []
    for start, first in by_who.items():
        way: list[int] = []
        stack = [(start, iter([_key(holder) for holder in first.holders]))] if start not in done else []
        if stack:
            way.append(start)
        while stack:
            this, following = stack[-1]
            after = next(following, None)
            if after is None:
                done.add(this)
                stack.pop()
                way.pop()
            elif after in way:
                found.append(_cycle(kind, [by_who[key] for key in way[way.index(after) :]]))
                done.update(way)
                break
            elif after in by_who and after not in done:
                way.append(after)
                stack.append((after, iter([_key(holder) for holder in by_who[after].holders])))
    return found


def _cycle(kind: str, members: list[Wait]) -> Cycle:
    keys = [_key(member.who) for member in members]
    first = keys.index(min(keys))
    ordered = members[first:] + members[:first]
    return Cycle(
        kind,
        [f"{member.name} at {member.at} waits for {member.what}" for member in ordered],
        tuple(_key(member.who) for member in ordered),
        tuple(member.who for member in ordered if type(member.who) is int),
        all(member.sure for member in ordered),
    )


def _key(who: Any) -> int:
    return who if type(who) is int else id(who)


def _place(frame: types.FrameType, line: int | None = None) -> str:
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    return f"{shapes.exact_text(file, 4096)}:{line or frame.f_lineno} in {shapes.exact_text(name, 400)}"


def _user_place(frame: types.FrameType) -> str:
    """Where the program stands: not inside threading.py, if it is called from elsewhere."""
    current: types.FrameType | None = frame
    while current is not None and current.f_code.co_filename == threading.__file__:
        current = current.f_back
    return _place(current or frame)


def _task_place(steps: list[stacks.Step]) -> str:
    own = [frame for frame, _ in steps if "/asyncio/" not in frame.f_code.co_filename]
    frame = own[-1] if own else steps[-1][0] if steps else None
    return _place(frame) if frame is not None else "?"
