"""The view of the store itself: how large it is, how it grows, who holds it, and what was slow.

Owns which facts are said, and their words. What always holds: it reads a bounded part of the store, however large that
is, and says which; what reads more is worked out only when somebody asks for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from shlex import quote
from typing import Any, NamedTuple

import msgspec

from holdfast import Costs, Store
from holdfast.crash import dumps, folder_of
from holdfast.errors import NotADump, command
from holdfast.text import age, count, size
from holdfast.web.agents import writer_of
from holdfast.web.asked import Asked

LOOKED_AT = 20
"""Agents, those that changed last, whose checkpoints the figures are made of."""
EACH = 100
"""Checkpoints of each of them."""
SLOWEST = 10
LOW_SPACE_BYTES = 256 << 20
LARGE_LOG_BYTES = 64 << 20
_DAYS_LEFT = 14
WRITERS_MOST = 200


class Fact(NamedTuple):
    """One line of the table. ``level``: ok, note or warning. ``command``: what to type; ``to``: where to look."""

    name: str
    value: str
    level: str = "ok"
    detail: str = ""
    command: str = ""
    to: str = ""


def health(store: Store, asked: Asked) -> dict[str, Any]:
    """Facts about the store, in one table, the slowest checkpoints of late, and who writes now."""
    stats = store.stats()
    figures = [store.costs(info.name, limit=EACH) for info in store.agents(limit=LOOKED_AT) if info.head is not None]
    facts = [
        *_sizes(store, stats, figures),
        *_keeping(store, worked_out=asked.flag("retention")),
        *_working(store, stats),
        *_places(store, stats),
        *_proven(store),
    ]
    return {
        "store": store.place,
        "facts": [
            {**fact._asdict(), "command": fact.command and f"{fact.command} --store {quote(store.place)}"}
            for fact in facts
        ],
        "slowest": _slowest(figures),
        "looked_at": {"agents": len(figures), "checkpoints": sum(one.checkpoints for one in figures)},
        "writers": [{**writer_of(one), "agent": str(one.get("agent", ""))} for one in stats["writers"][:WRITERS_MOST]],
        "queues": [one.to_json() for one in store.queues()],
        "bytes": stats["bytes"],
        "counts": stats["counts"],
        "live": "*",
    }


def _sizes(store: Store, stats: dict[str, Any], figures: list[Costs]) -> Iterator[Fact]:
    sizes = stats["bytes"]
    parts = ", ".join(f"{name} {size(number)}" for name, number in sizes.items() if number)
    yield Fact("Size", size(sum(sizes.values()) - sizes["free"]), detail=parts)  # free room is part of the catalog
    counts = stats["counts"]
    yield Fact(
        "Holds",
        f"{count(counts.get('agent', 0), 'agent')}, {count(counts.get('checkpoint', 0), 'checkpoint')}",
        detail="encrypted" if store.encrypted else "not encrypted",
    )
    grows = sum(one.bytes_per_day for one in figures)
    of = f"what the {count(len(figures), 'agent')} that changed last wrote" if figures else "nothing was written yet"
    yield Fact("Growth", f"{size(grows)} a day", detail=of)
    if "://" not in store.place:
        free = shutil.disk_usage(store.place).free
        days = free / grows if grows else 0.0
        low = free < LOW_SPACE_BYTES or 0 < days < _DAYS_LEFT
        lasts = f"at this growth full in {age(days * 86_400)}" if 0 < days < 3650 else ""
        yield Fact("Room left", size(free), "warning" if low else "ok", lasts)
    if sizes.get("log", 0) > LARGE_LOG_BYTES:
        yield Fact("Log", size(sizes["log"]), "note", "It shrinks when a program that writes the store closes it.")


def _keeping(store: Store, *, worked_out: bool) -> Iterator[Fact]:
    policies = store.policies()
    if not policies:
        yield Fact("Keeping", "everything", "note", "No policy says what may go.", "holdfast retain --last 1000 --save")
        return
    said = count(len(policies), "policy", "policies")
    if worked_out:
        found = store.retain(dry_run=True)
        yield Fact("Keeping", said, detail=f"would free {size(found.freed_bytes)} now", command="holdfast retain")
    else:
        yield Fact("Keeping", said, detail="What they would free now", to="/health?retention=1")


def _working(store: Store, stats: dict[str, Any]) -> Iterator[Fact]:
    writers = stats["writers"]
    processes = {(one.get("host"), one.get("pid")) for one in writers}
    value = f"{count(len(processes), 'process', 'processes')}, {count(len(writers), 'branch', 'branches')}"
    yield Fact("Writing now", value if writers else "nobody")
    runs = store.open_runs()
    waits = ", ".join(f"{number:,} {status}" for status, number in runs.items() if status != "due") or "none"
    urgent = runs.get("needs attention", 0) + runs.get("interrupted", 0)
    where = "/?status=needs+attention" if runs.get("needs attention") else "/?status=interrupted" if urgent else ""
    yield Fact("Open runs", waits, "warning" if urgent else "ok", to=where)
    workers = store.workers()
    who = ", ".join(sorted(f"process {one.get('pid')} on {one.get('host')}" for one in workers[:5]))
    yield Fact("Workers", count(len(workers), "worker") if workers else "none", detail=who)
    if runs.get("due"):
        hint = "They go on when a worker comes."
        yield Fact("Due", count(runs["due"], "run"), "note", hint, "holdfast worker PROGRAM")
    doubts = len(store.effects(in_doubt=True, limit=1_000))
    if doubts:
        yield Fact("In doubt", count(doubts, "effect"), "warning", "Somebody has to find out.", to="/?status=in+doubt")
    overdue = [one for one in store.schedules() if one.overdue]
    if overdue:
        hint = f"{overdue[0].function}: no worker has begun it in time."
        yield Fact("Schedules", count(len(overdue), "overdue", "overdue"), "warning", hint, "holdfast worker PROGRAM")


def _places(store: Store, stats: dict[str, Any]) -> Iterator[Fact]:
    try:
        number = len(dumps(folder_of(store.place)))
    except NotADump as error:
        yield Fact("Dumps", "cannot be read", "warning", error.message)
    else:
        to = "/dumps" if number else ""
        yield Fact("Dumps", count(number, "dump") if number else "none", "note" if number else "ok", to=to)
    for place in filter(None, (stats["objects"], *stats["cold"])):
        reached = bool(place["reachable"])
        said = f"{count(place['packs'], 'pack')} in {place['place']}"
        yield Fact("Packs elsewhere", said, "ok" if reached else "warning", "" if reached else "It cannot be reached.")
    for one in store.workspaces():
        if one.half_way:
            hint = f"Files of {one.agent} are still to be put back."
            yield Fact("Workspace", one.path, "warning", hint, command("rollback", one.agent))
    for half in store.half_thawed():
        yield Fact("Thaw", half.image, "warning", f"It is half-way: {half.agent}.", command("thaw", half.image))
    if stats["moved"]:
        yield Fact("Moved", stats["moved"], "note", "This store can only be read.")


def _proven(store: Store) -> Iterator[Fact]:
    last = store.last_verified()
    if last is None:
        hint = (
            "Damage is found when it is read. Of a store in the temporary directory no verify is noted. All is read by"
        )
        yield Fact("Last verify", "none by you is noted", "note", hint, "holdfast verify")
        return
    said = f"{age(max(0.0, (datetime.now(UTC) - last['at']).total_seconds()))} ago"
    if not last["ok"]:
        hint = f"It found {count(last['problems'], 'problem')}."
        yield Fact("Last verify", said, "warning", hint, "holdfast verify")
    else:
        yield Fact("Last verify", said, detail="All was as it was written.")


def _slowest(figures: list[Costs]) -> list[dict[str, Any]]:
    """The checkpoints for which programs stood still longest, of the newest of some agents."""
    found = [
        (recent.stall_s, {"agent": one.agent, **msgspec.to_builtins(recent)})
        for one in figures
        for recent in one.recent
        if recent.stall_s is not None
    ]
    return [said for _, said in sorted(found, key=lambda one: one[0], reverse=True)[:SLOWEST]]
