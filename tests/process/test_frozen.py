"""Frozen processes: real programs are saved with CRIU while they run, killed, and brought back."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.errors import (
    BadOption,
    HoldfastError,
    NotAnImage,
    NotEncrypted,
    NotFrozen,
    NotThawed,
    RollbackBlocked,
    UntrustedImage,
)
from holdfast.process import cooperation
from tests.process.programs import AGENT, COUNTER, SERVER, Program, until

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("criu")]


def cli(*words, store=None, **options):
    place = ["--store", str(store)] if store is not None else []
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *place, *map(str, words)],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False, **options,
    )  # fmt: skip


def ask(port):
    def once():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
            return [int(word) for word in answer.read().split()]

    return until(once, OSError)


def flat(text):
    return " ".join(text.split())


def ended(pid):
    until(lambda: None if Path(f"/proc/{pid}").exists() else True)


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as opened:
        yield opened


def test_a_server_that_is_frozen_under_load_and_killed_answers_again_with_memory_files_and_port(tmp_path, store):
    with Program(tmp_path / "server", SERVER) as server:
        port = int(server.wait_for("port"))
        ask(port)
        over = threading.Event()

        def load():
            while not over.is_set():
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).read()

        loaders = [threading.Thread(target=load) for _ in range(2)]
        for one in loaders:
            one.start()
        try:
            frozen = store.freeze(server.pid)
        finally:
            over.set()
            for one in loaders:
                one.join()
        after = ask(port)  # it goes on, and its files grow
        assert after[0] == after[1]
        server.kill()
        (server.folder / "server.db-journal").write_bytes(b"left behind")

        thawed = store.thaw("program")
        assert thawed.pid == server.pid
        count, stored, ticks, pid = ask(port)
        assert pid == server.pid
        assert count == stored <= after[0]
        assert ticks > 0
        later = ask(port)
        assert later[:2] == [count + 1, stored + 1]
        assert later[2] >= ticks, "its other thread goes on"
        assert len((server.folder / "server.log").read_text().split()) == later[0]
        assert not (server.folder / "server.db-journal").exists()
        aside = next(server.folder.glob("server.db.*displaced*-journal"))  # where SQLite looks for it
        assert aside.read_bytes() == b"left behind"
        aside.unlink()
        with closing(sqlite3.connect(str(aside).removesuffix("-journal"))) as database:
            assert database.execute("SELECT count(*) FROM asked").fetchone() == (after[0],)
        assert frozen.pause_s > 0
        assert any("mapped" in note for note in frozen.notes)
        assert any("ledger" in note for note in frozen.notes)
        assert any("ledger" in note for note in thawed.notes)
        with pytest.raises(NotThawed, match="still runs"):
            store.thaw("program")
        assert ask(port)[0] == later[0] + 1


def test_a_thaw_that_is_killed_half_way_leaves_old_files_for_the_next_one(tmp_path, store_path):
    from holdfast.process import criu
    from tests.lives import dies

    with Program(tmp_path / "writer", "log = open('log', 'w', buffering=1)\nlog.write('old\\n')\n" + COUNTER) as one:
        one.passes(1)
        with holdfast.open(store_path) as store:
            store.freeze(one.pid, agent="writer", then="end")
        one.kill()
        log = one.folder / "log"
        log.write_text("what somebody wrote later")

        def thaw():
            with holdfast.open(store_path) as store:
                store.thaw("writer")

        assert dies(thaw, 1, (criu, "restore"))
        assert list(one.folder.glob("*displaced*")), "it was killed between its files and its process"
        with holdfast.open(store_path) as store:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HOLDFAST_CRIU", "/bin/false")
                with pytest.raises(NotThawed):
                    store.thaw("writer")
            at = one.count()[0]
            store.thaw("writer")
        one.passes(at)
        assert log.read_text() == "old\n"
        beside = list(one.folder.glob("log.*displaced*"))
        assert [path.read_text() for path in beside] == ["what somebody wrote later"]
        assert not list(one.folder.glob("*-new"))
        assert not list((tmp_path / "state" / "holdfast" / "thaws").iterdir())


def test_what_files_got_since_lies_beside_and_nobody_who_writes_one_is_cut_off(tmp_path, store):
    program = "log = open('app.log', 'a', buffering=1)\nlog.write('old\\n')\n" + COUNTER
    with Program(tmp_path / "writer", program) as one:
        one.passes(1)
        store.freeze(one.pid, agent="writer")
        one.kill()
        log = one.folder / "app.log"
        words = [sys.executable, "-c", "import sys; print('new order', flush=True); sys.stdin.read()"]
        with log.open("a") as output:
            other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output)
        try:
            until(lambda: "new order" in log.read_text() or None)
            inode = log.stat().st_ino
            with pytest.raises(NotThawed, match=rf"app\.log would be put back, and process {other.pid} has it open"):
                store.thaw("writer")
            assert (log.read_text(), log.stat().st_ino) == ("old\nnew order\n", inode)
        finally:
            other.communicate()
        thawed = store.thaw("writer")
        assert log.read_text() == "old\n"
        beside = next(one.folder.glob("app.log.*displaced*"))
        assert beside.read_text() == "old\nnew order\n"
        assert any(str(beside) in note for note in thawed.notes)


def test_a_connection_is_kept_or_closed_as_chosen(tmp_path, store):
    text = """
    import os, socket
    server = socket.create_server(("127.0.0.1", 0))
    open("port.new", "w").write(str(server.getsockname()[1]))
    os.rename("port.new", "port")
    said = b""
    while True:
        peer, _ = server.accept()
        try:
            while more := peer.recv(100):
                said += more
                peer.sendall(said)
        except OSError:
            pass
    """
    with Program(tmp_path / "echo", textwrap.dedent(text)) as echo:
        port = int(echo.wait_for("port"))
        with socket.create_connection(("127.0.0.1", port), timeout=30) as talk:
            talk.sendall(b"one ")
            assert talk.recv(100) == b"one "
            try:
                store.freeze(echo.pid, tcp="keep", then="end")
            except NotFrozen as error:
                if "nftables" in error.message:
                    pytest.skip("connections cannot be kept here")
                raise
            echo.process.wait()
            store.thaw("program")
            talk.sendall(b"two ")
            assert talk.recv(100) == b"one two "
            store.freeze(echo.pid, tcp="close", then="end")
            ended(echo.pid)
            store.thaw("program")
        with socket.create_connection(("127.0.0.1", port), timeout=30) as talk:
            talk.sendall(b"three")
            assert talk.recv(100) == b"one two three"


TALKER = """
import os, subprocess, sys
other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
open("ready", "w").close()
for line in sys.stdin:
    other.stdin.write(line)
    said = other.stdout.readline().strip()
    try:
        print(f"heard {said}", flush=True)
        print(f"wrote {said}", file=open("did", "a"), flush=True)
    except OSError as error:
        open("did", "a").write(repr(error))
    if said == "end":
        other.stdin.close()
        other.wait()
        sys.exit(7)
