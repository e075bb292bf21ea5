"""``holdfast log``, ``show`` and ``diff``: an agent's history, one checkpoint of it, and what lies between two.

Owns the drawing of a history's tree beside its lines. A history is a tree, newest first: several lines may join
downwards in one parent, none divides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Agent, Change, Checkpoint, FileInfo, Store
from holdfast.cli.exits import DIFFERENT
from holdfast.cli.output import Output
from holdfast.cli.session import Bookkeeping, Flag, Given, Json, Limit, Revision, Session, limited, looking, reader
from holdfast.cli.text import ago, clean, count, moment, now, shorten, size
from holdfast.cli.values import (
    FULL,
    Limits,
    Tree,
    change_lines,
    file_lines,
    outside_lines,
)
from holdfast.errors import BadOption
from holdfast.schemas import as_json, change_json, crash_json, kind_of
from holdfast.travel import Comparison, follow, parse_path

_ABOUT = 100  # characters of a crash's error
_ROOMY = 80  # columns of a terminal; a narrower one shows less of a line, so that the label is there
# Changes that fit under a tree without pushing it off the screen.
_CHANGES = 12
# Lines of a diff that need no summary above them.
_SUMMED = 10
# Who asks for one place wants to see more of it.
_PLACE = Limits(depth=8, items=40, characters=4_000)

_DOTS = {"checkpoint": "●", "undo": "↶", "redo": "↷", "recover": "✚"}
_ASCII_DOTS = {"checkpoint": "*", "undo": "<", "redo": ">", "recover": "+"}
_BARS = {"bar": "│", "join": "├", "across": "─", "cross": "┼", "corner": "╯", "tee": "┴"}
_ASCII_BARS = {"bar": "|", "join": "|", "across": "-", "cross": "+", "corner": "'", "tee": "'"}


# -- log ------------------------------------------------------------------------------------------------------------


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
    names (branches, tags), the label, what asked for it if the program itself did not, and what kind it is.

    Parameters
    ----------
    agent
        NAME, or NAME@REV to begin at a branch or a checkpoint.
    all
        Show every branch, and lines that rollbacks left behind.
    """
    with session.reading() as store:
        history = _History.read(store, agent, everything=all)
        shown = history.checkpoints[: limited(limit, json=json)]
        if json:
            return session.json("log", **history.as_json(shown))
        _print_log(session.out, history, shown)
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
        at = rev if rev and rev not in branches else None
        found = agent.log(all=True) if everything else agent.log(at=at)
        lines = (reader(store, name, branch).log() for branch in branches)
        reached = {c.id for line in lines for c in line} if everything else None
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
            "agent": self.agent.name,
            "branch": self.agent.branch_name,
            "checkpoints": [{**c.to_json(), "heads": self.names(c)[0], "abandoned": self.abandoned(c)} for c in shown],
            "crashes": [crash_json(one) for one in self.crashes],
            "more": len(self.checkpoints) - len(shown),
            "abandoned_lines": len(self.agent.abandoned()),
        }


def _parents(shown: list[Checkpoint]) -> Iterator[tuple[str, str]]:
    """Each with the one before it, over what was forgotten."""
    ids = {checkpoint.id for checkpoint in shown}
    for checkpoint in shown:
        yield checkpoint.id, checkpoint.parent_id if checkpoint.parent_id in ids else checkpoint.previous_id


