"""Layers that stand beside the state in a checkpoint: what only they name stays for as long as the checkpoint does."""

from __future__ import annotations

import random

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent.background import fold_below
from holdfast.agent.history import children, chunks_in
from holdfast.codec.values import encode
from holdfast.store.changes import Objects, pack_node
from holdfast.store.manifest import Manifest
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
def test_what_only_another_layer_names_stays_with_its_checkpoint(store_path, monkeypatch, folded):
    noise = random.Random(7)
    with holdfast.open(store_path) as store:
        with limits({"SEAL_CHECKPOINTS": 1}):
            files = store.agent("files")
            files.state["tree"] = [noise.randbytes(200) for _ in range(1000)]
            files.state["image"] = noise.randbytes(300_000)
            layer = files.checkpoint()._manifest.sections
        real = Manifest.make.__func__

        def make(cls, *args):
            made = real(cls, *args)
            return made._replace(layers=[*made.layers, ("files", layer)])

        agent = store.agent("a")
        agent.state["n"] = 0
        agent.checkpoint()
        monkeypatch.setattr(Manifest, "make", classmethod(make))
        kept = agent.checkpoint("with files")
        monkeypatch.undo()
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
        assert (len(before[0]) > 3, before[1]) == (True, [encode(files.state["image"])])
        files.close()
        store.remove("files")
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
        assert store._db.view.nodes(before[0]) == {}
        assert store.stats()["counts"]["chunk"] == 0
