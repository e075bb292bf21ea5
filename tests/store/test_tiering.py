"""Old packs lie in a colder place, are read as before, and nothing is lost on the way or while it is away."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

import holdfast
from holdfast import Policy
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, ReadOnly, StoreBusy, StoreFailed
from holdfast.store.objects import MARK
from tests import warm
from tests.limits import limits
from tests.store.bucket import BUCKET, SECRET, proxied
from tests.store.test_encryption import KEY, OTHER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def proxy(monkeypatch):
    with proxied(monkeypatch) as made:
        yield made


@pytest.fixture(params=["directory", "s3"])
def place(request, tmp_path):
    """Where nothing was put yet."""
    if request.param == "directory":
        return str(tmp_path / "cold place")
    request.getfixturevalue("proxy")
    return f"s3://{BUCKET}/{random.randbytes(8).hex()}"


def filled(path, count=4, key=None):
    """A store with a pack for each checkpoint; the newest is needed where the branch stands. Returns all states."""
    noise = random.Random(7)
    with limits({"SEAL_CHECKPOINTS": 2}), holdfast.open(path, key=key) as store:  # so that not all rest on the first
        for number in range(count):
            store.agent("a").state["weights"] = noise.randbytes(300_000)
            store.agent("a").checkpoint(f"w{number}")
        return states(store)


def states(store):
    return {one.label: holdfast.plain(one.state) for one in store.agent("a", readonly=True).log()}


def packs(path):
    return sorted(file.name for file in path.rglob("*.pack") if not file.name.startswith("tmp-"))


def test_old_packs_move_and_are_read_as_before(store_path, place):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        everything = packs(store_path)
        said = store.tier(f"{place}/", dry_run=True)
        assert (said.packs, said.needed, said.young, said.done) == (3, 1, 0, False)
        assert packs(store_path) == everything
        done = store.tier(f"{place}/")
        assert (done.packs, done.moved_bytes, done.done) == (3, said.moved_bytes, True)
        assert done.place == place if "://" in place else f"file://{place.replace(' ', '%20')}"
        assert len(packs(store_path)) == 1
        assert states(store) == before
        assert store.verify().ok
        assert store.tier(place).packs == 0
        assert store.stats()["cold"] == [{"place": done.place, "packs": 3, "reachable": True}]
    with holdfast.open(store_path, readonly=True) as store:
        assert states(store) == before
        assert store.tier(dry_run=True).packs == 3
        for call in (lambda: store.tier(place), store.tier):
            with pytest.raises(ReadOnly):
                call()
    with holdfast.open(store_path) as store:
        with pytest.raises(BadOption, match="packs go to"):
            store.tier(store_path.with_name("elsewhere"))
        assert store.tier().packs == 3
        assert packs(store_path) == everything
        assert store.stats()["cold"] == []
        assert states(store) == before
        assert store.verify().ok


def test_what_a_branch_holds_stays_and_what_it_has_replaced_moves_at_once(store_path, tmp_path):
    noise = random.Random(1)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["kept"] = {}
        for number in range(6):
            agent.state["weights"] = noise.randbytes(300_000)
            if number < 2:
                agent.state["kept"][number] = noise.randbytes(300_000)
            agent.checkpoint(f"w{number}")
        before = states(store)
        found = store.tier(tmp_path / "cold")
        assert (found.packs, found.needed, found.young) == (3, 3, 0)
        (tmp_path / "cold").rename(tmp_path / "away")
    with holdfast.open(store_path) as store:  # opening it reads nothing of what it holds no more
        agent = store.agent("a")
        assert holdfast.plain(agent.state) == before["w5"]
        agent.state["weights"] = b""
        agent.checkpoint("without the place")


def test_young_packs_stay(store_path, tmp_path):
    filled(store_path)
    with holdfast.open(store_path) as store:
        assert store.tier(tmp_path / "cold", older_than=timedelta(hours=1)).young == 3
        for file in (store_path / "packs").iterdir():
            os.utime(file, (time.time() - 7200,) * 2)
        assert store.tier(tmp_path / "cold", older_than=timedelta(hours=1)).packs == 3


def test_places_that_are_refused(store_path, tmp_path):
    """What would be copied onto itself would be deleted then; what lies in a store is that store's to delete."""
    filled(store_path, 2)
    holdfast.open(tmp_path / "other").close()
    (tmp_path / "link").symlink_to(store_path)
    with holdfast.open(store_path) as store:
        for inside in (store_path, "store/packs", "link/packs", "x/../store/cold", "other/packs"):
            with pytest.raises(BadOption, match="inside a store"):
                store.tier(tmp_path / inside)
        for way in ("x/../store", "link", "%73tore/packs"):
            with pytest.raises(BadOption, match="inside a store"):
                store.tier(f"FILE://{tmp_path}/{way}")
        for bad in (f"s3://me:{SECRET}@b/p", f"s3://b/p?token={SECRET}", f"s3://b#{SECRET}", f"gopher://{SECRET}"):
            with pytest.raises(BadOption) as caught:
                store.tier(bad)
            assert SECRET not in str(caught.value)
        assert store.stats()["cold"] == []
        assert store.tier(f"{store_path}-cold", dry_run=True).packs == 1


