"""A conversation in the Debug Adapter Protocol about one dump.

Owns what each request means. Must not know bytes on the wire or how variables are numbered. Holds always: the dump is
only read, and nothing is evaluated; every request gets one answer, a success or a typed error; no message ends the
session but `disconnect` and the end of the input.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from holdfast.crash import kinds, places, telling
from holdfast.crash.dap_tree import Tree
from holdfast.crash.dap_wire import Broken, Wire
from holdfast.crash.dump import Dump, open_dump
from holdfast.crash.places import Stack
from holdfast.crash.records import Frame, Source, as_int, as_text
from holdfast.crash.render import clean
from holdfast.errors import BadOption, HoldfastError, NotInDump, ReadOnly

_CAPABILITIES = {
    "supportsConfigurationDoneRequest": True,
    "supportsExceptionInfoRequest": True,
    "supportsLoadedSourcesRequest": True,
    "supportsModulesRequest": True,
    "supportsCompletionsRequest": True,
    "completionTriggerCharacters": [".", "["],
    "supportsDelayedStackTraceLoading": True,
    "supportsEvaluateForHovers": True,
    "supportsClipboardContext": True,
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
    "loadedSources": "_loaded_sources",
    "modules": "_modules",
}

_PAGE = 1_000  # frames, modules or sources of one answer
_EVALUATED_CHARS = 4_000
_COPIED_CHARS = 100_000
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
        self._stacks = places.stacks(self._dump)
        self._sources = list(self._dump.sources.values())
        self._numbers = {source.file: number for number, source in enumerate(self._sources, 1)}
        self._tree = Tree(self._dump, self._stacks)
        self._after.append(("initialized", {}))

    def _configured(self, _arguments: Body) -> None:
        dump = self._opened()
        failed = bool(dump.exceptions)
        told = dump.exceptions[0] if failed else None
        text = f"{told.type_name}{telling.message_of(told, 500)}" if told else dump.why or dump.trigger
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
            kind = "" if stack.kind == places.THREAD else f"{stack.kind} "
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
        context = as_text(arguments.get("context"))
        value = places.find(dump, self._chosen(arguments), as_text(arguments.get("expression")))
        shown = self._tree.shown(value, _COPIED_CHARS if context == "clipboard" else _EVALUATED_CHARS)
        shown["result"] = shown.pop("value")
        return shown

    def _completions(self, arguments: Body) -> Body:
        dump = self._opened()
        text = as_text(arguments.get("text"))
        column = max(0, _count(arguments, "column") - self._column_base)
        begun = text[:column]
        found = places.continuations(dump, self._chosen(arguments), begun)
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
            "description": clean(failure.type_name + telling.message_of(failure)),
            "breakMode": "unhandled",
            "details": self._details(0, set()),
        }

    def _details(self, number: int, seen: set[int]) -> Body:
        """An exception with those inside; each is told once, because a crafted chain may name any from everywhere."""
        dump = self._opened()
        failure = dump.exceptions[number]
        seen.add(number)
        lines = [*telling.trace(dump, failure.frames), *((f"note: {note[:2000]}",) for note in failure.notes)]
        texts = ("".join(piece if isinstance(piece, str) else piece[1] for piece in line) for line in lines)
        below = (*failure.group, failure.cause if failure.cause is not None else failure.context)
        inner = [self._details(place, seen) for place in below if place is not None and place not in seen]
        return {
            "message": clean(telling.message_of(failure).removeprefix(": ")),
            "typeName": clean(failure.type_name.rpartition(".")[2]),
            "fullTypeName": clean(failure.type_name),
            "stackTrace": "\n".join(clean(text) for text in texts),
            "innerException": inner,
        }

    # Sources and modules.

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

    def _loaded_sources(self, _arguments: Body) -> Body:
        self._opened()
        return {"sources": [_source_body(source, number) for number, source in enumerate(self._sources[:_PAGE], 1)]}

    def _modules(self, arguments: Body) -> Body:
        listed = self._opened().part(kinds.MODULES).get("modules")
        every = [item for item in listed if isinstance(item, list) and item] if isinstance(listed, list) else []
        start = _count(arguments, "startModule")
        most = min(_count(arguments, "moduleCount") or _PAGE, _PAGE)
        found = []
        for number, item in enumerate(every[start : start + most], start):
            name, path, version = (clean(as_text(field)[:1000]) for field in [*item, "", ""][:3])
            extra = {key: text for key, text in (("path", path), ("version", version)) if text}
            found.append({"id": number, "name": name, "isUserCode": item[3:4] == [True], **extra})
        return {"modules": found, "totalModules": len(every)}

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
