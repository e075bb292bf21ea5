"""What the state is not told of: C code that writes behind its back, exceptions and signal handlers in mid-change."""

from __future__ import annotations

import heapq
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.codec.document import Document, plain
from holdfast.codec.operations import Operation
from holdfast.errors import StoreBusy
from tests.codec.memory import TYPES, Memory, same
from tests.limits import limits

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
    state["d"] = {"a": 1, "b": [2], "c": {"x": [9, 5, 1]}, "q": [9, 5, 7], "names": {"k0": 0, "k1": 1}, "set": {1, 2}}
    state["big"] = {"q": [f"{number:0500}" for number in NUMBERS[:40]], "n": 0, "set": set(map(str, range(6_000)))}
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
    lambda state: set.discard(state["s"], 1),
    lambda state: (set.discard(state["d"]["set"], 1), set.add(state["d"]["set"], 7)),
    lambda state: set.add(state["big"]["set"], "more"),
    lambda state: list.append(state["d"]["q"], {"raw": [1]}),
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
    lambda state: state["s"].add(3),
    lambda state: state["d"]["set"].add(3),
    lambda state: state["big"]["set"].add("3"),
    lambda state: state["big"]["set"].discard("5"),
]


@pytest.mark.parametrize("unseen", range(len(UNSEEN)))
def test_a_change_by_c_code_never_makes_a_checkpoint_unreadable(unseen: int, rounds: Callable[[int, int], int]) -> None:
    every = rounds(3, 1)
    for seen in SEEN[unseen % every :: every]:
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


