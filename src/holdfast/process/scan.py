"""Scanning: what has changed in a directory since a tree of it was taken.

Owns walking a root, reading what may have changed, and what is remembered between scans. Knows nothing of stores.
What always holds: what is remembered only saves reading, and never hides a change. A file is not read again if its
size, times and inode are those with which it was read, and its times were older than that scan by then (whoever writes
later gets other times); a directory is not listed again by the same rule, where its file system is known to keep it.
What changed while it was read is read again, and then marked.

What no scan can see: a second write into a mapped page that is still dirty changes no time at all; a program that
writes so must flush (``msync``) before a checkpoint. A network file system's clock must not be seconds behind.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from holdfast.errors import BadOption
from holdfast.process import chunks
from holdfast.process.chunks import Have, Piece
from holdfast.process.folders import Folders, Paths, Stamp, opened, stamp_of, stamps
from holdfast.process.ignore import RULES, Ignore, Rules
from holdfast.process.trees import DEPTH_MAX, PERMISSIONS, Content, Entry, Tree, equal, hidden, is_store
from holdfast.store import processes
from holdfast.store.cipher import digest
from holdfast.store.files import in_store, unavailable

TRIES = 3
"""How often a file is read that changes meanwhile."""

TICK_NS = 100_000_000
"""Longer than the clock of any kernel takes from one time of files to the next."""

COARSE_TICK_NS = 2_000_000_000
"""The same where file systems keep whole seconds, or every other one."""

_MEMORY = f"3 {sys.version}"
"""What can be read of what was remembered, and compared: another Python may hash in another way."""

_EXACT = {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "f2fs", "zfs", "bcachefs", "overlay"}
"""File systems on which a directory has other times whenever a name in it comes, goes or changes."""

_KEPT = {stat.S_IFREG, stat.S_IFLNK}
_KINDS = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "fifo", stat.S_IFBLK: "device", stat.S_IFCHR: "device"}

T = TypeVar("T")


class Seen(NamedTuple):
    """A file as it was read at last."""

    stamp: Stamp
    entry: Entry
    path: bytes


class _Place:
    """What is remembered of a directory: its times, what lies in it, the files that were read, and under which rules.

    Where these are all of its files, and its times are old enough, one status of each tells that nothing has changed.
    """

    __slots__ = ("_lists", "below", "count", "entry", "files", "ruled", "rules", "skipped", "stamp", "told")

    def __init__(self, entry: Entry | None, stamp: Stamp | None, rules: bytes, ruled: Collection[str]) -> None:
        self.entry = entry  # None: the root, which is no part of the tree
        self.stamp = stamp  # None: its times are too young
        self.rules = rules  # what names them
        self.ruled = ruled  # the files of rules in it
        self.below: list[tuple[bytes, str]] = []
        self.skipped: dict[bytes, str] = {}
        self.files: dict[str, Seen] = {}
        self.count = 0
        """How many of the files in it belong to the tree."""
        self.told = False
        """Whether all of it was what the known tree said, when it was compared with that last."""
        self._lists: _Lists | None = None

    @property
    def whole(self) -> bool:
        return self.stamp is not None and len(self.files) == self.count

    def lists(self, root: bytes, place: bytes) -> _Lists:
        """What it holds when it is whole, as lists."""
        if self._lists is None:
            seen = [*self.files.values()]
            paths, entries = [one.path for one in seen], [one.entry for one in seen]
            wanted = [one.stamp for one in seen]
            where = Paths(root, [*paths, place[:-1]])
            if self.entry is not None:
                paths.append(place[:-1])
                entries.append(self.entry)
            if self.stamp is not None:
                wanted.append(self.stamp)
            self._lists = _Lists(wanted, where, paths, entries)
        return self._lists


class _Lists(NamedTuple):
    """All with the directory itself at the end, but for the root's paths and entries: it is no part of the tree."""

    stamps: list[Stamp]
    where: Paths
    paths: list[bytes]
    entries: list[Entry]


