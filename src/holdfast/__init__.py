"""Holdfast keeps autonomous agents' state safe: checkpoint, resume, roll back, branch, diff, verify.

These are the public names. Importing this module opens no file and loads no optional package; each name's room is
loaded when the name is first used, so that a program pays for what it uses.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from holdfast import errors
from holdfast.errors import (
    AgentBusy,
    Damaged,
    DetachedChange,
    Fenced,
    HoldfastError,
    Stale,
    Unencodable,
    UnknownRevision,
    UnknownType,
)

if TYPE_CHECKING:
    from holdfast.agent.agent import Agent, Rollback
    from holdfast.agent.changes import Change, Diff
    from holdfast.agent.checkpoint import Checkpoint
    from holdfast.agent.store import AgentInfo, Store
    from holdfast.agent.store import open_store as open
    from holdfast.agent.verify import Problem, VerifyReport
    from holdfast.codec.codes import Record
    from holdfast.codec.document import MISSING, Document
    from holdfast.codec.plain import plain
    from holdfast.codec.types import register

    __version__: str

__all__ = [
    "MISSING",
    "Agent",
    "AgentBusy",
    "AgentInfo",
    "Change",
    "Checkpoint",
    "Damaged",
    "DetachedChange",
    "Diff",
    "Document",
    "Fenced",
    "HoldfastError",
    "Problem",
    "Record",
    "Rollback",
    "Stale",
    "Store",
    "Unencodable",
    "UnknownRevision",
    "UnknownType",
    "VerifyReport",
    "errors",
    "open",
    "plain",
    "register",
]

_HOMES = {
    "MISSING": ("holdfast.codec.document", "MISSING"),
    "Agent": ("holdfast.agent.agent", "Agent"),
    "AgentInfo": ("holdfast.agent.store", "AgentInfo"),
    "Change": ("holdfast.agent.changes", "Change"),
    "Checkpoint": ("holdfast.agent.checkpoint", "Checkpoint"),
    "Diff": ("holdfast.agent.changes", "Diff"),
    "Document": ("holdfast.codec.document", "Document"),
    "Problem": ("holdfast.agent.verify", "Problem"),
    "Record": ("holdfast.codec.codes", "Record"),
    "Rollback": ("holdfast.agent.agent", "Rollback"),
    "Store": ("holdfast.agent.store", "Store"),
    "VerifyReport": ("holdfast.agent.verify", "VerifyReport"),
    "open": ("holdfast.agent.store", "open_store"),
    "plain": ("holdfast.codec.plain", "plain"),
    "register": ("holdfast.codec.types", "register"),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("holdfast")
    if name not in _HOMES:
        msg = f"module 'holdfast' has no attribute {name!r}"
        raise AttributeError(msg)
    module, attribute = _HOMES[name]
    value: object = getattr(_import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
