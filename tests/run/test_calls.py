"""One call after another: recorded, answered from the record, in doubt, diverged."""

from __future__ import annotations

import contextlib
import inspect
import threading

import pytest

import holdfast
from holdfast import errors
from holdfast.run import records, scope
from holdfast.run.durables import durable
from holdfast.run.effects import Absent, Found, Unknown
from holdfast.run.past import Past
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash


class World:
    """The outside: what was really done."""

    def __init__(self):
        self.calls = []


@pytest.fixture
def world():
    return World()


def test_a_finished_run_starts_anew_and_one_with_an_id_returns_its_result(world):
    @tool(effect="read")
    def search(city):
        world.calls.append(city)
        return [city, len(world.calls)]

    @durable
    def travel(agent, city):
        return search(city)

    bench = Bench()
    assert bench.run(travel, "Lisbon") == ["Lisbon", 1]
    assert bench.run(travel, "Lisbon") == ["Lisbon", 2]
    assert bench.run(travel, "Lisbon", id="x") == ["Lisbon", 3]
    assert bench.run(travel, "Lisbon", id="x") == ["Lisbon", 3]
    assert world.calls == ["Lisbon"] * 3


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


def test_declared_exceptions_replay_as_themselves_and_others_as_tool_failed():
    class Full(Exception):
        pass

    asked = []

    @tool(effect="read", raises=(Full,))
    def seat(row):
        asked.append(row)
        if row == 1:
            raise Full("row", row)
        raise ValueError("no such row")

    def work(agent):
        seen = []
        for row in (1, 2):
            try:
                seat(row)
            except (Full, errors.ToolFailed) as error:
                seen.append((type(error).__name__, error.args if isinstance(error, Full) else error.error_type))
        if len(asked) == 2:
            raise Crash
        return seen

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    asked.append("again")
    assert bench.crashed().run(work) == [("Full", ("row", 1)), ("ToolFailed", "ValueError")]
    assert asked == [1, 2, "again"]


def test_a_result_that_cannot_be_saved_is_done_and_lost():
    calls = []

    @tool
    def act():
        calls.append(1)
        return threading.Lock()

    def work(agent):
        try:
            act()
        except errors.ResultLost as error:
            return error.tool

    bench = Bench()
    assert bench.run(work, id="r") == "act"
    assert bench.crashed(bench.ledger.count - 1).run(work, id="r") == "act"
    assert calls == [1]


def test_arguments_that_cannot_be_encoded_are_refused_before_anything_happens():
    calls = []

    @tool
    def act(thing):
        calls.append(1)

    def work(agent):
        act({"lock": threading.Lock()})

    bench = Bench()
    with pytest.raises(errors.Unencodable, match="arguments"):
        bench.run(work)
    assert not calls
    assert not [record for _, record in bench.ledger.records() if isinstance(record, records.Intent)]


def test_a_write_that_was_interrupted_stops_the_run_until_somebody_decides():
    calls = []

    @tool
    def pay(amount):
        calls.append(amount)
        raise Crash

    def work(agent):
        return pay(5)

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    again = bench.crashed()
    with pytest.raises(errors.InDoubt) as caught:
        again.run(work)
    assert caught.value.effects[0].tool == "pay"
    assert caught.value.effects[0].args == {"amount": 5}
    assert calls == [5]
    run = next(iter(Past(again.ledger.records()).runs.values()))
    assert run.status == "attention"


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


def test_nothing_new_starts_while_a_write_is_in_doubt_even_if_the_program_looks_away():
    done = []

    @tool
    def pay():
        raise ConnectionError("lost")

    @tool
    def mail():
        done.append(1)

    def work(agent):
        with contextlib.suppress(errors.InDoubt):
            pay()
        mail()

    with pytest.raises(errors.InDoubt):
        Bench().run(work)
    assert not done


def test_a_write_is_retried_only_when_it_says_that_nothing_happened(monkeypatch):
    monkeypatch.setattr("holdfast.run.resilience.backoff_s", lambda attempt: 0.0)
    calls = []

    @tool(retries=2)
    def pay():
        calls.append(holdfast.effect().key)
        if len(calls) < 3:
            raise errors.FailedBeforeEffect("no connection")
        return "paid"

    assert Bench().run(lambda agent: pay()) == "paid"
    assert len(calls) == 3
    assert len(set(calls)) == 1


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


