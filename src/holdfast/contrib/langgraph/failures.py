"""Exceptions, which LangGraph records when a task fails.

Owns how an exception becomes a value and comes back. Must not know which classes a store allows.
Holds always: recording an error never fails for want of a known type, because that would hide the error; loading runs
no code of the exception's class; what cannot come back says so by its type (``Failure``, ``Unsaved``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from holdfast.codec.shapes import shape_of
from holdfast.codec.values import encode
from holdfast.errors import BadOption, Unencodable

if TYPE_CHECKING:
    from holdfast.codec.types import Registry

MAX_TEXT_CHARS = 10_000
"""The longest text of an exception, or of an argument that is not saved: some carry whole responses."""

MAX_CHAIN = 8
"""How far exceptions inside one another (causes, groups) are kept as exceptions; what lies deeper is kept as text."""

_HEAP_TYPE = 1 << 9
_BUILTIN_NEW = type(object.__new__)
_CAUSE: Any = vars(BaseException)["__cause__"]
_SCALARS = frozenset({type(None), bool, float, str, bytes})

# What some built-in exceptions keep beside their arguments and their __dict__.
_NATIVE: tuple[tuple[type[BaseException], tuple[str, ...]], ...] = (
    (ImportError, ("name", "path")),
    (NameError, ("name",)),
    (AttributeError, ("name",)),
    (OSError, ("characters_written",)),
)


class Failure(RuntimeError):
    """An exception whose class this program has not allowed: the name of its type, and its text."""

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(type_name, text)

    @property
    def type_name(self) -> str:
        return str(self.args[0])

    @property
    def text(self) -> str:
        return str(self.args[1])

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}" if self.text else self.type_name


@dataclass(frozen=True)
class Unsaved:
    """Stands where an exception had an argument or attribute that cannot be saved."""

    type_name: str
    text: str

    def __repr__(self) -> str:
        return self.text


def failure_of(error: BaseException) -> Failure:
    """The exception as its type name and text, which can always be saved."""
    if type(error) is Failure:
        return error
    failure = Failure(_name(type(error)), _text(str, error))
    notes = getattr(error, "__notes__", None)
    for note in notes if isinstance(notes, list) else ():
        failure.add_note(_text(str, note))
    return failure


def save_failure(error: BaseException) -> list[Any]:
    failure = failure_of(error)
    return [failure.type_name, failure.text, list(getattr(failure, "__notes__", ()))]


def load_failure(saved: Any) -> Failure:
    type_name, text, notes = saved
    if not all(type(part) is str for part in (type_name, text, *notes)):
        raise ValueError("a failure is a type name, a text and notes")
    failure = Failure(type_name, text)
    for note in notes:
        failure.add_note(note)
    return failure


def conversion(cls: type[BaseException], registry: Registry) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What saves and loads exceptions of this class: arguments, attributes, notes and cause, but no traceback."""
    if cls is Failure:
        return save_failure, load_failure
    base = native_base(cls)
    shape = shape_of(cls)
    natives = {name: vars(owner)[name] for owner, names in _NATIVE if issubclass(cls, owner) for name in names}

    def save(error: BaseException) -> dict[str, Any]:
        # What an OSError was given as a file name is not among its arguments any more.
        args = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args
        with _Saving(error, registry) as saving:
            saved: dict[str, Any] = {"args": [saving.part(item) for item in args]}
            for name, place in natives.items():
                with suppress(AttributeError):
                    item = place.__get__(error)
                    if item is not None:
                        saved.setdefault("native", {})[name] = saving.part(item)
            attributes = shape.take(error)
            if attributes:
                saved["attributes"] = {str(name): saving.part(item) for name, item in attributes.items()}
            if error.__cause__ is not None:
                saved["cause"] = saving.part(error.__cause__)
        return saved

    def load(saved: Any) -> BaseException:
        args, native, attributes, cause = _checked(saved)
        error: BaseException = base.__new__(cls, *args)
        base.__init__(error, *args)
        for name, item in native.items():
            natives[name].__set__(error, item)
        shape.put(error, attributes)
        if cause is not None:
            _CAUSE.__set__(error, cause)
        return error

    return save, load


def _checked(saved: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any], BaseException | None]:
    if type(saved) is not dict or not saved.keys() <= {"args", "native", "attributes", "cause"}:
        raise ValueError("an exception is its arguments, attributes and cause")
    args, cause = saved.get("args"), saved.get("cause")
    native, attributes = saved.get("native", {}), saved.get("attributes", {})
    if type(args) is not list or not (cause is None or isinstance(cause, BaseException)):
        raise ValueError("an exception's arguments are a list, its cause is an exception")
    for part in (native, attributes):
        if type(part) is not dict or not all(type(name) is str for name in part):
            raise ValueError("an exception's attributes are a map of names")
    return args, native, attributes, cause


def native_base(cls: type[BaseException]) -> type[BaseException]:
    """The built-in class that the instances' memory is laid out by; it makes them without any code of the class."""
    base: Any = cls
    while base.__flags__ & _HEAP_TYPE:
        if type(vars(base).get("__new__")) is _BUILTIN_NEW and base.__module__ != "builtins":
            raise BadOption(
                f"{cls.__qualname__} cannot be saved by its attributes: it builds on {_name(base)}",
                hint="Register it with save= (instance to a plain value) and load= (plain value to instance).",
            )
        base = base.__base__
    native: type[BaseException] = base
    return native


class _Open(threading.local):
    """Exceptions that this thread is saving, by id."""

    def __init__(self) -> None:
        self.errors: set[int] = set()


_OPEN = _Open()


class _Saving:
    """Chooses, for each part of one exception, between the part itself and what can be said about it."""

    def __init__(self, error: BaseException, registry: Registry) -> None:
        self._error = error
        self._registry = registry

    def __enter__(self) -> Self:
        if id(self._error) in _OPEN.errors:
            raise ValueError("the exception contains itself")
        _OPEN.errors.add(id(self._error))
        return self

    def __exit__(self, *_: object) -> None:
        _OPEN.errors.discard(id(self._error))

    def part(self, item: Any, depth: int = 0) -> Any:
        kind = type(item)
        if kind in _SCALARS:
            return item
        if isinstance(item, BaseException):
            return failure_of(item) if _is_deep(item, (id(self._error),)) else item
        if kind is list and depth < MAX_CHAIN:
            return [self.part(inner, depth + 1) for inner in item]
        if kind is tuple and depth < MAX_CHAIN:
            return tuple(self.part(inner, depth + 1) for inner in item)
        try:
            encode(item, self._registry)
        except (Unencodable, RecursionError):
            return Unsaved(_name(kind), _text(repr, item))
        return item


def _is_deep(error: BaseException, path: tuple[int, ...]) -> bool:
    """Whether exceptions inside this one lead back to one of the path, or too far."""
    if id(error) in path or len(path) >= MAX_CHAIN:
        return True
    return any(_is_deep(inner, (*path, id(error))) for inner in _inner(error))


def _inner(error: BaseException) -> Iterator[BaseException]:
    for item in (*error.args, *shape_of(type(error)).take(error).values(), error.__cause__):
        if isinstance(item, BaseException):
            yield item
        elif type(item) is list or type(item) is tuple:
            yield from (inner for inner in item if isinstance(inner, BaseException))


def _text(show: Callable[[Any], str], value: Any) -> str:
    try:
        text = str.__str__(show(value))
    except Exception as error:  # noqa: BLE001 - code of a foreign class, and the reason to save must not get lost
        return f"<no text: {type(error).__name__}>"
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}... ({len(text):,} characters)"


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
