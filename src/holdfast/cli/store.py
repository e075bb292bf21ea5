"""``holdfast init``, ``verify``, ``repair``, ``retain`` and ``tier``: a new store, and the care of one.

Proving what is in it, saving what is left of a damaged one, letting go what nobody needs, old bulk data elsewhere.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Policy, RepairReport, RestoreReport, RetentionReport, Store, VerifyReport
from holdfast.cli.exits import DAMAGED, FAILED
from holdfast.cli.keys import ASKED, KeySource, environment_has_a_key
from holdfast.cli.output import Output
from holdfast.cli.session import ASKS, SHOWN, Agents, Consent, Flag, Given, Json, Session, bars, option, shown
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption, Damaged, StoreCopied, StoreWentBack

_OBJECTS = (
    "Where a store that is made now keeps large values: a directory, or a URL such as s3://bucket/prefix (needs the"
    " extra objects). It stays so. [default: in the store's directory]"
)
Objects = Annotated[str | None, option(_OBJECTS, "PLACE")]

# Ids that a problem lists, and what else is listed for people; the JSON has all.
_IDS = 6
_LISTED = 20
_SAVE = "`holdfast repair` says what can be saved, `holdfast repair --to DIR` makes a new store of it."
_RESTORED = {
    (False, False): Text("ok", style="green"),
    (True, False): Text("lost", style="bold red"),
    (True, True): Text("unknown", style="bold yellow"),
}


# -- init -----------------------------------------------------------------------------------------------------------


def init(
    place: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    objects: Objects = None,
    encrypt: Flag = False,
    source: KeySource = ASKED,
    json: Json = False,
    session: Given,
) -> int:
    """Make a new store that needs an option; programs make others.

    Parameters
    ----------
    place
        Its directory, or postgresql://... [default: --store, $HOLDFAST_STORE, or ./.holdfast]
    encrypt
        Encrypt it: with the key of $HOLDFAST_KEY, _FILE or _COMMAND, or with a passphrase that is asked for.
    """
    if source.named and not encrypt:
        raise BadOption("a key was named without --encrypt", hint="holdfast init PLACE --encrypt --key-file FILE")
    if not encrypt and environment_has_a_key():
        raise BadOption(
            "a key is set in the environment, but --encrypt was not given",
            hint="Add --encrypt, or unset HOLDFAST_KEY, HOLDFAST_KEY_FILE and HOLDFAST_KEY_COMMAND.",
        )

    def key() -> str | holdfast.keys.Secret | None:
        asks = source.named or not environment_has_a_key()
        return source.chosen("Passphrase of the new store") if asks else None

    where = place if place is not None else session.place
    made = holdfast.keys.init(where, key if encrypt else False, objects=objects)
    if json:
        return session.json("init", store=made, encrypted=encrypt)
    session.out.say(f"Made {'an encrypted' if encrypt else 'a'} store at {clean(made)}.")
    if encrypt:
        session.out.say("If every key is lost, so is the store: keep a copy of the key.")
    return 0


# -- verify ---------------------------------------------------------------------------------------------------------


def verify(
    *agents: Agents,
    restore: Flag = False,
    sample: Annotated[int, Parameter(metavar="N")] = 20,
    place: Annotated[Path | None, Parameter(metavar="DIR", show_default=False)] = None,
    json: Json = False,
    session: Given,
) -> int:
    """Read everything in the store and prove it.

    Every digest, and the chain of checkpoints. Ends with 5 when something is damaged, with 6 when nothing is known to
    be, and packs lie in a place that cannot be reached now.

    Parameters
    ----------
    restore
        Instead, restore agents in a scratch place, as after a loss, and prove everything that came back. They are
        taken at random, and come with their whole histories. The scratch place is removed.
    sample
        With --restore: how many agents, unless some are named.
    place
        With --restore: where the scratch place is made. [default: beside the store]
    """
    if restore:
        return _restore(session, agents, sample, place, json=json)
    try:
        with session.reading() as store:
            names = [store.resolve(name)[0] for name in agents]
            with bars(session.err) as progress:
                report = store.verify(progress, names)
            if json:
                session.json("verify", store=store.place, **report.to_json())
            else:
                _print_verified(session.out, report)
    except Damaged as error:  # so badly that it cannot even be opened
        if "holdfast verify" in error.hint or not error.hint:
            error.hint = _SAVE
        if not json:
            raise
        problem = {"what": ", ".join(error.what) or "store", "detail": error.message, "agent": "", "affected": []}
        found = {"ok": False, "checked": {}, "problems": [problem], "affected": [], "unreachable": []}
        session.json("verify", store=shown(session.place), **found)
        return DAMAGED
    return 0 if report.ok else DAMAGED if report.problems else FAILED


def _print_verified(out: Output, report: VerifyReport) -> None:
    checked = [
        size(number) if what == "bytes" else count(number, what.removesuffix("s").replace("_", " "))
        for what, number in report.checked.items()
    ]
    out.say(f"Checked {', '.join(checked)}.")
    if report.ok:
        out.say(Text("Everything is as it was written.", style="bold green"))
        return
    for away in report.unreachable:
        what = f"{count(away.packs, 'pack')} and {count(len(away.checkpoints), 'checkpoint')} could not be looked at: "
        out.say(Text(what, style="bold yellow"), clean(away.detail))
        _ids(out, away.checkpoints)
        out.say(f"  {clean(away.hint)}")
    if not report.problems:
        out.say("Everything else is as it was written.")
        return
    out.say(Text(f"{count(len(report.problems), 'problem')} found.", style="bold red"))
    for problem in report.problems:
        whose = f" ({clean(problem.agent)})" if problem.agent else ""
        out.say(Text(f"  {clean(problem.what)}{whose}: ", style="red"), clean(problem.detail))
        _ids(out, problem.affected)
    if report.affected:
        others = "" if report.unreachable else "; the others are proven"
        out.say(f"{count(len(report.affected), 'checkpoint')} cannot be trusted{others}.")
    out.say('store.agent("NAME", recover=True) continues from the newest valid checkpoint of a damaged agent.')
    out.say(_SAVE)


def _ids(out: Output, checkpoints: list[str]) -> None:
    if checkpoints:
        ids = ", ".join(one[:12] for one in checkpoints[:_IDS])
        more = len(checkpoints) - _IDS
        out.say(Text(f"    checkpoints: {ids}{f' and {more} more' if more > 0 else ''}", style="yellow"))


def _restore(session: Session, agents: tuple[str, ...], sample: int, place: Path | None, *, json: bool) -> int:
    with session.reading() as store, bars(session.err) as progress:
        names = [store.resolve(name)[0] for name in agents]
        report = store.verify_restore(names, sample=sample, place=place, progress=progress)
    if json:
        session.json("verify.restore", **report.to_json())
    else:
        _print_restored(session.out, report)
    lost = any(one.problem and not one.unknown for one in report.agents)
    return 0 if report.ok else DAMAGED if lost else FAILED


def _print_restored(out: Output, report: RestoreReport) -> None:
    failed = [one for one in report.agents if one.problem]
    good = [one for one in report.agents if not one.problem]
    rows = [
        (
            _RESTORED[bool(one.problem), one.unknown],
            Text(clean(one.agent), style="bold cyan"),
            f"{one.checkpoints:,}" if one.checkpoints else "",
            clean(one.problem),
        )
        for one in (*failed, *good[:_LISTED])
    ]
    if rows:
        out.columns(("", "agent", "checkpoints", ""), rows, right=(2,))
    if len(good) > _LISTED:
        out.say(f"and {len(good) - _LISTED:,} more that came back; --json has all.")
    done = f"{len(good)} of {count(len(report.agents), 'agent')} restored and proven"
    out.say(
        Text(f"{done} ({size(report.bytes)}).", style="bold red" if failed else "bold green"),
        f" The store has {report.total:,}.",
    )


# -- repair ---------------------------------------------------------------------------------------------------------


def repair(
    *,
    to: Annotated[str | None, Parameter(metavar="DIR", show_default=False)] = None,
    trust_older: Flag = False,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Save what is intact of a damaged store, and say what is lost.

    It goes into a new store. The damaged store is not changed. Without --to it only says what could be saved. Ends with
    5 when something is lost.

    Parameters
    ----------
    to
        Where the new store goes. Nothing may be there yet.
    trust_older
        Instead, take a store as it is that is older than it was when it was last used here: for a backup that was put
        back on purpose. Says what is missing, and asks.
    """
    if trust_older:
        if to is not None:
            raise BadOption("--trust-older and --to", hint="One takes the store as it is, the other makes a new one.")
        return _trust(session, consent)
    with bars(session.err) as progress:
        report = holdfast.repair(session.place, None if consent.dry_run else to, progress=progress)
    if consent.json:
        session.json("repair", **report.to_json())
    else:
        _print_repaired(session.out, report)
    return 0 if report.whole else DAMAGED


