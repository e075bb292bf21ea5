"""Exit codes. The second level of the error tree says what to do next, and so does the code (docs/cli.md)."""

from __future__ import annotations

from holdfast import errors

DIFFERENT = 1
RAISED = 1  # what was run failed; Python itself ends so
USAGE = 2
DAMAGED = 5
FAILED = 6
ATTENTION = 7  # somebody has to decide something; running it again changes nothing
WAITING = 8
NOT_CONFIRMED = 9
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
READER_GONE = 141  # and for one that SIGPIPE ended

# The first that fits counts, so a group stands behind its exceptions.
_CODES: dict[type[errors.HoldfastError | errors.Cancelled], int] = {
    errors.InputError: USAGE,
    errors.Contention: 3,
    errors.Incompatible: 4,
    errors.Damaged: DAMAGED,
    errors.Unavailable: FAILED,
    errors.Waiting: WAITING,
    errors.InDoubt: ATTENTION,
    errors.MaybeRepeated: ATTENTION,
    errors.Diverged: ATTENTION,
    errors.RollbackBlocked: ATTENTION,
    errors.RunUnfinished: ATTENTION,
    errors.RunEnded: ATTENTION,
    errors.ResultLost: ATTENTION,
    errors.ResultForgotten: ATTENTION,
    errors.BisectFailed: ATTENTION,
    errors.Outcome: RAISED,
    errors.Cancelled: RAISED,
}


def exit_code(error: errors.HoldfastError | errors.Cancelled) -> int:
    return next((code for group, code in _CODES.items() if isinstance(error, group)), FAILED)
