"""The program ``holdfast``: its verbs, the option that all share, and how errors end.

Always holds: a person sees one clear line and what to do next, never a traceback, unless
``HOLDFAST_DEBUG=1`` asks for it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

import holdfast
from holdfast.cli.exits import FAILED, INTERRUPTED, READER_GONE, USAGE, exit_code
from holdfast.cli.output import Output, ReaderGone
from holdfast.cli.session import Session
from holdfast.cli.text import clean
from holdfast.errors import Cancelled, HoldfastError

# Errors speak to programmers; on the command line the way out has another name.
_HINTS = {
    "agent-busy": "Add --wait SECONDS where the verb has it, or end that process first.",
    "waiting": "Resume it with `holdfast run --due PROGRAM` when that has come, or run it again without --no-wait.",
    "run-unfinished": "Resume it (`holdfast run` with its own arguments, or with others and --change), cancel it"
    " (`holdfast runs cancel NAME ID`), work on a branch (`holdfast branch`), or roll back to before it began.",
    "rollback-blocked": "Roll back with --load PROGRAM that can undo it, mend what fails and do it again, decide what"
    " is in doubt (holdfast effects resolve), or leave it standing (--accept NAME).",
    "not-encrypted": "`holdfast init PLACE --encrypt` makes one that is, `holdfast push PLACE` brings this one there.",
    "not-a-store": "Name the store with --store PLACE or $HOLDFAST_STORE, or go to where .holdfast is.",
}

_LOOK = Group("Look", sort_key=1)
_FIND = Group("Find", sort_key=2)
_RUN = Group("Run", sort_key=3)
_CHANGE = Group("Change", sort_key=4)
_CARE = Group("Care", sort_key=5)
_MOVE = Group("Move", sort_key=6)
_MORE = Group("More", sort_key=7)
# For each verb the module that has a function of that name, or, where it has commands of its own, an app. The module is
# imported when the verb is asked for.
_VERBS = {
    _LOOK: {
        "agents": "agents", "log": "history", "show": "history", "diff": "history", "when": "stats", "stats": "stats",
        "dump": "dump", "ui": "ui",
    },
    _FIND: {
        "bisect": "find", "blame": "find", "check": "find", "explain": "explain", "drift": "explain", "logs": "explain",
        "replay": "replays", "what_if": "replays", "validate": "replays", "probe": "find",
    },
    _RUN: {
        "run": "run", "worker": "run", "runs": "runs", "queues": "runs", "signal": "runs", "effects": "effects",
        "events": "agents", "freeze": "processes", "thaw": "processes", "migrate": "processes",
    },
    _CHANGE: {
        "branch": "branches", "tag": "branches", "rollback": "branches", "undo": "branches", "copy": "agents",
        "remove": "agents", "reconcile": "explain",
    },
    _CARE: {
        "init": "store", "verify": "store", "repair": "store", "retain": "store", "tier": "store",
        "doctor": "doctor", "demo": "run", "key": "keys",
    },
    _MOVE: {
        "push": "transfer", "pull": "transfer", "backup": "transfer", "move": "transfer", "export": "transfer",
        "import_": "transfer",
    },
}  # fmt: skip
# What was typed is repeated, but for what may be a password in a URL.
_PASSWORD = re.compile(r"(?:(?<=\bpostgres):|(?<=\bpostgresql):|:/)\S*@")
_EVERYWHERE = Group("Everywhere", sort_key=9)
_FIRST = """
New here?
  holdfast demo            watch what it is for
  holdfast run agent.py    run your program
  holdfast log NAME        see what was kept of an agent
  holdfast VERB --help     how to use a verb"""
"""The last lines of the help, which are those that a terminal shows."""


def _version() -> str:
    from holdfast.cli.doctor import holdfast_version

    return holdfast_version()


def _ask(place: str) -> holdfast.keys.Secret:
    from holdfast.cli.keys import ask

    return ask(place)


app = App(
    name="holdfast",
    help="Keeps an agent safe: look at its history, run, resume, roll back, verify.",
    help_epilogue="A revision is NAME or NAME@REV. REV: branch, tag, label, ~2, BRANCH~2, #17 (depth) or id:3f2a.",
    version=_version,
    help_format="markdown",
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
    group_commands=_MORE,
)
for _group, _verbs in _VERBS.items():
    for _order, (_verb, _module) in enumerate(_verbs.items()):
        app.command(f"holdfast.cli.{_module}:{_verb}", group=_group, sort_key=_order)
app.register_install_completion_command(help="Install completion for this shell (bash, zsh, fish).")


app.meta.suppress_keyboard_interrupt = False  # `run` below knows what Ctrl-C means


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    store: Annotated[str | None, Parameter(group=_EVERYWHERE, metavar="PLACE", show_default=False)] = None,
) -> int:
    """Find the verb and run it in its surroundings.

    Parameters
    ----------
    tokens
        The verb and what belongs to it.
    store
        The store's directory, or postgresql://... Otherwise $HOLDFAST_STORE, or .holdfast here or above.
    """
    command, bound, ignored = app.parse_args(tokens)
    given: dict[str, Any] = {}
    if "session" in ignored:
        given["session"] = Session(store)
        holdfast.keys.ask_with(_ask)
    code = command(*bound.args, **bound.kwargs, **given)
    return code if isinstance(code, int) else 0


def run(arguments: Sequence[str]) -> int:
    """Run the command; every way it can end becomes an exit code."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # text that the encoding lacks is escaped, never a reason to fail
                stream.reconfigure(errors="backslashreplace")
        if "run" in arguments:
            from holdfast.cli.run import marked

            arguments = marked(arguments)
        elif "--version" not in arguments and not any(word in app for word in arguments if not word.startswith("-")):
            for verb in app:
                app[verb]  # is imported: the help that lists all of them says what each does
        code = int(app.meta(arguments) or 0)
        if not set(arguments) - {"--help", "-h"}:
            Output().say(_FIRST)
        return code
    except CycloptsError as error:
        return _usage(error)
    except (HoldfastError, Cancelled) as error:
        return _explain(error)
    except ReaderGone:
        # What is still buffered has nowhere to go; Python would complain about it on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt as error:
        from holdfast.cli.programs import was_shown

        if was_shown(error):
            raise  # a script's: Python ends by the signal, for the shell to see
        return INTERRUPTED
    except OSError as error:
        if _debugging():
            raise
        _say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", "")
        return FAILED


def _explain(error: HoldfastError | Cancelled) -> int:
    if _debugging():
        raise error
    # An error with its own way of speaking (Unencodable puts the path in front) keeps it; the hint is said once.
    message = str(error).removesuffix(f"\n{error.hint}") if error.hint else str(error)
    _say(message, _HINTS.get(error.kind, error.hint))
    return exit_code(error)


def _usage(error: CycloptsError) -> int:
    if _debugging():
        raise error
    error.verbose = False
    message = str(error)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        message = f"Too many arguments: {' '.join(error.unused_tokens)}"
    _say(_PASSWORD.sub("://…@", message), f"See `{' '.join(('holdfast', *(error.command_chain or ())))} --help`.")
    return USAGE


def _say(message: str, hint: str) -> None:
    console = Output(stderr=True)
    for at, line in enumerate(message.splitlines() or [""]):
        console.print(f"{'' if at else 'holdfast: '}{clean(line)}", style="bold red", soft_wrap=True)
    if hint:
        console.print(clean(hint), soft_wrap=True)


def _debugging() -> bool:
    return os.environ.get("HOLDFAST_DEBUG", "") not in {"", "0"}