def _print_log(out: Output, history: _History, shown: list[Checkpoint]) -> None:
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
            out.say(Text(passing.ljust(graph_width + 2), style="dim"), Text(written, style="bold"), wrap=False)
            day = written
        _crashed(out, history, checkpoint.id, passing)
        if row.joins:
            out.say(Text(row.joins, style="dim"), wrap=False)
        out.say(_entry(out, history, checkpoint, row, graph_width, depth_width), wrap=False)
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
    if not out.is_terminal or out.width >= _ROOMY:
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
        told = crash_json(one)
        new_start = told["what"] == "rehydrate"
        mark = ("⚑" if new_start else "✗") if out.unicode else ("+" if new_start else "x")
        line = Text(passing + " " if passing else "", style="dim")
        line.append(f"{mark} {told['what']}", style="bold cyan" if new_start else "bold red")
        line.append(f"  {one['when'].astimezone():%H:%M:%S}  ").append(ago(one["when"], now()), style="dim")
        about = f"as {told['branch']}, from" if new_start else ": ".join(filter(None, (told["error"], told["message"])))
        line.append(f"  {clean(shorten(about, _ABOUT))}  ")
        line.append(clean(told["dump"].rpartition("/")[2]), style="dim")
        out.say(line, wrap=False)


def _names(history: _History, checkpoint: Checkpoint) -> Text:
    branches, tags = history.names(checkpoint)
    named = [Text(clean(name), style="bold cyan") for name in branches]
    named += [Text(f"tag: {clean(name)}", style="bold magenta") for name in tags]
    return Text.assemble("(", Text(", ").join(named), ") ") if named else Text()


def _remarks(history: _History, checkpoint: Checkpoint) -> Text:
    remarks = Text()
    if checkpoint.trigger not in {"", "run"}:  # its label names the run
        remarks.append(f"  [{clean(checkpoint.trigger)}]", style="dim")
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
    out.left_out(len(history.checkpoints) - len(shown), "older checkpoint")
    lines = len(history.agent.abandoned())
    if lines and history.reached is None:
        out.note(f"{count(lines, 'abandoned line')} not shown; --all shows {'it' if lines == 1 else 'them'}.")


@dataclass(frozen=True)
class Row:
    """What stands in front of one checkpoint: lines that join just above it, its own line up to and after its dot."""

    joins: str
    before: str
    after: str
    passing: str


def draw(history: Iterable[tuple[str, str]], *, unicode: bool = True) -> Iterator[Row]:
    """One row for each (id, parent id), newest first."""
    signs = _BARS if unicode else _ASCII_BARS
    lanes: list[str] = []  # for each line the id that it leads down to; "" where none runs
    for own, parent in history:
        mine = [at for at, waiting in enumerate(lanes) if waiting == own]
        joins = ""
        if not mine:  # the end of a line: it takes the first free place
            at = next((at for at, waiting in enumerate(lanes) if not waiting), len(lanes))
            lanes[at : at + 1] = [own]
        else:
            at = mine[0]
            if len(mine) > 1:
                joins = _joins(lanes, mine, signs)
                for other in mine[1:]:
                    lanes[other] = ""
        passing = [signs["bar"] if waiting else " " for waiting in lanes]
        before, after = " ".join(passing[:at]), " ".join(passing[at + 1 :])
        lanes[at] = parent
        while lanes and not lanes[-1]:
            lanes.pop()
        below = " ".join(signs["bar"] if waiting else " " for waiting in lanes)
        yield Row(joins, f"{before} " if before else "", f" {after}".rstrip(), below)


def _joins(lanes: list[str], mine: list[int], signs: dict[str, str]) -> str:
    first, last = mine[0], mine[-1]
    drawn = []
    for at, waiting in enumerate(lanes):
        if at == first:
            sign = signs["join"]
        elif at == last:
            sign = signs["corner"]
        elif at in mine:
            sign = signs["tee"]
        elif first < at < last:
            sign = signs["cross"] if waiting else signs["across"]
        else:
            sign = signs["bar"] if waiting else " "
        drawn.append(sign + (signs["across"] if first <= at < last else " "))
    return "".join(drawn).rstrip()


# -- show -----------------------------------------------------------------------------------------------------------


