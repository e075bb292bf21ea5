"""An encrypted store: nothing in it can be read, moved, forged or slipped in without its key."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing, suppress

import pytest

import holdfast
from holdfast.agent.keys import _known
from holdfast.codec.values import encode
from holdfast.errors import (
    BadOption,
    Damaged,
    HoldfastError,
    KeyNeeded,
    NotAStore,
    NotAuthentic,
    NotEncrypted,
    WrongKey,
)
from holdfast.store import cipher
from holdfast.store.cipher import Keyed, digest
from holdfast.store.tables import TABLES
from tests.limits import limits

KEY, OTHER, THIRD = (bytes(range(first, first + 32)) for first in range(3))
MARK = "Lissabon"  # in everything that is planted


@holdfast.tool(effect="idempotent")
def lissabon_tool(where):
    return {"booked": where}


@holdfast.tool(effect="read")
def lissabon_fails(where):
    raise ValueError(f"no room in {where}")


@holdfast.durable(name=f"durable {MARK}")
def journey(agent, where):
    lissabon_tool(f"flight to {where}")
    try:
        lissabon_fails(where)
    except holdfast.HoldfastError as error:
        agent.state["error"] = str(error)
    agent.checkpoint(f"booked {where}")
    return where


@holdfast.durable(name=f"patience {MARK}")
def patience(agent):
    agent.wait_for(f"answer {MARK}")


def plant(path, key):
    """Every kind of text that people can write, in every kind of row."""
    with limits({"SEAL_CHECKPOINTS": 10}), holdfast.open(path, key=key) as store:
        agent = store.agent(f"agent {MARK}", config={"model": MARK})
        agent.state[f"section {MARK}"] = [f"{MARK} {number} " * 9 for number in range(300)]
        agent.state["key"] = {f"key {MARK}": {MARK}, "number": 12345678901234}
        first = agent.checkpoint(f"label {MARK}")
        for number in range(24):
            agent.state["key"]["text"] = f"changed again {MARK} {number} " * 6
            agent.checkpoint(f"more {MARK} {number}")
        for number in range(2):
            agent.state[f"bulk {number}"] = f"{MARK} {number} ".encode() * 40_000
            agent.checkpoint("bulk")
        for number in range(2):
            agent.tag(f"tag {MARK} {number}", first)
        agent.mark(first, "suspect", f"because {MARK}")
        agent.mark("bulk", "suspect", f"because of this {MARK}")
        agent.branch(f"branch {MARK}", at=first)
        store.signal(f"agent {MARK}", f"signal {MARK}", MARK, any_run=True, id=f"id {MARK}")
        store.clone(f"agent {MARK}", f"clone {MARK}")
        store.agent(f"actor {MARK}").run(journey, f"city of {MARK}")
        for number in range(2):  # checkpoints with keys
            store.agent(f"actor {MARK}").run(journey, f"{number}th city of {MARK}")
        for number in range(2):  # runs that wait, and signals to them
            with suppress(holdfast.Waiting):
                store.agent(f"waiting {MARK} {number}").run(patience.options(id=f"run {MARK} {number}", wait=False))
            store.signal(f"waiting {MARK} {number}", f"early {MARK}", run=f"run {MARK} {number}", id=f"early {MARK}")
        for number in range(2):  # runs in queues, and claims
            store.set_queue(f"queue {MARK} {number}", concurrency=1, rate=(9, 3600))
            waits = holdfast.durable(name=f"queued {MARK}", queue=f"queue {MARK} {number}")(lambda agent: None)
            store.submit(waits.options(partition=f"part {MARK} {number}", id=f"claimed {MARK} {number}"))
        store.worker().run(drain=True)
        store.agent(f"doomed {MARK}").checkpoint(MARK)
        store.agent(f"doomed {MARK}").close()
        store.remove(f"doomed {MARK}")
        store._tending.stop()
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """An encrypted store, another one with the same key, and one without; not to be changed."""
    folder = tmp_path_factory.mktemp("planted")
    for name, key in (("one", KEY), ("two", KEY), ("plain", False)):
        plant(folder / name, key)
    return folder


def content(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def sql(path, statement, *bindings):
    with closing(sqlite3.connect(path / "store.db")) as connection, connection:
        return connection.execute(statement, bindings).fetchall()


# -- what can be read ---------------------------------------------------------------------------------------


def guesses(path, key):
    """Digests by which somebody without the key could check whether they guessed what is stored."""
    with holdfast.open(path, key=key, readonly=True) as store:
        view = store._db.view
        found = [digest(b"value", encode(MARK)), encode(MARK)]
        found += [f"{kind} {MARK}".encode() for kind in ("agent", "clone", "doomed", "branch", "tag")]
        for table in ("node", "chunk"):
            rows = view.reader.run(f"SELECT digest FROM {table}")
            found += [view.cipher.unname(table, bytes(name)) for (name,) in rows]
        for branch in view.branches():
            found += [branch.id, branch.chain] if branch.id else []
            for point in view.walk(branch.head):
                found += [point.id, point.manifest.operations, *point.manifest.roots]
    return {one for one in found if one}


def test_nothing_that_people_wrote_can_be_read_or_guessed_from_the_files(planted, tmp_path):
    path = shutil.copytree(planted / "one", tmp_path / "store")
    with holdfast.open(path, key=KEY) as store:  # a writer at work: its lock file and the log are there
        agent = store.agent(f"agent {MARK}")
        agent.state["late"] = MARK
        agent.checkpoint(f"late {MARK}")
        files = content(path)
        assert sum(name.startswith("locks/") and bool(data) for name, data in files.items()) == 1
        assert files["store.db-wal"]
    files |= {f"closed {name}": data for name, data in content(path).items()}
    assert sum(name.startswith("packs/") for name in files) == 2
    for form in (MARK.encode(), MARK.encode("utf-16-le"), b"lissabon_tool", b"ValueError", b"12345678901234"):
        assert [name for name, data in files.items() if form in data] == []
    planted_here = guesses(path, KEY)
    assert len(planted_here) > 60
    for guess in planted_here:
        assert [name for name, data in files.items() if guess in data] == []
    plain = b"".join(content(planted / "plain").values())  # what was looked for is there to be seen without a key
    assert MARK.encode() in plain
    found = guesses(planted / "plain", False)
    assert sum(guess in plain for guess in found) > len(found) * 0.4


def test_ids_do_not_depend_on_how_something_is_stored(planted, tmp_path):
    with holdfast.open(planted / "one", key=KEY, readonly=True) as store, holdfast.open(tmp_path / "plain") as plain:
        assert store.encrypted
        store.push(plain)
        for info in store.agents():
            ours, theirs = (one.agent(info.name, readonly=True).log(all=True) for one in (store, plain))
            assert [one.id for one in ours] == [one.id for one in theirs]
        assert not plain.encrypted


# -- who may open it ----------------------------------------------------------------------------------------


@pytest.fixture
def vault(store_path):
    with holdfast.open(store_path, key=KEY) as store:
        store.agent("a").state["n"] = 1
        store.agent("a").checkpoint("one")
    return store_path


def test_without_the_right_key_nothing_opens_and_nothing_is_changed(vault, monkeypatch):
    kept = ("store.db", "witness")
    before = {name: (vault / name).read_bytes() for name in kept}
    for readonly in (False, True):
        for key, kind in ((None, KeyNeeded), (False, KeyNeeded), (OTHER, WrongKey), ("a passphrase", WrongKey)):
            with pytest.raises(kind):
                holdfast.open(vault, key=key, readonly=readonly)
    assert {name: (vault / name).read_bytes() for name in kept} == before
    monkeypatch.setenv("HOLDFAST_KEY", KEY.hex())
    with holdfast.open(vault) as store:
        assert store.agent("a").state["n"] == 1
        assert holdfast.open(vault, key=KEY) is store
        with pytest.raises(WrongKey):  # a handle that is open already makes no difference
            holdfast.open(vault, key=OTHER)


def test_a_plain_store_is_refused_by_who_has_a_key(store_path, monkeypatch):
    """Whoever replaces an encrypted store by a plain one must not be believed."""
    holdfast.open(store_path, key=False).close()
    with pytest.raises(NotEncrypted):
        holdfast.open(store_path, key=KEY)
    monkeypatch.setenv("HOLDFAST_KEY", KEY.hex())
    with pytest.raises(NotEncrypted):
        holdfast.open(store_path)
    with holdfast.open(store_path, key=False), pytest.raises(NotEncrypted):
        holdfast.open(store_path, key=KEY)
    for change in (
        holdfast.keys.listed,
        lambda path: holdfast.keys.add(path, OTHER, key=KEY),
        lambda path: holdfast.keys.remove(path, 1, key=KEY),
        lambda path: holdfast.keys.rotate(path, OTHER, key=KEY),
        lambda path: holdfast.keys.rotate(path, OTHER, key=KEY, full=True),
    ):
        with pytest.raises(NotEncrypted):
            change(store_path)
        with pytest.raises(NotAStore, match="there is no store"):
            change(store_path.with_name("nowhere"))


def test_keys_are_added_replaced_and_removed(vault):
    with holdfast.open(vault, key=KEY) as store:  # who has it open goes on
        added = holdfast.keys.add(vault, OTHER, key=KEY)
        assert [(one.number, one.kind) for one in holdfast.keys.listed(vault)] == [(1, "key"), (2, "key")]
        holdfast.keys.rotate(vault, THIRD, key=KEY)
        store.agent("a").state["n"] = 2
        store.agent("a").checkpoint("two")
    with pytest.raises(WrongKey):
        holdfast.open(vault, key=KEY)
    holdfast.keys.remove(vault, added.number, key=THIRD)
    with pytest.raises(WrongKey):
        holdfast.open(vault, key=OTHER)
    (left,) = holdfast.keys.listed(vault)
    for number, words in ((left.number, "last key"), (9, "no key number 9")):
        with pytest.raises(BadOption, match=words):
            holdfast.keys.remove(vault, number, key=THIRD)
    for known in (holdfast.keys.add, holdfast.keys.rotate):
        with pytest.raises(BadOption, match="opens the store already"):
            known(vault, THIRD, key=THIRD)
    with holdfast.open(vault, key=THIRD) as store:
        assert store.agent("a").state["n"] == 2
        assert store.verify().ok


@pytest.mark.parametrize("others", [0, 12])
def test_a_key_that_was_removed_cannot_be_carved_out_of_the_files(vault, others):
    """With its slot, and the key, one would have the master key."""
    for _ in range(others):
        holdfast.keys.add(vault, os.urandom(32), key=KEY)
    holdfast.keys.add(vault, OTHER, key=KEY)
    slot = _known(str(vault)).slots[0]
    assert slot.wrapped in b"".join(content(vault).values())
    holdfast.keys.remove(vault, 1, key=OTHER)
    for data in content(vault).values():
        assert slot.wrapped not in data
        assert slot.salt not in data
    with holdfast.open(vault, key=OTHER) as store:
        assert store.verify().ok


# -- what was not written here with the key -----------------------------------------------------------------


def refused(path):
    """Whether opening it and reading everything notices; anything but our errors fails."""
    try:
        with holdfast.open(path, key=KEY, readonly=True) as store:
            return [problem.detail for problem in store.verify().problems]
    except Damaged as error:
        return [error.message]
    except HoldfastError as error:
        raise AssertionError(f"{type(error).__name__} for what was changed") from error


BOXED = [name for name, spec in TABLES.items() if spec.boxes or spec.looked_up]


def exchanged(rows, spec):
    """Two rows, and what they are when they exchange one column; then with their sums."""
    for at in (*spec.boxes, *spec.looked_up):
        filled = [row for row in rows if row[at]]
        pair = [filled[0], filled[-1]] if filled and filled[0][at] != filled[-1][at] else []
        for also in ([], [len(spec.names) - 1]) if pair and spec.summed else [[]] * bool(pair):
            swap = {at, *also}
            yield (
                pair,
                [[other[i] if i in swap else one[i] for i in range(len(one))] for one, other in (pair, pair[::-1])],
            )


@pytest.mark.parametrize("table", [name for name in BOXED if name != "checkpoint"])  # as loose, without its payload
def test_what_is_moved_to_anothers_place_is_refused(planted, tmp_path, table):
    """Column by column, and together with its sum: what is sound in one row is not in another."""
    path = shutil.copytree(planted / "one", tmp_path / "store")
    spec = TABLES[table]
    rows = [row for row in sql(path, f"SELECT {spec.listed} FROM {table}") if row[0] != "format"]  # which is no secret
    where = " AND ".join(f"{spec.columns[at].name} = ?" for at in spec.keys)
    tried = 0
    for right, wrong in exchanged(rows, spec):
        for row in right:
            sql(path, f"DELETE FROM {table} WHERE {where}", *(row[at] for at in spec.keys))
        for row in wrong:
            sql(path, spec.insert, *row)
        assert refused(path), wrong
        shutil.copy(planted / "one" / "store.db", path / "store.db")
        tried += 1
    assert tried
    assert not refused(path)


@pytest.mark.parametrize("other", ["plain", "two"])
def test_what_comes_from_another_store_is_refused(planted, tmp_path, other):
    """Also from one with the same key, and from one without, with the sums that rows have there."""
    path = shutil.copytree(planted / "one", tmp_path / "store")
    for table in BOXED:
        rows = sql(planted / other, f"SELECT * FROM {table}")
        marks = ", ".join("?" * len(rows[0]))
        for row in (rows[0], rows[-1]):
            sql(path, f"INSERT OR REPLACE INTO {table} VALUES ({marks})", *row)
            found = refused(path)
            assert found, table
            shutil.copy(planted / "one" / "store.db", path / "store.db")
    ours, theirs = (sorted((planted / name / "packs").iterdir()) for name in ("one", other))
    (path / "packs" / ours[0].name).write_bytes(theirs[0].read_bytes())
    assert refused(path)
    (path / "packs" / ours[0].name).write_bytes(ours[1].read_bytes())
    assert refused(path)


def test_the_keys_of_another_store_do_not_open_this_one(planted, tmp_path):
    path = shutil.copytree(planted / "one", tmp_path / "store")
    for name, body, total in sql(planted / "two", "SELECT name, body, sum FROM slot"):
        sql(path, "UPDATE slot SET body = ?, sum = ? WHERE name = ?", body, total, name)
    with pytest.raises(Damaged):
        holdfast.open(path, key=KEY)
    sql(path, "DELETE FROM slot")
    for key in (KEY, None):  # it is not taken for one without a key
        with pytest.raises((Damaged, NotEncrypted)):
            holdfast.open(path, key=key)


def test_boxes_never_share_a_key_and_nonce(monkeypatch):
    """A new salt in time, a fresh nonce always, and reading goes on across salts."""
    monkeypatch.setattr(cipher, "BOXES_PER_SALT", 5)
    monkeypatch.setattr(cipher, "SALTS_KEPT", 3)
    keyed = Keyed(KEY, b"u" * 16)
    boxes = [keyed.box("loose", number, b"same") for number in range(100)]
    assert len({box[:24] for box in boxes}) == 100
    assert len({box[:12] for box in boxes}) == 20
    assert [keyed.unbox("loose", number, box) for number, box in enumerate(boxes)] == [b"same"] * 100
    for kind, number, wrong in (
        ("loose", 0, boxes[1]), ("loose", 0, boxes[0][:39]), ("loose", 0, b""), ("node", 0, boxes[0]),
        ("loose", 0, boxes[0][:-1] + b"?"),
    ):  # fmt: skip
        with pytest.raises(NotAuthentic):
            keyed.unbox(kind, number, wrong)
