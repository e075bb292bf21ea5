"""The views of an agent in a real browser: they render, shut nobody out, and are used by keyboard; text is text."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

import holdfast
from tests import warm
from tests.web.conftest import SLOW_S, chromium, serving
from tests.web.test_browser import SERIOUS, browser, inside, listening  # noqa: F401 - a fixture

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
    "/dumps",
)
# What examines a page takes longer than the page does. The rest is made of the same parts.
EXAMINED = {"light": {*VIEWS[:7], "/dumps"}, "dark": {"/timeline/trip-7", "/diff/trip-7", "/runs/trip-7"}}


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
    from axe_playwright_python.sync_playwright import Axe

    width, height, scheme = size
    options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    with inside(browser, served, **options) as (_, tab):
        for address in (*VIEWS, *deep(tab, served)):
            with listening(tab):
                assert tab.goto(served.url + address).status == 200, address
                drawn = {"timeline": ".chart", "state": "[role=treeitem]"}.get(address.split("/")[1], "h1")
                tab.wait_for_selector(drawn, timeout=SLOW_S * 1e3)
            assert tab.locator("h1").count() == 1, address
            assert tab.evaluate("window.hit") is None, address
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
            if address in VIEWS and address not in EXAMINED[scheme]:
                continue
            found = Axe().run(tab).response["violations"]
            assert not [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in SERIOUS], address


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


def test_a_state_is_opened_place_by_place(browser, served):  # noqa: F811
    with inside(browser, served) as (_, tab), listening(tab):
        tab.goto(f"{served.url}/state/hostile")
        tab.get_by_role("treeitem", name="notes").focus()
        tab.keyboard.press("ArrowRight")
        tab.wait_for_selector("[role=treeitem] [role=treeitem]")
        assert "<script>window.hit=1</script>" in tab.inner_text("#tree")
        assert "\\u{202e}" in tab.inner_text("#tree")
        tab.get_by_text("many", exact=True).click()
        tab.get_by_role("button", name="4,900 more items").click()
        tab.wait_for_selector("text=key 599")
        tab.get_by_text("huge", exact=True).click()
        tab.wait_for_selector("text=9,950,000 more characters")
        tab.get_by_role("searchbox").fill("onerror")
        tab.keyboard.press("Enter")
        tab.wait_for_selector(".hits li")
        assert tab.evaluate("window.hit") is None


def test_somebody_puts_things_right(browser, made, tmp_path):  # noqa: F811
    shutil.copytree(made, tmp_path / "store")
    with serving(tmp_path / "store", "--allow-changes") as page, inside(browser, page) as (_, tab), listening(tab):
        tab.goto(f"{page.url}/runs/trip-7")
        tab.get_by_text("Decide what became of it").click()
        tab.get_by_label("did not happen").check()
        tab.get_by_label("How do you know?").fill("it is not in the outbox")
        tab.get_by_role("button", name="Record it").click()
        tab.wait_for_selector("text=in doubt", state="detached")
        tab.goto(f"{page.url}/back/trip-7?to=before the mistake")
        tab.get_by_label("Type trip-7 to do it").fill("trip-7")
        tab.get_by_role("button", name="Go back", exact=True).click()
        tab.wait_for_url("**/timeline/trip-7")
        tab.goto(f"{page.url}/state/trip-7")
        tab.get_by_role("treeitem", name="budget").hover()
        tab.get_by_role("button", name="edit").first.click()
        tab.get_by_label("Value, as JSON").fill("1234")
        tab.get_by_role("textbox", name="New branch").fill("richer")
        tab.get_by_role("button", name="Save on the branch").click()
        tab.wait_for_url("**/diff/trip-7**")
        assert "1234" in tab.inner_text("#diff")
    with holdfast.open(tmp_path / "store", create=False, readonly=True, inert=True) as store:
        agent = store.agent("trip-7", create=False, readonly=True)
        assert agent.head.label == "before the mistake"
        assert {one["what"] for one in agent.events()} >= {"decision", "rollback"}
        assert store.agent("trip-7", branch="richer", create=False, readonly=True).state["budget"] == 1234


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
        assert tab.evaluate("window.hit") is None
        assert not said
        context.close()
