"""``push``, ``pull``, ``export``, ``import FILE``, and ``verify --restore`` of what arrived."""

from __future__ import annotations

import re

import apsw

import holdfast


def test_push_and_pull_say_what_moved(cli, filled, tmp_path, monkeypatch):
    dest = tmp_path / "dest"
    done = cli("push", str(dest))
    assert done.code == 0
    assert re.search(r"trip-7 +new", done.out)
    assert "and verified" in done.out
    again = cli("pull", str(filled), "trip-7", store=dest)
    assert (again.code, "Nothing was missing." in again.out) == (0, True)
    assert cli("verify", store=dest).code == 0
    new = tmp_path / "new"
    assert cli("push", str(new), "nobody").code == 2
    assert cli("push", str(new), "--as", "one-for-all").code == 2
    assert not new.exists(), "what is refused makes no store"
    monkeypatch.setenv("HOLDFAST_REMOTE", str(dest))
    assert cli("push").code == cli("pull").code == 0
    monkeypatch.setenv("HOLDFAST_REMOTE", str(filled))
    for verb in ("push", "pull", "backup"):
        assert "is the store itself" in cli(verb).err
    assert (
        cli("show", "trip-7", "--json", store=dest).json["checkpoint"]
        == cli("show", "trip-7", "--json").json["checkpoint"]
    )


def test_what_both_went_on_with_needs_a_decision(cli, filled, tmp_path):
    dest = tmp_path / "dest"
    cli("push", str(dest), "trip-7")
    for place in (filled, dest):
        with holdfast.open(place, inert=True) as store, store.agent("trip-7") as agent:
            agent.state["where"] = str(place)
            agent.checkpoint("parted")
    refused = cli("push", str(dest), "trip-7")
    assert refused.code == 3
    assert "gone on in both" in refused.err
    beside = cli("push", "--beside", str(dest), "trip-7", "--json").json
    assert len(beside["agents"][0]["beside"]) == 1
    named = cli("push", "--as", "trip-8", str(dest), "trip-7")
    assert named.code == 0  # it is known there by its uuid, whatever it is called


