"""``holdfast doctor``: the machine, the store, and who holds it, with what to do about each trouble.

Of the machine it reads only what the system says about itself; the store's own files are not opened.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.text import Text

from holdfast import HalfThawed, Store, WorkspaceInfo
from holdfast.cli.exits import DAMAGED, exit_code
from holdfast.cli.output import Output
from holdfast.cli.session import Given, Json, Session, half_way, shown
from holdfast.cli.text import ago, clean, count, is_url, now, size
from holdfast.errors import HoldfastError, NotAStore

LOW_SPACE_BYTES = 256 * 2**20
LARGE_LOG_BYTES = 64 * 2**20
# Optional packages whose values can be saved, and those that encryption, servers, object storage, schedules and
# workspaces need.
OPTIONAL = ("numpy", "pydantic", "attrs", "cryptography", "psycopg", "obstore", "cronsim", "pathspec", "pyfastcdc")
# SQLite's write-ahead log needs memory that all processes share; these filesystems may reach over a network.
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "ceph", "glusterfs", "fuse.sshfs", "lustre"})
# Nothing here survives a restart of the machine.
VOLATILE = frozenset({"tmpfs", "ramfs"})

_MOUNTS = Path("/proc/self/mountinfo")
_POLICIES = 100
"""Agents whose policies are read: a mistake in the file shows with any, a disagreement of two files with some."""
_PROBES = 5
_PROBE_BYTES = 4_096
# A disk that really writes takes longer than this; a shorter time means that something in between answers for it.
_TOO_FAST_S = 20e-6


def doctor(*, json: Json = False, session: Given) -> int:
    """Check the machine, the store and who holds it.

    Ends with 0 unless the store cannot be opened, or its holdfast.toml be used, or a pack of it is missing.
    `holdfast verify` checks what is in it.
    """
    data: dict[str, Any] = {"holdfast": holdfast_version()}
    data["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    data["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    data["packages"] = packages(("apsw", "blake3", "msgspec", "ormsgpack", "zstandard"))
    data["optional"] = packages(OPTIONAL)
    data["sqlite"] = _sqlite()
    data["freezing"] = _freezing()
    data["store"], code = _store(session)
    troubles = list(_troubles(data))
    if data["store"] is not None:
        data["store"].pop("look", None)  # it is among the troubles
    data["troubles"] = [{"level": level, "text": text} for level, text in troubles]
    if json:
        session.json("doctor", **data)
    else:
        _print(session.out, data, troubles)
    return code


def _sqlite() -> str:
    """The SQLite that apsw brings along: it is the one that stores are written with."""
    import apsw

    return apsw.sqlite_lib_version()


def _freezing() -> dict[str, Any]:
    """Whether processes can be frozen here."""
    from holdfast.process import left_stopped, probe, unfinished

    found = probe()
    left = {"unfinished": unfinished(), "stopped": [one._asdict() for one in left_stopped()]}
    about = {"program": found.program or None, "version": found.version or None, "keeps_tcp": found.tcp}
    return {
        "usable": found.usable,
        **about,
        "problem": found.problem or None,
        "hint": found.hint or None,
        **left,
    }


def _store(session: Session) -> tuple[dict[str, Any] | None, int]:
    """What is known of the store (None when there is none), and the exit code that its state asks for."""
    try:
        with session.reading() as store:
            stats, some = store.stats(), store.agents(limit=1)
            found = {**stats, "agents": len(some) + some.more, "error": None}
            found["workspaces"] = [one.to_json() for one in store.workspaces()]
            found["half_thawed"] = [one.to_json() for one in store.half_thawed()]
            found["when"], code = _when(store)
            found["look"] = [(one.what, one.detail) for one in store.look()]
            if any(what == "packs" for what, _ in found["look"]):
                code = DAMAGED
    except HoldfastError as error:
        if isinstance(error, NotAStore) and session.place is None and not os.environ.get("HOLDFAST_STORE"):
            return None, 0  # nobody named one, and there need not be any
        return {"path": shown(session.place), "error": _error(error)}, exit_code(error)
    if is_url(found["path"]):
        return found | {"filesystem": None, "space_bytes": None, "flush": None}, code
    place = Path(found["path"])
    about = {"filesystem": filesystem(place), "space_bytes": free_bytes(place), "flush": flush_time(place)}
    return found | about, code


def _when(store: Store) -> tuple[dict[str, str] | None, int]:
    """What is wrong with what holdfast.toml says, and the exit code that this asks for."""
    try:
        for name in [one.name for one in store.agents(limit=_POLICIES)] or [""]:
            store.when(name)
    except HoldfastError as error:
        return _error(error), exit_code(error)
    return None, 0


def _error(error: HoldfastError) -> dict[str, str]:
    return {"kind": error.kind, "message": error.message, "hint": error.hint}


def _troubles(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Things to know about: a note, a warning or an error, and what to do."""
    for program in data["freezing"]["unfinished"]:
        said = "was killed while it put files back: the next `holdfast thaw`, of whatever, puts that right"
        yield ("warning", f"A thaw of `{program}` {said}.")
    for one in data["freezing"]["stopped"]:
        pid = one["pid"]
        said = f"stands still: it was to be moved to {one['dest']}, and whoever moved it was killed"
        ways = (
            f"If it does not run there, `kill -CONT {pid}` lets it go on here; if it does, `kill -9 {pid}` ends it here"
        )
        yield ("warning", f"Process {pid} (`{one['program']}`) {said}. {ways}.")
    store = data["store"]
    if store is None:
        yield ("note", "There is no store here. holdfast.open() in a program makes one.")
        return
    if store["error"]:
        yield ("error", _said(store["error"]))
        return
    if store["when"]:
        yield ("error", f"No agent can be opened: {_said(store['when'])}")
    for what, detail in store["look"]:
        if what == "store":
            yield ("warning", detail)
        elif what == "packs":
            yield ("error", f"{detail}. `holdfast verify` says which checkpoints need it.")
        else:
            yield ("warning", f"{detail}. `holdfast verify` says whether anything else is wrong.")
    if store["moved"]:
        yield ("note", f"This store was moved to {store['moved']}, and can only be read.")
    for one in store["workspaces"]:
        if one["target"]:
            yield ("warning", half_way(WorkspaceInfo(**one)))
    for one in store["half_thawed"]:
        yield ("warning", str(HalfThawed(**one)))
    for place in filter(None, (store["objects"], *store["cold"])):
        if not place["reachable"]:
            yield ("warning", f"Packs lie in {place['place']}, which cannot be reached: bring it back.")
    if is_url(store["path"]):
        return
    if store["filesystem"] in NETWORK:
        yield ("warning", f"The store is on {store['filesystem']}: use a local disk, locks there are not safe.")
    if store["filesystem"] in VOLATILE:
        yield ("warning", f"The store is on {store['filesystem']}: it is gone when the machine restarts.")
    if store["space_bytes"] < LOW_SPACE_BYTES:
        yield ("warning", f"Only {size(store['space_bytes'])} are free. Holdfast stops safely when it is full.")
    if store["bytes"].get("log", 0) > LARGE_LOG_BYTES:
        yield ("note", "The log is large. It shrinks when a program that writes the store closes it.")
    if store["flush"] is None:
        yield ("note", "The store's directory cannot be written by this user, so flushing was not measured.")
    elif store["flush"]["suspicious"]:
        yield ("warning", "Flushing is faster than a disk can be: a power cut may lose what was acknowledged.")


