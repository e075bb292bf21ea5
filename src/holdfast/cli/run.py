"""``holdfast run``: a script, a durable function, or every run whose time has come; ``worker``; and ``demo``.

Owns which function is executed for whom, and what is said about its end. The programs are those that a person names; a
store only says which of their functions to resume.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Agent, Effect, RunInfo, Store
from holdfast.cli.complete import agents
from holdfast.cli.effects import advise_doubts
from holdfast.cli.exits import ATTENTION, DAMAGED, FAILED, RAISED, exit_code
from holdfast.cli.processes import interval, supervised
from holdfast.cli.programs import given_json, load, run_file, show_ended, show_raised, waits
from holdfast.cli.runs import style_of
from holdfast.cli.session import Flag, Given, Json, Session, Types, absolute, on_branch
from holdfast.cli.text import clean, count
from holdfast.cli.values import whose
from holdfast.errors import AgentBusy, BadOption, Cancelled, HoldfastError, UnknownAgent, Waiting, command
from holdfast.run import DURABLES, Options, Worked, Worker, configured, existing, function_of, known, told
from holdfast.schemas import run_json, text_of

Failed = Callable[[BaseException], Any]
_RESULT_CHARACTERS = 400
# Options of this verb that take a word after them; needed to find where a script's own words begin.
_TAKING = frozenset({"--store", "--agent", "--args", "--id", "--images", "--limit", "--types"})


def run(
    program: str | None = None,
    /,
    *words: str,
    agent: Annotated[str | None, Parameter(completer=agents, metavar="NAME", show_default=False)] = None,
    args: Annotated[str | None, Parameter(metavar="JSON", show_default=False)] = None,
    id: Annotated[str | None, Parameter(metavar="ID", show_default=False)] = None,
    change: Flag = False,
    again: Flag = False,
    no_wait: Flag = False,
    limit: Annotated[float | None, Parameter(metavar="SECONDS", show_default=False)] = None,
    due: Flag = False,
    images: Annotated[str | None, Parameter(metavar="every=TIME", show_default=False)] = None,
    no_dumps: Flag = False,
    types: Types = (),
    json: Json = False,
    session: Given,
) -> int:
    """Run a script or a durable function, or resume runs that are due.

    * `holdfast run FILE [ARGS]`: as `python FILE ARGS`, with the store and the exit codes of this program.
    * `holdfast run MODULE:FUNCTION --agent NAME [--args JSON]`: from the beginning, or from where it stopped.
    * `holdfast run --due PROGRAM...`: runs that waited for a time or a signal that has come.
    * `holdfast run --images every=60s -- COMMAND...`: any program, saved whole again and again.

    Ends with 7 when somebody has to decide something, 8 when it waits, 1 when it failed.

    Parameters
    ----------
    program
        FILE, MODULE:FUNCTION or FILE.py:FUNCTION; with --due modules and files that have the functions.
    words
        What a script finds in sys.argv.
    agent
        Whose run it is, NAME or NAME@BRANCH. The agent is made if there is none.
    args
        The function's arguments after the agent: a JSON array, or an object of named ones.
    id
        A name for the run: once it has finished, its result is returned and nothing is executed again.
    change
        Resume an unfinished run though these are other arguments than it was begun with.
    again
        Begin a run anew whose --id was cancelled or rolled back, or failed long ago.
    no_wait
        Do not block where the run sleeps or waits for a signal: end with 8.
    limit
        Tell a run that begins now to stop after so many seconds, wherever it is executed then.
    due
        Resume every run whose time or signal has come, as far as it gets without waiting.
    images
        Save the program whole as often as this, as `holdfast freeze` does: every=60s, every=5m. The last three stay.
    no_dumps
        Do not watch the program: when it crashes, it leaves no dump.
    json
        Print JSON (schema holdfast.run/1, or holdfast.run.due/1). What the program prints goes to stderr.
    """
    if images is not None:
        if args is not None or id is not None or limit is not None or due or json:
            raise BadOption("a program is run as it is", hint="holdfast run --images every=60s -- COMMAND...")
        return supervised(session, [*([program] if program is not None else []), *words], interval(images), agent)
    if due:
        if agent is not None or args is not None or id is not None or limit is not None or change or again:
            raise BadOption(
                "--due resumes every run that can",
                hint="Leave --agent, --args, --id, --limit, --change and --again away.",
            )
        with watched(session, wanted=not no_dumps):
            return _due(session, (*(() if program is None else (program,)), *words), types, json=json)
    if program is None:
        raise BadOption("what is to be run?", hint="holdfast run FILE, MODULE:FUNCTION --agent NAME, or --due.")
    if not names_function(program):
        if agent is not None or args is not None or id is not None or limit is not None or json:
            raise BadOption(
                "a script is run as it is", hint="--agent, --args, --id, --limit and --json need MODULE:FUNCTION."
            )
        with _accounted(session):
            return _script(session, program, words, dumps=not no_dumps)
    if words:
        raise BadOption(f"too many arguments: {' '.join(words)}", hint="Give them with --args JSON.")
    if agent is None:
        raise BadOption("whose run is it?", hint="Add --agent NAME.")
    given = _arguments(args)
    with (
        _accounted(session),
        watched(session, wanted=not no_dumps) as failed,
        foreign_code(json=json, failed=failed),
    ):
        function = function_of(program)
        with session.working(types) as store:
            options = Options(id=id, wait=not no_wait, change=change, again=again, limit_s=limit)
            info, result = _execute(store, function, agent, given, options)
            data = run_json(info)
    if json:
        session.json("run", run=data)
    else:
        _finished(session, info, result)
    return 0


def names_function(program: str) -> bool:
    """Whether it is MODULE:FUNCTION, not a file."""
    return ":" in program.rpartition("/")[2]


def marked(arguments: Sequence[str]) -> list[str]:
    """The command line with ``--`` before a script's own words, so that no option among them is taken for ours."""
    words = list(arguments)
    at, verb = 0, False
    while at < len(words):
        word = words[at]
        if word in {"--", "--due", "--images"}:
            return words
        if word.startswith("-"):
            at += 2 if word in _TAKING else 1
        elif not verb:
            if word != "run":
                return words
            verb, at = True, at + 1
        else:
            return words if names_function(word) else [*words[: at + 1], "--", *words[at + 1 :]]
    return words


