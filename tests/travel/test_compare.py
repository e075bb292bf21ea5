"""Any two points can be compared: the state path by path, effects, metadata, with a summary first."""

from __future__ import annotations

import random

import pytest

import holdfast
from holdfast.agent.changes import words
from holdfast.errors import BadOption, UnknownRevision


@holdfast.tool(name="compared.price")
def price(city):
    return len(city) * 100


@holdfast.durable
def plan(agent, city):
    agent.state["budget"] = 900 - price(city)
    agent.checkpoint("priced")


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as store:
        yield store


def test_two_agents_and_two_branches_are_compared(store):
    one, two = store.agent("one", when=None), store.agent("two", when=None)
    for agent, budget in ((one, 5), (two, 7)):
        agent.state["budget"] = budget
        agent.state["same"] = list(range(100))
        agent.checkpoint("set")
    found = store.diff("one", "two")
    assert [(change.where, change.old, change.new) for change in found.state] == [("state.budget", 5, 7)]
    side = one.branch("side")
    side.state["budget"] = 6
    side.checkpoint("sideways")
    assert [change.new for change in store.diff("one@main", "one@side").state] == [6]
    assert not store.diff(one.at(), "one")
    assert store.diff(one.head, two.head)
    with pytest.raises(UnknownRevision):
        store.diff("one", "one@nowhere")


def test_effects_that_only_one_side_has_are_listed_since_they_parted(store):
    agent = store.agent("trip", when=None)
    with agent:
        price("Rome")
        agent.state["n"] = 1
        agent.checkpoint("a")
        price("Lisbon")
        agent.state["n"] = 2
        agent.checkpoint("b")
    tools = [(one.sign, one.effect.args) for one in store.diff("trip@a", "trip@b").effects]
    assert tools == [("+", {"city": "Lisbon"})]
    assert [one.sign for one in store.diff("trip@b", "trip@a").effects] == ["-"]


def test_two_runs_are_compared_by_what_they_did_and_left(store):
    for name, city in (("one", "Rome"), ("two", "Lisbon")):
        store.agent(name, when=None).run(plan.options(id="r"), city)
    found = store.diff("one@run:r", "two@run:r")
    assert [(change.old, change.new) for change in found.state] == [(500, 300)]
    assert [one.sign for one in found.effects if one.effect.tool.endswith("price")] == ["-", "+"]
    runs = [store.agent(name, readonly=True).runs()[0] for name in ("one", "two")]
    assert store.diff(*runs).summary() == found.summary()
    with pytest.raises(UnknownRevision):
        store.diff("one@run:none", "two")


def test_a_dump_is_compared_with_the_checkpoint_before_it(store, tmp_path):
    agent = store.agent("trip", when=None)
    agent.state["budget"] = 5
    agent.state["password"] = "sk-secret-1"
    agent.state["long"] = "x" * 10_000
    agent.checkpoint("set")
    agent.state["budget"] = -1
    path = holdfast.crash.capture(to=tmp_path, limits=holdfast.crash.Limits(deadline_s=600, part_s=300, objects=5_000))
    agent.checkpoint("later")
    for found in (store.diff("trip@set", path), store.diff("trip@set", str(path))):
        assert [(change.where, change.old, change.new) for change in found.state] == [("state.budget", 5, -1)]
    assert [change.new for change in store.diff(path).state] == [5]  # against where it stood
    assert not store.diff(path, "trip@later").state
    with pytest.raises(BadOption):
        store.diff(path, path)


def test_the_summary_has_at_most_ten_lines_and_says_what_changed_most(store):
    agent = store.agent("trip", when=None)
    agent.state["a"] = {}
    agent.checkpoint("empty")
    for section in range(20):
        agent.state[f"s{section}"] = section
    agent.state["a"].update({str(n): n for n in range(500)})
    agent.checkpoint("full")
    found = store.diff("trip@empty", "trip@full")
    assert len(found.summary()) <= 10
    assert "20 added, 1 changed, in a, s0, s1, s2 and 17 more" in "\n".join(found.summary())
    assert found.to_json()["summary"] == found.summary()


def test_long_texts_are_shown_by_word(store):
    agent = store.agent("trip", when=None)
    text = " ".join(f"word{n}" for n in range(400))
    agent.state["note"] = text
    agent.checkpoint("a")
    agent.state["note"] = text.replace("word7 ", "").replace("word200", "other words")
    agent.checkpoint("b")
    (line,) = str(agent.diff("a", "b")).splitlines()[2:]
    assert "[- word7-]" in line
    assert "[- word200-]{+ other words+}" in line
    assert len(line) < 300