def _trust(session: Session, consent: Consent) -> int:
    missing, trusted = "", False
    try:
        with session.reading() as store:
            place = store.place
        session.writing().close()  # a copy can be read
    except (StoreWentBack, StoreCopied) as error:
        missing, place = error.lost, shown(session.place) or ""
        if not consent.json:
            session.out.say(f"Not in this store any more: {clean(missing)}.")
        trusted = consent.given(session, "Use it as it is from now on?")
    if trusted:
        with session.opened(session.place, create=False, inert=True, trust_older=True) as store:
            place = store.place
    if consent.json:
        session.json("repair.trust-older", store=place, trusted=trusted, missing=missing)
    elif not missing:
        session.out.say("There is nothing to decide: the store is as new as it was.")
    elif trusted:
        session.out.say("Trusted: the store is used as it is.")
    return consent.code(done=trusted or not missing)


def _print_repaired(out: Output, report: RepairReport) -> None:
    _list(out, "What is wrong with the files:", report.problems)
    # Of many agents, those that something is lost of: the others are fine.
    many = len(report.agents) > _LISTED
    for agent in report.agents:
        if many and agent.whole:
            continue
        kept = f"{count(agent.checkpoints, 'checkpoint')}, {count(agent.effects, 'effect record')}"
        out.say(Text(clean(agent.name), style="bold cyan"), f": {kept}", " kept." if report.to else " can be kept.")
        lost = [f"checkpoint {one.id[:12]} {one.label!r}: {one.why}" for one in agent.lost_checkpoints]
        _list(out, "  Lost:", [*agent.lost, *lost], indent="    ")
    if many:
        out.say(f"{sum(agent.whole for agent in report.agents):,} of {count(len(report.agents), 'agent')} are whole.")
    _list(out, "Lost, and nobody knows whose it was:", report.missing)
    if report.older:
        out.say(
            Text("This is an older copy of the store than the one that was last used here. ", style="bold red"),
            f"Not in it: {clean(report.older)}.",
        )
        out.say("If there is a newer one, save that. If this was put back on purpose: `holdfast repair --trust-older`.")
    if report.whole:
        out.say(Text("Nothing is lost.", style="bold green"))
    if report.to is None:
        out.say(Text("Nothing was written.", style="bold"), " Add --to DIR to make the new store.")
    else:
        out.say(f"The new store is {clean(str(report.to))}. The damaged one was not changed.")


