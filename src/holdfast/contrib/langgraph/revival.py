"""From LangGraph's stored bytes back to values, for an import: nothing that the bytes name is imported.

Owns which classes stored bytes may become: those of the saver's registry, and LangGraph's own list of harmless ones.
Must not know databases. What always holds: what cannot be rebuilt exactly is an error with its name, never something
similar; LangGraph itself would hand out the bare fields, which an import would make permanent.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde import jsonplus
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_METHODS, SAFE_MSGPACK_TYPES
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from holdfast.codec.types import Registry
from holdfast.contrib.langgraph.types import named
from holdfast.errors import HoldfastError, SourceUnreadable, UnknownType

_CONSTRUCTED = frozenset({1, 2})  # versions of LangChain's JSON envelope for objects


class Revival(jsonplus.JsonPlusSerializer):
    """LangGraph's serializer, strict: for reading what LangGraph's other savers wrote."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(__unpack_ext_hook__=self._extension)
        self._registry = registry
        self._classes = _classes(registry)
        # The decoder replaces whatever a hook raises by an error of its own.
        self._refusal: HoldfastError | None = None

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        kind, content = data
        if kind not in {"null", "bytes", "bytearray", "json", "msgpack"}:
            raise _unreadable_kind(kind)
        try:
            return super().loads_typed((kind, content))
        except HoldfastError:
            raise
        except Exception as error:
            refusal, self._refusal = self._refusal, None
            if refusal is not None:
                raise refusal from None
            raise SourceUnreadable(f"a stored value cannot be decoded: {type(error).__name__}: {error}") from error

    # -- MessagePack -------------------------------------------------------------------------------------------

    def _extension(self, code: int, data: bytes) -> Any:
        try:
            content = ormsgpack.unpackb(data, ext_hook=self._extension, option=ormsgpack.OPT_NON_STR_KEYS)
            return self._revive(code, content)
        except HoldfastError as error:
            self._refusal = self._refusal or error
            raise

    def _revive(self, code: int, content: Any) -> Any:
        if code == jsonplus.EXT_DELTA_SNAPSHOT:
            return _DeltaSnapshot(content)
        if code == jsonplus.EXT_NUMPY_ARRAY:
            return _array(*content)
        module, name, given, *more = content
        if code == jsonplus.EXT_METHOD_SINGLE_ARG and (module, name, *more) not in SAFE_MSGPACK_METHODS:
            raise _refused(f"{module}.{name}")
        cls = self._find(module, name)
        if code in {jsonplus.EXT_PYDANTIC_V1, jsonplus.EXT_PYDANTIC_V2}:
            return _model(cls, given)
        try:
            if code == jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG:
                return cls(_members(given) if issubclass(cls, (set, frozenset)) else given)
            if code == jsonplus.EXT_CONSTRUCTOR_KW_ARGS:
                return cls(**given)
            if code == jsonplus.EXT_METHOD_SINGLE_ARG:
                return getattr(cls, more[0])(given)
            if code == jsonplus.EXT_CONSTRUCTOR_POS_ARGS:
                if (module, name) == ("langgraph.types", "Send") and len(given) > 2:
                    return cls(*given[:2], timeout=given[2])
                return cls(*given)
        except Exception as error:
            raise _not_rebuilt(f"{module}.{name}", error) from error
        raise SourceUnreadable(f"{module}.{name} was stored in a way that this version does not know: {code}")

    # -- JSON, as older versions of LangGraph wrote ------------------------------------------------------------

    def _reviver(self, value: dict[str, Any]) -> Any:
        """Called by the decoder for each JSON object."""
        if value.get("lc") in _CONSTRUCTED and isinstance(value.get("id"), list):
            raise SourceUnreadable(
                f"{'.'.join(map(str, value['id']))} was stored as JSON, as older versions of LangGraph did",
                hint="LangGraph reads it: put what its saver's list() gives into a new database, and import that one.",
            )
        return value

    def _find(self, module: object, name: object) -> Any:
        """The class, or for regular expressions the function, of that name; nothing else is ever looked for."""
        key = (str(module), str(name))
        found = self._classes.get(key)
        if found is not None:
            return found
        registration = named(self._registry, ".".join(key))
        if registration is not None and registration.cls.__name__ == name:
            self._classes[key] = registration.cls
            return registration.cls
        if key[0] == "__main__":
            return self._of_script(key[1])
        if key in SAFE_MSGPACK_TYPES:
            try:
                return getattr(importlib.import_module(key[0]), key[1])
            except (ImportError, AttributeError) as error:
                raise _not_rebuilt(".".join(key), error) from error
        raise _refused(".".join(key))

    def _of_script(self, name: str) -> Any:
        """A class of the script that saved the thread. Which script that was is not stored: the program names it."""
        found = {cls for (_, known), cls in self._classes.items() if known == name}
        if len(found) == 1:
            return found.pop()
        several = " and ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in found))
        raise UnknownType(
            f"the thread has values of the type {name} of the script that saved it"
            + (f", and it is not known which one that is: {several}" if found else ", which is not named here"),
            type_name=f"__main__.{name}",
            hint="Name that script alone: --types script.py, or HoldfastSaver(types=[script]) in Python.",
        )