def _said(error: dict[str, str]) -> str:
    said = error["message"], error["hint"]
    return " ".join(one if one.endswith((".", "!", "?")) else f"{one}." for one in said if one)


def _print(out: Output, data: dict[str, Any], troubles: list[tuple[str, str]]) -> None:
    _group(out, "This program", _program(data))
    store = data["store"]
    if store is not None and not store["error"]:
        out.say()
        _group(out, "The store", _facts(store))
        out.say()
        _writers(out, store["writers"])
    out.say()
    if not troubles:
        done = Text("No trouble found. ", style="bold green")
        out.say(done, "`holdfast verify` checks every byte in the store.")
    styles = {"note": "cyan", "warning": "bold yellow", "error": "bold red"}
    for level, text in troubles:
        out.say(Text(f"{level}: ", style=styles[level]), clean(text))


def _program(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "holdfast", data["holdfast"]
    yield "python", f"{data['python']} on {data['system']}"
    yield "sqlite", data["sqlite"]
    yield "packages", ", ".join(f"{name} {found or 'missing'}" for name, found in data["packages"].items())
    freezing = data["freezing"]
    if freezing["usable"]:
        tcp = "connections can be kept" if freezing["keeps_tcp"] else "connections cannot be kept"
        yield "freezing", f"CRIU {freezing['version']}; {tcp}"
    else:
        yield "freezing", f"no: {freezing['problem']}. {freezing['hint']}"
    yield "optional", ", ".join(f"{name} {found or 'not installed'}" for name, found in data["optional"].items())


def _facts(store: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "path", store["path"]
    counts = store["counts"]
    if "format" in store:
        yield "format", str(store["format"])
    yield "holds", f"{count(store['agents'], 'agent')}, {count(counts.get('checkpoint', 0), 'checkpoint')}"
    yield "size", ", ".join(f"{name} {size(number)}" for name, number in store["bytes"].items())
    if store["objects"]:
        yield "objects", f"{count(store['objects']['packs'], 'pack')} in {store['objects']['place']}"
    for cold in store["cold"]:
        yield "cold", f"{count(cold['packs'], 'pack')} in {cold['place']}"
    if store["space_bytes"] is not None:
        yield "disk", f"{store['filesystem'] or 'unknown filesystem'}, {size(store['space_bytes'])} free"
    if store["flush"]:
        median, worst = store["flush"]["median_s"] * 1e3, store["flush"]["worst_s"] * 1e3
        yield "flush", f"{median:.2f} ms for 4 KiB, the slowest of five {worst:.2f} ms"


def _writers(out: Output, writers: list[dict[str, Any]]) -> None:
    out.say(Text("Writers now", style="bold"))
    for writer in writers:
        since = writer.get("since")
        began = f", since {ago(datetime.fromtimestamp(since / 1e6, UTC), now())}" if isinstance(since, int) else ""
        who = f"process {writer.get('pid')} on {writer.get('host')} ({writer.get('program')})"
        out.say(Text(f"  {clean(str(writer.get('agent')))}", style="bold cyan"), clean(f"  {who}{began}"))
    if not writers:
        out.note("  none")


def _group(out: Output, title: str, facts: Iterator[tuple[str, str]]) -> None:
    out.say(Text(title, style="bold"))
    for name, text in facts:
        out.say(Text(f"  {name:<9} ", style="dim"), clean(text))


# -- the machine ----------------------------------------------------------------------------------------------------


def filesystem(path: Path) -> str:
    """The type of the filesystem that holds ``path``, as the kernel names it; empty where it does not say."""
    best, found = "", ""
    with suppress(OSError, ValueError, IndexError):
        place = str(path.resolve(strict=True))
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            fields, _, rest = line.partition(" - ")
            point = fields.split()[4].encode().decode("unicode_escape")
            inside = place == point or place.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, found = point, rest.split()[0]
    return found


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write there."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def flush_time(directory: Path) -> dict[str, Any] | None:
    """How long writing 4 KiB durably takes, in a nameless file there; None where nothing can be written."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            times = []
            for _ in range(_PROBES):
                begun = time.perf_counter()
                file.write(b"\0" * _PROBE_BYTES)
                file.flush()
                os.fdatasync(file.fileno())
                times.append(time.perf_counter() - begun)
    except OSError:
        return None
    median_s = statistics.median(times)
    return {"median_s": median_s, "worst_s": max(times), "suspicious": median_s < _TOO_FAST_S}


def packages(names: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions, without importing anything; None for what is not there."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def holdfast_version() -> str:
    return packages(("holdfast",))["holdfast"] or "unknown"  # run from a source tree that was never installed
