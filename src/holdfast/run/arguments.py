"""What is called with what: arguments by name, their fingerprint, and values as they are stored in records.

Owns the binding of arguments, the choice between content and digest, and the way of a value into and out of a record.
Must not know runs or tools. What always holds: equal arguments have equal fingerprints, whether they are plain or
parts of the state; a value comes back from its record as the codec would give it back.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from holdfast.codec.blocks import BIG_HEAD, INLINE_MAX_BYTES, digest_of
from holdfast.codec.containers import TrackedSet
from holdfast.codec.operations import Operation
from holdfast.codec.state import Reader, State
from holdfast.codec.tracked import Node
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode
from holdfast.errors import Unencodable
from holdfast.run.records import Value

# A part of the state that is shorter is written down with a read's arguments: a digest would be hardly shorter, and
# less use to people.
NAMED_FROM_BYTES = 1_024
# More parts of the state in one call are not listed one by one: the fingerprint covers them all the same.
HOLES_MAX = 16
WORDS_MAX = 60
"""Characters of its first text that are kept of such a part."""
_LOOKED_AT = 20
_SECTION = "value"
_HOLDERS = (dict, list, tuple, TrackedSet)
_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


class Blocks(Protocol):
    """Where nodes and chunks are read from."""

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]: ...

    def bulk(self, digests: list[bytes]) -> bytes: ...


class Stowed(NamedTuple):
    """A value ready for a record, with the nodes and chunks that go to disk with it."""

    value: Value
    nodes: dict[bytes, bytes]
    chunks: dict[bytes, bytes]


class Packed(NamedTuple):
    """The arguments of one call. ``holes`` are parts of the state that are named by digest (see ``_hole``)."""

    stowed: Stowed
    holes: list[list[Any]] | None


def stow(value: Any, registry: Registry) -> Stowed:
    """A value for a record: inline, or cut into the same nodes as a section of the state."""
    return stow_encoded(encode(value, registry))


def stow_encoded(data: bytes) -> Stowed:
    """As stow(), of a value's encoding."""
    if len(data) <= INLINE_MAX_BYTES:
        return Stowed(data, {}, {})
    state = State()
    chunks: dict[bytes, bytes] = {}
    tree = state.section_of(data, chunks)
    nodes = {node.digest: raw for node, raw, _ in tree.unstored(state.fetch)}
    return Stowed([tree.root], nodes, chunks)


def fetch(value: Value, blocks: Blocks, registry: Registry, *, inert: bool = False) -> Any:
    """The value of a record. Nodes are proven by their digests on the way."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return decode(value, registry, inert=inert)
    state = State(_One(value[0], blocks))
    return Reader(state, registry, inert=inert).content(state.section(_SECTION))


class _One:
    """The source of a document with one section, whose root node is known."""

    def __init__(self, digest: bytes, blocks: Blocks) -> None:
        self.base = {_SECTION: digest}
        self.sections = [(_SECTION, digest)]
        self.nodes, self.bulk = blocks.nodes, blocks.bulk

    def operations(self, _section: str) -> list[Operation]:
        return []

    def again(self) -> bool:
        return False


class Binder:
    """The parameters of a function: which argument goes by which name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = inspect.signature(function)
        parameters = list(self.signature.parameters.values())
        # A method's object is no argument: it is not saved, and there is another one after a restart.
        self._method = bool(parameters) and parameters[0].name in {"self", "cls"}
        named = parameters[1:] if self._method else parameters
        self._names = [part.name for part in named if part.kind is not part.KEYWORD_ONLY]
        self._known = frozenset(part.name for part in named if part.kind is not part.POSITIONAL_ONLY)
        self._required = frozenset(part.name for part in named if part.default is part.empty)
        self._simple = not any(part.kind in _VARIADIC for part in named)
        self.variadic = next((part.name for part in named if part.kind is part.VAR_KEYWORD), None)
        self._order = {part.name: place for place, part in enumerate(named)}
        self._may_lack = [part for part in named if part.kind in _VARIADIC or part.default is not part.empty]
        self.defaults = {part.name: part.default for part in self._may_lack if part.kind not in _VARIADIC}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name, in the order of the parameters; those that were left out are not there."""
        given = args[1:] if self._method else args
        if self._simple and len(given) <= len(self._names):
            bound = dict(zip(self._names, given, strict=False))
            if not kwargs:
                if self._required <= bound.keys():
                    return bound
            elif kwargs.keys() <= self._known and not bound.keys() & kwargs.keys():
                bound.update(kwargs)
                if self._required <= bound.keys():
                    return {name: bound[name] for name in sorted(bound, key=self._order.__getitem__)}
        named = dict(self.signature.bind(*args, **kwargs).arguments)  # raises the TypeError that Python would
        if self._method:
            del named[next(iter(named))]
        return named

    def completed(self, bound: dict[str, Any]) -> dict[str, Any]:
        """Bound arguments as the function sees them: with the defaults of those that were left out."""
        missing = [part for part in self._may_lack if part.name not in bound]
        if not missing:
            return bound
        full = {**bound, **{part.name: _default(part) for part in missing}}
        return {name: full[name] for name in sorted(full, key=lambda name: self._order.get(name, len(self._order)))}

    def spread(self, bound: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bound arguments as positional and keyword ones again."""
        ready = inspect.BoundArguments(self._without_self(), bound)
        return ready.args, ready.kwargs

    def _without_self(self) -> inspect.Signature:
        parameters = list(self.signature.parameters.values())
        return self.signature.replace(parameters=parameters[1:]) if self._method else self.signature


