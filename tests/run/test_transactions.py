"""A transaction as a tool: what it wrote into tables of its own is committed with its record, or not at all."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from contextlib import suppress

import psycopg
import pytest

import holdfast
from holdfast.agent.store import Store
from holdfast.errors import BadOption, Fenced, InDoubt, RollbackBlocked, StoreClosed, StoreFailed, ToolFailed
from holdfast.run import records as rec
from holdfast.store import connection
from holdfast.store.database import open_database
from holdfast.store.postgres import SHARED
from tests import postgres

CALLS: list[str] = []
"""Each time that a function was really called."""


@pytest.fixture(scope="module")
def database(postgres_server):
    with postgres_server.database("transactions") as url:
        with psycopg.connect(url, autocommit=True) as session:
            session.execute("CREATE TABLE paid (who text, cents int CHECK (cents < 1000))")
            session.execute("CREATE TABLE once (who text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        yield url


SCHEMAS = itertools.count()


@pytest.fixture
def url(database, monkeypatch):
    """A new store beside the tables, which are empty."""
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # the tests' server does not flush
    with psycopg.connect(database, autocommit=True) as session:
        session.execute("TRUNCATE paid, once")
    CALLS.clear()
    return f"{database}&schema=store{next(SCHEMAS)}"


@pytest.fixture
def store(url):
    with holdfast.open(url) as store:
        yield store


@pytest.fixture
def agent(store):
    return store.agent("trip-7")


@pytest.fixture
def outside(database, url):
    """Another session: it sees only what is committed."""
    with psycopg.connect(database, autocommit=True) as session:
        yield lambda sql="SELECT who FROM paid ORDER BY who": [row[0] for row in session.execute(sql)]


def insert(who: str, cents: int = 1) -> psycopg.Connection:
    CALLS.append(who)
    connection = holdfast.effect().connection
    connection.execute("INSERT INTO paid VALUES (%s, %s)", (who, cents))
    return connection


def undo(effect):
    CALLS.append(f"undo {effect.args['who']}")


@holdfast.tool(name="shared_pay", effect="transaction")
def pay(who: str, cents: int = 1) -> int:
    return insert(who, cents).execute("SELECT count(*) FROM paid").fetchone()[0]


@holdfast.tool(name="shared_refundable", effect="transaction", compensate=undo)
def refundable(who: str) -> None:
    insert(who)


@holdfast.tool(name="shared_apay", effect="transaction")
async def apay(who: str) -> int:
    CALLS.append(who)
    connection = holdfast.effect().connection
    await connection.execute("INSERT INTO paid VALUES (%s, 1)", (who,))
    return (await (await connection.execute("SELECT 7")).fetchone())[0]


@holdfast.tool(name="shared_do", effect="transaction")
def do(what):
    """Whatever a test has in mind."""
    return DOING[what](insert(what))


DOING: dict[str, object] = {}


def doing(what):
    def note(function):
        DOING[what] = function
        return function

    return note


@holdfast.durable(name="shared_paying")
def paying(agent, *names):
    return [pay(name) for name in names]


# -- both or neither ---------------------------------------------------------------------------------------------------


def test_what_it_wrote_is_there_and_on_replay_it_is_answered_from_the_record(agent, outside):
    run = paying.options(id="1")
    assert agent.run(run, "a", "b") == [1, 2]
    assert agent.run(run, "a", "b") == [1, 2]
    assert outside() == CALLS == ["a", "b"]
    assert [(one.tool, one.kind, one.status, one.args) for one in agent.effects()] == [
        ("shared_pay", "transaction", "done", {"who": name, "cents": 1}) for name in "ab"
    ]
    records = [entry for entry in agent._host.ledger.records() if isinstance(entry[1], rec.Intent | rec.Done)]
    for (first, intent), (second, done) in zip(records[::2], records[1::2], strict=True):
        assert (second, done.of, done.tool, done.args) == (first + 1, first, "", None)
        assert intent.kind == "transaction"
    assert agent._store.verify().ok


def test_a_run_that_stopped_goes_on_behind_it(url, outside):
    @holdfast.durable
    def stops(agent):
        found = pay("a")
        if len(CALLS) == 1:
            CALLS.append("stop")
            raise KeyboardInterrupt
        return found, pay("b")

    with holdfast.open(url) as store, pytest.raises(KeyboardInterrupt):
        store.agent("x").run(stops)
    with holdfast.open(url) as store:
        assert store.agent("x").run(stops) == (1, 2)
    assert outside() == ["a", "b"]


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("raise", ZeroDivisionError),
        ("check", psycopg.errors.CheckViolation),
        ("deferred", psycopg.errors.UniqueViolation),
        ("swallowed", psycopg.errors.InFailedSqlTransaction),
        ("result", holdfast.errors.Unencodable),
    ],
)
def test_when_it_fails_nothing_is_left_and_it_may_be_called_again(agent, outside, what, cause):
    def swallow(connection):
        with pytest.raises(psycopg.Error):
            connection.execute("SELECT 1 / 0")

    @holdfast.tool(effect="transaction")
    def failing(good):
        connection = insert(what)
        if not good:
            {
                "raise": lambda: 1 / 0,
                "check": lambda: connection.execute("INSERT INTO paid VALUES ('x', 5000)"),
                "deferred": lambda: connection.execute("INSERT INTO once VALUES ('x'), ('x')"),
                "swallowed": lambda: swallow(connection),
                "result": int,
            }[what]()
        return threading.Lock() if what == "result" and not good else 1

    with agent:
        with pytest.raises(ToolFailed) as caught:
            failing(False)
        assert isinstance(caught.value.__cause__, cause)
        assert outside() == []
        assert failing(True) == 1
    assert outside() == [what]
    assert [one.status for one in agent.effects()] == ["failed", "done"]


def test_a_declared_answer_rolls_back_and_is_raised_again_on_replay(agent, outside):
    class SoldOut(Exception):
        pass

    @holdfast.tool(effect="transaction", raises=(SoldOut,))
    def buy(who):
        insert(who)
        raise SoldOut(who)

    @holdfast.durable
    def buying(agent):
        with pytest.raises(SoldOut, match="a"):
            buy("a")
        return len(CALLS)

    assert [agent.run(buying.options(id="1")) for _ in range(2)] == [1, 1]
    assert outside() == []


def test_a_savepoint_may_fail_alone(agent, outside):
    @doing("part")
    def part(connection):
        with pytest.raises(psycopg.errors.CheckViolation), connection.transaction():
            connection.cursor().executemany("INSERT INTO paid VALUES ('lost', %s)", [(1,), (5000,)])

    with agent:
        do("part")
    assert outside() == ["part"]


def test_a_large_result_is_kept_with_it_twice(agent, outside):
    """The second time its bytes are in the store already."""

    @doing("large")
    def large(connection):
        return bytes(range(256)) * 20_000

    for _ in range(2):
        with agent:
            assert len(do("large")) == 5_120_000
        agent.checkpoint()
    assert outside() == ["large"] * 2
    assert agent._store.verify().ok


def test_in_an_encrypted_store_and_one_that_shares_its_schema(postgres_server, database, url):
    postgres_server.execute("DO $$ BEGIN CREATE ROLE payer LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    with psycopg.connect(database, autocommit=True) as session:
        session.execute(f'GRANT CREATE ON DATABASE "{session.info.dbname}" TO payer')
        session.execute("GRANT ALL ON paid TO payer")
    place = url.replace("postgres@", "payer@") + "&shared=one"
    with holdfast.open(place, key=bytes(range(32))) as store, store.agent("x") as agent:
        assert [pay("a"), pay("b")] == [1, 2]
        assert [one.status for one in agent.effects()] == ["done"] * 2


# -- in every kind of program ------------------------------------------------------------------------------------------


def test_in_async_code_tasks_have_a_connection_each(agent, outside):
    @holdfast.durable
    async def both(agent):
        return await asyncio.gather(pay.acall("z"), *map(apay, names))

    names = [f"n{number:02}" for number in range(SHARED + 4)]  # more than can be under way at once
    run = both.options(id="1")
    first = asyncio.run(agent.arun(run))
    assert asyncio.run(agent.arun(run)) == first
    assert first[1:] == [7] * len(names)
    assert outside() == sorted(CALLS) == [*names, "z"]


def test_a_call_that_is_cancelled_is_rolled_back(agent, outside):
    started = threading.Event()

    @holdfast.tool(effect="transaction")
    async def slow(who):
        await apay.direct(who)
        started.set()
        await asyncio.sleep(60)

    @holdfast.tool(effect="transaction")
    def blocked(who):
        connection = insert(who)
        started.set()
        with pytest.raises((StoreClosed, psycopg.Error)):
            connection.execute("SELECT pg_sleep(60)")

    def begun(sleeps):
        started.wait()
        # A server that is told to stop before it has begun the statement executes it to its end.
        while sleeps and outside("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == [0]:
            time.sleep(0.01)

    async def cancel(call, *, sleeps):
        started.clear()
        with agent:
            task = asyncio.create_task(call)
            await asyncio.to_thread(begun, sleeps)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel(slow("a"), sleeps=False))
    asyncio.run(cancel(blocked.acall("b"), sleeps=True))
    assert outside() == []
    with agent:
        assert pay("c") == 1


def test_one_that_is_cancelled_while_it_is_committed_is_there_and_stops_nobody(agent, outside, database, url):
    """The branch's row is held by somebody else: the commit waits for that."""

    def until_somebody_waits():
        while outside("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'") == [0]:
            time.sleep(0.01)

    @holdfast.durable
    async def cancelling(agent):
        with psycopg.connect(database) as session:
            session.execute(f"SELECT 1 FROM {url.rpartition('=')[2]}.branch FOR UPDATE")
            task = asyncio.create_task(apay("a"))
            await asyncio.to_thread(until_somebody_waits)
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        return await apay("b")

    assert asyncio.run(asyncio.wait_for(agent.arun(cancelling), 60)) == 7
    assert outside() == ["a", "b"]


