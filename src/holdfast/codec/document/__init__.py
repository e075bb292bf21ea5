"""The document: an agent's state as sections of tracked values that know their own changes.

``packing`` encodes what it holds, ``handouts`` and ``watches`` follow what user code may hold, ``intake`` takes values
in, ``loading`` reads stored ones and does operations again, ``following`` leads to another state, ``mapping`` is what a
dict can do, and ``document`` puts them together.
"""

from __future__ import annotations

from holdfast.codec.document.document import Document
from holdfast.codec.document.sections import MISSING, Capture, Captured, Encoded, Section, Source

__all__ = ["MISSING", "Capture", "Captured", "Document", "Encoded", "Section", "Source"]
