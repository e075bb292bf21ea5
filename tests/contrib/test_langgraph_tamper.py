"""One thread, in our store and in the official SqliteSaver's file, changed behind their backs: who notices?

Each change is made through plain SQL or to the file itself, on a copy that nobody has open. Then everything is read
that a saver can be asked. A change is *noticed* when reading raises, or (ours) when ``verify`` reports it. It is
*silent* when the answers differ and nothing is noticed. ``python -m tests.contrib.test_langgraph_tamper`` prints the
table as Markdown.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from holdfast.agent import branch as sealing
from holdfast.agent.background import fold_below
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import HoldfastError
from tests.contrib.tampering import CHANGES, FILES, HONEST, OURS, PERSON, THEIRS, UNCHAINED
from tests.contrib.threads import checkpoint, config, told
from tests.memory import memory

STEPS = 30
NO_CHANGE, SILENT, BY_READING, BY_VERIFY = "same answers", "silent", "reading", "verify"
MARK = f"written by the {HONEST} node"


def build(kind: str, directory: Path, start: int, stop: int) -> None:
    """A thread with messages, metadata and pending writes. Ours seals early, so that it has segments and nodes, too."""
    with mock.patch.object(sealing, "SEAL_CHECKPOINTS", 12), opened(kind, directory) as saver:
        messages = [_message(number) for number in range(start)]
        at = saver.get_tuple(config("t")).config if start else config("t")
        for number in range(start, stop):
            messages.append(_message(number))
            one = checkpoint({"messages": list(messages), "balance": 100 + number})
            one["id"] = f"1f000000-0000-6000-8000-{number:012}"
            one["channel_versions"] = {"messages": number + 1, "balance": number + 1}
            metadata: Any = {"source": "loop", "step": number, "parents": {}, "approved_by": f"{PERSON} {number}"}
            at = saver.put(at, one, metadata, one["channel_versions"])
            saver.put_writes(at, [("balance", 101 + number), ("messages", f"{MARK} {number}")], f"task-{number}", "~1")
        if kind == OURS:  # at once, and not when somebody has the time
            for row in saver.store._db.view.checkpoints("WHERE sealed = 1"):
                fold_below(saver.store._db, row.n)


def _message(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{MARK} {number} " + random.Random(number).randbytes(700).hex()}


class opened:  # noqa: N801 - a context manager
    def __init__(self, kind: str, directory: Path) -> None:
        self._kind, self._directory = kind, directory

    def __enter__(self) -> Any:
        if self._kind == OURS:
            self._saver: Any = HoldfastSaver(self._directory / "store")
            return self._saver
        self._connection = sqlite3.connect(self._directory / FILES[THEIRS], check_same_thread=False)
        return SqliteSaver(self._connection)

    def __exit__(self, *_: object) -> None:
        (self._saver if self._kind == OURS else self._connection).close()


def answers(saver: Any) -> Any:
    """All that the thread's owner can see."""
    newest = saver.get_tuple(config("t"))
    listed = list(saver.list(config("t")))
    single = [saver.get_tuple(found.config) for found in listed]
    return [told(newest), [told(found) for found in listed], [told(found) for found in single]]


def judge(kind: str, directory: Path, expected: Any) -> tuple[str, str]:
    """What became of a changed copy, and how it was noticed."""
    try:
        with opened(kind, directory) as saver:
            try:
                found = answers(saver)
            except HoldfastError as error:
                return BY_READING, type(error).__name__
            except Exception as error:
                if kind == OURS:
                    raise AssertionError(f"an error that is none of ours: {error!r}") from error
                return BY_READING, type(error).__name__
            same = found == expected
            if kind == OURS and not saver.store.verify().ok:
                return BY_VERIFY, "verify" if same else "verify, after other answers"
            return (NO_CHANGE if same else SILENT), ""
    except HoldfastError as error:
        return BY_READING, f"{type(error).__name__} when opened"
    except sqlite3.DatabaseError as error:
        return BY_READING, type(error).__name__


# -- the table ----------------------------------------------------------------------------------------------


