"""Which types may be saved, and under which name and version.

Owns the registry. Must not know bytes, and never imports anything because data names it: a type is found only if the
program put it here, or declared it as the type of a field of a class that it put here.
Holds always: one name means one class (the newest definition of it); one class is written under one name.
"""

from __future__ import annotations

import inspect
import sys
import typing
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, overload

from holdfast.codec.classes import BUILT_IN, OPAQUE, Shape, is_data_class, shape_of
from holdfast.errors import BadName, BadOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    Migrations = Mapping[int, Callable[[Any], Any]]

    class Options(TypedDict, total=False):
        """What can be said about a class; see ``Registry.register``."""

        name: str | None
        version: int
        migrations: Migrations | None
        save: Callable[[Any], Any] | None
        load: Callable[[Any], Any] | None


T = TypeVar("T", bound=type)

MAX_NAME_CHARS = 1000
"""Longest name of a type. Names come back out of stored data, so they are bounded like everything else."""

FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, tuple, frozenset)} | {
    kind.__name__: kind for kind in (int, float, str, bool, bytes, bytearray, complex)
}
"""What a defaultdict may call, by these names: nothing that a program wrote is called because data names it."""


@dataclass(slots=True, eq=False)
class Registration:
    """One registered class."""

    cls: type
    name: str
    version: int
    migrations: dict[int, Callable[[Any], Any]]
    save: Callable[[Any], Any] | None
    load: Callable[[Any], Any] | None
    shape: Shape


class Registry:
    """Type names <-> classes. A store has its own, layered over the program's (``REGISTRY``)."""

    def __init__(self, parent: Registry | None = None) -> None:
        self._parent = parent
        self._types: dict[type, Registration] = {}
        self._names: dict[str, Registration] = {}
        # Classes whose fields have to be looked at, each with how often one of their types was not there yet.
        self._fresh: dict[type, int] = {}
        self._lock = RLock()
        self._looking = False
        self.option: str = "open(types=[...])" if parent is None else parent.option
        """What a program passes so that its classes are known here; refusals name it."""

    def child(self) -> Registry:
        """A registry that sees this one and adds its own types."""
        return Registry(self)

    def by_type(self, cls: type) -> Registration | None:
        """The registration of exactly this class."""
        found = self._types.get(cls)
        if found is None and self._parent is not None:
            found = self._parent.by_type(cls)
        if found is None and self._register_fields():
            found = self._types.get(cls)
        return found

    def by_name(self, name: str) -> Registration | None:
        """The registration under this name."""
        found = self._names.get(name)
        if found is None and self._parent is not None:
            found = self._parent.by_name(name)
        if found is None and self._register_fields():
            found = self._names.get(name)
        return found

    def takes(self, cls: type) -> bool:
        """Whether an instance of this class, or of one derived from it, can perhaps be saved."""
        derived: list[type] = type.__subclasses__(cls)
        return self.by_type(cls) is not None or any(map(self.takes, derived))

    def __contains__(self, cls: type) -> bool:
        return self.by_type(cls) is not None

    def __len__(self) -> int:
        return len(self.names())

    @property
    def revision(self) -> int:
        """Rises when a type is registered."""
        return len(self._names) + (self._parent.revision if self._parent is not None else 0)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._register_fields()
        above = self._parent.names() if self._parent is not None else []
        return sorted({*above, *self._names})

    @overload
    def register(self, cls: T, **options: Unpack[Options]) -> T: ...

    @overload
    def register(self, cls: None = None, **options: Unpack[Options]) -> Callable[[T], T]: ...

    def register(
        self,
        cls: T | None = None,
        *,
        name: str | None = None,
        version: int = 1,
        migrations: Migrations | None = None,
        save: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
    ) -> T | Callable[[T], T]:
        """Let instances of ``cls`` be saved and loaded. Also a decorator, with or without arguments.

        ``migrations[n]`` takes the field map of version n and returns that of n + 1. ``save`` turns an instance
        into a value that can be saved, ``load`` turns that value back; give both for classes that are not made
        of attributes, or whose attributes cannot all be saved.

        The types that its fields are declared with are registered too, where they are data classes that are not known
        yet: under their default names, with version 1 (see register_module for what a data class is).
        """
        if cls is None:
            return lambda cls: self.register(
                cls, name=name, version=version, migrations=migrations, save=save, load=load
            )
        if not isinstance(cls, type):
            raise BadOption(f"register takes a class, not {cls!r}")
        steps = dict(migrations or {})
        name = default_name(cls) if name is None else name
        registration = Registration(cls, name, version, steps, save, load, shape_of(cls))
        _check(registration)
        self._add(registration)
        if save is None:
            self._fresh[cls] = 0
        return cls

    def _add(self, registration: Registration) -> None:
        cls, name = registration.cls, registration.name
        other = self._find(name)
        if other is not None and other.cls is not cls and _origin(other.cls) != _origin(cls):
            raise BadName(
                f"{name!r} is already the name of {other.cls!r}",
                hint="Give one of the two classes another name: register(cls, name=...).",
            )
        self._names[name] = registration
        self._types[cls] = registration

    def _find(self, name: str) -> Registration | None:
        """As by_name, without looking for more: a subclass may find classes by registering them."""
        found = self._names.get(name)
        return found if found is not None or self._parent is None else self._parent._find(name)

    def _register_fields(self) -> bool:
        """Register the types that fields are declared with; returns whether there was anything to look at.

        Done when a type or name is asked for that is not known: a module may bring hundreds of classes, and a field may
        name a class that is defined further down.
        """
        if not self._fresh:
            return False
        with self._lock:
            if self._looking:  # a lookup on the way, in this thread
                return False
            self._looking = True
            try:
                later: dict[type, int] = {}
                while self._fresh:
                    cls, tries = list(self._fresh.items())[-1]
                    if not self._register_fields_of(cls) and tries < _MAX_TRIES:
                        later[cls] = tries + 1
                    self._fresh.pop(cls, None)
                self._fresh.update(later)
            finally:
                self._looking = False
        return True

    def _register_fields_of(self, cls: type) -> bool:
        """Returns whether all the types were there."""
        clear = True
        for kind in _field_types(cls):
            if kind is None:
                clear = False
            elif is_data_class(kind) and self.by_type(kind) is None:
                # What has the name of another class, or cannot be saved, is refused when one is to be saved.
                with suppress(BadName, BadOption):
                    self.register(kind)
        return clear

    def register_module(self, module: ModuleType | str) -> list[type]:
        """Register every data class that the module and its submodules define; returns them.

        Data classes are dataclasses, pydantic models, attrs classes, enums and named tuples.
        """
        from importlib import import_module

        if isinstance(module, str):
            module = import_module(module)
        found = [cls for part in _modules(module) for cls in _defined_in(part) if is_data_class(cls)]
        for cls in found:
            known = self.by_type(cls)
            if known is None or known.cls is not cls:
                self.register(cls)
        return found


