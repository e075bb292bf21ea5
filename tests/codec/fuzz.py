"""Random programs over a document, against a plain model of it.

After every step what is live is compared with the model. After every capture the checkpoint is read back by byte replay
and by a fresh document, and both must give the model and the recorded digests. Steps: all methods that change
something, slices, sorting, moving, aliasing, values that are refused, instances that are read, held and changed, C code
past the methods, exceptions at any line of a change or a capture, sealing, reloading, going back, undoing.

    python -m tests.codec.fuzz SECONDS [SEED] [--steps N]
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import heapq
import random
import sys
import time
import warnings
from typing import Any

import pydantic

from holdfast.codec.atoms import Bytes as OwnBytes
from holdfast.codec.containers import LIVE
from holdfast.codec.document import Document
from holdfast.codec.state import State
from holdfast.codec.tracked import GONE, RAW, Node
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.codec.wire import SCALARS
from holdfast.errors import DetachedChange, HoldfastError, StoreBusy
from tests.codec.memory import Memory, Revision
from tests.limits import limits
from tests.strikes import alone

TYPES = Registry()
LOG = False


@dataclasses.dataclass
class Note:
    text: str
    tags: list = dataclasses.field(default_factory=list)
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any
    b: Any = None


class Model(pydantic.BaseModel):
    name: str
    anything: Any = None
    extra: dict = {}


for _cls in (Note, Point, Slotted, Model):
    TYPES.register(_cls)
DICTS, LISTS, SETS = ({plain, *(kind for kind in LIVE if issubclass(kind, plain))} for plain in (dict, list, set))
EXACT = SCALARS - {float}  # of these, equal ones of one type are the same
INSTANCES = (Note, Slotted, Model, OwnBytes, bytearray, collections.deque)
CONTAINERS = (dict, list, set)

# Nodes so small that a few items make a tree of several levels.
SMALL = {
    "INLINE_MAX_BYTES": 200,
    "LEAF_MIN_BYTES": 60,
    "LEAF_TARGET_BYTES": 200,
    "LEAF_MAX_BYTES": 900,
    "LEAF_MAX_ITEMS": 12,
    "INDEX_MIN_ENTRIES": 2,
    "INDEX_MAX_ENTRIES": 8,
    "INDEX_CUT_BELOW": 1 << 30,
    "BULK_MIN_BYTES": 1500,
}


def mirror(value):
    """A plain copy of a value, or of what a document holds, past its methods."""
    if isinstance(value, Document):
        return {name: mirror(value.raw_section(name)) for name in value.sections}
    if isinstance(value, dict) and type(value) is not collections.OrderedDict:
        return {
            k: v if type(v) in SCALARS else mirror(v) for k, v in zip(dict.keys(value), dict.values(value), strict=True)
        }
    if isinstance(value, list):
        return [v if type(v) in SCALARS else mirror(v) for v in list.__iter__(value)]
    if isinstance(value, set):
        return set(value)
    return copy.deepcopy(value)


def same(value, model):
    """Whether values are equal, types and order included. Of a document, what is live in it.

    That two are the same is seen fast. That they are not, and of what is rare anyway, their encodings say.
    """
    if isinstance(value, Document):
        value = {name: value.raw_section(name) for name in value.sections}
    return alike(value, model) or encode(value, TYPES) == encode(model, TYPES)


def alike(value, model):
    kind = type(model)
    if kind is dict and type(value) in DICTS:
        return alike_items([*dict.keys(value)], [*model]) and alike_items([*dict.values(value)], [*model.values()])
    if kind is list and type(value) in LISTS:
        return alike_items([*list.__iter__(value)], model)
    if kind is set and type(value) in SETS and EXACT.issuperset(map(type, model)):
        items = {(type(item), item) for item in value}
        return len(value) == len(model) and items == {(type(item), item) for item in model}
    return encode(value, TYPES) == encode(model, TYPES)


def alike_items(values, models):
    kinds = [*map(type, models)]
    if EXACT.issuperset(kinds):
        return kinds == [*map(type, values)] and values == models
    return len(values) == len(models) and all(
        (type(value) is kind and value == model) if kind in EXACT else alike(value, model)
        for value, model, kind in zip(values, models, kinds, strict=True)
    )


def weight(item):
    for number, kind in enumerate((dict, list, set, str, bytes, tuple, bool, int, float)):
        if isinstance(item, kind):
            return number, len(item) if hasattr(item, "__len__") else 0
    return 99, 0


class World:
    """A document, its model, and what the program holds of it."""

    slept = 0

    def __init__(self, rng, types=TYPES, *, small=False):
        self.r = rng
        self.small = small
        self.types = types
        self.memory = Memory(types)
        self.doc = Document(types, self.memory.head)
        self.model: dict[str, Any] = {}
        self.handles: list[Any] = []  # containers
        self.held: list[Any] = []  # instances, or something inside them with the way there
        self.saved: list[tuple[Any, Any]] = []
        self.loosely = False

    def choose(self, n):
        return self.r.randrange(n)

    def pick(self, items):
        return items[self.r.randrange(len(items))]

    # -- values -------------------------------------------------------------------------------------------------

    def scalar(self):
        numbers = (None, True, 0, 1, -7, 2**63, 2**70, 1.0, 1.5, -0.0)
        texts = ("", "text", "x" * 90, b"\x00\xff", "\ud800", "y" * self.choose(400), "z" * self.choose(4000))
        return self.pick((*numbers, *texts, (1, "a"), Point(1, 2), frozenset({1, "b"}), ("deep", (1, (2,)))))

    def key(self):
        return self.pick(
            ("a", "b", "c", "a b", 1, (1, "k"), None, "\ud800", 2.5, b"k", True, ("s", "t"), Point(1), 1.0)
        )

    def value(self, depth=3):
        kind = self.choose(24)
        if depth <= 0 or kind < 7:
            return self.scalar()
        if kind < 10:
            return [self.value(depth - 1) for _ in range(self.choose(5))]
        if kind < 13:
            return {self.key(): self.value(depth - 1) for _ in range(self.choose(5))}
        if kind == 13:
            return set(range(self.choose(5))) | {"s"}
        if 14 <= kind < 18:
            return self.instance()
        if kind == 18:
            return (1, [self.scalar()])
        if kind == 19:
            return bytearray(b"abc")
        size = self.choose(6)
        if size == 0:
            return [f"{i} " + "y" * 40 for i in self.many(10, 30)]
        if size == 1:
            return {f"k{i}": "z" * 30 for i in self.many(10, 40)}
        if size == 2:
            return [*self.many(100, 1)] * (1 + self.choose(5))
        if size == 3:
            return {*self.many(100, 100)}
        if size == 4:
            return [{"role": "user", "content": "m" * self.choose(80), "parts": [i]} for i in self.many(5, 20)]
        return {i: {"n": [i] * 5, "t": "t" * 15} for i in self.many(6, 30)}

    def many(self, least, more):
        """So many that they make a tree. With small nodes, a third makes one as deep."""
        if self.small:
            least, more = -(-least // 3), -(-more // 3)
        return range(least + self.choose(more))

    def instance(self):
        return self.pick(
            (
                lambda: Note("note", [1]),
                lambda: Model(name="m", anything=[1]),
                lambda: Slotted(1, {"k": []}),
                lambda: collections.deque([1, [2]]),
                lambda: Note("outer", [], Note("inner")),
            )
        )()

    # -- the two sides ------------------------------------------------------------------------------------------

    def places(self):
        found = []

        def walk(path, value):
            if len(found) > 80:
                return
            found.append((path, value))
            items = [*(value.items() if type(value) is dict else enumerate(value) if type(value) is list else ())]
            for key, item in self.r.sample(items, min(6, len(items))):
                if type(item) in CONTAINERS:
                    walk([*path, key], item)

        walk([], self.model)
        return found

    def at(self, path):
        node = self.doc
        for key in path:
            node = node[key]
        return node

    def model_at(self, path):
        value = self.model
        for key in path:
            value = value[key]
        return value

    def find(self, wanted):
        """The path of an object in the state, past its methods; None when it is not there."""

        def walk(value, path):
            if value is wanted:
                return path
            items = ()
            if isinstance(value, dict):
                items = zip(dict.keys(value), dict.values(value), strict=True)
            elif isinstance(value, list):
                items = enumerate(list.__iter__(value))
            for key, item in items:
                if type(item) not in SCALARS:
                    found = walk(item, [*path, key])
                    if found is not None:
                        return found
            return None

        for name, section in self.doc.sections.items():
            if section.value is not GONE:
                found = walk(section.value, [name])
                if found is not None:
                    return found
        return None

    def container(self, root=True):
        """A container of the state, and the model's."""
        if self.handles and self.choose(3) == 0:
            node = self.pick(self.handles)
            path = self.find(node)
            if path is not None:
                return node, self.model_at(path)
        places = self.places()
        path, value = self.pick(places if root or len(places) == 1 else places[1:])
        node = self.at(path)
        if path and self.choose(3) == 0:
            self.keep(node)
        return node, value

    def keep(self, node):
        if isinstance(node, Node):
            self.handles.append(node)
            del self.handles[:-12]

    def hold(self, value):
        self.held.append(value)
        del self.held[:-10]

    # -- steps ----------------------------------------------------------------------------------------------------

    def change(self):
        node, value = self.container()
        if type(value) is dict:
            self.change_dict(node, value)
        elif type(value) is list:
            self.change_list(node, value)
        elif type(value) is set:
            self.change_set(node, value)

    def change_dict(self, node, value):
        top = value is self.model
        what = self.choose(10)
        key = self.pick(("a", "b", "c", "d")) if top else self.key()
        if what < 3 or not value:
            new = self.value()
            node[key] = new
            value[key] = mirror(new)
            return
        have = self.pick([*list(value)[:4], *list(value)[-2:]])
        if what == 3:
            del node[have]
            del value[have]
        elif what == 4:
            self.keep(node.pop(have))
            value.pop(have)
            if self.choose(2):  # it comes back, at the end
                node[have] = value[have] = self.choose(3)
        elif what == 5 and not top:
            (k1, a), (k2, _) = node.popitem(), value.popitem()
            assert k1 == k2
            assert type(k1) is type(k2)
            self.keep(a)
        elif what == 6:
            new = self.value()
            self.keep(node.setdefault(key, new))
            value.setdefault(key, mirror(new))
        elif what == 7 and not top:
            new = {k: self.value(2) for k in ("a", 1, "new", (1, "k"))[: 1 + self.choose(4)]}
            if self.choose(2):
                node.update(new)
            else:
                node |= new
            value.update(mirror(new))
        elif what == 8 and not top and self.choose(4) == 0:
            node.clear()
            value.clear()
        else:
            inner = node[have]
            node[have] = {"w": inner, "x": 1}
            value[have] = {"w": value[have], "x": 1}

    def change_list(self, node, value):
        what = self.choose(22)
        size = len(value)
        if what < 3:
            new = self.value()
            node.append(new)
            value.append(mirror(new))
        elif what == 3:
            new = [self.value(1) for _ in range(self.choose(5))]
            twin = mirror(new)
            if self.choose(2):
                node.extend(iter(new))
            else:
                node += new
            value.extend(twin)
        elif what == 4:
            at, new = self.choose(size + 3) - 1, self.value(2)
            node.insert(at, new)
            value.insert(at, mirror(new))
        elif what == 5 and size:
            at = self.choose(2 * size) - size
            self.keep(node.pop(at))
            value.pop(at)
        elif what == 6 and size:
            wanted = mirror(value[self.choose(size)])
            try:
                value.remove(wanted)
            except ValueError:
                return
            node.remove(wanted)
        elif what == 7 and size:
            at, new = self.choose(size), self.value(2)
            node[at] = new
            value[at] = mirror(new)
        elif what == 8:
            start, stop, step = self.slice_of(size)
            places = range(size)[start:stop:step]
            count = len(places) if step != 1 else self.choose(5)
            new = [self.value(1) for _ in range(count)]
            node[start:stop:step] = new
            value[start:stop:step] = mirror(new)
        elif what == 9 and size:
            start, stop, step = self.slice_of(size)
            del node[start:stop:step]
            del value[start:stop:step]
        elif what == 10 and size < 50:
            times = self.choose(3)
            node *= times
            value[:] = [mirror(item) for _ in range(times) for item in value]
        elif what == 11:
            node.reverse()
            value.reverse()
        elif what == 12:
            down = bool(self.choose(2))
            node.sort(key=weight, reverse=down)
            value.sort(key=weight, reverse=down)
        elif what == 13:
            odd = self.choose(2)
            node[:] = [item for at, item in enumerate(node) if at % 3 != odd]
            value[:] = [item for at, item in enumerate(value) if at % 3 != odd]
        elif what == 14 and size > 1:
            half = 1 + self.choose(size - 1)
            node[:half] = node[half:] + node[:half][:2]
            value[:half] = mirror(value[half:] + value[:half][:2])
        elif what == 15 and size:
            node[:] = [{"wrapped": item} for item in node]
            value[:] = [{"wrapped": item} for item in value]
        elif what == 16 and size:
            node[::-1] = list(node)
            value[::-1] = list(value)
        elif what == 17 and self.choose(4) == 0:
            node.clear()
            value.clear()
        elif what == 18 and size > 1:
            i, j = self.choose(size), self.choose(size)
            node[i], node[j] = node[j], node[i]
            value[i], value[j] = mirror(value[j]), mirror(value[i])
        elif size:
            at = self.choose(size)
            node[at] = [node[at]]
            value[at] = [value[at]]

    def slice_of(self, size):
        return self.choose(size + 2), self.choose(size + 2), self.pick((1, 1, 2, 3, -1, -2))

    def change_set(self, node, value):
        what = self.choose(9)
        item = self.pick((1, 2, True, "s", 1.0, 0, -0.0, "more", (1, "t"), Point(1), 5.5, None, self.choose(300)))
        if what < 3:
            node.add(item)
            value.add(item)
        elif what == 3:
            node.discard(item)
            value.discard(item)
        elif what == 4 and value:
            item = self.pick(sorted(value, key=repr))
            node.remove(item)
            value.remove(item)
        elif what == 5:
            new = {*self.many(0, 400)}
            if self.choose(2):
                node |= new
                value |= new
            else:
                node ^= new
                value ^= new
        elif what == 6:
            new = {*self.many(0, 100)}
            node -= new
            value -= new
        elif what == 7 and self.choose(4) == 0:
            node.clear()
            value.clear()
        elif what == 8:
            new = self.many(0, 120), ["s", 1.0]
            node.update(*new)
            value.update(*new)

    def alias(self):
        """Put a container of the state, or one that left it, into another place."""
        if self.handles and self.choose(2):
            node = self.pick(self.handles)
        else:
            node, value = self.container(root=False)
            if value is self.model:
                return
        if not isinstance(node, Node):
            return
        target, into = self.container()
        if type(into) is set or isinstance(target, set):
            return
        content = mirror(node)
        above = self.holds(node, target)
        key = self.pick(("a", "b", "c")) if type(into) is dict else None
        try:
            if key is None:
                target.append(node)
            elif self.choose(2) and target is not self.doc:
                target.update({key: node})
            else:
                target[key] = node
        except HoldfastError:
            assert above or node is target, "refused for no reason"
            return
        if key is None:
            into.append(content)
        elif not (
            node is (dict.get(target, key) if isinstance(target, dict) else None)
            and into.get(key) is not None
            and same(into[key], content)
        ):
            into[key] = content
        if above:
            # Only what was there already can be put into what it holds.
            self.model = mirror(self.doc)

    def holds(self, node, wanted):
        if node is wanted:
            return True
        return any(isinstance(child, Node) and self.holds(child, wanted) for _, child in node._pairs())

    def mutate(self):
        """Change an instance: one that is held, or one that is read and let go."""
        if self.held and self.choose(2):
            self.mutate_held(self.pick(self.held))
            return
        found = []

        def walk(path, value):
            for key, item in value.items() if type(value) is dict else enumerate(value) if type(value) is list else ():
                if type(item) in INSTANCES:
                    found.append([*path, key])
                elif type(item) in (dict, list):
                    walk([*path, key], item)

        walk([], self.model)
        if not found:
            return
        path = self.pick(found)
        node = self.at(path[:-1])
        how = self.choose(4)
        if path[:-1] == [] or how == 0:
            obj = node[path[-1]]
        elif type(self.model_at(path[:-1])) is dict:
            obj = dict(node.items())[path[-1]] if how == 1 else list(node.values())[list(node).index(path[-1])]
        else:
            obj = next(x for i, x in enumerate(node) if i == path[-1])
        if self.choose(3) == 0:
            self.hold((obj, ()))
        if self.choose(4) == 0:
            self.hold_part(obj)
        if self.choose(4):
            self.mutate_held((obj, ()))

    def hold_part(self, obj):
        """Something inside an instance, and not the instance."""
        if isinstance(obj, Note):
            self.hold((obj.tags, ("tags",)))
            if isinstance(obj.more, Note):
                self.hold((obj.more, ("more",)))
        elif isinstance(obj, Model):
            self.hold((obj.extra, ("extra",)))

    def mutate_held(self, held):
        obj, way = held
        twin = self.twin(obj, way)
        number = self.choose(5)
        self.mutate_one(obj, number)
        if twin is not None and twin is not obj:
            self.mutate_one(twin, number)

    def twin(self, obj, way):
        """What stands in the model for an instance of the state, or for a part of one."""
        if not way:
            path = self.find(obj)
            return self.model_at(path) if path is not None else None
        found = []

        def walk(value, path):
            if getattr(value, way[0], None) is obj:
                found.append(path)
            items = ()
            if isinstance(value, dict):
                items = zip(dict.keys(value), dict.values(value), strict=True)
            elif isinstance(value, list):
                items = enumerate(list.__iter__(value))
            for key, item in items:
                walk(item, [*path, key])

        for name, section in self.doc.sections.items():
            if section.value is not GONE:
                walk(section.value, [name])
        return getattr(self.model_at(found[0]), way[0]) if found else None

    def let_go(self):
        """Forget what is held, or half of it; then capture, so that values may fall asleep."""
        del self.held[: 1 + self.choose(10)]
        for _ in range(1 + self.choose(3)):
            self.checkpoint()

    def mutate_one(self, x, n):
        if type(x) is list:
            x.append(n)
        elif type(x) is dict:
            x["p"] = len(x)
        elif isinstance(x, Note):
            if n == 0:
                x.text += "!"
            elif n == 1:
                x.tags.append(len(x.tags))
            elif n == 2:
                x.tags = [*x.tags[:3], {"t": 1}]
            elif n == 3:
                x.more = Note("more") if x.more is None else None
            elif isinstance(x.more, Note):
                x.more.tags.append(1)
        elif isinstance(x, Model):
            if n == 0:
                x.name += "?"
            elif n == 1:
                x.extra["k"] = len(x.extra)
            elif n == 2:
                x.anything = [len(x.name)]
            elif n == 3 and isinstance(x.anything, list):
                x.anything.append(1)
        elif isinstance(x, Slotted):
            if n < 2:
                x.b = x.b + 1 if isinstance(x.b, int) else 0
            elif isinstance(x.a, int):
                x.a += 1
        elif isinstance(x, collections.deque):
            x.append(n)
        elif isinstance(x, bytearray):
            x += b"z"

    def refuse(self):
        node, value = self.container()
        bad = [1, {"x": print}]
        if self.choose(2) and isinstance(node, Node) and type(value) is not set:
            bad = self.pick((node, [node], {"deep": [1, {"x": node}]}))
        if type(value) is set:
            return
        try:
            if node is self.doc:
                node["bad"] = bad
            elif type(value) is dict:
                node.update({"ok": 1, "bad": bad})
            else:
                self.pick(
                    (
                        lambda: node.append(bad),
                        lambda: node.__setitem__(slice(0, 2), [1, bad, 2]),
                        lambda: node.extend([{}, bad]),
                    )
                )()
        except HoldfastError:
            return
        raise AssertionError("not refused")

    def checkpoint(self):
        seal = self.choose(3) == 0
        revision = self.memory.commit(self.doc, seal=seal)
        self.saved.append((revision, mirror(self.model)))
        del self.saved[:-6]
        self.verify(revision, self.model)
        if seal:
            self.verify(self.memory.step, self.model)

    def ask(self):
        """Digests and whether something changed, which nobody acknowledges."""
        self.doc.digests()
        assert self.doc.changed == self.doc.told.differs()

    def in_flight(self):
        """A capture is being written while the state changes on, and others look at it."""
        first = self.doc.capture()
        self.change()
        if self.choose(2):
            self.ask()
        second = self.doc.capture([first])
        self.memory.write(self.doc, first)
        if self.choose(2):
            self.change()
            self.ask()
        self.memory.write(self.doc, second)
        self.checkpoint()

    def failed_write(self):
        """A capture that is never written: what is in it goes with the next one."""
        self.doc.capture()
        self.change()
        self.doc.capture()

    def verify(self, revision, model):
        again = Document(self.types, revision)
        assert same(again, model), (
            f"what was read back is something else: {mirror(again)!s:.2000} instead of {model!s:.2000}"
        )
        assert again.told.digests() == revision.sections, "byte replay gives other digests"
        if self.choose(4) == 0:
            fresh = Document(self.types)
            fresh.update(mirror(model))
            assert fresh.digests() == revision.sections, "digests of a fresh document differ"

    def reload(self):
        self.checkpoint()
        self.doc = Document(self.types, self.memory.head)
        if self.choose(2):
            for name in self.doc:
                self.doc[name]
        self.resync()

    def resync(self):
        before, self.model = self.model, mirror(self.doc)
        assert same(self.model, before), "after loading"
        self.handles, self.held = [], []

    def rollback(self):
        if not self.saved:
            return
        revision, model = self.pick(self.saved)
        kept = [node for node in self.handles if self.choose(2)]
        self.doc.become(State(revision), record=False)
        assert not self.doc.changed
        self.memory.head = revision
        self.model = mirror(model)
        self.resync()
        self.handles = [node for node in kept if self.find(node) is not None]

    def undo(self):
        if not self.saved:
            return
        self.checkpoint()
        revision, model = self.pick(self.saved)
        self.doc.become(State(revision), record=True)
        self.model = mirror(model)
        self.resync()
        if self.choose(2):
            self.checkpoint()

    def differ(self):
        """Operations between two states lead from one to the other."""
        if len(self.saved) > 1:
            one, two = State(self.pick(self.saved)[0]), State(self.pick(self.saved)[0])
            operations = one.differences(two)
            for tree in [*two.trees, *map(two.section, two.sections)]:
                one.trees.add(tree)  # a commit would have these nodes with it
            one.do(operations)
            assert one.digests() == two.digests()

    def look_back(self):
        if self.saved:
            revision, model = self.pick(self.saved)
            self.verify(revision, model)

    def unseen(self):
        """C code: past the methods of the class. Whatever is saved must be readable; doubting everything saves it."""
        for _ in range(1 + self.choose(3)):
            node, value = self.container(root=False)
            if value is self.model:
                break
            if type(value) is list:
                what = self.choose(5)
                item = self.choose(9)
                if what == 0:
                    list.append(node, item)
                    value.append(item)
                elif what == 1 and value:
                    at = self.choose(len(value))
                    list.__setitem__(node, at, item)
                    value[at] = item
                elif what == 2 and value:
                    at = self.choose(len(value))
                    list.pop(node, at)
                    value.pop(at)
                elif what == 3:
                    list.reverse(node)
                    value.reverse()
                elif all(type(v) is int for v in value):
                    heapq.heapify(node)
                    heapq.heapify(value)
                    heapq.heappush(node, 3)
                    heapq.heappush(value, 3)
            elif type(value) is dict:
                if value and self.choose(2):
                    key = next(iter(value))
                    dict.pop(node, key)
                    value.pop(key)
                else:
                    dict.__setitem__(node, "unseen", 1)
                    value["unseen"] = 1
            elif type(value) is set:
                set.add(node, 77)
                value.add(77)
            if self.choose(2):
                self.change()
        revision = self.memory.commit(self.doc, seal=False)
        again = Document(self.types, revision)
        for name in again:
            again[name]
        self.doc.doubt()
        self.checkpoint()
        self.handles = []  # one that left the state in between may have changes that nobody will ever see

    def interrupted(self):
        """An exception from outside at any line of a change, or of a capture: nothing is lost, nothing unreadable."""
        what = self.pick(("change", "change", "capture", "alias", "mutate"))
        hits = self.interrupt(self.choose(250), what)
        if hits and self.choose(3) == 0:
            hits += self.interrupt(self.choose(60), "capture")  # and another one right after it
        if hits:
            self.loosely = True  # links may be wrong until somebody follows them
            self.model = mirror(self.doc)
            self.handles, self.held = [], []
            self.checkpoint()

    def interrupt(self, count, what):
        hits = 0

        def trace(frame, event, arg):
            nonlocal count, hits
            if "/codec/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
                return None
            if event == "line":
                count -= 1
                if count == 0:
                    hits += 1
                    sys.settrace(None)
                    if LOG:
                        import traceback

                        print("  at", [(one.name, one.lineno) for one in traceback.extract_stack(frame)[-6:]])
                    raise KeyboardInterrupt
            return trace

        saved, head, model = self.saved, self.memory.head, self.model
        try:
            sys.settrace(trace)
            if what == "capture":
                self.doc.capture()
            elif what == "rollback":
                self.rollback()
            else:
                getattr(self, what)()
        except KeyboardInterrupt:
            pass
        except AssertionError:
            if not hits:
                raise
        finally:
            sys.settrace(None)
        # Tracing raises where no signal can: between a block's end and the lock's release, or the collector's return.
        while self.doc.lock._is_owned():
            self.doc.lock.release()
        gc.enable()
        if hits and what == "rollback" and self.memory.head is head:
            self.saved, self.model = saved, model
            if self.doc.told.source is not head and not self.doc.told.unacknowledged:
                # It had moved already: from there the history goes on.
                self.memory.head = self.doc.told.source if isinstance(self.doc.told.source, Revision) else head
        return hits

    def meddled(self):
        """A signal handler changes the state and looks at it, wherever one can run: nothing is lost or unreadable."""
        doc = self.doc
        rows = [{"n": number, "t": "x" * self.choose(200)} for number in range(self.pick((3, 40)))]
        doc.update({"rows": rows, "table": dict.fromkeys(map(str, range(40)), 1), "names": {"a", "b"}, "handled": []})
        if self.choose(3):
            self.memory.commit(doc, seal=self.choose(2) == 0)
        handled, done, flags = doc["handled"], [], []
        count = self.choose(self.pick((40, 120, 500)))

        def handler():
            try:
                if self.choose(2):
                    handled.append({"n": count})
                    done.append({"n": count})
                if self.choose(3) == 0:
                    doc["flag"] = len(done)
                    flags.append(len(done))
                self.pick((lambda: None, lambda: doc.changed, doc.digests, lambda: doc["rows"][0]))()
            except StoreBusy:
                pass
            if self.choose(4) == 0:
                raise KeyboardInterrupt

        def profile(frame, event, arg):
            nonlocal count
            # Where the interpreter looks for signals: when a function begins, and after a call into C.
            if event in ("call", "c_return") and "/src/holdfast/codec/" in frame.f_code.co_filename:
                count -= 1
                if count == 0:
                    sys.setprofile(None)
                    handler()

        work = (
            lambda: doc["rows"].append({"n": 99}),
            lambda: doc["rows"].sort(key=lambda row: -row.get("n", 0)),
            lambda: doc["rows"][1].update(t="edited"),
            lambda: doc.setdefault("table", {}).update(new=[1], other=2),
            lambda: doc["names"].add("c"),
            lambda: doc["rows"].__getitem__(0).clear(),
            lambda: doc.setdefault("table", {}).clear(),
            lambda: doc.update(rows=[{"n": 1}] * 2, extra={"a": [1]}),
            lambda: doc.pop("table", None),
            lambda: doc.changed,
        )
        todo = [self.pick(work), lambda: self.memory.commit(doc, seal=self.choose(3) == 0)]
        if self.choose(2):
            todo = [self.pick(work), lambda: doc.changed, *todo]
        sys.setprofile(profile)
        for one in todo:
            try:
                one()
            except KeyboardInterrupt:
                self.loosely = True
        sys.setprofile(None)
        assert list(map(dict, doc["handled"])) == done, "a handler's change is gone"
        assert not flags or doc["flag"] == flags[-1], "a section that a handler set is gone"
        self.model = mirror(doc)
        self.handles, self.held = [], []
        self.checkpoint()

    STEPS = (
        ("change", 30), ("alias", 4), ("mutate", 6), ("refuse", 1), ("checkpoint", 6), ("reload", 2), ("rollback", 2),
        ("undo", 1), ("differ", 1), ("look_back", 1), ("unseen", 1), ("interrupted", 3), ("let_go", 2), ("ask", 1),
        ("failed_write", 1), ("in_flight", 1), ("meddled", 2),
    )  # fmt: skip

    def check(self):
        self.__class__.slept += bool(self.doc.watches._sleeping)
        seen = set()

        def walk(node, up):
            if isinstance(node, Node):
                assert id(node) not in seen, "one container in two places"
                seen.add(id(node))
                if not self.loosely:
                    assert node._up is up or node._up is None, "a wrong link upwards"
                for _, child in node._pairs():
                    if type(child) not in SCALARS:
                        assert node._raw or type(child) not in RAW, "somebody may change a plain container unseen"
                        walk(child, node)
            elif type(node) in (list, dict):
                for child in node if type(node) is list else node.values():
                    if type(child) not in SCALARS:
                        walk(child, None)

        for section in self.doc.sections.values():
            walk(section.value, section)
        watches = self.doc.watches
        for key, watch in watches.known.items():
            run = watch.run
            looked_at = key in watches._loose if run is None else id(run) in watches._awake
            assert looked_at or (run is not None and run.asleep and id(run) in watches._sleeping), (
                "nobody looks at an instance that somebody may hold"
            )
        if self.choose(4) == 0 or self.loosely:
            assert same(self.doc, self.model), "live and model differ"


NAMES = [name for name, count in World.STEPS for _ in range(count)]


def run(seed, steps, *, log=False):
    """One program."""
    alone(lambda: _run(seed, steps, log=log))


def _run(seed, steps, *, log):
    source = random.Random(seed)
    world = World(source, small=bool(seed % 4))
    with warnings.catch_warnings(), limits(SMALL) if world.small else contextlib.nullcontext():
        warnings.simplefilter("ignore", DetachedChange)
        for step in range(steps):
            name = source.choice(NAMES)
            if log:
                print(step, name, flush=True)
            getattr(world, name)()
            world.check()


def main():
    args = sys.argv[1:]
    steps = 60
    if "--steps" in args:
        at = args.index("--steps")
        steps = int(args[at + 1])
        del args[at : at + 2]
    seconds = float(args[0]) if args else 20
    seed = int(args[1]) if len(args) > 1 else 0
    first, until = seed, time.time() + seconds
    while time.time() < until:
        try:
            run(seed, steps)
        except BaseException as error:
            print(f"seed {seed} failed: {type(error).__name__} {str(error)[:5000]}")
            raise
        seed += 1
    print(f"{seed - first} programs of {steps} steps; something was asleep after {World.slept} steps")


if __name__ == "__main__":
    main()
