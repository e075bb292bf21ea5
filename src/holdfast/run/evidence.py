"""What an agent has been doing, for a dump: its newest effects, those in doubt, its runs.

Owns the choice of what matters after a failure. Writes nothing. Must not know dumps. What always holds: values are read
as inert data, so no class of the program is asked for anything; everything is bounded.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from holdfast.run.arguments import Passed
from holdfast.run.listing import View, effects_of, runs_of, stack_of

_EFFECTS = 50
_IN_DOUBT = 200
_RUNS = 10


def evidence(view: View, checkpoint: bytes) -> dict[str, Any]:
    """Recent effects (newest last), the ids of those in doubt, unfinished runs, and where the last checkpoint was."""
    view.inert = True
    effects = effects_of(view)
    doubtful = [effect for effect in effects if effect.status == "in doubt"][-_IN_DOUBT:]
    recent = effects[-_EFFECTS:]
    shown = [*(effect for effect in doubtful if all(effect is not other for other in recent)), *recent]
    runs = [info for info in runs_of(view) if info.status not in {"finished", "rolled back"}][-_RUNS:]
    newest = runs[-1] if runs else None
    last = next((effect.path for effect in reversed(effects) if newest is not None and effect.run == newest.id), "")
    stack = stack_of(view, checkpoint) if checkpoint else []
    return {
        "effects": [
            {
                "id": effect.id,
                "tool": effect.tool,
                "kind": effect.kind,
                "status": effect.status,
                "at": effect.at.timestamp(),
                "path": effect.path,
                "run": effect.run,
                "attempt": effect.attempt,
                "args": _shown(effect.args),
                "result": effect.result,
                "error": effect.error,
                "why": effect.why,
            }
            for effect in shown
        ],
        "in_doubt": [effect.id for effect in doubtful],
        "runs": [
            {"id": info.id, "function": info.function, "status": info.status, "error": info.error} for info in runs
        ],
        "run": newest.id if newest is not None else "",
        "function": newest.function if newest is not None else "",
        "path": last,
        "stack": max(_stack(newest.function, last) if newest is not None else [], stack, key=len),
    }


def _shown(value: Any) -> Any:
    """Arguments, with a text for what is not written out."""
    if isinstance(value, Passed):
        return repr(value)
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    return type(value)(map(_shown, value)) if type(value) in {list, tuple} else value


def _stack(function: str, path: str) -> list[str]:
    """The steps on the way to a call: `plan:0/~3/2` is in step plan."""
    return [function, *(unquote(part.rpartition(":")[0]) for part in path.split("/") if ":" in part)]
