"""``holdfast worker``: resume what was killed, has come due or was submitted, as long as it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from types import FrameType
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.exits import ATTENTION
from holdfast.cli.programs import load
from holdfast.cli.run import foreign_code, watched, working_store
from holdfast.cli.session import Flag, Given, Json, Session, Types
from holdfast.cli.text import clean, count
from holdfast.errors import BadOption
from holdfast.run import Worked, Worker

SCHEMA = "holdfast.worker/1"
DUMP_S = 60.0
"""How long a worker waits for the dump of a process that was executing a run alone: it takes a second or two."""
_STYLES = {"finished": "green", "waiting": "cyan", "failed": "red"}


def worker(
    *programs: str,
    concurrency: Annotated[int, Parameter(metavar="N")] = 16,
    grace: Annotated[float, Parameter(metavar="SECONDS")] = 30.0,
    drain: Flag = False,
    only: Annotated[tuple[str, str, str] | None, Parameter(show=False)] = None,
    no_dumps: Flag = False,
    types: Types = (),
    json: Json = False,
    session: Given,
) -> int:
    """Resume every run that was killed, whose time or signal has come, or that was submitted, until it is stopped.

    Any number of workers may share a store; each run is executed by one of them. Runs whose function is not in these
    programs are left to others. SIGTERM and Ctrl-C wait for what is executed; what has not stopped after --grace
    seconds is interrupted, and the next worker resumes it.

    Parameters
    ----------
    programs
        Modules and files that have the durable functions.
    concurrency
        How many runs this worker executes at a time.
    grace
        How long to wait for runs that are executed when this worker is stopped.
    drain
        End when nothing is left to do, with 7 when a run needs attention.
    no_dumps
        Do not watch the program: when it crashes, it leaves no dump.
    json
        Print a line of JSON for each run (schema holdfast.worker/1).
    """
    if not programs:
        raise BadOption("whose runs are to be resumed?", hint="holdfast worker PROGRAM..., with the durable functions.")
    needed: list[str] = []
    out = sys.stdout  # what the programs print goes elsewhere

    def tell(worked: Worked) -> None:
        if worked.became in {"needs attention", "code changed", "left"}:
            needed.append(worked.run)
        if json:
            out.write(dumps({"schema": SCHEMA, **worked._asdict()}) + "\n")
            out.flush()
        else:
            _say(session, worked)

    def alone(agent: str, branch: str, run: str) -> None:
        """In a process of its own: it has ended its worker before."""
        words = [*programs, *(word for name in types for word in ("--types", name))]
        words += ["--no-dumps"] * no_dumps + ["--json"] * json + ["--only", agent, branch, run]
        place = ["--store", str(session.place)] if session.place is not None else []
        before = len(store.agent(agent, branch=branch, readonly=True).crashes())
        ended = subprocess.run([sys.executable, "-m", "holdfast", *place, "worker", *words], check=False)  # noqa: S603 - our own
        until_s = time.monotonic() + (DUMP_S if ended.returncode < 0 and not no_dumps else 0.0)
        while time.monotonic() < until_s and len(store.agent(agent, branch=branch, readonly=True).crashes()) == before:
            time.sleep(0.05)  # whoever watched it writes what is left of it: so that the run can name it

    with watched(session, wanted=not no_dumps), foreign_code(json=json):
        load(programs)
        with working_store(session, types) as store:
            working = Worker(store, concurrency=concurrency, tell=tell, alone=None if only is not None else alone)
            if only is not None:
                working.one(*only)
                return ATTENTION if needed else 0
            if not json:
                session.out.say(f"Working on {store.place}, {count(concurrency, 'run')} at a time.")
            with _until_told(working):
                working.run(drain=drain)
            left = working.stop(grace)
            if left:
                _leave(session, [run for _, _, run in left])
    return ATTENTION if drain and needed else 0


@contextmanager
def _until_told(working: Worker) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C let the worker begin nothing new. A second one ends the process."""

    def told(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        working.end()

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(session: Session, runs: list[str]) -> None:
    """End though runs are executed: the system stops their threads wherever they are, and the next worker goes on."""
    session.out.say(f"Interrupted {count(len(runs), 'run')}: {', '.join(map(clean, runs))}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _say(session: Session, worked: Worked) -> None:
    line = Text().append(clean(f"{worked.agent}@{worked.branch}".removesuffix("@main")), style="bold cyan")
    line.append(f"  {clean(worked.function)}  ").append(worked.became, style=_STYLES.get(worked.became, "bold red"))
    line.append(f"  {clean(worked.about)}", style="dim")
    session.out.say(line, wrap=True)
