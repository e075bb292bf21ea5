"""Forgetting against a model: what stays is what it was, what went is gone, and nothing is left that nobody needs."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import timedelta

import pytest

import holdfast
from holdfast import Policy, plain
from holdfast.agent import background, collection
from holdfast.agent.graph import Graph
from holdfast.errors import NothingToUndo, RollbackBlocked, UnknownRevision
from tests.agent.histories import act, empty, few_between_seals, sound, states, swept
from tests.conftest import SOAK, unsaved

LABELS = ("", "", "asked", "release-1", "release-2")


class Model:
    """A store, and what is known of every checkpoint that was ever made."""

    def __init__(self, path, seed):
        self.path = path
        self.noise = random.Random(seed)
        self.store = holdfast.open(path)
        self.states = {}
        self.parents = {}
        self.count = 0
        self.store.agent("a")

    def pick(self):
        info = self.noise.choice(self.store.agents())
        return self.store.agent(info.name, branch=self.noise.choice(info.branches))

    def step(self):
        noise = self.noise
        self.count += 1
        agent = self.pick()
        what = noise.choices(
            ("edit", "save", "back", "undo", "branch", "tag", "untag", "mark", "clone", "close", "retain", "remove",
             "forget", "fold", "collect", "reopen", "records"),
            (30, 30, 5, 4, 3, 3, 1, 2, 1, 3, 4, 1, 1, 2, 1, 1, 4),
        )[0]  # fmt: skip
        getattr(self, f"_{what}")(agent)
        if what not in {"close", "reopen", "remove", "records"}:
            self.note(agent)

    def note(self, agent):
        if not agent.closed:
            for checkpoint in agent.log(all=True):
                if checkpoint.id not in self.states:
                    self.states[checkpoint.id] = plain(checkpoint.state)
                    self.parents[checkpoint.id] = checkpoint.parent_id

    def _edit(self, agent):
        noise, state = self.noise, agent.state
        kind = noise.randrange(6)
        if kind < 3:
            state.setdefault("messages", []).extend(noise.randbytes(300).hex() for _ in range(noise.randrange(1, 12)))
        elif kind == 3:
            state.setdefault("table", {})[f"row {noise.randrange(4)}"] = [self.count] * noise.randrange(50)
        elif kind == 4:
            state["big"] = {"inside": [f"{noise.randrange(3)} {n} " * 20 for n in range(300)]}
        elif noise.random() < 0.5:
            state["bulk"] = random.Random(noise.randrange(4)).randbytes(270_000)
        else:
            del state.setdefault("messages", [])[: noise.randrange(20)]

    def _save(self, agent):
        agent.checkpoint(self.noise.choice(LABELS))

    def _back(self, agent):
        self._try(lambda: agent.rollback(f"~{self.noise.randrange(1, 6)}"))

    def _undo(self, agent):
        self._try(self.noise.choice((agent.undo, agent.undo, agent.redo)))

    def _branch(self, agent):
        if agent.head is not None and len(agent.branches()) < 3:
            self._try(lambda: agent.branch(f"b{self.count}", at=f"~{self.noise.randrange(4)}"))

    def _tag(self, agent):
        if agent.head is not None:
            self._try(lambda: agent.tag(f"t{self.noise.randrange(3)}", f"~{self.noise.randrange(6)}"))

    def _untag(self, agent):
        for tag in list(agent.tags())[:1]:
            agent.untag(tag)

    def _mark(self, agent):
        if agent.head is not None:
            self._try(lambda: agent.mark(f"~{self.noise.randrange(2)}", "suspect", "a doubt"))

    def _clone(self, agent):
        if len(self.store.agents()) < 4:
            self.store.copy(agent.name, f"copy {self.count}")

    def _close(self, agent):
        agent.close()

    def _reopen(self, agent):
        self.note(agent)
        self.store.close()
        self.store = holdfast.open(self.path)

    def _fold(self, agent):
        for row in self.store._db.view.checkpoints("WHERE sealed = 1"):
            background.fold_below(self.store._db, row.n)

    def _collect(self, agent):
        collection.collect(self.store._db)

    def _records(self, agent):
        act(agent, f"seat {self.count}")

    def _forget(self, agent):
        """Some of its checkpoints, wherever they are; a branch may lose its head."""
        self.note(agent)
        row = agent._row
        for handle in [self.store.agent(row.name, branch=name) for name in agent.branches()]:
            handle.close()
        self.store.flush()
        seen = sorted(Graph(self.store._db.view, row).numbers)
        chosen = set(self.noise.sample(seen, len(seen) // 3))
        ids = {self.store._db.view.point(n).id.hex() for n in chosen}
        shared = self.seen_by_others(row.name)
        before = self.all_of(row.name)
        assert self.store._forget(row, chosen).done
        left = self.all_of(row.name)
        assert left == before - (ids - shared)
        swept(self.store)

    def _remove(self, agent):
        if self.count < 40:
            return
        name = agent.name
        self.note(agent)
        self.store.flush()
        seen = self.all_of(name)
        said = self.store.remove(name, dry_run=True)
        sharing = {one.name for one in self.store.agents() if one.name != name and seen & self.all_of(one.name)}
        assert (said.done, said.checkpoints, set(said.kept_for)) == (False, len(seen), sharing)
        others = {one.name: self.all_of(one.name) for one in self.store.agents() if one.name != name}
        with_copies = self.noise.random() < 0.3
        done = self.store.remove(name, with_copies=with_copies)
        assert done.done
        assert set(done.copies if with_copies else done.kept_for) == sharing
        for other in sharing if with_copies else ():
            del others[other]
        assert {one.name: self.all_of(one.name) for one in self.store.agents()} == others
        swept(self.store)
        if not others:
            self.store.agent("a")

    def _retain(self, agent):
        noise = self.noise
        policy = Policy(
            last=noise.randrange(1, 6),
            hourly=noise.randrange(2),
            labels=noise.choice(((), (), ("release-*",), ("asked",))),
            branches=noise.choice(((), (), (), ("b*",), ("main",))),
            newer_than=noise.choice((None, None, timedelta(0), timedelta(hours=1))),
            tags=noise.random() < 0.7,
        )
        self.note(agent)
        self.store.flush()
        names = noise.choice((None, [agent.name]))
        live = plain(agent.state)
        before = {one.name: self.all_of(one.name) for one in self.store.agents()}
        wanted = {name: self.wanted(policy, name) for name in before}
        said = self.store.retain(policy, names, dry_run=True)
        assert not said.done
        assert {one.name: self.all_of(one.name) for one in self.store.agents()} == before
        done = self.store.retain(policy, names)
        assert plain(agent.state) == live
        assert [(one.agent, one.kept, one.removed) for one in done.agents] == [
            (one.agent, one.kept, one.removed) for one in said.agents
        ]
        for one in done.agents:
            after = self.all_of(one.agent)
            assert after == {entry.id for entry in one.kept}
            assert before[one.agent] - after == {entry.id for entry in one.removed}
            assert wanted[one.agent] <= after
            self.promised(policy, one.agent, before[one.agent], after)
        for other in before.keys() - {one.agent for one in done.agents}:
            assert self.all_of(other) == before[other]
        (swept if done.removed else sound)(self.store)

    def wanted(self, policy, name):
        """What labels and tags keep."""
        return {
            one.id
            for one in self.store.agent(name, readonly=True).log(all=True)
            if (policy.tags and one.tags)
            or (one.label and any(one.label.startswith(pattern.rstrip("*")) for pattern in policy.labels))
        }

    def promised(self, policy, name, before, after):
        for branch_name in self.store.agent(name, readonly=True).branches():
            reader = self.store.agent(name, branch=branch_name, readonly=True)
            if reader.head is None:
                continue
            line = [one for one in self.chain(reader.head.id) if one in before]
            assert set(line[: policy.last]) <= after
            assert [checkpoint.id for checkpoint in reader.log()] == [one for one in line if one in after]
            if any(branch_name.startswith(pattern.rstrip("*")) for pattern in policy.branches):
                assert set(line) <= after

    def chain(self, one):
        while one:
            yield one
            one = self.parents[one]

    def all_of(self, name):
        return {checkpoint.id for checkpoint in self.store.agent(name, readonly=True).log(all=True)}

    def seen_by_others(self, name):
        return set().union(*(self.all_of(one.name) for one in self.store.agents() if one.name != name))

    def _try(self, work):
        with suppress(UnknownRevision, NothingToUndo, RollbackBlocked):
            work()

    def check(self):
        self.store.flush()
        for id, state in states(self.store).items():
            assert state == self.states[id.hex()]


@unsaved
@pytest.mark.parametrize("seed", range(2000 if SOAK else 8))
def test_whatever_happens_what_is_kept_is_what_it_was(store_path, monkeypatch, seed):
    few_between_seals(monkeypatch.setattr)
    model = Model(store_path, seed)
    for _ in range(150):
        model.step()
    model.check()
    model._reopen(model.pick())
    model.check()
    agent = model.pick()
    model.store.retain(Policy(last=2, newer_than=timedelta(0)))
    for number in range(6):  # a live state that counted on what is gone would be sealed with holes
        agent.state["end"] = [number] * 50
        agent.checkpoint(f"end {number}")
    model.note(agent)
    model.check()
    collection.collect(model.store._db)
    swept(model.store)
    for info in model.store.agents():
        model.store.remove(info.name)
    empty(model.store)
    model.store.close()
