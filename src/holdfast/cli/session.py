"""What one command has to work with: which store, where its words go, and leave to change something for good.

Owns how the command line opens a store, and what verbs share: their common options, asking a person, bars. Always
holds: only import, push, pull, backup, move, init, run and repair create a store (the demo makes its own); what a store
holds is read as inert data, so no name in it leads to code, unless a program was named to work with it; what destroys
something or may do it twice is done only with ``--yes``, or when a person at the terminal has seen it and said yes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Agent, Checkpoint, Store
from holdfast.cli.complete import agents, refs, revisions
from holdfast.cli.exits import NOT_CONFIRMED
from holdfast.cli.output import Output
from holdfast.cli.text import clean, is_url, shorten
from holdfast.errors import BadOption, UnknownRevision, command

if TYPE_CHECKING:
    from holdfast import WorkspaceInfo  # the room of files, which few verbs need


def half_way(one: WorkspaceInfo) -> str:
    """What to say of a directory in which files are still to be put back."""
    where = one.agent if one.branch == "main" else f"{one.agent}@{one.branch}"
    finish = command("rollback", where, "--to", f"id:{one.target[:12]}")
    return (
        f"{one.path} on {one.host} is half-way between two checkpoints: files of {where} are still to be put back."
        f" Whoever opens the agent there finishes that, for example `{finish}`; where it was moved to, with workspace=."
    )


@dataclass(frozen=True)
class Session:
    """One command's surroundings."""

    place: str | None = None
    """The store's directory, or its postgresql:// URL."""
    out: Output = field(default_factory=Output)
    err: Output = field(default_factory=lambda: Output(stderr=True))

    def reading(self) -> Store:
        return self.opened(self.place, create=False, readonly=True, inert=True)

    def writing(self) -> Store:
        return self.opened(self.place, create=False, inert=True)

    def working(self, types: Sequence[str]) -> Store:
        """Not inert: what is stored is to be worked with, by a program that was named."""
        return self.opened(self.place, types=tuple(types))

    def opened(self, place: str | None, **options: Any) -> Store:
        """As ``holdfast.open``: all verbs open stores by this."""
        return self._told(holdfast.open(place, **options))

    def _told(self, store: Store) -> Store:
        """Every verb says it when a directory is half-way between two checkpoints, or a thaw was cut short."""
        found = [half_way(one) for one in store.workspaces() if one.half_way]
        for said in (*found, *map(str, store.half_thawed())):
            self.err.say(Text(f"holdfast: {clean(said)}", style="bold yellow"))
        return store

    def json(self, schema: str, **data: Any) -> int:
        """Print one document, of the schema ``holdfast.NAME/1``."""
        self.out.json({"schema": f"holdfast.{schema}/1", **data})
        return 0


def option(help: str | None = None, metavar: str | None = None, **more: Any) -> Parameter:
    """A parameter that several verbs have: without ``--no-…``, and without a default that is shown.

    Without ``help``, each verb's docstring says what it is.
    """
    given: dict[str, Any] = {"help": help, "metavar": metavar, **more}
    return Parameter(
        negative="", show_default=False, **{name: value for name, value in given.items() if value is not None}
    )


# What verbs share. ``Given`` is filled in by the program, never from the command line.
Given = Annotated[Session, Parameter(parse=False)]
Name = Annotated[str, option("The agent's NAME.", completer=agents)]
OnBranch = Annotated[str, option("The agent's NAME, or NAME@BRANCH. [default branch: main]", completer=agents)]
Agents = Annotated[str, option("Only these agents. [default: all]", completer=agents)]
Revision = Annotated[str, option(completer=revisions)]
Ref = Annotated[str | None, option(metavar="REV", completer=refs)]
Pattern = Annotated[str | None, option(metavar="PATTERN", completer=agents)]
Flag = Annotated[bool, option()]
Json = Annotated[bool, option("Print JSON, for programs.", name="--json")]
_LIMIT = "Show at most this many; 0 shows all. [default: 50; all with --json]"
Limit = Annotated[int | None, option(_LIMIT, "N", name=("--limit", "-n"))]
_WAIT = "Wait up to this many seconds for a process that writes the branch."
Wait = Annotated[float, option(_WAIT, "SECONDS", name="--wait")]
DryRun = Annotated[bool, option("Show what would happen, and change nothing.")]
_BOOKKEEPING = "Show also what integrations such as LangGraph's keep for themselves: sections named `__like_this__`."
Bookkeeping = Annotated[bool, option(_BOOKKEEPING)]
Types = Annotated[tuple[str, ...], option("Modules whose classes may be stored and loaded.", "MODULE")]


