"""HTTP requests of tools, with idempotency keys: transports for httpx, and for httpx2, which has the same interface.

    client = httpx.Client(transport=Transport(httpx.HTTPTransport()))
    client = httpx.AsyncClient(transport=AsyncTransport(httpx.AsyncHTTPTransport()))

Owns the header and what its value is made of. Must not import httpx: whoever has a transport to wrap has the library,
by the extra ``http`` for example. What always holds: a request that a tool makes again for the same purpose has the
same key; one that differs in method, address or body, or is made for another purpose, has another; a request that could
be made twice without anybody noticing is not sent.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any, Self

from blake3 import blake3

from holdfast.codec.blocks import digest_of
from holdfast.codec.values import encode
from holdfast.errors import BadOption, NoAgent
from holdfast.run import scope
from holdfast.run.effects import Effect

if TYPE_CHECKING:
    import httpx
    import httpx2

    class _Transport(httpx.BaseTransport, httpx2.BaseTransport): ...  # type: ignore[misc] # each has its own Request

    class _AsyncTransport(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport): ...  # type: ignore[misc] # as above
else:
    _Transport = _AsyncTransport = object

SAFE = frozenset({"GET", "HEAD", "OPTIONS", "QUERY", "TRACE"})
"""Methods that change nothing."""
KEY_CHARS = 32
"""As many as an effect's key has: some services take no more than 36."""
BOUNDARY_BYTES = 32
"""Of the boundary that httpx makes up for a form with files."""


class Transport(_Transport):
    """Sends requests through another transport; those of a tool that change something get an idempotency key."""

    def __init__(self, inner: Any, *, header: str = "Idempotency-Key") -> None:
        self._inner, self._header = inner, header

    def handle_request(self, request: Any) -> Any:
        return self._inner.handle_request(_keyed(request, self._header))

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)


class AsyncTransport(_AsyncTransport):
    """As Transport, for async clients."""

    def __init__(self, inner: Any, *, header: str = "Idempotency-Key") -> None:
        self._inner, self._header = inner, header

    async def handle_async_request(self, request: Any) -> Any:
        return await self._inner.handle_async_request(_keyed(request, self._header))

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._inner.__aexit__(*error)


def _keyed(request: Any, header: str) -> Any:
    """The request as it is sent. The caller's own stays as it is: it may be sent again, for another purpose."""
    if request.method in SAFE or header in request.headers:
        return request
    effect = scope.EFFECT.get()
    if effect is None:
        if scope.HERE.get() is None and not scope._active:
            return request
        raise NoAgent(
            f"{_shown(request)} was not sent: it was made outside of a tool, so it would be made again after a crash",
            hint=f"Make it in a tool, give it the header {header}, or use a client without this transport."
            " In a thread of a tool: pool.submit(contextvars.copy_context().run, f).",
        )
    if effect.kind == "read":
        return request
    headers, stream = _body(request, effect, header)
    headers[header] = _key(request, effect, stream)
    sent = type(request)(request.method, request.url, headers=headers, stream=stream, extensions=request.extensions)
    if stream is request.stream:
        sent.read()  # it is in memory, and whoever comes next may look at it
    return sent


def _key(request: Any, effect: Effect, stream: Any) -> str:
    body = blake3()
    for part in stream:
        body.update(part)
    url = request.url
    # Without user and password, which are the sender's, and may have been changed since.
    place = [url.scheme, url.raw_host, url.port, url.raw_path]
    return digest_of("holdfast.http", encode([effect.key, request.method, *place, body.digest()])).hex()[:KEY_CHARS]


def _body(request: Any, effect: Effect, header: str) -> tuple[Any, Any]:
    """The headers and the stream to send, which can be read twice."""
    stream, headers = request.stream, request.headers.copy()
    if isinstance(stream, _in_memory()):
        return headers, stream
    if not _is_form(stream):
        raise BadOption(
            f"{_shown(request)} was not sent: its body can be read only once, so nobody knows yet what is in it",
            hint=f'Give it a key of its own, headers={{"{header}": holdfast.effect().key}} if the tool makes no other'
            " request, or pass the body as bytes.",
        )
    if len(stream.boundary) == BOUNDARY_BYTES:
        # It was made up at random. Whoever compares bodies must see the same one when the request is made again.
        own = digest_of("holdfast.http", encode(["boundary", effect.key])).hex()[:BOUNDARY_BYTES]
        headers["Content-Type"] = headers["Content-Type"].replace(stream.boundary.decode(), own)
        stream = copy.copy(stream)
        stream.boundary = own.encode()
    return headers, stream


def _in_memory() -> tuple[type, ...]:
    return tuple(module.ByteStream for name in ("httpx", "httpx2") if (module := sys.modules.get(name)) is not None)


def _is_form(stream: Any) -> bool:
    """Whether it is a form with files, all of which can be read again."""
    if not hasattr(stream, "boundary") or not hasattr(stream, "fields"):
        return False
    files = [field.file for field in stream.fields if hasattr(field, "file")]
    return all(isinstance(file, str | bytes) or (hasattr(file, "seekable") and file.seekable()) for file in files)


def _shown(request: Any) -> str:
    """Without what may be secret: queries, users and passwords."""
    return f"{request.method} {request.url.scheme}://{request.url.host}{request.url.path}"
