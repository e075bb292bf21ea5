"""Packs of chunks: proven on every read, here or in a colder place, moved and swept without ever losing one."""

from __future__ import annotations

import os
import random
import shutil
import threading
from itertools import count

import pytest

from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, InputError, StoreFailed
from holdfast.store import packs as room
from holdfast.store.catalog import View
from holdfast.store.changes import Change
from holdfast.store.cipher import PLAIN, Keyed
from holdfast.store.database import create_store
from holdfast.store.engine import Refused
from holdfast.store.files import Layout
from holdfast.store.objects import Folder, Missing, open_objects
from holdfast.store.packs import GRACE_S, Packs, file_name
from holdfast.store.rows import chunk_digest
from holdfast.store.sqlite import Sqlite
from tests.lives import dies
from tests.store.bucket import BUCKET, proxied

PREFIX = "0123abcd"


class Both:
    """The packs of a real store, and a colder place."""

    def __init__(self, path, cold, cipher=PLAIN):
        if not path.exists():
            create_store(path)
        self.layout = Layout(path)
        self.engine = Sqlite(self.layout)
        self.view = View(self.engine, cipher)
        self.cold = open_objects(cold, PREFIX)
        self.packs = Packs(cipher, Folder(self.layout.packs), self.cold)

    def write(self, *values):
        """A pack that rows name."""
        made = self.packs.write([(chunk_digest(value), value) for value in values])
        self.engine.transaction(lambda tx: Change(tx, self.view.cipher).put_pack(made))
        return made.uuid

    def forget(self, pack):
        p = self.view.rows("pack", "WHERE uuid = ?", (pack,))[0][0]

        def change(tx):
            Change(tx, self.view.cipher).delete("chunk", "p", [p])
            Change(tx, self.view.cipher).delete("pack", "p", [p])

        self.engine.transaction(change)

    def read(self, *values):
        return list(self.packs.read(self.view, map(chunk_digest, values)))

    def chill(self, pack):
        return self.packs.chill(self.view, self.engine, pack, lambda: True)

    def warm(self, pack):
        return self.packs.warm(self.view, self.engine, pack)

    def sweep_strays(self, grace_s=GRACE_S):
        def alone(work):
            return self.engine.transaction(lambda tx: work(View(tx, self.view.cipher)))

        return self.packs.sweep_strays(self.view, self.engine, alone, grace_s)

    def file(self, pack):
        return self.layout.packs / file_name(pack)

    def flaws(self, pack):
        return self.packs.check(self.view, pack)


@pytest.fixture
def proxy(monkeypatch):
    with proxied(monkeypatch) as made:
        yield made


@pytest.fixture(params=[PLAIN, Keyed(b"k" * 32, b"u" * 16)], ids=["plain", "encrypted"])
def world(request, tmp_path):
    made = Both(tmp_path / "store", tmp_path / "cold", request.param)
    made.cold.prepare()
    yield made
    made.engine.close()


@pytest.fixture
def far(tmp_path, proxy):
    made = Both(tmp_path / "store", f"s3://{BUCKET}/{random.randbytes(8).hex()}")
    made.cold.prepare()
    yield made
    made.engine.close()


def values(noise, count=8):
    """Of every kind: noise, compressible, both, small, and one that is its own only byte."""
    made = [noise.randbytes(noise.randrange(1, 700_000)) for _ in range(count)]
    made += [bytes([noise.randrange(256)]) * noise.randrange(2, 700_000) for _ in range(count)]
    return [*made, noise.randbytes(300_000) + bytes(400_000), noise.randbytes(1)]


def test_what_is_written_is_read_back(world):
    noise = random.Random(5)
    written = [values(noise) for _ in range(3)]
    for some in written:
        pack = world.write(*(memoryview(bytearray(value)) if noise.random() < 0.5 else value for value in some))
        assert world.file(pack).stat().st_size == world.view.packs()[pack] < sum(map(len, some)) * 0.8
        assert world.flaws(pack) == {}
        assert world.read(*some) == some
    for _ in range(20):
        wanted = noise.choices([value for some in written for value in some], k=noise.randrange(12))
        assert world.read(*wanted) == wanted
    if world.packs.cipher.keyed:
        assert all(
            value[:99] not in file.read_bytes() for file in world.layout.packs.iterdir() for value in written[0][:8]
        )


def test_neighbours_are_read_in_one_request(far, proxy):
    noise = random.Random(6)
    some = [noise.randbytes(50_000) for _ in range(20)]
    far.chill(far.write(*some))
    far.read(some[0])  # where it lies is remembered from now on
    proxy.asked.clear()
    assert far.read(*some) == some
    assert len(proxy.asked) == 1


