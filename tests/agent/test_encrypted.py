"""The tests of history once more, in an encrypted store: nothing above the store can tell the difference."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.errors import KeyNeeded
from tests.agent.test_history import *  # noqa: F403


@pytest.fixture(autouse=True)
def encrypted(monkeypatch):
    monkeypatch.setenv("HOLDFAST_KEY", bytes(range(32)).hex())


def test_these_stores_are_encrypted(store_path):
    with holdfast.open(store_path) as store:
        assert store.encrypted
    with pytest.raises(KeyNeeded):
        holdfast.open(store_path, key=False)
