"""A whole store in another place: a backup, a move, another backend, another key. All of them are one transfer.

Owns what goes along besides agents, and how a store that was moved is closed. Ids, and the uuids of agents and
branches, stay; the store itself gets a new uuid, because its handles are new: what was noted about the old one would
make it look older than it is. What always holds: a source is closed to writers only after everything has arrived;
nothing that is in a store is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from holdfast.agent.opened import adopt, since
from holdfast.agent.store import Store
from holdfast.agent.transfer import TransferReport, transfer
from holdfast.errors import ReadOnly, StoreBusy
from holdfast.store.catalog import Open, Progress, View, body_bytes, read_body
from holdfast.store.changes import Change, Opens
from holdfast.store.database import MOVED, SCHEDULES
from holdfast.store.sqlite import Sqlite

FACTS = ("policy", "queues")
"""What people have set for a store, and goes along. Keys do not: the other store has its own."""


def backup(source: Store, dest: Store, progress: Progress | None = None) -> TransferReport:
    """Bring everything that another store lacks there. It may be repeated at any time; nothing is removed there."""
    report = transfer(source, dest, progress=progress)
    kept = {name: value for name, value in source._db.view.facts().items() if name in FACTS}

    def put(change: Change) -> None:
        for name, value in kept.items():
            if name not in change.facts():
                change.set_fact(name, value)

    if kept.keys() - dest._db.view.facts().keys():
        dest._db.change(put)
    return report


def move(source: Store, dest: Store, progress: Progress | None = None) -> TransferReport:
    """As a backup; then the source is closed, and opens only to be read: it says where everything is now.

    Nobody else may have it open, or, on a server, write to it. Interrupted anywhere, it can be done again.
    """
    if source._readonly:
        raise ReadOnly("the store to be moved was opened read-only")
    with _quiet(source):
        report = backup(source, dest, progress)
        before = _standing(source._db.view)
        backup(source, dest)  # what came in while the first one was going on
        _carry_schedules(source, dest)

        def end(change: Change) -> None:
            if _standing(change) != before:
                raise StoreBusy(
                    "somebody writes to the store that is to be moved", hint="Try again when they are done."
                )
            for branch in change.branches():
                if branch.a:  # whoever believes to be its writer is not any more
                    change.move(branch, branch._replace(generation=branch.generation + 1))
            change.set_fact(MOVED, dest.place.encode())

        rows = _open_rows(source)
        source._db.change(end)
        _carry_open(source, dest, rows)
        source.close()
    return report


def _open_rows(store: Store) -> dict[int, list[Open]]:
    """The rows of open runs, and of signals to them, by branch."""
    view = store._db.view
    return {b: view.opened(b) for (b,) in view.reader.run("SELECT DISTINCT b FROM open WHERE length(signal) = 0")}


def _carry_open(source: Store, dest: Store, rows: dict[int, list[Open]]) -> None:
    """Nobody goes on with the runs in the old place: those that are open there are so in the new one.

    Not before the old one is closed: should this be cut short, they wait to be adopted.
    """
    view, alive = source._db.view, dest._db.leases.alive

    def put(change: Change) -> None:
        for b, some in rows.items():
            old = view.branch_at(b)
            agent = change.agent_of(view.agent_at(old.a).uuid)
            for new in change.branches(agent.a) if agent is not None else ():
                same = new.uuid == old.uuid and new.end.position == old.end.position
                if same and not (new.generation and alive(new.uuid, new.generation)):
                    adopt(change, new, since(old, view.line(old.line)))
                    change.set_open(new.b, Opens([(None, None)], some))

    if rows:
        dest._db.change(put)


def _carry_schedules(source: Store, dest: Store) -> None:
    """What is executed at which times goes on in the new place. A backup has none of it: it would act, too."""
    value = source._db.view.fact(SCHEDULES)

    def merged(other: bytes | None) -> bytes:
        ours, theirs = (read_body(one, "store schedules") if one is not None else {} for one in (value, other))
        return body_bytes({**ours, **theirs})

    if value is not None:
        dest._db.change(lambda change: change.swap_fact(SCHEDULES, merged))


@contextmanager
def _quiet(store: Store) -> Iterator[None]:
    """Nobody else writes a store meanwhile; handles of this process are closed."""
    with ExitStack() as stack:
        for handle in list(store._handles.values()):
            handle.close()
        engine, view = store._db.engine, store._db.view
        if isinstance(engine, Sqlite):
            stack.enter_context(engine.alone())
        else:
            names = {agent.a: agent.name for agent in view.agents()}
            for branch in view.branches():
                if branch.a and branch.generation:
                    stack.callback(store._lease(names[branch.a], branch, wait_s=0.0).release)
        yield


def _standing(view: View) -> list[tuple[object, ...]]:
    """What tells whether somebody has written since."""
    log = view.reader.run("SELECT count(*), max(e) FROM log")
    return [*log, *((branch.b, branch.head, branch.line) for branch in view.branches())]
