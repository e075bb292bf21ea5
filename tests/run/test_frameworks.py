"""Tools inside other people's frameworks: the schema is that of the plain function, and calls are recorded.

The real packages with a scripted model; nothing leaves the process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from pathlib import Path

import agents
import pydantic_ai
import pytest
from agents.items import ModelResponse
from agents.models.interface import Model
from agents.usage import Usage
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText
from pydantic_ai.messages import ModelResponse as Answer
from pydantic_ai.messages import TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

import holdfast
from tests.pages import parse

pydantic_ai.models.ALLOW_MODEL_REQUESTS = False
agents.set_tracing_disabled(disabled=True)

DONE = []
"""What really happened."""


def book_flight(flight: str, seats: int = 1, extras: list[str] | None = None) -> dict[str, typing.Any]:
    """Book a flight.

    Args:
        flight: The number of the flight.
        seats: How many seats to take.
        extras: What else to order.
    """
    DONE.append((flight, seats, extras))
    return {"flight": flight, "code": f"K{len(DONE)}"}


async def book_hotel(city: str, nights: int) -> str:
    """Book a hotel.

    Args:
        city: Where.
        nights: For how long.
    """
    await asyncio.sleep(0)
    DONE.append((city, nights))
    return f"H{len(DONE)}"


PLAIN = [book_flight, book_hotel]
TOOLS = [holdfast.tool(effect="write")(function) for function in PLAIN]
CALLS = [
    ("book_flight", {"flight": "TP1", "seats": 2, "extras": ["window"]}),
    ("book_hotel", {"city": "Lisbon", "nights": 3}),
]


@pytest.fixture(autouse=True)
def _nothing_done():
    DONE.clear()


def test_a_tool_looks_like_its_function():
    for plain, decorated in zip(PLAIN, TOOLS, strict=True):
        assert inspect.signature(decorated) == inspect.signature(plain)
        assert typing.get_type_hints(decorated) == typing.get_type_hints(plain)
        assert inspect.getdoc(decorated) == inspect.getdoc(plain)
        assert inspect.iscoroutinefunction(decorated) == inspect.iscoroutinefunction(plain)
        assert (decorated.__name__, decorated.__module__) == (plain.__name__, plain.__module__)


# -- each framework: how it describes a tool, and one turn of a scripted model with two calls ---------------------


def langgraph_schema(function):
    made = langchain_tool(function, parse_docstring=True)
    return made.name, made.description, made.args_schema.model_json_schema()


async def langgraph_turn(tools):
    def model(state):
        if isinstance(state["messages"][-1], ToolMessage):
            return {"messages": [AIMessage("all booked")]}
        calls = [{"name": name, "args": args, "id": str(n)} for n, (name, args) in enumerate(CALLS)]
        return {"messages": [AIMessage("", tool_calls=calls)]}

    def more(state):
        return "tools" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", model)
    graph.add_node("tools", ToolNode(tools, handle_tool_errors=False))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", more, ["tools", END])
    graph.add_edge("tools", "model")
    found = await graph.compile().ainvoke({"messages": [("user", "Lisbon, please")]})
    return found["messages"][-1].content


def openai_schema(function):
    made = agents.function_tool(function)
    return made.name, made.description, made.params_json_schema


class Scripted(Model):
    """Answers with two calls, then with a word."""

    async def get_response(self, system_instructions, input, *args, **kwargs):
        if any(isinstance(item, dict) and item.get("type") == "function_call_output" for item in input):
            text = ResponseOutputText(text="all booked", type="output_text", annotations=[])
            said = {"id": "m", "role": "assistant", "status": "completed", "type": "message"}
            output = [ResponseOutputMessage(content=[text], **said)]
        else:
            output = [
                ResponseFunctionToolCall(name=name, arguments=json.dumps(args), call_id=str(n), type="function_call")
                for n, (name, args) in enumerate(CALLS)
            ]
        return ModelResponse(output=output, usage=Usage(), response_id=None)

    def stream_response(self, *args, **kwargs):
        raise AssertionError("nobody asked for a stream")


async def openai_turn(tools):
    offered = [agents.function_tool(tool, failure_error_function=None) for tool in tools]
    travel = agents.Agent(name="travel", model=Scripted(), tools=offered)
    return (await agents.Runner.run(travel, "Lisbon, please")).final_output


def pydantic_schema(function):
    made = pydantic_ai.Tool(function)
    return made.name, made.description, made.function_schema.json_schema


async def pydantic_turn(tools):
    def model(messages, info):
        if any(part.part_kind == "tool-return" for part in messages[-1].parts):
            return Answer(parts=[TextPart("all booked")])
        return Answer(parts=[ToolCallPart(name, args, str(n)) for n, (name, args) in enumerate(CALLS)])

    travel = pydantic_ai.Agent(FunctionModel(model), tools=tools)
    return (await travel.run("Lisbon, please")).output


FRAMEWORKS = [
    pytest.param(langgraph_schema, langgraph_turn, id="langgraph"),
    pytest.param(openai_schema, openai_turn, id="openai-agents"),
    pytest.param(pydantic_schema, pydantic_turn, id="pydantic-ai"),
]


@pytest.mark.parametrize(("schema", "turn"), FRAMEWORKS)
def test_the_schema_is_that_of_the_plain_function(schema, turn):
    for plain, decorated in zip(PLAIN, TOOLS, strict=True):
        assert schema(decorated) == schema(plain)
        name, described, parameters = schema(decorated)
        assert name == plain.__name__
        assert described.startswith(plain.__doc__.splitlines()[0].rstrip("."))
        assert parameters["properties"].keys() == inspect.signature(plain).parameters.keys()
        assert all("description" in part for part in parameters["properties"].values())


@pytest.mark.parametrize(("schema", "turn"), FRAMEWORKS)
def test_calls_inside_the_block_are_recorded_and_not_made_twice_after_a_restore(store_path, schema, turn):
    async def session():
        with holdfast.open(store_path) as store:
            async with store.agent("trip-7") as agent:
                assert await turn(TOOLS) == "all booked"
                return [(effect.tool, effect.args, effect.status) for effect in agent.effects()]

    first = asyncio.run(session())
    assert sorted(DONE, key=len) == [("Lisbon", 3), ("TP1", 2, ["window"])]
    assert sorted(first) == [(name, args, "done") for name, args in CALLS]
    # The process ended before a checkpoint: the model asks for the same again, and gets what was recorded.
    assert asyncio.run(session()) == first
    assert len(DONE) == 2


@pytest.mark.parametrize(("schema", "turn"), FRAMEWORKS)
def test_inside_a_run_the_whole_turn_is_answered_from_the_record(store_path, schema, turn):
    async def travel(agent):
        # They call plain tools on threads of their own, where a run has no positions.
        agent.state["answer"] = await turn([tool.acall for tool in TOOLS])
        if len(runs) < 2:
            raise KeyboardInterrupt
        return agent.state["answer"]

    runs = []
    for _ in range(2):
        runs.append(1)
        with holdfast.open(store_path) as store:
            agent = store.agent("trip-7")
            try:
                assert asyncio.run(agent.arun(travel)) == "all booked"
            except KeyboardInterrupt:
                continue
            assert [run.status for run in agent.runs()] == ["finished"]
    assert len(DONE) == 2


@pytest.mark.parametrize(("schema", "turn"), FRAMEWORKS)
def test_a_plain_tool_off_the_loop_looks_like_its_function_too(schema, turn):
    for plain, decorated in zip(PLAIN, TOOLS, strict=True):
        assert schema(decorated.acall) == schema(plain)
        assert inspect.iscoroutinefunction(decorated.acall)


@pytest.mark.parametrize(("schema", "turn"), FRAMEWORKS)
def test_without_an_agent_a_tool_is_an_ordinary_function(schema, turn):
    assert asyncio.run(turn(TOOLS)) == "all booked"
    assert len(DONE) == 2


def test_the_recipe_of_the_guide_asks_openais_model_once(store_path):
    page = Path(__file__).parents[2] / "docs" / "guide" / "frameworks.md"
    (recipe,) = [
        block.text for block in parse(page.read_text(encoding="utf-8")) if "class Recorded(Model)" in block.text
    ]
    made = {"holdfast": holdfast, "book": TOOLS[0]}
    exec(recipe, made)
    asked = []

    class Counted(Scripted):
        async def get_response(self, system_instructions, input, *args, **kwargs):
            asked.append(input)
            return await super().get_response(system_instructions, input, *args, **kwargs)

    async def turn():
        offered = [agents.function_tool(tool, failure_error_function=None) for tool in TOOLS]
        travel = agents.Agent(name="travel", model=made["Recorded"](Counted()), tools=offered)
        with holdfast.open(store_path) as store, store.agent("trip-7") as agent, agent.task("message 1"):
            return (await agents.Runner.run(travel, "Lisbon, please")).final_output

    assert [asyncio.run(turn()), asyncio.run(turn())] == ["all booked", "all booked"]
    assert (len(asked), len(DONE)) == (2, 2)
