"""A failing test leaves a dump, and its report says where.

``pytest -p holdfast.contrib.pytest`` turns it on, on the command line or in ``addopts``. It has no entry point, because
pytest would then rewrite all of Holdfast in everybody's tests. Must not import more of Holdfast before a test fails.
Always holds: no test's outcome changes, and a dump that cannot be written is a line in the report.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

DEFAULT_FOLDER = "dumps"
SECTION = "dump"
PROPERTY = "holdfast_dump"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("holdfast").addoption(
        "--dumps",
        metavar="DIR",
        help=f"where failing tests leave dumps (default: {DEFAULT_FOLDER}); look at one with `holdfast dump show`",
    )
    parser.addini("holdfast_dumps", "where failing tests leave dumps", default=DEFAULT_FOLDER)


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("dumps") or config.getini("holdfast_dumps") or DEFAULT_FOLDER
    config.pluginmanager.register(_Dumps(config.rootpath / wanted), "holdfast-dumps")


class _Dumps:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            try:
                path = self._taken(item, call, call.excinfo)
            except Exception as error:  # noqa: BLE001 - the report of the failure is worth more than the dump
                report.sections.append((SECTION, f"No dump: {type(error).__name__}: {error}"))
            else:
                from holdfast.errors import command

                report.sections.append((SECTION, f"{path}\n{command('dump', 'show', str(path))}"))
                report.user_properties.append((PROPERTY, str(path)))
                item.user_properties.append((PROPERTY, str(path)))  # the XML report takes those of the last phase
        return report

    def _taken(
        self, item: pytest.Item, call: pytest.CallInfo[Any], excinfo: pytest.ExceptionInfo[BaseException]
    ) -> Path:
        from holdfast import crash

        why = f"{item.nodeid} ({call.when})"
        with warnings.catch_warnings():  # a project that turns warnings into errors still gets its dump
            warnings.simplefilter("ignore")
            return crash.capture(why, error=excinfo.value, traceback=excinfo.tb, to=self._folder, trigger="test")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        paths = [
            value
            for outcome in ("failed", "error")
            for report in terminalreporter.getreports(outcome)
            for name, value in report.user_properties
            if name == PROPERTY
        ]
        if paths:
            terminalreporter.section("dumps")
            for path in dict.fromkeys(paths):
                terminalreporter.write_line(path)
