"""`holdfast dump open`: the commands, on a dump whose program is gone; nothing that is typed or stored ever runs."""

from __future__ import annotations

import codecs
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.crash import kinds, open_dump
from holdfast.crash.debugger import explore
from tests.crash import trip_program

EVERYTHING = """info
where
where 3
threads
thread 1
thread worker-0
tasks
task 0
task price-Oslo
u
d
up 3
down 99
frame
frame 0
frame -1
locals
args
list
list 1, 5
l
ll
thread 0
p desk
pp desk
pp messages
p #0
pp #1
exc
exc 0
exc 1
where
regs
search lisbon
search 1
parts
parts agent
parts process
parts modules
parts heap
help
"""


def asked(path, *commands, color=False):
    """What it answers to the commands, each with its own piece of the output."""
    out = io.StringIO()
    with open_dump(path) as dump:
        explore(dump, commands=io.StringIO("\n".join(commands)), out=out, color=color)
    return out.getvalue()


def answer(path, *commands):
    """What the last of the commands printed."""
    return asked(path, *commands).removeprefix(asked(path, *commands[:-1]))


def test_it_begins_with_what_failed_and_where(path):
    text = asked(path)
    assert "planning failed" in text
    assert "3 threads, 3 tasks, 4 exceptions" in text
    assert "ExceptionGroup: planning failed (2 members)" in text
    assert re.search(r"> .*trip\.py\(\d+\)plan\(\)  frame \d+ of thread 0 MainThread\n-> raise group from None", text)


def test_the_stack_shows_source_that_is_no_longer_on_the_machine(path):
    text = answer(path, "where")
    assert text.startswith("thread 0 MainThread  failing, main\n    0 ")
    assert "      -> return then() if n == 0 else recurse(n - 1, then)" in text
    assert "... the same 5 times more" in text
    assert re.search(r">  \d+ .*trip\.py\(\d+\)plan\(\)\n      -> raise group from None\n$", text)
    assert not Path(re.search(r"(/\S+trip\.py)", text)[1]).exists()
    assert answer(path, "w 2").count("\n") == 6  # head, what is above, two frames of two lines


def test_up_down_and_frame_move_and_stop_at_the_ends(path):
    assert "asyncio/events.py" in answer(path, "u")
    assert "plan()" in answer(path, "u", "d")
    assert answer(path, "d") == "*** this is the innermost frame\n"
    assert "<module>()  frame 0 of thread 0" in answer(path, "frame 0")
    assert answer(path, "frame 0", "up") == "*** this is the outermost frame\n"
    assert "plan()" in answer(path, "frame -1")
    assert "*** no frame 99" in answer(path, "f 99")
    assert "*** 'x' is not a number" in answer(path, "f x")
    assert "main()  frame 1 " in answer(path, "u 999", "d")


def test_values_are_named_by_paths(path):
    assert answer(path, "p desk.offers[0].city") == "'Lisbon'\n"
    assert answer(path, "desk.by_city['Rome'].price") == "80.0\n"
    assert answer(path, "p messages[1][7]") == "None\n"
    assert answer(path, "p desk.me.me.tail") == "collections.deque([1, 2, 3])\n"
    assert answer(path, "p numbers[4999]") == "4999\n"
    number = re.search(r"desk = .* #(\d+)\n", answer(path, "locals"))[1]
    assert answer(path, f"p #{number}.offers[2].city") == "'Oslo'\n"
    assert "has no attribute 'nothing'" in answer(path, "p desk.nothing")
    assert "It has: offers, by_city, me, tail" in answer(path, "p desk.nothing")
    assert "is str and has no attribute 'y' in the dump" in answer(path, "p desk.offers[0].city.y")
    assert "is str and has no item 0 in the dump" in answer(path, "p desk.offers[0].city[0]")
    assert "no local 'nothing' in plan" in answer(path, "p nothing")
    assert answer(path, "p #99999999") == "<?: the file does not hold it>\n"
    assert "which value?" in answer(path, "p")


def test_pp_unfolds_and_is_bounded(path):
    assert answer(path, "pp desk").splitlines()[1:5] == [
        "  .offers = list of 3 " + re.search(r"list of 3 (#\d+)", answer(path, "pp desk"))[1],
        "    [0] <__main__.Offer city='Lisbon', price=120.5, tags=['sea']>",
        "    [1] <__main__.Offer city='Rome', price=80.0, tags=[]>",
        "    [2] <__main__.Offer city='Oslo', price=300.0, tags=[]>",
    ]
    assert ", as above" in answer(path, "pp desk")
    assert answer(path, "pp messages[0]['content']").splitlines() == ["a \\x1b[31mred\\x1b[0m trip", "x" * 300]
    assert len(answer(path, "pp numbers").splitlines()) <= 202
    assert len(answer(path, "p numbers")) < 5_000


