"""``holdfast agents``, ``copy``, ``remove`` and ``events``: who is in the store, and what was decided about one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.text import Text

from holdfast import AgentInfo
from holdfast.cli.session import ASKS, Consent, Flag, Given, Json, Limit, Name, Pattern, limited, reader
from holdfast.cli.text import ago, clean, count, now, shorten, size
from holdfast.errors import BadOption, command

_ABOUT_CHARACTERS = 100
_ID_CHARACTERS = 32
"""From here on a hexadecimal text is an id, which people know by its beginning."""
_SHORT = 12
# Of an event: said in columns of their own, or of use to programs only.
_ELSEWHERE = frozenset({"what", "when", "by", "b", "epoch", "uuid", "generation", "sent", "repeated", "waits_for"})


def agents(
    pattern: Pattern = None,
    /,
    *,
    sort: Annotated[Literal["updated", "oldest", "name", "checkpoints"], Parameter(show_choices=True)] = "updated",
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """List the agents in the store, the most recently changed first.

    Parameters
    ----------
    pattern
        Only the agent of this name, or those whose names are like this: 'trip-*'. [default: all]
    sort
        The most recently changed first, or last; by name; or the longest history first.
    """
    with session.reading() as store:
        found = store.agents(pattern, limit=limited(limit, json=json), sort=sort)
        if json:
            entries = [info.to_json() for info in found]
            return session.json("agents", store=store.place, agents=entries, more=found.more)
        if not found:
            like = f" like {clean(pattern)}" if pattern is not None else " yet"
            session.out.say(f"No agents{like} in {clean(store.place)}.")
            return 0
        session.out.columns(
            ("agent", "head", "checkpoints", "branches", "updated", "last label"),
            [_row(info) for info in found],
            right=(2, 3),
        )
        abandoned = sum(info.abandoned for info in found)
        if abandoned:
            session.out.note(f"{count(abandoned, 'abandoned line')}; see `holdfast log NAME --all`.")
        session.out.left_out(found.more, "agent", ", a pattern some")
    return 0


def _row(info: AgentInfo) -> list[Text | str]:
    head = info.head
    return [
        Text(clean(info.name), style="bold cyan"),
        Text(head.short_id if head else "", style="yellow"),
        f"{info.checkpoints:,}",
        str(len(info.branches)),
        ago(info.updated or info.created, now()),
        clean(head.label) if head else Text("no checkpoint yet", style="dim"),
    ]


def copy(agent: Name, new: str, /, *, json: Json = False, session: Given) -> int:
    """Start a new agent with the whole history of another.

    No state is copied: the two share what they have in common, and are independent from then on. Works while another
    process writes the agent.

    Parameters
    ----------
    new
        The new agent's name.
    """
    with session.writing() as store:
        name, revision = store.resolve(agent)
        if revision:
            raise BadOption(
                f"{agent!r} names a revision; a copy has all of them",
                hint=f"{command('copy', name, new)}, then {command('rollback', new, '--to', revision)}.",
            )
        store.copy(name, new)
        info = store.agents(new)[0]
        if json:
            head = info.head.to_json() if info.head is not None else None
            return session.json("copy", agent=new, of=name, checkpoints=info.checkpoints, head=head)
        session.out.say(
            "Agent ", Text(clean(new), style="bold cyan"), f" begins with the history of {clean(name)}: ",
            f"{count(info.checkpoints, 'checkpoint')}.",
        )  # fmt: skip
    return 0


def remove(
    agent: Name,
    /,
    *,
    with_copies: Flag = False,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Remove an agent with its whole history. There is no way back.

    What copies of it, or the agent that it is a copy of, still see stays for them; they are named. Refused while
    another process writes the agent. Shows first what goes, then asks.

    Parameters
    ----------
    with_copies
        Remove those who see some of its checkpoints, too.
    """
    with session.writing() as store:
        name, revision = store.resolve(agent)
        if revision:
            raise BadOption(f"{agent!r} names a revision; only whole agents are removed", hint="Give the NAME alone.")
        found = store.remove(name, dry_run=True, with_copies=with_copies)
        if not consent.json:
            session.out.say(
                Text(clean(name), style="bold cyan"), f" has {count(found.checkpoints, 'checkpoint')}",
                f" and {count(found.events, 'event')}.",
            )  # fmt: skip
            if found.kept_for:
                session.out.say(f"Agents that keep some of its checkpoints: {', '.join(map(clean, found.kept_for))}.")
                session.out.say("--with-copies removes them, too.")
            if found.copies:
                session.out.say(f"Agents that go with it: {', '.join(map(clean, found.copies))}.")
        if consent.given(session, "Remove it for good?"):
            found = store.remove(name, with_copies=with_copies)
        if consent.json:
            session.json("remove", **found.to_json())
        elif found.done:
            session.out.say(Text("Removed. ", style="bold green"), f"The store is {size(found.freed_bytes)} smaller.")
    return consent.code(done=found.done)


def events(agent: Name, /, *, limit: Limit = None, json: Json = False, session: Given) -> int:
    """Show what was moved and decided for an agent, and by whom.

    The newest first: rollbacks, branches, tags, judgements, decisions about effects in doubt, runs that were cancelled,
    signals: on all branches.
    """
    with session.reading() as store:
        handle = reader(store, agent)
        found = [one for one in handle.events() if one["what"] != "open"]
        shown = found[: limited(limit, json=json)]
        more = len(found) - len(shown)
        if json:
            listed = [{**one, "when": one["when"].isoformat()} for one in shown]
            return session.json("events", agent=handle.name, events=listed, more=more)
        rows: list[list[Text | str]] = [
            [
                ago(one["when"], now()),
                Text(clean(str(one["what"])), style="bold"),
                clean(str(one.get("by", ""))),
                _about(one),
            ]
            for one in shown
        ]
        session.out.columns(("when", "what", "by", "about"), rows)
        session.out.left_out(more, "older event")
    return 0


def _about(event: dict[str, Any]) -> str:
    parts = [
        f"{name} {_short(value)}" for name, value in event.items() if name not in _ELSEWHERE and value not in ("", [])
    ]
    return clean(shorten(", ".join(parts), _ABOUT_CHARACTERS))


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value))
    is_id = isinstance(value, str) and len(value) >= _ID_CHARACTERS and not value.strip("0123456789abcdef")
    return value[:_SHORT] if is_id else str(value)
