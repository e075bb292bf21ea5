"""Handed-out values whose containers leave the state and come back: each has one home, and no change to it is lost."""

from __future__ import annotations

import pytest

from holdfast.codec.document import Document
from holdfast.codec.plain import plain
from tests.codec.kinds import Note
from tests.codec.programs import TYPES, Memory


@pytest.fixture
def state():
    return Document(TYPES)


@pytest.fixture
def memory():
    return Memory()


def saved(state, memory):
    """What a checkpoint brings back; it is what the live state shows."""
    memory.commit(state, seal=False)
    loaded = memory.head.load()
    content = plain(loaded)
    assert content == plain(state)
    assert loaded.content_digests() == state.digests()
    return content


def note(text="one"):
    return Note(text, ["tag"])  # with a list in it: its fields alone do not say whether it changed


# -- inside a detached container ------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True], ids=["at-once", "after-a-checkpoint"])
@pytest.mark.parametrize("change", [False, True], ids=["unchanged", "changed"])
def test_a_value_wrapped_inside_a_detached_container_is_still_the_one_in_it(state, memory, checkpoint, change):
    state["x"] = {"box": {"note": note()}}
    box = state["x"].pop("box")
    kept = box["note"]
    if change:
        kept.text = "two"
    if checkpoint:
        saved(state, memory)
    box["note"] = {"wrapped": kept}
    assert box["note"]["wrapped"] is kept
    state["y"] = box
    kept.text = "three"
    assert saved(state, memory)["y"] == {"note": {"wrapped": note("three")}}


def test_a_value_inside_what_a_detached_container_loses_is_moved(state, memory):
    state["x"] = {"outer": {"box": {"notes": [note(), note("other")]}}}
    outer = state["x"].pop("outer")
    kept = outer["box"]["notes"][0]
    saved(state, memory)
    outer["box"] = [kept]
    assert outer["box"][0] is kept
    state["y"] = outer
    kept.tags.append("late")
    assert saved(state, memory)["y"] == {"box": [Note("one", ["tag", "late"])]}


def test_values_of_a_detached_list_are_moved_by_slices(state, memory):
    state["x"] = {"notes": [note(str(at)) for at in range(4)]}
    notes = state["x"].pop("notes")
    kept = list(notes)
    saved(state, memory)
    notes[:] = [{"wrapped": item} for item in notes]
    assert all(item["wrapped"] is one for item, one in zip(notes, kept, strict=True))
    state["y"] = notes
    for at, one in enumerate(kept):
        one.text = f"late {at}"
    assert saved(state, memory)["y"] == [{"wrapped": note(f"late {at}")} for at in range(4)]


# -- one home -------------------------------------------------------------------------------------------------


def test_a_value_that_moved_is_copied_when_the_container_it_left_comes_back(state, memory):
    state["x"] = {"box": {"note": note()}}
    box = state["x"]["box"]
    kept = box["note"]
    state["x"]["box"] = {"moved": kept}
    state["y"] = box
    assert state["x"]["box"]["moved"] is kept
    assert state["y"]["note"] is not kept
    kept.text = "two"
    assert saved(state, memory) == {"x": {"box": {"moved": note("two")}}, "y": {"note": note()}}
    state["y"]["note"].text = "three"
    state["x"]["more"] = 1
    assert saved(state, memory) == {"x": {"box": {"moved": note("two")}, "more": 1}, "y": {"note": note("three")}}


def test_a_value_that_became_a_section_is_copied_when_its_container_comes_back(state, memory):
    state["x"] = {"note": note()}
    box = state["x"]
    kept = box["note"]
    state["x"] = kept
    assert state["x"] is kept
    state["y"] = box
    kept.text = "two"
    assert saved(state, memory) == {"x": note("two"), "y": {"note": note()}}


def test_a_value_that_left_its_new_home_is_free_for_the_container_that_still_has_it(state, memory):
    state["x"] = {"note": note()}
    box = state["x"]
    kept = state["x"] = box["note"]
    del state["x"]
    state["y"] = box
    assert state["y"]["note"] is kept
    kept.text = "two"
    assert saved(state, memory) == {"y": {"note": note("two")}}


