"""What every test may use: the store's path, how long a campaign runs, and the report on documentation blocks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOAK = os.environ.get("HOLDFAST_SOAK", "") not in ("", "0")

# Continuous integration must give the same verdict twice, so its examples are fixed and bounded.
# A soak looks for new ones. No deadline: a flush to a busy disk takes as long as it takes.
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=100,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak",
    max_examples=10_000,
    stateful_step_count=200,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("soak" if SOAK else "ci")

# Lines that tests/test_docs.py wants said at the end of a run.
DOCS_REPORT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DOCS_REPORT] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash[DOCS_REPORT]
    if lines:
        terminalreporter.section("documentation blocks", sep="-")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that the developer's shell names must never be touched by a test."""
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Where a test's store goes. Nothing is there yet."""
    return tmp_path / "store"


@pytest.fixture(scope="session")
def rounds() -> Callable[[int, int], int]:
    """``rounds(500, 10_000)``: how often a campaign repeats, in continuous integration and in ``make soak``."""

    def choose(ci: int, soak: int) -> int:
        return soak if SOAK else ci

    return choose
