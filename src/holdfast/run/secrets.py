"""Secrets: what a process was told and must not write down.

Owns the secrets of each agent, in memory alone, and keeps them out of records. What always holds: a secret is in no
record, of whatever agent, and in no state; it does not come back with a rollback, a resume or a branch, because there
is nothing to come back from: each process gets it anew.

    secret(agent, name)                  a ``Secret``; UnknownSecret when this process was not given it
    secret(agent, name, value)           give it to this process; ``value=None`` forgets it
    refuse(agent, what, arguments)       Unencodable when a secret's text is in them
    leaked(agent, *data)                 the name of a secret whose text is in these encoded bytes, or empty
    scrub(agent, value, what)            the value with the texts of secrets replaced by their names
"""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.codec.tracked import Node
from holdfast.errors import BadName, BadOption, Unencodable, UnknownSecret

log = logging.getLogger("holdfast.run")

NAME_MAX = 200
TEXT_MIN = 8
"""Shorter texts turn up by chance, so that nobody could keep them out of anything."""

_ASKED = object()
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


def secret(agent: Any, name: str, value: Any = _ASKED) -> Secret | None:
    """Give a secret to this process, or ask for it. None as the value forgets it."""
    if not 0 < len(name) <= NAME_MAX:
        raise BadName(f"a secret's name has 1 to {NAME_MAX} characters")
    with _lock:
        mine = _given.setdefault(agent, {})
        if value is None:
            _given[agent] = {known: one for known, one in mine.items() if known != name}
            return None
        if value is not _ASKED:
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


def refuse(agent: Any, what: str, arguments: Any) -> None:
    """Raise when a secret's text is somewhere in these arguments, which would be recorded."""
    texts = _texts(agent)
    if not texts:
        return
    for path, value in _leaves(arguments, ()):
        for name, text in texts:
            if type(value) is type(text) and text in value:  # type: ignore[operator] # two of one type
                raise exposed(name, what, path)


def leaked(agent: Any, *parts: bytes) -> str:
    """The name of a secret whose text is in these encoded bytes, empty when there is none."""
    wanted = [(name, text) for name, text in _texts(agent) if isinstance(text, bytes)]
    return next((name for name, text in wanted if any(text in part for part in parts)), "")


def exposed(name: str, what: str, path: tuple[Any, ...] = ()) -> Unencodable:
    error = Unencodable(
        f"it contains the secret {name}, which must not be recorded",
        path=path,
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


def _leaves(value: Any, path: tuple[Any, ...]) -> Any:
    """Every text in a value, with the way to it. Parts of the state are not entered: they are named by digest."""
    if isinstance(value, str | bytes):
        yield path, value
    elif isinstance(value, Node):
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(key, path)
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))


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
