"""Holdfast keeps autonomous agents' state safe: checkpoint, resume, roll back, branch, diff, verify.

These are the public names. Importing this module opens no file and loads no optional package; each name's room is
loaded when the name is first used, so that a program pays for what it uses.
"""

from __future__ import annotations

import gc as _gc
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from holdfast import errors
from holdfast.errors import (
    AgentBusy,
    Cancelled,
    Damaged,
    DetachedChange,
    Diverged,
    FailedBeforeEffect,
    Fenced,
    HoldfastError,
    InDoubt,
    MaybeRepeated,
    NoAgent,
    RunUnfinished,
    Stale,
    ToolFailed,
    Unencodable,
    UnknownRevision,
    UnknownType,
    Waiting,
)

if TYPE_CHECKING:
    from holdfast import crash
    from holdfast.agent import keys
    from holdfast.agent.bundle import import_bundle
    from holdfast.agent.changes import Change, Diff
    from holdfast.agent.checkpoint import Checkpoint
    from holdfast.agent.cost import Costs
    from holdfast.agent.fleet import AgentInfo, Page
    from holdfast.agent.move import RestoreReport
    from holdfast.agent.policy import Policy
    from holdfast.agent.repair import RepairReport, repair
    from holdfast.agent.retention import RetentionReport
    from holdfast.agent.transfer import TransferReport
    from holdfast.agent.verify import Problem, VerifyReport
    from holdfast.agent.when import When
    from holdfast.codec.classes import Record
    from holdfast.codec.document import MISSING, Document, plain
    from holdfast.codec.types import register
    from holdfast.run.durables import durable
    from holdfast.run.effects import Absent, Effect, Found, Unknown
    from holdfast.run.forking import ForkPlan
    from holdfast.run.handle import Agent
    from holdfast.run.listing import RunInfo, SignalInfo
    from holdfast.run.queues import QueueInfo, queue
    from holdfast.run.resilience import Breaker
    from holdfast.run.rollback import RollbackPlan
    from holdfast.run.schedule import ScheduleInfo
    from holdfast.run.scope import current, effect
    from holdfast.run.store import Store
    from holdfast.run.store import open_store as open
    from holdfast.run.streams import Streamed
    from holdfast.run.tools import tool

    __version__: str

__all__ = [
    "MISSING",
    "Absent",
    "Agent",
    "AgentBusy",
    "AgentInfo",
    "Breaker",
    "Cancelled",
    "Change",
    "Checkpoint",
    "Costs",
    "Damaged",
    "DetachedChange",
    "Diff",
    "Diverged",
    "Document",
    "Effect",
    "FailedBeforeEffect",
    "Fenced",
    "ForkPlan",
    "Found",
    "HoldfastError",
    "InDoubt",
    "MaybeRepeated",
    "NoAgent",
    "Page",
    "Policy",
    "Problem",
    "QueueInfo",
    "Record",
    "RepairReport",
    "RestoreReport",
    "RetentionReport",
    "RollbackPlan",
    "RunInfo",
    "RunUnfinished",
    "ScheduleInfo",
    "SignalInfo",
    "Stale",
    "Store",
    "Streamed",
    "ToolFailed",
    "TransferReport",
    "Unencodable",
    "Unknown",
    "UnknownRevision",
    "UnknownType",
    "VerifyReport",
    "Waiting",
    "When",
    "crash",
    "current",
    "durable",
    "effect",
    "errors",
    "import_bundle",
    "keys",
    "open",
    "plain",
    "queue",
    "register",
    "repair",
    "tool",
]

_HOMES = {
    "MISSING": ("holdfast.codec.document", "MISSING"),
    "Absent": ("holdfast.run.effects", "Absent"),
    "Agent": ("holdfast.run.handle", "Agent"),
    "AgentInfo": ("holdfast.agent.fleet", "AgentInfo"),
    "Breaker": ("holdfast.run.resilience", "Breaker"),
    "Change": ("holdfast.agent.changes", "Change"),
    "Checkpoint": ("holdfast.agent.checkpoint", "Checkpoint"),
    "Costs": ("holdfast.agent.cost", "Costs"),
    "Diff": ("holdfast.agent.changes", "Diff"),
    "Document": ("holdfast.codec.document", "Document"),
    "Effect": ("holdfast.run.effects", "Effect"),
    "ForkPlan": ("holdfast.run.forking", "ForkPlan"),
    "Found": ("holdfast.run.effects", "Found"),
    "Page": ("holdfast.agent.fleet", "Page"),
    "Policy": ("holdfast.agent.policy", "Policy"),
    "Problem": ("holdfast.agent.verify", "Problem"),
    "QueueInfo": ("holdfast.run.queues", "QueueInfo"),
    "Record": ("holdfast.codec.classes", "Record"),
    "RepairReport": ("holdfast.agent.repair", "RepairReport"),
    "RestoreReport": ("holdfast.agent.move", "RestoreReport"),
    "RetentionReport": ("holdfast.agent.retention", "RetentionReport"),
    "RollbackPlan": ("holdfast.run.rollback", "RollbackPlan"),
    "RunInfo": ("holdfast.run.listing", "RunInfo"),
    "ScheduleInfo": ("holdfast.run.schedule", "ScheduleInfo"),
    "SignalInfo": ("holdfast.run.listing", "SignalInfo"),
    "Store": ("holdfast.run.store", "Store"),
    "Streamed": ("holdfast.run.streams", "Streamed"),
    "TransferReport": ("holdfast.agent.transfer", "TransferReport"),
    "Unknown": ("holdfast.run.effects", "Unknown"),
    "VerifyReport": ("holdfast.agent.verify", "VerifyReport"),
    "When": ("holdfast.agent.when", "When"),
    "current": ("holdfast.run.scope", "current"),
    "durable": ("holdfast.run.durables", "durable"),
    "effect": ("holdfast.run.scope", "effect"),
    "import_bundle": ("holdfast.agent.bundle", "import_bundle"),
    "open": ("holdfast.run.store", "open_store"),
    "plain": ("holdfast.codec.document", "plain"),
    "queue": ("holdfast.run.queues", "queue"),
    "register": ("holdfast.codec.types", "register"),
    "repair": ("holdfast.agent.repair", "repair"),
    "tool": ("holdfast.run.tools", "tool"),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("holdfast")
    if name == "keys":
        return _import_module("holdfast.agent.keys")
    if name == "crash":
        return _import_module("holdfast.crash")
    if name not in _HOMES:
        msg = f"module 'holdfast' has no attribute {name!r}"
        raise AttributeError(msg)
    module, attribute = _HOMES[name]
    collects = _gc.isenabled()
    try:
        _gc.disable()  # all that is loaded stays: looking for garbage in it takes a tenth of the time
        value: object = getattr(_import_module(module), attribute)
    finally:
        if collects:
            _gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
