"""The demo does what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import holdfast
from tests import warm
from tests.conftest import SOAK, from_outside_nothing
from tests.test_import import BARE
from tests.web.conftest import SLOW_S, chromium, serving
from tests.web.test_browser import assert_open_to_all, browser, inside, listening  # noqa: F401 - a fixture
from tests.web.test_views_browser import OF_ONE


@pytest.fixture
def room(tmp_path):
    """Where the demo may put its temporary directory."""
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What `holdfast demo --keep` said, the store that it kept, and where it put its temporary directory."""
    room = tmp_path_factory.mktemp("demo")
    kept = tmp_path_factory.mktemp("kept") / "store"
    words = [sys.executable, "-m", "holdfast", "demo", "--keep", str(kept)]
    with from_outside_nothing():
        env = {**os.environ, "TMPDIR": str(room)}
        ended = warm.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout, kept, room


def test_the_demo_kills_and_comes_back_in_a_pipe_and_its_store_can_be_kept(played, program, cli):
    out, kept, room = played
    assert "\x1b" not in out
    assert max(len(line.replace(str(kept), "kept").replace(str(room), "tmp")) for line in out.splitlines()) <= 120
    killed, booking = re.findall(r"kill -9 (\d+)", out)
    assert f"started as process {killed}" in out
    assert f"the agent: process {booking}, asks" in out
    before, after = re.findall(r"(?:before the kill|after it) +([0-9a-f]{48})…", out)
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
        assert said in out, said
    assert not list(room.iterdir())
    for process in re.findall(r"process (\d+)", out):
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


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_view_of_the_store_that_the_demo_kept_renders_and_shuts_nobody_out(played, browser):  # noqa: F811
    with from_outside_nothing(), serving(played[1]) as page, inside(browser, page) as (_, tab):
        names = [one["name"] for one in tab.request.get(f"{page.url}/api/agents").json()["agents"]]
        assert set(names) >= {"trip-7", "trip-8"}
        questions = ["/why/trip-7?ask=bisect&when=money < 0", "/why/trip-7?ask=blame&path=money"]
        views = [f"/{view}/{name}" for name in names for view in OF_ONE]
        for address in ("/", "/health", "/dumps", *views, *questions):
            with listening(tab):
                assert tab.goto(page.url + address).status == 200
                drawn = "#answer[data-state=done]" if "?ask" in address else "h1"
                tab.wait_for_selector(drawn, timeout=SLOW_S * 1e3)
            assert_open_to_all(tab, address)


def test_without_extras_the_demo_leaves_out_its_files_with_a_sentence(room, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)  # for all of its processes
    env = {**os.environ, "TMPDIR": str(room), "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "holdfast", "demo"]
    ended = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "left out: it needs pathspec, which pip install 'holdfast[workspace]' brings." in ended.stdout
    assert "app.py says hello again" not in ended.stdout
    assert "Everything is as it was written." in ended.stdout
    assert "What next" in ended.stdout


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
