"""Explain: what broke an agent, as a ranked list of claims, each with its evidence and how sure it is.

Owns the ranking and the report. Takes what failed from ``failure``, what speaks for each checkpoint from ``suspects``,
what was checked from ``bisect``, and drift from ``detector``. Must not know terminals, nor models: a hook may write the
prose. What always holds: every claim names its evidence; confidences are those of a model that was fitted on cases with
a proven truth, other ones than it is judged by (``benchmarks/diagnosis.py``), and "not found" is one of its answers;
explaining changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from holdfast.agent.checkpoint import Checkpoint
from holdfast.errors import BadOption, HoldfastError, format_path
from holdfast.travel import bisect, detector, suspects
from holdfast.travel.causes import Cause, cause_of
from holdfast.travel.failure import Failure, of_dump

if TYPE_CHECKING:
    from holdfast.crash.dump import Dump
    from holdfast.travel.handle import Agent, Store

WEIGHTS: dict[str, float] = {
    "checked": 3.08,
    "drift": 0.64,
    "factor fits": 2.28,
    "gap before": 3.65,
    "gap fits": 2.62,
    "last change": 0.16,
    "not done": 3.0,
    "notable": 3.83,
    "odd company": 3.0,
    "odd result": 4.75,
    "odd type": 3.0,
    "odd value": 1.96,
    "rare change": 3.9,
    "relation": 2.88,
    "relation after": 1.23,
    "relation since": 0.96,
    "swapped": 3.0,
    "taken away": 4.66,
    "went back": 3.0,
}
"""What a full feature adds to a checkpoint's score. ``benchmarks/diagnosis.py --fit`` fits them on the tuned half."""
NOT_FOUND: dict[str, float] = {"always": 3.23, "environment": 1.51, "sound": 3.46}
"""The score of "not found": always, where the surroundings ended it, and where nothing failed at all."""
CLAIMS = 5
SEEN_LAST = 4
"""Results of calls before the failure that may be one of two figures which do not agree."""
VALUES = 6
"""Local names of the failing frame that are shown, those of the failing line first."""
LEAST = 0.02
"""Claims that are less sure are not made."""
SHARED = 0.3
"""A claim is about the place of its strongest evidence in the state that has this share of the strongest at all."""
_ANSWERS = ("first bad", "last good")  # of a bisection: all others qualify these
DRIFT_NEAR = 2
"""Checkpoints by which the beginning of a drift may be missed."""


@dataclass(frozen=True)
class Claim:
    """It may have begun at ``checkpoint``, with what happened to ``path``. ``evidence``: why, the strongest first."""

    checkpoint: Checkpoint
    path: tuple[Any, ...]
    confidence: float
    evidence: tuple[str, ...]
    cause: Cause

    @property
    def where(self) -> str:
        """The path as text."""
        return format_path(self.path)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        one = self.checkpoint
        return {
            "checkpoint": one.id,
            "depth": one.depth,
            "label": one.label,
            "where": self.where,
            "confidence": round(self.confidence, 3),
            "evidence": list(self.evidence),
            "cause": self.cause.to_json(),
        }


