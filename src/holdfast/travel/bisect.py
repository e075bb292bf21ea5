"""Bisect: which checkpoint of a history was the first bad one, what it changed, and what led to it.

Owns the search along one line of ancestors, the verdicts and their file, and the smallest part of a change that still
makes a state bad. Must not know how a check comes to its verdict. What always holds: both ends are checked; only a
check's own word makes a checkpoint bad, never an exception or damage, which are listed; in a history that is good up to
some checkpoint and bad from there on, the answer is exact after at most ceil(log2 N) + 2 checks of N checkpoints. A
state that never existed is called so.
"""

from __future__ import annotations

import builtins
import dis
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from holdfast.agent import history
from holdfast.agent.changes import Change, Diff, diff, mutations
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.graph import Graph
from holdfast.codec.document import Document
from holdfast.codec.operations import Operation
from holdfast.codec.values import encode
from holdfast.errors import BadOption, BisectFailed, Damaged, Forgotten, HoldfastError, format_path
from holdfast.text import count
from holdfast.travel.causes import Cause, cause_of
from holdfast.travel.expressions import MISSING, Expression, Look
from holdfast.travel.invariants import reason_of
from holdfast.travel.journal import VERDICTS, Journal

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent
    from holdfast.travel.whatif import Program

Verdict = Literal["good", "bad", "skip"]
SCAN_MAX = 1_000
"""Checkpoints of a history that an expression is asked about one by one, to see whether it was bad more than once."""
TRIES_MAX = 200
"""States that are made up to find the smallest change."""
REPEATS_MAX = 1_000
_SHOWN = 8  # changes and skipped checkpoints that a person reads
_WHY = 200  # characters of why a verdict is not known
_ALL = "--all looks at every one"
_TEXTS = ("id", "checkpoint", "verdict")
# What answers the same whenever it is asked: modules of Python, and which of its own functions do not.
_STEADY = frozenset({
    "base64", "bisect", "cmath", "collections", "copy", "dataclasses", "decimal", "difflib", "enum", "fractions",
    "functools", "hashlib", "heapq", "itertools", "json", "math", "numbers", "operator", "re", "statistics", "string",
    "struct", "textwrap", "types", "typing", "unicodedata", "zlib",
})  # fmt: skip
_UNSTEADY = frozenset({"__import__", "eval", "exec", "globals", "hash", "id", "input", "locals", "open", "vars"})


class Abort(Exception):
    """A check wants the whole search to end."""


# -- checks ------------------------------------------------------------------------------------------------------------


class Check(ABC):
    """Judges a state. ``identity`` tells checks apart in the file of verdicts; empty: nothing is remembered."""

    name = ""
    identity = ""

    @abstractmethod
    def judge(self, state: Document, checkpoint: Checkpoint | None) -> tuple[Verdict, str]:
        """The verdict, and why if it is ``skip``. Without a checkpoint it is a state that never existed."""

    def sees(self, checkpoint: Checkpoint) -> object:
        """What it sees of a checkpoint: where that is the same, so is the verdict."""
        return checkpoint.id


class Asked(Check):
    """An expression: true is good, or, for ``when``, bad."""

    def __init__(self, text: str, *, bad: bool) -> None:
        self.expression, self._bad = Expression(text), bad
        self.name = f"when {text}" if bad else text
        self.identity = f"{'when' if bad else 'check'} {self.expression.text}"

    def judge(self, state: Document, checkpoint: Checkpoint | None) -> tuple[Verdict, str]:  # noqa: ARG002
        with state.lock:
            return ("good" if self.expression.holds(Look.of(state)) is not self._bad else "bad"), ""

    def sees(self, checkpoint: Checkpoint) -> object:
        sections = checkpoint.sections
        if any(not path for path in self.expression.paths):
            return tuple(sections.items())
        return tuple(sections.get(str(path[0])) for path in sorted(self.expression.paths, key=repr))


