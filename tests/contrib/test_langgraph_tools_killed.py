"""Graphs whose nodes act outside are killed at any moment: nothing is done twice, and nothing is forgotten."""

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
KILLS = 1_000 if SOAK else 24
LIFE_S = 0.35
KILLS_PER_THREAD = 6
KILLS_PER_STORE = 60


@pytest.mark.slow
def test_nothing_that_a_node_does_is_done_twice(tmp_path):
    errors = tmp_path / "stderr"
    with errors.open("w") as stderr:
        template = subprocess.Popen(
            [sys.executable, "-m", "tests.contrib.tools_child"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    seed = random.randrange(2**32) if SOAK else 20_261
    chance = random.Random(seed)
    done = 0
    with template:
        for number in range(KILLS):
            group = number // KILLS_PER_THREAD
            ledger = tmp_path / f"thread-{group}"
            job = {
                "store": str(tmp_path / f"store{number // KILLS_PER_STORE}"),
                "ledger": str(ledger),
                "thread": ledger.name,
                "functional": group % 3 == 2,
                "seed": chance.randrange(2**32),
                "cpu_s": chance.uniform(0.02, LIFE_S),
            }
            template.stdin.write(f"{json.dumps(job)}\n")
            template.stdin.flush()
            said = template.stdout.readline()
            assert said == f"gone {int(signal.SIGPROF)}\n", (
                f"seed {seed}, kill {number}: {said}{errors.read_text()[-4_000:]}"
            )
            if (number + 1) % KILLS_PER_THREAD == 0:
                done += len(ledger.read_text().splitlines()) if ledger.exists() else 0
        template.stdin.close()
    assert done > KILLS, "most lives ended before anything happened"
