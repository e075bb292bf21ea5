"""Checkpoints that a copy of the process writes: the program stands still for the fork only.

Owns what the copy does and what it says. It encodes, hashes and writes packs; the program commits. Must not know how a
capture is made or a branch written: both are as ever, the one in the copy, the other here. What always holds: nothing
is visible before the program has committed it; until then its document believes nothing of it, so that whatever becomes
of the copy, the next checkpoint has all changes; of a branch, one copy writes at a time, and whoever wants to write
there waits for it.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from ormsgpack import packb, unpackb

from holdfast.agent.branch import BranchWriter
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.pending import Pending
from holdfast.codec.blocks import BULK_MIN_BYTES
from holdfast.codec.document import Document
from holdfast.codec.operations import decode_operations
from holdfast.codec.told import Captured
from holdfast.codec.tracked import GONE, Node
from holdfast.errors import ForkLost, ForkRefused
from holdfast.process import fork
from holdfast.store import copies
from holdfast.store.manifest import Manifest, identity
from holdfast.store.rows import Branch

log = logging.getLogger("holdfast.process")

LIMIT_S = 1800.0
"""How long a copy may write. One that takes longer hangs: 30 minutes are enough for a terabyte."""

LOOKED_AT = 10_000
"""How many values are looked at before the fork, for large ones that need not be encoded again afterwards."""


class _Report(msgspec.Struct, array_like=True):
    """What a copy says when it is done."""

    raw: bytes
    operations: bytes
    time_us: int
    nodes: dict[bytes, bytes]
    sealing: dict[bytes, bytes]
    about: dict[bytes, bytes]
    sealed: bool
    pack: tuple[bytes, int, list[tuple[bytes, int, int, int]]] | None
    named: list[bytes]
    chunks: list[bytes]  # that it names, and that are in the store already
    unsealed: tuple[int, int]
    cut: dict[int, bytes]  # by the id of a large value, how it stands in its container


class Saving:
    """A checkpoint that is being written. ``wait()`` gives it when it is durable, or raises why it is not."""

    reason = ""
    """Why it was written the ordinary way; empty when a copy of the process writes it."""

    def __init__(self, made: Checkpoint | None = None, reason: str = "") -> None:
        self.reason = reason
        self.pause_s = 0.0
        """How long the program stood still for it."""
        self._made = made
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def forked(self) -> bool:
        """Whether a copy of the process writes it."""
        return not self.reason

    @property
    def done(self) -> bool:
        """Whether it is durable, or has failed."""
        return self._made is not None or self._error is not None

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """The checkpoint, when it is durable. Raises TimeoutError when it is not by then: it goes on.

        If the copy was gone before it was done it raises ``ForkLost``: nothing of it is visible, and the next
        checkpoint has all that was in it.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._made is None:
            raise TimeoutError(f"the checkpoint was not durable after {timeout_s} s; it goes on")
        return self._made


def save(
    document: Document,
    writer: BranchWriter,
    label: str,
    remember: Callable[[Pending], Checkpoint],
    ordinary: Callable[[], Checkpoint],
) -> Saving:
    """Save the state by a copy of this process; the ``ordinary`` way where none can be made."""
    began_s = time.monotonic()
    reason, _ = fork.obstacle(children=True)
    if not reason and writer.layers:
        reason = "files are saved with the state, and they may change while a copy reads them"
    if not reason and writer.elsewhere:
        reason = "the state stands on another checkpoint than the branch's newest"
    saving = None
    if not reason:
        try:
            saving = _begin(document, writer, label, remember, began_s)
        except ForkRefused as error:  # the system has no room for a process, or commits do not come to rest
            reason = error.reason
    saving = saving or Saving(ordinary(), reason)
    saving.pause_s = time.monotonic() - began_s
    return saving


def _begin(
    document: Document, writer: BranchWriter, label: str, remember: Callable[[Pending], Checkpoint], began_s: float
) -> Saving:
    with writer.quiet(), writer.still(document) as firm:
        held = _large(document)
        before = document.told.stored
        inner, outer = os.pipe()
        try:
            pid = fork.copy(goes_on=False)
        except BaseException:
            os.close(inner)
            os.close(outer)
            raise
        if pid == 0:
            os.close(inner)
            _write(document, writer, label, outer, held)
        os.close(outer)
    copies.OWN.add(pid)
    saving = Saving()

    def collect() -> None:
        try:
            report = _read(inner, pid)
            made = _pending(report, writer, firm)
            made.began_s = began_s
            with document.lock:
                told = document.told
                after = told.after(before, decode_operations(report.operations, report.time_us), _nodes(report))
                if made.manifest is None or _digests(after) != made.manifest.sections:
                    raise ForkLost("what the copy of this process has written is not what it had; it is not used")
            writer.take(made, firm)
            with document.lock:  # first of all: the next capture must be compared with what the store has
                told.rest_on(after)
                for key, packed in report.cut.items():
                    document.bulk.keep(held[key], packed)
            writer._unsealed, writer._unsealed_bytes = report.unsealed
            saving._made = remember(made)
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            saving._error = error
            log.warning("a checkpoint was not written by a copy of this process: %s", error)
        finally:
            writer.copy = None

    # Not one that is given up at the end of the program: what was asked for is saved.
    saving._thread = writer.copy = threading.Thread(target=collect, name=f"{fork.OWN}forked")
    writer.copy.start()
    return saving