class Rule(Asked):
    """An expression that is an invariant, which a place that is not there does not break."""

    def __init__(self, text: str) -> None:
        super().__init__(text, bad=False)
        self.identity = f"rule {self.expression.text}"

    def judge(self, state: Document, checkpoint: Checkpoint | None) -> tuple[Verdict, str]:  # noqa: ARG002
        with state.lock:
            return ("bad" if self.expression.broken(Look.of(state)) else "good"), ""


class Called(Check):
    """A function of the program's: true is good, false is bad."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', repr(function))}"
        self.identity = _identity(function, self.name)

    def judge(self, state: Document, checkpoint: Checkpoint | None) -> tuple[Verdict, str]:  # noqa: ARG002
        try:
            answer = self._function(state)
        except SystemExit as error:  # how it would have ended a program says nothing of the state
            return "skip", reason_of(error)
        if answer is None:
            return "skip", "it returned None, which is neither good nor bad"
        return ("good" if answer else "bad"), ""

    def sees(self, checkpoint: Checkpoint) -> object:
        return checkpoint.digest


def check_of(check: Any, when: str | None) -> Check:
    """What a user gives as a check."""
    if (check is None) == (when is None):
        raise BadOption("a bisection needs a check", hint='bisect(when="budget < 0"), or bisect(lambda state: ...).')
    if when is not None:
        return Asked(when, bad=True)
    if isinstance(check, Check):
        return check
    if isinstance(check, str):
        return Asked(check, bad=False)
    if not callable(check):
        raise BadOption(f"a check of type {type(check).__name__}", hint="Give an expression or a function.")
    return Called(check)


def _identity(function: Any, name: str) -> str:
    """A digest of all that a function's answer depends on; empty where that cannot be told."""
    try:
        found = blake2b(_function_bytes(function, []), digest_size=16)
    except (HoldfastError, TypeError, ValueError, RecursionError):
        return ""
    return f"{name} {found.hexdigest()}"


def _function_bytes(function: Any, seen: list[Any]) -> bytes:
    """Its code, what it is bound to, and what it finds by name, functions that it calls included.

    TypeError or ValueError where others decide: an instance, a module of the user's, what it imports when it is called,
    a file, the clock.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(type(function))
    if function in seen:
        return str(seen.index(function)).encode()
    seen.append(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = list(function.__defaults__ or ())
    if any(isinstance(one, Path) for one in (*cells, *defaults)):
        raise TypeError(Path)
    bound = encode([defaults, function.__kwdefaults__ or {}, cells, function.__dict__])
    parts = [_code_bytes(function.__code__), bound]
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            parts += name.encode(), _value_bytes(function.__globals__[name], seen)
        elif name not in vars(builtins) or name in _UNSTEADY:
            raise ValueError(name)
    return b"\0".join(parts)


def _value_bytes(value: Any, seen: list[Any]) -> bytes:
    if isinstance(value, ModuleType | type | FunctionType | BuiltinFunctionType):
        home = value.__name__ if isinstance(value, ModuleType) else value.__module__
        if _is_steady(home):  # it changes with Python only
            return f"{home}:{getattr(value, '__qualname__', '')} {sys.version}".encode()
        return _function_bytes(value, seen)
    if isinstance(value, Path):
        raise TypeError(Path)
    return encode(value)


def _is_steady(module: str | None) -> bool:
    return (module or "").partition(".")[0].lstrip("_") in _STEADY


def _names(code: CodeType) -> Iterator[str]:
    """What a function, and those inside it, look up when they are called. Not the names of attributes."""
    for one in dis.get_instructions(code):
        if one.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
            yield one.argval
        elif one.opname == "IMPORT_NAME" and not _is_steady(one.argval):
            yield ""  # which is nowhere
        elif isinstance(one.argval, CodeType):
            yield from _names(one.argval)


def _code_bytes(code: CodeType) -> bytes:
    consts = b"".join(_code_bytes(one) if isinstance(one, CodeType) else repr(one).encode() for one in code.co_consts)
    return code.co_code + code.co_exceptiontable + repr(code.co_names).encode() + consts


# -- the result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One verdict on one checkpoint. ``known``: it was remembered from another time, and not asked for again."""

    checkpoint: Checkpoint
    verdict: Verdict
    why: str = ""
    known: bool = False


