"""When a run of LangGraph begins and ends, as its checkpointer can know it.

LangGraph tells a checkpointer what to read and to write, and not that a run is over: by its end, an interrupt, an
error, or because it was cancelled. But a run reads its thread while its loop is being entered, and the loop has a stack
of what is to be done when it is left, in which what was put first is done last: after the last checkpoint is saved. So
the saver puts its own end there. A loop whose input is refused is never entered, and so never left; then the run's
callbacks are told. What always holds: a run has ended when LangGraph is done with it, whoever keeps its exception, its
config or its runtime.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.contrib.langgraph.thread import Thread

_RUNTIME = "__pregel_runtime"
_ENTERING = {"__enter__", "__aenter__"}
# Frames between the loop and the saver: a replay looks for its state, a checkpointer is wrapped in another.
_DEEP = 12


def belongs_to_run(configurable: Mapping[str, Any]) -> bool:
    """Whether LangGraph asks for the sake of a run; what people ask for themselves it passes on without this."""
    return _RUNTIME in configurable


def loop_of_caller() -> Any:
    """LangGraph's loop that is being entered, when this is called by its entering; otherwise None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEP):
        if frame is None:
            return None
        if frame.f_code.co_name in _ENTERING:
            loop = frame.f_locals.get("self")
            if hasattr(loop, "checkpointer") and isinstance(getattr(loop, "stack", None), ExitStack | AsyncExitStack):
                return loop
        frame = frame.f_back
    return None


class Run(BaseCallbackHandler):
    """One run at work on a thread."""

    run_inline = True

    def __init__(self, thread: Thread, user: object, loop: Any) -> None:
        self.thread = thread
        self._user: object | None = user
        loop.stack.callback(self.end)
        handlers = getattr(getattr(loop, "manager", None), "handlers", None)  # of this run alone
        if isinstance(handlers, list):
            handlers.append(self)

    def on_chain_error(self, error: BaseException, **_more: Any) -> None:  # noqa: ARG002 - the interface has it
        self.end()

    def end(self) -> None:
        user, self._user = self._user, None
        if user is not None:
            self.thread.leave(user)

    def __del__(self) -> None:
        # Its event loop may have ended before it did.
        user, self._user = self._user, None
        if user is not None:
            self.thread.lost(user)
