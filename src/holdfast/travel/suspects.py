"""Suspects: every checkpoint of a history, with what speaks for it as the origin of a failure.

Owns the reading of a history as *moves* (one leaf of the state, or of a recorded call, that took another value), and
the features by which checkpoints are compared: odd values, odd company, broken relations, what was due and did not
happen, a gap that fits. What is usual is learned from the history itself. Must not know how features are weighed, nor
who asks. What always holds: values are read as inert data; the work is bounded by the history's length times a
constant.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, islice, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from holdfast.agent import history
from holdfast.agent.changes import Change, mutations
from holdfast.agent.checkpoint import Checkpoint
from holdfast.codec.document import MISSING
from holdfast.codec.state import Reader
from holdfast.errors import HoldfastError, format_path
from holdfast.run.effects import Effect
from holdfast.run.host import position_of
from holdfast.run.past import ROLLED_BACK
from holdfast.travel.failure import Failure

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent

HISTORY_MAX = 2_000
"""Checkpoints that are looked at, the newest ones."""
LEAVES_MAX = 400
"""Leaves of one change that are looked at."""
VALUES_MAX = 2_000
"""Places whose values are followed at a time."""
DEPTH_MAX = 8
SERIES_MAX = 60
"""Numeric places whose relations are learned: pairs grow with the square."""
USUAL_MIN = 6
"""Times that something must have been so to be called usual."""
MOSTLY = 0.85
NOTABLE = 0.25
"""From where on a feature is more than noise."""
UNITS = (2, 3, 10, 100, 1_000, 12, 24, 60, 3_600, 1.609, 1.8, 2.205, 2.54, 3.281, -1)
"""Factors by which values are mistaken: signs, decimals, and usual units of money, time, length and weight."""
EFFECT = "()"
Path = tuple[Any, ...]
Pattern = tuple[Any, ...]


@dataclass(frozen=True)
class Move:
    """One leaf took another value between two checkpoints. ``pattern`` is its path with indexes left out."""

    at: int
    path: Path
    pattern: Pattern
    old: Any
    new: Any

    @property
    def is_call(self) -> bool:
        """Whether it is an argument or a result of a recorded call, and not in the state."""
        return bool(self.path[0] == EFFECT)


@dataclass
class Suspect:
    """A checkpoint, its features, and for each the place that it speaks of, with a sentence."""

    at: int
    features: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def add(self, name: str, value: float, path: Path, why: str) -> None:
        """Keep the strongest of each kind."""
        if value > self.features.get(name, 0.0):
            self.features[name], self.reasons[name] = min(1.0, value), (path, why)


@dataclass
class History:
    """A line of checkpoints, with the moves and the calls that led to each of them."""

    checkpoints: list[Checkpoint]
    moves: list[list[Move]]
    effects: list[list[Effect]]
    lengths: list[dict[Path, int]]
    """How much longer each list became, by its path."""
    complete: bool = True

    def values(self) -> Iterator[dict[str, Any]]:
        """What stands at each checkpoint in the places that are in no list: one dict, which goes on being changed."""
        values: dict[str, Any] = {}
        for moves in self.moves:
            for move in moves:
                if move.is_call or "*" in move.pattern:
                    continue
                place = format_path(move.path)
                if move.new is MISSING:
                    values.pop(place, None)
                elif place in values or len(values) < VALUES_MAX:
                    values[place] = move.new
                for end in range(1, len(move.path)):  # what holds it is no value of its own
                    values.pop(format_path(move.path[:end]), None)
            yield values


def read(agent: Agent, at: str | Checkpoint | None = None) -> History:
    """The history of an agent up to a checkpoint, oldest first."""
    line = agent.log(HISTORY_MAX + 1, at=at)[::-1]
    complete = len(line) <= HISTORY_MAX
    line = line[-HISTORY_MAX:]
    found = History(line, [[] for _ in line], [[] for _ in line], [{} for _ in line], complete)
    for place, changes in enumerate(_changes(agent, line)):
        lengths = found.lengths[place]
        for change in changes:
            if change.bookkeeping:
                continue
            found.moves[place] += islice(_leaves(place, change.path, change.old, change.new, 0), LEAVES_MAX)
            if change.path and type(change.path[-1]) is int and MISSING in (change.old, change.new):
                lengths[change.path[:-1]] = lengths.get(change.path[:-1], 0) + (1 if change.old is MISSING else -1)
            elif isinstance(change.old, list) and isinstance(change.new, list):
                lengths[change.path] = len(change.new) - len(change.old)
    ends = [position_of(one) for one in line]
    place = 0
    for effect in (one for one in agent.effects() if one.status != ROLLED_BACK):
        while place < len(ends) and ends[place] < effect.number:
            place += 1
        if place == len(line):
            break
        found.effects[place].append(effect)
        found.moves[place] += islice(_calls(place, effect), LEAVES_MAX)
    return found


def _changes(agent: Agent, line: Sequence[Checkpoint]) -> Iterator[Iterable[Change]]:
    """What each checkpoint changed. Of one whose parent was forgotten, or is not looked at, nobody knows."""
    now, state = agent._db.now, None
    for one in line:
        point = one._current()
        parent = now.view.point(point.row.parent) if point.row.parent else None
        if point.cut or (one is line[0] and parent is not None):
            state = None
            yield ()
            continue
        if state is None:
            state = history.state_of(now, parent)
            reader = Reader(state, agent._store._registry, inert=True)
        with history.unless_forgotten(now.view, point):
            yield list(mutations(state, reader, history.operations_of(now.view, point), one.label, one.id))


def _leaves(at: int, path: Path, old: Any, new: Any, depth: int) -> Iterator[Move]:
    """A change as changes of leaves."""
    if depth < DEPTH_MAX and (isinstance(old, dict) or isinstance(new, dict)):
        left, right = old if isinstance(old, dict) else {}, new if isinstance(new, dict) else {}
        for key in {**left, **right}:
            one, two = left.get(key, MISSING), right.get(key, MISSING)
            if one is MISSING or two is MISSING or type(one) is not type(two) or one != two:
                yield from _leaves(at, (*path, key), one, two, depth + 1)
        if isinstance(new, dict) or new is MISSING:
            return
        old = MISSING  # what stood inside is gone, and this came
    yield Move(at, path, tuple("*" if type(part) is int else part for part in path), old, new)


def leaves(path: Path, old: Any, new: Any) -> list[Move]:
    """A difference between two values as differences of leaves."""
    return list(islice(_leaves(0, path, old, new, 0), LEAVES_MAX))


def _calls(at: int, effect: Effect) -> Iterator[Move]:
    """What a recorded call was given and returned, as if it were a place of the state."""
    if effect.let_go or effect.tool.startswith("holdfast."):
        return
    head = (EFFECT, effect.tool)
    with suppress(HoldfastError):  # of a type that this program does not know
        for name, value in (("given", effect.args), ("returned", effect.result)):
            yield from _leaves(at, (*head, name), MISSING, value, 0)
    if effect.status != "done":
        yield Move(at, (*head, "status"), (*head, "status"), "done", effect.status)


# -- features --------------------------------------------------------------------------------------------------------


def suspects(past: History, failure: Failure, last: Sequence[float] = ()) -> list[Suspect]:
    """Every checkpoint but those that set the state up, with its features. ``last``: numbers that were seen last."""
    found = [Suspect(at) for at in range(len(past.checkpoints))]
    by_pattern: dict[Pattern, list[Move]] = defaultdict(list)
    for moves in past.moves:
        for move in moves:
            by_pattern[move.pattern].append(move)
    begun = _begun(past)
    _odd_values(found, by_pattern, failure)
    _rare(found, by_pattern, failure)
    _company(found, past, by_pattern, failure)
    _due(found, past, by_pattern, failure)
    _relations(found, past, by_pattern, failure)
    _gap(found, past, failure, last)
    for one in found:
        most = max(one.features, key=lambda name: one.features[name], default="")
        if most and one.features[most] >= NOTABLE:
            one.add("notable", 1.0, *one.reasons[most])
    _final(found, by_pattern, failure)
    return found[begun:]


def _begun(past: History) -> int:
    """How many checkpoints at the beginning only set the state up."""
    for at, moves in enumerate(past.moves):
        if any(move.old is not MISSING for move in moves if not move.is_call) or at > 3:
            return at
    return 0


def _weight(failure: Failure, move: Move) -> float:
    """How much a move has to do with the failure: of a call, by its tool."""
    return failure.weight((move.path[1],)) if move.is_call else failure.weight(move.path)


def _shown(value: Any) -> str:
    text = "nothing" if value is MISSING else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def where(path: Path) -> str:
    """A place of the state, or of a call, as text."""
    return f"{path[1]}{EFFECT}{format_path(path[2:])[len('state') :]}" if path[0] == EFFECT else format_path(path)


_TAIL = re.compile(r"^(\D*?)(\d{1,12})$")


def _numbers(values: Sequence[Any]) -> list[float | None]:
    """Values as numbers, where they are; names that end in a number (``item-7``) as that number, if most do."""
    plain = [float(value) if type(value) in {int, float} and abs(value) < 1e15 else None for value in values]
    if any(number is not None for number in plain):
        return plain
    ends = [_TAIL.match(value) if type(value) is str and len(value) < 80 else None for value in values]
    if sum(end is not None for end in ends) < MOSTLY * len(values) or len({end[1] for end in ends if end}) > 1:
        return plain
    return [float(end[2]) if end is not None else None for end in ends]


def _is_sum(numbers: Sequence[float]) -> bool:
    """Whether a series keeps growing or falling: then its steps are what can be compared."""
    ups = sum(b > a for a, b in pairwise(numbers))
    downs = sum(b < a for a, b in pairwise(numbers))
    return len(numbers) > USUAL_MIN and max(ups, downs) >= MOSTLY * (len(numbers) - 1)


def _oddness(numbers: Sequence[float]) -> list[float]:
    """How far each lies from the others, from 0 to 1: in robust deviations, on a scale where factors count alike."""
    if len(numbers) < USUAL_MIN:
        return [0.0] * len(numbers)
    common, times = Counter(numbers).most_common(1)[0]
    if times >= MOSTLY * len(numbers):  # nearly always the same
        return [float(number != common) for number in numbers]
    if sum(number < 0 for number in numbers) > len(numbers) / 2:
        numbers = [-number for number in numbers]
    if sum(number > 0 for number in numbers) >= 0.9 * len(numbers):
        floor = min(number for number in numbers if number > 0)
        scaled = [math.log(number) if number > 0 else math.log(floor) - 5.0 for number in numbers]
    else:
        scaled = list(numbers)
    middle = median(scaled)
    spread = 1.4826 * median(abs(one - middle) for one in scaled)
    if spread <= 1e-12:
        return [float(abs(one - middle) > 1e-9) for one in scaled]
    return [max(0.0, min(1.0, (abs(one - middle) / spread - 2.0) / 6.0)) for one in scaled]


def _odd_values(found: list[Suspect], by_pattern: Mapping[Pattern, list[Move]], failure: Failure) -> None:
    """Values, or steps of sums, that are unlike the others of their place; types that are; and ways back."""
    for moves in by_pattern.values():
        usual = Counter(type(move.new) for move in moves).most_common(1)[0]
        if len(moves) < USUAL_MIN:
            continue
        numbers = _numbers([move.new for move in moves])
        numeric = [(move, number) for move, number in zip(moves, numbers, strict=True) if number is not None]
        summed = _is_sum([number for _, number in numeric])
        steps = [b - a for (_, a), (_, b) in pairwise(numeric)] if summed else [number for _, number in numeric]
        judged = [move for move, _ in numeric][1 if summed else 0 :]
        usual_step, before = median(steps) if steps else 0.0, 0.0
        for move, step, odd in zip(judged, steps, _oddness(steps), strict=True):
            back = summed and abs(before + step - usual_step) < 1e-9  # it only makes good what the one before did
            before = step - usual_step if odd else 0.0
            if odd and not back:
                what = f"a step of {step:g}" if summed else _shown(move.new)
                kind = "odd result" if move.is_call else "odd value"
                found[move.at].add(kind, odd * _weight(failure, move), move.path, f"{what} is unlike the others there")
        for move in moves:
            if type(move.new) is not usual[0] and usual[1] >= MOSTLY * len(moves) and move.new is not MISSING:
                if {type(move.new), usual[0]} == {int, float}:
                    continue
                why = f"{_shown(move.new)} is a {type(move.new).__name__}, the others are {usual[0].__name__}"
                found[move.at].add("odd type", 0.2 + 0.8 * _weight(failure, move), move.path, why)
        if summed and moves[0].path[-1] != "*":
            _ways_back(found, numeric, failure)


def _ways_back(found: list[Suspect], numeric: Sequence[tuple[Move, float]], failure: Failure) -> None:
    """A sum that takes a value which it had before."""
    seen: dict[float, int] = {}
    for place, (move, number) in enumerate(numeric):
        before = seen.get(number)
        if before is not None and place - before > 1 and not move.is_call:
            why = f"it goes back to {number:g}, which it was {place - before} changes before"
            found[move.at].add("went back", 0.3 + 0.7 * _weight(failure, move), move.path, why)
        seen[number] = place


def _rare(found: list[Suspect], by_pattern: Mapping[Pattern, list[Move]], failure: Failure) -> None:
    """Places that hardly ever change, and things that are taken away where things are only added.

    A counter that goes on, and a place that takes over what a call returned, do what they are for.
    """
    returned: dict[int, list[Any]] = defaultdict(list)
    for pattern, moves in by_pattern.items():
        if pattern[0] == EFFECT:
            for move in moves:
                returned[move.at].append(move.new)
    for pattern, moves in by_pattern.items():
        if pattern[0] == EFFECT:
            continue
        later = [move for move in moves if move.old is not MISSING]
        for move in later:
            weight = _weight(failure, move)
            if move.new is MISSING:
                lost = len({other.at for other in moves if other.new is MISSING})
                why = f"{_shown(move.old)} was taken away"
                found[move.at].add("taken away", weight / lost, move.path, why)
            elif len(later) <= 3 and type(move.path[-1]) is not int:
                shrank = isinstance(move.old, list) and isinstance(move.new, list) and len(move.new) < len(move.old)
                why = f"it hardly ever changes, and became {_shown(move.new)}"
                usual = move.new in returned[move.at] if _telling(move.new) else counts(move)
                found[move.at].add("rare change", weight / len(later) * (0.3 if usual else 1.0), move.path, why)
                if shrank:
                    why = f"{len(move.old) - len(move.new)} of {len(move.old)} items are gone"
                    found[move.at].add("taken away", weight, move.path, why)


def _company(found: list[Suspect], past: History, by_pattern: Mapping[Pattern, list[Move]], failure: Failure) -> None:
    """Changes without the call that otherwise always comes with them, and values that stood elsewhere a moment ago."""
    tools = [{effect.tool for effect in effects} for effects in past.effects]
    for pattern, all_moves in by_pattern.items():
        moves = [move for move in all_moves if move.old is not MISSING]
        if pattern[0] == EFFECT:
            continue
        group = pattern[:-1] if len(pattern) > 1 else pattern
        wider = [move for other, some in by_pattern.items() if other[: len(group)] == group for move in some]
        wider = [move for move in wider if move.old is not MISSING]
        steps = {move.at for move in wider}
        if len(steps) < 3:
            continue
        counts = Counter(tool for at in steps for tool in tools[at])
        for tool, times in counts.items():
            everywhere = sum(tool in some for some in tools)
            if MOSTLY * len(steps) <= times < len(steps) and everywhere < 0.5 * len(tools):
                for move in moves:
                    if tool not in tools[move.at]:
                        why = f"it changes with {tool}{EFFECT}, which was not called"
                        found[move.at].add("odd company", 0.1 + 0.9 * _weight(failure, move), move.path, why)
    for moves in past.moves:
        state = [move for move in moves if not move.is_call and _telling(move.old) and _telling(move.new)]
        for one, two in combinations(state[:40], 2):
            if one.new == two.old and two.new == one.old and one.new != two.new:
                why = f"it and {format_path(two.path)} changed places"
                weight = max(_weight(failure, one), _weight(failure, two))
                found[one.at].add("swapped", 0.2 + 0.8 * weight, one.path, why)


def counts(move: Move) -> bool:
    """Whether it is a counter that goes on."""
    return type(move.old) is int and type(move.new) is int and move.new == move.old + 1


def _telling(value: Any) -> bool:
    return (
        (type(value) is float and value != 0)
        or (type(value) is int and abs(value) > 3)
        or (type(value) is str and len(value) > 3)
    )


def _due(found: list[Suspect], past: History, by_pattern: Mapping[Pattern, list[Move]], failure: Failure) -> None:
    """What comes at regular intervals, and did not come once."""
    steps_of: dict[str, list[int]] = defaultdict(list)
    for at, effects in enumerate(past.effects):
        for tool in {effect.tool for effect in effects}:
            steps_of[tool].append(at)
    for tool, steps in steps_of.items():
        gaps = [b - a for a, b in pairwise(steps)]
        if len(gaps) < 3:
            continue
        common, times = Counter(gaps).most_common(1)[0]
        if times < 0.6 * len(gaps) or common < 2:
            continue
        at_steps, elsewhere = set(steps), set(range(len(past.checkpoints))) - set(steps)
        usual = Counter(
            pattern[:1]
            for pattern, moves in by_pattern.items()
            if pattern[0] != EFFECT and moves
            for move in moves
            if move.at in at_steps
        )
        apart = Counter(move.pattern[:1] for at in elsewhere for move in past.moves[at] if not move.is_call)
        places = sorted(usual, key=lambda place: apart[place] / usual[place])
        place = places[0] if places else ()
        for before, after in pairwise(steps):
            if after - before > common and (after - before) % common == 0:
                for missed in range(before + common, after, common):
                    weight = max(failure.weight(place), failure.weight((tool,)))
                    why = f"{tool}{EFFECT} comes every {common} checkpoints, and was not called here"
                    found[missed].add("not done", 0.3 + 0.7 * weight, place, why)


def _relations(found: list[Suspect], past: History, by_pattern: Mapping[Pattern, list[Move]], failure: Failure) -> None:
    """Places that move together, and once did not: sums with each other, with what is in them, with what calls return.

    Learned from the steps of sums (a sum of several places and the length of a list are sums, too), each compared with
    the steps and the values of all others: where one is a constant multiple of the other nearly always, that is usual.
    """
    steps: dict[Path, dict[int, float]] = {}
    values: dict[Path, dict[int, float]] = {}
    for pattern, moves in by_pattern.items():
        once = len({move.at for move in moves}) == len(moves)
        for move in moves:
            if type(move.new) not in {int, float}:
                continue
            if once and len(moves) >= USUAL_MIN and (move.is_call or "*" in pattern):
                values.setdefault(pattern, {})[move.at] = float(move.new)
            if not move.is_call and "*" not in pattern and type(move.old) in {int, float}:
                steps.setdefault(move.path, {})[move.at] = float(move.new) - float(move.old)
    for at, lengths in enumerate(past.lengths):
        for path, grown in lengths.items():
            steps.setdefault((*path, "len"), {})[at] = float(grown)
    members: dict[Path, set[Path]] = defaultdict(set)
    for path in list(steps):
        if len(path) > 1 and path[-1] != "len":
            for wild in ((*path[:-2], "*", path[-1]), (*path[:-1], "*")):
                members[wild].add(path)
    for wild, paths in members.items():
        if len(paths) > 1:
            into = steps.setdefault(wild, {})
            for path in paths:
                for at, step in steps[path].items():
                    into[at] = into.get(at, 0.0) + step
    chosen = sorted((path for path in steps if len(steps[path]) >= USUAL_MIN), key=lambda path: -len(steps[path]))
    chosen = chosen[:SERIES_MAX]
    for one, two in combinations(chosen, 2):
        if one not in members.get(two, ()) and two not in members.get(one, ()):
            _relation(found, one, two, steps[one], steps[two], failure)
    for one in chosen:
        for two in list(values)[:SERIES_MAX]:
            _relation(found, one, two, steps[one], values[two], failure, part=True)


def _relation(
    found: list[Suspect], one: Path, two: Path, left: dict[int, float], right: dict[int, float], failure: Failure,
    *, part: bool = False,
) -> None:  # fmt: skip
    """One pair. ``part``: where only the second moves, that says nothing: not all that is returned is added up."""
    weight = max(failure.weight(one), 0.0 if part else failure.weight(two))
    moving = sorted(left) if part else sorted({*left, *right})
    ratios = [left[at] / right[at] for at in moving if at in left and right.get(at)]
    if len(ratios) < USUAL_MIN or not weight:
        return
    ratio = _common(ratios[: max(USUAL_MIN, len(ratios) // 2)])
    if ratio is None:
        return
    fits = [_same(left.get(at, 0.0), ratio * right.get(at, 0.0)) for at in moving]
    broken = [at for at, fit in zip(moving, fits, strict=True) if not fit]
    if not broken or len(moving) - len(broken) < USUAL_MIN:
        return
    path = one if part or failure.weight(one) >= failure.weight(two) else two
    state = tuple(piece for piece in path if piece not in {"*", "len"}) or path
    first = moving.index(broken[0])
    later = [left[at] / right[at] for at in moving[first:] if at in left and right.get(at)]
    if len(broken) <= max(2, 0.1 * len(moving)):
        strength = (1.0 - len(broken) / len(moving)) / len(broken)
        why = f"{_related(one)} and {_related(two)} moved together, and not here"
        for at in broken:
            found[at].add("relation", strength * (0.3 + 0.7 * weight), state, why)
    elif all(fits[:first]) and first >= USUAL_MIN and len(later) >= 3 and _common(later) is not None:
        why = f"{_related(one)} and {_related(two)} moved together until here, and since then in another way"
        found[broken[0]].add("relation since", 0.3 + 0.7 * weight, state, why)
        if broken[0] > 0:
            found[broken[0] - 1].add("relation after", 0.3 + 0.7 * weight, state, f"after it, {why}")


def _same(one: float, two: float) -> bool:
    return abs(one - two) <= 0.0101 + 1e-3 * max(abs(one), abs(two))


def _common(ratios: Sequence[float]) -> float | None:
    """What nearly all of them are; None if they differ."""
    middle = median(ratios)
    near = sum(abs(one - middle) <= 0.003 * abs(middle) for one in ratios)
    return middle if middle and near >= MOSTLY * len(ratios) else None


def _related(path: Path) -> str:
    if path[-1] == "len":
        return f"the length of {format_path(path[:-1])}"
    if path[0] == EFFECT:
        return where(path)
    text = format_path(path).replace("['*']", ".*")
    return f"the sum of {text}" if "*" in path else text


def _gap(found: list[Suspect], past: History, failure: Failure, last: Sequence[float]) -> None:
    """The amount by which a figure is wrong, where the failing frame shows both, as the amount of a change."""
    moves = [
        move for some in past.moves for move in some if not move.is_call and type(move.new) in {int, float} and move.new
    ]
    have = {float(move.new) for move in moves}
    shown = list(dict.fromkeys([*failure.numbers, *last]))[:24]
    ours, theirs = [n for n in shown if n in have], [n for n in shown if n not in have]
    gaps = {abs(a - b) for a in ours for b in theirs if 1e-9 < abs(a - b) < 0.9 * max(abs(a), abs(b))}
    most = max((_weight(failure, move) for move in moves), default=0.0)
    if not gaps or len(gaps) > 12 or not most:
        return
    fits: dict[str, dict[int, tuple[Path, str]]] = {"gap fits": {}, "factor fits": {}, "gap before": {}}
    pending: dict[Pattern, str] = {}
    for move in moves:
        if _weight(failure, move) < 0.9 * most:
            continue
        if move.pattern in pending:
            fits["gap before"].setdefault(move.at, (move.path, pending.pop(move.pattern)))
        old = float(move.old) if type(move.old) in {int, float} else 0.0
        for gap in gaps:
            fit = _fit(gap, abs(float(move.new) - old))
            if fit == 1:
                fits["gap fits"].setdefault(move.at, (move.path, f"the figures differ by {gap:g}, which is its amount"))
                pending[move.pattern] = f"the figures differ by {gap:g}, which the change before it had added"
            elif fit is not None:
                why = f"the figures differ by {gap:g}, as if its amount were mistaken by a factor of {fit:g}"
                fits["factor fits"].setdefault(move.at, (move.path, why))
    for kind, places in fits.items():
        for at, (path, why) in places.items():
            found[at].add(kind, 1 / len(places), path, why)


def _fit(gap: float, amount: float) -> float | None:
    """1 where a gap is an amount; the factor by which the amount must be mistaken to make it; None if nothing fits."""
    for factor in (1, *UNITS):
        # A value that is so many times too large, or too small, is off by these parts of itself.
        for share in (1.0,) if factor == 1 else (abs(1 - 1 / factor), abs(factor - 1)):
            if amount and abs(gap - amount * share) <= max(0.0075 * max(1.0, share), 2e-4 * gap) and gap > 0.02:
                return float(factor)
    return None


def _final(found: list[Suspect], by_pattern: Mapping[Pattern, list[Move]], failure: Failure) -> None:
    """The last change of each place that has to do with the failure."""
    for moves in by_pattern.values():
        move = moves[-1]
        if not move.is_call and (weight := _weight(failure, move)):
            found[move.at].add("last change", weight / len(moves) ** 0.5, move.path, "its last change")
