"""OpenTelemetry: what agents do as spans and metrics, and log records that say for which agent.

    holdfast.contrib.otel.install()

Owns the names of spans, attributes and instruments. Must not know an SDK: without one, nothing is measured and nothing
is kept. Needs the extra ``otel``. What always holds: values that agents work with, and messages of errors, are in no
span; what goes wrong in here is logged, and the agent goes on.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any, ParamSpec, TypeVar

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import Span, SpanContext, Status, StatusCode, TraceFlags, TracerProvider

from holdfast.agent import watchers
from holdfast.errors import Cancelled, InDoubt, RunRolledBack, ToolFailed, Waiting
from holdfast.run.scope import HERE, Scope

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("holdfast.otel")

SCOPE = "holdfast"
AGENT, BRANCH = "gen_ai.agent.name", "holdfast.branch"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BYTES = tuple(float(4**power) for power in range(4, 16))  # 256 bytes to 1 GiB
OPEN_MAX = 1_000
"""Agents whose last checkpoint's age is told. A process that has more open is not watched one by one."""
NOT_ERRORS = (Waiting, RunRolledBack, Cancelled)
"""Ways in which a run ends, or stops, on purpose."""

# How what an observer is told is called in spans.
_NAMES = {
    "run": "holdfast.run.id",
    "function": "holdfast.run.function",
    "resumed": "holdfast.run.resumed",
    "status": "holdfast.run.status",
    "attempts": "holdfast.effect.attempts",
    "label": "holdfast.checkpoint.label",
    "kind": "holdfast.checkpoint.kind",
    "id": "holdfast.checkpoint.id",
    "depth": "holdfast.checkpoint.depth",
    "size_bytes": "holdfast.checkpoint.size",
    "target": "holdfast.rollback.target",
    "undo": "holdfast.rollback.effects",
    "settled": "holdfast.recovery.settled",
    "in_doubt": "holdfast.recovery.in_doubt",
    "lost": "holdfast.recovery.lost",
}

_WORDS = {"attention": "needs attention"}
_installed: Telemetry | None = None


