"""A process with children ends as it would without them, and nothing of what they did is lost. Real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

import holdfast
from tests import warm

LIMIT_S = 180

PROGRAM = """
import signal
import sys
import threading
import time
from pathlib import Path

import holdfast
from holdfast.run import children

signal.signal(signal.SIGINT, signal.default_int_handler)
children.EXIT_S = 170.0  # a slow disk is no reason to give a call up here
FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
began, spawned = threading.Event(), []
store = holdfast.open(FOLDER / "store")


@holdfast.tool
def note(what, slow=False):
    with (FOLDER / "notes").open("a") as file:
        file.write(f"{what}\\n")
    if slow and MODE == "call":
        began.set()
        while not (spawned and spawned[0]._own.stopped):  # it goes on until the process ends, and nothing new may begin
            time.sleep(0.01)
    return what


@holdfast.durable
def deeper(agent):
    began.set()
    agent.sleep(days=3) if MODE == "sleep" else agent.wait_for("go")


@holdfast.durable
def kid(agent):
    note("first", slow=True)
    if MODE == "grandchild":
        agent.spawn(deeper, "kid").join()
    elif MODE != "call":
        deeper(agent)
    note("second")
    return "done"


@holdfast.durable
def parent(agent):
    child = agent.spawn(kid, "kid")
    spawned.append(child)
    began.wait()
    if MODE in {"fails", "call"}:
        raise RuntimeError("out of paper")
    if MODE in {"sleep", "grandchild"}:
        sys.exit(3)
    if MODE == "signal":
        print("ready", flush=True)
    return child.join()


print(store.agent("main").run(parent), flush=True)
"""


@pytest.fixture
def started(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    made = []

    def start(mode):
        made.append(
            warm.Popen(
                [sys.executable, str(program), str(tmp_path), mode],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def noted(tmp_path):
    return (tmp_path / "notes").read_text().split()


@pytest.mark.parametrize(("mode", "code"), [("fails", 1), ("sleep", 3), ("grandchild", 3)])
def test_a_child_that_waits_does_not_keep_a_process_from_ending(tmp_path, started, mode, code):
    process = started(mode)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, errors
    assert ("RuntimeError: out of paper" in errors) == (mode == "fails")
    assert "Suspended" not in errors
    with holdfast.open(tmp_path / "store") as store:
        found = {run.agent: run.status for run in store.runs()}
        assert found.pop("main") == ("failed" if mode == "fails" else "interrupted")
        assert len(found) == (2 if mode == "grandchild" else 1)
        assert set(found.values()) <= {"interrupted", "waiting"}
    assert noted(tmp_path) == ["first"]


def test_an_interrupted_process_ends_so_and_the_child_goes_on_next_time(tmp_path, started):
    process = started("signal")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGINT, errors
    with holdfast.open(tmp_path / "store") as store:
        store.signal("main/kid", "go")
    process = started("signal")
    out, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "ready\ndone\n"), errors
    assert noted(tmp_path) == ["first", "second"]


def test_a_call_that_is_under_way_ends_and_is_recorded_and_no_other_begins(tmp_path, started):
    process = started("call")
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, "out of paper" in errors) == (1, True), errors
    assert noted(tmp_path) == ["first"]
    with holdfast.open(tmp_path / "store") as store:
        child = store.agent("main/kid")
        assert [effect.status for effect in child.effects()] == ["done"]
        assert [run.status for run in child.runs()] == ["interrupted"]
