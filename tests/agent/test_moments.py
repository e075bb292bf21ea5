"""Whoever reads while others write and forget sees one moment, an error that says so, or the same state as before."""

from __future__ import annotations

import shutil

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent import history, line
from holdfast.codec.types import Registry
from holdfast.errors import Forgotten
from holdfast.store import sealing
from holdfast.store.sealing import Values
from tests.agent import child
from tests.agent.test_clone import sound
from tests.agent.test_removal import large

COUNT = 60
RULE = Policy(labels=["*0"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A history with seals, large values and values that were changed again; every tenth checkpoint has a label."""
    path = tmp_path_factory.mktemp("made") / "store"
    with pytest.MonkeyPatch.context() as patch, holdfast.open(path) as store:
        patch.setattr(sealing, "SEAL_CHECKPOINTS", 6)
        large(store, "a", COUNT).close()
    return path


@pytest.fixture
def path(made, store_path):
    shutil.copytree(made, store_path)
    return store_path


def others(path):
    """Another process forgets most of the history, and goes on with it."""
    process = child.start("shortened", path, "a")
    try:
        assert child.line(process) == "done"
    finally:
        child.end(process)


@pytest.mark.parametrize("when", ["database structure", "rows", "nodes", "packs", "checkpoints of a"])
def test_what_others_do_during_a_verification_is_no_damage(path, when):
    done = []

    def progress(what, number, _total):
        if what == when and number and not done:
            done.append(what)
            others(path)

    with holdfast.open(path, readonly=True) as store:
        before = {one.id for one in store.agent("a", readonly=True).log(all=True)}
        report = store.verify(progress)
        assert done
        assert report.ok, str(report)
        assert report.checked["checkpoints"] == len(before)
        left = {one.id for one in store.agent("a", readonly=True).log(all=True)}
        assert before - left
        assert left - before
    with holdfast.open(path) as store:
        store.retain(RULE)  # packs that were still needed then go now
        assert len(list((path / "packs").iterdir())) == store.stats()["counts"]["pack"]
        sound(store)


class Between:
    """A catalog where something happens just before one of its questions is answered for the first time."""

    def __init__(self, catalog, question, happens):
        self._catalog = catalog
        self._question = question
        self._happens = [happens]

    def __getattr__(self, name):
        if name == self._question and self._happens:
            self._happens.pop()()
        return getattr(self._catalog, name)


@pytest.mark.parametrize("question", ["ancestry", "nodes", "tails_of", "covering_seal", "checkpoint"])
def test_a_state_that_is_being_read_is_the_same_when_it_is_stored_in_another_way(path, question):
    with holdfast.open(path) as store:
        kept = [one for one in store.agent("a", readonly=True).log() if one.label.endswith("0")]
        wanted = [holdfast.plain(one.state) for one in kept]
        rows = [store._catalog.checkpoint(one._row.n) for one in kept]
        assert not all(row.sealed for row in rows)
        happens = [lambda: store.retain(RULE)]
        found = []
        for row in rows:
            catalog = Between(store._catalog, question, lambda: happens and happens.pop()())
            found.append(holdfast.plain(history.load(catalog, row, Registry(), inert=True)))
        assert found == wanted
        assert not happens


def test_values_are_found_where_they_are_after_others_were_forgotten(path):
    with holdfast.open(path) as store:
        rows = list(store._catalog.checkpoints())
        labels = {one._row.n: one.label for one in store.agent("a", readonly=True).log(all=True)}
        kept = [row for row in rows if labels[row.n].endswith("0")]
        wanted = [Values(store._catalog).of(row) for row in kept]
        readers = [Values(store._catalog) for _ in kept]
        for reader, row in zip(readers, kept, strict=True):
            reader._places(row)  # the seal as it is now
        store.retain(RULE)
        assert [reader.of(row) for reader, row in zip(readers, kept, strict=True)] == wanted


def test_a_history_that_is_shortened_while_it_is_read_is_not_called_damaged(path, monkeypatch):
    monkeypatch.setattr(line, "_STEP", 4)
    with holdfast.open(path) as store:
        agent = store.agent("a", readonly=True)
        rows = line.Line(store, agent._row).left(agent.head._row.n)
        held = agent.log()
        gone = held[1]
        assert next(rows).n == held[0]._row.n
        store.retain(Policy(last=1, tags=False))
        with pytest.raises(Forgotten):
            list(rows)
        with pytest.raises(Forgotten):
            gone.changes()
        assert [one.id for one in agent.log()] == [held[0].id]
