"""Damage to what an agent's head rests on: opening says what is left and what is lost, recovering takes it."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.agent import branch as sealing
from holdfast.errors import BadOption, Damaged
from tests.agent.damage import everything, flipped, rows, spoil

LONG = "long enough to be named by digest, not written inline " * 3


@pytest.fixture
def made(store_path, monkeypatch):
    """Ten checkpoints of one agent; the fourth and the eighth are sealed."""
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 4)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["log"] = []
        agent.state["other"] = {"k": LONG}
        for number in range(1, 11):
            agent.state["log"].append(f"{number}: {LONG}")
            agent.checkpoint(f"step {number}")
        ids = [checkpoint.id for checkpoint in reversed(agent.log())]
        bystander = store.agent("bystander")
        bystander.state["x"] = LONG
        bystander.checkpoint("well")
    return ids


def numbers(state) -> list[int]:
    return [int(text.split(":")[0]) for text in state["log"]]


def spoil_payload(path, n: int, place: int = -1) -> None:
    """Damage a checkpoint that lies alone, and no other."""
    ((data,),) = rows(path, "SELECT data FROM loose WHERE n = ?", n)
    spoil(path, "UPDATE loose SET data = ? WHERE n = ?", flipped(data, place), n)


def spoil_base(path, depth: int) -> None:
    """Damage a node of a sealed state."""
    with holdfast.open(path, readonly=True) as store:
        root = bytes.fromhex(store.agent("a", readonly=True).at(f"#{depth}").sections["log"])
    ((data,),) = rows(path, "SELECT data FROM node WHERE digest = ?", root)
    spoil(path, "UPDATE node SET data = ? WHERE digest = ?", flipped(data, len(data) // 2), root)


def opening_fails(path) -> Damaged:
    with holdfast.open(path) as store, pytest.raises(Damaged) as caught:
        list(store.agent("a").state["log"])
    return caught.value


def recovers_to(path, ids, expected: int) -> str:
    """Recover twice; the same branch both times, at the expected checkpoint, nothing healthy changed."""
    before = everything(path)
    with holdfast.open(path) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-1"
        assert numbers(agent.state) == list(range(1, expected + 1))
        assert agent.head.kind == "recover"
        assert agent.head.target_id == ids[-1]
        assert agent.head.parent_id == ids[expected - 1]
        lost = agent.recovery
        assert lost is not None
        assert f"#{expected}" in lost
        agent.state["log"].append(f"{expected + 1}: went on")
        agent.checkpoint("went on")
        agent.close()
        again = store.agent("a", recover=True)
        assert again.branch_name == "recovered-1"
        assert numbers(again.state) == list(range(1, expected + 2))
        assert sum(checkpoint.kind == "recover" for checkpoint in again.log()) == 1
        assert "main" in again.branches()
        assert store.agent("bystander").state["x"] == LONG
    after = everything(path)
    for table, kept in before.items():
        assert [row for row in after[table] if row in kept] == kept, f"{table} was changed"
    return lost


def test_a_healthy_agent_is_not_recovered(store_path, made):
    with holdfast.open(store_path) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "main"
        assert agent.recovery is None
        assert agent.branches() == ["main"]


@pytest.mark.parametrize("place", [-10, 60, 0])
def test_damaged_payload_of_the_head(store_path, made, place):
    """Its operations, its manifest, or what says which is which."""
    spoil_payload(store_path, 10, place)
    error = opening_fails(store_path)
    assert error.newest_valid == made[8]
    assert "1 checkpoint(s) after" in error.lost
    assert made[9][:12] in error.lost
    assert "recover=True" in error.hint
    lost = recovers_to(store_path, made, 9)
    assert made[9][:12] in lost


def test_recovering_an_agent_whose_open_handle_met_the_damage(store_path, made):
    spoil_base(store_path, 8)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        with pytest.raises(Damaged):
            list(agent.state["log"])
        agent.state["new"] = 1
        with pytest.raises(BadOption, match="not saved"):
            store.agent("a", recover=True)
        del agent.state["new"]
        agent.close()
        agent = store.agent("a")
        with pytest.raises(Damaged) as caught:
            list(agent.state["log"])
        assert "section log" in caught.value.what
        recovered = store.agent("a", recover=True)
        assert agent.closed
        assert recovered.branch_name == "recovered-1"
        assert numbers(recovered.state) == list(range(1, 8))
        assert made[9][:12] in recovered.recovery


@pytest.mark.parametrize("n", [9, 10])
def test_a_row_that_is_gone(store_path, made, n):
    spoil(store_path, "DELETE FROM loose WHERE n = ?", n)
    error = opening_fails(store_path)
    assert error.newest_valid == made[n - 2]
    assert f"{11 - n} checkpoint(s)" in error.lost
    recovers_to(store_path, made, n - 1)


def test_damaged_node_of_the_base(store_path, made):
    """Everything that rests on the seal is lost with it, back to the last checkpoint before."""
    spoil_base(store_path, 8)
    error = opening_fails(store_path)
    assert error.newest_valid
    assert error.newest_valid in made[3:8]
    assert "recover=True" in error.hint
    with holdfast.open(store_path) as store:
        agent = store.agent("a", recover=True)
        assert agent.head.parent_id == error.newest_valid
        assert agent.recovery == error.lost
        # What does not need that node is still read, through the damaged line's own history too.
        assert numbers(agent.at(f"id:{made[2]}").state) == [1, 2, 3]


def test_damaged_operations_in_the_middle_of_the_replay(store_path, made):
    spoil_payload(store_path, 9)
    with holdfast.open(store_path) as store, pytest.raises(Damaged) as caught:
        store.agent("a")
    assert caught.value.newest_valid == made[7]
    recovers_to(store_path, made, 8)


def test_readonly_handles_refuse_as_well(store_path, made):
    spoil(store_path, "DELETE FROM loose WHERE n = 10")
    with holdfast.open(store_path, readonly=True) as store, pytest.raises(Damaged) as caught:
        store.agent("a", readonly=True)
    assert caught.value.newest_valid == made[8]


def test_the_parent_is_proven_where_the_manifest_still_is(store_path, made):
    """Another line's newer checkpoint must not be taken for an ancestor."""
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.rollback("#5")
        agent.state["log"].append(f"6: other {LONG}")
        agent.checkpoint("other line")
        n = agent.head._point.n
    spoil_payload(store_path, n)
    with holdfast.open(store_path) as store:
        with pytest.raises(Damaged) as caught:
            store.agent("a")
        assert caught.value.newest_valid == made[4]
        agent = store.agent("a", recover=True)
        assert numbers(agent.state) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("validity", ["suspect", "corrupt"])
