"""What a signal handler raises, anywhere in a call, and twice, leaves the agent usable and its history whole."""

from __future__ import annotations

import gc
import random
import sys
import threading
from contextlib import closing, suppress
from functools import partial

import pytest

import holdfast
from holdfast.agent import branch
from holdfast.agent.commits import Commits
from holdfast.agent.store import Store
from holdfast.errors import HoldfastError, StoreBusy
from holdfast.store import writer
from holdfast.store.changes import NewRecord
from holdfast.store.sqlite import Sqlite
from tests import warm
from tests.conftest import SOAK, unsaved
from tests.limits import limits
from tests.memory import memory

# What a handler raises in a destructor reaches nobody.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HANG_S = 120
RECORDS = [NewRecord(1, b"", b"one"), NewRecord(0, b"", b"two")]


class Alarm(Exception):
    """What the handlers of many programs raise: an ordinary exception."""


def interrupted(work, at: int, error: type[BaseException] = KeyboardInterrupt) -> tuple[int, bool]:
    """Do ``work``, raising at one of the places where Python runs signal handlers: how many came, and whether it did.

    These are the beginnings of functions, and the returns of calls to C, in the thread of the caller.
    """
    came = 0
    # Code that calls what may fail takes an ordinary exception for such a failure, and says so in its own words.
    expected = (error, HoldfastError) if error is Alarm else (error,)

    def look(frame, event, _arg):
        nonlocal came
        if event in ("call", "c_return") and "/holdfast/" in frame.f_code.co_filename:
            came += 1
            if came == at:
                sys.setprofile(None)
                raise error

    gc.disable()
    try:
        sys.setprofile(look)
        work()
    except expected:
        return came, True
    finally:
        sys.setprofile(None)
        gc.enable()
    return came, False


def elsewhere(work):
    """The result of ``work`` in another thread, which finds every lock that was not given back."""
    results: list = []
    failures: list[BaseException] = []

    def do():
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "a lock was left held"
    if failures:
        raise failures[0]
    return results[0]


def begun(store, name):
    agent = store.agent(name)
    agent.state["log"] = [{"a": 1}, 2, [3], "s"]
    agent.checkpoint("0")
    agent.state["log"].append(0)
    agent.checkpoint("1")
    agent.state["log"].append("unsaved")
    return agent


def seal(agent):
    agent.state["table"] = {f"{n}": "x" * 200 for n in range(200)}
    agent.checkpoint("mid")


CALLS = {
    "checkpoint": lambda agent: agent.checkpoint("mid"),
    "sealed": seal,
    "bulk": lambda agent: (agent.state.update(big=bytes(300_000)), agent.checkpoint("mid")),
    "flush": lambda agent: (agent.checkpoint("mid"), agent.flush()),
    "records": lambda agent: agent._writer.append(RECORDS, flush=True),
    "undo": lambda agent: agent.undo(),
    "rollback": lambda agent: agent.rollback("0"),
    "beside": lambda agent: agent._writer.beside(agent._document, "beside", "a test said so", ""),
}
SAVING = ("checkpoint", "sealed", "bulk", "flush")


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_one_interrupt_anywhere_in_a_checkpoint_leaves_its_handle_usable(durability):
    with memory() as folder, Store.opened(folder / "store", durability=durability) as store:
        whole = begun(store, "whole")
        points, _ = interrupted(lambda: whole.checkpoint("mid"), 0)
        for at in range(1, points + 1):
            with closing(begun(store, str(at))) as agent:
                interrupted(lambda agent=agent: agent.checkpoint("mid"), at)
                agent.state["log"].append("more")
                elsewhere(lambda agent=agent: agent.checkpoint("after"))
                elsewhere(agent.flush)
                assert (agent.head.label, agent.dirty) == ("after", False), at
                assert [one.label for one in agent.log()] in (["after", "mid", "1", "0"], ["after", "1", "0"])
        assert store.verify().ok


