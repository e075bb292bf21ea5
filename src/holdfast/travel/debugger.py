"""pdb inside of a run that is executed again: at any step, and back from it.

Owns the commands that pdb does not have. Going back is executing the run once more, up to an earlier step: nothing was
done outside, so nothing has to be undone. What always holds: what is typed is executed in the process of the replay,
which can do nothing outside either; the program's frames are shown, not those of this package.
"""

from __future__ import annotations

import pdb  # noqa: T100 - it is what people know
import sys
from types import FrameType, TracebackType
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.text import clean
from holdfast.travel.adapter import Input
from holdfast.travel.execution import Step
from holdfast.travel.expressions import Expression, Look, follow, parse_path
from holdfast.travel.rerun import Replaying
from holdfast.travel.sandbox import is_own, own_frames
from holdfast.travel.variation import Job

_SKIPPED = ("holdfast", "holdfast.*", "asyncio", "asyncio.*", "contextlib", "contextvars", "functools", "bdb", "pdb")
_SHOWN = 400
_AROUND = 5


def begin(job: Job, run: Replaying) -> None:
    """Have the debugger stop at the job's step; or find the newest step before it at which an expression holds."""
    run.observe = _Seeking(job, run) if job.until else Debugger(job, run).come


class _Seeking:
    """Looks for the newest step before the job's at which an expression holds, and says which it is."""

    def __init__(self, job: Job, run: Replaying) -> None:
        self._job, self._run, self._found = job, run, 0
        self._holds = Expression(job.until)

    def __call__(self, step: Step) -> None:
        if step.number >= self._job.step:
            if not self._found:
                print(f"*** {self._job.until} holds at no step before {self._job.step}")  # noqa: T201 - to the debugger
            self._run.found.again = self._found or self._job.step
            self._run.halt("")
        if self._holds.holds(Look.of(self._run.handle._document)):
            self._found = step.number


class _Typed:
    """Standard input as text."""

    def readline(self) -> str:
        return Input().readline().decode(errors="replace")


class Debugger(pdb.Pdb):
    """pdb, with steps of the run."""

    def __init__(self, job: Job, run: Replaying) -> None:
        asks: dict[str, Any] = {} if sys.stdin.isatty() else {"stdin": _Typed(), "stdout": sys.stdout}
        super().__init__(skip=_SKIPPED, nosigint=True, readrc=False, **asks)
        self.prompt = "(replay) "
        self._run, self._wanted = run, job.step
        self._step = Step(0, "", "", "")
        self._going = False

    def come(self, step: Step) -> None:
        """The run is at a step."""
        self._step = step
        if step.number != self._wanted:
            return
        frame = next(own_frames(sys._getframe(1)), None)
        if frame is None:
            return
        self._say(f"step {step.number}: {step.what} at {step.path} ({step.answer or 'of the program'})")
        self._stop(frame)

    def _stop(self, frame: FrameType) -> None:
        """Talk to the person here, then go on as he says."""
        self.reset()
        self._going = False
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe = outer
            outer = outer.f_back
        self.set_step()
        self.interaction(frame, None)
        if self.quitting:
            self._run.halt("")
        if self.breaks or not self._going:
            sys.settrace(self.trace_dispatch)

    def _say(self, text: str) -> None:
        self.message(clean(text))

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The frames of the program alone."""
        whole, at = super().get_stack(f, t)
        own = [one for one in whole if is_own(one[0].f_code.co_filename)]
        return (own, own.index(whole[at])) if whole[at] in own else (whole, at)

    # -- commands -------------------------------------------------------------------------------------------

    def do_continue(self, arg: str) -> bool | None:
        """Go on to the end of the run, or to a breakpoint."""
        self._going = True
        return super().do_continue(arg)

    do_c = do_cont = do_continue

    def do_back(self, arg: str) -> bool | None:
        """Go back N steps, by default 1 (``back [N]``): the run is executed again up to there."""
        return self._again(max(1, self._step.number - _count(arg)))

    def do_forward(self, arg: str) -> bool:
        """Go on to the N-th step from here, by default to the next call or checkpoint (``forward [N]``)."""
        self._wanted = self._step.number + _count(arg)
        self._going = True
        self.set_continue()
        return True

    do_fwd = do_forward

    def do_goto(self, arg: str) -> bool | None:
        """Be at step N, before or behind this one (``goto N``)."""
        number = _count(arg)
        return self.do_forward(str(number - self._step.number)) if number > self._step.number else self._again(number)

    def do_reverse(self, arg: str) -> bool | None:
        """Go back to the newest step before this one at which an expression holds (``reverse-until EXPR``)."""
        text = arg.removeprefix("-until").removeprefix("_until").strip()
        try:
            Expression(text)
        except HoldfastError as error:
            self.error(str(error))
            return None
        self._run.found.again_until = text
        return self._again(self._step.number)

    do_reverse_until = do_reverse

    def do_steps(self, _arg: str) -> None:
        """Show the last steps of the run: its calls and checkpoints."""
        for step in self._run.found.steps[-_AROUND:]:
            self._say(f"{'->' if step == self._step else '  '} {step.number}  {step.what} at {step.path}  {step.line}")

    def do_state(self, arg: str) -> None:
        """Show the agent's state as it is here, or a place in it (``state [PATH]``)."""
        document = self._run.handle._document
        try:
            whole = {name: document.plain(document[name]) for name in document}
            self._say(repr(follow(whole, parse_path(arg)))[:_SHOWN])
        except HoldfastError as error:
            self.error(str(error))

    def _again(self, step: int) -> bool:
        self._run.found.again = step
        self.set_quit()
        return True


def _count(arg: str) -> int:
    return max(1, int(arg)) if arg.strip().isdigit() else 1
