"""install(): failures leave a dump, and the process ends as it would have without."""

from __future__ import annotations

import platform
import sys
import threading

import pytest

import holdfast.crash
from holdfast.crash import kinds, open_dump
from holdfast.errors import BadOption
from tests.crash.processes import MARK, alike, run


def test_an_uncaught_exception_leaves_a_dump_and_nothing_else_changes(tmp_path):
    ended = alike(tmp_path, "def low(n):\n    raise ValueError(f'no {n}')\n\nprint('out')\nlow(7)\n")
    assert ended.code == 1
    with ended.dump() as dump:
        assert (dump.trigger, dump.why) == ("exception", "uncaught ValueError")
        assert (dump.exceptions[0].type_name, dump.exceptions[0].message) == ("ValueError", "no 7")
        assert dump.threads[0].frames[-1].function == "low"
        assert not dump.missing
    assert ended.paths[0].stat().st_mode & 0o777 == 0o600
    assert ended.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(3)",
        "import sys; sys.exit('so long')",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import asyncio\nasync def main():\n    raise SystemExit(4)\nasyncio.run(main())",
    ],
)  # fmt: skip
def test_what_is_no_failure_leaves_no_dump(tmp_path, body):
    ended = alike(tmp_path, body)
    assert ended.paths == []
    assert MARK not in ended.err


def test_the_thread_that_watches_loads_nothing(tmp_path):
    """One that makes a class from text, as namedtuple does, changes the exit code of a program that Ctrl-C ended."""
    looking = "import sys, time\nbefore = set(sys.modules)\ntime.sleep(0.5)\nprint(set(sys.modules) - before)"
    ended = run(tmp_path, looking)
    assert (ended.code, ended.out) == (0, "set()\n")