def test_one_that_is_interrupted_is_rolled_back(agent, outside):
    @doing("interrupt")
    def interrupt(connection):
        raise KeyboardInterrupt

    with agent:
        with pytest.raises(KeyboardInterrupt):
            do("interrupt")
        assert pay("a") == 1
    assert outside() == ["a"]


def test_items_of_a_batch_pay_once_each(store, outside):
    @holdfast.durable
    def item(who):
        return pay(who) > 0

    names = [f"n{number}" for number in range(12)]
    for _ in range(2):
        assert store.map(item, names, name="batch", workers=4) == [True] * 12
    assert sorted(CALLS) == outside() == sorted(names)


def test_what_a_plain_loop_did_after_its_checkpoint_answers_a_run(url, outside):
    with holdfast.open(url) as store, store.agent("x") as agent:
        agent.checkpoint()
        assert pay("a") == 1
    with holdfast.open(url) as store:
        assert store.agent("x").run(paying, "a", "b") == [1, 2]
    assert outside() == CALLS == ["a", "b"]


def test_inside_another_tool_it_is_recorded_by_itself(agent, outside):
    @holdfast.tool(effect="idempotent")
    def around(who):
        pay(who)
        if len(CALLS) == 1:
            CALLS.append("again")
            raise ConnectionError

    @holdfast.durable
    def calling(agent):
        around("a")

    with pytest.raises(ToolFailed):
        agent.run(calling)
    agent.run(calling)
    assert outside() == ["a"]


