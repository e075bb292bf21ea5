"""An image of a process in a folder: its memory by CRIU, its open files by us, while it stands still.

Owns the look at a process from outside (what it has open, what stands in the way), the order in which it is saved, the
description that goes with CRIU's files, and this machine's key. Knows nothing of stores but which files are theirs.
What always holds: what cannot be saved is refused by name before anything stands still, and then, as whenever this
raises, the process goes on as before; what an image holds of memory and of files is of one moment, and the time for
both is in the pause that is told; files of a Holdfast store are never part of it; the key never leaves the user's state
folder.
"""

from __future__ import annotations

import hmac
import json
import os
import platform
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from blake3 import blake3

from holdfast.errors import BadOption, NotAnImage, NotFrozen, Unavailable
from holdfast.process import criu
from holdfast.store.files import fsync_directory
from holdfast.store.processes import MARK, boot, machine
from holdfast.store.witness import state_folder

if TYPE_CHECKING:
    from holdfast.process.cooperation import Standing

VERSION = 1
READ_MAX_BYTES = 16 * 2**20
"""A file that is only read is saved up to this size. Of a larger one it is noted that it has to be the same."""

DESCRIPTION = "image.json"
IMAGES = "criu"
FILES = "files"
KEY_BYTES = 32

Tcp = Literal["close", "keep"]
Files = Literal["save", "keep"]

ROOM_BYTES = 64 * 2**20
"""How much room is left besides an image: what it holds beyond memory is small."""

LEFT_S = 86_400.0
"""So old a folder with a process's memory is nobody's any more: a freeze or a thaw is a matter of minutes."""

_MEMORY = "holdfast-image-"
_DATABASE = b"SQLite format 3\0"
_BESIDE = ("-journal", "-wal", "-shm")
# What looks like a file and is the kernel's.
_KERNEL = ("/proc/", "/sys/")
_GPU = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


class SavedFile(msgspec.Struct, frozen=True):
    """A regular file that the process had open. Without ``content`` it is not put back, and has to be as it was."""

    path: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    content: str = ""
    database: bool = False
    flags: int = 0
    position: int = 0


class Description(msgspec.Struct, frozen=True):
    """What there is to know of an image before it is brought back."""

    version: int
    pid: int
    pids: list[int]
    began: int  # when the process was started, in ticks since the machine was
    command: list[str]
    directory: str
    uid: int
    gid: int
    host: str
    machine: str
    boot: str
    system: str
    criu: str
    made_us: int
    memory_bytes: int
    terminal: bool  # has one open
    job: bool  # its session is another one's
    tcp: str
    pipes: dict[str, int]
    files: list[SavedFile]
    kept: bool  # files were to be left alone
    agents: list[list[str]] = []  # each: store, name, branch, head
    handshake: str = ""
    ports: list[tuple[str, str, int]] = []  # that it listens at: tcp or udp, address, port
    mapped: list[tuple[str, int]] = []  # its program and libraries, and how large they were: they are not part of it

    @property
    def program(self) -> str:
        return " ".join(self.command)[:200] or f"process {self.pid}"

    @property
    def databases(self) -> list[str]:
        return [one.path for one in self.files if one.database]


def encoded(description: Description) -> bytes:
    return msgspec.json.encode(description, order="deterministic")


def decoded(data: bytes) -> Description:
    """Raises where it is not a description that this program wrote, or one of a newer program."""
    try:
        found = msgspec.json.decode(data, type=Description)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotAnImage(f"this is not the description of an image: {error}") from None
    if found.version != VERSION:
        raise NotAnImage(f"the image is of version {found.version}", hint="Thaw it with a newer Holdfast.")
    for one in found.files:
        path = Path(one.path)
        if not path.is_absolute() or ".." in path.parts or "\0" in one.path or "/" in one.content:
            raise NotAnImage(f"the image names an impossible file: {one.path!r}")
    return found


# -- a look at a process ------------------------------------------------------------------------------------


