"""How instances of a class are taken apart and put together, without running any of the class's code.

Owns what there is to know about dataclasses, attrs classes, pydantic models, named tuples, enums and plain classes.
Must not know bytes, names or versions.
Holds always: no ``__init__``, property, validator or ``__setattr__`` runs; optional packages are never imported
(a class of theirs can only exist once they are).
"""

from __future__ import annotations

import sys
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = "fields"
PYDANTIC = "pydantic"
TUPLE = "tuple"
ENUM = "enum"
OPAQUE = "opaque"

_BUILTIN_NEW = type(object.__new__)
_HEAP_TYPE = 1 << 9
# Left by typing when a generic class is called with parameters; a hint for type checkers, not state.
_TYPING_LEFTOVER = "__orig_class__"
# attrs keeps a hash there. String hashes differ between processes, so the saved one would be wrong.
ATTRS_HASH = "_attrs_cached_hash"


class Adapted:
    """Counts how often stored data was not what the class is now: migrated, or completed by a default.

    A document compares the count before and after it reads, to know whether the bytes still speak for the objects.
    """

    count = 0


BUILT_IN = frozenset(
    {
        "datetime.datetime",
        "datetime.date",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
        "zoneinfo.ZoneInfo",
        "decimal.Decimal",
        "fractions.Fraction",
        "uuid.UUID",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "collections.deque",
        "collections.OrderedDict",
        "collections.Counter",
        "collections.defaultdict",
        "numpy.ndarray",
    }
)
"""Classes that the codec knows by itself. Some are written in Python, but their attributes are nobody's business."""


