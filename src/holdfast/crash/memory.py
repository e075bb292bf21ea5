"""The heap: what it holds by type, who holds the large containers, and what grows between two moments.

Owns `heap()`, the counting, the search for holders, and how two snapshots are compared.
Must not know terminals. Holds always: taking a snapshot runs no code of the program and ends at its bounds; what a dump
holds is read as inert data.
"""

from __future__ import annotations

import _tracemalloc
import functools
import gc
import sys
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple

from holdfast.crash import shapes, stacks
from holdfast.crash.kinds import Limits
from holdfast.crash.records import Heap, read
from holdfast.crash.redaction import looks_secret
from holdfast.crash.shapes import exact_text, first_items, frame_locals, in_class, layout_of, type_name
from holdfast.crash.stacks import Frames
from holdfast.text import size

# -- counting --------------------------------------------------------------------------------------------------------


_HEADER = 16  # the collector's own header before each object it knows
_TYPES_SHOWN = 400
_LARGEST = 40
_MEASURED = 1_000  # types with fewer objects than this are not worth measuring one by one
_TRACES_S = 1.0  # a snapshot of traces cannot be stopped; with less time left, none is made
_PLACES = 200
_ITEM_SIZE = type.__dict__["__itemsize__"].__get__


def census(most: int, until: float, is_mine: Callable[[str], bool]) -> dict[str, Any]:
    """Counts and sizes by type, the largest containers, those that have a name, and where memory was allocated."""
    objects = gc.get_objects()
    total = len(objects)
    del objects[most:]
    types_of = list(map(type, objects))
    counts = Counter(map(id, types_of))
    first: dict[int, Any] = {}
    for value, cls in zip(objects, types_of, strict=True):
        key = id(cls)
        if key not in first:
            first[key] = value
            if len(first) == len(counts):
                break
    sizes: dict[int, int] = {}
    largest: list[tuple[int, int, str]] = []
    for key, value in first.items():
        measure, fixed = _measure(type(value))
        cls = type(value)
        if measure is None:
            continue
        container = cls is dict or cls is list or cls is set or cls is tuple
        if fixed or monotonic() > until or (counts[key] < _MEASURED and not container):
            sizes[key] = counts[key] * (measure(value) + _HEADER)  # of the others, the first stands for all
            continue
        members = [other for other in objects if type(other) is cls]
        each = list(map(measure, members))
        sizes[key] = sum(each) + _HEADER * len(each)
        if container:
            top = nlargest(_LARGEST, range(len(each)), key=each.__getitem__)
            largest += [(each[at], len(members[at]), type_name(cls)) for at in top]
    largest.sort(reverse=True)
    ranked = sorted(counts, key=lambda key: (-sizes.get(key, 0), -counts[key]))[:_TYPES_SHOWN]
    return {
        "objects": total,
        "counted": len(objects),
        "types": [[type_name(type(first[key])), counts[key], sizes.get(key, 0)] for key in ranked],
        "types_total": len(counts),
        "largest": [[name, length, size] for size, length, name in largest[:_LARGEST]],
        "holders": holders_of(is_mine, until),
        "places": _allocations(until),
        "collector": [list(stats.values()) for stats in gc.get_stats()],
        "thresholds": list(gc.get_threshold()),
    }


def _allocations(until: float) -> list[list[Any]]:
    """[file:line, blocks, bytes] of what is allocated now, the most bytes first; only where tracemalloc is on."""
    if not _tracemalloc.is_tracing() or until - monotonic() < _TRACES_S:
        return []
    found: dict[tuple[str, int], list[int]] = {}
    for at, trace in enumerate(_tracemalloc._get_traces()):  # noqa: SLF001 (what tracemalloc itself calls)
        row = found.setdefault(trace[2][0], [0, 0])  # the line that asked for it
        row[0] += 1
        row[1] += trace[1]
        if at % 50_000 == 0 and monotonic() > until:
            break
    ranked = nlargest(_PLACES, found.items(), key=lambda item: item[1][1])
    return [[f"{file[:1000]}:{line}", *row] for (file, line), row in ranked]


def _measure(cls: type) -> tuple[Any, bool]:
    """The C method that tells an instance's size (None if the program has its own), and whether it is always equal."""
    measure = in_class(cls, "__sizeof__", None)
    if type(measure) is not types.MethodDescriptorType:
        return None, False
    return measure, measure is object.__sizeof__ and _ITEM_SIZE(cls) == 0


# -- who holds what --------------------------------------------------------------------------------------------------


_VISITED = 60_000  # objects that are looked at
_DEPTH = 6  # steps from a name of the program's own; from one of a library's fewer, there are so many
_LIBRARY_DEPTH = 2
_ITEMS = 200  # of one container that are followed
_NAMED = 32  # a dict of at most so many text keys is followed by their names
_KEY = 40  # characters of such a key
_ROWS = 300
_LEAST_ITEMS = 8  # items; smaller containers are not worth a row
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