@dataclass(frozen=True)
class Turn:
    """Where in a run the state became bad, found by executing it again: after one of its steps, and before the next.

    A step is a call or a checkpoint, with the ``line`` of the program that it stands in; ``after`` is empty where it
    became bad before the first one, and ``before`` where that was after the last.
    """

    run: str
    after: str
    line: str
    before: str
    before_line: str
    step: int
    checks: int

    def __str__(self) -> str:
        since = f"after {self.after} at {self.line} (step {self.step})" if self.after else "right after its beginning"
        until = f"before {self.before} at {self.before_line}" if self.before else "before its end"
        return f"{since}, {until}, in run {self.run}"


@dataclass
class Bisection:
    """What a bisection found.

    ``checkpoint`` is the first bad one, None where none is bad; ``last_good`` the one before it, None where all are
    bad. ``until``: the last bad one, where the newest is good again. ``forgotten``: so many checkpoints between the two
    are not there any more, and it may be one of those; where none is bad, so many of the line. ``change`` is what
    differs between the two, ``cause`` what led to it. ``candidates``: where some between the two could not be checked,
    it is one of these. ``earlier``: stretches that were bad before and good again, as pairs
    of their first and last checkpoint; ``whole``: every checkpoint that is left was looked at, so there are no others.
    ``minimal`` are the changes that suffice; ``imagined``: a state with just these never existed. ``turn`` is the step
    of the run in which it became bad, where a run lies between the two; ``no_turn`` says why it could not be found.
    """

    agent: str
    check: str
    checkpoint: Checkpoint | None = None
    last_good: Checkpoint | None = None
    until: Checkpoint | None = None
    forgotten: int = 0
    change: Diff = field(default_factory=lambda: Diff(()))
    cause: Cause | None = None
    checks: int = 0
    """How often the check was asked in the search."""
    remembered: int = 0
    """Verdicts of an earlier search that were taken over."""
    tries: int = 0
    """How often it was asked about states that never existed, to find the smallest change."""
    total: int = 0
    """Checkpoints of the line that was searched."""
    confidence: float = 1.0
    """How likely the answer is right, as far as the check itself is flaky. 1 without ``repeats``."""
    candidates: list[Checkpoint] = field(default_factory=list)
    skipped: list[Step] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    earlier: list[tuple[Checkpoint, Checkpoint]] = field(default_factory=list)
    whole: bool = False
    minimal: list[Change] = field(default_factory=list)
    imagined: bool = False
    turn: Turn | None = None
    no_turn: str = ""
    nowhere: list[str] = field(default_factory=list)
    """Places that the expression speaks of, and that no checkpoint has that was looked at."""
    cut: str = ""
    """Why the line could not be followed further back, where it is damaged."""

    def __bool__(self) -> bool:
        return self.checkpoint is not None

    @property
    def exact(self) -> bool:
        """Whether it is this checkpoint and no other, or, where there is none, whether none was bad."""
        found = self.checkpoint is not None or (self.whole and not self.skipped)
        return found and not (self.candidates or self.forgotten or (self.cut and self.last_good is None))

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types; values as their text where JSON has no such type."""
        return {
            "agent": self.agent,
            "check": self.check,
            "answer": [said(one) for one in self.answer()],
            "notes": [said(one) for one in self.notes()],
            "first_bad": self.checkpoint.to_json() if self.checkpoint is not None else None,
            "last_good": self.last_good.to_json() if self.last_good is not None else None,
            "until": self.until.to_json() if self.until is not None else None,
            "exact": self.exact,
            "forgotten": self.forgotten,
            "change": [one.to_json() for one in self.change],
            "cause": self.cause.to_json() if self.cause is not None else None,
            "minimal": [one.to_json() for one in self.minimal],
            "imagined": self.imagined,
            "turn": asdict(self.turn) if self.turn is not None else None,
            "no_turn": self.no_turn,
            "nowhere": self.nowhere,
            "cut": self.cut,
            "candidates": [one.id for one in self.candidates],
            "earlier": [{"first": one.id, "last": two.id} for one, two in self.earlier],
            "whole": self.whole,
            "confidence": self.confidence,
            "checks": self.checks,
            "remembered": self.remembered,
            "tries": self.tries,
            "total": self.total,
            "steps": [step_json(one) for one in self.steps],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def answer(self) -> Iterator[Fact]:
        """Which checkpoint it is, and all that qualifies this."""
        bad, good = self.checkpoint, self.last_good
        if bad is None:
            is_bad = "is bad" if self.whole and not self.skipped else "was found to be bad"
            some = f" {len(self.skipped)} could not be checked." if self.skipped else ""
            ends = "" if self.whole else f" The newest is good, and only the ends were checked; {_ALL}."
            of = count(self.total, "checkpoint")
            yield "", [f"No checkpoint of {self.agent} {is_bad}, of {of}.{some}{ends}"]
        else:
            yield "first bad", [bad]
            that = "oldest that can be checked" if self.candidates else "oldest"
            yield "last good", [good if good is not None else f"none: the {that} is bad"]
        for place in self.nowhere:
            yield "nowhere", [f"{place} is in no checkpoint that was looked at"]
        if self.until is not None:
            yield "until", [self.until, ", then good again"]
        if self.forgotten:
            which = "one of" if bad is not None else "nobody can say of"
            yield "or", [f"{which} {count(self.forgotten, 'checkpoint')} that were forgotten"]
        if self.candidates:
            yield "or", [f"one of {count(len(self.candidates), 'checkpoint')} before it that cannot be checked"]
        if self.cut:
            yield "cut", [f"what came before cannot be read: {self.cut}"]
        for one, two in self.earlier:
            yield "before", [one, " to ", two, " was bad, too"]
        if self.confidence < 1:
            yield "confidence", [f"{self.confidence:.1%}"]

    def notes(self) -> Iterator[Fact]:
        """What of the change suffices, the step of a run, what was skipped, and how much was looked at."""
        if self.imagined and self.minimal:
            places = ", ".join(one.where for one in self.minimal[:_SHOWN])
            yield "enough", [f"{places}  (a state with only this never existed)"]
        if self.turn is not None or self.no_turn:
            yield "step", [str(self.turn) if self.turn is not None else self.no_turn]
        for step in self.skipped[:_SHOWN]:
            yield "skipped", [step.checkpoint, f"  {step.why}"]
        if len(self.skipped) > _SHOWN:
            yield "skipped", [f"{len(self.skipped) - _SHOWN} more"]
        if self.remembered:
            yield "remembered", [f"{count(self.remembered, 'verdict')} of an earlier search; --fresh asks again"]
        looked = "all looked at" if self.whole else f"at most one change assumed; {_ALL}"
        about = "" if self.checkpoint is None else f", {looked}"
        yield "", [f"{count(self.checks, 'check')} for {count(self.total, 'checkpoint')}{about}."]

    def lines(self) -> Iterator[str]:
        """For people."""
        cause = self.cause.lines() if self.cause is not None else ()
        return chain(map(_line, self.answer()), cause, map(_line, self.notes()))

    def __repr__(self) -> str:
        return f"<Bisection of {self.agent}: {next(self.lines())}>"


Fact = tuple[str, Sequence[str | Checkpoint]]
"""Something that a person is told: what it is called, empty for a whole sentence, and what it consists of."""


def said(fact: Fact) -> dict[str, str]:
    """As text."""
    name, parts = fact
    return {"name": name, "text": "".join(_named(part) if isinstance(part, Checkpoint) else part for part in parts)}


def _line(fact: Fact) -> str:
    return "{name}: {text}".format_map(said(fact)).removeprefix(": ")


def step_json(step: Step) -> dict[str, Any]:
    one = step.checkpoint
    return {
        "checkpoint": one.id, "depth": one.depth, "label": one.label,
        "verdict": step.verdict, "why": step.why, "known": step.known,
    }  # fmt: skip


def _named(checkpoint: Checkpoint) -> str:
    return f"#{checkpoint.depth} {checkpoint.label or checkpoint.short_id}"


# -- the file of verdicts ----------------------------------------------------------------------------------------------


class Verdicts:
    """What was found out before: a cache. Where it cannot be read or written, the check is asked again."""

    def __init__(self, agent: Agent) -> None:
        store = agent._store
        self._name, self._private = agent.name, bool(store.encrypted)
        self._journal = Journal(store.place, VERDICTS, agent.name)

    def read(self) -> Iterator[dict[str, Any]]:
        """All of them, oldest first."""
        for said in self._journal.read():
            if all(isinstance(said.get(key), str) for key in _TEXTS):
                yield {**said, "agent": self._name}

    def known(self, check: Check) -> dict[str, list[Verdict]]:
        """What a check said about each checkpoint, by its id."""
        found: dict[str, list[Verdict]] = {}
        wanted = _digest(check.identity)
        for said in self.read() if check.identity else ():
            if said["id"] == wanted and said.get("verdict") in {"good", "bad"}:
                found.setdefault(said["checkpoint"], []).append(said["verdict"])
        return found

    def add(self, check: Check, step: Step) -> None:
        if not check.identity:
            return
        one = step.checkpoint
        self._journal.add({
            "at": datetime.now(UTC).isoformat(), "id": _digest(check.identity),
            "check": "" if self._private else check.name[:_WHY], "checkpoint": one.id, "depth": one.depth,
            "verdict": step.verdict, "why": "" if self._private else step.why[:_WHY],
        })  # fmt: skip


def log_of(agent: Agent) -> list[dict[str, Any]]:
    """The verdicts that bisections of an agent have come to, oldest first: ``at``, ``check``, ``checkpoint``, ..."""
    return list(Verdicts(agent).read())


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def line_to(agent: Agent, end: str | Checkpoint | None) -> tuple[list[Checkpoint], str]:
    """A checkpoint and its ancestors, oldest first, as far as they can be read; and why no further, if it is so."""
    agent._check_open()
    agent._store.flush()
    found: list[Checkpoint] = []
    with agent._db.moment() as (view, _):  # what is forgotten meanwhile would leave a gap
        start = view.branch_at(agent._branch.b).head if end is None else agent.at(end)._current().n
        try:
            for point in Graph(view, agent._row).line(start) if start else ():
                found.append(agent._seen(point))  # noqa: PERF401 - what was read before the damage counts
        except Damaged as error:
            return found[::-1], error.message
    return found[::-1], ""


# -- the search --------------------------------------------------------------------------------------------------------

Progress = Callable[[str, int, int], None]


class Search:
    """One bisection of one line of ancestors, oldest first."""

    def __init__(
        self,
        agent: Agent,
        check: Check,
        line: Sequence[Checkpoint],
        *,
        repeats: int = 1,
        confidence: float = 0.95,
        fresh: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if type(repeats) is not int or not 1 <= repeats <= REPEATS_MAX:
            raise BadOption(f"repeats={repeats!r}", hint=f"Use a number from 1 to {REPEATS_MAX:,}.")
        if not 0.5 < confidence < 1:
            raise BadOption(f"confidence={confidence!r}", hint="Use a number between 0.5 and 1, such as 0.95.")
        self._agent, self._check, self._line = agent, check, line
        self._repeats, self._progress = repeats, progress or (lambda *_: None)
        self._verdicts = Verdicts(agent)
        self._known = {} if fresh else self._verdicts.known(check)
        self._steps: dict[int, Step] = {}
        self._sure: dict[int, float] = {}
        self._seen: dict[object, Step] = {}
        self._checks = self._remembered = 0
        # How often the check says "bad" of what is good, and of what is bad. The ends tell, where it is flaky.
        self._rates = (0.0, 1.0)
        # Each of the checks on the way may be wrong: together they have to be as sure as was asked for.
        self._enough = 1 - (1 - confidence) / max(1, math.ceil(math.log2(max(2, len(line)))))

    def run(self, *, whole: bool, good: bool) -> Bisection:
        """``whole``: look at every checkpoint. ``good``: the first was said to be good."""
        found = Bisection(self._agent.name, self._check.name, total=len(self._line))
        try:
            self._search(found, good=good)
            if whole:
                self._scan(found)
            found.forgotten = self._forgotten(found)
            found.nowhere = self._nowhere()
        finally:
            found.checks, found.remembered = self._checks, self._remembered
            found.steps = list(self._steps.values())
            found.skipped = [one for one in found.steps if one.verdict == "skip"]
        return found

    def _search(self, found: Bisection, *, good: bool) -> None:
        low, high = self._ends(found)
        line = self._line
        again = self._steps[high].verdict == "good"
        if again and self._steps[low].verdict == "good":
            return
        if self._steps[low].verdict == "bad":
            if good:
                raise BisectFailed(
                    f"{_named(line[low])}, which should be good, is bad with {self._check.name}",
                    hint="Give an older one as the good end.",
                )
            found.checkpoint, found.candidates = line[low], list(line[:low])
            found.until = line[low] if again else None
            return
        low, high = halved(
            low,
            high,
            lambda at: self._judge(at).verdict,
            lambda left: self._progress("checkpoints to check", len(line) - left, len(line)),
        )
        found.checkpoint, found.last_good = line[high], line[low]
        found.candidates = list(line[low + 1 : high])
        found.confidence = math.prod(self._sure.values())

    def _ends(self, found: Bisection) -> tuple[int, int]:
        """The newest and the oldest that can be checked. What cannot is listed."""
        if not self._line:
            raise BisectFailed(f"{self._agent.name} has no checkpoint", hint="Take one first.")
        high = next((at for at in range(len(self._line) - 1, -1, -1) if self._end(at)), -1)
        low = next((at for at in range(high + 1) if self._end(at)), -1)
        if high < 0:
            first = self._steps[len(self._line) - 1]
            skipped = tuple((one.checkpoint, one.why) for one in self._steps.values())
            raise BisectFailed(
                f"none of {len(self._line)} checkpoints of {self._agent.name} could be checked: {first.why}",
                skipped=skipped,
                hint="Mend the check: it must return True or False for at least the ends.",
            )
        if self._repeats > 1 and low != high:
            self._learn(low, high)
        found.total = len(self._line)
        return low, high

    def _end(self, at: int) -> bool:
        return self._judge(at).verdict != "skip"

    def _learn(self, low: int, high: int) -> None:
        """How flaky the check is: of the ends it is known what they are. Half a vote each keeps it from being sure."""
        rates = []
        for at, truth in ((low, "good"), (high, "bad")):
            votes = [verdict for verdict in self._votes(at, self._repeats) if verdict != "skip"]
            bad = sum(verdict == "bad" for verdict in votes)
            rates.append((bad + 0.5) / (len(votes) + 1))
            self._steps[at] = Step(self._line[at], truth)  # type: ignore[arg-type]
        if rates[1] <= rates[0]:
            raise BisectFailed(
                f"the check is not more often bad at {_named(self._line[high])} than at {_named(self._line[low])}",
                hint="Give other ends, more repeats, or a check that tells them apart.",
            )
        self._rates = rates[0], rates[1]

    def _judge(self, at: int) -> Step:
        """The verdict on one checkpoint: remembered, or asked for, often enough to be sure."""
        if at in self._steps:
            return self._steps[at]
        checkpoint = self._line[at]
        if checkpoint.validity == "corrupt":
            why = f"it is marked corrupt: {checkpoint.validity_reason}".removesuffix(": ")
            self._steps[at] = Step(checkpoint, "skip", why)
            return self._steps[at]
        sees = self._check.sees(checkpoint)
        if self._repeats == 1 and sees in self._seen:  # the same state as another's
            known = self._seen[sees]
            step = Step(checkpoint, known.verdict, known.why, known=True)
        elif self._repeats == 1 and checkpoint.id in self._known:
            step = Step(checkpoint, self._known[checkpoint.id][-1], known=True)
            self._remembered += 1
        elif self._repeats == 1 or self._rates == (0.0, 1.0):
            step = self._ask(at)
        else:
            step = self._sequential(at)
        self._steps[at] = step
        if step.verdict != "skip":  # one may be damaged, and others with the same content not
            self._seen[sees] = step
        return step

    def _sequential(self, at: int) -> Step:
        """Ask until one of the two is likely enough, by what the ends have shown of the check's own mistakes."""
        good, bad = self._rates
        odds = 0.0  # the logarithm of how much likelier bad is
        enough = math.log(self._enough / (1 - self._enough))
        for verdict in self._votes(at, self._repeats):
            if verdict == "skip":
                return Step(self._line[at], "skip", "the check could not tell")
            odds += math.log(bad / good) if verdict == "bad" else math.log((1 - bad) / (1 - good))
            if abs(odds) >= enough:
                break
        self._sure[at] = 1 / (1 + math.exp(-abs(odds)))
        return Step(self._line[at], "bad" if odds > 0 else "good")

    def _votes(self, at: int, most: int) -> Iterator[Verdict]:
        """What the check says of one, again and again: first what is remembered, then asked anew."""
        known = self._known.get(self._line[at].id, [])[:most]
        self._remembered += len(known)
        yield from known
        for _ in range(most - len(known)):
            yield self._ask(at).verdict

    def _ask(self, at: int) -> Step:
        """Ask the check once."""
        checkpoint = self._line[at]
        self._checks += 1
        try:
            step = Step(checkpoint, *self._check.judge(checkpoint.state, checkpoint))
        except (Damaged, Forgotten) as error:
            step = Step(checkpoint, "skip", f"it cannot be read: {error.message}"[:_WHY])
        except Abort as wish:
            raise BisectFailed(f"the check ended the search: {wish}", hint="What was found so far is kept.") from None
        except Exception as error:  # noqa: BLE001 - whatever a check raises, it is no verdict
            step = Step(checkpoint, "skip", reason_of(error))
        self._verdicts.add(self._check, step)
        return step

    def _scan(self, found: Bisection) -> None:
        """Look at all that are left, so that a history that was bad more than once is known to be."""
        for at in range(len(self._line)):
            self._progress("checkpoints", at + 1, len(self._line))
            self._judge(at)
        sure = [at for at in range(len(self._line)) if self._steps[at].verdict != "skip"]
        stretches: list[list[int]] = []
        for before, at in zip([-1, *sure], sure, strict=False):
            if self._steps[at].verdict == "bad":
                if before >= 0 and self._steps[before].verdict == "bad":
                    stretches[-1][1] = at
                else:
                    stretches.append([at, at])
        found.whole = True
        if not stretches:
            return
        *earlier, (start, end) = stretches
        line = self._line
        goods = [at for at in sure if at < start]
        found.checkpoint, found.last_good = line[start], line[goods[-1]] if goods else None
        found.candidates = list(line[goods[-1] + 1 if goods else 0 : start])
        found.until = line[end] if end != sure[-1] else None
        found.earlier = [(line[one], line[two]) for one, two in earlier]

    def _nowhere(self) -> list[str]:
        if not isinstance(self._check, Asked):
            return []
        missing, seen = set(self._check.expression.paths), set[object]()
        for step in reversed(list(self._steps.values())):
            sees = self._check.sees(step.checkpoint)
            if missing and step.verdict != "skip" and sees not in seen:
                seen.add(sees)
                with suppress(Damaged, Forgotten):
                    look = Look.of(step.checkpoint.state)
                    missing = {path for path in missing if look.at(path) is MISSING}
        return sorted(map(format_path, missing))

    def _forgotten(self, found: Bisection) -> int:
        """How many are not there any more between the last good one and the first bad one; without one, in all."""
        line = list(self._line)
        start = line.index(found.last_good) + 1 if found.last_good is not None else 0
        end = line.index(found.checkpoint) + 1 if found.checkpoint is not None else len(line)
        pairs = zip([None, *line], line, strict=False)
        some = list(pairs)[start:end]
        return sum(one.depth - 1 - (before.depth if before is not None else 0) for before, one in some if one.cut)

    # -- what it was ------------------------------------------------------------------------------------------

    def explain(self, found: Bisection, *, minimise: bool, program: Program | None) -> None:
        """Its change, and its cause; the step of a run; then the smallest part of the change that makes it bad."""
        bad, good = found.checkpoint, found.last_good
        if bad is None:
            return
        before = good.state if good is not None else self._agent._store._empty()
        found.change = diff(before, bad.state, _named(good) if good is not None else "(empty)", _named(bad))
        found.cause = cause_of(self._agent, bad, good)
        if not minimise or good is None or self._repeats > 1:
            return
        if not found.candidates:
            from holdfast.travel.minimal import turn_of

            turn = turn_of(self._agent, good, bad, self._check, program)
            found.turn, found.no_turn = (turn, "") if isinstance(turn, Turn) else (None, turn)
        with suppress(Damaged, Forgotten):
            operations = good.state.told.differences(bad.state.told)
            smallest = ddmin(operations, lambda sets: (self._still_bad(found, good, one) for one in sets))
            state = history.state_of(self._agent._db.now, good._current())
            reader = self._agent._store._reader(state)
            found.minimal = list(mutations(state, reader, smallest, bad.label, bad.id))
            found.imagined = len(smallest) < len(operations)

    def _still_bad(self, found: Bisection, good: Checkpoint, some: list[Operation]) -> bool:
        """Whether the last good state with just these changes is bad. It never existed."""
        if found.tries >= TRIES_MAX:
            return False
        found.tries += 1
        now = self._agent._db.now
        try:
            state = history.state_of(now, good._current())
            state.do(some)
            store = self._agent._store
            document = history.load(now, good._current(), store._registry, readonly=False, inert=store._inert)
            document.become(state, record=False)
            document.readonly = True
            return self._check.judge(document, None)[0] == "bad"
        except Abort:
            found.tries = TRIES_MAX
            return False
        except Exception:  # noqa: BLE001 - changes that make no sense without each other, or a check that cannot tell
            return False


