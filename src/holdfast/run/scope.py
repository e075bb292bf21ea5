"""What a call is part of, a run or the plain use of an agent, and where in it: as a path that is the same next time.

Owns what both kinds share (writing records, keys, what is unsettled), the lanes and their numbers, the task factory
that numbers tasks when they are created, the current effect, and the count of what is active in this process. Must not
know how a call goes. What always holds: a completion has its place in the order exactly where its record stands in the
line. A lane is used by one flow of control; two flows never take the same path. A run has one thread; a flow of it that
nobody could number again has no position, and takes none. A tool that changes something outside is never called
unrecorded by accident: where an agent is active in the process and the caller does not know which is its own, the call
is refused.

A path reads ``plan:0/~3/2``: step "plan" for the first time, in it the fourth task, in that the third call.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4
from zlib import crc32

from holdfast.agent.names import check_text, full_name
from holdfast.agent.points import current_task
from holdfast.codec.types import Registry
from holdfast.errors import BadName, BadOption, InDoubt, NoAgent, command
from holdfast.run import records as rec
from holdfast.run.arguments import Blocks, Stowed, fetch, fill, scrub, stow
from holdfast.run.effects import Effect
from holdfast.run.order import Order, watch
from holdfast.run.outcomes import result_of
from holdfast.run.past import LOST, Call
from holdfast.run.records import Record, key_of
from holdfast.run.tools import TOOLS, Tool
from holdfast.store import copies

if TYPE_CHECKING:
    from holdfast.run.line import Line  # with it comes the store: declaring a function needs none
    from holdfast.store.engine import Lease, Shared


class Suspended(BaseException):
    """Unwinds the functions of a run that is put off. Not an Exception: no handler of theirs is meant."""


def now_us() -> int:
    return time.time_ns() // 1000


class Host(Protocol):
    """What this room asks of an agent."""

    name: str
    registry: Registry
    ledger: Line

    @property
    def handle(self) -> Any:
        """The agent as user code has it."""

    @property
    def identity(self) -> tuple[bytes, bytes]:
        """The uuids of the agent and of its branch."""

    @property
    def generation(self) -> int:
        """Of the writer that this process is."""

    @property
    def lease(self) -> Lease | None:
        """By which it is the writer."""

    def outlives_s(self, call: Call) -> float | None:
        """How long whoever intended that call may still begin it; 0: the call is over; None: nobody knows."""

    def shared_us(self) -> int:
        """The time by a clock that all who share the store have in common."""

    # -- whose the branch is

    whole: bool
    """Known to have no run or rollback under way: to be cleared by whoever begins one."""

    @property
    def origin(self) -> int:
        """How many records of the line the checkpoint knows that the branch began with."""

    def check_free(self) -> None:
        """Raise while a run or a rollback has begun and not ended."""


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
        self.broken: BaseException | None = None  # what kept a call of a run from being recorded: nothing new starts
        self._tools: dict[str, Tool] = {}

    # -- what subclasses decide ---------------------------------------------------------------------------

    def place(self, path: str) -> str:
        """Where a call was made, for people."""
        return f"at {path}"

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

    def around(self, lane: Lane, path: str, tool: Tool, when: str) -> None:  # noqa: B027 - a run takes checkpoints
        """A call begins, or has ended (``when``: before or after): in a run, a safe point."""

    def opened(self, lane: Lane, path: str, label: str) -> None:  # noqa: B027 - as above
        """A breaker opened in the call at ``path``."""

    def give_up(self) -> None:
        """Somebody cancels the run itself. It will be executed again, and come by here without that."""
        self.given_up = True
        self.order.give_up()

    # -- what both do ------------------------------------------------------------------------------------

    def check_settled(self, tool: Tool | None = None) -> None:  # noqa: ARG002 - a plain loop makes a difference
        """Raise while an effect is in doubt, or the run is put off: nothing new starts then."""
        if self.stopped:
            raise Suspended
        if self.broken is not None:
            raise self.broken
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

    def write(self, record: Record, stowed: Stowed | None = None, *, flush: bool = False, soon: bool = False) -> int:
        """Append one record."""
        return self.ledger.append(record, stowed=stowed, flush=flush, soon=soon)

    def gather(self, outcome: rec.Done | rec.Decision, stowed: Stowed | None = None) -> None:
        """Append an outcome that nobody waits for, nor asks for the number of."""
        self.ledger.gather(outcome, stowed)

    def complete(self, record: rec.Done | rec.Decision, stowed: Stowed | None = None, *, soon: bool = False) -> None:
        """Append an outcome and give it its place in the order of completions. ``soon``: it is flushed next."""
        with self.lock:
            if soon:
                self.write(record, stowed, soon=True)
            else:
                self.gather(record, stowed)
            self.order.enter(record.path)

    def commit(self, shared: Shared, intent: rec.Intent, done: rec.Done, stowed: Stowed) -> int:
        """As ``complete``, of a call together with what it wrote; returns the number of its intent."""

        def make(count: int) -> list[Record]:
            done.of = count + 1
            return [intent, done]

        with self.lock:
            number = self.ledger.commit(shared, make, stowed) - 1
            self.order.enter(done.path)
            return number

    def leave(self, path: str) -> None:  # noqa: B027 - outside of runs nothing is done again
        """The call at this position has an outcome by now: what was recorded inside of it is not done again."""

    def told_cancelled(self, path: str) -> None:  # noqa: B027 - outside of runs nothing is done again
        """The caller at this position was cancelled, though its call has an outcome."""

    def was_cancelled(self, path: str) -> bool:  # noqa: ARG002 - as above
        """Whether that is recorded."""
        return False

    def keep_lost(self, call: Call) -> None:  # noqa: B027 - in a run it has its position
        """The program was told that the result of this call is lost: the same call is not made again."""

    def effect_of(self, call: Call) -> Effect:
        """A recorded call as user code sees it."""
        made = effect_of(call, self.ledger, self.registry)
        made.agent, made.branch = self.agent.name, getattr(self.agent, "branch_name", "main")
        return made

    def report(self, path: str, number: int, value: Any) -> None:
        """A tool says how far it has come."""
        stowed = stow(scrub(self.agent, value, "what a tool reported"), self.registry)
        self.write(rec.Progress(now_us(), self.run_id, path, stowed.value, number), stowed, flush=True)


def branch_of(agent: Host) -> str:
    return str(getattr(agent, "branch_name", "main"))


def whose(agent: Host) -> str:
    """How the agent is named on the command line."""
    return full_name(agent.name, branch_of(agent))


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
        _at_us=(intent or done or _NEVER).at,
        took_s=_took_s(call),
        status=call.status,
        _args=lambda: TOOLS.as_called(call.tool, fill(read(call.args) or {}, call.holes)),
        _result=lambda: result_of(outcome, blocks, registry, inert=inert) if outcome is not None else None,
        error=done.fault[2] if done is not None and done.fault is not None else "",
        why=call.doubt.why if call.doubt is not None else "what was recorded is lost" if call.tool == LOST else "",
        let_go=isinstance(call.args, rec.LetGo) or isinstance(outcome and outcome.value, rec.LetGo),
        _last_progress=lambda: read(call.progress),
        _partial=lambda: _partial(call, read),
    )


def _took_s(call: Call) -> float | None:
    done = call.done
    began = call.intent.at if call.intent is not None else done.started if done is not None else 0
    return max(0, done.at - began) / 1e6 if done is not None and began else None


def _partial(call: Call, read: Callable[[rec.Value], Any]) -> list[Any]:
    """What a stream had given that did not get to its end."""
    done = call.done
    if done is not None and done.how in {"error", "cancelled"} and done.value is not None:
        return list(read(done.value))
    return call.given.items(read) if call.given is not None and call.outcome is None else []


def in_doubt(scope: Scope, calls: list[Call]) -> InDoubt:
    """The error that names these calls."""
    effects = tuple(map(scope.effect_of, calls))
    places = [f"{one.tool} {scope.place(one.path)}{f' ({one.why})' if one.why else ''}" for one in effects]
    settle = command("effects", "resolve", whose(scope.agent), *(effect.id for effect in effects[:1]))
    return InDoubt(
        f"it is not known whether this happened: {'; '.join(places)}",
        effects=effects,
        hint=f"Find out, then say so: {settle} --done JSON --why TEXT (or --not-done).",
    )


# -- positions ------------------------------------------------------------------------------------------------


def safe(name: str) -> str:
    """A name as it stands in a path."""
    return name.replace("%", "%25").replace("/", "%2F").replace(":", "%3A").replace("!", "%21")


class Lane:
    """One flow of control: a prefix of paths, and the number of the next call."""

    __slots__ = (
        "_next", "_owner", "_points", "_steps", "_stray", "_tasks", "above", "inside", "label", "prefix", "scope",
    )  # fmt: skip

    def __init__(self, scope: Any, prefix: str = "", above: Lane | None = None, label: str = "") -> None:
        self.scope = scope
        self.prefix = prefix
        self.above = above
        self.label = label  # what people see of it in a stack
        self._next = 0
        self._points = 0
        self._tasks = 0
        self._steps: dict[str, int] = {}
        self._owner: Any = None
        self._stray = False  # a flow of a run that has no position
        self.inside: str = above.inside if above is not None else ""  # the tool in whose transaction it is

    @property
    def path(self) -> str:
        """Where the next call would be."""
        return f"{self.prefix}{self._next}"

    def take(self, what: str = "", fingerprint: bytes = b"") -> str:  # noqa: ARG002 - some lanes have no order
        """The path of the next call, which is ``what`` with these arguments."""
        if self._stray:
            raise self._refusal(what)
        if self.inside:
            raise BadOption(
                f"{what} was called in the transaction of {self.inside}, which does not cover it; it was not called",
                hint=f"Call it before or after {self.inside}.",
            )
        path = f"{self.prefix}{self._next}"
        self._next += 1
        return path

    def point(self) -> int:
        """The number of a safe point that the program declares here. Calls have numbers of their own."""
        self._points += 1
        return self._points - 1

    @property
    def stray(self) -> bool:
        """Whether this flow of a run has no position."""
        return self._stray

    def step(self, name: str) -> Lane:
        """The lane of a phase that begins here."""
        shown = safe(check_text(name, "a phase's name"))  # which is part of every path below it
        occurrence = self._steps.get(shown, 0)
        self._steps[shown] = occurrence + 1
        lane = Lane(self.scope, f"{self.prefix}{shown}:{occurrence}/", self, name)
        lane._owner, lane._stray = self._owner, self._stray
        return lane

    def task(self) -> Lane:
        """The lane of a task that is created here."""
        with self.scope.lock:  # in plain use, threads have lanes, too
            self.scope.several()
            number = self._tasks
            self._tasks += 1
        lane = Lane(self.scope, f"{self.prefix}~{number}/", self, f"task {number}")
        lane._stray = self._stray
        return lane

    def body(self, path: str, label: str, owner: Any = None) -> Lane:
        """The lane inside the tool that is called at ``path``. ``owner`` is who executes it, if not the caller."""
        lane = Lane(self.scope, f"{path}/", self, label)
        lane._owner = owner if owner is not None else self._owner
        return lane

    def mine(self) -> Lane:
        """This lane if it is the caller's own, otherwise a new one below it. In a run that one has no position."""
        me = flow()
        if self._owner is None:
            with self.scope.lock:  # one of those that come together: two would give their calls the same keys
                if self._owner is None:
                    self._belongs(me)
        if self._owner != me:
            # Frameworks carry a context from one task to another. A task knows its own lane.
            known = _LANES.get(me()) if isinstance(me, weakref.ref) else None
            if known is not None and known.scope is self.scope:
                return known
            lane = self._begun_here() if self.scope.run_id else self.task()
            lane._belongs(me)
            return lane
        return self

    def _begun_here(self) -> Lane:
        """The lane of another flow than the run's own: of the one task of a loop that plain code has just begun."""
        asyncio = sys.modules.get("asyncio")
        loop = asyncio._get_running_loop() if asyncio is not None else None
        begun = loop is not None and self._owner == threading.get_ident() and not self._stray
        if begun and asyncio is not None and len(asyncio.all_tasks(loop)) == 1:
            number_tasks(loop)
            return self.task()
        lane = Lane(self.scope, self.prefix, self)
        lane._stray = True
        return lane

    def own(self, task: Any) -> None:
        """Make a task the one whose lane this is."""
        self._belongs(weakref.ref(task))

    def _belongs(self, flow: Any) -> None:
        self._owner = flow
        if isinstance(flow, weakref.ref):
            _LANES[flow()] = self

    def _refusal(self, what: str) -> NoAgent:
        on_loop = isinstance(self._owner, weakref.ref)
        where = "in a task that does not belong to its run" if on_loop else "on another thread than its run's"
        hint = (
            "A run's tasks are created in its own tasks, on the loop that it is executed on: make the durable function"
            " async and use `await agent.arun(...)`, and create tasks in it, not in callbacks or other threads."
            if on_loop
            else _THREADS
        )
        if not on_loop and what != "checkpoint" and not what.startswith("holdfast."):
            hint += f" For a plain tool in async code: `await {what}.acall(...)`."
        return NoAgent(f"{what} was called {where}; it was not called", hint=hint)

    def stack(self) -> list[str]:
        """What is going on here, outermost first."""
        labels: list[str] = []
        lane: Lane | None = self
        while lane is not None:
            if lane.label:
                labels.append(lane.label)
            lane = lane.above
        return labels[::-1]


