"""How a typed program sees the public API. Nothing here runs: mypy reads it, and a wrong type fails `make types`."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime
from typing import Any, assert_type

import httpx
import httpx2

import holdfast
from holdfast.contrib import otel
from holdfast.contrib.http import AsyncTransport, Transport


def a_first_program() -> None:
    with holdfast.open("somewhere", durability="batched") as store:
        assert_type(store, holdfast.Store)
        agent = store.agent("trip-7", wait_s=1.5)
        assert_type(agent, holdfast.Agent)
        agent.state["messages"] = [{"role": "user", "content": "Lisbon in May"}]
        asked = agent.checkpoint("asked")
        assert_type(asked, holdfast.Checkpoint)
        assert_type(agent.head, holdfast.Checkpoint | None)
        assert_type(agent.rollback(asked), holdfast.Checkpoint)
        assert_type(agent.rollback("asked~2"), holdfast.Checkpoint)
        assert_type(agent.branch("try-b", at=asked), holdfast.Agent)
        assert_type(agent.log(limit=10), list[holdfast.Checkpoint])
        assert_type(agent.undo(), holdfast.Checkpoint)


def looking_back(store: holdfast.Store, agent: holdfast.Agent) -> None:
    found = agent.bisect(lambda state: state["budget"] >= 0, good="asked", repeats=3)
    assert_type(found, holdfast.Bisection)
    assert_type(found.checkpoint, holdfast.Checkpoint | None)
    assert_type(agent.blame("messages[3]").old, Any)
    assert_type(store.diff("trip-7@asked", agent.at()), holdfast.Comparison)
    assert_type(agent.invariant("budget", range=(0, None), then="refuse"), holdfast.Invariant)
    assert_type(agent.check(since="asked"), holdfast.travel.Violations)
    assert_type(agent.watch("budget", when="new < 0", then=lambda hit: hit.new), holdfast.Watchpoint)


def another_place() -> None:
    with holdfast.open("somewhere") as store, holdfast.open("postgresql:///agents", objects="s3://bucket/p") as server:
        assert_type(store.backup(server), holdfast.TransferReport)
        assert_type(store.move(server), holdfast.TransferReport)
        assert_type(server.place, str)
        assert_type(store.remove("trip-7", dry_run=True, with_copies=True).copies, list[str])
        assert_type(holdfast.keys.init("new", "some words", objects="bulk"), str)


@holdfast.tool
def book(flight: str, seats: int = 1) -> dict[str, str]:
    assert_type(holdfast.effect(), holdfast.Effect)
    assert_type(holdfast.current().state["seats"], Any)
    return {"flight": flight, "seats": str(seats)}


def found(effect: holdfast.Effect) -> holdfast.Found | holdfast.Absent | holdfast.Unknown:
    return holdfast.Found(effect.key) if effect.status == "in doubt" else holdfast.Absent()


@holdfast.tool(effect="idempotent", probe=found, volatile=("request",), breaker=holdfast.Breaker(failures=3))
async def pay(amount: float, request: str) -> int:
    return round(amount)


@holdfast.durable
def travel(agent: holdfast.Agent, city: str) -> list[str]:
    with agent.phase("plan"):
        assert_type(book(city), dict[str, str])
        assert_type(book.direct(city, seats=2), dict[str, str])
        assert_type(book.acall(city, seats=2), Awaitable[dict[str, str]])
        assert_type(agent.stack, list[str])
    return [city]


@holdfast.durable(name="settle", strict=True)
async def settle(agent: holdfast.Agent, amount: float) -> int:
    async with agent.phase("pay"):
        return await pay(amount, str(agent.uuid()))


@holdfast.durable(every="0 8 * * 1-5", zone="Europe/Lisbon", missed="each", overlap="queue")
def report(agent: holdfast.Agent, time: datetime) -> str:
    return f"{agent.name} {time}"


async def saved(store: holdfast.Store) -> None:
    agent = store.agent("trip-7", when=holdfast.When(every_s=30, before="write", at_phase=True, adaptive=True))
    assert_type(agent.when, holdfast.When | None)
    with agent.atomic():
        assert_type(agent.step(), holdfast.Checkpoint | None)
    assert_type(await agent.astep(), holdfast.Checkpoint | None)
    assert_type(agent.gate("validated", bool, limit_s=5.0), holdfast.Checkpoint | None)
    assert_type(await agent.agate("validated", bool, failing="rollback"), holdfast.Checkpoint | None)
    assert_type(store.costs("trip-7"), holdfast.Costs)


async def running(store: holdfast.Store, agent: holdfast.Agent) -> None:
    with agent:
        assert_type(agent.run(travel.options(id="first"), "Lisbon"), list[str])
    async with store.agent("other") as other:
        assert_type(await other.arun(settle, 12.5), int)
    assert_type(agent.effects(since="asked"), list[holdfast.Effect])
    assert_type(agent.runs(), list[holdfast.RunInfo])
    assert_type(travel.options(id="7", wait=False)(agent, "Lisbon"), list[str])
    agent.cancel("7")
    assert_type(store.due(), list[holdfast.RunInfo])
    assert_type(store.schedules(), list[holdfast.ScheduleInfo])
    assert_type(store.adopt("a"), list[holdfast.RunInfo])
    assert_type(agent.resolve("a1b2", "done", result=7), holdfast.Effect)
    assert_type(agent.plan_rollback("asked", accept=["book"]), holdfast.RollbackPlan)
    assert_type(agent.plan_fork("7", at="plan:0").apply("other"), holdfast.RunInfo)
    assert_type(await agent.afork("7", at="3", branch="other"), holdfast.RunInfo)
    with agent.resource("log", open=open_log, describe=name_of) as log:
        assert_type(log, list[str])


def open_log(description: object) -> list[str]:
    return [str(description)]


def name_of(log: list[str]) -> str:
    return log[0]


async def waiting(agent: holdfast.Agent) -> None:
    assert_type(await agent.acheckpoint("answered"), holdfast.Checkpoint)


def reading(checkpoint: holdfast.Checkpoint) -> None:
    assert_type(checkpoint.id, str)
    assert_type(checkpoint.label, str)
    assert_type(checkpoint.depth, int)


def handling(store: holdfast.Store) -> dict[str, Any]:
    try:
        return dict(store.agent("trip-7", create=False).state)
    except holdfast.errors.AgentBusy as busy:
        return {"kind": busy.kind, "holder": busy.holder, "hint": busy.hint}


def mistakes_are_found(store: holdfast.Store, agent: holdfast.Agent) -> None:
    store.agent(7)  # type: ignore[arg-type]
    agent.checkpoint(lable="asked")  # type: ignore[call-overload]
    holdfast.open(durability="sometimes")  # type: ignore[arg-type]
    book(seats="two", flight="TP1")  # type: ignore[arg-type]
    agent.resolve("a1b2", "perhaps")  # type: ignore[arg-type]
    travel.options(identity="7")  # type: ignore[call-arg]
    holdfast.tool(effect="maybe")  # type: ignore[call-overload]


def requests_of_tools() -> None:
    httpx.Client(transport=Transport(httpx.HTTPTransport()))
    httpx2.Client(transport=Transport(httpx2.HTTPTransport(), header="PayPal-Request-Id"))
    httpx.AsyncClient(transport=AsyncTransport(httpx.AsyncHTTPTransport()))
    httpx2.AsyncClient(transport=AsyncTransport(httpx2.AsyncHTTPTransport()))
    otel.install()
