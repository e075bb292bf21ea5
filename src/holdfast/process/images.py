"""Images in a store: freezing a process into a checkpoint, and bringing it back from one.

Owns where images lie, which of them stay, whom they are believed from, and what a thaw does to the agents that the
process was writing. How a process is saved and restored is the business of ``image`` and ``thaw``. What always
holds: an image is a layer of a checkpoint whose state is that of the same moment; it lies with an agent of its own,
``images/NAME``, so that it is kept, and leaves the store, by rules of its own; nothing of an image runs unless this
machine made it, or somebody said that it is trusted, and every byte was proven.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import asdict

from holdfast.agent import history
from holdfast.agent.agent import Agent
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.layers import IMAGE, THAW, Looked
from holdfast.agent.names import IMAGES, full_name
from holdfast.agent.policy import Policy
from holdfast.agent.store import Store
from holdfast.errors import (
    BadOption,
    HoldfastError,
    NotAnImage,
    NotFrozen,
    NotThawed,
    UnknownAgent,
    UntrustedImage,
    command,
)
from holdfast.process import cooperation, criu, image, restore, thaw
from holdfast.process.chunks import IMAGE_AVERAGE_BYTES, Incoming
from holdfast.process.image import DESCRIPTION, Description, Look, memory_folder
from holdfast.process.scan import Scanner
from holdfast.process.thaw import Thawed
from holdfast.process.trees import (
    PERMISSIONS,
    Content,
    Entry,
    Tree,
    chunks_of,
    content_digest,
    decode_entries,
    encode_changes,
    encode_entry,
    encode_path,
)
from holdfast.store.rows import body_bytes, read_body

if TYPE_CHECKING:
    from holdfast.store.catalog import View
    from holdfast.store.changes import Change
    from holdfast.store.rows import Branch

log = logging.getLogger("holdfast.process")

KEEP = 3
"""How many images of a process stay, unless somebody says otherwise."""

PROOF = b"proof"
"""The link in an image that says who made it: its target speaks of all files."""

DESCRIPTION_MAX_BYTES = 16 * 2**20
"""The longest description that is read: one line for each open file."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A process that was saved: where, how long it stood still, and what to know.

    ``pause_s`` is by CRIU's clock, and includes copying its open files; ``released_s`` is how long a Holdfast process
    was without its stores; ``seconds`` is from the call until all of it was durable.
    """

    agent: str
    checkpoint: Checkpoint
    pid: int
    began: int
    program: str
    pause_s: float
    released_s: float
    seconds: float
    bytes: int
    new_bytes: int
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "agent": self.agent, "checkpoint": self.checkpoint.id, "pid": self.pid, "program": self.program,
            "pause_s": self.pause_s, "released_s": self.released_s, "seconds": self.seconds, "bytes": self.bytes,
            "new_bytes": self.new_bytes, "notes": self.notes,
        }  # fmt: skip


def name_of(agent: str) -> str:
    """The agent that has the images of another one, or of a program."""
    return agent if agent.startswith(IMAGES) else f"{IMAGES}{agent}"


def freeze_process(
    store: Store,
    target: int | str,
    *,
    agent: str | None = None,
    tcp: image.Tcp = "close",
    files: image.Files = "save",
    then: Literal["go on", "stop", "end"] = "go on",
    keep: int = KEEP,
    wait_s: float = cooperation.DEADLINE_S,
) -> Frozen:
    """Save a process whole into the store: one of that number, or the one that writes the agent of that name.

    ``agent`` is what its images are called by; without it, the agent that it writes, or the program's name. ``tcp``
    says what becomes of established connections when it comes back, ``files`` whether open files are saved and put
    back, ``then`` what becomes of the process. ``keep`` images stay. A Holdfast process is asked to let go of its
    stores, and gets ``wait_s`` to finish what it does outside.
    """
    begun = time.monotonic()
    pid = target if isinstance(target, int) else writer_of(store, target)
    image.key(make=True)  # before anything stands still
    with ExitStack() as stack:
        look = Look(pid)
        standing = None
        if look.stores() or cooperation.listens(pid):
            standing = stack.enter_context(cooperation.standing(pid, look.uid, wait_s))
        released = time.monotonic()
        # Of a connection that is kept, the other side must not see the end: so CRIU itself ends the process.
        ended = then == "end" and tcp == "keep"
        how: criu.Then = "run" if then == "go on" else "end" if ended else "stop"
        with criu.undisturbed() as interrupts:
            taken = stack.enter_context(image.taken(pid, tcp=tcp, files=files, then=how, standing=standing))
        try:
            if interrupts:
                signal.raise_signal(interrupts[0])
            if standing is not None and then == "go on":
                standing.go_on()
            released_s = time.monotonic() - released if standing is not None else 0.0
            name = agent or (target if isinstance(target, str) else "") or _called(taken.description)
            saved = save(store, name, taken.folder, taken.description)
        except BaseException:
            if ended:
                with thaw.alone() as lock:
                    thaw.bring_back(taken.folder, taken.description, lock)
            elif then != "go on":
                image.go_on(pid)
            raise
        seconds = time.monotonic() - begun
        if then == "end":
            image.end(pid, taken.description.began)
        if keep:
            store.retain(Policy(last=keep), [name_of(name)])
    about = taken.description
    return Frozen(
        name, saved[0], pid, about.began, about.program, taken.pause_s, released_s, seconds, *saved[1:], taken.notes
    )


def writer_of(store: Store, name: str) -> int:
    """The process that writes an agent now. Raises if there is none on this machine."""
    for holder in store._db.leases.holders():
        if holder.get("agent") == name and holder.get("host") == os.uname().nodename:
            pid = holder.get("pid")
            if type(pid) is int:
                return pid
    raise NotFrozen(f"no process on this machine writes {name!r}", hint="Name the process: `holdfast freeze PID`.")


def _called(description: Description) -> str:
    """What the images of a program are called by."""
    if description.agents:
        return description.agents[0][1]
    words = [Path(word).name for word in description.command if not word.startswith("-")]
    script = next((word for word in words[1:2] if word.endswith(".py")), words[0] if words else "")
    return script.removesuffix(".py") or f"process-{description.pid}"


# -- in the store -------------------------------------------------------------------------------------------


def save(store: Store, name: str, folder: Path, description: Description) -> tuple[Checkpoint, int, int]:
    """Store an image; the checkpoint, how many bytes it has, and how many of them are new."""
    with closing(store.agent(name_of(name), wait_s=cooperation.DEADLINE_S, when=None)) as handle:
        made = Incoming(handle._db)
        try:
            known = _tree(handle, handle.head) if handle.head is not None else {}
            if handle.head is not None and not known:  # retention of images would take it away
                raise NotFrozen(
                    f"{handle.name} has checkpoints that are no images, which stay as they are",
                    hint="Choose another name for the images: --agent NAME.",
                )
            have = chunks_of(known.values()).__contains__
            found = Scanner(folder, rules=False, average=IMAGE_AVERAGE_BYTES).scan({}, into=made, have=have)
            if found.marked or found.skipped:
                raise NotFrozen(f"the image could not be read: {[*found.marked.items(), *found.skipped.items()][0]}")
            entries = found.changed
            entries[PROOF] = Entry(stat.S_IFLNK | PERMISSIONS, image.proof(_named(entries)).hex().encode())
            before = handle._document.apart(IMAGE)
            there = decode_entries(before.all(handle._document.told.fetch)) if before is not None else {}
            items = encode_changes(entries, there.keys() - entries.keys())
            chunks = chunks_of(entries.values())
            _stand_beside(store, handle, description)
            mine, made.packs = made.packs, []  # from here on the writer sees to what becomes of them
            checkpoint = handle._make(
                f"image of {description.program}"[:120], looked=[Looked(IMAGE, items, tuple(mine), frozenset(chunks))]
            )
        except BaseException:
            made.discard()
            raise
        handle.flush()
        size = sum(entry.content.size for entry in entries.values() if isinstance(entry.content, Content))
        return checkpoint, size, made.bytes


def _stand_beside(store: Store, handle: Agent, description: Description) -> None:
    """Give the image the state of the agent that the process writes, as it is in the image."""
    for place, name, _, head in description.agents[:1]:
        if place == store.place and head:
            with suppress(UnknownAgent):
                point = store.agent(name, create=False, readonly=True).at(f"id:{head}")._current()
                handle._document.become(history.state_of(handle._db.now, point), record=True)
                return
    handle.state = {"program": description.command, "pid": description.pid, "directory": description.directory}


def _named(entries: Tree) -> bytes:
    """What stands for all files of an image but the proof: names, modes, sizes, and every chunk."""
    parts = [encode_path(path) + encode_entry(one) for path, one in sorted(entries.items()) if path != PROOF]
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _tree(handle: Agent, checkpoint: Checkpoint) -> dict[bytes, Entry]:
    state = history.state_of(handle._db.now, checkpoint._current())
    if IMAGE not in state.sections:
        return {}
    return decode_entries(state.section(IMAGE).all(state.fetch))


class Stored:
    """An image in a store."""

    def __init__(self, store: Store, revision: str) -> None:
        """``revision`` is NAME or NAME@REV, of an agent or of its images."""
        name, rev = _resolved(store, revision)
        self.store = store
        self.name = name
        self._handle = store.agent(name, create=False, readonly=True)
        self.checkpoint = self._handle.at(rev) if rev else self._handle.head
        self._entries = _tree(self._handle, self.checkpoint) if self.checkpoint is not None else {}
        if self.checkpoint is None or not self._entries:
            raise NotAnImage(
                f"{revision} has no image of a process", hint=f"`holdfast log {name}` lists those that there are."
            )
        self.id = self.checkpoint.id
        self.description = image.decoded(self._read(DESCRIPTION.encode(), DESCRIPTION_MAX_BYTES))

    @property
    def trusted(self) -> bool:
        """Whether this user made it on this machine, and nothing in it is another since."""
        shown = self._entries[PROOF].content if PROOF in self._entries else None
        return type(shown) is bytes and image.made_here(_named(self._entries), shown)

    def _read(self, path: bytes, most: int) -> bytes:
        content = self._entries[path].content if path in self._entries else None
        if not isinstance(content, Content) or content.size > most:
            raise NotAnImage(f"the image of {self.name} has no {os.fsdecode(path)}")
        data = b"".join(self._chunks(list(content.chunks)))
        if content_digest(data) != content.digest:
            raise NotAnImage(f"the image of {self.name}: {os.fsdecode(path)} is not what was saved")
        return data

    def _chunks(self, names: Any) -> Iterator[bytes]:
        return self._handle._db.packs.read(self._handle._db.view, names)

    @contextmanager
    def exported(self, *, trust: bool) -> Iterator[Path]:
        """The image's files in a folder, all of them proven. Raises unless it is trusted."""
        if not trust and not self.trusted:
            raise UntrustedImage(
                f"the image of {self.name} was not made by this user on this machine, or has changed since",
                hint="To thaw it is to run it. If you know where it comes from, add --trust.",
            )
        with memory_folder() as made:
            folder = made / "image"
            restore.export(folder, self._entries, self._chunks, scratch=True)
            yield folder


