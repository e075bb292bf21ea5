"""Files, copies of the process, rules and quiet threads at once: none of them breaks what another one promises."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest

import holdfast
from holdfast.errors import DiskFull, InvariantViolated
from holdfast.store.engine import Unsure
from tests.conftest import unsaved


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as opened:
        yield opened


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "f").write_text("one")
    return tmp_path / "repo"


@pytest.fixture
def coder(store, repo):
    agent = store.agent("coder", workspace=repo, when=holdfast.When(every_steps=1))
    agent.state["n"] = 0
    agent.checkpoint("one")
    return agent


def test_an_interrupt_after_the_capture_costs_no_file(store, coder, repo):
    data = os.urandom(60_000)
    (repo / "g").write_bytes(data)
    cut = [True]

    def resume() -> None:
        if cut.pop():
            signal.raise_signal(signal.SIGINT)

    coder.quiesce(pause=lambda: None, resume=resume)
    coder.state["n"] = 1
    with pytest.raises(KeyboardInterrupt):
        coder.step()
    cut.append(False)
    coder.state["n"] = 2
    coder.checkpoint("two")
    assert coder.read_file("g") == data
    assert not list(store.verify().problems)


def test_a_failing_state_whose_commit_is_not_known_costs_no_file(store, coder, repo, monkeypatch):
    data = os.urandom(60_000)
    (repo / "g").write_bytes(data)
    change = coder._db.change

    def unsure(work, *more):
        monkeypatch.undo()
        change(work, *more)
        raise Unsure("the answer was lost")

    monkeypatch.setattr(coder._db, "change", unsure)
    with suppress(Unsure):
        coder._host.beside("failing", "why", "phase failed")
    assert [coder.read_file("g", one) for one in coder.abandoned()] == [data]
    coder.checkpoint("two")
    assert coder.read_file("g") == data
    assert not list(store.verify().problems)


def test_a_failing_state_that_cannot_be_written_is_not_on_the_line(coder, monkeypatch):
    def full(*_):
        raise DiskFull("no room")

    coder.state["big"] = os.urandom(600_000)
    monkeypatch.setattr(coder._db.packs, "write", full)
    with pytest.raises(DiskFull):
        coder._host.beside("failing", "why", "phase failed")
    monkeypatch.undo()
    coder.checkpoint("two")
    assert [one.label for one in coder.log()] == ["two", "one"]


def test_a_failing_phase_waits_for_the_copy_that_writes(store):
    agent = store.agent("large")
    agent.checkpoint("one")
    agent.state["large"] = [{"number": number} for number in range(50_000)]
    saving = agent.checkpoint("forked", mode="fork")
    with suppress(ValueError), agent.phase("plan"):
        agent.state["n"] = 1
        raise ValueError
    assert saving.wait().label == "forked"
    assert [one.label for one in agent.log(all=True)] == ["plan failed", "forked", "one"]


@pytest.mark.parametrize("meanwhile", ["saved", "rolled back"])
def test_files_that_were_looked_at_too_early_are_looked_at_again(coder, repo, meanwhile):
    (repo / "f").write_text("two")
    look = coder._look_later

    async def late():
        found = await look()
        if meanwhile == "saved":
            (repo / "f").write_text("three")
            coder.checkpoint("between")
        else:
            coder.rollback("one")
        return found

    coder._look_later = late
    coder.state["n"] = 1
    asyncio.run(coder.acheckpoint("late"))
    assert coder.read_file("f").decode() == (repo / "f").read_text() == ("three" if meanwhile == "saved" else "one")


def test_a_branch_whose_files_went_on_elsewhere_is_not_taken_again(store, coder, repo):
    lease, coder._lease = coder._lease, None
    (repo / "f").write_text("two")
    coder._writer.checkpoint(coder._document, "elsewhere")
    before = coder._writer._now
    coder._writer._now = before._replace(firm=before.firm._replace(id=coder.log()[1]._id))
    with pytest.raises(holdfast.Fenced):
        coder._retake(thawed=True)
    lease.release()


@unsaved
def test_what_was_never_saved_is_nothing_to_compare_with(store):
    agent = store.agent("rising", when=holdfast.When(changed_bytes=10**6))
    agent.state["x"] = 5
    agent.invariant("x", monotonic="up", then="refuse")
    agent.checkpoint("one")
    agent.state["x"] = 3
    agent.step()
    with pytest.raises(InvariantViolated):
        agent.checkpoint("two")
    with suppress(ValueError), agent.phase("plan"):
        raise ValueError
    with pytest.raises(InvariantViolated):
        agent.checkpoint("two")


def test_what_a_pause_changes_before_an_undo_is_saved_and_is_what_is_undone(coder, repo):
    (repo / "f").write_text("two")
    coder.checkpoint("two")
    coder.invariant("n >= 0")
    changed = []

    def pause() -> None:
        if not changed:
            changed.append(True)
            coder.state["n"] = 7

    coder.quiesce(pause=pause)
    coder.undo()
    assert coder.read_file("f").decode() == (repo / "f").read_text() == "two"
    assert (coder.state["n"], coder.log()[1].state["n"]) == (0, 7)
    coder.undo()
    assert coder.read_file("f").decode() == (repo / "f").read_text() == "one"


@pytest.mark.parametrize("where", ["objects", "tier"])
def test_packs_of_a_store_that_lie_in_the_workspace_are_no_part_of_it(tmp_path, repo, where):
    """A rollback would remove them, and with them what was acknowledged."""
    elsewhere = {"objects": str(repo / "blobs")} if where == "objects" else {}
    with holdfast.open(repo / ".holdfast", **elsewhere) as store:
        coder = store.agent("coder", workspace=repo)
        for name in ("one", "two"):
            coder.state[name] = os.urandom(300_000)
            coder.checkpoint(name)
        coder.tag("two")
        coder.rollback("one")
        if where == "tier":
            store.tier(str(repo / "archive"))
        coder.state["three"] = 3
        coder.checkpoint("three")
        coder.rollback("one")
        assert len(coder.at("two").state["two"]) == 300_000
        assert store.verify().ok
        assert not [one.path for one in coder.files() if "pack" in one.path]
