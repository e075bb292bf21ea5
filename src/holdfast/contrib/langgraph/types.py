"""Which classes a LangGraph thread may hold, and how they are found when it is read.

Owns the saver's registry: LangGraph's and LangChain's own classes, those that the program or its graph names, data
classes that come along in ``put``, and data classes that the program has loaded. Must not know bytes or threads.
Holds always: nothing is imported because data names it; a class that only the data names is taken only if building its
instances runs none of its code (docs/design/013-classes-that-data-names.md); an exception is kept as its text.
"""

from __future__ import annotations

import logging
import sys
from abc import ABCMeta
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from enum import EnumType
from importlib import import_module
from types import FunctionType, GetSetDescriptorType, ModuleType
from typing import Any, Protocol, get_args, get_type_hints, is_typeddict

from holdfast.codec.classes import ENUM, FIELDS, Shape, is_data_class, shape_of
from holdfast.codec.types import FACTORIES, MAX_NAME_CHARS, Registration, Registry, default_name
from holdfast.errors import BadOption, SchemaMismatch, UnknownType

log = logging.getLogger("holdfast.contrib.langgraph")

Conversion = tuple[Callable[[Any], Any], Callable[[Any], Any]]

MAX_ERROR_CHARS = 10_000
"""The longest text of an exception: some carry whole responses."""

_ERROR = "holdfast.langgraph.Error"

# Modules whose data classes LangGraph and LangChain put into threads. They are imported when data has one.
_MODULES = frozenset(
    {
        *(
            f"langchain_core.messages.{name}"
            for name in ["human", "ai", "system", "tool", "function", "chat", "modifier", "base"]
        ),
        *(f"langchain_core.outputs.{name}" for name in ["generation", "chat_generation", "chat_result", "llm_result"]),
        "langchain_core.outputs.run_info",
        "langchain_core.documents.base",
        "langchain_core.prompt_values",
        "langchain_core.agents",
        "langgraph.types",
        "langgraph.errors",
        "langgraph.func",
        "langgraph.checkpoint.serde.types",
        "langgraph.store.base",
    }
)
# Classes of theirs, and of the standard library, that are made of attributes without being data classes.
_PLAIN = frozenset(
    {
        "langgraph.types.Send",
        "langgraph.store.base.Item",
        "langgraph.store.base.SearchItem",
        "pydantic.types.SecretStr",
        "pydantic.types.SecretBytes",
        *(
            f"pydantic.networks.{name}"
            for name in ["AnyUrl", "AnyHttpUrl", "HttpUrl", "AnyWebsocketUrl", "WebsocketUrl"]
        ),
        *(f"pydantic.networks.{name}" for name in ["FileUrl", "FtpUrl", "PostgresDsn"]),
    }
)


# --- the registry ---------------------------------------------------------------------------------------------------


def registry_for(parent: Registry, types: Any = ()) -> Registry:
    """A registry that knows LangGraph's own types besides those of ``parent``, and ``types``.

    ``types`` are classes, modules, names of modules, and graphs (compiled or not), which stand for the classes in their
    schemas and channels.
    """
    registry = _Types(parent)
    for item in types if isinstance(types, list | tuple | set | frozenset) else (types,):
        if isinstance(item, str | ModuleType):
            registry.register_module(item)
        elif isinstance(item, type):
            _name(registry, item)
        elif hasattr(item, "channels") and hasattr(item, "nodes"):
            for cls in classes_of(item):
                _name(registry, cls)
        else:
            raise BadOption(f"types takes classes, modules and graphs, not {item!r:.80}")
    return registry


def allow(registry: Registry, names: Collection[tuple[str, ...]]) -> None:
    """Let the registry know the classes of these modules and names, as far as the program has imported them.

    A class whose content is not in its attributes is left out; the refusal to save one says what to do.
    """
    for *module, name in names:
        cls: Any = getattr(sys.modules.get(".".join(module)), name, None)
        if isinstance(cls, type):
            with suppress(BadOption):
                _name(registry, cls)


