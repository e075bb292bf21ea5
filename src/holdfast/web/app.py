"""The page as an application: which view answers which address, and how what it reads becomes a page.

Owns the two tables below, rendering, the JSON twins, and how errors are shown. Who may ask is the business of ``gate``,
where the answer comes from that of ``place``.

The contract with a view:

- A view is a plain function in a module of this room, ``def timeline(store: Store, asked: Asked) -> dict[str, Any]``.
  It reads through the public API only, and gives JSON-ready data: of the same shape as the command line's ``--json``
  where such a verb exists. It bounds what it gives (pages, lengths), raises ``HoldfastError``, and knows nothing of
  HTTP.
- A line in ``VIEWS`` makes the page ``/timeline/NAME`` of it, with its template, and the twin ``/api/timeline/NAME``.
  Its agent is a part of the path, or the field ``agent`` of the query for names that browsers would change (``..``):
  ``asked.text("agent")`` gives either; ``address("/timeline", agent=...)`` in templates makes either. ``/timeline``
  alone comes to the same function, without an agent.
- Templates extend ``base.html``, or ``agent.html`` for views of one agent, which has its tabs, and needs
  ``view["agent"]``. They get ``view``: what the function gave; ``asked``; ``address`` and ``here(field=value)`` for
  addresses; ``csrf``; ``changes``: whether something may be changed; ``now``, ``ago(time)``; and the filters of
  ``words``. Every value is escaped, made visible and cut by itself. Data for scripts:
  ``<template id="data">{{ view | embedded }}</template>``.
- What is live: ``view["live"]`` is the agent whose changes concern the page, ``"*"`` for all, or is not there. Then
  each element with ``data-part="SOME-ID"`` is replaced by what the same address gives now, and the event
  ``holdfast:part`` is dispatched on the new one. Scripts and styles are files in ``static/``; a template adds its own
  in the block ``head``. The policy forbids inline scripts, ``style`` attributes and ``innerHTML``;
  ``element.style.setProperty`` works.
- An action is ``def act(store: Store, asked: Asked, who: str) -> str`` in ``ACTIONS``: only by POST, only with
  ``--allow-changes``, only with the field ``csrf``. It gives the address to go to next. Whatever it changes is recorded
  with ``who`` (``Store.acting_as``); it never waits for, or takes, an agent that somebody writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from holdfast import Store, errors
from holdfast.errors import BadOption, HoldfastError
from holdfast.web import agents, back, dumps, health, runs, state, timeline, why, words
from holdfast.web.asked import Asked
from holdfast.web.gate import Doors, Gate, Refused, Visitor, same
from holdfast.web.live import Live
from holdfast.web.place import Place

Read = Callable[[Store, Asked], dict[str, Any]]
Act = Callable[[Store, Asked, str], str]

FIELDS_MOST = 100
FORM_MOST_BYTES = 1 << 20
FORM_S = 10.0
ANSWER_MOST_BYTES = 32 << 20
"""Of one answer. Views bound themselves far below; this catches the one that forgets."""


@dataclass(frozen=True)
class View:
    """An address, who reads for it, and the template that shows it; without one only scripts ask, at the twin.

    ``schema`` names the form of its JSON. ``nav``: what it is called at the top of every page, ``tab``: among the views
    of an agent; without either, other pages lead there.
    """

    path: str
    read: Read
    template: str
    schema: str
    nav: str = ""
    tab: str = ""

    @property
    def base(self) -> str:
        """The address without the agent."""
        return self.path.removesuffix(_OF_AN_AGENT)


_OF_AN_AGENT = "/{agent:path}"
# Views of one agent end with `_OF_AN_AGENT`: View(f"/timeline{_OF_AN_AGENT}", ..., tab="Timeline").
VIEWS: tuple[View, ...] = (
    View("/", agents.agents, "agents.html", "agents", nav="Agents"),
    View("/health", health.health, "health.html", "health", nav="Health"),
    View(f"/timeline{_OF_AN_AGENT}", timeline.timeline, "timeline.html", "timeline", tab="Timeline"),
    View(f"/marks{_OF_AN_AGENT}", timeline.marks, "", "marks"),
    View(f"/change{_OF_AN_AGENT}", timeline.change, "", "change"),
    View(f"/series{_OF_AN_AGENT}", timeline.series, "", "series"),
    View(f"/numbers{_OF_AN_AGENT}", timeline.numbers, "", "numbers"),
    View(f"/state{_OF_AN_AGENT}", state.state, "state.html", "state", tab="State"),
    View(f"/items{_OF_AN_AGENT}", state.items, "", "items"),
    View(f"/text{_OF_AN_AGENT}", state.text, "", "text"),
    View(f"/conversation{_OF_AN_AGENT}", state.conversation, "conversation.html", "conversation"),
    View(f"/search{_OF_AN_AGENT}", state.search, "", "search"),
    View(f"/diff{_OF_AN_AGENT}", state.diff, "diff.html", "diff", tab="Diff"),
    View(f"/runs{_OF_AN_AGENT}", runs.runs, "runs.html", "runs", tab="Runs and effects"),
    View(f"/run{_OF_AN_AGENT}", runs.run, "run.html", "run"),
    View(f"/effects{_OF_AN_AGENT}", runs.effects, "", "effects"),
    View(f"/history{_OF_AN_AGENT}", runs.history, "history.html", "events", tab="Decisions"),
    View(f"/why{_OF_AN_AGENT}", why.why, "why.html", "why", tab="Why"),
    View("/dumps", dumps.dumps, "dumps.html", "dump.list", nav="Dumps"),
    View("/dump", dumps.dump, "dump.html", "dump.show"),
    View(f"/back{_OF_AN_AGENT}", back.back, "back.html", "back", tab="Going back"),
)

ACTIONS: dict[str, Act] = {
    "/edit": state.edit,
    "/resolve": runs.resolve,
    "/signal": runs.signal,
    "/resume": runs.resume,
    "/cancel": runs.cancel,
    "/fork": runs.fork,
    "/rollback": back.rollback,
    "/branch": back.branch,
    "/tag": back.tag,
    "/cause": dumps.resolve,
}
"""By path, as ``/resolve``."""

# The first that fits counts.
_STATUSES: tuple[tuple[type[HoldfastError], int], ...] = (
    (errors.UnknownAgent, 404),
    (errors.UnknownRevision, 404),
    (errors.NotInDump, 404),
    (errors.ReadOnly, 403),
    (errors.InputError, 400),
    (errors.Contention, 409),
    (errors.Outcome, 409),
    (errors.Incompatible, 409),
    (errors.Unavailable, 503),
)
# On a page the way out has another name than in a program.
_HINTS = {
    "key-needed": "Stop the page, and start it where the key is: HOLDFAST_KEY_FILE=FILE holdfast ui. A key never passes"
    " through the browser.",
    "wrong-key": "Stop the page, and start it with the right key: HOLDFAST_KEY_FILE=FILE holdfast ui.",
    "not-a-store": "It was there when the page was started. When it is back, look again.",
    "agent-busy": "Its process is at it. Let it finish, or stop it, and try again.",
}


_TITLES = {403: "Not allowed", 404: "Not found", 503: "The store does not answer"}


def status_of(error: HoldfastError) -> int:
    return next((status for group, status in _STATUSES if isinstance(error, group)), 500)


class House:
    """The application, with the store that it shows."""

    def __init__(self, place: Place, doors: Doors, who: str) -> None:
        self.place = place
        self.live = Live(place)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        routes = [Route("/events", self._events), Route("/static/{file}", self._static)]
        for view in VIEWS:
            for path in dict.fromkeys((view.path, view.base)):
                twin = f"/api/{view.schema}" if path == "/" else f"/api{path}"
                if view.template:
                    routes.append(Route(path, self._page(view), methods=["GET"]))
                routes.append(Route(twin, self._twin(view), methods=["GET"]))
        routes += [Route(path, self._action(act), methods=["POST"]) for path, act in ACTIONS.items()]
        app = Starlette(
            routes=routes,
            exception_handlers={404: self._nothing, 405: self._nothing, HoldfastError: self._failed, 500: self._broken},
        )
        free = frozenset(f"/static/{name}" for name in words.static_files())
        self.gate = Gate(app, doors, who, _outside, free)

    # -- answers --------------------------------------------------------------------------------------------

    def _page(self, view: View) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            asked = _asked(request)

            def render(store: Store) -> bytes:
                return self._rendered(request, asked, view.template, view=view.read(store, asked))

            return _bounded(await self.place.ask(render), "text/html")

        return answer

    def _twin(self, view: View) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            asked = _asked(request)

            def told(store: Store) -> bytes:
                found = view.read(store, asked)
                return words.told_json({"schema": f"holdfast.{view.schema}/1", **found}).encode()

            return _bounded(await self.place.ask(told), "application/json")

        return answer

    def _action(self, act: Act) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if not self.place.changes:
                raise errors.ReadOnly(
                    "this page only reads", hint="Start it with `holdfast ui --allow-changes` to change something."
                )
            visitor: Visitor = request.scope["visitor"]
            form = await _form(request)
            if not same(form.pop("csrf", ""), visitor.csrf):
                raise BadOption(
                    "this form is not from this page, or too old", hint="Load the page again, and repeat it."
                )
            asked = _asked(request, form)

            def do(store: Store) -> str:
                with store.acting_as(visitor.who):
                    return act(store, asked, visitor.who)

            # One after another for each agent: in one process they would share a handle, and both would decide.
            turn = self._turns.setdefault(form.get("agent", ""), asyncio.Lock())
            async with turn:
                return RedirectResponse(await self.place.act(do), 303)

        return answer

    async def _events(self, _request: Request) -> Response:
        if self.live.over:
            return Response("the server stops", 503, {"retry-after": "10"})
        return StreamingResponse(self.live.stream(), media_type="text/event-stream")

    async def _static(self, request: Request) -> Response:
        found = words.static_files().get(request.path_params["file"])
        if found is None:
            return Response("not here", 404)
        body, kind = found
        return Response(body, media_type=kind, headers={"cache-control": "private, no-cache"})

    # -- what goes wrong ------------------------------------------------------------------------------------

    async def _failed(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, HoldfastError):
            raise error
        message = str(error).removesuffix(f"\n{error.hint}") if error.hint else str(error)
        return self._said(request, status_of(error), message, _HINTS.get(error.kind, error.hint), error.kind)

    async def _nothing(self, request: Request, _error: Exception) -> Response:
        return self._said(request, 404, "There is no such page.", "Begin at the list of agents.", "not-found")

    async def _broken(self, request: Request, error: Exception) -> Response:
        hint = "That is a fault of this page; the store is not touched by it. The terminal has the details."
        return self._said(request, 500, f"The page failed: {type(error).__name__}.", hint, "page-failed")

    def _said(self, request: Request, status: int, message: str, hint: str, kind: str) -> Response:
        if request.scope["path"].startswith("/api/"):
            said = {"schema": "holdfast.error/1", "kind": kind, "message": message, "hint": hint}
            return Response(words.told_json(said), status, media_type="application/json")
        title = _TITLES.get(status, "Something is in the way")
        told = {"message": message, "hint": hint, "status": status, "title": title, "form": request.method == "POST"}
        told["agent"] = request.path_params.get("agent", "") if kind != "unknown-agent" else ""
        body = self._rendered(request, Asked(), "error.html", view=told)
        return Response(body, status, media_type="text/html")

    def _rendered(self, request: Request, asked: Asked, template: str, **given: Any) -> bytes:
        path, visitor = request.scope["path"], request.scope.get("visitor")
        return words.page(
            template,
            asked=asked,
            path=path,
            here=lambda **changes: words.changed(quote(path), asked.query, **changes),
            place=self.place.shown,
            navigation=[(view.base, view.nav) for view in VIEWS if view.nav],
            tabs=[(view.base, view.tab) for view in VIEWS if view.tab],
            changes=self.place.changes,
            csrf=visitor.csrf if visitor is not None else "",
            who=visitor.who if visitor is not None else "",
            **given,
        )


def _outside(refused: Refused) -> tuple[bytes, bytes]:
    """The page for whoever stays outside. It says nothing of the store."""
    body = words.page("outside.html", message=refused.sentence, hint=refused.hint, status=refused.status)
    return body, b"text/html; charset=utf-8"


def _asked(request: Request, form: dict[str, str] | None = None) -> Asked:
    return Asked(request.path_params, _fields(request.url.query), form or {})


def _fields(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MOST, errors="strict"))
    except ValueError:
        raise BadOption("the address or the form cannot be read", hint=f"At most {FIELDS_MOST} fields.") from None


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form that is not too large, and does not take too long to come."""
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind != "application/x-www-form-urlencoded":
        raise BadOption(f"a form of the type {kind[:60]!r}", hint="Forms of this page are urlencoded.")
    body = b""
    try:
        async with asyncio.timeout(FORM_S):
            async for part in request.stream():
                body += part
                if len(body) > FORM_MOST_BYTES:
                    raise BadOption("the form is too large", hint=f"At most {FORM_MOST_BYTES:,} bytes.")
    except (TimeoutError, ClientDisconnect):
        raise BadOption("the form did not come in time", hint="Send it again.") from None
    return _fields(body.decode("ascii", "replace"))


def _bounded(body: bytes, kind: str) -> Response:
    if len(body) > ANSWER_MOST_BYTES:
        raise BadOption(f"the answer has {len(body):,} bytes", hint="Ask for a part of it.")
    return Response(body, media_type=kind)
