"""What the tests of the LangGraph saver share: graphs, savers that can be opened again, and what is compared.

The graphs are those of LangGraph's own pages on persistence, without models and without chance: whoever keeps the
checkpoints, the same program must see the same things.
"""

from __future__ import annotations

import asyncio
import operator
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict

import aiosqlite
from langchain_core.messages import AIMessage, RemoveMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.pregel._loop import PregelLoop
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel

# -- graphs -----------------------------------------------------------------------------------------------------


class Trail(TypedDict, total=False):
    """Where a run has been."""

    trail: Annotated[list[str], operator.add]
    answer: str


def chat(saver: Any) -> Any:
    """One reply for each question, saying how many messages it saw."""

    def reply(state: MessagesState) -> dict[str, Any]:
        seen = len(state["messages"])
        return {"messages": [AIMessage(f"seen {seen}", id=f"reply-{seen}")]}

    return StateGraph(MessagesState).add_node(reply).add_edge(START, "reply").compile(checkpointer=saver)


def forgetful(saver: Any) -> Any:
    """As chat, and keeps only the last two messages."""

    def reply(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"to {state['messages'][-1].content}", id=f"re {state['messages'][-1].id}")]}

    def trim(state: MessagesState) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id=str(message.id)) for message in state["messages"][:-2]]}

    builder = StateGraph(MessagesState).add_node(reply).add_node(trim)
    return builder.add_edge(START, "reply").add_edge("reply", "trim").compile(checkpointer=saver)


def line(saver: Any, **options: Any) -> Any:
    """Three nodes, one after the other."""
    builder = StateGraph(Trail)
    names = ["first", "second", "third"]
    for before, name in zip([START, *names], names, strict=False):
        builder.add_node(name, lambda state, name=name: {"trail": [f"{name} {len(state.get('trail', []))}"]})
        builder.add_edge(before, name)
    return builder.compile(checkpointer=saver, **options)


def approval(saver: Any, ran: list[str]) -> Any:
    """Asks two things in one node, then acts."""

    def ask(state: Trail) -> dict[str, Any]:
        ran.append("ask")
        who = interrupt({"question": "who?", "trail": state["trail"]})
        how = interrupt("how?")
        return {"answer": f"{who} {how}", "trail": ["asked"]}

    def act(state: Trail) -> dict[str, Any]:
        ran.append("act")
        return {"trail": [f"acted on {state['answer']}"]}

    builder = StateGraph(Trail).add_node(ask).add_node(act)
    return builder.add_edge(START, "ask").add_edge("ask", "act").compile(checkpointer=saver)


def nested(saver: Any, ran: list[str], *, inner_saver: bool | None = None) -> Any:
    """A graph inside a node, with an interrupt in its middle."""

    def prepare(state: Trail) -> dict[str, Any]:
        ran.append("prepare")
        return {"trail": ["prepared"]}

    def ask(state: Trail) -> dict[str, Any]:
        ran.append("ask")
        return {"trail": [f"told {interrupt('inside?')}"], "answer": "inner"}

    inner = StateGraph(Trail).add_node(prepare).add_node(ask)
    inner.add_edge(START, "prepare").add_edge("prepare", "ask")
    outer = StateGraph(Trail).add_node("before", lambda _: {"trail": ["before"]})
    outer.add_node("inside", inner.compile(checkpointer=inner_saver)).add_node("after", lambda _: {"trail": ["after"]})
    outer.add_edge(START, "before").add_edge("before", "inside").add_edge("inside", "after")
    return outer.compile(checkpointer=saver)


class Refused(Exception):
    """What a node raises when it is told to."""


HANG_S = 180
_good_taken = threading.Event()
"""LangGraph has taken what the node ``good`` wrote. Until then a failure elsewhere may lose it."""
_put_writes = PregelLoop.put_writes


def _putting_writes(self: Any, task_id: str, writes: Any, **options: Any) -> None:
    _put_writes(self, task_id, writes, **options)
    if any(channel == "trail" and value == ["good"] for channel, value in writes):
        _good_taken.set()


PregelLoop.put_writes = _putting_writes  # type: ignore[method-assign]


def branches(saver: Any, ran: list[str], broken: list[bool], *, barrier: bool = False) -> Any:
    """Two nodes at once, of which the second fails as long as ``broken`` says so.

    With ``barrier`` the join waits for both in a channel of its own. LangGraph changes that channel's value in place,
    so it is stored as it was only where the run waits for its checkpoints (durability="sync"), whoever keeps them.
    """

    _good_taken.clear()

    def good(state: Trail) -> dict[str, Any]:
        ran.append("good")
        return {"trail": ["good"]}

    def bad(state: Trail) -> dict[str, Any]:
        if broken[0] and "bad" not in ran:
            _good_taken.wait(HANG_S)  # which of the two is faster is nobody's business
        ran.append("bad")
        if broken[0]:
            raise Refused("not now")
        return {"trail": ["bad"]}

    def join(state: Trail) -> dict[str, Any]:
        ran.append("join")
        return {"trail": [f"joined {len(state['trail'])}"]}

    builder = StateGraph(Trail).add_node(good).add_node(bad).add_node(join)
    builder.add_edge(START, "good").add_edge(START, "bad")
    if barrier:
        builder.add_edge(["good", "bad"], "join")
    else:
        builder.add_edge("good", "join").add_edge("bad", "join")
    return builder.compile(checkpointer=saver)


