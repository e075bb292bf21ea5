"""`install()`: what makes a failing process leave a dump, and what takes all of it away again.

Owns the interpreter's hooks for exceptions, the choice of which failures are dumped, where dumps go and what is said
about them. Must not know how a dump is taken. Holds always: the process dies as it would have, with the same exit code,
signal and traceback; hooks that were there before are called; nothing that goes wrong here is raised into the program.
"""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from holdfast.agent.watchers import WATCHERS
from holdfast.crash import agents, folder, inside, kinds, stacks
from holdfast.crash.dumpfile import PartFailed, in_time
from holdfast.crash.guard import Guard, is_failure, place_of
from holdfast.crash.kinds import Limits
from holdfast.crash.redaction import Redactor
from holdfast.crash.shapes import is_subtype, type_name
from holdfast.crash.watch import Watch
from holdfast.errors import BadOption, HoldfastError
from holdfast.text import is_url

if TYPE_CHECKING:
    from holdfast.crash.outside import Fatal
    from holdfast.crash.sidecar import Sidecar

_BALLAST_BYTES = 64 << 20  # of address space, given back when memory runs out, so that the dump has some
_NATIVE_SHARE = 0.9  # of a part's time: for the sidecar, to look at this process's native stacks
_SHORT_OBJECTS = 50_000  # objects of a dump that is taken when memory has run out
_MOST_DUMPS = 20  # of failures that the process survives; the one that ends it comes on top
_PRUNE_S = 5.0  # for removing what is too much
_MOST_ALIKE = 3  # of those, raised by the same line

_active: _Hooks | None = None
_lock = threading.RLock()


class Installed:
    """What `install()` returns. Leaving the `with` block, or `remove()`, puts everything back."""

    def __init__(self, hooks: _Hooks, given: dict[str, Any]) -> None:
        self._hooks: _Hooks | None = hooks
        self._given = given

    @property
    def folder(self) -> Path:
        """Where dumps go."""
        return self._running().folder()

    def beat(self) -> None:
        """Say that the program is alive. Once it was called, `hang_s` seconds without it count as a hang."""
        self._running().watch.beat()

    def failed(self, error: BaseException, why: str = "") -> Path | None:
        """Dump an exception that the caller has caught and that ends the program; None when that failed."""
        return self._running().take(error, None, "exception", why or _why(error), last=True)

    def remove(self) -> None:
        """Take away what the matching `install()` brought. Does nothing the second time."""
        global _active  # noqa: PLW0603 (hooks are the interpreter's, so there is one set of them)
        with _lock:
            hooks, self._hooks = self._hooks, None
            if hooks is None:
                return
            hooks.wishes = [wish for wish in hooks.wishes if wish is not self._given]
            if _active is hooks and hooks.wishes:
                hooks.change()
            elif _active is hooks:
                _active = None
                hooks.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _running(self) -> _Hooks:
        if self._hooks is None:
            raise BadOption("the hooks were removed", hint="Call holdfast.crash.install() again.")
        return self._hooks


@dataclass(frozen=True)
class _Settings:
    """What ``install()`` was asked for."""

    to: Path | None = None
    store: Path | None = None
    core: bool = False
    hang_s: float | None = None
    deadlocks: bool = True
    limits: Limits | None = None
    logs: int = 500
    native: bool = False
    sidecar: bool = True
    say: bool = True


