"""The workspace: an agent's directory, saved with its state and put back with it.

Owns what a checkpoint asks of the directory, and the intent to put files back. Which directory it is, is ``claims``'
business, scanning ``scan``'s, moving files ``restore``'s. What always holds: no file is taken away whose content is
not in a checkpoint; that files are to be put back is durable, in the transaction that moves the state, before the first
of them moves, and from then on there is one way: whoever opens the branch next finishes it; a tree that comes out of a
store is checked before anything is done with it.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.agent import history
from holdfast.agent.layers import FILES, MARKED, WORKSPACE, Looked
from holdfast.codec.diff import tree_hunks
from holdfast.codec.tree import Tree as Told
from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, Damaged, DiskFull, HoldfastError, WorkspaceBlocked
from holdfast.process import restore
from holdfast.process.changes import TEXT_MAX_BYTES, FileChange, Read, compare
from holdfast.process.chunks import Incoming, drain
from holdfast.process.claims import (
    Claim,
    check_place,
    claim,
    claim_of,
    claim_on,
    claims,
    half_way_elsewhere,
    half_way_for_another,
    owned,
    remembered,
)
from holdfast.process.folders import Folders, opened
from holdfast.process.ignore import RULES, RULES_MAX_BYTES, left_out
from holdfast.process.scan import Scan, Scanner
from holdfast.process.trees import (
    Content,
    Difference,
    Entry,
    Tree,
    chunks_of,
    decode_entries,
    differences,
    encode_changes,
    encode_path,
    equal,
    leaves,
    same,
    shown,
)
from holdfast.store.changes import NewPack
from holdfast.store.sqlite import Sqlite

if TYPE_CHECKING:
    from holdfast.agent.agent import Agent
    from holdfast.agent.checkpoint import Checkpoint
    from holdfast.codec.state import State
    from holdfast.store.changes import Change
    from holdfast.store.rows import Point

log = logging.getLogger("holdfast.process")

MEMORY_MAX_BYTES = 64 * 2**20
MEMORIES_MAX = 32
"""How long what a scan remembers may be to be kept, and how many such files stay in one folder."""

PAST = 4
"""So many trees before the newest are kept, each with the nodes that are its own: most go back to one of these."""

FRESH_MIN, FRESH_SHARE = 64, 16
"""So much must have been read, and this part of all files, before what a scan remembers is kept anew."""

NAMED_MAX = 5
"""How many files a message names."""

_OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}|new-\w+")


class _Known(NamedTuple):
    """What was told of the files: a tree, and its entries. ``differing``: where the tree ``before`` may have others."""

    tree: Told | None
    entries: dict[bytes, Entry]
    before: Told | None = None
    differing: Collection[bytes] = ()


class Workspace:
    """The directory of one agent on one branch: a layer of its checkpoints."""

    def __init__(self, agent: Agent, root: str | os.PathLike[str], ignore: Iterable[str] = ()) -> None:
        self.path = Path(os.path.realpath(root))
        self._agent = agent
        self._scanner = Scanner(self.path, ignore=ignore)
        self._lock = threading.Lock()  # a scanner is not for several threads
        self.returning: Return | None = None  # files that are still to be put back
        self._recalled = False
        self._known = _Known(None, {})
        self._past: deque[Told] = deque(maxlen=PAST)  # whoever goes back finds them (``State.past``)
        self._scanned: Told | None = None  # the tree that the last scan compared with, if that came to its end

    # -- saving -----------------------------------------------------------------------------------------------

    def look(self) -> list[Looked]:
        """What differs from what was told. The contents are in a pack, which is durable, and which nothing names."""
        known = self._entries()  # before the lock: whoever has the document's may be waiting for it
        with self._lock:
            self._settle()
            made = Incoming(self._agent._db)
            try:
                found = self._scan(known, made)
            except BaseException:
                made.discard()
                raise
        return [*self._differing(found, made.packs, known.tree), *self._marks(found.marked)]

    def _differing(self, found: Scan[None], made: list[NewPack], tree: Told | None) -> list[Looked]:
        if not found.changed and not found.gone and tree is not None:
            return []  # also where it is empty, the layer has to be there
        items, named = encode_changes(found.changed, found.gone), chunks_of(found.changed.values())
        return [Looked(FILES, items, tuple(made), frozenset(named), tree)]

    def _marks(self, marked: Mapping[bytes, str]) -> list[Looked]:
        """Entries that may not be what was there at any moment."""
        document = self._agent._document
        before = document.apart(MARKED)
        if MARKED not in document.told.sections and not marked:
            return []
        wanted: dict[bytes, bytes | None] = {encode_path(path): encode(why) for path, why in marked.items()}
        there = dict(_pairs(before.all(document.told.fetch))) if before is not None else {}
        if wanted == there and before is not None:
            return []
        return [Looked(MARKED, {**dict.fromkeys(there), **wanted} if wanted else None)]

    def changed(self) -> bool:
        """Whether the directory differs from what was told."""
        known = self._entries()
        with self._lock:
            self._settle()
            found = self._scan(known, drain)
        return bool(found.changed or found.gone)

    def now(self) -> _Side | None:
        """The files as they are, and a way to read them; None where none were told yet."""
        document = self._agent._document
        known = self._entries()
        if known.tree is None:
            return None
        with self._lock:
            found = self._scan(known, drain)
        paths = {id(entry): path for path, entry in found.changed.items()}

        def read(entry: Entry) -> bytes:
            if id(entry) not in paths:
                return _reading(self._agent)(entry)
            with Folders(self.path) as folders:
                above, name = folders.parent(paths[id(entry)])
                with opened(name, os.O_RDONLY, above) as fd, open(fd, "rb", closefd=False) as file:
                    return file.read(TEXT_MAX_BYTES)

        return _Side(known.tree, document.told.fetch, read, known.entries, found.changed, found.gone)

    def _settle(self) -> None:
        """What was not put back, because there was no room for example, is not saved in the place of what should be."""
        if self.returning is not None:
            self.returning.go()

    def _scan(self, known: _Known, into: Any) -> Scan[None]:
        if not self._recalled:
            self._recalled = True
            self._recall()
        before, self._scanned = self._scanned, None
        differing: Collection[bytes] | None = None
        if before is not None and before in (known.tree, known.before):
            differing = known.differing if before is known.before else ()
        found = self._scanner.scan(known.entries, into=into, differing=differing)
        self._scanned = known.tree
        if self._agent._writer is not None and self._scanner.fresh >= max(FRESH_MIN, found.paths // FRESH_SHARE):
            self._keep()
        return found

    # -- what a scan remembers --------------------------------------------------------------------------------

    def _memory(self) -> Path:
        """Where it lies for the next process: beside a store in a directory, for others in the user's cache folder."""
        db = self._agent._db
        if isinstance(db.engine, Sqlite):
            folder = db.engine.layout.path
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            folder = (base if base.is_absolute() else Path.home() / ".cache") / "holdfast"
        return folder / "scans" / f"{db.uuid.hex()}-{self._agent._branch.uuid.hex()}"

    def _recall(self) -> None:
        """Take over what the last process remembered. Whatever is wrong with it, files are just read again."""
        with suppress(OSError, RuntimeError, HoldfastError):
            file = self._memory()
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as kept:
                data = kept.read(MEMORY_MAX_BYTES + 1)
            if len(data) <= MEMORY_MAX_BYTES:
                self._scanner.remember(self._agent._db.cipher.unbox("scan", file.name, data))

    def _keep(self) -> None:
        """Keep what is remembered. It holds names of files: so it is boxed as everything else of the store is."""
        with suppress(OSError, RuntimeError):
            data = self._scanner.memory()
            if len(data) > MEMORY_MAX_BYTES:
                return
            file = self._memory()
            if file.parent.is_symlink():
                return
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, fresh = tempfile.mkstemp(dir=file.parent, prefix="new-")
            with open(fd, "wb") as kept:
                kept.write(self._agent._db.cipher.box("scan", file.name, data))
            os.replace(fresh, file)  # not flushed: what a crash leaves of it proves itself, or is not used
            branches = claims(self._agent._db.view)
            there = [one for one in file.parent.iterdir() if _OURS.fullmatch(one.name)]
            there.sort(key=lambda one: one.lstat().st_mtime, reverse=True)
            mine = self._agent._db.uuid.hex()
            for number, one in enumerate(there):
                store, _, branch = one.name.partition("-")
                if number >= MEMORIES_MAX or (store == mine and branch not in branches):
                    one.unlink(missing_ok=True)

    def _entries(self) -> _Known:
        """What was told. Only what is another since the last time is read."""
        document = self._agent._document
        with document.lock:
            tree, before = document.apart(FILES), self._known.tree
            if tree is not before:
                if before is not None:
                    self._past.append(before)
                self._known = self._read(tree, document.told) if tree is not None else _Known(None, {})
            return self._known

    def _read(self, tree: Told, told: State) -> _Known:
        told.trees.add(tree)
        before, known = self._known.tree, self._known.entries
        if before is not None:
            with suppress(Damaged):  # what only that one had may have been forgotten since
                old, new = _apart(before, tree, told.fetch)
                known = known.copy()  # whoever scans has the one before
                for path in old.keys() - new.keys():
                    known.pop(path, None)
                return _Known(tree, known | new, before, old.keys() | new.keys())
        return _Known(tree, decode_entries(tree.all(told.fetch)))

    # -- going back -------------------------------------------------------------------------------------------

    def going(self, wanted: State, id: bytes) -> Return | None:
        """What has to be done to the files so that they are those of another checkpoint; None: nothing."""
        document = self._agent._document
        if FILES not in wanted.sections:
            return None  # nothing was saved of them then: they stay
        tree, now = wanted.section(FILES), document.apart(FILES)
        if now is not None and now.root == tree.root:
            return None
        old, new = _apart(now, tree, wanted.fetch)
        point = self._agent._db.view.find(id) if id else None
        found = {path: Difference(old.get(path), new.get(path)) for path in old.keys() | new.keys()}
        found = {path: one for path, one in found.items() if not equal(one.before, one.after)}
        staying = _staying(
            self._agent,
            self.path,
            found,
            lambda: decode_entries(now.all(wanted.fetch)) if now is not None else {},
            lambda: decode_entries(tree.all(wanted.fetch)),
        )
        for path, why in staying.items():
            log.warning("%s: %s stays: %s leaves it out", self._agent.name, shown(path), why)
            del found[path]
        if not found:
            return None
        line = point.n if point is not None else self._agent._check_writer().firm.head
        made = Return(self, found, trusted=_trusted(self._agent, found, tree.root, line))
        made.check()
        return made

    def put_back(self) -> bool:
        """Put the files of the newest checkpoint back, and keep those that are there in one that is beside it."""
        return self._agent._apart(self._put_back)

    def _put_back(self) -> bool:
        agent = self._agent
        writer, document = agent._check_writer(), agent._document
        with writer.quiet(), writer.still(document) as firm:
            looked = self.look()
            if not looked:
                return False
            if not firm.head:
                raise BadOption(f"{agent.name!r} has no checkpoint yet", hint="Take one: agent.checkpoint().")
            before, head = document.told.sections, agent._db.view.point(firm.head)
            why = "these files were in the way of those of the newest checkpoint"
            kept = writer.beside(document, "files before they were put back", why, "restore", looked=looked)
            going = self.going(history.state_of(agent._db.now, head), head.id)
            document.take_back(before, document.told.unacknowledged)
            if going is not None:
                agent._db.change(lambda change: going.intend(change, head.id, kept), firm.b)
                going.go()
            return True

    def is_at(self, root: str | os.PathLike[str] | None) -> bool:
        return root is not None and Path(os.path.realpath(root)) == self.path

    def finish(self) -> bool:
        """Finish what a process that has ended left half-way. Answers whether there was something."""
        agent = self._agent
        db = agent._db
        known = claim_of(agent)
        if known is None or not known.to:
            return False
        log.info("%s: finishing to put back files in %s", agent.name, self.path)
        target = db.view.find(known.to)
        if target is None:  # lost in a repair: what is there is kept, and the files of the newest one come back
            db.change(lambda change: claim(change, agent._branch, known._replace(to=b"", at=b"")))
            return self.put_back()
        foreign = self._rest(known, target).go()
        if foreign and agent._branch.id == target.id:  # otherwise they are as good as any other change
            agent._secure("files that were changed before they were put back")
            agent._go_back(target)
        return True

    def _rest(self, known: Claim, target: Point) -> Return:
        """What a process that has ended meant to do."""
        agent = self._agent
        before = agent._db.view.find(known.at) if known.at else None
        wanted = tree_of(agent, target)
        was = tree_of(agent, before) if before is not None else {}
        found = dict(differences(was, wanted))
        for path in _staying(agent, self.path, found, lambda: was, lambda: wanted):
            del found[path]
        root = dict(target.manifest.sections)[FILES]
        return Return(self, found, trusted=_trusted(agent, found, root, target.n))

    def is_that_of(self, known: Claim) -> bool:
        """Whether this is the directory in which files are still to be put back, or needs nothing of that any more."""
        agent = self._agent
        if known.is_of(self.path) or known.is_at(self.path):
            return True
        if restore.whose(self.path) == known.known_by(agent._branch):
            return True
        target = agent._db.view.find(known.to)
        return target is not None and restore.arrived(self.path, self._rest(known, target).differences)


