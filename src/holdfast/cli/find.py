"""``holdfast bisect``, ``blame``, ``check`` and ``probe``: which change broke it, who changed what, what breaks rules.

Owns what a command of the user's is told about a state, and what its exit code means. All of it only reads.
"""

from __future__ import annotations

import json as json_
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from msgspec.structs import asdict
from rich.text import Text

import holdfast
from holdfast import Bisection, Checkpoint, Document, Invariant, Store
from holdfast.cli.effects import call_of
from holdfast.cli.exits import DIFFERENT
from holdfast.cli.output import Output
from holdfast.cli.programs import check_of
from holdfast.cli.session import (
    Flag,
    Given,
    Json,
    Limit,
    Ref,
    Revision,
    Session,
    absolute,
    bars,
    limited,
    looking,
    option,
    reader,
)
from holdfast.cli.text import ago, clean, count, now, shorten
from holdfast.cli.values import change_lines, named
from holdfast.errors import BadExpression, BadOption, format_path
from holdfast.schemas import as_json
from holdfast.travel import (
    Abort,
    Blame,
    Cause,
    Check,
    Expression,
    Moment,
    Probe,
    Verdict,
    declared,
    log_of,
    moment_before,
)

SKIP, ABORTS = 125, 128  # exit codes of a check, as git's bisect has them
_FILE_MAX_BYTES = 2**20
_SHOWN = 8  # changes and calls that a person reads

bisect = App(name="bisect", help="Find the first bad checkpoint of an agent.")


@bisect.default
def find(
    agent: Revision,
    /,
    *command: Annotated[str, Parameter(allow_leading_hyphen=True, show_default=False)],
    when: Annotated[str | None, option(metavar="EXPR")] = None,
    check: Annotated[str | None, option(metavar="CHECK")] = None,
    good: Ref = None,
    repeats: Annotated[int, option(metavar="N")] = 1,
    confidence: Annotated[float, option(metavar="P")] = 0.95,
    every: Annotated[bool, option(name="--all")] = False,
    program: Annotated[str | None, option(metavar="PROGRAM")] = None,
    fresh: Flag = False,
    limit_s: Annotated[float, option(name="--limit", metavar="SECONDS")] = 600.0,
    json: Json = False,
    session: Given,
) -> int:
    """Find the first bad checkpoint: `holdfast bisect trip-7 --when "budget < 0"`, or `holdfast bisect trip-7 -- CMD`.

    Checks both ends, then halves. A command finds the state as JSON in the file $HOLDFAST_STATE, and $HOLDFAST_STORE
    and $HOLDFAST_REVISION; exit code 0 is good, 125 skips, 128 and above ends the search, all others are bad. What was
    found out is kept: an interrupted search goes on. `holdfast bisect log NAME` shows it. Ends with 1 if none is bad.

    Parameters
    ----------
    agent
        NAME or NAME@REV: the bad end. [default: the newest checkpoint]
    command
        After --: a program that checks a state.
    when
        It is bad where this is true.
    check
        A function of the state that returns True where all is well, or an expression that is true there.
    good
        The good end. [default: the oldest checkpoint]
    repeats
        For a check that is not always right: ask it up to so many times about each. [default: 1]
    confidence
        With --repeats, how sure the answer is to be. [default: 0.95]
    every
        Look at every checkpoint, to see whether it was bad more than once.
    program
        The file or module that has the run's function: the run is executed again, and the guilty step found.
    fresh
        Ask again about what is known from another time.
    limit_s
        A command that takes longer is ended, and its checkpoint skipped. [default: 600]
    """
    if command and command[0].startswith("-"):
        hint = "The bad end is NAME@REV, the good one --good REV; a command goes after --."
        raise BadOption(f"there is no option {command[0]}", hint=hint)
    if sum(map(bool, (command, when, check))) != 1:
        raise BadOption(
            "a bisection needs one check", hint='Give --when "budget < 0", --check MODULE:FUNCTION or -- CMD.'
        )
    if len(command) == 1 and _is_expression(command[0]) and shutil.which(command[0]) is None:
        raise BadOption(
            f"there is no program {command[0]!r}", hint=f"An expression goes after --when: --when {command[0]!r}."
        )
    named = check is not None and not _is_expression(check)
    asked: Any = check_of(check) if check is not None and named else check
    with _opened(session, named=named) as store:
        handle, bad = looking(store, agent)
        if command:
            asked = Command(command, store.place, handle.name, limit_s)
        with bars(session.err) as report:
            found = handle.bisect(
                asked, when=when, good=good, bad=bad, repeats=repeats, confidence=confidence, all=every or None,
                program=program, fresh=fresh, progress=report,
            )  # fmt: skip
        if json:
            session.json("bisect", **found.to_json())
        else:
            _print_bisection(session.out, found)
    return 0 if found else DIFFERENT


