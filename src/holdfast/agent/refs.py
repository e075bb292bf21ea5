"""An agent's refs as they travel: how those of two stores relate, and how they move.

Owns the comparison of two histories of one agent and the one transaction in which refs change. Objects have arrived
before. What always holds: a branch only ever moves to a history that contains its own, or that has been where it
stands; where both sides have gone on, nothing is mixed: it is an error, or the other one arrives beside it under a name
of its own; nothing is removed; whoever spoke last of a tag or a checkpoint's validity is believed.

How a branch got where it is says who is ahead: the times at which it moved other than forward are kept in the log of
either store. Of two branches, one is ahead if it has made all the moves of the other, and has since been where that one
stands now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from holdfast.agent.frames import BranchRef, Refs, beside, body_in
from holdfast.agent.graph import left_by
from holdfast.agent.names import MAIN
from holdfast.agent.opened import settle
from holdfast.errors import BadName, CorruptValue, Damaged, HistoriesDiverged
from holdfast.store.catalog import View
from holdfast.store.changes import Change, Said, moved_body
from holdfast.store.engine import Refused
from holdfast.store.manifest import Position
from holdfast.store.rows import DIGEST_BYTES, Agent, Body, Branch, End, Entry, Tag, body_bytes, link

STOOD_MAX = 100
"""Places where transfers have put a branch that it tells of: needed only where they were forgotten since."""

STORES_MAX = 16
"""Stores of which an agent remembers how far their logs went when it last came from there."""

# What bodies hold for one store only.
_OF_AGENT = frozenset({"received"})
_OF_BRANCH = frozenset({"arriving", "recovered", "origins", "own"})

Kept = tuple[bytes, int, bytes, bytes]
"""An entry that is kept under a key: the uuid of its agent, time, key, body."""


class Past:
    """What an agent's log says of its refs."""

    def __init__(self, log: Iterable[Entry]) -> None:
        self.moves: dict[int, list[tuple[int, bytes, bytes]]] = {}
        self.stood: dict[int, list[bytes]] = {}
        self.said: dict[tuple[str, str | bytes], tuple[int, Body]] = {}  # the last word on a tag, or a checkpoint
        self.left: dict[bytes, None] = {}
        self.kept: list[Entry] = []
        for entry in log:
            self._read(entry, entry.body)

    def _read(self, entry: Entry, body: Body) -> None:
        match body:
            case _ if entry.key:
                self.kept.append(entry)
            case {"b": int(b), "to": bytes(to), "of": bytes()}:  # a transfer put it there
                self.stood.setdefault(b, []).append(to)
            case {"b": int(b), "from": bytes(before), "to": bytes(to)}:
                self.moves.setdefault(b, []).append((entry.at, before, to))
            case {"what": "tag" | "untag" as what, "name": str(name)}:
                self.said["tag", name] = entry.at, {"what": what, "name": name, **_at(body)}
            case {"what": "validity", "at": bytes(id), "validity": str(how)}:
                why = str(body.get("reason", ""))
                self.said["validity", id] = entry.at, {"what": "validity", "validity": how, "reason": why, **_at(body)}
        self.left |= dict.fromkeys(id for id in left_by(body) if len(id) == DIGEST_BYTES)


def _at(body: Body) -> Body:
    return {"at": body["at"]} if "at" in body else {}


def about(said: Body) -> tuple[str, str | bytes]:
    """What a word on a tag, or on a checkpoint's validity, is about."""
    return ("validity", said["at"]) if said["what"] == "validity" else ("tag", said["name"])


def read_refs(view: View, agent: Agent, store: bytes, past: Past, upto: tuple[int, int]) -> Refs:
    """The refs of an agent, as they are in a view."""
    branches = []
    for one in view.branches(agent.a):
        body = body_bytes(_but(one.body, _OF_BRANCH))
        moves, stood = past.moves.get(one.b, []), past.stood.get(one.b, [])
        if not one.body.get("arriving"):
            ref = BranchRef(
                one.uuid, one.name, body, one.id, one.depth, one.records, one.chain, moves, stood[-STOOD_MAX:]
            )
            branches.append(ref)
    left = [id for id in past.left if view.find(id) is not None]
    said = [(at, body_bytes(body)) for at, body in past.said.values() if "at" not in body or view.find(body["at"])]
    body = body_bytes(_but(agent.body, _OF_AGENT))
    return Refs(store, agent.uuid, agent.name, body, branches, said, left, upto)


