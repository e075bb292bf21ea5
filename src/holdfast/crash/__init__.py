"""Failure evidence: dumps are taken, written, read and explored here.

These are the room's public names. Each is loaded when it is first used, so that a program that never fails pays
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import lazy as _lazy

if TYPE_CHECKING:
    from holdfast.crash.agents import rehydrate, unfinished
    from holdfast.crash.dump import Dump, open_dump
    from holdfast.crash.folder import found as dumps
    from holdfast.crash.folder import of as folder_of
    from holdfast.crash.hooks import Installed, install
    from holdfast.crash.inside import add_part, capture
    from holdfast.crash.kinds import Limits
    from holdfast.crash.memory import Snapshot, heap
    from holdfast.crash.redaction import Redactor
    from holdfast.crash.summary import dump_json, entry, object_json, stack_json, stacks_json

__all__ = [
    "Dump",
    "Installed",
    "Limits",
    "Redactor",
    "Snapshot",
    "add_part",
    "capture",
    "dump_json",
    "dumps",
    "entry",
    "folder_of",
    "heap",
    "install",
    "object_json",
    "open_dump",
    "rehydrate",
    "stack_json",
    "stacks_json",
    "unfinished",
]

_HOMES = {
    "Dump": "holdfast.crash.dump",
    "Installed": "holdfast.crash.hooks",
    "Limits": "holdfast.crash.kinds",
    "Redactor": "holdfast.crash.redaction",
    "Snapshot": "holdfast.crash.memory",
    "add_part": "holdfast.crash.inside",
    "capture": "holdfast.crash.inside",
    "dump_json": "holdfast.crash.summary",
    "dumps": "holdfast.crash.folder:found",
    "entry": "holdfast.crash.summary",
    "folder_of": "holdfast.crash.folder:of",
    "heap": "holdfast.crash.memory",
    "install": "holdfast.crash.hooks",
    "object_json": "holdfast.crash.summary",
    "open_dump": "holdfast.crash.dump",
    "rehydrate": "holdfast.crash.agents",
    "stack_json": "holdfast.crash.summary",
    "stacks_json": "holdfast.crash.summary",
    "unfinished": "holdfast.crash.agents",
}

__getattr__ = _lazy.names(__name__, _HOMES)
