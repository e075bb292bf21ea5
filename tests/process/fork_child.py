"""The other processes of this folder's tests. ``python -m tests.process.fork_child FUNCTION ARGUMENTS``."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import holdfast
from holdfast.errors import HoldfastError
from tests import lives

start = partial(lives.start, "tests.process.fork_child")
"""Run one of the functions below in a process of its own."""


def say(*words: object) -> None:
    print(*words, flush=True)


def forked(path: str) -> None:
    """A store is opened, and then a child opens it, too. Each line on the standard input is for one of them."""
    store = holdfast.open(path)
    agent = store.agent("parent")
    agent.state["n"] = 0
    agent.checkpoint("before")
    inner, outer = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(inner[1])  # otherwise it would wait for itself when its parent has gone
        os.close(outer[0])
        own = holdfast.open(path).agent("child")
        say("open", os.getpid())
        while text := os.read(inner[0], 1):
            own.state["n"] = text.decode()
            own.checkpoint("by the child")
            os.write(outer[1], b".")
        os._exit(0)
    os.close(inner[0])
    os.close(outer[1])
    for text in sys.stdin:
        word = text.strip()
        if word == "die":  # as kill -9 would: nothing is closed, and the child lives
            os._exit(0)
        if word == "child":
            os.write(inner[1], b"1")
            os.read(outer[0], 1)
        else:
            agent.state["n"] += 1
            agent.checkpoint(word)
        say("done")


def orphan(path: str) -> None:
    """As above, for a child that outlives its parent: it commits when a file appears, and says so in another."""
    store = holdfast.open(path)
    agent = store.agent("parent")
    agent.state["n"] = 0
    agent.checkpoint("before")
    if os.fork():
        sys.stdin.readline()
        os._exit(0)
    own = holdfast.open(path).agent("child")
    own.state["n"] = 0
    own.checkpoint("first")
    say("open", os.getpid())
    while not Path(path + ".go").exists():
        time.sleep(0.01)
    own.state["n"] = 1
    try:
        said = own.checkpoint("after its parent").id
    except HoldfastError as error:
        said = str(error)
    Path(path + ".half").write_text(said)
    Path(path + ".half").rename(path + ".done")
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
