"""A dump of a process that does not know of it."""

from __future__ import annotations

import array
import fcntl
import os
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from holdfast.crash import kinds, open_dump, outside
from holdfast.crash.display import text_of
from holdfast.errors import BadOption, DumpFailed, NotInDump
from tests.crash import doomed

PROGRAM = """
import os, sys, threading

def serve(name, api_key, settings):
    count = 0
    for line in sys.stdin:
        count += 1
        print("got", line, end="", flush=True)

def idle():
    inside.set()
    threading.Event().wait()

inside = threading.Event()
threading.Thread(target=idle, name="idler", daemon=True).start()
inside.wait()
print("ready", flush=True)
serve("trip-7", "hunter2-by-name-9Z", {"region": "eu", "db_password": "nested-P4ss"})
"""


@pytest.fixture
def process(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "SERVICE_TOKEN": "from-the-environment-1", "LANG": "C.UTF-8"}
    with subprocess.Popen([sys.executable, file, "--key", doomed.KEY], env=environment, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("o")  # of a line that `answers` ends: who has taken this waits there for the rest
        process.stdin.flush()
        until = time.monotonic() + 180
        while unread(process.stdin):
            assert time.monotonic() < until
            time.sleep(0.001)
        yield process
        process.kill()


def unread(pipe):
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def answers(process):
    process.stdin.write("n\n")
    process.stdin.flush()
    return process.stdout.readline() == "got on\n"


def test_it_has_stacks_with_locals_and_registers_and_the_process_goes_on(process, tmp_path):
    pytest.importorskip("pystack")
    path = outside.take(process.pid, to=tmp_path / "dumps", why="it is slow")
    assert answers(process)
    assert "TracerPid:\t0\n" in Path(f"/proc/{process.pid}/status").read_text()
    assert path.parent == tmp_path / "dumps"
    assert path.stat().st_mode & 0o777 == 0o600
    with open_dump(path) as dump:
        assert (dump.why, dump.trigger, dump.head["pid"]) == ("it is slow", "outside", process.pid)
        assert dump.complete
        assert {part.kind: part.state for part in dump.parts if part.state != kinds.WHOLE} == dict.fromkeys(
            (kinds.OBJECTS, kinds.AGENT, kinds.LOGS, kinds.TASKS, kinds.LOCKS, kinds.HEAP), kinds.ABSENT
        )
        main = next(thread for thread in dump.threads if thread.main)
        assert [frame.function for frame in main.frames] == ["<module>", "serve"]
        frame = main.frames[-1]
        values = dict(frame.locals)
        assert main.name == "MainThread"
        assert text_of(dump, values["name"]) == '"trip-7"'
        for way in (".x", "[0]"):
            with pytest.raises(NotInDump, match="only its text is known"):
                dump.local(frame, f"settings{way}")
        assert values["api_key"] == "[redacted by name]"
        assert "eu" in values["settings"]
        assert frame.mine
        assert "for line in sys.stdin" in dump.sources[str(tmp_path / "agent.py")].line(frame.line)
        assert any(frame.function == "idle" for thread in dump.threads for frame in thread.frames)
        native = dump.extras(kinds.NATIVE)["threads"]["threads"]
        assert {item["native_id"] for item in native} == {thread.native_id for thread in dump.threads}
        assert all(item["registers"] and item["frames"] for item in native)
        assert dump.part(kinds.PROCESS)["memory"]["VmRSS"] > 1 << 20
        assert dump.part(kinds.PROCESS)["limits"]["NOFILE"][0] > 0
        assert {entry["fd"] for entry in dump.part(kinds.DESCRIPTORS)["descriptors"]} >= {0, 1, 2}
        assert dump.part(kinds.ENVIRONMENT)["values"]["LANG"] == "C.UTF-8"
        assert any("libc" in entry[0] for entry in dump.part(kinds.MODULES)["shared"])
        told = repr([dump.head, *(dump.part(kind) for kind in kinds.PARTS), dump.threads, dump.extras(kinds.NATIVE)])
    for secret in (doomed.KEY, "hunter2-by-name-9Z", "nested-P4ss", "from-the-environment-1"):
        assert secret not in told
        assert secret.encode() not in path.read_bytes()


def test_of_a_process_without_python_it_has_everything_else(tmp_path):
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write("a line\n")
        process.stdin.flush()
        assert process.stdout.readline() == "a line\n"  # it runs: before, the kernel may not know what
        path = outside.take(process.pid, to=tmp_path)
        process.kill()
    with open_dump(path) as dump:
        assert dump.threads == []
        state = next(part for part in dump.parts if part.kind == kinds.STACK)
        assert state.state == kinds.ABSENT
        assert "PyStack" in state.reason
        (thread,) = dump.extras(kinds.NATIVE)["threads"]["threads"]
        assert thread["registers"]
        assert thread["name"] == "cat"
        assert dump.head["program"] == ["/bin/cat"]


def test_what_is_wrong_with_one_part_costs_no_other(tmp_path):
    frame = {"file": "a.py", "line": 1, "function": "f", "locals": ["password", 7]}
    thread = {"id": 1, "name": "t", "current": False, "failing": True, "left_out": 0, "frames": [frame]}
    found = outside.Evidence(why="odd", trigger="signal", pid=1, threads=[thread], program=[5])
    found.parts = {kinds.PROCESS: {"command": [None]}, kinds.LOGS: {"records": [object()]}}
    found.parts[kinds.ENVIRONMENT] = {"all": {"A": 5}}
    found.extras = [(kinds.AGENT, "a", {"state": object()}), (kinds.LOCKS, "l", {"cycles": []})]
    with open_dump(outside.write(tmp_path / "d.hfdump", found, outside.Redactor())) as dump:
        assert dump.complete
        assert [thread.name for thread in dump.threads] == ["t"]
        assert dump.threads[0].frames[0].locals == ()
        assert dump.extras(kinds.LOCKS) == {"l": {"cycles": []}}
        states = {part.kind: part for part in dump.parts}
        for kind in (kinds.LOGS, kinds.AGENT):
            assert states[kind].reason.startswith("TypeError while it was collected")
            assert states[kind].state != kinds.WHOLE


def test_without_pystack_the_reason_is_told(process, tmp_path):
    code = (
        "import sys; sys.modules['pystack'] = None; import json; from holdfast.crash import native;"
        f"print(json.dumps(native._read('{process.pid}', '')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "PyStack is not installed" in done.stdout
    assert "holdfast[native]" in done.stdout


def test_a_process_that_is_not_there_and_this_one_are_refused(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(DumpFailed, match="no process"):
        outside.take(gone.pid, to=tmp_path)
    for number in (0, -1, os.getpid()):
        with pytest.raises(BadOption):
            outside.take(number, to=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_more_than_a_chunk_can_hold_is_written_in_part_and_said(tmp_path):
    frames = [{"file": "a.py", "line": 1, "function": "f", "locals": ["x", "y" * 2000] * 100}] * 12
    thread = {"id": 1, "name": "t", "current": False, "failing": False, "left_out": 0, "frames": frames}
    many = [{"native_id": number, "registers": {"rip": number}, "name": "n" * 100} for number in range(20_000)]
    found = outside.Evidence(why="much", trigger="outside", pid=1, threads=[thread])
    found.native["threads"] = {"threads": many}
    path = outside.write(tmp_path / "d.hfdump", found, outside.Redactor())
    with open_dump(path) as dump:
        assert len(dump.threads[0].frames) == 12
        assert not dump.threads[0].frames[0].locals
        kept = dump.extras(kinds.NATIVE)["threads"]["threads"]
        assert 0 < len(kept) < len(many)
        state = next(part for part in dump.parts if part.kind == kinds.NATIVE)
        assert state.state == kinds.PARTIAL
