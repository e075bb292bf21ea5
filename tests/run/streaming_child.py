"""A program whose stream gives some items and then hangs, until it is killed; the second time it gets to its end."""

from __future__ import annotations

import sys
import time

import holdfast


@holdfast.tool(name="streaming.words", effect="read", stream=True)
def words():
    before = holdfast.effect().partial
    for number in range(3):
        yield [number, len(before)]
    if not before:
        time.sleep(180)
    yield "end"


@holdfast.durable(name="streaming-work")
def work(agent):
    return list(words())


if __name__ == "__main__":
    with holdfast.open(sys.argv[1]) as store:
        store.agent("trip").run(work.options(id="one"))
