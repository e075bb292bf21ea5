"""What is said about a value that cannot be saved: the reason, and what the caller can do instead.

Must not know how values are walked. Holds always: no code of the refused value runs (its repr may be broken or huge).
"""

from __future__ import annotations

import sys
from typing import Any

from holdfast.codec.limits import MAX_DEPTH, SCALARS
from holdfast.errors import Unencodable

_BUILTIN_SUBCLASS: tuple[tuple[type, str], ...] = (
    (bool, "bool"),
    (int, "int"),
    (float, "float"),
    (complex, "complex"),
    (str, "str"),
    (bytearray, "bytearray"),
    (bytes, "bytes"),
    (list, "list"),
    (dict, "dict"),
    (tuple, "tuple"),
    (set, "set"),
    (frozenset, "frozenset"),
)

_KNOWN: dict[str, tuple[str, str]] = {
    "function": ("a function", "Save its name and look the function up again when loading."),
    "builtin_function_or_method": ("a built-in function", "Save its name and look it up again when loading."),
    "method": ("a method", "Save the object, and the method's name."),
    "partial": ("a partial function", "Save its arguments, and the function's name."),
    "module": ("a module", "Save its name."),
    "generator": ("a generator", "Save what it has yielded (list(...)), or where it stands."),
    "coroutine": ("a coroutine", "Await it and save the result."),
    "async_generator": ("an async generator", "Save what it has yielded, or where it stands."),
    "memoryview": ("a memoryview", "Save bytes(...) of it."),
    "mappingproxy": ("a read-only view of a dict", "Save dict(...) of it."),
    "dict_keys": ("a view of a dict", "Save list(...) of it."),
    "dict_values": ("a view of a dict", "Save list(...) of it."),
    "dict_items": ("a view of a dict", "Save list(...) of it."),
    "array": ("an array of the array module", "Save list(...) of it, or a NumPy array."),
    "SimpleNamespace": ("a SimpleNamespace", "Save vars(...) of it, or use a registered dataclass."),
    "frame": ("a frame", "Save a description of it."),
    "traceback": ("a traceback", "Save its text (traceback.format_exception)."),
    "code": ("a code object", "Save the source text."),
    "Pattern": ("a compiled regular expression", "Save its pattern and flags."),
    "Task": ("a running task", "Await it and save the result."),
    "Future": ("a future", "Wait for it and save the result."),
    "weakref": ("a weak reference", "Save the object itself, or a key to find it by."),
    "ReferenceType": ("a weak reference", "Save the object itself, or a key to find it by."),
    "ellipsis": ("an Ellipsis", "Save a text or None in its place."),
    "NotImplementedType": ("NotImplemented", "Save a text or None in its place."),
}

_HANDLES = ("lock", "Lock", "RLock", "Condition", "Semaphore", "Event", "Thread", "socket", "Process", "Popen", "Queue")


def label(key: Any) -> Any:
    """A path part for a dict key or set item: the value itself when showing it runs no foreign code."""
    if type(key) in SCALARS or (type(key) is tuple and all(type(part) in SCALARS for part in key)):
        return key
    return f"<{type(key).__name__}>"


_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


def too_deep() -> Unencodable:
    return Unencodable(_TOO_DEEP, hint="Does it contain itself? Flatten it, or refer to the inner object by a key.")


def is_too_deep(error: Unencodable) -> bool:
    return error.reason == _TOO_DEEP


def contains_itself(error: Unencodable, kind: type) -> None:
    """It is known by now why there are too many levels."""
    error.reason = error.message = f"a {kind.__name__} that contains itself"
    error.hint = "Lists and dicts form a tree; refer to the outer one by a key, or use a registered class."


def closed_cycle(value: Any) -> Unencodable:
    return Unencodable(
        f"a {type(value).__qualname__} that contains itself, but is built only when its content is complete",
        hint="Register the class without save= and load=, or refer to the outer object by a key.",
    )


