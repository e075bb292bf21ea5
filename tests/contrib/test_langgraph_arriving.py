"""An imported thread is there as a whole or cannot be opened, and comparing understands every value."""

from __future__ import annotations

import sqlite3
from collections import deque
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command, Interrupt, Send

import holdfast
from holdfast.cli import main
from holdfast.contrib.langgraph import HoldfastSaver, import_threads
from holdfast.errors import BadName, BadOption, SourceUnreadable, StillArriving
from tests.contrib.threads import META, chain, checkpoint, config, everything, same

NAN = float("nan")


@dataclass(frozen=True)
class Pair:
    """Comes out of LangGraph's serializer with a list for its tuple, so that it cannot be in a set."""

    parts: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """The same, made whole again."""

    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))


@contextmanager
def source(tmp_path):
    with closing(sqlite3.connect(tmp_path / "old.sqlite", check_same_thread=False)) as connection:
        yield SqliteSaver(connection), f"sqlite:///{tmp_path / 'old.sqlite'}"


@pytest.fixture
def ours(store_path):
    with HoldfastSaver(store_path, types=[Pair]) as saver:
        yield saver
        assert saver.store.verify().ok, str(saver.store.verify())


def put(saver, thread, *values):
    at = config(thread)
    for value in values:
        at = saver.put(at, checkpoint({"v": value}), META, {})
    return at


# -- whole or not at all -------------------------------------------------------------------------------------------


def test_what_was_in_a_set_comes_over_as_it_was(tmp_path, ours):
    value = {"s": {("a", (1, 2)), ("b",)}, "f": [frozenset({(1,), 2})], "nested": {frozenset({("x", 1)})}}
    with source(tmp_path) as (old, url):
        at = put(old, "t", value)
        old.put_writes(at, [("v", value)], "task")
        assert import_threads(url, ours).ok
    found = ours.get_tuple(at)
    assert same(found.checkpoint["channel_values"]["v"], value)
    assert same(found.pending_writes, [("task", "v", value)])


def test_a_thread_that_cannot_come_as_a_whole_does_not_come_and_the_others_do(tmp_path, ours, capsys):
    with source(tmp_path) as (old, url):
        for name in ("a", "c"):
            put(old, name, 1, 2)
        put(old, "b", 1, 2, {Pair((1,))}, 4)
        report = import_threads(url, ours)
        assert [(one.thread, one.status) for one in report.threads] == [
            ("a", "imported"), ("b", "failed"), ("c", "imported"),
        ]  # fmt: skip
        error = report.failed[0].error
        assert type(error) is SourceUnreadable
        assert "builtins.set" in error.message
        assert "has to make it a tuple" in error.hint
        assert ours.get_tuple(config("b")) is None
        assert ours.store._db.view.agent("b") is None, "nothing is left that nobody would see"
        assert {info.name for info in ours.store.agents()} == {"a", "c"}
        assert {one.config["configurable"]["thread_id"] for one in ours.list(None)} == {"a", "c"}
        ours.delete_for_runs(["nobody"])
        again = import_threads(url, ours)
        assert [(one.status, one.written) for one in again.threads] == [("complete", 0), ("failed", 2), ("complete", 0)]
    put(ours, "b", "anew")
    assert len(everything(ours, "b")) == 1


def test_a_thread_whose_import_stopped_half_way_is_brought_anew_and_opens_then(tmp_path, ours):
    class StoppedError(Exception):
        pass

    def stop(what, done, total):
        if (what, done) == ("checkpoints", 4):
            raise StoppedError

    with source(tmp_path) as (old, url):
        chain(old, "t", 6)
        chain(old, "t", 3, ns="inner:1")
        expected = everything(old, "t")
        with pytest.raises(StoppedError):
            import_threads(url, ours, progress=stop)
        for reading in (ours.get_tuple, ours.list):
            with pytest.raises(StillArriving, match="'t'"):
                list(reading(config("t")) or ())
        with pytest.raises(StillArriving):
            ours.put(config("t"), checkpoint({"v": 9}), META, {})
        with pytest.raises(StillArriving):
            ours.store.agent("t", readonly=True)
        (done,) = import_threads(url, ours).threads
    assert (done.status, done.written) == ("imported", 9)
    assert everything(ours, "t") == expected
    assert not ours.store.agent("t", branch="inner:1", readonly=True).closed


def test_a_thread_that_a_push_has_not_finished_is_not_imported_into(tmp_path, ours):
    chain(ours, "t", 2)

    def arriving(change):
        branch = change.branch(change.agent("t").a, "main")
        change.move(branch, branch._replace(body={**branch.body, "arriving": "push"}))

    ours.store._db.change(arriving)
    with source(tmp_path) as (old, url):
        for found in reversed(list(ours_tuples(ours, "t"))):
            old.put(found.parent_config or config("t"), found.checkpoint, found.metadata, {})
        chain(old, "t", 1, start=old.get_tuple(config("t")).config)
        assert type(import_threads(url, ours).failed[0].error) is StillArriving


def ours_tuples(saver, thread):
    from holdfast.contrib.langgraph.tuples import Reader

    return Reader.of(saver, thread, "", arriving=True).tuples(None, None)


