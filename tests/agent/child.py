"""The other processes of this folder's tests. ``python -m tests.agent.child FUNCTION ARGUMENTS``."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import holdfast
from holdfast.errors import ForkedHandle, HoldfastError
from tests import lives
from tests.agent.histories import few_between_seals
from tests.lives import CHANGES, dies, end, line  # noqa: F401 - the last two for tests that start them

start = partial(lives.start, "tests.agent.child")
"""Run one of the functions below in a process of its own."""


def killed(original: Path, step: int, act: Callable[[Path], object]) -> Iterator[holdfast.Store]:
    """Copies of a store in which something was killed at every so-manieth of its changes; in the last one it ended."""
    for at in count(1, step):
        path = original.with_name(f"killed {at}")
        shutil.copytree(original, path)
        died = dies(lambda path=path: act(path), at, *CHANGES, (os, "rename"), (os, "unlink"))
        with holdfast.open(path) as store:
            store._db.sweep_strays(-1)  # as somebody does after an hour
            yield store
        shutil.rmtree(path)
        if not died:
            return


def say(*words: object) -> None:
    print(*words, flush=True)


def hold(path: str, name: str) -> None:
    """Hold an agent; every line on the standard input is one checkpoint, and the answer what came of it."""
    store = holdfast.open(path)
    agent = store.agent(name)
    agent.state["by"] = [os.getpid()]
    agent.checkpoint("held")
    say("ready")
    for text in sys.stdin:
        try:
            agent.state["by"].append(text.strip())
            say("made", agent.checkpoint(text.strip()).id)
        except HoldfastError as error:
            say(error.kind)


def read(path: str) -> None:
    """Have a store open for reading."""
    with holdfast.open(path, readonly=True):
        say("ready")
        sys.stdin.read()


def retained(path: str, name: str, times: str) -> None:
    """Append while others let go what is old, with a rollback now and then; say whether all is as it was."""
    few_between_seals()
    with holdfast.open(path) as store:
        agent = store.agent(name)
        agent.state["messages"] = []
        agent.checkpoint("first")
        say("ready")
        expected: list[str] = []
        for number in range(int(times)):
            expected.append(f"{number} " * 200)
            agent.state["messages"].append(expected[-1])
            agent.checkpoint(f"m{number}")
            if number % 9 == 5:
                head = agent.head
                agent.state["messages"].append("to be given up")
                agent.checkpoint("astray")
                agent.rollback(head)
                agent.tag(f"t{number}")
        say("as they were" if list(agent.state["messages"]) == expected else "not as they were")


def retain(path: str, last: str) -> None:
    """Let go all but the last few of every agent."""
    with holdfast.open(path) as store:
        say("removed", store.retain(holdfast.Policy(last=int(last))).removed)


def shortened(path: str, name: str) -> None:
    """Forget what has no label with a 0 at its end, and go on: with a tag, a rollback, and something large."""
    with holdfast.open(path) as store, store.agent(name) as agent:
        store.retain(holdfast.Policy(labels=["*0"]))
        agent.state["bulk"] = os.urandom(300_000)
        agent.checkpoint("went on")
        agent.tag("new")
        agent.rollback("~1")
        agent.checkpoint("and back")
    say("done")


def release_after(path: str, name: str, seconds: str) -> None:
    """Hold an agent until told to let go, and then that much longer."""
    store = holdfast.open(path)
    agent = store.agent(name)
    say("ready")
    sys.stdin.readline()
    time.sleep(float(seconds))
    agent.close()
    say("released")
    sys.stdin.readline()


def write(path: str, name: str, times: str) -> None:
    """Append many times; say the ids."""
    store = holdfast.open(path)
    agent = store.agent(name)
    messages = agent.state.setdefault("messages", [])
    say("ready")
    sys.stdin.readline()
    ids = []
    for number in range(int(times)):
        messages.append({"role": "user", "content": f"{name} {number} " * 40})
        ids.append(agent.checkpoint(str(number)).id)
    say(*ids)
    store.close()


def fork(path: str) -> None:
    """A child that inherits handles is refused everywhere; the parent goes on as if nothing had happened."""
    store = holdfast.open(path)
    agent = store.agent("parent")
    agent.state["messages"] = []
    agent.state["bulk"] = os.urandom(3 << 20)  # hashing it must not need threads that a fork leaves behind
    past = agent.checkpoint("before")
    child = os.fork()
    if child == 0:
        os._exit(_forked(path, store, agent, past))
    for number in range(100):
        agent.state["messages"].append(number)
        agent.checkpoint(str(number))
    _, status = os.waitpid(child, 0)
    agent.checkpoint("after")
    say("child", os.waitstatus_to_exitcode(status))
    store.close()


def _forked(path: str, store: holdfast.Store, agent: holdfast.Agent, past: holdfast.Checkpoint) -> int:
    calls = [
        lambda: agent.state["messages"].append(1),
        agent.checkpoint,
        agent.log,
        agent.undo,
        lambda: agent.rollback(past),
        lambda: agent.branch("b"),
        lambda: agent.tag("t"),
        store.agents,
        lambda: store.agent("parent"),
        lambda: store.agent("other"),
        store.verify,
        store.flush,
        lambda: past.state["messages"],
    ]
    for number, call in enumerate(calls, 1):
        try:
            call()
        except ForkedHandle:
            continue
        except BaseException as error:
            print(f"call {number}: {error!r}", file=sys.stderr)
        return number
    agent.close()
    store.close()
    fresh = holdfast.open(path)
    if fresh is store:
        return 101
    try:
        fresh.agent("parent")
        return 102  # the parent has it
    except HoldfastError as error:
        if error.kind != "agent-busy":
            return 103
    own = fresh.agent("child")
    own.state["bulk"] = os.urandom(3 << 20)
    for number in range(100):
        own.state["n"] = number
        own.checkpoint()
    fresh.close()
    return 0


def exit_batched(path: str) -> None:
    """Ends without flush or close."""
    agent = holdfast.open(path, durability="batched").agent("a")
    for number in range(50):
        agent.state["n"] = number
        agent.checkpoint(str(number))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
