"""Claims: which directory belongs to which branch of an agent, and whether one that lies here is that one.

Owns the rows in which a store notes it, with the intent to put files back, and the words for where no file moves. Moves
none itself. What always holds: another machine's directory, or that of a store which this one was copied from, is not
taken for ours unless somebody says so; an intent goes only when it is done.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict

from holdfast.agent.layers import WORKSPACE
from holdfast.errors import BadOption
from holdfast.process import restore
from holdfast.process.trees import STAGING
from holdfast.store.files import birth_ns, in_store
from holdfast.store.processes import boot, machine
from holdfast.store.rows import body_bytes, malformed, read_body
from holdfast.store.sqlite import Sqlite

if TYPE_CHECKING:
    from holdfast.agent.agent import Agent
    from holdfast.store.catalog import View
    from holdfast.store.changes import Change
    from holdfast.store.rows import Branch

log = logging.getLogger("holdfast.process")


class Claim(NamedTuple):
    """The directory of a branch. ``to``: the checkpoint whose files are being put back there, ``at``: whose it had.

    ``machine`` and ``boot`` say more of the machine than its name, ``inode`` (with its device) which directory it was
    when it was last opened, ``store`` where the store was.
    """

    path: str
    host: str
    to: bytes = b""
    at: bytes = b""
    machine: str = ""
    boot: str = ""
    inode: tuple[int, ...] = ()
    store: str = ""

    @property
    def here(self) -> bool:
        """Whether what lies at its path is that directory, or took its place on the same machine.

        To take another machine's directory for this one is worse than to ask. So one machine has one name and one id;
        many containers have no id, or that of their image. One that comes back under another name, as containers do, is
        known by the directory itself, as long as the system beneath runs.
        """
        if self.is_at(self.path):
            return True
        return self.host == socket.gethostname() and not (self.machine and (machine() or self.machine) != self.machine)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether this is the very directory, as long as the system runs, whatever it and the machine are called."""
        return bool(self.boot and self.inode) and (self.boot, self.inode) == (boot(), _inode(path))

    def is_of(self, path: str | os.PathLike[str]) -> bool:
        """Whether the directory of this path on this machine is meant."""
        return self.path == os.fspath(path) and self.here

    def known_by(self, branch: Branch) -> str:
        """What stands in the directory while files are being put back: there it is proven, wherever it was moved to."""
        return f"{branch.uuid.hex()} {self.to.hex()}"


def _inode(path: str | os.PathLike[str]) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, birth_ns(path)  # a number is given again when its directory is gone


def claims(view: View) -> dict[str, Claim]:
    """The directories that a store knows, by the uuids of branches in hexadecimal."""
    found = view.facts().items()
    return {name[len(WORKSPACE) :]: _claim(value) for name, value in found if name.startswith(WORKSPACE)}