# -- what it sees, and what it leaves ----------------------------------------------------------------------------------


def test_it_sees_its_own_tables_by_their_names_and_chooses_its_isolation(agent):
    @doing("see")
    def see(connection):
        with pytest.raises(psycopg.errors.UndefinedTable), connection.transaction():
            connection.execute("SELECT * FROM branch")
        return [connection.execute(f"SHOW {name}").fetchone()[0] for name in ("search_path", "lock_timeout")]

    @holdfast.tool(effect="transaction")
    def serial():
        connection = holdfast.effect().connection
        connection.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        return connection.execute("SHOW transaction_isolation").fetchone()[0]

    with agent:
        assert do("see") == ['"$user", public', "0"]
        assert serial() == "serializable"


LEFT = (
    "SET search_path TO nowhere", "SET statement_timeout TO '1min'", "SET client_encoding TO 'LATIN1'", "LISTEN news",
    "CREATE TEMP TABLE paid (x int)", "SELECT pg_advisory_lock(77)", "DECLARE kept CURSOR WITH HOLD FOR SELECT 1",
    "SET ROLE pg_monitor",
)  # fmt: skip


def test_what_it_leaves_in_the_session_is_gone_and_stops_no_record(agent, outside):
    doing("leave")(lambda connection: [connection.execute(sql) for sql in LEFT] and None)
    doing("prepare")(lambda connection: connection.execute("PREPARE mine AS SELECT 1") and None)
    doing("forget")(lambda connection: connection.execute("DEALLOCATE ALL") and None)
    with agent:
        for _ in range(3):
            do("leave")
            assert outside("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77") == [0]
            do("prepare")
            do("forget")
            assert pay("é") > 0
    assert len(outside()) == 12
    assert {one.args["who"] for one in agent.effects() if one.tool == "shared_pay"} == {"é"}


