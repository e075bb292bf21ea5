"""A place in a dump, from which a person looks around: a stack, a frame in it, the source lines seen last.

Must not know commands or their words. Holds always: what is printed is bounded; what is not there raises NotInDump.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from holdfast.crash import places, telling
from holdfast.crash.dump import Dump
from holdfast.crash.inert import Ref, Value
from holdfast.crash.places import Stack
from holdfast.crash.records import Frame, Source
from holdfast.crash.render import text_of
from holdfast.crash.telling import Line, Terminal
from holdfast.errors import BadOption, NotInDump

LISTED = 200  # threads, tasks, locals, hits of one command
LIST_LINES = 500  # of one listing
AROUND = 5  # lines before and after

_SHORT_CHARS = 160  # of a value among others
_SOURCE_CHARS = 1_000  # of one line
_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\b")
_DECORATORS = 50  # lines above a definition that may belong to it


class Viewpoint:
    """Where one stands. It begins where the program failed, in the innermost frame that is the program's own."""

    def __init__(self, dump: Dump, terminal: Terminal) -> None:
        self.dump = dump
        self.terminal = terminal
        self.threads = places.threads(dump)
        self.tasks = places.tasks(dump)
        self.exceptions = places.exceptions(dump)
        first = places.stacks(dump)
        self.stack = first[0] if first else Stack(places.THREAD, 0, "", "", ())
        self.at = self.stack.inner()
        self.listed = 0  # the source line up to which was listed

    # Moving.

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

    # Asking.

    def frame(self) -> Frame:
        if not 0 <= self.at < len(self.stack.frames):
            raise NotInDump("there are no frames here")
        return self.stack.frames[self.at]

    def value(self, arg: str) -> Value:
        """What a path names from here."""
        if not arg:
            raise BadOption("which value?", hint="p NAME, p NAME.attribute[0]['key'], p #12; `locals` shows the names.")
        if arg.startswith("#"):
            return places.find(self.dump, None, arg)
        frame = self.frame()
        if not frame.locals:
            raise NotInDump(self.why_no_locals())
        return places.find(self.dump, frame, arg)

    def continuations(self, text: str) -> list[str]:
        frames = self.stack.frames
        return places.continuations(self.dump, frames[self.at] if 0 <= self.at < len(frames) else None, text)

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
        line = telling.source_line(self.dump, frame)
        if line:
            self.terminal.say("-> ", line)

    def show_stack(self, most: int) -> None:
        """The stack, innermost frame last; of a deep one the inner part, but always the frame that is looked at."""
        self.frame()
        count = len(self.stack.frames)
        first = max(0, min(count - most, self.at))
        self.terminal.say(("head", f"{self.stack.kind} {self.stack.number} {self.stack.name}"), f"  {self.stack.note}")
        if first:
            self.terminal.say(("dim", f"      ... {first} more; where {count} shows them"))
        self.lines(telling.trace(self.dump, self.stack.frames, marked=self.at, first=first))

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

    def show_locals(self) -> None:
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

    def show_function(self) -> None:
        frame, source = self.frame(), self.source()
        first = frame.first if 0 < frame.first <= frame.line else max(1, frame.line - AROUND)
        last = _function_end(source.lines, max(0, first - source.first)) + source.first
        self.show_source(first, max(frame.line, last))


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
