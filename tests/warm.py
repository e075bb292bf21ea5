"""Python processes that begin with everything loaded: forked from one that has, instead of starting anew.

``warm.Popen`` and ``warm.run`` are those of ``subprocess``, for commands that begin with ``sys.executable``. Importing
the command line takes ten times as long as most of what tests do with it, and LangGraph longer still.

What always holds: the process that forks has one thread, opens no store and runs nothing of a test. Who is forked has
its own pid, is a child of the test's process and dies of signals as any other; has the standard streams, directory,
environment, arguments, search path and ``__main__`` of a fresh interpreter, other random numbers, and ends as one does.
What is not fresh: modules are loaded and stay whole to the end, the seed of ``hash()`` is that of the process that
forked, and ``/proc`` shows that one's command line. So a test of imports, options of Python, tracebacks or dumps starts
a Python of its own.

This file is also the program of the process that forks. It must not import anything of Holdfast by itself.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import io
import marshal
import os
import pkgutil
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOLDFAST = "holdfast"
LANGGRAPH = "langgraph"
LOADED = {
    HOLDFAST: (
        "asyncio", "cryptography.hazmat.primitives.ciphers.aead", "cyclopts.config", "cyclopts.help",
        "docstring_parser", "pwd", "rich.markdown", "rich.panel",
        "holdfast.agent.*", "holdfast.cli.*", "holdfast.crash.*", "holdfast.run.*", "holdfast.store.*",
    ),
    LANGGRAPH: ("asyncio", "holdfast.agent.*", "holdfast.run.*", "holdfast.contrib.langgraph", "langgraph.graph"),
}  # fmt: skip
"""What a process begins with; with a star, all modules below."""

OPTIONS = {"-P"}  # of Python; with others a test is about the start of the interpreter
STARTING = ("PYTHON", "LC_", "LANG")  # variables that Python reads as it starts begin so
SUBREAPER, DEATH_SIGNAL = 36, 1  # prctl: orphans below this process become its children; it dies with its parent
_SIZE = 8


# -- who asks -------------------------------------------------------------------------------------------


class Popen(subprocess.Popen):
    """As ``subprocess.Popen``. ``loaded`` says with what it begins."""

    def __init__(self, args: Any, *, loaded: str = HOLDFAST, **options: Any) -> None:
        self._loaded = loaded
        super().__init__([str(arg) for arg in args], **options)

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
    ) -> None:  # fmt: skip
        start_new_session = others[5]
        if args[0] != sys.executable or preexec_fn or pass_fds or shell:
            raise ValueError(f"not a Python that can be forked: {args}")
        environment = {str(name): str(value) for name, value in (os.environ if env is None else env).items()}
        options = []
        while args[1 + len(options)] in OPTIONS:
            options.append(args[1 + len(options)])
        job = {
            "args": args, "options": len(options), "cwd": str(cwd or Path.cwd()), "env": environment,
            "session": bool(start_new_session),
        }  # fmt: skip
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _template(tuple(options), environment, self._loaded).fork(job, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(args: Any, *, input: Any = None, capture_output: bool = False, timeout: float | None = None,
        check: bool = False, **options: Any) -> subprocess.CompletedProcess:  # fmt: skip
    """As ``subprocess.run``."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Template:
    """A process that has loaded what others need, and forks them."""

    def __init__(self, options: tuple[str, ...], environment: dict[str, str], loaded: str) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, *options, __file__, str(other.fileno()), loaded],
                cwd="/", env=environment, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        atexit.register(self.close)

    def fork(self, job: dict[str, Any], streams: list[int]) -> int:
        """Start a process; its pid. Who forked it has stepped aside by then, so that its parent is this process."""
        with self._lock:
            _prctl(SUBREAPER, 1)
            try:
                send(self._socket, job, streams)
                answer = receive(self._socket)[0]
            finally:
                _prctl(SUBREAPER, 0)  # other tests' orphans are not ours
        if answer is None:
            raise RuntimeError("the process that forks has died")
        return answer["pid"]

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_templates: dict[tuple[Any, ...], Template] = {}
_making = threading.Lock()


