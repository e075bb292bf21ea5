"""Writes the stores that are kept under tests/compat/, and what is in them as JSON.

    python -m tests.compat.make_store           store-v1.tar.xz and store-v1.json
    python -m tests.compat.make_store golden    golden.json

Both are written once per format version and never again: every later Holdfast must read them as they are.
"""

from __future__ import annotations

import datetime as dt
import enum
import json
import sys
import tarfile
import tempfile
from collections import Counter, OrderedDict, deque
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
from msgspec import to_builtins

import holdfast
from holdfast.agent import metadata
from holdfast.agent.background import fold_below
from holdfast.codec.document import Document
from holdfast.codec.operations import Operation, encode_operations
from holdfast.codec.types import REGISTRY as TYPES_KNOWN
from holdfast.codec.values import encode
from holdfast.process.trees import Content, Entry, encode_entry, encode_path
from holdfast.run import records as rec
from holdfast.run.arguments import stow
from holdfast.run.line import Line, entries
from holdfast.run.schedule import Kept
from holdfast.store import witness
from holdfast.store.cipher import PLAIN, Keyed, digest
from holdfast.store.manifest import (
    Cost,
    Manifest,
    body_digest,
    body_proof,
    identity,
    join_body,
    mark_of,
    pack,
    pack_payload,
)
from holdfast.store.rows import Branch, body_bytes, link, node_digest
from holdfast.store.tables import FORMAT_VERSION
from tests.limits import limits


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


@dataclass
class Step:
    name: str
    done: bool = False
    notes: list[str] = field(default_factory=list)


# Names of their own: the store must not depend on where this file lies.
holdfast.register(Colour, name="compat.Colour")
holdfast.register(Step, name="compat.Step")
TYPES = [Colour, Step]

KEY = bytes(range(32))
PASSPHRASE = "correct horse"
STORES = {"store": None, "encrypted": KEY}
"""By the directory's name, and the key that opens it."""

VALUES = {
    "none": None, "true": True, "int": -5, "big": 2**70, "negative big": -(2**70), "float": -0.0, "nan": float("nan"),
    "inf": float("inf"), "text": "ünï 🙂", "surrogate": "\ud800x", "bytes": b"\x00\xff", "bytearray": bytearray(b"ab"),
    "tuple": (1, (2, "x"), [3]), "set": {1, 2, 300}, "frozenset": frozenset({"a", ("b", 1)}), "complex": 1 + 2j,
    "decimal": Decimal("1.10"), "fraction": Fraction(1, 3), "naive": dt.datetime(2024, 2, 29, 12, 30, 1, 5),
    "aware": dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    "offset": dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
    "utc": dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "date": dt.date(1, 1, 1),
    "time": dt.time(23, 59, 59, 999999), "delta": dt.timedelta(-1, 5, 7),
    "uuid": UUID("12345678-1234-5678-1234-567812345678"), "path": PurePosixPath("/a/b"), "range": range(1, 10, 3),
    "deque": deque([1, 2], maxlen=5), "ordered": OrderedDict(b=1, a=2), "counter": Counter("aab"),
    "odd keys": {1: "int", "1": "str", None: 0, (1, 2): "pair", True + 1: "two"},
    "colour": Colour.BLUE, "step": Step("one", notes=["a"]), "array": np.arange(6, dtype="<i4").reshape(2, 3),
    "scalar": np.float32(1.5), "nested": {"list": [[], {}, [{"x": [1]}]]},
}  # fmt: skip


