"""Records that are lost: what may have happened outside is not done again without a word."""

from __future__ import annotations

import shutil
from itertools import combinations

import pytest

import holdfast
from holdfast.agent.opened import settle
from holdfast.errors import Damaged, Diverged, InDoubt, MaybeRepeated, ResultLost, RollbackBlocked, RunUnfinished
from tests.agent.damage import flipped, rows, spoil
from tests.run.bench import Crash

EVERY = range(1, 8)  # run, read, intent, done, checkpoint, intent, done


class Program:
    """Pays twice, with a checkpoint in between; its first life ends before the run does."""

    def __init__(self):
        self.paid = []
        self.ends = True

        @holdfast.tool(effect="read")
        def search(city):
            return city

        @holdfast.tool(effect="write")
        def pay(amount):
            self.paid.append(amount)
            return amount

        self.search, self.pay = search, pay

    def work(self, agent):
        agent.state["city"] = self.search("Lisbon")
        agent.state["paid"] = self.pay(1)
        agent.checkpoint("between")
        agent.state["paid"] = self.pay(2)
        if self.ends:
            self.ends = False
            raise Crash


@pytest.fixture
def program(store_path):
    """After its first life."""
    made = Program()
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.checkpoint("before")
        with pytest.raises(Crash):
            agent.run(made.work)
    assert made.paid == [1, 2]
    assert [number for (number,) in rows(store_path, "SELECT i FROM record ORDER BY i")] == list(EVERY)
    return made


def lose(path, *numbers):
    """As a repair leaves them: in their places, with nothing in them."""
    for number in numbers:
        assert spoil(path, "UPDATE record SET body = x'' WHERE i = ?", number) == 1
    with holdfast.open(path) as store:
        store._db.change(lambda change: settle(change, change.branches()))


def run(agent, program):
    return agent.run(program.work)


def test_nothing_is_done_twice_whichever_records_are_lost(store_path, tmp_path, program):
    for number, lost in enumerate([*((one,) for one in EVERY), *combinations(EVERY, 2), tuple(EVERY)]):
        copy = tmp_path / str(number)
        shutil.copytree(store_path, copy)
        lose(copy, *lost)
        with holdfast.open(copy) as store:
            agent = store.agent("a")
            for _ in range(2):
                with pytest.raises((InDoubt, Diverged, RunUnfinished)):
                    run(agent, program)
            report = store.verify()
            assert (report.ok, report.checked["lost_effects"]) == (True, len(lost))
        assert program.paid == [1, 2], lost


def test_rows_of_open_runs_are_proven_also_where_records_are_lost(store_path, program):
    lose(store_path, 4)
    with holdfast.open(store_path) as store:
        assert store.verify().ok
        store._db.change(lambda change: change.tx.do("DELETE FROM open"))
        assert {one.what for one in store.verify().problems} == {"table open"}


def test_a_call_of_which_all_is_lost_is_in_doubt_until_somebody_decides(store_path, program):
    lose(store_path, 3, 4)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        with pytest.raises(InDoubt, match=r"records 3 to 4 \(what was recorded is lost\)") as raised:
            run(agent, program)
        (effect,) = raised.value.effects
        assert [one.status for one in agent.effects()] == ["done", "in doubt", "done"]
        assert agent.effects()[1].why == effect.why == "what was recorded is lost"
        agent.resolve(effect.id, "not-done", why="looked at the account")
        run(agent, program)
        assert program.paid == [1, 2, 1]
        assert not [one for one in agent.effects() if one.status == "in doubt"]


def test_what_is_known_to_have_been_done_is_not_repeated_before_it_is_accepted(store_path, program):
    lose(store_path, 3, 4)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        (lost,) = [one for one in agent.effects() if one.status == "in doubt"]
        agent.resolve(lost, "done", why="looked at the account")
        with pytest.raises(MaybeRepeated, match="pay may be that; it was not called") as raised:
            run(agent, program)
        assert program.paid == [1, 2]
        agent.accept(*raised.value.unclaimed)
        run(agent, program)
        assert program.paid == [1, 2, 1]


@pytest.mark.parametrize("later", [2, 5])
def test_a_decision_does_not_cover_what_is_lost_later(store_path, program, later):
    lose(store_path, 3, 4)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        (lost,) = [one for one in agent.effects() if one.status == "in doubt"]
        agent.resolve(lost, "not-done", why="looked at the account")
    lose(store_path, later)
    with holdfast.open(store_path) as store, pytest.raises(InDoubt, match="records"):
        run(store.agent("a"), program)
    assert program.paid == [1, 2]


