"""LangGraph's documented persistence features as programs: what they see must not depend on who keeps the checkpoints.

Each program runs with LangGraph's own InMemorySaver and SqliteSaver and with ours, called synchronously and
asynchronously, and once more with a restart wherever a process could end.
"""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.types import Command

from tests.contrib import graphs
from tests.contrib.graphs import Session

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


ONE = {"configurable": {"thread_id": "one"}}
TWO = {"configurable": {"thread_id": "two"}}


@program
def memory_across_turns(session: Session) -> None:
    session.use(graphs.chat)
    for number in range(3):
        session.invoke({"messages": [HumanMessage(f"turn {number}", id=f"turn-{number}")]}, ONE)
        session.restart()
    session.invoke({"messages": [HumanMessage("elsewhere", id="elsewhere")]}, TWO)
    session.state(ONE)
    session.history(ONE)
    session.history(TWO)
    assert len(session.state(ONE).values["messages"]) == 6


@program
def interrupt_and_resume(session: Session) -> None:
    ran: list[str] = []
    session.use(lambda saver: graphs.approval(saver, ran))
    session.invoke({"trail": ["begun"]}, ONE)
    session.state(ONE)
    session.restart()
    session.invoke(Command(resume="you"), ONE)
    session.restart()
    assert session.state(ONE).next == ("ask",)
    result = session.invoke(Command(resume="soon"), ONE)
    assert result["answer"] == "you soon"
    session.restart()
    session.history(ONE)
    session.note(ran)
    assert ran == ["ask", "ask", "ask", "act"]


@program
def static_interrupts(session: Session) -> None:
    session.use(lambda saver: graphs.line(saver, interrupt_before=["second"], interrupt_after=["second"]))
    session.invoke({"trail": ["begun"]}, ONE)
    assert session.state(ONE).next == ("second",)
    session.restart()
    session.invoke(None, ONE)
    assert session.state(ONE).next == ("third",)
    session.restart()
    session.invoke(None, ONE)
    session.history(ONE)


@program
def history_and_replay(session: Session) -> None:
    session.use(graphs.line)
    session.invoke({"trail": ["begun"]}, ONE)
    session.restart()
    past = session.history(ONE)
    assert len(past) == 5
    session.history(ONE, limit=2)
    session.history(ONE, before=past[1].config)
    session.history(ONE, filter={"source": "input"})
    session.history(ONE, filter={"step": 1, "source": "loop"})
    before_second = next(snapshot for snapshot in past if snapshot.next == ("second",))
    session.state(before_second.config)
    session.invoke(None, before_second.config)
    session.restart()
    session.history(ONE)
    session.state(ONE)
    session.state(before_second.config)


@program
def fork_of_the_past(session: Session) -> None:
    session.use(graphs.line)
    session.invoke({"trail": ["begun"]}, ONE)
    past = session.history(ONE)
    session.restart()
    before_third = next(snapshot for snapshot in past if snapshot.next == ("third",))
    forked = session.update(before_third.config, {"trail": ["forked"]})
    session.state(forked)
    session.restart()
    session.invoke(None, forked)
    session.state(ONE)
    session.restart()
    after = session.history(ONE)
    assert len(after) == len(past) + 2
    # the line that was left is still there, and can be gone on with
    session.invoke({"trail": ["again"]}, past[0].config)
    session.history(ONE)
    session.state(past[0].config)


@program
def state_updated_as_a_node(session: Session) -> None:
    session.use(graphs.line)
    session.update(ONE, {"trail": ["given"]}, as_node="first")
    session.restart()
    assert session.state(ONE).next == ("second",)
    session.update(ONE, {"trail": ["given too"]}, as_node="second")
    session.restart()
    session.invoke(None, ONE)
    session.update(ONE, None, as_node="__end__")
    session.state(ONE)
    session.history(ONE)


