"""The keys of an encrypted store: slots, their file, and the change from one master key to the next."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import main
from holdfast.errors import BadOption, Damaged, HoldfastError, NotAStore, NotEncrypted, Rekeying, WrongKey
from holdfast.store import keys as key_file
from holdfast.store import rekeying
from holdfast.store.keys import BLOCK_BYTES, SLOTS_MAX, read_keys, secret_of, write_keys
from tests import warm
from tests.faults import rich
from tests.store.test_encryption import KEY, MARK, OTHER, content, folded, plant, sql

THIRD = bytes(range(2, 34))


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "store"
    with holdfast.open(made, key=KEY) as store:
        agent = store.agent("a")
        agent.state["n"] = 1
        agent.checkpoint("one")
    return made


# -- slots ------------------------------------------------------------------------------------------------


def test_keys_are_added_replaced_and_removed(path):
    added = holdfast.keys.add(path, OTHER, key=KEY)
    assert [(one.number, one.kind) for one in holdfast.keys.listed(path)] == [(1, "key"), (2, "key")]
    holdfast.open(path, key=OTHER).close()
    holdfast.keys.rotate(path, THIRD, key=KEY)
    holdfast.open(path, key=THIRD).close()
    with pytest.raises(WrongKey):
        holdfast.open(path, key=KEY)
    holdfast.keys.remove(path, added.number, key=THIRD)
    with pytest.raises(WrongKey):
        holdfast.open(path, key=OTHER)
    (left,) = holdfast.keys.listed(path)
    with pytest.raises(BadOption, match="last key"):
        holdfast.keys.remove(path, left.number, key=THIRD)
    with pytest.raises(BadOption, match="no key number 9"):
        holdfast.keys.remove(path, 9, key=THIRD)
    with holdfast.open(path, key=THIRD) as store:
        assert store.agent("a").state["n"] == 1
        assert store.verify().ok


def test_a_key_has_one_slot(path):
    """Removing the one that is listed would leave the other, and the key would still open the store."""
    holdfast.keys.add(path, OTHER, key=KEY)
    before = (path / "keys").read_bytes()
    for change in (holdfast.keys.add, holdfast.keys.rotate):
        for known in (KEY, OTHER):
            with pytest.raises(BadOption, match="opens the store already"):
                change(path, known, key=KEY)
    assert (path / "keys").read_bytes() == before


def test_a_store_has_a_bounded_number_of_keys(path):
    for number in range(SLOTS_MAX - 1):
        holdfast.keys.add(path, bytes([number]) * 32, key=KEY)
    before = (path / "keys").read_bytes()
    with pytest.raises(BadOption, match="keys already"):
        holdfast.keys.add(path, OTHER, key=KEY)
    assert (path / "keys").read_bytes() == before
    holdfast.open(path, key=bytes([3]) * 32).close()


def test_keys_of_a_plain_store_cannot_be_changed(tmp_path):
    holdfast.open(tmp_path / "plain", key=False).close()
    for change in (
        holdfast.keys.listed,
        lambda path: holdfast.keys.add(path, OTHER, key=KEY),
        lambda path: holdfast.keys.remove(path, 1, key=KEY),
        lambda path: holdfast.keys.rotate(path, OTHER, key=KEY),
        lambda path: holdfast.keys.rotate(path, OTHER, key=KEY, full=True),
    ):
        with pytest.raises(NotEncrypted):
            change(tmp_path / "plain")
        with pytest.raises(NotAStore, match="there is no store"):
            change(tmp_path / "nowhere")


def test_one_copy_of_the_keys_is_enough_and_verify_tells(path):
    data = (path / "keys").read_bytes()
    for first in (0, BLOCK_BYTES):
        spoiled = bytearray(data)
        spoiled[first + 40] ^= 1
        (path / "keys").write_bytes(spoiled)
        with holdfast.open(path, key=KEY, readonly=True) as store:
            assert [problem.what for problem in store.verify().problems] == ["keys"]
        holdfast.keys.add(path, os.urandom(32), key=KEY)  # writes both anew
        with holdfast.open(path, key=KEY, readonly=True) as store:
            assert store.verify().ok
    spoiled = bytearray(data)
    spoiled[40] ^= 1
    spoiled[BLOCK_BYTES + 40] ^= 1
    (path / "keys").write_bytes(spoiled)
    with pytest.raises(Damaged, match="both copies"):
        holdfast.open(path, key=KEY)


def test_slots_changed_by_somebody_without_a_key_are_refused(path):
    """A slot that the key still opens, in a list that somebody changed: another one was taken out."""
    holdfast.keys.add(path, OTHER, key=KEY)
    found = read_keys(path)
    write_keys(path, key_file.replace(found, slots=found.slots[:1]))
    with pytest.raises(Damaged, match="changed by somebody"):
        holdfast.open(path, key=KEY)


def test_a_slot_cannot_ask_for_more_than_the_bounds(path):
    """Before memory is taken: whoever writes the file must not choose how much this machine works."""
    found = read_keys(path)
    slot = found.slots[0]
    for cost in ((2**30, 1, 1), (256 * 1024, 5, 1), (64 * 1024, 3, 200), (0, 1, 1), (8, 0, 1), (-8, 1, 1), (4, 1, 1)):
        write_keys(path, key_file.replace(found, slots=(key_file.replace(slot, kind="passphrase", cost=cost),)))
        with pytest.raises(Damaged):
            holdfast.open(path, key="some passphrase")
    for slots in ((), (slot,) * (SLOTS_MAX + 1)):
        (path / "keys").write_bytes(b"")
        write_keys(path, key_file.replace(found, slots=slots)) if len(slots) < 17 else None
        with pytest.raises(Damaged):
            holdfast.open(path, key=KEY)


def test_hostile_key_files_give_declared_errors_only(path, rounds):
    data = (path / "keys").read_bytes()[:BLOCK_BYTES]
    dice = random.Random(7)
    for _ in range(rounds(200, 100_000)):
        spoiled = bytearray(data.rstrip(b"\0"))
        for _ in range(dice.randint(1, 4)):
            spoiled[dice.randrange(12, len(spoiled) - 32)] = dice.randrange(256)
        if spoiled == data.rstrip(b"\0"):
            continue
        body = bytes(spoiled[:-32])
        block = (body + key_file.digest(b"holdfast.keys", body)).ljust(BLOCK_BYTES, b"\0")
        (path / "keys").write_bytes(block * 2)
        with pytest.raises(HoldfastError):
            holdfast.open(path, key=KEY)


# -- another master key -----------------------------------------------------------------------------------


def export(path: Path, key: bytes):
    with rich.small_limits(), holdfast.open(path, key=key, readonly=True) as store:
        assert store.verify().ok
        return rich.export(store)


def test_everything_is_encrypted_anew_and_nothing_else_changes(tmp_path):
    path = tmp_path / "store"
    plant(path, key=KEY)
    holdfast.keys.add(path, OTHER, key=KEY)
    folded(path)
    before = export(path, KEY)
    old_boxes = [
        value
        for table, column in (("checkpoint", "manifest"), ("event", "body"), ("tail", "data"), ("node", "digest"))
        for (value,) in sql(path, f"SELECT {column} FROM {table}")
    ]
    packs = {file.name for file in (path / "packs").iterdir()}
    seen = []
    made = holdfast.keys.rotate(path, THIRD, key=OTHER, full=True, progress=lambda *report: seen.append(report))
    assert [one.number for one in holdfast.keys.listed(path)] == [made.number]
    for old in (KEY, OTHER):
        with pytest.raises(WrongKey):
            holdfast.open(path, key=old)
    assert export(path, THIRD) == before
    assert {what for what, _, _ in seen} == {"checked", "encrypted"}
    everything = b"".join(content(path).values())
    assert not any(box[24:] in everything for box in old_boxes)
    assert packs.isdisjoint(file.name for file in (path / "packs").iterdir())
    assert MARK.encode() not in everything
    with holdfast.open(path, key=THIRD) as store:
        store.agent(f"agent {MARK}").checkpoint("goes on")
        assert store.verify().ok


def test_whoever_has_the_store_open_meanwhile_is_refused(path):
    with holdfast.open(path, key=KEY) as store:
        agent = store.agent("a")
        holdfast.keys.rotate(path, OTHER, key=KEY, full=True)
        agent.state["n"] = 2
        with pytest.raises(Rekeying):
            agent.checkpoint("too late")
        for read in (
            store.agents,
            lambda: store.agent("another"),
            lambda: store._catalog.agent(b"no such key"),
            lambda: list(agent.log()),
            lambda: store.agent("a", branch="other"),
        ):
            with pytest.raises(Rekeying):
                read()
    with holdfast.open(path, key=OTHER) as store:
        assert store.agent("a").state["n"] == 1
        assert store.verify().ok


ROTATE = """
import sys, holdfast
from holdfast.store import rekeying
rekeying.ROWS_AT_ONCE = 2
print("ready", flush=True)
holdfast.keys.rotate(sys.argv[1], bytes(range(1, 33)), key=bytes(range(32)), full=True,
                     progress=lambda what, done, total: print(what, done, total, flush=True))
