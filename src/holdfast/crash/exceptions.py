"""Exception records: type, message, notes, cause, context and the members of groups, each with its own frames.

Must not know files. Holds always: no `__str__` of the program runs; a chain that goes in circles, or on for ever, ends
at its bound and says so.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from holdfast.crash.limits import MAX_CHAIN, MAX_NOTES, Limits
from holdfast.crash.shapes import find, layout_of, overrides, type_name
from holdfast.crash.stacks import Frames, Step, steps_of_traceback

_READ = BaseException.__dict__
_ARGS = _READ["args"].__get__
_CAUSE = _READ["__cause__"].__get__
_CONTEXT = _READ["__context__"].__get__
_SUPPRESS = _READ["__suppress_context__"].__get__
_TRACEBACK = _READ["__traceback__"].__get__
_MEMBERS = BaseExceptionGroup.__dict__["exceptions"].__get__
_GROUP_MESSAGE = BaseExceptionGroup.__dict__["message"].__get__
_FRAMES_EACH = 60  # frames of an exception in the chain; the failing thread's stack has more
_FRAMES_OUTER = 10  # of these, the outermost


def tree(error: BaseException) -> list[BaseException]:
    """The exception and all that it names, each once. Their order is that of the record's ``chain``."""
    found = [error]
    known = {id(error)}
    for this in found:
        for other in (_CAUSE(this), _CONTEXT(this), *members_of(this)):
            if other is not None and id(other) not in known and len(found) < MAX_CHAIN:
                known.add(id(other))
                found.append(other)
    return found


def record(chain: list[BaseException], frames: Frames, limits: Limits) -> dict[str, Any]:
    """A tree as a flat list; ``cause``, ``context`` and ``group`` are places in it."""
    places = {id(error): number for number, error in enumerate(chain)}
    found = []
    for this in chain:
        entry = _one(this, frames, limits)
        entry["cause"] = places.get(id(_CAUSE(this)))
        entry["context"] = places.get(id(_CONTEXT(this)))
        entry["suppressed"] = bool(_SUPPRESS(this))
        if _is_group(this):
            members = members_of(this)
            entry["members"] = len(members)
            entry["group"] = [places[id(member)] for member in members if id(member) in places]
        found.append(entry)
    return {"chain": found, "cut": len(chain) >= MAX_CHAIN}


def by_worth(chain: list[BaseException]) -> list[int]:
    """Places in the order of what they tell: where it began, the way from there, the last one, then all others."""
    places = {id(error): number for number, error in enumerate(chain)}
    way: list[int] = []
    at: int | None = 0
    while at is not None and at not in way:
        way.append(at)
        cause = _CAUSE(chain[at])
        before = cause if cause is not None or _SUPPRESS(chain[at]) else _CONTEXT(chain[at])
        at = places.get(id(before if before is not None else next(iter(members_of(chain[at])), None)))
    return [*reversed(way), *(number for number in range(len(chain)) if number not in way)]


def stack_of(error: BaseException, frames: Frames) -> tuple[list[dict[str, Any]], int, list[Step]]:
    """Records of an exception's own traceback, how many frames were left out, and the steps of the others."""
    steps = steps_of_traceback(traceback_of(error))
    left_out = max(0, len(steps) - _FRAMES_EACH)
    if left_out:
        steps = steps[:_FRAMES_OUTER] + steps[left_out + _FRAMES_OUTER :]
    found = [frames.record(step) for step in steps]
    if left_out:
        found[_FRAMES_OUTER]["gap"] = left_out
    return found, left_out, steps


def message_of(error: BaseException, limit: int) -> tuple[str, bool]:
    """The text that the exception would show, made from its fields; and whether its class has another idea of it."""
    cls = type(error)
    own = overrides(cls, "__str__", BaseException)
    if _is_group(error):
        text = _GROUP_MESSAGE(error)
        return (text[:limit] if type(text) is str else "", False)
    args = _ARGS(error)
    fields = dict(pair for pair in layout_of(cls).attributes(error, 50)[0] if type(pair[0]) is str)
    number, text = fields.get("errno"), fields.get("strerror")
    if type(number) is int and type(text) is str:
        names = [fields[name] for name in ("filename", "filename2") if type(fields.get(name)) is str]
        return f"[Errno {number}] {text[:limit]}" + "".join(f": {name[:1000]!r}" for name in names), False
    plain = [_shown(arg, limit) for arg in args[:20]]
    if len(plain) == 1:
        only = args[0]
        bare = type(only) is str and not overrides_key_error(cls)
        return (only[:limit] if bare else plain[0]), own and not _is_builtin(cls)
    return (f"({', '.join(plain)})" if plain else ""), own and not _is_builtin(cls)


def traceback_of(error: BaseException) -> TracebackType | None:
    found: TracebackType | None = _TRACEBACK(error)
    return found


def cause_of(error: BaseException) -> BaseException | None:
    found: BaseException | None = _CAUSE(error)
    return found


def context_of(error: BaseException) -> BaseException | None:
    found: BaseException | None = _CONTEXT(error)
    return found


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """The members of a group; of any other exception none."""
    members = _MEMBERS(error) if _is_group(error) else ()
    return members if type(members) is tuple else ()


def overrides_key_error(cls: type) -> bool:
    return any(base is KeyError for base in type.__dict__["__mro__"].__get__(cls))


def _shown(value: Any, limit: int) -> str:
    kind = type(value)
    if kind is str or kind is bytes:
        return repr(value[:limit])
    if kind is int:
        return str(value) if value.bit_length() < 4096 else "a large integer"
    if value is None or kind is bool or kind is float:
        return repr(value)
    return f"<{type_name(kind)}>"


def _is_builtin(cls: type) -> bool:
    return "." not in type_name(cls)


def _is_group(error: BaseException) -> bool:
    return any(base is BaseExceptionGroup for base in type.__dict__["__mro__"].__get__(type(error)))


def _one(error: BaseException, frames: Frames, limits: Limits) -> dict[str, Any]:
    cls = type(error)
    message, own = message_of(error, limits.text_chars)
    shown, left_out, _steps = stack_of(error, frames)
    entry: dict[str, Any] = {
        "type": type_name(cls),
        "bases": [type_name(base) for base in type.__dict__["__mro__"].__get__(cls)[1:-1]][:20],
        "message": message,
        "frames": shown,
    }
    if own:
        entry["own_str"] = True  # the class has a __str__ of its own, which was not run
    if left_out:
        entry["left_out"] = left_out
    fields = layout_of(cls).instance_dict(error)
    notes = find(fields, "__notes__") if fields is not None else None
    if type(notes) is list:
        entry["notes"] = [_shown(note, limits.text_chars) if type(note) is not str else note[: limits.text_chars]
                          for note in notes[:MAX_NOTES]]  # fmt: skip
    return entry
