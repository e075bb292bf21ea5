"""Where Holdfast calls the disk: the lines as they are written, whether or not anything ever comes along.

Read from the source, so that a new line that no life reaches is seen. Three rooms do so: store, agent and run. Counted
are calls of the system, of files, and statements to the database. What is left out is named in ``EXEMPT``, with why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.calls import HOLDFAST

ROOMS = ("store", "agent", "run")

_OS = frozenset((
    "open", "close", "pwrite", "pread", "preadv", "write", "read", "fsync", "fdatasync", "ftruncate", "truncate",
    "rename", "replace", "unlink", "rmdir", "mkdir", "listdir", "scandir", "stat", "lstat", "fstat", "link",
))  # fmt: skip
_PATH = frozenset((
    "write_bytes", "read_bytes", "write_text", "read_text", "touch", "iterdir", "glob", "mkdir", "unlink", "rename",
    "rmdir", "stat", "exists", "is_file", "is_dir",
))  # fmt: skip
_OTHERS = frozenset((
    "shutil.rmtree", "shutil.copyfile", "shutil.copyfileobj", "tempfile.mkdtemp", "apsw.Connection",
))  # fmt: skip
_STATEMENTS = frozenset(("execute", "executemany", "_execute", "_direct_execute", "wal_checkpoint"))
_FILES = {"file", "self._file"}
"""What open files are called here."""

NEVER_FAIL = ("ROLLBACK", "ROLLBACK TO one", "RELEASE one")
"""Statements for which SQLite needs no disk."""

EXEMPT = {
    ("store/objects.py", "put", "file"): "object storage: the disk is that of temporary files",
    ("store/objects.py", "_send", "file"): "as above",
    ("store/objects.py", "names", "entry"): "the list of a directory says what is a file",
    ("run/handle.py", "_executing", "runs"): "what a run executes is no statement",
    ("run/worker.py", "_work", "self"): "as above",
    ("run/programs.py", "existing", "file"): "a program that the command line names, not a store",
}
ELSEWHERE = frozenset(("postgres.py", "connection.py", "processes.py"))
"""Modules that ask a server, or the system about processes."""


@dataclass(frozen=True, order=True)
class Line:
    """One call as it is written, which may go over several lines."""

    file: str
    first: int
    last: int
    what: str
    after_a_failure: bool  # it stands where only an exception leads

    def __str__(self) -> str:
        return f"{self.file}:{self.first} {self.what}"

    def holds(self, where: str) -> bool:
        """Whether a site, told as ``file:line``, is here."""
        file, _, number = where.partition(":")
        return file == self.file and self.first <= int(number) <= self.last


def written() -> list[Line]:
    """All of them, in the order of the source."""
    found = set()
    for room in ROOMS:
        for path in sorted(Path(HOLDFAST, room).glob("*.py")):
            if path.name not in ELSEWHERE:
                found |= set(_of(f"{room}/{path.name}", ast.parse(path.read_text(encoding="utf-8"))))
    return sorted(found)


def missed(lines: Iterable[Line], reached: Iterable[str]) -> list[Line]:
    """The lines at which none of these sites is."""
    by_file: dict[str, list[int]] = {}
    for where in set(reached):
        file, _, number = where.partition(":")
        by_file.setdefault(file, []).append(int(number))
    return [line for line in lines if not any(line.first <= at <= line.last for at in by_file.get(line.file, ()))]


def _of(file: str, tree: ast.AST, function: str = "", *, failed: bool = False) -> Iterator[Line]:
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        after = failed or isinstance(node, ast.ExceptHandler)
        if isinstance(node, ast.Call) and _calls_the_disk(node):
            what = ast.unparse(node.func)
            if (file, inside) not in EXEMPT and (file, inside, what.partition(".")[0]) not in EXEMPT:
                yield Line(file, node.lineno, node.func.end_lineno or node.lineno, what, after)
        yield from _of(file, node, inside, failed=after)


def _calls_the_disk(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return isinstance(call.func, ast.Name) and call.func.id == "FileIO"
    owner, name = ast.unparse(call.func.value), call.func.attr
    if owner == "os":
        return name in _OS
    if name in _STATEMENTS and (name != "_execute" or owner == "self"):
        return not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value in NEVER_FAIL)
    if f"{owner}.{name}" in _OTHERS or name in _PATH:
        return True
    if name == "open":  # of a path: the first argument is a mode
        return bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return owner in _FILES and name in {"read", "write"}
