"""Programs that a person names: a module, a file, a function in one of them.

Owns how scripts are run, and how their own errors are shown; how programs are loaded is ``run.programs``. Always holds:
what is loaded was named on the command line; no name that a store holds leads here.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import inspect
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated, Any

from cyclopts import Parameter

import holdfast
from holdfast import Store
from holdfast.cli.session import Session
from holdfast.errors import BadOption
from holdfast.run import function_of, module_of

Load = Annotated[tuple[str, ...], Parameter(name="--load", metavar="PROGRAM", negative="", show_default=False)]
"""How a verb that needs the tools of a program lets people name it."""

_PACKAGE = str(Path(holdfast.__file__).parent)
_PACKED = {".pyc", ".pyz", ".zip"}
_shown: list[BaseException] = []  # what has ended the script


def load(programs: Iterable[str]) -> None:
    """Import modules (``my_app.agent``) and files (``agent.py``), so that their tools and functions are known."""
    for program in programs:
        module_of(program)


def check_of(text: str) -> Callable[..., Any]:
    """A function that judges states. Nobody takes how its module ends for an answer."""
    try:
        return function_of(text)
    except SystemExit as error:
        hint = 'What ends a program belongs under `if __name__ == "__main__":`.'
        raise BadOption(f"{text} cannot be loaded: its module ends with exit({error.code!r:.80})", hint=hint) from None


def writing(session: Session, programs: Sequence[str]) -> Store:
    """With programs, what undoes effects is theirs, and gets values of their types."""
    if not programs:
        return session.writing()
    load(programs)
    return session.opened(session.place, create=False)


def waits(function: Callable[..., Any]) -> bool:
    """Whether it is async."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def given_json(text: str, what: str) -> Any:
    """A value from the command line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadOption(
            f"{what} is not JSON: {error}", hint="Text needs quotes of its own: '\"yes\"'. Objects: '{\"a\": 1}'."
        ) from None


def run_file(file: Path) -> None:
    """Run a file as ``python FILE`` does: as the module ``__main__``, under its whole path."""
    path = os.path.abspath(file)  # noqa: PTH100 (links stay, as with Python)
    if file.suffix in _PACKED:
        import runpy

        runpy.run_path(path, run_name="__main__")
        return
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    main = sys.modules["__main__"] = ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None)
    exec(code, vars(main))  # noqa: S102 (a person has named it)


def show_raised(error: BaseException) -> None:
    """A program's own exception, as Python shows it, from where the program begins."""
    trace = _own(error)
    traceback.print_exception(type(error), error, trace if trace is not None else error.__traceback__)


def show_ended(error: BaseException) -> None:
    """What has ended a script, as the interpreter shows it: by ``sys.excepthook``, which may be the script's."""
    trace = error.__traceback__ = _own(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    _shown[:] = [error]
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as second:  # noqa: BLE001 (the interpreter says both)
        sys.stderr.write("Error in sys.excepthook:\n")
        show_raised(second)
        sys.stderr.write("\nOriginal exception was:\n")
        show_raised(error)


def was_shown(error: BaseException) -> bool:
    """Whether it has ended a script, and ``show_ended`` has shown it. Python is then to end by it in silence."""
    shown = any(error is one for one in _shown)
    if shown:
        sys.excepthook = lambda *_: None
    return shown


def _own(error: BaseException) -> TracebackType | None:
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen ")) or "/asyncio/" in file
