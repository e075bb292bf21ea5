"""What policies add to an agent whose tools take 50 ms: none, every step, the same in the background, and the default.

The same work is done with each policy, in turns, in one process and one store; a ratio compares a round with the round
without a policy beside it, so that what else the machine does counts for both. In a plain loop and in a durable
function. `benchmarks/when.py --overhead`.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import holdfast
from holdfast import When

TOOL_S = 0.05
STEPS = 20
POLICIES: dict[str, When | None] = {
    "none": None,
    "every step": When(every_steps=1),
    "background": When(every_steps=1, background=True),
    "default": When(adaptive=True),
}
LIMITS = {"every step": 0.02, "background": 0.02, "default": 0.01}
"""What each may add."""
MESSAGE = {"role": "assistant", "content": "x" * 1_000}


@holdfast.tool(name="overhead.search", effect="read")
def search(number: int) -> dict[str, str]:
    time.sleep(TOOL_S)
    return {**MESSAGE, "number": str(number)}


def work(agent: holdfast.Agent) -> None:
    messages = agent.state["messages"]
    for number in range(STEPS):
        messages.append(search(number))
        agent.step()


@holdfast.durable
def travel(agent: holdfast.Agent) -> None:
    work(agent)


def loop(agent: holdfast.Agent) -> None:
    with agent:
        work(agent)
        if agent.when is None:
            agent.checkpoint()


def once(store: holdfast.Store, how: str, policy: str) -> float:
    """Seconds of one round."""
    agent = store.agent(f"{how}-{policy}".replace(" ", "-"), when=POLICIES[policy])
    agent.state.setdefault("messages", [])
    agent.checkpoint()
    began = time.perf_counter()
    if how == "loop":
        loop(agent)
    else:
        agent.run(travel)
    took = time.perf_counter() - began
    if agent.dirty:
        agent.checkpoint()
    return took


def floor_s(folder: Path) -> float:
    """What no store can be faster than: 4 KB appended and flushed, after a tool."""
    took = []
    with (folder / "floor").open("ab", buffering=0) as file:
        for _ in range(2 * STEPS):
            time.sleep(TOOL_S)
            began = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return median(took)


def measure(folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with holdfast.open(folder / "store") as store:
        for how in ("loop", "run"):
            took: dict[str, list[float]] = {policy: [] for policy in POLICIES}
            for number in range(rounds + 1):
                order = list(POLICIES)
                order = order[number % len(order) :] + order[: number % len(order)]
                for policy in order:
                    seconds = once(store, how, policy)
                    if number:  # the first warms up
                        took[policy].append(seconds)
            for policy, limit in LIMITS.items():
                ratios = [a / b - 1 for a, b in zip(took[policy], took["none"], strict=True)]
                costs = store.costs(f"{how}-{policy}".replace(" ", "-"))
                found[f"{how}, {policy}"] = {
                    "added": median(ratios),
                    "limit": limit,
                    "checkpoints": costs.checkpoints,
                    "stall_p50_s": costs.stall.p50_s if costs.stall is not None else None,
                    "none_s": median(took["none"]),
                }
    return found


def main(rounds: int, place: Path) -> int:
    """Print what was measured; 1 when a limit is missed."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        floor = floor_s(Path(folder))
        found = measure(Path(folder), rounds)
    print(f"a bare flush of 4 KB  {floor / TOOL_S:+7.2%}")
    for name, one in found.items():
        kept = "" if one["added"] <= one["limit"] else "  MISSED"
        stall = f"{one['stall_p50_s'] * 1e3:.2f} ms" if one["stall_p50_s"] is not None else "-"
        print(f"{name:18} {one['added']:+7.2%} of the run time (at most {one['limit']:.0%}); stall {stall}{kept}")
    return int(any(one["added"] > one["limit"] for one in found.values()))
