"""What a call was given is shown as it was, also where the record of a read has only a digest of it."""

from __future__ import annotations

import os
import sys

import pytest

import holdfast
from tests import warm

TEXT = "You are a travel agent who never books without asking. "


@holdfast.tool(effect="read")
def llm(messages, model="small"):
    return len(messages)


@pytest.fixture
def hold_on(store_path):
    def run(*words):
        command = [sys.executable, "-m", "holdfast", *words, "--store", str(store_path)]
        environment = {**os.environ, "COLUMNS": "200"}
        return warm.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    return run


def asked(path, count):
    with holdfast.open(path) as store:
        agent = store.agent("trip-7")
        agent.state["m"] = [{"role": "system", "content": TEXT * 30}]

        def work(agent):
            for number in range(count):
                llm(agent.state["m"])
                agent.state["m"].append({"role": "user", "content": f"turn {number} " + "x" * 2_000})

        agent.run(work)


def test_effects_show_what_a_model_was_given(store_path):
    asked(store_path, 20)
    with holdfast.open(store_path, readonly=True) as store:
        effects = store.agent("trip-7", readonly=True).effects()
    assert [effect.args["messages"].size for effect in effects] == list(range(1, 21))
    assert repr(effects[0].args["messages"]).startswith("<1 item: 'You are a travel agent who never")
    assert repr(effects[5].args["messages"]).startswith("<6 items: 'You are")


def test_the_whole_is_found_in_the_checkpoints_around_it(store_path):
    asked(store_path, 20)
    with holdfast.open(store_path, readonly=True) as store:
        agent = store.agent("trip-7", readonly=True)
        whole = [effect.whole()["messages"] for effect in agent.effects()]
        assert whole == [agent.state["m"][: number + 1] for number in range(20)]


def test_the_command_line_shows_the_beginning_or_all(store_path, hold_on):
    asked(store_path, 3)
    shown = hold_on("effects", "trip-7")
    assert "llm(messages=<1 item: 'You are a travel" in shown
    assert "None" not in shown
    assert TEXT * 30 not in shown
    assert TEXT * 30 in hold_on("effects", "trip-7", "--full")
    assert TEXT * 30 in hold_on("effects", "trip-7", "--full", "--json")


def test_a_dump_says_what_a_model_was_given(store_path):
    asked(store_path, 3)
    with holdfast.open(store_path, readonly=True) as store:
        evidence = store.agent("trip-7", readonly=True)._evidence()
    assert evidence["effects"][0]["args"]["messages"].startswith("<1 item: 'You are a travel")


def test_what_no_checkpoint_has_is_not_made_up(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("trip-7")

        def work(agent):
            agent.state["m"] = [TEXT * 30]
            llm(agent.state["m"])
            agent.state["m"][0] = "another" * 300

        agent.run(work)
        (effect,) = agent.effects()
        assert effect.whole()["messages"].size == 1
        assert "You are" in repr(effect.whole()["messages"])


def test_parts_deep_in_the_arguments_and_short_ones(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("trip-7")
        agent.state["long"], agent.state["short"] = [TEXT] * 100, ["a", "b"]

        def work(agent):
            llm(({"history": agent.state["long"]}, agent.state["short"]), model="large")

        agent.run(work)
        (effect,) = agent.effects()
        (first, short), model = effect.args["messages"], effect.args["model"]
        assert (first["history"].size, list(short), model) == (100, ["a", "b"], "large")
        assert effect.whole()["messages"][0]["history"] == [TEXT] * 100
