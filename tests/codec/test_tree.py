"""Trees of told bytes: what they become by hunks equals a tree that is built from nothing."""

from __future__ import annotations

import contextlib
import random

import pytest

from holdfast.codec.blocks import DICT, LIST, SET, key_of
from holdfast.codec.tree import Hunk, build, nodes_under, read, set_hunks
from holdfast.codec.values import decode, encode
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


def _pairs_changed(source, items, keys):
    """Hunks for a dict of numbered keys: values that are others, some that go, some that come."""
    some = [(at, one) for at, one in enumerate(items) if source.random() < 0.04]
    found = [Hunk(at, at + 1, [key_of(one) + noise(source)] * (source.random() < 0.8), [one]) for at, one in some]
    come = [encode(f"key {next(keys)}") + noise(source) for _ in range(source.choice([0, 0, 2]))]
    return [*found, Hunk(len(items), len(items), come)] if come else found


def noise(source):
    return encode("x" * source.randrange(60) + str(source.random()))


def test_a_tree_beside_another_finds_its_keys_and_takes_them_over(rounds):
    """What was sealed once, with much of what is live now: keys are asked for, it is changed, and becomes what is."""
    for seed in range(rounds(60, 3_000)):
        source, keys = random.Random(seed), iter(range(10**9))
        with limits(SMALL):
            nodes: dict[bytes, bytes] = {}
            fetch = fetch_from(nodes)
            items = [encode(f"key {next(keys)}") + noise(source) for _ in range(source.choice([30, 300]))]
            live = build(DICT, items)
            stored(live, nodes)
            root, old = live.root, items
            for _ in range(source.randrange(4)):
                hunks = _pairs_changed(source, items, keys)
                live = live.apply(hunks, fetch)
                items = _done(items, hunks)
            assert live.place(key_of(items[3]), fetch) == 3
            tree = read(root, fetch, beside=live)[0]
            for step in range(3):
                for at in source.sample(range(len(old)), 5):
                    assert tree.place(key_of(old[at]), fetch) == at
                absent = {key_of(one) for one in items} - {key_of(one) for one in old}
                assert {tree.place(key, fetch) for key in (*absent, encode("absent"))} == {-1}
                if step == 1 and source.random() < 0.5:  # what is live goes on meanwhile
                    live.apply(_pairs_changed(source, items, keys), fetch)
                hunks = _pairs_changed(source, old, keys)
                tree, old = tree.apply(hunks, fetch), _done(old, hunks)
            tree.take_over(fetch)
            for one, there in ((tree, old), (live, items)):
                assert one.all(fetch) == there
                assert [one.place(key_of(item), fetch) for item in there] == list(range(len(there)))
                assert one.place(encode("absent"), fetch) == -1


def test_a_tree_rests_on_the_nodes_that_it_is_said_to(rounds):
    for seed in range(rounds(60, 3_000)):
        source, keys = random.Random(seed), iter(range(10**9))
        with limits(SMALL):
            nodes: dict[bytes, bytes] = {}
            fetch = fetch_from(nodes)
            items = [encode(f"key {next(keys)}") + noise(source) for _ in range(source.choice([1, 30, 300]))]
            trees = [build(DICT, items)]
            for _ in range(4):
                if source.random() < 0.7:
                    stored(trees[-1], nodes)
                hunks = _pairs_changed(source, items, keys)
                trees.append(trees[-1].apply(hunks, fetch))
                items = _done(items, hunks)
            stored(trees[0], nodes)
            there = nodes_under(trees[0].root, fetch)
            assert there == digests(trees[0])
            for kept in trees:
                tree = kept.resting_on(there, source.choice([None, *trees]))
                assert (tree.root, tree.all(dict), tree.starts) == (kept.root, kept.all(dict), kept.starts)
                brought = {node.digest for node, _, _ in tree.unstored(dict)}
                assert brought | there >= digests(kept)
            stored(trees[-1], nodes)
            trees[-1].let_go()
            lost = trees[-1].resting_on((), None)
            assert lost is None or all(leaf.items is not None for leaf in trees[-1].leaves)


def _done(items, hunks):
    items = items.copy()
    for hunk in reversed(hunks):
        items[hunk.start : hunk.stop] = hunk.items
    return items


def digests(tree):
    return {node.digest for level in (tree.leaves, *tree.levels) for node in level}


def _key(pair):
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
