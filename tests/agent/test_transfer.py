"""Histories that go from one store to another, and what happens when both have gone on, or something comes between."""

from __future__ import annotations

import os
import random
from contextlib import closing
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ormsgpack import Ext, packb

import holdfast
from holdfast import Policy
from holdfast.agent import arrival, crashes
from holdfast.agent.arrival import Arrival
from holdfast.agent.history import Blank, Reading
from holdfast.codec.operations import SET, Operation
from holdfast.errors import AgentBusy, BadOption, CorruptValue, Damaged, HistoriesDiverged, ReadOnly, UnknownAgent
from holdfast.store.changes import Objects, pack_node
from holdfast.store.cipher import digest
from holdfast.store.rows import chunk_digest
from holdfast.store.sqlite import Sqlite
from tests.agent import child
from tests.agent.damage import spoil
from tests.agent.histories import act, assert_same, forget, grow, numbers, plain, sound, view
from tests.conftest import SOAK
from tests.faults.rich import small_limits
from tests.lives import dies
from tests.memory import memory


@pytest.fixture
def stores(tmp_path):
    with holdfast.open(tmp_path / "a") as source, holdfast.open(tmp_path / "b") as dest:
        yield source, dest


def say(store, text, branch="main"):
    """One more checkpoint of the agent; its id."""
    with closing(store.agent("trip", branch=branch)) as agent:
        agent.state.setdefault("said", []).append(text)
        return agent.checkpoint(text).id


def head(store, name="trip", branch="main"):
    return store.agent(name, branch=branch, readonly=True).head.id


def standing(store, name="trip"):
    """Where the branches of an agent stand, and what is on their lines."""
    return {branch: one[2:] for branch, one in view(store, name, states=False)["branches"].items()}


# -- what arrives -----------------------------------------------------------------------------------------------------


def test_an_agent_arrives_whole(stores):
    source, dest = stores
    plain(source, "trip", 5)
    (moved,) = source.push(dest).agents
    assert (moved.status, moved.arrived.checkpoints) == ("new", 5)
    assert_same(source, dest, "trip")
    before = dest.stats()["counts"]
    assert source.push(dest).agents[0].status == "unchanged"
    assert dest.stats()["counts"] == before, "nothing is written when nothing is missing"


def test_only_what_is_new_moves(stores):
    source, dest = stores
    plain(source, "trip", 270, size=1_000)
    first = source.push(dest).agents[0].arrived
    plain(source, "trip", 3, size=1_000)
    second = source.push(dest).agents[0].arrived
    assert (second.checkpoints, second.nodes, second.chunks) == (3, 0, 0)
    assert second.bytes < first.bytes / 20
    assert head(dest) == head(source)
    assert dest.stats()["counts"]["segment"], "it is folded as usual"
    sound(dest)


def test_a_large_value_arrives_in_parts_and_once(stores, monkeypatch):
    source, dest = stores
    monkeypatch.setattr(arrival, "COME_BYTES", 10 * 2**20)
    film = os.urandom(20 * 2**20)
    with closing(source.agent("trip")) as agent, closing(source.agent("other")) as other:
        agent.state["film"] = other.state["film"] = film
        agent.checkpoint("film")
        other.checkpoint("the same")
    assert [one.arrived.chunks for one in source.push(dest).agents] == [3, 0]
    assert all(dest.agent(name, readonly=True).state["film"] == film for name in ("trip", "other"))
    sound(dest)


def test_some_agents_and_another_name(stores):
    source, dest = stores
    for name in ("one", "two", "three"):
        plain(source, name, 2)
    source.push(dest, ["one", "three"])
    assert sorted(info.name for info in dest.agents()) == ["one", "three"]
    source.push(dest, ["two"], new_name="zwei")
    assert_same(source, dest, "two", "zwei")
    plain(source, "two", 1)
    assert source.push(dest, ["two"]).agents[0].status == "updated", "it is known by its uuid"
    assert len(dest.agents()) == 3
    with pytest.raises(BadOption):
        source.push(dest, ["one", "two"], new_name="both")
    with pytest.raises(UnknownAgent):
        source.push(dest, ["nobody"])


