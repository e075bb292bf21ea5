"""What others do beside a run: they hold its child's agent, remove it, resume and interrupt it, damage its row."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from contextlib import contextmanager, suppress

import pytest

import holdfast
from holdfast import errors
from holdfast.run import claims, listing
from tests.agent import child
from tests.lives import end, line
from tests.run import working


@contextmanager
def held(place, name):
    """Inside, another process holds an agent."""
    other = child.start("release_after", place, name, 0)
    assert line(other) == "ready"
    try:
        yield
    finally:
        end(other)


PAID = {f"x-{n}-{part}": 1 for n in range(2) for part in "ab"}


# -- a child that somebody else holds ------------------------------------------------------------------------------


def test_a_parent_whose_child_somebody_else_holds_stops_and_has_not_failed(store_path, outside):
    store = holdfast.open(store_path)
    agent = store.agent("trip")
    with pytest.raises(errors.Waiting):
        agent.run(working.parent.options(id="r", wait=False), "x", waits=True)
    for n in range(2):
        store.signal(f"trip/kid-{n}", "go")
    with held(store_path, "trip/kid-1"):
        for _ in range(2):
            with pytest.raises(errors.AgentBusy):
                agent.resume("r", wait=False)
            assert agent.runs()[0].status == "waiting"
    assert agent.resume("r") == ["x-0-b", "x-1-b"]
    assert outside() == PAID


def test_a_child_that_somebody_else_holds_is_begun_when_he_has_let_go(store_path, outside):
    store = holdfast.open(store_path)
    store.agent("trip/kid-1").close()
    agent = store.agent("trip")
    with held(store_path, "trip/kid-1"):
        for _ in range(2):
            with pytest.raises(errors.AgentBusy):
                agent.run(working.parent.options(id="r"), "x")
            assert agent.runs()[0].status == "interrupted"
    assert agent.run(working.parent.options(id="r"), "x") == ["x-0-b", "x-1-b"]
    assert outside() == PAID


def test_a_program_that_passes_over_a_held_child_neither_acts_nor_ends(store_path, outside):
    @holdfast.durable(name="beside.stubborn")
    def stubborn(agent):
        try:
            agent.spawn(working.child, "kid", "x", waits=False).join()
        except Exception:
            working.pay("instead")
        return "done"

    store = holdfast.open(store_path)
    store.agent("trip/kid").close()
    agent = store.agent("trip")
    with held(store_path, "trip/kid"), pytest.raises(errors.AgentBusy):
        agent.run(stubborn)
    assert (agent.runs()[0].status, outside()) == ("interrupted", {})
    assert agent.run(stubborn) == "done"
    assert outside() == {"x-a": 1, "x-b": 1}


def test_a_worker_leaves_a_parent_alone_while_somebody_else_holds_its_child(store_path, outside):
    store = holdfast.open(store_path)
    job = store.submit(working.parent, "x", waits=True)
    store.worker().run(drain=True)
    for n in range(2):
        store.signal(f"{job.agent}/kid-{n}", "go")
    became = []
    with held(store_path, f"{job.agent}/kid-1"):
        for _ in range(4):  # more workers than a run may lose
            here = store.worker(tell=became.append)
            here.run(drain=True)
            length = store._view(job.agent, "main").line.count
            here.run(drain=True)
            assert store._view(job.agent, "main").line.count == length
        assert {one.became for one in became} == {"left"}
    here.run(drain=True)
    assert (became[-1].became, job.result(0)) == ("finished", ["x-0-b", "x-1-b"])
    assert outside() == PAID


# -- whoever else resumes, removes or looks ------------------------------------------------------------------------


def test_a_run_that_people_interrupt_has_lost_no_worker(store_path):
    patience = [False]

    @holdfast.durable(name="beside.patient")
    def patient(agent):
        if not patience:
            return "done"
        raise KeyboardInterrupt

    store = holdfast.open(store_path)
    job = store.submit(patient)
    for _ in range(4):
        agent = store.agent(job.agent)
        with pytest.raises(KeyboardInterrupt):
            agent.resume(job.id)
        agent.close()
    patience.clear()
    store.worker().run(drain=True)
    assert job.result(0) == "done"


def test_an_agent_whose_run_is_executed_here_is_not_removed(store_path):
    begun, go = threading.Event(), threading.Event()

    @holdfast.durable(name="beside.held")
    def stays(agent):
        begun.set()
        assert go.wait(180)
        return "done"

    store = holdfast.open(store_path)
    job = store.submit(stays)
    thread = threading.Thread(target=store.worker().run, kwargs={"drain": True})
    thread.start()
    assert begun.wait(180)
    assert store.remove(job.agent, dry_run=True).events
    with pytest.raises(errors.AgentBusy, match="a worker of this process"):
        store.remove(job.agent)
    store.copy(job.agent, "copy")
    with pytest.raises(errors.AgentBusy, match="a worker of this process"):
        store.remove("copy", with_copies=True)
    go.set()
    thread.join()
    assert job.result(0) == "done"
    begun.clear(), go.clear()
    agent = store.agent(job.agent)
    thread = threading.Thread(target=agent.run, args=(stays.options(id="again"),))
    thread.start()
    assert begun.wait(180)
    with pytest.raises(errors.AgentBusy, match="this process executes"):
        store.remove(job.agent)
    go.set()
    thread.join()
    store.remove(job.agent)


def test_a_run_that_ends_while_it_is_looked_at_is_not_called_interrupted(store_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    @holdfast.durable(name="beside.ends")
    def ends(agent):
        begun.set()
        assert go.wait(180)

    store = holdfast.open(store_path)
    agent = store.agent("a")
    thread = threading.Thread(target=agent.run, args=(ends,))
    thread.start()
    assert begun.wait(180)
    read = listing.View.past

    def late(view):
        found = read(view)
        go.set()
        thread.join()
        return found

    monkeypatch.setattr(listing.View, "past", late)
    assert store.runs()[0].status == "finished"


@pytest.mark.parametrize("table", ["open", "branch"])
def test_damage_of_one_run_does_not_keep_a_worker_from_the_others(store_path, outside, caplog, table):
    with holdfast.open(store_path) as store:
        bad, *good = (store.submit(working.job, what) for what in "abc")
        b = store._view(bad.agent, "main")._branch.b
        column = {"open": "due", "branch": "at"}[table]
        store._db.change(lambda change: change.tx.do(f"UPDATE {table} SET {column} = {column} + 1 WHERE b = {b}"))
        with caplog.at_level(logging.WARNING, "holdfast.run"):
            here = store.worker()
            for _ in range(2):
                here.run(drain=True)
                while any(one.status == "waiting" for one in good):
                    here.run(drain=True)
        assert [one.status for one in good] == ["finished", "finished"]
        assert len([one for one in caplog.records if "holdfast repair" in one.getMessage()]) == 1
        assert not store.verify().ok


# -- what is left of a plain loop ----------------------------------------------------------------------------------


def test_a_run_that_is_struck_while_it_takes_over_an_effect_leaves_no_doubt(opened):
    done = []

    @holdfast.tool(name="beside.pay")
    def pay(euros):
        done.append(euros)
        return f"paid {euros}"

    @holdfast.durable(name="beside.work")
    def work(agent):
        return pay(10)

    for strike in itertools.count(1):  # at each line in turn
        with opened(f"trip-{strike}"):
            pay(10)
        agent, lines = opened(f"trip-{strike}"), 0

        def trace(frame, event, _arg, strike=strike, flush=agent._host.ledger.flush):
            nonlocal lines
            if frame.f_code is not claims.adopt.__code__:
                return None
            lines += event == "line"
            if (lines, event) == (strike, "line"):
                flush()
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            with suppress(KeyboardInterrupt):
                agent.run(work.options(id="r"))
        finally:
            sys.settrace(None)
        agent = opened(f"trip-{strike}")
        assert {one.status for one in agent.effects()} == {"done"}
        assert agent.run(work.options(id="r")) == "paid 10"
        assert len(done) == strike
        if lines < strike:
            break
    assert strike > 10
