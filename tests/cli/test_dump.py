"""`holdfast dump`, and crashes in `holdfast log`: what is said, its JSON, its exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time

import pytest

import holdfast
from holdfast.agent import crashes
from holdfast.crash import Limits, capture, memory
from tests.cli.conftest import EVIL, PROGRAM
from tests.cli.test_app import PAGE, differences
from tests.conftest import from_outside_nothing

# The process that runs the tests is large, and the machine may do much else.
FEW = Limits(deadline_s=600, part_s=300, census_objects=1_000, objects=5_000)


def fail(message, city):
    budget = 1200
    raise LookupError(f"{message} for {city} below {budget}")


def dumped(folder, message="no offer", city="Lisbon"):
    try:
        fail(message, city)
    except LookupError as error:
        return capture("uncaught", error=error, to=folder, trigger="exception", limits=FEW)


@pytest.fixture(scope="module")
def crashed(made, tmp_path_factory):
    """The filled store after crashes, made once: one of trip-7, an older one with evil text, and what is no dump."""
    path = tmp_path_factory.mktemp("crashed") / "store"
    shutil.copytree(made, path)
    folder = path / "dumps"
    with from_outside_nothing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_VISITED", 1_000)  # what the libraries of this process keep is no matter here
        old = dumped(folder, EVIL, EVIL)
        os.utime(old, (1, 1))
        with holdfast.open(path) as store:
            store.agent("trip-7", branch="try-b")
            new = dumped(folder)
            stood = {"branch": "try-b", "checkpoint": store.agent("trip-7", branch="try-b").head.id}
            body = {"what": "crash", "dump": new.name, "error": "LookupError", "message": "no offer", **stood}
            crashes.note(store, store._agent_row("trip-7"), body)
    (folder / "other.hfdump").write_text("something else")
    os.utime(folder / "other.hfdump", (2, 2))
    return path, [new.name, old.name]


@pytest.fixture
def filled(crashed, store_path):
    shutil.copytree(crashed[0], store_path)
    return store_path


@pytest.fixture
def dumps(crashed, filled):
    """The dumps of the filled store, the newest first."""
    return [filled / "dumps" / name for name in crashed[1]]


def test_list_has_the_newest_first_and_names_what_is_no_dump(cli, dumps, harmless):
    ended = cli("dump", "list")
    harmless(ended.out)
    head, first, last, other, where = ended.out.splitlines()
    assert head.split() == ["dump", "taken", "size", "trigger", "what"]
    assert first.startswith(dumps[0].name)
    assert "LookupError: no offer for Lisbon below 1200" in first
    assert "not a Holdfast dump" in other
    assert last.startswith(dumps[1].name)
    assert str(dumps[0].parent) in where


def test_list_in_json_in_another_folder_and_of_nothing(cli, dumps, tmp_path):
    listed = cli("dump", "list", "--json", "-n", "1").json
    assert listed["schema"] == "holdfast.dump.list/1"
    assert listed["more"] == 2
    (entry,) = listed["dumps"]
    assert entry["file"] == dumps[0].name
    assert entry["what"] == "LookupError: no offer for Lisbon below 1200"
    assert entry["complete"] is True
    assert cli("dump", "list", str(tmp_path / "nowhere")).out == f"No dumps in {tmp_path / 'nowhere'}.\n"
    assert cli("dump", "list", str(dumps[0].parent), "-n", "0", "--json").json["more"] == 0


def test_show_takes_the_newest_a_path_or_a_piece_of_a_name(cli, dumps, monkeypatch):
    newest = cli("dump", "show")
    assert newest.code == 0
    assert newest.out.startswith("LookupError: no offer for Lisbon below 1200\n")
    assert "city = 'Lisbon'" in newest.out
    assert "Agent trip-7@try-b" in newest.out
    assert cli("dump", "show", str(dumps[0])).out == newest.out
    assert cli("dump", "show", dumps[0].stem).out == newest.out
    assert cli("dump", "show", dumps[0].name[-11:-7]).out == newest.out
    monkeypatch.chdir(dumps[0].parent)
    assert cli("dump", "show", dumps[0].name, store=None).out == newest.out
    assert cli("dump", "show", "--json").json["failures"][0]["type"] == "LookupError"


def test_evil_text_reaches_no_terminal(cli, screen, terminal, dumps, harmless):
    for words in (("dump", "show", str(dumps[1])), ("dump", "list"), ("dump", "diff", str(dumps[1]), str(dumps[0])),
                  ("dump", "export", str(dumps[1]), "--format", "text"), ("log", "trip-7", "--all")):  # fmt: skip
        harmless(cli(*words).out)
        harmless(screen(*words).out)
    harmless(terminal("dump", "show", str(dumps[1])).out)


def test_what_cannot_be_meant_is_a_clear_error(cli, dumps, tmp_path):
    none = cli("dump", "show", "nothing-like-it")
    assert none.code == 4
    assert "there is no file 'nothing-like-it'" in none.err
    several = cli("dump", "show", "uncaught")
    assert several.code == 2
    assert "may be 2 dumps" in several.err
    assert cli("dump", "show", str(dumps[0].parent / "other.hfdump")).code == 4
    assert cli("dump", "show", store=tmp_path / "nowhere").code == 4
    assert cli("dump", "show", str(tmp_path)).code == 4


def test_a_cut_dump_shows_what_is_left(cli, dumps):
    cut = dumps[0].with_name("cut.hfdump")
    cut.write_bytes(dumps[0].read_bytes()[:6000])
    shown = cli("dump", "show", "cut")
    assert shown.code == 0
    assert "Not in this dump" in shown.out
    assert "(cut)" in cli("dump", "list").out


def test_diff_and_its_exit_code(cli, dumps):
    different = cli("dump", "diff", str(dumps[1]), "--exit-code")
    assert different.code == 1
    assert "city: " in different.out
    assert cli("dump", "diff", str(dumps[1])).code == 0
    equal = cli("dump", "diff", str(dumps[0]), str(dumps[0]), "--exit-code", "--json")
    assert equal.code == 0
    assert equal.json["same_failure"] is True


def test_export_writes_a_new_file_that_only_its_owner_reads(cli, dumps, tmp_path):
    place = tmp_path / "out.html"
    assert cli("dump", "export", "-o", str(place)).code == 0
    assert place.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    again = cli("dump", "export", "-o", str(place))
    assert again.code == 2
    assert "exists already" in again.err
    assert json.loads(cli("dump", "export").out)["schema"] == "holdfast.dump/1"
    assert cli("dump", "export", "--format", "text").out.startswith("LookupError")


def test_the_reader_of_an_export_may_go_away(dumps):
    with subprocess.Popen(
        [*PROGRAM, "dump", "export", dumps[0]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as one:
        assert one.stdout.read(10)
        one.stdout.close()
        assert one.wait() == 141
        assert one.stderr.read() == b""


def test_rehydrate_makes_a_linked_branch_and_says_how_to_go_on(cli, dumps):
    made = cli("dump", "rehydrate", dumps[0].name, "--agent", "trip-7")
    assert made.code == 0
    assert made.out.startswith("Branch crash-2")
    assert "--agent trip-7@crash-2" in made.out
    again = cli("dump", "rehydrate", dumps[0].name, "--branch", "second", "--json").json
    assert (again["agent"], again["branch"], again["dump"]) == ("trip-7", "second", dumps[0].name)
    assert again["head"]["label"] == "thrifty"
    assert "second" in cli("branch", "trip-7").out
    assert cli("verify").code == 0
    assert cli("dump", "rehydrate", dumps[1].name).code == 2, "that dump tells of no agent"


def test_log_shows_crashes_and_new_starts_above_their_checkpoint(cli, screen, dumps):
    cli("dump", "rehydrate", dumps[0].name, "--branch", "again")
    lines = cli("log", "trip-7@try-b").out.splitlines()
    crash = next(at for at, line in enumerate(lines) if "✗ crash" in line)
    start = next(at for at, line in enumerate(lines) if "⚑ rehydrate" in line)
    thrifty = next(at for at, line in enumerate(lines) if "thrifty" in line and "#" in line)
    assert start < crash < thrifty
    assert "LookupError: no offer" in lines[crash]
    assert dumps[0].name in lines[crash]
    assert "as again" in lines[start]
    assert "✗" not in cli("log", "trip-7").out, "the checkpoint of the crash is not on main"
    told = cli("log", "trip-7@try-b", "--json").json["crashes"]
    assert [one["what"] for one in told] == ["rehydrate", "crash"]
    assert told[1]["dump"] == dumps[0].name
    assert "✗ crash" in cli("log", "trip-7", "--all").out


def test_a_crash_before_the_first_checkpoint_is_shown(cli, filled):
    with holdfast.open(filled) as store:
        body = {"what": "crash", "dump": "x.hfdump", "error": "E", "branch": "main", "checkpoint": ""}
        crashes.note(store, store._agent_row("tenant:42/a#b"), body)
    out = cli("log", "tenant:42/a#b").out
    assert "has no checkpoint yet" in out
    assert "✗ crash" in out


def test_open_answers_commands_from_a_pipe(program, dumps):
    ended = program("dump", "open", str(dumps[0]), input="p city\nquit\n")
    assert ended.code == 0
    assert "'Lisbon'" in ended.out


def test_dap_speaks_on_standard_output_only(program, dumps):
    request = json.dumps({"seq": 1, "type": "request", "command": "initialize", "arguments": {"adapterID": "x"}})
    ended = program("dump", "dap", str(dumps[0]), input=f"Content-Length: {len(request)}\r\n\r\n{request}")
    assert ended.code == 0
    assert ended.out.startswith("Content-Length: ")
    assert '"success"' in ended.out


def test_take_dumps_another_process(cli, program, dumps):
    with subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1) as other:
        other.stdout.readline()
        ended = program("dump", "take", str(other.pid), "--json")
        other.communicate(b"\n")
    if ended.code == 6:
        pytest.skip(f"this machine does not let a process read another: {ended.err}")
    assert ended.json["pid"] == other.pid
    assert cli("dump", "show", ended.json["file"]).code == 0
    assert cli("dump", "take", "999999999").code != 0


def test_take_says_when_there_is_no_python(program, dumps):
    with subprocess.Popen(["/bin/cat"], stdin=-1, stdout=-1, bufsize=0) as other:
        other.stdin.write(b"x")
        assert other.stdout.read(1) == b"x"  # it runs
        told, shown = program("dump", "take", str(other.pid), "--json"), program("dump", "take", str(other.pid))
        other.communicate(b"")
    if told.code == 6:
        pytest.skip(f"this machine does not let a process read another: {told.err}")
    assert (told.code, shown.code) == (1, 1)
    assert "PyStack" in told.json["problem"]
    assert "It has no Python stacks." in shown.out


def test_without_a_core_native_and_gdb_say_so(cli, dumps):
    for option in ((), ("--gdb",)):
        ended = cli("dump", "native", str(dumps[0]), *option)
        assert ended.code in {2, 6}
        assert ended.err


def test_the_documented_json_is_the_json(cli, dumps):
    blocks = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    shown = {block["schema"]: block for block in blocks if "schema" in block}
    words = {
        "dump.list": ["dump", "list"],
        "dump.show": ["dump", "show"],
        "dump.diff": ["dump", "diff", str(dumps[1])],
        "dump.rehydrate": ["dump", "rehydrate", dumps[0].name],
        "log": ["log", "trip-7@try-b"],
    }
    for name, verb in words.items():
        assert not differences(shown[f"holdfast.{name}/1"], cli(*verb, "--json").json, name)


def killed_under_run(tmp_path, **environment):
    """`holdfast run` of a script that is killed, in a place without a store; then what `dump list` shows."""
    (tmp_path / "script.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    options = {"cwd": tmp_path, "env": {**known, **environment}, "capture_output": True, "text": True}
    holdfast_ = [sys.executable, "-m", "holdfast"]
    assert subprocess.run([*holdfast_, "run", "script.py"], check=False, **options).returncode == -9
    end = time.monotonic() + 120
    while time.monotonic() < end:
        done = subprocess.run([*holdfast_, "dump", "list", "--json"], check=True, **options)
        found = json.loads(done.stdout)
        if found["dumps"] and found["dumps"][0]["complete"]:
            return found
    raise AssertionError(done.stdout)


def test_a_script_that_is_killed_where_there_is_no_store_leaves_a_dump(tmp_path):
    found = killed_under_run(tmp_path)
    assert found["dumps"][0]["trigger"] == "killed"
    assert found["folder"] == str(tmp_path / "dumps")


def test_run_and_list_agree_on_the_folder_that_the_variable_names(tmp_path):
    found = killed_under_run(tmp_path, HOLDFAST_DUMPS=str(tmp_path / "there"))
    assert found["folder"] == str(tmp_path / "there")


def test_take_says_before_it_runs_that_stacks_need_an_extra(cli, monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pystack" else known(name))
    told = cli("dump", "take", "999999999")  # there is no such process
    assert told.err.index("holdfast[native]") < told.err.index("999999999")
