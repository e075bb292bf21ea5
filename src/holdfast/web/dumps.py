"""Dumps, grouped by cause: when a fault was first and last seen, how often, whether somebody has dealt with it.

Owns the groups, and the file in which people say that a cause is dealt with. Dumps are read as inert data. What always
holds: only files of the store's folder of dumps are opened, by their names; that file only grows.
"""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from holdfast import Store, crash
from holdfast.errors import BadOption, NotADump, NotInDump, StoreFailed
from holdfast.web.asked import Asked
from holdfast.web.place import Kept
from holdfast.web.words import address, typed

DUMPS = 500
"""The newest ones, which are read. More than are kept by default."""
LOGS, LOG = 100, 1_000
"""Lines of the log, and characters of each."""
LARGEST = 8
SAID = "causes.jsonl"
SAID_MOST_BYTES = 4 << 20
_known = Kept(2_000)


def dumps(store: Store, asked: Asked) -> dict[str, Any]:
    """The dumps of the store by cause, the one that was seen last first."""
    folder = Path(crash.folder_of(store.place))
    paths = crash.dumps(folder)
    wanted = asked.text("q", "", most=200).casefold()
    resolved = _said(folder)
    groups: dict[str, dict[str, Any]] = {}
    for one in map(_entry, paths[:DUMPS]):
        if wanted and wanted not in f"{one['what']} {one['where']} {one['cause']}".casefold():
            continue
        key = _key(one)
        group = groups.setdefault(
            key, {"key": key, "cause": one["cause"], "where": one["where"], "what": one["what"], "dumps": [],
                  "count": 0, "first": one["at"], "last": one["at"], "resolved": resolved.get(key)},
        )  # fmt: skip
        group["count"] += 1
        group["first"] = one["at"] or group["first"]
        if len(group["dumps"]) < 20:
            group["dumps"].append(one)
    for group in groups.values():
        told = group["resolved"]
        group["state"] = "open" if told is None else "came back" if group["last"] > told["at"] else "resolved"
    return {
        "folder": str(folder), "query": wanted, "groups": list(groups.values()), "total": len(paths),
        "more": max(0, len(paths) - DUMPS), "dumps": [],
    }  # fmt: skip


def of_agents(store: Store, until_s: float = math.inf) -> dict[str, list[dict[str, Any]]]:
    """The dumps that name each agent, newest first; one that is not known yet is read until ``until_s``."""
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        paths = crash.dumps(crash.folder_of(store.place))
    except NotADump:
        paths = []
    for path in paths[:DUMPS]:
        one = _entry(path, until_s)
        for name in {agent["name"] for agent in one.get("agents", ())}:
            found.setdefault(name, []).append(one)
    return found


def dump(store: Store, asked: Asked) -> dict[str, Any]:
    """One dump: as ``dump show --json``, all its threads and tasks, and the commands that go on from it.

    With ``stack`` one of them with its values, with ``object`` what is inside one of these.
    """
    folder = Path(crash.folder_of(store.place))
    name = asked.text("file", most=300)
    path = next((one for one in crash.dumps(folder) if one.name == name), None)
    if path is None:
        raise NotInDump(
            f"there is no dump {name!r} in {folder}", hint="It may have been removed: see the list of dumps."
        )
    stack, number = asked.text("stack", "", most=100), asked.number("object", -1, 0, 2**53)
    with crash.open_dump(path) as opened:
        told = {**crash.dump_json(opened), **crash.stacks_json(opened)}
        told["logs"] = [
            {"at": one.at, "level": one.level[:20], "logger": one.logger[:100], "text": one.text[:LOG]}
            for one in opened.log_records[-LOGS:]
        ]
        told["heap"]["largest"] = [[name[:200], *rest] for name, *rest in opened.heap.largest[:LARGEST]]
        told["stack"] = crash.stack_json(opened, stack) if stack else None
        told["object"] = crash.object_json(opened, number) if number >= 0 else None
    return {
        **told,
        "name": path.name,
        "group": _key(_entry(path)),
        "commands": {
            "debug": typed(store.place, "dump", "open", path.name),
            "editor": typed(store.place, "dump", "dap", path.name),
            "restart": typed(store.place, "dump", "rehydrate", path.name),
            "explain": typed(store.place, "explain", str(path)),
        },
    }


def resolve(store: Store, asked: Asked, who: str) -> str:
    """Say that a cause is dealt with. When it is seen again, it came back."""
    folder, key = Path(crash.folder_of(store.place)), asked.text("key", most=64)
    said = {
        "cause": key,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "by": who,
        "why": asked.text("why", "", most=500),
    }
    try:
        handle = os.open(folder / SAID, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            if file.tell() > SAID_MOST_BYTES:
                raise BadOption(f"{SAID} has grown too large", hint=f"Move {folder / SAID} away.")
            file.write(json.dumps(said).encode() + b"\n")
    except OSError as error:
        raise StoreFailed(
            f"that could not be written down in {folder}: {error.strerror}", hint="Is it yours?"
        ) from None
    return address("/dumps")


def _said(folder: Path) -> dict[str, dict[str, str]]:
    """What people have said last of each cause. A line that was cut short counts as not said."""
    found: dict[str, dict[str, str]] = {}
    try:
        with (folder / SAID).open("rb") as file:
            lines = file.read(SAID_MOST_BYTES + 4096).splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            one = json.loads(line)
            datetime.fromisoformat(one["at"])
            found[str(one["cause"])] = {name: str(one[name])[:500] for name in ("at", "by", "why")}
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _entry(path: Path, until_s: float = math.inf) -> dict[str, Any]:
    """What a list says of a dump. A file that has not changed is not read again."""
    try:
        about = path.stat()
    except OSError:
        return crash.entry(path)
    return _known.get((str(path), about.st_size, about.st_mtime_ns), lambda: crash.entry(path), until_s) or {}


def _key(one: dict[str, Any]) -> str:
    text = f"{one['cause']}\0{one['where']}" if one["cause"] else one["problem"] or one["trigger"]
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
