"""An effect as user code sees it: inside a tool, in a probe, in a compensation, in a list.

Owns the answers of a probe and the words for an effect's status. Must not write anything itself: progress goes
through a function that it was given. What always holds: an effect says what its records say, no more.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from holdfast.errors import BadOption


class Found(Struct, frozen=True):
    """A probe's answer: it happened, and this is what the call would have returned."""

    result: Any = None


class Absent(Struct, frozen=True):
    """A probe's answer: it did not happen."""


class Unknown(Struct, frozen=True):
    """A probe's answer: it cannot tell."""

    why: str = ""


class Effect:
    """One call to the outside world. ``key`` is the same each time the call is repeated for the same purpose."""

    def __init__(
        self,
        *,
        tool: str,
        kind: str,
        key: str,
        path: str,
        run: str,
        args: Callable[[], dict[str, Any]],
        status: str = "running",
        number: int = 0,
        attempt: int = 1,
        at_us: int = 0,
        result: Callable[[], Any] | None = None,
        error: str = "",
        why: str = "",
        last_progress: Callable[[], Any] | None = None,
        report: Callable[[Any], None] | None = None,
    ) -> None:
        self.tool = tool
        self.kind = kind
        self.key = key
        self.path = path
        self.run = run
        self.number = number
        self.attempt = attempt
        self.status = status
        self.error = error
        self.why = why
        self.still: Callable[[], bool] = lambda: False  # whether a call that was given up is still going on
        self._at_us = at_us
        self._args = args
        self._result = result
        self._last_progress = last_progress
        self._report = report
        self._whole: Callable[[], dict[str, Any]] | None = None

    @property
    def id(self) -> str:
        """What a person names it by."""
        return self.key[:12]

    @property
    def at(self) -> datetime:
        """When it was intended, or, for a read, done."""
        return datetime.fromtimestamp(self._at_us / 1e6, UTC)

    @property
    def args(self) -> dict[str, Any]:
        """The arguments, by parameter name."""
        return self._args()

    def whole(self) -> dict[str, Any]:
        """As ``args``, with the whole of what stands there by its size and first words, where a checkpoint has it.

        A read is recorded without the parts of the state that it was given.
        """
        return self._whole() if self._whole is not None else self._args()

    @property
    def result(self) -> Any:
        """What the call returned; None while that is not known."""
        return self._result() if self._result is not None else None

    @property
    def last_progress(self) -> Any:
        """What the call last said by ``progress()``, before it was interrupted; None if nothing."""
        return self._last_progress() if self._last_progress is not None else None

    def progress(self, value: Any) -> None:
        """Keep how far the call has come, so that it can go on from there when it is made again."""
        if self._report is None:
            raise BadOption("progress can be told only while the tool runs")
        self._report(value)
        self._last_progress = lambda: value

    def __repr__(self) -> str:
        return f"<Effect {self.id} {self.tool} at {self.path or '(loop)'}: {self.status}>"
