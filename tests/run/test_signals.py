"""Signals: whom they are for, taken once, listed, dropped, and no later run's."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass

import pytest

import holdfast
from holdfast import errors
from tests.lives import CHANGES, dies, point


@holdfast.register(name="signals.Trip")
@dataclass
class Trip:
    note: object = None


@holdfast.durable(name="signals-ask")
def ask(agent, times=1):
    return [agent.wait_for("approval") for _ in range(times)]


def waits(agent, *args, **options):
    with pytest.raises(holdfast.Waiting) as caught:
        agent.run(ask.options(wait=False, **options), *args)
    return caught.value.run


@pytest.fixture
def opened(reopened):
    return reopened


def test_a_duplicate_approval_does_not_approve_the_next_run(opened):
    store = opened()
    agent = store.agent("trip")
    first = waits(agent)
    for _ in range(2):
        store.signal("trip", "approval", "yes")
    assert agent.run(ask) == ["yes"]
    assert [one.status for one in store.signals("trip")] == ["taken", "ended"]
    second = waits(agent)
    assert second != first
    assert store.due() == []
    with pytest.raises(errors.RunEnded, match="finished") as caught:
        store.signal("trip", "approval", "late", run=first)
    assert caught.value.run == first
    store.signal("trip", "approval", "mine", run=second)
    assert agent.run(ask) == ["mine"]


def test_nobody_gets_a_signal_that_is_sent_while_no_run_is_open_unless_it_is_for_any_run(opened):
    store = opened()
    agent = store.agent("trip")
    with pytest.raises(errors.RunEnded, match="no run"):
        store.signal("trip", "approval")
    with pytest.raises(errors.BadOption, match="no run of"):
        store.signal("trip", "approval", run="nobody")
    with pytest.raises(errors.UnknownRevision):
        store.signal("trip", "approval", branch="nowhere")
    sent = store.signal("trip", "approval", "early", any_run=True)
    assert (sent.run, sent.status, sent.value, sent.waits_for) == ("", "pending", "early", ())
    assert agent.run(ask) == ["early"]
    waits(agent)
    with pytest.raises(errors.BadOption, match="one run, or for any"):
        store.signal("trip", "approval", run="x", any_run=True)


def test_one_id_is_one_signal_also_when_it_is_sent_again_to_the_next_run(opened):
    store = opened()
    agent = store.agent("trip")
    run = waits(agent)
    sent = store.signal("trip", "approval", "yes", id="click 17")
    assert (sent.repeated, sent.id, sent.run) == (False, "click 17", run)
    again = store.signal("trip", "approval", "yes", id="click 17")
    assert (again.repeated, again.status) == (True, "pending")
    assert agent.run(ask) == ["yes"]
    waits(agent)
    again = opened().signal("trip", "approval", "yes", id="click 17")
    assert (again.repeated, again.status, again.run) == (True, "taken", run)
    assert len(opened().signals()) == 1
    assert opened().due() == []
    with pytest.raises(errors.BadName):
        opened().signal("trip", "approval", id="")


def test_the_sender_of_a_name_that_nobody_waits_for_is_told_which_are(opened):
    store = opened()
    waits(store.agent("trip"))
    sent = store.signal("trip", "aproval", "yes")
    assert (sent.name in sent.waits_for, sent.waits_for) == (False, ("approval",))
    assert store.signal("trip", "approval", "yes").waits_for == ("approval",)


def test_a_dropped_signal_is_not_taken_and_one_that_was_taken_cannot_be_dropped(opened):
    store = opened()
    agent = store.agent("trip")
    waits(agent, 2)
    wrong, right = (store.signal("trip", "approval", value) for value in ("wrong", "right"))
    assert store.drop_signal("trip", wrong.id).status == "dropped"
    with pytest.raises(errors.BadOption, match="dropped"):
        store.drop_signal("trip", wrong.id)
    waits(agent, 2)
    with pytest.raises(errors.BadOption, match="taken"):
        store.drop_signal("trip", right.id)
    with pytest.raises(errors.BadOption, match="no signal"):
        store.drop_signal("trip", "nothing")
    store.signal("trip", "approval", "second")
    assert agent.run(ask, 2) == ["right", "second"]
    assert [(one.value, one.status) for one in store.signals("trip")] == [
        ("wrong", "dropped"), ("right", "taken"), ("second", "taken"),
    ]  # fmt: skip


def test_an_approval_that_was_taken_before_a_rollback_stays_taken(opened):
    @holdfast.durable(name="signals-twice")
    def twice(agent):
        agent.checkpoint("start")
        return agent.wait_for("approval", timeout_s=0)

    store = opened()
    agent = store.agent("trip")
    with pytest.raises(TimeoutError):
        agent.run(twice)
    run = agent.runs()[0].id
    store.signal("trip", "approval", "yes", run=run)
    assert agent.run(twice) == "yes"
    agent.rollback("start")
    assert [(one.status, one.value) for one in store.signals("trip")] == [("taken", "yes")]
    with pytest.raises(TimeoutError):
        agent.run(twice)


def test_a_run_that_was_rolled_back_takes_no_signal_and_leaves_none_to_a_later_run_of_its_id(opened):
    store = opened()
    agent = store.agent("trip")
    agent.checkpoint("before")
    waits(agent, 2, id="order")
    store.signal("trip", "approval", "first")
    store.signal("trip", "approval", "old")
    store.signal("trip", "other", "old")
    agent.rollback("before")
    with pytest.raises(errors.RunEnded, match="rolled back"):
        store.signal("trip", "approval", run="order")
    assert {one.status for one in store.signals("trip")} == {"ended"}


def test_a_wait_does_not_read_what_was_sent_to_other_runs(opened, monkeypatch):
    from holdfast.run import waiting

    store = opened()
    agent = store.agent("trip")
    for number in range(5):
        waits(agent)
        store.signal("trip", "approval", number)
        store.signal("trip", "approval", "again")
        assert agent.run(ask) == [number]
    seen, read = [], waiting.read
    monkeypatch.setattr(waiting, "read", lambda at, body: seen.append(body) or read(at, body))
    waits(agent)
    assert seen == []


@holdfast.tool(name="signals.note", effect="idempotent")
def note(value):
    point()
    return value


@holdfast.durable(name="signals-work")
def work(agent):
    got = [note(agent.wait_for("go"))]
    agent.state["got"] = list(got)
    agent.checkpoint("first")
    got.append(note(agent.wait_for("go")))
    return [*got, list(got)]


def resumed(path):
    with holdfast.open(path) as store:
        agent = store.agent("trip")
        return agent.resume(agent.runs()[0].id)


@pytest.mark.slow
def test_a_signal_is_taken_once_wherever_the_process_is_killed(tmp_path, rounds):
    ready, here = tmp_path / "ready", tmp_path / "store"
    with holdfast.open(ready) as store:
        with pytest.raises(holdfast.Waiting):
            store.agent("trip").run(work.options(wait=False))
        for value in ("first", "second", "third"):
            store.signal("trip", "go", value)
    for at in itertools.count(1, rounds(2, 1)):
        shutil.copytree(ready, here)
        died = dies(lambda: resumed(here), at, *CHANGES)
        if died:
            assert resumed(here) == ["first", "second", ["first", "second"]]
        with holdfast.open(here) as store:
            assert [one.status for one in store.signals("trip")] == ["taken", "taken", "ended"]
            assert store.verify().ok
        shutil.rmtree(here)
        if not died:
            break
    assert at > 12
