"""Safe points of a plain loop: what a policy saves there, what it never saves, phases, atomic blocks and gates."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import holdfast
from holdfast import When, errors
from holdfast.agent import points
from holdfast.agent.branch import BranchWriter
from tests import warm
from tests.conftest import unsaved
from tests.lives import killed


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch):
    """The clock by which policies go, in seconds."""

    class Clock:
        now_s = 1000.0

        def __call__(self):
            return self.now_s

    made = Clock()
    monkeypatch.setattr(points, "monotonic", made)
    return made


def triggers(agent):
    """Of all checkpoints of the branch, oldest first."""
    return [checkpoint.trigger for checkpoint in agent.log()][::-1]


def fail(agent, name, error, **changes):
    """A phase that changes something and fails."""
    with agent.phase(name):
        agent.state.update(changes)
        raise error


# -- when it saves ---------------------------------------------------------------------------------------------


def test_a_policy_saves_at_steps_and_only_what_has_changed(store):
    agent = store.agent("trip-7", when=When(every_steps=2))
    for number in range(4):
        agent.state["n"] = number
        made = agent.step()
        assert (made is not None) == (number % 2 == 1)
    assert [agent.step() for _ in range(6)] == [None] * 6
    assert triggers(agent) == ["steps", "steps"]
    assert agent.head.state == {"n": 3}


def test_steps_by_time_bytes_and_phases_are_told_apart(store, clock):
    agent = store.agent("trip-7", when=When(every_s=30, changed_bytes=5_000, at_phase=True))
    agent.state["n"] = 1
    assert agent.step() is None
    clock.now_s += 30
    assert agent.step().trigger == "time"
    agent.state["text"] = "x" * 10_000
    assert agent.step().trigger == "bytes"
    with agent.phase("plan"):
        agent.state["plan"] = ["fly"]
    assert (agent.head.trigger, agent.head.label) == ("phase", "plan")
    with agent.phase("nothing happened"):
        pass
    assert agent.head.label == "plan"
    assert agent.rollback("plan").label == "plan"


@pytest.mark.parametrize("asked", ["nothing", "dirty", "digest"])
def test_changed_bytes_are_those_that_a_checkpoint_would_write(store, asked):
    agent = store.agent("trip-7", when=When(changed_bytes=5_000))
    agent.state["log"] = []
    for number in range(20):  # the same place again and again is one change
        agent.state["answer"] = f"{number:04}" * 250
        getattr(agent, asked, None)
        assert agent.step() is None
    for number in range(9):
        agent.state["log"].append("y" * 1_000)
        getattr(agent, asked, None)
        assert (agent.step() is not None) == (number in {3, 8})
    agent.state["log"].append("y" * 4_000)
    assert agent.step() is None
    agent.rollback("~1")  # what was not saved is kept beside, and counts no more
    agent.state["log"].append("y" * 4_000)
    assert agent.step() is None
    agent.state["log"].append("y" * 4_000)
    assert agent.step() is not None


@unsaved
def test_a_step_that_counts_changed_bytes_does_not_cost_more_the_more_has_changed(store):
    agent = store.agent("trip-7", when=When(changed_bytes=1_000_000))
    agent.state["log"] = []

    def calls(of):
        found = 0

        def count(_frame, event, _argument):
            nonlocal found
            found += event == "call"

        for number in range(of):
            agent.state["log"].append(f"{number} " * 20)
            agent.state["n"] = number
            sys.setprofile(count if number >= of - 20 else None)
            agent.step()
            sys.setprofile(None)
        return found

    assert agent.step() is None
    few = calls(30)
    assert calls(800) < 2 * few


def test_without_a_policy_nothing_is_saved_by_itself(store):
    agent = store.agent("trip-7", when=None)

    def work():
        with agent:
            with agent.phase("plan"):
                agent.state["n"] = 1
            assert agent.step() is None

    with pytest.warns(errors.UnsavedChanges):
        work()
    assert agent.head is None
    assert agent.when is None


def test_the_default_follows_time_and_saves_at_the_end(store, clock):
    agent = store.agent("trip-7")
    assert agent.when == When(adaptive=True)
    with agent:
        agent.state["n"] = 1
        assert agent.step() is None
        clock.now_s += 700
        assert agent.step().trigger == "adaptive"
        agent.state["n"] = 2
    assert (agent.head.trigger, agent.head.state["n"]) == ("end", 2)
    with pytest.raises(ValueError, match="mine"), agent:
        fail(agent, "pay", ValueError("mine"), n=3)
    assert agent.head.state["n"] == 2  # an exception left it


def test_async_code_has_the_same_safe_points(store):
    agent = store.agent("trip-7", when=When(every_steps=1, at_phase=True))

    async def failing():
        async with agent.phase("pay"):
            agent.state["n"] = 3
            raise ValueError("no")

    async def work():
        async with agent:
            agent.state["n"] = 1
            assert (await agent.astep()).trigger == "steps"
            async with agent.phase("plan"):
                agent.state["n"] = 2
            assert agent.head.trigger == "phase"
            with pytest.raises(ValueError, match="no"):
                await failing()
            assert agent.head.trigger == "phase"
            agent.state["n"] = 4

    asyncio.run(work())
    assert (agent.head.trigger, agent.head.state) == ("end", {"n": 4})
    assert store.verify().ok


def test_a_step_where_nothing_is_due_costs_next_to_nothing(store):
    """Counted in calls, not in time: it makes none into the store or the state."""
    agent = store.agent("trip-7")
    agent.step()
    seen = set()

    def look(frame, event, argument):
        if event == "call":
            seen.add(frame.f_code.co_filename.rpartition("/holdfast/")[2])

    sys.setprofile(look)
    for _ in range(100):
        agent.step()
    sys.setprofile(None)
    ways = {"travel/handle.py", "run/points.py", "run/handle.py", "agent/points.py", "agent/schedule.py"}
    assert seen - {""} <= ways


@unsaved
def test_a_day_forward_and_back_on_the_clock_changes_labels_only(store_path, clock, monkeypatch):
    real, days = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + days[0] * 86_400 * 10**9)

    def worked(path, jumps):
        found = []
        for number in range(40):
            if number % 10 == 0:  # another process, which reads what the ones before have written
                store = holdfast.open(path)
                # Whatever a checkpoint costs here, the interval is the same.
                agent = store.agent("trip-7", when=When(adaptive=True, min_s=15, max_s=15.5))
            days[0] = jumps[number % len(jumps)]
            agent.state["n"] = number
            clock.now_s += 7
            agent.step()
            if number % 10 == 9:
                found = [(one.trigger, one.state["n"]) for one in agent.log()]
                assert store.verify().ok
                store.close()
        return found

    steady = worked(store_path, [0])
    assert len(steady) == 12
    assert worked(store_path.with_name("jumping"), [1, 0, -1, 0, 0]) == steady


@pytest.mark.parametrize("way", ["step", "astep", "checkpoint", "acheckpoint"])
def test_what_a_checkpoint_waits_for_before_it_begins_is_part_of_what_it_costs(store, way):
    agent = store.agent("trip-7", when=When(every_steps=1))
    agent.quiesce(pause=lambda: time.sleep(0.05), resume=lambda: None)
    for number in range(2):
        agent.state["n"] = number
        made = getattr(agent, way)()
        assert (asyncio.run(made) if way.startswith("a") else made) is not None
    assert store.costs("trip-7").recent[1].stall_s >= 0.05


def test_no_safe_point_for_a_long_time_is_said_once(store, clock, caplog):
    agent = store.agent("trip-7", when=When(every_s=10))
    agent.state["n"] = 1
    clock.now_s += 200
    with caplog.at_level(logging.WARNING):
        assert agent.step() is not None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "no safe point for 200 s" in said
    assert "test_points.py line" in said
    assert "agent.step()" in said
    clock.now_s += 200
    agent.state["n"] = 2
    agent.step()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("when", [When(every_s=10), None])
def test_a_program_without_any_safe_point_hears_of_it_with_what_that_lost(store, clock, when):
    """Its policy could save nothing; one that saves by hand has forgotten that, and nothing else."""
    agent = store.agent("trip-7", when=when)
    agent.state["n"] = 1
    clock.now_s += 200
    with pytest.warns(errors.UnsavedChanges) as said:
        agent.close()
    (one,) = said
    assert ("no safe point for 200 s: call agent.step()" in str(one.message)) == (when is not None)


# -- background ------------------------------------------------------------------------------------------------

TAKE_OVER = "import sys, holdfast; s = holdfast.open(sys.argv[1]); s.agent('trip-7', takeover=True); s.close()"


def test_in_the_background_the_order_is_kept_and_a_flush_makes_all_durable(store):
    agent = store.agent("trip-7", when=When(every_steps=1, background=True))
    agent.state["log"] = []
    for number in range(300):  # more than may wait
        agent.state["log"].append(number)
        agent.step()
    agent.flush()
    found = agent.log()
    assert [len(one.state["log"]) for one in found] == list(range(300, 0, -1))
    costs = store.costs("trip-7")
    assert costs.stall is not None
    assert costs.durable is not None


def test_in_the_background_a_state_that_is_again_what_it_was_is_saved(store):
    """Compared with what is on its way, not with what is written."""
    agent = store.agent("trip-7", when=When(every_steps=1, background=True))
    agent.state["n"] = 0
    agent.checkpoint()
    for number in (1, 0, 1, 0) * 10:
        agent.state["n"] = number
        assert agent.dirty
        assert agent.step() is not None
        assert not agent.dirty
    store.flush()
    assert agent.head.state["n"] == 0
    assert len(agent.log()) == 41


@pytest.mark.parametrize("next_call", ["flush", "step", "checkpoint"])
def test_an_error_in_the_background_is_raised_by_the_next_call(store, store_path, next_call):
    agent = store.agent("trip-7", when=When(every_steps=1, background=True))
    agent.state["n"] = 1
    agent.step()
    agent.flush()
    warm.run([sys.executable, "-c", TAKE_OVER, str(store_path)], check=True, timeout=180)

    def work():
        for number in range(1_000):  # the first is accepted: nobody has found out yet
            agent.state["n"] = number
            agent.step()
            getattr(agent, next_call)()

    with pytest.raises(errors.Fenced):
        work()


def test_a_flush_raises_what_went_wrong_in_the_background(store, store_path):
    agent = store.agent("trip-7", when=When(every_steps=1, background=True))
    agent.state["n"] = 1
    agent.step()
    agent.flush()
    warm.run([sys.executable, "-c", TAKE_OVER, str(store_path)], check=True, timeout=180)
    agent.state["n"] = 2
    assert agent.step() is not None  # accepted: nobody has found out yet
    with pytest.raises(errors.Fenced):
        agent.flush()


def test_an_intent_waits_for_everything_before_it(store, store_path):
    agent = store.agent("trip-7", when=When(every_steps=1, background=True))
    seen = []

    @holdfast.tool
    def book():
        looked = "import sys, holdfast; print(holdfast.open(sys.argv[1], readonly=True).agent('trip-7').state['n'])"
        words = [sys.executable, "-c", looked, str(store_path)]
        seen.append(int(warm.run(words, check=True, stdout=subprocess.PIPE, timeout=180).stdout))

    with agent:
        agent.state["n"] = 7
        agent.step()
        book()
    assert seen == [7]


def test_a_step_inside_a_tool_saves_nothing(store):
    agent = store.agent("trip-7", when=When(every_steps=1, at_phase=True))

    @holdfast.tool
    def book():
        agent.step()
        with agent.phase("inside"):
            pass
        return 1

    with agent:
        agent.state["n"] = 1
        agent.state["booking"] = book()
        assert agent.head is None
        agent.step()
    assert agent.head.state == {"n": 1, "booking": 1}


# -- blocks that are not saved in the middle ---------------------------------------------------------------------


def test_nothing_is_saved_in_the_middle_of_an_atomic_block(store):
    agent = store.agent("trip-7", when=When(every_steps=1))
    with agent.atomic():
        agent.state["first"] = 1
        with agent.atomic():
            assert agent.step() is None
        assert agent.step() is None
        with pytest.raises(errors.AtomicOpen, match="nothing was saved"):
            agent.checkpoint("half")
        with pytest.raises(errors.AtomicOpen):
            agent.branch("other")
        agent.state["second"] = 1
    assert agent.step().state == {"first": 1, "second": 1}
    assert len(agent.log()) == 1


@unsaved
def test_another_task_or_thread_saves_nothing_in_the_middle_either(store):
    agent = store.agent("trip-7", when=When(every_steps=1))
    steps = []

    async def one():
        with agent.atomic():
            agent.state["first"] = 1
            await asyncio.sleep(0.01)
            agent.state["second"] = 1
        assert (await agent.astep()) is not None

    async def other():
        for _ in range(3):
            steps.append(await agent.astep())
            with pytest.raises(errors.AtomicOpen):
                await agent.acheckpoint("half")
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(one(), other())

    asyncio.run(both())
    assert steps == [None] * 3
    with agent.atomic():
        agent.state["first"] = 2
        thread = threading.Thread(target=lambda: steps.append(agent.step()))
        thread.start()
        thread.join()
        agent.state["second"] = 2
    assert steps == [None] * 4
    assert {one.state["first"] == one.state["second"] for one in agent.log()} == {True}


def test_no_task_is_saved_by_another_between_its_write_and_its_own_safe_point(store_path):
    """Killed there, it would find its write known and its state without it, and write again."""
    made = []

    @holdfast.tool
    def book(flight):
        made.append(flight)
        return flight

    async def traveller(agent, written, goes_on):
        answer = await book.acall("TP539")
        written.set()
        await goes_on.wait()
        agent.state["booking"] = answer
        await agent.astep()

    async def other(agent, written, goes_on, dies):
        await written.wait()
        for n in range(3):
            agent.state["n"] = n
            await agent.astep()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        goes_on.set()

    async def life(agent, *, dies):
        written, goes_on = asyncio.Event(), asyncio.Event()
        async with agent:
            await asyncio.gather(traveller(agent, written, goes_on), other(agent, written, goes_on, dies))

    def live(*, dies):
        with holdfast.open(store_path) as store:
            agent = store.agent("trip-7", when=When(every_steps=1))
            asyncio.run(life(agent, dies=dies))
            assert agent.at().state == {"n": 2, "booking": "TP539"}

    killed(lambda: live(dies=True))
    live(dies=False)
    assert made == []  # the write of the process that died answers


def test_a_write_that_begins_while_another_task_is_saving_is_not_saved_without_its_answer(store, monkeypatch):
    agent = store.agent("trip-7", when=When(every_steps=1))
    captured, booked = threading.Event(), threading.Event()
    finish = BranchWriter.finish

    def slow(writer, pending):
        captured.set()
        booked.wait(60)
        return finish(writer, pending)

    @holdfast.tool
    def book():
        return "TP539"

    async def traveller(over):
        await asyncio.to_thread(captured.wait, 60)
        agent.state["booking"] = await call(over)
        assert (await agent.astep()) is not None

    async def call(over):
        monkeypatch.setattr(BranchWriter, "finish", finish)
        asyncio.get_running_loop().call_later(0.01, booked.set)  # its own records wait for the checkpoint
        answer = await book.acall()
        await over.wait()
        return answer

    async def other(over):
        agent.state["n"] = 1
        assert (await agent.astep()) is not None
        agent.state["n"] = 2
        assert (await agent.astep()) is None
        over.set()

    async def both():
        over = asyncio.Event()
        async with agent:
            await asyncio.gather(traveller(over), other(over))

    monkeypatch.setattr(BranchWriter, "finish", slow)
    asyncio.run(both())
    assert [one.state.get("booking") for one in agent.log()] == ["TP539", None]


def test_no_thread_is_saved_by_another_between_its_write_and_its_own_safe_point(store):
    agent = store.agent("trip-7", when=When(every_steps=1))
    written, saved = threading.Event(), threading.Event()

    @holdfast.tool
    def book():
        return "TP539"

    def traveller():
        with agent:
            answer = book()
            written.set()
            saved.wait(60)
            agent.state["booking"] = answer
            agent.step()

    agent.state["n"] = 1
    thread = threading.Thread(target=traveller)
    thread.start()
    written.wait(60)
    assert agent.step() is None
    saved.set()
    thread.join()
    assert agent.head.state == {"n": 1, "booking": "TP539"}
    agent.state["n"] = 2
    assert agent.step() is not None


@pytest.mark.parametrize("when", [When(every_steps=1), When(every_s=1), When(adaptive=True)])
def test_that_somebody_is_always_in_the_middle_of_something_is_said_once(store, clock, caplog, when):
    agent = store.agent("trip-7", when=when)

    @holdfast.tool
    async def book(number):
        return number

    async def worker(name, mine, others):
        for number in range(100):
            await mine.wait()
            mine.clear()
            agent.state[name] = await book.acall(number)
            clock.now_s += 2
            others.set()  # before its own safe point, the other one begins a write
            await asyncio.sleep(0)
            saved.append(await agent.astep())

    async def both():
        one, other = asyncio.Event(), asyncio.Event()
        one.set()
        async with agent:
            await asyncio.gather(worker("one", one, other), worker("other", other, one))

    saved = []
    asyncio.run(both())
    assert len(saved) == 200
    assert saved[:198] == [None] * 198, "the last two are alone"
    assert caplog.text.count("has not been saved for 60 s") == 1
    assert agent.head.state == {"one": 99, "other": 99}


def test_after_an_exception_in_an_atomic_block_nothing_is_saved_until_the_state_is_meant_again(store, caplog):
    agent = store.agent("trip-7", when=When(every_steps=1, at_phase=True))
    agent.checkpoint("before")

    def half():
        with pytest.raises(ValueError, match="half"), agent.phase("booking"), agent.atomic():
            fail(agent, "inner", ValueError("half"), first=1)

    half()
    assert "agent.atomic()" in caplog.text
    assert agent.step() is None
    assert [one.label for one in agent.log(all=True)] == ["before"]  # not beside the line, either
    with agent.atomic():
        agent.state["second"] = 1
    assert agent.step() is not None
    half()
    agent.checkpoint("I mean it")
    agent.state["third"] = 1
    assert agent.step() is not None
    half()
    agent.rollback("before")
    agent.state["fourth"] = 1
    assert agent.step() is not None
    with pytest.warns(errors.UnsavedChanges), agent:
        half()
    assert "first" not in agent.head.state


# -- phases that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [None, When(at_phase=True)])
def test_a_failing_phase_leaves_its_state_beside_the_line_and_the_last_good_one_at_the_head(store, store_path, when):
    agent = store.agent("trip-7", when=when)
    agent.state["plan"] = ["fly"]
    good = agent.checkpoint("good")
    with pytest.raises(TimeoutError):
        fail(agent, "pay", TimeoutError("the bank did not answer"), paid="half")
    assert agent.head == good
    (failing,) = agent.abandoned()
    assert (failing.label, failing.trigger, failing.validity) == ("pay failed", "phase failed", "suspect")
    assert failing.validity_reason == "TimeoutError: the bank did not answer"
    assert failing.state == {"plan": ["fly"], "paid": "half"}
    assert failing.parent_id == good.id
    assert agent.state == {"plan": ["fly"], "paid": "half"}  # what becomes of it is the program's business
    assert agent.dirty
    agent.state["paid"] = "whole"
    made = agent.checkpoint("paid")
    assert made.parent_id == good.id
    assert [change.where for change in made.changes()] == ["state.paid"]
    assert store.verify().ok
    store.close()
    with holdfast.open(store_path) as again:
        assert again.agent("trip-7").state == {"plan": ["fly"], "paid": "whole"}
        assert again.verify().ok


@unsaved
def test_a_program_that_fails_again_and_again_and_goes_on_is_saved_all_the_same(store, clock):
    agent = store.agent("trip-7", when=When(every_s=10))
    for number in range(30):
        clock.now_s += 3
        with pytest.raises(ValueError, match="no"):
            fail(agent, "pay", ValueError("no"), n=number)
        agent.step()
    assert triggers(agent).count("time") == 7


def test_an_error_that_leaves_several_phases_is_one_failure(store):
    agent = store.agent("trip-7")
    agent.checkpoint("good")
    with pytest.raises(ValueError, match="no"), agent, agent.phase("outer"):
        fail(agent, "inner", ValueError("no"), n=1)
    (failing,) = agent.abandoned()
    assert failing.label == "inner failed"
    agent.checkpoint()
    assert store.costs("trip-7").failures == 1


def test_going_back_after_a_failure_is_no_second_one(store):
    agent = store.agent("trip-7")
    agent.state["n"] = 1
    good = agent.checkpoint()
    with pytest.raises(ValueError, match="no"):
        fail(agent, "plan", ValueError("no"), n=2)
    agent.rollback(good)
    agent.state["n"] = 3
    agent.checkpoint()
    assert store.costs("trip-7").failures == 1
    agent.rollback(good)
    agent.state["n"] = 4
    agent.checkpoint()
    assert store.costs("trip-7").failures == 2


@unsaved
def test_an_error_that_says_nothing_about_the_state_leaves_nothing_behind(store):
    agent = store.agent("trip-7", when=When(at_phase=True))
    agent.checkpoint("good")
    for error in (KeyboardInterrupt, errors.StoreBusy("later"), asyncio.CancelledError):
        with pytest.raises((KeyboardInterrupt, errors.StoreBusy, asyncio.CancelledError)):
            fail(agent, "pay", error, n=str(error))
    assert agent.abandoned() == []


def test_a_phase_that_fails_before_anything_was_saved_has_no_good_state_to_stay_at(store):
    agent = store.agent("trip-7")
    with pytest.raises(ValueError, match="no"):
        fail(agent, "pay", ValueError("no"), n=1)
    assert agent.log(all=True) == []
    assert agent.checkpoint().state == {"n": 1}


# -- gates -----------------------------------------------------------------------------------------------------


def passes(state):
    return state["n"] > 0


@unsaved
def test_a_gate_saves_what_passes_and_nothing_else(store):
    agent = store.agent("trip-7", when=None)
    agent.state["n"] = 1
    made = agent.gate("validated", passes)
    assert (made.label, made.trigger, made.validity) == ("validated", "gate", "good")
    assert agent.gate("checked by asserts", lambda state: None).label == "checked by asserts"
    agent.state["n"] = -1
    with pytest.raises(errors.GateFailed, match="it returned False; nothing was saved") as caught:
        agent.gate("validated", passes)
    assert caught.value.gate == "validated"
    with pytest.raises(errors.GateFailed, match="it raised KeyError") as caught:
        agent.gate("validated", lambda state: state["lost"])
    assert isinstance(caught.value.__cause__, KeyError)
    assert agent.head.label == "checked by asserts"


@unsaved
def test_a_state_that_changes_while_it_is_checked_does_not_pass(store):
    agent = store.agent("trip-7")
    agent.state["n"] = 1

    def check(state):
        state["n"] += 1

    with pytest.raises(errors.GateFailed, match="changed while it was checked"):
        agent.gate("validated", check)
    assert agent.head is None


def test_an_async_check_that_hangs_is_given_up_in_the_same_words(store):
    agent = store.agent("trip-7", when=None)
    agent.checkpoint("good")

    async def hangs(_state):
        await asyncio.sleep(60)

    async def fails(_state):
        raise TimeoutError("no answer from the shop")

    with pytest.raises(errors.GateFailed, match=r"TimeoutError: the check of valid took longer than 0\.05 s"):
        asyncio.run(agent.agate("valid", hangs, limit_s=0.05))
    with pytest.raises(errors.GateFailed, match="TimeoutError: no answer from the shop"):
        asyncio.run(agent.agate("valid", fails))


def test_the_check_of_a_gate_that_hangs_is_given_up(store):
    agent = store.agent("trip-7")
    agent.state["n"] = 1
    leave = threading.Event()
    with pytest.raises(errors.GateFailed, match=r"took longer than 0\.05 s"):
        agent.gate("validated", lambda state: leave.wait(60), limit_s=0.05)
    leave.set()

    async def hangs(state):
        await asyncio.sleep(60)

    async def well(state):
        await asyncio.sleep(0)
        return state["n"] == 1

    async def work():
        with pytest.raises(errors.GateFailed):
            await agent.agate("validated", hangs, limit_s=0.05)
        return await agent.agate("validated", well)

    assert asyncio.run(work()).trigger == "gate"


def test_a_failed_gate_may_go_back_to_the_last_one_that_was_passed(store):
    agent = store.agent("trip-7", when=When(every_steps=1))
    agent.state["n"] = 1
    with pytest.raises(errors.GateFailed, match="nothing was saved") as caught:
        agent.gate("validated", lambda state: False, failing="rollback")
    assert "No gate was passed" in caught.value.hint
    good = agent.gate("validated", passes)
    agent.state["n"] = 5
    agent.step()
    agent.state["n"] = -1
    assert agent.gate("validated", passes, failing="rollback") is None
    assert agent.head == good
    assert agent.state == {"n": 1}
    assert not agent.dirty
    suspect = next(one for one in agent.log(all=True) if one.trigger == "gate failed")
    assert (suspect.state["n"], suspect.validity) == (-1, "suspect")
    assert suspect.validity_reason == "trip-7 did not pass the gate 'validated': it returned False"
    assert store.verify().ok


def test_a_failed_gate_stops_with_the_plan_where_something_was_done_outside(store):
    agent = store.agent("trip-7")
    undone = []

    @holdfast.tool(compensate=lambda effect: undone.append(effect.args))
    def book(what):
        return what

    with agent:
        agent.state["n"] = 1
        agent.gate("validated", passes)
        agent.state["n"] = -1
        agent.state["flight"] = book("flight")
        with pytest.raises(errors.GateFailed) as caught:
            agent.gate("validated", passes, failing="rollback")
        assert agent.state == {"n": -1, "flight": "flight"}
        assert undone == []
        assert [one.effect.tool for one in caught.value.plan.undo] == ["book"]
        caught.value.plan.apply()
        assert agent.state == {"n": 1}
    assert undone == [{"what": "flight"}]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"limit_s": 0}, "limit_s"),
        ({"limit_s": -1}, "limit_s"),
        ({"limit_s": float("inf")}, "limit_s"),
        ({"limit_s": 1e12}, "limit_s"),
        ({"failing": "ignore"}, "failing"),
    ],
)
def test_a_gate_with_odd_options_is_refused(store, options, word):
    agent = store.agent("trip-7")
    with pytest.raises(errors.BadOption, match=word):
        agent.gate("validated", passes, **options)
    with pytest.raises(errors.BadOption):
        agent.gate("", passes)
    with pytest.raises(errors.BadOption):
        agent.gate("validated", "passes")


# -- where a policy comes from ---------------------------------------------------------------------------------


def test_a_file_says_when_for_all_agents_and_for_some(store, store_path):
    (store_path / "holdfast.toml").write_text(
        '[when]\nevery_s = 30\n\n[when.agents."trip-*"]\nevery_steps = 5\nbackground = true\n\n'
        '[when.agents."trip-9"]\nat_phase = true\n\n[when.agents]\n"by-hand" = false\n'
    )
    assert store.agent("other").when == When(every_s=30)
    assert store.agent("trip-7").when == When(every_steps=5, background=True)
    assert store.agent("trip-9").when == When(at_phase=True)  # its own name comes before a pattern
    assert store.agent("by-hand").when is None
    assert store.agent("trip-8", when=When(every_s=1)).when == When(every_s=1)  # the program has the last word


def test_two_files_that_disagree_are_an_error_that_names_both(store, store_path):
    for folder, seconds in ((store_path, 30), (store_path.parent, 60)):
        (folder / "holdfast.toml").write_text(f"[when]\nevery_s = {seconds}\n")
    with pytest.raises(errors.BadOption) as caught:
        store.agent("trip-7")
    assert str(store_path / "holdfast.toml") in str(caught.value)
    assert str(store_path.parent / "holdfast.toml") in str(caught.value)
    (store_path.parent / "holdfast.toml").write_text("[when]\nevery_s = 30\n")
    assert store.agent("trip-7").when == When(every_s=30)
    (store_path / "holdfast.toml").unlink()
    assert store.agent("trip-8").when == When(every_s=30)  # of the project


def test_a_file_counts_where_the_store_was_opened_wherever_the_program_goes(place, tmp_path, monkeypatch):
    project, elsewhere = tmp_path, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (project / "holdfast.toml").write_text("[when]\nevery_s = 30\n")
    (elsewhere / "holdfast.toml").write_text("[when]\nevery_s = 60\n")
    monkeypatch.chdir(project)
    on_server = "://" in place
    with holdfast.open(place if on_server else "store") as store:
        monkeypatch.chdir(elsewhere)
        assert store.agent("trip-7").when == store.when("trip-8") == When(every_s=30)
    shutil.rmtree(elsewhere)  # a thread of another test may have left a dump there
    with holdfast.open(place) as store:  # from a directory that is gone
        assert store.when("trip-8") == (When(adaptive=True) if on_server else When(every_s=30))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[when]\nevry_s = 30\n", "evry_s"),
        ("[when]\nevery_s = 0\n", "every_s"),
        ("[when]\nevery_s = -5\n", "every_s"),
        ("[when]\nevery_s = 1e300\n", "every_s"),
        ('[when]\nevery_s = "often"\n', "every_s"),
        ('[when.agents."trip-*"]\nevery_steps = 0\n', "every_steps"),
        ("[wenn]\nevery_s = 30\n", "wenn"),
        ("[when\nevery_s = 30\n", "cannot be read"),
        ("when = 7\n", "when"),
        ("when.agents = 7\n", "when.agents"),
        ("\xff", "cannot be read"),
    ],
)
def test_a_file_with_a_mistake_is_named_with_it_and_the_agent_is_not_opened(store, store_path, text, word):
    file = store_path / "holdfast.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(errors.BadOption, match=word) as caught:
        store.agent("trip-7")
    assert str(file) in str(caught.value)
    assert not store.agents()
    file.unlink()
    assert store.agent("trip-7").when == When(adaptive=True)  # nothing keeps the branch


def test_a_handle_that_is_open_keeps_its_policy(store):
    agent = store.agent("trip-7", when=When(every_s=30))
    assert store.agent("trip-7") is agent
    assert store.agent("trip-7", when=When(every_s=30)) is agent
    with pytest.raises(errors.BadOption, match="another `when`"):
        store.agent("trip-7", when=None)


# -- failures in the history ------------------------------------------------------------------------------------

ENDING = (
    "import os, sys, signal, holdfast\n"
    "agent = holdfast.open(sys.argv[1]).agent('trip-7')\n"
    "agent.state['how'] = sys.argv[2]\n"
    "agent.checkpoint()\n"
    "if sys.argv[2] == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
    "if sys.argv[2] == 'raised': raise ValueError('on purpose')\n"
    "if sys.argv[2] == 'closed': agent.close()\n"
    "if sys.argv[2] == 'dropped': del agent\n"
)


@pytest.mark.parametrize(
    ("how", "failures"), [("killed", 1), ("raised", 1), ("ended", 0), ("closed", 0), ("dropped", 0)]
)
def test_a_program_that_was_killed_or_raised_counts_as_a_failure_and_one_that_ended_does_not(place, how, failures):
    subprocess.run([sys.executable, "-c", ENDING, place, how], check=False, capture_output=True, timeout=180)
    with holdfast.open(place) as store:
        agent = store.agent("trip-7")
        assert agent.state["how"] == how
        agent.checkpoint()
        assert store.costs("trip-7").failures == failures
        agent.checkpoint()
        assert store.costs("trip-7").failures == failures  # once


def test_failures_make_adaptive_save_sooner_also_in_the_next_process(store, store_path):
    agent = store.agent("trip-7")
    for number in range(30):
        agent.state["n"] = number
        agent.checkpoint()
    before = agent._pace.schedule.interval_s
    for _ in range(20):
        with pytest.raises(ValueError, match="no"):
            fail(agent, "pay", ValueError("no"), n=agent.state["n"] + 1)
        agent.checkpoint()
    assert agent._pace.schedule.interval_s <= before
    failures = store.costs("trip-7").failures
    assert failures == 20
    store.close()
    with holdfast.open(store_path) as again:
        assert again.agent("trip-7")._pace.schedule.rate > 20 / 3700
