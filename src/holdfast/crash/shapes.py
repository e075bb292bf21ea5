"""What an object consists of, learnt without running any of its code, and how it becomes a node of a dump.

Owns the ways past overridden attributes: the interpreter's own descriptors, called directly. Must not know budgets,
files, frames or redaction. Holds always: no attribute of a user's object or class is looked up by name through it;
types and values are neither hashed nor compared; a value is read by its built-in ancestor's own methods, whatever its
class overrides; a reader for a library's type is called only for exactly that type, uses only C functions of it, and
imports none; what cannot be read so is left out.
"""

from __future__ import annotations

import _thread
import gc
import posixpath
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast.crash import kinds
from holdfast.crash.kinds import ENTRY_COST, MAX_NAME

if TYPE_CHECKING:
    from holdfast.crash.walk import Walker


_MRO = type.__dict__["__mro__"].__get__
_TYPE_DICT = type.__dict__["__dict__"].__get__
_TYPE_NAME = type.__dict__["__name__"].__get__
_QUALNAME = type.__dict__["__qualname__"].__get__
_TYPE_MODULE = type.__dict__["__module__"].__get__
_DICT_OFFSET = type.__dict__["__dictoffset__"].__get__
_FLAGS = type.__dict__["__flags__"].__get__
_HEAP_TYPE = 1 << 9
_GETSET = types.GetSetDescriptorType
_MEMBER = types.MemberDescriptorType
_PROXY_ITEMS = types.MappingProxyType.items
_OPTIMIZED = 0x1  # CO_OPTIMIZED: a function, whose locals are not a namespace of the program's choice
_MAX_CLASS_ITEMS = 2_000
_MISSING = object()

# Slots that only repeat what is shown anyway, or lead out of the program's own values.
_DULL_SLOTS = frozenset(("__weakref__", "__dict__", "__module__", "__doc__", "__isabstractmethod__"))


class Layout:
    """How instances of one type are read: their name, their built-in ancestor, their dictionary and slots."""

    __slots__ = ("base", "cls", "dictionary", "enum", "fields", "name", "offset", "slots")

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = type_name(cls)
        self.base: type = object
        self.dictionary: Any = None  # the getset that gives an instance's __dict__
        self.offset = _DICT_OFFSET(cls) != 0
        self.slots: list[tuple[str, Any]] = []
        self.fields: tuple[str, ...] = ()  # of a named tuple
        self.enum = type(cls) is sys.modules["enum"].EnumType if "enum" in sys.modules else False
        seen = set()
        for ancestor in _MRO(cls):
            if ancestor is object:
                continue
            if self.base is object and any(ancestor is known for known in BASES):
                self.base = ancestor
            for key, value in islice(_PROXY_ITEMS(_TYPE_DICT(ancestor)), _MAX_CLASS_ITEMS):
                if type(key) is not str:
                    continue
                kind = type(value)
                if kind is _GETSET and key == "__dict__" and self.dictionary is None:
                    self.dictionary = value
                elif kind is _MEMBER and key not in _DULL_SLOTS and key not in seen:
                    seen.add(key)
                    self.slots.append((key, value))
                elif kind is tuple and key == "_fields" and not self.fields:
                    self.fields = tuple(str.__str__(item) for item in value if type(item) is str)

    def attributes(self, instance: object, limit: int) -> tuple[list[tuple[str, Any]], int]:
        """Names and values of an instance, and how many there are in all."""
        found: list[tuple[str, Any]] = []
        total = 0
        own = self.instance_dict(instance)
        if own is not None:
            total = dict.__len__(own)
            found = [(name, value) for name, value in first_items(own, limit) if type(name) is str]
        for name, slot in self.slots:
            try:
                found.append((name, _MEMBER.__get__(slot, instance, self.cls)))
            except (AttributeError, TypeError, SystemError):
                continue
            total += 1
        return found, total

    def instance_dict(self, instance: object) -> dict[Any, Any] | None:
        if self.dictionary is None:
            # Some C types hold a dictionary without showing it; their subclasses' attributes are in it.
            if self.offset and sys.version_info >= (3, 14):
                return _unshown_dict(instance)
            held = [item for item in gc.get_referents(instance) if type(item) is dict] if self.offset else []
            return held[0] if len(held) == 1 else None
        try:
            own = _GETSET.__get__(self.dictionary, instance, self.cls)
        except (AttributeError, TypeError, SystemError):
            return None
        return own if type(own) is dict else None


