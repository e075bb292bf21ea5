"""A worker that stops itself between an intent and its call, the worst moment: ``python -m tests.run.leased URL``."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time

import holdfast
from holdfast.run import calls
from tests.run import working


def _pay(what: str) -> str:
    now_s = time.monotonic()
    working.write(holdfast.effect().key, what, now_s, now_s)
    return what


pay = holdfast.tool(name="leased.pay", probe=working.find, timeout_s=0.3)(_pay)
untimed = holdfast.tool(name="leased.untimed", probe=working.find)(_pay)


@holdfast.tool(name="leased.slowly", probe=working.find, timeout_s=1.0)
def slowly(what: str) -> str:
    """Longer than this it may not take, whoever stops it meanwhile."""
    time.sleep(random.uniform(0, 0.1))
    _pay(what)
    time.sleep(random.uniform(0, 0.05))
    return what


@holdfast.durable(name="leased.twice")
def twice(agent: holdfast.Agent, what: str) -> list[str]:
    first = slowly(f"{what}-a")
    agent.state["paid"] = first
    agent.checkpoint("half")
    agent.sleep(0.01)
    return [first, slowly(f"{what}-b")]


@holdfast.durable(name="leased.parent")
def parent(agent: holdfast.Agent, what: str) -> list[str]:
    children = [agent.spawn(child, part, f"{what}-{part}") for part in "ab"]
    return [one.join() for one in children]


@holdfast.durable(name="leased.child")
def child(agent: holdfast.Agent, what: str) -> str:
    return slowly(what)


@holdfast.durable(name="leased.job")
def job(agent: holdfast.Agent, what: str, *, timed: bool = True) -> str:
    return pay(what) if timed else untimed(what)


@holdfast.durable(name="leased.stubborn")
def stubborn(agent: holdfast.Agent, what: str) -> str:
    """Whatever is raised, it tries once more: as people write it."""
    for _ in range(3):
        try:
            return pay(what)
        except Exception:
            time.sleep(0.05)
    return "given up"


def stop_after_intents() -> None:
    intend = calls.Live._intend

    def stopping(self, kind=""):
        yield from intend(self, kind)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread does not get one step further

    calls.Live._intend = stopping


if __name__ == "__main__":
    stop_after_intents()
    with holdfast.open(sys.argv[1]) as store:
        store.worker(tell=lambda one: print(one.became, flush=True)).run(drain=True)
