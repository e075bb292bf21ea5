"""``holdfast effects``: what an agent did outside, and deciding what is in doubt."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from holdfast import Agent, Effect, Store
from holdfast.cli.complete import revisions
from holdfast.cli.output import Output
from holdfast.cli.programs import given_json
from holdfast.cli.session import Flag, Given, Json, Limit, OnBranch, Wait, is_pattern, limited, reader, writer
from holdfast.cli.text import ago, clean, count, now, shorten
from holdfast.cli.values import whose
from holdfast.errors import BadOption, command
from holdfast.schemas import effect_json, text_of

NO_DOUBT = "Nothing is in doubt."
_CALL_CHARACTERS = 100
_RESULT_CHARACTERS = 80
_ALL = 2**62
_HEADS = ("effect", "when", "status", "kind", "call", "result")
_STYLES = {
    "done": "green", "in doubt": "bold red", "open": "yellow", "failed": "red", "lost": "red", "not done": "dim",
    "undone": "magenta", "running": "cyan",
}  # fmt: skip

effects = App(name="effects", help="Show what an agent did outside, or decide what is in doubt.")


@effects.default
def list_(
    agent: Annotated[str | None, Parameter(completer=revisions, metavar="PATTERN", show_default=False)] = None,
    /,
    *,
    in_doubt: Flag = False,
    run: Annotated[str | None, Parameter(metavar="ID", show_default=False)] = None,
    limit: Limit = None,
    full: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Show what agents did outside: of one the oldest first, of many the newest. `effects resolve` decides doubts.

    Each line: the effect's id (reads have none), when, what became of it, its kind, the call, the result or error. Of
    one run (--run), the position of the call first, as `holdfast runs fork` takes it.

    Parameters
    ----------
    agent
        NAME or NAME@BRANCH, or NAME@REV for what came after that checkpoint; or a pattern: 'trip-*'. [default: all]
    in_doubt
        Only what is in doubt.
    run
        Only calls of this run, of one agent.
    full
        Show arguments and results whole, also the parts of the state that a read was given.
    """
    with session.reading() as store:
        most = limited(limit, json=json)
        name = branch = None
        if agent is None or is_pattern(agent):
            if run is not None:
                raise BadOption("whose run is it?", hint="Name the agent: holdfast effects NAME --run ID.")
            page = store.effects(agent, in_doubt=in_doubt, limit=most)
            shown, more = list(page), page.more
        else:
            handle, since = _looking(store, agent)
            name, branch = handle.name, handle.branch_name
            found = handle.effects(since=since or None, run=run)
            if run is not None and not found and run not in {info.id for info in handle.runs()}:
                raise BadOption(f"{name} has no run {run!r}", hint=f"See `{command('runs', name)}`.")
            found = [one for one in found if not in_doubt or one.status == "in doubt"]
            shown = found[-most:] if most is not None else found
            more = len(found) - len(shown)
        if json:
            listed = [effect_json(one, full=full) for one in shown]
            return session.json("effects", agent=name, branch=branch, effects=listed, more=more)
        out = session.out
        if shown:
            _print(out, shown, agents=name is None, placed=run is not None, full=full)
        elif in_doubt:
            out.say(NO_DOUBT)
        else:
            who = f"{clean(name)} has done nothing" if name is not None else "Nothing was done"
            out.say(f"{who} outside that is recorded.")
        if more and name is None:
            rest = f"More on up to {count(more, 'branch', 'branches')}; -n 0 shows all, --in-doubt or a pattern some."
            out.note(rest)
        else:
            out.left_out(more, "older call")
    return 0


@effects.command
def resolve(
    agent: OnBranch,
    effect: str,
    /,
    *,
    done: Annotated[str | None, Parameter(metavar="JSON", show_default=False)] = None,
    not_done: Flag = False,
    why: Annotated[str, Parameter(metavar="TEXT")],
    wait: Wait = 0.0,
    json: Json = False,
    session: Given,
) -> int:
    """Decide what became of an effect that is in doubt, after you have found out.

    The decision is recorded with your name and your reason. Then run the program again: it resumes from there.

    Parameters
    ----------
    effect
        The effect's id, or its first characters.
    done
        It happened, and the call would have returned this. Use null when nothing counts on it.
    not_done
        It did not happen: the call will be made again, with the same key.
    why
        How you know.
    """
    if (done is None) is not not_done:
        raise BadOption("say what became of it", hint="Either --done JSON, or --not-done.")
    result = given_json(done, "the result") if done is not None else None
    with session.writing() as store, writer(store, agent, wait) as (name, branch, handle):
        decided = handle.resolve(effect, "not-done" if not_done else "done", result=result, why=why)
        left = [one for one in handle.effects() if one.status == "in doubt"]
        if json:
            about = {"effect": effect_json(decided), "in_doubt": len(left)}
            return session.json("effects.resolve", agent=name, branch=branch, **about)
        session.out.say(
            Text("Recorded: ", style="bold green"), Text(decided.id, style="yellow"), f" {call_of(decided)} is ",
            "not done; it will be called again." if not_done else "done.",
        )  # fmt: skip
        rest = f"{count(len(left), 'effect is', 'effects are')} still in doubt." if left else NO_DOUBT
        session.out.note(rest)
    return 0


