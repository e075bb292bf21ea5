"""When a schedule's times are: five fields of cron in a time zone, as instants.

Owns what a schedule says, and the step from local times to instants. Knows no store and no clock. What always holds: a
local time that the clocks skip is the instant at which they go on, one that comes twice is its first instant, and one
local time is not before another that it follows; so a time is one instant, and never two.

The times themselves come from cronsim, which is asked in local time without a zone: by its own rules, those of Debian,
what has a star runs in both passes of a doubled hour.

    declared(every, zone, missed, overlap)   a ``Schedule`` that can be kept; raises ``BadOption``
    schedule.after(at_us)                    the next instant, in microseconds; NEVER where there is none
    schedule.between(first_us, last_us, n)   the newest n instants from the first to the last
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec import Struct

from holdfast.errors import BadOption, Incompatible

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo  # slow to load: see ``_zone``

NEVER = 2**61
"""After every instant."""

EVERY_MAX = 200
"""Characters of ``every``, and of ``zone``."""

Missed = Literal["skip", "once", "each"]
Overlap = Literal["skip", "queue"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)
_MINUTE = timedelta(minutes=1)
_FIELDS = 5


class Schedule(Struct, frozen=True):
    """When a function is executed, by itself. ``missed`` and ``overlap`` say what becomes of some of the times."""

    every: str
    zone: str
    missed: Missed
    overlap: Overlap

    @property
    def times(self) -> tuple[str, str]:
        """What the times follow from."""
        return self.every, self.zone

    def after(self, at_us: int) -> int:
        """The first instant after this one."""
        zone = _zone(self.zone)
        # What is not after it on the clock on the wall is not after it at all; in a doubled hour, what is may not be.
        for local in _times(self.every, (_EPOCH + at_us * _US).astimezone(zone).replace(tzinfo=None)):
            found = _instant(local, zone)
            if found > at_us:
                return found
        return NEVER

    def between(self, first_us: int, last_us: int, most: int) -> list[int]:
        """The instants from the first to the last, both included; of too many, the newest."""
        zone = _zone(self.zone)
        last = (_EPOCH + last_us * _US).astimezone(zone)
        doubled = _offset(last.replace(fold=0)) - _offset(last)  # in its second pass, all of the first one is over
        newest = last.replace(tzinfo=None, second=0, microsecond=0) + doubled + _MINUTE
        found: set[int] = set()
        for local in _times(self.every, newest, reverse=True):
            at = _instant(local, zone)
            if at < first_us or len(found) == most:
                break
            if at <= last_us:
                found.add(at)
        return sorted(found)


def declared(every: Any, zone: Any, missed: Any, overlap: Any) -> Schedule:
    """A schedule that has times."""
    for name, value, words in (("missed", missed, get_args(Missed)), ("overlap", overlap, get_args(Overlap))):
        if value not in words:
            raise BadOption(f"{name}={value!r:.60}", hint=f"Use one of {', '.join(words)}.")
    for name, value in (("every", every), ("zone", zone)):
        if not isinstance(value, str) or not 0 < len(value) <= EVERY_MAX:
            raise BadOption(f"{name} is a text of 1 to {EVERY_MAX} characters, not {value!r:.60}")
    try:
        _zone(zone)
    except (LookupError, ValueError, OSError):
        raise BadOption(
            f"there is no time zone {zone!r} on this machine", hint='Use a name such as "Europe/Lisbon", or "UTC".'
        ) from None
    made = Schedule(" ".join(every.split()), zone, missed, overlap)
    if made.after(0) == NEVER:
        raise BadOption(f"every={every!r}: there is no such time", hint="See `man 5 crontab`.")
    return made


def moment(at_us: int) -> datetime:
    """An instant, in UTC."""
    return _EPOCH + at_us * _US


def id_of(at_us: int) -> str:
    """The id of the run of an instant."""
    return f"{moment(at_us):%Y-%m-%dT%H:%M:%SZ}"


def _times(every: str, after: datetime, *, reverse: bool = False) -> Iterator[datetime]:
    """Local times after one, or before it."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise Incompatible("schedules need the package cronsim", hint="pip install 'holdfast[schedule]'") from error
    if len(every.split()) != _FIELDS:
        raise BadOption(
            f"every={every!r}: it has five fields, minute, hour, day of the month, month and day of the week",
            hint='For example "0 8 * * 1-5", at 8:00 from Monday to Friday.',
        )
    try:
        yield from CronSim(every, after, reverse=reverse)
    except CronSimError as error:
        raise BadOption(f"every={every!r}: {error}", hint="See `man 5 crontab`.") from None
    except OverflowError:  # there are no more years
        return


def _zone(name: str) -> ZoneInfo:
    from zoneinfo import ZoneInfo

    return ZoneInfo(name)


def _instant(local: datetime, zone: ZoneInfo) -> int:
    """When the clocks show this time for the first time; where they skip it, when they go on."""
    late = local.replace(tzinfo=zone).astimezone(UTC)
    if late.astimezone(zone).replace(tzinfo=None) == local:
        return (late - _EPOCH) // _US
    early = local.replace(tzinfo=zone, fold=1).astimezone(UTC)  # the clocks change after this, and not after ``late``
    low, high, changed = 0, int((late - early).total_seconds()), _offset(late.astimezone(zone))
    while high - low > 1:
        middle = (low + high) // 2
        if _offset((early + timedelta(seconds=middle)).astimezone(zone)) == changed:
            high = middle
        else:
            low = middle
    return (early - _EPOCH) // _US + high * 1_000_000


def _offset(at: datetime) -> timedelta:
    return at.utcoffset() or timedelta()
