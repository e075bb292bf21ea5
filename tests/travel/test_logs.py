"""Logs and metrics only ask: the agent's own thread saves at its next safe point, and a line leads to its state."""

from __future__ import annotations

import logging
import random
import threading

import pytest

import holdfast
from holdfast import travel
from holdfast.errors import BadOption, StoreFailed
from holdfast.travel import journal


@holdfast.tool(name="logged.pay")
def pay(amount):
    logging.getLogger("shop").error("card refused")
    return amount


@pytest.fixture
def agent(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("trip-7", when=None)
        agent.state["n"] = 0
        agent.checkpoint("begun")
        yield agent


@pytest.fixture
def shop(agent):
    logger = logging.getLogger("shop")
    logger.setLevel("DEBUG")
    handler = agent.log_handler()
    root = logging.getLogger()
    root.addHandler(handler)
    logger.handler = handler
    yield logger
    root.removeHandler(handler)


def test_lines_that_somebody_else_put_into_the_file_are_left_out(agent, shop):
    shop.error("mine")
    (file,) = (agent._store.path / "logs").iterdir()
    bad = ['{"at": 1e400}', '{"at": NaN}', '{"at": 1e18}', '{"at": "now"}', '{"at": null}', "{}", "[" * 100_000, "[]"]
    file.write_text("\n".join([*bad, file.read_text()]))
    assert [line.text for line in agent.logs()] == ["mine"]


def test_an_error_asks_and_the_next_safe_point_saves(agent, shop):
    first = agent.head
    agent.state["n"] = 1
    shop.error("no answer from %s", "Lyon")
    assert agent.head == first  # nothing is saved by the handler
    made = agent.step()
    assert made is not None
    assert made.trigger == "log"
    assert made.state["n"] == 1
    assert agent.step() is None
    (line,) = agent.logs()
    assert (line.text, line.level, line.logger, line.asked) == ("no answer from Lyon", "ERROR", "shop", True)
    assert line.checkpoint == first.id
    assert line.after == made.id
    assert line.distance_s >= 0
    assert agent.at(f"id:{line.checkpoint}").state["n"] == 0


def test_lines_of_a_moment(agent, shop):
    shop.info("before")
    agent.state["n"] = 1
    later = agent.checkpoint("later")
    shop.info("after")
    shop.debug("not kept")
    assert [line.text for line in agent.logs()] == ["before", "after"]
    assert [line.text for line in agent.logs("later")] == ["after"]
    assert agent.logs(later, limit=1)[0].checkpoint == later.id


def test_one_for_a_pattern_and_minute_and_so_many_in_all(agent, shop):
    for number in range(5):
        shop.error("order %d failed", number)
    assert (shop.handler.asking.asked, shop.handler.asking.quiet) == (1, 4)
    for word in "abc":
        shop.error(f"{word}: gone")
    assert shop.handler.asking.asked == 4
    few = agent.log_handler(total=1)
    few.handle(logging.makeLogRecord({"name": "x", "levelno": 40, "levelname": "ERROR", "msg": "one"}))
    few.handle(logging.makeLogRecord({"name": "x", "levelno": 40, "levelname": "ERROR", "msg": "two"}))
    assert few.asking.asked == 1


def test_our_own_loggers_are_ignored(agent, shop):
    logging.getLogger("holdfast.agent").error("ours")
    logging.getLogger("holdfast").error("ours")
    assert agent.logs() == []
    assert shop.handler.asking.asked == 0


def test_never_at_the_call_of_a_plain_loop(agent, shop):
    with agent:
        agent.state["n"] = 1
        pay(3)
        assert len(agent.log()) == 1
        agent.state["paid"] = True
        assert agent.step().state["paid"]


def test_from_any_thread_and_with_secrets(agent, shop, monkeypatch):
    thread = threading.Thread(target=shop.warning, args=("token sk-proj-4f9Q2mX7Lr8TzK1vB6nC3sWy5hD0aGjE",))
    thread.start()
    thread.join()
    (line,) = agent.logs()
    assert "4f9Q2" not in line.text
    assert not line.asked


def test_a_log_that_cannot_be_written_disturbs_nobody(agent, shop, store_path):
    (store_path / "logs").write_text("in the way")
    shop.error("lost")
    agent.state["n"] = 5
    assert agent.step() is not None
    assert agent.logs() == []


def test_a_file_is_bounded(agent, shop, monkeypatch):
    monkeypatch.setattr(journal, "FILE_MAX_BYTES", 2_000)
    for number in range(100):
        shop.info("line %d", number)
    found = agent.logs()
    assert 5 < len(found) < 50
    assert found[-1].text == "line 99"


def test_a_removed_agent_leaves_no_lines_and_no_verdicts(agent):
    store = agent._store
    other = store.agent("trip-70", when=None)
    other.state["n"] = 1
    other.checkpoint()
    for one in (agent, other):
        record = logging.makeLogRecord({"name": "app", "levelno": 40, "msg": f"of {one.name}"})
        one.log_handler().handle(record)
        one.bisect("n >= 0", minimise=False)
    store.remove("trip-7", dry_run=True)
    assert len(agent.logs()) == len(travel.log_of(agent)) == 1
    store.remove("trip-7")
    again = store.agent("trip-7", when=None)
    assert agent.closed
    assert (again.logs(), travel.log_of(again)) == ([], [])
    assert [line.text for line in other.logs()] == ["of trip-70"]
    assert len(travel.log_of(other)) == 1


def test_lines_that_cannot_be_removed_with_their_agent_are_named(agent, store_path):
    journal.Journal(str(store_path), journal.LOGS, "trip-7").file.mkdir(parents=True)  # cannot be unlinked
    with pytest.raises(StoreFailed, match=r"trip-7 is removed, but lines .*"):
        agent._store.remove("trip-7")
    assert agent._store.agents() == []


def test_a_metric_that_drifts_asks(agent):
    metrics = agent.metrics()
    chance = random.Random(5)
    for step in range(300):
        alarms = metrics(latency_ms=20 + chance.gauss(0, 1) + 8 * (step >= 250), queue=3)
        agent.state["n"] = step
        if alarms:
            break
    assert [alarm.place for alarm in alarms] == ["latency_ms"]
    assert step < 260
    assert agent.step().trigger == "metric"
    assert agent.logs()[-1].logger == "latency_ms"


def test_readers_and_levels_are_checked(agent):
    with holdfast.open(agent._store.path) as store, pytest.raises(BadOption):
        store.agent("trip-7", readonly=True).log_handler()
    with pytest.raises(BadOption):
        agent.log_handler(ask="LOUD")
