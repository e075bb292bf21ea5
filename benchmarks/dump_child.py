"""One failing program, and one tool that takes its dump. Started by dump.py with a job as JSON; prints figures as JSON.

What a dump should show carries a mark that is found nowhere else, so that dump.py can look for it in the bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import sys
import threading
from pathlib import Path
from time import perf_counter, process_time
from traceback import walk_tb
from types import TracebackType
from typing import Any

import apsw  # noqa: F401 - a module whose version a dump may show

KEPT: list[Any] = []
OURS = ("holdfast", "holdfast installed")


def mark(what: str) -> str:
    """A text that stands in no source and in no compiled code."""
    return f"mark-{what}"


class MarkedKind:
    """Its instances are reachable from no frame: only a look at the heap shows them."""


class Order:
    def __init__(self, number: int) -> None:
        self.number = number
        self.note = mark("attribute")
        self.price = number / 100


def objects(count: int) -> list[Any]:
    return [Order(number) for number in range(count)]


def fail(content: Any) -> None:  # noqa: ARG001 - it is there to be dumped
    local = mark("local")  # noqa: F841 mark-source
    try:
        raise LookupError(mark("cause"))
    except LookupError as error:
        failure = ValueError(mark("message"))
        failure.add_note(mark("note"))
        raise failure from error


def work(content: Any) -> None:
    outer = mark("outer")  # noqa: F841
    fail(content)


def waits(ready: threading.Event, until: threading.Event) -> None:
    inside = mark("thread")  # noqa: F841
    ready.set()
    until.wait()


class Tool:
    """How one tool takes a dump of the exception that was caught."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.name, self.folder = job["tool"], Path(job["folder"])
        self.prepare()

    def prepare(self) -> None:
        """Import and open what is needed: programs do that when they start."""
        if self.name in OURS:
            import holdfast
            from holdfast.crash import inside

            if self.name == "holdfast installed":
                holdfast.crash.install(to=self.folder)  # starts the sidecar, which sees the process die
            else:
                inside.keep_logs(100)
            agent = holdfast.open(self.folder / "store").agent("trip-7")
            agent.state["plan"] = mark("state")
            agent.checkpoint("planned")
            KEPT.append(agent)
        elif self.name == "coredumpy":
            import coredumpy  # noqa: F401
        elif self.name == "pydumpling":
            import pydumpling  # noqa: F401

    def take(self, error: BaseException, traceback: TracebackType | None) -> dict[str, Any]:
        began, cpu = perf_counter(), process_time()
        if self.name in OURS:
            from holdfast import crash

            crash.capture("benchmark", error=error, traceback=traceback, to=self.folder)
        elif self.name == "coredumpy":
            import coredumpy

            frames = [frame for frame, _ in walk_tb(traceback)]
            coredumpy.dump(frames[-1], path=str(self.folder / "coredumpy.dump"))
        elif self.name == "pydumpling":
            import pydumpling

            pydumpling.save_dumping(self.folder / "pydumpling.dump", (type(error), error, traceback), strict=True)
        else:  # PyStack looks from outside
            print(json.dumps({"ready": os.getpid()}), flush=True)
            sys.stdin.readline()
        return {"seconds": perf_counter() - began, "cpu_s": process_time() - cpu}


def plain(tool: Tool, content: Any) -> dict[str, Any]:
    try:
        work(content)
    except ValueError as error:
        return tool.take(error, error.__traceback__)
    raise SystemExit("nothing failed")


def server(tool: Tool, tasks: int) -> dict[str, Any]:
    """A server with clients that wait; one request fails."""

    async def client(number: int, go: asyncio.Event) -> None:
        request = f"{mark('task')} {number}"  # noqa: F841
        await go.wait()

    async def run() -> dict[str, Any]:
        go = asyncio.Event()
        waiting = [asyncio.create_task(client(number, go), name=f"client-{number}") for number in range(tasks)]
        await asyncio.sleep(0)
        try:
            return plain(tool, None)
        finally:
            go.set()
            await asyncio.gather(*waiting)

    return asyncio.run(run())


def segfault(job: dict[str, Any]) -> None:
    import ctypes

    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2 if job["tool"] == "pystack" else (0, 0))
    if job["tool"] in OURS:
        import holdfast
        from holdfast import crash

        crash.install(to=job["folder"])
        agent = holdfast.open(Path(job["folder"]) / "store").agent("trip-7")
        agent.state["plan"] = mark("state")
        agent.checkpoint("planned")
        KEPT.append(agent)
        logging.getLogger("app").warning("%s", mark("log"))
    local = mark("local")  # noqa: F841 mark-source
    print(json.dumps({"ready": os.getpid()}), flush=True)
    sys.stdin.readline()
    ctypes.string_at(0)


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ["TZ"] = "Mark/Environment"
    KEPT.extend(MarkedKind() for _ in range(1_000))
    KEPT.append((Path(job["folder"]) / "mark-file").open("w"))
    ready, until = threading.Event(), threading.Event()
    threading.Thread(target=waits, args=(ready, until), daemon=True).start()
    ready.wait()
    if job["program"] == "segfault":
        segfault(job)
        return
    tool = Tool(job)
    logging.getLogger("app").warning("%s", mark("log"))
    if job["program"] == "tasks":
        found = server(tool, job["count"])
    else:
        found = plain(tool, objects(job["count"]) if job["program"] == "objects" else [1, 2, 3])
    until.set()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