"""


def test_pipes_to_others_lead_to_those_of_the_thaw_and_back(tmp_path, store, store_path):
    """In the foreground; pipes among the processes themselves come back as they were."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8", "bufsize": 1}
    with Program(tmp_path / "talker", TALKER, **streams) as talker:
        talker.wait_for("ready")
        talker.process.stdin.write("one\n")
        assert talker.process.stdout.readline() == "heard one\n"
        frozen = store.freeze(talker.pid, agent="talker")
        assert sum("is a pipe to another process" in note for note in frozen.notes) == 2
        talker.process.stdin.write("two\n")  # it goes on with what it has
        assert talker.process.stdout.readline() == "heard two\n"
        talker.kill()
        (talker.folder / "did").unlink()
        store.close()
        words = [sys.executable, "-m", "holdfast", "--store", str(store_path), "thaw", "talker", "--foreground"]
        with subprocess.Popen(words, **streams, stderr=subprocess.PIPE) as thawed:
            thawed.stdin.write("three\n")
            assert thawed.stdout.readline() == "heard three\n", thawed.stderr.read()
            thawed.stdin.write("four\nend\n")
            thawed.stdin.flush()
            assert thawed.stdout.readline() == "heard four\n"
            assert thawed.stdout.readline() == "heard end\n"
            assert thawed.wait(60) == 7, "it ends as the program does"
        assert (talker.folder / "did").read_text().split("\n")[0] == "wrote three"
    # In the background nobody writes to it, and what it says goes nowhere: that is no error.
    with Program(tmp_path / "speaker", COUNTER.replace("count += 1", "count += 1; print(count)"), **streams) as speaker:
        with holdfast.open(store_path) as again:
            again.freeze(speaker.pid, agent="speaker", then="end")
            speaker.kill()
            at = speaker.count()[0]
            again.thaw("speaker")
        speaker.passes(at + 100)


def test_in_a_terminal_a_program_with_pipes_gets_none_of_it_unless_asked(tmp_path, store, store_path):
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8", "bufsize": 1}
    text = (
        "open('ready', 'w').close()\n"
        "for line in __import__('sys').stdin: open('got', 'a').write(line)\nopen('end', 'w')"
    )
    with Program(tmp_path / "reader", text, **streams) as reader:
        reader.wait_for("ready")
        store.freeze(reader.pid, agent="reader", then="end")
        reader.kill()
        store.close()
        there = Terminal(sys.executable, "-m", "holdfast", "--store", str(store_path), "thaw", "reader")
        there.says("goes on as process")
        reader.wait_for("end")  # nobody writes to it
        assert there.end() == 0


class Terminal:
    """A program on a terminal."""

    def __init__(self, *words):
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.execv(words[0], words)
        self.said = b""

    def says(self, text, typed=""):
        os.write(self.fd, typed.encode())
        deadline = time.monotonic() + 60
        while text.encode() not in self.said:
            assert time.monotonic() < deadline, self.said
            if select.select([self.fd], [], [], 0.1)[0]:
                self.said += os.read(self.fd, 4096)
        self.said = b""

    def end(self):
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


def test_an_interactive_python_comes_back_on_another_terminal(store, store_path):
    first = Terminal(sys.executable, "-q", "-i")
    first.says(">>> ")
    first.says("42", "x = 41; print(x + 1)\n")
    store.freeze(first.pid, agent="session")
    with pytest.raises(NotThawed, match="runs"):
        store.thaw("session")
    os.kill(first.pid, signal.SIGKILL)
    first.end()
    with pytest.raises(NotThawed, match="terminal"):
        store.thaw("session")
    store.close()
    second = Terminal(sys.executable, "-m", "holdfast", "--store", str(store_path), "thaw", "session")
    second.says("x is 82", "print('x is', x * 2)\n")
    os.write(second.fd, b"raise SystemExit(7)\n")
    assert second.end() == 7


def test_only_images_that_this_machine_made_are_thawed_unless_somebody_trusts_them(
    tmp_path, store, store_path, monkeypatch
):
    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(5)
        store.freeze(counter.pid, agent="counter", then="end")
        counter.kill()
        at = counter.count()[0]
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        with pytest.raises(UntrustedImage, match="not made by this user"):
            store.thaw("counter")
        assert counter.count()[0] == at
        store.close()
        said = cli("thaw", "counter", store=store_path)
        assert said.returncode == 4
        assert "--trust" in said.stderr
        said = cli("thaw", "counter", "--trust", "--json", store=store_path)
        assert json.loads(said.stdout)["pid"] == counter.pid
        counter.passes(at)
    key = tmp_path / "state" / "holdfast" / "image-key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.read_bytes() not in b"".join(p.read_bytes() for p in store_path.rglob("*") if p.is_file())


