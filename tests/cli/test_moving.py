"""``backup`` and ``move``: a whole store in another place, on another backend, under another key."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time

import pytest

import holdfast
from holdfast.agent import move
from tests import warm
from tests.lives import dies

HOLD_OPEN = "import sys, holdfast\nholdfast.open(sys.argv[1], inert=True)\nprint('ready', flush=True)\ninput()\n"


NAP_S = 1.0  # longer than it takes to put the run off, on a busy machine too


@holdfast.durable
def naps(agent):
    agent.state["slept"] = False
    agent.sleep(seconds=NAP_S)
    agent.state["slept"] = True


def ids(cli, store):
    """Every checkpoint that there is of one agent, also those that no branch leads to."""
    return [one["id"] for one in cli("log", "trip-7", "--all", "--json", store=store).json["checkpoints"]]


@pytest.fixture
def elsewhere(filled):
    """Another process that has the filled store open."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with warm.Popen([sys.executable, "-c", HOLD_OPEN, str(filled)], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_backup_has_everything_and_can_be_repeated(cli, filled, tmp_path):
    dest = tmp_path / "dest"
    cli("retain", "--last", "100", "--save")
    done = cli("backup", str(dest))
    assert (done.code, "3 agents copied to" in done.out) == (0, True)
    both = [cli("agents", "--json", store=place).json["agents"] for place in (dest, filled)]
    for agent in (*both[0], *both[1]):
        del agent["updated"]  # of the copy, that of its newest checkpoint
    assert both[0] == both[1]
    assert cli("retain", "--json", store=dest).json["policies"] == [{"agent": None, "policy": {"last": 100}}]
    assert cli("verify", store=dest).code == 0
    assert "Nothing was missing." in cli("backup", str(dest)).out
    assert cli("tag", "trip-7", "here").code == 0, "the store goes on as before"
    again = cli("backup", str(dest), "--json").json
    assert (again["schema"], [one["status"] for one in again["agents"]].count("updated")) == ("holdfast.backup/1", 1)
    assert cli("backup", str(filled)).code == 2


def test_a_backup_may_be_made_while_others_write(cli, elsewhere, tmp_path):
    assert cli("backup", str(tmp_path / "dest")).code == 0


def test_a_moved_store_is_only_read_and_says_where_everything_is(cli, filled, tmp_path):
    dest = tmp_path / "dest"
    before = {words: cli(*words, "--json").json for words in (("log", "trip-7"), ("show", "trip-7"), ("tag", "trip-7"))}
    done = cli("move", str(dest), "--yes")
    assert done.code == 0
    assert done.out.splitlines()[-1] == f"{filled} can only be read from now on. Programs open {dest}."
    assert ids(cli, dest) == ids(cli, filled)
    for store in (filled, dest):
        for words, found in before.items():
            assert cli(*words, "--json", store=store).json == found
    refused = cli("tag", "trip-7", "late")
    assert (refused.code, f"was moved to {dest}" in refused.err) == (2, True)
    with pytest.raises(holdfast.errors.ReadOnly, match="was moved to"):
        holdfast.open(filled)
    assert cli("doctor", "--json").json["store"]["moved"] == str(dest)
    assert f"moved to {dest}" in cli("doctor").out
    assert cli("tag", "trip-7", "late", store=dest).code == 0
    assert cli("verify", store=dest).code == 0


def test_a_store_is_moved_only_if_somebody_says_so(cli, filled, tmp_path):
    dest = tmp_path / "dest"
    for words in ((), ("--dry-run",)):
        kept = cli("move", str(dest), *words)
        assert (kept.code, "programs have to open the other one" in kept.out) == (0 if words else 9, True)
    assert cli("move", str(dest), "--json").json["done"] is False
    assert not dest.exists()
    assert cli("tag", "trip-7", "goes-on").code == 0
    assert cli("move", str(dest), "--yes", "--json").json["done"] is True
    assert cli("tag", "trip-7", "refused").code == 2


def test_a_store_that_is_open_elsewhere_is_not_moved(cli, filled, elsewhere, tmp_path):
    refused = cli("move", str(tmp_path / "dest"), "--yes")
    assert (refused.code, "open elsewhere" in refused.err) == (3, True)
    elsewhere.kill()
    elsewhere.wait()
    assert cli("tag", "trip-7", "here").code == 0
    assert cli("move", str(tmp_path / "dest"), "--yes", "--json").json["schema"] == "holdfast.move/1"
    assert "here" in cli("tag", "trip-7", store=tmp_path / "dest").out


