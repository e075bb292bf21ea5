"""``init --encrypt`` and ``key``: who can open a store, from a file, a variable, a command, or by being asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests import warm
from tests.cli.test_app import PAGE, differences
from tests.cli.test_moving import HOLD_OPEN, ids


@pytest.fixture
def key_file(tmp_path):
    """``key_file("ab")``: the path of a file with a key made of these digits."""

    def make(digits):
        path = tmp_path / f"{digits}.key"
        path.write_text(f"{digits * 32}\n")
        return str(path)

    return make


@pytest.fixture
def documented():
    """The JSON that the page shows, by its schema."""
    blocks = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    return {block["schema"]: block for block in blocks if "schema" in block}


def test_a_store_gets_a_key_and_then_others(cli, documented, key_file, tmp_path, monkeypatch):
    vault, one, two = tmp_path / "vault", key_file("ab"), key_file("cd")

    def told(*words, store=vault):
        real = cli(*words, "--json", store=store).json
        assert not differences(documented[real["schema"]], real, real["schema"])
        return real

    made = told("init", str(vault), "--encrypt", "--key-file", one, store=None)
    assert made == {"schema": "holdfast.init/1", "store": str(vault), "encrypted": True}
    again = cli("init", str(vault), "--encrypt", "--key-file", one, store=None)
    assert (again.code, "push" in again.err) == (2, True)
    locked = cli("agents", store=vault)
    assert (locked.code, "is encrypted" in locked.err) == (4, True)
    monkeypatch.setenv("HOLDFAST_KEY_FILE", one)
    assert cli("agents", store=vault).code == 0
    monkeypatch.setenv("SOME_KEY", "cd" * 32)
    assert told("key", "add", "--new-key-env", "SOME_KEY")["key"]["number"] == 2
    assert [(one["number"], one["kind"]) for one in told("key")["keys"]] == [(1, "key"), (2, "key")]
    monkeypatch.setenv("HOLDFAST_KEY_FILE", two)
    assert cli("key", "remove", "1", store=vault).code == 9
    assert cli("key", "remove", "1", "--yes", "--json", store=vault).json["key"] == {"number": 1}
    assert cli("key", "remove", "2", "--yes", store=vault).code == 2, "the last one stays"
    assert cli("key", "rotate", "--new-key-command", f"cat {one}", store=vault).code == 0
    assert cli("agents", store=vault).code == 4, "it was the one in use"
    monkeypatch.setenv("HOLDFAST_KEY_FILE", one)
    assert cli("verify", store=vault).code == 0


def test_a_key_that_is_set_and_not_used_is_a_question(cli, key_file, tmp_path, monkeypatch):
    place, key = tmp_path / "place", key_file("ab")
    assert cli("init", str(place), "--key-file", key, store=None).code == 2
    monkeypatch.setenv("HOLDFAST_KEY_FILE", key)
    assert cli("init", str(place), store=None).code == 2
    monkeypatch.delenv("HOLDFAST_KEY_FILE")
    assert not place.exists()
    assert cli("init", str(place), store=None).code == 0
    assert "not encrypted" in cli("key", store=place).out


def test_a_person_is_asked_for_the_passphrase_which_is_not_shown(terminal, tmp_path):
    """Twice for a new one, once for one that is there."""
    place, word = tmp_path / "vault", "open sesame"
    twice = [("new store: ", word), ("again: ", word)]
    made = terminal("init", str(place), "--encrypt", answers=twice)
    assert (made.code, "sesame" in made.out) == (0, False), made.out
    looked = terminal("agents", answers=[("Passphrase of", word)], store=place)
    assert (looked.code, "sesame" in looked.out) == (0, False), looked.out
    assert terminal("agents", answers=[("Passphrase of", "other")], store=place).code == 4


@pytest.fixture
def vault(cli, filled, tmp_path, monkeypatch):
    """An encrypted store with everything in it; its key is in the environment."""
    key = tmp_path / "first.key"
    key.write_text("ab" * 32 + "\n")
    cli("push", str(tmp_path / "vault"), "--dest-key-file", str(key))
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key))
    return tmp_path / "vault"


def test_a_full_rotation_keeps_the_old_store_until_somebody_says_otherwise(cli, vault, tmp_path, monkeypatch):
    before = ids(cli, vault)
    (tmp_path / "second.key").write_text("cd" * 32 + "\n")
    named = ("--new-key-file", str(tmp_path / "second.key"))
    assert cli("key", "rotate", "--discard-old", *named, store=vault).code == 2
    done = cli("key", "rotate", "--full", *named, "--json", store=vault).json
    (old,) = done["old"]
    assert (done["did"], done["full"], done["key"]["kind"]) == ("rotate", True, "key")
    assert cli("verify", store=vault).code == 4, "the old key opens it no more"
    assert ids(cli, old) == before
    assert "was moved to" in cli("tag", "trip-7", "late", store=old).err
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(tmp_path / "second.key"))
    assert ids(cli, vault) == before
    assert cli("key", "rotate", "--discard-old", store=vault).code == 9
    assert cli("key", "rotate", "--discard-old", "--yes", store=vault).out == f"Old store: {old}\nDeleted.\n"
    assert cli("key", "rotate", "--discard-old", "--json", store=vault).json["old"] == []
    assert cli("verify", store=vault).code == 0
    third = ("--new-key-file", str(tmp_path / "first.key"))
    assert cli("key", "rotate", "--full", "--discard-old", *third, "--json", store=vault).json["old"] == []
    assert sorted(path.name for path in tmp_path.iterdir() if "vault" in path.name) == ["vault"]


def test_a_store_that_is_open_elsewhere_is_not_rotated(cli, vault, tmp_path):
    (tmp_path / "second.key").write_text("cd" * 32 + "\n")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with warm.Popen([sys.executable, "-c", HOLD_OPEN, str(vault)], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        words = ("key", "rotate", "--full", "--new-key-file", str(tmp_path / "second.key"))
        refused = cli(*words, store=vault)
        process.kill()
    assert (refused.code, "open elsewhere" in refused.err) == (3, True)
    assert cli("verify", store=vault).code == 0
