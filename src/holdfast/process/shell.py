"""What is left of a process that has gone back to a fork point: it stands in for the one that took its place.

Owns the original's process number, for whoever waits for that or signals it. This file is also a program of its own,
which replaces the original, so that nothing of its memory stays; it must import nothing but these few modules. What
always holds: it ends when the one that took over has ended, and as that one did.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import NoReturn

SENT = {0, -1, -6}
"""How a signal came that somebody sent to this process: kill, sigqueue, tgkill. Those of a terminal go to everybody."""


def stand_in(main: int, successors: int) -> NoReturn:
    """Pass signals on to ``main``, and end as it does. ``successors``: a pipe that says who takes its place, if any."""
    wanted = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored is not waited for
    os.set_blocking(successors, False)
    ended: dict[int, int] = {}
    while True:
        lonely = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                lonely = True
                break
            if pid == 0:
                break
            if not os.WIFSTOPPED(status):
                ended[pid] = status
            elif pid == main:
                os.kill(os.getpid(), signal.SIGSTOP)
                os.kill(main, signal.SIGCONT)
        while main in ended:
            named = _named(successors)
            if not named:
                _end_as(ended[main])
            main = named
        if lonely:
            os._exit(1)  # nobody can say how it ended
        found = signal.sigwaitinfo(wanted)
        if found.si_signo != signal.SIGCHLD and found.si_code in SENT:
            try:
                os.kill(main, found.si_signo)
            except ProcessLookupError:
                continue


def _named(successors: int) -> int:
    """The newest process that was named as the one that goes on."""
    try:
        return int(os.read(successors, 4096).split()[-1])
    except (BlockingIOError, IndexError, ValueError):
        return 0


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # there is nothing to see in this one
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    stand_in(int(sys.argv[1]), int(sys.argv[2]))
