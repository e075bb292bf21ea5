"""One agent in two stores: which of them is ahead, and what happens when both have gone on."""

from __future__ import annotations

import pytest

from holdfast.agent.policy import Policy
from holdfast.errors import HistoriesDiverged
from tests.agent.carried import assert_same, opened, record, sound


@pytest.fixture
def stores(tmp_path):
    with opened(tmp_path / "a") as source, opened(tmp_path / "b") as dest:
        yield source, dest


def say(store, text, branch="main"):
    """One more checkpoint of the agent; its id."""
    with store.agent("trip", branch=branch) as agent:
        agent.state.setdefault("said", []).append(text)
        return agent.checkpoint(text).id


def head(store, name="trip", branch="main"):
    return store.agent(name, branch=branch, readonly=True).head.id


def test_histories_that_parted_are_told_and_kept_apart(stores):
    source, dest = stores
    say(source, "common")
    source.push(dest)
    ours, theirs = say(source, "here"), say(dest, "there")
    with pytest.raises(HistoriesDiverged) as caught:
        source.push(dest)
    assert (caught.value.branch, caught.value.source_head, caught.value.dest_head) == ("main", ours, theirs)
    ((name,),) = (one.beside for one in source.push(dest, beside=True).agents)
    assert (head(dest), head(dest, branch=name)) == (theirs, ours)
    assert [one.label for one in dest.agent("trip", branch=name, readonly=True).log()] == ["here", "common"]
    more = say(source, "and on")
    assert source.push(dest).agents[0].beside == [], "the next push goes on with that branch"
    assert head(dest, branch=name) == more
    sound(dest)


def test_effects_that_parted_are_told_as_well(stores):
    source, dest = stores
    say(source, "common")
    source.push(dest)
    for store, what in ((source, b"here"), (dest, b"there")):
        with store.agent("trip") as agent:
            record(agent, what)
    with pytest.raises(HistoriesDiverged):
        source.push(dest)


def test_a_store_that_is_behind_loses_nothing(stores):
    source, dest = stores
    say(source, "common")
    source.push(dest)
    there = say(dest, "there")
    assert source.push(dest).agents[0].status == "ahead"
    assert head(dest) == there
    assert source.pull(dest).agents[0].status == "updated"
    assert_same(dest, source, "trip")
    say(source, "here again")
    assert source.push(dest).agents[0].status == "updated"
    assert_same(source, dest, "trip")


def test_a_rollback_is_followed_and_one_over_there_is_kept(stores):
    source, dest = stores
    first, second = say(source, "one"), say(source, "two")
    source.push(dest)
    with source.agent("trip") as agent:
        agent.rollback(f"id:{first}")
    source.push(dest)
    assert_same(source, dest, "trip")
    assert head(dest) == first
    with dest.agent("trip") as other:
        other.rollback(f"id:{second}")
    assert source.push(dest).agents[0].status == "ahead"
    assert head(dest) == second
    say(source, "three")
    with pytest.raises(HistoriesDiverged):
        source.push(dest)


def test_what_both_have_forgotten_is_no_divergence(stores):
    source, dest = stores
    say(source, "one")
    source.push(dest)
    for number in range(20):
        say(source, f"m{number}")
    source.retain(Policy(last=1))
    source.push(dest)
    assert head(dest) == head(source)
    for number in range(20):
        say(dest, f"n{number}")
    dest.retain(Policy(last=1))
    assert source.push(dest).agents[0].status == "ahead"
    assert source.pull(dest).agents[0].status == "updated"
    assert head(source) == head(dest)
    sound(source)


def test_tags_follow_whoever_spoke_last(stores):
    source, dest = stores
    first, second = say(source, "one"), say(source, "two")
    source.tag("trip", "good", f"id:{first}")
    source.tag("trip", "old", f"id:{first}")
    source.push(dest)
    dest.tag("trip", "good", f"id:{second}")
    dest.tag("trip", "mine", f"id:{second}")
    source.untag("trip", "old")
    source.mark("trip", f"id:{first}", "suspect", "odd")
    assert source.push(dest).agents[0].status == "updated"
    agent = dest.agent("trip", readonly=True)
    assert {name: one.id for name, one in agent.tags().items()} == {"good": second, "mine": second}
    assert agent.at(f"id:{first}").validity == "suspect"
    source.mark("trip", f"id:{first}", "good")
    source.push(dest)
    assert agent.at(f"id:{first}").validity == "good"
    sound(dest)