def test_what_moves_can_get_a_key_and_a_place_for_large_values(cli, filled, tmp_path):
    key, dest, bulk = (tmp_path / name for name in ("key", "dest", "bulk"))
    key.write_text("ab" * 32 + "\n")
    with holdfast.open(filled, inert=True) as store, store.agent("photos") as agent:
        agent.state["photo"] = bytes(range(256)) * 2000
        agent.checkpoint()
    assert cli("move", str(dest), "--yes", "--dest-key-file", str(key), "--objects", str(bulk)).code == 0
    assert list(bulk.rglob("*.pack"))
    assert not list(dest.rglob("*.pack"))
    assert cli("verify", store=dest).code == 4, "it needs the key"
    with holdfast.open(dest, key="ab" * 32, inert=True) as store:
        assert store.agent("photos").state["photo"] == bytes(range(256)) * 2000
        assert store.stats()["objects"] == {"place": f"file://{bulk}", "packs": 1, "reachable": True}


def test_init_keeps_where_large_values_go(cli, tmp_path):
    place, bulk = tmp_path / "new", tmp_path / "bulk"
    made = cli("init", str(place), "--objects", str(bulk), "--json", store=None).json
    assert made == {"schema": "holdfast.init/1", "store": str(place), "encrypted": False}
    assert cli("init", str(place), store=None).code == 2
    with pytest.raises(holdfast.errors.BadOption, match="keeps its packs in"):
        holdfast.open(place, objects=str(tmp_path / "other"))
    (bulk).rename(tmp_path / "away")
    assert f"file://{bulk}, which cannot be reached" in cli("doctor", store=place).out
    assert cli("init", str(tmp_path / "x"), "--objects", "s3://key:secret@bucket/p", store=None).code == 2
    assert not (tmp_path / "x").exists()


# -- what is in the way -----------------------------------------------------------------------------------------------


def test_a_move_that_was_killed_before_it_carried_the_open_runs_is_finished_by_doing_it_again(cli, tmp_path):
    here, dest = tmp_path / "here", tmp_path / "dest"

    def killed():
        with holdfast.open(here) as store, holdfast.open(dest) as other:
            with pytest.raises(holdfast.Waiting):
                store.agent("nap").run(naps.options(id="r", wait=False))
            store.move(other)

    assert dies(killed, 1, (move, "_carry_open"))
    time.sleep(NAP_S)
    refused = cli("move", str(tmp_path / "other"), "--yes", store=here)
    assert (refused.code, f"was moved to {dest}" in refused.err) == (2, True)
    assert not (tmp_path / "other").exists()
    with holdfast.open(dest) as store:
        assert store.due() == []
    for _ in range(2):
        done = cli("move", str(dest), "--yes", store=here)
        assert (done.code, done.out) == (0, f"{here} can only be read from now on. Programs open {dest}.\n")
        assert cli("move", str(dest), "--yes", "--json", store=here).json["agents"] == []
        with holdfast.open(dest) as store:
            assert [run.id for run in store.due()] == ["r"]
    with holdfast.open(dest) as store, store.agent("nap") as agent:
        agent.run(naps.options(id="r"))
        assert agent.state["slept"] is True
    assert cli("move", str(dest), "--yes", store=here).code == 0
    with holdfast.open(dest) as store:
        assert store.due() == [], "it has ended there, and stays so"


def test_agents_that_cannot_be_backed_up_keep_none_of_the_others_back(cli, filled, tmp_path):
    dest = tmp_path / "the dest"
    assert cli("backup", str(dest)).code == 0
    for place in (filled, dest):  # one that grew in both, one that is another one there, and one that is new
        with holdfast.open(place, inert=True) as store:
            with store.agent("trip-7") as agent:
                agent.state["place"] = str(place)
                agent.checkpoint()
            store.agent("again/child").checkpoint()
    with holdfast.open(filled, inert=True) as store:
        store.agent("again").checkpoint()
        store.agent("new").checkpoint()
    refused = cli("backup", str(dest))
    assert refused.code == 3
    assert "Not copied: again/child, again, trip-7; all other agents (3) were" in refused.err
    with holdfast.open(dest, readonly=True, inert=True) as store:
        # "again" was not copied: it would be newer there than its child.
        assert {"new", "again"} & {one.name for one in store.agents()} == {"new"}
    kept = cli("move", str(dest), "--yes")
    assert (kept.code, cli("tag", "trip-7", "goes-on").code) == (3, 0)
    for _ in range(2):
        line = shlex.split(cli("backup", str(dest)).err.split("`")[1])
        assert line[:2] == ["holdfast", "push"]
        typed = ["elsewhere" if word == "NAME" else word for word in line[1:]]
        assert cli(*typed, store=None).code == 0
    assert cli("backup", str(dest)).code == 0
    assert cli("move", str(dest), "--yes").code == 0


def test_a_store_is_not_put_into_its_own_directory(cli, filled, tmp_path):
    for verb in ("backup", "move", "push"):
        refused = cli(verb, str(filled / "sub"), *(["--yes"] if verb == "move" else []))
        assert (refused.code, "own directory" in refused.err) == (2, True)
        assert not (filled / "sub").exists()
    with holdfast.open(filled, inert=True) as store, holdfast.open(filled / "sub") as inside:
        for source, other in ((store, inside), (inside, store)):
            for put in (source.backup, source.move):
                with pytest.raises(holdfast.errors.BadOption, match="deletes both"):
                    put(other)
