"""Explain finds the change that broke an agent, says how sure it is, and says so when it does not know."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import BadOption
from holdfast.travel import explain as explaining
from holdfast.travel.failure import Graph, _parsed, of_dump

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
try:
    import diagnosis
    import diagnosis_cases as cases
finally:
    del sys.path[0]


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path, durability="batched") as store:
        yield store


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    """A case and its store, which is only read."""
    folder = tmp_path_factory.mktemp("race")
    with holdfast.open(folder / "store", durability="batched") as store:
        yield store, made(store, folder, "shopper", "race", 100)


def made(store, tmp_path, agent, family, seed=0, told=""):
    return cases.make(store, cases.drawn(agent, family, "tune", seed, told), tmp_path)


@pytest.mark.parametrize(
    ("agent", "family", "seed"),
    [("dispatcher", "done twice", 0), ("monitor", "memory overwritten", 100)],
)
def test_the_injected_change_is_found_from_a_dump(store, tmp_path, agent, family, seed):
    told(store, made(store, tmp_path, agent, family, seed))


def test_a_race_between_two_tasks_is_found_from_a_dump(race):
    told(*race)


def told(store, one):
    report = store.explain(one.dump)
    best = report.found
    assert best is not None
    assert diagnosis.right((best.checkpoint.depth, best.path), one)
    assert best.evidence
    assert 0 < best.confidence <= 1
    assert sum(claim.confidence for claim in report.claims) + report.not_found <= 1.0001
    assert json.loads(json.dumps(report.to_json()))["found"] is True
    assert str(report).splitlines()[0] == report.failure.error


def test_an_agent_without_a_failure_is_not_explained(store):
    agent = store.agent("sound", when=None)
    agent.state["n"] = 0
    for number in range(30):
        agent.state["n"] = number
        agent.checkpoint()
    report = store.explain("sound")
    assert not report
    assert report.found is None
    assert "not found" in str(report)


def test_a_program_that_the_surroundings_ended_is_not_explained(store, tmp_path):
    case = cases.drawn("shopper", "disk full", "tune", 0, "")
    report = store.explain(cases.make_control(store, case, tmp_path).dump)
    assert report.failure.environment
    assert not report


def test_an_empty_agent_is_not_explained(store):
    store.agent("empty", when=None)
    assert not store.explain("empty")


def test_a_check_and_invariants_are_evidence(store):
    agent = store.agent("trip-7", when=None)
    agent.state.update({"budget": 100, "note": ""})
    agent.checkpoint("begun")
    for number in range(12):
        agent.state["budget"] = 100 - number if number < 8 else -900 - number
        agent.checkpoint(f"step {number}")
    report = store.explain("trip-7", check="budget >= 0", invariants=["budget > -500", "exists(nonsense)"])
    facts = [text for name, text in report.facts if name in {"bisect", "violated"}]
    assert "budget >= 0 is first violated at #10 step 8" in facts
    assert report.claims[0].checkpoint.label == "step 8"


def test_what_qualifies_a_checked_fact_is_said_with_it(store):
    agent = store.agent("trip-7", when=None)
    for number, budget in enumerate([1, -1, 1, 1, -1, -1]):
        agent.state["budget"] = budget
        agent.checkpoint(f"c{number}")
    told = dict(store.explain("trip-7", check="bugdet > 0", invariants=["budget >= 0"]).facts)
    assert (
        told["bisect"]
        == "bugdet > 0 is first violated at #1 c0, nowhere state.bugdet is in no checkpoint that was looked at"
    )
    assert told["violated"] == "budget >= 0 is violated since #5 c4, before #2 c1 to #2 c1 was bad, too"
    agent.state["budget"] = 1
    agent.checkpoint("mended")
    report = store.explain("trip-7", invariants=["not (bugdet < 0)", "budget + 'x' > 0", "budget <"])
    assert not report
    unchecked = [text for name, text in report.facts if name == "unchecked"]
    assert unchecked[0].endswith("is bad, of 7 checkpoints.; state.bugdet is in no checkpoint that was looked at")
    assert "none of 7 checkpoints of trip-7 could be checked" in unchecked[1]  # which is not that it does not hold
    assert unchecked[2].startswith("budget <: it cannot be read")


def test_a_checkpoint_that_was_marked_is_evidence(store):
    agent = store.agent("trip-7", when=None)
    agent.state["budget"] = 100
    agent.checkpoint("begun")
    for number in range(8):
        agent.state["budget"] = 100 - number
        agent.checkpoint(f"step {number}")
    agent.mark("step 5", "suspect", "budget is odd")
    report = store.explain("trip-7")
    assert ("violated", "#7 step 5 is suspect: budget is odd") in report.facts
    assert report.claims[0].checkpoint.label == "step 5"


def test_a_model_may_write_the_prose(store):
    store.agent("empty", when=None)
    report = store.explain("empty", write=lambda data: f"Nothing about {data['agent']}.")
    assert str(report) == "Nothing about empty."
    assert report.to_json()["prose"] == str(report)


def test_a_dump_of_another_store_is_refused(race, tmp_path):
    _, one = race
    with holdfast.open(tmp_path / "other") as other:
        other.agent(one.agent)
        with pytest.raises(BadOption, match="not in this store"):
            other.explain(one.dump)


def test_names_that_flow_into_the_failing_line_count(race):
    _, one = race
    with holdfast.crash.open_dump(one.dump) as dump:
        failure = of_dump(dump)
    weight = failure.weight
    assert weight(("account", "spent")) > weight(("memory", "size")) > 0
    assert weight(("rates", "USD")) > 0
    assert weight(("settings", "colour")) == weight(("stats", "calls")) == weight(("memory", "note")) == 0


def test_source_that_was_redacted_or_is_broken_does_no_harm():
    tree = _parsed("def f(a):\n    b = [redacted known-value]\n    c: ( = 1\n    return a['x']\n")
    assert tree is not None
    graph = Graph()
    graph.read("f.py", tree)
    assert "x" in graph.keys
    assert _parsed("\x00") is None


def test_every_feature_has_a_weight_or_is_known_to_have_none():
    assert set(explaining.WEIGHTS) == set(diagnosis.PRIORS)


class Fare:
    def __init__(self, euros):
        self.euros = euros


@holdfast.tool(effect="read", name="explained.fare")
def fare(step):
    return Fare(float(step))


def test_types_that_the_program_does_not_know_are_read_as_data(store_path):
    with holdfast.open(store_path, types=[Fare]) as store:
        agent = store.agent("trip-7", when=None)
        with agent:
            for step in range(10):
                agent.state["fare"] = fare(step)
                agent.checkpoint(f"step {step}")
        agent.close()
    with holdfast.open(store_path, readonly=True) as store:
        assert store.explain("trip-7").checkpoints == 10
