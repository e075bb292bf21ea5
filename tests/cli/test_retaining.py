"""retain and tier on the command line: a dry run first, then for good."""

from __future__ import annotations

import os
import random

import pytest

import holdfast
from holdfast.cli.store import span
from holdfast.errors import BadOption
from tests.limits import limits


@pytest.fixture
def filled(tmp_path):
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        for name in ("trip-7", "trip-8"):
            agent = store.agent(name)
            agent.state["messages"] = []
            for number in range(20):
                agent.state["messages"].append(f"message {number}")
                agent.checkpoint(f"step {number}")
            agent.tag("kept", "step 3")
    return path


def test_retain_shows_first_and_then_does(cli, filled):
    shown = cli("retain", "trip-7", "--last", "2", "--label", "step 1?", store=filled)
    assert (shown.code, "--yes" in shown.err) == (9, True)
    assert "trip-7 (last 2; labels step 1?): 11 stay, 9 go." in shown.out
    assert "head of main, last 2" in shown.out
    assert "tag kept" in shown.out
    assert "In all 9 checkpoints would go, and free about" in shown.out
    done = cli("retain", "--last", "2", "--yes", store=filled)
    assert done.code == 0
    assert "Removed 34 checkpoints." in done.out
    with holdfast.open(filled, readonly=True) as store:
        assert [len(store.agent(name).log()) for name in ("trip-7", "trip-8")] == [3, 3]
        assert store.verify().ok


def test_retain_speaks_json(cli, filled):
    found = cli("retain", "--last", "1", "--newer-than", "1s", "--json", store=filled).json
    assert found["schema"] == "holdfast.retain/1"
    assert not found["done"]
    assert [one["agent"] for one in found["agents"]] == ["trip-7", "trip-8"]
    assert found["agents"][0]["policy"] == {"last": 1, "newer_than_s": 1.0}
    assert {"id", "label", "time", "depth", "why"} == set(found["agents"][0]["kept"][0])


def test_retain_lets_values_of_runs_go(cli, tmp_path):
    path = tmp_path / "runs"

    @holdfast.tool(name="retaining.look", effect="read")
    def look(what: str) -> str:
        return f"seen {what}"

    @holdfast.durable(name="retaining.work")
    def work(agent, what):
        return look(what)

    with holdfast.open(path) as store:
        agent = store.agent("trip-7")
        for what in ("one", "two"):
            agent.run(work.options(id=what), what)
    rules = ("retain", "--branch", "*", "--runs")
    shown = cli(*rules, "1", store=path)
    assert "So do the values of 3 records of its runs." in shown.out
    assert "0 checkpoints, the values of 3 records would go, and free about" in shown.out
    assert cli(*rules, "30d", "--json", store=path).json["values"] == 0
    assert cli("retain", "--runs", "1", store=path).code == 2
    assert cli(*rules, "many", store=path).code == 2
    done = cli(*rules, "1", "--yes", store=path)
    assert "Removed 0 checkpoints, the values of 3 records." in done.out
    assert "holdfast retain" in cli(*rules, "1", "--save", store=path).out
    assert cli("retain", "--json", store=path).json["policies"][0]["policy"] == {"branches": ["*"], "runs": 1}
    listed = cli("effects", "trip-7", store=path)
    assert "retaining.look(…)" in listed.out
    assert "let go" in listed.out
    assert "seen two" in listed.out
    effects = cli("effects", "trip-7", "--json", store=path).json["effects"]
    assert [(one["let_go"], one["args"], one["result"]) for one in effects] == [
        (True, None, None),
        (False, {"what": "two"}, "seen two"),
    ]
    runs = cli("runs", "trip-7", "--json", store=path).json["runs"]
    assert sorted((one["let_go"], one["result"]) for one in runs if one["id"] == "one") == [(True, None)]


@pytest.fixture
def away(tmp_path):
    """A store of which some packs lie in a place that is not there now."""
    path = tmp_path / "photos"
    with holdfast.open(path) as store:
        agent = store.agent("trip-7")
        for number in range(4):
            agent.state["photo"] = random.Random(number).randbytes(300_000)
            agent.checkpoint(f"photo {number}")
        store.tier(tmp_path / "cold")
    (tmp_path / "cold").rename(tmp_path / "away")
    return path


