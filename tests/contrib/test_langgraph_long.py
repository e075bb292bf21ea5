"""A thread of 1,000 turns: what opening it, reading its newest state, listing it and going on with it have to read.

Everything is counted, nothing is timed: statements, rows and bytes that leave the catalog.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from contextlib import contextmanager

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from holdfast.agent.branch import SEAL_BYTES, SEAL_CHECKPOINTS
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.contrib.langgraph.tuples import PAGE
from holdfast.store.catalog import ROWS_AT_ONCE
from tests.contrib.threads import checkpoint, config

pytestmark = pytest.mark.slow

TURNS = 1_000
DELTAS = 500
MESSAGE_BYTES = 200
REPLAYED, TAIL_BYTES = SEAL_CHECKPOINTS, SEAL_BYTES
"""The store's own bounds on what lies between a checkpoint and the sealed one below it."""
WRITTEN = 100
"""The last turns have pending writes too."""
META = {"source": "loop", "parents": {}}


def message(number: int):
    kind = HumanMessage if number % 2 else AIMessage
    return kind(f"{number:06} ".ljust(MESSAGE_BYTES, "abcdefg "[number % 7]), id=f"m-{number}")


def grow(saver, thread: str, start: int, stop: int, at=None):
    """Turns of one message each, with what a task wrote in between."""
    at = at or config(thread)
    messages = [message(number) for number in range(start)]
    for number in range(start, stop):
        messages.append(message(number))
        one = checkpoint({"messages": list(messages), "turn": number}, channel_versions={"messages": number, "turn": 1})
        at = saver.put(at, one, {**META, "step": number}, one["channel_versions"])
        if number >= stop - WRITTEN:
            saver.put_writes(at, [("messages", [messages[-1]])], f"task-{number}", "~1")
    return at


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "store"
    with HoldfastSaver(path, durability="batched") as saver:
        grow(saver, "long", 0, TURNS)
        grow(saver, "short", 0, 300)
        at = config("delta")
        for number in range(DELTAS):
            values = {"turn": number} | ({"items": [number]} if number % 50 == 0 else {})
            one = checkpoint(values, channel_versions={"items": number + 1, "turn": number + 1})
            at = saver.put(at, one, {**META, "step": number}, one["channel_versions"])
            if number >= DELTAS - WRITTEN:
                saver.put_writes(at, [("items", [f"{number}"])], f"task-{number}", "~1")
    return path


class Reads(Counter):
    """Statements, rows of each table, bytes."""

    @property
    def statements(self) -> int:
        return self["statements"]


@contextmanager
def counted(saver):
    """Count everything that is read from the catalog inside the block."""
    engine = saver.store._db.engine
    reads = Reads()
    real = engine.run

    def run(sql, args=()):
        rows = real(sql, args)
        reads["statements"] += 1
        found = re.search(r"(?:FROM|JOIN) (loose|checkpoint|segment|node|log|branch|agent)\b", sql)
        table = found.group(1) if found else "other"
        reads["checkpoint" if table == "loose" else table] += len(rows)
        reads["bytes"] += sum(len(column) for row in rows for column in row if isinstance(column, bytes))
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run", run)
        yield reads


def newest(path, thread: str) -> Reads:
    with HoldfastSaver(path) as saver, counted(saver) as reads:
        found = saver.get_tuple(config(thread))
    turns = {"long": TURNS, "short": 300}[thread]
    values = found.checkpoint["channel_values"]
    assert len(values["messages"]) == turns
    assert values["messages"][-1] == message(turns - 1)
    assert found.pending_writes == [(f"task-{turns - 1}", "messages", [message(turns - 1)])]
    return reads


def test_newest_state_is_read_with_its_own_bytes_and_a_bounded_tail(path):
    reads = newest(path, "long")
    print(f"\nnewest of {TURNS}: {dict(reads)}")
    assert reads["checkpoint"] <= 2 * REPLAYED, "not the whole history: to the base, and from there"
    assert reads["log"] <= 4, "only the writes of that checkpoint"
    state = TURNS * (MESSAGE_BYTES + 400)  # a message with its fields
    assert reads["bytes"] <= state + 2 * TAIL_BYTES
    assert reads.statements <= 40 + state // (32 * 4096)


def test_statements_for_the_newest_state_grow_with_the_state_not_with_the_history(path):
    long, short = newest(path, "long"), newest(path, "short")
    print(f"\nof 300: {dict(short)}")
    assert long["checkpoint"] <= 2 * REPLAYED
    assert short["checkpoint"] <= 2 * REPLAYED
    assert long.statements - short.statements <= 25