def install(
    store: Any = None,
    *,
    to: str | os.PathLike[str] | None = None,
    core: bool | None = None,
    hang_s: float | None = None,
    deadlocks: bool | None = None,
    limits: Limits | None = None,
    logs: int | None = None,
    native: bool | None = None,
    sidecar: bool | None = None,
    say: bool | None = None,
) -> Installed:
    """From now on, a failure of this process leaves a dump.

    Uncaught exceptions of threads and tasks, fatal signals, deadlocks, and with ``hang_s`` standing still for so many
    seconds. ``store`` (or its path) says whose folder the dumps go to, otherwise ``to`` does, or where the program's
    store is. ``sidecar`` (on): a second process that also sees the end by SIGKILL or for memory. ``core`` (off) keeps
    the kernel's core. ``native`` (off): registers and native stacks of exceptions, too; those of hangs and deaths are
    always there. ``logs`` (500) records are kept for a dump. ``say`` (on): a line on stderr tells where the dump is.

    Standing still means that in ``hang_s`` seconds neither the main thread nor any other that is no daemon was woken or
    got the processor, and no event loop answered; or that one of them did not let go of the interpreter. A loop that
    computes, or polls, for ever is busy, which is no hang: who wants to see that calls ``Installed.beat()`` where the
    program gets on; from the first call on, that is all that counts. One hang is reported once, until a thread moves.

    Calling it again changes what is given and leaves the rest, so that a program's own ``install`` counts under
    `holdfast run`. What somebody has installed stays until they remove it.
    """
    global _active  # noqa: PLW0603 (hooks are the interpreter's, so there is one set of them)
    if hang_s is not None and not hang_s > 0:
        raise BadOption(f"hang_s={hang_s!r}", hint="Give seconds above zero, or None.")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BadOption(
            "dumps need a Python with its global lock, and this is a free-threaded build",
            hint="Use the ordinary build of the same version.",
        )
    place = getattr(store, "place", store)
    options = {
        "to": Path(to) if to is not None else None,
        "store": Path(place) if place is not None and not is_url(str(place)) else None,  # a server has no folder
        "core": core, "hang_s": hang_s, "deadlocks": deadlocks, "limits": limits, "logs": logs, "native": native,
        "sidecar": sidecar, "say": say,
    }  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    with _lock:
        if _active is None:
            hooks = _Hooks(given)
            hooks.start()
            _active = hooks
        else:
            _active.wishes.append(given)
            _active.change()
        return Installed(_active, given)


