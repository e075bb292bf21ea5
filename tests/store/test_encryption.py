"""An encrypted store: nothing in it can be read, moved, forged or slipped in without its key."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import holdfast
from holdfast.agent.names import name_key
from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, Damaged, KeyNeeded, NotAuthentic, NotEncrypted, WrongKey
from holdfast.store import cipher
from holdfast.store.catalog import ChunkRow, chunk_digest, clone_key, digest, forgotten_key, row_sum
from holdfast.store.cipher import Keyed
from holdfast.store.embedded import open_embedded
from holdfast.store.keys import secret_of
from tests.faults import damage, rich
from tests.store.support import Hand, Pen, event, new_branch

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
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


def plant(path: Path, **options) -> None:
    """Every kind of text that people can write, in every kind of record."""
    with rich.small_limits(), holdfast.open(path, **options) as store:
        agent = store.agent(f"agent {MARK}", config={"model": MARK})
        agent.state[f"section {MARK}"] = [f"{MARK} {number} " * 9 for number in range(30)]
        agent.state["key"] = {f"key {MARK}": {MARK}, "number": 12345678901234}
        first = agent.checkpoint(f"label {MARK}")
        for number in range(7):  # crosses a seal
            agent.state["key"]["text"] = f"changed again {MARK} {number} " * 6
            agent.checkpoint(f"more {MARK} {number}")
        agent.state["bulk"] = MARK.encode() * 400_000  # a pack
        agent.checkpoint("bulk")
        agent.tag(f"tag {MARK}", first)
        agent.mark(first, "suspect", f"because {MARK}")
        agent.branch(f"branch {MARK}", at=first)
        store.signal(f"agent {MARK}", f"signal {MARK}", MARK)
        store.clone(f"agent {MARK}", f"clone {MARK}")
        actor = store.agent(f"actor {MARK}")
        actor.run(journey, f"city of {MARK}")
        doomed = store.agent(f"doomed {MARK}")
        doomed.state["x"] = MARK
        doomed.checkpoint(MARK)
        doomed.close()
        store.remove(f"doomed {MARK}")


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def sql(path: Path, statement: str, *bindings):
    with closing(sqlite3.connect(path / "store.db")) as connection, connection:
        return connection.execute(statement, bindings).fetchall()


def folded(path: Path) -> None:
    """Everything in the database file, as after a clean end."""
    with closing(sqlite3.connect(path / "store.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


# -- what can be read -------------------------------------------------------------------------------------


def guesses(path: Path, **options) -> dict[str, bytes]:
    """Digests by which somebody without the key could check whether they guessed what is stored."""
    found = {}
    with holdfast.open(path, **options) as store:
        catalog = store._catalog
        for name in (f"agent {MARK}", f"clone {MARK}", f"doomed {MARK}", f"tag {MARK}", f"branch {MARK}", "main"):
            found[f"name {name}"] = name_key(name)
        found |= {f"node {one.hex()}": one for one in catalog.node_digests()}
        found |= {f"metadata {one.hex()}": one for one in catalog.metadata_digests()}
        for agent in catalog.agents():
            for branch in catalog.branches(agent.a):
                found[f"chain {branch.b}"] = catalog.line(branch.b).chain
                found[f"head {branch.b}"] = branch.head_id
            found[f"forget {agent.a}"] = forgotten_key(agent.a)
            found[f"clone {agent.a}"] = clone_key(agent.a)
        for row in catalog.checkpoints():
            found[f"operations {row.n}"] = digest(b"holdfast.operations", row.operations)
            found[f"section of {row.n}"] = row.manifest[60:92]
            found[f"key {row.n}"] = row.key or b""
        for one in catalog.events():
            found[f"event {one.e}"] = one.key or b""
            found[f"body {one.e}"] = row_sum("event", one.e, one.a, one.at, one.body, one.key)
        for pack in catalog.pack_rows():
            found |= {f"chunk {row.digest.hex()}": row.digest for row in catalog.chunk_rows(pack.p)}
        found["value"] = digest(b"holdfast.value", encode(MARK))
    return {name: guess for name, guess in found.items() if guess}


def test_nothing_that_people_wrote_can_be_read_from_the_stores_files(tmp_path):
    path = tmp_path / "store"
    plant(path, key=KEY)
    with holdfast.open(path, key=KEY) as store:  # a writer at work: its lock file and the log are there
        agent = store.agent(f"agent {MARK}")
        agent.state["late"] = MARK
        agent.checkpoint(f"late {MARK}")
        files = content(path)
        assert any(name.startswith("locks/") and data for name, data in files.items())
        assert files["store.db-wal"]
    files |= {f"closed {name}": data for name, data in content(path).items()}
    assert sum(name.startswith("packs/") for name in files) == 1
    for form in (MARK.encode(), MARK.encode("utf-16-le"), b"lissabon_tool", b"ValueError", b"12345678901234"):
        assert [name for name, data in files.items() if form in data] == []
    planted = guesses(path, key=KEY)
    assert len(planted) > 60
    for what, guess in planted.items():
        assert [name for name, data in files.items() if guess in data] == [], what


def test_the_canary_would_be_seen(tmp_path):
    """The same things are plain to see in a store without a key, so the test above looks for what is there."""
    path = tmp_path / "store"
    plant(path, key=False)
    files = content(path)
    everything = b"".join(files.values())
    assert MARK.encode() in everything
    planted = guesses(path, key=False)
    assert sum(guess in everything for guess in planted.values()) > len(planted) * 0.8


def test_ids_are_the_same_as_in_a_store_without_a_key(tmp_path):
    """What a checkpoint is called does not depend on how it is stored."""
    path = tmp_path / "store"
    plant(path, key=KEY)
    with holdfast.open(path, key=KEY) as store:
        assert store._catalog.encrypted
        for row in store._catalog.checkpoints():
            assert row.id == digest(b"holdfast.checkpoint", row.manifest)
        assert store.verify().ok
        agent = store.agent(f"agent {MARK}")
        assert agent.state["bulk"] == MARK.encode() * 400_000
        assert agent.at(f"tag {MARK}").label == f"label {MARK}"


# -- keys -------------------------------------------------------------------------------------------------


def test_without_the_right_key_nothing_opens(tmp_path, monkeypatch):
    path = tmp_path / "store"
    holdfast.open(path, key=KEY).close()
    before = content(path)
    for variable in ("HOLDFAST_KEY", "HOLDFAST_KEY_FILE", "HOLDFAST_KEY_COMMAND"):
        monkeypatch.delenv(variable, raising=False)
    for readonly in (False, True):
        with pytest.raises(KeyNeeded, match="is encrypted"):
            holdfast.open(path, readonly=readonly)
        with pytest.raises(WrongKey):
            holdfast.open(path, key=OTHER, readonly=readonly)
        with pytest.raises(KeyNeeded):
            holdfast.open(path, key=False, readonly=readonly)
    with pytest.raises(WrongKey):
        holdfast.open(path, key="a passphrase")
    after = content(path)
    assert {name: after[name] for name in ("keys", "store.db", "witness")} == {
        name: before[name] for name in ("keys", "store.db", "witness")
    }


def test_a_plain_store_is_refused_by_who_has_a_key(tmp_path, monkeypatch):
    """Whoever replaces an encrypted store by a plain one must not be believed."""
    path = tmp_path / "store"
    holdfast.open(path, key=False).close()
    with pytest.raises(NotEncrypted):
        holdfast.open(path, key=KEY)
    monkeypatch.setenv("HOLDFAST_KEY", KEY.hex())
    with pytest.raises(NotEncrypted):
        holdfast.open(path)
    with holdfast.open(path, key=False) as store:
        assert not store._catalog.encrypted
        with pytest.raises(NotEncrypted):
            holdfast.open(path, key=KEY)  # the handle that is open already makes no difference


def test_the_key_can_come_from_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "store"
    key_file = tmp_path / "key"
    key_file.write_text(KEY.hex() + "\n")
    holdfast.open(path, key=KEY).close()
    program = f"{sys.executable} -c \"print('{KEY.hex()}')\""
    for name, value in (
        ("HOLDFAST_KEY", KEY.hex().upper()),
        ("HOLDFAST_KEY_FILE", str(key_file)),
        ("HOLDFAST_KEY_COMMAND", program),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            holdfast.open(path).close()
            patch.setenv("HOLDFAST_KEY_FILE" if name == "HOLDFAST_KEY" else "HOLDFAST_KEY", "another")
            with pytest.raises(BadOption, match="are set"):
                holdfast.open(path)
    for command in ("false", "/no/such/program", "'"):
        monkeypatch.setenv("HOLDFAST_KEY_COMMAND", command)
        with pytest.raises(BadOption, match="key command"):
            holdfast.open(path)
    monkeypatch.delenv("HOLDFAST_KEY_COMMAND")
    for wrong, about in (
        (b"", "one line"),
        (b"a\nb\n", "one line"),
        (b"\xff\xfe", "not text"),
        (b"x" * 5000, "longer"),
    ):
        key_file.write_bytes(wrong)
        monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key_file))
        with pytest.raises(BadOption, match=about) as caught:
            holdfast.open(path)
        assert "xxx" not in str(caught.value)


def test_a_key_that_is_none_is_refused(tmp_path):
    for wrong in (b"", b"short", b"x" * 33, ""):
        with pytest.raises(BadOption):
            holdfast.open(tmp_path / "store", key=wrong)
    assert not (tmp_path / "store").exists()
    assert "abc" not in repr(secret_of("abc"))


def test_a_passphrase_opens_however_it_was_typed(tmp_path):
    path = tmp_path / "store"
    with holdfast.open(path, key="caf\u00e9 au lait") as store:
        store.agent("a").checkpoint("x")
        assert holdfast.open(path, key="caf\u00e9 au lait") is store
        with pytest.raises(WrongKey):
            holdfast.open(path, key="tea")
    with holdfast.open(path, key="cafe\u0301 au lait", readonly=True) as store:
        assert [agent.name for agent in store.agents()] == ["a"]


# -- what was not written here with the key ----------------------------------------------------------------


def small(path: Path) -> None:
    """Two rows of every table, made through the catalog itself."""
    store = open_embedded(path, secret=secret_of(KEY))
    for name in ("one", "two"):
        hand = Hand(store, new_branch(store, name))
        node = b"v\0" + name.encode() * 50
        chunk = name.encode() * 100_000
        hand.commit(
            nodes=[(digest(b"holdfast.node", node), node)],
            metadata=(digest(b"holdfast.metadata", name.encode()), name.encode()),
            chunks=[(chunk_digest(chunk), chunk)],
            key=name.encode(),
        )
        hand.commit(places=b"\x92\x90\x90" + name.encode(), sealed=True)
        hand.commit(tail=name.encode())
        Pen(hand).write(name.encode(), refs=b"r" * 32)
        store.set_tag(hand.row.a, name.encode(), body=name.encode(), n=1, event=event())
        store.set_validity(hand.row.a, 1, body=name.encode(), event=event())
        hand.lease.release()
    store.close()
    folded(path)


def read_all(path: Path) -> None:
    """Raises whatever reading everything raises."""
    store = open_embedded(path, secret=secret_of(KEY), readonly=True)
    try:
        for agent in store.agents():
            store.tags(agent.a), store.validities(agent.a)
            for branch in store.branches(agent.a):
                list(store.checkpoints(b=branch.b)), list(store.tails(branch.b))
                store.seals(branch.b), list(store.effects(branch.b))
        list(store.events())
        store.nodes(store.node_digests())
        for one in store.metadata_digests():
            store.metadata(one)
        for pack in store.pack_rows():
            list(store.chunks(row.digest for row in store.chunk_rows(pack.p)))
            store.check_pack(pack)
    finally:
        store.close()


SECRET = {
    "agent": ("key", "body"),
    "branch": ("key", "body", "head_id"),
    "tag": ("key", "body"),
    "checkpoint": ("manifest", "operations", "key"),
    "validity": ("body",),
    "tail": ("data",),
    "seal": ("places",),
    "node": ("digest", "data"),
    "metadata": ("digest", "data"),
    "event": ("body",),
    "line": ("chain",),
    "effect": ("refs", "body"),
    "chunk": ("digest", "p"),
    "pack": ("uuid",),
}


@pytest.mark.parametrize("table", SECRET)
def test_an_object_that_is_moved_to_anothers_place_is_refused(tmp_path, table):
    """Column by column, and together with its sum: what is sound in one place is not in another."""
    path = tmp_path / "store"
    small(path)
    read_all(path)
    order = {"checkpoint": "n", "event": "e", "effect": "r", "agent": "a", "branch": "b", "node": "k"}.get(table, "1")
    have_sum = table not in {"tail", "node", "metadata"}
    for column in SECRET[table]:
        for columns in ([column], [column, "sum"]) if have_sum else ([column],):
            copy = tmp_path / "copy"
            shutil.copytree(path, copy)
            unique = {"agent": "key", "node": "digest", "metadata": "digest", "chunk": "digest", "pack": "uuid"}
            names = ", ".join(columns)
            rows = sql(
                copy, f"SELECT {names}, {_place(table)} FROM {table} WHERE {column} IS NOT NULL ORDER BY {order}"
            )
            first, last = rows[0], rows[-1]
            assert first[0] != last[0]
            if unique.get(table) == column:  # there can be no two: the first one goes
                sql(copy, f"DELETE FROM {table} WHERE {_place(table)} = ?", first[-1])
            sets = ", ".join(f"{name} = ?" for name in columns)
            sql(copy, f"UPDATE {table} SET {sets} WHERE {_place(table)} = ?", *first[:-1], last[-1])
            with pytest.raises(Damaged):
                read_all(copy)
            shutil.rmtree(copy)


def _place(table: str) -> str:
    return {
        "agent": "a", "branch": "b", "tag": "a", "checkpoint": "n", "validity": "a", "tail": "n", "seal": "n",
        "node": "k", "metadata": "digest", "event": "e", "line": "b", "effect": "r", "chunk": "digest", "pack": "p",
    }[table]  # fmt: skip


def test_a_chunk_moved_inside_packs_is_refused(tmp_path):
    path = tmp_path / "store"
    small(path)
    first, second = sorted((path / "packs").iterdir())
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(NotAuthentic, match="chunk"):
        read_all(path)
    first.write_bytes(data)
    read_all(path)


def test_plaintext_that_is_slipped_in_is_refused(tmp_path):
    """Rows with the sums that they would have in a store without a key, and bytes that are not encrypted."""
    path = tmp_path / "store"
    small(path)
    plain = tmp_path / "plain"
    store = open_embedded(plain)
    hand = Hand(store, new_branch(store))
    node = b"v\0slipped in"
    hand.commit(nodes=[(digest(b"holdfast.node", node), node)], metadata=(digest(b"holdfast.metadata", b"m"), b"m"))
    hand.commit(places=b"\x92\x90\x90", sealed=True)
    hand.commit()
    Pen(hand).write(b"slipped")
    store.set_tag(1, b"t", body=b"t", n=1, event=event())
    store.set_validity(1, 1, body=b"v", event=event())
    store.close()
    folded(plain)
    for table in (
        "agent",
        "branch",
        "tag",
        "checkpoint",
        "validity",
        "tail",
        "seal",
        "node",
        "metadata",
        "event",
        "line",
        "effect",
    ):
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        row = sql(plain, f"SELECT * FROM {table}")[0]
        sql(copy, f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", *row)
        with pytest.raises(NotAuthentic) as caught:
            read_all(copy)
        if table not in {"tail", "node", "metadata"}:
            assert "not encrypted" in caught.value.message
        shutil.rmtree(copy)


def test_a_forged_row_with_its_sum_computed_anew_is_noticed(tmp_path):
    """Anybody can compute sums that have no key, and a signal to an agent lies outside the hash chain."""
    for key in (False, KEY):
        path = tmp_path / ("encrypted" if key else "plain")
        plant(path, key=key)
        with holdfast.open(path, key=key, readonly=True) as store:
            sent = [row.e for row in store._catalog.events() if decode(row.body).get("what") == "signal"]
        folded(path)
        ((*row,),) = sql(path, "SELECT e, a, at, body, key FROM event WHERE e = ?", *sent)
        row[3] = row[3][:-1] + b"?"
        sql(path, "UPDATE event SET body = ?, sum = ? WHERE e = ?", row[3], row_sum("event", *row), row[0])
        with holdfast.open(path, key=key, readonly=True) as store:
            report = store.verify()
            if key:
                assert any("event" in problem.what for problem in report.problems)
                with pytest.raises(NotAuthentic, match="not encrypted"):
                    list(store._catalog.events())
            else:
                assert report.ok


def test_a_copy_of_the_keys_does_not_open_another_store(tmp_path):
    """Every key is bound to the store's uuid, so rows cannot be carried from one store into another either."""
    one, two = tmp_path / "one", tmp_path / "two"
    small(one), small(two)
    shutil.copy(two / "keys", one / "keys")
    with pytest.raises(Damaged):
        open_embedded(one, secret=secret_of(KEY))
    (one / "keys").unlink()
    with pytest.raises(Damaged, match="keys is missing"):
        open_embedded(one, secret=secret_of(KEY))
    with pytest.raises(Damaged, match="keys is missing"):
        open_embedded(one)


