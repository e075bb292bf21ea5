"""Frames and threads: from what the interpreter holds to plain records.

Must not know files or the order of parts. Holds always: a stack is written outermost first; where frames are left out,
they are in the middle, and counted; locals go through the walker.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import types
from typing import Any

from holdfast.crash.limits import MAX_NAME, MAX_THREADS, Limits
from holdfast.crash.shapes import exact_text, find, frame_locals, is_subtype, layout_of
from holdfast.crash.walk import Walker

Step = tuple[types.FrameType, int]  # a frame, and the instruction at which it stands


def steps_of_traceback(traceback: types.TracebackType | None) -> list[Step]:
    """Outermost first. The frames under the handler are in it only as far as the exception has travelled."""
    steps = []
    while traceback is not None:
        steps.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return steps


def steps_of_frame(frame: types.FrameType | None) -> list[Step]:
    """A running or suspended frame and its callers, outermost first."""
    steps = []
    while frame is not None:
        steps.append((frame, frame.f_lasti))
        frame = frame.f_back
    steps.reverse()
    return steps


def whole_stack(traceback: types.TracebackType | None) -> list[Step]:
    """Where an exception was raised, and who had called the frame that it has reached so far."""
    inner = steps_of_traceback(traceback)
    if not inner:
        return []
    return steps_of_frame(inner[0][0].f_back) + inner


class Frames:
    """Turns frames into records, remembers which files they name."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._library = tuple(library_paths())
        self._mine: dict[str, bool] = {}
        self.files: dict[str, list[int]] = {}  # file -> lines that stacks stand at

    def record(self, step: Step) -> dict[str, Any]:
        """Everything of a frame but its locals."""
        frame, instruction = step
        code = frame.f_code
        file = exact_text(code.co_filename, 4096)
        line, end, column, end_column = _position(code, instruction)
        line = line or frame.f_lineno or code.co_firstlineno
        lines = self.files.setdefault(file, [])
        if len(lines) < 1000:
            lines.append(line)
        return {
            "file": file,
            "line": line,
            "span": [end or line, column or 0, end_column or 0],
            "function": exact_text(code.co_qualname, MAX_NAME),
            "first": code.co_firstlineno,
            "mine": self.is_mine(file),
        }

    def is_mine(self, file: str) -> bool:
        """Whether a file is the program's own: not the interpreter's, an installed package's or Holdfast's."""
        known = self._mine.get(file)
        if known is None:
            known = self._mine[file] = not is_library(file, self._library)
        return known

    def records(self, steps: list[Step]) -> tuple[list[dict[str, Any]], int, list[Step]]:
        """Records of a stack, how many frames were left out, and the steps of those that are there."""
        most = self._limits.frames
        left_out = max(0, len(steps) - most)
        if left_out:
            outer = most // 4
            steps = steps[:outer] + steps[len(steps) - (most - outer) :]
        found = [self.record(step) for step in steps]
        if left_out:
            found[most // 4]["gap"] = left_out  # this many frames stood between it and the one before
        return found, left_out, steps

    def add_locals(
        self, records: list[dict[str, Any]], steps: list[Step], walker: Walker, *, items: int, part: float = 0.5
    ) -> None:
        """Locals of each frame, innermost first; each may use a part of what is left."""
        for record, (frame, _instruction) in zip(reversed(records), reversed(steps), strict=True):
            found = frame_locals(frame, items)
            if found is None:
                record["hidden"] = "reading its namespace would run the program's code"
                continue
            named, total = found
            if frame.f_code.co_name == "<module>":
                named = [pair for pair in named if not _is_dull_global(*pair)]
                total = len(named)
            record["locals"] = walker.roots(named, walker.share(items=items, part=part))
            if total > len(named):
                record["locals_total"] = total


def _is_dull_global(name: str, value: Any) -> bool:
    """Of a module's own frame, its values matter; what it imported and defined is in its source."""
    dunder = name.startswith("__") and name.endswith("__")
    return dunder or type(value) is types.ModuleType or type(value) is types.FunctionType or type(value) is type


def threads(most: int = MAX_THREADS) -> list[dict[str, Any]]:
    """All threads with a Python frame: ``frame`` (not part of a record), and name, ids and kind."""
    frames = sys._current_frames()  # noqa: SLF001 (the documented way)
    known = {ident: thread for ident, thread in list(vars(threading)["_active"].items()) if type(ident) is int}
    own = threading.get_ident()
    main = threading.main_thread()
    found = []
    for ident, frame in list(frames.items())[:most]:
        thread = known.get(ident)
        record: dict[str, Any] = {"id": ident, "name": "", "frame": frame, "current": ident == own}
        if thread is not None and is_subtype(type(thread), threading.Thread):
            fields = layout_of(type(thread)).instance_dict(thread) or {}
            record["name"] = exact_text(find(fields, "_name"), MAX_NAME)
            record["daemon"] = find(fields, "_daemonic") is True
            native = find(fields, "_native_id")
            record["native_id"] = native if type(native) is int else 0
            record["main"] = thread is main
        found.append(record)
    return found


def _position(code: types.CodeType, instruction: int) -> tuple[int | None, int | None, int | None, int | None]:
    if instruction < 0:
        return code.co_firstlineno, None, None, None
    for index, position in enumerate(code.co_positions()):
        if index == instruction // 2:
            return position
    return None, None, None, None


def library_paths() -> list[str]:
    """Folders of the interpreter, of installed packages, and of Holdfast. A prefix may hold the program, too."""
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [__file__.rpartition("/crash/")[0], threading.__file__.rpartition("/")[0]]
    return [*dict.fromkeys(path.rstrip("/") + "/" for path in found if len(path) > 5)]


def is_library(file: str, folders: tuple[str, ...]) -> bool:
    """Whether a file belongs to one of these folders, or to a package installed elsewhere; or is none at all."""
    inside = file.startswith(folders) or "/site-packages/" in file or "/dist-packages/" in file
    command = file.rpartition("/")[0].endswith("/bin") and not file.endswith(".py")  # what an installer writes
    return inside or command or (file.startswith("<") and file != "<stdin>")
