"""Holdfast keeps autonomous agents' state safe: checkpoint, resume, roll back, branch, diff, verify.

These are the public names. Importing this module opens no file and loads no optional package.
"""

from __future__ import annotations

from holdfast import errors
from holdfast.agent.agent import Agent, Rollback
from holdfast.agent.changes import Change, Diff
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.store import AgentInfo, Store
from holdfast.agent.store import open_store as open  # noqa: A004 - holdfast.open() reads well
from holdfast.codec.codes import Record
from holdfast.codec.document import MISSING, Document
from holdfast.codec.plain import plain
from holdfast.codec.types import REGISTRY
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

register = REGISTRY.register

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
    "Record",
    "Rollback",
    "Stale",
    "Store",
    "Unencodable",
    "UnknownRevision",
    "UnknownType",
    "errors",
    "open",
    "plain",
    "register",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - reading metadata is slow, few ask

        return version("holdfast")
    msg = f"module 'holdfast' has no attribute {name!r}"
    raise AttributeError(msg)
