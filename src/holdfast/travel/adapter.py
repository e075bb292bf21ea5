"""The Debug Adapter Protocol for a run that is executed again: an editor steps through it, forwards and backwards.

Owns where an execution stops, and the way back. What is shown at a stop is a dump of that moment, served as any other
(``crash.dap``), with the agent's state beside it. Lines of the program are counted from its beginning, the same each
time; going back is executing the run once more, up to an earlier line. What always holds: nothing is done outside, so
nothing has to be undone; the conversation goes on where it was, in the next process; what the program prints goes to
standard error.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import FrameType
from typing import Any, cast

from holdfast.crash import inside
from holdfast.crash.dap import Session, Tree, Wire
from holdfast.crash.dump import open_dump
from holdfast.crash.kinds import Limits
from holdfast.errors import BadOption
from holdfast.travel.rerun import Replaying
from holdfast.travel.sandbox import is_own, own_frames
from holdfast.travel.variation import Job

_LIMITS = Limits(deadline_s=2.0, objects=50_000, items=1_000, census_objects=1)
_GOES = {"continue", "next", "stepIn", "stepOut", "stepBack", "reverseContinue"}


class Input:
    """Standard input, read no further than is asked for: the next process goes on reading it."""

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (piece := os.read(0, size - len(data))):
            data += piece
        return data

    def readline(self, limit: int = 1 << 16) -> bytes:
        line = b""
        while len(line) < limit and not line.endswith(b"\n") and (one := os.read(0, 1)):
            line += one
        return line


_output: list[int] = []


def keep_output() -> None:
    """Before the program is loaded: standard output is the editor's, and what is printed goes elsewhere."""
    _output.append(os.dup(1))
    os.dup2(2, 1)


class Adapter(Session):
    """One process's part of a conversation."""

    def __init__(self, job: Job, run: Replaying, directory: str) -> None:
        wire = Wire(cast("Any", Input()), os.fdopen(_output[-1], "wb"))
        wire._numbers = count(job.dap.get("seq", 1))
        super().__init__(wire, None)
        self._run, self._directory = run, directory
        self._line_base, self._column_base = job.dap.get("base", (1, 1))
        self._breaks: dict[str, list[int]] = job.dap.get("breaks", {})
        self._begun = bool(job.dap)
        self._at = 0  # lines of the program up to here
        self._target = job.step if self._begun else 0  # the line that is wanted, in that count
        self._seeking = bool(job.until)  # for the last breakpoint before it
        self._last = 0  # that one
        self._mode, self._depth = "", 0
        self._state: dict[str, Any] = {}

    def begin(self) -> None:
        """The function of the run is entered."""
        if not self._begun:
            self._talk()
        sys.settrace(self._trace)

    def end(self) -> None:
        """It has ended, or is executed once more."""
        sys.settrace(None)
        if not self._run.found.again:
            with suppress(OSError):  # the editor has left
                self._event("terminated", {})
        base = self._line_base, self._column_base
        self._run.found.dap = {"seq": next(self._wire._numbers), "base": base, "breaks": self._breaks}

    # -- where it stops -------------------------------------------------------------------------------------

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if not is_own(frame.f_code.co_filename):
            return None
        if event == "line":
            self._at += 1
            if why := self._reason(frame):
                self._stopped(frame, why)
        return self._trace

    def _reason(self, frame: FrameType) -> str:
        """Why to stop before this line; empty: go on."""
        hit = frame.f_lineno in self._breaks.get(os.path.realpath(frame.f_code.co_filename), ())
        if self._seeking:
            self._last = self._at if hit and self._at < self._target else self._last
            if self._at >= self._target:
                self._go_back(self._last or 1, seek=False)
            return ""
        if self._target:
            return "step" if self._at == self._target else ""
        if hit:
            return "breakpoint"
        depth = sum(1 for _ in own_frames(frame)) if self._mode else 0
        stops = {"next": depth <= self._depth, "stepIn": True, "stepOut": depth < self._depth}
        return "step" if stops.get(self._mode) else ""

    def _stopped(self, frame: FrameType, reason: str) -> None:
        sys.settrace(None)
        self._target = 0
        self._depth = sum(1 for _ in own_frames(frame))
        self._dump = open_dump(inside.capture("a replay", to=self._directory, trigger="replay", limits=_LIMITS))
        stacks = [
            replace(one, frames=tuple(frame for frame in one.frames if is_own(frame.file)))
            for one in self._dump.all_stacks()[:1]
        ]
        self._stacks, self._sources, self._numbers = stacks, [], {}
        self._tree = Tree(self._dump, stacks)
        document = self._run.handle._document
        self._state = {name: document.plain(document[name]) for name in document}
        step = self._run.found.steps[-1] if self._run.found.steps else None
        text = f"line {self._at}" + (f", after {step.what} at {step.path}" if step is not None else "")
        self._event("stopped", {"reason": reason, "description": text, "threadId": 1, "allThreadsStopped": True})
        self._talk()
        sys.settrace(self._trace)

    def _talk(self) -> None:
        """Answer until the editor lets it go on; without an editor it ends."""
        self._over, self._mode = False, ""
        self.run()
        self._dump = None
        if not self._over or self._mode == "end":
            self._run.halt("")
        if self._mode == "stepBack":
            self._go_back(max(1, self._at - 1), seek=False)
        if self._mode == "reverseContinue":
            self._go_back(self._at, seek=True)

    def _go_back(self, line: int, *, seek: bool) -> None:
        self._run.found.again, self._run.found.again_until = line, "breakpoint" if seek else ""
        self._run.halt("")

    # -- requests -------------------------------------------------------------------------------------------

    def _do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if command not in _GOES:
            return super()._do(command, arguments)
        if self._dump is None:
            raise BadOption("the run has not begun", hint="Send configurationDone first.")
        self._mode, self._over = command, True
        return {"allThreadsContinued": True}

    def _initialize(self, arguments: dict[str, Any]) -> dict[str, Any]:
        known = super()._initialize(arguments)
        return {**known, "supportsStepBack": True, "supportsExceptionInfoRequest": False}

    def _launch(self, _arguments: dict[str, Any]) -> None:
        self._after.append(("initialized", {}))

    def _configured(self, _arguments: dict[str, Any]) -> None:
        self._target, self._over = 1, True

    def _disconnect(self, _arguments: dict[str, Any]) -> None:
        self._mode, self._over = "end", True

    def _breakpoints(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Those of one file. What stands in no file of the program is never reached."""
        source, wanted = arguments.get("source"), arguments.get("breakpoints")
        path = source.get("path") if isinstance(source, dict) else None
        if not isinstance(path, str) or not isinstance(wanted, list):
            return {"breakpoints": []}
        given = [one.get("line") for one in wanted if isinstance(one, dict)]
        lines = [line + 1 - self._line_base for line in given if isinstance(line, int)]
        self._breaks[os.path.realpath(path)] = lines
        known = is_own(os.path.realpath(path)) and os.path.exists(path)  # noqa: PTH110 - a text from outside
        return {"breakpoints": [{"verified": known, "line": line - 1 + self._line_base} for line in lines]}

    def _scopes(self, arguments: dict[str, Any]) -> dict[str, Any]:
        found = super()._scopes(arguments)
        number = self._tree._handle(("state",), ("plain", self._state))
        found["scopes"][1] = {"name": "State of the agent", "variablesReference": number, "expensive": False}
        return found