@pytest.mark.parametrize("word", ["commit", "rollback", "close"])
def test_it_cannot_end_the_transaction_by_a_method(agent, outside, word):
    @doing("end")
    def end(connection):
        getattr(connection, word)()

    with agent, pytest.raises(ToolFailed, match=word) as caught:
        do("end")
    assert isinstance(caught.value.__cause__, BadOption)
    assert outside() == []


def test_one_that_says_commit_in_sql_is_in_doubt_and_not_repeated(url, outside):
    @doing("escape")
    def escape(connection):
        connection.execute("COMMIT")

    @holdfast.durable
    def escaping(agent):
        do("escape")

    for _ in range(2):
        with holdfast.open(url) as store, pytest.raises(InDoubt, match="ended the transaction itself"):
            store.agent("x").run(escaping)
    assert outside() == CALLS == ["escape"]


def test_the_connection_is_of_no_use_afterwards(agent, outside):
    kept = []
    doing("keep")(lambda connection: kept.extend([connection, connection.cursor()]))
    with agent:
        do("keep")
        for one in kept:
            with pytest.raises(StoreClosed):
                one.execute("INSERT INTO paid VALUES ('late', 1)")
        pay("z")
    assert outside() == ["keep", "z"]


@pytest.mark.parametrize("how", ["pipeline", "copy"])
def test_one_that_leaves_something_under_way_is_rolled_back(agent, outside, how):
    kept = []

    @doing("leave open")
    def leave_open(connection):
        kept.append(connection.pipeline() if how == "pipeline" else connection.cursor().copy("COPY paid FROM STDIN"))
        kept[0].__enter__()

    with agent:
        with pytest.raises(ToolFailed, match="still going on"):
            do("leave open")
        pay("a")
    with suppress(StoreClosed, psycopg.Error):
        kept[0].__exit__(None, None, None)
    assert outside() == ["a"]


# -- against others ----------------------------------------------------------------------------------------------------


