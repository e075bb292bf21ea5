"""Readers for types whose slots say little: functions, coroutines, dates, paths, NumPy arrays.

Must not know files or frames. Holds always: a reader is called only for exactly its type, and uses only C functions of
that type on it. Importing this module registers the readers; it imports none of these libraries.
"""

from __future__ import annotations

import posixpath
import types
from typing import Any

from holdfast.crash import kinds
from holdfast.crash.limits import MAX_NAME
from holdfast.crash.secrets import uuid_text
from holdfast.crash.shapes import exact_text, frame_locals, layout_of, type_name
from holdfast.crash.walk import BY_TYPE, EXACT, Walker

_MAX_DIMENSIONS = 64
_PREVIEW = 32  # elements of an array


def _literal(walker: Walker, value: Any, text: str) -> list[Any]:
    if walker.hide:
        walker.redactor.learn(text)
        return walker.cut(value, kinds.REDACTED)
    walker.spend(len(text))
    return [kinds.LITERAL, walker.type_number(layout_of(type(value)).name), text]


def _decimal(walker: Walker, value: Any) -> list[Any]:
    return _literal(walker, value, str(value)[:1000])


def _moment(walker: Walker, value: Any) -> list[Any]:
    """A datetime or time: its zone may be the program's own, so only its fields are read."""
    zone = value.tzinfo
    text = type(value).isoformat(value.replace(tzinfo=None))
    if zone is not None:
        kind = type_name(type(zone))
        if kind == "datetime.timezone":
            text += f" UTC{type(zone).utcoffset(zone, None).total_seconds() / 3600:+g}h"
        else:
            own = [item for name, item in layout_of(type(zone)).attributes(zone, 20)[0] if name == "key"]
            key = zone.key if kind == "zoneinfo.ZoneInfo" else (own or [None])[0]
            text += f" {key if type(key) is str else kind}"
    return _literal(walker, value, text)


def _plain_moment(walker: Walker, value: Any) -> list[Any]:
    return _literal(walker, value, str(value))


def _uuid(walker: Walker, value: Any) -> list[Any]:
    text = uuid_text(value)
    return walker.as_object(value, layout_of(type(value))) if text is None else _literal(walker, value, text)


def _path(walker: Walker, value: Any) -> list[Any]:
    """From what a path has cached, without filling its caches."""
    slots = dict(layout_of(type(value)).attributes(value, 20)[0])
    text = slots.get("_str")
    if type(text) is not str:
        pieces = slots.get("_raw_paths") or slots.get("_parts")
        if type(pieces) is not list or not all(type(piece) is str for piece in pieces):
            return walker.as_object(value, layout_of(type(value)))
        text = posixpath.join("", *pieces)
        text = text.rstrip("/") or ("/" if text else ".")
    return _literal(walker, value, text[:4096])


def _pattern(walker: Walker, value: Any) -> list[Any]:
    source = value.pattern
    return _literal(walker, value, source[:4096] if type(source) is str else "?")


def _array(walker: Walker, value: Any) -> list[Any]:
    """Shape and type always; the first elements only of memory that the array owns, which cannot vanish."""
    dtype = value.dtype
    owner = value
    while type(owner.base) is type(value):
        owner = owner.base
    entries: list[Any] = []
    if owner.flags.owndata and dtype.kind in "biufcSUO" and value.size and not walker.hide:
        elements = value.flat[:_PREVIEW].tolist()
        if dtype.kind in "ui" and dtype.itemsize == 1:
            elements = [bytes(item & 255 for item in elements)]  # as bytes, so that the gate can read it
        if dtype.kind == "c":
            elements = [repr(item) for item in elements]
        entries = [walker.entry(item) for item in elements]
    walker.spend(8 * len(entries) + 16)
    shape = [int(length) for length in value.shape[:_MAX_DIMENSIONS]]
    number = walker.type_number(layout_of(type(value)).name)
    return [kinds.ARRAY, number, dtype.str, shape, value.nbytes, entries]


def _lock(walker: Walker, value: Any) -> list[Any]:
    return _literal(walker, value, "locked" if value.locked() else "unlocked")


def _weakref(walker: Walker, value: Any) -> list[Any]:
    target = value()
    named = [("<referent>", target)] if target is not None else []
    return [kinds.OBJECT, walker.type_number("weakref"), walker.pairs(named)]


