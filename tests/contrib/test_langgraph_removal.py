"""Removing, pruning and copying threads, and what delta channels still find afterwards."""

from __future__ import annotations

from contextlib import closing, suppress

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver

import holdfast
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import BadName, BadOption, HoldfastError
from tests.contrib import graphs
from tests.contrib.threads import META, chain, checkpoint, config, everything, id_of, ids, renamed, rich, told


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
    for removal in ("delete", "keep", "runs", "delete the copy", "keep one that went on"):
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
            assert (everything(ours, source), everything(ours, target)) == (original, copied), "the copy sees it all"
            ours.prune([source, target])
            assert len(everything(ours, source)) == len(everything(ours, target)) == 2
        elif removal == "runs":
            # both have what the run made, so both lose it
            ours.delete_for_runs(["run-1"])
            left = [one for one in original if one["metadata"].get("run_id") != "run-1"]
            assert everything(ours, source) == left
            assert everything(ours, target) == renamed(left, target)
        elif removal == "delete the copy":
            ours.delete_thread(target)
            assert everything(ours, source) == original
        else:  # the copy has gone on, and only it sees that
            at = ours.get_tuple(config(target)).config
            for number in range(3):
                at = ours.put(at, checkpoint({"m": [number]}), META, {"m": 50 + number})
            ours.prune([target])
            assert len(everything(ours, target)) == len(copied) + 1
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
    for table in ("checkpoint", "segment", "node", "chunk"):
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
    counted = {**META, "counters_since_delta_snapshot": dict.fromkeys("abc", (1, 1))}
    at = config(thread)
    for number in range(9):
        values = {"plain": number}
        if number % 4 == 1:
            values["a"] = [f"whole {number}"]
        if number == 2:
            values["b"] = {"whole": number}
        one = checkpoint(values, channel_versions=dict.fromkeys("abc", number + 1) | {"plain": number + 1})
        at = saver.put(at, one, {**counted, "step": number}, one["channel_versions"])
        saver.put_writes(at, [("a", f"a {number} right"), ("c", f"c {number}")], f"task {number} x", "~2")
        saver.put_writes(at, [("b", f"b {number}"), ("a", f"a {number} left")], f"task {number} y", "~1")
        places[f"main {number}"] = at
    at = places["main 3"]
    for number in range(3):
        one = checkpoint({"plain": -number}, channel_versions=dict.fromkeys("abc", number + 50) | {"plain": 50})
        at = saver.put(at, one, {**counted, "step": number}, one["channel_versions"])
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


def test_pruning_keeps_what_delta_channels_are_rebuilt_from(ours):
    at, places = config("t"), []
    for number in range(12):
        values = {"a": [f"whole {number}"]} if number % 4 == 1 else {}
        one = checkpoint(values, channel_versions={"a": number + 1})
        counted = {} if values else {"counters_since_delta_snapshot": {"a": (number, 1)}}
        at = ours.put(at, one, {**META, "step": number, **counted}, {"a": number + 1})
        ours.put_writes(at, [("a", f"write {number}")], f"task {number}", "~1")
        places.append(at)
    before = [rebuilt(ours.get_delta_channel_history(config=at, channels=["a"])) for at in places]
    for _ in range(2):
        ours.prune(["t"])
        assert ids(ours.list(config("t"))) == [id_of(at) for at in places[:8:-1]], "back to where it was whole"
        for number in range(10, 12):
            assert rebuilt(ours.get_delta_channel_history(config=places[number], channels=["a"])) == before[number]
    whole = checkpoint({"a": ["all"]}, channel_versions={"a": 90})
    ours.put(at, whole, META, {"a": 90})
    ours.prune(["t"])
    assert ids(ours.list(config("t"))) == [whole["id"]]


def test_channels_that_were_never_whole_keep_the_thread(ours):
    places = delta_thread(ours, "t")
    ours.copy_thread("t", "u")
    before = {name: rebuilt(ours.get_delta_channel_history(config=at, channels=["a", "b", "c"]))
              for name, at in places.items()}  # fmt: skip
    ours.prune(["t", "u"])
    stays = ["side 2", "side 1", "side 0", *(f"main {number}" for number in range(3, -1, -1))]
    assert ids(ours.list(config("t"))) == [id_of(places[name]) for name in stays]
    for name in stays:
        found = ours.get_delta_channel_history(config=places[name], channels=["a", "b", "c"])
        assert rebuilt(found) == before[name]
    assert len(everything(ours, "u")) == len(stays)


