"""The saver's synchronous methods, call by call. What is LangGraph's contract is asked of its own savers as well."""

from __future__ import annotations

import enum
import sqlite3
import threading
import uuid
from collections import OrderedDict, deque
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.checkpoint.base import WRITES_IDX_MAP, BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command, Interrupt, Send
from pydantic import BaseModel

from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import BadOption, HoldfastError, StoreClosed, Unencodable, UnknownType
from tests.contrib import graphs
from tests.contrib.graphs import chain, checkpoint, config, told

META = {"source": "loop", "step": 0, "parents": {}}


@pytest.fixture
def ours(store_path):
    with HoldfastSaver(store_path) as saver:
        yield saver
        assert saver.store.verify().ok, str(saver.store.verify())


@pytest.fixture(params=["holdfast", "memory", "sqlite"])
def saver(request, tmp_path):
    """Ours, and the two that show that a test asks for the contract and not for a habit of ours."""
    if request.param == "holdfast":
        yield request.getfixturevalue("ours")
    elif request.param == "memory":
        yield InMemorySaver()
    else:
        with closing(sqlite3.connect(tmp_path / "rival.sqlite", check_same_thread=False)) as connection:
            yield SqliteSaver(connection)


def ids(found) -> list[str]:
    return [one.checkpoint["id"] for one in found]


def id_of(at) -> str:
    return at["configurable"]["checkpoint_id"]


# -- checkpoints --------------------------------------------------------------------------------------------


