"""Histories that go from one store to another."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.agent import arrival
from holdfast.agent.graph import Graph
from holdfast.errors import AgentBusy, BadOption, Damaged, HistoriesDiverged, HoldfastError, ReadOnly, UnknownAgent
from holdfast.store.changes import Objects, pack_node
from holdfast.store.sqlite import Sqlite
from tests.agent import child
from tests.agent.damage import spoil
from tests.agent.transferred import assert_same, grow, plain, view
from tests.conftest import SOAK
from tests.faults.rich import small_limits


@pytest.fixture
def stores(tmp_path):
    with holdfast.open(tmp_path / "a") as source, holdfast.open(tmp_path / "b") as dest:
        yield source, dest


def numbers(store: holdfast.Store, name: str = "trip") -> list[int]:
    """The checkpoints that an agent sees, oldest first."""
    return [point.n for point in Graph(store._db.view, store._agent_row(name)).everything()][::-1]


def say(store: holdfast.Store, text: str, branch: str = "main") -> str:
    """One more checkpoint of the agent; its id."""
    agent = store.agent("trip", branch=branch)
    agent.state.setdefault("said", []).append(text)
    made = agent.checkpoint(text).id
    agent.close()
    return made


def test_an_agent_arrives_whole(stores):
    source, dest = stores
    plain(source, "trip", 5)
    (moved,) = source.push(dest).agents
    assert (moved.status, moved.arrived.checkpoints) == ("new", 5)
    assert_same(source, dest, "trip")
    before = dest.stats()["counts"]
    assert source.push(dest).agents[0].status == "unchanged"
    assert dest.stats()["counts"] == before, "nothing is written when nothing is missing"


@settings(max_examples=400 if SOAK else 8)
@given(seed=st.integers(0, 2**32))
def test_any_history_arrives_as_it_is(tmp_path_factory, seed):
    choose = random.Random(seed)
    here = tmp_path_factory.mktemp("t")
    with small_limits(), holdfast.open(here / "a") as source, holdfast.open(here / "b") as dest:
        for _ in range(choose.randrange(1, 4)):
            grow(source, "trip", choose, choose.randrange(1, 25))
            forgets = choose.random() < 0.3
            if forgets:
                rows = numbers(source)
                source._forget(source._agent_row("trip"), set(choose.sample(rows, min(len(rows), 3))))
            source.push(dest)
            if not forgets:
                assert_same(source, dest, "trip")
                continue
            # What was forgotten here stays there.
            report = dest.verify()
            assert report.ok, str(report)
            ours, theirs = view(source, "trip"), view(dest, "trip")
            assert set(ours["order"]) <= set(theirs["order"])
            assert all(ours["branches"][name][3:] == theirs["branches"][name][3:] for name in ours["branches"])
            break


def test_the_second_push_moves_only_what_is_new(stores):
    source, dest = stores
    plain(source, "trip", 300, size=4_000)
    first = source.push(dest).agents[0].arrived
    plain(source, "trip", 3, size=4_000)
    second = source.push(dest).agents[0].arrived
    assert (second.checkpoints, second.nodes, second.chunks) == (3, 0, 0)
    assert second.bytes < first.bytes / 20
    assert_same(source, dest, "trip", states=False)


def test_a_large_value_arrives_in_parts_and_once(stores):
    source, dest = stores
    agent = source.agent("trip")
    agent.state["film"] = os.urandom(20 * 2**20)
    agent.checkpoint("film")
    assert source.push(dest).agents[0].arrived.chunks == 3
    other = source.agent("other")
    other.state["film"] = agent.state["film"]
    other.checkpoint("the same")
    assert source.push(dest).agents[1].arrived.chunks == 0
    assert dest.agent("other", readonly=True).state["film"] == agent.state["film"]
    assert dest.verify().ok


def test_some_agents_and_another_name(stores):
    source, dest = stores
    for name in ("one", "two", "three"):
        plain(source, name, 2)
    source.push(dest, ["one", "three"])
    assert sorted(info.name for info in dest.agents()) == ["one", "three"]
    source.push(dest, ["two"], new_name="zwei")
    assert dest.agent("zwei", readonly=True).digest == source.agent("two", readonly=True).digest
    plain(source, "two", 1)
    assert source.push(dest, ["two"]).agents[0].status == "updated", "it is known by its uuid"
    assert len(dest.agents()) == 3
    with pytest.raises(BadOption):
        source.push(dest, ["one", "two"], new_name="both")
    assert dest.verify().ok


def test_another_agent_of_that_name_is_left_alone(stores):
    source, dest = stores
    say(source, "ours")
    theirs = say(dest, "theirs")
    with pytest.raises(HistoriesDiverged) as caught:
        source.push(dest)
    assert caught.value.agent == "trip"
    assert dest.agent("trip", readonly=True).head.id == theirs
    source.push(dest, new_name="trip-2")
    assert dest.verify().ok


def test_a_store_is_not_pushed_into_itself_or_a_reader(stores, tmp_path):
    source, _ = stores
    with pytest.raises(BadOption):
        source.push(source)
    plain(source, "trip", 1)
    holdfast.open(tmp_path / "c").close()
    with holdfast.open(tmp_path / "c", readonly=True) as reader, pytest.raises(ReadOnly):
        source.push(reader)


def test_a_writer_over_there_is_not_disturbed(stores, tmp_path):
    source, dest = stores
    say(source, "one")
    source.push(dest)
    say(source, "two")
    dest.close()
    holder = child.start("hold", tmp_path / "b", "trip")
    try:
        assert child.line(holder) == "ready"
        with holdfast.open(tmp_path / "b") as again:
            # It is busy, or, since the holder has made a checkpoint, the two have parted.
            with pytest.raises((AgentBusy, HistoriesDiverged)):
                source.push(again)
            assert again.agent("trip", readonly=True).head.label == "held"
    finally:
        child.end(holder)


def test_a_handle_of_this_process_is_a_writer_too(stores):
    source, dest = stores
    say(source, "one")
    source.push(dest)
    say(source, "two")
    agent = dest.agent("trip")
    with pytest.raises(AgentBusy):
        source.push(dest)
    agent.close()
    source.push(dest)
    assert_same(source, dest, "trip")


# -- both sides have gone on ----------------------------------------------------------------------------------------


def test_histories_that_parted_are_told_and_kept_apart(stores):
    source, dest = stores
    say(source, "common")
    source.push(dest)
    ours, theirs = say(source, "here"), say(dest, "there")
    with pytest.raises(HistoriesDiverged) as caught:
        source.push(dest)
    assert (caught.value.branch, caught.value.source_head, caught.value.dest_head) == ("main", ours, theirs)
    (moved,) = source.push(dest, beside=True).agents
    (name,) = moved.beside
    assert dest.agent("trip", readonly=True).head.id == theirs
    arrived = dest.agent("trip", branch=name, readonly=True)
    assert arrived.head.id == ours
    assert [one.label for one in arrived.log()] == ["here", "common"]
    assert dest.verify().ok
    # The next push goes on with that branch.
    more = say(source, "and on")
    assert source.push(dest).agents[0].beside == []
    assert dest.agent("trip", branch=name, readonly=True).head.id == more
    assert dest.verify().ok


def test_a_store_that_is_behind_loses_nothing(stores):
    source, dest = stores
    say(source, "common")
    source.push(dest)
    there = say(dest, "there")
    assert source.push(dest).agents[0].status == "ahead"
    assert dest.agent("trip", readonly=True).head.id == there
    # Back and forth.
    assert source.pull(dest).agents[0].status == "updated"
    assert_same(source, dest, "trip")
    say(source, "here again")
    assert source.push(dest).agents[0].status == "updated"
    assert_same(source, dest, "trip")


def test_a_rollback_is_followed_and_one_over_there_is_kept(stores):
    source, dest = stores
    first = say(source, "one")
    say(source, "two")
    source.push(dest)
    agent = source.agent("trip")
    agent.rollback(f"id:{first}")
    agent.close()
    source.push(dest)
    assert_same(source, dest, "trip")
    assert dest.agent("trip", readonly=True).head.id == first
    other = dest.agent("trip")
    other.rollback(next(one for one in other.log(all=True) if one.label == "two"))
    stands = other.head.id
    other.close()
    assert source.push(dest).agents[0].status == "ahead"
    assert dest.agent("trip", readonly=True).head.id == stands
    say(source, "three")
    with pytest.raises(HistoriesDiverged):
        source.push(dest)


def test_tags_follow_whoever_spoke_last(stores):
    source, dest = stores
    first, second = say(source, "one"), say(source, "two")
    source.tag("trip", "good", f"id:{first}")
    source.tag("trip", "old", f"id:{first}")
    source.push(dest)
    dest.tag("trip", "good", f"id:{second}")
    dest.tag("trip", "mine", f"id:{second}")
    source.untag("trip", "old")
    source.mark("trip", f"id:{first}", "suspect", "odd")
    assert source.push(dest).agents[0].status == "updated"
    agent = dest.agent("trip", readonly=True)
    assert agent.at("good").id == second
    assert agent.at("mine").id == second
    assert "old" not in agent.tags()
    assert agent.at(f"id:{first}").validity == "suspect"
    source.mark("trip", f"id:{first}", "good")
    source.push(dest)
    assert dest.agent("trip", readonly=True).at(f"id:{first}").validity == "good"
    assert dest.verify().ok


# -- clones and what was forgotten ----------------------------------------------------------------------------------


def test_a_clone_arrives_without_its_origin(stores):
    source, dest = stores
    with small_limits():
        grow(source, "trip", random.Random(1), 40)
        source.clone("trip", "copy")
        grow(source, "copy", random.Random(2), 20)
        grow(source, "trip", random.Random(3), 20)
        source.clone("copy", "copy of a copy")
        source.push(dest, ["copy of a copy"])
        assert_same(source, dest, "copy of a copy")
        source.remove("trip")
        source.push(dest)
        assert_same(source, dest, "copy")
        assert dest.remove("copy of a copy").done
        assert_same(source, dest, "copy")


def test_a_history_with_gaps_arrives_as_one_line(stores, tmp_path):
    source, dest = stores

    def lines(store):
        agent = store.agent("trip", readonly=True)
        log = [(one.id, one.previous_id) for one in agent.log()]
        return log, [one.id for one in agent.log(at="m12")], [one.id for one in agent.abandoned()]

    with source.agent("trip") as agent:
        for number in range(30):
            agent.state[f"k{number % 3}"] = number
            agent.checkpoint(f"m{number}")
        agent.rollback("m25")
        agent.checkpoint("other")
    source.retain(holdfast.Policy(last=2, labels=["m4", "m12", "m28"]))
    assert [len(found) for found in lines(source)] == [4, 2, 1]
    source.push(dest)
    assert lines(dest) == lines(source)
    # Another gap, above what is there; and one that is made over there.
    with source.agent("trip") as agent:
        for number in range(30, 40):
            agent.state["k0"] = number
            agent.checkpoint(f"m{number}")
    source.retain(holdfast.Policy(last=1, labels=["m4", "m12", "m34", "other"]))
    source.push(dest)
    assert lines(dest)[0][:2] == lines(source)[0][:2]
    assert [one.label for one in dest.agent("trip", readonly=True).log()] == ["m39", "m34", "other", "m25", "m12", "m4"]
    dest.retain(holdfast.Policy(last=1, labels=["m4", "m34"]))
    assert [one.label for one in dest.agent("trip", readonly=True).log()] == ["m39", "m34", "m4"]
    source.export(tmp_path / "file", ["trip"])
    holdfast.import_bundle(tmp_path / "file", tmp_path / "third")
    with holdfast.open(tmp_path / "third") as third:
        assert lines(third) == lines(source)
        for store in (source, dest, third):
            assert store.verify().ok


def test_what_was_forgotten_on_the_way_leaves_a_mark(stores):
    source, dest = stores
    with small_limits():
        plain(source, "trip", 12)
        source._forget(source._agent_row("trip"), set(numbers(source)[2:5]))
        source.push(dest)
        assert_same(source, dest, "trip")
        # Everything that is there is forgotten here, and more is made: it arrives, and what is there stays.
        count = len(numbers(source))
        plain(source, "trip", 6)
        source._forget(source._agent_row("trip"), set(numbers(source)[: count + 1]))
        source.push(dest)
        assert dest.verify().ok
        assert len(list(dest.agent("trip", readonly=True).log(all=True))) == 9 + 5
        assert dest.agent("trip", readonly=True).digest == source.agent("trip", readonly=True).digest


# -- effects --------------------------------------------------------------------------------------------------------


@holdfast.tool(name="transfer.absent", effect="write", probe=lambda _effect: holdfast.Absent())
def charge(amount: int) -> str:
    raise KeyboardInterrupt


@holdfast.durable
def pay(agent):
    agent.state["paid"] = charge(3)


@holdfast.durable
def wait(agent):
    return [agent.wait_for("go"), agent.wait_for("go")]


def test_nobody_knows_whether_the_writer_of_another_store_is_dead(stores):
    source, dest = stores
    agent = source.agent("trip")
    with pytest.raises(KeyboardInterrupt):
        agent.run(pay)
    agent.close()
    source.push(dest)
    assert_same(source, dest, "trip")
    with pytest.raises(holdfast.InDoubt), dest.agent("trip") as there:
        there.run(pay)


def test_a_signal_that_was_received_is_not_received_again(stores):
    source, dest = stores
    source.agent("filler").checkpoint("so that numbers differ")
    agent = source.agent("trip")
    source.signal("trip", "go", 1)
    with pytest.raises(holdfast.Waiting):
        agent.run(wait, wait=False)
    agent.close()
    source.push(dest, ["trip"])
    dest.signal("trip", "go", 2)
    with dest.agent("trip") as there:
        assert there.run(wait) == [1, 2]


def test_between_stores_with_and_without_a_key(tmp_path):
    key = os.urandom(32)
    with (
        holdfast.open(tmp_path / "plain") as one,
        holdfast.open(tmp_path / "secret", key=key) as two,
        holdfast.open(tmp_path / "plain again") as three,
        small_limits(),
    ):
        grow(one, "trip", random.Random(9), 30)
        for _ in range(2):
            one.push(two)
            two.push(three)
            assert_same(one, two, "trip", states=False)
            assert_same(one, three, "trip")
            grow(one, "trip", random.Random(10), 8)
        two.export(tmp_path / "file", ["trip"])
        three.remove("trip")
        two.import_bundle(tmp_path / "file", key=key)
        three.import_bundle(tmp_path / "file", key=key)
        assert_same(two, three, "trip")


# -- interruptions --------------------------------------------------------------------------------------------------


def killed_push(here, when: int) -> bool:
    """Push in a child that is killed around its ``when``-th transaction; True if it got to the end before."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            count = 0
            real = Sqlite.transaction

            def transaction(self, work, begun=None):
                nonlocal count
                count += 1
                if count == when // 2 + 1 and when % 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(self, work, begun)
                if count == when // 2 + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            with small_limits(), holdfast.open(here / "a", readonly=True) as source, holdfast.open(here / "b") as dest:
                Sqlite.transaction = transaction
                source.push(dest)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


