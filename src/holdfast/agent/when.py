"""When to checkpoint: what a user may ask for, checked, written down in a file, and said in words.

Owns the options, and the file ``holdfast.toml`` in which they may stand; it has no clock, no agent and no store.
``schedule`` follows them. What always holds: a ``When`` that exists asks for something, its parts do not contradict
each other, and every number is within its limits.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import BadOption
from holdfast.store.files import close_quietly, kind_of, unavailable

SPAN_MIN_S = 0.001
"""Less than a checkpoint takes: one would follow the other."""
SPAN_MAX_S = 31 * 86_400.0
"""Whoever wants fewer than one a month asks for them by hand."""
STEPS_MAX = 10**9
BYTES_MAX = 2**40

_COUNTS = {"every_steps": STEPS_MAX, "changed_bytes": BYTES_MAX}
_SIDES = ("before", "after")
_SWITCHES = ("at_phase", "adaptive", "background")
_ASKING = ("every_s", "every_steps", "before", "after", "changed_bytes", "at_phase", "adaptive")


@dataclass(frozen=True, slots=True)
class When:
    """When an agent checkpoints by itself, always at a safe point. Whatever comes first asks.

    ``every_s``: so many seconds after the last checkpoint. ``every_steps``: at so many steps after it.
    ``changed_bytes``: when so much of the state has changed since then; files of a workspace do not count, since each
    safe point would have to look at all of them. ``at_phase``: at the end of each phase. ``before="write"`` and
    ``after="write"``: before and after each tool that writes, inside runs only.

    ``adaptive``: at intervals that follow what a checkpoint of this agent costs and how often it fails, from ``min_s``
    to ``max_s``. Together with ``every_s`` it may come sooner than that, never later; so ``every_s`` has to be above
    ``min_s``.

    ``background``: the agent waits only until its state is captured; the store's writer makes it durable.
    """

    every_s: float | None = None
    every_steps: int | None = None
    before: Literal["write"] | None = None
    after: Literal["write"] | None = None
    changed_bytes: int | None = None
    at_phase: bool = False
    adaptive: bool = False
    min_s: float = 1.0
    max_s: float = 600.0
    background: bool = False

    def __post_init__(self) -> None:
        for name, value in ((name, getattr(self, name)) for name in _ALLOWED):
            if not _fits(name, value):
                raise BadOption(f"{name}={value!r:.80}", hint=f"Use {_ALLOWED[name]}.")
        if all(getattr(self, name) in {None, False} for name in _ASKING):
            raise BadOption("a When without a trigger would never checkpoint", hint=_BY_HAND)
        if self.min_s > self.max_s:
            raise BadOption(
                f"min_s={self.min_s:g} is above max_s={self.max_s:g}",
                hint="Use a min_s that is not above max_s.",
            )
        if not self.adaptive:
            for name in ("min_s", "max_s"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise BadOption(
                        f"{name} without adaptive would do nothing",
                        hint=f"It limits the interval of adaptive=True. Add that, or leave {name} out.",
                    )
        elif self.every_s is not None and self.every_s <= self.min_s:
            raise BadOption(
                f"every_s={self.every_s:g} is not above min_s={self.min_s:g}, so adaptive would never ask",
                hint="Leave one of the two out, or lower min_s.",
            )

    # -- in words ---------------------------------------------------------------------------------------

    def words(self) -> list[str]:
        """What it does, in plain sentences."""
        said = []
        if self.adaptive:
            least, most = span_words(self.min_s), span_words(self.max_s)
            said.append(
                f"It follows cost and failures: a checkpoint every {least} to {most}, more often when the agent fails"
                " more often, less often when a checkpoint takes longer."
            )
        if self.every_s is not None:
            first = "At the latest, it" if self.adaptive else "It"
            said.append(f"{first} saves {span_words(self.every_s)} after the last checkpoint.")
        if self.every_steps is not None:
            said.append(
                "It saves at every step." if self.every_steps == 1 else f"It saves every {self.every_steps:,} steps."
            )
        if self.changed_bytes is not None:
            said.append(f"It saves when {self.changed_bytes:,} bytes have changed since the last checkpoint.")
        if self.at_phase:
            said.append("It saves at the end of each phase.")
        sides = " and ".join(name for name in _SIDES if getattr(self, name) is not None)
        if sides:
            said.append(f"Inside a run, it saves {sides} each tool that writes.")
        said.append("Each of these waits for the next safe point, and saves nothing if nothing has changed.")
        if self.background:
            said.append(
                "The agent waits only until its state is captured. The store makes it durable in the background."
            )
        return said

    # -- written down -----------------------------------------------------------------------------------

    def to_table(self) -> dict[str, Any]:
        """Only what was asked for, as ``from_table`` reads it."""
        return {name: getattr(self, name) for name in _DEFAULTS if getattr(self, name) != _DEFAULTS[name]}

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> When:
        """Read a table of a file. ``where`` names the file and the table, for errors."""
        if not isinstance(table, Mapping):
            raise BadOption(f"{where}: a table is needed, not {table!r:.80}", hint=f"It may have {_listed(_DEFAULTS)}.")
        for name, value in table.items():
            if name not in _DEFAULTS:
                raise BadOption(
                    f"{where}: there is no {name!r:.80}", hint=f"{_meant(name)}It may have {_listed(_DEFAULTS)}."
                )
            if value is None or not _fits(name, value):
                raise BadOption(f"{where}: {name} = {_shown(value)}", hint=f"Use {_in_files(_ALLOWED[name])}.")
        try:
            return cls(**table)
        except BadOption as error:
            hint = _BY_HAND_IN_FILES if error.hint == _BY_HAND else error.hint
            raise BadOption(f"{where}: {error.message}", hint=hint) from None


_BY_HAND = "Say when: When(adaptive=True), or When(every_s=30). For checkpoints by hand only, use when=None."
_BY_HAND_IN_FILES = "Say when: adaptive = true, or every_s = 30. For checkpoints by hand only, write false instead."
_DEFAULTS = {field.name: field.default for field in fields(When)}
_ALLOWED = {
    "every_s": f"seconds from {SPAN_MIN_S:g} to {SPAN_MAX_S:,.0f}, or None",
    "every_steps": f"a whole number from 1 to {STEPS_MAX:,}, or None",
    "before": '"write" or None',
    "after": '"write" or None',
    "changed_bytes": f"a whole number from 1 to {BYTES_MAX:,}, or None",
    "at_phase": "True or False",
    "adaptive": "True or False",
    "min_s": f"seconds from {SPAN_MIN_S:g} to {SPAN_MAX_S:,.0f}",
    "max_s": f"seconds from {SPAN_MIN_S:g} to {SPAN_MAX_S:,.0f}",
    "background": "True or False",
}


def _fits(name: str, value: Any) -> bool:
    """True and False are no numbers here: ``every_s=True`` would mean a second."""
    if name in _SWITCHES:
        return type(value) is bool
    if value is None:
        return _DEFAULTS[name] is None
    if name in _SIDES:
        return isinstance(value, str) and value == "write"
    if name in _COUNTS:
        return type(value) is int and 1 <= value <= _COUNTS[name]
    return type(value) in {int, float} and SPAN_MIN_S <= value <= SPAN_MAX_S


def _in_files(allowed: str) -> str:
    """Files have no None, and write their switches small."""
    return allowed.replace(" or None", "").removesuffix(",").replace("True or False", "true or false")


def _shown(value: Any) -> str:
    return str(value).lower() if type(value) is bool else f"{value!r:.80}"


def _listed(names: Mapping[str, Any]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


def _meant(name: object) -> str:
    from difflib import get_close_matches  # only mistakes come here

    near = get_close_matches(str(name), _DEFAULTS, 1)
    return f"Did you mean {near[0]}? " if near else ""


def span_words(seconds: float) -> str:
    """``90`` -> ``90 seconds``; ``3600`` -> ``1 hour``."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size and seconds % size == 0:
            return _plural(seconds / size, unit)
    return _plural(seconds, "second") if seconds >= 1 else _plural(seconds * 1000, "millisecond")


