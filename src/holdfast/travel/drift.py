"""Drift: in what an agent differs from a baseline, and what of that may be.

Owns the comparison of what is kept with two checkpoints (configuration, environment, versions, the shapes in which
tools were called, chosen places of the state), the rules for what may differ, and the statistics since the baseline,
which the detector makes. Must not know terminals. What always holds: it reads what is recorded and asks no machine;
what a rule allows is listed as allowed, never left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from holdfast.agent import history
from holdfast.agent.checkpoint import Checkpoint
from holdfast.errors import BadOption, format_path
from holdfast.text import count
from holdfast.travel import detector, suspects
from holdfast.travel.expressions import MISSING, Look, parse_path

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent

_ENVIRONMENT = ("python", "platform", "program", "holdfast", "format")
_RULE = re.compile(r"^(?P<name>[^=]+?)(?:=(?P<bound>patch|minor|major|\d+(?:\.\d+)?%))?$")
_PARTS = {"patch": 2, "minor": 1, "major": 0}
"""The first part of a version that may differ."""
_TABLES = ("configuration", "environment", "code", "dependencies", "types", "tools", "state")
"""What names begin with. Any other is a place of the state."""
SHAPES_MAX = 400
_SHOWN = 6  # places of which too little is known


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was. ``name`` is ``dependencies.rich``, ``tools.search.given.limit``, ``state.x``.

    ``allowed`` is the rule that allows it, empty if none does. ``old`` or ``new`` is None where there is nothing.
    """

    name: str
    old: Any
    new: Any
    allowed: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {_text(self.old)} -> {_text(self.new)}"

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {"name": self.name, "old": _text(self.old), "new": _text(self.new), "allowed": self.allowed or None}


def _text(value: Any) -> str:
    text = "(nothing)" if value is None else value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


@dataclass
class Drift:
    """What differs from the baseline. True where something does that no rule allows, or a place drifts.

    ``too_few``: places that statistics say nothing of, with how many values each has had; they need ``NEEDED``.
    ``unfollowed``: why there were no statistics at all.
    """

    agent: str
    baseline: Checkpoint
    at: Checkpoint
    differences: list[Difference] = field(default_factory=list)
    alarms: list[detector.Alarm] = field(default_factory=list)
    too_few: dict[str, int] = field(default_factory=dict)
    unfollowed: str = ""

    @property
    def refused(self) -> list[Difference]:
        """What no rule allows."""
        return [one for one in self.differences if not one.allowed]

    def __bool__(self) -> bool:
        return bool(self.refused or self.alarms)

    def lines(self) -> Iterator[str]:
        """For people."""
        for one in self.refused:
            yield str(one)
        for alarm in self.alarms:
            yield str(alarm)
        allowed = len(self.differences) - len(self.refused)
        if allowed:
            yield f"{allowed} more differ as the rules allow"
        if not self.differences and not self.alarms:
            yield "no drift was found" if self.note else "no drift"
        if self.note:
            yield self.note

    @property
    def note(self) -> str:
        """What was not followed by statistics, so that nobody knows whether it drifts; empty where all was."""
        if self.unfollowed or not self.too_few:
            return self.unfollowed
        places = sorted(self.too_few.items(), key=lambda one: -one[1])
        named = ", ".join(f"{place} has {number}" for place, number in places[:_SHOWN])
        more = f", and {count(len(places) - _SHOWN, 'other place')} fewer" if len(places) > _SHOWN else ""
        return f"not followed by statistics, which need {detector.NEEDED} values: {named}{more}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "agent": self.agent,
            "baseline": self.baseline.id,
            "at": self.at.id,
            "drift": bool(self),
            "differences": [one.to_json() for one in self.differences],
            "alarms": [one.to_json() for one in self.alarms],
            "too_few": [{"place": place, "values": number} for place, number in self.too_few.items()],
            "needed": detector.NEEDED,
            "note": self.note or None,
        }


@dataclass(frozen=True)
class Rule:
    """What may differ: names like ``dependencies.*``, and by how much: ``=patch``, ``=minor``, ``=major``, ``=5%``."""

    text: str
    name: str
    bound: str

    @classmethod
    def read(cls, text: str) -> Rule:
        """Read a rule as people write it."""
        found = _RULE.match(text.strip())
        if found is None:
            raise BadOption(
                f"{text!r} is no rule",
                hint="Write NAME, NAME=patch, NAME=minor, NAME=major or NAME=5%; * stands for all.",
            )
        return cls(text.strip(), found["name"].strip(), found["bound"] or "")

    def allows(self, name: str, old: Any, new: Any) -> bool:
        """Whether this difference is one of those."""
        if not fnmatchcase(name, self.name) and not (
            self.name.partition(".")[0] not in _TABLES and fnmatchcase(name, f"state.{self.name}")
        ):
            return False
        if not self.bound:
            return True
        if self.bound.endswith("%"):
            if not all(type(value) in {int, float} and math.isfinite(value) for value in (old, new)):
                return False
            return bool(abs(new - old) <= float(self.bound[:-1]) / 100 * abs(old))
        kept = _PARTS[self.bound]
        parts = [str(value).split(".")[:kept] for value in (old, new)]
        return old is not None and new is not None and parts[0] == parts[1]


