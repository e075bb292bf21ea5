"""`holdfast dump open`: the commands of pdb over a dump, on any machine.

Owns the commands, their words, and the place from which a person looks around: a stack, a frame in it, the source lines
seen last. Must not know how values become text. Holds always: nothing that is typed is evaluated or started; no
configuration is read; what is printed is bounded, and cleaned before it reaches a terminal.
"""

from __future__ import annotations

import cmd
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.text import Text

from holdfast.crash import display, kinds
from holdfast.crash.display import Line, Piece, text_of
from holdfast.crash.dump import EXCEPTION, TASK, THREAD, Dump
from holdfast.crash.records import Frame, Ref, Source, Stack, Value, split_path
from holdfast.errors import BadOption, HoldfastError, NotInDump
from holdfast.text import clean

LISTED = 200  # threads, tasks, locals, hits of one command
LIST_LINES = 500  # of one listing
AROUND = 5  # lines before and after

_STYLES = {"head": "bold", "mark": "bold yellow", "bad": "bold red", "dim": "dim", "name": "cyan"}
_SHORT_CHARS = 160  # of a value among others
_SOURCE_CHARS = 1_000  # of one line
_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\b")
_DECORATORS = 50  # lines above a definition that may belong to it


class Terminal(Console):
    """Where lines are written. Every piece is cleaned here, so nothing that a dump holds can steer a terminal."""

    def __init__(self, out: TextIO, *, color: bool) -> None:
        super().__init__(
            file=out, force_terminal=color, no_color=not color, markup=False, emoji=False, highlight=False,
            legacy_windows=False, soft_wrap=True,
        )  # fmt: skip

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process

    def say(self, *pieces: Piece) -> None:
        parts = [("", piece) if isinstance(piece, str) else piece for piece in pieces]
        self.print(Text.assemble(*((self._encodable(clean(text)), _STYLES.get(style, "")) for style, text in parts)))

    def _encodable(self, text: str) -> str:
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)


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
    """Reads commands, and has the place from which they look.

    It begins where the program failed, in the innermost frame that is the program's own.
    """

    def __init__(self, dump: Dump, commands: TextIO, out: TextIO, *, color: bool) -> None:
        super().__init__(stdin=commands, stdout=out)
        self.dump = dump
        self.terminal = Terminal(out, color=color)
        self.threads, self.tasks, self.exceptions = map(dump.stacks, (THREAD, TASK, EXCEPTION))
        self.stack = next(iter(dump.all_stacks()), Stack(THREAD, 0, "", "", ()))
        self.at = self.stack.inner()
        self.listed = 0  # the source line up to which was listed
        self.interactive = commands is sys.stdin and out is sys.stdout and commands.isatty() and out.isatty()
        self.use_rawinput = self.interactive
        self.prompt = "(dump) " if self.interactive else ""

    # The loop.

    def introduce(self) -> None:
        """What it is, what failed, and where one stands."""
        self.do_info("")
        if self.dump.exceptions:
            failure = self.dump.exceptions[0]
            self.terminal.say(("bad", failure.type_name), display.message_of(failure, 500))
        if self.stack.frames:
            self.show_place()
        if self.interactive:
            self.terminal.say(("dim", "Type help for the commands, quit to leave."))
        self.terminal.file.flush()

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
            self.terminal.file.flush()

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
        start: Ref | str = ""
        with suppress(BadOption):
            start, _rest = split_path(line)
        if isinstance(start, Ref) or (start and start in self.continuations(start)):
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
        about = self.dump.about
        self.terminal.say(("head", self.dump.path.name), f"  {about.why or about.trigger}")
        words = " ".join(word[:200] for word in about.program[:20])
        self.terminal.say(f"taken {_when(about.at)} ({about.trigger}): {words[:500]}")
        self.terminal.say(f"process {about.pid} on {about.host[:200]}, Python {about.python[:200]}")
        counts = {
            "thread": len(self.threads),
            "task": len(self.tasks),
            "exception": len(self.dump.exceptions),
        }
        self.terminal.say(", ".join(f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items()))
        for line in self.dump.missing[:20]:
            self.terminal.say(("bad", "missing: "), line[:500])

    def do_parts(self, arg: str) -> None:
        found = self.dump.plain_parts()
        if not arg:
            for part in self.dump.parts:
                style = "name" if part.state == kinds.WHOLE else "bad"
                self.terminal.say(f"  {part.name:28} ", (style, part.state), f"  {part.reason[:500]}")
            return
        wanted = next((name for name in found if name.startswith(arg)), None)
        if wanted is None:
            raise NotInDump(f"no part {arg[:60]!r} that can be shown", hint="There are: " + ", ".join(found))
        self.terminal.say(("head", wanted))
        self.lines(display.plain(found[wanted], indent="  ", most=LIST_LINES))

    def do_search(self, arg: str) -> None:
        if not arg:
            raise BadOption("search for what?")
        found = 0
        for hit in self.dump.search(arg, limit=LISTED):
            found += 1
            self.terminal.say("  ", ("name", hit.where[:300]), f"  {self.short(hit.value)}")
        more = " and perhaps more: only these are shown" if found >= LISTED else ""
        self.terminal.say(("dim", f"{found} found{more}"))

    def do_exc(self, arg: str) -> None:
        if not self.exceptions:
            raise NotInDump("there is no exception in this dump")
        if arg:
            self.go(self.choose(self.exceptions, arg, "exception"))
            return
        stack = self.stack
        self.lines(display.failures(self.dump, marked=stack.number if stack.kind == EXCEPTION else None))

    def do_regs(self, _arg: str) -> None:
        if not self.lines(display.native(self.dump)):
            told = next((part.reason for part in self.dump.parts if part.kind == kinds.NATIVE), "")
            raise NotInDump("no native stacks and no registers in this dump" + (f": {told}" if told else ""))

    # Where one stands.

    def go(self, stack: Stack, at: int | None = None) -> None:
        self.stack, self.at, self.listed = stack, stack.inner() if at is None else at, 0
        if stack.frames:
            self.show_place()
        else:
            self.terminal.say(f"{stack.kind} {stack.number} {stack.name}: no frames")

    def move(self, by: int) -> None:
        self.frame()
        wanted = max(0, min(len(self.stack.frames) - 1, self.at + by))
        if wanted == self.at and by:
            raise NotInDump(f"this is the {'outermost' if by < 0 else 'innermost'} frame")
        self.go(self.stack, wanted)

    def choose(self, stacks: list[Stack], arg: str, what: str) -> Stack:
        """The stack of that number or name."""
        if not arg:
            raise BadOption(f"which {what}?", hint=f"Give its number; there are {len(stacks)}.")
        if arg.isdecimal() and len(arg) < 10 and int(arg) < len(stacks):
            return stacks[int(arg)]
        for stack in stacks:
            if stack.name == arg:
                return stack
        raise NotInDump(f"no {what} {arg[:60]!r}; there are {len(stacks)}")

    def frame(self) -> Frame:
        if not 0 <= self.at < len(self.stack.frames):
            raise NotInDump("there are no frames here")
        return self.stack.frames[self.at]

    def value(self, arg: str) -> Value:
        """What a path names from here."""
        if not arg:
            raise BadOption("which value?", hint="p NAME, p NAME.attribute[0]['key'], p #12; `locals` shows the names.")
        if arg.startswith("#"):
            return self.dump.local(None, arg)
        frame = self.frame()
        if not frame.locals:
            raise NotInDump(self.why_no_locals())
        return self.dump.local(frame, arg)

    def continuations(self, text: str) -> list[str]:
        frames = self.stack.frames
        return self.dump.continuations(frames[self.at] if 0 <= self.at < len(frames) else None, text)

    def why_no_locals(self) -> str:
        hidden = self.frame().hidden
        return f"no locals: {hidden}" if hidden else "no locals in this frame"

    def short(self, value: Value) -> str:
        return text_of(self.dump, value, width=_SHORT_CHARS, depth=2)

    # Showing.

    def lines(self, lines: Iterable[Line]) -> int:
        """Print them, and say how many there were."""
        count = 0
        for line in lines:
            count += 1
            self.terminal.say(*line)
        return count

    def show_place(self) -> None:
        frame = self.frame()
        self.terminal.say(
            ("mark", "> "), ("head", f"{frame.file}({frame.line})"), ("name", f"{frame.function}()"),
            ("dim", f"  frame {self.at} of {self.stack.kind} {self.stack.number} {self.stack.name}"),
        )  # fmt: skip
        line = display.source_line(self.dump, frame)
        if line:
            self.terminal.say("-> ", line)

    def show_stacks(self, stacks: list[Stack], what: str) -> None:
        if not stacks:
            raise NotInDump(f"there are no {what} in this dump")
        for stack in stacks[:LISTED]:
            here = (stack.kind, stack.number) == (self.stack.kind, self.stack.number)
            at = stack.frames[stack.inner()] if stack.frames else None
            where = f"{at.function} {os.path.basename(at.file)}:{at.line}" if at else "no frames"  # noqa: PTH119 (a name of another machine)
            sign, style = (">", "mark") if here else (" ", "head")
            self.terminal.say(f"{sign}{stack.number:4} ", (style, stack.name), f"  {stack.note}", ("dim", f"  {where}"))
        if len(stacks) > LISTED:
            self.terminal.say(("dim", f"  ... {len(stacks) - LISTED} more"))

    def source(self) -> Source:
        """The source of this frame's file, as far as the dump has it."""
        frame = self.frame()
        source = self.dump.sources.get(frame.file)
        if source is None:
            raise NotInDump(f"no source of {frame.file} in the dump")
        return source

    def show_source(self, first: int, last: int) -> None:
        source = self.source()
        here = self.frame().line
        end = source.first + len(source.lines) - 1
        first = max(first, source.first)
        last = min(last, end, first + LIST_LINES - 1)
        if first > last:
            raise NotInDump(f"the dump has lines {source.first} to {end} of this file")
        if source.changed:
            self.terminal.say(("bad", "the file was changed after the program began: lines may not fit"))
        for number in range(first, last + 1):
            text = (source.line(number) or "").expandtabs(4)[:_SOURCE_CHARS]
            self.terminal.say(f"{number:5} ", ("mark", "-> ") if number == here else "   ", text)
        self.listed = last

    # Stacks and frames.

    def do_threads(self, _arg: str) -> None:
        self.show_stacks(self.threads, "threads")

    def do_thread(self, arg: str) -> None:
        self.go(self.choose(self.threads, arg, "thread"))

    def do_tasks(self, _arg: str) -> None:
        self.show_stacks(self.tasks, "tasks")

    def do_task(self, arg: str) -> None:
        self.go(self.choose(self.tasks, arg, "task"))

    def do_where(self, arg: str) -> None:
        """The stack, innermost frame last; of a deep one the inner part, but always the frame that is looked at."""
        self.frame()
        most = _number(arg) if arg else _WHERE_FRAMES
        count = len(self.stack.frames)
        first = max(0, min(count - most, self.at))
        self.terminal.say(("head", f"{self.stack.kind} {self.stack.number} {self.stack.name}"), f"  {self.stack.note}")
        if first:
            self.terminal.say(("dim", f"      ... {first} more; where {count} shows them"))
        self.lines(display.trace(self.dump, self.stack.frames, marked=self.at, first=first))

    def do_up(self, arg: str) -> None:
        self.move(-_number(arg or "1"))

    def do_down(self, arg: str) -> None:
        self.move(_number(arg or "1"))

    def do_frame(self, arg: str) -> None:
        self.frame()
        count = len(self.stack.frames)
        number = _number(arg.removeprefix("-")) * (-1 if arg.startswith("-") else 1) if arg else self.at
        if not -count <= number < count:
            raise NotInDump(f"no frame {number}; there are {count}, from 0")
        self.go(self.stack, number % count)

    # Values and source.

    def do_p(self, arg: str) -> None:
        self.terminal.say(text_of(self.dump, self.value(arg), width=_P_CHARS, depth=_P_DEPTH))

    def do_pp(self, arg: str) -> None:
        value = self.value(arg)
        text = self.dump.object(value).text if isinstance(value, Ref) else value
        if not isinstance(text, str) or "\n" not in text:
            self.lines(display.outline(self.dump, value))
            return
        lines = text.splitlines()
        for line in lines[:LIST_LINES]:
            self.terminal.say(line)
        if len(lines) > LIST_LINES:
            self.terminal.say(("dim", f"... {len(lines) - LIST_LINES} lines more"))

    def do_locals(self, _arg: str) -> None:
        frame = self.frame()
        shown = frame.locals[:LISTED]
        for name, value in shown:
            number = f" #{value.number}" if isinstance(value, Ref) else ""
            self.terminal.say("  ", ("name", name), " = ", self.short(value), ("dim", number))
        left = max(frame.locals_total or 0, len(frame.locals)) - len(shown)
        if left > 0:
            self.terminal.say(("dim", f"  ... {left} more"))
        if not shown:
            self.terminal.say(("dim", self.why_no_locals()))

    def do_list(self, arg: str) -> None:
        line = self.frame().line
        match = _RANGE.match(arg)
        if match:
            first = int(match[1])
            last = int(match[2]) if match[2] else first + 2 * AROUND
        elif arg not in ("", "."):
            raise BadOption("list takes line numbers: list 10, list 10, 20, list .")
        elif self.listed and not arg:
            first, last = self.listed + 1, self.listed + 1 + 2 * AROUND
        else:
            first, last = max(1, line - AROUND), line + AROUND
        self.show_source(first, last)

    def do_ll(self, _arg: str) -> None:
        frame, source = self.frame(), self.source()
        first = frame.first if 0 < frame.first <= frame.line else max(1, frame.line - AROUND)
        last = _function_end(source.lines, max(0, first - source.first)) + source.first
        self.show_source(first, max(frame.line, last))

    # Tab.

    def completenames(self, text: str, *_ignored: object) -> list[str]:
        return [name for name in _COMMANDS if name.startswith(text)]

    def completedefault(self, text: str, line: str, *_ignored: object) -> list[str]:
        word = line.split(maxsplit=1)[0]
        offers = {
            "p": self.continuations(text) if word in ("p", "pp") else [],
            "thread": [stack.name for stack in self.threads],
            "task": [stack.name for stack in self.tasks],
            "parts": [*self.dump.plain_parts()] if word == "parts" else [],
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


def _function_end(lines: tuple[str, ...], at: int) -> int:
    """The last line of the definition that begins at ``at``: the next line that is indented no deeper ends it."""
    begun = next((place for place in range(at, len(lines)) if _DEFINITION.match(lines[place])), None)
    if begun is None or begun > at + _DECORATORS:  # a module
        return len(lines) - 1
    depth = _indent(lines[begun])
    body = begun
    for place in range(begun + 1, len(lines)):
        text = lines[place].strip()
        if text and _indent(lines[place]) <= depth and not text.startswith((")", "]", "}", "#")):
            break
        if text:
            body = place
    return body


def _indent(line: str) -> int:
    expanded = line.expandtabs(8)
    return len(expanded) - len(expanded.lstrip())
