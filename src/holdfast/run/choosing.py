"""Which recorded run a program means, and with which arguments it goes on.

Owns the rules by which a run is resumed, begun anew or refused. Writes nothing. What always holds: a run that has not
ended is not passed over; one that has ended is resumed only where nothing was begun or saved since, so that resuming
takes nothing back; what was named and is not to be resumed is not begun anew unless somebody says so.
"""

from __future__ import annotations

from typing import Any

from holdfast.codec.types import Registry
from holdfast.errors import BadOption, RunEnded, RunUnfinished
from holdfast.run.arguments import Blocks, fetch
from holdfast.run.durables import Durable, Options
from holdfast.run.past import LOST, Past, RunPast
from holdfast.run.scope import Host, whose

ID_MAX = 200


def choose(agent: Host, past: Past, mark: bytes, options: Options) -> RunPast | None:
    """The recorded run that is meant; None for a new one."""
    id, change = options.id, options.change
    owner = past.owner(agent.origin)
    for run in past.runs.values():
        if run.begin.function == LOST and run.status not in {"finished", "cancelled"}:
            raise RunUnfinished(
                f"run {run.id} has not ended, and what was recorded of its beginning is lost",
                run=run.id,
                hint="Roll back to before it began.",
            )
    if owner is not None and owner.begin.kind == "rollback":
        raise RunUnfinished("a rollback of this agent has not ended", run=owner.id, hint="Finish it first.")
    if id is not None and (named := _named(agent, past, mark, options)) is not None:
        return named
    if owner is not None:
        if id is None and (change or mark_of(agent, owner) == mark):
            return owner
        raise unfinished(agent, owner)
    last = past.last
    if id is not None or last is None or last.status in {"finished", "cancelled"}:
        return None
    if not change and mark_of(agent, last) != mark:
        return None
    if agent.stands_in(last):
        return last
    if last.status == "rolled back" and not options.again:  # what it had done before that stands
        raise _ended(last.id, last.status, "something was saved since")
    return None


def _named(agent: Host, past: Past, mark: bytes, options: Options) -> RunPast | None:
    """The run with this id; None where one is to be begun."""
    id = options.id or ""
    if type(id) is not str or not 0 < len(id) <= ID_MAX:
        raise BadOption(f"a run's id is a text of 1 to {ID_MAX} characters, not {id!r:.60}")
    run = past.runs.get(id)
    if run is None:
        if id in past.begun and not options.again:
            raise _ended(id, "rolled back")
        return None
    status = run.status
    if status == "cancelled" or not (
        status == "finished" or run is past.owner(agent.origin) or (run is past.last and agent.stands_in(run))
    ):
        if not options.again:
            raise _ended(id, status, "" if status == "cancelled" else "something was begun or saved since")
        return None
    if not options.change and mark_of(agent, run) != mark:
        what = f"run {id!r} was begun with another function or other arguments ({run.begin.function})"
        if status == "finished":
            raise RunEnded(f"{what}, and has finished", run=id, status=status, hint="Use another id.")
        raise RunUnfinished(what, run=id, hint="Use another id, or the same function and arguments.")
    return run


def _ended(id: str, status: str, since: str = "") -> RunEnded:
    how = {"failed": "has failed", "": "was inherited, unfinished"}.get(status, f"was {status}")
    return RunEnded(
        f"run {id!r} {how}{f', and {since}' if since else ''}: it is not begun anew",
        run=id,
        status=status or "inherited",
        hint="Begin it anew on purpose, with .options(again=True) or --again, or use another id.",
    )


def unfinished(agent: Host, run: RunPast, *, executing: bool = False) -> RunUnfinished:
    """The error that says whose the branch is, and the ways out."""
    words = {"": "executing" if executing else "interrupted", "attention": "needs attention"}
    if run.begin.kind == "rollback":
        return RunUnfinished(
            f"a rollback of {agent.name} has begun and not ended",
            run=run.id,
            hint="It is finished by `with agent:`, agent.run(...) or agent.rollback(...).",
        )
    if run.begin.kind == "map":
        return RunUnfinished(
            f"a batch of {run.begin.function} has not ended ({words.get(run.status, run.status)})",
            run=run.id,
            hint=f"Resume it by calling store.map once more, cancel it with agent.cancel({run.id!r}) or `holdfast runs"
            f" cancel {whose(agent)} {run.id}`, or roll back to before it began.",
        )
    return RunUnfinished(
        f"run {run.id} of {run.begin.function} has not ended ({words.get(run.status, run.status)})",
        run=run.id,
        hint=f"Resume it with agent.resume({run.id!r}) or by running it again, with its own arguments or with others"
        f" and .options(change=True); cancel it with agent.cancel({run.id!r}) or `holdfast runs cancel {whose(agent)}"
        f" {run.id}`; work on a branch with agent.branch(NAME, at=agent.head); or roll back to before it began.",
    )


ARGUMENTS = "=arguments"
"""The path, which no call has, of the note that says which arguments a run goes on with."""


def mark_of(agent: Host, run: RunPast) -> bytes:
    """The fingerprint of the function and the arguments that a run was executed with last."""
    changed = run.notes.get(ARGUMENTS)
    if changed is None:
        return run.begin.fingerprint
    return bytes(fetch(changed.value, agent.ledger, agent.registry, inert=True)["fingerprint"])


def arguments_of(run: RunPast, blocks: Blocks, registry: Registry, *, inert: bool = False) -> dict[str, Any]:
    """The arguments that a run was executed with last."""
    changed = run.notes.get(ARGUMENTS)
    found = fetch(changed.value if changed is not None else run.begin.args, blocks, registry, inert=inert)
    return dict(found["arguments"] if changed is not None else found)


def call_of(
    run: RunPast, made: Durable, agent: Any, blocks: Blocks, registry: Registry
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same as whoever calls the function with that agent would write them."""
    given = arguments_of(run, blocks, registry)
    args, kwargs = made.binder.spread({next(iter(made.binder.signature.parameters)): agent, **given})
    return args[1:], kwargs
