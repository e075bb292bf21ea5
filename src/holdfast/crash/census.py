"""How many objects of which type the collector knows, and how much they take: the heap part of a dump.

Must not know files. Holds always: types are told apart by identity, because a metaclass may define how it is hashed; a
size comes from a C `__sizeof__` or not at all.
"""

from __future__ import annotations

import gc
import types
from collections import Counter
from heapq import nlargest
from itertools import islice
from time import monotonic
from typing import Any

from holdfast.crash.shapes import type_name

_MRO = type.__dict__["__mro__"].__get__
_TYPE_DICT = type.__dict__["__dict__"].__get__
_HEADER = 16  # the collector's own header before each object it knows
_TYPES_SHOWN = 400
_LARGEST = 40
_MEASURED = 1_000  # types with fewer objects than this are not worth measuring one by one
_ITEM_SIZE = type.__dict__["__itemsize__"].__get__


def take(most: int, until: float) -> dict[str, Any]:
    """Counts and sizes by type, and the largest containers."""
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
        "collector": [list(stats.values()) for stats in gc.get_stats()],
        "thresholds": list(gc.get_threshold()),
    }


def _measure(cls: type) -> tuple[Any, bool]:
    """The C method that tells an instance's size (None if the program has its own), and whether it is always equal."""
    for base in _MRO(cls):
        for key, value in islice(types.MappingProxyType.items(_TYPE_DICT(base)), 2_000):
            if type(key) is str and key == "__sizeof__":
                if type(value) is not types.MethodDescriptorType:
                    return None, False
                return value, base is object and _ITEM_SIZE(cls) == 0
    return None, False
