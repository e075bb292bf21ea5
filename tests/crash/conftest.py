"""What all tests of dumps share."""

from __future__ import annotations

import pytest

from holdfast.crash import agents
from holdfast.crash.limits import Limits


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Most tests are about what a dump holds, not about how long it takes on a machine that does much else."""
    monkeypatch.setitem(Limits.__init__.__kwdefaults__, "deadline_s", 600.0)
    monkeypatch.setitem(Limits.__init__.__kwdefaults__, "part_s", 300.0)
    monkeypatch.setattr(agents, "_LEDGER_S", 120.0)
