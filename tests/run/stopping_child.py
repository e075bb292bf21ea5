"""A program that works until somebody in another process cancels it, or kills it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import holdfast


@holdfast.tool(name="stopping.look", effect="read")
def look(turn):
    return turn


@holdfast.tool(name="stopping.note")
def note(what):
    with Path(sys.argv[2]).open("a") as file:
        file.write(f"{what}\n")


@holdfast.durable(name="stopping-work")
def work(agent):
    note("began")
    print("began", flush=True)
    until = time.monotonic() + 180
    try:
        while time.monotonic() < until:
            look(0)
    finally:
        note("cleaned up")


if __name__ == "__main__":
    with holdfast.open(sys.argv[1]) as store:
        try:
            store.agent("trip").run(work.options(id="one"))
        except holdfast.Cancelled as error:
            print(error, flush=True)
