"""The last log records, kept in a ring while the program runs.

Must not know dumps or redaction. Holds always: a record is turned into text when it is logged, in the thread that
logged it, so that nothing of the program runs when a dump is taken; logging does what it would do without, so no
handler is added: with one, `basicConfig` would do nothing, and warnings of a program without any would not be printed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

_TEXT_CHARS = 8_192


class Ring:
    """The newest records as plain data. No lock: a deque's append is atomic, and a crash in it must not deadlock."""

    def __init__(self, records: int = 500) -> None:
        self.kept: deque[dict[str, Any]] = deque(maxlen=records)
        self.seen = 0
        self.ship: Callable[[dict[str, Any]], None] | None = None  # where a copy goes that outlives the process
        self.before: Callable[..., logging.LogRecord] = logging.getLogRecordFactory()

    def make(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """The factory of records, which is called for each that is going to be logged."""
        record = self.before(*args, **kwargs)
        if _rings and _rings[0] is self:  # a factory that was put over this one may outlive it
            self.emit(record)
        return record

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
        if self.ship is not None:
            self.ship(entry)


_rings: list[Ring] = []


def keep(records: int = 500) -> Ring:
    """Begin to keep the records of all loggers. Once for a process."""
    if not _rings:
        ring = Ring(records)
        _rings.append(ring)
        logging.setLogRecordFactory(ring.make)
    return _rings[0]


def stop() -> None:
    while _rings:
        ring = _rings.pop()
        if logging.getLogRecordFactory() == ring.make:
            logging.setLogRecordFactory(ring.before)


def kept(most: int) -> dict[str, Any] | None:
    """The newest records, oldest first; None when nobody keeps any."""
    if not _rings:
        return None
    records = list(_rings[0].kept)[-most:]
    return {"records": records, "left_out": _rings[0].seen - len(records)}
