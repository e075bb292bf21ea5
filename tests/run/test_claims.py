"""A plain loop after a restore: nothing is done twice, and where that cannot be told, it says so."""

from __future__ import annotations

import contextlib
import uuid

import pytest

import holdfast
from holdfast import errors
from holdfast.run.effects import Absent, Found
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash


@pytest.fixture
def world():
    return []


def test_a_fresh_uuid_is_the_same_call_when_it_is_volatile_and_raises_when_nobody_can_tell(world):
    @tool(volatile=("request", "order.id"))
    def book(flight, request, order=None):
        world.append(flight)
        return "booked"

    @tool
    def mail(text, request):
        world.append(text)

    def loop():
        assert book("TP1", str(uuid.uuid4()), {"id": str(uuid.uuid4()), "seat": 4}) == "booked"
        mail("done", str(uuid.uuid4()))

    bench = Bench()
    with bench.using(0):
        loop()
    with bench.crashed().using(0), pytest.raises(errors.MaybeRepeated) as caught:
        loop()
    assert [effect.tool for effect in caught.value.unclaimed] == ["mail"]
    assert world == ["TP1", "done"]


def test_a_write_that_was_tried_again_is_one_write(world):
    @tool(probe=lambda effect: Absent(), retries=1)
    def pay(amount):
        world.append(amount)
        if len(world) == 1:
            raise ConnectionError("before it was sent")
        return "paid"

    @tool(effect="idempotent", retries=1)
    def put(what):
        world.append(what)
        if len(world) == 3:
            raise ConnectionError
        return "put"

    bench = Bench()
    with bench.using(0):
        assert [pay(5), put(6)] == ["paid", "put"]
    with bench.crashed().using(0) as loop:
        assert len(loop.unclaimed) == 2
        assert [pay(5), put(6)] == ["paid", "put"]
        assert not loop._left
    assert world == [5, 5, 6, 6]


# -- with a real agent ------------------------------------------------------------------------------------------


class Desk:
    """A program with a loop: a tool, a state, and a place where it is interrupted."""

    def __init__(self, path):
        self.path = path
        self.paid = []

        @holdfast.tool
        def pay(amount):
            self.paid.append(amount)
            return len(self.paid)

        @holdfast.tool(effect="idempotent")
        def mark(what):
            self.paid.append((what, holdfast.effect().key))
            return what

        self.pay, self.mark = pay, mark

    @contextlib.contextmanager
    def session(self, branch="main"):
        """`with agent:`, in a process that is killed at the end: nothing is saved on the way out."""
        with holdfast.open(self.path) as store, store.agent("a", branch=branch) as agent:
            yield agent


@pytest.fixture
def desk(store_path):
    return Desk(store_path)


def test_a_loop_that_takes_a_checkpoint_first_does_not_pay_twice(desk):
    def turn(agent):
        agent.state["turn"] = agent.state.get("turn", 0) + 1
        agent.checkpoint("turn begins")
        return desk.pay(5)

    with desk.session() as agent:
        assert turn(agent) == 1
    for _ in range(2):  # restored, a checkpoint, and interrupted again before the payment is known
        with desk.session() as agent:
            agent.state["turn"] = agent.state.get("turn", 0) + 1
            agent.checkpoint("turn begins")
    with desk.session() as agent:
        assert turn(agent) == 1
        agent.checkpoint("paid")
    with desk.session() as agent:
        assert turn(agent) == 2
    assert desk.paid == [5, 5]


def test_a_checkpoint_before_the_block_does_not_hide_what_happened(desk):
    with desk.session() as agent:
        desk.pay(5)
    with holdfast.open(desk.path) as store:
        agent = store.agent("a")
        agent.state["x"] = 1
        agent.checkpoint()
        agent.run(lambda agent: agent.checkpoint("in a run") and None)
        with agent:
            assert desk.pay(5) == 1
    assert desk.paid == [5]