# Built-in types whose content is read by their own methods, also in subclasses. Filled by collections below.
BASES: list[type] = [dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException]


def _unshown_dict(instance: object) -> dict[Any, Any] | None:
    """Since 3.14 its items lie in the object itself, and only the interpreter's own function finds them there."""
    try:
        import ctypes

        # By its address, because ctypes would ask an object for attributes.
        kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
        own = kind(("PyObject_GenericGetDict", ctypes.pythonapi))(id(instance), None)
    except (ImportError, AttributeError, TypeError, SystemError):
        return None
    return own if type(own) is dict else None


_layouts: dict[int, Layout] = {}
_MAX_LAYOUTS = 50_000


def layout_of(cls: type) -> Layout:
    """The type's layout, remembered by the type's identity (the layout holds the type, so it stays that type's)."""
    layout = _layouts.get(id(cls))
    if layout is None:
        if len(_layouts) > _MAX_LAYOUTS:
            _layouts.clear()
        layout = _layouts[id(cls)] = Layout(cls)
    return layout


def forget_layouts() -> None:
    """After a capture: remembered types would never be freed."""
    _layouts.clear()


def type_name(cls: type) -> str:
    """``package.module.Outer.Inner``; builtins without their module."""
    try:
        name = _QUALNAME(cls)
    except (AttributeError, TypeError):
        name = _TYPE_NAME(cls)
    try:
        module = _TYPE_MODULE(cls)
    except (AttributeError, TypeError):
        module = None
    name = exact_text(name, MAX_NAME) or "?"
    if type(module) is not str or module == "builtins":
        return name
    return f"{module[:MAX_NAME]}.{name}"


def exact_text(value: object, limit: int) -> str:
    """The value if it is a text, of exactly that type and not longer than the limit; otherwise an empty one."""
    return str.__getitem__(value, slice(0, limit)) if type(value) is str else ""


def first_items(mapping: dict[Any, Any], limit: int) -> list[tuple[Any, Any]]:
    """The first items, taken in one step so that no other thread can change the dictionary meanwhile."""
    for _ in range(3):
        try:
            return list(islice(dict.items(mapping), limit))
        except RuntimeError:  # it changed all the same: a free-threaded interpreter
            continue
    return []


def find(mapping: dict[Any, Any], name: str, limit: int = 500) -> Any:
    """The value under a text key, found by going through the keys: a look-up could compare with a user's key."""
    for key, value in first_items(mapping, limit):
        if type(key) is str and key == name:
            return value
    return None


def overrides(cls: type, name: str, ancestor: type) -> bool:
    """Whether the class, or one between it and the ancestor, has a definition of its own."""
    for between in _MRO(cls):
        if between is ancestor:
            return False
        for key in islice(types.MappingProxyType.keys(_TYPE_DICT(between)), _MAX_CLASS_ITEMS):
            if type(key) is str and key == name:
                return True
    return False


def in_class(cls: type, name: str, missing: Any) -> Any:
    """What the class, or its nearest ancestor, has under a name, as it stands there."""
    for ancestor in _MRO(cls):
        for key, value in islice(_PROXY_ITEMS(_TYPE_DICT(ancestor)), _MAX_CLASS_ITEMS):
            if type(key) is str and key == name:
                return value
    return missing


def is_subtype(cls: type, ancestor: type) -> bool:
    """As ``issubclass``, without asking a metaclass."""
    return any(base is ancestor for base in _MRO(cls))


def is_builtin(cls: type) -> bool:
    """Whether it is a type of the interpreter or of an extension, which no `class` statement made."""
    return not _FLAGS(cls) & _HEAP_TYPE


