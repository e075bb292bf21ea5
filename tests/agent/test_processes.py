"""Several processes at one store: who may write, what a loser sees, and what failing disks leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import apsw
import pytest

import holdfast
from holdfast.errors import AgentBusy, DiskFull, Fenced, ReadOnly, StoreBusy, StoreClosed, StorePoisoned, Unavailable
from holdfast.store.database import open_database
from holdfast.store.engine import Unsure
from tests import warm
from tests.agent.child import start
from tests.conftest import unsaved
from tests.lives import ask, end, line, stop_at_rest


@pytest.fixture
def holder(store_path):
    process = start("hold", store_path, "a")
    assert line(process) == "ready"
    yield process
    process.send_signal(signal.SIGCONT)
    end(process)


def test_second_process_gets_agent_busy_that_names_the_holder(store_path, holder):
    with holdfast.open(store_path) as store:
        with pytest.raises(AgentBusy) as caught:
            store.agent("a")
        assert caught.value.holder["pid"] == holder.pid
        assert caught.value.holder["agent"] == "a"
        assert str(holder.pid) in str(caught.value)
        assert "takeover=True" in caught.value.hint
        assert store.agent("b").checkpoint("another agent is free")
    assert ask(holder, "still mine").startswith("made")


def test_after_kill_opening_works_at_once(store_path, holder):
    ask(holder, "one more")
    holder.kill()
    holder.wait()
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        assert agent.state["by"] == [holder.pid, "one more"]
        agent.checkpoint("mine now")


def test_takeover_from_a_stopped_holder_fences_it(store_path, holder):
    stop_at_rest(holder, store_path)
    with holdfast.open(store_path) as store:
        with pytest.raises(AgentBusy):
            store.agent("a")
        agent = store.agent("a", takeover=True)
        agent.state["by"].append("taken")
        taken = agent.checkpoint("taken")
        holder.send_signal(signal.SIGCONT)
        assert ask(holder, "awake") == "fenced"
        assert ask(holder, "awake again") == "fenced"
        assert [c.label for c in agent.log(all=True)] == ["taken", "held"]
        assert agent.at().id == taken.id
        agent.state["by"].append("on")
        agent.checkpoint("goes on")
        assert store.verify().ok
        assert store.agent("a", readonly=True).state["by"] == [holder.pid, "taken", "on"]


def stranger(path):
    """A second store object of this process, which stands for another process."""
    return holdfast.Store(str(path), open_database(path), (False, "commit", False, False))


def test_a_fenced_handle_says_so_and_can_be_opened_again(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["n"] = 1
        agent.checkpoint()
        other = stranger(store_path)
        other.agent("a", takeover=True)
        agent.state["n"] = 2
        with pytest.raises(Fenced):
            agent.checkpoint()
        with pytest.raises(Fenced):
            agent.rollback("~0")
        with pytest.raises(Fenced):
            agent.undo()
        assert agent.state["n"] == 2, "what could not be written stays in memory"
        other.close()
        agent.close()
        again = store.agent("a")
        assert again.state["n"] == 1
        again.checkpoint("mine again")


def test_who_was_passed_over_while_opening_does_not_write(store_path, monkeypatch):
    with holdfast.open(store_path) as store:
        store.agent("a").close()
        take = store._db.leases.take

        def passed_over(*args, **options):
            lease = take(*args, **options)
            child = os.fork()
            if not child:
                with suppress(BaseException), holdfast.open(store_path) as other:
                    other.agent("a", takeover=True).close()
                os._exit(0)
            os.waitpid(child, 0)
            return lease

        monkeypatch.setattr(store._db.leases, "take", passed_over)
        agent = store.agent("a")
        agent.state["n"] = 1
        with pytest.raises(Fenced):
            agent.checkpoint()
        assert store.agent("a", readonly=True).head is None


def test_wait_s_waits_for_the_holder(store_path):
    process = start("release_after", store_path, "a", 0.5)
    try:
        assert line(process) == "ready"
        with holdfast.open(store_path) as store:
            with pytest.raises(AgentBusy):
                store.agent("a", wait_s=0.1)
            process.stdin.write("go\n")
            process.stdin.flush()
            store.agent("a", wait_s=180).checkpoint()
    finally:
        end(process)


def test_readers_are_never_blocked(store_path, holder):
    with holdfast.open(store_path, readonly=True) as store:
        agent = store.agent("a")
        assert list(agent.state["by"]) == [holder.pid]
        with pytest.raises(ReadOnly):
            agent.checkpoint()
        with pytest.raises(ReadOnly):
            agent.state["by"] = 1
        ask(holder, "two")
        assert list(agent.state["by"]) == [holder.pid], "a reader stays where it was"
        agent.refresh()
        assert list(agent.state["by"]) == [holder.pid, "two"]
        holder.send_signal(signal.SIGSTOP)
        assert store.agent("a", readonly=True).head.label == "two"
        assert store.verify().ok
    with holdfast.open(store_path) as store:
        assert store.agent("a", readonly=True).head.label == "two"


def test_tags_and_branches_do_not_need_the_writer(store_path, holder):
    with holdfast.open(store_path) as store:
        store.tag("a", "here", "held")
        store.branch("a", "side", "here")
        store.mark("a", "held", "suspect", "why not")
        side = store.agent("a", branch="side")
        side.state["side"] = True
        side.checkpoint("on the side")
        store.untag("a", "here")
        assert ask(holder, "meanwhile").startswith("made")
        assert store.verify().ok


def test_forked_child_is_refused_and_harms_nothing(store_path):
    process = start("fork", store_path)
    try:
        out, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, out
    assert out.strip() == "child 0"
    with holdfast.open(store_path) as store:
        assert store.verify().ok
        assert len(store.agent("parent").log()) == 102
        assert store.agent("child").state["n"] == 99
        assert len(store.agent("child").state["bulk"]) == 3 << 20


def test_eight_processes_on_eight_agents_lose_nothing(store_path, rounds):
    count = rounds(40, 1_000)
    holdfast.open(store_path).close()
    processes = [start("write", store_path, f"agent-{number}", count) for number in range(8)]
    try:
        assert all(line(process) == "ready" for process in processes)
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [line(process).split() for process in processes]
        for process in processes:
            assert process.wait(timeout=180) == 0
    finally:
        for process in processes:
            end(process)
    with holdfast.open(store_path, readonly=True) as store:
        for number, ids in enumerate(said):
            agent = store.agent(f"agent-{number}", readonly=True)
            assert [checkpoint.id for checkpoint in reversed(agent.log())] == ids
            assert len(agent.state["messages"]) == count
        assert store.verify().ok


def test_batched_is_durable_after_flush(store_path):
    """A copy of the files, made while the writer lives, is what a kill would leave behind."""
    with holdfast.open(store_path, durability="batched") as store:
        agent = store.agent("a")
        for number in range(200):
            agent.state["n"] = number
            last = agent.checkpoint(str(number))
        agent.flush()
        process = subprocess.run(
            ["cp", "-r", str(store_path), str(store_path) + "-copy"], check=True, capture_output=True
        )
        assert process.returncode == 0
        assert last.depth == 200
        assert agent.at(last).state["n"] == 199
    with holdfast.open(str(store_path) + "-copy") as store:
        assert store.agent("a").head.id == last.id
        assert store.verify().ok


def test_batched_checkpoints_survive_a_normal_exit(store_path):
    process = start("exit_batched", store_path)
    process.communicate(timeout=180)
    assert process.returncode == 0
    with holdfast.open(store_path) as store:
        assert store.agent("a").state["n"] == 49
        assert store.agent("a").head.depth == 50


def test_batched_fenced_is_raised_at_the_next_call(store_path):
    with holdfast.open(store_path, durability="batched") as store:
        agent = store.agent("a")
        agent.state["n"] = 1
        agent.checkpoint()
        agent.flush()
        other = stranger(store_path)
        other.agent("a", takeover=True)
        agent.state["n"] = 2
        agent.checkpoint("accepted, and refused later")
        with pytest.raises(Fenced):
            agent.flush()
        other.close()


def test_closed_handles_refuse(store_path):
    store = holdfast.open(store_path)
    agent = store.agent("a")
    messages = agent.state.setdefault("messages", [])
    made = agent.checkpoint()
    agent.close()
    agent.close()
    for call in (agent.checkpoint, agent.log, agent.undo, agent.at, lambda: messages.append(1), agent.flush):
        with pytest.raises(StoreClosed):
            call()
    assert store.agent("a") is not agent
    assert store.agent("a") is store.agent("a")
    store.close()
    store.close()
    for call in (store.agents, store.verify, lambda: store.agent("a"), store.flush, lambda: made.state["messages"]):
        with pytest.raises(StoreClosed):
            call()
    assert holdfast.open(store_path) is not store
    holdfast.open(store_path).close()


def test_same_path_same_store_and_other_options_are_refused(store_path):
    with holdfast.open(store_path) as store:
        assert holdfast.open(str(store_path)) is store
        assert holdfast.open(store_path.parent / "." / "store") is store
        with pytest.raises(holdfast.errors.BadOption):
            holdfast.open(store_path, durability="batched")


# -- failing disks -----------------------------------------------------------------------------------


@contextmanager
def small_disk(path, size_kib):
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)]
    made = subprocess.run(command, check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("bulk", [False, True], ids=["rows", "bulk"])
def test_full_disk_loses_nothing_and_works_again_with_room(tmp_path, bulk):
    with small_disk(tmp_path / "disk", 4096) as disk:
        store = holdfast.open(disk / "store")
        agent = store.agent("a")
        agent.state["messages"] = []
        agent.checkpoint("start")
        filler = disk / "filler"
        fill(filler, but=300_000)
        acknowledged = []
        full = False
        while not full:
            piece = os.urandom(300_000 if bulk else 4_000)
            agent.state["messages"].append(piece)
            try:
                acknowledged.append(agent.checkpoint(str(len(acknowledged))).id)
            except DiskFull:
                full = True
        length = len(agent.state["messages"])
        assert length == len(acknowledged) + 1
        with pytest.raises(DiskFull):
            agent.checkpoint("still no room")
        agent.state["messages"].append("one more while it is full")
        filler.unlink()
        made = agent.checkpoint("with room")
        assert len(made.state["messages"]) == length + 1
        assert made.state["messages"][-2] == piece
        assert made.state["messages"][-1] == "one more while it is full"
        assert [c.id for c in agent.log()][1:-1] == acknowledged[::-1]
        agent.state["messages"].append("after")
        agent.checkpoint("after")
        assert store.verify().ok, str(store.verify())
        assert not list((disk / "store" / "packs").glob("tmp-*"))
        store.close()
        with holdfast.open(disk / "store") as again:
            assert len(again.agent("a").state["messages"]) == length + 2


def fill(path, but) -> None:
    """Take all the room of a disk, and give some of it back. Somebody else may be taking some meanwhile."""
    with path.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - but)


class FailingSync(apsw.VFS):
    """Passes everything on; fsync of a database file fails when told to."""

    fail = False

    def __init__(self) -> None:
        self.name = "holdfast-test-sync"
        super().__init__(self.name, "")

    def xOpen(self, name, flags):  # noqa: N802
        return FailingFile(name, flags)


class FailingFile(apsw.VFSFile):
    def __init__(self, name, flags) -> None:
        super().__init__("", name, flags)

    def xSync(self, flags) -> None:  # noqa: N802
        if FailingSync.fail:
            raise apsw.IOError
        super().xSync(flags)


def test_failed_flush_poisons_and_reopening_recovers(store_path, monkeypatch):
    vfs = FailingSync()
    real = open_database
    holdfast.open(store_path).close()
    monkeypatch.setattr("holdfast.agent.store.open_database", lambda path, **more: real(path, vfs=vfs.name, **more))
    store = holdfast.open(store_path)
    try:
        agent = store.agent("a")
        agent.state["n"] = 1
        safe = agent.checkpoint("safe")
        FailingSync.fail = True
        agent.state["n"] = 2
        with pytest.raises(StorePoisoned):
            agent.checkpoint("lost")
        FailingSync.fail = False
        for call in (agent.checkpoint, agent.flush, lambda: agent.rollback(safe), lambda: agent.tag("t"), store.flush):
            with pytest.raises(StorePoisoned):
                call()
        assert agent.state["n"] == 2
        assert store.agents()[0].head.id == safe.id, "reading goes on, from the last durable point"
    finally:
        FailingSync.fail = False
        store.close()  # and closing does not complain: nothing that was acknowledged is lost
    assert store.closed
    monkeypatch.undo()
    with holdfast.open(store_path) as again:
        agent = again.agent("a")
        assert agent.state["n"] in {1, 2}  # what the disk holds of the last change is unknown: whole or absent
        assert agent.at("safe").id == safe.id
        agent.state["n"] = 3
        agent.checkpoint("goes on")
        assert again.verify().ok


TAKES_OVER = """
import sys, holdfast
with holdfast.open(sys.argv[1]) as store:
    agent = store.agent("a", takeover=True)
    agent.state["seen"] = len(agent.state.get("big", b""))
    agent.checkpoint("theirs")