def _claim(value: bytes) -> Claim:
    said = read_body(value, "table store, the row of a workspace")
    try:
        return Claim(
            said["path"], said["host"], said.get("to", b""), said.get("from", b""),
            said.get("machine", ""), said.get("boot", ""), tuple(said.get("inode", ())), said.get("store", ""),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise malformed("table store, the row of a workspace") from error


def claim_of(agent: Agent) -> Claim | None:
    """The directory of an agent's branch."""
    value = agent._db.view.fact(WORKSPACE + agent._branch.uuid.hex())
    return _claim(value) if value is not None else None


def claim_on(agent: Agent, path: Path, to: bytes = b"", at: bytes = b"") -> Claim:
    """A directory as it is here and now."""
    engine = agent._db.engine
    store = os.path.realpath(engine.layout.path) if isinstance(engine, Sqlite) else ""
    return Claim(str(path), socket.gethostname(), to, at, machine(), boot(), _inode(path), store)


class WorkspaceInfo(Struct, frozen=True):
    """The directory of a branch, and the name of the machine that has it.

    ``target``: a process ended while it put back the files of this checkpoint; who opens the branch next finishes it.
    """

    agent: str
    branch: str
    path: str
    host: str
    target: str = ""

    @property
    def half_way(self) -> bool:
        """Whether files are still to be put back there."""
        return bool(self.target)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return asdict(self)


def infos(view: View) -> list[WorkspaceInfo]:
    """All directories of branches that are there."""
    found = [WorkspaceInfo(agent, branch, one.path, one.host, one.to.hex()) for agent, branch, one in owned(view)]
    return sorted(found, key=lambda one: (one.agent, one.branch))


def owned(view: View) -> Iterator[tuple[str, str, Claim]]:
    """The directories of branches that are there, with the names of agent and branch."""
    known = claims(view)
    for agent in view.agents():
        for branch in view.branches(agent.a):
            if (one := known.get(branch.uuid.hex())) is not None:
                yield agent.name, branch.name, one


def claim(change: Change, branch: Branch, made: Claim) -> None:
    """Let a directory belong to a branch."""
    said: dict[str, Any] = {"path": made.path, "host": made.host}
    said |= {name: value for name in ("machine", "boot", "store") if (value := getattr(made, name))}
    said |= {"inode": list(made.inode)} if made.inode else {}
    said |= {"to": made.to, "from": made.at} if made.to else {}
    change.set_fact(WORKSPACE + branch.uuid.hex(), body_bytes(said))


def check_place(agent: Agent, root: str | os.PathLike[str], branch: str = "") -> None:
    """Raise where a directory can be no workspace. Of one in another's, that one's rollback would take files away.

    ``branch``: the one of this agent that is to have it, and may have had another.
    """
    path = Path(os.path.realpath(root))
    if path == path.parent or in_store(path):
        what = "the whole file system" if path == path.parent else "a Holdfast store, or lies in one"
        raise BadOption(f"{path} is {what}, and so no workspace", hint="Choose a directory of its own.")
    for name, on, one in owned(agent._db.view):
        other = Path(one.path)
        if (name, on) == (agent.name, branch) or not one.here or not other.is_dir():
            continue
        if other in path.parents or path in other.parents:
            how = "lies in" if other in path.parents else "holds"
            raise BadOption(
                f"{path} {how} {other}, the workspace of {name}@{on}: each would change the other's files",
                hint="Choose a directory beside it.",
            )


def remembered(agent: Agent) -> Path | None:
    """The directory that a branch had last on this machine, if it is there."""
    known = claim_of(agent)
    if known is None:
        if agent.head is not None and agent.head.has_files:
            log.warning(
                "%s: its checkpoints have files, and it has no workspace (any more): what changes in them is not saved."
                " Open it with workspace=DIRECTORY, or with workspace=None if that is meant.",
                agent.name,
            )
        return None
    path = Path(known.path)
    if why := _away(agent, known):
        half = " Files are still to be put back there." if known.to else ""
        log.warning(
            "%s: %s.%s Its files are not saved, and a rollback leaves them as they are. Open it with"
            " workspace=DIRECTORY, or with workspace=None if that is meant.", agent.name, why, half,
        )  # fmt: skip
        return None
    return path


def _away(agent: Agent, known: Claim) -> str:
    """Why a directory is not taken for the agent's by itself; empty: it is."""
    engine = agent._db.engine
    path, store = Path(known.path), Path(known.store, "store.db")
    if isinstance(engine, Sqlite) and known.store and store.exists() and not store.samefile(engine.layout.catalog):
        return f"this store is a copy of {known.store}, and {path} is the workspace of that one"
    if not known.here and not (known.to and restore.whose(path) == known.known_by(agent._branch)):
        return f"its workspace is {path} on {known.host}, and this cannot be shown to be that machine"
    return "" if path.is_dir() else f"its workspace {path} is not there"


def unmoved(agent: Agent) -> str:
    """Why no file moves where the agent goes back; empty: they do, or it has none."""
    if getattr(agent, "_workspace", None) is not None:
        return ""
    known = claim_of(agent)
    if known is None:
        return "it has no workspace"
    return _away(agent, known) or ("" if agent._writer is None else "it was opened without its workspace")


def half_way_elsewhere(agent: Agent, there: Claim, path: Path) -> BadOption:
    where = f"{there.path}, its workspace until now" if there.here else f"{there.path} on {there.host}"
    if there.here and os.path.isdir(there.path):
        hint = "Open the agent with that one first."
    else:
        hint = (
            "Open the agent where that directory is; if it was moved, with that one. If it is gone, open the agent with"
            f" workspace=None, write the files elsewhere (agent.export_workspace('id:{there.to.hex()[:12]}', NEW)),"
            " close it, and open it with workspace=NEW."
        )
    return BadOption(
        f"files of {agent.name!r} are still to be put back in {where}, and {path} cannot be shown to be that directory",
        hint=hint,
    )


def half_way_for_another(agent: Agent, path: Path, others: Collection[str]) -> BadOption:
    """Also where the store does not know of it (any more)."""
    uuid = restore.whose(path).partition(" ")[0]
    for row in agent._db.view.agents():
        for branch in agent._db.view.branches(row.a):
            name = branch.uuid.hex()
            if name != agent._branch.uuid.hex() and (name == uuid or name in others):
                return BadOption(
                    f"the files in {path} are half-way: they were being put back for {row.name}@{branch.name}",
                    hint="Open that one first.",
                )
    mine = uuid == agent._branch.uuid.hex()
    whose = (
        f"{agent.name}, and only another copy of this store knows of it"
        if mine
        else "another branch, or by another store"
    )
    return BadOption(
        f"the files in {path} are half-way: they were being put back for {whose}",
        hint=f"Open that one first. If nobody can, look into {path / STAGING}: what was displaced lies there. Then"
        " remove that directory; agent.restore_workspace() puts the files of the newest checkpoint back.",
    )
