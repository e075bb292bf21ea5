"""Does explain find the change that broke an agent? See --help.

Makes the cases of ``diagnosis_cases`` (agents with one injected fault each, and controls without), lets explain and the
trivial rankings answer, and compares the answers with the proven truth. The weights of the ranking were fitted on the
tuned half (``--fit``), which shares no family and no agent with the judged half. Prints tables and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diagnosis_cases as cases
from diagnosis_cases import Made
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.travel import explain
from holdfast.travel.failure import Failure, of_dump

SURE = 0.8


def prepared(folder: Path, quick: int, say: Any) -> list[Made]:
    """The cases, made in a store in the folder, or as they were left there."""
    known = folder / "made.pickle"
    if known.exists():
        return list(pickle.loads(known.read_bytes()))
    dumps = folder / "dumps"
    dumps.mkdir(parents=True, exist_ok=True)
    made: list[Made] = []
    with holdfast.open(folder / "store", durability="batched") as store:
        for case in cases.all_cases(quick):
            made.append(cases.make(store, case, dumps))
            say(f"{len(made)} cases made")
        made += [cases.make_control(store, case, dumps) for case in cases.controls()[::quick]]
    known.write_bytes(pickle.dumps(made))
    return made


# -- answers -------------------------------------------------------------------------------------------------------

Answer = tuple[int, tuple[Any, ...] | None]  # the depth of a checkpoint, and a place; None: any place counts
TRIVIAL = ("last change of the failing path", "last effect", "failing frame", "first violated invariant")


@dataclass
class Judged:
    """What was answered to one case."""

    made: Made
    prepared: explain.Case
    report: explain.Report
    trivial: dict[str, list[Answer]]

    @property
    def answers(self) -> list[Answer]:
        if self.report.found is None:
            return []
        return [(claim.checkpoint.depth, claim.path) for claim in self.report.claims]


def told(made: Made) -> dict[str, Any]:
    case = made.case
    if case.told == "check":
        return {"check": cases.CHECKS[case.agent]}
    return {"invariants": cases.INVARIANTS[case.agent]} if case.told == "invariants" else {}


def prepare(store: holdfast.Store, made: Made) -> tuple[explain.Case, holdfast.Agent]:
    agent = store.agent(made.agent, readonly=True)
    failure = Failure()
    if made.dump is not None:
        with holdfast.crash.open_dump(made.dump) as dump:
            failure = of_dump(dump)
    return explain.prepared(agent, failure, **told(made)), agent


def judge(store: holdfast.Store, made: Made) -> Judged:
    case, agent = prepare(store, made)
    return Judged(made, case, explain.ranked(agent, case), trivial(case))


def trivial(case: explain.Case) -> dict[str, list[Answer]]:
    """What one would look at without thinking. Only the checkpoint has to be right."""
    depths = [one.depth for one in case.past.checkpoints]
    numbers = set(case.failure.numbers)
    moves = [move for some in case.past.moves for move in some if not move.is_call]
    shown = [move.pattern for move in moves if type(move.new) in {int, float} and move.new in numbers]
    weighty = max(moves, key=lambda move: case.failure.weight(move.path), default=None)
    failing = shown[-1] if shown else weighty.pattern if weighty is not None else ()
    changed = sorted({depths[move.at] for move in moves if move.pattern == failing}, reverse=True)
    called = [depths[at] for at, effects in enumerate(case.past.effects) if effects]
    violated = [depths[one.at] for one in case.suspects if "checked" in one.features]
    return {
        TRIVIAL[0]: [(depth, None) for depth in changed[:3]],
        TRIVIAL[1]: [(depth, None) for depth in called[:-4:-1]],
        TRIVIAL[2]: [(depth, None) for depth in depths[:-4:-1]],
        TRIVIAL[3]: [(depth, None) for depth in violated[:3]],
    }


def right(answer: Answer, made: Made) -> bool:
    """Whether an answer is the injected change: its checkpoint, and a place that it touched."""
    if made.truth is None or answer[0] != made.truth[0]:
        return False
    path = answer[1]
    if path is None:
        return True
    near = ((path[: len(one)], one[: len(path)]) for one in made.truth[1])
    return bool(path) and any(a == b[: len(a)] or b == a[: len(b)] for a, b in near)


# -- fitting: a conditional logit over checkpoints and "not found" ---------------------------------------------------


PRIORS = {
    "checked": 3.0, "drift": 1.0, "factor fits": 3.0, "gap before": 3.0, "gap fits": 3.0, "last change": 0.0,
    "not done": 3.0, "notable": 1.0, "odd company": 3.0, "odd result": 3.0, "odd type": 3.0, "odd value": 3.0,
    "rare change": 3.0, "relation": 3.0, "relation after": 1.0, "relation since": 1.0, "swapped": 3.0,
    "taken away": 3.0,
    "went back": 3.0,
}  # fmt: skip
"""What a full feature is thought to be worth before any case is seen."""


def fit(judged: list[Judged], penalty: float = 0.5, rounds: int = 3_000) -> tuple[dict[str, float], dict[str, float]]:
    """Weights under which the proven checkpoints are likeliest, near to the prior where they hardly matter.

    Evidence that no case of the tuned half has keeps the prior: what is odd speaks for a checkpoint.
    """
    import numpy as np

    names = sorted(PRIORS)
    priors = np.array([PRIORS[name] for name in names] + [0.0] * len(explain.NOT_FOUND))
    absent = sorted(explain.NOT_FOUND)
    tables = []
    for one in judged:
        suspects, depths = one.prepared.suspects, [c.depth for c in one.prepared.past.checkpoints]
        table = np.zeros((len(suspects) + 1, len(names) + len(absent)))
        for row, suspect in enumerate(suspects):
            for name, value in suspect.features.items():
                table[row, names.index(name)] = value
        state = {
            "always": 1.0,
            "environment": float(one.prepared.failure.environment),
            "sound": float(one.prepared.sound),
        }
        table[-1, len(names) :] = [state[name] for name in absent]
        truth = one.made.truth[0] if one.made.truth is not None else None
        target = next((row for row, suspect in enumerate(suspects) if depths[suspect.at] == truth), len(suspects))
        tables.append((table, target))
    weights, moved, seen = (np.zeros(len(names) + len(absent)) for _ in range(3))
    for turn in range(1, rounds + 1):  # Adam, since it needs nothing else
        slope = -2 * penalty * (weights - priors) / len(tables)
        for table, target in tables:
            score = table @ weights
            share = np.exp(score - score.max())
            slope += (table[target] - (share / share.sum()) @ table) / len(tables)
        moved, seen = 0.9 * moved + 0.1 * slope, 0.999 * seen + 0.001 * slope**2
        weights += 0.05 * (moved / (1 - 0.9**turn)) / (np.sqrt(seen / (1 - 0.999**turn)) + 1e-8)
        weights[: len(names)] = np.maximum(weights[: len(names)], 0.0)  # evidence never speaks against a checkpoint
    found = {name: round(float(value), 2) for name, value in zip([*names, *absent], weights, strict=True)}
    return {name: found[name] for name in names}, {name: found[name] for name in absent}


# -- figures -------------------------------------------------------------------------------------------------------


def interval(hits: int, of: int) -> str:
    """A share with 95% of Wilson's interval."""
    if not of:
        return "-"
    z, p = 1.96, hits / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    low, high = (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)
    return f"{p:.0%} ({low:.0%}-{high:.0%})"


