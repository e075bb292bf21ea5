"""What every test may use: a store's path, a PostgreSQL database, how long a campaign runs, and the last report."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests import postgres
from tests.memory import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

# What says how wide a terminal is, and whether it has colours.
OF_A_TERMINAL = {
    *("COLUMNS", "LINES", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE"),
}

# The property under which a test keeps lines for the end of the run. Properties travel with a test's report, also
# from the worker processes of `pytest -n`.
DOCS_REPORT = "documentation blocks"


unsaved = pytest.mark.filterwarnings("ignore::holdfast.errors.UnsavedChanges")
"""Of a test that leaves changes unsaved on purpose, and whose subject is something else."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each worker process of ``pytest -n`` first loads its share of the modules, so that the others find bytecode."""
    about = getattr(session.config, "workerinput", None)
    if about is None or sys.dont_write_bytecode:
        return
    root = session.config.rootpath
    places = {Path(root, word.partition("::")[0]) for word in session.config.args}
    files = sorted({file for one in places for file in (one.rglob("test_*.py") if one.is_dir() else [one])})
    for file in files[int(about["workerid"].removeprefix("gw")) :: about["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # shown when it is collected
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker process of ``pytest -n`` begins with its share of the slow tests, so that all end together."""
    left = getattr(config, "workerinput", {}).get("workercount", 1)
    if left == 1:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    items.clear()
    while left:  # xdist gives each worker an equal piece of the list
        mine = slow[::left]
        slow = [item for item in slow if item not in mine]
        size = max(0, (len(slow) + len(mine) + len(fast)) // left - len(mine))
        items += [*mine, *fast[:size]]
        del fast[:size]
        left -= 1


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: what walks all objects, as collections and dumps do, need not pass them."""
    gc.collect()
    gc.freeze()


# What a test starts begins as it would in a terminal, whatever ran the tests: a run in the background inherits that
# SIGINT is ignored, another one that signals are blocked. And programs that die here leave no cores by themselves: they
# would lie in the checkout. Those that are to leave one raise the limit again.
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

# What this user has seen of stores is remembered in the user's state directory. Tests put old copies of stores in their
# places all day long, so here nothing is remembered, but in tests that ask for it.
os.environ["XDG_STATE_HOME"] = "/dev/null/none"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    told = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == DOCS_REPORT
    ]
    if told:
        terminalreporter.section(DOCS_REPORT, sep="-")
        for lines in sorted(told):
            for line in lines:
                terminalreporter.write_line(line)


@contextmanager
def from_outside_nothing() -> Iterator[None]:
    """A store that the developer's shell names must never be touched by a test, nor does its terminal count."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in OF_A_TERMINAL or (name.startswith("HOLDFAST_") and name != "HOLDFAST_SOAK"):
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _nothing_from_outside() -> Iterator[None]:
    with from_outside_nothing():
        yield


# Rooms above those of the store and of files, where what a disk does is tested. `holdfast doctor` looks at it, too.
IN_MEMORY = {"contrib", "crash", "run", "travel", "web"}


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A test's own folder, in memory where the disk is not its subject. A soak has all of them on the disk."""
    if SOAK or request.path.parent.name not in IN_MEMORY:
        yield tmp_path
        return
    with memory("holdfast-test-") as folder:
        yield folder


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Where a test's store goes. Nothing is there yet."""
    return tmp_path / "store"


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is seen of stores is remembered, below this directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))  # of what lies there nothing is remembered
    return tmp_path / "state"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """A PostgreSQL server, started when the first test asks for it; one for each worker process of `pytest -n`."""
    try:
        with postgres.server() as server:
            yield server
    except postgres.NoServer as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    """A PostgreSQL server that flushes, as stores want it."""
    try:
        with postgres.server(fsync="on") as running:
            yield running
    except postgres.NoServer as reason:
        pytest.skip(str(reason))


@pytest.fixture
def postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    """A new, empty PostgreSQL database, as ``postgresql://…`` for libpq; dropped after the test."""
    with postgres_server.database(f"test_{os.urandom(6).hex()}") as url:
        yield url


CRIU = Path(__file__).resolve().parent.parent / ".venv" / "criu" / "usr" / "sbin" / "criu"
"""Where .ci/setup unpacks it."""


@pytest.fixture
def criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes can be frozen: by root, with the CRIU that was fetched for tests. The machine's key is a test's own."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if not CRIU.exists():
        pytest.skip("needs CRIU, which .ci/setup could not fetch")
    monkeypatch.setenv("HOLDFAST_CRIU", str(CRIU))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    from holdfast.process import probe

    if not (found := probe()).usable:
        pytest.skip(f"CRIU cannot be used here: {found.problem}")
    return CRIU


@pytest.fixture(scope="session")
def rounds() -> Callable[[int, int], int]:
    """``rounds(500, 10_000)``: how often a campaign repeats, in continuous integration and in ``make soak``."""

    def choose(ci: int, soak: int) -> int:
        return soak if SOAK else ci

    return choose
