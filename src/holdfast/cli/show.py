"""``holdfast show``: one checkpoint, its state as a tree, and what it changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Agent, Checkpoint, Store
from holdfast.cli.changes import change_json, lines
from holdfast.cli.output import Output
from holdfast.cli.path import follow, parse
from holdfast.cli.session import Flag, Given, Json, Revision, looking, reader
from holdfast.cli.text import ago, clean, count, moment, now, size
from holdfast.cli.values import FULL, Limits, Tree, as_json, kind_of
from holdfast.errors import BadOption

SCHEMA = "holdfast.show/1"
# Changes that fit under a tree without pushing it off the screen.
_CHANGES = 12
# Who asks for one place wants to see more of it.
_PLACE = Limits(depth=8, items=40, characters=4_000)


def show(
    revision: Revision,
    /,
    *,
    section: Annotated[str | None, Parameter(metavar="NAME", show_default=False)] = None,
    path: Annotated[str | None, Parameter(metavar="PATH", show_default=False)] = None,
    full: Flag = False,
    bookkeeping: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Show one checkpoint: what it is, its sections, its state as a tree, and what it changed.

    Parameters
    ----------
    revision
        NAME (its newest checkpoint) or NAME@REV.
    section
        Show only this section of the state.
    path
        Show only this place, such as state.messages[3].
    full
        Show everything: no limit on depth, items or length.
    bookkeeping
        Show also what integrations such as LangGraph's keep for themselves: sections named __like_this__.
    json
        Print JSON (schema holdfast.show/1).
    """
    if section is not None and path is not None:
        raise BadOption("--section and --path exclude each other", hint="A path begins with its section.")
    parts = (section,) if section is not None else parse(path or "")
    with session.reading() as store:
        agent, checkpoint = looking(store, revision)
        hidden = [] if bookkeeping else checkpoint.bookkeeping
        if json:
            session.out.json(_as_json(agent, checkpoint, parts, _stack(store, agent, checkpoint), hidden))
        elif parts:
            _tree(session.out, checkpoint, parts, full=full)
        else:
            _header(session.out, agent, checkpoint, _stack(store, agent, checkpoint))
            _sections(session.out, checkpoint, hidden)
            _tree(session.out, checkpoint, parts, hidden, full=full)
            _changes(session.out, checkpoint, hidden, full=full)
    return 0


def value_at(checkpoint: Checkpoint, parts: tuple[Any, ...], hidden: Collection[str] = ()) -> Any:
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
        out.say(Text("The state is empty.", style="dim"))
        return
    rows = [
        (Text(clean(name), style="cyan"), digest[:16], kind_of(value_at(checkpoint, (name,))))
        for name, digest in sections.items()
        if name not in hidden
    ]
    if rows:
        out.columns(("section", "digest", "holds"), rows)
    if hidden:
        out.say(Text(f"{count(len(hidden), 'section')} of bookkeeping hidden; --bookkeeping shows it.", style="dim"))


def _tree(
    out: Output, checkpoint: Checkpoint, parts: tuple[Any, ...], hidden: Collection[str] = (), *, full: bool
) -> None:
    value = value_at(checkpoint, parts, hidden)
    if not parts:
        if not value:
            return
        out.say()
    tree = Tree(FULL if full else _PLACE if parts else Limits(), unicode=out.unicode)
    for line in tree.lines(holdfast.errors.format_path(parts), value):
        out.say(line, wrap=full or bool(parts))
    if tree.cut:
        where = "place is" if tree.cut == 1 else "places are"
        out.say(Text(f"{tree.cut} {where} cut short; --full shows everything, --path one place.", style="dim"))


def _changes(out: Output, checkpoint: Checkpoint, hidden: Collection[str], *, full: bool) -> None:
    found = [change for change in checkpoint.changes() if not (hidden and change.bookkeeping)]
    if not found:
        return
    out.say()
    out.say(Text("Changed by this checkpoint", style="bold"))
    shown = found if full else found[:_CHANGES]
    for line in lines(shown):
        out.say(line, wrap=True)
    if len(found) > len(shown):
        out.say(Text(f"… {count(len(found) - len(shown), 'more change')}; --full shows all.", style="dim"))


def _as_json(
    agent: Agent, checkpoint: Checkpoint, parts: tuple[Any, ...], stack: list[str], hidden: Collection[str]
) -> dict[str, Any]:
    data = {
        "schema": SCHEMA,
        "agent": agent.name,
        "checkpoint": {
            **checkpoint.to_json(),
            "validity_reason": checkpoint.validity_reason,
            "metadata": as_json(checkpoint.metadata),
            "stack": stack,
        },
        "path": holdfast.errors.format_path(parts),
        "value": as_json(value_at(checkpoint, parts, hidden)),
    }
    if not parts:
        shown = [change for change in checkpoint.changes() if not (hidden and change.bookkeeping)]
        data["changes"] = [change_json(change) for change in shown]
    return data