def test_source_is_listed_from_the_dump(path):
    first = answer(path, "list")
    assert len(first.splitlines()) == 11
    assert re.search(r"^ +\d+ ->             raise group from None$", first, re.MULTILINE)
    following = answer(path, "list", "list")
    assert int(following.split()[0]) == int(first.splitlines()[-1].split()[0]) + 1
    assert '   """A program that fails with threads, tasks, a chain' in answer(path, "l 1, 2")
    whole = answer(path, "ll").splitlines()
    assert whole[0].endswith("async def plan(desk, to):")
    assert whole[-1].endswith("return messages, numbers")
    assert "*** the dump has lines 1 to " in answer(path, "l 99999")


def test_threads_and_tasks(path):
    listed = answer(path, "threads").splitlines()
    assert [line.split()[:3] for line in listed if line.startswith(">")] == [[">", "0", "MainThread"]]
    assert sum("worker-" in line and "worker trip.py" in line for line in listed) == 2
    assert answer(path, "thread worker-1", "p name") == "'w1'\n"
    assert "*** no thread 'nobody'" in answer(path, "thread nobody")
    assert "price-Oslo  waiting for _asyncio.Future" in answer(path, "tasks")
    assert answer(path, "task price-Oslo", "p city") == "'Oslo'\n"
    assert "-> await gate.wait()" in answer(path, "task price-Oslo")


def test_the_chain_with_notes_members_and_causes(path):
    text = answer(path, "exc")
    assert "0 ExceptionGroup: planning failed (2 members)\n     note: after 2 tries\n" in text
    assert "1 member 1: LookupError: no offer in Lisbon below 100.0" in text
    assert "3 caused by KeyError: 'Lisbon!'\n         note: asked for 'Lisbon'\n" in text
    assert "2 member 2: TimeoutError: hotel" in text
    assert "1 while handling (suppressed) LookupError: see 1 above" in text
    assert '-> return self.by_city[city + "!"]' in answer(path, "exc 3")
    assert answer(path, "exc 3", "p city") == "'Lisbon'\n"
    assert answer(path, "exc 3", "p below") == "100.0\n"


def test_registers_native_stacks_and_the_other_parts(path):
    text = answer(path, "regs")
    assert "rip 0x00007f00deadbeef" in text
    assert "0 0x00000000000055aa eval_frame at ceval.c:10" in text
    assert "1 main+0x1f" in text
    assert "checkpoint  a1b2c3" in answer(path, "parts agent")
    assert "asyncio tasks                whole" in answer(path, "parts")
    assert "*** no part 'nothing'" in answer(path, "parts nothing")


def test_search_goes_over_all_values(path):
    text = answer(path, "search LISBON")
    assert "#" in text
    assert "__main__.Offer.city  'Lisbon'" in text
    assert "exception LookupError" in text
    assert "log trip  'starting for Lisbon'" in text
    assert "agent trip-7 checkpoint  'a1b2c3'\n1 found" in answer(path, "search a1b2c3")
    assert answer(path, "search nowhere-to-be-found") == "0 found\n"