def test_the_command_names_what_failed_and_goes_on(tmp_path, store_path, capsys):
    with source(tmp_path) as (old, url):
        put(old, "a", 1)
        put(old, "b", 1, {Pair((1,))})
        put(old, "c", 1)
    code = main(["import", "langgraph", url, "--types", __name__, "--store", str(store_path)])
    said = capsys.readouterr().out
    assert code == 4
    assert "b: a stored builtins.set cannot be rebuilt" in said
    assert main(["agents", "--store", str(store_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:3]] == ["c", "a"]


# -- ids that cannot be kept ---------------------------------------------------------------------------------------


def test_a_dry_run_and_an_import_say_which_ids_cannot_be_kept(tmp_path, ours, capsys):
    with source(tmp_path) as (old, url):
        for name in ("", " a ", "x" * 1025, "tab\tbed", "fine"):
            put(old, name, 1)
        for report in (import_threads(url, None, dry_run=True), import_threads(url, ours)):
            assert {one.thread for one in report.failed} == {"", " a ", "x" * 1025, "tab\tbed"}
            assert {type(one.error) for one in report.failed} == {BadName}
        code = main(["import", "langgraph", url, "--dry-run"])
    said = capsys.readouterr().out
    assert code == 2
    assert "' a ' is not a name for a thread" in said
    assert "Nothing was imported" in said


# -- comparing -----------------------------------------------------------------------------------------------------


def values():
    """Fresh each time: nothing is the same object as before."""
    nan = float("nan")
    return {
        "several": {1.0, "x", (1, "y")},
        "frozenset": frozenset([(1.5, 1), (1.5, 2)]),
        "decimal": [Decimal("NaN"), [Decimal("NaN")], Decimal("sNaN")],
        "send": [Send("n", {"a": nan}), Send("n", np.arange(3)), Send("n", [Decimal("NaN")])],
        "command": Command(update={"a": np.arange(3)}, goto=[Send("n", {"a": np.array([nan])})], resume=[nan]),
        "interrupt": Interrupt({"a": np.arange(3), "nan": [nan]}, id="1"),
        "message": AIMessage("x", response_metadata={"s": [nan], "d": Decimal("NaN")}),
        "keys": {1.5: nan, (1.5,): 2},
        "deque": deque([[nan]]),
        "empty": [set(), frozenset()],
    }


def test_the_same_again_is_the_same_whatever_it_holds():
    one, other = values(), values()
    for name in one:
        assert same(one[name], other[name]), name
        assert same({"v": one[name]}, {"v": other[name]}), name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([NAN], [0.0]),
        ({1.0}, {1.0, 2.0}),
        ({1}, {True}),
        ({1, "x"}, {1.0, "x"}),
        ({(1, 2)}, {(1, 2.0)}),
        ({0.0, "x"}, {-0.0, "x"}),
        (frozenset(), set()),
        (Send("n", np.arange(3)), Send("n", np.arange(4))),
        (Send("n", 1), Send("m", 1)),
        (Command(goto=Send("n", [NAN])), Command(goto=Send("n", [1.0]))),
        (Interrupt([NAN], id="1"), Interrupt([NAN], id="2")),
        ({1.5: NAN}, {1.5: 2}),
        (Decimal("NaN"), Decimal("sNaN")),
    ],
)
def test_what_is_not_the_same_is_not(one, other):
    assert not same(one, other)
    assert not same(other, one)


def test_threads_with_such_values_come_over_and_are_complete_then(tmp_path, ours):
    held = {
        "list": [NAN, Decimal("NaN")],
        "send": [Send("n", {"a": NAN}), Send("n", np.arange(3))],
        "command": Command(update={"a": np.arange(3)}, goto=[Send("n", {"a": np.array([NAN])})], resume=[NAN]),
        "interrupt": Interrupt({"a": np.arange(3), "nan": [NAN]}, id="1"),
        **{name: values()[name] for name in ("message", "empty")},
    }
    with source(tmp_path) as (old, url):
        at = old.put(config("t"), checkpoint(held), META, {})
        old.put_writes(at, list(held.items()), "task")
        put(old, "u", 1)
        assert [one.status for one in import_threads(url, ours).threads] == ["imported", "imported"]
        assert [one.status for one in import_threads(url, ours).threads] == ["complete", "complete"]
    found = ours.get_tuple(at).checkpoint["channel_values"]
    for name in held.keys() - {"message"}:  # which says what it was made from
        assert same(found[name], held[name]), name


def test_a_thread_with_nan_as_a_key_is_not_imported(tmp_path, ours):
    with source(tmp_path) as (old, url):
        put(old, "t", {NAN: 1}, 2)
        put(old, "u", 1)
        assert [one.status for one in import_threads(url, ours).threads] == ["failed", "imported"]


def test_an_import_without_a_saver_is_refused():
    with pytest.raises(BadOption):
        import_threads("sqlite:///old.db", None)


def test_a_class_that_takes_what_is_stored_lets_the_import_go_on(tmp_path, store_path):
    with source(tmp_path) as (old, url):
        put(old, "t", {Made((1, 2))}, 2)
        with HoldfastSaver(store_path) as saver:
            assert not import_threads(url, saver).ok, "the class is not registered"
        with HoldfastSaver(store_path, types=[Made]) as saver:
            assert import_threads(url, saver).ok
            first = everything(saver, "t")[-1]
    assert first["checkpoint"]["channel_values"]["v"] == {Made((1, 2))}
    with holdfast.open(store_path, readonly=True) as store:
        assert [info.name for info in store.agents()] == ["t"]
