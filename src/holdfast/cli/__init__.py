"""The command line. ``holdfast`` starts at ``main``; each verb is a file of its own.

It calls the public API and nothing beneath it. Reading verbs open the store read-only, never create one, and nothing
that a store names is ever imported; programs are loaded where a person names them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from holdfast.cli.exits import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments`` are the words after the program's name."""
    collects = gc.isenabled()
    try:
        gc.disable()  # all that is loaded stays, as in ``holdfast.lazy``
        from holdfast.cli.app import run
    except KeyboardInterrupt:  # all is loaded first, which takes a moment
        return INTERRUPTED
    finally:
        if collects:
            gc.enable()
    return run(sys.argv[1:] if arguments is None else arguments)
