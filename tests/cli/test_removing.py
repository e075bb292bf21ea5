"""copy and remove: whole agents."""

from __future__ import annotations

from tests import warm


def test_a_copy_begins_with_the_whole_history(cli):
    before = cli("log", "trip-7", "--all", "--json").json["checkpoints"]
    made = cli("copy", "trip-7", "copy")
    assert made.code == 0
    assert made.out.startswith("Agent copy begins with the history of trip-7: ")
    assert cli("log", "copy", "--all", "--json").json["checkpoints"] == before
    assert cli("copy", "trip-7", "copy").code == 2
    assert cli("copy", "trip-7@good", "other").code == 2
    assert cli("verify").code == 0


def test_remove_needs_a_word_and_says_what_goes(cli):
    assert cli("remove", "trip-7").code == 9
    assert cli("remove", "trip-7", "--json").json["done"] is False
    looked = cli("remove", "trip-7", "--dry-run")
    assert "Dry run: nothing was changed." in looked.out
    assert cli("show", "trip-7").code == 0
    cli("copy", "trip-7", "copy")
    done = cli("remove", "trip-7", "--yes", "--json").json
    assert done["done"]
    assert done["kept_for"] == ["copy"]
    assert cli("show", "trip-7").code == 2
    assert cli("show", "copy@good").code == 0
    assert cli("remove", "copy", "--yes").out.splitlines()[-1].startswith("Removed. The store is ")
    assert cli("verify").code == 0


def test_remove_names_the_copies_and_takes_them_along_when_told(cli):
    cli("copy", "trip-7", "copy")
    cli("copy", "copy", "copy of the copy")
    looked = cli("remove", "copy", "--dry-run")
    assert "Agents that keep some of its checkpoints: copy of the copy, trip-7.\n" in looked.out
    looked = cli("remove", "copy", "--with-copies", "--dry-run")
    assert "Agents that go with it: copy of the copy, trip-7.\n" in looked.out
    assert cli("show", "trip-7").code == 0
    done = cli("remove", "copy", "--with-copies", "--yes", "--json").json
    assert (done["copies"], done["kept_for"], done["freed_bytes"] >= 0) == (["copy of the copy", "trip-7"], [], True)
    assert {one["name"] for one in cli("agents", "--json").json["agents"]} == {"user@example.com", "tenant:42/a#b"}
    assert cli("verify").code == 0


def test_remove_is_refused_while_another_process_writes(cli, filled):
    import subprocess
    import sys

    code = "import sys, holdfast\nstore = holdfast.open(sys.argv[1], inert=True)\nagent = store.agent('trip-7')\n"
    code += "print('ready', flush=True)\nsys.stdin.read()\n"
    with warm.Popen(
        [sys.executable, "-c", code, str(filled)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        assert cli("remove", "trip-7", "--yes").code == 3
        assert cli("show", "trip-7").code == 0
        process.kill()
