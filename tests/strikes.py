"""Real signals whose handler raises, at a moment that the test chooses: what a person's Ctrl-C does to a call."""

from __future__ import annotations

import signal
from collections.abc import Callable


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
