"""The keys that open a store: where they come from, how they are added and removed, and what damage does to them."""

from __future__ import annotations

import io
import os
import random
import sys

import pytest

from holdfast.errors import BadOption, Damaged, HoldfastError, KeyNeeded, NotAuthentic, WrongKey
from holdfast.store import keys
from holdfast.store.catalog import View
from holdfast.store.cipher import PLAIN, Keyed
from holdfast.store.database import open_database
from holdfast.store.engine import Refused
from holdfast.store.keys import (
    SLOTS_MAX,
    BundleKeys,
    Keys,
    Slot,
    carved,
    find_secret,
    from_environment,
    new_keys,
    problems,
    read_slots,
    secret_of,
    write_slots,
)

KEY, OTHER, THIRD = (secret_of(bytes(range(first, first + 32))) for first in range(3))
UUID = bytes(range(16))


@pytest.fixture
def store(tmp_path):
    with_key = open_database(tmp_path / "store", secret=KEY, remember=False)
    yield with_key
    with_key.close()


def opens(store, secret):
    open_database(store.engine.layout.path, secret=secret, readonly=True, remember=False).close()


def changed(store, change):
    """Change the list of keys as whoever has ``KEY`` would."""
    found = read_slots(store.view)
    master, slot = found.unlock(KEY)
    new = change(found, master, slot)
    store.change(lambda tx: write_slots(tx, new, found))
    return new


def spoil(store, *names, body=None):
    for name in names:
        row = PLAIN.stored("slot", name, body) if body is not None else (name, b"spoilt", b"no sum")
        store.change(lambda tx: tx.tx.do("DELETE FROM slot WHERE name = ?", (name,)))  # noqa: B023
        store.change(lambda tx: tx.tx.do("INSERT INTO slot (name, body, sum) VALUES (?, ?, ?)", row))  # noqa: B023


def test_a_passphrase_opens_however_it_was_typed():
    made, master = new_keys(UUID, secret_of("caf\u00e9 au lait"), 1)
    assert made.unlock(secret_of("cafe\u0301 au lait"))[0] == master
    with pytest.raises(WrongKey, match="this passphrase"):
        made.unlock(secret_of("tea"))


def test_a_store_has_a_bounded_number_of_keys():
    made, master = new_keys(UUID, KEY, 1)
    for number in range(SLOTS_MAX - 1):
        made, _ = made.with_slot(master, secret_of(bytes([number]) * 32), 1)
    assert Keys.decode(made.encode()) == made
    with pytest.raises(BadOption, match="keys already"):
        made.with_slot(master, OTHER, 1)
    assert len(made.with_slot(master, OTHER, 1, instead_of=made.slots[3])[0].slots) == SLOTS_MAX


def test_two_who_change_the_keys_at_once_do_not_undo_each_other(store):
    found = read_slots(store.view)
    master, _ = found.unlock(KEY)
    changed(store, lambda found, master, _: found.with_slot(master, OTHER, 5)[0])
    for over in (found, None):
        with pytest.raises(Refused, match="meanwhile"):
            store.change(lambda tx, over=over: write_slots(tx, found.with_slot(master, THIRD, 5)[0], over))
    assert len(read_slots(store.view).slots) == 2


def test_one_row_is_enough_and_verify_tells(store):
    assert problems(store.view) == []
    for name in keys.COPIES:
        spoil(store, name)
        opens(store, KEY)
        assert problems(store.view)
        changed(store, lambda found, master, _: found.with_slot(master, secret_of(os.urandom(32)), 1)[0])
        assert problems(store.view) == []  # both are written anew
    content = store.engine.layout.catalog.read_bytes() + store.engine.layout.wal.read_bytes()
    spoil(store, *keys.COPIES)
    with pytest.raises(Damaged, match="both copies"):
        opens(store, KEY)
    newest = carved(content)[0]  # repair finds it in the pages
    assert len(newest.slots) == 3
    newest.unlock(KEY)


def test_who_has_no_key_cannot_change_the_list(store):
    changed(store, lambda found, master, _: found.with_slot(master, OTHER, 5)[0])
    found = read_slots(store.view)
    own, _ = new_keys(found.uuid, THIRD, 1)
    first, second = found.slots
    for slots in (found.slots[:1], (*found.slots, own.slots[0]), (first._replace(created=9), second), (second, first)):
        spoil(store, *keys.COPIES, body=found._replace(slots=slots).encode())
        with pytest.raises(NotAuthentic, match="changed by somebody"):
            opens(store, KEY)
    other, _ = new_keys(found.uuid, KEY, 1)  # a list of somebody who has the key, but not this store's master key
    spoil(store, *keys.COPIES, body=other.encode())
    with pytest.raises(NotAuthentic):
        opens(store, KEY)


