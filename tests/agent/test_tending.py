"""Policies that live in the store, and the thread that follows them."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.agent import tending
from holdfast.agent.policy import Policy
from holdfast.agent.store import Store, open_as
from tests.agent.test_collection import sound, swept
from tests.agent.test_retention import talk


@pytest.fixture
def store(store_path):
    with open_as(Store, store_path) as opened:
        yield opened


def test_a_stored_policy_is_followed_by_whoever_writes(store, monkeypatch):
    monkeypatch.setattr(tending, "PAUSE_S", 0.0)
    store.set_policy(Policy(last=10))
    store.agent("b")
    store.set_policy(Policy(last=1000), "b")
    assert store.policies() == {None: Policy(last=10), "b": Policy(last=1000)}
    agent = talk(store, "a", count=3 * tending.EVERY)
    other = talk(store, "b", count=tending.EVERY)
    deadline = time.monotonic() + 180
    while len(agent.log()) > 10 + tending.EVERY and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(agent.log()) <= 10 + tending.EVERY
    assert len(other.log()) == tending.EVERY
    store._tending.stop()
    assert len(agent.state["messages"]) == 3 * tending.EVERY
    assert {one.agent for one in store.retain().agents} == {"a", "b"}
    assert len(agent.log()) == 10
    store.set_policy(None, "b")
    store.set_policy(None)
    assert (store.policies(), store.retain().agents) == ({}, [])
    assert tending.POLICY not in store._db.view.facts()
    sound(store)


def test_two_who_set_policies_at_once_lose_none(store):
    names = [f"agent {number}" for number in range(24)]
    for name in names:
        store.agent(name)
    threads = [
        threading.Thread(target=lambda some=names[at::4]: [store.set_policy(Policy(last=7), name) for name in some])
        for at in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.policies() == {name: Policy(last=7) for name in names}
    store.remove(names[0])
    assert store.policies() == {name: Policy(last=7) for name in names[1:]}


def test_closing_stops_it_and_the_next_one_goes_on(store_path, monkeypatch):
    for name, value in (("PAUSE_S", 0.0), ("REST_S", 0.05), ("SLICE_S", 0.0)):
        monkeypatch.setattr(tending, name, value)
    with open_as(Store, store_path) as store:
        store.set_policy(Policy(last=5))
        talk(store, count=tending.EVERY).close()
    with open_as(Store, store_path) as store:
        assert len(store.agent("a").state["messages"]) == tending.EVERY
        store.retain()
        assert len(store.agent("a").log()) == 5
        swept(store)
