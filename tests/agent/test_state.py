"""What a user can rely on of an agent's state, whatever its size and whatever is done to it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import signal
import sys
import threading
import warnings
from functools import partial

import pytest

import holdfast
from holdfast.codec import capture as capturing
from holdfast.codec import intake, values
from holdfast.codec.told import Captured
from holdfast.codec.tracked import Node
from holdfast.errors import DetachedChange, StoreBusy, StoreFailed, Unencodable
from tests.strikes import struck


@holdfast.register
@dataclasses.dataclass
class Message:
    text: str
    tags: list = dataclasses.field(default_factory=list)


@pytest.fixture
def agent(store_path):
    with holdfast.open(store_path) as store:
        yield store.agent("a")


def read_again(agent):
    """The state as another process would find it."""
    path = agent._store.path
    agent._store.close()
    with holdfast.open(path) as store:
        return holdfast.plain(store.agent("a").state)


def test_a_checkpoint_is_readable_after_any_number_of_changes(agent):
    agent.state["big"] = [{"a": "x" * 200} for _ in range(500)]
    agent.checkpoint()
    row = agent.state["big"][5]
    for number in range(199_995):
        row["a"] = number
    row.update({f"k{number}": number for number in range(20)})
    made = agent.checkpoint("acknowledged")
    assert made.operations < 30, "what the changes amount to"
    expected = holdfast.plain(agent.state)
    assert read_again(agent) == expected
    assert expected["big"][5]["a"] == 199_994


def test_setting_an_attribute_of_a_state_says_how_a_section_is_set(agent):
    with pytest.raises(AttributeError, match=r"agent\.state\['messages'\] = \.\.\."):
        agent.state.messages = [{"role": "user"}]
    with pytest.raises(AttributeError, match=r"agent\.state\['messages'\]"):
        _ = agent.state.messages
    assert "messages" not in agent.state


def test_state_that_is_passed_to_tools_leaves_nothing_behind(agent):
    @holdfast.tool(effect="read")
    def ask(messages):
        return len(messages)

    agent.state["messages"] = [{"n": number} for number in range(60)]
    messages = agent.state["messages"]
    assert len(list(messages)) == 60  # each of them knows the list that it is in
    before = sys.getrefcount(messages), sys.getrefcount(messages[0])
    with agent:
        for _ in range(60):
            assert ask(messages) == 60
        agent.checkpoint()
    gc.collect()
    assert sys.getrefcount(messages) < before[0] + 10
    assert sys.getrefcount(messages[0]) < before[1] + 10


@pytest.mark.parametrize("read", [False, True], ids=["never read", "all read once"])
def test_appending_an_instance_encodes_that_one_alone(agent, monkeypatch, read):
    agent.state["messages"] = [Message(str(number), ["t"]) for number in range(2_000)]
    agent.checkpoint()
    if read:
        assert sum(len(message.tags) for message in agent.state["messages"]) == 2_000
    for _ in range(4):  # nobody holds them any more, and after a while that is known
        agent.state["messages"].append(Message("more"))
        agent.checkpoint()
    encoded = []
    monkeypatch.setattr(values.Writing, "lower", counted(values.Writing.lower, encoded))
    agent.state["messages"].append(Message("last"))
    agent.checkpoint()
    assert len(encoded) < 100


def checkpoints(agent, count):
    for _ in range(count):
        agent.checkpoint()


def counted(function, calls):
    def call(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return call


def test_what_is_done_to_an_instance_that_was_read_is_saved(agent):
    agent.state["messages"] = [Message(str(number), ["t"]) for number in range(500)]
    agent.checkpoint()
    held = agent.state["messages"][77]
    part = agent.state["messages"][300].tags
    for _ in range(10):
        agent.state["n"] = agent.state.get("n", 0) + 1
        agent.checkpoint()
    held.text, _ = "changed", part.append("late")
    assert agent.dirty
    agent.checkpoint()
    saved = read_again(agent)["messages"]
    assert saved[77].text == "changed"
    assert saved[300].tags == ["t", "late"]


def test_adding_to_a_large_set_or_dict_encodes_what_comes(agent, monkeypatch):
    agent.state["seen"] = set(range(20_000))
    agent.state["table"] = {f"key {number}": number for number in range(20_000)}
    agent.checkpoint()
    agent.state["table"]["first"] = 1
    agent.checkpoint()
    encoded = []
    monkeypatch.setattr(capturing.Capture, "_flat", counted(capturing.Capture._flat, encoded))
    agent.state["seen"].add("new")
    agent.state["table"]["new"] = 1
    agent.checkpoint()
    assert len(encoded) < 20


def test_reading_one_of_many_wraps_that_one(agent):
    agent.state["table"] = {f"key {number}": {"n": [number]} for number in range(5_000)}
    agent.checkpoint()
    path = agent._store.path
    agent._store.close()
    with holdfast.open(path) as store:
        table = store.agent("a").state["table"]
        assert table.get("key 7") == {"n": [7]}
        assert table.get("absent") is None
        assert len(list(table)) == 5_000
        assert "key 9" in table
        assert sum(isinstance(value, Node) for value in dict.values(table)) == 1


def test_originals_cost_a_checkpoint_a_millisecond_at_most(agent, monkeypatch):
    originals = [{"n": [number]} for number in range(300)]
    agent.state["l"] = []
    for one in originals:
        agent.state["l"].append(one)
    clock = iter(range(10**9))
    monkeypatch.setattr(intake.time, "monotonic", lambda: next(clock) * intake.BUDGET_S)
    looked = []
    monkeypatch.setattr(intake.Originals, "_same", counted(intake.Originals._same, looked))
    agent.checkpoint()
    assert len(looked) <= 2
    monkeypatch.undo()
    originals[5]["n"].append(1)
    with pytest.warns(DetachedChange, match=r"state\.l\[5\]"):
        checkpoints(agent, 400)


def test_a_large_original_is_looked_at_in_part(agent):
    original = list(range(100_000))
    agent.state["l"] = original
    agent.checkpoint()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DetachedChange)
        original[50_000] = -1  # beyond what is looked at
        agent.checkpoint()
    original.append(1)
    with pytest.warns(DetachedChange):
        agent.checkpoint()


@pytest.mark.parametrize("key", [float("nan"), (1, [2]), Message("a")], ids=["nan", "list inside", "mutable instance"])
def test_keys_and_set_items_that_can_change_are_refused_with_their_path(agent, key):
    agent.state["d"] = {"in": {}}
    for put in (
        lambda: agent.state["d"]["in"].__setitem__(key, 1),
        lambda: agent.state.update(x={"in": {"d": {key: 1}}}),
    ):
        with pytest.raises((Unencodable, TypeError)):
            put()
    agent.checkpoint()
    assert agent.state["d"] == {"in": {}}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck in a callback of weakref
def test_an_interrupt_in_the_middle_of_changes_and_checkpoints_loses_nothing(agent, rounds):
    """Real signals: whatever the live state shows afterwards is what is saved."""

    class Interrupted(Exception):
        """As a handler of a user's would raise: "except Exception" catches it."""

    agent.state["l"] = [{"n": number, "t": ["x"]} for number in range(200)]
    agent.checkpoint()

    def work(number):
        agent.state["l"][number % 150]["t"].append(number)
        agent.state["d"] = {"a": [number], "b": agent.state["l"][3]}
        agent.state["l"].append(agent.state["l"].pop(0))
        if len(agent.state["l"]) < 200:  # interrupted between the two
            agent.state["l"].append({"n": number, "t": []})
        agent.checkpoint()

    strikes = 0
    for number in range(1, rounds(600, 60_000)):
        strikes += struck(partial(work, number), 0.00002 + (number * 7919 % 1000) * 0.000001, Interrupted)
        if number % 25 == 0:
            agent.checkpoint()
            assert holdfast.plain(agent.at().state) == holdfast.plain(agent.state)
    agent.checkpoint("after it all")
    live = holdfast.plain(agent.state)
    assert strikes > 10
    assert agent._store.verify().ok
    assert read_again(agent) == live


