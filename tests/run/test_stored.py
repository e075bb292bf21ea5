"""The ledger in a store: what an agent's branch inherits, keeps, proves and gives back."""

from __future__ import annotations

import random
import shutil
import threading
from contextlib import suppress

import pytest

import holdfast
from holdfast.agent.branch import RECORD_MAX_BYTES
from holdfast.agent.store import Store
from holdfast.codec.types import REGISTRY
from holdfast.errors import BadOption, Damaged, DiskFull, Fenced, ForkedHandle
from holdfast.run import records as rec
from holdfast.run.arguments import fetch, stow
from holdfast.run.line import Line, entries, patience_s
from holdfast.store import writer as writers
from holdfast.store.changes import NewRecord
from holdfast.store.cipher import PLAIN
from holdfast.store.database import open_database
from tests.agent.damage import flipped, rows, spoil
from tests.compat.make_store import act


def open_store(path, **options) -> Store:
    """A store without what the room of runs adds: nobody else writes records."""
    return Store.opened(path, **options)


def ledger_of(agent) -> Line:
    return Line(agent._store._db, agent._branch.b, agent._writer)


def intent(path: str) -> rec.Intent:
    return rec.Intent(1, "", path, "book", "write", b"\xc0", b"f", "k")


def done(path: str) -> rec.Done:
    return rec.Done(2, "", path, "value", value=b"\xc3")


def paths(ledger) -> list[str]:
    return [record.path for _, record in ledger.records()]


def save(agent, label, *records, **blocks):
    writer = agent._writer
    pending = writer.capture(agent._document, label, note=lambda _: entries(*records), **blocks)
    return agent._remember(writer.finish(pending))


def effects_of(checkpoint) -> tuple[int, bytes]:
    """Where the line stood when it was made."""
    return checkpoint._manifest.effects


@pytest.fixture
def slowly(monkeypatch):
    """What nobody waits for waits for company, for as long as the test takes."""
    monkeypatch.setattr(writers, "GATHER_S", 600.0)


def without_room(store, monkeypatch, now):
    """The disk of a store is full whenever ``now()`` says so."""
    engine = store._db.engine
    real = engine.transaction

    def transaction(work, begun=None):
        if now():
            raise DiskFull("no room")
        return real(work, begun)

    monkeypatch.setattr(engine, "direct", lambda sql, args: False)
    monkeypatch.setattr(engine, "transaction", transaction)


@pytest.fixture
def store(store_path):
    with open_store(store_path) as opened:
        yield opened


@pytest.fixture
def agent(store):
    agent = store.agent("a")
    agent.state["n"] = 0
    agent.checkpoint("first")
    return agent


@pytest.fixture
def ledger(agent):
    return ledger_of(agent)


def test_records_come_back_as_they_were(agent, ledger, store_path):
    written = [
        rec.Begin(1, "r", "f", b"\xc0", b"fp", b"s" * 32, code="c"), intent("0"), done("0"), done("1"),
        rec.Doubt(3, "r", "0", 2, "why"), rec.Saved(4, "r", "2", b"i" * 32, b"d" * 32, ["plan"]),
        rec.End(5, "r", "finished", b"\xc0"), rec.Note(6, "", "mode", "x", b"\xc2"),
    ]  # fmt: skip
    for number, record in enumerate(written, 1):
        assert ledger.append(record, flush=number % 2 == 0) == number
    assert [record for _, record in ledger.records()] == written
    assert [number for number, _ in ledger.records(after=5)] == [6, 7, 8]
    seen = Line(agent._store._db, agent._branch.b)
    assert [type(record).__name__ for _, record in seen.marked()] == ["Begin", "Doubt", "End", "Note"]
    assert seen.count == agent._writer.position[0] == 8
    agent._store.close()
    with open_store(store_path) as again:
        reopened = ledger_of(again.agent("a"))
        assert [record for _, record in reopened.records()] == written
        assert reopened.append(done("9")) == 9
        assert again.verify().ok
        assert again.verify().checked["effects"] == 9


@pytest.mark.usefixtures("slowly")
def test_long_values_are_nodes_and_are_read_before_and_after_the_flush(ledger):
    for value in ({"rows": [{"n": number, "text": "x" * 50} for number in range(2_000)]}, "y" * 300_000):
        stowed = stow(value, REGISTRY)
        assert isinstance(stowed.value, list)
        ledger.append(rec.Done(1, "", "0", "value", value=stowed.value), stowed=stowed)
        assert fetch(stowed.value, ledger, REGISTRY) == value
    missing = [b"m" * 32]
    with pytest.raises(Damaged, match="missing"):
        fetch(missing, ledger, REGISTRY)


