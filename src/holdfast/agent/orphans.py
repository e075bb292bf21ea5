"""Agents and branches of a damaged catalog whose own rows are lost, although other rows speak of them.

Owns what is derived of them, for repair alone: from checkpoints, branches and events. What always holds: an agent that
some row speaks of has a row and a branch afterwards, and one that was removed on purpose has none.
"""

from __future__ import annotations

import uuid
from typing import Any

from holdfast.agent.journal import inherited
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import name_key
from holdfast.agent.verify import Told
from holdfast.codec.values import encode
from holdfast.store import rescue
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, CheckpointRow, Event, EventRow, clone_key
from holdfast.store.embedded import Embedded
from holdfast.store.opening import now_us
from holdfast.store.ranges import Ranges


def name_again(catalog: Embedded) -> list[str]:
    """Give rows to agents and branches that have lost theirs. Returns which they were, for people."""
    return [*_agents(catalog), *_branches(catalog)]


def _agents(catalog: Embedded) -> list[str]:
    said: dict[int, EventRow] = {}  # agent -> the event that made it
    removed: set[int] = set()
    for event in catalog.events():
        what = body_of(event)["what"]
        if what in {"agent", "clone"}:
            said[event.a] = event
        elif what == "remove":
            removed.add(event.a)
    uuids: dict[int, list[bytes]] = {}  # agent -> whom its manifests name
    for row in catalog.checkpoints():
        named = uuids.setdefault(row.a, [])
        if (own := Manifest.decode(row.manifest).agent) not in named:
            named.append(own)
    branches = {catalog.branch_row(b).a for b, _ in catalog.scan("branch") if isinstance(b, int)}
    problems = []
    # An origin comes before its clones.
    for a in sorted((said.keys() | uuids.keys() | branches) - removed - {row.a for row in catalog.agents()}):
        made = said.get(a)
        name = str(body_of(made)["name"]) if made is not None else f"rescued-{a}"
        while catalog.agent(name_key(name)) is not None:
            name += "-rescued"
        *others, own = uuids.get(a) or [uuid.uuid4().bytes]
        body: dict[str, Any] = {"name": name, "created": made.at if made is not None else now_us()}
        if made is not None and body_of(made)["what"] == "clone":
            body |= _cloned(catalog, made, uuids)
        known = {one for _, one, _, _ in body.get("origins", ())}
        received = [[0, one, 0, 0] for one in others if one not in known]
        if received:
            body["origins"] = [*body.get("origins", ()), *received]
        rescue.add_rows(catalog, "agent", [(a, own, name_key(name), encode(body))])
        problems.append(f"agent {name}: its row was lost; its checkpoints are kept")
    return problems


def _cloned(catalog: Embedded, event: EventRow, uuids: dict[int, list[bytes]]) -> dict[str, Any]:
    """What the row of a clone says of its origins, as far as it can be told."""
    near = next((row for row in catalog.agents() if clone_key(row.a) == event.key), None)
    if near is None:
        return {}
    body = body_of(near)
    seen = [body_of(row).get("origins", ()) for row in catalog.branches(event.a)]
    n = max((pairs[0][1] for pairs in seen if pairs), default=0)
    e = event.e - 1  # it was the next one
    without = body.get("without", ((), ()))
    hidden, hidden_events, over = Ranges(without[0]), Ranges(without[1]), body.get("over", [])
    for forgot, told in catalog.forgotten(near.a):
        if forgot.e <= e:
            hidden, hidden_events = hidden | Ranges(told["n"]), hidden_events | Ranges(told["e"])
            over = told.get("over", [])
    # Its origin's row may have been lost as well, and got another uuid; the manifests know better.
    own = uuids.get(near.a, [near.uuid])[-1]
    found = {
        "origins": [[near.a, own, n, e], *body.get("origins", ())],
        "without": [hidden.pairs, hidden_events.pairs],
    }
    return {**found, "over": over} if over else found


def _branches(catalog: Embedded) -> list[str]:
    problems = []
    branches = {b for b, _ in catalog.scan("branch")}
    newest: dict[int, CheckpointRow] = {}
    for row in catalog.checkpoints():
        newest[row.b] = row
    spoken = [*branches, *newest, *(b for b, _ in catalog.scan("line")), *catalog.branches_with_records()]
    unused = max((b for b in spoken if isinstance(b, int)), default=0) + 1
    for agent in catalog.agents():  # an origin comes before its clones
        names = {str(body_of(row)["name"]) for row in catalog.branches(agent.a)}
        told = Told()
        for event in catalog.events(a=agent.a):
            told.add(event.a, body_of(event))
        for row in sorted(newest.values(), key=lambda row: row.n):
            if row.a == agent.a and row.b not in branches:
                name = "main" if "main" not in names else f"rescued-{row.b}"
                stood = told.head(agent.a, name, row.n, row.id)  # not on the newest one after a rollback
                head = next((one for one in catalog.checkpoints() if one.id == stood), row)
                _add_branch(catalog, agent, row.b, name, head)
                names.add(name)
                problems.append(f"branch {row.b}: its row was lost; its checkpoints are kept on {name!r}")
        for event in catalog.events(a=agent.a):
            body = body_of(event)
            for name, identity in body["branches"] if body["what"] == "clone" else ():
                began = next((row for row in catalog.checkpoints() if row.id == identity), None)
                if name in names or began is None:
                    continue
                stood = told.head(agent.a, name, 0, identity)
                head = next((one for one in catalog.checkpoints() if one.id == stood), began)
                _add_branch(catalog, agent, unused, name, head, identity)
                start = inherited(began)
                if start is not None:
                    line = (unused, start.origin, start.start, start.start, start.chain)
                    rescue.add_rows(catalog, "line", [line])
                names.add(name)
                unused += 1
                problems.append(f"branch {name!r}: its row was lost; it is what its history says")
        if not names:
            body = {"name": "main", "created": now_us(), "from": b""}
            added = Event(now_us(), encode({"what": "branch", "name": "main", "at": b""}))
            catalog.add_branch(
                agent.a,
                key=name_key("main"),
                body=encode(body),
                uuid=uuid.uuid4().bytes,
                head=0,
                head_id=b"",
                event=added,
            )
    return problems


def _add_branch(catalog: Embedded, agent: AgentRow, b: int, name: str, head: CheckpointRow, began: bytes = b"") -> None:
    body: dict[str, Any] = {"name": name, "created": Manifest.decode(head.manifest).time_us, "from": began}
    origins = body_of(agent).get("origins", ())
    if origins and origins[0][0]:  # a clone's branch shows those of its origin that had its name
        near, _, n, _ = origins[0]
        found = next((row for row in catalog.branches(near) if body_of(row)["name"] == name), None)
        if found is not None:
            body["origins"] = [[found.b, n], *body_of(found).get("origins", ())]
    rescue.add_rows(
        catalog, "branch", [(b, agent.a, uuid.uuid4().bytes, name_key(name), encode(body), head.n, head.id, 0)]
    )
