"""What a dump says about agents, and what their histories say about the dump."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

import holdfast
from holdfast.cli import main
from holdfast.crash import agents, capture, kinds, open_dump
from tests.crash.processes import SOURCE, python

PROGRAM = """
import os, signal, sys, time
import holdfast
from holdfast import crash
from holdfast.crash import agents, hooks as room
crash.Limits.__init__.__kwdefaults__.update(deadline_s=600.0, part_s=300.0)
agents._LEDGER_S = agents._EVENT_S = 120.0
{install}

@holdfast.tool
def book(flight):
    if "kill" in sys.argv:
        while room._active is not None and room._active.sidecar is not None and not room._active.watch._told:
            time.sleep(0.01)  # until the sidecar knows whom to tell
        os.kill(os.getpid(), signal.SIGKILL)
    if "lost" in sys.argv:
        raise ConnectionError("no answer")
    return "ok " + flight

@holdfast.durable
def travel(agent, city):
    agent.state["city"] = city
    agent.state["password"] = "hunter2-hunter2"
    agent.checkpoint("chosen")
    with agent.phase("plan"):
        book("TP1")
        agent.state["city"] = "Porto"
        raise ValueError("no hotel")

if __name__ == "__main__":
    with holdfast.open({store!r}) as store:
        store.agent("trip").run(travel, "Lisbon")
