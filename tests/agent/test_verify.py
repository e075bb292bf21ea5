"""Verify: whatever was changed in a store is reported, or makes no difference; and nothing else is ever reported."""

from __future__ import annotations

import json
import random
import shutil
import threading

import pytest

import holdfast
from holdfast.agent.graph import Graph
from holdfast.errors import BadOption, Contention, Forgotten, HoldfastError
from holdfast.store.rows import read_body
from holdfast.store.tables import TABLES
from tests.agent.damage import (
    KEY,
    build,
    delete,
    every_row,
    flipped,
    opened,
    picture,
    pictured,
    put,
    rows,
    small_limits,
    spoil,
    spoil_payload,
    write,
)
from tests.conftest import SOAK
from tests.memory import memory


@pytest.fixture(autouse=True)
def _small():
    """Where nodes end is part of a state's digest, so the limits are those that the store was made with."""
    with small_limits():
        yield


@pytest.fixture(scope="module", params=[False, KEY], ids=["plain", "encrypted"])
def key(request):
    return request.param


@pytest.fixture(scope="module")
def sound(key):
    with memory() as folder, small_limits():
        build(folder / "store", key, page_size=512)
        yield folder / "store", pictured(folder / "store", key)


@pytest.fixture
def path(sound):
    with memory() as folder:
        shutil.copytree(sound[0], folder / "store")
        yield folder / "store"


def judge(path, key, before, same=()):
    """How a change was noticed; empty when it was not, and makes no difference. Anything else fails.

    ``same``: every row as it was. If the database is sound and has the same rows, it gives the same answers.
    """
    try:
        with opened(path, key=key) as store:
            report = store.verify()
            json.dumps(report.to_json())
            if not report.ok:
                assert str(report)
                return report.problems[0].what
            if not same or list(every_row(path)) != same:
                assert picture(store) == before, "nobody noticed, and the store answers differently"
            return ""
    except HoldfastError as error:
        return error.kind


def test_a_sound_store(path, key):
    said = []
    with opened(path, key=key) as store:
        report = store.verify(lambda *args: said.append(args))
        assert report.ok
        assert str(report).startswith("all is well")
        checked = report.checked
        assert (checked["agents"], checked["checkpoints"], checked["effects"], checked["chunks"]) == (3, 27, 11, 2)
        assert store.verify(agents=["empty"]).checked["checkpoints"] == 0
        assert store.verify(agents=["twin"]).checked["agents"] == 1
    kinds = list(dict.fromkeys(what for what, _, _ in said))
    assert kinds[:3] == ["database structure", "rows", "packs"]
    assert {"checkpoints of a", "effects"} <= set(kinds)
    assert all(0 <= done <= total for _, done, total in said)


def test_any_byte_may_be_flipped(sound, path, key):
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.parent.name != "locks"]
    places = [(file, at) for file in files for at in range(file.stat().st_size)]
    chosen = places if SOAK else random.Random(7).sample(places, 45)
    noticed, same = 0, list(every_row(path))
    for number, (file, at) in enumerate(chosen):
        content = file.read_bytes()
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at * 7 % 8]) + content[at + 1 :])
        noticed += bool(judge(path, key, sound[1], same if number % 10 else ()))
        file.write_bytes(content)
    assert noticed > len(chosen) // 3
    assert judge(path, key, sound[1]) == "", "reading has changed something"


def test_any_row_may_be_missing(sound, path, key):
    found = [(table, keys, row) for table, keys, row in every_row(path)]
    unnoticed = {"floor", "slot", "node", "log"}  # of these some are told twice, or nothing needs them any more
    for table, keys, row in found if SOAK else random.Random(3).sample(found, 25):
        if table == "log":
            with opened(path, key=key) as store:
                body = read_body(store._db.cipher.loaded("log", row)[-1], "log")
            if body["what"] == "clone":  # what its original had left is told nowhere else
                continue
        delete(path, table, keys, row)
        assert judge(path, key, sound[1]) or table in unnoticed, (table, row)
        put(path, table, row)


def test_contents_of_rows_may_be_exchanged(sound, path, key):
    chosen = random.Random(5)
    for table, spec in TABLES.items():
        found = [row for name, _, row in every_row(path) if name == table]
        for _ in range(8 if SOAK else 2):
            if len(found) < 2 or table in {"slot", "floor"}:
                continue
            one, other = chosen.sample(found, 2)
            at = chosen.choice([at for at in range(len(one)) if at not in spec.keys])
            wrong = (*one[:at], other[at], *one[at + 1 :])
            if wrong == one or (table == "node" and at == 1):  # two rows of one digest cannot be
                continue
            put(path, table, wrong)
            assert judge(path, key, sound[1]), (table, spec.names[at])
            put(path, table, one)


