"""The process that outlives: what it leaves after each kind of death, and that it disturbs nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.crash import debugger, kinds, open_dump, outside, sidecar
from holdfast.crash.pages import page
from holdfast.crash.summary import collect
from holdfast.errors import DumpFailed
from tests.crash import doomed
from tests.crash.processes import descriptors

PROGRAM = str(Path(doomed.__file__))
PATIENCE_S = 180


@pytest.fixture
def start():
    with ExitStack() as ended:

        def begin(folder, how, *wanted, python=(sys.executable,), **options):
            options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **options}
            process = subprocess.Popen([*python, PROGRAM, str(folder), how, *wanted], **options)
            ended.enter_context(process)
            ended.callback(process.kill)
            return process

        yield begin


def until(true, what):
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        found = true()
        if found:
            return found
        time.sleep(0.02)
    return pytest.fail(f"waited in vain for {what}")


def the_dump(folder):
    return until(lambda: list(folder.glob("*.hfdump")), "a dump")[0]


def hangs_in(folder, name):
    """The dumps of hangs in that function: on a busy machine a process may seem to hang before it does."""

    def there(path):
        with open_dump(path) as dump:
            main = next((thread for thread in dump.threads if thread.main), None)
            return main is not None and bool(main.frames) and main.frames[-1].function == name

    return [path for path in folder.glob("*.hfdump") if there(path)]


def the_hang(folder, name):
    return until(lambda: hangs_in(folder, name), f"a dump of a hang in {name}")[0]


def sidecar_of(process):
    word, pid = process.stdout.readline().split()
    assert word == "sidecar"
    return int(pid)


def rest_of(process, typed=""):
    """What it says until its end. `communicate` would pass over what `readline` has read ahead."""
    process.stdin.write(typed)
    process.stdin.close()
    said = process.stdout.read()
    process.wait()
    return said


def gone(pid):
    """It has ended; whoever adopted it may not have noticed yet."""

    def ended():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(ended, "the sidecar to leave")


def test_after_a_kill_it_leaves_what_the_process_had_left_with_it(start, tmp_path):
    process = start(tmp_path, "wait")
    side = sidecar_of(process)
    assert process.stdout.readline() == "settled\n"
    process.kill()
    path = the_dump(tmp_path)
    gone(side)
    assert process.wait() == -signal.SIGKILL  # not before: older kernels tell how it ended until somebody has asked
    assert doomed.KEY.encode() not in path.read_bytes()
    with open_dump(path) as dump:
        assert (dump.trigger, dump.why, dump.head["pid"]) == ("killed", "killed by SIGKILL", process.pid)
        assert dump.complete
        main = next(thread for thread in dump.threads if thread.main)
        assert [frame.function for frame in main.frames] == ["<module>", "main", "end"]
        assert dump.sources[PROGRAM].line(main.frames[-1].line).strip() == "sys.stdin.readline()"
        assert [thread.name for thread in dump.threads if not thread.main] == ["beats"]
        state = next(part for part in dump.parts if part.kind == kinds.STACK)
        assert state.state == kinds.PARTIAL
        assert "without locals" in state.reason
        assert [record["text"] for record in dump.logs] == [
            "booked with [redacted provider-key]",
            "connected by [redacted known-value]",  # the variable was set after the start, in the process only
        ]
        agent = dump.extras(kinds.AGENT)["trip-7@main"]
        assert (agent["checkpoint"], agent["note"]) == ("c1", "key [redacted provider-key]")
        assert "asyncio tasks: only the process itself can list them" in dump.missing
        assert any(text.startswith("native stacks and registers: ") for text in dump.missing)
        heading = next(line.text for line in page(collect(dump)) if line.text.startswith("Where"))
        assert heading.startswith("Where, in MainThread, as it was ")
        death = dump.extras(kinds.NOTE)["death"]
        assert (death["signal"], death["progress"], death["ending"]) == ("SIGKILL", 1, False)
        assert dump.extras(kinds.NOTE)["memory"]["samples"][0]["resident"] > 1 << 20
        assert dump.part(kinds.PROCESS)["memory"]["VmRSS"] > 1 << 20
        assert any("libc" in entry[0] for entry in dump.part(kinds.MODULES)["shared"])
        assert ["logging", logging_file(), "0.5.1.2"] in dump.part(kinds.MODULES)["modules"]
        assert dump.part(kinds.DESCRIPTORS)["total"] > 2
        assert "HOME" in dump.part(kinds.ENVIRONMENT)["values"] or "PATH" in dump.part(kinds.ENVIRONMENT)["values"]
    assert list(tmp_path.iterdir()) == [path]


def logging_file():
    import logging

    return logging.__file__


@pytest.mark.parametrize("how", ["exit", "_exit", "SIGTERM", "stop"])
def test_an_end_that_is_no_crash_leaves_nothing(start, tmp_path, how):
    process = start(tmp_path, how)
    side = sidecar_of(process)
    gone(side)
    code = process.wait()
    assert code == {"SIGTERM": -signal.SIGTERM, "stop": -signal.SIGKILL}.get(how, 3)
    assert list(tmp_path.iterdir()) == []


def test_a_fatal_signal_leaves_the_stacks_of_all_threads(start, tmp_path):
    process = start(tmp_path, "segv", stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == -signal.SIGSEGV
    assert "Fatal" not in err
    path = the_dump(tmp_path)
    gone(int(out.split()[1]))
    with open_dump(path) as dump:
        assert (dump.trigger, dump.why) == ("signal", "died of SIGSEGV: Segmentation fault")
        first = dump.threads[0]
        assert first.failing
        assert [frame.function for frame in first.frames] == ["<module>", "main", "end", "string_at"]
        assert [frame.mine for frame in first.frames] == [True, True, True, False]
        assert dump.sources[PROGRAM].line(first.frames[2].line).strip() == "ctypes.string_at(0)"
        assert {thread.name for thread in dump.threads} == {"MainThread", "beats"}
        assert dump.extras(kinds.AGENT)["trip-7@main"]["checkpoint"] == "c1"
        assert len(dump.logs) == 2
        assert dump.part(kinds.MODULES)["shared"]
        said = io.StringIO()
        debugger.explore(dump, commands=io.StringIO("locals\np held\n"), out=said)
        assert said.getvalue().count("no locals: the handler of fatal signals writes none") == 2
        assert {part.kind for part in dump.parts if part.state == kinds.ABSENT} == {
            kinds.OBJECTS,
            kinds.TASKS,
            kinds.LOCKS,
            kinds.HEAP,
            kinds.NATIVE,
        }
    assert list(tmp_path.iterdir()) == [path]


def test_each_early_death_leaves_one_dump_and_disturbs_no_later_start(start, tmp_path):
    for number, wanted in enumerate(((), ("faulthandler",)), 1):
        process = start(tmp_path, "segv", "early", *wanted, stderr=subprocess.PIPE)
        out, err = process.communicate()
        assert process.returncode == -signal.SIGSEGV
        assert err.startswith("Fatal Python error: Segmentation fault\n") if wanted else not err
        gone(int(out.split()[1]))
        assert len(list(tmp_path.glob("*.hfdump"))) == number
        assert len(list(tmp_path.iterdir())) == number
    for path in tmp_path.iterdir():
        with open_dump(path) as dump:
            assert dump.why == "died of SIGSEGV: Segmentation fault"
            assert dump.threads[0].frames[-1].function == "string_at"


def test_what_a_watched_process_left_is_its_sidecars(start, tmp_path):
    process = start(tmp_path, "wait")
    side = sidecar_of(process)
    os.kill(side, signal.SIGSTOP)
    try:
        os.kill(process.pid, signal.SIGSEGV)
        assert process.wait() == -signal.SIGSEGV
        assert outside.collect_fatal(tmp_path) == []
        assert not list(tmp_path.glob("*.hfdump"))
    finally:
        os.kill(side, signal.SIGCONT)
    gone(side)
    (path,) = tmp_path.iterdir()
    with open_dump(path) as dump:
        assert dump.why == "died of SIGSEGV: Segmentation fault"


def test_a_program_that_had_faulthandler_on_keeps_its_text(start, tmp_path):
    process = start(tmp_path, "SIGABRT", "faulthandler", stderr=subprocess.PIPE)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGABRT
    assert "\nFatal Python error: Aborted\n" in err
    assert "in end" in err
    with open_dump(the_dump(tmp_path)) as dump:
        assert dump.why == "died of SIGABRT: Aborted"


def test_it_holds_no_pipe_of_the_program_and_is_not_its_child(start, tmp_path):
    process = start(tmp_path, "wait", stderr=subprocess.PIPE)
    side = sidecar_of(process)
    pipes = {str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in (0, 1, 2)}
    held = set()
    for entry in Path(f"/proc/{side}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a file that it has read meanwhile
            held.add(str(entry.readlink()))
    assert not pipes & held
    assert Path("/").samefile(Path(f"/proc/{side}/cwd").readlink())
    fields = Path(f"/proc/{side}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != process.pid
    assert int(fields[3]) != os.getsid(process.pid)
    assert not Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.communicate("\n")
    gone(side)


def test_a_hang_with_the_lock_held_is_seen_and_the_process_goes_on(start, tmp_path):
    pytest.importorskip("pystack")
    process = start(tmp_path, "hang", "hang_s")
    side = sidecar_of(process)
    with open_dump(the_hang(tmp_path, "end")) as dump:
        assert dump.trigger == "hang"
        main = next(thread for thread in dump.threads if thread.main)
        assert [frame.function for frame in main.frames] == ["<module>", "main", "end"]
        assert ("held", '"a local of the frame that ends"') in main.frames[-1].locals
        native = next(
            item for item in dump.extras(kinds.NATIVE)["threads"]["threads"] if item["native_id"] == process.pid
        )
        assert native["registers"]
        assert any("read" in frame["function"] for frame in native["frames"])
        assert dump.extras(kinds.NOTE)["hang"]["missed_s"] >= 0.5
        assert len(dump.logs) == 2
    out = rest_of(process, "\n")
    assert (process.returncode, out) == (0, "read 1, a local of the frame that ends\n")
    gone(side)
    assert len(hangs_in(tmp_path, "end")) == 1


def test_the_process_can_ask_for_its_own_registers_and_native_stacks(start, tmp_path):
    process = start(tmp_path, "native")
    side = sidecar_of(process)
    out = rest_of(process)
    with_frames = importlib.util.find_spec("pystack") is not None
    assert (process.returncode, out) == (0, f"2 True {with_frames}\n")
    gone(side)


def without_pystack(tmp_path):
    """An interpreter's command that finds what we need, and nothing else that is installed."""
    import blake3
    import ormsgpack
    import zstandard

    import holdfast

    links = tmp_path / "packages"
    links.mkdir()
    for module in (blake3, ormsgpack, zstandard, holdfast):
        folder = Path(module.__file__).parent
        (links / folder.name).symlink_to(folder)
    code = f"import sys, runpy; sys.path.insert(0, {str(links)!r}); del sys.argv[0]; sys.argv[0:] = sys.argv;"
    return [sys.executable, "-I", "-S", "-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')"]


