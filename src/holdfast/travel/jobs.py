"""Executions in processes of their own: one clean process is started, and each job is a fork of it.

Owns how jobs get there and what comes back, how many go on at once, and how long. What a job does is the business of
``rerun``. What always holds: a job runs in a process that has executed nothing before it, in a directory of its own
that is removed afterwards, closed by a ``Sandbox`` before anything of the program is loaded; one that ends without an
answer, or takes too long, is an answer, too.

    executed([job, ...])                 executions, in the order of the jobs
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import msgspec

from holdfast.errors import BadOption, HoldfastError, StoreFailed, format_path
from holdfast.run.outcomes import told
from holdfast.travel.execution import Execution, Moment
from holdfast.travel.expressions import MISSING, Look, parse_path
from holdfast.travel.handle import open_store
from holdfast.travel.rerun import Halt, Replaying, prepared, source_of
from holdfast.travel.sandbox import Sandbox, Watch
from holdfast.travel.variation import Job, Variation, checker, loaded, replace_tools

if TYPE_CHECKING:
    from holdfast.travel.adapter import Adapter

PARALLEL = max(1, min(8, os.cpu_count() or 1))
MOMENTS_MAX = 100
_PIECE = 1 << 16
_TRACE_LINES = 6
_SHOWN = 200
_END_S = 5.0
Done = Callable[[int, Execution], None]
"""Told of each execution when it is there: the index of its job, and what came of it."""


# -- from outside -----------------------------------------------------------------------------------------------------


class Workers:
    """A process that executes jobs, started with the first of them: ``executed`` uses it inside of ``with Workers():``.

    One inside another is the other. It ends with this process at the latest: its pipe is closed then.
    """

    def __init__(self, parallel: int = PARALLEL, *, terminal: bool = False) -> None:
        self._parallel, self._terminal = parallel, terminal
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Workers:  # noqa: PYI034 - it may be another
        there = bool(_open) and _open[-1]._terminal == self._terminal
        _open.append(_open[-1] if there else self)
        return _open[-1]

    def __exit__(self, *_: object) -> None:
        last = _open.pop()
        if last not in _open:
            last.close()

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            self._asking.close()
            self._answers.close()
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait()

    def _start(self) -> None:
        asked, asking = os.pipe()
        answering, answered = os.pipe()
        words = [sys.executable, "-P", "-m", "holdfast.travel.jobs", str(asked), str(answered), str(self._parallel)]
        says = sys.stderr if _has_file(sys.stderr) else subprocess.DEVNULL
        path = os.pathsep.join(filter(None, [_home(), os.environ.get("PYTHONPATH", "")]))
        self._child = subprocess.Popen(  # noqa: S603 - our own
            words, pass_fds=(asked, answered), stdin=None if self._terminal else subprocess.DEVNULL,
            stdout=None if self._terminal else says, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        os.close(asked)
        os.close(answered)
        self._asking, self._answers = os.fdopen(asking, "wb"), os.fdopen(answering, "rb")

    def execute(self, jobs: Sequence[Job], tell: Done | None) -> list[Execution]:
        """Execute jobs, several at once; their executions in order."""
        if self._child is None:
            self._start()
        results: dict[int, Execution] = {}
        with suppress(BrokenPipeError):
            self._asking.write(msgspec.json.encode((dict(os.environ), jobs)) + b"\n")
            self._asking.flush()
        while len(results) < len(jobs) and (line := self._answers.readline()):
            index, found = msgspec.json.decode(line, type=tuple[int, Execution])
            results[index] = found
            if tell is not None:
                tell(index, found)
        if len(results) < len(jobs):
            self.close()
            raise StoreFailed("the process that executes runs again has ended; nothing was changed")
        return [results[index] for index in range(len(jobs))]


_open: list[Workers] = []


def executed(jobs: Sequence[Job], *, parallel: int = PARALLEL, tell: Done | None = None) -> list[Execution]:
    """Execute jobs, several at once. One that is debugged has this process's terminal."""
    if not jobs:
        return []
    with Workers(parallel, terminal=any(job.debug for job in jobs)) as workers:
        return workers.execute(jobs, tell)


def _home() -> str:
    """Where this package is found, by a process that starts elsewhere."""
    return str(Path(__file__).parents[2])


