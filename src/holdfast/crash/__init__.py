"""Failure evidence: dumps are taken, written, read and explored here.

These are the room's public names. Each is loaded when it is first used, so that a program that never fails pays
nothing.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.crash.agents import rehydrate
    from holdfast.crash.dump import Dump, open_dump
    from holdfast.crash.hooks import Installed, install
    from holdfast.crash.inside import add_part, capture
    from holdfast.crash.kinds import Limits
    from holdfast.crash.memory import Snapshot, heap

__all__ = [
    "Dump",
    "Installed",
    "Limits",
    "Snapshot",
    "add_part",
    "capture",
    "heap",
    "install",
    "open_dump",
    "rehydrate",
]

_HOMES = {
    "Dump": "holdfast.crash.dump",
    "Installed": "holdfast.crash.hooks",
    "Limits": "holdfast.crash.kinds",
    "Snapshot": "holdfast.crash.memory",
    "add_part": "holdfast.crash.inside",
    "capture": "holdfast.crash.inside",
    "heap": "holdfast.crash.memory",
    "install": "holdfast.crash.hooks",
    "open_dump": "holdfast.crash.dump",
    "rehydrate": "holdfast.crash.agents",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        msg = f"module 'holdfast.crash' has no attribute {name!r}"
        raise AttributeError(msg)
    value: object = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
