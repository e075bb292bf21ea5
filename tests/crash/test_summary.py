"""`holdfast dump show`: the page tells what a person wants first, and what is unusual; hostile files cannot harm."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from holdfast.crash import Limits, capture, kinds, open_dump
from holdfast.crash.display import text_of
from holdfast.crash.dumpfile import Reader
from holdfast.crash.pages import FORMATS, page
from holdfast.crash.summary import as_json, collect, headline, signs
from tests.crash import trip_program
from tests.crash.processes import python

MIB = 1 << 20
# The process that runs the tests is large, and the machine may do much else.
FEW = Limits(deadline_s=600, part_s=300, census_objects=1_000, objects=5_000)


@pytest.fixture
def crafted(honest, tmp_path):
    """``crafted(proc={...})``: the same dump with the content of some parts changed."""

    def make(**parts):
        known = [(kind, payload | parts.pop(kind, {}) if isinstance(payload, dict) else payload)
                 for kind, payload in honest if kind != kinds.INDEX]  # fmt: skip
        file = tmp_path / "crafted.hfdump"
        file.write_bytes(trip_program.sealed([*known, *parts.items()]))
        return file

    return make


def shown(path):
    with open_dump(path) as dump:
        return [line.text for line in page(collect(dump))]


def test_the_failure_comes_first_with_its_chain_notes_and_group(path):
    lines = shown(path)
    assert lines[0] == "ExceptionGroup (2 exceptions): planning failed"
    assert "  note: after 2 tries" in lines
    text = "\n".join(lines)
    assert "one of the group: LookupError: no offer in Lisbon below 100.0" in text
    assert "caused by: KeyError: 'Lisbon!'" in text
    assert "one of the group: TimeoutError: hotel" in text


def test_frames_of_the_program_have_their_source_line_and_the_values_that_the_line_names_first(path):
    with open_dump(path) as dump:
        frames = as_json(collect(dump))["frames"]
    last = frames[-1]
    assert last["function"] == "plan"
    assert last["source"] == "raise group from None"
    assert last["locals"][0][0] == "group"
    assert ["to", "'dumps'"] in last["locals"]
    assert any(frame["before"] for frame in frames), "frames of asyncio are counted, not shown"
    assert all(frame["mine"] for frame in frames)


def test_other_threads_and_tasks_stand_where_they_wait(path):
    text = "\n".join(shown(path))
    assert "2 in worker at" in text
    assert "[worker-0, worker-1]" in text
    assert "2 in wait_for_price at" in text


def test_the_last_log_records_memory_and_descriptors_are_there(path):
    text = "\n".join(shown(path))
    assert "WARNING trip: starting for Lisbon" in text
    assert " resident" in text
    assert "  descriptors  " in text


def test_the_agent_its_checkpoint_its_effects_and_what_is_in_doubt(crafted):
    effect = {"id": "e1", "tool": "book", "status": "in doubt", "args": {"flight": "TP1"}, "error": "timed out"}
    data = {"agent": "trip-7", "branch": "try-b", "checkpoint": "ab" * 32, "label": "asked", "depth": 4, "dirty": True,
            "effects": [effect], "in_doubt": ["e1"], "run": "r1", "function": "travel",
            "stack": ["travel", "booking"], "runs": [{"id": "r1", "status": "running"}]}  # fmt: skip
    lines = shown(crafted(agnt={"name": "trip-7@try-b", "data": data}))
    assert "Agent trip-7@try-b" in lines
    assert "  last checkpoint abababababab #4 asked, and changes that were not saved" in lines
    assert "  running: travel > booking (run r1)" in lines
    assert "  in doubt: book(flight='TP1') -> timed out" in lines
    assert "  1 in doubt: nobody knows whether they happened" in lines


def test_how_the_process_died_and_who_waits_for_whom_are_told(crafted):
    death = {"name": "death", "data": {"what": "killed by SIGKILL", "evidence": ["oom_kill rose by 1"]}}
    locks = {"name": "deadlocks", "data": {"cycles": [{"kind": "threads", "text": ["a waits for b", "b waits for a"]}]}}
    lines = shown(crafted(note=death, lock=locks))
    assert "The process ended: killed by SIGKILL" in lines
    assert "  oom_kill rose by 1" in lines
    assert "  a waits for b" in lines


def test_what_was_cut_is_said_with_its_reason(path, tmp_path):
    data = path.read_bytes()
    cut = tmp_path / "cut.hfdump"
    cut.write_bytes(data[: len(data) // 2])
    lines = shown(cut)
    assert "Not in this dump" in lines
    assert any("the file ends early" in line for line in lines)


def test_a_dump_without_an_exception_says_why_and_where(tmp_path):
    path = capture("just looking", to=tmp_path, limits=FEW)
    with open_dump(path) as dump:
        found = collect(dump)
        assert headline(dump) == "just looking"
        assert found.frames[-1].frame.function == "test_a_dump_without_an_exception_says_why_and_where"
        assert next(page(found)).text == "just looking"


def test_signs_of_what_is_unusual(crafted):
    process = {
        "memory": {"VmSwap": 100 * MIB, "VmSize": 95 * MIB},
        "machine_memory": {"MemTotal": 1000 * MIB, "MemAvailable": 20 * MIB},
        "cgroup": {"memory.current": str(95 * MIB), "memory.max": str(100 * MIB), "memory.events": "oom 1\noom_kill 2"},
        "limits": {"AS": [100 * MIB, -1], "NOFILE": [100, 100]},
        "threads": 900,
        "cpus": 2,
        "load": [50.0, 1.0, 1.0],
    }
    opened = {"descriptors": [{"fd": 1, "socket": "tcp", "state": "close-wait"}] * 30, "total": 95}
    heap = {"largest": [["dict", 2_000_000, 80 * MIB]]}
    with open_dump(crafted(proc=process, fdes=opened, heap=heap)) as dump:
        told = "\n".join(signs(dump))
    for words in ("95% of the control group's limit", "killed 2 processes", "the machine has only 20.0 MiB",
                  "swapped out", "of the address space", "95 of 100 are open", "30 were closed by the other side",
                  "threads: 900", "load: 50 on 2", "a dict with 2,000,000 items"):  # fmt: skip
        assert words in told


def test_a_healthy_program_has_nothing_unusual(path):
    with open_dump(path) as dump:
        assert [sign for sign in signs(dump) if not sign.startswith(("load", "memory"))] == []


def test_endless_recursion_is_named(tmp_path):
    program = """
