"""What campaigns found: the table at their end, and the figures in docs/reliability.md.

The page keeps its figures in a comment of its own, one JSON object per campaign, so that renewing some of them leaves
the others as they were. What stands before the first mark is written by people and is kept.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.faults.campaign import ROOT
from tests.faults.everything import CAMPAIGNS

PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- figures: written by `python -m tests.faults --report` -->"


@dataclass(frozen=True)
class Result:
    """One run of a campaign."""

    name: str
    tried: int
    found: list[str]
    seconds: float
    details: dict[str, int]
    skipped: str = ""

    @property
    def verdict(self) -> str:
        return "skipped" if self.skipped else f"{len(self.found)} broken" if self.found else "none"


def tell(console: Console, result: Result) -> None:
    """What one campaign found, as soon as it is over."""
    campaign = CAMPAIGNS[result.name]
    told = (
        f"skipped: {result.skipped}" if result.skipped else f"{result.tried:,} {campaign.unit}, {result.seconds:,.0f} s"
    )
    console.print(f"[bold]{result.name}[/] {campaign.title}: {told}", highlight=False)
    for text in result.found[:20]:
        console.print(f"  [red]broken[/] {text[:1_000]}", highlight=False, markup=True)


def table(results: list[Result]) -> Table:
    made = Table(title="Campaigns", title_justify="left")
    for name, justify in (
        ("campaign", "left"),
        ("what", "left"),
        ("tried", "right"),
        ("", "left"),
        ("promises broken", "left"),
        ("time", "right"),
    ):
        made.add_column(name, justify=justify)
    for result in results:
        campaign = CAMPAIGNS[result.name]
        colour = "yellow" if result.skipped else "red" if result.found else "green"
        made.add_row(
            result.name, campaign.title, f"{result.tried:,}", campaign.unit, f"[{colour}]{result.verdict}[/]",
            f"{result.seconds:,.0f} s",
        )  # fmt: skip
    return made


def write(results: list[Result]) -> None:
    """Renew the figures of these campaigns in the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, after = text.partition(BEGIN)
    known = {entry["name"]: entry for entry in map(json.loads, re.findall(r"^<!-- (\{.*\}) -->$", after, re.MULTILINE))}
    for result in results:
        known[result.name] = {**asdict(result), "found": len(result.found), "at": _now(), "machine": _machine()}
        known[result.name]["commit"] = _commit()
    entries = [known[name] for name in CAMPAIGNS if name in known]
    PAGE.write_text(f"{before.rstrip()}\n\n{BEGIN}\n\n{_figures(entries)}", encoding="utf-8")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


def _commit() -> str:
    """What was tried: the commit, and whether files differ from it."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


def _machine() -> str:
    return f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"


def _figures(entries: list[dict[str, Any]]) -> str:
    lines = [
        "Each line is one run, the last of that campaign. *Asked* is how much a release needs. A `+` after the commit:",
        "with changes that were not committed yet.",
        "",
        "| campaign | what it does | tried | asked | promises broken | time | when, commit |",
        "|---|---|---:|---:|---|---:|---|",
    ]
    by_name = {entry["name"]: entry for entry in entries}
    for name, campaign in CAMPAIGNS.items():
        what = f"{campaign.title[0].upper()}{campaign.title[1:]}. {' '.join((campaign.run.__doc__ or '').split())}"
        entry = by_name.get(name)
        if entry is None:
            lines.append(f"| `{name}` | {what} | not run | {campaign.soak:,} | | | |")
            continue
        verdict = f"skipped: {entry['skipped']}" if entry["skipped"] else str(entry["found"] or "none")
        lines.append(
            f"| `{name}` | {what} | {entry['tried']:,} {campaign.unit} | {campaign.soak:,}"
            f" | {verdict} | {entry['seconds']:,.0f} s | {entry['at'][:10]}, {entry.get('commit', '')} |"
        )
    machines = sorted({entry["machine"] for entry in entries})
    lines += ["", f"Measured on {'; '.join(machines)}. What each found in detail is in the source of this page.", ""]
    lines += [f"<!-- {json.dumps(entry, sort_keys=True)} -->" for entry in entries]
    return "\n".join(lines) + "\n"
