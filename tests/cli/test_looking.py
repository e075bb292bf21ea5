"""agents, log, show, diff: verbs that only read."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import holdfast
from tests import warm

READING = [
    ("agents",),
    ("log", "trip-7"),
    ("log", "trip-7", "--all"),
    ("log", "user@example.com"),
    ("show", "trip-7"),
    ("show", "trip-7@answered", "--full"),
    ("show", "user@example.com"),
    ("show", "trip-7", "--section", "messages"),
    ("show", "user@example.com", "--path", "state.odd"),
    ("diff", "trip-7@asked", "trip-7"),
    ("diff", "trip-7@good", "trip-7@try-b"),
    ("branch", "trip-7"),
    ("tag", "trip-7"),
    ("verify",),
    ("doctor",),
    ("rollback", "trip-7", "--to", "asked", "--dry-run"),
]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_what_is_read_fits_the_screen_and_harms_neither_it_nor_the_store(words, cli, screen, filled, harmless):
    before = content(filled)
    for columns in (80, 120):
        shown = screen(*words, columns=columns)
        assert shown.code == 0, shown.err
        wide = [line for line in shown.out.splitlines() if len(line) > columns]
        assert not [line for line in wide if max(map(len, line.split())) < columns - 4]  # a path, say, stays whole
        harmless(shown.out)
    piped = cli(*words)
    assert (piped.code, piped.err) == (0, "")
    harmless(piped.out)
    assert "…" not in piped.out or words[0] == "show"
    assert content(filled) == before


def test_on_a_narrow_terminal_words_stand_below_their_line_and_commands_stay_whole(screen):
    assert "\n    thrifty\n" in screen("agents", columns=60).out
    done = screen("rollback", "trip-7@try-b", "--to", "~1", "--yes", columns=40).out.splitlines()
    assert re.fullmatch(r"To go forward again: holdfast rollback trip-7@try-b --to id:\w{12}", done[-1])
    assert max(map(len, done[:-1])) <= 40


def content(store):
    # SQLite's shared memory is no content: readers write their marks there.
    return {path: path.read_bytes() for path in store.rglob("*") if path.is_file() and not path.name.endswith("-shm")}


@pytest.mark.parametrize("words", [words for words in READING if words[0] not in {"verify", "doctor"}], ids=" ".join)
def test_json_says_which_schema_it_follows(words, cli):
    schemas = {"branch": "branches", "tag": "tags"}
    data = cli(*words, "--json").json
    assert data["schema"] == f"holdfast.{schemas.get(words[0], words[0])}/1"


def test_no_reading_verb_makes_a_store(tmp_path, cli, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for words in READING:
        for store in (None, tmp_path / "none"):
            ended = cli(*words, store=store)
            assert ended.code == 4 or (words, store) == (("doctor",), None)
            assert ended.out == "" or words == ("doctor",)
    assert {path.name for path in tmp_path.iterdir()} == {"store", "here"}
    assert not list((tmp_path / "here").iterdir())


def test_agents_lists_everyone_with_the_newest_first(cli):
    lines = cli("agents").out.splitlines()
    assert lines[0].split() == ["agent", "head", "checkpoints", "branches", "updated", "last", "label"]
    assert {line.split()[0] for line in lines[1:4]} == {"trip-7", "user@example.com", "tenant:42/a#b"}
    data = cli("agents", "--json").json
    trip = next(entry for entry in data["agents"] if entry["name"] == "trip-7")
    assert (trip["checkpoints"], trip["abandoned"], trip["branches"]) == (5, 1, ["main", "try-b"])
    newborn = next(entry for entry in data["agents"] if entry["name"] == "tenant:42/a#b")
    assert (newborn["head"], newborn["updated"]) == (None, None)


def test_agents_of_an_empty_store(tmp_path, cli, capsys):
    holdfast.open(tmp_path / "empty").close()
    capsys.readouterr()
    assert cli("agents", store=tmp_path / "empty").out.startswith("No agents yet")
    assert cli("agents", "--json", store=tmp_path / "empty").json["agents"] == []


def test_log_shows_one_line_of_history_and_says_what_is_hidden(cli):
    out = cli("log", "trip-7").out
    labels = [line.split()[-1] for line in out.splitlines() if "#" in line]
    assert labels == ["cheaper", "answered", "asked"]
    assert "(main) cheaper" in out
    assert "(tag: good) answered" in out
    assert "1 abandoned line not shown; --all shows it." in out


def test_log_stops_at_a_number(cli):
    out = cli("log", "trip-7", "-n", "1").out
    assert "cheaper" in out
    assert "answered" not in out
    assert "2 older checkpoints not shown" in out
    assert cli("log", "trip-7", "-n1", "--json").json["more"] == 2


def test_log_begins_at_a_branch_or_a_revision(cli):
    labels = {
        rev: [entry["label"] for entry in cli("log", f"trip-7@{rev}", "--json").json["checkpoints"]]
        for rev in ("try-b", "good", "#1", "~1", "asked")
    }
    assert labels == {
        "try-b": ["thrifty", "asked"],
        "good": ["answered", "asked"],
        "#1": ["asked"],
        "~1": ["answered", "asked"],
        "asked": ["asked"],
    }


def test_log_says_undo_and_redo_and_validity(cli, filled, capsys):
    with holdfast.open(filled, inert=True) as store:
        agent = store.agent("trip-7")
        agent.undo()
        agent.redo()
        agent.mark("answered", "suspect", "the model was drunk")
    capsys.readouterr()
    out = cli("log", "trip-7").out
    assert "[undo of #3]" in out
    assert "[redo of #3]" in out
    assert "[suspect: the model was drunk]" in out
    entries = cli("log", "trip-7", "--json").json["checkpoints"]
    assert [entry["kind"] for entry in entries[:3]] == ["redo", "undo", "checkpoint"]


def test_log_of_an_agent_without_checkpoints(cli):
    assert cli("log", "tenant:42/a#b").out == "tenant:42/a#b has no checkpoint yet.\n"
    assert cli("log", "tenant:42/a#b", "--json").json["checkpoints"] == []


def test_an_agents_full_name_wins_over_a_revision(cli):
    assert cli("log", "user@example.com", "--json").json["agent"] == "user@example.com"
    assert cli("log", "user@example.com@hi", "--json").json["agent"] == "user@example.com"
    ended = cli("log", "user@example.org")
    assert ended.code == 2
    assert "user@example.com" in ended.err


def test_labels_of_any_kind_are_shown_and_never_interpreted(cli, evil, harmless):
    out = cli("log", "trip-7", "--all").out
    harmless(out)
    assert r"\x1b]0;owned\x07 [red]markup[/red] \u202etxt.exe \x9b31m" in out
    entry = next(e for e in cli("log", "trip-7", "--all", "--json").json["checkpoints"] if e["abandoned"])
    assert entry["label"] == evil


def test_show_says_everything_about_a_checkpoint(cli):
    out = cli("show", "trip-7@good").out
    data = cli("show", "trip-7@good", "--json").json
    checkpoint = data["checkpoint"]
    for text in (checkpoint["id"], checkpoint["digest"], checkpoint["sections"]["messages"][:16], "good", "python 3."):
        assert text in out
    assert "├─ messages  list, 2 items" in out
    assert "+ state.messages[1]: {'role': 'assistant', 'content': 'Three flights.'}" in out
    assert data["value"]["messages"][0] == {"role": "user", "content": "Lisbon in May"}
    assert [change["where"] for change in data["changes"]] == ["state.messages[1]", "state.plan"]


def test_show_one_place(cli):
    data = cli("show", "trip-7", "--path", "messages[-1]", "--json").json
    assert (data["path"], data["value"]["content"]) == ("state.messages[-1]", "cheaper?")
    assert "changes" not in data


def test_show_of_a_place_that_is_not_there_says_what_is(cli):
    for words, hint in [
        (("--section", "nope"), "'messages', 'budget', 'plan'"),
        (("--path", "state.messages[7]"), "indexes 0 to 2"),
        (("--path", "state.messages[0].nope"), "has: 'role', 'content'"),
        (("--path", "state.budget.x"), "nothing is inside"),
        (("--path", "a b"), "state.messages[3]"),
        (("--path", "state", "--section", "budget"), "A path begins with its section"),
    ]:
        ended = cli("show", "trip-7", *words)
        assert (ended.code, ended.out) == (2, "")
        assert hint in ended.err


def test_show_says_what_it_cut(cli, filled, capsys):
    with holdfast.open(filled) as store:
        agent = store.agent("long")
        agent.state["list"] = list(range(100))
        agent.state["text"] = "x" * 1000
        agent.checkpoint("long")
    capsys.readouterr()
    out = cli("show", "long").out
    assert "… 90 more items" in out
    assert "2 places are cut short; --full shows everything" in out
    assert "cut short" not in cli("show", "long", "--full").out
    assert "[57]: 57" in cli("show", "long", "--full").out


def test_unknown_types_are_shown_and_nothing_is_imported_or_run(tmp_path):
    (tmp_path / "spyware.py").write_text(
        "import dataclasses, pathlib\n"
        "pathlib.Path('ran').touch()\n"
        "@dataclasses.dataclass\nclass Plan:\n    steps: list\n"
    )
    making = (
        "import holdfast, spyware\n"
        "with holdfast.open('s', types=[spyware.Plan]) as store:\n"
        "    agent = store.agent('a')\n"
        "    agent.state['plan'] = spyware.Plan(['fly'])\n"
        "    agent.checkpoint('one')\n"
        "    agent.state['plan'] = spyware.Plan(['walk'])\n"
        "    agent.checkpoint('two')\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path), "HOLDFAST_STORE": "s"}
    subprocess.run([sys.executable, "-c", making], cwd=tmp_path, env=env, check=True, capture_output=True)
    (tmp_path / "ran").unlink()
    for words, expected in [
        (["show", "a"], "spyware.Plan(steps=['walk'])"),
        (["show", "a", "--path", "state.plan.steps[0]"], "'walk'"),
        (["show", "a", "--json"], '"$type": "spyware.Plan"'),
        (["diff", "a@one", "a@two"], "- state.plan: spyware.Plan(steps=['fly'])"),
        (["undo", "a"], "+ state.plan: spyware.Plan(steps=['fly'])"),
        (["rollback", "a", "--to", "one", "--yes"], "Done."),
        (["log", "a"], "one"),
        (["verify"], "Everything is as it was written."),
    ]:
        done = warm.run(
            [sys.executable, "-m", "holdfast", *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    assert not (tmp_path / "ran").exists()


def test_values_that_json_lacks_have_their_documented_form(cli, evil):
    odd = cli("show", "user@example.com", "--path", "state.odd", "--json").json["value"]
    assert odd["$type"] == "dict"
    items = {key if isinstance(key, str) else tuple(key): value for key, value in odd["$items"]}
    assert items[1, 2] == [1, 3]
    assert items["big"] == {"$type": "int", "$text": hex(10**5000)}
    assert items["nan"] == {"$type": "float", "$text": "nan"}
    assert items["raw"] == {"$type": "bytes", "$text": "b'\\x00\\xff'"}
    assert items[evil] == evil
    plan = cli("show", "trip-7", "--section", "plan", "--json").json["value"]
    assert plan["$type"].endswith("Plan")
    assert plan["$data"]["steps"] == ["fly", "sleep"]


def test_diff_in_json(cli):
    data = cli("diff", "trip-7@asked", "trip-7@try-b", "--json").json
    assert (data["old"]["label"], data["new"]["label"], data["equal"]) == ("asked", "thrifty", False)
    assert data["changes"] == [
        {"where": "state.budget", "path": ["budget"], "kind": "changed", "old": 1200, "new": 500}
    ]


def test_diff_says_with_its_exit_code_whether_there_are_differences(cli):
    assert cli("diff", "trip-7@asked", "--exit-code").code == 1
    assert cli("diff", "trip-7@asked", "trip-7").code == 0
    same = cli("diff", "trip-7@good", "trip-7@answered", "--exit-code")
    assert (same.code, same.out.splitlines()[-1]) == (0, "no differences")


def test_diff_is_coloured_on_a_terminal_only(terminal, program):
    assert "\x1b[31m1200" in terminal("diff", "trip-7@asked", "trip-7", raw=True).out
    assert "\x1b[3" not in terminal("diff", "trip-7@asked", "trip-7", raw=True, env={"NO_COLOR": "1"}).out
    assert "\x1b" not in program("diff", "trip-7@asked", "trip-7").out


def test_everything_is_shown_in_ascii_where_there_is_nothing_else(program):
    env = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for words in (("log", "trip-7", "--all"), ("show", "trip-7"), ("agents",)):
        ended = program(*words, env=env)
        assert ended.code == 0
        assert ended.out.isascii()