def _list(out: Output, title: str, lines: list[str], indent: str = "  ") -> None:
    if not lines:
        return
    out.say(Text(title, style="bold"))
    for line in lines[:_LISTED]:
        out.say(indent + clean(line))
    if len(lines) > _LISTED:
        out.say(f"{indent}and {len(lines) - _LISTED} more (--json has all)")


# -- retain and tier ------------------------------------------------------------------------------------------------

# Reasons that a line of the table has room for; the JSON has all.
_REASONS = 3
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
    *agents: Agents,
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
    """Keep less of histories: let go what the rules do not keep.

    Shows first what goes, for good, then asks. What any of the rules keeps is kept. Whatever they say, these stay:
    where each branch stands, tagged checkpoints, and what an unfinished run or an effect in doubt needs. Without rules,
    those count that are kept in the store. Agents may be written meanwhile.

    Parameters
    ----------
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
        return _set_policy(session, policy, agents, json=consent.json)
    with consent.opened(session) as store:
        names = [store.resolve(name)[0] for name in agents] or None
        if policy is None and not store.policies():
            raise BadOption(
                "there is no rule what to keep", hint="Give some, as --last 100, or keep some in the store with --save."
            )
        report = store.retain(policy, names, dry_run=True)
        something = bool(report.removed or report.values)
        if not consent.json:
            _print_retained(session.out, report)
        if something and consent.given(session, "Let it go for good?"):
            report = store.retain(policy, names)
        if consent.json:
            session.json("retain", **report.to_json(), policies=_stored(store))
        elif report.done:
            freed = f"The store is {size(report.freed_bytes)} smaller."
            session.out.say(Text(f"Removed {_gone(report)}. ", style="bold green"), freed)
    return consent.code(done=report.done or not something)


def _set_policy(session: Session, policy: Policy | None, agents: tuple[str, ...], *, json: bool) -> int:
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


def _print_retained(out: Output, report: RetentionReport) -> None:
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
    more = len(reasons) - _REASONS
    return clean(", ".join(reasons[:_REASONS]) + (f" and {more} more" if more > 0 else ""))


def tier(
    *,
    to: Annotated[str, Parameter(metavar="PLACE", show_default=False)] = "",
    older_than: Span = "",
    back: Flag = False,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Move old bulk data that no branch needs to a colder place.

    Shows first which packs would move, then asks. They are read from there when they are needed. The place must stay
    where it is.

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
        something = bool(found.packs or (back and found.place))  # a place with nothing in it is to be forgotten, too
        if not consent.json:
            session.out.say(f"{packs} would move {where}.")
            for number, why in ((found.needed, "needed where a branch stands"), (found.young, "too young")):
                if number:
                    session.out.say(f"{count(number, 'pack')} {'stays' if number == 1 else 'stay'} here: {why}.")
        if something and consent.given(session, "Move them?" if found.packs else "Forget the place?"):
            with bars(session.err) as progress:
                found = store.tier(to or None, older_than=age, progress=progress)
        if consent.json:
            session.json("tier", **found.to_json())
        elif found.done:
            packs = f"{count(found.packs, 'pack')} ({size(found.moved_bytes)})"
            session.out.say(Text(f"Moved {packs} ", style="bold green"), f"{where}.")
    return consent.code(done=found.done or not something)