@unsaved
@pytest.mark.parametrize("durability", ["commit", "batched"])
@pytest.mark.parametrize("what", CALLS)
def test_interrupts_lose_and_double_nothing(monkeypatch, what, durability):
    """One anywhere in a call, and perhaps another one in the next."""
    if what == "sealed":
        monkeypatch.setattr(branch, "SEAL_CHECKPOINTS", 2)
    call, choose = CALLS[what], random.Random(f"{what}{durability}")
    with memory() as folder:
        # Without the room of runs, so that records may say anything.
        with Store.opened(folder / "store", durability=durability) as store:
            whole = begun(store, "whole")
            points, _ = interrupted(lambda: call(whole), 0)
            every = range(1, points + 1) if SOAK else sorted(choose.sample(range(1, points + 1), min(points, 40)))
            expected = {}
            for first in every:
                for second in (0, *(range(1, points + 1) if SOAK else choose.sample(range(1, points + 1), 2))):
                    agent = begun(store, f"{first} {second}")
                    error = choose.choice((Alarm, KeyboardInterrupt))
                    _, hit = interrupted(lambda agent=agent: call(agent), first, error)
                    if second:
                        interrupted(lambda agent=agent: agent.checkpoint("between"), second, error)
                    elif hit and what in SAVING:
                        assert agent.head.label == "mid" or agent.dirty  # written and acknowledged, or still to be
                    agent.state["log"].append("more")
                    log = list(agent.state["log"])
                    try:
                        elsewhere(lambda agent=agent: agent.checkpoint("after"))
                    except HoldfastError:  # what was interrupted may be told once more
                        assert second
                        elsewhere(lambda agent=agent: agent.checkpoint("after"))
                    elsewhere(agent.flush)
                    assert (agent.head.label, agent.dirty) == ("after", False)
                    expected[agent.name] = log, agent.head.id, agent._writer.branch.records
            elsewhere(store.close)
        with Store.opened(folder / "store") as store:
            for name, (log, head, records) in expected.items():
                agent = store.agent(name, readonly=True)
                assert (list(agent.state["log"]), agent.head.id) == (log, head)
                history = agent.log()
                assert [one.depth for one in history] == list(range(len(history), 0, -1))
                assert len({one.id for one in history}) == len(history)
                found = list(branch.read_line(store._db.view, agent._branch.b))
                assert len(found) == records in (0, len(RECORDS) if what == "records" else 0)
            report = store.verify()
            assert report.ok, str(report)


@unsaved
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside another branch's"])
def test_interrupts_where_records_that_wait_are_taken_along(others):
    """They were accepted: each is there, once, in its place, whatever becomes of the checkpoint."""
    choose = random.Random(str(others))
    with memory() as folder:
        with Store.opened(folder / "store") as store, limits({"GATHER_S": 5.0}):
            beside = begun(store, "beside")

            def waiting(name):
                agent = begun(store, name)
                agent._writer.append(RECORDS, flush=False)
                agent._writer.append([NewRecord(0, b"", b"three")], flush=False)
                if others:
                    beside._writer.append(RECORDS, flush=False)
                return agent

            whole = waiting("whole")
            points, _ = interrupted(lambda: whole.checkpoint("mid"), 0)
            every = range(1, points + 1) if SOAK else sorted(choose.sample(range(1, points + 1), min(points, 80)))
            for first in every:
                agent = waiting(f"{first}")
                error = choose.choice((Alarm, KeyboardInterrupt))
                interrupted(lambda agent=agent: agent.checkpoint("mid"), first, error)
                if first % 3 == 0:
                    interrupted(agent.flush, choose.randrange(1, points))
                agent._writer.append([NewRecord(0, b"", b"four")], flush=False)
                agent.state["log"].append("more")
                elsewhere(lambda agent=agent: agent.checkpoint("after"))
            elsewhere(store.close)
        with Store.opened(folder / "store") as store:
            for first in every:
                agent = store.agent(f"{first}", readonly=True)
                assert list(agent.state["log"])[-2:] == ["unsaved", "more"]
                found = [record.body for record in branch.read_line(store._db.view, agent._branch.b)]
                assert found == [b"one", b"two", b"three", b"four"]
            report = store.verify()
            assert report.ok, str(report)


@unsaved
def test_interrupts_where_records_are_gathered():
    """What was accepted is there, once, in its place; what was interrupted is there once, or not at all."""
    choose = random.Random(5)
    with memory() as folder:
        with Store.opened(folder / "store") as store:

            def waiting(name):
                agent = begun(store, name)
                agent._writer.gather(partial(NewRecord, 0, b"", b"one"), 10, 5.0)
                return agent

            def more(agent):
                agent._writer.gather(partial(NewRecord, 0, b"", b"two"), 10, choose.choice((0.0, 5.0)))
                return agent._writer.position

            whole = waiting("whole")
            points, _ = interrupted(lambda: more(whole), 0)
            every = range(1, points + 1)
            for first in every:
                agent = waiting(f"{first}")
                interrupted(lambda agent=agent: more(agent), first, choose.choice((Alarm, KeyboardInterrupt)))
                if first % 3 == 0:
                    interrupted(agent.flush, choose.randrange(1, points))
                agent._writer.gather(partial(NewRecord, 0, b"", b"three"), 10, 5.0)
                agent.state["log"].append("more")
                elsewhere(lambda agent=agent: agent.checkpoint("after"))
            elsewhere(store.close)
        with Store.opened(folder / "store") as store:
            for first in every:
                agent = store.agent(f"{first}", readonly=True)
                found = [record.body for record in branch.read_line(store._db.view, agent._branch.b)]
                assert found in ([b"one", b"two", b"three"], [b"one", b"three"])
            report = store.verify()
            assert report.ok, str(report)


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_an_interrupt_while_closing(rounds, durability):
    """Closing again ends it; then the branch is free for others."""
    at, hit = 1, True
    with memory() as folder:
        while hit:
            path = folder / f"store {at}"
            store = holdfast.open(path, durability=durability)
            agent = begun(store, "x")
            agent.checkpoint("mid")
            _, hit = interrupted(agent.close, at)
            again = elsewhere(lambda store=store: store.agent("x"))
            assert again.head.label == "mid"
            _, closing_hit = interrupted(store.close, at)
            elsewhere(store.close)
            with holdfast.open(path) as store:
                assert store.agent("x").state["log"][-1] == "unsaved"
            hit = hit or closing_hit
            at += rounds(9, 1)


