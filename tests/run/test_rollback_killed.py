"""A process that is killed in the middle of a rollback, at every point: the next one finishes it."""

from __future__ import annotations

import shutil
import signal
import sys

import pytest

import holdfast
from tests import warm
from tests.run import undoing_child as program


def lines(path):
    return [tuple(line.split()) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_rollback_is_finished_by_the_next_process_and_undoes_everything_once(tmp_path):
    ready, outside = tmp_path / "ready", tmp_path / "outside"
    program.outside = outside
    with holdfast.open(ready) as store:
        assert store.agent("trip-7").run(program.travel) == "bags"
    done = lines(outside)
    points = 0
    while True:
        points += 1
        here, there = tmp_path / "store", tmp_path / "world"
        shutil.copytree(ready, here)
        shutil.copy(outside, there)
        ended = warm.run(
            [sys.executable, "-m", "tests.run.undoing_child", str(here), str(there), str(points)],
            check=False,
            capture_output=True,
            timeout=180,
        )
        assert ended.returncode in {0, -signal.SIGKILL}, ended.stderr.decode()
        program.outside = there
        with holdfast.open(here) as store:
            agent = store.agent("trip-7")
            with agent:  # what was begun is finished first
                begun = agent.head.label == "start"
            agent = store.agent("trip-7")
            if not begun:  # it was killed before it had said what it was about to do
                assert agent.head.label != "start"
                assert lines(there) == done
                agent.rollback("start")
            assert agent.state == {}
            assert {run.status for run in store.agent("trip-7/helper").runs()} == {"rolled back"}
            assert store.verify().ok
        undone = [line for line in lines(there) if line[0] == "cancel"]
        # A compensation that was cut off is called again, with the same key: what honours keys sees it once.
        assert len(undone) - len(set(undone)) <= 1
        assert [what for _, what, _ in dict.fromkeys(undone)] == ["bags", "car", "hotel", "flight"]
        shutil.rmtree(here)
        if ended.returncode == 0:
            break
    assert points > 20
