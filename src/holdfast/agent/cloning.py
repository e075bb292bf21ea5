"""Cloning: a new agent with the whole history of another.

Owns what a clone's rows say about where it comes from. Copies no checkpoint: the clone sees its origin's rows up to
the moment of cloning (agent/line.py), and from then on the two go their own ways.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from holdfast.agent.journal import inherited
from holdfast.agent.line import Line
from holdfast.agent.names import check_name, name_key
from holdfast.codec.values import encode
from holdfast.errors import BadName
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, Event, clone_key
from holdfast.store.forgetting import Copy, Source
from holdfast.store.opening import now_us
from holdfast.store.reading import Reading

if TYPE_CHECKING:
    from holdfast.agent.store import Store


def clone(store: Store, source: AgentRow, new: str) -> AgentRow:
    """Add the agent ``new`` with everything that ``source`` can see."""
    check_name(new, "an agent")
    with store._catalog.forgetting() as forgetting:
        if store._catalog.agent(name_key(new)) is not None:
            raise BadName(f"there is an agent {new!r} already", hint="Choose another name.")
        line = Line(store, source)
        without = [line.forgotten.pairs, line.forgotten_events.pairs]
        return forgetting.clone(source, lambda found: _copy(line, without, new, found, forgetting.reading))


def _copy(line: Line, without: list[list[list[int]]], new: str, found: Source, reading: Reading) -> Copy:
    now = now_us()
    agent, body = line.agent, line.body
    # The nearest first. What an origin's own origins may show is fixed already.
    origins = [[agent.a, agent.uuid, found.n, found.e], *body.get("origins", ())]
    branches, lines, named = [], [], []
    for row in found.branches:
        old = body_of(row)
        kept = {key: value for key, value in old.items() if key not in {"base", "received"}}
        more = {"created": now, "from": row.head_id, "origins": [[row.b, found.n], *old.get("origins", ())]}
        key = uuid.uuid4().bytes
        branches.append(BranchRow(0, 0, key, row.key, encode({**kept, **more}), row.head, row.head_id, 0))
        start = inherited(reading.checkpoint(row.head)) if row.head else None
        lines.append(start)
        if start is not None:
            named.append([old["name"], start.origin, start.start])
    judged = [(reading.checkpoint(row.n).id, body_of(row)) for row in found.validities]
    said = {
        "what": "clone",
        "name": new,
        "of": body["name"],
        "branches": [[body_of(row)["name"], row.head_id] for row in found.branches],
        "tags": [[(tag := body_of(row))["name"], tag["at"]] for row in found.tags],
        "validity": [[identity, one["validity"], one["reason"]] for identity, one in judged],
    }
    if named:
        said["lines"] = named
    events = [Event(now, encode(said), clone_key(agent.a))]
    events += [Event(now, encode({"what": "origin"}), clone_key(a)) for a, *_ in body.get("origins", ())]
    about = {"name": new, "created": now, "origins": origins, "without": without}
    if line.over:
        about["over"] = [[n, nearest] for n, nearest in sorted(line.over.items())]
    made = AgentRow(0, uuid.uuid4().bytes, name_key(new), encode(about))
    return Copy(made, branches, lines, found.tags, found.validities, events)
