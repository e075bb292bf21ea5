"""Who may come in: every request passes here first, whatever it asks for.

Owns tokens, cookies, the checks of Host, Origin and Sec-Fetch-Site, CSRF, and the headers of every answer. Knows
nothing of stores. What always holds: nothing but ``/enter`` and ``free`` addresses is answered for whoever has no
session; secrets are compared in constant time; a token lets somebody in once.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.text import clean

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SESSIONS_MOST = 100
"""Browsers that may be let in; the one that came first has to come in again."""
SESSION_S = 7 * 24 * 3600.0
COOKIES_MOST_BYTES = 4 << 10
SECRET_HEADER = b"x-holdfast-secret"
USER_HEADER = b"x-forwarded-user"
_SAFE = frozenset({"GET", "HEAD"})
_METHODS = frozenset({*_SAFE, "POST"})

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types holdfast"
)
"""No script or style stands in a page; what is parsed from the server's own answers goes through one named policy."""

_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # Not no-referrer: browsers would send `Origin: null` with our own forms then.
    (b"referrer-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


@dataclass(frozen=True)
class Doors:
    """How the page can be reached. ``origins``: what browsers call it, as ``http://127.0.0.1:4653``.

    ``secret``: what a proxy has to send, that has found out who somebody is; ``proxied`` without one: only that proxy
    can reach us, over a Unix socket.
    """

    origins: frozenset[str]
    proxied: bool = False
    secret: str = ""

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(host for one in self.origins for host in _hosts(one))


def _hosts(origin: str) -> tuple[str, ...]:
    """What ``Host`` says there: browsers leave out a port that goes without saying."""
    parts = urlsplit(origin)
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    return (parts.netloc, parts.netloc.removesuffix(f":{usual}")) if usual else (parts.netloc,)


@dataclass
class Visitor:
    """Somebody who was let in."""

    who: str
    csrf: str
    since: float = field(default_factory=time.monotonic)


class Refused(Exception):
    """A request that is not answered, with the HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.hint = status, sentence, hint


class Gate:
    """Stands before the application. ``refuse`` makes the page for whoever stays outside.

    ``free``: the paths that whoever stays outside may read, because that page needs them.
    """

    def __init__(
        self,
        app: App,
        doors: Doors,
        who: str,
        refuse: Callable[[Refused], tuple[bytes, bytes]],
        free: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._doors = doors
        self._who = who
        self._refuse = refuse
        self._free = free
        self._cookie = f"holdfast_{secrets.token_hex(6)}"  # another instance on this host has another one
        self._sessions: OrderedDict[str, Visitor] = OrderedDict()
        self._csrf_key = secrets.token_bytes(32)
        self.token = secrets.token_urlsafe(32)
        """Lets the next browser in, once."""
        self.entered: Callable[[], None] = lambda: None
        """Called when a token was used, and there is another one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing here speaks web sockets

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message.get("headers", ())}
                more = [one for one in _HEADERS if one[0] not in given]
                if b"cache-control" not in given:
                    more.append((b"cache-control", b"no-store"))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            headers = _single(scope["headers"])
            self._check_address(scope, headers)
            if scope["path"] == "/enter" and not self._doors.proxied:
                await self._enter(scope, guarded)
                return
            self._check_site(scope["method"], headers)
            visitor = self._visitor(headers)
            if visitor is None and not (scope["method"] in _SAFE and scope["path"] in self._free):
                raise Refused(
                    401,
                    "You have not been let in yet.",
                    "Start `holdfast ui` on this machine, or open the file that it names; once in each browser.",
                )
            scope["visitor"] = visitor
            await self._app(scope, receive, guarded)
        except Refused as refused:
            body, kind = self._refuse(refused)
            await _answer(guarded, refused.status, body, kind)

    # -- what is checked ------------------------------------------------------------------------------------

    def _check_address(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """A page elsewhere whose name was made to lead here (DNS rebinding) sends its own name as Host."""
        if scope["method"] not in _METHODS:
            raise Refused(405, "Only GET and POST are answered here.")
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host not in self._doors.hosts:
            raise Refused(
                421,
                "This page is not served under that name.",
                f"Use {min(self._doors.origins)}, or name the other one with `holdfast ui --url`.",
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in self._doors.origins:
            raise Refused(403, "Another page has asked for this one, and that is not allowed.")
        if self._doors.secret and not same(headers.get(SECRET_HEADER, b""), self._doors.secret):
            raise Refused(401, "This did not come through the proxy that this page trusts.")

    def _check_site(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Ports of one host are one site to browsers, and cookies do not know ports: only the same origin counts."""
        site = headers.get(b"sec-fetch-site", b"").decode("latin-1")
        if site not in {"", "same-origin", "none"}:
            raise Refused(
                403,
                "A link on another page has led here.",
                "Put the address into the browser's address bar yourself, if you want to see it.",
            )
        if method not in _SAFE and b"origin" not in headers and site != "same-origin":
            raise Refused(403, "A change has to come from this page itself.")

    def _visitor(self, headers: Mapping[bytes, bytes]) -> Visitor | None:
        if self._doors.proxied:
            user = clean(headers.get(USER_HEADER, b"").decode("utf-8", "replace").strip()[:200])
            return (
                Visitor(user or "somebody behind the proxy", self._csrf(user))
                if user or not self._doors.secret
                else None
            )
        given = self._session(headers.get(b"cookie", b""))
        found = None
        for session, visitor in self._sessions.items():  # all of them, so that time tells nothing
            if same(given, session) and time.monotonic() - visitor.since < SESSION_S:
                found = visitor
        return found

    def _session(self, cookies: bytes) -> bytes:
        """The value of our cookie. By hand: ``http.cookies`` takes quadratic time for what strangers send."""
        if len(cookies) > COOKIES_MOST_BYTES:
            raise Refused(
                431,
                "This browser sends more cookies than are read here.",
                "Other pages of this host have set them. Remove them, or use a private window.",
            )
        pairs = [one.strip().partition(b"=") for one in cookies.split(b";")]
        return next((value for name, _, value in pairs if name == self._cookie.encode()), b"")

    def _csrf(self, session: str) -> str:
        return hmac.new(self._csrf_key, session.encode(), "sha256").hexdigest()

    # -- coming in ------------------------------------------------------------------------------------------

    async def _enter(self, scope: Scope, send: Send) -> None:
        """Not a redirect: of a way that began elsewhere browsers would not show us the cookie at its end."""
        try:
            fields = parse_qs(scope["query_string"].decode("latin-1")[:500], max_num_fields=5)
        except ValueError:  # too many
            fields = {}
        given = fields.get("token", [""])[0]
        if scope["method"] != "GET" or not same(given, self.token):
            raise Refused(
                401,
                "This key has been used, or never was one.",
                "Each one lets a browser in once. Open the file that `holdfast ui` names: it has a new one.",
            )
        self.token = secrets.token_urlsafe(32)
        session = secrets.token_urlsafe(32)
        self._sessions[session] = Visitor(self._who, self._csrf(session))
        while len(self._sessions) > SESSIONS_MOST:
            self._sessions.popitem(last=False)
        self.entered()  # before the answer: whoever reads the file after it finds the next token there
        cookie = f"{self._cookie}={session}; Path=/; HttpOnly; SameSite=Strict; Max-Age={SESSION_S:.0f}"
        if all(one.startswith("https:") for one in self._doors.origins):
            cookie += "; Secure"
        page = (  # with an icon: browsers ask for one that is not there, and complain
            b'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/"><title>Holdfast</title>'
            b'<link rel="icon" href="/static/mark.svg">'
        )
        await _answer(
            send, 200, page + b'<a href="/">Go on</a>', b"text/html; charset=utf-8", (b"set-cookie", cookie.encode())
        )


def _single(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name. What decides who somebody is may stand there once."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in found and name in {b"host", b"origin", b"cookie", b"sec-fetch-site", SECRET_HEADER, USER_HEADER}:
            raise Refused(400, f"The header {name.decode('latin-1')} stands there twice.")
        found[name] = value
    return found


def same(given: str | bytes, wanted: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell where they differ."""
    sent = given if isinstance(given, bytes) else given.encode("utf-8", "replace")
    return hmac.compare_digest(sent, wanted.encode())


async def _answer(send: Send, status: int, body: bytes, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = str(len(body)).encode()
    named = [(b"content-type", kind), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": body})