def _but(body: Body, own: frozenset[str]) -> Body:
    return {key: value for key, value in body.items() if key not in own}


# -- how two branches relate ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What is to become of a branch: ``how`` is new, source (it moves), same, or dest (the one that is here is ahead).

    ``old`` is what is here; ``beside``: it arrives under a name of its own.
    """

    ref: BranchRef
    how: str
    old: Branch | None
    uuid: bytes
    name: str
    beside: bool = False


class Sides(NamedTuple):
    """Where the histories of two stores can be read. ``line`` gives the record in which a branch's line ends.

    When everything has arrived, both are the same store.
    """

    ours: View
    line: Callable[[BranchRef], int]
    theirs: View
    places: tuple[str, str]


def plan(refs: Refs, sides: Sides, there: Agent | None, past: Past, *, aside: bool) -> list[Plan]:
    """What is to become of each branch; raises ``HistoriesDiverged``, unless what has parted may arrive ``aside``."""
    rows = sides.theirs.branches(there.a) if there is not None else []
    by_uuid = {row.uuid: row for row in rows}
    by_name = {row.name: row for row in rows}
    taken = {*by_name, *(tag.name for tag in sides.theirs.tags(there.a))} if there is not None else set()
    taken |= {ref.name for ref in refs.branches}
    found = []
    for ref in refs.branches:
        own = beside(ref.uuid, refs.store)  # where it arrived beside its namesake before, it goes on there
        old = by_uuid.get(own) or by_uuid.get(ref.uuid)
        if old is None and ref.name not in by_name:
            found.append(Plan(ref, "new", None, ref.uuid, ref.name))
            continue
        how = _relation(ref, old, sides, past) if old is not None else "diverged"
        old = old or by_name[ref.name]
        if how != "diverged":
            found.append(Plan(ref, how, old, old.uuid, old.name))
        elif aside and old.uuid != own:
            base = f"{ref.name}.{refs.store.hex()[:8]}"
            names = (base, *(f"{base}-{number}" for number in range(2, 10_000)))
            name = next(one for one in names if one not in taken)
            taken.add(name)
            found.append(Plan(ref, "new", None, own, name, beside=True))
        else:
            raise _diverged(refs, ref, old, sides.places)
    return found


def _relation(ref: BranchRef, old: Branch, sides: Sides, past: Past) -> str:
    ahead = {_heads(ref, old, sides, past), _lines(ref, old, sides)} - {"same"}
    return ahead.pop() if len(ahead) == 1 else "diverged" if ahead else "same"


def _heads(ref: BranchRef, old: Branch, sides: Sides, past: Past) -> str:
    ours, theirs = ref.moves, past.moves.get(old.b, [])
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
    if len(ours) == len(theirs) == common and ref.head == old.id:
        return "same"
    stood = past.stood.get(old.b, [])
    if common == len(theirs):
        there = _was_at(sides.ours, _places(ref.head, ours[common:]), old.id, old.depth)
        # What the source has forgotten since is still its own, if nobody here has gone on.
        if there or old.id in ref.stood or (there is None and stood and stood[-1] == old.id):
            return "source"
    if common == len(ours):
        there = _was_at(sides.theirs, _places(old.id, theirs[common:]), ref.head, ref.depth)
        if there or ref.head in stood:
            return "dest"
    return "diverged"


def _places(head: bytes, moves: Sequence[tuple[int, bytes, bytes]]) -> list[bytes]:
    """Where a branch stands, and where it stood at each of some moves."""
    return [head, *(id for _, before, to in reversed(moves) for id in (to, before))]


def _was_at(view: View, places: Sequence[bytes], wanted: bytes, depth: int) -> bool | None:
    """Whether a branch that was at these places was at that checkpoint; None: perhaps, but that was forgotten."""
    if not wanted or wanted in places:
        return True
    answer: bool | None = False
    for id in filter(None, dict.fromkeys(places)):
        point = view.find(id)
        if point is None:
            answer = None
            continue
        below = None
        for above in view.walk(point.n, over=True):
            if above.id == wanted:
                return True
            if above.manifest.depth <= depth:
                if above.manifest.depth < depth and below is not None and below.cut:
                    answer = None
                break
            below = above
        else:
            if below is not None and below.cut:
                answer = None
    return answer


def _lines(ref: BranchRef, old: Branch, sides: Sides) -> str:
    ours, theirs = (ref.count, ref.chain), old.end.position
    if ours == theirs:
        return "same"
    if ours[0] > theirs[0]:
        return "source" if _leads(sides.ours, sides.line(ref), theirs, ours) else "diverged"
    return "dest" if _leads(sides.theirs, old.line, ours, theirs) else "diverged"


def _leads(view: View, line: int, start: Position, end: Position) -> bool:
    """Whether a line that ends in that record, at the position ``end``, has been at ``start``."""
    count, chain = start
    for record in view.line(line, after=count):
        count, chain = count + 1, link(chain, record.digest)
    return (count, chain) == end


def _diverged(refs: Refs, ref: BranchRef, old: Branch, places: tuple[str, str]) -> HistoriesDiverged:
    ours, theirs = ref.head.hex(), old.id.hex()
    return HistoriesDiverged(
        f"branch {old.name!r} of {refs.name!r} has gone on in both stores: it stands at {ours[:12] or 'nothing'} in"
        f" {places[0]} and at {theirs[:12] or 'nothing'} in {places[1]}",
        agent=refs.name,
        branch=old.name,
        source_head=ours,
        dest_head=theirs,
        hint="Let it arrive under a name of its own (beside=True, --beside), then compare the two and go on with one.",
    )


# -- names, judgements and entries --------------------------------------------------------------------------------


class News(NamedTuple):
    """What is to change besides branches: words on tags and checkpoints, places that were left, entries."""

    said: list[tuple[int, Body]]
    left: list[bytes]
    kept: list[Kept]


def news(view: View, refs: Refs, kept: Sequence[Kept], past: Past) -> News:
    """What the other side says and this one does not know yet, or has not spoken of later."""
    said = [(at, body_in(data)) for at, data in refs.said]
    return News(
        [(at, body) for at, body in said if at > past.said.get(about(body), (-1, {}))[0]],
        [id for id in refs.left if id not in past.left],
        missing(view, kept, refs.uuid),
    )


def missing(view: View, kept: Sequence[Kept], arriving: bytes) -> list[Kept]:
    """Those of some entries that are not here, or are kept by another agent than their own, which may be arriving."""
    there = _entries(view, [key for _, _, key, _ in kept])
    owners = {owner: view.agent_of(owner) for owner in {owner for owner, *_ in kept}}
    found = []
    for one in kept:
        entry, owner = there.get(one[1:]), owners[one[0]]
        if entry is None or (entry.a != owner.a if owner is not None else one[0] == arriving):
            found.append(one)
    return found


def _entries(view: View, keys: Sequence[bytes]) -> dict[tuple[int, bytes, bytes], Entry]:
    found = view.log_under(list(dict.fromkeys(keys)))
    return {(entry.at, entry.key, body_bytes(entry.body)): entry for entry in found}


def received(agent: Agent) -> dict[bytes, tuple[int, int]]:
    """How far the logs of other stores went when the agent last came from there."""
    return {uuid: (count, newest) for uuid, count, newest in agent.body.get("received", ())}


# -- moving them --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arrived:
    """What came in."""

    checkpoints: int = 0
    records: int = 0
    events: int = 0
    nodes: int = 0
    chunks: int = 0
    bytes: int = 0
    branches: int = 0
    left_out: list[str] = field(default_factory=list)
    """Tags and judgements on checkpoints that are not here."""


@dataclass(frozen=True, slots=True)
class TransferredAgent:
    """One agent of a transfer. ``status``: ``new``, ``updated``, ``unchanged``, or ``ahead`` (the other side is)."""

    name: str
    status: str
    arrived: Arrived = field(default_factory=Arrived)
    beside: list[str] = field(default_factory=list)
    """Branches that arrived under another name, because both sides had gone on."""

    def to_json(self) -> dict[str, Any]:
        found = self.arrived
        return {
            "agent": self.name, "status": self.status, "checkpoints": found.checkpoints, "effects": found.records,
            "events": found.events, "nodes": found.nodes, "chunks": found.chunks, "bytes": found.bytes,
            "branches": found.branches, "beside": self.beside, "left_out": found.left_out,
        }  # fmt: skip


class Landing:
    """The refs of one agent, about to be moved by one change."""

    def __init__(
        self, change: Change, refs: Refs, kept: Sequence[Kept], ends: Callable[[Position], End | None], name: str
    ) -> None:
        """``ends`` gives the end of the line at a position that has arrived; ``name`` is what a new agent is called."""
        self._change = change
        self._refs = refs
        self._kept = kept
        self._ends = ends
        self._name = name
        self._left_out: list[str] = []

    def move(self, arrived: Arrived, places: tuple[str, str], held: dict[int, int], *, aside: bool) -> TransferredAgent:
        """Move them. ``held`` has the generations of the branches whose leases we have."""
        change, refs = self._change, self._refs
        there = change.agent_of(refs.uuid)
        past = Past(change.log(there.a) if there is not None else ())
        sides = Sides(change, lambda ref: self._end(ref).line, change, places)
        plans = plan(refs, sides, there, past, aside=aside)
        others = news(change, refs, self._kept, past)
        moving = [one for one in plans if one.how in {"new", "source"}]
        if there is not None and not moving and not any(others):
            return unmoved(refs.name, plans)
        agent = there or self._add_agent(places)
        for one in moving:
            self._branch(agent, one, past, held)
        self._judge_again(agent, past)
        for at, body in others.said:
            self._say(agent, at, body)
        self._left(agent, others.left)
        self._entries(agent, others.kept)
        self._remember(agent)
        branches, names = change.branches(agent.a), {one.name for one in moving}
        settle(change, branches, {branch.b for branch in branches if branch.name in names})
        arrived.branches, arrived.events = sum(one.how == "new" for one in plans), len(others.kept)
        arrived.left_out = self._left_out
        besides = [one.name for one in plans if one.beside]
        return TransferredAgent(refs.name, "new" if there is None else "updated", arrived, besides)

    def _add_agent(self, places: tuple[str, str]) -> Agent:
        if self._change.agent(self._name) is not None:
            raise another_agent(places[1], self._name, self._refs.name)
        if not any(ref.name == MAIN for ref in self._refs.branches):
            raise CorruptValue(f"agent {self._refs.name!r} has no branch {MAIN!r}")
        body = _but(body_in(self._refs.body), _OF_AGENT)
        # A handle of the other store means nothing here.
        body["origins"] = [[uuid, until, 0] for uuid, until, _ in body.get("origins", ())]
        return self._change.add_agent(self._name, self._refs.uuid, body)

    def _end(self, ref: BranchRef) -> End:
        end = self._ends((ref.count, ref.chain))
        if end is None:
            raise Damaged(f"the records of {ref.name!r} did not all come")
        return end

    def _branch(self, agent: Agent, one: Plan, past: Past, held: dict[int, int]) -> None:
        change, ref = self._change, one.ref
        point = change.find(ref.head) if ref.head else None
        if ref.head and point is None:
            raise Damaged(f"the head of {ref.name!r} did not come")
        if ref.depth != (point.manifest.depth if point is not None else 0):
            raise CorruptValue(f"branch {ref.name!r} has the wrong depth")
        end, of = self._end(ref), {"of": self._refs.store}
        old = one.old
        if old is None:
            if change.branch(agent.a, one.name) is not None or change.tag(agent.a, one.name) is not None:
                raise BadName(f"{one.name!r} is already a branch or tag of this agent", hint="Choose another name.")
            body = _but(body_in(ref.body), _OF_BRANCH)
            made = change.add_branch(agent.a, one.name, one.uuid, body, point, end, said=of)
            self._moves(agent, made, ref.moves)
            return
        if held.get(old.b) != old.generation:
            raise Refused(f"branch {old.name!r} was moved meanwhile")
        self._moves(agent, old, ref.moves[len(past.moves.get(old.b, [])) :])
        new = old.at_end(end)
        if point is not None and point.id != old.id:
            new = new._replace(head=point.n, id=point.id, depth=point.manifest.depth, epoch=old.epoch + 1)
            change.say(agent.a, {**moved_body(old, new, point.id), "what": "receive", **of})
        change.move(old, new)

    def _moves(self, agent: Agent, branch: Branch, moves: Sequence[tuple[int, bytes, bytes]]) -> None:
        """What a branch did elsewhere. Its epochs there mean nothing here."""
        for at, before, to in moves:
            body = {"what": "moved", "b": branch.b, "branch": branch.name, "from": before, "to": to}
            self._change.say(agent.a, Said(body, at=at))

    def _judge_again(self, agent: Agent, past: Past) -> None:
        """A checkpoint that was forgotten here, and has come again, is what was last said of it."""
        judged = self._change.validities(agent.a)
        for at, said in past.said.values():
            point = self._change.find(said["at"]) if said.get("validity", "good") != "good" else None
            if point is not None and point.n not in judged:
                self._change.set_validity(agent.a, point.n, {**_word(said), "at": at})

    def _say(self, agent: Agent, at: int, said: Body) -> None:
        """A word on a tag, or on a checkpoint's validity."""
        change = self._change
        point = change.find(said["at"]) if "at" in said else None
        match said:
            case {"what": "untag", "name": name}:
                change.drop_tag(agent.a, name)
            case {"what": "tag", "name": name} if point is not None and change.branch(agent.a, name) is None:
                change.set_tag(Tag(agent.a, name, point.n, point.id, {}))
            case {"what": "validity", "validity": validity} if point is not None:
                change.set_validity(agent.a, point.n, {**_word(said), "at": at} if validity != "good" else None)
            case _:  # what it names is not here, or a branch has that name
                self._left_out.append(f"tag {said['name']}" if "name" in said else said["at"].hex()[:12])
                return
        change.say(agent.a, Said(said, at=at))

    def _left(self, agent: Agent, left: Iterable[bytes]) -> None:
        """Lines that branches have left: the agent goes on to see them. What the moves said is not said again."""
        past = Past(self._change.log(agent.a))
        rest = [id for id in left if id not in past.left and self._change.find(id) is not None]
        if rest:
            self._change.say(agent.a, {"what": "receive", "of": self._refs.store, "left": rest})

    def _entries(self, agent: Agent, kept: Sequence[Kept]) -> None:
        change = self._change
        there = _entries(change, [key for _, _, key, _ in kept])
        for owner, at, key, data in kept:
            whose = change.agent_of(owner) or agent
            entry = there.get((at, key, data))
            if entry is not None:  # a clone brought it first
                change.delete("log", "e", [entry.e])
            change.say(whose.a, Said(body_in(data), key, at))

    def _remember(self, agent: Agent) -> None:
        if not any(self._refs.upto):  # out of a file
            return
        before = [one for one in agent.body.get("received", ()) if one[0] != self._refs.store]
        body = {**agent.body, "received": [*before, [self._refs.store, *self._refs.upto]][-STORES_MAX:]}
        self._change.tx.do("DELETE FROM agent WHERE a = ?", (agent.a,))
        self._change.put("agent", agent.a, agent.uuid, agent.name.encode(), body_bytes(body))


def _word(said: Body) -> Body:
    return {"validity": said["validity"], "reason": said["reason"]}


def unmoved(name: str, plans: Sequence[Plan]) -> TransferredAgent:
    """An agent of which nothing has to move."""
    return TransferredAgent(name, "ahead" if any(one.how == "dest" for one in plans) else "unchanged")


def another_agent(place: str, name: str, agent: str) -> HistoriesDiverged:
    return HistoriesDiverged(
        f"{place} has another agent {name!r}, which is not this one",
        agent=agent,
        hint="Give it another name on the way: new_name=..., or --as NAME.",
    )
