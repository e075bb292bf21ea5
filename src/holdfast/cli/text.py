"""Plain text of things that people read: times and counts, and from holdfast.text untrusted words and sizes."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.text import clean, size

__all__ = ["ago", "clean", "count", "moment", "now", "shorten", "size"]

_MINUTE_S = 60
_HOUR_S = 60 * _MINUTE_S
_DAY_S = 24 * _HOUR_S


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters; a cut is marked."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def ago(then: datetime, now: datetime) -> str:
    """``5 min ago``: how long since, in the largest unit that fits."""
    seconds = (now - then).total_seconds()
    if seconds < 0:
        return "in the future" if seconds < -1 else "just now"
    if seconds < 2:
        return "just now"
    for limit, unit, word in (
        (_MINUTE_S, 1, "s"),
        (_HOUR_S, _MINUTE_S, "min"),
        (_DAY_S, _HOUR_S, "h"),
        (60 * _DAY_S, _DAY_S, "days"),
        (730 * _DAY_S, 30 * _DAY_S, "months"),
    ):
        if seconds < limit:
            count = int(seconds // unit)
            return f"{count} {word.removesuffix('s') if count == 1 and len(word) > 1 else word} ago"
    return f"{int(seconds // (365 * _DAY_S))} years ago"


def moment(time: datetime) -> str:
    """Date and time where the reader is, with the zone's name."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def now() -> datetime:
    return datetime.now(UTC)


def count(number: int, one: str, many: str = "") -> str:
    """``1 checkpoint``, ``2 checkpoints``, ``1,204 checkpoints``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
