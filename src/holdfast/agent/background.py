"""What is done in the background: folding after a seal, and following the policies that live in the store.

Owns the row ``policy`` of table ``store``, the one thread, and when a policy is applied by itself: every few
checkpoints of an agent that has one, a little at a time; and which checkpoints go into one segment, and the nodes that
are its dictionary. Nobody waits for it and nothing depends on it. What always holds: without a stored policy nothing is
let go; the thread is a daemon, ends with the store, and rests longer than it works at what is long; what goes wrong in
it is logged, and never reaches the program. A segment is a run of checkpoints that are each other's children and begins
with a root, a sealed one, or a child of one that lies in a segment already; the sealed one itself stays loose until the
next seal, so that a segment that is lost takes no other one with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from holdfast.agent.history import children, named_in
from holdfast.errors import Contention, Damaged, Forgotten, HoldfastError, Unavailable
from holdfast.store.catalog import View, slices
from holdfast.store.changes import Change
from holdfast.store.database import Database
from holdfast.store.engine import Refused
from holdfast.store.manifest import (
    DICTIONARY_BYTES,
    SEGMENT_BYTES,
    SEGMENT_CHECKPOINTS,
    Packed,
    pack,
    split_payload,
    unpacked,
)
from holdfast.store.rows import Agent, Branch, Point, Row, body_bytes, read_body

if TYPE_CHECKING:
    from holdfast.agent.policy import Policy
    from holdfast.agent.store import Store


# -- policies ---------------------------------------------------------------------------------------------------------


log = logging.getLogger("holdfast.store")

POLICY = "policy"
EVERY = 64
"""Checkpoints of an agent between two looks at what may go: what is above the policy stays below this."""

SLICE_S = 0.002
"""How long the thread works at a stretch, at most, as far as it can tell."""

REST_S = 0.008
"""How long it rests after that: a fifth of one core at most, while there is something to do."""

PAUSE_S = 1.0
"""From the end of one round to the beginning of the next, at least; and ten times as long as the round took."""

STOP_WAIT_S = 2.0
"""How long closing a store waits for checkpoints to be folded. What is not done by then stays as it is, for good."""

Kept = tuple["Policy | None", dict[bytes, "Policy"]]
"""The policy for all agents, and those of single ones by their uuids."""


class Policies:
    """Which policy counts for which agent."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: tuple[bytes | None, Kept] = (None, (None, {}))

    def _read(self) -> Kept:
        value = self._store._db.view.facts().get(POLICY)
        if value != self._known[0]:
            self._known = value, _decoded(value)
        return self._known[1]

    @property
    def any(self) -> bool:
        common, single = self._read()
        return common is not None or bool(single)

    def of(self, agent: Agent) -> Policy | None:
        """The one that counts for an agent: its own, else the store's."""
        common, single = self._read()
        return single.get(agent.uuid, common)

    def listed(self) -> dict[str | None, Policy]:
        """By the agent's name; under None the one for all others."""
        common, single = self._read()
        found: dict[str | None, Policy] = {None: common} if common is not None else {}
        for uuid, policy in single.items():
            agent = self._store._db.view.agent_of(uuid)
            if agent is not None:
                found[agent.name] = policy
        return found

    def set(self, agent: Agent | None, policy: Policy | None) -> None:
        def change_it(change: Change) -> None:
            common, single = _decoded(change.facts().get(POLICY))
            single = {uuid: one for uuid, one in single.items() if change.agent_of(uuid) is not None}
            if agent is None:
                common = policy
            elif policy is None:
                single.pop(agent.uuid, None)
            else:
                single[agent.uuid] = policy
            said: dict[str, Any] = {
                "all": common.to_json() if common is not None else None,
                "agents": [[uuid, one.to_json()] for uuid, one in sorted(single.items())],
            }
            change.set_fact(POLICY, body_bytes(said) if common is not None or single else None)

        self._store._db.change(change_it)


def _decoded(value: bytes | None) -> Kept:
    from holdfast.agent.policy import Policy

    if value is None:
        return None, {}
    try:
        said = read_body(value, "store policy")
        common = Policy.from_json(said["all"]) if said["all"] is not None else None
        return common, {bytes(uuid): Policy.from_json(one) for uuid, one in said["agents"]}
    except (HoldfastError, LookupError, TypeError, ValueError) as error:
        raise Damaged("table store, row policy: not a policy", what=("store policy",)) from error


class _Stopped(Exception):
    """The thread is to end. What it left undone, the next one does."""


