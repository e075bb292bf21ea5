"""Keys of checkpoints and events, events that travel with a commit, and writes under another branch's lease."""

from __future__ import annotations

import pytest

from holdfast.errors import Damaged, Fenced
from holdfast.store.catalog import Event
from holdfast.store.embedded import open_embedded
from holdfast.store.reading import BATCH_ROWS
from tests.store.support import Hand, event, new_branch


def _side(store, a, name=b"side"):
    return store.add_branch(
        a, key=name.ljust(32, b"."), body=b"\x80", uuid=name.ljust(16, b"."), head=0, head_id=b"", event=event()
    )


def _durably(hand, **more):
    hand.commit(**more)
    hand.store.flush(hand.row.b)


class Covered(Hand):
    """Writes a branch under the lease of another."""

    def __init__(self, store, branch, cover):
        self.store = store
        self.row = branch
        self.lease = branch
        self.head = branch.head_id
        self.depth = 0
        self.ids = []
        self.cover = cover

    def next(self, tail=b"tail", **more):
        return super().next(tail, guard=(self.cover.row.b, self.cover.lease.generation), **more)


def test_checkpoints_are_found_by_key_newest_first(store):
    one, two = Hand(store, new_branch(store, "one")), Hand(store, new_branch(store, "two"))
    one.commit(key=b"k" * 16)
    two.commit()
    two.commit(key=b"k" * 16)
    one.commit(key=b"l" * 16)
    assert [row.n for row in store.named(b"k" * 16)] == [3, 1]
    assert [(row.n, row.key) for row in store.named(b"l" * 16)] == [(4, b"l" * 16)]
    assert store.named(b"none") == []
    assert store.checkpoint(2).key is None


def test_events_are_found_by_key_oldest_first(store):
    hand = Hand(store, new_branch(store))
    keys = [b"%d" % number for number in range(2 * BATCH_ROWS)]
    numbers = store.add_events(hand.row.a, [Event(1, b"", key) for key in keys])
    assert numbers == list(range(numbers[0], numbers[0] + len(keys)))
    assert [row.key for row in store.events_named(reversed(keys))] == keys
    store.add_events(hand.row.a, [Event(2, b"again", keys[0])])
    assert [row.at for row in store.events_named([keys[0], keys[0]])] == [1, 2]
    assert store.events_named([]) == []


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_events_of_a_commit_come_with_it_or_not_at_all(path, durability):
    with_events = [Event(5, b"one", b"key"), Event(6, b"two", b"key")]
    store = open_embedded(path, durability=durability)
    hand = Hand(store, new_branch(store))
    hand.commit(events=with_events)
    store.flush()
    assert [row.body for row in store.events_named([b"key"])] == [b"one", b"two"]
    good, hand.head = hand.head, b"\0" * 32
    with pytest.raises(Fenced):
        _durably(hand, events=with_events)
    assert len(store.events_named([b"key"])) == 2
    hand.head = good
    hand.commit()
    store.close()
    again = open_embedded(path)  # the witness has not been told of what was undone
    assert [row.e for row in again.events()] == [1, 2, 3] or durability == "commit"
    again.close()


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_a_covering_lease_that_was_taken_over_fences_the_other_branches(path, durability):
    store = open_embedded(path, durability=durability)
    main = Hand(store, new_branch(store))
    side = Covered(store, _side(store, main.row.a), main)
    side.commit(events=[Event(1, b"", b"key")])
    main.commit()
    side.commit()
    store.flush()
    assert [row.parent for row in store.checkpoints(b=side.row.b)] == [0, 1]
    guard = (main.row.b, main.lease.generation)
    store.add_events(main.row.a, [event()], guard=guard)
    thief = open_embedded(path)
    thief.lease(main.row.b, takeover=True)
    before = store.counts()
    with pytest.raises(Fenced):
        _durably(side, events=[Event(1, b"", b"key")])
    with pytest.raises(Fenced):
        store.add_events(main.row.a, [event()], guard=guard)
    assert store.counts() == before
    thief.close()
    store.close()


def test_bytes_of_tails_are_summed_without_reading_them(store):
    hand = Hand(store, new_branch(store))
    for number in range(1, 11):
        hand.commit(b"x" * number)
    assert store.tail_bytes([1, 2, 10, 10, 99]) == 13
    assert store.tail_bytes([]) == 0


def test_scanning_sees_every_row_of_every_page_once(store):
    hand = Hand(store, new_branch(store))
    agents = [hand.row.a, new_branch(store, "two").a, new_branch(store, "three").a]
    store.add_events(hand.row.a, [event()] * (2 * BATCH_ROWS))
    for number in range(BATCH_ROWS + 3):
        store.set_tag(agents[number % 3], b"%032d" % number, body=b"", n=1, event=event())
    assert [key for key, fits in store.scan("event") if fits] == list(range(1, store.newest()[1] + 1))
    assert sorted(key for key, fits in store.scan("tag") if fits) == [b"%032d" % n for n in range(BATCH_ROWS + 3)]
    assert [fits for _, fits in store.scan("store")] == [True] * 3


def test_a_changed_key_is_damage(store):
    hand = Hand(store, new_branch(store))
    hand.commit(key=b"k")
    store._writer.connection.execute("UPDATE checkpoint SET key = x'6c'")
    with pytest.raises(Damaged):
        store.named(b"l")
