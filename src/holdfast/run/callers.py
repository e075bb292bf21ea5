"""Callers: whether somebody else can still be making a call whose outcome nobody knows.

Owns what is known about calls of others, and of this process, that were left; and putting a run off until the last of
them is over. Must not ask probes. What always holds: a call counts as over where it ended in this process, where its
caller wrote so, where the caller is known to have ended, or when the caller's lease has run out and the longest that
the call may take has passed since; in any other case a person is asked. Time that has passed is measured by one clock,
the store's, and before a probe is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from holdfast.errors import Waiting
from holdfast.run import records as rec
from holdfast.run.past import Call
from holdfast.run.scope import Scope, now_us
from holdfast.run.steps import Steps, Work, Write
from holdfast.store.processes import is_self

if TYPE_CHECKING:
    from holdfast.run.effects import Effect
    from holdfast.store.database import Database

MAYBE = "the probe found nothing, but whoever made the call may still be at it"
LEASE = "lease"
"""What a run waits for that is put off so."""

Token = tuple[str, int]
_under_way: dict[Token, Callable[[], bool]] = {}


class Question:
    """Whether a call has been made already. Of whoever is interrupted before it is answered nothing stays."""

    __slots__ = ("__weakref__",)


_asking: WeakSet[Question] = WeakSet()


class Caller(NamedTuple):
    """Whether a call is over; if not, from when on it is (0: nobody knows), and what a person is told."""

    over: bool
    until: int = 0
    why: str = ""


# -- calls of this process ------------------------------------------------------------------------------------


def begin(effect: Effect) -> Token:
    """This process is about to intend a call. It counts as being made until ``end``."""
    token = effect.key, effect.attempt
    _under_way[token] = _always
    return token


def end(token: Token, still: Callable[[], bool]) -> None:
    """Its caller goes on. A thread that was given up may not have ended."""
    if still():
        _under_way[token] = still
    else:
        _under_way.pop(token, None)


def ask() -> Question:
    """Somebody is about to find out whether a call has been made already, and makes it if not: until ``asked``."""
    question = Question()
    _asking.add(question)
    return question


def asked(question: Question | None) -> None:
    """It is answered, or its intent is on record."""
    if question is not None:
        _asking.discard(question)


def any_under_way() -> bool:
    """Whether this process is making a call that changes something outside, or has given one up that goes on.

    Or is about to: what it has found out already would be wrong in a process that comes back later.
    """
    return bool(_asking) or any(still() for still in list(_under_way.values()))


def _always() -> bool:
    return True


def is_under_way(intent: rec.Intent) -> bool:
    """Whether this process is making the call, or a thread of it that was given up."""
    return _under_way.get((intent.key, intent.attempt), bool)()


# -- calls of others ------------------------------------------------------------------------------------------


def outlives_s(db: Database, b: int, own: int, call: Call) -> float | None:
    """How long whoever intended a call may still begin it; 0: the call is over; None: nobody knows.

    Asked by the writer of branch ``b`` in the generation ``own``. The intent's number says on which branch it was
    written: a line begins with records of the one that it comes from.
    """
    mine, intent = db.view.branch_at(b), call.intent
    made = db.view.numbered(mine.line, call.number)
    # In another store somebody may be at it, or go on with it, and nobody here can tell.
    if intent is None or not made.b or is_under_way(intent):
        return None
    if call.doubt is not None and call.doubt.over:
        return 0.0
    if (made.b, intent.generation) == (b, own):
        return None
    branch = mine if made.b == b else db.view.branch_at(made.b)
    said: dict[str, Any] = {}
    if db.leases.said:  # otherwise its lock tells
        place = made.b, intent.generation
        for entry in db.view.log(branch.a):
            body = entry.body
            if body["what"] == "open" and (body.get("b"), body.get("generation")) == place and "of" not in body:
                said = body
        if is_self(said.get("holder", ())):
            return 0.0
    left_s = db.leases.outlives_s(branch.uuid, intent.generation, said)
    return None if left_s and branch.generation <= intent.generation else left_s  # it can be confirmed for ever


def look(scope: Scope, call: Call) -> Caller:
    """What is known about who made a call, now: to be asked before the probe is."""
    from holdfast.run.waiting import date  # which needs calls

    left_s, intent = scope.agent.outlives_s(call), call.intent
    if left_s == 0:
        return Caller(over=True)
    if left_s is None or intent is None:
        return Caller(over=False, why=MAYBE)
    if not intent.limit:
        return Caller(
            over=False, why=f"{MAYBE}: its process is not known to have ended, and {call.tool} has no timeout_s"
        )
    now = scope.agent.shared_us()
    before = _waited(scope, call)
    until = before.until if before is not None else now + round(left_s * 1e6) + intent.limit
    return Caller(until <= now, until, f"{MAYBE} until {date(until)}")


def _waited(scope: Scope, call: Call) -> rec.Wait | None:
    """Since when a run waits that such a call is over."""
    past = getattr(scope, "past", None)
    found: rec.Wait | None = past.waits.get(call.path) if past is not None else None
    return found if found is not None and (found.what, found.name) == (LEASE, str(call.number)) else None


def wait(scope: Any, calls: list[tuple[Call, Caller]]) -> Steps:
    """Put a run off until calls are over that others may still be making: raises ``Waiting``.

    One that blocks where it waits does so here. Answers whether that was of use.
    """
    from holdfast.run.waiting import Until, date

    if not scope.run_id or not all(one.until for _, one in calls) or (yield Work(scope.look)) is not None:
        return False
    until = max(one.until for _, one in calls)
    # The worker that looks for the run goes by its own clock.
    until += now_us() - (yield Work(scope.agent.shared_us))
    for call, one in calls:
        if _waited(scope, call) is None:
            began = rec.Wait(now_us(), scope.run_id, call.path, LEASE, str(call.number), one.until)
            scope.past.waits[call.path] = began
            yield Write(scope, began)
    if scope.waits:
        looking = Until(scope, rec.Wait(now_us(), scope.run_id, "", LEASE, "", until))
        yield from looking.steps()
        return looking.stop is None
    end = rec.End(now_us(), scope.run_id, "waiting", waits=[(LEASE, "", until)])
    if scope.past.limit:
        end.waits.append(("limit", "", scope.past.limit))
    yield Write(scope, end)
    raise Waiting(
        f"run {scope.run_id} of {scope.agent.name} waits until {date(until)}: until then another process may still be"
        " making a call of it",
        run=scope.run_id,
        until=until,
        hint="A worker resumes it then; or run it again.",
    )
