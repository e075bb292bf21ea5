"""What is said about a value that cannot be saved: the reason, and what the caller can do instead.

Must not know how values are walked. Holds always: no code of the refused value runs (its repr may be broken or huge).
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

from holdfast.codec.wire import MAX_DEPTH, SCALARS
from holdfast.errors import Unencodable

_BUILTINS = (bool, int, float, complex, str, bytearray, bytes, list, dict, tuple, set, frozenset)

_AGAIN = "Save its name and look it up again when loading."

_KNOWN: dict[str, tuple[str, str]] = {
    "function": ("a function", _AGAIN),
    "builtin_function_or_method": ("a built-in function", _AGAIN),
    "method": ("a method", "Save the object, and the method's name."),
    "module": ("a module", "Save its name."),
    "generator": ("a generator", "Save what it has yielded (list(...)), or where it stands."),
    "async_generator": ("an async generator", "Save what it has yielded, or where it stands."),
    "coroutine": ("a coroutine", "Await it and save the result."),
    "Task": ("a running task", "Await it and save the result."),
    "Future": ("a future", "Wait for it and save the result."),
}

_PYTHON = frozenset({"builtins", "functools", "types", "re", "array", "weakref"})
"""Modules whose classes nobody can decorate."""

_PROCESS = frozenset(
    {"_io", "io", "tempfile", "_thread", "threading", "multiprocessing", "socket", "ssl", "subprocess"}
    | {"asyncio", "_asyncio", "concurrent", "queue", "_queue"}
)
"""Packages whose objects stand for something that ends with the process."""


def label(key: Any) -> Any:
    """A path part for a dict key or set item: the value itself when showing it runs no foreign code."""
    if type(key) in SCALARS or (type(key) is tuple and all(type(part) in SCALARS for part in key)):
        return key
    return f"<{type(key).__name__}>"


def too_deep() -> Unencodable:
    return Unencodable(
        f"nested more than {MAX_DEPTH} levels deep",
        hint="Does it contain itself? Flatten it, or refer to the inner object by a key.",
    )


def no_key(value: Any, *, immutable: bool) -> Unencodable:
    """The refusal of a dict key or set item."""
    if immutable:
        return Unencodable(
            f"a {type(value).__qualname__} as a dict key or set item: it would not equal itself after loading",
            hint="NaN, or an instance that is equal to nothing but itself, has no equal copy. Use a name.",
        )
    return Unencodable(
        f"a dict key or set item that is, or holds, a {type(value).__qualname__}, which can change",
        hint="Use atoms, enums, tuples, frozensets, named tuples or frozen instances of such; or a list of pairs.",
    )


def extra_attributes(value: Any, attributes: dict[str, Any]) -> Unencodable:
    names = ", ".join(sorted(map(str, attributes)))
    return Unencodable(
        f"this {type(value).__name__} has attributes of its own ({names}), which would be lost",
        hint="Put them into a registered class that holds the container.",
    )


def unknown(value: Any, option: str) -> Unencodable:
    """The refusal of a value whose type nobody knows. ``option`` is what the program can pass to make it known."""
    kind = type(value)
    name = _qualified(kind)
    register = f"Decorate the class with @holdfast.register, or pass {option}."
    package = kind.__module__.partition(".")[0]
    numpy = sys.modules.get("numpy")
    if isinstance(value, type):
        return Unencodable(f"the class {_qualified(value)} itself", hint="Save its name, or an instance of it.")
    if isinstance(value, BaseException):
        return Unencodable(f"the exception {name}", hint="Save its text, or register the class with save= and load=.")
    if isinstance(value, Enum):
        return Unencodable(f"the enum {name} is not registered", hint=register)
    if kind.__name__ in _KNOWN and (package in _PYTHON or package in _PROCESS):
        what, hint = _KNOWN[kind.__name__]
        return Unencodable(f"{what} cannot be saved", hint=hint)
    if package in _PROCESS:
        hint = "Leave it out; save what makes a new one when loading, such as a file's path and position."
        return Unencodable(f"a {name} belongs to this process", hint=hint)
    base = next((base for base in _BUILTINS if isinstance(value, base)), None)
    if base is tuple and hasattr(kind, "_fields"):
        return Unencodable(f"the named tuple {name} is not registered", hint=register)
    if base is not None:
        hint = f"Convert it with {base.__name__}(...), or register it with save= and load=."
        return Unencodable(f"{name} is a subclass of {base.__name__}", hint=hint)
    if numpy is not None and isinstance(value, numpy.ndarray):
        return Unencodable(f"{name} is a subclass of numpy.ndarray", hint="Convert it with numpy.asarray(...).")
    if package in _PYTHON:
        hint = "Save what it is made of (list(...), bytes(...), a text), or register the class with save= and load=."
        return Unencodable(f"a {name} cannot be saved", hint=hint)
    if package == __name__.partition(".")[0]:
        return Unencodable(f"a {name} is no data", hint="Save its name or its id, and get it again when loading.")
    return Unencodable(f"the type {name} is not registered", hint=register)


def _qualified(kind: type) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