def test_a_handler_that_changes_the_state_and_looks_at_it_loses_nothing(agent, rounds):
    """Real signals, whose handler works with the agent as the program does; only what cannot be done there raises."""
    state, rng, done = agent.state, random.Random(11), []
    state.update({"l": [{"n": number, "t": "x" * 100} for number in range(300)], "table": {}, "handled": []})
    agent.checkpoint()

    def handler(_signal, _frame):
        try:
            if rng.random() < 0.7:
                state["handled"].append(len(done))
                done.append(len(done))
            rng.choice((lambda: agent.dirty, lambda: agent.digest, agent.checkpoint, lambda: state.update(flag=1)))()
        except StoreBusy:
            pass

    work = (
        lambda number: state["l"].append({"n": number}),
        lambda number: state["l"][number % len(state["l"])].update(e=number),
        lambda number: state["table"].update({f"k{number % 50}": [number]}),
        lambda number: state["l"].sort(key=lambda row: -row["n"] % (17 + number % 5)),
        lambda number: state["l"].__delitem__(slice(0, max(0, len(state["l"]) - 300))),
        lambda number: state.update(extra={"n": number}),
        lambda _: state.pop("extra", None),
        lambda _: agent.dirty and agent.checkpoint(),
        lambda _: agent.checkpoint(),
    )
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(1, rounds(1_500, 150_000)):
            signal.setitimer(signal.ITIMER_REAL, 0.00001 + rng.random() * 0.0004)
            rng.choice(work)(number)
            if number % 100 == 0:
                signal.setitimer(signal.ITIMER_REAL, 0)
                agent.checkpoint()
                assert list(state["handled"]) == done
                assert holdfast.plain(agent.at().state) == holdfast.plain(state)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    agent.checkpoint("after it all")
    live = holdfast.plain(state)
    assert len(done) > 10
    assert agent._store.verify().ok
    assert read_again(agent) == live


