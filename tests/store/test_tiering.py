"""Tiering: old packs lie elsewhere, are read as before, and nothing is lost on the way."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast import Policy
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, ReadOnly
from holdfast.store import sealing, tiering
from tests import warm
from tests.store.test_encryption import KEY, MARK, OTHER

ROOT = Path(__file__).resolve().parents[2]


def filled(path, count=4, key=None):
    """A store with a pack for each checkpoint; the newest is needed by the head."""
    noise = random.Random(7)
    with pytest.MonkeyPatch.context() as patch, holdfast.open(path, key=key) as store:
        patch.setattr(sealing, "SEAL_CHECKPOINTS", 2)  # so that not all rest on the first
        agent = store.agent("a")
        for number in range(count):
            agent.state["weights"] = noise.randbytes(300_000)
            agent.checkpoint(f"w{number}")
        return {c.label: holdfast.plain(c.state) for c in agent.log()}


def states(store):
    return {c.label: holdfast.plain(c.state) for c in store.agent("a", readonly=True).log()}


def packs(path):
    return sorted(file.name for file in path.glob("*.pack") if not file.name.startswith("tmp-"))


def test_old_packs_move_and_are_read_as_before(store_path, tmp_path):
    before = filled(store_path)
    cold = tmp_path / "cold place"
    with holdfast.open(store_path) as store:
        all_packs = packs(store_path / "packs")
        said = store.tier(cold, dry_run=True)
        assert (said.packs, said.done, cold.exists()) == (3, False, False)
        done = store.tier(cold)
        assert (done.packs, done.done) == (3, True)
        assert done.moved_bytes == said.moved_bytes > 900_000
        assert done.place == f"file://{tmp_path}/cold%20place"
        assert len(packs(store_path / "packs")) == 1  # what the head needs stays
        assert sorted(packs(store_path / "packs") + packs(cold)) == all_packs
        assert states(store) == before
        assert store.verify().ok
        assert store.tier(cold).packs == 0
        assert store.stats()["cold"] == [{"place": done.place, "packs": 3, "reachable": True}]
    with holdfast.open(store_path) as store:
        assert states(store) == before
        back = store.tier()
        assert back.packs == 3
        assert packs(store_path / "packs") == all_packs
        assert packs(cold) == []
        assert store._catalog.fact("tiers") is None
        assert store.verify().ok


def test_what_was_replaced_can_move_at_once(store_path, tmp_path):
    """However long ago the branch was sealed: opening it reads nothing of what it holds no more."""
    noise = random.Random(1)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        for number in range(6):
            agent.state["weights"] = noise.randbytes(300_000)
            agent.state["kept"] = {**agent.state.get("kept", {}), number: noise.randbytes(300_000) if number < 2 else 1}
            agent.checkpoint(f"w{number}")
        before = states(store)
        found = store.tier(tmp_path / "cold")
        assert (found.packs, found.needed, found.young) == (3, 3, 0)  # the newest, and what is kept of two others
        assert states(store) == before
        (tmp_path / "cold").rename(tmp_path / "away")
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        assert holdfast.plain(agent.state) == before["w5"]
        agent.state["weights"] = b""
        agent.checkpoint("without the place")


def test_a_place_inside_the_store_is_refused(store_path, tmp_path):
    filled(store_path)
    (tmp_path / "link").symlink_to(store_path)
    with holdfast.open(store_path) as store:
        for inside in (store_path, store_path / "packs", store_path / "cold", tmp_path / "link" / "packs"):
            with pytest.raises(BadOption, match="inside"):
                store.tier(inside, dry_run=True)
        before = packs(store_path / "packs")
        for way in ("x/../store", "link", "%73tore"):  # what would be copied onto itself would be deleted then
            for url in (f"file://{tmp_path}/{way}/packs", f"FILE://{tmp_path}/{way}", f"file://{tmp_path}/{way}/cold"):
                with pytest.raises(BadOption, match="inside"):
                    store.tier(url)
        for url in (f"file://localhost{store_path}/packs", "file://store/packs", "file:store/packs"):
            with pytest.raises(BadOption, match="file:///path"):
                store.tier(url)
        with pytest.raises(BadOption, match="inside"):
            store.tier(f"local://{store_path}/packs")  # a driver that knows nothing of all this
        assert packs(store_path / "packs") == before
        assert store.verify().ok
        assert store.tier(f"{store_path}-cold", dry_run=True).packs == 3


def test_the_packs_of_another_store_are_no_place(store_path, tmp_path):
    """It would take them for files of a process that died, and delete them."""
    before = filled(store_path)
    other = tmp_path / "other"
    filled(other, 2)
    with holdfast.open(store_path) as store, holdfast.open(other) as second:
        with pytest.raises(BadOption, match="inside a store"):
            store.tier(other / "packs")
        store.tier(f"local://{other}/packs")
        for file in (other / "packs").glob("*.pack"):
            os.utime(file, (time.time() - 7200,) * 2)
        second.retain(Policy(last=1))
        assert states(store) == before


def test_names_that_are_no_text(store_path, tmp_path):
    """They work for what is only a folder; SQLite cannot open them."""
    before = filled(store_path, 2)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/c\xffld %41"))
    with holdfast.open(store_path) as store:
        assert store.tier(odd).packs == 1
        assert len(packs(odd)) == 1
        assert store.tier(f"file://{tmp_path}/c%FFld%20%2541").packs == 0  # the same place
        assert states(store) == before
        assert store.verify().ok
    with pytest.raises(BadOption, match="UTF-8"):
        holdfast.open(odd.with_name(f"{odd.name} as well"))
    assert sorted(tmp_path.iterdir()) == sorted([store_path, odd])


def test_young_packs_stay(store_path, tmp_path):
    filled(store_path)
    with holdfast.open(store_path) as store:
        assert store.tier(tmp_path / "cold", older_than=timedelta(hours=1)).packs == 0
        for number, file in enumerate(sorted((store_path / "packs").iterdir())):
            os.utime(file, (time.time() - 7200 * (number % 2),) * 2)
        assert store.tier(tmp_path / "cold", older_than=timedelta(hours=1)).packs in {1, 2}


def test_a_place_that_is_gone_is_named_and_nothing_is_lost(store_path, tmp_path):
    before = filled(store_path)
    cold, away = tmp_path / "cold", tmp_path / "away"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        for put_away in (lambda: cold.rename(away), cold.mkdir):  # not there, then there and empty: not mounted
            put_away()
            held = store.agent("a", readonly=True).at("w0").state
            with pytest.raises(ColdPlaceMissing) as caught:
                _ = held["weights"]
            assert caught.value.place == f"file://{cold}"
            assert len(store.agent("a").state["weights"]) == 300_000
            assert [one["reachable"] for one in store.stats()["cold"]] == [False]
            report = store.verify()
            assert not report.ok
            assert report.problems == report.affected == []
            assert [(one.place, one.packs, len(one.checkpoints)) for one in report.unreachable] == [
                (f"file://{cold}", 3, 3)  # not the head, which needs nothing from there
            ]
            drilled = store.drill(sample=100).checkpoints
            assert sum(one.unknown for one in drilled) >= 3
            assert all(one.unknown for one in drilled if one.problem)
            with pytest.raises(ColdPlaceMissing):
                store.tier()
            with pytest.raises(ColdPlaceMissing):
                store.tier(cold)  # must not be made anew: that would hide what lies there
            with pytest.raises(ColdPlaceMissing, match=re.escape(str(cold))):
                holdfast.repair(store_path, tmp_path / "repaired")  # nor must its packs count as lost
            assert not (tmp_path / "repaired").exists()
            store.agent("a").state["n"] = 1
            store.agent("a").checkpoint("meanwhile")
        cold.rmdir()
        away.rename(cold)
        assert {label: state for label, state in states(store).items() if label in before} == before
        assert store.verify().ok


def test_what_cannot_be_reached_is_never_passed_over(store_path, tmp_path):
    """Going on from an older state is for damage: what is only away comes back."""
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(tmp_path / "cold")
        with store.agent("a") as agent:
            agent.rollback("w1")
    (tmp_path / "cold").rename(tmp_path / "away")
    with holdfast.open(store_path) as store:
        with pytest.raises(ColdPlaceMissing):
            store.agent("a", recover=True)
        assert store.agent("a", readonly=True).branches() == ["main"]
        (tmp_path / "away").rename(tmp_path / "cold")
        with store.agent("a", recover=True) as agent:
            assert agent.recovery is None
            assert holdfast.plain(agent.state) == before["w1"]


def test_damage_shows_while_a_place_is_away(store_path, tmp_path):
    filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(tmp_path / "cold")
        (tmp_path / "cold").rename(tmp_path / "away")
        (here,) = (store_path / "packs").glob("*.pack")
        data = bytearray(here.read_bytes())
        data[5000] ^= 1
        here.write_bytes(data)
        report = store.verify()
        head = store.agent("a", readonly=True).head.id
        assert report.affected == [head]
        assert report.unreachable[0].packs == 3
        assert head not in report.unreachable[0].checkpoints


@pytest.mark.parametrize("how", ["a file", "forbidden"])
def test_a_place_that_is_something_else_now(store_path, tmp_path, how):
    filled(store_path, 2)
    cold = tmp_path / "cold"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        cold.rename(tmp_path / "away")
        if how == "a file":
            cold.touch()
        else:
            cold.symlink_to(cold)
        report = store.verify()
        assert report.problems == []
        assert [(one.packs, len(one.checkpoints)) for one in report.unreachable] == [(1, 1)]


def test_values_are_found_again_in_packs_that_lie_elsewhere(store_path, tmp_path):
    """Also when the tables that say where they are in them are lost."""
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(tmp_path / "cold")
    connection = apsw.Connection(str(store_path / "store.db"))
    connection.execute("DELETE FROM chunk; DELETE FROM pack; VACUUM")
    connection.close()
    (tmp_path / "cold").rename(tmp_path / "away")
    with pytest.raises(ColdPlaceMissing, match="cannot be reached"):
        holdfast.repair(store_path, tmp_path / "repaired")
    (tmp_path / "away").rename(tmp_path / "cold")
    there = packs(tmp_path / "cold")
    report = holdfast.repair(store_path, tmp_path / "repaired")
    assert report.whole
    assert any("4 chunk(s) had no place; they were found" in problem for problem in report.problems)
    assert packs(tmp_path / "cold") == there
    with holdfast.open(tmp_path / "repaired") as store:
        assert states(store) == before
        assert store.verify().ok
        assert store._catalog.fact("tiers") is None
    (tmp_path / "cold" / there[0]).unlink()
    assert not holdfast.repair(store_path).whole


def test_a_pack_that_is_missing_or_changed_there_is_damage(store_path, tmp_path):
    filled(store_path)
    cold = tmp_path / "cold"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        first, second, third = sorted(cold.glob("*.pack"))
        first.unlink()
        data = bytearray(second.read_bytes())
        data[5000] ^= 1
        second.write_bytes(data)
        with third.open("ab") as file:
            file.write(b"more")
        report = store.verify()
        assert sum(first.name in str(problem) for problem in report.problems) >= 1
        assert sum("is not what was written" in problem.detail for problem in report.problems) >= 2
        lost = 0
        for checkpoint in store.agent("a", readonly=True).log():
            try:
                holdfast.plain(checkpoint.state)
            except Damaged:
                lost += 1
        assert lost in {2, 3}  # one of them may rest on another


def test_a_place_that_is_gone_for_good_can_be_given_up(store_path, tmp_path):
    before = filled(store_path)
    cold = tmp_path / "cold"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        shutil.rmtree(cold)
        cold.mkdir()
        (cold / tiering.MARK).touch()  # as the guide says
        assert any("is missing from" in problem.detail for problem in store.verify().problems)
    report = holdfast.repair(store_path, tmp_path / "repaired")
    assert not report.whole
    with holdfast.open(tmp_path / "repaired") as store:
        assert store.verify().ok
        assert store._catalog.fact("tiers") is None
        left = states(store)
        assert left["w3"] == before["w3"]


def test_what_a_policy_lets_go_goes_there_too(store_path, tmp_path):
    filled(store_path)
    cold, away = tmp_path / "cold", tmp_path / "away"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        cold.rename(away)
        store.retain(Policy(last=1))  # works without the place: its files are left for later
        assert store.verify().ok
        away.rename(cold)
        assert len(packs(cold)) == 3
        store.retain(Policy(last=1))
        assert packs(cold) == []
        assert store._catalog.fact("tiers") is None
        assert store._catalog.fact("forgetting") is None
        assert store.verify().ok


def test_what_a_policy_keeps_may_lie_in_a_place_that_is_away(store_path, tmp_path):
    """It cannot be sealed then, so what it rests on stays, unseen, until the place is back."""
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(tmp_path / "cold")
        agent = store.agent("a")
        agent.branch("old", at="w2").close()
        (tmp_path / "cold").rename(tmp_path / "away")
        assert store.retain(Policy(last=1), dry_run=True).removed == 2
        assert store.retain(Policy(last=1)).removed == 2
        assert store._catalog.fact("forgetting") is None
        assert store.verify().problems == []
        (tmp_path / "away").rename(tmp_path / "cold")
        assert states(store) == {label: before[label] for label in ("w2", "w3")}
        agent.checkpoint("more")
        store.retain(Policy(last=1))
        assert store.verify().ok
        assert holdfast.plain(store.agent("a", branch="old", readonly=True).state) == before["w2"]


def test_refused(store_path, tmp_path):
    filled(store_path)
    with holdfast.open(store_path, readonly=True) as store:
        assert store.tier(tmp_path / "cold", dry_run=True).packs == 3
        with pytest.raises(ReadOnly):
            store.tier(tmp_path / "cold")


# -- encrypted ----------------------------------------------------------------------------------------------


def planted(path):
    """An encrypted store of which all but the last pack lies cold."""
    with pytest.MonkeyPatch.context() as patch, holdfast.open(path, key=KEY) as store:
        patch.setattr(sealing, "SEAL_CHECKPOINTS", 2)
        agent = store.agent("a")
        for number in range(4):
            agent.state["weights"] = f"{MARK} {number} ".encode() * 30_000
            agent.checkpoint(f"w{number}")
        before = states(store)
        assert store.tier(path.parent / "chilly").packs == 3
    return before


def test_nothing_that_lies_cold_can_be_read_and_the_place_is_not_told(tmp_path):
    path, cold = tmp_path / "store", tmp_path / "chilly"
    before = planted(path)
    assert len(packs(cold)) == 3
    for file in (*path.rglob("*"), *cold.iterdir()):
        data = file.read_bytes() if file.is_file() else b""
        assert MARK.encode() not in data
        assert b"chilly" not in data
    with holdfast.open(path, key=KEY) as store:
        assert states(store) == before
        assert store.verify().ok


def test_cold_packs_of_an_encrypted_store_that_were_swapped_replaced_or_moved_are_noticed(tmp_path):
    path, cold = tmp_path / "store", tmp_path / "chilly"
    before = planted(path)
    planted_too = tmp_path / "second"
    planted_too.mkdir()
    planted(planted_too / "store")
    foreign = next((planted_too / "chilly").glob("*.pack")).read_bytes()
    first, second, _ = sorted(cold.glob("*.pack"))
    good = {file: file.read_bytes() for file in (first, second)}
    plain = good[first][:4096] + (f"{MARK} 0 ".encode() * 30_000).ljust(len(good[first]) - 4096, b"\0")
    for bad in (good[second], foreign, plain, good[first][:100_000], bytes(len(good[first]))):
        first.write_bytes(bad)
        with holdfast.open(path, key=KEY) as store:
            report = store.verify()
            assert not report.ok
            assert {problem.detail for problem in report.problems}
            with pytest.raises(Damaged):
                states(store)
            with pytest.raises(Damaged, match=f"{first.name} in file://.* is not what was moved there"):
                store.tier()
            assert first.read_bytes() == bad  # it may be put right, and nothing here was deleted for it
            store.tier(cold)
        first.write_bytes(good[first])
    with holdfast.open(path, key=KEY) as store:
        assert store.verify().ok
        assert states(store) == before


def test_another_master_key_reaches_what_lies_cold(tmp_path):
    path, cold, away = tmp_path / "store", tmp_path / "chilly", tmp_path / "away"
    before = planted(path)
    old = {file.name: file.read_bytes() for file in cold.glob("*.pack")}
    cold.rename(away)
    with pytest.raises(ColdPlaceMissing, match="chilly"):
        holdfast.keys.rotate(path, OTHER, key=KEY, full=True)
    holdfast.open(path, key=KEY).close()  # nothing has begun
    away.rename(cold)
    holdfast.keys.rotate(path, OTHER, key=KEY, full=True)
    assert len(packs(cold)) == 3
    assert not old.keys() & set(packs(cold))
    assert len(packs(path / "packs")) == 1  # none of them stays here
    with holdfast.open(path, key=OTHER) as store:
        assert states(store) == before
        assert store.verify().ok
        assert store.tier().packs == 3
        assert states(store) == before
    holdfast.keys.rotate(path, KEY, key=OTHER, full=True)  # nothing lies cold now
    with holdfast.open(path, key=KEY) as store:
        assert states(store) == before


# -- killed -------------------------------------------------------------------------------------------------


def moving(path, cold):
    store = holdfast.open(path)
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        store.tier(cold)
        store.tier()


@pytest.mark.slow
def test_killed_anywhere_nothing_is_lost(tmp_path, rounds):
    original = tmp_path / "original"
    before = filled(original, 6)
    noise = random.Random(3)
    path, cold = tmp_path / "store", tmp_path / "cold"
    shutil.copytree(original, path)
    for _ in range(rounds(2, 300)):
        code = f"from tests.store.test_tiering import moving; moving({str(path)!r}, {str(cold)!r})"
        with warm.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline().strip() == "ready"
            process.stdin.write("\n")
            process.stdin.flush()
            time.sleep(noise.random() * 0.3)
            process.send_signal(signal.SIGKILL)
            process.wait()
        with holdfast.open(path) as store:
            assert states(store) == before
            assert store.verify().ok
    with holdfast.open(path) as store:
        store.tier(cold)
        assert len(packs(path / "packs")) == 1
        store.tier()
        assert packs(cold) == []
        assert states(store) == before
