"""`holdfast.crash.rehydrate`: an agent goes on from the checkpoint that a dump names, and repeats nothing."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.crash import Limits, capture, open_dump, rehydrate, unfinished
from holdfast.errors import BadName, NotInDump, ReadOnly, UnknownAgent, UnknownRevision
from tests.conftest import unsaved
from tests.crash import trip_program

booked = []
# The process that runs the tests is large, and the machine may do much else.
FEW = Limits(deadline_s=600, part_s=300, census_objects=1_000, objects=5_000)


@holdfast.tool
def book(flight: str) -> str:
    booked.append(flight)
    return f"ref-{flight}"


@holdfast.durable
def travel(agent, flight):
    agent.state["flight"] = flight
    agent.checkpoint("chosen")
    agent.state["ref"] = book(flight)
    if agent.branch_name == "main":
        raise ConnectionError("lost")
    agent.checkpoint("booked")
    return agent.state["ref"]


@pytest.fixture
def store(store_path):
    booked.clear()
    with holdfast.open(store_path) as store:
        yield store


@pytest.fixture
def crashed(store):
    """The dump of a run that failed after it had booked, and before it saved that."""
    with pytest.raises(ConnectionError):
        store.agent("trip-7").run(travel, "TP1")
    return capture("failed", to=store.path / "dumps", limits=FEW)


def test_it_goes_on_from_the_named_checkpoint_on_a_new_branch_and_books_once(store, crashed):
    with open_dump(crashed) as dump:
        made = rehydrate(dump, store)
    assert made.agent == "trip-7"
    assert made.branch.startswith("crash-2")
    assert made.checkpoint.label == "chosen"
    assert made.dump == crashed.name
    other = store.agent("trip-7", branch=made.branch)
    assert dict(other.state) == {"flight": "TP1"}
    assert other.run(travel, "TP1") == "ref-TP1"
    assert booked == ["TP1"], "what was done before the crash is not done again"
    assert [run.status for run in other.runs()] == ["finished"]
    main = store.agent("trip-7")
    assert main.head.label == "chosen", "the branch that crashed is as it was"
    assert store.verify().ok


def test_the_history_links_the_dump(store, crashed):
    with open_dump(crashed) as dump:
        made = rehydrate(dump, store, "trip-7")
    (told,) = [one for one in store.agent("trip-7").crashes() if one["what"] == "rehydrate"]
    assert told["dump"] == crashed.name
    assert told["branch"] == made.branch
    assert told["checkpoint"] == made.checkpoint.id
    store.copy("trip-7", "trip-8")
    assert [one["what"] for one in store.agent("trip-8").crashes()][:1] == ["rehydrate"]


def test_a_dump_elsewhere_is_linked_by_its_path(store, crashed, tmp_path):
    moved = crashed.rename(tmp_path / "elsewhere.hfdump")
    with open_dump(moved) as dump:
        assert rehydrate(dump, store).dump == str(moved.resolve())


def test_a_second_time_gets_a_name_of_its_own(store, crashed):
    with open_dump(crashed) as dump:
        first, second = rehydrate(dump, store), rehydrate(dump, store)
        assert second.branch == f"{first.branch}-2"
        assert rehydrate(dump, store, branch="again").branch == "again"
        with pytest.raises(BadName):
            rehydrate(dump, store, branch="again")


@unsaved
def test_changes_that_were_not_saved_are_told(store):
    agent = store.agent("trip-7")
    agent.state["flight"] = "TP1"
    agent.checkpoint("chosen")
    with open_dump(capture(to=store.path / "dumps", limits=FEW)) as dump:
        assert not rehydrate(dump, store).unsaved
    agent.state["flight"] = "TP2"
    with open_dump(capture(to=store.path / "dumps", limits=FEW)) as dump:
        assert rehydrate(dump, store).unsaved


def test_an_agent_that_went_on_since_is_taken_up_where_it_was(store):
    agent = store.agent("trip-7")
    agent.state["n"] = 1
    agent.checkpoint("one")
    path = capture(to=store.path / "dumps", limits=FEW)
    agent.state["n"] = 2
    agent.checkpoint("two")
    with open_dump(path) as dump:
        made = rehydrate(dump, store)
    assert store.agent("trip-7", branch=made.branch).state["n"] == 1
    assert store.agent("trip-7").state["n"] == 2
    assert store.verify().ok


def test_which_agent_is_meant_must_be_clear(store):
    for name in ("trip-1", "trip-2"):
        agent = store.agent(name)
        agent.state["n"] = 1
        agent.checkpoint()
    store.agent("trip-3")
    with open_dump(capture(to=store.path / "dumps", limits=FEW)) as dump:
        with pytest.raises(NotInDump, match="3 agents"):
            rehydrate(dump, store)
        with pytest.raises(NotInDump, match="does not tell"):
            rehydrate(dump, store, "trip-9")
        with pytest.raises(NotInDump, match="no checkpoint"):
            rehydrate(dump, store, "trip-3")
        assert rehydrate(dump, store, "trip-2@main").agent == "trip-2"


def test_a_dump_without_agents_says_so(store, tmp_path):
    with open_dump(capture(to=tmp_path, limits=FEW)) as dump, pytest.raises(NotInDump, match="no agent"):
        rehydrate(dump, store)


def test_what_a_dump_claims_is_not_believed(store, tmp_path):
    """It names its store, its agent and its checkpoint; only what this store's history has counts."""
    agent = store.agent("trip-7")
    agent.state["n"] = 1
    known = agent.checkpoint("one").id
    elsewhere = tmp_path / "never-made"
    for claim, error in (
        ({"agent": "nobody", "checkpoint": known}, UnknownAgent),
        ({"agent": "trip-7", "checkpoint": "ab" * 32}, UnknownRevision),
        ({"agent": "trip-7", "checkpoint": "main"}, NotInDump),
        ({"agent": "trip-7", "checkpoint": [known]}, NotInDump),
    ):
        file = tmp_path / "claim.hfdump"
        data = {"branch": "main", "store": str(elsewhere), **claim}
        file.write_bytes(trip_program.sealed([("head", {"at": 2e9}), ("agnt", {"name": "x", "data": data})]))
        with open_dump(file) as dump, pytest.raises(error):
            rehydrate(dump, store)
    assert agent.branches() == ["main"]
    assert not elsewhere.exists()


def test_a_store_that_is_only_read_is_not_changed(store_path, store, crashed):
    store.close()
    with holdfast.open(store_path, readonly=True) as reading, open_dump(crashed) as dump, pytest.raises(ReadOnly):
        rehydrate(dump, reading)


def test_where_telling_of_one_agent_fails_the_others_are_told_of(store_path):
    told = []

    @holdfast.durable(name="unfinished.stops")
    def stops(agent):
        raise KeyboardInterrupt

    def tell(runs, doubts):
        assert (len(runs), doubts) == (1, [])
        told.append(runs[0].agent)
        raise ValueError("this one cannot be told of")

    with holdfast.open(store_path) as store:
        for name in ("one", "two"):
            with pytest.raises(KeyboardInterrupt):
                store.agent(name).run(stops)
        with pytest.raises(KeyError), unfinished(tell):
            raise KeyError
    assert sorted(told) == ["one", "two"]
