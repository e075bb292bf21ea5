"""The numbers and names that a dump's writer and reader share (docs/dump-format.md).

Must not know anything else. Holds always: a code, once released, keeps its meaning; new ones are added at the end.
"""

from __future__ import annotations

from typing import Final

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
