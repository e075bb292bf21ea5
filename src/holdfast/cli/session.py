"""What one command has to work with: which store, and where its words go.

Owns how the command line opens a store. Always holds: only import, push, pull, backup, move, init and run create a
store (the demo makes its own); what a store holds is read as inert data, so no name in it leads to code, unless a
program was named to work with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

import holdfast
from holdfast import Agent, Checkpoint, Store
from holdfast.cli.complete import agents, revisions
from holdfast.cli.output import Output
from holdfast.errors import BadOption, UnknownRevision


@dataclass(frozen=True)
class Session:
    """One command's surroundings."""

    place: str | None = None
    """The store's directory, or its postgresql:// URL."""
    out: Output = field(default_factory=Output)
    err: Output = field(default_factory=lambda: Output(stderr=True))

    @contextmanager
    def reading(self) -> Iterator[Store]:
        with holdfast.open(self.place, create=False, readonly=True, inert=True) as store:
            yield store

    @contextmanager
    def writing(self) -> Iterator[Store]:
        with holdfast.open(self.place, create=False, inert=True) as store:
            yield store

    @contextmanager
    def filling(self) -> Iterator[Store]:
        """A store that takes in what can be read again from elsewhere, so that no checkpoint waits for the disk."""
        with holdfast.open(self.place, durability="batched") as store:
            yield store


# How the verbs declare what they share. ``Given`` is filled in by the program, never from the command line.
Given = Annotated[Session, Parameter(parse=False)]
Name = Annotated[str, Parameter(completer=agents)]
Revision = Annotated[str, Parameter(completer=revisions)]
Objects = Annotated[str | None, Parameter(metavar="PLACE", show_default=False)]
Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False)]
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Pattern = Annotated[str | None, Parameter(completer=agents, metavar="PATTERN", show_default=False)]
Limit = Annotated[int | None, Parameter(name=("--limit", "-n"), metavar="N", show_default=False)]
Wait = Annotated[float, Parameter(name="--wait", metavar="SECONDS", show_default=False)]


# About two screens. A program that asks for JSON gets everything, unless it says otherwise.
SHOWN = 50


def limited(limit: int | None, *, json: bool) -> int | None:
    """How many a list shows; None for all, which is asked for by 0."""
    if limit is not None and limit < 0:
        raise BadOption(f"--limit {limit}", hint="At least 1, or 0 for all.")
    return (limit if limit is not None else 0 if json else SHOWN) or None


def is_url(place: str) -> bool:
    return "://" in place


def absolute(place: str) -> str:
    """The same place, from wherever it is looked at. Links stay."""
    return place if is_url(place) else os.path.abspath(place)  # noqa: PTH100


def shown(place: str | None) -> str | None:
    """A place as it may be printed before it was opened: of a URL nothing that could be a password."""
    return place if place is None or not is_url(place) else f"{place.partition('://')[0]}://…"


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