@pytest.mark.parametrize("durability", ["commit", "batched"])
@pytest.mark.parametrize("new", [False, True], ids=["there", "new"])
def test_an_interrupt_while_opening(rounds, durability, new):
    """The next one opens it, whatever was left behind: threads, connections, the lock of a branch, half a store."""
    with memory() as folder:

        def open_agent(path):
            store = holdfast.open(path, durability=durability)
            return store, store.agent("x")

        if not new:
            open_agent(folder / "store")[0].close()
        points, _ = interrupted(lambda: open_agent(folder / "store"), 0)
        open_agent(folder / "store")[0].close()
        places, hits = range(1, points + 1), 0
        for at in random.Random(durability).sample(places, min(points, rounds(40, points))):
            path = folder / (f"store {at}" if new else "store")
            hits += interrupted(lambda path=path: open_agent(path), at)[1]
            store, agent = elsewhere(lambda path=path: open_agent(path))
            agent.state["n"] = at
            elsewhere(agent.checkpoint)
            elsewhere(store.close)
            with holdfast.open(path, readonly=True) as store:
                assert store.agent("x").state["n"] == at
        assert hits > 20


def test_an_interrupt_before_the_writer_is_woken(store_path, monkeypatch):
    """What lies in its queue by then is written when somebody asks for it again."""
    ring, left = writer.Bell.ring, [KeyboardInterrupt]

    def interrupted_once(bell):
        if left and threading.current_thread() is threading.main_thread():
            raise left.pop()
        ring(bell)

    with holdfast.open(store_path) as store:
        agent = begun(store, "x")
        monkeypatch.setattr(writer.Bell, "ring", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            CALLS["bulk"](agent)
        assert not left
        assert elsewhere(lambda: agent.head.label) == "mid"


@pytest.mark.parametrize("at", range(1, 7))
def test_an_interrupt_while_a_change_is_withdrawn(store_path, at):
    """Nobody makes it then, and nobody may wait for it."""
    with holdfast.open(store_path) as store, limits({"BUSY_WAIT_S": 0.05}):
        agent = store.agent("a")
        agent.checkpoint("0")
        began, over = threading.Event(), threading.Event()
        job = writer.Job(lambda _: (began.set(), over.wait()))
        store._db.hand(job)  # the writer is at something that takes long
        began.wait()
        came = 0

        def look(frame, event, _arg):
            nonlocal came
            if event in ("call", "c_return") and frame.f_code in codes:
                came += 1
                if came == at:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        codes = {getattr(writer.Job, name).__code__ for name in ("claim", "finish", "withdraw")}
        agent.state["n"] = 1
        try:
            sys.setprofile(look)
            agent.checkpoint("1")
        except (KeyboardInterrupt, StoreBusy):
            pass
        finally:
            sys.setprofile(None)
            over.set()
        job.join()
        with suppress(StoreBusy):  # what became of the one that was interrupted
            elsewhere(lambda: agent.checkpoint("2"))
        assert elsewhere(lambda: agent.checkpoint("3")).label == "3"
        assert agent.at("3").state["n"] == 1
        assert store.verify().ok


@unsaved
def test_an_interrupt_when_a_checkpoint_was_just_written(store_path):
    """At every place, with none left out: whether it was written is known, or asked for, and it is not tried again."""
    places = {Commits._written.__code__}

    def raising(at, came):
        def look(frame, event, _arg):
            if event in ("call", "c_return") and (
                frame.f_code in places or getattr(frame.f_back, "f_code", 0) in places
            ):
                came.append(event)
                if len(came) == at:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        return look

    with Store.opened(store_path) as store:
        agent, at, struck = store.agent("a", when=None), 0, True
        agent.checkpoint("begun")
        while struck:
            at, came = at + 1, []
            agent.state["n"] = at
            try:
                sys.setprofile(raising(at, came))
                agent.checkpoint(f"{at}")
            except KeyboardInterrupt:
                sys.setprofile(None)
                elsewhere(lambda at=at: agent.checkpoint(f"after {at}"))
            finally:
                sys.setprofile(None)
            struck = len(came) == at
        assert at > 5
        history = [one.label for one in agent.log()]
        assert [label for label in reversed(history) if "after" not in label] == ["begun", *map(str, range(1, at + 1))]
        assert store.verify().ok


@unsaved
def test_an_interrupt_while_the_log_is_found_to_be_short(store_path):
    """At every place, those in Python's own modules included: nothing stays locked that the next commit waits for."""
    store = Store.opened(store_path)
    agent, engine, at = store.agent("a", when=None), store._db.engine, 1
    agent.checkpoint("begun")

    def strike(came):
        def look(frame, event, _arg):
            above = frame
            while above is not None and above.f_code is not Sqlite._look_at_log.__code__:
                above = above.f_back
            if above is not None and event in ("call", "c_return"):
                came.append(event)
                if len(came) == at:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        agent.state["n"] = at
        try:
            sys.setprofile(look)
            agent.checkpoint(f"{at}")
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)

    while True:
        came = []
        elsewhere(lambda: agent.checkpoint("between"))
        engine.reclaim(log=True)
        elsewhere(partial(strike, came))
        if len(came) == at:
            at += 1
        elif came:  # otherwise the writer's thread was not through yet, and has made it
            break
    assert at > 4
    elsewhere(store.close)
    with holdfast.open(store_path) as again:
        assert again.agent("a").state["n"] == at
        assert again.verify().ok


