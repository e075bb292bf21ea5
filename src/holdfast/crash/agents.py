"""The agents of a process: what a dump says about each, what their histories say about dumps, and a new start from one.

Owns the agents' part, the events *crash* and *stuck*, which dumps histories need, and which agent and checkpoint of a
dump are meant. Must not know how a dump is written or how branches are made. Holds always: nothing waits for a lock
longer than a moment, because the program that failed may hold it for ever; no class of the program is asked for
anything; what a dump says is a claim: the stores that are worked on are the caller's, never ones that a dump names.
"""

from __future__ import annotations

import os
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from importlib import import_module
from pathlib import Path
from time import gmtime, strftime
from typing import TYPE_CHECKING, Any

from holdfast.agent.watchers import WATCHERS
from holdfast.codec.tracked import GONE
from holdfast.crash import folder, kinds, shapes, stacks
from holdfast.crash.dump import Dump, open_dump
from holdfast.crash.dumpfile import PartFailed, append, in_time
from holdfast.crash.kinds import MAX_NAME
from holdfast.crash.records import Agent
from holdfast.crash.redaction import BY_NAME, Redactor, looks_secret
from holdfast.errors import HoldfastError, NotInDump

if TYPE_CHECKING:
    from holdfast.agent.checkpoint import Checkpoint
    from holdfast.agent.store import Store

_LOCK_S = 0.2  # for a lock of the state
_LEDGER_S = 1.5  # for reading effects, which needs the catalog
_GONE_LEDGER_S = 20.0  # the same for a process that is gone, which holds no lock any more
_UNFINISHED_S = 5.0  # for reading what is not finished, which somebody waits for
_EVENT_S = 2.0  # for writing an event, which needs the disk
_MOST_AGENTS = 200
_STATE_VALUES = 20_000
_STATE_DEPTH = 24
_STATE_TEXT = 4_096
_VALUE_VALUES = 500  # of one argument or result
_MESSAGE = 400

Part = tuple[str, Callable[[], Any]]
_left: deque[tuple[weakref.ref[Any], int]] = deque(maxlen=_MOST_AGENTS)  # closed handles, and by which exception
_travelling: set[int] = set()


def open_stores() -> list[Any]:
    """The stores that this process has open."""
    module = sys.modules.get("holdfast.agent.places")
    return module.open_stores() if module is not None else []


def open_agents() -> list[Any]:
    """The agents that this process writes, and those that the exception at hand has closed on its way out."""
    handles = [handle for store in open_stores() for handle in list(store._handles.values())]  # noqa: SLF001
    found = {_called(handle): handle for handle in handles if not handle.closed}
    for reference, error in list(_left):
        handle = reference()
        if handle is not None and error in _travelling:
            found.setdefault(_called(handle), handle)
    return list(found.values())[:_MOST_AGENTS]


def watch(handle: Any, opened: bool) -> None:
    """A handle that is closed while an exception travels is remembered: `with` closes it before anybody is told."""
    error = sys.exception()
    if not opened and handle._writer is not None and error is not None:  # noqa: SLF001
        _left.append((weakref.ref(handle), id(error)))


@contextmanager
def travelling(error: BaseException | None) -> Iterator[None]:
    """Inside, agents that were closed by this exception, or by one that led to it, count as the process's."""
    _travelling.update(map(id, stacks.exception_tree(error) if error is not None else ()))
    try:
        yield
    finally:
        _travelling.clear()


def parts() -> list[Part]:
    """For each open agent a name and what gives its part."""
    return [(_called(handle), partial(describe, handle)) for handle in open_agents()]


def values() -> list[list[tuple[str, Any]]]:
    """Of each open agent, the sections that are loaded, by name."""
    return [
        [(name, section.value) for name, section in shapes.first_items(handle._document.sections, _STATE_VALUES)]  # noqa: SLF001
        for handle in open_agents()
    ]


