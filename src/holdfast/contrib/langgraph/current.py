"""Classes as the program has them now, for states that were saved with more fields.

Owns what becomes of a stored field that a class of a graph's state has no place for any more: the value comes back
without it, as with LangGraph's own savers, and a warning says so once. Must not know threads or stores. What always
holds: what is stored stays as it is; a class that has a place for the field (a dataclass's attributes, a model that
allows extra fields) gets it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from holdfast.codec.shapes import FIELDS, PYDANTIC, TUPLE, Adapted, Shape
from holdfast.codec.types import Registration

log = logging.getLogger("holdfast.contrib.langgraph")


def as_it_is_now(registration: Registration) -> Registration:
    """The registration for reading what was saved when the class had other fields."""
    if registration.save is not None or registration.shape.form not in {FIELDS, PYDANTIC, TUPLE}:
        return registration
    return _Current(registration.cls, registration.name, registration.version, registration.migrations, None, None)


class _Current(Registration):
    __slots__ = ()

    @property
    def shape(self) -> Shape:
        shape = self._shape
        if shape is None:
            shape = self._shape = _Place(self.cls)
        return shape


class _Place(Shape):
    """Leaves out what an instance cannot hold."""

    __slots__ = ("_told",)

    def __init__(self, cls: type) -> None:
        super().__init__(cls)
        self._told: set[str] = set()

    def put(self, value: Any, fields: dict[str, Any]) -> None:
        super().put(value, fields if self.has_dict else self._only(fields, self._setters))

    def put_one(self, value: Any, name: str, item: Any) -> None:
        if self.has_dict or name in self._setters:
            super().put_one(value, name, item)

    def make_tuple(self, fields: dict[str, Any]) -> Any:
        return super().make_tuple(fields if self.has_dict else self._only(fields, self.names))

    def put_pydantic(
        self,
        value: Any,
        fields: dict[str, Any],
        extra: dict[str, Any] | None,
        names: list[str],
        private: dict[str, Any] | None,
    ) -> None:
        cls: Any = self.cls
        if cls.model_config.get("extra") != "allow" and not fields.keys() <= self._nameset:
            names = [name for name in names if name in self._nameset or name not in fields]
            fields = self._only(fields, self._nameset)
        super().put_pydantic(value, fields, extra, names, private)

    def _only(self, fields: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
        gone = [name for name in fields if name not in known]
        if not gone:
            return fields
        Adapted.count += 1
        for name in gone:
            if name not in self._told:
                self._told.add(name)
                log.warning(
                    "%s.%s has no field %r any more: values are read without it (what is stored still has it)",
                    self.cls.__module__, self.cls.__qualname__, name,
                )  # fmt: skip
        return {name: item for name, item in fields.items() if name in known}
