"""Running agents from the command line: scripts, durable functions, what is due, what is in doubt, going back."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import holdfast
from tests import warm
from tests.cli.conftest import PROGRAM, Ended

TRIP = """
import os, signal, sys
from pathlib import Path
import holdfast

WORLD = Path(__file__).with_name("world.txt")


def lines():
    return WORLD.read_text().splitlines() if WORLD.exists() else []


def write(text):
    with WORLD.open("a") as file:
        file.write(text + "\\n")


def dies(where):
    if os.environ.get("DIE") == where:
        os.kill(os.getpid(), signal.SIGKILL)


def find(effect):
    return holdfast.Found(effect.key[:6]) if f"booked {effect.key}" in lines() else holdfast.Absent()


def cancel(effect):
    if os.environ.get("STUCK"):
        raise OSError("the airline is closed")
    write(f"cancelled {effect.key}")


@holdfast.tool(probe=find, compensate=cancel)
def book(flight: str) -> str:
    dies("before")
    write(f"booked {holdfast.effect().key}")
    dies("after")
    return holdfast.effect().key[:6]


@holdfast.tool
def mail(text: str) -> None:
    write(f"mailed {text}")
    dies("mail")


@holdfast.tool(effect="read")
def search(city: str) -> list:
    return [city.upper()]


@holdfast.durable
def travel(agent, city, mails=False):
    print("travelling")
    with agent.phase("plan"):
        agent.state["flight"] = search(city)[0]
        agent.checkpoint("planned")
    agent.state["booking"] = book(agent.state["flight"])
    agent.checkpoint("booked")
    if mails:
        mail("hello")
    return agent.state["booking"]


@holdfast.durable(name="wait for it")
def asks(agent, id="x", *questions):
    agent.state["answer"] = agent.wait_for("answer")
    return [id, *questions, agent.state["answer"]]


@holdfast.durable
def careful(agent, city):
    book(city)
    agent.wait_for("answer")


@holdfast.durable
async def naps(agent, seconds):
    await agent.sleep(seconds)
    return "rested"


@holdfast.durable
def fails(agent):
    raise ValueError("no such \\x1b[31mthing")


def plain(agent, n):
    return n + 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["exit"]:
        sys.exit(int(sys.argv[2]))
    if sys.argv[1:2] == ["raise"]:
        raise KeyError("mine")
    print(sys.argv[1:])
    with holdfast.open() as store:
        print(store.agent("scripted").run(travel, "rome"))
