"""The demo does what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import re

import pytest

import holdfast
from tests.conftest import SOAK


@pytest.fixture
def room(tmp_path):
    """Where the demo may put its temporary directory."""
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def test_the_demo_kills_and_comes_back_in_a_pipe_and_its_store_can_be_kept(program, room, tmp_path, cli):
    kept = tmp_path / "kept"
    ended = program("demo", "--keep", str(kept), env={"TMPDIR": str(room)})
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    assert max(len(line.replace(str(kept), "kept").replace(str(room), "tmp")) for line in ended.out.splitlines()) <= 120
    killed, booking = re.findall(r"kill -9 (\d+)", ended.out)
    assert f"started as process {killed}" in ended.out
    assert f"the agent: process {booking}, asks" in ended.out
    before, after = re.findall(r"(?:before the kill|after it) +([0-9a-f]{48})…", ended.out)
    assert before == after
    for said in (
        "$ holdfast log trip-7",
        "$ holdfast diff 'trip-7@dinner planned' trip-7",
        "+ state.money: -1480",
        "$ holdfast bisect trip-7 --when 'money < 0'",
        "#7 upgraded",
        "$ holdfast blame trip-7 money",
        "#7 upgraded: state.money",
        "$ holdfast rollback trip-7 --to 'dinner planned' --yes",
        "(by-train) asked for trains",
        "[abandoned]",
        "the airline has made booking 1 on TP539; its answer is on the way",
        "in doubt  write  book(flight='TP539')",
        "The airline has booking 1 on TP539: booked once",
        "~ app.py: changed",
        "app.py says hello again",
        "Everything is as it was written.",
        "What next",
    ):
        assert said in ended.out, said
    assert not list(room.iterdir())
    for process in re.findall(r"process (\d+)", ended.out):
        assert not alive(int(process))
    with holdfast.open(kept, readonly=True) as store:
        agent = store.agent("trip-7")
        assert agent.state["money"] == 520
        assert [c.label for c in agent.abandoned()] == ["upgraded"]
        assert store.agent("trip-8").state["booking"] == {"number": 1, "flight": "TP539"}
    assert cli("log", "trip-7@by-train", "--json", store=kept).json["checkpoints"][0]["label"] == "asked for trains"
    again = program("demo", "--keep", str(kept))
    assert again.code == 2
    assert "exists already" in again.err


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="the same demo again, and colours are tested elsewhere; make soak runs it")
def test_the_demo_in_a_terminal_has_colour(terminal, room):
    ended = terminal("demo", raw=True, env={"TMPDIR": str(room)})
    assert ended.code == 0, ended.out
    assert "\x1b[1;36m" in ended.out
    assert "The same, bit for bit." in ended.out
    assert "booked once" in ended.out
    assert not list(room.iterdir())


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
