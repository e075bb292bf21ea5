"""Work in other threads: what no signal handler may cut in two, and what no event loop may wait for.

Owns these threads. Python runs signal handlers, and lets them raise, in the main thread only. An event loop has threads
of its own (``asyncio.to_thread``), but all of them may be taken by those who wait for what is to be done here. What
always holds: when ``apart`` raises what a handler raised, the work has ended, one way or the other, or has not begun;
a second interrupt does not wait for its end, and whoever comes next waits for the locks that it has.
"""

from __future__ import annotations

import os
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from asyncio import Future
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")
WORKERS = 32
"""Threads in which the disk is read and written for event loops. More would only wait for each other."""

_pools: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pools.clear)  # its threads are the parent's


def off_loop(work: Callable[..., Any], *args: Any) -> Future[Any]:
    """Do ``work``, which waits for nothing but the disk, in a thread; it can be awaited on the running loop."""
    if not _pools:
        from concurrent.futures import ThreadPoolExecutor  # asyncio has loaded it; programs without it never need it

        _pools.append(ThreadPoolExecutor(WORKERS, "holdfast-disk"))
    return sys.modules["asyncio"].get_running_loop().run_in_executor(_pools[0], copy_context().run, work, *args)  # type: ignore[no-any-return] # a module found by its name has no types


def apart(work: Callable[[], T]) -> T:
    """Do ``work`` where no handler can raise in the middle of it, and return what it returns."""
    if threading.get_ident() != threading.main_thread().ident:
        return work()
    context = copy_context()
    begun, over = threading.Lock(), threading.Lock()
    todo = [work]
    results: list[T] = []
    errors: list[BaseException] = []

    def do() -> None:
        if begun.acquire(blocking=False):
            try:
                results.append(context.run(todo.pop()))
            except BaseException as error:  # noqa: BLE001 - the caller's to raise
                errors.append(error)
        over.release()

    over.acquire()
    try:
        try:
            # One call, which an interrupt does not cut in two: a ``Thread`` has locks of its own, and one that is cut
            # short while it starts is kept for ever, with all that it refers to. A program that was interrupted twice
            # can end, as with a daemon.
            start_new_thread(do, ())
        except RuntimeError:  # the interpreter ends, and begins no thread any more
            return work()
        over.acquire()
    except BaseException:
        if not begun.acquire(blocking=False) and not results and not errors:
            over.acquire()
        todo.clear()
        raise
    if errors:
        raise errors.pop()
    return results[0]
