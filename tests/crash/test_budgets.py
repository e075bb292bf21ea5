"""Whatever the program holds, a dump is written within its deadline and its size, the most valuable parts whole."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from holdfast.crash import Limits, add_part, capture, kinds, open_dump
from holdfast.crash.records import Missing, Ref
from holdfast.errors import BadOption
from tests.conftest import SOAK
from tests.crash.processes import python

SLACK_S = 120.0  # a busy machine; what is looked for are captures that run away


def dumped(tmp_path, error=None, **limits):
    limits = Limits(**limits)
    began = time.monotonic()
    path = capture("budget", error=error, to=tmp_path, limits=limits)
    took = time.monotonic() - began
    assert took < limits.deadline_s + SLACK_S
    assert path.stat().st_size <= limits.file_bytes + 100_000
    return open_dump(path)


class Thing:
    def __init__(self, number):
        self.number = number
        self.name = f"thing {number}"


@pytest.mark.slow
def test_a_million_objects(tmp_path, rounds):
    def fail():
        small = {"budget": 41}
        things = [Thing(number) for number in range(1_000_000)]
        raise ValueError(f"{len(things)} things, {small}")

    try:
        fail()
    except ValueError as caught:
        error = caught
        with dumped(tmp_path, error, objects=rounds(100_000, 600_000)) as dump:
            frame = dump.threads[0].frames[-1]
            assert dump.local(frame, "small['budget']") == 41
            things = dump.object(dump.local(frame, "things"))
            assert things.total == 1_000_000
            assert dump.local(frame, "things[0].name") == "thing 0"
            assert {"process and machine", "modules"} <= {part.name for part in dump.parts if part.state == "whole"}


def test_a_two_gigabyte_array(tmp_path):
    def fail():
        weights = np.zeros((1024, 1024, 256), dtype=np.float64)
        view = weights[:2]
        label = np.array(["a", "b"])
        raise ValueError(weights.shape, view.shape, label.shape)

    try:
        fail()
    except ValueError as error:
        with dumped(tmp_path, error) as dump:
            frame = dump.threads[0].frames[-1]
            weights = dump.object(dump.local(frame, "weights"))
            assert weights.details == {"dtype": "<f8", "shape": [1024, 1024, 256], "bytes": 2 << 30}
            assert weights.items[:2] == (0.0, 0.0)
            assert dump.object(dump.local(frame, "view")).details["shape"] == [2, 1024, 256]
            assert dump.local(frame, "label[1]") == "b"


def test_an_array_over_foreign_memory_is_not_read(tmp_path):
    mapped = np.frombuffer(bytearray(b"canary in foreign memory"), dtype=np.uint8)
    subclass = np.zeros(4).view(type("Mine", (np.ndarray,), {"__array_finalize__": lambda self, other: None}))
    path = capture(to=tmp_path)
    with open_dump(path) as dump:
        frame = next(
            f for f in dump.threads[0].frames if f.function == test_an_array_over_foreign_memory_is_not_read.__name__
        )
        assert dump.object(dump.local(frame, "mapped")).items == ()
        assert dump.object(dump.local(frame, "subclass")).type_name.endswith("Mine")
    del mapped, subclass


def test_recursion_a_hundred_thousand_deep(tmp_path):
    def down(level):
        mine = f"level {level}"
        if level == 0:
            raise RecursionError(mine)
        down(level - 1)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200_000)
    try:
        down(100_000)
    except RecursionError as error:
        caught = error
    finally:
        sys.setrecursionlimit(limit)
    with dumped(tmp_path, caught) as dump:
        thread = dump.threads[0]
        assert thread.left_out > 99_000
        assert dict(thread.frames[-1].locals)["mine"] == "level 0"
        assert sum(frame.gap for frame in thread.frames) == thread.left_out


def test_values_nested_a_hundred_thousand_deep(tmp_path):
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    path = capture(to=tmp_path)
    while nested:  # taken apart by hand: freeing it at once would be as deep
        nested = nested.pop()
    with open_dump(path) as dump:
        assert any("nested too deeply" in line for line in dump.missing)


def test_many_threads(tmp_path):
    ended, inside = threading.Event(), threading.Semaphore(0)

    def wait(number):
        mine = f"thread {number}"
        inside.release()
        ended.wait()
        return mine

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(400)]
    for thread in threads:
        thread.start()
    for _ in threads:
        inside.acquire()
    try:
        with dumped(tmp_path, deadline_s=600) as dump:
            assert len(dump.threads) >= 401
            found = {dict(frame.locals).get("mine") for thread in dump.threads for frame in thread.frames}
            assert {f"thread {number}" for number in range(400)} <= found
        with dumped(tmp_path, threads=50) as dump:
            assert any("more threads" in line for line in dump.missing)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


MANY_THREADS = """
import sys, threading, time
from holdfast.crash import Limits, capture, open_dump

