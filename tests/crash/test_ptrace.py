"""Registers of a running process, which goes on as if nobody had looked."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.crash import native

pytestmark = pytest.mark.skipif(platform.machine() not in native.NAMES, reason="registers are not known here")

# One thread waits in a system call that a signal's handler would cut short, the other for a line.
PROGRAM = """
import sys, threading, ctypes
libc = ctypes.CDLL(None)
threading.Thread(target=lambda: libc.sleep(1000), daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    print("got", line, end="", flush=True)
"""


@pytest.fixture
def process():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def tids_of(pid):
    return {int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()}


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_every_thread_is_read_and_the_process_goes_on(process):
    tids = tids_of(process.pid)
    found, problem = native.registers(process.pid)
    assert problem == ""
    assert set(found) == tids
    ranges = []
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        addresses, rights = line.split()[:2]
        if "x" in rights:
            ranges.append([int(item, 16) for item in addresses.split("-")])
    for values in found.values():
        place = values.get("rip", values.get("pc"))
        assert any(start <= place < end for start, end in ranges)
    assert "TracerPid:\t0\n" in Path(f"/proc/{process.pid}/status").read_text()
    for number in range(3):
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"got {number}\n"
    assert tids_of(process.pid) == tids  # its sleep was not cut short


def test_a_stopped_process_stays_stopped(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    found, problem = native.registers(process.pid)
    assert (len(found), problem) == (2, "")
    until = time.monotonic() + 180
    while state_of(process.pid) != "T":  # who was let go stops again, when it gets a processor
        assert time.monotonic() < until
        time.sleep(0.001)
    process.send_signal(signal.SIGCONT)
    process.stdin.write("on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "got on\n"


def test_a_process_that_is_not_there_is_told():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert native.registers(gone.pid) == ({}, f"there is no process {gone.pid}")


@pytest.mark.root
def test_without_the_right_to_it_the_answer_says_so(process):
    source = Path(native.__file__).read_text().replace('if __name__ == "__main__":', "if False:")
    code = f"{source}\nos.setuid(65534)\nprint(_registers({process.pid}))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "({}, 'seize: Operation not permitted (1 threads)')\n"
