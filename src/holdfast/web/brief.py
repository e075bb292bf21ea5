"""Values and changes cut to what a page can show, in JSON's own types.

Owns the bounds. The forms are those of ``schemas``; what was cut says so in words of its own: a text ends in ``…``,
a container has an entry of type ``more``. A dictionary that could be taken for such a mark is written as pairs, and an
integer that a browser would round as text. What always holds: the cost is bounded by what is given back, not by the
value, so that a state of 100 MB and a text of 10 MB are as quick as any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from holdfast import MISSING, Change, Record
from holdfast.crash import Redactor
from holdfast.schemas import as_json, text_of
from holdfast.text import count, size
from holdfast.travel import Held, words

T = TypeVar("T")

CHARACTERS = 2_000
"""Of one text."""
ITEMS = 40
"""Of one container."""
ROOM = 400
"""Values in all."""
WORDS_MOST = 200_000
"""Characters of texts that are compared by their words."""
LEARNT_MOST = 200_000
"""Values that are looked at for secrets, of one value."""
HIDDEN = "[redacted name]"
"""Stands for a value under a secret name."""
_EXACT = 2**53  # from here on a browser's numbers are rounded
_DIGITS_BITS = 4_000  # of integers whose digits are looked at


def brief(
    value: Any,
    characters: int = CHARACTERS,
    items: int = ITEMS,
    room: int = ROOM,
    redactor: Redactor | None = None,
    *,
    marked: bool = False,
) -> Any:
    """A value as ``as_json`` gives it, but for what is too much.

    With a ``redactor``, no text is cut within a secret that it knows (see ``learn``), and what stands under a secret
    name is left out. ``marked``: it is what ``as_json`` gave, whose marks stay marks.
    """
    return _Cut(characters, items, room, redactor, marked=marked).of(value, 0)


class _Cut:
    def __init__(self, characters: int, items: int, room: int, redactor: Redactor | None, *, marked: bool) -> None:
        self._characters, self._items, self._room, self._redactor = characters, items, room, redactor
        self._marked = marked

    def of(self, value: Any, depth: int) -> Any:
        self._room -= 1
        if isinstance(value, str):
            return shorter(value, self._characters, self._redactor)
        if self._redactor is not None and type(value) in {int, float}:
            plain = str(value) if type(value) is float or value.bit_length() < _DIGITS_BITS else ""
            cleaned = self._redactor.clean(plain)
            if cleaned != plain:
                return cleaned
        if type(value) is int and abs(value) > _EXACT and value.bit_length() < _DIGITS_BITS:
            return {"$type": "int", "$text": str(value)}
        if isinstance(value, Record):
            if depth > 8:
                return {"$type": "more", "$more": 1}
            fields = value.fields if isinstance(value.fields, dict) else value.data
            return {"$type": value.type_name, "$version": value.version, "$data": self.of(fields, depth + 1)}
        if isinstance(value, Held):
            said = f"{size(value.count)}" if value.kind == "value" else count(value.count, "item")
            return {"$type": "large", "$text": f"a large {value.kind}, {said}"}
        if not isinstance(value, dict | list | tuple | set | frozenset):
            shape = array_kind(value)
            if shape:
                return {"$type": "array", "$text": shape}
            return as_json(value) if not isinstance(value, bytes | bytearray) else self._bytes(value)
        if self._room <= 0 or depth > 8:
            return {"$type": "more", "$more": len(value)}
        if isinstance(value, dict):
            return self._dict(value, depth)
        some = sorted(value, key=repr) if isinstance(value, set | frozenset) and len(value) <= 1_000 else value
        found = [self.of(item, depth + 1) for item in islice(some, self._items)]
        more = len(value) - len(found)
        return [*found, {"$type": "more", "$more": more}] if more > 0 else found

    def _bytes(self, value: bytes | bytearray) -> dict[str, str]:
        some: Any = value
        if self._redactor is not None:
            some = self._redactor.clean_bytes(bytes(value[: 2 * self._characters]))
        return {"$type": type(value).__name__, "$text": text_of(some, self._characters)}

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        pairs = [(key, self._under(key, item, depth)) for key, item in islice(value.items(), self._items)]
        more = len(value) - len(pairs)
        found = {shorter(key, 200, self._redactor): item for key, item in pairs if isinstance(key, str)}
        posing = not self._marked and any(key.startswith("$") or key == "…" for key in found)
        if posing or len(found) < len(pairs):  # as keys of JSON they would be taken for marks, or for each other
            listed = [[self.of(key, depth + 1), item] for key, item in pairs]
            return {"$type": "dict", "$items": listed} | ({"$more": more} if more else {})
        if more:
            found["…"] = {"$type": "more", "$more": more}
        return found

    def _under(self, key: Any, item: Any, depth: int) -> Any:
        if self._redactor is not None and isinstance(key, str) and self._redactor.secret_name(key):
            return HIDDEN
        return self.of(item, depth + 1)


def some(name: str, found: Sequence[T], most: int, shown: Callable[[T], Any]) -> dict[str, Any]:
    """The first of a list, as it is shown, and how many more there are."""
    return {name: [shown(one) for one in found[:most]], f"more_{name}": max(0, len(found) - most)}


def learn(value: Any, redactor: Redactor, *, secret: bool = False) -> None:
    """Everything below a secret name is known to the redactor from then on. Before anything is cut, all is learnt."""
    waiting, left = deque([(value, secret)]), LEARNT_MOST  # the nearest first
    while waiting and left > 0:
        one, secret = waiting.popleft()
        left -= 1
        if isinstance(one, Record):
            waiting.append((one.fields if isinstance(one.fields, dict) else one.data, secret))
        elif isinstance(one, dict):
            for key, item in islice(one.items(), left):
                named = isinstance(key, str) and redactor.secret_name(key)
                waiting.append((item, secret or named or redactor.doubtful(key, item)))
                if secret and not (isinstance(key, str) and key.replace("-", "_").isidentifier()):
                    waiting.append((key, True))
        elif isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[0], str):
            named = redactor.secret_name(one[0])  # a header: ("authorization", "...")
            waiting += [(one[0], secret), (one[1], secret or named)]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += [(item, secret) for item in islice(one, left)]
        elif secret and isinstance(one, str | bytes | bytearray):
            redactor.learn(one if isinstance(one, str) else one.decode("utf-8", "replace"))
        elif secret and (type(one) is float or (type(one) is int and one.bit_length() < _DIGITS_BITS)):
            redactor.learn(str(one))


def secret_path(path: Iterable[Any], redactor: Redactor) -> bool:
    """Whether a place has a secret name at any level."""
    return any(isinstance(part, str) and redactor.secret_name(part) for part in path)


def shorter(text: str, most: int, redactor: Redactor | None = None) -> str:
    if len(text) <= most:
        return text
    if redactor is not None:
        most = redactor.safe_cut(text, most)
    return f"{text[:most]}… ({len(text) - most:,} more characters)"


def array_kind(value: Any) -> str:
    """``float32, 3 by 224 by 224``: an array by its type and shape; empty for anything else."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or isinstance(value, Record):
        return ""
    return f"{dtype}, {' by '.join(map(str, shape)) or 'one value'}"


def change_brief(change: Change, characters: int = CHARACTERS, redactor: Redactor | None = None) -> dict[str, Any]:
    """One change, as ``change_json`` has it; of two long texts also the words that differ."""
    secret = redactor is not None and secret_path(change.path, redactor)

    def shown(value: Any) -> Any:
        return HIDDEN if secret else brief(value, characters, redactor=redactor)

    data: dict[str, Any] = {
        "where": shorter(change.where, 300, redactor), "kind": change.kind,
        "path": [brief(part, 200, redactor=redactor) for part in change.path],
    }  # fmt: skip
    if change.old is not MISSING:
        data["old"] = shown(change.old)
    if change.new is not MISSING:
        data["new"] = shown(change.new)
    if isinstance(change.old, str) and isinstance(change.new, str) and len(change.old) + len(change.new) < WORDS_MOST:
        old, new = change.old, change.new
        if redactor is not None:
            old, new = ("", "") if secret else (redactor.clean(old), redactor.clean(new))
        data["words"] = [[sign, shorter(text, characters)] for sign, text in words(old, new)]
    return data