def test_delta_history_survives_the_deletion_of_runs(ours):
    at, places = config("t"), []
    for number in range(8):
        values = {"a": ["whole"]} if number == 1 else {}
        one = checkpoint(values, channel_versions={"a": number + 1})
        more = {"counters_since_delta_snapshot": {"a": (1, 1)}, "run_id": f"run {number}"}
        at = ours.put(at, one, {**META, "step": number, **more}, {"a": number + 1})
        ours.put_writes(at, [("a", f"write {number}")], f"task {number}", "~1")
        places.append(at)
    before = [rebuilt(ours.get_delta_channel_history(config=at, channels=["a"])) for at in places]
    for gone, left in ((3, 8), (1, 8), (0, 7), (7, 6), (6, 5)):
        ours.delete_for_runs([f"run {gone}"])
        assert len(everything(ours, "t")) == left, "what the others are rebuilt from stays"
        for number, at in enumerate(places):
            if number != 1 and ours.get_tuple(at) is not None:  # where it is whole, nobody asks
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
        before = len(list(graph.get_state_history(copy)))
        saver.prune(["t", "u"])
        assert graph.get_state(thread).values == graph.get_state(copy).values == expected
        assert len(list(graph.get_state_history(thread))) == len(list(graph.get_state_history(copy))) < before
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


def test_a_branch_that_a_person_made_is_no_namespace(ours):
    made = chain(ours, "t", 3)
    ours.store.branch("t", "mine", "~1")
    with closing(ours.store.agent("t", branch="mine")) as agent:
        agent.state["number"] = 99
        agent.checkpoint("by hand")
    everywhere = {"configurable": {"thread_id": "t"}}
    assert [found.config for found in ours.list(everywhere)] == made[::-1]
    ours.prune(["t"])
    assert [found.config for found in ours.list(everywhere)] == made[-1:]
    assert ours.store.agent("t", branch="mine", readonly=True).state["number"] == 99


def test_what_is_left_of_a_line_whose_end_went_is_listed_on(ours):
    at, places = config("t"), []
    for number in range(4):
        at = ours.put(at, checkpoint({"n": number}), {**META, "run_id": f"run {number}"}, {"n": number})
        places.append(at)
    ours.put(places[0], checkpoint({"n": "other way"}), META, {"n": 9})
    ours.delete_for_runs(["run 3"])
    left = ids(ours.list(config("t")))
    assert len(left) == 4
    assert set(left) >= {id_of(at) for at in places[:3]}
    assert ours.store.verify().ok


# -- what is not LangGraph's, and what people have named -----------------------------------------------------------


def plain(saver, name):
    agent = saver.store.agent(name)
    for number in range(4):
        agent.state["x"] = number
        agent.checkpoint(f"c{number}")
    agent.tag("keep", "c1")
    agent.close()
    return [one.id for one in saver.store.agent(name, readonly=True).log()]


def test_an_agent_that_is_no_thread_is_refused_and_stays_as_it_is(ours):
    before = plain(ours, "p")
    chain(ours, "t", 2)
    for refused in (
        lambda: ours.delete_thread("p"),
        lambda: ours.prune(["p"]),
        lambda: ours.prune(["p"], strategy="delete"),
        lambda: ours.copy_thread("p", "q"),
    ):
        with pytest.raises(BadName, match="'p' is not a LangGraph thread"):
            refused()
    ours.delete_for_runs(["any"])
    agent = ours.store.agent("p", readonly=True)
    assert [one.id for one in agent.log()] == before
    assert agent.at("keep").label == "c1"
    assert {info.name for info in ours.store.agents()} == {"p", "t"}


def test_an_agent_that_only_acted_is_no_thread(ours):
    @holdfast.tool(effect="read")
    def look() -> int:
        return 1

    with closing(ours.store.agent("p")) as agent, agent:
        look()
    assert ours.store.agent("p", readonly=True).head is None
    with pytest.raises(BadName):
        ours.delete_thread("p")
    assert [info.name for info in ours.store.agents()] == ["p"]


