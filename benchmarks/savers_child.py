"""What is measured in processes of its own: one run of a graph, one cold read, one removal of old checkpoints.

Usage: savers_child.py JOB, a JSON object, does one job and prints its answer. savers_child.py --serve reads jobs, a
line each, and does every one in a process forked from itself: it has imported everything and done nothing else, so
that the second or two that the imports take are not paid a thousand times. Clocks start after the imports either way.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import signal
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from savers_graph import WORKLOADS, Workload
from savers_rivals import RIVALS, THREAD, Rival, missing, opened

HISTORY = 50
JOB_LIMIT_S = 900
MADV_POPULATE_WRITE = 23
LATE = 0.1
"""The last part of a run, whose steps show what a step costs at that length."""

Figures = dict[str, Any]
Job = dict[str, Any]
CONFIG: Any = {"configurable": {"thread_id": THREAD}, "recursion_limit": 1_000_000}


def peak_bytes() -> int:
    """Of this process alone. ru_maxrss would also count the process that started it, up to the exec."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def own_pages() -> None:
    """Take a copy of every page that is still shared with the process this one was forked from.

    Otherwise the first write to each would be paid inside the measurement: milliseconds that a process of one's own
    would not spend. Where the kernel is too old for it (before 5.14), they stay in.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        if rights == "rw-p":
            begin, end = (int(number, 16) for number in span.split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_POPULATE_WRITE)


def run(job: Job, rival: Rival, work: Workload) -> Figures:
    """The whole graph. A step is the time from one node's answer in the stream to the next one's.

    In between lie the checkpoint of the first, which durability "sync" waits for, and the work of the next node.
    """
    began_memory = peak_bytes()
    first = work.first
    builder = work.graph(delta=rival.delta)
    waits = {} if rival.saver == "none" else {"durability": job["durability"]}
    with contextlib.ExitStack() as stack:
        saver = stack.enter_context(opened(rival, job["place"], fresh=True))
        graph = builder.compile(checkpointer=saver)
        gc.collect()
        began = perf_counter_ns()
        arrived = [perf_counter_ns() for _ in graph.stream(first, CONFIG, stream_mode="updates", **waits)]
        ended = perf_counter_ns()
        if saver is not None and rival.saver == "memory":
            work.check(graph.get_state(CONFIG).values)
        closing = perf_counter_ns()
    closed = perf_counter_ns()
    steps = [later - earlier for earlier, later in pairwise(arrived)]
    late = sorted(steps[-max(1, int(len(steps) * LATE)) :])
    steps.sort()
    return {
        "steps": len(arrived),
        "total_us": (ended - began) / 1e3,
        "close_us": (closed - closing) / 1e3,
        "mean_us": (ended - began) / 1e3 / len(arrived),
        "p50_us": steps[len(steps) // 2] / 1e3,
        "p99_us": steps[min(len(steps) - 1, len(steps) * 99 // 100)] / 1e3,
        "worst_us": steps[-1] / 1e3,
        "late_us": late[len(late) // 2] / 1e3,
        "peak_bytes": peak_bytes(),
        "peak_before_bytes": began_memory,
    }


def get(job: Job, rival: Rival, work: Workload) -> Figures:
    """From nothing to the whole state in hand, every message looked at."""
    builder = work.graph(delta=rival.delta)
    gc.collect()
    began = perf_counter_ns()
    with opened(rival, job["place"]) as saver:
        constructed = perf_counter_ns()
        graph = builder.compile(checkpointer=saver)
        compiled = perf_counter_ns()
        values = graph.get_state(CONFIG).values
        work.read(values)
        ended = perf_counter_ns()
        work.check(values)
    return {
        "total_us": (ended - began) / 1e3,
        "saver_us": (constructed - began) / 1e3,
        "graph_us": (compiled - constructed) / 1e3,
        "get_us": (ended - compiled) / 1e3,
        "peak_bytes": peak_bytes(),
    }


def history(job: Job, rival: Rival, work: Workload) -> Figures:
    """The newest checkpoints with their whole states, as a tool shows them that lets one go back."""
    builder = work.graph(delta=rival.delta)
    gc.collect()
    began = perf_counter_ns()
    with opened(rival, job["place"]) as saver:
        graph = builder.compile(checkpointer=saver)
        compiled = perf_counter_ns()
        found = []
        for snapshot in graph.get_state_history(CONFIG, limit=HISTORY):
            work.read(snapshot.values)
            found.append(snapshot.values)
        ended = perf_counter_ns()
        if len(found) != HISTORY:
            raise ValueError(f"{len(found)} checkpoints for {HISTORY}")
        for back, values in enumerate(found):
            work.check(values, back)
    return {
        "total_us": (ended - began) / 1e3,
        "list_us": (ended - compiled) / 1e3,
        "peak_bytes": peak_bytes(),
    }


def prune(job: Job, rival: Rival, work: Workload) -> Figures:
    """keep_latest, asked of the saver itself; then whether the newest state is still the same."""
    del work
    answer: Figures = {"can": True, "said": ""}
    with opened(rival, job["place"]) as saver:
        if saver is None:
            raise ValueError(f"{rival.name} keeps nothing")
        began = perf_counter_ns()
        try:
            saver.prune([THREAD], strategy="keep_latest")
        except NotImplementedError as error:
            answer = {"can": False, "said": f"NotImplementedError: {error}".rstrip(": ")}
        answer["prune_us"] = (perf_counter_ns() - began) / 1e3
    return answer


def by_hand(job: Job, rival: Rival, work: Workload) -> Figures:
    """What one would write where prune is missing: delete every row but the newest checkpoint's, then VACUUM."""
    with opened(rival, job["place"]) as saver:
        connection = saver.conn
        (newest,) = connection.execute("SELECT max(checkpoint_id) FROM checkpoints").fetchone()
        began = perf_counter_ns()
        for table in ("checkpoints", "writes"):
            connection.execute(f"DELETE FROM {table} WHERE checkpoint_id <> ?", (newest,))
        connection.commit()
        connection.execute("VACUUM")
        return {"can": True, "said": "", "prune_us": (perf_counter_ns() - began) / 1e3, "turns": work.turns}


