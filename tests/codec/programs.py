"""Random programs over a tracked state and a plain model of it, side by side.

A ``World`` holds the model (plain builtins, changed by Python itself) and a document. Every step does the same to
both, through paths or through handles that were kept, and then compares them. Who chooses is up to the caller: a
Hypothesis machine, or a random generator.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest

from holdfast.codec.codes import WholeList
from holdfast.codec.compare import differences
from holdfast.codec.document import Document
from holdfast.codec.document.packing import is_whole
from holdfast.codec.nodes import STALE, LazyDict, LazyList, Node
from holdfast.codec.operations import Operation, decode_operations, encode_operations
from holdfast.codec.plain import plain
from holdfast.codec.values import encode
from holdfast.errors import Stale, Unencodable
from tests.codec.kinds import Model, Note, Point, registry

TYPES = registry()
HANDLES_MAX = 12


class Shared(list):
    """In a model: a list in which instances are shared, so that it is one value."""


def same(one: Any, two: Any) -> bool:
    """Equal with types, order and sharing: the encoding says it all, and fast."""
    return encode(one, TYPES) == encode(two, TYPES)


class Memory:
    """What a catalog does for one line of history, in memory: nodes, chunks, and operations since the last seal."""

    def __init__(self) -> None:
        self.kept_nodes: dict[bytes, bytes] = {}
        self.kept_chunks: dict[bytes, bytes] = {}
        self.head = Revision(self, [], {}, [])

    def commit(self, document: Document, *, seal: bool) -> Revision:
        captured = document.capture()
        nodes = dict(captured.nodes)
        if seal:
            found = document.unstored()[0]
            seal = document.stands(captured, found)
            nodes.update(found)
        self.kept_nodes.update(nodes)
        self.kept_chunks.update(captured.chunks)
        data, values = encode_operations(captured.operations, 10**15)
        done = decode_operations(data, 10**15, values.__getitem__)
        if seal:
            self.head = Revision(self, captured.sections, dict(captured.sections), [])
        else:
            self.head = Revision(self, captured.sections, self.head.base, [*self.head.done, *done])
        return self.head


class Revision:
    """One saved state; the source of documents."""

    def __init__(
        self, memory: Memory, sections: list[tuple[str, bytes]], base: dict[str, bytes], done: list[Operation]
    ) -> None:
        self._memory = memory
        self.sections = sections
        self.base = base
        self.done = done

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        return {digest: self._memory.kept_nodes[digest] for digest in digests}

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join(self._memory.kept_chunks[digest] for digest in digests)

    def operations(self, section: str) -> list[Operation]:
        return [operation for operation in self.done if operation.path[0] == section]

    def load(self, **options: Any) -> Document:
        return Document(TYPES, self, **options)


def normal(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy of a model, its markers gone."""
    memo = {} if memo is None else memo
    if isinstance(value, list | dict) and type(value) in {list, dict, Shared}:
        made: Any = {} if type(value) is dict else []
        if type(value) is dict:
            made.update((key, normal(item, memo)) for key, item in value.items())
        else:
            made.extend(normal(item, memo) for item in value)
        return made
    return copy.deepcopy(value, memo)


def model_of(value: Any) -> Any:
    """A model of what a document holds."""
    if isinstance(value, Document):
        return {name: model_of(value.raw_section(name)) for name in value}
    if type(value) is WholeList:
        return Shared(copy.deepcopy(list(value)))
    if isinstance(value, dict):
        return {key: model_of(item) for key, item in zip(dict.keys(value), dict.values(value), strict=True)}
    if isinstance(value, list):
        return [model_of(item) for item in list.__iter__(value)]
    if isinstance(value, set):
        return set(value)
    return bytearray(value) if isinstance(value, bytearray) else copy.deepcopy(value)


def fill(holder: Any, key: Any, value: Any) -> None:
    """Put a model's value into a document piece by piece: another history for the same state."""
    if type(value) is dict:
        holder[key] = {}
        node = holder[key]
        for inner, item in value.items():
            fill(node, inner, item)
    elif type(value) is list:
        holder[key] = []
        node = holder[key]
        for index, item in enumerate(value):
            node.append(None)
            fill(node, index, item)
    else:
        holder[key] = list(value) if type(value) is Shared else copy.deepcopy(value)


