"""The document against a plain model, over random programs (see programs.py), with a catalog in memory."""

from __future__ import annotations

import random
import warnings

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.errors import DetachedChange
from tests.codec.programs import World


class Programs(RuleBasedStateMachine):
    """One rule per step; Hypothesis makes every choice, so that a failing program shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = None
        self.world = World(lambda n: self.draw(st.integers(0, n - 1)))
        # Programs go on using what they put in or took out; that they are told so is tested elsewhere.
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.simplefilter("ignore", DetachedChange)

    def teardown(self) -> None:
        self.quiet.__exit__(None, None, None)

    def do(self, name, data):
        self.draw = data.draw
        self.world.step(name)

    @rule(data=st.data())
    def change(self, data):
        self.do("change", data)

    @rule(data=st.data())
    def change_again(self, data):
        self.do("change", data)

    @rule(data=st.data())
    def alias(self, data):
        self.do("alias", data)

    @rule(data=st.data())
    def unpack(self, data):
        self.do("unpack", data)

    @rule(data=st.data())
    def refuse(self, data):
        self.do("refuse", data)

    @rule(data=st.data())
    def mutate(self, data):
        self.do("mutate", data)

    @rule(data=st.data())
    def checkpoint(self, data):
        self.do("checkpoint", data)

    @rule(data=st.data())
    def look_back(self, data):
        self.do("look_back", data)

    @rule(data=st.data())
    def reload(self, data):
        self.do("reload", data)

    @rule(data=st.data())
    def rollback(self, data):
        self.do("rollback", data)

    @invariant()
    def sound(self):
        self.world.check()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(stateful_step_count=30)


@pytest.mark.filterwarnings("ignore::holdfast.errors.DetachedChange")
def test_long_programs(rounds):
    """The same programs from a plain generator: far more of them in the same time."""
    names = [name for name, weight in World.STEPS for _ in range(weight)]
    for seed in range(rounds(12, 5_000)):
        source = random.Random(seed)
        world = World(source.randrange)
        for _ in range(60):
            world.step(source.choice(names))
