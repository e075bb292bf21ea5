"""The command line finds the change: bisect, blame, check, and diff of any two points, for people and for programs."""

from __future__ import annotations

import json
import sys

import holdfast
from tests.conftest import unsaved


def test_bisect_by_expression_function_and_command_agree(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checks_of_finding.py").write_text("def rich(state):\n    return state['budget'] >= 1000\n")
    code = "import json, os; exit(json.load(open(os.environ['HOLDFAST_STATE']))['budget'] < 1000)"
    ways = (
        ["--when", "budget < 1000"],
        ["--check", "checks_of_finding.py:rich"],
        ["--", sys.executable, "-c", code],
    )
    found = []
    for way in ways:
        ended = cli("bisect", "trip-7", "--json", *way)
        assert ended.code == 0
        found.append(ended.json)
    assert {one["first_bad"]["label"] for one in found} == {"cheaper"}
    assert all(change["where"] == "state.budget" for change in found[0]["minimal"])
    shown = cli("bisect", "trip-7", "--when", "budget < 1000").out
    assert "first bad" in shown
    assert "saved at   conftest.py:" in shown
    said = cli("bisect", "log", "trip-7", "--json").json["verdicts"]
    assert {one["verdict"] for one in said} == {"good", "bad"}
    assert "good" in cli("bisect", "log", "trip-7").out


def test_what_a_command_says_is_what_git_would_make_of_it(cli):
    none = cli("bisect", "trip-7", "--", sys.executable, "-c", "pass")
    assert none.code == 1
    assert "No checkpoint of trip-7 was found to be bad" in none.out
    assert "only the ends were checked; --all" in none.out
    whole = cli("bisect", "trip-7", "--all", "--", sys.executable, "-c", "pass").out
    assert "No checkpoint of trip-7 is bad" in whole
    assert "only the ends" not in whole
    skips = cli("bisect", "trip-7", "--", sys.executable, "-c", "exit(125)")
    assert skips.code == 7
    assert "it ended with 125" in skips.err
    for code in ("exit(128)", "import os; os.kill(os.getpid(), 9)"):
        ends = cli("bisect", "trip-7", "--", sys.executable, "-c", code)
        assert ends.code == 7
        assert "ended the search" in ends.err
    assert cli("bisect", "trip-7", "--", "/no/such/program").code == 7
    assert cli("bisect", "trip-7").code == 2
    assert cli("bisect", "trip-7", "--when", "budget <").code == 2


def test_a_check_that_exits_has_given_no_answer(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exits.py").write_text("import sys\n\ndef check(state):\n    sys.exit(1)\n")
    (tmp_path / "gone.py").write_text("raise SystemExit(0)\n")
    for words in (("bisect", "trip-7", "--check"), ("check", "trip-7", "--check"), ("explain", "trip-7", "--check")):
        ended = cli(*words, "gone.py:check")
        assert (ended.code, "its module ends with exit(0)" in ended.err) == (2, True), words
    none = cli("bisect", "trip-7", "--check", "exits.py:check")
    assert (none.code, "none of 3 checkpoints of trip-7 could be checked: SystemExit: 1" in none.err) == (7, True)
    broken = cli("check", "trip-7", "--check", "exits.py:check")
    assert (broken.code, "SystemExit: 1" in broken.out) == (1, True)


def test_an_expression_in_another_place_is_understood_or_its_place_named(cli):
    wrong = cli("bisect", "trip-7", "budget < 1000")
    assert wrong.code == 2
    assert "--when 'budget < 1000'" in wrong.err
    wrong = cli("bisect", "trip-7", "--bad", "asked", "--when", "budget < 1000")
    assert (wrong.code, "there is no option --bad" in wrong.err, "NAME@REV" in wrong.err) == (2, True, True)
    assert cli("bisect", "trip-7", "--check", "budget >= 1000", "--json").json["first_bad"]["label"] == "cheaper"
    assert "nowhere    state.bugdet" in cli("bisect", "trip-7", "--when", "bugdet < 800").out


def test_what_is_not_there_is_said(cli):
    none = cli("replay", "trip-7", "--program", "trip.py")
    assert none.code == 2
    assert "trip-7 has no runs" in none.err
    assert "Only durable functions" in none.err
    assert "No lines of trip-7 are kept" in cli("logs", "trip-7").out
    assert "Nothing was logged while ~1 was the newest checkpoint" in cli("logs", "trip-7", "--at", "~1").out


def test_a_bisection_that_was_killed_goes_on_where_it_was(program, filled, tmp_path):
    """The third question kills whoever asks. The next search asks nothing twice."""
    with holdfast.open(filled) as store:
        agent = store.agent("long", when=None)
        for number in range(40):
            agent.state["n"] = number
            agent.checkpoint(f"c{number}")
    asked = tmp_path / "asked"
    script = tmp_path / "check.py"
    script.write_text(
        "import json, os, pathlib, signal\n"
        "n = json.load(open(os.environ['HOLDFAST_STATE']))['n']\n"
        f"asked = pathlib.Path({str(asked)!r})\n"
        "before = asked.read_text().split() if asked.exists() else []\n"
        "if len(before) == 3 and 'KILLS' in os.environ: os.kill(os.getppid(), signal.SIGKILL)\n"
        "else: asked.write_text(' '.join([*before, str(n)]))\n"
        "exit(n >= 23)\n"
    )
    words = ("bisect", "long", "--json", "--", sys.executable, str(script))
    assert program(*words, env={"KILLS": "1"}).code == -9
    first = asked.read_text().split()
    assert len(first) == 3
    ended = program(*words)
    assert json.loads(ended.out)["first_bad"]["label"] == "c23"
    checks = json.loads(ended.out)["checks"]
    assert 0 < checks <= 8 - 3


def test_blame_names_the_checkpoint(cli, harmless):
    told = cli("blame", "trip-7", "budget", "--json").json
    assert told["checkpoint"]["label"] == "cheaper"
    assert told["change"]["old"] == 1200
    assert "#3 cheaper" in cli("blame", "trip-7", "budget").out
    assert cli("blame", "trip-7@good", "state.budget", "--json").json["checkpoint"]["label"] == "asked"
    harmless(cli("blame", "user@example.com", "odd").out)
    assert cli("blame", "trip-7", "nothing.here").code == 2


def test_what_the_command_itself_has_saved_names_no_line_of_other_packages(cli, tmp_path):
    program = tmp_path / "ending.py"
    program.write_text("import holdfast\n@holdfast.durable\ndef end(agent):\n    agent.state['done'] = True\n")
    assert cli("run", f"{program}:end", "--agent", "ended").code == 0
    assert cli("blame", "ended", "done", "--json").json["cause"]["caller"] == ""
    assert "saved at" not in cli("blame", "ended", "done").out


def test_check_lists_what_breaks_a_rule_and_ends_with_1(cli, tmp_path):
    broken = cli("check", "trip-7", "budget >= 1000", "len(messages) > 0")
    assert broken.code == 1
    assert "#3 cheaper" in broken.out
    told = cli("check", "trip-7", "budget >= 1000", "--json").json
    assert [one["label"] for one in told["violations"]] == ["cheaper"]
    assert cli("check", "trip-7", "budget > 0").code == 0
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[invariant]]\npath = "budget"\nrange = [1000, 2000]\n\n[[invariant]]\ncheck = "len(messages) < 9"\n'
    )
    assert cli("check", "trip-7", "--file", str(rules)).code == 1
    rules.write_text('[[invariant]]\npath = "budget"\nrnge = [1000, 2000]\n')
    assert cli("check", "trip-7", "--file", str(rules)).code == 2
    assert cli("check", "trip-7").code == 2


@unsaved
def test_diff_takes_two_agents_branches_and_a_dump(cli, filled, tmp_path):
    assert cli("diff", "trip-7", "trip-7@try-b", "--exit-code").code == 1
    told = cli("diff", "trip-7", "user@example.com", "--json").json
    assert not told["equal"]
    assert len(told["summary"]) <= 10
    with holdfast.open(filled) as store:
        agent = store.agent("trip-7", when=None)
        agent.state["budget"] = 1
        dump = holdfast.crash.capture(
            to=tmp_path, limits=holdfast.crash.Limits(deadline_s=600, part_s=300, objects=5_000)
        )
    shown = cli("diff", "trip-7", str(dump))
    assert "- state.budget: 900\n+ state.budget: 1\n" in shown.out
    assert cli("diff", str(dump), "--json").json["old"] is None
