"""An agent in memory: its state can be changed, its line can be written, and neither reaches the store.

Owns what a replay stands on instead of a store's handles. Must not know what is executed on it. What always holds: the
store is only read, nobody's lease is asked for, and what is done where a program watches or guards its state is
nothing but to say so.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from holdfast.agent import history as stored
from holdfast.agent.checkpoint import Checkpoint
from holdfast.errors import Blocked, InvariantViolated
from holdfast.process.claims import claim_of
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed
from holdfast.run.host import AgentHost
from holdfast.run.line import Line
from holdfast.run.listing import View
from holdfast.run.resilience import Clock
from holdfast.run.steps import Steps
from holdfast.store.rows import Point
from holdfast.travel.handle import Agent, Store

if TYPE_CHECKING:
    from holdfast.codec.state import State
    from holdfast.travel.sandbox import Sandbox
    from holdfast.travel.watch import Watchpoint


class Memory(Line):
    """A line to which nothing is written: what would be is kept, and read back, in memory."""

    def __init__(self, store: Store, b: int) -> None:
        super().__init__(store._db, b)
        self._blocks: dict[bytes, bytes] = {}
        self._count = super().count
        self.added: list[rec.Record] = []

    @property
    def count(self) -> int:
        return self._count + len(self.added)

    def append(self, *records: rec.Record, stowed: Stowed | None = None, **_: Any) -> int:
        if stowed is not None:
            self._blocks |= stowed.nodes | stowed.chunks
        self.added += records
        return self.count

    def gather(self, outcome: rec.Record, stowed: Stowed | None = None) -> None:
        self.append(outcome, stowed=stowed)

    def append_both(self, intent: rec.Record, outcome: Callable[[int], rec.Record]) -> int:
        return self.append(intent, outcome(self.count + 1))

    def share(self, *, later: bool) -> Any:  # noqa: ARG002 - as in Line
        raise Blocked("a transaction cannot be made in a replay", hint="Give its result instead.")

    def flush(self) -> None:
        """Nothing is on its way."""

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        here = {digest: self._blocks[digest] for digest in digests if digest in self._blocks}
        return here | super().nodes([digest for digest in digests if digest not in here])

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join(self._blocks.get(digest) or super(Memory, self).bulk([digest]) for digest in digests)


class Quick(Clock):
    """A clock that does not wait: what the record does not answer is slept through at once."""

    def sleep(self, seconds: float) -> None: ...

    async def asleep(self, seconds: float) -> None:  # noqa: ARG002 - as above
        await asyncio.sleep(0)


class MemoryHost(AgentHost):
    """The host of an agent in memory."""

    def __init__(self, agent: MemoryAgent) -> None:
        super().__init__(agent)
        self.ledger = Memory(cast("Store", agent._store), agent._branch.b)
        self.clock = Quick()

    def due(self, event: str) -> None:  # noqa: ARG002 - nothing is saved by itself
        return None

    def saved(self, id: bytes) -> Checkpoint:
        self.base = self._row(id)
        return self.handle._seen(self.base)

    def beside(self, label: str, reason: str, trigger: str) -> bytes:  # noqa: ARG002 - nothing is saved
        return b""


class MemoryAgent(Agent):
    """An agent whose state is a copy in memory: it can be changed, and is never saved."""

    _in_memory = True

    def __init__(self, view: View, start: Point) -> None:
        self._start = start
        self._last_sections: dict[str, Any] | None = None  # the sections at the newest checkpoint that was passed
        self._copy: Path | None = None  # files of this moment
        self._place: Path | None = None  # where the program finds them
        super().__init__(view._store, view._agent, view._branch, None)

    @cached_property
    def _host(self) -> AgentHost:
        return MemoryHost(self)

    def _load_head(self) -> None:
        self._made = self._seen(self._start)
        source = stored.source_of(self._db.now, self._start)
        self._document = stored.Live(self._store._registry, source, inert=False, explain=self._explain)
        self._document.guard = self._check_change

    @property
    def workspace(self) -> Path | None:
        """Where the copy of the files of its moment is."""
        return self._place

    @property
    def apart(self) -> bool:
        """Whether that is another place than the one where the program had them."""
        return self._place is self._copy

    def bring_files(self, sandbox: Sandbox, needed: Iterable[str]) -> None:
        """Copy the files with which the run began. They are where they were, as far as this process can see.

        Not where something is needed that lies there, such as the program, nor where no namespace can be had.
        """
        start, claim = self._seen(self._start), claim_of(self)
        if claim is None and not start.has_files:
            return
        self._copy = self._place = Path(sandbox.directory, "workspace")
        self._copy.mkdir()
        self.put_files(self._start)
        path = os.path.realpath(claim.path) if claim is not None and claim.here else ""
        inside = any(f"{os.path.realpath(one)}/".startswith(f"{path}/") for one in (*needed, sandbox.directory) if one)
        if path and Path(path).is_dir() and not inside and sandbox.cover(path, str(self._copy)):
            self._place = Path(path)

    def put_files(self, point: Point) -> None:
        """The copy has the files of this checkpoint: also what tools wrote, which are not called again."""
        if self._copy is None:
            return
        fresh = self._copy.with_name("fresh")
        self.export_workspace(self._seen(point), fresh)
        for one in self._copy.iterdir():
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one)
            else:
                one.unlink()
        for one in fresh.iterdir():
            one.rename(self._copy / one.name)
        fresh.rmdir()

    def _check_writer(self) -> Any:
        self._check_open()  # whoever asks wants to know whether it may change something: in memory it may

    def passed(self) -> None:
        """The program has come by a checkpoint, of the record or not."""
        self._document.digests()
        self._last_sections = dict(self._document.told.sections)

    def _saved_state(self) -> State:
        told = self._document.told
        return told.with_sections(self._last_sections if self._last_sections is not None else told.stored)

    def _going_back(self, error: InvariantViolated) -> Steps:
        yield from ()
        raise error  # nothing is moved

    def watch(self, path: str, when: str | None = None, **_: Any) -> Watchpoint:
        """As ever, but that nothing is done where it is met."""
        return super().watch(path, when)

    def tag(self, name: str, at: str | Checkpoint | None = None) -> None:
        """Nothing: names are no part of a run's way."""

    def untag(self, name: str) -> None:
        """As tag()."""

    def branch(self, name: str, at: Any = None, **_: Any) -> Agent:  # noqa: ARG002 - as in Agent
        """It is not made, and what the program would do on it cannot be seen."""
        self._away(f"begin the branch {name!r}")

    def rollback(self, revision: str | Checkpoint, **_: Any) -> Checkpoint:
        """Ends the execution, as it did then."""
        self._away(f"go back to {getattr(revision, 'label', '') or revision}", ends=True)

    async def arollback(self, revision: str | Checkpoint, **_: Any) -> Checkpoint:
        """As rollback()."""
        return self.rollback(revision)

    def _away(self, what: str, *, ends: bool = False) -> NoReturn:
        """The program does what cannot be done here: the execution ends."""
        if (lane := self._lane()) is not None:
            lane.scope.away(lane.path, what, ends=ends)
        raise Blocked(f"it would {what}, which no replay does")

    def _find(self, revision: str | Checkpoint | None) -> Point:
        return super()._find(revision) if revision is not None else self._host.base or self._start