def test_a_clone_is_refs_and_needs_no_origin(stores):
    source, dest = stores
    with small_limits():
        grow(source, "trip", random.Random(1), 40)
        source.push(dest)
        source.copy("trip", "copy")
        moved = {one.name: one for one in source.push(dest).agents}["copy"]
        assert (moved.status, moved.arrived.checkpoints, moved.arrived.records) == ("new", 0, 0)
        assert_same(source, dest, "copy")
        grow(source, "copy", random.Random(2), 20)
        source.copy("copy", "copy of a copy")
        source.remove("trip")
        source.push(dest, ["copy of a copy"])
        assert_same(source, dest, "copy of a copy")
        assert dest.remove("trip").done
        assert_same(source, dest, "copy of a copy")


def test_agents_that_are_the_same_cost_a_few_queries_however_many_they_are(tmp_path, rounds):
    with holdfast.open(tmp_path / "a", durability="batched") as source, holdfast.open(tmp_path / "b") as dest:
        for number in range(rounds(100, 2_000)):
            source._add_agent(f"agent {number}")
        source.push(dest)
        questions = []
        real = type(dest._db.engine).run
        dest._db.engine.run = lambda sql, args=(): questions.append(sql) or real(dest._db.engine, sql, args)
        assert {one.status for one in source.push(dest).agents} == {"unchanged"}
        assert len(questions) < 10


def test_between_stores_with_and_without_a_key(tmp_path):
    key = os.urandom(32)
    with (
        holdfast.open(tmp_path / "plain") as one,
        holdfast.open(tmp_path / "secret", key=key) as two,
        holdfast.open(tmp_path / "plain again") as three,
        small_limits(),
    ):
        for _ in range(2):
            grow(one, "trip", random.Random(9), 20)
            one.push(two)
            two.push(three)
            assert_same(one, two, "trip", states=False)
            assert_same(one, three, "trip")
        two.export(tmp_path / "file", ["trip"])
        three.remove("trip")
        for store, status in ((two, "unchanged"), (three, "new")):
            assert store.import_bundle(tmp_path / "file", key=key).agents[0].status == status
        assert_same(two, three, "trip")


# -- what is refused --------------------------------------------------------------------------------------------------


def test_another_agent_of_that_name_is_left_alone(stores):
    source, dest = stores
    say(source, "ours")
    theirs = say(dest, "theirs")
    with pytest.raises(HistoriesDiverged) as caught:
        source.push(dest)
    assert caught.value.agent == "trip"
    assert head(dest) == theirs
    source.push(dest, new_name="trip-2")
    sound(dest)


def test_a_store_is_not_pushed_into_itself_or_a_reader(stores, tmp_path):
    source, _ = stores
    with pytest.raises(BadOption):
        source.push(source)
    holdfast.open(tmp_path / "c").close()
    with holdfast.open(tmp_path / "c", readonly=True) as reader, pytest.raises(ReadOnly):
        source.push(reader)


def test_a_writer_over_there_is_not_disturbed(stores, tmp_path):
    source, dest = stores
    say(source, "one")
    source.push(dest)
    two = say(source, "two")
    with closing(dest.agent("trip")) as agent:  # a handle of this process is a writer, too
        with pytest.raises(AgentBusy):
            source.push(dest)
        assert agent.head.label == "one"
    source.push(dest)
    assert head(dest) == two
    assert_same(source, dest, "trip")
    say(source, "three")
    holder = child.start("hold", tmp_path / "b", "trip")
    try:
        assert child.line(holder) == "ready"
        # It is busy, or, since the holder has made a checkpoint, the two have parted.
        with pytest.raises((AgentBusy, HistoriesDiverged)):
            source.push(dest)
        assert dest.agent("trip", readonly=True).head.label == "held"
    finally:
        child.end(holder)


def test_damage_at_the_source_does_not_travel(stores, tmp_path):
    source, dest = stores
    plain(source, "trip", 3)
    source.push(dest)
    there = view(dest, "trip")
    plain(source, "trip", 3)
    source.close()
    assert spoil(tmp_path / "a", "UPDATE loose SET data = zeroblob(length(data)) WHERE n = 5")
    with holdfast.open(tmp_path / "a") as again, pytest.raises(Damaged):
        again.push(dest)
    assert view(dest, "trip") == there
    assert dest.verify().ok


