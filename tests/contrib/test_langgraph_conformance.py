"""LangGraph's own suite for savers. Its summary skips what a saver does not have, so every capability is asked for."""

from __future__ import annotations

import asyncio

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability
from langgraph.checkpoint.conformance.report import ProgressCallbacks

from holdfast.contrib.langgraph import HoldfastSaver


@pytest.mark.parametrize("kind", ["commit", "batched", "server"])
def test_every_capability_is_there_and_every_test_of_it_passes(place, kind):
    places = (place(f"store{number}") for number in range(1_000))
    failures: list[str] = []

    @checkpointer_test(name=f"HoldfastSaver {kind}")
    async def savers():
        async with HoldfastSaver(next(places), durability="batched" if kind == "batched" else "commit") as saver:
            yield saver
            assert saver.store.verify().ok

    def on_result(capability: str, name: str, passed: bool, error: str | None) -> None:
        if not passed:
            failures.append(f"{capability} {name}:\n{error}")

    report = asyncio.run(validate(savers, progress=ProgressCallbacks(on_test_result=on_result)))
    assert not failures, "\n".join(failures)
    for capability in Capability:
        result = report.results[capability.value]
        assert result.detected, f"{capability.value} is not implemented"
        assert result.passed is True, f"{capability.value}: {result.failures}"
        assert result.tests_passed > 0, f"{capability.value}: no test was run"
        assert result.tests_failed == result.tests_skipped == 0, f"{capability.value}: {result}"