REGISTRY = Registry()
"""The program's registry: what ``holdfast.register`` fills and every store sees."""

NO_TYPES = Registry()
"""One that stays empty: what is read with it does not depend on what the program has registered."""


def default_name(cls: type) -> str:
    """``module.Qualname``, where ``__main__`` is replaced by the name under which others would import it."""
    return f"{_origin(cls)[0]}.{cls.__qualname__}"


def _origin(cls: type) -> tuple[str, str]:
    module = cls.__module__
    if module == "__main__":
        main = sys.modules.get("__main__")
        spec = getattr(main, "__spec__", None)
        file = getattr(main, "__file__", None)
        if spec is not None:
            module = spec.name
        elif file:
            module = file.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".py")
    return module, cls.__qualname__


def _check(made: Registration) -> None:
    cls, version = made.cls, made.version
    name: object = made.name  # whatever the program gave
    if cls in FACTORIES.values() or f"{cls.__module__}.{cls.__qualname__}" in BUILT_IN:
        raise BadOption(f"{cls.__qualname__} is saved without being registered")
    if type(version) is not int or not 1 <= version < 2**31:
        raise BadOption(f"A schema version is a whole number from 1, not {version!r}")
    for step, function in made.migrations.items():
        if type(step) is not int or not 1 <= step < version or not callable(function):
            raise BadOption(
                f"A migration is a function under the version it starts from, 1 to {version - 1}, not {step!r}"
            )
    if (made.save is None) != (made.load is None):
        raise BadOption("Give both save and load, or neither")
    if made.save is None and made.shape.form == OPAQUE:
        raise BadOption(
            f"{cls.__qualname__} cannot be saved by its attributes: {made.shape.reason}",
            hint="Register it with save= (instance to a plain value) and load= (plain value to instance).",
        )
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise BadName(f"A type's name is 1 to {MAX_NAME_CHARS} printable characters, not {name!r:.80}")
    if name in FACTORIES or name in BUILT_IN:
        raise BadName(f"{name!r} is the name of a built-in type", hint="Give the class another name.")