"""


@pytest.fixture
def program(tmp_path, store_path):
    def write(install="crash.install(say=False, sidecar=False)"):
        path = tmp_path / "program.py"
        path.write_text(PROGRAM.format(install=install, store=str(store_path)))
        return path

    return write


def test_an_agent_that_the_exception_has_closed_is_in_the_dump(program, store_path):
    ended = python(program())
    assert ended.returncode == 1, ended.stderr
    (path,) = (store_path / "dumps").glob("*.hfdump")
    assert b"hunter2" not in path.read_bytes()
    with open_dump(path) as dump:
        data = dump.extras(kinds.AGENT)["trip@main"]
        assert not dump.missing
    with holdfast.open(store_path, readonly=True) as store:
        agent = store.agent("trip", readonly=True)
        head = agent.head
        event = agent.crashes()[0]
        assert store.verify().ok
    assert (data["store"], data["agent"], data["branch"]) == (str(store_path), "trip", "main")
    assert (data["checkpoint"], data["label"], data["depth"]) == (head.id, "chosen", head.depth)
    assert data["state"]["city"] == "Porto"  # what was in memory, not what was saved
    assert data["state"]["password"] == "[redacted by name]"
    assert data["dirty"]
    assert data["changed"] == ["city"]
    assert [(one["tool"], one["status"], one["args"], one["result"]) for one in data["effects"]] == [
        ("book", "done", {"flight": "TP1"}, "ok TP1")
    ]
    assert data["stack"] == ["travel", "plan"]
    assert (data["function"], data["runs"][0]["status"]) == ("travel", "failed")
    assert (event["what"], event["dump"], event["error"], event["message"]) == (
        "crash", path.name, "ValueError", "no hotel"
    )  # fmt: skip
    assert (event["branch"], event["checkpoint"], event["trigger"]) == ("main", head.id, "exception")


def test_the_last_checkpoint_is_the_newest_also_where_a_run_is_executed_again(store_path, tmp_path):
    @holdfast.durable
    def fails(agent):
        agent.state["n"] = 1
        agent.checkpoint("inside")
        seen.append(capture(to=tmp_path / "dumps"))
        agent.checkpoint("after")
        raise ValueError("no")

    seen = []
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        with pytest.raises(ValueError, match="no"):
            agent.run(fails)
        newest, inside = (found.id for found in agent.log(2))
        with pytest.raises(ValueError, match="no"):
            agent.run(fails)
        seen.append(capture(to=tmp_path / "dumps"))
    found = []
    for path in seen:
        with open_dump(path) as dump:
            data = dump.extras(kinds.AGENT)["a@main"]
        found.append((data["checkpoint"], data["label"], data.get("stands_on", {}).get("label")))
    assert found == [(inside, "inside", None), (newest, "after", "inside"), (newest, "after", None)]
    assert main(["dump", "show", str(seen[1])]) == 0


def test_effects_in_doubt_are_named(program, store_path):
    python(program(), "lost")
    (path,) = (store_path / "dumps").glob("*.hfdump")
    with open_dump(path) as dump:
        data = dump.extras(kinds.AGENT)["trip@main"]
    assert [one["status"] for one in data["effects"]] == ["in doubt"]
    assert data["in_doubt"] == [data["effects"][0]["id"]]


def test_after_a_death_others_complete_the_dump_and_tell_the_agent(program, store_path, tmp_path):
    ended = python(program(), "kill")
    assert ended.returncode == -9
    dump = capture("stands for what a sidecar writes", to=tmp_path / "elsewhere")
    stands = {"store": str(store_path), "kind": "holdfast.run.store.Store", "agent": "trip", "branch": "main"}
    gone = {**stands, "agent": "nobody"}
    assert agents.tell_death(
        [stands, gone, {**stands, "store": str(tmp_path / "no")}], dump, "SIGKILL", "killed", "killed"
    ) == ["trip"]
    with open_dump(dump) as read:
        data = read.extras(kinds.AGENT)["trip@main"]
        assert read.complete
    assert data["state"] == {"city": "Lisbon", "password": "[redacted by name]"}
    assert data["in_doubt"]
    with holdfast.open(store_path, readonly=True) as store:
        (event,) = store.agent("trip", readonly=True).crashes()
    assert event["dump"] == str(dump)  # it is not in the store's folder
    assert event["checkpoint"] == data["checkpoint"]
    # A class from elsewhere is not imported, whatever the shared memory says.
    assert agents.tell_death([{**stands, "kind": "os.system"}], dump, "SIGKILL", "", "killed") == ["trip"]


def test_a_process_that_is_killed_leaves_a_dump_and_its_agent_knows(program, store_path):
    process = subprocess.Popen(
        [sys.executable, program("crash.install()"), "kill"],
        cwd=store_path.parent, env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    # Without reaping it: older kernels tell how it ended until somebody has asked.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    end = time.monotonic() + 180
    found = []
    while not found and time.monotonic() < end:
        time.sleep(0.05)
        if (store_path / "dumps").exists():  # the event is the last that the sidecar writes
            with holdfast.open(store_path, readonly=True) as store:
                found = store.agent("trip", readonly=True).crashes()
    assert process.wait() == -9
    assert (found[0]["error"], found[0]["trigger"]) == ("SIGKILL", "killed")
    with open_dump(store_path / "dumps" / found[0]["dump"]) as dump:
        data = dump.extras(kinds.AGENT)["trip@main"]
    assert data["label"] == "chosen"
    assert data["in_doubt"]


def test_a_healthy_process_shows_its_agents_without_install(store_path, tmp_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["many"] = [{"n": n} for n in range(30_000)]
        agent.state["deep"] = [[[[["x" * 10_000]]]]]
        agent.checkpoint()
        store.agent("b")
        with open_dump(capture(to=tmp_path / "dumps")) as dump:
            parts = dump.extras(kinds.AGENT)
            assert set(parts) == {"a@main", "b@main"}
            assert parts["a@main"]["state_cut"]
            assert parts["a@main"]["state"]["many"][-1]["cut"]
            assert parts["a@main"]["digest"] == agent.head.digest
            assert parts["b@main"]["checkpoint"] == ""


def test_a_lock_that_is_held_for_ever_costs_only_what_it_guards(store_path, tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "_LEDGER_S", 0.5)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["x"] = 1
        agent.checkpoint()
        hold, done = threading.Event(), threading.Event()

        def keep():
            with agent._document.lock, store._db.engine._reading:
                hold.set()
                done.wait()

        thread = threading.Thread(target=keep)
        thread.start()
        hold.wait()
        try:
            with open_dump(capture(to=tmp_path / "dumps")) as dump:
                data = dump.extras(kinds.AGENT)["a@main"]
        finally:
            done.set()
            thread.join()
        assert data["state"] == {"x": 1}
        assert "lock was not free" in data["problem"]
        assert "effects" in data["problem"]


def test_holdfast_run_installs_it_by_itself(program, store_path, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = program("")
    ended = python_cli("run", str(path))
    assert ended.returncode == 1
    (dump,) = (store_path / "dumps").glob("*.hfdump")
    assert ended.stderr.endswith(f"ValueError: no hotel\nholdfast: dump written to {dump}\n")
    with open_dump(dump) as read:
        assert read.exceptions[0].type_name == "ValueError"
        assert "trip@main" in read.extras(kinds.AGENT)
    assert not (tmp_path / ".holdfast").exists()
    assert python_cli("run", "--no-dumps", str(path)).returncode == 1
    assert len(list((store_path / "dumps").glob("*.hfdump"))) == 1
    assert main(["--store", str(store_path), "log", "trip"]) == 0
    assert "crash" in capfd.readouterr().out


def python_cli(*words):
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *words], capture_output=True, text=True, check=False, timeout=120
    )
