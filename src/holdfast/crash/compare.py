"""Two dumps side by side: what is another failure, where the stacks part, what grew, what changed around them.

Owns what is compared and in which order it is told. Must not know terminals. Holds always: the result is of
bounded size, whatever the dumps hold; a figure that one of them lacks is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from holdfast.crash import kinds
from holdfast.crash.display import text_of
from holdfast.crash.dump import Dump
from holdfast.crash.memory import Grown, Growth, snapshot_of
from holdfast.crash.pages import Line
from holdfast.crash.records import Frame, as_dict, as_text, innermost
from holdfast.crash.summary import headline, moment, place, short
from holdfast.text import clean, size

_FRAMES = 200  # of each stack, the innermost: comparing takes the product of both
_LISTED = 20
_TYPES = 15
_VALUE = 80
_PAGE = 4096  # figures of memory that differ by less than this are equal


Row = list[Any]  # a name, and what there was before and after; as docs/json.md has it


@dataclass(frozen=True)
class Comparison:
    """What leads from one dump to the other."""

    old: dict[str, Any]
    new: dict[str, Any]
    same_failure: bool
    parts: list[Row]
    stack: list[Row]
    locals: list[Row]
    figures: list[Row]
    threads: list[Row]
    tasks: list[Row]
    growth: Growth
    packages: list[Row]
    environment: list[Row]
    sources: list[str]

    def as_json(self) -> dict[str, Any]:
        told = {name: value for name, value in vars(self).items() if name != "growth"}
        growth = self.growth
        grown = {"types": growth.types, "holders": growth.containers, "places": growth.lines}
        return told | {name: [_columns(row) for row in rows[:_TYPES]] for name, rows in grown.items()}

    def differs(self) -> bool:
        """Whether they differ in more than the figures of a process, which always do."""
        told = (self.parts, self.stack, self.locals, self.packages, self.environment, self.sources)
        return not self.same_failure or any(told)

    def lines(self) -> Iterator[Line]:
        """The comparison as text, the most telling first."""
        for style, text in _lines(self):
            yield Line(style, clean(text))


def compare(old: Dump, new: Dump) -> Comparison:
    before, after = (snapshot_of(dump.heap, dump.at) for dump in (old, new))
    return Comparison(
        old=_about(old),
        new=_about(new),
        same_failure=_signature(old) == _signature(new),
        parts=_parts(old, new),
        stack=_stack(_failing(old), _failing(new)),
        locals=_locals(old, new),
        figures=_figures(old, new),
        threads=_places(_standing(old.threads), _standing(new.threads)),
        tasks=_places(_standing(old.tasks), _standing(new.tasks)),
        growth=before.diff(after),
        packages=_changed(_packages(old), _packages(new)),
        environment=_changed(_environment(old), _environment(new)),
        sources=_sources(old, new),
    )


# What is compared.


def _about(dump: Dump) -> dict[str, Any]:
    return {"file": str(dump.path), "at": moment(dump.at), "what": headline(dump), "complete": dump.complete}


def _signature(dump: Dump) -> tuple[Any, ...]:
    """Two dumps with the same one are taken for the same failure: type and function, wherever the program lies."""
    frame = _inner(_failing(dump))
    kind = dump.exceptions[0].type_name if dump.exceptions else dump.trigger
    return (kind, frame.file.rpartition("/")[2] if frame else "", frame.function if frame else "")


def _inner(frames: Sequence[Frame]) -> Frame | None:
    return frames[innermost(frames)] if frames else None


def _failing(dump: Dump) -> tuple[Frame, ...]:
    return dump.threads[0].frames if dump.threads else next((one.frames for one in dump.exceptions if one.frames), ())


def _parts(old: Dump, new: Dump) -> list[Row]:
    before = {part.kind: part for part in old.parts}
    after = {part.kind: part for part in new.parts}
    found = []
    for kind in [*before, *(kind for kind in after if kind not in before)]:
        states = [side[kind].state if kind in side else "not planned" for side in (before, after)]
        if states[0] != states[1]:
            found.append([short(kinds.PARTS.get(kind, kind)), *map(short, states)])
    return found[:_LISTED]


def _stack(old: Sequence[Frame], new: Sequence[Frame]) -> list[Row]:
    """Frames that only one side has, and around them those that both have; empty when the stacks are equal."""
    before, after = ([_called(frame) for frame in frames[-_FRAMES:]] for frames in (old, new))
    if before == after:
        return []
    found: list[Row] = []
    for what, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if what == "equal":
            shared = before[i:j]
            skipped = len(shared) - 2
            found += [[" ", shared[0]], ["~", str(skipped)], [" ", shared[-1]]] if skipped > 1 else [
                [" ", frame] for frame in shared]  # fmt: skip
        else:
            found += [["-", frame] for frame in before[i:j]] + [["+", frame] for frame in after[k:m]]
    return found[: 5 * _LISTED]


def _called(frame: Frame) -> str:
    return f"{short(frame.function)} ({place(frame).rpartition(':')[0].rpartition('/')[2]})"


def _locals(old: Dump, new: Dump) -> list[Row]:
    """Values of the innermost frame of the program's own, when both stand in the same function."""
    before, after = _inner(_failing(old)), _inner(_failing(new))
    if before is None or after is None or _called(before) != _called(after):
        return []
    values = dict(after.locals)
    found = []
    for name, value in before.locals[: 10 * _LISTED]:
        texts = [text_of(old, value, width=_VALUE, depth=2)]
        texts.append(text_of(new, values[name], width=_VALUE, depth=2) if name in values else "not there")
        if texts[0] != texts[1]:
            found.append([short(name), *texts])
    return found[:_LISTED]


