"""A store on PostgreSQL, wherever the command line takes a store's place; and its password, which is never shown."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import holdfast

pytestmark = pytest.mark.slow
SECRET = "sw0rdfish-2"
UNSAFE = "HOLDFAST_ALLOW_UNSAFE_POSTGRES"  # the tests' server does not flush


@pytest.fixture
def url(postgres_url, monkeypatch):
    """The URL of an empty database, with a password that the server does not ask for."""
    monkeypatch.setenv(UNSAFE, "1")
    return postgres_url.replace("postgres@", f"postgres:{SECRET}@")


@pytest.fixture
def moved(cli, url, tmp_path):
    """The filled store, moved to a server; large values lie in a directory."""
    done = cli("move", url, "--objects", str(tmp_path / "bulk"), "--yes")
    assert done.code == 0, done
    assert SECRET not in done.out + done.err
    return url


def test_one_command_moves_a_store_to_a_server(cli, moved, filled):
    place = moved.replace(f":{SECRET}", "")
    assert f"was moved to {place.partition('?')[0]}" in cli("tag", "trip-7", "late").err
    for words in (("log", "trip-7"), ("show", "trip-7@good"), ("branch", "trip-7"), ("tag", "trip-7")):
        assert cli(*words, "--json", store=moved).json == cli(*words, "--json").json, words
    for words in (("verify",), ("verify", "--restore"), ("doctor",), ("undo", "trip-7"), ("copy", "trip-7", "copy")):
        assert cli(*words, store=moved).code == 0, words


def test_every_verb_takes_it_and_none_shows_its_password(cli, program, moved, url, tmp_path, monkeypatch):
    file, back = str(tmp_path / "file"), str(tmp_path / "back")
    said = []

    def told(*words, store=moved, code=0):
        ended = cli(*words, store=store)
        said.append(ended.out + ended.err)
        assert ended.code == code, (words, ended)
        return ended

    for words in (
        *(("agents",), ("agents", "--json"), ("runs",), ("effects", "trip-7"), ("log", "trip-7"), ("show", "trip-7")),
        *(("diff", "trip-7@asked", "trip-7"), ("branch", "trip-7", "new"), ("tag", "trip-7", "new-tag")),
        *(
            ("rollback", "trip-7", "--to", "asked", "--dry-run"),
            ("signal", "trip-7", "go", "--any-run"),
            ("repair", "--trust-older"),
        ),
        *(("retain", "--last", "1", "--dry-run"), ("retain", "trip-7", "--last", "1", "--yes"), ("doctor", "--json")),
        *(
            ("export", file, "trip-7"),
            ("import", file),
            ("verify", "--json"),
            ("verify", "--restore", "--json", "--sample", "2"),
        ),
        *(("push", back), ("pull", back, "--json"), ("backup", back), ("remove", "trip-7", "--yes")),
        ("tier", "--to", str(tmp_path / "cold"), "--dry-run"),
    ):
        told(*words)
    told("repair", code=2)
    told("repair", "--to", moved, store=back, code=2)
    assert not Path("postgresql:").exists()
    told("push", moved, code=2)
    told("backup", moved, code=2)
    told("init", moved, store=None, code=2)
    told("key")
    told("key", "rotate", "--full", code=4)
    told("agents", "extra", moved, code=2)
    told("log", "nobody", code=2)
    told("verify", "--json", store=moved.replace("?", "?schema=other&"), code=4)
    told("doctor", "--json", store=moved.replace("?", "?schema=other&"), code=4)
    told("agents", store=moved.replace("host=", "host=/nowhere"), code=6)
    told("agents", store=moved.replace(SECRET, f"{SECRET}@/b"), code=2)
    told("agents", store=moved.replace("postgresql://", "mysql://"), code=2)
    for slip in (moved.replace("://", ":/"), moved.replace("://", ":"), moved.replace("postgresql://", "mysql:/")):
        told("agents", store=slip, code=2)
        told("doctor", "--json", store=slip, code=2)
        told("push", slip, code=2)
        told("key", store=slip, code=2)
        told("dump", "show", "last", store=slip, code=4)
        told("agents", "extra", slip, code=2)
    assert not Path("postgresql:").exists()
    assert not Path("mysql:").exists()
    told("import", file, store=moved.replace("?", "?schema=other&"))  # which makes it
    ended = program("doctor", "--json", store=moved)
    assert (ended.code, ended.json["store"]["filesystem"]) == (0, None)
    said.append(ended.out + ended.err)
    assert not [text for text in said if SECRET in text]


def test_old_packs_of_it_move_to_a_colder_place_and_back(cli, moved, tmp_path):
    with holdfast.open(moved, inert=True) as store, store.agent("photos") as agent:
        for number in range(3):
            agent.state["photo"] = random.Random(number).randbytes(300_000)
            agent.checkpoint()
    assert "Moved 2 packs" in cli("tier", "--to", str(tmp_path / "cold"), "--yes", store=moved).out
    assert cli("verify", store=moved).code == 0
    assert "2 packs in file://" in cli("doctor", store=moved).out
    assert "Moved 2 packs" in cli("tier", "--back", "--yes", store=moved).out
    assert cli("verify", store=moved).code == 0


def test_an_encrypted_one_is_made_and_opened_with_its_key(cli, url, filled, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_text("correct horse battery\n")
    made = cli("init", url, "--encrypt", "--key-file", str(key), store=None)
    assert (made.code, SECRET in made.out) == (0, False)
    assert "passphrase" in cli("key", store=url).out
    assert cli("push", url, "--source-key-file", "none", "--dest-key-file", str(key)).code == 0
    ended = cli("agents", store=url)
    assert (ended.code, SECRET in ended.err) == (4, False)
    prompts = []
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin.isatty", lambda: True)
        patch.setattr("holdfast.cli.keys.getpass", lambda prompt: prompts.append(prompt) or "correct horse battery")
        assert "trip-7" in cli("agents", store=url).out
    assert (len(prompts), SECRET in prompts[0]) == (1, False)
    refused = cli("push", str(tmp_path / "bare"), "--source-key-file", str(key), store=url)
    assert (refused.code, "would not be" in refused.err) == (2, True)
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key))
    (tmp_path / "new").write_text("ab" * 32 + "\n")
    assert cli("key", "rotate", "--new-key-file", str(tmp_path / "new"), store=url).code == 0
    full = cli("key", "rotate", "--full", "--new-key-file", str(key), store=url)
    assert full.code != 0
    assert SECRET not in full.err


def test_a_script_that_is_run_gets_the_url(program, moved, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import holdfast\nprint(len(holdfast.open(inert=True).agents()))\nraise LookupError('no')\n")
    ended = program("run", "--store", moved, str(script), cwd=tmp_path, env={UNSAFE: "1"})
    assert (ended.code, ended.out) == (1, "3\n")
    (dump,) = (tmp_path / "dumps").glob("*.hfdump")
    assert SECRET.encode() not in dump.read_bytes()
    assert SECRET not in ended.err
    assert not list(tmp_path.glob("postgresql*"))
