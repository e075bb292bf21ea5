"""What the benchmark of steps runs in processes of its own: one run of a durable function, whole, killed or resumed.

Usage: steps_child.py JOB, a JSON object; prints one JSON object. The function and its steps are the same for everybody:
``count`` steps one after another, each returning a text of ``bytes`` bytes that differs from all others. Clocks start
after the imports. ``kill_at``: the process kills itself as that step begins. ``resume``: the run was begun earlier, and
the times until the function was entered, until its first step that was not recorded, and until its end are taken.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import random
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

LAZY = ("holdfast.run.store", "holdfast.run.children")
INSERT = "INSERT INTO paid (n) VALUES (%(n)s)"
Job = dict[str, Any]
Figures = dict[str, Any]


class Watch:
    """What is seen from inside the function."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.entered = self.live = 0
        self.waits: list[int] = []
        self.made = 0

    def result(self, number: int) -> str:
        """The body of a step that is really executed."""
        if not self.live:
            self.live = perf_counter_ns()
        if number == self.job.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.made += 1
        return random.Random(number).randbytes(self.job["bytes"] // 2).hex()

    def loop(self, step: Callable[[int], str]) -> int:
        """The function itself."""
        self.entered = perf_counter_ns()
        size = 0
        for number in range(self.job["count"]):
            began = perf_counter_ns()
            size += len(step(number))
            self.waits.append(perf_counter_ns() - began)
        return size


def run_holdfast(job: Job, watch: Watch) -> Callable[[], int]:
    import holdfast

    for name in LAZY:  # DBOS has imported everything by now; the parent's clock counts all of it for both
        importlib.import_module(name)

    # The kill comes before the step has done anything, and that is what a probe would find out.
    probe = (lambda _effect: holdfast.Absent()) if job["kind"] == "write" else None

    @holdfast.tool(name="step", effect=job["kind"], probe=probe)
    def step(number: int) -> str:
        if job["kind"] == "transaction":
            holdfast.effect().connection.execute(INSERT, {"n": number})
        return watch.result(number)

    @holdfast.durable(name="work")
    def work(agent: holdfast.Agent, count: int) -> int:  # noqa: ARG001 - the same arguments for everybody
        return watch.loop(step)

    def run() -> int:
        with holdfast.open(job.get("url") or Path(job["folder"]) / "store") as store:
            return store.agent("bench").run(work.options(id="one"), job["count"])

    return run


def run_dbos(job: Job, watch: Watch) -> Callable[[], int]:
    from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource
    from sqlalchemy import text

    path = Path(job["folder"]) / "dbos.sqlite"
    if job["rival"] == "dbos WAL" and not job.get("resume"):
        with contextlib.closing(sqlite3.connect(path)) as made:
            made.execute("PRAGMA journal_mode=WAL")

    def run() -> int:
        url = job.get("url") or f"sqlite:///{path}"
        DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})
        if job["kind"] == "transaction":
            source = SQLAlchemyDatasource.create(url.replace("postgresql:", "postgresql+psycopg:"))
            insert = text(INSERT.replace("%(n)s", ":n"))

            @source.transaction(name="step", isolation_level="READ COMMITTED")
            def step(number: int) -> str:
                source.sql_session().execute(insert, {"n": number})
                return watch.result(number)

        else:

            @DBOS.step(name="step")
            def step(number: int) -> str:
                return watch.result(number)

        @DBOS.workflow(name="work")
        def work(count: int) -> int:  # noqa: ARG001 - as above
            return watch.loop(step)

        DBOS.launch()
        if job.get("resume"):
            handle = DBOS.retrieve_workflow("one")  # its own recovery goes on with it
        else:
            with SetWorkflowID("one"):
                handle = DBOS.start_workflow(work, job["count"])
        return int(handle.get_result())

    return run


def run_jobs(job: Job) -> Figures:
    """``jobs`` calls of one tool each, in a pool of threads as it comes and through ``store.map``; and many at once."""
    from concurrent.futures import ThreadPoolExecutor
    from time import sleep

    import holdfast

    wait_s = [job["wait_s"]]

    @holdfast.tool(name="step", effect=job["kind"])
    def step(number: int) -> int:
        sleep(wait_s[0])
        return number

    @holdfast.durable(name="one")
    def one(number: int) -> int:
        return step(number)

    def timed(function: Callable[[], Any]) -> float:
        began = perf_counter_ns()
        function()
        return (perf_counter_ns() - began) / 1e3

    with holdfast.open(Path(job["folder"]) / "store") as store, ThreadPoolExecutor(job["workers"]) as pool:
        store.map(one, range(job["workers"]), name="warm", workers=job["workers"])
        list(pool.map(step.direct, range(job["workers"])))
        plain = timed(lambda: list(pool.map(step.direct, range(job["jobs"]))))
        mapped = timed(lambda: store.map(one, range(job["jobs"]), name="jobs", workers=job["workers"]))
        wait_s[0] = 0.0
        many = timed(lambda: store.map(one, range(job["count"]), name="many", workers=job["workers"]))
    return {"plain_us": plain, "map_us": mapped, "item_us": many / job["count"]}


RIVALS = {"holdfast": run_holdfast, "dbos": run_dbos, "dbos WAL": run_dbos}


def main() -> None:
    job = json.loads(sys.argv[1])
    logging.disable(logging.CRITICAL)
    if "jobs" in job:
        with contextlib.redirect_stderr(io.StringIO()):
            found = run_jobs(job)
        os.write(1, json.dumps(found).encode())
        os._exit(0)
    watch = Watch(job)
    run = RIVALS[job["rival"]](job, watch)
    gc.collect()
    began = perf_counter_ns()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        size = run()
    ended = perf_counter_ns()
    if size != job["count"] * (job["bytes"] // 2 * 2):
        raise ValueError(f"{size} characters came back")
    answer: Figures = {
        "total_us": (ended - began) / 1e3,
        "enter_us": (watch.entered - began) / 1e3,
        "live_us": ((watch.live or ended) - began) / 1e3,
        "replay_us": ((watch.live or ended) - watch.entered) / 1e3,
        "made": watch.made,
        "waits_us": [wait / 1e3 for wait in watch.waits],
    }
    # DBOS keeps threads of its own that would end a second or so later; the figures are complete.
    os.write(1, json.dumps(answer).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