"""


@unsaved
@pytest.mark.parametrize("written", [True, False])
def test_a_change_whose_answer_was_lost_may_be_built_upon_by_whoever_took_the_branch(store_path, monkeypatch, written):
    """So nothing that it brought is taken away, and it is not said that it was not written."""
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.checkpoint("first")
        engine, away = store._db.engine, []
        real = engine.transaction

        def transaction(*args):
            if away:
                raise Unavailable("the server cannot be reached")
            away.append(True)
            if written:
                real(*args)
            raise Unsure("the answer to COMMIT was lost")

        monkeypatch.setattr(engine, "transaction", transaction)
        agent.state["big"] = os.urandom(600_000)
        with pytest.raises(Unavailable):
            agent.checkpoint("mine")
        warm.run([sys.executable, "-c", TAKES_OVER, str(store_path)], check=True, timeout=180)
        monkeypatch.setattr(engine, "transaction", real)
        with pytest.raises(Fenced):
            agent.checkpoint("again")
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        assert [one.label for one in agent.log()] == ["theirs", *["mine"] * written, "first"]
        assert agent.state["seen"] == len(agent.state.get("big", b"")) == 600_000 * written
        assert store.verify().ok


@unsaved
@pytest.mark.parametrize("written", [True, False])
def test_changes_whose_common_answer_was_lost_are_found_one_by_one(store_path, monkeypatch, written):
    """They stand on each other, so the branch stands at the last of them, and the others were written all the same."""
    with holdfast.open(store_path, durability="batched") as store:
        agent = store.agent("a", when=None)
        agent.checkpoint("0")
        store.flush()
        engine, lost = store._db.engine, []
        real = engine.transaction

        def transaction(*args):
            if not lost and not written:
                lost.append(True)
                raise Unsure("the answer to COMMIT was lost")
            made = real(*args)
            if not lost:
                lost.append(True)
                raise Unsure("the answer to COMMIT was lost")
            return made

        monkeypatch.setattr(engine, "transaction", transaction)
        for number in (1, 2, 3):
            agent.state["n"] = number
            agent.checkpoint(str(number))
        with suppress(StoreBusy, Unavailable):  # nothing was written, or nobody knows yet
            store.flush()
        agent.flush()
        assert lost
        assert store.agent("a", readonly=True).log()[-1].label == "0"
    with holdfast.open(store_path) as store:
        assert [one.label for one in store.agent("a").log()] == ["3", "2", "1", "0"]
        assert store.agent("a").state["n"] == 3
        assert store.verify().ok


@unsaved
def test_a_large_value_in_a_group_whose_answer_was_lost_stays(store_path, monkeypatch):
    with holdfast.open(store_path) as store:
        agent = store.agent("a", when=None)
        agent.checkpoint("0")
        engine, gate, begun, made = store._db.engine, threading.Event(), threading.Event(), []
        real = engine.transaction

        def transaction(*args):
            made.append(True)
            if len(made) == 1:
                begun.set()
                gate.wait(60)
            found = real(*args)
            if len(made) == 2:
                raise Unsure("the answer to COMMIT was lost")
            return found

        monkeypatch.setattr(engine, "transaction", transaction)
        first = threading.Thread(target=store._db.change, args=(lambda _: None,))
        first.start()
        assert begun.wait(60)
        threads = [first]
        for number, value in enumerate((os.urandom(600_000), 2), 1):
            agent.state[f"value {number}"] = value
            threads.append(threading.Thread(target=agent.checkpoint, args=(str(number),)))
            threads[-1].start()
            while len(store._db.writers._all[0]._queue) < number:
                threading.Event().wait(0.001)
        gate.set()
        for thread in threads:
            thread.join()
    with holdfast.open(store_path) as store:
        assert [one.label for one in store.agent("a").log()] == ["2", "1", "0"]
        assert len(store.agent("a").state["value 1"]) == 600_000
        assert store.verify().ok


def test_a_store_is_let_go_though_its_log_is_just_to_be_folded(store_path):
    with holdfast.open(store_path) as store:
        store.agent("a", when=None).checkpoint("0")
        engine = store._db.engine
        assert engine.rest(time.monotonic() + 60)
        engine._wanted.ring()  # by a commit just before
        letting = threading.Thread(target=engine.release, daemon=True)
        letting.start()
        letting.join(60)
        assert not letting.is_alive()
        engine.reopen()
        engine.resume()
        assert store.verify().ok


def test_threads_share_one_handle(store_path, rounds):
    """Every operation is atomic, every checkpoint consistent: two sections move together."""
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["left"] = []
        agent.state["right"] = []
        failures = []

        def work(number: int) -> None:
            try:
                for step in range(rounds(60, 2_000)):
                    agent.state["left"].append([number, step])
                    agent.checkpoint(f"{number}-{step}")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        count = rounds(60, 2_000)
        assert len(agent.state["left"]) == 4 * count
        lengths = [len(c.state["left"]) for c in reversed(agent.log(limit=50))]
        assert lengths == sorted(lengths)
        for number in range(4):
            own = [step for who, step in agent.state["left"] if who == number]
            assert own == list(range(count))
        assert store.verify().ok
