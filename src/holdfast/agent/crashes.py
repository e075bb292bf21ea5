"""Crashes in an agent's history: events that name a dump, and branches that go on from one.

Owns their key and where such a branch begins. Knows nothing of dumps: it keeps the name of one as text. What always
holds: a branch that goes on after a crash knows everything that was done outside until then, unless the crashed one has
gone on itself; nothing is changed there.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.line import Line
from holdfast.agent.names import name_key
from holdfast.codec.blocks import digest_of
from holdfast.codec.values import encode
from holdfast.errors import ReadOnly, UnknownRevision
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, Event, LineStart
from holdfast.store.opening import now_us

if TYPE_CHECKING:
    from holdfast.agent.store import Store


def note(store: Store, agent: AgentRow, body: dict[str, Any]) -> None:
    """Write an event about a crash. It needs no lease: whoever outlives the writer may tell."""
    store._catalog.add_events(agent.a, [Event(now_us(), encode(body), _key(agent.uuid))])


def told(store: Store, agent: AgentRow) -> list[dict[str, Any]]:
    """What was noted about crashes, newest first, those from before it was cloned included."""
    line = Line(store, agent)
    rows = line.events_named([_key(uuid) for uuid in line.uuids])
    return [
        {"when": datetime.fromtimestamp(row.at / 1e6, UTC), **body_of(row)}
        for row in sorted(rows, key=lambda row: row.e, reverse=True)
    ]


def take_up(store: Store, name: str, branch: str, checkpoint: str, new: str, dump: str) -> Checkpoint:
    """Begin a branch at a checkpoint that a dump names, linked with the dump; returns where it begins.

    While the checkpoint is the head of ``branch``, all records of that one are inherited, those after the
    checkpoint, too: what was done outside before the crash is known there and is not done again.
    """
    if store._readonly:
        raise ReadOnly("this store was opened read-only")
    store.flush()
    agent = store._agent_row(name)
    line = Line(store, agent)
    row = next((row for row in line.rows() if row.id.hex() == checkpoint), None)
    if row is None:
        raise UnknownRevision(
            f"checkpoint {checkpoint[:12]} is not in the history of {name!r}",
            hint="See `holdfast log --all`: it may be another store's, or was forgotten.",
        )
    crashed = store._catalog.branch(agent.a, name_key(branch))
    inherits = None
    if crashed is not None and crashed.head == row.n:
        end = store._catalog.line(crashed.b)
        inherits = LineStart(crashed.b, end.count, end.chain) if end.count else None
    store._add_branch(agent, new, row, {"dump": dump}, line=inherits)
    body = {"what": "rehydrate", "dump": dump, "branch": new, "checkpoint": checkpoint, "at": now_us() / 1e6}
    note(store, agent, body)
    return Checkpoint.of(store, row, agent)


def is_taken(store: Store, name: str, branch: str) -> bool:
    """Whether a branch or tag of that name exists."""
    agent = store._agent_row(name)
    return store._catalog.branch(agent.a, name_key(branch)) is not None or branch in store._tags(agent.a)


def _key(agent: bytes) -> bytes:
    return digest_of("holdfast.crash", agent)[:16]
