"""Hangs and deadlocks are seen by a thread that looks at the others, and reported once."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from holdfast.crash import kinds, open_dump, watch
from tests.crash.processes import PATIENT, SOURCE, python, run

# The program waits for its own dump, so that nothing depends on how fast the machine is.
WAIT = """
import logging, sys, threading, time
import holdfast.errors
crash.errors = holdfast.errors
def wait_for(count):
    end = time.monotonic() + 180
    while sum(map(whole, hooks.folder.glob('*.hfdump'))) < count and time.monotonic() < end:
        time.sleep(0.02)
def whole(path):
    try:
        with crash.open_dump(path) as dump:
            return dump.complete
    except crash.errors.HoldfastError:
        return False
"""


def test_a_deadlock_is_reported_while_the_program_goes_on(tmp_path):
    body = WAIT + (
        "one, two = threading.Lock(), threading.Lock()\n"
        "gate = threading.Barrier(2)\n"
        "def take(mine, other):\n"
        "    with mine:\n"
        "        gate.wait()\n"
        "        with other:\n"
        "            pass\n"
        "for name, locks in (('left', (one, two)), ('right', (two, one))):\n"
        "    threading.Thread(target=take, args=locks, name=name, daemon=True).start()\n"
        "wait_for(1)\n"
        "time.sleep(1.5)\n"  # it is not reported again
        "print('on')\n"
    )
    ended = run(tmp_path, body)
    assert (ended.code, ended.out) == (0, "on\n")
    with ended.dump() as dump:
        assert dump.trigger == "deadlock"
        assert dump.why.startswith("deadlock: ")
        assert dump.threads[0].name in ("left", "right")
        assert dump.threads[0].failing
        cycle = dump.extras(kinds.LOCKS)["waiting"]["cycles"][0]
        assert cycle["sure"]
        assert len(cycle["text"]) == 2
    assert "deadlock: " in ended.err  # the warning that was logged, too
    assert ended.err.count("dump written") == 1


@pytest.mark.parametrize("how", ["stands", "loop", "beats"])
def test_a_hang_is_reported_with_the_main_thread_first(tmp_path, how):
    stuck = "def stuck():\n    threading.Event().wait()\n"
    body = (
        WAIT
        + stuck
        + "def end():\n    wait_for(1)\n    print('seen', flush=True)\n    __import__('os')._exit(7)\n"
        + "threading.Thread(target=end, daemon=True).start()\n"
    )
    body += {
        "stands": "stuck()\n",
        "loop": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    stuck()\nasyncio.run(main())\n",
        "beats": "hooks.beat()\nwhile True:\n    time.sleep(0.01)\n",
    }[how]
    ended = run(tmp_path, body, "sidecar=False, hang_s=1")
    assert (ended.code, ended.out) == (7, "seen\n")
    with open_dump(ended.paths[0]) as dump:
        assert dump.trigger == "hang"
        assert dump.why == ("no heartbeat for 1 s" if how == "beats" else "no progress for 1 s")
        assert dump.threads[0].name == "MainThread"
        if how != "beats":
            assert "stuck" in [frame.function for frame in dump.threads[0].frames]


def test_a_hang_is_reported_once_until_something_moves(tmp_path):
    """Who looks at a process from outside stops its threads for a moment. That is no progress of the program."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, threading\n"
        "from holdfast import crash\n"
        f"hooks = crash.install(to='dumps', sidecar=False, hang_s=0.5, limits={PATIENT})\n"
        "first = threading.Event()\n"
        "threading.Thread(target=lambda: (sys.stdin.readline(), first.set()), daemon=True).start()\n"
        "def one():\n    first.wait()\n"
        "def other():\n    threading.Event().wait()\n"
        "one()\n"
        "other()\n"
    )
    process = subprocess.Popen(
        [sys.executable, program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SOURCE)}, text=True,
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    said = iter(line for line in process.stderr if "dump written" in line)
    try:
        seen = [next(said)]
        for _ in range(4):
            process.send_signal(signal.SIGSTOP)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.7)
        assert len(list((tmp_path / "dumps").glob("*.hfdump"))) == 1
        process.stdin.write("on\n")
        process.stdin.flush()
        seen.append(next(said))
    finally:
        process.kill()
        process.communicate()
    found = []
    for line in seen:
        with open_dump(tmp_path / line.split()[-1]) as dump:
            found.append([frame.function for frame in dump.threads[0].frames if frame.function in ("one", "other")])
    assert found == [["one"], ["other"]]


def test_a_thread_that_is_just_beginning_does_not_make_a_hang_a_new_one():
    """As the one that warns of the hang, which `threading` does not know before it runs."""
    ended = threading.Event()
    beginning = _thread.start_new_thread(ended.wait, ())
    try:
        while beginning not in sys._current_frames():
            time.sleep(0.001)
        assert threading.main_thread().ident in watch._places()
        assert beginning not in watch._places()
    finally:
        ended.set()


def test_hangs_of_one_place_do_not_fill_the_disk(tmp_path):
    body = (
        "from holdfast.crash import hooks as room\n"
        "import threading\n"
        "for n in range(6):\n"
        "    print(room._active.take(None, None, 'hang', 'again', about=threading.main_thread().ident) is not None)\n"
    )
    ended = run(tmp_path, body)
    assert ended.out.split() == ["True"] * 3 + ["False"] * 3
    assert len(ended.paths) == 3


def test_what_works_or_waits_in_a_loop_is_no_hang(tmp_path):
    body = (
        "import asyncio, threading, time\n"
        "end = time.monotonic() + 1.2\n"
        "while time.monotonic() < end:\n    time.sleep(0.01)\n"
        "async def main():\n    await asyncio.sleep(1.2)\n"  # an idle loop answers
        "asyncio.run(main())\n"
        "def work():\n    time.sleep(0.01) or [time.sleep(0.01) for _ in range(100)]\n"
        "t = threading.Thread(target=work); t.start(); t.join()\n"  # waiting for one that works
    )
    ended = run(tmp_path, body, "sidecar=False, hang_s=30")
    assert ended.paths == []
    assert ended.err == ""


def test_agents_are_told_of_a_hang(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import holdfast, threading\n"
        "from holdfast import crash\n"
        "store = holdfast.open('store')\n"
        f"hooks = crash.install(store, sidecar=False, hang_s=1, say=False, limits={PATIENT})\n"
        "import sys, time\n"
        "agent = store.agent('a')\n"
        "agent.checkpoint('here')\n"
        "def end():\n"
        "    until = time.monotonic() + 180\n"
        "    while not agent.crashes() and time.monotonic() < until:\n"
        "        time.sleep(0.02)\n"
        "    print(agent.crashes()[0]['what'], agent.crashes()[0]['error'], len(agent.crashes()))\n"
        "    sys.stdout.flush()\n"
        "    __import__('os')._exit(0)\n"
        "threading.Thread(target=end, daemon=True).start()\n"
        "threading.Event().wait()\n"
    )
    ended = python(program)
    assert ended.stdout == "stuck hang 1\n", ended.stderr
