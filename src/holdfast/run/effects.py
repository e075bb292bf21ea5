"""Effects: one as user code sees it (in a tool, a probe, a compensation, a list), and all that stand outside.

Owns the answers of a probe, the words for an effect's status, and the second reading of a line. The fold in ``past``
says what a program counts on, and forgets what a rollback voided; this one forgets nothing, because what happened
outside has happened. Writes nothing and asks nobody: progress goes through a function that it was given. What always
holds: an effect says what its records say, no more; one effect is one key, however often it was called or claimed; it
counts as undone only when a compensation of it has succeeded, or somebody decided so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from msgspec import Struct

from holdfast.agent.watchers import UNWATCHED, Watch
from holdfast.errors import BadOption
from holdfast.run import records as rec
from holdfast.run.past import AFTER_INTENTS, Call, Past, add_to
from holdfast.run.records import Record


class Found(Struct, frozen=True):
    """A probe's answer: it happened, and this is what the call would have returned."""

    result: Any = None


class Absent(Struct, frozen=True):
    """A probe's answer: it did not happen."""


class Unknown(Struct, frozen=True):
    """A probe's answer: it cannot tell."""

    why: str = ""


def _date(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / 1e6, UTC)


class Attempt(NamedTuple):
    """One time that a call was made. ``how``: as an effect's status, or ``not done`` where it is known not to be."""

    number: int
    at: datetime
    ended: datetime | None
    how: str
    why: str


class Effect(Struct, eq=False, kw_only=True):
    """One call to the outside world, by ``tool``, as part of ``run``, at the position ``path`` in it.

    ``key`` is the same each time the call is repeated for the same purpose, for systems that honour such keys.
    ``status`` is what became of it: ``running``, ``done``, ``failed``, ``in doubt``, ``not done``, ``undone``,
    ``rolled back``, ``open``, ``cancelled``, ``stopped`` (not called: the run was told to stop), ``lost`` or
    ``fallback``; ``error`` and ``why`` say more. In a list, ``agent`` and ``branch`` say whose it is.
    """

    tool: str
    kind: str
    key: str
    path: str
    run: str
    agent: str = ""
    branch: str = ""
    status: str = "running"
    number: int = 0
    attempt: int = 1
    error: str = ""
    why: str = ""
    let_go: bool = False
    """Whether its arguments and its result were let go: reading them raises ``ResultForgotten``."""
    still: Callable[[], bool] = lambda: False
    """Whether a call that was given up is still going on."""
    took_s: float | None = None
    """How long the newest attempt took; None while that is not known."""
    attempts: tuple[Attempt, ...] = ()
    """In a list, each time that it was made, oldest first. Of reads only the last is recorded, and is not here."""
    _at_us: int = 0
    _args: Callable[[], dict[str, Any]]
    _whole: Callable[[], dict[str, Any]] | None = None
    _result: Callable[[], Any] = lambda: None
    _last_progress: Callable[[], Any] = lambda: None
    _report: Callable[[Any], None] | None = None
    _partial: Callable[[], list[Any]] = list
    _connection: Any = None
    _watch: Watch = UNWATCHED

    @property
    def id(self) -> str:
        """What a person names it by."""
        return self.key[:12]

    @property
    def at(self) -> datetime:
        """When it was intended, or, for a read, done."""
        return _date(self._at_us)

    @property
    def args(self) -> dict[str, Any]:
        """The arguments, by parameter name."""
        return self._args()

    def whole(self) -> dict[str, Any]:
        """As ``args``, with the whole of what stands there by its size and first words, where a checkpoint has it.

        A read is recorded without the parts of the state that it was given.
        """
        return self._whole() if self._whole is not None else self._args()

    @property
    def result(self) -> Any:
        """What the call returned; None while that is not known."""
        return self._result()

    @property
    def last_progress(self) -> Any:
        """What the call last said by ``progress()``, before it was interrupted; None if nothing."""
        return self._last_progress()

    @property
    def partial(self) -> list[Any]:
        """The items that a stream had given when it was interrupted. In the tool: when it was the last time."""
        return self._partial()

    def progress(self, value: Any) -> None:
        """Keep how far the call has come, so that it can go on from there when it is made again."""
        if self._report is None:
            raise BadOption("progress() works only while the tool runs")
        self._report(value)
        self._last_progress = lambda: value

    @property
    def connection(self) -> Any:
        """The connection of psycopg whose transaction is committed with the record: in a ``transaction`` tool."""
        if self._connection is None:
            raise BadOption(
                f"{self.tool or 'a function that no agent called'} has no transaction here",
                hint='Decorate it with @holdfast.tool(effect="transaction"), and call it in a run or `with agent:`.',
            )
        return self._connection

    def __repr__(self) -> str:
        return f"<Effect {self.id} {self.tool} at {self.path or '(loop)'}: {self.status}>"


# -- what stands outside --------------------------------------------------------------------------------------


OWN = "holdfast."
"""How the names of this room's own tools begin: spawning, joining, recorded times. None of them is undone by itself."""