def test_boxes_never_share_a_key_and_nonce(monkeypatch):
    """A new salt in time, a fresh nonce always, and reading goes on across salts."""
    monkeypatch.setattr(cipher, "BOXES_PER_SALT", 5)
    monkeypatch.setattr(cipher, "SALTS_KEPT", 3)
    keyed = Keyed(KEY, b"u" * 16, b"")
    boxes = [keyed.box("tail", number, b"same") for number in range(100)]
    assert len({box[:24] for box in boxes}) == 100
    assert len({box[:12] for box in boxes}) == 20
    assert [keyed.unbox("tail", number, box) for number, box in enumerate(boxes)] == [b"same"] * 100
    for wrong in (boxes[1], boxes[0][:39], b"", boxes[0][:-1] + b"?"):
        with pytest.raises(NotAuthentic):
            keyed.unbox("tail", 0, wrong)
    with pytest.raises(NotAuthentic):
        keyed.unbox("node", 0, boxes[0])
    with pytest.raises(NotAuthentic):
        keyed.record("chunk", ChunkRow, (1, 2, 3))


def test_a_reader_that_follows_the_format_can_open_it(tmp_path):
    """With nothing but the libraries: docs/format.md section 9 says all that is needed."""
    from blake3 import blake3
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
    from ormsgpack import packb, unpackb

    path = tmp_path / "store"
    plant(path, key=KEY)
    folded(path)
    block = (path / "keys").read_bytes()[:8192]
    body = block[12 : 12 + int.from_bytes(block[8:12], "big")]
    version, uuid, epoch, ((number, kind, _, salt, cost, wrapped),), previous, _ = unpackb(body)
    assert (version, epoch, kind, previous) == (1, 1, "key", b"")
    slot_key = blake3(salt + KEY, derive_key_context="holdfast 2026 key slot").digest(64)
    about = packb(["holdfast.slot", uuid, epoch, number, kind, salt, cost])
    master = AESSIV(slot_key).decrypt(wrapped, [about])

    def derived(purpose, length=32):
        return blake3(master + uuid, derive_key_context=f"holdfast 2026 store {purpose}").digest(length)

    def unboxed(box, *about):
        key = blake3(box[:12], key=derived("content")).digest()
        return AESGCM(key).decrypt(box[12:24], box[24:], packb(about))

    for n, *columns, total in sql(path, "SELECT * FROM checkpoint"):
        assert blake3(packb(("checkpoint", n, *columns)), key=derived("sums")).digest(16) == total
        manifest = unpackb(unboxed(columns[5], "checkpoint", 6, n))
        assert manifest[0] == 1
    names = AESSIV(derived("names", 64))
    for stored, data in sql(path, "SELECT digest, data FROM node"):
        node = names.decrypt(stored, [b"node", bytes(8)])
        assert unboxed(data, "node", 0, node)[0] in {0, 1}
    ((a, stored),) = sql(path, "SELECT a, key FROM tag WHERE a = 1")
    assert names.decrypt(stored, [b"tag", a.to_bytes(8, "big")]) == name_key(f"tag {MARK}")


