"""Dumps have a budget: the oldest of what happens most often goes first, and what a history needs stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import holdfast
from holdfast.agent import crashes
from holdfast.crash import Limits, agents, capture, folder
from tests.crash.processes import SOURCE, python

UNSAFE = {"HOLDFAST_ALLOW_UNSAFE_POSTGRES": "1"}  # the tests' server does not flush


def made(place, *kinds, size=10):
    """Files with the names of dumps, the oldest first."""
    place.mkdir(parents=True, exist_ok=True)
    paths = []
    for hour, kind in enumerate(kinds):
        path = place / f"20260101T{hour:02}0000Z-{hour + 1}-{kind}-00ff.hfdump"
        path.write_bytes(b"x" * size)
        paths.append(path)
    return paths


def test_the_oldest_of_the_most_frequent_goes_first(tmp_path):
    rare, *often = made(tmp_path, "hang", *["uncaught-valueerror"] * 4)
    assert folder.surplus(tmp_path, 5, 1 << 20) == []
    assert folder.surplus(tmp_path, 3, 1 << 20) == often[:2]
    assert folder.surplus(tmp_path, 1, 1 << 20) == [*often[:3], rare]


def test_bytes_count_with_cores_and_what_is_needed_stays(tmp_path):
    first, second, third = made(tmp_path, "killed", "killed", "killed", size=100)
    folder.core_of(second).write_bytes(b"c" * 1000)
    assert folder.surplus(tmp_path, 10, 350) == [first, second]
    assert folder.surplus(tmp_path, 10, 350, {first.name}) == [second]
    assert folder.surplus(tmp_path, 0, 0, {first.name, second.name, third.name}) == []
    folder.remove(second)
    assert sorted(tmp_path.iterdir()) == [first, third]


def test_what_a_tag_a_branch_or_a_run_in_doubt_refers_to_is_needed(tmp_path):
    names = ["plain", "tagged", "rehydrated"]
    with holdfast.open(tmp_path / "store") as store:
        agent = store.agent("trip")
        points = []
        for number in range(3):
            agent.state["n"] = number
            points.append(agent.checkpoint(str(number)))
        agent.tag("good", points[1])
        row = store._agent_row("trip")
        for name, point, what in zip(names, points, ("crash", "crash", "rehydrate"), strict=True):
            body = {"what": what, "dump": f"{name}.hfdump", "branch": "main", "checkpoint": point.id}
            crashes.note(store, row, body)
    paths = [tmp_path / "store" / "dumps" / f"{name}.hfdump" for name in names]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_bytes(b"")
    assert agents.removable(paths[0].parent, [], 0, 0) == [paths[0]]


def test_a_crash_loop_keeps_to_its_budget(tmp_path):
    body = (
        "import holdfast.crash as crash\n"
        "crash.install(to='dumps', sidecar=False, say=False, limits=crash.Limits(kept_dumps=3, deadline_s=600))\n"
        "raise ValueError('again')\n"
    )
    (tmp_path / "program.py").write_text(body)
    left = []
    for _ in range(5):
        assert python(tmp_path / "program.py").returncode == 1
        left.append({path.name for path in (tmp_path / "dumps").glob("*.hfdump")})
    assert [len(names) for names in left] == [1, 2, 3, 3, 3]
    assert left[4] - left[3]  # the newest one stays


def command(place, *words, **environment):
    known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    given = {**known, "PYTHONPATH": str(SOURCE), **environment}
    return subprocess.run(
        [sys.executable, "-m", "holdfast", "dump", *words],
        cwd=place, env=given, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_prune_and_rm_ask_show_and_remove(tmp_path):
    paths = made(tmp_path / "dumps", *["killed"] * 4)
    asked = command(tmp_path, "prune", "--keep", "2")
    assert asked.returncode != 0
    assert "--yes" in asked.stderr
    shown = command(tmp_path, "prune", "--keep", "2", "--dry-run")
    assert shown.stdout.splitlines()[:2] == [path.name for path in paths[:2]]
    assert all(path.exists() for path in paths)
    done = json.loads(command(tmp_path, "prune", "--keep", "2", "--yes", "--json").stdout)
    assert done["dumps"] == [path.name for path in paths[:2]]
    assert command(tmp_path, "rm", paths[2].name, "--yes").returncode == 0
    assert [path.exists() for path in paths] == [False, False, False, True]
    assert command(tmp_path, "rm", "nothing-like-it", "--yes").returncode != 0


def crashed(place, dumps):
    """Two dumps of an agent in that store: the first checkpoint is tagged, the second is not."""
    paths = []
    with holdfast.open(place) as store:
        agent = store.agent("trip")
        for label in ("good", "bad"):
            agent.state["step"] = label
            agent.checkpoint(label)
            paths.append(capture(label, to=dumps, limits=Limits(objects=100, source_bytes=1_000)))
            agents.tell(paths[-1], "ValueError", "no seat", "exception")
        agent.tag("kept", "good")
    return paths


def pruned(place, *words, **environment):
    return command(place, "prune", "--keep", "0", "--yes", "--json", *words, **environment)


@pytest.mark.slow
def test_a_store_on_a_server_is_asked_which_dumps_it_needs(tmp_path, postgres_url, monkeypatch):
    monkeypatch.setenv(*next(iter(UNSAFE.items())))
    needed, other = crashed(postgres_url, tmp_path / "dumps")
    done = pruned(tmp_path, "--store", postgres_url, **UNSAFE)
    assert json.loads(done.stdout)["dumps"] == [other.name], done
    assert needed.exists()
    # The same when the place of the store is known from the environment.
    assert json.loads(pruned(tmp_path, **UNSAFE, HOLDFAST_STORE=postgres_url).stdout)["dumps"] == []


@pytest.mark.slow
def test_dumps_of_a_server_that_nobody_named_stay(tmp_path, postgres_url, monkeypatch):
    monkeypatch.setenv(*next(iter(UNSAFE.items())))
    paths = crashed(postgres_url, tmp_path / "dumps")
    (plain,) = made(tmp_path / "dumps", "hang")
    assert json.loads(pruned(tmp_path).stdout)["dumps"] == [plain.name]
    assert all(path.exists() for path in paths)


def test_nothing_is_pruned_while_the_store_cannot_be_asked(tmp_path):
    paths = made(tmp_path / "dumps", *["killed"] * 3)
    for place in ("postgresql://nobody:swordfish@127.0.0.1:1/none", str(tmp_path / "nowhere")):
        done = pruned(tmp_path, "--store", place, HOLDFAST_DUMPS=str(tmp_path / "dumps"))
        assert done.returncode != 0
        assert "nobody knows which dumps it needs" in done.stderr
        assert "swordfish" not in done.stderr
    assert all(path.exists() for path in paths)


def test_a_folder_for_all_dumps_does_not_hide_what_a_store_needs(tmp_path):
    needed, other = crashed(tmp_path / ".holdfast", tmp_path / "all")
    given = {"HOLDFAST_DUMPS": str(tmp_path / "all")}
    assert json.loads(pruned(tmp_path, **given).stdout)["dumps"] == [other.name]
    # Another store knows nothing of them, and does not decide.
    holdfast.open(tmp_path / "second").close()
    assert json.loads(pruned(tmp_path, "--store", str(tmp_path / "second"), **given).stdout)["dumps"] == []
    assert needed.exists()


def test_what_a_run_that_needs_attention_left_is_never_pruned(tmp_path):
    body = (
        "import holdfast, holdfast.crash as crash, os, sys\n"
        "crash.install('store', sidecar=False, say=False, limits=crash.Limits(kept_dumps=1, deadline_s=600))\n"
        "@holdfast.tool\n"
        "def book(): os._exit(9)\n"
        "def trip(agent): book()\n"
        "with holdfast.open('store') as store, store.agent(sys.argv[1]) as agent:\n"
        "    if sys.argv[1] == 'doubtful': agent.run(trip)\n"
        "    raise ValueError('again')\n"
    )
    (tmp_path / "program.py").write_text(body)
    assert python(tmp_path / "program.py", "doubtful").returncode == 9
    assert "InDoubt" in python(tmp_path / "program.py", "doubtful").stderr
    (first,) = folder.found(tmp_path / "store" / "dumps")
    with holdfast.open(tmp_path / "store", readonly=True) as store:
        assert [run.status for run in store.runs()] == ["needs attention"]
    for _ in range(3):
        python(tmp_path / "program.py", "plain")
    left = folder.found(tmp_path / "store" / "dumps")
    assert first in left
    assert len(left) == 2  # it, and the newest


def test_what_others_left_is_pruned_when_the_program_opens_the_store_that_knows(tmp_path):
    needed, other = crashed(tmp_path / "store", tmp_path / "dumps")
    body = (
        "import os, time, holdfast, holdfast.crash as crash, sys\n"
        "crash.install(to='dumps', sidecar=False, say=False, limits=crash.Limits(kept_dumps=1))\n"
        "assert os.path.exists(sys.argv[1])  # nobody knows yet whether it is needed\n"
        "with holdfast.open('store') as store, store.agent('trip'):\n"
        "    while os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
    )
    (tmp_path / "program.py").write_text(body)
    assert python(tmp_path / "program.py", str(other)).returncode == 0
    assert folder.found(tmp_path / "dumps") == [needed]


@pytest.mark.slow
def test_a_crash_loop_with_a_store_on_a_server_keeps_to_its_budget_and_to_what_is_tagged(tmp_path, postgres_url):
    body = (
        "import holdfast, holdfast.crash as crash, sys\n"
        "limits = crash.Limits(kept_dumps=1, deadline_s=600, part_s=300)\n"
        "crash.install(to='dumps', sidecar=False, say=False, limits=limits)\n"
        f"with holdfast.open({postgres_url!r}) as store, store.agent('trip') as agent:\n"
        "    agent.state['n'] = sys.argv[1]\n"
        "    agent.checkpoint(sys.argv[1])\n"
        "    if sys.argv[1] == '0': agent.tag('kept')\n"
        "    raise ValueError('again')\n"
    )
    (tmp_path / "program.py").write_text(body)
    left = []
    for number in range(4):
        ended = python(tmp_path / "program.py", str(number), **UNSAFE)
        assert "ValueError: again" in ended.stderr, ended
        left.append(folder.found(tmp_path / "dumps"))
    assert [len(paths) for paths in left] == [1, 2, 2, 2]
    assert all(left[0][0] in paths for paths in left)
