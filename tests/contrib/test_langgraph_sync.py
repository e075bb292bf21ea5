"""The saver's synchronous methods, call by call. What is LangGraph's contract is asked of its own savers as well."""

from __future__ import annotations

import asyncio
import threading

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver

from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import StoreClosed
from tests.contrib.threads import META, chain, checkpoint, config, everything, id_of, ids, rich

# -- checkpoints --------------------------------------------------------------------------------------------


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
    at = saver.put(config("t"), checkpoint({"m": messages}, channel_versions={"m": 1}), META, {"m": 1})
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


def test_a_channel_that_langgraph_did_not_change_is_taken_from_the_parent_if_that_has_its_version(ours):
    held = [HumanMessage("x", id="1")]

    def put(at, said, version, new):
        one = checkpoint({"m": [*held, said], "n": 0}, channel_versions={"m": version, "n": 1})
        return ours.put(at, one, META, dict.fromkeys(new, version))

    def found(at):
        return ours.get_tuple(at).checkpoint["channel_values"]["m"][-1]

    first = put(config("t"), "one", 1, ["m", "n"])
    assert found(put(first, object(), 1, [])) == "one", "not even looked at"
    assert found(put(first, "two", 2, [])) == "two", "the parent has another version"
    assert found(put(first, "three", "1", [])) == "three", "which is not the same as 1"
    assert found(put(first, "four", 1, ["m"])) == "four"
    second = put(first, "five", 5, ["m"])
    assert found(put(second, object(), 5, ["n"])) == "five"
    assert found(put(first, "six", 5, ["n"])) == "six", "the parent is another one"
    assert found(put(config("other"), "seven", 1, [])) == "seven", "there is no parent"
    bare = ours.put(second, checkpoint({"n": 0}, channel_versions={"m": 5, "n": 1}), META, {})
    assert list(ours.get_tuple(bare).checkpoint["channel_values"]) == ["n"], "it has become empty"
    assert found(put(bare, "eight", 5, [])) == "eight"


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
    lost = config("t", "", str(uuid6(clock_seq=-2)))
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


def test_tasks_of_one_event_loop_wait_for_each_other_without_end(ours):
    """More writes on their way than the loop has threads, and the checkpoint that takes them along."""

    async def work() -> None:
        at = await ours.aput(config("t"), checkpoint({"n": 0}), META, {"n": 1})
        for turn in range(10):
            writes = [ours.aput_writes(at, [("c", number)], f"task {number:03}") for number in range(60)]
            following = checkpoint({"n": turn + 1})
            after = ours.aput(at, following, META, {"n": turn + 2})
            *_, at = await asyncio.wait_for(asyncio.gather(*writes, after), 180)

    asyncio.run(work())
    found = list(ours.list(config("t")))
    assert [one.checkpoint["channel_values"]["n"] for one in found] == list(range(10, -1, -1))
    for one in found[1:]:
        assert [value for _, _, value in one.pending_writes] == list(range(60))


def test_a_lease_is_let_go_after_each_call_and_taken_up_again_without_a_commit(ours):
    at = config("t")
    thread = ours._known("t")
    for number in range(20):
        at = ours.put(at, checkpoint({"n": number}), META, {"n": number})
        assert not thread.held
        ours.put_writes(at, [("c", number)], "task")
        assert not thread.held
    found = list(ours.list(config("t")))
    assert [one.checkpoint["channel_values"]["n"] for one in found] == list(range(19, -1, -1))
    assert [one.pending_writes for one in found] == [[("task", "c", number)] for number in range(19, -1, -1)]
    assert [branch.generation for branch in ours.store._db.view.branches(thread.row.a)] == [1]
    assert ours.store.stats()["writers"] == [], "nobody holds it"


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
