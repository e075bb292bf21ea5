"""Layers that stand beside the state in a checkpoint: what only they name stays for as long as the checkpoint does."""

from __future__ import annotations

import random

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent.background import fold_below
from holdfast.agent.history import children, chunks_in
from holdfast.errors import Damaged
from holdfast.store.changes import Objects, pack_node
from holdfast.store.manifest import STATE, Manifest
from tests.limits import limits


def content(store, sections):
    """What trees hold, read by their roots alone."""
    view = store._db.view
    nodes, waiting, found = {}, [root for _, root in sections], set()
    while waiting:
        nodes |= (some := view.nodes(waiting))
        assert len(some) == len(waiting), "a node is missing"
        waiting = [child for raw in some.values() for child in children(raw)]
    for raw in nodes.values():
        if not raw[1]:
            found |= chunks_in(raw)
    return nodes, list(store._db.packs.read(view, sorted(found)))


@pytest.mark.parametrize("folded", [False, True], ids=["loose", "folded"])
def test_what_only_another_layer_names_stays_with_its_checkpoint(store_path, tmp_path, folded):
    noise = random.Random(7)
    repo = tmp_path / "repo"
    repo.mkdir()
    for number in range(1000):
        (repo / f"file {number}").write_bytes(noise.randbytes(20))
    with holdfast.open(store_path) as store:
        agent = store.agent("a", workspace=repo)
        agent.state["n"] = 0
        with limits({"SEAL_CHECKPOINTS": 1}):
            kept = agent.checkpoint("with files")
        layer = dict(kept._manifest.layers)["workspace"]
        for path in repo.iterdir():
            path.unlink()
        with limits({"SEAL_CHECKPOINTS": 10}):
            for number in range(12):
                agent.state["n"] = number
                agent.checkpoint(str(number))
        sealed = next(point for point in agent._walk() if point.row.sealed)
        if folded:
            store._tending.stop()
            fold_below(store._db, sealed.n)
        assert not folded or kept._current().row.s
        before = content(store, layer)
        assert (len(before[0]) > 3, len(before[1])) == (True, 1000)
        store.retain(Policy(last=20))
        assert content(store, layer) == before
        agent.tag("kept", kept)
        store.retain(Policy(last=1))  # it stands alone now
        assert content(store, layer) == before
        assert store.verify().ok
        raw = store._db.view.nodes([layer[0][1]])
        store._db.change(lambda change: change.delete("node", "digest", [layer[0][1]]))
        assert store.verify().affected == [kept.id]
        store._db.change(
            lambda change: change.put_objects(Objects({name: pack_node(one) for name, one in raw.items()}))
        )
        agent.untag("kept")
        store.retain(Policy(last=1))
        assert not store._db.view.nodes([layer[0][1]])
        assert not store._db.view.has_chunks([name for one in before[0].values() for name in chunks_in(one)])
        assert store.verify().ok


def test_the_bytes_of_a_manifest_say_each_section_once(store_path):
    with holdfast.open(store_path) as store:
        made = store.agent("a").checkpoint()._manifest
    one = ("files", bytes(32))
    good = [(STATE, []), ("process", [("image", bytes(32))]), ("workspace", [one, ("marked", bytes(32))])]
    assert Manifest.decode(made._replace(layers=good).encode()).layers == good
    names = ["\0process\0image", "\0workspace\0files", "\0workspace\0marked"]
    assert [name for name, _ in made._replace(layers=good).sections] == names
    for bad in (
        [],
        [("workspace", [one])],
        [("workspace", [one]), (STATE, [])],
        [(STATE, []), (STATE, [one])],
        [(STATE, [("\0workspace\0files", bytes(32))])],
        [(STATE, []), ("workspace", [])],
        [(STATE, []), ("workspace", [one, one])],
        [(STATE, []), ("workspace", [("marked", bytes(32)), one])],
        [(STATE, []), ("workspace", [one]), ("process", [one])],
        [(STATE, []), ("a\0b", [one])],
    ):
        with pytest.raises(Damaged):
            Manifest.decode(made._replace(layers=bad).encode())
