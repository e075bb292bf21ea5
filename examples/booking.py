"""An agent that books a flight. Kill it while it waits for the airline, then start it again: one seat is booked.

$ python examples/airline.py          # in another terminal
$ python examples/booking.py          # kill it within ten seconds, and start it again
$ holdfast effects trip-8
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

from airline import PORT

import holdfast


def ask(method: str, path: str, data: dict[str, Any] | None = None) -> Any:
    """Talk to the airline."""
    port = int(os.environ.get("AIRLINE_PORT", PORT))
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as airline:
        airline.request(method, path, json.dumps(data))
        return json.load(airline.getresponse())


def find(effect: holdfast.Effect) -> holdfast.Found | holdfast.Absent:
    """Did the airline get it? Holdfast asks this before it would book again."""
    booked = ask("GET", f"/bookings?key={effect.key}")
    return holdfast.Found(booked[0]) if booked else holdfast.Absent()


@holdfast.tool(probe=find)
def book(flight: str) -> Any:
    return ask("POST", "/bookings", {"flight": flight, "key": holdfast.effect().key})


@holdfast.durable
def travel(agent: holdfast.Agent, flight: str) -> int:
    agent.state["plan"] = f"fly with {flight}"
    agent.checkpoint("planned")
    booked = book(flight)  # kill it in here
    agent.state["booking"] = booked
    return int(booked["number"])


if __name__ == "__main__":
    with holdfast.open() as store:
        print(store.agent("trip-8").run(travel, "TP539"), flush=True)