@pytest.mark.parametrize("ends", ["replaced", "deleted"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["at once", "after a checkpoint"])
def test_what_was_recorded_in_a_section_that_goes_fits_too(ends: str, checkpoint: bool) -> None:
    state, memory = Document(TYPES), Memory()
    state["d"] = {"names": {"k0": 0, "k1": 1}}
    if checkpoint:
        memory.commit(state, seal=False)
    give(state["d"]["names"])
    del state["d"]["names"]["added"]
    if ends == "replaced":
        state["d"] = [1]
    else:
        del state["d"]
    memory.commit(state, seal=False)
    assert plain(memory.head.load()) == plain(state)


def grown(chance: random.Random, depth: int = 0) -> Any:
    """A value; containers of it are large enough for leaves of their own under small limits."""
    what = chance.random()
    if depth > 3 or what < 0.35:
        return chance.choice([1, 2.5, "x" * chance.randrange(40), None, True, b"yy", chance.randrange(10**9)])
    size = chance.randrange(chance.choice([2, 5, 30]))
    if what < 0.6:
        return [grown(chance, depth + 1) for _ in range(size)]
    if what < 0.9:
        return {key_of(chance): grown(chance, depth + 1) for _ in range(size)}
    return {chance.randrange(200) for _ in range(2 * size)}


def key_of(chance: random.Random) -> Any:
    return chance.choice([f"k{chance.randrange(60)}", chance.randrange(50)])


def containers(value: Any) -> list[Any]:
    inner = list(value) if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    return [value, *(found for item in inner if isinstance(item, list | dict | set) for found in containers(item))]


def change_list(chance: random.Random, held: list[Any]) -> None:
    at = chance.randrange(len(held) + 1)
    more = [grown(chance, 3) for _ in range(chance.randrange(4))]
    match chance.randrange(9):
        case 0 if held:
            held[at % len(held)] = grown(chance, 2)
        case 1 if held:
            del held[at % len(held)]
        case 2:
            held.insert(at, grown(chance, 2))
        case 3:
            held[at : at + chance.randrange(6)] = more
        case 4:
            held.reverse()
        case 5 if held:
            held.append(held.pop(at % len(held)))
        case 6:
            del held[::2]
        case 7:
            held.extend(more)
        case _:
            held.append(grown(chance, 2))


def change_dict(chance: random.Random, held: dict[Any, Any]) -> None:
    match chance.randrange(6):
        case 0 if held:
            del held[chance.choice(list(held))]
        case 1:
            held.update({key_of(chance): grown(chance, 3) for _ in range(chance.randrange(10))})
        case 2 if held:
            held.popitem()
        case 3 if chance.random() < 0.2:
            held.clear()
        case _:
            held[key_of(chance)] = grown(chance, 2)


def change_unseen(chance: random.Random, held: Any) -> None:
    """As C code does it: past the methods of the class."""
    if isinstance(held, dict):
        if held and chance.random() < 0.5:
            dict.pop(held, next(iter(held)))
        else:
            dict.__setitem__(held, f"u{chance.randrange(20)}", chance.randrange(5))
    elif isinstance(held, list):
        match chance.randrange(4):
            case 0:
                list.append(held, chance.randrange(9))
            case 1 if held:
                list.pop(held)
            case 2:
                list.reverse(held)
            case _ if all(type(item) is int for item in held):
                heapq.heapify(held)


def change_something(chance: random.Random, state: Any, *, unseen: float) -> None:
    section = state[chance.choice(list(state))]
    found = containers(section)
    held = chance.choice(found if chance.random() < 0.5 else found[:3])
    if chance.random() < unseen:
        change_unseen(chance, held)
    elif isinstance(held, set):
        held ^= {chance.randrange(200) for _ in range(5)}
    else:
        (change_list if isinstance(held, list) else change_dict)(chance, held)


SMALL = {
    "BULK_MIN_BYTES": 4_096,
    "INLINE_MAX_BYTES": 256,
    "LEAF_MIN_BYTES": 64,
    "LEAF_TARGET_BYTES": 256,
    "LEAF_MAX_BYTES": 1_024,
}


def random_programs(unseen: float, count: int) -> Iterator[tuple[Document, Memory, list[Operation]]]:
    """States of several leaves, changed at random; with each checkpoint what was recorded for it."""
    with limits(SMALL):
        for seed in range(count):
            chance = random.Random(seed)
            state, memory = Document(TYPES), Memory()
            for name in "abc":
                state[name] = [
                    [grown(chance, 1) for _ in range(8)],
                    {key_of(chance): grown(chance, 1) for _ in range(8)},
                ]
            memory.commit(state, seal=False)
            for _ in range(20):
                for _ in range(chance.randrange(1, 6)):
                    change_something(chance, state, unseen=unseen)
                known = len(memory.head.done)
                memory.commit(state, seal=chance.random() < 0.3)
                yield state, memory, memory.head.done[known:]


def test_whatever_c_code_does_in_between_every_checkpoint_can_be_read(rounds: Callable[[int, int], int]) -> None:
    for state, memory, _ in random_programs(0.15, rounds(6, 4_000)):
        assert list(plain(memory.head.load())) == list(state)


def test_ordinary_changes_are_saved_as_they_are(rounds: Callable[[int, int], int]) -> None:
    for state, memory, _ in random_programs(0, rounds(6, 4_000)):
        assert same(plain(memory.head.load()), plain(state))


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


@pytest.mark.parametrize("name", ["pop", "assign", "splice", "delete a key", "reverse"])
def test_what_an_interrupted_change_left_where_it_was_can_be_changed_and_saved(name: str) -> None:
    """Also deep in small containers, which are saved as part of a larger one."""
    change: Callable[[Any, Any], Any] = {
        "pop": lambda inner, _: inner.pop(0),
        "assign": lambda inner, _: inner.__setitem__(0, 5),
        "splice": lambda inner, _: inner.__setitem__(slice(0, 2), [1, inner[0]]),
        "delete a key": lambda _, outer: outer.__delitem__("inner"),
        "reverse": lambda inner, _: inner.reverse(),
    }[name]
    number = 0
    while True:
        number += 1
        state, memory = Document(TYPES), Memory()
        state["s"] = {"outer": {"inner": [{"n": []}, {"n": []}]}}
        memory.commit(state, seal=False)
        outer = state["s"]["outer"]
        assert [child["n"] for child in outer["inner"]] == [[], []]  # from now on reads are not seen
        if not at_event(number, lambda outer=outer: change(outer["inner"], outer), interrupt):
            return
        memory.commit(state, seal=False)
        for at in range(len(outer.get("inner", []))):
            if isinstance(outer["inner"][at], dict):
                outer["inner"][at]["n"].append("later")
                memory.commit(state, seal=False)
                assert plain(memory.head.load()) == plain(state), number


def test_threads_that_save_at_the_same_time_leave_a_state_that_can_be_changed() -> None:
    state = filled()
    ready = threading.Barrier(4)

    def save() -> None:
        ready.wait()
        for _ in range(30):
            state.seal(state.capture())

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state["l"].append(1)
    assert state["l"][-1] == 1


def test_a_handler_that_changes_the_state_while_it_is_saved_is_refused_and_nothing_is_lost() -> None:
    state, memory = filled(), Memory()
    memory.commit(state, seal=False)
    state["l"].append(1)
    refused = 0

    def change() -> None:
        nonlocal refused
        try:
            state["l"].append("signal")
        except StoreBusy:
            refused += 1

    for number in range(1, 400, 7):
        state["d"]["a"] = number
        at_event(number, lambda: memory.commit(state, seal=False), change)
        assert plain(memory.head.load())["d"]["a"] == number
    assert refused
    memory.commit(state, seal=False)
    assert plain(memory.head.load()) == plain(state)


def test_a_rollback_goes_on_when_c_code_took_out_what_was_put_in(store_path: Path) -> None:
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["queue"] = []
        first = agent.checkpoint()
        original = [5]
        agent.state["queue"].append(original)
        agent.checkpoint()
        heapq.heappop(agent.state["queue"])
        original.append(6)
        agent.checkpoint()
        agent.rollback(first)
        assert agent.head.id == first.id
        agent.state["queue"].append(7)
        assert holdfast.plain(agent.checkpoint().state) == {"queue": [7]}
        assert store.verify().ok
