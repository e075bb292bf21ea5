"""plain(): what a state holds, as plain builtins, for libraries that refuse subclasses."""

from __future__ import annotations

from typing import Any

from holdfast.codec.document import Document
from holdfast.codec.nodes import Node


def plain(value: Any) -> Any:
    """A deep copy of a node (or a whole state) made of dict, list and set; other values are returned as they are."""
    if isinstance(value, Document):
        return value.plain(value)
    if isinstance(value, Node):
        return value._doc.plain(value)
    return value
