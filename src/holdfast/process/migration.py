"""Moving a process elsewhere: freeze, push, thaw there; and a process that freezes itself.

Owns the order of these steps. What always holds: at every moment one of the two processes can go on, and never both:
the original is stopped before the image is taken, goes on if the copy does not live, and is ended when it does. Where
nobody knows which (whoever moves it is killed, or the line to the other side broke), it stays stopped, which is noted,
and a person decides.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from holdfast.agent.places import open_stores
from holdfast.agent.store import Store
from holdfast.errors import BadOption, NotFrozen, NotThawed
from holdfast.process import cooperation, criu, image
from holdfast.process.image import began
from holdfast.process.images import Frozen, freeze_process, name_of, writer_of
from holdfast.store.processes import boot

THAW_S = 300.0
"""How long the other side gets."""

SELF_S = 600.0
"""How long a process that freezes itself waits for its image."""

POLL_S = 0.005
_NOTES = "moves"

SIGNALS = 128
"""From here on a code says that something was killed, or, as ssh's 255, that the line broke."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """A process that lives elsewhere now. ``downtime_s`` is from its stop until its copy ran."""

    frozen: Frozen
    pid: int
    pushed_bytes: int
    downtime_s: float

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        about = {"pid_there": self.pid, "pushed_bytes": self.pushed_bytes, "downtime_s": self.downtime_s}
        return {**self.frozen.to_json(), **about}


def migrate_process(
    store: Store,
    target: int | str,
    dest: Store,
    *,
    agent: str | None,
    tcp: Literal["close", "keep"],
    through: Sequence[str],
) -> Migrated:
    """See ``Store.migrate``."""
    same = dest.place == store.place
    if not same and not dest.encrypted:
        raise BadOption(
            f"{dest.place} is not encrypted, and an image holds everything that a process has in memory",
            hint="`holdfast init PLACE --encrypt` makes one that is.",
        )
    here = target if isinstance(target, int) else writer_of(store, target)
    called = agent or (target if isinstance(target, str) else None)
    with _noted(here, dest.place):
        frozen = freeze_process(store, here, agent=called, tcp=tcp, then="stop")
        stopped = time.monotonic() - frozen.seconds
        try:
            pushed = 0 if same else store.push(dest, [name_of(frozen.agent)], images=True).bytes
            pid = _thawed_there(dest.place, frozen, through)
        except _Unknown:
            raise
        except BaseException:
            image.go_on(frozen.pid)
            raise
        image.end(frozen.pid, frozen.began)
    return Migrated(frozen, pid, pushed, time.monotonic() - stopped)


class _Unknown(Exception):
    """Whether the process lives there, nobody can know here."""


class LeftStopped(NamedTuple):
    """A process that was stopped to be moved, and of which nobody knows whether it lives elsewhere."""

    pid: int
    program: str
    dest: str


@contextmanager
def _noted(pid: int, dest: str) -> Iterator[None]:
    """Inside, it is noted that a process is stopped for this. The note stays where nobody knows what came of it."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        about = {"by": image.who(), "process": [pid, began(pid), boot()], "program": command[:200], "dest": dest}
    except OSError as error:
        raise NotFrozen(f"there is no process {pid}: {error.strerror}", pid=pid, hint="See `ps`.") from error
    note = image.new_note(_NOTES)
    image.note_down(note, about)
    try:
        yield
    except _Unknown as error:
        image.note_down(note, {**about, "by": None})
        raise NotThawed(
            f"whether the process lives there is not known: {error}; the original stays stopped",
            hint=f"Look there. If it does not, `kill -CONT {pid}` lets the original go on; if it does, end this one:"
            f" `kill -9 {pid}`.",
        ) from error
    except BaseException:
        note.unlink(missing_ok=True)
        raise
    note.unlink(missing_ok=True)


def left_stopped() -> list[LeftStopped]:
    """Processes that stand still because a move of this user was killed. Nobody can know here whether they live there.

    So it is a person who says that one goes on, or ends.
    """
    found = []
    for note, about in image.notes(_NOTES):
        with suppress(OSError, LookupError, TypeError):
            pid = about["process"][0]
            if not image.lives(about["process"]):
                note.unlink()
            elif Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                found.append(LeftStopped(pid, about["program"], about["dest"]))
    return found


def _thawed_there(place: str, frozen: Frozen, through: Sequence[str]) -> int:
    revision = f"{name_of(frozen.agent)}@id:{frozen.checkpoint.id}"
    words = [
        *through,
        sys.executable,
        "-m",
        "holdfast",
        "--store",
        place,
        "thaw",
        revision,
        "--trust",
        "--moved",
        "--json",
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=THAW_S, check=False)  # noqa: S603
    except OSError as error:
        raise NotThawed(f"the process could not be thawed there: {error}; the original goes on") from error
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        raise _Unknown(f"{words[0]} was ended before it had answered") from error
    # Whatever else the way there says, as a greeting.
    pid = re.search(r'^ *"pid": *(\d+)', done.stdout, re.MULTILINE)
    if done.returncode == 0 and pid is not None:
        return int(pid[1])
    said = " ".join(done.stderr.split())[-500:] or f"it ended with {done.returncode}"
    if not 0 < done.returncode < SIGNALS:
        raise _Unknown(said)
    raise NotThawed(f"the process could not be thawed there: {said}; the original goes on")


class SelfFrozen(NamedTuple):
    """Who comes back from ``freeze_self``: the original, or, with ``thawed``, the one that was brought back."""

    thawed: bool
    agent: str
    checkpoint: str
    pause_s: float


def freeze_self(
    store: Store | None = None,
    *,
    agent: str | None = None,
    tcp: Literal["close", "keep"] = "close",
    files: Literal["save", "keep"] = "save",
) -> SelfFrozen:
    """Save this process whole, and go on. It returns once here, and once in each process that a thaw brings back.

    The image goes into ``store``, or into the one that this process has open. Needs root and CRIU.
    """
    criu.needed(NotFrozen)
    opened = open_stores()
    if store is None and len(opened) != 1:
        raise BadOption(f"this process has {len(opened)} stores open", hint="Say where the image goes: store=.")
    place = (store or opened[0]).place
    if opened:
        cooperation.freezable()
    me = (os.getpid(), began(os.getpid()), boot())
    options = [*(["--agent", agent] if agent else []), "--tcp", tcp, "--files", files]
    with tempfile.TemporaryDirectory(prefix="holdfast-self-") as made:
        folder = Path(made)
        # Not a child of this process: children are part of the image.
        script = '"$@" >out 2>err; echo $? >.code; mv .code code'
        words = [sys.executable, "-m", "holdfast", "--store", place, "freeze", str(me[0]), *options, "--json"]
        subprocess.run(  # noqa: S603
            ["setsid", "--fork", "sh", "-c", script, "freeze", *words],  # noqa: S607
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        deadline = time.monotonic() + SELF_S
        while (os.getpid(), began(os.getpid()), boot()) == me:
            if (folder / "code").exists():
                return _original(folder)
            if time.monotonic() > deadline:
                raise NotFrozen(f"no image of this process within {SELF_S:.0f} s", pid=me[0])
            time.sleep(POLL_S)
    return SelfFrozen(True, agent or "", "", 0.0)


def _original(folder: Path) -> SelfFrozen:
    said = (folder / "err").read_text().strip()
    with suppress(ValueError, KeyError):
        told = json.loads((folder / "out").read_text())
        return SelfFrozen(False, told["agent"], told["checkpoint"], told["pause_s"])
    raise NotFrozen(said.removeprefix("holdfast: ") or "this process could not be frozen", pid=os.getpid())