# -- both sides have gone on ------------------------------------------------------------------------------------------


def test_histories_that_parted_are_told_and_kept_apart(stores):
    source, dest = stores
    say(source, "common")
    source.push(dest)
    ours, theirs = say(source, "here"), say(dest, "there")
    with pytest.raises(HistoriesDiverged) as caught:
        source.push(dest)
    assert (caught.value.branch, caught.value.source_head, caught.value.dest_head) == ("main", ours, theirs)
    ((name,),) = (one.beside for one in source.push(dest, beside=True).agents)
    assert (head(dest), head(dest, branch=name)) == (theirs, ours)
    assert [one.label for one in dest.agent("trip", branch=name, readonly=True).log()] == ["here", "common"]
    more = say(source, "and on")
    assert source.push(dest).agents[0].beside == [], "the next push goes on with that branch"
    assert head(dest, branch=name) == more
    sound(dest)


def test_effects_that_parted_are_told_as_well(stores):
    source, dest = stores
    say(source, "common")
    source.push(dest)
    for store in (source, dest):
        act(store.agent("trip"), store.path.name)
    with pytest.raises(HistoriesDiverged):
        source.push(dest)


def test_a_store_that_is_behind_loses_nothing(stores):
    source, dest = stores
    say(source, "common")
    source.push(dest)
    there = say(dest, "there")
    assert source.push(dest).agents[0].status == "ahead"
    assert head(dest) == there
    assert source.pull(dest).agents[0].status == "updated"
    assert_same(dest, source, "trip")
    say(source, "here again")
    assert source.push(dest).agents[0].status == "updated"
    assert_same(source, dest, "trip")


def test_a_rollback_is_followed_and_one_over_there_is_kept(stores):
    source, dest = stores
    first, second = say(source, "one"), say(source, "two")
    source.push(dest)
    with closing(source.agent("trip")) as agent:
        agent.rollback(f"id:{first}")
    source.push(dest)
    assert_same(source, dest, "trip")
    assert head(dest) == first
    with closing(dest.agent("trip")) as other:
        other.rollback(f"id:{second}")
    assert source.push(dest).agents[0].status == "ahead"
    assert head(dest) == second
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
    assert {name: one.id for name, one in agent.tags().items()} == {"good": second, "mine": second}
    assert agent.at(f"id:{first}").validity == "suspect"
    source.mark("trip", f"id:{first}", "good")
    source.push(dest)
    assert agent.at(f"id:{first}").validity == "good"
    sound(dest)


# -- what was forgotten -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=400 if SOAK else 4)
@given(seed=st.integers(0, 2**32))
def test_a_history_with_gaps_arrives_with_them(seed):
    choose = random.Random(seed)
    with (
        memory() as here,
        small_limits(),
        holdfast.open(here / "a") as source,
        holdfast.open(here / "b") as dest,
        holdfast.open(here / "c") as third,
    ):
        for _ in range(3):
            grow(source, "trip", choose, choose.randrange(1, 25), forgets=True)
            source.push(dest)
            sound(dest)
            ours, theirs = view(source, "trip"), view(dest, "trip")
            assert ours["checkpoints"].keys() <= theirs["checkpoints"].keys(), "what was forgotten here stays there"
            assert standing(source) == standing(dest)
            assert source.push(dest).agents[0].status == "unchanged"
        source.push(third)
        assert_same(source, third, "trip")


