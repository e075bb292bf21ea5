"""What a call is part of: a run, or the plain use of an agent.

Owns what both share: writing records, keys, what is unsettled. Must not know how a call goes. What always holds: a
completion has its place in the order exactly where its record stands in the line.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Protocol

from holdfast.codec.types import Registry
from holdfast.errors import BadName, InDoubt
from holdfast.run import records as rec
from holdfast.run import secrets
from holdfast.run.arguments import Blocks, Stowed, fetch, fill, stow
from holdfast.run.effects import Effect
from holdfast.run.ledger import Ledger
from holdfast.run.order import Order
from holdfast.run.outcomes import result_of
from holdfast.run.past import LOST, Call, RunPast
from holdfast.run.positions import Lane
from holdfast.run.records import Record, key_of
from holdfast.run.tools import TOOLS, Tool


class Suspended(BaseException):
    """Unwinds the functions of a run that is put off. Not an Exception: no handler of theirs is meant."""


def now_us() -> int:
    return time.time_ns() // 1000


class Host(Protocol):
    """What this room asks of an agent."""

    name: str
    registry: Registry
    ledger: Ledger

    @property
    def handle(self) -> Any:
        """The agent as user code has it."""

    @property
    def identity(self) -> tuple[bytes, bytes]:
        """The uuids of the agent and of its branch."""

    @property
    def generation(self) -> int:
        """Of the writer that this process is."""

    def is_dead(self, generation: int, number: int) -> bool:
        """Whether the process that wrote record ``number`` in that generation is known to have ended.

        The number says on which branch that was: a line begins with records of the one that it comes from.
        """

    # -- whose the branch is

    whole: bool
    """Known to have no run or rollback under way: to be cleared by whoever begins one."""

    @property
    def origin(self) -> int:
        """How many records of the line the checkpoint knows that the branch began with."""

    def check_free(self) -> None:
        """Raise while a run or a rollback has begun and not ended."""

    def stands_in(self, run: RunPast) -> bool:
        """Whether the newest checkpoint of the branch is one of this run: nothing else was saved since."""


class Scope(ABC):
    """The part that runs and plain use have in common."""

    run_id = ""
    owns_state = True  # whether what it does may change the agent's state

    def __init__(self, agent: Host, incarnation: int, order: Order) -> None:
        self.agent = agent
        self.ledger = agent.ledger
        self.registry = agent.registry
        self.incarnation = incarnation
        self.order = order
        self.ended = False
        self.lock = threading.RLock()
        self.unsettled: list[Call] = []
        self.live = 0  # calls that are under way outside
        self.given_up = False  # somebody has cancelled the run itself: nothing more is recorded
        self.taken: set[bytes | int] = set()  # signals that this line has received
        self.waits = True  # whether a wait blocks; otherwise the run is put off
        self.plain = False  # whether its program is plain code, even where an event loop runs
        self.stopped = False  # it was put off, or ended from inside: nothing new starts
        self.reason: BaseException | None = None  # why, where it was not put off
        self.children: list[Any] = []  # what it has spawned
        self._tools: dict[str, Tool] = {}

    # -- what subclasses decide ---------------------------------------------------------------------------

    @abstractmethod
    def recorded(self, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Call | None:
        """What is recorded at this position for this call; None when the call is to be made."""

    def asked(
        self,
        lane: Lane,  # noqa: ARG002 - a loop needs it
        path: str,
        tool: Tool,
        mark: bytes,
        arguments: dict[str, Any],
    ) -> Generator[Any, Any, tuple[str, Call | None]]:
        """The steps to what is recorded for this call, and the path at which it is recorded, or made."""
        yield from ()
        return path, self.recorded(path, tool, mark, arguments)

    def leave_call(self, path: str) -> None:  # noqa: B027 - runs know where they are
        """A call that was asked for is over, or was answered."""

    def several(self) -> None:
        self.order.several()

    def give_up(self) -> None:
        """Somebody cancels the run itself. It will be executed again, and come by here without that."""
        self.given_up = True
        self.order.give_up()

    # -- what both do ------------------------------------------------------------------------------------

    def check_settled(self, tool: Tool | None = None) -> None:  # noqa: ARG002 - a plain loop makes a difference
        """Raise while an effect is in doubt, or the run is put off: nothing new starts then."""
        if self.stopped:
            raise Suspended
        if self.unsettled:
            raise in_doubt(self, self.unsettled)

    def check_tool(self, tool: Tool) -> None:
        """Raise where a recorded name would not say which tool was called."""
        if self._tools.get(tool.name) is tool:
            return
        TOOLS.check(tool.name)
        if self._tools.setdefault(tool.name, tool).origin != tool.origin:
            raise BadName(
                f"two tools are called {tool.name!r}; {tool.origin[1]} was not called",
                hint="Give one of them another name=.",
            )
        self._tools[tool.name] = tool

    def key(self, path: str) -> str:
        return key_of(*self.agent.identity, self.incarnation, self.run_id, path)

    def write(self, record: Record, stowed: Stowed | None = None, *, flush: bool = False) -> int:
        """Append one record."""
        nodes, chunks = (stowed.nodes, stowed.chunks) if stowed is not None else (None, None)
        return self.ledger.append(record, nodes=nodes, chunks=chunks, flush=flush)

    def complete(self, record: rec.Done | rec.Decision, stowed: Stowed | None = None) -> int:
        """Append an outcome and give it its place in the order of completions."""
        with self.lock:
            number = self.write(record, stowed)
            self.order.enter(record.path)
            return number

    def leave(self, path: str) -> None:  # noqa: B027 - outside of runs nothing is done again
        """The call at this position has an outcome by now: what was recorded inside of it is not done again."""

    def keep_lost(self, call: Call) -> None:  # noqa: B027 - in a run it has its position
        """The program was told that the result of this call is lost: the same call is not made again."""

    def effect_of(self, call: Call) -> Effect:
        """A recorded call as user code sees it."""
        return effect_of(call, self.ledger, self.registry)

    def report(self, path: str, number: int, value: Any) -> None:
        """A tool says how far it has come."""
        stowed = stow(secrets.scrub(self.agent, value, "what a tool reported"), self.registry)
        self.write(rec.Progress(now_us(), self.run_id, path, stowed.value, number), stowed, flush=True)


def whose(agent: Host) -> str:
    """How the agent is named on the command line."""
    branch = getattr(agent, "branch_name", "main")
    return agent.name if branch == "main" else f"{agent.name}@{branch}"


_NEVER = rec.Done(0, "", "", "")


def effect_of(call: Call, blocks: Blocks, registry: Registry, *, inert: bool = False) -> Effect:
    """A recorded call as user code sees it. Values are read when they are asked for."""
    intent, done = call.intent, call.done
    outcome = call.outcome

    def read(value: rec.Value) -> Any:
        return fetch(value, blocks, registry, inert=inert)

    return Effect(
        tool=call.tool,
        kind=call.kind,
        key=intent.key if intent is not None else "",
        path=call.path,
        run=call.run,
        number=call.number,
        attempt=call.attempts,
        at_us=(intent or done or _NEVER).at,
        status=call.status,
        args=lambda: TOOLS.as_called(call.tool, fill(read(call.args) or {}, call.holes)),
        result=(lambda: result_of(outcome, blocks, registry, inert=inert)) if outcome is not None else None,
        error=done.fault[2] if done is not None and done.fault is not None else "",
        why=call.doubt.why if call.doubt is not None else "what was recorded is lost" if call.tool == LOST else "",
        last_progress=lambda: read(call.progress),
    )


def in_doubt(scope: Scope, calls: list[Call]) -> InDoubt:
    """The error that names these calls."""
    effects = tuple(map(scope.effect_of, calls))
    named = "; ".join(f"{effect.tool} at {effect.path}{f' ({effect.why})' if effect.why else ''}" for effect in effects)
    first = f" {effects[0].id}" if effects else ""
    return InDoubt(
        f"it is not known whether this happened: {named}",
        effects=effects,
        hint=f"Find out, then say so: holdfast effects resolve {whose(scope.agent)}{first} --done JSON --why TEXT"
        " (or --not-done).",
    )
