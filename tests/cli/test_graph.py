from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.history import draw


def drawn(*history, unicode=True):
    lines = []
    for (own, _), row in zip(history, draw(history, unicode=unicode), strict=True):
        if row.joins:
            lines.append(row.joins)
        lines.append(f"{row.before}{own}{row.after}")
    return lines


def test_one_line_is_one_column():
    assert drawn(("c", "b"), ("b", "a"), ("a", "")) == ["c", "b", "a"]


def test_a_branch_joins_its_parent():
    assert drawn(("d", "b"), ("c", "b"), ("b", "a"), ("a", "")) == ["d", "│ c", "├─╯", "b", "a"]


def test_a_line_that_passes_is_crossed():
    history = [("f", "b"), ("e", "a"), ("d", "b"), ("b", "a"), ("a", "")]
    assert drawn(*history) == ["f", "│ e", "│ │ d", "├─┼─╯", "b │", "├─╯", "a"]


def test_several_lines_join_at_once():
    assert drawn(("d", "a"), ("c", "a"), ("b", "a"), ("a", "")) == ["d", "│ c", "│ │ b", "├─┴─╯", "a"]


def test_it_can_be_drawn_in_ascii():
    assert drawn(("d", "b"), ("c", "b"), ("b", ""), unicode=False) == ["d", "| c", "|-'", "b"]


def test_a_free_place_is_used_again():
    history = [("f", "e"), ("x", "e"), ("e", "d"), ("y", "d"), ("d", "")]
    assert drawn(*history) == ["f", "│ x", "├─╯", "e", "│ y", "├─╯", "d"]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60))
def test_every_history_can_be_drawn(choices):
    # Checkpoint n has any earlier one as its parent, or none.
    parents = [""] + [str(pick % n) if pick % 7 else "" for n, pick in enumerate(choices[1:], 1)]
    history = [(str(n), parent) for n, parent in enumerate(parents)][::-1]
    rows = list(draw(history))
    assert len(rows) == len(history)
    joined = sum(row.joins.count("╯") + row.joins.count("┴") for row in rows)
    tips = {own for own, _ in history} - {parent for _, parent in history}
    roots = sum(1 for parent in parents if not parent)
    assert joined == len(tips) - roots
