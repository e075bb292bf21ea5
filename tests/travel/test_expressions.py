"""What users can ask of a state, and that no question can do anything but be answered."""

from __future__ import annotations

import time
from dataclasses import dataclass
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import BadExpression
from holdfast.travel import Expression
from holdfast.travel.expressions import TEXT_MAX, Look

STATE = {
    "budget": -5,
    "price": Decimal("3.50"),
    "name": "Lisbon in May",
    "messages": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "hello"}],
    "rooms": {"a b": {"guests": ["ann", "bo"]}, 7: "seven"},
    "nothing": None,
    "big": [{"n": n} for n in range(3_000)],
}


@dataclass
class Plan:
    steps: list
    cost: int


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    with holdfast.open(tmp_path_factory.mktemp("look") / "store", types=[Plan]) as store:
        agent = store.agent("a")
        for name, value in STATE.items():
            agent.state[name] = value
        agent.state["plan"] = Plan(["fly", "sleep"], 7)
        agent.checkpoint()
        yield Look.of(agent.at().state)


@pytest.mark.parametrize(
    "text",
    [
        "budget < 0",
        "state.budget == -5",
        "budget < 0 and not (budget > 0 or name == 'x')",
        "-10 <= budget < 0",
        "price * 2 == 7",
        "len(messages) == 2 and messages[-1].role == 'bot'",
        "messages[0]['content'] in ['hi', 'ho']",
        "'Lisbon' in name and 'Porto' not in name",
        "rooms['a b'].guests[1] == 'bo' and rooms[7] == 'seven'",
        "'ann' in rooms['a b'].guests",
        "len(big) == 3000 and big[2999].n == 2999 and big[-1].n == 2999",
        "plan.cost == 7 and len(plan.steps) == 2 and plan.steps[0] == 'fly'",
        "budget + 5 == 0 and abs(budget) // 2 == 2 and budget % 2 == 1",
        "max(1, 2) == 2 and sum([1, 2, 3]) == 6 and min(budget, 0) == budget",
        # A path that leads nowhere is None; `exists` tells it from one that is.
        "none_such is None and nothing is None and none_such.inner[3].more == None",
        "exists(nothing) and not exists(none_such) and not exists(messages[2]) and not exists(messages[-3])",
        "not (none_such < 0) and not (none_such > 0) and not ('x' in none_such) and len(none_such) == 0",
        "not exists(name.length) and not exists(name[0])",
    ],
)
def test_what_holds_of_the_state_is_true(look, text):
    assert Expression(text).holds(look) is True


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("", 0),
        ("budget <", 8),
        ("budget < 0 and __import__('os').system('id')", 15),
        ("().__class__", 0),
        ("[x for x in messages]", 0),
        ("(lambda: 1)()", 0),
        ("f'{budget}'", 0),
        ("budget if name else 3", 0),
        ("2 ** 9 ** 9", 0),
        ("len(messages, key=3)", 0),
        ("messages[budget]", 9),
        ("budget := 3", 7),
        ("open('x')", 0),
        ("len.__self__('x')", 0),
        ("a" * (TEXT_MAX + 1), 0),
        ("(" * 500 + "1" + ")" * 500, None),
        ("not " * 300 + "1", None),
        ("-" * 1500 + "1", None),
        ("a" + ".b" * 900, None),
        ("1j", 0),
    ],
)
def test_anything_else_is_refused_with_its_place(text, at):
    with pytest.raises(BadExpression) as caught:
        Expression(text)
    assert at is None or caught.value.at == at
    assert len(str(caught.value)) < 5_000


@pytest.mark.parametrize("text", ["name < 3", "budget + name", "len(budget)", "1 / 0", "'x' in budget", "-name"])
def test_what_makes_no_sense_on_a_state_is_said_with_its_place(look, text):
    with pytest.raises(BadExpression, match="at character"):
        Expression(text).value(look)


@pytest.mark.parametrize("text", [f"{'9' * 600} * {'9' * 700} * 2", " * ".join(["99999999"] * 180)])
def test_it_never_computes_huge_numbers(look, text):
    with pytest.raises(BadExpression, match=r"too long|too deep"):
        Expression(text).value(look)


@pytest.mark.parametrize("name", ["cafe\u0301", "\ufb01ne", "\u2115"])
def test_a_name_that_python_would_read_as_another_is_refused_and_its_quoted_form_works(store_path, name):
    with holdfast.open(store_path) as store:
        agent = store.agent("a", when=None)
        agent.state[name] = 1
        agent.state["deep"] = {name: 1}
        agent.checkpoint()
        agent.state[name] = agent.state["deep"][name] = -4
        agent.checkpoint("bad")
        for text in (f"{name} < 0", f"deep.{name} < 0", f"len({name}.x) > 0", f"(1 <\n {name})"):
            with pytest.raises(BadExpression, match="not what it looks like"):
                agent.bisect(when=text)
        for text in (f"state[{name!r}] < 0", f"deep[{name!r}] < 0"):
            assert agent.bisect(when=text).checkpoint.label == "bad"
        assert agent.blame(f"[{name!r}]").checkpoint.label == "bad"


def test_names_that_the_asker_gives_are_no_sections(look):
    expression = Expression("new < 0 and old.n >= 0 and state.budget == -5", names=("old", "new"))
    assert expression.paths == {("budget",)}
    assert expression.holds(look, old={"n": 0}, new=-1)


@given(st.text(max_size=60))
def test_whatever_is_typed_is_an_expression_or_a_typed_error(text):
    try:
        Expression(text)
    except BadExpression as error:
        assert 0 <= error.at <= len(text)  # noqa: PT017


def test_an_expression_that_takes_too_long_is_ended_and_says_so(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        agent = store.agent("a")
        agent.state["many"] = list(range(300_000))
        agent.checkpoint()
        look = Look.of(agent.at().state)
        long = " or ".join(["len(many) < 0"] * 110)
        for ask in (Expression(long).value, Expression(long).broken):
            began_s = time.thread_time()
            with pytest.raises(BadExpression, match="it took longer than 1 s, at character"):
                ask(look)
            assert time.thread_time() - began_s < 2.5