def describe(handle: Any, *, gone: bool = False) -> dict[str, Any]:
    """Everything about one agent that can be had without waiting. ``gone``: its process is, and we outlived it."""
    found: dict[str, Any] = standing(handle)
    problems: list[str] = []
    document = handle._document  # noqa: SLF001
    if document.lock.acquire(timeout=_LOCK_S):
        try:
            found.update(_state(document))
        finally:
            document.lock.release()
    else:
        problems.append("the state's lock was not free: what is shown may be half-way through a change")
        found.update(_state(document))
    if hasattr(type(handle), "_evidence"):  # the room above knows effects; a plain handle has none
        within_s = _GONE_LEDGER_S if gone else _LEDGER_S
        try:
            found.update(_plain_effects(in_time(lambda: _evidence(handle), within_s)))
        except PartFailed as failure:
            problems.append(f"effects: {failure}")
    if problems:
        found["problem"] = "; ".join(problems)
    return found


def _evidence(handle: Any) -> Any:
    if not handle.closed:
        return handle._evidence()  # noqa: SLF001
    store = handle._store  # noqa: SLF001
    with _again(store, readonly=True) as fresh:
        return fresh.agent(handle.name, branch=_branch(handle), readonly=True)._evidence()  # noqa: SLF001


@contextmanager
def _again(store: Any, *, readonly: bool) -> Iterator[Any]:
    """The store of a handle; opened for a moment where an exception has closed it."""
    if not store.closed:
        yield store
        return
    fresh = type(store).opened(store.place, create=False, readonly=readonly, inert=True)
    try:
        yield fresh
    finally:
        fresh.close()


def standing(handle: Any) -> dict[str, Any]:
    """Where an agent stands. Costs next to nothing.

    The checkpoint is the newest one of its branch. A run that is executed again may have come to an earlier one.
    """
    head, stands_on = _heads(handle)
    store = handle._store  # noqa: SLF001
    found = {"store": store.place, "kind": shapes.type_name(type(store)), "agent": handle.name}
    found["branch"] = _branch(handle)
    if head is None:
        return {**found, "checkpoint": ""}
    found |= {
        "checkpoint": head.id,
        "label": head.label,
        "depth": head.depth,
        "checkpoint_at": head.time.timestamp(),
        "checkpoint_digest": head.digest,
    }
    if stands_on is not None and stands_on.id != head.id:
        found["stands_on"] = {"checkpoint": stands_on.id, "label": stands_on.label, "depth": stands_on.depth}
    return found


def _heads(handle: Any) -> tuple[Any, Any]:
    """The newest checkpoint of the handle's branch, and the one that its state came from."""
    writer = handle._writer  # noqa: SLF001
    newest = handle._made  # noqa: SLF001
    host = vars(handle).get("_host")  # of the room above, which executes runs again
    base = host.base if host is not None and writer is not None else None
    return newest, None if writer is None else newest if base is None else handle._seen(base)  # noqa: SLF001


# -- what is not finished ---------------------------------------------------------------------------------------

_UNFINISHED = frozenset({"interrupted", "needs attention", "waiting"})
_MOST_RUNS = 5

Tell = Callable[[list[Any], list[Any]], None]


@contextmanager
def unfinished(tell: Tell) -> Iterator[None]:
    """Where an exception leaves it, ``tell`` gets the runs of each agent of this process that are not over, and doubts.

    That is: the first few runs, and all effects in doubt; not called for agents that have neither. Whatever goes wrong
    leaves it out. An error of ours says what to do by itself, so after that nothing is told.
    """
    WATCHERS.append(watch)
    try:
        yield
    except HoldfastError:
        raise
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            with suppress(KeyboardInterrupt), travelling(error):
                for handle in open_agents():
                    with suppress(PartFailed):
                        in_time(partial(_tell_unfinished, handle, tell), _UNFINISHED_S)
        raise
    finally:
        WATCHERS.remove(watch)


def _tell_unfinished(handle: Any, tell: Tell) -> None:
    with _again(handle._store, readonly=True) as store:  # noqa: SLF001
        if not hasattr(store, "runs"):  # a plain one
            return
        one, branch = escape(handle.name), _branch(handle)
        runs = store.runs(one, branch=branch, limit=_MOST_RUNS, sort="urgent")
        left = [run for run in runs if run.status in _UNFINISHED]
        doubts = store.effects(one, branch=branch, in_doubt=True)
        if left or doubts:
            tell(left, list(doubts))


# -- what the histories say ------------------------------------------------------------------------------------


