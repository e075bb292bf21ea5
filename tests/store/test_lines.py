"""Records of a line: numbers, the chain, who may write, and with what they share a flush."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from msgspec.structs import replace

from holdfast.errors import Damaged, DiskFull, Fenced
from holdfast.store import commits, lines
from holdfast.store.catalog import LineRow, LineStart, chunk_digest, effect_chain, node_digest
from holdfast.store.embedded import open_embedded
from holdfast.store.witness import witness_report
from tests.store.support import Hand, Pen, event, line, new_branch, start
from tests.store.test_faults import small_disk  # noqa: F401 - a fixture


@pytest.fixture
def hand(store):
    return Hand(store, new_branch(store))


@pytest.fixture
def pen(hand):
    return Pen(hand)


def flushes(path) -> int:
    return witness_report(path).newest.sequence


def bodies(store, b, **which) -> list[bytes]:
    return [row.body for row in store.effects(b, **which)]


def test_records_come_back_in_order_with_their_chain(store, hand, pen):
    assert store.line(hand.row.b) == LineRow(hand.row.b)
    pen.write(b"one", b"two", mark=1)
    pen.write(b"three")
    end = effect_chain(effect_chain(effect_chain(b"", b"one"), b"two"), b"three")
    assert store.line(hand.row.b) == LineRow(hand.row.b, 0, 0, 3, end)
    assert bodies(store, hand.row.b) == [b"one", b"two", b"three"]
    assert [(row.r, row.i, row.mark) for row in store.effects(hand.row.b)] == [(1, 1, 1), (2, 2, 0), (3, 3, 0)]
    assert bodies(store, hand.row.b, marked=True) == [b"one"]
    assert bodies(store, hand.row.b, after=1, before=3) == [b"two"]
    assert bodies(store, hand.row.b, newest_first=True, limit=2) == [b"three", b"two"]
    assert store.newest() == (0, store.newest()[1], 3)


def test_long_lines_are_read_in_pieces(store, hand, pen, monkeypatch):
    monkeypatch.setattr(lines, "RECORDS_AT_ONCE", 4)
    written = [bytes([number]) for number in range(21)]
    pen.write(*written)
    assert bodies(store, hand.row.b) == written
    assert bodies(store, hand.row.b, newest_first=True) == written[::-1]
    assert bodies(store, hand.row.b, after=7, before=17) == written[7:16]
    assert len(list(store.all_effects(after=3))) == 18


def test_a_branch_inherits_and_goes_its_own_way(store, hand, pen):
    pen.write(b"1", b"2", b"3")
    second = store.line(hand.row.b)

    def branch(name, begins):
        return store.add_branch(
            hand.row.a, key=name * 32, body=b"\x80", uuid=name * 16, head=0, head_id=b"", event=event(), line=begins
        )

    two = effect_chain(effect_chain(b"", b"1"), b"2")
    side = Pen(Hand(store, branch(b"s", LineStart(hand.row.b, 2, two))))
    assert (side.count, side.chain) == (2, two)
    side.write(b"3 of the side", b"4")
    deep = Pen(Hand(store, branch(b"d", LineStart(side.hand.row.b, 1, effect_chain(b"", b"1")))))
    deep.write(b"2 of the deep")
    pen.write(b"4 of the first")
    assert bodies(store, side.hand.row.b) == [b"1", b"2", b"3 of the side", b"4"]
    assert bodies(store, deep.hand.row.b) == [b"1", b"2 of the deep"]
    assert bodies(store, side.hand.row.b, newest_first=True, limit=3) == [b"4", b"3 of the side", b"2"]
    assert bodies(store, side.hand.row.b, after=1, before=4) == [b"2", b"3 of the side"]
    assert bodies(store, hand.row.b) == [b"1", b"2", b"3", b"4 of the first"]
    assert second.count == 3


def test_a_stale_generation_writes_nothing(store, hand, pen, path):
    pen.write(b"1")
    thief = open_embedded(path)
    winner = Pen(Hand(thief, hand.row, takeover=True))
    with pytest.raises(Fenced):
        pen.write(b"2")
    assert bodies(store, hand.row.b) == [b"1"]
    winner.write(b"2 of the winner")
    assert bodies(store, hand.row.b) == [b"1", b"2 of the winner"]
    thief.close()


def test_a_line_that_moved_on_is_not_written_over(store, hand, pen):
    stale = Pen(hand)
    pen.write(b"1")
    with pytest.raises(Fenced, match="line"):
        stale.write(b"another 1")
    elsewhere = pen.next(b"2")
    with pytest.raises(Fenced):
        store.append(replace(elsewhere, chain=b"x" * 32), flush=True)
    store.append(elsewhere, flush=True)
    assert bodies(store, hand.row.b) == [b"1", b"2"]


def test_records_wait_for_company_but_not_for_long(store, hand, pen, path):
    before = flushes(path)
    for number in range(50):
        pen.write(bytes([number]), flush=False)
    other = open_embedded(path, readonly=True)
    deadline = time.monotonic() + 180
    while other.line(hand.row.b).count < 50 and time.monotonic() < deadline:
        time.sleep(commits.BATCH_DELAY_S)
    assert other.line(hand.row.b).count == 50
    assert flushes(path) - before < 50
    other.close()


def test_one_transaction_carries_everything_that_waits(store, hand, pen, path, monkeypatch):
    monkeypatch.setattr(commits, "BATCH_DELAY_S", 60)
    before = flushes(path)
    for number in range(20):
        pen.write(bytes([number]), flush=False)
    assert flushes(path) == before
    pen.write(b"intent")
    assert flushes(path) == before + 1
    assert store.line(hand.row.b).count == 21
    pen.write(b"read", flush=False)
    hand.commit()  # speaks of the record, so it takes it along
    assert flushes(path) == before + 2
    assert store.line(hand.row.b).count == 22


def test_reading_states_does_not_flush_records(store, hand, pen, path, monkeypatch):
    monkeypatch.setattr(commits, "BATCH_DELAY_S", 60)
    hand.commit()
    before = flushes(path)
    pen.write(b"read", flush=False)
    store.checkpoint(1)
    store.branch_row(hand.row.b)
    assert flushes(path) == before
    assert bodies(store, hand.row.b) == [b"read"]  # whoever reads records sees what was accepted
    assert flushes(path) == before + 1


def test_a_commit_without_records_costs_what_it_did(store, hand, monkeypatch):
    hand.commit()
    statements = []
    store._writer.connection.trace_v2(1, lambda found: statements.append(found["sql"]))
    hand.commit()
    store._writer.connection.trace_v2(0, None)
    assert len(statements) == 5  # begin, head, checkpoint, tail, commit
    assert not any("line" in text or "effect" in text for text in statements)


def test_an_intent_is_a_handful_of_statements(store, hand, pen):
    pen.write(b"1")
    statements = []
    store._writer.connection.trace_v2(1, lambda found: statements.append(found["sql"]))
    pen.write(b"2")
    store._writer.connection.trace_v2(0, None)
    assert len(statements) == 6  # begin, generation, end of the line, number, record, commit
    assert store._batches._thread is None  # nobody else was woken for it


def test_threads_share_flushes(store, path):
    pens = [Pen(Hand(store, new_branch(store, f"thread-{number}"))) for number in range(6)]
    before = flushes(path)

    def work(pen):
        for number in range(40):
            pen.write(bytes([number]))

    threads = [threading.Thread(target=work, args=(pen,)) for pen in pens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.counts()["effect"] == 240
    assert flushes(path) - before < 240
    for pen in pens:
        assert bodies(store, pen.hand.row.b) == [bytes([number]) for number in range(40)]


def test_records_travel_with_a_checkpoint_or_a_head(store, hand, pen):
    append = pen.next(b"with the checkpoint")
    hand.commit(append=append)
    first = hand.head
    hand.commit()
    append = pen.next(b"with the head")
    store.set_head(
        hand.row.b,
        generation=hand.lease.generation,
        expect_head_id=hand.head,
        head=1,
        head_id=first,
        event=event(),
        append=append,
    )
    hand.head = first
    assert bodies(store, hand.row.b) == [b"with the checkpoint", b"with the head"]
    refused = hand.next(append=replace(pen.next(b"3"), count=7))
    with pytest.raises(Fenced):
        store.commit(refused)
    assert store.branch_row(hand.row.b).head_id == first
    assert store.counts()["checkpoint"] == 2


def test_batched_checkpoints_and_records_keep_their_order(path):
    store = open_embedded(path, durability="batched")
    hand = Hand(store, new_branch(store))
    pen = Pen(hand)
    for number in range(30):
        pen.write(b"before %d" % number, flush=False)
        hand.commit(append=pen.next(b"with %d" % number))
    pen.write(b"end")
    assert store._batches.pending is False
    assert store.newest()[0] == 30
    assert store.newest()[2] == 61
    assert [row.i for row in store.effects(hand.row.b)] == list(range(1, 62))
    store.close()


def test_nodes_and_chunks_come_with_their_record(store, hand, pen):
    node, chunk = b"l\0" + os.urandom(300), os.urandom(5000)
    pen.write(b"node", refs=node_digest(node), nodes=[(node_digest(node), node)])
    pen.write(b"chunk", chunks=[(chunk_digest(chunk), chunk)], flush=False)
    assert store.nodes([node_digest(node)]) == {node_digest(node): node}
    assert list(store.chunks([chunk_digest(chunk)])) == [chunk]
    assert next(store.effects(hand.row.b)).refs == node_digest(node)


def test_withdrawing_undoes_what_was_only_accepted(store, hand, pen, monkeypatch):
    monkeypatch.setattr(commits, "BATCH_DELAY_S", 60)
    pen.write(b"1", flush=False)
    two = store.enqueue(pen.next(b"2"), soon=True)
    three = store.enqueue(pen.next(b"3"), soon=True)
    assert not store.withdraw(two)  # the third stands on it
    assert store.withdraw(three)
    assert store.withdraw(two)
    assert not store.withdraw(two)
    store.flush()
    assert bodies(store, hand.row.b) == [b"1"]


def test_fenced_records_are_heard_of_at_the_next_call(store, hand, pen, monkeypatch):
    monkeypatch.setattr(commits, "BATCH_DELAY_S", 60)
    bystander = Pen(Hand(store, new_branch(store, "other")))
    Hand(store, hand.row, takeover=True)
    pen.write(b"1", flush=False)
    bystander.write(b"1", flush=False)
    pen.write(b"2", flush=False)
    bystander.write(b"2")
    with pytest.raises(Fenced):
        pen.write(b"3", flush=False)
    assert bodies(store, bystander.hand.row.b) == [b"1", b"2"]
    assert bodies(store, hand.row.b) == []


@pytest.mark.root
def test_full_disk_gives_records_back(small_disk):  # noqa: F811
    store = open_embedded(small_disk / "store")
    hand = Hand(store, new_branch(store))
    pen = Pen(hand)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    accepted = 0
    while True:
        append = pen.next(b"%05d" % accepted + os.urandom(30_000))
        queued = store.enqueue(append, soon=True)
        try:
            store.complete(queued)
        except DiskFull:
            assert store.withdraw(queued)
            break
        accepted += 1
    assert not store.pending
    assert len(bodies(store, hand.row.b)) == accepted > 5
    pen.count, pen.chain = append.count, append.chain
    ballast.unlink()
    pen.write(b"another")
    assert bodies(store, hand.row.b)[-1] == b"another"
    assert store.line(hand.row.b).count == accepted + 1
    store.close()


def test_kill_leaves_what_was_acknowledged(path):
    """A child that appends without end is killed between any two steps; what it said is there."""
    for delay_s in (0.05, 0.15, 0.3):
        child = start("append", path, f"agent-{delay_s}")
        assert line(child) == "ready"
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        said = [int(text) for text in child.communicate(timeout=180)[0].split() if text.isdigit()]
        store = open_embedded(path)
        b = store.branches(store.agents()[-1].a)[0].b
        found = bodies(store, b)
        assert len(found) >= max(said, default=0)
        end = b""
        for body in found:
            end = effect_chain(end, body)
        assert store.line(b) == LineRow(b, 0, 0, len(found), end)
        # What is durable is a prefix, whether or not it was waited for.
        assert [int(body) for body in found] == list(range(1, len(found) + 1))
        store.close()


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("DELETE FROM effect WHERE i = 2", "record 2"),
        ("DELETE FROM effect WHERE i = 3", "record 3"),
        ("UPDATE effect SET body = x'61' WHERE i = 2", "effect"),
        ("UPDATE line SET count = 2", "line"),
    ],
)
def test_damage_is_met_when_reading(path, sql, names):
    import apsw

    store = open_embedded(path)
    hand = Hand(store, new_branch(store))
    Pen(hand).write(b"1", b"2", b"3")
    store.close()
    connection = apsw.Connection(str(path / "store.db"))
    connection.execute(sql)
    connection.close()
    store = open_embedded(path, accept_loss=True)
    with pytest.raises(Damaged, match=names):
        bodies(store, hand.row.b)
    store.close()


def test_a_catalog_that_lost_records_does_not_open(path, tmp_path):
    import shutil

    store = open_embedded(path)
    hand = Hand(store, new_branch(store))
    store.close()
    shutil.copy(path / "store.db", tmp_path / "old.db")
    store = open_embedded(path)
    again = Hand(store, hand.row)
    Pen(again).write(b"1", b"2")
    store.close()
    kept = witness_report(path).newest
    assert kept.r == 2
    shutil.copy(tmp_path / "old.db", path / "store.db")
    with pytest.raises(Damaged) as caught:
        open_embedded(path)
    assert "effects 1 to 2" in caught.value.lost
