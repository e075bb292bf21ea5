"""An agent that is made for one run: it comes with the run's beginning, in one transaction.

Owns that transaction. How a run begins is the business of ``runs``, what is written of ``agent.branch``. What always
holds: the agent, its branch, the first checkpoint and the record with which the run begins are there together or not at
all, so that what is refused leaves no empty agent; nobody has been the branch's writer then, and whoever comes first
may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.agent import watchers
from holdfast.agent.branch import BranchWriter, Pending
from holdfast.agent.names import check_name
from holdfast.agent.store import MAIN, new_agent
from holdfast.errors import HoldfastError, StorePoisoned
from holdfast.run.durables import Durable, Options, check_id
from holdfast.run.line import entries
from holdfast.run.past import Past
from holdfast.run.runs import beginning, called_with
from holdfast.store.catalog import BEGINNING, Branch
from holdfast.store.changes import Change, NewRecord
from holdfast.store.engine import Refused, Unsure

if TYPE_CHECKING:
    from holdfast.run.store import Store


class _Unborn:
    """An agent that is not there yet."""

    handle = None
    config_hash = ""

    def __init__(self, store: Store, name: str) -> None:
        self.name, self.registry = name, store._registry


def found(
    store: Store, name: str, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, id: str
) -> bool:
    """Add an agent with a run that waits for somebody. False: it was not made here, and may be there by now."""
    options = replace(options, id=check_id(id))
    check_name(name, "an agent")
    agent = _Unborn(store, name)
    given, mark = called_with(agent, made, args, kwargs)
    begin, stowed = beginning(agent, made, given, mark, options, made.queue)
    begin.life, begin.taken = Past().incarnation, []
    label = f"run {made.name}"
    writer = BranchWriter(store, Branch(0, 0, MAIN, b"", {}, 0, b"", 0, 0, *BEGINNING, 0, 0))

    def note(pending: Pending) -> list[NewRecord]:
        begin.start = pending.id
        return entries(begin)

    def add(change: Change) -> Branch:
        if change.agent(name) is not None:
            raise Refused(f"there is an agent {name!r} by now")
        return new_agent(change, name)[1]

    with watchers.watching("checkpoint", name, MAIN, label=label, kind="checkpoint") as watch:
        pending = writer._capture(
            store._empty(), label, "checkpoint", b"", mark=watch.mark, note=note, nodes=stowed.nodes,
            chunks=stowed.chunks,
        )  # fmt: skip
        try:
            branch = store._db.change(writer.founding(pending, add))
        except Unsure:  # whoever opens the agent sees whether it is there
            return False
        except HoldfastError as error:
            if pending.pack and not isinstance(error, StorePoisoned):
                store._db.packs.discard(pending.pack)  # nothing names it
            if isinstance(error, Refused):  # somebody was faster, or something that it names was forgotten just now
                return False
            raise
        watch.tell(id=pending.id.hex(), depth=branch.depth, size_bytes=pending.size_bytes)
    return True
