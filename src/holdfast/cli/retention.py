"""``holdfast retain`` and ``tier``: what to keep of histories, letting the rest go, and old bulk data elsewhere."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from holdfast import Policy, RetentionReport, Store
from holdfast.cli.output import Output
from holdfast.cli.session import ASKS, SHOWN, Consent, Flag, Given, Name, Session, bars
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption

# Reasons that a line of the table has room for; the JSON has all.
_SHOWN = 3
_SPAN = re.compile(r"^(\d{1,6})([smhdw])$")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

Count = Annotated[int, Parameter(metavar="N", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(metavar="PATTERN", show_default=False, negative="")]
Span = Annotated[str, Parameter(metavar="SPAN", show_default=False)]


def span(text: str) -> timedelta:
    """The span of time that a text names: ``45s``, ``90m``, ``12h``, ``30d``, ``2w``."""
    found = _SPAN.match(text.strip())
    if found is None:
        raise BadOption(f"{text!r} is not a span of time", hint="Write a number and a unit: 45s, 90m, 12h, 30d or 2w.")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


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
    save: Flag = False,
    drop: Flag = False,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Keep less: let go, for good, what the rules do not keep. Shows first what goes, then asks.

    What any of the rules keeps is kept. Whatever they say, these stay: where each branch stands, tagged checkpoints,
    and what an unfinished run or an effect in doubt needs. Without rules, those count that are kept in the store.
    Agents may be written meanwhile.

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
    save
        Only keep these rules in the store: for the agents named, or else for all. Programs then follow them.
    drop
        Only take the rules out of the store again: of the agents named, or else the rules for all.
    """
    rules: dict[str, Any] = {"last": last, "hourly": hourly, "daily": daily, "weekly": weekly}
    rules |= {"labels": label or (), "branches": branch or (), "newer_than": span(newer_than) if newer_than else None}
    given = any(rules.values()) or without_tags or bool(runs)
    kept = None if not runs else int(runs) if runs.isdecimal() else span(runs)
    policy = Policy(**rules, tags=not without_tags, runs=kept) if given else None
    if drop and (given or save):
        raise BadOption("--drop takes rules out of the store, and nothing else", hint="Leave the other options out.")
    if save and policy is None:
        raise BadOption("--save needs rules", hint="Say what to keep: --last 100, for instance.")
    if save or drop:
        return _set(session, policy, agents, json=consent.json)
    with consent.opened(session) as store:
        names = [store.resolve(name)[0] for name in agents] or None
        if policy is None and not store.policies():
            raise BadOption(
                "there is no rule what to keep", hint="Give some, as --last 100, or keep some in the store with --save."
            )
        report = store.retain(policy, names, dry_run=True)
        something = bool(report.removed or report.values)
        if not consent.json:
            _print(session.out, report)
        if something and consent.given(session, "Let it go for good?"):
            report = store.retain(policy, names)
        if consent.json:
            session.json("retain", **report.to_json(), policies=_stored(store))
        elif report.done:
            freed = f"The store is {size(report.freed_bytes)} smaller."
            session.out.say(Text(f"Removed {_gone(report)}. ", style="bold green"), freed)
    return consent.code(done=report.done or not something)


def _set(session: Session, policy: Policy | None, agents: tuple[str, ...], *, json: bool) -> int:
    """Keep rules in the store, or take them out."""
    with session.writing() as store:
        for agent in agents:
            store.set_policy(policy, store.resolve(agent)[0])
        if not agents:
            store.set_policy(policy)
        if json:
            return session.json("policies", policies=_stored(store))
        for name, one in store.policies().items():
            session.out.say(f"{clean(name) if name is not None else 'all others'}: {clean(str(one))}")
        if not store.policies():
            session.out.say("The store has no rules of its own.")
        elif policy is not None:
            session.out.say("Programs that write these agents follow the rules; `holdfast retain` applies them now.")
    return 0


def _stored(store: Store) -> list[dict[str, Any]]:
    return [{"agent": name, "policy": policy.to_json()} for name, policy in store.policies().items()]


def _print(out: Output, report: RetentionReport) -> None:
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
    if report.removed or report.values:
        out.say(f"In all {_gone(report)} would go, and free about {size(report.freed_bytes)}.")
    else:
        out.say("There is nothing to let go.")


def _gone(report: RetentionReport) -> str:
    values = f", the values of {count(report.values, 'record')}" if report.values else ""
    return f"{count(report.removed, 'checkpoint')}{values}"


def _why(reasons: tuple[str, ...]) -> str:
    more = len(reasons) - _SHOWN
    return clean(", ".join(reasons[:_SHOWN]) + (f" and {more} more" if more > 0 else ""))


def tier(
    *,
    to: Annotated[str, Parameter(metavar="PLACE", show_default=False)] = "",
    older_than: Span = "",
    back: Flag = False,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Move packs of bulk data that no branch needs now to a colder place. Shows first what would move, then asks.

    They are read from there when they are needed. The place must stay where it is.

    Parameters
    ----------
    to
        A directory, on another disk for instance, or a URL such as s3://bucket/packs (needs the extra objects).
    older_than
        Only packs that were written longer ago: 45s, 90m, 12h, 30d, 2w. [default: all]
    back
        Bring everything back instead.
    """
    if bool(to) == back:
        raise BadOption("say where to", hint="Use --to PLACE, or --back to bring everything back.")
    age = span(older_than) if older_than else timedelta(0)
    with consent.opened(session) as store:
        found = store.tier(to or None, older_than=age, dry_run=True)
        packs = f"{count(found.packs, 'pack')} ({size(found.moved_bytes)})"
        where = f"from {clean(found.place) or 'nowhere'}" if back else f"to {clean(found.place)}"
        something = bool(found.packs)
        if not consent.json:
            session.out.say(f"{packs} would move {where}.")
            for number, why in ((found.needed, "needed where a branch stands"), (found.young, "too young")):
                if number:
                    session.out.say(f"{count(number, 'pack')} {'stays' if number == 1 else 'stay'} here: {why}.")
        if something and consent.given(session, "Move them?"):
            with bars(session.err) as progress:
                found = store.tier(to or None, older_than=age, progress=progress)
        if consent.json:
            session.json("tier", **found.to_json())
        elif found.done:
            packs = f"{count(found.packs, 'pack')} ({size(found.moved_bytes)})"
            session.out.say(Text(f"Moved {packs} ", style="bold green"), f"{where}.")
    return consent.code(done=found.done or not something)
