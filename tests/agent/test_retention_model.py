"""Retention, by Hypothesis: whatever the history and whatever the policy, what is kept is what it was."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Policy
from holdfast.agent import branch as sealing
from holdfast.errors import NothingToUndo, UnknownRevision
from tests.agent.test_clone import sound
from tests.conftest import SOAK

LABELS = ("", "asked", "answered", "release-1", "release-2")

moves = st.one_of(
    st.tuples(st.just("say"), st.integers(1, 60)),
    st.tuples(st.just("put"), st.integers(0, 4)),
    st.tuples(st.just("big"), st.integers(0, 3)),
    st.tuples(st.just("cut"), st.integers(0, 5)),
    st.tuples(st.just("save"), st.sampled_from(LABELS)),
    st.tuples(st.just("save"), st.sampled_from(LABELS)),
    st.tuples(st.just("save"), st.sampled_from(LABELS)),
    st.tuples(st.just("back"), st.integers(1, 6)),
    st.tuples(st.just("undo"), st.just(0)),
    st.tuples(st.just("branch"), st.integers(0, 3)),
    st.tuples(st.just("tag"), st.integers(0, 4)),
    st.tuples(st.just("clone"), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0)),
    st.tuples(st.just("turn"), st.integers(0, 3)),
)
policies = st.builds(
    Policy,
    last=st.integers(1, 6),
    hourly=st.integers(0, 2),
    labels=st.lists(st.sampled_from(("release-*", "asked")), max_size=1),
    branches=st.lists(st.sampled_from(("b*", "main")), max_size=1),
    tags=st.booleans(),
)
steps = st.lists(st.one_of(moves, moves, moves, st.tuples(st.just("retain"), policies)), min_size=5, max_size=45)


class Model:
    """A store, and what is known of every checkpoint that was ever made."""

    def __init__(self, store):
        self.store = store
        self.states = {}
        self.parents = {}
        self.names = ["a"]
        self.branches = {"a": ["main"]}
        self.at = ("a", "main")
        self.count = 0

    @property
    def agent(self):
        return self.store.agent(self.at[0], branch=self.at[1])

    def note(self):
        head = self.agent.head
        if head is not None and head.id not in self.states:
            self.states[head.id] = (head.digest, holdfast.plain(head.state))
            self.parents[head.id] = head.parent_id

    def do(self, what, given):
        self.count += 1
        agent = self.agent
        if what == "say":
            agent.state.setdefault("messages", []).extend(f"{self.count} {n} " * 40 for n in range(given))
        elif what == "put":
            agent.state.setdefault("table", {})[f"row {given}"] = [self.count] * 50
        elif what == "big":
            agent.state["big"] = {"inside": [f"{given} {n} " * 20 for n in range(300)]}
        elif what == "cut":
            messages = agent.state.get("messages", [])
            del messages[given : given + 30]
        elif what == "save":
            agent.checkpoint(given)
        elif what == "back":
            self._try(lambda: agent.rollback(f"~{given}"))
        elif what == "undo":
            self._try(agent.undo)
        elif what == "branch":
            self._branch(given)
        elif what == "tag" and agent.head is not None:
            self._try(lambda: agent.tag(f"t{given}", f"~{given}"))
        elif what == "clone" and len(self.names) < 3:
            new = f"clone {len(self.names)}"
            self.store.clone(self.at[0], new)
            self.names.append(new)
            self.branches[new] = list(self.branches[self.at[0]])
        elif what == "reopen":
            agent.close()
        elif what == "turn":
            name = self.names[given % len(self.names)]
            self.at = (name, self.branches[name][given % len(self.branches[name])])
        elif what == "retain":
            self.retain(given)
        if what != "reopen":
            self.note()

    def _branch(self, given):
        agent, known = self.agent, self.branches[self.at[0]]
        if agent.head is not None and len(known) < 3:
            name = f"b{len(known)}"
            if self._try(lambda: agent.branch(name, at=f"~{given}")):
                known.append(name)

    def _try(self, work):
        self.note()
        try:
            work()
        except (UnknownRevision, NothingToUndo):
            return False
        finally:
            for checkpoint in self.agent.log(all=True):  # what was unsaved was saved first
                if checkpoint.id in self.states:
                    continue
                self.states[checkpoint.id] = (checkpoint.digest, holdfast.plain(checkpoint.state))
                self.parents[checkpoint.id] = checkpoint.parent_id
        return True

    def retain(self, policy):
        self.store.flush()
        before = {name: self.seen(name) for name in self.names}
        live = holdfast.plain(self.agent.state)
        said = self.store.retain(policy, dry_run=True)
        assert not said.done
        assert {name: self.seen(name) for name in self.names} == before
        done = self.store.retain(policy)
        assert [(one.agent, one.kept, one.removed) for one in done.agents] == [
            (one.agent, one.kept, one.removed) for one in said.agents
        ]
        assert holdfast.plain(self.agent.state) == live
        for one in done.agents:
            after = self.seen(one.agent)
            assert set(after) == {entry.id for entry in one.kept}
            assert set(before[one.agent]) - set(after) == {entry.id for entry in one.removed}
            self.promised(policy, one.agent, before[one.agent], after)
        self.check()

    def seen(self, name):
        return {c.id: (c.label, tuple(c.tags)) for c in self.store.agent(name, readonly=True).log(all=True)}

    def promised(self, policy, name, before, after):
        for branch in self.branches[name]:
            reader = self.store.agent(name, branch=branch, readonly=True)
            if reader.head is None:
                continue
            line = [one for one in self.chain(reader.head.id) if one in before]
            assert set(line[: policy.last]) <= set(after)
            assert reader.head.id in after
            assert [c.id for c in reader.log()] == [one for one in line if one in after]
            if any(branch.startswith(pattern.rstrip("*")) for pattern in policy.branches):
                assert set(line) <= set(after)
        for one, (label, tags) in before.items():
            if (policy.tags and tags) or (label and any(label.startswith(p.rstrip("*")) for p in policy.labels)):
                assert one in after

    def chain(self, one):
        while one:
            yield one
            one = self.parents[one]

    def check(self):
        for name in self.names:
            for checkpoint in self.store.agent(name, readonly=True).log(all=True):
                digest, state = self.states[checkpoint.id]
                assert checkpoint.digest == digest
                assert holdfast.plain(checkpoint.state) == state
        sound(self.store)


@pytest.fixture(autouse=True)
def seals(monkeypatch):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 4)


@settings(max_examples=3000 if SOAK else 25)
@given(steps)
def test_what_a_policy_keeps_is_what_it_was_and_the_rest_is_gone(todo):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        with holdfast.open(path) as store:
            model = Model(store)
            for what, given in todo:
                model.do(what, given)
            model.retain(Policy(last=2, newer_than=timedelta(0)))
            for number in range(6):  # a live state that counted on what is gone would be sealed with holes
                model.do("say", 1)
                model.do("save", f"end {number}")
            model.check()
            for name in model.names:
                store.remove(name)
            counts = store.stats()["counts"]
            assert not any(counts[table] for table in ("checkpoint", "segment", "shallow", "node", "chunk", "pack"))
            assert store.agents() == []
