"""The transactions of cloning and forgetting.

Owns the changes that take rows away or let another agent see them, and the note in table ``store`` that says which
agents' rows are still being cleared. Knows numbers, not histories: what may go is decided by the caller. Always true:
one object at a time exists for a store, in whatever process; first a durable event says what is forgotten, then what
stays is made to stand alone, and only then are rows deleted, so that a process may die between any two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.codec.values import decode, encode
from holdfast.errors import UnknownAgent
from holdfast.store.catalog import (
    AgentRow,
    BranchRow,
    CheckpointRow,
    Event,
    LineRow,
    LineStart,
    SealRow,
    TagRow,
    ValidityRow,
    forgotten_key,
    row_sum,
)
from holdfast.store.ends import line_sum
from holdfast.store.packs import Packs
from holdfast.store.ranges import Ranges
from holdfast.store.reading import CHECKPOINT, Reading, checked
from holdfast.store.writing import Writer, pack_node

ROWS_AT_ONCE = 256
"""Rows that one transaction deletes: other writers wait for milliseconds."""

NODE_BYTES_AT_ONCE = 4 * 2**20
"""Nodes that one transaction writes, when a state is sealed so that it can do without what was before it."""

PAGES_AT_ONCE = 1_024
"""Free pages (4 KiB each) that one transaction gives back."""

_NOTE = "forgetting"

Guard = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Copy:
    """What a clone adds. The rows' own numbers are given when they are written.

    ``lines`` are what its branches inherit of others' records, None where that is nothing.
    """

    agent: AgentRow
    branches: Sequence[BranchRow]
    lines: Sequence[LineStart | None]
    tags: Sequence[TagRow]
    validities: Sequence[ValidityRow]
    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class Source:
    """An agent at the moment of cloning."""

    branches: list[BranchRow]
    tags: list[TagRow]
    validities: list[ValidityRow]
    n: int
    e: int


class Forgetting:
    """Made by ``Embedded.forgetting()``, which holds the lock. ``reading`` sees what is committed, nothing else."""

    def __init__(self, writer: Writer, reading: Reading, packs: Packs) -> None:
        self.reading = reading
        self._writer = writer
        self._packs = packs
        self._run = writer.connection.cursor().execute

    # -- saying it ----------------------------------------------------------------------------------------

    def clone(self, source: AgentRow, make: Callable[[Source], Copy]) -> AgentRow:
        """Add an agent that sees what ``source`` sees. ``make`` is called inside the transaction."""

        def change() -> AgentRow:
            a = source.a
            if self.reading.agent_row(a) != source:
                raise UnknownAgent("the agent was removed; nothing was changed")
            n, e = self._given("checkpoint"), self._given("event")
            read = self.reading
            made = make(Source(read.branches(a), read.tags(a), read.validities(a), n, e))
            agent = self._writer.insert_agent(made.agent)
            for branch, start in zip(made.branches, made.lines, strict=True):
                b = self._writer.insert_branch(replace(branch, a=agent.a)).b
                if start is not None:
                    self._writer.ends.begin(b, start)
            for tag in made.tags:
                self._writer.insert_tag(replace(tag, a=agent.a))
            for validity in made.validities:
                self._writer.insert_validity(replace(validity, a=agent.a))
            for event in made.events:
                self._writer.insert_event(agent.a, event)
            return agent

        return self._writer.transaction(change)

    def forget(
        self,
        agent: AgentRow,
        numbers: Ranges,
        body: Mapping[str, Any],
        nearest: Callable[[BranchRow], tuple[int, bytes]],
        guards: Iterable[Guard],
        at: int,
    ) -> None:
        """Say that an agent forgets checkpoints: branches and tags that stood on them move or go.

        ``nearest`` gives the number and id of where such a branch stands then, 0 and empty when it is nowhere.
        """

        def change() -> None:
            self._check(agent, guards)
            heads = []
            for row in self.reading.branches(agent.a):
                moved = row
                if row.head in numbers:
                    head, head_id = nearest(row)
                    moved = self._writer.update_branch(replace(row, head=head, head_id=head_id))
                heads.append([decode(row.body)["name"], moved.head_id])
            untagged = [tag for tag in self.reading.tags(agent.a) if tag.n in numbers]
            for tag in untagged:
                self._run("DELETE FROM tag WHERE a = ? AND key = ?", (tag.a, tag.key))
            for validity in self.reading.validities(agent.a):
                if validity.n in numbers:
                    self._run("DELETE FROM validity WHERE a = ? AND n = ?", (agent.a, validity.n))
            said = {
                "what": "forget",
                **body,
                "untag": [decode(tag.body)["name"] for tag in untagged],
                "heads": heads,
                "newest": self._given("checkpoint"),
            }
            self._writer.insert_event(agent.a, Event(at, encode(said), forgotten_key(agent.a)))
            self._note(agent.a)

        self._writer.transaction(change)

    def remove(self, agent: AgentRow, body: Mapping[str, Any], guards: Iterable[Guard], at: int) -> None:
        """Say that an agent is gone, with all its names. ``body`` lists what it saw of others, and forgot before."""

        def change() -> None:
            self._check(agent, guards)
            a = agent.a
            own = self._numbers("SELECT b FROM branch WHERE a = ?", a)
            rows = self._numbers("SELECT n FROM checkpoint WHERE b IN (SELECT b FROM branch WHERE a = ?)", a)
            events = self._numbers("SELECT e FROM event WHERE a = ?", a)
            records = self._numbers("SELECT r FROM effect WHERE b IN (SELECT b FROM branch WHERE a = ?)", a)
            said = {
                "what": "remove",
                **body,
                "n": (Ranges(body["n"]) | Ranges.of(rows)).pairs,
                "e": (Ranges(body["e"]) | Ranges.of(events)).pairs,
                "r": Ranges.of(records).pairs,
                "branches": sorted({*body["branches"], *own}),
            }
            for table in ("agent", "branch", "tag", "validity"):
                self._run(f"DELETE FROM {table} WHERE a = ?", (a,))  # noqa: S608  constants only
            self._writer.forget_heads()
            self._writer.insert_event(a, Event(at, encode(said), forgotten_key(a)))
            self._note(a)

        self._writer.transaction(change)

    def _check(self, agent: AgentRow, guards: Iterable[Guard]) -> None:
        for guard in guards:
            self._writer.check_guard(guard)
        if self.reading.agent_row(agent.a) is None:
            raise UnknownAgent("the agent was removed meanwhile; nothing was changed")

    def _numbers(self, sql: str, binding: int | bytes) -> list[int]:
        found: list[tuple[Any, ...]] = self._run(sql, (binding,)).fetchall()
        return [number for (number,) in found]

    def _given(self, table: str) -> int:
        """The highest number that was ever given in a table."""
        return self._writer.next_number(table) - 1

    # -- the note -------------------------------------------------------------------------------------------

    def unfinished(self) -> tuple[list[int], list[bytes]]:
        """Agents whose rows are still to be cleared, and packs whose files are still to go."""
        for name, value, total in self.reading.store_rows():
            if name == _NOTE and row_sum("store", name, value) == total:
                agents, packs = decode(value)
                return list(agents), list(packs)
        return [], []

    def _note(self, a: int) -> None:
        agents, packs = self.unfinished()
        self._write_note(sorted({*agents, a}), packs)

    def _write_note(self, agents: list[int], packs: list[bytes]) -> None:
        value = encode([agents, packs])
        total = row_sum("store", _NOTE, value)
        self._run("INSERT OR REPLACE INTO store VALUES (?, ?, ?)", (_NOTE, value, total))

    def finish(self) -> None:
        """Everything that was noted is done."""
        _, packs = self.unfinished()
        for pack in packs:
            self._packs.remove(pack)
        self._writer.transaction(lambda: self._run("DELETE FROM store WHERE name = ?", (_NOTE,)))

    # -- making what stays stand alone ------------------------------------------------------------------------

    def write_nodes(self, nodes: Mapping[bytes, bytes]) -> None:
        """Nodes of a state that is about to be sealed, a bounded number of bytes at a time."""
        batch: list[tuple[bytes, bytes]] = []
        size = 0
        left = len(nodes)
        for digest, node in nodes.items():
            batch.append((digest, pack_node(node)))
            size += len(node)
            left -= 1
            if size >= NODE_BYTES_AT_ONCE or not left:
                self._writer.transaction(lambda some=tuple(batch): self._writer.insert_nodes(some))  # type: ignore[misc]
                batch, size = [], 0

    def stand_alone(self, n: int, family: Sequence[int], agents: Sequence[int]) -> None:
        """Make a checkpoint the first of its line, sealed: its nodes are written already.

        Those after it that rested on the same base as it did rest on it from now on; ``family`` are the branches on
        which they can be, ``agents`` those whose branches may stand at one of them.
        """

        def change() -> None:
            row = self._row(n)
            changed: dict[int, CheckpointRow] = {n: replace(row, parent=0, base=n)}
            if not row.sealed:
                links = [link for b in family for link in self.reading.links(b, after=n)]
                for number, parent, base in sorted(links):
                    if parent in changed and base == row.base:
                        changed[number] = replace(self._row(number), base=n)
            for new in changed.values():
                columns = (new.n, new.a, new.b, new.parent, new.depth, new.base, new.manifest, new.operations, new.key)
                self._run(
                    "UPDATE checkpoint SET parent = ?, base = ?, sum = ? WHERE n = ?",
                    (new.parent, new.base, row_sum("checkpoint", *columns), new.n),
                )
            # Writers remember the base of the head; a branch row that differs makes them look again.
            for branch in (branch for a in agents for branch in self.reading.branches(a)):
                if branch.head in changed:
                    body = {**decode(branch.body), "base": n}
                    self._writer.update_branch(replace(branch, body=encode(body)))
            self._writer.forget_heads()

        self._writer.transaction(change)

    def _row(self, n: int) -> CheckpointRow:
        return checked("checkpoint", CheckpointRow, self._run(f"{CHECKPOINT} WHERE n = ?", (n,)).fetchall()[0])

    def replace_seal(self, seal: SealRow, places: bytes | None) -> None:
        """Other places, or none: then the seal goes."""

        def change() -> None:
            if places is None:
                self._run("DELETE FROM seal WHERE n = ?", (seal.n,))
            else:
                total = row_sum("seal", seal.n, seal.b, places)
                self._run("UPDATE seal SET places = ?, sum = ? WHERE n = ?", (places, total, seal.n))

        self._writer.transaction(change)

    def cut_line(self, row: LineRow, count: int, end: bytes) -> None:
        """Let the line of a branch that is gone end earlier, or, with ``count`` 0, go as well. Its records stay."""

        def change() -> None:
            if count:
                new = LineRow(row.b, row.origin, min(row.start, count), count, end)
                self._run(
                    "UPDATE line SET start = ?, count = ?, chain = ?, sum = ? WHERE b = ?",
                    (new.start, new.count, new.chain, line_sum(new), new.b),
                )
            else:
                self._run("DELETE FROM line WHERE b = ?", (row.b,))
            self._writer.forget_heads()

        self._writer.transaction(change)

    # -- deleting -------------------------------------------------------------------------------------------

    def sweep(self, choose: Callable[[], tuple[Sequence[bytes], Sequence[bytes]]]) -> int:
        """Delete the nodes and chunks that ``choose`` names, which is called inside the transaction."""

        def change() -> int:
            nodes, chunks = choose()
            for digest in nodes:
                self._run("DELETE FROM node WHERE digest = ?", (digest,))
            packs: set[int] = set()
            for digest in chunks:
                packs.update(self._numbers("SELECT p FROM chunk WHERE digest = ?", digest))
                self._run("DELETE FROM chunk WHERE digest = ?", (digest,))
            agents, gone = self.unfinished()
            for p in packs:
                if not self._numbers("SELECT 1 FROM chunk WHERE p = ? LIMIT 1", p):
                    row = self.reading.pack_row(p)
                    if row is not None:
                        gone.append(row.uuid)
                    self._run("DELETE FROM pack WHERE p = ?", (p,))
            if packs:
                self._write_note(agents, gone)
            return len(nodes) + len(chunks)

        return self._writer.transaction(change)

    def delete(self, numbers: Sequence[int], events: Sequence[int], effects: Sequence[int]) -> None:
        """Delete checkpoints with their tails, events, and records, a bounded number at a time."""
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            some = [(n,) for n in numbers[start : start + ROWS_AT_ONCE]]
            self._writer.transaction(
                lambda some=some: self._delete(
                    some, "DELETE FROM tail WHERE n = ?", "DELETE FROM checkpoint WHERE n = ?"
                )  # type: ignore[misc]
            )
        for start in range(0, len(events), ROWS_AT_ONCE):
            some = [(e,) for e in events[start : start + ROWS_AT_ONCE]]
            self._writer.transaction(lambda some=some: self._delete(some, "DELETE FROM event WHERE e = ?"))  # type: ignore[misc]
        for start in range(0, len(effects), ROWS_AT_ONCE):
            some = [(r,) for r in effects[start : start + ROWS_AT_ONCE]]
            self._writer.transaction(lambda some=some: self._delete(some, "DELETE FROM effect WHERE r = ?"))  # type: ignore[misc]

    def _delete(self, keys: list[tuple[int]], *statements: str) -> None:
        for statement in statements:
            for key in keys:
                self._run(statement, key)

    def give_back(self) -> None:
        """Return free pages to the file system, a bounded number at a time."""
        free = -1
        while (now := self.reading.free_pages()) and now != free:
            free = now
            self._writer.transaction(lambda: self._run(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall())
