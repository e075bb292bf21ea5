"""Two processes that drive one thread: who may write, what the other sees, and what a killed one leaves behind."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.contrib.langgraph.thread import writes_said
from holdfast.errors import AgentBusy, Fenced, NotFrozen
from holdfast.process import cooperation
from tests.contrib.threads import chain, checkpoint, config, told
from tests.contrib.writer_child import start, two_steps
from tests.lives import end, line, tell

META = {"source": "loop", "step": 0, "parents": {}}
THREAD = {"configurable": {"thread_id": "t"}}
PATIENCE_S = 180
"""How long a test waits for something that takes milliseconds on an idle machine."""


@pytest.fixture
def store_path(place):
    return place("store")


@pytest.fixture
def child(store_path):
    process = start("run", store_path, "t")
    yield process
    end(process)


def lineage(saver) -> list[tuple[str, ...]]:
    """The thread's checkpoints, each with the ids of its children: a fork has two."""
    children: dict[str, list[str]] = {}
    for found in saver.list(config("t")):
        parent = found.parent_config["configurable"]["checkpoint_id"] if found.parent_config else ""
        children.setdefault(parent, []).append(found.checkpoint["id"])
    return [tuple(each) for each in children.values()]


def unforked(saver) -> bool:
    return all(len(each) == 1 for each in lineage(saver))


def inside(child) -> None:
    tell(child, "go")
    assert line(child) == "inside"


def test_a_second_process_gets_agent_busy_while_a_run_is_in_progress(store_path, child):
    inside(child)
    ran = []
    with HoldfastSaver(store_path) as saver:
        graph = two_steps(saver, "second", lambda: ran.append(1))
        before = [told(found) for found in saver.list(config("t"))]
        with pytest.raises(AgentBusy) as caught:
            graph.invoke({"trail": ["asked"]}, THREAD, durability="sync")
        assert caught.value.holder["pid"] == child.pid
        assert "thread 't'" in str(caught.value)
        assert "wait_s" in caught.value.hint
        assert "takeover" not in str(caught.value), "a saver has no such thing"
        assert not ran, "with durability='sync' nothing runs whose beginning is not saved"
        for mode in ("async", "exit"):
            with pytest.raises(AgentBusy):
                graph.invoke({"trail": ["asked"]}, THREAD, durability=mode)
        with pytest.raises(AgentBusy):
            asyncio.run(graph.ainvoke({"trail": ["asked"]}, THREAD, durability="sync"))
        with pytest.raises(AgentBusy):
            graph.update_state(THREAD, {"trail": ["forced"]}, as_node="first")
        with pytest.raises(AgentBusy):
            saver.delete_thread("t")
        with pytest.raises(AgentBusy):
            saver.prune(["t"])
        # reading goes on, and so do other threads
        assert graph.get_state(THREAD).next == ("first",)
        assert [told(found) for found in saver.list(config("t"))] == before
        graph.invoke({"trail": ["asked"]}, {"configurable": {"thread_id": "another"}})
        tell(child)
        assert line(child) == "ran"
        assert graph.get_state(THREAD).values["trail"] == ["asked by child", "child first", "child second of 2"]
        assert unforked(saver)
        assert saver.store.verify().ok


def test_after_the_run_the_other_process_writes_at_once(store_path, child):
    """The first process is alive and keeps its graph; only its run is over."""
    inside(child)
    tell(child)
    assert line(child) == "ran"
    with HoldfastSaver(store_path) as saver:
        graph = two_steps(saver, "second", lambda: None)
        result = graph.invoke({"trail": ["asked"]}, THREAD)
        assert result["trail"][:3] == ["asked by child", "child first", "child second of 2"]
        assert result["trail"][3:] == ["asked", "second first", "second second of 5"]
        # and back again: the child sees what was written meanwhile
        inside(child)
        tell(child)
        assert line(child) == "ran"
        assert graph.get_state(THREAD).values["trail"][-1] == "child second of 8"
        assert unforked(saver)


def test_with_wait_s_the_second_process_waits_and_goes_on_with_the_newest_state(store_path, child):
    inside(child)
    with HoldfastSaver(store_path, wait_s=PATIENCE_S) as saver:
        graph = two_steps(saver, "second", lambda: None)
        results = []

        def work() -> None:
            try:
                results.append(graph.invoke({"trail": ["asked"]}, THREAD, durability="sync"))
            except BaseException as error:
                results.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join(0.5)
        assert worker.is_alive(), results
        tell(child)
        assert line(child) == "ran"
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
        assert not isinstance(results[0], BaseException), repr(results[0])
        assert results[0]["trail"] == [
            "asked by child",
            "child first",
            "child second of 2",
            "asked",
            "second first",
            "second second of 5",
        ]
        assert unforked(saver)


def test_waiting_ends_when_its_time_is_over(store_path, child):
    inside(child)
    with HoldfastSaver(store_path, wait_s=0.3) as saver:
        graph = two_steps(saver, "second", lambda: None)
        began = time.monotonic()
        with pytest.raises(AgentBusy):
            graph.invoke({"trail": ["asked"]}, THREAD, durability="sync")
        assert time.monotonic() - began >= 0.3


@pytest.fixture
def putter(store_path):
    process = start("put", store_path, "t")
    yield process
    end(process)


def overtake(putter, text: str) -> None:
    tell(putter, text)
    assert line(putter) == "put"