def test_any_row_may_be_an_older_one(path, key):
    old = {(table, *(row[at] for at in TABLES[table].keys)): row for table, _, row in every_row(path)}
    with opened(path, readonly=False, key=key) as store:
        agent = store.agent("a")
        for number in range(5):
            agent.state["log"].append(f"later {number}")
            agent.checkpoint(f"later {number}")
        write(agent, (1, b"later"))
        agent.tag("late", "c3")
        agent.mark("c5", "corrupt", "now it is sure")
        agent.untag("early")
        agent.rollback("c9")
        write(store.agent("twin"), (1, b"later"))
        store._tending.stop()
    before = pictured(path, key)
    now = {(table, *(row[at] for at in TABLES[table].keys)): (keys, row) for table, keys, row in every_row(path)}
    for name, row in old.items():
        if name in now and now[name][1] == row:
            continue
        put(path, name[0], row)
        assert judge(path, key, before), name
        if name in now:
            put(path, name[0], now[name][1])
        else:
            delete(path, name[0], [TABLES[name[0]].columns[at].name for at in TABLES[name[0]].keys], row)
    assert judge(path, key, before) == ""


def test_an_entry_of_an_index_may_be_missing(sound, path, key):
    for _, root in rows(path, "SELECT name, rootpage FROM sqlite_schema WHERE type = 'index'"):
        content = (path / "store.db").read_bytes()
        at = (root - 1) * 512
        while content[at] == 2:  # an inner page: go down on the right
            at = (int.from_bytes(content[at + 8 : at + 12], "big") - 1) * 512
        count = int.from_bytes(content[at + 3 : at + 5], "big")
        if count:
            (path / "store.db").write_bytes(content[: at + 3] + (count - 1).to_bytes(2, "big") + content[at + 5 :])
            assert judge(path, key, sound[1])
            (path / "store.db").write_bytes(content)


def test_what_is_affected_is_named_for_each_agent(path, key):
    with opened(path, key=key) as store:
        line = [one.id for one in reversed(store.agent("a", readonly=True).log())]
    ((n,),) = rows(path, "SELECT head FROM branch WHERE b = 1")
    spoil_payload(path, n)
    with opened(path, key=key) as store:
        own = store.agent("twin", readonly=True, branch="side").head.id
        report = store.verify()
        assert {one.agent for one in report.problems if one.affected} == {"a", "twin"}
        assert {line[-1]} < set(report.affected)
        assert len(report.affected) == 2, "the copy went on from it"
        assert own not in report.affected
        assert store.verify(agents=["empty"]).affected == []


def test_a_branch_that_moved_without_a_word(path, key):
    with opened(path, readonly=False, key=key) as store:
        row = store._db.view.branch(1, "main")
        point = store._db.view.point(row.head)
        earlier = store._db.view.point(point.row.parent)
        moved = row._replace(head=earlier.n, id=earlier.id, depth=earlier.manifest.depth)
        store._db.change(lambda change: change.move(row, moved))
        assert any(one.what == "branch main" for one in store.verify().problems)


def test_the_witness_and_the_keys(path, key):
    (path / "witness").write_bytes(b"")
    if key:
        spoil(path, "DELETE FROM slot WHERE name = 'keys'")
    with opened(path, key=key) as store:
        found = {one.what for one in store.verify().problems}
    assert found == ({"witness", "keys"} if key else {"witness"})


def test_what_cannot_be_read_now_is_not_called_damaged(path, key):
    (pack, *_) = sorted((path / "packs").iterdir())
    pack.unlink()
    pack.mkdir()  # opens, and gives no bytes
    with opened(path, key=key) as store:
        report = store.verify()
        assert not report.ok
        assert report.problems == []
        (away,) = report.unreachable
        assert away.packs == 1
        assert away.checkpoints
        tried = store.verify_restore(sample=100)
        assert {one.unknown for one in tried.agents if one.problem} == {True}


class Alarm(Exception):
    """What a signal handler of the program raises."""


@pytest.mark.parametrize("raised", [Alarm, KeyboardInterrupt, ValueError])
def test_an_interrupt_is_not_damage(path, key, raised):
    def stop(what, *_):
        if what == "checkpoints of a":
            raise raised

    with opened(path, key=key) as store:
        with pytest.raises(raised):
            store.verify(stop)
        assert store.verify().ok


