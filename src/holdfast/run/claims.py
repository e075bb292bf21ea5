"""A plain loop: an agent that is used without a durable function, guarded against doing things again.

Owns what a loaded checkpoint does not know yet, and who may have it. There are no positions to compare, so calls are
recognised by tool and fingerprint. What always holds: a write that happened after the loaded checkpoint answers at most
one call; while such writes of a tool are left, that tool is not called with other arguments; a checkpoint that is taken
meanwhile says which are left, so that the next load offers them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.errors import MaybeRepeated
from holdfast.run import records as rec
from holdfast.run.arguments import fetch, stow
from holdfast.run.context import active
from holdfast.run.doubt import settle_all
from holdfast.run.notes import since_of
from holdfast.run.order import Unordered
from holdfast.run.past import GUARDED, LOST, Call, Past
from holdfast.run.positions import Lane
from holdfast.run.scope import Host, Scope, now_us
from holdfast.run.standing import OWN
from holdfast.run.steps import Steps, drive
from holdfast.run.tools import TOOLS, Tool

_OTHER = Call("", "", -1)
NOTE = "unclaimed"
"""The note that lists, by number, what was left when a checkpoint was taken. Its name is its place in the line."""


class Loop(Scope):
    """The plain use of an agent whose state is that of a checkpoint, with that id and position ``since``.

    The line is read when something depends on it: a program that calls no tool does not pay for it.
    """

    def __init__(self, agent: Host, since: int, checkpoint: str = "") -> None:
        # Paths name the length of the line, which no two uses that wrote something share; so keys differ without
        # an incarnation, too.
        super().__init__(agent, 0, Unordered())
        self.lane = Lane(self, f"@{agent.ledger.count}/")
        self._since = since
        self.since = since  # where the program last took a checkpoint itself: what steps.Keep goes by
        self._checkpoint = checkpoint
        self._known = False
        self._open: list[Call] = []
        self._left: list[Call] = []  # not claimed yet
        self._noted: list[int] = []  # what the line says about that

    def restart(self, since: int, checkpoint: str) -> None:
        """The state is that of another checkpoint now: what it does not know is another matter."""
        with self.lock:
            self._since = self.since = since
            self._checkpoint = checkpoint
            self._known = False
            self._open, self._left, self._noted = [], [], []
            self.unsettled.clear()

    # -- what is left ---------------------------------------------------------------------------------------

    def read(self, past: Past | None = None) -> None:
        """Find out what the loaded checkpoint does not know."""
        with self.lock:
            if self._known:
                return
            past = past if past is not None else Past(self.ledger.records())
            notes = [(int(name), note) for (what, name), note in past.notes.items() if what == NOTE]
            newest = max((entry for entry in notes if entry[0] < self._since), key=lambda entry: entry[0], default=None)
            if newest is not None:
                self._noted = fetch(newest[1].value, self.ledger, self.registry)
            noted = set(self._noted)
            since = since_of(past, self._checkpoint, self._since)
            self.taken = past.taken
            # A run that ended without finishing has left what it did to whoever comes next, until that is claimed:
            # a note that was taken since does not list it any more.
            asked = newest[0] if newest is not None else -1
            ended = [call for call, end in past.left(self.agent.origin) if end > asked or call.number in noted]
            self._noted = sorted(noted | {call.number for call in ended if not _never_happened(call)})
            for call in ended:
                call.kept = True
            self._open = [call for call in (*ended, *past.loose) if call.open and call.kind == "write"]
            # What was under way when the checkpoint was taken is not known there, either: its outcome came later, or
            # never.
            left = [
                call
                for call in (*past.kept, *past.loose)
                if call.kind in GUARDED and (max(call.number, call.ended) > since or call.open or call.number in noted)
            ]
            self._left = [call for call in (*ended, *left) if not _never_happened(call)]
            self._known = True

    @property
    def unclaimed(self) -> list[Call]:
        """Writes that happened after the loaded checkpoint and have answered no call yet."""
        self.read()
        return [call for call in self._left if call.outcome is not None]

    def note(self) -> None:
        """A checkpoint is about to be taken: keep in the line what it will not know."""
        with self.lock:
            self.since = self.ledger.count
            if not self._known and self.ledger.count <= self._since:
                return
            self.read()
            left = sorted(call.number for call in self._left)
            if left == self._noted:
                return
            stowed = stow(left, self.registry)
            self.write(rec.Note(now_us(), "", NOTE, str(self.ledger.count), stowed.value), stowed)
            self._noted = left

    def accept(self, numbers: Collection[int] | None = None) -> None:
        """The program knows of these writes, or of all: they answer no call any more."""
        with self.lock:
            self.read()
            given_up = [call for call in self._left if numbers is None or call.number in numbers]
            self._left = [call for call in self._left if call not in given_up]
            for call in given_up:
                # One that is not known to have ended would be offered to whatever state is loaded.
                if call.kind != "write" and call.open:
                    self.write(rec.Done(now_us(), call.run, call.path, "cancelled", of=call.number))

    def decided(self, call: Call) -> None:
        """Somebody has found out about a call: the next one like it gets its result, or is made."""
        with self.lock:
            self.read()
            mine = not call.run or any(one.number == call.number for one in (*self._open, *self.unsettled))
            for calls in (self._open, self.unsettled, self._left):
                calls[:] = [one for one in calls if one.number != call.number]
            if mine:
                self._left.append(call)

    def keep_lost(self, call: Call) -> None:
        with self.lock:
            self.read()
            if all(one.number != call.number for one in self._left):
                self._left.append(call)

    # -- what is in doubt -----------------------------------------------------------------------------------

    def settling(self) -> Steps:
        """Find out about what is in doubt, before anything new starts."""
        with self.lock:
            self.read()
            open_calls, self._open = self._open, []
        self.unsettled += yield from settle_all(self, open_calls, TOOLS.find)

    # -- calls ----------------------------------------------------------------------------------------------

    def recorded(self, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Call | None:  # noqa: ARG002 - the fingerprint says it all
        self.agent.check_free()
        if tool.name.startswith(OWN) and tool.kind == "read":
            return None
        with self.lock:
            self.read()
            if self._open:
                drive(self.settling())
            same = [call for call in self._left if call.tool in {tool.name, LOST}]
            return self._claim(tool, mark, same) if tool.kind in GUARDED else None

    def kept(self, tool: Tool, mark: bytes, own: Mapping[str, Call]) -> Call | None:
        """The same for a call in a run: what a rollback left standing can answer it, or a run that ended before it.

        ``own`` are the recorded calls of the run itself, should it have ended and be resumed.

        One whose record is lost, and which was made as somebody has found out, is perhaps this one.
        """
        if tool.kind not in GUARDED:
            return None
        with self.lock:
            self.read()
            same = [call for call in self._left if call.kept and call.tool == tool.name]
            same = [call for call in same if own.get(call.path, _OTHER).number != call.number]  # which have positions
            return self._claim(tool, mark, [*same, *(call for call in self._left if call.tool == LOST)])

    def _claim(self, tool: Tool, mark: bytes, same: list[Call]) -> Call | None:
        for call in same:
            if call.fingerprint == mark:
                self._left.remove(call)
                return call
        # Other agents are known by their names: what else one of them does is no repetition.
        known = [call for call in same if call.outcome is not None and not (call.run and tool.name.startswith(OWN))]
        if known:
            raise self._maybe_repeated(tool, known)
        return None

    def check_settled(self, tool: Tool | None = None) -> None:
        if tool is None or tool.kind != "read" or not tool.name.startswith(OWN):  # the time can be asked for
            super().check_settled()

    def _maybe_repeated(self, tool: Tool, calls: list[Call]) -> MaybeRepeated:
        effects = tuple(map(self.effect_of, calls))
        when = ", ".join(f"{effect.at:%H:%M:%S}" for effect in effects[:3])
        what = f"{tool.name} was called before ({when}), with other arguments"
        if any(call.tool == LOST for call in calls):
            what = f"something was done of which the record is lost, and {tool.name} may be that"
        return MaybeRepeated(
            f"{what}; it was not called",
            unclaimed=effects,
            hint="Declare arguments that differ each time as volatile=(...), make the same call again to get its"
            " result, or say that what happened is known: agent.accept(effect).",
        )


def _never_happened(call: Call) -> bool:
    """Whether a call can be left alone. One that may be repeated is open again after a failure, with its key."""
    if call.done is None or call.done.how in {"value", "lost", "fallback"}:
        return False
    if call.kind == "write":
        return True
    call.done = None
    return False


@contextmanager
def using(loop: Loop) -> Iterator[Loop]:
    """Inside, the agent is current."""
    try:
        with active(loop.lane):
            yield loop
    finally:
        loop.ended = True