import sys
from holdfast.crash import Limits, capture
def again(n):
    return again(n + 1)
try:
    again(0)
except RecursionError as error:
    capture(error=error, to=sys.argv[1], limits=Limits(deadline_s=600))
"""
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, tmp_path / "program.py", tmp_path / "d"], check=True)
    (path,) = (tmp_path / "d").iterdir()
    lines = shown(path)
    assert any("recursion: again is " in line for line in lines)
    assert len(lines) < 100


def test_text_of_a_dump_cannot_steer_a_terminal(tmp_path):
    evil = "\x1b]0;owned\x07 \u202etxt.exe \x9b31m\nsecond line"
    try:
        raise ValueError(evil)
    except ValueError as error:
        path = capture(evil, error=error, to=tmp_path, limits=FEW)
    for line in shown(path):
        assert line.isprintable()


def test_a_list_of_two_million_items_in_every_local_costs_only_what_is_shown(tmp_path):
    """Built whole each time, this page would take many minutes."""
    nodes = {"first": 0, "types": ["list"], "shapes": [], "nodes": [[kinds.LIST, 0, [0] * 2_000_000]]}
    values = [part for at in range(50) for part in (f"v{at}", [0])]
    frames = [
        {"file": f"f{at}.py", "line": 1, "function": f"f{at}", "mine": True, "locals": values} for at in range(50)
    ]
    stack = {"id": 1, "name": "x", "current": True, "frames": frames}
    file = tmp_path / "large.hfdump"
    file.write_bytes(trip_program.sealed([("head", {}), ("stck", stack), ("objs", nodes)]))
    assert "      v0 = [0, 0, 0, 0" in "\n".join(shown(file))


def test_a_small_file_that_refers_to_its_chunks_without_end_is_read_a_few_times_only(tmp_path, monkeypatch):
    """Work is bounded by the bytes of the file, not by the references that are followed."""
    count = 40
    lists = [[kinds.LIST, 0, [[at]] * 300_000] for at in range(count)]  # of 600 KB each, before they are compressed
    chunks = [("objs", {"first": at, "types": ["list"], "shapes": [], "nodes": [one]}) for at, one in enumerate(lists)]
    file = tmp_path / "small.hfdump"
    file.write_bytes(trip_program.sealed([("head", {}), *chunks]))
    assert file.stat().st_size < 20_000
    read = []
    # What a chunk holds costs time, so that it is told here without being decoded.
    monkeypatch.setattr(Reader, "payload", lambda _self, chunk: read.append(chunk) or told(chunk))

    def told(chunk):
        return {"first": chunk.number - 1, "types": [], "shapes": [], "nodes": [[0, 0, 1]]} if chunk.number else {}

    with open_dump(file) as dump:
        for asked in range(100 * count):
            dump.object(asked % count, most=asked)
        assert len(read) <= 6 * count
        dump.ask()  # a person asks once more
        assert dump.object(3).reason != dump.object(5_000).reason


def test_one_long_text_that_everything_refers_to_is_not_shown_whole_each_time(tmp_path):
    many = [[kinds.LIST, 0, [[1]] * 100], [kinds.LIST, 0, [[2]] * 100], [kinds.LITERAL, 1, "x" * 1_500_000]]
    values = [part for at in range(20) for part in (f"v{at}", [0])]
    frames = [{"file": "f.py", "line": at, "function": f"f{at}", "mine": True, "locals": values} for at in range(12)]
    stack = {"id": 1, "name": "x", "current": True, "frames": frames}
    file = tmp_path / "long.hfdump"
    nodes = {"first": 0, "types": ["list", "odd"], "shapes": [], "nodes": many}
    file.write_bytes(trip_program.sealed([("head", {}), ("stck", stack), ("objs", nodes)]))
    began = time.process_time()
    with open_dump(file) as dump:
        assert sum(map(len, FORMATS["text"](dump))) < 2_000_000
    assert time.process_time() - began < 20  # it took many minutes


def test_an_array_is_told_as_people_write_it(tmp_path):
    np = pytest.importorskip("numpy")
    weights = np.zeros((50, 1024), dtype=np.float32)
    with open_dump(capture("array", to=tmp_path, limits=FEW)) as dump:
        frame = next(frame for frame in dump.threads[0].frames if frame.function.startswith("test_an_array"))
        shown_as = text_of(dump, dict(frame.locals)["weights"])
    assert shown_as == "<numpy.ndarray float32 (50, 1024), 200 KiB>"
    assert weights.size


GROUP = """
import asyncio, sys
from holdfast.crash import install

async def other():
    await asyncio.sleep(60)

async def book(city):
    price = "about 70"
    return int(price)

async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(other())
        group.create_task(book("Porto"))

install(to="dumps", sidecar=False)
asyncio.run(main())
"""


def test_of_a_group_the_function_that_failed_is_shown(tmp_path):
    (tmp_path / "program.py").write_text(GROUP)
    python(tmp_path / "program.py")
    (path,) = (tmp_path / "dumps").glob("*.hfdump")
    text = "\n".join(shown(path))
    assert "Where it began: ValueError" in text
    assert "program.py:10 in book" in text
    assert "price = 'about 70'" in text
