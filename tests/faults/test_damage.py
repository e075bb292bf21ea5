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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

import holdfast
from holdfast.agent.verify import _Verification
from holdfast.errors import Damaged, HoldfastError
from holdfast.store.schema import TABLE_NAMES
from tests.conftest import SOAK
from tests.faults import rich

WORKERS = 2
# Of the changes that a part of verify finds, every so many-th goes through all of it: finding must not hide a crash.
FULL_EVERY = 29
# Of the harmless changes to the database, every so many-th is proven by a complete export; the rest by all rows being
# the same.
EXPORT_EVERY = 23
DATABASE = frozenset({"store.db", "store.db-wal", "store.db-shm"})
# A single bit is the smallest change there is, and the hardest to notice.
PATTERNS = (0x01, 0x80, 0xFF, 0x10) if SOAK else (0,)


class Original(NamedTuple):
    path: Path
    rows: dict[str, Any]
    export: dict[str, Any]


def same_rows(store: holdfast.Store, rows: dict[str, Any]) -> bool:
    """Whether the database holds the same. If indexes are sound and other files the same, so is every answer."""
    try:
        return all(rows[name] == found for name, found in rows_of(store))
    except HoldfastError:
        return False


def rows_of(store: holdfast.Store) -> Iterator[tuple[str, Any]]:
    """All that the database holds, one table after the other."""
    select = store._catalog._select
    yield "versions", (select("PRAGMA user_version"), select("PRAGMA application_id"))
    yield "schema", select("SELECT * FROM sqlite_schema ORDER BY 1, 2")
    yield "sequence", select("SELECT name, seq FROM sqlite_sequence ORDER BY 1")
    for name in TABLE_NAMES:
        yield name, select(f"SELECT * FROM {name} ORDER BY 1, 2")


def open_damaged(path: Path, **options: Any) -> holdfast.Store:
    return holdfast.open(path, create=False, types=rich.TYPES, **options)


def judge(original: Original, path: Path, number: int, *, changed: str = "") -> str:
    """What becomes of a damaged copy: how it was detected, or that it is harmless. Raises when neither.

    ``changed`` names the file that alone is different, if that is known.
    """
    try:
        store = open_damaged(path, readonly=True)
    except HoldfastError as error:
        return f"opening: {error.kind}"
    try:
        report = store.verify() if number % FULL_EVERY == 0 else first_finding(original, store, number, changed)
        if report is None:
            return "harmless"
        if not report.ok:
            return f"verify: {report.problems[0].what.split()[0]}"
        if rich.export(store) != original.export:
            raise AssertionError("verify finds nothing, and the store answers differently")
        return "harmless"
    finally:
        store.close()


def first_finding(original: Original, store: holdfast.Store, number: int, changed: str) -> holdfast.VerifyReport | None:
    """The same as verify, but no further than its first finding, which is looked for where the change was made.

    None when the database is sound and holds the same rows, and nothing else was changed. Of these, every so many-th
    has to pass all the rest nonetheless.
    """
    run = _Verification(store, lambda _what, _done, _total: None)
    steps = [run.engine, run.rows, run.nodes, run.chunks]
    if changed.startswith("packs/"):
        steps.sort(key=lambda step: step != run.chunks)
    for step in steps:
        step()
        if not run.report.ok:
            return run.report
        if step == run.engine and changed in DATABASE and number % EXPORT_EVERY and same_rows(store, original.rows):
            return None
    return store.verify()


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
        original = Original(path, dict(rows_of(store)), rich.export(store))
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
                        outcomes[judge(original, path, number, changed=file)] += 1
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
        every = 1 if SOAK else step.get(_kind(file), 1)
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
    all_flips(original, {"store.db": 13, "packs/*.pack": 13, "store.db-shm": 211})


@pytest.mark.slow
def test_flipped_bytes_in_pages_of_the_usual_size_are_detected_or_harmless(tmp_path):
    original = make(tmp_path / "usual-pages", page_size=4096)
    all_flips(original, {"store.db": 23, "packs/*.pack": 13})


# -- larger damage --------------------------------------------------------------------------------------