def _default(part: inspect.Parameter) -> Any:
    if part.kind is part.VAR_POSITIONAL:
        return ()
    return {} if part.kind is part.VAR_KEYWORD else part.default


def fingerprint(arguments: dict[str, Any], registry: Registry, volatile: Iterable[str] = ()) -> bytes:
    """What the arguments amount to. Large parts of the state count by their digest.

    ``volatile`` names what is left out: arguments, or with dots keys of dicts in them.
    """
    for name in volatile:
        arguments = _without(arguments, name.split("."))
    big: list[Any] = []
    try:
        content = _content(arguments, (), big)
    except RecursionError:
        _encode(arguments, registry)  # raises where, if it is they that have no end
        raise
    data = _encode(content, registry)
    if big:
        data += encode(big, registry)
    return digest_of("holdfast.fingerprint", data)


def _without(value: Any, names: list[str]) -> Any:
    """A copy without what these names lead to; the value itself when they lead nowhere."""
    first, *rest = names
    if not isinstance(value, dict) or first not in value:
        return value
    if not rest:
        return {key: item for key, item in value.items() if key != first}
    return {key: _without(item, rest) if key == first else item for key, item in value.items()}


def pack(arguments: dict[str, Any], registry: Registry, *, by_digest: bool) -> Packed:
    """Arguments for a record. ``by_digest``: parts of the state need not be readable from it."""
    if not by_digest:
        return Packed(stow(arguments, registry), None)
    holes: list[list[Any]] = []
    written = _pierced(arguments, (), holes)
    if not holes:
        return Packed(stow(arguments, registry), None)
    return Packed(stow(written, registry), holes[:HOLES_MAX])


def _encode(value: Any, registry: Registry) -> bytes:
    try:
        return encode(value, registry)
    except Unencodable as error:
        error.root = "arguments"
        raise


def _content(value: Any, path: tuple[Any, ...], big: list[Any]) -> Any:
    """The value with the nodes in it opened; those with trees of their own are noted in ``big`` and left out."""
    if isinstance(value, Node):
        with value._doc.lock:
            data = value._doc.encoding(value)
            if data.startswith(BIG_HEAD):
                big.append([*path, data])
                return None
            if isinstance(value, TrackedSet):
                return set(value)
            value = value._peek()
    kind = type(value)
    if kind is dict:
        changed = {key: _content(item, (*path, key), big) for key, item in value.items() if _may_hold(item)}
        return {**value, **changed} if changed else value
    if kind is list or kind is tuple:
        if not any(map(_may_hold, value)):
            return value
        return kind(_content(item, (*path, index), big) for index, item in enumerate(value))
    return value


def _may_hold(value: Any) -> bool:
    """Whether a node can be in it, or it is one."""
    return isinstance(value, _HOLDERS)


def _pierced(value: Any, path: tuple[Any, ...], holes: list[list[Any]]) -> Any:
    """The value with the larger nodes in it replaced by None and noted in ``holes``."""
    if isinstance(value, Node):
        with value._doc.lock:
            data = value._doc.encoding(value)
        if len(data) < NAMED_FROM_BYTES and not data.startswith(BIG_HEAD):
            return value
        holes.append(_hole(value, path, data))
        return None
    kind = type(value)
    if kind is dict:
        return {key: _pierced(item, (*path, key), holes) if _may_hold(item) else item for key, item in value.items()}
    if kind is list or kind is tuple:
        items = [_pierced(item, (*path, at), holes) if _may_hold(item) else item for at, item in enumerate(value)]
        return kind(items)
    return value


# -- parts of the state that a read was given -----------------------------------------------------------------