def test_who_has_lost_the_branch_loses_what_the_tool_wrote(url, store, outside):
    @doing("taken")
    def taken(connection):
        other = Store(url, open_database(url), (False, "commit", False, False))  # as another process
        other.agent("x", takeover=True).close()
        other.close()

    with pytest.raises(Fenced), store.agent("x"):
        do("taken")
    assert outside() == []


def test_nobody_waits_for_the_branch_while_a_tool_is_at_work(store, outside):
    """What others commit to the same branch meanwhile is in front of it in the line."""
    agent = store.agent("x")

    @holdfast.tool
    def write(text):
        CALLS.append(text)

    go, done = threading.Event(), threading.Event()
    doing("beside")(lambda connection: None)
    doing("slow")(lambda connection: [go.set(), done.wait(60)])
    with agent:
        write("before")
        thread = threading.Thread(target=agent.context().run, args=(do, "slow"))
        thread.start()
        go.wait(60)
        write("meanwhile")
        do("beside")
        agent.state["x"] = 1
        agent.checkpoint()
        done.set()
        thread.join()
    assert outside() == ["beside", "slow"]
    assert [one.args.get("what", "write") for one in agent.effects()] == ["write", "write", "beside", "slow"]
    assert store.verify().ok


def test_one_that_the_server_ends_in_favour_of_another_is_called_again(agent, outside, database):
    @doing("deadlock")
    def deadlock(connection):
        if CALLS.count("deadlock") < 3:
            raise psycopg.errors.DeadlockDetected("as the server says it")

    @holdfast.tool(effect="transaction")
    def serial():
        connection = holdfast.effect().connection
        connection.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        total = connection.execute("SELECT sum(cents) FROM paid").fetchone()[0]
        CALLS.append("serial")
        if CALLS.count("serial") == 1:  # another one reads and writes the same meanwhile
            with psycopg.connect(database) as other:
                other.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                other.execute("SELECT sum(cents) FROM paid")
                other.execute("INSERT INTO paid VALUES ('other', 10)")
        connection.execute("INSERT INTO paid VALUES ('serial', %s)", (total,))
        return total

    with agent:
        do("deadlock")
        assert serial() == 11
    assert outside() == ["deadlock", "other", "serial"]
    assert CALLS.count("serial") == 2


def test_it_gives_up_when_others_are_always_first(agent, outside, monkeypatch):
    monkeypatch.setattr("holdfast.run.resilience.BACKOFF_S", 0.0001)

    @doing("never")
    def never(connection):
        raise psycopg.errors.SerializationFailure("again")

    with agent, pytest.raises(ToolFailed):
        do("never")
    assert CALLS == ["never"] * 5
    assert outside() == []


def test_after_timeout_s_it_is_rolled_back_and_its_locks_are_free(agent, outside):
    free = threading.Event()

    @holdfast.tool(effect="transaction", timeout_s=1.5)
    def slow(how):
        connection = insert("a")
        connection.execute("LOCK TABLE paid")
        if how == "server":
            connection.execute("SELECT pg_sleep(60)")
        free.wait(60)
        with pytest.raises(StoreClosed):
            connection.execute("SELECT 1")
        CALLS.append("closed")

    with agent:
        for how in ("server", "here"):
            with pytest.raises((ToolFailed, TimeoutError)):
                slow(how)
            assert pay(how) > 0
        free.set()
    assert outside() == ["here", "server"]
    for thread in [one for one in threading.enumerate() if one.name == "slow"]:
        thread.join()
    assert CALLS[-1] == "closed"


# -- the server goes away ----------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_in_the_middle_leaves_nothing_and_it_is_called_again(agent, outside):
    @doing("cut")
    def cut(connection):
        if CALLS.count("cut") == 1:
            outside(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 10000)")
            connection.execute("SELECT 1")
        if CALLS.count("cut") == 2:  # at its end, when nothing more of it is asked for
            outside(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 10000)")
        return CALLS.count("cut")

    with agent:
        assert do("cut") == 3
    assert outside() == ["cut"]


