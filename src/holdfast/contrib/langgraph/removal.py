"""Removing LangGraph checkpoints: whole threads, all but the newest, or what some runs made.

Owns what may be removed. How checkpoints are forgotten is the store's business. What always holds: only what LangGraph
made is removed; of a thread that stays, what people have tagged and where branches of theirs stand stays, too, and with
each checkpoint those from which its delta channels are rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import name_key
from holdfast.contrib.langgraph.thread import ROOT, Thread, about_of, has_thread
from holdfast.contrib.langgraph.tuples import Reader, agent_of
from holdfast.errors import BadName
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, TagRow

if TYPE_CHECKING:
    from holdfast.contrib.langgraph.saver import HoldfastSaver


def check_thread(saver: HoldfastSaver, row: AgentRow) -> None:
    """Raise ``BadName`` unless an agent is a LangGraph thread, or nothing yet, or gone meanwhile."""
    catalog = saver.store._catalog
    main = catalog.branch(row.a, name_key(ROOT))
    if main is not None and main.head:
        ours = has_thread(Manifest.decode(catalog.checkpoint(main.head).manifest))
    else:  # all of its checkpoints may have been removed; records of effects are no thread's
        rows = Line(saver.store, row).rows()
        ours = main is not None and all(has_thread(Manifest.decode(one.manifest)) for one in rows)
        ours = ours and not any(catalog.line(branch.b).count for branch in catalog.branches(row.a))
    if not ours and catalog.agent_row(row.a) is not None:
        raise BadName(
            f"agent {body_of(row)['name']!r} is not a LangGraph thread; nothing was changed",
            hint="`holdfast remove`, `holdfast retain` and `holdfast clone` are for agents of every kind.",
        )


@contextmanager
def alone(saver: HoldfastSaver, name: str) -> Iterator[Thread | None]:
    """The thread, with this process as its only writer and nothing on its way; None when there is no such thread."""
    row = agent_of(saver.store, name)
    if row is None:
        yield None
        return
    check_thread(saver, row)
    with saver._at_work(name) as thread, thread.lock:
        thread.become_writer()
        try:
            check_thread(saver, thread.row)
            yield thread
        finally:
            thread.forget()


def remove(saver: HoldfastSaver, name: str) -> None:
    """Remove a thread, also one that is still arriving."""
    row = agent_of(saver.store, name)
    if row is not None and saver.store._half(row):
        check_thread(saver, row)
        saver.store.remove(name)
        return
    with alone(saver, name) as thread:
        if thread is not None:
            saver.store.remove(thread.name)
            thread.release()  # there is nothing left that it could be for


def keep_latest(saver: HoldfastSaver, name: str) -> None:
    """Forget all but the checkpoint at which each namespace stands, and what people have named."""
    with alone(saver, name) as thread:
        if thread is None:
            return
        bad = {row.n for row in saver.store._catalog.validities(thread.row.a)}

        def older(reader: Reader) -> list[CheckpointRow]:
            head = reader.branch.head
            good = next((row.n for row in reader.line.left(head) if row.n not in bad), head) if head in bad else head
            return [row for row in reader.line.rows() if row.n not in {head, good}]

        _forget(saver, thread, older)


def delete_for_runs(saver: HoldfastSaver, run_ids: set[str], names: Sequence[str]) -> None:
    """Forget what these runs made."""

    def made(reader: Reader) -> list[CheckpointRow]:
        gone = {about["id"] for _, about, _ in reader.states() if str(about["metadata"].get("run_id", "")) in run_ids}
        return [row for name in gone if (row := reader.find(name)) is not None]

    for name in names:
        if any(made(reader) for reader in Reader.all_of(saver, name)):
            with alone(saver, name) as thread:
                if thread is not None:
                    _forget(saver, thread, made)


def _forget(saver: HoldfastSaver, thread: Thread, choose: Callable[[Reader], list[CheckpointRow]]) -> None:
    catalog, agent = saver.store._catalog, thread.row
    readers = Reader.all_of(saver, thread.name)
    namespaces = {reader.branch.b for reader in readers}

    def named(branches: Sequence[BranchRow], tags: Sequence[TagRow]) -> set[int]:
        return {tag.n for tag in tags} | {branch.head for branch in branches if branch.b not in namespaces}

    doomed = {row.n for reader in readers for row in choose(reader)}
    doomed -= named(catalog.branches(agent.a), catalog.tags(agent.a))
    for reader in readers:
        for row in reader.line.rows():
            if row.n not in doomed and row.parent in doomed:
                doomed -= set(_rebuilt_from(reader, row))
    if not doomed:
        return
    # A tag needs no lease: one may have come meanwhile.
    if not saver.store._forget(agent, doomed, unless=lambda *now: not doomed.isdisjoint(named(*now))).done:
        _forget(saver, thread, choose)


def _rebuilt_from(reader: Reader, row: CheckpointRow) -> Iterator[int]:
    """The ancestors of a checkpoint back to where all of its delta channels were stored whole."""
    counted = about_of(reader.state_at(row))["metadata"].get("counters_since_delta_snapshot") or ()
    missing = set(counted) - {name for name, _ in Manifest.decode(row.manifest).sections}
    for above in reader.line.up(row.parent) if missing else ():
        yield above.n
        missing -= {name for name, _ in Manifest.decode(above.manifest).sections}
        if not missing:
            return
