"""``holdfast when`` and ``holdfast stats``: what they say, for people and for programs."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import apsw
import pytest

import holdfast
from holdfast import Policy, When
from holdfast.cli.text import size
from tests.cli.conftest import EVIL


@pytest.fixture
def place(tmp_path):
    """Two agents with policies, and one that has never been saved."""
    path = tmp_path / "place"
    with holdfast.open(path) as store:
        agent = store.agent("trip-7", when=When(every_steps=1, adaptive=True))
        for number in range(5):
            agent.state["n"] = number
            agent.step()
        agent.checkpoint("by hand")
        store.agent("trip-8", when=None).checkpoint(EVIL)
        store.agent("new")
        store.set_policy(Policy(last=1), "trip-7")
    return path


@pytest.fixture
def run(cli, place):
    return partial(cli, store=place)


def test_when_says_in_words_what_a_policy_does_did_and_cost(run):
    ended = run("when", "trip-7")
    assert ended.code == 0
    assert "It saves at every step." in ended.out
    assert "By what is known now, adaptive saves about every" in ended.out
    assert "every_steps" in ended.out
    assert "The program stood still for" in ended.out
    assert "saves only when its program, or LangGraph, says so" in run("when", "trip-8").out
    assert "no checkpoint yet" in run("when", "new").out
    assert "It follows cost and failures" in run("when", "new").out
    found = run("when", "trip-7", "--json").json
    assert found["when"] == {"every_steps": 1, "adaptive": True}
    assert found["triggers"] == {"steps": 5, "": 1}
    assert found["interval_s"] >= 1
    assert [one["trigger"] for one in found["recent"]] == ["", *["steps"] * 5]
    assert found["recent"][0]["stall_s"] is None  # the newest: nobody has written down what it cost
    assert all(one["stall_s"] > 0 for one in found["recent"][1:])


def test_when_says_that_a_file_says_something_else_by_now(run, place):
    word = "holdfast.toml says something else by now"
    assert word not in run("when", "trip-7").out
    (place / "holdfast.toml").write_text('[when.agents."trip-*"]\nevery_s = 30\n')
    assert word in run("when", "trip-7").out
    assert word not in run("when", "trip-8").out  # its program says that it is saved by hand
    with holdfast.open(place) as store:
        agent = store.agent("trip-8")
        agent.state["n"] = 1
        agent.checkpoint()
    assert run("when", "trip-8", "--json").json["words"][0] == "It saves 30 seconds after the last checkpoint."
    assert word not in run("when", "trip-8").out
    (place / "holdfast.toml").write_text("[when]\nevry_s = 30\n")
    ended = run("when", "trip-8")
    assert ended.code == 2
    assert "line 2, when: there is no 'evry_s'" in ended.err


def test_when_says_how_often_an_agent_has_failed(run, place):
    assert "failed or went back" not in run("when", "trip-7").out
    with holdfast.open(place) as store:
        agent = store.agent("trip-7", when=When(adaptive=True))
        agent.state["n"] = 100
        agent.rollback("by hand")
        agent.state["n"] = 101
        agent.checkpoint()
    assert "Its programs failed or went back 1 time." in run("when", "trip-7").out
    assert run("when", "trip-7", "--json").json["failures"] == 1


def test_free_room_in_the_catalog_is_counted_once(run, place):
    with closing(apsw.Connection(str(place / "store.db"))) as catalog:
        catalog.execute("CREATE TABLE room (data); INSERT INTO room VALUES (zeroblob(100000)); DROP TABLE room")
    sizes = run("stats", "--json").json["bytes"]
    assert sizes["free"] > 0
    assert f"The store takes {size(sizes['catalog'] + sizes['log'] + sizes['packs'])}." in run("stats").out


def test_stats_of_one_agent_have_charts_and_of_all_a_table(run):
    one = run("stats", "trip-7")
    assert "trip-7: 6 checkpoints" in one.out
    assert "every_steps" in one.out
    assert "#" * 30 in one.out or "█" * 30 in one.out
    assert "policy of what to keep would free" in one.out
    every = run("stats")
    assert every.code == 0
    assert [line.split()[0] for line in every.out.splitlines()[:-1]] == ["agent", "new", "trip-8", "trip-7"]
    assert "trip-8" not in run("stats", "trip-7", "-n", "2").out
    assert "4 older checkpoints not looked at" in run("stats", "trip-7", "-n", "2").out
    assert run("stats", "nobody").code != 0


def test_stats_in_json_have_the_documented_form(run):
    found = run("stats", "--json").json
    by_name = {one["agent"]: one for one in found["agents"]}
    trip = by_name["trip-7"]
    assert (trip["checkpoints"], trip["more"], trip["failures"]) == (6, 0, 0)
    assert trip["frees_bytes"] > 0
    assert 0 < trip["share"] <= 1
    assert trip["logical_bytes"] > 0 < trip["stored_bytes"]
    assert by_name["trip-8"]["frees_bytes"] is None
    assert by_name["trip-8"]["when"] is None
    assert by_name["new"]["stall"] is None


def test_what_a_command_saves_is_not_the_programs_and_says_nothing_of_its_policy(run):
    assert run("undo", "trip-7").code == 0
    assert run("rollback", "trip-7", "--to", "#1", "--yes").code == 0
    words = run("when", "trip-7").out
    assert "It saves at every step." in words
    assert "an undo" in words
    assert run("when", "trip-7", "--json").json["triggers"] == {"steps": 5, "": 1, "undo": 1}


def test_unsaved_changes_that_a_rollback_keeps_were_not_asked_for_by_the_program(run, place):
    with holdfast.open(place) as store:
        agent = store.agent("trip-7", when=None)
        agent.state["n"] = 100
        agent.rollback("#1")
        assert agent.checkpoint("again").trigger == ""
        assert store.costs("trip-7").triggers == {"steps": 5, "": 2, "rescue": 1}


def test_log_shows_what_asked_for_a_checkpoint(run):
    out = run("log", "trip-7").out.splitlines()
    assert out[1].endswith("by hand")
    assert all(line.endswith("[steps]") for line in out[2:])
    found = run("log", "trip-7", "--json").json
    assert [one["trigger"] for one in found["checkpoints"]] == ["", *["steps"] * 5]


def test_nothing_that_an_agent_saved_acts_on_the_terminal(run):
    for verb in ("when", "stats"):
        assert "\x1b]" not in run(verb, "trip-8").out
