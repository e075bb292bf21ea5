"""A program that is killed while it takes signals."""

from __future__ import annotations

import sys

import holdfast
from tests.run import dying
from tests.run.dying import point


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


if __name__ == "__main__":
    dying.watch()
    with holdfast.open(sys.argv[1]) as store:
        agent = store.agent("trip")
        dying.fatal = int(sys.argv[2])
        agent.resume(agent.runs()[0].id)
        dying.fatal = 0
