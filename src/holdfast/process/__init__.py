"""Everything of an agent that is not state: its files, and its process, in copies or as a whole.

What users need of it are methods of stores and names of ``holdfast`` itself. These are for those who start, stop and
restore processes of others, as the command line does. Each is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import lazy as _lazy

if TYPE_CHECKING:
    from holdfast.process.claims import unmoved
    from holdfast.process.criu import probe
    from holdfast.process.images import Frozen, HalfThawed, name_of
    from holdfast.process.migration import Migrated, left_stopped
    from holdfast.process.thaw import Thawed, unfinished, wait
    from holdfast.process.workspace import inner_path

__all__ = [
    "Frozen",
    "HalfThawed",
    "Migrated",
    "Thawed",
    "inner_path",
    "left_stopped",
    "name_of",
    "probe",
    "unfinished",
    "unmoved",
    "wait",
]

_HOMES = {
    "Frozen": "holdfast.process.images",
    "HalfThawed": "holdfast.process.images",
    "Migrated": "holdfast.process.migration",
    "Thawed": "holdfast.process.thaw",
    "inner_path": "holdfast.process.workspace",
    "left_stopped": "holdfast.process.migration",
    "name_of": "holdfast.process.images",
    "probe": "holdfast.process.criu",
    "unfinished": "holdfast.process.thaw",
    "unmoved": "holdfast.process.claims",
    "wait": "holdfast.process.thaw",
}

__getattr__ = _lazy.names(__name__, _HOMES)