@dataclass
class Report:
    """What explain found. ``claims`` are ranked; without any that is surer than ``not_found``, it was not found.

    ``facts`` are what is so, whatever it means: where it failed, what was violated first, what drifts, what is in
    doubt. ``prose`` is what a model made of it, if one was asked.
    """

    agent: str
    failure: Failure
    claims: list[Claim] = field(default_factory=list)
    not_found: float = 1.0
    facts: list[tuple[str, str]] = field(default_factory=list)
    checkpoints: int = 0
    prose: str = ""

    @property
    def found(self) -> Claim | None:
        """The best claim; None where "not found" is likelier."""
        return self.claims[0] if self.claims and self.claims[0].confidence > self.not_found else None

    def __bool__(self) -> bool:
        return self.found is not None

    def lines(self) -> Iterator[str]:
        """For people."""
        if self.failure.error:
            yield self.failure.error
        best = self.found
        if best is None:
            yield f"The origin was not found ({self.not_found:.0%} sure that none of the changes is it)."
        for number, claim in enumerate(self.claims, 1):
            one = claim.checkpoint
            yield f"{number}. {claim.confidence:.0%}  #{one.depth} {one.label or one.short_id}: {claim.where}"
            for text in claim.evidence:
                yield f"     {text}"
            for text in claim.cause.lines():
                yield f"     {text}"
        for name, text in self.facts:
            yield f"{name}: {text}"

    def __str__(self) -> str:
        return self.prose or "\n".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "agent": self.agent,
            "found": self.found is not None,
            "not_found": round(self.not_found, 3),
            "error": self.failure.error,
            "place": self.failure.place,
            "source": self.failure.source,
            "claims": [claim.to_json() for claim in self.claims],
            "facts": [{"name": name, "text": text} for name, text in self.facts],
            "checkpoints": self.checkpoints,
            "prose": self.prose or None,
        }


Write = Callable[[dict[str, Any]], str]
"""Makes prose of a report, as JSON has it."""


def explain(
    store: Store,
    what: str | FilePath | Dump,
    *,
    agent: str | None = None,
    branch: str = "main",
    check: Any = None,
    invariants: Sequence[str] = (),
    write: Write | None = None,
) -> Report:
    """What broke the agent of a dump, or an agent by its name."""
    failure, name, branch, at = _asked(store, what, agent, branch)
    with store.agent(name, branch=branch, readonly=True) as handle:
        case = prepared(handle, failure, check=check, invariants=invariants, at=at)
        report = ranked(handle, case)
    if write is not None:
        report.prose = str(write(report.to_json()))
    return report


def _asked(
    store: Store, what: str | FilePath | Dump, agent: str | None, branch: str
) -> tuple[Failure, str, str, str | None]:
    """The failure, whose it is, and the checkpoint that it stood on."""
    from holdfast.crash import open_dump
    from holdfast.crash.agents import choose
    from holdfast.crash.dump import Dump

    if isinstance(what, Dump):
        found = choose(what, agent)
        stood = found.stands_on.checkpoint or found.checkpoint
        return of_dump(what), found.name, found.branch or branch, f"id:{stood}" if stood else None
    if isinstance(what, FilePath) or what.endswith(".hfdump"):
        with open_dump(what) as dump:
            return _asked(store, dump, agent, branch)
    left = _left(store, what, branch)
    if left is not None:
        with suppress(HoldfastError):  # a dump that cannot be read is as good as none: nobody asked for it
            return _asked(store, left, what, branch)
    return Failure(), what, branch, None


def _left(store: Store, name: str, branch: str) -> FilePath | None:
    """The dump of the crash that the agent has not gone on from, if it is still there."""
    from holdfast.crash import folder_of

    with store.agent(name, branch=branch, create=False, readonly=True) as handle:
        last = next((one for one in handle.crashes() if one.get("branch") == branch and one.get("dump")), None)
        head = handle.head
    if last is None or head is None or last.get("checkpoint") != head.id:
        return None
    file = folder_of(store.place) / FilePath(str(last["dump"])).name
    return file if file.is_file() else None


@dataclass
class Case:
    """All that a ranking needs."""

    failure: Failure
    past: suspects.History
    suspects: list[suspects.Suspect]
    facts: list[tuple[str, str]]
    sound: bool
    broken: bool = False  # a check that was given, or an invariant, does not hold somewhere


