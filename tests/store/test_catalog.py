"""Rows: what is written is read, and what was changed behind our back is not."""

from __future__ import annotations

import os

import apsw
import pytest
from msgspec.structs import replace

from holdfast.codec.values import encode
from holdfast.errors import BadName, Damaged, Fenced
from holdfast.store.catalog import (
    Append,
    Event,
    NewRecord,
    chunk_digest,
    metadata_digest,
    node_digest,
    row_sum,
)
from holdfast.store.embedded import open_embedded
from holdfast.store.reading import BATCH_ROWS
from holdfast.store.schema import TABLE_NAMES
from tests.store.support import Hand, event, new_branch


def test_sum_is_that_of_the_format_page():
    from blake3 import blake3

    data = b"holdfast.row\0" + encode(["agent", 1, b"u", b"k", b"b"])
    assert row_sum("agent", 1, b"u", b"k", b"b") == blake3(data).digest()[:8]


def test_agents_and_branches_come_back_as_written(store):
    branch = new_branch(store)
    (agent,) = store.agents()
    assert store.agent(agent.key) == agent
    assert store.branches(agent.a) == [branch]
    assert store.branch(agent.a, branch.key) == branch == store.branch_row(branch.b)
    other = store.add_branch(agent.a, key=b"x" * 32, body=b"\x80", uuid=b"y" * 16, head=0, head_id=b"", event=event())
    assert store.branches(agent.a) == [branch, other]
    with pytest.raises(BadName):
        store.add_branch(agent.a, key=b"x" * 32, body=b"\x80", uuid=b"y" * 16, head=0, head_id=b"", event=event())
    assert [row.e for row in store.events()] == [1, 2]
    assert store.agent(b"none") is None
    assert store.branch(agent.a, b"none") is None


def test_adding_an_agent_twice_gives_the_first_one(store):
    first = new_branch(store)
    assert new_branch(store) == first
    assert len(list(store.events())) == 1


def test_commits_form_a_chain(store):
    hand = Hand(store, new_branch(store))
    numbers = [hand.commit() for _ in range(10)]
    rows = store.ancestry(numbers[-1])
    assert [row.n for row in rows] == numbers[::-1]
    assert [row.id for row in rows] == hand.ids[::-1]
    assert [row.parent for row in rows] == [*numbers[-2::-1], 0]
    assert [row.n for row in store.ancestry(10, stop_at=7)] == [10, 9, 8]
    assert [row.n for row in store.ancestry(10, limit=2)] == [10, 9]
    assert store.ancestry(0) == store.ancestry(5, stop_at=5) == []
    assert store.branch_row(hand.row.b).head_id == hand.head
    assert [row.n for row in store.tips(hand.row.a)] == [10]


def test_commit_on_another_parent_or_generation_is_fenced_and_leaves_nothing(store):
    hand = Hand(store, new_branch(store))
    hand.commit()
    good, hand.head = hand.head, b"\0" * 32
    with pytest.raises(Fenced):
        hand.commit()
    hand.head = good
    hand.lease.generation += 1
    with pytest.raises(Fenced):
        hand.commit()
    hand.lease.generation -= 1
    assert hand.commit() == 2
    assert store.counts()["checkpoint"] == store.counts()["tail"] == 2


def test_numbers_are_dense_whoever_writes_in_between(store, path):
    """The next number is remembered, and must not be when another connection wrote, or a transaction was undone."""
    other = open_embedded(path)
    here, there = Hand(store, new_branch(store)), Hand(other, new_branch(other, "two"))
    given = [here.commit(), here.commit(), there.commit(), here.commit(), there.commit(), there.commit()]
    with pytest.raises(Fenced):
        store.commit(replace(here.next(), parent_id=b"x" * 32))
    given += [here.commit(), there.commit()]
    with pytest.raises(Fenced):
        store.commit(replace(here.next(), parent_id=b"x" * 32))
    store.add_events(here.row.a, [event()])
    given += [here.commit(), here.commit(), there.commit()]
    store._writer.connection.execute("DELETE FROM checkpoint WHERE n = ?", (given[-1],))
    given += [here.commit()]
    other.close()
    assert given == list(range(1, len(given) + 1))


def test_events_are_numbered_and_guards_compared_whoever_writes_in_between(store, path):
    other = open_embedded(path)
    here, there = Hand(store, new_branch(store)), Hand(other, new_branch(other, "two"))
    guard = (there.row.b, there.lease.generation)
    for hand in (here, here, there, here, there, there, here):
        hand.commit(events=[event(), event()], guard=guard)
    assert [row.e for row in store.events()] == list(range(1, 2 + 2 * 7 + 1))
    taker = open_embedded(path)
    taker.lease(there.row, takeover=True)
    with pytest.raises(Fenced):
        here.commit(events=[event()], guard=guard)
    taker.close()
    other.close()