@program
def state_of_subgraphs(session: Session) -> None:
    ran: list[str] = []
    session.use(lambda saver: graphs.nested(saver, ran))
    session.invoke({"trail": ["begun"]}, ONE)
    session.restart()
    stopped = session.state(ONE, subgraphs=True)
    inner = stopped.tasks[0].state
    assert inner.values["trail"] == ["begun", "before", "prepared"]
    session.history(inner.config)
    session.restart()
    session.update(inner.config, {"trail": ["from outside"]})
    session.state(ONE, subgraphs=True)
    session.restart()
    session.invoke(Command(resume="yes"), ONE)
    session.state(ONE)
    session.history(ONE)
    session.note(ran)
    session.invoke({"trail": ["again"]}, ONE)
    session.restart()
    session.invoke(Command(resume="once more"), ONE)
    session.history(ONE)
    session.note(ran)


@program
def subgraph_with_a_memory_of_its_own(session: Session) -> None:
    ran: list[str] = []
    session.use(lambda saver: graphs.nested(saver, ran, inner_saver=True))
    for number in range(2):
        session.invoke({"trail": [f"turn {number}"]}, ONE)
        session.restart()
        stopped = session.state(ONE, subgraphs=True)
        session.history(stopped.tasks[0].state.config)
        session.invoke(Command(resume=number), ONE)
        session.restart()
    session.history(ONE)
    session.note(ran)


@program
def failed_branch_is_retried_alone(session: Session) -> None:
    ran: list[str] = []
    broken = [True]
    session.use(lambda saver: graphs.branches(saver, ran, broken))
    session.invoke({"trail": ["begun"]}, ONE)
    session.restart()
    failed = session.state(ONE)
    assert {task.name: task.error is None for task in failed.tasks} == {"good": True, "bad": False}
    session.invoke(None, ONE)
    session.restart()
    broken[0] = False
    session.invoke(None, ONE)
    assert ran.count("good") == 1
    assert ran.count("bad") == 3
    session.state(ONE)
    session.history(ONE)


@program
def join_of_branches(session: Session) -> None:
    """The channel in which a join waits is stored whenever one of its branches is done."""
    ran: list[str] = []
    session.use(lambda saver: graphs.branches(saver, ran, [False], barrier=True))
    for number in range(2):
        session.invoke({"trail": [f"turn {number}"]}, ONE, durability="sync")
        session.restart()
    session.history(ONE)
    past = session.history(ONE)
    joining = next(snapshot for snapshot in past if snapshot.next == ("join",))
    session.invoke(None, joining.config, durability="sync")
    session.update(joining.config, {"trail": ["given"]}, as_node="good")
    session.restart()
    session.history(ONE)


@program
def map_and_reduce(session: Session) -> None:
    ran: list[str] = []
    topics = [f"topic {number}" for number in range(12)]
    session.use(lambda saver: graphs.mapped(saver, ran, interrupt_before=["gather"]))
    session.invoke({"topics": topics}, ONE)
    session.restart()
    session.state(ONE)
    session.invoke(None, ONE)
    session.state(ONE)
    session.history(ONE)
    session.note(sorted(ran))
    past = session.history(ONE)
    sends = next(snapshot for snapshot in past if snapshot.next == ("write",) * 12)
    session.restart()
    session.invoke(None, sends.config)
    session.history(ONE)


@program
def functional_interface(session: Session) -> None:
    ran: list[str] = []
    session.use(lambda saver: graphs.essay(saver, ran))
    session.invoke(["cats", "dogs"], ONE)
    session.restart()
    session.state(ONE)
    result = session.invoke(Command(resume="good"), ONE)
    assert result == {"written": ["essay on cats", "essay on dogs"], "verdict": "good", "before": None}
    assert sorted(ran) == ["cats", "dogs"], "a finished task is not done again"
    session.restart()
    session.invoke(["owls"], ONE)
    result = session.invoke(Command(resume="fine"), ONE)
    assert result["before"] == 2
    session.history(ONE)