def _name(registry: Registry, cls: type) -> None:
    if issubclass(cls, BaseException):
        return  # kept as text, whether it is named or not
    known = Registry.by_type(registry, cls)
    if known is None or known.cls is not cls:
        name = default_name(cls)
        save, load = _CONVERSIONS[name](cls) if name in _CONVERSIONS and _library(name) is cls else (None, None)
        registry.register(cls, save=save, load=load)


class _Types(Registry):
    """Classes are registered when they are first met, so that a thread without them pays for no import."""

    def __init__(self, parent: Registry) -> None:
        super().__init__(parent)
        self._ready: dict[str, Registration] = {}
        self.option = "HoldfastSaver(types=[...])"
        self.register(BaseException, name=_ERROR, save=error_text, load=_text_only)

    def _add(self, registration: Registration) -> None:
        super()._add(registration)
        self._ready.pop(registration.name, None)

    def by_type(self, cls: type) -> Registration | None:
        found = super().by_type(cls)
        if found is not None:
            return found
        if issubclass(cls, BaseException):
            return super().by_type(BaseException)
        name = default_name(cls)
        listed = _module_of(name) is not None
        if _library(name) is not cls if listed else not _is_data(cls):
            return None
        _name(self, cls)
        if not listed and (_loaded(name) is not cls or _danger(cls)):
            log.warning(
                "A new process can read what is stored of %s only if it names the class: HoldfastSaver(types=[...])",
                name,
            )
        return super().by_type(cls)

    def by_name(self, name: str) -> Registration | None:
        """For reading: also a class that only the data names, if that is safe."""
        found = self._ready.get(name)
        if found is None:
            found = named(self, name)
            if found is None and (cls := _loaded(name)) is not None and not _danger(cls):
                shape = shape_of(cls)
                found = Registration(cls, name, 1, {}, None, None, shape if shape.form == ENUM else _Careful(cls))
            if found is not None:
                self._ready[name] = found
        return found


def named(registry: Registry, name: str) -> Registration | None:
    """The registration of a class that the program names, or this page."""
    found = Registry.by_name(registry, name)
    if found is None and (cls := _library(name)) is not None:
        _name(registry, cls)
        found = Registry.by_name(registry, name)
    return found


def unknown(error: UnknownType) -> UnknownType:
    """The error with what to do about it in a graph."""
    name = error.type_name
    module = name.split(".<locals>")[0].rpartition(".")[0] or name
    cls = _loaded(name)
    reason = f"reading it would run code of the class ({_danger(cls)})" if cls is not None else ""
    if not reason:
        reason = "it was defined inside a function" if "<locals>" in name else "this program has not imported it"
    line = name.rpartition(".")[2] if "<locals>" in name or cls is not None else repr(module)
    return UnknownType(
        f"the thread has a {name:.200}, but {reason}",
        type_name=name,
        hint=f"Name it: HoldfastSaver(..., types=[{line}]). With strict=False it is read as a record of its fields.",
    )


# --- exceptions -----------------------------------------------------------------------------------------------------


def error_text(error: BaseException) -> str:
    """An exception as LangGraph's own savers keep it. Recording one never fails: that would hide it."""
    try:
        text = str.__str__(repr(error))
    except Exception as inner:  # noqa: BLE001 - code of a foreign class
        return f"<{type(error).__qualname__} without text: {type(inner).__name__}>"
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}... ({len(text):,} characters)"


def _text_only(saved: Any) -> str:
    if type(saved) is not str:
        raise TypeError("an exception is kept as text")
    return saved


# --- what a graph names ---------------------------------------------------------------------------------------------


