"""A PostgreSQL server of the tests' own: made in a temporary directory, reached through a socket there, then gone.

Owns: finding the programs, whom the server runs as, its start and its end. Knows nothing of Holdfast.
Always holds: no server and no file of it outlives the process that asked for it, even one that was killed; nothing
but a socket in a directory closed to others listens; and a server that the machine has already is not touched.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120
PACKAGES = Path("/usr/lib/postgresql")  # where Debian puts each version
# PostgreSQL refuses to run as root. These are tried in turn when the tests run as root.
SERVER_USERS = ("postgres", "nobody")
# The longest path of a socket is 107 bytes, of which PostgreSQL adds some itself.
SOCKET_FOLDER_MAX_BYTES = 80

SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # what the server promises about power cuts is not ours to test; a killed server loses nothing
    "max_connections": "100",
    "log_min_messages": "warning",
    "timezone": "UTC",
}


class NoServer(Exception):
    """This machine cannot run one; the message says why. Tests that need one are skipped with it."""


@dataclass(frozen=True)
class Server:
    """A running server: its folder, and the URL of a database of it."""

    folder: Path

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def restart(self, how: signal.Signals = signal.SIGINT) -> None:
        """As stop() and start()."""
        self.stop(how)
        self.start()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it, at once or (SIGQUIT) as if it had crashed."""
        (self.folder / "stop").touch()
        os.kill(int((self.folder / "data" / "postmaster.pid").read_text().split()[0]), how)
        while (self.folder / "stop").exists():
            time.sleep(0.01)

    def start(self) -> None:
        """Start it again; it answers when this returns."""
        (self.folder / "stopped").unlink()
        _wait(self.folder, None)

    def execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)

    @contextmanager
    def database(self, name: str) -> Iterator[str]:
        """The URL of a new, empty database that is dropped afterwards, whoever is still connected."""
        self.execute(f'CREATE DATABASE "{name}"')
        yield self.url(name)
        self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


class Proxy:
    """Stands between us and the server, and cuts a connection when the next COMMIT comes by, before or behind it."""

    def __init__(self, folder: Path) -> None:
        self.cut = ""
        self.turns = 0  # how often the server spoke after us
        self._server = str(next(folder.glob(".s.PGSQL.*[0-9]")))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        asked = False
        with client, server, suppress(OSError):
            while True:
                for one in select.select([client, server], [], [])[0]:
                    data, ours = one.recv(2**20), one is client
                    self.turns += asked and not ours
                    asked = ours
                    hit = ours and self.cut and b"COMMIT" in data
                    cut, self.cut = self.cut, "" if hit else self.cut
                    if not data or (hit and cut == "before"):
                        return
                    (server if ours else client).sendall(data)
                    if hit:
                        server.recv(2**20)  # it has answered, and nobody will hear it
                        return


def find_programs() -> Path:
    """The folder with `initdb` and `postgres`: on PATH, or the newest where Debian's packages put them."""
    found = [Path(program).resolve().parent for program in [shutil.which("initdb")] if program]
    versions = PACKAGES.glob("*/bin")
    found += sorted(versions, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parent.name)], reverse=True)
    for folder in found:
        if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
            return folder
    raise NoServer("PostgreSQL's programs initdb and postgres are not installed")


def _whom() -> dict[str, Any]:
    """Options of a child process that make it somebody who may run a server; none when we are."""
    if os.geteuid() != 0:
        return {}
    for name in SERVER_USERS:
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise NoServer(f"PostgreSQL does not run as root, and there is no user {' or '.join(SERVER_USERS)}")


def _room(*, flushed: bool) -> str:
    """Where another user can reach a folder of ours, and where the socket's path is short enough.

    ``flushed``: on a disk, as what is there is to be flushed to one.
    """
    from tests import memory

    # A database is 300 files: making and dropping one costs 0.25 s of processor time on ext4, a tenth of it in memory.
    for place in filter(None, (None if flushed else memory.place(), tempfile.gettempdir(), "/tmp", "/var/tmp")):
        path = Path(place).resolve()
        if len(os.fsencode(path)) > SOCKET_FOLDER_MAX_BYTES // 2 or not os.access(path, os.W_OK | os.X_OK):
            continue
        if os.geteuid() != 0 or all(above.stat().st_mode & stat.S_IXOTH for above in (path, *path.parents)):
            return str(path)
    raise NoServer("there is no temporary directory in which a server could work")


@contextmanager
def server(**settings: str) -> Iterator[Server]:
    """A new server. Raises NoServer where the machine cannot run one, RuntimeError when it should and does not."""
    programs, whom = find_programs(), _whom()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-", dir=_room(flushed=settings.get("fsync") == "on")))
    guard = None
    try:
        if whom:
            os.chown(folder, whom["user"], whom["group"])
        commands = _commands(programs, folder, SETTINGS | settings)
        with (folder / "log").open("wb") as log:
            guard = subprocess.Popen(
                [sys.executable, __file__, json.dumps([str(folder), commands, whom])],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/", start_new_session=True,
            )  # fmt: skip
        _wait(folder, guard)
        yield Server(folder)
    finally:
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            guard.wait(timeout=START_TIMEOUT_S)
        shutil.rmtree(folder, ignore_errors=True)


def _commands(programs: Path, folder: Path, settings: dict[str, str]) -> list[list[str]]:
    """What makes the server's files, and what serves them."""
    data = str(folder / "data")
    make = [str(programs / "initdb"), "-D", data, "-U", "postgres", "--auth=trust", "--no-sync"]
    serve = [str(programs / "postgres"), "-D", data]
    for name, value in (settings | {"unix_socket_directories": str(folder)}).items():
        serve += ["-c", f"{name}={value}"]
    return [[*make, "--encoding=UTF8", "--locale=C"], serve]


def _wait(folder: Path, guard: subprocess.Popen[bytes] | None) -> None:
    import psycopg

    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            psycopg.connect(Server(folder).url(), connect_timeout=10).close()
        except psycopg.OperationalError:
            ended = (guard is not None and guard.poll() is not None) or time.monotonic() > deadline
        else:
            return
        if ended:
            log = (folder / "log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"PostgreSQL does not answer:\n{log}")
        time.sleep(0.05)


def _guard(folder: str, commands: list[list[str]], whom: dict[str, Any]) -> int:
    """The server's parent. Nobody writes to its standard input, which ends when our user does, whichever way."""
    stop, stopped = Path(folder, "stop"), Path(folder, "stopped")
    for command in commands:
        again = True
        while again:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **whom)
            again = False
            while process.poll() is None or stopped.exists() or stop.exists():
                if select.select([sys.stdin], [], [], 0.1)[0]:
                    process.send_signal(signal.SIGQUIT)
                    process.wait()
                    shutil.rmtree(folder, ignore_errors=True)
                    return 0
                if process.poll() is not None and stop.exists():
                    again = True
                    stop.rename(stopped)
        if process.returncode:
            return process.returncode
    return 0


if __name__ == "__main__":
    sys.exit(_guard(*json.loads(sys.argv[1])))
