"""Writers on PostgreSQL: they are killed, their sessions are ended, and the server itself crashes and starts over.

What was acknowledged is there, all else is whole or absent, and whoever comes next can write. The server is a real one
that flushes; when one of its processes is killed it ends all sessions in the middle of whatever they do, and recovers
from its own log.
"""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from contextlib import suppress

import psycopg

import holdfast
from holdfast.errors import HoldfastError, StoreFailed
from tests import postgres
from tests.faults.campaign import Skip, Task, campaign, quiet
from tests.faults.kill_child import SMALL
from tests.faults.kills import ENOUGH_CHECKPOINTS, PACE_MAX, VERIFY_EVERY, WRITER, lived, look
from tests.limits import limits
from tests.lives import Troupe

LIFE_S, PAYING_S = 0.1, 0.2
LIVES_PER_STORE = 100
LIVES_PER_AGENT = 20
# Of ten lives so many end with the writer alone; then its sessions are ended first, or the server crashes.
KILLED, CUT = 6, 8
ENDED = ("StoreFailed", "Fenced", "Unsure", "StorePoisoned", "StoreBusy", "AgentBusy")
"""What a writer may say whose server went away."""


@campaign("servers", "PostgreSQL: writers killed, sessions cut, server crashed", "lives", ci=12, soak=2_000)
def servers(task: Task) -> None:
    """The same writer as in the kills, on a server."""
    _on_a_server(task, _Lives)


@campaign("transactions", "Transactions as tools: killed, cut, server crashed", "lives", ci=15, soak=2_000)
def transactions(task: Task) -> None:
    """A run that pays by tools whose transaction is that of their record; the payments are counted apart."""
    _on_a_server(task, _Payments)


def _on_a_server(task: Task, kind: type[_Lives]) -> None:
    chance = random.Random(77 + task.seed)
    try:
        with Troupe(WRITER) as troupe, postgres.server(fsync="on") as server, limits(SMALL), quiet():
            while not task.over:
                with server.database(f"lives_{uuid.uuid4().hex}") as url:
                    kind(task, troupe, chance, url).run()
    except postgres.NoServer as reason:
        raise Skip(str(reason)) from reason


