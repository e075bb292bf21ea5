"""The outside world: an airline, which is a small web server with a database of its own. It knows nothing of Holdfast.

$ python examples/airline.py

It books first and answers later, as real ones do, and it remembers what it has booked under which key.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PORT = 8317


class Airline:
    """The bookings."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._do("CREATE TABLE IF NOT EXISTS booking (number INTEGER PRIMARY KEY, flight TEXT, key TEXT)")

    def book(self, flight: str, key: str) -> dict[str, Any]:
        """Book a seat. If you ask twice, you have two: this airline does not look at keys."""
        self._do("INSERT INTO booking (flight, key) VALUES (?, ?)", flight, key)
        return self.bookings(key)[-1]

    def bookings(self, key: str = "") -> list[dict[str, Any]]:
        rows = self._do("SELECT number, flight FROM booking WHERE ?1 IN ('', key) ORDER BY number", key)
        return [{"number": number, "flight": flight} for number, flight in rows]

    def _do(self, sql: str, *values: str) -> list[Any]:
        connection = sqlite3.connect(self._database, timeout=10)
        try:
            with connection:
                return connection.execute(sql, values).fetchall()
        finally:
            connection.close()


def serve(port: int | str = PORT, database: str = "airline.db", answer_s: float | str = 10) -> None:
    """Answer until the process is ended. The first line of output is the port."""
    airline = Airline(database)

    class Desk(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            booked = airline.book(asked["flight"], asked["key"])
            time.sleep(float(answer_s))  # it is booked; the answer takes its time
            self._answer(booked)

        def do_GET(self) -> None:
            key = parse_qs(urlsplit(self.path).query).get("key", [""])[0]
            self._answer(airline.bookings(key))

        def _answer(self, data: Any) -> None:
            body = json.dumps(data).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):  # the client is gone
                self.close_connection = True

        def log_message(self, *_words: Any) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", int(port)), Desk) as server:
        server.daemon_threads = True
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
