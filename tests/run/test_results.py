"""Results that cannot be saved: refused before the call where that can be known, and never a dead end."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

import holdfast
from holdfast import errors
from tests import warm


@dataclasses.dataclass
class Ticket:
    number: int
    seat: str = "1A"


@dataclasses.dataclass
class Locked:
    number: int
    lock: object


@dataclasses.dataclass
class Trip:
    ticket: Ticket


class Fare:
    """Not a dataclass."""

    def __init__(self, price):
        self.price = price


DONE = []


@pytest.fixture(autouse=True)
def _nothing_done():
    DONE.clear()


def agent_of(path, *types):
    return holdfast.open(path, types=list(types)).agent("trip-7")


DECLARED = [Ticket, "Ticket ", list[Ticket], "dict[str, Ticket | None]", Trip, Fare]


def test_a_result_that_is_declared_to_be_of_an_unknown_class_is_refused_before_the_call(store_path):
    agent = agent_of(store_path)
    for kind in ("write", "idempotent", "read"):
        for returns in DECLARED:

            def book(flight):
                DONE.append(flight)

            book.__annotations__["return"] = returns
            tool = holdfast.tool(effect=kind)(book)
            match = r"the result of book.*(Ticket|Fare|Trip)(.|\n)*not called"
            with pytest.raises(errors.Unencodable, match=match):
                agent.run(lambda_named(lambda agent, tool=tool: tool("TP1")))
    assert agent.effects() == []
    assert DONE == []


def test_once_the_class_is_registered_the_call_is_made(store_path):
    @holdfast.tool
    def book(flight) -> Ticket:
        DONE.append(flight)
        return Ticket(7)

    agent = agent_of(store_path, Ticket)
    assert agent.run(lambda_named(lambda agent: book("TP1"))) == Ticket(7)
    assert DONE == ["TP1"]


def lambda_named(function):
    function.__name__ = function.__qualname__ = "work"
    return holdfast.durable(function)


class Base(Trip):
    """Of which somebody registers a derived class."""


class Derived(Base):
    pass


def test_what_may_well_be_saved_is_not_refused(store_path):
    agent = agent_of(store_path, Derived)
    for returns in (object, "Nowhere", "list[Nowhere]", "Iterable[int]", None, int, Base, Sequence, Iterator[Derived]):

        def book():
            return 7

        book.__annotations__["return"] = returns
        tool = holdfast.tool(effect="read")(book)
        assert agent.run(lambda_named(lambda agent, tool=tool: tool())) == 7


def lose(path, result, **options):
    """A run whose booking returns something that nobody can save."""

    @holdfast.tool(**options)
    def book(flight):
        DONE.append(flight)
        return result

    @holdfast.durable
    def work(agent):
        return book("TP1")

    agent = agent_of(path)
    work = work.options(id="r")
    with pytest.raises(errors.ResultLost, match="was called and is done") as caught:
        agent.run(work)
    (effect,) = agent.effects()
    assert effect.status == "lost"
    assert f"effects resolve trip-7 {effect.id} --done" in caught.value.hint
    agent._store.close()
    return work, effect.id, book


def test_a_lost_result_is_kept_as_data_and_comes_back_when_its_class_is_registered(store_path):
    work, _, _tool = lose(store_path, {"tickets": [Ticket(7, "2B")]})
    agent = agent_of(store_path)
    (effect,) = agent.effects()
    (kept,) = effect.result["tickets"]
    assert (kept.type_name, kept.fields) == (f"{__name__}.Ticket", {"number": 7, "seat": "2B"})
    with pytest.raises(errors.ResultLost):
        agent.run(work)
    agent._store.close()
    agent = agent_of(store_path, Ticket)
    # It is nobody's guess: the record says which class, and what was in it.
    assert agent.run(work) == {"tickets": [Ticket(7, "2B")]}
    assert [one.status for one in agent.effects()] == ["done"]
    assert DONE == ["TP1"]


def test_a_class_that_is_registered_with_its_own_way_of_saving_does_not_get_the_fields(store_path):
    work, _, _tool = lose(store_path, Ticket(7))
    store = holdfast.open(store_path)
    seen = []
    store._registry.register(
        Ticket, save=lambda ticket: ticket.number, load=lambda data: seen.append(data) or Ticket(data)
    )
    with pytest.raises(errors.ResultLost):
        store.agent("trip-7").run(work)
    assert seen == []


def test_of_a_result_with_a_part_that_nobody_could_save_the_rest_is_kept(store_path):
    work, _, _tool = lose(store_path, Locked(7, threading.Lock()))
    agent = agent_of(store_path, Locked)
    (effect,) = agent.effects()
    assert effect.result.fields["number"] == 7
    assert "lock" in effect.result.fields["lock"].type_name
    with pytest.raises(errors.ResultLost):  # never an instance that lacks something
        agent.run(work)


def test_a_lost_result_is_asked_of_the_probe(store_path):
    asked = []

    def find(effect):
        asked.append(effect.args["flight"])
        return holdfast.Found({"number": 7})

    @holdfast.tool(probe=find)
    def book(flight):
        DONE.append(flight)
        return Ticket(7)

    def work(agent):
        return book("TP1")

    agent = agent_of(store_path)
    assert agent.run(work) == {"number": 7}
    assert (asked, DONE) == (["TP1"], ["TP1"])


def test_the_command_line_shows_what_was_kept_and_settles_it(store_path):
    work, id, _tool = lose(store_path, Ticket(7))

    def hold(*words):
        command = [sys.executable, "-m", "holdfast", *words, "--store", str(store_path)]
        environment = {**os.environ, "COLUMNS": "200"}
        return warm.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    shown = hold("effects", "trip-7")
    assert "Ticket(number=7, seat='1A')" in shown
    assert f"holdfast effects resolve trip-7 {id} --done JSON --why TEXT" in shown
    hold("effects", "resolve", "trip-7", id, "--done", '{"number": 7}', "--why", "it is on the statement")
    assert agent_of(store_path).run(work) == {"number": 7}


def test_a_person_says_what_a_lost_call_returned(store_path):
    work, id, _tool = lose(store_path, Ticket(7))
    agent = agent_of(store_path)
    with pytest.raises(errors.BadOption, match="was called and returned"):
        agent.resolve(id, "not-done")
    assert agent.resolve(id, "done", result={"number": 7}).status == "done"
    assert agent.run(work) == {"number": 7}
    assert DONE == ["TP1"]
    with pytest.raises(errors.BadOption, match="not in doubt"):
        agent.resolve(id, "done", result=1)


def test_in_a_plain_loop_too(store_path):
    @holdfast.tool
    def book(flight):
        DONE.append(flight)
        return Ticket(7)

    for _ in range(2):
        agent = agent_of(store_path)
        with agent:
            for _ in range(3):  # a program that tries again
                with pytest.raises(errors.ResultLost):
                    book("TP1")
        agent.close()
    with agent_of(store_path) as agent:
        (effect,) = agent.effects()
        agent.resolve(effect, "done", result=7)
        assert book("TP1") == 7
    assert DONE == ["TP1"]


def test_whoever_undoes_a_lost_call_sees_what_there_is(store_path):
    seen = []
    _work, _, _tool = lose(store_path, Ticket(7), compensate=lambda effect: seen.append(effect.result))
    agent = agent_of(store_path)
    agent.rollback(agent.log()[-1])
    (result,) = seen
    assert result.fields == {"number": 7, "seat": "1A"}
