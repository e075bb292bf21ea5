"""Lists over many agents: patterns, pages that are short and exact, and what needs somebody."""

from __future__ import annotations

import multiprocessing
import time

import pytest

import holdfast
from holdfast import errors
from holdfast.run import listing
from tests.lives import die, dies
from tests.run.test_opened import check, place, places  # noqa: F401 - fixtures


@holdfast.tool(effect="write", name="fleet-pay")
def pay(amount: int) -> int:
    if amount < 0:
        raise OSError("the line went dead")
    return amount


@holdfast.durable(name="fleet-work")
def work(agent, what: str) -> str:
    if what == "wait":
        agent.wait_for("go")
    if what == "sleep":
        agent.sleep(3600)
    if what == "fail":
        raise ValueError(what)
    pay(-1 if what == "doubt" else 1)
    if what == "stop":
        raise KeyboardInterrupt
    return what


def do(store, name, what="finish", id="r"):
    """A run of an agent of that name, however it ends."""
    agent = store.agent(name)
    try:
        agent.run(work.options(id=id, wait=False), what)
    except (errors.Waiting, errors.InDoubt, ValueError, KeyboardInterrupt):
        pass
    finally:
        agent.close()


def names(found):
    return [one.name for one in found]


def of(found):
    return [(one.agent, one.status) for one in found]


def test_agents_are_listed_in_pages_and_by_patterns(place):  # noqa: F811
    store = place.open()
    for name in ("trip-1", "trip-2", "desk", "trip-10", "a[1]", "a1"):
        store.agent(name).checkpoint("made")
    assert names(store.agents()) == ["a1", "a[1]", "trip-10", "desk", "trip-2", "trip-1"]
    page = store.agents(limit=2)
    assert (names(page), page.more) == (["a1", "a[1]"], 4)
    page = store.agents("trip-*", limit=2, sort="name")
    assert (names(page), page.more) == (["trip-1", "trip-10"], 1)
    assert names(store.agents("trip-?")) == ["trip-2", "trip-1"]
    assert names(store.agents("a[1]")) == ["a[1]"]  # an agent that is called so
    assert names(store.agents("TRIP-*")) == []
    with pytest.raises(errors.UnknownAgent, match="trip-3"):
        store.agents("trip-3")
    for wrong in ({"limit": 0}, {"sort": "size"}):
        with pytest.raises(errors.BadOption):
            store.agents(**wrong)


def test_an_agent_that_records_or_goes_back_has_changed_last(place):  # noqa: F811
    store = place.open()
    one, two = store.agent("one"), store.agent("two")
    first = one.checkpoint("first")
    one.checkpoint("second")
    two.checkpoint("later")
    assert names(store.agents()) == ["two", "one"]
    one.rollback(first)
    assert names(store.agents()) == ["one", "two"]
    two.run(work, "finish")
    assert names(store.agents()) == ["two", "one"]
    one.branch("other")
    three = store.agent("three")
    assert names(store.agents()) == ["three", "two", "one"]
    assert store.agents("three")[0].updated is None
    three.close()
    two.close()
    store.agent("one", readonly=True)
    assert names(store.agents(limit=1)) == ["three"]  # looking changes nothing
    assert store.verify().ok


def test_a_page_of_runs_is_what_reading_everything_would_give(place):  # noqa: F811
    store = place.open()
    for number in range(6):
        do(store, f"a-{number}", "wait" if number == 2 else "finish")
    do(store, "a-0", id="again")
    do(store, "b", "fail")
    everything = store.runs()
    assert [(info.agent, info.id) for info in everything] == [
        ("b", "r"), ("a-0", "again"), ("a-5", "r"), ("a-4", "r"), ("a-3", "r"), ("a-2", "r"), ("a-1", "r"),
        ("a-0", "r"),
    ]  # fmt: skip
    for limit in range(1, 9):
        page = store.runs(limit=limit)
        assert page == everything[:limit]
        assert bool(page.more) == (limit < 8)
    assert of(store.runs("a-*", status="finished", limit=2)) == [("a-0", "finished"), ("a-5", "finished")]
    assert of(store.runs("a-*", status="waiting")) == [("a-2", "waiting")]
    assert of(store.runs(status="failed")) == [("b", "failed")]
    assert of(store.runs("b", branch="main")) == [("b", "failed")]
    assert store.runs("b", branch="other") == []
    assert store.open_runs() == {"waiting": 1}
    with pytest.raises(errors.BadOption):
        store.runs(sort="name")


def test_what_needs_somebody_comes_first(place):  # noqa: F811
    store = place.open()
    for name, what in (("doubt", "doubt"), ("come", "wait"), ("stopped", "stop"), ("late", "sleep"), ("deaf", "wait")):
        do(store, name, what)
    for number in range(5):
        do(store, f"fine-{number}")
    store.signal("come", "go")
    store.signal("deaf", "other")
    first = store.runs(sort="urgent", limit=4)
    assert of(first) == [
        ("doubt", "needs attention"), ("stopped", "interrupted"), ("come", "waiting"), ("fine-4", "finished"),
    ]  # fmt: skip
    assert [info.due for info in first] == [False, False, True, False]
    assert first.more
    assert of(store.runs(sort="urgent"))[:3] == of(first)[:3]
    assert len(store.runs(sort="urgent")) == 10
    assert store.runs(sort="urgent", limit=10) == store.runs(sort="urgent")
    assert of(store.runs(sort="urgent", limit=2)) == of(first)[:2]
    assert store.open_runs() == {"needs attention": 1, "interrupted": 1, "due": 1, "waiting": 3}
    assert store.open_runs("d*") == {"needs attention": 1, "waiting": 1}
    assert [info.agent for info in store.due()] == ["come"]
    agent = store.agent("come")
    agent.resume("r")
    assert not agent.runs()[0].due