def test_a_changed_program_is_diverged_where_a_write_follows(world):
    @tool(effect="read")
    def search(city):
        return 1

    @tool(effect="idempotent")
    def book(offer):
        if offer == 1:
            raise Crash
        return offer

    city = "Lisbon"

    def work(agent):
        return book(search(city))

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    city = "Porto"
    with pytest.raises(errors.Diverged) as caught:
        bench.crashed().run(work)
    assert caught.value.path == "0"
    assert caught.value.expected == "search(city='Lisbon')"
    assert caught.value.actual == "search(city='Porto')"


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


def test_a_failure_that_ended_a_run_is_dropped_when_it_is_run_again():
    calls = []

    @tool(effect="read")
    def search():
        calls.append(1)
        if len(calls) == 1:
            raise OSError("down")
        return "found"

    bench = Bench()

    def work(agent):
        return search()

    with pytest.raises(errors.ToolFailed):
        bench.run(work)
    assert bench.crashed().run(work) == "found"


def test_an_unfinished_run_with_other_arguments_is_refused():
    @tool(effect="read")
    def search(city):
        raise Crash

    def work(agent, city):
        return search(city)

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work, "Lisbon")
    with pytest.raises(errors.RunUnfinished):
        bench.crashed().run(work, "Porto")


def test_state_is_compared_at_checkpoints():
    number = 1

    def work(agent):
        agent.state["n"] = number
        agent.checkpoint("one")
        raise Crash

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    number = 2
    with pytest.raises(errors.Diverged, match="state"):
        bench.crashed().run(work)


def test_progress_is_there_when_the_tool_is_run_again():
    seen = []

    @tool(effect="idempotent")
    def long():
        seen.append(holdfast.effect().last_progress)
        holdfast.effect().progress({"page": 3})
        if len(seen) == 1:
            raise Crash
        return "all"

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(lambda agent: long())
    assert bench.crashed().run(lambda agent: long()) == "all"
    assert seen == [None, {"page": 3}]


def test_streams_are_recorded_when_complete_and_a_consumer_may_stop_early():
    made = []

    @tool(effect="read", stream=True)
    def words():
        for word in ("a", "b", "c"):
            made.append(word)
            yield word

    def work(agent):
        first = list(words())
        second = []
        for word in words():
            second.append(word)
            if word == "b":
                break
        if len(made) == 5:
            raise Crash
        return first, second

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    made.append("again")
    assert bench.crashed().run(work) == (["a", "b", "c"], ["a", "b"])
    assert made == ["a", "b", "c", "a", "b", "again"]


def test_tools_inside_tools_are_below_them_and_a_replay_does_not_enter():
    calls = []

    @tool(effect="idempotent")
    def inner(n):
        calls.append(n)
        return n

    @tool(effect="idempotent")
    def outer():
        return inner(1) + inner(2)

    def work(agent):
        found = outer(), inner(3)
        if len(calls) == 3:
            calls.append("crash")
            raise Crash
        return found

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    paths = [record.path for _, record in bench.ledger.records() if isinstance(record, records.Done)]
    assert paths == ["0/0", "0/1", "0", "1"]
    assert bench.crashed().run(work) == (3, 3)
    assert calls == [1, 2, 3, "crash"]


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


def test_two_tools_of_one_name_are_refused_in_a_run():
    calls = []

    def make(number):
        if number == 1:

            @tool(name="same")
            def one():
                calls.append(1)

            return one

        @tool(name="same")
        def two():
            calls.append(2)

        return two

    first, second = make(1), make(2)

    def work(agent):
        first()
        second()

    with pytest.raises(errors.BadName, match="two tools"):
        Bench().run(work)
    assert calls == [1]


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


def test_equal_arguments_have_equal_fingerprints_plain_or_not():
    from holdfast.run.arguments import fingerprint

    bench = Bench()
    bench.state["offer"] = {"id": 7, "seats": [1, 2], "tags": {"a"}}
    one = fingerprint({"offer": bench.state["offer"]}, bench.registry)
    assert one == fingerprint({"offer": {"id": 7, "seats": [1, 2], "tags": {"a"}}}, bench.registry)
    assert one != fingerprint({"offer": {"id": 8, "seats": [1, 2], "tags": {"a"}}}, bench.registry)
    left = fingerprint({"offer": 1, "request": "u1"}, bench.registry, ["request"])
    assert left == fingerprint({"offer": 1, "request": "u2"}, bench.registry, ["request"])


def test_a_call_after_the_end_of_the_run_is_refused():
    kept = []

    @tool
    def pay():
        raise AssertionError

    def work(agent):
        kept.append(scope.here())

    Bench().run(work)
    from holdfast.run.scope import within

    with within(kept[0]), pytest.raises(errors.NoAgent, match="ended"):
        pay()
