"""Who waits for whom: found by looking, with nothing wrapped, and without running anything of the program."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from holdfast.crash import capture, deadlocks, kinds, open_dump

LIMIT_S = 180


class Desk:
    """Locks where programs keep them: in attributes, lists, dicts, closures, globals."""

    def __init__(self):
        self.one = threading.Lock()
        self.two = threading.Lock()
        self.several = [threading.Lock(), threading.Lock()]
        self.named = {"a": threading.Lock(), "b": threading.Lock()}

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for")


GLOBAL_ONE, GLOBAL_TWO = threading.Lock(), threading.Lock()


def until(true):
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@contextmanager
def standing(*functions, locks):
    """Threads that get stuck with each other; at the end the locks are taken away from under them."""
    threads = [threading.Thread(target=function, name=function.__name__, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        end = time.monotonic() + LIMIT_S
        while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
            for lock in locks:
                try:
                    lock.release()
                except RuntimeError:
                    time.sleep(0.001)
            for thread in threads:
                thread.join(0.01)


def cycle():
    """The cycle, once it is there."""
    found = []
    until(lambda: bool(found.extend(deadlocks.find_cycles()) or found))
    return found[0]


def forgiving(function):
    """A thread whose lock was released by somebody else fails at its end, which is no matter here."""

    def wrapper():
        with suppress(RuntimeError):
            function()

    wrapper.__name__ = function.__name__
    return wrapper


def pairs():
    desk = Desk()
    local_one, local_two = threading.Lock(), threading.Lock()
    gate = threading.Barrier(2)

    def attributes():
        def first():
            with desk.one:
                gate.wait()
                with desk.two:
                    pass

        def second():
            with desk.two:
                gate.wait()
                with desk.one:
                    pass

        return first, second, (desk.one, desk.two)

    def items():
        def first():
            with desk.several[0]:
                gate.wait()
                with desk.named["b"]:
                    pass

        def second():
            with desk.named["b"]:
                gate.wait()
                try:
                    for index in (0,):
                        with desk.several[index]:
                            pass
                finally:
                    pass

        return first, second, (desk.several[0], desk.named["b"])

    def closures_and_globals():
        def first():
            with local_one, GLOBAL_ONE:
                gate.wait()
                with local_two:
                    pass

        def second():
            with GLOBAL_TWO, local_two:
                gate.wait()
                local_one.acquire()

        return first, second, (local_one, local_two)

    return [attributes, items, closures_and_globals]


@pytest.mark.parametrize("number", range(3))
def test_two_threads_and_two_locks(number):
    first, second, locks = pairs()[number]()
    with standing(forgiving(first), forgiving(second), locks=(*locks, GLOBAL_ONE, GLOBAL_TWO)):
        found = cycle()
        assert found.kind == "threads"
        assert found.sure
        assert len(found.threads) == 2
        text = "\n".join(found.text)
        assert "waits for a lock held by" in text
        assert __file__ in text
        assert "first" in text
        assert "second" in text
    assert deadlocks.find_cycles() == []


def test_locks_that_know_their_owner_conditions_and_three_threads():
    one, two, three = threading.RLock(), threading.Condition(), threading.Lock()
    gate = threading.Barrier(3)

    def ring(mine, following):
        def run():
            with mine:
                gate.wait()
                with following:
                    pass

        return forgiving(run)

    for mine, following in ((one, two), (two, three), (three, one)):
        threading.Thread(target=ring(mine, following), daemon=True).start()
    found = cycle()
    assert len(found.threads) == 3
    assert "RLock" in "".join(found.text)
    three.release()  # one link is enough
    until(lambda: deadlocks.find_cycles() == [])


def test_acquire_without_with_is_likely_and_said_to_be():
    one, two = threading.Lock(), threading.Lock()
    gate = threading.Barrier(2)

    def first():
        one.acquire()
        gate.wait()
        two.acquire()

    def second():
        two.acquire()
        gate.wait()
        one.acquire()

    with standing(first, second, locks=(one, two)):
        found = cycle()
        assert not found.sure
        assert "probably held by" in "".join(found.text)


def test_a_lock_that_was_released_again_is_not_held():
    one, two = threading.Lock(), threading.Lock()
    gate = threading.Barrier(2)
    two_taken = threading.Event()

    def first():
        one.acquire()
        one.release()
        with two:
            two_taken.set()
            gate.wait()
            one.acquire()

    def second():
        two_taken.wait()
        with one:
            gate.wait()
            threading.Event().wait(0.5)

    with standing(forgiving(first), forgiving(second), locks=(one,)):
        until(two_taken.is_set)
        for _ in range(10):
            assert deadlocks.find_cycles() == []
            time.sleep(0.01)


def test_a_thread_that_waits_for_the_end_of_one_that_waits_for_its_lock():
    lock = threading.Lock()
    started = threading.Event()

    def child():
        started.wait()
        with lock:
            pass

    def parent():
        inner = threading.Thread(target=child, name="child", daemon=True)
        inner.start()
        with lock:
            started.set()
            inner.join()

    with standing(forgiving(parent), locks=(lock,)):
        text = "\n".join(cycle().text)
        assert "waits for the end of thread child" in text


def test_waiting_with_a_limit_is_no_deadlock():
    one, two = threading.Lock(), threading.Lock()
    gate = threading.Barrier(2)

    def run(mine, other):
        def inner():
            with mine:
                gate.wait()
                if other.acquire(timeout=1):
                    other.release()

        return inner

    threads = [threading.Thread(target=run(a, b), daemon=True) for a, b in ((one, two), (two, one))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert deadlocks.find_cycles() == []
        time.sleep(0.01)


async def _stuck(names):
    found = deadlocks.find_cycles()
    return [cycle for cycle in found if cycle.kind == "tasks" and any(name in "".join(cycle.text) for name in names)]


def test_tasks_that_await_each_other():
    async def main():
        tasks = {}
        way_out = asyncio.get_running_loop().create_future()

        async def wait_for(name):
            await asyncio.sleep(0)
            await tasks[name]

        async def gather():
            await asyncio.sleep(0)
            await asyncio.gather(tasks["one"], way_out)

        tasks["one"] = asyncio.create_task(wait_for("two"), name="one")
        tasks["two"] = asyncio.create_task(wait_for("three"), name="two")
        tasks["three"] = asyncio.create_task(gather(), name="three")
        for _ in range(5):
            await asyncio.sleep(0)
        found = await _stuck(tasks)
        way_out.set_exception(ValueError("out"))  # cancelling one of them would go round in circles, too
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return found

    (found,) = asyncio.run(main())
    assert len(found.members) == 3
    assert any("waits for task" in line for line in found.text)


def test_tasks_and_locks():
    async def main():
        one, two = asyncio.Lock(), asyncio.Lock()

        async def take(mine, other):
            async with mine:
                await asyncio.sleep(0)
                async with other:
                    pass

        tasks = [
            asyncio.create_task(take(one, two), name="first"),
            asyncio.create_task(take(two, one), name="second"),
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        found = await _stuck({"first", "second"})
        for task in tasks:
            task.cancel()
        return found

    (found,) = asyncio.run(main())
    assert found.sure
    assert all("waits for an asyncio.Lock held by" in line for line in found.text)


def test_the_dump_shows_who_waits(tmp_path):
    first, second, locks = pairs()[0]()
    with standing(forgiving(first), forgiving(second), locks=locks):
        cycle()
        with open_dump(capture("stuck", to=tmp_path)) as dump:
            data = dump.extras(kinds.LOCKS)["waiting"]
    assert [found["kind"] for found in data["cycles"]] == ["threads"]
    assert data["problems"][0].startswith("deadlock: ")
    assert {wait["who"] for wait in data["waits"]} >= {"first", "second"}


def instruction(offset, opname, argval=None, argrepr=""):
    return SimpleNamespace(offset=offset, opname=opname, argval=argval, argrepr=argrepr, positions=None)


def test_instructions_of_python_3_14_are_read_as_those_before():
    """`with desk.locks[0], other:`, as 3.14 compiles it."""
    new = [
        instruction(0, "LOAD_FAST_BORROW", "desk"), instruction(2, "LOAD_ATTR", "locks"),
        instruction(4, "LOAD_SMALL_INT", 0), instruction(6, "BINARY_OP", 26, "[]"),
        instruction(8, "COPY", 1), instruction(10, "LOAD_SPECIAL", 1, "__exit__"), instruction(12, "SWAP", 2),
        instruction(14, "SWAP", 3), instruction(16, "LOAD_SPECIAL", 0, "__enter__"), instruction(18, "CALL", 0),
        instruction(20, "POP_TOP"), instruction(22, "LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("a", "b")),
    ]  # fmt: skip
    read = [(step.offset, step.name, step.value) for step in deadlocks._plain_steps(new, 1)]
    assert read == [
        (0, "LOAD_FAST", "desk"), (2, "LOAD_ATTR", "locks"), (4, "LOAD_CONST", 0), (6, "BINARY_SUBSCR", None),
        (18, "BEFORE_WITH", None), (20, "POP_TOP", None), (22, "LOAD_FAST", "a"), (22, "LOAD_FAST", "b"),
    ]  # fmt: skip


def test_a_version_whose_instructions_nobody_has_looked_at_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(deadlocks, "KNOWN", False)
    held = threading.Lock()
    held.acquire()
    with standing(held.acquire, locks=[held]), open_dump(capture(to=tmp_path)) as dump:
        assert any("not known on Python" in text for text in dump.extras(kinds.LOCKS)["waiting"]["problems"])
