"""Work that no signal handler can cut in two.

Owns the thread in which it is done: Python runs signal handlers, and lets them raise, in the main thread only. What
always holds: when ``apart`` raises what a handler raised, the work has ended, one way or the other, or has not begun;
a second interrupt does not wait for its end, and whoever comes next waits for the locks that it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """Do ``work`` where no handler can raise in the middle of it, and return what it returns."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    context = copy_context()
    begun, over = threading.Lock(), threading.Lock()
    results: list[T] = []
    errors: list[BaseException] = []

    def do() -> None:
        if begun.acquire(blocking=False):
            try:
                results.append(context.run(work))
            except BaseException as error:  # noqa: BLE001 - the caller's to raise
                errors.append(error)
        over.release()

    over.acquire()
    # A daemon: a program that was interrupted twice must be able to end.
    thread = threading.Thread(target=do, name="holdfast-apart", daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and begins no thread any more
            return work()
        over.acquire()
    except BaseException:
        if not begun.acquire(blocking=False):
            thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
