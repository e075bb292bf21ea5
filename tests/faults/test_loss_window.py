"""What a crash may cost with durability="batched": no more than is documented, and never from the middle."""

from __future__ import annotations

import random
import time

import pytest

import holdfast
from holdfast.agent import commits
from holdfast.store import writer
from tests.faults.campaign import ROOT
from tests.faults.victim import Victim
from tests.limits import limits

QUEUE = 16


def accept(path, name, say):
    """Checkpoints as fast as they are accepted, with a barrier now and then."""
    with limits({"PENDING_MAX": QUEUE}):
        agent = holdfast.open(path, durability="batched").agent(name)
        say("open")
        number = 0
        while True:
            number += 1
            agent.state["n"] = number
            agent.checkpoint(str(number))
            say(f"accepted {number} {time.monotonic()}")
            if number % 97 == 0:
                agent.flush()
                say(f"flushed {number}")


@pytest.mark.slow
def test_a_kill_costs_at_most_what_may_wait_and_nothing_before_a_flush(store_path, rounds):
    chance = random.Random(7)
    holdfast.open(store_path).close()
    worst = worst_ms = lost_in_all = 0
    for life in range(rounds(5, 500)):
        victim = Victim(lambda say, life=life: accept(store_path, f"agent-{life}", say))
        victim.wait_for("open")
        time.sleep(chance.uniform(0.02, 0.2))
        said = [line.split() for line in victim.end()]
        accepted = {int(words[1]): float(words[2]) for words in said if words[0] == "accepted"}
        flushed = max((int(words[1]) for words in said if words[0] == "flushed"), default=0)
        with holdfast.open(store_path, readonly=True) as store:
            agent = store.agent(f"agent-{life}", readonly=True)
            numbers = [int(checkpoint.label) for checkpoint in agent.log()][::-1]
            assert not numbers or agent.state["n"] == numbers[-1]
        there = numbers[-1] if numbers else 0
        assert numbers == list(range(1, there + 1)), "what is there is a prefix, without a gap"
        assert there >= flushed
        lost = max(accepted, default=there) - there
        assert lost <= QUEUE
        if lost > 0:
            lost_in_all += lost
            worst = max(worst, lost)
            worst_ms = max(worst_ms, (accepted[max(accepted)] - accepted[there + 1]) * 1e3)
    print(f"at most {worst} of {QUEUE} that may wait were lost, from the last {worst_ms:.1f} ms; {lost_in_all} in all")


def test_the_documented_bounds_are_those_of_the_code():
    page = (ROOT / "docs" / "guide" / "durability.md").read_text(encoding="utf-8")
    assert f"{commits.PENDING_MAX:,} changes of a branch" in page
    assert f"{writer.QUEUE_BYTES // 2**20} MiB" in page
    assert f"those of the last {writer.GATHER_S * 1e3:g} ms" in page
    reads = f"began in the last {writer.HOLD_S * 1e3:g} ms, or that ended in the last {writer.GATHER_S * 1e3:g} ms"
    assert reads in page
