"""Containers that have a name: which module, class, object or frame holds them, and how much is in them.

Owns the walk from names to containers, and the words for a place. Must not know files. Holds always: nothing of the
program runs (see shapes.py); the walk ends at its bounds of objects, depth and time; a key below a name that looks
secret is not part of a place.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple

from holdfast.crash import stacks, tasks
from holdfast.crash.redaction import looks_secret
from holdfast.crash.shapes import exact_text, first_items, frame_locals, layout_of, type_name

_VISITED = 60_000  # objects that are looked at
_DEPTH = 6  # steps from a name of the program's own; from one of a library's fewer, there are so many
_LIBRARY_DEPTH = 2
_ITEMS = 200  # of one container that are followed
_NAMED = 32  # a dict of at most so many text keys is followed by their names
_KEY = 40  # characters of such a key
_ROWS = 300
_LEAST = 8  # items; smaller containers are not worth a row
_PLACE = 300  # characters of a place
_STACKS = 500  # threads, and as many tasks
_FRAMES = 50  # of one stack, the innermost

_MODULE_DICT: Any = vars(types.ModuleType)["__dict__"].__get__
_TYPE_DICT = type.__dict__["__dict__"].__get__
_CONTAINERS: tuple[Any, ...] = (dict, list, set, frozenset, tuple, deque, bytearray)
_PLAIN = frozenset(map(id, (str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.CodeType,
                            types.BuiltinFunctionType, types.FrameType, types.GetSetDescriptorType,
                            types.MemberDescriptorType, types.WrapperDescriptorType)))  # fmt: skip
OWN = "holdfast.crash."  # what this room holds itself is no growth of the program
_CACHED = type(functools.lru_cache(maxsize=1)(len))


_secret = functools.lru_cache(4_096)(looks_secret)  # the same names come again and again


class _Stop(NamedTuple):
    place: str
    value: Any
    depth: int  # steps that are left
    hidden: bool  # below a name that looks secret


def find(is_mine: Callable[[str], bool], until: float) -> list[list[Any]]:
    """[place, type, how many containers, their items, their bytes, what the first item is].

    Those of the program come first, then those of libraries, the fullest first. Containers that have the same place, as
    the lists below ``sessions[*].history``, are one row.
    """
    mine, libraries = _roots(is_mine)
    walked = _Walked()
    _walk(walked, mine, is_mine, until)
    own = set(walked.found)
    _walk(walked, libraries, is_mine, until)
    rows = sorted(walked.found.items(), key=lambda row: (row[0] not in own, -row[1][2], row[0]))
    rows = [(place, row) for place, row in rows if row[2] >= _LEAST][:_ROWS]
    return [[place[:_PLACE], *row[:4], _first_item(row[4])] for place, row in rows]


class _Walked:
    """What a walk has found, and the objects it has seen, held so that no other one gets an id that was seen."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {}
        self.seen: set[int] = set()
        self.held: list[Any] = []


def _walk(walked: _Walked, roots: list[_Stop], is_mine: Callable[[str], bool], until: float) -> None:
    found, seen, held = walked.found, walked.seen, walked.held
    waiting = deque(roots)
    while waiting and len(held) < _VISITED and monotonic() < until:
        stop = waiting.popleft()
        if id(type(stop.value)) in _PLAIN or id(stop.value) in seen:
            continue
        if type(stop.value) is types.FunctionType and stop.value.__closure__ is None:
            continue
        if layout_of(type(stop.value)).name.startswith(OWN):
            continue
        seen.add(id(stop.value))
        held.append(stop.value)
        _count(found, stop)
        if stop.depth > 0:
            waiting.extend(_below(stop, is_mine))