class _Lives:
    """One store, in which writers live one after the other."""

    def __init__(self, task: Task, troupe: Troupe, chance: random.Random, url: str) -> None:
        self._task, self._troupe, self._chance, self._url = task, troupe, chance, url
        self._pace = 1.0
        self._known: dict[str, str] = {}  # id -> digest of what was acknowledged
        holdfast.open(url).close()

    def run(self) -> None:
        task = self._task
        for number in range(LIVES_PER_STORE):
            if task.over:
                break
            if number and number % 10 == 0 and len(self._known) < ENOUGH_CHECKPOINTS * number:
                self._pace = min(self._pace * 1.25, PACE_MAX)
            self._life(f"agent-{number // LIVES_PER_AGENT}", number)
        with holdfast.open(self._url, readonly=True) as store:
            report = store.verify()
            agents = [store.agent(info.name, readonly=True) for info in store.agents()]
            digests = {c.id: c.digest for agent in agents for c in agent.log(all=True)}
        if not report.ok:
            task.broke(str(report))
        for id, digest in self._known.items():
            if digests.get(id) != digest:
                task.broke(f"checkpoint {id[:12]} was acknowledged and is not there")
        task.details["acknowledged checkpoints"] += len(self._known)
        task.details["others, whole"] += len(digests) - len(self._known)

    def _life(self, name: str, number: int) -> None:
        task, chance = self._task, self._chance
        fate = chance.randrange(10)
        what, strike = ("killed", lambda: None) if fate < KILLED else ("sessions cut", self._cut)
        if fate >= CUT:
            what, strike = "server crashed", self._crash
        expected: dict[str, str] = {}
        life_s = chance.uniform(0, LIFE_S * self._pace)
        durability = "batched" if number % 5 == 4 else "commit"
        job = {"path": self._url, "name": name, "seed": chance.getrandbits(40), "durability": durability}
        for word, *rest in lived(self._troupe, None, life_s, strike, **job):
            if word in {"open", "made", "moved"}:
                expected[rest[0]] = rest[1]
            elif fate < KILLED or not " ".join(rest).startswith(ENDED):
                task.broke(f"life {task.done}, {what}: {word} {' '.join(rest)}")
        self._known |= expected
        try:
            self._until_it_answers()
            look(self._url, name, expected, chance, everything=number % VERIFY_EVERY == VERIFY_EVERY - 1)
        except (AssertionError, HoldfastError) as error:
            task.broke(f"life {task.done}, {what}: {error!r}")
        task.tried(what)

    def _sessions(self) -> list[int]:
        with psycopg.connect(self._url, autocommit=True) as session:
            asked = (
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast' AND datname = current_database()"
            )
            return [pid for (pid,) in session.execute(asked)]

    def _cut(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as session:
            for pid in self._sessions():
                session.execute("SELECT pg_terminate_backend(%s)", (pid,))
        time.sleep(self._chance.uniform(0, LIFE_S))  # so long it may try to go on

    def _crash(self) -> None:
        with (
            suppress(psycopg.OperationalError, ProcessLookupError, IndexError),
            psycopg.connect(self._url, autocommit=True) as session,
        ):
            os.kill(self._chance.choice(self._sessions()), signal.SIGKILL)
            deadline = time.monotonic() + postgres.START_TIMEOUT_S
            while time.monotonic() < deadline:  # until the server has noticed, and ends this session, too
                session.execute("SELECT 1")
        time.sleep(self._chance.uniform(0, LIFE_S))

    def _until_it_answers(self) -> None:
        deadline = time.monotonic() + postgres.START_TIMEOUT_S
        while True:
            try:
                holdfast.open(self._url, readonly=True).close()
                return
            except StoreFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


class _Payments(_Lives):
    """One database, in which runs pay and are killed. What is recorded and what was paid must be the same."""

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as session:
            session.execute("CREATE TABLE paid (who text, n int)")  # nothing keeps one from being there twice
        for number in range(LIVES_PER_STORE):
            if self._task.over:
                break
            if number and number % 10 == 0 and len(self._known) < ENOUGH_CHECKPOINTS * number:
                self._pace = min(self._pace * 1.25, PACE_MAX)
            self._life(f"{'plain' if number % 3 else 'later'}-{number // LIVES_PER_AGENT}", number)
        self._task.details["payments"] += len(self._known)

    def _life(self, name: str, number: int) -> None:
        task, chance = self._task, self._chance
        fate = chance.randrange(10)
        what, strike = ("killed", lambda: None) if fate < KILLED else ("sessions cut", self._cut)
        if fate >= CUT:
            what, strike = "server crashed", self._crash
        told: set[int] = set()
        life_s = chance.uniform(0, PAYING_S * self._pace)
        job = {"path": self._url, "name": name, "seed": number, "durability": "transaction"}
        for word, *rest in lived(self._troupe, None, life_s, strike, **job):
            if word == "made":
                told.add(int(rest[0]))
            elif word == "error" and (fate < KILLED or not " ".join(rest).startswith(ENDED)):
                task.broke(f"life {task.done}, {what}: {' '.join(rest)}")
        try:
            self._until_it_answers()
            try:
                self._compare(name, told)
            except psycopg.OperationalError:  # that a session of it was killed, the server has noticed only now
                self._until_it_answers()
                self._compare(name, told)
        except (AssertionError, HoldfastError) as error:
            task.broke(f"life {task.done}, {what}: {error!r}")
        task.tried(what)

    def _compare(self, name: str, told: set[int]) -> None:
        deadline = time.monotonic() + postgres.START_TIMEOUT_S
        while self._sessions() and time.monotonic() < deadline:
            time.sleep(0.01)  # what was sent by one that was killed may still be committed
        with psycopg.connect(self._url) as session:
            paid = [n for (n,) in session.execute("SELECT n FROM paid WHERE who = %s", (name,))]
        with holdfast.open(self._url, readonly=True) as store:
            known = name in {info.name for info in store.agents()}
            effects = store.agent(name, readonly=True).effects() if known else []
            done = [one.args["n"] for one in effects if one.status == "done"]
        assert sorted(done) == sorted(paid), "what is recorded is not what was paid"
        assert len(set(paid)) == len(paid), "something was paid twice"
        assert told <= set(paid), "a payment that was told is not there"
        assert {one.status for one in effects} <= {"done", "failed"}, "something is in doubt"
        self._known |= {f"{name} {n}": name for n in paid}
