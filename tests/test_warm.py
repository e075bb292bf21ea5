"""A process that is forked from a warm one is like one that was started, for all that a test can ask of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

ASKED = """
import json, os, random, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "cwd": os.getcwd(), "environment": dict(os.environ),
    "parent": os.getppid(), "group": os.getpgrp(), "session": os.getsid(0), "pid": os.getpid(),
    "streams": [sys.stdin.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stderr.line_buffering],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "pipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN, "blocked": len(signal.pthread_sigmask(0, [])),
    "threads": threading.active_count(), "open": sorted(os.listdir("/proc/self/fd"))[:3],
    "names": sorted(name for name in globals() if not name.startswith("__")), "umask": os.umask(0o22),
}))
"""


def answers(run, words, **options):
    done = run([sys.executable, *words], capture_output=True, text=True, check=True, **options)
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["-c", "-m", "file", "-P -c"])
def test_it_finds_what_a_fresh_process_finds(tmp_path, how):
    (tmp_path / "asked.py").write_text(ASKED)
    words = {"-c": ["-c", ASKED], "-m": ["-m", "asked"], "file": ["asked.py"], "-P -c": ["-P", "-c", ASKED]}[how]
    environment = {**os.environ, "TZ": "Asia/Tokyo", "WORD": "two words"}
    found = [
        answers(run, [*words, "-x", "y"], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL)
        for run in (warm.run, subprocess.run)
    ]
    pids = [answer.pop("pid") for answer in found]
    assert found[0] == found[1]
    assert found[0]["parent"] == os.getpid()
    assert len({*pids, os.getpid()}) == 3


def test_a_session_of_its_own():
    found = answers(warm.run, ["-c", ASKED], start_new_session=True)
    assert found["session"] == found["group"] == found["pid"]


def test_input_output_and_exit_code():
    code = "import sys; print(input()); print(sys.stdin.read(), file=sys.stderr); sys.exit(7)"
    done = warm.run([sys.executable, "-c", code], input="one\ntwo", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "one\n", "two\n")


def test_it_can_be_killed_and_waited_for():
    with warm.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_the_end_of_a_program_runs_and_failures_are_shown():
    code = "import atexit, threading; atexit.register(print, 'end'); threading.Thread(target=print).start(); 1 / 0"
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (1, ["end"])
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_threads_what_is_registered_garbage_and_the_program_itself_go_with_it():
    code = """
import atexit, json, os, threading, time

class Last:
    def __del__(self, tell=os.write):
        tell(1, self.name)
        try:
            import json
        except ImportError:
            tell(1, b"nothing-is-left")

def one(name):
    last = Last()
    last.name = name
    return last

mine, cycle = one(b"mine "), one(b"garbage ")
cycle.cycle = cycle
del cycle
atexit.register(lambda: os.write(1, b"registered "))
threading.Thread(target=lambda: (time.sleep(0.05), os.write(1, b"thread "))).start()
"""
    warmed, fresh = (
        run([sys.executable, "-c", code], capture_output=True, text=True) for run in (warm.run, subprocess.run)
    )
    assert (warmed.returncode, warmed.stdout, warmed.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)
    assert warmed.stdout == "thread registered garbage mine nothing-is-left"


def test_no_two_have_the_same_random_numbers():
    code = "import random, uuid; print(random.random(), uuid.uuid4())"
    assert len({warm.run([sys.executable, "-c", code], capture_output=True).stdout for _ in range(3)}) == 3


def test_a_shell_gets_the_code_or_the_signal_of_its_command(tmp_path):
    """As for the pages: `holdfast` is a small program that waits for one that was forked."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from tests import warm\n"
        "import subprocess\n"
        "job = warm.offer(Path('warm'))\n"
        "if job: warm.live(*job)\n"
        "else: sys.exit(subprocess.run(['bash', '-c', sys.argv[2]]).returncode)"
    )
    shell = (
        "export PATH=$PWD/warm/bin:$PATH; holdfast --version; holdfast --nothing 2>/dev/null; echo $?; "
        "echo '{}' | holdfast agents --store none 2>/dev/null; echo $?; PYTHONUTF8=0 holdfast --version | cat"
    )
    done = warm.run(
        [sys.executable, "-c", code, str(Path(warm.__file__).parents[1]), shell],
        cwd=tmp_path, capture_output=True, text=True, start_new_session=True,
    )  # fmt: skip
    version, wrong, missing, again = done.stdout.split()
    assert (version, wrong, missing) == (again, "2", "4"), done.stderr
