"""Threads of an older program: classes have lost fields, ids were never possible, and there are many namespaces."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import make_dataclass
from typing import Any

import pydantic
import pytest
from langgraph.checkpoint.base.id import uuid6

from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import BadName, SchemaMismatch
from tests.contrib.threads import META, chain, checkpoint, config, ids


def model(extra: str, **fields: Any) -> type:
    made = pydantic.create_model("Trip", __config__=pydantic.ConfigDict(extra=extra), **fields)
    made.__module__ = __name__
    return made


def data(*, slots: bool, **fields: Any) -> type:
    made = make_dataclass("Leg", list(fields.items()), slots=slots)
    made.__module__ = __name__
    return made


def pair(*fields: str) -> type:
    made = namedtuple("Pair", fields)  # noqa: PYI024 - it is made of the names that are given
    made.__module__ = __name__
    return made


def stored(store_path, cls, *values):
    """A thread that a program with this class wrote; returns where the value is."""
    with HoldfastSaver(store_path, types=[cls]) as saver:
        at = saver.put(config("t"), checkpoint({"v": cls(*values) if values else cls(a=1, gone="g")}), META, {})
        saver.put_writes(at, [("w", [saver.get_tuple(at).checkpoint["channel_values"]["v"]])], "task")
        return at


CASES = {
    "pydantic": (model("ignore", a=(int, ...), gone=(str, "")), model("ignore", a=(int, ...), new=(int, 7))),
    "strict pydantic": (model("forbid", a=(int, ...), gone=(str, "")), model("forbid", a=(int, ...), new=(int, 7))),
    "slots": (data(slots=True, a=int, gone=str), data(slots=True, a=int)),
    "named tuple": (pair("a", "gone"), pair("a")),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_field_that_a_class_has_lost_is_said_with_what_to_do_and_a_migration_takes_it_out(store_path, kind):
    then, now = CASES[kind]
    at = stored(store_path, then)
    with HoldfastSaver(store_path, types=[now]) as saver, pytest.raises(SchemaMismatch, match="'gone'") as caught:
        saver.get_tuple(at)
    assert "migration" in caught.value.hint
    with HoldfastSaver(store_path) as saver:
        kept = {1: lambda fields: {"a": fields["a"]}}
        saver.store._registry.register(now, version=2, migrations=kept)
        found = saver.get_tuple(at)
        for value in (found.checkpoint["channel_values"]["v"], found.pending_writes[0][2][0]):
            assert (type(value), value.a) == (now, 1)
            assert not hasattr(value, "gone")
    with HoldfastSaver(store_path, types=[then]) as saver:
        assert saver.get_tuple(at).checkpoint["channel_values"]["v"] == then(a=1, gone="g")


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (model("ignore", a=(int, ...), gone=(str, "")), model("allow", a=(int, ...))),
        (data(slots=False, a=int, gone=str), data(slots=False, a=int)),
    ],
)
def test_a_field_that_the_class_still_has_a_place_for_stays(store_path, caplog, then, now):
    at = stored(store_path, then)
    with HoldfastSaver(store_path, types=[now]) as saver:
        value = saver.get_tuple(at).checkpoint["channel_values"]["v"]
        assert (type(value), value.a, value.gone) == (now, 1, "g")
    assert not caplog.records


def test_a_field_that_was_added_without_a_default_is_said(store_path):
    at = stored(store_path, data(slots=False, a=int, gone=str))
    with (
        HoldfastSaver(store_path, types=[data(slots=False, a=int, must=int)]) as saver,
        pytest.raises(SchemaMismatch, match="must"),
    ):
        saver.get_tuple(at)


# -- ids that can never be there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("thread", ["", " ", " a", "a\n", "a\x00b", "x" * 1025, "y" * 100_000, "\ud800"])
def test_a_thread_whose_id_is_not_possible_reads_as_none_and_is_refused_when_written(ours, thread):
    at = {"configurable": {"thread_id": thread}}
    assert ours.get_tuple(at) is None
    assert list(ours.list(at)) == []
    assert list(ours.list(config(thread))) == []
    assert ours.get_delta_channel_history(config=at, channels=["x"]) == {"x": {"writes": []}}
    ours.delete_thread(thread)
    ours.prune([thread])
    with pytest.raises(BadName):
        ours.put(config(thread), checkpoint({}), META, {})
    with pytest.raises(BadName):
        ours.copy_thread(thread, "b")
    with pytest.raises(BadName):
        chain(ours, "t", 1) and ours.copy_thread("t", thread)


# -- many namespaces -----------------------------------------------------------------------------------------------


def test_a_list_of_all_namespaces_is_newest_first(ours):
    made = []
    for number in range(40):
        at = ours.put(config("t"), checkpoint({"n": number}), META, {})
        inner = ours.put(config("t", f"inner:{number}"), checkpoint({"n": number}), META, {})
        made += [at["configurable"]["checkpoint_id"], inner["configurable"]["checkpoint_id"]]
    thread = {"configurable": {"thread_id": "t"}}
    assert ids(ours.list(thread, limit=6)) == made[:-7:-1]
    assert ids(ours.list(thread)) == made[::-1]
    assert ids(ours.list(None, limit=3)) == made[:-4:-1]


@pytest.mark.parametrize("saver", ["holdfast", "sqlite"], indirect=True)  # the one in memory goes by namespace
def test_namespaces_come_by_id_whatever_order_they_were_written_in(saver):
    names = [str(uuid6(clock_seq=-2)) for _ in range(24)]
    order = [("b", names[i]) for i in range(1, 24, 3)] + [("", names[i]) for i in range(0, 24, 3)]
    order += [("c", names[i]) for i in range(2, 24, 3)]
    for ns, name in order:
        saver.put(config("t", ns), checkpoint({"x": 1}, id=name), META, {})
    thread = {"configurable": {"thread_id": "t"}}
    assert ids(saver.list(thread)) == names[::-1]
    assert ids(saver.list(thread, limit=5)) == names[:-6:-1]
    before = config("t", "b", names[10])
    assert ids(saver.list(thread, before=before, limit=5)) == names[9:4:-1]


@pytest.mark.parametrize("saver", ["holdfast", "sqlite"], indirect=True)
def test_ids_of_somebodys_own_making_come_in_their_order(saver):
    for ns, name in (("", "a1"), ("b", "z1"), ("", "m2"), ("b", "z3"), ("c", "a2")):
        saver.put(config("t", ns), checkpoint({"x": 1}, id=name), META, {})
    assert ids(saver.list({"configurable": {"thread_id": "t"}})) == ["z3", "z1", "m2", "a2", "a1"]


def test_what_a_rollback_left_is_in_the_list_at_its_place(ours):
    chain(ours, "t", 3)
    chain(ours, "t", 2, ns="inner")
    newest = chain(ours, "t", 1, start=ours.get_tuple(config("t")).config)[0]
    with ours.store.agent("t", wait_s=180) as agent:
        agent.rollback("~1")
    found = ids(ours.list({"configurable": {"thread_id": "t"}}))
    assert found == sorted(found, reverse=True)
    assert found[0] == newest["configurable"]["checkpoint_id"]
    assert ours.get_tuple(config("t")).checkpoint["id"] == found[3]