def _classes(registry: Registry) -> dict[tuple[str, str], type]:
    """Registered classes by the two names that LangGraph stores. A class inside another has no place of its own."""
    found: dict[tuple[str, str], type] = {}
    for name in registry.names():
        registration = registry.by_name(name)
        if registration is not None:
            cls = registration.cls
            key = (cls.__module__, cls.__name__)
            if key not in found or cls.__qualname__ == cls.__name__:
                found[key] = cls
    return found


def _model(cls: Any, fields: Mapping[str, Any]) -> Any:
    """A pydantic model; data that its validators do not accept any more is taken as it is, as LangGraph does."""
    try:
        return cls(**fields)
    except Exception:  # noqa: BLE001 - whatever a validator raises
        try:
            return (cls.model_construct if hasattr(cls, "model_construct") else cls.construct)(**fields)
        except Exception as error:
            raise _not_rebuilt(f"{cls.__module__}.{cls.__qualname__}", error) from error


def _members(stored: Any) -> Any:
    """A set's members as they were: LangGraph stores tuples as lists, and no list was ever in a set."""
    if type(stored) is not list:
        return stored
    return [tuple(_members(item)) if type(item) is list else item for item in stored]


def _array(dtype: str, shape: list[int], order: Any, data: bytes) -> Any:
    try:
        import numpy as np

        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape, order=order)
    except Exception as error:
        raise _not_rebuilt("numpy.ndarray", error) from error


def _refused(name: str) -> UnknownType:
    module = name.rpartition(".")[0]
    return UnknownType(
        f"the thread has values of the type {name}, which is not registered here",
        type_name=name,
        hint=f"Name its module: --types {module} on the command line, HoldfastSaver(types=[{module!r}]) in Python.",
    )


def _not_rebuilt(name: str, error: Exception) -> SourceUnreadable:
    hint = "The class does not accept what LangGraph stored of it. Run the import with one that does."
    if name in {"builtins.set", "builtins.frozenset"}:
        hint = "LangGraph stores tuples as lists; a class among the members that holds one has to make it a tuple."
    return SourceUnreadable(f"a stored {name} cannot be rebuilt: {type(error).__name__}: {error}", hint=hint)


def _unreadable_kind(kind: str) -> SourceUnreadable:
    if kind.startswith("pickle"):
        return SourceUnreadable(
            "a value was stored with pickle, which runs code when it is loaded",
            hint="Store it anew with LangGraph, without pickle_fallback, and import again.",
        )
    if "+" in kind:
        return SourceUnreadable(
            f"the values are encrypted ({kind})",
            hint="Import them in Python: import_threads(source, saver, cipher=...).",
        )
    return SourceUnreadable(f"a value was stored in a way that this version does not know: {kind!r}")