def show(
    revision: Revision,
    /,
    *,
    section: Annotated[str | None, Parameter(metavar="NAME", show_default=False)] = None,
    path: Annotated[str | None, Parameter(metavar="PATH", show_default=False)] = None,
    file: Annotated[str | None, Parameter(metavar="PATH", show_default=False)] = None,
    files: Flag = False,
    full: Flag = False,
    bookkeeping: Bookkeeping = False,
    json: Json = False,
    session: Given,
) -> int:
    """Show one checkpoint: its state as a tree, and what it changed.

    Parameters
    ----------
    revision
        NAME (its newest checkpoint) or NAME@REV.
    section
        Show only this section of the state.
    path
        Show only this place, such as state.messages[3].
    file
        Write one file of its workspace to standard output, as it is. The path is relative to the workspace.
    files
        List the files of its workspace.
    full
        Show everything: no limit on depth, items or length.
    """
    if section is not None and path is not None:
        raise BadOption("--section and --path exclude each other", hint="A path begins with its section.")
    if (file is not None or files) and (section is not None or path is not None or (files and file is not None)):
        raise BadOption("--file and --files show nothing else", hint="Ask twice.")
    parts = (section,) if section is not None else parse_path(path or "")
    with session.reading() as store:
        agent, checkpoint = looking(store, revision)
        hidden = [] if bookkeeping else checkpoint.bookkeeping
        if file is not None or files:
            return _files(session, agent, checkpoint, file, json=json)
        if json:
            return session.json("show", **_as_json(agent, checkpoint, parts, _stack(store, agent, checkpoint), hidden))
        if parts:
            _tree(session.out, checkpoint, parts, full=full)
        else:
            _header(session.out, agent, checkpoint, _stack(store, agent, checkpoint))
            _sections(session.out, checkpoint, hidden)
            _tree(session.out, checkpoint, parts, hidden, full=full)
            _changes(session.out, checkpoint, hidden, full=full)
            _changed_files(session.out, agent, checkpoint, full=full)
    return 0


def _files(session: Session, agent: Agent, checkpoint: Checkpoint, file: str | None, *, json: bool) -> int:
    """The files of a workspace: a list of them, or the content of one."""
    if file is not None and not json:
        session.out.data(agent.read_file(file, checkpoint))
        return 0
    from holdfast.process import inner_path  # few agents have one

    inner = inner_path(agent, file) if file is not None else None
    found = [one for one in agent.files(checkpoint) if inner is None or one.path == inner]
    if json:
        told = {} if file is None else {"content": agent.read_file(file, checkpoint).decode(errors="backslashreplace")}
        return session.json(
            "files", agent=agent.name, checkpoint=checkpoint.to_json(), files=[one.to_json() for one in found], **told
        )
    rows = [
        (f"{one.mode:04o}", size(one.size) if one.kind == "file" else one.kind, _path(one)) for one in found
    ]  # fmt: skip
    session.out.columns(("mode", "size", "path"), rows, right=(1,))
    session.out.note(count(len(found), "path"))
    return 0


def _path(one: FileInfo) -> str:
    mark = f"  ({one.mark})" if one.mark else ""
    return clean(f"{one.path} -> {one.target}" if one.target else one.path) + clean(mark)


def _value_at(checkpoint: Checkpoint, parts: tuple[Any, ...], hidden: Collection[str] = ()) -> Any:
    """A place in the state, as plain values. Only the section that is asked for is read."""
    state = checkpoint.state
    if not parts:
        return {name: holdfast.plain(state[name]) for name in state if name not in hidden}
    if parts[0] not in state:
        names = ", ".join(repr(name) for name in state)
        raise BadOption(f"the state has no section {parts[0]!r}", hint=f"Sections: {names or 'none'}.")
    return follow(holdfast.plain(state[parts[0]]), parts[1:], parts[:1])


def _stack(store: Store, agent: Agent, checkpoint: Checkpoint) -> list[str]:
    """What was going on when it was taken. The line of the branch that it was made on says so."""
    branch = checkpoint.branch if checkpoint.branch in agent.branches() else agent.branch_name
    return reader(store, agent.name, branch).stack_at(checkpoint)


