"""Plain text of things that people read: untrusted words, sizes, times.

Owns what may reach a terminal. Always holds: what ``clean`` returns has no control character, so nothing that an agent
saved can move the cursor, change colours, ring, or turn a line around.
"""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

# Controls, format characters (bidirectional overrides, zero-width), lone surrogates, line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Joins emoji and letters of several scripts; harmless, and text looks wrong without it.
_ZERO_WIDTH_JOINER = "\u200d"

_MINUTE_S = 60
_HOUR_S = 60 * _MINUTE_S
_DAY_S = 24 * _HOUR_S


def clean(text: str) -> str:
    """The text on one line, with everything that a terminal would act upon written as an escape."""
    if text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == _ZERO_WIDTH_JOINER or unicodedata.category(character) not in _UNSAFE:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters; a cut is marked."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def size(size_bytes: int) -> str:
    """``1.2 KiB``: three digits are enough to compare."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


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
