"""Removing LangGraph checkpoints: whole threads, all but the newest, or what some runs made.

Owns what a delta channel still needs of checkpoints that go: its last whole value and the writes since are kept with
the checkpoint that stays, so that it can be rebuilt as before. How checkpoints are forgotten is the store's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.agent.manifest import Manifest
from holdfast.agent.names import name_key
from holdfast.codec.values import encode
from holdfast.contrib.langgraph.reading import Reader
from holdfast.contrib.langgraph.thread import ABOUT, Thread
from holdfast.store.catalog import CheckpointRow, Event
from holdfast.store.opening import now_us

if TYPE_CHECKING:
    from holdfast.contrib.langgraph.saver import HoldfastSaver


@contextmanager
def alone(saver: HoldfastSaver, name: str) -> Iterator[Thread | None]:
    """The thread, with this process as its only writer and nothing on its way; None when there is no such thread."""
    if saver.store._catalog.agent(name_key(name)) is None:
        yield None
        return
    thread = saver._known(name)
    with thread.lock:
        thread.ready()
        try:
            yield thread
        finally:
            thread.forget()
            thread.release()


def keep_latest(saver: HoldfastSaver, name: str) -> None:
    """Forget all but the checkpoint at which each namespace stands."""
    with alone(saver, name) as thread:
        if thread is not None:
            _forget(saver, thread, lambda reader: [row for row in reader.line.rows() if row.n != reader.branch.head])


def delete_for_runs(saver: HoldfastSaver, run_ids: set[str], names: Sequence[str]) -> None:
    """Forget what these runs made."""

    def made(reader: Reader) -> list[CheckpointRow]:
        gone = {about["id"] for _, about, _ in reader.states() if str(about["metadata"].get("run_id", "")) in run_ids}
        return [row for name in gone if (row := reader.find(name)) is not None]

    for name in names:
        if any(made(reader) for reader in Reader.all_of(saver.store, saver._registry, name)):
            with alone(saver, name) as thread:
                if thread is not None:
                    _forget(saver, thread, made)


def _forget(saver: HoldfastSaver, thread: Thread, choose: Any) -> None:
    readers = Reader.all_of(saver.store, saver._registry, thread.name)
    doomed: set[int] = set()
    for reader in readers:
        doomed |= {row.n for row in choose(reader)}
    if not doomed:
        return
    kept: list[Event] = []
    for reader in readers:
        for row in reader.line.rows():
            if row.n not in doomed and row.parent in doomed:
                kept.extend(_deltas(saver, reader, row))
    if kept:
        saver.store._catalog.add_events(thread.row.a, kept, guard=thread.guard)
    saver.store._forget(thread.row, doomed)


def _deltas(saver: HoldfastSaver, reader: Reader, row: CheckpointRow) -> list[Event]:
    """What the delta channels of a checkpoint need of its ancestors, as an event under its key."""
    if row.key is None:
        return []
    about = reader.state_at(row).value(ABOUT)
    held = {name for name, _ in Manifest.decode(row.manifest).sections}
    # A channel that has a version and no value is empty, or a delta channel between two whole values. LangGraph names
    # the latter; where it does not, what could be one counts as one, except the channels that only start nodes.
    counted = about["metadata"].get("counters_since_delta_snapshot")
    names = counted if counted is not None else about["channel_versions"]
    channels = [name for name in names if name not in held and not name.startswith(("branch:to:", "__"))]
    needed = {
        channel: {
            "writes": [[task, encode(value, saver._registry)] for task, _, value in found["writes"]],
            **({"seed": encode(found["seed"], saver._registry)} if "seed" in found else {}),
        }
        for channel, found in reader.deltas(row, channels).items()
        if found["writes"] or "seed" in found
    }
    return [Event(now_us(), encode({"what": "deltas", "channels": needed}), row.key)] if needed else []
