"""Changes that are lost when an agent, its store or the program ends: said there, once, and in nobody's way.

That handles which are fenced or poisoned lose nothing that was not said before, the tests of these hold.
"""

from __future__ import annotations

import contextlib
import logging
import random
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

import holdfast
from holdfast.errors import DiskFull, StoreClosed, UnsavedChanges


@holdfast.register
@dataclass
class Task:
    title: str
    done: bool = False


def by_handle(store, change):
    agent = store.agent("trip-7")
    change(agent)
    agent.close()


def by_closing(store, change):
    with contextlib.closing(store.agent("trip-7")) as agent:
        change(agent)


def by_store(store, change):
    change(store.agent("trip-7"))
    store.close()


def by_block(store, change):
    with store:
        change(store.agent("trip-7"))


ENDS = [by_handle, by_closing, by_store, by_block]


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as store:
        yield store


def added(agent):
    agent.state["plan"] = {"city": "Lisbon"}


def lost(what):
    return f"the {what} was closed, and changes of trip-7 are lost: state.plan. Call agent.checkpoint() first."


@pytest.mark.parametrize("end", ENDS)
def test_whoever_ends_without_saving_is_told_of_it_with_his_line(store, end):
    with pytest.warns(UnsavedChanges) as caught:
        end(store, added)
    assert [str(one.message) for one in caught] == [lost("agent" if end in {by_handle, by_closing} else "store")]
    assert caught[0].filename == __file__
    first = end.__code__.co_firstlineno
    assert first < caught[0].lineno <= first + 4
    store.close()  # nobody is told twice


@pytest.mark.parametrize("end", ENDS)
def test_where_the_warning_is_an_error_everything_is_let_go_all_the_same(store, store_path, end):
    with pytest.raises(UnsavedChanges):
        end(store, added)
    with holdfast.open(store_path) as again, again.agent("trip-7") as agent:
        assert not agent.state
        agent.state["n"] = 1


def test_a_few_places_are_named_and_the_rest_counted(store):
    agent = store.agent("trip-7")
    agent.state.update(task=Task("book"), plan={"city": "Lisbon", "days": 4, "a b": [1]}, log=["one"])
    agent.checkpoint()
    agent.state["plan"]["city"] = "Porto"
    agent.state["plan"]["a b"].append(2)
    agent.state["task"].done = True
    agent.state["log"] += ["two", "three"]
    agent.state["x" * 200] = 1
    with pytest.warns(UnsavedChanges) as caught:
        agent.close()
    said = str(caught[0].message).partition("lost: ")[2]
    assert said.count(",") == 2
    assert "and 2 more. Call" in said
    assert all(one in {"state.plan.city", "state.plan['a b']", "state.log"} or "state.task" in one
               for one in said.partition(" and ")[0].split(", "))  # fmt: skip
    branch = agent._store.agent("trip-7").branch("other")
    branch.state["x" * 200] = 1
    with pytest.warns(UnsavedChanges, match=r"trip-7@other are lost: state\.x{90,100}…\. Call"):
        branch.close()


def test_what_could_not_even_be_saved_is_named(store):
    agent = store.agent("trip-7")
    agent.state["task"] = Task("book")
    agent.checkpoint()
    agent.state["task"].title = print
    with pytest.warns(UnsavedChanges, match=r"lost: state\.task\.title\."):
        agent.close()


def nothing(_agent):
    pass


def saved(agent):
    added(agent)
    agent.checkpoint()


def as_before(agent):
    saved(agent)
    agent.state["plan"]["city"] = "Porto"
    agent.state["plan"]["city"] = "Lisbon"


def only_read(agent):
    agent.state["task"] = Task("book")
    agent.checkpoint()
    assert not agent.state["task"].done


def gone_back(agent):
    saved(agent)
    agent.state["plan"]["city"] = "Porto"
    agent.rollback(agent.head)


def drawn(agent):
    source = agent.generator("dice", random.Random(1))
    agent.checkpoint()
    source.random()


