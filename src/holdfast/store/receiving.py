"""The transactions by which rows arrive from another store.

Owns the order in which they become part of this one. Knows numbers and bytes, not what they mean: whoever calls has
proven them. Always true: a checkpoint's row is written only after everything that it needs; numbers are given here,
without gaps; every transaction compares the leases of the branches that it writes to; a branch's head moves in the
last one; and a process may die between any two calls and leave a sound store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.codec.values import encode
from holdfast.errors import Damaged
from holdfast.store.bodies import body_of
from holdfast.store.catalog import (
    AgentRow,
    Append,
    BranchRow,
    Buffer,
    CheckpointRow,
    Event,
    LineStart,
    SealRow,
    TagRow,
    ValidityRow,
    checkpoint_id,
    chunk_digest,
    forgotten_key,
    metadata_digest,
    node_digest,
    receive_key,
)
from holdfast.store.packs import Packs
from holdfast.store.ranges import Ranges
from holdfast.store.reading import Reading
from holdfast.store.writing import Writer, packed_nodes

Guard = tuple[int, int]
Place = tuple[bytes, int, int]
"""Where a value is: a node's digest, the offset in it, the length."""


class Arrival(Struct, frozen=True):
    """A checkpoint that is to get a row.

    ``parent`` is its parent's number, 0 where it has none here, or ``-k``: the k-th of the same call, counted from 1.
    ``values`` are a tail, ``places`` where the values are that have no tail. ``over`` is, given in the same way, the
    nearest ancestor that is left, where the parent is gone.
    """

    b: int
    parent: int
    depth: int
    sealed: bool
    manifest: bytes
    operations: bytes
    key: bytes | None
    values: bytes | None
    places: Sequence[Place] = ()
    over: int = 0


class Standing(Struct, frozen=True):
    """What a branch, a tag or a judgement is to be at the end."""

    branch: BranchRow
    head: int
    head_id: bytes