print("done", flush=True)
"""


def test_a_change_of_the_master_key_that_was_killed_is_finished(tmp_path, rounds):
    """kill -9 at many moments: the store then has the old key, or the new one finishes what was begun."""
    original = tmp_path / "original"
    with rich.small_limits(), holdfast.open(original, key=KEY, types=rich.TYPES) as store:
        rich.write(store)
    folded(original)
    shutil.rmtree(original / "locks")
    (original / "locks").mkdir()
    before = None
    tries = rounds(5, 300)
    for number in range(tries):
        path = tmp_path / "store"
        shutil.copytree(original, path)
        if before is None:
            with rich.small_limits(), holdfast.open(path, key=KEY, types=rich.TYPES) as store:
                before = rich.export(store)
        child = warm.Popen([sys.executable, "-c", ROTATE, path], stdout=subprocess.PIPE, text=True)
        # By what it says it has done, so that all phases are met however slow the machine is.
        encrypting = 0
        for line in child.stdout:
            encrypting += line.startswith("encrypted")
            if encrypting > number * 130 // tries or (number == 0 and line.startswith("checked")):
                break
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        outcome = _opens(path, KEY) or _opens(path, OTHER)
        if outcome is None:  # between: nobody can use it, and everybody is told
            with pytest.raises(Rekeying):
                holdfast.open(path, key=OTHER)
            with pytest.raises(WrongKey) as caught:  # whoever runs the very same command again
                holdfast.keys.rotate(path, OTHER, key=KEY, full=True)
            assert "with the new key" in caught.value.hint
            with pytest.raises(BadOption, match="another master key"):
                holdfast.keys.add(path, THIRD, key=OTHER)
            holdfast.keys.rotate(path, THIRD, key=OTHER, full=True)  # finishes; the new key is the one given then
            outcome = OTHER
        with rich.small_limits(), holdfast.open(path, key=outcome, types=rich.TYPES) as store:
            assert store.verify().ok
            assert rich.export(store) == before
        assert len(list((path / "packs").iterdir())) == len(list((original / "packs").iterdir()))
        shutil.rmtree(path)


def _opens(path: Path, key: bytes) -> bytes | None:
    try:
        holdfast.open(path, key=key, readonly=True).close()
    except (WrongKey, Rekeying):
        return None
    return key


def test_the_master_key_of_a_damaged_store_is_not_changed(path):
    folded(path)
    ((data,),) = sql(path, "SELECT manifest FROM checkpoint")
    sql(path, "UPDATE checkpoint SET manifest = ?", data[:-1] + bytes([data[-1] ^ 1]))
    before = (path / "keys").read_bytes()
    with pytest.raises(Damaged, match="was not changed"):
        holdfast.keys.rotate(path, OTHER, key=KEY, full=True)
    assert (path / "keys").read_bytes() == before


def test_every_column_of_every_table_is_known_to_the_change_of_keys():
    from holdfast.store.schema import TABLE_NAMES

    assert set(rekeying._TABLES) == set(TABLE_NAMES)
    for table in rekeying._TABLES.values():
        assert set(table.key) <= set(table.columns), table
        assert table.columns[-1] in {"sum", "data"}


# -- the command line -------------------------------------------------------------------------------------


def hold(*words) -> int:
    return main(list(map(str, words)))


def test_init_and_key_on_the_command_line(tmp_path, monkeypatch, capsys):
    path, one, two = tmp_path / "store", tmp_path / "one", tmp_path / "two"
    one.write_text(KEY.hex())
    two.write_text(OTHER.hex())
    assert hold("init", path, "--encrypt", "--key-file", one, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"schema": "holdfast.init/1", "store": str(path), "encrypted": True}
    assert hold("init", path, "--encrypt", "--key-file", one) == 2
    assert "push" in capsys.readouterr().err
    assert hold("--store", path, "agents") == 4
    assert "is encrypted" in capsys.readouterr().err
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(one))
    assert hold("--store", path, "agents") == 0
    monkeypatch.setenv("SOME_KEY", OTHER.hex())
    assert hold("--store", path, "key", "add", "--new-key-env", "SOME_KEY", "--json") == 0
    capsys.readouterr()
    assert hold("--store", path, "key", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["keys"]
    assert [(one["number"], one["kind"]) for one in listed] == [(1, "key"), (2, "key")]
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(two))
    assert hold("--store", path, "key", "remove", "1") == 0
    assert hold("--store", path, "key", "rotate", "--new-key-command", f"cat {one}") == 0
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(one))
    assert hold("--store", path, "key", "rotate", "--full", "--new-key-file", two) == 0
    assert hold("--store", path, "agents") == 4
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(two))
    assert hold("--store", path, "verify") == 0
    assert hold("init", tmp_path / "other") == 2  # a key is set: is it to be encrypted or not?
    monkeypatch.delenv("HOLDFAST_KEY_FILE")
    assert hold("init", tmp_path / "other", "--key-file", one) == 2
    assert hold("init", tmp_path / "other") == 0
    assert hold("--store", tmp_path / "other", "key", "list") == 4
    assert not (tmp_path / "other" / "keys").exists()


def test_a_person_is_asked_for_the_passphrase(tmp_path):
    """At a terminal: twice for a new one, once for one that is there; it is not shown."""
    import pty

    def talk(*words, answers):
        child, terminal = pty.fork()
        if child == 0:
            os.execv(sys.executable, [sys.executable, "-m", "holdfast.cli", *map(str, words)])
        shown = b""
        for prompt, answer in answers:
            end = time.monotonic() + 180
            while prompt not in shown.split(b"\n")[-1] and time.monotonic() < end:
                shown += os.read(terminal, 4096)
            os.write(terminal, answer + b"\n")
        try:
            while data := os.read(terminal, 4096):
                shown += data
        except OSError:
            pass
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown

    path = tmp_path / "store"
    code, shown = talk(
        "init", path, "--encrypt", answers=[(b"new store: ", b"open sesame"), (b"again: ", b"open sesame")]
    )
    assert code == 0, shown
    assert b"sesame" not in shown
    code, shown = talk("--store", path, "agents", answers=[(b"Passphrase of", b"open sesame")])
    assert code == 0, shown
    assert b"sesame" not in shown
    with pytest.raises(WrongKey):
        read_keys(path).unlock(secret_of(KEY))