def bookkeeping(agent):
    agent.state.update({"__framework__": {"step": 1}, "holdfast.random": {}})


def removed(agent):
    added(agent)
    agent._store.remove("trip-7")


def files(agent):
    saved(agent)
    (agent.workspace / "notes").write_text("they stay where they are")


def a_run_that_stopped(agent):
    @holdfast.durable(name="test-unsaved.stops")
    def stops(agent):
        agent.state["n"] = 1
        raise ValueError("it begins anew")

    with pytest.raises(ValueError, match="anew"):
        agent.run(stops)


def said_by_an_exception(agent):
    added(agent)
    with pytest.raises(ValueError, match="mine"), agent:
        raise ValueError("mine")


def kept_beside(agent):
    saved(agent)
    with contextlib.suppress(ValueError), agent.phase("plan"):
        agent.state["plan"]["city"] = "Porto"
        raise ValueError("mine")


@pytest.mark.parametrize(
    "change",
    [
        nothing, saved, as_before, only_read, gone_back, drawn, bookkeeping, removed, files, a_run_that_stopped,
        said_by_an_exception, kept_beside,
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ENDS)
def test_where_nothing_is_lost_nobody_is_told(store, end, change, tmp_path):
    (tmp_path / "work").mkdir()
    store.agent("trip-7", workspace=tmp_path / "work" if change is files else None)
    end(store, change)


def test_a_handle_that_only_reads_loses_nothing(store):
    with store.agent("trip-7") as agent:
        agent.state["n"] = 1
    store.agent("trip-7", readonly=True).close()


def test_a_run_that_is_executed_at_that_moment_begins_anew_and_loses_nothing(store):
    agent, began, over = store.agent("trip-7"), threading.Event(), threading.Event()

    @holdfast.durable(name="test-unsaved.goes-on")
    def goes_on(agent):
        agent.state["n"] = 1
        began.set()
        over.wait()

    def work():
        with contextlib.suppress(StoreClosed):
            agent.run(goes_on)

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    try:
        agent.close()
    finally:
        over.set()
        thread.join()


def test_who_could_not_close_the_store_is_told_when_he_can(store, monkeypatch):
    def full():
        raise DiskFull("no room")

    added(store.agent("trip-7"))
    with monkeypatch.context() as patch:
        patch.setattr(store._db, "close", full)
        with pytest.raises(DiskFull):
            store.close()
    with pytest.warns(UnsavedChanges, match=r"state\.plan"):
        store.close()


@pytest.mark.parametrize("end", [by_closing, by_block])
def test_an_exception_is_the_message_and_the_log_has_the_rest(store, end, caplog):
    def failing(agent):
        added(agent)
        raise ValueError("mine")

    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="mine"):
        end(store, failing)
    assert [one.getMessage() for one in caplog.records] == [lost("agent" if end is by_closing else "store")]


PROGRAM = """
import sys, holdfast
agent = holdfast.open(sys.argv[1]).agent("trip-7")
agent.state["n"] = 1
if sys.argv[2] == "saves": agent.checkpoint()
if sys.argv[2] == "raises": raise ValueError("mine")
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("ends", ["UnsavedChanges: the program ended, and changes of trip-7 are lost: state.n."]),
        ("saves", []),
        ("raises", ["ValueError: mine", "the program ended, and changes of trip-7 are lost: state.n."]),
    ],
)
def test_the_end_of_a_program_that_closes_nothing_says_it(store_path, how, said):
    holdfast.open(store_path).close()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store_path), how], check=False, capture_output=True, text=True
    )
    lines = [line for line in ended.stderr.splitlines() if line and not line.startswith((" ", "Traceback"))]
    assert len(lines) == len(said)
    assert all(wanted in line for wanted, line in zip(said, lines, strict=True))
    assert ended.returncode == (how == "raises")
    strict = [sys.executable, "-W", "error", "-c", PROGRAM, str(store_path), how]
    assert subprocess.run(strict, check=False, capture_output=True).returncode == ended.returncode
