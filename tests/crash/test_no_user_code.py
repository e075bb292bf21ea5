"""Capture runs no code of the program, and finds its values all the same."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from holdfast.crash import capture, open_dump
from holdfast.crash.display import text_of
from tests.crash import torture
from tests.crash.processes import descriptors

ROOT = Path(__file__).resolve().parent.parent.parent


def all_text(dump):
    found = []
    for thread in dump.threads:
        for frame in thread.frames:
            found += [f"{name}={text_of(dump, value, width=2000)}" for name, value in frame.locals]
    for inert in dump.objects():
        found.append(f"{inert.type_name} {inert.text!r}")
        found += [f"{way}={value!r}" for way, value in inert.children()]
    return "\n".join(found)


def test_nothing_of_the_torture_module_runs_and_its_values_are_there(tmp_path):
    things = torture.make()
    try:
        torture.fail(things)
    except BaseException as error:
        path = capture("torture", error=error, to=tmp_path)
    assert torture.ran == []
    with open_dump(path) as dump:
        text = all_text(dump)
        for canary in (
            "normal",
            "meta",
            "slot",
            "dict",
            "list",
            "tuple",
            "set",
            "frozenset",
            "str",
            "bytes",
            "bytearray",
        ):
            assert f"{canary} canary" in text, canary
        assert "deque canary" in text
        assert "ordered canary" in text
        assert "12345678" in text
        assert "1234.5678" in text
        assert "RED" in text
        assert dump.exceptions[0].message == "odd canary"
        assert dump.exceptions[0].own_str
        assert dump.exceptions[0].type_name.endswith("Odd")
    assert torture.ran == []


def test_a_class_body_with_a_namespace_of_its_own_is_not_asked(tmp_path):
    ran = []

    class Space(dict):
        def __setitem__(self, key, value):
            dict.__setitem__(self, key, value)
            ran.append(key)

        def __getitem__(self, key):
            ran.append(key)
            return dict.__getitem__(self, key)

        def __delitem__(self, key):
            ran.append(key)

    class Meta(type):
        @classmethod
        def __prepare__(cls, name, bases):
            return Space()

    def build():
        class Half(metaclass=Meta):
            canary = "in the class body"

            def method(self):
                return super().__init__()

            ran.clear()
            raise ValueError("half built")

    try:
        build()
    except ValueError as error:
        before = list(ran)
        path = capture(error=error, to=tmp_path)
        assert ran == before
    with open_dump(path) as dump:
        assert dump.exceptions[0].message == "half built"


def test_the_collector_does_not_run_and_is_put_back(tmp_path):
    enabled = []
    gc.callbacks.append(lambda phase, info: enabled.append(gc.isenabled()))
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        capture(to=tmp_path)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()
    assert enabled  # before and after
    assert all(enabled)  # never while a dump was taken, when it is off
    assert gc.isenabled()


def test_the_process_is_as_it_was(tmp_path):
    state = {"a": [1, 2, {"b": {3, 4}}]}
    copy = {"a": [1, 2, {"b": {3, 4}}]}
    settings = (sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled(), sys.excepthook)
    threads = set(threading.enumerate())
    opened = descriptors()
    holder = [object()]
    references = sys.getrefcount(holder[0])
    capture(to=tmp_path)
    after = sys.getrefcount(holder[0])
    assert state == copy
    assert after == references
    assert settings == (
        sys.getrecursionlimit(),
        sys.getswitchinterval(),
        gc.get_threshold(),
        gc.isenabled(),
        sys.excepthook,
    )
    assert set(threading.enumerate()) - threads == set()  # one of an earlier test may end meanwhile
    assert descriptors() - opened == set()


def test_the_program_dies_as_it_would_have(tmp_path):
    program = textwrap.dedent("""
        import sys
        def main():
            number_of_ends = 41
            raise ValueError("the end")
        if len(sys.argv) > 1:
            import holdfast.crash
            def hook(kind, error, traceback):
                limits = holdfast.crash.Limits(deadline_s=600)
                holdfast.crash.capture("died", error=error, to=sys.argv[1], limits=limits)
                sys.__excepthook__(kind, error, traceback)
            sys.excepthook = hook
        main()
    """)
    file = tmp_path / "program.py"
    file.write_text(program)
    plain = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False, cwd=ROOT)
    dumped = subprocess.run(
        [sys.executable, file, tmp_path / "d"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (dumped.returncode, dumped.stdout, dumped.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    (path,) = (tmp_path / "d").iterdir()
    with open_dump(path) as dump:
        assert dump.exceptions[0].message == "the end"
        frame = dump.threads[0].frames[-1]
        assert (frame.function, frame.mine) == ("main", True)
        assert dict(frame.locals)["number_of_ends"] == 41
        assert dump.sources[frame.file].line(frame.line).strip() == 'raise ValueError("the end")'


@pytest.mark.parametrize("hostile", ["__name__", "_name", "daemon"])
def test_a_thread_class_with_properties_is_not_asked(tmp_path, hostile):
    ran = []

    class Odd(threading.Thread):
        def run(self):
            started.set()
            ended.wait()

        @property
        def daemon(self):
            ran.append("daemon")
            return False

        @property
        def name(self):
            ran.append("name")
            return "x"

        def __repr__(self):
            ran.append("repr")
            return ""

    started, ended = threading.Event(), threading.Event()
    thread = Odd()
    thread.start()
    started.wait()
    ran.clear()
    try:
        path = capture(to=tmp_path)
        assert ran == []
    finally:
        ended.set()
        thread.join()
    with open_dump(path) as dump:
        assert any(frame.function.endswith("Odd.run") for thread in dump.threads for frame in thread.frames)


def test_tasks_with_hostile_classes_are_not_asked(tmp_path):
    ran = []

    class Odd(asyncio.Task):
        def get_name(self):
            ran.append("get_name")

        def done(self):
            ran.append("done")

        def __repr__(self):
            ran.append("repr")
            return ""

    async def inner(number):
        canary = f"waits {number}"
        await asyncio.sleep(100)
        return canary

    async def main():
        loop = asyncio.get_running_loop()
        tasks = [Odd(inner(number), loop=loop, name=f"odd-{number}") for number in range(3)]
        await asyncio.sleep(0)
        ran.clear()
        path = capture(to=tmp_path)
        assert ran == []
        for task in tasks:
            task.cancel()
        return path

    with open_dump(asyncio.run(main())) as dump:
        found = {task.name: task for task in dump.tasks}
        assert {"odd-0", "odd-1", "odd-2"} <= set(found)
        frames = found["odd-1"].frames
        assert frames[0].function.endswith("inner")
        assert frames[-1].function == "sleep"
        assert dict(frames[0].locals)["canary"] == "waits 1"
        assert found["odd-1"].state == "waiting"
        assert any(task.state == "running" for task in dump.tasks)
