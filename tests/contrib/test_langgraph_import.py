"""Threads of LangGraph's own savers come over whole, from SQLite and PostgreSQL, and the source stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sqlite3
import sys
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import ormsgpack
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde import jsonplus
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command, Send

import holdfast
from holdfast import errors
from holdfast.cli import main
from holdfast.codec.values import encode
from holdfast.contrib.langgraph import HoldfastSaver, import_threads
from holdfast.contrib.langgraph.imports import parents_first
from holdfast.contrib.langgraph.thread import writes_said
from tests import warm
from tests.contrib import graphs
from tests.contrib.graphs import seen
from tests.contrib.threads import chain, checkpoint, config, same, told
from tests.lives import die, dies

META = {"source": "loop", "step": 0, "parents": {}}


class Sqlite:
    """A database of SqliteSaver."""

    def __init__(self, path):
        self.path = path
        self.url = f"sqlite:///{path}"

    @contextmanager
    def saver(self, serde=None):
        with closing(sqlite3.connect(self.path, check_same_thread=False)) as connection:
            yield SqliteSaver(connection, serde=serde)

    def content(self):
        """Everything that is in the file and in its log, as bytes."""
        return {file.name: file.read_bytes() for file in self.path.parent.glob("*.sqlite*") if "shm" not in file.name}


class Postgres:
    """A database of PostgresSaver."""

    def __init__(self, url):
        self.url = url
        with self.saver() as saver:
            saver.setup()

    @contextmanager
    def saver(self, serde=None):
        with PostgresSaver.from_conn_string(self.url) as saver:
            saver.serde = serde or saver.serde
            yield saver

    def content(self):
        import psycopg

        with psycopg.connect(self.url) as connection:
            tables = ("checkpoints", "checkpoint_blobs", "checkpoint_writes", "checkpoint_migrations")
            # xmin: which transaction wrote a row last
            return {table: sorted(connection.execute(f"SELECT xmin::text, t::text FROM {table} t")) for table in tables}


@pytest.fixture
def sqlite_source(tmp_path):
    (tmp_path / "source").mkdir()
    return Sqlite(tmp_path / "source" / "old.sqlite")


@pytest.fixture(params=["sqlite", "postgres"])
def source(request, tmp_path):
    if request.param == "sqlite":
        return request.getfixturevalue("sqlite_source")
    return Postgres(request.getfixturevalue("postgres_url"))


@pytest.fixture
def ours(store_path):
    with HoldfastSaver(store_path, types=graphs.TYPES, durability="batched") as saver:
        yield saver
        saver.store.flush()
        assert saver.store.verify().ok, str(saver.store.verify())


def thread(name, **more):
    return {"configurable": {"thread_id": name, **more}}


# Graphs by the thread that runs them.
GRAPHS = {
    "chat": graphs.chat,
    "forgetful": graphs.forgetful,
    "approval": lambda saver: graphs.approval(saver, []),
    "answered": lambda saver: graphs.approval(saver, []),
    "nested": lambda saver: graphs.nested(saver, []),
    "kept inside": lambda saver: graphs.nested(saver, [], inner_saver=True),
    "broken": lambda saver: graphs.branches(saver, [], [True]),
    "mapped": lambda saver: graphs.mapped(saver, []),
    "essay": lambda saver: graphs.essay(saver, []),
    "delta": graphs.delta,
    "travel": graphs.travel,
    "game": graphs.game,
}


def live(saver):
    """Run every graph, so that each thread is somewhere in its life."""
    runs = {name: (make(saver), thread(name)) for name, make in GRAPHS.items()}

    def invoke(name, value, **more):
        graph, at = runs[name]
        graph.invoke(value, {"configurable": {**at["configurable"], **more}})

    for number in range(4):
        invoke("chat", {"messages": [HumanMessage(f"question {number}", id=f"q{number}")]})
        invoke("forgetful", {"messages": [HumanMessage(f"question {number}", id=f"q{number}")]})
        invoke("delta", {"items": [number]})
        invoke("travel", {"note": f"trip {number}"})
        invoke("game", graphs.Game(round=number))
    graph, at = runs["chat"]
    older = list(graph.get_state_history(at))[4].config
    fork = graph.update_state(older, {"messages": [HumanMessage("instead", id="fork")]}, as_node="reply")
    invoke("chat", {"messages": [HumanMessage("go on", id="on")]}, **fork["configurable"])
    for name in ("approval", "answered", "nested", "kept inside"):
        invoke(name, {"trail": ["start"]})
    invoke("answered", Command(resume="Ada"))
    invoke("answered", Command(resume="gently"))
    with suppress(graphs.Refused):
        invoke("broken", {"trail": []})
    invoke("mapped", {"topics": ["tea", "salt", "rain"]})
    invoke("essay", ["one", "two"])


def histories(saver):
    """What every graph says about its whole history, namespaces inside it too."""
    found = {}
    for name, make in GRAPHS.items():
        graph = make(saver)
        found[name] = [(seen(snapshot), snapshot.config, snapshot.metadata, snapshot.created_at, snapshot.parent_config)
                       for snapshot in graph.get_state_history(thread(name))]  # fmt: skip
        found[name, "now"] = seen(graph.get_state(thread(name), subgraphs=True))
    return found


def every_tuple(saver, name):
    return [told(one) for one in saver.list(thread(name))]


def tuples(saver):
    return {name: every_tuple(saver, name) for name in GRAPHS}


def by_name(found):
    """The same with all dicts in order: a saver may give channels in any."""
    if isinstance(found, dict):
        return {key: by_name(found[key]) for key in sorted(found, key=str)}
    return list(map(by_name, found)) if isinstance(found, list) else found


# -- whole histories -----------------------------------------------------------------------------------------------


def test_whole_histories_come_over_and_the_source_is_untouched(source, ours):
    with source.saver() as old:
        live(old)
        expected = histories(old), tuples(old)
    before = source.content()

    report = import_threads(source.url, ours)

    assert report.ok, [(one.thread, str(one.error)) for one in report.failed]
    assert source.content() == before
    assert {one.thread: one.status for one in report.threads} == dict.fromkeys(GRAPHS, "imported")
    assert all(one.written == one.checkpoints for one in report.threads)
    assert histories(ours) == expected[0]
    for name, found in tuples(ours).items():
        assert same(by_name(found), by_name(expected[1][name])), name


def test_the_same_graphs_go_on_with_imported_threads(source, ours):
    with source.saver() as old:
        live(old)
        assert import_threads(source.url, ours).ok
        for saver in (old, ours):
            go_on(saver)
        theirs, here = histories(old), histories(ours)
    for name in GRAPHS:
        # Ids of what happened since differ.
        assert [one[0] for one in here[name]] == [one[0] for one in theirs[name]], name
        assert here[name, "now"] == theirs[name, "now"], name


def go_on(saver):
    resumed = {name: make(saver) for name, make in GRAPHS.items()}
    for name in ("chat", "forgetful"):
        resumed[name].invoke({"messages": [HumanMessage("later", id="later")]}, thread(name))
    for name in ("approval", "answered", "nested", "kept inside", "essay"):
        resumed[name].invoke(Command(resume="Grace"), thread(name))
    graphs.branches(saver, [], [False]).invoke(None, thread("broken"))
    resumed["mapped"].invoke({"topics": ["sun"]}, thread("mapped"))
    resumed["delta"].invoke({"items": ["later"]}, thread("delta"))
    resumed["travel"].invoke({"note": "later"}, thread("travel"))
    resumed["game"].invoke(graphs.Game(round=9), thread("game"))


def test_an_imported_thread_is_what_the_saver_itself_would_have_written(source, ours, tmp_path):
    with source.saver() as old:
        made = chain(old, "t", 5)
        old.put_writes(made[-1], [("messages", "w"), ("number", 7)], "task", "~path")
    assert import_threads(source.url, ours).ok
    with HoldfastSaver(tmp_path / "second") as direct, source.saver() as old:
        for found in reversed(list(old.list(thread("t")))):
            parent = found.parent_config or config("t")
            direct.put(parent, found.checkpoint, found.metadata, {})
        direct.put_writes(made[-1], [("messages", "w"), ("number", 7)], "task", "~path")
        assert every_tuple(direct, "t") == every_tuple(ours, "t")
        logs = [
            [(one.label, one.depth, one.sections) for one in saver.store.agent("t", readonly=True).log()]
            for saver in (direct, ours)
        ]
        assert logs[0] == logs[1]


def test_only_the_threads_that_were_named_are_imported(source, ours):
    with source.saver() as old:
        for name in ("a", "b", "c"):
            chain(old, name, 2)
    report = import_threads(source.url, ours, threads=["c", "a", "c"])
    assert [one.thread for one in report.threads] == ["c", "a"]
    assert {info.name for info in ours.store.agents()} == {"a", "c"}


def test_a_name_that_the_source_does_not_have_is_refused_before_anything_is_written(source, ours):
    with source.saver() as old:
        chain(old, "a", 2)
    with pytest.raises(errors.BadOption, match="'nobody'"):
        import_threads(source.url, ours, threads=["a", "nobody"])
    assert not ours.store.agents()


def test_a_dry_run_counts_and_needs_no_saver(source):
    with source.saver() as old:
        made = chain(old, "a", 3)
        chain(old, "b", 2)
        chain(old, "b", 1, ns="inner:1")
        old.put_writes(made[0], [("x", 1), ("y", 2)], "task")
    report = import_threads(source.url, None, dry_run=True)
    assert [one.to_json() for one in report.threads] == [
        {"thread": "a", "status": "found", "namespaces": 1, "checkpoints": 3, "writes": 2, "written": 0, "error": None},
        {"thread": "b", "status": "found", "namespaces": 2, "checkpoints": 3, "writes": 0, "written": 0, "error": None},
    ]


# -- details that must come over -----------------------------------------------------------------------------------


def test_writes_keep_their_places_paths_and_kinds(source, ours):
    with source.saver() as old:
        (at,) = chain(old, "t", 1)
        old.put_writes(at, [("a", 1), ("b", [2])], "task-2", "~1, second")
        old.put_writes(at, [("a", 3)], "task-1", "~2, first")
        old.put_writes(at, [("__error__", "boom")], "task-1", "~2, first")
        old.put_writes(at, [("__resume__", ["yes"]), ("__interrupt__", ["no"])], "task-3")
        expected = told(old.get_tuple(at))
    assert import_threads(source.url, ours).ok
    assert told(ours.get_tuple(at)) == expected
    # As with any saver: a write that is there stays, an error is replaced.
    ours.put_writes(at, [("a", "again")], "task-1", "~2, first")
    ours.put_writes(at, [("__error__", "worse")], "task-1", "~2, first")
    found = ours.get_tuple(at).pending_writes
    assert ("task-1", "a", 3) in found
    assert ("task-1", "__error__", "worse") in found


def test_writes_that_came_before_a_checkpoint_that_never_did_come_over(source, ours):
    with source.saver() as old:
        chain(old, "t", 1)
        late = checkpoint({"messages": []})
        old.put_writes(config("t", "", late["id"]), [("messages", "early")], "task")
        old.put_writes(config("t", "inner", late["id"]), [("messages", "inner")], "task")
    report = import_threads(source.url, ours)
    assert report.ok
    assert import_threads(source.url, ours).threads[0].status == "complete"
    at = ours.put(config("t"), late, META, {})
    assert ours.get_tuple(at).pending_writes == [("task", "messages", "early")]
    at = ours.put(config("t", "inner"), late, META, {})
    assert ours.get_tuple(at).pending_writes == [("task", "messages", "inner")]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_older_formats_come_over_as_the_savers_read_them(source, ours, version):
    with source.saver() as old:
        first = checkpoint({"x": 1}, v=version, pending_sends=[])
        if isinstance(source, Sqlite):  # the other kept them with the parent's writes only
            first["pending_sends"] = [Send("node", {"a": 1})]
        at = old.put(config("t"), first, {**META, "writes": {"node": {"x": [1]}}}, {"x": 1})
        old.put_writes(at, [("__pregel_tasks", Send("node", {"b": 2}))], "task", "~p")
        second = checkpoint({"x": 2}, v=version)
        del second["updated_channels"]
        old.put(at, second, META, {"x": 2})
        expected = every_tuple(old, "t")
    assert import_threads(source.url, ours).ok
    assert every_tuple(ours, "t") == expected


def test_a_parent_whose_id_is_larger_comes_first_and_the_largest_id_is_where_the_thread_stands(source, ours):
    names = [f"1f000000-0000-6000-8000-00000000000{number}" for number in range(6)]
    with source.saver() as old:
        at = config("t")
        for step, number in enumerate((0, 1, 5, 3, 4)):  # the clock went back after the third
            made = checkpoint({"x": step}, id=names[number], channel_versions={"x": step + 1})
            at = old.put(at, made, {**META, "step": step}, made["channel_versions"])
        old.put(config("t", "", names[2]), checkpoint({"x": 9}, id=names[4][:-1] + "9"), META, {"x": 1})
        newest = told(old.get_tuple(thread("t")))
        expected = {one["config"]["checkpoint_id"]: one for one in every_tuple(old, "t")}
    assert import_threads(source.url, ours).ok
    assert {one["config"]["checkpoint_id"]: one for one in every_tuple(ours, "t")} == expected
    found = ours.get_tuple(thread("t"))
    assert told(found) == newest
    assert import_threads(source.url, ours).threads[0].status == "complete"


def test_parents_first():
    assert parents_first({"a": None, "b": "a", "c": "b"}) == ["a", "b", "c"]
    assert parents_first({"a": "c", "b": "a", "c": None}) == ["c", "a", "b"]
    assert parents_first({"a": "gone", "b": "b", "c": "d", "d": "c"}) == ["a", "b", "d", "c"]


def test_values_that_are_not_equal_to_themselves_or_only_look_equal(sqlite_source, ours):
    values = {"nan": float("nan"), "array": np.arange(6).reshape(2, 3), "none": None, "zero": -0.0, "set": {1, 2}}
    with sqlite_source.saver() as old:
        at = old.put(config("t"), checkpoint(values), META, {})
    assert import_threads(sqlite_source.url, ours).ok
    found = ours.get_tuple(at).checkpoint["channel_values"]
    assert same(found, values)
    for one, other in [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1})]:
        assert not same(one, other)
    assert not same(HumanMessage("a", id="1"), HumanMessage("b", id="1"))
    assert not same(HumanMessage("a", id="1"), AIMessage("a", id="1"))
    assert same(np.array([float("nan")]), np.array([float("nan")]))


# -- the source stays as it is -------------------------------------------------------------------------------------


def test_a_database_with_a_log_is_read_with_it_and_neither_changes(sqlite_source, ours, tmp_path):
    with sqlite_source.saver() as old:
        chain(old, "t", 20)
        (tmp_path / "crashed").mkdir()
        for file in sqlite_source.path.parent.glob("old.sqlite*"):  # as a kill leaves it
            if "shm" not in file.name:
                shutil.copy(file, tmp_path / "crashed")
    crashed = Sqlite(tmp_path / "crashed" / "old.sqlite")
    before = crashed.content()
    assert len(before["old.sqlite-wal"]) > 0
    assert import_threads(crashed.url, ours).threads[0].checkpoints == 20
    assert crashed.content() == before


def test_a_database_at_rest_gets_no_files_beside_it_even_where_nothing_can_be_written(sqlite_source, ours):
    with sqlite_source.saver() as old:
        chain(old, "t", 3)
    folder = sqlite_source.path.parent
    assert [file.name for file in folder.iterdir()] == ["old.sqlite"]
    folder.chmod(0o500)
    sqlite_source.path.chmod(0o400)
    before = hashlib.sha256(sqlite_source.path.read_bytes()).digest(), sqlite_source.path.stat().st_mtime_ns
    try:
        assert import_threads(sqlite_source.url, ours).ok
    finally:
        folder.chmod(0o700)
    assert [file.name for file in folder.iterdir()] == ["old.sqlite"]
    assert (hashlib.sha256(sqlite_source.path.read_bytes()).digest(), sqlite_source.path.stat().st_mtime_ns) == before


def test_a_database_that_is_being_written_is_read_and_goes_on_being_written(sqlite_source, ours):
    with sqlite_source.saver() as old:
        made = chain(old, "t", 3)

        def write_on(what, done, total):
            if what == "checkpoints" and done == 1:
                chain(old, "t", 2, start=made[-1])

        report = import_threads(sqlite_source.url, ours, progress=write_on)
        assert report.ok  # a thread is read from one moment
        assert report.threads[0].checkpoints == 3
        assert len(every_tuple(ours, "t")) == 3
        assert len(every_tuple(old, "t")) == 5


def test_a_database_at_rest_that_is_written_meanwhile_is_noticed(sqlite_source, ours):
    with sqlite_source.saver() as old:
        chain(old, "t", 3)

    def write_on(what, done, total):
        if what == "checkpoints" and done == 1:
            with sqlite_source.saver() as old:
                chain(old, "u", 1)

    with pytest.raises(errors.SourceUnreadable, match="was written while it was read"):
        import_threads(sqlite_source.url, ours, progress=write_on)
    assert import_threads(sqlite_source.url, ours).ok


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("sqlite:///{tmp}/nothing.db", errors.SourceUnreadable, "No such file"),
        ("sqlite:///{tmp}", errors.SourceUnreadable, "cannot be read"),
        ("sqlite:///{tmp}/text", errors.SourceUnreadable, "file is not a database"),
        ("sqlite:///{tmp}/other.db", errors.SourceUnreadable, "no such table"),
        ("mysql://localhost/x", errors.BadOption, "'mysql'"),
        ("old.db", errors.BadOption, "not a kind of source"),
        ("postgresql://me:secret@127.0.0.1:1/x", errors.SourceUnreadable, "postgresql://127.0.0.1:1/x cannot be read"),
    ],
)
def test_what_is_not_a_source_is_said_and_changes_nothing(tmp_path, ours, url, error, said):
    (tmp_path / "text").write_text("hello, this is long enough to have a header")
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE t (a)")
    with pytest.raises(error, match=said) as caught:
        import_threads(url.format(tmp=tmp_path), ours)
    assert "secret" not in str(caught.value)
    assert not ours.store.agents()
    assert not (tmp_path / "nothing.db").exists()


def test_a_postgres_database_without_the_tables_is_said_and_gets_none(postgres_url, ours):
    import psycopg

    with pytest.raises(errors.SourceUnreadable, match="cannot be read: relation"):
        import_threads(postgres_url, ours)
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)


# -- again, and on -------------------------------------------------------------------------------------------------


def test_what_is_complete_is_not_touched(source, ours):
    with source.saver() as old:
        live(old)
    assert import_threads(source.url, ours).ok
    before = ours.store.stats()["counts"]
    report = import_threads(source.url, ours)
    assert {one.status for one in report.threads} == {"complete"}
    assert ours.store.stats()["counts"] == before


def test_a_thread_that_has_gone_on_since_is_complete(source, ours):
    with source.saver() as old:
        live(old)
    assert import_threads(source.url, ours).ok
    go_on(ours)
    after = tuples(ours)
    report = import_threads(source.url, ours)
    assert report.ok, [str(one.error) for one in report.failed]
    assert {one.status for one in report.threads} == {"complete"}
    assert same(tuples(ours), after)


def test_a_thread_that_has_grown_in_the_source_since_is_left_alone_and_comes_anew_when_it_was_deleted(source, ours):
    with source.saver() as old:
        made = chain(old, "t", 3)
        assert import_threads(source.url, ours).ok
        old.put_writes(made[-1], [("x", 1)], "one")
        (failed,) = import_threads(source.url, ours).failed
        assert type(failed.error) is errors.ThreadExists
        assert "a write to 'x' of checkpoint" in str(failed.error)
        chain(old, "t", 2, start=made[-1])
        (failed,) = import_threads(source.url, ours).failed
        assert "2 checkpoints of the source are not there" in str(failed.error)
        assert "delete that thread first" in failed.error.hint
        assert len(every_tuple(ours, "t")) == 3
        ours.delete_thread("t")
        assert import_threads(source.url, ours).threads[0].written == 5
        assert every_tuple(ours, "t") == every_tuple(old, "t")


def test_a_thread_with_other_content_is_left_alone_and_the_others_come_over(source, ours):
    with source.saver() as old:
        for name in ("a", "agent", "b", "c"):
            chain(old, name, 3)
    chain(ours, "a", 2)
    ours.store.agent("agent").checkpoint("not LangGraph's")
    ours.store.agent("agent").close()
    before = every_tuple(ours, "a")
    report = import_threads(source.url, ours)
    assert [(one.thread, one.status) for one in report.threads] == [
        ("a", "failed"), ("agent", "failed"), ("b", "imported"), ("c", "imported"),
    ]  # fmt: skip
    assert all(type(one.error) is errors.ThreadExists for one in report.failed)
    assert [one.error.thread for one in report.failed] == ["a", "agent"]
    assert every_tuple(ours, "a") == before


def test_a_checkpoint_that_was_changed_in_the_source_is_found(sqlite_source, ours):
    with sqlite_source.saver() as old:
        made = chain(old, "t", 3)
        assert import_threads(sqlite_source.url, ours).ok
        found = old.get_tuple(made[1])
        found.checkpoint["channel_values"]["number"] = "changed"
        old.put(found.parent_config, found.checkpoint, {**found.metadata, "step": 99}, {})
    before = every_tuple(ours, "t")
    (failed,) = import_threads(sqlite_source.url, ours).failed
    assert "channel 'number' of checkpoint" in str(failed.error)
    assert "metadata of checkpoint" in str(failed.error)
    assert every_tuple(ours, "t") == before


def test_a_thread_that_both_sides_went_on_with_is_left_alone(source, ours):
    with source.saver() as old:
        made = chain(old, "t", 3)
        assert import_threads(source.url, ours).ok
        chain(old, "t", 1, start=made[-1])
    chain(ours, "t", 1, start=made[-1])
    before = every_tuple(ours, "t")
    (failed,) = import_threads(source.url, ours).failed
    assert type(failed.error) is errors.ThreadExists
    assert every_tuple(ours, "t") == before


def test_a_thread_that_another_process_writes_is_busy_and_the_others_come_over(sqlite_source, ours):
    with sqlite_source.saver() as old:
        chain(old, "a", 1)
        chain(old, "b", 1)
    with closing(holdfast.open(ours.store.path, durability="batched").agent("a")):
        report = import_threads(sqlite_source.url, ours)
    assert [(one.thread, one.status) for one in report.threads] == [("a", "failed"), ("b", "imported")]
    assert type(report.failed[0].error) is errors.AgentBusy
    assert import_threads(sqlite_source.url, ours).ok


def test_a_thread_that_does_not_read_back_equal_is_not_called_imported(sqlite_source, ours):
    with sqlite_source.saver() as old:
        made = chain(old, "t", 3)
        chain(old, "u", 1)

    def meddle(what, done, total):
        agent = ours.store._db.view.agent("t")
        if (what, done) == ("checkpoints", 3) and agent is not None:
            ours.store.flush()
            at = made[1]["configurable"]["checkpoint_id"]
            event = writes_said("", at, [(0, "x", encode(1))], "somebody", "", replace=False)
            ours.store._db.change(lambda change: change.say(agent.a, event))

    report = import_threads(sqlite_source.url, ours, progress=meddle)
    assert [(one.thread, one.status) for one in report.threads] == [("t", "failed"), ("u", "imported")]
    assert type(report.failed[0].error) is errors.Damaged
    assert "writes that the source does not have" in str(report.failed[0].error)


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_an_import_that_is_killed_goes_on(sqlite_source, store_path, durability):
    with sqlite_source.saver() as old:
        for name in ("a", "b", "c"):
            made = chain(old, name, 60)
            fork = chain(old, name, 20, start=made[30])
            for at in (*made, *fork):
                old.put_writes(at, [("messages", "w"), ("number", 1)], "task", "~p")
            chain(old, name, 5, ns="inner:1")
        expected = {name: every_tuple(old, name) for name in ("a", "b", "c")}

    def imported(kill_at):
        def progress(what, done, total):
            if (what, done) == ("checkpoints", kill_at):
                die()

        with HoldfastSaver(store_path, durability=durability) as saver:
            import_threads(sqlite_source.url, saver, progress=progress)

    died = [dies(lambda at=at: imported(at), 0) for at in (1, 37, 85, 90, 140, 200, 254)]
    assert sum(died) > 3
    with HoldfastSaver(store_path, durability="batched") as ours:
        report = import_threads(sqlite_source.url, ours)
        assert report.ok, [str(one.error) for one in report.failed]
        assert {name: every_tuple(ours, name) for name in ("a", "b", "c")} == expected
        assert import_threads(sqlite_source.url, ours).threads[0].status == "complete"
        assert ours.store.verify().ok


# -- nothing from the source runs ----------------------------------------------------------------------------------


def test_a_type_that_is_not_known_is_named_with_the_option_and_nothing_is_imported(sqlite_source, store_path):
    with sqlite_source.saver() as old:
        live(old)
    with HoldfastSaver(store_path) as ours:
        report = import_threads(sqlite_source.url, ours)
        failed = {one.thread: one.error for one in report.failed}
        assert set(failed) == {"travel", "game"}
        assert failed["travel"].type_name == "tests.contrib.graphs.Place"
        assert "--types tests.contrib.graphs" in failed["travel"].hint
    with HoldfastSaver(store_path, types=["tests.contrib.graphs"]) as ours:
        assert import_threads(sqlite_source.url, ours).ok


def hostile(code, *content):
    return ormsgpack.packb({"x": ormsgpack.Ext(code, ormsgpack.packb(content))})


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("msgpack", hostile(jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG, "os", "system", "touch owned")),
        ("msgpack", hostile(jsonplus.EXT_CONSTRUCTOR_POS_ARGS, "subprocess", "call", [["touch", "owned"]])),
        ("msgpack", hostile(jsonplus.EXT_CONSTRUCTOR_KW_ARGS, "subprocess", "call", {"args": ["touch", "owned"]})),
        ("msgpack", hostile(jsonplus.EXT_METHOD_SINGLE_ARG, "os", "path", "owned", "exists")),
        ("msgpack", hostile(jsonplus.EXT_METHOD_SINGLE_ARG, "datetime", "datetime", "x", "__init_subclass__")),
        ("msgpack", hostile(jsonplus.EXT_PYDANTIC_V2, "subprocess", "Popen", {"args": ["touch", "owned"]})),
        ("msgpack", hostile(jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG, "antigravity", "x", 1)),
        (
            "json",
            json.dumps({"lc": 2, "type": "constructor", "id": ["os", "system"], "args": ["touch owned"]}).encode(),
        ),
        ("json", json.dumps({"lc": 1, "type": "constructor", "id": ["antigravity", "x"], "kwargs": {}}).encode()),
        ("json", json.dumps({"lc": 1, "type": "secret", "id": ["PATH"]}).encode()),
        ("pickle", pickle.dumps({"x": 1})),
        ("msgpack", b"\xc1"),
        ("msgpack+aes", b"1234"),
        ("unheard", b""),
    ],
)
def test_no_stored_bytes_run_or_import_anything(sqlite_source, ours, tmp_path, monkeypatch, kind, data):
    monkeypatch.chdir(tmp_path)
    with sqlite_source.saver() as old:
        chain(old, "good", 2)
        (at,) = chain(old, "bad", 1)
        old.put_writes(at, [("x", 1)], "task")
        old.conn.execute("UPDATE writes SET type = ?, value = ?", (kind, data))
        old.conn.commit()
    report = import_threads(sqlite_source.url, ours)
    assert [(one.thread, one.status) for one in report.threads] == [("bad", "failed"), ("good", "imported")]
    assert isinstance(report.failed[0].error, errors.Incompatible)
    assert not (tmp_path / "owned").exists()
    assert "antigravity" not in sys.modules


def test_what_a_class_does_not_accept_any_more_is_an_error_not_its_bare_fields(sqlite_source, ours):
    with sqlite_source.saver() as old:
        (at,) = chain(old, "t", 1)
        old.put_writes(at, [("x", graphs.Score("a"))], "task")
        wrong = hostile(jsonplus.EXT_CONSTRUCTOR_KW_ARGS, "tests.contrib.graphs", "Score", {"gone": 1})
        old.conn.execute("UPDATE writes SET value = ?", (wrong,))
        old.conn.commit()
    (failed,) = import_threads(sqlite_source.url, ours).failed
    assert type(failed.error) is errors.SourceUnreadable
    assert "tests.contrib.graphs.Score cannot be rebuilt" in str(failed.error)


def test_objects_that_were_stored_as_json_are_refused_and_plain_json_is_not(sqlite_source, ours):
    from langchain_core.load.dump import dumps

    with sqlite_source.saver() as old:
        for name, values in (("old", {"messages": [HumanMessage("hi", id="1")]}), ("plain", {"n": [1, {"x": 3}]})):
            chain(old, name, 1)
            made = checkpoint(values)
            old.conn.execute("UPDATE checkpoints SET type = 'json', checkpoint = ?, checkpoint_id = ? "
                             "WHERE thread_id = ?", (dumps(made).encode(), made["id"], name))  # fmt: skip
        old.conn.commit()
    report = import_threads(sqlite_source.url, ours)
    assert [(one.thread, one.status) for one in report.threads] == [("old", "failed"), ("plain", "imported")]
    assert "HumanMessage was stored as JSON" in str(report.failed[0].error)
    assert "new database" in report.failed[0].error.hint
    assert ours.get_tuple(thread("plain")).checkpoint == made


class Rot13:
    """No secret, but a cipher."""

    def encrypt(self, plaintext):
        return "rot", bytes(byte ^ 13 for byte in plaintext)

    def decrypt(self, ciphername, ciphertext):
        return bytes(byte ^ 13 for byte in ciphertext)


def test_encrypted_threads_come_over_with_their_cipher(source, ours):
    with source.saver(EncryptedSerializer(Rot13())) as old:
        at = old.put(config("t"), checkpoint({"x": [1, 2]}), META, {"x": 1})
        old.put_writes(at, [("x", {"y": 1})], "task")
        expected = every_tuple(old, "t")
    (failed,) = import_threads(source.url, ours).failed
    assert "cipher=" in failed.error.hint
    assert import_threads(source.url, ours, cipher=Rot13()).ok
    assert every_tuple(ours, "t") == expected


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(store_path, capsys):
    def call(*words, code=0):
        assert main(["--store", str(store_path), "import", "langgraph", *words]) == code
        return capsys.readouterr()

    return call


def test_the_command_imports_into_a_store_that_it_makes(sqlite_source, store_path, command):
    with sqlite_source.saver() as old:
        live(old)
    out = command(sqlite_source.url, "--dry-run").out
    assert "In all 12 threads" in out
    assert not store_path.exists()
    out = command(sqlite_source.url, "--types", "tests.contrib.graphs").out
    assert "imported" in out
    assert "equal to the source" in out
    out = command(sqlite_source.url, "--types", "tests.contrib.graphs").out
    assert "already there" in out
    with holdfast.open(store_path, readonly=True, inert=True) as store:
        assert len(store.agents()) == 12


def test_the_command_says_what_failed_and_ends_with_the_errors_code(sqlite_source, command):
    with sqlite_source.saver() as old:
        live(old)
    shown = command(sqlite_source.url, code=4)
    assert "tests.contrib.graphs.Place" in shown.out
    assert "--types tests.contrib.graphs" in shown.out
    found = json.loads(command(sqlite_source.url, "--json", "--thread", "game", "--thread", "chat", code=4).out)
    assert found["schema"] == "holdfast.import/1"
    assert [(one["thread"], one["status"]) for one in found["threads"]] == [("game", "failed"), ("chat", "complete")]
    assert found["threads"][0]["error"]["kind"] == "unknown-type"


SCRIPT = """
import enum, sqlite3, sys
from dataclasses import dataclass
from typing import NamedTuple
import pydantic
from langgraph.checkpoint.sqlite import SqliteSaver
from holdfast.contrib.langgraph import HoldfastSaver, import_threads
from tests.contrib.threads import META, checkpoint, config


