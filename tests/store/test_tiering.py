"""Tiering: old packs lie elsewhere, are read as before, and nothing is lost on the way."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest

import holdfast
from holdfast import Policy
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, ReadOnly
from holdfast.store import sealing, tiering

ROOT = Path(__file__).resolve().parents[2]


def filled(path, count=4):
    """A store with a pack for each checkpoint; the newest is needed by the head."""
    noise = random.Random(7)
    with pytest.MonkeyPatch.context() as patch, holdfast.open(path) as store:
        patch.setattr(sealing, "SEAL_CHECKPOINTS", 2)  # loading the newest reads what came since the last seal
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
            assert sum(f"file://{cold}" in problem.detail for problem in report.problems) >= 3
            with pytest.raises(ColdPlaceMissing):
                store.tier()
            store.agent("a").state["n"] = 1
            store.agent("a").checkpoint("meanwhile")
        cold.rmdir()
        away.rename(cold)
        assert {label: state for label, state in states(store).items() if label in before} == before
        assert store.verify().ok


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


def test_refused(store_path, tmp_path):
    filled(store_path)
    with holdfast.open(store_path) as store, pytest.raises(BadOption, match="gopher"):
        store.tier("gopher://there")
    with holdfast.open(store_path, readonly=True) as store:
        assert store.tier(tmp_path / "cold", dry_run=True).packs == 3
        with pytest.raises(ReadOnly):
            store.tier(tmp_path / "cold")


class Memory:
    """A place as an object store would be: nothing but names and bytes."""

    objects: ClassVar[dict[str, bytes]] = {}

    def __init__(self, url):
        self.url = url

    def prepare(self): ...

    def put(self, name, source):
        self.objects[name] = source.read_bytes()

    def digest(self, name):
        return tiering.blake3(self.objects[name]).digest()

    def read(self, name, offset, size):
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name][offset : offset + size]

    def size(self, name):
        return len(self.objects[name])

    def fetch(self, name, target):
        target.write_bytes(self.objects[name])

    def remove(self, name):
        self.objects.pop(name, None)


def test_another_kind_of_place_needs_no_more_than_the_interface(store_path, monkeypatch):
    monkeypatch.setitem(tiering.SCHEMES, "memory", Memory)
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        assert store.tier("memory://bucket/prefix").packs == 3
        assert states(store) == before
        assert store.verify().ok
        assert store.tier().packs == 3
        assert Memory.objects == {}
        assert states(store) == before


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
    for _ in range(rounds(4, 300)):
        code = f"from tests.store.test_tiering import moving; moving({str(path)!r}, {str(cold)!r})"
        with subprocess.Popen(
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