def let_go(agent, monkeypatch):
    """A state of which only the store has most bytes."""
    agent.state["l"] = [{"n": number, "t": "x" * 300} for number in range(2_000)]
    agent.state["in"] = {"big": [f"{number} " + "y" * 300 for number in range(2_000)]}
    agent.checkpoint()
    agent.state["more"] = 1
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.agent.branch.SEAL_CHECKPOINTS", 1)
        agent.checkpoint("sealed")
    return type(agent._document.told.source)


def test_told_bytes_that_were_let_go_are_read_off_the_event_loop(agent, monkeypatch):
    source = let_go(agent, monkeypatch)
    readers = []
    nodes = source.nodes

    def told(self, digests):
        readers.append(threading.current_thread())
        return nodes(self, digests)

    monkeypatch.setattr(source, "nodes", told)
    agent.state["l"][700]["t"] = "changed"
    agent.state["in"]["big"][900] = "changed, too"
    asyncio.run(agent.acheckpoint("edited"))
    assert readers
    assert threading.main_thread() not in readers
    expected = holdfast.plain(agent.state)
    assert read_again(agent) == expected


def test_what_a_checkpoint_was_made_of_is_let_go_without_the_collector(agent):
    agent.state["log"] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            agent.state["log"].append("x" * 1_000)
            agent.checkpoint(str(number))
        left = [one for one in gc.get_objects() if isinstance(one, Captured)]
    finally:
        gc.enable()
    assert len(left) < 5, "each holds what the state was then"


@pytest.mark.parametrize("way", ["checkpoint", "acheckpoint"])
def test_a_change_beside_bytes_that_cannot_be_read_is_saved_when_they_can(agent, monkeypatch, way):
    source = let_go(agent, monkeypatch)

    def unreadable(_self, _digests):
        raise StoreFailed("reading nodes: Input/output error")

    def save():
        made = getattr(agent, way)()
        return asyncio.run(made) if way.startswith("a") else made

    agent.state["l"][700]["t"] = "changed"
    agent.state["in"]["big"][900] = "changed, too"
    with monkeypatch.context() as patch:
        patch.setattr(source, "nodes", unreadable)
        for _ in range(2):
            with pytest.raises(StoreFailed, match="Input/output"):
                save()
    agent.state["l"][701]["t"] = "and this"
    assert save() is not None
    expected = holdfast.plain(agent.state)
    assert expected["l"][700]["t"] == "changed"
    assert read_again(agent) == expected
