"""Damage to what an agent's head rests on: opening says what is left and what is lost, recovering takes it."""

from __future__ import annotations

import signal

import pytest

from holdfast.agent import history, recovery
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, StoreFailed
from holdfast.store.tables import TABLES
from tests.agent.damage import flipped, opened, rows, spoil, spoil_payload, write
from tests.limits import limits

LONG = "long enough to be a value of its own " * 4


@pytest.fixture(autouse=True)
def _small():
    with limits({"SEAL_CHECKPOINTS": 4}):
        yield


@pytest.fixture
def path(store_path):
    """Ten checkpoints of one agent, the fourth and the eighth sealed; records after the second, fifth and tenth."""
    with opened(store_path, readonly=False) as store:
        agent = store.agent("a")
        agent.state["log"] = []
        agent.state["other"] = {"k": LONG}
        for number in range(1, 11):
            agent.state["log"].append(f"{number}: {LONG}")
            agent.checkpoint(f"step {number}")
            if number in {2, 5, 10}:
                write(agent, (1, b"began %d" % number), (0, b"did %d" % number))
        bystander = store.agent("bystander")
        bystander.state["x"] = LONG
        bystander.checkpoint("well")
        store._tending.stop()
    return store_path


@pytest.fixture
def ids(path):
    with opened(path) as store:
        return [one.id for one in reversed(store.agent("a", readonly=True).log())]


def numbers(state):
    return [int(text.split(":")[0]) for text in state["log"]]


