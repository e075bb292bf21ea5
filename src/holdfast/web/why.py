"""Why: who changed a place, which checkpoint broke it, where rules are broken, what drifts, what broke an agent.

Owns the processes that answer (``question``): how many there are, how long, and ending them. Their answers are kept for
a while, so that an address can be shared and looked at again. What always holds: what somebody wrote is never evaluated
in this process; a question that was cancelled, or has taken too long, has no process any more.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from holdfast import Store
from holdfast.errors import BadOption, StoreFailed
from holdfast.web.asked import Asked
from holdfast.web.timeline import numbers, reader

QUESTIONS: dict[str, tuple[str, ...]] = {
    "blame": ("path", "at"),
    "bisect": ("when", "good", "at", "every"),
    "check": ("rules", "at"),
    "drift": ("baseline", "at", "paths", "may"),
    "explain": ("check", "rules"),
}
"""What each is asked with; the first is needed, but for ``explain``."""
AT_ONCE = 3
"""Processes at the same time: a machine has other things to do."""
LIMIT_S = 120.0
FIRST_S = 1.2
"""So long a page waits for an answer itself; most are there by then."""
KEPT = 32
FIELD_MOST = 4_000


class Job:
    """One question, its process, and what it has told."""

    def __init__(self, question: dict[str, str]) -> None:
        self.state = "running"
        self.progress: dict[str, Any] | None = None
        self.answer: Any = None
        self.error: dict[str, str] | None = None
        self._began = time.monotonic()
        self._over = threading.Event()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "holdfast.web.question"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise StoreFailed(f"no process could be started: {error.strerror}", hint="Try again later.") from None
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                self._process.stdin.close()
        timer = threading.Timer(
            LIMIT_S, self.end, ("it took too long", "Ask about less, or use the command line, which waits.")
        )
        timer.daemon = True
        timer.start()
        threading.Thread(target=self._listen, args=(timer,), daemon=True).start()

    def _listen(self, timer: threading.Timer) -> None:
        with self._process as process:
            for line in process.stdout or ():
                told = json.loads(line)
                self.progress = told.get("progress", self.progress)
                if "answer" in told:
                    self.answer, self.state = told["answer"], "done"
                elif "error" in told:
                    self.error, self.state = told["error"], "failed"
        code = process.returncode
        timer.cancel()
        if self.state == "running":
            hint = "It may have used more time or memory than it may. Use the command line, which has no such limits."
            self.error, self.state = {"message": f"its process ended with {code}", "hint": hint}, "failed"
        self._over.set()

    def wait(self, seconds: float) -> None:
        self._over.wait(seconds)

    def end(self, why: str, hint: str = "") -> None:
        """End it now, if it has not ended."""
        if self.state == "running":
            self.error, self.state = {"message": why, "hint": hint}, "ended"
            self._process.kill()

    def told(self) -> dict[str, Any]:
        took_s = round(time.monotonic() - self._began, 1)
        return {
            "state": self.state, "progress": self.progress, "answer": self.answer, "error": self.error,
            "since_s": took_s,
        }  # fmt: skip


_jobs: OrderedDict[str, Job] = OrderedDict()
_lock = threading.Lock()


@atexit.register
def _stop() -> None:
    for job in list(_jobs.values()):
        job.end("the page was stopped")


def why(store: Store, asked: Asked) -> dict[str, Any]:
    """The forms, and with ``ask`` the answer, if it is there by now. ``cancel`` ends the question."""
    agent = reader(store, asked, asked.branch)
    kind = asked.choice("ask", "", ("", *QUESTIONS))
    fields = {name: asked.text(name, "", most=FIELD_MOST) for names in QUESTIONS.values() for name in names}
    job = None
    if kind:
        needed = QUESTIONS[kind][0]
        if kind == "explain" or fields[needed].strip():
            question = {name: fields[name] for name in QUESTIONS[kind]}
            head = agent.head.id if agent.head is not None else ""
            question |= {
                "ask": kind,
                "agent": agent.name,
                "branch": agent.branch_name,
                "place": store.place,
                "head": head,
            }
            job = _asked_for(question, cancel=asked.flag("cancel"), again=asked.flag("again"))
    return {
        "agent": agent.name,
        "branch": agent.branch_name,
        "ask": kind,
        "fields": fields,
        "tags": list(agent.tags())[:100],
        "paths": numbers(store, asked)["paths"],
        "job": job.told() if job is not None else None,
    }


def _asked_for(question: dict[str, str], *, cancel: bool, again: bool) -> Job | None:
    key = json.dumps(question, sort_keys=True)
    with _lock:
        job = _jobs.get(key)
        if cancel:
            if job is not None:
                job.end("it was cancelled")
            return job
        if job is None or (again and job.state != "running"):
            if sum(one.state == "running" for one in _jobs.values()) >= AT_ONCE:
                raise BadOption(f"{AT_ONCE} questions are being answered", hint="Wait for one of them, or cancel it.")
            job = _jobs[key] = Job(question)
        _jobs.move_to_end(key)
        while len(_jobs) > KEPT:
            _, old = _jobs.popitem(last=False)
            old.end("newer questions came")
    job.wait(FIRST_S)
    return job