@effects.command
def accept(agent: OnBranch, /, *, wait: Wait = 0.0, json: Json = False, session: Given) -> int:
    """Say that what an agent did is known, though its state is not: what is left over answers no call, and stops none.

    For what `MaybeRepeated` names: writes after the newest checkpoint, or of a LangGraph node that did not finish.
    What is in doubt stays so.
    """
    with session.writing() as store, writer(store, agent, wait) as (name, branch, handle):
        known = handle.accept()
        if json:
            listed = [effect_json(one) for one in known]
            return session.json("effects.accept", agent=name, branch=branch, effects=listed)
        if known:
            session.out.columns(_HEADS, [_row(one) for one in known])
            session.out.say(Text(f"{count(len(known), 'effect')} accepted.", style="bold green"))
        else:
            session.out.say("Nothing is left over.")
    return 0


def _looking(store: Store, text: str) -> tuple[Agent, str]:
    """A reading handle on the branch that is meant, and the revision after which to look ("" for everything)."""
    name, rev = store.resolve(text)
    agent = reader(store, name)
    if not rev:
        return agent, ""
    return (reader(store, name, rev), "") if rev in agent.branches() else (agent, rev)


def _print(out: Output, shown: list[Effect], *, agents: bool, placed: bool, full: bool) -> None:
    heads = (*(["agent"] if agents else []), *(["position"] if placed else []), *_HEADS)
    rows = [
        [
            *([Text(whose(one), style="bold cyan")] if agents else []),
            *([clean(one.path)] if placed else []),
            *_row(one),
        ]
        for one in shown
    ]
    if full:
        for one, row in zip(shown, rows, strict=True):
            out.say(*[piece for part in row[:-2] for piece in (part, "  ")])
            out.say(f"  {call_of(one, full=True)}")
            out.say("  ", _outcome(one, _ALL))
    else:
        out.columns(heads, rows)
    for status, what, advice, ways in (
        ("in doubt", "in doubt", _ASK_PROBE, _NOT_DONE),
        ("lost", "done, with a result that could not be saved", _BRING_BACK, ""),
    ):
        found = [one for one in shown if one.status == status and one.key]
        if found:
            _advise(out, whose(found[0]), found, what, advice, ways)


_ASK_PROBE = "Running it again asks its probe; if that cannot tell, find out and say so:"
_NOT_DONE = "   (or --not-done)"
_BRING_BACK = (
    "Running it again with the classes of their results registered brings these back; or say what was returned:"
)


def advise_doubts(out: Output, found: list[Effect]) -> None:
    """What is in doubt, in few words, and what to do about it."""
    _advise(out, whose(found[0]), found, f"in doubt: {call_of(found[0])}", _ASK_PROBE, _NOT_DONE)


def _advise(out: Output, where: str, found: list[Effect], what: str, advice: str, ways: str) -> None:
    out.say(Text(f"{count(len(found), 'effect is', 'effects are')} {what}. ", style="bold red"), advice)
    settle = command("effects", "resolve", where, found[0].id)
    out.command("  ", f"{settle} --done JSON --why TEXT", ways)


def _row(effect: Effect) -> list[Text | str]:
    return [
        Text(effect.id, style="yellow"),
        ago(effect.at, now()),
        Text(effect.status, style=_STYLES.get(effect.status, "")),
        effect.kind,
        call_of(effect),
        _outcome(effect),
    ]


def call_of(effect: Effect, *, full: bool = False) -> str:
    """``book(flight='LH1')``."""
    if effect.let_go:
        return f"{clean(effect.tool)}(…)"
    given, limit = (effect.whole(), _ALL) if full else (effect.args, _CALL_CHARACTERS)
    arguments = ", ".join(f"{name}={text_of(value, limit)}" for name, value in given.items())
    return f"{clean(effect.tool)}({clean(shorten(arguments, limit))})"


def _outcome(effect: Effect, limit: int = _RESULT_CHARACTERS) -> Text | str:
    if effect.let_go:
        return Text("let go", style="dim")
    if effect.status == "done":
        return text_of(effect.result, limit)
    said = effect.error or effect.why
    if effect.status == "lost" and effect.result is not None:
        return text_of(effect.result, limit)
    return Text(clean(shorten(said, limit)), style="dim")