class Work(TypedDict, total=False):
    """Topics, and what came of each."""

    topics: list[str]
    results: Annotated[list[str], operator.add]
    done: str


def mapped(saver: Any, ran: list[str], **options: Any) -> Any:
    """One task for each topic, and one that gathers."""

    def share(state: Work) -> list[Send]:
        return [Send("write", {"topic": topic}) for topic in state["topics"]]

    def write(state: dict[str, str]) -> dict[str, Any]:
        ran.append(state["topic"])
        return {"results": [f"on {state['topic']}"]}

    def gather(state: Work) -> Command[Any]:
        return Command(update={"done": ", ".join(state["results"])}, goto=END)

    builder = StateGraph(Work).add_node("plan", lambda _: {}).add_node("write", write).add_node("gather", gather)
    builder.add_edge(START, "plan").add_conditional_edges("plan", share, ["write"]).add_edge("write", "gather")
    return builder.compile(checkpointer=saver, **options)


def essay(saver: Any, ran: list[str]) -> Any:
    """The functional interface: tasks whose results are kept, an interrupt, and the value of the run before."""

    @task
    def write(topic: str) -> str:
        ran.append(topic)
        return f"essay on {topic}"

    @entrypoint(checkpointer=saver)
    def review(topics: list[str], *, previous: Any = None) -> Any:
        written = [future.result() for future in [write(topic) for topic in topics]]
        verdict = interrupt({"written": written})
        total = (previous or 0) + len(written)
        return entrypoint.final(value={"written": written, "verdict": verdict, "before": previous}, save=total)

    return review


def _concatenate(held: list[Any], batches: Sequence[Any]) -> list[Any]:
    return [*held, *(item for batch in batches for item in batch)]


class Deltas(TypedDict, total=False):
    """A channel that is stored as what was written to it, and one that is stored whole."""

    items: Annotated[list[Any], DeltaChannel(_concatenate, snapshot_frequency=4)]
    count: int


def delta(saver: Any) -> Any:
    """Two parallel writers of a delta channel, then one that counts."""
    builder = StateGraph(Deltas)
    builder.add_node("left", lambda state: {"items": [f"left {len(state['items'])}"]})
    builder.add_node("right", lambda state: {"items": [f"right {len(state['items'])}"]})
    builder.add_node("count", lambda state: {"count": len(state["items"])})
    builder.add_edge(START, "left").add_edge(START, "right").add_edge("left", "count").add_edge("right", "count")
    return builder.compile(checkpointer=saver)


class Place(BaseModel):
    """A pydantic model inside a state."""

    name: str
    at: tuple[float, float] = (0.0, 0.0)


class Trip(BaseModel):
    """A state that is a pydantic model."""

    stops: Annotated[list[Place], operator.add] = []
    note: str = ""


@dataclass
class Score:
    """A dataclass inside a state."""

    name: str
    points: int = 0


@dataclass
class Game:
    """A state that is a dataclass."""

    scores: Annotated[list[Score], operator.add] = field(default_factory=list)
    round: int = 0


TYPES = (Place, Trip, Score, Game)


def travel(saver: Any) -> Any:
    def go(state: Trip) -> dict[str, Any]:
        number = len(state.stops)
        return {"stops": [Place(name=f"stop {number}", at=(number, 0.5))], "note": f"{state.note}+"}

    return StateGraph(Trip).add_node(go).add_edge(START, "go").compile(checkpointer=saver)


def game(saver: Any) -> Any:
    def play(state: Game) -> dict[str, Any]:
        return {"scores": [Score(f"player {len(state.scores)}", state.round)], "round": state.round + 1}

    return StateGraph(Game).add_node(play).add_edge(START, "play").compile(checkpointer=saver)


# -- savers, and programs that use them -------------------------------------------------------------------------


