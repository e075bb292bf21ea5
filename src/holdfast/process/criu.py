"""CRIU: the program that saves a process and brings it back.

Owns how it is found, asked, called and understood. Knows nothing of stores, and keeps nothing: images are files in a
folder that the caller owns. What always holds: every call has a time limit; a process that stands still for an image
goes on when whoever asked for it dies, unless the image is taken and it was to stay stopped; what CRIU says in its log
becomes a sentence, and what it cannot save is named. It is ended in the midst of its work only when it has taken too
long: a process in whose memory it is at work goes with it.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from holdfast.errors import HoldfastError, NotFrozen, NotThawed, Unavailable

OLDEST = (4, 2)
"""Older ones fail on kernels from 6.16 on for every process that has a socket."""

TIMEOUT_S = 60.0
"""How long a dump or a restore may take, and a second more for each ``BYTES_PER_S`` of memory."""

BYTES_PER_S = 64 * 2**20
"""Far below what a slow disk writes."""

ASK_S = 10.0
"""How long a question about the machine may take."""

GHOST_BYTES = 64 * 2**20
"""The largest file that is kept in an image though it was deleted while open."""

LOG_MAX_BYTES = 2**20
"""The most of a log that is read: why it failed stands at its end."""

HOW_TO_GET = (
    "Install CRIU 4.2 or newer (Debian forky and sid have it), or name the program with HOLDFAST_CRIU. A working"
    " copy of Holdfast's sources fetches one without installing it: .ci/fetch criu FOLDER"
)

# Stands still while somebody else reads the process's files. Both pipes are opened so that neither opening nor reading
# nor writing waits for a caller that has died: then the dump fails, and the process goes on.
_HOLD = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
cd '{folder}' || exit 1
exec 3<>go 4<go 3<&- 5<>stopped
echo stopped >&5 || exit 1
read -r answer <&4
[ "$answer" = go ]
"""
_TOLD = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-resume ] || exit 0
echo "$CRTOOLS_INIT_PID" >'{folder}/resumed'
"""

_REASONS: tuple[tuple[str, str], ...] = (
    (r"io_uring", "it uses io_uring, which cannot be saved"),
    (r"nvidia|/dev/kfd|/dev/dri", "it uses a GPU, whose memory cannot be saved"),
    (r"External socket is used|ext-unix-sk|unix.*[Cc]an't dump.*external",
     "it is connected to a Unix socket of another process"),
    (r"Connected TCP socket|tcp-established", "it has an established TCP connection; choose --tcp close or --tcp keep"),
    (r"doesn't have write permission|ptrace.*(EPERM|not permitted)|Can't seize|Unable to interrupt task",
     "it is traced by another program, such as a debugger, or must not be"),
    (r"[Ff]ound dangling tty|tty.*(not found|dangling|shell-job)|shell-job|session leader",
     "it belongs to a terminal of another session"),
    (r"File (.+) has bad size", "the file {0} has another size than when it was saved"),
    (r"File (.+) has bad mode", "the file {0} has other permissions than when it was saved"),
    (r"Can't open file (\S+)", "the file {0} is missing"),
    (r"Pid (\d+) do not match|Can't fork for (\d+): File exists|clone3.*File exists", "its process number is taken"),
    (r"Can't bind inet socket.*|bind.*Address already in use", "its port is taken by another process"),
    (r"Unknown (file|fd|type|socket).*|Unsupported (?!.*syscall).*",
     "it has something open that CRIU does not know: {0}"),
)  # fmt: skip
_HARMLESS = re.compile(
    r"RLIMIT_NOFILE|kdat cache|Dumping FAILED|Restoring FAILED|cgroup.*props|Failed to open file .*core_pattern"
)
_ERROR = re.compile(r"^(?:\([\d.]+\)\s+)?(?:\s*\d+:\s+)?Error \(([^)]*)\):\s*(.*)$")


class Found(NamedTuple):
    """What this machine can do. ``problem`` is empty where processes can be frozen."""

    program: str
    version: str
    problem: str
    hint: str
    tcp: bool = False

    @property
    def usable(self) -> bool:
        return not self.problem


def find() -> Path | None:
    """The program: the one that HOLDFAST_CRIU names, or the first on the path."""
    named = os.environ.get("HOLDFAST_CRIU") or shutil.which(
        "criu", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    )
    return Path(named) if named else None


def probe(*, deep: bool = True) -> Found:
    """What can be done here, and how to get the rest. Nothing is changed, and no process is touched.

    Not ``deep``: only whether there is a program that is new enough, and the right to use it.
    """
    program = find()
    if program is None:
        return Found("", "", "there is no CRIU here", HOW_TO_GET)
    try:
        said = _ask(program, "--version")
        match = re.search(r"Version: (\d+)\.(\d+)(?:\.(\d+))?", said)
        version = match[0].partition(" ")[2] if match else ""
        if match is None or (int(match[1]), int(match[2])) < OLDEST:
            wanted = ".".join(map(str, OLDEST))
            return Found(str(program), version, f"CRIU {version or '?'} is too old; {wanted} is needed", HOW_TO_GET)
        if os.geteuid() != 0:
            return Found(str(program), version, "freezing and thawing need root", "Run it with sudo.")
        if not deep:
            return Found(str(program), version, "", "")
        checked = _ask(program, "check")
        if "Looks good" not in checked:
            lacks = f"this kernel lacks what CRIU needs: {_last(checked)}"
            return Found(str(program), version, lacks, "Use a newer kernel.")
        return Found(str(program), version, "", "", keeps_tcp(str(program)))
    except (OSError, subprocess.SubprocessError) as error:
        return Found(str(program), "", f"{program} does not start: {error}", HOW_TO_GET)


def keeps_tcp(program: str) -> bool:
    """Whether established connections can be kept here."""
    return "is supported" in _ask(Path(program), "check", "--feature", "network_lock_nftables")


def needed(error: type[HoldfastError]) -> Found:
    """As a shallow ``probe``; raises where nothing can be frozen or thawed."""
    found = _shallow(find(), os.geteuid())
    if not found.usable:
        raise error(f"processes cannot be frozen or thawed here: {found.problem}", hint=found.hint)
    return found


@lru_cache(4)
def _shallow(program: Path | None, user: int) -> Found:  # noqa: ARG001 - what it says depends on them
    return probe(deep=False)


def _ask(program: Path, *words: str) -> str:
    asked = [str(program), "--no-default-config", *words]
    done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False)  # noqa: S603
    return done.stdout + done.stderr


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it did not say what")


class Options(NamedTuple):
    """How one process is saved and brought back: as it was saved, so it is brought back."""

    terminal: bool = False
    tcp: str = "close"

    def words(self) -> list[str]:
        tcp = ["--tcp-close"] if self.tcp == "close" else ["--tcp-established", "--network-lock", "nftables"]
        return [*tcp, "--skip-in-flight", "--file-locks", *(["--shell-job"] if self.terminal else [])]


Then = Literal["run", "stop", "end"]
"""What becomes of a process that was saved. CRIU ends it in such a way that nobody at the other end of a connection
that is kept notices."""
_THEN: dict[Then, list[str]] = {"run": ["--leave-running"], "stop": ["--leave-stopped"], "end": []}


class Dumped(NamedTuple):
    """How long the process stood still, by CRIU's own clock."""

    pause_s: float
    log: str


