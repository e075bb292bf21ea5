"""What there is to know about a class: where its instances keep their fields, and whether they can change.

Owns dataclasses, attrs classes, pydantic models, named tuples, enums and plain classes, and the stand-in for an
instance whose class is not known here. Must not know bytes, names or versions.
Holds always: no ``__init__``, property, validator or ``__setattr__`` runs; optional packages are never imported
(a class of theirs can only exist once they are).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import sys
from enum import Enum
from functools import cached_property
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from holdfast.codec import atoms
from holdfast.codec.wire import MAX_DEPTH, SCALARS, SURE_KEYS, TEXT, is_ours

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = "fields"
PYDANTIC = "pydantic"
TUPLE = "tuple"
ENUM = "enum"
OPAQUE = "opaque"
VALUE = "value"
ITEMS = "items"

_BUILTIN_NEW = type(object.__new__)
_HEAP_TYPE = 1 << 9
# Left by typing when a generic class is called with parameters; a hint for type checkers, not state.
_TYPING_LEFTOVER = "__orig_class__"
# attrs keeps a hash there. String hashes differ between processes, so the saved one would be wrong.
ATTRS_HASH = "_attrs_cached_hash"


class NoField(LookupError):
    """An instance has no place for a stored field, or a declared one is neither stored nor has a default."""


BUILT_IN = (
    atoms.NAMES
    | {"numpy.ndarray"}
    | {f"collections.{name}" for name in ("deque", "OrderedDict", "Counter", "defaultdict")}
)
"""Classes that the codec knows by itself. Some are written in Python, but their attributes are nobody's business."""