def test_what_happened_is_given_up_when_the_program_says_that_it_is_known(desk):
    with desk.session() as agent:
        desk.pay(5)
        desk.pay(6)
    with desk.session() as agent:
        with pytest.raises(errors.MaybeRepeated, match=r"agent\.accept") as caught:
            desk.pay(7)
        agent.accept(caught.value.unclaimed[0])
        with pytest.raises(errors.MaybeRepeated):
            desk.pay(7)
        agent.checkpoint()
    with desk.session() as agent:
        with pytest.raises(errors.MaybeRepeated) as caught:
            desk.pay(7)
        assert [effect.args for effect in caught.value.unclaimed] == [{"amount": 6}]
        agent.accept()
        assert desk.pay(7) == 3
    assert desk.paid == [5, 6, 7]


def test_a_branch_offers_what_its_checkpoint_did_not_know(desk):
    with desk.session() as agent:
        desk.pay(5)
    with desk.session() as agent:
        agent.state["x"] = 1
        agent.checkpoint("before")
        agent._store.branch("a", "try-b")
        assert desk.pay(5) == 1
        agent.checkpoint("after")
        agent._store.branch("a", "try-c")
    with desk.session("try-b"):
        assert desk.pay(5) == 1
    with desk.session("try-c"):
        assert desk.pay(5) == 2
    assert desk.paid == [5, 5]


def test_a_loose_call_in_doubt_stops_runs_too_until_somebody_decides(desk):
    @holdfast.tool
    def send(text):
        desk.paid.append(text)
        raise Crash

    with pytest.raises(Crash), desk.session() as agent:
        send("hello")
    with desk.session() as agent:
        with pytest.raises(errors.InDoubt):
            agent.run(lambda agent: 1)
        assert agent.runs() == []
        with pytest.raises(errors.InDoubt):
            desk.pay(5)
        (effect,) = agent.effects()
        agent.resolve(effect, "done", result="sent", why="it is in the log")
        assert send("hello") == "sent"
        assert desk.pay(5) == 2
        assert agent.run(lambda agent: 1) == 1
    assert desk.paid == ["hello", 5]


def test_a_repeatable_call_that_failed_is_made_again_with_its_key(desk):
    @holdfast.tool(effect="idempotent")
    def put(what):
        desk.paid.append(holdfast.effect().key)
        if len(desk.paid) == 1:
            raise ValueError("try later")
        return what

    with desk.session(), pytest.raises(errors.ToolFailed):
        put(1)
    with desk.session():
        assert put(1) == 1
    assert len(desk.paid) == 2
    assert len(set(desk.paid)) == 1


def test_a_write_that_is_known_not_to_have_happened_is_in_nobodys_way(desk):
    @holdfast.tool
    def send(text):
        raise errors.FailedBeforeEffect("no connection")

    with desk.session(), pytest.raises(errors.ToolFailed):
        send("hello")
    with desk.session(), pytest.raises(errors.ToolFailed):
        send("other words")


def test_inside_the_block_the_agent_is_current_and_afterwards_it_is_not(desk):
    with desk.session() as agent:
        assert holdfast.current() is agent
        late = agent.context()
    with pytest.raises(errors.NoAgent):
        holdfast.current()
    with pytest.raises(errors.NoAgent):
        late.run(desk.pay, 5)
    assert desk.pay(5) == 1
    assert holdfast.effect().status == "unrecorded"


def test_a_handle_that_only_reads_records_nothing(desk):
    with desk.session() as agent:
        agent.checkpoint()
    with holdfast.open(desk.path) as store, store.agent("a", readonly=True) as agent:
        assert desk.pay(5) == 1
        assert agent.effects() == []


# -- calls that were under way when a checkpoint was taken -------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "idempotent"])
def test_a_call_that_was_under_way_at_the_checkpoint_and_ended_after_it_is_claimed(desk, kind):
    @holdfast.tool(effect=kind)
    def send(text):
        agent.checkpoint("meanwhile")
        desk.paid.append(text)
        return "sent"

    with desk.session() as agent:
        assert send("hello") == "sent"
    with desk.session() as agent:
        if kind == "write":
            with pytest.raises(errors.MaybeRepeated):
                send("other words")
        assert send("hello") == "sent"
        assert desk.paid == ["hello"]
        agent.checkpoint("known")
    with desk.session() as agent:
        assert send("hello") == "sent"
    assert desk.paid == ["hello", "hello"]


