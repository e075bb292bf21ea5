"""Trees of files, as data: what a path holds, which of that may be put onto a disk, and how a layer keeps it.

Owns the shape of a tree, the rules about its names, and its encoding (format.md section 3, "Files"). Reads and writes
no file. What always holds: a tree that passed ``check`` names nothing outside its root, and none comes out of a store
that has not: it is damage, as is what is neither file, link nor directory. A tree lists every path on its own,
directories among them, so that what differs between two trees is all that has to be done to get from one to the other.

Not part of a tree, and so neither saved nor changed by a restore: owners, times, setuid, setgid and sticky bits, access
lists, attributes outside ``user.`` and those of directories and links. Each name of a hard link is a file of its own.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.codec import wire
from holdfast.codec.types import NO_TYPES
from holdfast.codec.values import decode, encode
from holdfast.codec.wire import array_of, extension_of
from holdfast.errors import CorruptValue, Damaged
from holdfast.store.cipher import Buffer, digest
from holdfast.store.objects import MARK as PACKS_MARK

NAME_MAX_BYTES = 255
"""What Linux file systems take as one name."""

DEPTH_MAX = 256
"""How many names a path may have: each is opened on the way to the last."""

STAGING = ".holdfast-restoring"
"""Where a restore keeps what it is about to put in place. While it is there, the directory is half-way."""

SCRATCH = ".holdfast-scratch-"
"""How the names of those begin that the store, or an export, is still building."""

PERMISSIONS = 0o777
"""The bits of a mode that a tree keeps. Those beyond them give rights away, and belong to whoever made the file."""


class Content(NamedTuple):
    """A regular file's bytes: named by their digest, cut into chunks. What names it is ``digest`` and ``size``."""

    digest: bytes
    size: int
    chunks: tuple[bytes, ...]


class Entry(NamedTuple):
    """One path of a tree: a regular file, a symbolic link (its target), or a directory (``None``)."""

    mode: int
    content: Content | bytes | None
    extra: tuple[tuple[bytes, bytes], ...] = ()
    """Names and values of the attributes that a user gave it (``user.*``), sorted."""


Tree = Mapping[bytes, Entry]
"""Paths relative to the root, ``os.fsencode``'d, with ``/`` between names."""


class Difference(NamedTuple):
    """What a path held, and what it is to hold. ``None``: nothing."""

    before: Entry | None
    after: Entry | None


def content_digest(data: Buffer) -> bytes:
    return digest(b"value", data)


def same(entry: Entry | None, other: Entry | None) -> bool:
    """Whether two entries hold the same. Modes and attributes apart: nobody's work is lost with those."""
    if entry is None or other is None:
        return entry is other
    mine, theirs = entry.content, other.content
    if isinstance(mine, Content) and isinstance(theirs, Content):
        return mine.digest == theirs.digest and mine.size == theirs.size
    return mine == theirs


def equal(entry: Entry | None, other: Entry | None) -> bool:
    """Whether two entries are the same in everything. How a file is cut does not count."""
    if entry is None or other is None:
        return entry is other
    return entry.mode == other.mode and entry.extra == other.extra and same(entry, other)


def differences(old: Tree, new: Tree) -> dict[bytes, Difference]:
    """All that has to be done to get from one tree to another."""
    found = {path: Difference(entry, None) for path, entry in old.items() if path not in new}
    for path, entry in new.items():
        was = old.get(path)
        if was is not entry and not equal(was, entry):
            found[path] = Difference(was, entry)
    return found


def shown(path: bytes) -> str:
    """A path as text for a person: no control characters, nothing undecodable."""
    text = path.decode(errors="backslashreplace")
    return text if text.isprintable() else repr(text)[1:-1]


_OUTSIDE = re.compile(rb"(?:\A|/)\.{0,2}(?:/|\Z)|\0")
_LONG = re.compile(rb"[^/]{%d}" % (NAME_MAX_BYTES + 1))
_HIDDEN = re.compile(rb"(?:\A|/)(?:%s(?:/|\Z)|%s)" % (re.escape(STAGING.encode()), re.escape(SCRATCH.encode())))


def hidden(name: str) -> bool:
    """Whether this is a name of ours, which no tree has."""
    return name == STAGING or name.startswith(SCRATCH)


STORE = ("packs", "locks", "store.db", "witness", PACKS_MARK)


def is_store(names: set[str]) -> bool:
    """Whether a directory with these names is a Holdfast store, or has packs of one: no tree has its files."""
    if PACKS_MARK in names:
        return True
    return "packs" in names and "locks" in names and ("store.db" in names or "witness" in names)


