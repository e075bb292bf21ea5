"""What people call a checkpoint by, or think of it: agents and copies of them, branches, tags, judgements.

Owns how each of these is made, as a part of a transaction. None of it needs the writer of a branch, so that it works
while another process writes the agent. What always holds: a name is a branch's or a tag's, never both; whatever is made
is an entry of the log, too, in the same transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from holdfast.agent import history
from holdfast.agent.graph import Graph
from holdfast.agent.names import MAIN, check_name, check_new
from holdfast.errors import BadName, BadOption, UnknownRevision
from holdfast.store.catalog import View
from holdfast.store.changes import Change, NewRecord, now_us
from holdfast.store.engine import Refused
from holdfast.store.rows import BEGINNING, Agent, Body, Branch, End, Point, Tag

Inherited = Callable[[View, int, Point | None], End]
"""Gives the records that begin the line of what begins at a checkpoint of a branch."""


def new_agent(change: Change, name: str, branch: bytes = b"") -> tuple[Agent, Branch]:
    """Add an agent, with its first branch, which has the uuid ``branch``, if one is given."""
    now = now_us()
    made = change.add_agent(name, uuid.uuid4().bytes, {"created": now})
    body = {"created": now, "from": b""}
    return made, change.add_branch(made.a, MAIN, branch or uuid.uuid4().bytes, body, None, BEGINNING)


def copy(change: Change, source: Agent, new: str, inherited: Inherited) -> None:
    """Add an agent that begins with the whole history of another. No state is copied."""
    if change.agent(new) is not None:
        raise BadName(f"there is an agent {new!r} already", hint="Choose another name.")
    now = now_us()
    graph = Graph(change, change.agent_at(source.a))
    left = [change.point(n).id for n in graph.left]
    origins = [[source.uuid, now, source.a], *source.body.get("origins", ())]
    about = {"created": now, "of": source.uuid, "origins": origins}
    made = change.add_agent(new, uuid.uuid4().bytes, about)
    change.say(made.a, {"what": "clone", "name": new, "of": source.name, "left": left})
    for branch in graph.branches:
        point = change.point(branch.head) if branch.head else None
        body = {key: value for key, value in branch.body.items() if key not in {"arriving", "own", "fork"}}
        # What the head speaks of, and not what its writer did since. But whoever looks up checkpoints by keys
        # goes on inside of a step, in the copy as well: what that has done must not be done again.
        keyed = point is not None and point.row.key
        end = branch.end if keyed else inherited(change, branch.b, point)
        copied = [branch.b, *branch.body.get("origins", ())]
        body |= {"created": now, "from": branch.id, "start": end.records, "origins": copied}
        change.add_branch(made.a, branch.name, uuid.uuid4().bytes, body, point, end)
    for tag in change.tags(source.a):
        change.set_tag(tag._replace(a=made.a))
        change.say(made.a, {"what": "tag", "name": tag.name, "at": tag.id})
    for n, judged in change.validities(source.a).items():
        change.set_validity(made.a, n, judged)
        change.say(made.a, {"what": "validity", **judged, "at": change.point(n).id})


def put_branch(
    change: Change,
    agent: Agent,
    new: str,
    target: Point | None,
    more: Body,
    inherited: Inherited,
    *,
    end: End | None = None,
    lost: Sequence[NewRecord] = (),
) -> Branch:
    """A branch that begins at ``target``, or, without one, with nothing; ``more`` is kept in its body.

    It inherits the records before ``target``, unless ``end`` says otherwise. ``lost`` come behind these.
    """
    check_name(new, "a branch", but="@")
    body = {"created": now_us(), "from": target.id if target is not None else b"", **more}
    if change.branch(agent.a, new) is not None or change.tag(agent.a, new) is not None:
        raise BadName(f"{new!r} is already a branch or tag of this agent", hint="Choose another name.")
    point = change.find(target.id) if target is not None else None
    if target is not None and point is None:
        raise Refused("the checkpoint was forgotten meanwhile")
    inherits = end if end is not None else inherited(change, point.row.b if point is not None else 0, point)
    about = {**body, "start": inherits.records}
    inherits = change.put_records(0, inherits, lost)
    return change.add_branch(agent.a, new, uuid.uuid4().bytes, about, point, inherits)


def set_tag(change: Change, agent: Agent, tag: str, target: Point) -> None:
    """Give a checkpoint a name; a tag that exists moves."""
    check_new(tag, "a tag")
    if change.branch(agent.a, tag) is not None:
        raise BadName(f"{tag!r} is a branch of this agent", hint="A tag needs another name.")
    point = history.current(change, target)
    change.set_tag(Tag(agent.a, tag, point.n, point.id, {}))
    change.say(agent.a, {"what": "tag", "name": tag, "at": point.id})


def drop_tag(change: Change, agent: Agent, tag: str) -> None:
    if change.tag(agent.a, tag) is None:
        raise UnknownRevision(f"agent {agent.name!r} has no tag {tag!r}")
    change.drop_tag(agent.a, tag)
    change.say(agent.a, {"what": "untag", "name": tag})


def judge(change: Change, agent: Agent, target: Point, validity: str, reason: str) -> None:
    """Say whether a checkpoint can be trusted. A good one has no row."""
    if validity not in {"good", "suspect", "corrupt"}:
        raise BadOption(f"validity {validity!r}", hint="Use good, suspect or corrupt.")
    body = None if validity == "good" else {"validity": validity, "reason": reason, "at": now_us()}
    point = history.current(change, target)
    change.set_validity(agent.a, point.n, body)
    change.say(agent.a, {"what": "validity", "at": point.id, "validity": validity, "reason": reason})
