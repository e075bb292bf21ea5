"""Retries, timeouts, breakers, fallbacks, checkpoints around calls, modes."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

import holdfast
from holdfast import errors
from holdfast.run.durables import durable
from holdfast.run.effects import Absent, Found
from holdfast.run.resilience import BACKOFF_MAX_S, Breaker, backoff_s, notes_of
from holdfast.run.tools import tool
from tests.run.bench import Crash
from tests.run.test_waiting import Clock, line, timed


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def bench(clock):
    return timed(clock)


def state_of(bench, name):
    return notes_of(bench).get("breaker", name)


# -- retries ------------------------------------------------------------------------------------------------


def test_pauses_grow_differ_and_have_a_limit():
    first = [backoff_s(1) for _ in range(20)]
    assert all(0.1 <= pause <= 0.2 for pause in first)
    assert len(set(first)) > 1
    assert backoff_s(5) > max(first)
    assert BACKOFF_MAX_S * 0.9 < backoff_s(1_000) <= BACKOFF_MAX_S


def test_a_read_is_retried_and_waits_longer_each_time(bench, clock):
    tried = []

    @tool(effect="read", retries=3)
    def look():
        tried.append(clock.slept)
        if len(tried) < 4:
            raise OSError("not yet")
        return "found"

    assert bench.run(lambda agent: look()) == "found"
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert len(gaps) == 3
    assert gaps == sorted(gaps)


def test_an_answer_is_not_retried(bench):
    class Declined(errors.FailedBeforeEffect):
        pass

    tried = []

    @tool(retries=5, raises=(Declined,), breaker=2, fallback=lambda: "other card")
    def pay():
        tried.append(1)
        raise Declined("no money")

    for _ in range(3):
        with pytest.raises(Declined):
            bench.run(lambda agent: pay())
    assert len(tried) == 3


def test_a_timed_out_async_write_goes_through_its_probe(bench):
    calls = []

    async def probe(effect):
        return Absent() if len(calls) < 2 else Found("really")

    @tool(timeout_s=0.05, retries=1, probe=probe)
    async def book():
        calls.append(1)
        await asyncio.sleep(5)

    async def work(agent):
        return await book()

    assert asyncio.run(bench.arun(work)) == "really"
    assert len(calls) == 2


def test_an_async_stream_has_its_time_and_no_more(bench):
    @tool(effect="read", stream=True, timeout_s=0.2)
    async def words():
        for word in ("a", "b", "c"):
            yield word
            await asyncio.sleep(0.15)

    async def work(agent):
        return [word async for word in words()]

    with pytest.raises(errors.ToolFailed) as caught:
        asyncio.run(bench.arun(work))
    assert caught.value.error_type == "TimeoutError"


# -- breakers -----------------------------------------------------------------------------------------------


class Service:
    def __init__(self, fails=True):
        self.fails = fails
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.fails:
            raise errors.FailedBeforeEffect("down")
        return self.calls


def paying(service, **options):
    @tool(**options)
    def pay():
        return service()

    return pay


def attempt(bench, pay):
    def work(agent):
        try:
            return pay()
        except errors.Outcome as error:
            return type(error).__name__

    return bench.run(work)


def test_a_breaker_opens_refuses_tries_again_and_closes(bench, clock):
    service = Service()
    pay = paying(service, breaker=Breaker(failures=3, reset_s=60))
    assert [attempt(bench, pay) for _ in range(5)] == ["ToolFailed"] * 3 + ["BreakerOpen"] * 2
    assert service.calls == 3
    clock.sleep(59)
    assert attempt(bench, pay) == "BreakerOpen"
    clock.sleep(2)
    assert attempt(bench, pay) == "ToolFailed"  # the one that may try
    assert attempt(bench, pay) == "BreakerOpen"
    assert service.calls == 4
    clock.sleep(61)
    service.fails = False
    assert attempt(bench, pay) == 5
    assert state_of(bench, "pay")["state"] == "closed"
    service.fails = True
    assert attempt(bench, pay) == "ToolFailed"


def test_restarts_share_a_breaker(bench, clock):
    service = Service()
    pay = paying(service, breaker=3)
    for _ in range(3):
        assert attempt(bench, pay) == "ToolFailed"
        bench = timed(clock, bench.crashed(bench.ledger.count))
    assert attempt(bench, pay) == "BreakerOpen"
    assert service.calls == 3
    clock.sleep(61)
    service.fails = False
    assert attempt(timed(clock, bench.crashed(bench.ledger.count)), pay) == 4


def test_a_date_that_was_set_back_does_not_keep_a_breaker_open_for_ever(bench, clock):
    pay = paying(Service(), breaker=Breaker(failures=1, reset_s=60))
    assert attempt(bench, pay) == "ToolFailed"
    clock.date_us -= 10**9 * 10**6
    assert attempt(bench, pay) == "BreakerOpen"
    clock.sleep(61)
    assert attempt(bench, pay) == "ToolFailed"


def test_a_breaker_takes_a_checkpoint_as_it_opens_that_a_replay_does_not_look_for(bench):
    service = Service()
    pay = paying(service, breaker=2)
    steps = []

    @tool(effect="read")
    def look():
        steps.append(1)
        return len(steps)

    @durable
    def work(agent):
        agent.state["before"] = look()
        seen = []
        for _ in range(4):
            try:
                pay()
            except errors.Outcome as error:
                seen.append(type(error).__name__)
        agent.checkpoint("after")
        if len(steps) == 1:
            look()
            raise Crash
        return seen

    saves = len(bench.states)
    with pytest.raises(Crash):
        bench.run(work)
    assert len(bench.states) == saves + 3  # the run's own, the breaker's, the program's
    again = bench.crashed(bench.ledger.count)
    assert again.run(work) == ["ToolFailed", "ToolFailed", "BreakerOpen", "BreakerOpen"]
    assert service.calls == 2


def test_a_breaker_takes_no_checkpoint_in_a_plain_loop_which_takes_its_own(bench):
    pay, saves = paying(Service(), breaker=1), len(bench.states)
    with bench.using(0), pytest.raises(errors.ToolFailed):
        pay()
    assert state_of(bench, "pay")["state"] == "open"
    assert len(bench.states) == saves


def test_a_tool_that_asks_for_checkpoints_is_not_called_in_a_plain_loop(bench):
    done = []

    @tool(checkpoint="after")
    def book(city):
        done.append(city)

    with bench.using(0), pytest.raises(errors.BadOption, match="a plain loop takes its own"):
        book("Lisbon")
    assert done == []


def test_a_state_that_cannot_be_saved_does_not_keep_a_breaker_from_opening(bench, caplog):
    pay = paying(Service(), breaker=1)

    def save(label, record, **_options):
        raise errors.Unencodable("a socket")

    bench.save = save
    assert attempt(bench, pay) == "ToolFailed"
    assert state_of(bench, "pay")["state"] == "open"
    assert "no checkpoint" in caplog.text


def test_only_one_call_at_a_time_tries_an_open_breaker(bench, clock):
    entered, leave = threading.Event(), threading.Event()
    slow = [False]

    @tool(effect="read", breaker=Breaker(failures=1, reset_s=60))
    def look():
        if not slow[0]:
            raise OSError("down")
        entered.set()
        leave.wait(180)
        return "up"

    async def work(agent):
        with pytest.raises(errors.ToolFailed):
            look()
        clock.sleep(61)
        slow[0] = True
        trying = asyncio.create_task(look.acall())
        assert await asyncio.to_thread(entered.wait, 180)
        with pytest.raises(errors.BreakerOpen):
            look()
        leave.set()
        return await trying, look()

    assert asyncio.run(bench.arun(work)) == ("up", "up")


def test_a_cancelled_try_leaves_the_breaker_to_the_next(bench, clock):
    entered = []

    @tool(effect="read", breaker=Breaker(failures=1, reset_s=60))
    async def look():
        entered.append(1)
        if len(entered) == 1:
            raise OSError
        if len(entered) == 2:
            await asyncio.sleep(60)
        return "up"

    async def work(agent):
        with pytest.raises(errors.ToolFailed):
            await look()
        clock.sleep(61)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await look()
        return await look()

    assert asyncio.run(bench.arun(work)) == "up"


def test_an_open_call_is_made_again_whatever_the_breaker_says(bench, clock):
    calls = []

    @tool(effect="idempotent", breaker=Breaker(failures=1, reset_s=10**6))
    def put():
        calls.append(holdfast.effect().key)
        if len(calls) == 1:
            notes_of(bench).put("breaker", "put", {"state": "open", "failures": 1, "until": 2**60})
            raise Crash
        return "there"

    def work(agent):
        return put()

    with pytest.raises(Crash):
        bench.run(work)
    again = timed(clock, bench.crashed(bench.ledger.count))
    assert again.run(work) == "there"
    assert calls[0] == calls[1]


def test_tools_that_name_one_breaker_share_it(bench):
    shared = Breaker(failures=1, name="payments")
    service = Service()
    assert attempt(bench, paying(service, name="pay-a", breaker=shared)) == "ToolFailed"
    assert attempt(bench, paying(service, name="pay-b", breaker=shared)) == "BreakerOpen"


# -- fallbacks ----------------------------------------------------------------------------------------------


def test_a_fallback_answers_for_a_tool_that_failed_and_the_replay_says_the_same(bench):
    service = Service()
    used = []

    def later(amount):
        used.append((amount, holdfast.effect().error))
        return {"queued": amount}

    @tool(fallback=later, retries=1)
    def pay(amount):
        service()

    def work(agent):
        got = pay(7)
        if len(used) == 1 and not again:
            raise Crash
        return got

    again = []
    with pytest.raises(Crash):
        bench.run(work)
    again.append(1)
    assert bench.crashed().run(work) == {"queued": 7}
    assert used == [(7, "FailedBeforeEffect: down")]
    assert service.calls == 2
    (call,) = [call for call in line(bench).calls() if call.tool == "pay"]
    assert call.status == "fallback"


def test_a_fallback_is_used_while_the_breaker_is_open(bench):
    service = Service()
    pay = paying(service, breaker=2, fallback=lambda: "later")
    assert [attempt(bench, pay) for _ in range(4)] == ["later"] * 4
    assert service.calls == 2


@pytest.mark.parametrize(("kind", "used"), [("read", True), ("idempotent", False), ("write", False)])
def test_a_fallback_is_used_only_where_it_is_known_that_nothing_happened(bench, kind, used):
    @tool(effect=kind, fallback=lambda: "other")
    def act():
        raise OSError("connection lost")

    def work(agent):
        return act()

    if used:
        assert bench.run(work) == "other"
    else:
        with pytest.raises(errors.Outcome):
            bench.run(work)


def test_a_fallback_that_was_begun_is_gone_on_with_after_a_crash(bench):
    service = Service()
    sent = []

    @tool(effect="idempotent")
    def mail():
        sent.append(holdfast.effect().key)
        return "sent"

    def by_mail():
        mail()
        if len(sent) == 1 and not again:
            raise Crash
        return "by mail"

    again = []
    pay = paying(service, fallback=by_mail)

    def work(agent):
        return pay()

    with pytest.raises(Crash):
        bench.run(work)
    service.fails = False  # it works again, but the mail is out
    again.append(1)
    other = bench.crashed()
    assert other.run(work) == "by mail"
    assert len(sent) == 1
    assert service.calls == 1


def test_an_async_tool_may_have_a_plain_or_an_async_fallback(bench):
    async def soon():
        await asyncio.sleep(0)
        return "soon"

    @tool(effect="read", fallback=soon)
    async def a():
        raise OSError

    @tool(effect="read", fallback=lambda: "now")
    async def b():
        raise OSError

    async def work(agent):
        return await a(), await b()

    assert asyncio.run(bench.arun(work)) == ("soon", "now")


def test_a_fallback_that_fails_is_the_failure(bench):
    def broken():
        raise LookupError("nothing there either")

    @tool(effect="read", fallback=broken)
    def look():
        raise OSError

    with pytest.raises(errors.ToolFailed) as caught:
        bench.run(lambda agent: look())
    assert caught.value.error_type == "LookupError"


def test_a_plain_tool_cannot_have_an_async_fallback_nor_a_plain_stream_a_timeout():
    async def later(): ...

    with pytest.raises(errors.BadOption):

        @tool(fallback=later)
        def act(): ...

    with pytest.raises(errors.BadOption):

        @tool(effect="read", stream=True, timeout_s=1)
        def words():
            yield 1


# -- checkpoints around calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tool_may_ask_for_a_checkpoint_around_its_calls(bench, when):
    done = []

    @tool(checkpoint=when)
    def act(number):
        done.append(number)
        return number

    def work(agent):
        for number in range(3):
            agent.state["last"] = act(number)
        if not again:
            raise Crash
        return agent.state["last"]

    again = []
    with pytest.raises(Crash):
        bench.run(work)
    assert len(bench.states) == 4
    again.append(1)
    assert bench.crashed().run(work) == 2
    assert done == [0, 1, 2]


def test_an_async_tool_may_ask_for_a_checkpoint_too(bench):
    @tool(checkpoint="before")
    async def act(number):
        return number

    async def work(agent):
        return await asyncio.gather(*(act(number) for number in range(5)))

    assert asyncio.run(bench.arun(work)) == [0, 1, 2, 3, 4]
    assert len(bench.states) == 6


def test_a_checkpoint_of_a_tool_inside_a_tool_is_not_looked_for_again(bench):
    @tool(checkpoint="before")
    def inner():
        return 1

    @tool(effect="read")
    def outer():
        return inner() + 1

    def work(agent):
        got = outer()
        if not again:
            raise Crash
        return got

    again = []
    with pytest.raises(Crash):
        bench.run(work)
    again.append(1)
    assert bench.crashed(bench.ledger.count).run(work) == 2


def test_a_plain_loop_gets_the_answer_of_a_fallback_again(bench):
    service = Service()
    pay = paying(service, fallback=lambda: "later")
    with bench.using(0):
        assert pay() == "later"
    again = bench.crashed(bench.ledger.count)
    with again.using(0):
        assert pay() == "later"
    assert service.calls == 1


# -- modes --------------------------------------------------------------------------------------------------


def test_a_mode_is_set_by_hand_kept_and_must_be_declared(bench):
    assert bench.mode == "normal"
    with pytest.raises(errors.BadOption):
        bench.mode = "cheap"
    bench.declare_modes("full", "cheap", "offline")
    assert bench.mode == "full"
    bench.mode = "cheap"
    again = bench.crashed()
    assert again.mode == "cheap"


def test_breakers_set_the_worst_mode_as_long_as_they_are_open(bench, clock):
    bench.declare_modes("full", "cheap", "offline")
    service = Service()
    a = paying(service, name="a", breaker=Breaker(failures=1, reset_s=60, mode="cheap"))
    b = paying(service, name="b", breaker=Breaker(failures=1, reset_s=60, mode="offline"))
    attempt(bench, b)
    assert bench.mode == "offline"
    attempt(bench, a)
    assert bench.mode == "offline"
    bench.mode = "full"  # somebody knows better
    assert bench.mode == "full"
    clock.sleep(61)
    service.fails = False
    attempt(bench, a)
    attempt(bench, b)
    service.fails = True
    attempt(bench, a)
    assert bench.mode == "cheap"
    clock.sleep(61)
    service.fails = False
    attempt(bench, a)
    assert bench.mode == "full"


def test_a_run_is_told_the_mode_that_it_was_told_before(bench, clock):
    bench.declare_modes("full", "cheap")
    seen = []

    def work(agent):
        seen.append(agent.mode)
        agent.mode = "cheap"
        seen.append(agent.mode)
        if len(seen) == 2:
            raise Crash
        return seen

    with pytest.raises(Crash):
        bench.run(work)
    again = timed(clock, bench.crashed(bench.ledger.count))
    again.declare_modes("full", "cheap")
    assert again.run(work) == ["full", "cheap", "full", "cheap"]
