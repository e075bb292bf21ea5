"""Savers for the tests of LangGraph's contract: ours, and the official ones beside it."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from holdfast.contrib.langgraph import HoldfastSaver


@pytest.fixture(params=["directory", "server"])
def kind(request):
    """Where stores are: below the test's directory, or on PostgreSQL."""
    return request.param


@pytest.fixture
def place(request, kind, tmp_path, monkeypatch):
    """``place(name)`` is where a store can be made."""
    if kind != "server":
        return lambda name: str(tmp_path / name)
    url = request.getfixturevalue("postgres_url")
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # the tests' server does not flush
    return lambda name: f"{url}&schema={name}"


@pytest.fixture
def ours(store_path):
    with HoldfastSaver(store_path) as saver:
        yield saver
        assert saver.store.verify().ok, str(saver.store.verify())


@pytest.fixture(params=["holdfast", "memory", "sqlite"])
def saver(request, tmp_path):
    """Ours, and the two that show that a test asks for the contract and not for a habit of ours."""
    if request.param == "holdfast":
        yield request.getfixturevalue("ours")
    elif request.param == "memory":
        yield InMemorySaver()
    else:
        with closing(sqlite3.connect(tmp_path / "rival.sqlite", check_same_thread=False)) as connection:
            yield SqliteSaver(connection)
