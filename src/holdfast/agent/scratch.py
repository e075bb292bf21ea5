"""A store to be thrown away: where something is put together and proven before anybody sees it.

Owns its place and its end. What always holds: it is readable by this user only, encrypted with a key that nobody keeps
where the store that it is for is encrypted, and gone when the work is done; a process that is killed leaves a directory
``.holdfast-scratch-*`` behind, which nothing refers to.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.store.embedded import open_embedded
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

    @contextmanager
    def open(self, kind: type[S], *, readonly: bool = False) -> Iterator[S]:
        catalog = open_embedded(
            self._place / "store",
            create=not readonly,
            readonly=readonly,
            durability="commit" if readonly else "batched",
            secret=self._secret,
            remember=False,
        )
        store = kind(self._place / "store", catalog, (readonly, "commit" if readonly else "batched", False, True))
        try:
            yield store
        finally:
            store.close()


@contextmanager
def scratch(near: Store, place: Path | None = None) -> Iterator[Scratch]:
    """A scratch place beside a store, where there is as much room as it has; or below ``place``."""
    secret = secret_of(os.urandom(32)) if near._catalog.encrypted else None
    made = _make(place if place is not None else near.path.parent, strict=place is not None)
    try:
        yield Scratch(made, secret)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _make(folder: Path, *, strict: bool) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    except OSError:
        if strict:
            raise
        return Path(tempfile.mkdtemp(prefix=_PREFIX))
