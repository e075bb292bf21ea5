"""Random generators whose state is kept with the agent's.

Owns the way of a generator's state into the document and back. Must not know when checkpoints are taken: whoever takes
one calls ``keep`` first. What always holds: a restored state continues the same sequence; a branch does not repeat the
numbers of the line that it left: it gets a seed of its own, once, and says so in its notes and in the log.

    generator(agent, name, of)           keep the state of ``of``: ``random``, ``random.Random()``, ``numpy.random``,
                                         a NumPy ``Generator`` or ``RandomState``; returns it, restored
    keep(agent)                          put the states into ``agent.state``: before every capture and every digest
    restore(agent, replaying=False)      take them from ``agent.state``: after a load, a rewind or a rollback;
                                         ``replaying``: the numbers of another branch are wanted again, for now
    reseed(agent)                        where a replay has passed the checkpoint that the branch began with
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.errors import BadName, BadOption
from holdfast.run.notes import notes_of

log = logging.getLogger("holdfast.run")
SECTION = "holdfast.random"
"""The section of the state that holds them. Only agents that keep a generator have it."""
NAME_MAX = 200
_lock = threading.Lock()
_kept: WeakKeyDictionary[Any, dict[str, tuple[Any, bytes]]] = WeakKeyDictionary()


def generator(agent: Any, name: str, of: Any) -> Any:
    """Keep a generator's state with the agent's from now on, and restore what is kept of it."""
    if not 0 < len(name) <= NAME_MAX:
        raise BadName(f"a generator's name has 1 to {NAME_MAX} characters")
    _state(of)  # refuses what is no generator
    with _lock:
        _kept.setdefault(agent, {})[name] = (of, agent.identity[1])
    _restore(agent, name, replaying=_is_replaying(agent))
    return of


def _is_replaying(agent: Any) -> bool:
    from holdfast.run.positions import here

    lane = here()
    return lane is not None and lane.scope.agent is agent and bool(getattr(lane.scope, "replaying", False))


def keep(agent: Any) -> None:
    """Put the states into the document. What has not changed is not touched."""
    for name, (of, branch) in list(_kept.get(agent, {}).items()):
        now = {"branch": branch, "state": _state(of)}
        section = agent.handle.state.get(SECTION)
        if section is None:
            agent.handle.state[SECTION] = {name: now}
        elif _plain(agent, section.get(name)) != now:
            section[name] = now


def restore(agent: Any, *, replaying: bool = False) -> None:
    """Continue from the states in the document."""
    for name in list(_kept.get(agent, {})):
        _restore(agent, name, replaying=replaying)


def reseed(agent: Any) -> None:
    """From here on a branch has numbers of its own."""
    for name, (of, branch) in list(_kept.get(agent, {}).items()):
        if branch != agent.identity[1]:
            _reseed(agent, name, of)


def _restore(agent: Any, name: str, *, replaying: bool) -> None:
    of, _ = _kept[agent][name]
    section = agent.handle.state.get(SECTION)
    found = _plain(agent, section.get(name)) if section is not None else None
    if found is None:
        return
    _set_state(name, of, found["state"])
    _kept[agent][name] = (of, found["branch"])
    if found["branch"] != agent.identity[1] and not replaying:
        _reseed(agent, name, of)


def _reseed(agent: Any, name: str, of: Any) -> None:
    """Once for a branch: executed again, it has to draw the same numbers again."""
    mine: bytes = agent.identity[1]
    notes = notes_of(agent)
    known = notes.get("seed", name)
    if not isinstance(known, dict) or known["branch"] != mine:
        known = {"branch": mine, "seed": os.urandom(32)}
        notes.put("seed", name, known)
        log.warning("generator %s of %s: this branch has a new seed", name, agent.name)
    _seed(of, int.from_bytes(known["seed"], "big"))
    _kept[agent][name] = (of, mine)


def _plain(agent: Any, value: Any) -> Any:
    return agent.handle.state.plain(value)


# -- the kinds of generators ------------------------------------------------------------------------------------


def _numpy(of: Any) -> str:
    """Which of NumPy's generators it is, empty when none."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ""
    if isinstance(of, numpy.random.Generator):
        return "generator"
    return "legacy" if of is numpy.random or isinstance(of, numpy.random.RandomState) else ""


def _state(of: Any) -> dict[str, Any]:
    """A generator's state as the codec keeps it."""
    if of is random or isinstance(of, random.Random):
        if isinstance(of, random.SystemRandom):
            raise BadOption("SystemRandom has no state to be kept")
        version, words, gauss = of.getstate()
        return {"kind": "random", "state": [version, list(words), gauss]}
    kind = _numpy(of)
    if kind == "generator":
        return {"kind": f"numpy.{type(of.bit_generator).__name__}", "state": _listed(of.bit_generator.state)}
    if kind == "legacy":
        return {"kind": "numpy.legacy", "state": _listed(of.get_state(legacy=False))}
    raise BadOption(
        f"{type(of).__name__} is no generator whose state can be kept",
        hint="Use random, random.Random, numpy.random.default_rng() or numpy.random.RandomState.",
    )


def _set_state(name: str, of: Any, kept: dict[str, Any]) -> None:
    if kept["kind"] != _state(of)["kind"]:
        raise BadOption(
            f"generator {name} was kept as {kept['kind']}, not as {_state(of)['kind']}", hint="Use another name for it."
        )
    state = kept["state"]
    if kept["kind"] == "random":
        version, words, gauss = state
        of.setstate((version, tuple(words), gauss))
    elif _numpy(of) == "generator":
        of.bit_generator.state = _arrays(state)
    else:
        of.set_state(_arrays(state))


def _seed(of: Any, seed: int) -> None:
    kind = _numpy(of)
    if kind == "generator":
        of.bit_generator.state = type(of.bit_generator)(seed).state
    elif kind == "legacy":
        numpy = sys.modules["numpy"]
        of.set_state(numpy.random.RandomState(numpy.random.MT19937(seed)).get_state(legacy=False))
    else:
        of.seed(seed)


def _listed(state: Any) -> Any:
    """NumPy's arrays as lists of numbers: they are compared, and the state stays readable without NumPy."""
    if isinstance(state, dict):
        return {key: _listed(item) for key, item in state.items()}
    if hasattr(state, "tolist"):
        return state.tolist()
    return state


def _arrays(state: Any) -> Any:
    """The way back: NumPy takes lists of numbers where it gives arrays, if they are unsigned."""
    numpy = sys.modules["numpy"]
    if isinstance(state, dict):
        return {key: _arrays(item) for key, item in state.items()}
    if isinstance(state, list):
        return numpy.array(state, dtype=numpy.uint64)
    return state
