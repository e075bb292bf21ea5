"""Crashes in an agent's history: entries that name a dump, and branches that go on from one.

Owns their key and where such a branch begins. Knows nothing of dumps: it keeps the name of one as text. What always
holds: a branch that goes on after a crash knows everything that was done outside until then, unless the crashed one has
gone on itself; nothing is changed there.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.graph import Graph
from holdfast.errors import UnknownRevision
from holdfast.store.changes import Said, now_us
from holdfast.store.cipher import digest
from holdfast.store.rows import Agent

if TYPE_CHECKING:
    from holdfast.agent.store import Store


def note(store: Store, agent: Agent, body: dict[str, Any]) -> None:
    """Write an entry about a crash. It needs no lease: whoever outlives the writer may tell.

    It has happened, also where memory goes back.
    """
    store._db.change(lambda change: change.say(agent.a, Said(body, _key(agent.uuid))), inside=True)


def told(store: Store, agent: Agent) -> list[dict[str, Any]]:
    """What was noted about crashes, newest first, also of what it is a copy of, until it was copied."""
    entries = Graph(store._db.view, agent).under(keys(agent))
    return [
        {"when": datetime.fromtimestamp(entry.at / 1e6, UTC), **entry.body}
        for entry in sorted(entries, key=lambda entry: entry.at, reverse=True)
    ]


def take_up(store: Store, name: str, branch: str, checkpoint: str, new: str, dump: str) -> Checkpoint:
    """Begin a branch at a checkpoint that a dump names, linked with the dump; returns where it begins.

    While the checkpoint is the head of ``branch``, all records of that one are inherited, those after the
    checkpoint, too: what was done outside before the crash is known there and is not done again.
    """
    store._check_writable()
    store.flush()
    agent = store._agent_row(name)
    view = store._db.view
    point = view.find(bytes.fromhex(checkpoint))
    if point is None or not Graph(view, agent).sees(point):
        raise UnknownRevision(
            f"checkpoint {checkpoint[:12]} is not in the history of {name!r}",
            hint="See `holdfast log --all`: it may be another store's, or was forgotten.",
        )
    crashed = view.branch(agent.a, branch)
    end = crashed.end if crashed is not None and crashed.head == point.n else None
    store._add_branch(agent, new, point, {"dump": dump}, end=end)
    body = {"what": "rehydrate", "dump": dump, "branch": new, "checkpoint": checkpoint, "at": now_us() / 1e6}
    note(store, agent, body)
    return Checkpoint.of(store, agent, point)


def is_taken(store: Store, name: str, branch: str) -> bool:
    """Whether a branch or tag of that name exists."""
    agent = store._agent_row(name)
    view = store._db.view
    return view.branch(agent.a, branch) is not None or view.tag(agent.a, branch) is not None


def keys(agent: Agent) -> list[bytes]:
    """What the log keeps crashes of an agent under, and those of what it is a copy of."""
    return [_key(uuid) for uuid in (agent.uuid, *(uuid for uuid, *_ in agent.body.get("origins", ())))]


def _key(agent: bytes) -> bytes:
    return digest(b"crash", agent)[:16]
