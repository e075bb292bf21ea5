"""asyncio: the other tasks are in the dump, tracebacks are as they were, handled exceptions leave nothing."""

from __future__ import annotations

import pytest

from holdfast.crash import open_dump
from tests.crash.processes import MARK, alike, python, run

TASKS = """import asyncio
async def other(name):
    mine = [name]
    await asyncio.sleep(3600)
async def bad():
    await asyncio.sleep(0)
    raise ValueError('task')
"""


def dumped(ended):
    """By the type of the exception: what the dump says."""
    found = {}
    for path in ended.paths:
        with open_dump(path) as dump:
            tasks = {task.name: [frame.function for frame in task.frames] for task in dump.tasks}
            found[dump.exceptions[0].type_name] = (dump.trigger, tasks, [f.function for f in dump.threads[0].frames])
    return found


def test_tasks_are_alive_when_the_main_one_fails(tmp_path):
    body = TASKS + (
        "async def main():\n"
        "    tasks = [asyncio.create_task(other(n), name=n) for n in 'abc']\n"
        "    await asyncio.sleep(0)\n"
        "    await bad()\n"
        "def begin():\n"
        "    asyncio.run(main())\n"
        "begin()\n"
    )
    ended = alike(tmp_path, body)
    trigger, tasks, frames = dumped(ended)["ValueError"]
    assert trigger == "task"
    assert set(tasks) == {"a", "b", "c"}
    assert tasks["a"][0] == "other"
    assert [name for name in frames if name in ("begin", "main", "bad")] == ["begin", "main", "bad"]
    assert len(ended.paths) == 1
    assert not (ended.folder / "held").exists()
    with ended.dump() as dump:
        other = next(task for task in dump.tasks if task.name == "b")
        assert dump.local(other.frames[0], "mine[0]") == "b"


def test_siblings_of_a_group_are_alive_when_one_fails(tmp_path):
    body = TASKS + (
        "async def main():\n"
        "    async with asyncio.TaskGroup() as group:\n"
        "        group.create_task(other('s'), name='sibling')\n"
        "        group.create_task(bad(), name='bad')\n"
        "asyncio.run(main())\n"
    )
    ended = alike(tmp_path, body)
    _trigger, tasks, _frames = dumped(ended)["ExceptionGroup"]
    assert tasks["sibling"][0] == "other"
    assert tasks["bad"] == ["bad"]  # the one that failed, and where
    with ended.dump() as dump:
        sibling = next(task for task in dump.tasks if task.name == "sibling")
        assert dump.local(sibling.frames[0], "mine[0]") == "s"
        assert dump.sources[sibling.frames[0].file]


BUSY = """import asyncio, time
class Node:
    def __init__(self, n): self.values = {str(n): [n]}
MUCH = [Node(n) for n in range(60_000)]
async def bad():
    much = MUCH  # it was there before: only what the failure costs is measured
    raise ValueError('handled')
async def main():
    longest = 0.0
    async def watch():
        nonlocal longest
        while True:
            began = time.process_time()  # of this process: what others do meanwhile does not count
            await asyncio.sleep(0)
            longest = max(longest, time.process_time() - began)
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    {fail}
    await asyncio.sleep(0)
    watching.cancel()
    return longest
"""
HANDLED = {
    "a group": """
    for _ in range(3):
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(bad())
        except* ValueError:
            pass""",
    "gathered": """
    for _ in range(3):
        await asyncio.gather(bad(), return_exceptions=True)""",
}


@pytest.mark.parametrize("how", HANDLED)
def test_a_failure_that_is_handled_keeps_the_loop_for_an_instant_only(tmp_path, how):
    body = BUSY.replace("{fail}", HANDLED[how].lstrip("\n ")) + (
        "import gc; gc.disable()\n"
        "bare = asyncio.run(main())\n"
        "hooks = crash.install(to=FOLDER, sidecar=False)\n"
        "print(asyncio.run(main()) - bare)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(f"import holdfast.crash as crash\nFOLDER = {str(tmp_path / 'dumps')!r}\n{body}")
    ended = python(program)
    assert float(ended.stdout) < 0.05, ended.stderr
    assert not list(tmp_path.glob("dumps/*.hfdump"))


def test_a_task_that_nobody_awaits_is_dumped_beside_the_loop(tmp_path):
    body = TASKS + (
        "import gc, threading\n"
        "async def main():\n"
        "    asyncio.create_task(bad(), name='forgotten')\n"
        "    alive = asyncio.create_task(other('a'), name='alive')\n"
        "    await asyncio.sleep(0.01)\n"
        "    gc.collect()\n"
        "    print(any(t.name == 'holdfast-dump' for t in threading.enumerate()))\n"
        "asyncio.run(main())\n"
    )
    ended = run(tmp_path, body)
    assert ended.out == "True\n"
    with ended.dump() as dump:
        assert dump.trigger == "task"
        assert "alive" in [task.name for task in dump.tasks]
        assert dump.threads[0].main


def test_another_failure_does_not_take_away_what_was_seen(tmp_path):
    body = TASKS + (
        "import threading\n"
        "async def main():\n"
        "    alone = asyncio.create_task(other('a'), name='alone')\n"
        "    await asyncio.sleep(0)\n"
        "    await bad()\n"
        "try:\n    asyncio.run(main())\n"
        "except ValueError as error:\n"
        "    kept = error\n"
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\n"
        "raise kept\n"
    )
    found = dumped(run(tmp_path, body))
    assert "alone" in found["ValueError"][1]


def test_an_old_style_loop(tmp_path):
    body = TASKS + (
        "loop = asyncio.new_event_loop()\n"
        "alone = loop.create_task(other('x'), name='alone')\n"
        "loop.run_until_complete(bad())\n"
    )
    # The loop is left open on purpose, so what it says at the end is about the task that was left alone.
    ended = run(tmp_path, body)
    assert set(dumped(ended)["ValueError"][1]) == {"alone"}


def test_an_exception_that_is_handled_leaves_no_dump(tmp_path):
    body = TASKS + (
        "for _ in range(4):\n"
        "    try:\n"
        "        asyncio.run(bad())\n"
        "    except ValueError as error:\n"
        "        print(len(__import__('traceback').extract_tb(error.__traceback__)))\n"
    )
    ended = alike(tmp_path, body)
    assert ended.paths == []
    assert MARK not in ended.err
    assert not (ended.folder / "held").exists()


def test_what_comes_after_a_handled_one_is_dumped(tmp_path):
    body = TASKS + (
        "try:\n    asyncio.run(bad())\nexcept ValueError:\n    pass\n"
        "raise KeyError('another')\n"
    )  # fmt: skip
    assert set(dumped(alike(tmp_path, body))) == {"KeyError"}


def test_a_task_that_nobody_awaits(tmp_path):
    body = TASKS + (
        "import gc\n"
        "async def main():\n"
        "    asyncio.create_task(bad(), name='forgotten')\n"
        "    await asyncio.sleep(0.01)\n"
        "    gc.collect()\n"
        "asyncio.run(main())\n"
        "print('on')\n"
    )
    ended = alike(tmp_path, body)
    assert ended.out == "on\n"
    assert dumped(ended)["ValueError"][0] == "task"


def test_a_callback_that_fails_and_a_handler_of_the_program(tmp_path):
    body = TASKS + (
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    loop.set_exception_handler(lambda loop, context: print('handler', context['message'].split()[0]))\n"
        "    loop.call_soon(lambda: 1 / 0)\n"
        "    await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
    )
    ended = alike(tmp_path, body)
    assert ended.out == "handler Exception\n"
    assert "ZeroDivisionError" in dumped(ended)


def test_a_loop_in_a_thread(tmp_path):
    body = TASKS + (
        "import threading\n"
        "async def main():\n"
        "    asyncio.create_task(other('t'), name='beside')\n"
        "    await asyncio.sleep(0)\n"
        "    await bad()\n"
        "t = threading.Thread(target=lambda: asyncio.run(main()), name='worker'); t.start(); t.join()\n"
    )
    ended = alike(tmp_path, body)
    assert "beside" in dumped(ended)["ValueError"][1]


def test_cancelling_is_no_failure(tmp_path):
    body = TASKS + (
        "async def main():\n"
        "    task = asyncio.create_task(other('c'))\n"
        "    await asyncio.sleep(0)\n"
        "    task.cancel()\n"
        "    await task\n"
        "try:\n    asyncio.run(main())\nexcept asyncio.CancelledError:\n    print('cancelled')\n"
        "try:\n"
        "    asyncio.run(asyncio.wait_for(other('w'), 0.01))\n"
        "except TimeoutError:\n    print('late')\n"
    )
    ended = alike(tmp_path, body)
    assert ended.out == "cancelled\nlate\n"
    assert ended.paths == []