def _resolved(store: Store, revision: str) -> tuple[str, str]:
    name, _, rev = revision.partition("@")
    for one in dict.fromkeys((name_of(name), name)):
        if store._db.view.agent(one) is not None:
            return one, rev
    found, rest = store.resolve(revision)
    return found, rest


# -- bringing it back ---------------------------------------------------------------------------------------


def thaw_process(
    store: Store,
    revision: str,
    *,
    isolated: bool = False,
    trust: bool = False,
    attached: bool | None = False,
    moved: bool = False,
    accept: tuple[str, ...] = (),
) -> Thawed:
    """Bring a process back from its image; it runs when this returns.

    Agents that it was writing go back to where they were: what was done outside since is undone first, as by
    ``agent.rollback``, and ``accept`` names what may stay. With ``isolated`` nothing else is touched: it gets a copy of
    all files, process numbers of its own and no network. ``attached``: see ``thaw.bring_back``; None: if it belongs to
    a terminal. ``moved``: the original is stopped, for this one to take its place.
    """
    stored = Stored(store, revision)
    description = stored.description
    if attached is None:
        attached = description.terminal
    with stored.exported(trust=trust) as folder, nullcontext() if isolated else thaw.alone() as lock:
        if isolated and description.agents:
            raise NotThawed(
                "the process writes a Holdfast store, and a copy of it would go on writing its own copy of that",
                hint="Look at the agent with `holdfast show`, or work on a branch of it.",
            )
        if not isolated and not moved and image.is_running(description):
            raise NotThawed(
                f"the process still runs, as {description.pid}",
                hint="End it first, or look at a copy: `holdfast thaw REV --isolated`.",
            )
        thaw.check(folder, description, attached=attached, isolated=isolated)
        with _on_the_way(store, stored, isolated=isolated) as told:
            if not isolated:
                _go_back(store, description, accept, told)
            if description.handshake:
                cooperation.thawing(Path(description.handshake), description.uid)
            try:
                thawed = thaw.bring_back(folder, description, lock, isolated=isolated, attached=attached, moved=moved)
            except BaseException:
                if description.handshake:  # nobody is there to hear it
                    shutil.rmtree(description.handshake, ignore_errors=True)
                raise
            if description.handshake:
                cooperation.heard(Path(description.handshake), description.pid)
        notes = [*told, *thawed.notes]
        if not description.handshake:
            notes.append("It keeps no ledger: what it did outside after the image was taken may happen again.")
        return thawed._replace(notes=notes)


