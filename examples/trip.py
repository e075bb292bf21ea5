"""An agent that plans a trip and saves after every step. Kill it whenever you like, then start it again.

$ python examples/trip.py
$ holdfast log trip-7
"""

from __future__ import annotations

import os
import time

import holdfast

# What a model and its tools would come up with: label, who speaks, what is said, the money that is left.
STEPS = (
    ("asked", "user", "Four days in Lisbon in May, please. I have 1,200 euros.", 1200),
    ("flights found", "assistant", "Three flights. The 8:10 costs 240.", 1200),
    ("flight chosen", "user", "The 8:10 is good.", 960),
    ("hotels found", "assistant", "A quiet one by the river, 360 for four nights.", 960),
    ("hotel chosen", "user", "The quiet one!", 600),
    ("dinner planned", "assistant", "A table at a fado house on Friday, 80.", 520),
    ("upgraded", "assistant", "I moved you to the palace suite. You deserve it!", -1480),
)


def work(agent: holdfast.Agent) -> None:
    messages = agent.state.setdefault("messages", [])
    for label, role, content, money in STEPS[len(messages) :]:  # resume here
        agent.state["now"] = f"working on: {label}"
        think(label)  # here a model or a tool would run
        messages.append({"role": role, "content": content})
        agent.state["money"] = money
        saved = agent.checkpoint(label)  # on disk when this returns
        print(f"saved #{saved.depth} {label:<16} state {saved.digest}", flush=True)


def think(label: str) -> None:
    """Take a while. The demo names the step during which it kills this program: that one takes long enough."""
    print(f"working on: {label}", flush=True)
    time.sleep(60.0 if label == os.environ.get("SLOW_STEP") else 0.3)


if __name__ == "__main__":
    with holdfast.open() as store, store.agent("trip-7") as agent:
        print(f"finds {len(agent.state.get('messages', ()))} messages, state {agent.digest}", flush=True)
        work(agent)
