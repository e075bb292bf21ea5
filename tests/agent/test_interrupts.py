"""What a signal handler raises, anywhere in a call, leaves the agent usable and its history whole."""

from __future__ import annotations

import sys
import threading

import pytest

import holdfast
from holdfast.agent import branch as sealing
from holdfast.errors import HoldfastError, StoreBusy

# What a handler raises in a destructor reaches nobody.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HANG_S = 120
# Code that calls what may fail takes an ordinary exception for such a failure, and says so in its own words.
OWN_WORDS = (HoldfastError,)


class Alarm(Exception):
    """What the handlers of many programs raise: an ordinary exception."""


def interrupted(work, at: int, error: type[BaseException] = KeyboardInterrupt) -> tuple[int, bool]:
    """Do ``work``, raising at one of the places where Python runs signal handlers: how many came, and whether it did.

    These are the beginnings of functions, and the returns of calls to C, in the thread of the caller.
    """
    came = 0
    expected = (error, *OWN_WORDS) if error is Alarm else (error,)

    def look(frame, event, _arg):
        nonlocal came
        if event in ("call", "c_return") and "/holdfast/" in frame.f_code.co_filename:
            came += 1
            if came == at:
                sys.setprofile(None)
                raise error

    try:
        sys.setprofile(look)
        work()
    except expected:
        return came, True
    finally:
        sys.setprofile(None)
    return came, False


def elsewhere(work):
    """The result of ``work`` in another thread, which finds every lock that was not given back."""
    results: list = []
    failures: list[BaseException] = []

    def do():
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "a lock was left held"
    if failures:
        raise failures[0]
    return results[0]


def begun(store, name):
    agent = store.agent(name)
    agent.state["log"] = [{"a": 1}, 2, [3], "s"]
    agent.checkpoint("0")
    agent.state["log"].append(0)
    agent.checkpoint("1")
    agent.state["log"].append("unsaved")
    return agent


CALLS = {
    "checkpoint": lambda agent: agent.checkpoint("mid"),
    "bulk": lambda agent: (agent.state.update(big=bytes(300_000)), agent.checkpoint("mid")),
    "undo": lambda agent: agent.undo(),
    "rollback": lambda agent: agent.rollback("0"),
    "flush": lambda agent: (agent.checkpoint("mid"), agent.flush()),
}


@pytest.mark.parametrize("durability", ["commit", "batched"])
@pytest.mark.parametrize("what", [*CALLS, "sealed"])
def test_an_interrupt_anywhere(store_path, rounds, monkeypatch, what, durability):
    if what == "sealed":
        monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 2)
    call = CALLS.get(what, CALLS["checkpoint"])
    with holdfast.open(store_path, durability=durability) as store:
        whole, _ = interrupted(lambda: call(begun(store, "whole")), 0)
        step = max(1, whole // rounds(16, whole))
        first = interrupted(lambda: begun(store, "beginning"), 0)[0]
        saved = {}
        for at in range(1, whole - first + 1, step):
            agent = begun(store, f"agent {at}")
            error = Alarm if at // step % 2 else KeyboardInterrupt
            _, hit = interrupted(lambda agent=agent: call(agent), at, error)
            if hit and what not in ("undo", "rollback"):
                assert agent.head.label == "mid" or agent.dirty  # written and acknowledged, or still to be
            agent.state["log"].append("more")
            saved[agent.name] = list(agent.state["log"])
            elsewhere(lambda agent=agent: agent.checkpoint("after"))
            elsewhere(agent.flush)
            assert agent.head.label == "after"
        elsewhere(store.close)
    with holdfast.open(store_path) as store:
        for name, log in saved.items():
            assert list(store.agent(name).state["log"]) == log
        report = store.verify()
        assert report.ok, [problem.detail for problem in report.problems]


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_an_interrupt_while_closing(tmp_path, rounds, durability):
    """Closing again ends it; then the branch is free for others."""
    at, hit = 1, True
    while hit:
        path = tmp_path / f"store {at}"
        store = holdfast.open(path, durability=durability)
        agent = begun(store, "x")
        agent.checkpoint("mid")
        _, hit = interrupted(agent.close, at)
        again = elsewhere(lambda store=store: store.agent("x"))
        assert again.head.label == "mid"
        _, closing_hit = interrupted(store.close, at)
        elsewhere(store.close)
        with holdfast.open(path) as store:
            assert store.agent("x").state["log"][-1] == "unsaved"
        hit = hit or closing_hit
        at += rounds(9, 1)


def test_a_capture_that_was_left_is_written_by_the_next_call(store_path):
    """Where even looking for what became of a checkpoint is cut short, its changes are still there."""
    with holdfast.open(store_path) as store:
        agent = begun(store, "x")
        writer = agent._check_writer()
        pending = writer.capture(agent._document, "mid")  # and the interrupt came before it was written
        assert not pending.done
        assert agent.dirty
        agent.state["log"].append("more")
        agent.checkpoint("after")
        assert [checkpoint.label for checkpoint in agent.log()][:2] == ["after", "mid"]
        assert not agent.dirty


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_a_handler_that_takes_checkpoints_itself_harms_none(store_path, durability):
    refused = 0

    def handle(*_):
        nonlocal refused
        try:
            agent.checkpoint("handler")
        except StoreBusy:
            refused += 1

    with holdfast.open(store_path, durability=durability) as store:
        agent = store.agent("a")
        agent.state["l"] = list(range(200))
        agent.checkpoint("first")
        for at in range(1, 4_000, 37):

            def look(frame, event, _arg, left=[at]):  # noqa: B006 - one for each round
                left[0] -= event in ("call", "c_return") and "/holdfast/" in frame.f_code.co_filename
                if left[0] == 0:
                    sys.setprofile(None)
                    handle()

            sys.setprofile(look)
            try:
                agent.state["l"].append(at)
                agent.checkpoint("step")
            finally:
                sys.setprofile(None)
        assert refused
        assert holdfast.plain(agent.head.state) == holdfast.plain(agent.state)
        assert store.verify().ok


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_an_interrupt_while_opening(store_path, rounds, durability):
    """The next one opens it, whatever was left behind: threads, connections, the lock of a branch."""
    at, hit = 1, True
    while hit:
        _, hit = interrupted(lambda: holdfast.open(store_path, durability=durability).agent("x"), at)
        store = elsewhere(lambda: holdfast.open(store_path, durability=durability))
        agent = elsewhere(lambda store=store: store.agent("x"))
        agent.state["n"] = at
        elsewhere(agent.checkpoint)
        elsewhere(store.close)
        with holdfast.open(store_path, readonly=True) as store:
            assert store.agent("x").state["n"] == at
        at += rounds(47, 1)