def test_a_file_takes_agents_elsewhere(cli, filled, tmp_path):
    file, dest = tmp_path / "trip.hfb", tmp_path / "dest"
    assert cli("export", str(file), "trip-7").code == 0
    assert cli("export", str(file), "trip-7").code == 2
    assert cli("export", str(file), "trip-7", "--force").code == 0
    assert cli("export", str(file), "nobody", "--force").code == 2
    assert len(cli("export", str(tmp_path / "all"), "--json").json["agents"]) == 3
    assert cli("import", str(file), store=dest).code == 0
    words = ("log", "trip-7", "--json")
    assert cli(*words, store=dest).json["checkpoints"] == cli(*words).json["checkpoints"]
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert cli("import", str(file), store=dest).code == 5
    file.write_bytes(b"something else")
    assert cli("import", str(file), store=dest).code == 4
    assert cli("import", str(tmp_path / "none"), store=dest).code == 4
    assert "is a directory" in cli("import", str(tmp_path), store=dest).err
    new = tmp_path / "below" / "new"
    assert cli("import", str(file), store=new).code == 4
    file.write_bytes(data[: len(data) // 2])
    assert cli("import", str(file), store=new).code == 5
    file.write_bytes(data)
    assert cli("import", str(file), "nobody", store=new).code == 2
    assert not new.parent.exists(), "a refused file leaves nothing behind"
    assert "created a new store" in cli("import", str(file), store=new).err


def test_restoring_a_sample_ends_with_five_when_something_is_lost(cli, filled, tmp_path):
    dest = tmp_path / "dest"
    cli("push", str(dest))
    good = cli("verify", "--restore", "--sample", "100", store=dest)
    assert (good.code, "restored and proven" in good.out) == (0, True)
    assert cli("verify", "trip-7", "--restore", store=dest).code == 0
    connection = apsw.Connection(str(dest / "store.db"))
    connection.execute("UPDATE loose SET data = zeroblob(length(data))")
    connection.close()
    bad = cli("verify", "--restore", "--sample", "100", store=dest)
    assert bad.code == 5
    assert "lost" in bad.out


def test_two_stores_may_have_keys_of_their_own(cli, filled, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_text("ab" * 32 + "\n")
    dest = tmp_path / "dest"
    made = cli("push", str(dest), "--dest-key-file", str(key))
    assert made.code == 0
    other = tmp_path / "other"
    other.write_text("cd" * 32 + "\n")

    def asked(option, place, *words, store=filled):
        ended = cli(*words, store=store)
        said = " ".join(ended.err.split())
        return ended.code == 4 and option in said and str(place) in said

    for verb in (("push",), ("backup",), ("move", "--yes")):
        assert asked("--dest-key-file FILE", dest, *verb, str(dest))
        assert asked("--dest-key-file FILE", dest, *verb, str(dest), "--dest-key-file", "none")
        with monkeypatch.context() as patch:  # a key that is meant for this one
            patch.setenv("HOLDFAST_KEY_FILE", str(other))
            assert asked("--dest-key-file FILE", dest, *verb, str(dest), "--source-key-file", "none")
    assert asked("--dest-key-file FILE", dest, "pull", str(filled), store=dest)
    assert asked("--source-key-file FILE", dest, "pull", str(dest))
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key))
    assert asked("--source-key-file none", filled, "push", str(dest)), "the source has no key"
    nobody = str(2**22 + 1)
    assert asked("--source-key-file none", filled, "migrate", nobody, str(dest))
    assert "there is no process" in cli("migrate", nobody, str(dest), "--source-key-file", "none").err
    assert cli("push", str(dest), "--source-key-file", "none").code == 0
    assert cli("verify", store=dest).code == 0


def test_a_file_from_an_encrypted_store_is_encrypted(cli, filled, tmp_path, monkeypatch):
    key, own, safe, file = (tmp_path / name for name in ("key", "own", "safe", "trip.hfb"))
    key.write_text("ab" * 32 + "\n")
    own.write_text("cd" * 32 + "\n")
    cli("push", str(safe), "--dest-key-file", str(key))
    refused = cli("push", str(tmp_path / "bare"), "--source-key-file", str(key), store=safe)
    assert (refused.code, "would not be" in refused.err) == (2, True)
    assert not (tmp_path / "bare").exists()

    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key))
    done = cli("export", str(file), "trip-7", "--json", store=safe).json
    assert done["encrypted"]
    assert "encrypted" in cli("export", str(file), "trip-7", "--force", store=safe).out
    assert cli("import", str(file), store=tmp_path / "restored").code == 0
    monkeypatch.delenv("HOLDFAST_KEY_FILE")
    assert cli("import", str(file), store=tmp_path / "bare").code == 4
    refused = cli("import", str(file), "--source-key-file", str(key), store=tmp_path / "bare")
    assert (refused.code, "would not be" in refused.err) == (2, True)
    assert cli("import", str(file), "--source-key-file", str(own), store=tmp_path / "bare").code == 4
    assert not (tmp_path / "bare").exists()
    named = ("--source-key-file", str(key), "--dest-key-file", "none")
    assert cli("import", str(file), *named, store=tmp_path / "bare").code == 0
    words = ("log", "trip-7", "--json")
    assert cli(*words, store=tmp_path / "bare").json["checkpoints"] == cli(*words).json["checkpoints"]

    assert cli("export", str(file), "trip-7", "--force", "--key-file", str(own)).code == 2
    assert cli("export", str(file), "trip-7", "--force", "--encrypt", "--plain").code == 2
    assert cli("export", str(file), "trip-7", "--force", "--encrypt", "--key-file", str(own)).code == 0
    assert cli("import", str(file), store=tmp_path / "bare").code == 4
    assert cli("import", str(file), "--source-key-file", str(own), store=tmp_path / "bare").code == 0
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key))
    assert not cli("export", str(file), "trip-7", "--force", "--plain", "--json", store=safe).json["encrypted"]
    monkeypatch.delenv("HOLDFAST_KEY_FILE")
    assert cli("import", str(file), store=tmp_path / "bare").code == 0