def test_a_run_whose_beginning_is_lost_is_rolled_back_and_not_begun_again(store_path, program):
    lose(store_path, 1)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        assert [(one.function, one.status) for one in agent.runs()] == [("?", "interrupted")]
        (lost,) = [one for one in agent.effects() if one.status == "in doubt"]
        with pytest.raises(RollbackBlocked) as blocked:
            agent.rollback("before")
        assert len(blocked.value.blocked) == 3
        agent.resolve(lost, "not-done", why="it was the beginning of the run")
        for options in ({}, {"change": True}, {"id": "mine"}):
            with pytest.raises(RunUnfinished, match="beginning is lost"):
                agent.run(holdfast.durable(program.work).options(**options))
        assert program.paid == [1, 2]
        agent.rollback("before", accept=["pay"])
        run(agent, program)
        assert program.paid == [1, 2, 1, 2]


@pytest.mark.parametrize("lost", [(1,), (2,), (1, 2)], ids=["intent", "outcome", "both"])
def test_plain_use_does_not_repeat_what_is_lost(store_path, lost):
    program = Program()
    with holdfast.open(store_path) as store, store.agent("a"):
        program.pay(1)
    lose(store_path, *lost)
    with holdfast.open(store_path) as store, store.agent("a"), pytest.raises((InDoubt, MaybeRepeated)):
        program.pay(1)
    assert program.paid == [1]


@pytest.mark.parametrize(
    "statement", ["DELETE FROM record WHERE i IN (6, 7)", "UPDATE record SET body = ? WHERE i = 7"]
)
def test_a_repaired_store_repeats_nothing(store_path, tmp_path, program, statement):
    ((body,),) = rows(store_path, "SELECT body FROM record WHERE i = 7")
    spoil(store_path, statement, *((flipped(body),) if "?" in statement else ()))
    assert not holdfast.repair(store_path, tmp_path / "new").whole
    with holdfast.open(tmp_path / "new") as store:
        for branch in store.agent("a").branches():
            with pytest.raises((InDoubt, ResultLost)):  # the latter where only what it returned is lost
                run(store.agent("a", branch=branch), program)
    assert program.paid == [1, 2]


def test_a_repaired_backup_says_of_nobody_what_another_did(store_path, tmp_path):
    """Records that came from another store bear no branch: those of all agents look alike."""

    @holdfast.tool(effect="write")
    def pay(who):
        return who

    with holdfast.open(store_path) as store, holdfast.open(tmp_path / "backup") as backup:
        for name in ("a", "b"):
            with store.agent(name) as agent:
                for number in range(3):
                    pay(name)
                    agent.state["n"] = number
                    agent.checkpoint()
        store.backup(backup)
    for number in range(1, 7):
        shutil.copytree(tmp_path / "backup", tmp_path / f"damaged-{number}")
        spoil(tmp_path / f"damaged-{number}", "DELETE FROM record WHERE i = ?", number)
        report = holdfast.repair(tmp_path / f"damaged-{number}", tmp_path / f"new-{number}")
        lost = [[one for one in agent.lost if "of what happened outside are lost" in one] for agent in report.agents]
        assert [len(some) for some in lost] == [1, 1]
        with holdfast.open(tmp_path / f"new-{number}", readonly=True, inert=True) as store:
            for name in ("a", "b"):
                said = [one.args["who"] for one in store.agent(name, readonly=True).effects() if one.tool == "pay"]
                assert (set(said), len(said)) == ({name}, 2), "what is certain is kept"


def test_a_record_that_only_a_checkpoint_speaks_of_gets_a_stand_in_of_its_own(store_path, tmp_path):
    """Its handle must not be given to the stand-in of another line."""

    @holdfast.tool(effect="write")
    def pay(who):
        return who

    with holdfast.open(store_path) as store, holdfast.open(tmp_path / "backup") as backup:
        for name in ("a", "b"):
            with store.agent(name) as agent:
                pay(name)
                agent.checkpoint()
        store.backup(backup)
    damaged = tmp_path / "backup"
    ((newest,),) = rows(damaged, "SELECT max(r) FROM record")
    spoil(damaged, "DELETE FROM record WHERE r = ?", newest)
    spoil(damaged, "DELETE FROM branch WHERE line = ?", newest)
    spoil(damaged, "DELETE FROM record WHERE r = 1")
    holdfast.repair(damaged, tmp_path / "new")
    with holdfast.open(tmp_path / "new", readonly=True, inert=True) as store:
        for name in ("a", "b"):
            found = store.agent(name, readonly=True).effects()
            assert all(one.args["who"] == name for one in found if one.tool == "pay")
        assert [one.status for one in found] == ["in doubt"], "what may have happened is not forgotten"
        assert store.verify().ok


