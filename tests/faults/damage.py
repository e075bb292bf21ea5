"""Damage: every byte of every file of a small store is changed, and so are sizes, names, rows and ages of files.

A change must be reported by ``verify``, or refused with a typed error when the store is opened, or be harmless: then
all that can be asked of the store has the same answer as before. Anything else is a broken promise.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import apsw

import holdfast
from holdfast.agent.verify import _Verification
from holdfast.errors import HoldfastError
from holdfast.store.catalog import quietly
from holdfast.store.cipher import PLAIN
from holdfast.store.rows import SHAPES
from holdfast.store.tables import TABLES
from holdfast.store.witness import witness_report
from tests.faults import rich
from tests.faults.campaign import Task, campaign, quiet, remembering
from tests.memory import memory

# Of the changes that a part of verify finds, every so many-th goes through all of it: finding must not hide a crash.
FULL_EVERY = 29
# Of the harmless changes to the database, every so many-th is proven by a complete export; the rest by all rows being
# the same.
EXPORT_EVERY = 23
# Of the changes of rows, every so many-th is repaired.
MEND_EVERY = 7
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
    select = store._db.engine.run
    yield "versions", (select("PRAGMA user_version"), select("PRAGMA application_id"))
    yield "schema", select("SELECT * FROM sqlite_schema ORDER BY 1, 2")
    for name in TABLES:
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
    told = witness_report(store.path)
    run = _Verification(store, holdfast.VerifyReport(), quietly)
    with run.finding("store.db"), store._db.moment() as contents:
        run.contents, run.view = contents, contents.view
        steps = [lambda: run.structure(told.problems, told.newest), run.rows, run.packs]
        for step in steps[1:] if changed.startswith("packs/") else steps:
            step()
            if not run.report.ok:
                return run.report
            if step is steps[0] and changed in DATABASE and number % EXPORT_EVERY and same_rows(store, original.rows):
                return None
    return store.verify()


def make(path: Path, *, page_size: int, killed: bool = False) -> Original:
    rich.build(path, page_size)
    if killed:
        rich.build_killed(path)
        (path / "store.db-shm").touch()
    return look(path)


def look(path: Path) -> Original:
    """What a sound store holds, read from a copy, so that not even a lock file is touched."""
    with memory() as copy, rich.small_limits():
        shutil.copytree(path, copy / "store")
        with open_damaged(copy / "store", readonly=True) as store:
            report = store.verify()
            assert report.ok, str(report)
            return Original(path, dict(rows_of(store)), rich.export(store))


def poke(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def files_of(path: Path) -> list[str]:
    """Those that hold something of the store: what tells git to leave it alone does not."""
    files = (str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    return sorted(name for name in files if name != ".gitignore")


def kind_of(name: str) -> str:
    return "packs/*.pack" if name.startswith("packs/") else "locks/*" if name.startswith("locks/") else name


def share(places: list[Any], most: int) -> list[Any]:
    """At most so many, spread over all of them; the first bytes of a file are its header and come first."""
    if len(places) <= most:
        return places
    front = places[: most // 8]
    step = len(places) / (most - len(front))
    return [*front, *(places[int(number * step)] for number in range(most - len(front)))]


@contextmanager
def original(*, page_size: int, killed: bool = False) -> Iterator[Original]:
    with memory() as folder, remembering(Path(os.devnull)), quiet():  # only what is in the store itself counts
        made = make(folder / "store", page_size=page_size, killed=killed)
        yield made


class Bench:
    """A copy of a store that is damaged, judged and made whole again, thousands of times."""

    def __init__(self, made: Original, path: Path) -> None:
        self.made = made
        self.path = path
        shutil.copytree(made.path, path)
        self.files = files_of(path)
        self.contents = [(path / file).read_bytes() for file in self.files]

    def try_change(
        self, task: Task, what: str, kind: str, change: Callable[[Path], object], *, changed: str, harmless: bool
    ) -> None:
        """Change the copy. ``harmless``: whether it may be that; none of the others may."""
        change(self.path)
        try:
            outcome = judge(self.made, self.path, task.done, changed=changed)
        except Exception as error:
            task.broke(f"{what}: {type(error).__name__}: {error}")
            outcome = "broken"
        if outcome == "harmless" and not harmless:
            task.broke(f"{what}: nobody noticed")
        task.tried(f"{kind}: {outcome.partition(': ')[0]}")

    def restore(self, file: str) -> None:
        (self.path / file).parent.mkdir(exist_ok=True)
        (self.path / file).write_bytes(self.contents[self.files.index(file)])

    def check(self, task: Task) -> None:
        """Nobody has changed a file by reading it, or left one behind."""
        for file, content in zip(self.files, self.contents, strict=True):
            if (self.path / file).read_bytes() != content and file != "store.db-shm":  # SQLite writes that anew
                task.broke(f"{file} was changed by reading it")
        if more := set(files_of(self.path)) - set(self.files) - DATABASE:
            task.broke(f"reading left {sorted(more)}")


@contextmanager
def benches(stores: dict[str, dict[str, Any]]) -> Iterator[dict[str, Bench]]:
    """A bench for each of several stores, with limits as small as these."""
    with ExitStack() as stack:
        stack.enter_context(rich.small_limits())
        yield {
            name: Bench(stack.enter_context(original(**options)), stack.enter_context(memory()) / "store")
            for name, options in stores.items()
        }


# -- bytes ----------------------------------------------------------------------------------------------

PAGE = 512
STORES: dict[str, dict[str, Any]] = {
    "closed": {"page_size": PAGE},  # with such pages there is little unused room, so nearly every byte matters
    "killed": {"page_size": PAGE, "killed": True},
    "usual pages": {"page_size": 4096},
}
SHM_BYTES = 64  # SQLite never reads an old shm file, so a few bytes of it are enough
PATTERNS = (0, 0x80, 0xFF, 0x01)
"""What a byte is changed by. 0: one bit, another for each place."""


@campaign("bytes", "every byte flipped", "changes", ci=300, soak=250_000, by_part=True)
def flipped(task: Task) -> None:
    """Each byte of each file of a store with every kind of record, closed or left by kill -9 with its log."""
    with benches(STORES) as tables:
        for name, index, place, pattern in task.mine(flips(tables, task.count * task.parts)):
            if task.over:
                break
            bench = tables[name]
            file, content = bench.files[index], bench.contents[index]
            if place >= len(content):  # another process made the list from a store that is a little larger
                continue
            new = bytes([content[place] ^ (pattern or 1 << (place * 7 % 8))])
            bench.try_change(
                task, f"{name}, {file} byte {place} ^ {pattern:#x}", kind_of(file),
                lambda path, file=file, place=place, new=new: poke(path / file, place, new),
                changed=file, harmless=True,
            )  # fmt: skip
            poke(bench.path / file, place, content[place : place + 1])
            if file == "store.db-shm":  # SQLite writes it anew every time
                bench.restore(file)
        for bench in tables.values():
            bench.check(task)


def flips(tables: dict[str, Bench], count: int) -> Iterator[tuple[str, int, int, int]]:
    """What there is to flip. All bytes of the stores with small pages come before those of the other one."""
    left = count
    for number, (name, bench) in enumerate(tables.items()):
        sizes = [SHM_BYTES if file.endswith("-shm") else len(bench.contents[i]) for i, file in enumerate(bench.files)]
        whole = sum(sizes)
        rest = sum(len(content) for other in list(tables.values())[number:] for content in other.contents)
        most = left if whole < left // 2 else left * whole // rest
        for index, size in enumerate(sizes):
            places = share(list(range(size)), max(24, most * size // whole))
            for pattern in PATTERNS[: max(1, most // whole) if number == len(tables) - 1 else 1]:
                for place in places:
                    left -= 1
                    yield name, index, place, pattern


# -- sizes, names and ages of files ---------------------------------------------------------------------


@campaign("sizes", "files truncated, grown, emptied, missing", "changes", ci=90, soak=60_000, by_part=True)
def sizes(task: Task) -> None:
    """Every length that a file may be cut to; files that are longer, all zeros, or not there."""
    with benches({name: STORES[name] for name in ("closed", "killed")}) as tables:
        for name, index, what, length in task.mine(resizings(tables, task.count * task.parts)):
            if task.over:
                break
            bench = tables[name]
            file = bench.files[index]
            resize(task, bench, f"{what} {file}, {name}", file, what, min(length, len(bench.contents[index])))
        for bench in tables.values():
            for directory in ("packs", "locks"):
                bench.try_change(
                    task, f"missing {directory}", "missing",
                    lambda path, directory=directory: shutil.rmtree(path / directory),
                    changed="", harmless=directory == "locks",
                )  # fmt: skip
                for file in bench.files:
                    if file.startswith(directory):
                        bench.restore(file)
            bench.check(task)


def resizings(tables: dict[str, Bench], count: int) -> Iterator[tuple[str, int, str, int]]:
    for name, bench in tables.items():
        for index, content in enumerate(bench.contents):
            for what in ("grown", "zeros", "missing"):
                yield name, index, what, 0
            most = max(8, count // len(tables) // len(bench.files))
            for length in share(list(range(len(content)))[::-1], most):
                yield name, index, "truncated", length


def resize(task: Task, bench: Bench, told: str, file: str, what: str, length: int) -> None:
    content = bench.contents[bench.files.index(file)]
    idle = file.startswith(("locks/", "store.db-shm"))
    # The last page of a killed store's database is in its log as well.
    may = idle or (what == "truncated" and file == "store.db" and "store.db-wal" in bench.files)

    def change(path: Path) -> None:
        if what == "missing":
            (path / file).unlink()
        elif what == "truncated":
            os.truncate(path / file, length)
        else:
            (path / file).write_bytes(content + b"more" * 300 if what == "grown" else bytes(len(content)))

    may = may or what == "grown" or (what == "zeros" and not content) or length == len(content) > 0
    # What is missing of a database's last page is read as zeros, and may have been just that.
    may = may or (file == "store.db" and length > len(content) - PAGE and not any(content[length:]))
    bench.try_change(task, f"{told} to {length}", what, change, changed=file, harmless=may)
    bench.restore(file)


# -- rows -----------------------------------------------------------------------------------------------

Change = Callable[[apsw.Connection], object]


@contextmanager
def database(path: Path) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(path / "store.db"))
    try:
        yield connection
    finally:
        connection.close()


def sql(path: Path, statement: str, *bindings: object) -> list[tuple[Any, ...]]:
    with database(path) as connection:
        return connection.execute(statement, bindings).fetchall()


@campaign("rows", "rows deleted, swapped and put back", "changes", ci=90, soak=5_000, by_part=True)
def rows_changed(task: Task) -> None:
    """Through SQLite itself, so that the database is sound: rows deleted, contents exchanged, old rows put back.

    One at a time, and two at a time.
    """
    with memory() as folder, remembering(Path(os.devnull)), quiet(), rich.small_limits():
        path = folder / "store"
        rich.build(path)
        old = {name: rows_by_key(path, name) for name in TABLES}
        live_on(path)
        bench = Bench(look(path), folder / "bench")
        single = [*deletions(path), *swaps(path), *old_rows(path, old)]
        alone, pairs = ([*combinations(range(len(single)), size)] for size in (1, 2))
        for some in (alone, pairs):
            random.Random(task.seed).shuffle(some)
        numbers = alone + pairs
        for chosen in task.mine(numbers[: task.count * task.parts]):
            if task.over:
                return

            def change(path: Path, chosen: tuple[int, ...] = chosen) -> None:
                with database(path) as connection, connection:
                    for number in chosen:
                        single[number][1](connection)

            told = " and ".join(single[number][0] for number in chosen)
            kind = single[chosen[0]][0].partition(" ")[0] if len(chosen) == 1 else "two at once"
            harmless = all(single[number][0].startswith(UNASKED) for number in chosen)
            bench.try_change(task, told, kind, change, changed="", harmless=harmless)
            if task.done % MEND_EVERY == 0:
                mend(task, told, bench.path)
            bench.restore("store.db")


def mend(task: Task, told: str, path: Path) -> None:
    """A repair leaves a store that is whole, whatever is lost."""
    try:
        wrong = [text for text in holdfast.repair(path).problems if text.startswith("in the new store")]
    except Exception as error:
        wrong = [repr(error)]
    if wrong:
        task.broke(f"{told}, repaired: {wrong}")


UNASKED = ("deleted retired", "deleted floor", "put-back floor", "put-back signal")
"""That something was there that is gone, nobody can ask for. A signal that was taken may have a row: whoever looks
there finds that it was. What the log says, every entry of it, has to be there."""


def deletions(path: Path) -> Iterator[tuple[str, Change]]:
    for name in TABLES:
        for key, row in rows_by_key(path, name).items():
            retired = name == "branch" and not SHAPES["branch"](row[:-1]).a
            what = "retired" if retired else name
            yield f"deleted {what} {key!r:.40}", partial(_execute, f"DELETE FROM {name} WHERE {_is(name)}", [key])


def tells_of_a_move(row: tuple[Any, ...]) -> bool:
    """Whether this row of the log says where a stretch of a branch begins."""
    entry = SHAPES["log"](PLAIN.loaded("log", row))
    return not entry.key and entry.body.keys() >= {"b", "epoch"}


def swaps(path: Path) -> Iterator[tuple[str, Change]]:
    """The contents of neighbours exchanged, column by column."""
    for name, spec in TABLES.items():
        for at in spec.boxes:
            statement = f"UPDATE {name} SET {spec.names[at]} = ? WHERE {_is(name)}"
            for (one, first), (two, second) in pairwise(rows_by_key(path, name).items()):
                if first[at] != second[at]:
                    values = [(second[at], *one), (first[at], *two)]
                    yield f"swapped {name} {one!r:.40} and {two!r:.40}", partial(_execute, statement, values)


def _is(name: str) -> str:
    return " AND ".join(f"{TABLES[name].names[at]} = ?" for at in TABLES[name].keys)


def _execute(statement: str, values: list[tuple[Any, ...]], connection: apsw.Connection) -> None:
    connection.executemany(statement, values)


def rows_by_key(path: Path, name: str) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    return {tuple(row[at] for at in TABLES[name].keys): row for row in sql(path, f"SELECT * FROM {name}")}


def live_on(path: Path) -> None:
    """Something happens to every row that can change."""
    with open_damaged(path) as store:
        for name in ("first@example.com", "second", "actor"):
            agent = store.agent(name)
            agent.state["later"] = {"text": name * 9}
            agent.checkpoint("later")
            agent.mark("later", "suspect", "a later test said so")
            agent.close()
        first = store.agent("first@example.com")
        first.mark("edited", "corrupt", "another test said so")
        first.tag("kept", "later")
        first.untag("moving")
        store.agent("actor").run(rich.journey.options(id="two"), 3)
        store.signal("waiting", "first", 1, run="patient")
        store.signal("woken", "first", 1, run="patient")
        rich.wait(store.agent("woken"))
    for name in ("store.db-wal", "store.db-shm"):
        (path / name).unlink(missing_ok=True)


def old_rows(path: Path, old: dict[str, dict[tuple[Any, ...], tuple[Any, ...]]]) -> Iterator[tuple[str, Change]]:
    """Rows as they once were, put back in the place of what came after them, or where they are gone."""
    for name, before in old.items():
        now = rows_by_key(path, name)
        for key, row in before.items():
            if now.get(key) != row:
                statement = f"INSERT OR REPLACE INTO {name} VALUES ({', '.join('?' * len(row))})"
                called = "signal" if name == "open" and row[2] else name
                yield f"put-back {called} {key!r:.40}", partial(_execute, statement, [row])
