"""Kernel cores: kept beside their dump, proven, opened; and what is said where there are none."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.crash import cores, dumpfile, kinds, open_dump
from holdfast.crash.redaction import Redactor
from holdfast.errors import BadOption, CorruptValue, NotInDump
from tests.crash import doomed

PROGRAM = str(Path(doomed.__file__))


def obtainable():
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    return hard != 0 and bool(pattern) and pattern[0] not in "|@"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """A dump with its core, of a process that died of SIGSEGV."""
    if not obtainable():
        pytest.skip("the kernel leaves no core files here")
    folder = tmp_path_factory.mktemp("dumps")
    work = tmp_path_factory.mktemp("work")
    command = [sys.executable, PROGRAM, folder, "segv", "core"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout.startswith("core: \n")
    until = time.monotonic() + 120
    while not list(folder.glob("*.hfdump")):
        assert time.monotonic() < until, list(folder.iterdir())
        time.sleep(0.05)
    (path,) = folder.glob("*.hfdump")
    assert list(work.iterdir()) == []  # the kernel's file was moved, not copied
    return path


def test_the_core_lies_beside_the_dump_and_only_its_owner_may_read_it(crashed):
    kept = crashed.with_name(crashed.name.removesuffix(kinds.SUFFIX) + ".core.zst")
    assert kept.stat().st_mode & 0o777 == 0o600
    with open_dump(crashed) as dump:
        assert dump.complete
        core = dump.extras(kinds.NATIVE)["core"]
        pid = dump.head["pid"]
    assert (core["file"], core["kept_bytes"]) == (kept.name, kept.stat().st_size)
    assert (core["pid"], core["signal"]) == (pid, signal.SIGSEGV)
    assert core["bytes"] > core["kept_bytes"] > 0
    assert "secrets included" in core["warning"]
    assert core["threads"][0]["native_id"] == pid
    assert any("libc" in entry[0] for entry in core["files"])


def test_registers_of_every_thread_are_read_from_its_notes(crashed, tmp_path):
    notes = cores.read_notes(cores.unpack(crashed, tmp_path / "core"))
    assert len(notes.threads) == 2
    for registers in notes.threads.values():
        place = registers.get("rip", registers.get("pc"))
        assert any(start <= place < end for _name, start, end in notes.files)


def test_gdb_opens_it_and_runs_no_start_file(crashed, tmp_path, monkeypatch):
    if not shutil.which("gdb"):
        pytest.skip("gdb is not installed")
    (tmp_path / ".gdbinit").write_text("shell touch ran\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    command = cores.gdb_command(crashed, tmp_path / "core")
    asked = subprocess.run(
        [*command, "-batch", "-ex", "p/x $pc"],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    place = int(asked.stdout.rpartition("= ")[2], 16)
    assert any(start <= place < end for _name, start, end in cores.read_notes(tmp_path / "core").files)
    assert not (tmp_path / "ran").exists()


def test_registers_are_those_of_the_fault_and_not_of_the_handler(crashed, tmp_path):
    notes = cores.read_notes(cores.unpack(crashed, tmp_path / "core"))
    registers = next(iter(notes.threads.values()))
    if notes.machine != "x86_64":
        assert (notes.fault_address, "unknown" in notes.registers_of) == (None, True)
        pytest.skip("the fault's own registers are found on x86_64 only")
    assert notes.fault_address == 0  # doomed.py reads there
    assert notes.registers_of.startswith("the fault")
    assert "orig_rax" not in registers  # the system call that raises the signal again
    pytest.importorskip("pystack")
    with open_dump(crashed) as dump:
        thread = dump.extras(kinds.NATIVE)["core"]["threads"][0]
    assert thread["registers"] == registers
    assert registers["rip"] in [frame["address"] for frame in thread["frames"]]


def test_values_and_names_of_threads_come_from_it(crashed):
    pytest.importorskip("pystack")
    with open_dump(crashed) as dump:
        assert {thread["name"] for thread in dump.extras(kinds.NATIVE)["core"]["threads"]} == {"MainThread", "beats"}
        frame = dump.threads[0].frames[2]
        assert frame.function == "end"
        assert dict(frame.locals)["held"] == '"a local of the frame that ends"'
        assert not frame.hidden
        assert [part.state for part in dump.parts if part.kind == kinds.NATIVE] == [kinds.WHOLE]


def test_python_stacks_with_locals_come_with_it(crashed):
    pytest.importorskip("pystack")
    with open_dump(crashed) as dump:
        threads = dump.extras(kinds.NATIVE)["core stacks"]["threads"]
        native = dump.extras(kinds.NATIVE)["core"]["threads"][0]["frames"]
    every = [thread["frames"] for thread in threads]
    frames = next(frames for frames in every if frames[0]["function"] == "<module>")
    assert [frame["function"] for frame in frames] == ["<module>", "main", "end", "string_at"]
    assert "held" in frames[2]["locals"]
    assert any("Py" in frame["function"] for frame in native)
    assert doomed.KEY.encode() not in crashed.read_bytes()


def test_native_reads_it_again_and_adds_what_it_found(crashed, tmp_path):
    pytest.importorskip("pystack")
    copy = tmp_path / crashed.name
    shutil.copy(crashed, copy)
    core = crashed.with_name(crashed.name.removesuffix(kinds.SUFFIX) + ".core.zst")
    shutil.copy(core, tmp_path / core.name)
    before = copy.stat().st_size
    found = cores.native_stacks(copy)
    assert len(found["core"]["threads"]) == 2
    assert found["core stacks"]["threads"]
    assert copy.stat().st_size > before
    with open_dump(copy) as dump:
        assert dump.complete
        assert [part.name for part in dump.parts if part.state == kinds.DAMAGED] == []
        assert dump.trigger == "signal"


def test_a_core_that_was_changed_is_not_opened(crashed, tmp_path):
    copy = tmp_path / crashed.name
    shutil.copy(crashed, copy)
    with pytest.raises(NotInDump, match="not there"):
        cores.unpack(copy, tmp_path / "core")
    core = crashed.with_name(crashed.name.removesuffix(kinds.SUFFIX) + ".core.zst")
    data = bytearray(core.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / core.name).write_bytes(data)
    with pytest.raises(CorruptValue, match="digest"):
        cores.unpack(copy, tmp_path / "core")
    assert not (tmp_path / "core").exists()


def test_a_dump_cannot_name_a_file_elsewhere(tmp_path):
    for name in ("/etc/passwd", "../x.core.zst", "x", "a/b.core.zst"):
        path = tmp_path / f"{abs(hash(name))}.hfdump"
        writer = dumpfile.Writer(path, Redactor())
        writer.add(kinds.HEAD, {"format": 1})
        note = {"file": name, "digest": "0" * 64, "bytes": 10}
        writer.add(kinds.NATIVE, {"name": "core", "data": note})
        writer.finish({})
        writer.close()
        with pytest.raises((CorruptValue, NotInDump)):
            cores.unpack(path, tmp_path / "core")
        assert not (tmp_path / "core").exists()


def test_a_dump_without_a_core_says_why(tmp_path):
    path = tmp_path / "d.hfdump"
    writer = dumpfile.Writer(path, Redactor())
    writer.add(kinds.HEAD, {"format": 1})
    writer.finish({})
    writer.close()
    with pytest.raises(NotInDump, match="core=True"):
        cores.native_stacks(path)
    with pytest.raises((NotInDump, BadOption)):
        cores.gdb_command(path, tmp_path / "core")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("|/usr/lib/systemd/systemd-coredump %P", "coredumpctl"),
        ("|/usr/share/apport/apport %p", "hands cores to /usr/share/apport/apport"),
        ("@/run/coredump.socket", "socket"),
        ("", "empty"),
    ],
)
def test_where_the_kernel_hands_cores_elsewhere_it_is_said(tmp_path, monkeypatch, pattern, said):
    (tmp_path / "pattern").write_text(pattern + "\n")
    monkeypatch.setattr(cores, "_PATTERN", str(tmp_path / "pattern"))
    path, reason = cores.find(os.getpid(), tmp_path, 0)
    assert path is None
    assert said in reason


@pytest.mark.parametrize("pattern", ["core.%p", "{folder}/cores/%e-%p-%t", "c*re[%p]%%", "core"])
def test_a_core_is_found_by_its_pattern_and_its_notes(crashed, tmp_path, monkeypatch, pattern):
    with open_dump(crashed) as dump:
        pid = dump.head["pid"]
    (tmp_path / "cores").mkdir()
    (tmp_path / "pattern").write_text(pattern.format(folder=tmp_path))
    names = {"core.%p": f"core.{pid}", "c*re[%p]%%": f"c*re[{pid}]%", "core": "core"}
    # What core_uses_pid adds is this machine's choice, so that the plain name is tried as it would be written here.
    if pattern == "core" and Path("/proc/sys/kernel/core_uses_pid").read_text().strip() == "1":
        names["core"] = f"core.{pid}"
    place = tmp_path / names.get(pattern, f"cores/python-{pid}-123")
    cores.unpack(crashed, place)
    monkeypatch.setattr(cores, "_PATTERN", str(tmp_path / "pattern"))
    assert cores.find(pid, tmp_path, 0) == (place, "")
    assert cores.find(pid + 1, tmp_path, 0)[0] is None
    assert cores.find(pid, tmp_path, time.time() + 100)[0] is None


def test_any_bytes_are_read_as_notes_or_refused(crashed, tmp_path):
    whole = cores.unpack(crashed, tmp_path / "core")
    with whole.open("rb") as file:
        head = file.read(64 * 1024)
    chance = random.Random(7)
    target = tmp_path / "hostile"
    for _ in range(400):
        data = bytearray(head[: chance.choice([0, 10, 63, 64, 200, 5000, len(head)])])
        for _ in range(chance.randrange(8)):
            if data:
                data[chance.randrange(min(len(data), 6000))] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        target.write_bytes(data)
        with contextlib.suppress(CorruptValue):
            assert cores.read_notes(target).threads


def test_nothing_is_added_to_a_damaged_dump(tmp_path):
    path = tmp_path / "d.hfdump"
    writer = dumpfile.Writer(path, Redactor())
    writer.add(kinds.HEAD, {"format": 1})
    writer.add(kinds.NOTE, {"name": "a", "data": "x" * 100})
    writer.finish({kinds.NOTE: [kinds.WHOLE, ""]})
    writer.close()
    more, parts = dumpfile.append(path, Redactor())
    assert parts == {kinds.NOTE: [kinds.WHOLE, ""]}
    more.add(kinds.NOTE, {"name": "b", "data": "second"})
    more.finish(parts)
    more.close()
    with open_dump(path) as dump:
        assert dump.extras(kinds.NOTE) == {"a": "x" * 100, "b": "second"}
        assert dump.complete
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(CorruptValue):
        dumpfile.append(path, Redactor())
    assert path.read_bytes() == data[:-20]
