"""How quick the page is over large stores. See --help.

Two stores: one with many agents, one with an agent that has many checkpoints. Over each `holdfast ui` is started as a
program, warmed up with one request for each address, and then asked 100 times for each, one after another. Prints a
table with the medians, the 95th percentiles and the most memory that the server had, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

import holdfast

ROOT = Path(__file__).resolve().parent.parent
REQUESTS = 100
MOST_S, MOST_BYTES = 0.300, 300 * 10**6
FIRST = {("fleet", "/"), ("long", "/"), ("long", "/timeline/long"), ("long", "/state/long")}
"""What people come to first; the target is theirs."""
FLEET = ("/", "/?sort=name&page=100", "/?q=-77", "/?status=waiting", "/api/agents", "/health")
LONG = ("/", "/health", "/timeline/long", "/state/long", "/runs/long")


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "environment": {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
            "agents": options.agents,
            "checkpoints": options.checkpoints,
            "load_before": os.getloadavg(),
        }
    }
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="page-") as name, console.status("") as status:
        for what, make, number, addresses in (
            ("fleet", fleet, options.agents, FLEET),
            ("long", long, options.checkpoints, LONG),
        ):
            status.update(f"making the store: {what}")
            place = Path(name, what)
            make(place, number)
            status.update(f"asking: {what}")
            results[what] = measured(place, addresses)
    results["environment"]["load_after"] = os.getloadavg()
    results["reached"] = show(results, console)
    file = ROOT / "benchmarks" / "results" / "page.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--checkpoints", type=int, default=100_000)
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
    first = client.get(address)
    if first.status_code == 404:
        return {}
    times = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        client.get(address).raise_for_status()
        times.append(time.perf_counter() - begun)
    cut = quantiles(times, n=20)
    return {"p50_s": cut[9], "p95_s": cut[18], "bytes": len(first.content)}


def most_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


def show(results: dict[str, Any], console: Console) -> bool:
    table = Table(title=f"The page, {REQUESTS} requests each", title_justify="left")
    for column in ("store", "address", "p50", "p95", "answer"):
        table.add_column(column, justify="left" if column in {"store", "address"} else "right")
    reached = True
    for what in ("fleet", "long"):
        for address, times in results[what]["addresses"].items():
            late = times["p95_s"] > MOST_S
            reached &= not late or (what, address) not in FIRST
            cells = (f"{times['p50_s'] * 1e3:.0f} ms", f"{times['p95_s'] * 1e3:.0f} ms", f"{times['bytes']:,} B")
            table.add_row(what, address, *cells, style="red" if late else "")
        most = results[what]["bytes"]
        reached &= most <= MOST_BYTES
        table.add_row(what, "most memory", "", f"{most / 1e6:.0f} MB", "", style="red" if most > MOST_BYTES else "")
    console.print(table)
    console.print(
        f"Targets of first views: p95 below {MOST_S * 1e3:.0f} ms, memory below {MOST_BYTES / 1e6:.0f} MB: {reached}"
    )
    return reached


if __name__ == "__main__":
    main()
