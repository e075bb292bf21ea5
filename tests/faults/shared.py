"""A campaign shared between processes: each has its own seed or its own part, and tells what it found.

Always a process of its own, even when there is one: a campaign that falls over must not take the others with it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.campaign import Campaign, Skip, Task

SEEDS_APART = 1_000


@dataclass(frozen=True)
class Share:
    """What one process tried and found."""

    done: int
    found: list[str]
    details: dict[str, int]
    skipped: str = ""
    places: dict[str, set[str]] = field(default_factory=dict)


def run(
    campaign: Campaign, count: int, seconds: float | None, seed: int, workers: int, say: Callable[[int], None]
) -> list[Share]:
    context = multiprocessing.get_context("fork")
    progress = context.Array("q", workers, lock=False)
    results = context.SimpleQueue()
    running = [
        context.Process(
            target=_work,
            args=(
                campaign,
                Task(
                    -(-count // workers),
                    seconds,
                    seed + number * SEEDS_APART * campaign.by_seed,
                    part=number,
                    parts=workers,
                ),
                number,
                progress,
                results,
            ),
        )
        for number in range(workers)
    ]
    for process in running:
        process.start()
    shares = []
    while len(shares) < workers:
        say(sum(progress))
        while not results.empty():
            shares.append(results.get())
        if len(shares) < workers and not any(process.is_alive() for process in running) and results.empty():
            shares.append(Share(0, ["a process of the campaign died"], {}))
        time.sleep(0.2)
    for process in running:
        process.join()
    for name in {name for share in shares for name in share.places}:
        shares[0].details[name] = len(set().union(*(share.places.get(name, ()) for share in shares)))
    return shares


def _work(campaign: Campaign, task: Task, number: int, progress: Any, results: Any) -> None:
    def say(done: int, _total: int, _what: str) -> None:
        progress[number] = done

    task.say = say
    skipped = ""
    try:
        campaign.run(task)
    except Skip as reason:
        skipped = str(reason)
    except Exception as error:  # a campaign that falls over has not shown anything
        task.broke(f"the campaign itself failed: {type(error).__name__}: {error}")
    results.put(Share(task.done, list(task.found), dict(task.details), skipped, task.places))