def test_a_history_with_gaps_arrives_as_one_line(stores, tmp_path):
    source, dest = stores

    def lines(store):
        agent = store.agent("trip", readonly=True)
        log = [(one.id, one.previous_id) for one in agent.log()]
        return log, [one.id for one in agent.log(at="m12")], [one.id for one in agent.abandoned()]

    def labels(store):
        return [one.label for one in store.agent("trip", readonly=True).log()]

    with closing(source.agent("trip")) as agent:
        for number in range(30):
            agent.state[f"k{number % 3}"] = number
            agent.checkpoint(f"m{number}")
        agent.rollback("m25")
        agent.checkpoint("other")
    source.retain(Policy(last=2, labels=["m4", "m12", "m28"]))
    assert [len(found) for found in lines(source)] == [4, 2, 1]
    source.push(dest)
    assert lines(dest) == lines(source)
    # Another gap, above what is there; and one that is made over there.
    with closing(source.agent("trip")) as agent:
        for number in range(30, 40):
            agent.state["k0"] = number
            agent.checkpoint(f"m{number}")
    source.retain(Policy(last=1, labels=["m4", "m12", "m34", "other"]))
    source.push(dest)
    assert lines(dest)[0][:2] == lines(source)[0][:2]
    assert labels(dest) == ["m39", "m34", "other", "m25", "m12", "m4"]
    dest.retain(Policy(last=1, labels=["m4", "m34"]))
    assert labels(dest) == ["m39", "m34", "m4"]
    source.export(tmp_path / "file", ["trip"])
    holdfast.import_bundle(tmp_path / "file", tmp_path / "third")
    with holdfast.open(tmp_path / "third") as third:
        assert lines(third) == lines(source)
        for store in (source, dest, third):
            sound(store)


def test_everything_that_is_there_may_be_forgotten_here(stores):
    source, dest = stores
    with small_limits():
        plain(source, "trip", 12)
        source.push(dest)
        with closing(source.agent("trip")) as agent:
            for number in range(6):
                agent.state["more"] = number
                agent.checkpoint(f"more {number}")
        known = numbers(source, "trip")
        forget(source, "trip", [n for label, n in known.items() if label in {"more 0", *map(str, range(12))}])
        source.push(dest)
        sound(dest)
        assert len(dest.agent("trip", readonly=True).log(all=True)) == 12 + 5
        assert head(dest) == head(source)


def test_what_both_have_forgotten_is_no_divergence(stores):
    source, dest = stores
    say(source, "one")
    source.push(dest)
    for number in range(20):
        say(source, f"m{number}")
    source.retain(Policy(last=1))
    source.push(dest)
    assert head(dest) == head(source)
    for number in range(20):
        say(dest, f"n{number}")
    dest.retain(Policy(last=1))
    assert source.push(dest).agents[0].status == "ahead"
    assert source.pull(dest).agents[0].status == "updated"
    assert head(source) == head(dest)
    sound(source)


# -- effects ----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(KeyboardInterrupt), source.agent("trip") as agent:
        agent.run(pay)
    source.push(dest)
    assert_same(source, dest, "trip")
    with pytest.raises(holdfast.InDoubt), dest.agent("trip") as there:
        there.run(pay)


def test_a_signal_that_was_received_is_not_received_again(stores):
    source, dest = stores
    source.agent("filler").checkpoint("so that numbers differ")
    source.agent("trip")
    source.signal("trip", "go", 1, any_run=True)
    with pytest.raises(holdfast.Waiting), source.agent("trip") as agent:
        agent.run(wait.options(wait=False))
    source.push(dest, ["trip"])
    dest.signal("trip", "go", 2)
    with closing(dest.agent("trip")) as there:
        assert there.run(wait) == [1, 2]


# -- interruptions ----------------------------------------------------------------------------------------------------


class Cut(Exception):
    """A transfer that ends in the middle."""


@pytest.mark.slow
@settings(max_examples=400 if SOAK else 4)
@given(seed=st.integers(0, 2**32))
def test_any_history_arrives_as_it_is_however_often_it_is_interrupted(seed):
    choose = random.Random(seed)
    real = Arrival.take

    def take(self, frame):
        if choose.random() < 0.04:
            raise Cut
        return real(self, frame)

    with (
        memory() as here,
        small_limits(),
        pytest.MonkeyPatch.context() as patched,
        holdfast.open(here / "a") as one,
        holdfast.open(here / "b") as two,
        holdfast.open(here / "c") as three,
    ):
        patched.setattr(arrival, "ROWS_AT_ONCE", 3)
        for round in range(choose.randrange(1, 4)):
            grow(one, "trip", choose, choose.randrange(1, 25))
            if round == 1:
                one.copy("trip", "copy")
            names = [info.name for info in one.agents()]
            patched.setattr(Arrival, "take", take)
            for _ in count():
                try:
                    one.push(two)
                    break
                except Cut:
                    assert {info.name for info in two.agents()} <= set(names), "nothing half is seen"
            patched.setattr(Arrival, "take", real)
            for name in names:
                assert_same(one, two, name)
            grow(two, choose.choice(names), choose, choose.randrange(6))
            one.pull(two)
            two.export(here / "file", names, replace=True)
            three.import_bundle(here / "file")
            for name in names:
                assert_same(two, one, name, states=False)
                assert_same(two, three, name, states=False)


