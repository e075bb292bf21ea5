"""Values that LangGraph threads hold, with what LangGraph's own serializer makes of each."""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import json
import math
import pathlib
import re
import uuid
import zoneinfo
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import numpy as np
import pydantic.v1
from langchain_core import messages as lc
from langchain_core.agents import AgentAction, AgentFinish
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.outputs import ChatGeneration
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue
from langchain_core.runnables import AddableDict
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.errors import GraphRecursionError, NodeTimeoutError
from langgraph.func import entrypoint
from langgraph.store.base import Item, SearchItem
from langgraph.types import Command, Interrupt, Overwrite, PregelTask, Send, StateSnapshot, TimeoutPolicy
from pydantic import BaseModel, ConfigDict, HttpUrl, PrivateAttr, RootModel, SecretStr, field_validator

EXACT, INEXACT, REFUSED = "exact", "inexact", "refused"
"""What LangGraph's JsonPlusSerializer gives for a value: itself, something else, or an error."""


class Mood(enum.Enum):
    CALM = "calm"
    HURRIED = ("hurried", 2)


class Rank(enum.IntEnum):
    LOW = 1
    HIGH = 9


class Colour(enum.StrEnum):
    RED = "red"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: tuple[int, ...] = ()


@dataclass
class Leg:
    start: str
    mood: Mood = Mood.CALM
    notes: list[Any] = field(default_factory=list)
    length: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Pair:
    left: Any
    right: Any


@attrs.define
class Guest:
    name: str
    tags: set[str] = attrs.Factory(set)


class Trip(BaseModel):
    name: str
    legs: list[Leg] = []
    pair: tuple[int, str] | None = None
    site: HttpUrl | None = None


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    kind: str = "loose"
    _seen: int = PrivateAttr(default=0)


class Strict(BaseModel):
    amount: int
    when: dt.datetime | None = None

    @field_validator("amount")
    @classmethod
    def _double(cls, value: int) -> int:
        return value * 2


class Names(RootModel[list[str]]):
    pass


class Old(pydantic.v1.BaseModel):
    zeal: int = 1
    age: str = "old"
    _secret: int = pydantic.v1.PrivateAttr(7)