def holders_of(is_mine: Callable[[str], bool], until: float) -> list[list[Any]]:
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
    rows = [(place, row) for place, row in rows if row[2] >= _LEAST_ITEMS][:_ROWS]
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
    every += [stacks.steps_of_task(task)[0] for task in stacks.live_tasks()[:_STACKS]]
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
    elif shapes.is_subtype(kind, type):  # a class
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


# -- what grows ------------------------------------------------------------------------------------------------------


_HERE = __file__.rpartition("/")[0] + "/"
_SHOWN = 15  # rows of a text


@dataclass(frozen=True)
class Amount:
    """How many there are, and how many bytes they take (without what they refer to)."""

    count: int = 0
    bytes: int = 0
    holds: str = ""  # of a container: the type of its first item


@dataclass(frozen=True)
class Grown:
    """One thing that grew: a type, a container with its place, or a line that allocates."""

    name: str
    before: Amount
    after: Amount

    @property
    def count(self) -> int:
        return self.after.count - self.before.count

    @property
    def bytes(self) -> int:
        return self.after.bytes - self.before.bytes

    def __str__(self) -> str:
        change = f"{self.before.count:,} -> {self.after.count:,}"
        holds = f", holds {self.after.holds}" if self.after.holds else ""
        taken = f"{size(self.before.bytes)} -> {size(self.after.bytes)}"
        return f"+{self.count:<9,} {self.name}: {change}, {taken}{holds}"


@dataclass(frozen=True)
class Growth:
    """What grew between two snapshots, each list with the most bytes first."""

    types: tuple[Grown, ...]
    containers: tuple[Grown, ...]  # by who holds them: a module's name, an attribute, a local of a frame
    lines: tuple[Grown, ...]  # that allocated more; only where tracemalloc was on

    def __str__(self) -> str:
        told = []
        for title, rows in (("types", self.types), ("containers", self.containers), ("lines", self.lines)):
            told += [title, *(f"  {row}" for row in rows[:_SHOWN])] if rows else []
        return "\n".join(told) or "nothing grew"


@dataclass(frozen=True)
class Snapshot:
    """A heap at one moment: what the collector knows, by type; containers by place; allocations by line."""

    at: float
    objects: int
    types: Mapping[str, Amount] = field(repr=False)
    containers: Mapping[str, Amount] = field(repr=False)
    lines: Mapping[str, Amount] = field(repr=False)

    def diff(self, later: Snapshot) -> Growth:
        """What grew from this snapshot to a later one."""
        pairs = zip(self.kinds, later.kinds, strict=True)
        types, containers, lines = (_grown(old, new) for old, new in pairs)
        return Growth(types, containers, lines)

    @property
    def kinds(self) -> tuple[Mapping[str, Amount], Mapping[str, Amount], Mapping[str, Amount]]:
        """Types, containers, lines."""
        return self.types, self.containers, self.lines


def heap(*, limits: Limits | None = None) -> Snapshot:
    """A snapshot of this process's heap. Nothing is collected first: call ``gc.collect()`` if garbage should not count.

    With ``tracemalloc.start()`` it also knows which lines allocated what is there.
    """
    limits = limits or Limits()
    was_on = gc.isenabled()
    gc.disable()  # a collection would run finalizers of the program in the middle of the count
    try:
        found = census(limits.census_objects, monotonic() + limits.deadline_s, Frames(limits).is_mine)
    finally:
        shapes.forget_layouts()
        if was_on:
            gc.enable()
    return snapshot_of(read(Heap, found), time.time())


def snapshot_of(part: Heap, at: float) -> Snapshot:
    """The heap part of a dump as a snapshot."""
    held = {place: Amount(items, taken, first) for place, _kind, _count, items, taken, first in part.holders}
    return Snapshot(at, part.objects, _amounts(part.types), held, _amounts(part.places))


def _grown(old: Mapping[str, Amount], new: Mapping[str, Amount]) -> tuple[Grown, ...]:
    if not old or not new:
        return ()
    pairs = (Grown(name, old.get(name, Amount()), after) for name, after in new.items() if not _own(name))
    return tuple(sorted((one for one in pairs if one.count > 0), key=lambda one: (-one.bytes, -one.count, one.name)))


def _own(name: str) -> bool:
    """Whether a type or a line belongs to this room, whose snapshots are no growth of the program."""
    return name.startswith((OWN, _HERE))


def _amounts(rows: Iterable[tuple[str, int, int]]) -> dict[str, Amount]:
    found: dict[str, Amount] = {}
    for name, count, taken in rows:
        known = found.get(name, Amount())  # two classes may have the same name
        found[name] = Amount(known.count + count, known.bytes + taken)
    return found
