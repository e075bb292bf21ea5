"""Sections that are given whole, as LangGraph gives its channels: compared with what was told, never tracked.

Owns what is known of the objects that were given or handed out. Identity only finds the evidence: an object counts as
equal to its encoding only while the proof of what it refers to still holds; otherwise it is compared by its bytes. What
always holds: a section that was given has the digest, the nodes and the form that a ``Document`` with the same value
would have, and the operations of a capture lead from the one before to it; what is handed out was decoded, and nobody
else has it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from holdfast.codec import operations as op
from holdfast.codec.blocks import DICT, LIST, SET, VALUE, names_tree, open_inline
from holdfast.codec.diff import Differ, Relative, aligned, item_hunks, values_of
from holdfast.codec.document import plain
from holdfast.codec.operations import Operation
from holdfast.codec.proofs import Run, begins_with, run_of
from holdfast.codec.state import Reader, Source, State, changes, check_section
from holdfast.codec.told import Captured, Saved, Told, captured
from holdfast.codec.tracked import Node
from holdfast.codec.tree import Hunk, Tree, anchor, build
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.codec.wire import collector_paused
from holdfast.errors import Unencodable

# Objects that are proven together. All of them are proven each time, and most of them never change.
RUN_ITEMS = 64
# How often an item is kept decoded: a program still has the answer of one turn when it asks for the next.
DECODED_TWICE = 2
# How much evidence is kept by default, counted in bytes of the encodings that it stands for.
EVIDENCE_MAX_BYTES = 64 * 1024 * 1024


class Evidence:
    """The objects that stand for the items of a tree, and the proof that they have not changed since."""

    __slots__ = ("items", "keys", "made", "runs", "tree")

    def __init__(
        self,
        tree: Tree,
        items: list[Any],
        keys: list[Any] | None,
        runs: list[Run | None],
        made: list[list[Run]] | None = None,
    ) -> None:
        self.tree, self.items, self.keys = tree, items, keys
        self.runs = runs  # one for each RUN_ITEMS of them, in order; None where there is no proof
        self.made = made or []  # for each RUN_ITEMS, what was decoded of the first of them, newest last

    def unproven(self) -> set[int]:
        """Indexes of the runs whose objects may have changed."""
        return {number for number, run in enumerate(self.runs) if run is None or not run.unchanged()}


class Known:
    """Evidence for the newest sections that were given or handed out, by their digests. Its objects are held."""

    def __init__(self, limit: int = EVIDENCE_MAX_BYTES) -> None:
        self._limit, self._size = limit, 0
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes | None, tuple[Evidence, int]] = OrderedDict()

    def get(self, root: bytes) -> Evidence | None:
        with self._lock:
            found = self._known.get(root)
            if found is None:
                return None
            self._known.move_to_end(root)
            return found[0]

    def take(self, root: bytes) -> list[list[Run]]:
        """What was decoded of a section. It is not known any more: nobody else shall count its objects."""
        with self._lock:
            found = self._known.pop(root, None)
            if found is not None:
                self._size -= found[1]
        return found[0].made if found is not None else []

    def put(self, evidence: Evidence, before: bytes | None = None) -> None:
        """Keep evidence, in place of what is known of ``before``; what was not asked for longest goes."""
        size = evidence.tree.size * max(map(len, evidence.made), default=1)
        gone = []  # let go without the lock: there may be many objects in it
        with self._lock:
            gone += [self._known.pop(root) for root in {before, evidence.tree.root} if root in self._known]
            self._known[evidence.tree.root] = evidence, size
            self._size += size - sum([old for _, old in gone])
            while self._size > self._limit and self._known:
                gone.append(self._known.popitem(last=False)[1])
                self._size -= gone[-1][1]


class Assigned(Saved):
    """Sections as encodings. Each is read when it is first needed."""

    def __init__(
        self,
        registry: Registry,
        source: Source | None = None,
        known: Known | None = None,
        *,
        inert: bool | None = False,
    ) -> None:
        """``inert`` is as for ``Reader``."""
        self.lock = threading.RLock()
        self.registry = registry
        self.told = Told(source)
        self.known = known if known is not None else Known()
        self._reader = Reader(self.told, registry, inert=inert)
        self._away: dict[str, Tree] = {}  # sections that are gone and expected back

    def names(self) -> list[str]:
        """The sections, in order."""
        return list(self.told.sections)

    def __contains__(self, name: object) -> bool:
        return name in self.told.sections

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests, in order."""
        with self.lock:
            return self.told.digests()

    # -- giving -------------------------------------------------------------------------------------------------

    def assign(self, values: Mapping[str, Any], gone: Iterable[str] = (), returning: Collection[str] = ()) -> None:
        """Let sections have these values, and others be gone, all or none. Only what differs is recorded.

        ``returning`` are names that come and go. What was encoded of such a section is kept until it is back.
        """
        with self.lock:
            told, leaving = self.told, set(gone)
            work = _Giving(self)
            truth = {name: tree for name, tree in told.sections.items() if name not in leaving}
            for name, value in values.items():
                check_section(name)
                was = told.section(name) if name in truth else None
                try:
                    truth[name] = work.tree(value, was if was is not None else self._away.get(name))
                except Unencodable as error:
                    raise error.within(name) from None
            captured = work.captured(told.sections, truth)
            for name in leaving & set(told.sections):
                left = told.sections[name]
                if name in returning and isinstance(left, Tree) and not any(leaf.names for leaf in left.leaves):
                    # Its nodes may be removed from the store meanwhile, because no state needs them.
                    self._away[name] = left.as_new(told.fetch)
            for name in values:
                self._away.pop(name, None)
            waiting = told.added(captured) if captured.operations else told.unacknowledged
            told.unacknowledged, told.sections = waiting, truth  # no call in between
            for evidence, before in work.evidence:
                self.known.put(evidence, before)

    # -- reading ------------------------------------------------------------------------------------------------

    def value(self, name: str) -> Any:
        """What a section holds, decoded anew at each call. Raises KeyError."""
        return self.still().value(name)

    def read(self, tree: Tree) -> Any:
        """The value of a section."""
        return self._reader.content(tree)

    def still(self) -> Still:
        """The state as it is now, to be read later, whatever becomes of the document."""
        with self.lock:
            return Still(self, dict(self.told.sections))

    def do(self, operations: Iterable[Operation]) -> None:
        """Do the operations of another checkpoint, all or none. They are not recorded; ``digests`` can prove them."""
        with self.lock:
            self.told.do(operations)

    def hand_out(self, tree: Tree) -> Any:
        """The value of a section, and the evidence by which it is known when it is given back."""
        if tree.kind == LIST:
            return self._hand_out_list(tree)
        value, keys = self.read(tree), None
        objects = [value]
        if tree.kind == DICT:
            keys, objects = list(value), list(value.values())
        self.known.put(Evidence(tree, objects, keys, proofs(objects, self.registry)))
        return value

    def _hand_out_list(self, tree: Tree) -> list[Any]:
        """The items of a list. What was decoded for somebody who has let go of it unchanged need not be made anew."""
        value: list[Any] = []
        runs: list[Run | None] = []
        made = self.known.take(tree.root)
        made += [[] for _ in range(len(made) * RUN_ITEMS, tree.count, RUN_ITEMS)]
        with collector_paused():
            for number, known in enumerate(made):
                found, run = _claimed(known)
                start = number * RUN_ITEMS + len(found)
                stop = min((number + 1) * RUN_ITEMS, tree.count)
                value += found
                if start < stop:  # proven while the processor still has them at hand
                    some = self._reader.values(tree.part(start, stop, self.told.fetch))
                    value += some
                    more = run_of(some, self.registry)
                    run = more if run is None or more is None else run.joined(more)
                if run is not None:
                    known.append(run)
                    del known[:-DECODED_TWICE]
                runs.append(run)
        self.known.put(Evidence(tree, value.copy(), None, runs, made))
        return value

    # -- writing ------------------------------------------------------------------------------------------------

    def retell(self) -> None:
        """Whoever could not write one of these reads another from the store."""

    def capture(self, under_way: Collection[Captured] = ()) -> Captured:
        with self.lock:
            return self.told.waiting(under_way)


