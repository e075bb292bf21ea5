"""Programs that fail, run as processes of their own: with hooks and without, and what is different then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.crash import Dump, open_dump

SOURCE = Path(__file__).parents[2] / "src"
LIMIT_S = 300
MARK = "holdfast: "  # how each line of ours on stderr begins
# A dump is about what it holds, not about how long it takes on a machine that does much else.
PATIENT = "crash.Limits(deadline_s=600, part_s=300, look_s=300)"


def descriptors() -> set[tuple[str, str]]:
    """What this process has open. What earlier tests left may be closed at any time, so ask what was *added*."""
    found = set()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names, not paths: one of them is the listing itself)
        with suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))  # noqa: PTH115 (as it is, and not resolved)
    return found


@dataclass
class Ended:
    """How a process ended, and what it left."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.hfdump"))

    @property
    def own_err(self) -> str:
        """What stderr would be without Holdfast's lines."""
        return "".join(line for line in self.err.splitlines(keepends=True) if not line.startswith(MARK))

    def dump(self) -> Dump:
        """The only dump; stderr says where it is."""
        assert len(self.paths) == 1, (self.paths, self.err)
        assert f"{MARK}dump written to {self.paths[0]}\n" in self.err, self.err
        return open_dump(self.paths[0])


def python(
    program: Path, *args: str, exe: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    given = {**inherited, "PYTHONPATH": str(SOURCE), **environment}
    return subprocess.run(
        [exe, str(program), *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=program.parent,
        env=given,
    )


def run(place: Path, body: str, options: str = "sidecar=False", *, exe: str = sys.executable) -> Ended:
    """Run a program after `install(to=..., options)` in its first line."""
    folder = place / "dumps"
    program = place / "program.py"
    program.write_text(
        f"import holdfast.crash as crash; "
        f"hooks = crash.install(to={str(folder)!r}, limits={PATIENT}, {options})\n{body}"
    )
    ended = python(program, exe=exe)
    return Ended(ended.returncode, ended.stdout, ended.stderr, folder)


def alike(place: Path, body: str, options: str = "sidecar=False", *, exe: str = sys.executable) -> Ended:
    """Run it with and without hooks: exit code, output and traceback must be the same."""
    hooked = run(place, body, options, exe=exe)
    program = place / "program.py"
    addresses = re.compile(r"0x[0-9a-f]+|refcount : \d+")
    program.write_text(f"hooks = None\n{body}")
    bare = python(program, exe=exe)
    assert hooked.code == bare.returncode
    assert hooked.out == bare.stdout
    assert addresses.sub("0x", hooked.own_err) == addresses.sub("0x", bare.stderr)
    return hooked
