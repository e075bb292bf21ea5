"""``holdfast retain``: what to keep of histories, what would go, and letting it go."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from holdfast import Policy, RetentionReport, Store
from holdfast.cli.output import Output
from holdfast.cli.session import SHOWN, Flag, Given, Json, Name
from holdfast.cli.spans import span
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption

SCHEMA = "holdfast.retain/1"
# Reasons that a line of the table has room for; the JSON has all.
_SHOWN = 3

Count = Annotated[int, Parameter(metavar="N", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(metavar="PATTERN", show_default=False, negative="")]
Span = Annotated[str, Parameter(metavar="SPAN", show_default=False)]


def retain(
    *agents: Name,
    last: Count = 0,
    hourly: Count = 0,
    daily: Count = 0,
    weekly: Count = 0,
    label: Patterns = None,
    branch: Patterns = None,
    newer_than: Span = "",
    without_tags: Flag = False,
    runs: Annotated[str, Parameter(metavar="N|SPAN", show_default=False)] = "",
    do: Flag = False,
    save: Flag = False,
    drop: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Keep less: show what the rules keep and what would go. With --do it goes, for good.

    What several rules keep is kept by all of them together. Whatever they say, these stay: where each branch stands,
    tagged checkpoints, and what an unfinished run or an effect in doubt needs. Without rules, those count that are kept
    in the store. Agents may be written meanwhile.

    Parameters
    ----------
    agents
        Only these agents. [default: all]
    last
        Keep the last N of each branch.
    hourly
        Keep the newest of each of the last N hours that have one.
    daily
        Keep the newest of each of the last N days that have one.
    weekly
        Keep the newest of each of the last N weeks that have one.
    label
        Keep those with such a label (may be given more than once).
    branch
        Keep everything on such branches (may be given more than once).
    newer_than
        Keep everything younger than that: 45s, 90m, 12h, 30d, 2w.
    without_tags
        Let tagged ones go, too, and their tags with them.
    runs
        Keep the values that were recorded of the last N runs of each branch that have ended, or of those of the last
        SPAN (30d); let those of others go. Without this, all stay.
    do
        Do it. Without this, nothing is changed.
    save
        Keep these rules in the store: for the agents named, or else for all. Programs then follow them by themselves.
    drop
        Take the rules out of the store again: of the agents named, or else the rules for all.
    json
        Print JSON (schema holdfast.retain/1).
    """
    rules: dict[str, Any] = {"last": last, "hourly": hourly, "daily": daily, "weekly": weekly}
    rules |= {"labels": label or (), "branches": branch or (), "newer_than": span(newer_than) if newer_than else None}
    given = any(rules.values()) or without_tags or bool(runs)
    kept = None if not runs else int(runs) if runs.isdecimal() else span(runs)
    policy = Policy(**rules, tags=not without_tags, runs=kept) if given else None
    if drop and (given or save or do):
        raise BadOption("--drop takes rules out of the store, and nothing else", hint="Leave the other options out.")
    if save and policy is None:
        raise BadOption("--save needs rules", hint="Say what to keep: --last 100, for instance.")
    with session.writing() if do or save or drop else session.reading() as store:
        names = [store.resolve(name)[0] for name in agents] or None
        if save or drop:
            for name in names if names is not None else (None,):
                store.set_policy(policy, name)
        if drop:
            return _policies(store, session.out, json=json)
        if policy is None and not store.policies():
            raise BadOption(
                "there is no rule what to keep", hint="Give some, as --last 100, or keep some in the store with --save."
            )
        report = store.retain(policy, names, dry_run=not do)
        if json:
            session.out.json({"schema": SCHEMA, **report.to_json(), "policies": _stored(store)})
        else:
            _print(session.out, report, saved=save)
    return 0


def _stored(store: Store) -> list[dict[str, Any]]:
    return [{"agent": name, "policy": policy.to_json()} for name, policy in store.policies().items()]


def _policies(store: Store, out: Output, *, json: bool) -> int:
    if json:
        empty = {"agents": [], "kept": 0, "removed": 0, "values": 0, "freed_bytes": 0, "done": False}
        out.json({"schema": SCHEMA, **empty, "policies": _stored(store)})
        return 0
    for name, policy in store.policies().items():
        out.say(f"{clean(name) if name is not None else 'all others'}: {clean(str(policy))}")
    if not store.policies():
        out.say("The store has no rules of its own.")
    return 0


def _print(out: Output, report: RetentionReport, *, saved: bool) -> None:
    many = len(report.agents) > SHOWN
    for agent in [one for one in report.agents if one.skipped][:SHOWN] if many else report.agents:
        name = Text(clean(agent.agent), style="bold cyan")
        if agent.skipped:
            out.say(name, f": left alone, {clean(agent.skipped)}.")
            continue
        values = f" So do the values of {count(agent.values, 'record')} of its runs." if agent.values else ""
        out.say(name, f" ({clean(str(agent.policy))}): {len(agent.kept):,} stay, {len(agent.removed):,} go.{values}")
        rows = [
            (f"#{one.depth}", one.id[:12], f"{one.time:%Y-%m-%d %H:%M}", clean(one.label), _why(one.why))
            for one in agent.kept
        ]
        if rows:
            out.columns(("depth", "id", "time (UTC)", "label", "stays because of"), rows)
    if many:
        told = f"{count(len(report.agents), 'agent')}: {report.kept:,} stay, {report.removed:,} go; --json has all."
        out.say(told)
    freed = size(report.freed_bytes)
    values = f", the values of {count(report.values, 'record')}" if report.values else ""
    if saved:
        out.say("The rules are kept in the store; programs that write these agents follow them.")
    if report.done:
        gone = count(report.removed, "checkpoint")
        out.say(Text(f"Removed {gone}{values}. ", style="bold green"), f"The store is {freed} smaller.")
    else:
        gone = f"{count(report.removed, 'checkpoint')}{values} would go and free about {freed}."
        more = " Add --do to do it." if report.removed or report.values else ""
        out.say(Text("Dry run: nothing was changed. ", style="bold"), gone, more)


def _why(reasons: tuple[str, ...]) -> str:
    more = len(reasons) - _SHOWN
    return clean(", ".join(reasons[:_SHOWN]) + (f" and {more} more" if more > 0 else ""))
