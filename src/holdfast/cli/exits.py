"""Exit codes. The second level of the error tree says what to do next, and so does the code (docs/cli.md)."""

from __future__ import annotations

from holdfast.errors import (
    Cancelled,
    Contention,
    Damaged,
    Diverged,
    HoldfastError,
    Incompatible,
    InDoubt,
    InputError,
    MaybeRepeated,
    Outcome,
    ResultForgotten,
    ResultLost,
    RollbackBlocked,
    RunEnded,
    RunUnfinished,
    Unavailable,
    Waiting,
)

DIFFERENT = 1
RAISED = 1  # what was run failed; Python itself ends so
USAGE = 2
DAMAGED = 5
FAILED = 6
ATTENTION = 7
WAITING = 8
NOT_CONFIRMED = 9
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
READER_GONE = 141  # and for one that SIGPIPE ended

# The first that fits counts, so a group stands behind its exceptions.
_CODES: dict[type[HoldfastError | Cancelled], int] = {
    InputError: USAGE,
    Contention: 3,
    Incompatible: 4,
    Damaged: DAMAGED,
    Unavailable: FAILED,
    Waiting: WAITING,
    # Somebody has to decide something; running it again changes nothing.
    InDoubt: ATTENTION,
    MaybeRepeated: ATTENTION,
    Diverged: ATTENTION,
    RollbackBlocked: ATTENTION,
    RunUnfinished: ATTENTION,
    RunEnded: ATTENTION,
    ResultLost: ATTENTION,
    ResultForgotten: ATTENTION,
    Outcome: RAISED,
    Cancelled: RAISED,
}


def exit_code(error: HoldfastError | Cancelled) -> int:
    return next((code for group, code in _CODES.items() if isinstance(error, group)), FAILED)
