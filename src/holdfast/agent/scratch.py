"""A store to be thrown away: where something is put together and proven before anybody sees it.

Owns its place and its end. What always holds: it is readable by this user only, encrypted with a key that nobody keeps
where the store that it is for is encrypted, and gone when the work is done; a process that is killed leaves a directory
``.holdfast-scratch-*`` behind, which nothing refers to.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.store.embedded import open_embedded
from holdfast.store.files import discard, fsync_directory, unavailable
from holdfast.store.keys import Secret, secret_of

if TYPE_CHECKING:
    from holdfast.agent.store import Store

S = TypeVar("S", bound="Store")

_PREFIX = ".holdfast-scratch-"


class Scratch:
    """The place of a scratch store. ``open`` gives it, empty at first."""

    def __init__(self, place: Path, secret: Secret | None) -> None:
        self._place = place
        self._secret = secret

    def open(self, kind: type[S], *, readonly: bool = False) -> AbstractContextManager[S]:
        return self._open("store", kind, self._secret, readonly=readonly)

    def new(self, kind: type[S], secret: Secret | None) -> AbstractContextManager[S]:
        """Another store, that is to stay: filled here, where nobody sees it, and then ``put`` where it belongs."""
        return self._open("new", kind, secret)

    @contextmanager
    def _open(self, name: str, kind: type[S], secret: Secret | None, *, readonly: bool = False) -> Iterator[S]:
        durability = "commit" if readonly else "batched"
        path = self._place / name
        catalog = open_embedded(
            path, create=not readonly, readonly=readonly, durability=durability, secret=secret, remember=False
        )
        store = kind(path, catalog, (readonly, durability, False, True))
        try:
            yield store
        finally:
            store.close()

    def put(self, where: Path) -> bool:
        """Give the new store, closed again, its place. False when somebody has made one there meanwhile."""
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            (self._place / "new").rename(where)
            fsync_directory(where.parent)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                return False
            raise unavailable(error, f"making a store at {where}") from error
        return True


@contextmanager
def scratch(near: Path, *, encrypted: bool, strict: bool = False) -> Iterator[Scratch]:
    """A scratch place in the folder ``near``, or, unless ``strict``, where temporary files go."""
    secret = secret_of(os.urandom(32)) if encrypted else None
    made = _make(near, strict=strict)
    try:
        yield Scratch(made, secret)
    finally:
        discard(made)


def _make(folder: Path, *, strict: bool) -> Path:
    failed: OSError
    for place in (folder,) if strict else (folder, None):
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        except OSError as error:
            failed = error
    raise unavailable(failed, f"making a scratch place in {folder}") from failed
