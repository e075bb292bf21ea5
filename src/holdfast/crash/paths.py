"""The language of `p` in the debugger: a name, then attributes and indexes. Nothing else, and nothing is evaluated.

Must not know dumps. Holds always: a path is read from left to right by one pattern; what does not fit is refused.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator

from holdfast.errors import BadOption

_NAME = re.compile(r"\s*([^\W\d]\w*)\s*")
_STEP = re.compile(
    r"""\s*(?:\.\s*([^\W\d]\w*|<\w+>)|\[\s*(-?\d{1,18}|b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*"|None|True|False)\s*\])"""
)

Key = int | str | bytes | None
Step = tuple[str | None, Key]


def split_name(path: str) -> tuple[str, str]:
    """``self.items[3]`` -> ``self`` and ``.items[3]``."""
    match = _NAME.match(path)
    if match is None:
        raise BadOption(f"{path!r} does not begin with a name", hint="Write a path like messages[0]['role'].")
    return match[1], path[match.end() :]


def steps(path: str) -> Iterator[tuple[Step, str]]:
    """Each step of a path: (attribute name, None) or (None, key), with its text."""
    at = 0
    while at < len(path.rstrip()):
        match = _STEP.match(path, at)
        if match is None:
            raise BadOption(f"{path[at:]!r} is not an attribute or an index", hint="Paths have names, [3] and ['key'].")
        at = match.end()
        yield ((match[1], None) if match[1] else (None, literal_eval(match[2]))), match[0].strip()