def fill(store: holdfast.Store) -> None:
    """Agents with branches, tags, undo, a rollback, seals, big containers and a bulk value."""
    agent = store.agent("user@example.com")
    for name, value in VALUES.items():
        agent.state[f"value: {name}"] = value
    agent.checkpoint("values")
    messages = agent.state["messages"] = []
    messages = agent.state["messages"]
    for number in range(16):
        messages.append({"role": "user" if number % 2 else "assistant", "content": f"message {number} " * 12})
        agent.checkpoint(f"message {number}")
    messages[2]["content"] = "edited " * 20
    del messages[0]
    agent.state["table"] = {"rows": {f"row {number}": "x" * 100 for number in range(200)}, "count": 200}
    agent.state["many"] = list(range(100)) * 50
    agent.checkpoint("large")
    messages.reverse()
    agent.state["many"][2500] = "changed"
    agent.state["value: set"].add(7)
    agent.state["value: set"].discard(1)
    agent.state["value: step"] = Step("two", done=True)
    agent.checkpoint("changed")
    agent.undo()
    agent.redo()
    agent.tag("kept", "large")
    agent.tag("gone", "large")
    agent.untag("gone")
    agent.mark("message 3", "suspect", "an example")
    agent.rollback("large")
    agent.state["bulk"] = bytes(300_000)
    agent.state["messages"].clear()
    agent.checkpoint("other line")
    side = agent.branch("try/b", at="message 1")
    side.state["messages"].append("on a branch")
    side.checkpoint("side")
    side.close()
    agent.close()
    with closing(store.agent("second")) as second:
        second.state["n"] = 1
        second._writer.finish(second._writer.capture(second._document, "under a key", key=b"a key of its own"))
    store.signal("second", "go", {"how": ["far"]}, any_run=True)
    store.agent("empty").close()


def share(store: holdfast.Store) -> None:
    """A clone, an agent that was removed, and checkpoints that were forgotten."""
    store.copy("user@example.com", "clone")
    with closing(store.agent("clone")) as clone:
        clone.state["messages"].append("of the clone")
        clone.checkpoint("of the clone")
    with closing(store.agent("brief")) as brief:
        brief.state["log"] = []
        for number in range(6):
            brief.state["log"].append(f"entry {number}")
            brief.checkpoint(f"brief {number}")
        numbers = {point.label: point._point.n for point in brief.log()}
        row = brief._row
    store._forget(row, {numbers["brief 1"], numbers["brief 2"], numbers["brief 4"]})
    with closing(store.agent("gone")) as gone:
        gone.state["n"] = 2
        gone.checkpoint("gone")
    store.remove("gone")


