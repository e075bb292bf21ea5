"""verify, doctor: verbs that look after the store."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import doctor as machine


def test_verify_of_one_agent(cli):
    assert cli("verify", "user@example.com", "--json").json["checked"]["checkpoints"] == 1
    assert cli("verify", "nobody").code == 2


def test_verify_ends_with_5_and_names_what_is_damaged(filled, program):
    label = b"answered"
    database = max(filled.rglob("*.db"), key=lambda path: path.stat().st_size)
    data = bytearray(database.read_bytes())
    at = data.find(label)
    assert at > 0
    while at != -1:
        data[at] ^= 1
        at = data.find(label, at + 1)
    database.write_bytes(data)
    ended = program("verify")
    assert ended.code == 5
    assert "found." in ended.out
    report = program("verify", "--json")
    assert report.code == 5
    assert not report.json["ok"]
    assert report.json["problems"]
    assert set(report.json["problems"][0]) == {"what", "detail", "agent", "affected"}


def test_verify_tells_of_a_store_that_has_lost_commits(filled, cli, capsys):
    database = filled / "store.db"
    before = database.read_bytes()
    with holdfast.open(filled) as store, store.agent("user@example.com") as agent:
        agent.state["x"] = 1
        agent.checkpoint("later")
    database.write_bytes(before)
    capsys.readouterr()
    for words in [("verify",), ("log", "user@example.com")]:
        ended = cli(*words)
        assert (ended.code, ended.out) == (5, "")
        assert "lost acknowledged commits" in ended.err
        assert "`holdfast repair --to DIR`" in ended.err
    report = cli("verify", "--json")
    assert report.code == 5
    assert "lost acknowledged commits" in report.json["problems"][0]["detail"]


def test_verify_shows_progress_on_a_terminal_only(terminal, program, filled):
    with holdfast.open(filled) as store:
        agent = store.agent("busy")
        for turn in range(40):
            agent.state["turn"] = turn
            agent.checkpoint()
    assert "\x1b[?25l" in terminal("verify", raw=True).out
    assert program("verify").err == ""


def test_doctor_tells_about_the_machine_and_the_store(cli, filled):
    ended = cli("doctor")
    assert ended.code == 0
    for text in (sys.version.split()[0], str(filled), "3 agents, 6 checkpoints", "free", "for 4 KiB", "none"):
        assert text in ended.out
    store = cli("doctor", "--json").json["store"]
    assert store["path"] == str(filled)
    assert store["error"] is None
    assert store["space_bytes"] > 0
    assert store["writers"] == []
    assert {"catalog", "log", "packs"} <= set(store["bytes"])
    # What a workspace needs is said, too.
    assert {"pathspec", "pyfastcdc"} <= set(cli("doctor", "--json").json["optional"])


def test_doctor_says_what_a_look_at_names_and_sizes_finds(cli, tmp_path):
    def troubles(place):
        ended = cli("doctor", "--json", store=place)
        return ended.code, [(one["level"], one["text"].split(". ")[0]) for one in ended.json["troubles"]]

    place, objects = tmp_path / "store", tmp_path / "objects"
    for where in (None, str(objects)):
        with holdfast.open(place, objects=where) as store, store.agent("a") as agent:
            for name in ("one", "two"):
                agent.state[name] = os.urandom(300_000)
                agent.checkpoint()
            assert store.look() == []
        fine = troubles(place)
        assert fine[0] == 0
        if where is not None:
            shutil.copytree(place, tmp_path / "copy")
            code, found = troubles(tmp_path / "copy")
            assert (code, [text for level, text in found if "is a copy of a store" in text]) == (0, [found[0][1]])
            assert "No trouble found" not in cli("doctor", store=tmp_path / "copy").out
        (place / "witness").unlink()
        assert ("warning", "witness: the file is missing") in troubles(place)[1]
        packs = sorted((objects if where else place).rglob("*.pack"))
        name = f"packs/{packs[0].name}"
        whole = packs[0].read_bytes()
        packs[0].write_bytes(whole[:-4096])
        code, found = troubles(place)
        assert (code, ("error", f"{name} is not as long as it was written") in found) == (5, True)
        assert "`holdfast verify`" in cli("doctor", store=place).out
        packs[0].unlink()
        code, found = troubles(place)
        assert (code, ("error", f"{name} is missing") in found) == (5, True)
        packs[1].unlink()
        assert ("error", f"{name} is missing; so are 1 more") in troubles(place)[1]
        shutil.rmtree(place)


def test_doctor_names_who_writes(cli, filled, program):
    with holdfast.open(filled, inert=True) as store, store.agent("trip-7"):
        out = program("doctor").out
        writers = program("doctor", "--json").json["store"]["writers"]
    assert f"process {os.getpid()} on " in out
    assert [(writer["agent"], writer["pid"]) for writer in writers] == [("trip-7", os.getpid())]


def test_doctor_without_a_store_is_no_failure_unless_one_was_named(tmp_path, program):
    ended = program("doctor", cwd=tmp_path, env={"HOLDFAST_STORE": ""})
    assert ended.code == 0
    assert "There is no store here" in ended.out
    for words in [("doctor", "--store", "nowhere"), ("doctor", "--store", "nowhere", "--json")]:
        assert program(*words, cwd=tmp_path).code == 4
    assert program("doctor", store=tmp_path / "nowhere", cwd=tmp_path).code == 4
    assert not (tmp_path / "nowhere").exists()


def test_doctor_explains_what_is_not_a_store(tmp_path, cli):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    ended = cli("doctor", store=tmp_path / "other")
    assert ended.code == 4
    assert "error: " in ended.out
    assert cli("doctor", "--json", store=tmp_path / "other").json["store"]["error"]["kind"] == "not-a-store"


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        (
            '[when]\nadaptive = true\n\n[when.agents."trip-*"]\nevry_s = 30\n',
            5,
            "there is no 'evry_s'. Did you mean every_s?",
        ),
        ("[when]\nadaptive = true\nmin_s = 9\nmax_s = 3\n\n[when.agents]\nx = false\n", 4, "min_s=9 is above max_s=3"),
        ("[when]\n[when.agents.x]\nevery_s = 5\n[when.agents.y]\nbackground = true\n", 4, "Say when:"),
        ("[when]\nevery_s = 5 5\n", 2, "cannot be read"),
    ],
)
def test_doctor_says_what_is_wrong_with_the_file_that_says_when_and_where(cli, filled, text, line, word):
    file = filled / "holdfast.toml"
    file.write_text(text)
    ended = cli("doctor")
    said = " ".join(ended.out.split())
    assert ended.code == 2
    assert "No agent can be opened" in said
    assert str(file) in said
    assert f"line {line}" in said
    assert word in said
    told = cli("doctor", "--json").json
    assert told["store"]["when"]["kind"] == "bad-option"
    assert [one["level"] for one in told["troubles"]] == ["error"]
    file.write_text("[when]\nevery_s = 5\n")
    assert (cli("doctor").code, cli("doctor", "--json").json["store"]["when"]) == (0, None)
    (filled.parent / "holdfast.toml").write_text("[when.agents.trip-7]\nevery_s = 6\n")
    assert "disagree about when to checkpoint 'trip-7'" in " ".join(cli("doctor").out.split())
    with holdfast.open(filled) as store:
        assert store.when("trip-8") == holdfast.When(every_s=5)


def test_the_filesystem_is_named(tmp_path):
    assert machine.filesystem(tmp_path)
    assert machine.filesystem(tmp_path / "nothing") == ""


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_doctor_warns_of_a_store_in_memory(cli, capsys):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        holdfast.open(Path(folder) / "store").close()
        capsys.readouterr()
        data = cli("doctor", "--json", store=Path(folder) / "store").json
    warned = any("gone when the machine restarts" in trouble["text"] for trouble in data["troubles"])
    assert warned == (data["store"]["filesystem"] in machine.VOLATILE)


def test_flush_time_where_nothing_can_be_written(tmp_path):
    assert machine.flush_time(tmp_path / "nothing") is None
    measured = machine.flush_time(tmp_path)
    assert 0 < measured["median_s"] <= measured["worst_s"]


def test_packages_are_found_without_importing_them():
    assert machine.packages(("apsw", "no-such-package"))["no-such-package"] is None


def test_trust_takes_an_older_store_as_it_is(filled, program, tmp_path):
    # Nothing is remembered of stores among the temporary files.
    environment = {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path / "temporary")}

    def hold(*words):
        return program("--store", str(filled), *words, env=environment)

    assert "nothing to decide" in hold("repair", "--trust-older").out
    shutil.copytree(filled, tmp_path / "old")
    assert hold("tag", "trip-7", "here").code == 0
    shutil.rmtree(filled)
    shutil.copytree(tmp_path / "old", filled)
    for verb in ("agents", "verify", "repair"):
        ended = hold(verb)
        assert ended.code == 5
        assert "holdfast repair --trust-older" in ended.out + ended.err
        assert "Nothing is lost" not in ended.out
    (trouble,) = hold("doctor", "--json").json["troubles"]
    assert " are missing. If a backup " in trouble["text"]
    asked = hold("repair", "--trust-older")
    assert (asked.code, "Not in this store any more: events " in asked.out) == (9, True)
    trusted = hold("repair", "--trust-older", "--yes", "--json").json
    assert (trusted["schema"], trusted["trusted"]) == ("holdfast.repair.trust-older/1", True)
    assert trusted["missing"].startswith("events ")
    assert hold("repair", "--trust-older", "--json").json["trusted"] is False
    assert hold("verify").code == 0


def test_repair_says_what_it_would_keep_and_makes_a_new_store(filled, program, tmp_path):
    def hold(*words):
        return program("--store", str(filled), *words)

    ended = hold("repair")
    assert (ended.code, ended.err) == (0, "")
    assert "Nothing is lost." in ended.out
    assert "Nothing was written." in ended.out
    content = bytearray((filled / "store.db").read_bytes())
    content[:4096] = bytes(4096)
    (filled / "store.db").write_bytes(content)
    ended = hold("verify")
    assert ended.code == 5
    assert "`holdfast repair" in ended.err
    assert "holdfast verify" not in ended.err
    found = hold("repair", "--to", str(tmp_path / "new"), "--json")
    assert found.json["schema"] == "holdfast.repair/1"
    assert found.code == (0 if found.json["whole"] else 5)
    assert found.json["problems"]
    assert program("--store", str(tmp_path / "new"), "verify").code == 0
    again = hold("repair", "--to", str(tmp_path / "new"))
    assert again.code == 2
    assert "exists already" in again.err
