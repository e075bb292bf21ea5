"""Files of checkpoints as people read them: what is there, one of them, and what differs between two moments.

Owns how a change of a file prints. Knows no directory but through whoever gives it a way to read. What always holds: a
content is read only when its lines are wanted, and only if it is short.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from holdfast.process.trees import Content, Entry, Tree, equal, same, shown

TEXT_MAX_BYTES = 2**20
"""Longer contents are not compared line by line."""

LINES_MAX = 40
"""So many lines of one file are shown where it is one of many."""

Read = Callable[[Entry], bytes]
"""Gives the content of an entry of a regular file."""


class FileInfo(Struct, frozen=True):
    """One path of a checkpoint's files. ``kind``: ``file``, ``link`` or ``directory``; ``mode`` has its permissions.

    ``mark`` says why it may not be what was there at any moment: it changed while it was read, for example.
    """

    path: str
    kind: str
    mode: int
    size: int
    digest: str = ""
    target: str = ""
    mark: str = ""

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        found: dict[str, Any] = {"path": self.path, "kind": self.kind, "mode": f"{self.mode:o}", "size": self.size}
        return found | {name: value for name in ("digest", "target", "mark") if (value := getattr(self, name))}


def info_of(path: bytes, entry: Entry, mark: str = "") -> FileInfo:
    content = entry.content
    kind = {stat.S_IFREG: "file", stat.S_IFLNK: "link"}.get(stat.S_IFMT(entry.mode), "directory")
    size = content.size if isinstance(content, Content) else len(content or b"")
    digest = content.digest.hex() if isinstance(content, Content) else ""
    target = shown(content) if isinstance(content, bytes) else ""
    return FileInfo(shown(path), kind, stat.S_IMODE(entry.mode), size, digest, target, mark)


class FileChange:
    """A path that differs. ``kind``: ``added``, ``removed``, ``changed``, ``mode``: only what one may do with it.

    In the plan of a rollback also ``stays``: the checkpoint has it, and what lies there now is left as it is.
    """

    def __init__(
        self, path: bytes, old: Entry | None, new: Entry | None, read: tuple[Read, Read], stays: str = ""
    ) -> None:
        self.path = shown(path)
        """Relative to the workspace."""
        self.name = os.fsdecode(path)
        """As the system knows it."""
        self.old = info_of(path, old) if old is not None else None
        self.new = info_of(path, new) if new is not None else None
        self._entries, self._read, self._stays = (old, new), read, stays

    @property
    def kind(self) -> str:
        """What happened to it."""
        if self._stays:
            return "stays"
        if self.old is None or self.new is None:
            return "removed" if self.new is None else "added"
        return "mode" if same(*self._entries) and self.old.kind == self.new.kind else "changed"

    def summary(self) -> str:
        """In a few words."""
        if self._stays:
            return f"stays as it is: {self._stays} leaves it out"
        sides = [_side(one) for one in (self.old, self.new) if one is not None]
        if self.kind == "mode" and self.old is not None and self.new is not None:
            return f"mode {self.old.mode:o} -> {self.new.mode:o}" if self.old.mode != self.new.mode else "attributes"
        return f"{self.kind}, {' -> '.join(dict.fromkeys(sides))}"

    def diff(self) -> list[str]:
        """The lines that differ, as ``diff -u`` has them, without its head; none where one side is no short text."""
        if self._stays:
            return []
        texts = [_text(entry, read) for entry, read in zip(self._entries, self._read, strict=True)]
        old, new = texts
        if old is None or new is None:
            return []
        found = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="")
        return list(found)[2:]

    def lines(self, most: int | None = LINES_MAX) -> Iterator[tuple[str, str]]:
        """(sign, text): what happened to it, then the lines that differ."""
        sign = {"added": "+", "removed": "-", "stays": "="}.get(self.kind, "~")
        yield sign, f"{self.path}: {self.summary()}"
        if self.kind != "changed" or most == 0:
            return
        found = self.diff()
        for line in found[:most]:
            yield (line[0] if line[0] in "+-" else " "), f"  {line[1:] if line[0] in '+- ' else line}"
        if most is not None and len(found) > most:
            yield " ", f"  … {len(found) - most} more lines"

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        sides = {"old": self.old, "new": self.new}
        data = {name: one.to_json() for name, one in sides.items() if one is not None}
        return {"path": self.path, "kind": self.kind, **data}

    def __repr__(self) -> str:
        return f"<FileChange {self.path}: {self.summary()}>"


def compare(old: Tree, new: Tree, read: tuple[Read, Read]) -> list[FileChange]:
    """What differs between two trees, by path. Directories are told of where nothing lies in them."""
    found = []
    for path in sorted(old.keys() | new.keys()):
        mine, other = old.get(path), new.get(path)
        if mine is not other and not equal(mine, other):
            found.append((path, FileChange(path, mine, other, read)))
    full = {path.rpartition(b"/")[0] for path, _ in found}
    return [one for path, one in found if path not in full or one.kind in {"changed", "mode"}]


def _side(one: FileInfo) -> str:
    return f"{one.size:,} bytes" if one.kind == "file" else f"link to {one.target}" if one.target else "directory"


def _text(entry: Entry | None, read: Read) -> str | None:
    """What can be compared by lines; None for anything else."""
    if entry is None:
        return ""
    if not isinstance(entry.content, Content) or entry.content.size > TEXT_MAX_BYTES:
        return None
    data = read(entry)
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def listed(tree: Mapping[bytes, Entry], marks: Mapping[bytes, str]) -> list[FileInfo]:
    """All of a tree, by path."""
    return [info_of(path, tree[path], marks.get(path, "")) for path in sorted(tree)]