"""


@pytest.fixture
def room(tmp_path):
    """A directory with the program in it."""
    (tmp_path / "trip_app.py").write_text(TRIP)
    return tmp_path


@pytest.fixture
def hold(room):
    """``hold("runs")``: the program, in that directory, with a store there; ``fresh``: in a Python of its own."""

    def call(*words, program=PROGRAM, fresh=False, **variables):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST", "FORCE_COLOR"))}
        env = kept | {"TZ": "UTC", "PYTHONUTF8": "1"} | variables
        start = subprocess.run if fresh else warm.run
        done = start(
            [*program, *words], cwd=room, env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def world(room):
    """What has happened outside, one word for each."""
    return lambda: [line.split()[0] for line in (room / "world.txt").read_text().splitlines()]


def doubtful(hold, name):
    return next(e for e in hold("effects", name, "--json").json["effects"] if e["status"] == "in doubt")


# -- scripts ------------------------------------------------------------------------------------------------


def test_a_script_runs_with_its_own_words_and_goes_on_after_a_kill(hold, world):
    killed = hold("run", "trip_app.py", DIE="after")
    assert killed.code == -signal.SIGKILL
    ended = hold("run", "trip_app.py", "--store", "mine", "--agent", "--", "-x")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[0] == "['--store', 'mine', '--agent', '--', '-x']"
    assert world() == ["booked"]


def test_a_script_uses_the_store_that_is_named(hold, room):
    assert hold("--store", "elsewhere", "run", "trip_app.py").code == 0
    assert (room / "elsewhere").is_dir()
    assert not (room / ".holdfast").exists()


def test_a_script_ends_with_its_own_code_and_shows_its_own_errors(hold):
    assert hold("run", "trip_app.py", "exit", "42").code == 42
    ended = hold("run", "trip_app.py", "raise")
    assert ended.code == 1
    first, second, *_ = ended.err.splitlines()
    assert first.startswith("Traceback")
    assert re.search(r'trip_app\.py", line \d+', second)


ENDS = {
    "raises": "def f():\n    raise ValueError('x')\nf()\n",
    "interrupted": "import os, signal\nprint('in')\nos.kill(os.getpid(), signal.SIGINT)\nprint('never')\n",
    "syntax": "def f(:\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', *a[1:2], file=sys.stderr)\nraise ValueError('x')\n",
    "Ctrl-C and a hook": "import sys\nsys.excepthook = lambda *a: print('mine')\nraise KeyboardInterrupt\n",
    "hook that fails": "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError('x')\n",
    "hook that leaves": "import sys\nsys.excepthook = lambda *a: sys.exit(9)\nraise ValueError('x')\n",
    "who it is": "import sys\nprint(__name__, __file__, sys.argv, __spec__, sys.modules['__main__'].__file__)\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_with_python(hold, room, name):
    (room / "script.py").write_text(ENDS[name])
    plain = subprocess.run(
        [sys.executable, "script.py", "x"], cwd=room, capture_output=True, text=True, check=False, timeout=180
    )
    quiet = hold("run", "--no-dumps", "script.py", "x", fresh=True)
    assert quiet == (plain.returncode, plain.stdout, plain.stderr)
    if name == "hook":
        ended = hold("run", "script.py", "x")
        said = ended.err.splitlines(keepends=True)
        assert said.pop(0).startswith("holdfast: dump written to ")
        assert ended[:2] == (plain.returncode, plain.stdout)
        assert "".join(said) == plain.stderr
    if "interrupted" in name:
        assert plain.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "what is to be run?"),
        (["run", "gone.py"], "there is no file gone.py"),
        (["run", "gone:f", "--agent", "a"], "there is no module 'gone'"),
        (["run", "trip_app:gone", "--agent", "a"], "has no function 'gone'\nDurable functions in it: travel"),
        (["run", "trip_app:book", "--agent", "a"], "'book' of trip_app is a tool"),
        (["run", "trip_app:travel"], "whose run is it?"),
        (["run", "trip_app:travel", "--agent", "a", "--args", "rome"], "--args is not JSON"),
        (["run", "trip_app:travel", "--agent", "a", "--args", "3"], "neither an array nor an object"),
        (["run", "trip_app:travel", "--agent", "a", "--args", '["a", 1, 2]'], "too many positional"),
        (["run", "trip_app:travel", "--agent", "a", "rome"], "too many arguments"),
        (["run", "--agent", "a", "trip_app.py"], "a script is run as it is"),
        (["run", "--due", "--agent", "a"], "--due resumes every run"),
    ],
)
def test_mistakes_are_said_and_nothing_happens(hold, room, words, said):
    ended = hold(*words)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert not (room / "world.txt").exists()


STOPPED = """
import os, signal, sys, time
import holdfast

@holdfast.tool
def pay(amount):
    if sys.argv[1:] == ["raise"]:
        raise KeyError(amount)  # the program dies of another error after that
    if sys.argv[1:] == ["leave"]:
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

@holdfast.durable
def settle(agent):
    return pay(3)

with holdfast.open() as store, store.agent("till") as agent:
    if sys.argv[1:] == ["loop"]:
        pay(3)
    try:
        agent.run(settle)
    except holdfast.InDoubt:
        1 / 0