def named(saver, thread, made):
    """A tag and a branch of a person's on checkpoints of a thread; their states as they are shown."""
    keys = [id_of(made[1]), id_of(made[3])]
    log = saver.store.agent(thread, readonly=True).log()
    at = {one.state["__langgraph__"][0]["id"]: one for one in log}
    saver.store.tag(thread, "good", at[keys[0]])
    saver.store.branch(thread, "mine", at[keys[1]])
    return keys


def shown(saver, thread):
    agent = saver.store.agent(thread, readonly=True)
    mine = saver.store.agent(thread, branch="mine", readonly=True)
    return [state["__langgraph__"][0]["id"] for state in (agent.at("good").state, mine.head.state)]


def test_pruning_keeps_what_people_have_tagged_and_where_their_branches_stand(ours):
    made = rich(ours, "t")
    keys = named(ours, "t", made)
    newest = ours.get_tuple(config("t")).checkpoint["id"]
    ours.prune(["t"])
    assert shown(ours, "t") == keys
    assert ids(ours.list(config("t"))) == [newest, *reversed(keys)]
    assert told(ours.get_tuple(made[1]))["checkpoint"]["channel_values"] == {"m": ["t 0", "t 1"]}
    assert len(ours.get_tuple(made[1]).pending_writes) == 1
    ours.store.untag("t", "good")
    ours.prune(["t"])
    assert ids(ours.list(config("t"))) == [newest, keys[1]]


def test_removing_runs_keeps_what_people_have_tagged_and_where_their_branches_stand(ours):
    made = rich(ours, "t")
    keys = named(ours, "t", made)
    ours.delete_for_runs(["run-0", "run-1"])
    assert shown(ours, "t") == keys
    left = [one["checkpoint"]["id"] for one in everything(ours, "t") if one["metadata"].get("run_id")]
    assert set(left) & {id_of(at) for at in made[:4]} == set(keys)


def test_pruning_keeps_the_newest_good_one_of_a_thread_whose_newest_is_not(ours):
    made = chain(ours, "t", 4)
    log = ours.store.agent("t", readonly=True).log()
    for one in log[:2]:
        ours.store.mark("t", one, "suspect")
    ours.prune(["t"])
    assert ids(ours.list(config("t"))) == [id_of(made[3]), id_of(made[1])]


def test_deleting_a_thread_takes_tags_and_branches_along(ours):
    named(ours, "t", rich(ours, "t"))
    ours.delete_thread("t")
    assert not ours.store.agents()


def test_delta_channels_of_what_a_tag_keeps_are_as_before(ours):
    graph = graphs.delta(ours)
    at = config("t")
    for number in range(12):
        graph.invoke({"items": [number]}, at)
    states = list(graph.get_state_history(at))
    chosen = states[9]
    log = {one.state["__langgraph__"][0]["id"]: one for one in ours.store.agent("t", readonly=True).log()}
    ours.store.tag("t", "good", log[chosen.config["configurable"]["checkpoint_id"]])
    ours.prune(["t"])
    left = {one.config["configurable"]["checkpoint_id"]: one.values for one in graph.get_state_history(at)}
    assert len(left) < len(states)
    for state in (states[0], chosen):
        assert left[state.config["configurable"]["checkpoint_id"]] == state.values


def test_a_tag_that_comes_while_a_thread_is_pruned_stays(ours, monkeypatch):
    made = chain(ours, "t", 5)
    log = {one.state["__langgraph__"][0]["id"]: one for one in ours.store.agent("t", readonly=True).log()}
    real, late = ours.store._forget, [(made[0], "first"), (made[2], "second")]

    def forget(*args, **options):
        if late:
            at, name = late.pop()
            ours.store.tag("t", name, log[id_of(at)])
        return real(*args, **options)

    monkeypatch.setattr(ours.store, "_forget", forget)
    ours.prune(["t"])
    assert ids(ours.list(config("t"))) == [id_of(made[at]) for at in (4, 2, 0)]
    assert ours.store.agent("t", readonly=True).at("first").state["__langgraph__"][0]["id"] == id_of(made[0])
