"""What the tests of transfer share: histories with everything in them, and all that can be seen of an agent.

``view`` gives one value for an agent: two stores with equal views of it answer every question about it alike.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.agent.graph import Graph
from holdfast.agent.policy import Policy
from holdfast.agent.store import Store, open_as
from holdfast.codec.blocks import VALUE, leaf_node, node_digest
from holdfast.codec.values import encode
from holdfast.errors import HoldfastError
from holdfast.store.changes import NewRecord, Said
from tests.limits import limits

if TYPE_CHECKING:
    import random

    from holdfast.agent.agent import Agent

# Limits so small that a few kilobytes have index nodes on two levels, bulk values, several seals and segments.
SMALL = {
    "LEAF_MIN_BYTES": 64,
    "LEAF_TARGET_BYTES": 256,
    "LEAF_MAX_BYTES": 512,
    "LEAF_MAX_ITEMS": 8,
    "INDEX_MIN_ENTRIES": 2,
    "INDEX_MAX_ENTRIES": 4,
    "INLINE_MAX_BYTES": 256,
    "BULK_MIN_BYTES": 1500,
    "SEAL_CHECKPOINTS": 5,
    "FOLD_MIN": 3,
}


def small_limits():
    import_module("holdfast.agent.proof")  # so that it has them, too
    return limits(SMALL)


def opened(path, **options: Any) -> Store:
    return open_as(Store, path, **options)


def view(store: Store, name: str, *, states: bool = True) -> dict[str, Any]:
    """Everything that can be seen of an agent, without the handles of this store."""
    store.flush()
    with store._db.moment() as (look, _):
        row = look.agent(name)
        assert row is not None, name
        graph = Graph(look, row)
        agent = store.agent(name, readonly=True)
        points = list(graph.everything())
        over = {point.n: found.id for point in points if (found := graph.before(point)) is not None}
        checkpoints = {}
        for point in points:
            made = agent.at(f"id:{point.id.hex()}")
            checkpoints[made.id] = (
                point.raw, look.operations(point), point.row.key, over.get(point.n, b""), point.cut, made.validity,
                made.validity_reason, sorted(made.tags), made.metadata,
                {section: encode(made.state[section]) for section in made.state} if states else (),
            )  # fmt: skip
        branches = {}
        for one in graph.branches:
            body = {key: value for key, value in one.body.items() if key not in {"recovered", "origins"}}
            line = [(r.i, r.mark, r.refs, r.digest, r.body) for r in look.line(one.line)]
            branches[one.name] = one.uuid, body, one.id, one.depth, one.end.position, line
        kept = sorted((one.at, one.key, encode(one.body)) for one in look.log(row.a) if one.key)
        keys = sorted({point.row.key for point in points} - {b""})
        under = sorted((one.at, one.key, encode(one.body)) for one in graph.under(keys))
        left = {look.point(n).id for n in graph.left}
    return {
        "uuid": row.uuid, "checkpoints": checkpoints, "branches": branches, "kept": kept, "under": under, "left": left,
    }  # fmt: skip


def sound(store: Store) -> None:
    report = store.verify()
    assert report.ok, str(report)
    assert not store._db.view.tags(0), "nothing is held any more"


def assert_same(source: Store, dest: Store, name: str, there: str | None = None, *, states: bool = True) -> None:
    ours, theirs = view(source, name, states=states), view(dest, there or name, states=states)
    for key in ours:
        if key == "left":  # what a transfer moved forward was left, too
            assert ours[key] <= theirs[key]
        elif key != "kept" or "of" not in source._db.view.agent(name).body:  # a clone's may be its origin's elsewhere
            assert ours[key] == theirs[key], key
    sound(dest)


def record(agent: Agent, body: bytes, *, mark: int = 0, value: Any = None) -> None:
    """Something that happened outside; ``value`` is named by it."""
    nodes = {}
    if value is not None:
        raw = leaf_node(VALUE, [encode(value)])
        nodes[node_digest(raw)] = raw
    agent._writer.append([NewRecord(mark, b"".join(nodes), body)], nodes=nodes, flush=True)


def plain(store: Store, name: str, checkpoints: int, size: int = 200) -> None:
    """An agent that says something ``checkpoints`` more times."""
    with store.agent(name) as agent:
        agent.state.setdefault("messages", [])
        for number in range(checkpoints):
            agent.state["messages"].append({"content": os.urandom(size // 2).hex()})
            agent.checkpoint(f"{number}")


def grow(store: Store, name: str, choose: random.Random, steps: int, *, forgets: bool = False) -> None:
    """Random things happen to an agent: whatever can be in a history."""
    branches = {branch: store.agent(name, branch=branch) for branch in _branches(store, name)}
    for _ in range(steps):
        here = choose.choice(list(branches.values()))
        state = here.state
        rows = here.log()
        match choose.randrange(15):
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
                here.rollback(choose.choice(rows))
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
                value = choose.randbytes(300) if choose.random() < 0.3 else None
                record(here, choose.randbytes(40), mark=choose.randrange(2), value=value)
                if choose.random() < 0.5:
                    here.checkpoint("acted")
            case 12:
                key = b"key %d" % choose.randrange(6)
                if choose.random() < 0.5:
                    here._writer.checkpoint(here._document, "keyed", key=key)
                said = Said({"what": "write", "value": choose.randbytes(20)}, key)
                store._db.change(lambda change, here=here, said=said: change.say(here._row.a, said))
            case 13:
                with suppress(HoldfastError):
                    here.undo()
            case 14 if forgets:
                store.retain(Policy(last=choose.randrange(1, 6), labels=["said 1"]), [name])
    for one in branches.values():
        one.close()


def _branches(store: Store, name: str) -> list[str]:
    row = store._db.view.agent(name)
    return [one.name for one in store._db.view.branches(row.a)] if row is not None else ["main"]