"""


@pytest.mark.parametrize("dumps", [[], ["--no-dumps"]])
@pytest.mark.parametrize("how", ["", "loop", "raise", "leave"])
def test_what_a_program_leaves_unfinished_is_said_when_it_is_stopped_or_dies(hold, room, how, dumps):
    (room / "script.py").write_text(STOPPED)
    ended = hold("run", *dumps, "script.py", *filter(None, [how]), fresh=True)
    assert ended.code == {"raise": 1, "leave": 3}.get(how, -signal.SIGINT)
    (effect,) = hold("effects", "--in-doubt", "--json").json["effects"]
    said = ended.err.splitlines()
    at = next(number for number, line in enumerate(said) if line.startswith("1 effect is in doubt: pay(amount=3)."))
    assert said[at + 1].startswith(f"  holdfast effects resolve till {effect['id']} --done JSON")
    (run,) = hold("runs", "--json").json["runs"] or [None]
    if how == "loop":
        assert run is None
        assert "Unfinished" not in ended.err
    else:
        assert f"Unfinished: settle of till (run {run['id']}): needs attention. Run it again to go on." in said[at - 2]
        assert said[at - 1] == f"  holdfast effects till --run {run['id']}"
    assert said[at + 2 :] == []


def test_what_a_function_leaves_unfinished_is_said_when_it_is_stopped(hold, room):
    program = STOPPED.partition("with holdfast.open()")[0]
    (room / "till.py").write_text(program)
    ended = hold("run", "till:settle", "--agent", "till", fresh=True)
    assert ended.code == 130
    assert "Unfinished: settle of till" in ended.err
    assert "in doubt: pay(amount=3)" in ended.err


# -- durable functions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["trip_app", "trip_app.py", "./trip_app.py"])
def test_a_function_is_run_for_an_agent_and_its_result_printed(hold, place):
    ended = hold("run", f"{place}:travel", "--agent", "a", "--args", '{"city": "rome"}', "--json")
    assert ended.code == 0
    run = ended.json["run"]
    assert (run["agent"], run["status"], run["args"]) == ("a", "finished", {"city": "rome"})
    assert run["result"] == hold("show", "a", "--path", "booking", "--json").json["value"]
    assert ended.err.splitlines()[-1] == "travelling"  # what it prints does not spoil the JSON


def test_an_id_is_executed_once_and_async_and_plain_functions_run(hold, world):
    for _ in range(2):
        assert hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome"]', "--id", "one").code == 0
    assert world() == ["booked"]
    assert "'rested'" in hold("run", "trip_app:naps", "--agent", "b", "--args", "[0.01]").out
    assert hold("run", "trip_app:plain", "--agent", "b", "--args", "[1]").out.splitlines()[-1] == "2"


def test_a_branch_can_be_run_and_a_name_with_an_at_is_a_name(hold):
    assert hold("run", "trip_app:plain", "--agent", "me@example.com", "--args", "[1]").code == 0
    assert [info["name"] for info in hold("agents", "--json").json["agents"]] == ["me@example.com"]
    assert hold("branch", "me@example.com", "other").code == 0
    assert hold("run", "trip_app:plain", "--agent", "me@example.com@other", "--args", "[1]").code == 0
    assert [(run["branch"]) for run in hold("runs", "--json").json["runs"]] == ["other", "main"]


def test_a_failed_function_ends_with_one_and_shows_where(hold, harmless):
    ended = hold("run", "trip_app:fails", "--agent", "a")
    assert ended.code == 1
    assert re.search(r'Traceback.*\n +File ".*trip_app\.py"', ended.err)
    listed = hold("runs", "--status", "failed")
    assert "ValueError: no such" in listed.out
    harmless(listed.out)


def test_other_arguments_need_change(hold, world):
    assert hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome"]', DIE="before").code == -signal.SIGKILL
    words = ("run", "trip_app:travel", "--agent", "a", "--args", '["rome", true]')
    refused = hold(*words)
    assert refused.code == 7
    assert "--change" in refused.err
    assert hold(*words, "--change").code == 0
    assert world() == ["booked", "mailed"]


# -- waiting ------------------------------------------------------------------------------------------------

AN_HOUR_LATER = """
import sys, time
now_ns = time.time_ns
time.time_ns = lambda: now_ns() + 3_600_000_000_000
from holdfast.cli import app
sys.exit(app.run(sys.argv[1:]))
"""


def test_runs_in_a_copy_are_left_alone_until_they_are_adopted(hold):
    assert hold("run", "trip_app:asks", "--agent", "a", "--no-wait").code == 8
    assert hold("signal", "a", "answer", "1").code == 0
    assert hold("backup", "copy").code == 0
    there = ("--store", "copy")
    assert hold("run", *there, "--due", "trip_app").out == "No run is due.\n"
    assert hold("runs", "adopt", *there, "a").out == (
        "a  wait for it  waiting\n1 unfinished run can be resumed here: holdfast run --due PROGRAM\n"
    )
    assert "finished" in hold("run", *there, "--due", "trip_app").out


def test_a_run_that_nobody_executes_is_cancelled(hold):
    words = ("run", "trip_app:asks", "--agent", "a", "--no-wait")
    assert hold(*words, "--id", "one").code == 8
    other = hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome"]')
    assert other.code == 7
    assert "holdfast runs cancel" in other.err
    ended = hold("runs", "cancel", "a")
    assert ended.out == "Cancelled: wait for it of a (run one)\n"
    assert hold("runs", "cancel", "a", "one", "--json").json["run"]["status"] == "cancelled"
    (event,) = [one for one in hold("events", "a", "--json").json["events"] if one["what"] == "cancelled"]
    assert (event["run"], event["by"]) == ("one", getpass.getuser())
    assert re.search(rf"cancelled +{event['by']}", hold("events", "a").out)
    assert hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome"]').code == 0
    refused = hold(*words, "--id", "one")
    assert refused.code == 7
    assert "--again" in refused.err
    assert hold(*words, "--id", "one", "--again").code == 8
    finished = hold("runs", "--status", "finished", "--json").json["runs"][0]["id"]
    assert hold("runs", "cancel", "a", finished).code == 7
    assert hold("runs", "cancel", "a", "nothing").code == 2


def test_a_run_is_forked_at_a_position_that_is_listed_and_a_worker_goes_on_with_it(hold, world):
    assert hold("run", "trip_app:travel", "--agent", "a", "--id", "7", "--args", '["rome", true]').code == 0
    listed = hold("effects", "a", "--run", "7").out
    assert re.findall(r"^(\S+) .*?(search|book|mail)\(", listed, re.MULTILINE) == [
        ("plan:0/0", "search"), ("0", "book"), ("2", "mail"),
    ]  # fmt: skip
    words = ("runs", "fork", "a", "7", "--at", "2", "--branch", "again")
    refused = hold(*words)
    assert (refused.code, "--yes" in refused.err) == (9, True)
    shown = hold(*words, "--dry-run").out
    assert "The record answers 2 calls; 1 recorded call will be made again." in shown
    assert "mail(text='hello') at 2" in shown
    assert hold("branch", "a", "--json").json["branches"][0]["name"] == "main"
    made = hold(*words, "--yes").out
    assert "Run 7 of a@again is interrupted" in made
    assert "already a branch" in hold(*words, "--yes").err
    assert hold("worker", "trip_app", "--drain").code == 0
    assert world() == ["booked", "mailed", "mailed"]
    assert "nothing recorded at 'plan:7'" in hold("runs", "fork", "a", "7", "--at", "plan:7", "--branch", "x").err


def test_a_run_with_a_limit_is_told_to_stop_when_it_is_due(hold):
    assert hold("run", "trip_app:asks", "--agent", "a", "--no-wait", "--limit", "60").code == 8
    assert hold("run", "--due", "trip_app").out == "No run is due.\n"
    told = hold("run", "--due", "trip_app.py", program=[sys.executable, "-c", AN_HOUR_LATER])
    assert told.code == 0
    assert re.search("wait for it +cancelled +the time of run .* was over at", told.out)
    assert hold("runs", "--json").json["runs"][0]["status"] == "cancelled"
    ended = hold("run", "trip_app:asks", "--agent", "b", "--limit", "0")
    assert ended.code == 1
    assert "was over at" in ended.err


def test_a_run_that_a_process_executes_is_told_to_stop_and_what_it_did_is_undone(hold, room, world):
    words = [*PROGRAM, "run", "trip_app:careful", "--agent", "a", "--args", '["rome"]']
    with warm.Popen(words, cwd=room, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 180
            while time.monotonic() < end and "waits for the signal" not in hold("runs").out:
                time.sleep(0.05)
            ended = hold("runs", "cancel", "a", "--undo", "--wait", "180")
            assert re.fullmatch(r"Cancelled and undone: careful of a \(run \w+\)\n", ended.out)
            _, err = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "was cancelled by" in err
    assert world() == ["booked", "cancelled"]
    assert "cancel " in hold("events", "a").out
    assert "was cancelled by" in hold("runs").out


def test_a_run_is_put_off_gets_its_signal_and_goes_on_when_due(hold):
    words = ("run", "trip_app:asks", "--agent", "a", "--args", '{"id": "mine"}', "--no-wait")
    ended = hold(*words)
    assert ended.code == 8
    assert "waits for the signal 'answer'" in ended.err
    listed = hold("runs")
    assert re.search(r"waiting +\w.* for the signal answer", listed.out)
    assert hold("run", "--due", "trip_app").out == "No run is due.\n"
    sent = hold("signal", "a", "answer", '{"yes": 1}', "--json").json
    assert sent["due"] == [run["id"] for run in hold("runs", "--json").json["runs"]]
    unknown = hold("run", "--due")
    assert unknown.code == 7
    assert "no program that was named has the durable function 'wait for it'" in unknown.out
    due = hold("run", "--due", "trip_app.py", "--json")
    assert due.code == 0
    assert due.json["runs"][0]["became"] == "finished"
    assert hold("runs", "--json").json["runs"][0]["result"] == ["mine", {"yes": 1}]


def test_a_sleep_is_due_when_its_time_has_come_and_one_failure_does_not_stop_the_others(hold):
    assert hold("run", "trip_app:naps", "--agent", "a", "--args", "[86400]", "--no-wait").code == 8
    assert hold("run", "trip_app:naps", "--agent", "b", "--args", "[600]", "--no-wait").code == 8
    assert hold("run", "--due", "trip_app.py").out == "No run is due.\n"
    ended = hold("run", "--due", "trip_app.py", "--json", program=[sys.executable, "-c", AN_HOUR_LATER])
    assert [(run["agent"], run["became"]) for run in ended.json["runs"]] == [("b", "finished")]
    assert "until 20" in hold("runs", "a").out


def test_a_worker_goes_on_with_what_was_killed_and_what_has_come(hold):
    assert (
        hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome", true]', DIE="after").code == -signal.SIGKILL
    )
    assert hold("run", "trip_app:asks", "--agent", "b", "--no-wait").code == 8
    assert hold("signal", "b", "answer", "1").code == 0
    worked = hold("worker", "trip_app.py", "--drain")
    assert worked.code == 0
    assert re.match(r"Working on .*, 16 runs at a time\.\n", worked.out)
    assert sorted(re.findall(r"^(\w)  \S.*  finished", worked.out, re.MULTILINE)) == ["a", "b"], worked.out
    assert hold("worker", "trip_app.py", "--drain").out.count("\n") == 1
    assert hold("worker").code == 2


def test_a_process_that_waits_gets_the_signal_itself(hold, room):
    words = [*PROGRAM, "run", "trip_app:asks", "--agent", "a"]
    with warm.Popen(words, cwd=room, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 180
            while time.monotonic() < end and "waits for the signal" not in hold("runs").out:
                time.sleep(0.05)
            assert re.search("running.*waits for the signal answer", hold("runs").out)
            assert hold("run", "--due", "trip_app").out == "No run is due.\n"
            assert re.fullmatch(r"Signal answer was sent to run \w+ of a.\n", hold("signal", "a", "answer", "1").out)
            out, _ = process.communicate(timeout=180)
        finally:
            process.kill()
    assert out.splitlines()[-1] == "['x', 1]"


def test_signals_are_checked(hold):
    assert hold("run", "trip_app:plain", "--agent", "a", "--args", "[1]").code == 0
    for words, said in (
        (["gone", "answer"], "no agent 'gone'"),
        (["a@gone", "answer"], "is not a branch"),
        (["a", "answer", "yes"], "is not JSON"),
        (["a", ""], "a signal's name"),
    ):
        ended = hold("signal", *words)
        assert ended.code == 2, words
        assert said in ended.err
    refused = hold("signal", "a", "answer")
    assert refused.code == 7
    assert "no run of a@main is waiting or running" in refused.err
    assert hold("signal", "a@main", "answer", "--any-run", "--json").json["branch"] == "main"


def test_signals_are_listed_and_dropped_and_the_sender_is_told_what_is_waited_for(hold):
    assert hold("run", "trip_app:asks", "--agent", "a", "--no-wait").code == 8
    assert hold("signal").out == "No signal waits to be taken.\n"
    told = hold("signal", "a", "anwser", "1", "--id", "x")
    assert "Nobody waits for it now. Waited for: answer." in told.out
    assert "Nothing was sent" in hold("signal", "a", "answer", "1", "--id", "x").out
    (listed,) = hold("signal", "a", "--json").json["signals"]
    assert (listed["name"], listed["id"], listed["status"], listed["value"]) == ("anwser", "x", "pending", 1)
    assert re.search(r"anwser +x +pending", hold("signal").out)
    assert hold("signal", "drop", "a", "x").out == "1 signal was dropped.\n"
    assert hold("signal", "drop", "a", "x").code == 2
    assert hold("signal", "--json").json["signals"] == []
    assert [one["status"] for one in hold("signal", "--all", "--json").json["signals"]] == ["dropped"]
    assert hold("signal", "a", "answer", "2").code == 0
    assert "['x', 2]" in hold("run", "--due", "trip_app.py").out
    (run,) = hold("runs", "--json").json["runs"]
    assert hold("signal", "a", "answer", "--run", run["id"]).code == 7


def test_events_show_what_was_moved_and_by_whom(hold, world):
    assert hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome"]').code == 0
    assert hold("tag", "a", "kept", "--at", "planned").code == 0
    assert hold("rollback", "a", "--to", "planned", "--load", "trip_app.py", "--yes").code == 0
    events = hold("events", "a", "--json").json["events"]
    assert [one["what"] for one in events if one.get("by")] == ["rollback", "tag", "branch", "agent"]
    assert re.search(r"rollback +\w", hold("events", "a").out)
    assert [one["status"] for one in hold("runs", "--json").json["runs"]] == ["rolled back"]
    assert [one["status"] for one in hold("effects", "a", "--json").json["effects"]][-2:] == ["undone", "done"]


# -- in doubt -----------------------------------------------------------------------------------------------


def test_an_effect_that_did_not_happen_is_done_again_with_its_key(hold, world):
    words = ("run", "trip_app:travel", "--agent", "a", "--args", '["rome", true]')
    assert hold(*words, DIE="mail").code == -signal.SIGKILL
    before = doubtful(hold, "a")
    assert hold("effects", "resolve", "a", before["id"][:6], "--not-done", "--why", "the server says so").code == 0
    assert hold(*words).code == 0
    after = hold("effects", "a", "--json").json["effects"][-1]
    assert (after["key"], after["status"]) == (before["key"], "done")
    assert world() == ["booked", "mailed", "mailed"]


def test_deciding_is_checked(hold):
    words = ("run", "trip_app:travel", "--agent", "a", "--args", '["rome", true]')
    assert hold(*words, DIE="mail").code == -signal.SIGKILL
    effect = doubtful(hold, "a")["id"]
    for more, said in (
        ([effect], "--why requires"),
        ([effect, "--why", "x"], "say what became of it"),
        ([effect, "--why", "x", "--done", "1", "--not-done"], "say what became of it"),
        ([effect, "--why", "x", "--done", "yes"], "is not JSON"),
        (["zzzz", "--why", "x", "--not-done"], "names no effect"),
    ):
        ended = hold("effects", "resolve", "a", *more)
        assert ended.code == 2, more
        assert said.lower() in ended.err.lower(), ended.err
    done = hold("effects", "a", "--json").json["effects"][1]
    again = hold("effects", "resolve", "a", done["id"], "--why", "x", "--not-done")
    assert again.code == 2
    assert "is not in doubt" in again.err


def test_effects_can_be_chosen(hold):
    assert hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome", true]').code == 0
    run = hold("runs", "--json").json["runs"][0]["id"]
    tools = [e["tool"] for e in hold("effects", "a", "--json").json["effects"]]
    assert tools == ["search", "book", "mail"]
    assert [e["tool"] for e in hold("effects", "a@booked", "--json").json["effects"]] == ["mail"]
    assert len(hold("effects", "a@main", "--run", run, "--json").json["effects"]) == 3
    assert "a has no run 'gone'" in hold("effects", "a", "--run", "gone").err
    cut = hold("effects", "a", "-n", "1")
    assert "2 older calls not shown; -n 0 shows all." in cut.out
    assert "book(" not in cut.out
    assert hold("show", "a@planned", "--json").json["checkpoint"]["stack"] == ["travel", "plan"]
    assert re.search("^in +travel > plan$", hold("show", "a@planned").out, re.MULTILINE)


# -- going back ---------------------------------------------------------------------------------------------


def test_a_rollback_shows_what_it_undoes_and_does_it(hold, world):
    assert hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome"]').code == 0
    back = ("rollback", "a", "--to", "planned")
    blind = hold(*back, "--dry-run")
    assert blind.code == 7
    assert "the tool book is not loaded in this program" in blind.out
    shown = hold(*back, "--dry-run", "--load", "trip_app.py")
    assert shown.code == 0
    assert re.search(r"Will be undone outside, in this order:\n +1\. \w{12} book\(flight='ROME'\)", shown.out)
    plan = hold(*back, "--dry-run", "--load", "trip_app", "--json").json
    assert [one["tool"] for one in plan["undo"]] == ["book"]
    assert (plan["done"], plan["blocked"], world()) == (False, [], ["booked"])
    done = hold(*back, "--yes", "--load", "trip_app.py")
    assert done.code == 0
    assert "1 effect undone." in done.out
    assert world() == ["booked", "cancelled"]
    assert hold("show", "a", "--json").json["checkpoint"]["label"] == "planned"


def test_what_cannot_be_undone_stops_a_rollback_unless_it_is_accepted(hold, world):
    assert hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome", true]').code == 0
    back = ("rollback", "a", "--to", "#1", "--load", "trip_app.py", "--yes")
    for more in ((), ("--json",)):
        ended = hold(*back, *more)
        assert ended.code == 7
        assert "1 effect stands in the way; nothing was changed" in ended.err
    assert world() == ["booked", "mailed"]
    assert hold(*back, "--accept", "maill").code == 2
    assert hold(*back, "--accept", "mail").code == 0
    assert world() == ["booked", "mailed", "cancelled"]


def test_undoing_that_fails_needs_attention_and_goes_on_later(hold, world):
    assert hold("run", "trip_app:travel", "--agent", "a", "--args", '["rome"]').code == 0
    back = ("rollback", "a", "--to", "planned", "--load", "trip_app.py", "--yes")
    stuck = hold(*back, STUCK="1")
    assert stuck.code == 7
    assert stuck.err.count("the airline is closed") == 1
    assert [run["kind"] for run in hold("runs", "--status", "needs-attention", "--json").json["runs"]] == ["rollback"]
    assert hold(*back).code == 0
    assert world() == ["booked", "cancelled"]


# -- the documentation ----------------------------------------------------------------------------------------


def test_json_has_the_documented_form(hold):
    """What the property ``json`` looks for."""
    travel = ("run", "trip_app:travel", "--agent", "a", "--args", '["rome", true]')
    assert hold(*travel, DIE="mail").code == -signal.SIGKILL
    for agent in "bc":
        assert hold("run", "trip_app:asks", "--agent", agent, "--no-wait").code == 8
    effect = doubtful(hold, "a")["id"]
    for words in (
        ["effects", "a"], ["runs", "adopt", "b"], ["runs", "cancel", "c"],
        ["effects", "resolve", "a", effect, "--done", "null", "--why", "x"], [*travel], ["runs"],
        ["queues", "set", "mail", "--concurrency", "4", "--rate", "10/60"], ["queues"],
        ["signal", "b", "answer", '{"a": 1}'], ["run", "--due", "trip_app"], ["events", "a"],
        ["rollback", "a", "--to", "planned", "--accept", "mail", "--load", "trip_app", "--dry-run"],
    ):  # fmt: skip
        assert hold(*words, "--json").json
    assert hold("run", "trip_app:asks", "--agent", "d", "--no-wait").code == 8
    assert hold("signal", "d", "answer").code == 0
    assert hold("worker", "trip_app", "--drain", "--json").json
    run = hold("runs", "d", "--json").json["runs"][0]["id"]
    assert hold("runs", "fork", "d", run, "--at", "0", "--branch", "other", "--yes", "--json").json


def test_text_of_programs_and_stores_cannot_control_a_terminal(hold, room, evil, harmless):
    code = textwrap.dedent(f"""
        import holdfast
        EVIL = {evil!r}
        @holdfast.tool(name=EVIL, effect="idempotent")
        def act(text): return EVIL
        @holdfast.durable(name=EVIL)
        def run(agent):
            with agent.phase(EVIL):
                act(EVIL)
                agent.checkpoint(EVIL)
            agent.wait_for(EVIL)
        with holdfast.open() as store:
            try:
                store.agent("a").run(run.options(wait=False))
            except holdfast.Waiting:
                pass
    """)
    warm.run([sys.executable, "-c", code], cwd=room, check=True, stdout=subprocess.DEVNULL)
    for words in (
        *(["runs"], ["effects", "a"], ["show", "a"], ["rollback", "a", "--to", "#1", "--dry-run"]),
        *(
            ["signal", "a", evil],
            ["signal"],
            ["events", "a"],
            ["run", "--due"],
            ["runs", "--json"],
            ["effects", "a", "--json"],
        ),
    ):
        ended = hold(*words)
        assert ended.out, words
        harmless(ended.out + ended.err)


def test_wide_and_narrow_terminals(terminal, room):
    with holdfast.open(room / "store") as store:
        agent = store.agent("a")

        @holdfast.tool
        def say(text):
            return text

        with agent:
            say("x" * 300)
    for columns in (60, 200):
        shown = terminal("effects", "a", columns=columns, store=Path(room / "store"))
        assert shown.code == 0
        assert max(map(len, shown.out.splitlines())) <= columns


def test_the_program_itself_declares_no_tools():
    code = "import holdfast.cli.app; from holdfast.run.tools import TOOLS; print(*TOOLS._wrappers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if not name.startswith("holdfast.")] == []