class Refused(Exception):
    """Its arguments are not those of its constructor, which breaks unpickling."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


def loose() -> Loose:
    value = Loose(colour="red", size=(1, 2))
    value._seen = 5
    return value


def noted() -> ValueError:
    error = ValueError("bad", 3, ("x",))
    error.add_note("while testing")
    error.__cause__ = KeyError("inner")
    return error


TYPES = [Mood, Rank, Colour, Right, Point, Leg, Pair, Guest, Trip, Loose, Strict, Names, Old]

_AI: dict[str, Any] = {
    "content": [{"type": "text", "text": "hello"}, "plain"],
    "id": "run-1",
    "tool_calls": [{"name": "search", "args": {"q": "x", "n": 3}, "id": "call-1", "type": "tool_call"}],
    "invalid_tool_calls": [],
    "usage_metadata": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
    "response_metadata": {"model": "m", "logprobs": None},
}
_UTC = dt.UTC
_LISBON = zoneinfo.ZoneInfo("Europe/Lisbon")
_NOW = dt.datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=_UTC)
_CONFIG: Any = {"configurable": {"thread_id": "1"}}

VALUES: dict[str, tuple[Any, str]] = {
    # -- messages and LangChain's other models
    "human": (lc.HumanMessage("hi", id="h", name="ann", additional_kwargs={"a": [1, {"b": 2}]}), INEXACT),
    "human-minimal": (lc.HumanMessage("hi"), INEXACT),
    "human-extra": (lc.HumanMessage("hi", custom=(1, 2)), INEXACT),
    "ai": (lc.AIMessage(**_AI), INEXACT),
    "ai-minimal": (lc.AIMessage("yes"), INEXACT),
    "ai-invalid-call": (
        lc.AIMessage("", invalid_tool_calls=[lc.InvalidToolCall(name="f", args="{", id="1", error="bad")]),
        INEXACT,
    ),
    "ai-chunk": (lc.AIMessageChunk(**_AI), INEXACT),
    "system": (lc.SystemMessage("be kind"), INEXACT),
    "system-chunk": (lc.SystemMessageChunk("be"), INEXACT),
    "tool": (lc.ToolMessage("42", tool_call_id="call-1", artifact={"raw": (1, b"x")}, status="error"), INEXACT),
    "tool-chunk": (lc.ToolMessageChunk("4", tool_call_id="call-1"), INEXACT),
    "function": (lc.FunctionMessage("1", name="f"), INEXACT),
    "function-chunk": (lc.FunctionMessageChunk("1", name="f"), INEXACT),
    "chat": (lc.ChatMessage("1", role="judge"), INEXACT),
    "chat-chunk": (lc.ChatMessageChunk("1", role="judge"), INEXACT),
    "human-chunk": (lc.HumanMessageChunk("h"), INEXACT),
    "remove": (lc.RemoveMessage("h"), INEXACT),
    "message-text": (lc.HumanMessage("some text").text, INEXACT),
    "messages": ([lc.HumanMessage("q"), lc.AIMessage(**_AI), lc.ToolMessage("r", tool_call_id="call-1")], INEXACT),
    "document": (Document("text", metadata={"page": 3, "seen": {1}}, id="d"), INEXACT),
    "string-prompt": (StringPromptValue(text="t"), INEXACT),
    "chat-prompt": (ChatPromptValue(messages=[lc.HumanMessage("q")]), INEXACT),
    "agent-action": (AgentAction("tool", {"a": 1}, "log"), INEXACT),
    "agent-finish": (AgentFinish({"a": (1,)}, "log"), INEXACT),
    "generation": (ChatGeneration(message=lc.AIMessage("x")), INEXACT),
    "addable-dict": (AddableDict(a=1), INEXACT),
    # -- LangGraph's own
    "send": (Send("node", {"x": {1, 2}}), EXACT),
    "send-timeout": (Send("node", [1], timeout=2.5), EXACT),
    "command": (Command(update={"a": (1,)}, goto=[Send("n", 1), "m"], resume={"id": b"1"}), INEXACT),
    "interrupt": (Interrupt({"ask": ("a", "b")}, id="i"), INEXACT),
    "overwrite": (Overwrite([1, {2}]), EXACT),
    "timeout-policy": (TimeoutPolicy(run_timeout=dt.timedelta(seconds=3)), EXACT),
    "task": (PregelTask("1", "n", ("push", 0, ("x",)), error="no", interrupts=(Interrupt(1, id="i"),)), INEXACT),
    "snapshot": (StateSnapshot({"a": 1}, ("n",), _CONFIG, None, "now", None, (), ()), INEXACT),
    "delta-snapshot": (_DeltaSnapshot([lc.HumanMessage("x", id="1")]), INEXACT),
    "entrypoint-final": (entrypoint.final(value=1, save={2}), INEXACT),
    "item": (Item(value={"a": 1}, key="k", namespace=("n", "m"), created_at=_NOW, updated_at=_NOW), EXACT),
    "search-item": (
        SearchItem(value={}, key="k", namespace=("n",), created_at=_NOW, updated_at=_NOW, score=0.5), EXACT,
    ),
    # -- the user's classes
    "enum": (Mood.HURRIED, INEXACT),
    "int-enum": (Rank.HIGH, EXACT),
    "str-enum": (Colour.RED, EXACT),
    "flags": (Right.READ | Right.WRITE, EXACT),
    "named-tuple": (Point(1, (2, 3)), INEXACT),
    "dataclass": (Leg("Porto", Mood.CALM, [(1,)]), INEXACT),
    "frozen-dataclass": (Pair({(1, 2)}, Pair(1, None)), INEXACT),
    "attrs": (Guest("ann", {"a"}), REFUSED),
    "model": (Trip(name="t", legs=[Leg("a")], pair=(1, "x")), INEXACT),
    "model-url": (Trip(name="t", site="http://example.org/a?b=1"), REFUSED),
    "model-extra-private": (loose(), INEXACT),
    "model-validated": (Strict(amount=3, when=_NOW), INEXACT),
    "root-model": (Names(["a"]), INEXACT),
    "model-v1": (Old(age="new"), INEXACT),
    "secret": (SecretStr("s3cret"), EXACT),
    # -- Python's own
    "tuple": ((1, ("a", (None,)), [(2,)]), INEXACT),
    "set-of-tuples": ({(1, 2), ("a", (3,))}, INEXACT),
    "frozenset": (frozenset({1, frozenset({2})}), EXACT),
    "dict-of-tuples": ({(1, 2): "a", 3: {4: 5}, None: 1.5}, EXACT),
    "int-keys": ({1: "a", False: "b", 2.5: "c"}, EXACT),
    "bytes": ({"b": b"\x00\xff", "a": bytearray(b"x")}, INEXACT),
    "big-int": ([2**64, -(2**70), 10**300], REFUSED),
    "floats": ([0.1, -0.0, math.inf, -math.inf, math.nan], EXACT),
    "complex": (1 + 2j, REFUSED),
    "surrogates": ("a\udc80b", INEXACT),
    "deque": (collections.deque([1, (2,)], maxlen=5), INEXACT),
    "defaultdict": (collections.defaultdict(list, {"a": [1]}), INEXACT),
    "ordered-dict": (collections.OrderedDict([("b", 1), ("a", 2)]), INEXACT),
    "counter": (collections.Counter("hello"), INEXACT),
    "path": (pathlib.Path("/a/b/../c"), EXACT),
    "pure-path": (pathlib.PurePosixPath("a/b"), REFUSED),
    "pattern": (re.compile(r"a(b+)\d", re.IGNORECASE | re.VERBOSE), EXACT),
    "bytes-pattern": (re.compile(rb"\x00+"), EXACT),
    "datetime": (_NOW, EXACT),
    "datetime-naive-fold": (dt.datetime(2024, 10, 27, 1, 30, fold=1), INEXACT),
    "datetime-zone": (dt.datetime(2024, 7, 1, tzinfo=_LISBON), INEXACT),
    "date-and-times": ([dt.date(2024, 1, 2), dt.time(1, 2, 3, 4, tzinfo=_UTC), dt.timedelta(-1, 5, 6)], EXACT),
    "timezone": (dt.timezone(dt.timedelta(hours=5, minutes=30), "IST"), EXACT),
    "zone": (_LISBON, EXACT),
    "decimal": ([decimal.Decimal("1.10"), decimal.Decimal("NaN"), decimal.Decimal("-0E-7")], EXACT),
    "fraction": (fractions.Fraction(2, 3), REFUSED),
    "uuid": (uuid.UUID(int=7), EXACT),
    "addresses": (
        [ipaddress.ip_address("10.0.0.1"), ipaddress.ip_interface("10.0.0.1/8"), ipaddress.ip_network("10.0.0.0/8")],
        EXACT,
    ),
    "addresses-v6": (
        [ipaddress.ip_address("fe80::1%eth0"), ipaddress.ip_interface("::1/64"), ipaddress.ip_network("::/64")], EXACT,
    ),
    "array": (np.arange(6, dtype="<f4").reshape(2, 3), EXACT),
    "array-scalars": ([np.float32(1.5), np.int64(7), np.bool_(1)], REFUSED),
    "range": (range(1, 10, 3), REFUSED),
}  # fmt: skip

ERRORS: dict[str, BaseException] = {
    "error": noted(),
    "error-file": FileNotFoundError(2, "No such file", "a.txt"),
    "error-import": ImportError("no", name="m", path="p"),
    "error-unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "error-json": json.JSONDecodeError("bad", "{", 1),
    "error-cancelled": asyncio.CancelledError("stop"),
    "error-group": ExceptionGroup("two", [ValueError(1), ExceptionGroup("in", [Refused(1, "no")])]),
    "error-langgraph": GraphRecursionError("too far"),
    "error-timeout": NodeTimeoutError("n", 3.5, kind="idle", idle_timeout=3.0),
    "error-parser": OutputParserException("bad", llm_output="x"),
    "error-own": Refused(404, "gone"),
}

UNKNOWN: dict[str, Any] = {
    "function": print,
    "class": int,
    "lock": asyncio.Lock(),
    "proxy": MappingProxyType({}),
}
