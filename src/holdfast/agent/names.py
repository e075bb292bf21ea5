"""Names and labels: what people may call things.

Owns the refusal of names that could not be shown or found again. Knows nothing of what is named.
"""

from __future__ import annotations

import re

from holdfast.codec.wire import is_utf8
from holdfast.errors import BadName, BadOption

_REVISION = re.compile(r"^(~\d+|#\d+|id:.*)$", re.DOTALL)

# Long enough for any path or address that people use as a name.
NAME_MAX_CHARACTERS = 1024
# A label is read in lists, one line each.
LABEL_MAX_CHARACTERS = 1_000


MAIN = "main"
"""The branch that every agent has."""

IMAGES = "images/"
"""So begin the names of agents that images of processes are saved in. What is one is not said by the name (layers)."""


def full_name(agent: str, branch: str) -> str:
    """What a branch of an agent is called: ``NAME@BRANCH``, and the first one ``NAME``."""
    return agent if branch == MAIN else f"{agent}@{branch}"


def is_bookkeeping(section: object) -> bool:
    """Whether a section is an integration's own record, such as LangGraph's: it is shown when it is asked for."""
    return isinstance(section, str) and section.startswith("__")


def check_name(name: object, what: str, *, but: str = "") -> str:
    """Refuse names that could not be found again. Branches and tags stand after an ``@``, so they have none."""
    if not isinstance(name, str) or not name.strip() or name != name.strip():
        raise BadName(
            f"{name!r} is not a name for {what}", hint="Use text that is not empty and has no space around it."
        )
    if len(name) > NAME_MAX_CHARACTERS or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
        raise BadName(
            f"{name[:40]!r} cannot be a name for {what}",
            hint=f"At most {NAME_MAX_CHARACTERS} characters, no control characters.",
        )
    if but and but in name:
        raise BadName(f"{name!r} cannot be a name for {what}", hint=f"It stands after {but!r} in NAME{but}REV.")
    return name


def check_new(name: object, what: str) -> str:
    """Refuse what a revision would say by itself: the checkpoint that it means could not be named any more."""
    new = check_name(name, what, but="@")
    if _REVISION.match(new):
        raise BadName(
            f"{new!r} cannot be a name for {what}: as a revision it already means something",
            hint="Names do not look like ~2, #17 or id:3f2a.",
        )
    return new


def check_text(text: object, what: str, most: int = 200) -> str:
    """Refuse what is no short text."""
    if not isinstance(text, str) or not 0 < len(text) <= most:
        raise BadName(f"{what} is a text of 1 to {most} characters, not {text!r:.60}")
    return text


def check_label(label: object) -> str:
    """Labels are text that can be shown and found again."""
    if not isinstance(label, str):
        raise BadOption(f"a label is text, not {type(label).__name__}", hint='For example agent.checkpoint("asked").')
    if len(label) > LABEL_MAX_CHARACTERS or not is_utf8(label):
        raise BadOption(
            f"the label {label[:40]!r}... cannot be kept",
            hint=f"At most {LABEL_MAX_CHARACTERS} characters, no lone surrogates. Put long texts into the state.",
        )
    return label
