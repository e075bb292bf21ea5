"""Bisect finds the change, whatever history and check it is given, or says why not."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.agent.graph import Graph
from holdfast.errors import BadExpression, BadOption, BisectFailed, Damaged
from holdfast.travel import log_of
from holdfast.travel.bisect import Called
from tests.agent.damage import spoil_payload


@pytest.fixture
def agent(store_path):
    with holdfast.open(store_path) as store:
        yield store.agent("trip-7", when=None)


def grow(agent, count, at=None, start=0):
    for number in range(start, count):
        agent.state["n"] = number
        if number == at:
            agent.state["budget"] = -1
        agent.checkpoint(f"c{number}")


def test_the_first_bad_checkpoint_is_found_at_every_position_in_so_many_checks(store_path):
    with holdfast.open(store_path, durability="batched") as store:
        for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33):
            agent = store.agent(f"a{count}", when=None)
            grow(agent, count)
            for first_bad in range(count + 1):
                asked = []

                def check(state, first_bad=first_bad, asked=asked):
                    asked.append(state["n"])
                    return state["n"] < first_bad

                found = agent.bisect(check, minimise=False)
                assert len(asked) <= math.ceil(math.log2(count)) + 2
                assert len(asked) == found.checks == len(set(asked))
                if first_bad == count:
                    assert not found
                    assert found.checkpoint is None
                else:
                    assert found.checkpoint.state["n"] == first_bad
                    assert (found.last_good is None) == (first_bad == 0)
                    assert {0, count - 1} & set(asked)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    with holdfast.open(tmp_path_factory.mktemp("long") / "store", durability="batched") as store:
        agent = store.agent("a", when=None)
        grow(agent, 24)
        yield agent, agent.log()[::-1]


@settings(max_examples=40)
@given(first_bad=st.integers(1, 23), skipped=st.sets(st.integers(1, 22)))
def test_skipped_ones_widen_the_answer_and_never_make_it_wrong(long, first_bad, skipped):
    agent, line = long

    def check(state):
        if state["n"] in skipped:
            raise RuntimeError("cannot tell")
        return state["n"] < first_bad

    found = agent.bisect(check, minimise=False, fresh=True)
    suspects = {line.index(one) for one in (*found.candidates, found.checkpoint)}
    assert first_bad in suspects
    assert suspects - {line.index(found.checkpoint)} <= skipped
    assert all(step.why == "RuntimeError: cannot tell" for step in found.skipped)
    assert line.index(found.last_good) < first_bad <= line.index(found.checkpoint)


def test_an_expression_is_asked_about_all_and_says_when_it_was_bad_before(agent):
    for number, budget in enumerate([5, -1, -2, 3, 4, -3, -4]):
        agent.state["budget"] = budget
        agent.checkpoint(f"c{number}")
    found = agent.bisect(when="budget < 0")
    assert found.checkpoint.label == "c5"
    assert found.whole
    assert [(one.label, two.label) for one, two in found.earlier] == [("c1", "c2")]
    assert "before: #2 c1 to #3 c2 was bad, too" in str(found)
    assert "assumed" not in str(found)
    assert "at most one change assumed" in str(agent.bisect(lambda state: state["budget"] >= 0))
    assert agent.bisect("budget >= 0").checkpoint.label == "c5"  # true is good
    assert not agent.bisect(when="budget > 100")


def test_what_was_bad_and_is_good_again_is_found_or_said_not_to_be_looked_for(agent):
    for number, budget in enumerate([0, 1, -5, -6, 2, 3]):
        agent.state["budget"] = budget
        agent.checkpoint(f"c{number}")
    found = agent.bisect(when="budget < 0")
    assert (found.checkpoint.label, found.last_good.label, found.until.label) == ("c2", "c1", "c3")
    assert found.whole
    assert "good again" in str(found)
    assert agent.bisect(lambda state: state["budget"] >= 0, all=True).until.label == "c3"
    ends = agent.bisect(lambda state: state["budget"] >= 0, fresh=True)
    assert not ends
    assert not ends.exact
    assert "only the ends were checked" in str(ends)
    first = agent.bisect(lambda state: state["budget"] > 0, fresh=True)  # both ends were asked: the oldest is bad
    assert (first.checkpoint.label, first.until.label) == ("c0", "c0")


def test_what_was_forgotten_in_between_is_counted_and_nobody_is_named_for_sure(agent):
    grow(agent, 20, at=7)
    assert agent.bisect(when="budget < 0").exact
    agent.tag("first", "c0")
    agent._store.retain(holdfast.Policy(last=3))
    found = agent.bisect(when="budget < 0", fresh=True)
    assert (found.checkpoint.label, found.last_good.label, found.forgotten) == ("c17", "c0", 16)
    assert not found.exact
    assert "one of 16 checkpoints that were forgotten" in str(found)
    none = agent.bisect(when="budget > 5")
    assert (none.checkpoint, none.forgotten, none.exact) == (None, 16, False)
    later = agent.bisect(when="n > 18", fresh=True)  # the gap lies elsewhere
    assert (later.checkpoint.label, later.forgotten, later.exact) == ("c19", 0, True)
    agent.untag("first")
    agent._store.retain(holdfast.Policy(last=3))
    oldest = agent.bisect(when="budget < 0", fresh=True)
    assert (oldest.last_good, oldest.forgotten, oldest.exact) == (None, 17, False)


def test_places_that_are_nowhere_and_checkpoints_that_could_not_be_checked_are_said(agent):
    for number in range(6):
        agent.state["budget"] = "much" if number < 4 else number
        agent.checkpoint(f"c{number}")
    found = agent.bisect(when="bugdet < 800")
    assert found.nowhere == ["state.bugdet"]
    assert "nowhere: state.bugdet is in no checkpoint" in str(found)
    assert agent.bisect(when="bugdet < 800").nowhere == ["state.bugdet"]  # from memory, too
    some = agent.bisect(when="budget < 0")
    assert (some.nowhere, len(some.skipped), some.exact) == ([], 4, False)
    assert "4 could not be checked" in str(some)
    assert all("\n" not in step.why for step in some.skipped)


def test_a_check_that_exits_has_said_nothing_and_one_that_is_interrupted_ends_it(agent):
    grow(agent, 8, at=5)

    def leave(state):
        if state["n"] in {0, 3}:
            raise SystemExit(state["n"])
        return state["n"] < 5

    found = agent.bisect(leave, all=True)
    assert found.checkpoint.label == "c5"
    assert [(one.checkpoint.label, one.why) for one in found.skipped] == [
        ("c0", "SystemExit: 0"),
        ("c3", "SystemExit: 3"),
    ]

    def interrupted(state):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agent.bisect(interrupted)


def test_the_result_names_the_change_the_effect_and_the_line(agent):
    @holdfast.tool(name="bisected.price")
    def price(city):
        return 1_000

    with agent:
        agent.state["budget"] = 900
        agent.checkpoint("asked")
        agent.state["note"] = "x"
        agent.checkpoint("noted")
        agent.state["budget"] -= price("Lisbon")
        agent.state["steps"] = ["fly"]
        agent.checkpoint("priced")
        agent.state["done"] = True
        agent.checkpoint("done")
    found = agent.bisect(when="budget < 0")
    assert found.checkpoint.label == "priced"
    assert {change.where for change in found.change} == {"state.budget", "state.steps"}
    assert [effect.tool for effect in found.cause.effects] == ["bisected.price"]
    assert found.cause.caller.startswith("test_bisect.py:")
    assert [change.where for change in found.minimal] == ["state.budget"]
    assert found.imagined  # the state with just that change never existed
    assert found.to_json()["imagined"] is True


def test_calls_that_are_not_shown_are_counted(agent):
    @holdfast.tool(name="bisected.quote", effect="read")
    def quote(number):
        return number

    with agent:
        agent.state["n"] = 0
        agent.checkpoint("good")
        agent.state["n"] = sum(quote(number) for number in range(9))
        agent.checkpoint("bad")
    found = agent.bisect(when="n > 0")
    assert len(found.cause.effects) == 9
    assert [line.partition(" (")[0] for line in found.lines()][3:9] == ["after 4 other calls"] + [
        "after bisected.quote"
    ] * 5


def test_what_needs_two_changes_is_minimised_to_the_two(agent):
    agent.state["a"] = agent.state["b"] = 0
    agent.state["rest"] = {str(n): n for n in range(20)}
    agent.checkpoint("good")
    agent.state["a"] = agent.state["b"] = 1
    for n in range(20):
        agent.state["rest"][str(n)] = -n
    agent.checkpoint("bad")
    found = agent.bisect(lambda state: not (state["a"] and state["b"]))
    assert {change.where for change in found.minimal} == {"state.a", "state.b"}
    assert found.tries < 60


def test_damaged_and_corrupt_checkpoints_are_skipped_and_listed(agent):
    grow(agent, 9, at=4)
    agent.mark("c4", "corrupt", "a bit flipped")
    agent.mark("c3", "corrupt")
    found = agent.bisect(when="budget < 0")
    assert found.checkpoint.label == "c5"
    assert [one.label for one in found.candidates] == ["c3", "c4"]
    assert {step.checkpoint.label: step.why for step in found.skipped}["c4"] == "it is marked corrupt: a bit flipped"
    agent.mark("c8", "corrupt")
    agent.mark("c0", "corrupt")  # the ends give way to the next
    assert agent.bisect(when="budget < 0").checkpoint.label == "c5"


def test_a_check_that_lies_now_and_then_is_asked_again_until_it_is_sure(store_path):
    right = 0
    with holdfast.open(store_path, durability="batched") as store:
        agent = store.agent("a", when=None)
        grow(agent, 32)
        for seed in range(20):
            dice = random.Random(seed)

            def check(state, dice=dice):
                lie = dice.random() < 0.2  # both ways
                return (state["n"] < 13) is not lie

            found = agent.bisect(check, repeats=25, confidence=0.95, fresh=True, minimise=False)
            right += found.checkpoint.state["n"] == 13
            assert 0.9 < found.confidence < 1
    assert right >= 17


def test_a_fault_that_shows_only_sometimes_is_found(store_path):
    right = 0
    with holdfast.open(store_path, durability="batched") as store:
        agent = store.agent("a", when=None)
        grow(agent, 16)
        for seed in range(20):
            dice = random.Random(seed)
            found = agent.bisect(
                lambda state, dice=dice: state["n"] < 5 or dice.random() > 0.3, repeats=30, fresh=True, minimise=False
            )
            right += found.checkpoint.state["n"] == 5
    assert right >= 17


def test_verdicts_are_remembered_and_an_interrupted_bisection_goes_on(agent):
    grow(agent, 64)
    asked = []
    limit = [3]

    def check(state):
        if len(asked) == limit[0]:
            raise KeyboardInterrupt
        asked.append(state["n"])
        return state["n"] < 40

    one = Called(check)
    one.identity = "the same"  # its cells change, and so would its own
    with pytest.raises(KeyboardInterrupt):
        agent.bisect(one, minimise=False)
    limit[0] = 1_000
    assert agent.bisect(one, minimise=False).checkpoint.label == "c40"
    assert len(asked) == len(set(asked)) <= 8
    assert agent.bisect(one, minimise=False).checks == 0
    said = log_of(agent)
    assert {line["verdict"] for line in said} == {"good", "bad"}
    assert len(said) == len(asked)
    asked.clear()
    agent.bisect(one, minimise=False, fresh=True)
    assert asked


def test_a_changed_check_is_another_check(agent):
    grow(agent, 8)
    assert agent.bisect(lambda state: state["n"] < 3).checkpoint.label == "c3"
    assert agent.bisect(lambda state: state["n"] < 5).checkpoint.label == "c5"


def test_a_hostile_file_of_verdicts_is_no_reason_to_fail(agent, store_path):
    grow(agent, 4, at=2)
    agent.bisect(when="budget < 0")
    (file,) = (store_path / "bisect").iterdir()
    last = json.loads(file.read_text().splitlines()[-1])
    hostile = [{**last, "verdict": ["x"]}, {**last, "checkpoint": 5}, {**last, "depth": [1]}]
    file.write_text("\n".join(["[" * 100_000, *map(json.dumps, hostile), ""]))
    assert agent.bisect(when="budget < 0").checkpoint.label == "c2"


LIMIT = 5


def within(number):
    return number < LIMIT


def under_the_limit(state):
    return within(state["n"])


def test_a_check_that_finds_other_values_by_name_is_another_check(agent, monkeypatch):
    class Bound:
        def __init__(self, limit):
            self.limit = limit

        def ok(self, state):
            return state["n"] < self.limit

    def imports(state):
        from tests.travel import test_bisect

        return test_bisect.within(state["n"])

    grow(agent, 20)

    def first(check):
        return agent.bisect(check, minimise=False).checkpoint.label

    assert (first(Bound(5).ok), first(Bound(15).ok)) == ("c5", "c15")
    assert (first(under_the_limit), first(imports)) == ("c5", "c5")
    assert agent.bisect(under_the_limit, minimise=False).checks == 0  # what it depends on is the same
    monkeypatch.setitem(globals(), "LIMIT", 15)
    assert (first(under_the_limit), first(imports)) == ("c15", "c15")
    monkeypatch.setitem(globals(), "within", lambda number: number < 9)  # a helper was mended
    assert (first(under_the_limit), first(imports)) == ("c9", "c9")
    monkeypatch.setitem(globals(), "within", Bound(3).ok)
    assert Called(Bound(3).ok).identity == Called(imports).identity == Called(under_the_limit).identity == ""


def test_a_check_that_looks_elsewhere_than_at_the_state_is_asked_again(agent, tmp_path, monkeypatch):
    file = tmp_path / "limit"

    def reads(state):
        return state["n"] < int(file.read_text())

    def opens(state):
        with open(where) as text:  # noqa: PTH123 - the way that a check does it
            return state["n"] < json.load(text)

    def environment(state):
        import os

        return state["n"] < int(os.environ["LIMIT"])

    where = str(file)
    grow(agent, 20)
    for limit in ("5", "15"):
        file.write_text(limit)
        monkeypatch.setenv("LIMIT", limit)
        for check in (reads, opens, environment):
            found = agent.bisect(check, minimise=False)
            assert (found.checkpoint.label, found.remembered) == (f"c{limit}", 0), check


def test_verdicts_of_an_earlier_search_are_said_to_be_such(agent):
    grow(agent, 20)
    first = agent.bisect("n < 5", minimise=False)
    again = agent.bisect("n < 5", minimise=False)
    assert "remembered" not in str(first)
    assert again.checkpoint == first.checkpoint
    assert f"{first.checks} verdicts of an earlier search; --fresh asks again" in str(again)


def test_verdicts_about_an_encrypted_store_name_neither_the_agent_nor_the_check(tmp_path):
    with holdfast.open(tmp_path / "secret", key="correct horse battery staple") as store:
        agent = store.agent("trip-to-lisbon", when=None)
        grow(agent, 8)
        agent.bisect("n < 3")
        kept = b"".join(file.read_bytes() for file in (store.path / "bisect").iterdir())
        assert kept
        assert b"lisbon" not in kept
        assert b"n < 3" not in kept
        assert {one["agent"] for one in log_of(agent)} == {"trip-to-lisbon"}


def test_a_torn_file_of_verdicts_is_no_reason_to_fail(agent, store_path):
    grow(agent, 8)
    check = "n < 3"
    agent.bisect(check)
    (file,) = (store_path / "bisect").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(file.read_bytes()[:-20] + b'\xff{"id": 3}\n[]\n')
    assert agent.bisect(check).checkpoint.label == "c3"


def test_ends_that_are_not_what_they_should_be_are_said(agent):
    grow(agent, 6)
    with pytest.raises(BisectFailed, match="should be good"):
        agent.bisect("n < 2", good="c3")
    found = agent.bisect("n < 0")
    assert found.checkpoint.label == "c0"
    assert found.last_good is None
    with pytest.raises(BisectFailed, match="none of 6") as caught:
        agent.bisect(lambda state: None)
    assert len(caught.value.skipped) == 6
    with pytest.raises(BadOption):
        agent.bisect()
    with pytest.raises(BadExpression):
        agent.bisect("n <")
    side = agent.branch("side", at="c1")
    side.state["n"] = 77
    side.checkpoint("sideways")
    with pytest.raises(BadOption, match="ancestor"):
        agent.bisect("n < 2", good=side.head)
    assert side.bisect("n < 50").checkpoint.label == "sideways"


def test_only_one_line_of_ancestors_is_searched(agent):
    grow(agent, 5)
    agent.rollback("c2")
    agent.state["n"] = 100
    agent.checkpoint("after")
    found = agent.bisect("n < 3")
    assert found.checkpoint.label == "after"
    assert found.total == 4


def test_bits_that_flipped_are_skipped_and_the_rest_is_searched(store_path):
    """Of one checkpoint its operations: what rests on it cannot be read."""
    with holdfast.open(store_path) as store:
        grow(store.agent("a", when=None), 16, at=10)
    spoil_payload(store_path, 13)
    with holdfast.open(store_path, readonly=True) as store:
        found = store.agent("a", readonly=True).bisect(when="budget < 0", minimise=False)
    assert found.checkpoint.label == "c10"
    assert {step.checkpoint.label for step in found.skipped} == {"c12", "c13", "c14", "c15"}
    assert all("cannot be read" in step.why for step in found.skipped)


def test_a_line_that_is_cut_by_damage_is_searched_up_to_there_and_that_is_said(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("a", when=None)
        grow(agent, 20, at=12)
        wanted = agent.at("c12")
        real = Graph.line

        def line(self, n):
            for point in real(self, n):
                if point.manifest.label == "c4":
                    raise Damaged("checkpoint 5 is not what its row says")
                yield point

        try:
            Graph.line = line
            found = agent.bisect(when="budget < 0")
        finally:
            Graph.line = real
    assert found.checkpoint == wanted
    assert found.total == 15
    assert "checkpoint 5" in str(found)