def spoil_base(path, depth):
    """Damage a node of a sealed state."""
    with opened(path) as store:
        root = bytes.fromhex(store.agent("a", readonly=True).at(f"#{depth}").sections["log"])
    ((data,),) = rows(path, "SELECT data FROM node WHERE digest = ?", root)
    spoil(path, "UPDATE node SET data = ? WHERE digest = ?", flipped(data, len(data) // 2), root)


def lose(path, n, *, gone):
    if gone:
        spoil(path, "DELETE FROM loose WHERE n = ?", n)
    else:
        spoil_payload(path, n)


def opening(path, *, readonly=False):
    with opened(path, readonly=readonly) as store, pytest.raises(Damaged) as caught:
        list(store.agent("a", readonly=readonly).state["log"])
    return caught.value


def stored(path):
    return {name: set(rows(path, f"SELECT * FROM {name}")) for name in TABLES if name not in {"branch", "floor"}}


def recovers(path, ids, expected):
    """Recover twice; the same branch both times, at the expected checkpoint, nothing that is stored changed."""
    before = stored(path)
    with opened(path, readonly=False) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-1"
        assert numbers(agent.state) == list(range(1, expected + 1))
        assert (agent.head.kind, agent.head.target_id) == ("recover", ids[-1])
        assert agent.head.parent_id == ids[expected - 1]
        lost = agent.recovery
        assert f"#{expected}" in lost
        agent.state["log"].append(f"{expected + 1}: went on")
        agent.checkpoint("went on")
        agent.close()
        again = store.agent("a", recover=True)
        assert again.branch_name == "recovered-1"
        assert numbers(again.state) == list(range(1, expected + 2))
        assert sum(one.kind == "recover" for one in again.log()) == 1
        assert "main" in again.branches()
        assert store.agent("bystander").state["x"] == LONG
        store._tending.stop()
    after = stored(path)
    assert all(kept <= after[name] for name, kept in before.items()), "something that was stored was changed"
    return lost


def test_a_healthy_agent_is_not_recovered(path):
    with opened(path, readonly=False) as store:
        agent = store.agent("a", recover=True)
        assert (agent.branch_name, agent.recovery, agent.branches()) == ("main", None, ["main"])


@pytest.mark.parametrize("at", [-10, 60, 0])
def test_damaged_payload_of_the_head(path, ids, at):
    """Its operations, its manifest, or what says which is which."""
    spoil_payload(path, 10, at)
    error = opening(path)
    assert error.newest_valid == ids[8]
    assert "1 checkpoint(s) after" in error.lost
    assert ids[9][:12] in error.lost
    assert "recover=True" in error.hint
    assert ids[9][:12] in recovers(path, ids, 9)


@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_what_is_wrong_below_the_head_takes_it_along(path, ids, gone):
    lose(path, 9, gone=gone)
    error = opening(path)
    assert error.newest_valid == ids[7]
    assert "2 checkpoint(s)" in error.lost
    recovers(path, ids, 8)


@pytest.mark.parametrize(
    "statement", ["DELETE FROM loose WHERE n = 10", "UPDATE loose SET line = line + 1 WHERE n = 10"]
)
def test_a_head_whose_row_is_gone_or_wrong(path, ids, statement):
    spoil(path, statement)
    assert opening(path).newest_valid == ids[8]
    assert opening(path, readonly=True).newest_valid == ids[8]
    recovers(path, ids, 9)


def test_damaged_node_of_the_base(path, ids):
    """Everything that rests on the seal is lost with it, back to a checkpoint before."""
    spoil_base(path, 8)
    error = opening(path)
    assert error.newest_valid in ids[3:8]
    assert any(what.startswith("node ") for what in error.what)
    with opened(path, readonly=False) as store:
        agent = store.agent("a", recover=True)
        assert agent.head.parent_id == error.newest_valid
        assert agent.recovery == error.lost
        assert numbers(agent.at(f"id:{ids[2]}").state) == [1, 2, 3]
        past = agent.at(f"id:{ids[7]}").state
        assert past["other"] == {"k": LONG}, "what does not need that node is still read"
        with pytest.raises(Damaged) as caught:
            _ = past["log"]
        assert "section log" in caught.value.what


@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_another_line_is_not_taken_for_the_history(path, ids, gone):
    """The checkpoint before a lost one is that of its stretch of the branch, not a newer one that was left."""
    with opened(path, readonly=False) as store:
        agent = store.agent("a")
        agent.rollback("#5")
        agent.state["log"].append(f"6: other {LONG}")
        n = agent.checkpoint("other line")._point.n
        store.agent("bystander").checkpoint("later")
    lose(path, n, gone=gone)
    with opened(path, readonly=False) as store:
        with pytest.raises(Damaged) as caught:
            store.agent("a")
        assert caught.value.newest_valid == ids[4]
        assert numbers(store.agent("a", recover=True).state) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("validity", ["suspect", "corrupt"])
def test_marked_checkpoints_are_passed_over(path, ids, validity):
    with opened(path, readonly=False) as store:
        agent = store.agent("a")
        agent.mark("#10", validity, "wrong answers")
        agent.mark("#9", validity)
        agent.close()
        assert store.agent("a").branch_name == "main", "a mark alone does not keep anybody from opening"
        store.agent("a").close()
        recovered = store.agent("a", recover=True)
        assert recovered.head.parent_id == ids[7]
        assert f"marked {validity}: wrong answers" in recovered.recovery
        assert "2 checkpoint(s)" in recovered.recovery


def test_nothing_left_is_said_so(path):
    for table in ("loose", "checkpoint"):
        spoil(path, f"UPDATE {table} SET sum = x'0000000000000000' WHERE b = 1")
    with opened(path, readonly=False) as store:
        with pytest.raises(Damaged, match="no checkpoint of 'a' can be trusted"):
            store.agent("a", recover=True)
        with pytest.raises(Damaged) as caught:
            store.agent("a")
        assert caught.value.newest_valid == ""
        assert "everything" in caught.value.lost
        assert store.agent("bystander").state["x"] == LONG


def test_a_second_damage_on_the_recovered_branch_gives_another_branch(path):
    spoil_payload(path, 10)
    with opened(path, readonly=False) as store:
        agent = store.agent("a", recover=True)
        agent.state["log"].append("10: again " + LONG)
        n = agent.checkpoint("again")._point.n
    spoil_payload(path, n)
    with opened(path, readonly=False) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-2"
        assert numbers(agent.state) == list(range(1, 10))
        assert numbers(store.agent("a", branch="recovered-1", recover=True).state) == list(range(1, 10))


def test_a_handle_that_met_the_damage_gives_way(path, ids):
    spoil(path, "DELETE FROM node WHERE digest IN (SELECT digest FROM node ORDER BY k DESC LIMIT 1)")
    with opened(path) as store:
        root = bytes.fromhex(store.agent("a", readonly=True).at("#8").sections["log"])
    spoil(path, "DELETE FROM node WHERE digest = ?", root)
    with opened(path, readonly=False) as store:
        agent = store.agent("a")
        assert store.agent("a", recover=True) is agent, "nothing is known to be wrong"
        with pytest.raises(Damaged):
            list(agent.state["log"])
        agent.state["new"] = 1
        with pytest.raises(BadOption, match="not saved"):
            store.agent("a", recover=True)
        del agent.state["new"]
        agent.close()
        agent = store.agent("a")
        with pytest.raises(Damaged):
            list(agent.state["log"])
        recovered = store.agent("a", recover=True)
        assert recovered.branch_name == "recovered-1"
        assert ids[9][:12] in recovered.recovery
        assert agent.closed


def test_records_that_can_be_trusted_are_inherited(path):
    """The fourth of six is damaged: the new branch has three, one that stands for the others, and the head's state."""
    spoil(path, "UPDATE record SET mark = 1 - mark WHERE i = 4")
    with opened(path, readonly=False) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-1"
        assert "after record 3 cannot be trusted" in agent.recovery
        assert numbers(agent.state) == list(range(1, 11))
        view = store._db.view
        branch = view.branch_at(agent._branch.b)
        assert [record.body for record in view.line(branch.line)] == [b"began 2", b"did 2", b"began 5", b""]
        write(agent, (1, b"more"))
        agent.checkpoint("on")
        agent.close()
        assert store.agent("a", recover=True).branch_name == "recovered-1"


def test_it_can_run_again_after_an_interrupt(path, monkeypatch):
    spoil_payload(path, 10)
    with opened(path, readonly=False) as store:
        monkeypatch.setattr(store._handle, "_say_recovered", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            store.agent("a", recover=True)
        monkeypatch.undo()
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-1"
        assert agent.head.kind == "recover"


class Alarm(Exception):
    """What a signal handler of the program raises."""


@pytest.mark.parametrize(
    "raised", [ColdPlaceMissing("away", place="x"), StoreFailed("EIO"), Alarm(), KeyboardInterrupt()]
)
def test_what_only_cannot_be_read_now_is_not_passed_over(path, monkeypatch, raised):
    spoil_payload(path, 10)

    def fails(*_):
        raise raised

    with opened(path, readonly=False) as store:
        monkeypatch.setattr(history.Stored, "since_base", fails)
        with pytest.raises(type(raised)):
            store.agent("a", recover=True)
        if not isinstance(raised, (Alarm, KeyboardInterrupt)):
            error = Damaged("something")
            assert recovery.explain(store, "a", store._db.view.branch(1, "main"), error).lost == ""
        monkeypatch.undo()
        assert store._db.view.branch(1, "recovered-1") is None


def test_a_rollback_to_what_is_damaged_moves_nothing(path, ids):
    spoil_base(path, 4)
    with opened(path, readonly=False) as store:
        agent = store.agent("a")
        for move in (
            lambda: agent.rollback("#5"),
            lambda: agent.diff("#4", "#10"),
            lambda: agent.at("#4").state["log"],
        ):
            with pytest.raises(Damaged):
                move()
        assert agent.head.id == ids[-1]
        assert numbers(agent.state) == list(range(1, 11))
        agent.state["log"].append("11: on")
        agent.checkpoint("on")
        assert agent.undo().kind == "undo"
