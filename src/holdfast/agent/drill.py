"""A restore drill: some checkpoints are brought back elsewhere, as after a loss, and proven there.

Owns the choice of the sample and the proof. The store is only read, as it was at one moment. What always holds: what
counts as restored was written to a store of its own, closed, opened again, and its content has the digests that its
checkpoint recorded, computed anew from that content; the scratch place is encrypted with a key that nobody keeps where
the store is, and gone when the work is done. A process that is killed leaves a folder ``.holdfast-scratch-*`` behind.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.agent import history
from holdfast.agent.graph import Graph
from holdfast.codec.state import Reader, State
from holdfast.codec.types import Registry
from holdfast.errors import BadOption, Damaged, HoldfastError, Unavailable
from holdfast.store.catalog import Agent, Point, Progress, View
from holdfast.store.changes import Change, NewCheckpoint, NewPack, Objects, pack_node
from holdfast.store.database import Contents, Database, open_database
from holdfast.store.files import scratch, unavailable
from holdfast.store.keys import secret_of

if TYPE_CHECKING:
    from holdfast.agent.store import Store


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
        return {**asdict(self), "ok": not self.problem}


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


class _Copying(history.Stored):
    """The source of a state, which keeps what is read of it."""

    def __init__(self, contents: Contents, point: Point) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.chunks: dict[bytes, bytes] = {}
        super().__init__(contents, point)

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        found = super().nodes(digests)
        self.kept.update(found)
        return found

    def bulk(self, digests: list[bytes]) -> bytes:
        self.chunks.update((digest, super(_Copying, self).bulk([digest])) for digest in digests)
        return b"".join([self.chunks[digest] for digest in digests])


def drill(store: Store, agents: Sequence[str], sample: int, place: Path | None, say: Progress) -> DrillReport:
    """Restore the newest checkpoint of each branch and others at random, ``sample`` in all, and prove them."""
    if sample < 1:
        raise BadOption(f"a sample of {sample}", hint="Restore at least one checkpoint.")
    began = time.monotonic()
    rows = [store._agent_row(name) for name in agents] if agents else store._agents()
    store.flush()
    secret = secret_of(os.urandom(32)) if store.encrypted else None
    with _scratch(place, store) as room:
        restored: list[tuple[Agent, int, Point | None, HoldfastError | None]] = []
        with (
            store._db.moment() as contents,
            closing(open_database(room / "store", secret=secret, remember=False)) as made,
        ):
            chosen, total = _choose(contents.view, rows, sample)
            report = DrillReport(store.place, total)
            for done, (agent, n) in enumerate(chosen, 1):
                point, error = None, None
                try:
                    point = contents.view.point(n)
                    report.bytes += _bring_back(contents, point, made)
                except (Damaged, Unavailable) as failed:
                    error = failed
                restored.append((agent, n, point, error))
                say("checkpoints", done, len(chosen))
        with closing(open_database(room / "store", readonly=True, secret=secret, remember=False)) as again:
            report.checkpoints = [_drilled(again, *one) for one in restored]
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def _scratch(place: Path | None, store: Store) -> Iterator[Path]:
    """A folder for this user only: below ``place``, or beside the store, or where temporary files go."""
    places = [place] if place is not None else [Path(store.place).parent, None]
    with ExitStack() as stack:
        for folder in places:
            try:
                yield stack.enter_context(scratch(folder))
                return
            except OSError as error:
                failed = error
        raise unavailable(failed, f"making a scratch place in {places[0]}") from failed


def _choose(view: View, agents: Sequence[Agent], sample: int) -> tuple[list[tuple[Agent, int]], int]:
    """A sample by numbers alone, so that choosing reads little: heads first, then any."""
    heads: list[tuple[Agent, int]] = []
    others: list[tuple[Agent, int]] = []
    for agent in agents:
        graph = Graph(view, agent)
        try:
            seen = graph.numbers
        except Damaged:  # what a branch has left cannot be read; the rest can be tried
            seen = graph.above(graph.heads)
        heads += [(agent, n) for n in graph.heads]
        others += [(agent, n) for n in seen - graph.heads]
    choose = random.SystemRandom()
    picked = choose.sample(heads, min(sample, len(heads)))
    picked += choose.sample(others, min(sample - len(picked), len(others)))
    return picked, len(heads) + len(others)


def _bring_back(contents: Contents, point: Point, to: Database) -> int:
    """Write a checkpoint with all of its state to another store; returns how many bytes that took."""
    source = _Copying(contents, point)
    state = State(source)
    Reader(state, Registry(), inert=True).everything()
    nodes = {name: pack_node(raw) for name, raw in {**source.kept, **state.unstored()}.items()}
    pack = to.packs.write(source.chunks.items()) if source.chunks else None
    operations = contents.view.operations(point)
    new = NewCheckpoint(point.id, point.raw, operations, sealed=True)
    to.change(partial(_put, new=new, nodes=nodes, pack=pack))
    parts = (point.raw, operations, *nodes.values(), *source.chunks.values())
    return sum(map(len, parts))


def _put(change: Change, new: NewCheckpoint, nodes: dict[bytes, bytes], pack: NewPack | None) -> None:
    change.put_objects(Objects(nodes, pack))
    if change.find(new.id) is None:
        change.put("shallow", change.put_checkpoint(new, 0, 0, 0, 0), 0)


def _drilled(again: Database, agent: Agent, n: int, point: Point | None, error: HoldfastError | None) -> Drilled:
    """What became of a checkpoint: it has the digests of the original, computed from its content."""
    if point is None:
        problem = error.message if error is not None else "it cannot be read"
        return Drilled(agent.name, "", f"checkpoint {n}", 0, problem, isinstance(error, Unavailable))
    if error is None:
        try:
            found = again.view.find(point.id)
            if found is None:
                raise Damaged("it did not come back")
            if history.read_all(again.now, found).digests() != point.manifest.sections:
                raise Damaged("what came back has other digests")
        except (Damaged, Unavailable) as failed:
            error = failed
    problem, unknown = (error.message, isinstance(error, Unavailable)) if error is not None else ("", False)
    return Drilled(agent.name, point.id.hex(), point.manifest.label, point.manifest.depth, problem, unknown)
