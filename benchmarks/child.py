"""What the benchmark runs in processes of its own: cold loads, and one of many writers. Prints one JSON object.

Usage: child.py VERB FOLDER [ARGUMENT...]. The clock starts after the imports, since each rival's import is not the
subject here, and stops when every field of every message has been seen.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any


def read_all(messages: Any) -> int:
    """Look at every field, so that nothing stays unread behind a lazy container."""
    seen = 0
    for message in messages:
        for value in message.values():
            seen += value is not None
    return seen


def load_holdfast(folder: Path) -> dict[str, int]:
    from holdfast import open as open_store

    began = perf_counter_ns()
    store = open_store(folder / "store")
    agent = store.agent("bench")
    opened = perf_counter_ns()
    messages = agent.state["messages"]
    loaded = perf_counter_ns()
    seen = read_all(messages)
    ended = perf_counter_ns()
    return {
        "total": ended - began,
        "open": opened - began,
        "load": loaded - opened,
        "read": ended - loaded,
        "seen": seen,
    }


def load_msgpack(folder: Path) -> dict[str, int]:
    import msgspec

    data = (folder / "state.msgpack").read_bytes()
    began = perf_counter_ns()
    state = msgspec.msgpack.decode(data)
    decoded = perf_counter_ns()
    seen = read_all(state["messages"])
    ended = perf_counter_ns()
    return {"total": decoded - began, "read": ended - decoded, "seen": seen}


def load_pickle(folder: Path) -> dict[str, int]:
    began = perf_counter_ns()
    with (folder / "state.pickle").open("rb") as file:
        state = pickle.load(file)
    seen = read_all(state["messages"])
    return {"total": perf_counter_ns() - began, "seen": seen}


def load_langgraph(folder: Path) -> dict[str, int]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    began = perf_counter_ns()
    with SqliteSaver.from_conn_string(str(folder / "saver.db")) as saver:
        found = saver.get_tuple({"configurable": {"thread_id": "bench", "checkpoint_ns": ""}})
        if found is None:
            raise LookupError(folder)
        seen = read_all(found.checkpoint["channel_values"]["messages"])
        return {"total": perf_counter_ns() - began, "seen": seen}


def write_holdfast(folder: Path, number: str, count: str, seed: str) -> dict[str, Any]:
    """One of many processes that write into one store, each its own agent."""
    from material import realistic

    import holdfast

    source = realistic(random.Random(f"{seed}/{number}"))
    messages = [next(source) for _ in range(int(count))]
    store = holdfast.open(folder / "store", create=False)
    agent = store.agent(f"writer-{number}")
    held = agent.state.setdefault("messages", [])
    wait_for_start()
    waits, errors = [], []
    for message in messages:
        began = perf_counter_ns()
        try:
            held.append(message)
            agent.checkpoint()
        except holdfast.HoldfastError as error:
            errors.append(repr(error))
        waits.append(perf_counter_ns() - began)
    digest = agent.digest
    store.close()
    return {"waits": waits, "errors": errors, "digest": digest}


def write_threads(folder: Path, threads: str, durability: str, seconds: str) -> dict[str, Any]:
    """Many threads of one process, an agent each."""
    from batched import of_holdfast

    with contextlib.redirect_stderr(io.StringIO()):
        return of_holdfast(folder, int(threads), float(seconds), durability)


def write_rows(folder: Path, number: str, count: str, seed: str) -> dict[str, Any]:
    """The same with one SQLite database and its own way of waiting (Python's default of 5 s)."""
    import sqlite3

    import msgspec
    from material import realistic
    from rivals import connect_rows

    source = realistic(random.Random(f"{seed}/{number}"))
    bodies = [msgspec.msgpack.encode(next(source)) for _ in range(int(count))]
    connection = connect_rows(folder / "rows.db")
    wait_for_start()
    waits, errors = [], []
    for body in bodies:
        began = perf_counter_ns()
        try:
            connection.execute("INSERT INTO item (body) VALUES (?)", (body,))
            connection.commit()
        except sqlite3.Error as error:
            connection.rollback()
            errors.append(repr(error))
        waits.append(perf_counter_ns() - began)
    connection.close()
    return {"waits": waits, "errors": errors}


def wait_for_start() -> None:
    """Say that all is prepared, then wait for the word, so that all writers begin together."""
    # Many writers share the processor in the ordinary way, whatever the benchmark itself runs under.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    sys.__stdout__.write("ready\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
    sys.stdin.readline()


VERBS = {
    "load-holdfast": load_holdfast,
    "load-msgpack": load_msgpack,
    "load-pickle": load_pickle,
    "load-langgraph": load_langgraph,
    "write-holdfast": write_holdfast,
    "write-rows": write_rows,
    "write-threads": write_threads,
}

if __name__ == "__main__":
    verb, place, *rest = sys.argv[1:]
    with contextlib.redirect_stdout(io.StringIO()):
        answer = VERBS[verb](Path(place), *rest)
    json.dump(answer, sys.stdout)