# -- a script ---------------------------------------------------------------------------------------------------


def _script(session: Session, program: str, words: Sequence[str], *, dumps: bool) -> int:
    file = existing(program)
    if session.place is not None:
        os.environ["HOLDFAST_STORE"] = absolute(session.place)
    sys.argv = [program, *words]
    sys.path.insert(0, str(file.resolve().parent))
    with watched(session, wanted=dumps) as failed:
        hook, ended = sys.excepthook, None
        try:
            run_file(file)
        except HoldfastError as error:
            _tell(failed, error)
            raise
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it is, it is the script's
            ended = error
        if ended is not None:  # not handled any more: what the script's hook raises has no context
            if sys.excepthook != hook:  # the script's own may end the process
                _tell(failed, ended)
            show_ended(ended)
            _tell(failed, ended)
            if isinstance(ended, KeyboardInterrupt):
                raise ended
            raise SystemExit(RAISED) from ended
    return 0


@contextmanager
def _accounted(session: Session) -> Iterator[None]:
    """Inside, a program is executed: what it leaves unfinished when it ends by Ctrl-C or an exception is said."""

    def tell(runs: list[RunInfo], doubts: list[Effect]) -> None:
        for one in runs:
            session.err.say(
                Text("Unfinished: ", style="bold yellow"),
                f"{clean(one.function)} of {whose(one)} (run {clean(one.id)}): {one.status}. Run it again to go on.",
            )
            session.err.command("  ", command("effects", whose(one), "--run", one.id))
        if doubts:
            advise_doubts(session.err, doubts)

    with holdfast.crash.unfinished(tell):
        yield


def _tell(failed: Failed, error: BaseException) -> None:
    """What it ends with is a matter of whoever calls; what is a failure leaves a dump, once."""
    ends = exit_code(error) if isinstance(error, HoldfastError) else RAISED
    if ends in {RAISED, DAMAGED, FAILED} and isinstance(error, Exception):
        failed(error)


@contextmanager
def watched(session: Session, *, wanted: bool) -> Iterator[Failed]:
    """Inside, a crash leaves a dump. Yields what is told of an exception that ends the program."""
    if not wanted:
        yield lambda _error: None
        return
    # Where the program's own open() would make its store, unless one is there: its dumps go into it.
    place = session.place or os.environ.get("HOLDFAST_STORE") or ".holdfast"
    there = session.place is None and (holdfast.crash.folder_of(None).parent / "store.db").is_file()
    installed = holdfast.crash.install(None if there else absolute(place))
    try:
        yield installed.failed
    finally:
        others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
        if all(thread.daemon for thread in others):  # Python waits for the others, and they may still fail
            installed.remove()


@contextmanager
def foreign_code(*, json: bool = False, failed: Failed | None = None) -> Iterator[None]:
    """Inside, code of others runs: what it raises is shown as Python does, what it prints does not spoil the JSON."""
    try:
        with redirect_stdout(sys.stderr) if json else nullcontext():
            yield
    except HoldfastError as error:
        if failed is not None:
            _tell(failed, error)
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the program's
        show_raised(error)
        if failed is not None:
            _tell(failed, error)
        raise SystemExit(RAISED) from None