def test_what_is_still_arriving_stays_for_the_next_attempt_and_is_not_there_yet(stores, tmp_path, monkeypatch):
    source, dest = stores
    monkeypatch.setattr(arrival, "ROWS_AT_ONCE", 4)
    plain(source, "trip", 5)
    with closing(source.agent("trip")) as agent:
        agent.branch("side").close()
    plain(source, "late", 20)
    plain(source, "other", 2)

    def cut(what, done, _total):
        if what == "checkpoints of late" and done > 10:
            raise Cut

    source.push(dest, ["trip"])
    with pytest.raises(Cut):
        source.push(dest, ["late"], progress=cut)
    assert [info.name for info in dest.agents()] == ["trip"]
    for call in (lambda: dest.agent("late", readonly=True), lambda: dest.export(tmp_path / "file", ["late"])):
        with pytest.raises(UnknownAgent):
            call()
    with holdfast.open(tmp_path / "third") as third:
        assert [one.name for one in dest.push(third).agents] == ["trip"]
    assert dest.verify_restore().total == 1
    arrived = dest.stats()["counts"]["checkpoint"] - 5
    assert 8 <= arrived < 20
    source.push(dest, ["other"])
    dest.remove("other")  # collects what nothing needs
    dest.retain(Policy(last=1))
    assert dest.verify().ok
    assert dest.stats()["counts"]["checkpoint"] == arrived + 1
    (moved,) = source.push(dest, ["late"]).agents
    assert (moved.status, moved.arrived.checkpoints) == ("new", 20 - arrived)
    assert {info.name: info.branches for info in dest.agents()} == {"late": ["main"], "trip": ["main", "side"]}
    assert_same(source, dest, "late")


def test_a_node_that_was_left_without_what_is_below_it(stores):
    """A transfer died, and a sweep that was interrupted over there took what the node that it had written names."""
    source, dest = stores
    with small_limits():
        with closing(source.agent("trip")) as agent:
            agent.state["big"] = {f"key {i}": "v" * 50 for i in range(40)}
            agent.checkpoint()
            agent.state["copy"] = {"of": dict(agent.state["big"])}
            agent.checkpoint()
        names = [name for _, name, _ in source._db.view.rows("node")]
        inner = {name: pack_node(raw) for name, raw in source._db.view.nodes(names).items() if raw[1]}
        assert inner
        dest._db.change(lambda change: change.put_objects(Objects(inner)))
        source.push(dest)
        assert_same(source, dest, "trip")


def pushed(here):
    with small_limits(), holdfast.open(here / "a", readonly=True) as source, holdfast.open(here / "b") as dest:
        arrival.ROWS_AT_ONCE = 4
        source.push(dest)


@pytest.mark.parametrize("again", [False, True], ids=["each anew", "one after another"])
def test_killed_at_any_point_it_goes_on(tmp_path, rounds, again):
    with small_limits(), holdfast.open(tmp_path / "a") as source:
        grow(source, "trip", random.Random(7), 40)
        plain(source, "other", 12)
    most = 0
    for at in count(1, rounds(11 if again else 29, 1)):
        here = tmp_path if again else tmp_path / str(at)
        if not again:
            here.mkdir()
            (here / "a").symlink_to(tmp_path / "a")
        done = not dies(lambda here=here: pushed(here), at, (Sqlite, "transaction"))
        with small_limits(), holdfast.open(here / "a", readonly=True) as source, holdfast.open(here / "b") as dest:
            report = dest.verify()
            assert report.ok, f"killed at {at}: {report}"
            for info in dest.agents():
                assert standing(dest, info.name) == standing(source, info.name)
            arrived = dest.stats()["counts"]["checkpoint"]
            assert arrived >= most or not again, "what has arrived stays"
            most = arrived
            if done or not again:
                source.push(dest)
                for name in ("trip", "other"):
                    assert_same(source, dest, name, states=done)
        if done:
            break