@bisect.command(name="log")
def history(agent: Revision, /, *, limit: Limit = None, json: Json = False, session: Given) -> int:
    """Show what bisections of an agent have found out, newest last.

    Parameters
    ----------
    agent
        The agent's NAME.
    """
    with session.reading() as store:
        name, _ = store.resolve(agent)
        said = log_of(reader(store, name))
        most = limited(limit, json=json)
        shown = said[-most:] if most is not None else said
        if json:
            return session.json("bisect.log", agent=name, verdicts=shown, more=len(said) - len(shown))
        if not said:
            session.out.say(f"No bisection of {clean(name)} is known.")
        for one in shown:
            line = Text(f"#{clean(str(one.get('depth', '?')))[:6]:<6}").append(
                str(one["checkpoint"])[:12], style="yellow"
            )
            line.append(f"  {clean(str(one.get('verdict')))}  ", style=_STYLES.get(str(one.get("verdict")), ""))
            session.out.say(line.append(clean(f"{one.get('check', '')}  {one.get('why', '')}".rstrip()), style="dim"))
        session.out.left_out(len(said) - len(shown), "older verdict")
    return 0


def _is_expression(text: str) -> bool:
    with suppress(BadExpression):
        return bool(Expression(text))
    return False


@contextmanager
def _opened(session: Session, *, named: bool) -> Iterator[Store]:
    """Where a program was named, its classes are known; otherwise the store is read as inert data."""
    store = session.opened(session.place, create=False, readonly=True) if named else session.reading()
    with store:
        yield store


