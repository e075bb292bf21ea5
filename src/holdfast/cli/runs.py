"""``holdfast runs``, ``queues`` and ``signal``: what is going on, what stopped, and what it waits for.

Also ending what nobody will resume, and executing a run once more from one of its positions. What executes runs is in
run.py and worker.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.text import Text

from holdfast import Agent, Effect, ForkPlan, RunInfo, ScheduleInfo, SignalInfo
from holdfast.cli.complete import agents
from holdfast.cli.effects import call_of
from holdfast.cli.output import Output
from holdfast.cli.programs import Load, given_json, writing
from holdfast.cli.session import (
    ASKS,
    Consent,
    Flag,
    Given,
    Json,
    Limit,
    OnBranch,
    Pattern,
    Session,
    Wait,
    limited,
    on_branch,
    option,
    reader,
    some_of,
    writer,
)
from holdfast.cli.text import ago, clean, count, moment, now, shorten
from holdfast.cli.values import named, whose
from holdfast.errors import BadOption
from holdfast.schemas import run_json, signal_json, text_of

_ERROR_CHARACTERS = 120
_STYLES = {
    "finished": "green",
    "running": "bold cyan",
    "waiting": "cyan",
    "queued": "cyan",
    "interrupted": "yellow",
    "needs attention": "bold red",
    "failed": "red",
    "cancelled": "dim",
    "rolled back": "magenta",
}
_NEVER = datetime.min.replace(tzinfo=UTC)

_HEADS = ("agent", "run", "function", "status", "began", "about")
_COUNTED = {"needs attention": "in need of attention", "due": "able to resume"}

runs = App(name="runs", help="List runs of durable functions; resume, cancel, fork or adopt one.")


@runs.default
def list_(
    pattern: Pattern = None,
    /,
    *,
    status: Annotated[str | None, Parameter(metavar="STATUS", show_default=False)] = None,
    sort: Annotated[Literal["urgent", "began"], Parameter(show_choices=True)] = "urgent",
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """List runs of durable functions and their status, first those that need somebody, then the newest.

    Statuses: running, interrupted (its process is gone; run it again), waiting, needs attention, failed, finished,
    cancelled, rolled back. `runs cancel` ends one. Below them, the next times of functions that have a schedule.

    Parameters
    ----------
    pattern
        Only runs of this agent, NAME or NAME@BRANCH, or of those whose names are like this: 'trip-*'. [default: all]
    status
        Only runs in this status.
    sort
        Those that need somebody first (in need of attention, interrupted, able to resume, failed), or the newest.
    """
    with session.reading() as store:
        names, branch = some_of(store, pattern)
        wanted = status.replace("-", " ") if status is not None else None
        found = store.runs(names, branch=branch, status=wanted, limit=limited(limit, json=json), sort=sort)
        schedules = store.schedules() if pattern is None and status is None else []
        if json:
            listed, times = [run_json(info) for info in found], [info.to_json() for info in schedules]
            return session.json("runs", store=store.place, runs=listed, more=found.more, schedules=times)
        if found:
            session.out.columns(_HEADS, [_row(info) for info in found])
        else:
            session.out.say("No runs." if status is None else f"No runs are {clean(status)}.")
        if found.more:
            counts = store.open_runs(names) if status is None else {}
            told = ", ".join(f"{number:,} {_COUNTED.get(word, word)}" for word, number in counts.items())
            if told:
                session.out.say(f"Not ended: {told}.")
            more = (
                f"More on up to {count(found.more, 'branch', 'branches')}; -n 0 shows all, --status or a pattern some."
            )
            session.out.note(more)
        if schedules:
            session.out.say()
            session.out.columns(("schedule", "every", "zone", "next", "about"), map(_schedule, schedules))
    return 0


@runs.command
def cancel(
    agent: OnBranch,
    id: str | None = None,
    /,
    *,
    undo: Flag = False,
    load: Load = (),
    wait: Annotated[float, option(metavar="SECONDS")] = 0.0,
    json: Json = False,
    session: Given,
) -> int:
    """Cancel a run, whoever executes it.

    One that a process executes is told so at its next recorded call, or where it waits: it cleans up and ends. One that
    nobody executes ends at once, without cleaning up, and its branch is free again; its children end, too. With --wait
    it is left to a worker first, which lets it clean up. What it has saved and done stays, unless --undo is given. An
    effect in doubt has to be settled first, with `holdfast effects resolve`.

    Parameters
    ----------
    id
        The run's id. [default: the one that has not ended]
    undo
        Undo what it did, newest first, and go back to where it began, as `holdfast rollback` does.
    load
        A module or file.py with the tools that undo, for a run that nobody executes.
    wait
        Wait up to this many seconds until the run has ended; one that nobody executes, for a worker to take it.
    """
    with writing(session, load) as store:
        name, branch = on_branch(store, agent)
        info = store.cancel(name, id, branch=branch, compensate=undo, wait_s=wait)
        if json:
            return session.json("runs.cancel", run=run_json(info))
        words = {"cancelled": "Cancelled: ", "rolled back": "Cancelled and undone: ", "running": "Told to stop: "}
        session.out.say(
            Text(words.get(info.status, f"Is {info.status}: "), style="bold green"),
            f"{clean(info.function)} of {whose(info)} (run ", Text(clean(info.id), style="yellow"), ")",
        )  # fmt: skip
        if info.cancelled_by:
            session.out.note("It stops at its next recorded call; --wait SECONDS waits for that.")
    return 0


@runs.command
def resume(agent: OnBranch, id: str | None = None, /, *, json: Json = False, session: Given) -> int:
    """Leave a run that has stopped to a worker: one that failed, needs attention, or came with a branch.

    Nothing is executed here: `holdfast worker PROGRAM` does that. To execute it yourself, run it again with
    `holdfast run`. What is in doubt stays so, unless a probe of the program can tell.

    Parameters
    ----------
    id
        The run's id. [default: the one that has not ended]
    """
    with session.writing() as store:
        name, branch = on_branch(store, agent)
        info = store.resume(name, id, branch=branch)
        working = [one for one in store.workers() if not one["functions"] or info.function in one["functions"]]
        if json:
            return session.json("runs.resume", run=run_json(info), workers=len(working))
        session.out.say(
            Text("Left to a worker: ", style="bold green"), f"{clean(info.function)} of {whose(info)} (run ",
            Text(clean(info.id), style="yellow"), ")",
        )  # fmt: skip
        if not working:
            session.out.note("No worker has this function now: start one with `holdfast worker PROGRAM`.")
    return 0


@runs.command
def adopt(agent: OnBranch, /, *more: str, json: Json = False, session: Given) -> int:
    """Let unfinished runs that came from elsewhere, or with a branch, be due here when their time or signal comes.

    What a backup, a push, an import, a copy or a branch brings is left alone by `holdfast run --due`, so that a copy
    never acts. Adopt it where it is to be resumed, and nowhere else.

    Parameters
    ----------
    more
        More of them. A child is an agent of its own, NAME/CHILD.
    """
    with session.writing() as store:
        branches = [on_branch(store, one) for one in (agent, *more)]
        found = [info for name, branch in branches for info in store.adopt(name, branch=branch)]
        if json:
            return session.json("runs.adopt", runs=[run_json(info) for info in found])
        for info in found:
            session.out.say(Text(whose(info), style="bold cyan"), f"  {clean(info.function)}  ", info.status)
        session.out.say(f"{count(len(found), 'unfinished run')} can be resumed here: holdfast run --due PROGRAM")
    return 0


@runs.command
def fork(
    agent: OnBranch,
    id: str,
    /,
    *,
    at: Annotated[str, Parameter(metavar="POSITION")],
    branch: Annotated[str, Parameter(metavar="NEW")],
    load: Load = (),
    wait: Wait = 0.0,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Execute a run once more from a position on, on a new branch. The run itself stays what it is.

    Calls before the position are answered from the record; from there on they are made, so what the run did since may
    happen again. Shows that first, then asks. Nothing is executed: `holdfast worker` resumes the new run, or
    `holdfast run`. Works while another process executes the run.

    Parameters
    ----------
    id
        The run's id.
    at
        The position of a call, as `holdfast effects NAME --run ID` lists it, or a step, such as plan:0.
    branch
        The new branch's name.
    load
        A module or file.py with the tools that can tell what became of calls in doubt before the position.
    wait
        Wait up to this many seconds for a process that writes the branch, where a call before the position is in doubt.
    """
    with ExitStack() as held:
        store = held.enter_context(writing(session, load) if consent.possible else session.reading())
        handle: Agent = reader(store, *on_branch(store, agent))
        plan = handle.plan_fork(id, at=at)
        if plan.in_doubt and consent.possible:  # only who writes the branch can settle that
            _, _, handle = held.enter_context(writer(store, agent, wait))
            plan = handle.plan_fork(id, at=at)
        if not consent.json:
            _show_fork(session.out, handle, plan, branch)
        done = consent.given(session, "Fork it?")
        info = plan.apply(branch) if done else None
        if consent.json:
            about = {"agent": handle.name, "branch": handle.branch_name, "new": branch, **plan.to_json()}
            session.json("runs.fork", done=done, **about, to=run_json(info) if info else None)
        elif info is not None:
            session.out.say(
                Text("Done. ", style="bold green"), f"Run {clean(info.id)} of ",
                Text(whose(info), style="bold cyan"), f" is {info.status}: `holdfast worker PROGRAM` resumes it.",
            )  # fmt: skip
    return consent.code(done=done)


