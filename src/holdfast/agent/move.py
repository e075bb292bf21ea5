"""A whole store in another place: backup, move, another backend, another key, a restore test. All are one transfer.

Owns what goes along besides agents, and how one store takes the place of another. Ids, and the uuids of agents and
branches, stay; the store itself gets a new uuid, because its handles are new: what was noted about the old one would
make it look older than it is. What always holds: at every moment one whole store is where it is looked for; a source is
closed to writers only after everything has arrived; nothing that was in a store is deleted unless somebody says so.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.agent.graph import Graph
from holdfast.agent.layers import THAW, WORKSPACE, half_way
from holdfast.agent.names import full_name
from holdfast.agent.opened import adopt, is_own, since
from holdfast.agent.store import Store, open_unseen
from holdfast.agent.transfer import TransferReport, transfer
from holdfast.errors import (
    AgentBusy,
    BadOption,
    Contention,
    Damaged,
    HistoriesDiverged,
    HoldfastError,
    NotEncrypted,
    ReadOnly,
    StoreBusy,
    StoreFailed,
    Unavailable,
    command,
)
from holdfast.store import files
from holdfast.store.catalog import Progress, View
from holdfast.store.changes import Change, Opens
from holdfast.store.database import COLD, MOVED, OBJECTS, SCHEDULES
from holdfast.store.keys import secret_of
from holdfast.store.rows import Open, body_bytes, read_body
from holdfast.store.sqlite import Sqlite
from holdfast.text import is_url

if TYPE_CHECKING:
    from holdfast.agent.verify import Problem
    from holdfast.store.keys import Secret

FACTS = ("policy", "queues")
"""What people have set for a store, and goes along. Keys do not: the other store has its own."""

_OWN = frozenset({"store.db", "store.db-wal", "store.db-shm", "packs", "locks", "witness", "scans"})
_OLD_DIGITS = 12
_NAMED = 5


def backup(source: Store, dest: Store, progress: Progress | None = None, *, images: bool = False) -> TransferReport:
    """Bring everything that another store lacks there. It may be repeated at any time; nothing is removed there.

    Images of processes go only with ``images``, to where it is encrypted; the report says who stayed for that. An
    agent that cannot be brought keeps none of the others back: what is wrong with it is raised at the end.
    """
    _check_apart(source, dest)
    failed: dict[str, Contention | Damaged] = {}
    report = transfer(source, dest, images=images, failed=failed, progress=progress)
    _carry_facts(source, dest, FACTS)
    if failed:
        raise _not_brought(report, failed)
    return report


def _everything(source: Store, dest: Store, progress: Progress | None = None) -> TransferReport:
    """As a backup, with images of processes, for what takes the source's place. Raises if some may not go there."""
    report = backup(source, dest, progress, images=dest.encrypted)
    if report.left_out:
        named = ", ".join(report.left_out)
        raise NotEncrypted(
            f"{named} would stay behind: images of processes hold everything that those have in memory, and"
            f" {dest.place} is not encrypted. {source.place} is as it was",
            hint="Move to a store that is encrypted (`holdfast init PLACE --encrypt`), or remove them first.",
        )
    return report


def _check_apart(source: Store, dest: Store) -> None:
    """Whoever deletes the one must not delete the other."""
    if is_url(source.place) or is_url(dest.place):
        return
    for inner, outer in ((source, dest), (dest, source)):
        if Path(outer.place) in Path(inner.place).parents:
            raise BadOption(
                f"{inner.place} lies in the directory of the store {outer.place}: who deletes this one deletes both",
                hint="Name a place beside it.",
            )


def _not_brought(report: TransferReport, failed: dict[str, Contention | Damaged]) -> Contention | Damaged:
    """The error for agents that were not copied: of the worst of them, with a way that can be typed."""
    name, error = next((one for one in failed.items() if isinstance(one[1], Damaged)), next(iter(failed.items())))
    others = sorted(failed.keys() - {name})
    names = ", ".join([name, *others[: _NAMED - 1], *(["..."] if len(others) >= _NAMED else [])])
    error.message += f". Not copied: {names}; all other agents ({len(report.agents)}) were"
    if isinstance(error, HistoriesDiverged):
        more = ("--beside",) if error.branch else ("--as", "NAME")
        line = command("push", "--store", report.source, report.dest, name, *more)
        error.hint = f"To bring it under another name, once: `{line}`."
    elif isinstance(error, AgentBusy):
        error.hint = "Somebody writes it there. Close it there, then do this again."
    return error


def move(source: Store, dest: Store, progress: Progress | None = None) -> TransferReport:
    """Everything goes; then the source is closed, and opens only to be read: it says where everything is now.

    Nobody else may have it open, or, on a server, write to it. Interrupted anywhere, it can be done again: a source
    that says already that it was moved there is read only, and what is left to be done is done. Then the report is
    empty, because everything had been copied.
    """
    if source._readonly:
        if source._db.view.facts().get(MOVED, b"").decode() != dest.place:
            raise ReadOnly("the store to be moved was opened read-only")
        _carry_open(source, dest, _open_rows(source), again=True)
        return TransferReport(source.place, dest.place, [])
    with _quiet(source):
        report = _everything(source, dest, progress)
        before = _standing(source._db.view)
        _everything(source, dest)  # what came in while the first one was going on
        _carry_schedules(source, dest)

        def end(change: Change) -> None:
            change.tx.alone(MOVED.encode())  # on a server: after all who are writing, and before all others
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


