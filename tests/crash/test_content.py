"""What a dump holds, and how it is asked."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import os
import pathlib
import socket
import uuid
from dataclasses import dataclass

import pytest

from holdfast.crash import capture, kinds, open_dump
from holdfast.crash.display import text_of
from holdfast.errors import BadOption, NotInDump


@dataclass
class Offer:
    city: str
    price: float


def frame_of(dump, name):
    return next(frame for thread in dump.threads for frame in thread.frames if frame.function.endswith(name))


def test_the_chain_the_notes_and_the_groups(tmp_path):
    def low():
        raise KeyError("low")

    def fail():
        try:
            low()
        except KeyError as first:
            first.add_note("a note")
            try:
                raise OSError(2, "No such file", "/tmp/nothing")
            except OSError as second:
                raise ExceptionGroup("several", [ValueError("one"), TypeError("two"), second]) from first

    try:
        fail()
    except ExceptionGroup as error:
        path = capture(error=error, to=tmp_path)
    with open_dump(path) as dump:
        group, *rest = dump.exceptions
        assert (group.type_name, group.message, group.members) == ("ExceptionGroup", "several", 3)
        members = [dump.exceptions[number] for number in group.group]
        assert [member.type_name for member in members] == ["ValueError", "TypeError", "FileNotFoundError"]
        assert members[2].message == "[Errno 2] No such file: '/tmp/nothing'"
        cause = dump.exceptions[group.cause]
        assert (cause.type_name, cause.message, cause.notes) == ("KeyError", "'low'", ("a note",))
        assert [frame.function.rpartition(".")[2] for frame in cause.frames] == ["fail", "low"]
        assert dump.exceptions[group.context] is members[2]
        assert rest


def test_a_chain_that_goes_in_circles_ends(tmp_path):
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    with open_dump(capture(error=first, to=tmp_path)) as dump:
        assert [failure.cause for failure in dump.exceptions] == [1, 0]


def test_values_come_back_as_they_were(tmp_path):
    def fail():
        values = {
            "none": None, "yes": True, "number": -5, "big": 2**80, "float": 1.5, "text": "é", "bytes": b"\xff",
            "tuple": (1, 2), "set": {7}, 5: "five", "offer": Offer("Lisbon", 10.5), "kind": Offer, "function": fail,
            "path": pathlib.PurePosixPath("/a/b"), "uuid": uuid.UUID(int=5), "decimal": decimal.Decimal("1.50"),
            "when": dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC), "surrogate": "\ud800",
            "long": "x" * 500,
        }  # fmt: skip
        raise ValueError(values["number"])

    try:
        fail()
    except ValueError as error:
        path = capture(error=error, to=tmp_path)
    with open_dump(path) as dump:
        frame = frame_of(dump, "fail")

        def shown(key):
            return text_of(dump, dump.local(frame, f"values[{key!r}]"))

        assert dump.local(frame, "values['none']") is None
        assert dump.local(frame, "values['yes']") is True
        assert dump.local(frame, "values['number']") == -5
        assert dump.local(frame, "values['text']") == "é"
        assert dump.local(frame, "values['bytes']") == b"\xff"
        assert dump.local(frame, "values[5]") == "five"
        assert dump.local(frame, "values['tuple'][1]") == 2
        assert dump.local(frame, "values['offer'].city") == "Lisbon"
        assert shown("big") == hex(2**80)
        assert shown("tuple") == "(1, 2)"
        assert shown("set") == "{7}"
        assert "Offer" in shown("kind")
        assert "fail" in shown("function")
        assert "/a/b" in shown("path")
        assert str(uuid.UUID(int=5)) in shown("uuid")
        assert "1.50" in shown("decimal")
        assert "2026-05-01T12:00:00" in shown("when")
        assert dump.object(dump.local(frame, "values['long']")).text == "x" * 500
        assert text_of(dump, dump.local(frame, "values['offer']")).endswith("Offer city='Lisbon', price=10.5>")


def test_paths_that_lead_nowhere_say_how_far_they_got(tmp_path):
    offers = [{"city": "Lisbon"}]
    with open_dump(capture(to=tmp_path)) as dump:
        frame = frame_of(dump, "test_paths_that_lead_nowhere_say_how_far_they_got")
        assert dump.local(frame, "offers[-1]['city']") == "Lisbon"
        for path in ("nothing", "offers[5]", "offers[0]['x']", "offers.x", "offers[0]['city'].x"):
            with pytest.raises(NotInDump):
                dump.local(frame, path)
        for path in ("offers()", "offers[__import__('os')]", "1", "offers[0", "offers.__class__()"):
            with pytest.raises((BadOption, NotInDump)):
                dump.local(frame, path)
    del offers


def test_search_finds_values_anywhere(tmp_path):
    deep = {"a": [{"b": ("Needle in here",)}]}
    with open_dump(capture(to=tmp_path)) as dump:
        assert any("Needle" in str(hit.value) for hit in dump.search("needle"))
        assert not list(dump.search("not there at all, surely" + "?"))
    del deep


def test_the_process_and_its_surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("LANG", "C.UTF-8")
    listening = socket.create_server(("127.0.0.1", 0))
    with (tmp_path / "opened.txt").open("w") as opened:
        path = capture(to=tmp_path)
    port = listening.getsockname()[1]
    listening.close()
    with open_dump(path) as dump:
        process = dump.part(kinds.PROCESS)
        assert process["pid"] == os.getpid()
        assert process["memory"]["VmRSS"] > 1_000_000
        assert len(process["limits"]["NOFILE"]) == 2
        assert process["kernel"][0] == "Linux"
        found = dump.part(kinds.DESCRIPTORS)["descriptors"]
        assert any(entry["target"] == opened.name for entry in found)
        assert any(entry.get("local") == f"127.0.0.1:{port}" and entry["state"] == "listen" for entry in found)
        assert dump.part(kinds.ENVIRONMENT)["values"]["LANG"] == "C.UTF-8"
        modules = dump.part(kinds.MODULES)
        assert any(entry[0] == "asyncio" for entry in modules["modules"])
        assert "numpy" in modules["distributions"]
        assert any("libc" in entry[0] for entry in modules["shared"])
        heap = dump.part(kinds.HEAP)
        assert heap["objects"] > 1000
        assert {"dict", "list"} <= {name for name, _count, _size in heap["types"]}


def test_tasks_that_wait_for_each_other_are_linked(tmp_path):
    async def main():
        async def inner():
            await asyncio.sleep(100)

        async def outer(task):
            await task

        first = asyncio.create_task(inner(), name="inner")
        second = asyncio.create_task(outer(first), name="outer")
        gathering = asyncio.create_task(outer(asyncio.gather(first, second)), name="gathering")
        await asyncio.sleep(0.01)
        path = capture(to=tmp_path)
        for task in (gathering, second, first):
            task.cancel()
        return path

    with open_dump(asyncio.run(main())) as dump:
        tasks = {task.name: task for task in dump.tasks}
        assert tasks["outer"].waits_for_tasks == (tasks["inner"].number,)
        assert set(tasks["gathering"].waits_for_tasks) == {tasks["inner"].number, tasks["outer"].number}


def test_text_for_people_cannot_write_to_a_terminal(tmp_path):
    evil = {"\x1b[31m": "\x1b]0;title\x07"}
    with open_dump(capture(to=tmp_path)) as dump:
        frame = frame_of(dump, "test_text_for_people_cannot_write_to_a_terminal")
        text = text_of(dump, dict(frame.locals)["evil"])
        assert "\x1b" not in text
        assert "title" in text
    del evil
