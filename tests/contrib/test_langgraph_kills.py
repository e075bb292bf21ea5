"""Graphs are killed at any moment: nothing that an ``invoke`` has returned is lost."""

from __future__ import annotations

import random
import signal

import pytest

from tests import warm
from tests.conftest import SOAK
from tests.lives import Troupe

KILLS = {"directory": 1_000, "server": 300} if SOAK else {"directory": 60, "server": 20}
# Processor time until the end: the shortest end in the first put, the longest see a few turns.
LIFE_S = 0.15
KILLED_WHILE_OPENING = 0.2
KILLS_PER_THREAD = 10
KILLS_PER_STORE = 100  # so that verifying it stays short
VERIFY_EVERY = 20


def killed(module, jobs, chance, seed):
    """Let each job live until the kernel ends it."""
    with Troupe(module, loaded=warm.LANGGRAPH) as troupe:
        for number, job in enumerate(jobs):
            life = troupe.begin(seed=chance.randrange(2**32), **job)
            assert life.end() == -signal.SIGPROF, f"seed {seed}, kill {number}: {life.said}"


def chances(seed):
    seed = random.randrange(2**32) if SOAK else seed
    return random.Random(seed), seed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLS)
def test_nothing_that_an_invoke_returned_is_lost(tmp_path, place, kind):
    chance, seed = chances(20_260)
    records = [tmp_path / f"thread-{number}" for number in range(KILLS[kind] // KILLS_PER_THREAD)]

    def jobs():
        for number in range(KILLS[kind]):
            record = records[number // KILLS_PER_THREAD]
            yield {
                "store": place(f"store{number // KILLS_PER_STORE}"),
                "record": str(record),
                "thread": record.name,
                "cpu_s": chance.uniform(0.001, LIFE_S),
                "early": chance.random() < KILLED_WHILE_OPENING,
                "verify": number % VERIFY_EVERY == 0,
            }

    killed("tests.contrib.kill_child", jobs(), chance, seed)
    returned = sum(record.read_bytes().count(b"\n") for record in records if record.exists())
    assert returned > KILLS[kind] // 10, "most lives ended before anything happened"
