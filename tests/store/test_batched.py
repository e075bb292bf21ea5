"""Group commit: order, barriers, bounds and the fate of a fenced writer."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.errors import Fenced
from holdfast.store import commits
from holdfast.store.catalog import chunk_digest, node_digest
from holdfast.store.embedded import open_embedded
from tests.store.support import Hand, event, finish, new_branch, start


@pytest.fixture
def batched(path):
    store = open_embedded(path, durability="batched")
    yield store
    store.close()


def test_commits_keep_their_order_and_flush_makes_them_durable(batched, path):
    hands = [Hand(batched, new_branch(batched, name)) for name in ("one", "two")]
    for _ in range(100):
        for hand in hands:
            assert hand.commit() is None
    batched.flush()
    other = open_embedded(path, readonly=True)
    for hand in hands:
        rows = other.ancestry(other.branch_row(hand.row.b).head)
        assert [row.id for row in rows] == hand.ids[::-1]
    other.close()


def test_flushes_are_shared(batched, path):
    hand = Hand(batched, new_branch(batched))
    before = int.from_bytes((path / "witness").read_bytes()[8:16], "big")
    for _ in range(500):
        hand.commit()
    batched.flush()
    slots = (path / "witness").read_bytes()
    after = max(int.from_bytes(slots[start : start + 8], "big") for start in (8, 72))
    assert after - before < 500


def test_commit_becomes_durable_without_a_flush_within_the_delay(batched, path):
    hand = Hand(batched, new_branch(batched))
    hand.commit()
    other = open_embedded(path, readonly=True)
    deadline = time.monotonic() + 180
    while not other.newest()[0] and time.monotonic() < deadline:
        time.sleep(commits.BATCH_DELAY_S)
    assert other.newest()[0] == 1
    other.close()


def test_reading_sees_what_was_accepted(batched):
    hand = Hand(batched, new_branch(batched))
    for number in range(1, 20):
        hand.commit()
        assert batched.branch_row(hand.row.b).head == number


def test_fenced_writer_hears_of_it_at_its_next_call_and_others_do_not(batched, monkeypatch):
    monkeypatch.setattr(commits, "BATCH_DELAY_S", 60)  # nothing is written before all of them are put
    branch = new_branch(batched, "fought-over")
    loser, bystander = Hand(batched, branch), Hand(batched, new_branch(batched, "other"))
    loser.commit()
    batched.flush()
    winner = Hand(batched, branch, takeover=True)
    for _ in range(5):
        loser.commit()
        bystander.commit()
    batched._batches.settle()
    with pytest.raises(Fenced):
        loser.commit()
    loser.commit()  # once told, a writer that goes on is refused again
    with pytest.raises(Fenced):
        batched.flush(branch.b)
    bystander.commit()
    winner.commit()
    batched.flush()
    assert [row.n for row in batched.ancestry(batched.branch_row(branch.b).head)][-1] == 1
    assert len(batched.ancestry(batched.branch_row(bystander.row.b).head)) == 6


class Scarce(list):
    """Rows that there was no memory, or no stack, to go through at first."""

    def __init__(self, rows, error):
        super().__init__(rows)
        self.errors = [error]

    def __iter__(self):
        if self.errors:
            raise self.errors.pop()
        return super().__iter__()


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_a_lack_of_memory_or_stack_passes_and_nothing_is_lost(batched, monkeypatch, error):
    monkeypatch.setattr(commits, "BATCH_DELAY_S", 60)  # whoever flushes writes
    one, two = Hand(batched, new_branch(batched, "one")), Hand(batched, new_branch(batched, "two"))
    one.commit()
    digest = node_digest(b"node")
    items = [(one.next(), ()), (two.next(), Scarce([(digest, b"\x00node")], error))]
    one.ids.append(items[0][0].id)
    for item, nodes in items:
        batched._batches.put(item, nodes)
    with pytest.raises(error):
        batched.flush()
    batched.flush()
    assert [row.id for row in batched.ancestry(batched.branch_row(one.row.b).head)] == one.ids[::-1]
    assert batched.branch_row(two.row.b).head_id == items[1][0].id
    assert batched.nodes([digest]) == {digest: b"node"}


def test_store_flush_says_once_that_commits_were_lost(batched):
    branch = new_branch(batched)
    loser = Hand(batched, branch)
    Hand(batched, branch, takeover=True)
    loser.commit()
    with pytest.raises(Fenced):
        batched.flush()
    batched.flush()
    with pytest.raises(Fenced):
        loser.commit()


def test_other_changes_come_after_accepted_commits(batched):
    hand = Hand(batched, new_branch(batched))
    hand.commit()
    hand.commit()
    first = batched.checkpoint(1)
    batched.set_head(
        hand.row.b,
        generation=hand.lease.generation,
        expect_head_id=hand.head,
        head=1,
        head_id=first.id,
        event=event(),
    )
    hand.head = first.id
    hand.commit()
    assert batched.checkpoint(3).parent == 1


def test_bulk_commits_keep_their_place_in_the_order(batched):
    hand = Hand(batched, new_branch(batched))
    hand.commit()
    assert hand.commit(chunks=[(chunk_digest(b"bulk"), b"bulk")]) == 2
    hand.commit()
    batched.flush()
    assert [row.n for row in batched.ancestry(3)] == [3, 2, 1]


def test_base_is_right_when_the_sealed_commit_is_still_waiting(batched):
    hand = Hand(batched, new_branch(batched))
    hand.commit()
    hand.commit(None, sealed=True, places=b"\x90")
    hand.commit()
    assert [row.base for row in batched.checkpoints()] == [0, 2, 2]
    assert [n for n, _ in batched.tails(hand.row.b)] == [3]


def test_queue_is_bounded_and_callers_wait(batched, monkeypatch):
    monkeypatch.setattr(commits, "QUEUE_COMMITS", 4)
    hand = Hand(batched, new_branch(batched))
    longest = 0
    for _ in range(100):
        hand.commit()
        longest = max(longest, len(batched._batches._queue))
    assert longest <= 4
    batched.flush()
    assert batched.newest()[0] == 100


def test_many_threads_put_and_flush(batched):
    hands = [Hand(batched, new_branch(batched, f"thread-{number}")) for number in range(4)]

    def work(hand):
        for number in range(100):
            hand.commit()
            if number % 10 == 0:
                batched.flush(hand.row.b)

    threads = [threading.Thread(target=work, args=(hand,)) for hand in hands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batched.flush()
    assert batched.counts()["checkpoint"] == 400


def test_close_and_process_end_flush(path):
    store = open_embedded(path, durability="batched")
    hand = Hand(store, new_branch(store))
    for _ in range(10):
        hand.commit()
    store.close()
    finish(start("exit_batched", path.with_name("other")))
    for place, count in ((path, 10), (path.with_name("other"), 50)):
        again = open_embedded(place)
        assert again.counts()["checkpoint"] == count
        again.close()
