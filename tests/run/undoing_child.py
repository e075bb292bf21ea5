"""A program that is killed while it rolls back. The outside is a file: one line for everything that was done to it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import holdfast
from holdfast.store.database import Database

THINGS = ("flight", "hotel", "car")
outside = Path()
left = itertools.count(1)
fatal = 0


def point():
    """A moment at which the process may die."""
    if fatal and next(left) == fatal:
        os.kill(os.getpid(), signal.SIGKILL)


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


def watch():
    """Let the process die at any change of the store, before and after it."""
    for name in ("change", "hand", "directly"):
        setattr(Database, name, watched(getattr(Database, name)))


def watched(call):
    def around(self, *args, **options):
        point()
        found = call(self, *args, **options)
        point()
        return found

    return around


if __name__ == "__main__":
    outside = Path(sys.argv[2])
    watch()
    agent = holdfast.open(sys.argv[1]).agent("trip-7")
    fatal = int(sys.argv[3])
    agent.rollback("start")