class Tried(NamedTuple):
    """How often a change was tried on one of the two, and what came of it."""

    outcomes: Counter[str]
    details: Counter[str]


def make(directory: Path) -> dict[str, tuple[Path, Any]]:
    """Both originals with their answers, and a copy of each one's file from before its last steps."""
    made = {}
    for kind, file in FILES.items():
        place = directory / kind
        place.mkdir(parents=True)
        build(kind, place, 0, STEPS - 5)
        shutil.copy(place / file, directory / f"old {kind}")
        build(kind, place, STEPS - 5, STEPS)
        with opened(kind, place) as saver:
            made[kind] = (place, answers(saver))
    return made


def try_all(directory: Path) -> dict[str, dict[str, Tried]]:
    """Every change on both: name of the change -> saver -> what came of it."""
    made = make(directory)
    found: dict[str, dict[str, Tried]] = {}
    scratch = directory / "scratch"
    for change in CHANGES:
        for kind, ways in change.ways.items():
            original, expected = made[kind]
            tried = found.setdefault(change.name, {}).setdefault(kind, Tried(Counter(), Counter()))
            for apply in ways(original):
                shutil.rmtree(scratch, ignore_errors=True)
                shutil.copytree(original, scratch)
                apply(scratch)
                outcome, detail = judge(kind, scratch, expected)
                tried.outcomes[outcome] += 1
                tried.details[detail or outcome] += 1
    return found


def markdown(found: dict[str, dict[str, Tried]]) -> str:
    """The table, for the documentation."""
    lines = [f"| change | {THEIRS} | {OURS} |", "|---|---|---|"]
    lines += [
        f"| {name} | {_cell(by_kind.get(THEIRS))} | {_cell(by_kind.get(OURS))} |" for name, by_kind in found.items()
    ]
    return "\n".join(lines)


def _cell(tried: Tried | None) -> str:
    if tried is None:
        return "has no sums"
    words = {
        BY_READING: "noticed by reading",
        BY_VERIFY: "noticed by `verify`",
        SILENT: "**other answers, no error**",
        NO_CHANGE: "no effect",
    }
    total = tried.outcomes.total()
    parts = [f"{words[way]}" + (f" {tried.outcomes[way]}/{total}" if tried.outcomes[way] < total else "")
             for way in words if tried.outcomes[way]]  # fmt: skip
    return ", ".join(parts)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Tried]]:
    with memory("holdfast-tamper-") as directory:
        return try_all(directory)


def test_every_change_of_ours_is_noticed(found):
    print("\n" + markdown(found))
    for name, by_kind in found.items():
        print(f"{name}: {dict(by_kind[OURS].details)}")
    for name, by_kind in found.items():
        outcomes = by_kind[OURS].outcomes
        if name in UNCHAINED:
            continue
        assert outcomes.total() > 0, f"{name}: nothing was tried"
        assert outcomes[SILENT] == 0, f"{name}: other answers, and nobody noticed: {dict(outcomes)}"
        # A flip in a part of the file that nothing uses changes nothing; every change of content must be noticed.
        assert outcomes[NO_CHANGE] == 0 or "file" in name, f"{name}: not noticed: {dict(outcomes)}"


@pytest.mark.parametrize("name", UNCHAINED)
def test_a_forger_who_recomputes_a_writes_sum_is_not_noticed(found, name):
    """A limit, stated where the table is. If this fails because it is noticed, the limit is gone: say so there."""
    outcomes = found[name][OURS].outcomes
    assert outcomes[SILENT] == outcomes.total() > 0


def test_the_official_file_gives_other_answers_without_an_error(found):
    """What the comparison is for. If a newer version notices, the table in the documentation is out of date."""
    for name in ("a value in a checkpoint forged", "a checkpoint added", "a task's writes deleted"):
        outcomes = found[name][THEIRS].outcomes
        assert outcomes[SILENT] == outcomes.total(), f"{name}: {dict(outcomes)}"


if __name__ == "__main__":
    with memory() as place:
        print(markdown(try_all(place)))
