"""What all tests of dumps share."""

from __future__ import annotations

import pytest

from holdfast.crash.limits import Limits


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Most tests are about what a dump holds, not about how long it takes on a machine that does much else."""
    monkeypatch.setitem(Limits.__init__.__kwdefaults__, "deadline_s", 120.0)
    monkeypatch.setitem(Limits.__init__.__kwdefaults__, "part_s", 60.0)