def test_put_then_get_gives_everything_back(saver):
    first = checkpoint({"a": [1, {"b": "c"}], "d": None}, versions_seen={"node": {"a": 1}})
    at = saver.put(config("t"), first, {**META, "source": "input", "step": -1, "mine": {"x": [1]}}, {"a": 1, "d": 1})
    second = checkpoint({"a": [1, {"b": "c"}, 2]}, channel_versions={"a": 2}, updated_channels=["a"])
    later = saver.put(at, second, META, {"a": 2})
    assert at["configurable"] == {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": first["id"]}
    found = saver.get_tuple(config("t"))
    assert told(found) == {
        "config": later["configurable"],
        "checkpoint": second,
        "metadata": META,
        "parent": at["configurable"],
        "writes": [],
    }
    old = saver.get_tuple(at)
    assert old.checkpoint == first
    assert old.metadata == {**META, "source": "input", "step": -1, "mine": {"x": [1]}}
    assert old.parent_config is None
    assert saver.get(config("t")) == second


def test_what_is_not_there_is_none(saver):
    assert saver.get_tuple(config("t")) is None
    assert list(saver.list(config("t"))) == []
    chain(saver, "t", 2)
    assert saver.get_tuple(config("t", "other")) is None
    assert saver.get_tuple(config("t", "", str(uuid.uuid4()))) is None
    assert saver.get_tuple(config("other")) is None
    assert list(saver.list(config("t", "other"))) == []


def test_metadata_takes_in_what_the_config_says(saver):
    at = {**config("t"), "metadata": {"user": "me", "run_id": "r-1"}}
    at["configurable"]["assistant"] = "a"
    saver.put(at, checkpoint(), META, {})
    found = saver.get_tuple(config("t")).metadata
    assert (found["user"], found["run_id"], found["assistant"], found["step"]) == ("me", "r-1", "a", 0)


def test_a_checkpoint_that_is_put_again_is_the_last_one_put(saver):
    """LangGraph may save a checkpoint anew under its id."""
    one, two = chain(saver, "t", 2)
    again = checkpoint({"messages": ["other"]}, id=id_of(two), channel_versions={"messages": 9})
    saver.put(one, again, {**META, "step": 7}, {"messages": 9})
    assert ids(saver.list(config("t"))) == [id_of(two), id_of(one)]
    for found in (saver.get_tuple(config("t")), saver.get_tuple(two), next(saver.list(config("t")))):
        assert found.checkpoint == again
        assert found.metadata["step"] == 7
        assert id_of(found.parent_config) == id_of(one)


def test_what_is_given_and_what_is_returned_may_be_changed_freely(saver):
    messages = [{"content": ["x"]}]
    at = saver.put(config("t"), checkpoint({"m": messages}), META, {"m": 1})
    messages[0]["content"].append("later")
    found = saver.get_tuple(at)
    assert found.checkpoint["channel_values"]["m"] == [{"content": ["x"]}]
    found.checkpoint["channel_values"]["m"][0]["content"].append("mine")
    found.metadata["mine"] = True
    assert saver.get_tuple(at).checkpoint["channel_values"]["m"] == [{"content": ["x"]}]
    assert "mine" not in saver.get_tuple(at).metadata
    # and the changed object, given again, is seen to have changed
    after = saver.put(at, checkpoint({"m": messages}, channel_versions={"m": 2}), META, {"m": 2})
    assert saver.get_tuple(after).checkpoint["channel_values"]["m"] == [{"content": ["x", "later"]}]
    assert saver.get_tuple(at).checkpoint["channel_values"]["m"] == [{"content": ["x"]}]


def test_channels_come_go_and_shrink(ours):
    steps = [
        {"a": [1, 2, 3], "b": {"x": 1}},
        {"b": {"x": 1, "y": 2}},
        {"a": [], "b": {"y": 2}},
        {"a": [3, 2, 1], "c": "text"},
        {},
        {"a": {"now": "a map"}, "b": 7},
    ]
    at, places = config("t"), []
    for number, values in enumerate(steps):
        at = ours.put(at, checkpoint(values), {**META, "step": number}, {})
        places.append(at)
    for place, values in zip(places, steps, strict=True):
        assert ours.get_tuple(place).checkpoint["channel_values"] == values
    assert [one.checkpoint["channel_values"] for one in ours.list(config("t"))] == steps[::-1]


# -- lists --------------------------------------------------------------------------------------------------


def test_list_is_newest_first_with_limit_and_before(saver):
    made = chain(saver, "t", 7)
    newest_first = [id_of(at) for at in reversed(made)]
    assert ids(saver.list(config("t"))) == newest_first
    for limit in (1, 3, 7, 20):
        assert ids(saver.list(config("t"), limit=limit)) == newest_first[:limit]
    assert ids(saver.list(config("t"), limit=0)) == []
    for number, at in enumerate(made):
        assert ids(saver.list(config("t"), before=at)) == newest_first[7 - number :]
        assert ids(saver.list(config("t"), before=at, limit=2)) == newest_first[7 - number :][:2]
    assert ids(saver.list(made[3])) == [id_of(made[3])], "a config with an id is that one"
    assert ids(saver.list(config("t"), before=config("t", "", "0"))) == []
    assert ids(saver.list(config("t"), before=config("t", "", "f"))) == newest_first


def test_list_filters_by_metadata(saver):
    at = config("t")
    for step in range(6):
        metadata = {"source": ("input", "loop", "update")[step % 3], "step": step, "parents": {}}
        if step == 4:
            metadata["extra"] = "yes"
        at = saver.put(at, checkpoint(), metadata, {})

    def steps(**wanted) -> list[int]:
        return [found.metadata["step"] for found in saver.list(config("t"), filter=wanted)]

    assert steps(source="input") == [3, 0]
    assert steps(source="loop", step=4) == [4]
    assert steps(extra="yes") == [4]
    assert steps(extra="no") == steps(source="fork") == steps(step=99) == []
    assert [f.metadata["step"] for f in saver.list(config("t"), filter={"source": "update"}, limit=1)] == [5]
    assert steps() == [5, 4, 3, 2, 1, 0]


def test_list_of_a_namespace_of_a_thread_and_of_all_threads(saver):
    root = chain(saver, "t", 3)
    inner = chain(saver, "t", 2, ns="inner:1")
    other = chain(saver, "u", 2)
    assert ids(saver.list(config("t", ""))) == [id_of(at) for at in reversed(root)]
    assert ids(saver.list(config("t", "inner:1"))) == [id_of(at) for at in reversed(inner)]
    whole = list(saver.list({"configurable": {"thread_id": "t"}}))
    assert sorted(ids(whole)) == sorted(map(id_of, root + inner))
    everything = list(saver.list(None))
    assert sorted(ids(everything)) == sorted(map(id_of, root + inner + other))
    for found in everything:
        conf = found.config["configurable"]
        where = (conf["thread_id"], conf["checkpoint_ns"])
        assert found.checkpoint["id"] in {
            id_of(at) for at in {("t", ""): root, ("t", "inner:1"): inner, ("u", ""): other}[where]
        }
    assert len(list(saver.list(None, limit=4))) == 4


def test_list_over_all_namespaces_is_newest_first(ours):
    """In one order, as the SQL savers have it."""
    at = {"": config("t"), "x": config("t", "x")}
    made = []
    for ns in ("", "x", "x", "", "x", ""):
        at[ns] = ours.put(at[ns], checkpoint(), META, {})
        made.append(id_of(at[ns]))
    assert ids(ours.list({"configurable": {"thread_id": "t"}})) == made[::-1]
    assert ids(ours.list({"configurable": {"thread_id": "t"}}, limit=3)) == made[:-4:-1]
    assert ids(ours.list(None, limit=2)) == made[:-3:-1]


def test_list_of_a_forked_thread_has_every_line(saver):
    made = chain(saver, "t", 4)
    side = chain(saver, "t", 2, start=made[1])
    assert ids(saver.list(config("t"))) == [id_of(at) for at in reversed(made + side)]
    assert id_of(saver.get_tuple(side[0]).parent_config) == id_of(made[1])
    assert saver.get_tuple(side[1]).checkpoint["channel_values"]["messages"][-1] == "t  3"
    assert id_of(saver.get_tuple(config("t")).config) == id_of(side[1])
    back = chain(saver, "t", 1, start=made[3])
    assert saver.get_tuple(back[0]).checkpoint["channel_values"]["number"] == 4
    assert id_of(saver.get_tuple(config("t")).config) == id_of(back[0])


def test_a_checkpoint_may_grow_from_a_parent_that_is_not_there(saver):
    """After a prune elsewhere, or with durability="exit", where steps in between are never saved."""
    lost = config("t", "", str(graphs.uuid6(clock_seq=-2)))
    at = saver.put(lost, checkpoint({"a": 1}), META, {"a": 1})
    assert id_of(saver.get_tuple(at).parent_config) == id_of(lost)
    later = saver.put(at, checkpoint({"a": 2}, channel_versions={"a": 2}), META, {"a": 2})
    assert id_of(saver.get_tuple(later).parent_config) == id_of(at)


# -- writes -------------------------------------------------------------------------------------------------


def test_writes_come_in_the_order_of_path_task_and_index(saver):
    (at,) = chain(saver, "t", 1)
    saver.put_writes(at, [("c", 1), ("d", 2)], "task-b", "~2")
    saver.put_writes(at, [("c", 3), ("d", 4)], "task-a", "~2")
    saver.put_writes(at, [("c", 5)], "task-z", "~1")
    saver.put_writes(at, [("c", 6)], "task-c")
    expected = [
        ("task-c", "c", 6),
        ("task-z", "c", 5),
        ("task-a", "c", 3),
        ("task-a", "d", 4),
        ("task-b", "c", 1),
        ("task-b", "d", 2),
    ]
    assert saver.get_tuple(at).pending_writes == expected
    assert next(saver.list(config("t"))).pending_writes == expected


def test_a_write_that_is_there_stays_and_special_ones_are_replaced(saver):
    (at,) = chain(saver, "t", 1)
    saver.put_writes(at, [("c", "first"), ("d", "first")], "task")
    saver.put_writes(at, [("c", "second"), ("d", "second"), ("e", "new")], "task")
    assert saver.get_tuple(at).pending_writes == [("task", "c", "first"), ("task", "d", "first"), ("task", "e", "new")]
    for channel in sorted(WRITES_IDX_MAP):
        saver.put_writes(at, [(channel, "old")], f"special {channel}")
        saver.put_writes(at, [(channel, "new")], f"special {channel}")
    found = {(task, channel): value for task, channel, value in saver.get_tuple(at).pending_writes}
    for channel in WRITES_IDX_MAP:
        assert found[f"special {channel}", channel] == "new"
    assert found["task", "c"] == "first"


def test_writes_belong_to_their_checkpoint_namespace_and_thread(saver):
    one, two = chain(saver, "t", 2)
    (inner,) = chain(saver, "t", 1, ns="inner")
    (other,) = chain(saver, "u", 1)
    for name, at in (("one", one), ("two", two), ("inner", inner), ("other", other)):
        saver.put_writes(at, [("c", name)], "task")
    for name, at in (("one", one), ("two", two), ("inner", inner), ("other", other)):
        assert saver.get_tuple(at).pending_writes == [("task", "c", name)]
    after = saver.put(two, checkpoint(), META, {})
    assert saver.get_tuple(after).pending_writes == []
    assert [found.pending_writes for found in saver.list(config("t", ""))] == [
        [],
        [("task", "c", "two")],
        [("task", "c", "one")],
    ]


def test_writes_may_come_before_their_checkpoint(saver):
    """With durability="exit" and in subgraphs they do."""
    early = checkpoint({"a": 1})
    saver.put_writes(config("t", "", early["id"]), [("a", 2)], "task", "~p")
    assert saver.get_tuple(config("t")) is None
    at = saver.put(config("t"), early, META, {"a": 1})
    assert saver.get_tuple(at).pending_writes == [("task", "a", 2)]


def test_empty_writes_are_no_writes(saver):
    (at,) = chain(saver, "t", 1)
    saver.put_writes(at, [], "task")
    assert saver.get_tuple(at).pending_writes == []


def test_writes_from_many_threads_are_all_there(ours):
    (at,) = chain(ours, "t", 1)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                ours.put_writes(at, [("c", (number, turn))], f"task {number} {turn}", f"{number:02} {turn:02}")
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    found = [value for _, _, value in ours.get_tuple(at).pending_writes]
    assert found == [(number, turn) for number in range(6) for turn in range(20)]


# -- removing and copying -----------------------------------------------------------------------------------


def everything(saver, thread) -> list:
    return [told(found) for found in saver.list({"configurable": {"thread_id": thread}})]


def rich(saver, thread: str) -> list:
    """A thread with a fork, a namespace, writes and several runs. Returns the configs of its root namespace."""
    made = []
    at = config(thread)
    for number in range(6):
        one = checkpoint({"m": [f"{thread} {n}" for n in range(number + 1)]}, channel_versions={"m": number + 1})
        at = saver.put(at, one, {**META, "step": number, "run_id": f"run-{number // 2}"}, {"m": number + 1})
        saver.put_writes(at, [("m", f"write {number}")], f"task {number}", f"~{number}")
        made.append(at)
    side = saver.put(made[2], checkpoint({"m": ["side"]}), {**META, "run_id": "side"}, {"m": 1})
    at = saver.put(made[5], checkpoint({"m": ["on"]}), {**META, "run_id": "run-3"}, {"m": 7})
    chain(saver, thread, 3, ns="inner:1")
    return [*made, side, at]


def renamed(found: list, name: str) -> list:
    """The same tuples, as another thread's."""
    return [
        {
            **one,
            "config": {**one["config"], "thread_id": name},
            "parent": {**one["parent"], "thread_id": name} if one["parent"] else None,
        }
        for one in found
    ]


def test_delete_thread_removes_it_and_nothing_else(saver):
    rich(saver, "t")
    rich(saver, "u")
    before = everything(saver, "u")
    saver.delete_thread("t")
    saver.delete_thread("never was")
    assert everything(saver, "t") == []
    assert saver.get_tuple(config("t")) is None
    assert saver.get_tuple(config("t", "inner:1")) is None
    assert everything(saver, "u") == before
    made = chain(saver, "t", 2)
    assert ids(saver.list(config("t"))) == [id_of(at) for at in reversed(made)], "a new thread of that name is empty"
    assert saver.get_tuple(config("t", "inner:1")) is None


def test_delete_for_runs_removes_what_they_made(ours):
    made = rich(ours, "t")
    rich(ours, "u")
    ours.delete_for_runs([])
    ours.delete_for_runs(["nobody"])
    before = everything(ours, "t")
    ours.delete_for_runs(["run-1", "run-3"])
    for thread in ("t", "u"):
        after = everything(ours, thread)
        assert {one["metadata"].get("run_id") for one in after} == {"run-0", "run-2", "side", None}
    assert everything(ours, "t") == [one for one in before if one["metadata"].get("run_id") not in {"run-1", "run-3"}]
    assert ours.get_tuple(made[3]) is None
    assert ours.get_tuple(made[7]) is None, "it was where the thread stood"
    newest = ours.get_tuple(config("t"))
    assert newest is not None
    assert newest.metadata["run_id"] in {"run-2", "side"}
    after = chain(ours, "t", 0) or ours.put(newest.config, checkpoint({"m": ["after"]}), META, {"m": 8})
    assert ours.get_tuple(config("t")).checkpoint["channel_values"] == {"m": ["after"]}
    assert id_of(ours.get_tuple(after).parent_config) == newest.checkpoint["id"]


def test_delete_for_runs_of_everything_leaves_an_empty_thread(ours):
    rich(ours, "t")
    ours.delete_thread("t")
    at = ours.put(config("t"), checkpoint({"a": 1}), {**META, "run_id": "r"}, {})
    ours.put(at, checkpoint({"a": 2}), {**META, "run_id": "r"}, {})
    ours.delete_for_runs(["r"])
    assert ours.get_tuple(config("t")) is None
    assert everything(ours, "t") == []
    chain(ours, "t", 2)
    assert len(everything(ours, "t")) == 2


def test_copy_is_the_same_history_and_independent_both_ways(ours):
    made = rich(ours, "t")
    original = everything(ours, "t")
    ours.copy_thread("t", "u")
    assert everything(ours, "u") == renamed(original, "u")
    assert told(ours.get_tuple(config("u")))["checkpoint"] == told(ours.get_tuple(config("t")))["checkpoint"]
    for at in made:
        copied = ours.get_tuple(config("u", "", id_of(at)))
        assert told(copied)["checkpoint"] == told(ours.get_tuple(at))["checkpoint"]
        assert copied.pending_writes == ours.get_tuple(at).pending_writes

    # what happens to either does not show in the other
    newest = ours.get_tuple(config("u")).config
    ours.put(newest, checkpoint({"m": ["copy went on"]}), META, {"m": 20})
    ours.put_writes(newest, [("m", "of the copy")], "task of the copy")
    ours.put_writes(config("u", "", id_of(made[1])), [("m", "of the copy")], "task of the copy")
    assert everything(ours, "t") == original
    grown = everything(ours, "u")
    assert len(grown) == len(original) + 1
    ours.put(made[-1], checkpoint({"m": ["original went on"]}), META, {"m": 30})
    ours.put_writes(made[0], [("m", "of the original")], "task of the original")
    assert everything(ours, "u") == grown
    assert ours.get_tuple(config("t")).checkpoint["channel_values"] == {"m": ["original went on"]}
    assert ours.get_tuple(config("u")).checkpoint["channel_values"] == {"m": ["copy went on"]}


def test_removing_from_the_original_leaves_the_copy_and_the_other_way_round(ours):
    for removal in ("delete", "keep", "runs", "delete the copy", "keep the copy"):
        source, target = f"{removal} source", f"{removal} target"
        rich(ours, source)
        ours.copy_thread(source, target)
        original, copied = everything(ours, source), everything(ours, target)
        if removal == "delete":
            ours.delete_thread(source)
            assert everything(ours, target) == copied
            ours.copy_thread(target, source)
            assert everything(ours, source) == original
        elif removal == "keep":
            ours.prune([source])
            assert len(everything(ours, source)) == 2
            assert everything(ours, target) == copied
        elif removal == "runs":
            # both have what the run made, so both lose it
            ours.delete_for_runs(["run-1"])
            left = [one for one in original if one["metadata"].get("run_id") != "run-1"]
            assert everything(ours, source) == left
            assert everything(ours, target) == renamed(left, target)
        elif removal == "delete the copy":
            ours.delete_thread(target)
            assert everything(ours, source) == original
        else:
            ours.prune([target])
            assert len(everything(ours, target)) == 2
            assert everything(ours, source) == original
        assert ours.store.verify().ok, str(ours.store.verify())
        for name in (source, target):
            if (newest := ours.get_tuple(config(name))) is not None:
                ours.put(newest.config, checkpoint({"m": ["goes on"]}), META, {"m": 99})
                assert ours.get_tuple(config(name)).checkpoint["channel_values"] == {"m": ["goes on"]}


def test_copy_of_nothing_and_onto_something(ours):
    chain(ours, "t", 2)
    chain(ours, "u", 1)
    before = everything(ours, "u")
    with pytest.raises(HoldfastError):
        ours.copy_thread("t", "u")
    assert everything(ours, "u") == before
    with suppress(HoldfastError):
        ours.copy_thread("never was", "v")
    assert everything(ours, "v") == []


def test_copy_copies_no_bytes(ours):
    made = chain(ours, "t", 1)
    ours.put(made[-1], checkpoint({"text": "x" * 200_000}), META, {"text": 1})
    before = ours.store.stats()["counts"]
    ours.copy_thread("t", "u")
    after = ours.store.stats()["counts"]
    for table in ("checkpoint", "node", "tail", "chunk"):
        assert after[table] == before[table]
    assert ours.get_tuple(config("u")).checkpoint["channel_values"]["text"] == "x" * 200_000


def test_prune_keeps_the_newest_of_each_namespace_with_its_writes(ours):
    rich(ours, "t")
    rich(ours, "u")
    newest = ours.get_tuple(config("t"))
    ours.put_writes(newest.config, [("m", "pending")], "pending task")
    newest, inner = told(ours.get_tuple(config("t"))), told(ours.get_tuple(config("t", "inner:1")))
    untouched = everything(ours, "u")
    size = ours.store.stats()["counts"]
    ours.prune(["t", "never was"])
    assert told(ours.get_tuple(config("t"))) == newest
    assert told(ours.get_tuple(config("t", "inner:1"))) == inner
    assert len(everything(ours, "t")) == 2
    assert everything(ours, "u") == untouched
    assert ours.store.stats()["counts"]["checkpoint"] < size["checkpoint"]
    ours.prune(["t"], strategy="keep_latest")
    assert told(ours.get_tuple(config("t"))) == newest
    after = ours.put(ours.get_tuple(config("t")).config, checkpoint({"m": ["on"]}), META, {"m": 9})
    assert ids(ours.list(config("t"))) == [id_of(after), newest["checkpoint"]["id"]]
    ours.prune(["t", "u"], strategy="delete")
    assert everything(ours, "t") == everything(ours, "u") == []
    with pytest.raises(BadOption):
        ours.prune(["t"], strategy="keep_none")


# -- delta channels -----------------------------------------------------------------------------------------


def delta_thread(saver, thread: str) -> dict[str, dict]:
    """A thread with a fork in which channel ``a`` is whole now and then, ``b`` once, ``c`` never."""
    places = {}
    at = config(thread)
    for number in range(9):
        values = {"plain": number}
        if number % 4 == 1:
            values["a"] = [f"whole {number}"]
        if number == 2:
            values["b"] = {"whole": number}
        one = checkpoint(values, channel_versions=dict.fromkeys("abc", number + 1) | {"plain": number + 1})
        at = saver.put(at, one, {**META, "step": number}, one["channel_versions"])
        saver.put_writes(at, [("a", f"a {number} right"), ("c", f"c {number}")], f"task {number} x", "~2")
        saver.put_writes(at, [("b", f"b {number}"), ("a", f"a {number} left")], f"task {number} y", "~1")
        places[f"main {number}"] = at
    at = places["main 3"]
    for number in range(3):
        one = checkpoint({"plain": -number}, channel_versions=dict.fromkeys("abc", number + 50) | {"plain": 50})
        at = saver.put(at, one, {**META, "step": number}, one["channel_versions"])
        saver.put_writes(at, [("a", f"side {number}"), ("b", f"side {number}")], f"side task {number}", "~1")
        places[f"side {number}"] = at
    return places


def by_default(saver, at, channels) -> dict:
    """What LangGraph's own walk over the parents finds."""
    return BaseCheckpointSaver.get_delta_channel_history(saver, config=at, channels=channels)


CHANNELS = ["a", "b", "c", "plain", "nobody"]


def test_delta_history_is_what_the_default_walk_finds(saver):
    places = delta_thread(saver, "t")
    for name, at in places.items():
        found = dict(saver.get_delta_channel_history(config=at, channels=CHANNELS))
        assert found == by_default(saver, at, CHANNELS), name
    newest = saver.get_delta_channel_history(config=config("t"), channels=["a", "b"])
    assert dict(newest) == by_default(saver, places["side 2"], ["a", "b"]), "without an id, where the thread stands"
    assert newest["b"]["seed"] == {"whole": 2}
    assert [value for _, _, value in newest["b"]["writes"]] == ["b 2", "b 3", "side 0", "side 1"]
    nothing = saver.get_delta_channel_history(config=config("never was"), channels=["a"])
    assert dict(nothing) == {"a": {"writes": []}}
    assert dict(saver.get_delta_channel_history(config=places["main 4"], channels=[])) == {}


def test_delta_history_of_a_copy_is_that_of_the_original(ours):
    places = delta_thread(ours, "t")
    ours.copy_thread("t", "u")
    for at in places.values():
        copied = config("u", "", id_of(at))
        expected = by_default(ours, at, CHANNELS)
        assert dict(ours.get_delta_channel_history(config=copied, channels=CHANNELS)) == expected
        assert by_default(ours, copied, CHANNELS) == expected
    # writes that come later belong to one of them
    ours.put_writes(config("u", "", id_of(places["main 7"])), [("a", "of the copy")], "late task", "~9")
    expected = by_default(ours, places["main 8"], CHANNELS)
    assert dict(ours.get_delta_channel_history(config=places["main 8"], channels=CHANNELS)) == expected
    assert "of the copy" not in [value for _, _, value in expected["a"]["writes"]]
    in_copy = ours.get_delta_channel_history(config=config("u", "", id_of(places["main 8"])), channels=["a"])
    assert "of the copy" in [value for _, _, value in in_copy["a"]["writes"]]


def rebuilt(history) -> dict:
    """What a channel is made of: its last whole value, and what was written since."""
    return {
        channel: (found.get("seed"), [value for _, _, value in found["writes"]]) for channel, found in history.items()
    }


def test_delta_history_survives_pruning(ours):
    delta_thread(ours, "t")
    ours.copy_thread("t", "u")
    newest = ours.get_tuple(config("t")).config
    before = rebuilt(ours.get_delta_channel_history(config=newest, channels=["a", "b", "c"]))
    for _ in range(2):
        ours.prune(["t"])
        assert len(everything(ours, "t")) == 1
        assert rebuilt(ours.get_delta_channel_history(config=newest, channels=["a", "b", "c"])) == before
    copied = ours.get_tuple(config("u")).config
    assert rebuilt(ours.get_delta_channel_history(config=copied, channels=["a", "b", "c"])) == before
    # and what grows from there still has it, with what is written from now on
    ours.put_writes(newest, [("a", "one more")], "task", "~1")
    after = ours.put(newest, checkpoint({}, channel_versions=dict.fromkeys("abc", 90)), META, {})
    grown = rebuilt(ours.get_delta_channel_history(config=after, channels=["a", "b", "c"]))
    pending = [value for _, channel, value in ours.get_tuple(newest).pending_writes if channel == "a"]
    assert grown["a"] == (before["a"][0], [*before["a"][1], *pending])
    ours.prune(["t"])
    assert rebuilt(ours.get_delta_channel_history(config=after, channels=["a", "b", "c"])) == grown


def test_delta_history_survives_the_deletion_of_runs(ours):
    at, places = config("t"), []
    for number in range(8):
        values = {"a": ["whole"]} if number == 1 else {}
        one = checkpoint(values, channel_versions={"a": number + 1})
        at = ours.put(at, one, {**META, "step": number, "run_id": f"run {number}"}, {"a": number + 1})
        ours.put_writes(at, [("a", f"write {number}")], f"task {number}", "~1")
        places.append(at)
    before = [rebuilt(ours.get_delta_channel_history(config=at, channels=["a"])) for at in places]
    for gone in (3, 1, 0, 6):
        ours.delete_for_runs([f"run {gone}"])
        for number, at in enumerate(places):
            if ours.get_tuple(at) is not None:
                found = rebuilt(ours.get_delta_channel_history(config=at, channels=["a"]))
                assert found == before[number], f"checkpoint {number} after the deletion of run {gone}"


def test_a_delta_graph_goes_on_after_prune_copy_and_restart(store_path):
    thread, copy = {"configurable": {"thread_id": "t"}}, {"configurable": {"thread_id": "u"}}
    with HoldfastSaver(store_path) as saver:
        graph = graphs.delta(saver)
        for number in range(7):
            graph.invoke({"items": [f"turn {number}"]}, thread)
        expected = graph.get_state(thread).values
        assert len(expected["items"]) == 21
        saver.copy_thread("t", "u")
        saver.prune(["t"])
        assert graph.get_state(thread).values == graph.get_state(copy).values == expected
        assert len(list(graph.get_state_history(thread))) == 1
        assert len(list(graph.get_state_history(copy))) > 20
    with HoldfastSaver(store_path) as saver:
        graph = graphs.delta(saver)
        for each in (thread, copy):
            assert graph.get_state(each).values == expected
            graph.invoke({"items": ["after"]}, each)
            assert graph.get_state(each).values["items"] == [*expected["items"], "after", "left 22", "right 22"]
        saver.prune(["t", "u"])
        assert graph.get_state(thread).values == graph.get_state(copy).values
        assert graph.get_state(thread).values["count"] == 24
        assert saver.store.verify().ok


# -- versions, values, types --------------------------------------------------------------------------------


def test_next_version_is_greater_and_of_the_kind_of_the_current_one(ours):
    version = None
    for _ in range(5):
        following = ours.get_next_version(version, None)
        assert version is None or following > version
        version = following
    text = InMemorySaver().get_next_version(None, None)
    for _ in range(12):
        following = ours.get_next_version(text, None)
        assert isinstance(following, str)
        assert following > text
        assert InMemorySaver().get_next_version(following, None) > following
        text = following


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    tags: set


class Model(BaseModel):
    when: datetime
    parts: tuple[int, ...]


EXACT = {
    "set of tuples": {(1, "a"), (2, "b")},
    "frozenset": frozenset({1, (2, 3)}),
    "tuple": (1, [2, (3,)], {"k": (4,)}),
    "tuple keys": {(1, 2): "x", 3: "y", None: "z", True: "t"},
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"abc"),
    "numbers": [1, 1.0, True, -0.0, 2**200, 1e300, complex(1, 2)],
    "decimal": Decimal("1.10"),
    "moment": datetime(2026, 5, 1, 9, 30, tzinfo=UTC),
    "uuid": uuid.UUID(int=7),
    "deque": deque([1, 2], maxlen=5),
    "ordered": OrderedDict(b=1, a=2),
    "colour": Colour.RED,
    "point": Point(1, {("deep", 1)}),
    "model": Model(when=datetime(2026, 1, 1, tzinfo=UTC), parts=(1, 2)),
    "surrogate": "\ud800 text \x00",
    "document": Document(page_content="text", metadata={"pages": (1, 2)}, id="d"),
    "messages": [
        HumanMessage([{"type": "text", "text": "hi"}, {"type": "image", "url": "u"}], id="1", name="me"),
        AIMessage(
            "text",
            id="2",
            tool_calls=[{"name": "f", "args": {"x": 1}, "id": "c", "type": "tool_call"}],
            usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
            response_metadata={"set": {1, 2}},
        ),
        AIMessageChunk("part", id="3"),
        SystemMessage("system", id="4"),
        ToolMessage("result", tool_call_id="c", id="5", artifact={"raw": (1, 2)}, status="error"),
        ChatMessage("other", role="critic", id="6"),
        FunctionMessage("result", name="f", id="7"),
        RemoveMessage(id="8"),
    ],
    "control": [
        Send("node", {"x": (1,)}),
        Command(update={"a": {1}}, goto=["b", Send("c", 1)], resume={"i": 2}),
        Interrupt(value={"q": (1,)}, id="0" * 32),
    ],
}


