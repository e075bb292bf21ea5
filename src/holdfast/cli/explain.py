"""``holdfast explain``, ``drift``, ``reconcile`` and ``logs``: why, since when, and back to what should be.

Owns the words. What is found is the library's.
"""

from __future__ import annotations

import json as json_module
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from holdfast.cli.complete import agents
from holdfast.cli.exits import ATTENTION, DIFFERENT
from holdfast.cli.programs import check_of, writing
from holdfast.cli.session import Consent, Given, Json, Limit, OnBranch, Ref, limited, on_branch, option, reader
from holdfast.cli.text import clean
from holdfast.errors import BadOption
from holdfast.run import Tool, module_of
from holdfast.travel import Reconciled

_FILE_MAX = 2**20
_SHOWN = 6  # tools in a message
_CHECK = "An expression that is true where all is well, or MODULE:FUNCTION; the first checkpoint that fails it counts."


def explain(
    what: Annotated[str, option("A dump (*.hfdump), or an agent's NAME or NAME@BRANCH.", completer=agents)],
    /,
    *,
    agent: Annotated[str | None, option("Which agent, where a dump has several.", "NAME")] = None,
    check: Annotated[str | None, option(_CHECK)] = None,
    invariant: Annotated[tuple[str, ...], option("An expression that should always be true.", "EXPRESSION")] = (),
    json: Json = False,
    session: Given,
) -> int:
    """Say what broke an agent: the likeliest changes, with evidence.

    The likeliest comes first, each says how sure it is. "Not found" is an answer, and ends with 1.
    """
    asked: Any = check_of(check) if check is not None and _is_function(check) else check
    with session.reading() as store:
        if what.endswith(".hfdump"):
            report = store.explain(Path(what), agent=agent, check=asked, invariants=invariant)
        else:
            name, branch = on_branch(store, what)
            report = store.explain(name, branch=branch, check=asked, invariants=invariant)
        if json:
            session.json("explain", **report.to_json())
        else:
            for line in report.lines():
                strong = line[:1].isdigit()
                session.out.say(Text(clean(line), style="bold" if strong else ""), wrap=True)
    return 0 if report else DIFFERENT


def _is_function(text: str) -> bool:
    place, found, name = text.rpartition(":")
    return bool(found) and name.replace(".", "").isidentifier() and " " not in place


def drift(
    agent: OnBranch,
    /,
    *,
    baseline: Annotated[str, option("The tag, or another REV, that is as it should be.", "REV")],
    at: Ref = None,
    path: Annotated[
        tuple[str, ...], option("A place of the state to compare, too; then only such are watched for drift.", "PATH")
    ] = (),
    may: Annotated[tuple[str, ...], option("What may differ: NAME, NAME=minor, NAME=5%; * for any.", "RULE")] = (),
    json: Json = False,
    session: Given,
) -> int:
    """Compare an agent with a baseline, and watch its values for drift.

    Compared are configuration, environment, versions, tools, and the places that you name. Ends with 1 when something
    differs that no rule allows.

    Parameters
    ----------
    at
        What is compared with it. [default: the newest]
    """
    with session.reading() as store:
        name, branch = on_branch(store, agent)
        found = reader(store, name, branch).drift(baseline, at, paths=path, may=may)
        if json:
            session.json("drift", **found.to_json())
        else:
            for line in found.lines():
                session.out.say(clean(line), wrap=True)
    return DIFFERENT if found else 0


