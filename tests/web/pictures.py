"""`make screenshots`: the pictures of the page for README and docs, of a store that is made for them.

What changes from run to run is put right in the browser before a picture is taken: ids, ages, process numbers, the
store's folder. Fonts are those of the machine; with Debian's ``fonts-inter`` they look as they do in the docs.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from playwright.sync_api import sync_playwright

import holdfast
from tests.web import sample
from tests.web.conftest import chromium, serving

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES = {
    "agents": "/", "timeline": "/timeline/trip-7", "state": "/state/trip-7",
    "diff": "/diff/trip-7?old=baseline&new=main", "runs": "/runs/trip-7", "back": "/back/trip-7?to=asked",
    "dumps": "/dumps", "why": "/why/trip-7?ask=bisect&when=budget < 500", "health": "/health",
}  # fmt: skip
FIXED = """() => {
  const ids = new Map();
  const ages = ["just now", "12 s ago", "40 s ago", "1 min ago", "2 min ago", "3 min ago", "5 min ago", "8 min ago"];
  const spans = ["52.3 ms", "31.8 ms", "24.1 ms"];
  let [age, span] = [0, 0];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    node.nodeValue = node.nodeValue
      .replace(/\\b(?=[0-9a-f]*[0-9])[0-9a-f]{12,64}\\b/g, (id) => {
        if (!ids.has(id)) ids.set(id, (0x3f2a7c81d59b + ids.size * 0x1d3b5f7a91c3).toString(16).slice(-12));
        return ids.get(id).repeat(6).slice(0, id.length);
      })
      .replace(/just now|\\b\\d+ (s|min|h) ago/g, () => ages[Math.min(Math.floor(age++ / 3), ages.length - 1)])
      .replace(/\\b[\\d.]+ (ms|µs)/g, () => spans[span++ % spans.length])
      .replace(/\\b[\\d.]+ GiB/g, "71.6 GiB")
      .replace(/process \\d+/g, "process 4711")
      .replace(/\\/tmp\\/[\\w\\/-]+\\/\\.holdfast/g, "/home/me/trips/.holdfast");
  }
}"""


def fleet(place: Path) -> None:
    """Some more agents, in different states."""

    @holdfast.tool
    def charge(order: int) -> int:
        return order

    @holdfast.tool
    def ship(order: int) -> int:
        raise TimeoutError("the carrier did not answer in time")

    @holdfast.durable
    def checkout(agent: holdfast.Agent, order: int) -> int:
        agent.state["order"] = order
        charge(order)
        if order % 9 == 0:
            ship(order)
        if order % 4 == 0:
            agent.wait_for("approved by a person")
        return order

    with holdfast.open(place) as store:
        for order in range(1017, 1031):
            with store.agent(f"checkout/order-{order}", when=None) as agent:
                agent.state["cart"] = [{"item": "boots", "price": 80 + order % 40}]
                agent.checkpoint("cart filled")
                if order % 5 != 1:
                    with suppress(Exception, holdfast.Waiting):
                        agent.run(checkout.options(wait=False), order)


def crawl(place: Path, told: Connection) -> None:
    """An agent in the middle of a call."""

    @holdfast.tool
    def read_pages() -> None:
        holdfast.effect().progress("12 of 240 pages")
        told.send_bytes(b"at it")
        time.sleep(3600)

    @holdfast.durable
    def research(agent: holdfast.Agent) -> None:
        agent.checkpoint("sources chosen")
        read_pages()

    with holdfast.open(place) as store, store.agent("research-1", when=None) as agent:
        agent.run(research)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        place = Path(folder, ".holdfast")
        sample.make(str(place))
        fleet(place)
        context = multiprocessing.get_context("fork")
        heard, told = context.Pipe(duplex=False)
        working = context.Process(target=crawl, args=(place, told), daemon=True)
        working.start()
        ends.callback(working.kill)
        heard.recv_bytes()
        playwright = ends.enter_context(sync_playwright())
        browser = playwright.chromium.launch(
            executable_path=chromium(),
            args=["--no-sandbox", "--font-render-hinting=none", "--force-color-profile=srgb"],
        )
        with serving(place) as page:
            context = browser.new_context(viewport={"width": 1280, "height": 760}, color_scheme="light")
            tab = context.new_page()
            tab.goto(page.file.as_uri())
            tab.wait_for_selector("h1")
            for name, address in PICTURES.items():
                if names and name not in names:
                    continue
                tab.goto(page.url + address)
                tab.wait_for_selector("h1" if "?ask" not in address else "#answer[data-state=done]")
                tab.wait_for_timeout(700)  # for what scripts draw
                tab.evaluate(FIXED)
                tab.screenshot(path=IMAGES / f"page-{name}.png")
                print(f"docs/images/page-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
