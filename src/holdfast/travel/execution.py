"""What came of executing a run again: where it went another way, what it came by, what was watched.

Owns the words for that, as they travel from the process that executes to the one that asked. Knows nothing of either.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from holdfast.errors import BadOption

RECORDED = "recorded up to"
"""How the status begins of what came to where the record ends."""


class Difference(Struct, frozen=True):
    """Where two histories part: what was recorded, and what the program does now. ``line`` is the program's."""

    kind: str  # call, state, result, error, end
    path: str
    expected: str
    actual: str
    line: str = ""
    differs: list[str] = []
    step: int = 0

    def __str__(self) -> str:
        where = f"at {self.path}" if self.path else "at the end"
        line = f", {self.line}" if self.line else ""
        text = f"{where}{line}\n  expected: {self.expected}\n  actual:   {self.actual}"
        return f"{text}\n  differs:  {'; '.join(self.differs)}" if self.differs else text


class Passed(Struct, frozen=True):
    """A checkpoint that an execution has come by. ``same`` is None where the record has none there."""

    path: str
    label: str
    id: str
    digest: str
    same: bool | None


class Step(Struct, frozen=True):
    """A call or a checkpoint that the program has come to. ``answer``: record, changed, live, or empty."""

    number: int
    path: str
    what: str
    line: str
    answer: str = ""


class Moment(Struct, frozen=True):
    """Something that was watched has become another: after this line, before this step."""

    line: str
    source: str
    step: int
    old: str
    new: str


class Execution(Struct):
    """What came of executing a run again."""

    agent: str = ""
    branch: str = ""
    run: str = ""
    function: str = ""
    status: str = ""  # finished, failed, stopped (see ``stopped``), or as far as it is recorded
    result: str = ""
    error: str = ""
    stopped: str = ""
    calls: int = 0
    live: list[str] = []
    checkpoints: list[Passed] = []
    steps: list[Step] = []
    difference: Difference | None = None
    suspect: list[str] = []  # checkpoints whose states break an invariant of the program, where they are others
    changes: list[str] = []  # how the last state differs from the recorded one
    check: bool | None = None
    moments: list[Moment] = []
    nowhere: list[str] = []  # the place that was watched, if it never was there
    blocked: list[dict[str, str]] = []
    isolation: list[str] = []
    code_changed: bool = False
    failed: str = ""  # why nothing, or not all, was executed
    seconds: float = 0.0
    again: int = 0  # whoever debugs it wants to be at this step, which lies behind
    again_until: str = ""  # or at the newest one before it at which this holds
    dap: dict[str, Any] = {}  # where the conversation with an editor is
    misnamed: tuple[str, str] | None = None  # message and hint: what was to be different is nowhere
    states: list[tuple[str, str]] = field(default_factory=list)  # label and encoded state, where they were asked for

    def misname(self, error: BadOption) -> None:
        """Something was to be different that is nowhere: no such tool, call, argument or place. The first counts."""
        self.misnamed = self.misnamed or (error.message, error.hint)

    @property
    def same(self) -> bool:
        """Whether it went the same way: every call, the state at every checkpoint, and the end."""
        return self.difference is None and not self.blocked and not self.failed and not self.stopped

    @property
    def partial(self) -> bool:
        """Whether it came to where the record ends, or to a call of which nobody knows what came of it."""
        return self.status.startswith(RECORDED)

    @property
    def unknown(self) -> str:
        """Why nobody can say what would come of it: it was not executed to its end, or something was refused to it."""
        refused = f"it was refused: {self.blocked[0]['what']} at {self.blocked[0]['line']}" if self.blocked else ""
        return self.failed or self.stopped or refused

    @property
    def compared(self) -> int:
        """The checkpoints whose states are proven to be equal."""
        return sum(one.same is True for one in self.checkpoints)