_THREADS = "Inside a durable function, threads are begun by store.map(...) and agent.spawn(...)."
_LANES: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()
"""The lanes of tasks."""

HERE: contextvars.ContextVar[Lane | None] = contextvars.ContextVar("holdfast.lane", default=None)
"""The lane of the current context. In a copied context it is the lane of the one it was copied from."""


def flow() -> Any:
    """Who is executing: the current task, or the thread where there is none."""
    task = current_task()
    return weakref.ref(task) if task is not None else threading.get_ident()


def here() -> Lane | None:
    """The caller's own lane, None when no agent is current."""
    lane = HERE.get()
    if lane is None:
        return None
    mine = lane.mine()
    if mine is not lane:
        HERE.set(mine)
    return mine


@contextmanager
def within(lane: Lane | None) -> Iterator[None]:
    """Inside, ``lane`` is the current one."""
    token = HERE.set(lane)
    try:
        yield
    finally:
        HERE.reset(token)


def number_tasks(loop: Any) -> None:
    """From now on every task that is created on this loop gets its lane when it is created."""
    watch(loop)
    before = loop.get_task_factory()
    if not isinstance(before, _Factory):
        loop.set_task_factory(_Factory(before or _numbered_task()))


@functools.cache
def _numbered_task() -> Callable[..., Any]:
    """A task whose hash is the same in every execution of a run.

    asyncio keeps tasks in sets, and a task group cancels its members in the order of such a set; so does a program
    that goes through what ``asyncio.wait`` returned. With the usual hash, an address, that order differs every time.
    """
    import asyncio

    class NumberedTask(asyncio.Task[Any]):
        """As asyncio.Task."""

        def __init__(self, coro: Any, **options: Any) -> None:
            lane = HERE.get()
            # Before the task is made: making it puts it into a set.
            self._place = crc32(lane.prefix.encode()) if lane is not None else id(self) >> 4
            super().__init__(coro, **options)

        def __hash__(self) -> int:
            return self._place

        __eq__ = object.__eq__

    def make(loop: Any, coro: Any, **options: Any) -> Any:
        return NumberedTask(coro, loop=loop, **options)

    return make


