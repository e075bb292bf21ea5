"""Values that many readers want: decoded once, given out as copies.

Owns the prototypes of a history's items, which nobody outside ever gets, and how each is copied. Must not know where
the bytes come from. What always holds: two values that were given out share nothing that can be changed, and a value
that cannot be copied with certainty (an unusual class, the same object in two places) is decoded anew each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.codec.codes import SCALARS
from holdfast.codec.immutable import is_immutable
from holdfast.codec.shapes import FIELDS, PYDANTIC, Shape, shape_of
from holdfast.codec.types import Registry
from holdfast.codec.wire import array_of

Recipe = Callable[[], Any]
_set = object.__setattr__


class Uncopyable(Exception):
    """Only decoding makes another one of these."""


class Copies:
    """How to make more of each item, by the bytes that it came as; these are held, so that their ids stay theirs."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: dict[int, tuple[bytes, Recipe | None]] = {}

    def list_of(self, items: list[bytes], decode: Callable[[bytes], Any]) -> list[Any]:
        """The items' values, nobody else's. Items are the same bytes objects from one state to the next."""
        known = self._known
        new = [item for item in items if id(item) not in known]
        if new:
            for item, value in zip(new, decode(array_of(new)), strict=True):
                known[id(item)] = (item, self._recipe(value))
        return [
            recipe() if recipe is not None else decode(array_of([item]))[0]
            for item, recipe in [known[id(item)] for item in items]
        ]

    def _recipe(self, value: Any) -> Recipe | None:
        try:
            return _Recipes(self._registry).of(value) or (lambda: value)
        except Uncopyable:
            return None


class _Recipes:
    """Recipes for one item. ``of`` gives None for what need not be copied."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._seen: set[int] = set()

    def of(self, value: Any) -> Recipe | None:
        kind = type(value)
        if kind in SCALARS:
            return None
        if kind is dict or kind is list:
            self._once(value)
            return self._dict(value) if kind is dict else self._list(value)
        if is_immutable(value):
            return None
        self._once(value)
        return self._instance(value)

    def _once(self, value: Any) -> None:
        if id(value) in self._seen:
            raise Uncopyable
        self._seen.add(id(value))

    def _dict(self, value: dict[Any, Any]) -> Recipe:
        if not value:
            return dict
        if not all(type(key) in SCALARS or is_immutable(key) for key in value):
            raise Uncopyable
        parts = [(key, recipe) for key, item in value.items() if (recipe := self.of(item)) is not None]
        return _with_parts(value, parts) if parts else value.copy

    def _list(self, value: list[Any]) -> Recipe:
        if not value:
            return list
        parts = [(index, recipe) for index, item in enumerate(value) if (recipe := self.of(item)) is not None]
        return _with_parts(value, parts) if parts else value.copy

    def _instance(self, value: Any) -> Recipe:
        kind = type(value)
        registration = self._registry.by_type(kind)
        if registration is None or registration.cls is not kind or registration.save is not None:
            raise Uncopyable
        shape: Shape = shape_of(kind)
        if shape.form not in {FIELDS, PYDANTIC} or not shape.has_dict or shape._getters:
            raise Uncopyable
        make, fields = shape.make, self._dict(value.__dict__)
        if shape.form == FIELDS:

            def plain() -> Any:
                made = make()
                _set(made, "__dict__", fields())
                return made

            return plain
        names, extra, private = (
            value.__pydantic_fields_set__.copy,
            self.of(value.__pydantic_extra__) or _nothing,
            self.of(value.__pydantic_private__) or _nothing,
        )

        def model() -> Any:
            made = make()
            _set(made, "__dict__", fields())
            _set(made, "__pydantic_fields_set__", names())
            _set(made, "__pydantic_extra__", extra())
            _set(made, "__pydantic_private__", private())
            return made

        return model


def _nothing() -> None:
    return None


def _with_parts(value: Any, parts: list[tuple[Any, Recipe]]) -> Recipe:
    """A container of which only some items have to be copied themselves."""
    outer = value.copy

    def made() -> Any:
        copy = outer()
        for key, recipe in parts:
            copy[key] = recipe()
        return copy

    return made
