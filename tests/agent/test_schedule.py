"""When a checkpoint is due: what every policy keeps to, and a share of the simulation of benchmarks/when.py."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.agent.schedule import GAPS_MAX, OVERDUE_MIN_S, SHARE, TRIGGERS, Past, Schedule
from holdfast.agent.when import When

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"

ADAPTIVE = When(adaptive=True)

spans = st.floats(0.0, 1e6)
costs = st.floats(1e-5, 100.0)
pasts = st.builds(
    lambda gaps, older, seconds, age_s, cost_s: Past(
        older + len(gaps), seconds + math.fsum(gaps) + age_s, cost_s, tuple(gaps), age_s
    ),
    st.lists(spans, max_size=40),
    st.integers(0, 1_000),
    spans,
    spans,
    st.none() | costs,
)
whens = st.builds(
    When,
    every_s=st.none() | st.floats(2.0, 1e4),
    every_steps=st.none() | st.integers(2, 50),
    changed_bytes=st.none() | st.integers(1, 10**6),
    at_phase=st.booleans(),
    before=st.sampled_from((None, "write")),
    after=st.sampled_from((None, "write")),
    adaptive=st.just(value=True),
)


def still():
    return 0


def idle():
    return 0.0


def forbidden():
    raise AssertionError("nobody needed to ask")


def first_due(schedule, now_s, step_s, most=100_000):
    """Steps until one is due: how many, when, and by which trigger."""
    for number in range(1, most):
        now_s += step_s
        asked = schedule.step(now_s, still, idle)
        if asked is not None:
            return number, now_s, asked
    raise AssertionError("never due")


# -- what every policy keeps to -------------------------------------------------------------------------------


@given(whens, pasts, st.lists(st.tuples(spans, costs), max_size=20))
def test_after_a_checkpoint_nothing_is_due_until_something_has_gone_on(when, past, story):
    now_s, schedule = 5.0, Schedule(when, 5.0, past)
    for forward_s, cost_s in story:
        now_s += forward_s
        asked = schedule.step(now_s, still, idle)
        assert asked is None or asked in TRIGGERS
        if asked is not None:
            schedule.saved(now_s, cost_s)
            assert schedule.step(now_s, still, idle) is None


@given(whens, pasts, spans)
@example(When(adaptive=True), Past(failures=1, seconds=300_065.0, age_s=300_065.0), 25.0)
def test_what_is_due_stays_due_until_it_is_done(when, past, forward_s):
    schedule = Schedule(when, 0.0, past)
    asked = schedule.step(forward_s, still, idle)
    if asked is not None:
        assert schedule.step(forward_s, still, idle) is not None
        assert schedule.step(forward_s + 1.0, still, idle) is not None


@given(st.integers(1, 300), st.lists(spans, max_size=5))
def test_every_steps_is_exact(count, jumps):
    schedule = Schedule(When(every_steps=count), 0.0)
    now_s = 0.0
    for jump_s in [0.0, *jumps]:
        now_s += jump_s
        asked = [schedule.step(now_s, forbidden, forbidden) for _ in range(count)]
        assert asked == [None] * (count - 1) + ["steps"]
        schedule.saved(now_s, 0.001)


def test_every_s_is_due_at_the_first_step_that_is_not_before_it():
    for every_s, step_s in ((30.0, 0.1), (1.0, 0.3), (0.5, 2.0)):
        schedule = Schedule(When(every_s=every_s), 1e6)
        number, now_s, asked = first_due(schedule, 1e6, step_s)
        assert asked == "time"
        assert math.isclose(number, math.ceil(every_s / step_s), abs_tol=1)
        assert now_s - 1e6 >= every_s - 1e-6


@given(st.lists(st.tuples(spans, st.sampled_from(("phase", "before write", "after write", ""))), max_size=30))
def test_a_policy_of_events_asks_at_these_events_and_nowhere_else(story):
    schedule = Schedule(When(at_phase=True, after="write"), 0.0)
    now_s = 0.0
    for forward_s, name in story:
        now_s += forward_s
        asked = schedule.event(name, now_s) if name else schedule.step(now_s, forbidden, forbidden)
        assert asked == (name if name in {"phase", "after write"} else None)
        assert schedule.overdue(now_s) is None


def test_a_change_is_asked_for_only_if_nothing_else_is_due():
    schedule = Schedule(When(every_steps=2, changed_bytes=100), 0.0)
    assert schedule.step(1.0, lambda: 99, idle) is None
    assert schedule.step(1.0, forbidden, idle) == "steps"
    schedule.saved(1.0, 0.001)
    assert schedule.step(1.0, lambda: 100, idle) == "bytes"


def test_the_ends_of_phases_are_safe_points_for_what_time_asks_for():
    schedule = Schedule(When(every_s=10), 0.0)
    assert schedule.event("phase", 9.0) is None
    assert schedule.event("phase", 10.0) == "time"


# -- clocks ---------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(whens, st.lists(st.floats() | st.floats(-1e5, 1e5), max_size=10), st.floats(2.0, 50.0))
def test_whatever_the_clock_has_said_a_checkpoint_comes_within_the_longest_interval(when, readings, step_s):
    schedule = Schedule(when, 100.0)
    for reading_s in readings:
        schedule.step(reading_s, still, idle)
        schedule.overdue(reading_s)
    schedule.saved(readings[-1] if readings else 0.0, 0.001)
    start_s = -50.0
    schedule.step(start_s, still, idle)
    longest_s = min(when.max_s, when.every_s or math.inf)
    _, now_s, _ = first_due(schedule, start_s, step_s)
    assert now_s - start_s <= longest_s + step_s + 1e-6
    assert when.min_s <= schedule.interval_s <= when.max_s


def test_a_clock_that_stands_still_or_jumps_back_asks_for_nothing():
    schedule = Schedule(When(every_s=30), 1_000.0)
    assert all(schedule.step(1_000.0, forbidden, forbidden) is None for _ in range(1_000))
    assert schedule.step(1_029.0, forbidden, forbidden) is None
    assert schedule.step(-86_400.0, forbidden, forbidden) is None
    assert schedule.step(-86_399.5, forbidden, forbidden) is None
    assert schedule.step(-86_399.0, forbidden, forbidden) == "time"


# -- adaptive -------------------------------------------------------------------------------------------------


@given(
    pasts,
    st.lists(st.tuples(st.sampled_from(("saved", "failed", "unchanged")), spans, st.floats()), max_size=30),
    st.floats(0.01, 100.0),
    st.floats(1.0, 100.0),
)
def test_the_interval_stays_within_its_limits(past, story, min_s, factor):
    when = When(adaptive=True, min_s=min_s, max_s=min_s * factor)
    now_s, schedule = 0.0, Schedule(when, 0.0, past)
    for what, forward_s, cost_s in story:
        assert when.min_s <= schedule.interval_s <= when.max_s
        now_s += forward_s
        if what == "saved":
            schedule.saved(now_s, cost_s)
        else:
            getattr(schedule, what)(now_s)
    # Nothing before the least, and something at the latest at the most, whatever the load.
    assert schedule.step(now_s + min_s * 0.999, still, idle) is None
    assert schedule.step(now_s + when.max_s * 1.001, still, lambda: math.inf) == "adaptive"


@given(costs, costs, st.integers(0, 100), spans)
def test_a_checkpoint_that_costs_more_is_made_less_often(one_s, other_s, failures, seconds):
    less_s, more_s = sorted((one_s, other_s))
    cheap, dear = (Schedule(ADAPTIVE, 0.0, Past(failures, seconds, cost_s)) for cost_s in (less_s, more_s))
    assert cheap.interval_s <= dear.interval_s


@given(costs, st.integers(0, 1_000), st.integers(0, 1_000), spans)
def test_an_agent_that_fails_more_often_is_saved_more_often(cost_s, one, other, seconds):
    fewer, more = sorted((one, other))
    calm, wild = (Schedule(ADAPTIVE, 0.0, Past(failures, seconds, cost_s)) for failures in (fewer, more))
    assert wild.interval_s <= calm.interval_s * (1 + 1e-9)


def test_the_interval_is_that_of_young_for_an_agent_that_is_known_well():
    """A failure every 1,000 s, and checkpoints of 50 ms: the square root of twice their product."""
    gaps = (1_000.0,) * GAPS_MAX
    schedule = Schedule(ADAPTIVE, 0.0, Past(500, 500_000.0, 0.05, gaps))
    assert schedule.interval_s == pytest.approx(10.0, rel=0.3)  # of equal gaps, it knows that none is short
    totals = Schedule(ADAPTIVE, 0.0, Past(500, 500_000.0, 0.05))
    assert totals.interval_s == pytest.approx(10.0, rel=0.05)


def test_one_slow_checkpoint_changes_the_interval_little_and_a_slow_disk_does():
    known = Past(20, 20_000.0, 0.05)
    schedule = Schedule(ADAPTIVE, 0.0, known)
    before_s = schedule.interval_s
    schedule.saved(10.0, 5.0)
    assert schedule.interval_s < before_s * 1.3
    for number in range(20):
        schedule.saved(20.0 + number, 5.0)
    assert schedule.interval_s > before_s * 8


def test_an_agent_that_has_failed_lately_is_saved_more_often_than_one_that_runs_for_long():
    burst = (20_000.0, 5.0, 7.0, 6.0, 30_000.0, 4.0, 6.0, 9.0)
    now = Schedule(ADAPTIVE, 0.0, Past(8, math.fsum(burst), 0.05, burst, 0.0))
    later = Schedule(ADAPTIVE, 0.0, Past(8, math.fsum(burst) + 3_000.0, 0.05, burst, 3_000.0))
    assert now.interval_s < later.interval_s / 3


def test_a_loaded_machine_waits_at_most_for_twice_as_long():
    known = Past(20, 20_000.0, 0.05)
    idle_s = first_due(Schedule(ADAPTIVE, 0.0, known), 0.0, 0.01)[1]
    busy = Schedule(ADAPTIVE, 0.0, known)
    now_s = 0.0
    while busy.step(now_s, still, lambda: 50.0) is None:
        now_s += 0.01
    assert 1.9 * idle_s < now_s < 2.1 * idle_s


def test_long_steps_are_rounded_to_the_better_side():
    """Around a best interval of 10 s, 13 s waste less than 6.5 s, and 8 s less than 16 s."""
    known = Past(500, 500_000.0, 0.05)
    for step_s, steps in ((6.5, 2), (8.0, 1), (4.5, 2), (30.0, 1)):
        assert first_due(Schedule(ADAPTIVE, 0.0, known), 0.0, step_s)[0] == steps


def test_nothing_to_save_says_nothing_about_the_cost():
    schedule = Schedule(ADAPTIVE, 0.0, Past(3, 3_000.0, 0.05))
    for now_s in range(1, 100):
        schedule.unchanged(float(now_s))
    assert schedule.cost_s == 0.05


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.booleans()), max_size=GAPS_MAX), costs)
def test_the_next_process_knows_what_this_one_knew(story, cost_s):
    now_s, schedule = 0.0, Schedule(ADAPTIVE, 0.0, Past(cost_s=cost_s))
    failed_at_s = [0.0]
    for forward_s, fails in story:
        now_s += forward_s
        if fails:
            schedule.failed(now_s)
            failed_at_s.append(now_s)
        else:
            schedule.saved(now_s, cost_s)
    gaps = tuple(later - earlier for earlier, later in pairwise(failed_at_s))
    heir = Schedule(ADAPTIVE, 77.0, Past(len(gaps), now_s, cost_s, gaps, now_s - failed_at_s[-1]))
    assert math.isclose(heir.rate, schedule.rate, rel_tol=1e-6)


# -- no safe point --------------------------------------------------------------------------------------------


def test_five_intervals_without_a_safe_point_are_told_once():
    schedule = Schedule(When(every_s=10), 0.0)
    assert schedule.overdue(49.0) is None
    assert schedule.overdue(51.0) == 51.0
    assert schedule.overdue(500.0) is None


def test_a_step_that_took_too_long_is_told_after_it():
    schedule = Schedule(When(every_s=10), 0.0)
    assert schedule.step(51.0, still, idle) == "time"
    assert schedule.overdue(51.0) == 51.0


def test_steps_in_time_are_never_overdue_and_adaptive_bears_a_minute():
    schedule = Schedule(ADAPTIVE, 0.0)
    for number in range(1, 100):
        schedule.step(number * OVERDUE_MIN_S, still, idle)
        assert schedule.overdue(number * OVERDUE_MIN_S) is None
    assert schedule.overdue(1e5) is not None


# -- a share of the simulation --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces():
    spec = importlib.util.spec_from_file_location("when_traces", BENCHMARKS / "when_traces.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("family", ["exponential", "Weibull 0.7", "bursts"])
def test_adaptive_is_within_a_tenth_of_the_best_fixed_interval_in_hindsight(traces, family):
    found = []
    for case in (traces.Case(0.055, 2.0, 600.0), traces.Case(0.55, 30.0, 7_200.0)):
        judged = [traces.judge(case, family, seed, 80, [traces.ADAPTIVE]) for seed in (1, 2)]
        found.append(fmean(one.against_best(traces.ADAPTIVE) for one in judged))
    assert max(found) <= 1.10


@pytest.mark.parametrize("cost_s", [0.00065, 0.055, 0.55, 5.0])
def test_checkpoints_take_at_most_their_share_of_the_time_when_nothing_fails(traces, cost_s):
    for step_s, hours in ((2.0, 1), (30.0, 8)):
        case = traces.Case(cost_s, step_s, math.inf)
        waste = traces.simulate(case, traces.ADAPTIVE, [hours * 3_600.0], 1, fails=False)
        assert waste.checkpoints > 1
        assert waste.saving_s <= SHARE * waste.ran_s


@settings(max_examples=20)
@given(st.floats(1.0, 50.0), st.sampled_from((0.5, 2.0, 30.0)), st.integers(0, 5))
def test_the_simulation_may_leave_out_steps_at_which_nothing_can_be_due(traces, every_s, step_s, seed):
    case = traces.Case(0.055, step_s, 300.0)
    gaps = traces.trace("bursts", case.between_s, seed, 5)
    leaping = traces.fixed(case, every_s, gaps, seed)
    # A limit on steps that is never reached lets it visit each of them.
    walking = traces.walk(case, replace(When(every_s=every_s), every_steps=10**9), gaps, seed)
    assert leaping == walking
