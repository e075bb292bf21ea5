"""What cannot be saved: handles, secrets, random generators; and how far a long tool has come."""

from __future__ import annotations

import copy
import json
import pickle
import random
import sqlite3

import numpy as np
import pytest

import holdfast
from holdfast import errors
from holdfast.run.arguments import secret
from holdfast.run.tools import tool
from holdfast.store.manifest import split_payload
from tests.run.bench import Bench, Crash


def everything(bench):
    """All bytes that a run has left."""
    bench.store.flush()
    view = bench.store._db.view
    nodes = view.nodes([name for _, name, _ in view.rows("node")])
    payloads = [part for row in view.rows("loose") for part in split_payload(row[-1])]
    return b"".join([*nodes.values(), *payloads, *(row[-1] for row in view.rows("record"))])


# -- resources ----------------------------------------------------------------------------------------------


class Sessions:
    """A server with sessions."""

    def __init__(self):
        self.open_ones = []
        self.asked = []

    def resource(self, bench, **options):
        return bench.handle.resource("db", open=self.open, close=self.close, describe=self.describe, **options)

    def open(self, description):
        self.asked.append(description)
        handle = {"session": description["session"] if description else f"s{len(self.asked)}", "at": 0}
        if description:
            handle["at"] = description["at"]
        self.open_ones.append(handle)
        return handle

    def close(self, handle):
        self.open_ones = [one for one in self.open_ones if one is not handle]

    @staticmethod
    def describe(handle):
        return dict(handle)


def test_a_handle_is_opened_when_it_is_used_and_again_by_its_newest_description():
    sessions, bench = Sessions(), Bench()
    db = sessions.resource(bench)
    assert sessions.asked == []
    assert not db.is_open
    db.handle["at"] = 5
    assert db.handle is db.handle
    db.update()
    assert sessions.asked == [None]
    again = bench.crashed(bench.ledger.count)
    assert sessions.resource(again).handle == {"session": "s1", "at": 5}
    assert sessions.asked == [None, {"session": "s1", "at": 5}]


def test_closing_keeps_the_description_and_closes_all_even_if_one_cannot_be(caplog):
    sessions, bench = Sessions(), Bench()

    def stuck(handle):
        raise OSError("stuck")

    bad = bench.handle.resource("bad", open=object, close=stuck)
    db = sessions.resource(bench)
    assert bad.handle
    db.handle["at"] = 9
    bench.companions.close()
    assert sessions.open_ones == []
    assert not bad.is_open
    assert "stuck" in caplog.text
    assert db.handle["at"] == 9
    assert bench.handle.resource("db", open=sessions.open) is db


def test_a_branch_does_not_get_what_another_branch_has_open(caplog):
    sessions, bench = Sessions(), Bench()
    assert sessions.resource(bench).handle["session"] == "s1"
    branch, third = bench.branched(), bench.branched("third")
    other = sessions.resource(branch)
    assert other.description is None
    assert other.handle["session"] == "s2"
    assert "another branch" in caplog.text
    forked = sessions.resource(third, fork=lambda old: {**old, "session": f"copy of {old['session']}"})
    assert forked.handle["session"] == "copy of s1"


def test_a_resource_without_a_description_is_simply_opened_again():
    bench = Bench()
    made = []
    db = bench.handle.resource(
        "db", open=lambda: made.append(1) or sqlite3.connect(":memory:"), close=lambda c: c.close()
    )
    with db as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    assert not db.is_open
    assert made == [1]
    assert bench.ledger.count == 0


def test_a_handle_that_cannot_be_opened_is_tried_again_at_the_next_use():
    bench, fails = Bench(), [True]

    def open_it():
        if fails:
            fails.pop()
            raise OSError("no route")
        return "there"

    db = bench.handle.resource("db", open=open_it)
    with pytest.raises(OSError, match="no route"):
        _ = db.handle
    assert db.handle == "there"


def test_a_description_with_a_secret_in_it_is_refused():
    bench = Bench()
    secret(bench, "password", "correct horse battery")
    db = bench.handle.resource(
        "db", open=lambda old: object(), describe=lambda handle: {"url": "db://u:correct horse battery@h"}
    )
    for _ in range(2):
        with pytest.raises(errors.Unencodable, match="secret password"):
            _ = db.handle
    assert not db.is_open
    assert b"correct horse" not in everything(bench)


