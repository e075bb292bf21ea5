"""Policies that live in the store, and the thread that follows them.

Owns the row ``policy`` of table ``store`` and when a policy is applied by itself: every few checkpoints of an agent
that has one, in the background, a little at a time. What always holds: without a stored policy nothing happens; the
thread rests longer than it works, and what it leaves undone when it is stopped the next one goes on with.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from holdfast.codec.values import decode, encode
from holdfast.errors import Contention, Damaged, HoldfastError, Unavailable
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow

if TYPE_CHECKING:
    from holdfast.agent.policy import Policy
    from holdfast.agent.store import Store

log = logging.getLogger("holdfast.retention")

NOTE = "policy"
EVERY = 64
"""Checkpoints of an agent between two looks at what may go: what is above the policy stays below this."""

SLICE_S = 0.002
"""How long the thread works at a stretch, at most, as far as it can tell."""

REST_S = 0.008
"""How long it rests after that: a fifth of one core at most, while there is something to do."""

PAUSE_S = 1.0
"""From the end of one round to the beginning of the next, at least; and ten times as long as the round took."""


class Stopped(Exception):
    """The thread is to end. What it has begun is noted in the store."""


class Policies:
    """The policies of a store: one for all agents, and those of single ones."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: tuple[bytes | None, Policy | None, dict[bytes, Policy]] = (None, None, {})

    def _read(self) -> tuple[Policy | None, dict[bytes, Policy]]:
        value = self._store._catalog.fact(NOTE)
        if value != self._known[0]:
            common: Policy | None = None
            single: dict[bytes, Policy] = {}
            if value is not None:
                from holdfast.agent.policy import Policy

                try:
                    said = decode(value)
                    common = Policy.from_json(said["all"]) if said["all"] is not None else None
                    single = {bytes(uuid): Policy.from_json(one) for uuid, one in said["agents"]}
                except (HoldfastError, LookupError, TypeError, ValueError) as error:
                    raise Damaged("table store, row policy: not a policy", what=("store policy",)) from error
            self._known = value, common, single
        return self._known[1], self._known[2]

    @property
    def any(self) -> bool:
        common, single = self._read()
        return common is not None or bool(single)

    def of(self, agent: AgentRow) -> Policy | None:
        """The one that counts for an agent: its own, else the store's."""
        common, single = self._read()
        return single.get(agent.uuid, common)

    def listed(self) -> dict[str | None, Policy]:
        """By the agent's name; under None the one for all others."""
        common, single = self._read()
        names = {row.uuid: str(body_of(row)["name"]) for row in self._store._catalog.agents()}
        found: dict[str | None, Policy] = {None: common} if common is not None else {}
        return found | {names[uuid]: policy for uuid, policy in single.items() if uuid in names}

    def set(self, agent: AgentRow | None, policy: Policy | None) -> None:
        common, single = self._read()
        single = dict(single)
        if agent is None:
            common = policy
        elif policy is None:
            single.pop(agent.uuid, None)
        else:
            single[agent.uuid] = policy
        there = {row.uuid for row in self._store._catalog.agents()}
        said: dict[str, Any] = {
            "all": common.to_json() if common is not None else None,
            "agents": [[uuid, one.to_json()] for uuid, one in sorted(single.items()) if uuid in there],
        }
        empty = common is None and not said["agents"]
        self._store._catalog.set_fact(NOTE, None if empty else encode(said))


class Tending:
    """Counts checkpoints, and has a thread that lets go what a stored policy does not keep."""

    def __init__(self, store: Store, policies: Policies) -> None:
        self._store = store
        self._policies = policies
        self._made: dict[int, int] = {}
        self._due: dict[int, AgentRow] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._worked_since = 0.0

    def made(self, agent: AgentRow) -> None:
        """A checkpoint was written. Costs an addition, and every so often one read."""
        count = self._made.get(agent.a, 0) + 1
        self._made[agent.a] = count
        if count % EVERY == 0 and not self._stopping:
            self.look(agent)

    def look(self, agent: AgentRow) -> None:
        """See soon whether something of an agent may go."""
        try:
            if self._policies.of(agent) is None:
                return
        except HoldfastError as error:
            log.warning("what to keep of the agents in %s cannot be read: %s", self._store.path, error.message)
            return
        with self._lock:
            self._due[agent.a] = agent
            if self._thread is None or not self._thread.is_alive():  # or an interrupt came before it was started
                self._thread = threading.Thread(target=self._loop, name="holdfast-retain", daemon=True)
                self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """End the thread at the next step; it is gone when this returns."""
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join()

    def _loop(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                due, self._due = list(self._due.values()), {}
            began = time.monotonic()
            if due and not self._stopping:
                self._round(due)
            self._sleep(max(PAUSE_S, 10 * (time.monotonic() - began)))

    def _round(self, due: list[AgentRow]) -> None:
        from holdfast.agent import retention

        self._worked_since = time.perf_counter()
        try:
            chosen = [(agent, policy) for agent in due if (policy := self._policies.of(agent)) is not None]
            retention.retain(self._store, chosen, self._pace)
        except Stopped:
            return
        except (Contention, Unavailable) as error:
            log.info("what a policy does not keep stays for now: %s", error.message)
        except HoldfastError as error:
            log.warning("what a policy does not keep cannot be let go: %s", error.message)

    def _pace(self) -> None:
        if self._stopping:
            raise Stopped
        if time.perf_counter() - self._worked_since >= SLICE_S:
            self._sleep(REST_S)
            if self._stopping:
                raise Stopped
            self._worked_since = time.perf_counter()

    def _sleep(self, seconds: float) -> None:
        """Sleep, but not through the end of the store."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
