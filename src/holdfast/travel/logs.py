"""Logs and metrics beside the history: what a program said at which checkpoint, and checkpoints that they ask for.

Owns the logging handler, the metrics hook, and what the lines say that are kept for each agent. Must not capture
anything: both only ask, and the agent's own thread saves at its next safe point, as policies do. What always holds: a
line names the checkpoint that was the newest when it was written, so that one leads to the other; our own loggers are
ignored; at most one line of a pattern asks in a minute, and a bounded number in all; a log that cannot be written
disturbs nobody.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from holdfast.agent.schedule import LOG, METRIC
from holdfast.crash.redaction import Redactor
from holdfast.errors import BadOption
from holdfast.travel.detector import Alarm, Detector
from holdfast.travel.journal import LOGS, Journal

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent

EVERY_S = 60.0
"""How long a pattern that has asked is quiet."""
TOTAL = 100
"""Checkpoints that one handler, or one hook, asks for in its life."""
PATTERNS_MAX = 1_000
TEXT_MAX = 2_000
OURS = "holdfast"
_VARIABLE = re.compile(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class LogLine:
    """One line. ``checkpoint`` is the id of the one that was the newest then, empty before the first.

    ``asked``: it asked for a checkpoint; ``after`` is the id of the next one that was made, and ``distance_s`` the
    seconds until then; None while there is none.
    """

    at: datetime
    level: str
    logger: str
    text: str
    checkpoint: str
    asked: bool
    after: str = ""
    distance_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "at": self.at.isoformat(),
            "level": self.level,
            "logger": self.logger,
            "text": self.text,
            "checkpoint": self.checkpoint,
            "asked": self.asked,
            "after": self.after or None,
            "distance_s": self.distance_s,
        }


class Lines(Journal):
    """What is said of one agent's branch, each line with the checkpoint that was the newest."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent._store.place, LOGS, agent.name, agent.branch_name)
        self._agent = agent

    def keep(self, level: str, logger: str, text: str, *, asked: bool) -> None:
        """Append a line."""
        writer = self._agent._writer
        if writer is None:  # an execution again: what it says was said before
            return
        head = writer.head_id.hex() if writer.head_id else ""
        self.add({"at": time(), "level": level, "logger": logger, "text": text, "checkpoint": head, "asked": asked})


class Asking:
    """Asks an agent for a checkpoint, not too often. For any thread."""

    def __init__(self, agent: Agent, trigger: str, total: int) -> None:
        if agent._writer is None and not agent._in_memory:
            raise BadOption("a handle that only reads takes no checkpoints", hint="Open it without readonly=True.")
        self.asked = 0
        """How often it has asked."""
        self.quiet = 0
        """How often it has not, because the pattern had asked in the last minute, or there were too many."""
        self._agent, self._trigger, self._total = agent, trigger, total
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}

    def ask(self, pattern: str) -> bool:
        """Whether it has asked."""
        now_s = monotonic()
        with self._lock:
            last_s = self._last.get(pattern)
            known = last_s is not None and now_s - last_s < EVERY_S
            if known or self.asked >= self._total or self._agent.closed:
                self.quiet += 1
                return False
            if len(self._last) >= PATTERNS_MAX:
                self._last.clear()
            self._last[pattern] = now_s
            self.asked += 1
        self._agent._pace.ask(self._trigger)
        return True


class LogHandler(logging.Handler):
    """Keeps the program's log beside the agent's history; records from ``ask`` on ask for a checkpoint."""

    def __init__(
        self, agent: Agent, *, level: int | str = logging.INFO, ask: int | str = logging.ERROR, total: int = TOTAL
    ) -> None:
        super().__init__(level)
        named = logging.getLevelNamesMapping()
        self._ask = named.get(ask, -1) if isinstance(ask, str) else ask
        if self._ask < 0:
            raise BadOption(f"ask={ask!r}", hint=f"Use a level: {', '.join(named)}.")
        self.asking = Asking(agent, LOG, total)
        """How often it has asked, and how often not."""
        self._lines = Lines(agent)
        self._redactor = Redactor(dict(os.environ))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if record.name == OURS or record.name.startswith(f"{OURS}."):
            return
        try:
            text = self._redactor.clean(record.getMessage()[:TEXT_MAX])
            pattern = f"{record.name}:{record.levelno}:{_VARIABLE.sub('#', str(record.msg)[:200])}"
            asked = record.levelno >= self._ask and self.asking.ask(pattern)
            self._lines.keep(record.levelname, record.name, text, asked=asked)
        except Exception:  # noqa: BLE001 - as logging wants it: a handler never raises
            self.handleError(record)


class Metrics:
    """Follows figures of the program: ``metrics(latency_ms=20.1, queue=3)``. Drift in one asks for a checkpoint."""

    def __init__(self, agent: Agent, *, total: int = TOTAL) -> None:
        self.asking = Asking(agent, METRIC, total)
        """How often it has asked, and how often not."""
        self._lines, self._detector, self._lock = Lines(agent), Detector(), threading.Lock()

    def __call__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> list[Alarm]:
        """One step. Returns what has turned out to be different."""
        with self._lock:
            alarms = self._detector.update({**(values or {}), **more})
        for alarm in alarms:
            self._lines.keep("METRIC", alarm.place, str(alarm), asked=self.asking.ask(alarm.place))
        return alarms


def logs(agent: Agent, at: Any = None, *, limit: int | None = None) -> list[LogLine]:
    """The lines of a branch, oldest first: all, or those that were written while a checkpoint was the newest."""
    line = agent.log()[::-1]
    after = {one.id: two for one, two in pairwise(line)}
    wanted = agent.at(at).id if at is not None else None
    found = []
    for raw in Lines(agent).read():
        try:
            moment = datetime.fromtimestamp(raw["at"], UTC)
        except (LookupError, ValueError, TypeError, OverflowError, OSError):
            continue  # somebody else has written it: what has no moment is no line
        head, asked = str(raw.get("checkpoint", "")), bool(raw.get("asked"))
        if wanted is not None and head != wanted:
            continue
        following = (after.get(head) if head else next(iter(line), None)) if asked else None
        said = [str(raw.get(key, ""))[:TEXT_MAX] for key in ("level", "logger", "text")]
        distance_s = following.time.timestamp() - raw["at"] if following is not None else None
        found.append(
            LogLine(
                moment, said[0], said[1], said[2], head, asked,
                following.id if following is not None else "", distance_s,
            )
        )  # fmt: skip
    return found[-limit:] if limit is not None else found
