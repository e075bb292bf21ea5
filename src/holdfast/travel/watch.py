"""Watchpoints: told when a place of the live state changes, and a condition on the change holds.

Owns what is watched, and what happens then. Looks at each checkpoint, step and tool call, by comparing what the state
is told to be with what it was at the look before: nothing is executed while the program changes its state. What always
holds: a watchpoint saves nothing by itself, it asks for a checkpoint at the next safe point; what a run does again is
not told again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from holdfast.agent.metadata import called_from
from holdfast.agent.schedule import WATCH
from holdfast.errors import BadExpression, BadOption, HoldfastError, WatchTriggered, format_path
from holdfast.travel.expressions import MISSING, Expression, Look, Path, parse_path

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent

log = logging.getLogger("holdfast.travel")

Action = Literal["log", "raise", "dump", "checkpoint"]
HITS_KEPT = 1_000
DUMPS_MAX = 10
"""Dumps that one watchpoint takes. A value that changes at each step would fill the disk."""
_NAMES = ("old", "new")


@dataclass(frozen=True)
class Hit:
    """What stands at ``path`` has become ``new``, and was ``old``; both plain, or ``holdfast.MISSING``.

    ``at`` is where it was noticed: ``checkpoint``, ``step``, ``before pay``, ``after pay``; ``caller`` the line of the
    program there, as ``plan.py:17``. The change itself is between the look before and this one.
    """

    path: str
    old: Any
    new: Any
    at: str
    caller: str
    time: datetime
    dump: str = ""


@dataclass
class Watchpoint:
    """A place that is watched. ``hits`` are the last times that it was met. ``stop()`` ends it."""

    path: Path
    when: Expression | None
    then: Action | Callable[[Hit], Any]
    hits: deque[Hit] = field(default_factory=lambda: deque(maxlen=HITS_KEPT))
    raw: bytes = b""
    value: Any = MISSING
    dumps: int = 0
    stopped: bool = False

    def stop(self) -> None:
        """Watch no longer."""
        self.stopped = True

    def __repr__(self) -> str:
        when = f" when {self.when.text}" if self.when is not None else ""
        return f"<Watchpoint {format_path(self.path)}{when}, met {len(self.hits)} times>"


class Watches:
    """The watchpoints of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.all: list[Watchpoint] = []
        self._looking = False

    def add(self, path: str, when: str | None, then: Action | Callable[[Hit], Any]) -> Watchpoint:
        """Begin to watch a place: what it is now is what the next look compares with."""
        if not callable(then) and then not in get_args(Action):
            raise BadOption(f"then={then!r}", hint=f"Use {', '.join(get_args(Action))}, or a function.")
        made = Watchpoint(parse_path(path), Expression(when, _NAMES) if when is not None else None, then)
        document = self._agent._document
        with document.lock:
            look = Look.of(document)
            made.raw, made.value = look.raw(made.path), look.at(made.path)
        self.all.append(made)
        return made

    def look(self, at: str, *, quiet: bool = False) -> None:
        """Compare. ``quiet``: a run is executed again, so that what changed is known."""
        if self._looking or not self.all:  # what a function does that is told, is not told to it
            return
        self.all = [one for one in self.all if not one.stopped]
        self._looking = True
        try:
            met = self._met(at)
            for one, hit in [] if quiet else met:
                self._tell(one, hit)
        finally:
            self._looking = False

    def _met(self, at: str) -> list[tuple[Watchpoint, Hit]]:
        document, found = self._agent._document, []
        with document.lock:
            look = Look.of(document)
            for one in self.all:
                raw = look.raw(one.path)
                if raw == one.raw:
                    continue
                old, new = one.value, look.at(one.path)
                one.raw, one.value = raw, new
                try:
                    holds = one.when is None or one.when.holds(look, old=old, new=new)
                except BadExpression as error:
                    log.warning("a watchpoint could not be evaluated: %s", error.message)
                    continue
                if holds:
                    file, line = called_from()
                    caller = f"{file}:{line}" if file else ""
                    found.append((one, Hit(format_path(one.path), old, new, at, caller, datetime.now(UTC))))
        return found

    def _tell(self, one: Watchpoint, hit: Hit) -> None:
        what = f"{self._agent.name}: {hit.path} became {hit.new!r:.200}, and was {hit.old!r:.200} (at {hit.at})"
        if one.then == "dump":
            hit = self._dumped(one, hit, what)
        one.hits.append(hit)
        if callable(one.then):
            one.then(hit)
        elif one.then == "raise":
            raise WatchTriggered(what, path=hit.path, old=hit.old, new=hit.new, hint="The state is as it was changed.")
        else:
            log.warning("%s%s", what, f"; dump {hit.dump}" if hit.dump else "")
        if one.then == "checkpoint":
            self._agent._pace.ask(WATCH)

    def _dumped(self, one: Watchpoint, hit: Hit, why: str) -> Hit:
        from holdfast.crash import inside

        if one.dumps >= DUMPS_MAX:
            return hit
        one.dumps += 1
        try:
            path = inside.capture(f"watch {hit.path}", trigger="watch")
        except HoldfastError as error:
            log.warning("no dump was taken: %s; %s", error.message, why)
            return hit
        return Hit(hit.path, hit.old, hit.new, hit.at, hit.caller, hit.time, str(path))