def figures(judged: list[Judged]) -> dict[str, Any]:
    """How often each way of answering is right, first and among three."""
    faults = [one for one in judged if one.made.truth is not None]
    found: dict[str, Any] = {"cases": len(faults)}
    ways = {"explain": [one.answers for one in faults], **{t: [one.trivial[t] for one in faults] for t in TRIVIAL}}
    for way, answers in ways.items():
        hits = [[right(answer, one.made) for answer in some[:3]] for some, one in zip(answers, faults, strict=True)]
        found[way] = {"first": sum(bool(some and some[0]) for some in hits), "three": sum(map(any, hits))}
    sure = [
        right((claim.checkpoint.depth, claim.path), one.made)
        for one in judged
        for claim in one.report.claims
        if claim.confidence >= SURE
    ]
    found["sure"] = {"claims": len(sure), "right": sum(sure)}
    controls = [one for one in judged if one.made.truth is None]
    found["controls"] = {"cases": len(controls), "right": sum(one.report.found is None for one in controls)}
    return found


def show(console: Console, title: str, found: dict[str, Any]) -> None:
    table = Table(title=f"{title}: {found['cases']} cases", title_justify="left")
    for head in ("answer", "first", "among three"):
        table.add_column(head)
    for way in ("explain", *TRIVIAL):
        table.add_row(way, *(interval(found[way][kind], found["cases"]) for kind in ("first", "three")))
    console.print(table)
    sure, controls = found["sure"], found["controls"]
    console.print(f"claims of {SURE:.0%} and above that are right: {interval(sure['right'], sure['claims'])}", end=", ")
    console.print(f"of {sure['claims']}; controls not found: {controls['right']} of {controls['cases']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", type=int, default=1, help="only every so many cases")
    parser.add_argument("--dir", type=Path, help="where the cases are kept, and taken from if they are there already")
    parser.add_argument("--fit", action="store_true", help="fit the weights of the ranking on the tuned half")
    parser.add_argument("--tune", action="store_true", help="look at the tuned half only")
    parser.add_argument("--verbose", action="store_true", help="each case on a line")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    return parser.parse_args()


