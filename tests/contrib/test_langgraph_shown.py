"""A thread as the command line and diffs show it: what the graph did, without LangGraph's own record."""

from __future__ import annotations

import json
from typing import TypedDict

import pytest
from langgraph.graph import START, StateGraph

from holdfast.cli import main
from holdfast.contrib.langgraph import HoldfastSaver
from tests.contrib.threads import config


class State(TypedDict, total=False):
    asked: str
    answered: str


@pytest.fixture
def shown(store_path, capsys):
    def answer(state: State) -> State:
        return {"answered": state["asked"] + "!"}

    builder = StateGraph(State).add_node("answer", answer).add_edge(START, "answer")
    with HoldfastSaver(store_path) as saver:
        graph = builder.compile(checkpointer=saver)
        assert graph.invoke({"asked": "why"}, config("t"))["answered"] == "why!"
        agent = saver.store.agent("t", readonly=True)
        found = agent.diff("~1")
        everything = found.everything
        assert [(change.where, change.kind) for change in found] == [("state.answered", "added")]
        assert "langgraph" not in str(found) + repr(found.to_json()) + found._repr_html_()
        assert {change.path[0] for change in everything} == {"answered", "__langgraph__"}
        assert agent.head.bookkeeping == ["__langgraph__"]
        # What only starts a node is in the record, not a section of its own.
        assert set(agent.at("~1").sections) == {"asked", "__langgraph__"}
        assert graph.get_state(config("t")).values == {"asked": "why", "answered": "why!"}

    def call(*words: str) -> str:
        assert main(["--store", str(store_path), *words]) == 0
        return capsys.readouterr().out

    return call


def test_diff_leaves_the_record_out_unless_it_is_asked_for(shown):
    assert "1 change\n" in shown("diff", "t@~1", "t")
    assert "__langgraph__" not in shown("diff", "t@~1", "t")
    assert "__langgraph__" in shown("diff", "t@~1", "t", "--bookkeeping")
    assert len(json.loads(shown("diff", "t@~1", "t", "--json"))["changes"]) == 1
    assert len(json.loads(shown("diff", "t@~1", "t", "--json", "--bookkeeping"))["changes"]) == 2


def test_show_leaves_the_record_out_unless_it_is_asked_for(shown):
    out = shown("show", "t")
    assert "__langgraph__" not in out
    assert "1 section of bookkeeping hidden; --bookkeeping shows it." in out
    out = shown("show", "t", "--bookkeeping")
    assert "__langgraph__" in out
    assert "hidden" not in out
    assert "channel_versions" in shown("show", "t", "--section", "__langgraph__")
    assert list(json.loads(shown("show", "t", "--json"))["value"]) == ["asked", "answered"]
    assert "__langgraph__" in json.loads(shown("show", "t", "--json", "--bookkeeping"))["value"]


def test_a_rollback_shows_what_it_takes_back_without_the_record(shown):
    out = shown("rollback", "t", "--to", "~1", "--dry-run")
    assert "- state.answered: 'why!'" in out
    assert "__langgraph__" not in out
    assert "__langgraph__" in shown("rollback", "t", "--to", "~1", "--dry-run", "--bookkeeping")
    assert len(json.loads(shown("rollback", "t", "--to", "~1", "--dry-run", "--json"))["changes"]) == 1


def test_no_line_of_the_framework_is_named_as_what_saved(store_path):
    builder = StateGraph(State).add_node("answer", lambda state: {"answered": state["asked"]}).add_edge(START, "answer")
    with HoldfastSaver(store_path) as saver:
        graph = builder.compile(checkpointer=saver)
        graph.invoke({"asked": "why"}, config("t"))
        agent = saver.store.agent("t", readonly=True)
        assert {agent.blame(place).cause.caller for place in ("asked", "answered")} == {""}
