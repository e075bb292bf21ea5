from __future__ import annotations

import unicodedata
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.text import ago, clean, count, shorten, size


@given(st.text(st.characters(exclude_categories=())))
def test_cleaned_text_has_nothing_that_a_terminal_acts_upon(text):
    cleaned = clean(text)
    assert not {unicodedata.category(c) for c in cleaned.replace("\u200d", "")} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    cleaned.encode("utf-8")


def test_ordinary_text_stays_as_it_is():
    for text in ("Lisbon in May", "Ünïcödé", "日本語", "[bold]x[/bold]", "👩‍🚀"):
        assert clean(text) == text


def test_what_is_dangerous_stays_visible():
    assert clean("a\x1b[31mb\nc\u202e\x9b\ud800") == r"a\x1b[31mb\nc\u202e\x9b\ud800"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-5, "in the future"),
        (-0.5, "just now"),
        (1, "just now"),
        (42, "42 s ago"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (3600, "1 h ago"),
        (86400, "1 day ago"),
        (5 * 86400, "5 days ago"),
        (90 * 86400, "3 months ago"),
        (800 * 86400, "2 years ago"),
    ],
)
def test_how_long_ago(seconds, said):
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert ago(now - timedelta(seconds=seconds), now) == said


def test_sizes_have_three_digits_at_most():
    sizes = [0, 999, 1000, 1024, 150_000, 5 * 2**20, 3 * 2**30, 2**50]
    assert [size(n) for n in sizes] == [
        "0 B", "999 B", "1.0 KiB", "1.0 KiB", "146 KiB", "5.0 MiB", "3.0 GiB", "1024.0 TiB",
    ]  # fmt: skip


def test_counts_and_cuts():
    assert [count(n, "branch", "branches") for n in (0, 1, 1200)] == ["0 branches", "1 branch", "1,200 branches"]
    assert (shorten("abcdef", 4), shorten("abcd", 4)) == ("abc…", "abcd")
