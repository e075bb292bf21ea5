"""Random programs against a plain model: 100,000 steps, 20,000 with other Pythons, 5 million in a soak. See fuzz.py."""

from __future__ import annotations

import sys

import pytest

from tests.codec import fuzz

STEPS = 100
# What one of these tests runs. More processes of `pytest -n` take more of them at once.
PARTS = 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck while a generator was closed
@pytest.mark.parametrize("part", range(PARTS))
def test_every_checkpoint_is_what_the_state_was(part, rounds):
    steps = rounds(100_000 if sys.version_info[:2] == (3, 11) else 20_000, 5_000_000)
    programs = steps // STEPS // PARTS
    for seed in range(part * 1_000_000, part * 1_000_000 + programs):
        try:
            fuzz.run(seed, STEPS)
        except BaseException as error:
            error.add_note(f"the program of seed {seed}")
            raise
