"""Whether a thread in the store is what the source has: which checkpoints are missing, and what differs.

Owns what "the same" means for checkpoints and values. Reads both sides, changes neither. What always holds: values are
compared as they were decoded from either side, type by type and in order, never by encoding them again; both sides are
read in one pass, page by page.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import name_key
from holdfast.codec.assigned import Still
from holdfast.codec.shapes import FIELDS, shape_of
from holdfast.codec.types import Registry
from holdfast.codec.values import decode
from holdfast.contrib.langgraph.reading import OURS, Reader, channel_of, placed
from holdfast.contrib.langgraph.sources import Entry, Source, Write
from holdfast.contrib.langgraph.thread import ABOUT, has_thread, key_of
from holdfast.store.catalog import EventRow

if TYPE_CHECKING:
    from holdfast.contrib.langgraph.saver import HoldfastSaver

# Differences that are told one by one; the others are counted.
TOLD = 8
# Values of one of these types are the same when they are equal.
_EXACT = frozenset({str, bytes, int, bool, type(None)})


class Survey:
    """Which checkpoints of a namespace both sides have, by their ids alone."""

    def __init__(self, saver: HoldfastSaver, source: Source, thread: str, ns: str) -> None:
        self.ns = ns
        self.parents = source.lineage(thread, ns)
        self.reader = Reader.of(saver.store, saver._registry, thread, ns, arriving=True)
        self.foreign = False  # whether it is no LangGraph thread at all
        held: set[bytes | None] = set()
        for row in self.reader.line.rows() if self.reader is not None else ():
            held.add(row.key)
            self.foreign = self.foreign or not has_thread(Manifest.decode(row.manifest))
        keys = {key_of(ns, name): name for name in self.parents}
        self.missing = [name for key, name in keys.items() if key not in held]
        self.present = [name for key, name in keys.items() if key in held]
        self.more = len(held - keys.keys())


class Comparison:
    """What a look at a whole thread has found."""

    def __init__(self) -> None:
        self.missing = 0
        self.more = 0  # checkpoints that only the store has
        self.different: list[str] = []
        self.new_writes: dict[tuple[str, str], list[Write]] = {}  # (namespace, checkpoint) -> what the store lacks
        self.gone_on = False  # the store has writes that an imported thread gets when a graph goes on with it

    @property
    def complete(self) -> bool:
        """Whether everything that the source has is there."""
        return not (self.missing or self.different or self.new_writes)

    @property
    def exact(self) -> bool:
        """Whether there is that and nothing else."""
        return self.complete and not self.more and not self.gone_on

    @property
    def summary(self) -> str:
        """In words, what is not the same."""
        found = self.different[:TOLD]
        found += [f"writes of checkpoint {name}" for _, name in list(self.new_writes)[: TOLD - len(found)]]
        rest = len(self.different) + len(self.new_writes) - len(found)
        found += [f"{rest} more"] * bool(rest)
        found += [f"{self.missing} checkpoints of the source are not there"] * bool(self.missing)
        found += [f"{self.more} checkpoints that the source does not have"] * bool(self.more)
        found += ["writes that the source does not have"] * bool(self.gone_on)
        return "; ".join(found)


def compare(
    saver: HoldfastSaver,
    source: Source,
    thread: str,
    surveys: Sequence[Survey],
    compared: Callable[[], None] = lambda: None,
) -> Comparison:
    """Look at everything that both sides have of a thread. ``compared`` is called for each checkpoint."""
    result = Comparison()
    row = saver.store._catalog.agent(name_key(thread))
    for survey in surveys:
        result.missing += len(survey.missing)
        result.more += survey.more
        if survey.reader is not None and survey.present:
            _compare_checkpoints(result, survey.reader, _InStep(source, thread, survey), compared)
        line = Line(saver.store, row) if row is not None else None
        for name, writes in source.early_writes(thread, survey.ns):
            found = line.events_named([key_of(survey.ns, name)]) if line is not None else []
            _compare_writes(result, survey.ns, name, writes, _decoded(found, saver._registry))
    return result


class _InStep:
    """The source's checkpoints in the order in which the store has them, which is nearly always the source's own."""

    def __init__(self, source: Source, thread: str, survey: Survey) -> None:
        self._source = source
        self._place = thread, survey.ns
        self.names = set(survey.present)
        self._stream = source.entries(thread, survey.ns, newest_first=True, skip=set(survey.missing))
        self._next: Entry | None = None
        self._taken: set[str] = set()

    def take(self, name: str) -> Entry:
        while self._next is None or self._next.id in self._taken:
            self._next = next(self._stream, None)
            if self._next is None:
                break
        found = self._next
        if found is not None and found.id == name:
            self._next = None
            return found
        self._taken.add(name)
        return self._source.entry(*self._place, name)


def _compare_checkpoints(result: Comparison, reader: Reader, entries: _InStep, compared: Callable[[], None]) -> None:
    for state, about, events in reader.states():
        name = about["id"]
        if name not in entries.names:
            continue
        entry = entries.take(name)
        result.different += [f"{what} of checkpoint {name}" for what in _differences(entry, state, about)]
        _compare_writes(result, reader.ns, name, entry.writes, _decoded(events, reader._registry))
        compared()


def _differences(entry: Entry, state: Still, about: Mapping[str, Any]) -> Iterator[str]:
    if (about.get("parent") or None) != entry.parent:
        yield "parent"
    if not same(about["metadata"], entry.metadata, ordered=False):
        yield "metadata"
    record = {name: value for name, value in entry.checkpoint.items() if name != "channel_values"}
    for name in {*record, *about} - OURS:
        if name not in record or name not in about or not same(about[name], record[name], ordered=False):
            yield name
    channels = entry.checkpoint["channel_values"]
    held = set(state.names) - {ABOUT}
    for name in {*channels, *held}:
        if name not in channels or name not in held or not same(channel_of(state, about, name), channels[name]):
            yield f"channel {name!r}"


def _decoded(events: Iterable[EventRow], registry: Registry) -> dict[tuple[str, int], Write]:
    return {
        (task, index): Write(task, path, index, channel, decode(data, registry))
        for (task, index), (path, channel, data) in placed(events).items()
    }


def _compare_writes(
    result: Comparison, ns: str, name: str, writes: Sequence[Write], held: dict[tuple[str, int], Write]
) -> None:
    for write in writes:
        found = held.pop(write.place, None)
        if found is None:
            result.new_writes.setdefault((ns, name), []).append(write)
        elif not same(found, write):
            if write.index < 0:  # errors, interrupts and resumptions are replaced when a graph goes on
                result.gone_on = True
            else:
                result.different.append(f"a write to {write.channel!r} of checkpoint {name}")
    if held:
        result.gone_on = True


# -- values ------------------------------------------------------------------------------------------------------


def same(one: Any, other: Any, *, ordered: bool = True) -> bool:
    """Whether two values are the same in type and content. ``ordered=False``: the order of keys does not count.

    Never raises, whatever the values' own equality does; what is not equal to itself (NaN) is the same as its like.
    """
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _EXACT:
        return bool(one == other)
    if issubclass(kind, dict):
        return _same_dicts(one, other, ordered)
    if issubclass(kind, (list, tuple, deque)):
        return _same_items(one, other, ordered)
    if issubclass(kind, (set, frozenset)):
        return _same_sets(one, other)
    if issubclass(kind, (str, bytes, bytearray, int)):
        return bool(one == other)
    if kind.__module__.startswith("numpy") and hasattr(one, "dtype"):
        return _same_arrays(one, other)
    parts = _parts(one)
    if parts is not None:
        return same(parts, _parts(other), ordered=ordered)
    return _same_text(one, other)


def _same_items(one: Sequence[Any], other: Sequence[Any], ordered: bool) -> bool:
    kinds = list(map(type, one))
    if kinds != list(map(type, other)):
        return False
    if _EXACT.issuperset(kinds):
        return list(one) == list(other)
    return all(same(a, b, ordered=ordered) for a, b in zip(one, other, strict=True))


def _same_dicts(one: dict[Any, Any], other: dict[Any, Any], ordered: bool) -> bool:
    if ordered:
        return _same_items(list(one), list(other), ordered) and _same_items(
            list(one.values()), list(other.values()), ordered
        )
    pairs = _matched(one, other)
    return pairs is not None and all(same(one[key], other[like], ordered=False) for key, like in pairs)


def _same_sets(one: Collection[Any], other: Collection[Any]) -> bool:
    kinds = set(map(type, one))
    if len(kinds) <= 1 and kinds <= _EXACT:
        return kinds == set(map(type, other)) and bool(one == other)
    return _matched(one, other) is not None


def _matched(one: Iterable[Any], other: Iterable[Any]) -> list[tuple[Any, Any]] | None:
    """The members of one set, or the keys of one dict, each with its like in the other; None where one has none."""
    left: dict[int, list[Any]] = {}
    for item in other:
        left.setdefault(hash(item), []).append(item)
    pairs: list[tuple[Any, Any]] = []
    rest = [item for item in one if not _pair(pairs, item, left.get(hash(item), []))]
    # What is not equal to itself has a hash of its own; so has whatever holds it.
    strays = [item for items in left.values() for item in items]
    if len(rest) != len(strays) or not all(_pair(pairs, item, strays) for item in rest):
        return None
    return pairs


def _pair(pairs: list[tuple[Any, Any]], item: Any, candidates: list[Any]) -> bool:
    for at, like in enumerate(candidates):
        if same(item, like):
            pairs.append((item, candidates.pop(at)))
            return True
    return False


def _same_arrays(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return same(one.tolist(), other.tolist()) if one.dtype.hasobject else bool(one.tobytes() == other.tobytes())


def _parts(value: Any) -> Any:
    """What an instance is made of, where that is known better than its own idea of equality."""
    if hasattr(value, "__pydantic_fields_set__"):
        return [vars(value), value.__pydantic_extra__, value.__pydantic_fields_set__, value.__pydantic_private__]
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, BaseException):
        return [value.args, vars(value)]
    shape = shape_of(type(value))
    return shape.take(value) if shape.form == FIELDS else None


def _same_text(one: Any, other: Any) -> bool:
    """For what is known by its text: that tells apart what only compares equal.

    1.0 and 1.00, -0.0 and 0.0, one moment in two zones. What is not equal to itself, or cannot say whether it is, has
    nothing but its text.
    """
    text = _text(one)
    if text is None or text != _text(other):
        return False
    try:
        return bool(one == other or one != one)  # noqa: PLR0124
    except Exception:  # noqa: BLE001 - a foreign class's equality, or that of a signalling NaN
        return True


def _text(value: Any) -> str | None:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - code of a foreign class
        return None
