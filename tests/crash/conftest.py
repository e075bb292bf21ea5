"""What all tests of dumps share."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from holdfast.crash import agents, memory
from holdfast.crash.kinds import Limits
from tests.crash import trip_program


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Most tests are about what a dump holds, not about how long it takes on a machine that does much else."""
    monkeypatch.setitem(Limits.__init__.__kwdefaults__, "deadline_s", 600.0)
    monkeypatch.setitem(Limits.__init__.__kwdefaults__, "part_s", 300.0)
    monkeypatch.setattr(agents, "_LEDGER_S", 120.0)


@pytest.fixture(autouse=True)
def small(request, monkeypatch):
    """The process that runs the tests holds much. Here it has few modules, and most tests look at what is near."""
    modules = {name: sys.modules[name] for name in ("__main__", "logging", "threading", request.module.__name__)}
    monkeypatch.setattr(memory, "sys", SimpleNamespace(modules=modules))
    if not getattr(request.module, "ALL_HOLDERS", False):
        monkeypatch.setattr(memory, "_VISITED", 1_000)
        monkeypatch.setitem(Limits.__init__.__kwdefaults__, "objects", 10_000)


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    """The dump of a program that failed in the middle of much: threads, tasks, a group of exceptions, an agent."""
    return trip_program.failed(tmp_path_factory.mktemp("failed"))


@pytest.fixture(scope="session")
def honest(path):
    """Its chunks."""
    return trip_program.chunks_of(path)
