"""``holdfast when`` and ``stats``: when an agent is saved, what that did lately, and what it costs.

Owns the words and the small charts. The figures are the store's.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.text import Text

from holdfast import Costs, When
from holdfast.cli.output import Output
from holdfast.cli.session import Given, Json, Limit, Name, Pattern, limited
from holdfast.cli.text import ago, clean, count, now, size

_WIDTH = 30  # of a bar
_BAR, _ASCII_BAR = "█", "#"
_LOOKED_AT = 1_000
TRIGGERS = {
    "": "asked by the program",
    "time": "every_s",
    "steps": "every_steps",
    "bytes": "changed_bytes",
    "adaptive": "adaptive",
    "phase": "end of a phase",
    "before write": "before a write",
    "after write": "after a write",
    "end": "end of `with agent:`",
    "gate": "a gate that was passed",
    "tool": "a tool that asked for it",
    "breaker": "a breaker opened",
    "run": "a run began or ended",
    "rescue": "unsaved changes, before they were left",
    "undo": "an undo",
    "redo": "a redo",
    "phase failed": "a phase failed (beside the line)",
    "gate failed": "a gate was not passed (beside the line)",
    "invariant failed": "an invariant was broken (beside the line)",
    "watch": "a watchpoint was met",
    "log": "a line of the log",
    "metric": "a metric that drifts",
    "probe": "a probe from outside",
}


def span(seconds: float | None) -> str:
    """A span of time with three digits: ``840 us``, ``1.24 ms``, ``3.5 s``."""
    if seconds is None:
        return "-"
    for unit, least in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= least or unit == "us":
            return f"{seconds / least:.3g} {unit}"
    return ""


def bars(out: Output, rows: list[tuple[str, int, str]]) -> None:
    """A small chart: a name, a length, and what to say beside it."""
    most = max((length for _, length, _ in rows), default=0)
    names = max((len(name) for name, _, _ in rows), default=0)
    sign = _BAR if out.unicode else _ASCII_BAR
    for name, length, said in rows:
        drawn = sign * max(1 if length else 0, round(_WIDTH * length / most)) if most else ""
        out.say(f"  {name.ljust(names)}  ", Text(drawn.ljust(_WIDTH), style="cyan"), f"  {said}")


def when(agent: Name, /, *, json: Json = False, session: Given) -> int:
    """Say when an agent is saved by itself, what that did and cost.

    The policy is that of the program that wrote the newest checkpoint.
    """
    with session.reading() as store:
        costs = store.costs(store.resolve(agent)[0])
        words = _words(costs, store.when(costs.agent))
        if json:
            kept = ("when", "interval_s", "triggers", "stall", "durable", "run_s", "share", "failures", "recent")
            told: dict[str, Any] = {key: value for key, value in costs.to_json().items() if key in kept}
            return session.json("when", agent=costs.agent, words=words, **told)
        _print_when(session.out, costs, words)
    return 0


def _words(costs: Costs, asked: When | None) -> list[str]:
    """``asked``: what counts where its program says nothing."""
    if not costs.checkpoints:
        none = "It has no checkpoint yet, so nobody knows what its program asks for"
        return [f"{none}. If that says nothing:", *asked.words()] if asked is not None else [f"{none}."]
    if costs.when is None:
        return ["It saves only when its program, or LangGraph, says so; or its policy was not written down."]
    known = When.from_table(costs.when, "its policy")
    words = known.words()
    if costs.interval_s is not None:
        words.append(f"By what is known now, adaptive saves about every {span(costs.interval_s)}.")
    if asked not in {known, When(adaptive=True)}:
        words.append("holdfast.toml says something else by now. A program that says nothing has that when it starts.")
    return words


def _print_when(out: Output, costs: Costs, words: list[str]) -> None:
    out.say(Text(clean(costs.agent), style="bold cyan"))
    for sentence in words:
        out.say(f"  {sentence}", wrap=True)
    if not costs.checkpoints:
        return
    out.say()
    out.say(Text("Lately", style="bold"))
    rows = [
        (
            one.id[:12],
            ago(datetime.fromisoformat(one.time), now()),
            TRIGGERS.get(one.trigger, clean(one.trigger)),
            span(one.stall_s),
            span(one.durable_s),
            clean(one.label),
        )
        for one in costs.recent
    ]
    out.columns(("id", "when", "asked for by", "stall", "durable", "label"), rows, right=(3, 4))
    out.say()
    _print_cost(out, costs)


def _print_cost(out: Output, costs: Costs) -> None:
    if costs.stall is not None:
        share = f", {costs.share:.2%} of the {span(costs.run_s)} that it ran" if costs.share is not None else ""
        out.say(f"The program stood still for {span(costs.stall.p50_s)} (p99 {span(costs.stall.p99_s)}) each{share}.")
    if costs.durable is not None:
        out.say(f"Each was durable after {span(costs.durable.p50_s)} (p99 {span(costs.durable.p99_s)}).")
    if costs.failures:
        out.say(f"Its programs failed or went back {count(costs.failures, 'time')}.")


def stats(agent: Pattern = None, /, *, limit: Limit = None, json: Json = False, session: Given) -> int:
    """Show what checkpoints cost: how many, who asked, bytes, time.

    Parameters
    ----------
    agent
        NAME, or a pattern such as trip-*. [default: all]
    limit
        Look at so many checkpoints of each agent, the newest; 0 looks at all. [default: 1000]
    """
    most = _LOOKED_AT if limit is None else limited(limit, json=json)
    with session.reading() as store:
        page = store.agents(agent, limit=None if json else 50)
        found = [store.costs(one.name, limit=most) for one in page]
        sizes = store.stats()["bytes"]
        if json:
            return session.json("stats", store=str(store.place), bytes=sizes, agents=[one.to_json() for one in found])
        if len(found) == 1:
            _print_stats(session.out, found[0])
        else:
            _print_table(session.out, found, page.more)
        takes = sum(sizes.values()) - sizes["free"]  # which is part of the catalog
        session.out.say(Text(f"The store takes {size(takes)}.", style="dim"))
    return 0


def _print_table(out: Output, found: list[Costs], more: int) -> None:
    rows = [
        (
            clean(one.agent),
            f"{one.checkpoints:,}{'+' if one.more else ''}",
            size(one.stored_bytes),
            f"{size(one.bytes_per_day)}/day",
            span(one.stall.p50_s if one.stall is not None else None),
            span(one.stall.p99_s if one.stall is not None else None),
            f"{one.share:.2%}" if one.share is not None else "-",
        )
        for one in found
    ]
    heads = ("agent", "checkpoints", "stored", "growth", "stall", "p99", "of run time")
    out.columns(heads, rows, right=range(1, len(heads)))
    if more:
        out.say(Text(f"{count(more, 'agent')} not shown; --json has all.", style="dim"))


def _print_stats(out: Output, costs: Costs) -> None:
    out.say(Text(clean(costs.agent), style="bold cyan"), f": {count(costs.checkpoints, 'checkpoint')}")
    if costs.more:
        out.say(Text(f"{count(costs.more, 'older checkpoint')} not looked at; -n 0 looks at all.", style="dim"))
    if not costs.checkpoints:
        return
    out.say(Text("Asked for by", style="bold"))
    told = sorted(costs.triggers.items(), key=lambda one: -one[1])
    bars(out, [(TRIGGERS.get(name, clean(name)), number, f"{number:,}") for name, number in told])
    if len(costs.days) > 1:
        out.say(Text("Recorded on", style="bold"))
        bars(
            out, [(day.day, day.logical_bytes, f"{size(day.logical_bytes)}, {day.checkpoints:,}") for day in costs.days]
        )
    grows = f"{size(costs.bytes_per_day)} a day"
    out.say(f"They recorded {size(costs.logical_bytes)}, stored in {size(costs.stored_bytes)}: {grows}.")
    _print_cost(out, costs)
    if costs.frees_bytes is not None:
        out.say(f"The store's policy of what to keep would free {size(costs.frees_bytes)} now (`holdfast retain`).")
