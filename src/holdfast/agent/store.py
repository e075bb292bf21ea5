"""The store as user code sees it: agents by name, and what concerns all of them.

Owns names, and the one-handle-per-branch rule of a process. Bytes are the catalog's business, history the agent's.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, Self

from holdfast.agent import fleet, history, metadata, places, pointers, unsaved, watchers
from holdfast.agent.agent import Agent
from holdfast.agent.background import Policies, Tending
from holdfast.agent.checkpoint import Checkpoint, table
from holdfast.agent.fleet import AgentInfo, Page, is_arriving, still_arriving, whole
from holdfast.agent.graph import Graph, find
from holdfast.agent.names import MAIN, check_name, check_new, check_text
from holdfast.agent.when import DEFAULT, When, find_when, folders_of
from holdfast.codec.document import Document
from holdfast.codec.state import Reader, State
from holdfast.codec.types import REGISTRY, Registry
from holdfast.errors import (
    BadOption,
    Damaged,
    DiskFull,
    Forgotten,
    HoldfastError,
    ReadOnly,
    UnknownAgent,
    UnknownRevision,
)
from holdfast.store import keys
from holdfast.store.catalog import Progress, View, quietly
from holdfast.store.changes import ACTING, Change, NewRecord
from holdfast.store.database import MOVED, OBJECTS, Database, open_database
from holdfast.store.engine import Lease, Refused
from holdfast.store.keys import Key
from holdfast.store.leases import FileLeases
from holdfast.store.rows import Agent as AgentRow
from holdfast.store.rows import Body, Branch, End, Point
from holdfast.store.tables import FORMAT_VERSION
from holdfast.text import is_url

if TYPE_CHECKING:
    from holdfast.agent.cost import Costs
    from holdfast.agent.letting import Outlived
    from holdfast.agent.move import RestoreReport
    from holdfast.agent.policy import Policy
    from holdfast.agent.removal import Removal
    from holdfast.agent.retention import Needs, RetentionReport
    from holdfast.agent.tiering import Tiering
    from holdfast.agent.transfer import TransferReport
    from holdfast.agent.verify import Problem, VerifyReport

DURABILITIES = ("commit", "batched")
log = logging.getLogger("holdfast.agent")
_IN_NOTEBOOK = 50
"""Agents that a notebook shows of a store."""


class Store:
    """A place where agents' states are kept. Open one with ``holdfast.open()``."""

    _handle: ClassVar[type[Agent]] = Agent
    """What ``agent()`` gives."""

    def __init__(self, place: str, db: Database, options: tuple[Any, ...]) -> None:
        self.place = db.place
        """Where it is: the directory, or the URL without its password."""
        self._key = place
        self._db = db
        self._folders = folders_of(self.place, is_directory=not is_url(self.place))
        self._options = options
        self._readonly, self._durability, self._paranoid, self._inert = options
        self._batched = self._durability == "batched"
        self._registry: Registry = REGISTRY.child()
        self._description = metadata.Description(self._registry, None, None)
        self._handles: dict[int, Agent] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._policies = Policies(self)
        self._tending = Tending(self, self._policies)
        db.before_close.append(self._tending.stop)

    @classmethod
    def opened(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        readonly: bool = False,
        durability: Literal["commit", "batched"] = "commit",
        types: Sequence[Any] = (),
        paranoid: bool = False,
        recover: bool = False,
        trust_older: bool = False,
        inert: bool = False,
        key: Key = None,
        objects: str | None = None,
    ) -> Self:
        """Open a store, making it first if there is none.

        - ``path``: its directory, or ``postgresql://user:password@host/database?schema=NAME`` for one on a server.
          Without it: $HOLDFAST_STORE, else .holdfast here or in the nearest directory above, else a new ./.holdfast.
        - ``create``: with False, raise ``NotAStore`` where there is none.
        - ``readonly``: every handle only reads.
        - ``durability``: ``"commit"``: a checkpoint is on the disk when it returns. ``"batched"``: several are
          written together.
        - ``types``: modules, their dotted names, or classes: what may be stored and loaded.
        - ``paranoid``: every checkpoint encodes everything again and compares; for tests.
        - ``recover``: accept that acknowledged commits are missing from a damaged catalog, and continue with what is
          there, in doubt about what agents did outside if records are among them.
        - ``trust_older``: accept that the whole store is older than it was when it was last used here
          (``StoreWentBack``): a backup was put back.
        - ``inert``: read unknown types as ``Record``.
        - ``key``: opens an encrypted store, and makes a new one encrypted: a passphrase, 64 hexadecimal digits or 32
          bytes. Without it, $HOLDFAST_KEY, $HOLDFAST_KEY_FILE or $HOLDFAST_KEY_COMMAND; with False none of them.
        - ``objects``: where a new store keeps values of 256 KiB and more: a directory, ``s3://bucket/prefix``,
          ``gs://...`` or ``az://...``. The store remembers it; another value raises ``BadOption``.

        Opening the same path twice in one process gives the same ``Store``; with other options it raises ``BadOption``.
        """
        if durability not in DURABILITIES:
            raise BadOption(f"durability={durability!r}", hint=f"Use one of {', '.join(map(repr, DURABILITIES))}.")
        place = places.place_of(path)
        sys.audit("holdfast.open", place, readonly)
        opening = partial(
            open_database,
            place,
            create=create and not readonly,
            readonly=readonly,
            accept_loss=recover,
            trust_older=trust_older,
            objects=objects,
        )
        return places.opened(cls, place, (readonly, durability, paranoid, inert), types, key, opening)

    @property
    def path(self) -> Path:
        """The store's directory."""
        if is_url(self.place):
            raise BadOption(f"{self.place} is no directory", hint="Use store.place.")
        return Path(self.place)

    # -- agents ---------------------------------------------------------------------------------------

    def agent(
        self,
        name: str,
        *,
        branch: str = MAIN,
        create: bool = True,
        readonly: bool = False,
        wait_s: float = 0.0,
        takeover: bool = False,
        recover: bool = False,
        config: Any = None,
        when: When | None = DEFAULT,
    ) -> Agent:
        """The agent of that name, its last state already there."""
        self._check_open()
        check_name(name, "an agent")
        if when is not None and not isinstance(when, When):
            raise BadOption(f"when={when!r}", hint="Use holdfast.When(every_s=30), or None: only when you say so.")
        readonly = readonly or self._readonly
        with self._lock:
            view = self._db.view
            row = view.agent(name)
            if row is None:
                if not create or readonly:
                    raise self._unknown(name)
                if when is DEFAULT:
                    self.when(name)  # nothing is made where the file is wrong
                row = self._add_agent(name)
            branch_row = view.branch(row.a, branch)
            if branch_row is None:
                known = ", ".join(other.name for other in view.branches(row.a))
                raise UnknownRevision(f"agent {name!r} has no branch {branch!r}", hint=f"Branches: {known}")
            if is_arriving([branch_row]):
                raise still_arriving(f"branch {branch!r} of {name!r}")
            if readonly:
                return self._opened(row, branch_row, None, None, None)
            known_handle = self._handles.get(branch_row.b)
            if known_handle is not None:
                if not known_handle.closed and not (recover and known_handle.damaged):
                    if when is not DEFAULT and when != known_handle.when:
                        raise BadOption(
                            f"{name!r} is open in this process already, with another `when`",
                            hint="Close that handle first, or open it with the same one.",
                        )
                    return known_handle
                if not known_handle.closed and known_handle.dirty:
                    raise BadOption(
                        f"the handle on {name!r} has changes that are not saved",
                        hint="Recovering begins with the newest checkpoint that can be read: close() the handle first.",
                    )
                known_handle.close()  # also one that an interrupt left half closed
            lost, damaged = "", branch_row.id
            if recover:
                from holdfast.agent import recovery

                with watchers.watching("recovery", name, branch_row.name) as watch:
                    branch_row, lost = recovery.recover(self, name, row, branch_row)
                    watch.tell(lost=lost)
                known_handle = self._handles.get(branch_row.b)
                if known_handle is not None and not known_handle.closed:
                    return known_handle
            lease = self._lease(name, branch_row, wait_s=wait_s, takeover=takeover)
            try:
                # Somebody may have taken it over since: what we write must be refused then.
                ours = view.branch_at(branch_row.b)._replace(generation=lease.generation)
                handle = self._opened(row, ours, lease, config, when)
                if lost:
                    handle._say_recovered(damaged, lost)
            except BaseException:
                lease.release()
                raise
            self._handles[branch_row.b] = handle
            return handle

    def when(self, agent: str) -> When | None:
        """When an agent of that name is saved by itself if its program says nothing: as ``holdfast.toml`` has it.

        None: only when the program says so. Raises ``BadOption`` where the file is wrong, with its line.
        """
        self._check_open()
        return find_when(self._folders, agent)

    def _lease(
        self,
        name: str,
        branch: Branch,
        *,
        wait_s: float,
        takeover: bool = False,
        also: Callable[[Change, Branch], Branch] | None = None,
    ) -> Lease:
        """Become the writer of a branch. ``also`` writes on it in the same transaction, and gives what it is then.

        It raises where the branch is not the one that was read any more.
        """
        _ = self._db.writers  # says why, if the store cannot be written
        view = self._db.view

        def rise(generation: int) -> bool:
            try:
                self._db.change(lambda change: raised(change, generation), branch.b, inside=also is None)
            except Refused:
                return False
            return True

        def raised(change: Change, generation: int) -> None:
            now = change.branch_at(branch.b)
            if not now.a:
                raise UnknownAgent(f"agent {name!r} was removed")
            new = also(change, now) if also is not None else now
            if now.generation != generation:
                raise Refused("somebody else has become the writer")
            self._opening(change, now, new)

        return self._db.leases.take(
            branch.uuid,
            lambda: view.branch_at(branch.b).generation if also is None else branch.generation,
            rise,
            {"agent": name, "branch": branch.name},
            b=branch.b,
            wait_s=wait_s,
            takeover=takeover,
        )

    def _opening(self, change: Change, now: Branch, new: Branch) -> None:
        """A branch has another writer from now on."""
        generation = now.generation + 1
        change.move(now, new._replace(generation=generation))
        # An entry of its own, so that a store that has lost this step is older than its witness says.
        said = {"what": "open", "branch": now.name, "b": now.b, "generation": generation}
        change.say(now.a, {**said, **self._db.leases.said})

    def _begin_agent(self, name: str) -> tuple[AgentRow, Lease] | None:
        """Add an agent and become the writer of its first branch, in one transaction.

        None: it is there by now, or this store has leases that name a branch which is there.
        """
        _ = self._db.writers  # says why, if the store cannot be written
        leases = self._db.leases
        if not isinstance(leases, FileLeases):
            return None
        branch_uuid, made = uuid.uuid4().bytes, list[tuple[AgentRow, Branch] | None]()

        def add(change: Change) -> tuple[AgentRow, Branch] | None:
            if change.agent(name) is not None:  # another process was faster
                return None
            row, branch = pointers.new_agent(change, name, branch_uuid)
            self._opening(change, branch, branch)
            return row, branch

        def rise(_generation: int) -> bool:
            made[:] = [self._db.change(add)]
            return True

        who = {"agent": name, "branch": MAIN}
        lease = leases.take(branch_uuid, lambda: 0, rise, who, b=0, wait_s=0.0, takeover=False)
        if made[0] is None:
            lease.release()
            return None
        row, branch = made[0]
        lease.b = branch.b
        return row, lease

    def _opened(
        self, row: AgentRow, branch: Branch, lease: Lease | None, config: Any, when: When | None = DEFAULT
    ) -> Agent:
        if when is DEFAULT and lease is not None:
            when = self.when(row.name)
        try:
            return self._handle(self, row, branch, lease, config=config, when=when)
        except (Damaged, Forgotten) as error:
            from holdfast.agent import recovery

            if isinstance(error, Forgotten):
                if self._db.view.branch_at(branch.b).head != branch.head:
                    raise  # it was moved meanwhile
                error = Damaged(f"the head of {row.name!r} is missing", what=(f"checkpoint {branch.head}",))
            raise recovery.explain(self, row.name, branch, error)  # noqa: B904 - the same error, completed

    def _add_agent(self, name: str) -> AgentRow:
        def add(change: Change) -> AgentRow:
            there = change.agent(name)
            return there if there is not None else pointers.new_agent(change, name)[0]  # another process was faster

        try:
            return self._db.change(add)
        except Refused:  # on a server, another process has made it at the same moment
            there = self._db.view.agent(name)
            if there is None:
                raise
            return there

    def _unknown(self, name: str) -> UnknownAgent:
        import difflib

        near = difflib.get_close_matches(name, [row.name for row in self._db.view.agents()], n=3)
        hint = f"Did you mean {', '.join(map(repr, near))}?" if near else "See `holdfast agents` for what is there."
        return UnknownAgent(f"no agent {name!r} in {self.place}", hint=hint)

    def agents(
        self,
        pattern: str | None = None,
        *,
        limit: int | None = None,
        offset: int = 0,
        sort: Literal["updated", "oldest", "name", "checkpoints"] = "updated",
    ) -> Page[AgentInfo]:
        """Agents, the most recently changed first: all, the one of a name, or those like ``trip-*``.

        ``sort``: or that one last, by name, or by the length of the longest line, the longest first.
        ``limit``: at most so many, after the first ``offset``; the list's ``more`` says how many follow.
        """
        self._check_open()
        return fleet.listed(self, pattern, limit, offset, sort)

    def updated(self, after: datetime | None = None) -> dict[str, datetime]:
        """When each agent last changed, by name; with ``after`` only those that did since.

        A cheap way to see who has changed, by the clocks of those who wrote.
        """
        self._check_open()
        view = self._db.view
        found = view.census() if after is None else view.lately(int(after.timestamp() * 1e6))
        return {one.name: datetime.fromtimestamp(one.at / 1e6, UTC) for one in found}

    def writers(self) -> list[dict[str, Any]]:
        """Who writes which branch now: ``agent``, ``branch``, ``pid``, ``host``, ``program``, and ``since`` (in us)."""
        self._check_open()
        return [one for one in self._db.leases.holders() if "agent" in one]

    @contextmanager
    def acting_as(self, who: str) -> Iterator[None]:
        """Record what this thread or task changes in the block as done by somebody else than this process's user."""
        before = ACTING.set(check_text(who, "who acts"))
        try:
            yield
        finally:
            ACTING.reset(before)

    def copy(self, name: str, new: str) -> None:
        """Add an agent ``new`` that begins with the whole history of another; from then on they are independent.

        Branches, tags, abandoned lines and validity come along. Costs as much as a few names: no state is copied. Of
        what was done outside the copy knows what its newest checkpoints know; that of a framework's thread, all.
        """
        self._check_writable()
        check_name(new, "an agent")
        self.flush()
        source = self._agent_row(name)

        self._db.change(lambda change: pointers.copy(change, source, new, self._inherited))

    def remove(self, name: str, *, dry_run: bool = False, with_copies: bool = False) -> Removal:
        """Remove an agent with its whole history, and free the space that nothing else needs.

        There is no way back. Copies keep what they see, and are named in the report; ``with_copies`` removes them, too.
        Raises ``AgentBusy`` while another process writes the agent; handles of this process on it are closed.
        ``dry_run`` only says what would go.
        """
        from holdfast.agent import removal

        self._check_writable(dry_run=dry_run)
        with self._lock:
            agent = self._agent_row(name, arriving=True)
            return removal.remove(self, agent, dry_run=dry_run, with_copies=with_copies)

    def _forget(
        self,
        agent: AgentRow,
        numbers: set[int],
        *more: tuple[AgentRow, set[int]],
        unless: Callable[[Change], bool] | None = None,
    ) -> Removal:
        """Forget some checkpoints of an agent; a branch whose head goes moves to the nearest ancestor that stays.

        ``more`` are those of others, at the same time: what copies see goes when all of them forget it. The caller
        holds the leases of the branches that move. ``unless`` is asked last, inside the transaction; where it says
        yes, nothing is done.
        """
        from holdfast.agent import removal

        with self._lock:
            return removal.forget(self, [(agent, numbers), *more], unless=unless)

    def retain(
        self, policy: Policy | None = None, agents: Sequence[str] | None = None, *, dry_run: bool = False
    ) -> RetentionReport:
        """Let go what a policy does not keep, of some agents or of all, and free the space that nothing else needs.

        Without ``policy`` each agent's own from the store counts, and agents that have none stay as they are. Agents
        may be written meanwhile. ``dry_run`` says what would go and how many bytes that would free.
        """
        from holdfast.agent import retention

        self._check_writable(dry_run=dry_run)
        rows = self._agents() if agents is None else [self._agent_row(name) for name in dict.fromkeys(agents)]
        chosen = [(row, found) for row in rows if (found := policy or self._policies.of(row)) is not None]
        return retention.preview(self, chosen) if dry_run else retention.retain(self, chosen)

    def set_policy(self, policy: Policy | None, agent: str | None = None) -> None:
        """Keep a policy in the store, for all agents or, instead of that one, for one of them; None takes it away.

        From then on every program that writes such an agent applies it by itself, in the background.
        """
        self._check_writable()
        row = self._agent_row(agent) if agent is not None else None
        self._check_open()
        self._policies.set(row, policy)

    def policies(self) -> dict[str | None, Policy]:
        """The policies that are kept in the store, by the agent's name; under None the one for all others."""
        self._check_open()
        return self._policies.listed()

    def tier(
        self,
        to: str | os.PathLike[str] | None = None,
        *,
        older_than: timedelta = timedelta(0),
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Tiering:
        """Move packs that are older, and that no branch needs where it stands, to a directory or to a URL.

        They are read from there when they are needed. Without ``to`` everything is brought back.
        """
        from holdfast.agent import tiering

        self._check_writable(dry_run=dry_run)
        say = progress or quietly
        if to is None:
            return tiering.bring_back(self, say, dry_run=dry_run)
        return tiering.move_out(self, to, older_than, say, dry_run=dry_run)

    def _needs(self) -> Needs:
        """Who knows which of an agent's checkpoints must stay whatever a policy says, and why: by their ids."""
        return lambda _branches, _points: ()  # the rooms above know

    def _outlived(self, view: View) -> Outlived | None:  # noqa: ARG002 - the rooms above know
        """Who knows which values of records nobody needs, as of one moment."""
        return None

    def resolve(self, text: str) -> tuple[str, str]:
        """Split ``NAME`` or ``NAME@REV`` at the last ``@``; an existing agent's full name wins. REV "" is the head."""
        self._check_open()
        if self._db.view.agent(text) is not None:
            return text, ""
        name, at, revision = text.rpartition("@")
        if at and self._db.view.agent(name) is not None:
            return name, revision
        raise self._unknown(text)

    # -- names for checkpoints: these need no writer, so they work while another process writes the agent ------

    def branch(self, name: str, new: str, at: str | Checkpoint | None = None, *, branch: str = MAIN) -> None:
        """Begin a branch at a checkpoint, without opening it."""
        check_new(new, "a branch")
        row, target = self._target(name, at, branch)
        self._add_branch(row, new, target)

    def _add_branch(
        self,
        agent: AgentRow,
        new: str,
        target: Point | None,
        more: Body | None = None,
        *,
        end: End | None = None,
        lost: Sequence[NewRecord] = (),
    ) -> Branch:
        """As ``pointers.put_branch``, by itself."""
        return self._db.change(
            lambda change: pointers.put_branch(
                change, agent, new, target, more or {}, self._inherited, end=end, lost=lost
            )
        )

    def _inherited(self, view: View, b: int, point: Point | None) -> End:  # noqa: ARG002 - for the room above
        """The records that begin the line of what begins at a checkpoint of branch ``b``: those that it knows."""
        return view.end_at(point)

    def tag(self, name: str, tag: str, at: str | Checkpoint | None = None, *, branch: str = MAIN) -> None:
        """Give a checkpoint a name; a tag that exists moves."""
        row, target = self._target(name, at, branch)
        self._set_tag(row, tag, target)

    def _set_tag(self, agent: AgentRow, tag: str, target: Point) -> None:
        self._db.change(lambda change: pointers.set_tag(change, agent, tag, target))

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag."""
        row = self._agent_row(name)
        self._db.change(lambda change: pointers.drop_tag(change, row, tag))

    def mark(
        self,
        name: str,
        at: str | Checkpoint,
        validity: Literal["good", "suspect", "corrupt"],
        reason: str = "",
        *,
        branch: str = MAIN,
    ) -> None:
        """Say whether a checkpoint can be trusted."""
        row, target = self._target(name, at, branch)
        self._set_validity(row, target, validity, reason)

    def _set_validity(self, agent: AgentRow, target: Point, validity: str, reason: str) -> None:
        self._db.change(lambda change: pointers.judge(change, agent, target, validity, reason))

    def _target(self, name: str, at: str | Checkpoint | None, branch: str) -> tuple[AgentRow, Point]:
        self._check_writable()
        row = self._agent_row(name)
        branch_row = self._db.view.branch(row.a, branch)
        if branch_row is None:
            raise UnknownRevision(f"agent {name!r} has no branch {branch!r}")
        return row, self._find(branch_row, at)

    def _find(self, branch: Branch, at: str | Checkpoint | None) -> Point:
        view = self._db.view
        if isinstance(at, Checkpoint):
            if not Graph(view, view.agent_at(branch.a)).sees(at._current()):
                raise UnknownRevision(f"{at!r} belongs to another agent")
            return at._current()
        if at is not None and not isinstance(at, str):
            raise UnknownRevision(
                f"a revision is text or a Checkpoint, not {type(at).__name__}", hint="A depth is written '#17'."
            )
        if not at:
            return find(view, branch, "")
        with self._db.moment() as (then, _):  # what is forgotten meanwhile would leave a gap
            return find(then, branch, at)

    def _agent_row(self, name: str, *, arriving: bool = False) -> AgentRow:
        self._check_open()
        row = self._db.view.agent(name)
        if row is None:
            raise self._unknown(name)
        if not arriving and self._half(row):
            raise still_arriving(repr(name))
        return row

    def _agents(self) -> list[AgentRow]:
        """All but those that are still arriving."""
        return whole(self._db.view)

    def _half(self, agent: AgentRow) -> bool:
        return is_arriving(self._db.view.branches(agent.a))

    # -- the whole store ------------------------------------------------------------------------------

    def verify(self, progress: Progress | None = None, agents: Sequence[str] = ()) -> VerifyReport:
        """Read everything and prove every digest. ``progress(what, done, total)`` is called along the way."""
        from holdfast.agent.verify import verify

        self._check_open()
        return verify(self, progress, agents)

    def look(self) -> list[Problem]:
        """What a quick look at names and sizes finds wrong. Without any, ``verify`` may still find damage."""
        from holdfast.agent.verify import look

        self._check_open()
        return look(self)

    def last_verified(self) -> dict[str, Any] | None:
        """When this user last verified the whole store (``at``), whether it was ``ok``, and how many ``problems``."""
        from holdfast.agent.verify import last_verified

        self._check_open()
        return last_verified(self)

    def push(
        self,
        dest: Store,
        agents: Sequence[str] = (),
        *,
        beside: bool = False,
        new_name: str | None = None,
        images: bool = False,
        progress: Progress | None = None,
    ) -> TransferReport:
        """Bring what another store lacks of some agents, or of all, there; everything is proven on arrival.

        The children of an agent (``NAME/...``) come with it, so that none is older there than what the agent knows of
        it. Only what is missing moves. After an interruption the next call resumes. Raises ``HistoriesDiverged`` where
        both stores have gone on with a branch (``beside`` lets it arrive under a name of its own), and ``AgentBusy``
        while somebody writes the agent in the other store. ``new_name`` is what one agent is to be called there; its
        children stay behind then. Agents that hold images of processes go only with ``images``, and only into a store
        that is encrypted; the report's ``left_out`` names those that stayed.
        """
        from holdfast.agent.transfer import transfer

        self._check_open()
        dest._check_open()
        return transfer(self, dest, agents, beside=beside, new_name=new_name, images=images, progress=progress)

    def pull(
        self,
        source: Store,
        agents: Sequence[str] = (),
        *,
        beside: bool = False,
        new_name: str | None = None,
        images: bool = False,
        progress: Progress | None = None,
    ) -> TransferReport:
        """As push(), from the other store to this one."""
        return source.push(self, agents, beside=beside, new_name=new_name, images=images, progress=progress)

    def backup(self, dest: Store, progress: Progress | None = None) -> TransferReport:
        """As push() of everything but images, with what people have set for the store. Nothing is removed there.

        An agent that cannot be brought keeps none of the others back: its error is raised when they are there.
        """
        from holdfast.agent.move import backup

        self._check_open()
        dest._check_open()
        return backup(self, dest, progress)

    def move(self, dest: Store, progress: Progress | None = None) -> TransferReport:
        """As backup(), with images; then this store is closed for good: it can only be read, and names ``dest``.

        Raises ``NotEncrypted``, with this store as it was, if there are images of processes and ``dest`` is plain.
        Nobody else may have it open, or, on a server, write to it. Interrupted anywhere, it can be done again; if this
        store says already that it was moved there, it is opened with ``readonly=True`` for that.
        """
        from holdfast.agent.move import move

        self._check_open()
        dest._check_open()
        return move(self, dest, progress)

    def export(
        self,
        path: str | os.PathLike[str],
        agents: Sequence[str],
        *,
        key: Key = None,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Write agents, and their children, with their whole histories to one file; returns its size.

        With a ``key`` the file opens with that alone. Without one it is as the store is: plain, or encrypted, and then
        it opens with the store's keys. ``key=False`` writes it plain in any case.
        """
        from holdfast.agent.bundle import write_bundle

        self._check_open()
        return write_bundle(self, Path(path), agents, key, progress, replace=replace)

    def import_bundle(
        self,
        path: str | os.PathLike[str],
        agents: Sequence[str] = (),
        *,
        key: Key = None,
        beside: bool = False,
        new_name: str | None = None,
        progress: Progress | None = None,
    ) -> TransferReport:
        """Take in the agents of a file that ``export`` wrote, or some of them. Options are those of push().

        The whole file is read and proven first; one that is damaged changes nothing. ``key`` opens an encrypted file.
        """
        from holdfast.agent.bundle import opened, read_bundle

        self._check_writable()
        with opened(Path(path), key) as (found, _):
            return read_bundle(self, Path(path), found, agents, beside=beside, new_name=new_name, progress=progress)

    def verify_restore(
        self,
        agents: Sequence[str] = (),
        *,
        sample: int = 20,
        place: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> RestoreReport:
        """Restore some agents in a scratch place, or as many as ``sample`` at random, whole, and prove what came back.

        The scratch place is below ``place``, or beside the store, or, if nobody can write there, where temporary files
        go. It is removed at the end.
        """
        from holdfast.agent.move import verify_restore

        self._check_open()
        return verify_restore(self, agents, sample, Path(place) if place is not None else None, progress or quietly)

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes and numbers of records."""
        self._check_open()
        facts, counts = self._db.view.facts(), self._db.view.counts()
        counts["checkpoint"] += counts.pop("loose")
        here, *cold = self._db.packs.places(self._db.view)
        return {
            "path": self.place,
            "moved": facts.get(MOVED, b"").decode() or None,
            "format": FORMAT_VERSION,
            "durability": self._durability,
            "bytes": {**self._db.engine.sizes(), "packs": sum(self._db.view.packs().values())},
            "counts": counts,
            "objects": here if facts[OBJECTS] else None,
            "cold": cold,
            "writers": self.writers(),
        }

    def costs(self, agent: str, *, limit: int | None = 1_000) -> Costs:
        """What the newest checkpoints of an agent cost: what asked for them, bytes, and time. None: all of them."""
        from holdfast.agent.cost import costs_of

        self.flush()
        return costs_of(self, self._agent_row(agent), limit)

    def flush(self) -> None:
        """Return when everything that was acknowledged is durable (for durability="batched")."""
        self._check_open()
        for handle in list(self._handles.values()):
            handle._settle()
        self._db.flush()

    def close(self) -> None:
        """Let go of everything. Changes since the last checkpoint are lost, and ``UnsavedChanges`` warns of them.

        With ``durability="batched"`` it raises when something that was accepted could not be written; if that was for
        want of room, the store stays open and closing can be tried again.
        """
        unsaved.let_go(list(self._handles.values()), "the store was closed", self._shut)

    def _shut(self) -> None:
        """Let go of everything, whatever is not saved."""
        with self._lock:
            if self._db.released or self._pid != os.getpid():
                return
            failed = None
            try:
                for handle in list(self._handles.values()) if not self.closed else ():
                    try:
                        handle._settle()
                    except DiskFull:
                        raise
                    except HoldfastError as error:  # whoever made it was told, unless it was accepted unwritten
                        failed = error if self._batched else None
                self._db.close()
                if failed is not None:
                    raise failed
            finally:
                self._let_go()

    def _let_go(self) -> None:
        """Forget the handles, once nothing below is open any more."""
        if self._db.released:
            for handle in list(self._handles.values()):
                handle._shut()
            self._handles.clear()
            places.forget(self._key, self)

    @property
    def encrypted(self) -> bool:
        """Whether everything in it is encrypted and signed."""
        return self._db.encrypted

    @property
    def inert(self) -> bool:
        """Whether it gives values of the program's types as records, without these types."""
        return bool(self._inert)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._db.closed or self._pid != os.getpid()

    def _check_open(self) -> None:
        self._db.check_usable()

    def _check_writable(self, *, dry_run: bool = False) -> None:
        self._check_open()
        if self._readonly and not dry_run:
            raise ReadOnly("this store was opened read-only")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Never:
        raise BadOption(
            f"an open store cannot be copied or sent to another process: {self.place}",
            hint="Hand over its place, and open it there: holdfast.open(place).",
        )

    def __repr__(self) -> str:
        return f"<Store {self.place}{' (closed)' if self.closed else ''}>"

    def _repr_html_(self) -> str:
        rows = [
            (info.name, ", ".join(info.branches), info.checkpoints, info.head.label if info.head else "", info.updated)
            for info in self.agents(limit=_IN_NOTEBOOK)
        ]
        return table(("agent", "branches", "checkpoints", "last label", "updated"), rows)

    # -- for the rest of this room ----------------------------------------------------------------------

    def _register(self, types: Sequence[Any]) -> None:
        for item in types:
            if isinstance(item, type):
                self._registry.register(item)
            else:
                self._registry.register_module(item)

    def _load(self, point: Point) -> Document:
        return history.load(self._db.now, point, self._registry, inert=self._inert)

    def _reader(self, state: State) -> Reader:
        """Gives the values of a state as this store's program knows them."""
        return Reader(state, self._registry, inert=self._inert)

    def _empty(self) -> Document:
        return history.load(self._db.now, None, self._registry, inert=self._inert)


def open_unseen(path: Path, secret: keys.Secret | None, *, create: bool = False) -> Store:
    """A store that nobody else is to know yet: it is not remembered, and its values stay as they are stored."""
    db = open_database(path, create=create, secret=secret, remember=False)
    return Store(str(path), db, (False, "commit", False, True))
