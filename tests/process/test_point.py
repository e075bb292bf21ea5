"""Fork points: the program's memory goes back, and whoever looks from outside sees one program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import holdfast
from tests.lives import ROOT

BASE = [sys.executable, "-m", "tests.process.fork_programs"]


def run(*words, code=0, environment=None):
    """The lines that a program says, whoever of its processes says them.

    A Python of its own: with other versions, little else is installed than what is tested.
    """
    made = subprocess.run(
        [*BASE, *map(str, words)],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=180, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert made.returncode == code, made.stderr
    return made.stdout.splitlines()


def living(group):
    """The processes of a session."""
    found = []
    for one in Path("/proc").iterdir():
        try:
            parts = (one / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if one.name.isdigit() and int(parts[3]) == group and parts[0] != "Z":
            found.append(int(one.name))
    return found


@contextmanager
def signalled():
    """A program that has gone back once and waits for signals. Nothing of it is left when a test fails."""
    process = subprocess.Popen(
        [*BASE, "signalled"], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            for one in living(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


def test_what_files_held_back_is_written_once(tmp_path):
    run("held_back", tmp_path)
    assert (tmp_path / "text").read_text() == "pay 100\ndone\n"
    assert (tmp_path / "raw").read_bytes() == b"pay 100\n"


def test_memory_is_as_it_was_and_the_value_comes_along():
    *said, last = run("back", 3, code=7)
    assert [json.loads(line) for line in said] == [
        [0, False, None, ["before"]],
        *([n, True, {"tried": n - 1, "pair": [1, 2]}, ["before"]] for n in (1, 2, 3)),
    ]
    assert last.startswith("pid ")


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 0), ("exit", 3)])
def test_leaving_the_block_keeps_the_process_and_ends_the_one_that_waits(how, code):
    said = run("leave", how, code=code)
    assert said[-1] == "True False"
    assert (said[0] == "raised") is (how == "raise")


@pytest.mark.parametrize("place", ["store_path", "postgres_url"])
def test_handles_go_on_in_the_process_that_takes_over_and_inside_only_reads_are_done(request, monkeypatch, place):
    if place == "postgres_url":
        pytest.importorskip("psycopg")
        monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # nobody pulls the plug here
    place = request.getfixturevalue(place)
    said = run("stored", place)
    assert said == ["acted", json.dumps([[3, 3], ["after", "before"], True]), "True True"]
    with holdfast.open(place) as store:
        agent = store.agent("a")
        assert [one.label for one in agent.log()] == ["last", "after", "before"]
        assert [effect.tool for effect in agent.effects()] == ["act"], "what was read inside is not recorded"
        assert store.verify().ok


def test_points_stand_inside_each_other():
    (said,) = run("nested")
    order = json.loads(said)
    assert order[:2] == ["outer 2", "inner 2"]
    assert order[-1][:2] == ["outer 1", "inner 2"]


@pytest.mark.parametrize("how", ["exit", "rollback"])
def test_a_process_that_is_forked_inside_the_block_cannot_take_the_point_away(how):
    assert run("forked_inside", how) == ["5", "5", "by the program"]


def test_reasons_for_refusing_are_named():
    said = run("refused")
    assert said[0] == said[-1] == "made"
    assert "somebody's" in said[1]
    assert "child processes" in said[2]
    assert said[3] == "an event loop is running"
    assert said[4] == "too many fork points"


def test_nothing_lasting_is_done_inside(store_path):
    assert run("lasting", store_path) == ["True ['a', 'b'] ['kept']", "True True"]


def test_leaving_keeps_all_locks_and_going_back_those_of_flock(tmp_path):
    assert run("locked", tmp_path) == ["left ['lockf', 'flock']", "back ['flock']", "taken ['lockf', 'flock']"]


def test_where_memory_is_short_nothing_is_forked_and_a_checkpoint_is_made_the_ordinary_way(store_path):
    much, little, saved, inside, made = run("short", store_path)
    assert much == "memory is short: 99 MiB are free, and the process has 400 MiB"
    assert little == "memory is short: 10 MiB are free, and the process has 1 MiB"
    assert saved == "False whole"
    assert inside == "this is a durable run, whose calls have recorded positions"
    assert made == "made"


@pytest.mark.parametrize("final", [signal.SIGTERM, signal.SIGKILL])
def test_the_original_stands_in_passes_signals_on_and_ends_as_the_other_does(final):
    with signalled() as process:
        _, first, now = process.stdout.readline().split()
        assert int(first) == process.pid != int(now)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2):
            process.send_signal(number)
            assert process.stdout.readline() == f"got {number.name}\n"
        os.kill(process.pid if final == signal.SIGTERM else int(now), final)
        assert process.wait(timeout=60) == -final
        until = time.monotonic() + 30
        while living(process.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert not living(process.pid), "nothing waits any more"


def test_nothing_waits_when_the_program_is_killed():
    with signalled() as process:
        process.stdout.readline()
        assert len(living(process.pid)) == 3, "who stands in, the program, and the point"
        process.kill()
        process.wait(timeout=60)
        until = time.monotonic() + 30
        while living(process.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert not living(process.pid)


def test_files_that_are_read_stand_where_they_stood_and_random_numbers_are_the_same_if_asked_for(tmp_path):
    said = run("around", tmp_path)
    assert said[:3] == ["True line 1", "False", "['line 0 0', 'line 0 1', '']"]
