"""One package per outside system that can keep its state here."""

from __future__ import annotations
