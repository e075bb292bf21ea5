"""What led to a checkpoint: the effects recorded before it, and the line of the program that asked for it.

Bisect and blame say it with what they find. Owns nothing but that; reads only what is recorded. What always holds: what
is not recorded is not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.agent.checkpoint import Checkpoint
from holdfast.errors import Damaged, HoldfastError
from holdfast.run import listing
from holdfast.run.effects import Effect
from holdfast.run.host import position_of
from holdfast.run.past import ROLLED_BACK
from holdfast.text import count

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent

_SHOWN = 5


@dataclass(frozen=True)
class Cause:
    """``caller`` is the line that asked for the checkpoint, as ``plan.py:17``, empty where nobody knows.

    ``effects`` are the calls outside that were recorded since the checkpoint before, oldest first; ``stack`` is what
    was going on, and ``run`` the run that it was part of, if it was.
    """

    caller: str
    effects: tuple[Effect, ...] = ()
    run: str = ""
    stack: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """For people."""
        if self.caller:
            yield f"saved at {self.caller}"
        if self.stack:
            yield f"in {' > '.join(self.stack)}"
        if len(self.effects) > _SHOWN:
            yield f"after {count(len(self.effects) - _SHOWN, 'other call')}"
        for effect in self.effects[-_SHOWN:]:
            yield f"after {effect.tool} ({effect.status}, effect {effect.id or effect.number})"

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types, without arguments and results."""
        return {
            "caller": self.caller,
            "run": self.run,
            "stack": list(self.stack),
            "effects": [
                {"id": one.id, "number": one.number, "tool": one.tool, "status": one.status, "path": one.path}
                for one in self.effects
            ],
        }


def cause_of(agent: Agent, checkpoint: Checkpoint, before: Checkpoint | None) -> Cause:
    """What led from one checkpoint to another that descends from it."""
    caller = ""
    with suppress(Damaged):
        said = checkpoint.metadata.get("caller")
        if isinstance(said, list) and len(said) == 2 and said[0]:
            caller = f"{said[0]}:{said[1]}"
    effects: list[Effect] = []
    stack: list[str] = []
    with suppress(HoldfastError):  # what happened outside may be damaged, and the state's history is not
        view = view_of(agent, checkpoint)
        first, last = position_of(before), position_of(checkpoint)
        if last > first:
            some = listing.effects_of(view, first)
            effects = [one for one in some if one.number <= last and one.status != ROLLED_BACK]
        stack = listing.stack_of(view, checkpoint._id)
    run = effects[-1].run if effects else ""
    return Cause(caller, tuple(effects), run, tuple(stack))


def view_of(agent: Agent, checkpoint: Checkpoint) -> listing.View:
    """The line of the branch that the checkpoint was made on, which says what led to it."""
    mine = agent._view()
    branch = agent._db.view.branch(agent._row.a, checkpoint.branch) if checkpoint.branch else None
    return listing.View(agent._store, agent._row, branch) if branch is not None else mine