def _check_order(frame: FrameType | None) -> None:
    """Raise where asyncio.as_completed makes the task: it goes through a set, hence in the order of addresses."""
    for _ in range(5):
        if frame is None:
            return
        named = frame.f_code.co_qualname in {"as_completed", "_AsCompletedIterator.__init__"}
        if named and frame.f_globals.get("__name__") == "asyncio.tasks":
            raise BadOption(
                "asyncio.as_completed goes through coroutines in an order that differs each time",
                hint="Make tasks of them first: [asyncio.create_task(one) for one in ...].",
            )
        frame = frame.f_back


class _Factory:
    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, loop: Any, coro: Any, **options: Any) -> Any:
        lane = here()
        if lane is None:
            return self._make(loop, coro, **options)
        if lane.scope.run_id:
            _check_order(sys._getframe(1))
        child = lane.task()
        given = options.get("context")
        context = contextvars.copy_context()
        context.run(HERE.set, child)
        if given is not None:
            given.run(HERE.set, child)
        task = context.run(self._make, loop, coro, **options)
        child.own(task)
        return task


# -- who works for whom ---------------------------------------------------------------------------------------


EFFECT: contextvars.ContextVar[Effect | None] = contextvars.ContextVar("holdfast.effect", default=None)
"""The effect whose tool is running."""


