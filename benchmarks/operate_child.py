"""What the benchmark of operating runs in processes of its own: many runs begun, recovered, or handed over.

Usage: operate_child.py JOB, a JSON object; prints one JSON object. The runs are the same for everybody: ``steps`` steps
one after another, each returning a text of ``bytes`` bytes, and each durable before the next one begins.

    begin       begin ``count`` runs, say so when each of them is inside its step ``at``, and wait to be killed
    recover     find and finish them; the clock starts after the imports, before the store is opened
    serve       execute what is handed over, until killed
    submit      hand ``count`` runs over to whoever serves, one at a time; seconds from the call to the function
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LAZY = ("holdfast.run.store", "holdfast.run.worker", "holdfast.run.handover", "holdfast.run.children")
LOOK_S = 0.01
WAIT_S = 300
Job = dict[str, Any]
Figures = dict[str, Any]


class Work:
    """What the runs do, and what is seen of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.inside = threading.Semaphore(0)  # runs that are inside the step that they will be killed in
        self.returned = threading.Semaphore(0)
        self.made: list[int] = []  # steps that were really executed: appending takes no lock

    def step(self, run: int, number: int) -> str:
        if self.job["do"] == "begin" and number == self.job["at"]:
            self.inside.release()
            threading.Event().wait()
        self.made.append(number)
        return random.Random(run * 1_000 + number).randbytes(self.job["bytes"] // 2).hex()

    def run(self, step: Callable[[int, int], str], run: int) -> list[int]:
        """The durable function: what it returns says that it had every step's own result."""
        sizes = [hash_of(step(run, number)) for number in range(self.job["steps"])]
        self.returned.release()
        return sizes

    def expected(self, run: int) -> list[int]:
        texts = (random.Random(run * 1_000 + number).randbytes(self.job["bytes"] // 2).hex() for number in self.numbers)
        return [hash_of(text) for text in texts]

    @property
    def numbers(self) -> range:
        return range(self.job["steps"])

    def check(self, results: Iterable[tuple[int, list[int]]]) -> None:
        found = dict(results)
        if len(found) != self.job["count"]:
            raise ValueError(f"{len(found)} of {self.job['count']} runs have finished")
        wrong = [run for run, result in found.items() if list(result) != self.expected(run)]
        if wrong:
            raise ValueError(f"runs {wrong[:5]} have other results")


def hash_of(text: str) -> int:
    return sum(map(ord, text)) * len(text)


class Holdfast:
    def __init__(self, job: Job, work: Work) -> None:
        import holdfast

        for name in LAZY:  # DBOS has imported everything by now
            importlib.import_module(name)
        self.path, self.work = Path(job["folder"]) / "store", work
        self.open = holdfast.open
        probe = (lambda _effect: holdfast.Absent()) if job["kind"] == "write" else None

        @holdfast.tool(name="step", effect=job["kind"], probe=probe)
        def step(run: int, number: int) -> str:
            return work.step(run, number)

        @holdfast.durable(name="work")
        def run(agent: holdfast.Agent, run: int) -> list[int]:  # noqa: ARG001 - as all have it
            return work.run(step, run)

        @holdfast.durable(name="now")
        def now(agent: holdfast.Agent) -> int:  # noqa: ARG001 - as all have it
            return time.monotonic_ns()

        self.run, self.now = run, now

    def begin(self, count: int) -> None:
        store = self.open(self.path)
        for number in range(count):
            agent = store.agent(f"agent-{number}")
            threading.Thread(target=agent.run, args=(self.run.options(id="one"), number), daemon=True).start()
            self.work.inside.acquire()

    def recover(self, count: int) -> Callable[[], None]:  # noqa: ARG002 - the worker finds out how many
        store = self.open(self.path)
        store.worker(concurrency=self.work.job["concurrency"]).run(drain=True)

        def check() -> None:
            runs = [one for one in store.runs() if one.status == "finished"]
            self.work.check((int(one.agent.partition("-")[2]), one.result) for one in runs)

        return check

    def serve(self) -> None:
        store = self.open(self.path)
        say_ready()
        store.worker().run()

    def submit(self, count: int, pause: Callable[[], None]) -> list[float]:
        taken = []
        with self.open(self.path) as store:
            for _ in range(count):
                pause()
                began = time.monotonic_ns()
                submitted = store.submit(self.now)
                taken.append((submitted.result(WAIT_S) - began) / 1e9)
        return taken


class Dbos:
    def __init__(self, job: Job, work: Work) -> None:
        import dbos

        self.dbos, self.work = dbos, work
        self.path = Path(job["folder"]) / "dbos.sqlite"
        if job["rival"] == "dbos WAL" and not self.path.exists():
            with contextlib.closing(sqlite3.connect(self.path)) as made:
                made.execute("PRAGMA journal_mode=WAL")

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def launch(self) -> None:
        DBOS, work = self.dbos.DBOS, self.work  # noqa: N806 - as everybody writes it
        DBOS(config={"name": "bench", "system_database_url": self.url, "log_level": "ERROR"})

        @DBOS.step(name="step")
        def step(run: int, number: int) -> str:
            return work.step(run, number)

        @DBOS.workflow(name="work")
        def run(run: int) -> list[int]:
            return work.run(step, run)

        @DBOS.workflow(name="now")
        def now() -> int:
            return time.monotonic_ns()

        self.run, self.now = run, now
        DBOS.launch()

    def begin(self, count: int) -> None:
        self.launch()
        for number in range(count):
            with self.dbos.SetWorkflowID(f"run-{number}"):
                self.dbos.DBOS.start_workflow(self.run, number)
            self.work.inside.acquire()

    def recover(self, count: int) -> Callable[[], None]:
        """Its own recovery finds them as it is launched. It has ended when the database says so of every run."""
        self.launch()
        for _ in range(count):
            if not self.work.returned.acquire(timeout=WAIT_S):
                raise TimeoutError(f"{len(self.work.made)} steps were made")
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as read:
            while read.execute("SELECT count(*) FROM workflow_status WHERE status = 'SUCCESS'").fetchone()[0] < count:
                time.sleep(LOOK_S)

        def check() -> None:
            get = self.dbos.DBOS.retrieve_workflow
            self.work.check((number, get(f"run-{number}").get_result()) for number in range(count))

        return check

    def serve(self) -> None:
        self.launch()
        self.dbos.DBOS.register_queue("queue")
        say_ready()
        threading.Event().wait()

    def submit(self, count: int, pause: Callable[[], None]) -> list[float]:
        taken = []
        client = self.dbos.DBOSClient(system_database_url=self.url)
        for _ in range(count):
            pause()
            began = time.monotonic_ns()
            handle = client.enqueue({"queue_name": "queue", "workflow_name": "now"})
            taken.append((handle.get_result() - began) / 1e9)
        return taken


RIVALS: dict[str, type[Holdfast | Dbos]] = {"holdfast": Holdfast, "dbos": Dbos, "dbos WAL": Dbos}


def say_ready() -> None:
    os.write(1, b"ready\n")


def main() -> None:
    job = json.loads(sys.argv[1])
    logging.disable(logging.CRITICAL)
    work = Work(job)
    rival = RIVALS[job["rival"]](job, work)
    answer: Figures = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if job["do"] == "begin":
            rival.begin(job["count"])
            say_ready()
            threading.Event().wait()
        elif job["do"] == "recover":
            began, worked = time.perf_counter(), time.process_time()
            check = rival.recover(job["count"])
            answer = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - worked}
            answer["made"] = len(work.made)
            check()
        elif job["do"] == "serve":
            rival.serve()
        else:
            apart = random.Random(job["count"])
            answer["start_s"] = rival.submit(job["count"], lambda: time.sleep(apart.uniform(0, job["apart_s"])))
    # DBOS keeps threads of its own that would end a second or so later; the figures are complete.
    os.write(1, json.dumps(answer).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