def test_texts_of_any_length_are_shown_by_word():
    """Whose ends are too far from each other for the best alignment."""
    old = [f"word{n} and" for n in range(30_000)]
    new = list(old)
    new[100], new[20_000:20_002], new[29_000] = "first", ["second"], "third a"
    parts = words(" ".join(old), " ".join(new))
    assert [text.strip() for sign, text in parts if sign == "+"] == ["first", "second", "third a"]
    assert sum(len(text) for _, text in parts) < 300


def test_texts_by_word_give_both_texts_back_where_nothing_is_left_out():
    dice = random.Random(1)
    for _ in range(50):
        old = [dice.choice(["red", "blue", "green", "a\n", " b"]) + str(n) for n in range(20)]
        new = [word if dice.random() > 0.1 else "other" for word in old]
        parts = words(" ".join(old), " ".join(new))
        if parts and not any("…" in text for _, text in parts):
            assert "".join(text for sign, text in parts if sign != "+") == " ".join(old)
            assert "".join(text for sign, text in parts if sign != "-") == " ".join(new)
    assert words("short", "shirt") == []


def test_reading_only_what_differs_gives_the_same_answer(store):
    """Random edits of large lists and dicts, inside each other; the agent's own diff reads all of both."""
    dice = random.Random(7)
    agent = store.agent("a", when=None)
    agent.state["rows"] = [{"n": n, "text": str(n) * 9} for n in range(2_000)]
    agent.state["keys"] = {str(n): ["x" * 20, n] for n in range(2_000)}
    agent.state["deep"] = {"inner": {n: n * "y" for n in range(400)}, "list": [[n] * 9 for n in range(900)]}
    labels = [agent.checkpoint("0").label]
    for number in range(1, 9):
        for _ in range(dice.randrange(1, 8)):
            change_one(agent.state, dice, number)
        labels.append(agent.checkpoint(str(number)).label)
    for _ in range(10):
        old, new = dice.choice(labels), dice.choice(labels)
        sparse, whole = store.diff(f"a@{old}", f"a@{new}").state, agent.diff(old, new)
        if any(change.path == ("keys",) for change in whole):  # it was cheaper to give the dict as a whole
            assert {one.path[0] for one in sparse} == {one.path[0] for one in whole}
        else:
            assert sparse.everything == whole.everything


def change_one(state, dice, number):
    rows, keys, deep = state["rows"], state["keys"], state["deep"]
    at, key = dice.randrange(len(rows)), str(dice.randrange(2_000))
    match dice.randrange(9):
        case 0:
            rows[at] = {"n": -number}
        case 1:
            rows.insert(at, number)
        case 2:
            rows.pop(at)
        case 3:
            keys.pop(key, None)
        case 4:
            keys[key] = number
        case 5:
            keys[f"new {number} {key}"] = [number]
        case 6:
            deep["inner"][at % 500] = "z" * 100
        case 7:
            deep["list"][at % 900].append(number)
        case _:
            deep["list"].append(holdfast.plain(deep["list"][0]))


def test_the_cost_of_a_diff_follows_the_difference(store):
    """Two states of 10 MB that differ in three places: what is read is a small part of them."""
    for name in ("one", "two"):
        agent = store.agent(name, when=None)
        agent.state["rows"] = [{"n": n, "text": f"{n:06}" * 40} for n in range(40_000)]
        agent.checkpoint("big")
    rows = agent.state["rows"]
    rows[7]["n"] = -1
    del rows[20_000]
    rows.append({"n": "new"})
    agent.checkpoint("changed")
    read = []
    real = type(store._db.view).nodes

    def nodes(view, digests):
        found = real(view, digests)
        read.extend(map(len, found.values()))
        return found

    agent.close()
    try:
        type(store._db.view).nodes = nodes
        found = store.diff("one", "two")
        assert len(found.state) == 3
        small = sum(read)
        read.clear()
        holdfast.plain(store.agent("one", readonly=True).state)
    finally:
        type(store._db.view).nodes = real
    print(f"{small:,} bytes read, where one side has {sum(read):,}")
    assert small < sum(read) / 20