def act(store: holdfast.Store) -> None:
    """Records of every kind, a branch that inherits some, a clone, and what is left of a line whose agent is gone."""
    agent = store.agent("doer")
    agent.state["n"] = 0
    start = bytes.fromhex(agent.checkpoint("start").id)
    writer = agent._writer
    at = 1_700_000_000_000_000
    long = stow([f"{number}: a long result" for number in range(2_000)], store._registry)
    bulk = stow(b"bulk " * 60_000, store._registry)
    args = stow({"what": "flight", "step": Step("one")}, store._registry).value
    print_ = b"f" * 32
    fault = ("Refused", "Refused", "no", stow(("no", 5), store._registry).value)

    def note(*records: rec.Record, flush: bool = True, **objects: object) -> None:
        writer.append(entries(*records), flush=flush, **objects)

    note(rec.Begin(at, "r1", "trip", args, print_, start, code="c" * 64, generation=1))
    note(
        rec.Done(at + 1, "r1", "0", "value", 0, "look", "read", args, [[["history"], b"h" * 32, 7]], print_, at),
        rec.Done(at + 2, "r1", "1", "value", 0, "read", "read", args, None, print_, at, long.value),
        nodes=long.nodes,
        flush=False,
    )
    note(rec.Intent(at + 3, "r1", "2", "book", "write", args, print_, "k" * 32, 1, 1))
    note(rec.Progress(at + 4, "r1", "2", b"\x05", 4))
    note(rec.Done(at + 5, "r1", "2", "value", 4, value=bulk.value), nodes=bulk.nodes, chunks=bulk.chunks)
    note(rec.Intent(at + 6, "r1", "3", "pay", "write", args, print_, "l" * 32, 1, 1))
    note(rec.Doubt(at + 7, "r1", "3", 7, "timed out \ud800"))
    note(rec.Decision(at + 8, "r1", "3", 7, "not-done", "a person", "looked", b"\xc0"))
    note(rec.Done(at + 9, "r1", "4", "error", 0, "look", "read", args, None, print_, at, None, fault), flush=False)
    note(rec.Wait(at + 10, "r1", "5", "signal", "go", at + 99), rec.Done(at + 11, "r1", "5", "value", event=b"e" * 16))
    note(rec.Cut(at + 12, "r1", "6", [2, 3], "look", "read"), rec.Note(at + 13, "", "mode", "calm"))
    parent = stow(f"00-{'4b' * 16}-{'00' * 7}01-01", store._registry).value
    note(rec.Note(at + 13, "r1", "trace", "", parent, "=trace"))
    agent.state["n"] = 1
    saved = writer.capture(
        agent._document,
        "saved",
        mark="4b" * 16,
        note=lambda made: entries(rec.Saved(at + 14, "r1", "7", made.id, b"d" * 32, ["plan"])),
    )
    writer.finish(saved)
    note(rec.End(at + 15, "r1", "finished", long.value), rec.RolledBack(at + 16, "", 0, start))
    begun = rec.Begin(at + 17, "r2", "trip", args, print_, start, code="c" * 64, generation=1)
    note(begun, rec.Wait(at + 17, "r2", "0", "signal", "go"))
    note(rec.End(at + 17, "r2", "waiting", waits=[("signal", "go", 0), ("sleep", "", at + 10**15)]))
    store.signal("doer", "go", 1, run="r2", id="click-17")
    store.signal("doer", "stop", None, any_run=True, id="click-18")
    side = agent.branch("aside", at="saved")
    side._writer.append(entries(rec.Note(at + 17, "", "mode", "hasty")), flush=True)
    side.state["n"] = 2
    side.checkpoint("aside")
    side.close()
    agent.close()
    for number, more in enumerate(([], [rec.Note(at + 19, "q1", "resume", "")])):
        with closing(store.agent(f"queued-{number}")) as queued:
            queued.checkpoint("start")
            place = {"queue": "mail", "part": "acme", "priority": 5 - 9 * number}
            begin = rec.Begin(at + 18, f"q{number}", "trip", args, print_, start, generation=1, **place)
            queued._writer.append(entries(begin, *more), flush=True)
    store.set_queue("mail", concurrency=4, partition_rate=(10, 60))
    store._db.change(lambda change: change.put("claim", 1, b"q1", b"mail", b"acme", 0, at))
    store.copy("doer", "heir")
    with closing(store.agent("heir", branch="aside")) as gone:
        gone._writer.append(entries(rec.Note(at + 18, "", "mode", "of the heir")), flush=True)
        gone.checkpoint("of the heir")
    store.copy("heir", "heir of the heir")
    store.remove("heir")


def outlive(store: holdfast.Store) -> None:
    """Two runs that are over, and of the older one the values were let go, those in its records and those in trees."""
    agent = store.agent("old")
    start = bytes.fromhex(agent.checkpoint("start").id)
    at = 1_700_000_000_000_000
    args = stow({"what": "flight"}, store._registry).value
    for run in ("r1", "r2"):
        long = stow([f"{number}: result of {run}" for number in range(1_000)], store._registry)
        records = [
            rec.Begin(at, run, "trip", args, b"f" * 32, start, generation=1),
            rec.Done(at + 1, run, "0", "value", 0, "look", "read", args, None, b"f" * 32, at, long.value),
            rec.End(at + 2, run, "finished", args),
        ]
        agent._writer.append(entries(*records), nodes=long.nodes, flush=True)
    agent.close()
    report = store.retain(holdfast.Policy(branches=["*"], runs=1), ["old"])
    assert report.values == 3


SCHEDULES = {
    "report": Kept(
        "0 8 * * 1-5", "Europe/Lisbon", "once", "skip", at=1_700_000_000_000_000, next=1_700_035_200_000_000
    ),
    "sweep": Kept(
        "*/5 * * * *", "UTC", "each", "queue", at=1_700_000_100_000_000, next=1_700_000_400_000_000,
        last=1_699_999_500_000_000, skipped=1_699_990_000_000_000,
        pending=(1_699_999_800_000_000, 1_700_000_100_000_000),
    ),
}  # fmt: skip
"""Two functions that are executed at fixed times."""


