"""An agent's state against a plain model, over random programs, with a real store on disk."""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import holdfast
from holdfast.errors import DetachedChange, DiskFull, NothingToUndo
from holdfast.store import sealing
from tests.codec import kinds, programs

CLASSES = (kinds.Note, kinds.Model, kinds.Point)


class Stored(programs.World):
    """The same steps on an agent, and those that only an agent has."""

    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp()) / "store"
        self.open()

    def open(self) -> None:
        self.store = holdfast.open(self.path, types=CLASSES)
        self.agent = self.store.agent("a")
        self.state = self.agent.state

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.path.parent)

    def save(self):
        made = self.agent.checkpoint(f"step {len(self.saved)}")
        assert not self.agent.dirty
        return f"id:{made.id}"

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def read(self, revision):
        return self.agent.at(revision).state

    def rollback(self) -> None:
        if self.saved:
            revision, model = self.pick(self.saved)
            self.agent.rollback(revision)
            assert f"id:{self.agent.head.id}" == revision
            self.after_rollback(model)

    def undo(self) -> None:
        unsaved = self.agent.dirty
        try:
            undone = self.agent.undo()
        except NothingToUndo:
            return
        reversed_ = self.agent.at(f"id:{undone.target_id}")
        if unsaved:
            saved = programs.plain(reversed_.state)
            assert programs.same(saved, programs.normal(self.model)), "unsaved changes are saved before they are undone"
        before = self.agent.at(f"id:{reversed_.parent_id}").state if reversed_.parent_id else {}
        assert programs.same(programs.plain(self.state), programs.plain(before))
        self.after_rollback(programs.model_of(self.state))

    def redo(self) -> None:
        try:
            done = self.agent.redo()
        except NothingToUndo:
            return
        target = self.agent.at(f"id:{done.target_id}").state
        assert programs.same(programs.plain(target), programs.plain(self.state))
        self.after_rollback(programs.model_of(self.state))

    def undo_and_redo(self) -> None:
        """Undo followed by redo changes nothing."""
        self.checkpoint()
        self.agent.undo()
        self.agent.redo()
        self.after_rollback(programs._unshared(self.model))

    def disk_full(self) -> None:
        """A checkpoint that could not be written: nothing is lost, and the next one contains it."""
        catalog = self.store._catalog
        written = catalog.commit

        def full(*_args):
            raise DiskFull("no room")

        catalog.commit = full
        try:
            with pytest.raises(DiskFull):
                self.agent.checkpoint()
        finally:
            catalog.commit = written
        if self.choose(2):
            self.change()
        if self.choose(2):
            self.reload()

    def branch(self) -> None:
        if self.agent.head is None:
            return
        name = f"branch {len(list(self.agent.branches()))}"
        other = self.agent.branch(name)
        assert programs.same(programs.plain(other.state), programs.normal(self.model))
        other.state["only here"] = [1]
        other.checkpoint()
        assert "only here" not in self.state
        other.close()


class Programs(RuleBasedStateMachine):
    """Hypothesis makes every choice."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = None
        self.world = Stored(lambda n: self.draw(st.integers(0, n - 1)))
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.simplefilter("ignore", DetachedChange)

    def teardown(self) -> None:
        self.quiet.__exit__(None, None, None)
        self.world.close()

    def do(self, name, data):
        self.draw = data.draw
        self.world.step(name)


for _name in ("change", "alias", "refuse", "mutate", "checkpoint", "look_back", "reload", "rollback", "undo", "redo",
              "undo_and_redo", "branch", "disk_full"):  # fmt: skip

    def _step(self, data, name=_name):
        self.do(name, data)

    _step.__name__ = _name
    setattr(Programs, _name, rule(data=st.data())(_step))


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=25)


@pytest.mark.filterwarnings("ignore::holdfast.errors.DetachedChange")
@pytest.mark.parametrize("seal_every", [1, 3, 256])
def test_long_programs(rounds, seal_every, monkeypatch):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", seal_every)
    names = [name for name, weight in Stored.STEPS for _ in range(weight)]
    names += ["undo", "redo", "undo_and_redo", "branch", "disk_full"]
    for seed in range(rounds(5, 500)):
        source = random.Random(seed)
        world = Stored(source.randrange)
        for _ in range(60):
            world.step(source.choice(names))
        report = world.store.verify()
        assert report.ok, report.problems
        world.close()
