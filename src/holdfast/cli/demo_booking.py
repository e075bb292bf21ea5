"""The second program that ``holdfast demo`` starts, kills and starts again: an agent that books a flight.

It uses only the public API, as any agent would. What it reports goes to stdout as one JSON object per line.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import holdfast
from holdfast import Agent, Effect

NAME = "trip-8"
FLIGHT = "TP539"
_TIMEOUT_S = 30.0


def ask(method: str, path: str, data: dict[str, Any] | None = None) -> Any:
    """Talk to the airline."""
    with closing(HTTPConnection("127.0.0.1", int(os.environ["AIRLINE_PORT"]), timeout=_TIMEOUT_S)) as airline:
        airline.request(method, path, json.dumps(data))
        return json.load(airline.getresponse())


def find(effect: Effect) -> holdfast.Found | holdfast.Absent:
    booked = ask("GET", f"/bookings?key={effect.key}")
    return holdfast.Found(booked[0]) if booked else holdfast.Absent()


@holdfast.tool(probe=find)
def book(flight: str) -> Any:
    return ask("POST", "/bookings", {"flight": flight, "key": holdfast.effect().key})


@holdfast.durable
def travel(agent: Agent, flight: str) -> int:
    agent.state["plan"] = f"fly with {flight}"
    agent.checkpoint("planned")
    booked = book(flight)  # killed in here
    agent.state["booking"] = booked
    return int(booked["number"])


def main(store_path: str) -> None:
    with holdfast.open(store_path) as store:
        agent = store.agent(NAME)
        print(json.dumps({"result": agent.run(travel, FLIGHT)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