def test_a_place_that_is_away_is_no_damage(cli, away, tmp_path):
    """Every verb that needs it says so and ends with 6; nothing is called lost."""
    place = f"file://{tmp_path}/cold"
    looked = cli("verify", store=away)
    assert looked.code == 6
    # The fourth lies here, but is a change of one that cannot be looked at.
    assert "3 packs and 4 checkpoints could not be looked at" in looked.out
    assert place in looked.out
    assert "Mount it, start it or give its credentials" in looked.out
    assert looked.out.endswith("Everything else is as it was written.\n")
    assert "cannot be trusted" not in looked.out
    told = cli("verify", "--json", store=away)
    assert (told.code, told.json["ok"], told.json["problems"], told.json["affected"]) == (6, False, [], [])
    (one,) = told.json["unreachable"]
    assert (one["place"], one["packs"], len(one["checkpoints"])) == (place, 3, 4)
    restored = cli("verify", "--restore", store=away)
    assert (restored.code, "lost" in restored.out.split("nothing is lost")[-1]) == (6, False)
    assert [line.split()[0] for line in restored.out.splitlines()[1:2]] == ["unknown"]
    dest = str(tmp_path / "dest")
    for words in (
        ("repair",),
        ("repair", "--json"),
        ("repair", "--to", str(tmp_path / "new")),
        ("export", str(tmp_path / "file"), "trip-7"),
        ("show", "trip-7@photo 0"),
        ("diff", "trip-7@photo 0"),
        ("push", dest),
        ("tier", "--back", "--yes"),
    ):
        ended = cli(*words, store=away)
        assert (ended.code, place in ended.err, "nothing is lost" in ended.err) == (6, True, True), words
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "file").exists()
    assert cli("show", "trip-7@photo 3", "--section", "photo", store=away).code == 0
    (tmp_path / "away").rename(tmp_path / "cold")
    for words in (("verify",), ("verify", "--restore"), ("repair",), ("push", dest)):
        assert cli(*words, store=away).code == 0


def test_a_pack_that_is_gone_may_be_in_the_place_that_is_away(cli, away, tmp_path):
    """No row says where a pack is: as long as one of the places does not answer, nothing is called lost."""
    (here,) = (away / "packs").glob("*.pack")
    here.unlink()
    for options in ((), ("--restore",)):
        found = cli("verify", *options, store=away)
        assert (found.code, "cannot be trusted" in found.out) == (6, False), options
    (tmp_path / "away").rename(tmp_path / "cold")
    found = cli("verify", store=away)
    assert found.code == 5
    assert found.out.count("cannot be trusted") == 1
    restored = cli("verify", "--restore", store=away)
    assert restored.code == 5
    assert [line.split()[0] for line in restored.out.splitlines()[1:2]] == ["lost"]


def test_damage_ends_with_5_also_while_a_place_is_away(cli, away):
    (here,) = (away / "packs").glob("*.pack")
    here.write_bytes(bytes(here.stat().st_size))
    found = cli("verify", store=away)
    assert found.code == 5
    assert "could not be looked at" in found.out
    assert " found." in found.out
    restored = cli("verify", "--restore", store=away)
    assert restored.code in {5, 6}, "whichever it meets first: it cannot go on after that"


def test_rules_in_the_store(cli, filled):
    assert cli("retain", store=filled).code == 2
    saved = cli("retain", "--last", "5", "--save", store=filled)
    assert "all others: last 5" in saved.out
    cli("retain", "trip-8", "--last", "1", "--save", store=filled)
    done = cli("retain", "--yes", "--json", store=filled).json
    assert done["done"]
    assert {one["agent"]: len(one["kept"]) for one in done["agents"]} == {"trip-7": 6, "trip-8": 2}
    assert done["policies"] == [
        {"agent": None, "policy": {"last": 5}},
        {"agent": "trip-8", "policy": {"last": 1}},
    ]
    assert "all others: last 5" in cli("retain", "trip-8", "--drop", store=filled).out
    assert "no rules" in cli("retain", "--drop", store=filled).out