class Return:
    """Files on their way to another checkpoint's. ``trusted``: its links may lead out of the directory."""

    def __init__(self, workspace: Workspace, differing: dict[bytes, Difference], *, trusted: bool) -> None:
        self.differences = differing
        self._workspace = workspace
        self._trusted = trusted

    def check(self) -> None:
        """Raise if a file cannot be put back, before anything moves: something is in the way, or it is damaged."""
        packs, view = self._workspace._agent._db.packs, self._workspace._agent._db.view
        coming = [after for before, after in self.differences.values() if not same(before, after)]
        contents = [one.content for one in coming if one is not None and isinstance(one.content, Content)]
        for _ in packs.read(view, [name for content in contents for name in content.chunks]):
            pass  # each is proven by its digest
        blocked = restore.obstacles(self._workspace.path, self.differences, leaving_links=self._trusted)
        if blocked:
            raise blocked_by(self._workspace.path, blocked, "nothing was changed")

    def intend(self, change: Change, to: bytes, at: bytes) -> None:
        """Note that it has to be done, in the transaction that moves the state."""
        agent = self._workspace._agent
        claim(change, agent._branch, claim_on(agent, self._workspace.path, to, at))

    def go(self) -> bool:
        """Do it. Answers whether somebody else changed files meanwhile: they are as he left them."""
        workspace, agent = self._workspace, self._workspace._agent
        packs, view = agent._db.packs, agent._db.view
        workspace.returning = self
        meant = claim_of(agent)
        try:
            done = restore.restore(
                workspace.path, self.differences, lambda names: packs.read(view, names), leaving_links=self._trusted,
                known_by=meant.known_by(agent._branch) if meant is not None and meant.to else "",
            )  # fmt: skip
        except DiskFull as error:  # the state has moved
            raise DiskFull(
                f"there is no room to put files back in {workspace.path}: they are as they were,"
                f" and {agent.name} is at its checkpoint already",
                hint="Free some room. The files follow with the next checkpoint, or when the agent is opened again.",
            ) from error
        agent._db.change(lambda change: claim(change, agent._branch, claim_on(agent, workspace.path)))
        workspace.returning = None
        if done.blocked:
            raise blocked_by(workspace.path, done.blocked, "all other files were put back")
        if done.foreign:
            named = ", ".join(shown(path) for path in sorted(done.foreign)[:NAMED_MAX])
            log.warning("%s: %d changed by somebody else meanwhile, and kept: %s", agent.name, len(done.foreign), named)
        return bool(done.foreign)


