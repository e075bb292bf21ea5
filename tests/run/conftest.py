"""What tests of runs share: a process in which only its own tools are defined, and one that begins anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.run.tools import TOOLS

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
