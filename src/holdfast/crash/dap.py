"""`holdfast dump dap`: a dump behind the Debug Adapter Protocol, so that an editor opens it.

Owns the messages, what each request means, and the tree of variables that an editor unfolds, each behind a number. It
speaks over its own input and output, so that only whoever started it is answered. Holds always: the dump is only read,
and nothing is evaluated; every request gets one answer of bounded size, a success or a typed error; no message ends the
session but `disconnect` and the end of the input; a number, once given, keeps its meaning.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any, BinaryIO

from holdfast.crash import display
from holdfast.crash.display import text_of
from holdfast.crash.dump import THREAD, Dump, open_dump, plain_children
from holdfast.crash.records import Frame, Inert, Missing, Ref, Source, Stack, Value, as_int, as_text
from holdfast.errors import BadOption, HoldfastError, NotInDump, ReadOnly
from holdfast.text import clean

# -- messages --------------------------------------------------------------------------------------------------------


MAX_BODY_BYTES = 4 << 20  # of one request: the largest honest ones name a file and a few numbers
_MAX_LINE = 4_096
_PIECE = 1 << 16


class Broken(Exception):
    """A message that could not be read; the stream goes on after it."""


class Wire:
    """Messages on a pair of byte streams. What is read is bounded; a message that cannot be read is skipped."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = count(1)

    def read(self) -> dict[str, Any] | None:
        """The next message; None at the end. Raises Broken for one that is no message, after skipping it."""
        length = self._header()
        if length is None:
            return None
        if length > MAX_BODY_BYTES:
            self._skip(length)
            raise Broken(f"a message of {length} bytes is longer than {MAX_BODY_BYTES}")
        body = self._reader.read(length)
        if len(body) < length:
            return None
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Broken(f"a message that is not JSON: {type(error).__name__}") from None
        if not isinstance(message, dict):
            raise Broken("a message that is not a JSON object")
        return message

    def send(self, kind: str, message: dict[str, Any]) -> None:
        body = json.dumps({"seq": next(self._numbers), "type": kind, **message}).encode("ascii")
        self._writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._writer.flush()

    def _header(self) -> int | None:
        """The length of the body that follows. Lines that are no header are passed over until one is."""
        length: int | None = None
        while True:
            line = self._reader.readline(_MAX_LINE)
            if not line:
                return None
            text = line.strip()
            if not text:
                if length is not None:
                    return length
                continue
            name, _, value = text.partition(b":")
            named = name.strip().lower()
            if named == b"content-length":
                value = value.strip()
                length = int(value) if value.isdigit() and len(value) < 19 else None

    def _skip(self, length: int) -> None:
        while length > 0:
            piece = self._reader.read(min(length, _PIECE))
            if not piece:
                return
            length -= len(piece)


# -- the tree of variables -------------------------------------------------------------------------------------------


PAGE = 2_000  # variables of one answer
_HANDLES = 1_000_000  # numbers of one session: below what the protocol allows, above what a person unfolds
_VALUE_CHARS = 300
_NAME_CHARS = 200

Row = dict[str, Any]


