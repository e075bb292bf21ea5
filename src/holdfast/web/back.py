"""Going back: the plan of a rollback as it will happen, effect by effect; and names for points: branches and tags.

Owns what has to be said before it is done. What always holds: a rollback is done only by whoever typed the agent's
name, and only as it was shown: where the branch has moved since, or another call was made, nothing is done. Nothing is
deleted.
"""

from __future__ import annotations

import json
from contextlib import closing
from hashlib import sha256
from typing import Any

from holdfast import Agent, RollbackPlan, Store
from holdfast.errors import BadOption, RollbackBlocked, command
from holdfast.schemas import rollback_json
from holdfast.web.asked import Asked
from holdfast.web.brief import brief, change_brief
from holdfast.web.timeline import heads_of, reader
from holdfast.web.words import address

CHANGES = 100
POINTS = 60
"""Checkpoints that are offered to go back to."""


def back(store: Store, asked: Asked) -> dict[str, Any]:
    """Where an agent could go back to, and, with ``to``, what that would do: as ``rollback --dry-run --json``."""
    branch, to = asked.text("branch", "main", most=400), asked.text("to", "", most=1_200)
    agent = reader(store, asked, branch)
    accept = [one for one in asked.text("accept", "", most=4_000).split(",") if one]
    heads = heads_of(store, agent)
    where = agent.name if branch == "main" else f"{agent.name}@{branch}"
    return {
        "agent": agent.name,
        "branch": branch,
        "branches": [{"name": name, "head": head} for head, names in heads.items() for name in names],
        "tags": [{"name": name, "checkpoint": one.to_json()} for name, one in list(agent.tags().items())[:200]],
        "points": [one.to_json() for one in agent.log(POINTS)[1:]],
        "head": agent.head.to_json() if agent.head is not None else None,
        "to": to,
        "accept": accept,
        "plan": _plan(agent, to, accept) if to else None,
        "command": command("rollback", where, "--to", to or "REV", "--load", "PROGRAM"),
    }


def _plan(agent: Agent, to: str, accept: list[str]) -> dict[str, Any]:
    plan = agent.plan_rollback(to, accept=accept)
    told = rollback_json(agent, plan, [], done=False)
    abandons = told.pop("abandons")
    listed = {
        name: [{**one, "args": _args(planned.effect)} for one, planned in zip(told[name], found, strict=True)]
        for name, found in (
            ("undo", plan.undo), ("blocked", plan.blocked), ("accepted", plan.accepted), ("undone", plan.undone),
        )
    }  # fmt: skip
    return {
        **told,
        **listed,
        "digest": _digest(plan),
        "abandons": abandons[:POINTS],
        "more_abandons": max(0, len(abandons) - POINTS),
        "files": [brief(one) for one in told["files"][:CHANGES]],
        "more_files": max(0, len(told["files"]) - CHANGES),
        "changes": [change_brief(one, 600) for one in plan.diff.changes[:CHANGES]],
        "more_changes": max(0, len(plan.diff.changes) - CHANGES),
    }


def _digest(plan: RollbackPlan) -> str:
    """The same for plans that do the same. A call moves no head, so that the head alone does not tell."""
    told = plan.to_json()
    does = {name: [one["id"] for one in told[name]] for name in ("undo", "blocked", "accepted", "undone")}
    does |= {"children": told["children"], "files": [one.to_json() for one in plan.diff.files]}
    return sha256(json.dumps([plan.target.id, does], sort_keys=True).encode()).hexdigest()


def _args(effect: Any) -> Any:
    return None if effect.let_go else brief(effect.args, 200)


def rollback(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - the house has said who acts
    """Go back, if everything is as it was shown."""
    name, branch = asked.text("agent", most=1_024), asked.text("branch", "main", most=400)
    to = asked.text("to", most=1_200)
    if asked.text("typed", "", most=1_024) != name:
        raise BadOption(
            "the name that was typed is not the agent's", hint=f"Type {name} to go back. Nothing was changed."
        )
    accept = [one for one in asked.text("accept", "", most=4_000).split(",") if one]
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
    name = asked.text("agent", most=1_024)
    store.branch(name, asked.text("name", most=200), asked.text("at", "", most=1_200) or None)
    return address("/back", agent=name)


def tag(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - as above
    """Name a checkpoint, or take a name away."""
    name, given = asked.text("agent", most=1_024), asked.text("name", most=200)
    if asked.flag("remove"):
        store.untag(name, given)
    else:
        store.tag(name, given, asked.text("at", "", most=1_200) or None)
    return address("/back", agent=name)
