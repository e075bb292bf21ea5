"""Collection: what is there that nobody needs goes, and nothing else; and what holds of every store after it."""

from __future__ import annotations

import pytest

from holdfast.agent import branch, collection, history, removal, retention, sealing
from holdfast.agent.graph import Graph
from holdfast.agent.policy import Policy
from holdfast.agent.store import Store, open_as
from holdfast.codec.document import plain
from holdfast.errors import Damaged
from holdfast.store.packs import file_name


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Seals and segments as they come after thousands of checkpoints, after a few."""
    make_small(monkeypatch.setattr)


def make_small(patch):
    patch(branch, "SEAL_CHECKPOINTS", 5)
    patch(sealing, "FOLD_MIN", 2)


def say(word):
    """To whoever has started this process."""
    print(word, flush=True)


# -- what holds of every store --------------------------------------------------------------------------------------


def states(store):
    """The state of every checkpoint that anybody sees, by its id; all of it is read and proven."""
    found = {}
    view = store._db.view
    for agent in view.agents():
        for point in Graph(view, agent).everything():
            state = history.read_all(store._db.now, point)
            assert state.digests() == point.manifest.sections
            history.operations_of(view, point)
            found[point.id] = plain(store._load(point))
    return found


def sound(store):
    """Every checkpoint that is seen can be read, and refs lead to something."""
    store.flush()
    states(store)
    view = store._db.view
    rows = view.checkpoints()
    numbers = {row.n for row in rows}
    assert len(numbers) == len(rows)
    assert {tag.n for tag in view.tags()} <= numbers
    assert {branch.head for branch in view.branches()} <= numbers | {0}
    assert {n for agent in view.agents() for n in view.validities(agent.a)} <= numbers
    for n, over in view.shallow().items():
        row = view.row(n)
        assert row.sealed
        assert not row.parent
        assert over in numbers | {0}
        assert view.point(row).cut


def swept(store):
    """Nothing is there that nothing reaches. Worked out here once more, from above."""
    sound(store)
    view, agents = store._db.view, store._db.view.agents()
    rows = {row.n: row for row in view.checkpoints()}
    assert set(rows) == set().union(*(Graph(view, agent).numbers for agent in agents))
    members = [n for row in view.rows("segment") for n in view.segment(row[0]).members]
    assert sorted(members) == sorted(n for n, row in rows.items() if row.s)
    nodes, chunks = set(), set()

    def down(names, certain=True):
        for name in names:
            if name not in nodes and (raw := view.nodes([name]).get(name)) is not None:
                nodes.add(name)
                down(history.children(raw))
                if not raw[1]:
                    value(raw)
            else:
                assert name in nodes or not certain

    def value(data):
        named, bulk = history.named_in(data)
        chunks.update(bulk)
        down(named, certain=False)

    for row in rows.values():
        point = view.point(row)
        down([point.manifest.metadata, *(point.manifest.roots if row.sealed else ())])
        value(view.operations(point))
    for s, *_ in view.rows("segment"):
        down(view.segment(s).refs[0])
    lines = {row.line for row in rows.values()} | {one.line for one in view.branches()}
    records = {record.r: record for r in lines for record in view.line(r)}
    for record in records.values():
        down(record.refs)
        value(record.body)
    assert {name for _, name, _ in view.rows("node")} == nodes
    assert {row[0] for row in view.rows("chunk")} <= chunks
    assert {row[0] for row in view.rows("record")} == set(records)
    packs = {p: uuid for p, uuid, _ in view.rows("pack")}
    assert set(packs) == {row[1] for row in view.rows("chunk")}
    assert {name for name, _ in store._db.packs.here.names()} == {file_name(uuid) for uuid in packs.values()}
    assert {entry.a for entry in view.log() if not entry.key} <= {0, *(agent.a for agent in agents)}
    assert collection.WASTE not in view.facts()


# -- what a sweep does ----------------------------------------------------------------------------------------------


class Stop(Exception):
    """What ends work at some step."""


def test_stopped_at_any_step_the_store_is_whole_and_every_node_has_all_that_it_names(store_path, monkeypatch):
    for module in (collection, removal):
        monkeypatch.setattr(module, "AT_ONCE", 2)
    with open_as(Store, store_path) as store:
        agent = store.agent("a")
        for number in range(20):
            agent.state["big"] = {"inside": [f"{number} {n} " * 40 for n in range(400)]}
            agent.checkpoint(str(number))
        known, view, left = states(store), store._db.view, iter(range(1, 10_000, 17))

        def pace():
            pace.steps -= 1
            if not pace.steps:
                raise Stop

        while True:
            pace.steps = next(left)
            try:
                retention.follow(store, [(agent._row, Policy(last=2))], pace)
                break
            except Stop:
                sound(store)
                assert known.items() >= states(store).items()
                nodes = view.nodes([name for _, name, _ in view.rows("node")])
                for raw in nodes.values():
                    index, named, _ = collection.names_of(raw)
                    assert nodes.keys() >= {*index, *named}
        swept(store)


def sweep(store):
    """Delete all that nobody sees, and what only that needs."""
    removal.let_go(store._db, lambda _, links: removal.Plan(links, removal.everything(links)))
    collection.collect(store._db)


@pytest.mark.parametrize(
    "harm", ["branch WHERE b = 2", "node WHERE k = (SELECT max(k) FROM node)", "agent WHERE a = 1"]
)
def test_where_something_is_missing_nothing_is_known_to_be_waste(store_path, harm):
    with open_as(Store, store_path) as store:
        for name in ("a", "b"):
            agent = store.agent(name)
            for number in range(12):
                agent.state["messages"] = [f"{name} {number} {n} " * 30 for n in range(99)]
                agent.checkpoint(str(number))
        store._db.change(lambda change: change.tx.do(f"DELETE FROM {harm}"))
        before = store._db.view.counts()
        with pytest.raises(Damaged):
            sweep(store)
        assert store._db.view.counts() == before
