"""The queue of writers: what is accepted and written later, who waits for whom, and how long."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

import holdfast
from holdfast.agent import background
from holdfast.agent.branch import read_line
from holdfast.agent.store import Store
from holdfast.errors import StoreBusy, StoreClosed, StorePoisoned
from holdfast.store import writer
from holdfast.store.changes import NewRecord, Objects
from holdfast.store.engine import Unsure
from holdfast.store.sqlite import _ASK, _FREE, FOLD_FRAMES
from tests import warm
from tests.limits import limits

ROOT = Path(__file__).resolve().parents[2]


def start(program, *arguments):
    command = [sys.executable, "-c", f"import holdfast, os, sys, time\npath = sys.argv[1]\n{program}", *arguments]
    return warm.Popen(list(map(str, command)), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def kept(path):
    """Another process is in the middle of a transaction, and stays there."""
    program = (
        "store = holdfast.open(path)\n"
        "def work(change):\n  print('in it', flush=True)\n  sys.stdin.readline()\n"
        "store._db.change(work)\n"
    )
    holder = start(program, path)
    try:
        assert holder.stdout.readline() == "in it\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def labels(path):
    with holdfast.open(path, readonly=True) as store:
        return [checkpoint.label for checkpoint in store.agent("a").log()][::-1]


@pytest.fixture
def agent(store_path):
    with holdfast.open(store_path, durability="batched") as store:
        made = store.agent("a")
        made.checkpoint("0")
        store.flush()
        yield made


def test_what_is_accepted_becomes_durable_without_a_flush_and_shares_one_with_others(store_path, monkeypatch):
    """Seen by another process, which knows nothing of what waits here."""
    monkeypatch.setattr(writer, "GATHER_S", 0.05)
    groups = []
    with holdfast.open(store_path, durability="batched") as store:
        real = store._db.engine.transaction
        monkeypatch.setattr(store._db.engine, "transaction", lambda *args: (real(*args), groups.append(1))[0])
        agents = [store.agent(name) for name in "ab"]
        store.flush()
        groups.clear()
        for number in range(100):
            for agent in agents:
                agent.state["n"] = number
                agent.checkpoint(str(number))
        reader = start(
            "store = holdfast.open(path, readonly=True)\n"
            "while [len(store.agent(name).log()) for name in 'ab'] != [100, 100]: time.sleep(0.01)\n"
            "print([[int(one.label) for one in store.agent(name).log()] == [*range(99, -1, -1)] for name in 'ab'])\n",
            store_path,
        )
        assert reader.communicate(timeout=180)[0] == "[True, True]\n"
        assert len(groups) < 100


def test_a_checkpoint_takes_along_what_waits_of_its_branch_and_no_thread_is_waited_for(store_path, monkeypatch):
    """In one transaction; what waits of other branches is left to the writer, and so is all that was begun."""
    with Store.opened(store_path) as store, limits({"GATHER_S": 600.0}):
        agent, other = store.agent("a"), store.agent("b")
        for one in (agent, other):
            one.checkpoint("0")
        agent._writer.append([NewRecord(0, b"", b"0")], flush=True)  # from then on its number is known
        commits = []
        direct, transaction = store._db.engine.direct, store._db.engine.transaction
        monkeypatch.setattr(store._db.engine, "direct", lambda *args: (commits.append("direct"), direct(*args))[1])
        monkeypatch.setattr(
            store._db.engine, "transaction", lambda *args: (commits.append("writer"), transaction(*args))[1]
        )
        for number in (1, 2):
            agent._writer.append([NewRecord(0, b"", b"%d" % number)], flush=False)
        agent.state["n"] = 1
        agent.checkpoint("1")
        assert commits == ["direct"]
        assert agent._writer.append([NewRecord(0, b"", b"3")], flush=False) == 4
        agent._writer.append([NewRecord(0, b"", b"4")], flush=True)
        assert commits == ["direct", "direct"]
        agent._writer.append([NewRecord(0, b"", b"5")], flush=False)
        other._writer.append([NewRecord(0, b"", b"other")], flush=False)
        agent.checkpoint("2")
        assert commits == ["direct", "direct", "writer"]
        store.flush()
        commits.clear()
        for number in (6, 7, 8):
            agent._writer.gather(partial(NewRecord, 0, b"", b"%d" % number), 10, 600.0)
        assert (commits, agent._writer.position[0]) == ([], 9)
        agent._writer.gather(
            partial(NewRecord, 0, b"", b"9"), 10, 600.0
        )  # it was asked how many there are: this one comes after them
        agent.checkpoint("3")
        assert commits == ["direct"]
        found = [record.body for record in read_line(store._db.view, agent._branch.b)]
        assert found == [b"%d" % number for number in range(10)]
        assert [one.label for one in agent.log()] == ["3", "2", "1", "0"]
        assert store.verify().ok


@pytest.mark.parametrize("limit", ["ENOUGH", "GATHERED_BYTES"])
def test_records_that_are_gathered_wait_for_no_more_when_they_are_many(store_path, limit):
    """However long they might wait, and though nobody asks for them."""
    with Store.opened(store_path) as store, limits({"GATHER_S": 600.0, limit: {"ENOUGH": 8}.get(limit, 80)}):
        agent = store.agent("a")
        for number in range(20):
            agent._writer.gather(partial(NewRecord, 0, b"", b"%010d" % number), 10, 600.0)
        end_s = time.monotonic() + 120
        while store._db.view.branch_at(agent._branch.b).records < 16:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        store.flush()
        found = [int(record.body) for record in read_line(store._db.view, agent._branch.b)]
        assert found == list(range(20))


def test_what_is_gathered_waits_as_long_as_the_most_impatient_of_it(store_path):
    with Store.opened(store_path) as store:
        agent = store.agent("a")
        for number, patience_s in enumerate((600.0, 600.0, 0.0)):
            agent._writer.gather(partial(NewRecord, 0, b"", b"%d" % number), 10, patience_s)
        end_s = time.monotonic() + 120
        while store._db.view.branch_at(agent._branch.b).records < 3:
            assert time.monotonic() < end_s
            time.sleep(0.01)


def test_nothing_is_gathered_in_a_store_whose_disk_has_failed(store_path):
    with Store.opened(store_path) as store, limits({"GATHER_S": 600.0}):
        agent = store.agent("a")
        agent._writer.gather(partial(NewRecord, 0, b"", b"0"), 10, 600.0)
        store._db.engine.poisoned(StorePoisoned("the disk failed"))
        with pytest.raises(StorePoisoned):
            agent._writer.gather(partial(NewRecord, 0, b"", b"1"), 10, 600.0)
        with pytest.raises(StorePoisoned):
            store.flush()
    with Store.opened(store_path) as store:
        assert not list(read_line(store._db.view, store.agent("a")._branch.b))


def test_flushes_of_one_thread_wait_for_what_another_has_taken_along(store_path, rounds):
    """Whatever was accepted before ``flush`` is durable when it returns, whoever writes it at that moment."""
    with Store.opened(store_path) as store:
        agents = [store.agent(f"{number}") for number in range(3)]
        stop, failures = threading.Event(), []

        def save(agent):
            while not stop.is_set():
                agent.state["n"] = agent.state.get("n", 0) + 1
                agent.checkpoint()

        def write(agent):
            try:
                for number in range(rounds(60, 2_000)):
                    if number % 3:
                        agent._writer.gather(partial(NewRecord, 0, b"", b"%d" % number), 10, 0.05)
                    else:
                        agent._writer.append([NewRecord(0, b"", b"%d" % number)], flush=False)
                    if number % 4 != 1:
                        store._db.flush()
                        assert store._db.view.branch_at(agent._branch.b).records > number
            except BaseException as error:
                failures.append(error)

        savers = [threading.Thread(target=save, args=(agent,)) for agent in agents]
        writers = [threading.Thread(target=write, args=(agent,)) for agent in agents]
        for thread in (*savers, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        for thread in savers:
            thread.join()
        assert not failures
        for agent in agents:
            found = [int(record.body) for record in read_line(store._db.view, agent._branch.b)]
            assert found == list(range(rounds(60, 2_000)))
        assert store.verify().ok


def test_own_checkpoints_are_seen_at_once(agent):
    for number in range(1, 20):
        agent.state["n"] = number
        made = agent.checkpoint(str(number))
        assert (agent.head.id, agent.log(1)[0].id, agent.at(str(number)).state["n"]) == (made.id, made.id, number)


def test_large_values_keep_their_place_in_the_order(agent, store_path):
    for number in range(1, 7):
        agent.state["n"] = bytes(300_000 + number) if number % 2 else number
        agent.checkpoint(str(number))
    agent.rollback("2")
    agent.checkpoint("on")
    agent.flush()
    agent._store.close()
    assert labels(store_path) == ["0", "1", "2", "on"]


def add(agent, count, accepted):
    for number in range(1, count + 1):
        agent.state["text"] = f"{number} " + "x" * 1000
        agent.checkpoint(str(number))
        accepted.append(number)


@pytest.mark.parametrize("limit", ["changes", "bytes"])
def test_the_queue_is_bounded_and_who_adds_to_it_waits(agent, store_path, limit):
    bounds = {"PENDING_MAX": 8} if limit == "changes" else {"QUEUE_BYTES": 8_000}
    accepted = []
    with limits(bounds), kept(store_path) as holder:
        thread = threading.Thread(target=add, args=(agent, 30, accepted))
        thread.start()
        while len(accepted) < 4:
            thread.join(0.01)
        thread.join(0.3)
        assert thread.is_alive()
        assert len(accepted) <= 10
        print(file=holder.stdin, flush=True)  # it goes on, and so do all others
        thread.join(180)
    assert len(accepted) == 30
    agent._store.close()
    assert labels(store_path) == [str(number) for number in range(31)]


def test_a_full_queue_that_nobody_empties_is_an_error_and_nothing_of_it_is_lost(agent, store_path):
    with limits({"QUEUE_BYTES": 5_000, "BUSY_WAIT_S": 0.2}), kept(store_path):
        with pytest.raises(StoreBusy, match="waiting to be written already") as caught:
            add(agent, 99, [])
        assert "stopped process" in caught.value.hint
        with pytest.raises(StoreBusy):
            agent.flush()
        state = agent.state["text"]
    agent.checkpoint("last")
    agent._store.close()
    found = labels(store_path)
    assert found == [*map(str, range(len(found) - 1)), "last"]
    with holdfast.open(store_path) as store:
        assert store.agent("a").state["text"] == state


def test_a_writer_that_hangs_makes_others_busy_and_its_death_lets_them_go_on(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.checkpoint("0")
        with limits({"BUSY_WAIT_S": 0.2}), kept(store_path):
            agent.state["n"] = 1
            with pytest.raises(StoreBusy, match=r"other writers kept the store for 0\.2 s; nothing was written"):
                agent.checkpoint("busy")
            with pytest.raises(StoreBusy):
                store.agent("b")
            with holdfast.open(store_path.with_name("other")) as other:
                other.agent("a").checkpoint("not their business")
        assert agent.dirty
        agent.checkpoint("1")
    assert labels(store_path) == ["0", "1"]


@pytest.mark.slow  # SQLite tries for ten seconds
def test_a_writer_that_is_stopped_as_it_says_where_the_log_ends_makes_others_busy(store_path):
    """It says it twice, so that nobody believes the half of it."""
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("0")
        with kept(store_path), (store_path / "store.db-shm").open("r+b") as index:
            index.seek(8)  # the number of the change, in the first of the two
            index.write(b"\xff\xff\xff\xff")
            index.flush()
            with pytest.raises(StoreBusy, match="stayed locked") as caught:
                store.agents()
            assert "stopped" in caught.value.hint
        store.agent("a").checkpoint("1")
        assert store.verify().ok
    assert labels(store_path) == ["0", "1"]


@pytest.mark.parametrize("end", ["store.close()", "", "sys.exit(3)"])
def test_the_end_of_a_program_waits_so_long_and_no_longer(store_path, end):
    """It writes what was accepted, if it can; another process that hangs does not keep it for ever."""
    program = (
        "from holdfast.store import database, writer\n"
        "database.CLOSE_WAIT_S, writer.BUSY_WAIT_S = (0.3, 60 if sys.argv[2] else 0.3)\n"
        "store = holdfast.open(path, durability='batched')\nagent = store.agent('a')\n"
        "agent.state['n'] = 0\nagent.checkpoint('0')\nstore.flush()\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        f"agent.state['n'] = 1\nagent.checkpoint('1')\n{end}\n"
    )
    for hanging in (False, True):
        child = start(program, store_path, "" if "close" in end else "at exit")
        assert child.stdout.readline() == "ready\n"
        began = time.monotonic()
        if hanging:
            with kept(store_path):
                child.communicate("go\n", timeout=180)
            assert time.monotonic() - began < 50
        else:
            child.communicate("go\n", timeout=180)
            assert labels(store_path) == ["0", "1"]
            with holdfast.open(store_path) as store:
                store.agent("a").rollback("0")


def test_threads_that_write_at_once_start_one_thread_beside_them_and_closing_ends_it(tmp_path, monkeypatch, request):
    monkeypatch.setattr(background, "EVERY", 2)
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    gate = threading.Barrier(8)
    for number in range(8):
        with holdfast.open(tmp_path / str(number)) as store:
            agents = [store.agent(name) for name in "abcdefgh"]
            threads = [threading.Thread(target=lambda one: (gate.wait(), add(one, 2, [])), args=(a,)) for a in agents]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [thread.name for thread in threading.enumerate()].count("holdfast-tending") == 1


def test_forks_amid_the_commits_of_other_threads_tear_nothing(store_path):
    program = (
        "import threading\nstore = holdfast.open(path)\nstop = threading.Event()\n"
        "def work(name):\n"
        "  agent = store.agent(name)\n"
        "  while not stop.is_set():\n    agent.state['n'] = agent.state.get('n', 0) + 1; agent.checkpoint()\n"
        "threads = [threading.Thread(target=work, args=(name,)) for name in 'ab']\n"
        "for thread in threads: thread.start()\n"
        "ends = []\n"
        "for number in range(5):\n"
        "  if not (child := os.fork()):\n"
        "    holdfast.open(path).agent(f'c{number}').checkpoint('child')\n"
        "    os._exit(0)\n"
        "  ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "stop.set()\n"
        "for thread in threads: thread.join()\n"
        "print(ends, store.verify().ok)\nstore.close()\n"
    )
    child = start(program, store_path)
    assert child.communicate(timeout=180)[0] == "[0, 0, 0, 0, 0] True\n"
    with holdfast.open(store_path) as store:
        assert {info.name for info in store.agents()} == {"a", "b", "c0", "c1", "c2", "c3", "c4"}


def test_a_forked_child_holds_the_database_in_its_own_right(store_path):
    """A stranger that believes to be the last one to close the database would fold its log and remove it."""
    child = start(
        "store = holdfast.open(path)\nstore.agent('parent').checkpoint('one')\n"
        "if os.fork(): os._exit(0)\n"
        "own = holdfast.open(path)\nagent = own.agent('a')\nagent.checkpoint('0')\n"
        "print('ready', flush=True)\nsys.stdin.readline()\nagent.checkpoint('1')\nown.close()\nprint('done')\n",
        store_path,
    )
    assert child.stdout.readline() == "ready\n"
    stranger = (
        "import sqlite3, sys\nwith sqlite3.connect(sys.argv[1]) as db: db.execute('SELECT * FROM agent').fetchall()"
    )
    subprocess.run([sys.executable, "-c", f"{stranger}\ndb.close()", str(store_path / "store.db")], check=True)
    assert (store_path / "store.db-wal").exists()
    assert child.communicate("go\n", timeout=180)[0] == "done\n"
    assert labels(store_path) == ["0", "1"]


@pytest.mark.parametrize("then", ["pass", "store.remove('b')"])
def test_numbers_that_another_process_was_given_are_not_given_again(store_path, then):
    """A checkpoint that goes around the queue guesses its numbers; rows that have them may be gone or elsewhere."""
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        for number in range(3):
            agent.checkpoint(str(number))
        other = start(
            "from holdfast.agent import branch\nbranch.SEAL_CHECKPOINTS = 10\n"
            "store = holdfast.open(path)\nb = store.agent('b')\n"
            "for n in range(11):\n  b.state['n'] = n\n  b.checkpoint()\n"
            f"print(b.head._point.n)\nb.close()\n{then}\nstore.close()\n",
            store_path,
        )
        newest = int(other.communicate(timeout=180)[0])
        agent.state["n"] = 3
        made = agent.checkpoint("3")  # on a line of its own: it brings a node, too
        assert made._point.n > newest
        agent.checkpoint("4")
        assert made.metadata["caller"][0] == Path(__file__).name
        assert store.verify().ok
    assert labels(store_path) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("tags", range(4))
def test_commits_write_over_blocks_that_the_log_has(store_path, tags):
    """Whatever came before them: a log that grows with each commit costs each of them a third more."""
    with holdfast.open(store_path) as store:
        agent = store.agent("a", when=None)
        agent.checkpoint("0")
        for number in range(tags):  # by the writer's thread, which learns how long the log is
            agent.tag(str(number))
        for number in range(100):  # directly: about four pages each
            agent.state["n"] = number
            agent.checkpoint()
        end = time.monotonic() + 60
        while (store_path / "store.db-wal").stat().st_size < 2**21:
            assert time.monotonic() < end, "the log is only as long as what is in it"
            time.sleep(0.01)


def test_nothing_is_put_behind_the_log_of_a_store_that_took_this_ones_place(store_path, tmp_path):
    """Its writers do not know of our lock: zeros could come to lie on a commit of theirs."""
    with holdfast.open(store_path) as store:
        agent, log = store.agent("a", when=None), store_path / "store.db-wal"
        agent.checkpoint("0")
        store_path.rename(tmp_path / "elsewhere")
        shutil.copytree(tmp_path / "elsewhere", store_path)
        engine = store._db.engine
        before = log.stat().st_size
        engine._log_bytes, engine._frames = 0, FOLD_FRAMES // 2
        engine._wanted.ring()
        while not engine._log_bytes or engine._folding.locked():  # it looks, then it is done
            time.sleep(0.001)
        after = log.stat().st_size
        shutil.rmtree(store_path)
        (tmp_path / "elsewhere").rename(store_path)
    assert after == before


def test_a_log_that_is_folded_during_a_commit_begins_anew(store_path):
    """Otherwise that commit lies behind what was folded, nobody folds it, and the log grows on and on."""
    with holdfast.open(store_path) as store:
        agent, engine = store.agent("a", when=None), store._db.engine
        for number in range(50):
            agent.state["n"] = number
            agent.checkpoint()
        during = []

        def commits():
            during.append(engine._frames)
            engine._frames = FOLD_FRAMES
            engine._wanted.ring()
            end = time.monotonic() + 0.3  # so long somebody who does not wait for this commit has time
            while engine._frames >= FOLD_FRAMES and time.monotonic() < end:
                time.sleep(0.001)
            return False

        engine._direct.set_commit_hook(commits)
        agent.state["n"] = 50
        agent.checkpoint()
        engine._direct.set_commit_hook(None)
        end = time.monotonic() + 60
        while engine._frames >= FOLD_FRAMES:
            assert time.monotonic() < end, "the log is not folded"
            time.sleep(0.001)
        agent.state["n"] = 51
        agent.checkpoint()
        _, frames, _ = engine._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        assert frames < 50 < 2 * during[0]


@pytest.mark.parametrize("last", ["checkpoint", "close"])
def test_a_signal_handler_that_saves_in_the_middle_of_a_commit_while_the_log_is_to_be_folded(store_path, last):
    """Who folds the log waits for that commit, which ends when the handler is through: it must not wait for that."""
    store = Store.opened(store_path)
    agent, other, engine = store.agent("a", when=None), store.agent("b", when=None), store._db.engine
    for one in (agent, other):
        one.checkpoint("0")
    inside = []

    def handler(*_):
        inside.append(engine._directing.locked())
        engine._frames = FOLD_FRAMES
        engine._wanted.ring()
        end = time.monotonic() + 0.3  # so long somebody who does not wait for this commit has time
        while time.monotonic() < end and fcntl.fcntl(engine._queue_fd, fcntl.F_OFD_GETLK, _ASK)[:2] == _FREE:
            time.sleep(0.001)
        other.state["n"] = 1
        other.checkpoint("1")
        if last == "close":
            store.close()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        check = engine.check_place
        engine.check_place = lambda: (setattr(engine, "check_place", check), signal.raise_signal(signal.SIGUSR1))
        agent.state["n"] = 1
        with suppress(StoreClosed):
            agent.checkpoint("1")
    finally:
        signal.signal(signal.SIGUSR1, before)
        store.close()
    assert inside == [True]
    with Store.opened(store_path, readonly=True) as store:
        assert store.agent("b").head.label == "1"
        assert last == "close" or store.agent("a").head.label == "1"


def test_an_agent_that_a_signal_handler_closes_in_the_middle_of_a_change_has_saved_what_was_accepted(store_path):
    child = start(
        "import signal\n"
        "from holdfast.store import writer\n"
        "writer.GATHER_S = 60.0\n"
        "store = holdfast.open(path, durability='batched')\n"
        "agent = store.agent('a', when=None)\n"
        "agent.state['l'] = [1]\n"
        "agent.checkpoint('accepted')\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (agent.close(), print('closed', flush=True), os._exit(0)))\n"
        "agent._document.guard = lambda: signal.raise_signal(signal.SIGUSR1)\n"
        "agent.state['l'].append(2)\n",
        store_path,
    )
    try:
        assert child.communicate(timeout=60)[0] == "closed\n"
    finally:
        child.kill()
    assert labels(store_path) == ["accepted"]


def test_a_process_that_is_forked_while_somebody_sweeps_keeps_nobody_from_reading(store_path):
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("0")
        inner, outer = os.pipe()
        with store._db.engine.sweeping() as alone:
            child = os.fork()
            if not child:
                os.close(outer)
                os.read(inner, 1)  # it does something else, for hours
                os._exit(0)
        try:
            assert alone
            reader = start("with holdfast.open(path)._db.moment():\n  print('read', flush=True)\n", store_path)
            read = threading.Thread(target=reader.stdout.readline, daemon=True)
            read.start()
            read.join(60)
            assert not read.is_alive(), "the child has the lock of whoever sweeps"
            reader.communicate()
        finally:
            os.close(outer)
            os.close(inner)
            os.waitpid(child, 0)


@pytest.mark.parametrize("what", ["appended", "set", "called"])
@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_a_checkpoint_leaves_nothing_to_the_garbage_collector(store_path, durability, what):
    """What it was made of is free at once: collecting that later takes longer than making it."""
    with holdfast.open(store_path, durability=durability) as store:
        agent = store.agent("a", when=None)
        agent.state["items"] = []

        def work(count):
            for number in range(count):
                if what == "appended":
                    agent.state["items"].append(number)
                elif what == "set":
                    agent.state[f"key {number % 5}"] = {"a": [number]}
                else:
                    looked(number)
                agent.checkpoint()
            store.flush()

        with agent:
            work(20)
            gc.collect()
            gc.disable()
            try:
                work(50)
                assert gc.collect() < 500, "it was 1,200 and more"
            finally:
                gc.enable()


@holdfast.tool(effect="read")
def looked(number):
    return number


def test_closing_gives_free_pages_back_to_the_disk(store_path):
    raw = {number.to_bytes(32, "big"): bytes(5_000) for number in range(50)}
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("0")
        size = (store_path / "store.db").stat().st_size
        store._db.change(lambda change: change.put_objects(Objects(raw)))
        store._db.change(lambda change: change.tx.do("DELETE FROM node WHERE length(data) = 5000"))
        assert store._db.engine.sizes()["free"] > 50 * 4096
    assert (store_path / "store.db").stat().st_size < size + 10 * 4096
    with holdfast.open(store_path) as store:
        assert (store._db.engine.sizes()["free"], store.verify().ok) == (0, True)


@pytest.mark.parametrize("behind", ["checkpoint", "record"])
def test_what_was_handed_over_behind_a_commit_whose_answer_was_lost_is_written(store_path, monkeypatch, behind):
    with holdfast.open(store_path, durability="batched") as store:
        agent, queue, lost = store.agent("a", when=None), store._db.writers._all[0]._queue, threading.Event()

        def step(number):  # one line for all, so that no node goes with any of them
            agent.state["n"] = number
            agent.checkpoint(str(number))

        for number in range(3):
            step(number)
        store.flush()
        real = store._db.engine.transaction

        def without_an_answer(*args):
            monkeypatch.undo()
            real(*args)
            lost.set()
            while not queue:
                time.sleep(0.001)
            raise Unsure("the answer was lost")

        monkeypatch.setattr(store._db.engine, "transaction", without_an_answer)
        step(3)
        assert lost.wait(60)
        if behind == "checkpoint":
            step(4)
        else:
            agent._writer.append([NewRecord(0, b"", b"0")], flush=False)
        flushed = threading.Thread(target=store.flush, daemon=True)
        flushed.start()
        flushed.join(60)
        assert not flushed.is_alive()
        assert agent._writer.firm.records == (behind == "record")
    assert labels(store_path) == ["0", "1", "2", "3", *["4"][: behind == "checkpoint"]]


def test_what_the_thread_is_writing_is_not_run_into_by_a_commit_that_takes_records_along(store_path, monkeypatch):
    with Store.opened(store_path) as store, limits({"GATHER_S": 600.0}):
        agent, engine = store.agent("a", when=None), store._db.engine
        agent.checkpoint("0")
        agent._writer.append([NewRecord(0, b"", b"0")], flush=True)  # from then on its number is known
        tried, begun, over = [], threading.Event(), threading.Event()
        direct = engine.direct
        monkeypatch.setattr(engine, "direct", lambda *args: (tried.append(args), direct(*args))[1])
        store._db.hand(writer.Job(lambda _: (begun.set(), over.wait(60))))
        assert begun.wait(60)
        agent._writer.append([NewRecord(0, b"", b"1")], flush=False)
        agent.state["n"] = 1
        thread = threading.Thread(target=agent.checkpoint, args=("1",))
        thread.start()
        while len(store._db.writers._all[0]._queue) < 2:  # it has handed over what it took back
            time.sleep(0.001)
        over.set()
        thread.join()
        assert not tried
        assert [one.label for one in agent.log()] == ["1", "0"]
