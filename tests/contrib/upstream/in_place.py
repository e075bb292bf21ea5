"""A plugin for LangGraph's own tests: where they open a SqliteSaver, they get a HoldfastSaver.

It is loaded in a process of its own, in which ``tests`` is LangGraph's package, so it imports nothing from here.
"""

from __future__ import annotations

import os
import sys
import uuid
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from holdfast.contrib.langgraph import HoldfastSaver

# Some of their tests count the calls of uuid4 by the ids that it gives; ours are none of them.
_REAL = SimpleNamespace(**vars(uuid))
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "holdfast":
        for attribute, held in list(vars(module).items()):
            if held is uuid:
                setattr(module, attribute, _REAL)


@contextmanager
def ours(_: str) -> Iterator[HoldfastSaver]:
    with TemporaryDirectory(prefix="holdfast-") as folder, HoldfastSaver(f"{folder}/store") as saver:
        yield saver
        found = saver.store.verify()
        assert found.ok, str(found)


@asynccontextmanager
async def ours_too(name: str) -> AsyncIterator[HoldfastSaver]:
    with ours(name) as saver:
        yield saver


SqliteSaver.from_conn_string = ours  # type: ignore[assignment, method-assign]
AsyncSqliteSaver.from_conn_string = ours_too  # type: ignore[assignment, method-assign]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """One test of so many, always the same ones."""
    share = int(os.environ["HOLDFAST_SHARE"])
    items[:] = [item for item in items if zlib.crc32(item.name.encode()) % share == 0]
