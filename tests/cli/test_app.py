"""The program itself: exit codes, errors, where the store is found, completion."""

from __future__ import annotations

import inspect
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

import holdfast
import holdfast.cli
from holdfast import errors
from holdfast.cli.app import _VERBS, app
from holdfast.cli.exits import exit_code
from tests import warm
from tests.cli.conftest import DOCS, FORMS, PAGE, differences  # noqa: F401 - of test_dump.py
from tests.contrib.threads import chain

VERBS = [name.rstrip("_").replace("_", "-") for verbs in _VERBS.values() for name in verbs]
NESTED = [
    *(f"dump {verb}" for verb in ("list", "show", "open", "dap", "diff", "export", "rehydrate", "take", "native")),
    *(
        "key add",
        "key remove",
        "key rotate",
        "effects resolve",
        "effects accept",
        "runs cancel",
        "runs adopt",
        "runs resume",
        "runs fork",
    ),
    *("queues set", "signal drop", "import langgraph"),
]
GROUPS = {"InputError": 2, "Contention": 3, "Incompatible": 4, "Damaged": 5, "Unavailable": 6, "Outcome": 1}
ATTENTION = (
    "InDoubt", "MaybeRepeated", "Diverged", "RollbackBlocked", "RunUnfinished", "RunEnded", "ResultLost",
    "ResultForgotten", "BisectFailed",
)  # fmt: skip
CODES = {"Waiting": 8, **dict.fromkeys(ATTENTION, 7), **GROUPS}


def every_error():
    return [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.HoldfastError)]


def test_every_error_has_the_exit_code_of_its_group():
    for cls in every_error():
        groups = [name for name in CODES if issubclass(cls, getattr(errors, name))]
        expected = CODES[groups[0]] if groups else 6
        assert exit_code(cls.__new__(cls)) == expected, cls


def test_help_lists_every_verb(cli):
    out = cli("--help", store=None).out
    # What a terminal of 24 lines shows of it says what to type first; the help of a verb does not.
    assert "holdfast demo " in "".join(out.splitlines(keepends=True)[-20:])
    assert "New here?" not in cli("log", "--help", store=None).out
    for verb in VERBS:
        assert re.search(rf"│ {verb} +\w.*[.?] *│", out), f"{verb} does not fit into a line"
    for verb in VERBS:
        ended = cli(verb, "--help", store=None)
        assert ended.code == 0
        assert "--store" in ended.out
        assert ("--json" in ended.out) == (verb != "demo")


def test_version(cli):
    assert cli("--version", store=None).out.strip() == holdfast.__version__


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lgo"], 'Did you mean "log"?'),
        (["log"], "requires an argument"),
        (["log", "a", "b"], "Too many arguments: b"),
        (["log", "a", "--nope"], "Unknown option: --nope"),
        (["log", "a", "-n", "many"], "unable to convert"),
        (["rollback", "a"], "--to"),
        (["--store"], "--store"),
    ],
)
def test_a_wrong_call_gets_one_line_and_where_to_look(cli, words, said):
    ended = cli(*words, store=None)
    assert (ended.code, ended.out) == (2, "")
    first, second = ended.err.splitlines()
    assert first.startswith("holdfast: ")
    assert said in first
    assert second.startswith("See `holdfast")


def test_an_error_is_one_line_and_a_hint(cli):
    ended = cli("log", "trip-8")
    assert ended.code == 2
    assert ended.err.splitlines()[0].startswith("holdfast: no agent 'trip-8'")
    assert "'trip-7'" in ended.err.splitlines()[1]
    assert "Traceback" not in ended.err


def test_errors_are_red_on_a_terminal_and_harmless(terminal, cli, harmless, evil):
    assert "\x1b[1;31mholdfast: no agent" in terminal("log", "nobody", raw=True).out
    harmless(cli("log", evil).err)
    harmless(cli("show", "trip-7", "--section", evil).err)
    harmless(cli(evil).err)


