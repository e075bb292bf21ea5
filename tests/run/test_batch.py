"""Batches: each item on its own, finished ones skipped, one in doubt in nobody's way."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import holdfast
from holdfast import errors
from tests.run.bench import Crash

HANG_S = 180


class Outside:
    def __init__(self):
        self.calls = []
        self.lock = threading.Lock()
        self.trouble = {}

    def tools(self):
        @holdfast.tool(effect="read")
        def look(n):
            self.done("look", n)
            return n * 10

        @holdfast.tool
        def pay(n):
            self.done("pay", n)
            return {"paid": n}

        @holdfast.tool(effect="idempotent")
        async def book(n):
            await asyncio.sleep(0)
            self.done("book", n)
            return {"booked": n, "key": holdfast.effect().key}

        return look, pay, book

    def done(self, what, n):
        with self.lock:
            self.calls.append((what, n))
        trouble = self.trouble.pop((what, n), None)
        if trouble is not None:
            raise trouble


def effects(store):
    return store.agent("batch").effects()


@pytest.fixture
def outside():
    return Outside()


@pytest.fixture
def opened(reopened):
    return reopened


def test_results_come_in_the_order_of_the_items_and_finished_ones_are_skipped(opened, outside):
    look, pay, _ = outside.tools()

    def work(n):
        time.sleep(0.002 * (n % 3))
        return look(n) + pay(n)["paid"]

    assert opened().map(work, range(40), name="batch", workers=8) == [11 * n for n in range(40)]
    assert len(outside.calls) == 80
    assert opened().map(work, range(40), name="batch") == [11 * n for n in range(40)]
    assert len(outside.calls) == 80
    # More items later: only those are new.
    assert opened().map(work, range(42), name="batch") == [11 * n for n in range(42)]
    assert outside.calls[80:].count(("pay", 41)) == 1
    assert len(outside.calls) == 84
    assert opened().verify().ok


def test_one_in_doubt_or_failing_does_not_stop_the_rest_and_goes_on_when_decided(opened, outside):
    look, pay, _ = outside.tools()

    def work(n):
        return look(n) + pay(n)["paid"]

    outside.trouble = {("pay", 3): ConnectionError("line cut"), ("look", 5): ValueError("no such thing")}
    found = opened().map(work, range(8), name="batch", workers=3)
    assert isinstance(found[3], errors.InDoubt)
    assert isinstance(found[5], errors.ToolFailed)
    assert [one for one in found if isinstance(one, int)] == [0, 11, 22, 44, 66, 77]
    assert [(run.id, run.kind, run.status) for run in opened().runs()] == [("map", "map", "needs attention")]
    items = {effect.args["item"]: effect.status for effect in effects(opened()) if effect.tool == "holdfast.item"}
    assert items == {n: "failed" if n == 5 else "done" for n in range(8) if n != 3}
    # Again: the failed one is tried anew, the one in doubt stays so and is not repeated.
    found = opened().map(work, range(8), name="batch")
    assert isinstance(found[3], errors.InDoubt)
    assert found[5] == 55
    agent = opened().agent("batch")
    (doubtful,) = found[3].effects
    agent.resolve(doubtful.key, "done", result={"paid": 3}, why="asked them")
    with pytest.raises(errors.RunUnfinished, match=r"store\.map"):  # the batch has not ended: it owns its branch
        agent.run(lambda agent: "other work")
    agent.cancel("map")
    assert agent.run(lambda agent: "other work") == "other work"
    assert opened().map(work, range(8), name="batch") == [11 * n for n in range(8)]
    assert outside.calls.count(("pay", 3)) == 1
    assert [run.status for run in opened().runs()] == ["finished", "finished"]
    assert opened().agent("batch").run(lambda agent: "other work") == "other work"
    assert opened().map(work, range(9), name="batch")[-1] == 88


def test_a_crash_in_the_middle_repeats_no_write(opened, outside):
    look, pay, _ = outside.tools()

    def work(n):
        first = pay(n)["paid"]
        if n == 11 and not outside.trouble:
            outside.trouble["crashed"] = True
            raise Crash
        return first + look(n)

    with pytest.raises(Crash):
        opened().map(work, range(30), name="batch", workers=4)
    done = len(outside.calls)
    assert opened().map(work, range(30), name="batch") == [11 * n for n in range(30)]
    assert sorted(n for what, n in outside.calls if what == "pay") == list(range(30))
    assert done < len(outside.calls)


def test_the_first_error_ends_it_when_asked_for(opened, outside):
    look, _, _ = outside.tools()
    outside.trouble = {("look", 2): ValueError("no")}
    failing, begun = [], threading.Event()

    def work(n):
        if n == 2:
            failing.append(threading.current_thread())
            begun.set()
        elif n > 2:
            begun.wait(HANG_S)
            if threading.current_thread() is not failing[0]:
                failing[0].join(HANG_S)  # the worker that failed takes no other item: it ends
        return look(n)

    with pytest.raises(errors.ToolFailed):
        opened().map(work, range(500), name="batch", workers=2, on_error="raise")
    assert len(outside.calls) < 500


def test_items_are_known_by_their_key(opened, outside):
    look, _, _ = outside.tools()

    def work(item):
        return look(item["n"])

    items = [{"n": n} for n in range(6)]
    opened().map(work, items, name="batch", key=lambda item: f"n{item['n']}")
    assert opened().map(work, items[::-1], name="batch", key=lambda item: f"n{item['n']}") == [50, 40, 30, 20, 10, 0]
    assert len(outside.calls) == 6
    with pytest.raises(errors.BadOption, match="two items"):
        opened().map(work, items, name="other", key=lambda item: "same")
    with pytest.raises(errors.BadOption, match="other content"):
        opened().map(work, [{"n": 7}], name="batch", key=lambda item: "n1")
    with pytest.raises(errors.Unencodable):
        opened().map(work, [{"n": object()}], name="batch")
    assert len(outside.calls) == 6


@pytest.mark.parametrize("options", [{"workers": 0}, {"on_error": "ignore"}])
def test_options_that_make_no_sense_are_refused(opened, outside, options):
    with pytest.raises(errors.BadOption):
        opened().map(outside.tools()[0], range(3), name="batch", **options)
    assert not outside.calls


def test_an_item_changes_no_state_and_takes_no_checkpoint(opened, outside):
    look, _, _ = outside.tools()

    def change(n):
        holdfast.current().state["n"] = look(n)

    def save(n):
        holdfast.current().checkpoint("mine")

    (found,) = opened().map(change, [1], name="batch")
    assert isinstance(found, errors.ReadOnly)
    (found,) = opened().map(save, [1], name="second")
    assert isinstance(found, errors.BadOption)
    assert opened().agent("batch").state == {}


def test_async_items(opened, outside):
    _, _, book = outside.tools()

    async def work(n):
        first = await book(n)
        second = await asyncio.gather(book(-n), book(-n))
        return first["booked"], len({one["key"] for one in second})

    found = asyncio.run(opened().amap(work, range(30), name="batch", workers=7))
    assert found == [(n, 2) for n in range(30)]
    assert asyncio.run(opened().amap(work, range(30), name="batch")) == found
    assert len(outside.calls) == 90
    with pytest.raises(errors.BadOption, match="async"):
        opened().map(work, [1], name="batch")


def test_a_batch_is_rolled_back_like_anything_else(opened, outside):
    undone = []

    @holdfast.tool(compensate=lambda effect: undone.append(effect.args["n"]))
    def reserve(n):
        return n

    store = opened()
    store.agent("batch").checkpoint("before")
    assert store.map(reserve, range(5), name="batch") == list(range(5))
    store.agent("batch").rollback("before")
    assert sorted(undone) == list(range(5))
    assert opened().map(reserve, range(5), name="batch") == list(range(5))


@pytest.fixture
def cancelled(opened):
    """A batch that was cancelled in its third item, and what was booked."""
    booked, stop = [], [True]

    @holdfast.tool(name="cancelled-book")
    def book(n):
        booked.append((n, holdfast.effect().key))
        return n

    def item(n):
        found = book(n)
        if n == 2 and stop:
            raise KeyboardInterrupt
        return found

    store = opened()
    with pytest.raises(KeyboardInterrupt):
        store.map(item, range(4), name="batch", workers=1)
    store.agent("batch").cancel("map")
    stop.clear()
    return book, item, booked


def test_what_a_cancelled_batch_has_done_answers_a_plain_loop_and_a_run(opened, cancelled):
    book, _, booked = cancelled
    with opened().agent("batch") as agent:
        assert book(1) == 1
        with pytest.raises(errors.MaybeRepeated):
            book(17)
        agent.checkpoint("one of them")
    assert opened().agent("batch").run(lambda _: [book(0), book(2), book(3)]) == [0, 2, 3]
    assert [n for n, _ in booked] == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [1, 4])
def test_a_cancelled_batch_does_what_is_left_when_it_is_called_again(opened, cancelled, workers):
    _, item, booked = cancelled
    store = opened()
    with store.agent("batch"):
        pass
    assert store.map(item, range(6), name="batch", workers=workers) == list(range(6))
    assert sorted(n for n, _ in booked) == list(range(6))
    assert [run.status for run in store.agent("batch").runs()] == ["finished"]


@pytest.mark.parametrize("loop", [True, False])
def test_what_something_else_was_given_of_a_cancelled_batch_is_not_given_to_it_again(opened, cancelled, loop):
    book, item, booked = cancelled
    if loop:
        with opened().agent("batch") as agent:
            assert book(0) == 0
            agent.checkpoint("one of them")
    else:
        assert opened().agent("batch").run(lambda _: [book(0), book(1)]) == [0, 1]
    assert len(booked) == 3
    store = opened()
    store.agent("batch").accept()
    assert store.map(item, range(4), name="batch") == [0, 1, 2, 3]
    assert [n for n, _ in booked[:3]] == [0, 1, 2]
    assert sorted(n for n, _ in booked[3:]) == [0, 1, 2, 3]
    assert len({key for _, key in booked}) == 7
    assert opened().map(item, range(4), name="batch") == [0, 1, 2, 3]
    assert len(booked) == 7


def test_thousands_of_items(opened, outside, rounds):
    count = rounds(400, 50_000)
    look, _, _ = outside.tools()
    assert opened().map(look, range(count), name="batch") == [10 * n for n in range(count)]
    assert len(outside.calls) == count
    store = opened()
    assert store.map(look, range(count), name="batch") == [10 * n for n in range(count)]
    assert len(outside.calls) == count
