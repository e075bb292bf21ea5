"""Recovery: from a damaged head to the newest valid ancestor, on a new branch, saying what is lost.

Owns the search for that ancestor and the words for what lies after it; errors about damage are completed here, so that
whoever meets one learns what would be left. Never removes or changes anything that is stored, and never passes over
what only cannot be reached now. Running it again finds the branch that it made before. What happened outside has
happened, whatever state one goes back to: the new branch inherits every record of the damaged one that can be trusted.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from holdfast.agent import history
from holdfast.agent.evidence import Found, Histories, Lines, Told
from holdfast.agent.opened import settle
from holdfast.codec.state import Reader
from holdfast.codec.types import Registry
from holdfast.errors import Damaged, Forgotten, Unavailable
from holdfast.store.catalog import View
from holdfast.store.changes import Change, NewRecord
from holdfast.store.database import Contents, Database
from holdfast.store.rows import BEGINNING, DIGEST_BYTES, LOST, Agent, Branch, End, Point, read_body

if TYPE_CHECKING:
    from holdfast.agent.store import Store

_NAMED_MAX = 5
"""How many of the checkpoints that are passed over are named one by one."""

_GONE = NewRecord(0, b"", b"", bytes(DIGEST_BYTES), LOST)
"""The record that stands for those that are lost."""

_NO_WAY = "Put the store back from a backup, or see with `holdfast repair` what can be saved of it."


class Finding(NamedTuple):
    """The newest checkpoint at or above a head that can be trusted, and those that were passed over on the way.

    The records of the branch can be trusted to ``end``; ``broken`` says why no further, if there are more.
    """

    valid: Point | None
    passed: list[str]
    end: End
    broken: str

    @property
    def lost(self) -> str:
        """In words what goes missing; empty when nothing does."""
        said = []
        if self.passed:
            named = "; ".join(self.passed[:_NAMED_MAX])
            if len(self.passed) > _NAMED_MAX:
                named += f"; and {len(self.passed) - _NAMED_MAX} more"
            if self.valid is None:
                said.append(f"everything: no checkpoint can be trusted: {named}")
            else:
                where = f"{self.valid.id.hex()[:12]} (#{self.valid.manifest.depth})"
                said.append(f"{len(self.passed)} checkpoint(s) after {where} cannot be trusted: {named}")
        if self.broken:
            said.append(f"what happened outside after record {self.end.records} cannot be trusted: {self.broken}")
        return "; ".join(said)


def find(contents: Contents, branch: Branch) -> Finding:
    """Walk from a branch's head towards its root until a checkpoint can be trusted; and along its records."""
    view, sound = contents.view, _Sound(contents)
    passed: list[str] = []
    n, expected, depth = branch.head, branch.id, branch.depth
    valid, met = None, set[int]()
    while n not in met and n and valid is None:  # what leads back to itself leads nowhere
        met.add(n)
        try:
            point = view.point(n)
            if expected and point.id != expected:
                raise Damaged(f"checkpoint {n} is not the one that is named", what=(f"checkpoint {n}",))
            reason = _problem_with(contents, point, branch.a)
            if not reason:
                valid = point
                continue
            passed.append(f"{point.id.hex()[:12]}: {reason}")
            depth = point.manifest.depth - 1
            n, expected = point.row.parent, point.manifest.parent
            if not n:
                n, expected = next((over for _, over in view.rows("shallow", "WHERE n = ?", (point.n,))), 0), b""
        except (Damaged, Forgotten) as error:
            passed.append(f"{expected.hex()[:12] or n}: {error.message}")
            n, expected = sound.before(branch, depth), b""
    return Finding(valid, passed, *_records(view, branch, sound))


def _problem_with(contents: Contents, point: Point, a: int) -> str:
    """Why a checkpoint's state cannot be trusted; empty when it can."""
    try:
        for _, _, body in contents.view.rows("validity", "WHERE a = ? AND n = ?", (a, point.n)):
            judged = read_body(body, f"validity {point.n}", "validity")
            return f"it is marked {judged.get('validity')}: {judged.get('reason', '')}".removesuffix(": ")
        history.Stored(contents, point).since_base()
        Reader(history.state_of(contents, point), Registry(), inert=True).everything()
    except Damaged as error:
        return error.message
    return ""


