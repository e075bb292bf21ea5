"""Transfers that are cut short, and stores that change while they go on."""

from __future__ import annotations

import os
import random
import signal
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.agent import arrival
from holdfast.agent.arrival import Arrival
from holdfast.agent.policy import Policy
from holdfast.store.changes import Objects, pack_node
from holdfast.store.sqlite import Sqlite
from tests.agent.carried import assert_same, grow, opened, plain, small_limits, sound, view
from tests.conftest import SOAK


@pytest.fixture
def stores(tmp_path):
    with opened(tmp_path / "a") as source, opened(tmp_path / "b") as dest:
        yield source, dest


def say(store, text, branch="main"):
    """One more checkpoint of the agent; its id."""
    with store.agent("trip", branch=branch) as agent:
        agent.state.setdefault("said", []).append(text)
        return agent.checkpoint(text).id


def head(store, name="trip", branch="main"):
    return store.agent(name, branch=branch, readonly=True).head.id


class Cut(Exception):
    """A transfer that ends in the middle."""


@pytest.fixture
def cut(monkeypatch):
    """Let the next transfer end after so many frames."""
    real = Arrival.take
    left = [10**9]

    def take(self, frame):
        left[0] -= 1
        if left[0] < 0:
            raise Cut
        return real(self, frame)

    monkeypatch.setattr(Arrival, "take", take)
    return lambda frames: left.__setitem__(0, frames)


@settings(max_examples=400 if SOAK else 3)
@given(seed=st.integers(0, 2**32))
def test_any_history_arrives_as_it_is_however_often_it_is_interrupted(tmp_path_factory, seed):
    choose = random.Random(seed)
    here = tmp_path_factory.mktemp("t")
    real = Arrival.take
    cuts = []

    def take(self, frame):
        if choose.random() < 0.04:
            cuts.append(frame)
            raise Cut
        return real(self, frame)

    with (
        small_limits(),
        pytest.MonkeyPatch.context() as patched,
        opened(here / "a") as one,
        opened(here / "b") as two,
        opened(here / "c") as three,
    ):
        patched.setattr(arrival, "ROWS_AT_ONCE", 3)
        patched.setattr(Arrival, "take", take)
        for round in range(choose.randrange(1, 4)):
            grow(one, "trip", choose, choose.randrange(1, 25))
            if round == 1:
                one.clone("trip", "copy")
            names = [info.name for info in one.agents()]
            for _ in count():
                try:
                    one.push(two)
                    break
                except Cut:
                    assert {info.name for info in two.agents()} <= set(names), "nothing half is seen"
            for name in names:
                assert_same(one, two, name)
            patched.setattr(Arrival, "take", real)
            grow(two, choose.choice(names), choose, choose.randrange(6))
            one.pull(two)
            two.export(here / "file", names, replace=True)
            three.import_bundle(here / "file")
            patched.setattr(Arrival, "take", take)
            for name in names:
                assert_same(two, one, name, states=False)
                assert_same(two, three, name, states=False)


def test_what_has_arrived_stays_for_the_next_attempt_and_is_not_seen(stores, cut, monkeypatch):
    source, dest = stores
    monkeypatch.setattr(arrival, "ROWS_AT_ONCE", 4)
    plain(source, "trip", 20)
    plain(source, "other", 2)
    cut(15)
    with pytest.raises(Cut):
        source.push(dest, ["trip"])
    assert dest.agents() == []
    arrived = len(dest._db.view.checkpoints())
    assert 8 <= arrived < 20
    cut(10**9)
    source.push(dest, ["other"])
    dest.remove("other")  # collects what nothing needs
    assert len(dest._db.view.checkpoints()) == arrived
    assert source.push(dest).agents[0].arrived.checkpoints == 20 - arrived
    assert_same(source, dest, "trip")


def test_a_node_that_was_left_without_what_is_below_it(stores):
    """A transfer died, and a sweep that was interrupted over there took what the node that it had written names."""
    source, dest = stores
    with small_limits():
        with source.agent("trip") as agent:
            agent.state["big"] = {f"key {i}": "v" * 50 for i in range(40)}
            agent.checkpoint()
            agent.state["copy"] = {"of": dict(agent.state["big"])}
            agent.checkpoint()
        names = [name for _, name, _ in source._db.view.rows("node")]
        inner = {name: pack_node(raw) for name, raw in source._db.view.nodes(names).items() if raw[1]}
        assert inner
        dest._db.change(lambda change: change.put_objects(Objects(inner)))
        source.push(dest)
        assert_same(source, dest, "trip")


def killed_push(here, when):
    """Push in a child that is killed around its ``when``-th transaction; True if it got to the end before."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            done = [0]
            real = Sqlite.transaction

            def transaction(self, work, begun=None):
                done[0] += 1
                if done[0] == when // 2 + 1 and when % 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(self, work, begun)
                if done[0] == when // 2 + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            with small_limits(), opened(here / "a", readonly=True) as source, opened(here / "b") as dest:
                Sqlite.transaction = transaction
                arrival.ROWS_AT_ONCE = 4
                source.push(dest)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def test_killed_at_any_point_it_goes_on(tmp_path, rounds):
    with small_limits(), opened(tmp_path / "a") as source:
        grow(source, "trip", random.Random(7), 40)
        plain(source, "other", 12)
    opened(tmp_path / "b").close()
    for when in count(0, rounds(7, 1)):
        done = killed_push(tmp_path, when)
        with small_limits(), opened(tmp_path / "a", readonly=True) as source, opened(tmp_path / "b") as dest:
            report = dest.verify()
            assert report.ok, f"killed at {when}: {report}"
            for info in dest.agents():
                assert view(dest, info.name)["branches"] == view(source, info.name)["branches"]
            if done:
                for name in ("trip", "other"):
                    assert_same(source, dest, name)
                break


@settings(max_examples=400 if SOAK else 3)
@given(seed=st.integers(0, 2**32))
def test_both_sides_may_forget_and_collect_meanwhile(tmp_path_factory, seed):
    choose = random.Random(seed)
    here = tmp_path_factory.mktemp("t")
    real = Arrival.take
    with (
        small_limits(),
        pytest.MonkeyPatch.context() as patched,
        opened(here / "a") as source,
        opened(here / "b") as dest,
    ):

        def take(self, frame):
            if choose.random() < 0.08:
                plain(dest, "other", 1)
                dest.remove("other")  # collects what nothing needs
                choose.choice([source, dest]).retain(Policy(last=choose.randrange(1, 4)))
            return real(self, frame)

        patched.setattr(arrival, "ROWS_AT_ONCE", 3)
        for _ in range(3):
            grow(source, "trip", choose, choose.randrange(1, 25), forgets=True)
            patched.setattr(Arrival, "take", take)
            source.push(dest)
            patched.setattr(Arrival, "take", real)
            sound(dest)
            source.push(dest)
            ours, theirs = view(source, "trip")["branches"], view(dest, "trip")["branches"]
            assert {name: one[2:] for name, one in ours.items()} == {name: one[2:] for name, one in theirs.items()}


def test_a_source_that_is_written_and_cleared_meanwhile(stores):
    source, dest = stores
    with small_limits():
        for number in range(30):
            say(source, f"{number} " * 50)

        def meanwhile(_what, done, _total):
            if done == 5:
                say(source, "more")
                source.retain(Policy(last=1))

        stood = head(source)
        source.push(dest, progress=meanwhile)
        assert head(dest) == stood, "all of it is as of one moment"
        sound(dest)
        source.push(dest)
        assert head(dest) == head(source)
        sound(dest)