def test_a_record_that_is_too_long_is_refused(ledger):
    with pytest.raises(BadOption):
        ledger.append(rec.Done(1, "", "0", "value", value=bytes(RECORD_MAX_BYTES)))
    assert ledger.append(done("0"), flush=True) == 1


# -- checkpoints ------------------------------------------------------------------------------------------


def test_a_checkpoint_that_fails_gives_its_records_back(agent, ledger, monkeypatch):
    ledger.append(done("0"), flush=True)
    agent.state["n"] = 5
    full = threading.Event()
    full.set()
    without_room(agent._store, monkeypatch, full.is_set)
    for waiting in (False, True):
        if waiting:
            ledger.append(done("1"))  # accepted, and tried again when there is room
        with pytest.raises(DiskFull):
            save(agent, "fails", done("of the checkpoint"))
    assert ledger.count == 2
    full.clear()
    assert ledger.append(done("2"), flush=True) == 3
    made = save(agent, "works", done("of the checkpoint"))
    assert effects_of(made)[0] == 3
    assert paths(ledger) == ["0", "1", "2", "of the checkpoint"]
    assert agent.state["n"] == 5
    assert agent._store.verify().ok


@pytest.mark.usefixtures("slowly")
def test_an_intent_that_cannot_be_written_never_was(agent, ledger, monkeypatch):
    full = threading.Event()
    without_room(agent._store, monkeypatch, full.is_set)
    ledger.append(done("read"))
    full.set()
    for _ in range(2):
        with pytest.raises(DiskFull):
            ledger.append(intent("0"), flush=True)
        assert ledger.count == 1
    full.clear()
    assert ledger.append(intent("1"), flush=True) == 2
    assert paths(ledger) == ["read", "1"]
    assert agent._store.verify().ok


@pytest.mark.usefixtures("slowly")
def test_an_outcome_is_recorded_as_it_was_when_it_was_gathered(ledger):
    """It is encoded later; whoever has made it may use it again meanwhile."""
    outcome = done("read")
    ledger.gather(outcome)
    outcome.how, outcome.value = "error", None
    ledger.gather(outcome)
    assert [(one.how, one.value) for _, one in ledger.records()] == [("value", b"\xc3"), ("error", None)]


@pytest.mark.parametrize(
    ("took_us", "waits_s"), [(0, 0.05), (10_000, 0.04), (50_000, 0), (3_000_000, 0), (-(9**9), 0.05)]
)
def test_a_read_waits_the_less_the_longer_its_call_took(took_us, waits_s):
    """Both together come to 50 ms, whatever the clock does; one that took longer waits as little as anything."""
    at = 10**15
    read = rec.Done(at + took_us, "", "0", "value", started=at, value=b"\xc3")
    assert patience_s(read) == pytest.approx(waits_s)


def test_threads_share_a_ledger_and_checkpoints_are_taken_meanwhile(agent, ledger):
    def work(name):
        for number in range(20):
            ledger.append(intent(f"{name}/{number}"), flush=True)
            (ledger.gather if number % 2 else ledger.append)(done(f"{name}/{number}"))

    threads = [threading.Thread(target=work, args=(str(name),)) for name in range(5)]
    for thread in threads:
        thread.start()
    for number in range(10):
        agent.state["n"] = number
        save(agent, f"step {number}", done(f"saved {number}")) if number % 2 else agent.checkpoint(f"step {number}")
    for thread in threads:
        thread.join()
    ledger.flush()
    found = paths(ledger)
    assert len(found) == ledger.count == 205
    for name in range(5):
        mine = [path for path in found if path.startswith(f"{name}/")]
        assert mine == [f"{name}/{number}" for number in range(20) for _ in range(2)]
    report = agent._store.verify()
    assert report.ok, str(report)


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_a_disk_that_is_full_now_and_then_loses_nothing_that_was_accepted(store_path, durability, monkeypatch):
    chance = random.Random(7)
    store = open_store(store_path, durability=durability)
    agent = store.agent("a")
    ledger = ledger_of(agent)
    failing = threading.Event()
    without_room(store, monkeypatch, lambda: failing.is_set() and chance.random() < 0.3)
    accepted, refused = [], []

    def attempt(path, change):
        try:
            change()
            accepted.append(path)
        except DiskFull:
            refused.append(path)

    def work(name):
        for number in range(40):
            path = f"{name}/{number}"
            if number % 3:
                attempt(path, lambda path=path, number=number: ledger.append(done(path), flush=number % 2 == 0))
            else:
                attempt(path, lambda path=path: ledger.gather(done(path)))

    failing.set()
    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for number in range(20):
        agent.state["n"] = number
        attempt(f"s/{number}", lambda path=f"s/{number}": save(agent, path, done(path)))
    for thread in threads:
        thread.join()
    failing.clear()
    ledger.flush()
    agent.checkpoint("end")
    found = paths(ledger)
    assert len(found) == ledger.count
    assert set(accepted) <= set(found)
    assert set(found) - set(accepted) <= set(refused)  # one that others stood on by then
    for name in "abcds":
        assert [path for path in found if path in accepted and path[0] == name] == [
            path for path in accepted if path[0] == name
        ]
    report = store.verify()
    assert report.ok, str(report)
    store.close()