def _show_fork(out: Output, handle: Agent, plan: ForkPlan, branch: str) -> None:
    """All of what may happen again: who answers has to know it."""
    begins = plan.checkpoint
    out.say(
        f"Run {clean(plan.run)} of ", Text(f"{clean(handle.name)}@{clean(handle.branch_name)}", style="bold cyan"),
        f" is executed once more from {clean(plan.at)} on, on branch ", Text(clean(branch), style="bold cyan"), ".",
    )  # fmt: skip
    out.say(
        "The branch begins at ", named(begins), f" ({ago(begins.time, now())}). The record answers"
        f" {count(len(plan.answered), 'call')}; {count(len(plan.again), 'recorded call')} will be made again.",
    )  # fmt: skip
    _list_calls(out, Text("Is in doubt, and has to be settled first:", style="bold red"), plan.in_doubt, handle)
    _list_calls(out, Text("Was done, and may happen again:", style="yellow"), plan.writes, handle)
    if plan.signals:
        names = ", ".join(map(clean, plan.signals))
        out.say(f"Signals to be sent again, to {clean(handle.name)} on branch {clean(branch)}: {names}")


def _list_calls(out: Output, title: Text, found: list[Effect], handle: Agent) -> None:
    if found:
        out.say(title)
    for number, one in enumerate(found, 1):
        line = Text(f"{number:>3}. ", style="dim").append(one.id, style="yellow").append(f" {call_of(one)}")
        of = f" of {clean(one.agent)}" if one.agent not in {"", handle.name} else ""
        out.say(line, Text(f"{of} at {clean(one.path)}", style="dim"))


