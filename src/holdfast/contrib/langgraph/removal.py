"""Removing LangGraph checkpoints: whole threads, all but the newest, or what some runs made.

Owns what may be removed. How checkpoints are forgotten is the store's business. What always holds: only what LangGraph
made is removed; of a thread that stays, what people have tagged and where branches of theirs stand stays, too, and with
each checkpoint those from which its delta channels are rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from holdfast.agent.graph import Graph
from holdfast.contrib.langgraph.thread import ROOT, Thread, about_of, has_thread
from holdfast.contrib.langgraph.tools import levels_of
from holdfast.contrib.langgraph.tuples import Reader, agent_of
from holdfast.errors import BadName
from holdfast.run.line import Line
from holdfast.run.past import task_in
from holdfast.store.catalog import View
from holdfast.store.changes import Change
from holdfast.store.rows import Agent, Branch, Point

if TYPE_CHECKING:
    from holdfast.contrib.langgraph.saver import HoldfastSaver


def check_thread(saver: HoldfastSaver, row: Agent) -> None:
    """Raise ``BadName`` unless an agent is a LangGraph thread, or nothing yet, or gone meanwhile."""
    view = saver.store._db.view
    main = view.branch(row.a, ROOT)
    if main is not None and main.head:
        ours = has_thread(view.point(main.head).manifest)
    else:  # all of its checkpoints may have been removed, or its nodes have acted before there was one
        graph = Graph(view, row)
        ours = main is not None and all(has_thread(one.manifest) for one in graph.everything())
        ours = ours and all(_of_nodes(saver, branch) for branch in graph.branches if branch.records)
    if not ours and view.agent(row.name) is not None:
        raise BadName(
            f"agent {row.name!r} is not a LangGraph thread; nothing was changed",
            hint="`holdfast remove`, `holdfast retain` and `holdfast copy` are for agents of every kind.",
        )


def _of_nodes(saver: HoldfastSaver, branch: Branch) -> bool:
    """Whether all calls that are recorded for a branch were made by nodes of a graph."""
    paths = [getattr(record, "path", "") for _, record in Line(saver.store._db, branch.b).records()]
    return all(levels_of(task_in(path))[0].checkpoint for path in paths if path)


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


Choose = Callable[[Reader], list[Point]]
"""What is to go of a namespace."""


def keep_latest(saver: HoldfastSaver, names: Sequence[str]) -> None:
    """Forget all but the checkpoint at which each namespace stands, and what people have named."""

    def older(reader: Reader) -> list[Point]:
        bad, head = reader.graph.view.validities(reader.branch.a), reader.branch.head
        good = next((row.n for row in reader.graph.line(head) if row.n not in bad), head) if head in bad else head
        return [row for row in reader.points() if row.n not in {head, good}]

    for name in names:
        row = agent_of(saver.store, name)
        if row is not None:
            check_thread(saver, row)
    _forget_of(saver, names, older)


def delete_for_runs(saver: HoldfastSaver, run_ids: set[str], names: Sequence[str]) -> None:
    """Forget what these runs made."""

    def made(reader: Reader) -> list[Point]:
        gone = {about["id"] for _, about, _ in reader.states() if str(about["metadata"].get("run_id", "")) in run_ids}
        return [row for name in gone if (row := reader.find(name)) is not None]

    _forget_of(saver, names, made)


def _forget_of(saver: HoldfastSaver, names: Sequence[str], choose: Choose) -> None:
    """Forget some checkpoints of threads. What several see, because they are copies, goes if all of these forget it."""
    groups: list[tuple[list[str], set[int]]] = []
    for name in dict.fromkeys(names):
        doomed = {point.n for reader in Reader.all_of(saver, name) for point in choose(reader)}
        copies = [group for group in groups if not group[1].isdisjoint(doomed)]
        groups = [group for group in groups if group not in copies]
        if doomed:
            groups.append(([*(one for some, _ in copies for one in some), name], doomed.union(*(n for _, n in copies))))
    for some, _ in groups:
        with ExitStack() as stack:
            threads = [stack.enter_context(alone(saver, name)) for name in sorted(some)]  # in one order for all
            _forget(saver, [thread for thread in threads if thread is not None], choose)


def _forget(saver: HoldfastSaver, threads: Sequence[Thread], choose: Choose) -> None:
    view = saver.store._db.view
    readers = {thread.row.a: Reader.all_of(saver, thread.name) for thread in threads}
    namespaces = {reader.branch.b for some in readers.values() for reader in some}

    def named(view: View, a: int) -> set[int]:
        heads = {branch.head for branch in view.branches(a) if branch.b not in namespaces}
        return heads | {tag.n for tag in view.tags(a)}

    going = []
    for thread in threads:
        a = thread.row.a
        doomed = {point.n for reader in readers[a] for point in choose(reader)} - named(view, a)
        for reader in readers[a]:
            for point in reader.points():
                if point.n not in doomed and point.row.parent in doomed:
                    doomed -= set(_rebuilt_from(reader, point))
        if doomed:
            going.append((thread.row, doomed))

    def came(change: Change) -> bool:
        """A tag needs no lease: one may have come meanwhile."""
        return any(not doomed.isdisjoint(named(change, row.a)) for row, doomed in going)

    if going and not saver.store._forget(*going[0], *going[1:], unless=came).done:
        _forget(saver, threads, choose)


def _rebuilt_from(reader: Reader, point: Point) -> Iterator[int]:
    """The ancestors of a checkpoint back to where all of its delta channels were stored whole."""
    counted = about_of(reader.state_at(point))["metadata"].get("counters_since_delta_snapshot") or ()
    missing = set(counted) - {name for name, _ in point.manifest.sections}
    for above in reader.graph.view.walk(point.row.parent) if missing and point.row.parent else ():
        yield above.n
        missing -= {name for name, _ in above.manifest.sections}
        if not missing:
            return