class _Hooks:
    """The one set of hooks of this process."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.wishes = [given]  # of everybody who has installed, the newest last
        self.settings = _Settings(**given)
        self.seen: dict[tuple[str, str, int], int] = {}  # failures that were survived, by type and place
        self.sidecar: Sidecar | None = None
        self.watch: Watch = Watch(self)
        self._native: Callable[[], None] | None = None  # takes the sidecar's part of our dumps away
        self._used: str | None = None  # the place of the store whose agent was opened last
        self._tidy = True  # whether the folder was looked through for what is too much, with that store's help
        self._fatal: Fatal | None = None
        self._previous: list[Callable[..., Any]] = []
        self._make_invoke: Any = None  # threading's, which asks a thread's hook
        self._asked: set[int] = set()  # threads that have failed and come to our hook
        self._ended_by: tuple[BaseException, Path | None] | None = None  # what ended the program, and its dump
        self._before: BaseException | None = None  # what had ended a program of this interpreter before
        self._go_back: Callable[[], None] = _nothing
        self._guard = Guard(self)
        self._ballast: mmap.mmap | None = None
        self._outside_at: Path | None = None  # the folder of what watches from outside
        self._is_child = False

    # -- putting in and taking out --------------------------------------------------------------------------

    def start(self) -> None:
        self._previous = [sys.excepthook, threading.excepthook, sys.unraisablehook]
        sys.excepthook, threading.excepthook, sys.unraisablehook = self._uncaught, self._in_thread, self._unraisable
        self._make_invoke = getattr(threading, "_make_invoke_excepthook", None)
        if self._make_invoke is not None:
            threading._make_invoke_excepthook = self._invoke_excepthook  # type: ignore[attr-defined] # noqa: SLF001
        self._before = getattr(sys, "last_value", None)
        self._go_back = inside.go_to(self.folder)
        if self.settings.logs > 0:
            inside.keep_logs(self.settings.logs)
        with suppress(OSError, ValueError):
            self._ballast = mmap.mmap(-1, _BALLAST_BYTES)
        self._guard.start()
        WATCHERS.append(self._agent)
        atexit.register(self._ending)
        self._begin_outside()
        self._begin_watch()

    def _begin_watch(self) -> None:
        wanted = self.settings
        if wanted.deadlocks or wanted.sidecar or wanted.hang_s is not None:
            self.watch.start(wanted.hang_s, deadlocks=wanted.deadlocks)

    def change(self) -> None:
        """Somebody else has installed, or removed: of each setting the newest wish counts."""
        before, self.settings = self.settings, _Settings(**dict(wish for one in self.wishes for wish in one.items()))
        if self.settings == before or self._is_child:
            return
        if self.settings.logs != before.logs:
            inside.stop_logs()
            if self.settings.logs > 0:
                inside.keep_logs(self.settings.logs)
        if _outside(self.settings) != _outside(before) or self.folder() != self._outside_at:
            self._end_outside()
            self._begin_outside()
        if _watched(self.settings) != _watched(before):
            self.watch.stop()
            self._begin_watch()

    def stop(self) -> None:
        atexit.unregister(self._ending)
        self.watch.stop()
        self._guard.stop()
        with suppress(ValueError):
            WATCHERS.remove(self._agent)
        # Somebody who has put a hook over ours keeps it; ours then only calls the one before it.
        previous, own = self._previous, (self._uncaught, self._in_thread, self._unraisable)
        if sys.excepthook == own[0]:
            sys.excepthook = previous[0]
        if threading.excepthook == own[1]:
            threading.excepthook = previous[1]
        if sys.unraisablehook == own[2]:
            sys.unraisablehook = previous[2]
        if getattr(threading, "_make_invoke_excepthook", None) == self._invoke_excepthook:
            threading._make_invoke_excepthook = self._make_invoke  # type: ignore[attr-defined] # noqa: SLF001
        self._go_back()
        self._ended_by = None
        self._end_outside()
        inside.stop_logs()
        self._free_ballast()

    def _end_outside(self) -> None:
        self._leave_sidecar(stop=True)
        if self._fatal is not None:
            self._fatal.disable()
            self._fatal = None
        if self._outside_at is not None:
            with suppress(OSError):
                self._outside_at.rmdir()  # when nothing is in it
            self._outside_at = None

    def _move_outside(self) -> None:
        """Once, when the program opens its store: from where dumps went without one to the store's folder."""
        at = self._outside_at
        settled = at is not None and (_is_store(at.parent) or at == self.folder())
        if not (settled or self.removed or self._is_child):
            self._end_outside()
            self._begin_outside()

    def _leave_sidecar(self, *, stop: bool) -> None:
        side, self.sidecar = self.sidecar, None
        if self._native is not None:
            self._native()
            self._native = None
        if side is not None and stop:
            side.stop()

    @property
    def removed(self) -> bool:
        return _active is not self

    def folder(self) -> Path:
        """Where a dump goes now: it may be known only when the program has opened its store."""
        wanted = self.settings
        if wanted.to is not None:
            return wanted.to
        if wanted.store is not None and _is_store(wanted.store):
            return folder.of(wanted.store)
        if not os.environ.get("HOLDFAST_DUMPS"):
            stores = [place for store in agents.open_stores() if _is_store(place := Path(store.place))]
            if self._used is not None and _is_store(Path(self._used)):
                stores.append(Path(self._used))  # an exception that leaves `with holdfast.open()` has closed it
            if stores:
                return stores[-1] / "dumps"
        return folder.default()

    def _begin_outside(self) -> None:
        """Fatal signals and the sidecar need a folder from the start. They move when the program opens its store."""
        from holdfast.crash import outside, sidecar

        wanted = self.settings
        self._outside_at = place = self.folder()
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            outside.collect_fatal(place)
            self._prune(place)
            self._fatal = outside.enable_fatal(place)
            if wanted.core:
                from holdfast.crash import cores

                cores.allow()
            if wanted.sidecar:
                self.sidecar = sidecar.start(
                    place, fatal=self._fatal, hang_s=wanted.hang_s, core=wanted.core, limits=wanted.limits
                )
                if wanted.logs > 0:
                    inside.keep_logs(wanted.logs).ship = self.sidecar.log
                if wanted.native:
                    limit = (wanted.limits or Limits()).part_s * _NATIVE_SHARE
                    self._native = inside.add_part(kinds.NATIVE, "threads", partial(self.sidecar.native, limit))
        except (HoldfastError, OSError) as error:
            self.note(f"dumps of fatal signals are off: {error}")

    def _agent(self, handle: Any, opened: bool) -> None:
        with suppress(Exception):  # whoever opens an agent must not fail for a dump's sake
            agents.watch(handle, opened)
            if opened and handle._writer is not None:  # noqa: SLF001
                if self._used != handle._store.place:  # noqa: SLF001
                    self._used, self._tidy = handle._store.place, False  # noqa: SLF001
                self._move_outside()
                self.watch.soon()

    def _ending(self) -> None:
        # A hook that the program has put over ours has had the exception; Python has kept it.
        error = getattr(sys, "last_value", None)
        if error is not None and error is not self._before and is_failure(error) and _is_outermost(error):
            self.take(error, None, "exception", _why(error), last=True)
        self._guard.drop()
        if self.sidecar is not None:
            self.sidecar.ending()

    def expire(self) -> None:
        """Let go of what was held for an exception that does not come, and of dumps that are too many."""
        self._guard.expire()
        if not self._tidy:
            self._tidy = True
            self._prune(self.folder())

    def forked(self) -> None:
        """In a child: threads are gone, and the sidecar watches the parent."""
        self._is_child = True
        self._leave_sidecar(stop=False)
        self.watch.after_fork(child=True)
        self._guard.drop()  # what the parent holds

    # -- the hooks ------------------------------------------------------------------------------------------

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        previous = self._previous[0]
        if self.removed or not is_failure(error):
            previous(kind, error, traceback)
            return
        if is_subtype(type(error), MemoryError):
            self._free_ballast()  # showing the traceback needs some, too
        # The traceback first: whatever a dump does, the program has said what it has to say. A hook that is not
        # Python's own may end the process or begin a session, so the dump is taken before it is asked.
        if previous is sys.__excepthook__:
            try:
                previous(kind, error, traceback)
            finally:
                self.take(error, traceback, "exception", _why(error), last=True)
        else:
            self.take(error, traceback, "exception", _why(error), last=True)
            previous(kind, error, traceback)

    def _in_thread(self, args: Any) -> None:
        self._asked.add(threading.get_ident())
        try:
            self._previous[1](args)
        finally:
            error = args.exc_value
            if not self.removed and error is not None and is_failure(error):
                name = args.thread.name if args.thread is not None else "?"
                self.take(error, args.exc_traceback, "thread", f"{_why(error)} in thread {name}")

    def _invoke_excepthook(self) -> Any:
        """What a new thread will call when it fails. A hook that was put over ours is asked, and there is a dump."""
        invoke = self._make_invoke()

        def invoked(thread: Any) -> None:
            error, ident = sys.exception(), threading.get_ident()
            self._asked.discard(ident)
            try:
                invoke(thread)
            finally:
                over = ident not in self._asked
                if over and not self.removed and error is not None and is_failure(error):
                    self.take(error, None, "thread", f"{_why(error)} in thread {thread.name}")

        return invoked

    def _unraisable(self, args: Any) -> None:
        try:
            self._previous[2](args)
        finally:
            error = args.exc_value
            if not self.removed and error is not None and is_failure(error) and not sys.is_finalizing():
                take = self.take_beside if stacks.in_loop() else self.take
                take(error, args.exc_traceback, "unraisable", f"{_why(error)} that nobody could catch")

    # -- one dump -------------------------------------------------------------------------------------------

    def take(
        self,
        error: BaseException | None,
        traceback: types.TracebackType | None,
        trigger: str,
        why: str,
        *,
        last: bool = False,
        what: str = "crash",
        about: int | None = None,
    ) -> Path | None:
        """Write a dump and tell people and histories. Never raises; None when there is none."""
        try:
            if last and self._ended_by is not None and error is self._ended_by[0]:
                return self._ended_by[1]
            if not last and not self._is_new(_place_of(error, traceback, trigger, about)):
                return None
            if last and error is not None:
                self._ended_by = error, None  # whatever comes of this, it is not tried again
            held = self._guard.held(error) if error is not None else None
            if held is not None and held.error is error and trigger == "exception":
                trigger, why = held.trigger, held.why
            path = self.capture(error, traceback, trigger, why, about=about, seen=held.seen if held else None)
            if last and error is not None:
                self._ended_by = error, path
            self._told(path, error, trigger, why, what)
            self._prune(path.parent, path.name)
        except Exception as failure:  # noqa: BLE001 (a second failure must not change how the first one ends)
            self.note(f"no dump could be written: {_short(failure)}")
            return None
        except KeyboardInterrupt:
            if last:
                return None
            raise
        return path

    def take_beside(self, error: BaseException, traceback: types.TracebackType | None, trigger: str, why: str) -> None:
        """The same in another thread, for one whose loop must go on. The program's end waits for it."""
        about = threading.get_ident()
        thread = threading.Thread(
            target=lambda: self.take(error, traceback, trigger, why, about=about), name="holdfast-dump", daemon=False
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, or no thread can be had
            self.take(error, traceback, trigger, why)

    def capture(
        self, error: BaseException | None, traceback: types.TracebackType | None, trigger: str, why: str,
        *, about: int | None = None, seen: stacks.TaskSnapshot | None = None,
    ) -> Path:  # fmt: skip
        limits = self.settings.limits or Limits()
        if error is not None and is_subtype(type(error), MemoryError):
            self._free_ballast()
            limits = replace(limits, objects=min(limits.objects, _SHORT_OBJECTS))
        with agents.travelling(error):
            return inside.capture(
                why, error=error, traceback=traceback, to=self.folder(), trigger=trigger, limits=limits,
                thread=about, seen=seen,
            )  # fmt: skip

    def _prune(self, place: Path, newest: str = "") -> None:
        """Make room, now that this dump is whole. Where it cannot be told which ones are needed, nothing goes."""
        limits = self.settings.limits or Limits()
        stores = [store.place for store in agents.open_stores()]
        stores += [self._used] if self._used is not None else []

        def prune() -> None:
            for path in agents.removable(place, stores, limits.kept_dumps, limits.kept_bytes, {newest}):
                # Whoever tidies up beside the program may meet one that it has just begun to write.
                if newest or f"-{os.getpid()}-" not in path.name:
                    folder.remove(path)

        if folder.surplus(place, limits.kept_dumps, limits.kept_bytes):
            with suppress(PartFailed):
                in_time(prune, _PRUNE_S)

    def _told(self, path: Path, error: BaseException | None, trigger: str, why: str, what: str) -> None:
        self.note(f"dump written to {path}")
        redactor = Redactor(dict(os.environ))
        redactor.learn_arguments([word for word in sys.orig_argv[:200] if type(word) is str])
        message = stacks.message_of(error, 1000)[0] if error is not None else why
        with agents.travelling(error):
            name = type_name(type(error)) if error is not None else trigger
            agents.tell(path, name, redactor.clean(message), trigger, what=what)

    def note(self, text: str) -> None:
        """One line for people, in one write, so that it does not mix with others'."""
        if self.settings.say and sys.stderr is not None:
            with suppress(Exception):
                sys.stderr.write(f"holdfast: {text}\n")
                sys.stderr.flush()

    def _is_new(self, place: tuple[str, str, int]) -> bool:
        """Whether a failure that the process survives is worth a dump: the fourth one of a line is not."""
        with _lock:
            if sum(self.seen.values()) >= _MOST_DUMPS or self.seen.get(place, 0) >= _MOST_ALIKE:
                return False
            self.seen[place] = self.seen.get(place, 0) + 1
            return True

    def _free_ballast(self) -> None:
        ballast, self._ballast = self._ballast, None
        if ballast is not None:
            ballast.close()


def _outside(wanted: _Settings) -> tuple[Any, ...]:
    """What the sidecar is begun with."""
    return wanted.core, wanted.hang_s, wanted.limits, wanted.logs, wanted.native, wanted.sidecar


def _watched(wanted: _Settings) -> tuple[Any, ...]:
    """What the watching thread is begun with."""
    return wanted.hang_s, wanted.deadlocks, wanted.sidecar


def _nothing() -> None:
    pass


def _place_of(
    error: BaseException | None, traceback: types.TracebackType | None, trigger: str, about: int | None
) -> tuple[str, str, int]:
    """What failed and where; of a thread that stands still, where it stands."""
    if error is not None:
        return place_of(error, traceback if traceback is not None else stacks.traceback_of(error))
    frame = sys._current_frames().get(about) if about is not None else None  # noqa: SLF001 (the documented way)
    return (trigger, frame.f_code.co_filename, frame.f_lineno or 0) if frame is not None else (trigger, "", 0)


def _is_outermost(error: BaseException) -> bool:
    """Whether it has left the program. Consoles inside of a program keep what they have shown in the same place."""
    trace = stacks.traceback_of(error)
    return trace is not None and trace.tb_frame.f_back is None


def _why(error: BaseException) -> str:
    return f"uncaught {type_name(type(error))}"


def _short(failure: BaseException) -> str:
    text = stacks.message_of(failure, 200)[0]
    return f"{type_name(type(failure))}: {text}" if text else type_name(type(failure))


def _is_store(path: Path) -> bool:
    return (path / "store.db").exists()


def _before_fork() -> None:
    if _active is not None:
        _active.watch.before_fork()


def _after_in_parent() -> None:
    if _active is not None:
        _active.watch.after_fork(child=False)


def _after_in_child() -> None:
    global _lock  # noqa: PLW0603 (a lock that another thread held would never be free in the child)
    _lock = threading.RLock()
    if _active is not None:
        _active.forked()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
