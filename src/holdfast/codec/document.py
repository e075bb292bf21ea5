"""The document: an agent's state as a mapping of sections that know where they may differ from what was told.

Owns the lock, permission to change, loading, and the order of a capture. It knows nothing of where nodes are kept: a
``Source`` gives them. What always holds: ``told`` is what the store was told, as bytes, and is replaced by one
assignment when a capture is complete; a capture that nobody has acknowledged goes with the next one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Self, SupportsIndex

from ormsgpack import Ext, packb

from holdfast.codec import operations as op
from holdfast.codec import wire
from holdfast.codec.blocks import DICT, LIST, Leaf
from holdfast.codec.capture import Capture, appended_items, lacking
from holdfast.codec.containers import live, wrap
from holdfast.codec.dicts import LazyDict, TrackedDict
from holdfast.codec.diff import Differ, pair_hunks
from holdfast.codec.intake import Intake, Originals, attached
from holdfast.codec.operations import Operation
from holdfast.codec.state import Sections, Source, State, Trees, changes, check_section, in_order, is_apart
from holdfast.codec.told import Captured, Saved, Told, captured
from holdfast.codec.tracked import GONE, RAW, Node, Section
from holdfast.codec.tree import Hunk, Tree, build, leaf_contents
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode, is_immutable
from holdfast.codec.watches import Watches
from holdfast.codec.wire import SCALARS
from holdfast.errors import StoreBusy, Untracked

MISSING = GONE
# Bulk values that are remembered to be in chunks.
_BULK_KNOWN = 64


class Document(MutableMapping[str, Any], Saved):
    """A mapping of sections. Each loads when it is first touched."""

    __slots__ = (
        "bulk",
        "given",
        "inert",
        "intake",
        "lock",
        "originals",
        "paranoid",
        "registry",
        "reordered",
        "sections",
        "told",
        "unfinished",
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
        self.registry, self.inert, self.paranoid = registry, inert, paranoid
        self.unfinished: Capture | None = None  # one that was cut short
        self.reordered = True  # whether sections may have come, gone or changed places
        self.told = Told(source)
        self.sections: dict[str, Section] = {
            name: Section(name, dirty=False) for name in self.told.sections if not is_apart(name)
        }
        self.given: set[str] = set()  # sections of other layers that somebody here gives
        self.bulk = _Bulk()
        self.watches = Watches(registry)
        self.originals = Originals(registry)
        self.intake = Intake(self, readonly=readonly)

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
            self.load(section)
            value = section.value
        if type(value) not in SCALARS and not isinstance(value, Node) and not self.readonly:
            with self.lock:
                self.watches.out(value, section, None)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        section = self.sections.get(name)
        if section is not None and section.value is value and type(value) not in SCALARS:
            return  # put back, as after state["x"] += [1]
        self._set({name: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several sections, all or none."""
        self._set(dict(*args, **kwargs))

    def _set(self, incoming: dict[str, Any], gone: Sequence[str] = ()) -> None:
        """The one way in which sections change."""
        with self.lock:
            self.intake.check_writable()
            self.intake.changes += 1
            for name in incoming:
                check_section(name)
            known = self.sections
            stays = {name for name in incoming if name in known and name not in gone}
            # What is put back where it is, as after `state["x"] += [1]`, stays, also if another one gets it as well.
            stands = {
                name for name in stays if known[name].value is incoming[name] and type(incoming[name]) not in SCALARS
            }
            leaving = [
                (known[one], known[one].value) for one in (*incoming, *gone) if one in known and one not in stands
            ]
            wanted = [
                (known[name] if name in stays else Section(name), value)
                for name, value in incoming.items()
                if name not in stands
            ]
            self.reordered = True
            for section, _ in leaving:
                section.dirty = True  # before anything moves
            taken = self.intake.take_sections(wanted, leaving)
            for (section, _), value in zip(wanted, taken, strict=True):
                section.value = value
            sections = self._rearrange(gone, [section for section, _ in wanted])
            now = {id(section.value) for section in sections.values()}
            for section, value in leaving:
                if id(value) not in now:
                    self.intake.detach(section, (value,))

    def _rearrange(self, gone: Collection[str], come: Sequence[Section]) -> dict[str, Section]:
        """Let sections go and others come, by one assignment."""
        while True:
            known = self.sections
            sections = {name: section for name, section in known.items() if name not in gone}
            sections.update([(section.name, section) for section in come])
            if self.sections is known:  # otherwise a signal handler was quicker
                _put_sections(self, sections)
                break
        # Again, because a signal handler may have looked for changes in the middle of this one.
        self.reordered = True
        for section in come:
            section.dirty = True
        return sections

    def __delitem__(self, name: str) -> None:
        with self.lock:
            self.intake.check_writable()
            if name not in self.sections:
                raise KeyError(name)
            self.intake.changes += 1
            self.reordered = True
            section = self.sections[name]
            self._rearrange((name,), ())
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
        """The section of that name; if there is none, it becomes ``default`` first."""
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

    @property
    def readonly(self) -> bool:
        """Whether this state is a past one, which cannot change."""
        return self.intake.readonly

    @readonly.setter
    def readonly(self, readonly: bool) -> None:
        self.intake.readonly = readonly

    @property
    def guard(self) -> Callable[[], None] | None:
        """Called before every change; raises when there must be none."""
        return self.intake.guard

    @guard.setter
    def guard(self, guard: Callable[[], None] | None) -> None:
        self.intake.guard = guard

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
        out: list[Any] = []
        instances: list[Any] = []
        places: list[Any] = []
        for at, value in enumerate(values) if keys is None else zip(keys, values, strict=True):
            kind = type(value)
            child: Any = value
            if kind is dict:
                # As ``wrap_dict`` does it, written out: most lists are lists of messages.
                child = TrackedDict(value)
                for part in value.values():
                    if type(part) not in SCALARS:
                        child.__class__ = LazyDict
                        break
                child._doc = self
                child._up = holder
                child._at = at
                child._told = child._marks = None
            elif kind in RAW:
                child = wrap(value, self, holder, at)
            elif kind not in SCALARS:
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
            if type(value) in SCALARS:
                return value
            return decode(encode(value, self.registry), self.registry, inert=self.inert)

    def encoding(self, node: Any) -> bytes:
        """How a tracked container stands in its parent, as of now: written out, or as the name of its tree."""
        with self.lock:
            if self.is_attached(node):
                self.settle()
                if node._told is not None and node._marks is None:
                    return node._told.named(self.told.fetch)  # type: ignore[no-any-return]
            held: list[Tree] = []
            return self.told.fold(encode(node, self.registry), held, {})

    def raw_section(self, name: str) -> Any:
        """A section's content without handing it out."""
        section = self.sections[name]
        if section.value is GONE:
            self.load(section)
        return section.value

    # -- loading ----------------------------------------------------------------------------------------------

    def load(self, section: Section) -> None:
        """Read a section that nobody has touched yet."""
        with self.lock:
            if section.value is not GONE:
                return
            tree = self.told.sections[section.name]
            raw = None
            if type(tree) is bytes:
                tree, raw = self.told.load(section.name, tree)
                self.told.sections[section.name] = tree
            section.value = live(self, tree, raw, section)  # type: ignore[arg-type]

    def decode(self, data: bytes) -> Any:
        """What the state holds for an encoding, raw."""
        return decode(data, self.registry, inert=self.inert, owned=True, big=self._read_big)

    def _read_big(self, code: int, payload: bytes) -> Any:
        if code == wire.BIG:
            return live(self, self.told.tree(bytes(payload)), None, None)
        if code == wire.CONTENT:
            raise wire.corrupt("the content of a file, which no state has")
        value = decode(self.told.bulk(bytes(payload)), self.registry, inert=self.inert, owned=True)
        self.bulk.keep(value, _packed(code, payload))
        return value

    # -- capturing --------------------------------------------------------------------------------------------

    def capture(self, under_way: Collection[Captured] = ()) -> Captured:
        """What a checkpoint would write now."""
        with self.lock:
            return self.told.waiting(under_way, self._grown() or self.settle())

    def settle(self) -> Captured:
        """Find out what differs from what was told; from then on that is told. Gives what this call found.

        It waits to be written until ``capture`` takes it along.
        """
        with self.lock:
            if self.intake.is_busy():
                raise StoreBusy(
                    "a checkpoint was asked for in the middle of another one, as by a signal handler",
                    hint="Let the handler set a flag, and take the checkpoint between two steps.",
                )
            watches = self.watches
            if self._is_told():
                self.originals.check(self.is_attached)
                return Captured(self.told.sections)
            if self.unfinished is not None:
                self.unfinished.recover()
            capture = self.unfinished = Capture(self)
            try:
                self.intake.capturing = sys._getframe()
                self.intake.changes += 1
                if watches.known:
                    watches.before()
                found = capture.found()
                if watches.known:
                    watches.after()
                    watches.prune(self.is_attached)
                if self.paranoid:
                    self._recompute()
            finally:
                self.intake.capturing = None
            self.unfinished = None
            self.originals.check(self.is_attached)
            return found

    def _is_told(self) -> bool:
        """Whether nothing is marked: whoever asks for changes and then captures them need not look twice."""
        if self.reordered or self.unfinished is not None or self.watches.known or self.paranoid:
            return False
        return not any(section.dirty for section in self.sections.values())

    def _grown(self) -> Captured | None:
        """The most frequent capture by far, in a hurry: items came at the end of one list. None for any other.

        It does what the rest of this class does, in an order in which an interrupt leaves nothing but doubts.
        """
        told, intake, dirty = self.told, self.intake, None
        before, changes = told.sections, intake.changes
        if self.reordered or intake.capturing is not None or self.unfinished is not None or intake.watches.known:
            return None
        for section in self.sections.values():
            if section.dirty:
                if dirty is not None:
                    return None
                dirty = section
        waiting = told.unacknowledged
        if dirty is None or self.paranoid or (waiting and not waiting[-1].handed):
            return None
        node, tree = dirty.value, before[dirty.name]
        if type(tree) is not Tree or tree.kind != LIST or not isinstance(node, list):
            return None
        items = appended_items(node, tree)
        if not items:  # it is not that, or nothing came: no operation
            return None
        new = tree.grown(items) or told.settle(tree.apply([Hunk(tree.count, tree.count, items)], told.fetch))
        truth: dict[str, Tree | bytes] = {**before, dirty.name: new}
        operation = Operation(time.time_ns() // 1000, op.SPLICE, [dirty.name], (tree.count, 0, items))
        found = Captured(truth, [operation], before=before)
        if intake.changes != changes or told.sections is not before:
            return None  # a signal handler changed or saved something meanwhile
        intake.changes = changes + 1
        told.unacknowledged, told.sections = [*told.unacknowledged, found], truth  # no call since the question
        node._told, node._marks, dirty.dirty = new, None, False  # type: ignore[attr-defined]
        intake.originals.check(self.is_attached)
        return found

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

    def retell(self) -> None:
        """Something that the store was believed to have is gone from it: all that is loaded is told anew, and whole."""

        def untold(node: Any) -> None:
            for _, child in node._pairs():
                if isinstance(child, Node):
                    untold(child)
            node._told, node._marks = None, True

        with self.lock:
            self.settle()
            told = self.told
            loaded = {name for name, section in self.sections.items() if section.value is not GONE}
            before = told.unacknowledged[0].before if told.unacknowledged else told.sections
            # What was given of other layers is given again, whole.
            loaded |= self.given & set(before)
            for name in loaded & self.sections.keys():
                section = self.sections[name]
                section.dirty = True
                if isinstance(section.value, Node):
                    untold(section.value)
            self.bulk = _Bulk()
            self.reordered = True
            told.trees = Trees()
            told.unacknowledged = []
            told.sections = {name: b"" if name in loaded else tree for name, tree in before.items()}

    # -- other layers -----------------------------------------------------------------------------------------

    def apart(self, name: str) -> Tree | None:
        """A dict of another layer, as it is told. Nobody has it as an object."""
        with self.lock:
            return self.told.section(name) if self.told.sections.get(name) else None

    def give(
        self, name: str, items: Mapping[bytes, bytes | None] | None, needs: frozenset[bytes] = frozenset()
    ) -> None:
        """Let a dict of another layer have other items, by the encodings of their keys. ``needs`` are their chunks.

        An item that is None goes, and so does the whole dict without ``items``.
        """
        with self.lock:
            told = self.told
            self.given.add(name)
            before, was = told.sections, self.apart(name)
            truth = {other: tree for other, tree in before.items() if other != name or items is not None}
            differ = Differ(told.trees.get, told.fetch)
            if items is not None:
                if was is None:
                    found = [key + item for key, item in items.items() if item is not None]
                    tree = told.settle(build(DICT, found))
                else:
                    hunks = pair_hunks(was, items, told.fetch)
                    tree = told.settle(was.apply(hunks, told.fetch)) if hunks else was
                    differ.known[was.root, tree.root] = differ.operations(DICT, was.count, tree.count, hunks)
                truth[name] = tree
            ops = changes(before, truth, differ, told)
            if ops:
                made = captured(before, truth, ops, {}, told.trees.get, told.fetch)
                made.needs = needs
                told.unacknowledged, told.sections = told.added(made), truth  # no call in between

    def take_back(self, sections: Sections, dropped: Collection[Captured]) -> None:
        """These captures were not written, and what they have of other layers will not be: it is as in ``sections``.

        Whoever gave it gives it again.
        """
        with self.lock:
            told = self.told
            if not any(one in told.unacknowledged for one in dropped):
                return  # all is told anew
            before = {name: tree for name, tree in sections.items() if is_apart(name)}
            if before != {name: tree for name, tree in told.sections.items() if is_apart(name)}:
                for one in dropped:
                    one.operations, one.needs = [], frozenset()  # worked out anew
                told.sections = {name: tree for name, tree in told.sections.items() if not is_apart(name)} | before

    def stand_on(self, other: State) -> None:
        """Let all that is told of other layers be what another state of the store has of them."""
        with self.lock:
            told = self.told
            found: dict[str, Tree | bytes] = {name: other.section(name) for name in other.sections if is_apart(name)}
            for tree in other.trees:
                told.trees.add(tree)
            told.sections = {name: tree for name, tree in told.sections.items() if not is_apart(name)} | found

    def forget_changes(self) -> None:
        """What led here is in the history already: nothing is to be written for it."""
        with self.lock:
            self.settle()
            self.told.unacknowledged = []

    @property
    def changed(self) -> bool:
        """Whether a checkpoint would have something to write."""
        return self.changed_since(())

    def changed_since(self, under_way: Collection[Captured]) -> bool:
        """As ``changed``, while these captures are being written."""
        with self.lock:
            if self.intake.is_busy():
                return True
            if self._grown() is None:
                self.settle()
            return self.told.differs(under_way)

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests of the live state."""
        return [one for one in self.settle().sections if not is_apart(one[0])]

    def is_attached(self, holder: Any) -> bool:
        """Whether the containers above a container, or section, hold it, and are in the state."""
        return attached(holder, self.sections)

    def _recompute(self) -> None:
        """Paranoid mode: compare all that is loaded with what was told."""
        for name, section in self.sections.items():
            if section.value is GONE:
                continue
            fresh = Document(self.registry, inert=self.inert)
            fresh.told = self.told
            told = live(fresh, self.told.section(name), None, None)
            if encode(told, self.registry) != encode(section.value, self.registry):
                raise Untracked(
                    f"section {name!r} has a change that was never recorded",
                    what=(f"section {name}",),
                    hint="C code such as heapq changes lists without calling their methods: work on a plain copy.",
                )

    # -- other states -----------------------------------------------------------------------------------------

    def become(self, wanted: State, *, record: bool) -> None:
        """Be another state of the same store, in place: what is in both stays the same objects.

        ``record``: it is a change like any other, to be written with the next checkpoint. Otherwise the history stands
        there already, and nothing is to be written.
        """
        from holdfast.codec.rollback import turn

        with self.lock:
            try:
                while True:
                    self.intake.capturing = None
                    self.settle()  # what is told is what is live ...
                    self.intake.capturing = sys._getframe()
                    if not self.reordered and not any(section.dirty for section in self.sections.values()):
                        break  # ... and no signal handler has changed it since
                turn(self, wanted, record=record)
            finally:
                self.intake.capturing = None


_put_sections = Document.__dict__["sections"].__set__  # an assignment would call ``__setattr__``, where handlers run


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
