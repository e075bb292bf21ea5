"""The page in a real browser: every view renders without a complaint, is live, and shuts nobody out."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager

import httpx
import pytest

import holdfast
from holdfast.web import live
from tests.web.conftest import SLOW_S, chromium, serving

VIEWS = ("/", "/?status=failed", "/?q=nobody", "/health", "/nowhere")  # test_views_browser.py has those of an agent
SERIOUS = ["serious", "critical"]
# What else axe has to tell would take as long to come here as all of its work.
FAULTS = """async serious => (await axe.run({ resultTypes: ["violations"] })).violations
  .filter(one => serious.includes(one.impact)).map(one => [one.id, one.nodes[0].html])"""

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with driver.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        yield found
        found.close()


@contextmanager
def inside(browser, page, **options):
    """A browser that was let in as a person is: by the file."""
    context = browser.new_context(**options)
    try:
        tab = context.new_page()
        tab.goto(page.file.as_uri())
        tab.wait_for_selector("h1", timeout=SLOW_S * 1e3)
        yield context, tab
    finally:
        context.close()


@contextmanager
def listening(tab, *, expected=()):
    """No error reaches the console meanwhile, and nothing is asked of another server."""
    said, asked = [], []
    tab.on("console", lambda one: said.append(one.text) if one.type in {"error", "warning"} else None)
    tab.on("pageerror", lambda one: said.append(str(one)))
    tab.on("request", lambda one: asked.append(one.url))
    yield
    tab.wait_for_load_state("load")
    assert not [one for one in said if not any(word in one for word in expected)]
    origin = "/".join(tab.url.split("/")[:3])
    assert not [url for url in asked if not url.startswith(origin)]


def assert_open_to_all(tab, about):
    """A page shuts nobody out, as far as axe-core can tell, and is as wide as the screen."""
    from axe_playwright_python.sync_playwright import Axe

    assert tab.locator("h1").count() == 1, about
    assert tab.evaluate("window.hit") is None, about
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), about
    tab.evaluate(Axe().axe_script)
    assert not tab.evaluate(FAULTS, SERIOUS), about


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_every_view_renders_and_shuts_nobody_out(browser, served, width, scheme):
    with inside(browser, served, viewport={"width": width, "height": 800}, color_scheme=scheme) as (_, tab):
        for address in VIEWS:
            with listening(tab, expected=["404"] if address == "/nowhere" else []):
                tab.goto(served.url + address)
            assert_open_to_all(tab, address)


def test_a_change_is_there_without_reloading_in_every_one_of_eight_tabs(browser, tmp_path):
    place = tmp_path / "store"
    with holdfast.open(place) as store, store.agent("one") as agent:
        agent.checkpoint("first")
    with serving(place) as page, inside(browser, page) as (context, first):
        tabs = [first, *(context.new_page() for _ in range(7))]
        for tab in tabs:
            tab.goto(page.url)
        tabs[-1].wait_for_selector("#live[data-state=on]", timeout=SLOW_S * 1e3)
        with holdfast.open(place) as store, store.agent("one") as agent:
            agent.checkpoint("seen everywhere")
        for tab in tabs:
            tab.wait_for_selector("text=seen everywhere", timeout=SLOW_S * 1e3)


def test_a_tab_for_which_there_is_no_place_says_why_and_is_live_when_there_is_one(browser, tmp_path):
    place = tmp_path / "store"
    holdfast.open(place).close()
    with serving(place) as page, inside(browser, page) as (_, tab), ExitStack() as others:
        tab.goto("about:blank")  # it had a place
        client = others.enter_context(page.browser(limits=httpx.Limits(max_connections=1000)))
        told = []  # an iterator that is let go ends its stream
        while len(told) < live.STREAMS_MOST:
            one = others.enter_context(client.stream("GET", "/events")).iter_raw()
            told += [one] if b"hello" in next(one) else []
        tab.goto(page.url)
        sign = tab.wait_for_selector("#live[data-state=full]", timeout=SLOW_S * 1e3)
        assert sign.text_content() == "Not live: too many tabs"
        assert "64 browsers are told" in sign.get_attribute("title")
        others.close()
        tab.wait_for_selector("#live[data-state=on]", timeout=SLOW_S * 1e3)


def test_what_somebody_has_opened_or_enlarged_stays_so_while_the_agent_goes_on(browser, tmp_path):
    def renewed(tab, part):
        """Let something happen, until the part was replaced."""
        tab.wait_for_selector("#live[data-state=on]", timeout=SLOW_S * 1e3)
        tab.evaluate(f"document.querySelector('{part}').classList.add('before')")
        agent.checkpoint("went on")
        tab.wait_for_selector(f"{part}:not(.before)", timeout=SLOW_S * 1e3)

    @holdfast.tool(name="browser.look", effect="read")
    def look(at):
        return at

    place = tmp_path / "store"
    with holdfast.open(place) as store, store.agent("one", when=None) as agent:
        agent.run(holdfast.durable(name="browser.looks")(lambda agent: [look(1), look(2)]).options(id="7"))
        with serving(place) as page, inside(browser, page) as (_, tab), listening(tab):
            tab.goto(f"{page.url}/run/one?id=7")
            tab.locator("summary", has_text="at=2").click()
            renewed(tab, "[data-part=run]")
            assert [one.get_attribute("open") for one in tab.locator("details").all()] == [None, ""]
            tab.goto(f"{page.url}/timeline/one")
            tab.get_by_role("button", name="Larger").click()
            step = tab.evaluate("document.querySelectorAll('.node circle.dot')[1].cx.baseVal.value")
            renewed(tab, "[data-part=graph]")
            assert tab.evaluate("document.querySelectorAll('.node circle.dot')[1].cx.baseVal.value") == step


def test_ages_grow_while_nothing_happens(browser, tmp_path):
    place = tmp_path / "store"
    with holdfast.open(place) as store, store.agent("silent") as agent:
        agent.checkpoint("the last one")
        with serving(place) as page, inside(browser, page) as (_, tab):
            tab.clock.install()
            tab.goto(page.url)
            tab.clock.fast_forward("06:00")
            tab.locator(".beat time", has_text="6 min ago").wait_for(timeout=SLOW_S * 1e3)


def test_the_list_is_used_by_keyboard_alone(browser, served):
    with inside(browser, served) as (_, tab):
        tab.goto(served.url)
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.className") == "skip"
        tab.get_by_role("searchbox").focus()
        tab.keyboard.type("trip-7")
        tab.keyboard.press("Enter")
        tab.wait_for_url("**/?q=trip-7")
        assert tab.get_by_role("row").count() == 2
        tab.get_by_role("link", name="Heartbeat").focus()
        tab.keyboard.press("Enter")
        tab.wait_for_url("**sort=oldest**")  # it was the newest first


def test_a_tab_that_nobody_looks_at_holds_no_stream(browser, served):
    def look(hidden):
        tab.evaluate(
            "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
            " document.dispatchEvent(new Event('visibilitychange')); }",
            hidden,
        )

    def stream(request):
        return request.url.endswith("/events")

    with inside(browser, served) as (_, tab):
        tab.wait_for_selector("#live[data-state=on]", timeout=SLOW_S * 1e3)
        with tab.expect_event("requestfailed", stream, timeout=SLOW_S * 1e3):
            look(hidden=True)
        with tab.expect_request(stream, timeout=SLOW_S * 1e3):
            look(hidden=False)
