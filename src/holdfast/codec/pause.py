"""Holding the cyclic garbage collector off while many objects are made that are all kept.

Owns nothing but that. The collector looks at everything young each time some hundred containers were made; while a
large value is decoded all of it is alive, and looking takes longer than decoding. What always holds: it is on again
afterwards if it was on before, however many threads decode at once.
"""

from __future__ import annotations

import gc
import threading
from types import TracebackType


class _Pause:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._was_on:
                gc.enable()


collector_paused = _Pause()
"""``with collector_paused:`` around the making of something large."""