_MAX_TRIES = 100
"""A field's type that is not there after so many questions never comes: it is imported for type checkers only."""


def _field_types(cls: type) -> Iterator[type | None]:
    """The classes in the declared types of the fields; None for a type that cannot be found (yet)."""
    for name in shape_of(cls).names:
        base = next((base for base in cls.__mro__ if name in _annotations(base)), None)
        if base is None:
            continue  # declared without an annotation
        stand_in = SimpleNamespace(__annotations__={name: _annotations(base)[name]})
        parameters = {parameter.__name__: parameter for parameter in getattr(base, "__type_params__", ())}
        local = {base.__name__: base, cls.__name__: cls, **vars(base), **parameters}
        try:
            hint = typing.get_type_hints(stand_in, vars(sys.modules.get(base.__module__, typing)), local)[name]
            yield from _classes_in(hint, set())
        except (NameError, AttributeError, TypeError, ValueError, LookupError, SyntaxError):
            yield None


def declared_classes(function: Callable[..., Any]) -> list[type]:
    """The classes that a function is declared to return whose instances are saved only where they are registered.

    What cannot be found out is not among them; nor are classes of which there are no instances themselves.
    """
    plain = inspect.unwrap(function)
    if "return" not in getattr(plain, "__annotations__", {}):
        return []
    stand_in = SimpleNamespace(__annotations__={"return": plain.__annotations__["return"]})
    try:
        hint = typing.get_type_hints(stand_in, plain.__globals__, inspect.getclosurevars(plain).nonlocals)["return"]
        found = list(_classes_in(hint, set()))
    except Exception:  # noqa: BLE001 - it is the program's own text, and only a hint
        return []
    return [
        kind
        for kind in found
        if kind.__flags__ & _HEAP
        and not inspect.isabstract(kind)
        and not getattr(kind, "_is_protocol", False)
        and shape_of(kind).form != OPAQUE
        and kind.__module__ not in _HINTS
    ]


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code has made
_HINTS = frozenset({"typing", "typing_extensions", "collections.abc", "types", "abc"})


def _annotations(cls: type) -> Mapping[str, Any]:
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(cls, format=Format.FORWARDREF)
    found: Mapping[str, Any] = vars(cls).get("__annotations__", {})
    return found


def _classes_in(hint: Any, seen: set[int]) -> Iterator[type]:
    """The classes that a declared type is made of: ``dict[str, list[Step] | None]`` gives Step among others."""
    if id(hint) in seen:
        return  # an alias may refer to itself
    seen.add(id(hint))
    if isinstance(hint, type):
        yield hint
    origin = typing.get_origin(hint)
    if isinstance(origin, type):
        yield origin
    aliased = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)  # NewType, and ``type X = ...``
    for part in (aliased, *typing.get_args(hint)):
        if part is not None:
            yield from _classes_in(part, seen)


def _modules(module: ModuleType) -> list[ModuleType]:
    """The module and every submodule that can be imported; one that cannot (a missing extra) is left out."""
    found = [module]
    path = getattr(module, "__path__", None)
    if path is None:
        return found
    from importlib import import_module
    from pkgutil import iter_modules

    for entry in iter_modules(path, module.__name__ + "."):
        if entry.name.rsplit(".", 1)[-1] == "__main__":
            continue  # importing it would run the program
        try:
            part = import_module(entry.name)
        except ImportError:
            continue
        found += _modules(part)
    return found


def _defined_in(module: ModuleType) -> list[type]:
    seen: dict[type, None] = {}
    waiting: list[Any] = list(vars(module).values())
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, type) and item.__module__ == module.__name__ and item not in seen:
            seen[item] = None
            waiting += vars(item).values()
    return list(seen)


register = REGISTRY.register
"""``holdfast.register``: into the registry that every store of the process looks into."""