def test_a_slot_cannot_ask_for_more_than_the_bounds():
    """Before memory is taken: whoever writes the row must not choose how much this machine works."""
    made, _ = new_keys(UUID, KEY, 1)
    slot = made.slots[0]._replace(kind="passphrase")
    for cost in ((2**30, 1, 1), (256 * 1024, 5, 1), (64 * 1024, 3, 200), (0, 1, 1), (8, 0, 1), (-8, 1, 1), (4, 1, 1)):
        with pytest.raises(Damaged, match="format"):
            Keys.decode(made._replace(slots=(slot._replace(cost=cost),)).encode())
    for slots in ((), made.slots * (SLOTS_MAX + 1)):
        with pytest.raises(Damaged):
            Keys.decode(made._replace(slots=slots).encode())


def test_hostile_lists_give_declared_errors_only(rounds):
    made, _ = new_keys(UUID, KEY, 1)
    data = made.encode()
    dice = random.Random(7)
    for _ in range(rounds(500, 200_000)):
        spoiled = bytearray(data[:-32])
        for _ in range(dice.randint(1, 4)):
            spoiled[dice.randrange(len(spoiled))] = dice.randrange(256)
        if bytes(spoiled) != data[:-32]:
            with pytest.raises(HoldfastError):
                Keys.decode(bytes(spoiled) + keys.digest(b"keys", spoiled)).unlock(KEY)
    for length in range(len(data)):
        with pytest.raises(HoldfastError):
            Keys.decode(data[:length])


def test_a_bundle_opens_with_the_keys_of_its_store_or_its_own(store):
    heads = [BundleKeys.of_store(View(store.engine, PLAIN), store.cipher), BundleKeys.of_secret(OTHER, 1)]
    for (head, cipher), secret, wrong in zip(heads, (KEY, OTHER), (OTHER, KEY), strict=True):
        box = cipher.box("bundle", 0, b"frame")
        file = io.BytesIO(head.encode() + b"more")
        read = BundleKeys.read(file.read)
        assert file.read() == b"more"
        assert read.open(secret).unbox("bundle", 0, box) == b"frame"
        with pytest.raises(WrongKey, match="does not open the bundle"):
            read.open(wrong)
        with pytest.raises(KeyNeeded):
            read.open(None)
        for short in (b"", head.encode()[:-1], b"x" * 100):
            with pytest.raises(Damaged):
                BundleKeys.read(io.BytesIO(short).read)
    assert isinstance(store.cipher, Keyed)
    with pytest.raises(HoldfastError):
        store.cipher.unbox("bundle", 0, box)


def test_a_key_comes_from_one_place_and_is_never_shown(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text(KEY.data.hex() + "\n")
    program = f"{sys.executable} -c \"print('{KEY.data.hex()}')\""
    assert find_secret(None) is None
    for name, value in zip(keys.VARIABLES, (KEY.data.hex().upper(), str(file), program), strict=True):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert find_secret(None).data == KEY.data
            assert find_secret(False) is None
            assert find_secret(OTHER) is OTHER
            patch.setenv("HOLDFAST_KEY_FILE" if name == "HOLDFAST_KEY" else "HOLDFAST_KEY", "another")
            with pytest.raises(BadOption, match="are set"):
                find_secret(None)
    for command in ("false", "/no/such/program", "'"):
        with pytest.raises(BadOption, match="key command"):
            keys.from_command(command)
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(file))
    for wrong, about in (
        (b"", "one line"),
        (b"a\nb\n", "one line"),
        (b"\xff\xfe", "not text"),
        (b"x" * 5000, "longer"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(BadOption, match=about) as caught:
            find_secret(None)
        assert "xxx" not in str(caught.value)
    for wrong in (b"", b"short", b"x" * 33, "", "\ud800"):
        with pytest.raises(BadOption):
            secret_of(wrong)
    with pytest.raises(BadOption, match="MY_KEY is not set"):
        from_environment("MY_KEY")
    assert "abc" not in repr(secret_of("abc"))
    assert isinstance(new_keys(UUID, KEY, 1)[0].slots[0], Slot)
