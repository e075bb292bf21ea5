"""Random programs with policies, killed anywhere: what is lost, what is never saved, and what is never done twice."""

from __future__ import annotations

import os
import random
import signal
import sys

import pytest

import holdfast
from tests import warm
from tests.run import when_child as program
from tests.run.when_child import POLICIES, ROUNDS

SOAK = bool(os.environ.get("HOLDFAST_SOAK"))
LIVES = 100 if SOAK else 1
"""How often each kind of program is killed."""

LOST = {
    "every step": 1, "every third step": 3, "phases": 1, "all at once": 1,
    "time": 3, "bytes": 3, "adaptive": 3, "background": 1,
}  # fmt: skip
"""Rounds that may have to be worked again in a plain loop: one interval. A round takes a second, and changes at least
60 bytes; its write waits for all that is on its way in the background."""


def lines(path, kind=int):
    return [kind(line) for line in path.read_text().split()] if path.exists() else []


def states(store, durable=()):
    """Every state that was ever saved, on whatever line. ``durable``: what must be among them."""
    found = store.agent("trip-7", readonly=True).log(all=True)
    assert {*durable} <= {checkpoint.id for checkpoint in found}, "something that was durable is gone"
    return [checkpoint.state for checkpoint in found]


def check(path, policy, how, outside, begun, durable):
    """What has to hold after a kill at any moment."""
    with holdfast.open(path) as store:
        found = states(store, durable)
        for state in found:
            for book in state.get("booked", ()):
                assert book in outside
            assert state.get("first") == state.get("second"), "a state between two parts of an atomic block was saved"
        head = store.agent("trip-7", readonly=True).head
        saved = head.state.get("rounds", 0) if head is not None else 0
        if how.endswith("loop") and policy in LOST:
            assert max(begun, default=-1) + 1 - saved <= LOST[policy], "more than an interval of work was lost"
        assert store.verify().ok
    assert sorted(set(outside)) == sorted(outside), "something was booked twice"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loop", "async loop", "run", "async run"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_program_with_any_policy_may_be_killed_anywhere(tmp_path, policy, how):
    seed = random.randrange(2**32) if SOAK else hash_of(policy, how)
    chance = random.Random(seed)
    path, outside = tmp_path / "store", tmp_path / "world"
    for life in range(LIVES):
        for file in tmp_path.iterdir():
            if file.is_file():
                file.unlink()
        program.seed = f"{seed}-{life}"
        fatal = chance.randrange(1, 150)
        while True:
            words = [sys.executable, "-m", "tests.run.when_child", path, outside, policy, how, program.seed, fatal]
            ended = warm.run([*map(str, words)], check=False, capture_output=True, timeout=180)
            assert ended.returncode in {0, -signal.SIGKILL}, f"seed {seed}: {ended.stderr.decode()}"
            begun = lines(outside.with_suffix(".begun"))
            durable = lines(outside.with_suffix(".durable"), str)
            check(path, policy, how, lines(outside), begun, durable)
            if ended.returncode == 0:
                break
            fatal = chance.randrange(20, 200)
        with holdfast.open(path) as store:
            agent = store.agent("trip-7")
            assert agent.state["rounds"] == ROUNDS
            assert agent.state["booked"] == program.booked()
            assert lines(outside) == program.booked()
            store.remove("trip-7")


def hash_of(*words):
    return sum(ord(letter) * 31**at for at, letter in enumerate("/".join(words))) % 2**32


@pytest.mark.parametrize(
    ("how", "moments"), [("bare", range(6, 30, 1 if SOAK else 3)), ("beside", range(6, 90, 3 if SOAK else 11))]
)
def test_a_plain_loop_is_never_saved_between_a_call_and_what_it_makes_of_the_answer(tmp_path, how, moments):
    """The booking is outside, and its answer is not in the state yet: saved there, it would be booked again."""
    path, outside = tmp_path / "store", tmp_path / "world"
    words = [sys.executable, "-m", "tests.run.when_child", str(path), str(outside), "all at once", how, ""]
    for fatal in (*moments, 0):
        ended = warm.run([*words, str(fatal)], check=False, capture_output=True, timeout=180)
        assert ended.returncode in {0, -signal.SIGKILL}, ended.stderr.decode()
        with holdfast.open(path) as store:
            for state in states(store):
                # What is saved knows every booking that was made before it was saved.
                assert len([name for name in state if name.startswith("booking")]) == state.get("rounds", 0)
                assert state.get("second", 0) == state.get("first", -1) + 1
        if ended.returncode == 0:
            break
    assert lines(outside) == list(range(ROUNDS))
