"""Failure evidence: dumps are taken, written, read and explored here.

These are the room's public names. Each is loaded when it is first used, so that a program that never fails pays
nothing.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.crash.dump import Dump, open_dump
    from holdfast.crash.limits import Limits
    from holdfast.crash.taking import add_part, capture

__all__ = ["Dump", "Limits", "add_part", "capture", "open_dump"]

_HOMES = {
    "Dump": "holdfast.crash.dump",
    "Limits": "holdfast.crash.limits",
    "add_part": "holdfast.crash.taking",
    "capture": "holdfast.crash.taking",
    "open_dump": "holdfast.crash.dump",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        msg = f"module 'holdfast.crash' has no attribute {name!r}"
        raise AttributeError(msg)
    value: object = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
