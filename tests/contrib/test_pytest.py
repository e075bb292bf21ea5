"""The pytest plugin: real runs of pytest over small suites, and the dumps that they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from holdfast.crash import open_dump

PLUGIN = ("-p", "holdfast.contrib.pytest")
SUITE = """
import pytest

class Order:
    def __init__(self, number):
        self.number = number
    def __repr__(self):
        raise RuntimeError("no repr of mine")

@pytest.fixture
def broken():
    stock = {"apples": 3}
    raise LookupError("no fixture today")

@pytest.fixture
def late():
    yield 1
    raise ValueError("after the test")

def test_passes():
    pass

def test_adds():
    order, total = Order(17), 41
    assert order.number + total == 59

def test_needs(broken):
    pass

def test_leaves(late):
    pass

@pytest.mark.xfail
def test_expected():
    assert 0

def test_skipped():
    pytest.skip("not now")
"""


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "test_orders.py").write_text(SUITE)

    def call(*words):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *words]
        alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no other plugin has to be loaded for this
        alone |= {"PYTEST_ADDOPTS": "", "COLUMNS": "80"}
        return subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False)

    return call


def counted(ended):
    return ended.stdout.splitlines()[-1].split(" in ")[0].strip("= ")


def test_failing_tests_leave_dumps_and_say_where(suite, tmp_path):
    plain = suite()
    assert not (tmp_path / "dumps").exists()
    ended = suite(*PLUGIN, "--junitxml=report.xml")
    assert ended.returncode == plain.returncode == 1
    assert counted(ended) == counted(plain) == "1 failed, 2 passed, 1 skipped, 1 xfailed, 2 errors"
    found = {}
    for path in (tmp_path / "dumps").glob("*.hfdump"):
        assert ended.stdout.count(str(path)) >= 3  # in the report, as a command, and in the summary
        with open_dump(path) as dump:
            found[dump.why] = dump.exceptions[0].type_name
            assert dump.trigger == "test"
            if "test_adds" in dump.why:
                frame = next(frame for frame in dump.threads[0].frames if frame.function == "test_adds")
                assert dump.local(frame, "total") == 41
                assert dump.local(frame, "order.number") == 17
    assert {why.split("::")[1] for why in found} == {
        "test_adds (call)",
        "test_needs (setup)",
        "test_leaves (teardown)",
    }
    named = [one.get("value") for one in ET.parse(tmp_path / "report.xml").iter("property")]
    assert len(named) == 3


def test_the_folder_can_be_configured(suite, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nholdfast_dumps = evidence\nfilterwarnings = error\n")
    assert suite(*PLUGIN, "-k", "adds").returncode == 1
    assert len(list((tmp_path / "evidence").iterdir())) == 1


def test_a_dump_that_cannot_be_written_changes_nothing(suite, tmp_path):
    (tmp_path / "taken").write_text("a file")
    ended = suite(*PLUGIN, "--dumps", "taken", "-k", "adds or passes")
    assert counted(ended) == "1 failed, 1 passed, 4 deselected"
    assert "No dump: " in ended.stdout


def test_workers_of_xdist_say_it_too(suite, tmp_path):
    ended = suite(*PLUGIN, "-p", "xdist", "-n", "2", "-k", "adds or needs")
    assert ended.returncode == 1
    paths = list((tmp_path / "dumps").glob("*.hfdump"))
    assert len(paths) == 2
    assert all(str(path) in ended.stdout for path in paths)