class Receiving:
    """Made by ``Embedded.receiving()``: nothing is collected while it exists."""

    def __init__(self, writer: Writer, reading: Reading, packs: Packs) -> None:
        self.reading = reading
        self._writer = writer
        self._packs = packs

    # -- what is found by its digest --------------------------------------------------------------------------

    def nodes(self, nodes: Iterable[bytes]) -> None:
        """Nodes, in one transaction."""
        packed = packed_nodes(self._writer.cipher, [(node_digest(node), node) for node in nodes])
        self._writer.transaction(lambda: self._writer.insert_nodes(packed))

    def metadata(self, data: bytes) -> None:
        self._writer.transaction(lambda: self._writer.insert_metadata(metadata_digest(data), data))

    def chunks(self, chunks: Iterable[Buffer]) -> None:
        """Chunks that are not here yet, in one pack."""
        named = {chunk_digest(chunk): chunk for chunk in chunks}
        new = [(digest, chunk) for digest, chunk in named.items() if self.reading.chunk_row(digest) is None]
        if not new:
            return
        with self._packs.named(new) as pack:
            self._writer.transaction(lambda: self._writer.insert_chunks(new, pack))

    # -- names ------------------------------------------------------------------------------------------------

    def agent(self, agent: AgentRow, branch: BranchRow, events: Sequence[Event]) -> tuple[AgentRow, BranchRow]:
        """A new agent with its first branch, which stands nowhere yet."""

        def change() -> tuple[AgentRow, BranchRow]:
            if self.reading.agent(agent.key) is not None:
                raise Damaged("an agent of that name came into being meanwhile; nothing was changed")
            made = self._writer.insert_agent(agent)
            first = self._writer.insert_branch(replace(branch, a=made.a))
            for event in events:
                self._writer.insert_event(made.a, replace(event, key=receive_key(made.a) if event.key else None))
            return made, first

        return self._writer.transaction(change)

    def branch(self, branch: BranchRow, line: LineStart | None, events: Sequence[Event]) -> BranchRow:
        """A new branch, which stands nowhere yet. ``line`` is what it inherits of another one's records."""

        def change() -> BranchRow:
            made = self._writer.add_branch(branch, events[0], line)
            for event in events[1:]:
                self._writer.insert_event(branch.a, event)
            return made

        return self._writer.transaction(change)

    # -- records and events -----------------------------------------------------------------------------------

    def records(self, append: Append) -> None:
        """Records at the end of a line. The branch remembers that their writer is not known here."""

        def change() -> None:
            self._writer.append(append, (), None)
            row = self._writer.read_branch(append.b)
            body = body_of(row)
            arrived = Ranges([(append.count + 1, append.count + len(append.records))])
            body["received"] = (Ranges(body.get("received", ())) | arrived).pairs
            self._writer.update_branch(replace(row, body=encode(body)))

        self._writer.transaction(change)

    def events(self, a: int, events: Sequence[Event], guards: Iterable[Guard]) -> None:
        def change() -> None:
            self._check(guards)
            for event in events:
                self._writer.insert_event(a, event)

        self._writer.transaction(change)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def checkpoints(
        self,
        a: int,
        arrivals: Sequence[Arrival],
        cut: Sequence[bytes],
        said: Mapping[str, object],
        guards: Iterable[Guard],
        at: int,
    ) -> list[int]:
        """Rows for checkpoints, in this order; returns their numbers.

        ``cut`` are the ids of parents that are nowhere any more, ``said`` is the body of the event without ``newest``.
        """

        def change() -> list[int]:
            self._check(guards)
            rows: list[CheckpointRow] = []
            for arrival in arrivals:
                rows.append(self._insert(a, arrival, rows))
            self._seal(arrivals, rows)
            heads = {**said, "newest": rows[-1].n}
            if cut:
                tomb = {"n": [], "e": [], "cut": list(cut), "untag": [], "heads": said["heads"], "newest": rows[-1].n}
                tomb["over"] = self._over(a, arrivals, rows)
                self._writer.insert_event(a, Event(at, encode({"what": "forget", **tomb}), forgotten_key(a)))
            self._writer.insert_event(a, Event(at, encode(heads), receive_key(a)))
            return [row.n for row in rows]

        return self._writer.transaction(change)

    def _over(self, a: int, arrivals: Sequence[Arrival], rows: Sequence[CheckpointRow]) -> list[list[int]]:
        """For each checkpoint of the agent whose parent is gone, the nearest ancestor that is left; what is known."""
        agent = self.reading.agent_row(a)
        over = dict(body_of(agent).get("over", ())) if agent is not None else {}
        for _, said in self.reading.forgotten(a):
            over = dict(said.get("over", ()))
        for arrival, row in zip(arrivals, rows, strict=True):
            if arrival.over:
                over[row.n] = rows[-arrival.over - 1].n if arrival.over < 0 else arrival.over
        return [[n, above] for n, above in sorted(over.items())]

    def _insert(self, a: int, arrival: Arrival, rows: Sequence[CheckpointRow]) -> CheckpointRow:
        n = self._writer.next_number("checkpoint")
        parent = None
        if arrival.parent < 0:
            parent = rows[-arrival.parent - 1]
        elif arrival.parent:
            parent = self.reading.checkpoint(arrival.parent)  # its base may have changed since
        base = n if arrival.sealed else parent.base if parent is not None else 0
        row = CheckpointRow(
            n, a, arrival.b, parent.n if parent is not None else 0, arrival.depth, base,
            arrival.manifest, arrival.operations, arrival.key,
        )  # fmt: skip
        self._writer.insert_checkpoint(row, checkpoint_id(row.manifest))
        if arrival.values is not None:
            self._writer.insert_tail(n, arrival.values)
        return row

    def _seal(self, arrivals: Sequence[Arrival], rows: Sequence[CheckpointRow]) -> None:
        """One seal for each branch, at the last row whose values are in nodes: it has the places of all of them."""
        placed: dict[int, list[tuple[int, Sequence[Place]]]] = {}
        for arrival, row in zip(arrivals, rows, strict=True):
            if arrival.places:
                placed.setdefault(arrival.b, []).append((row.n, arrival.places))
        for b, found in placed.items():
            last = found[-1][0]
            used: dict[bytes, int] = {}
            entries = [
                [
                    0 if n == last else n,
                    [[used.setdefault(node, len(used)), offset, length] for node, offset, length in places],
                ]
                for n, places in found
            ]
            self._writer.insert_seal(SealRow(last, b, encode([list(used), entries])))

    # -- the end ----------------------------------------------------------------------------------------------

    def finish(
        self,
        a: int,
        standing: Sequence[Standing],
        tags: Sequence[tuple[TagRow | bytes, Event]],
        validities: Sequence[tuple[ValidityRow | int, Event]],
        said: Callable[[int], Mapping[str, object]],
        guards: Iterable[Guard],
        at: int,
    ) -> None:
        """Let branches, tags and judgements stand where they are to stand, in one transaction.

        Branches that were made for them are whole from then on. A tag that is only a key goes; a checkpoint's number
        instead of a judgement makes it good again. ``said`` gives the body of the event for the newest number of a
        checkpoint.
        """
        held = list(guards)

        def change() -> None:
            self._check(held)
            for b, _ in held:
                row = self._writer.read_branch(b)
                body = dict(body_of(row))
                if body.pop("arriving", False):
                    self._writer.update_branch(replace(row, body=encode(body)))
            for one in standing:
                row = self._writer.read_branch(one.branch.b)
                self._writer.update_branch(replace(row, head=one.head, head_id=one.head_id))
            for tag, event in tags:
                if isinstance(tag, TagRow):
                    self._writer.set_tag(tag, event)
                else:
                    self._writer.drop_tag(a, tag, event)
            for validity, event in validities:
                if isinstance(validity, ValidityRow):
                    self._writer.set_validity(a, validity.n, validity.body, event)
                else:
                    self._writer.set_validity(a, validity, None, event)
            newest = self._writer.next_number("checkpoint") - 1
            self._writer.insert_event(a, Event(at, encode(dict(said(newest))), receive_key(a)))

        self._writer.transaction(change)

    def _check(self, guards: Iterable[Guard]) -> None:
        for guard in guards:
            self._writer.check_guard(guard)