def test_an_image_that_was_changed_is_refused_before_anything_happens(tmp_path, store):
    from holdfast.process import images

    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(3)
        frozen = store.freeze(counter.pid, agent="counter", then="end")
        counter.kill()
        # Somebody who can write to the store makes a new image out of an old one, with another program in it.
        stored = images.Stored(store, "counter")
        with stored.exported(trust=False) as folder:
            pages = next((folder / "criu").glob("pages-*.img"))
            data = bytearray(pages.read_bytes())
            data[len(data) // 2] ^= 1
            pages.write_bytes(data)
            description = stored.description
            (folder / "proof").unlink()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(images.image, "proof", lambda _named: b"\0" * 32)
                images.save(store, "counter", folder, description)
        with pytest.raises(UntrustedImage):
            store.thaw("counter")
        assert images.Stored(store, f"counter@id:{frozen.checkpoint.id}").trusted
        # Bytes that changed on the disk are found, whoever is trusted.
        for pack in (Path(store.place) / "packs").rglob("*"):
            if pack.is_file():
                data = bytearray(pack.read_bytes())
                for at in range(8192, len(data), 65536):
                    data[at] ^= 0xFF
                pack.chmod(0o644)
                pack.write_bytes(data)
        with pytest.raises(HoldfastError) as caught:
            store.thaw(f"counter@id:{frozen.checkpoint.id}", trust=True)
        assert caught.value.kind in {"damaged", "corrupt-value", "not-an-image"}
        assert not Path(f"/proc/{counter.pid}").exists()


def test_an_agent_comes_back_with_its_store_and_what_it_did_since_is_undone(tmp_path, store, store_path):
    with Program(tmp_path / "clerk", AGENT, store_path) as clerk:
        clerk.passes(2)
        frozen = store.freeze("clerk")
        assert frozen.released_s > 0
        at = int(store.agent("clerk", readonly=True).at(f"id:{images_head(store, 'clerk')}").state["n"])
        clerk.passes(at + 3)
        with clerk.at_rest():
            later = clerk.count()
            clerk.kill()
        store.close()
        # What undoes a booking is the program's.
        said = cli("thaw", "clerk", "--load", clerk.folder / "program.py", "--json", store=store_path, cwd=clerk.folder)
        assert said.returncode == 0, said.stderr
        (clerk.folder / "count").unlink()
        n, memory = clerk.passes(at)
        assert memory == n, "what only memory has goes on from the image"
        clerk.passes(at + 2)
    lines = (clerk.folder / "booked").read_text().split("\n")
    last = max(at for at, line in enumerate(lines) if line.startswith("undone"))
    assert int(lines[last + 1].removeprefix("booked ")) <= later[0], "it goes on from the image"
    for number in range(at + 1, later[0] + 1):
        assert lines.count(f"booked {number}") <= lines.count(f"undone {number}") + 1, "nothing is booked twice"
        assert f"undone {number}" in lines
    with holdfast.open(store_path) as opened:
        assert opened.verify().ok
        labels = [one.label for one in opened.agent("clerk", readonly=True).log()]
        assert labels.count(f"booked {at + 1}") == 1


@pytest.mark.parametrize("sends", ["the same", "another", "the same in a run", "the same in a task"])
def test_what_a_thaw_leaves_standing_is_not_done_again(tmp_path, store, store_path, sends, monkeypatch):
    """It answers the process that comes back, as after any restart, or stops it if it asks for something else."""
    text = AGENT.replace(', compensate=lambda effect: open("booked", "a").write(f"undone {effect.args[\'n\']}\\n")', "")
    assert text != AGENT
    if sends == "the same in a run":
        text = text.replace("if __name__", "@holdfast.durable\ndef turn(agent, n):\n    book(n)\n\nif __name__")
        text = text.replace("            book(n)\n", "            agent.run(turn, n)\n")
    if sends == "the same in a task":
        text = text.replace("            book(n)\n", "            with agent.task(f'turn {n}'): book(n)\n")
    if sends == "another":
        text = text.replace("book(n)\n", "book(n + 1_000 * os.path.exists('other'))\n")
    with Program(tmp_path / "clerk", text, store_path) as clerk:
        clerk.passes(2)
        store.freeze("clerk")
        at = int(store.agent("clerk", readonly=True).at(f"id:{images_head(store, 'clerk')}").state["n"])
        clerk.passes(at + 3)
        with clerk.at_rest():
            clerk.kill()
        booked = (clerk.folder / "booked").read_text()
        with pytest.raises(RollbackBlocked):
            store.thaw("clerk")
        with pytest.raises(BadOption, match="no effect to accept is called 'bok'"):
            store.thaw("clerk", accept=["book", "bok"])
        (clerk.folder / "count").unlink()
        (clerk.folder / "other").touch()
        if sends == "the same":  # whoever thaws may be killed, or clear up, before the process has heard of it
            monkeypatch.setattr(cooperation, "thawing", lambda folder, uid: None)
        for _ in range(2):  # the second time the agent stands where it should, and what was done still stands
            store.thaw("clerk", accept=["book"])
            if sends == "another":
                until(lambda: "MaybeRepeated" in (clerk.folder / "output").read_text() or None)
                assert (clerk.folder / "booked").read_text() == booked
                return
            last = len(booked.split("\n")) - 1
            clerk.passes(last + 1)
            with clerk.at_rest():
                for entry in Path("/proc").glob("[0-9]*/cwd"):
                    with suppress(OSError):
                        if entry.readlink() == clerk.folder:
                            os.kill(int(entry.parts[2]), signal.SIGKILL)
                            ended(entry.parts[2])
            booked = (clerk.folder / "booked").read_text()
            lines = booked.split("\n")[:-1]
            assert len(lines) == len(set(lines)), "nothing is booked twice"
            (clerk.folder / "count").unlink()
    with holdfast.open(store_path) as opened:
        assert opened.verify().ok


LISTENING = AGENT.replace(
    'if __name__ == "__main__":\n',
    """if __name__ == "__main__":
    import socket
    server = socket.create_server(("127.0.0.1", 0))
    open("port.new", "w").write(str(server.getsockname()[1]))
    os.rename("port.new", "port")
    log = open("log", "a", buffering=1)
""",
).replace("            memory += 1\n", "            memory += 1\n            log.write(f'{n}\\n')\n")


def criu_that(tmp_path, criu, does, verb="restore"):
    """CRIU, but for restores, or dumps."""
    made = tmp_path / f"criu-{does.split()[0]}"
    made.write_text(f'#!/bin/sh\nif [ "$1" = {verb} ]; then {does}; fi\nexec "{criu}" "$@"\n')
    made.chmod(0o700)
    return {**os.environ, "HOLDFAST_CRIU": str(made)}


@pytest.fixture
def gone_on(tmp_path, store_path):
    """An agent that was frozen, has gone on, and was killed; where it was then, and what it had booked at last."""
    with Program(tmp_path / "clerk", LISTENING, store_path) as clerk:
        clerk.passes(2)
        with holdfast.open(store_path) as store:
            store.freeze("clerk")
            head = images_head(store, "clerk")
            at = store.agent("clerk", readonly=True).at(f"id:{head}").state["n"]
        clerk.passes(at + 3)
        with clerk.at_rest():
            clerk.kill()
        yield clerk, at, head


def thaw_clerk(clerk, store_path, **options):
    words = ["thaw", "clerk", "--load", clerk.folder / "program.py", "--json"]
    return cli(*words, store=store_path, cwd=clerk.folder, **options)


def test_what_is_known_beforehand_stops_a_thaw_before_anything_is_undone(gone_on, store_path, tmp_path):
    clerk, _, _ = gone_on

    def now():
        with holdfast.open(store_path) as store:
            assert not store.half_thawed()
            head = store.agent("clerk", readonly=True).head.id
        return head, *((clerk.folder / name).read_text() for name in ("booked", "log"))

    before = now()
    with socket.create_server(("127.0.0.1", int((clerk.folder / "port").read_text()))):
        said = thaw_clerk(clerk, store_path)
    assert said.returncode == 6
    assert "its port is taken by another process" in said.stderr
    with (clerk.folder / "log").open("a") as log, subprocess.Popen(["sleep", "100"], stdout=log) as other:
        said = thaw_clerk(clerk, store_path)
        other.kill()
    assert "log would be put back" in said.stderr
    with holdfast.open(store_path) as store:
        from holdfast.process import images, thaw

        stored = images.Stored(store, "clerk")
        runs = dict(stored.description.mapped)
        program = os.path.realpath(sys.executable)
        assert runs[program] == os.path.getsize(program)
        another = msgspec.structs.replace(stored.description, mapped=[(program, 1)])
        with stored.exported(trust=False) as folder, pytest.raises(NotThawed, match="another one by now"):
            thaw.check(folder, another, attached=False)
        with stored.exported(trust=False) as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(thaw.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
            with pytest.raises(NotThawed, match="no room"):
                thaw.check(folder, stored.description, attached=False)
    assert now() == before
    assert thaw_clerk(clerk, store_path).returncode == 0
    with holdfast.open(store_path) as store:
        assert not store.half_thawed()


@pytest.mark.parametrize("does", ["exit 1", "kill -9 $PPID; exit 1"])
def test_a_thaw_that_is_cut_short_says_so_until_it_is_done(gone_on, store_path, tmp_path, criu, does, caplog):
    clerk, at, head = gone_on
    said = thaw_clerk(clerk, store_path, env=criu_that(tmp_path, criu, does))
    with holdfast.open(store_path) as store:
        assert store.agent("clerk", readonly=True).head.id == head
        (half,) = store.half_thawed()
        assert (half.agent, half.branch, half.image.partition("@")[0]) == ("clerk", "main", "images/clerk")
    lines = (clerk.folder / "booked").read_text().split("\n")
    undone = sum(line.startswith("undone") for line in lines)
    assert undone >= 3
    if does == "exit 1":
        assert said.returncode == 6
        assert f"clerk went back to {head[:12]}; undone: {undone} of book" in flat(said.stderr)
        assert f"holdfast thaw {half.image}" in flat(said.stderr)
    else:
        assert said.returncode == -signal.SIGKILL
    told = cli("doctor", store=store_path)
    assert f"the thaw of {half.image} is half-way: clerk goes back" in flat(told.stdout)
    assert f"holdfast thaw {half.image}" in flat(told.stdout)
    assert "is half-way" in flat(cli("log", "clerk", store=store_path).stderr)
    with holdfast.open(store_path) as store:  # whoever opens it otherwise is told, and may go on
        store.agent("clerk", when=None).close()
    assert [one.levelname for one in caplog.records if "is half-way" in one.message] == ["WARNING"]
    assert thaw_clerk(clerk, store_path).returncode == 0
    with holdfast.open(store_path) as store:
        assert not store.half_thawed()
    (clerk.folder / "count").unlink()
    assert clerk.passes(at)[0] == clerk.count()[1], "it goes on from the image"
    lines = (clerk.folder / "booked").read_text().split("\n")
    assert sum(line.startswith("undone") for line in lines) == undone, "nothing is undone twice"


def test_a_thaw_that_cannot_undo_everything_says_so_and_the_next_one_undoes_the_rest(gone_on, store_path):
    clerk, at, head = gone_on
    booked = [line for line in (clerk.folder / "booked").read_text().split("\n") if line.startswith("booked")]
    last = int(booked[-1].split()[1])
    program = clerk.folder / "program.py"
    text = program.read_text()
    refusing = 'open("booked" if effect.args["n"] != ' + f'{last - 1} else "/nowhere/at/all", "a").write'
    program.write_text(text.replace('lambda effect: open("booked", "a").write', f"lambda effect: {refusing}"))
    said = thaw_clerk(clerk, store_path)
    assert said.returncode
    assert "The thaw is half-way. Going back had begun." in flat(said.stderr)
    with holdfast.open(store_path) as store:
        assert store.agent("clerk", readonly=True).head.id != head
        assert [one.agent for one in store.half_thawed()] == ["clerk"]
    program.write_text(text)
    assert thaw_clerk(clerk, store_path).returncode == 0
    with holdfast.open(store_path) as store:
        assert not store.half_thawed()
    lines = (clerk.folder / "booked").read_text().split("\n")
    assert [lines.count(f"undone {n}") for n in range(at + 1, last + 1)] == [1] * (last - at)


def test_whoever_goes_on_after_half_a_thaw_ends_it(gone_on, store_path, tmp_path, criu):
    clerk, _, _ = gone_on
    thaw_clerk(clerk, store_path, env=criu_that(tmp_path, criu, "exit 1"))
    with holdfast.open(store_path) as store, closing(store.agent("clerk", when=None)) as agent:
        assert store.half_thawed()
        agent.state["n"] += 1
        agent.checkpoint("gone on")
        assert not store.half_thawed()


def test_of_images_the_last_three_stay_unless_another_number_is_said(tmp_path, store):
    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(1)
        ids = [store.freeze(counter.pid, agent="counter").checkpoint.id for _ in range(5)]
        images = store.agent("images/counter", readonly=True)
        assert [one.id for one in images.log()] == ids[:1:-1]
        ids += [store.freeze(counter.pid, agent="counter", keep=0).checkpoint.id for _ in range(2)]
        assert [one.id for one in images.log()] == ids[:1:-1]
        store.freeze(counter.pid, agent="counter", keep=1)
        assert len(images.log()) == 1
        assert store.verify().ok


def test_the_time_for_open_files_is_part_of_the_pause(tmp_path, store, monkeypatch):
    from holdfast.process import image

    real = image.save_files

    def slowly(*args, **options):
        time.sleep(0.5)
        return real(*args, **options)

    with Program(tmp_path / "writer", "log = open('log', 'w')\n" + COUNTER) as one:
        one.passes(1)
        quick = store.freeze(one.pid).pause_s
        monkeypatch.setattr(image, "save_files", slowly)
        assert store.freeze(one.pid).pause_s > max(0.5, quick)


def test_those_that_come_back_from_one_image_draw_other_numbers(tmp_path, store, store_path):
    drawing = (
        AGENT.replace(
            '            open("count.new"',
            '            open("drawn", "a").write(f"{random.random()}\\n")\n            open("count.new"',
        )
        .replace("import os, sys, time", "import os, random, sys, time")
        .replace("            book(n)\n", "")
    )
    with Program(tmp_path / "clerk", drawing, store_path) as clerk:
        clerk.passes(2)
        store.freeze("clerk")
        at = int(store.agent("clerk", readonly=True).at(f"id:{images_head(store, 'clerk')}").state["n"])
        clerk.passes(at + 8)
        clerk.kill()
        drawn = [(clerk.folder / "drawn").read_text().split()[at + 1 :]]
        for _ in range(2):
            (clerk.folder / "drawn").unlink()
            (clerk.folder / "count").unlink()
            pid = store.thaw("clerk").pid
            clerk.passes(at + 8)
            os.kill(pid, signal.SIGKILL)
            ended(pid)
            # It may have drawn the first ones before it came to its store, where it learns that it was brought back.
            drawn.append((clerk.folder / "drawn").read_text().split()[3:])
        assert all(len(one) > 2 for one in drawn)
        numbers = [number for one in drawn for number in one]
        assert len(numbers) == len(set(numbers))


def images_head(store, name):
    from holdfast.process import images

    return images.Stored(store, name).description.agents[0][3]


def test_a_process_whose_store_is_open_is_refused_unless_it_listens(tmp_path, store, store_path):
    with Program(tmp_path / "clerk", AGENT.replace("holdfast.freezable()", "pass"), store_path) as clerk:
        at = clerk.passes(1)[0]
        with pytest.raises(NotFrozen, match="does not listen"):
            store.freeze("clerk")
        clerk.passes(at)


def test_a_process_whose_store_is_on_a_server_is_refused_by_its_name(tmp_path, store, postgres_url, monkeypatch):
    pytest.importorskip("psycopg")
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")
    for text, said in (
        (AGENT.replace("holdfast.freezable()", "pass"), "has a Holdfast store open and does not listen"),
        (AGENT.replace('agent("clerk"', 'agent("second"'), "is on a server"),
    ):
        with Program(tmp_path / "clerk", text, postgres_url) as clerk:
            at = clerk.passes(1)[0]
            with pytest.raises(NotFrozen, match=said):
                store.freeze(clerk.pid, wait_s=1.0)
            clerk.passes(at)
        (clerk.folder / "count").unlink()
    closed = (
        """
import os, sys, time
import holdfast
with holdfast.open(sys.argv[1]) as store, store.agent("other") as agent:
    agent.checkpoint("one")
"""
        + COUNTER
    )
    with Program(tmp_path / "closed", closed, postgres_url) as one:
        one.passes(1)
        assert store.freeze(one.pid).agent == "program", "a store that was closed is none"


def test_a_freeze_waits_for_a_call_under_way_and_then_refuses(tmp_path, store, store_path):
    with Program(tmp_path / "clerk", AGENT.replace("book(n)\n", "book(n, slow=5.0)\n"), store_path) as clerk:
        clerk.wait_for("calling")
        with pytest.raises(NotFrozen, match="changes something outside"):
            store.freeze("clerk", wait_s=0.3)
        frozen = store.freeze("clerk", wait_s=180.0)
        assert frozen.pid == clerk.pid
        n = images_head(store, "clerk")
        assert store.agent("clerk", readonly=True).at(f"id:{n}").state["n"] >= 1


def test_what_cannot_be_saved_is_refused_by_name_and_goes_on(tmp_path, store):
    ring = "import ctypes; ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(256))\n"
    works = ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(256)) >= 0
    if works:
        with Program(tmp_path / "ring", ring + COUNTER) as one:
            one.passes(1)
            with pytest.raises(NotFrozen, match="io_uring"):
                store.freeze(one.pid)
            one.passes(one.count()[0])
    mine, theirs = socket.socketpair()
    with mine, theirs, Program(tmp_path / "socket", COUNTER, pass_fds=[theirs.fileno()]) as one:
        one.passes(1)
        with pytest.raises(NotFrozen, match="Unix socket of another process"):
            store.freeze(one.pid)
        one.passes(one.count()[0])
    logging = COUNTER.replace("time.sleep(0.01)", "time.sleep(0.01)\n    print(count, file=log, flush=True)")
    with Program(tmp_path / "shared", "log = open('log', 'a')\n" + logging) as one:
        one.passes(1)
        with (one.folder / "log").open("a") as log:
            other = subprocess.Popen(["sleep", "100"], stdout=log)
        try:
            with pytest.raises(NotFrozen, match="also being written"):
                store.freeze(one.pid)
            assert store.freeze(one.pid, files="keep").pid == one.pid
        finally:
            other.kill()
            other.wait()
        at = one.passes(one.count()[0] + 3)[0]
        one.kill()
        size = (one.folder / "log").stat().st_size
        store.thaw("program")
        one.passes(at)
        assert (one.folder / "log").stat().st_size > size, "it goes on at the end of what is there"
    apart = subprocess.Popen(["unshare", "--net", "sleep", "100"])
    try:
        until(lambda: network(apart.pid) != network("self") or None)
        with pytest.raises(NotFrozen, match="namespaces"):
            store.freeze(apart.pid)
    finally:
        apart.kill()
        apart.wait()
    with pytest.raises(NotFrozen, match="no process"):
        store.freeze(apart.pid)
    with pytest.raises(NotFrozen, match="writes"):
        store.freeze("nobody")
    store.agent("plain").checkpoint("no image")
    with pytest.raises(NotAnImage):
        store.thaw("plain")


def network(pid):
    return Path(f"/proc/{pid}/ns/net").readlink()


def test_images_share_what_did_not_change(tmp_path, store, rounds):
    text = """
    import os, random, time
    size = 64 * 2**20
    memory = bytearray(os.urandom(size))
    round = 0
    while True:
        if os.path.exists(f"change{round}"):
            at = random.randrange(size - size // 100)
            memory[at : at + size // 100] = os.urandom(size // 100)
            round += 1
            open(f"changed{round}", "w").close()
        time.sleep(0.01)
        open("ready", "w").close()
    """
    with Program(tmp_path / "large", textwrap.dedent(text)) as large:
        large.wait_for("ready")
        first = store.freeze(large.pid, keep=0)
        for number in range(rounds(2, 9)):
            (large.folder / f"change{number}").touch()
            large.wait_for(f"changed{number + 1}")
            last = store.freeze(large.pid, keep=0)
        assert first.bytes > 64 * 2**20
        assert first.new_bytes > 64 * 2**20
        assert 0 < last.new_bytes <= 0.05 * first.new_bytes


def test_a_copy_in_isolation_disturbs_nothing(tmp_path, store):
    with Program(tmp_path / "server", SERVER) as server:
        port = int(server.wait_for("port"))
        ask(port)
        store.freeze(server.pid)
        before = ask(port)
        log = (server.folder / "server.log").read_bytes()
        copy = store.thaw("program", isolated=True)
        try:
            inside = ["nsenter", "--target", str(copy.pid), "--net", "--mount", "--pid"]
            code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}').read().decode())"
            said = subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert said.stdout.split()[0] == str(before[0])
            there = subprocess.run([*inside, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True)
            assert [line.split(":")[0].strip() for line in there.stdout.splitlines()[2:]] == ["lo"]
            assert (server.folder / "server.log").read_bytes() == log
            assert ask(port)[0] == before[0] + 1, "the original goes on by itself"
        finally:
            os.kill(copy.pid, signal.SIGKILL)
            ended(copy.pid)


def test_a_process_whose_number_is_taken_gets_numbers_of_its_own(tmp_path, store, monkeypatch):
    from holdfast.process import thaw

    monkeypatch.setattr(thaw, "PID_WAIT_S", 0.2)
    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(1)
        store.freeze(counter.pid, then="end")
        counter.kill()
        at = counter.count()[0]
        for _ in range(50):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(counter.pid - 1))
            other = subprocess.Popen(["sleep", "100"])
            if other.pid == counter.pid:
                break
            other.kill()
            other.wait()
        else:
            pytest.skip("others take numbers too fast here")
        try:
            thawed = store.thaw("program")
            assert thawed.own_numbers
            assert counter.passes(at)[1] == counter.pid, "it does not notice"
        finally:
            other.kill()
            other.wait()