def _partial(walker: Walker, value: Any) -> list[Any]:
    named = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    return [kinds.OBJECT, walker.type_number("functools.partial"), walker.pairs(named)]


def _function(walker: Walker, value: Any) -> list[Any]:
    return _callable_of(walker, value, value.__code__, exact_text(value.__qualname__, MAX_NAME), None)


def _code(walker: Walker, value: Any) -> list[Any]:
    return _callable_of(walker, value, value, exact_text(value.co_name, MAX_NAME), None)


def _callable_of(walker: Walker, value: Any, code: types.CodeType, name: str, line: int | None) -> list[Any]:
    file = exact_text(code.co_filename, MAX_NAME)
    walker.spend(len(file) + len(name))
    number = walker.type_number(layout_of(type(value)).name)
    return [kinds.CALLABLE, number, name, file, line or code.co_firstlineno, []]


def _method(walker: Walker, value: Any) -> list[Any]:
    function = value.__func__
    attributes = walker.pairs([("__self__", value.__self__)])
    if type(function) is types.FunctionType:
        code = function.__code__
        name = exact_text(function.__qualname__, MAX_NAME)
        file, line = exact_text(code.co_filename, MAX_NAME), code.co_firstlineno
        return [kinds.CALLABLE, walker.type_number("method"), name, file, line, attributes]
    return [kinds.CALLABLE, walker.type_number("method"), "?", "", 0, attributes]


def _builtin(walker: Walker, value: Any) -> list[Any]:
    owner = value.__self__
    attributes = [] if type(owner) is types.ModuleType or owner is None else walker.pairs([("__self__", owner)])
    name = exact_text(value.__name__, MAX_NAME)
    return [kinds.CALLABLE, walker.type_number("builtin_function_or_method"), name, "", 0, attributes]


def _cell(walker: Walker, value: Any) -> list[Any]:
    try:
        named = [("cell_contents", value.cell_contents)]
    except ValueError:
        named = []
    return [kinds.OBJECT, walker.type_number("cell"), walker.pairs(named)]


def _suspended(walker: Walker, value: Any, prefix: str) -> list[Any]:
    """A coroutine or generator: where it stands, and its locals."""
    layout = layout_of(type(value))
    frame = getattr(value, prefix + "_frame")
    code = getattr(value, prefix + "_code")
    running = getattr(value, prefix + "_running")
    state = "running" if running else "finished" if frame is None else "suspended"
    found = frame_locals(frame, walker.items) if frame is not None else None
    line = frame.f_lineno if frame is not None else code.co_firstlineno
    name, file = exact_text(value.__qualname__, MAX_NAME), exact_text(code.co_filename, MAX_NAME)
    named = walker.pairs(found[0]) if found else []
    awaited = getattr(value, prefix + "_await", None) if prefix != "gi" else value.gi_yieldfrom
    if awaited is not None:
        named += ["<awaits>", walker.entry(awaited)]
    return [kinds.SUSPENDED, walker.type_number(layout.name), name, file, line or 0, state, named]


BY_TYPE += [
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (types.BuiltinFunctionType, _builtin),
    (types.CodeType, _code),
    (types.CoroutineType, lambda walker, value: _suspended(walker, value, "cr")),
    (types.GeneratorType, lambda walker, value: _suspended(walker, value, "gi")),
    (types.AsyncGeneratorType, lambda walker, value: _suspended(walker, value, "ag")),
    (types.FrameType, lambda walker, value: _callable_of(walker, value, value.f_code, "frame", value.f_lineno)),
    (types.CellType, _cell),
]
EXACT.update(
    {
        "decimal.Decimal": _decimal,
        "datetime.datetime": _moment,
        "datetime.time": _moment,
        "datetime.date": _plain_moment,
        "datetime.timedelta": _plain_moment,
        "uuid.UUID": _uuid,
        "pathlib.PosixPath": _path,
        "pathlib.PurePosixPath": _path,
        "pathlib._local.PosixPath": _path,
        "pathlib._local.PurePosixPath": _path,
        "re.Pattern": _pattern,
        "numpy.ndarray": _array,
        "_thread.lock": _lock,
        "weakref.ReferenceType": _weakref,
        "functools.partial": _partial,
    }
)