class Tree:
    """Numbers for frames and for everything that can be unfolded."""

    def __init__(self, dump: Dump, stacks: list[Stack]) -> None:
        self.dump = dump
        self.stacks = stacks
        self._places: dict[tuple[Any, ...], int] = {}
        self._targets: list[tuple[Any, ...]] = []

    # Numbers.

    def frame_id(self, stack: int, at: int) -> int:
        return self._handle(("frame", stack, at), ("frame", stack, at))

    def frame(self, number: Any) -> Frame:
        kind, *rest = self._target(number)
        if kind != "frame":
            raise NotInDump(f"{number} is no frame")
        found: Frame = self.stacks[rest[0]].frames[rest[1]]
        return found

    def reference(self, value: Value) -> int:
        """A number for unfolding the value; 0 when there is nothing below it."""
        if not isinstance(value, Ref):
            return 0
        inert = self.dump.object(value)
        if not (inert.items or inert.pairs or inert.attributes):
            return 0
        return self._handle(("object", value.number), ("object", value))

    def parts(self) -> int:
        """The number of what holds all plain parts."""
        if ("parts",) not in self._places:
            self._handle(("parts",), ("plain", self.dump.plain_parts()))
        return self._places["parts",]

    # Content.

    def children(self, number: Any, *, which: str = "", start: int = 0, count: int = 0) -> list[Row]:
        """The variables below a number: ``which`` is "named", "indexed" or empty for both."""
        below = self._below(number, which)
        most = min(count or PAGE, PAGE)
        page = [make() for make in islice(below, start, start + most)]
        if not count and next(below, None) is not None:
            told = f"more than {PAGE}; ask with start and count"
            page.append({"name": "...", "value": told, "variablesReference": 0})
        return page

    def row(self, name: str, value: Value, path: str = "") -> Row:
        """One variable: its name, its value as text, and how to unfold it."""
        shown: Row = {
            "name": clean(name[:_NAME_CHARS]),
            "presentationHint": {"attributes": ["readOnly"]},
            **self.shown(value, _VALUE_CHARS),
        }
        if path:
            shown["evaluateName"] = path
        return shown

    def shown(self, value: Value, width: int) -> Row:
        """A value as an answer has it, without a name."""
        found: Row = {
            "value": text_of(self.dump, value, width=width, depth=2),
            "type": self.type_name(value),
            "variablesReference": self.reference(value),
        }
        if isinstance(value, Ref) and found["variablesReference"]:
            inert = self.dump.object(value)
            found["namedVariables"] = len(inert.pairs) + len(inert.attributes)
            found["indexedVariables"] = len(inert.items)
        return found

    def type_name(self, value: Value) -> str:
        if isinstance(value, Ref):
            return clean(self.dump.object(value).type_name[:_NAME_CHARS])
        if isinstance(value, Missing):
            return clean(value.type_name[:_NAME_CHARS])
        return type(value).__name__

    # Inside.

    def _below(self, number: Any, which: str) -> Iterator[Callable[[], Row]]:
        """What makes each row. A page deep in a long list makes only its own."""
        kind, *rest = self._target(number)
        if kind == "object":
            yield from self._below_object(self.dump.object(rest[0]), which)
        elif which == "indexed":
            return
        elif kind == "frame":
            for name, value in self.frame(number).locals:
                yield partial(self.row, name, value, name)
        else:
            for place, (name, data) in enumerate(plain_children(rest[0])):
                yield partial(self._plain_row, (number, place), name, data)

    def _below_object(self, inert: Inert, which: str) -> Iterator[Callable[[], Row]]:
        base = f"#{inert.number}"
        if which != "named":
            for index, item in enumerate(inert.items):
                yield partial(self.row, f"[{index}]", item, f"{base}[{index}]")
        if which != "indexed":
            for key, item in inert.pairs:
                yield partial(self._pair_row, base, key, item)
            for name, item in inert.attributes:
                yield partial(self.row, name, item, f"{base}.{name}")

    def _pair_row(self, base: str, key: Value, item: Value) -> Row:
        path = f"{base}[{key!r}]" if key is None or isinstance(key, int | str | bytes) else ""
        return self.row(f"[{text_of(self.dump, key, width=100, depth=1)}]", item, path)

    def _plain_row(self, place: tuple[int, int], name: str, data: Any) -> Row:
        below = isinstance(data, dict | list) and bool(data)
        return {
            "name": clean(name[:_NAME_CHARS]),
            "value": clean(display.plain_text(data, _VALUE_CHARS)),
            "variablesReference": self._handle(("plain", *place), ("plain", data)) if below else 0,
        }

    def _handle(self, key: tuple[Any, ...], target: tuple[Any, ...]) -> int:
        known = self._places.get(key)
        if known is not None:
            return known
        if len(self._targets) >= _HANDLES:
            return 0
        self._targets.append(target)
        self._places[key] = len(self._targets)
        return len(self._targets)

    def _target(self, number: Any) -> tuple[Any, ...]:
        if type(number) is not int or not 0 < number <= len(self._targets):
            raise NotInDump(f"no frame or variable {display.plain_text(number, 40)}")
        return self._targets[number - 1]


# -- the conversation ------------------------------------------------------------------------------------------------


_CAPABILITIES = {
    "supportsConfigurationDoneRequest": True,
    "supportsExceptionInfoRequest": True,
    "supportsCompletionsRequest": True,
    "completionTriggerCharacters": [".", "["],
    "supportsDelayedStackTraceLoading": True,
    "supportsEvaluateForHovers": True,
    "supportsTerminateRequest": True,
}
# Numbers of error answers, by kind: an editor shows them, and a script may rely on them.
_ERRORS = {"bad-option": 1, "not-in-dump": 2, "read-only": 3, "not-a-dump": 4, "newer-format": 5, "corrupt-value": 6}
_OTHER_ERROR = 100
_ENDED = ("continue", "next", "stepIn", "stepOut", "stepBack", "reverseContinue", "goto", "restart", "restartFrame")
_CHANGES = ("setVariable", "setExpression", "writeMemory")

