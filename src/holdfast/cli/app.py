"""The program ``holdfast``: its verbs, the option that all share, and how errors end.

Owns exit codes. Always holds: a person sees one clear line and what to do next, never a traceback, unless
``HOLDFAST_DEBUG=1`` asks for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter

from holdfast.errors import Contention, Damaged, HoldfastError, Incompatible, InputError, Unavailable

DIFFERENT = 1
USAGE = 2
READER_GONE = 141  # what a shell reports for a program that SIGPIPE ended
INTERRUPTED = 130

# The second level of the error tree says what to do, and so does the exit code. docs/cli.md has the same table.
EXIT_CODES: dict[type[HoldfastError], int] = {
    InputError: USAGE,
    Contention: 3,
    Incompatible: 4,
    Damaged: 5,
    Unavailable: 6,
}
FAILED = 6

_LOOK = Group("Look", sort_key=1)
_CHANGE = Group("Change", sort_key=2)
_CARE = Group("Care", sort_key=3)
_MORE = Group("More", sort_key=4)
_VERBS = (
    ("agents", _LOOK, "List the agents in the store."),
    ("log", _LOOK, "Show an agent's history."),
    ("show", _LOOK, "Show one checkpoint: what it is, its state, what it changed."),
    ("diff", _LOOK, "Show what differs between two checkpoints."),
    ("branch", _CHANGE, "List branches, or start a new one."),
    ("tag", _CHANGE, "List tags, set one or remove one."),
    ("rollback", _CHANGE, "Go back to an earlier checkpoint; nothing is deleted."),
    ("undo", _CHANGE, "Reverse the last checkpoint that is not yet undone."),
    ("redo", _CHANGE, "Do again what the last undo reversed."),
    ("verify", _CARE, "Read everything and prove every digest."),
    ("doctor", _CARE, "Check the machine, the store and who holds it."),
    ("demo", _CARE, "Watch an agent being killed and come back."),
)


def version() -> str:
    try:
        return installed_version("holdfast")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


app = App(
    name="holdfast",
    help="Keeps an agent's state safe: look at its history, compare, roll back, branch, verify.",
    help_epilogue="A revision is NAME or NAME@REV. REV: branch, tag, label, ~2, BRANCH~2, #17 (depth) or id:3f2a.",
    version=version,
    help_format="plaintext",
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    group_commands=_MORE,
)
for _name, _group, _help in _VERBS:
    app.command(f"holdfast.cli.{_name}:{_name}", name=_name, group=_group, help=_help)
app.register_install_completion_command(help="Install completion for this shell (bash, zsh, fish).")

app.meta.group_parameters = Group("Everywhere", sort_key=9)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    store: Annotated[Path | None, Parameter(show_default=False)] = None,
) -> int:
    """Find the verb and run it in its surroundings.

    Parameters
    ----------
    tokens
        The verb and what belongs to it.
    store
        The store's directory. Otherwise $HOLDFAST_STORE, or .holdfast here or above.
    """
    command, bound, ignored = app.parse_args(tokens)
    given: dict[str, Any] = {}
    if "session" in ignored:
        from holdfast.cli.session import Session

        given["session"] = Session(store)
    code = command(*bound.args, **bound.kwargs, **given)
    return code if isinstance(code, int) else 0


def run(arguments: Sequence[str]) -> int:
    """Run the command; every way it can end becomes an exit code."""
    from holdfast.cli.output import ReaderGone

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # text that the encoding lacks is escaped, never a reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        return int(app.meta(list(arguments)) or 0)
    except CycloptsError as error:
        return _usage(error)
    except HoldfastError as error:
        return _explain(error)
    except ReaderGone:
        # What is still buffered has nowhere to go; Python would complain about it on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if _debugging():
            raise
        _say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", "")
        return FAILED


def exit_code(error: HoldfastError) -> int:
    return next((code for group, code in EXIT_CODES.items() if isinstance(error, group)), FAILED)


def _explain(error: HoldfastError) -> int:
    if _debugging():
        raise error
    # An error with its own way of speaking (Unencodable puts the path in front) keeps it; the hint is said once.
    message = str(error).removesuffix(f"\n{error.hint}") if error.hint else str(error)
    _say(message, error.hint)
    return exit_code(error)


def _usage(error: CycloptsError) -> int:
    if _debugging():
        raise error
    error.verbose = False
    message = str(error)
    if error.unused_tokens:
        message = f"Too many arguments: {' '.join(error.unused_tokens)}"
    _say(message, f"See `{' '.join(('holdfast', *(error.command_chain or ())))} --help`.")
    return USAGE


def _say(message: str, hint: str) -> None:
    from holdfast.cli.output import Output
    from holdfast.cli.text import clean

    console = Output(stderr=True)
    console.print(f"holdfast: {clean(message)}", style="bold red", soft_wrap=True)
    if hint:
        console.print(clean(hint), soft_wrap=True)


def _debugging() -> bool:
    return os.environ.get("HOLDFAST_DEBUG", "") not in {"", "0"}
