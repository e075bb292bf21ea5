"""Secrets that the program holds under telling names, found before the first byte of a dump is written.

Owns the look through frames, globals and agents for values under secret names. Must not know files. Holds always:
nothing of the program runs (see shapes.py); nearer values are looked at first; the look ends at its bounds.

The walk that writes a dump learns secrets too late: a message that repeats a password is written before the object
that holds it is met.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

from holdfast.crash.redaction import Redactor, looks_random, may_be_secret
from holdfast.crash.shapes import first_items, frame_locals, is_builtin, is_genuine, is_subtype, layout_of

# What the names above a value say of it. Below a secret name so many levels of containers are secret.
_PLAIN, _DOUBTFUL, _LAST, _SECRET = 0, 1, 2, 5
_HERE = __file__.rpartition("/")[0] + "/"
_ITEMS = 100_000  # of one container
_SHAPED = 64  # keys of a dictionary whose keys are remembered
_LEAVES = frozenset(map(id, (str, bytes, bytearray, int, float, complex, bool, type(None))))
_SKIPPED = frozenset(map(id, (types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, type)))
_PASSED = _LEAVES | _SKIPPED
_FIELD = 40  # characters of a key that is a field's name
_SUSPENDED = (
    (types.CoroutineType, "cr_frame"),
    (types.GeneratorType, "gi_frame"),
    (types.AsyncGeneratorType, "ag_frame"),
)


class Look:
    """One look. ``whole`` says whether it saw everything that the roots lead to."""

    def __init__(self, redactor: Redactor, most: int, until: float) -> None:
        self.whole = True
        self._redactor = redactor
        self._left = most
        self._until = until
        self._waiting: deque[tuple[Any, int]] = deque()
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # so that an identity stays its object's
        self._doubtful: dict[str, bool] = {}
        self._shapes: dict[tuple[int, ...], bool] = {}

    def frame(self, frame: types.FrameType, *, with_globals: bool) -> None:
        """Names of a frame, and of its module where that is the program's own. Our own frames hold nothing of it."""
        if frame.f_code.co_filename.startswith(_HERE):
            return
        named = frame_locals(frame, _ITEMS)
        self.named(named[0] if named else ())
        own = frame.f_globals
        if with_globals and type(own) is dict and id(own) not in self._seen:
            self._seen[id(own)] = _SECRET  # once
            self.named(first_items(own, _ITEMS))

    def named(self, items: Iterable[tuple[Any, Any]]) -> None:
        self._held.append(items)
        for name, value in items:
            self._met(value, self._level(name, _PLAIN))

    def run(self) -> None:
        """Follow everything that is waiting, the nearest first. Most of it is plain, and costs no call."""
        waiting, seen, harmless = self._waiting, self._seen, self._harmless
        while waiting:
            self._left -= 1
            if self._left < 0 or (not self._left % 64 and monotonic() > self._until):
                self.whole = False
                break
            value, level = waiting.popleft()
            kind = type(value)
            try:
                if level or not (
                    (kind is dict and harmless(value)) or ((kind is list or kind is tuple) and len(value) != 2)
                ):
                    self._below(value, level)
                    continue
                for item in list(value.values()) if kind is dict else value[:_ITEMS]:
                    if id(type(item)) not in _PASSED and id(item) not in seen:
                        seen[id(item)] = _PLAIN
                        waiting.append((item, _PLAIN))
            except Exception:  # noqa: BLE001, S112 (an object in any state may be met; the look goes on)
                continue
        waiting.clear()
        seen.clear()
        self._held.clear()

    def _level(self, name: Any, above: int) -> int:
        if above >= _LAST:
            return above
        if type(name) is bytes and len(name) < 100:
            name = name.decode("latin-1")
        if type(name) is not str:
            return above
        if self._redactor.secret_name(name):
            return _SECRET
        doubtful = self._doubtful.get(name)
        if doubtful is None:
            doubtful = self._doubtful[name] = may_be_secret(name)
        return _DOUBTFUL if doubtful else above

    def _met(self, value: Any, level: int) -> None:
        kind = type(value)
        if id(kind) in _LEAVES:
            if level:
                self._learn(value, level)
        elif id(kind) not in _SKIPPED and self._seen.get(id(value), -1) < level:
            self._seen[id(value)] = level
            self._waiting.append((value, level))

    def _learn(self, value: Any, level: int) -> None:
        """A value without parts, under a name that says something of it."""
        text = text_of_leaf(value)
        if text and (level >= _LAST or looks_random(text)):
            self._redactor.learn(text)

    def _below(self, value: Any, level: int) -> None:
        kind = type(value)
        layout = layout_of(kind)
        base: Any = layout.base
        level = level - 1 if level > _LAST else level if level < _LAST else _PLAIN
        if level == _PLAIN and base is object and layout.dictionary is not None and not layout.slots:
            self._waiting.append((layout.dictionary.__get__(value), level))
            return
        if base is dict:
            for key, item in first_items(value, _ITEMS):
                self._met(item, self._level(key, level))
                if level >= _LAST and not is_field(key):
                    self._learn(key, level)
        elif base is list or base is tuple:
            items = base.__getitem__(value, slice(0, _ITEMS))
            if layout.fields and len(layout.fields) == len(items):
                self._pairs(zip(layout.fields, items, strict=True), level)
            elif len(items) == 2:  # a header: ("authorization", "...")
                self._met(items[0], level)
                self._met(items[1], self._level(items[0], level))
            else:
                for item in items:
                    self._met(item, level)
        elif base is set or base is frozenset or base is deque:
            for item in list(islice(base.__iter__(value), _ITEMS)):
                self._met(item, level)
        elif text := text_of_leaf(value):
            if level:
                self._learn(text, level)
        elif kind is types.FunctionType:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                for inside in gc.get_referents(cell):  # none when it is empty
                    self._met(inside, self._level(name, _PLAIN))
            return
        elif kind is types.MethodType:
            self._met(value.__self__, _PLAIN)
            return
        elif kind is partial:
            self._met(value.args, _PLAIN)
            self._met(value.keywords, _PLAIN)
            return
        elif is_subtype(kind, BaseException):
            self._met(BaseException.__dict__["args"].__get__(value), level)
        elif any(kind is suspended for suspended, _name in _SUSPENDED):
            frame = next(getattr(value, name) for suspended, name in _SUSPENDED if kind is suspended)
            named = frame_locals(frame, _ITEMS) if frame is not None else None
            self._pairs(named[0] if named else (), level)
            return
        if not is_builtin(kind):
            self._attributes(layout.attributes(value, _ITEMS)[0], level)

    def _harmless(self, own: dict[Any, Any]) -> bool:
        """Whether the keys are names that say nothing. Of most dictionaries there are many with the same keys."""
        if len(own) > _SHAPED:
            return False
        shape = tuple(map(id, own))
        known = self._shapes.get(shape)
        if known is None:
            names = [*own]
            self._held.append(names)
            known = self._shapes[shape] = all(
                type(name) is str and self._level(name, _PLAIN) == _PLAIN for name in names
            )
        return known

    def _attributes(self, named: list[tuple[str, Any]], level: int) -> None:
        """Of an object under a secret name, texts and numbers are secret; what else it refers to may be anything."""
        for name, item in named:
            self._met(item, self._level(name, level if id(type(item)) in _LEAVES else _PLAIN))

    def _pairs(self, named: Iterable[tuple[Any, Any]], level: int) -> None:
        named = list(named)
        self._held.append(named)
        for name, item in named:
            self._met(item, self._level(name, level))


def is_field(key: Any) -> bool:
    """Whether a key is the name of a field, as ``user`` in ``credentials``; what else is a key may be secret itself."""
    return type(key) is str and len(key) <= _FIELD and key.replace("-", "_").isidentifier() and not any(
        map(str.isdigit, key)
    )  # fmt: skip


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
