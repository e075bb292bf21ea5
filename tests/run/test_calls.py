"""One call after another: recorded, answered from the record, in doubt, diverged."""

from __future__ import annotations

import inspect
import threading

import pytest

import holdfast
from holdfast import errors
from holdfast.run import records
from holdfast.run.durables import durable
from holdfast.run.effects import Absent, Found, Unknown
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash


def test_a_crash_at_every_record_repeats_reads_only(world):
    @tool(effect="read")
    def search(city):
        world.calls.append("search")
        return {"id": 7, "tags": {1, 2}}

    @tool(effect="idempotent")
    def book(offer):
        world.calls.append(("book", holdfast.effect().key))
        return (offer, "booked")

    @durable
    def travel(agent, city):
        offer = search(city)
        agent.state["choice"] = offer
        agent.checkpoint("chosen")
        done = book(offer["id"])
        agent.state["done"] = done
        return done

    first = Bench()
    assert first.run(travel, "Lisbon") == (7, "booked")
    keys = {call[1] for call in world.calls if call[0] == "book"}
    for keep in range(1, first.ledger.count):
        bench = first.crashed(keep)
        assert bench.run(travel, "Lisbon") == (7, "booked")
        assert bench.state == {"choice": {"id": 7, "tags": {1, 2}}, "done": (7, "booked")}
    assert {call[1] for call in world.calls if call[0] == "book"} == keys


def test_a_read_costs_no_flush_and_a_write_two():
    @tool(effect="read")
    def look():
        return 1

    @tool
    def act():
        return 2

    bench, flushed = Bench(), []
    append = bench.ledger.append

    def counted(*records, flush=False, **options):
        flushed.append(flush)
        return append(*records, flush=flush, **options)

    flush = bench.ledger.flush

    def counted_flush():
        flushed.append(True)
        flush()

    def work(agent):
        bench.ledger.append, bench.ledger.flush = counted, counted_flush
        for _ in range(10):
            look()
        assert not any(flushed)
        act()
        assert sum(flushed) == 2

    bench.run(work)


def test_what_a_tool_returns_is_its_record_the_first_time_too():
    given = {"items": [1, 2], "pair": (1, 2)}

    @tool(effect="read")
    def look():
        return given

    def work(agent):
        found = look()
        assert found == given
        assert found is not given
        assert type(found["pair"]) is tuple

    Bench().run(work)


@pytest.mark.parametrize(
    ("answer", "dead", "times"),
    [
        (Found("paid"), True, 1),
        (Found("paid"), False, 1),
        (Absent(), True, 2),
        (Absent(), False, 1),
        (Unknown(), True, 1),
        ("yes", True, 1),
    ],
)
def test_a_probe_decides_and_absent_is_believed_only_of_the_dead(answer, dead, times):
    calls = []

    @tool(probe=lambda effect: answer)
    def pay(amount):
        calls.append(holdfast.effect().key)
        if len(calls) == 1:
            raise Crash
        return "paid"

    def work(agent):
        return pay(5)

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    again = bench.crashed(2)  # nothing but the beginning and the intent
    again.dead = dead
    if isinstance(answer, Found) or times == 2:
        assert again.run(work) == "paid"
    else:
        with pytest.raises(errors.InDoubt):
            again.run(work)
    assert len(calls) == times
    assert len(set(calls)) == 1


def test_a_write_that_raises_asks_its_probe_and_adopts_even_none():
    calls = []

    @tool(probe=lambda effect: Found(None))
    def pay():
        calls.append(1)
        raise ConnectionError("lost")

    def work(agent):
        return [pay(), pay()]

    bench = Bench()
    assert bench.run(work, id="r") == [None, None]
    assert bench.crashed(bench.ledger.count - 1).run(work, id="r") == [None, None]
    assert calls == [1, 1]


def test_a_timed_out_write_whose_thread_still_runs_stays_in_doubt():
    leave = threading.Event()

    @tool(timeout_s=0.05, probe=lambda effect: Absent(), retries=3)
    def pay():
        leave.wait(180)

    try:
        with pytest.raises(errors.InDoubt, match="took longer"):
            Bench().run(lambda agent: pay())
    finally:
        leave.set()


def test_a_changed_program_goes_on_live_when_only_reads_follow_unless_strict(caplog):
    calls = []

    @tool(effect="read")
    def search(city):
        calls.append(city)
        if city == "stop":
            raise Crash
        return city

    cities = ["a", "b", "stop"]

    def work(agent):
        return [search(city) for city in cities]

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    cities = ["a", "c", "d"]
    with pytest.raises(errors.Diverged):
        bench.crashed().run(work, strict=True)
    again = bench.crashed()
    assert again.run(work) == ["a", "c", "d"]
    assert calls == ["a", "b", "stop", "c", "d"]
    assert "changed code" in caplog.text
    assert again.crashed(again.ledger.count - 1).run(work) == ["a", "c", "d"]
    assert calls == ["a", "b", "stop", "c", "d"]


def test_a_run_that_ends_before_a_recorded_write_is_diverged():
    wanted = True

    @tool
    def pay():
        return 1

    def work(agent):
        if wanted:
            pay()
            raise Crash

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    wanted = False
    with pytest.raises(errors.Diverged, match="the function ended"):
        bench.crashed().run(work)


def test_a_decorated_tool_looks_like_the_function():
    @tool(effect="read")
    def search(city: str, days: int = 3) -> list[str]:
        """Find offers."""
        return [city] * days

    @tool(effect="read")
    async def later(city: str) -> str:
        """Later."""
        return city

    assert str(inspect.signature(search)) == "(city: 'str', days: 'int' = 3) -> 'list[str]'"
    assert search.__doc__ == "Find offers."
    assert search.__annotations__["days"] == "int"
    assert inspect.isfunction(search)
    assert inspect.iscoroutinefunction(later)
    assert search("x") == ["x"] * 3
    assert search.direct("x") == ["x"] * 3


def test_the_state_by_digest_in_a_read_and_by_content_in_a_write():
    seen = []

    @tool(effect="read")
    def ask(messages):
        return len(messages)

    @tool(effect="idempotent")
    def send(message):
        seen.append(message)

    def work(agent):
        agent.state["messages"] = []
        for number in range(200):
            agent.state["messages"].append({"role": "user", "content": f"{number} " + "x" * 1000})
            ask(agent.state["messages"])
        send(agent.state["messages"][0])

    bench = Bench()
    bench.run(work)
    asked = sum(len(record.encode()) for _, record in bench.ledger.records() if isinstance(record, records.Done))
    assert asked < 200 * 400
    (intent,) = [record for _, record in bench.ledger.records() if isinstance(record, records.Intent)]
    assert len(intent.args) > 1000
