"""The time, for everything here that waits.

Owns the two clocks: the date, which means something to another process but may be set, and one that counts evenly.
What always holds: an agent that has a ``clock`` of its own is timed by that one alone.
"""

from __future__ import annotations

import sys
import time
from typing import Any


class Clock:
    """The time. ``elapsed_s`` counts evenly, whatever happens to the date, also while the machine is asleep."""

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def elapsed_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        await sys.modules["asyncio"].sleep(seconds)


CLOCK = Clock()


def clock_of(agent: Any) -> Clock:
    """The agent's clock."""
    clock: Clock = getattr(agent, "clock", CLOCK)
    return clock