def test_a_branch_that_goes_on_without_damaged_records_repeats_nothing(store_path, program):
    ((body,),) = rows(store_path, "SELECT body FROM record WHERE i = 6")
    spoil(store_path, "UPDATE record SET body = ? WHERE i = 6", flipped(body))
    for _ in range(2):
        with holdfast.open(store_path) as store:
            agent = store.agent("a", recover=True)
            assert agent.branch_name == "recovered-1"
            with pytest.raises(InDoubt, match="records 6 to 6"):
                run(agent, program)
    assert program.paid == [1, 2]
    with holdfast.open(store_path) as store:
        agent = store.agent("a", recover=True)
        (lost,) = [one for one in agent.effects() if one.status == "in doubt"]
        agent.resolve(lost, "not-done", why="looked at the account")
        run(agent, program)
    assert program.paid == [1, 2, 2]


def test_a_branch_that_goes_on_without_a_damaged_checkpoint_of_a_run_repeats_nothing_of_it(store_path, program):
    ((data,),) = rows(store_path, "SELECT data FROM loose WHERE n = 3")
    spoil(store_path, "UPDATE loose SET data = ? WHERE n = 3", flipped(data))
    with holdfast.open(store_path) as store:
        agent = store.agent("a", recover=True)
        assert (agent.branch_name, dict(agent.state)) == ("recovered-1", {})
        with pytest.raises(RunUnfinished):
            agent.checkpoint("beside it")
        with pytest.raises(Damaged):
            run(agent, program)
        (info,) = agent.runs()
        agent.cancel(info.id)
        run(agent, program)
        assert agent.state["paid"] == 2
    assert program.paid == [1, 2]


# -- commits that are lost ---------------------------------------------------------------------------------------------


def test_what_an_agent_does_after_lost_commits_is_confirmed_first(store_path, tmp_path):
    program = Program()
    with holdfast.open(store_path) as store:
        with store.agent("a") as agent:
            program.pay(1)
            agent.checkpoint("one")
        store.agent("b").checkpoint("quiet")
    shutil.copytree(store_path, tmp_path / "old")
    with holdfast.open(store_path) as store, store.agent("a"):
        program.pay(2)
    shutil.copy(tmp_path / "old" / "store.db", store_path / "store.db")
    with pytest.raises(Damaged, match="lost acknowledged commits"):
        holdfast.open(store_path)
    with holdfast.open(store_path, readonly=True, recover=True) as store:
        assert [one.status for one in store.effects()] == ["done"]
    for recover in (True, False):  # it is said once, and stays
        with holdfast.open(store_path, recover=recover) as store:
            lost = {(one.agent, one.why) for one in store.effects(in_doubt=True)}
            assert lost == {(name, "what was recorded is lost") for name in "ab"}
            with store.agent("a"), pytest.raises(InDoubt, match="what was recorded is lost"):
                program.pay(2)
            assert store.verify().ok
    assert program.paid == [1, 2]
    with holdfast.open(store_path) as store:
        for one in store.effects(in_doubt=True):
            store.agent(one.agent).resolve(one, "done" if one.agent == "a" else "not-done", why="looked")
        with store.agent("a") as agent:
            with pytest.raises(MaybeRepeated):
                program.pay(2)
            agent.accept()
            program.pay(3)
        with store.agent("b"):
            program.pay(4)
        assert store.verify().ok
    assert program.paid == [1, 2, 3, 4]


def test_lost_checkpoints_alone_leave_nothing_in_doubt(store_path, tmp_path):
    program = Program()
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("one")
    shutil.copytree(store_path, tmp_path / "old")
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("two")
    shutil.copy(tmp_path / "old" / "store.db", store_path / "store.db")
    with holdfast.open(store_path, recover=True) as store, store.agent("a"):
        program.pay(1)
    assert program.paid == [1]
