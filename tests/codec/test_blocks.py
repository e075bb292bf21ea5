"""The tree of nodes: digests that are kept current equal those of a tree that is built anew."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.codec import blocks
from holdfast.codec.blocks import LIST
from holdfast.codec.trees import Tree, build, read_tree


class Items:
    """A list of encodings with a tree that follows its changes."""

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.tree = Tree(LIST)

    def run(self, leaf):
        return self.items[leaf.start : leaf.start + leaf.count]

    def append(self, item, known=True):
        self.tree.appended(item if known else None)
        self.items.append(item)

    def splice(self, start, removed, fresh):
        self.items[start : start + removed] = fresh
        self.tree.spliced(start, removed, len(fresh))

    def replace(self, at, item):
        self.items[at] = item
        self.tree.spoil(self.tree.leaf_at(at))

    def reset(self, items):
        self.items = items
        self.tree.reset(len(items))

    def check(self):
        fresh, nodes = build(LIST, self.items)
        assert self.tree.update(self.run) == fresh.root
        assert self.tree.count() == len(self.items)
        assert [leaf.count for leaf in self.tree.leaves] == [leaf.count for leaf in fresh.leaves]
        starts = [leaf.start for leaf in self.tree.leaves]
        assert starts == [sum(leaf.count for leaf in self.tree.leaves[:at]) for at in range(len(starts))]
        return fresh, nodes


def item(source):
    kind = source.randrange(6)
    size = (1, 8, 60, 700, 5_000, 40_000)[kind] + source.randrange(50)
    return source.randbytes(min(size, 64)) * (size // min(size, 64))


@given(seed=st.integers(0, 2**32))
def test_incremental_digests_equal_fresh_ones(seed):
    source = random.Random(seed)
    items = Items()
    stored: dict[bytes, bytes] = {}
    for _ in range(30):
        what = source.randrange(8)
        size = len(items.items)
        if what < 3:
            for _ in range(source.randrange(80)):
                items.append(item(source), known=bool(source.randrange(4)))
        elif what == 3 and size:
            items.replace(source.randrange(size), item(source))
        elif what == 4:
            start = source.randrange(size + 1)
            items.splice(start, source.randrange(size - start + 1), [item(source) for _ in range(source.randrange(9))])
        elif what == 5 and size:
            start = source.randrange(size)
            items.splice(start, min(source.randrange(4), size - start), [])
        elif what == 6 and not source.randrange(4):
            items.reset([item(source) for _ in range(source.randrange(60))])
        else:
            root = items.check()[0].root
            stored.update((digest, raw) for digest, raw, _ in items.tree.unstored(items.run))
            assert all(blocks.node_digest(raw) == digest for digest, raw in stored.items())
            read, rows = read_tree(LIST, root, lambda digests: {digest: stored[digest] for digest in digests})
            assert read.count() == len(items.items)
            assert b"".join(blocks.leaf_items(raw)[1] for raw in rows) == b"".join(items.items)
    items.check()


def test_many_leaves_have_index_levels_that_follow_changes(rounds):
    source = random.Random(1)
    items = Items()
    for number in range(3_000):
        items.append(source.randbytes(32) * 300 + number.to_bytes(4, "big"))
        if number % 251 == 0:
            items.check()
    for _ in range(rounds(60, 600)):
        at = source.randrange(len(items.items))
        items.splice(at, source.randrange(5), [source.randbytes(32) * 300 for _ in range(source.randrange(5))])
        items.check()
    assert len(items.tree.levels) >= 2


def test_an_update_that_fails_half_way_is_made_up_for():
    source = random.Random(2)
    items = Items()
    for _ in range(300):
        items.append(source.randbytes(50) * 20)
    items.check()
    items.replace(3, b"a" * 900)
    items.replace(299, b"b" * 900)

    def fails(leaf):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        items.tree.update(fails)
    items.check()


@pytest.mark.parametrize("count", [0, 1, 2_047, 2_048, 2_049, 5_000])
def test_a_tree_of_tiny_items_is_cut_by_their_number(count):
    items = Items()
    for number in range(count):
        items.append(bytes([number % 128]))
    fresh, _ = items.check()
    assert len(fresh.leaves) == max(1, -(-count // 2_048))