def test_a_freezer_that_is_killed_leaves_the_process_running(tmp_path, store_path, rounds):
    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(1)
        holdfast.open(store_path).close()
        for number in range(rounds(4, 100)):
            words = ["--store", str(store_path), "freeze", str(counter.pid)]
            freezer = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(0.25 + 0.15 * (number % 8))
            freezer.kill()
            freezer.wait()
            counter.passes(counter.count()[0])
    with holdfast.open(store_path) as opened:
        assert opened.verify().ok


def test_a_freezer_that_is_killed_before_the_process_stands_still_leaves_it_running(
    tmp_path, store_path, criu, monkeypatch
):
    # As soon as CRIU is to save the process, it waits until nobody is there any more who asked for it.
    slow = tmp_path / "slow-criu"
    slow.write_text(
        f"""#!/bin/sh
if [ "$1" = dump ]; then
    asked=$PPID
    touch '{tmp_path}/asked'
    while kill -0 "$asked" 2>/dev/null; do sleep 0.05; done
    '{criu}' "$@"
    echo $? >'{tmp_path}/code.new'
    mv '{tmp_path}/code.new' '{tmp_path}/code'
else
    exec '{criu}' "$@"
fi
"""
    )
    slow.chmod(0o700)
    monkeypatch.setenv("HOLDFAST_CRIU", str(slow))
    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(1)
        freezer = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "--store", str(store_path), "freeze", str(counter.pid)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(lambda: (tmp_path / "asked").exists() or None)
        freezer.kill()
        freezer.wait()
        assert int(until((tmp_path / "code").read_text, FileNotFoundError)) > 0
        counter.passes(counter.count()[0])


