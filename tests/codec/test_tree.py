"""Trees of told bytes: what they become by hunks equals a tree that is built from nothing."""

from __future__ import annotations

import contextlib
import random

import pytest

from holdfast.codec.blocks import DICT, LIST, SET
from holdfast.codec.tree import Hunk, build, read, set_hunks
from holdfast.codec.values import encode
from tests.codec.fuzz import SMALL
from tests.limits import limits


def stored(tree, nodes):
    """All nodes of a tree go to a store."""
    for node, raw, _ in list(tree.unstored(nodes.__getitem__)):
        nodes[node.digest] = raw
        node.stored = True


def fetch_from(nodes):
    return lambda digests: {digest: nodes[digest] for digest in digests}


@pytest.mark.parametrize("kind", [LIST, DICT])
def test_hunks_lead_to_the_tree_that_the_items_have(kind, rounds):
    for seed in range(rounds(60, 3_000)):
        source = random.Random(seed)
        small = seed % 4 > 0
        with limits(SMALL) if small else contextlib.nullcontext():
            nodes: dict[bytes, bytes] = {}
            fetch = fetch_from(nodes)
            keys = iter(range(10**9))

            def item(source=source, small=small, keys=keys):
                value = encode("x" * source.randrange(60 if small else 3_000) + str(source.random()))
                return value if kind == LIST else encode(f"key {next(keys)}") + value

            items = [item() for _ in range(source.choice([0, 1, 5, 50, 300]))]
            tree = build(kind, list(items))
            for step in range(20):
                found = hunks_of(source, items, item, kind)
                before, root = tree.all(fetch), tree.root
                after = tree.apply(found, fetch)
                assert (tree.all(fetch), tree.root) == (before, root), "the old one stays what it was"
                for hunk in reversed(found):
                    items[hunk.start : hunk.stop] = hunk.items
                fresh = build(kind, list(items))
                assert after.all(fetch) == items
                assert (after.root, after.starts, after.count) == (fresh.root, fresh.starts, len(items)), (seed, step)
                assert [[one.digest for one in level] for level in after.levels] == [
                    [one.digest for one in level] for level in fresh.levels
                ]
                if kind == DICT and items:
                    place = source.randrange(len(items))
                    assert after.place(items[place][: len(encode(_key(items[place])))], fetch) == place
                    assert after.place(encode("absent"), fetch) == -1
                if source.random() < 0.3:
                    stored(after, nodes)
                    after.let_go()
                    assert read(after.root, fetch)[0].root == after.root
                tree = after


def _key(pair):
    from holdfast.codec.contents import key_of
    from holdfast.codec.values import decode

    return decode(key_of(pair))


def hunks_of(source, items, item, kind):
    """Some hunks that fit; those of a dict replace values, take out, or come at the end."""
    found: list[Hunk] = []
    for start in sorted(source.sample(range(len(items) + 1), min(len(items) + 1, source.choice([1, 1, 2, 5])))):
        if found and start <= found[-1].stop:
            continue
        stop = min(len(items), start + source.choice([0, 0, 1, 1, 3, 40]))
        new = [item() for _ in range(source.choice([0, 1, 2, 30]))]
        if stop > start or new:
            found.append(Hunk(start, stop, new, items[start:stop]))
    return found


def test_sets_find_the_places_of_items(rounds):
    for seed in range(rounds(60, 3_000)):
        source = random.Random(seed)
        with limits(SMALL) if seed % 2 else contextlib.nullcontext():
            have = {encode(source.randrange(2_000)) for _ in range(source.choice([0, 3, 500]))}
            tree = build(SET, sorted(have))
            for _ in range(10):
                gone = source.sample(sorted(have), min(len(have), source.randrange(4)))
                come = [encode(source.randrange(4_000)) for _ in range(source.randrange(4))]
                come = [one for one in dict.fromkeys(come) if one not in gone]
                found = set_hunks(tree, gone, come, dict)
                assert found is not None
                tree = tree.apply(found, dict)
                have = have.difference(gone).union(come)
                assert tree.root == build(SET, sorted(have)).root
            assert set_hunks(tree, [encode("absent")], [], dict) is None


def test_two_trees_may_grow_from_one(rounds):
    start = build(LIST, [encode("x" * 50)] * 30)
    one = start.apply([Hunk(30, 30, [encode(1)])], dict)
    two = start.apply([Hunk(30, 30, [encode(2)])], dict)
    assert one.all(dict)[-1] == encode(1)
    assert two.all(dict)[-1] == encode(2)
    assert start.count == 30
    assert start.root == build(LIST, [encode("x" * 50)] * 30).root


def test_a_tree_of_tiny_items_is_cut_by_their_number():
    tree = build(LIST, [b"\x01"] * 10_000)
    assert [leaf.count for leaf in tree.leaves] == [2_048] * 4 + [10_000 - 4 * 2_048]
