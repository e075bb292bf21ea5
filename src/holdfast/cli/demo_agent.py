"""The program that ``holdfast demo`` starts, kills and starts again: a small agent that plans a trip.

It uses only the public API, as any agent would. What it reports goes to stdout as one JSON object per line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import holdfast
from holdfast import Agent

NAME = "trip-7"
_HARD_S = 60.0
# What a model and its tools would come up with: label, who speaks, what is said, the money left.
STEPS = (
    ("asked", "user", "Four days in Lisbon in May, please. I have 1,200 euros.", 1200),
    ("flights found", "assistant", "Three flights. The 8:10 costs 240.", 1200),
    ("flight chosen", "user", "The 8:10 is good.", 960),
    ("hotels found", "assistant", "A quiet one by the river, 360 for four nights.", 960),
    ("hotel chosen", "user", "The quiet one!", 600),
    ("dinner planned", "assistant", "A table at a fado house on Friday, 80.", 520),
    ("upgraded", "assistant", "I moved you to the palace suite. You deserve it!", -1480),
)


def work(agent: Agent, think: Callable[[str], None]) -> None:
    messages = agent.state.setdefault("messages", [])
    for label, role, content, money in STEPS[len(messages) :]:  # go on here
        agent.state["now"] = f"working on: {label}"
        think(label)  # here a model or a tool would run
        messages.append({"role": role, "content": content})
        agent.state["money"] = money
        saved = agent.checkpoint(label)  # on disk when this returns
        tell(saved=label, depth=saved.depth, digest=saved.digest)


def tell(**report: Any) -> None:
    print(json.dumps(report), flush=True)


def main(store_path: str, think_s: str, hard: str = "") -> None:
    """Work with pauses of ``think_s``; the step called ``hard`` takes so long that nobody sees its end."""

    def think(label: str) -> None:
        tell(working=label)
        time.sleep(_HARD_S if label == hard else float(think_s))

    with holdfast.open(store_path) as store, store.agent(NAME) as agent:
        head = agent.head
        tell(
            opened=agent.name,
            depth=head.depth if head else 0,
            digest=agent.digest,
            now=agent.state.get("now", "just born"),
            messages=len(agent.state.get("messages", ())),
        )
        work(agent, think)


if __name__ == "__main__":
    main(*sys.argv[1:])