def _hole(node: Any, path: tuple[Any, ...], data: bytes) -> list[Any]:
    """What is kept of it: its path in the arguments, its digest, its size, its first words, its place in the state."""
    place = node._path() if node._doc.is_attached(node) else ()
    known = list(place) if all(type(part) in {str, int} for part in place) else []
    return [list(path), digest_of("holdfast.value", data), len(node), first_words(node), known]


def first_words(value: Any) -> str:
    """The beginning of the first text in a value that has more than one word, or else of the first one."""
    waiting, shown = [value], ""
    for _ in range(_LOOKED_AT):
        if not waiting:
            break
        item = waiting.pop(0)
        item = item._peek() if isinstance(item, Node) else item
        if isinstance(item, str) and item:
            shown = shown or item
            if " " in item:
                shown = item
                break
        elif isinstance(item, dict):
            waiting[:0] = list(item.values())[:_LOOKED_AT]
        elif isinstance(item, list | tuple):
            waiting[:0] = list(item[:_LOOKED_AT])
    return shown[:WORDS_MAX]


class Passed:
    """A part of the state that a read was given: its size, its first words. ``Effect.whole()`` looks for the rest."""

    def __init__(self, size: int, words: str, digest: bytes, place: list[Any]) -> None:
        self.size, self.words, self.digest, self.place = size, words, digest, place

    def __repr__(self) -> str:
        items = f"{self.size:,} item{'' if self.size == 1 else 's'}"
        return f"<{items}: {self.words!r}…>" if self.words else f"<{items}>"

    def found_in(self, state: Any) -> Any:
        """The whole of it, as this state has it, or had it before items were appended; None where it has not."""
        try:
            value: Any = state
            for part in self.place:
                value = value[part]
            data = state.encoding(value)
        except (LookupError, TypeError, AttributeError):
            return None
        if self.place and digest_of("holdfast.value", data) == self.digest:
            return state.plain(value)
        if not self.place or not isinstance(value, list) or len(value) < self.size:
            return None
        begun = state.plain(value)[: self.size]
        data = State().fold(encode(begun, state.registry), [], {})
        return begun if digest_of("holdfast.value", data) == self.digest else None


def fill(arguments: Any, holes: list[list[Any]] | None, make: Callable[[Passed], Any] = lambda hole: hole) -> Any:
    """Recorded arguments with what stands for the parts that are not written out."""
    if not holes:
        return arguments
    arguments = copy.copy(arguments)
    for path, digest, size, *more in holes:
        words, place = more if len(more) == 2 else ("", [])
        _put(arguments, path, make(Passed(size, words, digest, place)))
    return arguments


def _put(holder: Any, path: list[Any], value: Any) -> Any:
    """Put a value where a path leads, in copies of what is on the way; returns what stands for the holder."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(holder, tuple):
        return (*holder[:first], _put(holder[first], rest, value), *holder[first + 1 :])
    holder[first] = _put(holder[first], rest, value)
    return holder


# -- what differs ---------------------------------------------------------------------------------------------

_DIFFERENCES_MAX = 3
_SHOWN_MAX = 60
_NONE: Any = object()


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """The first few places at which two values differ, as ``offer.price: 1.2 -> 1.3``."""
    found: list[str] = []
    _differ(old, new, where, found)
    more = len(found) - _DIFFERENCES_MAX
    return [*found[:_DIFFERENCES_MAX], f"and {more} more"] if more > 0 else found


def _differ(old: Any, new: Any, where: str, found: list[str]) -> None:
    if isinstance(old, Passed):
        if not isinstance(new, Node):
            found.append(f"{where}: {old!r} -> {_brief(new)}")
        elif digest_of("holdfast.value", new._doc.encoding(new)) != old.digest:
            found.append(f"{where}: {old!r} -> {len(new):,} items")  # type: ignore[arg-type] # containers have one
        return
    old, new = (one._doc.plain(one) if isinstance(one, Node) else one for one in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            name = str(key) if isinstance(key, str) and key.isidentifier() else f"[{key!r:.40}]"
            joined = f"{where}{'.' if where and not name.startswith('[') else ''}{name}"
            _differ(old.get(key, _NONE), new.get(key, _NONE), joined, found)
    elif isinstance(old, list | tuple) and type(old) is type(new) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            _differ(*pair, f"{where}[{at}]", found)
    elif type(old) is not type(new) or old != new:
        found.append(f"{where}: {_brief(old)} -> {_brief(new)}")


def _brief(value: Any) -> str:
    if value is _NONE:
        return "(not there)"
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 1]}…"
