"""The detector sees a shift soon, and leaves alone what only looks like one; a share of benchmarks/detector.py."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.travel.detector import PLACES_MAX, Detector, follow, trend

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
_spec = importlib.util.spec_from_file_location("detector_benchmark", BENCHMARKS / "detector.py")
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


def test_healthy_histories_raise_nothing(rounds):
    count = rounds(3, 100)
    assert sum(map(bool, bench.healthy(count))) <= count // 100


def test_a_shift_of_two_standard_deviations_is_seen_in_a_median_of_20_steps(rounds):
    found = bench.delays(rounds(60, 400))
    assert median(delay for group in found.values() for delay in group) <= 20


def test_an_alarm_says_where_and_about_since_when():
    chance = random.Random(7)
    history = ({"x": chance.gauss(0, 1) + 5 * (step >= 300), "y": chance.gauss(0, 1)} for step in range(400))
    (alarm,) = follow(history)
    assert alarm.place == "x"
    assert abs(alarm.since - 300) <= 2
    assert alarm.at < 310
    assert alarm.shift > 0
    assert "x" in str(alarm)
    assert alarm.to_json()["since"] == alarm.since


def test_a_word_that_takes_over_is_seen():
    chance = random.Random(7)
    history = ({"status": "late" if step >= 400 else chance.choice(("done", "open"))} for step in range(500))
    (alarm,) = follow(history)
    assert alarm.word in {"done", "open"}
    assert alarm.at >= 400


def test_a_counter_that_counts_evenly_is_seen_at_once_when_it_does_not():
    history = ({"n": step + max(0, step - 200)} for step in range(260))
    (alarm,) = follow(history)
    assert 200 < alarm.at <= 210


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ([100 + 3 * n + random.Random(n).gauss(0, 5) for n in range(100)], True),
        ([5.0 * n for n in range(30)], True),
        ([random.Random(n).gauss(0, 5) for n in range(300)], False),
        ([7.0] * 100, False),
        ([1.0, 2.0], False),
    ],
)
def test_trends(values, grows):
    assert (trend(values) is not None) == grows


def test_a_walk_without_direction_is_no_trend():
    raised = 0
    for seed in range(200):
        chance, at, walk = random.Random(seed), 0.0, []
        for _ in range(200):
            at += chance.gauss(0, 1)
            walk.append(at)
        raised += trend(walk) is not None
    assert raised == 0


_VALUES = st.one_of(
    st.integers(), st.floats(), st.text(max_size=100), st.booleans(), st.none(), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), _VALUES), max_size=10))
def test_it_takes_whatever_a_state_holds(history):
    detector = Detector()
    for values in [{"a": 1.0, "b": "x"}] * 90 + history + [{"a": 1e308}, {"a": -math.inf}, {"b": math.nan}] * 10:
        detector.update(values)


def test_places_are_bounded():
    detector = Detector()
    detector.update({str(place): place for place in range(PLACES_MAX + 5)})
    assert detector.left_out == 5
