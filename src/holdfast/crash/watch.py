"""A thread that looks at the others: who stands still, who waits for whom, and that this process is alive.

Owns heartbeats, what counts as progress, and when a hang or a deadlock is reported. Must not know how a dump is taken.
Holds always: it never blocks on anything of the program; a state of things is reported once, until it changes; it loads
no module, because one that makes a class from text lets Python forget that a Ctrl-C ended the program.

Progress is that a thread which matters (the main one, or one that is no daemon) was woken or got the processor: it does
something, and whether that is of use nobody can tell from here. Only `beat()` says that.
A thread that holds the interpreter in C stops this one, too: then the sidecar misses its beat.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, thread_time
from typing import TYPE_CHECKING, Any

from holdfast.crash import agents, deadlocks, kinds, probe, stacks
from holdfast.crash.deadlocks import Cycle

if TYPE_CHECKING:
    from holdfast.crash.hooks import _Hooks

_INTERVAL_S = 1.0
_MOST_THREADS = 200
_MOST_FRAMES = 200
_WORK_S = 0.05  # of processor time: less is no change after a report, because who looks at a thread wakes it, too
_SHARE = 0.005  # of the processor: with many threads and tasks, cycles are looked for less often
_LEAVE_S = 2.0  # for the thread to leave; in the middle of a dump it takes longer, and is not waited for
_GONE_S = 2.0  # for the kernel to forget it, which takes no time unless the machine is busy
_FORK_WARNING = "This process .* is multi-threaded"
_OWN = "holdfast-"  # how the names of this room's threads begin

log = logging.getLogger("holdfast.crash")


class Watch:
    """The watching thread. Not running until `start`, and never in a forked child."""

    def __init__(self, hooks: _Hooks) -> None:
        self._hooks = hooks
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._hang_s: float | None = None
        self._wanted = False
        self._deadlocks = True
        self._beats = 0
        self._seen_beats = 0
        self._since = monotonic()  # of the last progress
        self._steps: dict[int, int] = {}
        self._reported: dict[int, tuple[int, float]] | None = None  # where everybody stood when that was reported
        self._cycles: set[tuple[int, ...]] = set()
        self._suspects: set[tuple[int, ...]] = set()
        self._pinged: dict[int, bool] = {}
        self._told: dict[str, str] = {}
        self._filter: Any = None
        self._next = 0.0  # when cycles are looked for again

    def start(self, hang_s: float | None, *, deadlocks: bool) -> None:
        self._hang_s, self._deadlocks, self._wanted = hang_s, deadlocks, True
        self._begin()

    def _begin(self) -> None:
        self._stop, self._wake = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._run, args=(self._stop, self._wake), name=f"{_OWN}watch", daemon=True)
        with suppress(RuntimeError):  # no thread can be had: hooks work without
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        self._stop.set()
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LEAVE_S)

    def before_fork(self) -> None:
        """Forking with several threads is warned of, and rightly: a program that has one thread keeps to one."""
        thread = self._thread
        self.stop()
        if thread is None or thread.is_alive():
            return
        until = monotonic() + _GONE_S
        while monotonic() < until and Path(f"/proc/self/task/{thread.native_id}").exists():
            sleep(0.0002)

    def after_fork(self, *, child: bool) -> None:
        """Go on, in the parent. A child has no sidecar, and what its parent is asked to watch is not its business."""
        self._since = monotonic()
        if child or not self._wanted:
            return
        if sys.version_info >= (3, 12) and _is_alone():
            # Python counts threads after this, and would find ours. The thread takes the filter away again.
            warnings.filterwarnings("ignore", _FORK_WARNING, DeprecationWarning)
            self._filter = warnings.filters[0]
        self._begin()

    def beat(self) -> None:
        self._beats += 1

    def soon(self) -> None:
        """Look now: there is something new to tell the sidecar."""
        self._wake.set()

    # -- looking ----------------------------------------------------------------------------------------

    def _run(self, stop: threading.Event, wake: threading.Event) -> None:
        interval = min(_INTERVAL_S, self._hang_s / 4) if self._hang_s is not None else _INTERVAL_S
        if self._filter is not None:
            wake.wait(interval)  # until the fork is over
        while not stop.is_set():
            # A look that fails is a look that is missing. The next one may see more.
            with suppress(Exception):
                self._look()
            wake.wait(interval)
            wake.clear()

    def _look(self) -> None:
        if self._filter is not None:
            with suppress(ValueError):
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined] # it is a list
            self._filter = None
        self._tell()
        self._probed()
        if self._deadlocks and monotonic() >= self._next:
            began = thread_time()
            self._look_for_cycles()
            self._next = monotonic() + (thread_time() - began) / _SHARE
        if self._hang_s is not None:
            self._look_for_standstill(self._hang_s)
        self._hooks.expire()

    def _tell(self) -> None:
        """Keep the sidecar up to date: it speaks for the agents when this process cannot any more."""
        side = self._hooks.sidecar
        if side is None:
            return
        side.beat()
        now = {f"{stands['agent']}@{stands['branch']}": stands for stands in map(agents.standing, agents.open_agents())}
        for name, stands in now.items():
            if self._told.get(name) != stands["checkpoint"]:
                side.tell(kinds.AGENT, name, stands)
                self._told[name] = stands["checkpoint"]
        for name in [name for name in self._told if name not in now]:
            side.tell(kinds.AGENT, name, None)
            del self._told[name]

    def _probed(self) -> None:
        """Somebody may wait to put a probe into this process."""
        probe.answer()

    def _look_for_cycles(self) -> None:
        """A cycle is believed when it is seen twice: threads move while they are looked at."""
        cycles = {cycle.members: cycle for cycle in deadlocks.find_cycles()}
        for members, cycle in cycles.items():
            if members in self._suspects and members not in self._cycles:
                self._cycles.add(members)
                self._report("deadlock", f"deadlock: {'; '.join(cycle.text)}"[:4000], _about(cycle))
        self._suspects = set(cycles)
        self._cycles &= self._suspects

    def _look_for_standstill(self, hang_s: float) -> None:
        if self._progressed():
            self._since = monotonic()
            if self._hooks.sidecar is not None:
                self._hooks.sidecar.progress()
        elif self._reported is None and monotonic() - self._since >= hang_s:
            what = "no heartbeat" if self._beats else "no progress"
            self._reported = _places()
            self._report("hang", f"{what} for {hang_s:g} s", threading.main_thread().ident)

    def _progressed(self) -> bool:
        if self._beats:
            before, self._seen_beats = self._seen_beats, self._beats
            if before != self._seen_beats:
                self._reported = None
            return before != self._seen_beats
        self._ping()
        if self._reported is not None:
            if not _changed(self._reported, _places()):
                return False
            self._reported, self._steps = None, _steps()
            return True
        steps = _steps()
        last, self._steps = self._steps, steps
        return steps != last

    def _ping(self) -> None:
        """An event loop that has nothing to do stands still, too: but it answers."""
        for loop in stacks.loops("run_forever"):
            key = id(loop)
            if not self._pinged.get(key, False):
                self._pinged[key] = True
                with suppress(RuntimeError):  # it was closed meanwhile
                    loop.call_soon_threadsafe(self._pinged.pop, key, None)

    def _report(self, trigger: str, why: str, about: int | None) -> None:
        path = self._hooks.take(None, None, trigger, why, what="stuck", about=about)
        # In a thread of its own: a handler's lock may be what everybody waits for.
        warn: Callable[..., None] = log.warning
        threading.Thread(target=warn, args=("%s; dump: %s", why, path), name=f"{_OWN}warning", daemon=True).start()


def _is_alone() -> bool:
    """Whether this process has one thread."""
    try:
        return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208 (names are all that is needed)
    except OSError:
        return False


def _about(cycle: Cycle) -> int | None:
    return cycle.threads[0] if cycle.threads else threading.main_thread().ident


def _who_matters() -> Iterator[dict[str, Any]]:
    """Daemon threads tick on while nothing happens."""
    for thread in stacks.threads()[:_MOST_THREADS]:
        if thread.get("main") or not (thread["current"] or thread.get("daemon") or thread["name"].startswith(_OWN)):
            yield thread


def _steps() -> dict[int, int]:
    """How often each thread that matters was woken."""
    return {
        thread["id"]: _switches(thread.get("native_id", 0)) or hash(_position(thread["frame"]))
        for thread in _who_matters()
    }


def _places() -> dict[int, tuple[int, float]]:
    """Where each thread that matters stands, and how long it has worked.

    Without those that `threading` does not know: such a one is just beginning or ending, like ours that gives a warning
    after a report, and what it will be nobody can tell.
    """
    return {
        thread["id"]: (hash(_position(thread["frame"])), _worked_s(thread.get("native_id", 0)))
        for thread in _who_matters()
        if "daemon" in thread
    }


def _changed(before: dict[int, tuple[int, float]], now: dict[int, tuple[int, float]]) -> bool:
    """Whether a thread came, went, moved or worked."""
    if before.keys() != now.keys():
        return True
    return any(now[one][0] != place or now[one][1] - worked >= _WORK_S for one, (place, worked) in before.items())


def _position(frame: types.FrameType | None) -> tuple[int, ...]:
    found: list[int] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def _worked_s(native: int) -> float:
    try:
        with open(f"/proc/self/task/{native}/schedstat", "rb") as file:  # noqa: PTH123 (many times a second)
            return int(file.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _switches(native: int) -> int:
    try:
        with open(f"/proc/self/task/{native}/status", "rb") as file:  # noqa: PTH123 (many times a second)
            counts = [line.rpartition(b"\t")[2] for line in file.read().splitlines() if b"ctxt_switches" in line]
        return sum(int(count) for count in counts)
    except (OSError, ValueError):
        return 0
