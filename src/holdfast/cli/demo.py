"""``holdfast demo``: an agent is really killed, comes back, and its history is put to use. Half a minute.

Everything shown is real: a process of its own, SIGKILL, a store on disk, and the commands as a person would type them.
"""

from __future__ import annotations

import inspect
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast.cli import demo_agent
from holdfast.cli.demo_stage import PATIENCE_S, Stage
from holdfast.cli.output import Output
from holdfast.cli.session import Given
from holdfast.cli.text import clean
from holdfast.errors import BadOption, StoreFailed, command

# The agent is killed while it works on this, after the steps before it were saved.
KILLED_DURING = "dinner planned"


def demo(*, keep: Annotated[Path | None, Parameter(metavar="DIR", show_default=False)] = None, session: Given) -> int:
    """Watch an agent being killed in the middle of its work and come back exactly where it was.

    Takes about half a minute, in a temporary directory that is removed afterwards.

    Parameters
    ----------
    keep
        Keep the store in this new directory, to look around in it.
    """
    if keep is not None and keep.exists():
        raise BadOption(f"{keep} exists already", hint="Name a directory that is not there yet.")
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as scratch:
        _Demo(Stage(session.out, keep.absolute() if keep is not None else Path(scratch) / "store")).run()
    _what_next(session.out, keep)
    return 0


class _Demo:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def run(self) -> None:
        self._introduce()
        before = self._work_until_killed()
        self._come_back(before)
        self._look()
        self._go_back()
        self._branch_off()
        self._act_outside()
        self._prove()

    # -- the acts -----------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        self.stage.title("Holdfast keeps an agent's state safe. Here is an agent that plans a trip:")
        self.stage.code(inspect.getsource(demo_agent.work))
        self.stage.pause(1.3)

    def _work_until_killed(self) -> dict[str, Any]:
        self.stage.title("1. It works, and saves after every step")
        saved: dict[str, Any] = {}
        with self._agent(KILLED_DURING) as (process, reports):
            self.stage.say(f"started as process {process.pid}")
            for report in reports:
                if "saved" in report:
                    saved = report
                    self._saved(report)
                elif report.get("working") == KILLED_DURING:
                    self.stage.say(f"… working on: {KILLED_DURING} (not saved yet)")
                    self.stage.pause(0.5)
                    process.send_signal(signal.SIGKILL)
                    break
            code = process.wait(PATIENCE_S)
        if code != -signal.SIGKILL or not saved:
            raise StoreFailed(
                f"the demo's agent ended with {code} before it could be killed", hint=self.stage.complaint
            )
        self.stage.killed(process.pid, "gone: no warning, no clean-up, no farewell.")
        self.stage.pause(1.4)
        return saved

    def _come_back(self, before: dict[str, Any]) -> None:
        self.stage.title("2. It is started again, and is exactly where it was")
        with self._agent() as (process, reports):
            opened: dict[str, Any] = next(reports, {})
            self.stage.say(f"started as process {process.pid}, finds {opened.get('messages')} messages")
            same = opened.get("digest") == before["digest"]
            self._digest("before the kill", before["digest"])
            self._digest("after it", str(opened.get("digest")))
            if not same:
                raise holdfast.Damaged("the state came back different", hint="This must not happen: please report it.")
            self.stage.out.say(
                Text("  The same, bit for bit. ", style="bold green"), "The unfinished step left no trace."
            )
            self.stage.pause(1.5)
            for report in reports:
                if "saved" in report:
                    self._saved(report)
            code = process.wait(PATIENCE_S)
        if code != 0:
            raise StoreFailed(f"the demo's agent ended with {code}", hint=self.stage.complaint)
        self.stage.pause(1.0)

    def _look(self) -> None:
        self.stage.title("3. Its whole history is there")
        self.stage.command("log", demo_agent.NAME)
        self.stage.pause(1.3)
        self.stage.out.say()
        self.stage.say("A palace suite? What did that last step do?")
        self.stage.command("diff", f"{demo_agent.NAME}@dinner planned", demo_agent.NAME)
        self.stage.pause(1.3)

    def _go_back(self) -> None:
        self.stage.title("4. Back to before the mistake; nothing is deleted")
        self.stage.command("rollback", demo_agent.NAME, "--to", "dinner planned", "--yes")
        self.stage.pause(1.3)

    def _branch_off(self) -> None:
        self.stage.title("5. And another idea, on a branch of its own")
        self.stage.command("branch", demo_agent.NAME, "by-train", "--at", "asked")
        with holdfast.open(self.stage.place) as store, store.agent(demo_agent.NAME, branch="by-train") as agent:
            agent.state["messages"].append({"role": "user", "content": "Could I go by train?"})
            agent.checkpoint("asked for trains")
        self.stage.say("… the agent works on that branch for a moment …")
        self.stage.command("log", demo_agent.NAME, "--all")
        self.stage.pause(1.3)

    def _act_outside(self) -> None:
        # Loaded only here: it declares tools, and in a process that runs a program there must be no tools but its own.
        from holdfast.cli.demo_outside import book_once

        book_once(self.stage)

    def _prove(self) -> None:
        self.stage.title("7. Every byte can be proven")
        self.stage.command("verify")
        self.stage.pause(0.6)

    def _agent(self, hard: str = "") -> AbstractContextManager[tuple[subprocess.Popen[str], Iterator[Any]]]:
        think_s = 0.25 * self.stage.pace + 0.05
        return self.stage.process(demo_agent, str(self.stage.place), str(think_s), hard)

    def _saved(self, report: dict[str, Any]) -> None:
        self.stage.out.say(
            Text("  saved ", style="green"), f"#{report['depth']} {report['saved']:<16}",
            Text(f"state {report['digest'][:16]}", style="dim"),
        )  # fmt: skip

    def _digest(self, when: str, digest: str) -> None:
        self.stage.out.say(f"  {when:<16}", Text(clean(digest[:48]), style="yellow"), "…")


def _what_next(out: Output, keep: Path | None) -> None:
    out.say()
    out.say(Text("What next", style="bold cyan"))
    look = command("--store", str(keep), "show", demo_agent.NAME) if keep else "holdfast demo --keep DIR"
    for words, meaning in (
        (look, "look around in the store of this demo"),
        ("holdfast --help", "all verbs"),
        ("holdfast --install-completion", "let the shell complete names"),
        ('holdfast.open().agent("my-agent")', "all that your own program needs"),
    ):
        out.say("  ", Text(f"{words:<36}", style="bold"), Text(f"  {meaning}", style="dim"))
