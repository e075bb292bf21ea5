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
    from holdfast.process.changes import FileChange, FileInfo
    from holdfast.process.claims import WorkspaceInfo
    from holdfast.process.cooperation import freezable
    from holdfast.process.explore import Explored, Tried, explore
    from holdfast.process.images import Frozen, HalfThawed
    from holdfast.process.migration import Migrated, SelfFrozen, freeze_self
    from holdfast.process.point import ForkPoint, fork_point
    from holdfast.process.thaw import Thawed
    from holdfast.process.writer import Saving
    from holdfast.run.durables import durable
    from holdfast.run.effects import Absent, Effect, Found, Unknown
    from holdfast.run.forking import ForkPlan
    from holdfast.run.listing import RunInfo, SignalInfo
    from holdfast.run.queues import QueueInfo, queue
    from holdfast.run.resilience import Breaker
    from holdfast.run.rollback import RollbackPlan
    from holdfast.run.schedule import ScheduleInfo
    from holdfast.run.scope import current, effect
    from holdfast.run.streams import Streamed
    from holdfast.run.tools import tool
    from holdfast.travel.bisect import Bisection
    from holdfast.travel.blame import Blame
    from holdfast.travel.compare import Comparison
    from holdfast.travel.handle import Agent, Store
    from holdfast.travel.handle import open_store as open
    from holdfast.travel.invariants import Invariant, Violation
    from holdfast.travel.watch import Hit, Watchpoint

    __version__: str

__all__ = [
    "MISSING",
    "Absent",
    "Agent",
    "AgentBusy",
    "AgentInfo",
    "Bisection",
    "Blame",
    "Breaker",
    "Cancelled",
    "Change",
    "Checkpoint",
    "Comparison",
    "Costs",
    "Damaged",
    "DetachedChange",
    "Diff",
    "Diverged",
    "Document",
    "Effect",
    "Explored",
    "FailedBeforeEffect",
    "Fenced",
    "FileChange",
    "FileInfo",
    "ForkPlan",
    "ForkPoint",
    "Found",
    "Frozen",
    "HalfThawed",
    "Hit",
    "HoldfastError",
    "InDoubt",
    "Invariant",
    "MaybeRepeated",
    "Migrated",
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
    "Saving",
    "ScheduleInfo",
    "SelfFrozen",
    "SignalInfo",
    "Stale",
    "Store",
    "Streamed",
    "Thawed",
    "ToolFailed",
    "TransferReport",
    "Tried",
    "Unencodable",
    "Unknown",
    "UnknownRevision",
    "UnknownType",
    "VerifyReport",
    "Violation",
    "Waiting",
    "Watchpoint",
    "When",
    "WorkspaceInfo",
    "crash",
    "current",
    "durable",
    "effect",
    "errors",
    "explore",
    "fork_point",
    "freezable",
    "freeze_self",
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
    "Absent": "holdfast.run.effects",
    "Agent": "holdfast.travel.handle",
    "AgentInfo": "holdfast.agent.fleet",
    "Bisection": "holdfast.travel.bisect",
    "Blame": "holdfast.travel.blame",
    "Breaker": "holdfast.run.resilience",
    "Change": "holdfast.agent.changes",
    "Checkpoint": "holdfast.agent.checkpoint",
    "Comparison": "holdfast.travel.compare",
    "Costs": "holdfast.agent.cost",
    "Diff": "holdfast.agent.changes",
    "Document": "holdfast.codec.document",
    "Effect": "holdfast.run.effects",
    "Explored": "holdfast.process.explore",
    "FileChange": "holdfast.process.changes",
    "FileInfo": "holdfast.process.changes",
    "ForkPlan": "holdfast.run.forking",
    "ForkPoint": "holdfast.process.point",
    "Found": "holdfast.run.effects",
    "Frozen": "holdfast.process.images",
    "HalfThawed": "holdfast.process.images",
    "Hit": "holdfast.travel.watch",
    "Invariant": "holdfast.travel.invariants",
    "MISSING": "holdfast.codec.document",
    "Migrated": "holdfast.process.migration",
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
    "Saving": "holdfast.process.writer",
    "ScheduleInfo": "holdfast.run.schedule",
    "SelfFrozen": "holdfast.process.migration",
    "SignalInfo": "holdfast.run.listing",
    "Store": "holdfast.travel.handle",
    "Streamed": "holdfast.run.streams",
    "Thawed": "holdfast.process.thaw",
    "TransferReport": "holdfast.agent.transfer",
    "Tried": "holdfast.process.explore",
    "Unknown": "holdfast.run.effects",
    "VerifyReport": "holdfast.agent.verify",
    "Violation": "holdfast.travel.invariants",
    "Watchpoint": "holdfast.travel.watch",
    "When": "holdfast.agent.when",
    "WorkspaceInfo": "holdfast.process.claims",
    "crash": "holdfast.crash:",
    "current": "holdfast.run.scope",
    "durable": "holdfast.run.durables",
    "effect": "holdfast.run.scope",
    "explore": "holdfast.process.explore",
    "fork_point": "holdfast.process.point",
    "freezable": "holdfast.process.cooperation",
    "freeze_self": "holdfast.process.migration",
    "import_bundle": "holdfast.agent.bundle",
    "keys": "holdfast.agent.keys:",
    "open": "holdfast.travel.handle:open_store",
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
