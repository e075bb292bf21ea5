"""From data to a page: the templates, and what they may say of hostile text.

Owns the Jinja environment and its filters. Knows nothing of HTTP. What always holds: every value that a template writes
is escaped, and before that made visible and short, whether its author thought of it or not: controls and characters
that turn a line around stand there as escapes, and no text is longer than ``LONGEST``. Names that nobody sees, in
hidden fields, are ``exact``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
from markupsafe import Markup, escape

from holdfast.errors import command
from holdfast.text import age, clean, count, shorten, size

LONGEST = 20_000
"""Characters of one text on a page. Who wants more reads it in pieces, or by the command line."""
STATIC = Path(__file__).parent / "static"
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def shown(text: str, most: int = LONGEST) -> str:
    """A text as it may stand on a page: lines and tabs stay, everything else that browsers act upon is an escape."""
    cut = text[:most]
    if not cut.isprintable():
        cut = "\n".join("\t".join(map(clean, line.split("\t"))) for line in cut.split("\n"))
    return cut if len(text) <= most else f"{cut}… ({len(text) - most:,} more characters)"


def _final(value: Any) -> Any:
    """What Jinja writes for an expression."""
    if value is None:
        return ""
    if isinstance(value, Markup | Undefined):
        return value
    return shown(value if isinstance(value, str) else str(value))


def said(text: str) -> Markup:
    """A sentence; what it has between backticks is code."""
    parts = [escape(shown(part)) for part in text.split("`")]
    closed = len(parts) % 2 == 1
    return Markup().join(Markup("<code>%s</code>") % one if closed and at % 2 else one for at, one in enumerate(parts))


def short(text: Any, most: int = 80) -> str:
    """One line of at most so many characters; a cut is marked."""
    return shorten(clean(str(text)[: most + 1]), most)


def at(time: str | datetime | None) -> datetime | None:
    """A time, from ISO 8601 as well."""
    if not time:
        return None
    found = datetime.fromisoformat(time) if isinstance(time, str) else time
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def ago(time: str | datetime | None, now: datetime) -> Markup:
    """``5 min ago``, in the largest unit that fits; point at it for the time itself."""
    then = at(time)
    if then is None:
        return Markup("never")
    seconds = (now - then).total_seconds()
    said = "just now" if abs(seconds) < 2 else f"{age(seconds)} ago" if seconds > 0 else f"in {age(-seconds)}"
    exact = then.astimezone(UTC).isoformat(" ", "seconds").replace("+00:00", " UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(then.isoformat(), exact, said)


def span(seconds: float | None) -> str:
    """``840 µs``, ``1.24 ms``, ``3.5 s``: a short span of time with three digits."""
    if seconds is None:
        return "-"
    for unit, least in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= least or unit == "µs":
            return f"{seconds / least:.3g} {unit}"
    return ""


def address(path: str, /, **query: Any) -> str:
    """An address of this page: ``address("/timeline", agent="trip-7", at="id:3f2a")``.

    An agent becomes a part of the path, unless browsers would take its name for something else there.
    """
    agent = query.pop("agent", None)
    if agent is not None:
        parts = str(agent).split("/")
        if {"", ".", ".."} & set(parts):
            query["agent"] = agent
        else:
            path = f"{path}/{quote(str(agent))}"
    given = {
        name: "1" if value is True else value
        for name, value in query.items()
        if value is not False and value not in (None, "")  # 0 is said
    }
    return f"{path}?{urlencode(given)}" if given else path


def changed(path: str, query: Mapping[str, str], /, **changes: Any) -> str:
    """The same address with other fields; a list begins at its first page again, unless that is what changes."""
    kept = {name: value for name, value in query.items() if name != "page" and name not in changes}
    return address(path, **kept, **changes)


def typed(place: str, *words: str) -> str:
    """A command as it can be typed anywhere: it names the store that the page shows."""
    return command(*words, "--store", place)


def told_json(data: Any) -> str:
    """JSON in ASCII. What stands between tags may not end them."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def embedded(data: Any) -> Markup:
    """Data for a script of ours, as the content of a ``<template>`` or of a script that nobody executes."""
    return Markup(told_json(data))  # noqa: S704 - nothing in it can end the element


def plain(data: Any, indent: int | None = None) -> str:
    """Data as JSON that somebody reads: a text like any other, which is escaped where it stands."""
    return json.dumps(data, ensure_ascii=False, indent=indent)


@cache
def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_final,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"short": short, "size": size, "span": span, "age": age, "embedded": embedded, "shown": shown}
    made.filters |= {"plain": plain, "exact": escape, "said": said}
    made.filters["number"] = lambda number: f"{number:,}"
    made.globals |= {"address": address, "count": count, "at": at, "typed": typed}
    return made


def page(template: str, **given: Any) -> bytes:
    """A page as bytes."""
    now: datetime = given.setdefault("now", datetime.now(UTC))
    given["ago"] = lambda time: ago(time, now)
    return environment().get_template(template).render(given).encode("utf-8", "replace")


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """Every static file and its kind. What is not among them cannot be asked for."""
    files = [file for file in sorted(STATIC.iterdir()) if file.suffix in _KINDS]
    return {file.name: (file.read_bytes(), _KINDS[file.suffix]) for file in files}