def test_data_that_changes_while_it_is_saved(world):
    data = bytearray(random.randbytes(300_000))
    digest = chunk_digest(bytes(data))
    data[7] ^= 1
    with pytest.raises(InputError, match="was changed while it was being saved"):
        world.packs.write([(chunk_digest(b"good"), b"good"), (digest, data)])
    with pytest.raises(InputError, match="the format allows"):
        world.packs.write([(digest, bytes(room.CHUNK_MAX_BYTES + 1))])
    assert list(world.layout.packs.iterdir()) == []


def test_every_change_of_a_pack_is_noticed(world):
    noise = random.Random(7)
    some = [noise.randbytes(5000), b"a" * 200_000, noise.randbytes(100)]
    pack, other = world.write(*some), world.write(noise.randbytes(5000), b"b" * 200_000)
    good = world.file(pack).read_bytes()
    places = [0, 9, 4095, 4096, *(noise.randrange(len(good)) for _ in range(60)), len(good) - 1]
    for at in places:
        world.file(pack).write_bytes(good[:at] + bytes([good[at] ^ 1 << noise.randrange(8)]) + good[at + 1 :])
        flaws = world.flaws(pack)
        assert flaws
        for value in some:
            if chunk_digest(value) in flaws:
                with pytest.raises(Damaged, match=chunk_digest(value).hex()):
                    world.read(value)
            else:
                assert world.read(value) == [value]
    for bad in (good[:-1], good + b"x", good[:4096], b"", bytes(len(good)), world.file(other).read_bytes()):
        world.file(pack).write_bytes(bad)
        assert world.flaws(pack)
    world.file(pack).unlink()
    for call in (lambda: world.flaws(pack), lambda: world.read(*some)):
        with pytest.raises(Missing, match=f"{file_name(pack)} is missing"):
            call()


def test_rows_that_claim_too_much_cost_nothing(world):
    value = b"a" * 200_000
    pack = world.write(value)
    p = world.view.rows("pack")[0][0]
    _, _, start, length, stored = world.view.rows("chunk")[0]
    for claimed in (
        (start, 2**50, stored),
        (start, length, 2**40),
        (start, length + 1, stored),
        (-8, 9, 9),
        (2**40, 9, 9),
    ):

        def lie(tx, claimed=claimed):
            change = Change(tx, world.view.cipher)
            change.delete("chunk", "p", [p])
            change.put("chunk", chunk_digest(value), p, *claimed)

        world.engine.transaction(lie)
        with pytest.raises(Damaged):
            world.read(value)
    assert world.file(pack).exists()


# -- colder places ----------------------------------------------------------------------------------------------


def there(world):
    return {name for name, _ in world.cold.names()}


def test_packs_move_and_are_read_as_before(world):
    some = values(random.Random(8), 3)
    pack, other = world.write(*some[:4]), world.write(*some[4:])
    for _ in range(2):
        assert world.chill(pack)
        assert there(world) == {file_name(pack)}
        assert not world.file(pack).exists()
        assert world.read(*some) == some
        assert world.flaws(pack) == {}
        here, cold = world.packs.whereabouts()[pack]
        assert here is None
        assert cold < 60
        assert world.packs.whereabouts()[other][1] is None
        assert world.chill(pack)
        assert world.warm(pack)
        assert there(world) == set()
        assert world.read(*some) == some
    world.forget(pack)
    assert world.chill(pack)  # nobody needs it
    assert there(world) == set()


def test_a_copy_that_is_left_behind_is_replaced(world):
    """Whoever was stopped in between left both; a damaged one never takes the place of a good one."""
    value = random.randbytes(300_000)
    pack = world.write(value)
    good = world.file(pack).read_bytes()
    left = world.cold._path / file_name(pack)
    for bad in (good, good[:-1], bytes(len(good))):
        left.write_bytes(bad)
        world.file(pack).write_bytes(good)
        assert world.chill(pack)
        assert (left.read_bytes(), world.file(pack).exists()) == (good, False)
    world.file(pack).write_bytes(bytes(len(good)))
    with pytest.raises(Damaged, match="is not what was written"):
        world.chill(pack)
    assert world.read(value) == [value]  # from the other place
    assert world.warm(pack)
    assert world.file(pack).read_bytes() == good


def test_damage_in_a_colder_place_stays_there(far, proxy):
    value = random.randbytes(300_000)
    pack = far.write(value)
    proxy.always("wrong", "GET")
    with pytest.raises(StoreFailed, match="it stays where it is"):
        far.chill(pack)
    assert far.file(pack).exists()
    proxy.well()
    assert far.chill(pack)
    proxy.always("wrong", "GET")
    with pytest.raises(Damaged, match=f"{file_name(pack)} in s3://.* is not what was moved there"):
        far.warm(pack)
    proxy.well()
    assert not far.file(pack).exists()
    assert far.read(value) == [value]