BODIES = {
    "group": (
        "def fail():\n"
        "    raise ExceptionGroup('both', [ValueError('a'), ExceptionGroup('inner', [KeyError('b')])])\n"
        "fail()\n"
    ),
    "chain": "try:\n    1 / 0\nexcept Exception as e:\n    e.add_note('noted')\n    raise KeyError('x') from e\n",
    "recursion": "def deep(n):\n    return deep(n + 1)\ndeep(0)\n",
    "own str": "class Bad(Exception):\n    def __str__(self):\n        raise RuntimeError('no')\nraise Bad(1)\n",
    "thread": (
        "import threading\n"
        "t = threading.Thread(target=lambda: 1 / 0, name='worker'); t.start(); t.join(); print('on')\n"
    ),
    "unraisable": "class A:\n    def __del__(self):\n        1 / 0\nA()\nprint('on')\n",
    "hook": (
        "import sys\nold = sys.excepthook\nsys.excepthook = lambda *a: (print('mine', file=sys.stderr), old(*a))\n"
        "raise ValueError('x')\n"
    ),
    "broken stderr": (
        "import sys\nclass E:\n    def write(self, t): raise RuntimeError('w')\n    def flush(self): pass\n"
        "sys.stderr = E()\nraise ValueError\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_every_kind_of_end_is_as_without_hooks(tmp_path, name):
    ended = alike(tmp_path, BODIES[name])
    assert len(ended.paths) == 1
    with open_dump(ended.paths[0]) as dump:
        types = [failure.type_name for failure in dump.exceptions]
        expected = {
            "group": ["ExceptionGroup", "ValueError", "ExceptionGroup", "KeyError"],
            "chain": ["KeyError", "ZeroDivisionError"],
            "recursion": ["RecursionError"],
            "own str": ["__main__.Bad"],
            "thread": ["ZeroDivisionError"],
            "unraisable": ["ZeroDivisionError"],
        }.get(name, ["ValueError"])
        assert types == expected
        assert dump.trigger == {"thread": "thread", "unraisable": "unraisable"}.get(name, "exception")


LATER = {
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[1], file=sys.stderr)\n",
    "hook that calls": (
        "import sys\nold = sys.excepthook\n"
        "sys.excepthook = lambda *a: (old(*a), print('mine', file=sys.stderr))\n"
    ),
    "hook that fails": "import sys\nsys.excepthook = lambda *a: 1 / 0\n",
    "hook that leaves": "import sys\nsys.excepthook = lambda *a: sys.exit(9)\n",
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_a_hook_that_is_set_later_acts_and_there_is_a_dump(tmp_path, name):
    ended = alike(tmp_path, LATER[name] + "def low():\n    mine = 7\n    raise ValueError('x')\nlow()\n")
    assert ended.err.count("dump written") == 1
    with ended.dump() as dump:
        assert dump.exceptions[0].type_name == "ValueError"
        assert dump.threads[0].frames[-1].function == "low"
        assert dump.local(dump.threads[0].frames[-1], "mine") == 7


@pytest.mark.parametrize("calls", [True, False])
def test_a_hook_for_threads_that_is_set_later(tmp_path, calls):
    old = "old(a), " if calls else ""
    ended = alike(
        tmp_path,
        "import threading\nold = threading.excepthook\n"
        f"threading.excepthook = lambda a: ({old}print('mine', a.exc_value))\n"
        "t = threading.Thread(target=lambda: 1 / 0, name='worker'); t.start(); t.join()\n",
    )
    assert ended.out == "mine division by zero\n"
    with ended.dump() as dump:
        assert (dump.trigger, dump.why) == ("thread", "uncaught ZeroDivisionError in thread worker")


def test_what_a_console_inside_of_the_program_has_shown_is_no_crash(tmp_path):
    body = (
        "import sys\n"
        "def show():\n"
        "    try:\n        1 / 0\n"
        "    except ArithmeticError as error:\n        sys.last_value = error\n"
        "show()\n"
        "print('on')\n"
    )
    ended = alike(tmp_path, body)
    assert ended.out == "on\n"
    assert ended.paths == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_multiprocessing_leaves_a_dump(tmp_path, method):
    body = (
        "import multiprocessing\n"
        "def work(x):\n    return 10 // x\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    for x in (0, 1):\n"
        "        p = context.Process(target=work, args=(x,), name='worker'); p.start(); p.join(); print(p.exitcode)\n"
    )
    ended = alike(tmp_path, body)
    assert ended.out == "1\n0\n"
    with ended.dump() as dump:
        assert dump.why == "uncaught ZeroDivisionError in process worker"
        assert dump.threads[0].frames[-1].function == "work"


def test_what_is_asked_for_goes_to_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with holdfast.crash.install(to=tmp_path / "here", sidecar=False):
        assert holdfast.crash.capture().parent == tmp_path / "here"
        assert holdfast.crash.capture(to=tmp_path / "there").parent == tmp_path / "there"
    assert holdfast.crash.capture().parent == tmp_path / "dumps"


def test_memory_that_has_run_out(tmp_path):
    body = (
        "import resource\n"
        "keep = []\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (150 << 20), resource.RLIM_INFINITY))\n"
        "def fill():\n"
        "    size = 1 << 26\n"
        "    while size > 1000:\n"
        "        try:\n"
        "            while True:\n"
        "                keep.append(bytearray(size))\n"
        "        except MemoryError:\n"
        "            size //= 8\n"
        "    while True:\n"
        "        keep.append(bytearray(1000))\n"
        "fill()\n"
    )
    ended = run(tmp_path, body)
    assert ended.code == 1
    assert ended.own_err.rstrip().endswith("MemoryError")
    with ended.dump() as dump:
        assert dump.exceptions[0].type_name == "MemoryError"
        assert dump.threads[0].frames[-1].function == "fill"


def test_a_second_failure_while_dumping_is_survived(tmp_path):
    body = (
        "def worse(*a, **k):\n    raise RuntimeError('while dumping')\n"
        "if hooks is not None:\n    import holdfast.crash.inside\n    holdfast.crash.inside.capture = worse\n"
        "raise ValueError('first')\n"
    )
    ended = alike(tmp_path, body)
    assert ended.paths == []
    assert f"{MARK}no dump could be written: RuntimeError: while dumping\n" in ended.err


def test_a_folder_that_cannot_be_made_costs_only_the_dump(tmp_path):
    (tmp_path / "dumps").write_text("a file")
    ended = alike(tmp_path, "raise ValueError('first')\n")
    assert ended.code == 1
    assert "no dump could be written: holdfast.errors.DumpFailed" in ended.err


def test_silence_can_be_asked_for(tmp_path):
    ended = run(tmp_path, "raise ValueError('x')\n", "sidecar=False, say=False")
    assert len(ended.paths) == 1
    assert MARK not in ended.err


def test_a_pool_that_dies_at_one_line_does_not_fill_the_disk(tmp_path):
    body = (
        "import threading\n"
        "for n in range(6):\n"
        "    t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\n"
        "raise ValueError('the end')\n"
    )
    ended = run(tmp_path, body)
    assert len(ended.paths) == 4  # three alike, and the one that ends the process


def test_a_forked_child_dumps_for_itself(tmp_path):
    body = (
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    raise ValueError('child')\n"
        "_, status = os.waitpid(pid, 0)\n"
        "print(os.waitstatus_to_exitcode(status))\n"
        "raise KeyError('parent')\n"
    )
    ended = alike(tmp_path, body, "")
    found = {}
    for path in ended.paths:
        with open_dump(path) as dump:
            found[dump.exceptions[0].type_name] = dump.head["pid"]
    assert sorted(found) == ["KeyError", "ValueError"]
    assert found["KeyError"] != found["ValueError"]
    assert len(ended.paths) == 2  # the sidecar saw the parent end by itself, and does not speak for the child


def test_everything_is_put_back(tmp_path):
    import asyncio
    import logging

    others = set(threading.enumerate())  # one of an earlier test may end meanwhile

    def state():
        loop = asyncio.BaseEventLoop.__dict__
        return {
            "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
            "finders": list(sys.meta_path),
            "loop": (loop["run_until_complete"], loop["call_exception_handler"]),
            "runner": asyncio.Runner.__dict__["run"],
            "group": asyncio.TaskGroup.__dict__["_on_task_done"],
            "records": logging.getLogRecordFactory(),
            "threads": set(threading.enumerate()) - others,
        }

    before = state()
    first = holdfast.crash.install(to=tmp_path, sidecar=False)
    changed = state()
    assert [name for name in before if before[name] == changed[name]] == []
    with holdfast.crash.install(to=tmp_path / "elsewhere", sidecar=False) as second:
        assert second.folder == first.folder == tmp_path / "elsewhere"
    assert state() == changed  # the first is still there
    first.remove()
    first.remove()
    for thread in changed["threads"]:
        thread.join(180)  # on a busy machine it may take longer to leave than it is waited for
    assert state() == before
    with pytest.raises(BadOption, match="were removed"):
        first.beat()


def test_a_hook_that_came_later_stays(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    before = sys.excepthook
    installed = holdfast.crash.install(to=tmp_path, sidecar=False)
    ours = sys.excepthook
    sys.excepthook = theirs = lambda kind, error, trace: ours(kind, error, trace.tb_next or trace)
    try:
        installed.remove()
        assert sys.excepthook is theirs
        try:
            raise ValueError("said by whoever was there before")
        except ValueError as error:
            theirs(type(error), error, error.__traceback__)
    finally:
        sys.excepthook = before
    assert "said by whoever" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.hfdump"))


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(BadOption, match="hang_s"):
        holdfast.crash.install(to=tmp_path, hang_s=0)


def test_asyncio_is_not_loaded_before_the_program_does(tmp_path):
    ended = run(tmp_path, "import sys\nprint('asyncio' in sys.modules)\nimport asyncio\n"
                "print(asyncio.Runner.run.__wrapped__ is not None, asyncio.__spec__.name)\n")  # fmt: skip
    assert ended.out == "False\nTrue asyncio\n", ended.err


def test_threads_tasks_and_groups_together(tmp_path):
    body = (
        "import asyncio, threading\n"
        "t = threading.Thread(target=lambda: 1 / 0, name='worker'); t.start(); t.join()\n"
        "async def other():\n    value = 'still here'\n    await asyncio.sleep(3600)\n"
        "async def bad():\n    await asyncio.sleep(0)\n    raise ValueError('task')\n"
        "async def main():\n"
        "    alone = asyncio.create_task(other(), name='alone')\n"
        "    async with asyncio.TaskGroup() as group:\n"
        "        group.create_task(other(), name='sibling')\n"
        "        group.create_task(bad(), name='bad')\n"
        "asyncio.run(main())\n"
    )
    ended = alike(tmp_path, body)
    found = {}
    for path in ended.paths:
        with open_dump(path) as dump:
            assert dump.head["python"].startswith(platform.python_version())
            found[dump.exceptions[0].type_name] = {task.name for task in dump.tasks}
    assert found["ExceptionGroup"] >= {"alone", "sibling", "bad"}
    assert "alone" in found["ExceptionGroup"]
    assert "ZeroDivisionError" in found


def test_the_log_and_the_locks_are_in_the_dump(tmp_path):
    body = (
        "import logging, threading\n"
        "logging.warning('about to %s', 'fail')\n"
        "lock = threading.Lock(); lock.acquire()\n"
        "threading.Thread(target=lock.acquire, daemon=True).start()\n"
        "raise ValueError('x')\n"
    )
    with run(tmp_path, body).dump() as dump:
        assert dump.logs[-1]["text"] == "about to fail"
        assert "waiting" in dump.extras(kinds.LOCKS)