def _large(document: Document) -> dict[int, Any]:
    """Large values of the state by id, as far as a short look finds them. They are held, so that an id stays one's."""
    found: dict[int, Any] = {}
    looking = [section.value for section in document.sections.values() if section.dirty and section.value is not GONE]
    for value in looking:
        if isinstance(value, Node):
            if len(looking) < LOOKED_AT:
                looking += [child for _, child in value._pairs()][: LOOKED_AT - len(looking)]
        elif getattr(value, "nbytes", None) or (isinstance(value, (bytes, str)) and len(value) >= BULK_MIN_BYTES):
            found[id(value)] = value
    return found


# -- in the copy ------------------------------------------------------------------------------------------------------


def _write(document: Document, writer: BranchWriter, label: str, outer: int, held: dict[int, Any]) -> NoReturn:
    """Fix the content of the checkpoint, write its packs, and say what they are."""
    code = 1
    try:
        gc.disable()  # it would touch, and so copy, every page
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, this one goes first
        database = writer._db
        database.inherit(readonly=database.engine.dialect == "sqlite")
        data = _fixed(document, writer, label, held)
        view = memoryview(data)
        while view:
            view = view[os.write(outer, view) :]
        code = 0
    except BaseException as error:  # noqa: BLE001 - it is said, and that is all that a copy can do
        with suppress(OSError):
            os.write(outer, packb(f"{type(error).__name__}: {error}"[:4000]))
    finally:
        fork.leave(code)


def _fixed(document: Document, writer: BranchWriter, label: str, held: dict[int, Any]) -> bytes:
    database = writer._db
    made = writer._capture(document, label, "checkpoint", b"")
    there: set[bytes] = set(database.view.has_chunks(made.chunks)) if made.chunks else set()
    pack = None
    if len(there) < len(made.chunks):
        database.engine.check_place()
        pack = database.packs.write((name, data) for name, data in made.chunks.items() if name not in there)
    cut = {key: packed for key, value in held.items() if (packed := document.bulk.get(value)) is not None}
    time_us = made.manifest.time_us if made.manifest is not None else 0
    report = _Report(
        made.raw,
        made.operations,
        time_us,
        dict(made.nodes),
        dict(made.sealing) if made.sealed else {},
        dict(made.about),
        made.sealed,
        (pack.uuid, pack.size, list(pack.chunks)) if pack is not None else None,
        list(made.named),
        list(made.chunks_named | there),
        (writer._unsealed, writer._unsealed_bytes),
        cut,
    )
    return msgspec.msgpack.encode(report)


# -- in the program ---------------------------------------------------------------------------------------------------


def _read(inner: int, pid: int) -> _Report:
    """What the copy has said, when it has ended."""
    until, data = time.monotonic() + LIMIT_S, bytearray()
    with os.fdopen(inner, "rb", 0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                break
            part = pipe.read(1 << 20)
            if not part:
                break
            data += part
    code = fork.reap(pid)
    copies.OWN.discard(pid)
    return _checked(bytes(data), code)


def _checked(data: bytes, code: int) -> _Report:
    try:
        return msgspec.msgpack.decode(data, type=_Report)
    except msgspec.MsgspecError:
        pass
    said = ""
    with suppress(ValueError):
        said = str(unpackb(data)) if data else ""
    how = f"it was killed by signal {-code}" if code < 0 else f"it ended with {code}"
    raise ForkLost(
        f"a copy of this process was to write a checkpoint, and did not: {said or how}; nothing of it is visible",
        hint="The next checkpoint has all that was in it. If memory was short, use the ordinary way: checkpoint().",
    )


def _nodes(report: _Report) -> dict[bytes, bytes]:
    return {**report.nodes, **report.sealing}


def _digests(sections: Any) -> Any:
    return [(name, one if isinstance(one, bytes) else one.root) for name, one in sections.items()]


def _pending(report: _Report, writer: BranchWriter, firm: Branch) -> Pending:
    """The checkpoint as the branch's writer has it, ready to be committed."""
    made = Pending(firm)
    made.manifest, made.raw = Manifest.decode(report.raw), report.raw
    made.id = identity(report.raw)
    made.operations, made.nodes, made.sealing, made.about = (
        report.operations, report.nodes, report.sealing, report.about,
    )  # fmt: skip
    made.sealed, made.captured = report.sealed, Captured({})
    if report.pack is not None:
        made.packed = writer._db.packs.made(*report.pack)
        made.pack = made.packed.uuid
    made.named, made.chunks_named = frozenset(report.named), frozenset(report.chunks)
    made.guard = writer._guard() if writer._guard is not None else None
    made.tip = firm.standing(firm.head, made.id, made.manifest.depth, firm.epoch)
    made.opened = writer.opened
    return made