def classes_of(graph: Any) -> list[type]:
    """The data classes in a graph's schemas and channels, and in those of its subgraphs."""
    graph = getattr(graph, "builder", graph)
    seen: dict[int, Any] = {}  # by identity: what annotations hold need not have a hash
    declared = [*getattr(graph, "schemas", ()), getattr(graph, "context_schema", None)]
    for channel in graph.channels.values():
        declared += [getattr(channel, "ValueType", None), getattr(channel, "UpdateType", None)]
    for node in graph.nodes.values():
        inner = getattr(node, "runnable", None) or getattr(node, "bound", None)
        if hasattr(inner, "channels") and hasattr(inner, "nodes"):
            declared += classes_of(inner)
    while declared:
        kind = declared.pop()
        if id(kind) in seen:
            continue
        seen[id(kind)] = kind
        declared += [getattr(kind, "__supertype__", None), *get_args(kind)]
        if isinstance(kind, type) and (is_typeddict(kind) or _is_data(kind)):
            with suppress(Exception):  # annotations are code, and may name what is not there
                declared += get_type_hints(kind, include_extras=True).values()
    return [kind for kind in seen.values() if isinstance(kind, type) and not is_typeddict(kind) and _is_data(kind)]


# --- finding a class by its name ------------------------------------------------------------------------------------


def _is_data(cls: type) -> bool:
    """Whether instances are taken as they come: a dataclass, attrs, pydantic, named tuple or enum, or a subclass."""
    marks = ("__dataclass_fields__", "__attrs_attrs__")
    return is_data_class(cls) or (shape_of(cls).form == FIELDS and any(hasattr(cls, mark) for mark in marks))


def _module_of(name: str) -> str | None:
    """The module of a class that this page names."""
    if name in _PLAIN or name in _CONVERSIONS:
        return name.rpartition(".")[0]
    parts = name.split(".", 5)  # none of them has more
    return next((module for cut in range(2, len(parts)) if (module := ".".join(parts[:cut])) in _MODULES), None)


def _library(name: str) -> type | None:
    """A class of LangGraph's, LangChain's or the standard library's that this page names; its module is imported."""
    module = _module_of(name)
    if module is None:
        return None
    try:
        space = import_module(module)
    except ImportError:  # not installed, or of another age
        return None
    cls = _attribute(space, name.removeprefix(f"{module}.").split("."))
    return cls if cls is not None and (name in _PLAIN or name in _CONVERSIONS or _is_data(cls)) else None


def _loaded(name: str) -> type | None:
    """The data class of that name, if the program has its module loaded. Imports nothing and runs nothing."""
    parts = name.split(".") if len(name) <= MAX_NAME_CHARS else []
    for cut in range(len(parts) - 1, 0, -1):
        # A script's classes are stored under the name by which others would import it.
        for module in (sys.modules.get("__main__"), sys.modules.get(".".join(parts[:cut]))):
            cls = _attribute(module, parts[cut:])
            if cls is not None and type(cls) in _metaclasses() and default_name(cls) == name and _is_data(cls):
                return cls
    return None


_module_space: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__
_class_space: Callable[[type], Any] = vars(type)["__dict__"].__get__


def _attribute(module: Any, path: Sequence[str]) -> type | None:
    """What a path leads to from a module, if that is a class. No ``__getattr__`` and no descriptor is asked."""
    if not issubclass(type(module), ModuleType):
        return None
    found: Any = _module_space(module).get(path[0])
    for part in path[1:]:
        found = _class_space(found).get(part) if issubclass(type(found), type) else None
    return found if issubclass(type(found), type) else None


def _metaclasses() -> set[type]:
    """The metaclasses that data classes have; asking a class of another one runs that one's code."""
    models = ("pydantic._internal._model_construction", "pydantic.v1.main")
    return {type, ABCMeta, EnumType, type(Protocol)} | {
        sys.modules[name].ModelMetaclass for name in models if name in sys.modules
    }


# What would run while an instance is built, looked at by the codec, or thrown away.
_RUNS = frozenset({"__del__", "__getattribute__", "__class__", "_missing_"})
_LIBRARIES = frozenset({"builtins", "enum", "typing", "abc", "pydantic", "dataclasses", "attr", "attrs", "collections"})


