"""Whoever can write a store's rows, with sums that fit, harms neither its readers nor whoever repairs it."""

from __future__ import annotations

from contextlib import suppress

import pytest

import holdfast
from holdfast.store.changes import Said
from holdfast.store.cipher import PLAIN
from holdfast.store.manifest import Manifest
from holdfast.store.tables import TABLES
from tests.agent import damage


@pytest.fixture
def path(store_path):
    damage.build(store_path)
    return store_path


@pytest.mark.parametrize("body", [-(2**63), 2**62, "text", 1.5], ids=repr)
def test_a_record_whose_body_is_of_another_type_costs_that_record_alone(path, body):
    ((r,),) = damage.rows(path, "SELECT min(r) FROM record")
    damage.spoil(path, "UPDATE record SET body = ? WHERE r = ?", body, r)
    with damage.opened(path) as store:
        assert not store.verify().ok
    report = holdfast.repair(path)
    assert not report.whole
    assert not [text for text in report.problems if text.startswith("in the new store")]


@pytest.mark.parametrize("what", ["signal", "signal dropped"])
@pytest.mark.parametrize("id", [1.5, [b"x"], None, "text"], ids=repr)
def test_an_entry_that_is_no_signal_is_passed_over_or_called_damaged(tmp_path, what, id):
    """By everybody who looks for signals: nobody gets an error that was not declared."""
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        store.agent("a").checkpoint()
        row = store._db.view.agent("a")
        uuid = store._db.view.branches(row.a)[0].uuid
        body = {"what": what, "id": id, "name": "go", "value": b"\x01", "branch": uuid}
        store._db.change(lambda change: change.say(row.a, Said(body, b"k" * 16)))
    with holdfast.open(path) as store:
        for ask in (store.verify, store.signals, lambda: store.signal("a", "go", 1, any_run=True), store.agents):
            with suppress(holdfast.Damaged):
                ask()
    holdfast.repair(path)


@pytest.mark.parametrize("which", ["itself", "a later one"])
def test_an_ancestor_that_is_none_is_not_kept_by_a_repair(store_path, which):
    with holdfast.open(store_path) as store, store.agent("a") as agent:
        for number in range(4):
            agent.state["n"] = number
            agent.checkpoint(f"c{number}")
        agent.tag("early", "c1")
        store.retain(holdfast.Policy(last=1))
    (n, newest), *_ = damage.rows(store_path, "SELECT min(n), (SELECT max(n) FROM loose) FROM shallow")
    damage.put(store_path, "shallow", PLAIN.stored("shallow", n, n if which == "itself" else newest))
    with damage.opened(store_path) as store:
        assert not store.verify().ok
    report = holdfast.repair(store_path)
    assert not [text for text in report.problems if text.startswith("in the new store")]


@pytest.mark.parametrize("record", [10**6, "one without a place"])
def test_a_checkpoint_whose_row_names_a_record_that_is_not_there_stays_what_it_is(store_path, record):
    with damage.opened(store_path, readonly=False) as store:
        agent = store.agent("a")
        first = agent.checkpoint("first")
        damage.write(agent, (1, b"one"), (0, b"two"))
        agent.checkpoint("second")
    ((n, *row),) = damage.rows(store_path, "SELECT * FROM loose ORDER BY n LIMIT 1")
    line = record
    if isinstance(record, str):
        ((line, prev, back, _, *more, _),) = damage.rows(store_path, "SELECT * FROM record ORDER BY r LIMIT 1")
        damage.put(store_path, "record", PLAIN.stored("record", line, prev, back, 0, *more))
    row[TABLES["loose"].names.index("line") - 1] = line
    damage.put(store_path, "loose", PLAIN.stored("loose", n, *row[:-1]))
    report = holdfast.repair(store_path)
    assert not [text for text in report.problems if text.startswith("in the new store")]
    assert first.id not in {one.id for agent in report.agents for one in agent.lost_checkpoints}


def test_checkpoints_that_are_their_own_ancestors_cost_what_rests_on_them(path):
    for n, *row in damage.rows(path, "SELECT * FROM checkpoint ORDER BY n LIMIT 3"):
        row[TABLES["checkpoint"].names.index("parent") - 1] = n + 1
        damage.put(path, "checkpoint", PLAIN.stored("checkpoint", n, *row[:-1]))
    with damage.opened(path) as store:
        assert not store.verify().ok
    report = holdfast.repair(path)
    assert [one.name for one in report.agents if one.lost_checkpoints]
    assert not [text for text in report.problems if text.startswith("in the new store")]


@pytest.mark.parametrize("field", ["parent", "operations", "metadata"])
def test_a_manifest_with_a_digest_of_another_length_is_damage(field):
    made = Manifest.make(b"", 1, [], bytes(32), (0, b""), bytes(32), "", 1)
    assert Manifest.decode(made.encode()) == made
    with pytest.raises(holdfast.Damaged):
        Manifest.decode(made._replace(**{field: b"short"}).encode())