class World:
    """A document and its model. ``choose(n)`` gives a number below ``n``."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.model: dict[str, Any] = {}
        self.handles: list[tuple[Any, Any]] = []
        self.saved: list[tuple[Any, Any]] = []
        self.start()

    # -- what a subclass with a real store replaces -----------------------------------------------------

    def start(self) -> None:
        self.memory = Memory()
        self.state: Any = Document(TYPES)

    def save(self) -> Any:
        return self.memory.commit(self.state, seal=self.choose(3) == 0)

    def reopen(self) -> None:
        self.state = self.memory.head.load()

    def read(self, revision: Any) -> Any:
        return revision.load(readonly=True)

    def return_to(self, revision: Any) -> None:
        wanted = revision.load(readonly=True)
        self.state.digests()
        self.state.change_all(list(differences(self.state, wanted)))
        assert self.state.digests() == wanted.digests()

    # -- values -----------------------------------------------------------------------------------------

    def pick(self, items: Any) -> Any:
        return items[self.choose(len(items))]

    def scalar(self) -> Any:
        return self.pick(
            (
                None, True, 0, 1, -7, 2**63, 2**70, 1.5, -0.0, "", "text", "x" * 900, b"\x00\xff", "\ud800", (1, "a"),
                Point(1, 2), frozenset({1, "b"}), ("deep", (1, (2,))),
            )
        )  # fmt: skip

    def key(self) -> Any:
        return self.pick(("a", "b", "c", "a b", 1, (1, "k"), None, "\ud800", 2.5, b"k"))

    def value(self, depth: int = 3, *, inner: bool = False) -> Any:
        kind = self.choose(22)
        if depth <= 0 or kind < 8:
            return self.scalar()
        if kind < 11:
            return [self.value(depth - 1, inner=True) for _ in range(self.choose(4))]
        if kind < 14:
            return {self.key(): self.value(depth - 1, inner=True) for _ in range(self.choose(4))}
        if kind == 14:
            return set(range(self.choose(5))) | {"s"}
        if kind == 15:
            return (1, [self.scalar()])
        if kind == 16:
            return self.pick((bytearray(b"abc"), collections.deque([1, [2]]), bytearray(300_000)))
        if kind == 17 and not inner:
            note = Note("shared")
            return self.pick((Shared([note, note]), Shared([note, {"again": note}])))
        if kind == 18:
            return Note("note", [str(self.choose(9))])
        if kind == 19:
            return Model(name="m", anything=[self.choose(9)])
        return self.large()

    def large(self) -> Any:
        """Around the bounds: inline 16 KiB, leaves 8 to 128 KiB or 2,048 items, bulk 256 KiB."""
        size = self.choose(8)
        if size == 0:
            return [f"{index} " + "y" * 700 for index in range(20 + self.choose(30))]
        if size == 1:
            return {f"k{index}": "z" * 600 for index in range(20 + self.choose(40))}
        if size == 2:
            return list(range(100)) * (20 + self.choose(40))
        if size == 3:
            return set(range(3000 + self.choose(3000)))
        if size == 4:
            return [{"role": "user", "content": "m" * 500, "parts": [index]} for index in range(25 + self.choose(60))]
        if size == 5:
            return self.pick(("B" * 270_000, b"C" * 300_000, [b"D" * 280_000, 1], {"t": "E" * 17_000}))
        if size == 6:
            return [{"body": "w" * 9000, "list": ["v" * 9000]} for _ in range(1 + self.choose(3))]
        return {index: {"n": [index] * 50, "t": "t" * 150} for index in range(60 + self.choose(60))}

    # -- the two sides ----------------------------------------------------------------------------------

    def places(self) -> list[tuple[list[Any], Any]]:
        """Every container of the model with its path; the first is the state itself."""
        found: list[tuple[list[Any], Any]] = []

        def walk(path: list[Any], value: Any) -> None:
            if len(found) > 60:
                return
            found.append((path, value))
            items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
            for count, (key, item) in enumerate(items):
                if type(item) in {dict, list, set} and (count < 6 or count == len(value) - 1):
                    walk([*path, key], item)

        walk([], self.model)
        return found

    def at(self, path: list[Any]) -> Any:
        node = self.state
        for key in path:
            node = node[key]
        return node

    def reachable(self) -> set[int]:
        found: set[int] = set()

        def walk(value: Any) -> None:
            found.add(id(value))
            for item in value.values() if type(value) is dict else value if type(value) is list else ():
                walk(item)

        walk(self.model)
        return found

    def container(self) -> tuple[Any, Any]:
        """A container on both sides: through a path, or through a handle that was kept."""
        live = [pair for pair in self.handles if type(pair[1]) in {dict, list, set}]
        if live and self.choose(3) == 0:
            return self.pick(live)
        path, value = self.pick(self.places())
        node = self.at(path)
        if path and self.choose(3) == 0:
            self.keep(node, value)
        return node, value

    def keep(self, node: Any, value: Any) -> None:
        if not any(value is known for _, known in self.handles):
            self.handles.append((node, value))
            del self.handles[:-HANDLES_MAX]

    # -- steps ------------------------------------------------------------------------------------------

    def change(self) -> None:
        node, value = self.container()
        if type(value) is dict:
            self.change_dict(node, value)
        elif type(value) is list:
            self.change_list(node, value)
        else:
            self.change_set(node, value)

    def _keys(self, value: dict[Any, Any]) -> list[Any]:
        return [*list(value)[:4], *list(value)[-2:]]

    def change_dict(self, node: Any, value: dict[Any, Any]) -> None:
        top = value is self.model
        what = self.choose(10)
        key = self.pick(("a", "b", "c", "d")) if top else self.key()
        if what < 3 or not value:
            fresh = self.value()
            node[key] = normal(fresh)
            value[key] = fresh
        elif what == 3:
            key = self.pick(self._keys(value))
            del node[key]
            del value[key]
        elif what == 4:
            key = self.pick(self._keys(value))
            out, gone = node.pop(key), value.pop(key)
            if isinstance(out, Node):
                self.keep(out, gone)
        elif what == 5:
            (out_key, out), (gone_key, gone) = node.popitem(), value.popitem()
            assert out_key == gone_key
            if isinstance(out, Node):
                self.keep(out, gone)
        elif what == 6:
            fresh = self.value()
            given = node.setdefault(key, normal(fresh))
            if isinstance(given, Node) and type(value.setdefault(key, fresh)) in {dict, list, set}:
                self.keep(given, value[key])
            value.setdefault(key, fresh)
        elif what == 7:
            keys = ("a", "b", "c", "d") if top else ("a", 1, "new", (1, "k"))
            fresh = {key: self.value(2) for key in keys[: 1 + self.choose(4)]}
            given = normal(fresh)
            if self.choose(2):
                node.update(given)
            else:
                node |= given
            value.update(fresh)
        elif what == 8 and not top and self.choose(4) == 0:
            node.clear()
            value.clear()
        else:
            key = self.pick(self._keys(value))
            moved = self._moved(value, [value[key]])
            if moved is not None:
                node[key] = {"w": node[key], "x": 1}
                value[key] = {"w": moved[0], "x": 1}

    def change_list(self, node: Any, value: list[Any]) -> None:
        what = self.choose(20)
        size = len(value)
        if what < 3:
            fresh = self.value()
            node.append(normal(fresh))
            value.append(fresh)
        elif what == 3:
            fresh = [self.value(1) for _ in range(self.choose(5))]
            given = normal(fresh)
            if self.choose(2):
                node.extend(given)
            else:
                node += given
            value.extend(fresh)
        elif what == 4:
            at, fresh = self.choose(size + 3) - 1, self.value(2)
            node.insert(at, normal(fresh))
            value.insert(at, fresh)
        elif what == 5 and size:
            at = self.choose(2 * size) - size
            out, gone = node.pop(at), value.pop(at)
            if isinstance(out, Node):
                self.keep(out, gone)
        elif what == 6 and size:
            at = self.choose(size)
            given = normal(value[at])
            node.remove(given)
            value.remove(given)
        elif what == 7 and size:
            at, fresh = self.choose(size), self.value(2)
            node[at] = normal(fresh)
            value[at] = fresh
        elif what == 8:
            self.slice_list(node, value)
        elif what == 9 and size:
            start, stop, step = self.slice_of(size)
            del node[start:stop:step]
            del value[start:stop:step]
        elif what == 10 and size < 50:
            times = self.choose(3)
            node *= times
            again = [copy.deepcopy(item) for _ in range(times - 1) for item in value]
            if times:
                value.extend(again)
            else:
                value.clear()
        elif what == 11:
            node.reverse()
            value.reverse()
        elif what == 12:
            descending = bool(self.choose(2))
            node.sort(key=_weight, reverse=descending)
            value.sort(key=_weight, reverse=descending)
        elif what == 13:
            odd = self.choose(2)
            node[:] = [item for at, item in enumerate(node) if at % 3 != odd]
            value[:] = [item for at, item in enumerate(value) if at % 3 != odd]
        elif what == 14 and size:
            half = self.choose(size)
            node[:half] = node[half:] + node[:half][:2]
            moved = value[half:] + value[:half][:2]
            # Those from behind the slice are still there: they are copied. Those inside it are moved.
            inside = {id(item) for item in value[:half]}
            value[:half] = [item if id(item) in inside else copy.deepcopy(item) for item in moved]
        elif what == 15 and size:
            moved = self._moved(value, value)
            if moved is not None:
                node[:] = [{"wrapped": item} for item in node]
                value[:] = [{"wrapped": item} for item in moved]
        elif what == 16 and size:
            node[::-1] = list(node)
            value[::-1] = list(value)
        elif what == 17 and self.choose(4) == 0:
            node.clear()
            value.clear()
        elif size:
            at = self.choose(size)
            moved = self._moved(value, [value[at]])
            if moved is not None:
                node[at] = [node[at]]
                value[at] = moved

    def slice_of(self, size: int) -> tuple[int, int, int]:
        return self.choose(size + 2), self.choose(size + 2), self.pick((1, 1, 2, 3, -1, -2))

    def slice_list(self, node: Any, value: list[Any]) -> None:
        start, stop, step = self.slice_of(len(value))
        places = range(len(value))[start:stop:step]
        count = len(places) if step != 1 else self.choose(4)
        fresh = [self.value(1) if count < 10 else at for at in range(count)]
        node[start:stop:step] = normal(fresh)
        value[start:stop:step] = fresh

    def change_set(self, node: Any, value: set[Any]) -> None:
        what = self.choose(9)
        item = self.pick((0, 1, True, 2, "s", (1, 2), 5000, "big" * 9))
        some = {0, 1, "s", "u", 77}
        if what == 0:
            node.add(item)
            value.add(item)
        elif what == 1:
            node.discard(item)
            value.discard(item)
        elif what == 2 and value:
            out = node.pop()
            assert out in value
            value.discard(out)
        elif what == 3:
            node.update([item], some)
            value.update([item], some)
        elif what == 4:
            node -= some
            value -= some
        elif what == 5:
            node &= some
            value -= value - some  # which of two equal items `&=` keeps (1 or True) depends on sizes; here its own
        elif what == 6:
            node ^= some
            value ^= some
        elif what == 7:
            node |= some
            value |= some
        else:
            node.clear()
            value.clear()

    def alias(self) -> None:
        """Put a container that is in the state (or was) somewhere else: a copy, or moved when it has no home."""
        target, target_value = self.container()
        source, source_value = self.container()
        if isinstance(source, Document) or type(target_value) is set:
            return
        homeless = id(source_value) not in self.reachable() and not isinstance(source, Document)
        inside = _contains(source_value, target_value)
        replaced = target_value.get("d") if type(target_value) is dict else None
        if inside or (homeless and (self._shares_home(source_value) or _contains(target_value, source_value))):
            if inside and source_value is target_value:
                with pytest.raises(Unencodable):
                    _put(target, source)
            return
        _put(target, source)
        if homeless:
            _part(source_value, self.reachable())
        # What loses its place by this very operation is moved, too.
        moves = homeless or (replaced is not None and _contains(replaced, source_value))
        _put(target_value, source_value if moves else copy.deepcopy(source_value))

    def _shares_home(self, value: Any) -> bool:
        """Whether a homeless container shares parts with another one, or is in one: whose they are is too hard to say
        in the model. Parts that live in the state are copied."""
        reachable = self.reachable()
        others = [known for _, known in self.handles if known is not value]

        def walk(item: Any) -> bool:
            if type(item) not in _LIVING or id(item) in reachable:
                return False
            return any(_contains(other, item) for other in others) or any(map(walk, _inner(item)))

        return any(_contains(other, value) for other in others) or any(map(walk, _inner(value)))

    def unpack(self) -> None:
        """Put a part of a container in its place; perhaps the container itself goes elsewhere by the same operation."""
        node, value = self.container()
        keys = list(value) if type(value) is dict else list(range(len(value))) if type(value) is list else []
        keys = [key for key in keys[:6] if type(value[key]) in {dict, list} and len(value[key])]
        if not keys:
            return
        key = self.pick(keys)
        box, box_value = node[key], value[key]
        inner = self.pick(list(box_value)[:6] if type(box_value) is dict else range(min(6, len(box_value))))
        part, part_value = box[inner], box_value[inner]
        if not self._owns(value, box_value) or not self._owns(box_value, part_value):
            return
        if self.choose(2):
            self.keep(box, box_value)
        if type(part_value) in _LIVING and self.choose(2):
            self.keep(part, part_value)
        what = self.choose(3) if type(value) is dict and key != "e" and type(part_value) in _LIVING else 0
        if what == 0:
            node[key] = {"part": part, "note": Note("new", ["n"])}
            value[key] = {"part": part_value, "note": Note("new", ["n"])}
        elif what == 1:
            node.update({key: {"part": part, "note": Note("new", ["n"])}, "e": box})
            # The part was moved first, so the container that had it is copied.
            value.update({key: {"part": part_value, "note": Note("new", ["n"])}, "e": copy.deepcopy(box_value)})
        else:
            node.update({"e": box, key: {"part": part}})
            value.update({"e": box_value, key: {"part": copy.deepcopy(part_value)}})

    def _owns(self, holder: Any, part: Any) -> bool | None:
        """Whether a container is the home of what is in it; None where the model cannot say."""
        if type(part) not in _LIVING:
            return True
        reachable = self.reachable()
        if id(holder) in reachable:
            return True
        if id(part) in reachable:
            return False
        others = [known for _, known in self.handles if known is not part and _contains(known, part)]
        return True if all(_contains(known, holder) for known in others) else None

    def _moved(self, holder: Any, items: list[Any]) -> list[Any] | None:
        """What becomes of items that an operation takes out of a container and puts back inside something: those that
        live elsewhere are copied. None where the model cannot say."""
        owned = [self._owns(holder, item) for item in items]
        if None in owned:
            return None
        return [item if own else copy.deepcopy(item) for item, own in zip(items, owned, strict=True)]

    def refuse(self) -> None:
        """A value that cannot be saved, anywhere in an operation, changes nothing."""
        node, value = self.container()
        before = self.state.digests()
        bad = self.pick((lambda: 0, object(), [1, {"f": print}], {"a": [1], "b": Note("x", [print])}))
        with pytest.raises(Unencodable):  # noqa: PT012
            if type(value) is dict:
                if self.choose(2):
                    node["a"] = bad
                else:
                    node.update({"a": [1, 2], "b": bad, "c": 3})
            elif type(value) is list:
                which = self.choose(4)
                if which == 0:
                    node.append(bad)
                elif which == 1:
                    node.extend([[1], bad])
                elif which == 2:
                    node[:] = [*node, bad]
                else:
                    node.insert(0, bad)
            else:
                node.update([98765, print])
        assert self.state.digests() == before

    def mutate(self) -> None:
        """Change an instance (or another mutable value) that was read out."""
        found: list[tuple[list[Any], Any]] = []
        for path, value in self.places():
            items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
            found += [([*path, key], item) for key, item in items if type(item) in _MUTABLE]
        kept = [pair for pair in self.handles if type(pair[1]) in _MUTABLE]
        if kept and self.choose(2):
            out, value = self.pick(kept)
        elif found:
            path, value = self.pick(found)
            out = self.at(path)
            if self.choose(2):
                self.keep(out, value)
        else:
            return
        mark = self.choose(100)
        for side in (out, value):
            if isinstance(side, Note):
                side.tags.append(str(mark))
                side.text = f"note {mark}"
            elif isinstance(side, Model):
                side.count = mark
                side.anything.append(mark)
            elif isinstance(side, tuple):
                side[1].append(mark)
            elif isinstance(side, list) and mark % 3 == 0:
                side.clear()
            elif isinstance(side, list) and mark % 3 == 1:
                side.extend([f"{mark}" * 300] * 40)
            else:
                side.append(mark)

    def touch(self) -> None:
        node, value = self.container()
        assert len(node) == len(value)
        if type(value) is list:
            for one, two in zip(node, value, strict=True):
                assert isinstance(one, list if type(two) is Shared else type(two))

    def checkpoint(self) -> None:
        revision = self.save()
        self.saved.append((revision, copy.deepcopy(self.model)))
        del self.saved[:-6]
        sections = [(name, digest) for name, digest in self.state.digests()]
        fresh = Document(TYPES)
        for name, value in self.model.items():
            fill(fresh, name, value)
        assert sections == fresh.digests(), "the digest depends on history"
        if not _has_shared(self.model):
            again = Document(TYPES)
            again.update(normal(self.model))
            assert sections == again.digests(), "the digest depends on how values came in"

    def look_back(self) -> None:
        if self.saved:
            revision, model = self.pick(self.saved)
            assert same(plain(self.read(revision)), normal(model))

    def reload(self) -> None:
        self.checkpoint()
        self.handles.clear()
        self.model = _unshared(self.model)
        self.reopen()

    def rollback(self) -> None:
        if not self.saved:
            return
        revision, model = self.pick(self.saved)
        self.return_to(revision)
        self.after_rollback(model)

    def after_rollback(self, model: Any) -> None:
        self.model = copy.deepcopy(model)
        handles, self.handles = self.handles, []
        self.check()
        for node, _ in handles:
            if isinstance(node, STALE):
                with pytest.raises(Stale):
                    len(node)
            elif isinstance(node, Node):
                path = node._path()
                if path is not None:
                    value: Any = self.model
                    for key in path:
                        value = value[key]
                    self.keep(node, value)

    # -- what must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        assert same(plain(self.state), normal(self.model))
        for node, value in self.handles:
            live = plain(node) if isinstance(node, Node) else normal(_builtin(node))
            assert same(live, normal(_builtin(value))), "a handle and what it stands for have parted"

        for name in self.state:
            top = self.state.raw_section(name)
            assert not isinstance(top, Node) or top._path() == [name]
            check_links(top)

    STEPS = (
        ("change", 10),
        ("alias", 2),
        ("unpack", 2),
        ("refuse", 1),
        ("mutate", 3),
        ("touch", 1),
        ("checkpoint", 2),
        ("look_back", 1),
        ("reload", 1),
        ("rollback", 1),
    )

    def step(self, name: str) -> None:
        getattr(self, name)()
        self.check()


def check_links(node: Any) -> None:
    """Whoever can be reached by reading knows its parent."""
    if isinstance(node, Node):
        for key, child in node._items():
            if isinstance(child, Node):
                seen = not isinstance(node, LazyDict | LazyList)
                assert child._parent is node or (child._parent is None and not seen), "a child does not know its parent"
                assert child._parent is None or node._key_of(child) == key, "a child does not know its key"
                check_links(child)


def _weight(item: Any) -> int:
    return len(item) if hasattr(item, "__len__") else 0


def _inner(value: Any) -> Any:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def _contains(one: Any, other: Any) -> bool:
    return one is other or any(_contains(item, other) for item in _inner(one))


def _part(value: Any, reachable: set[int]) -> None:
    """What lives in the state is copied where a homeless container has it, too."""
    for key, item in list(value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()):
        if type(item) in _LIVING and id(item) in reachable:
            value[key] = copy.deepcopy(item)
        else:
            _part(item, reachable)


def _put(target: Any, value: Any) -> None:
    if isinstance(target, list):
        target.append(value)
    else:
        target["d"] = value


def _has_shared(value: Any) -> bool:
    if type(value) is Shared:
        return True
    inner = value.values() if type(value) is dict else value if type(value) is list else ()
    return any(map(_has_shared, inner))


def _unshared(value: Any) -> Any:
    """What is not shared any more comes back as an ordinary list."""
    if type(value) is dict:
        return {key: _unshared(item) for key, item in value.items()}
    if type(value) is list or (type(value) is Shared and not is_whole(encode(list(value), TYPES))):
        return [_unshared(item) for item in value]
    return value


def _builtin(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytearray(value)
    return list(value) if isinstance(value, list) and not isinstance(value, Node) and type(value) is not list else value


_MUTABLE = (Note, Model, bytearray, collections.deque, Shared)
_LIVING = (*_MUTABLE, dict, list, set)  # what has one place in the state
