"""How many objects of which type the collector knows, how much they take, and where: the heap part of a dump.

Must not know files. Holds always: types are told apart by identity, because a metaclass may define how it is hashed; a
size comes from a C `__sizeof__` or not at all.
"""

from __future__ import annotations

import _tracemalloc
import gc
import types
from collections import Counter
from collections.abc import Callable
from heapq import nlargest
from itertools import islice
from time import monotonic
from typing import Any

from holdfast.crash import holders
from holdfast.crash.shapes import type_name

_MRO = type.__dict__["__mro__"].__get__
_TYPE_DICT = type.__dict__["__dict__"].__get__
_HEADER = 16  # the collector's own header before each object it knows
_TYPES_SHOWN = 400
_LARGEST = 40
_MEASURED = 1_000  # types with fewer objects than this are not worth measuring one by one
_TRACES_S = 1.0  # a snapshot of traces cannot be stopped; with less time left, none is made
_PLACES = 200
_ITEM_SIZE = type.__dict__["__itemsize__"].__get__


def take(most: int, until: float, is_mine: Callable[[str], bool]) -> dict[str, Any]:
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
        "holders": holders.find(is_mine, until),
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
    for base in _MRO(cls):
        for key, value in islice(types.MappingProxyType.items(_TYPE_DICT(base)), 2_000):
            if type(key) is str and key == "__sizeof__":
                if type(value) is not types.MethodDescriptorType:
                    return None, False
                return value, base is object and _ITEM_SIZE(cls) == 0
    return None, False
