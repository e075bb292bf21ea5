"""What ``When`` accepts, what it refuses, and how it reads."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.agent.when import SPAN_MAX_S, When
from holdfast.errors import BadOption

ABSURD = (
    0,
    0.0,
    -1,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    1e-9,
    SPAN_MAX_S * 2,
    10**400,
    True,
    False,
    "30",
    b"1",
    [30],
    {},
)
NO_COUNTS = (*ABSURD, 1.0, 2.5)
NO_SWITCHES = (0, 1, "true", None, [True], 1.0)
NO_SIDES = ("read", "", "Write", True, 1, ["write"], b"write")


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("every_s", "min_s", "max_s") for value in ABSURD]
    + [(name, value) for name in ("every_steps", "changed_bytes") for value in NO_COUNTS]
    + [(name, value) for name in ("at_phase", "adaptive", "background") for value in NO_SWITCHES]
    + [(name, value) for name in ("before", "after") for value in NO_SIDES]
    + [("min_s", None), ("max_s", None)],
)
def test_a_value_that_makes_no_sense_is_refused_with_what_is_allowed(name, value):
    with pytest.raises(BadOption) as caught:
        When(**{"adaptive": True, name: value})
    assert caught.value.message.startswith(f"{name}=")
    assert re.match(r'Use (seconds from|a whole number from|True or False|"write")', caught.value.hint)


@pytest.mark.parametrize("options", [{}, {"background": True}, {"min_s": 2.0}, {"max_s": 10.0, "background": True}])
def test_options_that_would_never_checkpoint_are_refused(options):
    with pytest.raises(BadOption, match=r"(?s)never checkpoint.*when=None"):
        When(**options)


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(BadOption, match="min_s=10 is above max_s=5"):
        When(adaptive=True, min_s=10, max_s=5)
    with pytest.raises(BadOption, match=r"every_s=0\.5 is not above min_s=1, so adaptive would never ask"):
        When(adaptive=True, every_s=0.5)
    with pytest.raises(BadOption, match="max_s without adaptive would do nothing"):
        When(every_s=30, max_s=60)


def test_all_triggers_together_are_one_policy():
    when = When(
        every_s=30, every_steps=10, before="write", after="write", changed_bytes=64_000, at_phase=True, adaptive=True
    )
    said = " ".join(when.words())
    for part in ("1 second to 10 minutes", "30 seconds", "10 steps", "64,000 bytes", "phase", "before and after"):
        assert part in said


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (When(every_s=3_600), "It saves 1 hour after the last checkpoint."),
        (When(every_s=90), "It saves 90 seconds after the last checkpoint."),
        (When(every_steps=1), "It saves at every step."),
        (When(adaptive=True, every_s=30), "At the latest, it saves 30 seconds after the last checkpoint."),
        (When(after="write"), "Inside a run, it saves after each tool that writes."),
        (When(at_phase=True), "It saves at the end of each phase."),
    ],
)
def test_a_policy_says_in_words_what_it_does(when, said):
    assert said in when.words()


spans = st.floats(0.001, 86_400) | st.integers(1, 86_400)
asked = st.fixed_dictionaries(
    {},
    optional={
        "every_s": spans,
        "every_steps": st.integers(1, 10**9),
        "changed_bytes": st.integers(1, 2**40),
        "before": st.just("write"),
        "after": st.just("write"),
        "at_phase": st.booleans(),
        "adaptive": st.booleans(),
        "min_s": spans,
        "max_s": spans,
        "background": st.booleans(),
    },
)


@given(asked)
def test_a_table_is_read_as_the_same_policy_or_refused_with_the_same_words(options):
    try:
        when = When(**options)
    except BadOption as error:
        refused = error.message
    else:
        refused = ""
    if refused:
        with pytest.raises(BadOption) as caught:
            When.from_table(options, "holdfast.toml, [when]")
        assert caught.value.message == f"holdfast.toml, [when]: {refused}"
        return
    assert When.from_table(options, "holdfast.toml") == when
    assert When.from_table(when.to_table(), "holdfast.toml") == when
    assert all(sentence.endswith(".") for sentence in when.words())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"evry_s": 30}, "holdfast.toml, [when]: there is no 'evry_s'\nDid you mean every_s? It may have every_s, "),
        ({"every_s": "30"}, "holdfast.toml, [when]: every_s = '30'\nUse seconds from 0.001 to 2,678,400."),
        ({"every_s": True}, "holdfast.toml, [when]: every_s = true\nUse seconds from"),
        ({"every_steps": 2.5}, "every_steps = 2.5\nUse a whole number from 1 to 1,000,000,000."),
        ({"adaptive": "yes"}, "adaptive = 'yes'\nUse true or false."),
        ({"before": "read"}, "before = 'read'\nUse \"write\"."),
        ({"every_s": None}, "every_s = None"),
        ({"adaptive": True, "min_s": 9, "max_s": 3}, "holdfast.toml, [when]: min_s=9 is above max_s=3"),
        ({}, "holdfast.toml, [when]: a When without a trigger"),
        ({"adaptive": False}, "For checkpoints by hand only, write false instead."),
        ({1: 2}, "there is no 1"),
        ([("every_s", 1)], "holdfast.toml, [when]: a table is needed"),
        ("adaptive", "a table is needed, not 'adaptive'"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_file_key_and_what_is_allowed(table, words):
    with pytest.raises(BadOption) as caught:
        When.from_table(table, "holdfast.toml, [when]")
    assert words in str(caught.value)


@pytest.mark.parametrize("given", ["30s", {"every_s": 30}, True, False, 30])
def test_what_is_no_policy_is_refused_before_an_agent_is_made(store_path, given):
    with holdfast.open(store_path) as store:
        with pytest.raises(BadOption, match=r"holdfast\.When\(every_s=30\)"):
            store.agent("a", when=given)
        assert store.agents() == []
