"""Named cases of damage; the campaigns of tests/faults/damage.py try all the others."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import Damaged, HoldfastError
from tests.faults import rich
from tests.faults.damage import make, open_damaged, poke, sql, tells_of_a_move
from tests.memory import memory


def test_an_old_database_put_back_is_noticed(tmp_path):
    """Whole files of an earlier moment are sound in themselves; only the witness knows better."""
    path = tmp_path / "store"
    changes = [
        lambda agent: agent.checkpoint("more"),
        lambda agent: agent.tag("t"),
        lambda agent: agent.mark("one", "suspect", "x"),
        lambda agent: agent.branch("side", at="one"),
        lambda agent: agent.rollback("one"),
        lambda agent: None,  # opening alone: the generation that was given must not be given again
    ]
    for number, change in enumerate(changes):
        with holdfast.open(path) as store:
            agent = store.agent(f"agent {number}")
            agent.state["n"] = number
            agent.checkpoint("one")
        shutil.copy(path / "store.db", tmp_path / "old.db")
        with holdfast.open(path) as store:
            change(store.agent(f"agent {number}"))
        shutil.copy(path / "store.db", tmp_path / "new.db")
        shutil.copy(tmp_path / "old.db", path / "store.db")
        with pytest.raises(Damaged, match="lost acknowledged commits") as caught:
            holdfast.open(path)
        assert caught.value.lost
        assert "recover=True" in caught.value.hint
        shutil.copy(tmp_path / "new.db", path / "store.db")
    with holdfast.open(path) as store:
        assert store.verify().ok
    shutil.copy(tmp_path / "old.db", path / "store.db")
    with holdfast.open(path, recover=True) as store:
        assert store.verify().ok
        assert store.agent("agent 5").state["n"] == 5
    holdfast.open(path).close()


def test_an_old_log_put_back_is_noticed(tmp_path):
    """A log from before is made of valid frames, and SQLite would take it."""
    path = tmp_path / "store"
    rich.build(path)
    rich.build_killed(path)
    with memory() as old:
        shutil.copytree(path, old / "store")
        before = (old / "store" / "store.db-wal").read_bytes()
        with rich.small_limits(), holdfast.open(path, types=rich.TYPES) as store:  # folds the log
            agent = store.agent("second")
            for number in range(12):
                agent.state["counter"]["n"] = 100 + number
                agent.checkpoint(f"later {number}")
            agent.tag("after")
        good = make_copy(path, old / "good")
        for length in (len(before), len(before) // 2 // 512 * 512):
            shutil.rmtree(path)
            shutil.copytree(good, path)
            (path / "store.db-wal").write_bytes(before[:length])
            (path / "store.db-shm").unlink(missing_ok=True)
            with rich.small_limits():
                try:
                    store = open_damaged(path, readonly=True)
                except HoldfastError:
                    continue
                assert not store.verify().ok
                store.close()


def make_copy(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    return to


def test_a_branch_row_of_an_earlier_moment_is_noticed(tmp_path):
    """Its sum fits; the history that follows it does not."""
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        agent = store.agent("a")
        agent.state["n"] = 0
        agent.checkpoint("zero")
    old = sql(path, "SELECT * FROM branch")[0]
    with holdfast.open(path) as store:
        agent = store.agent("a")
        agent.state["n"] = 1
        agent.checkpoint("one")
    sql(path, f"INSERT OR REPLACE INTO branch VALUES ({', '.join('?' * len(old))})", *old)
    with holdfast.open(path, readonly=True) as store:
        report = store.verify()
        assert any(problem.what == "branch main" for problem in report.problems)
    holdfast.repair(path, tmp_path / "new")
    with holdfast.open(tmp_path / "new") as store:
        assert store.verify().ok
        assert store.agent("a").state["n"] == 1


@pytest.fixture
def moved(tmp_path):
    """Two stores whose branches have gone back, were copied, recovered, and brought from the one to the other."""
    paths = [tmp_path / "store", tmp_path / "copy"]
    with holdfast.open(paths[0]) as store, holdfast.open(paths[1]) as copy:
        agent = store.agent("a")
        made = []
        for number in range(4):
            agent.state["n"] = number
            made.append(agent.checkpoint(f"c{number}"))
        agent.rollback(made[1])
        store.push(copy)
        side = agent.branch("side", at=made[2])
        side.state["n"] = 7
        side.checkpoint("side")
        side.rollback(made[0])
        agent.rollback(made[3])
        agent.rollback(made[0])
        agent.state["n"] = 8
        agent.checkpoint("last")
        store.copy("a", "twin")
        store.push(copy)
        for one in (store, copy):
            one.agent("twin").tag("later")  # or else the witness would miss the newest entry
    return paths


def whereabouts(path):
    """Where branches stand, and all checkpoints that each agent sees, with their states."""
    with holdfast.open(path, readonly=True) as store:
        assert store.verify().ok
        agents = [store.agent(info.name, readonly=True) for info in store.agents()]
        return {
            agent.name: (
                {name: store.agent(agent.name, branch=name, readonly=True).head.id for name in agent.branches()},
                {checkpoint.id: holdfast.plain(checkpoint.state) for checkpoint in agent.log(all=True)},
            )
            for agent in agents
        }


def test_an_entry_of_a_move_that_is_missing_is_noticed_and_costs_nothing(moved, tmp_path):
    """Whichever it is: a later move does not stand for it, because heads and what was left follow from all of them."""
    for path in moved:
        there = whereabouts(path)
        rows = [row for row in sql(path, "SELECT * FROM log") if tells_of_a_move(row)]
        assert len(rows) > 4
        for row in rows:
            damaged = make_copy(path, tmp_path / f"damaged {path.name} {row[0]}")
            sql(damaged, "DELETE FROM log WHERE e = ?", row[0])
            with holdfast.open(damaged, readonly=True) as store:
                report = store.verify()
                assert any(problem.what.startswith("branch") for problem in report.problems), (row, report)
            holdfast.repair(damaged, tmp_path / f"new {path.name} {row[0]}")
            assert whereabouts(tmp_path / f"new {path.name} {row[0]}") == there, row


@pytest.mark.slow
def test_what_is_harmless_to_read_is_harmless_to_write(tmp_path, rounds):
    """The first page and the free pages steer what SQLite does next: after a flip there, work goes on or is refused."""
    original = make(tmp_path / "store", page_size=512)
    content = (original.path / "store.db").read_bytes()
    places = [*range(0, 100, rounds(5, 1)), *range(512, 1024, rounds(24, 1))]  # the second one says what pages are for
    outcomes: Counter = Counter()
    for place in places:
        with memory() as directory, rich.small_limits():
            path = directory / "store"
            shutil.copytree(original.path, path)
            poke(path / "store.db", place, bytes([content[place] ^ 1 << (place * 7 % 8)]))
            outcomes[_work_on(path)] += 1
    print(f"\nwriting after a flip: {dict(outcomes)}")


def _work_on(path: Path) -> str:
    try:
        with open_damaged(path) as store:
            sound = store.verify().ok
            for name in ("second", "first@example.com", "empty"):
                agent = store.agent(name)
                agent.state["more"] = {"x": name * 20}
                agent.checkpoint("more")
                agent.tag("more")
            agent.state["bulk"] = b"x" * 2000
            agent.checkpoint("bulk")
    except HoldfastError as error:
        return error.kind
    with open_damaged(path, readonly=True) as store:
        report = store.verify()
        if sound:
            assert report.ok, str(report)
            assert store.agent("second").state["more"] == {"x": "second" * 20}
    return "goes on" if sound else "was detected before"
