"""What is called with what: arguments by name, their fingerprint, values as records have them; and secrets.

Owns the binding of arguments, the choice between content and digest, the way of a value into and out of a record, and
the secrets of each agent, in memory alone. Must not know runs or tools. What always holds: equal arguments have equal
fingerprints, whether they are plain or parts of the state; a value comes back from its record as the codec would give
it back. A secret is in no record, of whatever agent, and in no state; it does not come back with a rollback, a resume
or a branch, because there is nothing to come back from: each process gets it anew.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from holdfast.agent.names import check_text
from holdfast.codec.blocks import BIG_HEAD, INLINE_MAX_BYTES, digest_of
from holdfast.codec.containers import TrackedSet
from holdfast.codec.operations import Operation
from holdfast.codec.state import Reader, State
from holdfast.codec.tracked import Node
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, Damaged, ResultForgotten, Unencodable, UnknownSecret
from holdfast.run.records import LetGo, Value

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
    if isinstance(value, int):
        raise not_there(value, "a value that was recorded")
    state = State(_One(value[0], blocks))
    return Reader(state, registry, inert=inert).content(state.section(_SECTION))


def not_there(value: int, what: str, *, tool: str = "", path: str = "", run: str = "") -> ResultForgotten | Damaged:
    """The error for a value that is not there any more."""
    if not isinstance(value, LetGo):
        return Damaged(f"{what} is lost; that it happened is known", hint="Run `holdfast verify` to see what else is.")
    return ResultForgotten(
        f"{what} is no longer stored: the retention policy removed it",
        tool=tool,
        path=path,
        run=run,
        hint="That it happened is known, and it is not done again.",
    )


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
        self._called = getattr(function, "__name__", "it")
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
        try:
            named = dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:  # Python's own, which names no function
            raise TypeError(f"{self._called}{self.signature}: {error}") from None
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
        parameters = list(self.signature.parameters.values())
        named = self.signature.replace(parameters=parameters[1:]) if self._method else self.signature
        ready = inspect.BoundArguments(named, bound)
        return ready.args, ready.kwargs


def _default(part: inspect.Parameter) -> Any:
    if part.kind is part.VAR_POSITIONAL:
        return ()
    return {} if part.kind is part.VAR_KEYWORD else part.default


def fingerprint(arguments: dict[str, Any], registry: Registry, volatile: Iterable[str] = ()) -> bytes:
    """What the arguments amount to. Large parts of the state count by their digest.

    ``volatile`` names what is left out: arguments, or with dots keys of dicts in them.
    """
    return marked(arguments, registry, volatile)[0]


def marked(arguments: dict[str, Any], registry: Registry, volatile: Iterable[str] = ()) -> tuple[bytes, bytes | None]:
    """Their fingerprint, and their encoding where it was made of nothing but them: no part of a state is in it."""
    given = arguments
    for name in volatile:
        arguments = _without(arguments, name.split("."))
    big: list[Any] = []  # nodes with trees of their own
    try:
        content = _with_nodes(arguments, (), partial(_opened, big))
    except RecursionError:
        _encode(arguments, registry)  # raises where, if it is they that have no end
        raise
    data = _encode(content, registry)
    whole = data if content is given else None
    if big:
        data += encode(big, registry)
    return digest_of("holdfast.fingerprint", data), whole


def _opened(big: list[Any], node: Any, path: tuple[Any, ...]) -> Any:
    """What is inside a node of a state; one with a tree of its own goes to the others that are ``big``."""
    with node._doc.lock:
        data = node._doc.encoding(node)
        if data.startswith(BIG_HEAD):
            big.append([*path, data])
            return None
        inside = node._peek()
    return _with_nodes(inside, path, partial(_opened, big))


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

    def named(node: Any, path: tuple[Any, ...]) -> Any:
        with node._doc.lock:
            data = node._doc.encoding(node)
        if len(data) < NAMED_FROM_BYTES and not data.startswith(BIG_HEAD):
            return node
        holes.append(_hole(node, path, data))
        return None

    return Packed(stow(_with_nodes(arguments, (), named), registry), holes[:HOLES_MAX] or None)


def _encode(value: Any, registry: Registry) -> bytes:
    try:
        return encode(value, registry)
    except Unencodable as error:
        error.root = "arguments"
        raise


def _with_nodes(value: Any, path: tuple[Any, ...], make: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    """The value with what ``make(node, path)`` gives in the place of each node in it."""
    if isinstance(value, Node):
        return make(value, path)
    kind = type(value)
    if kind is dict:
        changed = {key: _with_nodes(item, (*path, key), make) for key, item in value.items() if _may_hold(item)}
        return {**value, **changed} if changed else value
    if kind is list or kind is tuple:
        if not any(map(_may_hold, value)):
            return value
        return kind(_with_nodes(item, (*path, index), make) for index, item in enumerate(value))
    return value


def _may_hold(value: Any) -> bool:
    """Whether a node can be in it, or it is one."""
    return isinstance(value, _HOLDERS)


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


# -- secrets --------------------------------------------------------------------------------------------------


log = logging.getLogger("holdfast.run")

TEXT_MIN = 8
"""Shorter texts turn up by chance, so that nobody could keep them out of anything."""

ASKED: Any = object()
"""In the place of a value: the secret is asked for, not given."""
_lock = threading.Lock()
_given: WeakKeyDictionary[Any, dict[str, Secret]] = WeakKeyDictionary()


class Secret:
    """A secret. It cannot be saved, copied or shown; ``reveal()`` gives its value to the code that needs it."""

    __slots__ = ("_value", "name")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._value = value

    def reveal(self) -> Any:
        return self._value

    def __repr__(self) -> str:
        return f"<Secret {self.name}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"secret {self.name} is not written anywhere")


def secret(agent: Any, name: str, value: Any = ASKED) -> Secret | None:
    """Give a secret to this process, or ask for it. None as the value forgets it."""
    check_text(name, "a secret's name")
    with _lock:
        mine = _given.setdefault(agent, {})
        if value is None:
            _given[agent] = {known: one for known, one in mine.items() if known != name}
            return None
        if value is not ASKED:
            if isinstance(value, str | bytes) and len(value) < TEXT_MIN:
                raise BadOption(
                    f"secret {name} has fewer than {TEXT_MIN} characters: it could not be told from other text",
                    hint="Give a longer one, or keep it in an object of your own.",
                )
            _given[agent] = {**mine, name: Secret(name, value)}
        found = _given[agent].get(name)
    if found is None:
        raise UnknownSecret(
            f"secret {name} was not given to this process",
            hint=f"Secrets are never stored. Give it first: agent.secret({name!r}, value).",
        )
    return found


def refuse(agent: Any, what: str, arguments: Any, registry: Registry) -> None:
    """Raise when a secret's text is somewhere in these arguments, which would be recorded.

    Parts of the state are not looked at: they are named by digest.
    """
    if _given and (name := leaked(agent, encode(_with_nodes(arguments, (), lambda _node, _path: None), registry))):
        raise exposed(name, what)


def leaked(agent: Any, *parts: bytes) -> str:
    """The name of a secret whose text is in these encoded bytes, empty when there is none."""
    if not _given:
        return ""
    wanted = [(name, text) for name, text in _texts(agent) if isinstance(text, bytes)]
    return next((name for name, text in wanted if any(text in part for part in parts)), "")


def exposed(name: str, what: str) -> Unencodable:
    error = Unencodable(
        f"it contains the secret {name}, which must not be recorded",
        hint=f"Do not pass it on: call holdfast.current().secret({name!r}).reveal() where it is needed.",
    )
    error.root = what
    return error


def scrub(agent: Any, value: Any, what: str) -> Any:
    """The value without the texts of secrets. Each is replaced by its name, and that is logged."""
    texts = _texts(agent)
    if not texts:
        return value
    found: set[str] = set()
    try:
        clean = _scrubbed(value, texts, found)
    except RecursionError:
        raise Unencodable("it is nested too deeply, or contains itself") from None
    if found:
        log.warning("%s contains the secret %s; it is recorded and returned without", what, ", ".join(sorted(found)))
        return clean
    return value


def _texts(agent: Any) -> list[tuple[str, str | bytes]]:
    """The texts to look for, as text and as bytes.

    Those of the other agents in this process are among them: an agent's child, or what is around it, may know them.
    """
    if not _given:
        return []
    with _lock:
        known = [_given.get(agent, {}), *(others for other, others in _given.items() if other is not agent)]
    texts: list[tuple[str, str | bytes]] = []
    for one in (one for secrets in known for one in secrets.values()):
        if isinstance(one._value, str):
            texts += [(one.name, one._value), (one.name, one._value.encode("utf-8", "surrogatepass"))]
        elif isinstance(one._value, bytes):
            texts.append((one.name, one._value))
            try:
                texts.append((one.name, one._value.decode()))
            except UnicodeDecodeError:
                continue
    return texts


def _scrubbed(value: Any, texts: list[tuple[str, str | bytes]], found: set[str]) -> Any:
    kind = type(value)
    if kind is str or kind is bytes:
        for name, text in texts:
            if type(text) is kind and text in value:
                found.add(name)
                shown = f"<secret {name}>"
                value = value.replace(text, shown if kind is str else shown.encode())
        return value
    if kind is dict:
        return {_scrubbed(key, texts, found): _scrubbed(item, texts, found) for key, item in value.items()}
    if kind in {list, tuple, set, frozenset}:
        return kind(_scrubbed(item, texts, found) for item in value)
    return value
