"""Every call to the disk fails: each call site, with each error that it can have, once and for ever.

Each life (tests/faults/lives.py) is lived once to find the call sites: a line of Holdfast, what it asked of the disk,
and of which file. Then it is lived again for each of them, in a process of its own, with that call failing. It must end
in one of Holdfast's errors or go on; then, with a disk that works again, the same handle works or refuses, and after
reopening everything that was acknowledged is there.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import holdfast
import holdfast.agent.places
from holdfast.errors import Damaged, HoldfastError, StorePoisoned
from tests.faults import crashes, lives, sites  # noqa: F401  lives registers all of them
from tests.faults.calls import ELSEWHERE, Call, ShortWrite
from tests.faults.campaign import Task, campaign
from tests.faults.disk import Disk
from tests.faults.isolated import Died, isolated
from tests.faults.replay import Replay
from tests.faults.script import Ledger
from tests.faults.stage import LIVES, Life, Stage, stage

SHORT = -1
"""Not an error number: the write takes half of what it was given."""

_MAKES_ROOM = frozenset(("write", "create", "mkdir", "rename", "link", "sync", "syncdir", "truncate", "statement"))


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
    if call.what == "statement":
        return "catalog"
    name = call.name.rpartition("/")[2]
    for kind in ("store.db-journal", "store.db-wal", "store.db", "witness"):
        if name.endswith(kind):
            return kind
    if name.endswith(".pack"):
        return "pack"
    return "other"


@dataclass(frozen=True)
class Site:
    """One call site."""

    where: str
    what: str
    file: str

    def __str__(self) -> str:
        return f"{self.what} {self.file} at {self.where}"


def site_of(call: Call) -> Site:
    return Site(call.site, call.what, kind_of(call))


ONCE, FOR_EVER, DEAD = "once", "for ever", "and all others from then on"


@dataclass
class Fault:
    """Fails the ``at``-th call of a site; from then on every call of that kind, or, of a dead disk, every call."""

    life: str
    site: Site
    code: int
    at: int
    how: str
    seen: int = 0
    later: int = 0
    on: bool = True
    hit: set[str] = field(default_factory=set)  # where calls have failed

    def __call__(self, call: Call) -> None:
        if not self.on:
            return
        same = call.what == self.site.what
        begun = self.seen >= self.at
        if not same and not (begun and self.how == DEAD):
            return
        where = call.site
        if where == ELSEWHERE:  # the life's own
            return
        here = same and where == self.site.where and kind_of(call) == self.site.file
        self.seen += here
        if (here and self.seen == self.at) or (begun and self.how != ONCE):
            self.later += 1
            # A signal that comes for ever would be retried for ever; one that comes every second time is not.
            if self.code != errno.EINTR or self.later % 2:
                self.hit.add(where)
                self._fail(call.what)

    def _fail(self, what: str) -> None:
        if self.code == SHORT and what == "write":
            raise ShortWrite(errno.ENOSPC, "half of it")
        raise OSError(abs(self.code), os.strerror(abs(self.code)))

    def __str__(self) -> str:
        name = "short write" if self.code == SHORT else errno.errorcode[self.code]
        return f"{name} {self.how} at number {self.at} of {self.site}, in the life {self.life!r}"


FEW_TRIES = 100
FEW_LIVES = 4


def known_sites(task: Task | None = None) -> dict[str, dict[Site, int]]:
    """The call sites of each life, and how often each is called. Whoever has few tries gets few of the lives."""
    names = list(LIVES)
    if task is not None and task.count < FEW_TRIES:
        names = [names[0], *random.Random(task.seed).sample(names[1:], FEW_LIVES - 1)]
    missing = [LIVES[name] for name in names if name not in _known]
    if missing:
        with stage() as place:
            for life in missing:
                ledger = place.begin(life)
                _known[life.name] = isolated(lambda _say, life=life, ledger=ledger: _sites(place, life, ledger))
    return {name: _known[name] for name in names}


_known: dict[str, dict[Site, int]] = {}


def _sites(place: Stage, life: Life, ledger: Ledger) -> dict[Site, int]:
    found: dict[Site, int] = {}

    def note(call: Call) -> None:
        if call.site != ELSEWHERE:
            site = site_of(call)
            found[site] = found.get(site, 0) + 1

    disk = Disk(place.folder, recording=False)
    disk.before = note
    with disk.watching():
        life.live(place.folder, ledger)
        same_handle(poisoned=False)
    return found


def all_faults(task: Task | None = None) -> list[Fault]:
    """Each site has a home, the shortest life that comes along there, where all of it is tried, early, midway and late.

    In the other lives it fails as well, but in one way each.
    """
    known = known_sites(task)
    length = {name: sum(found.values()) for name, found in known.items()}
    home: dict[Site, str] = {}
    for name in sorted(known, key=length.__getitem__):
        for site in known[name]:
            home.setdefault(site, name)
    faults = []
    for name, found in known.items():
        for site, times in found.items():
            if home[site] != name:
                faults.append(Fault(name, site, errno.EIO, times // 2 + 1, FOR_EVER))
                continue
            for at in sorted({1, times // 2 + 1, times}):
                faults += [
                    Fault(name, site, code, at, how) for code in errors_of(site.what) for how in (ONCE, FOR_EVER)
                ]
                faults.append(Fault(name, site, errno.EIO, at, DEAD))
    return faults


def attempt(place: Stage, fault: Fault) -> tuple[str, set[str]]:
    """One life with one fault. Returns what came of it and where calls failed; raises when a promise was broken."""

    life = LIVES[fault.life]
    ledger = place.begin(life)

    def live(_say: Callable[[str], None]) -> tuple[str, set[str]]:
        disk = Disk(place.folder, recording=False)
        disk.before = fault
        ended = "unharmed"
        poisoned = False
        with disk.watching():
            try:
                life.live(place.folder, ledger)
            except HoldfastError as error:
                ended = type(error).__name__
                if isinstance(error, Damaged):
                    raise AssertionError(f"a disk that fails is called damaged: {error}") from error  # noqa: TRY004
                poisoned = isinstance(error, StorePoisoned)
            fault.on = False
            same_handle(poisoned=poisoned)
        life.check(place.folder, ledger)
        return ended if fault.hit else "not reached", fault.hit

    return isolated(live)


def same_handle(*, poisoned: bool) -> None:
    """The disk works again: the handle that met the fault works too, or refuses with an error of ours."""
    for store in list(holdfast.agent.places._open.values()):
        try:
            if not store.closed and not store._readonly:
                crashes.work_on(store, random.Random(2))
                if poisoned and store._db.engine.poison is not None:
                    raise AssertionError("a poisoned store was written to")
        except HoldfastError:
            pass
        finally:
            try:
                store.close()
            except HoldfastError:
                store.close()


@campaign("failing", "every call site failing", "faults", ci=24, soak=7_000, by_part=True)
def failing(task: Task) -> None:
    """EIO, ENOSPC, EINTR, EMFILE, EFBIG and short writes, once and for ever, at each call site of every life."""
    lines = sites.written()
    task.places["lines that call the disk"] = {str(line) for line in lines}
    failed = task.places["of these failed"] = set()
    tried = task.places["call sites"] = set()
    faults = task.mine(fault for fault in all_faults(task) if task.only in str(fault.site))
    with stage() as place:
        for fault in faults:
            if task.over:
                break
            try:
                ended, hit = attempt(place, fault)
                failed |= {str(line) for line in lines if any(line.holds(where) for where in hit)}
            except (AssertionError, Died) as error:
                task.broke(f"{fault}: {str(error).strip()[-700:]}")
                ended = "broken"
            tried.add(str(fault.site))
            task.tried(ended)


# -- flushes ---------------------------------------------------------------------------------------------

UNRECORDED = {"repair", "found"}
"""Lives whose links, and renames to other directories, the replay of a recording does not know."""


def flush_fails(place: Stage, life: Life, ledger: Ledger, at: int) -> str:
    """The ``at``-th flush of a life fails, and what it was to flush is lost. Returns what came of it."""
    disk = Disk(place.folder)
    ledger.told = disk.ack
    seen = 0
    lost = ""  # the file of the failed flush
    users: dict[str, set[int]] = {}  # threads that used each file before; each has a handle of its own on the log
    untold: set[int] = set()

    def before(call: Call) -> None:
        """Linux tells a failure once to every handle that the file had then (since 4.13), not only to who asked."""
        nonlocal seen, lost
        me = threading.get_ident()
        if call.what in FLUSHES:
            seen += 1
            if seen == at:
                lost = call.name
                untold.update(users.get(lost, ()), {me})
            if call.name == lost and me in untold:
                untold.discard(me)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not lost:
            users.setdefault(call.name, set()).add(me)

    disk.before = before
    ended = "unharmed"
    with disk.watching():
        try:
            life.live(place.folder, ledger)
        except HoldfastError as error:
            ended = type(error).__name__
            if isinstance(error, StorePoisoned):
                refuses()
        disk.before = None
        same_handle(poisoned=False)
    if seen < at:
        return "not reached"
    replay = Replay(disk)
    while replay.at < len(disk.calls):
        replay.step()
    for state in itertools.islice(replay.states(random.Random(at), 3), 8):
        crashes.lay_out(state, place.folder)
        life.check(place.folder, ledger)
    return ended


FLUSHES = {"sync", "syncdir"}


def refuses() -> None:
    """A store whose flush failed takes nothing more, by whatever way."""
    for store in list(holdfast.agent.places._open.values()):
        if store.closed or store._db.engine.poison is None:
            continue
        for change in (lambda store=store: store.agent("after").checkpoint("after"), lambda store=store: tag(store)):
            try:
                change()
            except HoldfastError:
                continue
            raise AssertionError("written to after a flush failed")


def tag(store: holdfast.Store) -> None:
    for info in store.agents():
        if info.head is not None:
            store.tag(info.name, "after")
            return
    raise StorePoisoned("there is nothing to tag")


@campaign("flush", "failed flush", "flushes", ci=6, soak=400, by_part=True)
def flush(task: Task) -> None:
    """Each flush of a life fails once, and what it was to write is gone: the store refuses, reopening recovers."""
    points = [
        (name, at)
        for name, found in known_sites(task).items()
        if name not in UNRECORDED and task.only in name
        for at in range(1, sum(times for site, times in found.items() if site.what in FLUSHES) + 1)
    ]
    with stage() as place:
        for name, at in task.mine(points):
            if task.over:
                return
            life = LIVES[name]
            ledger = place.begin(life)
            try:
                ended = isolated(lambda _say, life=life, ledger=ledger, at=at: flush_fails(place, life, ledger, at))
            except (AssertionError, Died) as error:
                task.broke(f"flush {at} of the life {name!r}: {error}")
                ended = "broken"
            task.tried(ended)
