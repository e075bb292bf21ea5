"""A restore drill: some checkpoints are brought back elsewhere, as after a loss, and proven there.

Owns the choice of the sample and the proof. The store itself is only read. What always holds: what counts as restored
was written to a store of its own, closed, opened again, and its content has the digests that its checkpoint recorded,
computed anew from that content.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.agent import history
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import name_key
from holdfast.agent.parcels import Last
from holdfast.agent.receiving import Receiver
from holdfast.agent.scratch import scratch
from holdfast.agent.sending import Sending
from holdfast.errors import BadOption, Damaged, HoldfastError, Unavailable
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, CheckpointRow, Progress, quietly

if TYPE_CHECKING:
    from holdfast.agent.store import Store

SAMPLE = 20


@dataclass(frozen=True, slots=True)
class Drilled:
    """One checkpoint of a drill. ``problem`` is empty when it came back and is what it was.

    ``unknown``: it could not be tried, because the machine said no or a colder place did not answer. Nothing is known
    to be lost.
    """

    agent: str
    id: str
    label: str
    depth: int
    problem: str = ""
    unknown: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "agent": self.agent, "id": self.id, "label": self.label, "depth": self.depth, "ok": not self.problem,
            "problem": self.problem, "unknown": self.unknown,
        }  # fmt: skip


@dataclass(slots=True)
class DrillReport:
    """What was restored, and whether it could be proven."""

    store: str
    total: int
    """Checkpoints in the store, from which the sample was taken."""
    checkpoints: list[Drilled] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(not one.problem for one in self.checkpoints)

    def to_json(self) -> dict[str, Any]:
        return {
            "store": self.store, "ok": self.ok, "total": self.total, "bytes": self.bytes,
            "seconds": round(self.seconds, 3), "checkpoints": [one.to_json() for one in self.checkpoints],
        }  # fmt: skip


def drill(
    store: Store,
    agents: Sequence[str] = (),
    *,
    sample: int = SAMPLE,
    place: Path | None = None,
    progress: Progress | None = None,
) -> DrillReport:
    """Restore the newest checkpoint of each branch and others at random, ``sample`` in all, and prove them."""
    if sample < 1:
        raise BadOption(f"a sample of {sample}", hint="Restore at least one checkpoint.")
    began = time.monotonic()
    rows = [store._agent_row(name) for name in agents] if agents else store._agents()
    chosen, total = _choose(store, rows, sample)
    report = DrillReport(str(store.path), total)
    said = progress or quietly
    wanted = sum(map(len, chosen.values()))
    for agent in rows:
        for one in _restore(store, agent, chosen.get(agent.a, []), report, place):
            report.checkpoints.append(one)
            said("checkpoints", len(report.checkpoints), wanted)
    report.seconds = time.monotonic() - began
    return report


def _choose(store: Store, agents: Sequence[AgentRow], sample: int) -> tuple[dict[int, list[CheckpointRow]], int]:
    """A sample by numbers alone, so that choosing reads little: heads first, then any."""
    heads: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    total = 0
    for agent in agents:
        line = Line(store, agent)
        here = {
            n
            for b, most in line.streams
            for n, _, _ in store._catalog.links(b)
            if (most is None or n <= most) and n not in line.forgotten
        }
        total += len(here)
        at = {branch.head for branch in store._catalog.branches(agent.a)} & here
        heads += [(agent.a, n) for n in at]
        others += [(agent.a, n) for n in here - at]
    choose = random.SystemRandom()
    picked = choose.sample(heads, min(sample, len(heads)))
    picked += choose.sample(others, min(sample - len(picked), len(others)))
    found: dict[int, list[CheckpointRow]] = defaultdict(list)
    for a, n in sorted(picked):
        try:
            found[a].append(store._catalog.checkpoint(n))
        except HoldfastError:
            found[a].append(CheckpointRow(n, a, 0, 0, 0, 0, b"", b""))  # its restoring says what is wrong with it
    return found, total


def _restore(
    store: Store, agent: AgentRow, rows: Sequence[CheckpointRow], report: DrillReport, place: Path | None
) -> Iterator[Drilled]:
    """All at once; if that fails each alone, so that one does not stand in the way of the others."""
    if not rows:
        return
    try:
        report.bytes += _bring_back(store, agent, rows, place)
        yield from (_drilled(agent, row) for row in rows)
    except HoldfastError as error:
        if len(rows) == 1:
            yield _drilled(agent, rows[0], error)
            return
        for row in rows:
            yield from _restore(store, agent, [row], report, place)


def _drilled(agent: AgentRow, row: CheckpointRow, error: HoldfastError | None = None) -> Drilled:
    name = str(body_of(agent)["name"])
    problem, unknown = error.message if error is not None else "", isinstance(error, Unavailable)
    if not row.manifest:
        return Drilled(name, "", f"checkpoint {row.n}", 0, problem, unknown)
    return Drilled(name, row.id.hex(), Manifest.decode(row.manifest).label, row.depth, problem, unknown)


def _bring_back(store: Store, agent: AgentRow, rows: Sequence[CheckpointRow], place: Path | None) -> int:
    """Restore checkpoints in a scratch store and prove them there; returns how many bytes that took."""
    rows = [store._catalog.checkpoint(row.n) for row in rows]  # raises for one that cannot be read
    sending = Sending(store, agent)
    # Nothing stands anywhere: restoring single checkpoints moves no branch.
    about = replace(sending.about, branches=[replace(one, head=b"") for one in sending.about.branches])
    near = place if place is not None else store.path.parent
    with scratch(near, encrypted=store._catalog.encrypted, strict=place is not None) as room:
        with room.open(type(store)) as made, Receiver(made, about) as into:
            into.begin()
            for parcel in sending.alone(rows, into):
                into.take(parcel)
            into.finish(Last([], [], (0, b"")), heads=[])
        with room.open(type(store), readonly=True) as again:
            _prove(again, about.name, rows)
    return into.arrived.bytes


def _prove(again: Store, name: str, rows: Sequence[CheckpointRow]) -> None:
    """What was restored has the digests of the originals, computed from its content."""
    agent = again._catalog.agent(name_key(name))
    found = {one.id: one for one in Line(again, agent).rows()} if agent is not None else {}
    for row in rows:
        if row.id not in found:
            raise Damaged("it did not come back")
        state = history.read_all(again._catalog, found[row.id])
        if state.digests() != Manifest.decode(row.manifest).sections:
            raise Damaged("what came back has other digests")
