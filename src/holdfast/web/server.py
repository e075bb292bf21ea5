"""The server: where it listens, how the first browser gets in, and how it stops.

Owns sockets, the file that leads a browser here, and uvicorn's settings. What always holds: it listens on loopback
unless somebody named another address; the token stands in a file that only its user can read, never among a process's
arguments, and in no log; everything that it made is gone when it stops.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.errors import BadOption, StoreFailed
from holdfast.web.app import House
from holdfast.web.gate import Doors
from holdfast.web.place import Place

PORT = 4653
"""HOLD on the keys of a telephone."""
LOOPBACK = "127.0.0.1"
_TRIED = 20
"""Ports behind the usual one that are tried when it is taken."""
_NAMES = {LOOPBACK: ("127.0.0.1", "localhost"), "::1": ("[::1]", "localhost"), "localhost": ("localhost", "127.0.0.1")}
_ALL = ("0.0.0.0", "::", "")  # noqa: S104 - refused alone
"""Hosts that stand for every address of the machine, and are none that a browser could ask for."""
_SECRET_LEAST = 16
PATIENCE_S = 15.0
"""After so long a connection without a request, or whose answer nobody reads, is dropped."""


@dataclass(frozen=True)
class Listening:
    """Where to listen. ``port`` None: the usual one, or one behind it. ``path``: a Unix socket, for a proxy.

    ``url``: what browsers call the page, where that is not what it listens on. ``secret``: the file with what a proxy
    sends along.
    """

    host: str = LOOPBACK
    port: int | None = None
    path: str = ""
    url: str = ""
    secret: str = ""

    def bound(self) -> tuple[socket.socket, Doors]:
        """A socket, and what may come through it."""
        if self.path and (self.secret or self.port is not None):
            raise BadOption("a Unix socket has no port and needs no secret", hint="Give --socket PATH and --url alone.")
        if (self.path or self.secret) and not self.url:
            raise BadOption(
                "behind a proxy the page has another address", hint="Say which: --url https://holdfast.example."
            )
        if self.host in _ALL and not self.url:
            raise BadOption(
                f"on {self.host} the page has the addresses of the whole machine",
                hint=f"Say which one browsers use: --url http://NAME:{self.port or PORT} --port {self.port or PORT}.",
            )
        named = self._origin()
        secret = _secret(self.secret) if self.secret else ""
        if self.path:
            return _unix(self.path), Doors(frozenset({named}), proxied=True)
        sock = self._tcp()
        port = sock.getsockname()[1]
        hosts = _NAMES.get(self.host, (f"[{self.host}]" if ":" in self.host else self.host,))
        own = {named} if named else {f"http://{host.lower()}:{port}" for host in hosts}
        return sock, Doors(frozenset(own), proxied=bool(secret), secret=secret)

    def _origin(self) -> str:
        if not self.url:
            return ""
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path not in {"", "/"} or parts.query:
            raise BadOption(f"--url {self.url!r}", hint="As https://holdfast.example, without a path.")
        return f"{parts.scheme}://{parts.netloc}".lower()

    def _tcp(self) -> socket.socket:
        ports = [self.port] if self.port is not None else [*range(PORT, PORT + _TRIED), 0]
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        failed: OSError | None = None
        for port in ports:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((self.host, port))
                sock.listen()  # until somebody listens, others can have it as well
                return sock
            except (OSError, OverflowError) as error:
                sock.close()
                failed = error if isinstance(error, OSError) else OSError(str(error))
        reason = failed.strerror or str(failed) if failed is not None else ""
        raise StoreFailed(
            f"nothing can listen on {self.host}:{ports[0]}: {reason}", hint="Choose another one with --host or --port."
        )


def _unix(path: str) -> socket.socket:
    """A Unix socket that this user and its group can reach."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        with suppress(FileNotFoundError):
            if Path(path).is_socket():
                Path(path).unlink()
        sock.bind(path)
    except OSError as error:
        sock.close()
        said = f"nothing can listen on {path}: {error.strerror or error}"
        raise StoreFailed(said, hint="Choose another path.") from None
    finally:
        os.umask(before)
    return sock


