"""``holdfast branch``, ``tag``, ``rollback`` and ``undo``: lines of a history, names in it, and ways back.

Nothing here deletes a checkpoint: what a branch leaves behind stays in the history, and can be named again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast import Agent, Change, Checkpoint, FileChange, RollbackPlan, Store
from holdfast.cli.complete import refs
from holdfast.cli.effects import call_of
from holdfast.cli.exits import ATTENTION
from holdfast.cli.output import Output
from holdfast.cli.programs import Load, load, writing
from holdfast.cli.session import (
    ASKS,
    Bookkeeping,
    Consent,
    Flag,
    Given,
    Json,
    Limit,
    OnBranch,
    Pattern,
    Ref,
    Session,
    Wait,
    is_pattern,
    limited,
    on_branch,
    reader,
    writer,
)
from holdfast.cli.text import ago, clean, count, now
from holdfast.cli.values import change_lines, file_lines, named
from holdfast.errors import BadOption, RollbackBlocked, command
from holdfast.schemas import change_json, rollback_json, unmoved

_WAY_OUT = (
    "Load the program that can undo it (--load), decide what is in doubt (holdfast effects resolve), or leave it"
    " standing (--accept NAME)."
)
# What a person reads before answering.
_SHOWN = 12


# -- branches and tags ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What branches and tags have in common: each is a name for a checkpoint."""

    word: str
    plural: str
    key: str  # of the checkpoint, in JSON
    columns: tuple[str, ...]
    style: str
    verb: str

    def named(self, store: Store, agent: str) -> dict[str, Checkpoint | None]:
        """All of an agent."""
        handle = reader(store, agent)
        if self is _TAG:
            return dict(handle.tags())
        return {branch: reader(store, agent, branch).head for branch in handle.branches()}


_BRANCH = _Kind("branch", "branches", "head", ("head", "depth", "updated", "label"), "bold cyan", "starts at")
_TAG = _Kind("tag", "tags", "checkpoint", ("checkpoint", "depth", "made", "label"), "bold magenta", "names")