def build(path: Path, key: bytes | None = None) -> None:
    """A store with every kind of row."""
    with limits({"SEAL_CHECKPOINTS": 6, "FOLD_MIN": 4}), holdfast.open(path, types=TYPES, key=key or False) as store:
        fill(store)
        share(store)
        act(store)
        outlive(store)
        store._db.change(lambda change: change.set_fact("schedules", body_bytes(to_builtins(SCHEDULES))))
        for row in store._db.view.checkpoints("WHERE sealed = 1"):
            fold_below(store._db, row.n)  # so that it does not depend on when the background does


def line_of(store: holdfast.Store, name: str, branch: str) -> Line:
    view = store._db.view
    return Line(store._db, view.branch(view.agent(name).a, branch).b)


# States whose section digests are golden: empty containers, order, types, leaves and index nodes of one and two levels.
STATES = {
    "empty containers": {"list": [], "dict": {}, "set": set(), "none": None},
    "order counts": {"b": {"y": 1, "x": 2}, "a": {"x": 2, "y": 1}},
    "types count": {"int": [1], "float": [1.0], "bool": [True]},
    "small": {"messages": [{"role": "user", "content": "hello"}], "set": {3, 1, 2}, "pair": (1, 2)},
    "several leaves": {"numbers": list(range(5_000))},
    "two levels": {"texts": [f"{number} " * 700 for number in range(1_500)]},
    "leaves cut by content": {"texts": [f"{number}: " + "text " * (number % 50) for number in range(2_000)]},
    "big inside": {"table": {"rows": {f"row {number}": "x" * 100 for number in range(400)}, "count": 400}},
    "dict of many": {"index": {f"key {number}": number for number in range(4_000)}},
    "set of many": {"members": {f"member {number}" for number in range(3_000)}},
    "bulk": {"bulk": bytes(300_000), "list": ["x" * 300_000]},
}


def golden() -> dict:
    found: dict = {"values": {}, "states": {}}
    for name, value in VALUES.items():
        found["values"][name] = {"value": _shown(value), "encoding": encode(value).hex()}
    for name, state in STATES.items():
        document = Document(TYPES_KNOWN)
        for section, value in state.items():
            document[section] = value
        found["states"][name] = {section: digest.hex() for section, digest in document.digests()}
    return found | {"format": vectors()}


def chain_of_manifests() -> tuple[list[Manifest], list[bytes]]:
    """Three checkpoints, each the parent of the next, and their operations."""
    time_us, parent = 1_700_000_000_000_000, b""
    made, operations = [], []
    for depth, label in enumerate(["", "second", "\u2603"], 1):
        value = encode(f"value {depth}")
        some = [Operation(time_us - 1500, 0, ["n"], (value,)), Operation(time_us, 2, ["list"], (0, 0, [value]))]
        operations.append(encode_operations(some, time_us))
        sections = [("n", b"n" * 32), ("list", bytes([depth]) * 32)]
        parts = (digest(b"operations", operations[-1]), (depth, b"c" * 32), b"m" * 32, label, time_us, b"r" * 16)
        kind, target = ("undo", parent) if depth == 3 else ("checkpoint", b"")
        made.append(Manifest(parent, depth, [("state", sections)], *parts, kind, target))
        parent = identity(made[-1].encode())
    return made, operations