def tell(dump: Path, error: str, message: str, trigger: str, *, what: str = "crash") -> None:
    """Write an event on every open agent that names the dump. Whatever goes wrong leaves the event out."""
    told = [(handle, standing(handle)) for handle in open_agents()]

    def write() -> None:
        for handle, stands in told:
            with _again(handle._store, readonly=False) as store:  # noqa: SLF001
                _add(store, stands, dump, error, message, trigger, what)

    if told:
        with suppress(PartFailed):
            in_time(write, _EVENT_S)


def tell_death(
    agents: list[dict[str, Any]], dump: Path, error: str, message: str, trigger: str, redactor: Redactor | None = None
) -> list[str]:
    """The same for a process that is gone, by one that outlived it: ``agents`` are what ``standing`` said last.

    What the store knows by now is added to the dump: checkpoints and effects after that. Returns who was told.
    """
    told = []
    for place in dict.fromkeys(str(stands.get("store", "")) for stands in agents):
        here = [stands for stands in agents if stands.get("store") == place]
        if not (Path(place) / "store.db").exists():
            continue
        with suppress(HoldfastError), _kind(here[0]).opened(place, create=False, inert=True) as store:
            known = {info.name for info in store.agents()}
            handles = [
                store.agent(stands["agent"], branch=stands["branch"], create=False, readonly=True)
                for stands in here
                if stands.get("agent") in known
            ]
            _complete(dump, handles, redactor or Redactor(dict(os.environ)))
            for handle in handles:
                _add(store, standing(handle), dump, error, message, trigger)
                told.append(str(handle.name))
    return told


def removable(
    place: Path, stores: Iterable[str], most: int, most_bytes: int, needed: Collection[str] = ()
) -> list[Path]:
    """The dumps of a folder that are too many and that no history needs. A store that cannot be asked raises why.

    ``stores``: places of those to ask. A dump of an agent in another store stays, because nobody asked that one.
    ``needed``: names of others that stay.
    """
    if not folder.surplus(place, most, most_bytes):
        return []
    kept, asked = set(needed), set[str]()
    own = [str(place.parent)] if (place.parent / "store.db").exists() else []
    for known, names in map(_needed, dict.fromkeys([*own, *stores])):
        asked.add(known)
        kept |= names
    looked_at: set[Path] = set()
    while True:
        free = folder.surplus(place, most, most_bytes, kept)
        unknown = {path.name for path in free if path not in looked_at and _is_elsewhere(path, asked)}
        if not unknown:
            return free
        looked_at.update(free)
        kept |= unknown


def _needed(place: str) -> tuple[str, set[str]]:
    """What a store calls its place, and the names of the dumps that its histories need."""
    for store in open_stores():
        if store.place in (place, os.path.realpath(place)):
            return store.place, _referred(store)
    whole = _kind({"kind": "holdfast.run.store.Store"})  # it knows runs
    with whole.opened(place, create=False, readonly=True, inert=True) as store:
        return store.place, _referred(store)


def _referred(store: Any) -> set[str]:
    """A branch goes on from it, the checkpoint that it names is tagged, or a run of its agent needs attention."""
    found: set[str] = set()
    # A plain store has no runs; the room above has.
    urgent = {run.agent for run in store.runs(status="needs attention")} if hasattr(type(store), "runs") else set()
    for info in store.agents():
        with closing(store.agent(info.name, create=False, readonly=True)) as handle:
            tagged = {checkpoint.id for checkpoint in handle.tags().values()}
            found |= {
                Path(str(entry.get("dump", ""))).name
                for entry in handle.crashes()
                if entry.get("what") == "rehydrate" or entry.get("checkpoint") in tagged or info.name in urgent
            }
    return found


def _is_elsewhere(path: Path, asked: Collection[str]) -> bool:
    """Whether a dump tells of an agent in a store that was not asked, and that may still be there."""
    try:
        with open_dump(path) as dump:
            places = {agent.store for agent in dump.agents} - {*asked, ""}
    except (HoldfastError, OSError):
        return False
    return any("://" in place or (Path(place) / "store.db").exists() for place in places)


def _kind(stands: dict[str, Any]) -> Any:
    """The class of store that the process had: the room above has one that knows effects."""
    module, _, name = str(stands.get("kind", "")).rpartition(".")
    if module not in ("holdfast.agent.store", "holdfast.run.store", "holdfast.travel.handle"):
        module, name = "holdfast.agent.store", "Store"
    return getattr(import_module(module), name)


