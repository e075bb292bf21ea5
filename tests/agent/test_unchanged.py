"""Rollback, undo, redo and diff cost what differs: large values that are the same on both sides are not even read."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast


@pytest.fixture
def path(tmp_path):
    with holdfast.open(tmp_path / "store") as store, store.agent("a") as agent:
        agent.state["array"] = np.arange(500_000)
        agent.state["texts"] = {"long": "x" * 400_000, "n": 0}
        agent.state["n"] = 0
        agent.checkpoint("begun")
        for number in (1, 2):
            agent.state["n"] = agent.state["texts"]["n"] = number  # beside what is large, and in the same section
            agent.checkpoint(f"n{number}")
    (tmp_path / "store" / "packs").rename(tmp_path / "away")  # so that whoever reads a large value fails
    (tmp_path / "store" / "packs").mkdir()
    yield tmp_path / "store"
    (tmp_path / "store" / "packs").rmdir()
    (tmp_path / "away").rename(tmp_path / "store" / "packs")
    with holdfast.open(tmp_path / "store", readonly=True) as store:
        assert store.verify().ok
        state = store.agent("a").state
        assert (state["array"][-1], len(state["texts"]["long"]), state["texts"]["n"]) == (499_999, 400_000, 0)


def test_what_is_large_and_unchanged_is_not_read(path):
    with holdfast.open(path) as store, store.agent("a") as agent:
        assert {tuple(one.path) for one in agent.diff("begun", "n2")} == {("n",), ("texts", "n")}
        agent.undo()
        assert agent.state["n"] == 1
        agent.redo()
        assert agent.state["n"] == 2
        agent.rollback("begun")
        assert agent.state["n"] == 0
        agent.state["n"] = 7
        agent.checkpoint("after")
        with pytest.raises(holdfast.Damaged):
            agent.state["array"]
