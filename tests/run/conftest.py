"""What tests of runs share: a process in which only its own tools are defined, and one that begins anew."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

import holdfast
from holdfast.agent import places
from holdfast.run.tools import TOOLS
from tests.run import bench, working

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def own_tools(monkeypatch):
    """Programs that other tests have loaded define tools, too, and two of one name are refused."""
    kept = {
        name: [ref for ref in made if (tool := ref()) is not None and tool.tool.origin[0].startswith(HERE)]
        for name, made in TOOLS._wrappers.items()
        if not name.startswith("holdfast.")
    }
    own = {name: made for name, made in TOOLS._wrappers.items() if name.startswith("holdfast.")}
    monkeypatch.setattr(TOOLS, "_wrappers", {**own, **kept})


@pytest.fixture(params=["directory", "server"])
def place(request, tmp_path, monkeypatch):
    """Where a store can be made: below the test's directory, and on PostgreSQL."""
    if request.param == "directory":
        return str(tmp_path / "store")
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # the tests' server does not flush
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def reopened(store_path):
    """``reopened()`` is the store in a new process, as far as a program can tell."""
    stores = []

    def again():
        while stores:
            stores.pop().close()
        stores.append(holdfast.open(store_path))
        return stores[-1]

    yield again
    while stores:
        stores.pop().close()


@pytest.fixture
def opened(reopened):
    """``opened()`` is the agent in a new process."""

    def again(name="trip-7", **options):
        return reopened().agent(name, **options)

    return again


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Where the program for workers writes what it does; ``outside()`` is how often it did what."""
    monkeypatch.setattr(working, "OUTSIDE", tmp_path / "outside")
    monkeypatch.setenv("OUTSIDE", str(tmp_path / "outside"))
    return lambda: Counter(line[1] for line in working.done())


@pytest.fixture
def world():
    """What is done outside."""
    return bench.Outside()


@pytest.fixture
def book(world):
    """A tool that books something outside, and can cancel it."""
    return world.tool()


@pytest.fixture(autouse=True)
def nothing_stays_open():
    """What a test leaves open would be told of in the dumps of other tests."""
    before = set(map(id, places._open.values()))
    yield
    for store in [one for one in places._open.values() if id(one) not in before]:
        store.close()
    while bench.FOLDERS:
        shutil.rmtree(bench.FOLDERS.pop())
