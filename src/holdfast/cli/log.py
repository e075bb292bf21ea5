"""``holdfast log``: an agent's history, newest first, as a table with the lines of its tree beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from holdfast import Agent, Checkpoint, Store
from holdfast.cli.graph import Row, draw
from holdfast.cli.output import Output
from holdfast.cli.session import Flag, Given, Json, Limit, Revision, limited, reader
from holdfast.cli.text import ago, clean, count, now, shorten, size

SCHEMA = "holdfast.log/1"
_ABOUT = 100  # characters of a crash's error

_DOTS = {"checkpoint": "●", "undo": "↶", "redo": "↷", "recover": "✚"}
_ASCII_DOTS = {"checkpoint": "*", "undo": "<", "redo": ">", "recover": "+"}


def log(
    agent: Revision,
    /,
    *,
    limit: Limit = None,
    all: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Show an agent's history, newest first.

    Each line: the depth (#17), the id's first characters, the time, how long ago, the size of what it added, then
    names (branches, tags), the label, and what kind it is.

    Parameters
    ----------
    agent
        NAME, or NAME@REV to begin at a branch or a checkpoint.
    limit
        Show at most this many; 0 shows all. [default: 50; all with --json]
    all
        Show every branch, and lines that rollbacks left behind.
    json
        Print JSON (schema holdfast.log/1).
    """
    with session.reading() as store:
        history = _History.read(store, agent, everything=all)
        shown = history.checkpoints[: limited(limit, json=json)]
        if json:
            session.out.json(history.as_json(shown))
        else:
            _print(session.out, history, shown)
    return 0


