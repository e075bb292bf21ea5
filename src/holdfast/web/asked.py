"""What somebody has asked for: the parts of an address, and the fields of a form.

Owns reading and refusing them. Knows nothing of HTTP or of stores. Always holds: whatever a getter gives is of the type
and within the bounds that it was asked with; everything else raises ``BadOption``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from holdfast.errors import BadOption

TEXT_MOST = 2_000
"""Characters of a field, unless a view says otherwise."""
JSON_MOST = 1 << 20
PAGE_MOST = 1_000_000
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Asked:
    """One question. A name is looked for in the form, then in the path, then in the query."""

    path: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    query: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    form: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    def given(self, name: str) -> str | None:
        """What was given under a name, as it came; None where nothing was."""
        return next((one[name] for one in (self.form, self.path, self.query) if one.get(name)), None)

    def text(self, name: str, default: str | None = None, *, most: int = TEXT_MOST) -> str:
        """A text of at most ``most`` characters. Without a default it has to be given."""
        found = self.given(name)
        if found is None:
            if default is None:
                where, hint = ("form", "Fill it in.") if self.form else ("address", "Begin at the list of agents.")
                raise BadOption(f"{name} is missing in the {where}", hint=hint)
            return default
        if len(found) > most:
            raise BadOption(f"{name} has {len(found):,} characters", hint=f"At most {most:,}.")
        return found

    @property
    def agent(self) -> str:
        """The agent's name."""
        return self.text("agent", most=1_024)

    @property
    def branch(self) -> str:
        """A branch's name."""
        return self.text("branch", "main", most=400)

    def point(self, name: str, default: str | None = "") -> str:
        """What names a checkpoint: a revision."""
        return self.text(name, default, most=1_200)

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number from ``least`` to ``most``."""
        found = self.given(name)
        if found is None:
            return default
        digits = found.removeprefix("-")
        if len(digits) > 18 or not (digits.isascii() and digits.isdigit()) or not least <= int(found) <= most:
            raise BadOption(f"{name}={found[:40]!r}", hint=f"A whole number from {least:,} to {most:,}.")
        return int(found)

    def choice(self, name: str, default: str, options: Collection[str]) -> str:
        """One of some words."""
        found = self.given(name)
        if found is None:
            return default
        if found not in options:
            raise BadOption(f"{name}={found[:40]!r}", hint=f"One of {', '.join(options)}.")
        return found

    def value(self, name: str, default: str | None = None) -> Any:
        """A value that was written as JSON."""
        text = self.text(name, default, most=JSON_MOST)
        try:
            return json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            why = "its parts are too deep inside each other" if isinstance(error, RecursionError) else str(error)
            raise BadOption(
                f"the {name} is not JSON: {why}", hint='Texts need quotes: "like this". null stands for nothing.'
            ) from None

    def flag(self, name: str) -> bool:
        """Whether something is wanted: ``1``, ``yes``, ``on`` or ``true``."""
        return self.given(name) in {"1", "yes", "on", "true"}

    @property
    def page(self) -> int:
        """Which page of a list, from 1."""
        return self.number("page", 1, 1, PAGE_MOST)


def _no_number(name: str) -> Any:
    raise ValueError(f"it has no {name}")
