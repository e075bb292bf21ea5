"""One measured thread, in a process of its own: a job comes as JSON on the command line, figures go out as JSON.

Owns the graphs and the clocks. *chat* is one ``invoke`` per message, each turn a message of 100 words and an answer of
700. *stream* is one run of many steps: a reply of 0.7 KB and a tool result of 4 KB in turns. *threads* is many short
runs of the same, each a thread of its own. What always holds: what the saver gives back in the end is compared with
what was said; every commit of every saver is flushed.
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import _messages_delta_reducer, add_messages
from material import sentence

QUESTION_WORDS, ANSWER_WORDS = 100, 700
REPLY_BYTES, RESULT_BYTES = 700, 4_000
SNAPSHOT_FREQUENCY = 50
# Repeated, and the least is taken: they measure the processor.
REPEATS = 5
THREADS = 20
FULL = 2
CONFIG: Any = {"configurable": {"thread_id": "thread"}}


class Messages(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class DeltaMessages(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer, snapshot_frequency=SNAPSHOT_FREQUENCY)]


def words(rng: random.Random, number: int) -> str:
    said: list[str] = []
    while len(said) < number:
        said += sentence(rng).split()
    return " ".join(said[:number])


@contextmanager
def opened(saver: str, place: Path) -> Iterator[Any]:
    """Each as its documentation shows, and then made to flush every commit if its own default would not."""
    if saver == "none":
        yield None
    elif saver == "sqlite":
        with SqliteSaver.from_conn_string(str(place / "saver.db")) as sqlite:
            sqlite.setup()
            if sqlite.conn.execute("PRAGMA synchronous").fetchone()[0] < FULL:
                sqlite.conn.execute("PRAGMA synchronous=FULL")
            yield sqlite
    else:
        from holdfast.contrib.langgraph import HoldfastSaver

        with HoldfastSaver(place / "store") as ours:
            yield ours


def bytes_on_disk(saver: str, place: Path) -> int:
    """After the saver was closed and its write-ahead log was folded into what it belongs to."""
    if saver == "sqlite":
        with sqlite3.connect(place / "saver.db") as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def chat(saver: Any, turns: int, rng: random.Random) -> dict[str, Any]:
    """One invoke per message. Without a saver, the program passes the state by hand."""
    said = [(words(rng, QUESTION_WORDS), words(rng, ANSWER_WORDS)) for _ in range(turns)]

    def model(state: Messages) -> Any:
        turn = len(state["messages"]) // 2
        return {"messages": [AIMessage(said[turn][1], id=f"answer-{turn}")]}

    builder: Any = StateGraph(Messages).add_node("model", model).add_edge(START, "model")
    graph = builder.compile(checkpointer=saver)
    durable = {} if saver is None else {"durability": "sync"}
    walls, cpus, state = [], [], {"messages": []}
    for turn, (question, _) in enumerate(said):
        asked = [HumanMessage(question, id=f"question-{turn}")]
        given = {"messages": [*state["messages"], *asked] if saver is None else asked}
        wall, cpu = perf_counter(), process_time()
        state = graph.invoke(given, CONFIG, **durable)
        walls.append(perf_counter() - wall)
        cpus.append(process_time() - cpu)
    found = state["messages"] if saver is None else graph.get_state(CONFIG).values["messages"]
    if [message.content for message in found] != [text for pair in said for text in pair]:
        raise ValueError("what was read is not what was said")
    tenth = max(turns // 10, 1)
    return {
        "turn_us": 1e6 * sum(walls) / turns,
        "turn_cpu_us": 1e6 * sum(cpus) / turns,
        "last_us": 1e6 * sum(walls[-tenth:]) / tenth,
        "last_cpu_us": 1e6 * sum(cpus[-tenth:]) / tenth,
        "text_bytes": sum(len(text) for pair in said for text in pair),
        "over": _over(walls),
        **(_parts(saver, rng) if saver is not None else {}),
    }


def _over(walls: list[float]) -> list[list[float]]:
    """Some lengths, and how long a turn takes there."""
    step = max(len(walls) // 10, 1)
    return [[at + step, 1e6 * sum(walls[at : at + step]) / step] for at in range(0, len(walls) - step + 1, step)]


def _parts(saver: Any, rng: random.Random) -> dict[str, float]:
    """Processor time for each message of: reading the thread, the first put after that, and the put after that one."""
    least = {"read": float("inf"), "first": float("inf"), "second": float("inf")}
    count = 1
    for _ in range(REPEATS):
        cpu = process_time()
        found = saver.get_tuple(CONFIG)
        least["read"] = min(least["read"], process_time() - cpu)
        held, count = found.checkpoint, len(found.checkpoint["channel_values"]["messages"])
        at = found.config
        for name in ("first", "second"):
            version = saver.get_next_version(held["channel_versions"]["messages"], None)
            more = AIMessage(words(rng, ANSWER_WORDS), id=str(uuid6()))
            held = {
                **held,
                "id": str(uuid6(clock_seq=-2)),
                "channel_versions": {**held["channel_versions"], "messages": version},
                "channel_values": {
                    **held["channel_values"], "messages": [*held["channel_values"]["messages"], more],
                },
            }  # fmt: skip
            cpu = process_time()
            at = saver.put(at, held, {"source": "loop", "step": 0, "parents": {}}, {"messages": version})
            least[name] = min(least[name], process_time() - cpu)
    return {f"{name}_us_per_message": 1e6 * value / count for name, value in least.items()}


def threads(saver: Any, steps: int, rng: random.Random) -> dict[str, Any]:
    """Short threads, one after another. The first one pays for imports and for files that are made, and is left out."""
    found = [stream(saver, steps, rng, thread=f"thread-{number}") for number in range(THREADS + 1)][1:]
    return {what: sum(one[what] * one["steps"] for one in found) / THREADS for what in ("step_us", "step_cpu_us")}


def stream(
    saver: Any, steps: int, rng: random.Random, *, delta: bool = False, durability: str = "sync", thread: str = "thread"
) -> dict[str, Any]:
    """One run of many steps: a model and its tools, in turns."""
    texts = [" ".join(sentence(rng) for _ in range(60)) for _ in range(steps + 2)]

    def model(state: Any) -> Any:
        at = len(state["messages"])
        calls = [{"name": "search", "args": {"query": f"part {at}"}, "id": f"call-{at}"}] if at < steps else []
        return {"messages": [AIMessage(texts[at - 1][:REPLY_BYTES], id=f"reply-{at}", tool_calls=calls)]}

    def tools(state: Any) -> Any:
        at = len(state["messages"])
        return {"messages": [ToolMessage(texts[at - 1][:RESULT_BYTES], id=f"r-{at}", tool_call_id=f"call-{at - 1}")]}

    builder: Any = StateGraph(DeltaMessages if delta else Messages).add_node("model", model).add_node("tools", tools)
    builder.add_edge(START, "model").add_edge("tools", "model")
    builder.add_conditional_edges("model", lambda s: "tools" if s["messages"][-1].tool_calls else END, ["tools", END])
    graph = builder.compile(checkpointer=saver)
    durable = {} if saver is None else {"durability": durability}
    config: Any = {"configurable": {"thread_id": thread}}
    wall, cpu = perf_counter(), process_time()
    taken = 0
    asked = {"messages": [HumanMessage("Find it.", id="question")]}
    for _ in graph.stream(asked, {**config, "recursion_limit": 2 * steps + 10}, stream_mode="updates", **durable):
        taken += 1
    wall, cpu = perf_counter() - wall, process_time() - cpu
    if saver is not None and len(graph.get_state(config).values["messages"]) != taken + 1:
        raise ValueError("the thread does not have what was said")
    return {"step_us": 1e6 * wall / taken, "step_cpu_us": 1e6 * cpu / taken, "steps": taken}


def main() -> None:
    job = json.loads(sys.argv[1])
    place, rng = Path(job["place"]), random.Random(job["seed"])
    with opened(job["saver"], place) as saver:
        if job["workload"] == "chat":
            figures = chat(saver, job["size"], rng)
        elif job["workload"] == "threads":
            figures = threads(saver, job["size"], rng)
        else:
            figures = stream(saver, job["size"], rng, delta=job["delta"], durability=job["durability"])
    if job["saver"] != "none":
        figures["bytes"] = bytes_on_disk(job["saver"], place)
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main()
