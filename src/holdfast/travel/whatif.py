"""What people ask of a recorded run: does it go the same way again, what if something were different, is a fix one.

Owns these questions, and what is made of the answers: a branch, a verdict. How a run is executed is the business of
``jobs`` and ``rerun``. What always holds: nothing is written to the store but a branch that was asked for, and that
one says of itself that it never happened; the program is the one that the caller names.

    replay(store, agent, run, program=...)                   an ``Execution``
    what_if(store, agent, WhatIf(results={...}), ...)        one for each
    keep(store, execution, branch)                           as a branch
    validate(store, agent, run, program=..., code=...)       a ``Validation``
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from msgspec import Struct
from msgspec.structs import replace

from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.names import check_new
from holdfast.codec.document import MISSING
from holdfast.codec.values import decode
from holdfast.errors import BadOption
from holdfast.travel.execution import Execution
from holdfast.travel.jobs import PARALLEL, Done, Workers, executed
from holdfast.travel.rerun import recorded
from holdfast.travel.variation import Job, put

if TYPE_CHECKING:
    from holdfast.travel.handle import Fix, How, Store

Program = str | Callable[..., Any]
"""A program that has the run's function: FILE.py or MODULE, either with :FUNCTION; or the function itself."""


class WhatIf(Struct, kw_only=True, frozen=True):
    """One way in which a run is to be different.

    ``results``: what calls return, by their position (``plan:0/2``), their tool, or ``TOOL#N``, its N-th call from 0.
    ``args``: arguments of the run. ``state``: values by their path, when the run begins, or after the checkpoint
    ``at``; MISSING takes one away. ``tools``: functions that are called in the place of tools, as MODULE:FUNCTION.
    ``code``: a directory that has other code. ``allow``: tools that may be called where the record has no answer;
    ``reads``: all that only read. ``name``: what you call it.
    """

    name: str = ""
    results: Mapping[str, Any] = {}
    args: Mapping[str, Any] = {}
    state: Mapping[str, Any] = {}
    at: str = ""
    tools: Mapping[str, str] = {}
    code: str = ""
    allow: Sequence[str] = ()
    reads: bool = False

    def __str__(self) -> str:
        given = {**self.results, **self.args, **self.state}
        parts = [f"{name} = {'(not there)' if value is MISSING else repr(value)}" for name, value in given.items()]
        parts += [f"{name} is {function}" for name, function in self.tools.items()]
        text = self.name or ", ".join([*parts, *([f"the code in {self.code}"] if self.code else [])]) or "as it was"
        return text if len(text) <= 80 else f"{text[:79]}…"


def replay(
    store: Store, agent: str, run: str | Checkpoint | None = None, *, program: Program, **how: Unpack[How]
) -> Execution:
    """As ``Store.replay``."""
    return executed([job_of(store, agent, run, program, **how)])[0]


def replay_all(
    store: Store,
    runs: Sequence[tuple[str, str | None]],
    *,
    program: Program,
    tell: Done | None = None,
    **how: Unpack[How],
) -> list[Execution]:
    """As replay(), of several runs, each as the agent's name (NAME or NAME@BRANCH) and the run's id or None."""
    jobs = []
    for name, run in runs:
        agent, _, branch = name.partition("@")
        how["branch"] = branch or "main"
        jobs.append(job_of(store, agent, run, program, **how))
    return executed(jobs, tell=tell)


def what_if(
    store: Store,
    agent: str,
    *variations: WhatIf,
    run: str | Checkpoint | None = None,
    program: Program,
    parallel: int = PARALLEL,
    tell: Done | None = None,
    **how: Unpack[How],
) -> list[Execution]:
    """As ``Store.what_if``."""
    job = job_of(store, agent, run, program, **how)
    return _named(executed([_varied(store, job, one) for one in variations], parallel=parallel, tell=tell))


def _named(found: list[Execution]) -> list[Execution]:
    """Refuse names that are nowhere: an answer as if nothing were different would be none to what was asked."""
    for one in found:
        if one.misnamed:
            message, hint = one.misnamed
            raise BadOption(message, hint=hint)
    return found


def debug(
    store: Store,
    agent: str,
    run: str | Checkpoint | None = None,
    *,
    program: Program,
    step: int = 1,
    dap: bool = False,
    **how: Unpack[How],
) -> Execution:
    """Execute a run again under pdb, on this terminal, stopping at a step; ``back`` there executes it once more.

    With ``dap`` an editor is at the other end of this process's standard streams.
    """
    job = replace(job_of(store, agent, run, program, **how), debug="dap" if dap else "pdb", step=max(1, step))
    job = replace(job, free=bool(how.get("code")))
    with Workers(terminal=True):
        while (found := executed([job])[0]).again:
            job = replace(job, step=found.again, until=found.again_until, dap=found.dap)
    return found


def keep(store: Store, execution: Execution, branch: str, *, why: str = "") -> str:
    """Save what came of a variation as a branch: its checkpoints, beginning where the run began.

    Its first checkpoint says that this never happened. It has no effects, because nothing was done. Returns its name.
    """
    check_new(branch, "a branch")
    if not execution.states:
        raise BadOption(
            f"nothing came of it that could be kept: {execution.failed or execution.stopped or 'no state was saved'}",
            hint="Look at what stopped it, and allow that, or give its result.",
        )
    history = recorded(store._view(execution.agent, execution.branch), execution.run)
    start = f"id:{history.run.begin.start.hex()}"
    store.branch(execution.agent, branch, start, branch=execution.branch)
    with store.agent(execution.agent, branch=branch) as agent:
        agent.checkpoint(f"what if{f': {why}' if why else ''} (run {execution.run}); this never happened"[:200])
        for label, state in execution.states:
            agent.state = decode(bytes.fromhex(state), store._registry, inert=store._inert)
            agent.checkpoint(label[:200])
    return branch