def _template(options: tuple[str, ...], environment: dict[str, str], loaded: str) -> Template:
    # A process that was forked from this one needs one of its own.
    key = (os.getpid(), options, starts_with(environment), loaded)
    with _making:
        if key not in _templates:
            _templates[key] = Template(options, environment, loaded)
        return _templates[key]


def starts_with(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in environment.items() if name.startswith(STARTING)))


def _prctl(*words: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(*words, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# -- between them ---------------------------------------------------------------------------------------


def send(to: socket.socket, message: dict[str, Any], descriptors: list[int] = ()) -> None:
    data = marshal.dumps(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    to.sendmsg([len(data).to_bytes(_SIZE)], rights)
    to.sendall(data)


def receive(of: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message; None when the other side is gone."""
    head, rights, _, _ = of.recvmsg(_SIZE, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    if not head:
        return None, []
    descriptors = array.array("i")
    for _, _, data in rights:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    data, size = bytearray(), int.from_bytes(head)
    while len(data) < size:
        part = of.recv(min(size - len(data), 1 << 16))
        if not part:
            return None, []
        data += part
    return marshal.loads(bytes(data)), list(descriptors)


# -- who forks ------------------------------------------------------------------------------------------


def load(what: str) -> None:
    for name in LOADED[what]:
        if not name.endswith(".*"):
            importlib.import_module(name)
            continue
        package = importlib.import_module(name[:-2])
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def serve(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork whoever is asked for. Returns in each of them."""
    while True:
        job, streams = receive(asking)
        if job is None:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            stepping_aside = os.getpid()
            child = os.fork()
            if child:
                os.write(writing, child.to_bytes(_SIZE))
                os._exit(0)
            while os.getppid() == stepping_aside:
                time.sleep(0.0002)
            asking.close()
            os.close(reading)
            os.close(writing)
            return job, streams
        os.close(writing)
        os.waitpid(between, 0)  # from here on the child's parent is who asked
        pid = int.from_bytes(os.read(reading, _SIZE))
        for descriptor in (reading, *streams):
            os.close(descriptor)
        send(asking, {"pid": pid})


# -- for shells -----------------------------------------------------------------------------------------

FRESH = {"demo", "run"}  # verbs that show the stacks of a program, or start others
SHIM = """
import _signal, _socket, array, marshal, os, sys
there, real, *words = sys.argv[1:]
answer = {{}}
if not {words!r}.intersection(words):
    job = marshal.dumps({{"args": [sys.executable, "-m", "holdfast", *words], "options": 0, "session": False,
                         "cwd": os.getcwd(), "env": dict(os.environ)}})
    line = _socket.socket(_socket.AF_UNIX)
    line.connect(there)
    streams = array.array("i", [0, 1, 2])
    line.sendmsg([len(job).to_bytes({size})], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    line.sendall(job)
    size = int.from_bytes(line.recv({size}, _socket.MSG_WAITALL))
    answer = marshal.loads(line.recv(size, _socket.MSG_WAITALL))
if "code" not in answer:
    os.execv(real, [real, *words])
if answer["code"] < 0:
    _signal.signal(-answer["code"], _signal.SIG_DFL)
    os.kill(os.getpid(), -answer["code"])
os._exit(answer["code"])
"""


def offer(folder: Path) -> tuple[dict[str, Any], list[int]] | None:
    """From now on ``holdfast`` in folder/bin is forked from a copy of this process, as it is now. Returns in them, too.

    What the shell starts is a small program that hands its streams over, waits, and ends as the other one did; when it
    is killed, so is the other one.
    """
    (folder / "bin").mkdir(parents=True)
    (folder / "shim.py").write_text(SHIM.format(words=FRESH, size=_SIZE))
    real = Path(sys.executable).with_name("holdfast")
    command = shlex.join([sys.executable, "-IS", str(folder / "shim.py"), str(folder / "socket"), str(real)])
    (folder / "bin" / "holdfast").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (folder / "bin" / "holdfast").chmod(0o755)
    asking = socket.socket(socket.AF_UNIX)
    asking.bind(str(folder / "socket"))
    asking.listen()
    if os.fork():
        asking.close()
        return None
    _prctl(DEATH_SIGNAL, signal.SIGKILL)
    starting = starts_with(dict(os.environ))
    while True:
        line = asking.accept()[0]
        if not os.fork():
            asking.close()
            return wait_on(line, starting)
        line.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def wait_on(line: socket.socket, starting: Any) -> tuple[dict[str, Any], list[int]]:
    """Fork who is asked for on this line, and say how it ends. Returns in it."""
    job, streams = receive(line)
    if job is None or starts_with(job["env"]) != starting:
        if job is not None:
            send(line, {})  # a Python of its own must see to that
        os._exit(0)
    child = os.fork()
    if not child:
        line.close()
        return job, streams
    for descriptor in streams:
        os.close(descriptor)
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, line], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    send(line, {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})
    os._exit(0)


# -- who is forked --------------------------------------------------------------------------------------


def become(job: dict[str, Any], streams: list[int]) -> None:
    """Make this process one that has just started, but for what is loaded."""
    if job["session"]:
        os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        unbuffered = before.write_through  # Python's option -u
        lines = not unbuffered and number > 0 and (number == 2 or os.isatty(number))
        raw = open(number, "wb" if number else "rb", buffering=0 if unbuffered and number else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, before.encoding, before.errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    time.tzset()
    sys.orig_argv[:] = job["args"]
    importlib.invalidate_caches()


def live(job: dict[str, Any], streams: list[int]) -> None:
    become(job, streams)
    execute(job["args"][1 + job["options"] :], safe_path=sys.flags.safe_path)


def execute(args: list[str], *, safe_path: bool) -> None:
    """As ``python args…``, in a ``__main__`` of its own."""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    what = args[0]
    if not safe_path:
        where = {"-c": "", "-m": str(Path.cwd())}
        sys.path.insert(0, where[what] if what in where else str(Path(what).resolve().parent))
    if what == "-m":
        sys.argv[:] = args[1:]
        runpy._run_module_as_main(args[1])
        return
    if what == "-c":
        sys.argv[:] = ["-c", *args[2:]]
        code = compile(args[1], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv[:] = args
        main.__file__ = what
        code = compile(Path(what).read_bytes(), what, "exec", dont_inherit=True)
    exec(code, main.__dict__)


class Spared:
    """What stands for a module when the interpreter ends: it can be imported as ever, and is not taken apart."""


def spare(loaded: list[types.ModuleType]) -> None:
    """Let the end of the interpreter pass over what was loaded before the fork.

    Taking it apart writes to every page of memory that is shared with the others, which takes longer than most of what
    a test does. What else goes with an interpreter goes as ever: threads, what is registered, garbage, ``__main__``.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(loaded))
    for module in loaded:
        if sys.modules.get(module.__name__) is module:
            sys.modules[module.__name__] = Spared()  # type: ignore[assignment]
            sys.modules[module.__name__].__dict__ = module.__dict__


def main() -> None:
    loaded: list[types.ModuleType] = []
    atexit.register(spare, loaded)  # before all others, so it comes after them
    here = str(Path(__file__).parent)
    sys.path[:] = [place for place in sys.path if place != here]
    asking = socket.socket(fileno=int(sys.argv[1]))
    load(sys.argv[2])
    if len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208
        raise RuntimeError("a process with threads must not fork others")
    others = {"sys", "builtins", "__main__"}
    loaded += [one for name, one in sys.modules.items() if isinstance(one, types.ModuleType) and name not in others]
    live(*serve(asking))


if __name__ == "__main__":
    main()
