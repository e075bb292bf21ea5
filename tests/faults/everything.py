"""All campaigns, in the order in which they run: importing their modules registers them."""

from __future__ import annotations

from tests.faults import (  # noqa: F401
    crashes,
    damage,
    effects,
    failing,
    hostile,
    kills,
    layers,
    model,
    mutants,
    power,
    servers,
    writers,
)
from tests.faults.campaign import CAMPAIGNS as _KNOWN

_ORDER = (
    "crashes", "power", "kills", "kill-points", "kill-syscalls", "layers", "servers", "transactions", "effects",
    "graphs", "failing", "flush", "full", "bytes", "sizes", "rows", "hostile", "model", "writers", "mutants",
)  # fmt: skip

CAMPAIGNS = {name: _KNOWN[name] for name in _ORDER}