def test_a_place_that_is_away(far, proxy):
    value, second = random.randbytes(300_000), b"here"
    packs = [far.write(value), far.write(b"cold, too"), far.write(second)]
    for pack in packs[:2]:
        far.chill(pack)
    proxy.how = lambda _method, _path: "500"
    assert far.read(second) == [second]
    far.sweep_strays(0)
    reader = far.packs.impatient()
    proxy.asked.clear()
    for pack in packs[:2]:
        for call in (lambda: far.read(value), lambda pack=pack: reader.check(far.view, pack)):
            with pytest.raises(ColdPlaceMissing, match="cannot be reached") as caught:
                call()
            assert caught.value.place == far.cold.place
    assert len(proxy.asked) < 10
    far.file(packs[2]).write_bytes(b"")
    with pytest.raises(Damaged):  # what is here and damaged is not only away
        far.read(second)


def test_the_place_of_the_packs_is_no_colder_place(world, tmp_path):
    (tmp_path / "way").mkdir()
    (tmp_path / "way" / PREFIX).symlink_to(world.layout.packs)
    pack = world.write(b"value")
    same = open_objects(tmp_path / "way", PREFIX)
    same.prepare()
    with pytest.raises(BadOption, match="cannot be where the packs are"):
        Packs(PLAIN, world.packs.here, same).chill(world.view, world.engine, pack, lambda: True)
    assert world.read(b"value") == [b"value"]


def test_reading_while_packs_move(world):
    some = values(random.Random(9), 2)
    packs = [world.write(*some[:3]), world.write(*some[3:])]
    over = threading.Event()

    def move():
        for _ in range(12):
            for pack in packs:
                world.chill(pack)
                world.warm(pack)
        over.set()

    mover = threading.Thread(target=move)
    mover.start()
    while not over.is_set():
        assert world.read(*some) == some
    mover.join()
    assert there(world) == set()


# -- what nothing names -----------------------------------------------------------------------------------------


def test_only_what_nothing_names_is_swept(world):
    value = random.randbytes(9000)
    cold, here = world.write(value), world.write(b"here")
    world.chill(cold)
    stray = world.packs.write([(chunk_digest(b"x"), b"x")]).uuid  # whoever wrote it died before the commit
    half = world.layout.packs / "tmp-half"
    half.write_bytes(b"half")
    (world.layout.packs / "README").write_text("not ours")
    (world.cold._path / file_name(stray)).write_bytes(b"copied")
    assert world.sweep_strays() == 0  # it may be about to be named
    with world.engine.moment():
        assert world.sweep_strays(-1) == 0
        assert world.chill(here) is False  # in both places until somebody tries again
        assert world.read(b"here") == [b"here"]
    assert world.sweep_strays(-1) == 3
    assert (world.layout.packs / "README").exists()
    assert world.read(value, b"here") == [value, b"here"]
    world.forget(cold)
    assert world.sweep_strays(-1) == 1
    assert there(world) == {file_name(here)}


def test_what_was_swept_before_it_was_named_cannot_be_named(world):
    made = world.packs.write([(chunk_digest(b"x"), b"x")])
    assert world.sweep_strays(-1) == 1  # by somebody whose clock is ahead, or who waited for an hour
    with pytest.raises(Refused, match="deleted before anything named it"):
        world.engine.transaction(lambda tx: Change(tx, world.view.cipher).put_pack(made))


# -- killed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do", ["chill", "warm"])
def test_killed_at_any_point_of_a_move(tmp_path, do):
    path, cold = tmp_path / "store", tmp_path / "cold"
    world = Both(path, cold)
    world.cold.prepare()
    value = bytes(range(256)) * 999
    pack = world.write(value)
    if do == "warm":
        world.chill(pack)
    world.engine.close()
    kept = [(one, one.with_name(f"{one.name}-kept")) for one in (path, cold)]
    for one, copy in kept:
        one.rename(copy)

    def moved():
        world = Both(path, cold)
        getattr(world, do)(*world.view.packs())

    for at in count(1, 2):  # before each call that changes a file
        for one, copy in kept:
            shutil.copytree(copy, one)
        died = dies(moved, at, *((os, name) for name in ("open", "write", "fsync", "rename", "unlink")))
        world = Both(path, cold)
        (pack,) = world.view.packs()
        assert world.read(value) == [value]
        assert getattr(world, do)(pack)
        assert world.read(value) == [value]
        world.sweep_strays(-1)
        assert world.file(pack).exists() == (do == "warm")
        assert there(world) == ({file_name(pack)} if do == "chill" else set())
        world.engine.close()
        for one in (path, cold):
            shutil.rmtree(one)
        if not died:
            break
    assert at > 21
