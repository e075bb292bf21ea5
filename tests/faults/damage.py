"""Damage: every byte of every file of a small store is changed, and so are sizes, names, rows and ages of files.

A change must be reported by ``verify``, or refused with a typed error when the store is opened, or be harmless: then
all that can be asked of the store has the same answer as before. Anything else is a broken promise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import apsw

import holdfast
from holdfast.agent.verify import _Verification
from holdfast.errors import HoldfastError
from holdfast.store.schema import TABLE_NAMES
from tests.faults import rich
from tests.faults.campaign import Task, campaign, memory, quiet, remembering

# Of the changes that a part of verify finds, every so many-th goes through all of it: finding must not hide a crash.
FULL_EVERY = 29
# Of the harmless changes to the database, every so many-th is proven by a complete export; the rest by all rows being
# the same.
EXPORT_EVERY = 23
DATABASE = frozenset({"store.db", "store.db-wal", "store.db-shm"})


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


def make(path: Path, *, page_size: int, killed: bool = False) -> Original:
    rich.build(path, page_size)
    if killed:
        rich.build_killed(path)
        (path / "store.db-shm").touch()
    with memory() as copy, rich.small_limits():
        shutil.copytree(path, copy / "store")
        store = open_damaged(copy / "store", readonly=True)
        assert store.verify().ok, str(store.verify())
        original = Original(path, dict(rows_of(store)), rich.export(store))
        store.close()
    return original


def poke(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def files_of(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def kind_of(name: str) -> str:
    return "packs/*.pack" if name.startswith("packs/") else "locks/*" if name.startswith("locks/") else name


def share(places: list[Any], most: int) -> list[Any]:
    """At most so many, spread over all of them; the first bytes of a file are its header and come first."""
    if len(places) <= most:
        return places
    front = places[: most // 8]
    step = len(places) / (most - len(front))
    return [*front, *(places[int(number * step)] for number in range(most - len(front)))]


def count(task: Task, name: str, outcome: str) -> None:
    task.tried(f"{name}: {outcome.partition(': ')[0]}")


@contextmanager
def original(*, page_size: int, killed: bool = False) -> Iterator[Original]:
    with memory() as folder, remembering(Path(os.devnull)), quiet():  # only what is in the store itself counts
        made = make(folder / "store", page_size=page_size, killed=killed)
        yield made


# -- bytes ----------------------------------------------------------------------------------------------

STORES = {
    "closed": {"page_size": 512},  # with such pages there is little unused room, so nearly every byte matters
    "killed": {"page_size": 512, "killed": True},
    "usual pages": {"page_size": 4096},
}


@campaign("bytes", "every byte flipped", "changes", ci=1_500, soak=250_000, by_seed=False)
def flipped(task: Task) -> None:
    """Each byte of each file of a store with every kind of record, closed or left by kill -9 with its log."""
    for name, options in STORES.items():
        with original(**options) as made:
            files = files_of(made.path)
            sizes = {file: (made.path / file).stat().st_size for file in files}
            whole = sum(sizes.values())
            for file in files:
                # SQLite never reads an old shm file, so a few bytes of it are enough.
                most = 64 if file.endswith("-shm") else max(24, task.count // len(STORES) * sizes[file] // whole)
                places = share(list(range(sizes[file])), most)
                full = task.count // len(STORES) > whole
                for pattern in (0x01, 0x80, 0xFF, 0x10) if full else (0,):
                    flip(task, made, name, file, places, pattern)


def flip(task: Task, made: Original, name: str, file: str, places: list[int], pattern: int) -> None:
    """Flip each place of one file in turn. Pattern 0: one bit, another for each place."""
    with memory() as folder, rich.small_limits():
        path = folder / "store"
        shutil.copytree(made.path, path)
        content = (path / file).read_bytes()
        for number, place in enumerate(places):
            if task.over:
                return
            poke(path / file, place, bytes([content[place] ^ (pattern or 1 << (place * 7 % 8))]))
            try:
                outcome = judge(made, path, number, changed=file)
            except Exception as error:
                task.broke(f"{name}, {file} byte {place} ^ {pattern:#x}: {type(error).__name__}: {error}")
                outcome = "broken"
            count(task, kind_of(file), outcome)
            poke(path / file, place, content[place : place + 1])
            if file == "store.db-shm":  # SQLite writes it anew every time
                (path / file).write_bytes(content)
        if (path / file).read_bytes() != content and file != "store.db-shm":
            task.broke(f"{name}: {file} was changed by reading it")


# -- sizes, names and ages of files ---------------------------------------------------------------------


def try_change(task: Task, made: Original, what: str, change: Callable[[Path], object], *, harmless: bool) -> None:
    """Change a copy. ``harmless``: whether it may be that; None of the others may."""
    with memory() as folder, rich.small_limits():
        path = folder / "store"
        shutil.copytree(made.path, path)
        change(path)
        try:
            outcome = judge(made, path, 0)
        except Exception as error:
            task.broke(f"{what}: {type(error).__name__}: {error}")
            outcome = "broken"
    if outcome == "harmless" and not harmless:
        task.broke(f"{what}: nobody noticed")
    count(task, what.partition(" ")[0], outcome)


@campaign("sizes", "files truncated, grown, emptied, missing", "changes", ci=150, soak=60_000, by_seed=False)
def sizes(task: Task) -> None:
    """Every length that a file may be cut to; files that are longer, all zeros, or not there."""
    for killed in (False, True):
        with original(page_size=512, killed=killed) as made:
            for file in files_of(made.path):
                content = (made.path / file).read_bytes()
                idle = file.startswith(("locks/", "store.db-shm"))
                # The last page of a killed store's database is in its log as well.
                may = idle or (killed and file == "store.db")
                most = max(8, task.count // 2 // len(files_of(made.path)) - 3)
                for length in share(list(range(len(content)))[::-1], most):
                    if task.over:
                        return
                    try_change(
                        task, made, f"truncated {file} to {length}, killed {killed}",
                        lambda path, file=file, length=length: os.truncate(path / file, length), harmless=may,
                    )  # fmt: skip
                for what, new in (("grown", content + b"more" * 300), ("zeros", bytes(len(content)))):
                    try_change(
                        task, made, f"{what} {file}, killed {killed}",
                        lambda path, file=file, new=new: (path / file).write_bytes(new),
                        harmless=idle or what == "grown" or not content,
                    )  # fmt: skip
                try_change(task, made, f"missing {file}", lambda path, file=file: (path / file).unlink(), harmless=idle)
            for directory in ("packs", "locks"):
                try_change(
                    task, made, f"missing {directory}",
                    lambda path, directory=directory: shutil.rmtree(path / directory), harmless=directory == "locks",
                )  # fmt: skip


# -- rows -----------------------------------------------------------------------------------------------

KEYS = {
    "store": "name",
    "tag": "key",
    "validity": "n",
    "metadata": "digest",
    "chunk": "digest",
    "sqlite_sequence": "name",
}


def sql(path: Path, statement: str, *bindings: object) -> list[tuple[Any, ...]]:
    connection = apsw.Connection(str(path / "store.db"))
    try:
        return connection.execute(statement, bindings).fetchall()
    finally:
        connection.close()


@campaign("rows", "rows deleted, swapped and put back", "changes", ci=150, soak=5_000, by_seed=False)
def rows_changed(task: Task) -> None:
    """Through SQLite itself, so that the database is sound: rows deleted one by one, contents exchanged, old rows."""
    with original(page_size=4096) as made:
        changes = [*deletions(made), *swaps(made)]
        task.count = min(task.count, len(changes))
        for what, change in share(changes, task.count):
            if task.over:
                return
            try_change(task, made, what, change, harmless=False)


def deletions(made: Original) -> Iterator[tuple[str, Callable[[Path], object]]]:
    for name in [*TABLE_NAMES, "sqlite_sequence"]:
        key = KEYS.get(name, "rowid")
        for (value,) in sql(made.path, f"SELECT {key} FROM {name}"):
            yield (
                f"deleted {name} {value!r:.40}",
                lambda path, name=name, key=key, value=value: sql(path, f"DELETE FROM {name} WHERE {key} = ?", value),
            )


def swaps(made: Original) -> Iterator[tuple[str, Callable[[Path], object]]]:
    columns = (
        ("tail", "data"),
        ("node", "data"),
        ("metadata", "data"),
        ("checkpoint", "operations"),
        ("effect", "body"),
    )
    for name, column in columns:
        key = KEYS.get(name, "rowid")
        for (one, first), (two, second) in pairwise(sql(made.path, f"SELECT {key}, {column} FROM {name}")):
            if first == second:
                continue

            def swap(
                path: Path, name: str = name, column: str = column, key: str = key, one: Any = one, first: Any = first,
                two: Any = two, second: Any = second,
            ) -> None:  # fmt: skip
                sql(path, f"UPDATE {name} SET {column} = ? WHERE {key} = ?", second, one)
                sql(path, f"UPDATE {name} SET {column} = ? WHERE {key} = ?", first, two)

            yield f"swapped {name} {one!r:.40} and {two!r:.40}", swap