def intact(job: Job, rival: Rival, work: Workload) -> Figures:
    """Whether the newest state is what it must be, and how many checkpoints there are."""
    with opened(rival, job["place"]) as saver:
        graph = work.graph(delta=rival.delta).compile(checkpointer=saver)
        checkpoints = sum(1 for _ in saver.list({"configurable": {"thread_id": THREAD}}))
        values = graph.get_state(CONFIG).values
        try:
            work.check(values)
        except ValueError as error:
            return {"intact": False, "said": str(error), "checkpoints": checkpoints}
    return {"intact": True, "said": "", "checkpoints": checkpoints}


VERBS = {"run": run, "get": get, "history": history, "prune": prune, "by_hand": by_hand, "intact": intact}


def perform(job: Job) -> Figures:
    # A new store is announced on stderr, and nothing that a library prints may get into the answer.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        work = WORKLOADS[job["workload"]](Path(job["script"]), job["turns"])
        return VERBS[job["verb"]](job, RIVALS[job["rival"]], work)


def serve() -> None:
    """One job at a time; a job that fails answers with its error, and the next one is not touched by it."""
    missing()  # imports Holdfast, so that children need not
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("importing started a thread, which a forked process would lack")
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _answer(json.loads(line), writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        if not said:
            said = json.dumps({"error": f"the process ended with status {status} and no answer"}).encode()
        sys.stdout.write(said.decode() + "\n")
        sys.stdout.flush()


def _answer(job: Job, writing: int) -> None:
    code = 1
    try:
        signal.alarm(JOB_LIMIT_S)
        own_pages()
        gc.unfreeze()  # the collector goes over what was imported, as in any process
        try:
            answer = perform(job)
        except Exception:  # noqa: BLE001 - whatever happened is the answer
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve()
    else:
        print(json.dumps(perform(json.loads(sys.argv[1]))))
