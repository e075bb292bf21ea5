"""Programs whose runs are executed again."""

from __future__ import annotations

import gc
import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).parent / "trips.py")


@contextmanager
def loaded(path):
    """A program as a module. It is gone afterwards, and with it its tools: other tests have some of these names."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]
    vars(module).clear()
    gc.collect()


@pytest.fixture(scope="module")
def trips():
    with loaded(PROGRAM) as module:
        yield module