def install(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Tell OpenTelemetry from now on what the agents of this process do. Without providers: those that are global."""
    uninstall()
    global _installed  # noqa: PLW0603 - there is one in a process, as there is one observer
    _installed = Telemetry(
        trace.get_tracer(SCOPE, tracer_provider=tracer_provider),
        metrics.get_meter(SCOPE, meter_provider=meter_provider),
    )
    watchers.observe(_installed)
    watchers.WATCHERS.append(_installed.opened)
    if not _Records.placed:
        _Records.placed, _Records.before = True, logging.getLogRecordFactory()
        logging.setLogRecordFactory(_Records.make)


def uninstall() -> None:
    """Tell nothing any more."""
    global _installed  # noqa: PLW0603 - as above
    if _installed is not None:
        watchers.observe(None)
        watchers.WATCHERS.remove(_installed.opened)
        _installed.close()
        _installed = None
    if logging.getLogRecordFactory() is _Records.make:  # otherwise somebody else's calls it, and it stays
        logging.setLogRecordFactory(_Records.before)
        _Records.placed = False


def _quietly(otherwise: R) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For what a room calls: an exporter or a processor that fails must not stop what an agent does outside."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception:
                log.warning("what an agent does could not be observed", exc_info=True)
                return otherwise

        return quiet

    return decorate


class Telemetry:
    """The observer: makes spans, and counts."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._lock = threading.RLock()  # a handle may be closed by a destructor, anywhere
        self._closed = False
        self._saved: dict[tuple[str, str], float | None] = {}  # when the last checkpoint of an open agent was made
        self._doubtful: dict[tuple[str, str], set[str]] = {}  # keys of effects
        self.costs = meter.create_histogram(
            "holdfast.checkpoint.duration", "s", "Making a checkpoint", explicit_bucket_boundaries_advisory=SECONDS
        )
        self.sizes = meter.create_histogram(
            "holdfast.checkpoint.size",
            "By",
            "What a checkpoint adds, before compression",
            explicit_bucket_boundaries_advisory=BYTES,
        )
        self.runs = meter.create_counter("holdfast.runs", "{run}", "Executions of runs, by how they ended or stopped")
        meter.create_observable_gauge(
            "holdfast.checkpoint.age", [self._ages], "s", "Since the last checkpoint of each open agent"
        )
        meter.create_observable_gauge(
            "holdfast.effects.in_doubt", [self._doubts], "{effect}", "Effects in doubt, as this process last knew"
        )

    def close(self) -> None:
        """There is no way to take an instrument back: it has nothing to say from now on."""
        self._closed = True

    @_quietly(watchers.UNWATCHED)
    def begin(self, what: watchers.What, agent: str, branch: str, about: dict[str, Any]) -> watchers.Watch:
        name, attributes = _described(what, agent, about)
        if what == "call" and not about["effect"].run:  # outside of runs nothing starts while something is in doubt
            self.doubt((agent, branch), (), all_of_them=True)
        attributes |= {AGENT: agent, BRANCH: branch}
        known = {name: value for name, value in attributes.items() if value != ""}
        return Watched(self, what, (agent, branch), self._tracer.start_span(name, attributes=known))

    @_quietly(None)
    def opened(self, handle: Any, here: bool) -> None:
        """A handle on an agent was opened, or is being closed."""
        key = handle.name, handle.branch_name
        with self._lock:
            if not here:
                self._saved.pop(key, None)
            elif handle._lease is not None and len(self._saved) < OPEN_MAX:
                self._saved[key] = handle._made.time.timestamp() if handle._made is not None else None

    def saved(self, key: tuple[str, str]) -> None:
        with self._lock:
            if key in self._saved:
                self._saved[key] = time.time()

    def doubt(self, key: tuple[str, str], effects: Iterable[Any], *, all_of_them: bool) -> None:
        """These effects are in doubt, besides those that were before, or ``all_of_them``."""
        with self._lock:
            known = self._doubtful.get(key, set())
            if known or len(self._doubtful) < OPEN_MAX:
                found = {effect.key for effect in effects} | (set() if all_of_them else known)
                if found or known:
                    self._doubtful[key] = found

    def _ages(self, _options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            known = [] if self._closed else list(self._saved.items())
        now = time.time()
        return [Observation(max(0.0, now - at), _of(key)) for key, at in known if at is not None]

    def _doubts(self, _options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            known = [] if self._closed else list(self._doubtful.items())
        return [Observation(len(effects), _of(key)) for key, effects in known]


def _of(key: tuple[str, str]) -> dict[str, str]:
    return {AGENT: key[0], BRANCH: key[1]}


def _described(what: watchers.What, agent: str, about: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a span, and what is known at its beginning."""
    attributes = {_NAMES[name]: value for name, value in about.items() if name in _NAMES}
    if what == "run":
        return f"invoke_agent {agent}", attributes | {"gen_ai.operation.name": "invoke_agent"}
    if what != "call":
        return f"{what} {agent}", attributes
    effect = about["effect"]
    attributes |= {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": effect.tool,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": effect.id,
        "holdfast.effect.kind": effect.kind,
        "holdfast.effect.path": effect.path,
        "holdfast.run.id": effect.run,
    }
    return f"execute_tool {effect.tool}", attributes


class Watched(watchers.Watch):
    """One span."""

    def __init__(self, owner: Telemetry, what: watchers.What, key: tuple[str, str], span: Span) -> None:
        self._owner, self._what, self._key, self._span = owner, what, key, span
        self._began = time.perf_counter()
        self._status = ""
        self._named = False  # whether it is known which run it is
        context = span.get_span_context()
        if context.is_valid and context.trace_flags.sampled:
            # A resumed run is linked to this span. A checkpoint says only the trace, so that many share the words.
            self.mark = _parent(context) if what == "run" else trace.format_trace_id(context.trace_id)

    def inside(self) -> AbstractContextManager[Any]:
        return trace.use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False)

    @_quietly(None)
    def tell(self, **about: Any) -> None:
        self._named = self._named or "run" in about
        if about.get("status"):
            self._status = about["status"] = _WORDS.get(about["status"], about["status"])
        if (before := _context(about.get("before", ""))) is not None:
            self._span.add_link(before, {"holdfast.link": "resumed"})
        self._span.set_attributes(
            {_NAMES[name]: value for name, value in about.items() if name in _NAMES and value != ""}
        )

    @_quietly(None)
    def end(self, error: BaseException | None = None, **about: Any) -> None:
        self.tell(**about)
        if self._what == "run" and self._named:
            status = self._status or _status(error)
            self._span.set_attribute(_NAMES["status"], status)
            self._owner.runs.add(1, {"holdfast.run.status": status})
            if not isinstance(error, InDoubt) and status != "needs attention":
                self._owner.doubt(self._key, (), all_of_them=True)
        if isinstance(error, InDoubt):
            self._owner.doubt(self._key, error.effects, all_of_them=self._what == "run")
        if self._what == "checkpoint" and error is None:
            self._owner.saved(self._key)
            self._owner.costs.record(time.perf_counter() - self._began)
            self._owner.sizes.record(about["size_bytes"])
        if error is not None and not isinstance(error, NOT_ERRORS):
            kind = error.error_type if isinstance(error, ToolFailed) and error.error_type else type(error).__qualname__
            self._span.set_attribute("error.type", kind)
            self._span.set_status(Status(StatusCode.ERROR, kind))
        self._span.end()


def _status(error: BaseException | None) -> str:
    """In the words of `holdfast runs`."""
    if error is None:
        return "finished"
    if isinstance(error, Waiting):
        return "waiting"
    return "rolled back" if isinstance(error, RunRolledBack) else "interrupted"


def _parent(context: SpanContext) -> str:
    """As the header ``traceparent`` has it."""
    return f"00-{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}-01"


def _context(mark: str) -> SpanContext | None:
    parts = mark.split("-")
    try:
        _, trace_id, span_id, flags = parts
        found = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    except ValueError:
        return None
    return found if found.is_valid else None


class _Records:
    """Log records that are made for an agent say so, as attributes that OpenTelemetry's handler takes along."""

    placed = False
    before: Callable[..., logging.LogRecord] = logging.LogRecord

    @staticmethod
    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = _Records.before(*args, **kwargs)
        lane = HERE.get()
        if lane is not None and _installed is not None:
            record.__dict__ |= _working_for(lane.scope)
        return record


def _working_for(scope: Scope) -> dict[str, str]:
    with suppress(Exception):  # not even logged: that would make another record
        writer = scope.ledger._writer
        head = writer.head_id.hex()[:12] if writer is not None else ""
        found = {"holdfast.agent": scope.agent.name, "holdfast.run": scope.run_id, "holdfast.checkpoint": head}
        return {name: value for name, value in found.items() if value}
    return {}
