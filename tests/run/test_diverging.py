"""A program that does not do what is recorded is told what differs."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import errors

VARIES = {}


@holdfast.tool(name="diverging.book")
def book(offer, messages=None):
    return offer


@holdfast.tool(name="diverging.ask", effect="read")
def ask(messages):
    return len(messages)


@holdfast.durable
def saves(agent):
    agent.state["t"] = VARIES["t"]
    agent.state["plan"] = {"steps": ["look", VARIES["step"]]}
    agent.checkpoint("planned")
    raise KeyboardInterrupt


@holdfast.durable
def books(agent):
    book({"flight": "TP1", "price": VARIES["t"]}, messages=["a", VARIES["step"]])
    raise KeyboardInterrupt


@holdfast.durable(strict=True)
def asks(agent):
    agent.state["m"] = ["You are a travel agent"] * 100 + VARIES["more"]
    ask(agent.state["m"])
    raise KeyboardInterrupt


def twice(opened, function, first, second):
    for values in (first, second):
        VARIES.update(values)
        try:
            opened().run(function.options(id="r"))
        except KeyboardInterrupt:
            continue
        except errors.Diverged as error:
            return error
    raise AssertionError("it did not diverge")


def test_of_a_state_the_places_that_differ_are_shown(opened):
    error = twice(opened, saves, {"t": 1.2, "step": "book"}, {"t": 1.3, "step": "pay"})
    assert "state.t: 1.2 -> 1.3" in str(error)
    assert "state.plan.steps[1]: 'book' -> 'pay'" in str(error)
    assert "Time or random between calls? Use agent.now()" in str(error)


def test_of_a_call_the_arguments_that_differ_are_shown(opened):
    error = twice(opened, books, {"t": 1.2, "step": "b"}, {"t": 1.3, "step": "c"})
    assert "differs:  offer.price: 1.2 -> 1.3; messages[1]: 'b' -> 'c'" in str(error)
    assert "flight: " not in str(error).partition("differs:")[2]
    assert "agent.now()" in error.hint
    assert (error.path, error.expected.partition("(")[0]) == ("0", "diverging.book")
    assert ("1.2" in error.expected, "1.3" in error.actual) == (True, True)


def test_of_a_part_of_the_state_its_size_and_beginning(opened):
    error = twice(opened, asks, {"more": []}, {"more": ["Lisbon"]})
    assert "messages: <100 items: 'You are a travel agent'…> -> 101 items" in str(error)


def test_of_another_call_there_is_nothing_to_compare(opened):
    @holdfast.durable
    def other(agent):
        if VARIES["t"]:
            book(1)
        else:
            holdfast.current().uuid()
        raise KeyboardInterrupt

    error = twice(opened, other, {"t": 1}, {"t": 0})
    assert "differs" not in str(error)
    with pytest.raises(errors.Diverged):
        raise error
