"""Every call to the disk fails: each call site, with each error that it can have, once and for ever.

A performance is run once to find the call sites (a line of Holdfast, what it asked of the disk, of which file). Then it
is run again for each of them, in a process of its own, with that call failing. It must end in one of Holdfast's errors
or go on; then, with a disk that works again, the same handle works or refuses, and after reopening everything that was
acknowledged is there.
"""

from __future__ import annotations

import ast
import errno
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import holdfast
import holdfast.agent.store
from holdfast.errors import Damaged, HoldfastError, StorePoisoned
from tests.faults import crashes, script
from tests.faults.campaign import Task, campaign, memory, quiet, remembering
from tests.faults.disk import ELSEWHERE, HOLDFAST, Call, Disk, ShortWrite
from tests.faults.isolated import Died, isolated
from tests.faults.kills import check_after
from tests.faults.replay import Replay

SHORT = -1
"""Not an error number: the write takes half of what it was given."""

KEY = "5e" * 32
_MAKES_ROOM = frozenset(("write", "create", "mkdir", "rename", "sync", "syncdir", "truncate"))


def errors_of(what: str) -> list[int]:
    """What can go wrong with a call."""
    found = [errno.EIO]
    if what in _MAKES_ROOM:
        found.append(errno.ENOSPC)
    if what in {"write", "read", "sync", "syncdir", "open", "create", "truncate"}:
        found.append(errno.EINTR)
    if what in {"open", "create", "list"}:
        found.append(errno.EMFILE)
    if what in {"write", "truncate"}:
        found.append(errno.EFBIG)
    if what == "write":
        found.append(SHORT)
    return found


def kind_of(call: Call) -> str:
    """Which file, without what differs from run to run."""
    if call.what in {"syncdir", "mkdir", "rmdir", "list"}:
        return "directory"
    name = call.name.rpartition("/")[2]
    for kind in ("store.db-journal", "store.db-wal", "store.db", "witness"):
        if name.endswith(kind):
            return kind
    if name.endswith(".pack"):
        return "pack"
    return "other"


@dataclass(frozen=True)
class Site:
    """One call site, and how often a performance comes along."""

    where: str
    what: str
    file: str

    def __str__(self) -> str:
        return f"{self.what} {self.file} at {self.where}"


def site_of(call: Call) -> Site:
    return Site(call.site, "create" if call.what == "create" else call.what, kind_of(call))


@dataclass
class Fault:
    """Fails the ``at``-th call of a site, and with ``forever`` every call of that kind from then on."""

    site: Site
    code: int
    at: int
    forever: bool
    seen: int = 0
    later: int = 0
    failed: int = 0
    on: bool = True

    def __call__(self, call: Call) -> None:
        if not self.on:
            return
        here = site_of(call) == self.site
        self.seen += here
        if (here and self.seen == self.at) or (self.forever and self.seen >= self.at and call.what == self.site.what):
            self.later += 1
            # A signal that comes for ever would be retried for ever; one that comes every second time is not.
            if self.code != errno.EINTR or self.later % 2:
                self._fail()

    def _fail(self) -> None:
        self.failed += 1
        if self.code == SHORT:
            raise ShortWrite(errno.ENOSPC, "half of it")
        raise OSError(self.code, os.strerror(self.code))

    def __str__(self) -> str:
        name = "short write" if self.code == SHORT else errno.errorcode[self.code]
        return f"{name} {'for ever from' if self.forever else 'at'} number {self.at} of {self.site}"


def sites() -> dict[Site, int]:
    """The call sites of a performance, and how often each is called."""

    def find(_say: Callable[[str], None]) -> dict[Site, int]:
        found: dict[Site, int] = {}

        def note(call: Call) -> None:
            site = site_of(call)
            if site.where != ELSEWHERE:  # the performance's own calls
                found[site] = found.get(site, 0) + 1

        with memory() as folder, remembering(folder / "state"), quiet(), script.small():
            disk = Disk(folder, recording=False)
            disk.before = note
            with disk.watching():
                performance(folder / "store", script.Ledger())
        return found

    return isolated(find)


_OS_CALLS = frozenset((
    "open", "close", "pwrite", "pread", "preadv", "write", "read", "fsync", "ftruncate", "truncate", "rename", "unlink",
    "rmdir", "mkdir", "listdir", "scandir",
))  # fmt: skip
_PATH_CALLS = frozenset(("write_bytes", "read_bytes", "touch", "iterdir"))


