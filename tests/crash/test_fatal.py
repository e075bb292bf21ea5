"""Fatal signals: the text of the handler in C, and the dump that a later start makes of it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.crash import kinds, open_dump, outside
from holdfast.errors import DumpFailed
from tests.crash import doomed

PROGRAM = str(Path(doomed.__file__))

TEXT = """Fatal Python error: Segmentation fault

Thread 0x00007fd484cff6c0 (most recent call first):
  File "/app/caf\\xe9 \\u4e2d.py", line 2 in w
  File "/usr/lib/python3.11/threading.py", line 982 in run
  ...

Thread 0x00007fd484cff6c1 [worker-3] (most recent call first):
  <no Python frame>

Current thread 0x00007fd4863cab80 (most recent call first):
  Garbage-collecting
  File "/app/main.py", line 519 in string_at
  File "<string>", line ??? in <module>

Extension modules: numpy.core._multiarray_umath (total: 1)
"""


def test_the_text_is_read_as_threads():
    what, threads = outside.parse_fatal(TEXT, [[0x00007FD4863CAB80, "MainThread", 77, True], "nonsense", [1]])
    assert what == "Segmentation fault"
    assert outside.fatal_signal(TEXT) == "SIGSEGV"
    first, empty, current = threads
    assert [(frame["file"], frame["line"], frame["function"]) for frame in first["frames"]] == [
        ("/usr/lib/python3.11/threading.py", 982, "run"),
        ("/app/café 中.py", 2, "w"),
    ]
    assert (first["left_out"], first["failing"]) == (1, False)
    assert (empty["name"], empty["frames"]) == ("worker-3", [])
    assert (current["name"], current["native_id"], current["main"]) == ("MainThread", 77, True)
    assert (current["failing"], current["collecting"]) == (True, True)
    assert [frame["line"] for frame in current["frames"]] == [0, 519]


def test_text_that_was_cut_anywhere_is_read_as_far_as_it_goes():
    counts = [len(outside.parse_fatal(TEXT[:cut])[1]) for cut in range(len(TEXT))]
    assert counts == sorted(counts)
    assert counts[-1] == 3


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"])
def test_without_a_sidecar_the_next_start_makes_the_dump(tmp_path, name):
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, name, "unwatched"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-getattr(signal, name), "", "")
    (path,) = outside.collect_fatal(tmp_path)
    with open_dump(path) as dump:
        assert dump.trigger == "signal"
        assert dump.why.startswith(name)
        assert [frame.function for frame in dump.threads[0].frames] == ["<module>", "main", "end"]
        line = dump.sources[PROGRAM].line(dump.threads[0].frames[-1].line)
        assert line.strip() == "os.kill(os.getpid(), getattr(signal, how))"
        assert dump.extras(kinds.NOTE)["death"]["signal"] == name
        assert any("nobody looked" in text for text in dump.missing)
        assert dump.head["program"] == [PROGRAM, str(tmp_path), name, "unwatched"]
    assert list(tmp_path.iterdir()) == [path]
    assert outside.collect_fatal(tmp_path) == []


def test_files_of_the_living_are_left_alone_and_empty_ones_of_the_dead_are_removed(tmp_path):
    program = [sys.executable, PROGRAM, tmp_path, "wait", "unwatched"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        while not list(tmp_path.glob("*.fatal")) or not next(tmp_path.glob("*.fatal")).stat().st_size:
            assert process.poll() is None
        assert outside.collect_fatal(tmp_path) == []
        assert len(list(tmp_path.glob("*.fatal"))) == 1
        process.kill()
    assert outside.collect_fatal(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_of_ours_does_no_harm(tmp_path):
    (tmp_path / "a.fatal").write_bytes(b"\xff" * 100 + b"\n" + TEXT.encode())
    (tmp_path / "b.fatal").write_text("[1]\n" + TEXT)
    (tmp_path / "c.fatal").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "d.fatal")
    made = outside.collect_fatal(tmp_path)
    assert all(path.suffix == ".hfdump" for path in made)
    assert (tmp_path / "c.fatal").is_symlink()


@pytest.mark.parametrize("front", ['{"pid": 7, "program": []}', '{"pid": "x", "program": 5, "library": 7}', '{"pro'])
def test_what_a_process_did_not_say_of_itself_costs_no_dump(tmp_path, front):
    (tmp_path / "7-a.fatal").write_text(f"{front}\n{TEXT}")
    (path,) = outside.collect_fatal(tmp_path)
    with open_dump(path) as dump:
        assert dump.why == "SIGSEGV: Segmentation fault"
        assert len(dump.threads) == 3
        assert dump.extras(kinds.NOTE)["death"]["evidence"] == [
            "found at a later start: nobody who watched it had made a dump"
        ]
        told = "\n".join(dump.missing)
    assert list(tmp_path.iterdir()) == [path]
    for part in ("objects", "asyncio tasks", "process and machine", "environment", "heap summary", "native stacks"):
        assert part in told


def test_where_nothing_can_be_written_there_is_no_dump_and_the_next_start_tries_again(tmp_path):
    left = tmp_path / "7-a.fatal"
    left.write_text('{"pid": 7, "program": []}\n' + TEXT)
    code = (
        "import resource, signal, sys; from holdfast.crash import outside;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2);"
        "sys.exit(len(outside.collect_fatal(sys.argv[1])))"
    )
    for most in ("8", "16", "40"):  # inside the first bytes, right behind them, inside the first chunk
        done = subprocess.run([sys.executable, "-c", code, tmp_path, most], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert list(tmp_path.iterdir()) == [left]
    assert len(outside.collect_fatal(tmp_path)) == 1


def test_disabling_puts_back_what_was_and_leaves_no_file(tmp_path):
    before = faulthandler.is_enabled()
    handler = outside.enable_fatal(tmp_path)
    assert faulthandler.is_enabled()
    assert handler.echo == before
    handler.disable()
    handler.disable()
    assert faulthandler.is_enabled() == before
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_error_and_nothing_is_changed(tmp_path):
    before = faulthandler.is_enabled()
    with pytest.raises(DumpFailed):
        outside.enable_fatal(tmp_path / "nothing")
    assert faulthandler.is_enabled() == before
