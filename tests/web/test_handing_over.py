"""What needs the user's functions: left to a worker by the page, or done by the page that has them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.web import runs
from holdfast.web.health import health
from tests import lives, warm
from tests.conftest import from_outside_nothing
from tests.web.conftest import serving
from tests.web.test_views import act, ask

PROGRAM = """
import pathlib, holdfast

HERE = pathlib.Path(__file__).parent

@holdfast.tool(name="handing.book", compensate=lambda effect: (HERE / "undone").write_text(effect.result))
def book():
    return "seat 4"

@holdfast.durable(name="handing.trip")
def trip(agent):
    booked = book()
    if not (HERE / "mended").exists():
        raise ValueError("not mended")
    agent.wait_for("approved")
    return booked
"""


@pytest.fixture
def failed(tmp_path):
    """A store with a run that failed, and the program that it is of, which is mended now."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    place = tmp_path / "store"
    command = ["run", f"{program}:trip", "--agent", "trip", "--id", "7", "--store", str(place), "--no-dumps"]
    with from_outside_nothing():
        ended = warm.run([sys.executable, "-m", "holdfast", *command], capture_output=True, text=True, check=False)
    assert "not mended" in ended.stderr
    (tmp_path / "mended").touch()
    return place, program


def looked(place):
    return holdfast.open(place, create=False, inert=True)


def status(place):
    with holdfast.open(place, create=False, readonly=True, inert=True) as store:
        return store.runs("trip")[0].status


def test_a_run_is_left_to_a_worker_and_the_page_says_whether_one_is_there(failed):
    place, program = failed
    with looked(place) as store:
        told = ask(runs.run, store, agent="trip", id="7")
        assert (told["run"]["status"], told["left"], told["here"], told["workers"]) == ("failed", False, False, [])
        act(runs.resume, store, agent="trip", run="7")
        told = ask(runs.run, store, agent="trip", id="7")
        assert (told["run"]["status"], told["left"]) == ("interrupted", True)
        said = next(one for one in ask(runs.history, store, agent="trip")["events"] if one["what"] == "resumed")
        assert (said["was"], said["by"]) == ("failed", "ada")
        assert next(one for one in ask(health, store)["facts"] if one["name"] == "Workers")["value"] == "none"
        worker = lives.worker(str(place), str(program), stdout=subprocess.PIPE)
        try:
            while ask(runs.run, store, agent="trip", id="7")["run"]["status"] != "waiting":
                time.sleep(0.02)
            (seen,) = ask(runs.run, store, agent="trip", id="7")["workers"]
            assert (seen["pid"], seen["has_it"]) == (worker.pid, True)
            assert "1 worker" in next(one for one in ask(health, store)["facts"] if one["name"] == "Workers")["value"]
            act(runs.cancel, store, agent="trip", run="7", undo="1")
            while not (program.parent / "undone").exists():
                time.sleep(0.02)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.communicate()
        assert ask(runs.run, store, agent="trip", id="7")["run"]["status"] == "rolled back"
    assert (program.parent / "undone").read_text() == "seat 4"


def test_a_page_that_has_the_program_goes_on_with_a_run_and_undoes_it(failed):
    place, program = failed
    serves = serving(place, "--allow-changes", "--load", str(program))
    with from_outside_nothing(), serves as page, page.browser(headers={"Origin": page.url}) as visitor:
        here = visitor.get("/run/trip?id=7").text
        assert "It goes on in the process of this page" in here
        form = {"agent": "trip", "run": "7", "csrf": re.search(r'name="csrf" value="(\w+)"', here)[1]}
        assert visitor.post("/resume", data=form).status_code == 303
        while status(place) != "waiting":
            time.sleep(0.02)
        assert visitor.post("/cancel", data={**form, "undo": "1"}).status_code == 303
        assert status(place) == "rolled back"
    assert Path(program.parent, "undone").read_text() == "seat 4"


def test_the_command_line_leaves_a_run_to_a_worker_as_the_page_does(failed):
    place, _ = failed
    words = [sys.executable, "-m", "holdfast", "runs", "resume", "trip", "7", "--store", str(place)]
    told = json.loads(warm.run([*words, "--json"], capture_output=True, text=True, check=True).stdout)
    assert (told["run"]["status"], told["workers"]) == ("interrupted", 0)
    assert "No worker has this function" in warm.run(words, capture_output=True, text=True, check=True).stdout
