"""Exceptions as values, and back.

Owns what is kept of an exception that a tool declared, and how it is made again. Must not know records or runs. What
always holds: an exception is made of a class that the program has, one that was declared or one derived from it, found
among those that are loaded; nothing is imported, and no constructor runs: what it had set up is among the attributes.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from holdfast.errors import HoldfastError

Keep = Callable[[Any], Any]
"""A value as it may be recorded. Raises where it may not, or cannot."""

_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code has made
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)


def said(error: BaseException) -> str:
    """What an exception says, without a hint."""
    return _text(error.message if isinstance(error, HoldfastError) and error.message else error)


def told(error: BaseException) -> str:
    """Its type and all that it says."""
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(thing: Any) -> str:
    """As ``str()``, which may raise for a class that somebody else has written."""
    try:
        return str(thing)
    except Exception:  # noqa: BLE001 - as Python shows it in a traceback
        return "<exception str() failed>"


# -- taking it apart ------------------------------------------------------------------------------------------


def parts_of(error: BaseException, keep: Keep) -> dict[str, Any]:
    """What is kept of an exception: its arguments, its attributes, and the members of a group.

    What cannot be kept is left out.
    """
    parts: dict[str, Any] = {"module": type(error).__module__}
    if isinstance(error, BaseExceptionGroup):
        parts["args"] = (keep(error.message),)
        parts["members"] = [[type(one).__qualname__, keep(said(one)), parts_of(one, keep)] for one in error.exceptions]
    else:
        try:
            parts["args"] = keep(error.args)
        except Exception:  # noqa: BLE001 - whatever the reason, there is the text
            parts["args"] = (keep(said(error)),)
    attributes = {}
    for name, value in _attributes(error):
        try:
            attributes[name] = keep(value)
        except Exception:  # noqa: BLE001, S112 - it is left out
            continue
    if attributes:
        parts["attributes"] = attributes
    return parts


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    yield from vars(error).items()
    for name, slot in _slots(type(error)).items():
        try:
            value = slot.__get__(error)
        except AttributeError:
            continue
        if value is not None:
            yield name, value


def _slots(kind: type[BaseException]) -> dict[str, Any]:
    """Attributes that are not in an instance's dict: those of built-in classes, and ``__slots__``."""
    found: dict[str, Any] = {}
    for one in kind.__mro__:
        if one is not BaseException:
            for name, slot in vars(one).items():
                if isinstance(slot, _SLOTS) and not name.startswith("__"):
                    found.setdefault(name, slot)
    return found


# -- putting it together ----------------------------------------------------------------------------------------


def made(kind: type[BaseException], parts: Any, message: str, member: Callable[..., BaseException]) -> BaseException:
    """An exception of this class, from its parts. ``member(type, message, parts)`` makes those of a group."""
    if not isinstance(parts, dict):  # before attributes were kept: the arguments alone
        return _from_arguments(kind, parts if isinstance(parts, tuple) else (message,))
    args = parts["args"]
    error = _new(kind, (args[0], [member(*one) for one in parts["members"]]) if "members" in parts else args)
    slots = _slots(kind)
    for name, value in parts.get("attributes", {}).items():
        if name not in slots:
            error.__dict__[name] = value
            continue
        try:
            slots[name].__set__(error, value)
        except (AttributeError, TypeError):  # one that follows from the arguments
            continue
    return error


def _from_arguments(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    try:
        return kind(*args)
    except Exception:  # noqa: BLE001 - its constructor wants something else than what ends up in `args`
        return _new(kind, args)


def _new(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An instance whose constructor has not run."""
    for one in kind.__mro__:
        if one.__flags__ & _HEAP or not issubclass(one, BaseException):
            continue
        try:
            error = one.__new__(kind, *args)
        except TypeError:  # another base has fields of its own, so it has to begin with that one
            continue
        if not isinstance(error, BaseExceptionGroup):
            error.args = args
        return error
    raise TypeError(f"no {kind.__qualname__} can be made of {len(args)} arguments")


# -- which class ------------------------------------------------------------------------------------------------


def class_of(known: type[BaseException], name: str, parts: Any) -> type[BaseException]:
    """The class of that name among a declared one and those derived from it; the declared one when there is none."""
    if known.__qualname__ == name:
        return known
    found = [one for one in _derived(known) if one.__qualname__ == name]
    same = [one for one in found if isinstance(parts, dict) and one.__module__ == parts["module"]]
    if same or len(found) == 1:
        return (same or found)[-1]  # the newest, where a module was loaded again
    return known


def builtin(name: str) -> type[BaseException] | None:
    """The exception that Python itself calls so."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def named(kind: type[BaseException], among: Sequence[type[BaseException]]) -> str:
    """What one of the declared classes is called in a record."""
    same = {other for other in among if other.__qualname__ == kind.__qualname__}
    return kind.__qualname__ if len(same) == 1 else f"{kind.__module__}.{kind.__qualname__}"


def _derived(kind: type[BaseException]) -> Iterable[type[BaseException]]:
    for one in kind.__subclasses__():
        yield one
        yield from _derived(one)
