"""The other processes of the tests about writers. ``python -m tests.contrib.writer_child FUNCTION ARGUMENTS``."""

from __future__ import annotations

import gc
import os
import sys
import threading
from functools import partial
from typing import Any

from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import ForkedHandle, HoldfastError
from tests import lives, warm
from tests.contrib.graphs import Trail
from tests.contrib.threads import chain, checkpoint, config

start = partial(lives.start, "tests.contrib.writer_child", loaded=warm.LANGGRAPH)
"""Run one of the functions below in a process of its own."""


def say(*words: object) -> None:
    print(*words, flush=True)


def two_steps(saver: Any, name: str, between: Any) -> Any:
    """A graph that does something between two nodes of its own: in the first, which returns only then."""

    def first(state: Trail) -> dict[str, Any]:
        between()
        return {"trail": [f"{name} first"]}

    def second(state: Trail) -> dict[str, Any]:
        return {"trail": [f"{name} second of {len(state['trail'])}"]}

    builder = StateGraph(Trail).add_node(first).add_node(second)
    return builder.add_edge(START, "first").add_edge("first", "second").compile(checkpointer=saver)


def run(path: str, thread: str) -> None:
    """Each line on the standard input is a run that stops in its first node until the next line."""
    saver = HoldfastSaver(path)

    def wait() -> None:
        say("inside")
        sys.stdin.readline()

    graph = two_steps(saver, "child", wait)
    for _ in sys.stdin:
        try:
            graph.invoke({"trail": ["asked by child"]}, {"configurable": {"thread_id": thread}}, durability="sync")
            say("ran")
        except HoldfastError as error:
            say(error.kind)


def put(path: str, thread: str) -> None:
    """Each line on the standard input is one checkpoint after the newest."""
    saver = HoldfastSaver(path)
    for text in sys.stdin:
        newest = saver.get_tuple(config(thread))
        at = newest.config if newest is not None else config(thread)
        try:
            saver.put(at, checkpoint({"by": text.strip()}), {"source": "loop", "step": 0, "parents": {}}, {})
            say("put")
        except HoldfastError as error:
            say(error.kind)


def worker(path: str, wait_s: str) -> None:
    """One of several workers. Each line is a command and a thread; what a run leaves behind is never collected here."""
    gc.disable()
    saver = HoldfastSaver(path, wait_s=float(wait_s))

    def wait() -> None:
        say("inside")
        sys.stdin.readline()

    graphs = {
        "run": two_steps(saver, "child", lambda: None),
        "stay": two_steps(saver, "child", wait),
        "ask": two_steps(saver, "child", lambda: interrupt("may I?")),
    }
    for text in sys.stdin:
        what, thread = text.split()
        try:
            options: Any = {"configurable": {"thread_id": thread}}
            graphs[what].invoke({"trail": ["asked by child"]}, options, durability="sync")
            say("ran")
        except HoldfastError as error:
            say(error.kind)


def stream(path: str, thread: str) -> None:
    """Go round for ever, and say each step when LangGraph does."""
    saver = HoldfastSaver(path)

    def turn(state: Trail) -> dict[str, Any]:
        return {"trail": [f"turn {len(state['trail'])}"]}

    builder = StateGraph(Trail).add_node(turn).add_edge(START, "turn")
    graph = builder.add_conditional_edges("turn", lambda _: "turn", ["turn"]).compile(checkpointer=saver)
    options: Any = {"configurable": {"thread_id": thread}, "recursion_limit": 1_000_000}
    for values in graph.stream({"trail": []}, options, durability="sync", stream_mode="values"):
        say(len(values["trail"]))


def fork(path: str) -> None:
    """A child that inherits a saver is refused everywhere, and the parent goes on as if nothing had happened."""
    saver = HoldfastSaver(path)
    made = chain(saver, "t", 2)
    child = os.fork()
    if child == 0:
        os._exit(_forked(saver, made[-1]))
    _, status = os.waitpid(child, 0)
    chain(saver, "t", 2, start=made[-1])
    say("child", os.waitstatus_to_exitcode(status))
    saver.close()


def _forked(saver: HoldfastSaver, at: Any) -> int:
    def finished(call: Any) -> bool:
        """Whether a call ended with the right error, in time: a lock that another thread held is never freed here."""
        ended = []

        def body() -> None:
            try:
                call()
            except ForkedHandle:
                ended.append(True)
            except BaseException as error:
                print(f"{error!r}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        thread.join(120)
        return bool(ended)

    calls = [
        lambda: saver.get_tuple(config("t")),
        lambda: saver.get_tuple(at),
        lambda: list(saver.list(config("t"))),
        lambda: list(saver.list(None)),
        lambda: saver.put(at, checkpoint(), {"source": "loop", "step": 0, "parents": {}}, {}),
        lambda: saver.put(config("new"), checkpoint(), {"source": "loop", "step": 0, "parents": {}}, {}),
        lambda: saver.put_writes(at, [("c", 1)], "task"),
        lambda: saver.get_delta_channel_history(config=at, channels=["c"]),
        lambda: saver.delete_thread("t"),
        lambda: saver.copy_thread("t", "u"),
        lambda: saver.prune(["t"]),
        lambda: saver.delete_for_runs(["r"]),
    ]
    for number, call in enumerate(calls, 1):
        if not finished(call):
            return number
    return 0


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
