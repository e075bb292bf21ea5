"""Holdfast keeps autonomous agents' state safe: checkpoint, resume, roll back, branch, diff, verify.

These are the public names. Importing this module opens no file and loads no optional package; each name's room is
loaded when the name is first used, so that a program pays for what it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import errors
from holdfast import lazy as _lazy
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
    "MISSING": "holdfast.codec.document",
    "Absent": "holdfast.run.effects",
    "Agent": "holdfast.run.handle",
    "AgentInfo": "holdfast.agent.fleet",
    "Breaker": "holdfast.run.resilience",
    "Change": "holdfast.agent.changes",
    "Checkpoint": "holdfast.agent.checkpoint",
    "Costs": "holdfast.agent.cost",
    "Diff": "holdfast.agent.changes",
    "Document": "holdfast.codec.document",
    "Effect": "holdfast.run.effects",
    "ForkPlan": "holdfast.run.forking",
    "Found": "holdfast.run.effects",
    "Page": "holdfast.agent.fleet",
    "Policy": "holdfast.agent.policy",
    "Problem": "holdfast.agent.verify",
    "QueueInfo": "holdfast.run.queues",
    "Record": "holdfast.codec.classes",
    "RepairReport": "holdfast.agent.repair",
    "RestoreReport": "holdfast.agent.move",
    "RetentionReport": "holdfast.agent.retention",
    "RollbackPlan": "holdfast.run.rollback",
    "RunInfo": "holdfast.run.listing",
    "ScheduleInfo": "holdfast.run.schedule",
    "SignalInfo": "holdfast.run.listing",
    "Store": "holdfast.run.store",
    "Streamed": "holdfast.run.streams",
    "TransferReport": "holdfast.agent.transfer",
    "Unknown": "holdfast.run.effects",
    "VerifyReport": "holdfast.agent.verify",
    "When": "holdfast.agent.when",
    "crash": "holdfast.crash:",
    "current": "holdfast.run.scope",
    "durable": "holdfast.run.durables",
    "effect": "holdfast.run.scope",
    "import_bundle": "holdfast.agent.bundle",
    "keys": "holdfast.agent.keys:",
    "open": "holdfast.run.store:open_store",
    "plain": "holdfast.codec.document",
    "queue": "holdfast.run.queues",
    "register": "holdfast.codec.types",
    "repair": "holdfast.agent.repair",
    "tool": "holdfast.run.tools",
}
_load = _lazy.names(__name__, _HOMES)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("holdfast")
    return _load(name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
