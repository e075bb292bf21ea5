"""Graphs are killed at any moment: what an ``invoke`` has returned is never lost, and nothing is there twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SOAK

ROOT = Path(__file__).resolve().parents[2]
KILLS = {"directory": 1_000, "server": 300} if SOAK else {"directory": 60, "server": 20}
# Processor time until the end: the shortest end in the first put, the longest see a few turns.
LIFE_S = 0.15
KILLED_WHILE_OPENING = 0.2
KILLS_PER_THREAD = 10
KILLS_PER_STORE = 100  # so that verifying it stays short
VERIFY_EVERY = 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLS)
def test_nothing_that_an_invoke_returned_is_lost(tmp_path, place, kind):
    errors, kills = tmp_path / "stderr", KILLS[kind]
    with errors.open("w") as stderr:
        template = subprocess.Popen(
            [sys.executable, "-m", "tests.contrib.kill_child"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    chance = random.Random(20_260)
    seed = chance.randrange(2**32) if not SOAK else random.randrange(2**32)
    chance.seed(seed)
    returned = 0
    with template:
        for number in range(kills):
            record = tmp_path / f"thread-{number // KILLS_PER_THREAD}"
            job = {
                "store": place(f"store{number // KILLS_PER_STORE}"),
                "record": str(record),
                "thread": record.name,
                "seed": chance.randrange(2**32),
                "cpu_s": chance.uniform(0.001, LIFE_S),
                "early": chance.random() < KILLED_WHILE_OPENING,
                "verify": number % VERIFY_EVERY == 0,
            }
            template.stdin.write(f"{json.dumps(job)}\n")
            template.stdin.flush()
            said = template.stdout.readline()
            assert said == f"gone {int(signal.SIGPROF)}\n", (
                f"seed {seed}, kill {number}: {said}{errors.read_text()[-4_000:]}"
            )
            if (number + 1) % KILLS_PER_THREAD == 0:
                returned += len(record.read_bytes().split(b"\n")) - 1 if record.exists() else 0
        template.stdin.close()
    assert returned > kills // 10, "most lives ended before anything happened"