SPAWN, JOIN, CANCEL = "holdfast.spawn", "holdfast.join", "holdfast.cancel"
SAVED = "holdfast.checkpoint"
"""That a checkpoint was written, in async code."""
ITEM = "holdfast.item"
"""What came of an item of a batch."""
ENDS = frozenset({JOIN, CANCEL})
"""The tools whose records say what came of a child."""


class Traced:
    """One effect, from its first intent to its compensation."""

    __slots__ = ("call", "number", "undo")

    def __init__(self, number: int, call: Call) -> None:
        self.number = number  # of the intent that may have made it happen
        self.call = call
        self.undo: Call | None = None

    @property
    def key(self) -> str:
        return self.call.intent.key if self.call.intent is not None else ""

    @property
    def at(self) -> int:
        return self.call.intent.at if self.call.intent is not None else 0

    @property
    def undone(self) -> bool:
        """Whether a compensation has gone through."""
        outcome = self.undo.outcome if self.undo is not None else None
        return outcome is not None and not (isinstance(outcome, rec.Done) and outcome.how == "error")

    @property
    def happened(self) -> str:
        """yes, no, or unsure."""
        call = self.call
        decided = call.decision.how if call.decision is not None else ""
        if call.done is None or decided:
            return {"found": "yes", "done": "yes", "absent": "no", "not-done": "no"}.get(decided, "unsure")
        if call.done.how in {"value", "lost"}:
            return "yes"
        if call.kind == "write" or call.done.how in {"before", "fallback"}:
            return "no"  # of a write only what is known to have failed has such an outcome
        # A repeatable call is not asked about when it fails. Only an answer, or a failure before anything happened, at
        # the first attempt, is sure.
        fault = call.done.fault
        sure = fault is not None and (fault[0] or (fault[1] == "FailedBeforeEffect" and call.attempts == 1))
        return "no" if sure else "unsure"


class Standing:
    """All effects of a line."""

    def __init__(self, records: Iterable[tuple[int, Record]]) -> None:
        self.records = list(records)
        self.count = self.records[-1][0] if self.records else 0
        self._traced: dict[str, Traced] = {}
        self._undoing: dict[int, Call] = {}  # number of what is undone -> its compensation
        self._rollbacks: set[str] = set()
        by_number: dict[int, Call] = {}
        for number, record in self.records:
            if isinstance(record, rec.Intent):
                call = self._call(number, record)
                add_to(call, number, record)
                by_number[number] = call
            elif isinstance(record, AFTER_INTENTS) and record.of in by_number:
                add_to(by_number[record.of], number, record)
            elif isinstance(record, rec.Begin) and record.kind == "rollback":
                self._rollbacks.add(record.run)
        for traced in self._traced.values():
            traced.undo = self._undoing.get(traced.number)

    def _call(self, number: int, intent: rec.Intent) -> Call:
        if intent.undoes:
            return self._undoing.setdefault(intent.undoes, Call(intent.run, intent.path))
        traced = self._traced.get(intent.key)
        if traced is None:
            traced = self._traced[intent.key] = Traced(number, Call(intent.run, intent.path))
        elif intent.attempt > traced.call.attempts:
            traced.number = number
        # Otherwise a call was answered with an effect that stood already: it is as old as it was.
        traced.call.run, traced.call.path = intent.run, intent.path
        return traced.call

    def attempts(self) -> dict[str, list[Attempt]]:
        """By the keys of effects, each intent and what is recorded of it."""
        told: dict[int, list[tuple[str, str, int]]] = {}
        for _, record in self.records:
            if isinstance(record, rec.Done):
                how = {"value": "done", "error": "failed", "before": "not done"}.get(record.how, record.how)
                told.setdefault(record.of, []).append((how, record.fault[2] if record.fault else "", record.at))
            elif isinstance(record, rec.Doubt):
                told.setdefault(record.of, []).append(("in doubt", record.why, record.at))
            elif isinstance(record, rec.Decision):
                how = "done" if record.how in {"found", "done"} else "not done"
                told.setdefault(record.of, []).append((how, record.why, record.at))
        found: dict[str, list[Attempt]] = {}
        for number, record in self.records:
            if isinstance(record, rec.Intent) and not record.undoes:
                how, why, ended = told.get(number, [("in doubt" if record.kind == "write" else "open", "", 0)])[-1]
                why = why or "; ".join(filter(None, (one[1] for one in told.get(number, ()))))
                made = Attempt(record.attempt, _date(record.at), _date(ended) if ended else None, how, why)
                found.setdefault(record.key, []).append(made)
        return found

    @property
    def effects(self) -> list[Traced]:
        """What was done to the world outside, oldest first. What a compensation did is part of undoing."""
        found = [
            one
            for one in self._traced.values()
            if not one.call.tool.startswith(OWN) and one.call.run not in self._rollbacks
        ]
        return sorted(found, key=lambda one: one.number)

    @property
    def spawned(self) -> list[Traced]:
        """The calls that began children, oldest first."""
        return [one for one in self._traced.values() if one.call.tool == SPAWN]

    def known(self, to: int) -> set[str]:
        """The keys of effects that the state at a position counts on."""
        past = Past(entry for entry in self.records if entry[0] <= to)
        return {call.intent.key for call in past.calls() if call.intent is not None and call.outcome is not None}
