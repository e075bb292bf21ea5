"""What an error says to do next works as it is printed, also for agents with spaces in their names."""

from __future__ import annotations

import re
import shlex
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from holdfast import errors
from holdfast.cli import main

NAME = "Ann's trip; to Lisbon"
CRASH = KeyboardInterrupt
PROGRAM = """
import holdfast

@holdfast.durable
def ask(agent):
    return agent.wait_for("approval")
"""


def commands(error: errors.HoldfastError) -> list[list[str]]:
    """The commands in its hint."""
    return [shlex.split(found)[1:] for found in re.findall(r"`(holdfast .+?)`", error.hint)]


def calls(error: errors.HoldfastError) -> list[str]:
    """The calls of the agent in its hint."""
    found = re.findall(r"agent\.\w+\([^.)]*(?:agent\.\w+)?\)", error.hint)
    return [call.replace("NAME", "'other'") for call in found]


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "asking.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "asking"
    sys.modules.pop("asking", None)


def test_a_run_that_waits_is_resumed_by_the_command_that_it_names(reopened, store_path, program, capsys):
    import asking

    with pytest.raises(errors.Waiting) as waiting:
        reopened().agent(NAME).run(asking.ask.options(wait=False))
    reopened().signal(NAME, waiting.value.signal, "yes")
    reopened().close()
    (words,) = commands(waiting.value)
    assert "PROGRAM" in words
    assert main(["--store", str(store_path), *(program if word == "PROGRAM" else word for word in words)]) == 0
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["resume", "cancel", "branch", "command"])
def test_each_way_out_of_an_unfinished_run_leads_out(reopened, store_path, way):
    stops = [CRASH()]

    @holdfast.durable
    def trip(agent):
        if stops:
            raise stops.pop()

    agent = reopened().agent(NAME)
    with pytest.raises(CRASH):
        agent.run(trip)
    with pytest.raises(errors.RunUnfinished) as unfinished:
        agent.checkpoint("no")
    if way == "command":
        reopened().close()
        (words,) = commands(unfinished.value)
        assert main(["--store", str(store_path), *words]) == 0
        agent = reopened().agent(NAME)
    else:
        (call,) = [one for one in calls(unfinished.value) if one.startswith(f"agent.{way}(")]
        made = eval(call, {"agent": agent})
        agent = made if way == "branch" else agent
    assert agent.checkpoint("yes").label == "yes"


def test_while_a_run_executes_one_can_work_on_a_branch_as_it_says(opened):
    agent = opened()
    found: list[object] = []

    def beside() -> None:
        try:
            agent.checkpoint("no")
        except errors.RunUnfinished as error:
            (call,) = calls(error)
            found.append(eval(call, {"agent": agent}).checkpoint("yes").label)

    @holdfast.durable
    def work(agent):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    agent.run(work)
    assert found == ["yes"]


def test_an_id_with_other_arguments_is_resumed_by_the_ways_that_it_names(opened):
    agent, stops = opened(), [CRASH()]

    @holdfast.durable
    def trip(agent, city):
        if stops:
            raise stops.pop()
        return city

    with pytest.raises(CRASH):
        agent.run(trip.options(id="7"), "Lisbon")
    with pytest.raises(errors.RunUnfinished) as other:
        agent.run(trip.options(id="7"), "Porto")
    (call,) = calls(other.value)
    assert eval(call, {"agent": agent}) == "Lisbon"


def test_a_run_that_a_hook_chose_is_resumed_by_the_ways_that_it_names(opened):
    agent, stops = opened(), [CRASH()]

    @holdfast.durable
    def plan_b(agent):
        if stops:
            raise stops.pop()
        return "by bus"

    @holdfast.durable
    def plan_a(agent):
        raise RuntimeError("no flights")

    with pytest.raises(CRASH):
        agent.run(plan_a.options(id="7", replan=lambda setback: plan_b))
    with pytest.raises(errors.RunUnfinished) as other:
        agent.run(plan_a.options(id="7"))
    (call,) = calls(other.value)
    assert eval(call, {"agent": agent}) == "by bus"


def test_a_parent_without_its_child_continues_by_the_commands_that_it_names(reopened, store_path):
    asks = ["whether it may"]

    @holdfast.durable
    def child(agent):
        return agent.wait_for("approval") if asks else "done"

    @holdfast.durable
    def parent(agent):
        return agent.spawn(child, "kid").join()

    with pytest.raises(errors.Waiting):
        reopened().agent(NAME).run(parent.options(id="one trip", wait=False))
    asks.clear()
    reopened().remove(f"{NAME}/kid")
    with pytest.raises(errors.InDoubt) as missing:
        reopened().agent(NAME).resume("one trip")
    reopened().close()
    for words in commands(missing.value):
        assert main(["--store", str(store_path), *words]) == 0
    assert reopened().agent(NAME).run(parent.options(id="another")) == "done"


def test_what_is_in_doubt_in_a_task_is_named_by_the_task(opened):
    @holdfast.tool
    def pay(euros):
        raise ConnectionError

    agent = opened()
    with agent, agent.task("invoice 7"), pytest.raises(errors.InDoubt, match="pay in the task invoice 7 "):
        pay(10)


def test_a_thread_in_a_durable_function_is_told_what_there_is_instead(opened):
    @holdfast.tool
    def book(city):
        return city

    @holdfast.durable
    def trip(agent):
        with ThreadPoolExecutor() as pool:
            return list(pool.map(book, ["Lisbon"]))

    with pytest.raises(errors.NoAgent, match=r"threads are begun by store\.map\(\.\.\.\) and agent\.spawn"):
        opened().run(trip)