def _complete(dump: Path, handles: list[Any], redactor: Redactor) -> None:
    """Add the agents' parts to a dump that others have written."""
    try:
        writer, states = append(dump, redactor)
    except HoldfastError:  # damaged: it is left as it is
        return
    try:
        for handle in handles:
            for section in handle.state:  # nobody else will read them: so that they are shown
                handle.state[section]
            writer.add(kinds.AGENT, {"name": _called(handle), "data": describe(handle, gone=True)})
            states[kinds.AGENT] = [kinds.WHOLE, ""]
        writer.finish(states)
    finally:
        writer.close()


def _add(
    store: Any, stands: dict[str, Any], dump: Path, error: str, message: str, trigger: str, what: str = "crash"
) -> bool:
    from holdfast.agent import crashes

    row = store._db.view.agent(stands["agent"])  # noqa: SLF001
    if row is None:
        return False
    body = {
        "what": what,
        "dump": _link(dump, Path(store.place)),
        "error": error[:MAX_NAME],
        "message": message[:_MESSAGE],
        "trigger": trigger[:100],
        "at": time.time(),
        "branch": stands["branch"],
        "checkpoint": stands["checkpoint"],
    }
    crashes.note(store, row, body)
    return True


# -- values ----------------------------------------------------------------------------------------------------


def _called(handle: Any) -> str:
    return f"{handle.name}@{_branch(handle)}"


def _branch(handle: Any) -> str:
    return str(handle.branch_name)


def _state(document: Any) -> dict[str, Any]:
    from holdfast.codec.state import is_apart  # its packages are there where a document is, and not in every sidecar

    budget = [_STATE_VALUES]
    state: dict[str, Any] = {}
    unread, changed, digests = [], [], []
    told = document.told
    waiting = told.unacknowledged[0].before if told.unacknowledged else told.sections  # what the store has
    for name, section in shapes.first_items(document.sections, _STATE_VALUES):
        tree = told.sections.get(name)
        digests.append((name, getattr(tree, "root", tree)))
        if section.value is GONE:
            unread.append(name)
            continue
        before = waiting.get(name)
        if section.dirty or getattr(before, "root", before) != digests[-1][1]:
            changed.append(name)
        state[name] = _named(name, section.value, budget, 0)
    shown = [name for name in told.sections if not is_apart(name)]
    found: dict[str, Any] = {
        "state": state,
        "dirty": bool(told.unacknowledged or changed or shown != list(document.sections)),
        "state_cut": budget[0] <= 0,
    }
    if unread:
        found["unread"] = unread  # sections that the process had not loaded: they are as in the checkpoint
    if changed:
        found["changed"] = changed
    elif all(digest is not None for _, digest in digests):
        from holdfast.codec.blocks import digest_of
        from holdfast.codec.values import encode

        found["digest"] = digest_of("holdfast.state", encode([part for pair in digests for part in pair])).hex()
    return found


def _plain(value: Any, budget: list[int], depth: int) -> Any:
    """A value as MessagePack takes it. Containers are read by their built-in ancestor; others are named by type."""
    budget[0] -= 1
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else f"an integer of {value.bit_length()} bits"
    if kind is str or kind is bytes:
        return value if len(value) <= _STATE_TEXT else {"cut": len(value), "begins": value[:_STATE_TEXT]}
    if budget[0] <= 0 or depth >= _STATE_DEPTH:
        return {"cut": True, "type": shapes.type_name(kind)}
    base = shapes.layout_of(kind).base
    if base is dict:
        items = shapes.first_items(value, max(0, budget[0]))
        found = {
            name: _named(name, item, budget, depth + 1) for name, item in ((_key(key), item) for key, item in items)
        }
        if len(items) < dict.__len__(value):
            found["cut"] = dict.__len__(value) - len(items)
        return found
    if base in (list, tuple, set, frozenset):
        total = base.__len__(value)
        taken = [_plain(item, budget, depth + 1) for item in _first(base, value, max(0, budget[0]))]
        return [*taken, {"cut": total - len(taken)}] if total > len(taken) else taken
    attributes, _total = shapes.layout_of(kind).attributes(value, 200)
    named = {name: _named(name, item, budget, depth + 1) for name, item in attributes}
    return {"type": shapes.type_name(kind)} | named


