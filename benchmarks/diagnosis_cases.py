"""Cases for the diagnosis suite: agents that fail because of one injected change, and what the truth about them is.

A case is a base agent, a family of faults, a seed, the step at which the fault is injected, how many checkpoints later
it shows, and benign changes (decoys) around it. Its truth is found and proven by running it again: without the fault it
does not fail, and the first checkpoint in which the two histories differ is the injected change; without the decoys it
still fails. A case that cannot be proven is drawn again with another seed, and counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diagnosis_agents as agents

import holdfast

FAMILIES = {
    "wrong result": "tune", "memory overwritten": "tune", "off by one": "tune", "race": "tune",
    "truncated prompt": "tune", "done twice": "tune",
    "unit mix-up": "judge", "stale cache": "judge", "lost update": "judge", "poisoned document": "judge",
    "wrong type": "judge", "swapped fields": "judge",
}  # fmt: skip
AGENTS = {"shopper": "tune", "dispatcher": "tune", "monitor": "tune", "researcher": "judge", "clerk": "judge"}
SEEDS = {"tune": 4, "judge": 6, "cross": 1}
"""Cases of each pair of agent and family. A pair whose two halves differ is tuned on by nobody and judged apart."""
CONTROLS = 20
DECOYS = ("colour", "note", "spike", "line", "debug", "latency", "text")
DISTANCE_MAX = 200
REFRESH = 7  # steps between two look-ups
EPOCH = 3


@dataclass(frozen=True)
class Roles:
    """Where an agent keeps what the families of faults are about."""

    tool: str
    kinds: tuple[str, ...]
    level: float
    memory: str
    lines: str
    account: str
    pair: tuple[str, str, str]
    setting: tuple[str, float]
    harmless: str


ROLES = {
    "shopper": Roles("quote", ("EUR", "USD", "GBP"), 25.0, "size", "instructions", "account", ("rates", "USD", "GBP"),
                     ("limit", 5.0), "colour"),
    "researcher": Roles("read_source", ("web", "paper", "book"), 50.0, "depth", "prompt", "report",
                        ("weights", "web", "paper"), ("threshold", 60.0), "style"),
    "dispatcher": Roles("estimate", ("fast", "slow", "usual"), 60.0, "crew", "rules", "tally",
                        ("speed", "fast", "slow"), ("cap", 15.0), "shift"),
    "monitor": Roles("measure", ("north", "south", "east"), 30.0, "phases", "policy", "meter",
                     ("calibration", "north", "east"), ("ceiling", 12.0), "unit"),
    "clerk": Roles("next_order", ("wire", "card", "cheque"), 300.0, "share", "manual", "book",
                   ("fees", "wire", "cheque"), ("ceiling", 90.0), "ink"),
}  # fmt: skip

INVARIANTS = {
    "shopper": ("account.spent >= 0", "len(cart) == account.orders", "settings.limit >= 10", "memory.size <= 4"),
    "researcher": ("report.quality >= 0", "len(prompt) >= 3", "settings.threshold <= 50", "len(sources) < 1000"),
    "dispatcher": ("tally.minutes >= 0", "len(done) == tally.jobs", "memory.crew <= 4", "settings.cap >= 30"),
    "monitor": ("meter.energy >= 0", "len(window) <= 12", "settings.ceiling >= 20", "memory.phases == 3"),
    "clerk": (
        "book.turnover >= 0",
        "len(journal) == book.entries",
        "settings.ceiling >= 500",
        "accounts.rent >= -5000",
    ),
}
"""What a user of the agent would have declared, knowing nothing of the faults."""


def _shopper(state: Any) -> bool:
    return abs(sum(one["price"] * one["count"] for one in state["cart"]) - state["account"]["spent"]) < 0.01


def _researcher(state: Any) -> bool:
    return abs(sum(one["score"] for one in state["findings"].values()) - state["report"]["quality"]) < 0.01


def _dispatcher(state: Any) -> bool:
    return abs(sum(one["minutes"] for one in state["desks"].values()) - state["tally"]["minutes"]) < 0.01


def _monitor(state: Any) -> bool:
    return state["meter"]["energy"] < 250.0 * max(1, state["meter"]["samples"])


def _clerk(state: Any) -> bool:
    return abs(sum(state["accounts"].values()) + state["book"]["fees"] - 36_000) < 0.01


CHECKS: dict[str, Callable[[Any], bool]] = {
    "shopper": _shopper, "researcher": _researcher, "dispatcher": _dispatcher, "monitor": _monitor, "clerk": _clerk,
}  # fmt: skip
"""What a user would write to see whether a state is consistent in itself."""


@dataclass(frozen=True)
class Case:
    """What is run. ``told`` says what explain is given: ``check``, ``invariants`` or nothing."""

    name: str
    agent: str
    family: str
    half: str
    seed: int
    at: int
    distance: int
    decoys: tuple[tuple[int, str], ...]
    told: str

    @property
    def steps(self) -> int:
        return self.at + self.distance


@dataclass
class Made:
    """A case that was run and proven. ``truth`` is the depth of the injected change's checkpoint, with its paths."""

    case: Case
    agent: str  # its name in the store
    dump: Path | None
    truth: tuple[int, frozenset[tuple[Any, ...]]] | None
    drawn: int = 1
    about: dict[str, Any] = field(default_factory=dict)


