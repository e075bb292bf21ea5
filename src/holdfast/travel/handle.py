"""The agent and the store as programs have them, with all that looks through their history.

Owns the public methods, which the other modules of this room carry out; each is loaded when it is first used. The
handles of the room below know runs, and must not know who looks back at them; so this room has handles of its own that
derive from those, as those derive from the ones of ``agent``. The front door gives these: every store that a program
opens makes them. What always holds: what only looks changes nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, Unpack, cast

import holdfast.run.handle as below
import holdfast.run.store as store_below
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.points import INVARIANT_FAILED, UNSAVED
from holdfast.agent.when import DEFAULT, When
from holdfast.errors import BadOption, HoldfastError, InvariantViolated
from holdfast.run.runs import Run
from holdfast.run.steps import Steps, Work
from holdfast.travel.questions import Questions, StoreQuestions

if TYPE_CHECKING:
    from holdfast.agent.removal import Removal
    from holdfast.codec.state import State
    from holdfast.travel.bisect import Bisection, Check, Progress
    from holdfast.travel.blame import Blame
    from holdfast.travel.compare import Comparison, Side
    from holdfast.travel.execution import Execution
    from holdfast.travel.invariants import Guards, Invariant, Then, Violations
    from holdfast.travel.jobs import Done
    from holdfast.travel.minimal import Minimal
    from holdfast.travel.watch import Action, Hit, Watches, Watchpoint
    from holdfast.travel.whatif import Program, Validation, WhatIf

log = logging.getLogger("holdfast.travel")


class Rules(TypedDict, total=False):
    """The options of an invariant."""

    name: str
    then: Then
    most: int
    required: bool
    type: Any
    range: Sequence[Any]
    monotonic: Literal["up", "down"]
    unique: bool
    references: str
    field: str
    schema: Any


class Agent(Questions, below.Agent):
    """The handle on an agent. Get one from ``store.agent(name)``."""

    if TYPE_CHECKING:

        def branch(
            self, name: str, at: str | Checkpoint | None = None, *, workspace: str | os.PathLike[str] | None = None
        ) -> Agent:
            """Begin a branch at a checkpoint (default: here, saving unsaved changes first) and return a handle on it.

            ``workspace``: a directory of its own, which is not there yet: it gets the files of that checkpoint.
            """

    _in_memory = False  # whether nothing of it is ever saved

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with suppress(HoldfastError):  # what is marked may be damaged, and the state is not
            if why := self.suspect:
                log.warning("the newest checkpoint of %s is marked %s; it was opened all the same", self.name, why)

    # -- guarding -------------------------------------------------------------------------------------------

    @cached_property
    def _guards(self) -> Guards:
        from holdfast.travel.invariants import Guards

        guards = Guards(self)
        self._host.judge = guards.judge
        return guards

    @cached_property
    def _watches(self) -> Watches:
        from holdfast.travel.watch import Watches

        watches = Watches(self)

        def look(at: str) -> None:
            lane = self._lane()
            scope = lane.scope if lane is not None else None
            watches.look(at, quiet=isinstance(scope, Run) and scope.replaying)

        self._host.looking = look
        return watches

    def invariant(self, what: str | Callable[[Any], Any], /, **options: Unpack[Rules]) -> Invariant:
        """Say what must hold of the state; it is asked before each checkpoint of this handle.

        ``what`` is an expression, ``"budget >= 0"``, or a function of the state that returns False or raises where it
        does not hold; or the path of a value, with one or more of these rules:

        - ``type``: a type, several, or a name: ``"number"``. ``range``: ``(lowest, highest)``, None for no limit.
        - ``monotonic``: ``"up"`` or ``"down"``: it never goes the other way from one checkpoint to the next.
        - ``unique``: the items of a list, or their ``field``, are all different. ``references="customers"``: each item,
          or its ``field``, is among what stands there.
        - ``schema``: a JSON schema or a pydantic model.
        - ``required``: the value is there. Otherwise one that is missing breaks nothing, in an expression neither:
          a part that ``and`` joins holds where a place in it is missing, unless it asks for that: ``exists(budget)``.

        Where it does not hold, ``then`` says what happens. ``"warn"``: a warning in the log, and the checkpoint is
        marked suspect. ``"refuse"``: nothing is saved, ``InvariantViolated`` is raised, and the live state stays.
        ``"rollback"``: the failing state is kept beside the line and the agent goes back to its newest checkpoint, at
        most ``most`` times in a row and only if nothing outside would have to be undone; otherwise as ``"refuse"``, and
        the error has the ``plan``.
        """
        from holdfast.travel.invariants import Invariant

        self._check_writer()
        made = Invariant(what, **options)
        self._guards.all.append(made)
        return made

    def check(
        self,
        *invariants: Invariant,
        since: str | Checkpoint | None = None,
        until: str | Checkpoint | None = None,
    ) -> Violations:
        """The checkpoints of the branch that break invariants, oldest first; without any given, those of this handle.

        ``since``: only checkpoints after this one; ``until``: those that lead to this one. The list has ``nowhere``:
        places that the invariants speak of and that none of these checkpoints has.
        """
        from holdfast.travel.invariants import check_history

        asked = invariants or tuple(self._guards.all if "_guards" in vars(self) else ())
        line = self.log(at=until)[::-1]
        if since is not None:
            first = self.at(since)
            line = line[line.index(first) + 1 :] if first in line else line
        return check_history(line, asked)

    def watch(self, path: str, when: str | None = None, *, then: Action | Callable[[Hit], Any] = "log") -> Watchpoint:
        """Be told when a place of the state changes, and ``when``, about ``old`` and ``new``, is true of the change.

        It is looked at each checkpoint, step and tool call. ``then``: ``"log"`` a warning, ``"raise"``
        ``WatchTriggered``, take a ``"dump"``, ask for a ``"checkpoint"`` at the next safe point, or a function that is
        given the ``Hit``. What comes back has the ``hits``, and ``stop()`` ends it.
        """
        self._check_writer()
        return self._watches.add(path, when, then)

    @property
    def suspect(self) -> str:
        """Why the newest checkpoint is marked suspect or corrupt; empty where it is not."""
        head = self.head
        if head is None or head.validity == "good":
            return ""
        return f"{head.validity}: {head.validity_reason}".removesuffix(": ")

    def _going_back(self, error: InvariantViolated) -> Steps:
        """Go back to the newest checkpoint, if the invariant asks for that and it may be done; else raise."""
        rule = cast("Invariant", error.invariant)
        head = self.head
        if rule.then != "rollback" or head is None:
            raise error
        times = self._sent_back[1] if self._sent_back[0] == head.id else 0
        times = max(times, (yield Work(lambda: self._failed_at(head))))
        if times >= rule.most:
            error.plan = yield Work(lambda: self.plan_rollback(head))
            error.hint = f"It went back {times} times in a row. Look at error.plan, then error.plan.apply()."
            raise error
        self._sent_back = head.id, times + 1
        log.warning("%s; it is to go back to %s", error.message.removesuffix(UNSAVED), head.label or head.short_id)
        yield from self._send_back(rule.name, error, None, head, INVARIANT_FAILED)
        return head

    _sent_back = ("", 0)  # to which checkpoint, and how often in a row

    def _failed_at(self, head: Checkpoint) -> int:
        """How often an invariant has sent the agent back to its newest checkpoint, as its history tells."""
        return sum(one.parent_id == head.id and one.trigger == INVARIANT_FAILED for one in self.abandoned())

    def _saved_state(self) -> State:
        """That of the newest checkpoint that is stored or on its way, which the next one comes after."""
        told, under_way = self._document.told, self._check_writer().under_way
        last = next((one for one in reversed(told.unacknowledged) if one in under_way), None)
        return told.with_sections(last.after if last is not None else told.stored)

    def _secure(self, label: str) -> None:
        """What is saved before a rollback is saved, whatever it breaks."""
        self._host.sparing = True
        try:
            super()._secure(label)
        finally:
            self._host.sparing = False

    # -- looking back ---------------------------------------------------------------------------------------

    def bisect(
        self,
        check: Callable[[Any], Any] | str | Check | None = None,
        /,
        *,
        when: str | None = None,
        good: str | Checkpoint | None = None,
        bad: str | Checkpoint | None = None,
        repeats: int = 1,
        confidence: float = 0.95,
        all: bool | None = None,
        minimise: bool = True,
        program: Program | None = None,
        fresh: bool = False,
        progress: Progress | None = None,
    ) -> Bisection:
        """Find the first bad checkpoint between ``good`` (default: the oldest) and ``bad`` (default: the newest).

        ``check(state)`` returns True where all is well, False where not; what it raises counts as neither. Or it is an
        expression that is true where all is well; with ``when`` it is true where it is bad.

        - ``repeats``: for a check that is not always right: ask it up to so many times, until the answer is as likely
          as ``confidence`` says.
        - ``all``: look at every checkpoint, so that a history that was bad more than once is known to be. Expressions
          do that by themselves in histories of up to 1,000.
        - ``minimise``: also find the smallest part of the change that makes it bad, and, where a run lies between the
          two checkpoints, the step of it at which it became bad, by executing the run again (``turn``).
        - ``program``: the one that has the run's function, as for ``Store.replay``. Not given: if it is in this one.
        - ``fresh``: ask again about what an earlier bisection with the same check found out.
        """
        from holdfast.travel import bisect

        asked = bisect.check_of(check, when)
        line, cut = bisect.line_to(self, bad)
        if good is not None:
            first = self.at(good)
            if first not in line:
                raise BadOption(
                    "the good end is not an ancestor of the bad one", hint="Both have to lie on one line of history."
                )
            line = line[line.index(first) :]
        whole = all if all is not None else isinstance(asked, bisect.Asked) and len(line) <= bisect.SCAN_MAX
        search = bisect.Search(
            self, asked, line, repeats=repeats, confidence=confidence, fresh=fresh, progress=progress
        )
        found = search.run(whole=whole and repeats == 1, good=good is not None)
        found.cut = cut if good is None else ""
        search.explain(found, minimise=minimise, program=program)
        return found

    def blame(self, path: str | Sequence[Any], at: str | Checkpoint | None = None) -> Blame:
        """The checkpoint that last changed a place of the state, with the effects and the line that led to it.

        ``path`` is a text, ``"messages[3].content"``, or the keys one after another. A place in a list is followed
        through the moves of other items. Reads the changes of the history, not its states.
        """
        from holdfast.travel.blame import blame

        self._check_open()
        self._store.flush()
        return blame(self, path, at)


class Store(StoreQuestions, store_below.Store):
    """A place where agents' states are kept, and what they did. Open one with ``holdfast.open()``."""

    _handle: ClassVar[type[Agent]] = Agent

    def diff(self, old: Side, new: Side | None = None) -> Comparison:
        """What differs between two points: ``NAME``, ``NAME@REV``, ``NAME@run:ID``, a checkpoint, a run, a dump's file.

        They may be of one agent or of two. Without ``new``: the newest checkpoint of the same agent, and for a dump the
        one that its agent stood at. The result has the ``state``, ``effects`` and ``metadata`` that differ, and a
        ``summary()`` of at most ten lines.
        """
        from holdfast.travel.compare import compare

        self._check_open()
        self.flush()
        return compare(self, old, new)

    if TYPE_CHECKING:

        def agent(
            self,
            name: str,
            *,
            branch: str = "main",
            create: bool = True,
            readonly: bool = False,
            wait_s: float = 0.0,
            takeover: bool = False,
            recover: bool = False,
            config: Any = None,
            when: When | None = DEFAULT,
            workspace: str | os.PathLike[str] | None = below.REMEMBERED,
        ) -> Agent:
            """The agent of that name, its last state already there.

            - ``branch``: which line of history.
            - ``create``: with False, raise ``UnknownAgent`` where there is none.
            - ``readonly``: take no lock, and see the newest checkpoint at the time of opening.
            - ``wait_s``: wait so long for another process that writes the branch; then, or without it, ``AgentBusy``.
            - ``takeover``: take the branch from a writer that is out of reach.
            - ``recover``: where its state cannot be trusted (``Damaged``), go on from the newest valid checkpoint, on
              a new branch.
            - ``config``: anything that can be saved; its digest goes into the metadata of each checkpoint.
            - ``when``: when it is saved by itself; None: only when the program says so. Not given: what
              ``holdfast.toml`` says, in the store's directory or the one that this is in, else ``When(adaptive=True)``.
            - ``workspace``: a directory whose files each checkpoint carries, and that a rollback puts back. Not given:
              the one that the branch had last on this machine. None: its files stay as they are, whatever the state
              does.
            """

    def remove(self, name: str, *, dry_run: bool = False, with_copies: bool = False) -> Removal:
        """Remove an agent with its whole history, its log and its verdicts, and free the space that nothing else needs.

        There is no way back. Copies keep what they see, and are named in the report; ``with_copies`` removes them, too.
        Raises ``AgentBusy`` while another process writes the agent; handles of this process on it are closed.
        ``dry_run`` only says what would go.
        """
        from holdfast.travel import journal

        found = super().remove(name, dry_run=dry_run, with_copies=with_copies)
        for one in (found.name, *found.copies) if found.done else ():
            journal.forget(self.place, one)
        return found

    # -- executing history again: see ``whatif`` and ``minimal`` ------------------------------------------------

    def replay(
        self, agent: str, run: str | Checkpoint | None = None, *, program: Program, **how: Unpack[How]
    ) -> Execution:
        """Execute a run again, with its recorded answers, in a process that can do nothing outside, and compare.

        ``run`` is an id, or a checkpoint: the run in which that was taken (default: the newest). It is executed from
        its beginning; the state is compared by digest at every checkpoint, and so are calls and the end. ``program`` is
        a file or a module that has its function, or that function. Nothing is written. See ``How``.
        """
        from holdfast.travel import whatif

        return whatif.replay(self, agent, run, program=program, **how)

    def what_if(
        self,
        agent: str,
        *variations: WhatIf,
        run: str | Checkpoint | None = None,
        program: Program,
        progress: Done | None = None,
        **how: Unpack[How],
    ) -> list[Execution]:
        """Execute a run again with something different, each variation in a process of its own. Nothing is saved.

        A call that is recorded with the same arguments is answered from the record. Another one is made only if the
        variation allows it; otherwise the execution stops there, and says what it would have done.
        """
        from holdfast.travel import whatif

        return whatif.what_if(self, agent, *variations, run=run, program=program, tell=progress, **how)

    def keep(self, execution: Execution, branch: str, *, why: str = "") -> str:
        """Save what came of a variation as a branch that begins where the run began. It says that it never happened."""
        from holdfast.travel import whatif

        return whatif.keep(self, execution, branch, why=why)

    def validate(
        self, agent: str, run: str | Checkpoint | None = None, *, program: Program, code: str, **how: Unpack[Fix]
    ) -> Validation:
        """Execute a failing run with the code in another directory, to see whether the failure is gone.

        It fails where it raises, or where one of the ``checks`` (expressions, or MODULE:FUNCTION) does not hold for its
        last state. ``healthy`` are runs, as agent and id (None: the newest), that must go the same way as they did.
        """
        from holdfast.travel import whatif

        return whatif.validate(self, agent, run, program=program, code=code, **how)

    def moments(
        self,
        agent: str,
        path: str = "",
        run: str | Checkpoint | None = None,
        *,
        program: Program,
        **how: Unpack[How],
    ) -> Execution:
        """Execute a run again and look before every line of the program; ``.moments`` has what changed, and where.

        With a path, each change of what stands there; with ``check=``, each change of its answer.
        """
        from holdfast.travel import minimal

        return minimal.moments(self, agent, path, run, program=program, **how)

    def minimise(
        self, agent: str, target: str, run: str | Checkpoint | None = None, *, program: Program, **how: Unpack[Least]
    ) -> Minimal:
        """The smallest part of a list or dict with which a run still fails: it raises, or its check does not hold.

        ``target``: ``state.messages`` and the like, of the state in which the run began; ``args.documents``; or
        ``results``, those of its calls that read, where one that is taken away is an empty one of its type.
        """
        from holdfast.travel import minimal

        return minimal.minimise(self, agent, target, run, program=program, **how)


class How(TypedDict, total=False):
    """How a run is executed again.

    ``branch``: of the agent. ``code``: a directory with other code. ``check``: an expression, or MODULE:FUNCTION, that
    is asked about the last state. ``types``: as for ``holdfast.open``.
    """

    branch: str
    code: str
    check: str
    types: Sequence[str]


class Fix(TypedDict, total=False):
    """How a fix is tried. ``allow`` and ``reads``: as in ``WhatIf``. ``progress`` is told of each execution."""

    branch: str
    checks: Sequence[str]
    healthy: Sequence[tuple[str, str | None]]
    allow: Sequence[str]
    reads: bool
    types: Sequence[str]
    progress: Done | None


class Least(How, total=False):
    """How the least that fails is looked for. ``progress`` is told how many items are left, and how often it tried."""

    allow: Sequence[str]
    reads: bool
    progress: Callable[[int, int], None] | None


open_store = Store.opened
