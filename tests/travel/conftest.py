"""The program whose runs are executed again."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).parent / "trips.py")


@pytest.fixture(scope="module")
def trips():
    """It is gone afterwards, and with it its tools: other tests have some of these names."""
    spec = importlib.util.spec_from_file_location("trips", PROGRAM)
    module = sys.modules["trips"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["trips"]
    vars(module).clear()
    gc.collect()