# -- damage -----------------------------------------------------------------------------------------------


def test_a_flipped_byte_of_an_encrypted_store_is_detected_or_harmless(tmp_path, monkeypatch, rounds):
    monkeypatch.setenv("HOLDFAST_KEY", KEY.hex())
    original = damage.make(tmp_path / "store", page_size=512)
    outcomes: dict[str, int] = {}
    most = rounds(120, 1_000_000)
    with damage.memory() as folder, rich.small_limits():
        path = folder / "store"
        shutil.copytree(original.path, path)
        files = [file for file in damage.files_of(path) if not file.endswith("-shm")]
        whole = sum((path / file).stat().st_size for file in files)
        for file in files:
            data = (path / file).read_bytes()
            places = damage.share(list(range(len(data))), max(8, most * len(data) // whole))
            for number, place in enumerate(places):
                damage.poke(path / file, place, bytes([data[place] ^ 1 << (place * 7 % 8)]))
                outcome = damage.judge(original, path, number, changed=file)
                outcomes[outcome.split()[0]] = outcomes.get(outcome.split()[0], 0) + 1
                damage.poke(path / file, place, data[place : place + 1])
    assert sum(outcomes.values()) >= 20
    assert outcomes.get("opening:", 0) + outcomes.get("verify:", 0) > outcomes.get("harmless", 0)


def test_work_goes_on_after_kill_9(tmp_path):
    """A writer of an encrypted store dies; what it was told is durable is there for the next one."""
    path = tmp_path / "store"
    program = (
        "import holdfast, os, sys\n"
        "store = holdfast.open(sys.argv[1])\n"
        "agent = store.agent('a')\n"
        "for number in range(10**6):\n"
        "    agent.state['n'] = number\n"
        "    agent.checkpoint(str(number))\n"
        "    print(number, flush=True)\n"
    )
    environment = {**os.environ, "HOLDFAST_KEY": KEY.hex()}
    child = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True, env=environment)
    told = [int(child.stdout.readline()) for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    told += [int(line) for line in child.communicate()[0].split()]
    with holdfast.open(path, key=KEY) as store:
        assert store.agent("a").state["n"] >= told[-1]
        assert store.verify().ok
