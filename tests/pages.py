"""Runs the code blocks of one Markdown page, in order, as one story.

Owns: which blocks run, what counts as a failure, how output is compared. Knows nothing of Holdfast.
Always holds: a block is run, or it is of a kind that cannot be run, or the page says beside it why it is not.

A comment on the line before a block speaks about it:

    <!-- not run: it needs a network -->     the block is not run
    <!-- exit: 3 -->                         the block's last command must end with this code (otherwise all with 0)
    <!-- raises: Unencodable -->             the Python block must end with this error
    <!-- file: agent.py -->                  the block is written to that file instead of being run
    <!-- output -->                          this ```text block is what the Python block before it printed

``python`` blocks share one namespace. ``console`` blocks (also ``sh``, ``bash``) run their ``$ `` lines in bash; what
stands beneath a line is compared with what it printed. In expected output ``…`` stands for any characters within a
line, and on a line of its own for any lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import warm

PYTHON = frozenset({"python"})
SHELL = frozenset({"console", "sh", "bash"})
# Kinds that are shown and never run. Any other word after the fence is a mistake: a misspelt one must not hide a block.
SHOWN = frozenset({"", "text", "json", "sql", "toml", "yaml", "ini", "diff", "html", "mermaid", "markdown"})

# A page is read by people; one that takes longer than this is a campaign, not a page.
PAGE_TIMEOUT_S = 600
TERMINAL_COLUMNS = 100

# What the child process is told to do: "do" is "python", "shell" or "file"; the rest depends on it.
Step = dict[str, Any]

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)[^`]*$")
COMMENT = re.compile(r"^\s*<!--\s*(?P<word>not run|exit|raises|file|output)\s*(?::\s*(?P<argument>.*?))?\s*-->\s*$")
GAP = re.compile(r"(?:\\ ){2,}")  # two spaces or more, escaped: columns are as wide as what happens to be in them
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class PageError(AssertionError):
    """The page and the program disagree. The message names the page and the line."""


@dataclass
class Block:
    """One fenced block: where it begins, its language, its text and the comments before it."""

    line: int
    language: str
    text: str
    comments: dict[str, str] = field(default_factory=dict)

    @property
    def not_run(self) -> str | None:
        """Why the block is not run; None when it is."""
        if "not run" in self.comments:
            return self.comments["not run"]
        if self.language in SHOWN and not self.comments.keys() & {"output", "file"}:
            return f"{self.language or 'plain'} is shown, not run"
        return None


@dataclass
class Told:
    """What became of a page: how many blocks were run, and which were not (line, reason)."""

    run: int
    not_run: list[tuple[int, str]]


def parse(text: str, page: str = "page") -> list[Block]:
    blocks: list[Block] = []
    comments: dict[str, str] = {}
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if comment := COMMENT.match(line):
            comments[comment["word"]] = comment["argument"] or ""
        elif opening := FENCE.match(line):
            start, body = at, []
            while at < len(lines) and not _closes(lines[at], opening["fence"]):
                body.append(lines[at].removeprefix(opening["indent"]))
                at += 1
            if at == len(lines):
                raise PageError(f"{page}:{start}: this block is never closed")
            at += 1
            blocks.append(Block(start, opening["language"], "".join(f"{item}\n" for item in body), comments))
            comments = {}
        elif line.strip() and comments:
            raise PageError(f"{page}:{at}: a comment for a code block stands before something else")
    if comments:
        raise PageError(f"{page}: a comment for a code block stands before nothing")
    return blocks


def _closes(line: str, fence: str) -> bool:
    text = line.strip()
    return len(text) >= len(fence) and set(text) == {fence[0]}


def commands(text: str) -> list[tuple[str, str]]:
    """The ``$ `` lines of a console block, each with the output that stands beneath it."""
    found: list[tuple[list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif not found:
            raise ValueError("output stands before the first command")
        elif not found[-1][1] and (line.startswith("> ") or line == ">"):
            found[-1][0].append(line[2:])
        else:
            found[-1][1].append(line)
    return [("\n".join(command), "\n".join(output)) for command, output in found]


def same(expected: str, actual: str) -> bool:
    """Whether the output is as shown. Colour, space at line ends and the width of a column's gap do not count; ``…``
    stands for anything.
    """
    pattern = ""
    for line in _tidy(expected):
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            exact = "[^\n]*?".join(re.escape(part) for part in line.split("…"))
            pattern += GAP.sub(" {2,}", exact) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _tidy(actual))) is not None


def _tidy(text: str) -> list[str]:
    lines = [line.rstrip() for line in COLOUR.sub("", text).splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def steps(blocks: list[Block], page: str) -> list[Step]:
    """What the child process is to do, one step for each command or Python block."""
    told: list[Step] = []
    for block in blocks:
        where = f"{page}:{block.line}"
        if "not run" in block.comments and not block.comments["not run"]:
            raise PageError(f"{where}: say why this block is not run")
        if block.not_run is not None:
            continue
        if "file" in block.comments:
            told.append({"do": "file", "line": block.line, "name": block.comments["file"], "text": block.text})
        elif "output" in block.comments:
            if not told or told[-1]["do"] != "python":
                raise PageError(f"{where}: output of what? No Python block stands before it")
            told[-1]["expected"] = block.text
        elif block.language in PYTHON:
            raises = block.comments.get("raises", "")
            told.append({"do": "python", "line": block.line, "text": block.text, "raises": raises})
        elif block.language in SHELL:
            told += _shell_steps(block, where)
        else:
            raise PageError(f"{where}: {block.language!r} is not a language that is run or shown here")
    return told


def _shell_steps(block: Block, where: str) -> list[Step]:
    code = int(block.comments.get("exit", "0"))
    if not any(line.startswith("$ ") for line in block.text.splitlines()):
        return [{"do": "shell", "line": block.line, "text": block.text, "exit": code}]
    try:
        found = commands(block.text)
    except ValueError as error:
        raise PageError(f"{where}: {error}") from None
    told: list[Step] = []
    for command, output in found:
        told.append({"do": "shell", "line": block.line, "text": command, "exit": 0})
        if output.strip():
            told[-1]["expected"] = output
    told[-1]["exit"] = code
    return told


def run_page(
    path: Path, *, name: str = "", timeout_s: float = PAGE_TIMEOUT_S, env: dict[str, str] | None = None
) -> Told:
    """Run the page's blocks in a new directory. Raises PageError where page and program disagree.

    ``env`` is what the reader is supposed to have set, such as where a server is.
    """
    page = name or path.name
    blocks = parse(path.read_text(encoding="utf-8"), page)
    told = steps(blocks, page)
    not_run = [(block.line, reason) for block in blocks if (reason := block.not_run) is not None]
    if told:
        with tempfile.TemporaryDirectory(prefix="page-") as folder:
            results = _run_child(told, path.resolve(), Path(folder), page, timeout_s, env or {})
        for step, result in zip(told, results, strict=False):
            _judge(step, result, page)
        if len(results) < len(told):
            raise PageError(f"{page}:{told[len(results)]['line']}: the page's process ended before this block was done")
    return Told(len(blocks) - len(not_run), not_run)


def _run_child(
    told: list[Step], path: Path, folder: Path, page: str, timeout_s: float, env: dict[str, str]
) -> list[dict[str, Any]]:
    here, home, temporary = folder / "here", folder / "home", folder / "tmp"
    for place in (here, home, temporary):
        place.mkdir()
    (folder / "steps.json").write_text(json.dumps({"page": str(path), "steps": told}), encoding="utf-8")
    results = folder / "results.jsonl"
    results.touch()
    with (folder / "noise").open("w+", encoding="utf-8", errors="replace") as noise:
        child = warm.Popen(
            [sys.executable, str(Path(__file__).with_name("page_child.py")), str(folder)],
            cwd=here,
            env=_environment(home, folder / "warm" / "bin") | {"TMPDIR": str(temporary)} | env,
            stdin=subprocess.DEVNULL,
            stdout=noise,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise PageError(f"{page}: took longer than {timeout_s} s") from None
        finally:
            _end(child)
        if child.returncode != 0:
            noise.seek(0)
            raise PageError(f"{page}: the page's process ended with {child.returncode}\n{noise.read()}")
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End whatever the page left running, in the child's own process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _environment(home: Path, first: Path) -> dict[str, str]:
    """The reader's shell: the environment's programs first, no colour, nothing of this machine's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "GIT_", "PYTEST_"))}
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS"):
        kept.pop(name, None)
    return kept | {
        "PATH": os.pathsep.join([str(first), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "HOME": str(home),
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": str(TERMINAL_COLUMNS),
        "LC_ALL": "C.UTF-8",
        "PYTHONUTF8": "1",
        "TZ": "UTC",
    }


def _judge(step: Step, result: dict[str, Any], page: str) -> None:
    where = f"{page}:{step['line']}"
    shown = step["text"].rstrip() if step["do"] == "shell" else "the block"
    if result["problem"]:
        raise PageError(f"{where}: {shown}\n{result['problem']}\n{result['output']}".rstrip())
    if "expected" in step and not same(step["expected"], result["output"]):
        expected, printed = step["expected"].rstrip(), result["output"].rstrip()
        raise PageError(f"{where}: {shown}\n--- the page shows\n{expected}\n--- it printed\n{printed}")
