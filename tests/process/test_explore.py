"""Candidates from one moment: each has the same memory, and all that comes back is a value."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

import holdfast
from holdfast.errors import BadOption
from tests.process.test_point import BASE, ROOT, run


def test_every_way_to_end_is_told_and_nothing_of_the_program_changes(store_path, tmp_path):
    (tmp_path / "work").mkdir()
    found, late, best, after, left = run(
        "exploring", store_path, tmp_path / "work", environment={"TMPDIR": str(tmp_path)}
    )
    assert json.loads(found) == [
        *[["one", 1, ["before", "one"], ["before"], "one", "seen"], ["raised", "LookupError"]],
        *[["memory", ""], ["died", ""], ["value", ""], ["raised", "ForkPointOpen"], ["raised", "ForkPointOpen"]],
        ["two", 1, ["before", "two"], ["before"], "two", "seen"],
    ]
    assert late == "time True"
    assert best == "two True [0] as it was"
    assert after == "['before'] ['after', 'before'] True True"
    assert left == "0", "copies of the workspace are removed"


def test_what_a_candidate_begins_ends_with_it_and_keeps_no_value_from_coming_back(tmp_path):
    (tmp_path / "work").mkdir()
    found = run("exploring_with_children", tmp_path / "work", environment={"TMPDIR": str(tmp_path)})
    assert found == ["time ['text']", "late ended", "left ended"], "a fifo is no part of a workspace"


def test_so_many_are_tried_at_once_as_was_asked_for_and_no_more(tmp_path):
    assert run("exploring_together", tmp_path) == ["1 1", "3 3"]


def test_a_candidate_cannot_read_from_the_terminal_and_does_not_hang_there():
    typed, terminal = os.openpty()
    with subprocess.Popen(
        [*BASE, "exploring_at_a_terminal"], cwd=ROOT, stdin=terminal, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as program:  # fmt: skip
        os.write(typed, b"for the program\n")
        said, _ = program.communicate(timeout=120)
    os.close(typed)
    os.close(terminal)
    assert (program.returncode, said.split("\n")[0]) == (0, "raised OSError for the program")


def test_a_link_into_the_workspace_leads_into_the_copy_and_an_early_end_is_told(tmp_path):
    work = tmp_path / "work"
    (work / "releases" / "1").mkdir(parents=True)
    (work / "releases" / "1" / "app.py").write_text("as it was")
    assert run("exploring_links", work, environment={"TMPDIR": str(tmp_path)}) == [
        "changed here",
        "died candidate 1 ended with 3",
    ]
    assert (work / "releases" / "1" / "app.py").read_text() == "as it was"
    assert (work / "current").readlink() == work / "releases" / "1"


@pytest.mark.parametrize("options", [{"at_once": 0}, {"limit_s": float("nan")}, {"memory_bytes": -1}])
def test_limits_that_make_no_sense_are_refused(options):
    with pytest.raises(BadOption):
        holdfast.explore([1], str, **options)
