"""A program for workers: jobs that write into a ledger of the world outside, and die as they are told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import holdfast

OUTSIDE = Path(os.environ.get("OUTSIDE", "/dev/null/none"))  # without the fixture ``outside``, nothing can be done


def done() -> list[list[str]]:
    """What was done outside: key, what, and when it began and ended, in seconds."""
    return [line.split() for line in OUTSIDE.read_text().splitlines()] if OUTSIDE.exists() else []


def freed(store: holdfast.Store) -> None:
    """Return when no other process holds anything of a store: a server notices in its own time that one was killed."""
    while any(one["pid"] != os.getpid() for one in store._db.leases.holders()):
        time.sleep(0.01)


def write(*words: object) -> None:
    with OUTSIDE.open("ab", 0) as ledger:  # one write, which the system does not divide
        ledger.write((" ".join(map(str, words)) + "\n").encode())


def find(effect: holdfast.Effect) -> object:
    return next((holdfast.Found(line[1]) for line in done() if line[0] == effect.key), holdfast.Absent())


@holdfast.tool(name="working.pay", probe=find)
def pay(what: str) -> str:
    began_s = time.monotonic()
    time.sleep(0.002)
    write(holdfast.effect().key, what, began_s, time.monotonic())
    return what


@holdfast.durable(name="working.job")
def job(agent: holdfast.Agent, what: str) -> list[str]:
    paid = [pay(f"{what}-a")]
    agent.state["paid"] = list(paid)
    agent.checkpoint("half")
    agent.sleep(0.01)
    return [*paid, pay(f"{what}-b")]


@holdfast.durable(name="working.later")
async def later(agent: holdfast.Agent, what: str) -> str:
    answer = await agent.wait_for("go")
    return f"{await pay.acall(what)} {answer}"


@holdfast.durable(name="working.pays_and_waits")
def pays_and_waits(agent: holdfast.Agent, what: str) -> str:
    pay(what)
    return f"{what} {agent.wait_for('go')}"


@holdfast.durable(name="working.deadly")
def deadly(agent: holdfast.Agent) -> None:
    write("deadly", os.getpid(), 0, 0)
    os.kill(os.getpid(), signal.SIGKILL)


@holdfast.durable(name="working.deadly_and_watched")
def deadly_and_watched(agent: holdfast.Agent) -> None:
    from holdfast.crash import hooks  # which others do without

    active = hooks._active
    while active is not None and active.sidecar is not None and not active.watch._told:
        time.sleep(0.01)  # until whoever watches knows whom to tell
    os.kill(os.getpid(), signal.SIGKILL)


@holdfast.durable(name="working.slow")
def slow(agent: holdfast.Agent, what: str) -> str:
    write("slow", what, 0, 0)
    time.sleep(60)
    return what


@holdfast.durable(name="working.wrong")
def wrong(agent: holdfast.Agent, what: str) -> str:
    raise ValueError(what)


@holdfast.durable(name="working.child")
def child(agent: holdfast.Agent, what: str, *, waits: bool) -> str:
    pay(f"{what}-a")
    if waits:
        agent.wait_for("go")
    return pay(f"{what}-b")


@holdfast.durable(name="working.parent")
def parent(agent: holdfast.Agent, what: str, *, waits: bool = False, dies: bool = False) -> list[str]:
    children = [agent.spawn(child, f"kid-{n}", f"{what}-{n}", waits=waits) for n in range(2)]
    if dies and not (OUTSIDE.parent / "died").exists():
        while len(done()) < len(children):  # both have begun
            time.sleep(0.001)
        (OUTSIDE.parent / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [one.join() for one in children]


holdfast.queue("narrow", concurrency=2)
holdfast.queue("slow", rate=(5, 0.5))
holdfast.queue("mail", concurrency=3, rate=(8, 0.5))
holdfast.queue("tenants", concurrency=4, partition_concurrency=1)
holdfast.queue("single", concurrency=1)


@holdfast.durable(name="working.once deadly", queue="single")
def once_deadly(agent: holdfast.Agent, what: str) -> str:
    if not (OUTSIDE.parent / "died").exists():
        (OUTSIDE.parent / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return what


@holdfast.durable(name="working.mail", queue="mail")
def mail(agent: holdfast.Agent, what: str) -> list[str]:
    """Says when it was entered, too: the first time is its beginning."""
    write("entered", what, time.time(), 0)
    agent.checkpoint("begun")
    paid = [pay(f"{what}-a")]
    agent.sleep(0.01)
    return [*paid, pay(f"{what}-b")]


@holdfast.durable(name="working.narrow", queue="narrow")
def narrow(agent: holdfast.Agent, what: str, seconds: float = 0.0) -> str:
    began_s = time.monotonic()
    time.sleep(seconds)
    write("narrow", what, began_s, time.monotonic())
    return what


@holdfast.durable(name="working.paced", queue="slow")
def paced(agent: holdfast.Agent, what: str) -> str:
    write("paced", what, time.monotonic(), 0)
    return what


@holdfast.durable(name="working.tenant", queue="tenants")
def tenant(agent: holdfast.Agent, whose: str, seconds: float = 0.0) -> str:
    began_s = time.monotonic()
    time.sleep(seconds)
    write(whose, whose, began_s, time.monotonic())
    return whose


@holdfast.durable(name="working.waiter", queue="narrow")
def waiter(agent: holdfast.Agent, what: str) -> str:
    return str(agent.wait_for("go"))
