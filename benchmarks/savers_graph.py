"""What is run: two graphs of a model and its tools, driven by a script. No network, no clock, no chance at run time.

Owns the scripts and both graphs, and knows what state must stand at the end, so that every saver is held to it. Knows
no saver. What always holds: the same seed gives the same messages and ids, whoever keeps them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import _messages_delta_reducer, add_messages
from material import RECORD_BYTES, realistic, records

REPLY_BYTES = 700
RESULT_BYTES = 4_000
TURN_BYTES = REPLY_BYTES + RESULT_BYTES
DOCUMENT_BYTES = 50_000
CHANGED = 0.01
SNAPSHOT_FREQUENCY = 50
"""The rival's setting, named in the target: a whole value every so many updates, and only the writes in between."""

Content = str | list[str | dict[Any, Any]]
State = dict[str, Any]
Builder = StateGraph[Any, Any, Any, Any]


def steps_of(turns: int) -> int:
    """Nodes that run: the model and its tools in each turn, and the model once more, to say that it is done."""
    return 2 * turns + 1


def write_script(path: Path, workload: str, material: str, turns: int, rng: random.Random) -> None:
    """Everything that the nodes will say, made once and read by each process before its clock starts."""
    made: Any
    if workload == "W2":
        count = DOCUMENT_BYTES // RECORD_BYTES
        changed = max(1, round(count * CHANGED))
        made = {
            "records": records(count, rng),
            "changes": [
                [(at, rng.random()) for at in rng.sample(range(count), changed)] for _ in range(steps_of(turns))
            ],
        }
    else:
        made = [list(turn) for turn in islice(_turns(material, rng), turns)]
    path.write_bytes(msgspec.msgpack.encode(made))


def _turns(material: str, rng: random.Random) -> Iterator[tuple[str | bytes, str | bytes]]:
    if material == "random":
        while True:
            yield rng.randbytes(REPLY_BYTES), rng.randbytes(RESULT_BYTES)
    said: dict[str, list[str]] = {"assistant": [], "tool": []}
    for message in realistic(rng):
        heap = said.get(message["role"])
        if heap is None:
            continue
        heap.append(message["content"])
        if said["assistant"] and len(said["tool"]) > RESULT_BYTES // 900:
            result = "\n".join(said["tool"])[:RESULT_BYTES]
            yield said["assistant"][-1][:REPLY_BYTES], result
            said = {"assistant": [], "tool": []}


def _content(said: str | bytes) -> Content:
    """Text as text. Bytes go into a content block: as text they would need an encoding that compresses again."""
    return said if isinstance(said, str) else [{"type": "bytes", "data": said}]


def _merge(held: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    return {**held, **changed}


def _merge_all(held: dict[str, Any], changes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged = dict(held)
    for changed in changes:
        merged.update(changed)
    return merged


class Messages(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class DeltaMessages(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer, snapshot_frequency=SNAPSHOT_FREQUENCY)]


class Book(TypedDict):
    document: Annotated[dict[str, Any], _merge]
    step: int


class DeltaBook(TypedDict):
    document: Annotated[dict[str, Any], DeltaChannel(_merge_all, snapshot_frequency=SNAPSHOT_FREQUENCY)]
    step: int


class Conversation:
    """W1: a reply with a tool call, a tool result, and so on; the state is the list of all messages."""

    def __init__(self, script: Path, turns: int) -> None:
        self.turns = turns
        self._script = msgspec.msgpack.decode(script.read_bytes())[:turns]
        if len(self._script) < turns:
            raise ValueError(f"{script} has only {len(self._script)} turns")

    @property
    def first(self) -> State:
        return {"messages": [HumanMessage("Find what I asked for.", id="question")]}

    def _reply(self, turn: int) -> AIMessage:
        if turn == self.turns:
            return AIMessage("That is all.", id="end")
        call = {"name": "search", "args": {"query": f"part {turn}", "limit": 20}, "id": f"call-{turn}"}
        return AIMessage(_content(self._script[turn][0]), id=f"reply-{turn}", tool_calls=[call])

    def _result(self, turn: int) -> ToolMessage:
        return ToolMessage(_content(self._script[turn][1]), id=f"result-{turn}", tool_call_id=f"call-{turn}")

    def graph(self, *, delta: bool) -> Builder:
        def model(state: State) -> State:
            return {"messages": [self._reply(len(state["messages"]) // 2)]}

        def tools(state: State) -> State:
            return {"messages": [self._result(len(state["messages"]) // 2 - 1)]}

        return _loop(
            DeltaMessages if delta else Messages, model, tools, lambda state: bool(state["messages"][-1].tool_calls)
        )

    def read(self, values: State) -> int:
        """Look at every message, so that nothing stays unread behind a lazy container."""
        return sum(len(message.content) for message in values["messages"])

    def check(self, values: State, back: int = 0) -> None:
        """``values`` is the state ``back`` checkpoints before the last one, message by message; else ValueError."""
        expected: list[Any] = list(self.first["messages"])
        for turn in range(self.turns):
            expected += (self._reply(turn), self._result(turn))
        expected.append(self._reply(self.turns))
        expected = expected[: len(expected) - back]
        found = values.get("messages", [])
        if list(found) != expected:
            same = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
            raise ValueError(f"{len(found)} messages for {len(expected)}; the first that differs: {same}")


class Ledger:
    """W2: the same loop over a document of 50 KB in small records, of which each node changes 1%, scattered."""

    def __init__(self, script: Path, turns: int) -> None:
        self.turns = turns
        made = msgspec.msgpack.decode(script.read_bytes())
        self._records = made["records"]
        self._changes = made["changes"][: steps_of(turns)]
        if len(self._changes) < steps_of(turns):
            raise ValueError(f"{script} has only {len(self._changes)} steps")

    @property
    def first(self) -> State:
        return {"document": {str(record["id"]): dict(record) for record in self._records}, "step": 0}

    def _changed(self, document: dict[str, Any], step: int) -> dict[str, Any]:
        return {str(at): {**document[str(at)], "score": score} for at, score in self._changes[step]}

    def graph(self, *, delta: bool) -> Builder:
        def work(state: State) -> State:
            step = state["step"]
            return {"document": self._changed(state["document"], step), "step": step + 1}

        return _loop(DeltaBook if delta else Book, work, work, lambda state: state["step"] < len(self._changes))

    def read(self, values: State) -> int:
        return sum(len(record) for record in values["document"].values())

    def check(self, values: State, back: int = 0) -> None:
        expected = self.first["document"]
        last = len(self._changes) - back
        for step in range(last):
            expected.update(self._changed(expected, step))
        if values.get("step") != last or values["document"] != expected:
            raise ValueError(f"the document after step {values.get('step')} is not what step {last} must give")


def _loop(schema: Any, model: Callable[[State], State], tools: Callable[[State], State], more: Any) -> Builder:
    builder: Any = StateGraph(schema)
    builder.add_node("model", model)
    builder.add_node("tools", tools)
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", lambda state: "tools" if more(state) else END, ["tools", END])
    builder.add_edge("tools", "model")
    graph: Builder = builder
    return graph


Workload = Conversation | Ledger
WORKLOADS: dict[str, type[Workload]] = {"W1": Conversation, "W2": Ledger}