def test_closing_gives_back_what_sealing_freed(path):
    store = open_embedded(path)
    hand = Hand(store, new_branch(store))
    for _ in range(100):
        hand.commit(os.urandom(4_000))
    hand.commit(None, sealed=True, places=b"\x92\x90\x90")
    assert store.sizes()["free"] > 100 * 4_000
    store.close()
    store = open_embedded(path)
    assert store.sizes()["free"] < 16 * 4_096
    assert [row.id for row in store.checkpoints(b=hand.row.b)] == hand.ids
    store.close()


def test_head_moves_only_for_its_writer(store):
    hand = Hand(store, new_branch(store))
    hand.commit()
    hand.commit()
    first = store.checkpoint(1)
    args = {"head": 1, "head_id": first.id, "event": event()}
    with pytest.raises(Fenced):
        store.set_head(hand.row.b, generation=hand.lease.generation, expect_head_id=first.id, **args)
    with pytest.raises(Fenced):
        store.set_head(hand.row.b, generation=99, expect_head_id=hand.head, **args)
    moved = store.set_head(hand.row.b, generation=hand.lease.generation, expect_head_id=hand.head, **args)
    assert (moved.head, moved.head_id) == (1, first.id)
    hand.head = first.id
    assert hand.commit() == 3
    assert store.checkpoint(3).parent == 1
    assert [row.n for row in store.tips(hand.row.a)] == [2, 3]


def test_base_is_the_nearest_sealed_ancestor(store):
    hand = Hand(store, new_branch(store))
    hand.commit()
    hand.commit(None, sealed=True, places=b"\x90")
    hand.commit()
    hand.commit()
    assert [store.checkpoint(n).base for n in (1, 2, 3, 4)] == [0, 2, 2, 2]
    assert [store.checkpoint(n).sealed for n in (1, 2, 3, 4)] == [False, True, False, False]
    hand.store.close()
    again = open_embedded(store.path)
    other = Hand(again, hand.row)
    assert again.checkpoint(other.commit()).base == 2
    again.close()


def test_seal_takes_over_the_tails_of_its_branch_alone(store):
    one, two = Hand(store, new_branch(store, "one")), Hand(store, new_branch(store, "two"))
    for number in range(3):
        one.commit(b"1%d" % number)
        two.commit(b"2%d" % number)
    assert [data for _, data in store.tails(one.row.b)] == [b"10", b"11", b"12"]
    assert store.last_seal(one.row.b) is None
    n = one.commit(None, sealed=True, places=b"\x90")
    assert list(store.tails(one.row.b)) == []
    assert [data for _, data in store.tails(two.row.b, after=2)] == [b"21", b"22"]
    assert store.tail(1) is None
    assert store.tail(2) == b"20"
    assert store.covering_seal(one.row.b, 1).n == n == store.last_seal(one.row.b).n
    assert store.covering_seal(one.row.b, n + 1) is None
    assert store.covering_seal(two.row.b, 1) is None


def test_nodes_are_stored_once_and_small(store):
    hand = Hand(store, new_branch(store))
    text, noise = b"l\0" + b"text " * 2000, b"l\0" + os.urandom(5000)
    nodes = [(node_digest(node), node) for node in (text, noise, text)]
    hand.commit(nodes=nodes)
    hand.commit(nodes=nodes)
    asked = [digest for digest, _ in nodes] + [b"\0" * 32]
    assert store.nodes(asked) == dict(nodes)
    assert store.has_nodes(asked) == set(dict(nodes))
    assert set(store.node_digests()) == set(dict(nodes))
    stored = dict(store._select("SELECT digest, data FROM node"))
    assert len(stored) == 2
    assert stored[nodes[0][0]][0] == 1
    assert len(stored[nodes[0][0]]) < 200
    assert stored[nodes[1][0]] == b"\0" + noise


def test_tags_validity_metadata_and_events(store):
    hand = Hand(store, new_branch(store))
    metadata = b"\x81\xa1k\xa1v"
    hand.commit(metadata=(metadata_digest(metadata), metadata))
    assert store.metadata(metadata_digest(metadata)) == metadata
    assert store.metadata(b"\0" * 32) is None
    a = hand.row.a
    store.set_tag(a, b"t" * 32, body=b"1", n=1, event=event())
    store.set_tag(a, b"t" * 32, body=b"2", n=1, event=event())
    assert [tag.body for tag in store.tags(a)] == [b"2"]
    assert store.drop_tag(a, b"t" * 32, event=event())
    before = store.newest()[1]
    assert not store.drop_tag(a, b"t" * 32, event=event())
    assert store.newest()[1] == before
    store.set_validity(a, 1, body=b"bad", event=event())
    assert store.validity(a, 1).body == b"bad"
    store.set_validity(a, 1, body=None, event=event())
    assert store.validity(a, 1) is None
    (last,) = store.add_events(a, [Event(7, b"seven")])
    assert next(store.events(newest_first=True)).e == last
    assert [row.body for row in store.events(a=a, newest_first=True, limit=1)] == [b"seven"]
    assert list(store.events(a=a + 1)) == []
    assert list(store.events(after=last)) == []