class Session:
    """A program's saver and graph, in one way of calling: everything that the program sees is noted.

    ``use`` compiles a graph. ``restart`` closes the saver and opens another on the same files, where the session is
    one that restarts and its saver has files; a program calls it wherever a process could end.
    """

    def __init__(self, kind: str, path: Path, *, asynchronous: bool = False, restarts: bool = False) -> None:
        self._kind, self._path = kind, path
        self._asynchronous, self._restarts = asynchronous, restarts and kind != "memory"
        self._runner = asyncio.Runner()
        self._make: Callable[[Any], Any] | None = None
        self.notes: list[Any] = []
        self.saver: Any = None
        self.graph: Any = None
        self._connection: Any = None
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._runner.close()

    def _open(self) -> None:
        if self._kind == "memory":
            self.saver = InMemorySaver()
        elif self._kind == "sqlite" and self._asynchronous:
            self._connection = self._run(_connect(self._path / "async.sqlite"))
            self.saver = self._run(_async_sqlite(self._connection))
        elif self._kind == "sqlite":
            self._connection = sqlite3.connect(self._path / "sync.sqlite", check_same_thread=False)
            self._connection.execute("PRAGMA synchronous=OFF")  # it is here for its answers
            self.saver = SqliteSaver(self._connection)
        else:
            from holdfast.contrib.langgraph import HoldfastSaver

            self.saver = HoldfastSaver(self._path / "store", types=TYPES)

    def _close(self) -> None:
        if self._kind == "sqlite":
            closing = self._connection.close()
            if self._asynchronous:
                self._run(closing)
        elif self._kind == "holdfast":
            self.saver.close()

    def _run(self, coroutine: Any) -> Any:
        return self._runner.run(coroutine)

    def use(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self.graph = make(self.saver)

    def restart(self) -> None:
        if self._restarts:
            self._close()
            self._open()
            if self._make is not None:
                self.graph = self._make(self.saver)

    # -- what a program does --------------------------------------------------------------------------------

    def invoke(self, value: Any, config: Any, **options: Any) -> Any:
        """Run the graph, and note what came of it: values, the questions it stopped at, or the error."""
        try:
            if self._asynchronous:
                result = self._run(self.graph.ainvoke(value, config, **options))
            else:
                result = self.graph.invoke(value, config, **options)
        except Refused as error:
            self.notes.append(("refused", str(error)))
            return None
        self.notes.append(("result", _told(result)))
        return result

    def state(self, config: Any, **options: Any) -> Any:
        if self._asynchronous:
            found = self._run(self.graph.aget_state(config, **options))
        else:
            found = self.graph.get_state(config, **options)
        self.notes.append(("state", seen(found)))
        return found

    def history(self, config: Any, **options: Any) -> list[Any]:
        if self._asynchronous:
            found = self._run(_gather(self.graph.aget_state_history(config, **options)))
        else:
            found = list(self.graph.get_state_history(config, **options))
        self.notes.append(("history", [seen(snapshot) for snapshot in found], _shape(found)))
        return found

    def update(self, config: Any, values: Any, as_node: str | None = None) -> Any:
        if self._asynchronous:
            return self._run(self.graph.aupdate_state(config, values, as_node=as_node))
        return self.graph.update_state(config, values, as_node=as_node)

    def note(self, *things: Any) -> None:
        self.notes.append(things)


async def _connect(path: Path) -> Any:
    connection = await aiosqlite.connect(path)
    await connection.execute("PRAGMA synchronous=OFF")
    return connection


async def _async_sqlite(connection: Any) -> Any:
    return AsyncSqliteSaver(connection)


async def _gather(stream: Any) -> list[Any]:
    return [item async for item in stream]


def seen(snapshot: Any) -> dict[str, Any]:
    """What a snapshot says, without the ids that differ from run to run."""
    metadata = snapshot.metadata or {}
    return {
        "values": _told(snapshot.values),
        "next": snapshot.next,
        "step": metadata.get("step"),
        "source": metadata.get("source"),
        "tasks": [
            (
                one.name,
                "not now" in str(one.error) if one.error else None,  # the official savers keep its repr, ours more
                [stop.value for stop in one.interrupts],
                seen(one.state) if hasattr(one.state, "values") and hasattr(one.state, "tasks") else None,
                _told(one.result),
            )
            for one in snapshot.tasks
        ],
        "parent": snapshot.parent_config is not None,
        "interrupts": [stop.value for stop in snapshot.interrupts],
    }


def _shape(snapshots: Sequence[Any]) -> list[int | None]:
    """Which of the listed checkpoints each one grew from, by position."""
    place = {_id(snapshot.config): number for number, snapshot in enumerate(snapshots)}
    return [place.get(_id(one.parent_config)) if one.parent_config else None for one in snapshots]


def _id(config: Any) -> str:
    return str(config["configurable"]["checkpoint_id"])


def _told(result: Any) -> Any:
    """A result, with interrupts as what they ask: their ids are new in every run."""
    if isinstance(result, dict) and "__interrupt__" in result:
        return {**result, "__interrupt__": [stop.value for stop in result["__interrupt__"]]}
    return result
