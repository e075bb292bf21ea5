"""A document of encodings: sections are given whole, as plain values, and only what differs is recorded.

``parts`` opens and closes containers as bytes, ``held`` is one section with its tree, ``taking`` makes encodings of
given values, ``differences`` finds what changed, ``reading`` gives values back and ``copies`` more of the same,
``following`` does operations again, and ``assigned`` puts them together.
"""

from __future__ import annotations

from holdfast.codec.assigned.assigned import Assigned, Still
from holdfast.codec.assigned.copies import Copies

__all__ = ["Assigned", "Copies", "Still"]