def test_stores_may_have_one_place(tmp_path):
    place, paths = tmp_path / "cold", [tmp_path / "one", tmp_path / "two"]
    before = [filled(path) for path in paths]
    first, second = (holdfast.open(path) for path in paths)
    for store in (first, second):
        assert store.tier(place).packs == 3
    for file in place.rglob("*.pack"):
        os.utime(file, (time.time() - 7200,) * 2)
    first.retain(Policy(last=1))
    assert len(packs(place)) == 3
    assert states(second) == before[1]
    second.tier()
    assert packs(place) == []
    assert second.verify().ok
    first.close()
    second.close()


# -- away ---------------------------------------------------------------------------------------------------


def nothing(cold):
    pass


def unmounted(cold):
    cold.mkdir()


def a_file(cold):
    cold.touch()


def a_loop(cold):
    cold.symlink_to(cold)


@pytest.mark.parametrize("instead", [nothing, unmounted, a_file, a_loop])
def test_a_place_that_is_gone_is_named_and_nothing_is_lost(store_path, tmp_path, instead):
    before = filled(store_path)
    cold, away = tmp_path / "cold", tmp_path / "away"
    with holdfast.open(store_path) as store, holdfast.open(tmp_path / "other") as other:
        store.tier(cold)
        cold.rename(away)
        instead(cold)
        state = store.agent("a", readonly=True).at("w0").state
        with pytest.raises(ColdPlaceMissing, match="nothing is lost") as caught:
            _ = state["weights"]
        assert caught.value.place == f"file://{cold}"
        assert len(store.agent("a").state["weights"]) == 300_000
        assert [one["reachable"] for one in store.stats()["cold"]] == [False]
        report = store.verify()
        assert (report.ok, report.problems, report.affected) == (False, [], [])
        assert [(one.place, one.packs) for one in report.unreachable] == [(f"file://{cold}", 3)]
        assert [one.unknown for one in store.verify_restore().agents] == [True]
        for call in (
            store.tier,
            lambda: store.tier(cold),
            lambda: store.push(other),
            lambda: store.export(tmp_path / "f", ["a"]),
            lambda: holdfast.repair(store_path, tmp_path / "repaired"),  # its packs do not count as lost
        ):
            with pytest.raises(ColdPlaceMissing, match=re.escape(str(cold))):
                call()
        assert not (tmp_path / "repaired").exists()
        assert not (tmp_path / "f").exists()
        store.agent("a").state["n"] = 1
        store.agent("a").checkpoint("meanwhile")
        if instead is unmounted:
            cold.rmdir()
        cold.unlink(missing_ok=True)
        away.rename(cold)
        assert states(store) | before == states(store)
        assert store.verify().ok
        store.push(other)
        assert states(other) == states(store)


def test_what_cannot_be_reached_is_never_passed_over(store_path, tmp_path):
    """Going on from an older state is for damage: what is only away comes back."""
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(tmp_path / "cold")
        with closing(store.agent("a")) as agent:
            agent.rollback("w1")
    (tmp_path / "cold").rename(tmp_path / "away")
    with holdfast.open(store_path) as store:
        with pytest.raises(ColdPlaceMissing):
            store.agent("a", recover=True)
        assert store.agent("a", readonly=True).branches() == ["main"]
        (tmp_path / "away").rename(tmp_path / "cold")
        agent = store.agent("a", recover=True)
        assert agent.recovery is None
        assert holdfast.plain(agent.state) == before["w1"]


def test_what_a_policy_lets_go_goes_there_too(store_path, tmp_path):
    filled(store_path)
    cold, away = tmp_path / "cold", tmp_path / "away"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        cold.rename(away)
        store.retain(Policy(last=1))  # works without the place: its files are left for later
        assert store.verify().ok
        away.rename(cold)
        assert store.tier(dry_run=True).packs == 0  # those that are left there are no longer the store's
        for file in cold.rglob("*.pack"):
            os.utime(file, (time.time() - 7200,) * 2)
        store.retain(Policy(last=1))
        assert packs(cold) == []
        assert store.verify().ok