_REQUESTS = {
    "initialize": "_initialize",
    "launch": "_launch",
    "attach": "_launch",
    "configurationDone": "_configured",
    "disconnect": "_disconnect",
    "terminate": "_terminate",
    "setBreakpoints": "_breakpoints",
    "setFunctionBreakpoints": "_breakpoints",
    "setExceptionBreakpoints": "_nothing",
    "cancel": "_nothing",
    "pause": "_pause",
    "threads": "_threads",
    "stackTrace": "_stack_trace",
    "scopes": "_scopes",
    "variables": "_variables",
    "evaluate": "_evaluate",
    "completions": "_completions",
    "exceptionInfo": "_exception_info",
    "source": "_source",
}

_PAGE = 1_000  # frames of one answer
_EVALUATED_CHARS = 4_000
_SOURCE_OFFSET = 200_000  # lines that may be missing before an embedded piece of source

Body = dict[str, Any]


class Session:
    """One conversation about one dump."""

    def __init__(self, wire: Wire, dump: str | os.PathLike[str] | None) -> None:
        self._wire = wire
        self._given = dump
        self._dump: Dump | None = None
        self._stacks: list[Stack] = []
        self._sources: list[Source] = []
        self._numbers: dict[str, int] = {}  # file -> its place in the list, from 1
        self._tree: Tree
        self._line_base = 1
        self._column_base = 1
        self._after: list[tuple[str, Body]] = []  # events that follow the answer
        self._over = False

    def run(self) -> None:
        """Answer until the other side leaves."""
        try:
            while not self._over:
                try:
                    message = self._wire.read()
                except Broken as error:
                    self._event("output", {"category": "stderr", "output": f"holdfast: skipped {error}\n"})
                    continue
                if message is None:
                    return
                if message.get("type") == "request":
                    self._answer(message)
        except (BrokenPipeError, ConnectionResetError):
            return  # the editor went away without a word
        finally:
            if self._dump is not None:
                self._dump.close()

    def _answer(self, request: Body) -> None:
        command = request.get("command")
        arguments = request.get("arguments")
        frame: Body = {"request_seq": as_int(request.get("seq")), "command": clean(as_text(command)[:200])}
        self._after = []
        try:
            body = self._do(as_text(command), arguments if isinstance(arguments, dict) else {})
        except HoldfastError as error:
            number = _ERRORS.get(error.kind, _OTHER_ERROR)
            told = {"id": number, "format": clean(str(error).replace("\n", " ")).replace("{", "("), "showUser": True}
            answer = {**frame, "success": False, "message": error.kind, "body": {"error": told}}
        else:
            answer = {**frame, "success": True, "body": body}
        self._wire.send("response", answer)
        for event, content in self._after:
            self._event(event, content)

    def _do(self, command: str, arguments: Body) -> Body:
        if command in _ENDED:
            raise ReadOnly("a dump shows one moment: the program cannot go on from here")
        if command in _CHANGES:
            raise ReadOnly("a dump is only read: values cannot be changed")
        if command not in _REQUESTS:
            raise BadOption(f"the request {command[:60]!r} is not known here")
        if self._dump is not None:
            self._dump.ask()
        do: Callable[[Body], Body | None] = getattr(self, _REQUESTS[command])
        return do(arguments) or {}

    def _event(self, event: str, body: Body) -> None:
        self._wire.send("event", {"event": event, "body": body})

    # The conversation.

    def _initialize(self, arguments: Body) -> Body:
        self._line_base = 0 if arguments.get("linesStartAt1") is False else 1
        self._column_base = 0 if arguments.get("columnsStartAt1") is False else 1
        return _CAPABILITIES

    def _launch(self, arguments: Body) -> None:
        if self._dump is not None:
            raise BadOption("a dump is open already", hint="Begin another session for another dump.")
        named = arguments.get("dump")
        named = self._given if named is None else named
        if not isinstance(named, str | os.PathLike) or not os.fspath(named) or "\0" in os.fspath(named):
            raise BadOption('which dump? Give its path as "dump"')
        self._dump = open_dump(named)
        self._stacks = self._dump.all_stacks()
        self._sources = list(self._dump.sources.values())
        self._numbers = {source.file: number for number, source in enumerate(self._sources, 1)}
        self._tree = Tree(self._dump, self._stacks)
        self._after.append(("initialized", {}))

    def _configured(self, _arguments: Body) -> None:
        dump = self._opened()
        failed = bool(dump.exceptions)
        told = dump.exceptions[0] if failed else None
        text = f"{told.type_name}{display.message_of(told, 500)}" if told else dump.why or dump.trigger
        missing = "".join(f"missing: {clean(line[:500])}\n" for line in dump.missing[:20])
        if missing:
            self._after.append(("output", {"category": "important", "output": missing}))
        self._after.append(("stopped", self._stop("exception" if failed else "pause", text)))

    def _pause(self, _arguments: Body) -> None:
        self._opened()
        self._after.append(("stopped", self._stop("pause", "the moment of the dump")))

    def _stop(self, reason: str, text: str) -> Body:
        return {
            "reason": reason,
            "description": "Dump: " + clean(self._opened().why or reason)[:200],
            "text": clean(text),
            "threadId": 1,
            "allThreadsStopped": True,
        }

    def _disconnect(self, _arguments: Body) -> None:
        self._over = True

    def _terminate(self, _arguments: Body) -> None:
        self._after.append(("terminated", {}))

    def _breakpoints(self, arguments: Body) -> Body:
        """Accepted and never reached, because an editor sends its breakpoints without being asked."""
        wanted = arguments.get("breakpoints", arguments.get("lines"))
        count = min(len(wanted), _PAGE) if isinstance(wanted, list) else 0
        return {"breakpoints": [{"verified": False, "message": "a dump has ended already"}] * count}

    def _nothing(self, _arguments: Body) -> None:
        """A request that asks for nothing that a dump could do, and harms nothing."""

    # Stacks.

    def _threads(self, _arguments: Body) -> Body:
        self._opened()
        found = []
        for number, stack in enumerate(self._stacks, 1):
            kind = "" if stack.kind == THREAD else f"{stack.kind} "
            note = f" ({stack.note[:200]})" if stack.note else ""
            found.append({"id": number, "name": clean(f"{kind}{stack.name[:200]}{note}")})
        return {"threads": found or [{"id": 1, "name": "no thread is in the dump"}]}

    def _stack_trace(self, arguments: Body) -> Body:
        self._opened()
        number = _count(arguments, "threadId")
        if not 1 <= number <= len(self._stacks):
            if number == 1:
                return {"stackFrames": [], "totalFrames": 0}
            raise NotInDump(f"no thread {number}")
        frames = self._stacks[number - 1].frames
        start = _count(arguments, "startFrame")
        levels = min(_count(arguments, "levels") or _PAGE, _PAGE)
        wanted = range(len(frames) - 1 - start, max(-1, len(frames) - 1 - start - levels), -1)
        return {"stackFrames": [self._frame(number - 1, at) for at in wanted], "totalFrames": len(frames)}

    def _frame(self, stack: int, at: int) -> Body:
        frame = self._stacks[stack].frames[at]
        gap = f" (before it {frame.gap} frames were left out)" if frame.gap else ""
        shown: Body = {
            "id": self._tree.frame_id(stack, at),
            "name": clean(frame.function[:400] or "?") + gap,
            "line": max(frame.line - 1, 0) + self._line_base,
            "column": max(frame.span[1], 0) + self._column_base if frame.span[0] else 0,
            "presentationHint": "normal" if frame.mine else "subtle",
            "source": self._source_of(frame),
        }
        if frame.span[0] >= frame.line and frame.span[0]:
            shown["endLine"] = frame.span[0] - 1 + self._line_base
            shown["endColumn"] = max(frame.span[2], 0) + self._column_base
        return shown

    def _source_of(self, frame: Frame) -> Body:
        number = self._numbers.get(frame.file)
        if number is not None:
            return _source_body(self._sources[number - 1], number)
        return {"name": clean(_base(frame.file)), "path": clean(frame.file), "presentationHint": "deemphasize"}

    def _scopes(self, arguments: Body) -> Body:
        self._opened()
        number = arguments.get("frameId")
        frame = self._tree.frame(number)
        why = f"Locals ({frame.hidden})" if frame.hidden else "Locals"
        return {
            "scopes": [
                {
                    "name": clean(why),
                    "presentationHint": "locals",
                    "variablesReference": number,
                    "namedVariables": len(frame.locals),
                    "expensive": False,
                },
                {"name": "Dump", "variablesReference": self._tree.parts(), "expensive": True},
            ]
        }

    def _variables(self, arguments: Body) -> Body:
        self._opened()
        start, count = _count(arguments, "start"), _count(arguments, "count")
        number, which = arguments.get("variablesReference"), as_text(arguments.get("filter"))
        return {"variables": self._tree.children(number, which=which, start=start, count=count)}

    # Values.

    def _evaluate(self, arguments: Body) -> Body:
        dump = self._opened()
        value = dump.local(self._chosen(arguments), as_text(arguments.get("expression")))
        shown = self._tree.shown(value, _EVALUATED_CHARS)
        shown["result"] = shown.pop("value")
        return shown

    def _completions(self, arguments: Body) -> Body:
        dump = self._opened()
        text = as_text(arguments.get("text"))
        column = max(0, _count(arguments, "column") - self._column_base)
        begun = text[:column]
        found = dump.continuations(self._chosen(arguments), begun)
        return {"targets": [{"label": clean(name), "text": name, "start": 0, "length": len(begun)} for name in found]}

    def _chosen(self, arguments: Body) -> Frame | None:
        """The frame that a request names; without one, the innermost of the failing thread."""
        if arguments.get("frameId") is not None:
            return self._tree.frame(arguments["frameId"])
        return next((stack.frames[stack.inner()] for stack in self._stacks[:1] if stack.frames), None)

    def _exception_info(self, arguments: Body) -> Body:
        dump = self._opened()
        number = _count(arguments, "threadId")
        if not dump.exceptions or number != 1:
            raise NotInDump(f"no exception in thread {number}")
        failure = dump.exceptions[0]
        return {
            "exceptionId": clean(failure.type_name),
            "description": clean(failure.type_name + display.message_of(failure)),
            "breakMode": "unhandled",
            "details": self._details(0, set()),
        }

    def _details(self, number: int, seen: set[int]) -> Body:
        """An exception with those inside; each is told once, because a crafted chain may name any from everywhere."""
        dump = self._opened()
        failure = dump.exceptions[number]
        seen.add(number)
        lines = [*display.trace(dump, failure.frames), *((f"note: {note[:2000]}",) for note in failure.notes)]
        texts = ("".join(piece if isinstance(piece, str) else piece[1] for piece in line) for line in lines)
        below = (*failure.group, failure.cause if failure.cause is not None else failure.context)
        inner = [self._details(place, seen) for place in below if place is not None and place not in seen]
        return {
            "message": clean(display.message_of(failure).removeprefix(": ")),
            "typeName": clean(failure.type_name.rpartition(".")[2]),
            "fullTypeName": clean(failure.type_name),
            "stackTrace": "\n".join(clean(text) for text in texts),
            "innerException": inner,
        }

    # Sources.

    def _source(self, arguments: Body) -> Body:
        self._opened()
        given = arguments.get("source")
        inside = given if isinstance(given, dict) else {}
        number = _count(inside, "sourceReference") or _count(arguments, "sourceReference")
        if not 1 <= number <= len(self._sources):
            raise NotInDump("no such source in the dump")
        source = self._sources[number - 1]
        if source.first > _SOURCE_OFFSET:
            raise NotInDump(f"the dump has this file only from line {source.first} on")
        return {"content": "\n" * (source.first - 1) + "\n".join(source.lines), "mimeType": "text/x-python"}

    def _opened(self) -> Dump:
        if self._dump is None:
            raise BadOption("no dump is open", hint="Send launch or attach first.")
        return self._dump


def _count(arguments: Body, name: str) -> int:
    """A number as the protocol has them, from 0 on; 0 when there is none."""
    return max(0, min(as_int(arguments.get(name)), 2**31 - 1))


def _base(file: str) -> str:
    return file.rpartition("/")[2] or file


def _source_body(source: Source, number: int) -> Body:
    return {
        "name": clean(_base(source.file)),
        "path": clean(source.file),
        "sourceReference": number,
        "origin": "from the dump"
        + ("" if source.whole else ", a part")
        + (", changed since" if source.changed else ""),
    }


def serve(dump: str | os.PathLike[str] | None = None) -> None:
    """Answer an editor over standard input and output until it leaves.

    With ``dump``, `launch` and `attach` need no argument; a file that is no dump is refused before the first message.
    """
    if dump is not None:
        open_dump(dump).close()
    Session(Wire(sys.stdin.buffer, sys.stdout.buffer), dump).run()