def no_key(value: Any, *, immutable: bool) -> Unencodable:
    """The refusal of a dict key or set item."""
    if immutable:
        return Unencodable(
            f"a {type(value).__qualname__} as a dict key or set item that no look-up could find again",
            hint="NaN, or an instance that is equal to nothing but itself, has no equal copy. Use a name.",
        )
    return Unencodable(
        f"a dict key or set item that is, or holds, a {type(value).__qualname__}, which can change",
        hint="Use atoms, enums, tuples, frozensets, named tuples or frozen instances of such; or a list of pairs.",
    )


def unset_field(value: Any, name: str) -> Unencodable:
    return Unencodable(
        f"the field {name!r} of this {type(value).__qualname__} is not set",
        hint="Set it (None is a value), or declare it with init=False.",
    )


def save_failed(name: str, error: Exception) -> Unencodable:
    return Unencodable(f"the save function of {name} failed: {type(error).__name__}: {error}")


def extra_attributes(value: Any, attributes: dict[str, Any]) -> Unencodable:
    names = ", ".join(sorted(map(str, attributes)))
    return Unencodable(
        f"this {type(value).__name__} has attributes of its own ({names}), which would be lost",
        hint="Put them into a registered class that holds the container.",
    )


def factory(value: Any) -> Unencodable:
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return Unencodable(
        f"a defaultdict whose factory is {name!s}",
        hint="Use a built-in type (list, dict, set, int, ...) or a registered class as its factory, or save dict(...).",
    )


def zone(value: Any) -> Unencodable:
    return Unencodable(
        f"a time zone of type {_qualified(type(value))}",
        hint="Use zoneinfo.ZoneInfo(name) or datetime.timezone, such as when.astimezone(ZoneInfo('Europe/Lisbon')).",
    )


def array(reason: str, hint: str) -> Unencodable:
    return Unencodable(reason, hint=hint)


def unknown(value: Any, option: str) -> Unencodable:
    """The refusal of a value whose type nobody knows. ``option`` is what the program can pass to make it known."""
    kind = type(value)
    name = _qualified(kind)
    register = f"Decorate the class with @holdfast.register, or pass {option}."
    if isinstance(value, type):
        return Unencodable(f"the class {_qualified(value)} itself", hint="Save its name, or an instance of it.")
    if kind.__module__ in {"builtins", "functools", "re", "types", "array", "weakref", "asyncio", "_asyncio"} or (
        kind.__module__.startswith("concurrent.")
    ):
        known = _KNOWN.get(kind.__name__)
        if known is not None:
            return Unencodable(f"{known[0]} cannot be saved", hint=known[1])
    if kind.__module__ in {"_io", "io", "tempfile"}:
        return Unencodable(f"an open file ({name})", hint="Save its path and position, and open it again when loading.")
    if kind.__name__ in _HANDLES and kind.__module__.split(".")[0] in {
        "_thread", "threading", "multiprocessing", "socket", "subprocess", "asyncio", "queue", "_queue",
    }:  # fmt: skip
        return Unencodable(
            f"a {name} belongs to this process", hint="Leave it out, and make a new one when loading (save=, load=)."
        )
    enum = sys.modules.get("enum")
    if enum is not None and isinstance(value, enum.Enum):
        return Unencodable(f"the enum {name} is not registered", hint=register)
    for base, text in _BUILTIN_SUBCLASS:
        if isinstance(value, base):
            if hasattr(kind, "_fields") and base is tuple:
                return Unencodable(f"the named tuple {name} is not registered", hint=register)
            return Unencodable(
                f"{name} is a subclass of {text}",
                hint=f"Convert it with {text}(...), or register it with save= and load=.",
            )
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return Unencodable(f"{name} is a subclass of numpy.ndarray", hint="Convert it with numpy.asarray(...).")
    if isinstance(value, BaseException):
        return Unencodable(f"the exception {name}", hint="Save its text, or register the class with save= and load=.")
    return Unencodable(f"the type {name} is not registered", hint=register)


def _qualified(kind: type) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
