"""What ran: code version, configuration, dependencies (mission A6). Collected once per process, stored once per change.

Reads files only: no subprocess, no import of anything that is not loaded already.
"""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.codec.blocks import digest_of
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.store.upgrade import FORMAT_VERSION

# Enough for any real environment; a bound all the same.
_DEPENDENCIES_MAX = 2_000


def collect(registry: Registry, config: Any) -> bytes:
    """The metadata of a checkpoint made now, encoded."""
    data = dict(_process())
    data["types"] = {
        name: registration.version for name in registry.names() if (registration := registry.by_name(name))
    }
    data["config"] = digest_of("holdfast.config", encode(config, registry)).hex() if config is not None else None
    return encode(data)


@cache
def _process() -> dict[str, Any]:
    dependencies = _dependencies()
    return {
        "format": FORMAT_VERSION,
        "holdfast": dependencies.get("holdfast", "unknown"),
        "python": platform.python_version(),
        "platform": sys.platform,
        "program": os.path.basename(sys.argv[0]) if sys.argv else "",  # noqa: PTH119 - argv is text, not a path of ours
        "code": _code_version(dependencies),
        "dependencies": dependencies,
    }


def _dependencies() -> dict[str, str]:
    """Installed distributions, by the names of their metadata directories: far faster than parsing them."""
    found: dict[str, str] = {}
    for place in sys.path:
        try:
            names = os.listdir(place or ".")  # noqa: PTH208 - names are all that is needed
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info") and len(found) < _DEPENDENCIES_MAX:
                package, _, version = name[: -len(".dist-info")].rpartition("-")
                found.setdefault(package.lower().replace("_", "-"), version)
    return dict(sorted(found.items()))


def _code_version(dependencies: dict[str, str]) -> dict[str, str]:
    """The version of the program: its package's, and the git commit it is checked out at, where there are any."""
    main = sys.modules.get("__main__")
    version: dict[str, str] = {}
    package = (getattr(main, "__package__", None) or "").partition(".")[0]
    if package and (known := dependencies.get(package.lower().replace("_", "-"))):
        version["package"] = f"{package} {known}"
    file = getattr(main, "__file__", None)
    start = Path(file).resolve().parent if file else Path.cwd()
    commit = _git_commit(start)
    if commit:
        version["git"] = commit
    return version


def _git_commit(start: Path) -> str:
    for directory in (start, *start.parents):
        head = directory / ".git" / "HEAD"
        try:
            text = head.read_text(encoding="ascii", errors="replace").strip()
            if not text.startswith("ref: "):
                return text
            ref = text[5:]
            if not ref.startswith("refs/") or ".." in ref:
                return ""
            loose = directory / ".git" / ref
            if loose.is_file():
                return loose.read_text(encoding="ascii", errors="replace").strip()
            for line in (directory / ".git" / "packed-refs").read_text(encoding="ascii", errors="replace").splitlines():
                if line.endswith(" " + ref):
                    return line.split(" ", 1)[0]
        except OSError:
            continue
    return ""