def _secret(file: str) -> str:
    try:
        with Path(file).open(encoding="ascii") as opened:
            others = os.fstat(opened.fileno()).st_mode & stat.S_IRWXO
            found = opened.read().strip()
    except (OSError, ValueError) as error:
        raise BadOption(f"the secret cannot be read: {error}", hint="A file with one line, mode 0600.") from None
    if others:
        raise BadOption(f"everybody on this machine can read {file}, or write it", hint=f"chmod o= {quote(file)}")
    if len(found) < _SECRET_LEAST:
        raise BadOption("the secret is too short", hint=f"At least {_SECRET_LEAST} characters, from a random source.")
    return found


class Letter:
    """The file that leads a browser in: it has the token of the moment, and only this user can read it."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        home = os.environ.get("XDG_RUNTIME_DIR")
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-ui-", dir=home if home and Path(home).is_dir() else None))
        self.path = self._folder / "open.html"

    def address(self, token: str) -> str:
        return f"{self._origin}/enter?token={token}"

    def write(self, token: str) -> None:
        """Put another token into it. Whoever reads it meanwhile has the one before, or this one."""
        to = escape(self.address(token), quote=True)
        new = self._folder / "new"
        new.touch(0o600)
        new.write_text(
            '<!doctype html><meta charset="utf-8"><title>Holdfast</title><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={to}"><a href="{to}">Open Holdfast</a>\n',
            encoding="ascii",
        )
        new.replace(self.path)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def open_browser(path: Path) -> bool:
    """Whether a browser was found that shows a window. One in the terminal would take the terminal away."""
    windows = sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    try:
        return windows and webbrowser.open(path.as_uri())
    except (OSError, webbrowser.Error):
        return False


@dataclass(frozen=True)
class Started:
    """What is known when the page can be reached. ``enter`` lets one browser in; ``file`` is where others begin."""

    url: str
    file: Path | None
    enter: str


class _Connection(H11Protocol):
    """One that is dropped when no request comes in time, or nobody reads the answer: many of them keep others out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as below it
        super().connection_made(transport)
        self._asked: object = None
        self._unread = 0
        self.loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        unread = self.transport.get_write_buffer_size()
        waits = self.cycle is self._asked and getattr(self.cycle, "response_complete", True)
        if (waits and not unread) or unread >= self._unread > 0:
            self.transport.abort()
        elif not self.transport.is_closing() or unread:
            self._asked, self._unread = self.cycle, unread
            self.loop.call_later(PATIENCE_S, self._look)


class _Server(uvicorn.Server):
    """Says when it can be reached, and ends the streams when it stops, which would keep it waiting.

    A signal stops it and is not raised again: what it has made is still to be removed.
    """

    def __init__(self, config: uvicorn.Config, house: House, begun: Callable[[], None]) -> None:
        super().__init__(config)
        self._house, self._begun = house, begun

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            await asyncio.to_thread(self._begun)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._house.live.stop()
        await super().shutdown(sockets)


def serve(place: Place, listening: Listening, who: str, begun: Callable[[Started], None]) -> None:
    """Show a store until somebody stops it. ``begun`` is told when browsers can come."""
    sock, doors = listening.bound()
    house = House(place, doors, who)
    origin = min(doors.origins)
    letter = None if doors.proxied else Letter(origin)
    if letter is not None:
        letter.write(house.gate.token)
        house.gate.entered = lambda: letter.write(house.gate.token)

    def tell() -> None:
        at = Started(origin, letter.path if letter else None, letter.address(house.gate.token) if letter else origin)
        begun(at)

    try:
        _Server(_config(house), house, tell).run([sock])
    finally:
        sock.close()
        if listening.path:
            Path(listening.path).unlink(missing_ok=True)
        if letter is not None:
            letter.remove()
        place.close()


def _config(house: House) -> uvicorn.Config:
    return uvicorn.Config(
        house.gate,
        http=_Connection,  # h11: the other parser, where it is installed, has no bound for headers
        log_level="warning",
        access_log=False,  # it would tell tokens
        server_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        limit_concurrency=256,
        backlog=128,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=64 << 10,
    )