def durability(mode: str) -> None:
    @program
    def runs(session: Session) -> None:
        session.use(graphs.line)
        session.invoke({"trail": ["begun"]}, ONE, durability=mode)
        session.restart()
        session.invoke({"trail": ["again"]}, ONE, durability=mode)
        session.state(ONE)
        past = session.history(ONE)
        assert len(past) == (2 if mode == "exit" else 10)
        ran: list[str] = []
        broken = [True]
        session.use(lambda saver: graphs.branches(saver, ran, broken))
        session.invoke({"trail": ["begun"]}, TWO, durability=mode)
        session.restart()
        session.state(TWO)
        broken[0] = False
        session.invoke(None, TWO, durability=mode)
        session.history(TWO)
        session.use(lambda saver: graphs.nested(saver, ran))
        three = {"configurable": {"thread_id": "three"}}
        session.invoke({"trail": ["begun"]}, three, durability=mode)
        session.restart()
        session.state(three, subgraphs=True)
        session.invoke(Command(resume="yes"), three, durability=mode)
        session.history(three)
        session.note(ran)

    PROGRAMS[f"durability_{mode}"] = PROGRAMS.pop("runs")


for each in ("sync", "async", "exit"):
    durability(each)


@program
def delta_channels(session: Session) -> None:
    session.use(graphs.delta)
    for number in range(7):
        session.invoke({"items": [f"turn {number}"]}, ONE, durability=("sync", "async", "exit")[number % 3])
        session.restart()
        session.state(ONE)
    past = session.history(ONE)
    middle = past[len(past) // 2]
    session.restart()
    session.state(middle.config)
    forked = session.update(middle.config, {"items": ["forked"]}, as_node="count")
    session.state(forked)
    session.invoke({"items": ["after the fork"]}, forked)
    session.restart()
    session.state(ONE)
    session.invoke({"items": ["on the old line"]}, past[0].config)
    session.state(ONE)
    session.history(ONE)


@program
def removed_messages(session: Session) -> None:
    session.use(graphs.forgetful)
    for number in range(4):
        session.invoke({"messages": [HumanMessage(f"turn {number}", id=f"turn-{number}")]}, ONE)
        session.restart()
    assert [message.content for message in session.state(ONE).values["messages"]] == ["turn 3", "to turn 3"]
    session.update(ONE, {"messages": [AIMessage("corrected", id="re turn-3")]})
    session.restart()
    session.state(ONE)
    session.history(ONE)


@program
def pydantic_state(session: Session) -> None:
    session.use(graphs.travel)
    for _ in range(3):
        session.invoke({"note": "n"}, ONE)
        session.restart()
    stops = session.state(ONE).values["stops"]
    assert stops[2] == graphs.Place(name="stop 2", at=(2, 0.5))
    session.history(ONE)


@program
def dataclass_state(session: Session) -> None:
    session.use(graphs.game)
    for number in range(3):
        session.invoke({"round": number * 10}, ONE)
        session.restart()
    assert session.state(ONE).values["scores"][1] == graphs.Score("player 1", 10)
    session.history(ONE)


def run(name: str, kind: str, path, *, asynchronous: bool, restarts: bool = False) -> list:
    path.mkdir(exist_ok=True)
    with Session(kind, path, asynchronous=asynchronous, restarts=restarts) as session:
        PROGRAMS[name](session)
        return session.notes


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_program_sees_what_it_sees_with_the_official_savers(name, asynchronous, tmp_path):
    expected = run(name, "memory", tmp_path / "m", asynchronous=asynchronous)
    assert run(name, "sqlite", tmp_path / "q", asynchronous=asynchronous, restarts=True) == expected
    assert run(name, "holdfast", tmp_path / "h", asynchronous=asynchronous) == expected
    assert run(name, "holdfast", tmp_path / "r", asynchronous=asynchronous, restarts=True) == expected
