"""The numbers and names that a dump's writer and reader share (docs/dump-format.md), and every bound of this room.

Must not know how anything is captured or read. Holds always: a code, once released, keeps its meaning, and new ones are
added at the end; no loop of this room runs without one of these bounds, or one that stands where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.errors import BadOption

VERSION: Final = 1
SUFFIX: Final = ".hfdump"
CORE_SUFFIX: Final = ".core.zst"

# Kinds of chunks, which are also the parts. The order is the order of writing: most valuable first.
HEAD: Final = "head"
EXCEPTION: Final = "excp"
STACK: Final = "stck"
OBJECTS: Final = "objs"
AGENT: Final = "agnt"
SOURCE: Final = "srce"
LOGS: Final = "logs"
TASKS: Final = "task"
LOCKS: Final = "lock"
PROCESS: Final = "proc"
DESCRIPTORS: Final = "fdes"
ENVIRONMENT: Final = "envr"
MODULES: Final = "mods"
HEAP: Final = "heap"
NATIVE: Final = "natv"
NOTE: Final = "note"
INDEX: Final = "indx"

PARTS: Final = {
    HEAD: "header",
    EXCEPTION: "exception",
    STACK: "thread stacks",
    OBJECTS: "objects",
    AGENT: "agent",
    SOURCE: "sources",
    LOGS: "log records",
    TASKS: "asyncio tasks",
    LOCKS: "locks and waiting",
    PROCESS: "process and machine",
    DESCRIPTORS: "file descriptors",
    ENVIRONMENT: "environment",
    MODULES: "modules",
    HEAP: "heap summary",
    NATIVE: "native stacks and registers",
    NOTE: "notes",
    INDEX: "index",
}

# Kinds of nodes: the first item of a node.
CUT: Final = 0  # [0, type, reason]
TEXT: Final = 1  # [1, type, text or bytes, total or nil, attributes]
LITERAL: Final = 2  # [2, type, text]: a number, date, enum member, path
LIST: Final = 3  # [3, type, entries, total or nil, attributes]: list, tuple, set, deque and their subclasses
DICT: Final = 4  # [4, type, key entry, value entry, ..., total or nil, attributes]
OBJECT: Final = 5  # [5, type, attributes]
CALLABLE: Final = 6  # [6, type, name, file, line, attributes]
NAMED: Final = 7  # [7, type, name]: a class or a module
ARRAY: Final = 8  # [8, type, dtype, shape, bytes, first elements, attributes]
SUSPENDED: Final = 9  # [9, type, name, file, line, state, locals]: a coroutine or generator
SHAPED_DICT: Final = 10  # [10, type, shape, value entries]: a dict whose keys are a shape of this chunk
SHAPED_OBJECT: Final = 11  # [11, type, shape, value entries]: an object whose attribute names are a shape of this chunk

# Why something is not there: the first item of an entry of two, the third of a CUT node.
DEADLINE: Final = 1
BUDGET: Final = 2
DEPTH: Final = 3
REDACTED: Final = 4
FAILED: Final = 5

REASONS: Final = {
    DEADLINE: "out of time",
    BUDGET: "budget of objects or bytes used up",
    DEPTH: "nested too deeply",
    REDACTED: "redacted",
    FAILED: "could not be read",
}

# How a whole part ended, in the index and in notes.
WHOLE: Final = "whole"
PARTIAL: Final = "cut"
ABSENT: Final = "absent"
DAMAGED: Final = "damaged"

# -- bounds ------------------------------------------------------------------------------------------------------------


MIB = 1024 * 1024

# What a reader believes. A writer stays below by construction.
MAX_CHUNK_BYTES = 2 * MIB  # MessagePack of one chunk: one byte of it may become 64 bytes of Python objects
MAX_CHUNKS = 65_536
MAX_FILE_BYTES = 4096 * MIB
CHUNK_TARGET_BYTES = MIB // 2  # a writer closes a chunk of objects at about this size

# Fixed, because nobody would ever need another value.
INLINE_TEXT = 120  # a text up to here stands in its parent; longer ones are nodes, so that sharing is seen
ENTRY_COST = 4  # bytes that an entry of a node is taken to need, when budgets are kept
MAX_NAME = 400  # characters of a type's, file's or function's name
MAX_CHAIN = 64  # exceptions in one chain or group, all levels together
MAX_NOTES = 32
MAX_THREADS = 20_000
MAX_TASKS = 20_000
MAX_LISTED = 20_000  # modules, descriptors, sockets, shared objects


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one capture may use. The defaults suit a crash of a program that people wait for."""

    deadline_s: float = 5.0
    file_bytes: int = 64 * MIB
    objects: int = 600_000  # nodes of the whole dump
    object_bytes: int = 192 * MIB  # of their estimated encoding, before compression
    depth: int = 40  # containers between a local and what is stored
    items: int = 100_000  # of one container in the failing thread and in tasks' innermost frames
    items_elsewhere: int = 1_000  # of one container in the other threads and tasks
    text_chars: int = 16_384  # of one text or bytes value
    frames: int = 400  # of one stack with locals: the innermost three quarters and the outermost quarter
    threads: int = 2_000  # with frames; the others are counted
    tasks: int = 2_000
    source_bytes: int = 4 * MIB
    log_records: int = 500
    census_objects: int = 2_000_000
    kept_dumps: int = 200  # of one folder; the oldest of what happens most often goes first
    kept_bytes: int = 2048 * MIB  # of all of them, with their cores
    look_s: float = 0.02  # for tasks, when an exception leaves one and may still be handled: their loop waits
    part_s: float = 2.5  # for code of other rooms (the agent's part), which may wait for a lock

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise BadOption(f"Limits.{name} must be above zero")
