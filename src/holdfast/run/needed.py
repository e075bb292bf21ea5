"""What runs still need of an agent's history, so that nothing of it is let go.

Owns the answer to one question: which checkpoints must a policy leave alone. Writes nothing. What always holds: a run
that can still go on finds the checkpoint that it began with and every one that it took, a rollback the one that it goes
to, and whoever decides about an effect in doubt the checkpoint before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.codec.types import Registry
from holdfast.run.arguments import fetch
from holdfast.run.past import ROLLED_BACK, Past, RunPast
from holdfast.run.stored import StoredLine

_OVER = frozenset({"finished", "cancelled"})

Place = tuple[int, int, bytes]
"""How many records a checkpoint knows, its number, its id."""


def needed(line: StoredLine, places: Sequence[Place]) -> Iterator[tuple[bytes, str]]:
    """Ids and reasons. ``places`` are the agent's checkpoints, sorted."""
    past = Past(line.records())
    for run in past.runs.values():
        # One that failed or was rolled back can be executed again as long as nothing else has been begun since.
        if run.status in _OVER or (run.status in {"failed", ROLLED_BACK} and run is not past.last):
            continue
        yield from _of_run(line, run)
    for call in past.calls():
        if call.open and call.kind == "write":
            before = [identity for known, _, identity in places if known < call.number]
            yield from ((identity, f"before {call.tool}, which is in doubt") for identity in before[-1:])


def _of_run(line: StoredLine, run: RunPast) -> Iterator[tuple[bytes, str]]:
    name = f"run {run.begin.function}, which has not finished"
    if run.begin.kind == "rollback":
        given: Any = fetch(run.begin.args, line, Registry(), inert=True)
        if isinstance(given, dict) and type(given.get("to")) is bytes:
            yield given["to"], name
    if run.begin.start:
        yield run.begin.start, name
    for saved in run.saved.values():
        yield saved.id, name
