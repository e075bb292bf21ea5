"""What an object consists of, learnt without running any of its code.

Owns the ways past overridden attributes: the interpreter's own descriptors, called directly. Must not know budgets,
dumps or redaction. Holds always: no attribute of a user's object or class is looked up by name through it; types and
values are neither hashed nor compared; what cannot be read so is left out.
"""

from __future__ import annotations

import _thread
import gc
import sys
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

from holdfast.crash.limits import MAX_NAME

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
            held = [item for item in gc.get_referents(instance) if type(item) is dict] if self.offset else []
            return held[0] if len(held) == 1 else None
        try:
            own = _GETSET.__get__(self.dictionary, instance, self.cls)
        except (AttributeError, TypeError, SystemError):
            return None
        return own if type(own) is dict else None


# Built-in types whose content is read by their own methods, also in subclasses. Filled by collections below.
BASES: list[type] = [dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException]

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
