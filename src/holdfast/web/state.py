"""The state of a checkpoint: a tree that is read where somebody looks, messages as a conversation, search, and diffs.

Owns how much of a state is shown at once. What always holds: a page costs as much as what it shows and the way there,
and some megabytes of large values, not as much as the state; values are read as inert data; an edit makes a branch of
its own, so that nothing is lost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

from holdfast import Agent, Change, Checkpoint, Diff, FileChange, Record, Store
from holdfast.errors import BadOption, HoldfastError, format_path
from holdfast.schemas import kind_of, text_of
from holdfast.text import count, size
from holdfast.travel import Comparison, Held, Look, encode, parse_path
from holdfast.web.asked import Asked
from holdfast.web.brief import array_kind, brief, change_brief, shorter, some
from holdfast.web.place import Kept
from holdfast.web.timeline import reader
from holdfast.web.words import address

PAGE = 100
"""Items of a container that are sent at once."""
TEXT = 240
"""Characters of a value beside its name."""
PEEKED_BYTES = 4 << 20
"""Of large values that a page reads to say what they are. Of others it says how large they are."""
PART = 50_000
"""Characters of a long text that are sent at once."""
MESSAGES = 50
MESSAGE = 8_000
"""Characters of a message. The tree has the rest."""
CHANGES = 200
FILES_READ, FILE_BYTES, FILE_LINES = 20, 200_000, 200
"""Of so many files that differ the lines are shown, if the file is no longer, and so many of them."""
_STARTS = re.compile(r"[-+](\d+)")
SEARCH_S = 3.0
HITS = 100
PATH_MOST = 4_000
_KEPT = 6
"""States that were looked at last, and what changed in them: they are read already."""
_WIDE = 1_000_000  # items of a container that a search looks at, so many at a time
_STRIDE = 500

_kept = Kept(_KEPT)
Path = tuple[Any, ...]


def _looked(store: Store, asked: Asked) -> tuple[Agent, Checkpoint]:
    """The agent and the checkpoint that are asked about, with what was read of its state before."""
    agent = reader(store, asked)
    found = agent.at(asked.point("at") or None)
    return agent, _kept.get((id(store), found.id, "state"), lambda: found) or found


def _changes(store: Store, checkpoint: Checkpoint) -> list[Change]:
    """What it changed. To work that out, the way to the places is read once more, which of a large state is long."""
    return _kept.get((id(store), checkpoint.id, "changes"), lambda: checkpoint.changes(large=False)) or []


def state(store: Store, asked: Asked) -> dict[str, Any]:
    """One checkpoint: as ``show --json``, with the first items of a place instead of all of its value."""
    agent, checkpoint = _looked(store, asked)
    path = asked.text("path", "", most=PATH_MOST)
    hidden = [] if asked.flag("bookkeeping") else checkpoint.bookkeeping
    changed = [one for one in _changes(store, checkpoint) if not (hidden and one.bookkeeping)]
    before = checkpoint.previous_id
    return {
        "agent": agent.name,
        "checkpoint": {
            **checkpoint.to_json(),
            "validity_reason": checkpoint.validity_reason,
            "metadata": brief(checkpoint.metadata, 400),
            "stack": _stack(store, agent, checkpoint),
        },
        "previous": before,
        "path": path,
        "hidden": hidden,
        "items": _items(checkpoint, path, 0, PAGE, hidden),
        **some("changes", changed, CHANGES, partial(change_brief, characters=600)),
    }


def _stack(store: Store, agent: Agent, checkpoint: Checkpoint) -> list[str]:
    branch = checkpoint.branch if checkpoint.branch in agent.branches() else agent.branch_name
    return store.agent(agent.name, branch=branch, create=False, readonly=True).stack_at(checkpoint)


def items(store: Store, asked: Asked) -> dict[str, Any]:
    """Some of the items of one place, from ``from`` on."""
    agent, checkpoint = _looked(store, asked)
    first = asked.number("from", 0, 0, 2**53)
    most = asked.number("n", PAGE, 1, 1_000)
    hidden = [] if asked.flag("bookkeeping") else checkpoint.bookkeeping
    found = _items(checkpoint, asked.text("path", "", most=PATH_MOST), first, most, hidden)
    return {"agent": agent.name, "checkpoint": checkpoint.id, **found}


def _items(checkpoint: Checkpoint, text: str, first: int, most: int, hidden: list[str]) -> dict[str, Any]:
    path = parse_path(text)
    with checkpoint.state.lock:
        look = Look.of(checkpoint.state)
        found = look.items(path, first, first + most)
        places = [((*path, key) if found.kind else path, value) for key, value in found.pairs]
        shown = [one for one in places if path or one[0][-1] not in hidden]
        shown = _peeked(look, shown) if found.kind != "set" else shown  # what is in a set has no place
    after = first + len(found.pairs)  # counts what is hidden, too
    return {
        "path": format_path(path),
        "kind": found.kind,
        "count": found.count - (0 if path else len(hidden)),
        "from": first,
        "next": after if found.pairs and after < found.count else None,
        "messages": found.kind == "list" and bool(shown) and all(_is_message(value) for _, value in shown[:5]),
        "items": [_node(place, value, found.kind) for place, value in shown],
    }


def _peeked(look: Look, places: list[tuple[Path, Any]]) -> list[tuple[Path, Any]]:
    """Large values themselves, as long as there is room: of an array that is its shape, of a text how it begins."""
    left = PEEKED_BYTES
    found = list(places)
    for at, (place, value) in enumerate(places):
        if isinstance(value, Held) and value.kind == "value" and value.count <= left:
            left -= value.count
            with suppress(HoldfastError):  # of a library that is not here, or damaged: that is said when it is opened
                found[at] = place, look.at(place)
    return found


def _node(path: Path, value: Any, kind: str) -> dict[str, Any]:
    """One line of the tree. ``open``: there is something inside; ``rest``: it goes on."""
    key = path[-1] if path else "state"
    name = "·" if kind == "set" else (key or "''") if isinstance(key, str) else f"[{text_of(key, 80)}]"
    where = format_path(path) if kind != "set" else ""
    node = {"name": shorter(name, 200), "path": where if len(where) <= PATH_MOST else "", "type": _type(value)}
    if isinstance(value, Held):
        rest = value.kind == "value"
        said = f"a large value, {size(value.count)}" if rest else f"{value.kind}, {count(value.count, 'item')}"
        return {**node, "text": said, "open": not rest, "rest": rest}
    shape = array_kind(value)
    if shape:
        return {**node, "text": shape, "open": False, "rest": True}
    inside = isinstance(value, dict | list | tuple | set | frozenset) or (
        isinstance(value, Record) and value.form != "enum"
    )
    if inside:
        return {**node, "text": kind_of(value), "preview": text_of(value, 90), "open": True, "rest": False}
    if isinstance(value, str):
        return {**node, "text": shorter(value, TEXT), "open": False, "rest": len(value) > TEXT}
    shown = text_of(value, TEXT)
    return {**node, "text": shown, "open": False, "rest": shown.endswith("…")}


def _type(value: Any) -> str:
    if isinstance(value, Held):
        return "held" if value.kind == "value" else "container"
    names = {str: "text", bool: "truth", int: "number", float: "number", type(None): "nothing"}
    kinds = (dict, list, tuple, set, frozenset, Record)
    return names.get(type(value), "container" if isinstance(value, kinds) else "other")


def text(store: Store, asked: Asked) -> dict[str, Any]:
    """A part of a long text, or of what Python writes for another value."""
    agent, checkpoint = _looked(store, asked)
    first = asked.number("from", 0, 0, 2**53)
    path = parse_path(asked.text("path", most=PATH_MOST))
    with checkpoint.state.lock:
        value = Look.of(checkpoint.state).at(path)
    whole = value if isinstance(value, str) else text_of(value, PART * 20)
    part = whole[first : first + PART]
    return {"agent": agent.name, "path": format_path(path), "from": first, "text": part, "count": len(whole)}


# -- messages ---------------------------------------------------------------------------------------------------------


def _fields(value: Any) -> dict[Any, Any]:
    found = value.fields if isinstance(value, Record) else value
    return found if isinstance(found, dict) else {}


def _is_message(value: Any) -> bool:
    """Something with a role and a content, as chat models and LangChain's classes have it."""
    fields = _fields(value)
    return "content" in fields and ("role" in fields or "type" in fields)