def prepared(
    agent: Agent, failure: Failure, *, check: Any = None, invariants: Sequence[str] = (), at: str | None = None
) -> Case:
    """Read the history, and collect what speaks for each of its checkpoints."""
    if at is not None:
        try:
            agent.at(at)
        except HoldfastError as error:
            raise BadOption(
                "the checkpoint that the dump's agent stood on is not in this store",
                hint="Open the store that the program used: --store, or $HOLDFAST_STORE.",
            ) from error
    past = suspects.read(agent, at)
    facts: list[tuple[str, str]] = []
    failed = next((one for one in reversed(agent.runs()) if one.status == "failed"), None)
    if not failure.error and failed is not None:
        failure.error = failed.error
    if failure.place:
        facts.append(("failed at", f"{failure.place}: {failure.source}"))
        named = sorted(failure.values, key=lambda pair: pair[0] not in failure.source)
        facts += [("value", f"{name} = {value}") for name, value in named[:VALUES] if not value.startswith("<")]
    effects = [effect for effects in past.effects for effect in effects]
    last: list[float] = []
    for effect in agent.effects()[-SEEN_LAST:]:
        with suppress(HoldfastError):  # let go, or of a type that this program does not know
            last += [float(effect.result)] if type(effect.result) in {int, float} else []
    found = suspects.suspects(past, failure, last)
    facts += _last_change(past, failure)
    facts += [("unusual", text) for text in failure.unusual]
    broken = _checked(agent, past, found, facts, failure, check, invariants)
    _drifted(past, found, facts, failure)
    facts += [("in doubt", f"{one.tool} (effect {one.id})") for one in effects if one.status == "in doubt"]
    grown = detector.trend([float(one.size_bytes) for one in past.checkpoints[-200:]])
    if grown is not None and grown.per_step > 0:
        facts.append(("resource", f"each checkpoint writes more: {grown.first:,.0f} to {grown.last:,.0f} bytes"))
    return Case(failure, past, found, facts, sound=not failure.error and not broken, broken=broken)


def _last_change(past: suspects.History, failure: Failure) -> list[tuple[str, str]]:
    """Where the value of the failing line was last changed."""
    moves = [move for some in past.moves for move in some if not move.is_call and failure.weight(move.path) > 0]
    if not failure.known or not moves:
        return []
    shown = [move for move in moves if type(move.new) in {int, float} and move.new in failure.numbers]
    last = max(shown or moves, key=lambda move: (failure.weight(move.path), move.at))
    one = past.checkpoints[last.at]
    return [("last changed", f"{format_path(last.path)} at #{one.depth} {one.label or one.short_id}")]


def _checked(
    agent: Agent,
    past: suspects.History,
    found: list[suspects.Suspect],
    facts: list[tuple[str, str]],
    failure: Failure,
    check: Any,
    invariants: Sequence[str],
) -> bool:
    """The first checkpoint that breaks the check or an invariant, or was marked for it; whether there is any."""
    places = {past.checkpoints[one.at].id: one for one in found}
    marks = agent._db.view.validities(agent._row.a)
    marked = next((one for one in past.checkpoints if marks.get(one._point.n, {}).get("validity") == "suspect"), None)
    if marked is not None:
        why = str(marks[marked._point.n].get("reason", ""))
        facts.append(("violated", f"#{marked.depth} {marked.label or marked.short_id} is suspect: {why}"))
        if marked.id in places:
            path = _telling(past.moves[places[marked.id].at], failure)
            places[marked.id].add("checked", 1.0, path, f"it is suspect: {why}")
    for asked, name in ((check, "bisect"), *((text, "violated") for text in invariants)) if past.checkpoints else ():
        if asked is None:
            continue
        try:
            rule = bisect.Rule(asked) if name == "violated" else asked
            answer = agent.bisect(rule, bad=past.checkpoints[-1], minimise=False)
        except HoldfastError as error:
            facts.append(("unchecked", f"{asked if isinstance(asked, str) else 'the check'}: {error.message}"))
            continue
        first, told = answer.checkpoint, [bisect.said(one) for one in answer.answer()]
        if first is None:
            if not answer.exact or answer.nowhere:
                facts.append(("unchecked", f"{answer.check}: {'; '.join(one['text'] for one in told)}"))
            continue
        doubts = "".join(f", {one['name']} {one['text']}" for one in told if one["name"] not in _ANSWERS)
        since = "violated since" if answer.earlier else "first violated at"
        where = f"#{first.depth} {first.label or first.short_id}"
        facts.append((name, f"{answer.check} is {since} {where}{doubts}"))
        suspect = places.get(first.id)
        if suspect is not None:
            named = [move for move in past.moves[suspect.at] if str(move.path[0]) in answer.check]
            path = _telling(named, failure) or _telling(past.moves[suspect.at], failure)
            suspect.add("checked", 1.0, path, f"{answer.check} is {since.removesuffix(' at')} here")
    return any(name in {"bisect", "violated"} for name, _ in facts)


