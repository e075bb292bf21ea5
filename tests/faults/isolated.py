"""A function in a process of its own: forked, bounded in time, its answer sent back, its death reported.

For campaigns whose tries may leave threads, descriptors, patched code or a dead process behind.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

TIME_LIMIT_S = 120.0
"""Far above what any try takes on a busy machine: only one that hangs gets there."""


class Died(Exception):
    """The process ended without an answer. ``signal`` is what killed it, 0 when nothing did."""

    def __init__(self, text: str, signal_number: int, said: list[str]) -> None:
        super().__init__(text)
        self.signal = signal_number
        self.said = said


def isolated(function: Callable[[Callable[[str], None]], Any], *, limit_s: float = TIME_LIMIT_S) -> Any:
    """Call ``function(say)`` in a forked process and return what it returns; lines it ``say``s survive its death.

    An exception is raised here as an AssertionError with its traceback, a death as ``Died`` with what was said.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            answer = _answer(function, lambda line: _send(writing, ("said", line)))
            _send(writing, answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        messages, late = _receive(reading, limit_s)
    finally:
        os.close(reading)
        if late_or_alive(child):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    said = [value for kind, value in messages if kind == "said"]
    for kind, value in messages:
        if kind == "returned":
            return value
        if kind == "raised":
            raise AssertionError(value)
    if late:
        raise Died(f"no answer within {limit_s:g} s", 0, said)
    raise Died(f"ended with status {status}", os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, said)


def late_or_alive(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _answer(function: Callable[..., Any], say: Callable[[str], None]) -> tuple[str, Any]:
    try:
        return "returned", function(say)
    except BaseException:
        return "raised", _shorter(traceback.format_exc())


def _shorter(text: str) -> str:
    """Of a traceback only the lines of Holdfast, innermost last, and what was raised."""
    lines = text.splitlines()
    ours = [line.split(os.sep + "holdfast" + os.sep, 1)[1] for line in lines if f"{os.sep}holdfast{os.sep}" in line]
    raised = [line for line in lines if line and not line.startswith((" ", "Traceback", "During", "The above"))]
    return f"{'; '.join(raised)[:500]} <- {' <- '.join(ours[::-1][:6])}" if ours else text


def _send(fd: int, message: tuple[str, Any]) -> None:
    data = pickle.dumps(message)
    data = len(data).to_bytes(8) + data
    while data:
        data = data[os.write(fd, data) :]


def _receive(fd: int, limit_s: float) -> tuple[list[tuple[str, Any]], bool]:
    """All messages until the other end is closed, and whether time ran out before."""
    ends = time.monotonic() + limit_s
    data = bytearray()
    late = False
    while True:
        left = ends - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            late = True
            break
        part = os.read(fd, 1 << 16)
        if not part:
            break
        data += part
        if _complete(data):
            break
    messages = []
    while len(data) >= 8 and len(data) >= 8 + int.from_bytes(data[:8]):
        size = int.from_bytes(data[:8])
        messages.append(pickle.loads(data[8 : 8 + size]))
        del data[: 8 + size]
    return messages, late


def _complete(data: bytearray) -> bool:
    """Whether the answer itself has arrived: a process that the try left behind may hold the pipe open."""
    at = 0
    while len(data) >= at + 8:
        size = int.from_bytes(data[at : at + 8])
        if len(data) < at + 8 + size:
            return False
        kind, _ = pickle.loads(data[at + 8 : at + 8 + size])
        if kind != "said":
            return True
        at += 8 + size
    return False
