"""Whoever moves packs is killed at every point: nothing is lost, and no copy is left lying that nobody knows of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

import holdfast
from holdfast import Policy
from holdfast.store.tiering import MARK, file_name
from tests.store.dav import serving
from tests.store.test_cold_places import FAR, options
from tests.store.test_encryption import KEY, OTHER
from tests.store.test_tiering import filled, packs, states

ROOT = Path(__file__).resolve().parents[2]
KILLED = -9

pytestmark = pytest.mark.slow


class Mover:
    """The warm process."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.cold_child"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def __call__(self, do, path, to, *, at=0, key=b"", server=""):
        order = {"do": do, "path": str(path), "to": str(to), "at": at, "server": server}
        self.process.stdin.write(json.dumps({**order, "key": key.hex(), "new": OTHER.hex()}) + "\n")
        found = json.loads(self.process.stdout.readline())
        return found["end"], found["passed"]


@pytest.fixture(scope="module")
def mover():
    made = Mover()
    yield made
    made.process.stdin.close()
    assert made.process.wait() == 0
    made.process.stdout.close()


class World:
    """A store and a directory for its packs, as often as they are needed."""

    def __init__(self, room, *, key=None, cold):
        self.room, self.key = room, key
        self.path, self.cold = room / "store", room / "cold"
        self.before = filled(self.path, 2, key=key)
        if cold:
            with holdfast.open(self.path, key=key) as store:
                store.tier(self.cold)
        else:
            self.cold.mkdir()
        for one in (self.path, self.cold):
            shutil.copytree(one, room / f"{one.name}-kept")

    def again(self):
        for one in (self.path, self.cold):
            shutil.rmtree(one)
            shutil.copytree(self.room / f"{one.name}-kept", one)


def cold_names(store):
    return {file_name(pack) for pack in store._catalog.tiers.packs}


def settled(store, names):
    """What lies cold is what the store knows of, and nothing lies at both ends."""
    assert set(names) - {MARK} == cold_names(store)
    assert store._catalog.fact("strays") is None
    assert not cold_names(store) & set(packs(store.path / "packs"))


def points(mover, world, do, count):
    """A number of points of the whole way, spread over it, the first and the last among them."""
    world.again()
    end, passed = mover(do, world.path, world.cold, key=world.key or b"")
    assert (end, passed > 0) == (0, True)
    chosen = sorted({round(1 + (passed - 1) * one / max(1, count - 1)) for one in range(count)})
    for at in chosen:
        world.again()
        end, _ = mover(do, world.path, world.cold, at=at, key=world.key or b"")
        assert end in {KILLED, 0}  # a lock that had to be waited for makes the way longer or shorter
        yield at


@pytest.mark.parametrize("do", ["tier", "back", "retain"])
def test_killed_at_any_point(tmp_path, mover, rounds, do):
    world = World(tmp_path, cold=do != "tier")
    for _ in points(mover, world, do, rounds(3, 1000)):
        with holdfast.open(world.path) as store:
            if do != "retain":
                assert states(store) == world.before
            assert store.verify().ok
            {
                "tier": lambda: store.tier(world.cold),
                "back": store.tier,
                "retain": lambda: store.retain(Policy(last=1)),
            }[do]()
            settled(store, [file.name for file in world.cold.iterdir()])
            assert len(cold_names(store)) == (do == "tier")
            assert store.verify().ok


def test_killed_at_any_point_another_command_clears_what_is_left(tmp_path, mover, rounds):
    """Not the one that was killed: retention after a move, and the way back after nothing arrived."""
    world = World(tmp_path, cold=False)
    for at in points(mover, world, "tier", rounds(3, 1000)):
        with holdfast.open(world.path) as store:
            if at % 2:
                store.retain(Policy(last=1000))
                assert {file.name for file in world.cold.iterdir()} - {MARK} == cold_names(store)
            else:
                store.tier()
                assert {file.name for file in world.cold.iterdir()} <= {MARK}
            assert states(store) == world.before


def test_killed_at_any_point_while_the_master_key_changes(tmp_path, mover, rounds):
    world = World(tmp_path, key=KEY, cold=True)
    old = set(packs(world.cold))
    for _ in points(mover, world, "rotate", rounds(3, 1000)):
        try:
            holdfast.keys.rotate(world.path, OTHER, key=KEY, full=True)
        except holdfast.errors.WrongKey:  # it had begun
            holdfast.keys.rotate(world.path, OTHER, key=OTHER, full=True)
        with holdfast.open(world.path, key=OTHER) as store:
            store.tier(world.cold)
            settled(store, [file.name for file in world.cold.iterdir()])
            assert not old & set(packs(world.cold))  # nothing is left that the old key can read
            assert states(store) == world.before
            assert store.verify().ok


def test_killed_at_any_request_to_a_server(tmp_path, mover, monkeypatch, rounds):
    world = World(tmp_path, cold=False)
    with serving() as server:
        monkeypatch.setitem(fsspec.config.conf, "webdav", options(server))
        for do in ("tier", "back"):
            server.how = lambda _method, _name: ""
            begin(world, server, do)
            server.asked.clear()
            assert mover(do, world.path, FAR, server=server.url)[0] == 0
            requests = len(server.asked)
            wanted = rounds(3, 1000)
            for at in sorted({round((requests - 1) * one / max(1, wanted - 1)) for one in range(wanted)}):
                begin(world, server, do)
                server.asked.clear()
                how = "kill" if at % 2 else "done kill"
                server.how = lambda _method, _name, at=at, how=how: how if len(server.asked) == at + 1 else ""
                assert mover(do, world.path, FAR, server=server.url)[0] == KILLED
                server.how = lambda _method, _name: ""
                with holdfast.open(world.path) as store:
                    assert states(store) == world.before
                    if do == "tier":
                        store.tier(FAR)
                    else:
                        store.tier()
                    settled(store, server.names())
                    assert store.verify().ok


def begin(world, server, do):
    world.again()
    server.objects.clear()
    server.folders = {"/"}
    if do == "back":
        with holdfast.open(world.path) as store:
            store.tier(FAR)
