"""What if something were different: which way it would have gone, what made it fail, and whether a fix is one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

import holdfast
from holdfast import travel
from holdfast.crash.dap import Wire
from holdfast.travel import WhatIf
from holdfast.travel.jobs import Workers
from tests import warm

PROGRAM = str(Path(__file__).parent / "trips.py")
HOLDFAST = (sys.executable, "-m", "holdfast", "--store")


@pytest.fixture(autouse=True, scope="module")
def workers():
    """One process that executes again, for all tests: starting one takes longer than most of them."""
    with Workers():
        yield


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with holdfast.open(tmp_path / "store") as opened:
        yield opened


def test_each_thing_that_can_be_different_shows_where_the_ways_part_and_what_came_of_it(store, trips, tmp_path):
    store.agent("trip").run(trips.travel, "TP1")
    head = store.agent("trip").head.id
    (tmp_path / "fake.py").write_text("def trip_price(flight):\n    return 50\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "trips.py").write_text(Path(PROGRAM).read_text().replace('["budget"] = 500', '["budget"] = 5000'))
    told = []
    cheap, dear, arg, state, tool, code, allowed = store.what_if(
        "trip",
        WhatIf(results={"trip_price": 300}),  # the tool by its name: as it was
        WhatIf(results={"trip_price#0": 900}),
        WhatIf(args={"flight": "TP12"}),
        WhatIf(state={"budget": 10}, at="priced"),
        WhatIf(tools={"trip_price": "fake.py:trip_price"}),
        WhatIf(code=str(other)),
        WhatIf(args={"flight": "T"}, reads=True, allow=["trip_book"]),
        program=PROGRAM,
        check="budget >= 0",
        progress=lambda index, found: told.append(index),
    )
    assert sorted(told) == list(range(7))
    assert cheap.same, cheap.difference
    assert dear.status == "failed"
    assert dear.error == "ValueError: over budget"
    assert dear.check is False
    assert (cheap.check, arg.check) == (True, None)  # nobody knows how one ends that was stopped
    assert (dear.difference.kind, dear.difference.path) == ("state", "2")
    assert dear.difference.differs == ["state.budget: 200 -> -400"]
    assert arg.stopped.startswith("it would read: trip_price(flight='TP12') at ")
    assert arg.difference.expected == "checkpoint" or arg.difference.kind in {"state", "call"}
    assert state.status == "finished"
    assert any("state.budget: 10" in line for line in state.changes)
    assert tool.live == ["trip_price at 1"]
    assert tool.stopped.startswith("it would write: trip_book(flight='TP1', amount=50) at ")
    assert code.status == "finished"
    assert code.difference.differs == ["state.budget: 500 -> 5000"]
    assert code.result == "'seat on TP1'"
    assert allowed.live == ["trip_price at 1", "trip_book at 3"]
    assert allowed.result == "'seat on T'"
    assert store.agent("trip").head.id == head
    assert len(store.agent("trip").effects()) == 2


@pytest.mark.parametrize(
    ("wrong", "said", "hint"),
    [
        ({"results": {"trip_prise": 3}}, r"no tool or call 'trip_prise'", "Its calls: trip_book (1), trip_price (1)."),
        ({"results": {"trip_price#1": 3}}, r"no tool or call 'trip_price#1'", "Its calls: "),
        ({"results": {"7": 3}}, r"no tool or call '7'", "Its calls: "),
        ({"allow": ["trip_bok"]}, r"no tool 'trip_bok'", "See `holdfast effects`"),
        ({"tools": {"trip_bok": f"{PROGRAM}:travel"}}, r"no tool 'trip_bok'", "See `holdfast effects`"),
        ({"tools": {"trip_price": f"{PROGRAM}:prise"}}, r"no function 'prise'", "Write it MODULE:FUNCTION"),
        ({"args": {"by. what": "TP1"}}, r"no argument 'by. what'", "It has: flight."),
        ({"state": {"bugdet.left": 1}}, r"the state has nothing at state.bugdet.left", "See `holdfast show`."),
        ({"state": {"budget": 1}, "at": "before"}, r"is not of run", "See `holdfast log`"),
    ],
)
def test_what_is_nowhere_cannot_be_different(store, trips, wrong, said, hint):
    agent = store.agent("trip")
    agent.checkpoint("before")
    agent.run(trips.travel, "TP1")
    with pytest.raises(holdfast.errors.BadOption, match=said) as refused:
        store.what_if("trip", WhatIf(**wrong), program=PROGRAM)
    assert refused.value.hint.startswith(hint)


def test_what_came_of_a_variation_is_kept_as_a_branch_that_says_that_it_never_happened(store, trips):
    store.agent("trip").run(trips.travel, "TP1")
    (found,) = store.what_if("trip", WhatIf(state={"note": 1}), program=PROGRAM)
    assert found.difference.differs == ["state.note: (not there) -> 1", "state: reordered"]
    (found,) = store.what_if("trip", WhatIf(state={"budget": 10}, at="priced"), program=PROGRAM)
    assert store.keep(found, "richer", why="budget 10") == "richer"
    kept = store.agent("trip", branch="richer")
    assert kept.state["budget"] == 10
    labels = [one.label for one in kept.log()][::-1]
    assert labels[1].startswith("what if: budget 10 (run ")
    assert labels[1].endswith("this never happened")
    assert labels[2:] == ["planned", "priced", "run travel finished"]
    assert store.agent("trip").state["budget"] == 200
    assert kept.effects() == []
    kept.run(trips.travel, "T")  # no run is open there


def test_a_fix_is_one_when_the_failure_is_gone_and_healthy_runs_go_the_same_way(store, trips, tmp_path):
    with pytest.raises(ValueError, match="over budget"):
        store.agent("bad").run(trips.travel, "TP1234")
    store.agent("good").run(trips.travel, "TP1")
    text = Path(PROGRAM).read_text()
    text += "\n\ndef write(path):\n    with suppress(Exception):\n        Path(path).write_text('x')\n"
    for name, old, new in (
        ("fixed", 'if agent.state["budget"] < 0:', 'if agent.state["budget"] < -1000:'),
        ("wrong", 'raise ValueError("over budget")', 'raise ValueError("still over budget")'),
        ("rude", '["budget"] = 500', '["budget"] = 900'),
        ("shy", 'raise ValueError("over budget")', f"write({str(tmp_path / 'outside')!r}); return"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trips.py").write_text(text.replace(old, new))

    def asked(code, **more):
        return store.validate("bad", program=PROGRAM, code=code, healthy=[("good", None)], **more)

    told = asked("fixed")
    assert told.problems[0].startswith("nobody can say: it would write: trip_book(flight='TP1234', amount=600)")
    assert asked("fixed", allow=["trip_book"]).good
    assert asked("fixed", allow=["trip_book"], checks=["exists(budget)"]).good  # it holds before, and the run raises
    shy = asked("shy")  # what it does there nobody has seen, because it was not let
    assert shy.after.status == "finished"
    assert shy.problems[0].startswith("nobody can say: it was refused: ")
    assert not (tmp_path / "outside").exists()
    assert asked("wrong").problems[0] == "it still fails: ValueError: still over budget"
    rude = asked("rude", allow=["trip_book"])
    assert not rude.good
    assert rude.problems == [problem for problem in rude.problems if problem.startswith("run ")]
    broken = asked("fixed", allow=["trip_book"], checks=["budget >= 0"])
    assert broken.problems[0] == "it still fails: budget >= 0 does not hold"


def test_the_line_that_changed_a_place_and_the_step_at_which_a_check_began_to_fail_are_named(store, trips):
    store.agent("sum").run(trips.remember, ["a", "poison", "ccc"])
    lines = Path(PROGRAM).read_text().splitlines()
    found = store.moments("sum", "total", program=PROGRAM)
    assert [(one.old, one.new) for one in found.moments][1:] == [("0", "1"), ("1", "7"), ("7", "10"), ("10", "-1")]
    number = int(found.moments[-1].line.rpartition(":")[2])
    assert lines[number - 1].strip() == 'state["total"] = -1' == found.moments[-1].source
    assert lines[int(found.moments[1].line.rpartition(":")[2]) - 1].strip() in {
        'state["total"] += scored(fact)',
        "return len(fact)",
    }
    assert found.nowhere == []
    assert store.moments("sum", "totla", program=PROGRAM).nowhere == ["state.totla"]
    first = travel.first_bad(store.moments("sum", program=PROGRAM, check="not exists(total) or total >= 0"))
    assert first.source == 'state["total"] = -1'
    assert first.step == 3


def test_invariants_of_the_program_are_asked_where_the_state_is_another(store, trips, tmp_path):
    with pytest.raises(ValueError, match="too dear"):
        store.agent("guarded").run(trips.guarded, "TP12345")
    assert store.replay("guarded", program=PROGRAM).same  # refused then, and refused again
    code = tmp_path / "less"
    code.mkdir()
    text = Path(PROGRAM).read_text()
    for cost, problem in (("// 700", "an invariant does not hold at paid: spent goes up: "), ("// 2", "")):
        (code / "trips.py").write_text(text.replace("cost = trip_price(price)", f"cost = trip_price(price) {cost}"))
        found = store.validate("guarded", program=PROGRAM, code=str(code))
        assert "".join(found.problems).startswith(problem)
        assert found.good == (not problem), found.problems


def test_bisect_goes_on_into_the_steps_of_the_run(store, trips):
    agent = store.agent("dear")
    with pytest.raises(ValueError, match="over budget"):
        agent.run(trips.travel, "TP1234")
    for check in ({"when": "budget < 0"}, {}):
        found = agent.bisect(*(() if check else (lambda state: state.get("budget", 0) >= 0,)), **check)
        assert found.checkpoint.label == "priced"
        assert (found.turn.after, found.turn.before) == ("trip_price(flight='TP1234')", "checkpoint")
        assert found.turn.run == found.cause.run
        assert Path(found.turn.line.rpartition(":")[0]).name == "trips.py"
        assert "step: after trip_price" in str(found)
    with store.agent("dear", branch="main", readonly=True) as other:
        elsewhere = other.bisect(when="budget < 0", program="nothing.py")
        assert elsewhere.checkpoint == found.checkpoint
        assert elsewhere.turn is None
        assert "nothing.py" in elsewhere.no_turn
    agent.state["budget"] = 1
    agent.checkpoint("mended")
    agent.state["budget"] = -1
    agent.checkpoint("by hand")
    again = agent.bisect(when="budget < 0")
    assert (again.checkpoint.label, again.turn, again.no_turn) == ("by hand", None, "")


def test_the_smallest_set_that_still_fails_is_found(store, trips):
    agent = store.agent("sum")
    agent.state["facts"] = {f"g{n}": "poison" if n == 3 else "x" for n in range(6)} | {"f2": "y"}
    agent.checkpoint("facts")
    agent.run(trips.remember, [])
    check = "total >= 0"
    found = store.minimise("sum", "state.facts", program=PROGRAM, check=check)
    assert found.keys == ["g3", "f2"]
    assert found.of == 7
    assert not found.whole
    store.agent("args").run(trips.remember, ["a", "poison", "c", "d", "e"])
    args = store.minimise("args", "args.documents", program=PROGRAM, check=check)
    assert len(args.keys) == 3  # two of them only so that there is a third: no list of less fails
    assert 1 in args.keys
    with pytest.raises(holdfast.errors.BadOption, match=r"state\.fcats is not there when the run begins"):
        store.minimise("sum", "state.fcats", program=PROGRAM, check=check)
    with pytest.raises(holdfast.errors.BadOption, match="is of type str, which is neither"):
        store.minimise("sum", "state.facts.g3", program=PROGRAM, check=check)
    with pytest.raises(holdfast.errors.BadOption, match="does not fail"):
        store.minimise("args", "args.documents", program=PROGRAM)
    with pytest.raises(ValueError, match="over budget"):
        store.agent("trip").run(trips.travel, "TP1234")
    results = store.minimise("trip", "results", program=PROGRAM)
    assert results.items == ["trip_price at 1: 600"]
    assert results.unknown.startswith("it would write: trip_book(flight='TP1234', amount=0)")
    assert store.minimise("trip", "results", program=PROGRAM, allow=["trip_book"]).unknown == ""


def test_pdb_goes_to_steps_of_the_run_and_back(store, trips, tmp_path):
    store.agent("trip").run(trips.travel, "TP1")
    words = "forward\nstate budget\nn\np cost\nforward 2\nback\nreverse-until budget > 250\nsteps\nc\n"
    ended = warm.run(
        [*HOLDFAST, str(store.path), "replay", "trip", "--program", PROGRAM, "--debug"], input=words,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line for line in ended.stdout.splitlines() if line.startswith("(replay)")]
    assert said[0].startswith("(replay) step 2: trip_price at 1"), ended
    assert said[1] == "(replay) 500"
    assert said[3] == "(replay) 300"
    assert "step 4: trip_book" in said[4]
    assert "step 3: checkpoint" in said[5]
    assert "step 2: trip_price" in said[6]
    assert "(replay) The same way: run " in ended.stdout  # what came of it, unless a person ends it
    assert ended.returncode == 0, ended.stderr


class Editor:
    """A client of the Debug Adapter Protocol."""

    def __init__(self, process):
        self.process, self.wire, self.events = process, Wire(process.stdout, process.stdin), []

    def ask(self, command, **arguments):
        self.wire.send("request", {"command": command, "arguments": arguments})
        return self._next("response")

    def stopped(self):
        """The line at which it has stopped, and the variables of a scope by their names."""
        while (event := self._next("event"))["event"] != "stopped":
            pass
        top = self.ask("stackTrace", threadId=1)["body"]["stackFrames"][0]
        scopes = self.ask("scopes", frameId=top["id"])["body"]["scopes"]
        known = [self.ask("variables", variablesReference=one["variablesReference"]) for one in scopes]
        values = [{row["name"]: row["value"] for row in one["body"]["variables"]} for one in known]
        return event["body"]["reason"], top["line"], *values

    def _next(self, kind):
        while (message := self.events.pop(0) if kind == "event" and self.events else self.wire.read()) is not None:
            if message["type"] == kind:
                assert message.get("success", True), message
                return message
            self.events.append(message)
        return {"event": "stopped", "body": {}}


def test_an_editor_steps_through_a_run_and_back(store, trips):
    store.agent("trip").run(trips.travel, "TP1")
    words = [*HOLDFAST, str(store.path), "replay", "trip", "--program", PROGRAM, "--dap"]
    source = Path(PROGRAM).read_text().splitlines()
    at = {text: 1 + next(n for n, line in enumerate(source) if text in line) for text in ('"budget"] = 500', "-= cost")}
    with warm.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        editor = Editor(process)
        assert editor.ask("initialize", linesStartAt1=True)["body"]["supportsStepBack"]
        editor.ask("launch")
        lines = [{"line": line} for line in at.values()]
        answer = editor.ask("setBreakpoints", source={"path": PROGRAM}, breakpoints=lines)
        assert [one["verified"] for one in answer["body"]["breakpoints"]] == [True, True]
        editor.ask("configurationDone")
        reason, line, _, state = editor.stopped()
        assert (reason, line, state) == ("step", at['"budget"] = 500'], {})
        editor.ask("continue")
        reason, line, variables, state = editor.stopped()
        assert (reason, line) == ("breakpoint", at["-= cost"])
        assert (variables["cost"], state["budget"]) == ("300", "500")
        editor.ask("next")
        _, line, _, state = editor.stopped()
        assert (line, state["budget"]) == (at["-= cost"] + 1, "200")
        editor.ask("stepBack")
        reason, line, variables, state = editor.stopped()
        assert (line, variables["cost"], state["budget"]) == (at["-= cost"], "300", "500")
        editor.ask("reverseContinue")
        assert editor.stopped()[1] == at['"budget"] = 500']
        editor.ask("setBreakpoints", source={"path": PROGRAM}, breakpoints=[])
        editor.ask("continue")
        process.stdin.close()
        assert process.wait(60) == 0, process.stderr.read()


def test_the_verbs_say_what_they_found_and_end_with_their_codes(store, trips, tmp_path):
    store.agent("trip").run(trips.travel, "TP1")
    store.agent("clock").run(trips.moody, "clock")
    store.close()

    def said(*words, code):
        ended = warm.run(
            [*HOLDFAST, str(tmp_path / "store"), *words, "--program", PROGRAM, "--json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == code, (ended.stdout, ended.stderr)
        return json.loads(ended.stdout)

    both = said("replay", "*", code=1)
    assert both["schema"] == "holdfast.replay/1"
    assert {one["agent"]: one["same"] for one in both["executions"]} == {"trip": True, "clock": False}
    assert {one["difference"]["kind"] for one in both["executions"] if one["difference"]} == {"state"}
    assert said("replay", "trip", "--check", "budget >= 500", code=1)["executions"][0]["same"]
    assert said("replay", "trip", "--watch", "bugdet", code=0)["executions"][0]["nowhere"] == ["state.bugdet"]
    assert said("replay", "trip", "--check", "budget >= 0", code=0)["executions"][0]["check"]
    many = said("what-if", "trip", "--result", "trip_price=[100, 900]", "--each", code=0)
    assert [one["name"] for one in many["variations"]] == ["trip_price = 100", "trip_price = 900"]
    assert [one["status"] for one in many["variations"]] == ["stopped", "failed"]
    assert not said("what-if", "trip", "--result", "trip_price=100", "--check", "budget >= 0", code=7)["branch"]
    blamed = warm.run(
        [*HOLDFAST, str(tmp_path / "store"), "blame", "trip", "budget", "--line", PROGRAM, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(blamed.stdout)["moment"]["source"] == 'agent.state["budget"] -= cost'
