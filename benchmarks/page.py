"""How quick the page is over large stores. See --help.

Three stores: one with many agents, one with an agent that has many checkpoints, one with a state of 100 MB. Over each
`holdfast ui` is started as a program, warmed up with one request for each address, and then asked 100 times for each,
one after another. Prints a table with the medians, the 95th percentiles and the most memory that the server had, and
writes JSON. The first request for an address, which a cold server answers, is in the JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from conditions import conditions, keep
from rich.console import Console
from rich.table import Table

import holdfast

ROOT = Path(__file__).resolve().parent.parent
REQUESTS = 100
MOST_S, MOST_BYTES = 0.300, 300 * 10**6
FIRST = {("fleet", "/"), ("long", "/"), ("long", "/timeline/long"), ("long", "/state/long"), ("large", "/state/large")}
"""What people come to first; the target is theirs."""
FLEET = (
    "/", "/?sort=name&page=100", "/?sort=status", "/?sort=checkpoints", "/?q=-77", "/?status=waiting", "/api/agents",
    "/health",
)  # fmt: skip
LONG = ("/", "/health", "/timeline/long", "/state/long", "/runs/long")
LARGE = (
    "/", "/state/large", "/timeline/large", "/diff/large", "/api/items/large?path=messages",
    "/api/items/large?path=messages&from=50000", "/api/items/large?path=messages%5B777%5D",
    "/api/items/large?path=files", "/api/text/large?path=report&from=9000000", "/conversation/large?path=messages",
    "/api/search/large?q=needle+in+a+message", "/api/search/large?q=not+there",
)  # fmt: skip


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"environment": conditions(agents=options.agents, checkpoints=options.checkpoints)}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="page-") as name, console.status("") as status:
        for what, make, number, addresses in (
            ("fleet", fleet, options.agents, FLEET),
            ("long", long, options.checkpoints, LONG),
            ("large", large, options.megabytes, LARGE),
        ):
            if options.only not in {None, what}:
                continue
            status.update(f"making the store: {what}")
            place = Path(name, what)
            make(place, number)
            status.update(f"asking: {what}")
            results[what] = measured(place, addresses)
    results["reached"] = show(results, console)
    if options.only is None:
        keep(results, ROOT / "benchmarks" / "results" / "page.json", console)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--checkpoints", type=int, default=100_000)
    parser.add_argument("--megabytes", type=int, default=100, help="of the large state")
    parser.add_argument("--only", choices=("fleet", "long", "large"), help="one of the stores")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the stores go")
    return parser.parse_args()


def fleet(place: Path, number: int) -> None:
    """Agents with a few checkpoints each; every tenth has a run that waits."""

    @holdfast.durable
    def approve(agent: holdfast.Agent) -> Any:
        return agent.wait_for("approved")

    with holdfast.open(place, durability="batched") as store:
        for n in range(number):
            with store.agent(f"trip-{n}", when=None) as agent:
                agent.state["messages"] = [{"role": "user", "content": f"question {n}"}]
                agent.checkpoint("asked")
                if n % 10 == 0:
                    try:
                        agent.run(approve.options(wait=False))
                    except holdfast.Waiting:
                        continue


def long(place: Path, number: int) -> None:
    with holdfast.open(place, durability="batched") as store, store.agent("long", when=None) as agent:
        agent.state = {"budget": number, "messages": []}
        for n in range(number):
            agent.state["budget"] -= 1
            agent.checkpoint("" if n % 10 else f"round {n}")


def large(place: Path, megabytes: int) -> None:
    """A list of messages that has two thirds of it, a dictionary of files, and one long text."""
    with holdfast.open(place, durability="batched") as store, store.agent("large", when=None) as agent:
        dice, number = random.Random(7), megabytes * 700
        said = [dice.randbytes(450).hex() for _ in range(number)]
        agent.state = {
            "budget": 900.0,
            "messages": [
                {"role": "user" if n % 2 else "assistant", "content": f"{n} {said[n]}"} for n in range(number)
            ],
            "files": {f"file-{n}.txt": dice.randbytes(5_000).hex() for n in range(megabytes * 2)},
            "report": "All of it, in one text. " * (megabytes * 5_000),
        }
        agent.state["messages"][number // 2]["content"] = "the needle in a message"
        agent.checkpoint("read in")
        agent.state["messages"].append({"role": "user", "content": "and one more"})
        agent.checkpoint("one more")


def measured(place: Path, addresses: tuple[str, ...]) -> dict[str, Any]:
    words = [sys.executable, "-m", "holdfast", "ui", "--json", "--port", "0", "--store", str(place)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            said = json.loads(first_document(server))
            with httpx.Client(base_url=said["url"], timeout=60) as client:
                enter = re.search(r'href="([^"]+)"', Path(said["file"]).read_text(encoding="ascii"))
                client.get(enter[1] if enter else "")
                found = {address: asked(client, address) for address in addresses}
            return {"addresses": {one: times for one, times in found.items() if times}, "bytes": most_bytes(server.pid)}
        finally:
            server.terminate()


def first_document(server: subprocess.Popen[str]) -> str:
    text = ""
    for line in server.stdout or ():
        text += line
        if line == "}\n":
            break
    return text


def asked(client: httpx.Client, address: str) -> dict[str, float]:
    """Times of an address in seconds; nothing where there is no such page."""
    begun = time.perf_counter()
    first = client.get(address)
    cold_s = time.perf_counter() - begun
    if first.status_code == 404:
        return {}
    times = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        client.get(address).raise_for_status()
        times.append(time.perf_counter() - begun)
    cut = quantiles(times, n=20)
    return {"first_s": cold_s, "p50_s": cut[9], "p95_s": cut[18], "bytes": len(first.content)}


def most_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


def show(results: dict[str, Any], console: Console) -> bool:
    table = Table(title=f"The page, {REQUESTS} requests each", title_justify="left")
    for column in ("store", "address", "first", "p50", "p95", "answer"):
        table.add_column(column, justify="left" if column in {"store", "address"} else "right")
    reached = True
    for what in (one for one in ("fleet", "long", "large") if one in results):
        for address, times in results[what]["addresses"].items():
            late = times["p95_s"] > MOST_S
            reached &= not late or (what, address) not in FIRST
            cells = (*(f"{times[one] * 1e3:.0f} ms" for one in ("first_s", "p50_s", "p95_s")), f"{times['bytes']:,} B")
            table.add_row(what, address, *cells, style="red" if late else "")
        most = results[what]["bytes"]
        reached &= most <= MOST_BYTES
        table.add_row(what, "most memory", "", "", f"{most / 1e6:.0f} MB", "", style="red" if most > MOST_BYTES else "")
    console.print(table)
    console.print(
        f"Targets of first views: p95 below {MOST_S * 1e3:.0f} ms, memory below {MOST_BYTES / 1e6:.0f} MB: {reached}"
    )
    return reached


if __name__ == "__main__":
    main()