def vectors() -> dict:
    """What follows from the page in one way only, and one segment as it was written once."""
    manifests, operations = chain_of_manifests()
    raw = [one.encode() for one in manifests]
    leaf = b"l\0" + b"".join(encode(f"value {depth}") for depth in (1, 2, 3)) + (3).to_bytes(4)
    segment = pack([5, 9, 7], raw, operations, {node_digest(leaf): leaf}, [b"x" * 32])
    keyed = Keyed(KEY, b"u" * 16)
    row = (5, mark_of(identity(raw[0])), b"key", 0, 3, 1, 0, 1, 2)
    records = [b"\x81\xa1t\xa4note", b"\x82\xa1t\xa3end\xa2at\x07"]
    records.append(join_body(b"\x82\xa1t\xa3end\xa1v\x03", encode("ok")))
    records.append(body_proof(records[-1]))
    chains = [b""]
    for body in records:
        chains.append(link(chains[-1], body_digest(body)))
    return {
        "manifests": [one.hex() for one in raw],
        "manifest with files": manifests[1]
        ._replace(layers=[*manifests[1].layers, ("workspace", [("files", b"f" * 32), ("marked", b"m" * 32)])])
        .encode()
        .hex(),
        "file": (
            encode_path(b"src/\xff.py") + encode_entry(Entry(0o100644, Content(b"d" * 32, 5, (b"c" * 32,))))
        ).hex(),
        "manifest with cost": manifests[1]._replace(cost=Cost("adaptive", 2700, 840, 1200, 1)).encode().hex(),
        "ids": [identity(one).hex() for one in raw],
        "mark": mark_of(identity(raw[0])),
        "operations": [one.hex() for one in operations],
        "payload": pack_payload(raw[0], operations[0]).hex(),
        "node": leaf.hex(),
        "segment": [part.hex() for part in segment],
        "records": [body.hex() for body in records],
        "chains": [one.hex() for one in chains],
        "row": [part.hex() if isinstance(part, bytes) else part for part in row],
        "sum": PLAIN.stored("checkpoint", *row)[-1].hex(),
        "keyed row": [part.hex() if isinstance(part, bytes) else part for part in keyed.stored("checkpoint", *row)],
        "tag name": keyed.name("tag", b"kept", 7).hex(),
        "cell": witness._packed(witness.Noted(7, 8, 9, -10), b"").hex(),
    }


def _shown(value: object) -> str:
    """For people: the same in every run, so sets are sorted."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({sorted(value, key=repr)!r})"
    return ascii(value)


def describe(store: holdfast.Store) -> dict:
    """What a later version must find. The digests cover every byte of every state."""
    found: dict = {}
    for info in store.agents():
        agent = store.agent(info.name, readonly=True)
        rows = store._db.view.branches(agent._row.a)
        found[info.name] = {
            "branches": {row.name: row.id.hex() for row in rows},
            "tags": {name: checkpoint.id for name, checkpoint in agent.tags().items()},
            "events": " ".join(entry.body["what"] for entry in reversed(store._db.view.log(agent._row.a))),
            "lines": {row.name: _line(row, line_of(store, info.name, row.name)) for row in rows},
            "checkpoints": {
                c.id: " ".join([f"#{c.depth}", c.kind, c.validity, c.digest, c.label]) for c in agent.log(all=True)
            },
        }
    return found


def _line(row: Branch, line: Line) -> str:
    """The chain digest covers every byte of every record."""
    return " ".join([row.chain.hex(), *(record.TYPE for _, record in line.records())])


def main() -> None:
    here = Path(__file__).parent
    if sys.argv[1:] == ["golden"]:
        (here / "golden.json").write_text(json.dumps(golden(), indent=1, ensure_ascii=True) + "\n")
        return
    target = here / f"store-v{FORMAT_VERSION}"
    # Where and with what it was made does not belong into a file that is kept for ever.
    metadata._process = lambda: {"format": FORMAT_VERSION, "holdfast": "0.1.0", "python": "3", "program": "make_store"}
    described = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, key in STORES.items():
            build(Path(directory, name), key)
            with holdfast.open(Path(directory, name), readonly=True, types=TYPES, key=key or False) as store:
                described[name] = describe(store)
        holdfast.keys.add(Path(directory, "encrypted"), PASSPHRASE, key=KEY)
        target.with_suffix(".json").write_text(json.dumps(described, indent=1, ensure_ascii=True) + "\n")
        with tarfile.open(target.with_suffix(".tar.xz"), "w:xz") as archive:
            for file in sorted(Path(directory).rglob("*")):
                if file.name not in {"store.db-wal", "store.db-shm"}:
                    archive.add(file, arcname=file.relative_to(directory), recursive=False, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
