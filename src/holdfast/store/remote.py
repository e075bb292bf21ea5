"""Cold places by URL: object stores, WebDAV, SFTP and whatever else fsspec has a driver for.

Owns what can be relied on there: nothing but putting, reading and deleting an object by its name. Knows no packs. Loads
fsspec, an optional package, when such a place is used. Always true: whatever a driver raises comes out as an error that
names the place, never with the driver's own words, which may hold a secret; an answer that is cut short is never taken
for the end of an object; a missing object is told from a place that is not there by the mark that every place holds.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import BadOption, ColdPlaceMissing
from holdfast.store.tiering import MARK, MARK_TEXT, unreachable

T = TypeVar("T")

_GONE_WITH_THE_PROCESS = frozenset({"memory"})


class Remote:
    """A place that fsspec reaches. Each call is tried twice, because a kept connection may have died meanwhile."""

    def __init__(self, url: str) -> None:
        self.url = url
        scheme = urllib.parse.urlsplit(url).scheme
        if not scheme or scheme in _GONE_WITH_THE_PROCESS:
            raise BadOption(f"no cold place can be at {url!r}", hint="Use a directory, or a URL of a place that lasts.")
        try:
            self._fsspec: Any = import_module("fsspec")
        except ImportError as error:
            raise ColdPlaceMissing(
                f"the cold place {url} needs the package fsspec, which is not installed here",
                place=url,
                hint="pip install 'holdfast[cold]'",
            ) from error
        try:
            self._driver: Any = self._fsspec.get_filesystem_class(scheme)
        except ImportError as error:  # its text is a constant that names the package
            raise ColdPlaceMissing(
                f"the cold place {url} needs a package that is not installed here: {error}",
                place=url,
                hint="Install that package.",
            ) from error
        except ValueError as error:
            raise BadOption(
                f"no cold place can be at {url!r}: fsspec knows no {scheme}://", hint="Use a directory, or another URL."
            ) from error

    def prepare(self) -> None:
        def make(files: Any, path: str) -> None:
            try:
                files.info(path)
            except FileNotFoundError:
                try:
                    files.pipe_file(path, MARK_TEXT)
                except Exception:  # noqa: BLE001 - whatever it is: where there are folders, they may have to be made first
                    files.makedirs(files._parent(path), exist_ok=True)  # noqa: SLF001 - drivers have no other name for it
                    files.pipe_file(path, MARK_TEXT)

        try:
            self._do(MARK, make)
        except FileNotFoundError as error:
            raise unreachable(self.url, "there is no such place") from error

    def require(self) -> None:
        try:
            self._do(MARK, lambda files, path: files.info(path))
        except FileNotFoundError as error:
            raise unreachable(self.url, f"{MARK} is not there") from error

    def put(self, name: str, source: Path) -> None:
        try:
            self._do(name, lambda files, path: files.put_file(str(source), path))
        except FileNotFoundError as error:
            raise unreachable(self.url, "there is no such place") from error

    def read(self, name: str, offset: int, size: int) -> bytes:
        try:
            data = self._found(name, lambda files, path: bytes(files.cat_file(path, start=offset, end=offset + size)))
        except ColdPlaceMissing:
            if self.size(name) > offset:
                raise
            data = b""  # some servers call it an error to ask for what is behind the end
        if len(data) != size and len(data) != max(0, min(size, self.size(name) - offset)):
            raise unreachable(self.url, "it gave another part of a pack than was asked for")
        return data

    def size(self, name: str) -> int:
        def ask(files: Any, path: str) -> int:
            files.invalidate_cache()
            return int(files.info(path)["size"])

        return self._found(name, ask)

    def remove(self, name: str) -> None:
        try:
            self._do(name, lambda files, path: files.rm_file(path))
        except FileNotFoundError:
            self.require()

    def _found(self, name: str, call: Callable[[Any, str], T]) -> T:
        try:
            return self._do(name, call)
        except FileNotFoundError:
            self.require()
            raise

    def _do(self, name: str, call: Callable[[Any, str], T]) -> T:
        try:
            return self._once(name, call)
        except FileNotFoundError:
            raise
        except Exception:  # noqa: BLE001 - drivers raise what they like
            self._driver.clear_instance_cache()
        try:
            return self._once(name, call)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise unreachable(self.url, _reason(error)) from error

    def _once(self, name: str, call: Callable[[Any, str], T]) -> T:
        files, base = self._fsspec.core.url_to_fs(self.url)
        return call(files, f"{base.rstrip('/')}/{name}" if base else name)


def _reason(error: Exception) -> str:
    """What can be said of a driver's error without repeating its text."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return type(error).__name__
