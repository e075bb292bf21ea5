"""How soon the detector sees a shift, and how often it raises an alarm where nothing is wrong. See --help.

Histories of 20 places: noise around a level, autocorrelated series, trends, counters of even and of random steps, heavy
tails, words. In the shifted ones, one place is moved by two of its standard deviations at a random step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from holdfast.travel import detector

STEPS = 1_000
PLACES = 20
SHIFT = 2.0
Maker = Callable[[random.Random, int, float], Iterator[Any]]


def level(chance: random.Random, at: int, shift: float) -> Iterator[Any]:
    mean, spread = chance.uniform(-50, 50), chance.uniform(0.1, 10)
    for step in range(STEPS):
        yield mean + spread * (chance.gauss(0, 1) + shift * (step >= at))


def following(share: float) -> Maker:
    def series(chance: random.Random, at: int, shift: float) -> Iterator[Any]:
        mean, spread, state = chance.uniform(-50, 50), chance.uniform(0.1, 10), chance.gauss(0, 1)
        for step in range(STEPS):
            state = share * state + math.sqrt(1 - share * share) * chance.gauss(0, 1)
            yield mean + spread * (state + shift * (step >= at))

    return series


def line(chance: random.Random, at: int, shift: float) -> Iterator[Any]:
    slope, spread = chance.uniform(-2, 2), chance.uniform(0.1, 10)
    for step in range(STEPS):
        yield slope * step + spread * (chance.gauss(0, 1) + shift * (step >= at))


def counter(chance: random.Random, at: int, shift: float) -> Iterator[Any]:
    """It grows by random amounts; a shift is one of the amounts."""
    total, mean, spread = 0.0, chance.uniform(5, 50), chance.uniform(0.5, 5)
    for step in range(STEPS):
        total += mean + spread * (chance.gauss(0, 1) + shift * (step >= at))
        yield total


def even(_: random.Random, at: int, shift: float) -> Iterator[Any]:
    """It counts; a shift makes it count by more."""
    total = 0
    for step in range(STEPS):
        total += 1 + (step >= at and shift > 0)
        yield total


def heavy(chance: random.Random, at: int, shift: float) -> Iterator[Any]:
    """Waiting times: often short, now and then long."""
    for step in range(STEPS):
        yield 20 * math.exp(0.5 * chance.gauss(0, 1)) + shift * (step >= at) * 12.1


def words(chance: random.Random, at: int, shift: float) -> Iterator[Any]:
    """One of three; a shift moves the share of the first by two standard deviations of being it, or to all."""
    share = chance.uniform(0.3, 0.7)
    for step in range(STEPS):
        now = 1.0 if shift and step >= at else share
        yield "done" if chance.random() < now else chance.choice(("open", "late"))


MAKERS: tuple[Maker, ...] = (
    *[level] * 5, following(0.3), following(0.5), following(0.5), following(0.7), following(0.9),
    line, line, line, counter, counter, even, heavy, heavy, words, words,
)  # fmt: skip


def series(seed: int, number: int, at: int = 0, shift: float = 0.0) -> Iterator[Any]:
    return MAKERS[number](random.Random(f"{seed}/{number}"), at, shift)


def history(seed: int) -> Iterator[dict[str, Any]]:
    for values in zip(*(series(seed, number) for number in range(PLACES)), strict=True):
        yield {f"p{number}": value for number, value in enumerate(values)}


def healthy(count: int, seed: int = 0) -> list[list[detector.Alarm]]:
    return [detector.follow(history(seed + number)) for number in range(count)]


def delays(count: int, seed: int = 100_000) -> dict[str, list[float]]:
    """Steps until the shifted place raises its alarm, by what kind of place it is; infinite if it never does."""
    found: dict[str, list[float]] = {}
    for number in range(count):
        shifted = number % PLACES
        at = random.Random(f"at/{number}").randint(150, 900)
        follow, delay = detector.Detector(), math.inf
        for step, value in enumerate(series(seed + number, shifted, at, SHIFT)):
            if follow.update({"p": value}):
                delay = step - at + 1 if step >= at else math.inf
                break
        found.setdefault(MAKERS[shifted].__qualname__.partition(".")[0], []).append(delay)
    return found


def interval(hits: int, of: int) -> tuple[float, float]:
    """95% of Wilson's."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, hits / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=300)
    parser.add_argument("--shifted", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    alarms = healthy(options.healthy)
    raised = sum(bool(one) for one in alarms)
    low, high = interval(raised, options.healthy)
    print(f"healthy histories with any alarm: {raised} of {options.healthy} ({low:.1%} to {high:.1%})")
    found = delays(options.shifted)
    every = [delay for group in found.values() for delay in group]
    quartiles = quantiles(every, n=4, method="inclusive") if math.inf not in every else [0, median(every), math.inf]
    print(f"steps until a shift of {SHIFT:g} standard deviations is seen: median {median(every):g} (all: {quartiles})")
    for kind, group in found.items():
        missed = sum(one == math.inf for one in group)
        print(f"  {kind:<10} median {median(group):5g}  missed {missed} of {len(group)}")
    if options.json:
        figures = {"healthy": options.healthy, "alarms": raised, "median_steps": median(every)}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
