from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Record
from holdfast.cli.values import FULL, Limits, Tree
from holdfast.codec import wire
from holdfast.errors import BadOption, format_path
from holdfast.schemas import as_json, text_of
from holdfast.travel import follow, parse_path


def record(name, fields):
    """An instance of a class that is not known here."""
    return Record(wire.INSTANCE, b"", name, 1, "fields", fields)


ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=6)
        | st.tuples(inner, inner)
        | st.frozensets(st.text(max_size=3) | st.integers(), max_size=4)
        | st.builds(lambda data: record("app.Plan", {"x": data}), inner)
    ),
    max_leaves=25,
)


@given(VALUES)
def test_every_value_has_text_a_tree_and_json(value):
    assert "\n" not in text_of(value)
    assert len(text_of(value, 50)) <= 50
    for some in (Limits(), FULL, Limits(depth=1, items=2, characters=5)):
        lines = [line.plain for line in Tree(some).lines("state", value)]
        assert lines[0].startswith("state")
        assert all(line.isprintable() for line in lines)
    json.dumps(as_json(value), allow_nan=False)


def test_a_tree_shows_the_ends_of_a_long_list_and_says_what_it_left_out():
    tree = Tree(Limits(items=4))
    lines = [line.plain for line in tree.lines("state", list(range(1000)))]
    assert lines == [
        "state  list, 1,000 items", "├─ [0]: 0", "├─ [1]: 1", "├─ … 996 more items", "├─ [998]: 998", "└─ [999]: 999",
    ]  # fmt: skip
    assert tree.cut == 1


def test_a_tree_says_where_it_stopped_going_deeper():
    tree = Tree(Limits(depth=1))
    lines = [line.plain for line in tree.lines("state", {"a": {"b": {"c": "x" * 100}}})]
    assert lines == ["state  dict, 1 item", "└─ a  dict, 1 item", "   └─ … deeper"]
    assert tree.cut == 1


def test_a_full_tree_cuts_nothing():
    tree = Tree(FULL)
    lines = [line.plain for line in tree.lines("state", {"text": "x" * 10_000, "many": list(range(500))})]
    assert len(lines) == 503
    assert "x" * 10_000 in lines[1]
    assert tree.cut == 0


def test_huge_things_are_measured_before_they_are_written():
    assert text_of(10**5000).endswith("(16,610 bits)")
    assert text_of("x" * 10**7, 40).startswith("'xxx")
    assert as_json(10**5000) == {"$type": "int", "$text": hex(10**5000)}


def test_instances_that_form_a_cycle_end():
    node = record("app.Node", {})
    node.data["next"] = node
    assert as_json(node) == {"$type": "app.Node", "$version": 1, "$data": {"next": {"$type": "cycle"}}}
    assert "app.Node" in text_of(node)
    assert list(Tree(Limits()).lines("state", {"node": node}))


def test_sets_are_listed_in_one_order():
    assert as_json({"b", "a", "c"}) == ["a", "b", "c"]
    assert text_of({"b", "a"}) == "{'a', 'b'}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("state.messages[3].content", ("messages", 3, "content")),
        ("messages[-1]", ("messages", -1)),
        ("state", ()),
        ("", ()),
        ("state.state", ("state",)),
        ("state['a b']['x]y']", ("a b", "x]y")),
        ("state.m[(1, 2)][None]", ("m", (1, 2), None)),
        ("['state']", ("state",)),
        ("state.größe", ("größe",)),
    ],
)
def test_paths_are_read(text, parts):
    assert parse_path(text) == parts


@pytest.mark.parametrize(
    "text", ["state..a", "state.a[", "state.a[b]", "a b", "state.a]", "state[1", "state[f()]", "."]
)
def test_what_is_no_path_is_refused(text):
    with pytest.raises(BadOption):
        parse_path(text)


@given(st.lists(st.text(max_size=8) | st.integers() | st.booleans() | st.none(), max_size=5))
def test_a_path_that_was_written_can_be_read(parts):
    assert parse_path(format_path(tuple(parts))) == tuple(parts)


def test_following_a_path_says_what_is_there_instead():
    value = {"a": [1, {"b": record("app.Plan", {"x": 5})}]}
    assert follow(value, ("a", 1, "b", "x")) == 5
    for parts, words in [
        (("z",), "has: 'a'"),
        (("a", 9), "indexes 0 to 1"),
        (("a", 0, "x"), "is a int"),
    ]:
        with pytest.raises(BadOption) as caught:
            follow(value, parts)
        assert words in caught.value.hint