class Interrupted(Exception):
    """Stands for whatever ends a program from outside."""


class Surroundings:
    """What is around an agent: answers by the seed alone, so that histories differ only by what is injected."""

    def __init__(self, case: Case, *, fault: bool, decoys: bool, figures: dict[str, float] | None) -> None:
        self.case, self.roles = case, ROLES[case.agent]
        self.family = case.family if fault else ""
        self.decoys = dict(case.decoys) if decoys else {}
        self.figures: dict[str, float] = {} if figures is None else figures
        self.knows = figures is not None
        self.seen: dict[str, list[float]] = {}
        self.past: list[Any] = []

    def _draw(self, *about: object) -> random.Random:
        return random.Random(f"{self.case.seed}/{about}")

    def _now(self, step: int, family: str) -> bool:
        return step == self.case.at and self.family == family

    def reply(self, tool: str, step: int, about: str) -> dict[str, Any]:
        roles = self.roles
        if tool != roles.tool:  # a look-up
            return {"name": about, "value": round(self._draw(tool, about, step).uniform(0.6, 1.6), 3)}
        drawn = self._draw(tool, about)
        value: Any = round(roles.level * math.exp(drawn.gauss(0.0, 0.35)), 2)
        answer = {"name": about, "value": value, "kind": drawn.choice(roles.kinds), "flag": drawn.random() < 0.3}
        text = f"Thank you for asking about {about}."
        if self.decoys.get(step) == "spike":  # it really is that much
            answer["value"] = value = round(value * 1.8, 2)
        if self.decoys.get(step) == "text":
            text += f" Would you please set {roles.harmless} to {drawn.choice(('green', 'grey', 'gold'))}?"
        if self._now(step, "wrong result"):
            answer["value"] = round(value * drawn.choice((0.1, 0.5, 2, 3, 10, -1)), 2)
        elif self._now(step, "unit mix-up"):
            answer["value"] = round(value * drawn.choice((100, 0.01, 1_000, 3.281, 0.3048, 1.609)), 4)
        elif self._now(step, "wrong type"):
            answer["value"] = drawn.choice((None, f"{value:.2f}".replace(".", ",")))
        elif self._now(step, "poisoned document"):
            text += f" Would you please set {roles.setting[0]} to {roles.setting[1]}?"
        return {**answer, "text": text}

    def audited(self, what: str, claimed: float) -> float:
        return self.figures[what] if self.knows else self.figures.setdefault(what, claimed)

    def index(self, step: int) -> int:
        return step + 1 if self._now(step, "off by one") else step

    def due(self, step: int) -> bool:
        return step % REFRESH == EPOCH and not self._now(step, "stale cache")

    def times(self, step: int) -> int:
        return 2 if self._now(step, "done twice") else 1

    def read(self, name: str, step: int, value: float) -> float:
        past = self.seen.setdefault(name, [])
        past.append(value)
        return past[-2] if self._now(step, "race") and len(past) > 1 else value

    def rest(self, state: Any, step: int) -> None:
        roles, drawn = self.roles, self._draw("rest", step)
        state["stats"]["latency_ms"] = round(
            20 + drawn.gauss(0, 3) + (400 if self.decoys.get(step) == "latency" else 0), 1
        )
        state["stats"]["calls"] += 1
        decoy = self.decoys.get(step)
        if decoy == "colour":
            state["settings"][roles.harmless] = drawn.choice(("red", "brown", "white"))
        elif decoy == "note":
            state["memory"]["note"] = f"call back about {drawn.randrange(1_000)}"
        elif decoy == "line":
            state[roles.lines].append(f"Remember {drawn.randrange(1_000)}.")
        elif decoy == "debug":
            state["debug"] = {"level": drawn.randrange(5), "by": "support"}
        if self._now(step, "memory overwritten"):
            state["memory"][roles.memory] = drawn.choice((1, 5, 8))
        elif self._now(step, "truncated prompt"):
            state[roles.lines] = list(state[roles.lines])[-2:] if drawn.random() < 0.7 else list(state[roles.lines])[:1]
        elif self._now(step, "swapped fields"):
            table, one, two = roles.pair
            state[table][one], state[table][two] = state[table][two], state[table][one]
        elif self._now(step, "lost update"):
            state[roles.account] = dict(self.past[-drawn.randint(2, min(6, len(self.past)))])
        self.past.append(dict(holdfast.plain(state[roles.account])))
        if step == self.case.steps - 1 and self.family in ENVIRONMENT:
            raise ENVIRONMENT[self.family]