def drift(
    agent: Agent,
    baseline: str | Checkpoint,
    at: str | Checkpoint | None = None,
    *,
    paths: Sequence[str] = (),
    may: Sequence[str] = (),
) -> Drift:
    """What differs between two checkpoints of an agent, the older one being as it should be."""
    rules = [Rule.read(text) for text in may]
    first, last = agent.at(baseline), agent.at(at)
    found = Drift(agent.name, first, last)
    past = suspects.read(agent, last)
    begin = next((place for place, one in enumerate(past.checkpoints) if one.id == first.id), None)
    pairs = [*_described(first, last), *_places(first, last, paths)]
    if begin is not None:
        pairs += _shapes(past, begin)
        follow = detector.Detector()
        found.alarms = [alarm for alarm in detector.follow(_values(agent, past, paths), follow) if alarm.at > begin]
        found.too_few = follow.unjudged()
    else:
        newest = f"the {len(past.checkpoints):,} newest checkpoints" if not past.complete else "those that led here"
        found.unfollowed = f"neither tools nor values were followed: the baseline is not among {newest}"
    for name, old, new in pairs:
        allowing = next((rule.text for rule in rules if rule.allows(name, old, new)), "")
        found.differences.append(Difference(name, old, new, allowing))
    return found


def _described(first: Checkpoint, last: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
    """Configuration, environment and versions, as they are kept with checkpoints."""
    old, new = first.metadata, last.metadata
    chosen = {"configuration": ("config", "when"), "environment": _ENVIRONMENT}
    tables = [
        (title, {key: old.get(key) for key in keys}, {key: new.get(key) for key in keys})
        for title, keys in chosen.items()
    ]
    tables += [(name, old.get(name) or {}, new.get(name) or {}) for name in ("code", "dependencies", "types")]
    for title, before, after in tables:
        for key in sorted({**before, **after}):
            if before.get(key) != after.get(key):
                yield f"{title}.{key}", before.get(key), after.get(key)


def _places(first: Checkpoint, last: Checkpoint, paths: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """Chosen places of the state, leaf by leaf."""
    for text in paths:
        path = parse_path(text)
        with first.state.lock, last.state.lock:
            old, new = Look.of(first.state).at(path), Look.of(last.state).at(path)
        if old is MISSING and new is MISSING:
            raise BadOption(f"{text} is in neither of the two states", hint="See `holdfast show` for what is there.")
        if type(old) is not type(new) or old != new:
            for move in suspects.leaves(path, old, new):
                pair = [None if value is MISSING else value for value in (move.old, move.new)]
                yield format_path(move.path), pair[0], pair[1]


def _shapes(past: suspects.History, begin: int) -> Iterator[tuple[str, Any, Any]]:
    """The types of what each tool was given and returned, up to the baseline and since then."""
    before: dict[tuple[str, str], set[str]] = {}
    after: dict[tuple[str, str], set[str]] = {}
    tools: tuple[set[str], set[str]] = set(), set()
    for place, moves in enumerate(past.moves):
        table = before if place <= begin else after
        for move in moves:
            if move.is_call and len(table) < SHAPES_MAX and move.path[2] != "status":
                tool = str(move.path[1])
                name = ".".join(str(part) for part in ("tools", *move.pattern[1:]))
                table.setdefault((tool, name), set()).add(type(move.new).__name__)
                tools[place > begin].add(tool)
    for tool, name in sorted({*before, *after}):
        old, new = before.get((tool, name)), after.get((tool, name))
        if old != new and tool in tools[0] and tool in tools[1] and not (old and new and new <= old):
            yield name, "|".join(sorted(old)) if old else None, "|".join(sorted(new)) if new else None


def _values(agent: Agent, past: suspects.History, paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What stands at each checkpoint in the places that are followed: the chosen ones, or all that are in no list."""
    if not paths:
        yield from past.values()
    chosen = [parse_path(text) for text in paths]
    for one in past.checkpoints if paths else ():
        look = Look(history.state_of(agent._db.now, one._current()))
        leaves = (leaf for path in chosen for leaf in suspects.leaves(path, MISSING, look.at(path)))
        yield {format_path(leaf.path): leaf.new for leaf in leaves}