def test_bringing_all_back_leaves_nothing_there_that_a_policy_let_go_while_the_place_was_away(store_path, tmp_path):
    before = filled(store_path)
    cold, away = tmp_path / "cold", tmp_path / "away"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        assert len(packs(cold)) == 3
        cold.rename(away)
        store.retain(Policy(last=1))
        away.rename(cold)
        assert len(packs(cold)) == 3
        with store._db.moment(), pytest.raises(StoreBusy, match="somebody reads"):
            store.tier()
        assert store.tier().packs == 0
        assert packs(cold) == []
        assert states(store) == {"w3": before["w3"]}
        assert store.verify().ok
        assert store.stats()["cold"] == []  # so another place can be given
        store.tier(tmp_path / "elsewhere")


BACK = "import holdfast, sys\nwith holdfast.open(sys.argv[1]) as store: print(store.tier().packs)"


def brought_back(path):
    """How many packs another process has brought back."""
    done = warm.run([sys.executable, "-c", BACK, str(path)], capture_output=True, text=True, timeout=180, check=True)
    return int(done.stdout)


def test_a_place_that_another_process_has_given_up_is_known_again_before_a_pack_goes_there(store_path, tmp_path):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        assert store.tier(tmp_path / "cold").packs == 3
        assert brought_back(store_path) == 3
        assert store.tier(tmp_path / "cold").packs == 3
        assert brought_back(store_path) == 3, "or nobody else would look there"
    with holdfast.open(store_path) as store:
        assert store.verify().ok
        assert states(store) == before


def test_no_pack_goes_to_a_place_that_another_process_gives_up_meanwhile(store_path, tmp_path):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        moves = []

        def after_the_first(what, done, total):
            if not moves:
                moves.append((brought_back(store_path), what, done, total))

        with pytest.raises(StoreBusy, match="somebody else brings the packs back"):
            store.tier(tmp_path / "cold", progress=after_the_first)
        assert moves == [(1, "packs", 1, 3)]
    assert packs(tmp_path / "cold") == []
    with holdfast.open(store_path) as store:
        assert store.verify().ok
        assert states(store) == before


def test_what_a_policy_keeps_may_lie_in_a_place_that_is_away(store_path, tmp_path):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(tmp_path / "cold")
        agent = store.agent("a")
        agent.branch("old", at="w2").close()
        (tmp_path / "cold").rename(tmp_path / "away")
        assert store.retain(Policy(last=1)).removed == 2
        assert store.verify().problems == []
        (tmp_path / "away").rename(tmp_path / "cold")
        assert states(store) == {label: before[label] for label in ("w2", "w3")}
        store.retain(Policy(last=1))
        assert store.verify().ok
        assert holdfast.plain(store.agent("a", branch="old", readonly=True).state) == before["w2"]


# -- damaged ------------------------------------------------------------------------------------------------


def test_a_pack_that_is_missing_or_changed_there_is_damage(store_path, tmp_path):
    before = filled(store_path)
    cold = tmp_path / "cold"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        first, second, third = sorted(cold.rglob("*.pack"))
        kept = {file: file.read_bytes() for file in (first, second, third)}
        first.unlink()
        second.write_bytes(kept[third])
        third.write_bytes(kept[third] + b"more")
        problems = list(map(str, store.verify().problems))
        assert all(any(file.name in problem for problem in problems) for file in kept)
        with pytest.raises(Damaged):
            store.tier()
        with pytest.raises(Damaged):
            states(store)
        (store_path / "packs" / first.name).write_bytes(kept[first])  # found again: what lies here is read first
        second.write_bytes(kept[second])
        third.write_bytes(kept[third])
        assert store.verify().ok
        assert states(store) == before


def test_a_place_that_is_gone_for_good_can_be_given_up(store_path, tmp_path):
    before = filled(store_path)
    cold = tmp_path / "cold"
    with holdfast.open(store_path) as store:
        store.tier(cold)
        shutil.rmtree(cold)
        with pytest.raises(ColdPlaceMissing, match=f"{MARK} is not there") as caught:
            states(store)
        where = cold / re.search(rf"\(([0-9a-f]+)/{MARK}", caught.value.message)[1]
        where.mkdir(parents=True)
        (where / MARK).touch()  # as the guide says
        assert any("is missing" in problem.detail for problem in store.verify().problems)
        with pytest.raises(Damaged, match="which stays known"):
            store.tier()
        assert store.stats()["cold"][0]["reachable"]
    assert not holdfast.repair(store_path, tmp_path / "repaired").whole
    with holdfast.open(tmp_path / "repaired") as store:
        assert store.verify().ok
        assert states(store)["w3"] == before["w3"]
        assert store.stats()["cold"] == []


