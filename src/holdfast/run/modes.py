"""Modes: how well an agent is doing, in words that its program declared.

Owns which mode holds. Must not know what a mode means. What always holds: the mode is folded from the notes of the
line: the one that was set by hand, or a worse one of a breaker that opened since and is not closed again. What a run
was told it is told again when it is executed again.

    declare_modes(agent, *modes)         from the best to the worst; the first is the usual one
    mode_of(agent)                       the mode now, not recorded
    get_mode(agent), set_mode(agent, mode, why="")     as ``agent.mode``: recorded in a run
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import BadName, BadOption, NoAgent
from holdfast.run.context import EFFECT
from holdfast.run.notes import notes_of
from holdfast.run.positions import here
from holdfast.run.tools import tool

NORMAL = "normal"
MODE_MAX = 100
_WHO = "agent"


def declare_modes(agent: Any, *modes: str) -> None:
    """Say which modes there are, from the best to the worst."""
    if not modes or len(set(modes)) != len(modes):
        raise BadOption("modes are one or more different names, from the best to the worst")
    if bad := [mode for mode in modes if not 0 < len(mode) <= MODE_MAX]:
        raise BadName(f"the name of a mode has 1 to {MODE_MAX} characters, not {len(bad[0])}")
    notes_of(agent).modes = modes


def mode_of(agent: Any) -> str:
    """The mode that holds now."""
    notes = notes_of(agent)
    by_hand = notes.find("mode", _WHO)
    mode = str(by_hand.value["mode"]) if by_hand is not None else (notes.modes or (NORMAL,))[0]
    for breaker in notes.all("breaker").values():
        state = breaker.value
        set_since = by_hand is None or state.get("opened", 0) >= by_hand.number
        if state["state"] != "closed" and state.get("mode") and set_since:
            mode = max(mode, state["mode"], key=lambda name: _rank(notes.modes, name))
    return mode


def _rank(modes: tuple[str, ...], name: str) -> int:
    """The place of a mode. One that is not declared in this process is worse than all: somebody meant something."""
    if name in modes:
        return modes.index(name)
    return 0 if name == NORMAL else len(modes)


@tool(name="holdfast.mode", effect="read")
def _read_mode() -> str:
    return mode_of(_agent())


@tool(name="holdfast.set_mode", effect="read")
def _write_mode(mode: str, why: str = "") -> None:
    _set(_agent(), mode, why)


def _agent() -> Any:
    lane = here()
    if lane is None:
        raise NoAgent("no agent is current here")
    return lane.scope.agent


def get_mode(agent: Any) -> str:
    """As mode_of(). In a run it is a recorded answer, because the program may go another way by it."""
    return _read_mode() if _in_run(agent) else mode_of(agent)


def set_mode(agent: Any, mode: str, why: str = "") -> None:
    """Set the mode by hand. It holds until it is set again, or a breaker that opens later asks for a worse one."""
    declared = notes_of(agent).modes
    if mode not in declared and mode != NORMAL:
        raise BadOption(
            f"mode {mode!r} is not declared",
            hint=f"Use one of {', '.join(declared)}." if declared else "Declare it: agent.declare_modes(...).",
        )
    if _in_run(agent):
        _write_mode(mode, why)
    else:
        _set(agent, mode, why)


def _in_run(agent: Any) -> bool:
    lane = here()
    return lane is not None and bool(lane.scope.run_id) and agent is lane.scope.agent and EFFECT.get() is None


def _set(agent: Any, mode: str, why: str) -> None:
    notes_of(agent).put("mode", _WHO, {"mode": mode, "why": why})
    agent.ledger.flush()
