"""`holdfast dump open`: the commands of pdb over a dump, on any machine.

Must not know files or how text gets its colour. Holds always: nothing that is typed is evaluated or started; no
configuration is read; what a command prints is bounded, and cleaned before it reaches a terminal.
"""

from __future__ import annotations

import cmd
import os
import re
import sys
import time
from typing import TextIO

from holdfast.crash import kinds, places, telling
from holdfast.crash.dump import Dump
from holdfast.crash.inert import Ref
from holdfast.crash.render import text_of
from holdfast.crash.telling import Terminal
from holdfast.crash.viewpoint import AROUND, LIST_LINES, LISTED, Viewpoint
from holdfast.errors import BadOption, HoldfastError, NotInDump

_COMMANDS = {
    "where": "where, w, bt [N]: the stack, innermost frame last; with a number, the N innermost frames",
    "up": "up, u [N]: to the caller",
    "down": "down, d [N]: to the frame that was called",
    "frame": "frame, f [N]: go to frame N of this stack; 0 is the outermost, -1 the innermost",
    "locals": "locals, args, a: the locals of this frame, arguments first",
    "p": "p PATH: a value: p offers[0].city, p headers['date'], p #12 (an object by its number)",
    "pp": "pp PATH: the same over several lines; of a text its lines",
    "list": "list, l [FIRST[, LAST] | .]: source around the line, from the dump; again: the lines that follow",
    "ll": "ll: the source of the whole function",
    "threads": "threads: all threads; > marks the one that is looked at",
    "thread": "thread N: go to a thread by its number or name",
    "tasks": "tasks: all asyncio tasks, and what they wait for",
    "task": "task N: go to a task by its number or name",
    "exc": "exc [N]: the exception with causes, contexts, groups and notes; with a number, go to its traceback",
    "search": "search TEXT: names and values anywhere in the dump that contain the text; case does not matter",
    "parts": "parts [NAME]: the parts of the dump and how each ended; with a name or its beginning, the content",
    "regs": "regs: registers and native stacks of the threads, where they could be obtained",
    "info": "info: what this dump is, when and where it was taken, and what is missing",
    "help": "help, h [NAME]: the commands, or one of them",
    "quit": "quit, q, exit: leave; the end of the input leaves too",
}
_SHORT = {"w": "where", "bt": "where", "u": "up", "d": "down", "f": "frame", "l": "list", "a": "locals",
          "args": "locals", "q": "quit", "exit": "quit", "h": "help", "EOF": "quit"}  # fmt: skip

_P_CHARS = 4_000  # of one value with `p`
_P_DEPTH = 6
_WHERE_FRAMES = 60
_LINE_CHARS = 10_000  # of a command
_RANGE = re.compile(r"(\d{1,9})\s*(?:[,\s]\s*(\d{1,9}))?\Z")
_PATH = re.compile(r"#\d+|[^\W\d]\w*")


def explore(
    dump: Dump, *, commands: TextIO | None = None, out: TextIO | None = None, color: bool | None = None
) -> None:
    """Answer commands about a dump until `quit` or the end of the input. A person at a terminal gets a prompt."""
    out = out or sys.stdout
    if color is None:
        color = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    debugger = Debugger(dump, commands or sys.stdin, out, color=color)
    debugger.introduce()
    while True:
        try:
            debugger.cmdloop()
        except KeyboardInterrupt:
            if not debugger.interactive:
                raise
            out.write("\n")  # the command was given up; the next prompt is on a line of its own
        else:
            return


