"""An outside world for tests: an HTTP server on loopback in a process of its own, with a database of its own.

It books, and keeps a table of what really happened: one row each time something was done. Whoever asks can make it
wait until he has given up, hang up before or after doing it, answer with an error, or kill the caller at one of three
moments. Requests are served one after another in the order in which they came, so a look at the books, which is a
request as well, sees everything that was asked for before, also by who is dead by now; only who gives up lets others
pass.

    with World(folder) as world:
        client = Client(world.port)
        client.post("/do", ref="r1", tool="book", key="k", keyed=True)
        world.done("r1")           # how often it was really done
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = """
CREATE TABLE happened (n INTEGER PRIMARY KEY, ref TEXT NOT NULL, what TEXT NOT NULL, key TEXT NOT NULL);
CREATE INDEX happened_ref ON happened (ref, what);
CREATE TABLE answer (key TEXT PRIMARY KEY, n INTEGER NOT NULL);
CREATE TABLE asked (n INTEGER PRIMARY KEY, path TEXT NOT NULL, ref TEXT NOT NULL, key TEXT NOT NULL);
"""


class Refused(Exception):
    """The world answered with an error."""


class Client:
    """Asks the world, each time by a connection of its own."""

    def __init__(self, port: int, timeout_s: float = 180.0) -> None:
        self._port, self._timeout_s = port, timeout_s

    def post(self, path: str, **body: Any) -> Any:
        """Ask for something. Raises what http.client raises when the world hangs up, and ``Refused``."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)
        with closing(connection):
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            found = json.loads(answer.read())
        if answer.status != 200:
            raise Refused(found)
        return found


class World:
    """The server's process, and a look into its database."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "world.db"
        with sqlite3.connect(self.path) as made:
            made.executescript(SCHEMA)
        made.close()
        self._process = warm.Popen(
            [sys.executable, "-m", "tests.run.world", str(self.path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._books = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)

    def done(self, ref: str, what: str = "do") -> int:
        """How often this was really done (``do``), or undone (``undo``), by all that was asked for until now."""
        Client(self.port).post("/look")
        (count,) = self._books.execute(
            "SELECT count(*) FROM happened WHERE ref = ? AND what = ?", (ref, what)
        ).fetchone()
        return int(count)

    def keys(self, ref: str) -> list[str]:
        """The keys with which this was asked for, oldest first, repetitions included."""
        return [key for (key,) in self._books.execute("SELECT key FROM asked WHERE ref = ? ORDER BY n", (ref,))]

    def close(self) -> None:
        self._books.close()
        self._process.terminate()
        self._process.wait(timeout=180)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# -- the server ---------------------------------------------------------------------------------------------


class Server:
    """What runs in the world's own process."""

    def __init__(self, path: str) -> None:
        self._books = sqlite3.connect(path, isolation_level=None)
        # It is never killed, and lives for one test: its own durability is not under test.
        self._books.execute("PRAGMA journal_mode=WAL")
        self._books.execute("PRAGMA synchronous=OFF")

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                path = lines[0].split()[1]
                length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:"))
                body = json.loads(await reader.readexactly(length))
                if body.get("late"):
                    await reader.read()  # until the caller hangs up
                status, answer = self._answer(path, body)
                if status == 0:
                    break  # it hangs up
                data = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data))
                await writer.drain()
        writer.close()

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/look":
            return 200, None
        ref, key, fault = body.get("ref", ""), body.get("key", ""), body.get("fault", "")
        self._books.execute("INSERT INTO asked (path, ref, key) VALUES (?, ?, ?)", (path, ref, key))
        if path == "/read":
            self._kill(body)
            return 200, {"ref": ref, "value": f"value of {ref}"}
        if path == "/find":
            row = self._books.execute(
                "SELECT n, ref FROM happened WHERE key = ? AND what = 'do' ORDER BY n LIMIT 1", (key,)
            ).fetchone()
            return 200, None if row is None else {"number": row[0], "ref": row[1]}
        if path not in {"/do", "/undo"}:
            return 404, "no such thing"
        when = body.get("when", "")
        if fault == "error":
            return 500, "it cannot be done now"
        if when in {"before", "while"}:
            self._kill(body)
        if fault == "before" or when == "before":
            return 0, None
        number = self._do(path[1:], ref, key, keyed=bool(body.get("keyed")))
        if when == "after":
            self._kill(body)
        return (0, None) if fault == "after" or when else (200, {"number": number, "ref": ref})

    def _do(self, what: str, ref: str, key: str, *, keyed: bool) -> int:
        self._books.execute("BEGIN")
        known = self._books.execute("SELECT n FROM answer WHERE key = ?", (key,)).fetchone() if keyed else None
        if known is None:
            made = self._books.execute("INSERT INTO happened (ref, what, key) VALUES (?, ?, ?)", (ref, what, key))
            known = (made.lastrowid,)
            if keyed:
                self._books.execute("INSERT INTO answer VALUES (?, ?)", (key, known[0]))
        self._books.execute("COMMIT")
        return int(known[0])

    @staticmethod
    def _kill(body: dict[str, Any]) -> None:
        if pid := body.get("kill"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(Server(sys.argv[1]).serve())