class _Sound:
    """All rows that are sound, for where links are broken: read when the first of them is needed."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    @cached_property
    def found(self) -> Found:
        made = Found()
        made.read(self._contents.view, ("log", "loose", "checkpoint", "shallow", "record"), lambda *_: None)
        return made

    def before(self, branch: Branch, depth: int) -> int:
        """The nearest ancestor of one that cannot be read, by the stretch of the branch that it was made on."""
        found, told = self.found, Told(self.found.log)
        deep = Histories(self._contents, found, Lines({})).depth
        return found.before(told, branch.b, branch.epoch, depth, deep, found.find)


def _records(view: View, branch: Branch, sound: _Sound) -> tuple[End, str]:
    """How far the records of a branch can be trusted, and why not further.

    Where some are missing, all before these count that are whole: what happened must not be forgotten for want of a
    second witness. Where all are there, and are not those that were written, only what checkpoints speak of counts.
    """
    try:
        if Lines({record.r: record for record in view.line(branch.line)}).end(branch.line) == branch.end:
            return branch.end, ""
    except Damaged:
        pass
    found = sound.found
    lines, ancestors = Lines(found.records), found.above([branch.head])
    spoken = {record.r for record in found.records.values() if record.b == branch.b}
    spoken |= {found.rows[n].line for n in ancestors if n in found.rows}
    ends = [end for r in spoken if (end := lines.end(r)) is not None]
    broken = "they are not those that were written"
    if lines.end(branch.line) is None:
        broken = lines.break_below(branch.line)
    else:
        said = set()
        for n in ancestors:
            with suppress(Damaged, Forgotten):
                said.add(view.point(n).manifest.effects)
        ends = [end for end in ends if end.position in said]
    return max(ends, key=lambda end: end.records, default=BEGINNING), broken


def explain(store: Store, name: str, branch: Branch, error: Damaged) -> Damaged:
    """Complete an error that was met while reading the head of a branch: what would be left, and what lost."""
    if error.newest_valid or error.lost:
        return error
    try:
        with store._db.moment() as contents:
            finding = find(contents, branch)
    except (Damaged, Unavailable):
        return error
    lost = finding.lost
    if not lost:
        return error
    error.lost = lost
    if finding.valid is None:
        error.hint = _NO_WAY
        if not finding.passed:
            error.hint = (
                f"store.agent({name!r}, recover=True) goes on without it on a new branch. Lost would be: {lost}"
            )
        return error
    error.newest_valid = finding.valid.id.hex()
    error.hint = (
        f"The newest valid checkpoint is {error.newest_valid[:12]} (#{finding.valid.manifest.depth}); "
        f"store.agent({name!r}, recover=True) goes on from it on a new branch. Lost would be: {lost}"
    )
    return error


def recover(store: Store, name: str, agent: Agent, branch: Branch) -> tuple[Branch, str]:
    """The branch to go on with, and in words what is lost (empty when nothing is)."""
    with store._db.moment() as contents:
        finding = find(contents, branch)
        lost = finding.lost
        if not lost:
            return branch, ""
        if finding.valid is None and finding.passed:
            raise Damaged(
                f"no checkpoint of {name!r} can be trusted", what=tuple(finding.passed), lost=lost, hint=_NO_WAY
            )
        branches = {one.name: one for one in contents.view.branches(agent.a)}
        tags = {tag.name for tag in contents.view.tags(agent.a)}
        start = finding.valid.id if finding.valid is not None else b""
        number = 1
        while (new := f"recovered-{number}") in branches.keys() | tags:
            existing = branches.get(new)
            if existing is not None and (existing.body.get("from"), existing.body.get("recovered")) == (
                start,
                branch.b,
            ):
                again = find(contents, existing)
                if not again.passed and not again.broken:
                    return existing, lost
            number += 1
    more = {"recovered": branch.b}
    # That more had happened outside must not be forgotten: one record stands for all that cannot be trusted.
    gone = [_GONE] if finding.broken else []
    return store._add_branch(agent, new, finding.valid, more, end=finding.end, lost=gone), lost


def doubt(db: Database) -> None:
    """Let each line say that records behind it are lost, before the store counts as it is: nobody knows of which.

    So what an agent does next is in doubt until somebody has found out what it had done.
    """

    def say(change: Change) -> None:
        found = []
        for (b,) in change.reader.run("SELECT b FROM branch WHERE a > 0 ORDER BY b"):
            with suppress(Damaged):  # of which verify tells; nothing is written behind what is not there
                branch = change.branch_at(b)
                whole = not branch.line or change.record(branch.line).i == branch.records
                found += [branch] if whole and not branch.body.get("arriving") else []
        for branch in found:
            moved = change.move(branch, branch.at_end(change.put_records(branch.b, branch.end, [_GONE])))
            with suppress(Damaged):
                settle(change, [moved])

    try:
        db.change(say)
        db.accept_loss()
    except BaseException:
        db.close()
        raise