def _named(name: str, value: Any, budget: list[int], depth: int) -> Any:
    """A value under its name. Where the name says that it is secret, only whether there is one is shown."""
    shown = _plain(value, budget, depth)
    return BY_NAME if looks_secret(name) and shown is not None and type(shown) is not bool else shown


def in_dump(name: str, value: Any) -> Any:
    """A section as a dump shows it."""
    return _named(name, value, [_STATE_VALUES], 0)


def _first(base: type, value: Any, most: int) -> list[Any]:
    if base is list or base is tuple:
        return list(base.__getitem__(value, slice(0, most)))
    try:
        return list(base.__iter__(value))[:most]  # type: ignore[attr-defined]
    except RuntimeError:  # another thread changed it
        return []


def _key(key: Any) -> str:
    kind = type(key)
    if kind is str:
        return str(key)[:MAX_NAME]
    return repr(key)[:MAX_NAME] if kind in (int, float, bool, bytes) or key is None else f"<{shapes.type_name(kind)}>"


def _plain_effects(found: dict[str, Any]) -> dict[str, Any]:
    for effect in found["effects"]:
        for name in ("args", "result"):
            effect[name] = _plain(effect[name], [_VALUE_VALUES], 0)
    return found


# -- a new start from a dump ------------------------------------------------------------------------------------------


_ID = re.compile(r"[0-9a-f]{16,128}")
_NAMED = 10  # agents that an error names
_LATEST = 2**33  # seconds since 1970: a later time is nonsense


@dataclass(frozen=True)
class Rehydrated:
    """A branch that goes on from a crash. ``unsaved``: the state in the dump had changes that no checkpoint has."""

    agent: str
    branch: str
    checkpoint: Checkpoint
    dump: str
    unsaved: bool


def choose(dump: Dump, agent: str | None = None) -> Agent:
    """The one that is meant: ``NAME`` or ``NAME@BRANCH``, or the only one there is."""
    every = {f"{one.name}@{one.branch or 'main'}": one for one in dump.agents}
    meant = [one for name, one in every.items() if agent in (None, one.name, name)]
    if len(meant) == 1:
        return meant[0]
    names = ", ".join([*every][:_NAMED])
    if not every:
        raise NotInDump("the dump tells of no agent", hint="The process had none open, or its part was cut.")
    if not meant:
        raise NotInDump(f"the dump does not tell of an agent {agent!r}", hint=f"It tells of: {names}")
    raise NotInDump(f"the dump tells of {len(meant)} agents that may be meant", hint=f"Name one of: {names}")


def rehydrate(dump: Dump, store: Store, agent: str | None = None, *, branch: str | None = None) -> Rehydrated:
    """Begin a branch where the dump says that the agent stood, and link the dump from its history."""
    from holdfast.agent import crashes

    stood = choose(dump, agent)
    if not _ID.fullmatch(stood.checkpoint):
        raise NotInDump(f"{stood.name} had no checkpoint when the dump was taken", hint="It has nothing to go back to.")
    new = branch or _free(partial(crashes.is_taken, store, stood.name), dump)
    name = _link(dump.path, Path(store.place))
    checkpoint = crashes.take_up(store, stood.name, stood.branch or "main", stood.checkpoint, new, name)
    return Rehydrated(stood.name, new, checkpoint, name, stood.dirty)


def _free(is_taken: Callable[[str], bool], dump: Dump) -> str:
    """A name for the branch that nothing has yet: ``crash-20300501T120000Z``."""
    at = dump.at if 0 < dump.at < _LATEST else 0
    wanted = "crash-" + strftime("%Y%m%dT%H%M%SZ", gmtime(at))
    number = 1
    while is_taken(wanted if number == 1 else f"{wanted}-{number}"):
        number += 1
    return wanted if number == 1 else f"{wanted}-{number}"


def _link(path: Path, store: Path) -> str:
    """How a history names the dump: by its name alone in the store's own folder, else by its path."""
    whole = path.resolve()
    return path.name if whole.parent == (store / "dumps").resolve() else str(whole)