# -- branches -------------------------------------------------------------------------------------------------


def test_removing_an_agent_removes_its_line_but_what_a_clone_needs(store, agent, ledger):
    value = stow([f"{number}: of the first" for number in range(2_000)], REGISTRY)
    other = stow([f"{number}: of the second" for number in range(2_000)], REGISTRY)
    ledger.append(rec.Done(1, "", "0", "value", value=value.value), stowed=value, flush=True)
    agent.state["n"] = 1
    agent.checkpoint("second")
    ledger.append(rec.Done(1, "", "1", "value", value=other.value), stowed=other, flush=True)
    agent.close()
    store.copy("a", "b")
    store.remove("a")
    view = store._db.view
    assert [record.i for record in view.records([1, 2])] == [1]
    assert not view.has_nodes(other.nodes)
    assert store.verify().ok
    with store.agent("b") as clone:
        copy = ledger_of(clone)
        assert paths(copy) == ["0"]
        assert fetch(value.value, copy, REGISTRY)[7] == "7: of the first"
        assert copy.append(done("1"), flush=True) == 2
    assert store.verify().ok
    store.remove("b")
    assert view.counts()["record"] == 0
    assert not view.has_nodes([*value.nodes, *other.nodes])
    report = store.verify()
    assert report.ok, str(report)
    third = store.agent("c")
    assert ledger_of(third).append(done("0"), flush=True) == 1
    assert view.records([4])  # numbers are never given twice
    assert store.verify().ok


def test_forgetting_checkpoints_keeps_the_line(store, agent, ledger):
    value = stow([f"{number}: text" for number in range(2_000)], REGISTRY)
    agent.state["big"] = [f"{number}: text" for number in range(2_000)]
    agent.checkpoint("big")
    ledger.append(rec.Done(1, "", "0", "value", value=value.value), stowed=value, flush=True)
    del agent.state["big"]
    agent.checkpoint("small")
    number, row = agent.at("big")._point.n, agent._row
    agent.close()
    store._forget(row, {number})
    again = ledger_of(store.agent("a"))
    assert paths(again) == ["0"]
    assert fetch(value.value, again, REGISTRY)[3] == "3: text"
    assert store.verify().ok


def test_who_was_passed_over_is_fenced_and_known_to_live(store, agent, ledger, store_path):
    ledger.append(intent("0"), flush=True)
    other = Store(str(store_path), open_database(store_path), (False, "commit", False, False))  # as another process
    taken = other.agent("a", takeover=True)
    branch, generation = agent._branch.uuid, agent._writer.generation
    assert other._db.leases.alive(branch, generation)
    for path in ("1", "2"):
        with pytest.raises(Fenced):
            ledger.append(intent(path), flush=True)
    taken.close()
    agent.close()
    assert not other._db.leases.alive(branch, generation)
    other.close()
    assert paths(ledger_of(store.agent("a"))) == ["0"]


def test_a_fork_is_refused_without_waiting(agent, ledger):
    import os

    held, forked = threading.Event(), threading.Event()

    def hold():
        with agent._writer.lock:
            held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        try:
            ledger.append(done("child"))
        except ForkedHandle:
            os._exit(7)
        os._exit(1)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# -- damage -----------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(store_path):
    """Five records, checkpoints before and after the third, a branch that inherits three."""
    with open_store(store_path) as store:
        agent = store.agent("a")
        agent.state["n"] = 0
        agent.checkpoint("first")
        ledger = ledger_of(agent)
        value = stow(list(range(20_000)), REGISTRY)
        ledger.append(intent("1"), done("2"), flush=True)
        ledger.append(rec.Done(1, "", "3", "value", value=value.value), stowed=value, flush=True)
        agent.state["n"] = 1
        agent.checkpoint("second")
        side = agent.branch("side")
        side.close()
        ledger.append(done("4"), done("5"), flush=True)
    return store_path


