"""What OpenTelemetry is told of agents: spans, metrics, trace ids that stay, and log records."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import subprocess
import sys

import pytest
from langgraph.graph import START, StateGraph
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import holdfast
from holdfast.agent import watchers
from holdfast.cli import main
from holdfast.contrib import otel
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import InDoubt, ToolFailed, Waiting
from tests.lives import die, dies


class Told:
    """What the exporters have got."""

    def __init__(self):
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider(metric_readers=[self._reader])

    def install(self):
        otel.install(tracer_provider=self.provider, meter_provider=self.meters)

    @property
    def spans(self):
        return self._spans.get_finished_spans()

    @property
    def names(self):
        return [span.name for span in self.spans]

    def span(self, name):
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def clear(self):
        self._spans.clear()

    def points(self, name):
        data = self._reader.get_metrics_data()
        parts = data.resource_metrics if data is not None else ()
        found = [one for part in parts for scope in part.scope_metrics for one in scope.metrics]
        return [point for one in found if one.name == name for point in one.data.data_points]


@pytest.fixture
def told():
    told = Told()
    told.install()
    yield told
    otel.uninstall()
    told.provider.shutdown()
    told.meters.shutdown()


@pytest.fixture
def store(store_path, told):
    with holdfast.open(store_path) as store:
        yield store


@holdfast.tool
def otel_book(flight: str) -> str:
    if flight == "lost":
        raise ConnectionResetError("the password is hunter2")
    return flight


@holdfast.tool(effect="read")
def otel_search(city: str) -> list:
    if city == "nowhere":
        raise LookupError("the password is hunter2")
    return [city]


@holdfast.durable
def otel_travel(agent, city):
    agent.state["offers"] = otel_search(city)
    agent.checkpoint("searched")
    return otel_book(city)


def within(span, outer):
    return span.parent is not None and span.parent.span_id == outer.context.span_id


# -- spans ----------------------------------------------------------------------------------------------------


def test_a_run_is_one_trace_with_its_tools_and_checkpoints(store, told):
    agent = store.agent("trip")
    agent.run(otel_travel, "Lisbon")
    run, search, book = (
        told.span(name) for name in ("invoke_agent trip", "execute_tool otel_search", "execute_tool otel_book")
    )
    checkpoints = [span for span in told.spans if span.name == "checkpoint trip"]
    assert all(within(span, run) for span in (search, book, *checkpoints))
    assert dict(run.attributes) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "trip",
        "holdfast.branch": "main",
        "holdfast.run.id": agent.runs()[0].id,
        "holdfast.run.function": "otel_travel",
        "holdfast.run.resumed": False,
        "holdfast.run.status": "finished",
    }
    effect = agent.effects()[-1]
    assert dict(book.attributes) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "otel_book",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": effect.id,
        "gen_ai.agent.name": "trip",
        "holdfast.branch": "main",
        "holdfast.run.id": effect.run,
        "holdfast.effect.kind": "write",
        "holdfast.effect.path": effect.path,
        "holdfast.effect.attempts": 1,
    }
    searched = next(span for span in checkpoints if span.attributes["holdfast.checkpoint.label"] == "searched")
    assert searched.attributes["holdfast.checkpoint.id"] == agent.at("searched").id
    assert searched.attributes["holdfast.checkpoint.size"] > 0


def test_what_a_tool_does_is_inside_its_span_and_what_its_caller_does_is_not(store, told):
    tracer = told.provider.get_tracer("test")

    @holdfast.tool(effect="read", stream=True)
    def items():
        for number in range(2):
            with tracer.start_as_current_span(f"in the tool {number}"):
                yield number

    @holdfast.tool(effect="read", timeout_s=60)
    def aside():
        tracer.start_span("in a thread").end()

    with store.agent("trip"), tracer.start_as_current_span("program"):
        for number in items():
            tracer.start_span(f"in the program {number}").end()
        aside()
    tool, program = told.span("execute_tool items"), told.span("program")
    assert within(tool, program)
    assert within(told.span("in the tool 0"), tool)
    assert within(told.span("in the tool 1"), tool)
    assert within(told.span("in the program 0"), program)
    assert within(told.span("in the program 1"), program)
    assert within(told.span("in a thread"), told.span("execute_tool aside"))
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_async_runs_have_spans_and_do_not_mix(store, told):
    @holdfast.tool(effect="read")
    async def look(name):
        await asyncio.sleep(0)
        return name

    @holdfast.durable
    async def looking(agent):
        return [await look(agent.name) for _ in range(3)]

    async def main():
        names = ["a", "b", "c"]
        await asyncio.gather(*(store.agent(name).arun(looking) for name in names))

    asyncio.run(main())
    for name in ("a", "b", "c"):
        run = told.span(f"invoke_agent {name}")
        looks = [span for span in told.spans if span.name == "execute_tool look" and within(span, run)]
        assert [span.attributes["gen_ai.agent.name"] for span in looks] == [name] * 3


def test_a_call_that_is_answered_from_the_record_has_no_span(store, told):
    agent = store.agent("trip")

    @holdfast.durable
    def waits(agent):
        otel_search("Lisbon")
        agent.wait_for("go")

    with pytest.raises(Waiting):
        agent.run(waits.options(wait=False))
    assert told.span("invoke_agent trip").attributes["holdfast.run.status"] == "waiting"
    assert told.span("invoke_agent trip").status.status_code is StatusCode.UNSET
    told.clear()
    store.signal("trip", "go")
    agent.run(waits)
    assert "execute_tool otel_search" not in told.names
    assert told.span("invoke_agent trip").attributes["holdfast.run.resumed"] is True


def test_a_batch_is_one_trace_with_what_its_items_do(store, told):
    @holdfast.durable
    def item(city):
        if city == "nowhere":
            otel_search(city)
        return otel_book(city)

    cities = ["Lisbon", "Porto", "nowhere"]
    store.map(item, cities, name="cities", key=str)
    run = told.span("invoke_agent cities")
    assert run.attributes["holdfast.run.status"] == "failed"
    calls = [span for span in told.spans if span.name.startswith("execute_tool")]
    assert len(calls) == 3
    assert all(within(span, run) for span in calls)
    told.clear()
    store.map(item, cities[:2], name="cities", key=str)
    again = told.span("invoke_agent cities")
    assert again.attributes["holdfast.run.resumed"] is True
    assert [link.context.span_id for link in again.links] == [run.context.span_id]
    assert store.verify().ok


def test_a_child_is_in_the_trace_of_its_parent(store, told):
    @holdfast.durable
    def child(agent):
        return otel_book("Porto")

    @holdfast.durable
    def parent(agent):
        return agent.spawn(child, "second").join()

    assert store.agent("first").run(parent) == "Porto"
    runs = [span for span in told.spans if span.name.startswith("invoke_agent")]
    assert len(runs) == 2
    assert len({span.context.trace_id for span in told.spans}) == 1


def test_attempts_of_one_call_are_one_span(store, told):
    @holdfast.tool(effect="idempotent", retries=1)
    def pay():
        if len(tried) < 2:
            tried.append(1)
            raise ConnectionResetError

    tried = [1]
    with store.agent("trip"):
        pay()
    span = told.span("execute_tool pay")
    assert span.attributes["holdfast.effect.attempts"] == 2
    assert span.status.status_code is StatusCode.UNSET


def test_failures_are_named_by_their_type_and_nothing_else(store, told):
    with store.agent("trip"), pytest.raises(ToolFailed):
        otel_search("nowhere")
    span = told.span("execute_tool otel_search")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "LookupError"
    assert "hunter2" not in span.to_json()
    assert not span.events


def test_a_rollback_and_what_it_undoes_are_one_trace(store, told):
    @holdfast.tool(compensate=lambda effect: None)
    def pay():
        return 1

    agent = store.agent("trip")
    with agent:
        start = agent.checkpoint("start")
        pay()
        told.clear()
        agent.rollback(start)
    rollback, undone = told.span("rollback trip"), told.span("execute_tool undo pay")
    assert within(undone, rollback)
    assert rollback.attributes["holdfast.rollback.target"] == start.id
    assert rollback.attributes["holdfast.rollback.effects"] == 1


def test_going_on_from_damage_is_a_recovery(store_path, told):
    with holdfast.open(store_path) as store:
        agent = store.agent("trip")
        for number in range(3):
            agent.state["n"] = number
            agent.checkpoint(f"{number}")
        agent.mark("2", "corrupt", "somebody said so")
    told.clear()
    with holdfast.open(store_path) as store:
        assert store.agent("trip", recover=True).state["n"] == 1
    span = told.span("recovery trip")
    assert "1 checkpoint(s)" in span.attributes["holdfast.recovery.lost"]


def test_graphs_with_our_saver_are_observed(store_path, told, caplog):
    @holdfast.tool
    def graph_book(flight):
        logging.getLogger("program").warning("inside")
        return flight

    def node(state):
        return {"booked": graph_book("TP1")}

    builder = StateGraph(dict[str, str])
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    with HoldfastSaver(store_path) as saver:
        graph = builder.compile(checkpointer=saver)
        graph.invoke({"asked": "TP1"}, {"configurable": {"thread_id": "chat"}})
    assert {"checkpoint chat", "execute_tool graph_book"} <= set(told.names)
    assert told.span("execute_tool graph_book").attributes["gen_ai.agent.name"] == "chat"
    (record,) = (record for record in caplog.records if record.name == "program")
    assert vars(record)["holdfast.agent"] == "chat"
    assert told.points("holdfast.checkpoint.duration")


# -- across crashes -------------------------------------------------------------------------------------------


def test_a_resumed_run_is_linked_to_the_trace_that_was_killed(store_path, tmp_path, told, capsys):
    @holdfast.tool(name="otel_killed", probe=lambda effect: holdfast.Found("there"))
    def book() -> str:
        context = trace.get_current_span().get_span_context()
        (tmp_path / "trace").write_text(format(context.trace_id, "032x"))
        die()

    @holdfast.durable(name="otel_killing")
    def travel(agent):
        agent.checkpoint("asked")
        return book()

    def live():
        with holdfast.open(store_path) as store:
            return store.agent("trip").run(travel)

    assert dies(live, 0)
    assert live() == "there"
    old = (tmp_path / "trace").read_text()
    run, recovery = told.span("invoke_agent trip"), told.span("recovery trip")
    assert [format(link.context.trace_id, "032x") for link in run.links] == [old]
    mine = format(run.context.trace_id, "032x")
    assert mine != old
    assert within(recovery, run)
    assert recovery.attributes["holdfast.recovery.settled"] == 1
    with holdfast.open(store_path, readonly=True) as store:
        agent = store.agent("trip", readonly=True)
        assert agent.at("asked").metadata["trace"] == old
        assert agent.runs()[0].trace.split("-")[1] == mine
        assert store.verify().ok
    assert main(["--store", str(store_path), "show", "trip@asked"]) == 0
    assert f"trace      {old}" in capsys.readouterr().out


def test_a_trace_that_nobody_keeps_leaves_nothing_behind(store_path):
    otel.install(tracer_provider=TracerProvider(sampler=sampling.ALWAYS_OFF))
    try:
        with holdfast.open(store_path) as store:
            agent = store.agent("trip")
            agent.run(otel_travel, "Lisbon")
            assert agent.runs()[0].trace == ""
            assert "trace" not in agent.at("searched").metadata
    finally:
        otel.uninstall()


# -- metrics --------------------------------------------------------------------------------------------------


def test_checkpoints_are_counted_with_their_cost_their_size_and_their_age(store, told):
    agent = store.agent("trip")
    assert told.points("holdfast.checkpoint.age") == []
    agent.state["text"] = "x" * 10_000
    agent.checkpoint()
    agent.checkpoint()
    (cost,), (size,) = told.points("holdfast.checkpoint.duration"), told.points("holdfast.checkpoint.size")
    assert (cost.count, size.count) == (2, 2)
    assert size.max > 10_000 > size.min
    (age,) = told.points("holdfast.checkpoint.age")
    assert dict(age.attributes) == {"gen_ai.agent.name": "trip", "holdfast.branch": "main"}
    assert 0 <= age.value < 600
    agent.close()
    assert told.points("holdfast.checkpoint.age") == []


def test_an_agent_that_is_opened_has_the_age_of_its_last_checkpoint(store_path, told):
    with holdfast.open(store_path) as store:
        store.agent("trip").checkpoint()
    with holdfast.open(store_path) as store:
        store.agent("trip")
        assert len(told.points("holdfast.checkpoint.age")) == 1


def test_runs_are_counted_by_how_they_ended_and_doubts_until_they_are_settled(store, told):
    @holdfast.durable
    def wrong(agent):
        raise ValueError

    agent = store.agent("trip")
    agent.run(otel_travel, "Lisbon")
    with pytest.raises(ValueError):
        agent.run(wrong)
    with pytest.raises(InDoubt):
        agent.run(otel_travel, "lost")
    counted = {point.attributes["holdfast.run.status"]: point.value for point in told.points("holdfast.runs")}
    assert counted == {"finished": 1, "failed": 1, "needs attention": 1}
    assert [point.value for point in told.points("holdfast.effects.in_doubt")] == [1]
    agent.resolve(agent.effects()[-1], "done", result="TP1")
    agent.run(otel_travel, "lost")
    assert [point.value for point in told.points("holdfast.effects.in_doubt")] == [0]


def test_what_is_in_doubt_in_a_batch_or_a_loop_is_counted(store, told):
    @holdfast.durable
    def item(city):
        return otel_book(city.rstrip("0123456789"))

    def doubtful():
        found = told.points("holdfast.effects.in_doubt")
        return {point.attributes["gen_ai.agent.name"]: point.value for point in found}

    store.map(item, ["lost1", "Porto", "lost2"], name="cities", workers=1)
    with store.agent("loop") as agent:
        with pytest.raises(InDoubt):
            otel_book("lost")
        assert doubtful() == {"cities": 2, "loop": 1}
        agent.resolve(agent.effects()[-1], "not-done")
        otel_book("Lisbon")
    assert doubtful() == {"cities": 2, "loop": 0}


# -- logs -----------------------------------------------------------------------------------------------------


def test_log_records_say_for_which_agent_run_and_checkpoint(store, told, caplog):
    @holdfast.tool(effect="read")
    def look():
        logging.getLogger("program").warning("inside")

    agent = store.agent("trip")
    agent.run(holdfast.durable(name="look")(lambda agent: look()))
    logging.getLogger("program").warning("outside")
    inside, outside = (record for record in caplog.records if record.name == "program")
    found = {name: value for name, value in vars(inside).items() if name.startswith("holdfast.")}
    run = agent.runs()[0]
    assert found == {
        "holdfast.agent": "trip",
        "holdfast.run": run.id,
        "holdfast.checkpoint": agent.log()[-1].short_id,
    }
    assert not [name for name in vars(outside) if name.startswith("holdfast.")]


# -- coming and going -----------------------------------------------------------------------------------------


def test_installing_again_replaces_and_uninstalling_leaves_nothing(store, told):
    factory = logging.getLogRecordFactory()
    watching = len(watchers.WATCHERS)
    told.install()
    assert logging.getLogRecordFactory() is factory
    assert len(watchers.WATCHERS) == watching
    otel.uninstall()
    otel.uninstall()
    assert not watchers.observed()
    assert len(watchers.WATCHERS) == watching - 1
    assert logging.getLogRecordFactory() is not factory
    told.clear()
    store.agent("trip").checkpoint()
    assert told.spans == ()


def test_somebody_elses_log_records_may_be_made_around_ours(told, caplog):
    ours = logging.getLogRecordFactory()
    logging.setLogRecordFactory(functools.partial(ours))
    try:
        otel.uninstall()
        told.install()
        logging.getLogger("program").warning("made once")
    finally:
        logging.setLogRecordFactory(ours)
    assert [record.message for record in caplog.records] == ["made once"]


class Broken(SpanProcessor):
    def on_start(self, span, parent_context=None):
        raise RuntimeError("no exporter today")

    def on_end(self, span):
        raise RuntimeError("no exporter today")


def test_an_exporter_that_fails_stops_nothing(store, told, caplog):
    told.provider.add_span_processor(Broken())
    agent = store.agent("trip")
    assert agent.run(otel_travel, "Lisbon") == "Lisbon"
    assert agent.effects()[-1].status == "done"
    assert "could not be observed" in caplog.text


def test_without_an_sdk_nothing_is_kept(tmp_path):
    code = (
        "import holdfast, holdfast.contrib.otel as otel, sys; otel.install()\n"
        "with holdfast.open('store') as store: print('trace' in store.agent('a').checkpoint().metadata)\n"
        "assert 'opentelemetry.sdk' not in sys.modules"
    )
    alone = {**os.environ, "OTEL_SDK_DISABLED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=alone, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_nobody_is_told_and_nothing_is_loaded_without_install(tmp_path):
    code = (
        "import holdfast, sys\n"
        "with holdfast.open('store') as store: store.agent('a').run(holdfast.durable(name='f')(lambda agent: 1))\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False).returncode == 0