def _header(out: Output, agent: Agent, checkpoint: Checkpoint, stack: list[str]) -> None:
    label = Text(clean(checkpoint.label), style="bold") if checkpoint.label else Text("no label", style="dim")
    out.say(Text(clean(agent.name), style="bold cyan"), f"  #{checkpoint.depth}  ", label)
    tags = ", ".join(clean(tag) for tag in checkpoint.tags)
    facts: list[tuple[str, Text | str]] = [
        ("id", Text(checkpoint.id, style="yellow")),
        ("state", Text(checkpoint.digest)),
        ("parent", checkpoint.parent_id[:12] or "none: the first"),
        ("time", f"{moment(checkpoint.time)} ({ago(checkpoint.time, now())})"),
        ("branch", clean(checkpoint.branch)),
        ("in", Text(" > ".join(map(clean, stack)), style="cyan") if stack else ""),
        ("tags", Text(tags, style="magenta") if tags else ""),
        ("kind", _kind(checkpoint)),
        ("validity", _validity(checkpoint)),
        ("files", "with those of its workspace: --files lists them" if checkpoint.has_files else ""),
        ("added", f"{count(checkpoint.operations, 'change')}, {size(checkpoint.size_bytes)}"),
        *_metadata(checkpoint.metadata),
    ]
    for name, text in facts:
        if text:
            out.say(Text(f"{name:<10} ", style="dim"), text)


def _kind(checkpoint: Checkpoint) -> str:
    if checkpoint.kind == "checkpoint":
        return ""
    return f"{checkpoint.kind} of {checkpoint.target_id[:12]}" if checkpoint.target_id else checkpoint.kind


def _validity(checkpoint: Checkpoint) -> Text:
    if checkpoint.validity == "good":
        return Text("good", style="green")
    reason = f": {clean(checkpoint.validity_reason)}" if checkpoint.validity_reason else ""
    return Text(f"{checkpoint.validity}{reason}", style="bold red")


