"""What the state is not told of: C code that writes behind its back, exceptions and signal handlers in mid-change."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.codec.document import Document
from holdfast.codec.plain import plain
from tests.codec.programs import TYPES, Memory

NUMBERS = [(number * 7919) % 1009 for number in range(400)]


class Given:
    """An object whose attributes a dict of the state holds."""


def give(names: Any) -> None:
    given = Given()
    given.__dict__ = names
    given.k1 = "changed"
    given.added = 1


def filled() -> Document:
    state = Document(TYPES)
    state["l"] = [{"a": 1}, 2, [3], "s"]
    state["q"] = list(NUMBERS)
    state["d"] = {"a": 1, "b": [2], "c": {"x": [9, 5, 1]}, "q": [9, 5, 7], "names": {"k0": 0, "k1": 1}}
    state["big"] = {"q": [f"{number:0500}" for number in NUMBERS[:40]], "n": 0}
    state["s"] = {1, 2}
    return state


UNSEEN: list[Callable[[Any], Any]] = [
    lambda state: heapq.heapify(state["q"]),
    lambda state: heapq.heappush(state["q"], 1),
    lambda state: heapq.heapify(state["d"]["q"]),
    lambda state: heapq.heapreplace(state["d"]["q"], 8),
    lambda state: heapq.heappush(state["d"]["c"]["x"], 0),
    lambda state: heapq.heapify(state["d"]["c"]["x"]),
    lambda state: heapq.heapify(state["big"]["q"]),
    lambda state: heapq.heappop(state["big"]["q"]),
    lambda state: give(state["d"]),
    lambda state: give(state["d"]["names"]),
]
SEEN: list[Callable[[Any], Any]] = [
    lambda state: state["q"].append(5),
    lambda state: state["q"].insert(0, 5),
    lambda state: state["q"].pop(1),
    lambda state: state["q"].__setitem__(1, 7),
    lambda state: state["q"].reverse(),
    lambda state: state["d"].__setitem__("a", 5),
    lambda state: state["d"].__setitem__("new", 5),
    lambda state: state["d"].pop("b"),
    lambda state: state["d"]["q"].append(5),
    lambda state: state["d"]["q"].pop(0),
    lambda state: state["d"]["c"]["x"].append(4),
    lambda state: state["d"]["c"].__setitem__("y", 4),
    lambda state: state["d"]["names"].pop("k0"),
    lambda state: state["big"].__setitem__("n", 1),
    lambda state: state["big"]["q"].append("1"),
    lambda state: state["big"]["q"].pop(3),
]


@pytest.mark.parametrize("unseen", range(len(UNSEEN)))
def test_a_change_by_c_code_never_makes_a_checkpoint_unreadable(unseen: int) -> None:
    for seen in SEEN:
        for order in ((UNSEEN[unseen], seen), (seen, UNSEEN[unseen])):
            state, memory = filled(), Memory()
            memory.commit(state, seal=False)
            for change in order:
                try:
                    change(state)
                except KeyError:
                    assert change is seen  # it was made before
            memory.commit(state, seal=False)
            plain(memory.head.load())
            state["d"]["last"] = 1
            state["q"].append(1)
            memory.commit(state, seal=False)
            assert plain(memory.head.load())["d"]["last"] == 1


def test_what_was_put_in_and_rearranged_by_c_code_before_the_first_checkpoint_is_saved_as_it_is() -> None:
    state, memory = Document(TYPES), Memory()
    state["q"] = [9, 5, 7]
    heapq.heapify(state["q"])
    state["q"].append(8)
    memory.commit(state, seal=False)
    assert plain(memory.head.load()) == plain(state) == {"q": [5, 9, 7, 8]}


MUTATORS: dict[str, Callable[[Any], Any]] = {
    "append": lambda state: state["l"].append({"x": [1]}),
    "insert": lambda state: state["l"].insert(0, {"x": 1}),
    "set": lambda state: state["l"].__setitem__(1, "new"),
    "delete a slice": lambda state: state["l"].__delitem__(slice(0, 2)),
    "reverse": lambda state: state["l"].reverse(),
    "set a key": lambda state: state["d"].__setitem__("new", [1]),
    "set a key again": lambda state: state["d"].__setitem__("b", [1]),
    "delete a key": lambda state: state["d"].__delitem__("b"),
    "update": lambda state: state["d"].update(a=1, z=[2], y={}),
    "clear": lambda state: state["d"].clear(),
    "add": lambda state: state["s"].add(99),
    "set a section": lambda state: state.__setitem__("new", {"a": [1]}),
    "delete a section": lambda state: state.__delitem__("d"),
    "replace": lambda state: state.replace({"l": [1], "s": {2}}),
    "move": lambda state: state["d"].__setitem__("moved", state["l"].pop(0)),
    "edit inside": lambda state: state["d"]["c"]["x"].append(1),
    "edit a large one": lambda state: state["big"]["q"].insert(5, 1),
}


def at_event(number: int, change: Callable[[], Any], act: Callable[[], None]) -> bool:
    """Make a change, and act at the given one of the places where Python may deliver a signal; whether it came."""
    count = 0

    def look(frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        if event in {"call", "c_return"} and "holdfast" in frame.f_code.co_filename:
            count += 1
            if count == number:
                sys.setprofile(None)
                act()

    sys.setprofile(look)
    try:
        change()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return count >= number


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", MUTATORS)
@pytest.mark.parametrize("handler", [False, True], ids=["raises", "changes"])
def test_whatever_comes_in_the_middle_of_a_change_the_next_checkpoint_is_the_state(name: str, handler: bool) -> None:
    def more(state: Any) -> None:
        state["l"].append("signal")
        state["big"]["n"] = -1

    number = 1 + list(MUTATORS).index(name)  # each mutator is stopped at other places
    while True:
        state, memory = filled(), Memory()
        memory.commit(state, seal=False)
        state["l"].append(0)
        memory.commit(state, seal=False)
        act = (lambda state=state: more(state)) if handler else interrupt
        if handler and name == "replace":
            return  # the handler's sections may be gone
        if not at_event(number, lambda state=state: MUTATORS[name](state), act):
            return
        memory.commit(state, seal=False)
        assert plain(memory.head.load()) == plain(state), number
        state["l"].append("more")
        state.setdefault("d", {})["k"] = 1
        memory.commit(state, seal=False)
        assert plain(memory.head.load()) == plain(state), number
        number += 23
