"""An agent's state against a plain model, over random programs, with a real store on disk."""

from __future__ import annotations

import copy
import random
import warnings

import pytest

import holdfast
from holdfast.agent import branch as sealing
from holdfast.errors import DetachedChange, DiskFull, NothingToUndo
from tests.codec.fuzz import Model, Note, Point, Slotted, World, mirror, same
from tests.conftest import unsaved
from tests.strikes import alone

CLASSES = (Note, Model, Point, Slotted)
STEPS = (
    ("change", 30), ("alias", 4), ("mutate", 6), ("refuse", 1), ("checkpoint", 6), ("reload", 2), ("rollback", 2),
    ("undo", 1), ("redo", 1), ("undo_and_redo", 1), ("branch", 1), ("disk_full", 1), ("look_back", 1), ("let_go", 2),
    ("ask", 1), ("interrupted", 3),
)  # fmt: skip


class Stored(World):
    """The same steps on an agent, and those that only an agent has."""

    def __init__(self, source, path):
        super().__init__(source)
        self.path = path
        self.open()

    def open(self):
        self.store = holdfast.open(self.path, types=CLASSES)
        self.agent = self.store.agent("a")
        self.doc = self.agent.state

    def checkpoint(self):
        made = self.agent.checkpoint(f"step {len(self.saved)}")
        assert not self.agent.dirty
        self.saved.append((f"id:{made.id}", mirror(self.model)))
        del self.saved[:-6]
        self.verify(*self.saved[-1])

    def verify(self, revision, model):
        assert same(holdfast.plain(self.agent.at(revision).state), model)

    def ask(self):
        assert self.agent.digest
        assert self.agent.dirty in {True, False}

    def reload(self):
        self.checkpoint()
        self.store.close()
        self.open()
        self.resync()

    def rollback(self):
        if self.saved:
            revision, model = self.pick(self.saved)
            self.agent.rollback(revision)
            assert f"id:{self.agent.head.id}" == revision
            self.model = copy.deepcopy(model)
            self.resync()

    def undo(self):
        unsaved = self.agent.dirty
        try:
            undone = self.agent.undo()
        except NothingToUndo:
            return
        reversed_ = self.agent.at(f"id:{undone.target_id}")
        if unsaved:
            assert same(holdfast.plain(reversed_.state), self.model), "unsaved changes are saved first"
        before = self.agent.at(f"id:{reversed_.parent_id}").state if reversed_.parent_id else {}
        self.model = holdfast.plain(before)
        self.resync()

    def redo(self):
        try:
            done = self.agent.redo()
        except NothingToUndo:
            return
        self.model = holdfast.plain(self.agent.at(f"id:{done.target_id}").state)
        self.resync()

    def undo_and_redo(self):
        """Undo followed by redo changes nothing."""
        self.checkpoint()
        self.agent.undo()
        self.agent.redo()
        self.resync()

    def disk_full(self):
        """A checkpoint that could not be written: nothing is lost, and the next one contains it."""

        def full(*_args):
            raise DiskFull("no room")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.store._db.engine, "direct", full)
            patch.setattr(self.store._db.engine, "transaction", full)
            with pytest.raises(DiskFull):
                self.agent.checkpoint()
        if self.choose(2):
            self.change()
        if self.choose(2):
            self.reload()

    def branch(self):
        if self.agent.head is None:
            return
        other = self.agent.branch(f"branch {len(list(self.agent.branches()))}")
        assert same(holdfast.plain(other.state), self.model)
        other.state["only here"] = [1]
        other.checkpoint()
        assert "only here" not in self.doc
        other.close()


@unsaved
@pytest.mark.slow
@pytest.mark.parametrize("seal_every", [1, 3, 256])
def test_long_programs(rounds, seal_every, monkeypatch, tmp_path):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", seal_every)
    names = [name for name, weight in STEPS for _ in range(weight)]
    for seed in range(rounds(5, 500)):
        source = random.Random(seed)
        world = Stored(source, tmp_path / f"store {seed}")

        def program(source=source, world=world):
            for _ in range(60):
                getattr(world, source.choice(names))()
                world.check()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DetachedChange)
            alone(program)
        report = world.store.verify()
        assert report.ok, report.problems
        world.store.close()
