"""Declaring tools and durable functions: what is refused and why, and which arguments a tool is known to have had."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap

import pytest

import holdfast
from holdfast import errors
from holdfast.codec.types import REGISTRY
from holdfast.run import records
from holdfast.run.arguments import fetch, fingerprint, secret
from holdfast.run.durables import durable
from holdfast.run.effects import Found
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash

MISSING = object()


class Caller:
    def __call__(self, flight):
        return flight


# -- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"raises": ValueError}, "Write raises=(ValueError,)."),
        ({"raises": (ValueError(),)}, "raises=(SoldOut,)"),
        ({"raises": ("ValueError",)}, "raises=(SoldOut,)"),
        ({"raises": 3}, "raises=(SoldOut,)"),
        ({"raises": (StopIteration,)}, "the end of a loop"),
        ({"volatile": "flight"}, "Write volatile=('flight',)."),
        ({"volatile": (3,)}, "volatile=("),
        ({"retries": "3"}, "Use 0 to 100."),
        ({"retries": True}, "Use 0 to 100."),
        ({"retries": 101}, "Use 0 to 100."),
        ({"timeout_s": "5"}, "Use a number of seconds above 0."),
        ({"timeout_s": float("nan")}, "Use a number of seconds above 0."),
        ({"breaker": "5"}, "holdfast.Breaker(...)"),
        ({"breaker": True}, "holdfast.Breaker(...)"),
        ({"probe": 3}, "Use a function."),
        ({"compensate": "cancel"}, "Use a function."),
        ({"fallback": []}, "Use a function."),
        ({"breaker": 0}, "Use 1 to"),
        ({"checkpoint": "often"}, "Use before or after."),
        ({"retries": -1}, "Use 0 to 100."),
        ({"name": ""}, "not empty"),
        ({"name": 3}, "not empty"),
        ({"effect": "writes"}, "Use one of write,"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_where_it_is_written(options, said):
    with pytest.raises(errors.BadOption) as caught:

        @tool(**options)
        def book(flight): ...

    assert said in str(caught.value)
    (option, value), *_ = options.items()
    assert repr(value) in str(caught.value)
    assert option in str(caught.value)


@pytest.mark.parametrize("option", [{"retries": 1}, {"breaker": 3}, {"fallback": print}])
def test_a_local_tool_leaves_its_failures_to_the_program(option):
    def book(flight): ...

    with pytest.raises(errors.BadOption, match="Handle its failures where it is called"):
        tool(effect="local", **option)(book)


@pytest.mark.parametrize("thing", [functools.partial(print, 1), len, dict, Caller(), classmethod(lambda cls: 1), 7])
def test_a_tool_is_a_function(thing):
    with pytest.raises(errors.BadOption, match=r"@holdfast\.tool"):
        tool(thing)
    with pytest.raises(errors.BadOption, match=r"@holdfast\.tool"):
        tool(name="book")(thing)


def test_a_durable_function_has_a_name_and_a_result():
    def travel(agent, city):
        return city

    half = functools.partial(travel, city="Lisbon")
    bench = Bench()
    for make in (durable, bench.run, durable(name="")):
        with pytest.raises(errors.BadOption, match="by its name"):
            make(half)
    assert bench.run(durable(name="to Lisbon")(half)) == "Lisbon"
    with pytest.raises(errors.BadOption, match="not int"):
        durable(7)

    def yields(agent):
        yield 1

    with pytest.raises(errors.BadOption, match="yields"):
        bench.run(yields)


# -- arguments --------------------------------------------------------------------------------------------------


def endless():
    mine = []
    mine.append(mine)
    return mine


def deep():
    mine = []
    for _ in range(5_000):
        mine = [mine]
    return mine


@pytest.mark.parametrize("with_secret", [False, True])
@pytest.mark.parametrize("make", [endless, deep])
def test_arguments_and_results_without_an_end_cannot_be_saved(make, with_secret):
    @tool
    def act(thing):
        return thing() if callable(thing) else thing

    @tool
    def give():
        return make()

    def takes(agent, thing):
        pass

    bench = Bench()
    if with_secret:
        secret(bench, "token", "hunter2hunter2")
    with pytest.raises(errors.Unencodable, match="the arguments of act"):
        bench.run(lambda agent: act(make()))
    with pytest.raises(errors.ResultLost, match="the result of give"):
        bench.run(lambda agent: give())
    with pytest.raises(errors.Unencodable):
        bench.run(takes, make())


def test_a_compensation_and_a_probe_see_the_arguments_as_the_function_did():
    seen = []

    def look(effect):
        seen.append(effect.args)
        return Found(1)

    @tool(probe=look)
    def book(flight, *stops, seat="any", meal=None, how=MISSING, **extra):
        if len(seen) < 2:
            raise ConnectionError
        return 1

    def work(agent):
        first = book("TP1", meal="fish")
        if len(seen) == 1:
            raise Crash
        return first

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    intent = next(number for number, record in bench.ledger.records() if isinstance(record, records.Intent))
    bench.crashed(intent).run(work)  # which has to be asked about in a new process
    expected = {"flight": "TP1", "stops": (), "seat": "any", "meal": "fish", "how": MISSING, "extra": {}}
    assert seen == [expected, expected]
    assert list(seen[0]) == list(expected)


def test_defaults_are_recorded_and_the_fingerprint_stays_what_it_was():
    @tool
    def book(flight, seat="any"):
        return holdfast.effect().args

    @tool
    def pay(euros, how=MISSING):
        return 1

    @tool
    def log_in(user, key="hunter2hunter2"):
        return 1

    def work(agent):
        pay(3)
        log_in("me")
        return book("TP1")

    bench = Bench()
    secret(bench, "key", "hunter2hunter2")
    assert bench.run(work) == {"flight": "TP1", "seat": "any"}
    intents = [record for _, record in bench.ledger.records() if isinstance(record, records.Intent)]
    given = [{"euros": 3}, {"user": "me"}, {"flight": "TP1"}]
    assert [intent.fingerprint for intent in intents] == [fingerprint(one, REGISTRY) for one in given]
    # What cannot or must not be recorded is looked up when somebody asks.
    kept = [fetch(intent.args, bench.ledger, REGISTRY) for intent in intents]
    assert kept == [{"euros": 3}, {"user": "me"}, {"flight": "TP1", "seat": "any"}]


def test_a_rollback_undoes_with_the_defaults_of_the_time_of_the_call(tmp_path):
    undone = []

    def defined(seat):
        @tool(name="book", compensate=lambda effect: undone.append(effect.args))
        def book(flight, seat=seat):
            return 1

        return book

    book = defined("any")

    @holdfast.durable
    def travel(agent):
        agent.checkpoint("start")
        return book("TP1")

    with holdfast.open(tmp_path) as store:
        agent = store.agent("a")
        agent.run(travel)
        book = defined("window")
        assert agent.effects()[0].args == {"flight": "TP1", "seat": "any"}
        agent.rollback("start")
    assert undone == [{"flight": "TP1", "seat": "any"}]


# -- stacks -----------------------------------------------------------------------------------------------------


DEEP = """
import sys
import holdfast

