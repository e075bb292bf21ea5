"""What has changed around a run since it began: its code, its configuration.

Owns the comparison of hashes when a run is resumed. Must not decide anything: a changed program may well do the same,
and where it does not, the run finds out by itself. What always holds: a change is logged at each resumption, and is a
record of the run.
"""

from __future__ import annotations

import logging
from typing import Any

from holdfast.run import records as rec
from holdfast.run.arguments import fetch, stow
from holdfast.run.durables import Durable
from holdfast.run.past import RunPast
from holdfast.run.scope import Host, now_us

log = logging.getLogger("holdfast.run")


def config_of(agent: Any) -> str:
    """The hash of the configuration that an agent was opened with; empty when there is none."""
    return str(getattr(agent, "config_hash", ""))


def compare(agent: Host, made: Durable, this: RunPast) -> None:
    """Say what has changed since a run began, before that shows in what it does."""
    begin = this.begin
    pairs = {"code": (begin.code, made.code), "configuration": (begin.config, config_of(agent))}
    for what, (was, now) in pairs.items():
        if was == now or not begin.code:
            continue
        log.warning(
            "run %s of %s: the %s of %s has changed since it began; it stops where it does not do what is recorded",
            this.id, agent.name, what, made.name,
        )  # fmt: skip
        path = f"={what}"
        last = this.notes.get(path)
        if last is None or fetch(last.value, agent.ledger, agent.registry, inert=True) != now:
            value = stow(now, agent.registry).value
            note = this.notes[path] = rec.Note(now_us(), this.id, "changed", what, value, path)
            agent.ledger.append(note)
