"""A Hypothesis state machine: an agent against a plain model, with crashes, collection and a clock that jumps.

The store stands on a recorded disk (tests/faults/disk.py). A crash throws the process's view away and lays out one of
the states that a power cut may leave (tests/faults/replay.py); since every call of a rule has returned by then, the
store must answer as the model does, exactly.
"""

from __future__ import annotations

import copy
import random
import time
from contextlib import ExitStack
from typing import Any, ClassVar

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import holdfast
from tests.faults import script
from tests.faults.campaign import Task, campaign, quiet, remembering
from tests.faults.crashes import lay_out
from tests.faults.disk import Disk
from tests.faults.replay import Replay
from tests.memory import memory

STEPS = 60
EXAMPLES = 60  # at once: time is looked at in between
SMALL = 10_000
ENOUGH = 0.75  # of a small count: examples end early, so that the last few steps would take many rounds
KEYS = st.sampled_from(["a", "b", "messages"])
VALUES = st.one_of(
    st.integers(), st.text(max_size=40), st.lists(st.integers(), max_size=6), st.binary(min_size=3_000, max_size=3_100),
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=60), max_size=12), st.none(),
)  # fmt: skip


class Machine(RuleBasedStateMachine):
    """``saved`` is the model: every checkpoint's content by id; ``heads`` where each branch is."""

    task: ClassVar[Task]

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.place = self.stack.enter_context(memory()) / "disk"
        self.place.mkdir()
        self.stack.enter_context(remembering(self.place / "state"))
        self.real_time = time.time_ns
        self.shift_ns = 0
        time.time_ns = lambda: self.real_time() + self.shift_ns
        self.stack.callback(setattr, time, "time_ns", self.real_time)
        self.saved: dict[str, dict[str, Any]] = {}
        self.heads: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.branch = "main"
        self.plain: dict[str, Any] = {}
        self.start()

    # The store and its disk

    def start(self) -> None:
        self.disk = Disk(self.place)
        self.watching = self.disk.watching()
        self.watching.__enter__()
        self.store = holdfast.open(self.place / "store")
        self.agent = self.store.agent("a", branch=self.branch)

    def stop(self) -> None:
        self.store.close()
        self.watching.__exit__(None, None, None)

    def teardown(self) -> None:
        try:
            self.stop()
        finally:
            self.stack.close()

    def reached(self) -> dict[str, Any]:
        head = self.heads.get(self.branch)
        return copy.deepcopy(self.saved[head]) if head else {}

    # What an agent does

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: Any) -> None:
        self.agent.state[key] = copy.deepcopy(value)
        self.plain[key] = value

    @rule(value=VALUES)
    def append(self, value: Any) -> None:
        if not isinstance(self.plain.get("messages"), list):
            self.put("messages", [])
        self.agent.state["messages"].append(copy.deepcopy(value))
        self.plain["messages"] = [*self.plain["messages"], value]

    @precondition(lambda self: self.plain)
    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        if key in self.plain:
            del self.agent.state[key], self.plain[key]

    @rule()
    def checkpoint(self) -> None:
        made = self.agent.checkpoint()
        self.saved[made.id] = copy.deepcopy(self.plain)
        self.heads[self.branch] = made.id

    @precondition(lambda self: self.saved)
    @rule(pick=st.integers(0, 2**16))
    def rollback(self, pick: int) -> None:
        ids = [c.id for c in self.agent.log(all=True)]
        if not ids:
            return
        target = ids[pick % len(ids)]  # by age: ids are random, and the same choices must lead to the same place
        unsaved = self.agent.dirty
        self.agent.rollback(f"id:{target}")
        if unsaved:  # a rollback saves them first
            self.learn()
        self.heads[self.branch] = target
        self.plain = self.reached()

    def learn(self) -> None:
        """Checkpoints that a call made by itself: they hold what the state was."""
        for checkpoint in self.agent.log(all=True):
            if checkpoint.id not in self.saved:
                self.saved[checkpoint.id] = copy.deepcopy(self.plain)

    @precondition(lambda self: self.heads.get(self.branch) and len(self.heads) < 5)
    @rule()
    def fork(self) -> None:
        if self.agent.dirty:
            self.checkpoint()
        name = f"branch-{len(self.heads)}-{len(self.saved)}"
        self.agent.branch(name).close()
        self.heads[name] = self.heads[self.branch]

    @precondition(lambda self: len(self.heads) > 1)
    @rule(pick=st.integers(0, 2**16))
    def switch(self, pick: int) -> None:
        self.agent.close()
        self.branch = sorted(self.heads)[pick % len(self.heads)]
        self.agent = self.store.agent("a", branch=self.branch)
        self.plain = self.reached()

    @precondition(lambda self: self.heads.get(self.branch))
    @rule(name=st.sampled_from(["one", "two"]))
    def tag(self, name: str) -> None:
        self.agent.tag(name, f"id:{self.heads[self.branch]}")
        self.tags[name] = self.heads[self.branch]

    @precondition(lambda self: len(self.saved) > 3)
    @rule(last=st.integers(1, 4))
    def collect(self, last: int) -> None:
        """Forget what is not among the newest of a branch, and has no tag."""
        kept = {*self.heads.values(), *self.tags.values(), *(c.id for c in self.agent.log(limit=last))}
        self.store.retain(holdfast.Policy(last=last), ["a"])
        left = {c.id for c in self.agent.log(all=True)}
        assert kept <= left
        self.saved = {identity: plain for identity, plain in self.saved.items() if identity in left}

    # What happens to it

    @rule(seconds=st.sampled_from([-(10**9), -3_600, -1, 3_600, 10**9]))
    def clock_jumps(self, seconds: int) -> None:
        shift = self.shift_ns + seconds * 10**9
        if 0 < self.real_time() + shift < 4 * 10**18:
            self.shift_ns = shift

    @rule()
    def reopen(self) -> None:
        self.stop()
        self.start()
        self.plain = self.reached()

    @rule(seed=st.integers(0, 2**16))
    def crash(self, seed: int) -> None:
        replay = Replay(self.disk)
        while replay.at < len(self.disk.calls):
            replay.step()
        chance = random.Random(seed)
        atoms = replay.atoms()
        share = chance.choice([0.0, 0.3, 0.7, 1.0])
        state = replay.state(atoms, [chance.random() < share for _ in atoms])
        self.stop()
        lay_out(state, self.place)
        self.start()
        self.plain = self.reached()

    @invariant()
    def same(self) -> None:
        type(self).task.tried()
        found = {section: self.agent.state.raw_section(section) for section in self.agent.state}
        assert script.fingerprint(found) == script.fingerprint(self.plain)

    @precondition(lambda self: self.saved)
    @rule()
    def look_back(self) -> None:
        found = {c.id: c for c in self.agent.log(all=True)}
        for identity, plain in self.saved.items():
            if identity in found or identity in self.heads.values():
                assert script.fingerprint_of(found[identity]) == script.fingerprint(plain)
        assert {name: c.id for name, c in self.agent.tags().items()} == self.tags
        report = self.store.verify()
        assert report.ok, str(report)


@campaign("model", "state machine against a model", "steps", ci=400, soak=1_000_000)
def model(task: Task) -> None:
    """Hypothesis: changes, branches, rollbacks, collection, clock jumps and power cuts, against plain dictionaries."""
    Machine.task = task
    number = 0
    with quiet(), script.small():
        while not task.over:
            # The same seed makes the same choices again, and no two processes make the same.
            seed(task.seed * 1_000_003 + number)(Machine)
            number += 1
            examples = max(1, min(EXAMPLES, (task.count - task.done) // STEPS))
            try:
                run_state_machine_as_test(
                    Machine,
                    settings=settings(
                        max_examples=examples, stateful_step_count=STEPS, deadline=None, database=None,
                        derandomize=False, suppress_health_check=list(HealthCheck), print_blob=True,
                    ),
                )  # fmt: skip
            except AssertionError as error:
                task.broke(f"{error} {getattr(error, '__notes__', '')}"[:2_000])
            except Exception as error:
                task.broke(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"[:2_000])
            if task.count < SMALL and task.done > task.count * ENOUGH:
                break
