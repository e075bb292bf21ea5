"""A service that deduplicates by a header, as payment services do, on loopback and in a thread.

The same key with the same request gets the same answer, with another request an error. Without a key everything counts.

    POST, PUT, PATCH, DELETE /charge...    something is done
    /lost...                               it is done, and the first time nobody is told
    /moved                                 307 to /charge; /seen: done, and 303 to /receipt
    GET                                    nothing is done
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

HEADER = "Idempotency-Key"


class Service:
    """``asked`` is every request, ``done`` what really happened: the bodies."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None, bytes]] = []
        self.done: list[bytes] = []
        self._answers: dict[str, tuple[tuple[str, str, bytes], int]] = {}
        self._lock = threading.Lock()
        service = self

        class Handler(_Handler):
            owner = service

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def keys(self) -> list[str | None]:
        return [key for _, _, key, _ in self.asked]

    def act(self, method: str, path: str, key: str | None, body: bytes) -> tuple[int, dict[str, Any], bool]:
        """Its status and answer, and whether it was done now."""
        with self._lock:
            self.asked.append((method, path, key, body))
            if method == "GET":
                return 200, {"ok": True}, False
            if key is not None and key in self._answers:
                before, number = self._answers[key]
                if before != (method, path, body):
                    return 422, {"error": "this key was used for another request"}, False
                return 200, {"charge": number}, False
            self.done.append(body)
            if key is not None:
                self._answers[key] = (method, path, body), len(self.done)
            return 200, {"charge": len(self.done)}, True


class _Handler(BaseHTTPRequestHandler):
    owner: Service
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        body = self._body()
        key = self.headers.get(HEADER)
        if self.path == "/moved":
            self.owner.asked.append((self.command, self.path, key, body))
            self._answer(307, {}, to="/charge")
            return
        status, answer, new = self.owner.act(self.command, self.path, key, body)
        if self.path.startswith("/lost") and new:
            self.close_connection = True  # without a word
            return
        if self.path == "/seen":
            self._answer(303, {}, to="/receipt")
            return
        self._answer(status, answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - as the base class looks for them

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, answer: dict[str, Any], to: str = "") -> None:
        body = json.dumps(answer).encode()
        with suppress(OSError):  # whoever asked may be dead
            self.send_response(status)
            if to:
                self.send_header("Location", to)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass
