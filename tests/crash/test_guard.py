"""asyncio: the other tasks are in the dump, tracebacks are as they were, handled exceptions leave nothing."""

from __future__ import annotations

from holdfast.crash import open_dump
from tests.crash.processes import MARK, alike, run

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
    found = dumped(alike(tmp_path, body))
    assert set(found) == {"ValueError", "ExceptionGroup"}
    assert "sibling" in found["ValueError"][1]
    assert found["ValueError"][1]["bad"] == ["bad"]  # the one that failed, and where


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
