"""What a person's Ctrl-C does to a call: signals whose handler raises, and exceptions that tracing raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Strike(BaseException):
    """What the handler raises: no code of ours or of a library's catches it by its name."""


def struck(work: Callable[[], object], after_s: float, kind: type[BaseException] = Strike) -> bool:
    """Do `work` under an alarm; whether it struck. It strikes nothing but `work`: the test's own lines are safe."""
    live = True

    def handler(*_: object) -> None:
        if live:
            raise kind

    before = signal.signal(signal.SIGALRM, handler)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            work()
        finally:
            live = False  # one that is delivered later, by another thread or after the timer ended, finds this
            signal.setitimer(signal.ITIMER_REAL, 0)
    except kind:
        live = False  # struck on its way into the line above
        signal.setitimer(signal.ITIMER_REAL, 0)
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def alone(work: Callable[[], T]) -> T:
    """Do something in a thread of its own.

    An exception that tracing raises between two instructions can leave behind the interpreter's record of the one that
    is being handled, and every later one of the same thread would be said to have happened while handling it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