def _plural(number: float, unit: str) -> str:
    return f"{number:g} {unit}{'' if number == 1 else 's'}"


# -- the file -------------------------------------------------------------------------------------------------

DEFAULT = When(adaptive=True)
"""What counts where nobody says anything."""

FILE = "holdfast.toml"
FILE_MAX_BYTES = 2**20


def folders_of(place: str, *, is_directory: bool) -> list[Path]:
    """Where the files of a store may be: in its directory, and in the project's, which is the one around it.

    For a store on a server it is the one in which the program is now: it may go elsewhere later.
    """
    if is_directory:
        return [Path(place), Path(place).parent]
    try:
        return [Path.cwd()]
    except OSError:  # it was removed
        return []


def find_when(folders: Sequence[Path], agent: str) -> When | None:
    """The policy of an agent where its program gives none: of the store's file, or the project's, or the default.

    If the files of two folders say something about the agent, they have to say the same.
    """
    found = [(file, said[0]) for file in (folder / FILE for folder in folders) if (said := _said(file, agent))]
    for file, when in found[1:]:
        if when != found[0][1]:
            raise BadOption(
                f"{found[0][0]} and {file} disagree about when to checkpoint {agent!r}; it was not opened",
                hint="Take it out of one of them, or say it in the program: store.agent(name, when=...).",
            )
    return found[0][1] if found else DEFAULT


