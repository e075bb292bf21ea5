"""Programs that a person names: a module, a file, a function in one of them.

Owns how they are loaded, and how their own errors are shown. Always holds: what is loaded was named on the command
line; no name that a store holds leads here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated, Any

from cyclopts import Parameter

import holdfast
from holdfast.errors import BadOption

Load = Annotated[tuple[str, ...], Parameter(name="--load", metavar="PROGRAM", negative="", show_default=False)]
"""How a verb that needs the tools of a program lets people name it."""

_PACKAGE = str(Path(holdfast.__file__).parent)
_SHOWN = 6


def load(programs: Iterable[str]) -> None:
    """Import modules (``my_app.agent``) and files (``agent.py``), so that their tools and functions are known."""
    for program in programs:
        module_of(program)


def module_of(program: str) -> ModuleType:
    """Import one module or file. What it raises itself is not caught."""
    if is_file(program):
        return _from_file(Path(program))
    _look_in(Path.cwd())
    try:
        return importlib.import_module(program)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{program}.".startswith(f"{error.name}."):
            raise
        raise BadOption(
            f"there is no module {program!r}", hint="Name a module that can be imported from here, or a file.py."
        ) from None
    except (TypeError, ValueError):  # ".agent", "": no name at all
        raise BadOption(f"{program!r} is not the name of a module") from None


def function_of(text: str) -> Callable[..., Any]:
    """The function that ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` names."""
    place, _, name = text.rpartition(":")
    module = module_of(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        there = [known for known, value in vars(module).items() if hasattr(value, "durable")]
        listed = ", ".join(there[:_SHOWN]) or "none"
        raise BadOption(f"{place} has no function {name!r}", hint=f"Durable functions in it: {listed}.")
    function: Callable[..., Any] = found
    return function


def waits(function: Callable[..., Any]) -> bool:
    """Whether it is async."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def is_file(program: str) -> bool:
    return program.endswith(".py") or "/" in program


def existing(program: str) -> Path:
    """The file that is meant."""
    file = Path(program)
    if not file.is_file():
        raise BadOption(
            f"there is no file {program}", hint="A durable function is written MODULE:FUNCTION or FILE.py:FUNCTION."
        )
    return file


def _from_file(file: Path) -> ModuleType:
    """A file as the module that its neighbours would import it as, unless that name is taken."""
    file = existing(str(file)).resolve()
    _look_in(file.parent)
    name = file.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(file):
            return known
        name = f"_holdfast_{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BadOption(f"{file} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(directory: Path) -> None:
    """Modules there can be imported, as by ``python -m``."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def given_json(text: str, what: str) -> Any:
    """A value from the command line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadOption(
            f"{what} is not JSON: {error}", hint="Text needs quotes of its own: '\"yes\"'. Objects: '{\"a\": 1}'."
        ) from None


def show_raised(error: BaseException) -> None:
    """A program's own exception, as Python shows it, from where the program begins."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _is_ours(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen ")) or "/asyncio/" in file