@pytest.mark.parametrize("checkpoint", [False, True], ids=["at-once", "after-a-checkpoint"])
def test_two_detached_containers_with_one_value_come_back_with_two(state, memory, checkpoint):
    state["x"] = {"box": {"note": note()}}
    first = state["x"]["box"]
    kept = first["note"]
    state["x"]["box"] = {"note": kept}
    second = state["x"].pop("box")
    if checkpoint:
        saved(state, memory)
    state.update(a=first, b=second)
    at_home = [name for name in "ab" if state[name]["note"] is kept]
    assert len(at_home) == 1
    kept.text = "two"
    content = saved(state, memory)
    assert [name for name in "ab" if content[name] == {"note": note("two")}] == at_home


@pytest.mark.filterwarnings("ignore::holdfast.errors.DetachedChange")
@pytest.mark.parametrize("first", ["part", "whole"])
def test_one_operation_does_not_put_a_value_in_two_places(state, memory, first):
    state["x"] = {"note": note()}
    box = state["x"]
    kept = box["note"]
    incoming = {"x": {"part": kept}, "y": box}
    state.update(incoming if first == "part" else dict(reversed(incoming.items())))
    assert (state["x"]["part"] is kept, state["y"] is box) == (first == "part", first == "whole")
    assert state["x"]["part"] is not state["y"]["note"]
    kept.text = "two"
    content = saved(state, memory)
    assert content["x"] == {"part": note("two" if first == "part" else "one")}
    assert content["y"] == {"note": note("two" if first == "whole" else "one")}


@pytest.mark.filterwarnings("ignore::holdfast.errors.DetachedChange")
@pytest.mark.parametrize("value", [[1], {"in": [1]}, Note("one", ["tag"])], ids=["list", "dict", "instance"])
def test_what_is_put_back_and_given_to_another_section_too_stays_and_the_other_gets_a_copy(state, memory, value):
    state["x"] = value
    kept = state["x"]
    state.update({"x": kept, "y": {"again": kept}, "z": kept})
    assert state["x"] is kept
    assert state["y"]["again"] is not kept
    assert state["z"] is not kept
    inner = kept if isinstance(kept, list) else kept["in"] if isinstance(kept, dict) else kept.tags
    inner.append(2)
    content = saved(state, memory)
    assert content["x"] != content["z"] == content["y"]["again"]


@pytest.mark.parametrize("section", [True, False], ids=["section", "inside one"])
def test_a_value_that_nothing_keeps_whole_any_more_may_have_large_containers_in_it(state, memory, section):
    one = note()
    value = [one, one, [f"text {number}" for number in range(2_000)]]
    state["x"] = value if section else {"whole": value}
    held = state["x"] if section else state["x"]["whole"]
    saved(state, memory)
    del held[0]
    saved(state, memory)
    held.append(5)
    content = saved(state, memory)["x"]
    assert (content if section else content["whole"]) == [*value[1:], 5]


# -- several values in one operation --------------------------------------------------------------------------


def test_a_value_that_came_in_beside_a_container_of_the_state_is_followed(state, memory):
    state["x"] = {"one": {"n": 1}, "two": {"n": 2}, "list": []}
    state["x"]["list"].extend([{"note": note(), "box": state["x"]["one"]}, state["x"]["two"]])
    state["x"]["list"][0]["note"].text = "two"
    assert saved(state, memory)["x"]["list"] == [{"note": note("two"), "box": {"n": 1}}, {"n": 2}]


def test_values_of_several_containers_that_come_back_together_are_followed(state, memory):
    state["x"] = {"one": {"note": note()}, "two": {"note": note()}}
    boxes = [state["x"].pop("one"), state["x"].pop("two")]
    kept = [box["note"] for box in boxes]
    state["list"] = []
    state["list"].extend(boxes)
    for one in kept:
        one.text = "two"
    assert saved(state, memory)["list"] == [{"note": note("two")}] * 2


def test_a_refused_operation_leaves_a_moved_value_where_it_lives(state, memory):
    state["x"] = {"box": {"note": note()}}
    box = state["x"]["box"]
    kept = box["note"]
    state["x"]["box"] = {"moved": kept}
    with pytest.raises(TypeError):
        state.update(y=box, z=print)
    assert state["x"]["box"]["moved"] is kept
    kept.text = "two"
    assert saved(state, memory) == {"x": {"box": {"moved": note("two")}}}
