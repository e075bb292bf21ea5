"""``holdfast events``: what was moved and decided, when, and by whom."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.complete import agents
from holdfast.cli.session import Given, Json, Limit, limited, reader
from holdfast.cli.text import ago, clean, count, now, shorten

SCHEMA = "holdfast.events/1"
_ABOUT_CHARACTERS = 100
_ID_CHARACTERS = 32
"""From here on a hexadecimal text is an id, which people know by its beginning."""
_SHORT = 12
# Said in columns of their own, or of use to programs only.
_ELSEWHERE = frozenset({"what", "when", "by", "b", "epoch", "uuid", "generation", "sent", "repeated", "waits_for"})


def events(
    agent: Annotated[str, Parameter(completer=agents, metavar="NAME")],
    /,
    *,
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """Show what was moved and decided for an agent, the newest first, and by whom.

    Rollbacks, branches, tags, judgements, decisions about effects in doubt, runs that were cancelled, signals: on all
    branches.

    Parameters
    ----------
    agent
        The agent's NAME.
    limit
        Show at most this many; 0 shows all. [default: 50; all with --json]
    json
        Print JSON (schema holdfast.events/1).
    """
    with session.reading() as store:
        handle = reader(store, agent)
        found = [one for one in handle.events() if one["what"] != "open"]
        shown = found[: limited(limit, json=json)]
        if json:
            listed = [{**one, "when": one["when"].isoformat()} for one in shown]
            session.out.json(
                {"schema": SCHEMA, "agent": handle.name, "events": listed, "more": len(found) - len(shown)}
            )
            return 0
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
        if len(found) > len(shown):
            more = count(len(found) - len(shown), "older event")
            session.out.say(Text(f"{more}; -n 0 shows all.", style="dim"))
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