def test_an_encrypted_store_tells_nothing_there_and_notices_everything(tmp_path):
    path, cold = tmp_path / "store", tmp_path / "chilly"
    before = filled(path, key=KEY)
    with holdfast.open(path, key=KEY) as store:
        store.tier(cold)
        foreign = tmp_path / "foreign"
        filled(foreign, key=KEY)
        first, second, _ = sorted(cold.rglob("*.pack"))
        good = first.read_bytes()
        for file in (*path.rglob("*"), *cold.rglob("*.pack")):
            data = file.read_bytes() if file.is_file() else b""
            assert b"chilly" not in data  # nor is the place told
            assert not any(state["weights"][:64] in data for state in before.values())
        plain = good[:4096] + before["w0"]["weights"].ljust(len(good) - 4096, b"\0")
        other = (foreign / "packs" / packs(foreign)[0]).read_bytes()
        for bad in (second.read_bytes(), other, plain, good[:100_000], bytes(len(good))):
            first.write_bytes(bad)
            assert not store.verify().ok
            with pytest.raises(Damaged):
                states(store)
            with pytest.raises(Damaged, match=f"{first.name} in file://.* is not what was moved there"):
                store.tier()
            assert first.read_bytes() == bad  # it may be put right, and nothing here was deleted for it
            store.tier(cold)
        first.write_bytes(good)
        assert states(store) == before
    with pytest.raises(BadOption, match="lie elsewhere"):
        holdfast.keys.rotate(path, OTHER, key=KEY, full=True)
    with holdfast.open(path, key=KEY) as store:
        store.tier()
    holdfast.keys.rotate(path, OTHER, key=KEY, full=True)
    with holdfast.open(path, key=OTHER) as store:
        assert states(store) == before


# -- servers that fail, and processes that die --------------------------------------------------------------


def test_a_server_that_fails_while_packs_move(store_path, proxy):
    before = filled(store_path, 2)
    everything = packs(store_path)
    place = f"s3://{BUCKET}/{random.randbytes(8).hex()}"
    with holdfast.open(store_path) as store:
        for how, methods in (("500", ("PUT",)), ("done cut", ("PUT",)), ("short", ("GET",)), ("wrong", ("GET",))):
            proxy.always(how, *methods)
            if how == "done cut":  # it has arrived, and is found there
                assert store.tier(place).packs == 1
            else:
                with pytest.raises((ColdPlaceMissing, StoreFailed), match=place) as caught:
                    store.tier(place)
                assert SECRET not in str(caught.value)
                assert packs(store_path) == everything  # nothing is deleted here that was not proven there
            proxy.well()
            assert states(store) == before
            store.tier(place)
            assert len(packs(store_path)) == 1
            proxy.always("500", "DELETE")
            with pytest.raises(ColdPlaceMissing):
                store.tier()
            assert states(store) == before
            proxy.well()
            store.tier()
            assert packs(store_path) == everything
        assert store.verify().ok
    assert not any(SECRET.encode() in file.read_bytes() for file in store_path.rglob("*") if file.is_file())


def start(path, place):
    code = (
        "import holdfast, sys\nfrom holdfast.store import objects\nobjects.RETRIES = 1\n"
        f"store = holdfast.open({str(path)!r})\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        f"while True:\n  store.tier({place!r})\n  print('there', flush=True)\n  store.tier()\n"
    )
    child = warm.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.slow
def test_killed_anywhere_nothing_is_lost(store_path, place, request, rounds):
    """Of a server, at any request; with a directory at any time. What is left lying goes, or is taken up again."""
    before = filled(store_path)
    everything = packs(store_path)
    proxy = request.getfixturevalue("proxy") if "://" in place else None
    for number in range(rounds(8, 300)):
        child = start(store_path, place)
        if proxy is not None:
            at = (number * 7) % 40 + 1

            def how(_method, _path, at=at, child=child):
                if len(proxy.asked) == at:
                    child.send_signal(signal.SIGKILL)
                return "done cut" if len(proxy.asked) == at and at % 2 else ""

            proxy.asked.clear()
            proxy.how = how
            child.communicate("go\n", timeout=180)
            proxy.well()
        else:
            print(file=child.stdin, flush=True)
            for _ in range(number % 3):
                assert child.stdout.readline() == "there\n"
            child.send_signal(signal.SIGKILL)
            child.communicate()
        assert child.returncode == -signal.SIGKILL
        with holdfast.open(store_path) as store:
            assert states(store) == before
            assert store.verify().ok
    with holdfast.open(store_path) as store:
        store.tier(place)
        assert len(packs(store_path)) == 1
        store.tier()
        assert packs(store_path) == everything
        assert states(store) == before