threads, deep, deadline_s = map(int, sys.argv[1:4])
threading.stack_size(128 * 1024)
gate = threading.Lock()
gate.acquire()

def down(level, number):
    mine = f"thread {number} level {level}"
    if level:
        return down(level - 1, number)
    with gate:
        return mine

started = 0
try:
    while started < threads:
        threading.Thread(target=down, args=(deep, started), daemon=True).start()
        started += 1
except RuntimeError:  # as many as the machine allows
    pass

def fail():
    budget = {"left": 41}
    raise ValueError("many threads")

try:
    fail()
except ValueError as error:
    began = time.monotonic()
    path = capture(error=error, to=sys.argv[4], limits=Limits(deadline_s=deadline_s))
    print(started, time.monotonic() - began, path, flush=True)
gate.release()
"""


def test_ten_thousand_threads_worth_of_frames(tmp_path, rounds):
    """Threads with 14 frames each; fewer threads with deeper stacks where time is short."""
    count = rounds(1_000, 10_000)
    deep = rounds(3_000, 10_000) * 14 // count - 4
    program = tmp_path / "program.py"
    program.write_text(MANY_THREADS)
    limits = Limits(deadline_s=5 if SOAK else 30)  # beside other tests, a machine may be slow
    done = python(program, str(count), str(deep), str(int(limits.deadline_s)), str(tmp_path / "d"))
    assert done.returncode == 0, done.stderr
    started, took, path = done.stdout.split()
    assert int(started) >= min(count, 1_000)
    assert float(took) < limits.deadline_s + SLACK_S
    with open_dump(path) as dump:
        assert dump.path.stat().st_size <= limits.file_bytes
        assert dump.exceptions[0].message == "many threads"
        failing = dump.threads[0]
        assert failing.failing
        assert dump.local(failing.frames[-1], "budget['left']") == 41
        assert dump.complete
        assert all(part.reason for part in dump.parts if part.state != "whole")


def test_a_tiny_file_keeps_what_matters(tmp_path):
    def fail():
        things = [Thing(number) for number in range(20_000)]
        raise ValueError(len(things))

    try:
        fail()
    except ValueError as error:
        with dumped(tmp_path, error, deadline_s=600, file_bytes=60_000) as dump:
            assert dump.exceptions[0].message == "20000"
            assert dump.threads[0].frames[-1].function.endswith("fail")
            assert any("no room" in line or "budget" in line for line in dump.missing)


def test_no_time_at_all_still_gives_a_dump(tmp_path):
    try:
        raise ValueError("quick")
    except ValueError as error:
        with dumped(tmp_path, error, deadline_s=0.001) as dump:
            assert dump.head["why"] == "budget"
            assert any("out of time" in line for line in dump.missing)


def test_every_cut_has_a_reason(tmp_path):
    things = [Thing(number) for number in range(5_000)]
    with dumped(tmp_path, deadline_s=600, objects=50, text_chars=100) as dump:
        gone = [value for inert in dump.objects() for _way, value in inert.children() if isinstance(value, Missing)]
        assert gone
        assert all(value.reason for value in gone)
    del things


def test_shared_and_circular_values_are_one_object(tmp_path):
    shared = ["shared"]
    first, second = {"to": shared}, {"to": shared}
    first["me"] = first
    path = capture(to=tmp_path)
    with open_dump(path) as dump:
        frame = next(f for f in dump.threads[0].frames if "test_shared" in f.function)
        assert dump.local(frame, "first['to']") == dump.local(frame, "second['to']") == dump.local(frame, "shared")
        assert dump.local(frame, "first['me']['me']") == dump.local(frame, "first")
        assert isinstance(dump.local(frame, "first"), Ref)
    del second


def test_a_part_of_another_room_that_hangs_or_fails_costs_only_itself(tmp_path):
    ended = threading.Event()

    def hang():
        ended.wait(180)

    def fail():
        raise RuntimeError("no")

    removers = [add_part(kinds.AGENT, "good", lambda: {"agent": "trip-7"}), add_part(kinds.LOCKS, "hangs", hang),
                add_part(kinds.NOTE, "fails", fail)]  # fmt: skip
    try:
        with dumped(tmp_path, deadline_s=600, part_s=2) as dump:
            assert dump.extras(kinds.AGENT) == {"good": {"agent": "trip-7"}}
            missing = "\n".join(dump.missing)
            assert "locks and waiting: no answer in 2 s" in missing
            assert "notes: RuntimeError while it was collected" in missing
            assert dump.complete
    finally:
        ended.set()
        for remove in removers:
            remove()


def test_limits_must_make_sense():
    with pytest.raises(BadOption):
        Limits(deadline_s=0)