def _drifted(
    past: suspects.History, found: list[suspects.Suspect], facts: list[tuple[str, str]], failure: Failure
) -> None:
    """Places of the state whose values changed for good."""
    paths = {format_path(move.path): move.path for moves in past.moves for move in moves if not move.is_call}
    places = {one.at: one for one in found}
    for alarm in detector.follow(past.values()):
        path = paths[alarm.place]
        facts.append(("drift", str(alarm)))
        for at in range(alarm.since - DRIFT_NEAR, alarm.since + 1):
            if at in places:
                places[at].add("drift", 0.2 + 0.8 * failure.weight(path), path, f"it drifts since about here ({alarm})")


def ranked(agent: Agent, case: Case) -> Report:
    """The report: a softmax over all checkpoints and "not found"."""
    scores = [
        math.fsum(WEIGHTS.get(name, 0.0) * value for name, value in one.features.items()) for one in case.suspects
    ]
    absent = NOT_FOUND["always"] + case.failure.environment * NOT_FOUND["environment"] + case.sound * NOT_FOUND["sound"]
    if case.broken and not case.failure.error:
        absent = 0.0  # that it does not hold is all that failed, and somewhere it began
    top = max([absent, *scores])
    parts = [math.exp(score - top) for score in scores]
    total = math.fsum(parts) + math.exp(absent - top)
    report = Report(agent.name, case.failure, not_found=math.exp(absent - top) / total, facts=case.facts)
    report.checkpoints = len(case.past.checkpoints)
    order = sorted(range(len(parts)), key=lambda place: (-parts[place], case.suspects[place].at))
    for place in order[:CLAIMS]:
        suspect, confidence = case.suspects[place], parts[place] / total
        if confidence < LEAST or not suspect.reasons:
            break
        report.claims.append(_claim(agent, case, suspect, confidence))
    return report


def _claim(agent: Agent, case: Case, suspect: suspects.Suspect, confidence: float) -> Claim:
    line = case.past.checkpoints
    made = line[suspect.at]
    before = line[suspect.at - 1] if suspect.at else None
    names = sorted(suspect.features, key=lambda name: -WEIGHTS.get(name, 0.0) * suspect.features[name])
    telling = [name for name in names if WEIGHTS.get(name, 0.0) > 0.1] or names[:1]
    reasons = [suspect.reasons[name] for name in telling]
    evidence = tuple(dict.fromkeys(f"{suspects.where(path)}: {why}" for path, why in reasons if path))
    cause = Cause("")
    with suppress(HoldfastError):
        cause = cause_of(agent, made, before)
    return Claim(made, _place(case, suspect, telling), confidence, evidence, cause)


def _place(case: Case, suspect: suspects.Suspect, names: Sequence[str]) -> tuple[Any, ...]:
    """The place of the state that a claim is about: of a call, what changed with it and matters most."""
    strengths = {name: WEIGHTS.get(name, 0.0) * suspect.features[name] for name in names}
    for name in names:
        path = suspect.reasons[name][0]
        if path and path[0] != suspects.EFFECT and strengths[name] >= SHARED * strengths[names[0]]:
            return path
    return _telling(case.past.moves[suspect.at], case.failure)


def _telling(moves: Sequence[suspects.Move], failure: Failure) -> tuple[Any, ...]:
    """The place of the state that has most to do with the failure; empty where none changed."""
    places = [move for move in moves if not move.is_call]
    # A counter says that something happened, not what.
    best = max(places, key=lambda move: (failure.weight(move.path), not suspects.counts(move)), default=None)
    return best.path if best is not None else ()
