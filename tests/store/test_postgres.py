"""PostgreSQL under a store: a real server that flushes, real crashes of it, real cuts of connections."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
import uuid
from contextlib import suppress

import psycopg
import pytest

import holdfast
from holdfast import errors
from holdfast.agent.store import Store
from holdfast.store import connection
from holdfast.store import postgres as module
from holdfast.store.advisory import AdvisoryLeases
from holdfast.store.catalog import View
from holdfast.store.changes import Change, NewCheckpoint, NewRecord, Objects, Said, pack_node
from holdfast.store.cipher import PLAIN, digest
from holdfast.store.engine import Refused, Unsure
from holdfast.store.manifest import Manifest, identity
from holdfast.store.postgres import Postgres
from holdfast.store.rows import BEGINNING, Branch, node_digest
from tests import postgres
from tests.conftest import unsaved

SECRET = "tr0ub4dor%26three"  # in a URL; it stands for tr0ub4dor&three
RAW = b"node" * 100
NODE = Objects(nodes={node_digest(RAW): pack_node(RAW)})


@pytest.fixture(scope="module")
def server():
    try:
        with postgres.server(fsync="on", deadlock_timeout="50ms") as running:
            yield running
    except postgres.NoServer as reason:
        pytest.skip(str(reason))


@pytest.fixture
def url(server):
    with server.database(f"test_{os.urandom(6).hex()}") as url:
        yield url


@pytest.fixture
def opened():
    """Opens engines, and closes them after the test."""
    made = []

    def open_engine(url, fill=None, **options):
        made.append(Postgres(url, fill=fill or fill_store, **options))
        return made[-1]

    yield open_engine
    for engine in made:
        engine.close()


def fill_store(tx):
    Change(tx, PLAIN).set_fact("format", b"\0\1")


def change(engine, work):
    return engine.transaction(lambda tx: work(Change(tx, PLAIN)))


def add_branch(engine, name: str = "one") -> Branch:
    def add(made: Change) -> Branch:
        agent = made.add_agent(name, uuid.uuid4().bytes, {"created": 1})
        return made.add_branch(agent.a, "main", uuid.uuid4().bytes, {"created": 1, "from": b""}, None, BEGINNING)

    return change(engine, add)


def new_checkpoint(branch: Branch, operations: bytes = b"operations", label: str = "") -> NewCheckpoint:
    proof = digest(b"operations", operations)
    manifest = Manifest.make(branch.id, branch.depth + 1, [], proof, (0, b""), digest(b"metadata"), label, 1).encode()
    return NewCheckpoint(identity(manifest), manifest, operations)


def commit(engine, branch: Branch, new: NewCheckpoint | None = None) -> Branch:
    return change(engine, lambda made: made.commit(branch, new or new_checkpoint(branch)))


def raise_generation(engine, b: int, generation: int) -> bool:
    def rise(made: Change) -> None:
        now = made.branch_at(b)
        made.move(now._replace(generation=generation), now._replace(generation=generation + 1))

    with suppress(Refused):
        change(engine, rise)
        return True
    return False


def take(leases, engine, branch: Branch, wait_s: float = 0, *, takeover: bool = False):
    return leases.take(
        branch.uuid,
        lambda: View(engine, PLAIN).branch_at(branch.b).generation,
        lambda generation: raise_generation(engine, branch.b, generation),
        {"agent": "one", "branch": "main"},
        b=branch.b,
        wait_s=wait_s,
        takeover=takeover,
    )


def say(url: str, statement: str) -> list[tuple]:
    with psycopg.connect(url, autocommit=True) as session:
        cursor = session.execute(statement)
        return cursor.fetchall() if cursor.description else []


def end_sessions(url: str) -> None:
    say(url, "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'holdfast'")


def in_threads(*works) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- a store is made, found, or refused ----------------------------------------------------------------------------


def test_a_store_is_made_whole_and_once_however_many_come_first(url, opened):
    def fail(tx):
        raise OSError("no uuid today")

    with pytest.raises(OSError, match="today"):
        opened(url, fill=fail)
    with pytest.raises(errors.NotAStore):
        Postgres(url)
    filled, found, start = [], [], threading.Barrier(4)

    def race():
        start.wait()
        engine = opened(url, fill=lambda tx: (filled.append(1), fill_store(tx)))
        found.append(View(engine, PLAIN).facts())

    in_threads(*[race] * 4)
    assert (len(filled), found) == (1, [{"format": b"\0\1"}] * 4)
    engine = opened(url, readonly=True)
    engine.check_schema()
    assert (engine.check(), engine.sizes()["catalog"] > 0) == ([], True)
    say(url, f'ALTER DATABASE "{database_of(url)}" SET default_transaction_read_only = on')
    for locked in (engine, opened(url)):
        with pytest.raises(errors.StoreReadOnly):
            add_branch(locked)


def test_settings_of_the_session_are_not_needed(url, opened):
    """A pooler may give each transaction another session of the server."""
    engine, other = opened(url), opened(url + "&schema=other")
    add_branch(other, "theirs")
    branch = add_branch(engine)
    engine.run("SELECT 1")
    for seat in (engine._reading[0], engine._writing[0]):
        seat.link.ask(("DISCARD ALL", ()))
        seat.link.ask(("SET search_path TO other", ()), ("SET synchronous_commit TO off", ()))
    assert engine.transaction(lambda tx: tx.run("SHOW synchronous_commit")) == [("on",)]
    commit(engine, branch)
    with pytest.raises(errors.StoreFailed):  # a statement that was prepared is gone: it says so, and is prepared anew
        engine.run("SELECT 1")
    assert [agent.name for agent in View(engine, PLAIN).agents()] == ["one"]
    assert View(other, PLAIN).checkpoints() == []


def test_every_commit_waits_for_the_flush_whatever_the_session_is_set_to(url):
    """Those made in one call, too, which do not set it themselves."""
    with holdfast.open(url) as store:
        agent = store.agent("one")
        agent.checkpoint()
        say(
            url,
            "CREATE TABLE public.told (flushed text);"
            " CREATE FUNCTION public.tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO public.told VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$;"
            " CREATE TRIGGER tell AFTER UPDATE ON holdfast.branch FOR EACH ROW EXECUTE FUNCTION public.tell()",
        )
        for value in ("on", "off", "local"):
            for seat in store._db.engine._writing:
                if seat.link is not None:
                    seat.link.ask((f"SET synchronous_commit TO {value}", ()))
            agent.state["value"] = value
            agent.checkpoint()
    assert say(url, "SELECT * FROM public.told") == [("on",)] * 3


def test_what_is_not_a_store_of_ours_is_refused_and_left_alone(url, opened):
    say(url, "CREATE SCHEMA mine; CREATE TABLE mine.store (x int)")
    with pytest.raises(errors.NotAStore):
        opened(url + "&schema=mine")
    opened(url)
    say(url, "COMMENT ON TABLE holdfast.store IS 'holdfast store, format 2'")
    with pytest.raises(errors.NewerFormat):
        opened(url)
    say(url, "COMMENT ON TABLE holdfast.store IS 'holdfast store, format 1'; ALTER TABLE holdfast.tag DROP COLUMN id")
    with pytest.raises(errors.Damaged):
        opened(url).check_schema()
    for wrong in ("&shared=one", '&schema="; DROP'):
        with pytest.raises(errors.BadOption):
            opened(url + wrong)


def test_a_server_that_may_lose_what_it_acknowledged_is_refused(postgres_url, opened, monkeypatch):
    with pytest.raises(errors.StoreFailed, match="fsync=off"):
        opened(postgres_url)
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")
    add_branch(opened(postgres_url))


def test_stores_that_share_a_schema_see_nothing_of_each_other(server, url, opened):
    server.execute("CREATE ROLE tenant LOGIN")
    server.execute(f'GRANT CREATE ON DATABASE "{database_of(url)}" TO tenant')
    with pytest.raises(errors.StoreFailed, match="every store"):
        opened(url + "&shared=one")
    mine = url.replace("postgres@", "tenant@")
    one, two = opened(mine + "&shared=one"), opened(mine + "&shared=two")
    ours, theirs = commit(one, add_branch(one)), commit(two, commit(two, add_branch(two)))
    one.check_schema()
    for engine, branch, count in ((one, ours, 1), (two, theirs, 2), (opened(mine + "&shared=one"), ours, 1)):
        with engine.moment() as reader:
            for view in (View(engine, PLAIN), View(reader, PLAIN)):
                assert (view.branches(), len(view.checkpoints()), len(view.facts())) == ([branch], count, 1)
    one.transaction(lambda tx: tx.do("DELETE FROM loose"))
    assert [View(engine, PLAIN).counts()["loose"] for engine in (one, two)] == [0, 2]
    with one.sweeping() as alone, two.sweeping() as second:
        assert (alone, second) == (True, True)
    leases = AdvisoryLeases(one), AdvisoryLeases(two)
    lease = take(leases[0], one, ours)
    assert ([len(some.holders()) for some in leases], lease.held) == ([1, 0], True)
    with pytest.raises(errors.BadOption):
        opened(mine)


# -- the catalog ---------------------------------------------------------------------------------------------------


def test_commits_compare_and_swap_across_connections(url, opened):
    here, there = opened(url), opened(url)
    branch, view = add_branch(here), View(there, PLAIN)
    assert view.agent("one").body == {"created": 1}
    with pytest.raises(Refused):
        add_branch(there)
    big = random.Random(1).randbytes(1_000_000)
    first = commit(here, branch, new_checkpoint(branch, big, "ünï?code % 'quoted'"))
    with pytest.raises(Refused):
        commit(there, branch)
    records = [NewRecord(1, b"", b"body")]
    second = change(there, lambda made: made.commit(first, new_checkpoint(first), records))
    with pytest.raises(Refused):  # the same head, another line
        change(here, lambda made: made.move(second._replace(line=0), second))
    assert not raise_generation(here, branch.b, 5)
    assert raise_generation(here, branch.b, 0)
    with pytest.raises(Refused):
        change(here, lambda made: made.guard(branch.b, 0))
    assert [point.manifest.label for point in view.walk(second.head)] == ["", "ünï?code % 'quoted'"]
    assert view.operations(view.point(first.head)) == big
    assert [record.body for record in view.line(second.line)] == [b"body"]
    assert len(view.checkpoints()) == 2  # nothing of what was refused
    change(here, lambda made: made.say(first.a, Said({"x": -1}, key=b"k\0")))
    assert [entry.body for entry in view.log_under([b"k\0"])] == [{"x": -1}]
    assert here.run("SELECT 'a?b', 1 WHERE 'x%' = ?", ("x%",)) == [("a?b", 1)]


def test_a_commit_that_waits_for_the_removal_of_its_branch_is_refused(url, opened):
    engine = opened(url)
    branch, caught = add_branch(engine), []

    def late() -> None:
        with pytest.raises(Refused) as error:
            commit(engine, branch)
        caught.append(error.value)

    thread = threading.Thread(target=late)

    def remove(made: Change) -> None:
        made.retire(branch)
        made.agents()
        thread.start()
        while not say(url, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            pass

    change(engine, remove)
    thread.join()
    assert (len(caught), View(engine, PLAIN).checkpoints()) == (1, [])


def test_branches_are_written_at_once_and_no_handle_is_given_twice(url, opened):
    engines, done = [opened(url), opened(url)], []

    def work(number: int) -> None:
        branch = add_branch(engines[number % 2], str(number))
        for _ in range(40):
            branch = commit(engines[number % 2], branch)
        done.append(branch)

    in_threads(*[lambda number=number: work(number) for number in range(6)])
    view = View(engines[0], PLAIN)
    assert sorted(view.branches()) == sorted(done)
    assert [len(list(view.walk(branch.head))) for branch in done] == [40] * 6


def test_transactions_that_lock_each_other_out_are_made_again(url, opened):
    engine = opened(url)
    branches = [add_branch(engine, name) for name in "ab"]
    met, tries = threading.Barrier(2), []

    def both(tx, order):
        tries.append(1)
        for at in order:
            tx.run("UPDATE branch SET depth = depth + 1 WHERE b = ? RETURNING b", (branches[at].b,))
            if len(tries) <= 2 and at == order[0]:
                met.wait()

    in_threads(*[lambda order=order: engine.transaction(lambda tx: both(tx, order)) for order in ((0, 1), (1, 0))])
    assert len(tries) > 2
    assert engine.run("SELECT depth FROM branch") == [(2,), (2,)]


def test_a_moment_sees_one_snapshot_and_keeps_sweepers_out(url, opened):
    here, there = opened(url), opened(url)
    branch = add_branch(here)
    with here.moment() as reader:
        branch = commit(there, branch)
        assert View(reader, PLAIN).branches()[0].head == 0
        with there.sweeping() as alone:
            assert not alone
    with there.sweeping() as alone, here.sweeping() as second:
        assert (alone, second) == (True, False)
    with here.moment() as reader, pytest.raises(errors.StoreFailed):
        reader.run("SELECT nonsense FROM branch")
    with here.moment() as reader:
        assert View(reader, PLAIN).branches() == [branch]


def test_who_names_things_waits_for_the_sweeper_and_one_that_lost_its_right_deletes_nothing(url, opened, monkeypatch):
    monkeypatch.setitem(module._SESSION, "lock_timeout", "200ms")
    here, there = opened(url), opened(url)
    for engine in (here, there):
        change(engine, lambda made: made.put_objects(NODE))
    with here.sweeping() as alone:
        assert alone
        with pytest.raises(errors.StoreBusy):
            change(there, lambda made: made.put_objects(NODE))
        end_sessions(url)
        with pytest.raises(errors.StoreBusy, match="lost"):
            here.transaction(lambda tx: tx.do("DELETE FROM node"))
        change(there, lambda made: made.put_objects(NODE))
    assert View(there, PLAIN).nodes(NODE.nodes) == {node_digest(RAW): RAW}


# -- connections that break ----------------------------------------------------------------------------------------


@pytest.fixture
def proxied(server, url, opened, monkeypatch):
    """A proxy, and an engine that goes through it. Statements are sent as texts each time, so that COMMIT is seen."""
    monkeypatch.setattr(connection, "PREPARED", 0)
    proxy = postgres.Proxy(server.folder)
    return proxy, opened(f"postgresql://postgres@127.0.0.1:{proxy.port}/{database_of(url)}")


def database_of(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


def test_a_commit_is_one_round_trip(proxied):
    proxy, engine = proxied
    branch = add_branch(engine)
    before = proxy.turns
    for _ in range(100):  # handles and all
        branch = commit(engine, branch)
    assert proxy.turns == before + 100


@pytest.mark.parametrize("cut", ["before", "behind"])
def test_a_connection_that_is_cut_while_it_commits_leaves_one_unsure(proxied, cut):
    proxy, engine = proxied
    branch = add_branch(engine)
    new = new_checkpoint(branch)
    proxy.cut = cut
    with pytest.raises(Unsure):
        commit(engine, branch, new)
    proxy.cut = ""
    assert (View(engine, PLAIN).find(new.id) is not None) == (cut == "behind")


def test_a_connection_that_is_lost_before_commit_has_written_nothing(url, opened):
    engine = opened(url)
    branch = add_branch(engine)
    end_sessions(url)
    branch = commit(engine, branch)  # nobody used it, so nobody notices

    def work(made: Change) -> None:
        made.commit(branch, new_checkpoint(branch))
        made.agents()
        end_sessions(url)
        made.agents()

    with pytest.raises(errors.StoreFailed):
        change(engine, work)
    view = View(engine, PLAIN)
    assert (view.branches(), len(view.checkpoints())) == ([branch], 1)
    commit(engine, branch)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("23505", Refused),
        ("40001", errors.StoreBusy),
        ("55P03", errors.StoreBusy),
        ("53100", errors.DiskFull),
        ("42501", errors.StoreReadOnly),
        ("XX001", errors.Damaged),
        ("P0001", errors.StoreFailed),
    ],
)
def test_what_the_server_says_becomes_an_error_of_ours_and_nothing_is_written(url, opened, state, kind):
    engine = opened(url)
    branch = add_branch(engine)
    session = engine.transaction(lambda tx: tx.run("SELECT pg_backend_pid()"))
    fail = f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$"
    for last in (lambda tx: tx.do(fail), lambda tx: tx.run(fail), lambda tx: 1 / 0):
        with pytest.raises((kind, ZeroDivisionError)):
            engine.transaction(lambda tx, last=last: (tx.do("UPDATE branch SET depth = 7"), last(tx)))
    assert View(engine, PLAIN).branches() == [branch]
    assert engine.transaction(lambda tx: tx.run("SELECT pg_backend_pid()")) == session


@pytest.mark.parametrize("when", ["at once", "at the end"])
def test_what_is_sent_in_one_call_is_written_whole_or_not_at_all(url, opened, when):
    """It has no BEGIN and no COMMIT: the server makes one transaction of a round, and may refuse it at its end."""
    engine = opened(url)
    branch = add_branch(engine)
    session = engine.transaction(lambda tx: tx.run("SELECT pg_backend_pid()"))
    say(
        url,
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;"
        "CREATE CONSTRAINT TRIGGER no AFTER INSERT ON holdfast.floor"
        f" DEFERRABLE INITIALLY {'DEFERRED' if when == 'at the end' else 'IMMEDIATE'}"
        " FOR EACH ROW EXECUTE FUNCTION no()",
    )
    floor = ("INSERT INTO floor (name, number, sum) VALUES (?, ?, ?)", ("x", 1, b""))
    depth = ("UPDATE branch SET depth = ?", (7,))
    compared = ("UPDATE branch SET depth = CASE WHEN depth = ? THEN CAST(? AS bigint) END", (0, 7))
    for calls in ((depth, floor), (floor, depth), (floor, compared)):
        assert not engine.direct(*zip(*calls, strict=True))
        assert View(engine, PLAIN).branches() == [branch]
    assert engine.direct(*zip(depth, strict=True))
    assert engine.run("SELECT depth FROM branch") == [(7,)]
    assert engine.transaction(lambda tx: tx.run("SELECT pg_backend_pid()")) == session


def test_no_error_has_the_password_in_it(server, url, opened):
    server.execute("CREATE ROLE locked LOGIN PASSWORD 'right'")
    rules = server.folder / "data" / "pg_hba.conf"
    rules.write_text("local all locked scram-sha-256\n" + rules.read_text())
    server.execute("SELECT pg_reload_conf()")
    for place in (
        f"locked:{SECRET}@/postgres?host={server.folder}",
        f"locked@/postgres?host={server.folder}&password={SECRET}",
        f"postgres:{SECRET}@/none?host={server.folder}",
        f"me:{SECRET}@127.0.0.1:1/x",
        f"me:{SECRET}@127.0.0.1:1,127.0.0.1:2/x",
        f"me:{SECRET}@[::1/x",
        f"me:a@{SECRET}@host/x",
        f"me:1/{SECRET}@host/x",
        f"me:{SECRET}@/x?nonsense=1",
        f"me:{SECRET}@/x?schema=a.b",
        f"me:{SECRET}%zz@/x",
    ):
        with pytest.raises(errors.HoldfastError) as caught:
            opened(f"postgresql://{place}")
        error = caught.value
        shown = "".join(traceback.format_exception(type(error), error, None)) + repr(vars(error))
        assert "tr0ub4dor" not in shown, place
        assert error.message.isprintable()  # one line
        assert error.__cause__ is None
        assert error.__context__ is sys.exc_info()[1]  # what was being handled before, if anything was
    engine = opened(url.replace("postgres@", f"postgres:{SECRET}@"))
    assert engine.place == f"{url}&schema=holdfast"
    assert "tr0ub4dor" not in repr(vars(engine))


def test_nothing_acknowledged_is_lost_when_the_server_crashes(url, opened):
    engine = opened(url)
    branch, view, crashes = add_branch(engine), View(engine, PLAIN), []

    def crash() -> None:
        """The server starts over when one of its processes is killed."""
        with suppress(psycopg.OperationalError):
            pids = say(url, "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast'")
            os.kill(random.choice(pids)[0], signal.SIGKILL)

    def answered(question):
        """As soon as the server is there again; when it begins to start over is its own business."""
        while True:
            with suppress(errors.StoreFailed):
                return question()

    for number in range(200):
        if number % 60 == 30:
            crashes.append(threading.Thread(target=crash))
            crashes[-1].start()
        new, done = new_checkpoint(branch, label=str(number)), False
        while not done:
            try:
                branch, done = commit(engine, branch, new), True
            except errors.Unavailable:  # Unsure among them
                done = answered(lambda: view.find(new.id)) is not None  # noqa: B023 - asked at once
                branch = answered(lambda: view.branch_at(branch.b)) if done else branch  # noqa: B023
        answered(lambda: engine.acknowledge({branch.b: (branch.generation, branch.head)}))  # noqa: B023
    for thread in crashes:
        thread.join()
    view = View(answered(lambda: opened(url)), PLAIN)
    labels = answered(lambda: [point.manifest.label for point in view.walk(branch.head)])
    assert labels == [str(n) for n in reversed(range(200))]
    assert len(answered(view.checkpoints)) == 200


def test_a_server_that_has_gone_back_is_noticed_and_one_that_was_tidied_is_not(server, url, opened):
    name, first = database_of(url), opened(url)
    branch = commit(first, add_branch(first))
    first.close()
    server.execute(f'CREATE DATABASE "{name}_old" TEMPLATE "{name}"')
    engine, other = opened(url), opened(url)
    branch = commit(engine, branch)
    engine.acknowledge({branch.b: (branch.generation, branch.head)})
    end_sessions(url)
    assert View(engine, PLAIN).branches() == [branch]
    assert raise_generation(other, branch.b, branch.generation)  # somebody else has it now, and removes things
    other.transaction(lambda tx: tx.do("DELETE FROM loose"))
    end_sessions(url)
    assert View(engine, PLAIN).checkpoints() == []
    end_sessions(url)
    server.execute(f'ALTER DATABASE "{name}" RENAME TO "{name}_new"')
    server.execute(f'ALTER DATABASE "{name}_old" RENAME TO "{name}"')
    with pytest.raises(errors.StoreWentBack):
        commit(engine, branch)
    with pytest.raises(errors.Damaged):
        engine.run("SELECT 1")
    assert len(View(opened(url), PLAIN).checkpoints()) == 1  # who comes anew cannot know
    server.execute(f'DROP DATABASE "{name}_new" WITH (FORCE)')


def put_back(connection, schema: str) -> None:
    """As an older dump is: every row of a schema becomes what it was, under the connections that there are."""
    tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'older'").fetchall()
    for (table,) in tables:
        connection.execute(
            f'DELETE FROM "{schema}".{table}; INSERT INTO "{schema}".{table} SELECT * FROM older.{table}'
        )


@unsaved
def test_an_older_dump_that_is_put_back_is_noticed_under_living_connections(url, tmp_path):
    with psycopg.connect(url, autocommit=True) as admin, holdfast.open(url) as store:
        agent, other = store.agent("x"), store.agent("y")
        for one in (agent, other):
            one.state["n"] = 0
            one.checkpoint()
        admin.execute("CREATE SCHEMA older")
        for (table,) in admin.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'holdfast'").fetchall():
            if table != "lease":
                admin.execute(f"CREATE TABLE older.{table} AS TABLE holdfast.{table}")
        for number in range(1, 5):
            agent.state["n"] = number
            agent.checkpoint()
        assert store.verify().ok
        put_back(admin, "holdfast")
        other.state["n"] = 1
        other.checkpoint()  # nothing of its own was lost
        (problem,) = store.verify().problems
        assert "has gone back" in problem.detail
        agent.state["n"] = 5
        for use in (agent.log, lambda: store.export(tmp_path / "file", ["y"]), agent.checkpoint):
            with pytest.raises(errors.StoreWentBack, match="has gone back"):
                use()
    with holdfast.open(url) as store, store.agent("x") as agent:  # who comes anew cannot know
        assert agent.state["n"] == 0


def test_what_others_do_to_a_branch_is_not_taken_for_a_loss(url):
    with holdfast.open(url) as store:
        agent = store.agent("x")
        agent.state["n"] = 0
        agent.checkpoint()
        other = Store.opened(f"{url}&application_name=other")  # with connections of its own
        taken = other.agent("x", takeover=True)
        taken.state["n"] = 1
        taken.checkpoint()
        taken.close()
        assert store.verify().ok
        agent.state["n"] = 2
        with pytest.raises(errors.Fenced, match="another process has taken it over"):
            agent.checkpoint()
        other.remove("x")
        other.close()
        assert store.verify().ok
        with pytest.raises(errors.Fenced):
            agent.checkpoint()


def test_a_head_of_before_that_goes_while_somebody_begins_to_read_is_not_taken_for_a_loss(url, opened):
    """Whoever reads has to wait for who sweeps; meanwhile others move the branch, and let the checkpoint go."""
    store = holdfast.open(url)
    agent, sweeper, failed = store.agent("x"), opened(url), []

    def step(number):  # the second one brings no node of its own, which would wait, too
        agent.state["n"] = number
        agent.checkpoint()
        return agent._writer.firm.head

    def read():
        try:
            with store._db.moment():
                pass
        except errors.HoldfastError as error:
            failed.append(error)

    before = step(0)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with store, sweeper.sweeping() as alone:
        assert alone
        reader = threading.Thread(target=read)
        reader.start()
        while sweeper.run(waiting) != [(1,)]:
            assert reader.is_alive()
        step(1)
        store._db.change(lambda change: change.delete("loose", "n", [before]))
    reader.join()
    assert not failed
