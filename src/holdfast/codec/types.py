"""Which types may be saved, under which name and version, and how older versions become current ones.

Owns the registry. Must not know bytes, and never imports anything because data names it:
a type is found only if the program put it here.
Holds always: one name means one class (the newest definition of it); one class is written under one name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar, overload

from holdfast.codec.shapes import BUILT_IN, OPAQUE, Adapted, Shape, is_data_class, shape_of
from holdfast.errors import BadName, BadOption, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    Migrations = Mapping[int, Callable[[Any], Any]]

T = TypeVar("T", bound=type)

MAX_NAME_CHARS = 1000
"""Longest type name. Names come back out of stored data, so they are bounded like everything else."""

FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, tuple, frozenset)} | {
    kind.__name__: kind for kind in (int, float, str, bool, bytes, bytearray, complex)
}
"""What a defaultdict may call by these names; any other factory must be a registered class."""


class Registration:
    """One registered class."""

    __slots__ = ("_shape", "cls", "load", "migrations", "name", "save", "version")

    def __init__(
        self,
        cls: type,
        name: str,
        version: int,
        migrations: dict[int, Callable[[Any], Any]],
        save: Callable[[Any], Any] | None,
        load: Callable[[Any], Any] | None,
    ) -> None:
        self.cls = cls
        self.name = name
        self.version = version
        self.migrations = migrations
        self.save = save
        self.load = load
        self._shape: Shape | None = None

    @property
    def shape(self) -> Shape:
        """How instances are taken apart; worked out on first use, because a module may bring hundreds of classes."""
        shape = self._shape
        if shape is None:
            shape = self._shape = shape_of(self.cls)
        return shape

    def migrate(self, version: int, data: Any) -> Any:
        """Bring data of a stored version to the registered one, one step at a time."""
        if version > self.version or version < 1:
            raise SchemaMismatch(
                f"{self.name} was saved with schema version {version}; this program has version {self.version}",
                type_name=self.name,
                hint="Run the newer program, or register the newer version of the class.",
            )
        if version != self.version:
            Adapted.count += 1
        for step in range(version, self.version):
            function = self.migrations.get(step)
            if function is None:
                raise SchemaMismatch(
                    f"{self.name} was saved with schema version {version}; "
                    f"there is no migration from {step} to {step + 1}",
                    type_name=self.name,
                    hint=f"Register it with migrations={{{step}: function}}, which takes and returns the field map.",
                )
            try:
                data = function(data)
            except Exception as error:
                raise SchemaMismatch(
                    f"The migration of {self.name} from version {step} to {step + 1} failed: "
                    f"{type(error).__name__}: {error}",
                    type_name=self.name,
                ) from error
        return data


class Registry:
    """Type names <-> classes. A store has its own, layered over the program's (``REGISTRY``)."""

    def __init__(self, parent: Registry | None = None) -> None:
        self._parent = parent
        self._types: dict[type, Registration] = {}
        self._names: dict[str, Registration] = {}
        self.option: str = "open(types=[...])" if parent is None else parent.option
        """What a program passes so that its classes are known here; refusals name it."""

    def child(self) -> Registry:
        """A registry that sees this one and adds its own types."""
        return Registry(self)

    def by_type(self, cls: type) -> Registration | None:
        """The registration of exactly this class."""
        found = self._types.get(cls)
        if found is None and self._parent is not None:
            return self._parent.by_type(cls)
        return found

    def by_name(self, name: str) -> Registration | None:
        """The registration under this name."""
        found = self._names.get(name)
        if found is None and self._parent is not None:
            return self._parent.by_name(name)
        return found

    def __contains__(self, cls: type) -> bool:
        return self.by_type(cls) is not None

    def __len__(self) -> int:
        return len(self._names) + (len(self._parent) if self._parent is not None else 0)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        above = self._parent.names() if self._parent is not None else []
        return sorted({*above, *self._names})

    @overload
    def register(
        self,
        cls: T,
        *,
        name: str | None = None,
        version: int = 1,
        migrations: Migrations | None = None,
        save: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
    ) -> T: ...

    @overload
    def register(
        self,
        cls: None = None,
        *,
        name: str | None = None,
        version: int = 1,
        migrations: Migrations | None = None,
        save: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
    ) -> Callable[[T], T]: ...

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
        """
        if cls is None:
            return lambda cls: self.register(
                cls, name=name, version=version, migrations=migrations, save=save, load=load
            )
        if not isinstance(cls, type):
            raise BadOption(f"register takes a class, not {cls!r}")
        steps = dict(migrations or {})
        if save is None and load is None:
            save, load = self.conversion(cls)
        _check(cls, version, steps, save, load)
        registration = Registration(cls, _checked_name(cls, name), version, steps, save, load)
        self._add(registration)
        return cls

    def _add(self, registration: Registration) -> None:
        cls, name = registration.cls, registration.name
        other = Registry.by_name(self, name)  # a subclass may find classes by registering them
        if other is not None and other.cls is not cls and _origin(other.cls) != _origin(cls):
            raise BadName(
                f"{name!r} is already the name of {other.cls!r}",
                hint="Give one of the two classes another name: register(cls, name=...).",
            )
        self._names[name] = registration
        self._types[cls] = registration

    def conversion(self, cls: type) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:  # noqa: ARG002
        """What saves and loads a class that is registered without ``save`` and ``load``; None for its attributes."""
        return None, None

    def wants(self, cls: type) -> bool:
        """Whether ``register_module`` takes this class."""
        return is_data_class(cls)

    def register_module(self, module: ModuleType | str) -> list[type]:
        """Register every data class that the module and its submodules define; returns them.

        Data classes are dataclasses, pydantic models, attrs classes, enums and named tuples.
        """
        from importlib import import_module

        if isinstance(module, str):
            module = import_module(module)
        found: list[type] = []
        for part in _modules(module):
            for cls in _defined_in(part):
                if not self.wants(cls):
                    continue
                known = self.by_type(cls)
                if known is None or known.cls is not cls:
                    self.register(cls)
                found.append(cls)
        return found


REGISTRY = Registry()
"""The program's registry: what ``holdfast.register`` fills and every store sees."""


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


def _checked_name(cls: type, name: object) -> str:
    if name is None:
        name = default_name(cls)
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise BadName(f"A type's name is 1 to {MAX_NAME_CHARS} printable characters, not {name!r:.80}")
    if name in FACTORIES or name in BUILT_IN:
        raise BadName(f"{name!r} is the name of a built-in type", hint="Give the class another name.")
    return name


def _check(
    cls: type,
    version: int,
    migrations: dict[int, Callable[[Any], Any]],
    save: Callable[[Any], Any] | None,
    load: Callable[[Any], Any] | None,
) -> None:
    if cls in FACTORIES.values() or f"{cls.__module__}.{cls.__qualname__}" in BUILT_IN:
        raise BadOption(f"{cls.__qualname__} is saved without being registered")
    if type(version) is not int or not 1 <= version < 2**31:
        raise BadOption(f"A schema version is a whole number from 1, not {version!r}")
    for step, function in migrations.items():
        if type(step) is not int or not 1 <= step < version or not callable(function):
            raise BadOption(
                f"A migration is a function under the version it starts from, 1 to {version - 1}, not {step!r}"
            )
    if (save is None) != (load is None):
        raise BadOption("Give both save and load, or neither")
    if save is None:
        shape = shape_of(cls)
        if shape.form == OPAQUE:
            raise BadOption(
                f"{cls.__qualname__} cannot be saved by its attributes: {shape.reason}",
                hint="Register it with save= (instance to a plain value) and load= (plain value to instance).",
            )


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
