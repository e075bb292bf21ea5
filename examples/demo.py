"""Watch an agent being killed in the middle of its work, and coming back. ``holdfast demo`` runs this; half a minute.

Everything is real: each agent is a process of its own that gets SIGKILL, the store is on disk, and the commands are
those that you would type.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from shlex import join
from typing import Any

import booking
import trip
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

import holdfast

HERE = Path(__file__).parent
KILLED_DURING = "dinner planned"
PATIENCE_S = 120.0  # a busy machine; nothing that works takes so long
out = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)


def main(store: str = "") -> None:
    """Play all acts. The store goes where ``store`` says, and stays, or into a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as scratch:
        os.environ["HOLDFAST_STORE"] = store or str(Path(scratch, "store"))
        title("Holdfast keeps an agent's state safe. Here is an agent that plans a trip:")
        code(trip.work)
        come_back(work_until_killed())
        look_around()
        book_once(Path(scratch, "airline.db"))
        files_go_back_too(Path(scratch, "project"))
        title("8. Every byte can be proven")
        command("verify")
    what_next(store)


def work_until_killed() -> str:
    title("1. It works, and saves after every step")
    digest = ""
    with started("trip.py", SLOW_STEP=KILLED_DURING) as (process, lines):
        aside(f"started as process {process.pid}")
        for line in lines:
            if line.startswith("saved "):
                digest = saved(line)
            elif line == f"working on: {KILLED_DURING}":
                aside(f"… {line} (not saved yet)")
                pause(0.5)
                kill(process, "gone: no warning, no clean-up, no farewell.")
    return digest


def come_back(before: str) -> None:
    title("2. It is started again, and is exactly where it was")
    with started("trip.py") as (process, lines):
        found, _, after = next(lines, "").partition(", state ")
        aside(f"started as process {process.pid}, {found}")
        out.print(f"  before the kill {before[:48]}…\n  after it        {after[:48]}…", style="yellow")
        if not before or after != before:
            sys.exit("The state came back different. This must not happen: please report it.")
        say("The same, bit for bit. ", "The unfinished step left no trace.")
        pause(1.5)
        for line in lines:
            if line.startswith("saved "):
                saved(line)
    pause(1.0)


def look_around() -> None:
    title("3. Its whole history is there")
    command("log", "trip-7")
    aside("A palace suite? What did that last step do?")
    command("diff", "trip-7@dinner planned", "trip-7")
    aside("Since when is the money gone, and who did that?")
    command("bisect", "trip-7", "--when", "money < 0")
    command("blame", "trip-7", "money")
    command("explain", "trip-7", "--invariant", "money >= 0")
    title("4. Back to before the mistake; nothing is deleted")
    command("rollback", "trip-7", "--to", "dinner planned", "--yes")
    title("5. And another idea, on a branch of its own")
    command("branch", "trip-7", "by-train", "--at", "asked")
    with holdfast.open() as store, store.agent("trip-7", branch="by-train") as agent:
        agent.state["messages"].append({"role": "user", "content": "Could I go by train?"})
        agent.checkpoint("asked for trains")
    aside("… the agent works on that branch for a moment …")
    command("log", "trip-7", "--all")


def book_once(database: Path) -> None:
    title("6. Killed in the middle of booking a flight")
    code(booking.find, booking.book)
    # The airline books at once, and answers long after the agent was killed.
    with started("airline.py", "0", str(database), "60") as (airline, lines):
        os.environ["AIRLINE_PORT"] = port = next(lines, "")
        aside(f"the airline: process {airline.pid}, with a database of its own")
        with started("booking.py") as (process, _):
            aside(f"the agent: process {process.pid}, asks for a seat on TP539")
            while not (booked := bookings(port)):
                if process.poll() is not None:
                    sys.exit("The agent ended before it booked.")
                time.sleep(0.05)
            aside(f"the airline has made {told(booked)}; its answer is on the way")
            kill(process, "the agent will never get that answer.")
        command("effects", "trip-8")
        with started("booking.py") as (process, printed):
            aside(f"started again as process {process.pid}: it asks the airline before it books")
            number = next(printed, "")
        command("runs")
        booked = bookings(port)
    if [str(one["number"]) for one in booked] != [number]:
        sys.exit("The flight was not booked once. This must not happen: please report it.")
    say(f"The airline has {told(booked)}: ", "booked once, and the agent knows its number.")