@pytest.mark.parametrize(
    "wrong",
    [("--save",), ("--last", "1", "--drop"), ("--newer-than", "soon"), ("--last", "-1"), ("nobody", "--last", "1")],
)
def test_refused(cli, filled, wrong):
    assert cli("retain", *wrong, store=filled).code == 2


def test_tier(cli, tmp_path):
    path, cold = tmp_path / "store", tmp_path / "cold"
    with holdfast.open(path) as store, limits({"SEAL_CHECKPOINTS": 1}):
        agent = store.agent("a")
        for _ in range(3):
            agent.state["weights"] = os.urandom(300_000)
            agent.checkpoint()
    assert "2 packs" in cli("tier", "--to", str(cold), store=path).out
    assert not cold.exists()
    found = cli("tier", "--to", str(cold), "--yes", "--json", store=path).json
    assert (found["schema"], found["packs"], found["done"]) == ("holdfast.tier/1", 2, True)
    assert cli("verify", store=path).code == 0
    assert "2 packs in file://" in cli("doctor", store=path).out
    cold.rename(tmp_path / "away")
    assert "cannot be reached" in cli("doctor", store=path).out
    assert cli("tier", "--back", "--yes", store=path).code == 6
    (tmp_path / "away").rename(cold)
    assert "Moved 2 packs" in cli("tier", "--back", "--yes", store=path).out
    assert cli("tier", store=path).code == 2


def test_a_place_that_has_nothing_any_more_can_be_exchanged_for_another_one(cli, tmp_path):
    path, cold = tmp_path / "store", tmp_path / "cold"
    with holdfast.open(path) as store, limits({"SEAL_CHECKPOINTS": 1}):
        for number in range(3):
            store.agent("a").state["weights"] = os.urandom(300_000)
            store.agent("a").checkpoint(f"c{number}")
        store.tier(cold)
        store.retain(holdfast.Policy(last=1))
    refused = cli("tier", "--to", str(tmp_path / "other"), "--yes", store=path)
    assert (refused.code, "--back" in refused.err) == (2, True)
    assert cli("tier", "--back", "--yes", store=path).code == 0
    assert list(cold.rglob("*.pack")) == []
    assert cli("tier", "--to", str(tmp_path / "other"), "--yes", store=path).code == 0
    assert cli("tier", "--back", "--yes", store=path).code == 0
    assert "from nowhere" in cli("tier", "--back", "--yes", store=path).out


def test_what_another_process_moves_is_found_by_those_who_have_the_store_open(program, tmp_path):
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        agent = store.agent("a")
        for number in range(3):
            agent.state["weights"] = os.urandom(300_000)
            agent.checkpoint(f"c{number}")
        assert program("tier", "--to", str(tmp_path / "cold"), "--yes", store=path).code == 0
        assert len(agent.at("c0").state["weights"]) == 300_000
        assert store.verify().ok
        assert store.stats()["cold"] == [{"place": f"file://{tmp_path}/cold", "packs": 2, "reachable": True}]
    with holdfast.open(path) as store:
        assert program("tier", "--back", "--yes", store=path).code == 0
        assert program("tier", "--to", str(tmp_path / "colder"), "--yes", store=path).code == 0
        with pytest.raises(BadOption, match="packs go to"):
            store.tier(tmp_path / "cold")
        assert store.tier().packs == 2
        assert store.verify().ok


def test_a_cold_place_is_not_inside_a_store(cli, filled, tmp_path):
    holdfast.open(tmp_path / "other").close()
    for place in (filled / "packs", tmp_path / "other" / "x", f"file://{filled}"):
        assert cli("tier", "--to", str(place), "--yes", store=filled).code == 2


def test_spans():
    assert [span(text).total_seconds() for text in ("45s", "90m", "12h", "2d", "1w")] == [
        45,
        5400,
        43200,
        172800,
        604800,
    ]
    for text in ("", "5", "h", "-1d", "1y"):
        with pytest.raises(BadOption):
            span(text)
