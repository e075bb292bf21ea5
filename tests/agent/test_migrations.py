"""States of an older program: types change between two processes, and the history stays provable."""

from __future__ import annotations

import sys

import pytest

from tests import warm

FIRST = """
import dataclasses, holdfast
@holdfast.register(name="Plan")
@dataclasses.dataclass
class Plan:
    x: int
store = holdfast.open("store", durability="batched")
agent = store.agent("a")
"""
SECOND = """
import dataclasses, holdfast
@holdfast.register(name="Plan", version=2, migrations={1: lambda fields: {"x": fields["x"], "y": fields["x"] * 10}})
@dataclasses.dataclass
class Plan:
    x: int
    y: int
    z: int = 5
store = holdfast.open("store", durability="batched")
agent = store.agent("a")
"""
WIDER = FIRST.replace("x: int", "x: int\n    note: str = 'none'")


def run(folder, head, code):
    done = warm.run(
        [sys.executable, "-c", head + code], cwd=folder, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("checkpoints", [1, 600], ids=["unsealed", "sealed"])
def test_an_old_state_migrates_and_both_forms_stay_provable(tmp_path, checkpoints):
    run(
        tmp_path,
        FIRST,
        f"""
agent.state["plans"] = [Plan(1), Plan(2)]
agent.state["one"] = Plan(7)
agent.checkpoint("first")
for i in range({checkpoints}):
    agent.state["plans"].append(Plan(i))
    agent.checkpoint(f"c{{i}}")
""",
    )
    run(
        tmp_path,
        SECOND,
        """
assert agent.state["plans"][1] == Plan(2, 20, 5) and agent.state["one"] == Plan(7, 70, 5)
assert not agent.dirty, "reading an old state is no change"
agent.checkpoint("untouched")
assert agent.head.sections == agent.at("~1").sections
agent.state["plans"][0].y = 99
agent.checkpoint("changed")
assert agent.at("c0").state["plans"][0] == Plan(1, 10, 5)
agent.rollback("c0")
assert agent.state["plans"][0] == Plan(1, 10, 5) and not agent.dirty
agent.state["plans"].append(Plan(3, 4))
agent.checkpoint("more")
agent.undo()
assert len(agent.state["plans"]) == 3
agent.redo()
for i in range(600):
    agent.state["n"] = i
    agent.checkpoint()
report = store.verify()
assert report.ok, report
""",
    )
    run(
        tmp_path,
        SECOND,
        """
assert agent.state["plans"][-1] == Plan(3, 4, 5) and agent.state["one"] == Plan(7, 70, 5)
changed = next(c for c in agent.log(all=True) if c.label == "changed")
assert changed.state["plans"][0] == Plan(1, 99, 5)
assert store.verify().ok
""",
    )


def test_a_field_with_a_default_needs_no_migration(tmp_path):
    run(tmp_path, FIRST, 'agent.state["plan"] = Plan(1); agent.checkpoint()')
    run(
        tmp_path,
        WIDER,
        """
assert agent.state["plan"] == Plan(1, "none")
agent.state["plan"].note = "new"
agent.checkpoint()
assert store.verify().ok
""",
    )
    run(tmp_path, WIDER, 'assert agent.state["plan"] == Plan(1, "new"); assert store.verify().ok')


def test_a_newer_state_is_refused_and_nothing_is_harmed(tmp_path):
    run(tmp_path, SECOND, 'agent.state["plan"] = Plan(1, 2); agent.checkpoint()')
    run(
        tmp_path,
        FIRST,
        """
try:
    agent.state["plan"]
except holdfast.errors.SchemaMismatch as error:
    assert error.type_name == "Plan"
else:
    raise SystemExit("read a newer version")
agent.state["other"] = 1
agent.checkpoint()
assert store.verify().ok
""",
    )
    run(tmp_path, SECOND, 'assert agent.state["plan"] == Plan(1, 2) and agent.state["other"] == 1')
