"""Durable functions: what is declared about them, the table of them by name, and which recorded run a call means.

Owns the decorator, the options, and the rules by which a run is resumed, begun anew or refused. Must not know how a run
goes; writes nothing. What always holds: a function is known by its name, not by its module, so that a program goes on
with a run wherever it is started from; a run that has not ended is not passed over; one that has ended is resumed only
where nothing was begun or saved since, so that resuming takes nothing back; what was named and is not to be resumed is
not begun anew unless somebody says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from msgspec import Struct
from msgspec.structs import replace

from holdfast.agent.names import check_name, full_name
from holdfast.codec.types import REGISTRY as _PLAIN
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import BadOption, RunEnded, RunUnfinished, command
from holdfast.run import records as rec
from holdfast.run.arguments import Binder, Blocks, fetch, fingerprint, not_there
from holdfast.run.cron import Missed, Overlap, Schedule, declared, id_of
from holdfast.run.past import LOST, OPEN, Past, RunPast
from holdfast.run.queues import DEFAULT, Queue, name_of
from holdfast.run.scope import Host, whose

if TYPE_CHECKING:
    from holdfast.run.host import AgentHost
    from holdfast.run.rollback import Setback

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Options(Struct, frozen=True):
    """How a durable function is executed. ``id`` names the run: once it has finished, its result is returned.

    ``wait=False`` raises ``Waiting`` where the run would sleep. ``strict`` stops at every call that differs from the
    record. ``change`` resumes a run with other arguments than it was begun with. ``again`` begins a run anew whose id
    was cancelled or rolled back. ``replan``: should the run fail, it is rolled back to its beginning, and
    ``replan(setback)`` returns what to execute instead (a durable function, or functools.partial of one), or None to
    give up. ``limit_s``: so long after its beginning the run is told to stop (``Cancelled``), wherever it is executed
    then. ``turn_s``: so long ``agent.run`` waits while this process executes another run of the agent.
    A run that is submitted waits for its turn in its function's queue: those of a higher ``priority`` come first, and
    the queue may limit those of each ``partition``.
    """

    id: str | None = None
    wait: bool = True
    strict: bool | None = None
    change: bool = False
    again: bool = False
    replan: Callable[[Setback], Any] | None = None
    limit_s: float | None = None
    turn_s: float = 0.0
    priority: int = 0
    partition: str | None = None


class Given(TypedDict, total=False):
    """The same, as they are given."""

    id: str | None
    wait: bool
    strict: bool | None
    change: bool
    again: bool
    replan: Callable[[Setback], Any] | None
    limit_s: float | None
    turn_s: float
    priority: int
    partition: str | None


class DurableFunction(Protocol[P, R_co]):
    """A decorated function, as type checkers see it."""

    __name__: str
    durable: Durable

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def options(self, **options: Unpack[Given]) -> DurableFunction[P, R_co]:
        """The same function, to be executed so: ``agent.run(travel.options(id="7"), "Lisbon")``. See ``Options``."""


class Durable:
    """What is known about a durable function."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        strict: bool,
        schedule: Schedule | None = None,
        queue: str = "",
    ) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise BadOption(f"{name} yields, and a run has a result", hint="Return a list, or use a tool: stream=True.")
        self.function = function
        self.name = name
        self.strict = strict
        self.queue = queue or DEFAULT
        self.binder = Binder(function)
        self.waits = inspect.iscoroutinefunction(function)
        self.schedule = schedule
        self.timed = schedule is not None and _takes_time(self)

    def given(self, handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, without the agent, which is the first."""
        given = self.binder.bind((handle, *args), kwargs)
        given.pop(next(iter(given)))
        return given

    @property
    def code(self) -> str:
        """A hash of the function's own code, to be compared on resume."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)  # what is called may be no function
        return _hash_of(code) if code is not None else ""


@functools.lru_cache(1_000)
def _hash_of(code: CodeType) -> str:
    return fingerprint({"code": encode(_parts(code))}, _PLAIN).hex()[:16]


def _parts(code: CodeType) -> list[Any]:
    """What a function does, in plain values: the same in every process that runs the same code."""
    constants = [_parts(one) if isinstance(one, CodeType) else _shown(one) for one in code.co_consts]
    return [code.co_code, list(code.co_names), list(code.co_varnames), constants]


def _shown(constant: Any) -> str:
    if isinstance(constant, frozenset):  # of a test such as `x in {...}`: its order differs between processes
        return repr(sorted(map(repr, constant)))
    return repr(constant)


_AGENT_AND_TIME = 2


def _takes_time(made: Durable) -> bool:
    """Whether a scheduled function wants to know its time; raises where nobody could give it what it wants."""
    wanted = [
        one
        for one in made.binder.signature.parameters.values()
        if one.default is one.empty and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
    ]
    if not 0 < len(wanted) <= _AGENT_AND_TIME or any(one.kind is one.KEYWORD_ONLY for one in wanted):
        raise BadOption(
            f"{made.name} has a schedule, and wants something else than the agent and its time",
            hint="Let it take (agent), or (agent, time); give the others a default.",
        )
    check_name(f"{made.name}/{id_of(0)}", "an agent")
    return len(wanted) == _AGENT_AND_TIME


@overload
def durable(function: Callable[P, R_co], /) -> DurableFunction[P, R_co]: ...
@overload
def durable(
    *,
    name: str | None = None,
    strict: bool = False,
    every: str | None = None,
    zone: str = "UTC",
    missed: Missed = "once",
    overlap: Overlap = "skip",
    queue: Queue | str | None = None,
) -> Callable[[Callable[P, R_co]], DurableFunction[P, R_co]]: ...
def durable(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    strict: bool = False,
    every: str | None = None,
    zone: str = "UTC",
    missed: Missed = "once",
    overlap: Overlap = "skip",
    queue: Queue | str | None = None,
) -> Any:
    """Let ``agent.run`` execute a function so that it resumes where it stopped. It is called as ``f(agent, ...)``.

    ``name``: how records name it, also when the function is renamed or moved. ``strict``: raise ``Diverged`` at every
    call that differs from the record, also where only reads would be dropped.
    ``every``: workers execute it by themselves at the times that these five fields of cron say in the time ``zone``,
    each as a run of the agent FUNCTION/TIME, as ``f(agent)`` or ``f(agent, time)``. ``missed`` says which of the times
    at which no worker ran are made up for: none ("skip"), the newest ("once"), or "each" of the newest 100. ``overlap``
    says whether a time that comes while the run before it has not ended is left out ("skip"), or waits ("queue").
    ``queue`` is where its runs wait for their turn when they are submitted: see ``holdfast.queue``.
    """
    schedule = declared(every, zone, missed, overlap) if every is not None else None
    if schedule is None and (zone, missed, overlap) != ("UTC", "once", "skip"):
        raise BadOption("a zone, missed and overlap say more about a schedule", hint='Give it: every="0 8 * * 1-5".')

    def decorate(function: Any) -> Any:
        made = Durable(function, _named(function, name), strict=strict, schedule=schedule, queue=name_of(queue))
        DURABLES[made.name] = made
        return configured(made)

    return decorate(function) if function is not None else decorate


DURABLES: dict[str, Durable] = {}
"""Durable functions by name; the newest definition counts."""


def configured(made: Durable, options: Options | None = None, **more: Any) -> Any:
    """A durable function that is to be executed so."""
    chosen = replace(options if options is not None else Options(), **more)

    @functools.wraps(made.function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return made.function(*args, **kwargs)

    wrapper.durable = made  # type: ignore[attr-defined] # functions may have attributes
    wrapper.chosen = chosen  # type: ignore[attr-defined]
    wrapper.options = functools.partial(configured, made, chosen)  # type: ignore[attr-defined]
    return wrapper


def options_of(function: Any) -> Options:
    """How a function is to be executed."""
    found = getattr(function, "chosen", None)
    return found if isinstance(found, Options) else Options()


def known(function: Any) -> Durable:
    """What is declared about a function, or what would be if it were."""
    found = function if isinstance(function, Durable) else getattr(function, "durable", None)
    if isinstance(found, Durable):
        if inspect.ismethod(function):  # whose self would be lost, here or after a restart
            raise BadOption(f"{found.name} is a method: a run begins with the agent", hint="Make it a function.")
        return found
    return Durable(function, _named(function), strict=False)


def _named(function: Any, name: str | None = None) -> str:
    """The name by which a run finds its function again."""
    if not callable(function):
        raise BadOption(f"a run needs a function, not {type(function).__name__}")
    found = getattr(function, "__name__", None) if name is None else name
    if not isinstance(found, str) or not found:
        what = f"name={name!r}" if name is not None else f"a {type(function).__name__} has no name"
        raise BadOption(
            f"a run finds its function by its name: {what}", hint='Give it one: holdfast.durable(name="travel")(...).'
        )
    return found


# -- which recorded run is meant ------------------------------------------------------------------------------


ID_MAX = 200


def choose(agent: AgentHost, past: Past, mark: bytes, options: Options) -> RunPast | None:
    """The recorded run that is meant; None for a new one."""
    run = _meant(agent, past, mark, options)
    if run is not None and run.status != "finished":
        check_whole(run)
    return run


def check_whole(run: RunPast) -> None:
    """Refuse to go on with a run while nothing was executed, if what its execution would be answered is not there."""
    for path, call in run.calls.items():
        outcome = call.outcome or call.done
        fault = outcome.fault if isinstance(outcome, rec.Done) else None
        gone = next((one for one in (outcome and outcome.value, fault and fault[3]) if isinstance(one, int)), None)
        if gone is not None and not run.is_inside(path):
            what = f"what {call.tool} returned at {path} in run {run.id}"
            raise not_there(gone, what, tool=call.tool, path=path, run=run.id)


def result_of_run(run: RunPast, blocks: Blocks, registry: Registry, *, inert: bool = False) -> Any:
    """What a run returned; None where it has returned nothing."""
    value = run.end.value if run.end is not None else None
    if isinstance(value, int):
        raise not_there(value, f"what run {run.id} returned", run=run.id)
    return fetch(value, blocks, registry, inert=inert)


def _meant(agent: AgentHost, past: Past, mark: bytes, options: Options) -> RunPast | None:
    id, change = options.id, options.change
    owner = past.owner(agent.origin)
    for run in past.runs.values():
        if run.begin.function == LOST and run.status not in {"finished", "cancelled"}:
            raise RunUnfinished(
                f"run {run.id} has not ended, and what was recorded of its beginning is lost",
                run=run.id,
                hint="Roll back to before it began.",
            )
    if owner is not None and owner.begin.kind == "rollback":
        raise unfinished(agent, owner)
    if id is not None and (named := _run_named(agent, past, mark, options)) is not None:
        return named
    if owner is not None:
        if id is None and (change or mark_of(agent, owner) == mark):
            return owner
        raise unfinished(agent, owner)
    last = past.last
    if id is not None or last is None or last.status in {"finished", "cancelled"}:
        return None
    if not change and mark_of(agent, last) != mark:
        return None
    if agent.stands_in(last):
        return last
    if last.status == "rolled back" and not options.again:  # what it had done before that stands
        raise _ended(last.id, last.status, "something was saved since")
    return None


def check_id(id: str | None) -> str:
    if type(id) is not str or not 0 < len(id) <= ID_MAX:
        raise BadOption(f"a run's id is a text of 1 to {ID_MAX} characters, not {id!r:.60}")
    return id


def _run_named(agent: AgentHost, past: Past, mark: bytes, options: Options) -> RunPast | None:
    """The run with this id; None where one is to be begun."""
    id = check_id(options.id)
    run = past.runs.get(id)
    if run is None:
        if id in past.begun and not options.again:
            raise _ended(id, "rolled back")
        return None
    status = run.status
    if status == "cancelled" or not (
        status == "finished" or run is past.owner(agent.origin) or (run is past.last and agent.stands_in(run))
    ):
        if not options.again:
            raise _ended(id, status, "" if status == "cancelled" else "something was begun or saved since")
        return None
    if not options.change and mark_of(agent, run) != mark:
        what = f"run {id!r} was begun with another function or other arguments ({run.begin.function})"
        if status == "finished":
            raise RunEnded(f"{what}, and has finished", run=id, status=status, hint="Use another id.")
        hint = (
            "Use another id, or resume it: with its own function and arguments (and replan=, if that chose them),"
            f" with agent.resume({id!r}), or with these and .options(change=True)."
        )
        if status in OPEN:
            raise RunUnfinished(f"{what}, and has not ended", run=id, hint=hint)
        raise RunEnded(f"{what}, and {_HOW.get(status, f'was {status}')}", run=id, status=status, hint=hint)
    return run


_HOW = {"failed": "has failed", "": "was inherited, unfinished"}


def _ended(id: str, status: str, since: str = "") -> RunEnded:
    return RunEnded(
        f"run {id!r} {_HOW.get(status, f'was {status}')}{f', and {since}' if since else ''}: it does not start again",
        run=id,
        status=status or "inherited",
        hint="Start it again on purpose, with .options(again=True) or --again, or use another id.",
    )


def unfinished(agent: Host, run: RunPast, *, executing: bool = False) -> RunUnfinished:
    """The error that says whose the branch is, and the ways out."""
    function, id, kind = run.begin.function, run.id, run.begin.kind
    what = {"rollback": f"a rollback of {agent.name}", "map": f"a batch of {function}"}.get(
        kind, f"run {id} of {function}"
    )
    if executing:
        hint = "Wait until it has ended, or work on a branch: agent.branch(NAME, at=agent.head)."
        return RunUnfinished(f"{agent.name} is executing {what}", run=id, hint=hint)
    status = {"": "interrupted", "attention": "needs attention"}.get(run.status, run.status)
    cancel = f"cancel it with agent.cancel({id!r}) or `{command('runs', 'cancel', whose(agent), id)}`"
    ways = {
        "rollback": "It is finished by `with agent:`, agent.run(...) or agent.rollback(...).",
        "map": f"Resume it by calling store.map once more, {cancel}, or roll back to before it began.",
        "run": f"Resume it with agent.resume({id!r}) or by running it again, with its own arguments or with others and"
        f" .options(change=True); {cancel}; work on a branch with agent.branch(NAME, at=agent.head); or roll back to"
        " before it began.",
    }
    return RunUnfinished(f"{what} has not ended ({status})", run=id, hint=ways.get(kind, ways["run"]))


def cancel_first(name: str, branch: str, id: str) -> str:
    """The hint where a run of another agent has not ended."""
    handle = f"store.agent({name!r})" if branch == "main" else f"store.agent({name!r}, branch={branch!r})"
    return f"Cancel it first: `{command('runs', 'cancel', full_name(name, branch), id)}`, or {handle}.cancel({id!r})."


ARGUMENTS = "=arguments"
"""The path, which no call has, of the note that says which arguments a run goes on with."""


def mark_of(agent: Host, run: RunPast) -> bytes:
    """The fingerprint of the function and the arguments that a run was executed with last."""
    changed = run.notes.get(ARGUMENTS)
    if changed is None:
        return run.begin.fingerprint
    return bytes(fetch(changed.value, agent.ledger, agent.registry, inert=True)["fingerprint"])


def arguments_of(run: RunPast, blocks: Blocks, registry: Registry, *, inert: bool = False) -> dict[str, Any]:
    """The arguments that a run was executed with last."""
    changed = run.notes.get(ARGUMENTS)
    found = fetch(changed.value if changed is not None else run.begin.args, blocks, registry, inert=inert)
    return dict(found["arguments"] if changed is not None else found)


def call_of(
    run: RunPast, made: Durable, agent: Any, blocks: Blocks, registry: Registry
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same as whoever calls the function with that agent would write them."""
    given = arguments_of(run, blocks, registry)
    args, kwargs = made.binder.spread({next(iter(made.binder.signature.parameters)): agent, **given})
    return args[1:], kwargs
