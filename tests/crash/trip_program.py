"""A program that fails with threads, tasks, a chain and a group; what debugger and editor are shown in tests.

It is copied to a folder that is removed after the dump was taken: nothing of it is there when the dump is opened.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import ormsgpack
import zstandard

from holdfast.crash import Limits, add_part, capture, dumpfile, inside, kinds, open_dump

REGISTERS = {"rip": 0x7F00DEADBEEF, "rsp": 0x7FFFFFFF0010, "rax": 0, "eflags": 0x246}


@dataclass
class Offer:
    city: str
    price: float
    tags: list = field(default_factory=list)


class Desk:
    def __init__(self, offers):
        self.offers = offers
        self.by_city = {offer.city: offer for offer in offers}
        self.me = self
        self.tail = deque([1, 2, 3])

    def cheapest(self, city, *, below):
        try:
            return self.by_city[city + "!"]
        except KeyError as error:
            error.add_note(f"asked for {city!r}")
            raise LookupError(f"no offer in {city} below {below}") from error


async def wait_for_price(city, gate):
    await gate.wait()
    return city


async def plan(desk, to):
    gate = asyncio.Event()
    tasks = [asyncio.create_task(wait_for_price(city, gate), name=f"price-{city}") for city in ("Rome", "Oslo")]
    await asyncio.sleep(0)
    messages = [{"role": "user", "content": "a \x1b[31mred\x1b[0m trip\n" + "x" * 300}, {"role": "assistant", 7: None}]
    numbers = list(range(5_000))
    try:
        desk.cheapest("Lisbon", below=100.0)
    except LookupError as error:
        group = ExceptionGroup("planning failed", [error, TimeoutError("hotel")])
        group.add_note("after 2 tries")
        try:
            raise group from None
        except ExceptionGroup as caught:
            capture("planning failed", error=caught, to=to, limits=Limits(deadline_s=600, part_s=300))
    for task in tasks:
        task.cancel()
    return messages, numbers


def worker(name, stop):
    stop.wait(180)
    return name


def recurse(n, then):
    return then() if n == 0 else recurse(n - 1, then)


def main(to):
    inside.keep_logs()
    logging.getLogger("trip").warning("starting for %s", "Lisbon")
    stop = threading.Event()
    for number in range(2):
        threading.Thread(target=worker, args=(f"w{number}", stop), name=f"worker-{number}", daemon=True).start()
    while len(stop._cond._waiters) < 2:  # both stand where the dump will show them
        time.sleep(0.001)
    desk = Desk([Offer("Lisbon", 120.5, ["sea"]), Offer("Rome", 80.0), Offer("Oslo", 300.0)])
    add_part(kinds.AGENT, "trip-7", lambda: {"agent": "trip-7", "checkpoint": "a1b2c3"})
    frames = [{"function": "eval_frame", "file": "ceval.c", "line": 10, "address": 0x55AA}, "main+0x1f"]
    native = {"threads": [{"native_id": 4711, "name": "MainThread", "registers": REGISTERS, "frames": frames}]}
    add_part(kinds.NATIVE, "stacks", lambda: native)
    recurse(8, lambda: asyncio.run(plan(desk, to)))
    stop.set()


def failed(folder: Path) -> Path:
    """Run this program in a folder of its own, remove it, and give the dump that is left.

    It knows the folder of its dumps as ``dumps``, however long the whole path is: long values are shown in another way.
    """
    place = folder / "program"
    place.mkdir()
    shutil.copy(__file__, place / "trip.py")
    subprocess.run([sys.executable, "-P", place / "trip.py", "dumps"], cwd=folder, check=True, timeout=180)
    shutil.rmtree(place)
    (path,) = (folder / "dumps").iterdir()
    return path


# What crafted files are made of: their sums fit, their content is anything.
_ANYTHING = [None, True, -1, 2**63, 1.5, float("nan"), "x\x1b]0;t\x07", b"x", [], {}, [[]], {"first": "x"}, [1], [-1],
             [1, "a"], [9, 9], "a" * 300, 10**9]  # fmt: skip


def chunks_of(path: Path) -> list[tuple[str, object]]:
    with open_dump(path) as dump:
        return [(chunk.kind, dump._reader.payload(chunk)) for chunk in dump._reader.chunks]


def spoiled(honest: list[tuple[str, object]], chooser: random.Random, share: float = 0.04) -> bytes:
    """The bytes of a file like an honest one, with parts of its content replaced, cut or left out."""

    def spoil(value):
        if chooser.random() < share:
            return chooser.choice(_ANYTHING)
        if isinstance(value, list):
            return [spoil(item) for item in value[:60]][: chooser.choice([None, None, None, None, 3])]
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items() if chooser.random() > share / 2}
        return value

    return sealed((kind, spoil(payload)) for kind, payload in honest)


def sealed(chunks) -> bytes:
    """A file of these chunks, with right sums."""
    data = dumpfile.MAGIC
    compress = zstandard.ZstdCompressor().compress
    for number, (kind, payload) in enumerate(chunks):
        packed = ormsgpack.packb(payload)
        body = compress(packed)
        fields = (dumpfile.MARK, kind.encode(), number, 1, 0, len(body), len(packed), dumpfile._sum(body), b"")
        front = dumpfile.HEADER.pack(*fields)[: dumpfile.HEADER.size - 16]
        data += front + dumpfile._sum(front) + body
    return data


if __name__ == "__main__":
    main(sys.argv[1])
