"""What is different when a run is executed again, and what it may do outside then.

Owns the job that says so, as it travels to another process, and its meaning there. Must not know how a run is executed.
What always holds: a job is data: values in it are encoded as they are in a store, and what it names of a program was
named by whoever made it; without a change nothing is different, and nothing is allowed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, format_path
from holdfast.run.durables import Durable, known
from holdfast.run.effects import OWN
from holdfast.run.past import RunPast
from holdfast.run.programs import function_of, is_file, module_of
from holdfast.run.tools import TOOLS, Tool
from holdfast.travel.expressions import Expression, Look, parse_path

_TOOLS = "See `holdfast effects` for their names."
_NTH = re.compile(r"(.+)#(\d+)\Z")
_FREE = frozenset({"holdfast.now", "holdfast.random", "holdfast.uuid", "holdfast.mode", "holdfast.sleep"})
"""Reads of this package that nobody needs to allow: time and chance of a history that did not happen."""


class Job(Struct, omit_defaults=True):
    """One execution: which run of which store, with which program, what is different, and what is to be found out."""

    place: str = ""
    agent: str = ""
    branch: str = "main"
    run: str | None = None
    at: str = ""  # the checkpoint that it was named by: a rollback may have left it behind
    program: str = ""
    base: str = ""  # the directory that relative names mean
    code: str = ""  # a directory with other code: it comes first
    types: list[str] = []
    name: str = ""  # what people call this variation
    results: list[tuple[str, str]] = []  # position, TOOL or TOOL#N, and an encoded value
    args: dict[str, str] = {}
    state: list[tuple[str, str, str]] = []  # path, encoded value or empty: take it away; after which checkpoint
    tools: dict[str, str] = {}  # name -> MODULE:FUNCTION
    allow: list[str] = []
    reads: bool = False
    free: bool = False  # go on where the ways part
    keep: bool = False  # give the states at checkpoints back
    between: tuple[str, str] = ("", "")  # or those at all steps between these two checkpoints
    check: str = ""  # an expression, or MODULE:FUNCTION
    watch: str = ""  # a path of the state
    watch_check: bool = False
    step: int = -1  # debug: stop here
    debug: str = ""  # pdb, dap
    dap: dict[str, Any] = {}  # where the conversation with an editor is; ``step`` counts lines then
    until: str = ""  # debug: the newest step before ``step`` at which this holds
    limit_s: float = 600.0

    @property
    def varies(self) -> bool:
        return bool(self.results or self.args or self.state or self.tools or self.free)


def put(value: Any, registry: Registry | None = None) -> str:
    """A value as it stands in a job."""
    return encode(value, registry or Registry()).hex()


class Variation:
    """A job's changes, in the process that executes it."""

    def __init__(self, job: Job, registry: Registry) -> None:
        self.free, self.keep, self.between = job.varies, job.keep, job.between
        self.tools: Collection[str] = job.tools.keys()
        self.function: Durable | None = None
        self._reads, self._allow = job.reads, set(job.allow)
        self._used: set[str] = set()  # results that a call was given
        self._results = [(at, decode(bytes.fromhex(value), registry)) for at, value in job.results]
        self._args = {name: decode(bytes.fromhex(value), registry) for name, value in job.args.items()}
        self._state = [
            (parse_path(path), [decode(bytes.fromhex(value), registry)] if value else [], bytes.fromhex(at))
            for path, value, at in job.state
        ]

    def result_of(self, path: str, tool: str, number: int) -> tuple[Any] | None:
        """What a call is to return, alone in a tuple; None: nobody says."""
        for at, value in self._results:
            nth = _NTH.match(at)
            if at in {path, tool} or (nth is not None and nth[1] == tool and int(nth[2]) == number):
                self._used.add(at)
                return (value,)
        return None

    def check_named(self, past: RunPast) -> None:
        """Refuse what was named and is nowhere, neither in the record nor in what was executed: it changed nothing."""
        counts = Counter(call.tool for call in past.calls.values())
        for at, _ in self._results:
            nth = _NTH.match(at)
            there = at in counts or at in past.calls or (nth is not None and int(nth[2]) < counts[nth[1]])
            if not there and at not in self._used:
                calls = ", ".join(f"{tool} ({count})" for tool, count in sorted(counts.items())) or "none"
                raise BadOption(f"there is no tool or call {at!r} in run {past.id}", hint=f"Its calls: {calls}.")
        for name in sorted(self._allow):
            if name not in counts and TOOLS.find(name) is None:
                raise BadOption(f"the program has no tool {name!r} that could be allowed", hint=_TOOLS)
        saved = {one.id for one in past.saved.values()}
        for _, _, after in self._state:
            if after and after not in saved:
                what = f"checkpoint {after.hex()[:12]}, which the state was to change after, is not of run {past.id}"
                raise BadOption(what, hint="See `holdfast log` for those that were taken in it.")

    def allows(self, tool: Tool) -> bool:
        """Whether a call may be made that the record does not answer."""
        if tool.name.startswith(OWN):
            return tool.name in _FREE
        return tool.name in self._allow or (tool.kind == "read" and self._reads)

    def arguments(
        self, made: Durable, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the run, with those that are to be others."""
        if not self._args:
            return args, kwargs
        first, *names = made.binder.signature.parameters
        for name in self._args.keys() - set(names):
            raise BadOption(f"{made.name} has no argument {name!r}", hint=f"It has: {', '.join(names) or 'none'}.")
        given = {first: agent, **made.given(agent, args, kwargs), **self._args}
        args, kwargs = made.binder.spread(given)
        return args[1:], kwargs

    def change_state(self, agent: Any, checkpoint: bytes = b"") -> None:
        """The run begins, or has come by a checkpoint: change what is to be changed there."""
        for path, values, at in self._state:
            if at == checkpoint:
                _change(agent.state, path, values)


def _change(state: Any, path: tuple[Any, ...], values: Sequence[Any]) -> None:
    if not path:
        raise BadOption("a change of the state needs a path", hint="Write it like budget or messages[3].content.")
    try:
        for part in path[:-1]:
            state = state[part]
        if values:
            state[path[-1]] = values[0]
        else:
            del state[path[-1]]
    except (LookupError, TypeError):
        what = f"the state has nothing at {format_path(path)} that could be changed"
        raise BadOption(what, hint="See `holdfast show`.") from None


# -- the program ------------------------------------------------------------------------------------------------------


def loaded(job: Job, variation: Variation) -> None:
    """Import the program that the job names."""
    for directory in (job.base, job.code):
        if directory:
            import sys

            sys.path.insert(0, directory)
    place, colon, _ = job.program.rpartition(":") if ":" in Path(job.program).name else (job.program, "", "")
    if is_file(place):
        place = _file(job, place)
    text = f"{place}{job.program[job.program.rindex(':') :]}" if colon else place
    if colon:
        variation.function = known(function_of(text))
    else:
        module_of(text)


def replace_tools(job: Job) -> None:
    """Put in the functions that the job names in place of the program's, which is loaded."""
    for name, function in job.tools.items():
        found = TOOLS.find(name)
        if found is None:
            raise BadOption(f"the program has no tool {name!r}", hint=_TOOLS)
        found.function = callable_of(function, job)


def _file(job: Job, place: str) -> str:
    path = Path(job.base, place)
    if job.code:
        below = path.relative_to(job.base) if path.is_relative_to(job.base) else Path(path.name)
        path = next((one for one in (Path(job.code, below), Path(job.code, path.name)) if one.is_file()), path)
    return str(path)


def callable_of(text: str, job: Job) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION or FILE.py:FUNCTION names, a tool or not."""
    place, _, name = text.rpartition(":")
    found = getattr(module_of(_file(job, place) if is_file(place) else place), name, None)
    inner = getattr(found, "tool", None)
    function = inner.function if isinstance(inner, Tool) else found
    if not callable(function):
        raise BadOption(f"{place} has no function {name!r}", hint="Write it MODULE:FUNCTION or FILE.py:FUNCTION.")
    return function


def names_function(text: str) -> bool:
    """Whether a check is a function, not an expression."""
    return re.fullmatch(r"[\w./+-]+:[\w.]+", text) is not None


def checker(text: str, job: Job) -> Callable[[Any], bool]:
    """What an agent's state is asked: true is good. A function that returns None has found nothing wrong."""
    if names_function(text):
        function = callable_of(text, job)

        def call(agent: Any) -> bool:
            answer = function(agent.state)
            return answer is None or bool(answer)

        return call
    question = Expression(text)
    return lambda agent: question.holds(Look.of(agent._document))