def test_what_has_arrived_may_be_collected_before_refs_name_it(stores, monkeypatch):
    """Nothing holds records that no checkpoint came with; they come again then."""
    source, dest = stores
    monkeypatch.setattr(arrival, "ROWS_AT_ONCE", 1)
    act(source.agent("trip"))
    real, meanwhile = Arrival.finish, ["once"]

    def finish(self, **options):
        if meanwhile:
            meanwhile.clear()
            act(dest.agent("other"))
            dest.remove("other")  # collects what nothing needs
        return real(self, **options)

    monkeypatch.setattr(Arrival, "finish", finish)
    source.push(dest)
    assert not meanwhile
    assert_same(source, dest, "trip")


@settings(max_examples=400 if SOAK else 3)
@given(seed=st.integers(0, 2**32))
def test_both_sides_may_forget_and_collect_meanwhile(seed):
    choose = random.Random(seed)
    real = Arrival.take
    with (
        memory() as here,
        small_limits(),
        pytest.MonkeyPatch.context() as patched,
        holdfast.open(here / "a") as source,
        holdfast.open(here / "b") as dest,
    ):

        def take(self, frame):
            if choose.random() < 0.08:
                plain(dest, "other", 1)
                dest.remove("other")  # collects what nothing needs
                choose.choice([source, dest]).retain(Policy(last=choose.randrange(1, 4)))
            return real(self, frame)

        patched.setattr(arrival, "ROWS_AT_ONCE", 3)
        for _ in range(3):
            grow(source, "trip", choose, choose.randrange(1, 25), forgets=True)
            patched.setattr(Arrival, "take", take)
            source.push(dest)
            patched.setattr(Arrival, "take", real)
            sound(dest)
            source.push(dest)
            assert standing(source) == standing(dest)


def test_a_source_that_is_written_and_cleared_meanwhile(stores):
    source, dest = stores
    with small_limits():
        for number in range(30):
            say(source, f"{number} " * 50)

        def meanwhile(_what, done, _total):
            if done == 5:
                say(source, "more")
                source.retain(Policy(last=1))

        stood = head(source)
        source.push(dest, progress=meanwhile)
        assert head(dest) == stood, "all of it is as of one moment"
        sound(dest)
        source.push(dest)
        assert head(dest) == head(source)
        sound(dest)


def test_what_is_proven_as_the_content_of_a_file_is_not_taken_for_a_value(stores):
    source, _ = stores
    data = b"\xc1 is no encoding"
    chunk = chunk_digest(data)
    pack = source._db.packs.write([(chunk, data)])
    source._db.change(lambda change: change.put_objects(Objects(packs=[pack])))
    named = packb([digest(b"value", data), len(data), [chunk]])
    file, value = (Operation(0, SET, [name], (packb(Ext(code, named)),)) for name, code in (("f", 42), ("v", 41)))
    reading = Reading(Blank(source._db.now))
    reading.operations([file])
    with pytest.raises(CorruptValue):
        reading.operations([value])


def test_a_copy_that_goes_alone_has_the_crashes_that_came_before_it(stores):
    source, dest = stores
    with source.agent("trip") as agent:
        agent.checkpoint("one")

    def crash(name, dump):
        crashes.note(source, source._agent_row(name), {"what": "crash", "dump": dump})

    def told(store, name):
        return [one["dump"] for one in store.agent(name, readonly=True).crashes()]

    crash("trip", "first")
    source.copy("trip", "twin")
    crash("trip", "of the origin")
    crash("twin", "of the copy")
    for names in (["twin"], ["trip"], ["twin"], []):
        source.push(dest, names)
        assert told(dest, "twin") == told(source, "twin") == ["of the copy", "first"]
        assert dest.verify().ok
    assert told(dest, "trip") == told(source, "trip") == ["of the origin", "first"]
    assert {one.status for one in dest.push(source).agents} == {"unchanged"}
