"""Lives: what happens to stores from day to day, so that faults, kills and failed flushes can meet all of it.

The first is the script (tests/faults/script.py) from nothing. The others begin with stores that are there already, and
each does one thing that the script does not: moves packs to a colder place, sends a store elsewhere, changes keys,
mends a damaged store, lets history go, meets other writers, is moved, is made by two at once. Together they come along
at every line of Holdfast that calls the disk; tests/faults/test_harness.py holds them to it.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast.agent import metadata, removal
from holdfast.errors import AgentBusy, Fenced, StoreWentBack, WrongKey
from holdfast.run.store import Store
from holdfast.store import database
from holdfast.store.database import open_database
from holdfast.store.packs import file_name
from tests.faults import crashes, script
from tests.faults.campaign import remembering
from tests.faults.script import Broken, Hand, Ledger, let_go
from tests.faults.stage import KEY, NEW_KEY, check, life

# -- what is there before -------------------------------------------------------------------------------


def grown(folder: Path, ledger: Ledger) -> None:
    """A store with packs, some of which only the past needs, and a file that says when somebody else is saved."""
    (folder / "holdfast.toml").write_text('[when.agents."nobody"]\nevery_s = 3600\n')
    with holdfast.open(folder / "store") as store:
        ledger.write("open")
        chance = random.Random(7)
        hand = Hand(ledger, store.agent("old"))
        for number in range(5):
            hand.set("bulk", chance.randbytes(5_000))
            hand.append("messages", {"role": "user", "content": f"{number} " * 60})
            made = hand.save(f"step {number}")
            if number == 1:
                hand.agent.tag("kept", made)
                ledger.write("tag", "old", "kept", made.id)
                hand.agent.mark(made, "suspect", "it may be")
        side = Hand(ledger, hand.agent.branch("side", at=made), hand.plain)
        side.append("messages", "on the side")
        side.save("side")
        side.agent.close()
        hand.back(made)
        actor = store.agent("actor")
        actor.run(script.journey.options(id="one"), 2)
        actor.close()


def secret(folder: Path, ledger: Ledger) -> None:
    """An encrypted store beside, some of whose packs are in a colder place, and its key in a file."""
    holdfast.open(folder / "store").close()
    ledger.write("open")
    with holdfast.open(folder / "secret", key=KEY) as store:
        for seed in range(3):
            crashes.work_on(store, random.Random(seed))
        store.tier(folder / "cold")
    (folder / "key").write_text(KEY)
    (folder / "secret" / "dumps").mkdir()


SECRETS = 8
"""How many checkpoints that store has."""


def damaged(folder: Path, ledger: Ledger) -> None:
    """Two damaged stores, one encrypted, beside one that is not."""
    holdfast.open(folder / "store").close()
    ledger.write("open")
    for name, key in (("damaged", False), ("damaged-secret", KEY)):
        with holdfast.open(folder / name, key=key) as store:
            for _ in range(3):
                crashes.work_on(store, random.Random(4))
            agent = store.agent("marked")
            for number in range(6):
                agent.mark(agent.checkpoint(f"step {number}"), "suspect", "it may be")
            actor = store.agent("actor")
            actor.run(script.journey.options(id="one"), 2)
            if not key:
                store.tier(folder / "cold")
            packs = [folder / name / "packs" / file_name(pack) for pack in store._db.view.packs()]
        spoil(folder / name / "store.db")
        oldest = next(pack for pack in packs if pack.exists())  # not in the colder place
        oldest.write_bytes(oldest.read_bytes()[:4096])


def spoil(catalog: Path) -> None:
    """Some pages in the middle of the database are not what was written."""
    with closing(sqlite3.connect(catalog)) as connection, connection:
        connection.execute("DELETE FROM record WHERE r = 2")
        connection.execute("DELETE FROM branch WHERE b = 2")
        connection.execute("DELETE FROM node WHERE k = (SELECT max(k) FROM node)")
        connection.execute("DELETE FROM chunk WHERE p = (SELECT max(p) FROM pack)")
        connection.execute("DELETE FROM pack WHERE p = (SELECT max(p) FROM pack)")
        for table in ("loose", "checkpoint"):
            connection.execute(f"DELETE FROM {table} WHERE n = (SELECT n FROM validity ORDER BY n LIMIT 1 OFFSET 2)")
    data = bytearray(catalog.read_bytes())
    for page in range(4, len(data) // 4096, 5):
        data[page * 4096 + 100 : page * 4096 + 140] = bytes(40)
        data[page * 4096 : page * 4096 + 8] = b"\xff" * 8
    catalog.write_bytes(data)


def elsewhere(folder: Path, ledger: Ledger) -> None:
    """A store that is older than what was seen of it, and one that was used in another place."""
    grown(folder, ledger)
    shutil.copytree(folder / "store", folder / "older")
    for name in ("store", "other place"):
        with holdfast.open(folder / name) as store:
            crashes.work_on(store, random.Random(5))
    shutil.rmtree(folder / "store")
    (folder / "older").rename(folder / "store")
    (folder / "other place").rename(folder / "new place")


def emptied(folder: Path, ledger: Ledger) -> None:
    """A store without its empty folders, as it comes out of version control or a bucket."""
    with holdfast.open(folder / "store") as store:
        ledger.write("open")
        hand = Hand(ledger, store.agent("old"))
        hand.set("n", 1)
        hand.save("small")
        hand.agent.close()
    for name in ("packs", "locks"):
        shutil.rmtree(folder / "store" / name)


def program(folder: Path, _ledger: Ledger) -> None:
    """A program with its dependencies and its version control."""
    for place in ("work", "loose/.git/refs/heads", "packed/.git", "packages/some-1.0.dist-info"):
        (folder / place).mkdir(parents=True)
    for name in ("loose", "packed"):
        (folder / name / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "loose" / ".git" / "refs" / "heads" / "main").write_text("a" * 40)
    (folder / "packed" / ".git" / "packed-refs").write_text(f"{'b' * 40} refs/heads/main\n")
    (folder / "work" / ".holdfast").mkdir()
    (folder / "store").symlink_to(Path("work") / ".holdfast")


LITTLE = holdfast.Policy(last=1, tags=False)


# -- the lives ------------------------------------------------------------------------------------------


@life()
def from_nothing(folder: Path, ledger: Ledger) -> None:
    """The script; then reading only, verifying, an encrypted store, and a program that ends with its agents open."""
    path = folder / "store"
    script.perform(path, ledger)
    for _ in range(2):
        with holdfast.open(folder / "secret", key=KEY) as store:
            crashes.work_on(store, random.Random(4))
    with holdfast.open(path, readonly=True) as store:
        store.verify()
        store.last_verified()
        store.stats()
        ledger.check(store)
    with holdfast.open(path) as store:
        crashes.work_on(store, random.Random(1))
        database._at_exit()


@life(grown)
def cold(folder: Path, ledger: Ledger) -> None:
    """Packs go to a colder place, are read there, are brought back, and are let go there."""
    with holdfast.open(folder / "store") as store:
        store.tier(folder / "cold", dry_run=True)
        store.tier(folder / "cold")
        store.stats()
        ledger.check(store)
        store.tier()
        store.tier(folder / "cold")
        let_go(store, ledger, LITTLE, list(ledger.checkpoints))
        ledger.check(store)


@life(grown)
def retention(folder: Path, ledger: Ledger) -> None:
    """A policy is kept in the store and applied; agents are cloned, marked, removed; space is given back."""
    with holdfast.open(folder / "store") as store:
        agent = store.agent("old")
        agent.mark(agent.log(all=True)[1], "suspect", "for a moment")
        agent.mark(agent.log(all=True)[1], "good", "it was not")
        agent.close()
        store.set_policy(holdfast.Policy(last=2))
        store.retain(dry_run=True)
        with written_meanwhile(store, ledger):
            let_go(store, ledger, LITTLE, list(ledger.checkpoints))
        store.set_policy(None)
        ledger.write("changing", "twin")
        store.copy("actor", "twin")
        with closing(store.agent("many")) as many:  # pages become free when it goes
            for number in range(24):
                many.state["text"] = f"{number} " * 500
                many.checkpoint()
        for name in ("actor", "twin", "old", "many"):
            ledger.write("changing", name)
            store.remove(name)
            ledger.write("removed", name)


@contextmanager
def written_meanwhile(store: holdfast.Store, ledger: Ledger) -> Iterator[None]:
    """Somebody saves a checkpoint between the look at a history and the change of it."""
    real = removal._stand_alone
    hand = Hand(ledger, store.agent("old"), state_of(store.agent("old")))

    def late(*found: Any) -> Any:
        removal._stand_alone = real
        hand.append("messages", "meanwhile")
        hand.save("meanwhile")
        return real(*found)

    removal._stand_alone = late
    try:
        yield
    finally:
        removal._stand_alone = real
        hand.agent.close()


@life(grown)
def transfer(folder: Path, ledger: Ledger) -> None:
    """A store is pushed to another, pulled from, written to a file, read from it, and restored for a trial."""
    bundle = folder / "bundle"
    with holdfast.open(folder / "store") as store, holdfast.open(folder / "copy") as copy:
        store.push(copy)
        hand = Hand(ledger, copy.agent("old"), state_of(copy.agent("old")))
        hand.append("messages", "elsewhere")
        made = hand.agent.checkpoint("elsewhere")
        hand.agent.close()
        store.pull(copy)
        ledger.write("checkpoint", "old", "main", made.id, script.fingerprint(hand.plain))
        store.export(bundle, ["old"])
        store.export(bundle, ["old", "actor"], replace=True)
        ledger.write("bundle")
        with holdfast.open(folder / "third") as third:
            third.import_bundle(bundle)
        store.export(folder / "locked bundle", ["old"], key=KEY)
        holdfast.import_bundle(folder / "locked bundle", folder / "deep" / "fourth", key=KEY, file_key=KEY)
        store.verify_restore(sample=1, place=folder)
        ledger.check(store)


def state_of(agent: holdfast.Agent) -> dict[str, object]:
    return {section: agent.state.raw_section(section) for section in agent.state}


def check_keys(folder: Path, ledger: Ledger) -> None:
    """What was begun can be finished, and nothing was lost on the way."""
    for key in (KEY, NEW_KEY):
        with suppress(WrongKey):
            with holdfast.open(folder / "secret", key=key) as store:
                store.tier()
            holdfast.keys.rotate(folder / "secret", NEW_KEY, key=key, full=True)
    with holdfast.open(folder / "secret", key=NEW_KEY) as store:
        there = sum(len(store.agent(info.name, readonly=True).log(all=True)) for info in store.agents())
        if there < SECRETS:
            raise Broken(f"{there} of {SECRETS} checkpoints are left behind another key")
    check(folder, ledger)


@life(secret, check_keys)
def keys(folder: Path, _ledger: Ledger) -> None:
    """Keys come and go, and everything is encrypted anew."""
    path = folder / "secret"
    os.environ["HOLDFAST_KEY_FILE"] = str(folder / "key")
    try:
        with holdfast.open(path) as store:
            store.tier()  # nothing may lie elsewhere
        holdfast.keys.add(path, NEW_KEY)
        holdfast.keys.remove(path, 1, key=NEW_KEY)
        holdfast.keys.rotate(path, KEY, key=NEW_KEY)
        holdfast.keys.rotate(path, NEW_KEY, full=True)
        with holdfast.open(path, key=NEW_KEY) as store:
            crashes.work_on(store, random.Random(6))
        holdfast.keys.discard_old(path)
    finally:
        del os.environ["HOLDFAST_KEY_FILE"]


def check_mended(folder: Path, ledger: Ledger) -> None:
    """What was damaged is as it was; what was made of it is whole, or not there."""
    for name in ("damaged", "damaged-secret"):
        if not (folder / name / "store.db").exists():
            raise Broken(f"{name} is gone")
    check(folder, ledger)


@life(damaged, check_mended)
def repair(folder: Path, _ledger: Ledger) -> None:
    """What is intact of a damaged store is put into a new one."""
    before = contents(folder / "damaged")
    tempfile.tempdir = str(folder)
    try:
        holdfast.repair(folder / "store")
        holdfast.repair(folder / "damaged", folder / "mended" / "store")
        holdfast.repair(folder / "damaged-secret", folder / "mended-secret", key=KEY)
    finally:
        tempfile.tempdir = None
        if contents(folder / "damaged") != before:
            raise Broken("repair changed the damaged store")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@life(grown)
def meeting(folder: Path, ledger: Ledger) -> None:
    """Two have the store open, as two processes would: one waits, looks who it is, takes over, and is late."""
    path = folder / "store"
    with holdfast.open(path) as store:
        other = Store(str(path), open_database(path), (False, "commit", False, False))
        try:
            agent = store.agent("old")
            other.stats()
            with suppress(AgentBusy):
                other.agent("old")
            agent_now = other.agent("old", takeover=True)
            hand = Hand(ledger, agent_now, state_of(agent_now))
            hand.append("messages", "mine now")
            hand.save("taken over")
            with suppress(Fenced):
                agent.state["bulk"] = b"too late"
                agent.checkpoint("too late")
            overtaken(store, other)
            late_for_a_name(store, other)
            taken_up_again(store, other)
            dead = other._db.view.branches()[0]
            (path / "locks" / f"{dead.uuid.hex()}-0").touch()
            other._db.leases.alive(dead.uuid, 0)
        finally:
            other.close()


def late_for_a_name(store: holdfast.Store, other: holdfast.Store) -> None:
    """Two make an agent of one name."""
    with after_reading(store, "agent", lambda: other.agent("new here").close()):
        store.agent("new here").close()


def overtaken(store: holdfast.Store, other: holdfast.Store) -> None:
    """While one is about to become the writer, another does so twice."""
    with after_reading(store, "branch_at", lambda: [other.agent("actor").close() for _ in range(2)]):
        store.agent("actor").close()


@contextmanager
def after_reading(store: holdfast.Store, what: str, act: Callable[[], object]) -> Iterator[None]:
    """Something happens between the first look of this kind and what follows from it."""
    view = store._db.view

    def late(*args: Any) -> Any:
        del vars(view)[what]
        found = getattr(view, what)(*args)
        act()
        return found

    vars(view)[what] = late
    try:
        yield
    finally:
        vars(view).pop(what, None)


def taken_up_again(store: holdfast.Store, other: holdfast.Store) -> None:
    """One lets a branch go and takes it up again, until somebody else has had it."""
    view, leases = store._db.view, store._db.leases
    branch = view.branches(store._agent_row("actor").a)[0]
    generation = lambda: view.branch_at(branch.b).generation  # noqa: E731
    lease = store._lease("actor", branch, wait_s=0.0)
    lease.release()
    again = leases.again(lease, generation)
    if again is None or again.generation != lease.generation:
        raise Broken("a branch that nobody else had was not given back")
    again.release()
    other.agent("actor").close()
    if leases.again(again, generation) is not None:
        raise Broken("a branch was given back although somebody else had had it")


def check_moved(folder: Path, ledger: Ledger) -> None:
    """Whoever accepts it gets all of it."""
    holdfast.open(folder / "store", trust_older=True).close()
    check(folder, ledger)


@life(elsewhere, check_moved)
def moved(folder: Path, _ledger: Ledger) -> None:
    """A store has been moved, and is known in its new place; another is older than it was, and is accepted."""
    holdfast.open(folder / "new place").close()
    for options in ({"readonly": True}, {}):
        with suppress(StoreWentBack):
            holdfast.open(folder / "store", **options).close()
        holdfast.open(folder / "store", trust_older=True, **options).close()
    odd = folder / "odd" / "holdfast" / "seen"
    odd.parent.mkdir(parents=True)
    os.mkfifo(odd)
    with remembering(folder / "odd"):
        holdfast.open(folder / "new place").close()


@life(emptied)
def carried(folder: Path, ledger: Ledger) -> None:
    """What was empty is made anew: when the store is opened, and when it is needed."""
    with holdfast.open(folder / "store") as store:
        (folder / "store" / "packs").rmdir()
        hand = Hand(ledger, store.agent("old"), state_of(store.agent("old")))
        hand.set("bulk", random.Random(9).randbytes(5_000))
        hand.save("bulk")


@life(program)
def found(folder: Path, ledger: Ledger) -> None:
    """A program that says nothing of where its store is, and whose version is looked up."""
    main = sys.modules["__main__"]
    before = Path.cwd(), list(sys.path), vars(main).copy()
    os.chdir(folder / "work")
    sys.path.insert(0, str(folder / "packages"))
    try:
        for number, name in enumerate(("loose", "packed")):
            main.__file__ = str(folder / name / "main.py")
            metadata._process.cache_clear()
            with holdfast.open() as store:
                ledger.write("open")
                hand = Hand(ledger, store.agent(name))
                hand.set("n", number)
                hand.save("found")
    finally:
        os.chdir(before[0])
        sys.path[:] = before[1]
        vars(main).pop("__file__", None)
        vars(main).update(before[2])
        metadata._process.cache_clear()


@life()
def made_twice(folder: Path, ledger: Ledger) -> None:
    """Somebody else makes the store at the same time, and is faster."""
    rename = os.rename

    def slower(old: Path, new: Path) -> None:
        os.rename = rename
        open_database(folder / "store").close()
        rename(old, new)

    os.rename = slower
    try:
        with holdfast.open(folder / "store") as store:
            ledger.write("open")
            crashes.work_on(store, random.Random(8))
    finally:
        os.rename = rename


@life(grown)
def forked(folder: Path, ledger: Ledger) -> None:
    """A process with an open store forks, and the child goes on with a handle of its own."""
    store = holdfast.open(folder / "store")
    store.agent("old").close()
    child = os.fork()
    if child:  # whatever comes of the child has come of this process
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))
    with holdfast.open(folder / "store") as store:
        hand = Hand(ledger, store.agent("child"))
        hand.set("n", 1)
        hand.save("child")