def listing(path, **options) -> Reads:
    with HoldfastSaver(path) as saver, counted(saver) as reads:
        found = list(saver.list(config("long"), **options))
    limit = options.get("limit")
    assert len(found) == limit
    top = int(found[0].metadata["step"])
    for number, one in enumerate(found):
        assert one.metadata["step"] == top - number
        assert len(one.checkpoint["channel_values"]["messages"]) == top - number + 1
        if top >= TURNS - WRITTEN // 2:
            assert [task for task, _, _ in one.pending_writes] == [f"task-{top - number}"]
    return reads


def test_listing_fifty_is_not_fifty_reads(path):
    few, fifty = listing(path, limit=5), listing(path, limit=50)
    print(f"\nlist 5: {dict(few)}\nlist 50: {dict(fifty)}")
    assert fifty.statements <= 60
    assert fifty.statements - few.statements <= 5, "one more listed is not one more statement"
    assert fifty["checkpoint"] <= REPLAYED + PAGE + ROWS_AT_ONCE
    assert fifty["log"] <= 2 * PAGE
    state = TURNS * (MESSAGE_BYTES + 400)
    assert fifty["bytes"] <= state + 2 * TAIL_BYTES + PAGE * 4096, "one state and what changed, not fifty states"


def test_listing_from_the_middle_reads_what_is_there(path):
    with HoldfastSaver(path) as saver:
        middle = list(saver.list(config("long"), filter={"step": TURNS // 2}, limit=1))
    reads = listing(path, limit=50, before=middle[0].config)
    print(f"\nlist 50 from the middle: {dict(reads)}")
    # Which ones come before it, their states say: those since are read page by page.
    assert reads.statements <= 20 * TURNS // PAGE
    assert reads["checkpoint"] <= (2 * REPLAYED + PAGE) * TURNS // PAGE


def test_an_old_checkpoint_is_read_by_its_id_alone(path):
    with HoldfastSaver(path) as saver:
        old = next(saver.list(config("long"), filter={"step": 700}, limit=1)).config
    with HoldfastSaver(path) as saver, counted(saver) as reads:
        found = saver.get_tuple(old)
    print(f"\nby id: {dict(reads)}")
    assert len(found.checkpoint["channel_values"]["messages"]) == 701
    assert reads["checkpoint"] <= 2 * REPLAYED
    assert reads.statements <= 60


def test_going_on_reads_and_writes_little(path, tmp_path):
    copy = tmp_path / "store"
    shutil.copytree(path, copy)
    with HoldfastSaver(copy) as saver:
        at = saver.get_tuple(config("long")).config
        with counted(saver) as reads:
            at = grow(saver, "long", TURNS, TURNS + 1, at)
        print(f"\nthe first turn after opening: {dict(reads)}")
        assert reads["checkpoint"] <= 2 * REPLAYED
        with counted(saver) as reads:
            before = saver.store.stats()["bytes"]
            grow(saver, "long", TURNS + 1, TURNS + 2, at)
        print(f"the second: {dict(reads)}")
        assert reads["checkpoint"] <= 4, "what this process wrote it need not read"
        assert reads["bytes"] <= 64 * 1024
        assert before is not None
        written = saver.store._db.run("SELECT n, length(data) FROM loose ORDER BY n DESC LIMIT 1")
        assert written[0][1] <= 8 * MESSAGE_BYTES + 2_000, "one message, not two thousand"
        assert len(saver.get_tuple(config("long")).checkpoint["channel_values"]["messages"]) == TURNS + 2


def test_delta_history_is_one_walk(path):
    with HoldfastSaver(path) as saver:
        with counted(saver) as reads:
            found = saver.get_delta_channel_history(config=config("delta"), channels=["items"])
        print(f"\ndelta history: {dict(reads)}")
        assert found["items"]["seed"] == [DELTAS - 50]
        assert [value for _, _, value in found["items"]["writes"]] == [
            [f"{number}"] for number in range(DELTAS - 50, DELTAS - 1)
        ]
        assert reads.statements <= 30
        assert reads["checkpoint"] <= 3 * REPLAYED
        assert reads["log"] <= 2 * REPLAYED


def test_copying_a_long_thread_reads_nothing_of_it(path, tmp_path):
    copy = tmp_path / "store"
    shutil.copytree(path, copy)
    with HoldfastSaver(copy) as saver:
        with counted(saver) as reads:
            saver.copy_thread("long", "copy")
        print(f"\ncopy: {dict(reads)}")
        assert reads["checkpoint"] <= 10
        assert reads["node"] == reads["segment"] == 0
        with counted(saver) as reads:
            assert len(saver.get_tuple(config("copy")).checkpoint["channel_values"]["messages"]) == TURNS
        assert reads["checkpoint"] <= 2 * REPLAYED
