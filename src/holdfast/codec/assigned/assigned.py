"""The document itself: sections that are given whole, its operations since the last capture, and its digests.

Owns the lock and the order in which the parts are asked. It knows nothing of where nodes are kept: a ``Source`` gives
them. What always holds: a section that was given has the digest, the nodes and the form that a ``Document`` with the
same value would have, and the recorded operations lead from the last capture to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from holdfast.codec import operations as op
from holdfast.codec.assigned.copies import Copies
from holdfast.codec.assigned.differences import Hunk, hunks, rekeyed
from holdfast.codec.assigned.following import Draft
from holdfast.codec.assigned.held import Held
from holdfast.codec.assigned.reading import Reader
from holdfast.codec.assigned.taking import Content, Taking
from holdfast.codec.blocks import DICT, INLINE_MAX_BYTES, LIST, SET, VALUE
from holdfast.codec.codes import SCALARS
from holdfast.codec.document.sections import Capture, Source
from holdfast.codec.operations import Operation
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import Damaged, Unencodable

# More places than this that changed are not worth an operation each.
_OPERATIONS_PER_SECTION = 4096


class Assigned:
    """Sections as encodings. Each is read when it is first needed."""

    def __init__(self, registry: Registry, source: Source | None = None) -> None:
        self.lock = threading.RLock()
        self.registry = registry
        self._source = source
        self._reader = Reader(registry, source)
        self._taking = Taking(registry)
        self._sections: dict[str, Held] = {}
        self._away: dict[str, Held] = {}  # sections that are gone and expected back
        self._operations: list[Operation] = []
        self._nodes: dict[bytes, bytes] = {}
        self._chunks: dict[bytes, bytes] = {}
        for name, digest in source.sections if source is not None else ():
            held = self._sections[name] = Held(digest=digest)
            held.stored = source is not None and source.base.get(name) == digest

    def names(self) -> list[str]:
        """The sections, in order."""
        with self.lock:
            return list(self._sections)

    def __contains__(self, name: object) -> bool:
        return name in self._sections

    # -- giving and reading -----------------------------------------------------------------------------

    def assign(self, values: Mapping[str, Any], gone: Iterable[str] = (), returning: Collection[str] = ()) -> None:
        """Let sections have these values, and others be gone, all or none. Only what differs is recorded.

        ``returning`` are names that come and go. What was encoded of such a section is kept until it is back.
        """
        with self.lock:
            leaving = set(gone)
            plan: list[tuple[str, Held | None, Content | None]] = []
            for name, value in values.items():
                if type(name) is not str:
                    raise Unencodable(
                        f"a section's name is a {type(name).__name__}", hint="Top-level keys of a state are str."
                    )
                held = self._loaded(name) if name in self._sections and name not in leaving else None
                try:
                    content = self._taking.take(value, held or self._away.get(name))
                except Unencodable as error:
                    raise error.within(name) from None
                if content is not None or held is None:
                    plan.append((name, held, content))
            for name in [name for name in self._sections if name in leaving]:
                left = self._sections.pop(name)
                self._record(op.DELETE, [name])
                if name in returning and left.kind and not left.big:
                    self._away[name] = left
            for name, held, content in plan:
                away = self._away.pop(name, None)
                if content is None or (held is None and away is not None and away.kind == content.kind):
                    self._bring_back(name, away, content)
                elif held is None or held.kind != content.kind:
                    self._put(name, content)
                else:
                    self._change(name, held, content)
            if len(self._operations) > op.OPERATIONS_MAX:
                self._fold()

    def value(self, name: str) -> Any:
        """What a section holds, decoded anew at each call. Raises KeyError."""
        with self.lock:
            held = self._loaded(name)
            return self._reader.value(held)

    def still(self, copies: Copies | None = None) -> Still:
        """The state as it is now, to be read later, whatever becomes of the document.

        ``copies`` serves several such states of one document, so that what they have in common is decoded once.
        """
        with self.lock:
            for held in self._sections.values():
                held.shared = True
            return Still(self, self._sections.copy(), copies)

    def _loaded(self, name: str) -> Held:
        held = self._sections[name]
        if not held.kind:
            self._load(name, held)
        return held

    def _load(self, name: str, held: Held) -> None:
        """Read a section, and prove that it has the digest which is recorded for it."""
        with self.lock:
            source, expected = self._source, held.digest
            if held.kind:
                return
            if source is None or expected is None:
                raise Damaged(f"section {name!r} is nowhere to be read from", what=(f"section {name}",))
            base = source.base.get(name)
            try:
                draft = Draft(name, lambda: self._reader.section(base) if base is not None else None, self._reader)
                for operation in source.operations(name) if base != expected else ():
                    draft.do(operation)
                draft.finish()
                made = draft.settle()
                self._nodes.update(draft.fresh)
            except Damaged as error:
                error.what = tuple(dict.fromkeys((*error.what, f"section {name}")))
                raise
            if made is None or made.root() != expected:
                raise Damaged(
                    f"section {name!r} does not have the digest that its checkpoint recorded",
                    what=(f"section {name}",),
                    hint="Run `holdfast verify` to see what is damaged.",
                )
            held.items, held.keys, held.names = made.items, made.keys, made.names
            held.tree, held.big, held.stored = made.tree, made.big, made.stored
            held.kind = made.kind

    # -- recording ----------------------------------------------------------------------------------------

    def _record(self, code: int, path: list[Any], *args: Any) -> None:
        self._operations.append(Operation(time.time_ns() // 1000, code, path, args))

    def _put(self, name: str, content: Content) -> None:
        """A section that is new, or of another kind than before."""
        held = self._sections[name] = Held(content.kind, content.items, content.keys)
        self._keep(held, content, content.items)
        self._record_whole(name, held, content)

    def _record_whole(self, name: str, held: Held, content: Content | None = None) -> None:
        data = content.whole if content is not None else None
        if data is None and held.kind == SET:
            data = encode(self._reader.value(held), self.registry, depth=1)
        if data is None or len(data) > INLINE_MAX_BYTES:
            data, nodes = held.whole()
            self._nodes.update(nodes)
        self._record(op.SET, [name], data)

    def _keep(self, held: Held, content: Content, written: Iterable[bytes]) -> None:
        """Let the section know its evidence, and the next commit what the written items name by digest."""
        held.evidence, held.names = content.evidence, content.names
        if not content.big and not held.big:
            return
        near = held.near()
        for item in written:
            parts = content.big.get(item)
            if parts is not None:
                self._nodes.update((digest, raw) for digest, raw in parts.nodes.items() if digest not in near.nodes)
                self._chunks.update((digest, raw) for digest, raw in parts.chunks.items() if digest not in near.chunks)
        there = set(content.items)
        held.big = {item: parts for item, parts in {**content.big, **held.big}.items() if item in there or not item}

    def _bring_back(self, name: str, away: Held | None, content: Content | None) -> None:
        """A section that was gone: what it had then is neither encoded nor cut anew, but written like a new one.

        Its nodes may have been removed from the catalog meanwhile, because no state needed them.
        """
        if away is None:
            raise KeyError(name)
        held = self._sections[name] = away.parted()
        held.unstore()
        if content is not None:
            found = _differences(held, content)
            held.edit(found, content.items, content.keys)
            self._keep(held, content, [item for hunk in found for item in content.items[hunk.at : hunk.to]])
        self._record_whole(name, held, content)

    def _change(self, name: str, held: Held, content: Content) -> None:
        """A section of the same kind as before: record what differs."""
        items, keys = content.items, content.keys
        found = _differences(held, content)
        if not found:
            held.evidence, held.names = content.evidence, content.names
            return
        held = self._sections[name] = held.parted()
        gone = [self._reader.names(held)[index] for index in _leaving(found)] if held.kind == DICT else []
        removed = [item for hunk in found for item in held.items[hunk.start : hunk.stop]]
        written = [item for hunk in found for item in items[hunk.at : hunk.to]]
        kept = len(held.items) - len(removed)
        held.edit(found, items, keys)
        self._keep(held, content, written)
        if not kept or len(found) > _OPERATIONS_PER_SECTION or held.kind == VALUE:
            self._record_whole(name, held, content)
        elif held.kind == LIST:
            self._record_list(name, found, items)
        elif held.kind == DICT:
            self._record_dict(name, held, found, items, gone)
        else:
            before, after = set(removed), set(written)
            for code, data in ((op.REMOVE, sorted(before - after)), (op.ADD, sorted(after - before))):
                if data:
                    self._record(code, [name], data)

    def _record_list(self, name: str, found: list[Hunk], items: list[bytes]) -> None:
        for start, stop, at, to in reversed(found):
            if stop - start == to - at == 1:
                self._record(op.SET, [name, start], items[at])
            else:
                self._record(op.SPLICE, [name], start, stop - start, items[at:to])

    def _record_dict(self, name: str, held: Held, found: list[Hunk], items: list[bytes], gone: list[Any]) -> None:
        names = held.names or []
        places = [index for hunk in found for index in range(hunk.at, hunk.to)]
        if not all(map(_in_paths, [*gone, *(names[index] for index in places)])) or (
            held.tree is None  # one that has is too large for this
            and len(places) > 1
            and 2 * sum(len(items[index]) for index in places) > held.payload_bytes() < INLINE_MAX_BYTES
        ):
            self._record_whole(name, held)
            return
        for key in gone:
            self._record(op.DELETE, [name, key])
        for index in places:
            self._record(op.SET, [name, names[index]], items[index])

    def _fold(self) -> None:
        """Too many operations: keep what they amount to."""
        touched = dict.fromkeys(operation.path[0] for operation in self._operations)
        self._operations = []
        for name in touched:
            if name in self._sections:
                self._record_whole(name, self._sections[name])
            else:
                self._record(op.DELETE, [name])

    # -- capturing ----------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether a checkpoint would have something to write."""
        with self.lock:
            return bool(self._operations)

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests, in order."""
        with self.lock:
            return [(name, held.digest or held.root()) for name, held in self._sections.items()]

    def capture(self) -> Capture:
        """Everything since the last capture, and the digests of the state as it is now."""
        captured = None
        try:
            with self.lock:
                captured = Capture(self.digests(), self._operations, self._nodes, self._chunks)
                self._operations, self._nodes, self._chunks = [], {}, {}  # no call: an interrupt cannot part them
            return captured
        except BaseException:
            if captured is not None:
                self.restore(captured)
            raise

    def restore(self, captured: Capture) -> None:
        """A capture could not be written: everything in it is still to be written."""
        with self.lock:
            self._operations = captured.operations + self._operations
            self._nodes = {**captured.nodes, **self._nodes}
            self._chunks = {**captured.chunks, **self._chunks}

    def written(self, captured: Capture) -> None:
        """A capture is in the catalog: what it named by digest is read from there from now on. Saves memory."""
        with self.lock:
            for held in self._sections.values():
                for parts in held.big.values():
                    parts.nodes.update((digest, b"") for digest in captured.nodes if digest in parts.nodes)
                    parts.chunks.update((digest, b"") for digest in captured.chunks if digest in parts.chunks)

    def stands(self, captured: Capture, nodes: dict[bytes, bytes]) -> bool:  # noqa: ARG002 - nobody writes into it
        """Whether nodes that were found after a capture are those of its state."""
        return True

    def unstored_bytes(self) -> int:
        """About how much ``unstored`` would have to write."""
        with self.lock:
            return sum(held.unstored_bytes() for held in self._sections.values())

    def unstored(self) -> tuple[dict[bytes, bytes], dict[bytes, tuple[bytes, int]]]:
        """All nodes of the state that the catalog does not have; they count as stored from now on.

        With them, where each item sits: its encoding -> node and offset, for values that can move there.
        """
        found: dict[bytes, bytes] = {}
        places: dict[bytes, tuple[bytes, int]] = {}
        try:
            with self.lock:
                for name, held in self._sections.items():
                    if held.stored:
                        continue
                    self._loaded(name)
                    for digest, node, items in held.unstored_nodes():
                        found[digest] = node
                        offset = 2
                        for item in items:
                            places[item] = digest, offset
                            offset += len(item)
            return found, places
        except BaseException:
            self._nodes.update(found)  # they count as stored, so they go with the next capture
            raise

    # -- other states -------------------------------------------------------------------------------------

    def follow(self, operations: Iterable[Operation]) -> None:
        """Do the operations of another checkpoint, all or none. They are not recorded; ``digests`` can prove them."""
        with self.lock:
            order = dict.fromkeys(self._sections)
            drafts: dict[str, Draft] = {}
            for operation in operations:
                name = operation.path[0]
                if len(operation.path) == 1 and operation.code == op.DELETE:
                    order.pop(name, None)
                elif len(operation.path) == 1 and operation.code == op.SET:
                    order.setdefault(name)
                draft = drafts.get(name)
                if draft is None:
                    draft = drafts[name] = Draft(name, self._loader(name), self._reader)
                draft.do(operation)
            for draft in drafts.values():
                draft.finish()
            settled = {name: draft.settle() for name, draft in drafts.items()}
            for draft in drafts.values():
                self._nodes.update(draft.fresh)
            sections = self._sections
            self._sections = {}
            for name in order:
                held = settled[name] if name in settled else sections[name]
                if held is not None:
                    self._sections[name] = held

    def _loader(self, name: str) -> Any:
        return lambda: self._loaded(name) if name in self._sections else None


class Still:
    """The sections of one state. Each is read and decoded when it is asked for."""

    def __init__(self, document: Assigned, sections: dict[str, Held], copies: Copies | None) -> None:
        self.names = list(sections)
        self._copies = copies
        self._document = document
        self._sections = sections

    def value(self, name: str) -> Any:
        """What a section holds, decoded anew at each call. Raises KeyError."""
        held = self._sections[name]
        if not held.kind:
            self._document._load(name, held)
        return self._document._reader.value(held, self._copies)

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests, in order."""
        with self._document.lock:
            return [(name, held.digest or held.root()) for name, held in self._sections.items()]


def _differences(held: Held, content: Content) -> list[Hunk]:
    """What a section gets that it does not have, of the same kind."""
    if held.kind == DICT:
        return rekeyed(held.keys or [], held.items, content.keys or [], content.items)
    if held.kind == VALUE:
        return [Hunk(0, 1, 0, 1)] if held.items != content.items else []
    return hunks(held.items, content.items)


def _leaving(found: list[Hunk]) -> list[int]:
    """Which of a dict's old items go."""
    return [index for hunk in found if hunk.at == hunk.to for index in range(hunk.start, hunk.stop)]


def _in_paths(key: Any) -> bool:
    """Whether a key can stand in the path of an operation without knowing any class."""
    return type(key) in SCALARS or (type(key) is tuple and all(type(part) in SCALARS for part in key))
