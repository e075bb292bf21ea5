"""Whoever reads while others write and forget sees one moment, an error that says so, or the same state as before."""

from __future__ import annotations

import os
import shutil

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent import history
from holdfast.codec.types import Registry
from holdfast.errors import Forgotten
from holdfast.store.database import Contents
from tests.agent import child
from tests.agent.histories import few_between_seals, large, sound
from tests.memory import memory

COUNT = 60
RULE = Policy(labels=["*0"])


@pytest.fixture(scope="module")
def made():
    """A history with seals, large values and values that were changed again; every tenth checkpoint has a label."""
    with memory() as folder:
        with pytest.MonkeyPatch.context() as patch, holdfast.open(folder / "store") as store:
            few_between_seals(patch.setattr)
            large(store, "a", COUNT).close()
        yield folder / "store"


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


@pytest.mark.parametrize("when", ["database structure", "rows", "packs", "checkpoints of a"])
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
        for pack in (path / "packs").iterdir():  # nobody deletes one that was just put there
            os.utime(pack, (0, 0))
        store.retain(RULE)  # packs that were still needed then go now
        assert len(list((path / "packs").iterdir())) == store.stats()["counts"]["pack"]
        sound(store)


class Between:
    """A view where something happens just before one of its questions is answered for the first time."""

    def __init__(self, view, question, happens):
        self._view = view
        self._question = question
        self._happens = happens

    def __getattr__(self, name):
        if name == self._question and self._happens:
            self._happens.pop()()
        return getattr(self._view, name)


@pytest.mark.parametrize("question", ["up", "point", "nodes", "operations"])
def test_a_state_that_is_being_read_is_the_same_when_it_is_stored_in_another_way(path, question):
    with holdfast.open(path) as store:
        kept = [one for one in store.agent("a", readonly=True).log() if one.label.endswith("0")]
        wanted = [holdfast.plain(one.state) for one in kept]
        points = [one._point for one in kept]
        assert not all(point.row.sealed for point in points)
        happens = [lambda: store.retain(RULE)]
        now = Contents(Between(store._db.view, question, happens), store._db.packs)
        found = [holdfast.plain(history.load(now, point, Registry(), inert=True)) for point in points]
        assert found == wanted
        assert not happens


def test_a_history_that_is_shortened_while_it_is_read_is_not_called_damaged(path):
    with holdfast.open(path) as store:
        agent = store.agent("a", readonly=True)
        held = agent.log()
        gone = held[1]
        changes = agent.changes()
        assert next(changes)
        store.retain(Policy(last=1, tags=False))
        with pytest.raises(Forgotten):
            list(changes)
        for read in (gone.changes, lambda: holdfast.plain(gone.state), lambda: gone.cut):
            with pytest.raises(Forgotten):
                read()
        assert [one.id for one in agent.log()] == [held[0].id]
