"""A program that is killed while it rolls back. The outside is a file: one line for everything that was done to it."""

from __future__ import annotations

import sys
from pathlib import Path

import holdfast
from tests.run import dying
from tests.run.dying import point

THINGS = ("flight", "hotel", "car")
outside = Path()


def tell(*words):
    point()
    with outside.open("a") as file:
        file.write(" ".join(words) + "\n")
    point()


def cancel(effect):
    tell("cancel", effect.args["what"], holdfast.effect().key)


@holdfast.tool(name="undoing.book", compensate=cancel)
def book(what):
    tell("book", what, holdfast.effect().key)
    return what


@holdfast.durable
def pack(agent, what):
    book(what)
    return what


@holdfast.durable
def travel(agent):
    agent.checkpoint("start")
    for what in THINGS:
        agent.state[what] = book(what)
        agent.checkpoint(what)
    helper = agent.spawn(pack, "helper", "bags")
    return helper.join()


if __name__ == "__main__":
    outside = Path(sys.argv[2])
    dying.watch()
    agent = holdfast.open(sys.argv[1]).agent("trip-7")
    dying.fatal = int(sys.argv[3])
    agent.rollback("start")
