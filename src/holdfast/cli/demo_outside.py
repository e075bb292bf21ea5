"""The act of ``holdfast demo`` with an outside world: killed in the middle of booking a flight, and not booked twice.

Everything is real: the airline is a web server with a database of its own, the agent a process that gets SIGKILL while
it waits for the airline's answer.
"""

from __future__ import annotations

import inspect
import json
import signal
import tempfile
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from rich.text import Text

import holdfast
from holdfast.cli import demo_airline, demo_booking
from holdfast.cli.demo_stage import PATIENCE_S, Stage
from holdfast.errors import StoreFailed

# The airline books at once and answers after this long: time to be killed in.
_ANSWER_S = 60.0  # nobody sees its end: the agent is killed before, however busy the machine is
_LOOK_S = 0.05


def book_once(stage: Stage) -> None:
    """Play the act."""
    stage.title("6. Killed in the middle of booking a flight")
    stage.code(f"{_source(demo_booking.find)}\n\n{_source(demo_booking.book)}")
    stage.pause(1.2)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as scratch:
        database = str(Path(scratch) / "airline.db")
        with stage.process(demo_airline, database, str(_ANSWER_S)) as (airline, said):
            port = int(next(said, 0))
            if not port:
                raise StoreFailed("the demo's airline did not open", hint=stage.complaint)
            stage.say(f"the airline: process {airline.pid}, with a database of its own")
            _booking(stage, port)
            _again(stage, port)


def _booking(stage: Stage, port: int) -> None:
    with stage.process(demo_booking, str(stage.place), AIRLINE_PORT=str(port)) as (process, _):
        stage.say(f"the agent: process {process.pid}, asks for a seat on {demo_booking.FLIGHT}")
        end = time.monotonic() + PATIENCE_S
        while not _bookings(port):
            if process.poll() is not None or time.monotonic() > end:
                raise StoreFailed("the demo's agent did not book", hint=stage.complaint)
            time.sleep(_LOOK_S)
        stage.say(f"the airline has made {_told(_bookings(port))}; its answer is on the way")
        process.send_signal(signal.SIGKILL)
        if process.wait(PATIENCE_S) != -signal.SIGKILL:
            raise StoreFailed("the demo's agent had its answer before it could be killed")
    stage.killed(process.pid, "the agent will never get that answer.")
    stage.pause(0.8)
    stage.command("effects", demo_booking.NAME)
    stage.pause(1.4)


def _again(stage: Stage, port: int) -> None:
    with stage.process(demo_booking, str(stage.place), AIRLINE_PORT=str(port)) as (process, reports):
        stage.say(f"started again as process {process.pid}: it asks the airline before it books")
        result: dict[str, Any] = next(reports, {})
        code = process.wait(PATIENCE_S)
    if code != 0:
        raise StoreFailed(f"the demo's agent ended with {code}", hint=stage.complaint)
    stage.command("runs")
    booked = _bookings(port)
    if len(booked) != 1 or booked[0]["number"] != result.get("result"):
        raise holdfast.Damaged("the flight was not booked once", hint="This must not happen: please report it.")
    stage.out.say(
        Text(f"  The airline has {_told(booked)}: ", style="bold green"), "booked once, and the agent knows its number."
    )
    stage.pause(1.4)


def _bookings(port: int) -> list[dict[str, Any]]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as airline:
        airline.request("GET", "/bookings")
        found: list[dict[str, Any]] = json.load(airline.getresponse())
        return found


def _told(bookings: list[dict[str, Any]]) -> str:
    return ", ".join(f"booking {booking['number']} on {booking['flight']}" for booking in bookings)


def _source(function: Any) -> str:
    return inspect.getsource(function).rstrip() + "\n"
