"""What the tests of transfer share: histories with everything in them, and all that can be seen of an agent.

``view`` gives one value for an agent: two stores with equal views of it answer every question about it alike.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast.agent.graph import Graph
from holdfast.codec.values import encode
from holdfast.errors import HoldfastError
from holdfast.store.changes import Said

if TYPE_CHECKING:
    import random

# Bodies of branches hold these for one store only.
_OWN = {"origins", "arriving", "recovered"}


def view(store: holdfast.Store, name: str, *, states: bool = True) -> dict[str, Any]:
    """Everything that can be seen of an agent, without the numbers of this store."""
    now = store._db.view
    agent = store._agent_row(name)
    graph = Graph(now, agent)
    checkpoints = {}
    order = []
    for point in graph.everything():
        made = holdfast.Checkpoint.of(store, agent, point)
        order.append(made.id)
        checkpoints[made.id] = (
            made.label, made.depth, made.validity, made.validity_reason, sorted(made.tags), point.row.key,
            made.metadata, now.operations(point), point.manifest.effects,
            [repr(change) for change in made.changes()] if states and not made.cut else (),
            {section: encode(made.state.raw_section(section)) for section in made.state} if states else (),
        )  # fmt: skip
    branches = {}
    for row in graph.branches:
        branches[row.name] = (
            {key: value for key, value in row.body.items() if key not in _OWN},
            row.uuid, row.id, row.records, row.chain,
            [(one.i, one.mark, one.refs, one.body) for one in now.line(row.line)],
        )  # fmt: skip
    keys = {entry.key for entry in now.log(agent.a)} | {point.row.key for point in graph.everything()}
    kept = [(entry.at, entry.key, entry.body) for entry in graph.under(list(keys - {b""}))]
    return {"uuid": agent.uuid, "order": order, "checkpoints": checkpoints, "branches": branches, "kept": kept}


def assert_same(source: holdfast.Store, dest: holdfast.Store, name: str, *, states: bool = True) -> None:
    ours, theirs = view(source, name, states=states), view(dest, name, states=states)
    for key in ours:
        assert ours[key] == theirs[key], key
    report = dest.verify()
    assert report.ok, str(report)


@holdfast.tool(name="transferred.book", effect="idempotent")
def book(what: str) -> dict[str, Any]:
    return {"booked": what, "note": "n" * 100}


@holdfast.tool(name="transferred.look", effect="read")
def look(what: str) -> str:
    return f"{what} " * 4_000


def grow(store: holdfast.Store, name: str, choose: random.Random, steps: int) -> None:
    """Random things happen to an agent: whatever can be in a history."""
    branches = {"main": store.agent(name)}
    for _ in range(steps):
        here = choose.choice(list(branches.values()))
        state = here.state
        match choose.randrange(14):
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
            case 5:
                rows = list(here.log())
                if rows:
                    here.rollback(choose.choice(rows), effects="keep")
            case 6:
                rows = list(here.log())
                if rows and len(branches) < 4:
                    new = f"try-{len(here.branches())}"
                    branches[new] = here.branch(new, at=choose.choice(rows))
            case 7:
                rows = list(here.log())
                if rows:
                    store.tag(name, f"tag-{choose.randrange(3)}", choose.choice(rows))
            case 8:
                with suppress(HoldfastError):
                    store.untag(name, f"tag-{choose.randrange(3)}")
            case 9:
                rows = list(here.log())
                if rows:
                    store.mark(name, choose.choice(rows), choose.choice(["good", "suspect"]), "because")
            case 10:
                here.accept()
                with here:
                    book(f"seat {choose.randrange(100)}")
                    look("weather")
                branches[here.branch_name] = here = store.agent(name, branch=here.branch_name)
                here.checkpoint("acted")
            case 11:
                store.signal(name, "go", choose.randrange(100))
            case 12:  # as an integration does: a checkpoint with a key, and what is kept under it
                key = b"key %d" % choose.randrange(3)
                said = [Said({"what": "write", "value": choose.randbytes(20)}, key) for _ in range(2)]
                writer = here._check_writer()
                here._remember(writer.finish(writer.capture(here._document, "", key=key, said=said)))
            case 13:
                with suppress(HoldfastError):
                    here.undo()
    for one in branches.values():
        one.close()


def plain(store: holdfast.Store, name: str, checkpoints: int, size: int = 200) -> None:
    """An agent that says something ``checkpoints`` more times."""
    agent = store.agent(name)
    agent.state.setdefault("messages", [])
    for number in range(checkpoints):
        agent.state["messages"].append({"content": os.urandom(size // 2).hex()})
        agent.checkpoint(f"{number}")
    agent.close()