# -- a durable function -------------------------------------------------------------------------------------------


def _arguments(text: str | None) -> tuple[list[Any], dict[str, Any]]:
    given = given_json(text, "--args") if text is not None else []
    if isinstance(given, list):
        return given, {}
    if isinstance(given, dict):
        return [], given
    raise BadOption("--args is neither an array nor an object", hint="One argument: --args '[\"Lisbon\"]'.")


def _execute(
    store: Store,
    function: Callable[..., Any],
    agent: str,
    given: tuple[list[Any], dict[str, Any]],
    options: Options,
) -> tuple[RunInfo, Any]:
    """Run it, from the beginning or from where it stopped: the run, and what it returned."""
    try:
        name, branch = on_branch(store, agent)
    except UnknownAgent:
        name, branch = agent, "main"
    args, kwargs = given
    with closing(store.agent(name, branch=branch)) as handle:
        try:
            inspect.signature(function).bind(handle, *args, **kwargs)
        except TypeError as error:
            raise BadOption(f"{function.__name__}: {error}", hint="--args has what comes after the agent.") from None
        meant = configured(known(function), options)
        if waits(function):
            import asyncio

            result = asyncio.run(handle.arun(meant, *args, **kwargs))
        else:
            result = handle.run(meant, *args, **kwargs)
        finished = [info for info in handle.runs() if info.ended is not None and options.id in {None, info.id}]
        return max(finished, key=lambda info: info.ended or info.began), result


def _finished(session: Session, info: RunInfo, result: Any) -> None:
    session.out.say(
        Text("Finished: ", style="bold green"), f"{clean(info.function)} of {whose(info)} (run ",
        Text(clean(info.id), style="yellow"), ")",
    )  # fmt: skip
    session.out.say(text_of(result, _RESULT_CHARACTERS))


# -- what is due --------------------------------------------------------------------------------------------------


def _due(session: Session, programs: Sequence[str], types: Sequence[str], *, json: bool) -> int:
    told: list[tuple[RunInfo, str, str]] = []
    code = 0
    with foreign_code(json=json):
        load(programs)
        with session.working(types) as store:
            for info in store.due():
                if info.status == "running":  # the process that executes it goes on by itself
                    continue
                became, about, its_code = _go_on(store, info)
                told.append((info, became, about))
                code = max(code, its_code)
                if not json:
                    _say(session, info, became, about)
    if json:
        runs = [{**info.to_json(), "became": became, "about": about} for info, became, about in told]
        session.json("run.due", runs=runs)
    elif not told:
        session.out.say("No run is due.")
    return code


def _go_on(store: Store, info: RunInfo) -> tuple[str, str, int]:
    """Go on with one run, as far as it gets: what became of it, what is to be said, and the exit code for that."""
    made = DURABLES.get(info.function)
    if made is None:
        return "not loaded", f"no program that was named has the durable function {info.function!r}", ATTENTION
    try:
        with closing(store.agent(info.agent, branch=info.branch, create=False)) as handle:
            result = _resumed(handle, info.id, waits=made.waits)
    except Waiting as error:
        return "waiting", error.message, 0
    except Cancelled as error:
        return "cancelled", error.message, 0
    except AgentBusy as error:  # whoever has it goes on with it
        return "busy", error.message, 0
    except HoldfastError as error:
        became = "needs attention" if exit_code(error) == ATTENTION else "failed"
        return became, str(error), exit_code(error)
    except Exception as error:  # noqa: BLE001 - one run that fails does not stop the others
        show_raised(error)
        return "failed", told(error), RAISED
    return "finished", text_of(result, _RESULT_CHARACTERS), 0


def _resumed(handle: Agent, run: str, *, waits: bool) -> Any:
    if not waits:
        return handle.resume(run, wait=False)
    import asyncio

    return asyncio.run(handle.aresume(run, wait=False))


def _say(session: Session, info: RunInfo, became: str, about: str) -> None:
    line = Text().append(whose(info), style="bold cyan").append(f"  {clean(info.function)}  ")
    line.append(became, style=style_of(became))
    _say_about(session, line, about)


def _say_about(session: Session, line: Text, about: str) -> None:
    """What became of a run, and what is to be said about it; what to do next stands below."""
    said, *hints = about.splitlines() or [""]
    session.out.say(line, Text(f"  {clean(said)}", style="dim"))
    for hint in hints:
        session.out.say(f"  {clean(hint)}")


# -- a worker -----------------------------------------------------------------------------------------------------

DUMP_S = 60.0
"""How long a worker waits for the dump of a process that was executing a run alone: it takes a second or two."""
_STYLES = {"finished": "green", "waiting": "cyan", "failed": "red"}