def _figures(old: Dump, new: Dump) -> list[Row]:
    before, after = _measured(old), _measured(new)
    return [
        [name, before[name], after[name]]
        for name in before
        if name in after and abs(after[name] - before[name]) > (_PAGE if name.endswith("bytes") else 0)
    ]


def _measured(dump: Dump) -> dict[str, int]:
    process = dump.process
    found = {
        "resident bytes": process.resident_bytes,
        "peak bytes": process.peak_bytes,
        "control group bytes": process.cgroup_bytes,
        "descriptors": dump.descriptors.total,
        "sockets": dump.descriptors.sockets,
        "threads": process.threads,
        "tasks": len(dump.tasks),
        "heap objects": dump.heap.objects,
    }
    return {name: value for name, value in found.items() if value > 0 or name in ("tasks", "sockets")}


def _standing(holders: Sequence[Any]) -> Counter[str]:
    frames = (_inner(holder.frames) for holder in holders)
    return Counter(_called(frame) if frame is not None else "no Python frame" for frame in frames)


def _places(old: Counter[str], new: Counter[str]) -> list[Row]:
    """Where more or fewer stand than before."""
    names = [name for name in old.keys() | new.keys() if old[name] != new[name]]
    names.sort(key=lambda name: (-abs(new[name] - old[name]), name))
    return [[name, old[name], new[name]] for name in names[:_LISTED]]


def _columns(row: Grown) -> Row:
    """[name, objects before, after, bytes before, after]."""
    return [short(row.name), row.before.count, row.after.count, row.before.bytes, row.after.bytes]


def _packages(dump: Dump) -> dict[str, str]:
    listed = as_dict(dump.part(kinds.MODULES).get("distributions"))
    versions = {name: as_text(version) for name, version in listed.items()}
    return {"Python": dump.about.python, **versions} if versions else {}


def _environment(dump: Dump) -> dict[str, str]:
    return {name: as_text(value) for name, value in as_dict(dump.part(kinds.ENVIRONMENT).get("values")).items()}


def _changed(old: dict[str, str], new: dict[str, str]) -> list[Row]:
    """[name, before, after]; nothing when one of the dumps has none at all."""
    if not old or not new:
        return []
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [[short(name), short(old.get(name, "")), short(new.get(name, ""))] for name in names[:_LISTED]]


def _sources(old: Dump, new: Dump) -> list[str]:
    before, after = old.sources, new.sources
    shared = [file for file in before if file in after and before[file].first == after[file].first]
    return [short(file) for file in shared if before[file].lines != after[file].lines][:_LISTED]


# How it is told.


def _lines(found: Comparison) -> Iterator[tuple[str, str]]:
    for sign, side in (("-", found.old), ("+", found.new)):
        yield "head" if sign == "-" else "place", f"{sign * 3} {side['at'].replace('+00:00', 'Z')}  {side['what']}"
    same = "The same failure: type and function are equal." if found.same_failure else "Another failure."
    yield "note" if found.same_failure else "bad", same
    if found.stack:
        yield "head", "Stacks"
        for sign, text in found.stack:
            style = {"-": "old", "+": "new", "~": "note"}.get(sign, "")
            yield style, f"    ... {text} frames alike" if sign == "~" else f"  {sign} {text}"
    yield from _pairs("Values in the failing function", found.locals)
    yield from _numbers("Process", found.figures)
    yield from _numbers("Threads, by where they stand", found.threads)
    yield from _numbers("Tasks, by where they wait", found.tasks)
    yield from _growth("Types that grew", found.growth.types)
    yield from _growth("Containers that grew, by who holds them", found.growth.containers)
    yield from _growth("Places that allocated more", found.growth.lines)
    yield from _pairs("Packages", found.packages)
    yield from _pairs("Environment", found.environment)
    yield from _pairs("Parts", found.parts)
    if found.sources:
        yield "head", "Source that is not the same"
        for file in found.sources:
            yield "text", f"  {file}"


def _pairs(title: str, rows: list[Row]) -> Iterator[tuple[str, str]]:
    if rows:
        yield "head", title
        for name, before, after in rows:
            yield "text", f"  {name}: {before or 'nothing'} -> {after or 'nothing'}"


def _numbers(title: str, rows: list[Row]) -> Iterator[tuple[str, str]]:
    if rows:
        yield "head", title
        for name, before, after in rows:
            as_size = name.endswith(" bytes")
            texts = [size(value) if as_size else f"{value:,}" for value in (before, after)]
            change = size(after - before) if as_size else f"{after - before:,}"
            sign = "+" if after > before else ""
            yield "text", f"  {name.removesuffix(' bytes')}: {texts[0]} -> {texts[1]} ({sign}{change})"


def _growth(title: str, rows: Sequence[Grown]) -> Iterator[tuple[str, str]]:
    if rows:
        yield "head", title
        for row in rows[:_TYPES]:
            yield "text", short(f"  {row}")