sys.setrecursionlimit(220)  # the way to it takes less time
done = []


@holdfast.tool(effect=sys.argv[2])
def put(n):
    done.append(n)
    return n


@holdfast.durable
def dive(agent, to):
    def go(n):
        put(n)
        if sys.argv[3] == "checkpoint":
            agent.checkpoint(str(n))
        return n if n >= to else go(n + 1)

    return go(0)


with holdfast.open(sys.argv[1]) as store:
    agent, other = store.agent("a"), store.agent("b")
    try:
        agent.run(dive, 10**6)
    except RecursionError:
        pass
    (run,) = agent.runs()
    assert (run.status, run.error.partition(":")[0]) == ("failed", "RecursionError"), run
    effects = agent.effects() if sys.argv[2] != "read" else []
    assert all(effect.status == "done" for effect in effects), effects
    assert len(effects) == len(done) or sys.argv[2] == "read"
    other.state["x"] = 1
    other.checkpoint("goes on")
    print(len(done) > 10, agent.run(dive.options(id="shallow"), 3))
"""


@pytest.mark.parametrize(("kind", "also"), [("write", ""), ("idempotent", "checkpoint"), ("read", "checkpoint")])
def test_recursion_without_an_end_is_the_programs_own_failure(tmp_path, kind, also):
    program = tmp_path / "deep.py"
    program.write_text(textwrap.dedent(DEEP).replace("sys.argv[3]", repr(also)))
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "store"), kind],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert (ended.returncode, ended.stdout) == (0, "True 3\n"), ended.stderr
