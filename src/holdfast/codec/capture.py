"""One capture: from marks to bytes, and from two trees of bytes to operations and digests.

Owns the encoding of what is marked and its comparison with what was told. Everything is worked out first; the document
makes it the truth in the end, by one assignment. What always holds: operations, nodes and digests come from the same
hunks, so they cannot disagree; a capture that fails has changed nothing but marks, and these say more than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from ormsgpack import Ext, Fragment, packb

from holdfast.codec import blocks, wire
from holdfast.codec.blocks import BULK_MIN_BYTES, DICT, LIST, SET, VALUE, Leaf, big, close, key_of, names_tree, opened
from holdfast.codec.containers import TrackedSet, wrap
from holdfast.codec.diff import Differ, item_hunks
from holdfast.codec.state import bulk, changes, in_order, is_apart
from holdfast.codec.told import Captured, captured
from holdfast.codec.tracked import GONE, RAW, Node, Section
from holdfast.codec.tree import Hunk, Tree, anchor, build, set_hunks
from holdfast.codec.values import encode, is_immutable
from holdfast.codec.wire import OPTION, SCALARS, array_of, is_utf8
from holdfast.errors import Unencodable


class Entry:
    """A container with a tree, in this capture. ``inline``: it has become small enough to stand in its parent."""

    __slots__ = ("after", "before", "inline", "node")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.before = self.after = node._told
        self.inline: bytes | None = None


class Capture:
    """The work of one capture. ``doc`` is the document."""

    def __init__(self, doc: Any) -> None:
        self.doc = doc
        self.fetch = doc.told.fetch
        self.planned: dict[int, Entry] = {}
        self.trees: dict[bytes, Tree] = {}  # those of this capture, by their roots
        self.chunks: dict[bytes, bytes] = {}
        self.cut: list[tuple[Any, bytes]] = []  # values that are in these chunks
        self.failure: BaseException | None = None
        self.complete = False  # whether it has become the truth
        made, told = self.trees, doc.told

        def at_hand(root: bytes) -> Tree | None:
            """A tree by its root, if it is at hand: what is not is not looked into, but set whole."""
            return made.get(root) or told.trees.get(root)

        self.at_hand = at_hand  # no method, which would hold this, and keep all of it until garbage is collected
        self.differ = Differ(at_hand, self.fetch)

    # -- the whole state --------------------------------------------------------------------------------------

    def found(self) -> Captured:
        """Work out what differs, and make it the truth."""
        doc, told = self.doc, self.doc.told
        before, sections = told.sections, doc.sections
        dirty = [section for section in sections.values() if section.dirty]
        if not dirty and not doc.reordered:
            self.complete = True
            return Captured(before)
        truth = before.copy()
        if doc.reordered:
            kept, _ = in_order(before, sections)
            truth = {name: before[name] if name in kept else b"" for name in sections}
            truth.update([(name, tree) for name, tree in before.items() if is_apart(name)])
            dirty = [section for section in sections.values() if section.dirty or section.name not in kept]
        for section in dirty:
            truth[section.name] = now = self._section(section, before.get(section.name))
            self.trees[now.root] = now
        ops = changes(before, truth, self.differ, told)
        made = captured(before, truth, ops, self.chunks, self.at_hand, self.fetch)
        waiting = told.added(made) if ops else told.unacknowledged
        for entry in self.planned.values():
            entry.node._told = entry.after if entry.inline is None else None
            told.trees.add(entry.after)
        for value, packed in self.cut:
            doc.bulk.keep(value, packed)
        for section in dirty:
            section.dirty = False
        doc.reordered = False
        told.unacknowledged, told.sections = waiting, truth  # no call in between: an interrupt cannot part them
        self.complete = True
        return made

    def recover(self) -> None:
        """It was cut short: as if it had not been. Everything that it looked at is in doubt."""
        if not self.complete:
            for section in self.doc.sections.values():
                section.dirty = section.dirty or section.value is not GONE
            self.doc.reordered = True
            for entry in self.planned.values():
                entry.node._told = entry.before
            for entry in self.planned.values():
                entry.node._mark_all()
        self.doc.unfinished = None

    def _section(self, section: Section, was: Tree | bytes | None) -> Tree:
        """What a section is now."""
        doc = self.doc
        if section.value is GONE:
            doc.load(section)
        value = section.value
        if not isinstance(value, Node):
            data = self._packed(value)
            if type(value) in SCALARS and len(data) >= BULK_MIN_BYTES:
                data = self._bulk(value, data)
            return build(VALUE, [data])
        if value._up is not section:
            if value._up is not None and doc.is_attached(value):  # an interrupt left it in two places
                value = section.value = doc.intake.copied(value, section, None)
            value._up = section
        told = was if isinstance(was, Tree) and was.kind == value._kind else None
        return self.node(value, told)

    # -- containers with a tree -------------------------------------------------------------------------------

    def node(self, node: Any, told: Tree | None) -> Tree:
        """What a container with a tree is now; ``told`` is what it was, None if that was nothing."""
        entry = self.planned.get(id(node))
        if entry is not None:
            return entry.after  # type: ignore[no-any-return]
        entry = self.planned[id(node)] = Entry(node)
        marks, node._marks = node._marks, None
        if told is None:
            new = build(node._kind, self._all(node))
        else:
            self.trees[told.root] = told
            if marks is None and told is node._told:
                return told  # type: ignore[no-any-return]
            if told is not node._told:  # it stands where another one was told: its marks say nothing about that
                marks = None
            found = self._hunks(node, marks, told)
            new = told.apply(found, self.fetch)
            if new is not told:
                self.differ.known[told.root, new.root] = self.differ.operations(told.kind, told.count, new.count, found)
        entry.after = new = self._settled(new)
        return new

    def _settled(self, tree: Tree) -> Tree:
        """Close a tree that was just made."""
        anchor(tree.fresh, self.at_hand)
        tree.fresh = ()
        self.trees[tree.root] = tree
        return tree

    def _all(self, node: Any) -> list[bytes]:
        """All items of a container as a tree holds them."""
        if node._kind == SET:
            return sorted([self._flat(item) for item in set.__iter__(node)])
        self._part(node)
        if node._kind == LIST:
            return self._items(node, 0, len(node))
        return [self._pair(node, key) for key in list(dict.keys(node))]

    def _part(self, node: Any) -> None:
        """An interrupt in the middle of a change may have left one object in two places of a container."""
        seen: set[int] = set()
        for at, child in list(node._pairs()):
            if type(child) not in SCALARS:
                if id(child) in seen and (isinstance(child, Node) or not is_immutable(child)):
                    node._swap(at, self.doc.intake.copied(child, node, at))
                seen.add(id(child))

    def _hunks(self, node: Any, marks: Any, told: Tree) -> list[Hunk]:
        kind = node._kind
        if kind == LIST:
            return self._list_hunks(node, marks, told)
        found = None
        if marks is not None and not marks.all:
            found = self._dict_hunks(node, marks, told) if kind == DICT else self._set_hunks(node, marks, told)
        return found if found is not None else item_hunks(kind, told.all(self.fetch), self._all(node))

    def _list_hunks(self, node: Any, marks: Any, told: Tree) -> list[Hunk]:
        if marks is None or not marks.fits(len(node), told.count):
            self._part(node)
            return item_hunks(LIST, told.all(self.fetch), self._items(node, 0, len(node)))
        found: list[Hunk] = []
        for start, stop, old_start, old_stop in marks.regions:
            old = told.part(old_start, old_stop, self.fetch)
            datas: Sequence[bytes | None] = ()
            if marks.carried:  # what was told of children that have only changed places since
                here = map(id, list.__getitem__(node, slice(start, stop)))
                datas = [
                    old[place - old_start] if old_start <= place < old_stop else None
                    for place in map(marks.carried.get, here, repeat(-1))
                ]
            elif stop == len(node) and len(marks.tail) <= stop - start:
                datas = marks.tail
            new = self._items(node, start, stop, datas)
            if old_start == old_stop:
                if new:
                    found.append(Hunk(old_start, old_stop, new))
                continue
            inner = item_hunks(LIST, old, new)
            found += [Hunk(old_start + one.start, old_start + one.stop, one.items, one.old) for one in inner]
        if marks.kids:
            for at in set(node._find(marks.kids)):
                place = marks.told_index(at)
                if place >= 0:
                    new, old = self._items(node, at, at + 1), told.part(place, place + 1, self.fetch)
                    if new != old:
                        found.append(Hunk(place, place + 1, new, old))
            found.sort()
        return found

    def _dict_hunks(self, node: Any, marks: Any, told: Tree) -> list[Hunk] | None:
        """What became of the marked keys; None when the marks do not explain the dict."""
        found: list[Hunk] = []
        gone: list[int] = []
        fresh: set[Any] = set()
        for key, away in marks.keys.items():
            place = self._place(told, key)
            if place is None:
                return None
            here = key in node
            if place >= 0 and (away or not here):
                gone.append(place)
            if here and (away or place < 0):
                fresh.add(key)
            elif here:
                (old,) = told.part(place, place + 1, self.fetch)
                new = key_of(old) + self._value(node, key, marks.given.get(key))
                if new != old:
                    found.append(Hunk(place, place + 1, [new], [old]))
        if told.count - len(gone) + len(fresh) != len(node):
            return None
        found += [Hunk(place, place + 1, [], told.part(place, place + 1, self.fetch)) for place in gone]
        found.sort()
        if fresh:
            last = node._last(len(fresh))
            if not fresh.issuperset(last):
                return None
            found.append(Hunk(told.count, told.count, [self._pair(node, key, marks.given.get(key)) for key in last]))
        return found

    def _place(self, told: Tree, key: Any) -> int | None:
        """Where a key was told to be, -1 if it was not; None if that cannot be said.

        ``1``, ``1.0`` and ``True`` are one key to a dict: it has the form in which it came first.
        """
        forms = _forms(key)
        if forms is None:
            place = told.place(self._flat(key), self.fetch)
            return place if place >= 0 else None
        for form in forms:
            place = told.place(self._flat(form), self.fetch)
            if place >= 0:
                return place
        return -1

    def _set_hunks(self, node: Any, marks: Any, told: Tree) -> list[Hunk] | None:
        gone: list[bytes] = []
        come: list[bytes] = []
        for item, held in marks.items.items():
            forms = _forms(item)
            if forms is None or (held is not GONE) is not (item in node):
                return None
            wanted = self._flat(held) if held is not GONE else None
            for form in forms:
                data = self._flat(form)
                if data == wanted:
                    continue
                if told.rank(data, self.fetch)[1]:
                    gone.append(data)
            if wanted is not None:
                come.append(wanted)
        found = set_hunks(told, gone, come, self.fetch)
        if found is None or told.count + sum([len(one.items) - len(one.old) for one in found]) != len(node):
            return None
        return found

    # -- items ------------------------------------------------------------------------------------------------

    def _items(self, node: Any, start: int, stop: int, tail: Any = ()) -> list[bytes]:
        """Encodings of a list's items; ``tail``: what the last of them are if they have not changed since."""
        out: list[bytes] = []
        values = list.__getitem__(node, slice(start, stop))
        first = len(values) - len(tail)
        known = self.doc.watches.known
        for at, value in enumerate(values):
            data = tail[at - first] if at >= first else None
            if isinstance(value, Node):
                if value._up is not node:
                    value = self._astray(node, start + at, value)  # noqa: PLW2901 - what stands there now
                    data = None
                elif value._marks is not None:
                    data = None  # it has changed since
            elif data is not None and type(value) not in SCALARS and id(value) in known:
                data = None
            out.append(data if data is not None else self._encoding(node, start + at, value))
        return out

    def _value(self, node: Any, key: Any, data: bytes | None = None) -> bytes:
        """Encoding of a dict's value; ``data``: what it was when it was put in."""
        value = dict.__getitem__(node, key)
        if isinstance(value, Node):
            if value._up is not node:
                value = self._astray(node, key, value)
                data = None
            elif value._marks is not None:
                data = None
        elif data is not None and type(value) not in SCALARS and id(value) in self.doc.watches.known:
            data = None
        return data if data is not None else self._encoding(node, key, value)

    def _pair(self, node: Any, key: Any, data: bytes | None = None) -> bytes:
        return self._flat(key) + self._value(node, key, data)

    def _astray(self, node: Any, at: Any, child: Any) -> Any:
        """A child that has another home, or none: an interrupt or C code put it here. What is here is what is saved."""
        if child._up is None or not self.doc.is_attached(child):
            child._up, child._at = node, at
            return child
        copy = self.doc.intake.copied(child, node, at)
        node._swap(at, copy)
        return copy

    def _encoding(self, holder: Any, at: Any, value: Any) -> bytes:
        """How a value stands in its container."""
        known = self.doc.bulk.get(value)
        if known is not None:
            return known  # type: ignore[no-any-return]
        data = self._packed(value)
        if len(data) <= blocks.INLINE_MAX_BYTES:
            return data
        if isinstance(value, Node):
            return self._large(value)
        if type(value) in RAW:
            value = wrap(value, self.doc, holder, at)
            holder._swap(at, value)
            return self._large(value)
        return self._bulk(value, data) if type(value) in SCALARS and len(data) >= BULK_MIN_BYTES else data

    def _large(self, node: Any) -> bytes:
        """A container that may be too long for its parent."""
        if node._told is not None or id(node) in self.planned:
            return self._named(node)
        items = self._all(node)  # what is too long in there gets trees of its own
        data = close(*opened(node._kind, items))
        if len(data) <= blocks.INLINE_MAX_BYTES:
            node._marks = None
            return data
        entry = self.planned[id(node)] = Entry(node)
        node._marks = None
        entry.after = tree = self._settled(build(node._kind, items))
        return big(tree.root)

    def _named(self, node: Any) -> bytes:
        """How a container with a tree stands in its parent: by its root, unless it has become small."""
        tree = self.node(node, node._told)
        entry = self.planned[id(node)]
        if entry.inline is None:
            entry.inline = tree.inline(self.fetch)
        return big(tree.root) if entry.inline is None else entry.inline

    # -- bytes ------------------------------------------------------------------------------------------------

    def _packed(self, value: Any) -> bytes:
        try:
            return packb(value, self._hook, OPTION)
        except TypeError:
            # The library refused something that it does not write as we do, or the hook failed: it makes a TypeError
            # of whatever is raised there, interrupts included.
            if self.failure is not None:
                raise self.failure from None
        return self._slowly(value)

    def _flat(self, value: Any) -> bytes:
        """Encoding of a key, or of a set's item: these are never split, nor in chunks."""
        if type(value) in SCALARS:
            try:
                return packb(value, None, OPTION)
            except TypeError:  # a lone surrogate, or an integer without end
                pass
        return encode(value, self.doc.registry)

    def _hook(self, value: Any) -> Any:
        try:
            return self._lowered(value)
        except BaseException as error:
            self.failure = error
            raise

    def _lowered(self, value: Any) -> Any:
        if isinstance(value, Node):
            if value._told is not None or id(value) in self.planned:
                return Fragment(self._named(value))
            marks, value._marks = value._marks, None
            if isinstance(value, TrackedSet):
                return Ext(wire.SET, array_of(sorted([self._flat(item) for item in set.__iter__(value)])))
            if marks is not None:
                for at, child in list(value._pairs()):
                    if isinstance(child, Node) and child._up is not value:
                        self._astray(value, at, child)
            return value._peek()
        known = self.doc.bulk.get(value)
        if known is not None:
            return Fragment(known)
        try:
            data = self.doc.encode(value)
        except Unencodable as error:
            watch = self.doc.watches.known.get(id(value))
            if watch is None:
                raise
            holder = watch.holder
            raise error.within(
                *((holder.name,) if isinstance(holder, Section) else (*holder._path(), watch.at))
            ) from None
        return Fragment(self._bulk(value, data) if len(data) >= BULK_MIN_BYTES else data)

    def _slowly(self, value: Any) -> bytes:
        kind = type(value)
        if kind is list:
            return array_of([self._packed(item) for item in value])
        if kind is dict:
            items = [(key, self._packed(item)) for key, item in value.items()]
            if all(type(key) is str and is_utf8(key) for key, _ in items):
                return packb({key: Fragment(data) for key, data in items})
            return packb(Ext(wire.DICT, array_of([part for key, data in items for part in (self._flat(key), data)])))
        if kind in SCALARS:
            return encode(value, self.doc.registry)
        made = self._lowered(value)
        return self._slowly(made) if type(made) in RAW else packb(made)

    def _bulk(self, value: Any, data: bytes) -> bytes:
        """A long encoding goes into chunks. Those of values that cannot change are cut once."""
        packed = bulk(data, self.chunks)
        self.cut.append((value, packed))
        return packed


