"""Exit codes. The second level of the error tree says what to do next, and so does the code (docs/cli.md)."""

from __future__ import annotations

from holdfast.errors import Contention, Damaged, HoldfastError, Incompatible, InputError, Unavailable

DIFFERENT = 1
USAGE = 2
DAMAGED = 5
FAILED = 6
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
READER_GONE = 141  # and for one that SIGPIPE ended

_CODES: dict[type[HoldfastError], int] = {
    InputError: USAGE,
    Contention: 3,
    Incompatible: 4,
    Damaged: DAMAGED,
    Unavailable: FAILED,
}


def exit_code(error: HoldfastError) -> int:
    return next((code for group, code in _CODES.items() if isinstance(error, group)), FAILED)