def conversation(store: Store, asked: Asked) -> dict[str, Any]:
    """A list of messages, one page of it; without a page the last one."""
    agent, checkpoint = _looked(store, asked)
    path = parse_path(asked.text("path", most=PATH_MOST))
    with checkpoint.state.lock:
        look = Look.of(checkpoint.state)
        total = look.items(path, 0, 0).count
        first = asked.number("from", max(0, total - MESSAGES), 0, 2**53)
        found = look.items(path, first, first + MESSAGES)
    if found.kind in {"", "set"}:
        raise BadOption(f"{format_path(path)} is no list of messages", hint="Its tree shows what it is.")
    return {
        "agent": agent.name, "checkpoint": checkpoint.to_json(), "path": format_path(path), "count": total,
        "from": first, "n": MESSAGES,
        "messages": [{"at": key, "path": format_path((*path, key)), **_message(value)} for key, value in found.pairs],
    }  # fmt: skip


def _message(value: Any) -> dict[str, Any]:
    fields = _fields(value)
    role = fields.get("role", fields.get("type", ""))
    content = fields.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else part.get("text") for part in parts if isinstance(part, str | dict)]
    rest = [part for part in parts if not isinstance(part, str) and not (isinstance(part, dict) and part.get("text"))]
    other = {name: one for name, one in fields.items() if name not in {"role", "type", "content"} and one}
    other |= {"content": rest} if any(part is not None for part in rest) else {}
    return {
        "role": shorter(str(role), 40) or "somebody",
        "text": shorter("\n\n".join(one for one in texts if isinstance(one, str)), MESSAGE),
        "other": brief(other, 400) if other else None,
    }