class OpenFile(NamedTuple):
    """A regular file that somebody has open."""

    path: str
    device: int
    inode: int
    flags: int
    position: int = 0

    @property
    def written(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def key(self) -> tuple[int, int]:
        return self.device, self.inode


class Look:
    """A process and all below it, as they are now. Raises ``NotFrozen`` if it is not there."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self.began = began(pid)
            self.pids = sorted(_tree(pid))
            status = dict(line.split(":", 1) for line in _text(pid, "status").splitlines() if ":" in line)
            self.uid, self.gid = (int(status[name].split()[0]) for name in ("Uid", "Gid"))
            self.session = os.getsid(pid)
            self.directory = os.readlink(f"/proc/{pid}/cwd")
            self.command = [part for part in _text(pid, "cmdline").split("\0") if part]
            self.memory_bytes = sum(_resident(one) for one in self.pids)
            self._spaces = _spaces(pid)
            self._opened()
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise NotFrozen(
                f"there is no process {pid} that could be looked at: {error}", pid=pid, hint="See `ps`."
            ) from error

    def _opened(self) -> None:
        self.files: dict[tuple[int, int], OpenFile] = {}
        self.special: set[str] = set()
        self.servers: set[str] = set()
        self.terminal = False
        ends: dict[str, set[tuple[int, int, bool]]] = {}
        for pid in self.pids:
            for fd, target, flags, position in _descriptors(pid):
                written = flags & os.O_ACCMODE != os.O_RDONLY
                if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
                    self.terminal = True
                elif target.startswith("pipe:"):
                    ends.setdefault(target, set()).add((pid, fd, written))  # as CRIU calls it: pipe:[N]
                elif target.startswith(f"/memfd:{MARK}"):
                    self.servers.add(target.removeprefix(f"/memfd:{MARK}").removesuffix(" (deleted)"))
                elif target.startswith("anon_inode:") or target.startswith(_GPU):
                    self.special.add(target)
                elif target.startswith("/"):
                    self._note(f"/proc/{pid}/fd/{fd}", target, flags, position)
            for name, target in _shared(pid):
                if target.startswith(_GPU):
                    self.special.add(target)
                else:
                    self._note(f"/proc/{pid}/map_files/{name}", target, os.O_RDWR, 0)
        # A pipe whose other end nobody here has leads outside.
        self.pipes = {
            name: min(fd for pid, fd, _ in found) for name, found in ends.items() if len({w for _, _, w in found}) == 1
        }

    def _note(self, link: str, target: str, flags: int, position: int) -> None:
        with suppress(OSError):
            found = os.stat(link)  # what is open, whatever its name says
            if stat.S_ISREG(found.st_mode) and found.st_nlink and not target.startswith(_KERNEL):
                key = (found.st_dev, found.st_ino)
                before = self.files.get(key)
                if before is None or not before.written:
                    self.files[key] = OpenFile(target, *key, flags, position)

    def refusals(self) -> Iterator[str]:
        """What stands in the way of saving it, in words."""
        if self.pid in {1, os.getpid(), os.getppid()}:
            yield "it is the one that asks, or the system's first"
        if self._spaces != _spaces(os.getpid()):
            yield "it lives in other namespaces (a container); freeze it from inside of them"
        for target in sorted(self.special):
            if "io_uring" in target:
                yield "it uses io_uring, which cannot be saved"
            elif target.startswith(_GPU):
                yield f"it uses a GPU ({target}), whose memory cannot be saved"

    def stores(self) -> list[str]:
        """The Holdfast stores that it has open: in directories, by their files; on servers, as the process says."""
        homes = {str(home) for one in self.files.values() if (home := store_of(Path(one.path))) is not None}
        return sorted(homes | self.servers)

    def shared_files(self) -> list[str]:
        """Files that others have open for writing, too: what they would hold after a thaw, nobody could say."""
        wanted = {key: one.path for key, one in self.files.items() if store_of(Path(one.path)) is None}
        return sorted(writers(wanted, {*self.pids}))


def writers(wanted: Mapping[tuple[int, int], str], but: set[int]) -> dict[str, int]:
    """Files, by device and inode, that processes have open for writing; and one that does, of each."""
    mine = {*but, os.getpid()}  # whoever supervises a program has its output, and writes nothing there
    found: dict[str, int] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if wanted else ():
        if pid in mine:
            continue
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # how it is open is asked of the few that matter
                    there = os.stat(f"/proc/{pid}/fd/{fd}")
                    if (there.st_dev, there.st_ino) in wanted and _is_written(pid, fd):
                        found[wanted[there.st_dev, there.st_ino]] = pid
    return found


def began(pid: int) -> int:
    """When a process was started, in ticks since the machine was: with its number, that is which one it is."""
    return int(_text(pid, "stat").rpartition(")")[2].split()[19])


def who() -> list[Any]:
    """This process, so that another one can ask whether it lives."""
    return [os.getpid(), began(os.getpid()), boot()]


def lives(one: Any) -> bool:
    """Whether a process that said who it is lives on this machine."""
    with suppress(OSError, ValueError, TypeError, IndexError):
        return bool(one[2] == boot() and began(one[0]) == one[1])
    return False


def note_down(note: Path, about: Mapping[str, Any]) -> None:
    """Write down what nobody would know of if this process was killed now. ``by`` is who is at it."""
    note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = note.with_suffix(".new")
    with fresh.open("w") as file:
        json.dump(about, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(note)
    fsync_directory(note.parent)


def new_note(kind: str) -> Path:
    return state_folder() / kind / f"{os.getpid()}-{os.urandom(6).hex()}.json"


def notes(kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What processes of this user have written down that are not at it any more."""
    for note in sorted((state_folder() / kind).glob("*.json")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            about = json.loads(note.read_text())
            if not lives(about["by"]):
                yield note, about


def ports(pids: Iterable[int]) -> list[tuple[str, str, int]]:
    """Where processes of this network wait for others: tcp or udp, address, port."""
    mine = {target for pid in pids for _, target, _, _ in _descriptors(pid) if target.startswith("socket:")}
    found = set()
    for kind, waits in (("tcp", "0A"), ("udp", "07")):
        for family, table in ((socket.AF_INET, kind), (socket.AF_INET6, f"{kind}6")):
            with suppress(OSError):
                for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                    _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                    if state == waits and f"socket:[{inode}]" in mine:
                        words, _, port = local.partition(":")
                        raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
                        found.add((kind, socket.inet_ntop(family, raw), int(port, 16)))
    return sorted(found)


def mapped(pids: Iterable[int]) -> list[tuple[str, int]]:
    """The files that processes have in memory as they are on the disk, and how large those are."""
    paths: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            found = (line.split(None, 5) for line in _text(pid, "maps").splitlines())
            paths.update(parts[5] for parts in found if len(parts) == 6 and parts[5].startswith("/"))
    sizes = []
    for path in sorted(paths):
        with suppress(OSError):  # it is gone, or was never there: what CRIU makes of that, it says
            if stat.S_ISREG((about := os.stat(path)).st_mode):
                sizes.append((path, about.st_size))
    return sizes


def is_running(description: Description) -> bool:
    """Whether the process of an image is still there, or has been brought back already.

    One that was brought back began at another time, and may have another number here. A copy in isolation, with a
    network of its own, does not count.
    """
    mine = os.readlink("/proc/self/ns/net")
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError, IndexError, StopIteration):
            pid = int(entry)
            lines = _text(pid, "status").splitlines()
            numbers = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
            if (
                numbers[-1] == str(description.pid)
                and [part for part in _text(pid, "cmdline").split("\0") if part] == description.command
                and os.readlink(f"/proc/{pid}/cwd") == description.directory
                and os.readlink(f"/proc/{pid}/ns/net") == mine
            ):
                return True
    return False


def store_of(path: Path) -> Path | None:
    """The Holdfast store that a file belongs to, if any."""
    for home in (path.parent, path.parent.parent):
        if (home / "store.db").is_file() and (home / "locks").is_dir():
            return home
    return None


def _text(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="surrogateescape")


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _spaces(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/ns/{name}") for name in ("pid", "mnt", "net", "user")]


def _resident(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(_text(pid, "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _descriptors(pid: int) -> Iterator[tuple[int, str, int, int]]:
    """Number, what it leads to, how it was opened, and where in it the next byte comes from or goes to."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError, ValueError, KeyError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                facts = dict(line.split(":", 1) for line in _text(pid, f"fdinfo/{name}").splitlines() if ":" in line)
                yield int(name), target, int(facts["flags"], 8), int(facts["pos"])


def _is_written(pid: int, fd: str) -> bool:
    return any(str(number) == fd and flags & os.O_ACCMODE != os.O_RDONLY for number, _, flags, _ in _descriptors(pid))


def _shared(pid: int) -> Iterator[tuple[str, str]]:
    """Files that are mapped so that writing memory writes the file."""
    with suppress(OSError):
        for line in _text(pid, "maps").splitlines():
            parts = line.split(None, 5)
            if len(parts) == 6 and parts[1][1] == "w" and parts[1][3] == "s" and parts[5].startswith("/"):
                yield parts[0], parts[5]


# -- its files ----------------------------------------------------------------------------------------------


def save_files(files: Iterable[OpenFile], folder: Path, *, keep: bool) -> list[SavedFile]:
    """Copy what a process that stands still has open. Files of Holdfast stores must not be among them.

    With ``keep``, only what they were is noted.
    """
    saved = []
    for number, one in enumerate(sorted(files)):
        try:
            with open(one.path, "rb") as source:  # as the process named it
                found = os.fstat(source.fileno())
                if (found.st_dev, found.st_ino) != one.key:
                    raise NotFrozen(f"{one.path} is another file than the process has open", hint=_KEEP)
                wanted = not keep and (one.written or found.st_size <= READ_MAX_BYTES)
                content = str(number) if wanted else ""
                if wanted:
                    with (folder / content).open("xb") as copy:
                        _copy(source.fileno(), copy.fileno(), found.st_size)
                database = os.pread(source.fileno(), len(_DATABASE), 0) == _DATABASE
        except OSError as error:
            raise NotFrozen(f"{one.path} could not be saved: {error.strerror}", hint=_KEEP) from error
        mode = stat.S_IMODE(found.st_mode)
        facts = (mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns)
        saved.append(SavedFile(one.path, *facts, content, database, one.flags, one.position))
    return saved


_KEEP = "With --files keep, files are left as they are, and are not put back by a thaw."


def _copy(source: int, target: int, size: int) -> None:
    left = size
    move: Callable[[int, int, int], int] = os.copy_file_range
    while left:
        try:
            done = move(source, target, left)
        except OSError:
            if move is _sent:
                raise
            move = _sent  # not every file system can do it, nor from each to each other
            continue
        if not done:  # shorter than it was: its size is what counts, as CRIU sees it
            break
        left -= done


def _sent(source: int, target: int, count: int) -> int:
    return os.sendfile(target, source, None, count)  # from where it stands


def beside(one: SavedFile) -> list[str]:
    """Files that SQLite would take for a part of a database that is put back."""
    return [one.path + end for end in _BESIDE] if one.database else []


# -- taking it ---------------------------------------------------------------------------------------------


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder for a process's memory, until the end. What somebody who was killed left of his goes after a day."""
    for left in Path(tempfile.gettempdir()).glob(f"{_MEMORY}*"):
        with suppress(OSError):
            found = left.lstat()
            mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if mine and found.st_mtime < time.time() - LEFT_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_MEMORY) as made:
        yield Path(made)


class Taken(NamedTuple):
    """An image in a folder, how long the process stood still for it, and what to know about it."""

    folder: Path
    description: Description
    pause_s: float
    notes: list[str]


@contextmanager
def taken(
    pid: int, *, tcp: Tcp = "close", files: Files = "save", then: criu.Then = "run", standing: Standing | None = None
) -> Iterator[Taken]:
    """Take an image into a folder that is there inside of the block.

    ``tcp`` says what becomes of established connections when the process comes back; ``files`` whether open files are
    saved and put back, and ``then`` what becomes of the process. ``standing`` is a Holdfast process that has let go of
    its stores.
    """
    if tcp not in {"close", "keep"} or files not in {"save", "keep"}:
        raise BadOption(f"tcp={tcp!r}, files={files!r}", hint="tcp is close or keep, files is save or keep.")
    found = criu.needed(NotFrozen)
    look = Look(pid)
    _check(look, files)
    if tcp == "keep" and not criu.keeps_tcp(found.program):
        raise NotFrozen("connections cannot be kept here: the kernel has no nftables", hint="Use --tcp close.")
    with memory_folder() as folder, tempfile.TemporaryDirectory() as work:
        if shutil.disk_usage(folder).free < look.memory_bytes + ROOM_BYTES:
            raise NotFrozen(
                f"{folder.parent} has no room for {look.memory_bytes >> 20} MiB", hint="TMPDIR says where images wait."
            )
        for name in (IMAGES, FILES):
            (folder / name).mkdir()
        saved: list[SavedFile] = []
        latest, waits_at, runs = look, ports(look.pids), mapped(look.pids)

        def still() -> None:
            nonlocal latest
            latest = Look(pid)
            _check(latest, files, known=look)
            saved.extend(save_files(latest.files.values(), folder / FILES, keep=files == "keep"))

        options = criu.Options(look.terminal or look.session not in look.pids, tcp)
        dumped = criu.dump(
            found.program, pid, folder / IMAGES, Path(work), options,
            standing=still, then=then, memory_bytes=look.memory_bytes,
        )  # fmt: skip
        apart = {one.path for one in saved}
        agents, handshake = (standing.agents, str(standing.folder)) if standing is not None else ([], "")
        system = f"{platform.system()} {platform.release()} {platform.machine()}"
        description = Description(
            VERSION, pid, latest.pids, latest.began, latest.command, latest.directory, latest.uid, latest.gid,
            os.uname().nodename, machine(), boot(), system, found.version, time.time_ns() // 1000,
            latest.memory_bytes, latest.terminal, latest.session not in latest.pids, tcp, latest.pipes,
            saved, files == "keep", agents, handshake, waits_at,
            [one for one in runs if one[0] not in apart],
        )  # fmt: skip
        (folder / DESCRIPTION).write_bytes(encoded(description))
        yield Taken(folder, description, dumped.pause_s, list(_notes(description)))


def _check(look: Look, files: Files, known: Look | None = None) -> None:
    refused = [*look.refusals()]
    refused += [f"it has the Holdfast store {home} open, and did not release it" for home in look.stores()]
    # Asking everybody takes a while, so what was asked before the process stood still is not asked again.
    if not refused and files == "save" and (known is None or look.files.keys() - known.files.keys()):
        refused = [
            f"{path} is also being written by another process (see --files keep)" for path in look.shared_files()
        ]
    if refused:
        raise NotFrozen(
            f"process {look.pid} cannot be frozen: {'; '.join(refused)}",
            pid=look.pid, hint="It goes on as before. docs/guide/freezing.md says what can be frozen.",
        )  # fmt: skip


def _notes(description: Description) -> Iterator[str]:
    """What whoever freezes something should know of."""
    if not description.handshake:
        yield "It keeps no ledger: what it does outside from now on is not undone by a thaw, and may be done again."
    for path in description.databases if not description.kept else ():
        yield f"{path} is a SQLite database: it is saved, but locks on its mapped -shm file are lost in a thaw."
    if description.kept and description.files:
        yield "Open files are not part of the image: after a thaw it goes on with what is in them by then."
    for fd in sorted(description.pipes.values()):
        yield f"Its descriptor {fd} is a pipe to another process: after a thaw it leads to the thaw's own, or nowhere."
    if description.terminal:
        yield "It belongs to a terminal: thaw it in one."


def end(pid: int, since: int) -> None:
    """End a process that was left stopped, unless its number is another one's by now."""
    with suppress(OSError, ValueError):
        if began(pid) == since:
            os.kill(pid, signal.SIGKILL)


def go_on(pid: int) -> None:
    """Let a process that was left stopped, and all below it, go on."""
    with suppress(OSError):
        for one in _tree(pid):
            os.kill(one, signal.SIGCONT)


# -- who made it --------------------------------------------------------------------------------------------


def key(*, make: bool) -> bytes | None:
    """This machine's key, of this user; None where there is none yet and none is to be made."""
    file = state_folder() / "image-key"
    try:
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh = file.with_name(f"image-key-{os.urandom(8).hex()}")
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, os.urandom(KEY_BYTES))
                os.fsync(fd)
            finally:
                os.close(fd)
            with suppress(FileExistsError):  # somebody else was first, and theirs counts
                os.link(fresh, file)
            fresh.unlink()
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            data = os.read(fd, KEY_BYTES + 1)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(
            f"this machine's key for images cannot be read or made: {file}: {error.strerror}",
            hint="It lies in the user's state folder; XDG_STATE_HOME says where that is.",
        ) from error
    if len(data) != KEY_BYTES or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Unavailable(f"{file} is not a key that only this user can read", hint="Remove it, and freeze again.")
    return data


def proof(named: bytes) -> bytes:
    """What shows that an image was made here; ``named`` stands for all of its files."""
    made = key(make=True)
    if made is None:
        raise Unavailable("this machine's key for images could not be made")
    return blake3(named, key=made).digest()


def made_here(named: bytes, shown: bytes) -> bool:
    known = key(make=False)
    return known is not None and hmac.compare_digest(blake3(named, key=known).hexdigest().encode(), shown)
