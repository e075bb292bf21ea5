"""The random programs would notice: each way in which the document could forget something makes one of them fail."""

from __future__ import annotations

import pytest

from holdfast.codec import capture, state
from holdfast.codec.capture import Capture
from holdfast.codec.proofs import Run
from holdfast.codec.told import Told
from holdfast.codec.tracked import DictMarks, Section
from holdfast.codec.watches import Watches
from tests.codec import fuzz

PROGRAMS = 150
STEPS = 100


def unclosed(leaves, lookup):
    for leaf in leaves:
        leaf.inner = ()


class Present(dict):
    """Keys that are never said to have been away."""

    def __setitem__(self, key, away):
        super().__setitem__(key, False)


def no_away(self):
    self.all, self.keys, self.given = False, Present(), {}


def no_recovery(self):
    self.doc.unfinished = None


def only_newest(self, under_way, newest):
    self.unacknowledged = [newest] if newest.operations else []
    return newest


def always(*_args):
    return True


MUTANTS = {
    "trees do not hold what their items name": [(capture, "anchor", unclosed), (state, "anchor", unclosed)],
    "a capture that was cut short is not made up for": [(Capture, "recover", no_recovery)],
    "what changed in an instance is not looked at": [(Run, "unchanged", always)],
    "an instance sleeps although somebody holds it": [
        (Run, "unheld", always),
        (Watches, "_scrub", lambda _: None),  # which looks at one that sleeps each time
    ],
    "a key that was away keeps its place": [(DictMarks, "__init__", no_away)],
    "what nobody acknowledged is dropped": [(Told, "waiting", only_newest)],
    "values that are read are not watched": [(Watches, "out", lambda *_: None), (Watches, "out_all", lambda *_: None)],
    "changes in children are not told upwards": [
        (Section, "_kid", lambda *_: None),
    ],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck while a generator was closed
@pytest.mark.parametrize("name", MUTANTS)
def test_random_programs_notice(name, monkeypatch):
    for owner, attribute, replacement in MUTANTS[name]:
        monkeypatch.setattr(owner, attribute, replacement)
    for seed in range(PROGRAMS):
        try:
            fuzz.run(seed, STEPS)
        except Exception:
            return
    pytest.fail(f"nothing failed in {PROGRAMS} programs")