def test_a_run_that_failed_needs_somebody_until_the_next_one_begins(place):  # noqa: F811
    store = place.open()
    for name, what in (("came", "wait"), ("again", "fail"), ("bad", "fail"), ("worse", "fail"), ("given up", "fail")):
        do(store, name, what)
    store.signal("came", "go")
    do(store, "again", id="next")
    store.cancel("given up", "r")
    for number in range(5):
        do(store, f"fine-{number}")
    first = [("came", "waiting"), ("worse", "failed"), ("bad", "failed")]
    assert of(store.runs(sort="urgent", limit=4)) == [*first, ("fine-4", "finished")]
    assert of(store.runs(sort="urgent"))[:3] == first
    assert store.runs(sort="urgent", limit=20) == store.runs(sort="urgent")


def slowly(where, told):
    @holdfast.tool(name="fleet-slow")
    def slow():
        holdfast.effect().progress("half of it")
        told.send_bytes(b"at it")
        time.sleep(600)

    with holdfast.open(where) as store, store.agent("slow", when=None) as agent:
        agent.run(holdfast.durable(name="fleet-slowly")(lambda agent: slow()))


def test_a_call_that_is_going_on_is_running_and_in_doubt_once_its_process_is_gone(place):  # noqa: F811
    context = multiprocessing.get_context("fork")
    heard, told = context.Pipe(duplex=False)
    other = context.Process(target=slowly, args=(place.where, told))
    other.start()
    heard.recv_bytes()
    store = place.open()
    try:
        (seen,) = store.effects()
        assert (seen.status, [one.how for one in seen.attempts], seen.last_progress) == (
            "running",
            ["running"],
            "half of it",
        )
        assert of(store.runs()) == [("slow", "running")]
        assert not store.effects(in_doubt=True)
        assert [one.status for one in store.agent("slow", readonly=True).effects()] == ["running"]
    finally:
        other.kill()
        other.join()
    deadline = time.monotonic() + 60
    while not (found := store.effects(in_doubt=True)):  # a server hears of the end of a client a moment after it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (seen,) = found
    assert (seen.status, [one.how for one in seen.attempts]) == ("in doubt", ["in doubt"])


def test_what_failed_is_found_without_reading_the_others(places, monkeypatch):  # noqa: F811
    there, here = places("there").open(), places().open()
    for number in range(9):
        do(here, f"fine-{number}")
    for name in ("bad", "worse"):
        do(here, name, "fail")
    do(there, "far", "fail")
    there.push(here)
    here.agent("bad").branch("side").close()
    read, lines = listing.View.past, []
    monkeypatch.setattr(listing.View, "past", lambda view: lines.append(view.name) or read(view))
    assert of(here.runs(status="failed")) == [("far", "failed"), ("worse", "failed"), ("bad", "failed")]
    assert set(lines) == {"far", "worse", "bad"}


def test_everything_in_doubt_is_in_one_list(place):  # noqa: F811
    store = place.open()
    for number in range(3):
        do(store, f"fine-{number}", "wait" if number else "finish")
    do(store, "run", "doubt")
    loop = store.agent("loop")
    with loop:
        assert pay(5) == 5
        with pytest.raises(errors.InDoubt):
            pay(-1)
    check(store)
    found = store.effects(in_doubt=True)
    assert [(one.agent, one.branch, one.tool, one.status) for one in found] == [
        ("loop", "main", "fleet-pay", "in doubt"), ("run", "main", "fleet-pay", "in doubt"),
    ]  # fmt: skip
    assert [one.agent for one in store.effects("r*", in_doubt=True)] == ["run"]
    assert [one.agent for one in store.effects(in_doubt=True, limit=1)] == ["loop"]
    newest = store.effects(limit=1)
    assert ([one.agent for one in newest], newest.more) == (["loop"], 5)
    loop = store.agent("loop")
    loop.resolve(found[0], "done", result=1, why="I looked")
    assert [one.agent for one in store.effects(in_doubt=True)] == ["run"]
    check(store)
    assert store.verify().ok


def test_doubts_that_came_from_elsewhere_are_listed_too(places):  # noqa: F811
    store, other = places().open(), places("other").open()
    loop = store.agent("loop")
    with loop, pytest.raises(errors.InDoubt):
        pay(-1)
    loop.close()
    do(store, "run", "doubt")
    do(store, "quiet")
    store.backup(other)
    assert {one.agent for one in other.effects(in_doubt=True)} == {"run", "loop"}
    assert of(other.runs(status="needs attention")) == [("run", "needs attention")]
    copy = other.agent("loop")
    copy.accept()  # it goes on there, and what is in doubt stays so
    assert {one.agent for one in other.effects(in_doubt=True)} == {"run", "loop"}
    check(other)


def test_a_write_that_a_kill_interrupted_in_a_plain_loop_is_listed(store_path):
    @holdfast.tool(effect="write", name="fleet-deadly")
    def deadly(amount):
        return amount if amount == 1 else die()

    def loop():
        with holdfast.open(store_path) as store, store.agent("loop"):
            deadly(1)
            deadly(2)

    assert dies(loop, 0)
    with holdfast.open(store_path) as store:
        do(store, "other")
        assert [(one.agent, one.args) for one in store.effects(in_doubt=True)] == [("loop", {"amount": 2})]
        check(store)
        assert store.verify().ok


def test_verify_misses_the_row_of_an_effect_that_is_not_settled(store_path):
    with holdfast.open(store_path) as store:
        loop = store.agent("loop")
        with loop, pytest.raises(errors.InDoubt):
            pay(-1)
        store._db.change(lambda change: change.tx.do("DELETE FROM open"))
        assert not store.verify().ok