def test_without_pystack_a_hang_is_told_by_the_handler_in_c(start, tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    process = start(folder, "hang", "hang_s", python=without_pystack(tmp_path))
    side = sidecar_of(process)
    with open_dump(the_hang(folder, "end")) as dump:
        main = next(thread for thread in dump.threads if thread.main)
        assert [frame.function for frame in main.frames][-2:] == ["main", "end"]
        state = next(part for part in dump.parts if part.kind == kinds.STACK)
        assert "PyStack is not installed" in state.reason
        assert dump.extras(kinds.NATIVE)["threads"]["threads"][0]["registers"]
    out = rest_of(process, "\n")
    assert (process.returncode, out) == (0, "read 1, a local of the frame that ends\n")
    gone(side)


def test_where_none_can_be_started_that_is_said_and_nothing_is_left(tmp_path, monkeypatch):
    before = descriptors()
    for executable in ("", str(tmp_path / "nothing"), "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(DumpFailed, match="sidecar"):
            sidecar.start(tmp_path)
    assert descriptors() - before == set()


def test_forked_children_speak_for_themselves(start, tmp_path):
    process = start(tmp_path, "fork")
    side = sidecar_of(process)
    out = rest_of(process)
    assert process.returncode == 0
    gone(side)
    (path,) = tmp_path.iterdir()  # of the second, which had a handler's text; none of the parent
    with open_dump(path) as dump:
        assert dump.head["pid"] == int(out.split()[-1])
        assert dump.why == "SIGSEGV: Segmentation fault"
        (evidence,) = dump.extras(kinds.NOTE)["death"]["evidence"]
        assert evidence.startswith(f"found by the sidecar of process {process.pid}: ")


@pytest.mark.root
def test_a_kill_for_memory_is_told_from_another_kill(start, tmp_path):
    places = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    parent = next((place for place in places if (place / "cgroup.procs").exists()), None)
    group = (parent or Path("/nowhere")) / f"holdfast-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if parent == places[0] else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(96 << 20))
        if (group / "memory.swap.max").exists():  # else it would go on into the machine's swap
            (group / "memory.swap.max").write_text("0")
    except OSError:
        if group.exists():
            group.rmdir()
        pytest.skip("no memory group can be made here")
    try:
        process = start(tmp_path, "memory", f"cgroup={group}")
        assert process.wait() == -signal.SIGKILL
        with open_dump(the_dump(tmp_path)) as dump:
            assert dump.trigger == "memory", dump.extras(kinds.NOTE)["death"]
            assert dump.why.startswith("killed for memory")
        gone(sidecar_of(process))
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().strip(), "an empty group")
        group.rmdir()
