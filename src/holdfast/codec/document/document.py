"""The document itself: a mapping of sections, its operations since the last capture, and its digests.

Owns the lock, permission to change, and the order in which the parts are asked. It knows nothing of where nodes are
kept: a ``Source`` gives them. What always holds: the recorded operations lead from the last capture to a content with
the digests that are given. That is the live content, but for changes of C code that nobody was told of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

from holdfast.codec import operations as op
from holdfast.codec.document.following import follow
from holdfast.codec.document.handouts import Handouts
from holdfast.codec.document.intake import Intake
from holdfast.codec.document.loading import Loading, redo
from holdfast.codec.document.mapping import SectionMapping
from holdfast.codec.document.packing import Moving, Packing, trackable, whole
from holdfast.codec.document.sections import MISSING, Capture, Encoded, OneSection, Section, Source
from holdfast.codec.document.watches import Watches
from holdfast.codec.nodes import FLAT, Node, Path, TrackedDict, TrackedSet
from holdfast.codec.nodes.base import put_back
from holdfast.codec.operations import Operation, known_key
from holdfast.codec.shapes import Adapted
from holdfast.codec.trails import Step, Trail
from holdfast.codec.trees import Leaf
from holdfast.codec.types import Registry
from holdfast.codec.values import decode
from holdfast.errors import Damaged, HoldfastError, ReadOnly, StoreBusy, Unencodable, Untracked

T = TypeVar("T")


class Document(SectionMapping):
    """A mapping of sections. Each loads when it is first touched."""

    def __init__(
        self,
        registry: Registry,
        source: Source | None = None,
        *,
        readonly: bool = False,
        inert: bool = False,
        paranoid: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        self.registry = registry
        self.readonly = readonly
        self.inert = inert
        self.paranoid = paranoid
        self.guard: Callable[[], None] | None = None  # called before every change; raises when the handle is not usable
        self.met: list[Any] = []
        self.busy: Any = None
        self.changing: Any = None
        self.trails: list[tuple[Trail, Any, bytes | None]] = []
        self._shut = False  # whether nobody may change the state now; other threads wait for the lock anyway
        # Sections whose operations may not lead to what they hold: C code changed something without telling, or an
        # exception from outside came in the middle of a change.
        self._doubtful: set[str] = set()
        self._whole: set[str] = set()  # sections that are being put in or taken out
        self._dirty = False
        self._source = source
        self.replaying = False
        self._sections: dict[str, Section] = {}
        self._operations: list[Operation] = []
        # Sections whose types have changed since they were stored: what they are now, to be recorded whole before the
        # first change, because operations must not be replayed on the old form.
        self._adapted: dict[str, bytes] = {}
        self._packing = Packing(registry, self, inert=inert)
        self._loading = Loading(self, self._packing, source, inert=inert)
        self._handouts = Handouts(self._packing, self._is_here, self.record, lambda: self.readonly)
        self._watches = Watches(self._packing, self._is_attached, self._look)
        self._intake = Intake(self, self._packing, self._handouts, self._watches, self._loading.decode)
        # What nodes ask for all the time, without a detour.
        self.unsaved = self._packing.unsaved
        self.pack, self.pack_all = self._packing.pack, self._packing.pack_all
        self.pack_key = self._packing.pack_key
        self.begin, self.take, self.commit = self._intake.begin, self._intake.take, self._intake.commit
        self.take_key, self.take_item = self._intake.take_key, self._intake.take_item
        self.settle, self.child = self._intake.settle, self._intake.child
        for name, digest in source.sections if source is not None else ():
            section = self._sections[name] = Section(name, digest)
            section.stored = source is not None and source.base.get(name) == digest

    # -- the mapping ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        section = self._sections.get(name)
        if section is None:
            raise KeyError(name)
        if not section.loaded:
            self._load(section)
        value = section.value
        if type(value) not in FLAT and not isinstance(value, Node) and not self.readonly:
            with self.lock:
                self._handouts.hand_out(value, section)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several sections, all or none."""
        incoming = dict(*args, **kwargs)
        with self.lock:
            self._set(incoming)

    def _set(self, incoming: dict[str, Any], gone: Sequence[str] = ()) -> None:
        """The one way in which sections change; the caller holds the lock."""
        self.check_writable()
        for name in incoming:
            if type(name) is not str:
                raise Unencodable(
                    f"a section's name is a {type(name).__name__}", hint="Top-level keys of a state are str."
                )
        # What is put back where it is, as after `state["x"] += [1]`, stays, also if it is given to another one as well.
        known = self._sections
        stay = {name for name in incoming if name in known and put_back(incoming[name], known[name].value)}
        stay.difference_update(gone)
        leaving = [known[name].value for name in (*incoming, *gone) if name in known and name not in stay]
        self._intake.begin()
        plan = []
        for name, value in incoming.items():
            if name in stay:
                continue
            section = self._sections.get(name) if name not in gone else None
            section = section or Section(name)
            plan.append((section, *self._intake.take(value, section, name, [], leaving)))
        for name in (*gone, *(section.name for section, _, _ in plan)):
            self._prove(name)
        self._under_way(*gone, *(section.name for section, _, _ in plan))
        self._intake.commit()
        for name in gone:
            self._remove(name)
        for section, _, _ in plan:
            if isinstance(section.value, Node) and section.value._parent is section:
                section.value._parent = None
        for section, taken, data in plan:
            self._sections[section.name] = section
            self._put(section, taken)
            self.record(op.SET, [section.name], data)
            section.trail = Trail(data, 1)
        self._whole.clear()

    def _prove(self, name: str) -> None:
        """A section goes: what was recorded inside it must fit, because it stays in the history."""
        section = self._sections.get(name)
        if section is None or not section.dirty or self.replaying or not isinstance(section.value, Node):
            return
        trail = section.trail
        if trail is None:
            self._settled(lambda: self._update(section))
        elif trail.steps:
            self._settled(lambda: self.resolved(trail, section.value, section.value))
        if name in self._doubtful:
            self._mend()

    def _under_way(self, *names: str) -> None:
        """Sections come and go: until ``_whole`` is emptied again, these may be half-way."""
        if self.changing is not None:
            self.distrust(self.changing)
            self.changing = None
        self._doubtful |= self._whole
        self._whole.update(names)

    def _put(self, section: Section, taken: Any) -> None:
        section.loaded = True
        section.value = self._intake.settle(taken, section, None, None)
        section.changed()

    def _remove(self, name: str) -> None:
        section = self._sections.pop(name)
        if isinstance(section.value, Node) and section.value._parent is section:
            section.value._parent = None
        self._dirty = True
        self.record(op.DELETE, [name])

    def __delitem__(self, name: str) -> None:
        with self.lock:
            self.check_writable()
            if name not in self._sections:
                raise KeyError(name)
            self._prove(name)
            self._under_way(name)
            self._remove(name)
            self._whole.clear()

    def replace(self, value: Any) -> None:
        """Make these the sections, all or none of the change."""
        incoming = dict(value)
        with self.lock:
            # Sections that do not stand where the new order wants them go and come back at the end, as in a dict.
            staying = 0
            for have, want in zip([name for name in self._sections if name in incoming], incoming, strict=False):
                if have != want:
                    break
                staying += 1
            kept = set(list(incoming)[:staying])
            self._set(incoming, [name for name in self._sections if name not in kept])

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._sections))

    def __len__(self) -> int:
        return len(self._sections)

    def __contains__(self, name: object) -> bool:
        return name in self._sections

    # -- permission and records -----------------------------------------------------------------------

    def check_writable(self) -> None:
        """Called before every change; loading is none."""
        if self.replaying:
            return
        if self._shut:
            raise StoreBusy(
                "the state is being saved, and was changed in the middle of that, as by a signal handler",
                hint="Let the handler set a flag, and change the state between two steps.",
            )
        if self.readonly:
            raise ReadOnly(
                "this state is read-only",
                hint="A past state cannot change. Use agent.rollback(...) or agent.branch(...) to go on from it.",
            )
        if self.guard is not None:
            self.guard()

    def record(self, code: int, path: Path, *args: Any) -> None:
        """Write down a change that has been made."""
        if not self.replaying:
            if self._adapted and path[0] in self._adapted:
                data = self._adapted.pop(path[0])
                if len(path) > 1 or code not in {op.SET, op.DELETE}:
                    self._operations.append(Operation(time.time_ns() // 1000, op.SET, path[:1], (data,)))
            operation = Operation(time.time_ns() // 1000, code, path, args)
            self._operations.append(operation)
            if self.changing is not None:
                for trail, inner, before in self.trails:
                    trail.steps.append(Step(operation, inner, before))
            if len(self._operations) > op.OPERATIONS_MAX:
                self._fold()

    def distrust(self, node: Any) -> None:
        """What a container holds may not be what its operations lead to."""
        while isinstance(node, Node):
            if node._tree is not None:
                node._tree.root = None
            node = node._parent
        if node is not None and not self.replaying:
            node.changed()
            self._doubtful.add(node.name)

    def unproven(self, node: Any) -> None:
        """The items of a leaf are not those of its digest."""
        if not self._packing.lenient:
            self.distrust(node)

    def steady(self, node: Any, leaf: Leaf) -> list[bytes]:
        """The encodings of a leaf's items before a change."""
        try:
            return node._run(leaf)  # type: ignore[no-any-return]
        except Moving:
            # A handed-out value was changed, and what it was is not known as bytes. The next look at it records what
            # it is; until then the leaf cannot be proved.
            self._packing.lenient = True
            try:
                return node._run(leaf)  # type: ignore[no-any-return]
            finally:
                self._packing.lenient = False

    def resolved(self, trail: Trail, node: Any, child: Any) -> bytes:
        """How an item is encoded in which there were changes."""
        data = self.pack(child)
        if trail.encoding(self.pack, self.pack_key) != data:
            self.distrust(node)
        return data

    def _fold(self) -> None:
        """Too many operations: keep what they amount to."""
        touched = dict.fromkeys(operation.path[0] for operation in self._operations)
        self._operations = []
        for name in touched:
            section = self._sections.get(name)
            if section is None:
                self.record(op.DELETE, [name])
            else:
                self.record(op.SET, [name], self._portable(section))

    # -- sections -------------------------------------------------------------------------------------

    def _load(self, section: Section) -> None:
        with self.lock:
            if section.loaded:
                return
            # Only a document with a source has sections that are not loaded.
            source, expected = cast("Source", self._source), section.digest
            base = source.base.get(section.name)
            dirty = self._dirty
            adapted = Adapted.count
            self.replaying = True
            try:
                if base is not None:
                    section.value = self._intake.settle(self._loading.read_node(base), section, None, None)
                if base != expected:
                    for operation in source.operations(section.name):
                        self._replay(section, operation)
                if Adapted.count != adapted:
                    self._adapt(section, source)
                elif base != expected:
                    section.digest = None
                    if section.value is MISSING or not self._has_digest(section, expected):
                        raise Damaged(
                            f"section {section.name!r} does not have the digest that its checkpoint recorded",
                            what=(f"section {section.name}",),
                            hint="Run `holdfast verify` to see what is damaged.",
                        )
                section.digest, section.loaded = expected, True
            except BaseException:
                section.digest, section.value, section.loaded = expected, MISSING, False
                raise
            finally:
                section.dirty = False
                self.replaying = False
                self._dirty = dirty

    def _adapt(self, section: Section, source: Source) -> None:
        """The section's types are not what they were: prove the digest on the stored form, then take in the new one."""
        content = self._proof(section, source).raw_section(section.name)
        data = self._packing.live(content)
        section.value = MISSING
        section.value = self._intake.settle(self._intake.take_encoded(data)[0], section, None, None)
        if not self.readonly:
            self._adapted[section.name] = self._portable(section)

    def _proof(self, section: Section, source: Source) -> Document:
        """A section as it is stored: every instance an inert record, which encodes to the very same bytes."""
        return Document(Registry(), OneSection(source, section.name), readonly=True, inert=True)

    def rebase(self, sections: list[tuple[str, bytes]]) -> None:
        """After a rollback: the state counts as that of a checkpoint with these digests, whatever its types are now."""
        with self.lock:
            for name, digest in sections:
                section = self._sections[name]
                if self._update(section) != digest:
                    self._adapted[name] = self._portable(section)
                    section.digest = digest

    def _portable(self, section: Section) -> bytes:
        """A section's content for an operation: what it names by digest goes into the next commit."""
        data = self._settled(lambda: self.pack(section.value))
        self._packing.keep(section.value)
        return data

    def content_digests(self) -> list[tuple[str, bytes]]:
        """Digests of what the sections hold now; they differ from the recorded ones where types have changed since."""
        with self.lock:
            self._handouts.check()
            return self._settled(
                lambda: [(name, self._packing.root(self.raw_section(name))[0]) for name in self._sections]
            )

    def _replay(self, section: Section, operation: Operation) -> None:
        if len(operation.path) == 1 and operation.code == op.DELETE:
            section.value = MISSING
        elif len(operation.path) == 1 and operation.code == op.SET:
            self._put(section, self._intake.take_encoded(operation.args[0])[0])
        else:
            redo(section.value, self.own_form(operation), self._loading.decode)

    def own_form(self, operation: Operation) -> Operation:
        """An operation of a checkpoint with the keys of its path as they are here: there they are inert."""
        if FLAT.issuperset(map(type, operation.path)):
            return operation
        return operation._replace(path=[known_key(key, self.registry, inert=self.inert) for key in operation.path])

    def leads_to(self, sections: list[tuple[str, bytes]]) -> bool:
        """Whether the state has these digests."""
        if self.digests() == sections:
            return True
        if not self.inert:
            return False
        with self.lock:
            found = {name: self._sections[name] for name, _ in sections if name in self._sections}
            right = [name in found and self._has_digest(found[name], digest) for name, digest in sections]
        return all(right) and self.digests() == sections

    def _has_digest(self, section: Section, expected: bytes | None) -> bool:
        """Whether a section's content has a digest.

        An inert dict or set whose keys are records is followed or kept whole: that depends on their class, which is not
        here, and shows only in the digest.
        """
        if self._update(section) == expected:
            return True
        value = section.value
        if not self.inert or not isinstance(value, TrackedDict | TrackedSet) or trackable(value._peek()):
            return False
        kept = whole(self._loading.decode(self._packing.content(value)))
        if self._packing.root(kept)[0] != expected:
            return False
        value._parent = None
        section.value = self._intake.settle(kept, section, None, None)
        section.digest = expected
        return True

    def _update(self, section: Section) -> bytes:
        """The digest of a section's content."""
        if section.digest is None:
            value = section.value
            trail, section.trail = section.trail, None
            if trail is not None and isinstance(value, Node):
                self.resolved(trail, value, value)
            try:
                section.digest = value._digest() if isinstance(value, Node) else self._packing.root(value)[0]
            except (Moving, HoldfastError):
                raise
            except BaseException:  # an interrupt: its trees may be half made
                if not self.replaying:
                    self._doubtful.add(section.name)
                raise
        return section.digest

    def _settled(self, work: Callable[[], T]) -> T:
        """Do something that packs handed-out values; if one is changed meanwhile, look at all of them first."""
        try:
            return work()
        except Moving:
            self._handouts.check(all_encoded=True)
            return work()

    def _is_here(self, section: Section) -> bool:
        return self._sections.get(section.name) is section

    def _is_attached(self, value: Any) -> bool:
        if isinstance(value, Node):
            return value._home() is not None
        snapshot = self._packing.snapshots.get(id(value))
        return snapshot is not None and self._handouts.place(value, snapshot.holder) is not None

    def _look(self, path: Path) -> Any:
        """What base storage holds at a path; MISSING when it leads nowhere."""
        section = self._sections.get(path[0])
        value: Any = section.value if section is not None else MISSING
        for key in path[1:]:
            try:
                value = dict.__getitem__(value, key) if isinstance(value, dict) else list.__getitem__(value, key)
            except (KeyError, IndexError, TypeError):
                return MISSING
        return value

    def section_digest(self, name: str) -> bytes | None:
        section = self._sections.get(name)
        return self._settled(lambda: self._update(section)) if section is not None else None

    def raw_section(self, name: str) -> Any:
        """A section's content without handing it out: for comparing."""
        section = self._sections[name]
        if not section.loaded:
            self._load(section)
        return section.value

    # -- capturing ------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether an operation was recorded or the order of sections changed since the last capture."""
        return self._dirty or any(section.dirty for section in self._sections.values())

    @property
    def changed(self) -> bool:
        """Whether a checkpoint would have something to write."""
        with self.lock:
            self._handouts.check()
            return self.dirty or bool(self._operations)

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests of the live state."""
        with self.lock:
            self._handouts.check()
            return self._settled(self._undisturbed)

    def _all_digests(self) -> list[tuple[str, bytes]]:
        self._doubtful |= self._whole
        if self._doubtful and not self.replaying:
            self._mend()
        found = [(name, section.digest or self._update(section)) for name, section in self._sections.items()]
        return self._all_digests() if self._doubtful and not self.replaying else found

    def _undisturbed(self) -> list[tuple[str, bytes]]:
        """Digests that hold for one moment."""
        shut, outer = self._shut, self.changing
        try:
            self._shut = True
            if outer is not None:  # it stays so: a signal handler may have brought us here, and the change goes on
                self.distrust(outer)
            self.changing = None
            return self._all_digests()
        finally:
            self._shut, self.changing = shut, outer

    def _mend(self) -> None:
        """Operations do not lead to what these sections hold: what is there now is saved whole instead."""
        names = self._doubtful.copy()
        saved: list[Operation] = []
        seen: set[int] = set()
        for name in names:
            section = self._sections.get(name)
            if section is not None and section.loaded and section.value is MISSING:  # it has not got its value yet
                section = None
                del self._sections[name]
            if section is None:
                saved.append(Operation(time.time_ns() // 1000, op.DELETE, [name], ()))
            elif section.loaded:
                section.changed()
                section.trail = None
                if isinstance(section.value, Node):
                    self._intake.mend(section.value, section, None, seen)
                saved.append(Operation(time.time_ns() // 1000, op.SET, [name], (self._portable(section),)))
                self._adapted.pop(name, None)
        # Sections as wholes stay: by them the others have their order.
        self._operations = [
            operation
            for operation in self._operations
            if operation.path[0] not in names or (len(operation.path) == 1 and operation.code in {op.SET, op.DELETE})
        ] + saved
        self._doubtful = set()

    def capture(self) -> Capture:
        """Everything since the last capture, and the digests of the state as it is now."""
        captured = None
        try:
            with self.lock:
                shut = self._shut
                try:
                    self._shut = True
                    self._handouts.check()
                    sections = self._settled(self._undisturbed)
                    self._watches.check()
                    if self.paranoid:
                        self._recompute()
                    packing = self._packing
                    captured = Capture(sections, self._operations, packing.nodes, packing.chunks)
                    # No call: an interrupt cannot part them.
                    self._operations, packing.nodes, packing.chunks = [], {}, {}
                    self._clean()
                finally:
                    self._shut = shut
            return captured
        except BaseException:
            if captured is not None:
                self.restore(captured)
            raise

    def _clean(self) -> None:
        self._dirty = False
        for section in self._sections.values():
            section.dirty = False

    def restore(self, captured: Capture) -> None:
        """A capture could not be written: everything in it is still to be written."""
        with self.lock:
            self._operations = captured.operations + self._operations
            self._packing.nodes = {**captured.nodes, **self._packing.nodes}
            self._packing.chunks = {**captured.chunks, **self._packing.chunks}
            self._dirty = True

    def stands(self, captured: Capture, nodes: dict[bytes, bytes]) -> bool:
        """Whether nodes that were found after a capture are those of its state; if not, they go with the next one."""
        with self.lock:
            now = [(name, section.digest) for name, section in self._sections.items()]
            if now == captured.sections and not self._operations and not self._doubtful:
                return True
            # C code changed something without telling, or a signal handler came in between.
            self._packing.nodes.update(nodes)
            self._doubtful.update(name for name, digest in now if (name, digest) not in captured.sections)
            return False

    def unstored_bytes(self) -> int:
        """About how much ``unstored`` would have to write."""
        return self._packing.unstored_bytes()

    def unstored(self) -> tuple[dict[bytes, bytes], dict[bytes, tuple[bytes, int]]]:
        """All nodes of the state that the catalog does not have; they count as stored from now on.

        With them, where each item sits: its encoding -> node and offset, for values that can move there.
        """
        found: dict[bytes, bytes] = {}
        places: dict[bytes, tuple[bytes, int]] = {}
        try:
            with self.lock:
                shut = self._shut
                try:
                    self._shut = True
                    self._find_unstored(found, places)
                finally:
                    self._shut = shut
            return found, places
        except BaseException:
            self._packing.nodes.update(found)  # they count as stored, so they go with the next capture
            raise

    def _find_unstored(self, found: dict[bytes, bytes], places: dict[bytes, tuple[bytes, int]]) -> None:
        for section in self._sections.values():
            if section.stored:
                continue
            if not section.loaded:
                self._load(section)
            if section.name in self._adapted and self._source is not None:
                found.update(self._proof(section, self._source).unstored()[0])
            else:
                digest, raw = self._packing.root(section.value)
                if raw is not None:
                    found[digest] = raw
                section.digest = digest
            section.stored = True
        for digest, node, items in self._packing.unstored():
            found[digest] = node
            offset = 2
            for item in items:
                places[item] = digest, offset
                offset += len(item)

    def _recompute(self) -> None:
        """Paranoid mode: encode every loaded section from scratch and compare."""
        for section in self._sections.values():
            if section.loaded:
                fresh = Document(self.registry, inert=self.inert)
                fresh["check"] = Encoded(self._packing.content(section.value))
                if fresh.section_digest("check") != section.digest:
                    raise Untracked(
                        f"section {section.name!r} has a change that was never recorded",
                        what=(f"section {section.name}",),
                        hint="C code such as heapq writes into lists behind their back: work on a plain copy.",
                    )

    # -- other states ---------------------------------------------------------------------------------

    def change(self, operation: Operation) -> None:
        """Apply an operation to the live state and record it."""
        self.change_all((operation,))

    def change_all(self, operations: Iterable[Operation]) -> None:
        """Apply operations that lead to another state, and record them (undo, redo, rollback)."""
        with self.lock:
            own = map(self.own_form, operations)
            follow(own, self, self._packing, self._handouts, self._watches, self._loading.decode)

    def content(self, value: Any) -> bytes:
        """The whole encoding of something that this document holds."""
        return self._packing.content(value)

    def forget_changes(self) -> None:
        """After a rollback: what was recorded on the way belongs to no checkpoint."""
        with self.lock:
            self._operations = []
            self._watches.forget_gone()
            self._clean()

    def plain(self, value: Any) -> Any:
        """Plain builtins, by value."""
        with self.lock:
            if isinstance(value, Document):
                return {name: self.plain(value[name]) for name in value}
            return decode(self._packing.live(value), self.registry, inert=self.inert)

    def _decode(self, data: bytes) -> Any:
        return self._loading.decode(data)
