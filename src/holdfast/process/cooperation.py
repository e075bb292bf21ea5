"""A Holdfast process that is frozen: it lets go of its stores, stands still, and takes them again.

Owns the conversation between whoever freezes a process and the process itself: a socket by which it is asked, and a
folder in which both say how far they are. Nothing of that conversation is open while the image is taken. What always
holds: a process never waits for a freezer that has died; stores are let go with everything durable and every agent
saved, or not at all; whoever comes back from an image finds stores opened anew, other random numbers, and the records
of what happened since.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.agent.agent import Agent
from holdfast.agent.places import open_stores
from holdfast.errors import AgentBusy, AtomicOpen, HoldfastError, NotFrozen, NotThawed, StoreBusy
from holdfast.process.image import began
from holdfast.store import processes
from holdfast.store.leases import FileLeases
from holdfast.store.processes import boot
from holdfast.text import is_url

DEADLINE_S = 10.0
"""How long a freeze waits for a process to come to rest: for calls in flight, blocks and runs to end."""

POLL_S = 0.005
LIVES_S = 0.25
"""How often a process that stands still looks whether its freezer is alive."""

HEARD_S = 10.0
"""How long whoever gives a word waits for it to be heard."""

ORDER_MAX_BYTES = 4096
_NAME = "holdfast-freeze"

RELEASED, REFUSED, GO = "released", "refused", "go"


# -- in the process that is frozen --------------------------------------------------------------------------


_listening: list[threading.Thread] = []
os.register_at_fork(after_in_child=_listening.clear)


def freezable() -> None:
    """Let others freeze this process though it has stores open: `holdfast freeze AGENT`.

    A thread waits to be asked. It then saves every agent, lets go of all stores, and takes them again when the image is
    taken, and also when the process comes back from it.
    """
    if _listening:
        return
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    heard.bind(f"\0{_NAME}-{os.getpid()}-{secrets.token_hex(8)}")
    heard.listen(4)
    thread = threading.Thread(target=_listen, args=(heard,), name="holdfast-freeze", daemon=True)
    _listening.append(thread)
    thread.start()


def _listen(heard: socket.socket) -> None:
    while True:
        order: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            asked, _ = heard.accept()
            with asked:
                who = struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if who[1] in {0, os.geteuid()}:
                    asked.settimeout(1.0)
                    order = json.loads(asked.recv(ORDER_MAX_BYTES))
        if order:
            stand_still(Path(order["folder"]), order["freezer"], float(order["deadline_s"]))


def stand_still(folder: Path, freezer: list[int], deadline_s: float) -> bool:
    """Let go of all stores, say so in ``folder``, and wait for the word to go on; whether that came after a thaw."""
    deadline = time.monotonic() + deadline_s
    with ExitStack() as stack:
        try:
            agents = stack.enter_context(_let_go(deadline))
        except HoldfastError as error:
            _say(folder, REFUSED, error.message)
            return False
        _say(folder, RELEASED, json.dumps([_about(one) for one in agents]))
        before = boot(), began(os.getpid())
        word = _awaited(folder, freezer)
        # One that comes back began anew, whatever it was told: the word can be cleared away before it was read.
        thawed = word == "thawed" or (boot(), began(os.getpid())) != before
        if thawed:
            processes.thawed()
            _reseed()
        failed = _take_again(agents, [one._db for one in open_stores()], thawed=thawed)
    for name, reason in failed:
        print(f"holdfast: {name}: {reason}", file=sys.stderr)  # noqa: T201 - nobody else is there to be told
    return thawed


def _about(agent: Agent) -> list[str]:
    head = agent.head
    return [agent._store.place, agent.name, agent.branch_name, head.id if head is not None else ""]


def _say(folder: Path, name: str, text: str) -> None:
    """The folder is the process's user's: what he has put there must not lead root to another file."""
    with suppress(OSError), ExitStack() as stack:  # nobody waits there any more
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, at)
        with suppress(FileNotFoundError):
            os.unlink(f".{name}", dir_fd=at)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(f".{name}", flags, 0o644, dir_fd=at), "w") as file:
            file.write(text)
        os.rename(f".{name}", name, src_dir_fd=at, dst_dir_fd=at)


def _awaited(folder: Path, freezer: list[int]) -> str:
    """The word to go on. A freezer that is gone without a word has taken no image that counts."""
    looked, lives = time.monotonic(), True
    while True:
        with suppress(OSError):
            word = (folder / GO).read_text()
            (folder / GO).unlink()  # whoever said it sees that it was heard
            return word
        if not lives:
            return "gone"
        if time.monotonic() - looked > LIVES_S:
            # In a process that comes back now, the freezer went long ago: the word is there, and is read first.
            looked, lives = time.monotonic(), _lives(freezer) and folder.exists()
        time.sleep(POLL_S)


def _lives(who: list[int]) -> bool:
    with suppress(OSError, ValueError, IndexError):
        return began(who[0]) == who[1]
    return False


@contextmanager
def _let_go(deadline: float) -> Iterator[list[Agent]]:
    """Inside, no store is open, and no thread can use one. Yields the agents that were written here."""
    found = open_stores()
    agents = [handle for one in found for handle in list(one._handles.values()) if not handle.closed]
    for one in found:
        if is_url(one.place):
            raise NotFrozen(
                f"its store {one.place} is on a server, and a connection to one cannot be let go for a while"
            )
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(_at_rest(agents, [one._db for one in found], deadline))
                break
            except (AgentBusy, AtomicOpen, StoreBusy) as error:
                if time.monotonic() > deadline:
                    raise NotFrozen(f"it is in the middle of something: {error.message}") from error
            time.sleep(POLL_S)
        yield agents


@contextmanager
def _at_rest(agents: list[Agent], databases: list[Any], deadline: float) -> Iterator[None]:
    """Inside, every agent is saved and still, and no store is open. Whoever leaves the block opens them again."""
    _check_known(agents, databases)
    with ExitStack() as stack:
        for agent in agents:
            agent._check_quiet()
            _save(agent)
            if agent._writer is not None:
                stack.enter_context(agent._writer.quiet())
                stack.enter_context(agent._writer.still(agent._document))
                stack.enter_context(agent._unused())
                _save(agent)  # what a thread did that was quicker
        rested: list[Any] = []
        try:
            for db in databases:
                db.flush()
                rested.append(db)
                if not db.rest(min(deadline, time.monotonic() + 1.0)):
                    raise StoreBusy(f"{db.place} did not come to rest")
            for agent in agents:
                agent._check_quiet()  # a call that began meanwhile
        except BaseException:
            for db in rested:
                db.resume()
            raise
        released: list[Any] = []
        try:
            for db in databases:
                released.append(db)
                db.release()
        except BaseException:
            _take_again(agents, released, thawed=False)
            for db in databases:
                db.resume()
            raise
        yield


def _check_known(agents: list[Agent], databases: list[Any]) -> None:
    """What is written here by no handle would not go back with the process, which would do again what it did."""
    for db in databases:
        known = {agent._branch.b for agent in agents if agent._db is db}
        for lease in db.leases.mine() if isinstance(db.leases, FileLeases) else ():
            if lease.b not in known:
                who = lease.who.get("agent")
                raise AgentBusy(f"{who!r} is written beside any handle, as threads of LangGraph are, which resume")


def _save(agent: Agent) -> None:
    """An image is of the same moment as the state beside it, which knows of everything that was done outside."""
    head = agent.head
    known = head._manifest.effects[0] if head is not None else 0
    if agent._writer is not None and (head is None or agent.dirty or agent._writer.position[0] > known):
        agent.checkpoint("before a freeze")


def _take_again(agents: list[Agent], databases: list[Any], *, thawed: bool) -> list[tuple[str, HoldfastError]]:
    failed = []
    for db in databases:
        try:
            db.reopen()
        except HoldfastError as error:
            failed.append((db.place, error))
        db.resume()
    for agent in agents:
        try:
            agent._retake(thawed=thawed)
        except HoldfastError as error:
            failed.append((agent.name, error))
    return failed


def _reseed() -> None:
    """Two processes that go on from one image must not draw the same numbers."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "big"))


