"""Plain text of things that people read: times and counts, and from holdfast.text untrusted words and sizes."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.text import age, clean, count, is_url, shorten, size

__all__ = ["ago", "clean", "count", "is_url", "moment", "now", "shorten", "size"]


def ago(then: datetime, now: datetime) -> str:
    """``5 min ago``: how long since, in the largest unit that fits."""
    seconds = (now - then).total_seconds()
    if seconds < 0:
        return "in the future" if seconds < -1 else "just now"
    if seconds < 2:
        return "just now"
    return f"{age(seconds)} ago"


def moment(time: datetime) -> str:
    """Date and time where the reader is, with the zone's name."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def now() -> datetime:
    return datetime.now(UTC)