def branch(
    agent: Pattern = None,
    new: str | None = None,
    /,
    *,
    at: Ref = None,
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """List branches, or start a new one.

    Works while another process writes the agent.

    Parameters
    ----------
    agent
        NAME, or NAME@REV to start the branch there; to list, also a pattern: 'trip-*'. [default: list all]
    new
        The new branch's name.
    at
        Where it starts: a revision of this agent. [default: the newest checkpoint of main]
    """
    if agent is None or new is None:
        if at is not None:
            raise BadOption("--at needs the new branch's name", hint="holdfast branch NAME NEW --at REV")
        return _list(session, _BRANCH, agent, limit, json=json)
    return _set(session, _BRANCH, agent, new, at, json=json)


def tag(
    agent: Pattern = None,
    tag: Annotated[str | None, Parameter(completer=refs)] = None,
    /,
    *,
    at: Ref = None,
    delete: Flag = False,
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """List tags, set one, or remove one.

    A tag that exists moves. Works while another process writes the agent.

    Parameters
    ----------
    agent
        NAME, or NAME@REV to tag that checkpoint; to list, also a pattern: 'trip-*'. [default: list all]
    tag
        The tag's name.
    at
        What it names: a revision of this agent. [default: the newest checkpoint of main]
    delete
        Remove the tag. The checkpoint stays.
    """
    if agent is None or tag is None:
        if delete or at is not None:
            raise BadOption("--delete and --at need a tag's name", hint="holdfast tag NAME TAG")
        return _list(session, _TAG, agent, limit, json=json)
    if not delete:
        return _set(session, _TAG, agent, tag, at, json=json)
    if at is not None:
        raise BadOption("--delete and --at exclude each other", hint="A tag is removed wherever it is.")
    with session.writing() as store:
        name = store.resolve(agent)[0]
        before = reader(store, name).tags().get(tag)
        store.untag(name, tag)
        if json:
            return session.json("tag", agent=name, tag=tag, checkpoint=None)
        if before is not None:
            title = Text(clean(tag), style=_TAG.style)
            session.out.say("Tag ", title, f" of {clean(name)} is gone. It named ", named(before), ".")
    return 0


def _set(session: Session, kind: _Kind, agent: str, ref: str, at: str | None, *, json: bool) -> int:
    """Give a checkpoint a name. The revision may come with the agent's name or by ``--at``, not both."""
    with session.writing() as store:
        name, revision = store.resolve(agent)
        if revision and at is not None:
            raise BadOption(f"two revisions: @{revision} and --at {at}", hint="Give one of them.")
        do = store.branch if kind is _BRANCH else store.tag
        do(name, ref, at if at is not None else revision or None)
        point = kind.named(store, name)[ref]
        if json:
            about = {kind.word: ref, kind.key: point.to_json() if point else None}
            return session.json(kind.word, agent=name, **about)
        where = named(point) if point is not None else "nothing yet"
        title = Text(clean(ref), style=kind.style)
        session.out.say(f"{kind.word.capitalize()} ", title, f" of {clean(name)} {kind.verb} ", where, ".")
    return 0


def _list(session: Session, kind: _Kind, text: str | None, limit: int | None, *, json: bool) -> int:
    """The branches or tags of one agent, or of those that a pattern chooses."""
    with session.reading() as store:
        if text is not None and not is_pattern(text):
            only, names, more = store.resolve(text)[0], [store.resolve(text)[0]], 0
        else:
            page = store.agents(text, limit=limited(limit, json=json), sort="name")
            only, names, more = None, [info.name for info in page], page.more
        found = [(name, *one) for name in names for one in kind.named(store, name).items()]
        if json:
            entries = [
                {"agent": name, "name": ref, kind.key: point.to_json() if point else None} for name, ref, point in found
            ]
            return session.json(kind.plural, agent=only, more=more, **{kind.plural: entries})
        if not found:
            whose = f"{clean(only)} has" if only is not None else "There are"
            session.out.say(f"{whose} no {kind.plural}.")
        else:
            titles = (*(() if only else ("agent",)), kind.word, *kind.columns)
            rows: list[list[Text | str]] = [
                [
                    *([] if only else [Text(clean(name), style="bold cyan")]),
                    Text(clean(ref), style=kind.style),
                    *_row(point),
                ]
                for name, ref, point in found
            ]
            session.out.columns(titles, rows, right=(titles.index("depth"),))
        session.out.left_out(more, "agent", ", a pattern some")
    return 0


def _row(point: Checkpoint | None) -> list[Text | str]:
    if point is None:
        return ["", "", "", Text("no checkpoint yet", style="dim")]
    return [Text(point.short_id, style="yellow"), f"#{point.depth}", ago(point.time, now()), clean(point.label)]


# -- undo -----------------------------------------------------------------------------------------------------------


def undo(agent: OnBranch, /, *, redo: Flag = False, wait: Wait = 0.0, json: Json = False, session: Given) -> int:
    """Reverse the last checkpoint that is not yet undone.

    Again undoes the one before. This appends a new checkpoint; the history keeps both.

    Parameters
    ----------
    redo
        Do again what the last undo reversed. It works until something else is saved after the undo.
    """
    with session.writing() as store, writer(store, agent, wait) as (name, branch, handle), handle:
        made = handle.redo() if redo else handle.undo()
        target = handle.at(f"id:{made.target_id}")
        changes = made.changes()
        if json:
            points = {"checkpoint": made.to_json(), "target": target.to_json()}
            said = [change_json(change) for change in changes]
            return session.json("undo", agent=name, branch=branch, **points, changes=said)
        session.out.say(
            Text("Done again: " if redo else "Undone: ", style="bold green"), named(target),
            f", in the new checkpoint #{made.depth} ", Text(made.short_id, style="yellow"), ".",
        )  # fmt: skip
        for line in change_lines(changes):
            session.out.say("  ", line)
        changed = handle.diff(f"id:{made.parent_id}", made).files if made.has_files else ()
        if changed:
            _say_unmoved(session.out, handle, changed)
        files = list(file_lines(changed, 0))
        for line in files[:_SHOWN]:
            session.out.say("  ", line)
        if len(files) > _SHOWN:
            session.out.note(f"  … and {count(len(files) - _SHOWN, 'more file')}")
    return 0


# -- rollback -------------------------------------------------------------------------------------------------------


def rollback(
    agent: OnBranch,
    /,
    *,
    to: Annotated[str, Parameter(completer=refs, metavar="REV")],
    accept: Annotated[tuple[str, ...], Parameter(metavar="NAME", negative="", show_default=False)] = (),
    bookkeeping: Bookkeeping = False,
    load: Load = (),
    wait: Wait = 0.0,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Move a branch back, and undo what the agent did outside since.

    Nothing is deleted: what came after stays in the history (`holdfast log NAME --all`), and `holdfast branch` gives
    it a name again. Shows first what will be undone and left behind, then asks. Ends with 7 when an effect stands in
    the way. A dry run works while another process writes the agent.

    Parameters
    ----------
    to
        Where to go back to: a revision of this agent.
    accept
        Leave these effects standing though they cannot be undone: a tool's name, or an effect's id.
    load
        A module or file.py with the tools that undo. Nothing is imported unless it is named here.
    """
    with ExitStack() as held:
        handle = _handle(held, session, agent, load, wait, writes=consent.possible)
        plan = handle.plan_rollback(to, accept=accept)
        changes = plan.diff.everything if bookkeeping else plan.diff.changes
        if not consent.json:
            _show(session.out, handle, plan, changes)
        if plan.blocked and not consent.dry_run:
            said = count(len(plan.blocked), "effect stands", "effects stand")
            raise RollbackBlocked(f"{said} in the way; nothing was changed")
        if plan.blocked and not consent.json:
            session.out.say(_WAY_OUT)
        done = consent.given(session, "Roll back?")
        before = handle.head
        head = plan.apply() if done else None
        if consent.json:
            session.json("rollback", **rollback_json(handle, plan, changes, done=done))
        elif head is not None:
            _done(session.out, handle, head, plan, before)
    return ATTENTION if plan.blocked else consent.code(done=done)


def _handle(
    held: ExitStack, session: Session, agent: str, programs: Sequence[str], wait_s: float, *, writes: bool
) -> Agent:
    """It is not the current agent: a rollback that was interrupted is to be finished as it is asked for here."""
    if writes:
        store = held.enter_context(writing(session, programs))
        return held.enter_context(writer(store, agent, wait_s))[2]
    load(programs)
    store = held.enter_context(session.reading())
    return reader(store, *on_branch(store, agent))


def _show(out: Output, handle: Agent, plan: RollbackPlan, changes: Sequence[Change]) -> None:
    target = plan.target
    out.say(
        Text(f"{clean(handle.name)}@{clean(handle.branch_name)}", style="bold cyan"),
        " goes back to ",
        named(target),
        f" ({ago(target.time, now())}).",
    )
    if plan.abandons:
        out.say(f"{count(len(plan.abandons), 'checkpoint')} will be left behind, not deleted:")
        for checkpoint in plan.abandons[:_SHOWN]:
            out.say(
                "  ", Text(checkpoint.short_id, style="yellow"), f"  #{checkpoint.depth}",
                Text(f"  {ago(checkpoint.time, now())}", style="dim"), f"  {clean(checkpoint.label)}",
            )  # fmt: skip
        if len(plan.abandons) > _SHOWN:
            out.note(f"  … and {len(plan.abandons) - _SHOWN:,} more")
    if changes:
        out.say("The state changes like this:")
        changed = list(change_lines(changes))
        for line in changed[:_SHOWN]:
            out.say("  ", line)
        if len(changed) > _SHOWN:
            out.note(f"  … and {count(len(changed) - _SHOWN, 'more line')}")
    else:
        out.say("Only bookkeeping changes." if plan.diff.everything else "The state stays as it is.")
    if files := plan.diff.files:
        changing = [one for one in files if one.kind != "stays"]
        if not _say_unmoved(out, handle, files):
            out.say(f"{count(len(changing), 'file')} of {clean(str(handle.workspace or 'its workspace'))} change:")
        for line in list(file_lines(files, 0))[:_SHOWN]:
            out.say("  ", line)
        if len(files) > _SHOWN:
            out.note(f"  … and {count(len(files) - _SHOWN, 'more file')}")
    _show_effects(out, handle, plan)


def _say_unmoved(out: Output, handle: Agent, files: Sequence[FileChange]) -> bool:
    """Say that no file moves, if that is so, and how it would."""
    if why := unmoved(handle):
        said = f"{count(len(files), 'file')} of the checkpoint differ, and no file is moved: {why}."
        out.say(Text(clean(said), style="bold yellow"))
        way = f"store.agent({handle.name!r}, workspace=DIRECTORY)"
        out.note(f"  For its files, open it with a directory: {clean(way)}.")
    return bool(why)


def _show_effects(out: Output, handle: Agent, plan: RollbackPlan) -> None:
    """What happens outside. All of it: who answers has to know what is undone."""
    for title, style, found in (
        ("Will be undone outside, in this order:", "yellow", plan.undo),
        ("Cannot be undone, and stands in the way:", "bold red", plan.blocked),
        ("Stays as it is outside:", "", plan.accepted),
        ("Was undone before:", "dim", plan.undone),
    ):
        if found:
            out.say(Text(title, style=style))
            for number, one in enumerate(found, 1):
                whose = f" of {clean(one.agent)}" if one.agent != handle.name else ""
                line = Text(f"{number:>3}. ", style="dim").append(one.effect.id, style="yellow")
                line.append(f" {call_of(one.effect)}{whose}")
                used = f"also known to {', '.join(one.used_by)}" if one.used_by else ""
                said = "; ".join(part for part in (one.why, used) if part)
                out.say(line, Text(f": {clean(said)}" if said else "", style="dim"))
    if plan.harmless:
        out.note(f"{count(len(plan.harmless), 'call')} changed nothing outside.")
    for name, checkpoint in plan.children:
        out.say("Child ", Text(clean(name), style="bold cyan"), " goes back to ", named(checkpoint), ".")


def _done(out: Output, handle: Agent, head: Checkpoint, plan: RollbackPlan, before: Checkpoint | None) -> None:
    name, branch = handle.name, handle.branch_name
    undone = f" {count(len(plan.undo), 'effect')} undone." if plan.undo else ""
    out.say(
        Text("Done. ", style="bold green"), f"{clean(name)}@{clean(branch)} is at ",
        Text(head.short_id, style="yellow"), f" #{head.depth}, state {head.digest[:16]}.{undone}",
    )  # fmt: skip
    newest = handle.log(1, all=True)[0]  # what was not saved yet is in a checkpoint that was made first
    saved = newest.label.startswith("before rollback to ") and before is not None and newest.parent_id == before.id
    if plan.diff.files and unmoved(handle):
        out.say(Text("Only the state went back: no file was moved.", style="yellow"))
    if saved:
        out.say("What was not saved yet is in ", named(newest), ".")
    if plan.abandons or saved:
        where = name if branch == "main" else f"{name}@{branch}"
        to = newest if saved else plan.abandons[0]
        back = command("rollback", where, "--to", f"id:{to.short_id}")
        out.command("To go forward again: ", back)