class Shape:
    """What is known about one class: which form its instances are stored in and where their fields live."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.reason = ""
        self.form = self._form()
        self.names, self._optional, self._default, self.frozen = self._declared()
        self._nameset = frozenset(self.names)
        slots = {} if self.form == PYDANTIC else _slots(cls)
        ordered: list[str] = [name for name in self.names if name in slots]
        ordered += sorted(set(slots).difference(ordered))
        self._getters: tuple[tuple[str, Any], ...] = tuple((name, slots[name].__get__) for name in ordered)
        self._setters: dict[str, Any] = {name: slots[name].__set__ for name in ordered}
        beside = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
        self._model_setters = [_model_setter(cls, name) for name in beside if self.form == PYDANTIC]
        self.has_dict = bool(getattr(cls, "__dictoffset__", 0))
        # What is found in this order needs nothing more.
        self._usual = self.names if self.has_dict or ATTRS_HASH in slots else tuple(ordered)
        self.skip = _skipped(cls)

    def _form(self) -> str:
        cls = self.cls
        if issubclass(cls, Enum):
            return ENUM
        if _is_namedtuple(cls):
            return TUPLE
        if f"{cls.__module__}.{cls.__qualname__}" in BUILT_IN:
            self.reason = "it is saved without being registered"
            return OPAQUE
        for base in cls.__mro__[:-1]:
            builtin = type(vars(base).get("__new__")) is _BUILTIN_NEW
            if not base.__flags__ & _HEAP_TYPE or (
                builtin and (base.__module__, base.__name__) != ("typing", "Generic")
            ):
                self.reason = f"it builds on {base.__module__}.{base.__qualname__}, whose content is not in attributes"
                return OPAQUE
        model = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
        return PYDANTIC if model is not None and issubclass(cls, model) else FIELDS

    def _declared(self) -> tuple[tuple[str, ...], tuple[str, ...], Callable[[str, Any], Any], bool]:
        """Names of the declared fields, those that may be absent, where defaults come from, whether it is frozen."""
        cls: Any = self.cls
        if self.form == TUPLE:
            return cls._fields, (), _no_default, True
        if self.form == PYDANTIC:
            names = tuple(cls.__pydantic_fields__)
            # Private attributes of a frozen model can be set all the same.
            frozen = bool(cls.model_config.get("frozen")) and not cls.__private_attributes__
            return names, names, _pydantic_default, frozen  # one made without validation may lack any field
        if self.form == FIELDS and _is_old_model(cls):
            names = tuple(cls.__fields__)
            return names, names, _old_pydantic_default, False
        if self.form == FIELDS and "__attrs_attrs__" in vars(cls):
            fields, default = cls.__attrs_attrs__, _attrs_default
            frozen = getattr(cls.__setattr__, "__name__", "") == "_frozen_setattrs"
        elif self.form == FIELDS and hasattr(cls, "__dataclass_fields__"):
            fields, default = dataclasses.fields(cls), _dataclass_default
            # A plain subclass of a frozen dataclass can set attributes of its own.
            frozen = "__dataclass_params__" in vars(cls) and cls.__dataclass_params__.frozen
        else:
            return (), (), _no_default, False
        # A field outside __init__ may be set late or never.
        late = tuple(field.name for field in fields if not field.init)
        return tuple(field.name for field in fields), late, default, frozen

    # -- taking an instance apart -----------------------------------------------------------------------------

    def take(self, value: Any) -> dict[str, Any]:
        """The instance's fields: declared ones in their order, then the others by name."""
        fields: dict[str, Any] = value.__dict__ if self.has_dict else {}
        if self._getters:
            own, fields = fields, {}
            for name, get in self._getters:
                try:
                    fields[name] = get(value)
                except AttributeError as error:
                    if not is_ours(error):
                        raise
            fields.update(own)
        if tuple(fields) == self._usual:
            return fields
        rest = {name: item for name, item in fields.items() if name not in self.skip}
        if ATTRS_HASH in rest:
            rest[ATTRS_HASH] = None
        ordered = {name: rest.pop(name) for name in self.names if name in rest}
        for name in sorted(rest) if TEXT.issuperset(map(type, rest)) else rest:
            ordered[name] = rest[name]
        return ordered

    def take_tuple(self, value: Any) -> dict[str, Any]:
        """A named tuple's items under their names."""
        return dict(zip(self.names, tuple.__iter__(value), strict=True))

    def take_pydantic(self, value: Any) -> list[Any]:
        """A model's fields, extra fields, names of the fields that were set, and private attributes."""
        extra = value.__pydantic_extra__
        private = value.__pydantic_private__
        return [
            self.take(value),
            None if extra is None else dict(extra),
            sorted(value.__pydantic_fields_set__),
            None if private is None else {name: private[name] for name in sorted(private)},
        ]

    def missing(self, fields: dict[str, Any]) -> str | None:
        """The first declared field that is neither there nor allowed to be absent."""
        if fields.keys() >= self._nameset:
            return None
        return next((name for name in self.names if name not in fields and name not in self._optional), None)

    # -- putting one together: NoField names a field that has no place, or neither content nor default ---------

    def put(self, value: Any, fields: dict[str, Any]) -> None:
        """Set all fields of a bare instance; absent ones get their default."""
        rest = fields
        if self._setters:
            rest = {}
            for name, item in fields.items():
                put = self._setters.get(name)
                if put is not None:
                    put(value, item)
                else:
                    rest[name] = item
        if rest:
            if not self.has_dict:
                raise NoField(next(iter(rest)))
            value.__dict__.update(rest)
        self._put_defaults(value, fields)

    def _put_defaults(self, value: Any, fields: dict[str, Any]) -> None:
        if not fields.keys() >= self._nameset:
            for name in self.names:
                if name not in fields:
                    self._put_default(value, name)

    def _put_default(self, value: Any, name: str) -> None:
        try:
            default = self._default(name, value)
        except Exception as error:
            raise NoField(name) from error  # the class's own function for it has failed
        put = self._setters.get(name)
        if default is _ABSENT:
            if name not in self._optional:
                raise NoField(name)
        elif put is not None:
            put(value, default)
        else:
            value.__dict__[name] = default

    def put_pydantic(self, value: Any, fields: Any, extra: Any, names: Any, private: Any) -> None:
        """The reverse of take_pydantic."""
        if not fields.keys() <= self._nameset or (extra and not self._nameset.isdisjoint(extra)):
            fields, extra = self._redeclared(fields, extra or {})
        for put, part in zip(self._model_setters, (names, extra, private), strict=True):
            put(value, part)
        # A copy, because defaults, which may be anything, are no part of what was read and is still to be checked.
        _set_attribute(value, "__dict__", fields.copy())
        self._put_defaults(value, fields)

    def put_complete(self, value: Any, fields: Any, extra: Any, names: Any, private: Any) -> bool:
        """As put_pydantic in the common case, all of the fields and nothing else. Returns whether it is that."""
        if (
            extra
            or private is not None
            or type(fields) is not dict
            or fields.keys() != self._nameset
            or (extra is not None and type(extra) is not dict)
        ):
            return False
        if type(names) is not set:
            if type(names) is not list or not TEXT.issuperset(map(type, names)):
                return False
            names = set(names)
        put_names, put_extra, put_private = self._model_setters
        put_names(value, names)
        put_extra(value, extra)
        put_private(value, None)
        _set_attribute(value, "__dict__", fields)
        return True

    def _redeclared(self, fields: dict[str, Any], extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields that the model has stopped declaring, or declares since it was saved: none may be lost.

        Libraries change their models without a version; one that allows extra fields can still hold all of them.
        """
        gone = {name: item for name, item in fields.items() if name not in self._nameset}
        if gone and self.cls.model_config.get("extra") != "allow":  # type: ignore[attr-defined]
            raise NoField(next(iter(gone)))
        both = {**{name: item for name, item in extra.items() if name in self._nameset}, **fields}
        kept = {name: item for name, item in extra.items() if name not in self._nameset or name in fields}
        return {name: both[name] for name in self.names if name in both}, {**kept, **gone}

    def make_tuple(self, fields: dict[str, Any]) -> Any:
        """A named tuple from its fields."""
        found = {**getattr(self.cls, "_field_defaults", {}), **fields}
        odd = sorted(self._nameset.symmetric_difference(found))
        if odd:
            raise NoField(odd[0])
        made: Any = tuple.__new__(self.cls, [found[name] for name in self.names])
        return made


_ABSENT = object()
_set_attribute = object.__setattr__
_SHAPES: WeakKeyDictionary[type, Shape] = WeakKeyDictionary()


def shape_of(cls: type) -> Shape:
    """The class's shape, worked out once."""
    shape = _SHAPES.get(cls)
    if shape is None:
        shape = _SHAPES[cls] = Shape(cls)
    return shape


def is_data_class(cls: type) -> bool:
    """Whether the class is a dataclass, pydantic model, attrs class, enum or named tuple."""
    shape = shape_of(cls)
    if shape.form == ENUM:
        return bool(cls._member_map_)  # type: ignore[attr-defined]
    if shape.form == FIELDS:
        return "__dataclass_fields__" in vars(cls) or "__attrs_attrs__" in vars(cls) or _is_old_model(cls)
    return shape.form in {PYDANTIC, TUPLE}


# --- what kind of class it is -------------------------------------------------------------------------------------


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and type(getattr(cls, "_fields", None)) is tuple and hasattr(cls, "_make")


def _is_old_model(cls: type) -> bool:
    """Whether the class is a model of pydantic's version 1, which version 2 carries along."""
    model = getattr(sys.modules.get("pydantic.v1.main"), "BaseModel", None)
    return model is not None and issubclass(cls, model)


def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    """Attribute name -> descriptor; where a subclass repeats a slot, its own counts, as in Python."""
    found: dict[str, MemberDescriptorType] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base.__flags__ & _HEAP_TYPE:
            own = vars(base).items()
            found |= {name: attribute for name, attribute in own if type(attribute) is MemberDescriptorType}
    return found


def _model_setter(cls: type, name: str) -> Callable[[Any, Any], None]:
    """How one of a pydantic model's parts beside its fields is set."""
    slot = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
    if type(slot) is MemberDescriptorType:
        return slot.__set__

    def nowhere(_value: Any, part: Any) -> None:
        if part is not None:
            raise NoField(name)  # a root model has neither extra nor private; the class says so with a constant

    return nowhere


def _skipped(cls: type) -> tuple[str, ...]:
    """Entries of ``__dict__`` that are not state: cached properties are worked out again when asked for."""
    attributes = [pair for base in cls.__mro__ for pair in vars(base).items()]
    return (_TYPING_LEFTOVER, *(name for name, attribute in attributes if isinstance(attribute, cached_property)))


def _no_default(name: str, value: Any) -> Any:  # noqa: ARG001
    return _ABSENT


def _dataclass_default(name: str, value: Any) -> Any:
    field = type(value).__dataclass_fields__[name]
    if field.default is not dataclasses.MISSING:
        # __init__ leaves a field alone that is none of its parameters: the class itself has the default.
        by_class = not field.init and getattr(type(value), name, None) is field.default
        return _ABSENT if by_class else field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else _ABSENT


def _attrs_default(name: str, value: Any) -> Any:
    attr = sys.modules["attr"]
    default = getattr(type(value).__attrs_attrs__, name).default
    if default is attr.NOTHING:
        return _ABSENT
    if isinstance(default, attr.Factory):
        return default.factory(value) if default.takes_self else default.factory()
    return default


def _pydantic_default(name: str, value: Any) -> Any:
    field = type(value).__pydantic_fields__[name]
    return (
        _ABSENT if field.is_required() else field.get_default(call_default_factory=True, validated_data=value.__dict__)
    )


def _old_pydantic_default(name: str, value: Any) -> Any:
    field = type(value).__fields__[name]
    return _ABSENT if field.required else field.get_default()


# --- whether a value can ever change ----------------------------------------------------------------------------

_FIXED: set[type] = {*SCALARS}
_LONELY: tuple[Any, ...] = (None, object.__hash__)  # no hash, or that of identity, which no copy has


def is_immutable(value: Any) -> bool:
    """Whether neither the value nor anything in it can change (without going behind Python's back).

    True is a promise: such a value needs no tracking and may be shared. False is only a doubt.
    """
    return _lasts(value, 0, as_key=False)


def is_key(value: Any) -> bool:
    """Whether the value can be a set item or a dict key: immutable all through, and equal to a copy of itself.

    No look-up could find NaN again, or an instance that is equal to nothing but itself.
    """
    return _lasts(value, 0, as_key=True)


def spoils_key(value: Any) -> Any:
    """What keeps the value, which is no key, from being one: itself, or a part of a tuple or frozenset."""
    while type(value) is tuple or type(value) is frozenset:
        value = next((part for part in value if not is_key(part)), None)
    return value


def _lasts(value: Any, depth: int, *, as_key: bool) -> bool:
    kind = type(value)
    if kind in _FIXED:
        return not as_key or _equals_itself(value)
    if depth > MAX_DEPTH:
        return False
    if kind is tuple or kind is frozenset:
        return all(_lasts(item, depth + 1, as_key=as_key) for item in value)
    if kind is Record:
        return as_key  # it stands for a value that was a key, or for one that cannot be changed without its class
    shape = _SHAPES.get(kind)
    if shape is not None and shape.form != OPAQUE:
        return _immutable_instance(value, shape, depth, as_key=as_key)
    if kind is dt.datetime or kind is dt.time:
        return value.tzinfo is None or _lasts(value.tzinfo, depth + 1, as_key=as_key)
    if atoms.is_atom(kind):
        _FIXED.add(kind)
        return not as_key or _equals_itself(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return not isinstance(value, numpy.void) and (not as_key or _equals_itself(value))
    if numpy is not None and kind is numpy.ndarray:
        # One that owns its memory can be made writable again; one over bytes, as they are read, cannot.
        while isinstance(value, numpy.ndarray) and not value.flags.writeable:
            value = value.base
        return not as_key and isinstance(value, bytes)
    return _immutable_instance(value, shape_of(kind), depth, as_key=as_key)


def _equals_itself(value: Any) -> bool:
    """Whether it is no NaN."""
    is_nan = getattr(value, "is_nan", None)  # one kind of a Decimal's NaN refuses to be compared
    return bool(value == value) if is_nan is None else not is_nan()  # noqa: PLR0124


def _immutable_instance(value: Any, shape: Shape, depth: int, *, as_key: bool) -> bool:
    if shape.form == ENUM:
        return True
    if as_key and type(value).__hash__ in _LONELY:
        return False
    if not shape.frozen or (shape.form == TUPLE and shape.has_dict):
        return False
    if shape.form == TUPLE:
        parts: Any = tuple.__iter__(value)
    elif shape.form == PYDANTIC:
        fields, extra, _, _ = shape.take_pydantic(value)
        parts = [*fields.values(), *(extra or {}).values()]
    else:
        parts = shape.take(value).values()
        if SURE_KEYS.issuperset(map(type, parts)):
            return True
    return all(_lasts(part, depth + 1, as_key=as_key) for part in parts)


# --- what stands for an instance of a class that is not known here ------------------------------------------------


class Record:
    """A value whose type is not known here, kept as data: it can be shown, compared and written back unchanged.

    ``form`` is the stored form of an instance (``fields``, ``pydantic``, ``value``), or says what else it is:
    ``enum``, or ``items`` for a built-in that cannot be made here, whose stored parts are then the data (a time zone or
    an array without its library). ``code`` is its extension, ``payload`` what that holds. Records are equal when their
    bytes are, and can be keys and set items.
    """

    __slots__ = ("code", "data", "form", "payload", "type_name", "version")

    def __init__(self, code: int, payload: bytes, type_name: str, version: int, form: str, data: Any = None) -> None:
        self.code = code
        self.payload = payload
        self.type_name = type_name
        self.version = version
        self.form = form
        self.data = data

    @property
    def fields(self) -> dict[str, Any] | None:
        """The fields of an instance by name, extra ones included; None for what has no fields."""
        data = self.data
        if self.form == PYDANTIC and type(data) is list and len(data) == 4 and type(data[0]) is dict:
            return {**data[0], **(data[1] or {})}
        return data if self.form == FIELDS and type(data) is dict else None

    def __eq__(self, other: object) -> bool:
        if type(other) is not Record:
            return NotImplemented
        return self.code == other.code and self.payload == other.payload

    def __hash__(self) -> int:
        return hash((self.code, self.payload))

    def __repr__(self) -> str:
        return _show(self, 0)


def _show(value: Any, depth: int) -> str:
    if type(value) is not Record:
        return repr(value)
    name = value.type_name if value.version == 1 else f"{value.type_name}@{value.version}"
    data = value.data
    if depth > 3:
        return f"<{name} ...>"  # instances may form cycles; their text must end
    if value.form == PYDANTIC and type(data) is list and data:
        data = data[0]
    elif value.form == ENUM and data[0] is not None:
        return f"<{name}.{data[0]}>"
    if type(data) is dict:
        parts = [f"{key}={_show(item, depth + 1)}" for key, item in data.items()]
    else:
        parts = [_show(item, depth + 1) for item in (data if type(data) is list else [data])]
    return f"<{name} {', '.join(parts)}>" if parts else f"<{name}>"