def test_beside_writers_and_whoever_forgets(path, key):
    """Nothing is reported that others write, forget or clear meanwhile; nor does a restore test miss it."""
    stop = threading.Event()
    failed = []

    def over_and_over(work):
        def run():
            chosen = random.Random(1)
            try:
                while not stop.is_set():
                    work(chosen)
            except BaseException as error:
                failed.append(error)
                raise

        return threading.Thread(target=run)

    with opened(path, readonly=False, key=key) as store:
        agent, row = store.agent("a"), store._agent_row("a")

        def make(chosen):
            agent.state["log"].append("x" * chosen.randrange(200))
            if chosen.random() < 0.1:
                agent.state["bulk"] = chosen.randbytes(3000)
                write(agent, (1, b"more"))
            agent.checkpoint("made")
            if chosen.random() < 0.1:
                agent.rollback("~1")
            if chosen.random() < 0.05:
                store.copy("a", "brief")
                store.remove("brief")

        def forget(chosen):
            try:
                numbers = {n for n in Graph(store._db.view, row).numbers if chosen.random() < 0.3}
                numbers -= {branch.head for branch in store._db.view.branches(row.a)}

                def stands(change):
                    return any(branch.head in numbers for branch in change.branches(row.a))

                store._forget(row, numbers, unless=stands)  # or its writer would be one no more
            except (Forgotten, Contention):
                pass

        threads = [over_and_over(make), over_and_over(forget)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(200 if SOAK else 6):
                report = store.verify()
                assert report.ok, str(report)
                assert store.verify_restore(["a"]).ok
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failed
        report = store.verify()
        assert report.ok, str(report)


def test_a_restore_test_restores_agents_whole(path, key, tmp_path):
    place = tmp_path / "elsewhere"
    place.mkdir()
    with opened(path, key=key) as store:
        every = {info.name: len(store.agent(info.name, readonly=True).log(all=True)) for info in store.agents()}
        report = store.verify_restore(place=place)
        assert (report.ok, report.total) == (True, len(every))
        assert {one.agent: one.checkpoints for one in report.agents} == every
        assert report.to_json()["ok"]
        assert len(store.verify_restore(sample=2).agents) == 2
        assert [(one.agent, one.checkpoints) for one in store.verify_restore(["empty"]).agents] == [("empty", 0)]
        with pytest.raises(BadOption):
            store.verify_restore(sample=0)
    assert list(place.iterdir()) == []
    ((n,),) = rows(path, "SELECT head FROM branch WHERE b = 1")
    spoil_payload(path, n)
    with opened(path, key=key) as store:
        report = store.verify_restore()
        assert not report.ok
        lost = [one for one in report.agents if one.problem]
        assert {one.unknown for one in lost} == {False}
        assert {one.agent for one in lost} == {"a", "twin"}, "the one that it is the head of, and the copy"


def test_the_last_whole_verify_is_remembered_for_its_user_and_changes_no_store(remembered):
    place = remembered.parent / "kept" / "store"
    place.parent.mkdir(exist_ok=True)
    with holdfast.open(place) as store:
        assert store.last_verified() is None
        with store.agent("a") as agent:
            agent.checkpoint("one")
        store.verify(agents=["a"])
        assert store.last_verified() is None
        store.verify()
        last = store.last_verified()
    assert (last["ok"], last["problems"]) == (True, 0)
    with holdfast.open(place, readonly=True) as store:
        assert store.last_verified() == last
    for file in remembered.rglob("verified/*.json"):
        file.write_text("{")
    with holdfast.open(place, readonly=True) as store:
        assert store.last_verified() is None


def test_every_line_that_holds_a_lost_value_is_named(tmp_path):
    texts, place = [f"{number}: hello " * 15 for number in range(60)], tmp_path / "store"
    with opened(place, readonly=False) as store:
        agent = store.agent("a")
        first = agent.checkpoint("begun").id
        side, heads = agent.branch("side"), []
        for tail, one in (("this", agent), ("that", side)):
            one.state["told"] = {"list": [random.Random(1).randbytes(4000), *texts, tail]}
            heads.append(one.checkpoint("told").id)
    (pack,) = sorted((place / "packs").iterdir())[:1]
    pack.write_bytes(flipped(pack.read_bytes(), 4096))
    with opened(place) as store:
        affected = store.verify().affected
    assert set(affected) == set(heads)
    assert first not in affected