def job_of(
    store: Store,
    agent: str,
    run: str | Checkpoint | None,
    program: Program,
    *,
    branch: str = "main",
    code: str = "",
    check: str = "",
    types: Sequence[str] = (),
) -> Job:
    """The job that executes a run as it was."""
    store.flush()
    history = recorded(store._view(agent, branch), run)
    if not isinstance(program, str):
        program = _place_of(program)
    named = str(Path(code).resolve()) if code else ""
    if code and not Path(named).is_dir():
        raise BadOption(f"there is no directory {code}", hint="Name the directory that has the other code.")
    here, modules = str(Path.cwd()), [_module(one) for one in types]
    return Job(store._key, agent, branch, history.run.id, history.at, program, here, named, modules, check=check)


def _module(one: Any) -> str:
    return one if isinstance(one, str) else str(getattr(one, "__name__", one))


def _place_of(function: Callable[..., Any]) -> str:
    inner = inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(inner)
    except TypeError:
        file = None
    name = getattr(inner, "__qualname__", "")
    if file is None or not Path(file).is_file() or "<" in name:
        raise BadOption(
            f"{name or function!r} stands in no file, and another process is to load it", hint='Name it: "trip.py".'
        )
    return f"{Path(file).resolve()}:{name}"


def _varied(store: Store, job: Job, one: WhatIf) -> Job:
    registry = store._registry
    at = ""
    if one.at:
        at = store.agent(job.agent, branch=job.branch, readonly=True).at(one.at).id
    return replace(
        job,
        name=str(one),
        results=[(place, put(value, registry)) for place, value in one.results.items()],
        args={name: put(value, registry) for name, value in one.args.items()},
        state=[
            (path, "" if value is MISSING else put(value, registry), at) for path, value in one.state.items()
        ],
        tools=dict(one.tools),
        code=str(Path(one.code).resolve()) if one.code else job.code,
        allow=list(one.allow),
        reads=one.reads,
        free=True,
        keep=True,
    )  # fmt: skip


# -- is a fix one -----------------------------------------------------------------------------------------------------


class Validation(Struct):
    """What came of executing a failing run, and healthy ones, with other code. ``problems`` says what is wrong."""

    before: Execution  # the failing run with the code as it is
    after: Execution  # the same with the other code
    healthy: list[Execution] = []
    problems: list[str] = []

    @property
    def good(self) -> bool:
        """The failure is gone, and what was healthy still goes the same way."""
        return not self.problems


def validate(
    store: Store, agent: str, run: str | Checkpoint | None = None, *, program: Program, code: str, **how: Unpack[Fix]
) -> Validation:
    """As ``Store.validate``."""
    types, checks, allow = how.get("types", ()), how.get("checks", ()), how.get("allow", ())
    first = job_of(store, agent, run, program, branch=how.get("branch", "main"), types=types)
    fixed = replace(first, code=str(Path(code).resolve()), free=True, allow=list(allow), reads=how.get("reads", False))
    if not Path(code).is_dir():
        raise BadOption(f"there is no directory {code}", hint="Name the directory that has the new code.")
    asked = list(checks) or [""]
    jobs = [replace(first, check=check) for check in asked] + [replace(fixed, check=check) for check in asked]
    jobs += [job_of(store, name, id, program, code=code, types=types) for name, id in how.get("healthy", ())]
    found = _named(executed(jobs, tell=how.get("progress")))
    old, new, rest = found[: len(asked)], found[len(asked) : 2 * len(asked)], found[2 * len(asked) :]
    return Validation(old[0], new[0], rest, [*_problems(asked, old, new), *_unlike(rest)])


def _problems(checks: Sequence[str], old: list[Execution], new: list[Execution]) -> list[str]:
    found = []
    if why := next((one.unknown for one in old if one.unknown), ""):
        found.append(f"nobody can say whether it fails with the code as it is: {why}")
    elif not any(fails(one) or one.status == "failed" for one in old):
        found.append("with the code as it is, nothing fails: there is no failure that could be gone")
    for check, was, one in zip(checks, old, new, strict=True):
        if one.unknown or (one.partial and not was.partial):
            found.append(f"nobody can say: {one.unknown or f'it is {one.status}'}")
        elif one.status == "failed":
            found.append(f"it still fails: {one.error}")
        elif one.check is False:
            found.append(f"it still fails: {check} does not hold")
        elif one.suspect:
            found.append(f"an invariant does not hold at {one.suspect[0]}")
        if found:
            break
    return found


def _unlike(healthy: list[Execution]) -> list[str]:
    return [
        f"run {one.run} of {one.agent} goes another way: {one.unknown or one.difference}"
        for one in healthy
        if not one.same
    ]


def fails(one: Execution) -> bool:
    """Whether an execution shows the failure that is looked for: its check does not hold; without one, it raised."""
    return one.check is False if one.check is not None else one.status == "failed"
