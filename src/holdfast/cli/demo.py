"""``holdfast demo``: an agent is really killed, comes back, and its history is put to use. Half a minute.

Everything shown is real: a process of its own, SIGKILL, a store on disk, and the commands as a person would type them.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast.cli import demo_agent
from holdfast.cli.output import Output
from holdfast.cli.session import Given
from holdfast.cli.text import clean
from holdfast.errors import BadOption, StoreFailed

# The agent is killed while it works on this, after the steps before it were saved.
KILLED_DURING = "dinner planned"
_PATIENCE_S = 20.0


def demo(*, keep: Annotated[Path | None, Parameter(metavar="DIR", show_default=False)] = None, session: Given) -> int:
    """Watch an agent being killed in the middle of its work and come back exactly where it was.

    Takes less than half a minute, in a temporary directory that is removed afterwards.

    Parameters
    ----------
    keep
        Keep the store in this new directory, to look around in it.
    """
    if keep is not None and keep.exists():
        raise BadOption(f"{keep} exists already", hint="Name a directory that is not there yet.")
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as scratch:
        _Demo(session.out, keep.absolute() if keep is not None else Path(scratch) / "store").run()
    _what_next(session.out, keep)
    return 0


class _Demo:
    def __init__(self, out: Output, place: Path) -> None:
        self.out = out
        self.place = place
        self.complaint = ""  # the last thing that the agent's process wrote to stderr
        # Nobody waits for a pipe to be read.
        self.pace = 1.0 if out.is_terminal else 0.0

    def run(self) -> None:
        self._introduce()
        before = self._work_until_killed()
        self._come_back(before)
        self._look()
        self._go_back()
        self._branch_off()
        self._prove()

    # -- the acts -----------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        self._title("Holdfast keeps an agent's state safe. Here is an agent that plans a trip:")
        source = inspect.getsource(demo_agent.work).rstrip()
        if self.out.is_terminal:
            from rich.syntax import Syntax

            self.out.print(Syntax(source, "python", theme="ansi_dark", background_color="default"))
        else:
            self.out.print(Text(source), soft_wrap=True)
        self._pause(1.6)

    def _work_until_killed(self) -> dict[str, Any]:
        self._title("1. It works, and saves after every step")
        saved: dict[str, Any] = {}
        with self._agent(hard=KILLED_DURING) as (process, reports):
            self._say(f"started as process {process.pid}")
            for report in reports:
                if "saved" in report:
                    saved = report
                    self._saved(report)
                elif report.get("working") == KILLED_DURING:
                    self._say(f"… working on: {KILLED_DURING} (not saved yet)")
                    self._pause(0.5)
                    process.send_signal(signal.SIGKILL)
                    break
            code = process.wait(_PATIENCE_S)
        if code != -signal.SIGKILL or not saved:
            raise StoreFailed(f"the demo's agent ended with {code} before it could be killed", hint=self.complaint)
        self.out.say(
            Text(f"  kill -9 {process.pid}", style="bold red"), "   gone: no warning, no clean-up, no farewell."
        )
        self._pause(1.4)
        return saved

    def _come_back(self, before: dict[str, Any]) -> None:
        self._title("2. It is started again, and is exactly where it was")
        with self._agent() as (process, reports):
            opened = next(reports, {})
            self._say(f"started as process {process.pid}, finds {opened.get('messages')} messages")
            same = opened.get("digest") == before["digest"]
            self._digest("before the kill", before["digest"])
            self._digest("after it", str(opened.get("digest")))
            if not same:
                raise holdfast.Damaged("the state came back different", hint="This must not happen: please report it.")
            self.out.say(Text("  The same, bit for bit. ", style="bold green"), "The unfinished step left no trace.")
            self._pause(1.5)
            for report in reports:
                if "saved" in report:
                    self._saved(report)
            code = process.wait(_PATIENCE_S)
        if code != 0:
            raise StoreFailed(f"the demo's agent ended with {code}", hint=self.complaint)
        self._pause(1.0)

    def _look(self) -> None:
        self._title("3. Its whole history is there")
        self._command("log", demo_agent.NAME)
        self._pause(1.6)
        self.out.say()
        self._say("A palace suite? What did that last step do?")
        self._command("diff", f"{demo_agent.NAME}@dinner planned", demo_agent.NAME)
        self._pause(1.6)

    def _go_back(self) -> None:
        self._title("4. Back to before the mistake; nothing is deleted")
        self._command("rollback", demo_agent.NAME, "--to", "dinner planned", "--yes")
        self._pause(1.6)

    def _branch_off(self) -> None:
        self._title("5. And another idea, on a branch of its own")
        self._command("branch", demo_agent.NAME, "by-train", "--at", "asked")
        with holdfast.open(self.place) as store, store.agent(demo_agent.NAME, branch="by-train") as agent:
            agent.state["messages"].append({"role": "user", "content": "Could I go by train?"})
            agent.checkpoint("asked for trains")
        self._say("… the agent works on that branch for a moment …")
        self._command("log", demo_agent.NAME, "--all")
        self._pause(1.6)

    def _prove(self) -> None:
        self._title("6. Every byte can be proven")
        self._command("verify")
        self._pause(1.0)

    # -- how they are shown -------------------------------------------------------------------------------

    def _title(self, text: str) -> None:
        self.out.say()
        self.out.say(Text(text, style="bold cyan"))

    def _say(self, text: str) -> None:
        self.out.say(Text(f"  {clean(text)}", style="dim"))

    def _saved(self, report: dict[str, Any]) -> None:
        self.out.say(
            Text("  saved ", style="green"), f"#{report['depth']} {report['saved']:<16}",
            Text(f"state {report['digest'][:16]}", style="dim"),
        )  # fmt: skip

    def _digest(self, when: str, digest: str) -> None:
        self.out.say(f"  {when:<16}", Text(clean(digest[:48]), style="yellow"), "…")

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds * self.pace)

    def _command(self, *words: str) -> None:
        """Run a real command, in a process of its own, and show it as it would be typed."""
        self.out.say(Text("  $ ", style="dim"), Text(shlex.join(("holdfast", *words)), style="bold"))
        sys.stdout.flush()
        done = subprocess.run(  # noqa: S603 - this very program, with words from this file
            [sys.executable, "-m", "holdfast.cli", *words], env=self._environment(), check=False
        )
        if done.returncode != 0:
            raise StoreFailed(f"`holdfast {words[0]}` ended with {done.returncode} during the demo")

    @contextmanager
    def _agent(self, hard: str = "") -> Iterator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
        """The agent's process, and what it reports. Whatever happens, it does not outlive the demo."""
        think_s = 0.3 * self.pace + 0.05
        process = subprocess.Popen(  # noqa: S603 - a module of this package
            [sys.executable, "-m", demo_agent.__name__, str(self.place), str(think_s), hard],
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process, (json.loads(line) for line in process.stdout or ())
            finally:
                process.kill()
                said = process.stderr.read().splitlines() if process.stderr else []
                self.complaint = said[-1] if said else ""

    def _environment(self) -> dict[str, str]:
        return os.environ | {"HOLDFAST_STORE": str(self.place)}


def _what_next(out: Output, keep: Path | None) -> None:
    out.say()
    out.say(Text("What next", style="bold cyan"))
    look = f"holdfast --store {shlex.quote(str(keep))} show {demo_agent.NAME}" if keep else "holdfast demo --keep DIR"
    for words, meaning in (
        (look, "look around in the store of this demo"),
        ("holdfast --help", "all verbs"),
        ("holdfast --install-completion", "let the shell complete names"),
        ('holdfast.open().agent("my-agent")', "all that your own program needs"),
    ):
        out.say("  ", Text(f"{words:<36}", style="bold"), Text(f"  {meaning}", style="dim"))