def judged_copy(original: Original, change: Callable[[Path], None]) -> str:
    with ram("holdfast-change-") as directory, rich.small_limits():
        path = directory / "store"
        shutil.copytree(original.path, path)
        change(path)
        return judge(original, path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_every_truncation_is_detected_or_harmless(tmp_path, rounds, killed):
    original = make(tmp_path / "store", page_size=512, killed=killed)
    rows: dict[str, Counter] = {}
    for file in files_of(original.path):
        size = (original.path / file).stat().st_size
        step = rounds(max(512, size // 60 // 8 * 8), 8)
        lengths = {
            0,
            1,
            size - 1,
            size // 2,
            *range(0, size, step),
            *range(1, size, step),
            *range(step - 1, size, step),
        }
        if file in {"store.db", "store.db-wal"}:
            lengths |= set(range(0, min(size, 4096), 32))
        for length in sorted(length for length in lengths if 0 <= length < size):
            outcome = judged_copy(original, lambda path, file=file, length=length: os.truncate(path / file, length))
            rows.setdefault(file, Counter())[outcome] += 1
    table("truncated", rows)
    # The last page of a killed store's database is in its log as well.
    for file in ("witness", "store.db-wal" if killed else "store.db"):
        assert "harmless" not in rows[file], file


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_missing_and_grown_files_are_detected_or_harmless(tmp_path, killed):
    original = make(tmp_path / "store", page_size=512, killed=killed)
    rows: dict[str, Counter] = {}
    for file in files_of(original.path):
        gone = judged_copy(original, lambda path, file=file: (path / file).unlink())
        assert gone != "harmless" or file.startswith(("locks/", "store.db-shm")), file
        content = (original.path / file).read_bytes()
        longer = judged_copy(
            original, lambda path, file=file, content=content: (path / file).write_bytes(content + b"more" * 300)
        )
        zeros = judged_copy(
            original, lambda path, file=file, content=content: (path / file).write_bytes(bytes(len(content)))
        )
        assert zeros != "harmless" or file.startswith(("locks/", "store.db-shm")), file
        rows[file] = Counter([f"gone {gone}", f"longer {longer}", f"zeros {zeros}"])
    for directory in ("packs", "locks"):
        outcome = judged_copy(original, lambda path, directory=directory: shutil.rmtree(path / directory))
        assert outcome != "harmless" or directory == "locks"
        rows[directory] = Counter([f"gone {outcome}"])
    table("missing and grown", rows)


def test_an_old_database_put_back_is_noticed(tmp_path):
    """Whole files of an earlier moment are sound in themselves; only the witness knows better."""
    path = tmp_path / "store"
    changes = [
        lambda agent: agent.checkpoint("more"),
        lambda agent: agent.tag("t"),
        lambda agent: agent.mark("one", "suspect", "x"),
        lambda agent: agent.branch("side", at="one"),
        lambda agent: agent.rollback("one"),
        lambda agent: None,  # opening alone: the generation that was given must not be given again
    ]
    for number, change in enumerate(changes):
        with holdfast.open(path) as store:
            agent = store.agent(f"agent {number}")
            agent.state["n"] = number
            agent.checkpoint("one")
        shutil.copy(path / "store.db", tmp_path / "old.db")
        with holdfast.open(path) as store:
            change(store.agent(f"agent {number}"))
        shutil.copy(path / "store.db", tmp_path / "new.db")
        shutil.copy(tmp_path / "old.db", path / "store.db")
        with pytest.raises(Damaged, match="lost acknowledged commits") as caught:
            holdfast.open(path)
        assert caught.value.lost
        assert "recover=True" in caught.value.hint
        shutil.copy(tmp_path / "new.db", path / "store.db")
    with holdfast.open(path) as store:
        assert store.verify().ok
    shutil.copy(tmp_path / "old.db", path / "store.db")
    with holdfast.open(path, recover=True) as store:
        assert store.verify().ok
        assert store.agent("agent 5").state["n"] == 5
    holdfast.open(path).close()


def test_an_old_log_put_back_is_noticed(tmp_path):
    """A log from before is made of valid frames, and SQLite would take it."""
    path = tmp_path / "store"
    rich.build(path)
    rich.build_killed(path)
    with ram("holdfast-old-") as old:
        shutil.copytree(path, old / "store")
        before = (old / "store" / "store.db-wal").read_bytes()
        with rich.small_limits(), holdfast.open(path, types=rich.TYPES) as store:  # folds the log
            agent = store.agent("second")
            for number in range(12):
                agent.state["counter"]["n"] = 100 + number
                agent.checkpoint(f"later {number}")
            agent.tag("after")
        good = make_copy(path, old / "good")
        for length in (len(before), len(before) // 2 // 512 * 512):
            shutil.rmtree(path)
            shutil.copytree(good, path)
            (path / "store.db-wal").write_bytes(before[:length])
            (path / "store.db-shm").unlink(missing_ok=True)
            with rich.small_limits():
                try:
                    store = open_damaged(path, readonly=True)
                except HoldfastError:
                    continue
                assert not store.verify().ok
                store.close()


def make_copy(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    return to


@pytest.mark.slow
def test_every_row_that_is_gone_or_swapped_is_detected(tmp_path):
    """Through SQLite itself, so that the database is sound: rows deleted one by one, and contents exchanged."""
    original = make(tmp_path / "store", page_size=4096)
    rows: dict[str, Counter] = {}
    failures = []
    for name in [*TABLE_NAMES, "sqlite_sequence"]:
        keys = [key for key, *_ in sql(original.path, f"SELECT {KEYS.get(name, 'rowid')} FROM {name}")]
        for key in keys:
            outcome = judged_copy(
                original,
                lambda path, name=name, key=key: sql(
                    path, f"DELETE FROM {name} WHERE {KEYS.get(name, 'rowid')} = ?", key
                ),
            )
            rows.setdefault(f"{name} deleted", Counter())[outcome] += 1
            if outcome == "harmless":
                failures.append(f"{name} {key!r} deleted")
    for name, column in (("tail", "data"), ("node", "data"), ("metadata", "data"), ("checkpoint", "operations")):
        key = KEYS.get(name, "rowid")
        found = sql(original.path, f"SELECT {key}, {column} FROM {name}")
        for (one, first), (two, second) in pairwise(found):
            if first == second:
                continue

            def swap(path, name=name, column=column, key=key, one=one, first=first, two=two, second=second):
                sql(path, f"UPDATE {name} SET {column} = ? WHERE {key} = ?", second, one)
                sql(path, f"UPDATE {name} SET {column} = ? WHERE {key} = ?", first, two)

            outcome = judged_copy(original, swap)
            rows.setdefault(f"{name} swapped", Counter())[outcome] += 1
            if outcome == "harmless":
                failures.append(f"{name} {one!r} and {two!r} swapped")
    table("rows", rows)
    assert not failures


def test_a_branch_row_of_an_earlier_moment_is_noticed(tmp_path):
    """Its sum fits; the history that follows it does not."""
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        agent = store.agent("a")
        agent.state["n"] = 0
        agent.checkpoint("zero")
    old = sql(path, "SELECT head, head_id, generation, sum FROM branch")[0]
    with holdfast.open(path) as store:
        agent = store.agent("a")
        agent.state["n"] = 1
        agent.checkpoint("one")
    sql(path, "UPDATE branch SET head = ?, head_id = ?, generation = ?, sum = ?", *old)
    with holdfast.open(path, readonly=True) as store:
        report = store.verify()
        assert any(problem.what == "branch main" for problem in report.problems)


KEYS = {
    "store": "name",
    "tag": "key",
    "validity": "n",
    "metadata": "digest",
    "chunk": "digest",
    "sqlite_sequence": "name",
}


def sql(path: Path, statement: str, *bindings: object) -> list[tuple]:
    connection = apsw.Connection(str(path / "store.db"))
    try:
        return connection.execute(statement, bindings).fetchall()
    finally:
        connection.close()


@pytest.mark.slow
def test_what_is_harmless_to_read_is_harmless_to_write(tmp_path, rounds):
    """The first page and the counters steer what SQLite does next: after a flip there, work goes on or is refused."""
    original = make(tmp_path / "store", page_size=512)
    content = (original.path / "store.db").read_bytes()
    root = sql(original.path, "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_sequence'")[0][0]
    places = [*range(100), *range((root - 1) * 512, root * 512, rounds(3, 1))]
    outcomes: Counter = Counter()
    for place in places:
        with ram("holdfast-write-") as directory, rich.small_limits():
            path = directory / "store"
            shutil.copytree(original.path, path)
            _poke(path / "store.db", place, bytes([content[place] ^ 1 << (place * 7 % 8)]))
            outcomes[_work_on(path)] += 1
    print(f"\nwriting after a flip: {dict(outcomes)}")


def _work_on(path: Path) -> str:
    try:
        with open_damaged(path) as store:
            sound = store.verify().ok
            for name in ("second", "first@example.com", "empty"):
                agent = store.agent(name)
                agent.state["more"] = {"x": name * 20}
                agent.checkpoint("more")
                agent.tag("more")
            agent.state["bulk"] = b"x" * 2000
            agent.checkpoint("bulk")
    except HoldfastError as error:
        return error.kind
    with open_damaged(path, readonly=True) as store:
        report = store.verify()
        if sound:
            assert report.ok, str(report)
            assert store.agent("second").state["more"] == {"x": "second" * 20}
    return "goes on" if sound else "was detected before"