class Tending:
    """The thread, and what it has to do."""

    def __init__(self, store: Store, policies: Policies) -> None:
        self._store = store
        self._policies = policies
        self._sealed: queue.SimpleQueue[int] = queue.SimpleQueue()  # checkpoints above which may be folded; 0: look
        self._made: dict[int, int] = {}
        self._due: dict[int, None] = {}  # agents
        self._not_before = 0.0
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # of those who write at once, one starts it
        self._stopped = False
        self._end = 0.0
        self._worked_since = 0.0

    def made(self, branch: Branch, *, sealed: bool) -> None:
        """A checkpoint was written. Costs an addition."""
        count = self._made[branch.a] = self._made.get(branch.a, 0) + 1
        if count % EVERY == 0:
            self._due[branch.a] = None
        if sealed or count % EVERY == 0:
            self._wake(branch.head if sealed else 0)

    def _wake(self, sealed: int) -> None:
        if self._stopped:
            return
        self._sealed.put(sealed)
        with self._starting:
            if self._thread is None or not self._thread.is_alive():  # or an interrupt came before it was started
                self._thread = threading.Thread(target=self._loop, name="holdfast-tending", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread: what is long ends at the next step, and folding that waits is done, if that is soon."""
        self._end = time.monotonic() + STOP_WAIT_S
        self._stopped = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._sealed.put(0)
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopped or (not self._sealed.empty() and time.monotonic() < self._end):
            wait_s = max(0.0, self._not_before - time.monotonic()) if self._due else None
            try:
                sealed = self._sealed.get(timeout=wait_s)
            except queue.Empty:
                sealed = 0
            try:
                if sealed:
                    fold_below(self._store._db, sealed)
                elif self._due and not self._stopped and time.monotonic() >= self._not_before:
                    self._follow()
            except (_Stopped, Forgotten):
                continue
            except (Contention, Unavailable) as error:
                log.info("background work on %s is left for later: %s", self._store.place, error)
            except HoldfastError as error:
                log.warning("background work on %s: %s", self._store.place, error)
            except Exception:
                log.exception("background work on %s", self._store.place)
        self._sealed.put(0)  # a signal handler may have started another one: it ends, too

    def _follow(self) -> None:
        """Let go what policies do not keep of the agents that were written."""
        from holdfast.agent import retention

        began = self._worked_since = time.monotonic()
        due, self._due = self._due, {}
        try:
            if self._policies.any:
                agents = [agent for agent in self._store._db.view.agents() if agent.a in due]
                chosen = [(agent, policy) for agent in agents if (policy := self._policies.of(agent)) is not None]
                retention.follow(self._store, chosen, self._pace)
        finally:
            self._not_before = time.monotonic() + max(PAUSE_S, 10 * (time.monotonic() - began))

    def _pace(self) -> None:
        if not self._stopped and time.monotonic() - self._worked_since >= SLICE_S:
            time.sleep(REST_S)
            self._worked_since = time.monotonic()
        if self._stopped:
            raise _Stopped


# -- segments ---------------------------------------------------------------------------------------------------------


FOLD_MIN = 8
"""Fewer are not worth a segment."""

_LOOK_BACK = 4 * SEGMENT_CHECKPOINTS


def fold_below(db: Database, n: int) -> int:
    """Put the loose checkpoints above a sealed one into segments; returns how many segments that made."""
    with db.moment() as (view, _):
        rows = view.loose(n, _LOOK_BACK)
        if len(rows) <= FOLD_MIN or not rows[0].sealed:
            return 0
        runs = (run for run in _runs(rows[:0:-1]) if len(run) >= FOLD_MIN)
        made = [([row.n for row in run], _packed(view, run, rows[0])) for run in runs]
    folded = 0
    for numbers, packed in made:
        try:
            db.change(partial(Change.fold, numbers=numbers, packed=packed), inside=True)
            folded += 1
        except Refused:
            break  # somebody else has, or they are gone: nothing to do
    return folded


def _runs(rows: list[Row]) -> Iterator[list[Row]]:
    """A run of checkpoints, oldest first, in parts that are not too large for one segment, their payloads unpacked.

    One that is too large by itself stays as it is.
    """
    part: list[Row] = []
    size = 0
    for row in rows:
        payload = unpacked(row.data or b"")  # once: it is looked into several times
        length = sum(map(len, split_payload(payload)))
        if part and (len(part) >= SEGMENT_CHECKPOINTS or size + length > SEGMENT_BYTES):
            yield part
            part, size = [], 0
        if length <= SEGMENT_BYTES:
            part.append(row._replace(data=payload))
            size += length
    if part:
        yield part


def _packed(view: View, rows: list[Row], tip: Row) -> Packed:
    points = [view.point(row) for row in rows]
    for above, below in pairwise(points):
        if below.manifest.parent != above.id:
            short = above.id.hex()[:12]
            raise Damaged(f"checkpoint {short} is not the one that its child names", what=(f"checkpoint {short}",))
    operations = [view.operations(point) for point in points]
    named: list[bytes] = []
    for data in operations:
        nodes, chunks = named_in(data)
        named += [*nodes, *chunks]
    leaves = _new_leaves(view, view.point(tip), points[0])
    return pack([row.n for row in rows], [point.raw for point in points], operations, leaves, named)


def _new_leaves(view: View, point: Point, since: Point) -> dict[bytes, bytes]:
    """Leaves of a sealed state that the last sealed one before lacks: what operations put there stands in them."""
    above = [since.row] if since.row.sealed else view.up(since.n, _LOOK_BACK)
    sealed = next((row for row in above if row.sealed), None)
    before = [root for _, root in view.point(sealed).manifest.sections] if sealed is not None else []
    known = set(before)
    fresh: dict[bytes, bytes] = {}
    size = 0
    level = [root for _, root in point.manifest.sections if root not in known]
    while level:  # both trees from above, where they differ: what one level of the earlier one names is known
        inner = [raw for raw in view.nodes(before).values() if raw[1]]
        known.update(child for raw in inner for child in children(raw))
        below: dict[bytes, None] = {}
        for part in slices(level, 64):
            for name, raw in view.nodes(part).items():
                if raw[1]:
                    below |= dict.fromkeys(children(raw))
                    continue
                size += len(raw)
                if size > DICTIONARY_BYTES:
                    return {}
                fresh[name] = raw
        before = [child for raw in inner if raw[1] > 1 for child in children(raw) if child not in below]
        level = [child for child in below if child not in known]
    return fresh