@contextmanager
def doing(effect: Effect) -> Iterator[None]:
    """Inside, this is the effect whose tool, probe or compensation is running."""
    token = EFFECT.set(effect)
    try:
        yield
    finally:
        EFFECT.reset(token)


_active: set[object] = set()  # only ever changed by steps that cannot be cut, by a destructor for example
_FINDERS: list[Callable[[str, str], Lane | None]] = []


def find_by(finder: Callable[[str, str], Lane | None]) -> None:
    """Let a framework's connection say in which lane a tool is called, given its name and kind, where none is current.

    It knows by means of its own, such as a context that the framework keeps. None: it does not know.
    """
    if finder not in _FINDERS:
        _FINDERS.append(finder)


def begin(user: object) -> None:
    """From now on something is active in this process, until ``end``."""
    _active.add(user)


def end(user: object) -> None:
    _active.discard(user)


_PASSING: list[type[BaseException]] = []


def let_pass(*kinds: type[BaseException]) -> None:
    """Exceptions by which a framework stops a function on purpose, to go on later: to ask a person, for example.

    A tool that raises one has not done anything outside yet.
    """
    _PASSING.extend(kind for kind in kinds if kind not in _PASSING)


def passing() -> tuple[type[BaseException], ...]:
    return tuple(_PASSING)