def blocked_by(path: Path, blocked: Mapping[bytes, str], what: str) -> WorkspaceBlocked:
    first = min(blocked)
    more = f" (and {len(blocked) - 1} more)" if len(blocked) > 1 else ""
    return WorkspaceBlocked(
        f"{path}: {shown(first)} cannot be put back: {blocked[first]}{more}; {what}",
        paths=tuple(sorted(blocked)),
        hint="Move what is in the way, then try again.",
    )


# -- trees of the past ---------------------------------------------------------------------------------------------


def tree_of(agent: Agent, point: Point) -> dict[bytes, Entry]:
    """The files of a checkpoint. Raises if it has none."""
    state = history.state_of(agent._db.now, point)
    if FILES not in state.sections:
        raise BadOption(
            f"checkpoint {point.id.hex()[:12]} has no files: it was made without a workspace",
            hint="Open the agent with workspace=DIRECTORY, then take a checkpoint.",
        )
    return decode_entries(state.section(FILES).all(state.fetch))


def marks_of(agent: Agent, point: Point) -> dict[bytes, str]:
    """The paths of a checkpoint's files that may not be what was there at any moment, and why."""
    state = history.state_of(agent._db.now, point)
    if MARKED not in state.sections:
        return {}
    pairs = dict(_pairs(state.section(MARKED).all(state.fetch)))
    return {decode(path): str(decode(why)) for path, why in pairs.items()}