def resum(path, r) -> None:
    """Make the sum of a record fit again, as somebody would who knows the format."""
    ((*columns, _),) = rows(path, "SELECT * FROM record WHERE r = ?", r)
    spoil(path, "UPDATE record SET sum = ? WHERE r = ?", PLAIN.stored("record", *columns)[-1], r)


def problems(path) -> str:
    with open_store(path, readonly=True) as store:
        report = store.verify()
        assert not report.ok
        return str(report)


def alter(path, r, body) -> None:
    """Let a record have another body, of which all but the chain knows."""
    about = NewRecord(0, b"", body).digest
    assert spoil(path, "UPDATE record SET about = ?, body = ? WHERE r = ?", about, body, r) == 1
    resum(path, r)


def test_verify_and_the_ledger_notice_a_record_that_is_another(damaged):
    spoil(damaged, "UPDATE record SET body = ? WHERE r = 2", done("other").encode())
    assert "record 2" in problems(damaged)
    alter(damaged, 2, done("other").encode())
    assert problems(damaged)
    with open_store(damaged) as store, pytest.raises(Damaged):
        list(Line(store._db, 1).records())


def test_verify_and_the_ledger_notice_swapped_records(damaged):
    bodies = dict(rows(damaged, "SELECT r, body FROM record"))
    for r, other in ((4, 5), (5, 4)):
        alter(damaged, r, bodies[other])
    assert problems(damaged)
    with open_store(damaged) as store, pytest.raises(Damaged, match="not those that were written"):
        list(Line(store._db, 1).records())


def test_verify_notices_a_missing_node_of_a_value(damaged):
    ((about,),) = rows(damaged, "SELECT about FROM record WHERE r = 3")
    assert spoil(damaged, "DELETE FROM node WHERE digest = ?", about[32:]) == 1
    assert f"node {about[32:40].hex()} is missing" in problems(damaged)


def test_verify_notices_every_record_that_is_gone(store_path, tmp_path):
    """Of every kind, inherited ones too, and what an agent that is gone left to its clone."""
    with holdfast.Store.opened(store_path) as store:
        act(store)
        assert store.verify().ok
    for (row,) in rows(store_path, "SELECT r FROM record"):
        copy = tmp_path / f"record-{row}"
        shutil.copytree(store_path, copy)
        assert spoil(copy, "DELETE FROM record WHERE r = ?", row) == 1
        with suppress(Damaged), open_store(copy, readonly=True) as store:
            assert not store.verify().ok, row


# -- recovering -------------------------------------------------------------------------------------------------


def test_recovery_inherits_the_whole_line(damaged):
    """Also what happened after the checkpoint that is gone back to: outside, it happened."""
    ((data,),) = rows(damaged, "SELECT data FROM loose WHERE n = 2")
    spoil(damaged, "UPDATE loose SET data = ? WHERE n = 2", flipped(data))
    with open_store(damaged) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-1"
        assert agent.state["n"] == 0
        ledger = ledger_of(agent)
        assert paths(ledger) == ["1", "2", "3", "4", "5"]
        assert ledger.append(done("6"), flush=True) == 6
        agent.close()
        assert paths(ledger_of(store.agent("a", recover=True))) == ["1", "2", "3", "4", "5", "6"]


def test_recovery_takes_the_records_that_are_whole(damaged):
    spoil(damaged, "UPDATE record SET body = x'80' WHERE r = 5")
    with open_store(damaged) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-1"
        assert agent.state["n"] == 1
        assert "after record 4" in agent.recovery
        assert paths(ledger_of(agent)) == ["1", "2", "3", "4", "records 5 to 5"], "the last stands for what is gone"
        report = store.verify()
        assert all("recovered" not in str(problem) for problem in report.problems)


def test_recovery_takes_what_checkpoints_speak_for_where_records_are_others(damaged):
    alter(damaged, 5, done("other").encode())
    with open_store(damaged) as store:
        agent = store.agent("a", recover=True)
        assert "after record 3" in agent.recovery
        assert paths(ledger_of(agent)) == ["1", "2", "3", "records 4 to 4"]


def test_recovery_of_a_line_without_a_checkpoint(store_path):
    with open_store(store_path) as store:
        ledger_of(store.agent("a")).append(done("0"), done("1"), flush=True)
    spoil(store_path, "DELETE FROM record WHERE i = 2")
    with open_store(store_path, recover=True) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-1"
        assert paths(ledger_of(agent)) == ["0", "records 2 to 2"]
        assert "record 1" in agent.recovery
