"""Words that people read, for every room that shows some: untrusted text made harmless, sizes, numbers, spans of time.

Owns what may reach a terminal, and which place is an address. Knows nothing of any room. Always holds: what ``clean``
returns has no control character, so nothing that an agent saved or a dump holds can move the cursor, change colours,
ring, or turn a line around.
"""

from __future__ import annotations

# Controls, format characters (bidirectional overrides, zero-width), lone surrogates, line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Joins emoji and letters of several scripts; harmless, and text looks wrong without it.
_ZERO_WIDTH_JOINER = "\u200d"
_MINUTE_S = 60
_HOUR_S = 60 * _MINUTE_S
_DAY_S = 24 * _HOUR_S


_SERVERS = frozenset({"postgresql", "postgres"})


def is_url(place: str) -> bool:
    """Whether it is no path. Slips count, which would make a folder named like a password: a slash too few, or two."""
    scheme, colon, rest = place.partition(":")
    named = scheme[:1].isalpha() and scheme.isascii() and not set(scheme) & set("/ ~")
    return "://" in place or (named and (rest.startswith("/") or (colon != "" and scheme in _SERVERS)))


def clean(text: str) -> str:
    """The text on one line, with everything that a terminal would act upon written as an escape."""
    if text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    import unicodedata  # most text has nothing that comes here

    if character == _ZERO_WIDTH_JOINER or unicodedata.category(character) not in _UNSAFE:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def size(size_bytes: int) -> str:
    """``1.2 KiB``: three digits are enough to compare."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters; a cut is marked."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def count(number: int, one: str, many: str = "") -> str:
    """``1 checkpoint``, ``2 checkpoints``, ``1,204 checkpoints``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def age(seconds: float) -> str:
    """``5 min``: a span of time in the largest unit that fits."""
    for limit, unit, word in (
        (_MINUTE_S, 1, "s"),
        (_HOUR_S, _MINUTE_S, "min"),
        (_DAY_S, _HOUR_S, "h"),
        (60 * _DAY_S, _DAY_S, "days"),
        (730 * _DAY_S, 30 * _DAY_S, "months"),
    ):
        if seconds < limit:
            found = int(seconds // unit)
            return f"{found} {word.removesuffix('s') if found == 1 and len(word) > 1 else word}"
    return f"{int(seconds // (365 * _DAY_S))} years"
