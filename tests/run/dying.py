"""Moments at which a program may die: whoever counts to ``fatal`` is killed there."""

from __future__ import annotations

import itertools
import os
import signal

from holdfast.store.database import Database

left = itertools.count(1)
fatal = 0


def point():
    """A moment at which the process may die."""
    if fatal and next(left) == fatal:
        os.kill(os.getpid(), signal.SIGKILL)


def watch():
    """Let the process die at any change of the store, before and after it."""
    for name in ("change", "hand", "directly"):
        setattr(Database, name, watched(getattr(Database, name)))


def watched(call):
    def around(self, *args, **options):
        point()
        found = call(self, *args, **options)
        point()
        return found

    return around