class Shape:
    """What is known about one class: which form its instances are stored in and where their fields live."""

    __slots__ = (
        "_default",
        "_getters",
        "_model_setters",
        "_nameset",
        "_setters",
        "cls",
        "form",
        "frozen",
        "has_dict",
        "names",
        "reason",
        "skip",
    )

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.reason = ""
        self.form = self._form()
        self.names, self._default, self.frozen = self._declared()
        self._nameset = frozenset(self.names)
        slots = {} if self.form == PYDANTIC else _slots(cls)
        ordered: list[str] = [name for name in self.names if name in slots]
        ordered += sorted(set(slots).difference(ordered))
        self._getters: tuple[tuple[str, Any], ...] = tuple((name, slots[name].__get__) for name in ordered)
        self._setters: dict[str, Any] = {name: slots[name].__set__ for name in ordered}
        self._model_setters = _model_setters(cls) if self.form == PYDANTIC else ()
        self.has_dict = bool(getattr(cls, "__dictoffset__", 0))
        self.skip = _skipped(cls)

    def _form(self) -> str:
        cls = self.cls
        enum = sys.modules.get("enum")
        if enum is not None and issubclass(cls, enum.Enum):
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

    def _declared(self) -> tuple[tuple[str, ...], Callable[[str, Any], Any], bool]:
        """Names of the declared fields, where their defaults come from, whether instances are frozen."""
        cls: Any = self.cls
        if self.form == TUPLE:
            return cls._fields, _no_default, True
        if self.form == PYDANTIC:
            return tuple(cls.__pydantic_fields__), _pydantic_default, False
        if self.form == FIELDS and _is_old_model(cls):
            return tuple(cls.__fields__), _old_pydantic_default, False
        if self.form == FIELDS and "__attrs_attrs__" in vars(cls):
            frozen = getattr(cls.__setattr__, "__name__", "") == "_frozen_setattrs"
            return tuple(attribute.name for attribute in cls.__attrs_attrs__), _attrs_default, frozen
        if self.form == FIELDS and hasattr(cls, "__dataclass_fields__"):
            # A plain subclass of a frozen dataclass can set attributes of its own.
            frozen = "__dataclass_params__" in vars(cls) and cls.__dataclass_params__.frozen
            return tuple(field.name for field in sys.modules["dataclasses"].fields(cls)), _dataclass_default, frozen
        return (), _no_default, False

    def make(self) -> Any:
        """An instance without fields."""
        return object.__new__(self.cls)

    def take(self, value: Any) -> dict[str, Any]:
        """The instance's fields: declared ones in their order, then the others by name."""
        if not self._getters:
            if not self.has_dict:
                return {}
            fields: dict[str, Any] = value.__dict__
            if tuple(fields) == self.names:
                return fields
            fields = fields.copy()
        else:
            fields = {}
            for name, get in self._getters:
                try:
                    fields[name] = get(value)
                except AttributeError:
                    continue
            if not self.has_dict:
                if ATTRS_HASH in fields:
                    fields[ATTRS_HASH] = None
                return fields
            fields.update(value.__dict__)
        for name in self.skip:
            fields.pop(name, None)
        if ATTRS_HASH in fields:
            fields[ATTRS_HASH] = None
        names = self.names
        ordered = {name: fields.pop(name) for name in names if name in fields}
        try:
            rest = sorted(fields)
        except TypeError:
            rest = list(fields)
        for name in rest:
            ordered[name] = fields[name]
        return ordered

    def take_tuple(self, value: Any) -> dict[str, Any]:
        """A named tuple's items under their names, then attributes that a subclass may have added."""
        fields = dict(zip(self.names, tuple.__iter__(value), strict=True))
        if self.has_dict:
            extra = value.__dict__
            for name in sorted(extra):
                if name not in self.skip:
                    fields[name] = extra[name]
        return fields

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
        for name in self.names:
            if name not in fields and not self._optional(name):
                return name
        return None

    def _optional(self, name: str) -> bool:
        if self._default is _pydantic_default or self._default is _old_pydantic_default:
            return True  # a model that was made without validation may lack any field
        # A field outside __init__ may be set late or never.
        if self._default is _dataclass_default:
            return not self.cls.__dataclass_fields__[name].init  # type: ignore[attr-defined]
        if self._default is _attrs_default:
            return not getattr(self.cls.__attrs_attrs__, name).init  # type: ignore[attr-defined]
        return False

    def put(self, value: Any, fields: dict[str, Any]) -> None:
        """Set all fields. Declared fields that are absent get their default; a KeyError names one without any."""
        setters = self._setters
        if not setters:
            if fields and not self.has_dict:
                raise KeyError(next(iter(fields)))
            if fields:
                value.__dict__.update(fields)
        else:
            rest = {}
            for name, item in fields.items():
                put = setters.get(name)
                if put is not None:
                    put(value, item)
                elif self.has_dict:
                    rest[name] = item
                else:
                    raise KeyError(name)
            if rest:
                value.__dict__.update(rest)
        for name in self.names:
            if name not in fields:
                self._put_default(value, name)

    def _put_default(self, value: Any, name: str) -> None:
        by_class = self._default is _dataclass_default and name not in self._setters and hasattr(self.cls, name)
        if by_class and self._optional(name):
            return  # __init__ leaves such a field alone too: the class itself has the default
        default = self._default(name, value)
        if default is not _ABSENT:
            Adapted.count += 1
            put = self._setters.get(name)
            if put is not None:
                put(value, default)
            else:
                value.__dict__[name] = default
        elif not self._optional(name):
            raise KeyError(name)

    def put_one(self, value: Any, name: str, item: Any) -> None:
        """Set one field ahead of the others."""
        put = self._setters.get(name)
        if put is not None:
            put(value, item)
        elif self.has_dict:
            value.__dict__[name] = item
        else:
            raise KeyError(name)

    def put_pydantic(
        self,
        value: Any,
        fields: dict[str, Any],
        extra: dict[str, Any] | None,
        names: list[str],
        private: dict[str, Any] | None,
    ) -> None:
        """The reverse of take_pydantic. The model keeps the given dicts."""
        if not fields.keys() <= self._nameset or (extra and not self._nameset.isdisjoint(extra)):
            fields, extra = self._redeclared(fields, extra)
        for (name, put), item in zip(self._model_setters, (set(names), extra, private), strict=True):
            if put is not None:
                put(value, item)
            elif item is not None:
                raise KeyError(name)  # a root model has neither; the class says so with a constant
        _set_attribute(value, "__dict__", fields)
        if len(fields) != len(self.names):
            for name in self.names:
                if name not in fields:
                    self._put_default(value, name)

    def model_of(self, content: Any) -> Any:
        """A model from what take_pydantic gave, if that is all its fields and nothing else; otherwise None."""
        if self.form != PYDANTIC or type(content) is not list or len(content) != 4:
            return None
        fields, extra, names, private = content
        if type(fields) is not dict or type(names) is not list:
            return None
        if len(fields) != len(self._nameset) or not self._nameset.issuperset(fields):
            return None
        if private is not None or not (extra is None or (type(extra) is dict and not extra)):
            return None
        told = set(names)
        (_, put_names), (_, put_extra), (_, put_private) = self._model_setters
        if not told <= self._nameset or put_extra is None or put_private is None:
            return None
        value: Any = object.__new__(self.cls)
        put_names(value, told)
        put_extra(value, extra)
        put_private(value, None)
        _set_attribute(value, "__dict__", fields)
        return value

    def _redeclared(
        self, fields: dict[str, Any], extra: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fields that the model has stopped declaring, or declares since it was saved: none may be lost.

        Libraries change their models without a version; one that allows extra fields can still hold all of them.
        """
        gone = {name: item for name, item in fields.items() if name not in self._nameset}
        if gone and self.cls.model_config.get("extra") != "allow":  # type: ignore[attr-defined]
            raise KeyError(next(iter(gone)))
        come = {name: item for name, item in (extra or {}).items() if name in self._nameset and name not in fields}
        if not gone and not come:
            return fields, extra
        Adapted.count += 1
        both = {**fields, **come}
        kept = {name: item for name, item in (extra or {}).items() if name not in come}
        return {name: both[name] for name in self.names if name in both}, {**kept, **gone}

    def make_tuple(self, fields: dict[str, Any]) -> Any:
        """A named tuple from its fields; a KeyError names one that is absent or unknown."""
        fields = fields.copy()
        defaults = getattr(self.cls, "_field_defaults", {})
        items = [fields.pop(name) if name in fields else defaults[name] for name in self.names]
        value: Any = tuple.__new__(self.cls, items)
        if fields:
            if not self.has_dict:
                raise KeyError(next(iter(fields)))
            value.__dict__.update(fields)
        return value


_ABSENT = object()
_set_attribute = object.__setattr__
_SHAPES: WeakKeyDictionary[type, Shape] = WeakKeyDictionary()


def shape_of(cls: type) -> Shape:
    """The class's shape, worked out once."""
    shape = _SHAPES.get(cls)
    if shape is None:
        shape = _SHAPES[cls] = Shape(cls)
    return shape


def fields_of(value: Any) -> tuple[Any, ...] | None:
    """The instance's field names and values, one after another, or None when it is not made of fields.

    Runs no code of the class, so two calls can be compared item by item with ``is`` to see that nothing was assigned.
    """
    shape = shape_of(type(value))
    form = shape.form
    if form == FIELDS:
        fields = shape.take(value)
        return (*fields.keys(), *fields.values())
    if form == TUPLE:
        return (*shape.names, *shape.take_tuple(value).values())
    if form == PYDANTIC:
        fields, extra, names, private = shape.take_pydantic(value)
        extra = extra or {}
        private = private or {}
        return (*fields, *fields.values(), *extra, *extra.values(), *names, *private, *private.values())
    return None


def is_data_class(cls: type) -> bool:
    """Whether the class is a dataclass, pydantic model, attrs class, enum or named tuple."""
    shape = shape_of(cls)
    if shape.form == ENUM:
        return bool(cls.__members__)  # type: ignore[attr-defined]
    if shape.form == FIELDS:
        return "__dataclass_fields__" in vars(cls) or "__attrs_attrs__" in vars(cls) or _is_old_model(cls)
    return shape.form in {PYDANTIC, TUPLE}


def _is_namedtuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None)
    return (
        issubclass(cls, tuple)
        and type(fields) is tuple
        and all(type(name) is str for name in fields)
        and hasattr(cls, "_make")
    )


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


def _model_setters(cls: type) -> tuple[tuple[str, Any], ...]:
    """How a pydantic model's parts beside its fields are set, or None where the class has no place for them."""
    found: list[tuple[str, Any]] = []
    for name in ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__"):
        slot = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        found.append((name, slot.__set__ if type(slot) is MemberDescriptorType else None))
    return tuple(found)


def _skipped(cls: type) -> tuple[str, ...]:
    """Entries of ``__dict__`` that are not state: cached properties are worked out again when asked for."""
    cached = getattr(sys.modules.get("functools"), "cached_property", None)
    names = {_TYPING_LEFTOVER}
    for base in cls.__mro__:
        names.update(name for name, attribute in vars(base).items() if cached and isinstance(attribute, cached))
    return tuple(names)


def _no_default(name: str, value: Any) -> Any:  # noqa: ARG001
    return _ABSENT


def _dataclass_default(name: str, value: Any) -> Any:
    field = type(value).__dataclass_fields__[name]
    missing = sys.modules["dataclasses"].MISSING
    if field.default is not missing:
        return field.default
    return field.default_factory() if field.default_factory is not missing else _ABSENT


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