# -- search -----------------------------------------------------------------------------------------------------------


def search(store: Store, asked: Asked) -> dict[str, Any]:
    """Places whose name or text has ``q`` in it, as far as they are found within some seconds."""
    agent, checkpoint = _looked(store, asked)
    wanted = asked.text("q", most=200).casefold()
    end_s = time.monotonic() + SEARCH_S
    hits: list[dict[str, Any]] = []
    complete = True
    with checkpoint.state.lock:
        for path, value in _walk(Look.of(checkpoint.state), ()):
            if time.monotonic() > end_s or len(hits) >= HITS:
                complete = False
                break
            at = value.casefold().find(wanted) if isinstance(value, str) else -1
            if at < 0 and not isinstance(value, str) and _type(value) in {"number", "truth", "other"}:
                at = 0 if wanted in text_of(value, 200).casefold() else -1
            if at >= 0 or (path and wanted in str(path[-1]).casefold()):
                shown = value[max(0, at - 60) : at + 140] if isinstance(value, str) else value
                hits.append({"path": format_path(path), "text": text_of(shown, 200)})
    return {"agent": agent.name, "checkpoint": checkpoint.id, "q": wanted, "hits": hits, "complete": complete}


def _walk(look: Look, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place below, each before what is inside it."""
    for start in range(0, _WIDE, _STRIDE):
        found = look.items(path, start, start + _STRIDE)
        for key, value in found.pairs if found.kind else ():
            yield from _inside(look, (*path, key), value)
        if start + _STRIDE >= found.count or not found.kind:
            return


def _inside(look: Look, path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Held):
        if value.kind == "value":
            yield path, look.at(path)
        else:
            yield path, value
            yield from _walk(look, path)
        return
    yield path, value
    inner = value.fields if isinstance(value, Record) else value
    pairs = inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list | tuple) else ()
    for key, item in pairs:
        yield from _inside(look, (*path, key), item)


# -- diff -------------------------------------------------------------------------------------------------------------


def diff(store: Store, asked: Asked) -> dict[str, Any]:
    """What differs between two points: as ``diff --json``, with values and lists cut."""
    agent = reader(store, asked)
    other = asked.text("other", agent.name, most=1_024)
    there = agent if other == agent.name else store.agent(other, create=False, readonly=True)
    new = there.at(asked.point("new") or None)
    old = asked.point("old")
    # Texts are not handed on: a diff takes the name of a file for a dump.
    if old or there is not agent:
        compared = store.diff(agent.at(old or None), new)
    elif new.previous_id:
        compared = store.diff(agent.at(f"id:{new.previous_id}"), new)
    else:  # of the first one everything is new
        compared = Comparison("", new.id, Diff(list(new.changes(large=False)), "", new.id), after=new)
    found = compared.state.everything if asked.flag("bookkeeping") else compared.state.changes
    shown = found[:CHANGES]
    return {
        "agent": agent.name,
        "other": there.name,
        "equal": not (compared.state.everything or compared.state.files),
        "old": compared.before.to_json() if compared.before is not None else None,
        "new": compared.after.to_json() if compared.after is not None else None,
        "names": [compared.old, compared.new],
        "summary": compared.summary(),
        "changes": [change_brief(one) for one in shown],
        "more": len(found) - len(shown),
        "hidden": len(compared.state.everything) - len(found),
        **_files(compared.state.files),
        "effects": [one.to_json() for one in compared.effects[:CHANGES]],
        "metadata": [change_brief(one, 300) for one in compared.metadata[:CHANGES]],
        "note": compared.note,
    }


def _files(found: Sequence[FileChange]) -> dict[str, Any]:
    """Files that differ; of the first ones, if they are short texts, also the lines."""
    left = FILES_READ

    def shown(one: FileChange) -> dict[str, Any]:
        nonlocal left
        left -= 1
        sides = [side.size for side in (one.old, one.new) if side is not None]
        summary, lines = one.summary(), []
        try:
            lines = one.diff() if left >= 0 and one.kind == "changed" and max(sides) <= FILE_BYTES else []
        except HoldfastError as error:  # what else differs can be shown
            summary += f"; its lines cannot be read: {error.message}"
        about = {**brief(one.to_json()), "summary": summary}
        return about | some("lines", list(_numbered(lines)), FILE_LINES, brief)

    return some("files", found, CHANGES, shown)


def _numbered(lines: list[str]) -> Iterator[list[Any]]:
    """Lines of ``diff -u``: sign, number in the old and in the new file, text. Of a gap only its sign."""
    old = new = 0
    for line in lines:
        if line.startswith("@@"):
            old, new = (int(one) for one in _STARTS.findall(line))
            yield ["@", None, None, ""]
            continue
        sign = line[0]
        yield [sign, old if sign != "+" else None, new if sign != "-" else None, line[1:]]
        old, new = old + (sign != "+"), new + (sign != "-")


# -- edit -------------------------------------------------------------------------------------------------------------


def edit(store: Store, asked: Asked, who: str) -> str:
    """Put another value at a place, as the first checkpoint of a new branch."""
    agent = reader(store, asked)
    at = agent.at(asked.point("at") or None)
    path = parse_path(asked.text("path", most=PATH_MOST))
    new = asked.text("branch", most=200)
    if not path:
        raise BadOption("a whole state cannot be replaced here", hint="Name a place in it.")
    value = asked.value("value")
    if new in agent.branches():
        raise BadOption(f"there is a branch {new!r} already", hint="Choose another name.")
    with at.state.lock:
        _holder(at.state, path)
    encode(value, depth=len(path))  # what cannot be saved is refused before there is a branch for it
    store.branch(agent.name, new, f"id:{at.id}")
    with closing(store.agent(agent.name, branch=new, create=False, when=None, workspace=None)) as handle:
        _holder(handle.state, path)[path[-1]] = value
        made = handle.checkpoint(f"{who} edited {format_path(path)}"[:200])
    return address("/diff", agent=agent.name, old=f"id:{at.id}", new=f"id:{made.id}")


def _holder(state: Any, path: tuple[Any, ...]) -> Any:
    """The container that has the last part of a path, and can be given another one there."""
    holder = state
    try:
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]]
    except (KeyError, IndexError, TypeError):
        raise BadOption(f"{format_path(path)} is not there", hint="Choose a place of this state.") from None
    if holder is not state and not isinstance(holder, dict | list):
        raise BadOption(f"what holds {format_path(path)} cannot be changed by parts", hint="Edit that as a whole.")
    return holder