class _KeptPlace(msgspec.Struct, array_like=True):
    """A directory as it is remembered for another process. Names are bytes: not all of them are text."""

    place: bytes
    mode: int
    stamp: Stamp | None
    rules: bytes
    ruled: list[str]
    below: list[bytes]
    skipped: dict[bytes, str]
    count: int
    files: list[tuple[bytes, Stamp, int, bytes, int, tuple[tuple[bytes, bytes], ...]]]


class _Kept(msgspec.Struct, array_like=True):
    version: str
    boot: str
    root: bytes
    places: list[_KeptPlace]


class Scan(NamedTuple, Generic[T]):
    """What differs from the tree that was known."""

    changed: dict[bytes, Entry]
    """Paths that are new, or hold something else."""
    gone: set[bytes]
    marked: dict[bytes, str]
    """Paths whose entry may not be what was there at any moment, and why: they changed while they were read."""
    skipped: dict[bytes, str]
    """Paths that are no part of a tree, and what they are: sockets, fifos, devices, stores, what cannot be read."""
    paths: int
    """How many paths there are."""
    read_bytes: int
    kept: T
    """What ``into`` made of the new chunks."""


class Scanner:
    """One directory, scanned again and again. Not for several threads at once.

    ``ignore`` are lines as in a ``.holdfastignore`` above the root; ``average`` is how large the chunks of large files
    are; ``rules`` false reads no files of rules: everything is part of the tree.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        ignore: Iterable[str] = (),
        rules: bool = True,
        average: int = chunks.AVERAGE_BYTES,
    ) -> None:
        self.root = os.path.realpath(root)
        self.average = average
        self.fresh = 0
        """What was read since what is remembered was last given to another one: files, and every 128 KiB of them."""
        self._rules = rules
        self._ignore = Ignore(tuple(ignore))
        self._places: dict[bytes, _Place] = {}

    def memory(self) -> bytes:
        """What is remembered, for a scanner of the same directory in another process.

        Not one after a restart of the machine: if that lost its power, files can have the times of what they lost.
        """
        self.fresh = 0
        places = [
            _KeptPlace(
                place, one.entry.mode if one.entry is not None else 0, one.stamp, one.rules, [*one.ruled],
                [path for path, _ in one.below], one.skipped, one.count,
                [(path, stamp, entry.mode, *_named(entry), entry.extra) for stamp, entry, path in one.files.values()],
            )
            for place, one in self._places.items()
        ]  # fmt: skip
        body = msgspec.msgpack.encode(_Kept(_MEMORY, processes.identity()[0], os.fsencode(self.root), places))
        return digest(b"scan", body) + body

    def remember(self, memory: bytes) -> None:
        """Take over what another scanner remembered. If it is not of this directory, or damaged, nothing happens."""
        if digest(b"scan", memory[32:]) != memory[:32]:
            return
        try:
            kept = msgspec.msgpack.decode(memory[32:], type=_Kept)
        except msgspec.MsgspecError:
            return
        boot = processes.identity()[0]
        if not boot or (kept.version, kept.boot, kept.root) != (_MEMORY, boot, os.fsencode(self.root)):
            return
        for one in kept.places:
            folder = Entry(one.mode, None) if one.place else None
            made = self._places[one.place] = _Place(folder, one.stamp, one.rules, one.ruled)
            made.below = [(path, os.fsdecode(path)) for path in one.below]
            made.skipped, made.count = one.skipped, one.count
            for path, stamp, mode, content, size, extra in one.files:
                held = content if stat.S_ISLNK(mode) else Content(content, size, ())
                made.files[os.fsdecode(path)] = Seen(stamp, Entry(mode, held, extra), path)

    def scan(
        self,
        known: Tree,
        *,
        into: Callable[[Iterator[Piece]], T] = chunks.drain,  # type: ignore[assignment]
        have: Have | None = None,
        differing: Collection[bytes] | None = None,
    ) -> Scan[T]:
        """Compare the directory with a tree of it.

        The chunks that are new go to ``into`` while the files are read, each with its digest: none that its file had
        before, nor one that ``have`` knows. ``differing``: all paths at which this tree may have another entry than
        that of the last scan; None: nobody knows.
        """
        if in_store(Path(self.root)):
            raise BadOption(f"{self.root} is a Holdfast store or lies in one", hint="Choose another workspace.")
        try:
            with Folders(self.root) as folders:
                return _Pass(self, folders, known, have, differing).run(into)
        except OSError as error:
            raise unavailable(error, f"cannot read the files beneath {self.root}") from error


class _Pass:
    """One scan."""

    def __init__(
        self, scanner: Scanner, folders: Folders, known: Tree, have: Have | None, differing: Collection[bytes] | None
    ) -> None:
        self.scanner, self.folders, self.known = scanner, folders, known
        self.doubtful = None
        """The directories of which the known tree may say something else than at the last scan; None: any."""
        if differing is not None:
            self.doubtful = {place for path in differing for place in (path[: path.rfind(b"/") + 1], path + b"/")}
        self.started = time.time_ns()
        self.exact = _is_exact(folders.device)
        self.changed: dict[bytes, Entry] = {}
        self.marked: dict[bytes, str] = {}
        self.skipped: dict[bytes, str] = {}
        self.places: dict[bytes, _Place] = {}
        self.same: list[Collection[bytes]] = []
        """Paths that are as they were read at last, and as the known tree has them."""
        self.others: set[bytes] = set()
        """All other paths that are there."""
        self.unsure: list[tuple[_Place, str, bytes]] = []
        """Files to read: their directories, and their paths as text and as bytes."""
        self.read_bytes = 0
        self._have = have
        self._handed: set[bytes] = set()

    def run(self, into: Callable[[Iterator[Piece]], T]) -> Scan[T]:
        resting = self._resting()
        waiting = [(b"", "", self.scanner._ignore.above)]
        while waiting:
            place, text, above = waiting.pop()
            rules = self._as_before(place, text, above, resting[place]) if place in resting else None
            if rules is None:
                rules = self.look(place, text, above)
            if place in self.places:
                waiting += [(path, inner, rules) for path, inner in self.places[place].below]
        count = sum(map(len, self.same)) + len(self.others)
        met = count - sum(path not in self.known for path in self.others)
        same = chain.from_iterable(self.same) if met < len(self.known) else ()
        gone = self.known.keys() - self.others - {*same} if met < len(self.known) else set()
        kept = into(self.pieces(gone))
        self.scanner._places = self.places
        return Scan(self.changed, gone, self.marked, self.skipped, count, self.read_bytes, kept)

    # -- looking ---------------------------------------------------------------------------------------------

    def _resting(self) -> dict[bytes, _Lists]:
        """The directories that are as they were, with all of their files, by their times.

        Nothing is opened on the way: should somebody put a link there at this moment, what it leads to has other
        times. Names come from what was listed, so none can be missed as long as the directory has its times.
        """
        if not self.exact:
            return {}
        root = os.fsencode(self.scanner.root)
        whole = [(place, one.lists(root, place)) for place, one in self.scanner._places.items() if one.whole]
        now = iter(stamps([one.where for _, one in whole], self.folders.root))
        return {place: one for place, one in whole if [*islice(now, len(one.stamps))] == one.stamps}

    def _as_before(self, place: bytes, text: str, above: Rules, lists: _Lists) -> Rules | None:
        """The rules in a directory that rests; None where it has to be looked at nevertheless."""
        last = self.scanner._places[place]
        rules = above
        if self.scanner._rules:
            try:
                fd = self.folders.fd(place[:-1]) if last.ruled else -1
                rules = self.scanner._ignore.enter(text, above, fd, last.ruled)
            except OSError:
                return None
        if rules.key != last.rules:
            return None
        if self.doubtful is None or not last.told or place in self.doubtful:
            last.told = list(map(self.known.get, lists.paths)) == lists.entries
            if not last.told:
                return None
        self.places[place] = last
        self.same.append(lists.paths)
        self.skipped.update(last.skipped)
        return rules

    def look(self, place: bytes, text: str, rules: Rules) -> Rules:
        """Look at a directory; the rules for those in it. Its path ends with a slash, but for the root's."""
        path = place[:-1]
        try:
            fd = self.folders.fd(path)
            status = os.fstat(fd)
            with os.scandir(fd) as listing:
                items = list(listing)
        except (FileNotFoundError, NotADirectoryError):
            return rules  # it went meanwhile
        except PermissionError as error:
            self._keep_below(place, f"cannot be read ({error.strerror})")
            return rules
        names = {item.name for item in items}
        if is_store(names) or status.st_dev != self.folders.device:
            self.skipped[path] = "a Holdfast store" if is_store(names) else "another file system"
            return rules
        folder = None
        if place:
            self.others.add(path)
            folder = Entry(stat.S_IFDIR | status.st_mode & PERMISSIONS, None)
            known = self.known.get(path)
            if known == folder:
                folder = known  # the very same is compared faster
            else:
                self.changed[path] = folder
        if self.scanner._rules:
            rules = self.scanner._ignore.enter(text, rules, fd, names)
        stamp = stamp_of(status) if self._settled(status) else None
        now = self.places[place] = _Place(folder, stamp, rules.key, [name for name in RULES if name in names])
        self._below(now, place, text, rules, items)
        self._compare(now, place, text, rules, items)
        self.skipped.update(now.skipped)
        return rules

    def _compare(self, now: _Place, place: bytes, text: str, rules: Rules, items: list[os.DirEntry[str]]) -> None:
        """Find the files of a directory that have to be read."""
        last = self.scanner._places.get(place)
        former_files = last.files if last is not None else {}
        # What was read under the same rules is not left out by them.
        judged = last is not None and last.rules == rules.key
        for item in items:
            if item.is_dir(follow_symlinks=False):
                continue
            name = text + item.name
            former = former_files.get(name)
            if not rules.empty and not (judged and former is not None) and rules.ignores(name):
                continue
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if former is not None and former.stamp == stamp_of(status):
                entry = self.known.get(former.path)
                if entry is not None and equal(entry, former.entry):
                    now.files[name] = former if entry is former.entry else former._replace(entry=entry)
                    now.count += 1
                    continue
            path = place + os.fsencode(item.name)
            kind = stat.S_IFMT(status.st_mode)
            if kind in _KEPT and not hidden(item.name):
                self.others.add(path)
                self.unsure.append((now, name, path))
                now.count += 1
            else:
                now.skipped[path] = _KINDS.get(kind, "a name that Holdfast uses itself")
        self.same.append([one.path for one in now.files.values()])

    def _below(self, now: _Place, place: bytes, text: str, rules: Rules, items: list[os.DirEntry[str]]) -> None:
        """Find the directories in a directory that belong to the tree."""
        for item in items:
            if item.is_dir(follow_symlinks=False) and not hidden(item.name):
                path, within = place + os.fsencode(item.name) + b"/", f"{text}{item.name}/"
                if rules.ignores(within):
                    continue
                if place.count(b"/") < DEPTH_MAX - 1:
                    now.below.append((path, within))
                else:
                    now.skipped[path[:-1]] = "too deep"

    def _keep_below(self, place: bytes, why: str) -> None:
        """What cannot be looked at is taken to be what it was: that it is gone would be a lie."""
        self.marked[place[:-1]] = why
        self.others.update(path for path in self.known if path == place[:-1] or path.startswith(place))

    # -- reading ---------------------------------------------------------------------------------------------

    def pieces(self, gone: set[bytes]) -> Iterator[Piece]:
        """Read what may have changed; the chunks that are new."""
        for place, name, path in self.unsure:
            for attempt in range(TRIES):
                try:
                    stamp, status, entry = yield from self._read(path)
                except (FileNotFoundError, NotADirectoryError):
                    self.others.discard(path)
                    if path in self.known:
                        gone.add(path)
                    break
                except PermissionError as error:
                    self.marked[path] = f"cannot be read ({error.strerror})"
                    if path not in self.known:
                        self.others.discard(path)
                        self.skipped[path] = self.marked.pop(path)
                    break
                if stamp is None and attempt < TRIES - 1:
                    continue
                if stamp is None:
                    self.marked[path] = "changed while it was read"
                elif self._settled(status):
                    place.files[name] = Seen(stamp, entry, path)
                    self.scanner.fresh += 1 + (status.st_size >> 17)
                if not equal(entry, self.known.get(path)):
                    self.changed[path] = entry
                break

    def _settled(self, status: os.stat_result) -> bool:
        """Whether whoever writes from now on gives a file other times than it has."""
        times = (status.st_mtime_ns, status.st_ctime_ns)
        coarse = all(one % 1_000_000_000 == 0 for one in times)
        return max(times) < self.started - (COARSE_TICK_NS if coarse else TICK_NS)

    def _read(self, path: bytes) -> Generator[Piece, None, tuple[Stamp | None, os.stat_result, Entry]]:
        """A path's entry, and the stamp that it has with it: None if it changed meanwhile."""
        above, name = self.folders.parent(path)
        before = os.stat(name, dir_fd=above, follow_symlinks=False)
        if stat.S_ISLNK(before.st_mode):
            entry = Entry(stat.S_IFLNK | PERMISSIONS, os.readlink(name, dir_fd=above))
            after = os.stat(name, dir_fd=above, follow_symlinks=False)
        elif stat.S_ISREG(before.st_mode):
            with opened(name, os.O_RDONLY, above) as fd:
                before = os.fstat(fd)
                content = yield from chunks.read(fd, before.st_size, self._having(path), self.scanner.average)
                entry = Entry(stat.S_IFREG | before.st_mode & PERMISSIONS, content, attributes(fd))
                after = os.fstat(fd)
            self.read_bytes += content.size
        else:
            raise FileNotFoundError  # something else lies there since
        whole = stamp_of(before) == stamp_of(after)
        return stamp_of(before) if whole else None, before, entry

    def _having(self, path: bytes) -> Have:
        """Tells whether a chunk need not be handed out: it was, or the caller has it. A path's own are asked first."""
        entry = self.known.get(path)
        own = set(entry.content.chunks) if entry is not None and isinstance(entry.content, Content) else set()

        def has(name: bytes) -> bool:
            if name in own or name in self._handed or (self._have is not None and self._have(name)):
                return True
            self._handed.add(name)
            return False

        return has


def _named(entry: Entry) -> tuple[bytes, int]:
    """What names the content of a file, or the target of a link."""
    return entry.content[:2] if isinstance(entry.content, Content) else (entry.content or b"", 0)


def _is_exact(device: int) -> bool:
    """Whether directories of this device tell by their times that names have changed in them."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    kinds = {one.rpartition(" - ")[2].split()[0] for one in lines if one.split()[2] == wanted}
    return bool(kinds) and kinds <= _EXACT


def attributes(fd: int) -> tuple[tuple[bytes, bytes], ...]:
    """The attributes of an open file that a user gave it."""
    try:
        names = sorted(os.fsencode(name) for name in os.listxattr(fd) if name.startswith("user."))
        return tuple((name, os.getxattr(fd, name)) for name in names)
    except OSError:  # the file system has none, or it went just now: then its times say so
        return ()