def interrupting(tmp_path, criu, verb):
    """A CRIU at whose work whoever called it is interrupted, and which says when it has come to its end."""
    does = f'kill -INT $PPID; "{criu}" "$@"; code=$?; touch "{tmp_path}/came to its end"; exit $code'
    return criu_that(tmp_path, criu, does, verb)


def test_an_interrupt_does_not_end_criu_at_work_in_a_program(tmp_path, store_path, criu):
    """Where it was ended while it had its own code in the process, the process went with it."""
    end = tmp_path / "came to its end"
    with Program(tmp_path / "counter", "log = open('log', 'w')\n" + COUNTER) as counter:
        counter.passes(1)
        said = cli("freeze", counter.pid, store=store_path, env=interrupting(tmp_path, criu, "dump"))
        assert (said.returncode, end.exists()) == (130, True), said
        counter.passes(counter.count()[0])
        assert cli("freeze", counter.pid, store=store_path).returncode == 0
        counter.kill()
        end.unlink()
        at = counter.count()[0]
        said = cli("thaw", "program", store=store_path, env=interrupting(tmp_path, criu, "restore"))
        assert (said.returncode, end.exists()) == (0, True), said
        assert f"as process {counter.pid}" in said.stdout, "its files are in place, and it lives: that is told"
        counter.passes(at)


