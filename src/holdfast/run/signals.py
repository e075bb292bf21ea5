"""Signals: messages from elsewhere to a run, or on purpose to whichever run of an agent asks next.

Owns what a signal is, whom it is for, and how it lies in the log. Must not know how a run waits. What always holds: a
signal to a run is for that run alone, and for no later one of the same id; it is taken once, and a rollback does not
give it back; one id is one signal, however often it is sent.

    key_of(agent, run="")                  the key of the entries that are signals to that run; "": to the agent
    body_of(name, value, ...), read(at, body)      a signal as an entry of the log, and from one
    visible(view, agent, branch, run)      what a run may take, oldest first; None for a run: what a plain loop may
    sent_before(view, agent, id)           whether this id was used before
    all_of(view, agent)                    every signal to an agent, oldest first, with the ids of those dropped
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from holdfast.codec.blocks import digest_of
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import BadName, BadOption, CorruptValue
from holdfast.run.past import RunPast
from holdfast.store.catalog import Agent, Branch, View

NAME_MAX = 200
ID_MAX = 200
VALUE_MAX_BYTES = 1 << 20
"""A signal is a message, not a way to move data: it is read again at each look until it is received."""


class Signal(Struct, frozen=True):
    """A message: its id, its time, its name, its encoded value, the branch, the run, and who sent it.

    ``begun`` is the number of the record with which the run began: a later run may have the same id. The id of a
    signal is its own, not its entry's number: a record that says it was received means the same in every store.
    """

    id: bytes
    at: int
    name: str
    value: bytes
    branch: bytes | None = None
    run: str = ""
    begun: int = 0
    by: str = ""

    @property
    def text(self) -> str:
        """Its id, for people."""
        try:
            return self.id.decode()
        except UnicodeDecodeError:
            return self.id.hex()

    def is_for(self, branch: bytes, run: RunPast | None) -> bool:
        """Whether this run, or a plain loop of this branch, may take it."""
        if self.branch not in {None, branch}:
            return False
        return not self.run or (run is not None and (self.run, self.begun) == (run.id, run.number))


def key_of(agent: bytes, run: str = "") -> bytes:
    """The key of the entries that are signals to a run of the agent with this uuid, or to the agent."""
    return digest_of("holdfast.signal", agent + run.encode())[:16]


def _id_key(agent: bytes, id: bytes) -> bytes:
    return digest_of("holdfast.signal id", agent + id)[:16]


def body_of(
    id: bytes, name: str, value: Any, registry: Registry, *, branch: bytes, run: RunPast | None, by: str
) -> dict[str, Any]:
    """The body of the entry that is a signal."""
    check_name(name)
    data = encode(value, registry)
    if len(data) > VALUE_MAX_BYTES:
        raise BadOption(f"a signal's value takes {len(data)} bytes, more than {VALUE_MAX_BYTES}")
    whose: dict[str, Any] = {} if run is None else {"run": run.id, "begun": run.number}
    return {"what": "signal", "name": name, "value": data, "branch": branch, "id": id, "by": by, **whose}


def entries_of(agent: bytes, body: dict[str, Any]) -> list[tuple[dict[str, Any], bytes]]:
    """The entries that a signal consists of, each with its key: itself, and that its id is used."""
    used = {"what": "signal id", "run": body.get("run", "")}
    return [(body, key_of(agent, body.get("run", ""))), (used, _id_key(agent, body["id"]))]


def drop_of(agent: bytes, signal: Signal, by: str) -> tuple[dict[str, Any], bytes]:
    """The entry that says that a signal counts no more, and its key."""
    return {"what": "signal dropped", "id": signal.id, "by": by}, key_of(agent, signal.run)


def read(at: int, parts: Mapping[str, Any]) -> Signal:
    """A signal from its entry."""
    try:
        whose = parts.get("run", ""), parts.get("begun", 0), parts.get("by", "")
        return Signal(parts["id"], at, parts["name"], parts["value"], parts["branch"], *whose)
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptValue("an entry that should be a signal does not follow the format") from error


def visible(view: View, agent: Agent, branch: Branch, run: RunPast | None) -> list[Signal]:
    """The signals that a run may take, or, without one, a plain loop; oldest first. Some may have been taken before."""
    keys = [key_of(agent.uuid), *([key_of(agent.uuid, run.id)] if run is not None else [])]
    found = [entry for entry in view.log_under(keys) if entry.a == agent.a]
    signals, dropped = _sorted((entry.at, entry.body) for entry in found)
    return [one for one in signals if one.is_for(branch.uuid, run) and one.id not in dropped]


def stamp(view: View, agent: Agent, run: RunPast | None) -> int:
    """A number that differs when something was sent to a run, or dropped: asking for it reads no entry."""
    return view.count_under([key_of(agent.uuid), *([key_of(agent.uuid, run.id)] if run is not None else [])])


def sent_before(view: View, agent: Agent, id: bytes) -> bool:
    """Whether an id was used for a signal to this agent."""
    return any(entry.a == agent.a for entry in view.log_under([_id_key(agent.uuid, id)]))


def all_of(view: View, agent: Agent) -> tuple[list[Signal], set[bytes]]:
    """Every signal to an agent, oldest first, and the ids of those that were dropped."""
    return _sorted((entry.at, entry.body) for entry in view.log(agent.a))


def _sorted(entries: Iterable[tuple[int, Mapping[str, Any]]]) -> tuple[list[Signal], set[bytes]]:
    signals: dict[bytes, Signal] = {}
    dropped: set[bytes] = set()
    for at, body in entries:
        if body.get("what") == "signal":
            one = read(at, body)
            signals.setdefault(one.id, one)
        elif body.get("what") == "signal dropped":
            dropped.add(body["id"])
    return list(signals.values()), dropped


def check_name(name: str) -> None:
    if not 0 < len(name) <= NAME_MAX:
        raise BadName(f"a signal's name has 1 to {NAME_MAX} characters")


def check_id(id: str) -> bytes:
    """An id that a sender gave, as it is kept."""
    if type(id) is not str or not 0 < len(id) <= ID_MAX:
        raise BadName(f"a signal's id is a text of 1 to {ID_MAX} characters, not {id!r:.60}")
    return id.encode()
