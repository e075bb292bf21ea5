"""Probes: capture a running process when it calls a function with arguments for which an expression holds.

Owns the command's half: it asks the process, says what that costs, and is told what was captured. What is put into the
process is ``crash.probe``. What always holds: a process that cannot be asked is said to be, in a sentence and in time,
and nothing was changed in it; when this end is gone, for whatever reason, the probe is removed.

    with Probe(pid, "shop.orders:pay", when="amount > 1000") as probe:
        for capture in probe.captures():
            ...
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from holdfast.crash import outside
from holdfast.crash import probe as put
from holdfast.crash.redaction import Redactor, looks_secret
from holdfast.errors import BadOption, HoldfastError, NotProbed
from holdfast.travel.expressions import Expression

Then = Literal["dump", "checkpoint", "log"]
MOST = 100
"""Captures of one probe."""
EVERY_MIN_S = 0.1
_TAKES_S = 60.0  # a dump from inside, while nothing else is said
_COSTS = {
    "monitoring": "each call of the function takes about 2 µs longer, with --when some 10 µs; nothing else is slower",
    "wrapping": "each call of the function takes some 10 µs longer, and is one frame deeper meanwhile;"
    " nothing else is slower",
}


@dataclass
class Capture:
    """A call for which the expression holds. ``dump`` is a file; ``asked`` are agents that were asked for a checkpoint.

    ``values`` are the function's arguments as text; ``met`` how many such calls there were up to this one, captured or
    not. ``checkpoints``: what became of what was asked, by agent, as far as it is known when the probe ends.
    """

    number: int
    met: int
    thread: str
    values: dict[str, str]
    dump: str = ""
    asked: list[str] = field(default_factory=list)
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return dict(vars(self))


class Probe:
    """A function of another process that is watched. ``cost`` says what that costs there; ``place`` is its line."""

    def __init__(
        self,
        pid: int,
        function: str,
        *,
        when: str | None = None,
        then: Then = "dump",
        most: int = 1,
        every_s: float = 1.0,
        wait_s: float = 10.0,
        to: str | os.PathLike[str] | None = None,
    ) -> None:
        module, _, name = function.partition(":")
        if not module or not name or not all(part.isidentifier() for part in name.split(".")):
            raise BadOption(f"{function!r} is no function", hint="Write it package.module:function.")
        if then not in get_args(Then) or not 1 <= most <= MOST or not every_s >= EVERY_MIN_S:
            raise BadOption(
                f"then={then!r}, most={most!r}, every_s={every_s!r}",
                hint=f"Use {', '.join(get_args(Then))}; 1 to {MOST}; {EVERY_MIN_S} s or more.",
            )
        self.pid, self.function, self.place, self.problem = pid, function, "", ""
        self.checkpoints: dict[str, str] = {}
        self._redactor = Redactor(dict(os.environ))
        self._order: dict[str, Any] = {"function": function, "then": then, "most": most, "every_s": every_s}
        self._order["when"] = repr(Expression(when, None).tree) if when is not None else ""
        self._wait_s, self._to, self._said = wait_s, to, b""
        if not Path(f"/proc/{pid}").is_dir():
            raise NotProbed(f"there is no process {pid}", pid=pid)
        self._alone = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # as long as it is bound, nobody else may
        try:
            self._alone.bind(f"{put.address(pid)}-alone")
            self._wire = self._called(wait_s)
        except BaseException as error:
            self._alone.close()
            if not isinstance(error, OSError):
                raise
            raise NotProbed(f"somebody else probes process {pid}", pid=pid, hint="Wait for that to end.") from None
        hello = self._hear(wait_s)
        self.cost, self.python, self.agents = _COSTS[hello["hello"]], hello["python"], hello["agents"]
        if then == "checkpoint" and not self.agents:
            self.close()
            raise NotProbed(f"process {pid} writes no agent that could be saved", pid=pid, hint="Use --then dump.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the probe."""
        self._wire.close()
        self._alone.close()

    # -- asking ---------------------------------------------------------------------------------------------

    def _called(self, wait_s: float) -> socket.socket:
        """Wait for the process. Python 3.14 is asked from outside; others come by themselves, if they have hooks."""
        pid, why = self.pid, "it does not run under `holdfast run`, nor has it called holdfast.crash.install()"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
            waiting.bind(put.address(pid))
            waiting.listen(1)
            if hasattr(sys, "remote_exec"):
                why = _remote(pid, put.__file__) or "it did not come to where Python looks for requests: its main"
                why += " thread is in a call that does not return, or it is no Python 3.14" * why.endswith("its main")
            else:
                why += f", and only Python 3.14 can be asked from outside, by Python 3.14 (this is {sys.version[:4]})"
            end_s = time.monotonic() + wait_s
            while (left_s := end_s - time.monotonic()) > 0:
                waiting.settimeout(left_s)
                with suppress(TimeoutError):
                    wire, _ = waiting.accept()
                    if put.peer(wire)[0] == pid:
                        return wire
                    wire.close()  # somebody else of this machine
        raise NotProbed(
            f"process {pid} did not answer within {wait_s:g} s: {why}; nothing was changed", pid=pid,
            hint="Give it more time with --wait, or take a dump from outside: `holdfast dump take`.",
        )  # fmt: skip

    def _hear(self, within_s: float) -> dict[str, Any]:
        self._wire.settimeout(max(0.01, within_s))
        try:
            while b"\n" not in self._said:
                piece = self._wire.recv(1 << 16)
                if not piece:
                    raise NotProbed(f"process {self.pid} has ended", pid=self.pid)
                self._said += piece
        except (TimeoutError, ConnectionError) as error:
            ended = isinstance(error, ConnectionError)
            why = "has ended" if ended else f"said nothing for {within_s:g} s"
            raise NotProbed(f"process {self.pid} {why}", pid=self.pid) from None
        line, _, self._said = self._said.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self._wire.sendall(json.dumps(message).encode() + b"\n")

    def begin(self) -> None:
        """Put the probe. Until here the process has only been asked."""
        self._tell(self._order)
        said = self._hear(self._wait_s)
        if "error" in said:
            self.close()
            raise NotProbed(f"process {self.pid} cannot be probed: {said['error']}", pid=self.pid)
        self.place = said["ready"]

    # -- being told -----------------------------------------------------------------------------------------

    def captures(self, limit_s: float | None = None) -> Iterator[Capture]:
        """What is captured, until there were as many as were wanted, or the time is over. The last one ends the probe.

        Afterwards ``checkpoints`` has the ids of those that were asked for, as far as they were taken in time.
        """
        if not self.place:
            self.begin()
        end_s = time.monotonic() + limit_s if limit_s is not None else float("inf")
        left, asked = self._order["most"], 0
        while left or (asked > len(self.checkpoints) and time.monotonic() < end_s):
            try:
                said = self._hear(min(self._wait_s if not left else _TAKES_S, end_s - time.monotonic()))
            except NotProbed as error:
                if "said nothing" not in error.message:
                    raise
                if time.monotonic() >= end_s or not left:
                    return
                continue
            if "want" in said:
                self._tell(self._outside(said["why"]))
            elif "wrong" in said:
                self.problem = said["wrong"]
            elif "checkpoint" in said:
                self.checkpoints[said["agent"]] = said["checkpoint"]
            else:
                left -= 1
                asked = len(said.get("asked", ()))
                self.checkpoints.clear()
                values = {
                    name: "…" if looks_secret(name) else self._redactor.clean(text)
                    for name, text in said.pop("values").items()
                }
                yield Capture(values=values, **said)

    def _outside(self, why: str) -> dict[str, str]:
        """A dump of the process, which stands at the call meanwhile."""
        try:
            return {"dump": str(outside.take(self.pid, to=self._to, why=why))}
        except HoldfastError as error:
            return {"problem": f"no dump: {error.message}"}


def _remote(pid: int, file: str) -> str:
    """Have Python 3.14 execute a file when it comes to it; why it cannot be asked."""
    try:
        sys.remote_exec(pid, file)  # type: ignore[attr-defined,unused-ignore]
    except PermissionError:
        return "this user may not look into it (ptrace)"
    except (RuntimeError, OSError, ValueError) as error:
        return f"it cannot be asked from outside ({error})"
    return ""
