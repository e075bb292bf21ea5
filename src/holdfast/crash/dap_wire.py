"""Messages of the Debug Adapter Protocol on a pair of byte streams.

Must not know what any message means. Holds always: what is read is bounded (a header line, a body), whatever the other
side sends; a message that cannot be read is skipped, and the next one is found.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any, BinaryIO

MAX_BODY_BYTES = 4 << 20  # of one request: the largest honest ones name a file and a few numbers
_MAX_LINE = 4_096
_PIECE = 1 << 16


class Broken(Exception):
    """A message that could not be read; the stream goes on after it."""


class Foreign(Exception):
    """What comes in is another protocol, such as a browser's request."""


class Wire:
    """One connection. ``strict`` ends it at the first line that is no header, instead of looking for the next one."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, *, strict: bool = False) -> None:
        self._reader = reader
        self._writer = writer
        self._strict = strict
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
            if named not in (b"content-length", b"content-type") and self._strict:
                raise Foreign
            if named == b"content-length":
                value = value.strip()
                length = int(value) if value.isdigit() and len(value) < 19 else None

    def _skip(self, length: int) -> None:
        while length > 0:
            piece = self._reader.read(min(length, _PIECE))
            if not piece:
                return
            length -= len(piece)