def test_an_interrupt_during_an_image_ends_neither_the_program_nor_who_looks_after_it(tmp_path, store_path, criu):
    folder = tmp_path / "program"
    folder.mkdir()
    text = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n" + COUNTER
    (folder / "anything.py").write_text("import sys\n" + text)
    words = ["--store", store_path, "run", "--images", "every=0.3s", "--", sys.executable, "anything.py"]
    running = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *map(str, words)], cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=interrupting(tmp_path, criu, "dump"),
    )  # fmt: skip
    until(lambda: (tmp_path / "came to its end").exists() or None)
    (tmp_path / "came to its end").unlink()
    until(lambda: (tmp_path / "came to its end").exists() or None)
    assert running.poll() is None
    running.send_signal(signal.SIGTERM)  # which is for the program
    assert running.wait(60) == 5


@pytest.mark.parametrize("first_is", ["lives", "is killed"])
def test_of_two_thaws_at_once_one_brings_it_back_and_the_other_changes_nothing(tmp_path, store_path, criu, first_is):
    go = tmp_path / "go"
    waits = f"touch '{tmp_path}/restoring'; until [ -e '{go}' ]; do sleep 0.02; done"
    words = [sys.executable, "-m", "holdfast", "--store", str(store_path), "thaw", "program"]
    with Program(tmp_path / "writer", "log = open('log', 'w', buffering=1)\n" + COUNTER) as one:
        one.passes(1)
        assert cli("freeze", one.pid, store=store_path).returncode == 0
        at = one.passes(1)[0]
        one.kill()
        (one.folder / "log").write_text("what somebody wrote later")
        first = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=criu_that(tmp_path, criu, waits))
        until(lambda: (tmp_path / "restoring").exists() or None)
        if first_is == "is killed":  # CRIU goes on
            first.kill()
        second = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until(lambda: any(f"-> FLOCK  ADVISORY  WRITE {second.pid} " in line for line in locks()) or None)
        go.touch()
        assert first.wait(60) == (0 if first_is == "lives" else -signal.SIGKILL)
        assert "the process still runs" in second.communicate(timeout=60)[1]
        one.passes(at)
        assert os.path.samefile(f"/proc/{one.pid}/fd/3", one.folder / "log"), "it writes where others look"


