"""A program that is probed: it calls what it is told to, and says what came of it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time

import holdfast
from holdfast.crash import hooks


class Order:
    __slots__ = ("total",)

    def __init__(self, total):
        self.total = total

    @property
    def danger(self):
        raise SystemExit("a property was asked")

    def __eq__(self, other):
        raise SystemExit("it was compared")

    __hash__ = None


def _made(factor):
    def pay(amount, *, order=None, secret_key="hidden"):
        return amount * factor

    return pay


pay = _made(3)


@holdfast.tool(effect="read", name="probed.look")
def look(amount):
    return amount


class Shop:
    def total(self):
        return 1


class Bazaar(Shop):
    def total(self, more=1):
        return super().total() + more


async def later(amount):
    await asyncio.sleep(0)
    return amount


def pieces(amount):
    yield amount
    return (yield amount + 1)


CODE = pay.__code__


def untouched():
    tools = getattr(sys, "monitoring", None)
    return pay.__code__ is CODE and (tools is None or all(tools.get_tool(number) is None for number in range(6)))


def _hurry():
    """Somebody who probes waits for up to a second. Tests do not."""
    while True:
        hooks._active.watch.soon()
        time.sleep(0.05)


def main(place, dumps):
    holdfast.crash.install(to=dumps)
    threading.Thread(target=_hurry, daemon=True).start()
    store = holdfast.open(place)
    agent = store.agent("trip-7", when=None)
    agent.state["budget"] = 1
    agent.checkpoint("start")
    acts = {
        "pay": lambda amount: [pay(one, order=Order(one)) for one in range(amount)][-1],
        "look": look,
        "total": lambda more: Bazaar().total(more),
        "later": lambda amount: asyncio.run(later(amount)),
        "pieces": lambda amount: list(pieces(amount)),
        "spend": lambda amount: agent.state.update(budget=amount),
        "step": lambda _: agent.step() and agent.head.trigger,
        "heads": lambda _: [one.trigger for one in agent.log()],
        "untouched": lambda _: untouched(),
    }
    with agent:
        print("ready", flush=True)
        for line in sys.stdin:
            name, amount = json.loads(line)
            print(json.dumps(acts[name](amount)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
