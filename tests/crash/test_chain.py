"""Frames of causes, contexts and group members keep their values: what really failed can be inspected."""

from __future__ import annotations

import pytest

from holdfast.crash import Limits, capture, open_dump
from holdfast.crash.pages import page
from holdfast.crash.summary import collect


def parse(text, wanted):
    rows = text.split(";")
    return rows[wanted]


def load(path):
    try:
        return parse("a;b;c", 7)
    except IndexError as error:
        raise RuntimeError(f"cannot load {path}") from error


def both():
    found = []
    for number in range(2):
        try:
            parse(f"row {number}", 3)
        except IndexError as error:
            found.append(error)
    raise ExceptionGroup("two rows", found)


def dumped(tmp_path, fail, **limits):
    try:
        fail()
    except Exception as error:
        return open_dump(capture(error=error, to=tmp_path, limits=Limits(deadline_s=600, **limits)))
    raise AssertionError("it did not fail")


def test_the_frame_that_failed_first_has_its_values(tmp_path):
    with dumped(tmp_path, lambda: load("x.csv")) as dump:
        raised, began = dump.exceptions[0], dump.exceptions[dump.exceptions[0].cause]
        assert began.type_name == "IndexError"
        assert began.frames[-1].function == "parse"
        assert dump.local(began.frames[-1], "wanted") == 7
        assert dump.local(began.frames[-1], "rows[2]") == "c"
        assert dump.local(raised.frames[-1], "path") == "x.csv"
        assert dump.complete
        hits = {hit.where for hit in dump.search("a;b;c")}
        assert "exception IndexError, frame 1 parse, text" in hits


def test_values_that_two_exceptions_see_are_one_object(tmp_path):
    def fail():
        shared = ["shared"]
        try:
            raise KeyError(shared[0])
        except KeyError:
            raise ValueError("late")  # noqa: B904 (the context is what this is about)

    with dumped(tmp_path, fail) as dump:
        late = dump.exceptions[0]
        early = dump.exceptions[late.context]
        assert dump.local(late.frames[-1], "shared") == dump.local(early.frames[-1], "shared")


def test_members_of_a_group_have_theirs(tmp_path):
    with dumped(tmp_path, both) as dump:
        members = [dump.exceptions[at] for at in dump.exceptions[0].group]
        assert [dump.local(member.frames[-1], "rows[0]") for member in members] == ["row 0", "row 1"]


def test_the_page_tells_where_it_began(tmp_path):
    with dumped(tmp_path, lambda: load("x.csv")) as dump:
        text = "\n".join(line.text for line in page(collect(dump)))
    assert "Where it began: IndexError" in text
    assert "wanted = 7" in text
    with dumped(tmp_path, lambda: parse("a", 5)) as dump:
        assert collect(dump).origin is None


def test_of_a_small_budget_the_beginning_gets_more_than_the_way(tmp_path):
    """The failing thread first, then where the chain began."""

    def step(number):
        many = [[number, at] for at in range(2_000)]
        try:
            if number:
                step(number - 1)
            raise ValueError(f"{number} of {len(many)}")
        except ValueError as error:
            raise RuntimeError(f"step {number}") from error

    with dumped(tmp_path, lambda: step(6), objects=4_000) as dump:
        chain, at = dump.exceptions, 0
        while chain[at].cause is not None:
            at = chain[at].cause
        assert dict(chain[at].frames[-1].locals)["number"] == 0
        first = dump.object(dump.local(chain[at].frames[-1], "many"))
        assert first.items
        assert any("budget" in line for line in dump.missing)


@pytest.mark.parametrize("objects", [1, 100])
def test_a_chain_that_goes_in_circles_or_on_for_ever_ends(tmp_path, objects):
    first = ValueError("first")
    last = first
    for number in range(200):
        last = KeyError(number)
        last.__cause__ = first
        first = last
    ring = ValueError("ring")
    ring.__context__ = ValueError("other")
    ring.__context__.__context__ = ring
    for error in (last, ring):
        with open_dump(capture(error=error, to=tmp_path, limits=Limits(deadline_s=600, objects=objects))) as dump:
            assert dump.exceptions[0].type_name in ("KeyError", "ValueError")
            assert len(dump.exceptions) <= 64