def _row(info: RunInfo) -> list[Text | str]:
    return [
        Text(whose(info), style="bold cyan"),
        Text(clean(shorten(info.id, 16)), style="yellow"),
        clean(info.function),
        Text(info.status, style=style_of(info.status)),
        ago(info.began, now()),
        about(info),
    ]


def _schedule(info: ScheduleInfo) -> list[Text | str]:
    skipped = f"skipped {moment(info.skipped)}" if info.skipped is not None else ""
    about = [
        "overdue: no worker has looked" if info.overdue else "",
        f"{clean(info.running)} has not ended" if info.running else "",
        f"{count(len(info.waiting), 'time')} waiting" if info.waiting else "",
        skipped if info.running or (info.last or _NEVER) < (info.skipped or _NEVER) else "",
    ]
    return [
        Text(clean(info.function), style="bold cyan"),
        clean(info.every),
        clean(info.zone),
        Text(moment(info.next) if info.next is not None else "never", style="bold red" if info.overdue else ""),
        "; ".join(filter(None, about)),
    ]


def style_of(status: str) -> str:
    return _STYLES.get(status, "")


def about(info: RunInfo) -> str:
    """What it waits for, or what went wrong."""
    if info.due:
        return f"{_come(info)}: can resume"
    if (ahead := info.ahead) is not None:
        where = clean(f"{info.queue}, {info.partition}" if info.partition else info.queue)
        return f"in {where}: " + (f"{ahead:,} before it" if ahead else "the next")
    if info.status in {"running", "waiting"}:
        others = [f"for {clean(name)}" for name in info.waits_for]
        waits = [f"for the signal {clean(info.signal)}" if info.signal else "", *others, _until(info.until)]
        said = ("waits " if info.status == "running" and any(waits) else "") + " or ".join(filter(None, waits))
        return "; ".join(filter(None, (f"cancelled by {clean(info.cancelled_by)}" if info.cancelled_by else "", said)))
    return clean(shorten(info.error.partition("\n")[0], _ERROR_CHARACTERS))