def _roots(is_mine: Callable[[str], bool]) -> tuple[list[_Stop], list[_Stop]]:
    """Names of the program: its modules, its frames, its tasks' frames; and those of libraries."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if type(name) is str]
    own: list[_Stop] = []
    libraries: list[_Stop] = []
    for name, module in modules:
        if type(module) is not types.ModuleType or name.startswith("holdfast."):
            continue
        fields = first_items(_MODULE_DICT(module), 5_000)
        file = next((exact_text(value, 4096) for key, value in fields if type(key) is str and key == "__file__"), "")
        mine = name == "__main__" or (file != "" and is_mine(file))
        for key, value in fields:
            if type(key) is not str or id(type(value)) in _PLAIN or (key.startswith("__") and key.endswith("__")):
                continue
            if mine:
                own.append(_Stop(f"{name}.{key}", value, _DEPTH, _secret(key)))
            elif type(value) is not types.FunctionType and type(value) is not type:
                libraries.append(_Stop(f"{name}.{key}", value, _LIBRARY_DEPTH, _secret(key)))
    every = [stacks.steps_of_frame(thread["frame"]) for thread in stacks.threads(_STACKS)]
    every += [tasks.steps_of(task)[0] for task in tasks.live_tasks()[:_STACKS]]
    for steps in every:
        for frame, _instruction in steps[-_FRAMES:]:
            code = frame.f_code
            if is_mine(exact_text(code.co_filename, 4096)) and code.co_name != "<module>":
                where = f"{exact_text(code.co_qualname, 200)}() in {code.co_filename.rpartition('/')[2][:100]}"
                named = frame_locals(frame, _ITEMS)
                own += [
                    _Stop(f"{where}: {key}", value, _DEPTH, _secret(key)) for key, value in (named[0] if named else ())
                ]
    return own, libraries


def _count(found: dict[str, list[Any]], stop: _Stop) -> None:
    base: Any = layout_of(type(stop.value)).base
    if any(base is known for known in _CONTAINERS):
        row = found.setdefault(stop.place, [type_name(type(stop.value)), 0, 0, 0, stop.value])
        row[1] += 1
        row[2] += base.__len__(stop.value)
        row[3] += base.__sizeof__(stop.value)


def _below(stop: _Stop, is_mine: Callable[[str], bool]) -> Iterator[_Stop]:
    """What a value leads to, with the place's words for the step."""
    value, kind = stop.value, type(stop.value)
    depth = stop.depth - 1
    if kind is types.FunctionType:
        code = value.__code__
        if is_mine(exact_text(code.co_filename, 4096)):
            for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
                inside = gc.get_referents(cell)
                if inside:
                    yield _Stop(f"{stop.place}() closure {name}", inside[0], depth, stop.hidden or _secret(name))
    elif kind is types.MethodType:
        yield _Stop(stop.place, value.__self__, depth, stop.hidden)
    elif kind is _CACHED:
        for inside in gc.get_referents(value):
            if type(inside) is dict and inside is not layout_of(kind).instance_dict(value):
                yield _Stop(f"{stop.place}() cache", inside, 0, stop.hidden)
    elif any(base is type for base in type.__dict__["__mro__"].__get__(kind)):  # a class
        for name, inside in islice(types.MappingProxyType.items(_TYPE_DICT(value)), _ITEMS):
            if type(name) is str and not name.startswith("__") and type(inside) is not types.FunctionType:
                yield _Stop(f"{stop.place}.{name}", inside, depth, stop.hidden or _secret(name))
    else:
        yield from _inside(stop, depth)


def _inside(stop: _Stop, depth: int) -> Iterator[_Stop]:
    """Items of a container, attributes of an object."""
    value, layout = stop.value, layout_of(type(stop.value))
    base: Any = layout.base
    if base is dict:
        items = first_items(value, _ITEMS)
        short = dict.__len__(value) <= _NAMED and not stop.hidden
        for key, inside in items:
            if id(type(inside)) in _PLAIN:
                continue
            named = short and type(key) is str and len(key) <= _KEY
            step = f"[{key!r}]" if named else "[*]"
            yield _Stop(stop.place + step, inside, depth, stop.hidden or (named and _secret(key)))
    elif base is list or base is tuple:
        for inside in base.__getitem__(value, slice(0, _ITEMS)):
            yield _Stop(f"{stop.place}[*]", inside, depth, stop.hidden)
    elif base is deque:
        for inside in _some(value):
            yield _Stop(f"{stop.place}[*]", inside, depth, stop.hidden)
    for name, inside in layout.attributes(value, _ITEMS)[0]:
        if id(type(inside)) in _PLAIN:
            continue
        yield _Stop(f"{stop.place}.{name}", inside, depth, stop.hidden or _secret(name))


def _some(value: Any) -> list[Any]:
    try:
        return list(islice(deque.__iter__(value), _ITEMS))
    except RuntimeError:  # changed by another thread
        return []


def _first_item(value: Any) -> str:
    """The type of what a container holds, by its first item."""
    base: Any = layout_of(type(value)).base
    if base is dict:
        items = [inside for _key, inside in first_items(value, 1)]
    elif base is bytearray:
        return ""
    else:
        try:
            items = list(islice(base.__iter__(value), 1))
        except RuntimeError:
            items = []
    return type_name(type(items[0])) if items else ""
