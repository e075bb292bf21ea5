"""The document: an agent's state as a mapping of sections that know where they may differ from what was told.

Owns the lock, permission to change, loading, and the order of a capture. It knows nothing of where nodes are kept: a
``Source`` gives them. What always holds: ``told`` is what the store was told, as bytes, and is replaced by one
assignment when a capture is complete; a capture that nobody has acknowledged goes with the next one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from types import FrameType
from typing import Any, Self, SupportsIndex

from ormsgpack import Ext, packb

from holdfast.codec import operations as op
from holdfast.codec import wire
from holdfast.codec.blocks import DICT, LIST, VALUE, leaf_items
from holdfast.codec.capture import Capture, Captured, Told, appended_items, lacking, named_nodes
from holdfast.codec.containers import wrap
from holdfast.codec.detached import Originals
from holdfast.codec.dicts import LazyDict, TrackedDict
from holdfast.codec.diff import Relative
from holdfast.codec.intake import Intake, attached
from holdfast.codec.lists import LazyList, TrackedList
from holdfast.codec.marks import GONE
from holdfast.codec.node import FLAT, RAW, TEXT, Node, Section
from holdfast.codec.operations import Operation
from holdfast.codec.replay import Source, State, in_order, named, section_operations
from holdfast.codec.sets import TrackedSet
from holdfast.codec.tree import Leaf, Tree, leaf_contents
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode, is_immutable
from holdfast.codec.watches import Watches
from holdfast.codec.wire import collector_paused
from holdfast.errors import CorruptValue, ReadOnly, StoreBusy, Unencodable, Untracked

MISSING = GONE
# Bulk values that are remembered to be in chunks.
_BULK_KNOWN = 64


class Document(MutableMapping[str, Any]):
    """A mapping of sections. Each loads when it is first touched."""

    __slots__ = (
        "_guard",
        "bulk",
        "inert",
        "intake",
        "lock",
        "originals",
        "paranoid",
        "readonly",
        "registry",
        "sections",
        "told",
        "watches",
    )

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
        self.registry, self.readonly, self.inert, self.paranoid = registry, readonly, inert, paranoid
        self._guard: Callable[[], None] | None = None
        self.told = Told(source)
        self.sections: dict[str, Section] = {name: Section(name, dirty=False) for name in self.told.sections}
        self.bulk = _Bulk()
        self.watches = Watches(registry)
        self.originals = Originals(registry)
        self.intake = Intake(self)

    @property
    def guard(self) -> Callable[[], None] | None:
        """Called before every change; raises when the handle is not usable."""
        return self._guard

    @guard.setter
    def guard(self, check: Callable[[], None] | None) -> None:
        self._guard = check

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            raise AttributeError(_spelling(name, "= ...")) from None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_spelling(name, ""))

    # -- the mapping ------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        section = self.sections.get(name)
        if section is None:
            raise KeyError(name)
        value = section.value
        if value is GONE:
            self._load(section)
            value = section.value
        if type(value) not in FLAT and not isinstance(value, Node) and not self.readonly:
            with self.lock:
                self.watches.out(value, section, None)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        section = self.sections.get(name)
        if section is not None and section.value is value and type(value) not in FLAT:
            return  # put back, as after state["x"] += [1]
        self._set({name: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several sections, all or none."""
        self._set(dict(*args, **kwargs))

    def _set(self, incoming: dict[str, Any], gone: Sequence[str] = ()) -> None:
        """The one way in which sections change."""
        with self.lock:
            self.check_writable()
            self.intake.changes += 1
            for name in incoming:
                if type(name) is not str:
                    raise Unencodable(
                        f"a section's name is of type {type(name).__name__}", hint="Top-level keys of a state are str."
                    )
            known = self.sections
            stays = {name for name in incoming if name in known and name not in gone}
            # What is put back where it is, as after `state["x"] += [1]`, stays, also if another one gets it as well.
            stands = {
                name for name in stays if known[name].value is incoming[name] and type(incoming[name]) not in FLAT
            }
            leaving = [
                (known[one], known[one].value) for one in (*incoming, *gone) if one in known and one not in stands
            ]
            wanted = [
                (known[name] if name in stays else Section(name), value)
                for name, value in incoming.items()
                if name not in stands
            ]
            self.told.reordered = True
            for section, _ in leaving:
                section.dirty = True  # before anything moves
            taken = self.intake.take_sections(wanted, leaving)
            sections = {name: section for name, section in known.items() if name not in gone}
            for section, _ in wanted:
                sections[section.name] = section
            for (section, _), value in zip(wanted, taken, strict=True):
                section.value = value
            self.sections = sections
            now = {id(section.value) for section in sections.values()}
            for section, value in leaving:
                if id(value) not in now:
                    self.intake.detach(section, (value,))

    def __delitem__(self, name: str) -> None:
        with self.lock:
            self.check_writable()
            if name not in self.sections:
                raise KeyError(name)
            self.intake.changes += 1
            self.told.reordered = True
            section = self.sections[name]
            self.sections = {key: one for key, one in self.sections.items() if key != name}
            self.intake.detach(section, (section.value,))

    def replace(self, value: Any) -> None:
        """Make these the sections, all or none of the change."""
        incoming = dict(value)
        with self.lock:
            # Sections that do not stand where the new order wants them go and come back at the end, as in a dict.
            kept, _ = in_order(list(self.sections), list(incoming))
            self._set(incoming, [name for name in self.sections if name not in kept])

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.sections))

    def __len__(self) -> int:
        return len(self.sections)

    def __contains__(self, name: object) -> bool:
        return name in self.sections

    def pop(self, name: str, *default: Any) -> Any:
        """As dict.pop."""
        with self.lock:
            if name not in self.sections:
                if default:
                    return default[0]
                raise KeyError(name)
            value = self[name]
            del self[name]
            return value

    def popitem(self) -> tuple[str, Any]:
        """As dict.popitem: the newest section."""
        with self.lock:
            if not self.sections:
                raise KeyError("popitem(): the state is empty")
            name = next(reversed(self.sections))
            return name, self.pop(name)

    def clear(self) -> None:
        """Remove all sections."""
        self.replace({})

    def setdefault(self, name: str, default: Any = None) -> Any:
        with self.lock:
            if name not in self.sections:
                self[name] = default
            return self[name]

    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    def __or__(self, other: Any) -> dict[str, Any]:
        return dict(self.items()) | dict(other)

    def __ror__(self, other: Any) -> dict[str, Any]:
        return dict(other) | dict(self.items())

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self.sections))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Document):
            other = dict(other.items())
        return dict(self.items()) == other if isinstance(other, dict) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def copy(self) -> dict[str, Any]:
        """A plain dict of the sections, which stay live."""
        return dict(self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(self.plain(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return dict, (self.plain(self),)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.sections)

    # -- permission -------------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Called before every change, with the lock held."""
        if self.told.capturing is not None and self._is_busy():
            raise StoreBusy(
                "the state is being saved, and was changed in the middle of that, as by a signal handler",
                hint="Let the handler set a flag, and change the state between two steps.",
            )
        if self.readonly:
            raise ReadOnly(
                "this state is read-only",
                hint="A past state cannot change. Use agent.rollback(...) or agent.branch(...) to go on from it.",
            )
        if self._guard is not None:
            self._guard()

    def _is_busy(self) -> bool:
        """Whether this thread is in the middle of a capture. An interrupt may have left a note of one that is over."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame is self.told.capturing:
                return True
            frame = frame.f_back
        self.told.capturing = None
        return False

    # -- the way out ------------------------------------------------------------------------------------------

    def seen(self, value: Any, holder: Any, at: Any) -> Any:
        """What user code may see of a child."""
        if isinstance(value, Node):
            if value._up is None:  # it was read under its digest, inside a raw container
                value._up, value._at = holder, at
            return value
        if type(value) in RAW:
            return wrap(value, self, holder, at)
        if not self.readonly:
            self.watches.out(value, holder, at)
        return value

    def seen_all(self, values: list[Any], holder: Any, keys: Sequence[Any] | None = None) -> tuple[list[Any], bool]:
        """As ``seen``, of all children at once; and whether there are instances among them."""
        flat, text = FLAT.issuperset, TEXT.issuperset
        out: list[Any] = []
        instances: list[Any] = []
        places: list[Any] = []
        for at, value in enumerate(values) if keys is None else zip(keys, values, strict=True):
            kind = type(value)
            child: Any = value
            if kind is dict and flat(map(type, value.values())) and text(map(type, value)):
                # As ``wrap`` does it, written out: most lists are lists of messages.
                child = TrackedDict(value)
                child._doc = self
                child._up = holder
                child._at = at
                child._told = child._marks = None
            elif kind in RAW:
                child = wrap(value, self, holder, at)
            elif kind not in FLAT:
                if isinstance(value, Node):
                    if value._up is None:
                        value._up, value._at = holder, at
                else:
                    instances.append(value)
                    places.append(at)
            out.append(child)
        if instances and not self.readonly:
            self.watches.out_all(instances, holder, places)
        return out, bool(instances)

    def encode(self, value: Any) -> bytes:
        """The encoding of a value that is no tracked container, as it is at this moment."""
        return encode(value, self.registry)

    def plain(self, value: Any) -> Any:
        """Plain builtins, by value."""
        with self.lock:
            if value is self:
                return {name: self.plain(self.raw_section(name)) for name in self.sections}
            if type(value) in FLAT:
                return value
            return decode(encode(value, self.registry), self.registry, inert=self.inert)

    def encoding(self, node: Any) -> bytes:
        """How a tracked container stands in its parent, as of now: written out, or as the name of its tree."""
        with self.lock:
            if self.is_home(node):
                self.settle()
                if node._told is not None and node._marks is None:
                    return named(node._told, self.told)
            held: list[Tree] = []
            return self.told.fold(encode(node, self.registry), held, {})

    def raw_section(self, name: str) -> Any:
        """A section's content without handing it out."""
        section = self.sections[name]
        if section.value is GONE:
            self._load(section)
        return section.value

    # -- loading ----------------------------------------------------------------------------------------------

    def _load(self, section: Section) -> None:
        with self.lock:
            if section.value is not GONE:
                return
            tree = self.told.sections[section.name]
            raw = None
            if type(tree) is bytes:
                tree, raw = self._read(section.name, tree)
                self.told.sections[section.name] = tree
            section.value = self.live(tree, raw, section)  # type: ignore[arg-type]

    def _read(self, name: str, digest: bytes) -> tuple[Tree, list[bytes] | None]:
        """What is stored of a section."""
        return self.told.load(name, digest)

    def live(self, tree: Tree, raw: Sequence[bytes] | None, up: Any) -> Any:
        """Live containers for a tree, their children raw. ``raw`` are its leaves where somebody has just read them."""
        parts: list[Any] = []
        per = 2 if tree.kind == DICT else 1
        if raw is None:
            tree.warm([(0, tree.count)], self.told.fetch)
        with collector_paused():
            for number, leaf in enumerate(tree.leaves):
                payload: Any
                if raw is not None:
                    _, payload = leaf_items(memoryview(raw[number]))
                else:
                    payload = b"".join(tree.items_of(leaf, self.told.fetch))
                parts += self._parts(payload, leaf.count * per)
        self.told.let_go(tree)
        if tree.kind == VALUE:
            value = parts[0]
            return wrap(value, self, up) if type(value) in RAW else value
        node: Any
        if tree.kind == LIST:
            node = TrackedList(parts) if FLAT.issuperset(map(type, parts)) else LazyList(parts)
        elif tree.kind == DICT:
            content = dict(zip(parts[::2], parts[1::2], strict=True))
            if len(content) != tree.count:
                raise CorruptValue("a stored dict has one key twice")
            node = TrackedDict(content) if FLAT.issuperset(map(type, parts[1::2])) else LazyDict(content)
        else:
            node = TrackedSet(parts)
            if len(node) != tree.count:
                raise CorruptValue("a stored set has one item twice")
        node._init(self, up)
        node._told = tree
        if node._lazy:
            for key, child in node._pairs():
                if isinstance(child, Node):
                    child._up, child._at = node, key
        return node

    def _parts(self, payload: Any, count: int) -> list[Any]:
        """The decoded parts of a leaf: an array header in front makes one value of them."""
        parts = self.decode(b"".join((b"\xdd", count.to_bytes(4, "big"), payload)))
        if type(parts) is not list:
            raise CorruptValue("a leaf does not hold items")
        return parts

    def decode(self, data: bytes) -> Any:
        """What the state holds for an encoding, raw."""
        return decode(data, self.registry, inert=self.inert, owned=True, big=self._read_big)

    def _read_big(self, code: int, payload: bytes) -> Any:
        if code == wire.BIG:
            return self.live(self.told.tree(bytes(payload)), None, None)
        value = decode(self.told.bulk(bytes(payload)), self.registry, inert=self.inert, owned=True)
        self.bulk.keep(value, _packed(code, payload))
        return value

    # -- capturing --------------------------------------------------------------------------------------------

    def capture(self, under_way: Iterable[Captured] = ()) -> Captured:
        """Everything that is not written or on its way, and the digests of the state as it is now.

        ``under_way`` are captures that are being written: what is in them does not go with this one.
        """
        with self.lock:
            return self.told.waiting(under_way, self.settle())

    def settle(self) -> Captured:
        """Find out what differs from what was told; from then on that is told. Gives what this call found.

        It waits to be written until ``capture`` takes it along.
        """
        with self.lock:
            if self.told.capturing is not None and self._is_busy():
                raise StoreBusy(
                    "a checkpoint was asked for in the middle of another one, as by a signal handler",
                    hint="Let the handler set a flag, and take the checkpoint between two steps.",
                )
            told, watches = self.told, self.watches
            captured = self._grown() if not told.reordered and not watches.known else None
            if captured is not None:
                return captured
            if told.unfinished is not None:
                self._recover()
            plan = told.unfinished = Capture(self)
            try:
                told.capturing = sys._getframe()
                self.intake.changes += 1
                if watches.known:
                    watches.before()
                captured = self._finish(plan, *self._work(plan))
                if watches.known:
                    watches.after()
                    watches.prune(self.is_attached)
                if self.paranoid:
                    self._recompute()
            finally:
                told.capturing = None
            told.unfinished = None
            self.originals.check(self.is_attached)
            return captured

    def _grown(self) -> Captured | None:
        """The most frequent capture by far, in a hurry: items came at the end of one list. None for any other.

        It does what the rest of this class does, in an order in which an interrupt leaves nothing but doubts.
        """
        told, dirty = self.told, None
        for section in self.sections.values():
            if section.dirty:
                if dirty is not None:
                    return None
                dirty = section
        if dirty is None or told.unfinished is not None or self.paranoid:
            return None
        if told.unacknowledged and not told.unacknowledged[-1].handed:
            return None
        node, tree = dirty.value, told.sections[dirty.name]
        if type(tree) is not Tree or tree.kind != LIST or not isinstance(node, list):
            return None
        items = appended_items(node, tree)
        new = tree.grown(items) if items is not None else None
        if new is None or items is None:
            return None
        at = time.time_ns() // 1000
        node._told = new  # type: ignore[attr-defined]
        sections = [
            (name, one if type(one) is bytes else one.root if one is not tree else new.root)  # type: ignore[union-attr]
            for name, one in told.sections.items()
        ]
        operation = Operation(at, op.SPLICE, [dirty.name], (tree.count, 0, items))
        captured = Captured(sections, [operation], before=told.sections)
        waiting = [*told.unacknowledged, captured]
        truth = {**told.sections, dirty.name: new}
        self.intake.changes += 1
        told.unacknowledged, told.sections = waiting, truth  # no call in between
        node._marks = None  # type: ignore[attr-defined]
        dirty.dirty = False
        self.originals.check(self.is_attached)
        return captured

    def _work(self, plan: Capture) -> tuple[list[Relative], dict[str, Tree | bytes], list[Section]]:
        """Operations, what is told after them, and the sections that were looked at."""
        before, sections = self.told.sections, self.sections
        ops: list[Relative] = []
        dirty = [section for section in sections.values() if section.dirty]
        truth = before
        if self.told.reordered:
            kept, ops = in_order(list(before), list(sections))
            truth = {name: before[name] if name in kept else b"" for name in sections}
            dirty = [section for section in sections.values() if section.dirty or section.name not in kept]
        elif dirty:
            truth = before.copy()
        for section in dirty:
            name = section.name
            was = truth[name]
            now = self._section(plan, section, before.get(name))
            truth[name] = now
            if type(was) is Tree and was.kind == now.kind:
                if was.root != now.root:
                    plan.trees[now.root] = now
                    ops += section_operations(name, was, now, plan.differ, self.told)
            elif was != now.root:
                plan.trees[now.root] = now
                ops.append((op.SET, (name,), (named(now, self.told),)))
        return ops, truth, dirty

    def _section(self, plan: Capture, section: Section, was: Tree | bytes | None) -> Tree:
        """What a section is now."""
        if section.value is GONE:
            self._load(section)
        value = section.value
        if not isinstance(value, Node):
            return plan.section(value)
        if value._up is not section:
            if value._up is not None and self.is_home(value):  # an interrupt left it in two places
                value = section.value = self.intake.copied(value, section, None)
            value._up = section
        told = was if isinstance(was, Tree) and was.kind == value._kind else None
        return plan.node(value, told)

    def _finish(
        self, plan: Capture, ops: list[Relative], truth: dict[str, Tree | bytes], dirty: list[Section]
    ) -> Captured:
        """The capture is complete: what it worked out becomes the truth."""
        told = self.told
        sections = [(name, tree if type(tree) is bytes else tree.root) for name, tree in truth.items()]  # type: ignore[union-attr]
        if not ops and truth is told.sections:
            plan.complete = True
            return Captured(sections)
        nodes, fresh = named_nodes(ops, plan.at_hand, plan.fetch)
        at = time.time_ns() // 1000
        operations = [Operation(at, code, list(path), args) for code, path, args in ops]
        captured = Captured(sections, operations, nodes, plan.chunks, fresh, told.sections)
        waiting = told.added(captured) if operations else told.unacknowledged
        for entry in plan.planned.values():
            entry.node._told = entry.after if entry.inline is None else None
            told.trees.add(entry.after)
        for value, packed in plan.cut:
            self.bulk.keep(value, packed)
        for section in dirty:
            section.dirty = False
        told.reordered = False
        plan.complete = True
        told.unacknowledged, told.sections = waiting, truth  # no call in between: an interrupt cannot part them
        return captured

    def _recover(self) -> None:
        """A capture was cut short: as if it had not been. Everything that it looked at is in doubt."""
        plan = self.told.unfinished
        if plan is None:
            return
        if not plan.complete:
            for section in self.sections.values():
                section.dirty = section.dirty or section.value is not GONE
            self.told.reordered = True
            for entry in plan.planned.values():
                entry.node._told = entry.before
            for entry in plan.planned.values():
                entry.node._mark_all()
        self.told.unfinished = None

    def lacking(self) -> list[tuple[Tree, Leaf]]:
        """Told bytes that were let go and that the next capture will compare with, as far as marks say."""
        found: list[tuple[Tree, Leaf]] = []
        with self.lock:
            for section in self.sections.values():
                if section.dirty and isinstance(section.value, Node):
                    lacking(section.value, found)
        return found

    def bring(self, leaves: list[tuple[Tree, Leaf]]) -> None:
        """Read told bytes that were let go. Needs no lock: they are what they were."""
        rows = self.told.fetch([leaf.digest for _, leaf in leaves])
        for tree, leaf in leaves:
            leaf.items = leaf_contents(tree.kind, rows[leaf.digest])

    def doubt(self) -> None:
        """Nobody can say where something may differ: everything that is loaded is compared by the next capture."""

        def doubted(node: Any) -> None:
            for _, child in node._pairs():
                if isinstance(child, Node):
                    doubted(child)
            node._doubt()

        for section in self.sections.values():
            if section.value is not GONE:
                section.dirty = True
                if isinstance(section.value, Node):
                    doubted(section.value)

    def written(self, captured: Captured, *, sealed: bool = False) -> None:
        """The store has a capture. Until somebody says so, the next one carries it along."""
        with self.lock:
            self.told.written(captured, sealed=sealed)

    def forget_changes(self) -> None:
        """What led here is in the history already: nothing is to be written for it."""
        with self.lock:
            self.settle()
            self.told.unacknowledged = []

    @property
    def changed(self) -> bool:
        """Whether a checkpoint would have something to write."""
        with self.lock:
            if self.told.capturing is not None and self._is_busy():
                return True
            self.settle()
            return self.told.differs()

    def changed_since(self, under_way: Iterable[Captured]) -> bool:
        """As ``changed``, while these captures are being written."""
        with self.lock:
            return self.changed and self.told.differs(under_way)

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests of the live state."""
        return self.settle().sections

    def unstored_bytes(self) -> int:
        """About how much ``seal`` would have to write."""
        with self.lock:
            return self.told.unstored_bytes()

    def seal(self, captured: Captured) -> dict[bytes, tuple[bytes, int]]:
        """Add all nodes of the state that the store lacks to the newest capture. Gives where each item sits."""
        with self.lock:
            return self.told.seal(captured)

    def is_home(self, node: Any) -> bool:
        """Whether the containers above a node hold it, and are in the state."""
        return attached(node, self.sections)

    def is_attached(self, holder: Any) -> bool:
        return attached(holder, self.sections)

    def _recompute(self) -> None:
        """Paranoid mode: compare all that is loaded with what was told."""
        for name, section in self.sections.items():
            if section.value is GONE:
                continue
            fresh = Document(self.registry, inert=self.inert)
            fresh.told = self.told
            told = fresh.live(self.told.section(name), None, None)
            if encode(told, self.registry) != encode(section.value, self.registry):
                raise Untracked(
                    f"section {name!r} has a change that was never recorded",
                    what=(f"section {name}",),
                    hint="C code such as heapq writes into lists behind their back: work on a plain copy.",
                )

    # -- other states -----------------------------------------------------------------------------------------

    def become(self, wanted: State, *, record: bool) -> None:
        """Be another state of the same store, in place: what is in both stays the same objects.

        ``record``: it is a change like any other, to be written with the next checkpoint. Otherwise the history stands
        there already, and nothing is to be written.
        """
        from holdfast.codec.turning import turn

        with self.lock:
            turn(self, wanted, record=record)


def plain(value: Any) -> Any:
    """A deep copy of a node (or a whole state) made of dict, list and set; other values are returned as they are."""
    if isinstance(value, Document):
        return value.plain(value)
    return value._doc.plain(value) if isinstance(value, Node) else value


def _packed(code: int, payload: bytes) -> bytes:
    return packb(Ext(code, bytes(payload)))


def _spelling(name: str, rest: str) -> str:
    return f"a state has sections, not attributes: write agent.state[{name!r}] {rest}".rstrip()


class _Bulk:
    """Values that are in chunks already, and how they stand in their container. Only values that cannot change."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._limit = _BULK_KNOWN

    def get(self, value: Any) -> bytes | None:
        known = self._known.get(id(value))
        return known[1] if known is not None and known[0] is value else None

    def keep(self, value: Any, packed: bytes) -> None:
        if not is_immutable(value):
            return
        if len(self._known) >= self._limit:
            # Two references are the table's and getrefcount's own.
            self._known = {key: kept for key, kept in self._known.items() if sys.getrefcount(kept[0]) > 2}
            self._limit = max(_BULK_KNOWN, 2 * len(self._known))
        self._known[id(value)] = (value, packed)
