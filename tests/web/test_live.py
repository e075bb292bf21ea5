"""What happens while somebody looks is told to everybody who does, by one poller."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import ExitStack, closing
from queue import Queue

import httpx
import pytest

import holdfast
from holdfast.web import live
from holdfast.web.place import Place
from tests.web.conftest import SLOW_S, serving


@pytest.fixture
def place(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        for name in ("one", "two"):
            with store.agent(name) as agent:
                agent.checkpoint("first")
    return tmp_path / "store"


def follow(visitor, heard, ready):
    """Put the events of a stream into a queue until the server ends it."""
    try:
        with visitor.stream("GET", "/events") as answer:
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    ready.set()
                    heard.put((name, json.loads(line.removeprefix("data: "))))
    except httpx.HTTPError as error:
        heard.put(("ended", str(error)))
    heard.put(("ended", ""))


def wait_for(heard, event):
    end = time.monotonic() + SLOW_S
    while True:
        name, data = heard.get(timeout=max(0.1, end - time.monotonic()))
        if name == event:
            return data


def test_all_tabs_hear_of_a_change_and_streams_end_with_the_server(place):
    with ExitStack() as stack:
        page = stack.enter_context(serving(place))
        visitor = stack.enter_context(page.browser(limits=httpx.Limits(max_connections=20)))
        tabs = []
        for _ in range(8):
            heard, ready = Queue(), threading.Event()
            threading.Thread(target=follow, args=(visitor, heard, ready), daemon=True).start()
            assert ready.wait(SLOW_S)
            tabs.append(heard)
        assert visitor.get("/").status_code == 200  # pages are answered beside eight streams
        with holdfast.open(place) as store, store.agent("two") as agent:
            agent.checkpoint("second")
        for heard in tabs:
            assert "two" in wait_for(heard, "changed")["agents"]
        page.process.terminate()
        assert page.process.wait(SLOW_S) == 0
        for heard in tabs:
            wait_for(heard, "ended")


def test_a_page_shows_an_agent_that_is_running_and_does_not_take_it_over(place):
    with serving(place) as page, page.browser() as visitor, holdfast.open(place) as store:
        with closing(store.agent("one")) as agent:
            (line,) = [one for one in visitor.get("/api/agents").json()["agents"] if one["name"] == "one"]
            assert line["status"] == "open"
            assert line["writer"]["branch"] == "main"
            agent.state["still"] = "mine"
            agent.checkpoint("while it was watched")
            assert "while it was watched" in visitor.get("/").text
        (line,) = [one for one in visitor.get("/api/agents").json()["agents"] if one["name"] == "one"]
        assert (line["status"], line["writer"]) == ("idle", None)


def test_two_people_look_at_once(place):
    with serving(place) as page, page.browser() as one, page.browser() as other:
        assert dict(one.cookies) != dict(other.cookies)
        answers = []
        threads = [
            threading.Thread(target=lambda who=who: answers.append([who.get("/").status_code for _ in range(10)]))
            for who in (one, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [[200] * 10] * 2


def test_an_error_that_nobody_expects_is_told_and_does_not_end_the_news(place, monkeypatch):
    monkeypatch.setattr(live, "EVERY_S", 0.01)

    class Failing(Place):
        async def ask(self, question):
            if watching.polls == 1:
                raise ZeroDivisionError
            return await super().ask(question)

    async def heard():
        stream = watching.stream()
        try:
            return [await asyncio.wait_for(anext(stream), SLOW_S) for _ in range(3)]
        finally:
            await stream.aclose()

    store = Failing(str(place))
    watching = live.Live(store)
    hello, trouble, changed = asyncio.run(heard())
    store.close()
    assert "event: hello" in hello
    assert "event: trouble" in trouble
    assert "ZeroDivisionError" in trouble
    assert '"all": true' in changed