def files_go_back_too(project: Path) -> None:
    title("7. An agent that edits files: they go back together with its state")
    try:
        for name in ("pathspec", "pyfastcdc"):
            import_module(name)
    except ImportError:
        aside(f"left out: it needs {name}, which pip install 'holdfast[workspace]' brings.")
        return
    project.mkdir()
    (project / "app.py").write_text("print('hello')\n")
    with holdfast.open() as store, store.agent("coder", workspace=project) as agent:
        agent.state["plan"] = ["say hello"]
        agent.checkpoint("it works")
        aside("… the agent improves app.py with a shell command, and nobody tells Holdfast …")
        subprocess.run("sed -i s/print/prnt/ app.py && echo notes > notes.txt", shell=True, cwd=project, check=True)
        agent.state["plan"].append("improve it")
        agent.checkpoint("improved")
    command("diff", "coder@it works", "coder")
    command("rollback", "coder", "--to", "it works", "--yes")
    done = subprocess.run([sys.executable, "app.py"], cwd=project, capture_output=True, text=True, check=False)
    if (done.stdout, (project / "notes.txt").exists()) != ("hello\n", False):
        sys.exit("The files did not come back. This must not happen: please report it.")
    say("app.py says hello again: ", "its files and its plan are of one moment.")


def what_next(store: str) -> None:
    title("What next")
    look = join(("holdfast", "--store", store, "show", "trip-7")) if store else "holdfast demo --keep DIR"
    for words, meaning in (
        (look, "look around in the store of this demo"),
        ("holdfast --help", "all verbs"),
        ("holdfast --install-completion", "let the shell complete names"),
        ('holdfast.open().agent("my-agent")', "all that your own program needs"),
    ):
        out.print(Text(f"  {words:<36}", style="bold").append(f"  {meaning}", style="not bold dim"))


# -- the stage ------------------------------------------------------------------------------------------------------


@contextmanager
def started(program: str, *words: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """One of these programs as a process, and its lines. It does not outlive the block, and must not fail by itself."""
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            [sys.executable, HERE / program, *words],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        ) as process,
    ):
        try:
            yield process, (line.rstrip("\n") for line in process.stdout or ())
            if program != "airline.py":
                process.wait(PATIENCE_S)
        finally:
            process.kill()
        if process.wait() not in {0, -signal.SIGKILL}:
            complaints.seek(0)
            sys.exit(f"{program} ended with {process.returncode}.\n{complaints.read()}")


def kill(process: subprocess.Popen[str], remark: str) -> None:
    process.kill()
    if process.wait(PATIENCE_S) != -signal.SIGKILL:
        sys.exit("The agent ended before it could be killed.")
    out.print(Text(f"  kill -9 {process.pid}", style="bold red").append(f"   {remark}", style="default not bold"))
    pause(1.4)


def command(*words: str) -> None:
    """Run a command, and show it as you would type it."""
    out.print(Text("  $ ", style="dim").append(join(("holdfast", *words)), style="not dim bold"))
    done = subprocess.run([sys.executable, "-m", "holdfast", *words], check=False)
    if done.returncode != 0:
        sys.exit(f"holdfast {words[0]} ended with {done.returncode}.")
    pause(1.3)


def bookings(port: str) -> list[dict[str, Any]]:
    with closing(HTTPConnection("127.0.0.1", int(port), timeout=PATIENCE_S)) as airline:
        airline.request("GET", "/bookings")
        found: list[dict[str, Any]] = json.load(airline.getresponse())
        return found


def told(booked: list[dict[str, Any]]) -> str:
    return ", ".join(f"booking {one['number']} on {one['flight']}" for one in booked)


def saved(line: str) -> str:
    what, _, digest = line.partition(" state ")
    out.print(Text(f"  {what} ", style="green").append(f"state {digest[:16]}", style="dim"))
    return digest


def title(text: str) -> None:
    out.print(Text(f"\n{text}", style="bold cyan"))


def say(result: str, remark: str) -> None:
    out.print(Text(f"  {result}", style="bold green").append(remark, style="default not bold"))


def aside(text: str) -> None:
    out.print(f"  {text}", style="dim")


def code(*functions: Any) -> None:
    source = "\n\n".join(inspect.getsource(one).rstrip() for one in functions)
    out.print(Syntax(source, "python", theme="ansi_dark", background_color="default") if out.is_terminal else source)
    pause(1.3)


def pause(seconds: float) -> None:
    time.sleep(seconds if out.is_terminal else 0)  # nobody waits for a pipe to be read


if __name__ == "__main__":
    main(*sys.argv[1:])