def verbose(judged: list[Judged]) -> None:
    """Each case on a line."""
    for one in judged:
        case, truth = one.made.case, one.made.truth
        hits = [right(answer, one.made) for answer in one.answers[:3]]
        mark = "first" if hits[:1] == [True] else "three" if any(hits) else "found" if one.answers else "none"
        best = one.report.claims[0] if one.report.claims else None
        said = f"#{best.checkpoint.depth} {best.where} {best.confidence:.2f}" if best is not None else ""
        depths = [c.depth for c in one.prepared.past.checkpoints]
        mine = next((s.features for s in one.prepared.suspects if truth and depths[s.at] == truth[0]), {})
        print(
            f"{mark:5} {case.half:5} {case.name:36} {case.told:10} d={case.distance:3} truth #{truth and truth[0]}"
            f" {sorted(map(str, truth[1]))[:2] if truth else ''} | {said} | true features"
            f" { {k: round(v, 2) for k, v in mine.items()} } | best { {k: round(v, 2) for k, v in _best(one).items()} }"
        )


def _best(one: Judged) -> dict[str, float]:
    if not one.report.claims:
        return {}
    depth = one.report.claims[0].checkpoint.depth
    return next(s.features for s in one.prepared.suspects if one.prepared.past.checkpoints[s.at].depth == depth)


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder = options.dir or Path(tempfile.mkdtemp(prefix="diagnosis-", dir="/dev/shm"))
    began = time.perf_counter()
    try:
        made = prepared(folder, options.quick, lambda text: print(text, end="\r", file=sys.stderr, flush=True))
        print(
            f"{len(made)} made in {time.perf_counter() - began:.0f} s, {sum(one.drawn - 1 for one in made)} drawn again"
        )
        with holdfast.open(folder / "store", readonly=True) as store:
            tuned = [judge(store, one) for one in made if one.case.half == "tune"]
            if options.fit:
                explain.WEIGHTS, explain.NOT_FOUND = fit(tuned)
                print(f"WEIGHTS = {explain.WEIGHTS}\nNOT_FOUND = {explain.NOT_FOUND}")
            rest = [judge(store, one) for one in made if one.case.half != "tune"] if not options.tune else []
            again = [
                replace(one, report=explain.ranked(store.agent(one.made.agent, readonly=True), one.prepared))
                for one in tuned
            ]
        halves = {"tuned half": again}
        halves["judged half"] = [one for one in rest if one.made.case.half == "judge"]
        halves["in between"] = [one for one in rest if one.made.case.half == "cross"]
        results = {name: figures(some) for name, some in halves.items() if some}
        for name, found in results.items():
            show(console, name, found)
        if options.verbose:
            verbose([one for some in halves.values() for one in some])
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    finally:
        if options.dir is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
