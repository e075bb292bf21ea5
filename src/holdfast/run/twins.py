"""Async twins of verbs that wait: the same code, so that there is one way in which each of them goes.

Owns making a twin. A verb that is written as steps has its twin beside it, by the other driver (``steps``); these are
the others. What always holds: the event loop goes on meanwhile, and what was begun is finished even when its caller is
cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from holdfast.run.steps import Work

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def twin(
    verb: Callable[Concatenate[S, P], R], kind: type[Work] = Work
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """The async twin of a method that waits for the disk alone; with ``Long``, of one that may wait for others."""
    name = verb.__name__

    async def later(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # By its name: who has made the verb another one has made the twin another one, too.
        answer: R = await kind(partial(getattr(self, name), *args, **kwargs)).later()
        return answer

    later.__name__, later.__qualname__ = f"a{name}", f"{verb.__qualname__.rpartition('.')[0]}.a{name}"
    later.__doc__ = f"As {name}(), for async code."
    return later
