"""Types that grow, and the places that keep them, are named; nothing of the program runs for it."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import tracemalloc
from collections import deque

import pytest

from holdfast.crash import Limits, capture, heap, memory, open_dump
from holdfast.crash.pages import compare
from tests.crash import torture

LIMITS = Limits(deadline_s=600)

ALL_HOLDERS = True  # what is kept anywhere in this process is looked for


class Offer:
    kept: list = []  # noqa: RUF012 (a class that leaks)

    def __init__(self, number):
        self.number = number


class Desk:
    def __init__(self):
        self.sessions = {}
        self.queue = deque()


kept: list[Offer] = []
desk = Desk()
api_keys = {"a-key-that-nobody-may-see": [1] * 20_000}


def remember():
    inside = []

    def add(value):
        inside.append(value)

    return add


adder = remember()


@functools.cache
def cached(number):
    return Offer(number)


@pytest.fixture
def emptied():
    yield
    for container in (kept, desk.sessions, desk.queue, Offer.kept):
        container.clear()
    cached.cache_clear()


def leak(count):
    for number in range(count):
        kept.append(Offer(number))
        desk.sessions[number] = {"history": [number]}
        desk.queue.append(str(number))
        Offer.kept.append(number)
        adder(number)
        cached(number)


def grown(rows):
    return {row.name.rpartition("test_growth.")[2]: row for row in rows}


def test_types_and_the_places_that_hold_them_are_named(emptied):
    before = heap(limits=LIMITS)
    local = []
    leak(300)
    local.extend(kept)
    after = heap(limits=LIMITS)
    found = before.diff(after)
    offers = grown(found.types)["Offer"]
    assert (offers.before.count, offers.after.count) == (0, 600)
    assert offers.bytes > 0
    places = grown(found.containers)
    assert places["kept"].count == 300
    assert places["kept"].after.holds.endswith("Offer")
    assert places["desk.sessions"].count == 300
    assert places["desk.queue"].count == 300
    assert places["Offer.kept"].count == 300
    assert places["adder() closure inside"].count == 300
    assert places["cached() cache"].count == 300
    assert places["py: local"].count == 300
    assert "desk.sessions[*]['history']" in places
    assert "desk.sessions" in str(found)
    assert "Snapshot" not in str(found)


def test_what_does_not_grow_is_not_named(emptied):
    leak(50)
    heap(limits=LIMITS)
    before = heap(limits=LIMITS)
    found = before.diff(heap(limits=LIMITS))
    assert not {"kept", "desk.sessions", "Offer.kept"} & set(grown(found.containers))
    assert "Offer" not in grown(found.types)


def test_lines_are_named_where_allocations_are_traced(emptied):
    assert heap(limits=LIMITS).lines == {}
    tracemalloc.start()
    try:
        before = heap(limits=LIMITS)
        leak(300)
        found = before.diff(heap(limits=LIMITS))
    finally:
        tracemalloc.stop()
    assert any("test_growth.py:" in row.name and row.count >= 300 for row in found.lines)


def test_a_name_that_looks_secret_lends_its_keys_to_no_place():
    rows = memory.holders_of(lambda file: "test_growth" in file, float("inf"))
    places = [row[0] for row in rows]
    assert any("api_keys[*]" in place for place in places)
    assert not any("nobody-may-see" in place for place in places)


def test_nothing_of_the_program_runs():
    things = torture.make()
    torture_holder = {"things": things}
    heap(limits=LIMITS).diff(heap(limits=LIMITS))
    assert torture.ran == []
    assert gc.isenabled()
    del torture_holder


def test_it_ends_at_its_bounds():
    wide = {number: [[number]] for number in range(100_000)}
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    snapshot = heap(limits=Limits(census_objects=1_000, deadline_s=0.001))
    assert snapshot.objects > 100_000
    while nested:
        nested = nested.pop()
    del wide


def test_a_container_that_another_thread_changes_is_no_harm(emptied):
    ended = threading.Event()

    def change():
        number = 0
        while not ended.is_set():
            number += 1
            desk.sessions[number] = []
            desk.queue.append(number)
            if number % 1_000 == 0:
                desk.sessions.clear()
                desk.queue.clear()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3):
            heap(limits=LIMITS)
    finally:
        ended.set()
        thread.join()


def test_two_dumps_name_types_and_places_that_grew(tmp_path, emptied):
    limits = Limits(deadline_s=600, objects=1_000, source_bytes=1_000)
    first = capture(to=tmp_path, limits=limits)
    leak(300)
    second = capture(to=tmp_path, limits=limits)
    with open_dump(first) as old, open_dump(second) as new:
        compared = compare(old, new)
        found, text = compared.as_json(), "\n".join(line.text for line in compared.lines())
    assert any(row[0].endswith("test_growth.Offer") and row[2] - row[1] == 600 for row in found["types"])
    assert any(row[0].endswith("test_growth.desk.sessions") and row[2] == 300 for row in found["holders"])
    assert "Containers that grew, by who holds them" in text


def test_a_program_without_anything_loaded_can_be_looked_at():
    done = subprocess.run(
        [sys.executable, "-c", "from holdfast.crash import heap; print(heap().objects > 1000)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