@contextmanager
def active(lane: Lane) -> Iterator[None]:
    """Inside, the lane's agent is current here, and active in this process."""
    user = object()
    begin(user)
    lane.mine()  # whoever begins is its owner, not whoever calls first
    token = EFFECT.set(None)  # inside a tool that uses an agent of its own
    try:
        with within(lane):
            yield
    finally:
        EFFECT.reset(token)
        end(user)


def place(name: str, kind: str) -> Lane | None:
    """The lane in which a tool is called now; None when it is an ordinary function."""
    if copies.INSIDE:
        if kind != "read":
            copies.check_outside(f"{name} was called")
        return None  # what it answers is forgotten with the memory that asked
    lane = here()
    if lane is None:
        lane = next((found for finder in _FINDERS if (found := finder(name, kind)) is not None), None)
    if lane is None:
        if _active and kind != "read":
            raise NoAgent(
                f"{name} was called in a thread that belongs to no agent; nothing was done",
                hint=f"{_THREADS} Elsewhere, hand the context over: pool.submit(agent.context().run, f), or in the loop"
                " of a framework pool.submit(contextvars.copy_context().run, f). To call it unrecorded on purpose,"
                f" use {name}.direct(...).",
            )
        return None
    if lane.scope.ended:
        raise NoAgent(
            f"{name} was called after its run had ended; it was not called",
            hint="Wait for all tasks and threads of a run before it returns.",
        )
    return lane


def _in_run() -> str:
    lane = here()
    return (
        "this is a durable run, whose calls have recorded positions" if lane is not None and lane.scope.run_id else ""
    )


copies.OBSTACLES.append(_in_run)


def current() -> Any:
    """The agent that the caller works for."""
    lane = here()
    if lane is None:
        raise NoAgent("no agent is current here", hint="Use `with agent:` or `agent.run(...)`.")
    return lane.scope.agent.handle


def effect() -> Effect:
    """The effect whose tool is running: its key, its arguments, its progress.

    In a tool that is called as an ordinary function it is one that is written down nowhere, with a key of its own.
    """
    found = EFFECT.get()
    if found is None:
        unrecorded: dict[str, Any] = {"tool": "", "kind": "", "path": "", "run": "", "status": "unrecorded"}
        found = Effect(key=uuid4().hex, _args=dict, _report=lambda _value: None, **unrecorded)
    return found
