"""``holdfast replay``, ``what-if`` and ``validate``: execute a recorded run again, and see which way it goes.

The program is the one that a person names; it is loaded in a process that can do nothing outside, never in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Annotated, Any

from msgspec.structs import asdict
from rich.text import Text

from holdfast import MISSING, Store
from holdfast.cli.complete import agents
from holdfast.cli.exits import ATTENTION, DIFFERENT, FAILED
from holdfast.cli.programs import given_json
from holdfast.cli.session import Flag, Given, Json, Session, Types, bars, is_pattern, on_branch, option
from holdfast.cli.text import clean, count, shorten
from holdfast.errors import BadOption, UnknownAgent
from holdfast.travel import Difference, Execution, Minimal, WhatIf, first_bad, replay_all
from holdfast.travel import debug as debugged

_MANY = 1_000
"""Variations of one command."""
_LINES = 12
_TEXT = 160

Whose = Annotated[str, option("The agent's NAME, or NAME@BRANCH; or the id of a run.", completer=agents)]
Run = Annotated[str | None, option("A run's id, or a checkpoint: the run it was taken in. [default: the newest]")]
Program = Annotated[
    str,
    option("The file or module that has the function, or the function: FILE.py, MODULE, FILE.py:FUNCTION.", "PROGRAM"),
]
Check = Annotated[
    str, option("Ask this about the last state: an expression such as 'budget >= 0', or MODULE:FUNCTION.", "CHECK")
]
Code = Annotated[str, option("A directory with other code: modules and the program are taken from there.", "DIR")]
Allow = Annotated[
    tuple[str, ...], option("A tool that may be called where the record has no answer. May be repeated.", "TOOL")
]
Reads = Annotated[bool, option("Tools that only read may be called where the record has no answer.")]
Pairs = Annotated[tuple[str, ...], option(metavar="NAME=JSON")]


def replay(
    agent: Whose,
    run: Run = None,
    /,
    *,
    program: Program,
    code: Code = "",
    check: Check = "",
    watch: Annotated[str, option(metavar="PATH")] = "",
    minimise: Annotated[str, option(metavar="TARGET")] = "",
    allow: Annotated[tuple[str, ...], option(metavar="TOOL")] = (),
    reads: Flag = False,
    debug: Flag = False,
    dap: Flag = False,
    step: Annotated[int, option(metavar="N")] = 1,
    types: Types = (),
    json: Json = False,
    session: Given,
) -> int:
    """Execute a recorded run again, to see that it goes the same way.

    Its calls are answered from the record. Nothing is done outside: the process has no network and starts no other, and
    its files lie in a directory of its own. Nothing is written to the store. The state is compared at every checkpoint.
    Ends with 0 when it went the same way, 1 when it did not or --check does not hold, 7 when it tried to do something
    outside, 6 when it could not be executed.

    Parameters
    ----------
    agent
        NAME, NAME@BRANCH, the id of a run, or a pattern such as 'trip-*': the newest run of each.
    watch
        Name the lines after which this place of the state became another; with --check alone, see that instead.
    minimise
        Find the smallest part of state.PATH, args.NAME or results with which the run still fails, or --check.
    allow
        With --minimise: a tool that may be called where the record has no answer. May be repeated.
    reads
        With --minimise: the same for tools that only read.
    debug
        Stop at a step in pdb, with the commands back, forward, goto, reverse-until EXPR, steps and state.
    dap
        Serve it to an editor on standard input and output (Debug Adapter Protocol), which can step back, too.
    step
        The step to stop at.
    """
    with session.reading() as store:
        if is_pattern(agent):
            names = [info.name for info in store.agents(agent) if store.agent(info.name, readonly=True).runs()]
            with counted(session, len(names)) as tell:
                found = replay_all(
                    store, [(one, None) for one in names], program=program, code=code, types=types, tell=tell
                )
            return _replayed(session, found, json=json)
        name, branch, id = _which(store, agent, run)
        if debug or dap:
            one = debugged(store, name, id, program=program, branch=branch, code=code, types=types, step=step, dap=dap)
            if one.failed:
                raise BadOption(one.failed.partition("\n")[0])
            if debug and (one.difference is not None or one.status != "stopped"):  # else a person has ended it
                _told(session, one, "")
            return 0
        if minimise:
            with bars(session.err) as bar:
                left = None if bar is None else lambda left, tries: bar(f"{left} items left", tries, tries)
                least = store.minimise(
                    name, minimise, id, program=program, branch=branch, code=code, check=check, types=types,
                    allow=allow, reads=reads, progress=left,
                )  # fmt: skip
            return _minimal(session, least, json=json)
        if watch:
            one = store.moments(name, watch, id, program=program, branch=branch, code=code, types=types)
        elif check:
            one = store.moments(name, "", id, program=program, branch=branch, code=code, check=check, types=types)
        else:
            one = store.replay(name, id, program=program, branch=branch, code=code, types=types)
        return _replayed(session, [one], json=json, check=check)


def what_if(
    agent: Whose,
    run: Run = None,
    /,
    *,
    program: Program,
    result: Pairs = (),
    arg: Pairs = (),
    state: Pairs = (),
    at: Annotated[str, option(metavar="REV")] = "",
    tool: Annotated[tuple[str, ...], option(metavar="NAME=FUNCTION")] = (),
    code: Code = "",
    allow: Allow = (),
    reads: Reads = False,
    check: Check = "",
    each: Flag = False,
    branch: Annotated[str, option(metavar="NEW")] = "",
    types: Types = (),
    json: Json = False,
    session: Given,
) -> int:
    """Execute a recorded run again with something different.

    A call that is recorded with the same arguments is answered from the record. Another one is made only if --allow or
    --reads says so; otherwise it stops there, and says what it would have done. Nothing is saved, unless as --branch.
    Ends with 1 when --check does not hold, 7 when nobody can say, 6 when it could not be executed.

    Parameters
    ----------
    result
        What a call returns: POSITION=JSON, TOOL=JSON, or TOOL#N=JSON for its N-th call, from 0.
    arg
        An argument of the run.
    state
        A place of the state: PATH=JSON when the run begins, or after --at. PATH= alone takes it away.
    at
        The checkpoint after which --state is changed.
    tool
        Call another function in the place of a tool: NAME=MODULE:FUNCTION.
    each
        Values are JSON arrays: try each of their items, all combinations, several at once.
    branch
        Save what came of it as a new branch, which says of itself that it never happened.
    """
    given = {"results": result, "args": arg, "state": state}
    tools = dict(_pair(one) for one in tool)
    choices = [(kind, *_pair(one)) for kind, words in given.items() for one in words]
    values = [_values(kind, text, each=each) for kind, _, text in choices]
    variations = []
    for chosen in product(*values):
        parts: dict[str, dict[str, Any]] = {"results": {}, "args": {}, "state": {}}
        for (kind, name, _), value in zip(choices, chosen, strict=True):
            parts[kind][name] = value
        variations.append(WhatIf(**parts, at=at, tools=tools, code=code, allow=allow, reads=reads))  # type: ignore[arg-type]
        if len(variations) > _MANY:
            raise BadOption(f"more than {_MANY:,} variations", hint="Give fewer values.")
    if branch and len(variations) != 1:
        raise BadOption(f"{count(len(variations), 'variation')} on one branch", hint="Leave --branch or --each away.")
    with session.writing() if branch else session.reading() as store, counted(session, len(variations)) as tell:
        name, on, id = _which(store, agent, run)
        found = store.what_if(
            name, *variations, run=id, program=program, branch=on, check=check, types=types, progress=tell
        )
        if branch:
            store.keep(found[0], branch, why=str(variations[0]))
    names = [str(one) for one in variations]
    if json:
        shown = [{"name": text, **_json(one)} for text, one in zip(names, found, strict=True)]
        session.json("whatif", agent=name, variations=shown, branch=branch or None)
    elif len(found) == 1:
        _told(session, found[0], names[0])
        if branch:
            session.out.say(Text("Kept ", style="bold green"), f"as {clean(name)}@{clean(branch)}.")
    else:
        rows = [
            (clean(shorten(text, 40)), _status(one), _checked(one, check), clean(shorten(_parts(one), _TEXT)))
            for text, one in zip(names, found, strict=True)
        ]
        session.out.columns(("what if", "it", "check", "where the ways part"), rows)
    if any(one.failed for one in found):
        return FAILED
    if any(one.check is False for one in found):
        return DIFFERENT
    return ATTENTION if check and any(one.check is None for one in found) else 0


def validate(
    agent: Whose,
    /,
    *,
    code: Code,
    program: Program,
    from_: Annotated[str | None, option(metavar="RUN", name="--from")] = None,
    check: Annotated[tuple[str, ...], option(metavar="CHECK")] = (),
    healthy: Annotated[tuple[str, ...], option(metavar="NAME[:RUN]")] = (),
    allow: Allow = (),
    reads: Reads = False,
    types: Types = (),
    json: Json = False,
    session: Given,
) -> int:
    """Execute a failing run with new code, to see that it is a fix.

    It is one where the failure is gone, checks hold, and healthy runs go the same way. The run fails where it raises,
    or where a --check does not hold. Ends with 0 when the fix is one, 1 when it is not.

    Parameters
    ----------
    from_
        The failing run: its id, or a checkpoint in it. [default: the newest]
    check
        An expression such as 'budget >= 0', or MODULE:FUNCTION, that must hold for the last state. May be repeated.
    healthy
        An agent whose newest run, or that run, must go the same way with the new code. May be repeated.
    """
    cases = [(one.partition(":")[0], one.partition(":")[2] or None) for one in healthy]
    total = 2 * max(1, len(check)) + len(cases)
    with session.reading() as store, counted(session, total) as tell:
        name, branch, id = _which(store, agent, from_)
        found = store.validate(
            name, id, program=program, code=code, branch=branch, checks=check, healthy=cases, allow=allow, reads=reads,
            types=types, progress=tell,
        )  # fmt: skip
    if json:
        session.json(
            "validate", good=found.good, problems=found.problems, before=_json(found.before), after=_json(found.after),
            healthy=[_json(one) for one in found.healthy],
        )  # fmt: skip
    elif found.good:
        way = f"the same way{_so_far(*found.healthy)}"
        rest = f", and {count(len(found.healthy), 'healthy run')} went {way}" if found.healthy else ""
        session.out.say(Text("The failure is gone", style="bold green"), f"{rest}.")
        session.out.note(f"Before: {clean(_parts_of_end(found.before))}. After: {clean(_parts_of_end(found.after))}.")
    else:
        for problem in found.problems:
            session.out.say(Text("! ", style="bold red"), clean(shorten(" ".join(problem.split()), 4 * _TEXT)))
    return 0 if found.good else DIFFERENT


# -- which run --------------------------------------------------------------------------------------------------------


def _which(store: Store, agent: str, run: str | None) -> tuple[str, str, str | None]:
    try:
        return *on_branch(store, agent), run
    except UnknownAgent:
        found = [info for info in store.runs() if info.id == agent] if run is None else []
        if len(found) != 1:
            raise
        return found[0].agent, found[0].branch, agent


@contextmanager
def counted(session: Session, total: int) -> Iterator[Callable[[int, Execution], None]]:
    """A bar that counts executions as they are there."""
    with bars(session.err) as bar:
        done: list[int] = []

        def tell(index: int, _: Execution) -> None:
            done.append(index)
            if bar is not None:
                bar("executed again", len(done), total)

        yield tell


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise BadOption(f"{text!r} says nothing", hint="Write it NAME=VALUE.")
    return name, value


def _values(kind: str, text: str, *, each: bool) -> Iterable[Any]:
    if not text and kind == "state":
        return [MISSING]
    value = given_json(text, "a value")
    return value if each and isinstance(value, list) else [value]


# -- what is said -----------------------------------------------------------------------------------------------------


def _json(one: Execution) -> dict[str, Any]:
    data = asdict(one)
    for name in ("states", "again", "again_until", "dap", "misnamed"):
        del data[name]
    data |= {name: [asdict(item) for item in data[name]] for name in ("checkpoints", "steps", "moments")}
    return data | {"difference": asdict(one.difference) if one.difference else None, "same": one.same}


def _replayed(session: Session, found: list[Execution], *, json: bool, check: str = "") -> int:
    if json:
        session.json("replay", executions=[_json(one) for one in found])
    elif not found:
        session.out.say("No runs.")
    elif len(found) > 1:
        rows = [
            (clean(one.agent), clean(one.run), _status(one), f"{one.compared}", clean(shorten(_parts(one), _TEXT)))
            for one in found
        ]
        session.out.columns(("agent", "run", "it", "equal", "difference"), rows, right=[3])
    else:
        _told(session, found[0], "", check)
    if any(one.failed for one in found):
        return FAILED
    if any(one.blocked or one.stopped for one in found):
        return ATTENTION
    return DIFFERENT if any(not one.same or one.check is False for one in found) else 0


def _told(session: Session, one: Execution, what: str, check: str = "") -> None:
    out = session.out
    whose = Text(f"{clean(one.agent)}@{clean(one.branch)}", style="bold cyan")
    if one.failed:
        out.say(Text("Not executed: ", style="bold red"), clean(one.failed.partition("\n")[0]))
        return
    if what:
        out.say("What if ", Text(clean(what), style="bold"), f", in run {clean(one.run)} of ", whose, "?")
    calls = f"{count(one.calls, 'call')}, {count(one.compared, 'checkpoint')} with equal digests"
    if one.same:
        out.say(
            Text(f"The same way{_so_far(one)}: ", style="bold green"), f"run {clean(one.run)} of ", whose, f", {calls}."
        )
    else:
        out.say(Text(f"{_status(one).plain}: ", style="bold"), clean(_parts_of_end(one)), f" ({calls})")
    if one.difference is not None:
        _show(session, one.difference)
    for tried in one.blocked:
        out.say(Text("! refused: ", style="bold red"), clean(f"{tried['what']} at {tried['line']}"))
    for name in one.live:
        out.say(Text("! called: ", style="yellow"), clean(name))
    for line in one.suspect:
        out.say(Text("! breaks an invariant: ", style="yellow"), clean(line))
    for line in one.changes[:_LINES]:
        out.say(clean(line))
    if one.check is not None:
        out.say("The check ", Text("holds." if one.check else "does not hold.", style="green" if one.check else "red"))
    for place in one.nowhere:
        out.say(Text(f"nowhere: {clean(place)} was never in the state", style="yellow"))
    bad = first_bad(one) if check else None
    for moment in [bad] if bad is not None else one.moments if not check else ():
        out.say(Text(clean(moment.line), style="cyan"), f"  {clean(moment.source)}")
        out.note(f"    {clean(moment.old)} -> {clean(moment.new)}, after step {moment.step}")


def _so_far(*some: Execution) -> str:
    return " as far as it is recorded" if any(one.partial for one in some) else ""


def _show(session: Session, found: Difference) -> None:
    where = f"at {found.path}" if found.path else "at the end"
    session.out.say("The ways part ", Text(where, style="yellow"), f", {clean(found.line)}" if found.line else "")
    session.out.say(Text(f"- {clean(found.expected)}", style="red"))
    session.out.say(Text(f"+ {clean(found.actual)}", style="green"))
    for line in found.differs:
        session.out.note(f"  {clean(line)}")


def _parts_of_end(one: Execution) -> str:
    whole = f"returned {one.result}" if one.result else one.status.removeprefix("stopped") or "it went no further"
    return one.failed or one.stopped or one.error or whole


def _parts(one: Execution) -> str:
    found = one.difference
    if one.failed:
        return one.failed
    if found is None:
        return one.stopped or (one.blocked[0]["what"] if one.blocked else "nowhere")
    differs = found.differs[0] if found.differs else f"{found.expected} / {found.actual}"
    return f"{f'at {found.path}' if found.path else 'at the end'}: {differs}"


def _status(one: Execution) -> Text:
    word = "not executed" if one.failed else one.status.partition(":")[0]
    return Text(word, style={"finished": "green", "failed": "red"}.get(word, "yellow"))


def _checked(one: Execution, check: str) -> str:
    return "holds" if one.check else "no" if one.check is False else "unknown" if check else ""


def _minimal(session: Session, found: Minimal, *, json: bool) -> int:
    if json:
        data = {name: value for name, value in asdict(found).items() if name != "last"}
        return session.json("replay.minimise", **data, last=_json(found.last))
    session.out.say(
        f"{count(len(found.items), 'item')} of {found.of} in {clean(found.target)} ",
        Text("still fail" if len(found.items) != 1 else "still fails", style="bold red"),
        f", after {count(found.tries, 'try', 'tries')}:",
    )  # fmt: skip
    for item in found.items:
        session.out.say(f"  {clean(item)}")
    if found.whole:
        session.out.note("The tries were used up: there may be less.")
    if found.unknown:
        session.out.note(f"Of some tries nobody can say: {clean(found.unknown)}. There may be less.")
    return 0