def worker(
    *programs: str,
    concurrency: Annotated[int, Parameter(metavar="N")] = 16,
    grace: Annotated[float, Parameter(metavar="SECONDS")] = 30.0,
    drain: Flag = False,
    only: Annotated[tuple[str, str, str] | None, Parameter(show=False)] = None,
    no_dumps: Flag = False,
    types: Types = (),
    json: Json = False,
    session: Given,
) -> int:
    """Resume what was killed, is due or was submitted, until stopped.

    Any number of workers may share a store; each run is executed by one of them. Runs whose function is not in these
    programs are left to others. SIGTERM and Ctrl-C wait for what is executed; what has not stopped after --grace
    seconds is interrupted, and the next worker resumes it.

    Parameters
    ----------
    programs
        Modules and files that have the durable functions.
    concurrency
        How many runs this worker executes at a time.
    grace
        How long to wait for runs that are executed when this worker is stopped.
    drain
        End when nothing is left to do, with 7 when a run needs attention.
    no_dumps
        Do not watch the program: when it crashes, it leaves no dump.
    json
        Print a line of JSON for each run (schema holdfast.worker/1).
    """
    if not programs:
        raise BadOption("whose runs are to be resumed?", hint="holdfast worker PROGRAM..., with the durable functions.")
    needed: list[str] = []
    out = sys.stdout  # what the programs print goes elsewhere

    def tell(worked: Worked) -> None:
        if worked.became in {"needs attention", "code changed", "left"}:
            needed.append(worked.run)
        if json:
            out.write(dumps({"schema": "holdfast.worker/1", **worked._asdict()}) + "\n")
            out.flush()
        else:
            _say_worked(session, worked)

    def alone(agent: str, branch: str, run: str) -> None:
        """In a process of its own: it has ended its worker before."""
        words = [*programs, *(word for name in types for word in ("--types", name))]
        words += ["--no-dumps"] * no_dumps + ["--json"] * json + ["--only", agent, branch, run]
        place = ["--store", str(session.place)] if session.place is not None else []
        before = len(store.agent(agent, branch=branch, readonly=True).crashes())
        ended = subprocess.run([sys.executable, "-m", "holdfast", *place, "worker", *words], check=False)  # noqa: S603 - our own
        until_s = time.monotonic() + (DUMP_S if ended.returncode < 0 and not no_dumps else 0.0)
        while time.monotonic() < until_s and len(store.agent(agent, branch=branch, readonly=True).crashes()) == before:
            time.sleep(0.05)  # whoever watched it writes what is left of it: so that the run can name it

    with watched(session, wanted=not no_dumps), foreign_code(json=json):
        load(programs)
        with session.working(types) as store:
            working = Worker(store, concurrency=concurrency, tell=tell, alone=None if only is not None else alone)
            if only is not None:
                working.one(*only)
                return ATTENTION if needed else 0
            if not json:
                session.out.say(f"Working on {store.place}, {count(concurrency, 'run')} at a time.")
            with _until_told(working):
                working.run(drain=drain)
            left = working.stop(grace)
            if left:
                _leave(session, [run for _, _, run in left])
    return ATTENTION if drain and needed else 0


@contextmanager
def _until_told(working: Worker) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C let the worker begin nothing new. A second one ends the process."""

    def stop(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        working.end()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(session: Session, runs: list[str]) -> None:
    """End though runs are executed: the system stops their threads wherever they are, and the next worker goes on."""
    session.out.say(f"Interrupted {count(len(runs), 'run')}: {', '.join(map(clean, runs))}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _say_worked(session: Session, worked: Worked) -> None:
    line = Text().append(clean(f"{worked.agent}@{worked.branch}".removesuffix("@main")), style="bold cyan")
    line.append(f"  {clean(worked.function)}  ").append(worked.became, style=_STYLES.get(worked.became, "bold red"))
    _say_about(session, line, worked.about)


# -- the demo -----------------------------------------------------------------------------------------------------


def demo(*, keep: Annotated[Path | None, Parameter(metavar="DIR", show_default=False)] = None) -> int:
    """Watch an agent being killed at work, and come back as it was.

    Takes about half a minute, in a temporary directory that is removed afterwards.

    Parameters
    ----------
    keep
        Keep the store in this new directory, to look around in it.
    """
    if keep is not None and keep.exists():
        raise BadOption(f"{keep} exists already", hint="Name a directory that is not there yet.")
    package = Path(holdfast.__file__).parent
    places = package, package.parents[1]  # installed; a clone
    program = next(path for place in places if (path := place / "examples" / "demo.py").is_file())
    words = [] if keep is None else [str(keep.absolute())]
    return subprocess.run([sys.executable, program, *words], check=False).returncode  # noqa: S603 - our own