def test_streams_cross_their_batches_in_order(store):
    hands = [Hand(store, new_branch(store, name)) for name in ("one", "two")]
    store._writer.transaction(lambda: [_apply(store, hands[number % 3 == 0]) for number in range(3 * BATCH_ROWS)])
    everything = [row.n for row in store.checkpoints()]
    assert everything == list(range(1, 3 * BATCH_ROWS + 1))
    assert [row.n for row in store.checkpoints(newest_first=True)] == everything[::-1]
    second = [row.n for row in store.checkpoints(b=hands[1].row.b)]
    assert second == [row.n for row in store.checkpoints(a=hands[1].row.a)] == everything[::3]
    assert [row.n for row in store.checkpoints(after=5, before=9)] == [6, 7, 8]
    assert [row.n for row in store.checkpoints(newest_first=True, limit=3)] == everything[:-4:-1]
    assert len(list(store.tails(hands[0].row.b))) == 2 * BATCH_ROWS


def _apply(store, hand):
    commit = hand.next()
    hand.head = commit.id
    return store._writer.apply(commit, (), None)


def test_snapshot_sees_one_moment(store):
    hand = Hand(store, new_branch(store))
    hand.commit()
    with store.snapshot():
        assert store.counts()["checkpoint"] == 1
        hand.commit()
        assert store.counts()["checkpoint"] == 1
    assert store.counts()["checkpoint"] == 2


@pytest.mark.parametrize("table", [name for name in TABLE_NAMES if name != "tail"])
def test_every_column_of_every_row_is_checked(path, table):
    store = open_embedded(path)
    _fill(store)
    store.close()
    columns = _columns(path, table)
    for column, value in columns:
        if value is None:
            worse = b"x"
        elif isinstance(value, int):
            worse = value + 1
        elif isinstance(value, str):
            worse = value + "x"
        else:
            worse = bytes([value[0] ^ 1]) + value[1:] if value else b"x"
        with _outside(path) as connection:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} IS ?", (worse, value))
        with pytest.raises(Damaged) as caught:
            _read_everything(path)
        assert table in str(caught.value) or table in {"store", "node"}
        with _outside(path) as connection:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} IS ?", (value, worse))
    _read_everything(path)


def _fill(store):
    hand = Hand(store, new_branch(store))
    chunk = os.urandom(5000)
    node = b"l\0" + os.urandom(300)
    hand.commit()
    hand.commit(
        sealed=True,
        places=b"\x90",
        nodes=[(node_digest(node), node)],
        metadata=(metadata_digest(b"\x80"), b"\x80"),
        chunks=[(chunk_digest(chunk), chunk)],
    )
    store.set_tag(hand.row.a, b"t" * 32, body=b"tag", n=2, event=event())
    store.set_validity(hand.row.a, 2, body=b"validity", event=event())
    record = NewRecord(1, node_digest(node), b"\x80")
    store.append(Append(hand.row.a, hand.row.b, hand.lease.generation, 0, b"", [record], b"c" * 32), flush=True)


def _columns(path, table):
    with _outside(path) as connection:
        row = connection.execute(f"SELECT * FROM {table} ORDER BY 1 DESC LIMIT 1")
        names = [column[0] for column in row.get_description()]
        # The node's own number is nobody's business but SQLite's.
        return [(name, value) for name, value in zip(names, row.fetchone(), strict=True) if name != "k"]


def _outside(path):
    """A connection of another hand; inside a ``with`` it is one transaction."""
    return apsw.Connection(str(path / "store.db"), flags=apsw.SQLITE_OPEN_READWRITE)


def _read_everything(path):
    store = open_embedded(path, readonly=True)
    try:
        for agent in store.agents():
            assert store.agent(agent.key) == agent
            for branch in store.branches(agent.a):
                store.last_seal(branch.b)
                assert [row.n for row in store.ancestry(branch.head)] == [2, 1]
            store.tags(agent.a)
        list(store.events())
        for line in store.lines():
            assert [row.i for row in store.effects(line.b)] == [1]
        assert len(list(store.all_effects())) == 1
        store.validity(1, 2)
        if not store.nodes(list(store.node_digests())):
            raise Damaged("node")
        for (digest,) in store._select("SELECT digest FROM metadata"):
            store.metadata(digest)
        for (digest,) in store._select("SELECT digest FROM chunk"):
            list(store.chunks([digest]))
        store.pack_rows()
        if store.validity(1, 2) is None or store.last_seal(1) is None or not store.tags(1):
            raise Damaged("validity seal tag")
        if store.agent(b"one".ljust(32, b".")) is None or store.branch(1, b"main".ljust(32, b".")) is None:
            raise Damaged("agent branch")
    finally:
        store.close()


def test_planted_trigger_is_refused(store, path):
    store.close()
    with _outside(path) as connection:
        connection.execute("CREATE TRIGGER evil AFTER INSERT ON checkpoint BEGIN DELETE FROM event; END")
    with pytest.raises(Damaged, match="tables"):
        open_embedded(path)