def test_marked_checkpoints_are_passed_over(store_path, made, validity):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.mark("#10", validity, "wrong answers")
        agent.mark("#9", validity)
        agent.close()
        assert store.agent("a").branch_name == "main", "a mark alone does not keep anybody from opening"
        store.agent("a").close()
        recovered = store.agent("a", recover=True)
        assert recovered.head.parent_id == made[7]
        assert f"marked {validity}: wrong answers" in recovered.recovery
        assert "2 checkpoint(s)" in recovered.recovery


def test_nothing_left_is_said_so(store_path, made):
    spoil(store_path, "UPDATE loose SET sum = x'0000000000000000' WHERE b = 1")
    with holdfast.open(store_path) as store:
        with pytest.raises(Damaged, match="no checkpoint of 'a' can be trusted"):
            store.agent("a", recover=True)
        with pytest.raises(Damaged) as caught:
            store.agent("a")
        assert caught.value.newest_valid == ""
        assert "everything" in caught.value.lost
        assert store.agent("bystander").state["x"] == LONG


def test_a_second_damage_on_the_recovered_branch_gives_another_branch(store_path, made):
    spoil(store_path, "DELETE FROM loose WHERE n = 10")
    with holdfast.open(store_path) as store:
        agent = store.agent("a", recover=True)
        agent.state["log"].append("10: again " + LONG)
        n = agent.checkpoint("again")._point.n
    spoil(store_path, "UPDATE loose SET epoch = epoch + 1 WHERE n = ?", n)
    with holdfast.open(store_path) as store:
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-2"
        assert numbers(agent.state) == list(range(1, 10))
        on_first = store.agent("a", branch="recovered-1", recover=True)
        assert numbers(on_first.state) == list(range(1, 10))


def test_recovery_that_is_interrupted_can_run_again(store_path, made, monkeypatch):
    spoil(store_path, "DELETE FROM loose WHERE n = 10")
    with holdfast.open(store_path) as store:
        monkeypatch.setattr(holdfast.Agent, "_say_recovered", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.agent("a", recover=True)
        monkeypatch.undo()
        agent = store.agent("a", recover=True)
        assert agent.branch_name == "recovered-1"
        assert agent.head.kind == "recover"


def test_a_past_state_that_is_damaged_says_which_section(store_path, made):
    spoil_base(store_path, 8)
    with holdfast.open(store_path, readonly=True) as store:
        past = store.agent("a", readonly=True).at("#8")
        assert past.state["other"] == {"k": LONG}
        with pytest.raises(Damaged) as caught:
            past.state["log"]
        assert "section log" in caught.value.what
        assert any(what.startswith("node ") for what in caught.value.what)


def test_verify_names_what_is_affected(store_path, made):
    spoil(store_path, "DELETE FROM loose WHERE n = 9")
    with holdfast.open(store_path, readonly=True) as store:
        report = store.verify()
    assert set(report.affected) == {made[8], made[9]}
    assert all(problem.agent == "a" for problem in report.problems if problem.affected)


def test_a_rollback_to_what_is_damaged_moves_nothing(store_path, made):
    spoil_base(store_path, 4)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        for move in (
            lambda: agent.rollback("#5"),
            lambda: agent.diff("#4", "#10"),
            lambda: agent.at("#4").state["log"],
        ):
            with pytest.raises(Damaged):
                move()
        assert agent.head.id == made[-1]
        assert numbers(agent.state) == list(range(1, 11))
        agent.state["log"].append("11: on")
        agent.checkpoint("on")
        assert agent.undo().kind == "undo"
