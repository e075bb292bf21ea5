"""``python -m tests.faults``: the campaigns in full, a bar while they run, and a table of what they tried and found.

Without names all of them run, one after the other. The exit code is 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.faults import report, shared
from tests.faults.everything import CAMPAIGNS


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results = []
    with tempfile.TemporaryDirectory(prefix="holdfast-seen-") as seen:
        os.environ["XDG_STATE_HOME"] = seen  # what is seen of these stores is nobody's business afterwards
        for name in options.campaigns or CAMPAIGNS:
            results.append(run(name, options, console))
            report.tell(console, results[-1])
    console.print(report.table(results))
    if options.report:
        report.write(results)
        console.print(f"[bold]{report.PAGE.relative_to(report.ROOT)}[/] is new")
    return 1 if any(result.found for result in results) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of {', '.join(CAMPAIGNS)}; all by default")
    parser.add_argument("--count", type=int, help="how much each is to try (default: what a release asks for)")
    parser.add_argument("--seconds", type=float, help="the longest that each may take")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes that share what is tried at random"
    )
    parser.add_argument("--seed", type=int, default=1, help="another seed, other states, moments and inputs")
    parser.add_argument(
        "--report", action="store_true", help="renew the figures of these campaigns in docs/reliability.md"
    )
    options = parser.parse_args()
    unknown = [name for name in options.campaigns if name not in CAMPAIGNS]
    if unknown:
        parser.error(f"no campaign {', '.join(unknown)}; there are {', '.join(CAMPAIGNS)}")
    return options


def run(name: str, options: argparse.Namespace, console: Console) -> report.Result:
    campaign = CAMPAIGNS[name]
    count = options.count or campaign.soak
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(campaign.unit),
        TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    began = time.monotonic()
    with bar:
        shown = bar.add_task(campaign.title, total=count)
        shares = shared.run(
            campaign, count, options.seconds, options.seed, options.workers if campaign.shareable else 1,
            lambda done: bar.update(shown, completed=done),
        )  # fmt: skip
    details: Counter[str] = Counter()
    for share in shares:
        details.update(share.details)
    return report.Result(
        name,
        sum(share.done for share in shares),
        [text for share in shares for text in share.found],
        time.monotonic() - began,
        dict(details),
        shares[0].skipped,
    )


if __name__ == "__main__":
    sys.exit(main())
