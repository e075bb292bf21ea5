"""How objects of known types become nodes: containers, texts, numbers, exceptions, functions, dates, paths, arrays.

Must not know files or frames. Holds always: a value is read by its built-in ancestor's own methods, whatever its class
overrides; a reader for a library's type is called only for exactly that type, and uses only C functions of it.
None of these libraries is imported.
"""

from __future__ import annotations

import posixpath
import types
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast.crash import kinds
from holdfast.crash.limits import ENTRY_COST, MAX_NAME
from holdfast.crash.secrets import text_of_leaf, uuid_text
from holdfast.crash.shapes import Layout, exact_text, first_items, frame_locals, layout_of, type_name

if TYPE_CHECKING:
    from holdfast.crash.walk import Walker


# -- built-in types and their subclasses -----------------------------------------------------------------------------


def read_dict(walker: Walker, value: Any, layout: Layout) -> list[Any]:
    total = dict.__len__(value)
    out = walker.dict_items(value)
    shown = total if total * 2 > len(out) else None
    return [kinds.DICT, walker.type_number(layout.name), out, shown, walker.attributes(value, layout)]


def read_sequence(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    total = base.__len__(value)
    shown = base.__getitem__(value, slice(0, walker.items))
    if layout.fields and len(layout.fields) == total:
        items = walker.pairs(zip(layout.fields, shown, strict=False))
        return [kinds.OBJECT, walker.type_number(layout.name), items]
    items = [walker.entry(item) for item in shown]
    walker.spend(len(items) * ENTRY_COST)
    total = total if total > len(items) else None
    return [kinds.LIST, walker.type_number(layout.name), items, total, walker.attributes(value, layout)]


def read_collection(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    total = base.__len__(value)
    try:
        shown = list(islice(base.__iter__(value), walker.items))
    except RuntimeError:  # changed by another thread
        shown = []
    items = [walker.entry(item) for item in shown]
    walker.spend(len(items) * ENTRY_COST)
    total = total if total > len(items) else None
    return [kinds.LIST, walker.type_number(layout.name), items, total, walker.attributes(value, layout)]


def read_text(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    total = base.__len__(value)
    limit = walker.limits.text_chars
    number = walker.type_number(layout.name)
    if walker.hide:
        walker.redactor.learn(text_of_leaf(value))
        return walker.cut(value, kinds.REDACTED)
    shown: Any
    if base is str:
        shown = base.__getitem__(value, slice(0, limit + 20_000 if total > limit else limit))
        shown = shown[: walker.redactor.safe_cut(shown, limit)] if total > limit else shown
    else:
        shown = bytes(base.__getitem__(value, slice(0, limit + 20_000 if total > limit else limit)))
        if total > limit:
            shown = shown[: walker.redactor.safe_cut(shown.decode("latin-1"), limit)]
    walker.spend(len(shown))
    node = [kinds.TEXT, number, shown, total if total > len(shown) else None]
    attributes = walker.attributes(value, layout) if layout.cls is not base else []
    return [*node, attributes] if attributes else node[: 3 if node[3] is None else 4]


def read_number(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    if walker.hide:
        walker.redactor.learn(text_of_leaf(value))
        return walker.cut(value, kinds.REDACTED)
    plain = base.__pos__(value) if base is not int else int.__index__(value)
    if base is int and plain.bit_length() > 4096:
        text = f"an integer of {plain.bit_length()} bits"
    else:
        text = base.__repr__(plain) if base is not int or plain.bit_length() < 64 else hex(plain)
    return [kinds.LITERAL, walker.type_number(layout.name), text]


def read_enum(walker: Walker, value: Any, layout: Layout) -> list[Any]:
    own = layout.instance_dict(value)
    pairs = first_items(own, 50) if own is not None else []
    name = next((item for key, item in pairs if type(key) is str and key == "_name_"), None)
    if type(name) is not str:
        return walker.as_object(value, layout)
    return [kinds.LITERAL, walker.type_number(layout.name), name[:MAX_NAME]]


def read_exception(walker: Walker, value: Any, layout: Layout) -> list[Any]:
    read = BaseException.__dict__
    named = [(name, read[name].__get__(value)) for name in ("args", "__cause__", "__context__")]
    own, _total = layout.attributes(value, walker.items)
    named += [pair for pair in own if pair[0] not in ("args", "characters_written")]
    return [kinds.OBJECT, walker.type_number(layout.name), walker.pairs(pair for pair in named if pair[1] is not None)]


# -- types whose slots say little ------------------------------------------------------------------------------------


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


BY_TYPE: list[tuple[type, Callable[[Walker, Any], list[Any]]]] = [
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
"""Readers for the interpreter's own types: functions, coroutines."""
EXACT: dict[str, Callable[[Walker, Any], list[Any]]] = {
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
"""Readers for types of libraries, by name; used only when the type is exactly that one."""
