"""How a typed program sees the public API. Nothing here runs: mypy reads it, and a wrong type fails `make types`."""

from __future__ import annotations

from typing import Any, assert_type

import holdfast


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
    agent.checkpoint(lable="asked")  # type: ignore[call-arg]
    holdfast.open(durability="sometimes")  # type: ignore[arg-type]