def reconcile(
    agent: OnBranch,
    file: Annotated[Path, option("JSON: {'desired': {...}, 'tools': {'settings.*': 'module:function'}}.")],
    /,
    *,
    plan: Annotated[bool, option("Only show what would be done.", name=["--plan", "--dry-run"])] = False,
    actions: Annotated[int, option("At most so many actions.", "N")] = 20,
    rounds: Annotated[int, option("At most so many rounds.", "N")] = 3,
    yes: Annotated[bool, option("Do it without asking.")] = False,
    json: Json = False,
    session: Given,
) -> int:
    """Bring an agent to a desired state, by tools that a file names.

    Each action is recorded and can be undone. It shows what would be done, and asks. Ends with 7 when it does not
    converge, and says why.
    """
    desired, tools = _wanted(file)
    consent = Consent(dry_run=plan, yes=yes, json=json)
    with writing(session, [place for place, _ in tools.values()]) as store:
        agent_name, branch = on_branch(store, agent)
        functions = {pattern: _tool(place, name) for pattern, (place, name) in tools.items()}
        with store.agent(agent_name, branch=branch, create=False) as handle:
            first = handle.plan_reconcile(desired, functions)
            if not json:
                for action in first:
                    session.out.say(clean(str(action)), wrap=True)
                if not first:
                    session.out.say("Nothing differs.")
            planned = [action.to_json() for action in first]
            if first and not consent.given(session, f"Do these {len(first)}?"):
                if json:
                    session.json("reconcile", plan=planned, **Reconciled(agent_name, left=first).to_json())
                return consent.code(done=False)
            with redirect_stdout(sys.stderr) if json else nullcontext():
                done = handle.reconcile(desired, functions, yes=True, actions=actions, rounds=rounds)
        if json:
            session.json("reconcile", plan=planned, **done.to_json())
        else:
            for line in done.lines():
                session.out.say(clean(line), wrap=True)
    return 0 if done else ATTENTION


def _wanted(file: Path) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """What a file asks for: the desired state, and for each pattern the module and the function."""
    try:
        content = json_module.loads(file.read_bytes()[: _FILE_MAX + 1])
        desired, tools = content["desired"], content.get("tools", {})
        named = {str(pattern): str(text).rpartition(":") for pattern, text in tools.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadOption(f"{file} cannot be read: {error}", hint='Write {"desired": {...}, "tools": {...}}.') from error
    if not isinstance(desired, dict) or not all(found for _, found, _ in named.values()):
        raise BadOption(f"{file} does not say what is desired, or by which tools", hint="A tool is MODULE:FUNCTION.")
    return desired, {pattern: (place, name) for pattern, (place, _, name) in named.items()}


def _tool(place: str, name: str) -> Any:
    module = module_of(place)
    try:
        return getattr(module, name)
    except AttributeError:
        there = [one for one, value in vars(module).items() if isinstance(getattr(value, "tool", None), Tool)]
        hint = f"Tools in it: {', '.join(there[:_SHOWN]) or 'none'}."
        raise BadOption(f"{place} has no {name!r}", hint=hint) from None


def logs(
    agent: OnBranch,
    /,
    *,
    at: Ref = None,
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """Show what a program logged, with the checkpoint of each line.

    `holdfast show NAME@id:...` is its state then.

    Parameters
    ----------
    at
        Only what was logged while this checkpoint was the newest.
    """
    most = limited(limit, json=json)
    with session.reading() as store:
        name, branch = on_branch(store, agent)
        found = reader(store, name, branch).logs(at, limit=most)
        if json:
            return session.json("logs", agent=name, branch=branch, lines=[line.to_json() for line in found])
        if not found and at is not None:
            session.out.say(f"Nothing was logged while {clean(at)} was the newest checkpoint of {clean(name)}.")
        elif not found:
            session.out.say(f"No lines of {clean(name)} are kept: agent.log_handler() and agent.metrics() keep some.")
        for line in found:
            asked = Text(" asked for a checkpoint", style="yellow") if line.asked else Text("")
            head = Text(f"{line.at:%Y-%m-%d %H:%M:%S} ", style="dim")
            body = Text(f"{clean(line.level)} {clean(line.logger)}: {clean(line.text)}")
            session.out.say(head, Text(f"{line.checkpoint[:12] or '-':12} ", style="cyan"), body, asked)
    return 0