def test_an_outcome_that_came_after_the_checkpoint_stays_offered_through_more_of_them(desk):
    @holdfast.tool
    def send(text):
        agent.checkpoint("meanwhile")
        desk.paid.append(text)
        return "sent"

    with desk.session() as agent:
        send("hello")
    for number in range(2):
        with desk.session() as agent:
            agent.state["x"] = number
            agent.checkpoint("not known yet")
    with desk.session() as agent:
        assert send("hello") == "sent"
    assert desk.paid == ["hello"]


@pytest.mark.parametrize("answer", [Found("sent"), Absent(), None])
def test_a_call_that_was_under_way_at_the_checkpoint_and_was_interrupted_is_in_doubt(desk, answer):
    @holdfast.tool(probe=None if answer is None else lambda effect: answer)
    def send(text):
        if not desk.paid:
            agent.checkpoint("meanwhile")
        desk.paid.append(text)
        if len(desk.paid) == 1:
            raise Crash
        return "sent"

    with pytest.raises(Crash), desk.session() as agent:
        send("hello")
    with desk.session() as agent:
        if answer is None:
            with pytest.raises(errors.InDoubt):
                send("hello")
        else:
            assert send("hello") == "sent"
            agent.checkpoint("known")
    assert len(desk.paid) == (2 if isinstance(answer, Absent) else 1)
    if answer is not None:
        with desk.session() as agent:  # meant anew
            assert send("hello") == "sent"
        assert len(desk.paid) == (3 if isinstance(answer, Absent) else 2)


def killed_in_a_repeatable_call(desk):
    """A process that is killed in a call, after somebody else has taken a checkpoint; returns the tool."""

    @holdfast.tool(effect="idempotent")
    def put(what):
        desk.paid.append(holdfast.effect().key)
        if len(desk.paid) == 1:
            agent = holdfast.current()
            agent.checkpoint("meanwhile")
            agent._store.flush()
            agent._host.ledger.append = lambda *_records, **_options: 0  # killed: nothing more is written
            raise Crash
        return what

    with pytest.raises(Crash), desk.session():
        put(1)
    return put


def test_a_repeatable_call_that_was_cut_off_after_the_checkpoint_keeps_its_key(desk):
    put = killed_in_a_repeatable_call(desk)
    with desk.session() as agent:
        assert put(1) == 1
        agent.checkpoint("known")
    with desk.session():
        assert put(1) == 1
    first, again, anew = desk.paid
    assert first == again != anew


def test_a_repeatable_call_that_was_cut_off_and_given_up_is_not_offered_again(desk):
    put = killed_in_a_repeatable_call(desk)
    with desk.session() as agent:
        agent.accept()
        agent.checkpoint("known")
    with desk.session():
        assert put(1) == 1
    first, anew = desk.paid
    assert first != anew


def test_a_call_that_was_under_way_at_the_target_of_a_rollback_still_answers(desk):
    @holdfast.tool
    def send(text):
        agent.checkpoint("meanwhile")
        desk.paid.append(text)
        return "sent"

    @holdfast.tool(compensate=lambda effect: desk.paid.append("cancelled"))
    def book(what):
        desk.paid.append(what)

    with desk.session() as agent:
        send("hello")
        book("flight")
        agent.state["x"] = 1
        agent.checkpoint("known")
        agent.rollback("meanwhile")
        assert send("hello") == "sent"
        assert desk.paid == ["hello", "flight", "cancelled"]
    with desk.session() as agent:
        assert send("hello") == "sent"
    assert desk.paid == ["hello", "flight", "cancelled"]


def test_no_read_starts_while_something_is_in_doubt(opened):
    asked = []

    @holdfast.tool
    def pay():
        raise ConnectionError("gone")

    @holdfast.tool(effect="read")
    def look():
        asked.append(1)

    with opened() as agent:
        with pytest.raises(errors.InDoubt):
            pay()
        with pytest.raises(errors.InDoubt):
            look()
    with opened() as agent:
        with pytest.raises(errors.InDoubt):
            look()
        assert agent.now() is not None  # nobody outside is asked
        agent.resolve(agent.effects()[0], "not-done")
        look()
    assert asked == [1]
