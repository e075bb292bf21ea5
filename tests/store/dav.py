"""A small WebDAV server on loopback that fails as it is told to: the far end of cold places in tests.

It keeps what it was sent in memory, keeps half of what was cut off on the way as worse servers do, and can kill the
process that asks, before or after it has done what it was asked for.
"""

from __future__ import annotations

import os
import signal
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_FOUND = (
    '<?xml version="1.0"?><d:multistatus xmlns:d="DAV:"><d:response><d:href>{path}</d:href><d:propstat><d:prop>{prop}'
    "</d:prop><d:status>HTTP/1.1 200 OK</d:status></d:propstat></d:response></d:multistatus>"
)


class Server(ThreadingHTTPServer):
    """``how`` is asked before each request with its method and the object's name, and gives one of:

    "" as it should be; "500", "403"; "gone" closes the connection; "hang" never answers; "cut" breaks off in the
    middle; "short" sends half as if it were all; "wrong" sends other bytes; "kill" ends the process that asks. With
    "done " before it, that happens after the request was carried out.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.folders = {"/"}
        self.how: Callable[[str, str], str] = lambda _method, _name: ""
        self.asked: list[str] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def names(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.objects)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed, or hung up, is nothing to report."""


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None: ...

    def _answer(self) -> None:
        self.where = "/" + urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        self.server.asked.append(self.command)
        how = self.server.how(self.command, self.where.rpartition("/")[2])
        body = self._body("cut" in how and self.command == "PUT")
        if how and not how.startswith("done ") and how not in {"cut", "short", "wrong"}:
            self._fail(how)
            return
        status, data, size = getattr(self, f"_{self.command.lower()}")(body)
        if how.startswith("done "):
            self._fail(how.removeprefix("done "))
            return
        if how == "short":
            size = len(data) // 2
        if how == "wrong":
            data = bytes(byte ^ 1 for byte in data)
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(data[: size if how == "short" else size // 2 if how == "cut" else size])
        self.close_connection = how in {"cut", "short"}

    do_PROPFIND = do_MKCOL = do_PUT = do_GET = do_DELETE = do_OPTIONS = _answer  # noqa: N815

    def _body(self, half: bool) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            data = b"".join(parts)
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return data[: len(data) // 2] if half else data

    def _fail(self, how: str) -> None:
        if how == "hang":
            self.server.released.wait()
        if how == "kill":
            os.kill(int(self.headers["X-Asked-By"]), signal.SIGKILL)
        if how in {"500", "403"}:
            self.send_response(int(how))
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.close_connection = True

    def _options(self, body: bytes) -> tuple[int, bytes, int]:
        return 200, b"", 0

    def _propfind(self, body: bytes) -> tuple[int, bytes, int]:
        if self.where in self.server.folders:
            prop = "<d:resourcetype><d:collection/></d:resourcetype>"
        elif (data := self.server.objects.get(self.where)) is not None:
            prop = f"<d:resourcetype/><d:getcontentlength>{len(data)}</d:getcontentlength>"
        else:
            return 404, b"", 0
        found = _FOUND.format(path=urllib.parse.quote(self.where), prop=prop).encode()
        return 207, found, len(found)

    def _mkcol(self, body: bytes) -> tuple[int, bytes, int]:
        there = self.where in self.server.folders
        self.server.folders.add(self.where)
        return 405 if there else 201, b"", 0

    def _put(self, body: bytes) -> tuple[int, bytes, int]:
        self.server.objects[self.where] = body
        return 201, b"", 0

    def _get(self, body: bytes) -> tuple[int, bytes, int]:
        data = self.server.objects.get(self.where)
        if data is None:
            return 404, b"", 0
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start and start >= len(data):
            return 416, b"", 0
        return 206 if start else 200, data[start:], len(data) - start

    def _delete(self, body: bytes) -> tuple[int, bytes, int]:
        return (404 if self.server.objects.pop(self.where, None) is None else 204), b"", 0