class Still:
    """The sections of one state. Each is read and decoded when it is asked for."""

    def __init__(self, document: Assigned, sections: dict[str, Tree | bytes]) -> None:
        self.names = list(sections)
        self._document = document
        self._sections = sections

    def value(self, name: str, *, returning: bool = False) -> Any:
        """What a section holds, and nobody else has. Raises KeyError.

        ``returning``: it is likely to be given back, and should then be known.
        """
        document, tree = self._document, self._sections[name]
        with document.lock:
            if isinstance(tree, bytes):
                now = document.told.sections.get(name)
                if now == tree:
                    tree = document.told.section(name)
                elif isinstance(now, Tree) and now.root == tree:
                    tree = now
                else:
                    tree = document.told.load(name, tree)[0]
                self._sections[name] = tree
            return document.hand_out(tree) if returning else document.read(tree)

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests, in order."""
        return [(name, one if isinstance(one, bytes) else one.root) for name, one in self._sections.items()]


def _claimed(known: list[Run]) -> tuple[list[Any], Run | None]:
    """Items that nobody has, of what was decoded, and their proof, which is taken out of it."""
    for run in known:
        found = run.claim()
        if found is not None:
            known.remove(run)
            return found, run
    return [], None


def proofs(objects: list[Any], registry: Registry, start: int = 0) -> list[Run | None]:
    """The proofs of objects as they are now, from one on."""
    return [run_of(objects[at : at + RUN_ITEMS], registry) for at in range(start, len(objects), RUN_ITEMS)]


class _Giving:
    """The work of one assignment. Nothing of the document changes by it."""

    def __init__(self, document: Assigned) -> None:
        self.document, self.registry = document, document.registry
        self.state: State = document.told
        self.fetch = document.told.fetch
        self.made: list[Tree] = []  # trees inside items, until leaves hold them
        self.chunks: dict[bytes, bytes] = {}
        self.evidence: list[tuple[Evidence, bytes | None]] = []  # each with the root of what it was before
        # What leads from one root to another, where that is known.
        self.ops: dict[tuple[bytes | None, bytes | None], list[Relative]] = {}

    def tree(self, value: Any, was: Tree | None) -> Tree:
        """What a section is with this value; ``was`` is what it was, now or some time ago."""
        if isinstance(value, Node):
            value = plain(value)
        kind = type(value)
        if kind is list:
            return self._sequence(LIST, value.copy(), None, was)
        if kind is dict:
            own = value.copy()
            return self._sequence(DICT, list(own.values()), list(own), was)
        return self._set(value, was) if kind is set else self._whole(value, was)

    def _sequence(self, kind: bytes, items: list[Any], keys: list[Any] | None, was: Tree | None) -> Tree:
        """A list, or a dict with its keys."""
        if was is None or was.kind != kind:
            runs = proofs(items, self.registry)
            tree = self._settled(build(kind, self._encoded(items, keys, range(len(items)))))
            return self._known(tree, items, keys, runs, was)
        known = self.document.known.get(was.root)
        if known is None or (known.keys is None) is not (keys is None):
            return self._compared(kind, items, keys, was)
        return self._changed(kind, items, keys, was, known)

    def _compared(self, kind: bytes, items: list[Any], keys: list[Any] | None, was: Tree) -> Tree:
        """What became of a section, by its bytes alone."""
        runs = proofs(items, self.registry)  # first: what changes meanwhile shows next time
        new = self._encoded(items, keys, range(len(items)))
        tree = self._settled(was.apply(item_hunks(kind, was.all(self.fetch), new), self.fetch))
        return self._known(tree, items, keys, runs, was)

    def _changed(self, kind: bytes, items: list[Any], keys: list[Any] | None, was: Tree, known: Evidence) -> Tree:
        """What became of a section of which the objects are known."""
        size = len(known.items)
        if keys is not None and (len(keys) < size or not _same_keys(keys[:size], known.keys or [])):
            return self._compared(kind, items, keys, was)
        unproven = known.unproven()
        spans: list[tuple[int, int, int, int]] = []
        first = size  # items before this are the same objects
        if len(items) < size or not begins_with(items, known.items):
            if keys is None:
                found = aligned([id(item) for item in known.items], [id(item) for item in items])  # type: ignore[misc]
                spans = [tuple(one) for one in found]  # type: ignore[misc]
            else:  # a key keeps its place, whatever its value is now
                spans = [(at, at + 1, at, at + 1) for at in range(size) if items[at] is not known.items[at]]
            first = spans[0][0] if spans else size
        if (keys is not None or first == size) and len(items) > size:
            spans.append((size, size, size, len(items)))
        doubtful = [at for number in unproven for at in range(number * RUN_ITEMS, min((number + 1) * RUN_ITEMS, size))]
        keep = first // RUN_ITEMS  # runs that stand for the same objects in the same places
        runs = known.runs[:keep]
        last = known.runs[keep] if first == size and keep < len(known.runs) and keep not in unproven else None
        if last is not None and (more := run_of(items[size : (keep + 1) * RUN_ITEMS], self.registry)) is not None:
            runs.append(last.joined(more))  # one that is not full; what is in it is proven, only new objects are not
        runs += proofs(items, self.registry, len(runs) * RUN_ITEMS)
        for number in unproven:
            if number < keep:
                runs[number] = run_of(items[number * RUN_ITEMS : (number + 1) * RUN_ITEMS], self.registry)
        hunks = self._hunks(kind, items, keys, was, spans, doubtful)
        appended = hunks[0].items if kind == LIST and len(hunks) == 1 and hunks[0].start == size else []
        tree = was.grown(appended) if appended and not any(map(names_tree, appended)) else None
        if tree is None:
            tree = self._settled(was.apply(hunks, self.fetch))
        if appended:
            self.ops[was.root, tree.root] = [(op.SPLICE, (), (size, 0, appended))]
        same = hunks[0].start if hunks else size
        made = [
            [run for run in some if number * RUN_ITEMS + len(run.items) <= same]
            for number, some in enumerate(known.made[: len(runs)])
        ]
        return self._known(tree, items, keys, runs, was, made)

    def _hunks(
        self,
        kind: bytes,
        items: list[Any],
        keys: list[Any] | None,
        was: Tree,
        spans: Sequence[tuple[int, int, int, int]],
        doubtful: list[int],
    ) -> list[Hunk]:
        found: list[Hunk] = []
        shift = 0
        gone = {at for start, stop, _, _ in spans for at in range(start, stop)}
        moves: list[tuple[int, int]] = []  # old places behind which indexes differ by so much
        for start, stop, at, to in spans:
            new = self._encoded(items, keys, range(at, to))
            if start == stop == was.count and kind == LIST:
                found.append(Hunk(start, stop, new))
                continue
            inner = item_hunks(kind, was.part(start, stop, self.fetch), new)
            found += [Hunk(start + one.start, start + one.stop, one.items, one.old) for one in inner]
            shift = to - stop
            moves.append((stop, shift))
        for at in doubtful:
            if at in gone:
                continue
            now = at + next((shift for stop, shift in reversed(moves) if at >= stop), 0)
            old = was.part(at, at + 1, self.fetch)
            new = self._encoded(items, keys, range(now, now + 1), old[0])
            if new != old:
                found.append(Hunk(at, at + 1, new, old))
        found.sort()
        return found

    def _encoded(self, items: list[Any], keys: list[Any] | None, places: range, old: bytes = b"") -> list[bytes]:
        """Items as a tree holds them. ``old`` is what the only one of them was."""
        out: list[bytes] = []
        at: Any = 0
        try:
            for at in places:
                key = b"" if keys is None else encode(keys[at], self.registry)
                data = encode(items[at], self.registry, depth=1)
                out.append(key + self.state.fold(data, self.made, self.chunks, old[len(key) :]))
        except Unencodable as error:
            raise error.within(at if keys is None else keys[at]) from None
        return out

    def _set(self, value: Any, was: Tree | None) -> Tree:
        inner = open_inline(encode(value, self.registry))
        items = inner.items if inner is not None else []
        if was is None or was.kind != SET:
            return self._settled(build(SET, items))
        return self._settled(was.apply(item_hunks(SET, was.all(self.fetch), items), self.fetch))

    def _whole(self, value: Any, was: Tree | None) -> Tree:
        before = was if was is not None and was.kind == VALUE else None
        lasting = type(value) is not tuple  # one of those is hardly ever given twice
        known = self.document.known.get(before.root) if before is not None and lasting else None
        if before is not None and known is not None and known.items[0] is value and not known.unproven():
            return before
        runs = proofs([value], self.registry) if lasting else []
        data = self.state.fold(encode(value, self.registry), self.made, self.chunks)
        tree = build(VALUE, [data])
        if before is not None and tree.root == before.root:
            tree = before
        else:
            self._settled(tree)
            if before is not None:
                self.ops[before.root, tree.root] = [(op.SET, (), (data,))]
        return self._known(tree, [value], None, runs, was) if lasting else tree

    def _settled(self, tree: Tree) -> Tree:
        held = {one.root: one for one in self.made}
        anchor(tree.fresh, lambda root: held.get(root) or self.state.trees.get(root))
        tree.fresh = ()
        return tree

    def _known(
        self,
        tree: Tree,
        items: list[Any],
        keys: list[Any] | None,
        runs: list[Run | None],
        was: Tree | None,
        made: list[list[Run]] | None = None,
    ) -> Tree:
        """Note what stands for a tree. A proof that does not hold any more, after the encoding, is none."""
        self.evidence.append((Evidence(tree, items, keys, runs, made), was.root if was is not None else None))
        return tree

    def captured(self, before: Mapping[str, Tree | bytes], truth: dict[str, Tree | bytes]) -> Captured:
        """What leads from one state to the other."""
        held = {tree.root: tree for tree in [*self.made, *(one for one in truth.values() if isinstance(one, Tree))]}

        def at_hand(root: bytes) -> Tree | None:
            return held.get(root) or self.state.trees.get(root)

        differ = Differ(at_hand, self.fetch)
        differ.known.update(self.ops)
        ops = changes(before, truth, differ, self.state)
        found = captured(dict(before), truth, ops, self.chunks, at_hand, self.fetch)
        if self.chunks:  # those of values that turned out to be what they were are stored
            written = b"".join([data for code, _, args in ops for data in values_of(code, args)])
            written += b"".join(found.nodes.values())
            found.chunks = {digest: chunk for digest, chunk in self.chunks.items() if digest in written}
        return found


_PLAIN_KEYS = frozenset({str, bytes, int, bool, type(None)})


def _same_keys(one: list[Any], other: list[Any]) -> bool:
    """Whether keys are surely the same: ``1``, ``1.0`` and ``True`` are one key to Python, ``0.0`` and ``-0.0`` too."""
    return one == other and all(
        a is b or (type(a) is type(b) and type(a) in _PLAIN_KEYS) for a, b in zip(one, other, strict=True)
    )
