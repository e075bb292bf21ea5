"""A share of every campaign, small enough for continuous integration; `make soak` runs them in full."""

from __future__ import annotations

import pytest

from tests.conftest import SOAK, unsaved
from tests.faults.campaign import Skip, Task
from tests.faults.everything import CAMPAIGNS

QUICK = {"kill-points", "failing", "flush", "full", "model"}
"""Those that take no more than a few seconds."""


@unsaved
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CAMPAIGNS]
)
def test_a_share_of_the_campaign_breaks_no_promise(name, rounds):
    if SOAK:
        pytest.skip("make soak runs all of it, with python -m tests.faults")
    campaign = CAMPAIGNS[name]
    task = Task(rounds(campaign.ci, campaign.soak))
    try:
        campaign.run(task)
    except Skip as reason:
        pytest.skip(str(reason))
    print(f"{task.done:,} {campaign.unit}: {dict(task.details)}")
    assert not task.found, "\n".join(task.found[:20])
    assert task.done
