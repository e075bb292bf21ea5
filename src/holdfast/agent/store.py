"""The store as user code sees it: agents by name, and what concerns all of them.

Owns finding and opening a store, names, and the one-handle-per-branch rule of a process. Bytes are the catalog's
business, history the agent's. What always holds: opening the same store twice in one process gives the same object.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from msgspec import Struct

from holdfast.agent import history
from holdfast.agent.agent import Agent
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.journal import inherited
from holdfast.agent.line import Line
from holdfast.agent.names import check_name, check_new, name_key
from holdfast.agent.revision import find
from holdfast.agent.tending import Policies, Tending
from holdfast.codec.document import Document
from holdfast.codec.state import Reader, State
from holdfast.codec.types import REGISTRY, Registry
from holdfast.codec.values import encode
from holdfast.errors import (
    BadName,
    BadOption,
    Damaged,
    KeyNeeded,
    ReadOnly,
    StillArriving,
    StoreClosed,
    UnknownAgent,
    UnknownRevision,
)
from holdfast.store import keysources
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, Event, LineStart, NewRecord, Progress, quietly
from holdfast.store.embedded import Embedded, open_embedded
from holdfast.store.files import unavailable
from holdfast.store.keysources import Key, find_secret
from holdfast.store.locks import Lease
from holdfast.store.opening import now_us
from holdfast.store.upgrade import FORMAT_VERSION

if TYPE_CHECKING:
    from holdfast.agent.drill import DrillReport
    from holdfast.agent.policy import Policy
    from holdfast.agent.removal import Removal
    from holdfast.agent.retention import RetentionReport
    from holdfast.agent.transfer import TransferReport
    from holdfast.agent.verify import VerifyReport
    from holdfast.store.forgetting import Unless
    from holdfast.store.tiering import Tiering

DEFAULT_DIRECTORY = ".holdfast"
MAIN = "main"

S = TypeVar("S", bound="Store")

# Held for as long as they are open: a store that is merely forgotten still holds its branches.
_open: dict[str, Store] = {}
_open_lock = threading.Lock()


class AgentInfo(Struct, frozen=True):
    """One line of the list of agents."""

    name: str
    branches: list[str]
    head: Checkpoint | None
    checkpoints: int
    created: datetime
    updated: datetime | None
    abandoned: int


def find_store(start: Path | None = None) -> Path:
    """$HOLDFAST_STORE, or the nearest .holdfast here or above (as git finds its own), or ./.holdfast."""
    named = os.environ.get("HOLDFAST_STORE")
    if named:
        return Path(named)
    try:
        here = (start or Path.cwd()).resolve()
        for directory in (here, *here.parents):
            if (directory / DEFAULT_DIRECTORY).is_dir():
                return directory / DEFAULT_DIRECTORY
    except OSError as error:  # going on would find another store, or make one
        raise unavailable(error, "looking for a store") from error
    return here / DEFAULT_DIRECTORY


def say_created(place: Path) -> None:
    if sys.stderr is not None:
        print(f"holdfast: created a new store at {place}", file=sys.stderr)  # noqa: T201 - said once, to people


def open_as(
    kind: type[S],
    path: str | os.PathLike[str] | None = None,
    *,
    create: bool = True,
    readonly: bool = False,
    durability: Literal["commit", "batched"] = "commit",
    types: Sequence[Any] = (),
    paranoid: bool = False,
    recover: bool = False,
    accept_older: bool = False,
    inert: bool = False,
    key: Key = None,
) -> S:
    """Open a store, making it first if there is none. ``kind`` is its class: the rooms above add to what it can do."""
    place = Path(os.path.realpath(path if path is not None else find_store()))
    secret = find_secret(key)
    options = (readonly, durability, paranoid, inert)
    with _open_lock:
        known = _open.get(str(place))
        if known is not None and not known.closed:
            if known._options != options or not isinstance(known, kind):
                raise BadOption(
                    f"{place} is open in this process already, with other options",
                    hint="Close that store first, or open it with the same options.",
                )
            if secret is not None:
                known._catalog.check_secret(secret)
            store = known
        else:
            existed = os.path.exists(place)  # noqa: PTH110  a disk that fails is the catalog's to report
            opening = partial(
                open_embedded,
                place,
                create=create and not readonly,
                readonly=readonly,
                durability=durability,
                accept_loss=recover,
                accept_older=accept_older,
            )
            try:
                catalog = opening(secret=secret)
            except KeyNeeded:
                if key is False or keysources.ask is None:
                    raise
                catalog = opening(secret=keysources.ask(place))
            if not existed:
                say_created(place)
            store = kind(place, catalog, options)
            _open[str(place)] = store
        store._register(types)
        return store


def _arriving(branch: BranchRow) -> bool:
    """Whether a branch came from elsewhere, and not all of it yet."""
    return bool(body_of(branch).get("arriving", False))


def _still_arriving(what: str) -> StillArriving:
    return StillArriving(
        f"{what} is still arriving from elsewhere: not all of it has come",
        hint="Run the push, pull or import again: it goes on where it was. Or remove the agent.",
    )


class Store:
    """A place where agents' states are kept. Open one with ``holdfast.open()``."""

    _handle: ClassVar[type[Agent]] = Agent
    """What ``agent()`` gives."""

    def __init__(self, path: Path, catalog: Embedded, options: tuple[Any, ...]) -> None:
        self.path = path
        self._catalog = catalog
        self._options = options
        self._readonly, self._durability, self._paranoid, self._inert = options
        self._registry: Registry = REGISTRY.child()
        self._handles: dict[int, Agent] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._policies = Policies(self)
        self._tending = Tending(self, self._policies)
        catalog.before_close.append(self._tending.stop)

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
    ) -> Agent:
        """The agent of that name, its last state already there.

        Raises ``AgentBusy`` while another process writes that branch (``wait_s`` waits for it, ``takeover`` takes it
        away), and ``Damaged`` when its state cannot be trusted (``recover`` goes on from the newest valid checkpoint,
        on a new branch).
        """
        self._check_open()
        check_name(name, "an agent")
        readonly = readonly or self._readonly
        with self._lock:
            row = self._catalog.agent(name_key(name))
            if row is None:
                if not create or readonly:
                    raise self._unknown(name)
                row, _ = self._add_agent(name)
            branch_row = self._catalog.branch(row.a, name_key(branch))
            if branch_row is None:
                known = ", ".join(other for other, _ in self._branches(row.a))
                raise UnknownRevision(f"agent {name!r} has no branch {branch!r}", hint=f"Branches: {known}")
            if _arriving(branch_row):
                raise _still_arriving(f"branch {branch!r} of {name!r}")
            if readonly:
                return self._opened(name, row, branch_row, None, None)
            known_handle = self._handles.get(branch_row.b)
            if known_handle is not None:
                if not known_handle.closed and not (recover and known_handle.damaged):
                    return known_handle
                if not known_handle.closed and known_handle.dirty:
                    raise BadOption(
                        f"the handle on {name!r} has changes that are not saved",
                        hint="Recovering begins with the newest checkpoint that can be read: close() the handle first.",
                    )
                known_handle.close()  # also one that an interrupt left half closed
            lost, damaged = "", branch_row.head_id
            if recover:
                from holdfast.agent import recovery

                branch_row, lost = recovery.recover(self, name, row, branch_row)
                known_handle = self._handles.get(branch_row.b)
                if known_handle is not None and not known_handle.closed:
                    return known_handle
            lease = self._lease(name, branch_row, wait_s=wait_s, takeover=takeover)
            try:
                handle = self._opened(name, row, self._catalog.branch_row(branch_row.b), lease, config)
                if lost:
                    handle._say_recovered(damaged, lost)
            except BaseException:
                lease.release()
                raise
            self._handles[branch_row.b] = handle
            return handle

    def _lease(self, name: str, branch: BranchRow, *, wait_s: float, takeover: bool = False) -> Lease:
        """Become the writer of a branch."""
        called = self._name_of(branch)
        # An event of its own, so that a catalog that has lost this step is older than its witness says.
        event = Event(now_us(), encode({"what": "open", "branch": called}))
        who = {"agent": name, "branch": called}
        return self._catalog.lease(branch, wait_s=wait_s, takeover=takeover, who=who, event=event)

    def _opened(self, name: str, row: AgentRow, branch: BranchRow, lease: Lease | None, config: Any) -> Agent:
        try:
            return self._handle(self, name, row, branch, lease, config=config)
        except Damaged as error:
            from holdfast.agent import recovery

            raise recovery.explain(self, name, branch, error)  # noqa: B904 - the same error, completed

    def _add_agent(self, name: str) -> tuple[AgentRow, BranchRow]:
        now = now_us()
        return self._catalog.add_agent(
            key=name_key(name),
            body=encode({"name": name, "created": now}),
            uuid=uuid.uuid4().bytes,
            branch_key=name_key(MAIN),
            branch_body=encode({"name": MAIN, "created": now, "from": b""}),
            branch_uuid=uuid.uuid4().bytes,
            event=Event(now, encode({"what": "agent", "name": name})),
        )

    def _unknown(self, name: str) -> UnknownAgent:
        import difflib

        names = [str(body_of(row)["name"]) for row in self._catalog.agents()]
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"Did you mean {', '.join(map(repr, near))}?" if near else "See `holdfast agents` for what is there."
        return UnknownAgent(f"no agent {name!r} in {self.path}", hint=hint)

    def agents(self) -> list[AgentInfo]:
        """All agents, the most recently changed first."""
        self._check_open()
        found = [self._info(row) for row in self._agents()]
        return sorted(found, key=lambda info: info.updated or info.created, reverse=True)

    def _info(self, row: AgentRow) -> AgentInfo:
        body = body_of(row)
        branches = self._branches(row.a)
        heads = [self._catalog.checkpoint(branch.head) for _, branch in branches if branch.head]
        newest = max(heads, key=lambda head: head.n, default=None)
        head = Checkpoint.of(self, newest, row) if newest is not None else None
        line = Line(self, row)
        reached = {branch.head for _, branch in branches}
        return AgentInfo(
            name=body["name"],
            branches=[name for name, _ in branches],
            head=head,
            checkpoints=line.count(),
            created=datetime.fromtimestamp(body["created"] / 1e6, UTC),
            updated=head.time if head is not None else None,
            abandoned=sum(1 for tip in line.tips() if tip.n not in reached),
        )

    def clone(self, name: str, new: str) -> None:
        """Add an agent ``new`` that begins with the whole history of another; from then on they are independent.

        Branches, tags, abandoned lines and validity come along. Costs as much as a few names: no state is copied.
        """
        from holdfast.agent import cloning

        if self._readonly:
            raise ReadOnly("this store was opened read-only")
        cloning.clone(self, self._agent_row(name), new)

    def remove(self, name: str, *, dry_run: bool = False) -> Removal:
        """Remove an agent with its whole history, and free the space that nothing else needs.

        There is no way back. Clones keep what they see. Raises ``AgentBusy`` while another process writes the agent;
        handles of this process on it are closed. ``dry_run`` only says what would go.
        """
        from holdfast.agent import removal

        if self._readonly and not dry_run:
            raise ReadOnly("this store was opened read-only")
        with self._lock:
            return removal.remove(self, self._agent_row(name, arriving=True), dry_run=dry_run)

    def _forget(
        self,
        agent: AgentRow,
        numbers: set[int],
        *,
        guard: tuple[int, int] | None = None,
        unless: Unless | None = None,
    ) -> Removal:
        """Forget some checkpoints of an agent; a branch whose head goes moves to the nearest ancestor that stays.

        With ``guard`` the caller holds the lease that it names and vouches that nobody else writes any branch of the
        agent; otherwise the leases are taken here, except those that this process has. Whoever holds a document of
        the agent must load it again: it may count nodes as stored that are gone. ``unless`` is asked last, with the
        branches and tags as they are then; where it says yes, nothing is done.
        """
        from holdfast.agent import removal

        with self._lock:
            return removal.forget(self, agent, numbers, guard=guard, unless=unless)

    def retain(
        self, policy: Policy | None = None, agents: Sequence[str] | None = None, *, dry_run: bool = False
    ) -> RetentionReport:
        """Let go what a policy does not keep, of some agents or of all, and free the space that nothing else needs.

        Without ``policy`` each agent's own from the store counts, and agents that have none stay as they are. Agents
        may be written meanwhile. ``dry_run`` says what would go and how many bytes that would free.
        """
        from holdfast.agent import retention

        self._check_open()
        if self._readonly and not dry_run:
            raise ReadOnly("this store was opened read-only")
        rows = self._agents() if agents is None else [self._agent_row(name) for name in dict.fromkeys(agents)]
        chosen = [(row, found) for row in rows if (found := policy or self._policies.of(row)) is not None]
        return retention.preview(self, chosen) if dry_run else retention.retain(self, chosen)

    def set_policy(self, policy: Policy | None, agent: str | None = None) -> None:
        """Keep a policy in the store, for all agents or, instead of that one, for one of them; None takes it away.

        From then on every program that writes such an agent applies it by itself, in the background.
        """
        if self._readonly:
            raise ReadOnly("this store was opened read-only")
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
        from holdfast.agent import cold

        self._check_open()
        if self._readonly and not dry_run:
            raise ReadOnly("this store was opened read-only")
        say = progress or quietly
        if to is None:
            return cold.bring_back(self, say, dry_run=dry_run)
        return cold.move_out(self, to, older_than, say, dry_run=dry_run)

    def _needed(self, branches: Sequence[BranchRow], rows: Iterable[CheckpointRow]) -> Iterable[tuple[bytes, str]]:  # noqa: ARG002 - the rooms above know
        """Ids of an agent's checkpoints that must stay whatever a policy says, and why."""
        return ()

    def resolve(self, text: str) -> tuple[str, str]:
        """Split ``NAME`` or ``NAME@REV`` at the last ``@``; an existing agent's full name wins. REV "" is the head."""
        self._check_open()
        if self._catalog.agent(name_key(text)) is not None:
            return text, ""
        name, at, revision = text.rpartition("@")
        if at and self._catalog.agent(name_key(name)) is not None:
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
        target: CheckpointRow | None,
        more: Mapping[str, Any] | None = None,
        *,
        line: LineStart | None = None,
        copies: Sequence[NewRecord] = (),
    ) -> BranchRow:
        """A branch that begins at ``target``, or, without one, with nothing; ``more`` is kept in its body.

        It inherits the records before ``target``, unless ``line`` says otherwise; ``copies`` follow these.
        """
        check_name(new, "a branch", but="@")
        self._check_free(agent, new)
        now = now_us()
        at = target.id if target is not None else b""
        body = encode({"name": new, "created": now, "from": at, **(more or {})})
        inherits = line if line is not None else inherited(target)
        said = {"what": "branch", "name": new, "at": at}
        if inherits is not None and inherits.start:
            said["line"] = [inherits.origin, inherits.start]
        return self._catalog.add_branch(
            agent.a,
            key=name_key(new),
            body=body,
            uuid=uuid.uuid4().bytes,
            head=target.n if target is not None else 0,
            head_id=at,
            event=Event(now, encode(said)),
            line=inherits,
            copies=copies,
        )

    def tag(self, name: str, tag: str, at: str | Checkpoint | None = None, *, branch: str = MAIN) -> None:
        """Give a checkpoint a name; a tag that exists moves."""
        row, target = self._target(name, at, branch)
        self._set_tag(row, tag, target)

    def _set_tag(self, agent: AgentRow, tag: str, target: CheckpointRow) -> None:
        check_new(tag, "a tag")
        if self._catalog.branch(agent.a, name_key(tag)) is not None:
            raise BadName(f"{tag!r} is a branch of this agent", hint="A tag needs another name.")
        now = now_us()
        event = Event(now, encode({"what": "tag", "name": tag, "at": target.id}))
        self._catalog.set_tag(
            agent.a, name_key(tag), body=encode({"name": tag, "at": target.id}), n=target.n, event=event
        )

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag."""
        row = self._agent_row(name)
        event = Event(now_us(), encode({"what": "untag", "name": tag}))
        if not self._catalog.drop_tag(row.a, name_key(tag), event=event):
            raise UnknownRevision(f"agent {name!r} has no tag {tag!r}")

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

    def _set_validity(self, agent: AgentRow, target: CheckpointRow, validity: str, reason: str) -> None:
        if validity not in {"good", "suspect", "corrupt"}:
            raise BadOption(f"validity {validity!r}", hint="Use good, suspect or corrupt.")
        now = now_us()
        body = None if validity == "good" else encode({"validity": validity, "reason": reason, "at": now})
        event = Event(now, encode({"what": "validity", "at": target.id, "validity": validity, "reason": reason}))
        self._catalog.set_validity(agent.a, target.n, body=body, event=event)

    def _check_free(self, agent: AgentRow, name: str) -> None:
        if self._catalog.branch(agent.a, name_key(name)) is not None or name in self._tags(agent.a):
            raise BadName(f"{name!r} is already a branch or tag of this agent", hint="Choose another name.")

    def _target(self, name: str, at: str | Checkpoint | None, branch: str) -> tuple[AgentRow, CheckpointRow]:
        if self._readonly:
            raise ReadOnly("this store was opened read-only")
        row = self._agent_row(name)
        branch_row = self._catalog.branch(row.a, name_key(branch))
        if branch_row is None:
            raise UnknownRevision(f"agent {name!r} has no branch {branch!r}")
        return row, self._find(branch_row, at)

    def _find(self, branch: BranchRow, at: str | Checkpoint | None) -> CheckpointRow:
        if isinstance(at, Checkpoint):
            if not self._line(branch.a).sees(at._row):
                raise UnknownRevision(f"{at!r} belongs to another agent")
            return at._row
        if at is not None and not isinstance(at, str):
            raise UnknownRevision(
                f"a revision is text or a Checkpoint, not {type(at).__name__}", hint="A depth is written '#17'."
            )
        return find(self, branch, at or "")

    def _agent_row(self, name: str, *, arriving: bool = False) -> AgentRow:
        self._check_open()
        row = self._catalog.agent(name_key(name))
        if row is None:
            raise self._unknown(name)
        if not arriving and self._half(row):
            raise _still_arriving(repr(name))
        return row

    def _agents(self) -> list[AgentRow]:
        """All but those that are still arriving."""
        return [row for row in self._catalog.agents() if not self._half(row)]

    def _half(self, agent: AgentRow) -> bool:
        """Whether nothing of an agent is whole yet, because it is still arriving."""
        branches = self._catalog.branches(agent.a)
        return bool(branches) and all(map(_arriving, branches))

    # -- the whole store ------------------------------------------------------------------------------

    def verify(self, progress: Progress | None = None, agents: Sequence[str] = ()) -> VerifyReport:
        """Read everything and prove every digest. ``progress(what, done, total)`` is called along the way."""
        from holdfast.agent.verify import verify

        self._check_open()
        return verify(self, progress, agents)

    def push(
        self,
        dest: Store,
        agents: Sequence[str] = (),
        *,
        beside: bool = False,
        new_name: str | None = None,
        progress: Progress | None = None,
    ) -> TransferReport:
        """Bring what another store lacks of some agents, or of all, there; everything is proven on arrival.

        Only what is missing moves. After an interruption the next call goes on. Raises ``HistoriesDiverged`` where
        both stores have gone on with a branch (``beside`` lets it arrive under a name of its own), and ``AgentBusy``
        while somebody writes the agent in the other store. ``new_name`` is what one agent is to be called there.
        """
        from holdfast.agent.transfer import transfer

        self._check_open()
        dest._check_open()
        return transfer(self, dest, agents, beside=beside, new_name=new_name, progress=progress)

    def pull(
        self,
        source: Store,
        agents: Sequence[str] = (),
        *,
        beside: bool = False,
        new_name: str | None = None,
        progress: Progress | None = None,
    ) -> TransferReport:
        """As push(), from the other store to this one."""
        return source.push(self, agents, beside=beside, new_name=new_name, progress=progress)

    def export(
        self,
        path: str | os.PathLike[str],
        agents: Sequence[str],
        *,
        key: Key = None,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Write agents with their whole histories to one file; returns its size.

        With a ``key`` the file opens with that alone. Without one it is as the store is: plain, or encrypted, and then
        it opens with the store's keys. ``key=False`` writes it plain in any case.
        """
        from holdfast.agent.bundle import write_bundle

        self._check_open()
        return write_bundle(self, Path(path), agents, key=key, replace=replace, progress=progress)

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
        from holdfast.agent.bundle import read_bundle

        self._check_open()
        if self._readonly:
            raise ReadOnly("this store was opened read-only")
        return read_bundle(self, Path(path), agents, key=key, beside=beside, new_name=new_name, progress=progress)

    def drill(
        self,
        agents: Sequence[str] = (),
        *,
        sample: int = 20,
        place: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> DrillReport:
        """Restore a sample of checkpoints in a scratch place, the newest of each branch first, and prove their digests.

        The scratch place is beside the store, or below ``place``, and is removed at the end.
        """
        from holdfast.agent.drill import drill

        self._check_open()
        room = Path(place) if place is not None else None
        return drill(self, agents, sample=sample, place=room, progress=progress)

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes and numbers of records."""
        self._check_open()
        return {
            "path": str(self.path),
            "format": FORMAT_VERSION,
            "durability": self._durability,
            "bytes": self._catalog.sizes(),
            "counts": self._catalog.counts(),
            "cold": self._catalog.tiers.summary(),
            "writers": self._catalog.holders(),
        }

    def flush(self) -> None:
        """Return when everything that was acknowledged is durable (for durability="batched")."""
        self._catalog.flush()

    def close(self) -> None:
        """Let go of everything. Changes since the last checkpoint are not saved.

        With ``durability="batched"`` it raises when something that was accepted could not be written; if that was for
        want of room, the store stays open and closing can be tried again.
        """
        with self._lock:
            if self.closed:
                return
            try:
                self._catalog.close()
            finally:
                if self._catalog.closed:
                    for handle in list(self._handles.values()):
                        handle.close()
                    self._handles.clear()
                    with _open_lock:
                        if _open.get(str(self.path)) is self:
                            del _open[str(self.path)]

    @property
    def encrypted(self) -> bool:
        """Whether everything in it is encrypted and signed."""
        return self._catalog.encrypted

    @property
    def closed(self) -> bool:
        return self._catalog.closed or self._pid != os.getpid()

    def _check_open(self) -> None:
        try:
            self._catalog.check_usable()
        except StoreClosed:
            message = f"the store at {self.path} was closed"
            raise StoreClosed(message, hint="Open it again with holdfast.open().") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.path}{' (closed)' if self.closed else ''}>"

    def _repr_html_(self) -> str:
        from holdfast.agent.notebook import table

        rows = [
            (info.name, ", ".join(info.branches), info.checkpoints, info.head.label if info.head else "", info.updated)
            for info in self.agents()
        ]
        return table(("agent", "branches", "checkpoints", "last label", "updated"), rows)

    # -- for the rest of this room ----------------------------------------------------------------------

    def _register(self, types: Sequence[Any]) -> None:
        for item in types:
            if isinstance(item, type):
                self._registry.register(item)
            else:
                self._registry.register_module(item)

    def _branches(self, a: int) -> list[tuple[str, BranchRow]]:
        return [(str(body_of(row)["name"]), row) for row in self._catalog.branches(a)]

    def _line(self, a: int) -> Line:
        agent = self._catalog.agent_row(a)
        if agent is None:
            raise UnknownAgent("the agent was removed", hint="See `holdfast agents` for what is there.")
        return Line(self, agent)

    def _branch_name(self, b: int) -> str:
        return self._name_of(self._catalog.branch_row(b))

    def _name_of(self, branch: BranchRow) -> str:
        return str(body_of(branch)["name"])

    def _tags(self, a: int) -> dict[str, int]:
        return {str(body_of(row)["name"]): row.n for row in self._catalog.tags(a)}

    def _row_by_id(self, b: int, wanted: bytes) -> CheckpointRow:
        self._catalog.flush()
        for row in self._catalog.checkpoints(b=b, newest_first=True):
            if row.id == wanted:
                return row
        raise Damaged(
            f"checkpoint {wanted.hex()[:12]} is not in the catalog", what=(f"checkpoint {wanted.hex()[:12]}",)
        )

    def _load(self, row: CheckpointRow) -> Document:
        return history.load(self._catalog, row, self._registry, inert=self._inert)

    def _reader(self, state: State) -> Reader:
        """Gives the values of a state as this store's program knows them."""
        return Reader(state, self._registry, inert=self._inert)

    def _empty(self) -> Document:
        return history.empty(self._catalog, self._registry, inert=self._inert)
