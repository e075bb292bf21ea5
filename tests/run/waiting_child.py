"""A program that is killed while it takes signals."""

from __future__ import annotations

import itertools
import os
import signal
import sys

import holdfast
from holdfast.store.database import Database

left = itertools.count(1)
fatal = 0


def point():
    """A moment at which the process may die."""
    if fatal and next(left) == fatal:
        os.kill(os.getpid(), signal.SIGKILL)


@holdfast.tool(name="waiting.note", effect="idempotent")
def note(value):
    point()
    return value


@holdfast.durable(name="waiting-work")
def work(agent):
    got = [note(agent.wait_for("go"))]
    agent.state["got"] = list(got)
    agent.checkpoint("first")
    got.append(note(agent.wait_for("go")))
    return [*got, list(got)]


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
    watch()
    with holdfast.open(sys.argv[1]) as store:
        agent = store.agent("trip")
        fatal = int(sys.argv[2])
        agent.resume(agent.runs()[0].id)
        fatal = 0
