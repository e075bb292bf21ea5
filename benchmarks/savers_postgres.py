"""A private PostgreSQL for the length of a run: its own data folder, a socket nobody else uses, no network.

What always holds: fsync and synchronous_commit are on, all else is PostgreSQL's default; it is stopped at the end, also
after an error. PostgreSQL refuses to run as root, so root lends it an unprivileged user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

START_LIMIT_S = 60
STOP_LIMIT_S = 120
ROLE = "bench"


class Unavailable(Exception):
    """No PostgreSQL can be started here; the message says why."""


class Cluster:
    """A running server. Each measurement gets a database of its own."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._count = 0

    def conninfo(self, database: str) -> str:
        return f"host={self._socket} user={ROLE} dbname={database}"

    def fresh(self) -> str:
        """The connection string of a new, empty database."""
        self._count += 1
        name = f"run{self._count}"
        self._ask("CREATE DATABASE {}", name)
        return self.conninfo(name)

    def drop(self, conninfo: str) -> None:
        self._ask("DROP DATABASE {}", conninfo.rpartition("=")[2])

    def _ask(self, statement: str, name: str) -> None:
        with psycopg.connect(self.conninfo("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def flushes(self) -> int:
        """How often the server has flushed its log so far."""
        with psycopg.connect(self.conninfo("postgres"), autocommit=True) as connection:
            # Backends report at most once a second, and when they end.
            time.sleep(1.5)
            row = connection.execute("SELECT wal_sync FROM pg_stat_wal").fetchone()
            return int(row[0]) if row else 0


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A new cluster under ``folder``, on the filesystem that is measured; raises Unavailable."""
    programs = _programs()
    who = _identity()
    home = Path(tempfile.mkdtemp(dir=folder, prefix="postgres-"))
    socket = Path(tempfile.mkdtemp(prefix="pg-"))  # a socket's path may have 107 bytes: not below the folder
    server: subprocess.Popen[bytes] | None = None
    try:
        if who:
            for place in (home, socket):
                shutil.chown(place, who["user"], who["group"])
        data, log = home / "data", home / "log"
        command: list[str | Path] = [
            programs / "initdb",
            "--pgdata",
            data,
            "--username",
            ROLE,
            "--auth=trust",
            "--encoding=UTF8",
        ]
        made = subprocess.run([*command, "--locale=C"], capture_output=True, text=True, check=False, cwd=socket, **who)
        if made.returncode:
            raise Unavailable(f"initdb failed: {made.stderr.strip()[-300:]}")
        settings = {
            "fsync": "on",
            "synchronous_commit": "on",
            "listen_addresses": "",
            "unix_socket_directories": socket,
            "unix_socket_permissions": "0700",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        with log.open("wb") as out:
            server = subprocess.Popen(
                [programs / "postgres", "-D", data, *options], stdout=out, stderr=out, cwd=socket, **who
            )
        found = Cluster(socket)
        _wait(found, server, log)
        yield found
    finally:
        if server is not None and server.poll() is None:
            server.send_signal(signal.SIGINT)  # the fast way: open transactions end, the data is left in order
            server.wait(STOP_LIMIT_S)
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(socket, ignore_errors=True)


def _programs() -> Path:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    if on_path:
        places.append(Path(on_path).resolve().parent)
    for place in places:
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    raise Unavailable("PostgreSQL is not installed: no initdb in /usr/lib/postgresql/*/bin nor on the PATH")


def _identity() -> dict[str, Any]:
    if os.geteuid():
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise Unavailable("PostgreSQL does not run as root, and there is no user postgres or nobody")


def _wait(found: Cluster, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_LIMIT_S
    while True:
        try:
            psycopg.connect(found.conninfo("postgres")).close()
            return
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"PostgreSQL did not start: {log.read_text()[-300:]}") from error
            time.sleep(0.1)
