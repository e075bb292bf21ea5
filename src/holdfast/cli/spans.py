"""Spans of time on the command line: ``45s``, ``90m``, ``12h``, ``30d``, ``2w``."""

from __future__ import annotations

import re
from datetime import timedelta

from holdfast.errors import BadOption

_SPAN = re.compile(r"^(\d{1,6})([smhdw])$")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def span(text: str) -> timedelta:
    """The span that a text names."""
    found = _SPAN.match(text.strip())
    if found is None:
        raise BadOption(f"{text!r} is not a span of time", hint="Write a number and a unit: 45s, 90m, 12h, 30d or 2w.")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})