def locks():
    return Path("/proc/locks").read_text().splitlines()


def test_what_a_process_puts_into_its_folder_leads_root_nowhere(tmp_path):
    """The folder in which it waits is its user's, and its name can be seen."""
    theirs, kept = tmp_path / "theirs", tmp_path / "kept"
    kept.write_text("of root")
    theirs.mkdir()
    (theirs / ".go").symlink_to(kept)
    cooperation._say(theirs, "go", "original")
    assert ((theirs / "go").read_text(), (theirs / "go").is_symlink()) == ("original", False)
    (theirs / "go").unlink()
    (tmp_path / "link").symlink_to(theirs)
    cooperation._say(tmp_path / "link", "go", "original")
    assert not (theirs / "go").exists()
    (theirs / ".go").symlink_to(kept)
    os.chown(theirs, 1234, 1234)
    cooperation.thawing(theirs, 4321)
    assert (theirs.stat().st_uid, os.listdir(theirs), (theirs / "go").read_text()) == (4321, ["go"], "thawed")
    with pytest.raises(NotThawed, match="cannot be made"):
        cooperation.thawing(tmp_path / "link", 4321)
    assert (kept.read_text(), theirs.stat().st_uid) == ("of root", 4321)
    for said in ("[1]", "no", '[["a"]]', '{"a": 1}'):
        (tmp_path / "released").write_text(said)
        with pytest.raises(NotFrozen, match="no answer"):
            cooperation._answer(tmp_path, 1, 1.0)


