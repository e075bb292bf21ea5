"""Promises about bad input, changed programs and secrets, each shown with a real agent in a real store."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

import holdfast
from holdfast import errors
from holdfast.codec.blocks import DIGEST_BYTES
from holdfast.run.arguments import fetch
from tests.run.bench import Crash

KEY = "sk-0123456789abcdef"


def stored(agent, path):
    """Every byte that a store holds: its files, and each record and value of the line uncompressed."""
    host = agent._host
    records = [record for _, record in host.ledger.records()]
    refs = b"".join(record.refs for record in records)
    long = [[refs[at : at + DIGEST_BYTES]] for at in range(0, len(refs), DIGEST_BYTES)]
    found = [record.encode() for record in records]
    found += [repr(fetch(value, host.ledger, host.registry)).encode() for value in long]
    agent._store.flush()
    return b"".join([*found, *(file.read_bytes() for file in path.rglob("*") if file.is_file())])


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", ["write", "idempotent", "read"])
@pytest.mark.parametrize("durable", [True, False])
def test_arguments_that_cannot_be_encoded_are_refused_before_anything_is_written_or_done(opened, effect, durable):
    calls = []

    @holdfast.tool(effect=effect, volatile=("trace",))
    def send(what, trace=None):
        calls.append(what)

    def work(agent):
        before = agent._host.ledger.count
        for arguments in ({"what": threading.Lock()}, {"what": 1, "trace": threading.Lock()}):
            with pytest.raises(errors.Unencodable, match="send"):
                send(**arguments)
        assert agent._host.ledger.count == before

    if durable:
        opened().run(work)
    else:
        with opened() as agent:
            work(agent)
    assert calls == []


def test_a_call_by_a_thread_that_outlives_its_run_is_refused(opened):
    calls, refused = [], []
    go_on = threading.Event()

    @holdfast.tool
    def send(what):
        calls.append(what)

    def late():
        go_on.wait()
        try:
            send("late")
        except errors.NoAgent as error:
            refused.append(error)

    threads = []

    def work(agent):
        threads.append(threading.Thread(target=agent.context().run, args=(late,)))
        threads[0].start()

    agent = opened()
    agent.run(work)
    go_on.set()
    threads[0].join()
    assert calls == []
    assert "ended" in str(refused[0])
    assert agent.effects() == []


MODULE = """
import holdfast

@holdfast.tool
def pay(amount):
    raise AssertionError("called")
"""


@pytest.mark.parametrize("durable", [True, False])
def test_two_tools_of_one_name_are_refused_before_the_first_of_them_is_called(opened, durable):
    spaces = []
    for file in ("one.py", "two.py"):
        spaces.append({"__name__": file})
        exec(compile(MODULE, file, "exec"), spaces[-1])

    def work(agent):
        with pytest.raises(errors.BadName, match=r"one\.py .*two\.py"):
            spaces[0]["pay"](5)
        assert agent.effects() == []

    if durable:
        opened().run(work)
    else:
        with opened() as agent:
            work(agent)


@pytest.mark.parametrize("durable", [True, False])
def test_a_second_tool_of_one_name_that_comes_later_is_refused_too(opened, durable):
    calls = []

    def make_one():
        @holdfast.tool(name="same")
        def one():
            calls.append(1)

        return one

    def make_two():
        @holdfast.tool(name="same")
        def two():
            calls.append(2)

        return two

    def work(agent):
        make_one()()
        with pytest.raises(errors.BadName, match="two tools"):
            make_two()()

    if durable:
        opened().run(work)
    else:
        with opened() as agent:
            work(agent)
    assert calls == [1]


def test_a_compensation_that_the_new_program_does_not_have_is_said_before_anything_is_undone(opened):
    undone = []

    def program(*, can_undo):
        @holdfast.tool(name="book", compensate=(lambda effect: undone.append(effect.args)) if can_undo else None)
        def book(what):
            return what

        return book

    book = program(can_undo=True)
    with opened() as agent:
        agent.checkpoint("start")
        book("flight")
        agent.state["booked"] = True
        agent.checkpoint("booked")
    book = program(can_undo=False)
    with opened() as agent, pytest.raises(errors.RollbackBlocked, match="book"):
        agent.rollback("start")
    del book
    with opened() as agent, pytest.raises(errors.RollbackBlocked, match="book"):
        agent.rollback("start")
    assert undone == []
    book = program(can_undo=True)
    with opened() as agent:
        assert agent.state["booked"]
        agent.rollback("start")
    del book
    assert undone == [{"what": "flight"}]


@pytest.mark.parametrize("durable", [True, False])
def test_a_result_that_cannot_be_saved_is_done_and_lost_after_a_restart_too(opened, durable):
    calls = []

    @holdfast.tool
    def send(what):
        calls.append(what)
        return threading.Lock()

    def work(agent):
        with pytest.raises(errors.ResultLost, match="is done"):
            send("mail")
        if len(calls) == 1 and not again:
            raise Crash
        return "on"

    def execute():
        if durable:
            return opened().run(work)
        with opened() as agent:
            return work(agent)

    again = False
    with pytest.raises(Crash):
        execute()
    again = True
    assert execute() == "on"
    assert calls == ["mail"]
    assert [effect.status for effect in opened().effects()] == ["lost"]


def test_a_result_that_a_probe_found_and_that_cannot_be_saved_leaves_the_call_in_doubt(opened):
    calls = []

    @holdfast.tool(probe=lambda effect: holdfast.Found(threading.Lock()))
    def send(what):
        calls.append(what)
        raise OSError("hung up")

    def work(agent):
        for _ in range(2):  # a program that looks away starts nothing new
            with pytest.raises(errors.InDoubt, match="cannot be saved"):
                send("mail")

    with pytest.raises(errors.InDoubt):
        opened().run(work)
    with pytest.raises(errors.InDoubt, match="cannot be saved"):
        opened().run(work)
    assert calls == ["mail"]


def test_a_write_that_fails_because_another_agent_is_in_doubt_is_in_doubt_itself(opened):
    calls = []

    @holdfast.tool
    def pay(amount):
        calls.append("pay")
        raise OSError("hung up")

    @holdfast.tool
    def delegate(what):
        calls.append("delegate")
        with holdfast.current()._store.agent("helper") as helper:
            return helper.run(lambda agent: pay(5))

    @holdfast.tool
    def mail():
        calls.append("mail")

    def work(agent):
        with pytest.raises(errors.InDoubt):
            delegate("it")
        mail()

    agent = opened()
    with pytest.raises(errors.InDoubt, match="delegate"):
        agent.run(work)
    assert calls == ["delegate", "pay"]
    assert [run.status for run in agent.runs()] == ["needs attention"]


# -- a changed program ----------------------------------------------------------------------------------------------


def interrupted(opened, function, **options):
    with pytest.raises(Crash):
        opened(**options).run(function)


def test_changed_code_and_configuration_are_reported_when_a_run_is_resumed(opened, caplog):
    stop = [True]

    @holdfast.tool(effect="read")
    def look():
        return 1

    def first():
        @holdfast.durable(name="work")
        def work(agent):
            found = [look() for _ in range(2)]
            if stop[0]:
                raise Crash
            return found

        return work

    def second():
        @holdfast.durable(name="work")
        def work(agent):
            found = [look() for _ in range(2)]
            if stop[0]:
                raise Crash
            return [*found, "new"]

        return work

    caplog.set_level(logging.WARNING, logger="holdfast.run")
    interrupted(opened, first(), config={"model": "a"})
    interrupted(opened, first(), config={"model": "a"})
    assert "changed" not in caplog.text
    interrupted(opened, first(), config={"model": "b"})
    assert "the configuration of work has changed" in caplog.text
    assert "the code of work" not in caplog.text
    caplog.clear()
    stop[0] = False
    agent = opened(config={"model": "a"})
    assert agent.run(second()) == [1, 1, "new"]
    assert "the code of work has changed" in caplog.text
    assert "configuration" not in caplog.text
    noted = [
        (record.name, record.what)
        for _, record in agent._host.ledger.records()
        if type(record).__name__ == "Note" and record.what == "changed"
    ]
    assert noted == [("configuration", "changed"), ("code", "changed")]


CODE = """
import holdfast

