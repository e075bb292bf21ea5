"""A probe captures a running process at a call of a function, changes nothing else there, and goes with its owner."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest

import holdfast
from holdfast.errors import BadExpression, BadOption, NotProbed
from holdfast.travel import Probe

ROOT = Path(__file__).resolve().parents[2]
REMOTE = hasattr(sys, "remote_exec")
FOREIGN = "import sys, time\ndef tick(n): time.sleep(0.01)\nprint('up', flush=True)\nfor n in range(10**6): tick(n)"


def line(process):
    return process.stdout.readline().strip()


class Program:
    """The process that is probed, and what it is told."""

    def __init__(self, process, dumps):
        self.process, self.dumps, self.pid = process, dumps, process.pid

    def do(self, name, amount=0):
        self.process.stdin.write(json.dumps([name, amount]) + "\n")
        return json.loads(line(self.process))

    def gone(self):
        until = time.monotonic() + 180
        while not self.do("untouched") and time.monotonic() < until:
            time.sleep(0.02)
        return self.do("untouched")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    place = tmp_path_factory.mktemp("probed")
    words = [sys.executable, "-m", "tests.travel.probed", place / "store", place / "dumps"]
    with subprocess.Popen(words, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True, bufsize=1) as process:
        assert line(process) == "ready"
        yield Program(process, place / "dumps")
        process.stdin.close()


def captured(program, function, acts, *, again=False, **how):
    """What a probe captures while the program does something, once or ``again`` and again, and what came of that."""
    results, found = [], []
    with Probe(program.pid, f"tests.travel.probed:{function}", **how) as probe:
        probe.begin()

        def take():
            found.extend(probe.captures(limit_s=180))

        thread = threading.Thread(target=take)
        thread.start()
        results = [program.do(*act) for act in acts]
        while again and thread.is_alive():
            program.do(*acts[0])
        thread.join()
    assert program.gone()
    return found, results, probe


def test_a_dump_is_taken_at_the_call_for_which_the_expression_holds(program):
    (found,), results, probe = captured(
        program, "pay", [("pay", 20)], when="amount == 7 and order.total > 3 and not exists(order.danger)"
    )
    assert results == [57]
    assert "µs" in probe.cost
    assert (found.number, found.met, found.values["amount"]) == (1, 1, "7")
    assert (found.values["order"], found.values["secret_key"]) == ("<Order>", "…")
    with holdfast.crash.open_dump(found.dump) as dump:
        assert any(frame.function.endswith("pay") for stack in dump.threads for frame in stack.frames)


def test_captures_have_a_rate_and_a_number(program):
    found, _, _ = captured(program, "pay", [("pay", 50)], again=True, then="log", most=3, every_s=0.1)
    assert [one.number for one in found] == [1, 2, 3]
    assert found[0].met == 1
    assert found[1].met > 20  # those in between were counted


def test_a_checkpoint_is_asked_for_and_taken_at_the_next_safe_point(program):
    before = program.do("heads")
    program.do("spend", 5)
    acts = [("pay", 1), ("heads",), ("step",), ("heads",)]
    (found,), results, probe = captured(program, "pay", acts, then="checkpoint")
    assert found.asked == ["trip-7"]
    assert results == [0, before, "probe", ["probe", *before]]
    assert len(probe.checkpoints["trip-7"]) == 64


@pytest.mark.parametrize(("function", "act", "result"), [
    ("look", ("look", 4), 4),
    ("Bazaar.total", ("total", 4), 5),
    ("later", ("later", 4), 4),
    ("pieces", ("pieces", 4), [4, 5]),
])  # fmt: skip
def test_every_kind_of_function_does_as_before(program, function, act, result):
    (found,), results, _ = captured(program, function, [act], then="log", when="4 in [amount, more]")
    assert results == [result]
    assert found.met == 1


def test_secrets_inside_of_arguments_are_not_shown(program):
    given = {"to": "Rome", "api_key": "sk-abc", "more": [{"password": "hunter2"}]}
    (found,), results, _ = captured(program, "look", [("look", given)], then="log")
    assert results == [given]
    assert "Rome" in found.values["amount"]
    assert not any(secret in found.values["amount"] for secret in ("sk-abc", "hunter2"))


def test_a_command_that_is_killed_leaves_nothing(program):
    code = f"""
from holdfast.travel import Probe
probe = Probe({program.pid}, "tests.travel.probed:pay", when="amount > 1000000000")
probe.begin()
print(probe.place, flush=True)
list(probe.captures())"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=PIPE, text=True) as command:
        try:
            assert "probed.py:" in line(command)
            assert not program.do("untouched")
            with pytest.raises(NotProbed, match="somebody else probes"):
                Probe(program.pid, "tests.travel.probed:pay")
        finally:
            command.kill()
    assert program.gone()
    assert program.do("pay", 3) == 6


def test_the_command(program, capsys):
    pytest.importorskip("pathspec")  # what the command line needs is not tested with every Python
    from holdfast.cli.app import run

    words = ["probe", str(program.pid), "--function", "tests.travel.probed:pay"]
    assert run([*words, "--limit", "0.1"]) == 1
    thread = threading.Thread(target=lambda: [program.do("pay", 3) for _ in range(40) if not time.sleep(0.05)])
    thread.start()
    assert run([*words, "--when", "amount == 2", "--then", "log"]) == 0
    thread.join()
    said = capsys.readouterr()
    assert "pay(amount=2, order=<Order>, secret_key=…) in MainThread" in said.out
    assert "longer" in said.err


def test_what_cannot_be_is_said(program):
    with pytest.raises(NotProbed, match="has no 'nothing'"), Probe(program.pid, "tests.travel.probed:nothing") as probe:
        probe.begin()
    with pytest.raises(NotProbed, match="no module 'nowhere'"), Probe(program.pid, "nowhere:pay") as probe:
        probe.begin()
    with pytest.raises(NotProbed, match="no function written in Python"), Probe(program.pid, "json:scanner") as probe:
        probe.begin()
    with pytest.raises(BadExpression):
        Probe(program.pid, "a:b", when="amount.lower()")
    for wrong in ({"most": 1000}, {"every_s": 0}, {"then": "kill"}):
        with pytest.raises(BadOption):
            Probe(program.pid, "a:b", **wrong)
    with pytest.raises(BadOption):
        Probe(program.pid, "pay")
    with pytest.raises(NotProbed, match="there is no process"):
        Probe(2**22 + 1, "a:b")


def test_a_process_without_holdfast(tmp_path):
    """Python 3.14 can be asked from outside; before that it is said, in time."""
    with subprocess.Popen([sys.executable, "-I", "-c", FOREIGN], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert line(process) == "up"
            if not REMOTE:
                with pytest.raises(NotProbed, match="only Python 3"):
                    Probe(process.pid, "__main__:tick", wait_s=0.2)
                return
            with Probe(process.pid, "__main__:tick", when="n > 3", to=tmp_path) as probe:
                (found,) = probe.captures(limit_s=180)
            assert int(found.values["n"]) > 3
            with holdfast.crash.open_dump(found.dump) as dump:
                assert dump.process is not None
        finally:
            process.kill()


@pytest.mark.skipif(not REMOTE, reason="only Python 3.14 can be asked from outside")
def test_an_interpreter_that_never_gets_there():
    code = "import os, threading as t; t.Timer(0.5, lambda: print(1, flush=True)).start(); os.read(os.pipe()[0], 1)"
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert line(process) == "1"
            with pytest.raises(NotProbed, match="does not return"):
                Probe(process.pid, "__main__:tick", wait_s=0.3)
        finally:
            process.kill()
