"""Five small agents for the diagnosis suite: they work in steps, ask tools, keep a state, and are audited at the end.

They are ordinary durable functions. What is around them (``around``) answers their tools and does the rest of what
happens in a program; ``diagnosis_cases`` puts faults there, and none of them is named here.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import holdfast


class Around(Protocol):
    """What the agents live in."""

    def reply(self, tool: str, step: int, about: str) -> dict[str, Any]:
        """What a tool answers."""

    def audited(self, what: str, claimed: float) -> float:
        """What somebody outside says of a figure."""

    def index(self, step: int) -> int:
        """Which piece of work is next."""

    def due(self, step: int) -> bool:
        """Whether what was looked up is looked up again."""

    def times(self, step: int) -> int:
        """How often a piece of work is handed out."""

    def read(self, name: str, step: int, value: float) -> float:
        """A figure that others write as well."""

    def rest(self, state: Any, step: int) -> None:
        """Whatever else the program does in a step."""


around: Any = None  # an Around, put here by whoever runs an agent


@holdfast.tool(effect="read")
def quote(item: str, step: int) -> dict[str, Any]:
    return around.reply("quote", step, item)


@holdfast.tool(effect="read")
def exchange(currency: str, step: int) -> dict[str, Any]:
    return around.reply("exchange", step, currency)


@holdfast.tool(effect="read")
def audit(what: str, claimed: float) -> float:
    return around.audited(what, claimed)


def number(value: Any) -> float:
    """What tools answer, as a number; thousands are set off by commas."""
    return float(str(value).replace(",", "")) if value is not None else 0.0


def obey(settings: Any, text: str) -> None:
    """Suppliers say in their texts what they want to be treated like."""
    for key, value in re.findall(r"please set (\w+) to ([\w.]*\w)", text):
        settings[key] = float(value) if re.fullmatch(r"[\d.]+", value) else value


class Mismatch(Exception):
    """What we have is not what somebody outside has."""


# -- a shopper -----------------------------------------------------------------------------------------------------


@holdfast.durable
def shopper(agent: holdfast.Agent, steps: int) -> str:
    state = agent.state
    state["account"] = {"spent": 0.0, "budget": 500.0 * steps, "orders": 0}
    state["cart"] = []
    state["skipped"] = []
    state["settings"] = {"limit": 60.0, "margin": 1.0, "colour": "blue"}
    state["memory"] = {"size": 2, "city": "Lisbon", "gift": "no"}
    state["rates"] = {"EUR": 1.0, "USD": 0.9, "GBP": 1.2}
    state["instructions"] = ["Follow the list.", "Take two of what is on sale.", "Be polite.", "No glass."]
    state["stats"] = {"latency_ms": 20.0, "calls": 0}
    agent.checkpoint("list read")
    for step in range(steps):
        offer = quote(f"item-{around.index(step)}", step)
        currency = offer["kind"]
        if around.due(step):
            state["rates"][currency] = exchange(currency, step)["value"]
        obey(state["settings"], offer["text"])
        price = round(number(offer["value"]) * state["rates"][currency], 2)
        two = any("two of" in line for line in state["instructions"]) and offer["flag"]
        count = state["memory"]["size"] * (2 if two else 1)
        if price > state["settings"]["limit"]:
            state["skipped"].append(offer["name"])
        else:
            for _ in range(around.times(step)):
                buy(state, step, offer["name"], price, count)
        around.rest(state, step)
        agent.checkpoint(f"item {step}")
    return pay(agent)


def buy(state: Any, step: int, item: str, price: float, count: int) -> None:
    cost = round(price * count * state["settings"]["margin"], 2)
    state["cart"].append({"item": item, "price": price, "count": count})
    account = state["account"]
    account["spent"] = round(around.read("spent", step, account["spent"]) + cost, 2)
    account["budget"] = round(account["budget"] - cost, 2)
    account["orders"] += 1


def pay(agent: holdfast.Agent) -> str:
    account = agent.state["account"]
    spent = account["spent"]
    billed = audit("invoice", spent)
    if abs(spent - billed) > 0.005:
        raise Mismatch(f"we have spent {spent}, and the invoice says {billed}")
    left = account["budget"]
    allowed = audit("bank", left)
    if abs(left - allowed) > 0.005:
        raise Mismatch(f"the bank has {allowed} left, and we have {left}")
    return "paid"


# -- a researcher --------------------------------------------------------------------------------------------------


@holdfast.tool(effect="read")
def read_source(document: str, step: int) -> dict[str, Any]:
    return around.reply("read_source", step, document)


@holdfast.tool(effect="read")
def appraise(origin: str, step: int) -> dict[str, Any]:
    return around.reply("appraise", step, origin)


@holdfast.durable
def researcher(agent: holdfast.Agent, steps: int) -> str:
    state = agent.state
    state["question"] = "Does it rain more in May?"
    state["sources"] = []
    state["findings"] = {"rain": {"votes": 0, "score": 0.0}, "sun": {"votes": 0, "score": 0.0}}
    state["report"] = {"words": 0, "claims": 0, "quality": 0.0}
    state["memory"] = {"depth": 3, "reader": "expert"}
    state["weights"] = {"web": 1.0, "paper": 2.0, "book": 1.5}
    state["prompt"] = ["You are careful.", "Quote each source.", "Write short sentences.", "No adjectives."]
    state["settings"] = {"threshold": 20.0, "style": "plain"}
    state["stats"] = {"latency_ms": 20.0, "calls": 0}
    agent.checkpoint("question")
    for step in range(steps):
        document = read_source(f"doc-{around.index(step)}", step)
        if around.due(step):
            state["weights"][document["kind"]] = appraise(document["kind"], step)["value"]
        obey(state["settings"], document["text"])
        trust = round(number(document["value"]), 2)
        if trust >= state["settings"]["threshold"]:
            for _ in range(around.times(step)):
                note(state, step, document, trust)
        around.rest(state, step)
        agent.checkpoint(f"read {step}")
    return submit(agent.state)


def note(state: Any, step: int, document: dict[str, Any], trust: float) -> None:
    weight = state["weights"][document["kind"]]
    state["sources"].append({"name": document["name"], "trust": trust, "weight": weight})
    finding = state["findings"]["rain" if document["flag"] else "sun"]
    finding["votes"] += 1
    finding["score"] = round(finding["score"] + trust * weight, 2)
    report = state["report"]
    report["claims"] = int(around.read("claims", step, report["claims"])) + state["memory"]["depth"]
    report["quality"] = round(report["quality"] + trust * weight, 2)
    quoted = any(line.startswith("Quote") for line in state["prompt"])
    report["words"] += 40 if quoted else 15


def submit(state: Any) -> str:
    report = state["report"]
    for part in ("quality", "claims", "words"):
        have, review = report[part], audit(part, report[part])
        if abs(have - review) > 0.005:
            raise ValueError(f"the review counts {review} for {part}, not {have}")
    votes = {topic: finding["score"] for topic, finding in state["findings"].items()}
    total = sum(votes.values())
    if abs(total - audit("score", total)) > 0.005:
        raise ValueError("the findings do not add up to what the review has")
    return max(votes, key=lambda topic: votes[topic])


# -- a dispatcher: two desks take turns ----------------------------------------------------------------------------


@holdfast.tool(effect="read")
def estimate(job: str, step: int) -> dict[str, Any]:
    return around.reply("estimate", step, job)


@holdfast.tool(effect="read")
def clock_speed(desk: str, step: int) -> dict[str, Any]:
    return around.reply("clock_speed", step, desk)


@holdfast.durable
def dispatcher(agent: holdfast.Agent, steps: int) -> str:
    state = agent.state
    state["desks"] = {"a": {"jobs": 0, "minutes": 0.0}, "b": {"jobs": 0, "minutes": 0.0}}
    state["tally"] = {"minutes": 0.0, "jobs": 0, "breaks": 0}
    state["done"] = []
    state["backlog"] = []
    state["memory"] = {"crew": 3, "foreman": "Ana"}
    state["speed"] = {"fast": 1.5, "slow": 0.75, "usual": 1.0}
    state["rules"] = ["First come, first served.", "Count breaks after long jobs.", "Keep the door shut.", "Sweep."]
    state["settings"] = {"cap": 60.0, "shift": "day"}
    state["stats"] = {"latency_ms": 20.0, "calls": 0}
    agent.checkpoint("opened")
    for step in range(steps):
        take(agent, "ab"[step % 2], step)
        around.rest(state, step)
        agent.checkpoint(f"turn {step}")
    return close_day(state["tally"], state["desks"])


def take(agent: holdfast.Agent, desk: str, step: int) -> None:
    state = agent.state
    job = estimate(f"job-{around.index(step)}", step)
    if around.due(step):
        state["speed"][job["kind"]] = clock_speed(job["kind"], step)["value"]
    obey(state["settings"], job["text"])
    minutes = round(number(job["value"]) / state["speed"][job["kind"]] / state["memory"]["crew"], 2)
    if minutes > state["settings"]["cap"]:
        state["backlog"].append({"job": job["name"], "minutes": minutes})
        return
    for _ in range(around.times(step)):
        state["done"].append({"job": job["name"], "desk": desk, "minutes": minutes})
        mine, tally = state["desks"][desk], state["tally"]
        mine["jobs"] += 1
        mine["minutes"] = round(mine["minutes"] + minutes, 2)
        tally["minutes"] = round(around.read("minutes", step, tally["minutes"]) + minutes, 2)
        tally["jobs"] += 1
        if job["flag"] and any("breaks" in rule for rule in state["rules"]):
            tally["breaks"] += 1


def close_day(tally: Any, desks: Any) -> str:
    worked = sum(desk["minutes"] for desk in desks.values())
    clocked = audit("clock", worked)
    assert abs(worked - clocked) < 0.01, f"desks say {worked:.2f}"
    for key in ("minutes", "jobs", "breaks"):
        if abs(tally[key] - audit(key, tally[key])) > 0.01:
            raise Mismatch(key, tally[key])
    return "closed"


# -- a monitor -----------------------------------------------------------------------------------------------------


@holdfast.tool(effect="read")
def measure(sensor: str, step: int) -> dict[str, Any]:
    return around.reply("measure", step, sensor)


@holdfast.tool(effect="read")
def calibrate(sensor: str, step: int) -> dict[str, Any]:
    return around.reply("calibrate", step, sensor)


@holdfast.durable
def monitor(agent: holdfast.Agent, steps: int) -> str:
    state = agent.state
    state["window"] = []
    state["meter"] = {"energy": 0.0, "peaks": 0, "samples": 0}
    state["levels"] = {"north": 0.0, "south": 0.0, "east": 0.0}
    state["calibration"] = {"north": 1.0, "south": 1.1, "east": 0.9}
    state["memory"] = {"phases": 3, "owner": "grid"}
    state["policy"] = ["Sample each round.", "Report peaks of flagged sensors.", "Be quiet.", "Never sleep."]
    state["settings"] = {"ceiling": 45.0, "unit": "kW"}
    state["stats"] = {"latency_ms": 20.0, "calls": 0}
    agent.checkpoint("connected")
    for step in range(steps):
        seen = measure(f"sensor-{around.index(step)}", step)
        where = seen["kind"]
        if around.due(step):
            state["calibration"][where] = calibrate(where, step)["value"]
        obey(state["settings"], seen["text"])
        level = round(number(seen["value"]) * state["calibration"][where], 3)
        for _ in range(around.times(step)):
            take_in(state, step, where, level, flagged=seen["flag"])
        around.rest(state, step)
        agent.checkpoint(f"sample {step}")
    return report(state)


def take_in(state: Any, step: int, where: str, level: float, *, flagged: bool) -> None:
    state["levels"][where] = level
    state["window"].append(level)
    if len(state["window"]) > 12:
        state["window"].pop(0)
    meter = state["meter"]
    meter["energy"] = round(around.read("energy", step, meter["energy"]) + level * state["memory"]["phases"], 3)
    meter["samples"] += 1
    watched = any("peaks" in line for line in state["policy"])
    if level > state["settings"]["ceiling"] and watched and flagged:
        meter["peaks"] += 1


def report(state: Any) -> str:
    meter = state["meter"]
    energy, peaks, samples = meter["energy"], meter["peaks"], meter["samples"]
    supplied = audit("supplier", energy)
    if abs(energy - supplied) > 0.01:
        raise Mismatch(f"{energy} used, {supplied} supplied")
    if peaks != audit("peaks", peaks) or samples != audit("samples", samples):
        raise Mismatch("peaks or samples are not those of the grid")
    return "reported"


# -- a clerk -------------------------------------------------------------------------------------------------------


@holdfast.tool(effect="read")
def next_order(order: str, step: int) -> dict[str, Any]:
    return around.reply("next_order", step, order)


@holdfast.tool(effect="read")
def fee_of(kind: str, step: int) -> dict[str, Any]:
    return around.reply("fee_of", step, kind)


@holdfast.durable
def clerk(agent: holdfast.Agent, steps: int) -> str:
    state = agent.state
    state["accounts"] = {"rent": 9_000.0, "food": 9_000.0, "fuel": 9_000.0, "cash": 9_000.0}
    state["book"] = {"turnover": 0.0, "fees": 0.0, "entries": 0}
    state["journal"] = []
    state["held"] = []
    state["reserve"] = 0.0
    state["memory"] = {"share": 4, "partner": "Rui"}
    state["fees"] = {"wire": 0.02, "card": 0.03, "cheque": 0.05}
    state["manual"] = ["Enter at once.", "Charge twice for express.", "Sign each page.", "Use blue ink."]
    state["settings"] = {"ceiling": 900.0, "ink": "blue"}
    state["stats"] = {"latency_ms": 20.0, "calls": 0}
    agent.checkpoint("opened")
    for step in range(steps):
        order = next_order(f"order-{around.index(step)}", step)
        if around.due(step):
            state["fees"][order["kind"]] = fee_of(order["kind"], step)["value"] / 50
        obey(state["settings"], order["text"])
        amount = round(number(order["value"]), 2)
        if amount > state["settings"]["ceiling"]:
            state["held"].append(order["name"])
        else:
            for _ in range(around.times(step)):
                enter(state, step, order, amount)
        around.rest(state, step)
        agent.checkpoint(f"order {step}")
    balance(state)
    return "balanced"


def enter(state: Any, step: int, order: dict[str, Any], amount: float) -> None:
    payer, payee = ("rent", "food") if step % 2 else ("fuel", "cash")
    twice = any("twice" in line for line in state["manual"]) and order["flag"]
    fee = round(amount * state["fees"][order["kind"]] * (2 if twice else 1), 2)
    accounts, book = state["accounts"], state["book"]
    accounts[payer] = round(accounts[payer] - amount - fee, 2)
    accounts[payee] = round(accounts[payee] + amount, 2)
    state["journal"].append({"order": order["name"], "amount": amount, "fee": fee})
    book["turnover"] = round(around.read("turnover", step, book["turnover"]) + amount, 2)
    book["fees"] = round(book["fees"] + fee, 2)
    book["entries"] += 1
    state["reserve"] = round(state["reserve"] + amount / state["memory"]["share"], 2)


def balance(state: Any) -> None:
    for name, money in state["accounts"].items():
        statement = audit(name, money)
        if abs(money - statement) > 0.005:
            raise Mismatch(f"the statement of {name} says {statement}")
    book = state["book"]
    wrong = [part for part in ("turnover", "fees", "entries") if abs(book[part] - audit(part, book[part])) > 0.005]
    if wrong:
        raise Mismatch(f"the auditor does not agree with {wrong[0]}: {book[wrong[0]]}")
    reserve = state["reserve"]
    if abs(reserve - audit("reserve", reserve)) > 0.005:
        raise Mismatch("reserve")
