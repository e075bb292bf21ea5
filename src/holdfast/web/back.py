"""Going back: the plan of a rollback as it will happen, effect by effect; and names for points: branches and tags.

Owns what has to be said before it is done. What always holds: a rollback is done only by whoever typed the agent's
name, and only as it was shown: where the branch has moved since, or another call was made, nothing is done. Nothing is
deleted.
"""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from hashlib import sha256
from typing import Any

from holdfast import Agent, RollbackPlan, Store
from holdfast.errors import BadOption, RollbackBlocked
from holdfast.schemas import rollback_json
from holdfast.web.agents import writer_of
from holdfast.web.asked import Asked
from holdfast.web.brief import brief, change_brief, some
from holdfast.web.timeline import heads_of, reader
from holdfast.web.words import address, shown, typed

EFFECTS = 500
"""Of each list of a plan."""
CHANGES = 100
FILES = 200
POINTS = 60
"""Checkpoints that are offered to go back to, and that are left behind."""


def back(store: Store, asked: Asked) -> dict[str, Any]:
    """Where an agent could go back to, and, with ``to``, what that would do: as ``rollback --dry-run --json``."""
    branch, to = asked.branch, asked.point("to")
    agent = reader(store, asked, branch)
    accept = _accepted(asked)
    heads = heads_of(store, agent)
    writers = [one for one in store.writers() if (one.get("agent"), one.get("branch")) == (agent.name, branch)]
    where = agent.name if branch == "main" else f"{agent.name}@{branch}"
    return {
        "agent": agent.name,
        "branch": branch,
        "branches": [{"name": name, "head": head} for head, names in heads.items() for name in names],
        "tags": [{"name": name, "checkpoint": one.to_json()} for name, one in list(agent.tags().items())[:200]],
        "points": [one.to_json() for one in agent.log(POINTS)[1:]],
        "head": agent.head.to_json() if agent.head is not None else None,
        "writer": writer_of(writers[0]) if writers else None,
        "to": to,
        "accept": accept,
        "plan": _plan(agent, to, accept) if to else None,
        "command": typed(store.place, "rollback", where, "--to", to or "REV", "--load", "PROGRAM"),
    }


def _plan(agent: Agent, to: str, accept: list[str]) -> dict[str, Any]:
    plan = agent.plan_rollback(to, accept=accept)
    told: dict[str, Any] = rollback_json(agent, plan, [], done=False)
    for name, found in (
        ("undo", plan.undo), ("blocked", plan.blocked), ("accepted", plan.accepted), ("undone", plan.undone),
    ):  # fmt: skip
        told |= some(name, list(zip(told[name], found, strict=True)), EFFECTS, _planned)
    return {
        **told,
        "digest": _digest(plan),
        **some("abandons", told["abandons"], POINTS, brief),
        **some("files", told["files"], FILES, brief),
        **some("changes", plan.diff.changes, CHANGES, partial(change_brief, characters=600)),
    }


def _accepted(asked: Asked) -> list[str]:
    """The calls that are to stay as they are."""
    return [one for one in asked.text("accept", "", most=20 * EFFECTS).split(",") if one]


def _digest(plan: RollbackPlan) -> str:
    """The same for plans that do the same. A call moves no head, so that the head alone does not tell."""
    told = plan.to_json()
    does = {name: [one["id"] for one in told[name]] for name in ("undo", "blocked", "accepted", "undone")}
    does |= {"children": told["children"], "files": [one.to_json() for one in plan.diff.files]}
    return sha256(json.dumps([plan.target.id, does], sort_keys=True).encode()).hexdigest()


def _planned(one: tuple[dict[str, Any], Any]) -> dict[str, Any]:
    told, planned = one
    return {**told, "args": None if planned.effect.let_go else brief(planned.effect.args, 200)}


def rollback(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - the house has said who acts
    """Go back, if everything is as it was shown."""
    name, branch = asked.agent, asked.branch
    to = asked.point("to", None)
    if asked.text("typed", "", most=8_000) not in {name, shown(name)}:  # nobody can type what nobody sees
        raise BadOption(
            "the name that was typed is not the agent's", hint=f"Type {name} to go back. Nothing was changed."
        )
    accept = _accepted(asked)
    with closing(store.agent(name, branch=branch, create=False)) as handle:
        head = handle.head
        plan = handle.plan_rollback(to, accept=accept)
        if head is None or head.id != asked.text("head", most=80) or _digest(plan) != asked.text("plan", most=80):
            raise BadOption(
                "something was done since this plan was shown", hint="Look at the new plan. Nothing was changed."
            )
        if plan.blocked:
            raise RollbackBlocked(f"{len(plan.blocked)} effects stand in the way; nothing was changed")
        plan.apply()
    return address("/timeline", agent=name)


def branch(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - as above
    """Begin a branch."""
    name = asked.agent
    store.branch(name, asked.text("name", most=200), asked.point("at") or None)
    return address("/back", agent=name)


def tag(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - as above
    """Name a checkpoint, or take a name away."""
    name, given = asked.agent, asked.text("name", most=200)
    if asked.flag("remove"):
        store.untag(name, given)
    else:
        store.tag(name, given, asked.point("at") or None)
    return address("/back", agent=name)
