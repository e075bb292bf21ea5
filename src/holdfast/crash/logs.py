"""The last log records, kept in a ring while the program runs.

Must not know dumps or redaction. Holds always: a record is turned into text when it is logged, in the thread that
logged it, so that nothing of the program runs when a dump is taken.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

_TEXT_CHARS = 8_192


class Ring(logging.Handler):
    """A handler for the root logger that keeps the newest records as plain data."""

    def __init__(self, records: int = 500) -> None:
        super().__init__()
        self.kept: deque[dict[str, Any]] = deque(maxlen=records)
        self.seen = 0

    def handle(self, record: logging.LogRecord) -> bool:
        """Without the handler's lock: a deque's append is atomic, and a crash inside a handler must not deadlock."""
        self.emit(record)
        return True

    def createLock(self) -> None:  # noqa: N802 (the name is logging's)
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 (arguments of any class are formatted)
            text = str(record.msg) if type(record.msg) is str else "a record that could not be formatted"
        self.seen += 1
        entry: dict[str, Any] = {
            "at": record.created,
            "level": str(record.levelname)[:40],
            "logger": str(record.name)[:400],
            "text": text[:_TEXT_CHARS],
            "file": str(record.pathname)[:4096],
            "line": record.lineno,
            "thread": str(record.threadName)[:400],
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = record.exc_info[0].__name__
        self.kept.append(entry)


_rings: list[Ring] = []


def keep(records: int = 500) -> Ring:
    """Begin to keep records of the root logger, and of all below that propagate. Once for a process."""
    if not _rings:
        ring = Ring(records)
        _rings.append(ring)
        logging.getLogger().addHandler(ring)
    return _rings[0]


def stop() -> None:
    while _rings:
        logging.getLogger().removeHandler(_rings.pop())


def kept(most: int) -> dict[str, Any] | None:
    """The newest records, oldest first; None when nobody keeps any."""
    if not _rings:
        return None
    records = list(_rings[0].kept)[-most:]
    return {"records": records, "left_out": _rings[0].seen - len(records)}
