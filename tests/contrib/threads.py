"""Threads without a graph: checkpoints made by hand, and everything that a saver can be asked about them."""

from __future__ import annotations

from itertools import count
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint
from langgraph.checkpoint.base.id import uuid6

from holdfast.codec.types import REGISTRY
from holdfast.codec.values import encode
from holdfast.contrib.langgraph.types import registry_for

_VERSIONS = count(1_000)
META: Any = {"source": "loop", "step": 0, "parents": {}}


def checkpoint(values: dict[str, Any] | None = None, **more: Any) -> Checkpoint:
    """A well-formed checkpoint with a new id, whose channels all have versions that no other one has."""
    made: Any = {
        "v": 4,
        "id": str(uuid6(clock_seq=-2)),
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": dict(values or {}),
        "channel_versions": dict.fromkeys(values or {}, next(_VERSIONS)),
        "versions_seen": {},
        "updated_channels": None,
    }
    made.update(more)
    return made


def config(thread: Any, ns: str = "", checkpoint_id: str | None = None) -> Any:
    configurable: dict[str, Any] = {"thread_id": thread, "checkpoint_ns": ns}
    if checkpoint_id is not None:
        configurable["checkpoint_id"] = checkpoint_id
    return {"configurable": configurable}


def chain(saver: BaseCheckpointSaver[Any], thread: Any, count: int, *, ns: str = "", start: Any = None) -> list[Any]:
    """Checkpoints in a row, each with what its predecessor had and one message more. Returns their configs."""
    made = []
    at = start or config(thread, ns)
    held = saver.get_tuple(at) if start else None
    messages = list(held.checkpoint["channel_values"]["messages"]) if held else []
    first = len(messages)
    for number in range(first, first + count):
        messages.append(f"{thread} {ns} {number}")
        one = checkpoint({"messages": list(messages), "number": number}, channel_versions={"messages": 1, "number": 1})
        one["channel_versions"] = {"messages": number + 1, "number": number + 1}
        metadata: Any = {"source": "loop" if number else "input", "step": number, "parents": {}}
        at = saver.put(at, one, metadata, one["channel_versions"])
        made.append(at)
    return made


def told(found: Any) -> Any:
    """A checkpoint tuple as plain values that can be compared, with everything that a reader may rely on."""
    if found is None:
        return None
    return {
        "config": found.config["configurable"],
        "checkpoint": found.checkpoint,
        "metadata": found.metadata,
        "parent": found.parent_config["configurable"] if found.parent_config else None,
        "writes": found.pending_writes,
    }


def same(one: Any, other: Any) -> bool:
    """Equal in types, content and order, down to what is not equal to itself: stored as the same bytes."""
    return encode(one, registry_for(REGISTRY)) == encode(other, registry_for(REGISTRY))


def ids(found: Any) -> list[str]:
    return [one.checkpoint["id"] for one in found]


def id_of(at: Any) -> str:
    return str(at["configurable"]["checkpoint_id"])


def everything(saver: Any, thread: Any) -> list[Any]:
    return [told(found) for found in saver.list({"configurable": {"thread_id": thread}})]


def rich(saver: Any, thread: str) -> list[Any]:
    """A thread with a fork, a namespace, writes and several runs. Returns the configs of its root namespace."""
    made = []
    at = config(thread)
    for number in range(6):
        one = checkpoint({"m": [f"{thread} {n}" for n in range(number + 1)]}, channel_versions={"m": number + 1})
        at = saver.put(at, one, {**META, "step": number, "run_id": f"run-{number // 2}"}, {"m": number + 1})
        saver.put_writes(at, [("m", f"write {number}")], f"task {number}", f"~{number}")
        made.append(at)
    side = saver.put(made[2], checkpoint({"m": ["side"]}), {**META, "run_id": "side"}, {"m": 1})
    at = saver.put(made[5], checkpoint({"m": ["on"]}), {**META, "run_id": "run-3"}, {"m": 7})
    chain(saver, thread, 3, ns="inner:1")
    return [*made, side, at]


def renamed(found: list[Any], name: str) -> list[Any]:
    """The same tuples, as another thread's."""
    return [
        {
            **one,
            "config": {**one["config"], "thread_id": name},
            "parent": {**one["parent"], "thread_id": name} if one["parent"] else None,
        }
        for one in found
    ]