@pytest.mark.parametrize(
    "line",
    [
        "!touch canary",
        "!open('canary', 'w')",
        "shell touch canary",
        "p open('canary', 'w')",
        "p desk.__class__.__init__.__globals__['os'].system('touch canary')",
        "p __import__('os').system('touch canary')",
        "pp [open('canary', 'w')]",
        "p desk.offers[open('canary', 'w')]",
        "desk.offers[__import__('os')]",
        "x = open('canary', 'w')",
        "interact",
        "source canary",
        "?touch canary",
        "do_help __class__",
        "help __class__",
        "lines 3",
        "onecmd p",
    ],
)
def test_nothing_that_is_typed_is_evaluated_or_started(path, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    assert answer(path, line).startswith("*** ")
    assert list(tmp_path.iterdir()) == []


def test_the_command_works_in_a_pipe_and_reads_nothing_from_its_folder(path, tmp_path):
    """A folder that holds what pdb and Python would read at their start."""
    for name in (".pdbrc", "pdbrc", "sitecustomize.py", "usercustomize.py", "readline.py", "trip.py", "cmd.py"):
        (tmp_path / name).write_text("open('canary', 'w')\n")
    (tmp_path / ".inputrc").write_text('"\\C-m": "!touch canary\\n"\n')
    done = subprocess.run(
        [sys.executable, "-P", "-m", "holdfast", "dump", "open", path],
        input="p desk.offers[0].city\n\nnonsense\nwhere 1\nquit\np numbers\n",
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *_, value, wrong, hint, _head, _above, frame, source = done.stdout.splitlines()
    assert (value, wrong) == ("'Lisbon'", "*** 'nonsense' is no command and no local here")
    assert "help" in hint
    assert "plan()" in frame
    assert source == "      -> raise group from None"
    assert "\x1b" not in done.stdout
    assert not (tmp_path / "canary").exists()


def test_a_reader_that_leaves_early_is_no_failure(path):
    command = [sys.executable, "-P", "-m", "holdfast", "dump", "open", path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        _out, told = process.communicate(b"search e\n" * 50, timeout=120)
    assert (process.returncode, told) == (141, b"")


class Person:
    """Somebody at a terminal: types, and waits for what is shown."""

    def __init__(self, path, folder):
        self.master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "HOME": str(folder)}
        env.pop("NO_COLOR", None)
        command = [sys.executable, "-P", "-m", "holdfast", "dump", "open", path]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=env,
                                        start_new_session=True, close_fds=True)  # fmt: skip
        os.close(slave)
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.seen = ""

    def types(self, text, wanted):
        """Type it; what is shown from the last wait on until ``wanted`` has appeared."""
        os.write(self.master, text.encode())
        assert self.sees(wanted, 180), self.seen
        shown, found, self.seen = self.seen.partition(wanted)
        return shown + found

    def sees(self, wanted, within_s):
        """Whether it is shown in that time."""
        until = time.monotonic() + within_s
        while wanted not in self.seen:
            if not select.select([self.master], [], [], max(0, until - time.monotonic()))[0]:
                return False
            self.seen += self.decoder.decode(os.read(self.master, 4096))
        return True

    def interrupts(self, wanted):
        """Interrupt it where it waits for a key, and wait for what it shows then.

        Python notices a signal that comes between the prompt and the wait for a key only with that key. So it must
        stand in that wait, and is interrupted again should it have been somewhere else.
        """
        until = time.monotonic() + 180
        while not self.sees(wanted, 0):
            assert time.monotonic() < until, self.seen
            if Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S":
                self.process.send_signal(signal.SIGINT)
                self.sees(wanted, 10)
            time.sleep(0.01)
        return self.types("", wanted)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_person_gets_a_prompt_colours_completion_and_can_interrupt(path, tmp_path):
    with Person(path, tmp_path) as person:
        assert "\x1b[1;31mExceptionGroup\x1b[0m" in person.types("", "(dump) ")
        person.types("p desk.off\t[1].city\n", "'Rome'")
        person.types("", "(dump) ")
        person.interrupts("(dump) ")
        person.types("p desk.by_city['Lis\t.tags\n", "['sea']")
        person.types("", "(dump) ")
        os.write(person.master, b"\x04")
        assert person.process.wait(180) == 0


def test_colours_are_off_unless_asked_for(path):
    assert "\x1b" not in asked(path, *EVERYTHING.splitlines())
    assert "\x1b[1;31m" in asked(path, color=True)


def unsafe(text):
    return [char for char in text if not char.isprintable() and char != "\n"]


def test_nothing_in_a_dump_can_steer_a_terminal(path, tmp_path):
    """Every text of the file, wherever it is, ends with what would clear the screen and forge a line."""
    evil = "\x1b[2J\r\n> forged\x9b\u202e\x07"

    def poison(value):
        if isinstance(value, str):
            return value + evil
        if isinstance(value, list):
            return [poison(item) for item in value]
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()}
        return value

    crafted = tmp_path / "x.hfdump"
    chunks = trip_program.chunks_of(path)
    crafted.write_bytes(trip_program.sealed((kind, poison(payload)) for kind, payload in chunks))
    text = asked(crafted, *EVERYTHING.splitlines(), "p desk" + evil, evil, "thread " + evil)
    assert "forged" in text
    assert unsafe(text) == []
    assert "\n> forged" not in text


def test_circles_and_depth_in_a_crafted_file_end(tmp_path):
    crafted = tmp_path / "x.hfdump"
    chain = [{"type": "E", "message": "m", "frames": [], "cause": (at + 1) % 64, "context": at, "group": [0, at, 63]}
             for at in range(64)]  # fmt: skip
    nodes = [[kinds.LIST, 0, [[at], [at + 1], [at + 1]], None, []] for at in range(1_000)]
    deep: object = "leaf"
    for _ in range(60):
        deep = {"d": [deep]}
    frames = [{"file": "f", "line": 1, "function": "g", "locals": ["x", [0]]}] * 20_000
    crafted.write_bytes(
        trip_program.sealed([
            ("head", {"plan": []}),
            ("excp", {"chain": chain}),
            ("stck", {"id": 1, "name": "t", "frames": frames}),
            ("objs", {"first": 0, "types": ["list"], "shapes": [], "nodes": nodes}),
            ("natv", {"name": "deep", "data": deep}),
        ])
    )  # fmt: skip
    text = asked(crafted, "exc", "p x", "pp x", "regs", "where", "where 20000", "search leaf", "up 9999999")
    assert len(text) < 100_000
    assert "the same" in text