@dataclass(frozen=True)
class _History:
    agent: Agent
    checkpoints: list[Checkpoint]
    heads: dict[str, list[str]]
    tags: dict[str, list[str]]
    reached: set[str] | None  # ids that a branch leads to; None when only one line is shown, which one does
    depths: dict[str, int]
    crashes: list[dict[str, Any]]  # newest first

    @classmethod
    def read(cls, store: Store, revision: str, *, everything: bool) -> _History:
        name, rev = store.resolve(revision)
        agent = reader(store, name)
        branches = agent.branches()
        if rev in branches:
            agent = reader(store, name, rev)
        heads: dict[str, list[str]] = {}
        for branch in branches:
            head = reader(store, name, branch).head
            if head is not None:
                heads.setdefault(head.id, []).append(branch)
        tags: dict[str, list[str]] = {}
        for tag, tagged in agent.tags().items():
            tags.setdefault(tagged.id, []).append(tag)
        if everything:
            found = agent.log(all=True)
            reached: set[str] | None = {c.id for branch in branches for c in reader(store, name, branch).log()}
        elif rev and rev not in branches:
            found = agent.log(at=rev)
            reached = None
        else:
            found = agent.log()
            reached = None
        depths = {c.id: c.depth for c in found}
        told = [one for one in agent.crashes() if str(one.get("checkpoint", "")) in {*depths, ""}]
        return cls(agent, found, heads, tags, reached, depths, told)

    def names(self, checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
        """(branches whose head it is, tags)."""
        return self.heads.get(checkpoint.id, []), self.tags.get(checkpoint.id, [])

    def abandoned(self, checkpoint: Checkpoint) -> bool:
        return self.reached is not None and checkpoint.id not in self.reached

    def as_json(self, shown: list[Checkpoint]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "agent": self.agent.name,
            "branch": self.agent.branch_name,
            "checkpoints": [{**c.to_json(), "heads": self.names(c)[0], "abandoned": self.abandoned(c)} for c in shown],
            "crashes": [_crash_json(one) for one in self.crashes],
            "more": len(self.checkpoints) - len(shown),
            "abandoned_lines": len(self.agent.abandoned()),
        }


def _parents(shown: list[Checkpoint]) -> Iterator[tuple[str, str]]:
    """Each with the one before it, over what was forgotten."""
    ids = {checkpoint.id for checkpoint in shown}
    for checkpoint in shown:
        yield checkpoint.id, checkpoint.parent_id if checkpoint.parent_id in ids else checkpoint.previous_id


def _print(out: Output, history: _History, shown: list[Checkpoint]) -> None:
    if not shown:
        out.say(f"{clean(history.agent.name)} has no checkpoint yet.")
        _crashed(out, history, "", "")
        return
    rows = list(draw(_parents(shown), unicode=out.unicode))
    graph_width = max(len(row.before) + 1 + len(row.after) for row in rows)
    depth_width = max(len(str(c.depth)) for c in shown) + 1
    day, passing = "", ""
    for checkpoint, row in zip(shown, rows, strict=True):
        written = f"{checkpoint.time.astimezone():%Y-%m-%d %Z}"
        if written != day:
            out.say(Text(passing.ljust(graph_width + 2), style="dim"), Text(written, style="bold"))
            day = written
        _crashed(out, history, checkpoint.id, passing)
        if row.joins:
            out.say(Text(row.joins, style="dim"))
        out.say(_entry(out, history, checkpoint, row, graph_width, depth_width))
        passing = row.passing
    if len(shown) == len(history.checkpoints):
        _crashed(out, history, "", "")
    _footer(out, history, shown)


def _entry(
    out: Output, history: _History, checkpoint: Checkpoint, row: Row, graph_width: int, depth_width: int
) -> Text:
    lost = history.abandoned(checkpoint)
    dots = _DOTS if out.unicode else _ASCII_DOTS
    dot = dots.get(checkpoint.kind, "?")
    if lost and checkpoint.kind == "checkpoint":
        dot = "○" if out.unicode else "o"
    line = Text().append(row.before, style="dim")
    line.append(dot, style="dim" if lost else "bold green").append(row.after, style="dim")
    line.append(" " * (graph_width - len(line) + 1))
    line.append(f"#{checkpoint.depth}".rjust(depth_width) + "  ")
    line.append(checkpoint.short_id, style="yellow").append("  ")
    line.append(f"{checkpoint.time.astimezone():%H:%M:%S}").append("  ")
    line.append(ago(checkpoint.time, now()).rjust(10), style="dim").append("  ")
    line.append(size(checkpoint.size_bytes).rjust(8), style="dim").append("  ")
    line.append_text(_names(history, checkpoint))
    line.append(clean(checkpoint.label), style="dim" if lost else "")
    line.append_text(_remarks(history, checkpoint))
    line.rstrip()
    return line


def _crashed(out: Output, history: _History, checkpoint_id: str, passing: str) -> None:
    """What happened after a checkpoint ("": before the first) and was no checkpoint: a crash, a new start from one."""
    for one in history.crashes:
        if one.get("checkpoint", "") != checkpoint_id:
            continue
        told = _crash_json(one)
        new_start = told["what"] == "rehydrate"
        mark = ("⚑" if new_start else "✗") if out.unicode else ("+" if new_start else "x")
        line = Text(passing + " " if passing else "", style="dim")
        line.append(f"{mark} {told['what']}", style="bold cyan" if new_start else "bold red")
        line.append(f"  {one['when'].astimezone():%H:%M:%S}  ").append(ago(one["when"], now()), style="dim")
        about = f"as {told['branch']}, from" if new_start else ": ".join(filter(None, (told["error"], told["message"])))
        line.append(f"  {clean(shorten(about, _ABOUT))}  ")
        line.append(clean(told["dump"].rpartition("/")[2]), style="dim")
        out.say(line)


def _crash_json(one: dict[str, Any]) -> dict[str, Any]:
    keys = ("what", "error", "message", "trigger", "branch", "checkpoint", "dump")
    return {**{key: str(one.get(key, "")) for key in keys}, "time": one["when"].isoformat()}


def _names(history: _History, checkpoint: Checkpoint) -> Text:
    branches, tags = history.names(checkpoint)
    named = [Text(clean(name), style="bold cyan") for name in branches]
    named += [Text(f"tag: {clean(name)}", style="bold magenta") for name in tags]
    return Text.assemble("(", Text(", ").join(named), ") ") if named else Text()


def _remarks(history: _History, checkpoint: Checkpoint) -> Text:
    remarks = Text()
    if checkpoint.kind != "checkpoint":
        depth = history.depths.get(checkpoint.target_id)
        target = f" of #{depth}" if depth else f" of {checkpoint.target_id[:12]}" if checkpoint.target_id else ""
        remarks.append(f"  [{checkpoint.kind}{target}]", style="blue")
    if checkpoint.validity != "good":
        reason = f": {clean(checkpoint.validity_reason)}" if checkpoint.validity_reason else ""
        remarks.append(f"  [{checkpoint.validity}{reason}]", style="bold red")
    if history.abandoned(checkpoint):
        remarks.append("  [abandoned]", style="dim")
    return remarks


def _footer(out: Output, history: _History, shown: list[Checkpoint]) -> None:
    notes = []
    more = len(history.checkpoints) - len(shown)
    if more:
        notes.append(f"{count(more, 'older checkpoint')} not shown; -n 0 shows all.")
    lines = len(history.agent.abandoned())
    if lines and history.reached is None:
        notes.append(f"{count(lines, 'abandoned line')} not shown; --all shows {'it' if lines == 1 else 'them'}.")
    for note in notes:
        out.say(Text(note, style="dim"))