# -- secrets ------------------------------------------------------------------------------------------------


def test_a_secret_is_given_to_a_process_and_to_no_other():
    bench = Bench()
    with pytest.raises(errors.UnknownSecret):
        secret(bench, "key")
    secret(bench, "key", "sk-0123456789")
    assert secret(bench, "key").reveal() == "sk-0123456789"
    with pytest.raises(errors.UnknownSecret):
        secret(bench.crashed(), "key")
    secret(bench, "key", None)
    with pytest.raises(errors.UnknownSecret):
        secret(bench, "key")
    with pytest.raises(errors.BadOption):
        secret(bench, "pin", "1234")


def test_a_secret_cannot_be_shown_saved_or_put_into_the_state():
    bench = Bench()
    key = secret(bench, "key", "sk-0123456789")
    assert "sk-" not in repr(key) + str(key) + f"{key}"
    for way in (pickle.dumps, copy.deepcopy, json.dumps):
        with pytest.raises(TypeError):
            way(key)
    with pytest.raises(errors.Unencodable):
        bench.state["key"] = key


@pytest.mark.parametrize("effect", ["read", "write", "idempotent"])
@pytest.mark.parametrize(
    "argument",
    ["sk-0123456789", {"headers": [("Authorization", "Bearer sk-0123456789")]}, b"xx sk-0123456789", {"sk-0123456789"}],
)
def test_a_call_with_a_secret_among_its_arguments_is_refused_before_it_is_made(effect, argument):
    bench, calls = Bench(), []
    secret(bench, "key", "sk-0123456789")

    @tool(effect=effect)
    def send(what):
        calls.append(what)

    with pytest.raises(errors.Unencodable, match="secret key"):
        bench.run(lambda agent: send(argument))
    assert calls == []
    assert b"sk-0123456789" not in everything(bench)


def test_a_secret_in_a_result_an_error_or_progress_is_left_out_of_the_record(caplog):
    bench = Bench()
    secret(bench, "key", "sk-0123456789")

    @tool(effect="read")
    def echo():
        holdfast.effect().progress(["half", "sk-0123456789"])
        return {"sent": "?key=sk-0123456789", "big": ["sk-0123456789 " * 2_000]}

    @tool(effect="read")
    def fail():
        raise OSError("GET /?key=sk-0123456789 failed")

    @tool(effect="read", raises=(OSError,))
    def declared():
        raise OSError("GET /?key=sk-0123456789 failed")

    @tool
    def doubtful():
        raise OSError("GET /?key=sk-0123456789 failed")

    def work(agent):
        found = echo()
        for one in (fail, declared):
            with pytest.raises((errors.ToolFailed, OSError)) as caught:
                one()
            assert "sk-0123456789" not in str(caught.value)
        with pytest.raises(errors.InDoubt):
            doubtful()
        return found["sent"]

    with pytest.raises(errors.InDoubt):
        bench.run(work)
    assert b"sk-0123456789" not in everything(bench)
    assert "the result of echo contains the secret key" in caplog.text


def test_a_run_with_a_secret_among_its_arguments_or_in_its_result_does_not_keep_it():
    bench = Bench()
    secret(bench, "key", "sk-0123456789")
    with pytest.raises(errors.Unencodable, match="secret key"):
        bench.run(lambda agent, key: key, "sk-0123456789")
    assert bench.ledger.count == 0
    assert bench.run(lambda agent: "it was sk-0123456789") == "it was <secret key>"
    assert b"sk-0123456789" not in everything(bench)


# -- generators ---------------------------------------------------------------------------------------------

KINDS = {
    "random": lambda: random.Random(7),
    "numpy": lambda: np.random.default_rng(7),
    "mersenne": lambda: np.random.Generator(np.random.MT19937(7)),
    "philox": lambda: np.random.Generator(np.random.Philox(7)),
    "legacy": lambda: np.random.RandomState(7),
}


