from __future__ import annotations

import pytest

from holdfast.store.embedded import open_embedded


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(path):
    opened = open_embedded(path)
    yield opened
    opened.close()
