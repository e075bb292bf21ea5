"""Every bound of this room, each with its reason: what one capture may use, and what a reader believes of a file.

Must not know how anything is captured or read. Holds always: no loop of this room runs without one of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import BadOption

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
