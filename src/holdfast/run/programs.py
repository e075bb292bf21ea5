"""Programs that a person names: a module, a file, a function in one of them.

Owns how they are loaded. Must not know what for. Always holds: what is loaded was named by whoever calls this; no name
that a store holds leads here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.errors import BadOption
from holdfast.run.durables import Durable
from holdfast.run.tools import Tool

_SHOWN = 6
"""Functions in a message."""


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
    is_tool = isinstance(getattr(found, "tool", None), Tool)
    if is_tool or not callable(found):
        there = [known for known, value in vars(module).items() if isinstance(getattr(value, "durable", None), Durable)]
        raise BadOption(
            f"{name!r} of {place} is a tool, which runs call" if is_tool else f"{place} has no function {name!r}",
            hint=f"Durable functions in it: {', '.join(there[:_SHOWN]) or 'none'}.",
        )
    function: Callable[..., Any] = found
    return function


def is_file(program: str) -> bool:
    return program.endswith(".py") or "/" in program


def existing(program: str) -> Path:
    """The file that is meant."""
    file = Path(program)
    if not file.is_file():
        raise BadOption(
            f"there is no file {program}", hint="A function is written MODULE:FUNCTION or FILE.py:FUNCTION."
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
