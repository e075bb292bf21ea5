"""Durable functions, tools, and the ledger of what happened outside (docs/design/006-effects.md).

What users need of it are names of ``holdfast`` itself. These are for those who execute other people's functions, as the
command line does. Each is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import lazy as _lazy

if TYPE_CHECKING:
    from holdfast.run.durables import DURABLES, Durable, Options, configured, known
    from holdfast.run.outcomes import told
    from holdfast.run.programs import existing, function_of, module_of
    from holdfast.run.tools import Tool
    from holdfast.run.worker import Worked, Worker

__all__ = [
    "DURABLES",
    "Durable",
    "Options",
    "Tool",
    "Worked",
    "Worker",
    "configured",
    "existing",
    "function_of",
    "known",
    "module_of",
    "told",
]

_HOMES = {
    "DURABLES": "holdfast.run.durables",
    "Durable": "holdfast.run.durables",
    "Options": "holdfast.run.durables",
    "Tool": "holdfast.run.tools",
    "Worked": "holdfast.run.worker",
    "Worker": "holdfast.run.worker",
    "configured": "holdfast.run.durables",
    "existing": "holdfast.run.programs",
    "function_of": "holdfast.run.programs",
    "known": "holdfast.run.durables",
    "module_of": "holdfast.run.programs",
    "told": "holdfast.run.outcomes",
}

__getattr__ = _lazy.names(__name__, _HOMES)
