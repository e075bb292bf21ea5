"""Checkpoints that a copy of the process writes: as those that it writes itself, whatever becomes of the copy."""

from __future__ import annotations

import json

import holdfast
from tests.process.test_point import run


def test_every_checkpoint_has_the_state_of_its_moment_and_nothing_is_lost_with_a_copy(store_path, rounds):
    (said,) = run("saving", store_path, 1, rounds(40, 2_000))
    found, _, rest = said.partition("] ")
    assert json.loads(found + "]") == [[], [], True]
    made, killed = map(int, rest.split())
    assert made > 10
    assert killed


def test_a_copy_that_counts_on_what_was_let_go_meanwhile_is_told_as_that_and_the_next_checkpoint_has_all(store_path):
    refused, rest = run("let_go", store_path)
    assert "names something that was let go meanwhile" in refused
    assert "moved" not in refused
    assert rest == "three True"


def test_a_call_that_changes_something_waits_for_the_copy(store_path):
    assert run("saving_and_calling", store_path) == ["True False", "acted", "True ['large']"]


def test_with_other_threads_it_is_written_the_ordinary_way_and_at_the_end_it_is_waited_for(store_path):
    assert run("fallen_back", store_path) == ["False True True beside a thread"]
    with holdfast.open(store_path) as store:
        assert store.agent("a").head.label == "at the end"
        assert store.agent("a").state["n"] == 2
