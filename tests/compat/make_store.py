"""Writes the store that is kept under tests/compat/, and what is in it as JSON.

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
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

import holdfast
from holdfast.agent import metadata
from holdfast.agent.names import name_key
from holdfast.run import records as rec
from holdfast.run.arguments import stow
from holdfast.run.stored import StoredLine, entries
from holdfast.store import sealing
from holdfast.store.upgrade import FORMAT_VERSION


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
    for number in range(8):
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
    agent.mark("message 3", "suspect", "an example")
    agent.rollback("large")
    agent.state["bulk"] = bytes(300_000)
    agent.state["messages"].clear()
    agent.checkpoint("other line")
    side = agent.branch("try/b", at="message 1")
    side.state["messages"].append("on a branch")
    side.checkpoint("side")
    second = store.agent("second")
    second.state["n"] = 1
    second.checkpoint("only")
    second.close()


def share(store: holdfast.Store) -> None:
    """A clone, an agent that was removed, checkpoints that one of two forgot, others that both did."""
    agent = store.agent("user@example.com")
    agent.close()
    side = store.agent("user@example.com", branch="try/b")
    side.close()
    store.clone("user@example.com", "clone")
    with store.agent("clone") as clone:
        clone.state["messages"].append("of the clone")
        clone.checkpoint("of the clone")
    numbers = {checkpoint.label: checkpoint._row.n for checkpoint in clone_log(store)}
    rows = {info.name: store._catalog.agent(name_key(info.name)) for info in store.agents()}
    store._forget(rows["clone"], {numbers["message 2"], numbers["changed"]})
    store._forget(rows["user@example.com"], {numbers["changed"]})
    gone = store.agent("gone")
    gone.state["n"] = 2
    gone.checkpoint("gone")
    store.remove("gone")


def act(store: holdfast.Store) -> None:
    """Records of every kind, a branch that inherits some, a clone, and what is left of a line whose agent is gone."""
    agent = store.agent("doer")
    agent.state["n"] = 0
    start = bytes.fromhex(agent.checkpoint("start").id)
    journal = agent._writer.journal
    at = 1_700_000_000_000_000
    long = stow([f"{number}: a long result" for number in range(2_000)], store._registry)
    bulk = stow(bytes(300_000), store._registry)
    args = stow({"what": "flight", "step": Step("one")}, store._registry).value
    print_ = b"f" * 32
    journal.append(entries(rec.Begin(at, "r1", "trip", args, print_, start, code="c" * 64, generation=1)), flush=True)
    journal.append(
        entries(
            rec.Done(at + 1, "r1", "0", "value", 0, "look", "read", args, [[["history"], b"h" * 32, 7]], print_, at),
            rec.Done(at + 2, "r1", "1", "value", 0, "read", "read", args, None, print_, at, long.value),
        ),
        nodes=long.nodes,
        flush=False,
    )
    journal.append(entries(rec.Intent(at + 3, "r1", "2", "book", "write", args, print_, "k" * 32, 1, 1)), flush=True)
    journal.append(entries(rec.Progress(at + 4, "r1", "2", b"\x05", 4)), flush=True)
    journal.append(
        entries(rec.Done(at + 5, "r1", "2", "value", 4, value=bulk.value)),
        nodes=bulk.nodes,
        chunks=bulk.chunks,
        flush=True,
    )
    journal.append(entries(rec.Intent(at + 6, "r1", "3", "pay", "write", args, print_, "l" * 32, 1, 1)), flush=True)
    journal.append(entries(rec.Doubt(at + 7, "r1", "3", 7, "timed out \ud800")), flush=True)
    journal.append(entries(rec.Decision(at + 8, "r1", "3", 7, "not-done", "a person", "looked", b"\xc0")), flush=True)
    fault = ("Refused", "Refused", "no", stow(("no", 5), store._registry).value)
    journal.append(
        entries(rec.Done(at + 9, "r1", "4", "error", 0, "look", "read", args, None, print_, at, None, fault)),
        flush=False,
    )
    journal.append(
        entries(rec.Wait(at + 10, "r1", "5", "signal", "go", at + 99), rec.Done(at + 11, "r1", "5", "value", event=3)),
        flush=True,
    )
    journal.append(
        entries(rec.Cut(at + 12, "r1", "6", [2, 3], "look", "read"), rec.Note(at + 13, "", "mode", "calm")), flush=True
    )
    agent.state["n"] = 1
    writer = agent._writer
    saved = writer.capture(
        agent._document,
        "saved",
        note=lambda made: entries(rec.Saved(at + 14, "r1", "7", made._id, b"d" * 32, ["plan"])),
    )
    writer.finish(agent._document, saved)
    journal.append(
        entries(rec.End(at + 15, "r1", "finished", long.value), rec.RolledBack(at + 16, "", 0, start, keep=True)),
        flush=True,
    )
    side = agent.branch("aside", at="saved")
    side._writer.journal.append(entries(rec.Note(at + 17, "", "mode", "hasty")), flush=True)
    side.state["n"] = 2
    side.checkpoint("aside")
    side.close()
    agent.close()
    store.clone("doer", "heir")
    gone = store.agent("heir", branch="aside")
    gone._writer.journal.append(entries(rec.Note(at + 18, "", "mode", "of the heir")), flush=True)
    gone.checkpoint("of the heir")
    gone.close()
    store.clone("heir", "heir of the heir")
    store.remove("heir")


def line_of(store: holdfast.Store, name: str, branch: str) -> StoredLine:
    row = store._catalog.agent(name_key(name))
    return StoredLine(store._catalog, store._catalog.branch(row.a, name_key(branch)).b)


def clone_log(store: holdfast.Store) -> list[holdfast.Checkpoint]:
    return store.agent("clone", readonly=True).log(all=True)


# States whose section digests are golden: empty containers, order, types, leaves and index nodes of one and two levels.
STATES = {
    "empty containers": {"list": [], "dict": {}, "set": set(), "none": None},
    "order counts": {"b": {"y": 1, "x": 2}, "a": {"x": 2, "y": 1}},
    "types count": {"int": [1], "float": [1.0], "bool": [True]},
    "small": {"messages": [{"role": "user", "content": "hello"}], "set": {3, 1, 2}, "pair": (1, 2)},
    "several leaves": {"numbers": list(range(5_000))},
    "two levels": {"numbers": [number % 100 for number in range(600_000)]},
    "leaves cut by content": {"texts": [f"{number}: " + "text " * (number % 50) for number in range(2_000)]},
    "big inside": {"table": {"rows": {f"row {number}": "x" * 100 for number in range(400)}, "count": 400}},
    "dict of many": {"index": {f"key {number}": number for number in range(4_000)}},
    "set of many": {"members": {f"member {number}" for number in range(3_000)}},
    "bulk": {"bulk": bytes(300_000), "list": ["x" * 300_000]},
}


def golden() -> dict:
    from holdfast.codec.document import Document
    from holdfast.codec.types import REGISTRY as TYPES_KNOWN
    from holdfast.codec.values import encode

    found: dict = {"values": {}, "states": {}}
    for name, value in VALUES.items():
        found["values"][name] = {"value": _shown(value), "encoding": encode(value).hex()}
    for name, state in STATES.items():
        document = Document(TYPES_KNOWN)
        for section, value in state.items():
            document[section] = value
        found["states"][name] = {section: digest.hex() for section, digest in document.digests()}
    return found


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
        found[info.name] = {
            "branches": {name: agent.at(name).id for name in info.branches},
            "tags": {name: checkpoint.id for name, checkpoint in agent.tags().items()},
            "events": [event["what"] for event in agent.events()],
            "records": {name: _records(line_of(store, info.name, name)) for name in info.branches},
            "checkpoints": [
                c.to_json()
                | {"state": {name: holdfast.plain(c.state[name]) for name in ("messages", "n") if name in c.state}}
                for c in agent.log(all=True)
            ],
        }
    return found


def _records(line: StoredLine) -> dict:
    """The chain digest covers every byte of every record."""
    return {"chain": line.chain.hex(), "types": " ".join(record.TYPE for _, record in line.records())}


def main() -> None:
    here = Path(__file__).parent
    if sys.argv[1:] == ["golden"]:
        (here / "golden.json").write_text(json.dumps(golden(), indent=1, ensure_ascii=True) + "\n")
        return
    target = here / f"store-v{FORMAT_VERSION}"
    # Where and with what it was made does not belong into a file that is kept for ever.
    metadata._process = lambda: {"format": FORMAT_VERSION, "holdfast": "0.1.0", "python": "3", "program": "make_store"}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store"
        sealing.SEAL_CHECKPOINTS = 6
        with holdfast.open(path, types=TYPES) as store:
            fill(store)
            share(store)
            act(store)
        with holdfast.open(path, readonly=True, types=TYPES) as store:
            target.with_suffix(".json").write_text(json.dumps(describe(store), indent=1, ensure_ascii=True) + "\n")
        with tarfile.open(target.with_suffix(".tar.xz"), "w:xz") as archive:
            for file in sorted(path.rglob("*")):
                if file.name not in {"store.db-wal", "store.db-shm"}:
                    archive.add(file, arcname=f"store/{file.relative_to(path)}", recursive=False, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
