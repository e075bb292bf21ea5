"""The table of open runs, as far as this room cares: that it says what the lines and the log say.

Owns from which record on a line is its branch's own matter, and bringing the rows of a branch back to what they should
be. What they should be, the room above knows, which reads records. What always holds: a row tells where to look, and
nothing is done because of it alone; what came from elsewhere, by a transfer or with a branch, has no row until somebody
resumes or adopts it, so that a copy never acts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from importlib import import_module

from holdfast.errors import Damaged, InputError
from holdfast.store.catalog import View
from holdfast.store.changes import Change, Opens
from holdfast.store.rows import Branch, Entry, Open, Record, body_bytes

_PROJECTION = "holdfast.run.opened"
"""The module that reads records. By its name: this room is loaded without it, and needs it only here."""


def is_own(view: View, branch: Branch) -> bool:
    """Whether the newest record of a line was written here, and on this branch, or counts as if it had been."""
    return bool(branch.line) and _is_own(branch, view.record(branch.line))


def since(branch: Branch, line: Iterable[Record]) -> int:
    """The number of the last record of a line that is not the branch's own."""
    return max((one.i for one in line if not _is_own(branch, one)), default=0)


def _is_own(branch: Branch, record: Record) -> bool:
    above, upto = branch.body.get("own") or (0, 0)
    return record.b == branch.b or above < record.i <= upto


def wanted(view: View, branch: Branch, log: Sequence[Entry]) -> list[Open] | None:
    """The rows that a branch should have; None where nobody can tell, because its records cannot be read.

    ``log`` is its agent's.
    """
    try:
        found: list[Open] = import_module(_PROJECTION).rows_of(view, branch, log)
    except (Damaged, InputError):
        return None
    return found


def difference(there: Iterable[Open], wanted: Iterable[Open]) -> Opens:
    """What has to change so that these rows become those."""
    old, new = set(map(_key, there)), list(wanted)
    left = old.intersection(map(_key, new))
    drop = sorted((key[0], key[1]) for key in old - left)
    return Opens(drop, [one for one in new if _key(one) not in left])


def _key(one: Open) -> tuple[bytes, bytes, int, bytes, bytes, int]:
    return one.run, one.signal, one.due, body_bytes(one.body), one.queue, one.turn


def settle(change: Change, branches: Sequence[Branch], held: Collection[int] | None = None) -> None:
    """Let the rows of some branches of an agent be what they should be.

    Those that are not ``held`` somebody may be writing: of these only the rows of signals are touched.
    """
    there = [(branch, _there(change, branch)) for branch in branches]
    log = change.log(branches[0].a) if branches else ()  # read after the rows, so that it has every signal that has one
    for branch, rows in there:
        should = wanted(change, branch, log)
        if held is None or branch.b in held:
            opens = difference(rows, should or []) if rows is not None else Opens([(None, None)], should or [])
        elif rows is not None and should is not None:
            drop, put = difference(rows, should)
            opens = Opens([one for one in drop if one[1]], [one for one in put if one.signal])
        else:
            continue
        change.set_open(branch.b, opens)


def _there(change: Change, branch: Branch) -> list[Open] | None:
    """The rows of a branch; None where they are damaged, which keeps nobody from writing what they should be."""
    try:
        return change.opened(branch.b)
    except Damaged:
        return None


def adopt(change: Change, branch: Branch, above: int = 0) -> Branch:
    """Let the records of a line above a number be the branch's own, wherever they were written."""
    made = branch._replace(body={**branch.body, "own": [above, branch.records]})
    change.move(branch, made)
    return made