def test_debug_shows_the_traceback(program):
    ended = program("log", "nobody", env={"HOLDFAST_DEBUG": "1"})
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert "UnknownAgent" in ended.err


def test_the_store_is_named_before_or_after_the_verb_or_by_the_environment_or_found_above(program, filled, tmp_path):
    deep = tmp_path / "project" / "a" / "b"
    deep.mkdir(parents=True)
    nothing = {"HOLDFAST_STORE": ""}
    for words, options in [
        (("--store", str(filled), "agents"), {"env": nothing}),
        (("agents", "--store", str(filled)), {"env": nothing}),
        (("agents", f"--store={filled}"), {"env": nothing}),
        (("agents",), {}),
    ]:
        assert "trip-7" in program(*words, cwd=deep, **options).out
    assert program("agents", cwd=deep, env=nothing).code == 4
    filled.rename(tmp_path / "project" / ".holdfast")
    assert "trip-7" in program("agents", cwd=deep, env=nothing).out


def test_a_reader_that_goes_away_is_no_error(filled):
    with warm.Popen(
        [sys.executable, "-m", "holdfast", "--store", str(filled), "show", "trip-7", "--full", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        assert process.wait(180) in {0, 141}
        assert process.stderr.read() == ""


def test_python_finds_it_where_no_script_is_on_the_path():
    words = [sys.executable, "-m", "holdfast", "--version"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=180)
    assert ended.stdout.strip() == holdfast.__version__


def test_ctrl_c_ends_quietly(filled):
    holder = (
        "import sys, holdfast\n"
        "store = holdfast.open(sys.argv[1], inert=True)\n"
        "agent = store.agent('trip-7')\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    waiting = (
        "import os, signal, sys, time, holdfast.cli.app\n"
        "def sleep(seconds, real=time.sleep):\n"
        "    if sys._getframe(1).f_globals['__name__'] == 'holdfast.store.leases':  # it waits for the other one\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    real(seconds)\n"
        "time.sleep = sleep\n"
        "sys.exit(holdfast.cli.app.run(sys.argv[1:]))\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with warm.Popen([sys.executable, "-c", holder, str(filled)], **pipes) as other:
        other.stdout.readline()
        done = warm.run(
            [sys.executable, "-c", waiting, "--store", str(filled), "undo", "trip-7", "--wait", "600"],
            capture_output=True,
            text=True,
            check=False,
        )
        other.kill()
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


STRUCK = """
import os, signal, sys

class Strikes:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Strikes())
from holdfast.cli import main
sys.exit(main(["agents"]))
"""


@pytest.mark.parametrize("module", ["holdfast.cli.app", "holdfast.cli.session", "holdfast.cli.agents"])
def test_ctrl_c_while_modules_are_loaded_prints_nothing_either(module):
    done = subprocess.run([sys.executable, "-c", STRUCK, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_completion_script_for(shell):
    script = app.generate_completion(shell=shell)
    for word in (*VERBS, "dry-run", "__complete"):
        assert word in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_completion_is_installed_where_the_shell_looks(tmp_path, program):
    ended = program("--install-completion", "--shell", "bash", env={"HOME": str(tmp_path)})
    assert ended.code == 0, ended.err
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "holdfast" in path.name]


def complete(program, *words):
    out = program("__complete", *words).out
    return [line.partition("\t")[0] for line in out.partition("\x1fbegin\n")[2].splitlines()]


def test_the_shell_completes_agents_branches_and_tags(program):
    assert set(complete(program, "log", "")) == {"trip-7", "user@example.com", "tenant:42/a#b"}
    assert complete(program, "show", "trip-7@") == ["trip-7@main", "trip-7@try-b", "trip-7@good"]
    assert complete(program, "rollback", "trip-7", "--to", "") == ["main", "try-b", "good"]
    assert complete(program, "verify", "") == complete(program, "log", "")


def test_completion_never_complains(program, tmp_path):
    ended = program("__complete", "log", "", store=tmp_path / "none")
    assert (ended.code, ended.err) == (0, "")
    assert not (tmp_path / "none").exists()


def test_bash_itself_completes(filled, tmp_path):
    (tmp_path / "holdfast").write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    (tmp_path / "holdfast").chmod(0o755)
    (tmp_path / "script").write_text(app.generate_completion(shell="bash"))
    typing = (
        f"source {tmp_path}/script; COMP_WORDS=(holdfast log tr); COMP_CWORD=2; COMP_LINE='holdfast log tr'; "
        "COMP_POINT=${#COMP_LINE}; _holdfast; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOLDFAST_STORE": str(filled)}
    done = subprocess.run(["bash", "-c", typing], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["trip-7"], done.stderr


@pytest.fixture
def old(tmp_path):
    """A database of LangGraph's, with one thread."""
    with closing(sqlite3.connect(tmp_path / "old.db", check_same_thread=False)) as connection:
        chain(SqliteSaver(connection), "trip-9", 3)
    return tmp_path / "old.db"


@pytest.mark.parametrize(
    "words",
    [
        ["agents"], ["log", "trip-7@good"], ["show", "trip-7@good"], ["diff", "trip-7@asked", "trip-7@try-b"],
        ["branch", "trip-7"], ["branch", "trip-7", "new"], ["tag", "trip-7"], ["tag", "trip-7", "newest"],
        ["rollback", "trip-7@try-b", "--to", "asked"], ["undo", "trip-7@try-b"], ["copy", "trip-7", "trip-8"],
        ["remove", "trip-7", "--yes"], ["verify"], ["verify", "--restore", "--sample", "1"], ["doctor"], ["repair"],
        ["retain", "trip-7", "--last", "1"], ["retain", "--drop"], ["tier", "--to", "{old}.cold"],
        ["import", "langgraph", "sqlite:///{old}", "--dry-run"], ["push", "{old}.pushed"], ["backup", "{old}.pushed"],
        ["export", "{old}.hfb"], ["effects", "accept", "trip-7"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_json_has_the_documented_form(cli, old, words):
    ended = cli(*(word.format(old=old) for word in words), "--json")
    assert ended.json
    assert ended.code == (9 if words[0] in {"rollback", "retain"} and "--drop" not in words else 0)


def test_the_page_of_json_has_every_schema():
    """Each test that looks at JSON compares its form with the page."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in Path(holdfast.cli.__file__).parent.glob("*.py"))
    named = re.findall(r'session\.json\(\s*"([a-z.-]+)"', source) + re.findall(r'"holdfast\.([a-z.-]+)/1"', source)
    told = ["branch", "branches", "tags", *re.findall(r'_tell\(session, report, "([a-z-]+)"', source)]
    page = PAGE.read_text(encoding="utf-8")
    assert len({*named, *told}) > 30
    assert not [name for name in (*named, *told) if f"holdfast.{name}/1" not in page]
    assert {*FORMS} <= {"", "health", *named, *told}  # the one that only the page has


def test_checkpoints_have_the_documented_form(cli):
    shown = cli("show", "trip-7@good", "--json").json["checkpoint"]
    assert set(shown) - set(FORMS[""]) == {"validity_reason", "metadata", "stack"}
    listed = cli("log", "trip-7", "--json").json["checkpoints"][0]
    assert set(listed) - set(FORMS[""]) == {"heads", "abandoned"}
    assert set(cli("diff", "trip-7@asked", "--json").json["old"]) == set(FORMS[""])


def test_the_page_has_every_verb_and_exit_code_and_help_every_option():
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    for verb in [*VERBS, *NESTED]:
        words = verb.split()
        assert f"\n## {words[0]}\n" in page, verb
        assert len(words) == 1 or words[1] in page, verb
        command = app
        for word in words:
            command = command[word]
        for argument in command.assemble_argument_collection(parse_docstring=True):
            assert argument.parameter.help or argument.show is False, (verb, argument.name)
    assert "| 9 |" in page
    for name, code in CODES.items():
        assert re.search(rf"\| {code} \|.*{name}", page), name