# -- in the one that freezes --------------------------------------------------------------------------------


class Standing(NamedTuple):
    """A process that has let go of its stores: where it waits, and its agents: store, name, branch, head."""

    pid: int
    folder: Path
    agents: list[list[str]]

    def go_on(self) -> None:
        if self.folder.exists():
            _say(self.folder, GO, "original")
            heard(self.folder, self.pid)


@contextmanager
def standing(pid: int, uid: int, deadline_s: float = DEADLINE_S) -> Iterator[Standing]:
    """Ask a Holdfast process to let go of its stores; it takes them again at the end of the block, at the latest."""
    name = _socket_of(pid)
    if name is None:
        raise NotFrozen(
            f"process {pid} has a Holdfast store open and does not listen for a freeze",
            pid=pid, hint="Call holdfast.freezable() in it, or holdfast.freeze_self() where it is to be frozen.",
        )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="holdfast-standing-"))
    try:
        os.chown(folder, uid, -1)
        order = {"folder": str(folder), "freezer": [os.getpid(), began(os.getpid())], "deadline_s": deadline_s}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(deadline_s)
            asked.connect(name)
            asked.sendall(json.dumps(order).encode())
        waiting = Standing(pid, folder, _answer(folder, pid, deadline_s + 2.0))
        try:
            yield waiting
        finally:
            waiting.go_on()
    except OSError as error:
        raise NotFrozen(f"process {pid} could not be asked to let go of its stores: {error}", pid=pid) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def heard(folder: Path, pid: int) -> None:
    """Wait until the word was heard, then clear up. A process that is stopped, or has ended, hears nothing."""
    deadline = time.monotonic() + HEARD_S
    while (folder / GO).exists() and time.monotonic() < deadline:
        with suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TtZX":
                break
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def _answer(folder: Path, pid: int, wait_s: float) -> list[list[str]]:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        with suppress(OSError):
            return _agents((folder / RELEASED).read_text(), pid)
        with suppress(OSError):
            raise NotFrozen((folder / REFUSED).read_text(), pid=pid, hint="It goes on. Try again later.")
        time.sleep(POLL_S)
    _say(folder, GO, "original")
    raise NotFrozen(f"process {pid} did not let go of its stores within {wait_s:.0f} s", pid=pid)


def _agents(said: str, pid: int) -> list[list[str]]:
    try:
        return [[*one] for one in msgspec.json.decode(said, type=list[tuple[str, str, str, str]])]
    except msgspec.MsgspecError as error:
        raise NotFrozen(f"process {pid} answers what is no answer: {error}", pid=pid) from None


def listens(pid: int) -> bool:
    """Whether a process can be asked to let go of its stores, also of such that have no files here."""
    return _socket_of(pid) is not None


def _socket_of(pid: int) -> str | None:
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
            name = line.rpartition(" ")[2]
            if name.startswith(f"@{_NAME}-{pid}-"):
                return "\0" + name[1:]
    return None


def thawing(folder: Path, uid: int) -> None:
    """Before a process is brought back that waits in ``folder``: the word that it will find there."""
    shutil.rmtree(folder, ignore_errors=True)  # another thaw's that was killed, or somebody else's who saw its name
    try:
        folder.mkdir(mode=0o700, parents=True)
        os.chown(folder, uid, -1, follow_symlinks=False)
    except OSError as error:
        raise NotThawed(f"{folder}, in which the process waits, cannot be made: {error.strerror}") from error
    _say(folder, GO, "thawed")