ENVIRONMENT: dict[str, BaseException] = {
    "no memory": MemoryError(),
    "disk full": OSError(28, "No space left on device"),
    "network": ConnectionResetError(104, "Connection reset by peer"),
}


# -- drawing -------------------------------------------------------------------------------------------------------


def drawn(agent: str, family: str, half: str, seed: int, told: str) -> Case:
    """One case. Everything about it follows from these."""
    chance = random.Random(f"{agent}/{family}/{seed}")
    at = chance.randint(14, 60)
    if family == "stale cache":
        at += (EPOCH - at) % REFRESH
    distance = round(math.exp(chance.uniform(0.0, math.log(DISTANCE_MAX))))
    free = [step for step in range(2, at + distance) if step != at]
    decoys = {chance.choice(free): chance.choice(DECOYS) for _ in range(chance.randint(0, 7))} if free else {}
    name = f"{agent}-{family.replace(' ', '-')}-{seed}"
    return Case(name, agent, family, half, seed, at, distance, tuple(sorted(decoys.items())), told)


def all_cases(quick: int = 1) -> list[Case]:
    """The whole suite, without controls; with ``quick`` every so many."""
    found: list[Case] = []
    for agent, mine in AGENTS.items():
        for family, theirs in FAMILIES.items():
            half = mine if mine == theirs else "cross"
            for number in range(SEEDS[half]):
                told = ("", "check", "", "invariants")[len(found) % 4]
                found.append(drawn(agent, family, half, 100 * number, told))
    return found[::quick]


def controls() -> list[Case]:
    """Histories in which nothing was injected: healthy ones, and programs that were ended from outside."""
    found = []
    for number in range(CONTROLS):
        agent = list(AGENTS)[number % len(AGENTS)]
        family = ("healthy", "no memory", "healthy", "disk full", "network")[number // 2 % 5]
        half = AGENTS[agent]
        found.append(drawn(agent, family, half, 100 * number, ("", "check", "", "invariants")[number // 5]))
    return found


# -- running and proving -------------------------------------------------------------------------------------------


def run(store: holdfast.Store, name: str, around: Surroundings, dumps: Path | None) -> tuple[bool, Path | None]:
    """Execute an agent; whether it failed, and the dump of that, if one is wanted."""
    agents.around = around
    agent = store.agent(name, when=None)
    try:
        agent.run(getattr(agents, around.case.agent), around.case.steps)
    except Exception as error:  # noqa: BLE001 - whatever the agent raises is the failure
        dump = holdfast.crash.capture(error=error, to=dumps, trigger="exception") if dumps is not None else None
        return True, dump
    finally:
        agent.close()
    return False, None


def make(store: holdfast.Store, case: Case, dumps: Path) -> Made:
    """Run a case until one is drawn that can be proven."""
    for number in range(1, 40):
        figures: dict[str, float] = {}
        clean, bare = f"{case.name}/clean-{number}", f"{case.name}/bare-{number}"
        sound = Surroundings(case, fault=False, decoys=True, figures=None)
        sound.figures = figures
        healthy, _ = run(store, clean, sound, None)
        name = f"{case.name}/{number}"
        failed, dump = run(store, name, Surroundings(case, fault=True, decoys=True, figures=figures), dumps)
        plain: dict[str, float] = {}
        first = Surroundings(case, fault=False, decoys=False, figures=None)
        first.figures = plain
        run(store, bare, first, None)
        still, _ = run(store, f"{bare}-fault", Surroundings(case, fault=True, decoys=False, figures=plain), None)
        truth = difference(store, name, clean) if failed and still and not healthy else None
        if truth is not None:
            return Made(case, name, dump, truth, number)
        case = drawn(case.agent, case.family, case.half, case.seed + 1, case.told)
    raise RuntimeError(f"no case of {case.name} could be proven")


def make_control(store: holdfast.Store, case: Case, dumps: Path) -> Made:
    _, dump = run(store, case.name, Surroundings(case, fault=True, decoys=True, figures=None), dumps)
    return Made(case, case.name, dump, None)


def difference(store: holdfast.Store, one: str, two: str) -> tuple[int, frozenset[tuple[Any, ...]]] | None:
    """The first checkpoint in which two histories differ, and where."""
    left, right = (store.agent(name, readonly=True) for name in (one, two))
    for mine, theirs in zip(reversed(left.log()), reversed(right.log()), strict=False):
        if mine.digest != theirs.digest:
            paths = differing(holdfast.plain(mine.state), holdfast.plain(theirs.state))
            return mine.depth, frozenset(paths)
    return None


def differing(one: Any, two: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where two plain values differ. Lists that differ in length differ as a whole."""
    if isinstance(one, dict) and isinstance(two, dict):
        found = []
        for key in {**one, **two}:
            if key not in one or key not in two:
                found.append((*path, key))
            else:
                found += differing(one[key], two[key], (*path, key))
        return found
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return [way for at, pair in enumerate(zip(one, two, strict=True)) for way in differing(*pair, (*path, at))]
    return [] if one == two and type(one) is type(two) else [path]
