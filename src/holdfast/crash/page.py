"""The summary of a dump as lines of text.

Owns words and their order. Must not know dumps, colours or widths: it gets what ``summary.collect`` chose. Holds
always: no line has a control character.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.crash.render import clean, size


class Line(NamedTuple):
    """One line. ``style`` says what it is: title, head, bad, good, text, place, code, note."""

    style: str
    text: str


def page(found: dict[str, Any]) -> Iterator[Line]:
    """The page, from the failure to what is missing."""
    for style, text in _lines(found):
        yield Line(style, clean(text))


_Raw = Iterator[tuple[str, str]]


def _lines(found: dict[str, Any]) -> _Raw:
    yield from _what(found)
    yield from _where(found)
    yield from _agents(found["agents"])
    yield from _listed("Locks and waiting", found["locks"], "bad")
    yield from _others("Other threads", found["threads"])
    yield from _others("Tasks", found["tasks"])
    yield from _listed("Native", found["native"], "text")
    yield from _resources(found)
    if found["logs"]:
        yield "head", "Last log records"
        for record in found["logs"]:
            yield "text", f"  {record['at'][11:19]} {record['level']} {record['logger']}: {record['text']}"
    yield from _listed("Unusual", found["unusual"], "bad")
    yield from _listed("Not in this dump", found["missing"], "note")
    if found["redacted"]:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in found["redacted"].items())
        yield "head", "Redacted"
        yield "note", f"  {counts}"


def _what(found: dict[str, Any]) -> _Raw:
    failures = found["failures"]
    if failures:
        for failure in failures:
            indent = "  " * failure["depth"]
            lead = f"{failure['why']}: " if failure["why"] else ""
            group = f" ({failure['members']} exceptions)" if failure["members"] else ""
            message = failure["message"].splitlines() or [""]
            yield (
                "title" if not failure["why"] else "bad",
                f"{indent}{lead}{failure['type']}{group}: {message[0]}".rstrip(": "),
            )
            for line in message[1:6]:
                yield "text", f"{indent}  {line}"
            for note in failure["notes"]:
                yield "text", f"{indent}  note: {note}"
    else:
        yield "title", found["why"] or found["trigger"] or "a dump"
    if found["death"]:
        if failures or found["death"]["what"] != found["why"]:
            yield "bad", f"The process ended: {found['death']['what']}"
        for text in found["death"]["evidence"]:
            yield "note", f"  {text}"
    why = f" ({found['why']})" if found["why"] not in ("", found["trigger"]) and failures else ""
    facts = [found["trigger"] + why, found["at"].replace("+00:00", "Z")]
    facts += [f"pid {found['pid']} on {found['host']}", f"Python {found['python']}"]
    yield "note", ", ".join(fact for fact in facts if fact)
    if found["program"]:
        yield "note", " ".join(found["program"])


def _where(found: dict[str, Any]) -> _Raw:
    frames, thread, origin = found["frames"], found["thread"], found["origin"]
    if frames:
        seen = f", as it was {thread['age_s']:.1f} s earlier" if thread and thread["age_s"] is not None else ""
        yield "head", f"Where, in {thread['name'] or 'a thread'}{seen}" if thread else "Where"
        yield from _stack(frames)
        if thread and thread["left_out"]:
            yield "note", f"  {thread['left_out']} frames of this stack were left out"
    if origin:
        yield "head", f"Where it began: {origin['type']}"
        yield from _stack(origin["frames"])


def _stack(frames: list[dict[str, Any]]) -> _Raw:
    told = ""
    for frame in frames:
        if frame["before"]:
            yield "note", f"  ... {frame['before']} {'frame' if frame['before'] == 1 else 'frames'} of other code"
        yield "place", f"  {frame['place']} in {frame['function']}"
        if frame["source"]:
            yield "code", f"    > {frame['source']}"
        for name, text in frame["locals"]:
            yield "text", f"      {name} = {text}"
        if frame["more_locals"]:
            yield "note", f"      ... {frame['more_locals']} more"
        if frame["hidden"] and frame["hidden"] != told:  # once, when it is the same for all
            yield "note", f"      no locals: {frame['hidden']}"
        told = frame["hidden"]


def _agents(agents: list[dict[str, Any]]) -> _Raw:
    for agent in agents:
        branch = f"@{agent['branch']}" if agent["branch"] not in ("", "main") else ""
        yield "head", f"Agent {agent['name']}{branch}"
        if agent["checkpoint"]:
            label = f" {agent['label']}" if agent["label"] else ""
            depth = f" #{agent['depth']}" if agent["depth"] else ""
            dirty = ", and changes that were not saved" if agent["dirty"] else ""
            at = f" ({agent['checkpoint_at'].replace('+00:00', 'Z')})" if agent["checkpoint_at"] else ""
            yield "text", f"  last checkpoint {agent['checkpoint'][:12]}{depth}{label}{at}{dirty}"
            if agent["stands_on"]:
                yield "text", f"  the run was executed again and had come to {agent['stands_on']}"
        else:
            yield "text", "  no checkpoint yet"
        if agent["function"] or agent["run"]:
            steps = (
                agent["stack"] if agent["stack"][:1] == [agent["function"]] else [agent["function"], *agent["stack"]]
            )
            inside = " > ".join(filter(None, steps))
            yield "text", f"  {agent['status'] or 'in'}: {inside} (run {agent['run']})"
        for effect in agent["effects"]:
            outcome = f" -> {effect['outcome']}" if effect["outcome"] else ""
            style = "bad" if effect["status"] == "in doubt" else "text"
            yield style, f"  {effect['status']}: {effect['tool']}({effect['args']}){outcome}"
        if agent["in_doubt"]:
            yield "bad", f"  {agent['in_doubt']} in doubt: nobody knows whether they happened"
        if agent["problem"]:
            yield "note", f"  {agent['problem']}"


def _others(title: str, standing: dict[str, Any]) -> _Raw:
    if not standing["total"]:
        return
    yield "head", f"{title} ({standing['total']:,})"
    for one in standing["places"]:
        who = ", ".join(one["names"]) + (", ..." if one["count"] > len(one["names"]) else "")
        yield "text", f"  {one['count']:>4} in {one['where']}  [{who}]"
    if standing["other_places"]:
        yield "note", f"       and {standing['other_places']:,} other places"


def _resources(found: dict[str, Any]) -> _Raw:
    process, heap = found["process"], found["heap"]
    if not any(process.values()) and not heap["objects"]:
        return
    yield "head", "Process"
    memory = [f"{size(process['resident_bytes'])} resident", f"{size(process['peak_bytes'])} at most"]
    if process["cgroup_limit_bytes"]:
        memory.append(f"control group {size(process['cgroup_bytes'])} of {size(process['cgroup_limit_bytes'])}")
    memory.append(f"machine {size(process['machine_free_bytes'])} free of {size(process['machine_bytes'])}")
    yield "text", "  memory       " + ", ".join(memory)
    limit = f" of {process['descriptors_limit']:,}" if process["descriptors_limit"] > 0 else ""
    yield "text", f"  descriptors  {process['descriptors']:,}{limit}, {process['sockets']:,} sockets"
    load = " ".join(f"{one:.1f}" for one in process["load"])
    ran = f"ran {process['process_s']:,.1f} s; load {load} on {process['cpus']} processors"
    yield "text", f"  threads      {process['threads']:,}; {ran}"
    if heap["types"]:
        rows = ", ".join(f"{count:,} {name} ({size(taken)})" for name, count, taken in heap["types"])
        yield "text", f"  heap         {heap['objects']:,} objects: {rows}"


def _listed(title: str, lines: list[str], style: str) -> _Raw:
    if lines:
        yield "head", title
        for line in lines:
            yield style, f"  {line}"
