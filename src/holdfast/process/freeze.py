"""Saving a process whole into a folder: its memory by CRIU, its open files by us, while it stands still.

Owns the order of things and what is refused. Knows nothing of stores but which files are theirs. What always holds:
when this raises, the process goes on as before; what the image holds of memory and of files is of one moment, and the
time for both is in the pause that is told.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.errors import BadOption, NotFrozen
from holdfast.process import criu
from holdfast.process.cooperation import Standing
from holdfast.process.image import (
    DESCRIPTION,
    FILES,
    IMAGES,
    Description,
    Look,
    SavedFile,
    describe,
    encoded,
    save_files,
)

Tcp = Literal["close", "keep"]
Files = Literal["save", "keep"]

ROOM_BYTES = 64 * 2**20
"""How much room is left besides an image: what it holds beyond memory is small."""


class Taken(NamedTuple):
    """An image in a folder, how long the process stood still for it, and what to know about it."""

    folder: Path
    description: Description
    pause_s: float
    notes: list[str]


@contextmanager
def taken(
    pid: int, *, tcp: Tcp = "close", files: Files = "save", then: criu.Then = "run", standing: Standing | None = None
) -> Iterator[Taken]:
    """Take an image into a folder that is there inside of the block.

    ``tcp`` says what becomes of established connections when the process comes back; ``files`` whether open files are
    saved and put back, and ``then`` what becomes of the process. ``standing`` is a Holdfast process that has let go of
    its stores.
    """
    if tcp not in {"close", "keep"} or files not in {"save", "keep"}:
        raise BadOption(f"tcp={tcp!r}, files={files!r}", hint="tcp is close or keep, files is save or keep.")
    found = criu.needed(NotFrozen)
    look = Look(pid)
    _check(look, files)
    if tcp == "keep" and not criu.keeps_tcp(found.program):
        raise NotFrozen("connections cannot be kept here: the kernel has no nftables", hint="Use --tcp close.")
    with tempfile.TemporaryDirectory(prefix="holdfast-image-") as made, tempfile.TemporaryDirectory() as work:
        folder = Path(made)
        if shutil.disk_usage(folder).free < look.memory_bytes + ROOM_BYTES:
            raise NotFrozen(
                f"{folder.parent} has no room for {look.memory_bytes >> 20} MiB", hint="TMPDIR says where images wait."
            )
        for name in (IMAGES, FILES):
            (folder / name).mkdir()
        saved: list[SavedFile] = []
        latest = look

        def still() -> None:
            nonlocal latest
            latest = Look(pid)
            _check(latest, files, known=look)
            saved.extend(save_files(latest.files.values(), folder / FILES, keep=files == "keep"))

        options = criu.Options(look.terminal or look.session not in look.pids, tcp)
        dumped = criu.dump(
            found.program, pid, folder / IMAGES, Path(work), options,
            standing=still, then=then, memory_bytes=look.memory_bytes,
        )  # fmt: skip
        description = describe(
            latest, criu=found.version, tcp=tcp, files=saved, kept=files == "keep",
            agents=standing.agents if standing is not None else [],
            handshake=str(standing.folder) if standing is not None else "",
        )  # fmt: skip
        (folder / DESCRIPTION).write_bytes(encoded(description))
        yield Taken(folder, description, dumped.pause_s, list(_notes(description)))


def _check(look: Look, files: Files, known: Look | None = None) -> None:
    refused = [*look.refusals()]
    refused += [f"it has the Holdfast store {home} open, and did not release it" for home in look.stores()]
    # Asking everybody takes a while, so what was asked before the process stood still is not asked again.
    if not refused and files == "save" and (known is None or look.files.keys() - known.files.keys()):
        refused = [
            f"{path} is also being written by another process (see --files keep)" for path in look.shared_files()
        ]
    if refused:
        raise NotFrozen(
            f"process {look.pid} cannot be frozen: {'; '.join(refused)}",
            pid=look.pid, hint="It goes on as before. docs/guide/freezing.md says what can be frozen.",
        )  # fmt: skip


def _notes(description: Description) -> Iterator[str]:
    """What whoever freezes something should know of."""
    if not description.handshake:
        yield "It keeps no ledger: what it does outside from now on is not undone by a thaw, and may be done again."
    for path in description.databases if not description.kept else ():
        yield f"{path} is a SQLite database: it is saved, but locks on its mapped -shm file are lost in a thaw."
    if description.kept and description.files:
        yield "Open files are not part of the image: after a thaw it goes on with what is in them by then."
    for fd in sorted(description.pipes.values()):
        yield f"Its descriptor {fd} is a pipe to another process: after a thaw it leads to the thaw's own, or nowhere."
    if description.terminal:
        yield "It belongs to a terminal: thaw it in one."


def end(pid: int, began: int) -> None:
    """End a process that was left stopped, unless its number is another one's by now."""
    from holdfast.process.image import began as began_now

    with suppress(OSError, ValueError):
        if began_now(pid) == began:
            os.kill(pid, signal.SIGKILL)


def go_on(pid: int) -> None:
    """Let a process that was left stopped, and all below it, go on."""
    from holdfast.process.image import _tree

    with suppress(OSError):
        for one in _tree(pid):
            os.kill(one, signal.SIGCONT)