class Debugger(cmd.Cmd):
    """Reads commands and does them from a viewpoint."""

    def __init__(self, dump: Dump, commands: TextIO, out: TextIO, *, color: bool) -> None:
        super().__init__(stdin=commands, stdout=out)
        self.dump = dump
        self.terminal = Terminal(out, color=color)
        self.view = Viewpoint(dump, self.terminal)
        self.interactive = commands is sys.stdin and out is sys.stdout and commands.isatty() and out.isatty()
        self.use_rawinput = self.interactive
        self.prompt = "(dump) " if self.interactive else ""

    # The loop.

    def introduce(self) -> None:
        """What it is, what failed, and where one stands."""
        self.do_info("")
        if self.dump.exceptions:
            failure = self.dump.exceptions[0]
            self.terminal.say(("bad", failure.type_name), telling.message_of(failure, 500))
        if self.view.stack.frames:
            self.view.show_place()
        if self.interactive:
            self.terminal.say(("dim", "Type help for the commands, quit to leave."))
        self.terminal.flush()

    def preloop(self) -> None:
        if self.interactive:
            try:
                import readline
            except ImportError:
                return
            readline.set_completer_delims(" \t\n")  # offers[0].c is one word

    def onecmd(self, line: str) -> bool:
        """Do one line. A command that cannot be done says why; nothing else happens."""
        self.dump.ask()
        try:
            if len(line) > _LINE_CHARS:
                raise BadOption(f"a command has at most {_LINE_CHARS:,} characters")
            word, arg, _line = self.parseline(line)
            if word is None:
                return self.emptyline() if not line.strip() else self._path_or_nothing(line)
            self.lastcmd = "" if word == "EOF" else line
            if word not in _COMMANDS and word not in _SHORT:
                return self._path_or_nothing(line)
            return bool(getattr(self, f"do_{_SHORT.get(word, word)}")((arg or "").strip()))
        except HoldfastError as error:
            self.terminal.say(("bad", "*** "), error.message)
            if error.hint:
                self.terminal.say("    ", error.hint)
            return False
        finally:
            self.terminal.flush()

    def parseline(self, line: str) -> tuple[str | None, str | None, str]:
        """A word and the rest. `cmd` would make `!x` a command for a shell, and `?x` a call for help."""
        line = line.strip()
        word, _space, rest = line.partition(" ")
        return (word, rest, line) if word.isidentifier() else (None, None, line)

    def emptyline(self) -> bool:
        """At a terminal an empty line repeats the last command, as in pdb. In a file it means nothing."""
        return self.onecmd(self.lastcmd) if self.interactive and self.lastcmd else False

    def _path_or_nothing(self, line: str) -> bool:
        """``offers[0]`` alone is `p offers[0]`."""
        line = line.strip()
        head = _PATH.match(line)
        if head and (head[0].startswith("#") or head[0] in self.view.continuations(head[0])):
            self.do_p(line)
            return False
        raise BadOption(f"{line.split()[0][:60]!r} is no command and no local here", hint="Type help for the commands.")

    def do_help(self, arg: str) -> None:
        if not arg:
            self.terminal.say("Values are named by paths, like offers[0].city or #12['key']. Nothing is evaluated.")
        elif arg not in _COMMANDS and arg not in _SHORT:
            raise BadOption(f"no command {arg[:60]!r}")
        for name in [_SHORT.get(arg, arg)] if arg else _COMMANDS:
            usage, _, told = _COMMANDS[name].partition(": ")
            self.terminal.say("  ", ("name", f"{usage:30}"), f" {told}")

    def do_quit(self, _arg: str) -> bool:
        return True

    # The whole.

    def do_info(self, _arg: str) -> None:
        head = self.dump.head
        self.terminal.say(("head", self.dump.path.name), f"  {self.dump.why or self.dump.trigger}")
        program = head.get("program")
        words = " ".join(str(word)[:200] for word in program[:20]) if isinstance(program, list) else "?"
        process, host, python = (telling.plain_text(head.get(name, "?"), 200) for name in ("pid", "host", "python"))
        self.terminal.say(f"taken {_when(self.dump.at)} ({self.dump.trigger}): {words[:500]}")
        self.terminal.say(f"process {process} on {host}, Python {python}")
        counts = {
            "thread": len(self.view.threads),
            "task": len(self.view.tasks),
            "exception": len(self.dump.exceptions),
        }
        self.terminal.say(", ".join(f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items()))
        for line in self.dump.missing[:20]:
            self.terminal.say(("bad", "missing: "), line[:500])

    def do_parts(self, arg: str) -> None:
        found = places.plain_parts(self.dump)
        if not arg:
            for part in self.dump.parts:
                style = "name" if part.state == kinds.WHOLE else "bad"
                self.terminal.say(f"  {part.name:28} ", (style, part.state), f"  {part.reason[:500]}")
            return
        wanted = next((name for name in found if name.startswith(arg)), None)
        if wanted is None:
            raise NotInDump(f"no part {arg[:60]!r} that can be shown", hint="There are: " + ", ".join(found))
        self.terminal.say(("head", wanted))
        self.view.lines(telling.plain(found[wanted], indent="  ", most=LIST_LINES))

    def do_search(self, arg: str) -> None:
        if not arg:
            raise BadOption("search for what?")
        found = 0
        for hit in places.search(self.dump, arg, LISTED):
            found += 1
            self.terminal.say("  ", ("name", hit.where[:300]), f"  {self.view.short(hit.value)}")
        more = " and perhaps more: only these are shown" if found >= LISTED else ""
        self.terminal.say(("dim", f"{found} found{more}"))

    def do_exc(self, arg: str) -> None:
        if not self.view.exceptions:
            raise NotInDump("there is no exception in this dump")
        if arg:
            self.view.go(self.view.choose(self.view.exceptions, arg, "exception"))
            return
        stack = self.view.stack
        self.view.lines(telling.failures(self.dump, marked=stack.number if stack.kind == places.EXCEPTION else None))

    def do_regs(self, _arg: str) -> None:
        if not self.view.lines(telling.native(self.dump)):
            told = next((part.reason for part in self.dump.parts if part.kind == kinds.NATIVE), "")
            raise NotInDump("no native stacks and no registers in this dump" + (f": {told}" if told else ""))

    # Stacks and frames.

    def do_threads(self, _arg: str) -> None:
        self.view.show_stacks(self.view.threads, "threads")

    def do_thread(self, arg: str) -> None:
        self.view.go(self.view.choose(self.view.threads, arg, "thread"))

    def do_tasks(self, _arg: str) -> None:
        self.view.show_stacks(self.view.tasks, "tasks")

    def do_task(self, arg: str) -> None:
        self.view.go(self.view.choose(self.view.tasks, arg, "task"))

    def do_where(self, arg: str) -> None:
        self.view.show_stack(_number(arg) if arg else _WHERE_FRAMES)

    def do_up(self, arg: str) -> None:
        self.view.move(-_number(arg or "1"))

    def do_down(self, arg: str) -> None:
        self.view.move(_number(arg or "1"))

    def do_frame(self, arg: str) -> None:
        self.view.frame()
        count = len(self.view.stack.frames)
        number = _number(arg.removeprefix("-")) * (-1 if arg.startswith("-") else 1) if arg else self.view.at
        if not -count <= number < count:
            raise NotInDump(f"no frame {number}; there are {count}, from 0")
        self.view.go(self.view.stack, number % count)

    # Values and source.

    def do_p(self, arg: str) -> None:
        self.terminal.say(text_of(self.dump, self.view.value(arg), width=_P_CHARS, depth=_P_DEPTH))

    def do_pp(self, arg: str) -> None:
        value = self.view.value(arg)
        text = self.dump.object(value).text if isinstance(value, Ref) else value
        if not isinstance(text, str) or "\n" not in text:
            self.view.lines(telling.outline(self.dump, value))
            return
        lines = text.splitlines()
        for line in lines[:LIST_LINES]:
            self.terminal.say(line)
        if len(lines) > LIST_LINES:
            self.terminal.say(("dim", f"... {len(lines) - LIST_LINES} lines more"))

    def do_locals(self, _arg: str) -> None:
        self.view.show_locals()

    def do_list(self, arg: str) -> None:
        line = self.view.frame().line
        match = _RANGE.match(arg)
        if match:
            first = int(match[1])
            last = int(match[2]) if match[2] else first + 2 * AROUND
        elif arg not in ("", "."):
            raise BadOption("list takes line numbers: list 10, list 10, 20, list .")
        elif self.view.listed and not arg:
            first, last = self.view.listed + 1, self.view.listed + 1 + 2 * AROUND
        else:
            first, last = max(1, line - AROUND), line + AROUND
        self.view.show_source(first, last)

    def do_ll(self, _arg: str) -> None:
        self.view.show_function()

    # Tab.

    def completenames(self, text: str, *_ignored: object) -> list[str]:
        return [name for name in _COMMANDS if name.startswith(text)]

    def completedefault(self, text: str, line: str, *_ignored: object) -> list[str]:
        word = line.split(maxsplit=1)[0]
        offers = {
            "p": self.view.continuations(text) if word in ("p", "pp") else [],
            "thread": [stack.name for stack in self.view.threads],
            "task": [stack.name for stack in self.view.tasks],
            "parts": [*places.plain_parts(self.dump)] if word == "parts" else [],
            "help": [*_COMMANDS],
        }
        found = offers.get(_SHORT.get(word, "p" if word == "pp" else word), [])
        return [name for name in found if name.startswith(text) and name.isprintable()]


def _number(arg: str) -> int:
    if not arg.isdecimal() or len(arg) > 9:
        raise BadOption(f"{arg[:60]!r} is not a number")
    return int(arg)


def _when(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