def lacking(node: Any, found: list[tuple[Tree, Leaf]]) -> None:
    """Add leaves whose bytes were let go and a capture will need: of a marked container, and of those in it."""
    tree, marks = node._told, node._marks
    if marks is None:
        return
    if tree is None or marks.all or node._kind != LIST or not marks.fits(len(node), tree.count):
        children = [child for _, child in node._pairs()]
        spans = [(0, tree.count)] if tree is not None else []
    else:
        children = [child for child, _ in marks.kids.values() if isinstance(child, Node)]
        places = [marks.told_index(child._at) for child in children if type(child._at) is int]
        spans = [(place, place + 1) for place in places if 0 <= place < tree.count]
        spans = sorted([*spans, *[(region[2], region[3]) for region in marks.regions if region[2] < region[3]]])
    if tree is not None:
        found += [(tree, leaf) for leaf in tree.lacking(spans)]
    for child in children:
        if isinstance(child, Node):
            lacking(child, found)


def appended_items(node: Any, told: Tree) -> list[bytes] | None:
    """The encodings of items that came at the end of a list, where marks say that nothing else may differ."""
    marks = node._marks
    if marks is None or marks is True or marks.all or marks.kids or len(marks.regions) != 1 or node._told is not told:
        return None
    start, stop, old_start, old_stop = marks.regions[0]
    tail, values = marks.tail, list.__getitem__(node, slice(start, None))
    if not start == old_start == old_stop == told.count or not stop - start == len(tail) == len(values):
        return None
    found: list[bytes] = []
    for at, value in enumerate(values):
        data = tail[at]
        if data is None:
            if type(value) not in SCALARS:
                return None
            try:
                data = packb(value, None, OPTION)
            except TypeError:
                return None
        elif isinstance(value, Node) and (value._up is not node or value._marks is not None):
            return None
        if len(data) > blocks.INLINE_MAX_BYTES or names_tree(data):
            return None
        found.append(data)
    return found


_SIMPLE = frozenset({str, bytes, type(None)})


def _forms(item: Any) -> list[Any] | None:
    """The values that dicts and sets hold for equal to this one; None when they cannot be listed."""
    kind = type(item)
    if kind in _SIMPLE:
        return [item]
    if kind is tuple:
        return [item] if all(len(_forms(part) or ()) == 1 for part in item) else None
    if kind not in (int, bool, float):
        return None
    if kind is float and not item.is_integer():
        return [item]
    forms: list[Any] = [int(item)]
    if item in (0, 1):
        forms.append(bool(item))
    try:
        if float(item) == item:
            forms.append(float(item))
            if item == 0:
                forms.append(-0.0)
    except OverflowError:
        pass
    return forms