@dataclass
class Offer:
    price: int


class Seat(enum.Enum):
    AISLE = "aisle"


class Leg(NamedTuple):
    start: str
    end: str


class Trip:
    class Plan(pydantic.BaseModel):
        days: int


if __name__ == "__main__" and not sys.argv[1:]:
    saver = SqliteSaver(sqlite3.connect("old.db"))
    saver.setup()
    values = {"offer": Offer(7), "rest": [Seat.AISLE, {"leg": Leg("a", "b")}, Trip.Plan(days=3)]}
    for name in ("one", "two"):
        saver.put_writes(saver.put(config(name), checkpoint(values), META, {}), [("offer", Offer(8))], "task")
elif __name__ == "__main__":
    with HoldfastSaver(sys.argv[1], types=["__main__"]) as ours:
        assert import_threads("sqlite:///old.db", ours).ok
"""


def test_classes_that_a_script_saved_come_over_when_the_script_is_named(tmp_path, store_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "shop_script.py").write_text(SCRIPT)
    (tmp_path / "other_script.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Offer:\n    x: int\n"
    )

    def program(*words):
        here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, *words]
        return warm.run(command, loaded=warm.LANGGRAPH, env=here, capture_output=True, text=True, check=True).stdout

    program("shop_script.py")
    shown = command("sqlite:///old.db", code=4).out
    assert "the type Offer of the script that saved it, which is not named here" in shown
    assert "--types script.py" in shown
    shown = command("sqlite:///old.db", "--types", "shop_script", "--types", "other_script.py", code=4).out
    assert "not known which one that is: other_script.Offer and shop_script.Offer" in shown
    with holdfast.open(store_path) as store:
        assert store.agents() == []
        assert store._db.view.agents() == [], "nothing of a thread that could not come is left"
    command("sqlite:///old.db", "--types", "shop_script")
    assert main(["--store", "by file", "import", "langgraph", "sqlite:///old.db", "--types", "shop_script.py"]) == 0
    program("shop_script.py", "by itself")
    from shop_script import Leg, Offer, Seat, Trip

    for place in (store_path, "by file", "by itself"):
        with HoldfastSaver(place) as saver:
            found = saver.get_tuple(config("two"))
            assert found.pending_writes == [("task", "offer", Offer(8))]
            values = found.checkpoint["channel_values"]
            assert values == {"offer": Offer(7), "rest": [Seat.AISLE, {"leg": Leg("a", "b")}, Trip.Plan(days=3)]}
    (tmp_path / "goes_on.py").write_text(
        "import shop_script\nfrom holdfast.contrib.langgraph import HoldfastSaver\n"
        "print(HoldfastSaver('store').get_tuple({'configurable': {'thread_id': 'one'}}).checkpoint['channel_values'])\n"
    )
    assert "Offer(price=7)" in program("goes_on.py")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sqlite:///nowhere.db"], 4, "No such file"),
        (["nonsense"], 2, "not a kind of source"),
        (["{url}", "--thread", "nobody"], 2, "no thread 'nobody'"),
        (["{url}", "--types", "no_such_module"], 2, "there is no module 'no_such_module'"),
    ],
)
def test_a_wrong_call_makes_no_store(sqlite_source, store_path, command, words, code, said):
    with sqlite_source.saver() as old:
        chain(old, "t", 1)
    shown = command(*(word.format(url=sqlite_source.url) for word in words), code=code)
    assert said in shown.err
    assert not store_path.exists()
