"""Turning the live state into another one, as rollback, undo and redo do.

Owns what becomes of live containers on the way. It compares bytes with bytes, so only what differs is touched, and
nothing is read that is the same. What always holds: what is in both states stays the same objects; a container that is
not in the new one is stale afterwards; whatever interrupts, the next capture finds out what is there.
"""

from __future__ import annotations

from typing import Any

from holdfast.codec.blocks import LIST, SET, VALUE, Opened, key_of, open_inline, opened, root_of
from holdfast.codec.containers import make_stale
from holdfast.codec.diff import item_hunks, tree_hunks
from holdfast.codec.state import Sections, State, differences, is_apart, section_digest
from holdfast.codec.told import Captured, captured
from holdfast.codec.tracked import GONE, RAW, Node, Section
from holdfast.codec.tree import Hunk, Tree
from holdfast.codec.wire import SCALARS


def turn(doc: Any, wanted: State, *, record: bool) -> None:
    """Make a document, of which everything is told, another state of its store; the caller has the lock."""
    before = doc.told.sections
    ops = differences(doc.told, wanted) if record else []
    turning = _Turning(doc, wanted)
    digests = wanted.digests()
    sections: dict[str, Section] = {}
    # All that has to be read is read before anything moves.
    plan = [(name, digest, turning.prepared(name, digest)) for name, digest in digests]
    for tree in wanted.trees:
        doc.told.trees.add(tree)  # the store may lack those that operations led to
    for name, digest, hunks in plan:
        if is_apart(name):
            continue  # nobody has it as an object
        section = doc.sections.get(name) or Section(name, dirty=False)
        sections[name] = section
        section.dirty = True  # until it is what it is to be
        was = before.get(name)
        if was is None or section_digest(was) != digest:
            turning.section(section, hunks)
    gone = [section for name, section in doc.sections.items() if name not in sections]
    told = doc.told
    truth: dict[str, Tree | bytes] = {}
    for name, _ in digests:
        was, now = before.get(name), wanted.sections[name]
        truth[name] = was if was is not None and isinstance(was, Tree) and was.root == section_digest(now) else now
    waiting: list[Captured] = []
    if record:
        waiting = told.unacknowledged
        for one in waiting:
            one.before = _read(doc.told, one.before, digests)
        if ops:
            waiting = told.added(captured(before, wanted.sections, ops, {}, turning.at_hand, wanted.fetch))
    doc.reordered = True
    for node, new in turning.turned:
        node._told, node._marks = new, None
    doc.sections = sections
    told.source, told.unacknowledged, told.sections = wanted.source, waiting, truth
    for section in sections.values():
        section.dirty = False
    for section in gone:
        turning.drop(section.value)
    turning.finish()
    for now in truth.values():
        if isinstance(now, Tree):
            now.take_over(wanted.fetch)


def _read(told: State, before: Sections, wanted: list[tuple[str, bytes]]) -> Sections:
    """What something that waits to be written comes after, read where it differs: another source would not find it."""
    state = State(told.source)
    state.trees = told.trees
    for name, tree in before.items():
        held = told.sections.get(name)
        state.sections[name] = held if held is not None and section_digest(held) == section_digest(tree) else tree
    for name, digest in wanted:
        was = state.sections.get(name)
        if was is not None and section_digest(was) != digest:
            state.section(name)
    return state.sections