def test_a_capture_that_was_left_is_written_by_the_next_call(store_path):
    """Where even looking for what became of a checkpoint is cut short, its changes are still there."""
    with holdfast.open(store_path) as store:
        agent = begun(store, "x")
        pending = agent._check_writer().capture(agent._document, "mid")  # and the interrupt came before it was written
        assert not pending.done
        assert agent.dirty
        agent.state["log"].append("more")
        agent.checkpoint("after")
        assert [checkpoint.label for checkpoint in agent.log()][:2] == ["after", "mid"]
        assert not agent.dirty


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_a_handler_that_takes_checkpoints_itself_harms_none(store_path, durability):
    refused = 0

    def handle(*_):
        nonlocal refused
        try:
            agent.checkpoint("handler")
        except StoreBusy:
            refused += 1

    with holdfast.open(store_path, durability=durability) as store:
        agent = store.agent("a")
        agent.state["l"] = list(range(200))
        agent.checkpoint("first")
        for at in range(1, 4_000, 37):

            def look(frame, event, _arg, left=[at]):  # noqa: B006 - one for each round
                left[0] -= event in ("call", "c_return") and "/holdfast/" in frame.f_code.co_filename
                if left[0] == 0:
                    sys.setprofile(None)
                    handle()

            sys.setprofile(look)
            try:
                agent.state["l"].append(at)
                agent.checkpoint("step")
            finally:
                sys.setprofile(None)
        assert refused
        assert holdfast.plain(agent.head.state) == holdfast.plain(agent.state)
        assert store.verify().ok


CLOSES = """
import sys, warnings, holdfast
warnings.simplefilter("ignore")
with holdfast.open(sys.argv[1]) as store:
    store.agent("a").checkpoint("first")
    acknowledged = 0
    for at in range(1, 1_200, 13):
        agent, left = store.agent("a"), [at]
        def look(frame, event, _arg):
            left[0] -= event in ("call", "c_return") and "/holdfast/" in frame.f_code.co_filename
            if left[0] == 0:
                sys.setprofile(None)
                agent.close()
        sys.setprofile(look)
        try:
            agent.state["last"] = at
            agent.checkpoint("step")
            acknowledged = at
        except holdfast.HoldfastError:
            pass
        finally:
            sys.setprofile(None)
            agent.close()
        assert store.agent("a").state.get("last", 0) >= acknowledged, at
    assert acknowledged and store.verify().ok
"""


def test_a_handler_that_closes_the_agent_waits_for_nobody(store_path):
    """As one of SIGTERM does that ends the program, whatever it has come upon."""
    program = [sys.executable, "-c", CLOSES, str(store_path)]
    assert warm.run(program, check=False, timeout=HANG_S).returncode == 0