@holdfast.durable
def work(agent, x=None):
    chosen = [y for y in range(3) if y in {"a", "b", "c", 4}]
    return sorted(chosen, key=lambda y: (lambda z: -z)(y))

print(work.durable.code)
"""


def test_the_hash_of_a_functions_code_is_the_same_in_each_process():
    made = {
        subprocess.run(
            [sys.executable, "-c", CODE], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(made) == 1
    assert len(made.pop().strip()) == 16


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_a_secret_is_in_no_byte_of_the_store_whatever_fails(opened, store_path):
    agent = opened()
    agent.secret("key", KEY)
    agent.checkpoint("start")

    def cancel(effect):
        holdfast.effect().progress(f"asked with {KEY}")
        raise OSError(f"DELETE /?key={KEY} failed")

    @holdfast.tool(compensate=cancel, retries=0)
    def book(what):
        return what

    @holdfast.tool(effect="read", breaker=holdfast.Breaker(failures=1))
    def look():
        raise OSError(f"GET /?key={KEY} failed")

    @holdfast.tool(probe=lambda effect: holdfast.Found({"sent with": KEY}))
    def send(what):
        raise OSError(f"POST /?key={KEY} failed")

    def child(agent):
        agent.secret("child's", "another-0123456789")
        raise ValueError(f"{KEY} and another-0123456789")

    def failing(agent):
        book("flight")
        with pytest.raises(errors.ToolFailed):
            look()
        assert KEY not in str(send("mail"))
        with pytest.raises(errors.ToolFailed) as caught:
            agent.spawn(child, "sub").join()
        assert KEY not in str(caught.value)
        raise ValueError(f"the key {KEY} is refused")

    for options in ({}, {"replan": lambda setback: None}):
        with pytest.raises((ValueError, errors.RollbackBlocked)):
            agent.run(holdfast.durable(failing).options(**options))
    for info in agent.runs():
        assert KEY not in info.error
    everything = stored(agent, store_path)
    assert b"<secret key>" in everything
    assert KEY.encode() not in everything
    assert b"another-0123456789" not in everything
    assert all(
        secret.encode() not in stored(opened("trip-7/sub"), store_path) for secret in (KEY, "another-0123456789")
    )


def test_a_signal_with_a_secret_in_it_is_not_sent(opened):
    agent = opened()
    agent.secret("key", KEY)
    with pytest.raises(errors.Unencodable, match="the signal go"):
        agent._store.signal("trip-7", "go", {"token": KEY})


def test_a_secret_does_not_come_back_with_a_rollback_a_branch_or_a_restart(opened):
    agent = opened()
    agent.secret("approval", "granted by Ada")
    agent.checkpoint("approved")
    agent.secret("approval", None)
    agent.state["x"] = 1
    agent.checkpoint("used")
    agent.rollback("approved")
    branch = agent.branch("try-b", "approved")
    for one in (agent, branch):
        with pytest.raises(errors.UnknownSecret):
            one.secret("approval")
    with pytest.raises(errors.UnknownSecret):
        opened().secret("approval")


# -- what restarts share and branches do not ------------------------------------------------------------------------