class HalfThawed(Struct, frozen=True):
    """A thaw that was cut short: effects may be undone, and the agent be back, but its process is not."""

    agent: str
    branch: str
    image: str
    """The image, as ``holdfast thaw`` takes it: that finishes it."""

    def __str__(self) -> str:
        where = full_name(self.agent, self.branch)
        return (
            f"the thaw of {self.image} is half-way: {where} goes back to that moment, what it did since is undone, and"
            f" its process and the files that it had open are not back. `{command('thaw', self.image)}` finishes that"
            " (with --load and --accept as before). A program that is begun anew goes on from the agent's checkpoint."
        )

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return asdict(self)


def half_thawed(view: View, branch: Branch | None = None) -> list[HalfThawed]:
    """The thaws that were cut short: of all branches, or of one. Where somebody has gone on since, that is over."""
    facts = view.facts()
    found = []
    for one in view.branches() if branch is None else [branch]:
        if (value := facts.get(f"{THAW}{one.uuid.hex()}")) is None or not one.a:
            continue
        said = read_body(value, "table store, the row of a thaw")
        if image.lives(said.get("by")):
            continue  # it is at it
        head = view.point(one.head) if one.head else None
        stands = {said.get("to"), said.get("from")}
        # What had not been saved is saved before an agent goes back: that is nobody who goes on.
        saved = head is not None and said.get("to") != said.get("from") == head.manifest.parent
        if head is None or head.id in stands or saved:
            found.append(HalfThawed(view.agent_at(one.a).name, one.name, str(said.get("image"))))
    return sorted(found, key=lambda one: (one.agent, one.branch))