def _has_file(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


# -- the process that forks -------------------------------------------------------------------------------------------


class Child:
    """A job that is being executed."""

    def __init__(self, index: int, job: Job) -> None:
        self.index, self.job = index, job
        self.directory = tempfile.mkdtemp(prefix="holdfast-replay-")
        self.end_s = time.monotonic() + job.limit_s
        self.data = b""
        self.late = False
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(reading)
            _only(job, self.directory, writing)
        os.close(writing)
        self.pipe = reading

    def stop(self) -> None:
        self.late = True
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> bytes:
        """What it said, as a line."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        shutil.rmtree(self.directory, ignore_errors=True)
        found = None
        if status == 0 and self.data:
            with suppress(msgspec.MsgspecError):
                found = msgspec.json.decode(self.data, type=Execution)
        if found is None:
            code = os.waitstatus_to_exitcode(status)
            why = f"it took longer than {self.job.limit_s:g} s" if self.late else f"its process ended with {code}"
            found = Execution(self.job.agent, self.job.branch, self.job.run or "", failed=why)
        return msgspec.json.encode((self.index, found)) + b"\n"


def main(asked: int, answered: int, parallel: int) -> None:
    """Execute the jobs that are read from one pipe, a line of them at a time, and answer on the other."""
    os.set_inheritable(answered, False)
    os.set_inheritable(asked, False)
    with os.fdopen(asked, "rb") as lines, os.fdopen(answered, "wb") as out:
        for line in lines:
            env, jobs = msgspec.json.decode(line, type=tuple[dict[str, str], list[Job]])
            os.environ.clear()
            os.environ.update(env)
            _batch(jobs, parallel, out)


def _batch(jobs: Sequence[Job], parallel: int, out: BinaryIO) -> None:
    waiting = list(enumerate(jobs))[::-1]
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < parallel:
                child = Child(*waiting.pop())
                selector.register(child.pipe, selectors.EVENT_READ, child)
            for key, _ in selector.select(0.2):
                child = key.data
                piece = os.read(child.pipe, _PIECE)
                child.data += piece
                if not piece:
                    selector.unregister(child.pipe)
                    out.write(child.ended())
                    out.flush()
            for key in list(selector.get_map().values()):
                if time.monotonic() > key.data.end_s and not key.data.late and not key.data.job.debug:
                    key.data.stop()


# -- in the process of a job ------------------------------------------------------------------------------------------


def _only(job: Job, directory: str, pipe: int) -> NoReturn:
    """All that a forked process does."""
    code = 1
    try:
        found = _execution(job, directory)
        with os.fdopen(pipe, "wb") as out:
            out.write(msgspec.json.encode(found))
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may come back to where it was forked
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _execution(job: Job, directory: str) -> Execution:
    if job.debug == "dap":
        from holdfast.travel.adapter import keep_output

        keep_output()
    sandbox = Sandbox(directory)
    isolation = ["audit"]
    if not job.place.startswith("postgres") and sandbox.unplug():
        isolation.append("no network")
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    found = Execution(job.agent, job.branch, job.run or "")
    run: Replaying | None = None
    try:
        store = open_store(job.place, create=False, readonly=True)
        with closing(store):
            os.environ["HOLDFAST_STORE"] = str(Path(directory, ".holdfast"))
            if sandbox.seal():
                isolation.append("read-only files")
            os.chdir(directory)
            sandbox.close()
            variation = Variation(Job(), store._registry)
            loaded(job, variation)
            try:
                replace_tools(job)
            except BadOption as error:
                found.misname(error)
                raise
            store._register(job.types)
            function, variation = variation.function, Variation(job, store._registry)
            variation.function = function
            run, made = prepared(store, job, variation)
            found = run.found
            run.handle.bring_files(sandbox, (job.place, job.base, job.code, sys.prefix, sys.base_prefix))
            with _Looking(job, run):
                run.execute(made, checker(job.check, job) if job.check else None)
    except HoldfastError as error:
        found.failed = str(error)
    except Halt:
        found.failed = found.failed or "it was stopped"
    except BaseException as error:  # noqa: BLE001 - the program could not be loaded, or asked
        shown = traceback.format_exception(error)[-_TRACE_LINES:]
        found.failed = f"the program raised {told(error)}\n{''.join(shown)}"
    found.blocked, found.isolation = sandbox.tried, isolation
    if not (job.debug or job.watch or job.watch_check or job.keep or job.between[1]):
        found.steps = found.steps[-1000:]
    return found


class _Looking:
    """What is looked at while a run is executed: a path of its state, a check, or all of it by a debugger."""

    def __init__(self, job: Job, run: Replaying) -> None:
        self.job, self.run = job, run
        self.watch: Watch | Adapter | None = None

    def __enter__(self) -> None:
        job, run = self.job, self.run
        if job.debug == "dap":
            from holdfast.travel.adapter import Adapter

            self.watch = Adapter(job, run, tempfile.gettempdir())
            run.host.entering = self.watch.begin
        elif job.debug:
            from holdfast.travel.debugger import begin

            begin(job, run)
        elif job.watch:
            path = parse_path(job.watch)
            self._watch(lambda look: look.raw(path), lambda look: look.at(path))
        elif job.watch_check and job.check:
            check = checker(job.check, job)
            self._watch(lambda _: check(run.handle), lambda _: check(run.handle))

    def __exit__(self, *_: object) -> None:
        if self.watch is not None:
            self.watch.end()
        found, path = self.run.found, parse_path(self.job.watch)
        if self.job.watch and not found.moments and Look.of(self.run.handle._document).at(path) is MISSING:
            found.nowhere.append(format_path(path))

    def _watch(self, look: Callable[[Any], Any], show: Callable[[Any], Any]) -> None:
        run, document = self.run, self.run.handle._document

        def shown() -> str:
            found = show(Look.of(document))
            return "(not there)" if found is MISSING else repr(found)[:_SHOWN]

        before = [shown()]

        def tell(line: str, _old: Any, _new: Any) -> None:
            now = shown()
            if len(run.found.moments) < MOMENTS_MAX:
                step = run.found.steps[-1].number if run.found.steps else 0
                run.found.moments.append(Moment(line, source_of(line), step, before[0], now))
            before[0] = now

        self.watch = watch = Watch(lambda: look(Look.of(document)), tell)
        run.host.entering = watch.begin


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
