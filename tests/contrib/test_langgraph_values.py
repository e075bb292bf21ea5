"""What may be put into a thread and what threads and namespaces may be called, as the saver's callers see it."""

from __future__ import annotations

import enum
import uuid
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Interrupt, Send
from pydantic import BaseModel

from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import Unencodable
from tests.contrib.threads import META, chain, checkpoint, config, everything, id_of, ids


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    tags: set


class Model(BaseModel):
    when: datetime
    parts: tuple[int, ...]


EXACT = {
    "set of tuples": {(1, "a"), (2, "b")},
    "frozenset": frozenset({1, (2, 3)}),
    "tuple": (1, [2, (3,)], {"k": (4,)}),
    "tuple keys": {(1, 2): "x", 3: "y", None: "z", True: "t"},
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"abc"),
    "numbers": [1, 1.0, True, -0.0, 2**200, 1e300, complex(1, 2)],
    "decimal": Decimal("1.10"),
    "moment": datetime(2026, 5, 1, 9, 30, tzinfo=UTC),
    "uuid": uuid.UUID(int=7),
    "deque": deque([1, 2], maxlen=5),
    "ordered": OrderedDict(b=1, a=2),
    "colour": Colour.RED,
    "point": Point(1, {("deep", 1)}),
    "model": Model(when=datetime(2026, 1, 1, tzinfo=UTC), parts=(1, 2)),
    "surrogate": "\ud800 text \x00",
    "document": Document(page_content="text", metadata={"pages": (1, 2)}, id="d"),
    "messages": [
        HumanMessage([{"type": "text", "text": "hi"}, {"type": "image", "url": "u"}], id="1", name="me"),
        AIMessage(
            "text",
            id="2",
            tool_calls=[{"name": "f", "args": {"x": 1}, "id": "c", "type": "tool_call"}],
            usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
            response_metadata={"set": {1, 2}},
        ),
        AIMessageChunk("part", id="3"),
        SystemMessage("system", id="4"),
        ToolMessage("result", tool_call_id="c", id="5", artifact={"raw": (1, 2)}, status="error"),
        ChatMessage("other", role="critic", id="6"),
        FunctionMessage("result", name="f", id="7"),
        RemoveMessage(id="8"),
    ],
    "control": [
        Send("node", {"x": (1,)}),
        Command(update={"a": {1}}, goto=["b", Send("c", 1)], resume={"i": 2}),
        Interrupt(value={"q": (1,)}, id="0" * 32),
    ],
}


