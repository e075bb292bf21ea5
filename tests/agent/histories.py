"""Histories with everything in them, all that can be seen of an agent, and what holds of every store.

``view`` gives one value for an agent: two stores with equal views of it answer every question about it alike.
"""

from __future__ import annotations

import os
import random
import warnings
from contextlib import closing, suppress
from typing import Any

import holdfast
import holdfast.agent.arrival  # before the limits that it takes from elsewhere are changed
from holdfast.agent import background, branch, collection, history
from holdfast.agent.graph import Graph
from holdfast.codec.values import encode
from holdfast.errors import HoldfastError, UnsavedChanges
from holdfast.store.changes import Said
from holdfast.store.packs import file_name

# Bodies of branches hold these for one store only.
_OWN = {"origins", "arriving", "recovered", "own"}


def few_between_seals(patch=setattr) -> None:
    """Seals and segments as they come after thousands of checkpoints, after a few."""
    patch(branch, "SEAL_CHECKPOINTS", 5)
    patch(background, "FOLD_MIN", 2)


# -- agents -----------------------------------------------------------------------------------------------------------


def plain(store: holdfast.Store, name: str, checkpoints: int, size: int = 200) -> None:
    """An agent that says something ``checkpoints`` more times."""
    with closing(store.agent(name)) as agent:
        agent.state.setdefault("messages", [])
        for number in range(checkpoints):
            agent.state["messages"].append({"content": os.urandom(size // 2).hex()})
            agent.checkpoint(f"{number}")


def grown(store: holdfast.Store, name: str = "a", count: int = 6) -> holdfast.Agent:
    """An agent with two branches, a line that was left, a tag and a doubt."""
    agent = store.agent(name)
    agent.state["messages"] = []
    for number in range(count):
        agent.state["messages"].append(f"message {number} " * 20)
        agent.checkpoint(f"m{number}")
    agent.tag("kept", "m2")
    agent.mark("m1", "suspect", "an example")
    with agent.branch("side", at="m3") as side:
        side.state["side"] = True
        side.checkpoint("on the side")
    agent.rollback("m4")
    agent.state["messages"].append("another way")
    agent.checkpoint("other")
    return agent


def large(store: holdfast.Store, name: str, count: int = 30, seed: int = 0) -> holdfast.Agent:
    """An agent with seals, big containers, bulk values and lines that were left, all different from other seeds."""
    noise = random.Random(seed)
    agent = store.agent(name)
    agent.state["messages"] = []
    agent.state["table"] = {}
    for number in range(count):
        agent.state["messages"].append({"role": "user", "content": noise.randbytes(200).hex()})
        agent.state["table"][f"row {number % 7}"] = [noise.randbytes(30).hex() for _ in range(noise.randrange(40))]
        if number % 9 == 4:
            agent.state["bulk"] = noise.randbytes(300_000)
        if number % 11 == 6:
            agent.state["big"] = {"inside": [noise.randbytes(100).hex() for _ in range(200)]}
        if number % 13 == 9:
            agent.rollback("~3")
        agent.checkpoint(f"{number}")
    agent.tag("middle", "~5")
    return agent


@holdfast.tool(name="histories.book", effect="idempotent")
def book(what: str) -> dict[str, Any]:
    return {"booked": what, "note": "n" * 100}


@holdfast.tool(name="histories.look", effect="read")
def look(what: str) -> str:
    return f"{what} " * 400


def act(agent: holdfast.Agent, what: str = "seat") -> None:
    """Two effects on an agent's line, and nothing else. It is closed afterwards, without what is not saved."""
    agent.accept()
    with closing(agent), warnings.catch_warnings(action="ignore", category=UnsavedChanges), agent:
        book(what)
        look("weather")


def back(agent, revision):
    """Go back, whatever was done outside since."""
    plan = agent.plan_rollback(revision)
    agent.rollback(revision, accept={one.effect.tool for one in plan.blocked})


def grow(store: holdfast.Store, name: str, choose: random.Random, steps: int, *, forgets: bool = False) -> None:
    """Random things happen to an agent: whatever can be in a history."""
    row = store._db.view.agent(name)
    known = [one.name for one in store._db.view.branches(row.a)] if row is not None else ["main"]
    branches = {one: store.agent(name, branch=one) for one in known}
    for _ in range(steps):
        here = choose.choice(list(branches.values()))
        state, rows = here.state, here.log()
        match choose.randrange(16):
            case 0 | 1 | 2:
                state.setdefault("messages", [])
                state["messages"].append({"role": "user", "content": f"{choose.random()} " * choose.randrange(1, 30)})
                here.checkpoint(f"said {choose.randrange(5)}")
            case 3:
                state["bulk"] = choose.randbytes(choose.choice([100, 2_000, 5_000]))
                here.checkpoint("bulk")
            case 4:
                state["big"] = {f"key {i}": "v" * choose.randrange(60) for i in range(choose.randrange(40))}
                here.checkpoint()
            case 5 if rows:
                back(here, choose.choice(rows))
            case 6 if rows and len(branches) < 4:
                new = f"try-{len(branches)}"
                branches[new] = here.branch(new, at=choose.choice(rows))
            case 7 if rows:
                store.tag(name, f"tag-{choose.randrange(3)}", choose.choice(rows), branch=here.branch_name)
            case 8:
                with suppress(HoldfastError):
                    store.untag(name, f"tag-{choose.randrange(3)}")
            case 9 if rows:
                at, how = choose.choice(rows), choose.choice(["good", "suspect"])
                store.mark(name, at, how, "because", branch=here.branch_name)
            case 10 | 11:
                act(here, f"seat {choose.randrange(100)}")
                branches[here.branch_name] = here = store.agent(name, branch=here.branch_name)
                if choose.random() < 0.5:
                    here.checkpoint("acted")
            case 12:
                store.signal(name, "go", choose.randrange(100), any_run=True)
            case 13:  # as an integration does: a checkpoint with a key, and what is kept under it
                keep(here, b"key %d" % choose.randrange(6), {"what": "write", "value": choose.randbytes(20)})
            case 14:
                with suppress(HoldfastError):
                    here.undo()
            case 15 if forgets:
                store.retain(holdfast.Policy(last=choose.randrange(1, 6), labels=["said 1"]), [name])
    for one in branches.values():
        one.close()


def keep(agent: holdfast.Agent, key: bytes, *bodies: dict[str, Any], label: str = "") -> None:
    """A checkpoint with a key, and these entries in the log under it."""
    writer = agent._check_writer()
    said = [Said(body, key) for body in bodies]
    agent._remember(writer.finish(writer.capture(agent._document, label, key=key, said=said)))


# -- what can be seen -------------------------------------------------------------------------------------------------


def picture(store: holdfast.Store, name: str) -> dict[str, Any]:
    """All that people see of an agent but its events."""
    agent = store.agent(name, readonly=True)
    heads = {one: store.agent(name, branch=one, readonly=True).head for one in agent.branches()}
    return {
        "branches": {one: head and head.id for one, head in heads.items()},
        "tags": {tag: checkpoint.id for tag, checkpoint in agent.tags().items()},
        "abandoned": [checkpoint.id for checkpoint in agent.abandoned()],
        "log": [checkpoint.id for checkpoint in agent.log()],
        "all": [
            {**checkpoint.to_json(), "state": holdfast.plain(checkpoint.state), "changes": str(checkpoint.changes())}
            for checkpoint in agent.log(all=True)
        ],
    }


def view(store: holdfast.Store, name: str, *, states: bool = True) -> dict[str, Any]:
    """Everything that is stored of an agent, without the handles of this store."""
    store.flush()
    with store._db.moment() as (now, _):
        row = now.agent(name)
        assert row is not None, name
        graph = Graph(now, row)
        agent = store.agent(name, readonly=True)
        points = list(graph.everything())
        checkpoints = {}
        for point in points:
            made, before = agent.at(f"id:{point.id.hex()}"), graph.before(point)
            checkpoints[made.id] = (
                point.raw, now.operations(point), point.row.key, before.id if before is not None else b"", point.cut,
                made.validity, made.validity_reason, sorted(made.tags), made.metadata,
                {section: encode(made.state.raw_section(section)) for section in made.state} if states else (),
            )  # fmt: skip
        branches = {}
        for one in graph.branches:
            body = {key: value for key, value in one.body.items() if key not in _OWN}
            line = [(r.i, r.mark, r.refs, r.digest, r.body) for r in now.line(one.line)]
            branches[one.name] = one.uuid, body, one.id, one.depth, one.end.position, line
        kept = sorted((one.at, one.key, encode(one.body)) for one in now.log(row.a) if one.key)
        keys = sorted({point.row.key for point in points} - {b""})
        under = sorted((one.at, one.key, encode(one.body)) for one in graph.under(keys))
        left = {now.point(n).id for n in graph.left}
    return {
        "uuid": row.uuid, "checkpoints": checkpoints, "branches": branches, "kept": kept, "under": under, "left": left,
    }  # fmt: skip


def assert_same(source, dest, name: str, there: str | None = None, *, states: bool = True) -> None:
    ours, theirs = view(source, name, states=states), view(dest, there or name, states=states)
    for key in ours:
        if key == "left":  # what a transfer moved forward was left, too
            assert ours[key] <= theirs[key]
        elif key != "kept" or "of" not in source._db.view.agent(name).body:  # a clone's may be its origin's elsewhere
            assert ours[key] == theirs[key], key
    sound(dest)


def states(store: holdfast.Store) -> dict[bytes, Any]:
    """The state of every checkpoint that anybody sees, by its id; all of it is read and proven."""
    found = {}
    now = store._db.view
    for agent in now.agents():
        for point in Graph(now, agent).everything():
            if point.id not in found:
                history.operations_of(now, point)
                found[point.id] = holdfast.plain(store._load(point))
    return found


def numbers(store: holdfast.Store, name: str) -> dict[str, int]:
    """The numbers of the checkpoints that an agent sees, by label, oldest first."""
    now = store._db.view
    return {point.manifest.label: point.n for point in [*Graph(now, now.agent(name)).everything()][::-1]}


def forget(store: holdfast.Store, name: str, going, **more):
    return store._forget(store._db.view.agent(name), set(going), **more)


# -- what holds of every store ----------------------------------------------------------------------------------------


def sound(store: holdfast.Store) -> None:
    store.flush()
    report = store.verify()
    assert report.ok, str(report)
    assert not store._db.view.tags(0), "nothing is held any more"
    for agent in store._db.view.agents():
        graph = Graph(store._db.view, agent)
        assert graph.counted() == (len(graph.numbers), len(graph.tips()))


def swept(store: holdfast.Store) -> None:
    """It is sound, and nothing is there that nothing reaches. Worked out here once more, from above."""
    sound(store)
    states(store)
    now, agents = store._db.view, store._db.view.agents()
    rows = {row.n: row for row in now.checkpoints()}
    assert set(rows) == set().union(*(Graph(now, agent).numbers for agent in agents))
    for n, over in now.shallow().items():
        assert (bool(rows[n].sealed), rows[n].parent, now.point(rows[n]).cut) == (True, 0, True)
        assert over in {0, *rows}
    members = [n for row in now.rows("segment") for n in now.segment(row[0]).members]
    assert sorted(members) == sorted(n for n, row in rows.items() if row.s)
    nodes, chunks = set(), set()

    def down(names, certain=True):
        for name in names:
            if name not in nodes and (raw := now.nodes([name]).get(name)) is not None:
                nodes.add(name)
                down(history.children(raw))
                if not raw[1]:
                    value(raw)
            else:
                assert name in nodes or not certain

    def value(data):
        named, bulk = history.named_in(data)
        chunks.update(bulk)
        down(named, certain=False)

    for row in rows.values():
        point = now.point(row)
        down([point.manifest.metadata, *(point.manifest.roots if row.sealed else ())])
        value(now.operations(point))
    for s, *_ in now.rows("segment"):
        down(now.segment(s).refs[0])
    lines = {row.line for row in rows.values()} | {one.line for one in now.branches()}
    records = {record.r: record for r in lines for record in now.line(r)}
    for record in records.values():
        down(record.refs)
        value(record.body)
    assert {name for _, name, _ in now.rows("node")} == nodes
    assert {row[0] for row in now.rows("chunk")} <= chunks
    assert {row[0] for row in now.rows("record")} == set(records)
    packs = {p: uuid for p, uuid, _ in now.rows("pack")}
    assert set(packs) == {row[1] for row in now.rows("chunk")}
    assert {name for name, _ in store._db.packs.here.names()} == {file_name(uuid) for uuid in packs.values()}
    assert {entry.a for entry in now.log() if not entry.key} <= {0, *(agent.a for agent in agents)}
    assert collection.WASTE not in now.facts()


def empty(store: holdfast.Store) -> None:
    """Nothing is left of any agent, once all were removed."""
    counts = store._db.view.counts()
    tables = ("loose", "checkpoint", "segment", "node", "chunk", "pack", "record", "shallow", "tag", "validity")
    assert {table: counts[table] for table in tables} == dict.fromkeys(tables, 0)
    swept(store)
