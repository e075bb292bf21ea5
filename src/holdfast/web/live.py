"""What happens now, told to every open tab: one poller asks the store, however many look.

Owns the poller and the streams (server-sent events). Says only which agents have changed; tabs ask again for what they
show. What always holds: nobody polls while nobody looks, and no error ends it while somebody does; a stream that is not
read is dropped, and a tab that comes back looks at everything again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple

from holdfast import Store
from holdfast.errors import HoldfastError
from holdfast.web.place import Place

EVERY_S = 1.0
QUIET_S = 15.0
"""After so long without news a stream says that it is still there."""
LATELY_S, WHOLE_S = 60.0, 30.0
"""How far back a look goes, beyond what clocks of several machines differ, and how often it goes over everything."""
STREAMS_MOST = 64
AGAIN_MS = 10_000
"""A tab that found no place asks again after so long."""
WAITING_MOST = 32
NAMED_MOST = 200
"""Names in one event; with more, everything is said to have changed."""

log = logging.getLogger("holdfast.web")


def fingerprint(store: Store, before: Fingerprint | None) -> Fingerprint:
    """What an agent's line on the page depends on, by name. Only what changed lately is read, but now and then all."""
    now = time.monotonic()
    whole = before is None or now - before.whole_s > WHOLE_S
    after = None if whole else datetime.now(UTC) - timedelta(seconds=LATELY_S)
    found = {} if whole or before is None else dict(before.agents)
    found |= store.updated(after)
    writers: dict[str, set[str]] = {}
    for holder in store.writers():
        writers.setdefault(str(holder.get("agent", "")), set()).add(f"{holder.get('pid')} {holder.get('branch')}")
    return Fingerprint(found, writers, now if whole or before is None else before.whole_s)


class Fingerprint(NamedTuple):
    """When each agent last changed, who writes it, and when all of them were looked at."""

    agents: dict[str, datetime]
    writers: dict[str, set[str]]
    whole_s: float

    def differs_from(self, before: Fingerprint) -> list[str]:
        """The agents about which something else is to be said now."""
        changed = self.agents.items() ^ before.agents.items()
        names = {name for name, _ in changed}
        held = self.writers.keys() | before.writers.keys()
        return sorted(names | {name for name in held if self.writers.get(name) != before.writers.get(name)})


class Live:
    """All streams of one server."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._queues: set[asyncio.Queue[str]] = set()
        self._poller: asyncio.Task[None] | None = None
        self.polls = 0
        self._over = False

    @property
    def streams(self) -> int:
        return len(self._queues)

    @property
    def over(self) -> bool:
        """Whether the server stops."""
        return self._over

    def stop(self) -> None:
        """End all streams: the server stops."""
        self._over = True
        self._tell("bye", {})
        self._queues.clear()

    async def stream(self) -> AsyncIterator[str]:
        """Events for one tab, until it goes away. One for which there is no place is told that, and asks again."""
        if self.streams >= STREAMS_MOST:
            yield f"retry: {AGAIN_MS}\nevent: full\ndata: {json.dumps({'most': STREAMS_MOST})}\n\n"
            return
        queue: asyncio.Queue[str] = asyncio.Queue(WAITING_MOST)
        self._queues.add(queue)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            yield "retry: 2000\nevent: hello\ndata: {}\n\n"
            while queue in self._queues:  # not one that is too slow: the browser comes again, and looks at everything
                try:
                    yield await asyncio.wait_for(queue.get(), QUIET_S)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._queues.discard(queue)

    async def _poll(self) -> None:
        before: Fingerprint | None = None
        broken = ""
        while self._queues:
            self.polls += 1
            try:
                now = await self._place.ask(partial(fingerprint, before=before))
                names = now.differs_from(before) if before is not None else []
                if names or broken:
                    told = {"all": len(names) > NAMED_MOST or bool(broken), "agents": names[:NAMED_MOST]}
                    self._tell("changed", told)
                before, broken = now, ""
            except Exception as error:  # whatever it is: tabs would say that they are live
                message, hint = _said(error)
                if message != broken:
                    self._tell("trouble", {"message": message, "hint": hint})
                    if not isinstance(error, HoldfastError):
                        log.exception("the page cannot tell what has changed; it tries again")
                broken = message
            await asyncio.sleep(EVERY_S)

    def _tell(self, event: str, data: dict[str, object]) -> None:
        text = f"event: {event}\ndata: {json.dumps(data)}\n\n"
        for queue in list(self._queues):
            try:
                queue.put_nowait(text)
            except asyncio.QueueFull:
                self._queues.discard(queue)


def _said(error: Exception) -> tuple[str, str]:
    if isinstance(error, HoldfastError):
        return error.message, error.hint
    return f"The page failed: {type(error).__name__}.", "That is a fault of this page. The terminal has the details."