def check(path: bytes, entry: Entry | None = None) -> None:
    """Raise Damaged unless this path, with this entry, may be put beneath a root."""
    for problem in _problems(path, entry):
        raise Damaged(
            f"the tree of files holds {shown(path)!r}: {problem}",
            what=(f"file {shown(path)}",),
            hint="Nothing was changed. It is damaged, or whoever made it tried to reach other files than its own.",
        )


def _problems(path: bytes, entry: Entry | None) -> Iterator[str]:
    if _OUTSIDE.search(path):
        yield "that is no path beneath a root"
    if path.count(b"/") >= DEPTH_MAX or _LONG.search(path):
        yield "its names are too many or too long"
    if _HIDDEN.search(path):
        yield "that name is for what is being restored"
    if entry is None:
        return
    kind, content = stat.S_IFMT(entry.mode), entry.content
    if content is None:
        fits = kind == stat.S_IFDIR
    elif isinstance(content, Content):
        fits = kind == stat.S_IFREG and content.size >= 0 and len(content.digest) == 32
    else:
        fits = kind == stat.S_IFLNK and 0 < len(content) < 4096 and b"\0" not in content
    if not fits:
        yield f"mode {entry.mode:o} is not that of a file, link or directory with such a content"
    if stat.S_IMODE(entry.mode) & ~PERMISSIONS:
        yield f"mode {entry.mode:o} would give its users the rights of others"
    if any(not name.startswith(b"user.") for name, _ in entry.extra):
        yield "it has attributes that are not a user's"


def leaves(path: bytes, target: bytes) -> bool:
    """Whether a link at this path leads out of the root, as far as its text says."""
    if target.startswith(b"/"):
        return True
    depth = path.count(b"/")
    for name in target.split(b"/"):
        depth += -1 if name == b".." else name not in {b"", b"."}
        if depth < 0:
            return True
    return False


# -- in a store ----------------------------------------------------------------------------------------------

_DIGEST_BYTES = 32


def encode_path(path: bytes) -> bytes:
    """The key under which an entry stands."""
    return encode(path)


def encode_entry(entry: Entry) -> bytes:
    """What stands under the key."""
    content = entry.content
    if isinstance(content, Content):
        chunks = array_of([encode(name) for name in content.chunks])
        data = extension_of(wire.CONTENT, array_of([encode(content.digest), encode(content.size), chunks]))
    else:
        data = encode(content)
    parts = [encode(entry.mode), data] + ([encode(entry.extra)] if entry.extra else [])
    return extension_of(wire.TUPLE, array_of(parts))


def encode_changes(changed: Tree, gone: Iterable[bytes]) -> dict[bytes, bytes | None]:
    """Entries that are new, by their keys, and those that are gone."""
    found: dict[bytes, bytes | None] = {encode_path(path): encode_entry(changed[path]) for path in sorted(changed)}
    found.update((encode_path(path), None) for path in gone)
    return found


def chunks_of(entries: Iterable[Entry]) -> set[bytes]:
    """The names of all chunks of files."""
    return {name for one in entries if isinstance(one.content, Content) for name in one.content.chunks}


def decode_entries(items: Iterable[bytes]) -> dict[bytes, Entry]:
    """Entries by path, of pairs as a tree of the codec has them: a key, and behind it what stands there."""
    pairs = list(items)
    joined = b"\xdd" + (2 * len(pairs)).to_bytes(4, "big") + b"".join(pairs)
    flat = decode(joined, NO_TYPES, inert=True, big=_content)
    found = {}
    for path, parts in zip(flat[::2], flat[1::2], strict=True):
        if type(path) is not bytes:
            raise CorruptValue(f"{path!r:.100} is no path")
        entry = found[path] = _entry(path, parts)
        check(path, entry)
    return found


def _content(code: int, payload: bytes) -> Content:
    parts = decode(payload, NO_TYPES) if code == wire.CONTENT else None
    if type(parts) is list and len(parts) == 3 and type(parts[1]) is int and type(parts[2]) is list:
        digest, size, chunks = parts
        if all(type(one) is bytes and len(one) == _DIGEST_BYTES for one in (digest, *chunks)):
            return Content(digest, size, tuple(chunks))
    raise CorruptValue("the content of a file is a digest, a length and chunks")


def _entry(path: bytes, parts: Any) -> Entry:
    if type(parts) is tuple and len(parts) in {2, 3} and type(parts[0]) is int and 0 <= parts[0] < 2**16:
        mode, content, *rest = parts
        extra = rest[0] if rest else ()
        if (content is None or type(content) in {bytes, Content}) and _are_attributes(extra):
            return Entry(mode, content, extra)
    raise CorruptValue(f"what is at {path!r:.100} is no file, link or directory")


def _are_attributes(extra: Any) -> bool:
    return type(extra) is tuple and all(
        type(one) is tuple and len(one) == 2 and type(one[0]) is type(one[1]) is bytes for one in extra
    )