def _carry_open(source: Store, dest: Store, rows: dict[int, list[Open]], *, again: bool = False) -> None:
    """Nobody goes on with the runs in the old place: those that are open there are so in the new one.

    Not before the old one is closed, or both would go on with them. Should this be cut short, it is done ``again``: for
    branches that have not got theirs, which others may have gone on with since.
    """
    view, alive = source._db.view, dest._db.leases.alive

    def put(change: Change) -> None:
        for b, some in rows.items():
            old = view.branch_at(b)
            agent = change.agent_of(view.agent_at(old.a).uuid)
            for new in change.branches(agent.a) if agent is not None else ():
                same = new.uuid == old.uuid and new.end.position == old.end.position
                if again and same and is_own(change, new):
                    continue
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


def _carry_facts(source: Store, dest: Store, names: tuple[str, ...]) -> None:
    """Facts whose names begin so, unless the other store has one of that name already."""
    kept = {name: value for name, value in source._db.view.facts().items() if name.startswith(names)}

    def put(change: Change) -> None:
        for name in kept.keys() - change.facts().keys():
            change.set_fact(name, kept[name])

    if kept.keys() - dest._db.view.facts().keys():
        dest._db.change(put)


@contextmanager
def _quiet(store: Store) -> Iterator[None]:
    """Nobody else writes a store meanwhile, and no directory is half-way; handles of this process are closed."""
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
        _check_whole(store)
        yield


def _check_whole(store: Store) -> None:
    """Raise while files are still to be put back: what is known of that stays behind, where nobody can finish it."""
    for uuid, path in half_way(store._db.view).items():
        names = (
            full_name(agent.name, branch.name)
            for agent in store._db.view.agents()
            for branch in store._db.view.branches(agent.a)
            if branch.uuid.hex() == uuid
        )
        if name := next(names, ""):
            raise BadOption(
                f"{path} is half-way between two checkpoints: files of {name} are still to be put back there;"
                " nothing was moved",
                hint=f"Open {name} with that directory first: that finishes it. Then do the same again."
                " `holdfast doctor` says more.",
            )


def _standing(view: View) -> list[tuple[object, ...]]:
    """What tells whether somebody has written since."""
    log = view.reader.run("SELECT count(*), max(e) FROM log")
    return [*log, *((branch.b, branch.head, branch.line) for branch in view.branches())]


# -- another key ------------------------------------------------------------------------------------------------


def rotate(
    place: str,
    secret: Secret | None,
    new: Callable[[], Secret | None],
    *,
    discard_old: bool = False,
    progress: Progress | None = None,
) -> Path | None:
    """Put a store with another key, and the same content, in the place of the one there; returns where that one is.

    ``new`` gives the key when it is known to be needed. Nobody may have the store open. Needs room for two of them.
    """
    if is_url(place):
        raise BadOption(
            "a store on a server cannot be encrypted anew in its place",
            hint="Make a new store with another key, and move this one there.",
        )
    path = Path(os.path.realpath(place))
    building = path.with_name(f".{path.name}.rotating")
    with ExitStack() as stack:
        source = stack.enter_context(open_unseen(path, secret))
        stack.enter_context(_quiet(source))
        facts = source._db.view.facts()
        if facts.get(OBJECTS) or facts.get(COLD):
            raise BadOption(
                "some packs of this store lie elsewhere: it cannot be encrypted anew in its place",
                hint="Bring them back (`holdfast tier`), or make a new store with another key and move this one there.",
            )
        old = path.with_name(f"{path.name}.old-{source._db.uuid.hex()[:_OLD_DIGITS]}")
        files.discard(building)  # left by one that was killed
        try:
            with open_unseen(building, new(), create=True) as made:
                _everything(source, made, progress)
                _carry_schedules(source, made)
                _carry_facts(source, made, (WORKSPACE, THAW))  # branches keep their directories
                _carry_open(source, made, _open_rows(source))
                _prove(made, progress)
            source.close()
            files.discard(old)  # as far as another attempt came: the one in its place is the one that counts
            building.rename(old)
            try:
                files.exchange(path, old)
            except StoreFailed:  # and nothing else: whatever comes after it may find the old one there
                old.rename(building)
                raise
            files.fsync_directory(path.parent)
        except OSError as error:
            raise files.unavailable(error, f"replacing {path}") from error
        finally:
            files.discard(building)
    _carry(old, path)
    if discard_old:
        try:
            files.delete(old)
        except StoreFailed as error:
            raise StoreFailed(f"everything is encrypted anew, but {error.message}", hint=error.hint) from error
        return None
    with suppress(HoldfastError), open_unseen(old, secret) as left:
        left._db.change(lambda change: change.set_fact(MOVED, str(path).encode()))
    return old