@contextmanager
def _on_the_way(store: Store, stored: Stored, *, isolated: bool) -> Iterator[list[str]]:
    """Inside, the store says that this thaw is half-way. Yields a list for what has been done of it.

    If it fails, the error says so, too; where nothing had changed by then, it is not half-way.
    """
    mine = [one for one in stored.description.agents if one[0] == store.place and one[3]] if not isolated else []
    revision = f"{stored.name}@id:{stored.id[:12]}"

    def branches() -> list[tuple[Branch, bytes]]:
        found = []
        for _, name, branch, head in mine:
            row = store._db.view.agent(name)
            there = store._db.view.branch(row.a, branch) if row is not None else None
            if there is not None:
                found.append((there, bytes.fromhex(head)))
        return found

    def note(change: Change, values: Mapping[str, bytes | None]) -> None:
        for name, value in values.items():
            change.set_fact(name, value)

    before = branches()
    known = {name: store._db.view.fact(name) for name in (f"{THAW}{branch.uuid.hex()}" for branch, _ in before)}
    begun = {
        f"{THAW}{branch.uuid.hex()}": body_bytes({"image": revision, "to": head, "from": branch.id, "by": image.who()})
        for branch, head in before
    }
    if begun:
        store._db.change(lambda change: note(change, begun))
    told: list[str] = []
    try:
        yield told
    except BaseException as error:
        if [_standing(one) for one, _ in branches()] == [_standing(one) for one, _ in before]:
            with suppress(HoldfastError):
                store._db.change(lambda change: note(change, known))
        elif isinstance(error, HoldfastError):
            done = " ".join(told) or "Going back had begun."
            error.message = f"{error.message}. The thaw is half-way. {done}"
            mend = f"{error.hint} " if error.hint else ""
            error.hint = (
                f"{mend}Then `{command('thaw', revision)}` again finishes it, or the program is begun anew:"
                " it goes on from the agent's checkpoint."
            )
        raise
    if begun:  # the process lives: what cannot be taken back now is passed over as soon as the agent goes on
        try:
            store._db.change(lambda change: note(change, dict.fromkeys(begun)))
        except HoldfastError as error:
            log.warning("the process is back, and the store still says that its thaw is half-way: %s", error)


def _standing(branch: Branch) -> tuple[object, ...]:
    return branch.uuid, branch.id, branch.end.position


def _go_back(store: Store, description: Description, accept: tuple[str, ...], told: list[str]) -> None:
    """Let agents be where they were in the image, and say in ``told`` what was done for that.

    Raises, with nothing changed, if something stands in the way.
    """
    moves: list[tuple[str, Callable[[], object]]] = []
    odd = set(accept)
    with ExitStack() as handles:
        for place, name, branch, head in description.agents:
            if place != store.place:
                told.append(f"{name} in {place} was left as it is: only {store.place} is open.")
                continue
            handle = handles.enter_context(closing(store.agent(name, branch=branch, create=False, when=None)))
            if head:
                unknown, undone, move = handle._plan_thaw(f"id:{head}", accept)
                odd &= set(unknown)
                if move is not None:
                    also = ", ".join(f"{number} of {tool}" for tool, number in sorted(Counter(undone).items()))
                    moves.append((f"{name} went back to {head[:12]}{also and f'; undone: {also}'}.", move))
        if odd:
            raise BadOption(f"no effect to accept is called {min(odd)!r}", hint="See `holdfast effects list`.")
        for what, move in moves:
            move()
            told.append(what)