def _said(file: Path, agent: str) -> tuple[When | None] | None:
    """What a file says about an agent, alone in a tuple; None if it says nothing, or is not there."""
    try:
        # One that is a pipe is opened without waiting for somebody who writes into it.
        opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(opened).st_mode
            data = os.read(opened, FILE_MAX_BYTES + 1) if stat.S_ISREG(mode) else b""
        finally:
            close_quietly(opened)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unavailable(error, f"reading {file}") from error
    if not stat.S_ISREG(mode):
        raise BadOption(f"{file} is {kind_of(mode)}, not a file", hint="Move it away, or write the file anew.")
    import tomllib  # few stores have such a file

    try:
        if len(data) > FILE_MAX_BYTES:
            raise ValueError(f"it is longer than {FILE_MAX_BYTES:,} bytes")
        text = data.decode()
        content = tomllib.loads(text)
    except ValueError as error:  # of TOML, or of UTF-8
        raise BadOption(f"{file} cannot be read: {error}", hint="See the guide, When to checkpoint.") from error
    try:
        return _read(content, agent, str(file))
    except BadOption as error:
        raise _read_error(text, agent, str(file), error.message) or error from None


def _read(content: dict[str, Any], agent: str, file: str) -> tuple[When | None] | None:
    _check_keys(content, {"when"}, file)
    said = content.get("when")
    if not isinstance(said, dict):
        return None if said is None else (_policy(said, f"{file}, when"),)
    single = said.pop("agents", {})
    if not isinstance(single, dict):
        raise BadOption(f"{file}, when.agents: a table is needed", hint='Write [when.agents."trip-*"].')
    # All are read, so that a mistake is found when the file is used first, and not when that agent is opened.
    policies = {pattern: _policy(one, f"{file}, when.agents.{pattern}") for pattern, one in single.items()}
    common = [_policy(said, f"{file}, when")] if said else []
    if agent in policies:
        return (policies[agent],)
    fits = [policies[pattern] for pattern in policies if fnmatchcase(agent, pattern)]
    return ((*fits, *common)[0],) if fits or common else None


def _read_error(text: str, agent: str, file: str, message: str) -> BadOption | None:
    """The mistake of a file with its line: the first one up to which the file says the same wrong thing."""
    import tomllib

    lines = text.splitlines(keepends=True)

    def is_wrong(end: int, where: str = file) -> BadOption | None:
        try:
            _read(tomllib.loads("".join(lines[:end])), agent, where)
        except BadOption as error:
            return error if where != file or error.message == message else None
        except ValueError:  # it ends in the middle of something
            pass
        return None

    line = 1 + bisect_left(range(1, len(lines)), True, key=lambda end: is_wrong(end) is not None)
    return is_wrong(line, f"{file}, line {line}")


def _policy(said: Any, where: str) -> When | None:
    """A table, or ``false``: only when the program says so."""
    return None if said is False else When.from_table(said, where)


def _check_keys(content: dict[str, Any], known: set[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise BadOption(f"{where}: there is no {key!r}", hint=f"It may have {', '.join(sorted(known))}.")
