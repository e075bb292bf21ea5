"""Quiet before a capture: what was held back is in it, and threads stand still while it is made."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

import holdfast
from holdfast.errors import BadOption, DiskFull, NotQuiet


@pytest.fixture
def agent(store):
    return store.agent("a", when=None)


def test_a_pause_may_flush_into_the_state_and_hooks_are_called_around_every_capture(agent):
    held, calls = [], []

    def flush():
        agent.state.setdefault("lines", []).extend(held)
        held.clear()

    agent.quiesce(pause=flush)
    inner = agent.quiesce(pause=lambda: calls.append("pause"), resume=lambda: calls.append("resume"))
    held.append("one")
    assert list(agent.checkpoint().state["lines"]) == ["one"]
    assert calls == ["pause", "resume"]
    held.append("two")
    with agent.phase("two"):
        pass
    agent.gate("checked", lambda state: True)
    assert list(agent.head.state["lines"]) == ["one", "two"]
    assert calls == ["pause", "resume"] * 2
    inner.remove()
    agent.checkpoint()
    assert len(calls) == 4


def test_a_pause_that_fails_or_is_late_saves_nothing_and_whatever_was_paused_resumes(agent):
    calls = []
    agent.quiesce(resume=lambda: calls.append("first"))

    def broken():
        raise OSError("no room")

    bad = agent.quiesce(pause=broken, resume=lambda: calls.append("second"))
    agent.state["n"] = 1
    with pytest.raises(NotQuiet, match="no room"):
        agent.checkpoint()
    assert calls == ["second", "first"]
    assert agent.head is None
    bad.remove()
    with agent.quiesce(pause=lambda: time.sleep(0.02), deadline_s=0.01), pytest.raises(NotQuiet, match="quiet"):
        agent.checkpoint()
    assert agent.head is None
    assert agent.checkpoint().state["n"] == 1, "nothing of it is lost"


def test_a_resume_that_fails_takes_nothing_back(agent, caplog):
    agent.quiesce(resume=lambda: 1 / 0)
    agent.state["n"] = 1
    assert agent.checkpoint().state["n"] == 1
    assert "resume failed" in caplog.text


def test_registered_threads_stand_at_a_safe_point_while_a_capture_is_made(agent):
    """Each changes two sections, one after the other: no checkpoint has one without the other."""
    agent.state["left"], agent.state["right"] = 0, 0
    ready, stop = threading.Barrier(3), threading.Event()

    def work(mine):
        with agent.safe_thread() as safe_point:
            ready.wait()
            while not stop.is_set():
                agent.state[f"left {mine}"] = agent.state.get(f"left {mine}", 0) + 1
                agent.state[f"right {mine}"] = agent.state.get(f"right {mine}", 0) + 1
                safe_point()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    made = [agent.checkpoint() for _ in range(20)]
    stop.set()
    for thread in threads:
        thread.join()
    for one in made:
        for mine in range(2):
            assert one.state.get(f"left {mine}") == one.state.get(f"right {mine}")
    assert agent.checkpoint().depth == 21, "those that have ended are not waited for"


def test_a_thread_that_comes_to_no_safe_point_is_named_and_goes_on(agent):
    agent.quiesce(pause=lambda: None, deadline_s=0.05)
    begun, stop = threading.Event(), threading.Event()

    def work():
        with agent.safe_thread():
            begun.set()
            stop.wait()

    thread = threading.Thread(target=work, name="stubborn")
    thread.start()
    begun.wait()
    with pytest.raises(NotQuiet, match="stubborn"):
        agent.checkpoint()
    stop.set()
    thread.join()
    agent.checkpoint()


def _working(agent, work):
    """Threads that change two sections, one after the other, and do ``work`` now and then. Raises what they raise."""
    ready, failed = threading.Barrier(2), []

    def run(mine):
        try:
            with agent.safe_thread() as safe_point:
                ready.wait()
                for number in range(12):
                    agent.state[f"left {mine}"] = number
                    agent.state[f"right {mine}"] = number
                    if number % 3 == 2:
                        work(mine)
                    safe_point()
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(mine,)) for mine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in agent.log(all=True):
        assert all(one.state.get(f"left {mine}") == one.state.get(f"right {mine}") for mine in range(2))
    assert not failed


def test_threads_that_save_at_the_same_time_wait_for_each_other(agent):
    _working(agent, lambda _: agent.checkpoint())


def test_a_registered_thread_may_undo_and_go_back(agent):
    for number in range(20):
        agent.state["n"] = number
        agent.checkpoint(str(number))
    _working(agent, lambda _: agent.undo())
    _working(agent, lambda mine: agent.checkpoint() if mine else agent.rollback("3"))
    with agent.safe_thread():
        agent.state["n"] = "main"
        agent.undo()
    assert agent.state["n"] == 3


@pytest.mark.parametrize("way", ["checkpoint", "acheckpoint", "step", "astep", "rollback", "undo"])
def test_what_a_pause_writes_into_the_workspace_is_saved_with_what_it_writes_into_the_state(store, tmp_path, way):
    repo = tmp_path / "repo"
    repo.mkdir()
    agent = store.agent("coder", workspace=repo, when=holdfast.When(every_steps=1))
    agent.state["lines"] = []
    agent.checkpoint("first")
    agent.invariant("len(lines) < 100")
    held = []

    def flush():
        with (repo / "lines").open("a") as file:
            file.writelines(f"{one}\n" for one in held)
        agent.state["lines"].extend(held)
        held.clear()

    agent.quiesce(pause=flush)
    for number in range(2):
        held.append(number)
        if way.startswith("a"):
            asyncio.run(getattr(agent, way)())
        else:
            getattr(agent, way)(*(["first"] if way == "rollback" else []))
    saved = [one for one in agent.log(all=True) if one.label != "first" and not one.label.startswith("undo")]
    assert len(saved) == 2
    for one in saved:
        lines = agent.read_file("lines", one).decode().split()
        assert [*map(int, lines)] == list(one.state["lines"])
        assert lines


def test_two_tasks_that_save_share_the_quiet_and_it_ends_with_the_last(store, tmp_path):
    (tmp_path / "repo").mkdir()
    agent = store.agent("coder", workspace=tmp_path / "repo", when=None)
    calls = []
    agent.quiesce(pause=lambda: calls.append("pause"), resume=lambda: calls.append("resume"))

    async def both():
        await asyncio.gather(*(agent.acheckpoint(str(number)) for number in range(5)))

    asyncio.run(both())
    assert len(agent.log()) == 5
    assert calls == ["pause", "resume"] * (len(calls) // 2)


@pytest.mark.parametrize("way", ["undo", "redo"])
@pytest.mark.parametrize("why", [NotQuiet, DiskFull])
def test_an_undo_that_fails_leaves_the_live_state_at_the_head(agent, monkeypatch, way, why):
    for number in range(3):
        agent.state["n"], agent.state["big"] = number, os.urandom(100)
        agent.checkpoint(str(number))
    if way == "redo":
        agent.undo()
    head, live = agent.head, dict(agent.state)

    def broken(*_, **__):
        raise why("no")

    hooks = agent.quiesce(pause=broken if why is NotQuiet else list)
    if why is DiskFull:
        monkeypatch.setattr(agent._db, "directly", broken)
        monkeypatch.setattr(agent._db, "hand", broken)
    with pytest.raises(why):
        getattr(agent, way)()
    monkeypatch.undo()
    hooks.remove()
    assert (agent.head, dict(agent.state)) == (head, live)
    assert not agent.diff().changes
    getattr(agent, way)()
    assert agent.state["n"] == (1 if way == "undo" else 2)


def test_hooks_that_say_nothing_are_refused(agent):
    with pytest.raises(BadOption):
        agent.quiesce()
    with pytest.raises(BadOption):
        agent.quiesce(pause=list, deadline_s=0)


def test_handles_are_opened_again_by_their_description(store, monkeypatch):
    opened = []

    def connect(described):
        opened.append(described)
        return {"session": (described or {"session": 7})["session"]}

    with store.agent("a", when=None) as agent:
        assert agent.handle("db", open=connect, describe=dict).handle == {"session": 7}
        agent.checkpoint("one")
        agent.rollback("one")
        assert agent.handle("db", open=connect, describe=dict).handle == {"session": 7}
    assert opened == [None, {"session": 7}]


def test_only_named_environment_variables_are_kept_and_never_secrets(store, monkeypatch):
    monkeypatch.setenv("TRIP_MODE", "quick")
    monkeypatch.delenv("TRIP_PLACE", raising=False)
    agent = store.agent("a", when=None)
    assert agent.keep_environment("TRIP_MODE", "TRIP_PLACE") == {"TRIP_MODE": "quick"}
    with pytest.raises(BadOption):
        agent.keep_environment("OPENAI_API_KEY")
    agent.checkpoint()
    agent.close()
    monkeypatch.delenv("TRIP_MODE")
    assert store.agent("a", when=None).keep_environment("TRIP_MODE", "TRIP_PLACE") == {"TRIP_MODE": "quick"}