def halved(
    low: int, high: int, judge: Callable[[int], Verdict], tell: Callable[[int], object] = bool
) -> tuple[int, int]:
    """From a good place and a bad one to two with nothing in between, but for what cannot be judged."""
    skipped = set[int]()
    while inner := [at for at in range(low + 1, high) if at not in skipped]:
        tell(len(inner))
        middle = inner[len(inner) // 2]
        verdict = judge(middle)
        if verdict == "skip":
            skipped.add(middle)
        low, high = middle if verdict == "good" else low, middle if verdict == "bad" else high
    return low, high


def ddmin(items: list[Any], failing: Callable[[Sequence[list[Any]]], Iterable[bool]]) -> list[Any]:
    """The smallest part of the items that is found to fail, in their order (delta debugging, Zeller's ddmin).

    All of them fail. What is left fails, and without any one of them it does not. ``failing`` is asked about several
    parts at once, and may answer one after another: no more than the first that fails is needed.
    """
    parts = 2
    while len(items) > 1:
        ends = [at * len(items) // parts for at in range(parts + 1)]
        pieces = [items[start:end] for start, end in pairwise(ends)]
        rests = [items[:start] + items[end:] for start, end in pairwise(ends)] if parts > 2 else []
        tried = [*pieces, *rests]
        smaller = next((one for one, bad in zip(tried, failing(tried), strict=False) if bad), None)
        if smaller is not None:
            parts = 2 if len(smaller) <= -(-len(items) // parts) else max(parts - 1, 2)
            items = smaller
        elif parts < len(items):
            parts = min(len(items), parts * 2)
        else:
            break
    return items