def draw(generator, count=5):
    numbers = [generator.random() for _ in range(count)]
    numbers.append(generator.gauss(0, 1) if hasattr(generator, "gauss") else generator.normal())
    return numbers


def reopened(bench):
    """The agent in another process, with its state as it is now."""
    bench.handle.checkpoint("kept")
    return bench.crashed()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_generator_goes_on_where_the_state_was_saved(kind):
    bench = Bench()
    dice = bench.companions.generator("dice", KINDS[kind]())
    draw(dice)
    bench.companions.keep()
    other = reopened(bench)
    expected = draw(dice)
    assert draw(other.companions.generator("dice", KINDS[kind]())) == expected
    bench.companions.restore()  # as a rollback does
    assert draw(dice) == expected


@pytest.mark.parametrize("module", [random, np.random])
def test_the_generators_of_the_modules_can_be_kept_too(module):
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - the old one is what is under test
    try:
        bench = Bench()
        bench.companions.generator("global", module)
        module.seed(3)
        bench.companions.keep()
        first = module.random()
        bench.companions.restore()
        assert module.random() == first
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_draws_the_numbers_that_the_line_draws_that_it_left(kind):
    bench = Bench()
    dice = bench.companions.generator("dice", KINDS[kind]())
    draw(dice)
    bench.handle.checkpoint("kept")
    other = bench.branched()
    theirs = other.companions.generator("dice", KINDS[kind]())
    assert draw(theirs) == draw(dice)
    third = reopened(other)
    assert draw(third.companions.generator("dice", KINDS[kind]())) == draw(theirs)


def test_keeping_what_has_not_changed_does_not_change_the_state():
    bench = Bench()
    bench.companions.generator("dice", random.Random(7))
    bench.handle.checkpoint("kept")
    bench.companions.keep()
    assert not bench.state.changed


def test_a_generator_in_a_run_draws_the_same_numbers_when_the_run_is_executed_again():
    asked = []

    @tool(effect="read")
    def guess(number):
        asked.append(number)
        return number

    def work(agent):
        dice = agent._host.companions._generators["dice"]
        found = [guess(dice.random()) for _ in range(5)]
        if len(asked) == 5:
            guess(-1.0)
            raise Crash
        return found

    bench = Bench()
    bench.companions.generator("dice", random.Random(7))
    with pytest.raises(Crash):
        bench.run(work)
    again = bench.crashed(bench.ledger.count - 1)
    again.companions.generator("dice", random.Random(99))
    assert again.run(work) == asked[:5]


def test_what_is_no_generator_or_another_kind_is_refused():
    bench = Bench()
    with pytest.raises(errors.BadOption):
        bench.companions.generator("dice", object())
    with pytest.raises(errors.BadOption):
        bench.companions.generator("dice", random.SystemRandom())
    bench.companions.generator("dice", random.Random(1))
    bench.companions.keep()
    with pytest.raises(errors.BadOption, match="kept as random"):
        bench.companions.generator("dice", np.random.default_rng(1))


# -- progress -----------------------------------------------------------------------------------------------


def test_a_long_tool_goes_on_from_its_last_progress_through_several_crashes():
    done = []

    @tool(effect="idempotent")
    def copy_files(files):
        start = holdfast.effect().last_progress or 0
        for number in range(start, len(files)):
            done.append(files[number])
            holdfast.effect().progress(number + 1)
            if len(done) in {2, 4}:
                raise Crash
        return len(files)

    files = ["a", "b", "c", "d", "e"]

    def work(agent):
        return copy_files(files)

    bench = Bench()
    for _ in range(2):
        with pytest.raises(Crash):
            bench.run(work)
        bench = bench.crashed()
    assert bench.run(work) == 5
    assert done == files


def test_progress_is_there_at_the_next_attempt_in_the_same_process():
    seen = []

    @tool(effect="read", retries=2)
    def fetch_all():
        seen.append(holdfast.effect().last_progress)
        holdfast.effect().progress({"page": len(seen)})
        if len(seen) < 3:
            raise OSError
        return len(seen)

    assert Bench().run(lambda agent: fetch_all()) == 3
    assert seen == [None, {"page": 1}, {"page": 2}]