def test_a_process_that_was_overtaken_is_fenced_and_forks_nothing(store_path, putter):
    with HoldfastSaver(store_path) as saver:
        made = chain(saver, "t", 2)
        seen = saver.get_tuple(config("t")).config
        overtake(putter, "from the other process")
        with pytest.raises(Fenced):
            saver.put(seen, checkpoint({"by": "the one that was overtaken"}), META, {})
        assert [found.checkpoint["channel_values"].get("by") for found in saver.list(config("t"))] == [
            "from the other process",
            None,
            None,
        ]
        assert unforked(saver)
        # who reads again may go on, and may fork on purpose
        newest = saver.get_tuple(config("t"))
        assert newest.checkpoint["channel_values"] == {"by": "from the other process"}
        saver.put(newest.config, checkpoint({"by": "after reading"}), META, {})
        assert saver.get_tuple(config("t")).checkpoint["channel_values"] == {"by": "after reading"}
        saver.put(made[0], checkpoint({"by": "a fork"}), META, {})
        assert not unforked(saver)
        assert saver.store.verify().ok


def test_a_run_is_the_writer_from_its_first_read_on(store_path, putter):
    """Nobody can get between what it read and what it writes."""
    with HoldfastSaver(store_path) as saver:
        graph = two_steps(saver, "first", lambda: None)
        graph.invoke({"trail": ["asked"]}, THREAD)
        real, said = saver.get_tuple, []

        def read_then_let_the_other_try(*arguments):
            found = real(*arguments)
            tell(putter, "meanwhile")
            said.append(line(putter))
            return found

        saver.get_tuple = read_then_let_the_other_try
        graph.invoke({"trail": ["again"]}, THREAD, durability="sync")
        del saver.get_tuple
        assert said == ["agent-busy"]
        assert unforked(saver)
        overtake(putter, "afterwards")
        assert saver.get_tuple(config("t")).checkpoint["channel_values"] == {"by": "afterwards"}
        assert unforked(saver)


@pytest.mark.slow
def test_everything_streamed_survives_kill(store_path):
    for round_ in range(2):
        process = start("stream", store_path, f"t{round_}")
        said = 0
        began = time.monotonic()
        while (text := line(process)) and not (said > 5 + 20 * round_ and time.monotonic() - began > 0.2):
            said = int(text)
        process.kill()
        rest = process.stdout.read().split()
        said = max([said, *map(int, rest[:-1])])
        end(process)
        with HoldfastSaver(store_path) as saver:
            thread = {"configurable": {"thread_id": f"t{round_}"}}
            graph = two_steps(saver, "unused", lambda: None)
            trail = graph.get_state(thread).values["trail"]
            assert len(trail) >= said
            assert trail == [f"turn {number}" for number in range(len(trail))]
            past = [found.checkpoint["channel_values"].get("trail", []) for found in saver.list(config(f"t{round_}"))]
            assert [len(each) for each in past[:-1]] == list(range(len(trail), -1, -1))
            assert saver.store.verify().ok
            newest = saver.get_tuple(config(f"t{round_}"))
            saver.put(newest.config, checkpoint({"trail": ["on"]}), META, {})


def test_after_fork_the_child_gets_a_typed_error_and_the_parent_goes_on(store_path):
    process = start("fork", store_path)
    try:
        assert line(process) == "child 0"
        assert process.wait(PATIENCE_S) == 0
    finally:
        end(process)
    with HoldfastSaver(store_path) as saver:
        assert len(list(saver.list(config("t")))) == 4


def test_two_savers_of_one_process_take_turns(store_path):
    with HoldfastSaver(store_path) as one:
        first = two_steps(one, "one", lambda: None)
        first.invoke({"trail": ["asked"]}, THREAD)
        two = HoldfastSaver(one.store)
        second = two_steps(two, "two", lambda: None)
        second.invoke({"trail": ["asked"]}, THREAD)
        first.invoke({"trail": ["asked"]}, THREAD)
        assert len(first.get_state(THREAD).values["trail"]) == 9
        assert unforked(one)
        two.close()
        assert not one.store.closed, "a store that was given stays open"


def test_a_thread_that_another_process_begins_at_the_same_moment_is_opened(ours, monkeypatch):
    begin, begun = ours.store._begin_agent, []

    def late(name):
        ours.store._add_agent(name)  # as the other one
        begun.append(begin(name))
        return begun[-1]

    monkeypatch.setattr(ours.store, "_begin_agent", late)
    (at,) = chain(ours, "t", 1)
    assert begun == [None]
    assert ours.get_tuple(config("t")).config == at
    assert [row.name for row in ours.store._agents()] == ["t"]
    assert len(ours.store._db.leases.holders()) <= 1, "the lock of a branch that never was is let go"
    assert ours.store.verify().ok


def test_writes_that_a_failing_checkpoint_took_along_are_told(ours, monkeypatch):
    (at,) = chain(ours, "t", 1)
    thread = ours._known("t")
    space = thread.begin("")
    queued = thread.queue(writes_said("", at["configurable"]["checkpoint_id"], [], "task", "", replace=False))

    def fails(*_args, **_options):
        raise OSError("no room to work in")

    monkeypatch.setattr(space.writer, "capture", fails)
    with pytest.raises(OSError, match="no room"):
        ours.put(at, checkpoint({"messages": []}), META, {})
    with pytest.raises(OSError, match="no room"):
        queued.result()


def test_a_process_with_a_thread_open_is_not_frozen_since_what_the_thread_did_would_be_done_again(tmp_path):
    with HoldfastSaver(tmp_path / "store") as saver:
        chain(saver, "t", 2)
        with pytest.raises(NotFrozen, match="'t' is written beside any handle"), cooperation._let_go(time.monotonic()):
            pass
        chain(saver, "u", 1)