def exact(found, expected, path: str = "value") -> None:
    """Equal, and of the same types all the way down."""
    assert type(found) is type(expected), f"{path}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        assert [type(key) for key in found] == [type(key) for key in expected], path
        for key, value in expected.items():
            exact(found[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            exact(one, other, f"{path}[{number}]")
    elif isinstance(expected, BaseModel):
        assert found == expected, path
        assert found.model_fields_set == expected.model_fields_set, path
        for name in type(expected).model_fields:
            exact(getattr(found, name), getattr(expected, name), f"{path}.{name}")
    else:
        assert found == expected, path
        assert repr(found) == repr(expected) or isinstance(expected, (set, frozenset)), path


@pytest.mark.parametrize("name", list(EXACT))
def test_values_come_back_exact(store_path, name):
    """Also those that LangGraph's own serializer flattens: in channels, in metadata-free writes, after a restart."""
    value = EXACT[name]
    types = [Colour, Point, Model]
    with HoldfastSaver(store_path, types=types) as saver:
        at = saver.put(config("t"), checkpoint({"v": value, "in": {"deep": [value]}}), META, {})
        saver.put_writes(at, [("v", value)], "task")
        after = saver.put(at, checkpoint({"v": value, "more": 1}), META, {})
    with HoldfastSaver(store_path, types=types) as saver:
        for place in (at, after):
            exact(saver.get_tuple(place).checkpoint["channel_values"]["v"], value)
        exact(saver.get_tuple(at).checkpoint["channel_values"]["in"]["deep"][0], value)
        exact(saver.get_tuple(at).pending_writes[0][2], value)
        for found in saver.list(config("t")):
            exact(found.checkpoint["channel_values"]["v"], value)


def test_arrays_come_back(ours):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    at = ours.put(config("t"), checkpoint({"v": array}), META, {})
    found = ours.get_tuple(at).checkpoint["channel_values"]["v"]
    assert found.dtype == array.dtype
    assert (found == array).all()


class Stranger:
    def __init__(self) -> None:
        self.x = 1


def test_a_type_nobody_allowed_is_refused_with_its_place(ours):
    made = chain(ours, "t", 2)
    before = everything(ours, "t")
    with pytest.raises(Unencodable) as caught:
        ours.put(made[-1], checkpoint({"fine": 1, "odd": {"deep": [Stranger()]}}), META, {})
    assert "Stranger" in str(caught.value)
    assert "odd" in str(caught.value)
    with pytest.raises(Unencodable):
        ours.put_writes(made[-1], [("c", Stranger())], "task")
    assert everything(ours, "t") == before, "nothing of a refused checkpoint is stored"
    after = ours.put(made[-1], checkpoint({"messages": ["goes on"]}), META, {})
    assert ours.get_tuple(after).checkpoint["channel_values"] == {"messages": ["goes on"]}


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thread", [17, uuid.UUID(int=3), "with spaces / and: colons", "at@sign@main", "main", "é\U0001f600", "x" * 300]
)
def test_thread_ids_of_all_kinds(ours, thread):
    made = chain(ours, thread, 3)
    assert ids(ours.list(config(thread))) == [id_of(at) for at in reversed(made)]
    assert ours.get_tuple(config(str(thread))).checkpoint["id"] == id_of(made[-1])
    assert ours.get_tuple(made[0]).checkpoint["channel_values"]["number"] == 0
    ours.put_writes(made[-1], [("c", 1)], "task")
    ours.copy_thread(thread, "copy")
    assert ours.get_tuple(config("copy")).pending_writes == [("task", "c", 1)]
    ours.prune([thread, "copy"])
    assert len(everything(ours, thread)) == 1
    ours.delete_thread(thread)
    assert ours.get_tuple(config(thread)) is None
    assert len(everything(ours, "copy")) == 1


ODD_NAMESPACES = [
    "main",
    "ns-main",
    "child:1|grandchild:2",
    "with space ",
    " ",
    "at@sign",
    "ns-0123456789abcdef",
    "x" * 2_000,
    "x" * 2_001,
    "é|\U0001f600",
    "a\nb",
    "a\x00b",
]


def test_namespaces_of_all_kinds_are_kept_apart(ours):
    made = {ns: chain(ours, "t", 2, ns=ns) for ns in ["", *ODD_NAMESPACES]}
    for ns, places in made.items():
        ours.put_writes(places[0], [("c", ns)], "task")
    for ns, places in made.items():
        assert ids(ours.list(config("t", ns))) == [id_of(at) for at in reversed(places)], ns[:40]
        found = ours.get_tuple(config("t", ns))
        assert found.config["configurable"]["checkpoint_ns"] == ns
        assert found.checkpoint["channel_values"]["messages"] == [f"t {ns} 0", f"t {ns} 1"]
        assert ours.get_tuple(places[0]).pending_writes == [("task", "c", ns)]
    assert len(everything(ours, "t")) == 2 * len(made)


def test_two_answers_have_nothing_in_common_whatever_a_program_keeps_of_them(ours):
    """A message, one of its tool calls, or nothing: what is kept stays as it is, and is in no later answer."""

    def model(state):
        number = len(state["messages"])
        call = {"name": "look", "args": {"at": [number]}, "id": f"c{number}", "type": "tool_call"}
        return {"messages": [AIMessage(f"answer {number}", id=f"a{number}", tool_calls=[call])]}

    builder = StateGraph(MessagesState).add_node("model", model).add_edge(START, "model")
    graph = builder.compile(checkpointer=ours)
    kept, said = [], []
    for turn in range(12):
        answer = graph.invoke(
            {"messages": [HumanMessage(f"turn {turn}", id=f"q{turn}")]}, config("t"), durability="sync"
        )
        messages = answer["messages"]
        said += [f"turn {turn}", f"answer {2 * turn + 1}"]
        assert [message.content for message in messages] == said
        assert [message.tool_calls[0]["args"] for message in messages[1::2]] == [
            {"at": [n]} for n in range(1, 2 * turn + 2, 2)
        ]
        kept.append((messages[1], messages[-1].tool_calls, vars(messages[0]))[turn % 3])
        if turn % 4 == 1:
            messages[0].content = "mine"
            messages[1].tool_calls[0]["args"]["at"].append("mine")
    assert len({id(one) for one in kept}) == len(kept)