def _come(info: RunInfo) -> str:
    if info.until is not None and info.until <= now():
        return "its time has come"
    if info.signal and not info.waits_for:
        return f"signal {clean(info.signal)} arrived"
    return "what it waits for has come"


def _until(time: datetime | None) -> str:
    return f"until {moment(time)}" if time is not None else ""


# -- queues ----------------------------------------------------------------------------------------------------------

_Number = Annotated[str | None, Parameter(metavar="N", show_default=False)]
_Rate = Annotated[str | None, Parameter(metavar="N/SECONDS", show_default=False)]

queues = App(name="queues", help="List the queues of submitted runs, or change the limits of one.")


@queues.default
def list_queues(*, json: Json = False, session: Given) -> int:
    """List the queues that submitted runs wait in: their limits, how many are executed now, and how many wait."""
    with session.reading() as store:
        found = store.queues()
        if json:
            return session.json("queues", store=store.place, queues=[one.to_json() for one in found])
        if not found:
            session.out.say("No queues: nothing that was submitted waits, and no program has declared one.")
            return 0
        rows: list[list[Text | str]] = [
            [Text(clean(one.name), style="bold cyan"), one.limits, str(one.running), str(one.waiting)] for one in found
        ]
        session.out.columns(("queue", "limits", "running", "waiting"), rows)
    return 0


@queues.command(name="set")
def set_(
    name: str,
    /,
    *,
    concurrency: _Number = None,
    rate: _Rate = None,
    partition_concurrency: _Number = None,
    partition_rate: _Rate = None,
    json: Json = False,
    session: Given,
) -> int:
    """Give a queue other limits, from now on and for all workers. Those that are not given stay; "none" lifts one.

    A worker whose program declares other numbers does not start any more: change them there, too.

    Parameters
    ----------
    name
        The queue's name.
    concurrency
        How many of its runs are executed at a time.
    rate
        How many begin within how many seconds: 10/60.
    partition_concurrency
        How many of each partition are executed at a time.
    partition_rate
        How many of each partition begin within how many seconds.
    """
    limits = {
        "concurrency": concurrency,
        "rate": rate,
        "partition_concurrency": partition_concurrency,
        "partition_rate": partition_rate,
    }
    given = {limit: _limit(limit, text) for limit, text in limits.items() if text is not None}
    with session.writing() as store:
        made = store.set_queue(name, **given)
        if json:
            return session.json("queues.set", queue=made.to_json())
        session.out.say(Text(clean(made.name), style="bold cyan"), f"  {made.limits}")
    return 0


def _limit(name: str, text: str) -> Any:
    """What an option says: a number, or how many within how many seconds; None lifts the limit."""
    if text == "none":
        return None
    try:
        if not name.endswith("rate"):
            return int(text)
        number, _, seconds = text.partition("/")
        return int(number), float(seconds)
    except ValueError:
        hint = "Say how many, and within how many seconds: --rate 10/60." if name.endswith("rate") else "Use a number."
        raise BadOption(f"--{name.replace('_', '-')} {text}", hint=f"{hint} none lifts the limit.") from None


# -- signals ---------------------------------------------------------------------------------------------------------

_VALUE_CHARACTERS = 60
_SIGNAL_STYLES = {"pending": "bold magenta", "taken": "green", "dropped": "dim", "ended": "dim"}

signal = App(name="signal", help="Send a signal to a run, or list those that were sent.")