class _Turning:
    def __init__(self, doc: Any, wanted: State) -> None:
        self.doc, self.wanted = doc, wanted
        self.gone: list[Any] = []  # containers that lost their place
        self.turned: list[tuple[Any, Tree | None]] = []  # those that changed, and what is told of them then
        self._held = {tree.root: tree for tree in wanted.trees}

    def at_hand(self, root: bytes) -> Tree | None:
        return self._held.get(root) or self.doc.told.trees.get(root)

    def prepared(self, name: str, digest: bytes) -> list[Hunk] | None:
        """What differs in a section that is loaded and of the same kind; None when it is read anew."""
        was = self.doc.told.sections.get(name)
        section = self.doc.sections.get(name)
        if was is None or section is None or section.value is GONE or section_digest(was) == digest:
            return None
        tree = self.wanted.section(name)
        node = section.value
        if not isinstance(was, Tree) or was.kind != tree.kind or tree.kind == VALUE or not isinstance(node, Node):
            return None
        if node._told is not was or len(node) != was.count or node._marks is not None:  # type: ignore[arg-type]
            return None  # C code changed it without telling
        return tree_hunks(was, tree, self.wanted.fetch)

    def section(self, section: Section, hunks: list[Hunk] | None) -> None:
        if hunks is None:
            old, section.value = section.value, GONE
            self.drop(old)
            return
        node = section.value
        tree = self.wanted.section(section.name)
        self._container(node, hunks, tree)

    # -- containers -------------------------------------------------------------------------------------------

    def _container(self, node: Any, hunks: list[Hunk], tree: Tree | None) -> None:
        """Change a container. It is in doubt until all is done, and so are those above it, which change, too."""
        node._doubt()
        self.turned.append((node, tree))
        kind = node._kind
        if kind == LIST:
            self._list(node, hunks)
        elif kind == SET:
            set.difference_update(node, [self.doc.decode(item) for hunk in hunks for item in hunk.old])
            set.update(node, [self.doc.decode(item) for hunk in hunks for item in hunk.items])
        else:
            self._dict(node, hunks)

    def _list(self, node: Any, hunks: list[Hunk]) -> None:
        """What is in both states stays the same object, wherever it stands; of the rest the one becomes the other."""
        wanted = {item for hunk in hunks for item in hunk.items}
        pool: dict[bytes, list[Any]] = {}
        spare: list[tuple[Any, bytes]] = []
        for hunk in hunks:
            for value, data in zip(list.__getitem__(node, slice(hunk.start, hunk.stop)), hunk.old, strict=True):
                if data in wanted:
                    pool.setdefault(data, []).append(value)
                else:
                    spare.append((value, data))
        made: list[list[Any]] = []
        for hunk in hunks:
            made.append([])
            for at, data in enumerate(hunk.items, hunk.start):
                if pool.get(data):
                    child = pool[data].pop(0)
                elif spare:
                    child = self._item(*spare.pop(0), data, node, at)
                else:
                    child = self._fresh(data, node, at)
                made[-1].append(child)
        for hunk, children in zip(reversed(hunks), reversed(made), strict=True):
            list.__setitem__(node, slice(hunk.start, hunk.stop), children)
        for value in [*(one for rest in pool.values() for one in rest), *(value for value, _ in spare)]:
            self.drop(value)

    def _dict(self, node: Any, hunks: list[Hunk]) -> None:
        keys = list(dict.keys(node))
        pool: dict[bytes, tuple[Any, bytes]] = {}  # by key: what was taken out, and may come back elsewhere
        for hunk in hunks:
            if not hunk.items:
                for name, item in zip(keys[hunk.start : hunk.stop], hunk.old, strict=True):
                    key = key_of(item)
                    pool[key] = dict.__getitem__(node, name), item[len(key) :]
                    dict.__delitem__(node, name)
        for hunk in hunks:
            if hunk.start == hunk.stop:
                for item in hunk.items:
                    key, data = key_of(item), item[len(key_of(item)) :]
                    name = self.doc.decode(key)
                    known = pool.pop(key, None)
                    child = self._item(*known, data, node, name) if known else self._fresh(data, node, name)
                    dict.__setitem__(node, name, child)
            elif hunk.items:
                for name, old, new in zip(keys[hunk.start : hunk.stop], hunk.old, hunk.items, strict=True):
                    size = len(key_of(old))
                    value = dict.__getitem__(node, name)
                    dict.__setitem__(node, name, self._item(value, old[size:], new[size:], node, name))
        for value, _ in pool.values():
            self.drop(value)

    def _item(self, value: Any, old: bytes, new: bytes, holder: Any, at: Any) -> Any:
        """What a child becomes: the same container where it is one in both states."""
        if old == new:
            return value
        if isinstance(value, Node):
            one, two = self._open(old, value), self._open(new, None)
            value._up, value._at = holder, at
            if one is not None and two is not None and one.kind == two.kind and len(value) == len(one.items):  # type: ignore[arg-type]
                root = root_of(new)
                tree = self._tree(root) if root is not None else None
                self._container(value, item_hunks(one.kind, one.pairs, two.pairs), tree)
                return value
        self.drop(value)
        return self._fresh(new, holder, at)

    def _open(self, data: bytes, node: Any) -> Opened | None:
        root = root_of(data)
        if root is None:
            return open_inline(data)
        tree = node._told if node is not None and node._told is not None else self._tree(root)
        return opened(tree.kind, tree.all(self.wanted.fetch))

    def _tree(self, root: bytes) -> Tree:
        return self.doc.told.trees.get(root) or self.wanted.tree(root)

    def _fresh(self, data: bytes, holder: Any, at: Any) -> Any:
        """A child that is new here. Whoever holds an iterator over the container must not see it raw."""
        value = self.doc.decode(data)
        if isinstance(value, Node):
            value._up, value._at = holder, at
        elif type(value) in RAW and not holder._raw:
            return self.doc.seen(value, holder, at)
        elif type(value) not in SCALARS and type(value) not in RAW:
            self.doc.watches.put(value, holder, at)
        return value

    def drop(self, value: Any) -> None:
        """A child has no place in the new state."""
        if isinstance(value, Node):
            value._up = None
            self.gone.append(value)
        elif value is not GONE and type(value) not in SCALARS and type(value) not in RAW:
            self.doc.watches.left(value)

    def finish(self) -> None:
        for node in self.gone:
            if node._up is None:
                make_stale(node)