class Command(Check):
    """A program of the user's that judges a state by its exit code."""

    def __init__(self, words: tuple[str, ...], store: str, agent: str, limit_s: float) -> None:
        self._words, self._store, self._agent, self._limit_s = words, store, agent, limit_s
        self.name = shorten(" ".join(words), 200)
        seen = blake2b(digest_size=16)  # with the files that it names: another check than before it was mended
        for word in words:
            file = Path(word)
            if file.is_file() and file.stat().st_size <= _FILE_MAX_BYTES:
                seen.update(file.read_bytes())
        self.identity = f"{list(words)} {Path.cwd()} {seen.hexdigest()}"

    def judge(self, state: Document, checkpoint: Checkpoint | None) -> tuple[Verdict, str]:
        """Run it once."""
        with tempfile.TemporaryDirectory(prefix="holdfast-bisect-") as folder:
            file = Path(folder, "state.json")
            file.write_text(json_.dumps(as_json(holdfast.plain(state))), encoding="utf-8")
            about = {
                "HOLDFAST_STATE": str(file),
                "HOLDFAST_STORE": absolute(self._store),
                "HOLDFAST_AGENT": self._agent,
            }
            if checkpoint is not None:
                about["HOLDFAST_REVISION"] = f"{self._agent}@id:{checkpoint.id}"
            try:
                done = subprocess.run(  # noqa: S603 - it is the user's own
                    self._words, env={**os.environ, **about}, timeout=self._limit_s, check=False,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return "skip", f"it took longer than {self._limit_s:g} s"
            except OSError as error:
                raise Abort(f"{self._words[0]} cannot be run: {error.strerror}") from None
        if done.returncode < 0 or done.returncode >= ABORTS:
            raise Abort(f"{self._words[0]} ended with {done.returncode}")
        if done.returncode == SKIP:
            return "skip", f"it ended with {SKIP}"
        return ("good" if done.returncode == 0 else "bad"), ""


_STYLES = {"good": "green", "bad": "bold red", "skip": "yellow"}
_PLAIN = ("", "until", "before", "confidence", "enough", "step")


def _print_bisection(out: Output, found: Bisection) -> None:
    for fact in found.answer():
        _print_fact(out, fact, found.checkpoint if fact[0] == "first bad" else None)
    if found.cause is not None:
        _print_cause(out, found.cause)
    changes = list(found.change)
    for line in change_lines(changes[:_SHOWN]):
        out.say("  ", line)
    if len(changes) > _SHOWN:
        out.note(f"… {count(len(changes) - _SHOWN, 'more change')}: holdfast diff shows them.")
    *notes, looked = found.notes()
    for fact in notes:
        _print_fact(out, fact)
    out.note("".join(map(str, looked[1])))


def _print_fact(out: Output, fact: tuple[str, Sequence[str | Checkpoint]], dated: Checkpoint | None = None) -> None:
    name, parts = fact
    style = "" if name in _PLAIN else "yellow"
    shown = [named(part) if isinstance(part, Checkpoint) else Text(clean(part), style=style) for part in parts]
    if dated is not None and parts[0] is dated:
        shown.append(Text(f"  {ago(dated.time, now())}", style="dim"))
    if name:
        _fact(out, name, *shown)
    else:
        out.say(*shown)


def _fact(out: Output, name: str, *parts: Text | str) -> None:
    out.say(Text(f"{name:<10} ", style="dim"), *parts)


def _print_cause(out: Output, cause: Cause) -> None:
    if cause.caller:
        _fact(out, "saved at", clean(cause.caller))
    if cause.stack:
        _fact(out, "in", clean(" > ".join(cause.stack)))
    if len(cause.effects) > _SHOWN:
        _fact(out, "after", count(len(cause.effects) - _SHOWN, "other call"))
    for effect in cause.effects[-_SHOWN:]:
        _fact(out, "after", Text(effect.id or f"read {effect.number}", style="yellow"), f"  {call_of(effect)}")


# -- blame ----------------------------------------------------------------------------------------------------------


def blame(
    agent: Revision,
    path: str,
    /,
    *,
    line: Annotated[str, option(metavar="PROGRAM")] = "",
    json: Json = False,
    session: Given,
) -> int:
    """Show which checkpoint changed a place of the state last.

    With it, the calls outside since the checkpoint before, and the line of the program that asked for it. --line names
    the line that changed the place: it executes the run again, as `holdfast replay --watch` does.

    Parameters
    ----------
    agent
        NAME, or NAME@REV to look back from there.
    path
        The place, such as budget or messages[3].content.
    line
        The file or module that has the run's function: FILE.py, MODULE, FILE.py:FUNCTION.
    """
    with session.reading() as store:
        handle, checkpoint = looking(store, agent)
        found = handle.blame(path, at=checkpoint)
        moment = _moment(store, handle.name, found, line) if line else None
        if json:
            more = {"moment": asdict(moment) if moment is not None else None} if line else {}
            return session.json("blame", agent=handle.name, **found.to_json(), **more)
        _print_blame(session.out, found)
        if moment is not None:
            _fact(session.out, "line", Text(clean(moment.line), style="cyan"), f"  {clean(moment.source)}")
    return 0


def _moment(store: Store, name: str, found: Blame, program: str) -> Moment:
    where, at = format_path(found.path_then), found.checkpoint
    watched = store.moments(name, where, at, program=program, branch=at.branch)
    moment = moment_before(watched, at.id)
    if moment is None:
        why = watched.failed or str(watched.difference or "the run does not change it when it is executed again")
        raise BadOption(
            f"the line that changed {where} was not found: {why.partition(chr(10))[0]}", hint="See `holdfast replay`."
        )
    return moment


def _print_blame(out: Output, found: Blame) -> None:
    one = found.checkpoint
    _fact(out, found.kind, named(one), Text(f"  {ago(one.time, now())}", style="dim"))
    if not found.exact:
        _fact(out, "or", "one of the checkpoints before it, which were forgotten")
    _print_cause(out, found.cause)
    for line in change_lines([found.change]):
        out.say("  ", line)


# -- check ----------------------------------------------------------------------------------------------------------


def check(
    agent: Revision,
    /,
    *rules: Annotated[str, Parameter(show_default=False)],
    declared_in: Annotated[str | None, option(name="--file", metavar="FILE")] = None,
    function: Annotated[tuple[str, ...], option(name="--check", metavar="MODULE:FUNCTION")] = (),
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """Ask of every checkpoint whether rules hold.

    `holdfast check trip-7 "budget >= 0"` lists those where it does not, and ends with 1 if there are any.

    Parameters
    ----------
    agent
        NAME, or NAME@REV to end there.
    rules
        Expressions that must be true.
    declared_in
        A TOML file with tables [[invariant]]: path or check, then type, range, monotonic, unique, references, field.
    function
        A function of the state that returns False or raises where something is wrong.
    """
    invariants = [Invariant(rule) for rule in rules]
    invariants += [Invariant(check_of(one), name=one) for one in function]
    invariants += _in_file(Path(declared_in)) if declared_in is not None else []
    if not invariants:
        raise BadOption("there is no rule to check", hint='Give an expression: holdfast check NAME "budget >= 0".')
    with _opened(session, named=bool(function)) as store:
        handle, checkpoint = looking(store, agent)
        found = handle.check(*invariants, until=checkpoint)
        most = limited(limit, json=json)
        shown = found[:most]
        if json:
            listed = [one.to_json() for one in shown]
            rest = len(found) - len(shown)
            about = {"agent": handle.name, "checked": checkpoint.depth, "nowhere": list(found.nowhere)}
            session.json("check", **about, violations=listed, more=rest)
        else:
            for place in found.nowhere:
                _fact(session.out, "nowhere", Text(f"{clean(place)} is in no checkpoint", style="yellow"))
            for one in shown:
                mark = Text("✗ " if session.out.unicode else "x ", style="bold red" if one.first else "dim")
                session.out.say(mark, named(one.checkpoint), f"  {clean(one.invariant)}: {clean(one.why)}")
            session.out.left_out(len(found) - len(shown), "later violation")
            session.out.note(f"{count(len(found), 'violation')} of {count(len(invariants), 'rule')}.")
    return DIFFERENT if found else 0


def _in_file(file: Path) -> list[Invariant]:
    import tomllib

    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of TOML, or of UTF-8
        raise BadOption(f"{file} cannot be read: {error}", hint="See the guide, Guard your state.") from None
    tables = content.get("invariant")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadOption(f"{file} has no [[invariant]]", hint='Write [[invariant]], path = "budget", range = [0, 100].')
    return [declared(table, f"{file}, invariant {at}") for at, table in enumerate(tables, 1)]


# -- probe ----------------------------------------------------------------------------------------------------------


def probe(
    pid: int,
    /,
    *,
    function: Annotated[str, option("The function, as that process has it loaded.", "MODULE:FUNCTION")],
    when: Annotated[str | None, option("Only calls for which this holds: 'amount > 100'.", "EXPR")] = None,
    then: Annotated[Literal["dump", "checkpoint", "log"], option("What to take. [default: dump]")] = "dump",
    most: Annotated[int, option("End after so many. [default: 1]", "N")] = 1,
    every: Annotated[float, option("At most one in so many seconds. [default: 1]", "SECONDS")] = 1.0,
    wait: Annotated[float, option("How long the process may take to answer. [default: 10]", "SECONDS")] = 10.0,
    limit: Annotated[float | None, option("End after so long. [default: never]", "SECONDS")] = None,
    to: Annotated[Path | None, option("Where a dump goes that is taken from outside.", "FOLDER")] = None,
    json: Json = False,
    session: Given,
) -> int:
    """Capture a running process when it calls a function.

    A dump is taken right at the call. A checkpoint is asked for, and taken by the process at its next safe point. Needs
    Python 3.14 here and there, or a process that runs under `holdfast run` or has called `holdfast.crash.install()`.
    The probe is removed when this command ends, however it does. Ends with 1 if there was no such call.

    Parameters
    ----------
    pid
        The process.
    """
    found = []
    with Probe(pid, function, when=when, then=then, most=most, every_s=every, wait_s=wait, to=to) as probing:
        if not json:
            session.err.note(f"Python {clean(probing.python)}: {probing.cost}.")
        probing.begin()
        if not json:
            session.err.note(f"Waiting for {clean(probing.place)}; Ctrl-C ends it.")
        for capture in probing.captures(limit):
            found.append(capture)
            if not json:
                values = ", ".join(f"{name}={text}" for name, text in capture.values.items())
                call = clean(f"{function}({values}) in {capture.thread}")
                session.out.say(Text(f"{capture.number}. ", style="bold"), call)
                for text in (capture.dump, capture.problem, *(f"asked {name}" for name in capture.asked)):
                    if text:
                        session.out.say(f"   {clean(text)}")
        if json:
            captures = [one.to_json() for one in found]
            session.json("probe", captures=captures, checkpoints=probing.checkpoints, problem=probing.problem)
        else:
            for name, id in probing.checkpoints.items():
                saved = f"saved as {name}@id:{id[:12]}" if id else f"{name} has nothing new to save"
                session.out.say(f"   {clean(saved)}")
            if probing.problem:
                session.out.say(Text(clean(f"--when could not be evaluated: {probing.problem}"), style="yellow"))
    return 0 if found else DIFFERENT
