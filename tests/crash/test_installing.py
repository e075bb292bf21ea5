"""`install()` called twice, where dumps go, whose code is "mine", and programs that the sidecar must outlive."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.crash import Limits, capture, folder, install, kinds, open_dump, outside, stacks
from holdfast.crash.redaction import Redactor
from holdfast.errors import BadOption, NotADump
from tests.crash.processes import PATIENT, SOURCE, run

LIMIT_S = 180


def left(place: Path, process: subprocess.Popen[str]) -> Path:
    """The first whole dump in a folder; the process is killed when it is there."""
    end = time.monotonic() + LIMIT_S
    try:
        while True:
            for path in place.glob("*.hfdump"):
                with suppress(NotADump), open_dump(path) as dump:  # its first bytes may still be missing
                    if dump.index:
                        return path
            assert time.monotonic() < end, process.stderr
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()


def started(place: Path, body: str, **environment: str) -> subprocess.Popen[str]:
    program = place / "program.py"
    program.write_text(body)
    known = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    given = {**known, "PYTHONPATH": str(SOURCE), **environment}
    return subprocess.Popen([sys.executable, program], cwd=place, env=given, stderr=subprocess.PIPE, text=True)


def test_a_second_install_changes_what_it_is_given(tmp_path):
    body = (
        "again = crash.install(to='second', say=False)\n"
        "print(hooks.folder, again.folder)\n"
        "third = crash.install(to='third')\n"
        "third.remove()\n"
        "raise ValueError('x')\n"
    )
    ended = run(tmp_path, body)
    assert ended.out == "second second\n"
    assert len([*(tmp_path / "second").glob("*.hfdump")]) == 1
    assert "dump written" not in ended.err


def test_a_hang_is_seen_that_only_the_second_install_asked_for(tmp_path):
    body = (
        "import time, holdfast.crash as crash\n"
        f"crash.install(to='dumps', sidecar=False, limits={PATIENT})\n"
        "crash.install(hang_s=0.5)\n"
        "def still():\n    time.sleep(600)\n"
        "still()\n"
    )
    with open_dump(left(tmp_path / "dumps", started(tmp_path, body))) as dump:
        assert dump.trigger == "hang"


def test_a_sidecar_starts_however_long_the_search_path_is(tmp_path):
    body = (
        "import os, signal, sys, holdfast.crash as crash\n"
        "sys.path += ['/nowhere/' + 'x' * 200 + str(n) for n in range(1000)]\n"
        "crash.install(to='dumps')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with open_dump(left(tmp_path / "dumps", started(tmp_path, body))) as dump:
        assert dump.trigger == "killed"


def test_a_lock_that_the_only_thread_acquires_twice_is_a_deadlock(tmp_path):
    body = (
        "import threading, holdfast.crash as crash\n"
        f"crash.install(to='dumps', sidecar=False, limits={PATIENT})\n"
        "def twice():\n    lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()\n"
        "twice()\n"
    )
    with open_dump(left(tmp_path / "dumps", started(tmp_path, body))) as dump:
        assert dump.trigger == "deadlock"
        cycles = [cycle for data in dump.extras(kinds.LOCKS).values() for cycle in data["cycles"]]
        assert "twice" in "".join(cycles[0]["text"])


def test_native_stacks_of_an_exception_are_there_when_asked_for(tmp_path):
    for asked, expected in (("", False), ("native=True, ", True)):
        place = tmp_path / f"asked-{expected}"
        place.mkdir()
        ended = run(place, "raise ValueError('x')\n", f"{asked}sidecar=True")
        with open_dump(ended.paths[0]) as dump:
            assert bool(dump.extras(kinds.NATIVE)) is expected


def test_a_free_threaded_build_is_refused(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)
    with pytest.raises(BadOption, match="free-threaded"):
        install()


def test_the_variable_says_where_dumps_go_and_where_they_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DUMPS", str(tmp_path / "there"))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.db").touch()
    with install(tmp_path / "store", sidecar=False, say=False) as hooks:
        assert hooks.folder == folder.of(tmp_path / "store") == tmp_path / "there"


@pytest.mark.parametrize("file", ["/usr/local/app/main.py", "/usr/local/bin/tool.py", "/home/me/holdfast/app.py"])
def test_a_program_beside_the_interpreter_is_the_programs_own(tmp_path, monkeypatch, file):
    found = dict.fromkeys(sysconfig.get_paths(), "/usr/local/lib/python3.12")
    found |= {"data": "/usr/local", "scripts": "/usr/local/bin", "include": "/usr/local/include"}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: found)
    assert stacks.Frames(Limits()).is_mine(file)
    assert not stacks.Frames(Limits()).is_mine("/usr/local/lib/python3.12/json/decoder.py")
    frames = [{"file": file, "line": 1, "function": "f"}, {"file": kinds.__file__, "line": 1, "function": "g"}]
    thread = {"id": 1, "name": "x", "frames": frames, "current": True, "failing": True, "left_out": 0}
    seen = outside.Evidence(why="x", trigger="signal", pid=1, library=stacks.library_paths(), threads=[thread])
    with open_dump(outside.write(tmp_path / "x.hfdump", seen, Redactor())) as dump:
        assert [frame.mine for frame in dump.threads[0].frames] == [True, False]


def test_the_root_is_shown_as_the_root(tmp_path):
    paths = [Path("/"), Path(), Path("/a", "b")]
    with open_dump(capture(to=tmp_path)) as dump:
        listed = dump.object(dump.local(dump.threads[0].frames[-1], "paths"))
        shown = [dump.object(item).text for item in listed.items]
    assert shown == ["/", ".", "/a/b"]
    assert shown == [str(path) for path in paths]


def test_a_folder_of_the_same_name_does_not_hide_a_dump(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = capture("odd name", to=tmp_path / "dumps")
    (tmp_path / "odd-name").mkdir()
    assert folder.find("odd-name", tmp_path / "dumps") == path