@pytest.mark.parametrize(("cut", "called"), [("before", 2), ("behind", 1)])
def test_when_the_answer_to_its_commit_is_lost_the_store_is_asked(
    postgres_server, url, outside, monkeypatch, cut, called
):
    monkeypatch.setattr(connection, "PREPARED", 0)  # so that COMMIT is seen
    proxy = postgres.Proxy(postgres_server.folder)
    doing("unsure")(lambda connection: setattr(proxy, "cut", cut if len(CALLS) == 1 else ""))
    place = f"postgresql://postgres@127.0.0.1:{proxy.port}/transactions?schema={url.rpartition('=')[2]}"
    with holdfast.open(place) as store, store.agent("x") as agent:
        do("unsure")
        assert [one.status for one in agent.effects()] == ["done"]
    assert outside() == ["unsure"]
    assert len(CALLS) == called


@pytest.mark.slow
def test_a_server_that_starts_over_in_the_middle_leaves_both_or_nothing(monkeypatch):
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")
    CALLS.clear()

    @holdfast.durable
    def restarted(agent):
        return [do("before"), do("crash"), do("after")]

    with postgres.server() as server:

        def crash(connection):
            if CALLS.count("crash") == 1:
                os.kill(connection.info.backend_pid, signal.SIGKILL)  # then the server ends all sessions, and recovers
                with suppress(psycopg.Error):
                    connection.execute("SELECT pg_sleep(60)")
            return "crash"

        doing("before")(lambda connection: "before")
        doing("crash")(crash)
        doing("after")(lambda connection: "after")
        with psycopg.connect(server.url(), autocommit=True) as session:
            session.execute("CREATE TABLE paid (who text, cents int)")
        for _ in range(100):
            with suppress(StoreFailed), holdfast.open(server.url()) as store:
                if store.agent("x").run(restarted.options(id="1")) == ["before", "crash", "after"]:
                    break
        with psycopg.connect(server.url()) as session:
            rows = [who for (who,) in session.execute("SELECT who FROM paid")]
    assert rows == ["before", "crash", "after"]


# -- going back --------------------------------------------------------------------------------------------------------


def test_a_rollback_undoes_it_as_any_write(agent, outside):
    agent.state["x"] = 1
    agent.checkpoint("before")
    with agent:
        refundable("a")
    agent.checkpoint("after")
    agent.rollback("before")
    assert CALLS == ["a", "undo a"]


def test_without_a_compensation_a_rollback_lists_it(agent, outside):
    agent.state["x"] = 1
    agent.checkpoint("before")
    with agent:
        pay("a")
    agent.checkpoint("after")
    with pytest.raises(RollbackBlocked, match="pay"):
        agent.rollback("before")
    assert outside() == ["a"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_is_not_possible_is_refused_and_nothing_is_called(tmp_path, agent, outside):
    with (
        pytest.raises(BadOption, match="PostgreSQL") as caught,
        holdfast.open(tmp_path / "s") as store,
        store.agent("x"),
    ):
        pay("a")
    assert "SQLite" in caught.value.message
    with pytest.raises(BadOption, match="no transaction here"):
        pay("a")
    CALLS.clear()
    for options in ({"probe": undo}, {"stream": True}):
        with pytest.raises(BadOption, match="no probe or stream"):
            holdfast.tool(effect="transaction", **options)(paying)
    assert outside() == CALLS == []


def test_no_other_tool_is_called_in_it(agent, outside):
    @holdfast.durable
    def running(agent, what):
        do(what)

    doing("nested")(lambda connection: pay("inner"))
    doing("checkpoint")(lambda connection: agent.checkpoint())
    doing("progress")(lambda connection: holdfast.effect().progress(1))
    for what in ("nested", "checkpoint", "progress"):
        with pytest.raises(ToolFailed, match="transaction"):
            agent.run(running, what)
    assert outside() == []
    assert "inner" not in CALLS
