"""A workbench for runs: an agent in a real store, that can crash after any record and be opened again."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import holdfast
from holdfast.agent.opened import settle
from holdfast.run import claims, runs
from holdfast.run.durables import Options, known
from holdfast.run.records import decode_record
from holdfast.run.resilience import Clock
from holdfast.run.scope import active, number_tasks
from holdfast.run.steps import drive, drive_later
from holdfast.store.rows import BEGINNING, End, link
from tests import memory

NAME = "trip-7"
FOLDERS = []
"""What benches of this test have made. They are removed at its end (conftest)."""


class Crash(BaseException):
    """The process ends here."""


class Quick(Clock):
    """A clock that only counts how long it would have slept."""

    def __init__(self):
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)

    async def asleep(self, seconds):
        self.slept.append(seconds)


class Outside:
    """The world outside of a test's program: what was really done there, and where the program ends next."""

    def __init__(self):
        self.calls = []  # of the tool below: ("book", what), ("cancel", what); and whatever else tests note
        self.keys = []
        self.crash_at = self.crash_in = None
        self.undoing_fails = 0

    @property
    def stands(self):
        """What is booked now, oldest first."""
        found = [call[1] for call in self.calls if call[0] == "book"]
        for call in self.calls:
            if call[0] == "cancel":
                found.remove(call[1])
        return found

    def reach(self, where):
        """The process ends here, once, if that is where it is to end."""
        if self.crash_at == where:
            self.crash_at = None
            raise Crash

    def tool(self):
        def cancel(effect):
            self.keys.append(holdfast.effect().key)
            if self.crash_in == effect.args["what"]:
                self.crash_in = None
                raise Crash
            if self.undoing_fails:
                self.undoing_fails -= 1
                raise ConnectionError("no route")
            assert effect.result == effect.args["what"]
            self.calls.append(("cancel", effect.args["what"]))

        @holdfast.tool(compensate=cancel)
        def book(what):
            self.calls.append(("book", what))
            self.keys.append(holdfast.effect().key)
            return what

        return book


class Bench:
    """An agent, its host and its line. What is not here is the handle's, or the host's."""

    def __init__(self, folder=None, branch="main"):
        folder = folder or _copied(_new())
        vars(self).update(folder=folder, store=holdfast.open(folder / "store"))
        vars(self)["handle"] = self.store.agent(NAME, branch=branch)

    @property
    def _host(self):
        return self.handle._host

    def __getattr__(self, name):
        if hasattr(type(self.handle), name) and not hasattr(type(self._host), name):
            return getattr(self.handle, name)
        return getattr(self._host, name)

    def __setattr__(self, name, value):
        if name == "dead":
            self._host.outlives_s = lambda _call: 0.0 if value else None
            return
        setattr(self.handle if name in {"mode", "state"} else self._host, name, value)

    @property
    def states(self):
        """Every checkpoint that was taken."""
        return self.handle.log(all=True)

    def send(self, name, value=None):
        """A signal from elsewhere."""
        self.store.signal(NAME, name, value, any_run=True)

    def run(self, function, *args, **options):
        return drive(self._steps(runs.check_plain(function), args, options))

    async def arun(self, function, *args, **options):
        number_tasks(asyncio.get_running_loop())
        return await drive_later(self._steps(known(function), args, options))

    def _steps(self, function, args, options):
        with self._host.executing():
            return (yield from runs.execute(self._host, function, args, {}, Options(**options)))

    @contextmanager
    def using(self, since):
        """As `with agent:` after a load of the checkpoint at that position."""
        loop = claims.Loop(self._host, since)
        try:
            with active(loop.lane):
                yield loop
        finally:
            loop.ended = True

    def branched(self, name="other"):
        """The agent on a new branch, which begins here."""
        self.handle.checkpoint("here")
        self.store.branch(NAME, name, branch=self.handle.branch_name)
        return Bench(self.folder, name)

    def crashed(self, keep=None):
        """The same agent in a new process, after a crash that left ``keep`` records, or all."""
        self.store.flush()
        folder, branch = _copied(self.folder), self.handle.branch_name
        if keep is not None and keep < self.ledger.count:
            _cut(folder / "store", branch, keep)
        return Bench(folder, branch)


def _folder():
    return Path(tempfile.mkdtemp(prefix="bench-", dir=memory.place()))


@cache
def _new():
    """A store with an agent in it, made once: a copy of it costs a tenth."""
    folder = _folder()
    atexit.register(shutil.rmtree, folder)
    with holdfast.open(folder / "store") as store:
        store.agent(NAME)
    return folder


def _copied(folder):
    FOLDERS.append(_folder())
    shutil.copytree(folder / "store", FOLDERS[-1] / "store")
    return FOLDERS[-1]


def _cut(path, name, keep):
    """Let the newest commits of a store's agent not have been made: its branch stands where it stood before them."""
    with holdfast.open(path) as store:
        view = store._db.view
        branch = view.branch(view.agent(NAME).a, name)
        line = view.line(branch.line)
        later = [decode_record(one.body) for one in line[keep:]]
        gone = {getattr(one, name, b"") for one in later for name in ("start", "id")}
        points = (one for one in view.walk(branch.head) if one.manifest.effects[0] <= keep and one.id not in gone)
        point, end = next(points, None), BEGINNING
        for one in line[:keep]:
            end = End(one.r, one.r if one.marked else one.back, one.i, link(end.chain, one.digest))
        head = (point.n, point.id, point.manifest.depth) if point is not None else (0, b"", 0)

        def cut(change):
            change.move(branch, branch.standing(*head, branch.epoch).at_end(end))
            change.delete("record", "r", [one.r for one in line[keep:]])
            settle(change, [change.branch_at(branch.b)])

        store._db.change(cut)