def exact(found, expected, path: str = "value") -> None:
    """Equal, and of the same types all the way down."""
    assert type(found) is type(expected), f"{path}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        assert [type(key) for key in found] == [type(key) for key in expected], path
        for key, value in expected.items():
            exact(found[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            exact(one, other, f"{path}[{number}]")
    elif isinstance(expected, BaseModel):
        assert found == expected, path
        assert found.model_fields_set == expected.model_fields_set, path
        for name in type(expected).model_fields:
            exact(getattr(found, name), getattr(expected, name), f"{path}.{name}")
    else:
        assert found == expected, path
        assert repr(found) == repr(expected) or isinstance(expected, (set, frozenset)), path


@pytest.mark.parametrize("name", list(EXACT))
def test_values_come_back_exact(store_path, name):
    """Also those that LangGraph's own serializer flattens: in channels, in metadata-free writes, after a restart."""
    value = EXACT[name]
    types = [Colour, Point, Model]
    with HoldfastSaver(store_path, types=types) as saver:
        at = saver.put(config("t"), checkpoint({"v": value, "in": {"deep": [value]}}), META, {})
        saver.put_writes(at, [("v", value)], "task")
        after = saver.put(at, checkpoint({"v": value, "more": 1}), META, {})
    with HoldfastSaver(store_path, types=types) as saver:
        for place in (at, after):
            exact(saver.get_tuple(place).checkpoint["channel_values"]["v"], value)
        exact(saver.get_tuple(at).checkpoint["channel_values"]["in"]["deep"][0], value)
        exact(saver.get_tuple(at).pending_writes[0][2], value)
        for found in saver.list(config("t")):
            exact(found.checkpoint["channel_values"]["v"], value)


def test_arrays_come_back(ours):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    at = ours.put(config("t"), checkpoint({"v": array}), META, {})
    found = ours.get_tuple(at).checkpoint["channel_values"]["v"]
    assert found.dtype == array.dtype
    assert (found == array).all()


class Stranger:
    def __init__(self) -> None:
        self.x = 1


def test_a_type_nobody_allowed_is_refused_with_its_place(ours):
    made = chain(ours, "t", 2)
    before = everything(ours, "t")
    with pytest.raises(Unencodable) as caught:
        ours.put(made[-1], checkpoint({"fine": 1, "odd": {"deep": [Stranger()]}}), META, {})
    assert "Stranger" in str(caught.value)
    assert "odd" in str(caught.value)
    with pytest.raises(Unencodable):
        ours.put_writes(made[-1], [("c", Stranger())], "task")
    assert everything(ours, "t") == before, "nothing of a refused checkpoint is stored"
    after = ours.put(made[-1], checkpoint({"messages": ["goes on"]}), META, {})
    assert ours.get_tuple(after).checkpoint["channel_values"] == {"messages": ["goes on"]}


def test_a_type_that_is_stored_and_not_known_here_is_an_error_not_none(store_path):
    with HoldfastSaver(store_path, types=[Point]) as saver:
        at = saver.put(config("t"), checkpoint({"p": Point(1, set())}), META, {})
        saver.put_writes(at, [("p", Point(2, set()))], "task")
        fine = saver.put(config("u"), checkpoint({"n": 1}), META, {})
    with HoldfastSaver(store_path) as saver:
        for read in (saver.get_tuple, lambda at: list(saver.list(at))):
            with pytest.raises(UnknownType) as caught:
                read(at)
            assert "Point" in caught.value.type_name
        assert saver.get_tuple(fine).checkpoint["channel_values"] == {"n": 1}
        known = saver.with_allowlist({(Point.__module__, "Point")})
        assert known.get_tuple(at).checkpoint["channel_values"] == {"p": Point(1, set())}


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thread", [17, uuid.UUID(int=3), "with spaces / and: colons", "at@sign@main", "main", "é\U0001f600", "x" * 300]
)
def test_thread_ids_of_all_kinds(ours, thread):
    made = chain(ours, thread, 3)
    assert ids(ours.list(config(thread))) == [id_of(at) for at in reversed(made)]
    assert ours.get_tuple(config(str(thread))).checkpoint["id"] == id_of(made[-1])
    assert ours.get_tuple(made[0]).checkpoint["channel_values"]["number"] == 0
    ours.put_writes(made[-1], [("c", 1)], "task")
    ours.copy_thread(thread, "copy")
    assert ours.get_tuple(config("copy")).pending_writes == [("task", "c", 1)]
    ours.prune([thread])
    assert len(everything(ours, thread)) == 1
    ours.delete_thread(thread)
    assert ours.get_tuple(config(thread)) is None
    assert len(everything(ours, "copy")) == 3


@pytest.mark.parametrize("thread", ["", " ", "a\x00b", "\ud800", "y" * 100_000])
def test_thread_ids_that_cannot_be_names_are_refused_or_work(ours, thread):
    try:
        made = chain(ours, thread, 2)
    except HoldfastError:
        with pytest.raises(HoldfastError):
            ours.put_writes(config(thread, "", "x"), [("c", 1)], "task")
    else:
        assert ours.get_tuple(config(thread)).checkpoint["id"] == id_of(made[-1])
    with suppress(HoldfastError):
        ours.get_tuple(config(thread))
        list(ours.list(config(thread)))


ODD_NAMESPACES = [
    "main",
    "ns-main",
    "child:1|grandchild:2",
    "with space ",
    " ",
    "at@sign",
    "ns-0123456789abcdef",
    "x" * 2_000,
    "x" * 2_001,
    "é|\U0001f600",
    "a\nb",
    "a\x00b",
]


def test_namespaces_of_all_kinds_are_kept_apart(ours):
    made = {ns: chain(ours, "t", 2, ns=ns) for ns in ["", *ODD_NAMESPACES]}
    for ns, places in made.items():
        ours.put_writes(places[0], [("c", ns)], "task")
    for ns, places in made.items():
        assert ids(ours.list(config("t", ns))) == [id_of(at) for at in reversed(places)], ns[:40]
        found = ours.get_tuple(config("t", ns))
        assert found.config["configurable"]["checkpoint_ns"] == ns
        assert found.checkpoint["channel_values"]["messages"] == [f"t {ns} 0", f"t {ns} 1"]
        assert ours.get_tuple(places[0]).pending_writes == [("task", "c", ns)]
    assert len(everything(ours, "t")) == 2 * len(made)


# -- its life -----------------------------------------------------------------------------------------------


def test_closing_and_opening_again_gives_the_same_and_goes_on(store_path):
    with HoldfastSaver(store_path) as saver:
        made = rich(saver, "t")
        before = everything(saver, "t")
    with pytest.raises(StoreClosed):
        saver.get_tuple(config("t"))
    with pytest.raises(StoreClosed):
        saver.put(made[-1], checkpoint(), META, {})
    with HoldfastSaver(store_path) as saver:
        assert everything(saver, "t") == before
        for start in (made[-1], made[0], made[6]):
            at = saver.put(start, checkpoint({"m": ["on"]}), META, {"m": 40})
            assert id_of(saver.get_tuple(at).parent_config) == id_of(start)
        assert saver.store.verify().ok


def test_threads_of_one_saver_do_not_disturb_each_other(ours):
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            chain(ours, name, 15)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    for number in range(6):
        name = f"thread {number}"
        found = ours.get_tuple(config(name)).checkpoint["channel_values"]["messages"]
        assert found == [f"{name}  {n}" for n in range(15)]
        assert len(everything(ours, name)) == 15