def _danger(cls: type) -> str:
    """The method of a class that reading one of its instances may run, if there is one that its author wrote."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        own = _class_space(base)
        found = sorted(_RUNS.intersection(own))
        if found or type(own.get("__dict__")) not in {GetSetDescriptorType, type(None)}:
            return found[0] if found else "__dict__"
    hashing, equal = (next(_class_space(base)[name] for base in cls.__mro__ if name in _class_space(base))
                      for name in ("__hash__", "__eq__"))  # fmt: skip
    if hashing is None:  # so it is in no set, and no key
        return ""
    return "" if _is_generated(hashing) and _is_generated(equal) else "__hash__ or __eq__"


def _is_generated(function: Any) -> bool:
    """Whether a method was made by Python, ``dataclasses``, attrs or pydantic, and not by the author of the class."""
    if type(function) is not FunctionType:
        return type(function) is type(object.__eq__)
    code = function.__code__
    return (
        code.co_qualname.startswith("__create_fn__.<locals>.")
        or code.co_filename.startswith("<attrs generated")
        or function.__module__.partition(".")[0] in _LIBRARIES
    )


# --- fields that were not saved -------------------------------------------------------------------------------------


class _Careful(Shape):
    """The shape of a class that only the data names: no function makes the default of a field that is not there."""

    def _put_default(self, value: Any, name: str) -> None:
        if _factory(self.cls, name) not in _HARMLESS:
            raise SchemaMismatch(
                f"{self.cls.__qualname__} has a field {name!r} that was not saved, whose default a function makes",
                type_name=default_name(self.cls),
                hint=f"Name the class: HoldfastSaver(..., types=[{self.cls.__qualname__}]).",
            )
        super()._put_default(value, name)


_HARMLESS = frozenset({None, *FACTORIES.values()})


def _factory(cls: Any, name: str) -> Any:
    """The function that makes a field's default, or None where there is none."""
    if name in getattr(cls, "__pydantic_fields__", ()):
        return cls.__pydantic_fields__[name].default_factory
    if name in getattr(cls, "__dataclass_fields__", ()):
        factory = cls.__dataclass_fields__[name].default_factory
        return None if factory is sys.modules["dataclasses"].MISSING else factory
    if hasattr(cls, "__attrs_attrs__"):
        return getattr(getattr(cls.__attrs_attrs__, name).default, "factory", None)
    return getattr(cls.__fields__[name], "default_factory", None) if hasattr(cls, "__fields__") else None


# --- classes whose content is not in attributes ---------------------------------------------------------------------


def _as_text(cls: type) -> Conversion:
    return str, cls


def _pattern(cls: type) -> Conversion:  # noqa: ARG001
    import re

    return lambda pattern: [pattern.pattern, pattern.flags], lambda saved: re.compile(*saved)


def _plain(kind: Any) -> Callable[[type], Conversion]:
    """For a subclass of a built-in type that adds nothing to its content."""

    def conversion(cls: type) -> Conversion:
        def load(saved: Any) -> Any:
            if type(saved) is not kind:
                raise TypeError(f"{kind.__name__} expected, not {type(saved).__name__}")
            made: Any = kind.__new__(cls, saved)
            if kind is dict:
                made.update(saved)
            return made

        # str() would ask the subclass, which may give itself.
        return str.__str__ if kind is str else kind, load

    return conversion


_CONVERSIONS: dict[str, Callable[[type], Conversion]] = {
    "langchain_core.messages.base.TextAccessor": _plain(str),
    "langchain_core.runnables.utils.AddableDict": _plain(dict),
    "langgraph._internal._config._DefaultRecursionLimit": _plain(int),
    "pydantic_core._pydantic_core.Url": _as_text,
    "pydantic_core._pydantic_core.MultiHostUrl": _as_text,
    "re.Pattern": _pattern,
    **{f"ipaddress.IPv{v}{name}": _as_text for v in (4, 6) for name in ("Address", "Interface", "Network")},
}