@signal.default
def send(
    agent: Annotated[str | None, Parameter(completer=agents, metavar="NAME", show_default=False)] = None,
    signal: str | None = None,
    value: str = "null",
    /,
    *,
    run: Annotated[str | None, Parameter(metavar="RUN", show_default=False)] = None,
    any_run: Flag = False,
    id: Annotated[str | None, Parameter(metavar="ID", show_default=False)] = None,
    all: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Send a signal to a run: `agent.wait_for(SIGNAL)` gets its value, once. Without SIGNAL, list what was sent.

    Works while another process writes the agent, and when none does. The signal ends with its run: no later one gets
    it. Says which signals are waited for, if this one is not among them.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main; to list: all agents]
    signal
        The signal's name. [default: list those that nobody has taken yet, the oldest first]
    value
        What the run gets, as JSON.
    run
        The id of the run that it is for. [default: the run of this branch that has not ended]
    any_run
        Send it to the agent: whichever run asks next takes it, also one that begins later.
    id
        A name for this signal. Sent again with the same one, nothing is sent. [default: a new one]
    all
        List also those that were taken, were dropped, or ended with their run.
    """
    if agent is None or signal is None:
        if run is not None or any_run or id is not None:
            raise BadOption("which signal is to be sent?", hint="holdfast signal NAME SIGNAL [JSON]")
        return _list_signals(session, agent, everything=all, json=json)
    sent = given_json(value, "the value")
    with session.writing() as store:
        name, branch = on_branch(store, agent)
        info = store.signal(name, signal, sent, run=run, any_run=any_run, branch=branch, id=id)
        put_off = [one for one in store.due() if one.status != "running"]  # a process that waits gets it itself
        due = [one.id for one in put_off if (one.agent, one.branch) == (name, branch)]
        if json:
            return session.json("signal", **info.to_json(), value=sent, due=due)
        _print_sent(session.out, info, clean(agent), due)
    return 0


def _print_sent(out: Output, info: SignalInfo, whom: str, due: list[str]) -> None:
    named = Text(clean(info.name), style="bold magenta")
    if info.run:
        whom = f"run {clean(info.run)} of {whom}"
    if info.repeated:
        out.say("Nothing was sent: signal ", named, f" {clean(info.id)} was sent to {whom} before.")
        return
    out.say("Signal ", named, f" was sent to {whom}.")
    if info.name not in info.waits_for:
        waited = ", ".join(map(clean, info.waits_for)) or "no signal"
        out.say(Text(f"Nobody waits for it now. Waited for: {waited}.", style="yellow"))
    if due:
        out.note(f"{count(len(due), 'run')} can resume now: holdfast run --due PROGRAM")


def _list_signals(session: Session, agent: str | None, *, everything: bool, json: bool) -> int:
    with session.reading() as store:
        name, branch = on_branch(store, agent) if agent is not None else (None, None)
        found = [one for one in store.signals(name, branch=branch) if everything or one.status == "pending"]
        if json:
            return session.json("signals", signals=[signal_json(one) for one in found])
        if not found:
            session.out.say("No signals." if everything else "No signal waits to be taken.")
            return 0
        rows: list[list[Text | str]] = [
            [
                Text(whose(one), style="bold cyan"),
                Text(clean(shorten(one.run, 16)) or "(any run)", style="yellow"),
                Text(clean(one.name), style="bold magenta"),
                clean(one.id),
                Text(one.status, style=_SIGNAL_STYLES.get(one.status, "")),
                ago(one.sent, now()),
                clean(one.by),
                text_of(one.value, _VALUE_CHARACTERS),
            ]
            for one in found
        ]
        session.out.columns(("agent", "run", "signal", "id", "status", "sent", "by", "value"), rows)
    return 0


@signal.command
def drop(agent: OnBranch, /, *ids: str, json: Json = False, session: Given) -> int:
    """Drop signals that nobody has taken: no run will get them.

    Parameters
    ----------
    ids
        The ids of the signals, as `holdfast signal` lists them.
    """
    with session.writing() as store:
        name, branch = on_branch(store, agent)
        dropped = [store.drop_signal(name, id, branch=branch) for id in ids]
        if json:
            return session.json("signal.drop", dropped=[one.to_json() for one in dropped])
        session.out.say(f"{count(len(dropped), 'signal was', 'signals were')} dropped.")
    return 0
