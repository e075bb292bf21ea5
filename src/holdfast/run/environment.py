"""What an agent has around its state: the time, chance, signals, secrets, modes, and what goes where the state goes.

Owns these methods of the handle, which mode holds, the open handles of an agent, and its random generators. What a
mode means is the program's, what a handle is its opener's. What always holds: in a run, what would differ the next time
is recorded; the mode is folded from the notes of the line: the one that was set by hand, or a worse one of a breaker
that opened since and is not closed again. A handle is opened when it is first used; what is recorded is its
description, never the handle; a branch does not get what another branch has open: it opens its own, or what ``fork``
made for it. A generator's state is part of the agent's state: restored, or on a branch, it continues the same sequence.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

from holdfast.agent.names import check_text
from holdfast.errors import BadOption, NoAgent
from holdfast.run import calls, waiting
from holdfast.run.arguments import ASKED, Secret, refuse, secret
from holdfast.run.resilience import Notes, clock_of, notes_of
from holdfast.run.scope import EFFECT, current, here
from holdfast.run.tools import Tool, tool

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from holdfast.agent.branch import BranchWriter
    from holdfast.process.quiesce import Hooks, Quiesce
    from holdfast.run.host import AgentHost

log = logging.getLogger("holdfast.run")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|PRIVATE|COOKIE|SESSION|DSN|_PWD", re.IGNORECASE)
H = TypeVar("H")
G = TypeVar("G")


class Environment:
    """The part of an agent's handle that is not about its history."""

    if TYPE_CHECKING:

        @property
        def _host(self) -> AgentHost: ...

        def _check_writer(self) -> BranchWriter: ...

    # -- what differs each time, recorded -------------------------------------------------------------------

    def now(self) -> datetime:
        """The time (UTC). In a run it is the recorded one when that is executed again."""
        moment: datetime = calls.now(self._now, (), {})
        return moment

    @cached_property
    def _now(self) -> Tool:
        what = copy.copy(_NOW)
        what.function = lambda: datetime.fromtimestamp(clock_of(self._host).wall_us() / 1e6, UTC)
        return what

    def random(self) -> float:
        """A random number from 0 to 1, recorded in a run."""
        return _random()

    def uuid(self) -> uuid.UUID:
        """A new UUID, recorded in a run."""
        return _uuid()

    def sleep(self, seconds: float = 0.0, *, days: float = 0.0, hours: float = 0.0, minutes: float = 0.0) -> Any:
        """Sleep; in async code, await it. A run that is interrupted meanwhile sleeps on for what is left."""
        return waiting.sleep(self._host, seconds + 60 * (minutes + 60 * (hours + 24 * days)))

    def wait_for(self, name: str, timeout_s: float | None = None) -> Any:
        """Wait in a run for a signal (``store.signal``); its value. In async code, await it. Raises TimeoutError."""
        return waiting.wait_for(self._host, name, timeout_s)

    # -- what is kept along with the state, or never --------------------------------------------------------------

    def resource(
        self,
        name: str,
        *,
        open: Callable[..., H],
        close: Callable[[H], object] | None = None,
        describe: Callable[[H], Any] | None = None,
        fork: Callable[[Any], Any] | None = None,
    ) -> Resource[H]:
        """Declare a handle that cannot be saved. It is opened when it is first used, after a restore too.

        With ``describe``, ``open(description)`` gets what ``describe(handle)`` last said on this branch, or None.
        ``fork(description)`` makes the description for a new branch; without it a branch begins with None.
        """
        self._check_writer()
        return self._host.companions.resource(Resource(self._host, name, open, close, describe, fork))

    def handle(
        self,
        name: str,
        *,
        open: Callable[..., H],
        describe: Callable[[H], Any],
        close: Callable[[H], object] | None = None,
        fork: Callable[[Any], Any] | None = None,
    ) -> Resource[H]:
        """A session or transaction that is kept by its description: ``open(description)`` opens it again.

        As resource(), which also takes what has no description. After a restore, a rollback, or going back to a fork
        point, the next use opens it anew.
        """
        return self.resource(name, open=open, close=close, describe=describe, fork=fork)

    def keep_environment(self, *names: str) -> dict[str, str]:
        """Keep these environment variables with the agent, and none besides; returns their values.

        Where the agent is restored in a process that lacks one of them, it is set to what was kept. Names that sound
        like a secret's are refused: give those with ``agent.secret``.
        """
        for name in names:
            check_text(name, "the name of an environment variable")
            if _SECRET.search(name):
                raise BadOption(
                    f"{name} sounds like a secret, which is never kept", hint="Use agent.secret(name, value)."
                )

        def found(kept: Any = None) -> dict[str, str]:
            for name, value in (kept or {}).items():
                if name in names:
                    os.environ.setdefault(name, value)
            return {name: os.environ[name] for name in names if name in os.environ}

        one = self.resource("holdfast.environment", open=found, describe=lambda _: found())
        return one.handle

    # -- what is quiet while it is saved --------------------------------------------------------------------------

    def quiesce(
        self,
        pause: Callable[[], object] | None = None,
        resume: Callable[[], object] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Hooks:
        """Call ``pause`` before every capture of this agent, and ``resume`` after it, whatever happens in between.

        So a checkpoint has what the program held back: ``agent.quiesce(pause=buffer.flush)``. If a pause fails, or all
        of them take longer than ``deadline_s`` (5 s), ``NotQuiet`` is raised and nothing is saved. A pause may change
        the state. ``remove()`` of what is returned takes the hooks back.
        """
        return self._quiesced().add(pause, resume, deadline_s)

    def safe_thread(self) -> AbstractContextManager[Callable[[], None]]:
        """Register the calling thread: every capture of this agent waits until it stands at a safe point.

        ``with agent.safe_thread() as safe_point:``, and call ``safe_point()`` often: it returns at once, or when the
        capture is over. Leave the block before you wait for something long.
        """
        return self._quiesced().thread()

    def _quiesced(self) -> Quiesce:
        from holdfast.process.quiesce import Quiesce  # few programs need it

        writer = self._check_writer()
        with writer.lock:
            known = getattr(writer.quiet, "__self__", None)
            if not isinstance(known, Quiesce):
                known = Quiesce()
                writer.quiet = known.quiet
            return known

    def generator(self, name: str, of: G) -> G:
        """Keep the state of a random generator with the agent's: ``random``, ``random.Random()``, NumPy's.

        It goes where the state goes: a branch draws the numbers that the line draws that it left.
        """
        self._check_writer()
        return self._host.companions.generator(name, of)

    # -- modes ------------------------------------------------------------------------------------------------

    def declare_modes(self, *names: str) -> None:
        """The modes that this agent knows, from the best to the worst; the first is the usual one."""
        if not names or len(set(names)) != len(names):
            raise BadOption("give one or more different modes, the best first")
        for name in names:
            check_text(name, "the name of a mode", MODE_MAX)
        notes_of(self._host).modes = names

    @property
    def mode(self) -> str:
        """How well things are: one of the declared modes, set by hand or by a breaker that opened.

        In a run it is a recorded answer, because the program may go another way by it. What is set by hand holds until
        it is set again, or a breaker that opens later asks for a worse one.
        """
        return _read_mode() if self._in_run() else _mode_of(self._host)

    @mode.setter
    def mode(self, name: str) -> None:
        self._check_writer()
        declared = notes_of(self._host).modes
        if name not in declared and name != NORMAL:
            raise BadOption(
                f"mode {name!r} is not declared",
                hint=f"Use one of {', '.join(declared)}." if declared else "Declare it: agent.declare_modes(...).",
            )
        if self._in_run():
            _write_mode(name)
        else:
            _set_mode(self._host, name)

    def _in_run(self) -> bool:
        lane = here()
        return lane is not None and bool(lane.scope.run_id) and self._host is lane.scope.agent and EFFECT.get() is None

    def secret(self, name: str, value: Any = ASKED) -> Secret | None:
        """A secret that this process was given, or with ``value`` give it one. Secrets are never stored."""
        return secret(self._host, name, value)


@tool(name="holdfast.now", effect="read")
def _now() -> datetime:  # type: ignore[empty-body] # each agent has a clock of its own
    """How the time is recorded."""


_NOW: Tool = _now.tool


@tool(name="holdfast.random", effect="read")
def _random() -> float:
    import random

    return random.random()  # noqa: S311 - nothing secret depends on it


@tool(name="holdfast.uuid", effect="read")
def _uuid() -> uuid.UUID:
    return uuid.uuid4()


# -- modes ----------------------------------------------------------------------------------------------------


NORMAL = "normal"
MODE_MAX = 100
_WHO = "agent"


def _mode_of(agent: Any) -> str:
    """The mode that holds now."""
    notes = notes_of(agent)
    by_hand = notes.find("mode", _WHO)
    mode = str(by_hand.value["mode"]) if by_hand is not None else (notes.modes or (NORMAL,))[0]
    for state in notes.all("breaker"):
        set_since = by_hand is None or state.get("opened", 0) >= by_hand.number
        if state["state"] != "closed" and state.get("mode") and set_since:
            mode = max(mode, state["mode"], key=lambda name: _rank(notes.modes, name))
    return mode


def _rank(modes: tuple[str, ...], name: str) -> int:
    """The place of a mode. One that is not declared in this process is worse than all: somebody meant something."""
    if name in modes:
        return modes.index(name)
    return 0 if name == NORMAL else len(modes)


@tool(name="holdfast.mode", effect="read")
def _read_mode() -> str:
    return _mode_of(current()._host)


@tool(name="holdfast.set_mode", effect="read")
def _write_mode(mode: str) -> None:
    _set_mode(current()._host, mode)


def _set_mode(agent: Any, mode: str) -> None:
    notes_of(agent).put("mode", _WHO, {"mode": mode})
    agent.ledger.flush()


# -- what goes where the state goes ---------------------------------------------------------------------------


_CLOSED = object()
SECTION = "holdfast.random"
"""The section of the state that holds generators. Only agents that keep one have it."""


class Resource(Generic[H]):
    """One resource of an agent. ``handle`` is what ``open`` returned; it is opened when it is asked for."""

    def __init__(self, agent: Any, name: str, open: Callable[..., H], close: Any, describe: Any, fork: Any) -> None:
        self.name = check_text(name, "a resource's name")
        if fork is not None and describe is None:
            raise BadOption(f"resource {name}: fork() needs a description to start from", hint="Give describe, too.")
        self.functions = open, close, describe, fork
        self._agent = ref(agent)
        self._notes: Notes = notes_of(agent)
        self._branch: bytes = agent.identity[1]
        self._lock = threading.RLock()
        self._handle: Any = _CLOSED

    @property
    def is_open(self) -> bool:
        return self._handle is not _CLOSED

    @property
    def description(self) -> Any:
        """What was last recorded about it on this branch; None when nothing was, or another branch did it."""
        kept = self._kept()
        return kept["description"] if kept is not None and kept["branch"] == self._branch else None

    @property
    def handle(self) -> H:
        """The open handle."""
        with self._lock:
            if self._handle is _CLOSED:
                open, _, describe, _ = self.functions
                self._handle = open(self._inherited()) if describe is not None else open()
                try:
                    self.update()
                except BaseException:  # what is not described could not be opened again
                    self._drop()
                    raise
            handle: H = self._handle
            return handle

    def _inherited(self) -> Any:
        """The description to open by."""
        kept = self._kept()
        if kept is None or kept["branch"] == self._branch:
            return kept["description"] if kept is not None else None
        fork = self.functions[3]
        made = fork(kept["description"]) if fork is not None else None
        log.warning(
            "resource %s was opened by another branch, which may still use it; this one %s",
            self.name, "opens a new one" if fork is None else "opens what fork() made for it",
        )  # fmt: skip
        return made

    def _kept(self) -> dict[str, Any] | None:
        value = self._notes.get("resource", self.name)
        return value if isinstance(value, dict) else None

    def update(self) -> None:
        """Record how it would be opened now, if that has changed."""
        with self._lock:
            describe = self.functions[2]
            if self._handle is _CLOSED or describe is None:
                return
            description = describe(self._handle)
            kept = self._kept()
            if kept is None or kept["branch"] != self._branch or kept["description"] != description:
                agent = self._agent()
                if agent is None:
                    raise NoAgent(f"the agent of resource {self.name} is gone")
                refuse(agent, f"the description of {self.name}", description, agent.registry)
                self._notes.put("resource", self.name, {"branch": self._branch, "description": description})

    def close(self) -> None:
        """Close the handle. The next use opens it again, by its newest description."""
        with self._lock:
            if self._handle is _CLOSED:
                return
            try:
                self.update()
            finally:
                self._drop()

    def forget(self) -> None:
        """Let go of the handle without closing it."""
        self._handle = _CLOSED

    def _drop(self) -> None:
        handle, self._handle = self._handle, _CLOSED
        if (close := self.functions[1]) is not None:
            close(handle)

    def __enter__(self) -> H:
        return self.handle

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Resource {self.name}: {'open' if self.is_open else 'closed'}>"


class Companions:
    """What an agent's host tells where the state goes: its resources and its generators, by name."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._resources: dict[str, Resource[Any]] = {}
        self._generators: dict[str, Any] = {}

    def resource(self, made: Resource[H]) -> Resource[H]:
        """Declare a resource (``Agent.resource``)."""
        with self._lock:
            known = self._resources.setdefault(made.name, made)
            if not known.is_open:  # the program is executed again: its newest functions count
                known.functions = made.functions
            return known

    def generator(self, name: str, of: G) -> G:
        """Keep a generator's state with the agent's from now on, and restore what is kept of it."""
        check_text(name, "a generator's name")
        _state(of)  # refuses what is no generator
        self._generators[name] = of
        self._restore(name)
        return of

    # -- what the host says ---------------------------------------------------------------------------------

    def keep(self) -> None:
        """Before a digest or a capture: put into the state what belongs there. What has not changed is not touched."""
        state = self._agent.handle.state
        for name, of in list(self._generators.items()):
            now = _state(of)
            section = state.get(SECTION)
            if section is None:
                state[SECTION] = {name: now}
            elif state.plain(section.get(name)) != now:
                section[name] = now

    def describe(self) -> None:
        """Before a capture: record the descriptions that have changed."""
        for one in list(self._resources.values()):
            one.update()

    def restore(self) -> None:
        """The state was moved."""
        for name in list(self._generators):
            self._restore(name)
        self.close()  # what is open fits no other state

    def forget(self) -> None:
        """What is open belongs to another process, which was at something else with it: the next use opens it anew."""
        for one in list(self._resources.values()):
            one.forget()

    def close(self) -> None:
        """Close every handle. One that cannot be closed does not keep the others open."""
        for one in list(self._resources.values()):
            try:
                one.close()
            except Exception:
                log.exception("resource %s could not be closed", one.name)

    def _restore(self, name: str) -> None:
        """Continue from the state in the document."""
        state = self._agent.handle.state
        section = state.get(SECTION)
        found = state.plain(section.get(name)) if section is not None else None
        if found is not None:
            _set_state(name, self._generators[name], found)


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
    random = sys.modules.get("random")  # what nobody has loaded is none of these
    if random is not None and (of is random or isinstance(of, random.Random)):
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
