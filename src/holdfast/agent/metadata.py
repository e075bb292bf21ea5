"""What ran: code version, configuration, dependencies, and the line that asked for a checkpoint.

Owns what is collected, and the two nodes that hold it: what is the same for a whole process, and what differs from line
to line of a program, which names the first. Reads files only: no subprocess, no import of anything that is not loaded
already.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from holdfast.agent.when import When
from holdfast.codec.blocks import VALUE, big, digest_of, leaf_node, node_digest
from holdfast.codec.state import Reader, State
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import CorruptValue
from holdfast.store.catalog import View
from holdfast.store.rows import DIGEST_BYTES
from holdfast.store.tables import FORMAT_VERSION

# Enough for any real environment; a bound all the same.
_DEPENDENCIES_MAX = 2_000
# Lines of a program that make checkpoints.
_KNOWN_MAX = 1_000
# The heads of maps of two and of three.
_PAIR = b"\x82"
_TRIPLE = b"\x83"


class Description:
    """The metadata of the checkpoints that one writer makes."""

    def __init__(self, registry: Registry, config: Any, when: When | None) -> None:
        self._registry = registry
        self._config = config
        self._when = when
        # By the trace and the place in the code that asked, which is kept with it so that no other code gets its id.
        self._known: dict[tuple[int, int, int, str], tuple[CodeType | None, bytes, dict[bytes, bytes]]] = {}

    def now(self, trace: str = "") -> tuple[bytes, dict[bytes, bytes]]:
        """The name of the metadata of a checkpoint that is made now, and the nodes that it consists of."""
        frame = caller()
        code, at = (frame.f_code, frame.f_lasti) if frame is not None else (None, 0)
        key = self._registry.revision, id(code), at, trace
        found = self._known.get(key)
        if found is None:
            # The name of a file is a text here, no path of ours.
            line = [os.path.basename(code.co_filename), frame.f_lineno] if frame and code else ["", 0]  # noqa: PTH119
            common = leaf_node(VALUE, [collect(self._registry, self._config, self._when)])
            root = node_digest(common)
            about = encode("caller") + encode(line) + encode("process") + big(root)
            about = _TRIPLE + about + encode("trace") + encode(trace) if trace else _PAIR + about
            own = leaf_node(VALUE, [about])
            found = code, node_digest(own), {root: common, node_digest(own): own}
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[key] = found
        return found[1:]


_ours: set[str] = set()
"""Files of this package, as far as they were met on the way to a caller, and of what stands between."""


_BETWEEN = ("holdfast.", "contextlib", "langgraph.")
_BENEATH = ("cyclopts.", "threading", "concurrent.", "asyncio.")
"""What calls our own commands, and what a framework saves from: no line of the program leads there."""


def caller() -> FrameType | None:
    """The frame of the program that asked for this, outside of this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _ours:
            name = frame.f_globals.get("__name__", "")
            if not (name == "holdfast" or name.startswith(_BETWEEN)):
                return None if name.startswith(_BENEATH) else frame
            _ours.add(file)
        frame = frame.f_back
    return None


def called_from() -> tuple[str, int]:
    """The file and the line of the program that asked for this."""
    frame = caller()
    return (os.path.basename(frame.f_code.co_filename), frame.f_lineno) if frame is not None else ("", 0)  # noqa: PTH119


LOST = "lost metadata"
"""The fact of a store that names the metadata which a repair could not save."""


def lost(view: View) -> set[bytes]:
    """Metadata that is lost and known to be: the checkpoints that have it are whole without."""
    data = view.facts().get(LOST, b"")
    return {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}


def read(state: State, root: bytes) -> dict[str, Any]:
    """The metadata of that name; what is the same for the process, the caller, and the trace, if there is one."""
    found = Reader(state, Registry(), inert=True).content(state.tree(root))
    if not isinstance(found, dict) or not isinstance(found.get("process"), dict):
        raise CorruptValue("the metadata of a checkpoint do not follow the format")
    own = {"caller": found.get("caller")} | ({"trace": found["trace"]} if "trace" in found else {})
    return {**found["process"], **own}


def by_a_program(said: dict[str, Any]) -> bool:
    """Whether the metadata are of a program's checkpoint, and not of one that a command of ours made."""
    return said.get("caller") != ["", 0]


def collect(registry: Registry, config: Any, when: When | None = None) -> bytes:
    """What is the same for the whole process, encoded."""
    data = dict(_process())
    data["types"] = {
        name: registration.version for name in registry.names() if (registration := registry.by_name(name))
    }
    data["config"] = digest_of("holdfast.config", encode(config, registry)).hex() if config is not None else None
    if when is not None:
        data["when"] = when.to_table()
    return encode(data)


@cache
def _process() -> dict[str, Any]:
    dependencies = _dependencies()
    return {
        "format": FORMAT_VERSION,
        "holdfast": dependencies.get("holdfast", "unknown"),
        "python": sys.version.partition(" ")[0],
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
