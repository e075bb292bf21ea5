"""What an honest program does by accident when it is executed again: nothing of it reaches the files outside."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
from pathlib import Path

import pytest

import holdfast
from holdfast.travel.jobs import Workers
from tests.travel.conftest import loaded

PROGRAM = """
import asyncio, functools, multiprocessing, os, shutil, signal, sqlite3, time
from multiprocessing import shared_memory
from resource import RLIMIT_NOFILE, prlimit
from pathlib import Path
import holdfast

def append(path):
    with open(path, "a") as file:
        file.write("again")

def rmtree(agent, place):
    shutil.rmtree(place / "dir", ignore_errors=True)

def dir_fd(agent, place):
    fd = os.open(place, os.O_RDONLY)
    os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd))

def unlink(agent, place):
    fd = os.open(place, os.O_RDONLY)
    os.unlink("kept", dir_fd=fd)

def link(agent, place):
    os.link(place / "kept", "here")
    append("here")

def mode(agent, place):
    os.chmod(os.open(place / "kept", os.O_RDONLY), 0o777)

def wait_for(agent, place):
    async def work():
        made = asyncio.create_subprocess_shell(f"echo again >> {place}/kept")
        await (await asyncio.wait_for(made, 10)).wait()
    asyncio.run(work())

def resource(agent, place):
    agent.resource("report", open=functools.partial(open, place / "kept", "w")).close()

def attach(agent, place):
    made = sqlite3.connect(":memory:")
    made.execute(f"ATTACH '{place}/bank.db' AS bank")
    made.execute("INSERT INTO bank.paid VALUES ('again')")
    made.commit()

def vacuum(agent, place):
    sqlite3.connect("in.db").execute(f"VACUUM INTO '{place}/new'")

def spawn(agent, place):
    child = multiprocessing.get_context("spawn").Process(target=append, args=(place / "kept",))
    child.start()
    child.join()

def interpreter(agent, place):
    try:
        import _interpreters
    except ImportError:
        import _xxsubinterpreters as _interpreters
    made = _interpreters.create()
    _interpreters.run_string(made, f"open({str(place / 'kept')!r}, 'w').close()")

def uri(agent, place):
    sqlite3.connect(f"file:{place}/new?mode=rwc", uri=True).execute("CREATE TABLE paid (who)")

def fifo(agent, place):
    os.mkfifo(place / "new")

def own(agent, place):
    os.mkfifo("here")
    os.nice(1)
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    prlimit(int(place.name), RLIMIT_NOFILE)

def pidfd(agent, place):
    signal.pidfd_send_signal(os.pidfd_open(int(place.name)), signal.SIGTERM)

def priority(agent, place):
    os.setpriority(os.PRIO_PROCESS, int(place.name), 5)

def cores(agent, place):
    os.sched_setaffinity(int(place.name), {min(os.sched_getaffinity(0))})

def scheduler(agent, place):
    os.sched_setscheduler(int(place.name), os.SCHED_BATCH, os.sched_param(0))

def limit(agent, place):
    prlimit(int(place.name), RLIMIT_NOFILE, (64, 64))

def memory(agent, place):
    shared_memory.SharedMemory(create=True, size=16)

def clock(agent, place):
    time.clock_settime(-99, 0)

def log(agent, place):
    import syslog
    syslog.syslog("again")

@holdfast.durable
def go(agent, way):
    agent.state["n"] = 1
    agent.checkpoint("before")
    if "SANDBOXED" in os.environ:
        globals()[way](agent, Path(os.environ["SANDBOXED"]))
    return 1
"""
HELD_BY_THE_HOOK = [
    "rmtree", "dir_fd", "unlink", "link", "mode", "wait_for", "resource", "fifo", "spawn", "interpreter", "uri",
]  # fmt: skip
HELD_BY_THE_SYSTEM = ["attach", "vacuum"]
TOLD_TO_NO_HOOK_BY_PYTHON = ["pidfd", "priority", "cores", "scheduler", "limit", "memory", "clock", "log"]


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "accidents.py"
    path.write_text(PROGRAM)
    with loaded(path) as module:
        yield module


def seen(place):
    return {
        str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in [place, *sorted(place.rglob("*"))]
    }


def replayed(tmp_path, program, monkeypatch, ways):
    """Which of these ways changed something outside, and which were refused by the hook."""
    with holdfast.open(tmp_path / "store") as store:
        for way in ways:
            store.agent(way).run(program.go, way)
        place = tmp_path / "outside"
        (place / "dir").mkdir(parents=True)
        (place / "dir" / "file").write_text("of the user")
        (place / "kept").write_text("of the user")
        with sqlite3.connect(place / "bank.db") as bank:
            bank.execute("CREATE TABLE paid (who)")
        bank.close()
        before = seen(place)
        monkeypatch.setenv("SANDBOXED", str(place))
        with Workers():
            changed, refused = [], []
            for way in ways:
                found = store.replay(way, program=program.__file__)
                refused += [way] if any(one["line"].startswith(program.__file__) for one in found.blocked) else []
                after = seen(place)
                changed += [way] if after != before else []
                before = after
    return changed, refused


def test_what_a_program_does_outside_by_accident_is_refused(tmp_path, program, monkeypatch):
    changed, refused = replayed(tmp_path, program, monkeypatch, HELD_BY_THE_HOOK)
    assert changed == []
    # No resource is opened in a replay; as root, the system is asked where a name in a directory is meant.
    assert set(HELD_BY_THE_HOOK) - set(refused) == {"resource", *(["dir_fd"] if os.getuid() == 0 else [])}


@pytest.mark.root
def test_file_systems_are_read_only_for_what_no_hook_sees(tmp_path, program, monkeypatch):
    assert os.getuid() == 0
    assert replayed(tmp_path, program, monkeypatch, HELD_BY_THE_SYSTEM)[0] == []
    assert Path(tmp_path, "outside", "kept").read_text() == "of the user"


def test_other_processes_and_the_machine_are_left_alone(tmp_path, program, monkeypatch):
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other,
        holdfast.open(tmp_path / "store") as store,
        Workers(),
    ):
        pid = other.pid
        monkeypatch.setenv("SANDBOXED", str(pid))

        def state():
            return (
                other.poll(), os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid),
                os.sched_getscheduler(pid), resource.prlimit(pid, resource.RLIMIT_NOFILE),
            )  # fmt: skip

        before = state()
        for way in [*TOLD_TO_NO_HOOK_BY_PYTHON, "own"]:
            with monkeypatch.context() as patched:
                patched.delenv("SANDBOXED")
                store.agent(way).run(program.go, way)
            found = store.replay(way, program=program.__file__)
            assert [one["line"].rpartition(":")[0] for one in found.blocked[:1]] == (
                [program.__file__] if way != "own" else []
            ), (way, found)
            assert found.same == (way == "own"), (way, found)
            assert state() == before, way
        other.stdin.close()