@Parameter(name="*")
@dataclass(frozen=True)
class Consent:
    """Leave to do what cannot be taken back: the options of a verb that shows what would happen, and asks."""

    dry_run: DryRun = False
    yes: Annotated[bool, option("Do it without asking.")] = False
    json: Json = False

    @property
    def possible(self) -> bool:
        """Whether it may come to doing it. If not, the store need not be opened for writing."""
        return not self.dry_run and (self.yes or (not self.json and sys.stdin.isatty()))

    def opened(self, session: Session) -> Store:
        """The store, for reading where nothing can come of it."""
        return session.writing() if self.possible else session.reading()

    def given(self, session: Session, question: str) -> bool:
        """Whether it is to be done. What would happen has been shown before, unless it is said in JSON."""
        if self.possible and (self.yes or session.out.confirmed(question)):
            return True
        if self.dry_run:
            if not self.json:
                session.out.say(Text("Dry run: nothing was changed.", style="bold"))
        elif self.possible:
            session.err.say("Nothing was changed.")
        else:
            session.err.say(Text("holdfast: nothing was changed, because nobody can be asked here", style="bold red"))
            session.err.say("Add --yes to do it, or --dry-run to only look.")
        return False

    def code(self, *, done: bool) -> int:
        """What the command ends with."""
        return 0 if done or self.dry_run else NOT_CONFIRMED


ASKS = Consent()


# About two screens. A program that asks for JSON gets everything, unless it says otherwise.
SHOWN = 50


def limited(limit: int | None, *, json: bool) -> int | None:
    """How many a list shows; None for all, which is asked for by 0."""
    if limit is not None and limit < 0:
        raise BadOption(f"--limit {limit}", hint="At least 1, or 0 for all.")
    return (limit if limit is not None else 0 if json else SHOWN) or None


def absolute(place: str) -> str:
    """The same place, from wherever it is looked at. Links stay."""
    return place if is_url(place) else os.path.abspath(place)  # noqa: PTH100


def shown(place: str | None) -> str | None:
    """A place as it may be printed before it was opened: of a URL nothing that could be a password."""
    return place if place is None or not is_url(place) else f"{place.partition(':')[0]}://…"


def looking(store: Store, revision: str) -> tuple[Agent, Checkpoint]:
    """A reading handle and the checkpoint that ``NAME`` or ``NAME@REV`` names."""
    name, rev = store.resolve(revision)
    agent = reader(store, name)
    return agent, agent.at(rev)


def reader(store: Store, name: str, branch: str = "main") -> Agent:
    return store.agent(name, branch=branch, create=False, readonly=True)


@contextmanager
def writer(store: Store, revision: str, wait_s: float) -> Iterator[tuple[str, str, Agent]]:
    """The agent and the branch that ``NAME`` or ``NAME@BRANCH`` names, and a handle that writes it.

    It is not the current agent: nothing is done for it but what is asked for.
    """
    name, branch = on_branch(store, revision)
    with closing(store.agent(name, branch=branch, create=False, wait_s=wait_s)) as handle:
        yield name, branch, handle


def is_pattern(text: str) -> bool:
    """Whether a text stands for the agents whose names are like it. An agent that is called just so is one of them."""
    return any(sign in text for sign in "*?[")


def some_of(store: Store, text: str | None) -> tuple[str | None, str | None]:
    """The agents that PATTERN, NAME or NAME@BRANCH chooses, and the branch, if one is named."""
    if text is None or is_pattern(text):
        return text, None
    name, branch = store.resolve(text)
    return name, on_branch(store, text)[1] if branch else None


def on_branch(store: Store, revision: str) -> tuple[str, str]:
    """The agent and the branch that ``NAME`` or ``NAME@BRANCH`` names."""
    name, branch = store.resolve(revision)
    known = list(reader(store, name).branches())
    if branch and branch not in known:
        raise UnknownRevision(
            f"{branch!r} is not a branch of {name!r}",
            hint=f"This verb works on a branch: {', '.join(known)}.",
        )
    return name, branch or "main"


Progress: TypeAlias = Callable[[str, int, int], None] | None


@contextmanager
def bars(err: Output) -> Iterator[Progress]:
    """A bar, on a terminal, for what is counted now: call what is given with its name, how many, of how many."""
    if not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    shown = Bars(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )
    with shown:
        task = shown.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            shown.update(task, description=clean(shorten(what, err.width // 2)), completed=done, total=total)

        yield report
