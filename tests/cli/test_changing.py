"""branch, tag, rollback, undo: verbs that change an agent's history."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests import warm


@pytest.fixture
def labels(cli):
    def read(revision="trip-7"):
        return [entry["label"] for entry in cli("log", revision, "--json").json["checkpoints"]]

    return read


@pytest.fixture
def writer(filled):
    """Another process that writes trip-7 until the test ends."""
    code = (
        "import sys, holdfast\n"
        "store = holdfast.open(sys.argv[1], inert=True)\n"
        "agent = store.agent('trip-7')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with warm.Popen(
        [sys.executable, "-c", code, str(filled)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_branch_starts_a_branch_and_lists_it(cli, labels):
    made = cli("branch", "trip-7", "late", "--at", "answered")
    assert made.code == 0
    assert made.out.startswith("Branch late of trip-7 starts at ")
    assert labels("trip-7@late") == ["answered", "asked"]
    assert [line.split()[0] for line in cli("branch", "trip-7").out.splitlines()[1:]] == ["main", "try-b", "late"]
    entries = cli("branch", "trip-7", "--json").json["branches"]
    assert [(entry["name"], entry["head"]["label"]) for entry in entries] == [
        ("main", "cheaper"), ("try-b", "thrifty"), ("late", "answered"),
    ]  # fmt: skip


def test_branch_may_start_at_a_revision_in_the_name(cli, labels):
    assert cli("branch", "trip-7@try-b", "from-b", "--json").json["head"]["label"] == "thrifty"
    assert labels("trip-7@from-b") == ["thrifty", "asked"]
    assert cli("branch", "trip-7@try-b", "x", "--at", "asked").code == 2


def test_a_branch_gives_an_abandoned_line_its_name_back(cli, labels, evil):
    lost = next(e for e in cli("log", "trip-7", "--all", "--json").json["checkpoints"] if e["abandoned"])
    assert cli("branch", "trip-7", "found", "--at", f"id:{lost['id'][:12]}").code == 0
    assert labels("trip-7@found")[0] == evil
    assert not any(e["abandoned"] for e in cli("log", "trip-7", "--all", "--json").json["checkpoints"])


def test_names_that_are_taken_or_empty_are_refused(cli):
    for words in [
        ("branch", "trip-7", "main"),
        ("branch", "trip-7", "good"),
        ("tag", "trip-7", "main"),
        ("tag", "trip-7", " "),
    ]:
        ended = cli(*words)
        assert (ended.code, ended.out) == (2, ""), words


def test_tag_sets_moves_lists_and_deletes(cli):
    assert "names" in cli("tag", "trip-7", "first", "--at", "#1").out
    assert cli("tag", "trip-7@try-b", "first", "--json").json["checkpoint"]["label"] == "thrifty"
    tags = {entry["name"]: entry["checkpoint"]["label"] for entry in cli("tag", "trip-7", "--json").json["tags"]}
    assert tags == {"good": "answered", "first": "thrifty"}
    assert "is gone. It named" in cli("tag", "trip-7", "first", "--delete").out
    assert cli("tag", "trip-7", "first", "--delete").code == 2
    assert [line.split()[0] for line in cli("tag", "trip-7").out.splitlines()] == ["tag", "good"]
    assert cli("tag", "user@example.com").out == "user@example.com has no tags.\n"


def test_without_a_name_all_branches_and_tags_are_listed(cli):
    rows = [line.split()[:2] for line in cli("branch").out.splitlines()[1:]]
    assert rows == [
        ["tenant:42/a#b", "main"], ["trip-7", "main"], ["trip-7", "try-b"], ["user@example.com", "main"],
    ]  # fmt: skip
    assert [line.split()[:2] for line in cli("tag").out.splitlines()[1:]] == [["trip-7", "good"]]
    assert cli("tag", "user*").out == "There are no tags.\n"
    found = cli("branch", "trip-*", "--json").json
    assert (found["agent"], [one["agent"] for one in found["branches"]]) == (None, ["trip-7", "trip-7"])
    assert "2 agents not shown" in cli("branch", "-n", "1").out


def test_options_that_do_not_fit_are_refused(cli):
    for words in [
        ("branch", "trip-7", "--at", "asked"),
        ("tag", "trip-7", "--delete"),
        ("tag", "trip-7", "good", "--delete", "--at", "asked"),
        ("rollback", "trip-7"),
        ("undo", "trip-7@good"),
    ]:
        assert cli(*words).code == 2, words


def test_rollback_in_a_dry_run_changes_nothing(cli, labels):
    before = labels()
    shown = cli("rollback", "trip-7", "--to", "asked", "--dry-run")
    assert shown.code == 0
    assert "2 checkpoints will be left behind, not deleted:" in shown.out
    assert "- state.budget: 900" in shown.out
    assert "+ state.budget: 1200" in shown.out
    assert shown.out.endswith("Dry run: nothing was changed.\n")
    assert labels() == before
    data = cli("rollback", "trip-7", "--to", "asked", "--dry-run", "--json").json
    assert (data["done"], data["target"]["label"]) == (False, "asked")
    assert [entry["label"] for entry in data["abandons"]] == ["cheaper", "answered"]


def test_rollback_moves_back_and_says_the_way_forward(cli, labels):
    done = cli("rollback", "trip-7", "--to", "asked", "--yes")
    assert done.code == 0
    assert labels() == ["asked"]
    forward = done.out.splitlines()[-1].rpartition("id:")[2]
    assert cli("rollback", "trip-7", "--to", f"id:{forward}", "--yes", "--json").json["done"] is True
    assert labels() == ["cheaper", "answered", "asked"]


def test_rollback_of_another_branch(cli, labels):
    done = cli("rollback", "trip-7@try-b", "--to", "~1", "--yes")
    assert "holdfast rollback trip-7@try-b --to id:" in done.out.splitlines()[-1]
    assert labels("trip-7@try-b") == ["asked"]
    assert labels()[0] == "cheaper"


def test_rollback_says_first_what_is_not_there(program):
    for words in [("trip-7", "--to", "nope"), ("nobody", "--to", "asked")]:
        ended = program("rollback", *words)
        assert "confirmed" not in ended.err
        assert "nope" in ended.err or "nobody" in ended.err


def test_rollback_without_anybody_to_ask_needs_yes(program, labels):
    before = labels()
    for words in [("--json",), ()]:
        ended = program("rollback", "trip-7", "--to", "asked", *words, input="y\n")
        assert (ended.code, "asked" in ended.out) == (9, True)
        assert "--yes" in ended.err
    assert labels() == before


@pytest.mark.parametrize(("typed", "left"), [("y\n", 1), ("YES\n", 1), ("n\n", 3), ("\n", 3), ("\x04", 3)])
def test_rollback_asks_on_a_terminal(terminal, labels, typed, left):
    ended = terminal("rollback", "trip-7", "--to", "asked", typed=typed)
    assert ended.code == (9 if left == 3 else 0)
    assert "Roll back? [y/N]" in ended.out
    assert ("Nothing was changed." in ended.out) == (left == 3)
    assert len(labels()) == left


def test_undo_and_redo_append(cli, labels):
    undone = cli("undo", "trip-7")
    assert undone.out.startswith("Undone: ")
    assert "  + state.budget: 1200" in undone.out
    assert len(labels()) == 4
    assert cli("undo", "trip-7", "--json").json["target"]["label"] == "answered"
    assert cli("undo", "trip-7", "--redo", "--json").json["target"]["label"] == "answered"
    again = cli("undo", "trip-7", "--redo")
    assert again.out.startswith("Done again: ")
    assert len(labels()) == 7
    assert cli("diff", "trip-7@#3", "trip-7", "--exit-code").code == 0
    ended = cli("undo", "trip-7", "--redo")
    assert (ended.code, ended.out) == (2, "")


def test_undo_with_nothing_left(cli):
    assert cli("undo", "user@example.com").code == 0
    assert cli("undo", "user@example.com").code == 2
    assert cli("undo", "tenant:42/a#b").code == 2


def test_while_somebody_writes_the_agent_only_its_history_cannot_be_moved(cli, writer):
    for words in [("undo", "trip-7"), ("undo", "trip-7", "--redo"), ("rollback", "trip-7", "--to", "asked", "--yes")]:
        ended = cli(*words)
        assert (ended.code, ended.out) == (3, ""), words
        assert str(writer.pid) in ended.err
        assert "--wait" in ended.err
    for words in [
        ("log", "trip-7"),
        ("show", "trip-7"),
        ("rollback", "trip-7", "--to", "asked", "--dry-run"),
        ("verify",),
    ]:
        assert cli(*words).code == 0, words
    assert cli("tag", "trip-7", "now").code == 0
    assert cli("branch", "trip-7", "aside").code == 0
    assert cli("undo", "trip-7@aside").code == 0


def test_wait_waits_for_the_writer(program, writer):
    begun = time.monotonic()
    assert program("undo", "trip-7", "--wait", "0.5").code == 3
    assert time.monotonic() - begun >= 0.5
    writer.kill()
    assert program("undo", "trip-7", "--wait", "180").code == 0
