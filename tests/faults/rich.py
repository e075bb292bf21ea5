"""A small store that has every kind of record, and everything that can be read from a store, as one value.

``build`` makes the store, ``export`` reads all of it: two stores with equal exports answer every question alike.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

import holdfast
import holdfast.agent.store  # its limits are changed
from holdfast.codec.values import encode
from tests.limits import limits

# Limits as small as the store, so that a few kilobytes have index nodes on two levels, bulk values and several seals.
SMALL = {
    "LEAF_MIN_BYTES": 64,
    "LEAF_TARGET_BYTES": 256,
    "LEAF_MAX_BYTES": 512,
    "LEAF_MAX_ITEMS": 8,
    "INDEX_MIN_ENTRIES": 2,
    "INDEX_MAX_ENTRIES": 4,
    "INLINE_MAX_BYTES": 256,
    "BULK_MIN_BYTES": 1500,
    "SEAL_CHECKPOINTS": 5,
    "FOLD_MIN": 2,
    "EXTEND_BYTES": 512,
    "EXTEND_ROOM_BYTES": 0,
}


def small_limits():
    return limits(SMALL)


class Mood(enum.Enum):
    CALM = "calm"
    BUSY = "busy"


@dataclass
class Point:
    x: int
    y: float
    mood: Mood = Mood.CALM


TYPES = [Point, Mood]


@holdfast.tool(name="rich.book", effect="idempotent")
def book(what):
    return {"booked": what}


@holdfast.tool(name="rich.look", effect="read")
def look(what):
    return ["seen", what]


@holdfast.durable(name="rich.journey")
def journey(agent, count):
    """A run that reads, acts and saves."""
    for number in range(count):
        look(f"offer {number}")
        done = book(f"flight {number}")
        agent.state.setdefault("bookings", []).append(done)
        agent.checkpoint(f"booked {number}")
    return count


@holdfast.durable(name="rich.patience")
def patience(agent):
    return agent.wait_for("first"), agent.wait_for("second")


def wait(agent: holdfast.Agent) -> None:
    """Execute a run until it waits."""
    with suppress(holdfast.Waiting):
        agent.run(patience.options(id="patient", wait=False))


def write(store: holdfast.Store) -> None:
    """Every kind of record, effects among them."""
    first = store.agent("first@example.com", config={"model": "m"})
    state = first.state
    state["messages"] = [{"role": "user", "content": f"hello {number}"} for number in range(3)]
    state["notes"] = {"a": 1, "tuple": (1, 2), ("k", 1): {1, 2, 3}, "set": {"x", "y"}}
    asked = first.checkpoint("asked")
    for number in range(7):  # crosses a seal
        state["messages"].append({"role": "assistant", "content": f"answer {number} " * 8})
        first.checkpoint(f"answer {number}")
    state["messages"][1]["content"] = "this stays in no node, because it is changed again " * 2
    first.checkpoint("edited")
    state["messages"][1]["content"] = "changed again"
    state["point"] = Point(1, 2.5, Mood.BUSY)
    first.checkpoint("edited again")
    state["numbers"] = list(range(40))
    state["big"] = {"inner": {f"key {number}": "v" * 20 for number in range(20)}, "raw": os.urandom(300)}
    first.checkpoint("big")
    state["bulk"] = os.urandom(1700)
    first.checkpoint("bulk")
    state["numbers"].reverse()
    state["messages"].sort(key=lambda message: message["content"])
    first.checkpoint("sorted")
    del state["messages"][0]
    state["notes"]["set"].discard("x")
    state["notes"]["set"] |= {"z", "w" * 90}
    first.checkpoint("less")
    first.undo()
    first.redo()
    first.tag("kept", asked)
    first.tag("moving", asked)
    first.tag("moving", "bulk")
    first.tag("gone", asked)
    first.untag("gone")
    first.mark("edited", "suspect", "a test said so")
    first.rollback("big")  # leaves a line that no branch reaches
    state["notes"]["after"] = "rollback " * 20
    first.checkpoint("other line")
    side = first.branch("try/b", at="asked")
    side.state["messages"].append({"role": "user", "content": "on the side " * 10})
    side.checkpoint("side")
    second = store.agent("second")
    second.state["counter"] = {"n": 0}
    for number in range(3):
        second.state["counter"]["n"] = number
        second.state["counter"]["text"] = f"{number} " * 50
        second.checkpoint()
    store.agent("empty")
    actor = store.agent("actor")
    actor.run(journey.options(id="one"), 2)
    other = actor.branch("other way", at="booked 0")  # inherits a part of the line
    other.run(journey.options(id="one"), 2)  # goes on from there
    store.signal("actor", "go on", {"with": "care"}, any_run=True)
    for name in ("waiting", "woken"):
        wait(store.agent(name))
        store.signal(name, "second", 2, run="patient")
    store.copy("second", "heir")
    short = store.agent("short")
    for number in range(4):
        short.state["n"] = number
        short.checkpoint()
    store.retain(holdfast.Policy(last=1), ["short"])  # its history begins with a cut
    store.agent("gone").checkpoint("gone")
    store.remove("gone")


def build(path: Path, page_size: int = 4096) -> None:
    """Written and closed: everything is in store.db."""
    with small_limits():
        store = holdfast.open(path, types=TYPES)
        write(store)
        store.close()
    if page_size != 4096:
        # The pages hold the same rows; smaller ones leave less unused room between them, and more structure.
        connection = apsw.Connection(str(path / "store.db"))
        connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        connection.execute(f"PRAGMA page_size={page_size}").fetchall()
        connection.execute("VACUUM")
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.close()
    for name in ("store.db-wal", "store.db-shm"):
        (path / name).unlink(missing_ok=True)


def build_killed(path: Path) -> None:
    """Adds to a store that ``build`` made, and is killed: half of it is in the write-ahead log."""
    child = os.fork()
    if child == 0:
        try:
            with small_limits():
                store = holdfast.open(path, types=TYPES)
                agent = store.agent("second")
                for number in range(4):
                    agent.state["counter"]["n"] = number + 10
                    agent.state["counter"]["text"] = f"{number} " * 40
                    agent.checkpoint(f"late {number}")
                agent.tag("late")
                third = store.agent("third")
                third.state["only"] = [1, 2, 3]
                third.checkpoint("third")
                os.kill(os.getpid(), signal.SIGKILL)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    cut_spare_room(path / "store.db-wal")


def cut_spare_room(log: Path) -> None:
    """Take away the zeros that the store puts behind its log now and then: they hold nothing, so cutting them is
    harmless, and whether they are there depends on the moment of the kill."""
    content = log.read_bytes()
    frame = 24 + int.from_bytes(content[8:12], "big")
    frames = -(-(len(content.rstrip(b"\0")) - 32) // frame)
    os.truncate(log, 32 + frames * frame)


def export(store: holdfast.Store) -> dict[str, Any]:
    """Everything that can be asked of a store."""
    db = store._db
    found: dict[str, Any] = {"agents": {}, "uuid": db.uuid, "created": db.created}
    for row in db.view.agents():
        agent = store.agent(row.name, readonly=True)
        checkpoints = {}
        for checkpoint in agent.log(all=True):
            state = checkpoint.state
            checkpoints[checkpoint.id] = (
                checkpoint.to_json(),
                {section: encode(state.raw_section(section), store._registry) for section in state},
                checkpoint.metadata,
                checkpoint.validity_reason,
            )
        branches = db.view.branches(row.a)
        found["agents"][row.name] = {
            "row": row,
            "branches": branches,
            "tags": sorted(db.view.tags(row.a)),
            "abandoned": [checkpoint.id for checkpoint in agent.abandoned()],
            "checkpoints": checkpoints,
            "effects": [db.view.line(branch.line) for branch in branches],
        }
    found["due"] = [run.to_json() for run in store.due()]
    return found