@pytest.mark.parametrize("again", [False, True])
def test_killed_at_any_point_it_goes_on(tmp_path, rounds, monkeypatch, again):
    monkeypatch.setattr(arrival, "ROWS_AT_ONCE", 4)
    with small_limits(), holdfast.open(tmp_path / "a") as source:
        grow(source, "trip", random.Random(7), 40)
        plain(source, "other", 12)
    when, most = 0, 0
    while True:
        # ``again``: the same store goes on from one death to the next; otherwise each begins with nothing.
        here = tmp_path if again else tmp_path / str(when)
        if not again:
            here.mkdir()
            (here / "a").symlink_to(tmp_path / "a")
        done = killed_push(here, when)
        with small_limits(), holdfast.open(here / "a", readonly=True) as source, holdfast.open(here / "b") as dest:
            report = dest.verify()
            assert report.ok, f"killed at {when}: {report}"
            there = {info.name for info in dest.agents() if info.head is not None}
            for name in there:
                assert view(dest, name, states=False)["branches"] == view(source, name, states=False)["branches"]
            arrived = dest.stats()["counts"]["checkpoint"]
            assert arrived >= most if again else True, "what has arrived stays"
            most = arrived
            if done or not again:
                source.push(dest)
                for name in ("trip", "other"):
                    assert_same(source, dest, name, states=False)
        if done:
            break
        when += rounds(23, 1)


