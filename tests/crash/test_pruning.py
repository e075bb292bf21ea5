"""Dumps have a budget: the oldest of what happens most often goes first, and what a history needs stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import holdfast
from holdfast.agent import crashes
from holdfast.crash import agents, folder
from tests.crash.processes import SOURCE, python


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
        assert agents.needed_dumps(tmp_path / "store") == {"tagged.hfdump", "rehydrated.hfdump"}
    assert agents.needed_dumps(tmp_path / "store") == {"tagged.hfdump", "rehydrated.hfdump"}
    assert agents.needed_dumps(tmp_path / "nowhere") is None


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


def command(place, *words):
    known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    given = {**known, "PYTHONPATH": str(SOURCE)}
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