def is_genuine(cls: type, name: str) -> bool:
    """Whether the class is the one that its module holds under that name, and not one that only calls itself so."""
    if name == "_thread.lock":
        return cls is _LOCK
    module, _, attribute = name.rpartition(".")
    loaded = sys.modules.get(module)
    if type(loaded) is not types.ModuleType:
        return False
    return next((value for key, value in loaded.__dict__.items() if type(key) is str and key == attribute), None) is cls


def frame_locals(frame: types.FrameType, limit: int) -> tuple[list[tuple[str, Any]], int] | None:
    """Names and values of a frame's locals; None where reading them would run the program's code."""
    code = frame.f_code
    if not code.co_flags & _OPTIMIZED and code.co_cellvars and sys.version_info < (3, 13):
        # Reading f_locals would write cells into the namespace of a class body, which may be of the program's making.
        namespace = _class_namespace(frame)
    else:
        namespace = frame.f_locals
        if type(namespace) is not dict:
            if sys.version_info >= (3, 13) and code.co_flags & _OPTIMIZED:
                namespace = dict(namespace)  # a proxy of the interpreter
            elif is_subtype(type(namespace), dict):
                return _texts(list(islice(dict.items(namespace), limit))), dict.__len__(namespace)
            else:
                return None
    if namespace is None:
        return None
    return _texts(first_items(namespace, limit)), dict.__len__(namespace)


def _class_namespace(frame: types.FrameType) -> dict[Any, Any] | None:
    for held in gc.get_referents(frame):
        if type(held) is dict and held is not frame.f_globals and held is not frame.f_builtins:
            first = next(iter(held), None)
            if type(first) is str and first == "__module__":
                return held
    return frame.f_globals if frame.f_code.co_name == "<module>" else None


def _texts(items: list[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in items if type(name) is str]


def weak_members(weakset: object) -> Iterator[Any]:
    """The living members of a WeakSet, without its own code, which may be stopped half-way in this very moment."""
    own = layout_of(type(weakset)).instance_dict(weakset)
    data = find(own, "data") if own is not None else None
    for reference in list(data) if type(data) is set else ():
        member = reference() if type(reference) is _REF else None
        if member is not None:
            yield member


_LOCK = type(_thread.allocate_lock())
_REF = type(__import__("weakref").ref(Layout))


def text_of_leaf(value: Any) -> str:
    """What a value without parts looks like in a text; empty for everything else."""
    kind = type(value)
    base: Any = layout_of(kind).base
    if base is str:
        return str.__getitem__(value, slice(0, 20_000))
    if base is bytes or base is bytearray:
        return bytes(base.__getitem__(value, slice(0, 20_000))).decode("utf-8", "replace")
    if base is int and kind is not bool:
        plain = int.__index__(value)
        return str(plain) if plain.bit_length() < 4096 else ""
    if base is float:
        return float.__repr__(value)
    if base is object and is_genuine(kind, "decimal.Decimal"):
        return str(value)
    if base is object and is_genuine(kind, "uuid.UUID"):
        return uuid_text(value) or ""
    return ""


def uuid_text(value: Any) -> str | None:
    """A UUID as it is written; None when it is broken."""
    number = dict(layout_of(type(value)).attributes(value, 20)[0]).get("int")
    if type(number) is not int or not 0 <= number < 2**128:
        return None
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


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
    return _listed(walker, value, layout, shown, total)


def read_collection(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    total = base.__len__(value)
    try:
        shown = list(islice(base.__iter__(value), walker.items))
    except RuntimeError:  # changed by another thread
        shown = []
    return _listed(walker, value, layout, shown, total)


def _listed(walker: Walker, value: Any, layout: Layout, shown: Sequence[Any], total: int) -> list[Any]:
    items = [walker.entry(item) for item in shown]
    walker.spend(len(items) * ENTRY_COST)
    left_out = total if total > len(items) else None
    return [kinds.LIST, walker.type_number(layout.name), items, left_out, walker.attributes(value, layout)]


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
