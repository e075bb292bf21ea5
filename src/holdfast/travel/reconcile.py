"""Reconcile: bring an agent to a desired state, by tools that a plan names, or say why that does not succeed.

Owns the difference between what is and what should be, the actions that follow from it, and their limits. Must not know
what the tools do. What always holds: nothing is done before somebody has seen what (``plan``), and a write is done only
with leave; every action is a recorded call, followed by a checkpoint, so that a rollback undoes it; it ends after a
bounded number of actions and rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from inspect import iscoroutinefunction, unwrap
from typing import TYPE_CHECKING, Any

from holdfast.agent.checkpoint import Checkpoint
from holdfast.codec.document import plain
from holdfast.errors import BadOption, format_path
from holdfast.run.tools import Tool
from holdfast.text import count
from holdfast.travel.expressions import MISSING, inside, parse_path

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent

ACTIONS = 20
"""Actions of all rounds together, unless somebody says otherwise."""
ROUNDS = 3
ACTIONS_MAX, ROUNDS_MAX = 1_000, 100
Desired = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
Tools = Mapping[str, Callable[..., Any]]
"""A tool for each place, or pattern of places: ``{"settings.*": configure}``."""


@dataclass(frozen=True)
class Action:
    """A place that is not as it should be, and the tool that changes that; empty where the plan names none."""

    path: tuple[Any, ...]
    have: Any
    want: Any
    tool: str
    kind: str
    call: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    @property
    def where(self) -> str:
        """The path as text."""
        return format_path(self.path)

    def __str__(self) -> str:
        have = "nothing" if self.have is MISSING else f"{self.have!r:.60}"
        return f"{self.where}: {have} -> {self.want!r:.60}  by {self.tool or '(no tool)'} ({self.kind or 'nobody'})"

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types; values as their text."""
        have = None if self.have is MISSING else f"{self.have!r:.200}"
        return {"where": self.where, "have": have, "want": f"{self.want!r:.200}", "tool": self.tool, "kind": self.kind}


@dataclass
class Reconciled:
    """What came of it. ``converged``: everything is as it should be; otherwise ``why`` says what stopped it."""

    agent: str
    done: list[Action] = field(default_factory=list)
    left: list[Action] = field(default_factory=list)
    rounds: int = 0
    why: str = ""
    checkpoint: Checkpoint | None = None

    @property
    def converged(self) -> bool:
        """Whether nothing is left to do."""
        return not self.left

    def __bool__(self) -> bool:
        return self.converged

    def lines(self) -> Iterator[str]:
        """For people."""
        for action in self.done:
            yield f"done  {action}"
        for action in self.left:
            yield f"left  {action}"
        yield f"converged in {count(self.rounds, 'round')}" if self.converged else f"not converged: {self.why}"

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "agent": self.agent,
            "converged": self.converged,
            "why": self.why or None,
            "rounds": self.rounds,
            "done": [action.to_json() for action in self.done],
            "left": [action.to_json() for action in self.left],
            "checkpoint": self.checkpoint.id if self.checkpoint is not None else None,
        }


def plan(agent: Agent, desired: Desired, tools: Tools) -> list[Action]:
    """What would be done now."""
    for pattern, call in tools.items():
        if not isinstance(getattr(call, "tool", None), Tool):
            raise BadOption(f"{pattern}: {call!r:.80} is no tool", hint="Decorate the function with @holdfast.tool.")
        if iscoroutinefunction(unwrap(call)):
            raise BadOption(f"{pattern}: {call!r:.80} is async", hint="Name a plain tool, which may run a loop itself.")
    wanted = desired(agent.state) if callable(desired) else desired
    if not isinstance(wanted, Mapping):
        raise BadOption(
            "a desired state is a mapping", hint='{"settings": {"limit": 10}}, or a function that returns one.'
        )
    return list(_differences(agent, wanted, (), tools))


def _differences(agent: Agent, wanted: Mapping[Any, Any], path: tuple[Any, ...], tools: Tools) -> Iterator[Action]:
    for key, want in wanted.items():
        here = parse_path(key) if not path and isinstance(key, str) else (*path, key)
        have: Any = agent.state
        for part in here:
            have = inside(have, part) if have is not MISSING else MISSING
        have = plain(have) if have is not MISSING else MISSING
        if isinstance(want, Mapping) and isinstance(have, dict):
            yield from _differences(agent, want, here, tools)
        elif have is MISSING or type(have) is not type(want) or have != want:
            text = format_path(here).removeprefix("state.")
            call: Any = next((tool for pattern, tool in tools.items() if fnmatchcase(text, pattern)), None)
            name, kind = (call.tool.name, call.tool.kind) if call is not None else ("", "")
            yield Action(here, have, want, name, kind, call)


def reconcile(
    agent: Agent,
    desired: Desired,
    tools: Tools,
    *,
    yes: bool = False,
    approve: Callable[[Action], bool] | None = None,
    actions: int = ACTIONS,
    rounds: int = ROUNDS,
) -> Reconciled:
    """Act until nothing differs, nothing helps, or a limit is reached.

    A tool is called as ``tool(path, have, want)``, with the path as text, and what it returns is put there; None means
    ``want``. Inside, only reads are done without ``yes`` or the leave of ``approve(action)``.
    """
    if not 1 <= actions <= ACTIONS_MAX or not 1 <= rounds <= ROUNDS_MAX:
        raise BadOption(f"{actions} actions in {rounds} rounds", hint=f"At most {ACTIONS_MAX:,} and {ROUNDS_MAX}.")
    found = Reconciled(agent.name)
    with agent:
        for number in range(1, rounds + 1):
            found.left = plan(agent, desired, tools)
            if not found.left:
                break
            found.rounds = number
            before = left = found.left
            for planned in before:
                action = next((one for one in left if one.path == planned.path), None)
                if action is None:
                    continue  # another one has settled it
                found.why = _refusal(action, yes=yes, approve=approve)
                if len(found.done) >= actions:
                    found.why = found.why or f"the limit of {count(actions, 'action')} is reached"
                if found.why:
                    return found
                _act(agent, action)
                found.done.append(action)
                found.checkpoint = agent.checkpoint(f"reconciled {action.where}"[:200])
                found.left = left = plan(agent, desired, tools)
            if left == before:
                found.why = f"a round of {count(len(left), 'action')} changed nothing"
                return found
    if found.left:
        found.why = f"{count(len(found.left), 'place')} left after {count(rounds, 'round')}"
    return found


def _refusal(action: Action, *, yes: bool, approve: Callable[[Action], bool] | None) -> str:
    if not action.tool:
        return f"the plan names no tool for {action.where}"
    if action.kind != "read" and not yes and not (approve is not None and approve(action)):
        return f"{action.tool} writes, and nobody has approved that"
    return ""


def _act(agent: Agent, action: Action) -> None:
    """Call the tool, and put what it returns where it belongs."""
    have = None if action.have is MISSING else action.have
    text = format_path(action.path).removeprefix("state.")
    result = action.call(text, have, action.want) if action.call is not None else None
    place: Any = agent.state
    for part in action.path[:-1]:
        place = place[part] if part in place or not isinstance(place, dict) else place.setdefault(part, {})
    place[action.path[-1]] = action.want if result is None else result
