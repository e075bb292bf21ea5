"""Which recorded run a program means, and with which arguments it goes on.

Owns the rules by which a run is resumed, begun anew or refused. Writes nothing. What always holds: a run that has not
ended is not passed over, unless it has failed and something else is wanted.
"""

from __future__ import annotations

from typing import Any

from holdfast.codec.types import Registry
from holdfast.errors import BadOption, RunUnfinished
from holdfast.run.arguments import Blocks, fetch
from holdfast.run.durables import Durable, Options
from holdfast.run.past import LOST, ROLLED_BACK, Past, RunPast
from holdfast.run.scope import Host

ID_MAX = 200


def choose(agent: Host, past: Past, mark: bytes, options: Options) -> RunPast | None:
    """The recorded run that is meant; None for a new one."""
    id, change = options.id, options.change
    for run in past.runs.values():
        if run.begin.function == LOST and run.condition not in {"finished", "cancelled"}:
            raise RunUnfinished(
                f"run {run.id} has not ended, and what was recorded of its beginning is lost",
                run=run.id,
                hint="Roll back to before it began.",
            )
    if id is not None:
        if not id or len(id) > ID_MAX:
            raise BadOption(f"a run's id has 1 to {ID_MAX} characters, not {len(id)}")
        named = past.runs.get(id)
        if named is not None and not change and mark_of(agent, named) != mark:
            raise RunUnfinished(
                f"run {id!r} was begun with another function or other arguments ({named.begin.function})",
                run=id,
                hint="Use another id, or the same function and arguments.",
            )
        if named is not None:
            return named
    open_run = past.unfinished()
    if open_run is None:
        return None
    if open_run.begin.kind == "rollback":
        raise RunUnfinished("a rollback of this agent has not ended", run=open_run.id, hint="Finish it first.")
    if id is None and (change or mark_of(agent, open_run) == mark):
        return open_run
    if open_run.condition in {"failed", ROLLED_BACK}:
        return None
    raise RunUnfinished(
        f"run {open_run.id} of {open_run.begin.function} has not ended ({open_run.condition or 'interrupted'})",
        run=open_run.id,
        hint=f"Finish it with agent.resume({open_run.id!r}) or by running it again with its own arguments, go on with"
        " others and .options(change=True), or roll back to before it began.",
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
