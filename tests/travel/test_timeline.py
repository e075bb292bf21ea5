"""Random programs over asyncio, with timeouts of a few milliseconds on a busy machine, go the same way again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import holdfast
from holdfast.travel import replay_all

CHILD = Path(__file__).parents[2] / "benchmarks" / "replay_child.py"


def test_random_programs_go_the_same_way_with_equal_digests(tmp_path, monkeypatch, rounds):
    monkeypatch.syspath_prepend(str(CHILD.parent))
    import replay_child as program

    names = []
    with holdfast.open(tmp_path / "store") as store:
        for seed in range(rounds(12, 500)):
            store.agent(f"alone-{seed}").run(program.alone, seed)
            asyncio.run(store.agent(f"several-{seed}").arun(program.several, seed))
            names += [(f"alone-{seed}", None), (f"several-{seed}", None)]
        for one in replay_all(store, names, program=str(CHILD)):
            assert one.same, (one.agent, one.difference, one.failed, one.stopped, one.blocked)
            assert one.compared == len(one.checkpoints)
    del sys.modules["replay_child"]


def test_a_call_that_was_done_and_whose_caller_was_cancelled_before_its_turn_ends_so_again(tmp_path):
    """The answer of a tool is recorded, and the timeout is over while others have their turns before it."""
    lines = (
        "import asyncio, time, holdfast\n"
        "@holdfast.tool(effect='read')\n"
        "async def peek(n):\n"
        "    await asyncio.sleep(0)\n"
        "    return n\n"
        "@holdfast.durable\n"
        "async def busy(agent):\n"
        "    agent.state['seen'] = []\n"
        "    async def one(n):\n"
        "        try:\n"
        "            async with asyncio.timeout(0.2):\n"
        "                agent.state['seen'].append(await peek(n))\n"
        "        except TimeoutError:\n"
        "            agent.state['seen'].append('late')\n"
        "        if not agent.state.get('slow'):\n"
        "            agent.state['slow'] = True\n"
        "            time.sleep(0.4)\n"
        "    await asyncio.gather(*(one(n) for n in range(4)))\n"
        "    await agent.acheckpoint('all')\n"
    )
    (tmp_path / "busy.py").write_text(lines)
    space: dict = {}
    exec(compile(lines, str(tmp_path / "busy.py"), "exec"), space)
    with holdfast.open(tmp_path / "store") as store:
        agent = store.agent("a")
        asyncio.run(agent.arun(space["busy"]))
        assert "late" in agent.state["seen"]
        (one,) = replay_all(store, [("a", None)], program=str(tmp_path / "busy.py"))
        assert one.same, one