def old_ones(path: Path) -> list[Path]:
    """The stores that gave their place to the one there, and are still beside it."""
    name = re.compile(rf"{re.escape(path.name)}\.old-[0-9a-f]{{{_OLD_DIGITS}}}")
    try:
        return sorted(one for one in path.parent.iterdir() if name.fullmatch(one.name) and one.is_dir())
    except OSError as error:
        raise files.unavailable(error, f"looking at {path.parent}") from error


def discard_old(place: str) -> list[Path]:
    """Delete the stores that gave their place to the one there, or raise; returns where they were."""
    path = Path(os.path.realpath(place))
    if not files.classify(path):
        raise BadOption(
            f"there is no store at {path}", hint="The old store may be the only good copy. Nothing was deleted."
        )
    found, failed = old_ones(path), None
    for one in found:
        _carry(one, path)
        try:
            files.delete(one)
        except StoreFailed as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return found


def _prove(store: Store, progress: Progress | None) -> None:
    report = store.verify(progress)
    if report.unreachable and not report.problems:
        raise StoreFailed(f"the new store cannot be read: {report}", hint="The one that is there was left as it is.")
    if not report.ok:
        raise Damaged(
            f"the new store is not what was written: {report}", hint="The one that is there was left as it is."
        )


def _carry(old: Path, new: Path) -> None:
    """What else lies in a store's directory, such as dumps, goes to the one that has its place."""
    try:
        for one in old.iterdir():
            if one.name not in _OWN and not (new / one.name).exists():
                one.rename(new / one.name)
    except OSError as error:
        raise files.unavailable(error, f"bringing along what lies in {old}") from error


# -- a restore test ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """One agent of a restore test. ``problem`` is empty when all of it came back and is what it was.

    ``unknown``: it could not be tried, because the machine said no or a colder place did not answer. Nothing is known
    to be lost.
    """

    agent: str
    checkpoints: int = 0
    problem: str = ""
    unknown: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": not self.problem}


@dataclass(slots=True)
class RestoreReport:
    """What was restored, and whether it could be proven. ``total``: agents in the store, of which some were tried."""

    store: str
    total: int
    agents: list[Restored] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every agent that was tried came back and could be proven."""
        return all(not one.problem for one in self.agents)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "store": self.store, "ok": self.ok, "total": self.total, "bytes": self.bytes,
            "seconds": round(self.seconds, 3), "agents": [one.to_json() for one in self.agents],
        }  # fmt: skip


def verify_restore(
    source: Store, agents: Sequence[str], sample: int, place: Path | None, say: Progress
) -> RestoreReport:
    """Restore some agents, or as many as ``sample`` at random, in a scratch place; then prove what came back there."""
    if sample < 1:
        raise BadOption(f"a sample of {sample}", hint="Restore at least one agent.")
    began = time.monotonic()
    every = [row.name for row in source._agents()]
    chosen = list(dict.fromkeys(agents)) or random.SystemRandom().sample(every, min(sample, len(every)))
    report = RestoreReport(source.place, len(every))
    secret = secret_of(os.urandom(32)) if source.encrypted else None
    with _scratch(place, source) as room:
        with open_unseen(room / "store", secret, create=True) as made:
            for name in chosen:
                try:
                    moved = transfer(source, made, [name], images=None, progress=say)
                    report.bytes += moved.bytes
                except (Damaged, Unavailable) as error:
                    failed = Restored(name, problem=error.message, unknown=isinstance(error, Unavailable))
                    report.agents.append(failed)
                else:
                    graph = Graph(made._db.view, made._agent_row(name))
                    report.agents.append(Restored(name, len(graph.numbers)))
        with open_unseen(room / "store", secret) as again:  # what is read now was on the disk
            problems = again.verify(say).problems
    report.agents = [_judged(one, problems) for one in report.agents]
    report.seconds = time.monotonic() - began
    return report


def _judged(tried: Restored, problems: Sequence[Problem]) -> Restored:
    """An agent as the proof of what came back shows it. What was not tried has no part in what is wrong with all."""
    for problem in problems:
        own = problem.agent == tried.agent
        if (tried.unknown and own) or (not tried.problem and (own or not problem.agent)):
            return replace(tried, problem=problem.detail, unknown=False)
    return tried


@contextmanager
def _scratch(place: Path | None, store: Store) -> Iterator[Path]:
    """A folder for this user only: below ``place``, or beside the store, or where temporary files go."""
    beside = Path(store.place).parent
    where = place if place is not None or not os.access(beside, os.W_OK) else beside
    with ExitStack() as stack:
        try:
            room = stack.enter_context(files.scratch(where))
        except OSError as error:
            raise files.unavailable(error, f"making a scratch place in {where or 'the temporary folder'}") from error
        yield room
