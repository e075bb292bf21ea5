"""The stage of ``holdfast demo``: how its acts are shown, and the processes that play in them.

Owns pace, titles and child processes. Knows no act. Always holds: no process outlives the act it plays in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.text import Text

from holdfast.cli.output import Output
from holdfast.cli.text import clean
from holdfast.errors import StoreFailed, command

PATIENCE_S = 120.0  # a busy machine; nobody waits so long for anything that works


class Stage:
    """Where the demo happens: a console and a store."""

    def __init__(self, out: Output, place: Path) -> None:
        self.out = out
        self.place = place
        self.complaint = ""  # the last thing that a process wrote to stderr
        # Nobody waits for a pipe to be read.
        self.pace = 1.0 if out.is_terminal else 0.0

    def title(self, text: str) -> None:
        self.out.say()
        self.out.say(Text(text, style="bold cyan"))

    def say(self, text: str) -> None:
        self.out.say(Text(f"  {clean(text)}", style="dim"))

    def code(self, source: str) -> None:
        if self.out.is_terminal:
            from rich.syntax import Syntax

            self.out.print(Syntax(source.rstrip(), "python", theme="ansi_dark", background_color="default"))
        else:
            self.out.print(Text(source.rstrip()), soft_wrap=True)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds * self.pace)

    def killed(self, pid: int, remark: str) -> None:
        self.out.say(Text(f"  kill -9 {pid}", style="bold red"), f"   {remark}")

    def command(self, *words: str) -> None:
        """Run a real command, in a process of its own, and show it as it would be typed."""
        self.out.say(Text("  $ ", style="dim"), Text(command(*words), style="bold"))
        sys.stdout.flush()
        done = subprocess.run(  # noqa: S603 - this very program, with words from this package
            [sys.executable, "-m", "holdfast.cli", *words], env=self._environment(), check=False
        )
        if done.returncode != 0:
            raise StoreFailed(f"`holdfast {words[0]}` ended with {done.returncode} during the demo")

    @contextmanager
    def process(
        self, module: ModuleType, *words: str, **variables: str
    ) -> Iterator[tuple[subprocess.Popen[str], Iterator[Any]]]:
        """A module of this package as a process, and what it reports. Whatever happens, it does not outlive this."""
        process = subprocess.Popen(  # noqa: S603 - a module of this package
            [sys.executable, "-m", module.__name__, *words],
            env=self._environment() | variables,
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