def _metadata(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """What ran. Installed packages are counted; --json lists them."""
    code = metadata.get("code")
    versions = [f"{kind} {version}" for kind, version in code.items()] if isinstance(code, dict) else []
    ran = [str(metadata[key]) for key in ("program",) if metadata.get(key)]
    ran += [f"{key} {metadata[key]}" for key in ("python", "holdfast", "platform") if metadata.get(key)]
    packages = metadata.get("dependencies")
    if isinstance(packages, dict) and packages:
        ran.append(count(len(packages), "package"))
    config = metadata.get("config")
    if "lost" in metadata:
        ran.append("nobody knows: lost in a repair")
    return [
        ("code", clean(", ".join(versions))),
        ("config", clean(str(config)[:16]) if config else ""),
        ("written by", clean(", ".join(ran))),
        ("trace", clean(str(metadata.get("trace", "")))),
    ]


def _sections(out: Output, checkpoint: Checkpoint, hidden: Collection[str]) -> None:
    out.say()
    sections = checkpoint.sections
    if not sections:
        out.note("The state is empty.")
        return
    rows = [
        (Text(clean(name), style="cyan"), digest[:16], kind_of(_value_at(checkpoint, (name,))))
        for name, digest in sections.items()
        if name not in hidden
    ]
    if rows:
        out.columns(("section", "digest", "holds"), rows)
    if hidden:
        out.note(f"{count(len(hidden), 'section')} of bookkeeping hidden; --bookkeeping shows it.")


def _tree(
    out: Output, checkpoint: Checkpoint, parts: tuple[Any, ...], hidden: Collection[str] = (), *, full: bool
) -> None:
    value = _value_at(checkpoint, parts, hidden)
    if not parts:
        if not value:
            return
        out.say()
    tree = Tree(FULL if full else _PLACE if parts else Limits(), unicode=out.unicode)
    for line in tree.lines(holdfast.errors.format_path(parts), value):
        out.say(line, wrap=full or bool(parts))
    if tree.cut:
        where = "place is" if tree.cut == 1 else "places are"
        out.note(f"{tree.cut} {where} cut short; --full shows everything, --path one place.")


def _changes(out: Output, checkpoint: Checkpoint, hidden: Collection[str], *, full: bool) -> None:
    found = [change for change in checkpoint.changes() if not (hidden and change.bookkeeping)]
    if not found:
        return
    out.say()
    out.say(Text("Changed by this checkpoint", style="bold"))
    shown = found if full else found[:_CHANGES]
    for line in change_lines(shown):
        out.say(line)
    if len(found) > len(shown):
        out.note(f"… {count(len(found) - len(shown), 'more change')}; --full shows all.")


def _changed_files(out: Output, agent: Agent, checkpoint: Checkpoint, *, full: bool) -> None:
    """What it has of files that the checkpoint before it has not, if that carried files, too."""
    before = checkpoint.previous_id
    files = agent.diff(f"id:{before}", checkpoint).files if before and checkpoint.has_files else ()
    if not files:
        return
    out.say()
    out.say(Text("Files changed by this checkpoint", style="bold"))
    for line in file_lines(files if full else files[:_CHANGES], None if full else 0):
        out.say(line)
    if len(files) > _CHANGES and not full:
        out.note(f"… {count(len(files) - _CHANGES, 'more file')}; --full shows all.")


def _as_json(
    agent: Agent, checkpoint: Checkpoint, parts: tuple[Any, ...], stack: list[str], hidden: Collection[str]
) -> dict[str, Any]:
    data = {
        "agent": agent.name,
        "checkpoint": {
            **checkpoint.to_json(),
            "validity_reason": checkpoint.validity_reason,
            "metadata": as_json(checkpoint.metadata),
            "stack": stack,
        },
        "path": holdfast.errors.format_path(parts),
        "value": as_json(_value_at(checkpoint, parts, hidden)),
    }
    if not parts:
        shown = [change for change in checkpoint.changes() if not (hidden and change.bookkeeping)]
        data["changes"] = [change_json(change) for change in shown]
    return data


# -- diff -----------------------------------------------------------------------------------------------------------


def diff(
    old: Revision,
    new: Revision | None = None,
    /,
    *,
    exit_code: Flag = False,
    bookkeeping: Bookkeeping = False,
    json: Json = False,
    session: Given,
) -> int:
    """Show what differs between any two points of history.

    They may be checkpoints, branches, agents, runs, or a dump and a checkpoint. First the state, path by path, then
    effects that only one side has, then metadata. Above what is long stands a summary.

    Parameters
    ----------
    old
        The earlier side: NAME, NAME@REV, NAME@run:ID, or the file of a dump.
    new
        The later side. Without it, the newest checkpoint of the same agent; for a dump, the one that it stood at.
    exit_code
        End with 1 when there are differences.
    """
    with session.reading() as store:
        compared = store.diff(old, new)
        found = compared.state.everything if bookkeeping else compared.state.changes
        differs = bool(compared.state.everything or compared.state.files)
        if json:
            told = {**compared.to_json(), "changes": [change_json(change) for change in found]}
            session.json("diff", equal=not differs, **told)
        else:
            _compared(session.out, compared, found)
    return DIFFERENT if exit_code and differs else 0


def _compared(out: Output, compared: Comparison, found: list[Change]) -> None:
    files = compared.state.files
    lines = [*change_lines(found), *file_lines(files), *outside_lines(compared)]
    head = compared.summary() if len(lines) > _SUMMED else [f"--- {compared.old}", f"+++ {compared.new}"]
    for text in head:
        out.say(Text(clean(text), style={"---": "bold red", "+++": "bold green"}.get(text[:3], "")))
    if len(head) > len(("---", "+++")):
        out.say()
    for line in lines:
        out.say(line)
    if compared.note and len(lines) <= _SUMMED:
        out.note(clean(compared.note))
    changed = [count(len(found), "change")] if found else []
    changed += [count(len(files), "file")] if files else []
    out.note(", ".join(changed) or "no differences")
