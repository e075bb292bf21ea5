"""Promises that concern a whole agent and its store: what a conversation costs, what a changed program is told."""

from __future__ import annotations

import random

import pytest

import holdfast
from holdfast import errors
from tests.run.bench import Crash

TURNS = 300
REPLY_BYTES = 1_000


def size_of(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("durable", [True, False])
def test_a_model_call_whose_argument_is_the_conversation_stores_no_second_copy_of_it(store_path, durable):
    chance = random.Random(500)
    asked = []

    @holdfast.tool(effect="read")
    def model(messages):
        asked.append(len(messages))
        return {"role": "assistant", "content": chance.randbytes(REPLY_BYTES // 2).hex()}

    def talk(agent, turns):
        messages = agent.state.setdefault("messages", [])
        for turn in range(turns):
            messages.append({"role": "user", "content": f"question {turn}"})
            messages.append(model(messages))
            if turn % 10 == 9:
                agent.checkpoint(f"turn {turn}")

    with holdfast.open(store_path) as store:
        agent = store.agent("chat")
        if durable:
            agent.run(talk, TURNS)
        else:
            with agent:
                talk(agent, TURNS)
    content = TURNS * REPLY_BYTES
    copies = sum(asked) // 2 * REPLY_BYTES
    taken = size_of(store_path)
    print(f"\n{TURNS} turns, {content:,} bytes of replies: {taken:,} bytes on disk; all arguments: {copies:,} bytes")
    assert asked == list(range(1, 2 * TURNS, 2))
    # Each reply is in the ledger and in the state; the rest is what checkpoints and records cost.
    assert taken < 6 * content
    assert copies > 100 * content


def test_a_probe_that_the_new_program_does_not_have_leaves_the_call_in_doubt(store_path):
    calls = []

    def program(*, probed):
        @holdfast.tool(name="pay", probe=(lambda effect: holdfast.Found("paid")) if probed else None)
        def pay(amount):
            calls.append(amount)
            raise Crash

        return pay

    pay = program(probed=True)

    @holdfast.durable
    def work(agent):
        return pay(5)

    with holdfast.open(store_path) as store, pytest.raises(Crash):
        store.agent("a").run(work)
    pay = program(probed=False)
    with holdfast.open(store_path) as store, pytest.raises(errors.InDoubt):
        store.agent("a").run(work)
    del pay

    @holdfast.durable(name="work")
    def other(agent):
        return None

    with holdfast.open(store_path) as store, pytest.raises(errors.InDoubt, match="not loaded"):
        store.agent("a").run(other)
    pay = program(probed=True)
    with holdfast.open(store_path) as store:
        assert store.agent("a").run(work) == "paid"
    assert calls == [5]
