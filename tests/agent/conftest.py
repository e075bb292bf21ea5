"""Where the stores of this folder's tests are, unless they say otherwise."""

from __future__ import annotations

import pytest

import holdfast
from tests.memory import memory


@pytest.fixture
def store_path():
    """Where a test's store goes, and flushes cost nothing. Nothing is there yet."""
    with memory() as folder:
        yield folder / "store"


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as opened:
        yield opened
