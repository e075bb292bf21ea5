"""A tree that followed random changes is the tree that is built from the items alone."""

from __future__ import annotations

import random

import pytest

from holdfast.codec import blocks, trees
from holdfast.codec.blocks import LIST
from holdfast.codec.trees import Leaf, Tree, build


@pytest.fixture
def small_nodes(monkeypatch):
    """Bounds so small that a few hundred items make several levels."""
    for name, value in {
        "LEAF_MIN_BYTES": 200,
        "LEAF_TARGET_BYTES": 800,
        "LEAF_MAX_BYTES": 3200,
        "LEAF_MAX_ITEMS": 40,
        "INDEX_MIN_ENTRIES": 4,
        "INDEX_MAX_ENTRIES": 32,
        "INDEX_CUT_BELOW": 1 << 29,
    }.items():
        monkeypatch.setattr(blocks, name, value)


class Program:
    """Random changes to a list of encodings, told to a tree in the words that containers use."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.items = []
        self.tree = Tree(LIST)
        self.largest = self.random.choice([10, 100, 600])
        self.appending, self.editing = self.random.choice([(0.5, 0.7), (0.2, 0.95)])
        self.stored = {}

    def item(self):
        return self.random.randbytes(self.random.randint(1, self.largest))

    def run_of(self, leaf: Leaf):
        items = self.items[leaf.start : leaf.start + leaf.count]
        if leaf.items is None:
            return items
        kept = leaf.items.copy()
        for at in leaf.edits or ():
            kept[at] = items[at]
        assert kept == items
        return kept

    def change(self):
        kind = self.random.random()
        if kind < self.appending:
            self.items.append(self.item())
            self.tree.appended(self.items[-1] if self.random.random() < 0.8 else None)
        elif kind < self.editing and self.items:
            at = self.random.randrange(len(self.items))
            leaf = self.tree.leaf_at(at)
            self.items[at] = self.item() if self.random.random() < 0.5 else self.random.randbytes(len(self.items[at]))
            self.tree.spoil(leaf, at - leaf.start if self.random.random() < 0.9 else None)
        elif kind < 0.97:
            at = self.random.randint(0, len(self.items))
            self.splice(at, self.random.choice([0, 1, 5, 100]), self.random.choice([0, 0, 1, 7]))
        else:
            self.random.shuffle(self.items)
            self.tree.reset(len(self.items))

    def splice(self, at, removed, added):
        removed = min(removed, len(self.items) - at)
        if removed or added:
            self.items[at : at + removed] = [self.item() for _ in range(added)]
            self.tree.spliced(at, removed, added)

    def check(self):
        fresh, nodes = build(LIST, self.items)
        assert self.tree.update(self.run_of) == fresh.root
        assert [leaf.start for leaf in self.tree.leaves] == [leaf.start for leaf in fresh.leaves]
        if self.random.random() < 0.3:
            # What counts as stored was given out before, or is given out now: nothing may be missing.
            self.stored.update((digest, raw) for digest, raw, _ in self.tree.unstored(self.run_of))
            assert all(self.stored[digest] == raw for digest, raw in nodes.items())


def test_following_changes_gives_the_same_nodes_as_building_anew(small_nodes, rounds):
    for seed in range(rounds(150, 50_000)):
        program = Program(seed)
        for _ in range(40):
            for _ in range(program.random.choice([1, 1, 3, 20, 100])):
                program.change()
            if len(program.items) > 600:
                program.splice(200, len(program.items), 0)
            program.check()


def test_encodings_are_kept_of_edited_leaves_alone_and_up_to_a_limit(small_nodes, monkeypatch):
    monkeypatch.setattr(trees, "KEPT_MAX_BYTES", 10_000)
    items = [bytes([number % 256]) * 50 for number in range(400)]
    tree = Tree(LIST)
    tree.reset(len(items))

    def run_of(leaf):
        return items[leaf.start : leaf.start + leaf.count]

    tree.update(run_of)
    assert all(leaf.items is None for leaf in tree.leaves)
    for at in range(0, len(items), 10):
        items[at] = b"!" * 50
        leaf = tree.leaf_at(at)
        tree.spoil(leaf, at - leaf.start)
        assert tree.update(run_of) == build(LIST, items)[0].root
    kept = [leaf for leaf in tree.leaves if leaf.items is not None]
    assert kept
    assert sum(leaf.size for leaf in kept) <= 10_000


def test_a_leaf_that_was_emptied_counts_its_bytes_anew(small_nodes):
    items = [b"x" * 100] * 3
    tree = Tree(LIST)
    tree.reset(3)
    tree.update(lambda leaf: items[leaf.start : leaf.start + leaf.count])
    items.clear()
    tree.spliced(0, 3, 0)
    for number in range(3):
        items.append(bytes([number]) * 50)
        tree.appended(items[-1])
        assert tree.update(lambda leaf: items[leaf.start : leaf.start + leaf.count]) == build(LIST, items)[0].root
