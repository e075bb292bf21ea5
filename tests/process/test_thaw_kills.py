"""Whoever thaws may be killed: what it leaves standing is done once all the same."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest

import holdfast
from tests.lives import CHANGES, dies


def say(folder, text):
    with (folder / "said").open("a") as file:
        file.write(f"{text}\n")


def tools_of(folder):
    """A tool that can be undone, one that cannot, and a durable function that calls that."""
    note = holdfast.tool(effect="write", name="thaw.note", compensate=lambda e: say(folder, f"undone {e.args['n']}"))(
        lambda n: say(folder, f"note {n}")
    )
    book = holdfast.tool(effect="write", name="thaw.book")(lambda n: say(folder, f"book {n}"))
    turn = holdfast.durable(name="thaw.turn")(lambda agent, n: book(n))
    return note, book, turn


def begun(store_path, tools):
    """A store with an agent that has booked after the checkpoint of an image: in plain use, in a task, in a run."""
    note, book, turn = tools
    with holdfast.open(store_path) as store, store.agent("clerk", when=None) as agent:
        agent.state["n"] = 0
        book(0)
        image = agent.checkpoint("image")
        note(1)
        book(1)
        with agent.task("weekly"):
            book(2)
        agent.run(turn, 3)
        agent.state["n"] = 1
        agent.checkpoint("later")
    return image.id


def thawed(store_path, image):
    """What a thaw does to the agent before the process comes back."""
    with holdfast.open(store_path) as store, closing(store.agent("clerk", create=False, when=None)) as agent:
        unknown, _, move = agent._plan_thaw(f"id:{image}", ("thaw.book",))
        assert not unknown
        if move is not None:
            move()


def come_back(store_path, tools):
    """What a process does that goes on from the image: what it did before, it does again."""
    _, book, turn = tools
    with holdfast.open(store_path) as store, store.agent("clerk", when=None) as agent:
        assert agent.state["n"] == 0
        book(1)
        with agent.task("weekly"):
            book(2)
        agent.run(turn, 3)
        agent.checkpoint("again")
        assert store.verify().ok


@pytest.mark.parametrize("then", ["thawed again", "run, and thawed again", "begun anew"])
def test_killed_anywhere_in_a_thaw_what_it_leaves_standing_is_done_once(store_path, tmp_path, then):
    at, died = 0, True
    while died:
        at += 1
        place, folder = store_path / f"{at}", tmp_path / f"{at}"
        folder.mkdir()
        tools = tools_of(folder)
        image = begun(place, tools)
        died = dies(partial(thawed, place, image), at, *CHANGES)
        with holdfast.open(place) as store, store.agent("clerk", when=None) as agent:
            moved = agent.state["n"] == 0
            if then.startswith("run"):  # whoever does not know of it finishes what was begun
                agent.run(holdfast.durable(name="thaw.other")(lambda agent: None))
        if not (moved and then == "begun anew"):
            thawed(place, image)
        come_back(place, tools)
        lines = (folder / "said").read_text().split("\n")
        assert [lines.count(f"book {n}") for n in range(4)] == [1, 1, 1, 1], (at, lines)
        assert "undone 1" in lines
    assert at > 10
