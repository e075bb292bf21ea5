"""The views of an agent in a real browser: they render, shut nobody out, and are used by keyboard; text is text."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import holdfast
from holdfast.web.dumps import SAID
from tests import warm
from tests.conftest import from_outside_nothing
from tests.web.conftest import SLOW_S, chromium, serving
from tests.web.test_browser import assert_open_to_all, browser, inside, listening  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

OF_ONE = ("timeline", "state", "diff", "runs", "history", "back", "why")
VIEWS = (
    *(f"/{view}/trip-7" for view in OF_ONE),
    *(f"/{view}/hostile" for view in ("timeline", "state", "diff")),
    "/back/trip-7?to=asked",
    "/conversation/hostile?path=state.messages",
    "/conversation/trip-7?path=state.messages",
    "/runs/trip-8",
    "/dumps",
    "/dumps?q=nothing",
    "/state/nobody",
)
BEHIND = """found => {
  const [one, other] = found.map(what => [...document.querySelectorAll(what)].at(-1)?.getBoundingClientRect().x);
  return one > other;
}"""
ASKED = {
    "blame": "path=budget", "bisect": "when=budget < 500", "check": "rules=budget > 500",
    "drift": "baseline=baseline&paths=budget", "explain": "check=budget > 500",
}  # fmt: skip


def deep(tab, served):
    """Pages that others lead to, and whose addresses have ids: of a run, and of a dump with what is open in it."""

    def told(address):
        return tab.request.get(f"{served.url}/api{address}").json()

    (run,) = told("/runs/trip-7")["runs"]
    file = told("/dumps")["groups"][0]["dumps"][0]["file"]
    stack = told(f"/dump?file={file}")["stacks"][0]["stack"]
    frames = told(f"/dump?file={file}&stack={stack}")["stack"]["frames"]
    value = next(one[2] for frame in frames for one in frame["locals"] if one[2] is not None)
    return f"/run/trip-7?id={run['id']}", f"/dump?file={file}&stack={stack}&object={value}"


@pytest.mark.parametrize("size", [(1280, 800, "light"), (400, 800, "dark")], ids=["wide-light", "narrow-dark"])
def test_every_view_of_an_agent_renders_and_shuts_nobody_out(browser, served, size):  # noqa: F811
    width, height, scheme = size
    options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    questions = [f"/why/trip-7?ask={kind}&{fields}" for kind, fields in ASKED.items()]
    with inside(browser, served, **options) as (_, tab):
        for address in (*VIEWS, *deep(tab, served), *questions):
            with listening(tab, expected=["404"] if "nobody" in address else []):
                tab.goto(served.url + address)
                drawn = {"timeline": ".chart", "state": "[role=treeitem]"}.get(address.split("/")[1], "h1")
                drawn = "h1" if "nobody" in address else "#answer[data-state=done]" if "?ask" in address else drawn
                tab.wait_for_selector(drawn, timeout=SLOW_S * 1e3)
            assert_open_to_all(tab, address)


def test_a_history_is_walked_by_keyboard(browser, served):  # noqa: F811
    with inside(browser, served) as (_, tab), listening(tab):
        tab.goto(f"{served.url}/timeline/trip-7")
        tab.wait_for_selector(".mark.bad")  # the call that is in doubt
        assert tab.locator(".node").count() == 14
        assert tab.locator(".rollback").count() == 1
        assert tab.locator(".line.abandoned").count() >= 2
        tab.locator(".node[tabindex='0']").focus()
        assert "hostel chosen" in tab.evaluate("document.activeElement.getAttribute('aria-label')")
        tab.keyboard.press("ArrowLeft")
        tab.keyboard.press("ArrowLeft")
        assert "asked" in tab.evaluate("document.activeElement.getAttribute('aria-label')")
        tab.wait_for_selector(".graph-card .change")
        assert "messages[1]" in tab.inner_text(".graph-card")
        before = tab.locator(".graph-scroll svg").first.bounding_box()["width"]
        tab.keyboard.press("+")
        assert tab.locator(".graph-scroll svg").first.bounding_box()["width"] > before
        tab.keyboard.press("Enter")
        tab.wait_for_url("**/state/trip-7?at=id**")
        assert "asked" in tab.inner_text("h2 >> nth=0")
        tab.goto(f"{served.url}/timeline/trip-7")
        tab.locator(".mark.write").first.click()
        tab.wait_for_url("**/run/trip-7?**call=**")
        assert "book_hotel" in tab.inner_text("details[open] summary")
        tab.goto(f"{served.url}/timeline/hostile")
        tab.locator(".node[tabindex='0']").focus()
        assert "suspect" in tab.evaluate("document.activeElement.getAttribute('aria-label')")
        tab.wait_for_selector(".graph-card .bad:has-text('suspect')")


def test_a_crash_stands_where_it_happened_and_leads_to_its_dump(browser, tmp_path):  # noqa: F811
    program, place = tmp_path / "program.py", tmp_path / "store"
    paid = "import holdfast\n\npay = holdfast.tool(name='pay')(lambda: 7)\n"
    program.write_text(f"{paid}\ndef divide(agent):\n    agent.checkpoint('about to')\n    pay()\n    1 / 0\n")
    with from_outside_nothing():
        words = ["run", f"{program}:divide", "--agent", "one", "--store", str(place)]
        ended = warm.run([sys.executable, "-m", "holdfast", *words], capture_output=True, text=True, check=False)
    assert "dump written" in ended.stderr
    with from_outside_nothing(), serving(place) as page, inside(browser, page) as (_, tab), listening(tab):
        tab.goto(f"{page.url}/timeline/one")
        tab.wait_for_function(BEHIND, arg=[".mark.write", ".node"])
        tab.wait_for_selector(".chart")
        tab.locator(".node").last.focus()
        tab.wait_for_selector(".graph-card:has-text('then pay: done')")
        tab.locator("a:has(.crash)").click()
        tab.wait_for_url("**/dump?file=**")
        assert "ZeroDivisionError" in tab.inner_text("h1")
        assert "1 / 0" in tab.inner_text(".frames .source >> nth=0")


def test_a_state_is_opened_place_by_place(browser, served):  # noqa: F811
    with inside(browser, served) as (_, tab), listening(tab):
        tab.goto(f"{served.url}/state/hostile")
        tab.get_by_role("treeitem", name="notes").focus()
        tab.keyboard.press("ArrowRight")
        tab.wait_for_selector("[role=treeitem] [role=treeitem]")
        assert "<script>window.hit=1</script>" in tab.inner_text("#tree")
        assert "\\u202e" in tab.inner_text("#tree")
        tab.get_by_text("many", exact=True).click()
        tab.get_by_role("button", name="4,900 more items").click()
        tab.wait_for_selector("text=key 599")
        tab.get_by_text("huge", exact=True).click()
        tab.wait_for_selector("text=9,950,000 more characters")
        tab.get_by_role("searchbox").fill("onerror")
        tab.keyboard.press("Enter")
        tab.wait_for_selector(".hits li")
        assert tab.evaluate("window.hit") is None


@pytest.fixture(scope="module")
def changing(made, tmp_path_factory):
    """The sample with a run that failed and two that wait, and a page that lets people change it."""
    place = tmp_path_factory.mktemp("changing") / "store"
    shutil.copytree(made, place)

    @holdfast.durable(name="browser.fail")
    def fail(agent):
        raise ValueError("no such order")

    @holdfast.durable(name="browser.wait")
    def wait(agent):
        return agent.wait_for("go")

    with holdfast.open(place) as store:
        for name, function in (("failed", fail), ("told", wait), ("stopped", wait)):
            with store.agent(name, when=None) as agent, suppress(ValueError, holdfast.Waiting):
                agent.run(function.options(id="7", wait=False))
    with from_outside_nothing(), serving(place, "--allow-changes") as page:
        yield page


@pytest.fixture
def tab(browser, changing):  # noqa: F811
    with inside(browser, changing) as (_, tab), listening(tab):
        yield tab


def told(tab, address):
    """What the twin of a page says now."""
    return tab.request.get(f"{'/'.join(tab.url.split('/')[:3])}/api{address}").json()


def test_somebody_decides_what_became_of_a_call_and_goes_back(tab, changing):
    tab.goto(f"{changing.url}/runs/trip-7")
    tab.get_by_text("Decide what became of it").click()
    assert_open_to_all(tab, "deciding")
    tab.get_by_label("did not happen").check()
    tab.get_by_label("How do you know?").fill("it is not in the outbox")
    tab.get_by_role("button", name="Record it").click()
    tab.wait_for_selector("text=in doubt", state="detached")
    tab.goto(f"{changing.url}/back/trip-7?to=before the mistake")
    assert_open_to_all(tab, "going back")
    tab.get_by_label("Type trip-7 to do it").fill("trip-7")
    tab.get_by_role("button", name="Go back", exact=True).click()
    tab.wait_for_url("**/timeline/trip-7")
    newest = next(one for one in told(tab, "/timeline/trip-7")["checkpoints"] if "main" in one["heads"])
    assert newest["label"] == "before the mistake"
    assert {one["what"] for one in told(tab, "/history/trip-7")["events"]} >= {"decision", "rollback"}


def test_somebody_edits_a_value_on_a_new_branch(tab, changing):
    tab.goto(f"{changing.url}/state/trip-7?at=asked")
    tab.get_by_role("treeitem", name="budget").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "edit"
    tab.keyboard.press("Enter")
    assert_open_to_all(tab, "editing")
    tab.get_by_label("Value, as JSON").fill("1234")
    tab.get_by_role("textbox", name="New branch").fill("richer")
    tab.get_by_role("button", name="Save on the branch").click()
    tab.wait_for_url("**/diff/trip-7**")
    assert "1234" in tab.inner_text("#diff")
    assert "richer" in told(tab, "/timeline/trip-7")["branches"]


def test_somebody_signals_resumes_and_cancels_runs(tab, changing):
    def of(agent):
        return told(tab, f"/run/{agent}?id=7")

    tab.goto(f"{changing.url}/run/told?id=7")
    assert_open_to_all(tab, "a run that waits")
    tab.get_by_label("with the value").fill('"yes"')
    tab.get_by_role("button", name="Send").click()
    tab.wait_for_url("**/run/told?id=7**")
    assert [(one["name"], one["value"]) for one in of("told")["signals"]] == [("go", "yes")]
    tab.goto(f"{changing.url}/runs/told")
    tab.get_by_label("Send, to whichever run asks next, the signal").fill("later")
    tab.get_by_role("button", name="Send").click()
    tab.wait_for_selector("td:has-text('later')")
    tab.goto(f"{changing.url}/run/failed?id=7")
    tab.get_by_role("button", name="Resume it").click()
    tab.wait_for_selector("text=It waits for a worker")
    assert (of("failed")["run"]["status"], of("failed")["left"]) == ("interrupted", True)
    tab.goto(f"{changing.url}/history/failed")
    tab.locator("tr", has_text="resumed").get_by_role("link", name="7").click()
    tab.wait_for_url("**/run/failed?id=7**")
    tab.goto(f"{changing.url}/run/stopped?id=7")
    tab.get_by_role("button", name="Cancel it").click()
    tab.wait_for_selector(".status[data-status=cancelled]")
    assert of("stopped")["run"]["status"] == "cancelled"


def test_what_was_typed_is_there_after_a_refusal(browser, changing):  # noqa: F811
    with inside(browser, changing) as (_, tab), listening(tab, expected=["400 (Bad Request)"]):
        tab.goto(f"{changing.url}/runs/trip-8")
        tab.get_by_label("with the value").fill("yes")
        tab.get_by_label("Send, to whichever run asks next, the signal").fill("approved")
        tab.keyboard.press("Enter")
        tab.wait_for_selector("text=the value is not JSON")
        assert_open_to_all(tab, "a refusal")
        tab.go_back()
        tab.wait_for_function("document.getElementById('s-value').value === 'yes'")


def test_somebody_forks_a_run_from_a_call(tab, changing):
    (run,) = told(tab, "/runs/trip-7")["runs"]
    tab.goto(f"{changing.url}/run/trip-7?id={run['id']}")
    tab.locator("summary", has_text="book_flight").click()
    tab.get_by_label("Execute it once more from here on, on branch").locator("visible=true").fill("again")
    tab.get_by_role("button", name="Fork").locator("visible=true").click()
    tab.wait_for_url("**/run/trip-7?**branch=again**")
    forked = told(tab, f"/run/trip-7?id={tab.url.split('id=')[1].split('&')[0]}&branch=again")
    assert [one["tool"] for one in forked["effects"]] == ["search_flights"]


def test_somebody_names_points(tab, changing):
    tab.goto(f"{changing.url}/back/trip-8")
    tab.get_by_label("New branch").fill("elsewhere")
    tab.get_by_role("button", name="Begin").click()
    tab.wait_for_selector("th:has-text('elsewhere')")
    tab.get_by_label("Tag", exact=True).fill("kept")
    tab.get_by_role("button", name="Set").click()
    tab.wait_for_selector("th:has-text('kept')")
    tab.get_by_role("link", name="compare").click()
    tab.wait_for_url("**/diff/trip-8**")
    assert "elsewhere" in told(tab, "/timeline/trip-8")["branches"]
    tab.goto(f"{changing.url}/back/trip-8")
    tab.get_by_role("button", name="remove").click()
    tab.wait_for_selector("th:has-text('kept')", state="detached")


def test_a_cause_is_marked_as_resolved_and_comes_back(tab, changing):
    tab.goto(f"{changing.url}/dumps?q=ZeroDivisionError")
    assert_open_to_all(tab, "causes")
    tab.get_by_label("What was done about it").fill("guests are counted now")
    tab.get_by_role("button", name="Mark as resolved").click()
    tab.wait_for_selector(".badge.good:has-text('resolved')")
    assert "guests are counted now" in tab.inner_text(".cause:has-text('ZeroDivisionError')")
    said = Path(changing.place, "dumps", SAID)
    said.write_text(json.dumps(json.loads(said.read_text()) | {"at": "2020-01-01T00:00:00+00:00"}))
    tab.goto(f"{changing.url}/dumps?q=ZeroDivisionError")
    assert tab.locator(".badge:has-text('came back')").count() == 1


def test_a_diff_stands_side_by_side_until_somebody_chooses_otherwise(browser, served):  # noqa: F811
    with inside(browser, served) as (_, tab), listening(tab):
        address = f"{served.url}/diff/trip-7?old=before the mistake&new=answer corrected"
        tab.goto(address)
        tab.get_by_label("Side by side").check()
        assert tab.locator(".beside").first.is_visible()
        assert not tab.locator(".hunk .inline").first.is_visible()
        assert "182" in tab.inner_text(".side.old del >> nth=0")
        assert "189" in tab.inner_text(".side.new ins >> nth=0")
        assert_open_to_all(tab, "side by side")
        tab.goto(address)
        assert tab.locator(".beside").first.is_visible()
        tab.get_by_label("Inline").check()
        assert tab.locator(".hunk .inline").first.is_visible()


def test_a_question_is_asked_and_its_answer_leads_on(browser, served):  # noqa: F811
    with inside(browser, served) as (_, tab), listening(tab):
        tab.goto(f"{served.url}/why/trip-7")
        tab.get_by_text("Which checkpoint broke it?").click()
        tab.get_by_label("It is bad where").fill("budget < 500")
        tab.locator("details[open] >> text=Ask").last.click()
        tab.wait_for_selector("#answer h2:has-text('First bad')", timeout=SLOW_S * 1e3)
        tab.get_by_role("link", name="compare the two").click()
        tab.wait_for_url("**/diff/trip-7**")
        tab.get_by_role("link", name="who changed it").first.click()
        tab.wait_for_selector("#answer h2:has-text('was changed by')", timeout=SLOW_S * 1e3)
        tab.goto(f"{served.url}/why/trip-7?ask=check&rules=open('x')")
        tab.wait_for_selector("#answer:has-text('not part of the language')", timeout=SLOW_S * 1e3)


@contextmanager
def held(server):
    """The next process that the page starts for a question stands still meanwhile."""

    def hold():
        while not over.wait(0.005):
            for one in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended
                    parent = (one / "stat").read_text().rpartition(")")[2].split()[1]
                    if parent == str(server) and b"holdfast.web.question" in (one / "cmdline").read_bytes():
                        os.kill(int(one.name), signal.SIGSTOP)
                        caught.append(int(one.name))
                        return

    caught, over = [], threading.Event()
    holding = threading.Thread(target=hold)
    holding.start()
    try:
        yield
        holding.join(SLOW_S)
    finally:
        over.set()
        for child in caught:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)


def test_a_question_that_takes_long_says_so_until_its_answer_is_there_or_it_is_cancelled(browser, served):  # noqa: F811
    with inside(browser, served) as (_, tab), listening(tab):
        with held(served.process.pid):
            tab.goto(f"{served.url}/why/trip-7?ask=bisect&when=budget < 501")
            tab.wait_for_selector("#progress")
            assert_open_to_all(tab, "a question that takes long")
        tab.wait_for_selector("#answer h2:has-text('First bad')", timeout=SLOW_S * 1e3)
        with held(served.process.pid):
            tab.goto(f"{served.url}/why/trip-7?ask=bisect&when=budget < 502")
            tab.wait_for_selector("#progress")
            tab.get_by_role("link", name="Cancel").click()
            tab.wait_for_selector("#answer:has-text('it was cancelled')", timeout=SLOW_S * 1e3)


def test_an_exported_history_is_read_from_disk(browser, made, tmp_path):  # noqa: F811
    for name in ("trip-7", "hostile"):
        file = tmp_path / f"{name}.html"
        words = ["ui", "--export", str(file), "--agent", name, "--store", str(made)]
        warm.run([sys.executable, "-m", "holdfast", *words], check=True, stdout=subprocess.DEVNULL)
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.stat().st_size < 1 << 20
        assert file.read_text().count("<script") == 2  # data, and one classic script
        context = browser.new_context()
        tab = context.new_page()
        said = []
        tab.on("console", lambda one, said=said: said.append(one.text))
        tab.on("pageerror", lambda one, said=said: said.append(str(one)))
        tab.on("request", lambda one, said=said: said.append(one.url) if not one.url.startswith("file:") else None)
        tab.goto(file.as_uri())
        tab.wait_for_selector(".chart")
        tab.locator(".node").first.click()
        label = {"trip-7": "began", "hostile": "<script>"}[name]
        tab.wait_for_selector(f"#chosen h2:has-text('{label}')")
        assert not said
        assert_open_to_all(tab, name)
        context.close()