def export(agent: Agent, point: Point, directory: str | os.PathLike[str], *, links: bool) -> Path:
    """Write the files of a checkpoint into a new directory."""
    packs, view = agent._db.packs, agent._db.view
    path = Path(os.path.abspath(directory))
    tree = tree_of(agent, point)
    links = links or _trusted(agent, tree, dict(point.manifest.sections)[FILES], point.n)
    done = restore.export(path, tree, lambda names: packs.read(view, names), leaving_links=links)
    if done.blocked:
        raise blocked_by(path, done.blocked, "nothing was written")
    return path


def inner_path(agent: Agent, path: str) -> str:
    """A path as a tree has it: relative to the workspace, also where somebody wrote ./a, or all of it."""
    known, path = claim_of(agent), os.path.normpath(path)
    return path.removeprefix(os.path.join(known.path, "")) if known is not None else path


def content_of(agent: Agent, point: Point, path: str) -> bytes:
    """The content of one file of a checkpoint; a link's is its target."""
    entry = tree_of(agent, point).get(os.fsencode(inner_path(agent, path)))
    if entry is not None and entry.content is None:
        raise BadOption(f"{path!r} is a directory", hint="See agent.files(), or `holdfast show --files`.")
    if entry is None:
        raise BadOption(
            f"checkpoint {point.id.hex()[:12]} has no file {path!r}",
            hint="See agent.files(), or `holdfast show --files`.",
        )
    return _reading(agent)(entry)


