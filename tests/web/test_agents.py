"""The fleet and the store's health: what each line says, and that a page is a part of the whole list."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import closing, suppress

import pytest

import holdfast
from holdfast.web import agents as view
from holdfast.web.agents import agents
from holdfast.web.asked import Asked
from holdfast.web.health import health
from holdfast.web.server import Listening
from tests.cli.conftest import FORMS, differences


def ask(read, store, **query):
    return read(store, Asked(query={name: str(value) for name, value in query.items()}))


@holdfast.durable
def wait(agent):
    return agent.wait_for("go")


@holdfast.durable
def fail(agent, order=0):
    raise ValueError("no such order")


@holdfast.durable
def succeed(agent):
    return 7


@holdfast.durable
def die(agent):
    agent.checkpoint("about to die")
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted(place):
    with holdfast.open(place) as store:
        store.agent("interrupted", when=None).run(die)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """One agent in each status, named so."""
    place = tmp_path_factory.mktemp("fleet") / "store"
    child = multiprocessing.get_context("fork").Process(target=interrupted, args=(place,))
    child.start()
    child.join()
    with holdfast.open(place) as store:
        for name, function in (("waiting", wait), ("failed", fail), ("finished", succeed)):
            with (
                closing(store.agent(name, when=None)) as agent,
                suppress(ValueError, holdfast.Waiting, holdfast.ToolFailed),
            ):
                agent.run(function.options(wait=False))
        with closing(store.agent("idle", when=None)) as agent:
            agent.checkpoint("saved")
        store.agent("empty", when=None).close()
        with closing(store.agent("open", when=None)) as agent:
            agent.checkpoint("at it")
            yield store


def test_each_agent_has_the_status_that_it_is_in(fleet):
    found = {one["name"]: one for one in ask(agents, fleet)["agents"]}
    assert {name: one["status"] for name, one in found.items()} == {name: name for name in found}
    assert found["open"]["writer"]["pid"] == os.getpid()
    assert found["failed"]["runs"] == {"failed": 1}
    assert found["waiting"]["run"]["signal"] == "go"
    while found["idle"]["size_bytes"] is None:  # a busy machine does not get through all of them at once
        found = {one["name"]: one for one in ask(agents, fleet)["agents"]}
    assert found["idle"]["size_bytes"] > 0


def test_one_at_work_has_a_heartbeat_and_its_progress_and_nothing_in_doubt(tmp_path):
    def crawl(told):
        @holdfast.tool(name="agents.crawl")
        def pages():
            holdfast.effect().progress("12 of 240")
            told.send_bytes(b"at it")
            time.sleep(600)

        with holdfast.open(tmp_path / "store") as store, store.agent("busy", when=None) as agent:
            agent.run(holdfast.durable(name="agents.crawl-all")(lambda agent: pages()))

    context = multiprocessing.get_context("fork")
    heard, told = context.Pipe(duplex=False)
    process = context.Process(target=crawl, args=(told,))
    process.start()
    heard.recv_bytes()
    with holdfast.open(tmp_path / "store") as store:
        (line,) = ask(agents, store)["agents"]
        assert (line["status"], line["in_doubt"], line["writer"]["pid"]) == ("running", 0, process.pid)
        assert line["heartbeat"] == line["updated"] > line["doing"]["at"]
        assert (line["doing"]["tool"], line["doing"]["progress"]) == ("agents.crawl", "12 of 240")
        process.kill()
        process.join()
        (line,) = ask(agents, store)["agents"]
        assert (line["status"], line["in_doubt"], line["heartbeat"]) == ("needs attention", 1, None)


@pytest.mark.parametrize("status", ["waiting", "failed", "interrupted", "open"])
def test_agents_are_found_by_their_status(fleet, status):
    assert [one["name"] for one in ask(agents, fleet, status=status)["agents"]] == [status]
    assert not ask(agents, fleet, status=status, q="nobody")["agents"]


def test_the_fleet_is_counted(fleet):
    counted = ask(agents, fleet)["fleet"]
    assert (counted["waiting"], counted["interrupted"], counted["open"]) == (1, 1, 1)


def test_pages_searches_and_orders_are_parts_of_the_whole_list(fleet, monkeypatch):
    whole = [one["name"] for one in ask(agents, fleet, sort="name")["agents"]]
    assert whole == sorted(whole)
    monkeypatch.setattr(view, "ON_PAGE", 3)
    pages = [ask(agents, fleet, sort="name", page=page) for page in (1, 2, 3, 4)]
    assert [one["name"] for page in pages for one in page["agents"]] == whole
    assert {page["pages"] for page in pages} == {3}
    assert {page["total"] for page in pages} == {len(whole)}
    assert {one["name"] for one in ask(agents, fleet, q="ai")["agents"]} == {"failed", "waiting"}
    assert [one["name"] for one in ask(agents, fleet, q="f*")["agents"]] == ["finished", "failed"]


@pytest.mark.parametrize("sort", view.SORTS)
def test_every_order_is_the_same_in_pages_and_in_one_piece(fleet, monkeypatch, sort):
    whole = ask(agents, fleet, sort=sort)
    names = [one["name"] for one in whole["agents"]]
    assert set(names) == {one["name"] for one in ask(agents, fleet)["agents"]}
    if sort == "status":
        assert names[:3] == ["interrupted", "waiting", "open"]
    elif sort == "checkpoints":
        numbers = [one["checkpoints"] for one in whole["agents"]]
        assert numbers == sorted(numbers, reverse=True)
    elif sort == "oldest":
        assert names == [one["name"] for one in ask(agents, fleet, sort="updated")["agents"]][::-1]
    some = [one for one in names if "i" in one]
    assert [one["name"] for one in ask(agents, fleet, sort=sort, q="*i*")["agents"]] == some
    monkeypatch.setattr(view, "ON_PAGE", 3)
    pages = [ask(agents, fleet, sort=sort, page=page) for page in (1, 2, 3, 4)]
    assert [one["name"] for page in pages for one in page["agents"]] == names
    assert {page["total"] for page in pages} == {len(names)}


def test_each_agent_in_a_status_is_on_a_page_however_many_runs_it_has(tmp_path, monkeypatch):
    names = {f"agent-{number}" for number in range(7)}
    with holdfast.open(tmp_path / "store") as store:
        for name in sorted(names):
            with closing(store.agent(name, when=None)) as agent:
                for order in range(4):
                    with suppress(ValueError, holdfast.ToolFailed):
                        agent.run(fail, order)
        monkeypatch.setattr(view, "ON_PAGE", 2)
        pages = [ask(agents, store, status="failed", page=page) for page in (1, 2, 3, 4)]
    assert [len(page["agents"]) for page in pages] == [2, 2, 2, 1]
    assert {one["name"] for page in pages for one in page["agents"]} == names
    assert all(page["pages"] > page["page"] for page in pages[:3])
    assert (pages[0]["at_least"], pages[3]["at_least"], pages[3]["total"]) == (True, False, 7)


def test_a_run_that_waits_is_told_however_many_came_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(view, "RUNS_MOST", 3)
    with holdfast.open(tmp_path / "store") as store:
        with closing(store.agent("a", when=None)) as agent:
            agent.checkpoint("first")
            store.branch("a", "side")
            with closing(store.agent("a", branch="side", when=None)) as other, suppress(holdfast.Waiting):
                other.run(wait.options(wait=False))
            for number in range(4):
                agent.run(succeed.options(id=str(number)))
        (line,) = ask(agents, store)["agents"]
        assert (line["status"], line["runs"]) == ("waiting", {"waiting": 1, "finished": 3})


def test_what_was_worked_out_is_worked_out_again_after_a_change(fleet):
    assert ask(agents, fleet, q="idle")["agents"][0]["runs"] == {}
    with closing(fleet.agent("idle", when=None)) as agent:
        agent.run(succeed)
        (line,) = ask(agents, fleet, q="idle")["agents"]
        assert (line["runs"], line["status"]) == ({"finished": 1}, "open")
    assert ask(agents, fleet, q="idle")["agents"][0]["status"] == "finished"


def test_health_has_the_documented_form_and_says_what_needs_somebody(fleet):
    found = ask(health, fleet)
    assert not differences(FORMS["health"], {"schema": "holdfast.health/1", **found}, "health")
    facts = {one["name"]: one for one in found["facts"]}
    assert facts["Open runs"]["level"] == "warning"
    assert facts["Keeping"]["value"] == "everything"
    assert [one["agent"] for one in found["writers"]] == ["open"]
    fleet.set_policy(holdfast.Policy(last=100))
    assert "would free" in {one["name"]: one for one in ask(health, fleet, retention=1)["facts"]}["Keeping"]["detail"]


def test_a_port_that_is_taken_makes_way_for_the_next_and_addresses_are_checked():
    first, doors = Listening().bound()
    with first:
        second, others = Listening().bound()
        second.close()
    assert doors.origins != others.origins
    assert all(one.startswith(("http://127.0.0.1:", "http://localhost:")) for one in doors.origins | others.origins)
    for wrong in (
        Listening(url="ftp://x"), Listening(url="https://x/path"), Listening(path="/nowhere/s", url="http://x"),
        Listening(path="/tmp/s"), Listening(secret="/nowhere", url="http://x"), Listening(port=70_000),
        Listening(host="203.0.113.1", port=0), Listening(host="0.0.0.0"), Listening(host="::", port=0),
    ):  # fmt: skip
        with pytest.raises(holdfast.HoldfastError):
            wrong.bound()