def written_sites() -> set[str]:
    """The lines of the store's room on which a call to the system is written, whether or not it is ever made."""
    found = set()
    for path in sorted(Path(HOLDFAST, "store").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                of_os = isinstance(owner, ast.Name) and owner.id == "os" and node.func.attr in _OS_CALLS
                if of_os or node.func.attr in _PATH_CALLS:
                    found.add(f"store/{path.name}:{node.lineno}")
    return found


def performance(path: Path, ledger: script.Ledger) -> None:
    """The script, and what it does not do: reading only, verifying, an encrypted store, what a dead creator left."""
    path.with_name(f".{path.name}.new-dead").mkdir(exist_ok=True)
    script.perform(path, ledger)
    for _ in range(2):
        with holdfast.open(path.with_name("secret"), key=KEY) as store:
            crashes.work_on(store, random.Random(4))
    with holdfast.open(path, readonly=True) as store:
        store.verify()
        store.stats()
        ledger.check(store)
    with holdfast.open(path) as store:
        crashes.work_on(store, random.Random(1))


def attempt(fault: Fault) -> str:
    """One performance with one fault. Returns what came of it; raises when a promise was broken."""

    def life(_say: Callable[[str], None]) -> str:
        ledger = script.Ledger()
        with memory() as folder, remembering(folder / "state"), quiet(), script.small():
            path = folder / "store"
            disk = Disk(folder, recording=False)
            disk.before = fault
            ended = "unharmed"
            poisoned = False
            with disk.watching():
                try:
                    performance(path, ledger)
                except HoldfastError as error:
                    ended = type(error).__name__
                    if isinstance(error, Damaged):
                        raise AssertionError(f"a disk that fails is called damaged: {error}") from error  # noqa: TRY004
                    poisoned = isinstance(error, StorePoisoned)
                fault.on = False
                same_handle(path, poisoned=poisoned)
            after(path, ledger)
            return ended if fault.failed else "not reached"

    return isolated(life)


def same_handle(path: Path, *, poisoned: bool) -> None:
    """The disk works again: the handle that met the fault works too, or refuses with an error of ours."""
    for store in list(holdfast.agent.store._open.values()):
        try:
            if not store.closed and not store._readonly:
                crashes.work_on(store, random.Random(2))
                if poisoned and store._catalog._writer.poison is not None:
                    raise AssertionError("a poisoned store was written to")
        except HoldfastError:
            pass
        finally:
            try:
                store.close()
            except HoldfastError:
                store.close()


def after(path: Path, ledger: script.Ledger) -> None:
    """Reopened on a disk that works: everything acknowledged is there, nothing is damaged, work goes on."""
    with holdfast.open(path) as store:
        report = store.verify()
        if not report.ok:
            raise AssertionError(f"verify: {report}")
        ledger.check(store)
        crashes.work_on(store, random.Random(3))
        left = sorted(entry.name for entry in (path / "packs").glob("tmp-*"))
        if len(left) > 1:
            raise AssertionError(f"more was left behind than one death explains: {left}")


@campaign("failing", "every call site failing", "faults", ci=40, soak=6_000, by_seed=False)
def failing(task: Task) -> None:
    """EIO, ENOSPC, EINTR, EMFILE, EFBIG and short writes, once and for ever, at each call site of a whole life."""
    known = sites()
    chance = random.Random(task.seed)
    faults = [
        Fault(site, code, at, forever)
        for site, times in known.items()
        if task.only in str(site)
        for code in errors_of(site.what)
        for forever in (False, True)
        for at in sorted({1, times // 2 + 1, times})
    ]
    task.details["call sites"] = len(known)
    written = written_sites()
    task.details["lines of the store that call the system"] = len(written)
    task.details["of these never reached"] = len(written - {site.where for site in known})
    chance.shuffle(faults)  # whoever has little time sees something of everything
    task.count = min(task.count, len(faults))
    tried: set[Site] = set()
    for fault in faults:
        if task.over:
            break
        try:
            ended = attempt(fault)
        except (AssertionError, Died) as error:
            task.broke(f"{fault}: {str(error).strip()[-700:]}")
            ended = "broken"
        tried.add(fault.site)
        task.tried(ended)
    task.details["call sites tried"] = len(tried)


# -- flushes ---------------------------------------------------------------------------------------------


def flush_fails(folder: Path, at: int) -> str:
    """The ``at``-th flush of a life fails, and what it was to flush is lost. Returns what came of it."""
    place = folder / "disk"
    place.mkdir()
    disk = Disk(place)
    seen = 0

    def before(call: Call) -> None:
        nonlocal seen
        seen += call.what in {"sync", "syncdir"}
        if seen == at and call.what in {"sync", "syncdir"}:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before = before
    ended = "unharmed"
    with disk.watching():
        try:
            script.perform(place / "store", script.Ledger(told=disk.ack))
        except HoldfastError as error:
            ended = type(error).__name__
            if isinstance(error, StorePoisoned):
                refuses()
        disk.before = None
        same_handle(place / "store", poisoned=False)
    if seen < at:
        return "not reached"
    replay = Replay(disk)
    said = []
    while replay.at < len(disk.calls):
        call = replay.step()
        if call.what == "ack":
            said.append(call.name)
    for state in itertools.islice(replay.states(random.Random(at), 3), 8):
        crashes.lay_out(state, place)
        wrong = check_after(place / "store", said)
        if wrong:
            raise AssertionError(wrong)
    return ended


def refuses() -> None:
    """A store whose flush failed takes nothing more, by whatever way."""
    for store in list(holdfast.agent.store._open.values()):
        for change in (lambda store=store: store.agent("after").checkpoint("after"), store.flush):
            try:
                change()
            except StorePoisoned:
                continue
            except HoldfastError:
                continue
            raise AssertionError("written to after a flush failed")


@campaign("flush", "failed flush", "flushes", ci=8, soak=400, by_seed=False)
def flush(task: Task) -> None:
    """Each flush of a life fails once, and what it was to write is gone: the store refuses, reopening recovers."""
    with quiet(), script.small():
        total = sum(times for site, times in sites().items() if site.what in {"sync", "syncdir"})
        points = list(range(1, total + 1))
        points = random.Random(task.seed).sample(points, min(task.count, total))
        task.count = len(points)
        for at in points:
            if task.over:
                return
            with memory() as folder, remembering(folder / "disk" / "state"):
                try:
                    ended = isolated(lambda _say, folder=folder, at=at: flush_fails(folder, at))
                except (AssertionError, Died) as error:
                    task.broke(f"flush {at}: {error}")
                    ended = "broken"
            task.tried(ended)