def dump(
    program: str,
    pid: int,
    images: Path,
    work: Path,
    options: Options,
    *,
    standing: Callable[[], None],
    then: Then,
    memory_bytes: int,
) -> Dumped:
    """Save a process and all below it into ``images``. ``standing`` is called while it stands still.

    If ``standing`` raises, the process goes on and there is no image. ``then`` says what becomes of it otherwise.
    """
    os.mkfifo(work / "go", 0o600)
    os.mkfifo(work / "stopped", 0o600)
    script = _script(work, "hold", _HOLD)
    words = [
        program, "dump", "--no-default-config", "--tree", str(pid),
        "--images-dir", str(images), "--work-dir", str(work),
        "--log-file", "dump.log", "-v2", "--ghost-limit", str(GHOST_BYTES), "--action-script", str(script),
        *_THEN[then], *options.words(),
    ]  # fmt: skip
    deadline = time.monotonic() + TIMEOUT_S + memory_bytes / BYTES_PER_S
    go = os.open(work / "go", os.O_RDWR | os.O_CLOEXEC)
    stopped = os.open(work / "stopped", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with _started(words, said=work / "said") as criu:
            failed: BaseException | None = None
            if _either(criu, deadline, stopped):
                try:
                    standing()
                except BaseException as error:  # noqa: BLE001 - raised below, when the process goes on again
                    failed = error
                os.write(go, b"go\n" if failed is None else b"no\n")
            code = _wait(criu, deadline)
            if failed is not None:
                raise failed
    finally:
        os.close(go)
        os.close(stopped)
    log = _log(work / "dump.log")
    if code != 0:
        raise NotFrozen(
            f"process {pid} could not be frozen: {'CRIU took too long' if code is None else because(log)}; it goes on",
            pid=pid, hint="docs/guide/freezing.md says what can be frozen.",
        )  # fmt: skip
    return Dumped(_frozen_s(work / "stats-dump"), log)


def restore(
    program: str,
    images: Path,
    work: Path,
    options: Options,
    *,
    inherit: Mapping[str, int] | None = None,
    within: Sequence[str] = (),
    lock: int | None = None,
    own_session: bool = True,
    memory_bytes: int,
) -> int:
    """Bring a saved process back, and say by which number this process can see it. It runs when this returns.

    ``inherit`` names what it had open to others, and what stands there now. ``within`` is put before the command: it
    makes namespaces, in which CRIU then stays as the first process. Where it ends instead, it has ``lock`` until then.
    Raises ``NotThawed``.
    """
    resumed = work / "resumed"
    resumed.unlink(missing_ok=True)
    (work / "restore.log").unlink(missing_ok=True)
    # A script is called again and again on the way, so only one that does not end when the process goes on has it.
    telling = ["--action-script", str(_script(work, "told", _TOLD))] if within else ["--pidfile", str(resumed)]
    words = [
        *within, program, "restore", "--no-default-config", "--images-dir", str(images), "--work-dir", str(work),
        "--log-file", "restore.log", "-v2", *telling, *options.words(),
        *([] if within else ["--restore-detached"]),
        *(word for name, fd in (inherit or {}).items() for word in ("--inherit-fd", f"fd[{fd}]:{name}")),
    ]  # fmt: skip
    deadline = time.monotonic() + TIMEOUT_S + memory_bytes / BYTES_PER_S
    fds = {*(inherit or {}).values(), *([] if within or lock is None else [lock])}
    criu = _started(words, fds=fds, own_session=own_session, said=work / "said")
    code: int | None = None
    while code is None and time.monotonic() < deadline:
        if within and resumed.exists() and resumed.stat().st_size:
            threading.Thread(target=criu.wait, name="holdfast-thawed", daemon=True).start()  # its end is taken note of
            return _seen_from_here(criu.pid, int(resumed.read_text()))
        code = _wait(criu, time.monotonic() + 0.005 if within else deadline)
    if code is None:
        _stop(criu)
    if code or not resumed.exists():
        log = _log(work / "restore.log")
        why = "CRIU took too long" if code is None else because(log) if log else _last(_log(work / "said"))
        raise NotThawed(f"the process could not be brought back: {why}")
    return int(resumed.read_text())


def _seen_from_here(outer: int, inner: int) -> int:
    """The number that a process of a namespace below has here. ``outer`` is one that stands above it."""
    below = {outer}
    for status in sorted(Path("/proc").glob("[0-9]*/status"), key=lambda path: int(path.parts[2])):
        with suppress(OSError):
            facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(facts["PPid"]) in below or int(facts["Pid"]) in below:
                below.add(int(facts["Pid"]))
                if facts.get("NSpid", "").split()[-1:] == [str(inner)] and len(facts["NSpid"].split()) > 1:
                    return int(facts["Pid"])
    raise NotThawed("the process was brought back, and ended at once")


# -- calling ------------------------------------------------------------------------------------------------


@contextmanager
def undisturbed() -> Iterator[list[int]]:
    """Inside, Ctrl-C waits, since it would leave CRIU in the midst of its work. Yields a list of those that came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # no other one is ever interrupted
        yield came
        return
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


class _Running(subprocess.Popen[bytes]):
    """CRIU at work. It does not outlive the block that it was started in."""

    def __exit__(self, *args: object) -> None:
        if self.poll() is None:
            _stop(self)
        super().__exit__(*args)  # type: ignore[arg-type] # as it was called


def _started(words: Sequence[str], *, said: Path, fds: Iterable[int] = (), own_session: bool = True) -> _Running:
    """What it prints is kept in ``said``. Without a session of its own it has our terminal instead."""
    try:
        with said.open("wb") as out:
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            return _Running(words, pass_fds=tuple(fds), start_new_session=own_session, **(quiet if own_session else {}))
    except OSError as error:
        raise Unavailable(f"{words[0]} does not start: {error.strerror}", hint=HOW_TO_GET) from error


def _either(process: _Running, deadline: float, *ready: int) -> bool:
    """Wait until something can be read, or the process has ended, which ``Popen.wait`` sees late: whether it can be."""
    over = os.pidfd_open(process.pid)
    try:
        found, _, _ = select.select([*ready, over], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(over)
    return any(one in found for one in ready)


def _wait(process: _Running, deadline: float) -> int | None:
    """How it ended, at once when it does; None if it has not by then."""
    _either(process, deadline)
    return process.poll()


def _stop(process: _Running) -> None:
    with suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _script(folder: Path, name: str, text: str) -> Path:
    script = folder / name
    script.write_text(text.format(folder=str(folder).replace("'", "'\\''")))
    script.chmod(0o700)
    return script


# -- understanding ------------------------------------------------------------------------------------------


def _log(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - LOG_MAX_BYTES))
            return opened.read().decode(errors="replace")
    except OSError:
        return ""


def because(log: str) -> str:
    """Why it failed, as a sentence's end; CRIU's own first words where nothing here knows them."""
    said = [match[2] for line in log.splitlines() if (match := _ERROR.match(line)) and not _HARMLESS.search(match[2])]
    for pattern, reason in _REASONS:
        for line in said:
            if found := re.search(pattern, line):
                return reason.format(next((part for part in found.groups() if part), found[0]))
    return f"CRIU says: {said[0]}" if said else "CRIU did not say why"


def _frozen_s(stats: Path) -> float:
    """From CRIU's statistics: two words of its own, a length, and a message whose first field holds numbers."""
    data = stats.read_bytes()
    values: dict[int, int] = {}
    at = 12
    with suppress(IndexError):
        _, at = _number(data, at)  # the outer field's tag
        _, at = _number(data, at)  # and its length
        while at < len(data):
            tag, at = _number(data, at)
            values[tag >> 3], at = _number(data, at)
    return values.get(2, 0) / 1e6


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if not byte & 0x80:
            return value, at
