"""Every byte of every file of a small store is changed, one at a time, and so are sizes, names, rows and ages of files.

A change must be reported by ``verify``, or refused with a typed error when the store is opened, or be harmless: then
all that can be asked of the store has the same answer as before. Anything else is a failure.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast.agent.verify import _Verification
from holdfast.errors import HoldfastError
from holdfast.store.schema import TABLE_NAMES
from tests.conftest import SOAK
from tests.faults import rich

WORKERS = 2
# Of the changes that a part of verify finds, every so many-th goes through all of it: finding must not hide a crash.
FULL_EVERY = 29
# Of the harmless ones, every so many-th is proven by a complete export; the rest by all rows being the same.
EXPORT_EVERY = 23
# A single bit is the smallest change there is, and the hardest to notice.
PATTERNS = (0x01, 0x80, 0xFF, 0x10) if SOAK else (0,)


class Original(NamedTuple):
    path: Path
    rows: dict[str, Any]
    export: dict[str, Any]


def rows_of(store: holdfast.Store) -> dict[str, Any] | None:
    """All that the database holds. With sound indexes and the same other files, every answer follows from it."""
    try:
        return _rows_of(store._catalog._select)
    except HoldfastError:
        return None


def _rows_of(select: Callable[[str], list]) -> dict[str, Any]:
    found: dict[str, Any] = {name: select(f"SELECT * FROM {name} ORDER BY 1, 2") for name in TABLE_NAMES}
    found["sequence"] = select("SELECT name, seq FROM sqlite_sequence ORDER BY 1")
    found["versions"] = select("PRAGMA user_version"), select("PRAGMA application_id")
    return found


def open_damaged(path: Path, **options: Any) -> holdfast.Store:
    return holdfast.open(path, create=False, types=rich.TYPES, **options)


def judge(original: Original, path: Path, number: int, *, rows_prove: bool) -> str:
    """What becomes of a damaged copy: how it was detected, or that it is harmless. Raises when neither."""
    try:
        store = open_damaged(path, readonly=True)
    except HoldfastError as error:
        return f"opening: {error.kind}"
    try:
        if number % FULL_EVERY == 0:
            report = store.verify()
        else:  # the same as verify, in its own order, but no further than the first finding
            run = _Verification(store, lambda _what, _done, _total: None)
            report = run.report
            for step in (run.engine, run.rows, run.nodes, run.chunks):
                step()
                if not report.ok:
                    break
            else:
                same = rows_prove and rows_of(store) == original.rows
                if same and number % EXPORT_EVERY:
                    return "harmless"
                report = store.verify()
        if not report.ok:
            return f"verify: {report.problems[0].what.split()[0]}"
        if rich.export(store) != original.export:
            raise AssertionError("verify finds nothing, and the store answers differently")
        return "harmless"
    finally:
        store.close()


@contextmanager
def ram(prefix: str) -> Iterator[Path]:
    """A directory in memory where there is one: nothing here is about the disk."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as directory:
        yield Path(directory)


def make(path: Path, *, page_size: int, killed: bool = False) -> Original:
    rich.build(path, page_size)
    if killed:
        rich.build_killed(path)
        (path / "store.db-shm").touch()
    with ram("holdfast-original-") as copy, rich.small_limits():
        shutil.copytree(path, copy / "store")
        store = open_damaged(copy / "store", readonly=True)
        assert store.verify().ok, str(store.verify())
        original = Original(path, rows_of(store), rich.export(store))
        store.close()
    return original


def flips(original: Original, file: str, places: list[int], patterns: tuple[int, ...]) -> tuple[Counter, list[str]]:
    """Flip each place of one file in turn, in two processes that have a copy of the store each."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_flip, args=(original, file, places[part::WORKERS], patterns, results))
        for part in range(WORKERS)
    ]
    for process in processes:
        process.start()
    outcomes: Counter = Counter()
    failures: list[str] = []
    for _ in processes:
        found, failed = results.get()
        outcomes += found
        failures += failed
    for process in processes:
        process.join()
    return outcomes, failures


def _flip(original: Original, file: str, places: list[int], patterns: tuple[int, ...], results: Any) -> None:
    outcomes: Counter = Counter()
    failures: list[str] = []
    rows_prove = file in {"store.db", "store.db-wal", "store.db-shm"}
    try:
        with ram("holdfast-flip-") as directory, rich.small_limits():
            path = directory / "store"
            shutil.copytree(original.path, path)
            content = (path / file).read_bytes()
            for number, place in enumerate(places):
                for pattern in patterns:
                    flipped = bytes([content[place] ^ (pattern or 1 << (place * 7 % 8))])
                    _poke(path / file, place, flipped)
                    try:
                        outcomes[judge(original, path, number, rows_prove=rows_prove)] += 1
                    except BaseException as error:
                        failures.append(f"{file} byte {place} ^ {pattern:#x}: {type(error).__name__}: {error}")
                    _poke(path / file, place, content[place : place + 1])
                    if file == "store.db-shm":  # SQLite writes it anew every time
                        (path / file).write_bytes(content)
            assert (path / file).read_bytes() == content or file == "store.db-shm", f"{file} was changed by reading it"
    except BaseException as error:
        failures.append(f"{file}: the worker failed: {error!r}")
    finally:
        results.put((outcomes, failures))


def _poke(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def files_of(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def table(title: str, rows: dict[str, Counter]) -> None:
    print(f"\n{title}")
    for name, outcomes in rows.items():
        by_way: Counter = Counter()
        for outcome, count in outcomes.items():
            by_way[outcome.split(":")[0]] += count
        details = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common(6))
        print(f"  {_kind(name):24} {outcomes.total():7,} changes: {dict(by_way)}  ({details})")


def _kind(name: str) -> str:
    return "packs/*.pack" if name.startswith("packs/") else "locks/*" if name.startswith("locks/") else name


def all_flips(original: Original, step: dict[str, int]) -> None:
    rows: dict[str, Counter] = {}
    failures: list[str] = []
    for file in files_of(original.path):
        size = (original.path / file).stat().st_size
        every = 1 if SOAK else step.get(file, 1)
        # The first bytes of every file are its header and go one by one in any case.
        places = sorted({*range(min(size, 256)), *range(0, size, every)})
        if not places:
            continue
        rows[file], failed = flips(original, file, places, PATTERNS)
        failures += failed
    table(f"one byte at a time, {original.path.name}", rows)
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:40])


@pytest.mark.slow
def test_every_flipped_byte_is_detected_or_harmless(tmp_path):
    """With pages of 512 bytes there is little unused room in the database, so nearly every byte matters."""
    original = make(tmp_path / "small-pages", page_size=512)
    all_flips(original, {})


@pytest.mark.slow
def test_every_flipped_byte_of_a_killed_store_is_detected_or_harmless(tmp_path):
    """store.db itself is nearly the same as in the test above, and SQLite never reads an old shm file."""
    original = make(tmp_path / "killed", page_size=512, killed=True)
    assert (original.path / "store.db-wal").stat().st_size > 10_000
    all_flips(original, {"store.db": 13, "store.db-shm": 211})


@pytest.mark.slow
def test_flipped_bytes_in_pages_of_the_usual_size_are_detected_or_harmless(tmp_path):
    original = make(tmp_path / "usual-pages", page_size=4096)
    all_flips(original, {"store.db": 17, "packs": 1})