def test_what_is_still_arriving_is_not_there_yet(stores, tmp_path):
    source, dest = stores
    plain(source, "trip", 5)
    plain(source, "late", 3)
    with source.agent("trip") as agent:
        agent.branch("side").close()

    class Cut(Exception):
        pass

    def cut(what, _done, _total):
        if what == "checkpoints of late":
            raise Cut

    with pytest.raises(Cut):
        source.push(dest, progress=cut)
    assert [info.name for info in dest.agents()] == ["trip"]
    with pytest.raises(UnknownAgent):
        dest.agent("late", readonly=True)
    with pytest.raises(UnknownAgent):
        dest.export(tmp_path / "file", ["late"])
    with holdfast.open(tmp_path / "third") as third:
        assert [one.name for one in dest.push(third).agents] == ["trip"]
    assert dest.drill(sample=100).total == 5
    dest.retain(holdfast.Policy(last=1))
    assert dest.verify().ok
    assert {one.name: one.status for one in source.push(dest).agents}["late"] == "new"
    assert {info.name: info.branches for info in dest.agents()} == {"late": ["main"], "trip": ["main", "side"]}
    assert_same(source, dest, "late")


def test_a_source_that_is_written_and_cleared_meanwhile(stores):
    source, dest = stores
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                say(source, f"{number} " * 50)
                if number % 10 == 0:
                    source._forget(source._agent_row("trip"), set(numbers(source)[-8:-3]))
        except BaseException as error:
            failures.append(error)

    say(source, "first")
    with small_limits():
        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(8):
                source.push(dest)
        finally:
            stop.set()
            thread.join()
        assert not failures, failures
        source.push(dest)
        report = dest.verify()
        assert report.ok, str(report)
        assert dest.agent("trip", readonly=True).digest == source.agent("trip", readonly=True).digest


def test_a_node_that_was_left_without_what_is_below_it(stores):
    """A transfer died, and a removal over there took what the node that it had written names."""
    source, dest = stores
    with small_limits():
        plain(source, "trip", 12)
        view = source._db.view
        names = [view.cipher.unname("node", name) for (name,) in view.reader.run("SELECT digest FROM node")]
        inner = {name: pack_node(raw) for name, raw in view.nodes(names).items() if raw[1]}
        dest._db.change(lambda change: change.put_objects(Objects(inner)))
        source.push(dest)
        assert_same(source, dest, "trip")


def test_damage_at_the_source_does_not_travel(stores, tmp_path):
    source, dest = stores
    plain(source, "trip", 3)
    source.push(dest)
    there = view(dest, "trip")
    plain(source, "trip", 3)
    source.close()
    assert spoil(tmp_path / "a", "UPDATE loose SET data = zeroblob(length(data)) WHERE n = 5")
    with holdfast.open(tmp_path / "a") as again, pytest.raises(HoldfastError) as caught:
        again.push(dest)
    assert isinstance(caught.value, Damaged)
    assert view(dest, "trip")["branches"] == there["branches"]
    assert dest.verify().ok