def _reading(agent: Agent) -> Read:
    def read(entry: Entry) -> bytes:
        content = entry.content
        if not isinstance(content, Content):
            return content or b""
        return b"".join(agent._db.packs.read(agent._db.view, content.chunks))

    return read


def between(
    agent: Agent, workspace: Workspace | None, old: Checkpoint | None, new: Checkpoint | None
) -> list[FileChange]:
    """What differs between the files of two checkpoints; None: those that are there now, as far as one can see them."""
    if old is None and agent._writer is None and (root := remembered(agent)) is not None and not restore.halfway(root):
        workspace = Workspace(agent, root)  # only to look at: what its writer would do to the files
    one, two = (_side(agent, workspace, side) for side in (old, new))
    if one is None or two is None:
        return []  # nothing is known of one of them
    read = one.read, two.read
    mine, other = _apart(one.tree, two.tree, two.fetch)
    for side, here, there in ((one, mine, other), (two, other, mine)):
        for path in (*side.changed, *side.gone):
            if path not in here and path not in there and path in side.known:
                there[path] = side.known[path]  # both trees have it, and the directory has another one
            here.pop(path, None)
        here.update(side.changed)
    if old is None and new is not None:  # what would become of those that are there
        found = {path: Difference(mine.get(path), other.get(path)) for path in mine.keys() | other.keys()}
        there = {path: entry for path, entry in one.known.items() if path not in one.gone} | dict(one.changed)
        root = workspace.path if workspace is not None else None
        staying = _staying(agent, root, found, lambda: there, lambda: decode_entries(two.tree.all(two.fetch)))
        kept = [FileChange(path, None, other.pop(path), read, why) for path, why in staying.items() if path in other]
        for path in staying:
            mine.pop(path, None)
        return sorted([*compare(mine, other, read), *kept], key=lambda change: change.path)
    return compare(mine, other, read)


class _Side(NamedTuple):
    """Files that are compared: a tree, and how those that are there now differ from it."""

    tree: Told
    fetch: Any
    read: Read
    known: Tree = MappingProxyType({})
    changed: Tree = MappingProxyType({})
    gone: Collection[bytes] = ()


def _side(agent: Agent, workspace: Workspace | None, one: Checkpoint | None) -> _Side | None:
    if one is None and workspace is not None:
        return workspace.now()
    one = one if one is not None else agent.head
    if one is None or not one.has_files:
        return None
    state = history.state_of(agent._db.now, one._current())
    return _Side(state.section(FILES), state.fetch, _reading(agent))


