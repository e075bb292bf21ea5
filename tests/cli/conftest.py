"""A small store with everything in it, and ways to run the command line: here, as a program, in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast.cli import main
from tests import warm
from tests.conftest import from_outside_nothing

PROGRAM = [sys.executable, "-m", "holdfast"]
EVIL = "\x1b]0;owned\x07 [red]markup[/red] \u202etxt.exe \x9b31m"
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "json.md"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Plan:
    """A class that the command line does not know."""

    steps: list[str]
    cost: Decimal


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed, which has the form that docs/json.md shows."""
        real = json.loads(self.out)
        name = re.fullmatch(r"holdfast\.([a-z.-]+)/1", real["schema"])[1]
        if not name.startswith(OTHERWISE):
            found = differences(FORMS[ALIKE.get(name, name)], real, name)
            assert not found, found
        return real


def forms():
    """The documents that the page shows, by the names of their schemas; under "" that of a checkpoint."""
    blocks = [
        json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ]
    return {block.get("schema", "").removeprefix("holdfast.").removesuffix("/1"): block for block in blocks}


FORMS = forms()
ALIKE = dict.fromkeys(("pull", "backup", "import-bundle"), "push")
# The page has them in words, or they have several forms.
OTHERWISE = ("signals", "signal.drop", "key", "dump")
OPTIONAL = {"old", "new", "changes", "why", "used_by"}  # where there are such values
# Their keys are not fixed.
FREE = {
    "policy", "sections", "counts", "packages", "optional", "args", "checked", "events[]", "triggers", "when",
}  # fmt: skip


def differences(example, real, where):
    """Where the documented form and the real one disagree: keys, all the way down. ``{}`` stands for any value."""
    if isinstance(example, dict) and isinstance(real, dict) and example and where.rpartition(".")[2] not in FREE:
        if real.get("error") and where == "doctor.store":
            return []  # there is little to say of a store that cannot be opened
        if (set(example) ^ set(real)) - OPTIONAL:
            return [f"{where}: {sorted(set(example) ^ set(real))}"]
        return [
            found
            for key in set(real) & set(example)
            for found in differences(example[key], real[key], f"{where}.{key}")
        ]
    if isinstance(example, list) and isinstance(real, list) and example and real:
        return differences(example[0], real[0], f"{where}[]")
    return []


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The filled store, made once. Nobody changes it: each test has a copy."""
    path = tmp_path_factory.mktemp("made") / "store"
    with (
        from_outside_nothing(),
        contextlib.redirect_stderr(io.StringIO()),
        holdfast.open(path, types=[Plan]) as store,
    ):
        fill(store)
    return path


def fill(store):
    agent = store.agent("trip-7")
    messages = agent.state.setdefault("messages", [])
    messages.append({"role": "user", "content": "Lisbon in May"})
    agent.state["budget"] = 1200
    agent.checkpoint("asked")
    messages.append({"role": "assistant", "content": "Three flights."})
    agent.state["plan"] = Plan(["fly", "sleep"], Decimal("3.50"))
    agent.checkpoint("answered")
    agent.tag("good")
    messages.append({"role": "user", "content": EVIL})
    agent.checkpoint(EVIL)
    agent.rollback("answered")
    messages.append({"role": "user", "content": "cheaper?"})
    agent.state["budget"] = 900
    agent.checkpoint("cheaper")
    with agent.branch("try-b", at="asked") as other:
        other.state["budget"] = 500
        other.checkpoint("thrifty")
    mail = store.agent("user@example.com")
    mail.state["odd"] = {(1, 2): {3, 1}, "big": 10**5000, "nan": float("nan"), "raw": b"\x00\xff", EVIL: EVIL}
    mail.checkpoint("hi")
    store.agent("tenant:42/a#b")


@pytest.fixture
def filled(made, store_path):
    """The path of a store with three agents, two branches, an abandoned line, a tag, odd values and evil text."""
    shutil.copytree(made, store_path)
    return store_path


@pytest.fixture
def cli(filled, capsys):
    """``cli("log", "trip-7")`` on the filled store, in this process."""

    def call(*words: str, store=filled):
        code = main([*(() if store is None else ("--store", str(store))), *words])
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture
def screen(cli, monkeypatch):
    """``screen("log", "trip-7", columns=80)``: in this process, printed as for a terminal of that width."""

    def call(*words: str, columns=80):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))
        ended = cli(*words)
        monkeypatch.undo()
        return ended._replace(out=COLOUR.sub("", ended.out))

    return call


@pytest.fixture
def program(filled):
    """``program("log", "trip-7")``: the same as a process of its own."""

    def call(*words: str, store=filled, env=None, **options):
        done = warm.run(
            [*PROGRAM, *words],
            env=_environment(store) | (env or {}),
            capture_output=True,
            text=True,
            check=False,
            **({"stdin": subprocess.DEVNULL} if "input" not in options else {}),
            **options,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def terminal(filled):
    """``terminal("log", "trip-7")``: the same in a real terminal; what it shows, and with ``raw`` its colours.

    ``typed`` is there from the beginning; of ``answers`` each is typed when its question stands in the last line.
    """

    def call(*words: str, columns=80, typed="", answers=(), store=filled, raw=False, env=None):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = _environment(store) | {"TERM": "xterm-256color"} | (env or {})
        process = warm.Popen(
            [*PROGRAM, *words], stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        os.write(master, typed.encode())
        shown, left = bytearray(), list(answers)
        while True:
            if left and left[0][0].encode() in shown.rpartition(b"\n")[2]:
                os.write(master, f"{left.pop(0)[1]}\n".encode())
            try:
                piece = os.read(master, 65536)
            except OSError:  # the last writer is gone
                break
            if not piece:
                break
            shown += piece
        os.close(master)
        text = shown.decode().replace("\r\n", "\n")
        return Ended(process.wait(), text if raw else COLOUR.sub("", text), "")

    return call


def _environment(store):
    kept = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "HOLDFAST_DEBUG"}}
    return kept | {"HOLDFAST_STORE": str(store), "TZ": "UTC", "PYTHONUTF8": "1"}


@pytest.fixture
def evil():
    return EVIL


@pytest.fixture
def harmless():
    """Fails when text could make a terminal do something."""

    def check(text: str) -> None:
        bad = [c for c in text if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 or c == "\u202e"]
        assert not bad, repr(text)

    return check
