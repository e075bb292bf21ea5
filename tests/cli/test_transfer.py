"""``push``, ``pull``, ``export``, ``import FILE`` and ``drill``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import apsw
import pytest

import holdfast
from tests.cli.test_app import PAGE, differences


def test_push_and_pull_say_what_moved(cli, filled, tmp_path):
    dest = tmp_path / "dest"
    done = cli("push", str(filled), str(dest))
    assert done.code == 0
    assert re.search(r"trip-7 +new", done.out)
    assert "all of it proven" in done.out
    again = cli("pull", str(filled), str(dest), "trip-7")
    assert (again.code, "Nothing was missing." in again.out) == (0, True)
    assert cli("verify", store=dest).code == 0
    assert (
        cli("show", "trip-7", "--json", store=dest).json["checkpoint"]
        == cli("show", "trip-7", "--json").json["checkpoint"]
    )


def test_what_both_went_on_with_needs_a_decision(cli, filled, tmp_path):
    dest = tmp_path / "dest"
    cli("push", str(filled), str(dest), "trip-7")
    for place in (filled, dest):
        with holdfast.open(place, inert=True) as store, store.agent("trip-7") as agent:
            agent.state["where"] = str(place)
            agent.checkpoint("parted")
    refused = cli("push", str(filled), str(dest), "trip-7")
    assert refused.code == 3
    assert "gone on in both" in refused.err
    beside = cli("push", "--beside", str(filled), str(dest), "trip-7", "--json").json
    assert len(beside["agents"][0]["beside"]) == 1
    named = cli("push", "--as", "trip-8", str(filled), str(dest), "trip-7")
    assert named.code == 0  # it is known there by its uuid, whatever it is called


def test_a_file_takes_agents_elsewhere(cli, filled, tmp_path):
    file, dest = tmp_path / "trip.hfb", tmp_path / "dest"
    assert cli("export", "trip-7", str(file)).code == 0
    assert cli("export", "trip-7", str(file)).code == 2
    assert cli("export", "trip-7", str(file), "--force").code == 0
    assert cli("export", str(file)).code == 2
    assert cli("import", str(file), store=dest).code == 0
    assert cli("log", "trip-7", store=dest).out == cli("log", "trip-7").out
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert cli("import", str(file), store=dest).code == 5
    file.write_bytes(b"something else")
    assert cli("import", str(file), store=dest).code == 4
    assert cli("import", str(tmp_path / "none"), store=dest).code == 4


def test_a_drill_ends_with_five_when_something_is_lost(cli, filled, tmp_path):
    dest = tmp_path / "dest"
    cli("push", str(filled), str(dest))
    good = cli("drill", str(dest), "--sample", "100")
    assert (good.code, "restored and proven" in good.out) == (0, True)
    assert cli("drill", "--sample", "2", "--agent", "trip-7", store=dest).code == 0
    connection = apsw.Connection(str(dest / "store.db"))
    connection.execute("UPDATE tail SET data = zeroblob(length(data))")
    connection.close()
    bad = cli("drill", str(dest), "--sample", "100")
    assert bad.code == 5
    assert "lost" in bad.out


def test_two_stores_may_have_keys_of_their_own(cli, filled, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_text("ab" * 32 + "\n")
    dest = tmp_path / "dest"
    made = cli("push", str(filled), str(dest), "--dest-key-file", str(key))
    assert made.code == 0
    assert cli("push", str(filled), str(dest)).code == 4
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key))
    assert cli("push", str(filled), str(dest)).code == 4, "the source has no key"
    assert cli("push", str(filled), str(dest), "--source-key-file", "none").code == 0
    assert cli("verify", store=dest).code == 0


@pytest.mark.parametrize("name", ["push", "export", "drill"])
def test_the_documented_json_is_the_json(cli, filled, tmp_path, name):
    words = {
        "push": ("push", str(filled), str(tmp_path / "dest")),
        "export": ("export", "trip-7", str(tmp_path / "file")),
        "drill": ("drill", str(filled), "--sample", "1"),
    }[name]
    blocks = map(json.loads, re.findall(r"```json\n(.*?)```", Path(PAGE).read_text(encoding="utf-8"), re.DOTALL))
    shown = next(block for block in blocks if block.get("schema") == f"holdfast.{name}/1")
    assert not differences(shown, cli(*words, "--json").json, name)
