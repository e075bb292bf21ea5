"""``holdfast freeze``, ``thaw`` and ``migrate``: whole processes, and programs that are saved while they run.

A thaw runs what was stored. Who may do that, and what becomes of agents and files, is the business of the library.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Frozen, Thawed
from holdfast.cli.keys import SourceKey, key_in
from holdfast.cli.programs import Load, writing
from holdfast.cli.session import Flag, Given, Json, Session, absolute, option
from holdfast.cli.text import clean, count, size
from holdfast.cli.transfer import opened_end
from holdfast.errors import BadOption, HoldfastError
from holdfast.process import wait as wait_for

Tcp = Annotated[
    Literal["close", "keep"],
    option("What becomes of established TCP connections when it comes back: close, or keep. [default: close]"),
]
Files = Annotated[
    Literal["save", "keep"],
    option("Whether open files are saved and put back, or left as they are: save, or keep. [default: save]"),
]
Called = Annotated[str | None, option("What the images are called by. [default: its agent, or the program]", "NAME")]
Keep = Annotated[int, option("How many images stay; 0: all. [default: 3]", "N")]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def freeze(
    target: str,
    /,
    *,
    agent: Called = None,
    tcp: Tcp = "close",
    files: Files = "save",
    kill: Flag = False,
    keep: Keep = 3,
    wait: Annotated[float, option(metavar="SECONDS")] = 10.0,
    json: Json = False,
    session: Given,
) -> int:
    """Save a process whole, as it runs: memory, threads, open files.

    It goes on when that is done. `holdfast thaw NAME` brings it back from there. Needs root and CRIU; `holdfast doctor`
    says what is missing. Images hold everything that the process knows, passwords too.

    Parameters
    ----------
    target
        The number of the process, or the NAME of an agent that one is writing.
    kill
        End the process when its image is durable.
    wait
        How long a Holdfast process may take to finish what it does outside. [default: 10]
    """
    with _making(session) as store:
        frozen = store.freeze(
            int(target) if target.isdigit() else target, agent=agent, tcp=tcp, files=files,
            then="end" if kill else "go on", keep=keep, wait_s=wait,
        )  # fmt: skip
        if json:
            return session.json("freeze", **frozen.to_json())
        _tell(session, frozen)
    return 0


def _making(session: Session) -> holdfast.Store:
    """The store that images go into; it is made if there is none."""
    return session.opened(session.place)


def _tell(session: Session, frozen: Frozen) -> None:
    session.out.say(
        Text("Frozen: ", style="bold green"), clean(f"process {frozen.pid}, {frozen.program}, as "),
        Text(clean(frozen.agent), style="bold cyan"), "@", Text(frozen.checkpoint.short_id, style="yellow"),
    )  # fmt: skip
    rest = f", without its stores for {frozen.released_s * 1e3:.0f} ms" if frozen.released_s else ""
    new = f"{size(frozen.new_bytes)} of {size(frozen.bytes)} are new"
    session.out.say(
        f"  It stood still for {frozen.pause_s * 1e3:.0f} ms{rest}; {new}; durable after {frozen.seconds:.2f} s."
    )
    for note in frozen.notes:
        session.out.note(f"  {clean(note)}")


def thaw(
    revision: str,
    /,
    *,
    isolated: Flag = False,
    trust: Flag = False,
    foreground: Flag = False,
    moved: Annotated[bool, Parameter(show=False, negative="")] = False,
    accept: Annotated[tuple[str, ...], option(metavar="NAME", negative_iterable="")] = (),
    load: Load = (),
    json: Json = False,
    session: Given,
) -> int:
    """Bring a process back from its image; it goes on from there.

    Its open files are put back as they were. The agents that it was writing go back, too: what was done outside since
    is undone first, as by `holdfast rollback`. To thaw is to run what was stored.

    Parameters
    ----------
    revision
        NAME, for the newest image of an agent or a program, or NAME@REV.
    isolated
        Look at that moment without disturbing anything: copies of all files, no network, its own process numbers.
    trust
        Also an image that this user did not make on this machine.
    foreground
        Connect its terminal and pipes with those here, and wait for its end. Programs with a terminal always are.
    moved
        The original is stopped elsewhere, and this one takes its place.
    accept
        Effects that may stay though they are not undone.
    load
        Modules and files with the tools that undo what was done.
    """
    here = not json and sys.stdin.isatty() and sys.stdout.isatty()
    attached = foreground or (None if here else False)
    with writing(session, load) as store:
        thawed = store.thaw(revision, isolated=isolated, trust=trust, attached=attached, moved=moved, accept=accept)
    if json:
        return session.json("thaw", **thawed.to_json())
    if foreground or (here and thawed.terminal):
        return wait_for(thawed.pid)
    _tell_back(session, revision, thawed)
    return 0


def _tell_back(session: Session, revision: str, thawed: Thawed) -> None:
    where = " in namespaces of its own" if thawed.own_numbers else ""
    session.out.say(
        Text("Thawed: ", style="bold green"),
        clean(f"{revision} goes on as process {thawed.pid}{where}, after {thawed.seconds:.2f} s."),
    )
    if thawed.isolated:
        session.out.note(f"  Look inside: nsenter --target {thawed.pid} --all. It ends with `kill -9 {thawed.pid}`.")
    for note in thawed.notes:
        session.out.note(f"  {clean(note)}")


def migrate(
    target: str,
    dest: str,
    /,
    *,
    agent: Called = None,
    tcp: Tcp = "close",
    through: Annotated[str | None, option(metavar="COMMAND")] = None,
    source_key_file: SourceKey = None,
    json: Json = False,
    session: Given,
) -> int:
    """Move a running process: freeze, push its image, thaw it there.

    The original stands still meanwhile. It ends when the other one lives, and goes on if that fails. The key of the
    store there comes from the environment, also for the command that thaws it.

    Parameters
    ----------
    target
        The number of the process, or the NAME of an agent that one is writing.
    dest
        The store that the image goes to: encrypted, or the same one.
    through
        What is put before the command that thaws it, such as 'ssh there' or 'nsenter --target PID --all'.
    """
    store = opened_end(session, session.place, "--source-key-file", key_in(source_key_file))
    with store, session.opened(dest, create=False) as other:
        words = shlex.split(through) if through else []
        moved = store.migrate(int(target) if target.isdigit() else target, other, agent=agent, tcp=tcp, through=words)
        if json:
            return session.json("migrate", **moved.to_json())
        session.out.say(
            Text("Moved: ", style="bold green"), clean(f"{moved.frozen.program} goes on as process {moved.pid} there.")
        )
        session.out.say(
            f"  It stood still for {moved.frozen.pause_s * 1e3:.0f} ms for its image, and was down for"
            f" {moved.downtime_s:.2f} s; {size(moved.pushed_bytes)} were pushed."
        )
    return 0


# -- programs that are saved while they run -------------------------------------------------------------------------


def interval(text: str) -> float:
    """``every=60s`` in seconds."""
    found = re.fullmatch(r"every=(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None or not float(found[1]):
        raise BadOption(f"--images {text}", hint="Write --images every=60s, or 5m, or 1h.")
    return float(found[1]) * _UNITS[found[2]]


def supervised(session: Session, words: Sequence[str], every_s: float, agent: str | None) -> int:
    """Run a program, and save it whole again and again; its own exit code."""
    if not words:
        raise BadOption("what is to be run?", hint="holdfast run --images every=60s -- python anything.py")
    name = agent or Path(next((word for word in words if word.endswith(".py")), words[0])).name.removesuffix(".py")
    place = absolute(session.place) if session.place is not None else None
    try:
        child = subprocess.Popen(list(words))  # noqa: S603 - a person has named it
    except OSError as error:
        raise BadOption(f"{words[0]} cannot be started: {error.strerror}") from None
    for number in (signal.SIGTERM, signal.SIGHUP):  # whoever ends this one means the program
        signal.signal(number, lambda number, _: child.send_signal(number))
    taken = 0
    while True:
        try:
            code = child.wait(every_s)
            break
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            continue  # the program has got it, too
        try:
            with holdfast.open(place) as store:
                store.freeze(child.pid, agent=name)
            taken += 1
        except KeyboardInterrupt:
            continue  # as above
        except HoldfastError as error:
            if child.poll() is None:
                session.err.say(clean(f"holdfast: no image this time: {error.message}"))
    if code:
        what = f"signal {-code}" if code < 0 else f"code {code}"
        again = f" `holdfast thaw {name}` goes on from the last one." if taken else ""
        session.err.say(clean(f"holdfast: it ended by {what}, after {count(taken, 'image')}.{again}"))
    return code if code >= 0 else 128 - code