def test_a_program_that_is_run_with_images_ends_as_it_would_and_can_be_brought_back(tmp_path, store_path):
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "anything.py").write_text(
        COUNTER.replace("time.sleep(0.01)", "time.sleep(0.01)\n    if os.path.exists('end'): sys.exit(3)")
    )
    words = ["--store", str(store_path), "run", "--images", "every=0.3s", "--", sys.executable, "anything.py"]
    with (tmp_path / "said").open("wb") as said:
        running = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *words],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        until(lambda: store_path.exists() or None)

    def image():
        with holdfast.open(store_path, readonly=True) as opened:
            return opened.agent("images/anything", create=False, readonly=True).head

    until(image, HoldfastError)
    (folder / "end").touch()
    assert running.wait(60) == 3
    at = int((folder / "count").read_text().split()[0])
    (folder / "end").unlink()
    back = cli("thaw", "anything", "--json", store=store_path)
    assert back.returncode == 0, back.stderr
    pid = json.loads(back.stdout)["pid"]
    try:
        until(lambda: int((folder / "count").read_text().split()[0]) > at or None, FileNotFoundError)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_images_leave_the_store_only_when_somebody_says_so_and_encrypted(tmp_path, store):
    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(1)
        store.freeze(counter.pid, agent="counter")
    store.agent("plain").checkpoint("one")
    with holdfast.open(tmp_path / "plain") as plain, holdfast.open(tmp_path / "sealed", key=b"k" * 32) as sealed:
        store.push(plain)
        assert [one.name for one in plain.agents()] == ["plain"]
        with pytest.raises(NotEncrypted):
            store.push(plain, images=True)
        with pytest.raises(NotEncrypted):
            store.export(tmp_path / "bundle", ["images/counter"])
        store.push(sealed, images=True)
        assert sorted(one.name for one in sealed.agents()) == ["images/counter", "plain"]
        assert sealed.verify().ok


def test_a_process_moves_into_other_namespaces_and_the_original_ends_when_it_lives(tmp_path, store, request):
    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(3)
        place = tmp_path / "there"
        key = tmp_path / "key"
        key.write_text(os.urandom(32).hex())
        holdfast.open(place, key=bytes.fromhex(key.read_text())).close()
        ready = tmp_path / "ready"
        script = f"ip link set lo up; touch {ready}; exec sleep 300"
        target = subprocess.Popen(
            ["unshare", "--pid", "--net", "--mount-proc", "--fork", "--kill-child", "sh", "-c", script]
        )
        request.addfinalizer(lambda: (target.kill(), target.wait()))
        until(lambda: ready.exists() or None)
        inner = until(lambda: children(target.pid))
        with holdfast.open(place, key=bytes.fromhex(key.read_text())) as there:
            with pytest.raises(NotThawed, match="the original goes on"):
                store.migrate(counter.pid, there, through=["false"])
            at = counter.passes(counter.count()[0])[0]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HOLDFAST_KEY_FILE", str(key))
                greeting = ["sh", "-c", 'echo "Welcome {there}"; exec "$@"', "there"]
                through = [*greeting, "nsenter", "--target", str(inner), "--pid", "--net", "--mount"]
                moved = store.migrate(counter.pid, there, through=through)
        assert counter.process.wait(180) == -signal.SIGKILL
        assert moved.downtime_s >= moved.frozen.pause_s > 0
        assert counter.passes(at)[1] == counter.pid


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_whose_move_was_killed_is_named_with_what_lets_it_go_on(tmp_path, store_path):
    from holdfast.process import left_stopped

    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\ntouch '{tmp_path}/asked'\nexec sleep 100\n")
    slow.chmod(0o700)
    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(1)
        words = ["--store", str(store_path), "migrate", str(counter.pid), str(store_path), "--through", str(slow)]
        holdfast.open(store_path).close()
        moving = subprocess.Popen([sys.executable, "-m", "holdfast", *words], start_new_session=True)
        until(lambda: (tmp_path / "asked").exists() or None)
        assert state(counter.pid) == "T"
        assert left_stopped() == []  # it is being moved
        os.killpg(moving.pid, signal.SIGKILL)
        moving.wait()
        assert state(counter.pid) == "T", "whether it lives elsewhere, nobody can know"
        said = flat(cli("doctor", store=store_path).stdout)
        assert f"`kill -CONT {counter.pid}` lets it go on" in said
        assert (
            json.loads(cli("doctor", "--json", store=store_path).stdout)["freezing"]["stopped"][0]["pid"] == counter.pid
        )
        at = counter.count()[0]
        os.kill(counter.pid, signal.SIGCONT)
        counter.passes(at)
        assert left_stopped() == []
        counter.kill()
        assert left_stopped() == []
    assert not list((tmp_path / "state" / "holdfast" / "moves").iterdir()), "a process that has ended is forgotten"


def test_where_nobody_knows_whether_it_lives_there_the_original_stays_stopped(tmp_path, store):
    from holdfast.process import left_stopped

    with Program(tmp_path / "counter", COUNTER) as counter:
        counter.passes(1)
        for code in (255, 137, 0):  # the line broke; it was killed; it went well, and nothing says what
            with pytest.raises(NotThawed, match=r"is not known.*stays stopped") as caught:
                store.migrate(counter.pid, store, through=["sh", "-c", f"exit {code}"])
            assert f"`kill -CONT {counter.pid}` lets the original go on" in caught.value.hint
            assert state(counter.pid) == "T"
            assert [one.pid for one in left_stopped()] == [counter.pid]
            at = counter.count()[0]
            os.kill(counter.pid, signal.SIGCONT)
            counter.passes(at)
            for note in (tmp_path / "state" / "holdfast" / "moves").iterdir():
                note.unlink()


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0]) if found else None


def test_a_process_that_freezes_itself_comes_back_twice(tmp_path, store_path):
    text = """
    import os, sys
    import holdfast

    store = holdfast.open(sys.argv[1])
    agent = store.agent("self", when=None)
    agent.state["seen"] = ["before"]
    agent.checkpoint("before")
    found = holdfast.freeze_self(store, agent="self")
    agent.state["seen"].append("thawed" if found.thawed else "original")
    agent.checkpoint("after")
    open("thawed" if found.thawed else "original", "w").write(repr(list(agent.state["seen"])))
    """
    with Program(tmp_path / "self", textwrap.dedent(text), store_path) as one:
        assert one.process.wait(60) == 0, (one.folder / "output").read_text()
        assert (one.folder / "original").read_text() == "['before', 'original']"
        with holdfast.open(store_path) as opened:
            opened.thaw("self")
        assert one.wait_for("thawed") == "['before', 'thawed']"
        ended(one.pid)
