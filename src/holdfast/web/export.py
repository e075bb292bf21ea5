"""An agent's history as one file of HTML, to be sent to somebody: graph, changes, calls, and the newest state.

Owns what goes into it, and how the page's scripts become one classic script, which a file may have where modules may
not. What always holds: the file asks nobody for anything; its size is bounded; what looks secret was taken out as it
is from dumps, all of it being known before the first text was cut; nothing in its data can end an element or run.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from markupsafe import Markup

from holdfast import Agent, Change, Checkpoint, Store
from holdfast.crash import Redactor
from holdfast.errors import BadOption, HoldfastError, StoreFailed
from holdfast.schemas import effect_json, run_json
from holdfast.web import timeline, words
from holdfast.web.asked import Asked
from holdfast.web.brief import brief, change_brief, learn, secret_path

POINTS = 1_000
CALLS = 2_000
BYTES_MOST = 16 << 20
"""Of what states, calls and changes hold. When it would be more, changes and values of older ones are left out."""
CHANGES = 40
"""Of one checkpoint."""
_SCRIPTS = ("parts.js", "graph.js", "chart.js", "waterfall.js", "exported.js")
_STYLES = ("page.css", "views.css")
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)
_WORD = re.compile(r"\w+")
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)


def export(store: Store, name: str, file: Path) -> int:
    """Write the file, which must not be there yet, for its owner alone. Gives its size in bytes."""
    made = page(store, name)
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BadOption(f"{file} exists already", hint="Name a file that does not.") from None
    except OSError as error:
        raise StoreFailed(f"{file} cannot be written: {error.strerror}", hint="Name another file.") from None
    with os.fdopen(handle, "wb") as written:
        written.write(made)
    return len(made)


def page(store: Store, name: str) -> bytes:
    """The file's content."""
    script, style = _script(), "\n".join(_static(one) for one in _STYLES)
    return words.page(
        "export.html",
        data=collected(store, name),
        agent=name,
        script=Markup(script),  # noqa: S704 - our own files
        style=Markup(style),  # noqa: S704 - our own files
        script_hash=_hash(script),
        style_hash=_hash(style),
    )


def collected(store: Store, name: str) -> dict[str, Any]:
    """What the file shows, redacted."""
    redactor = Redactor(os.environ)

    left = BYTES_MOST

    def whole(value: Any) -> Any:
        return value

    def cut(value: Any) -> Any:
        return brief(value, redactor=redactor)

    def short(value: Any) -> Any:
        nonlocal left
        found = brief(value, 200, 8, 30, redactor) if left > BYTES_MOST // 2 else {"$type": "more", "$more": 1}
        left -= len(json.dumps(found))
        return found

    agent = store.agent(name, create=False, readonly=True)
    asked = Asked(query={"agent": name, "n": str(POINTS)})
    told = timeline.timeline(store, asked)
    points = agent.log(POINTS, all=True)
    calls = store.effects(name, limit=CALLS)
    runs = store.runs(name, limit=200)
    learn(told, redactor)
    for section, value in _state(agent).items():
        learn({section: value}, redactor)
    for given in (*(effect_json(one, write=whole) for one in calls), *(run_json(one, write=whole) for one in runs)):
        learn(given, redactor)
    for _, changed in _changed(points):
        for change in changed:
            learn([change.old, change.new], redactor, secret=secret_path(change.path, redactor))
    paths = [one for one in timeline.numbers(store, asked)["paths"] if not secret_path(_WORD.findall(one), redactor)]
    figures = {
        of: {id: cut(value) for id, value in _series(store, asked, of).items()}
        for of in ("size", "changes", *paths[:6])
    }
    first = {id(one) for one in timeline.once(agent, calls)}
    effects = [{**effect_json(one, write=short), "again": id(one) not in first} for one in calls]
    told_runs = [run_json(one, write=short) for one in runs]
    changes, left_out = _changes(points, redactor, left)
    data = {
        "agent": name,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "timeline": told,
        "changes": changes,
        "left_out": left_out,
        "series": figures,
        "effects": effects,
        "runs": told_runs,
        "state": cut(_state(agent)),
    }
    cleaned: dict[str, Any] = redactor.scrub(json.loads(json.dumps(data)))
    return {**cleaned, "redacted": redactor.hits}


def _series(store: Store, asked: Asked, of: str) -> dict[str, Any]:
    found: dict[str, Any] = timeline.series(store, Asked(query={**asked.query, "of": of}))["values"]
    return found


def _changed(points: list[Checkpoint]) -> Iterator[tuple[int, list[Change]]]:
    """What each checkpoint changed. Read twice, because all of it at once may be more than there is memory."""
    for number, one in enumerate(points):
        with suppress(HoldfastError):  # forgotten or damaged: the others are told all the same
            yield number, [change for change in one.changes(large=False) if not change.bookkeeping]


def _changes(points: list[Checkpoint], redactor: Redactor, most: int) -> tuple[dict[str, Any], int]:
    """What each checkpoint changed, the newest first, as long as there is room."""
    found: dict[str, Any] = {}
    size = 0
    for number, changed in _changed(points):
        shown = [change_brief(change, 1_000, redactor) for change in changed[:CHANGES]]
        size += len(json.dumps(shown))
        if size > most:
            return found, len(points) - number
        found[points[number].id] = {"changes": shown, "more": max(0, len(changed) - CHANGES)}
    return found, 0


def _state(agent: Agent) -> dict[str, Any]:
    head = agent.head
    return {} if head is None else {name: agent.state[name] for name in agent.state if name not in head.bookkeeping}


# -- one script of several modules ------------------------------------------------------------------------------------


def _static(name: str) -> str:
    return words.static_files()[name][0].decode()


def _script() -> str:
    """Each module is a function that gives what it exports; the order is that in which they need each other."""
    made = []
    for name in _SCRIPTS:
        text = _static(name)
        exported = _EXPORT.findall(text)
        body = _IMPORT.sub(lambda match: f"const {{{match[1]}}} = from_{match[2]};", text)
        body = _EXPORT.sub(lambda match: f"{match[1]} {match[2]}", body)
        names = ", ".join(one for _, one in exported)
        made.append(f"const from_{name.removesuffix('.js')} = (() => {{\n{body}\nreturn {{ {names} }};\n}})();")
    return "\n".join(['"use strict";', *made])


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
