"""Directories as plain dicts, made and read without any of our code: what scans and restores are held against."""

from __future__ import annotations

import os
import shutil
import stat
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from holdfast.process.scan import Scanner
from holdfast.process.trees import Content, Entry, Tree
from tests.memory import memory

Plain = dict[bytes, tuple[int, bytes | None]]
"""By path: mode, and a file's bytes, a link's target, or None for a directory."""

NAMES = st.sampled_from([b"a", b"b", b"c.py", b"odd\n\xff name", b".git", b"-"])
FILES = st.tuples(st.sampled_from([0o644, 0o755, 0o600, 0o444]), st.sampled_from([b"", b"x", b"y", b"long" * 5000]))
LINKS = st.sampled_from([b"a", b"../b", b"nowhere", b"a/b"])


@st.composite
def plains(draw) -> Plain:
    """A directory of up to some ten paths."""
    found: Plain = {}

    def fill(place: bytes, depth: int) -> None:
        for name in draw(st.lists(NAMES, max_size=4, unique=True)):
            kind = draw(st.integers(0, 5))
            if kind >= 4 and depth < 3:
                found[place + name] = (stat.S_IFDIR | draw(st.sampled_from([0o755, 0o700, 0o555])), None)
                fill(place + name + b"/", depth + 1)
            elif kind == 3:
                found[place + name] = (stat.S_IFLNK | 0o777, draw(LINKS))
            else:
                mode, data = draw(FILES)
                found[place + name] = (stat.S_IFREG | mode, data)

    fill(b"", 0)
    return found


def make(root: Path, plain: Plain) -> None:
    """Make a directory that holds exactly this."""
    for place, _, _ in os.walk(root):
        os.chmod(place, 0o700)
    if root.exists():
        shutil.rmtree(root)
    root.mkdir()
    for path, (mode, content) in sorted(plain.items()):
        put(root, path, mode, content)
    for path, (mode, content) in plain.items():
        if content is None:
            os.chmod(os.path.join(os.fsencode(root), path), stat.S_IMODE(mode))


def put(root: Path, path: bytes, mode: int, content: bytes | None) -> None:
    place = os.path.join(os.fsencode(root), path)
    if stat.S_ISDIR(mode):
        os.mkdir(place)
    elif stat.S_ISLNK(mode):
        os.symlink(content, place)
    else:
        with open(place, "wb") as file:
            file.write(content)
        os.chmod(place, stat.S_IMODE(mode))


def look(root: Path) -> Plain:
    """What a directory holds."""
    found: Plain = {}
    above = os.fsencode(root)
    for place, folders, files in os.walk(above):
        for name in folders + files:
            path = os.path.join(place, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                content = os.readlink(path)
            else:
                content = None if stat.S_ISDIR(mode) else Path(os.fsdecode(path)).read_bytes()
            found[os.path.relpath(path, above)] = (mode, content)
    return found


@contextmanager
def room() -> Iterator[Path]:
    """A directory in memory, where there is such a place: many restores are tried there, and each of them flushes."""
    with memory() as place:
        place.chmod(0o755)
        yield place


def as_nobody(act: Callable[[], object]) -> None:
    """Do something in a forked process that has no rights."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Shelf:
    """Chunks that some scans gave, as a store would keep them."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def keep(self, pieces: object) -> None:
        self.held.update(pieces)

    def read(self, digests: object) -> object:
        return (self.held[digest] for digest in digests)

    def tree(self, root: Path) -> dict[bytes, Entry]:
        """The whole tree of a directory, read anew."""
        return dict(Scanner(root, rules=False).scan({}, into=self.keep).changed)

    def plain(self, tree: Tree) -> Plain:
        """A tree as a plain dict, its chunks put together."""
        return {
            path: (
                mode,
                b"".join(self.held[name] for name in content.chunks) if isinstance(content, Content) else content,
            )
            for path, (mode, content, _) in tree.items()
        }