def attach(agent: Agent, root: str | os.PathLike[str], ignore: Iterable[str] = ()) -> Workspace:
    """Let an agent have a directory. What is there stays, and goes into the next checkpoint."""
    made = Workspace(agent, root, ignore)
    if not made.path.is_dir():
        raise BadOption(f"{made.path} is no directory", hint="Make it first.")
    db, mine = agent._db, agent._branch.uuid.hex()
    known = claims(db.view)
    others = [name for name, one in known.items() if name != mine and one.is_of(made.path)]
    there = known.get(mine)
    if there is None or not there.is_of(made.path):
        check_place(agent, made.path, agent.branch_name)
    this = claim_on(agent, made.path)
    if there is not None and there.to:
        if not made.is_that_of(there):
            raise half_way_elsewhere(agent, there, made.path)
        this = this._replace(to=there.to, at=there.at)
    if any(known[name].to for name in others) or (restore.halfway(made.path) and not this.to):
        raise half_way_for_another(agent, made.path, others)
    agent._check_writer().layers.append(made)
    for name, branch, one in owned(db.view) if others else ():
        if one.is_of(made.path) and (name, branch) != (agent.name, agent.branch_name):
            log.warning(
                "%s: %s was the workspace of %s@%s, which has none from now on: a directory belongs to one branch."
                " That one's changes to files are not saved any more.", agent.name, one.path, name, branch,
            )  # fmt: skip
    if others or there != this:

        def take(change: Change) -> None:
            for name in others:
                change.set_fact(WORKSPACE + name, None)
            claim(change, agent._branch, this)

        db.change(take)
    try:
        made.finish()
    except BaseException:
        agent._check_writer().layers.remove(made)
        raise
    return made


def _apart(old: Told | None, new: Told, fetch: Any) -> tuple[dict[bytes, Entry], dict[bytes, Entry]]:
    """The entries of two trees without those that both have in the same nodes."""
    if old is None:
        return {}, decode_entries(new.all(fetch))
    hunks = tree_hunks(old, new, fetch)
    return (
        decode_entries([item for hunk in hunks for item in hunk.old]),
        decode_entries([item for hunk in hunks for item in hunk.items]),
    )


def _trusted(agent: Agent, paths: Mapping[bytes, Entry | Difference], root: bytes, line: int) -> bool:
    """Whether links of some files may lead out: no checkpoint of this line has brought the same files from elsewhere.

    That one was made here says nothing: without a workspace a checkpoint carries along the files that it got.
    """
    after = ((path, one.after if isinstance(one, Difference) else one) for path, one in paths.items())
    if not any(one is not None and isinstance(one.content, bytes) and leaves(path, one.content) for path, one in after):
        return True
    return all(
        point.row.b or dict(point.manifest.sections).get(FILES) != root
        for point in agent._db.view.walk(line, over=True)
    )


def _staying(
    agent: Agent,
    root: Path | None,
    found: Mapping[bytes, Difference],
    now: Callable[[], Tree],
    wanted: Callable[[], Tree],
) -> dict[bytes, str]:
    """Those that stay as they are, since rules leave them out, and whose rules do: those of either tree.

    Of what the other tree's own rules leave out, nothing is in that checkpoint: it does not say that they go, and what
    is there now was saved only because the rules were others. Of what the rules of now leave out, what lies in the
    directory is in no checkpoint. The rules are those of the trees, so that after a kill the answer is the same.
    """
    if not any(os.path.basename(path).decode(errors="replace") in RULES for path in found):
        return {}  # what is there was looked at with the same rules
    going = [
        (os.fsdecode(path), before.content is None)
        for path, (before, after) in found.items()
        if before is not None and after is None
    ]
    coming = [
        (os.fsdecode(path), after.content is None)
        for path, (before, after) in found.items()
        if before is None and after is not None and root is not None and _lies(root, path)
    ]
    staying = dict.fromkeys(left_out(going, _rules(agent, wanted())), "a rule of that checkpoint") if going else {}
    if coming:
        staying |= dict.fromkeys(left_out(coming, _rules(agent, now())), "a rule that counts now")
    return {os.fsencode(path): why for path, why in staying.items()}


def _lies(root: Path, path: bytes) -> bool:
    """Whether something lies at a path, and no link leads there."""
    above, name = os.path.split(os.path.join(os.fsencode(root), path))
    return os.path.realpath(above) == above and os.path.lexists(os.path.join(above, name))


def _rules(agent: Agent, tree: Tree) -> dict[str, dict[str, str]]:
    """What files of rules in a tree say, by directory and by name."""
    texts: dict[str, dict[str, str]] = {}
    for path, entry in tree.items():
        above, _, name = os.fsdecode(path).rpartition("/")
        if name in RULES and isinstance(entry.content, Content):
            said = b""
            for piece in agent._db.packs.read(agent._db.view, entry.content.chunks):
                said += piece
                if len(said) >= RULES_MAX_BYTES:
                    break
            texts.setdefault(above + "/" * bool(above), {})[name] = os.fsdecode(said[:RULES_MAX_BYTES])
    return texts


def _pairs(items: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    from holdfast.codec.blocks import key_of

    for item in items:
        key = key_of(item)
        yield key, item[len(key) :]
